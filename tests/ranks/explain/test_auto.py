"""Auto: exact as what it chooses, the same choice on every rank, and the one that is predicted to be the fastest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cp_styles import AllGather, Causal, Documents, Ring, Ulysses, context_attention, contiguous, head_tail
from cp_styles.explain import CPU, H100, Auto, ChannelShapes, RowShapes, Shapes, StateShapes, explain, explain_hybrid
from cp_styles.explain.candidates import layouts_for
from cp_styles.testing import run_ranks
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, parallel, run_attention

# A machine on which messages cost nothing, and one on which every message costs a second.
FREE = replace(CPU, bandwidth=1e18, latency=0.0)
SLOW = replace(CPU, latency=1.0)


@pytest.mark.parametrize("hardware", [FREE, SLOW])
@pytest.mark.parametrize("door", ["function", "style"])
def test_auto_is_exact(hardware, door: str):
    problem = Problem(length=29)

    def on(rank: int) -> list[float]:
        mesh, strategy = cp_mesh(4), Auto(hardware)
        if door == "style":
            attend = parallel(Core(), mesh, strategy=strategy)
        else:
            attend = partial(context_attention, group=mesh, strategy=strategy, mask=Causal())
        return run_attention(attend, problem, rank, 4)

    assert max(max(errors) for errors in run_ranks(on, 4)) < EXACT


def test_the_fastest_is_chosen():
    shapes = Shapes(4, 4, 16, 16, torch.float32, torch.device("cpu"))
    layout, candidates = head_tail(512, 4), (Ring(), AllGather(), Ulysses())
    for hardware in (FREE, SLOW, CPU):
        made = Auto(hardware, candidates).choice((layout, layout), Causal(), shapes)
        times = {}
        for strategy in candidates:
            (rank,) = made.runs
            found = explain(
                512, ranks=4, heads=4, head_dim=16, dtype=torch.float32, strategy=strategy, hardware=hardware, rank=rank
            )
            times[strategy] = sum(entry.total for entry in found.seconds)
        assert times[made.strategy] == min(times.values())


def test_auto_inside_a_compiled_model():
    problem = Problem(length=29)

    def on(rank: int) -> list[float]:
        core = torch.compile(parallel(Core(), cp_mesh(2), strategy=Auto(FREE)), backend="aot_eager", fullgraph=True)
        return run_attention(core, problem, rank, 2)

    assert max(max(errors) for errors in run_ranks(on, 2)) < EXACT


@pytest.mark.parametrize("mask", [Causal(), Causal() & Documents([300, 100, 624])], ids=["causal", "documents"])
def test_the_layout_that_is_chosen_is_the_fastest(mask):
    """Of those that suit the mask, with the strategy that is the fastest for each."""
    shapes, auto = Shapes(4, 4, 16, 16, torch.float32, torch.device("cpu")), Auto(CPU, (Ring(), AllGather()))
    times = {}
    for name, balancer in layouts_for(mask).items():
        layout = balancer(1024, 4)
        made = auto.choice((layout, layout), mask, shapes)
        times[name] = sum(entry.total for entry in made.seconds)
    best = min(times, key=times.__getitem__)
    assert auto.layout(1024, 4, mask=mask, shapes=shapes) == layouts_for(mask)[best](1024, 4)
    assert times[best] < max(times.values())


def test_layouts_of_a_hybrid():
    """Attention of many tokens wants its work balanced, many recurrences want few parts."""
    shapes, states = Shapes(16, 2, 64, 64, torch.bfloat16, torch.device("cuda")), StateShapes(32, 128, 128)
    auto, given = Auto(H100, (Ring(),)), {"mask": Causal(), "shapes": shapes}
    size, ranks = 2**17, 8
    assert auto.layout(size, ranks, **given) == head_tail(size, ranks)
    assert auto.layout(size, ranks, **given, states=states, layers=(1, 0)) == head_tail(size, ranks)
    assert auto.layout(size, ranks, **given, states=states, layers=(1, 1000)) == contiguous(size, ranks)
    choices = explain_hybrid(size, ranks=ranks, states=states, layers=(4, 12), width=1024, hardware=H100, **given)
    assert [each.total for each in choices] == sorted(each.total for each in choices)
    for each in choices:
        assert (each.changes == 0) == (each.attention_layout == each.state_layout)
    two = next(x for x in choices if (x.attention_layout, x.state_layout) == ("head_tail", "contiguous"))
    one = next(x for x in choices if (x.attention_layout, x.state_layout) == ("head_tail", "head_tail"))
    # Some rank (number 1: sixteenths 1 and 14, contiguous 2 and 3) has no token in common, so all of its tokens move:
    # there and back, forward and backward, for 4 attentions, 2 KiB a token. Fewer states are sent.
    saved = max(states.sent(head_tail(size, ranks))) - max(states.sent(contiguous(size, ranks)))
    assert two.sent - one.sent == 4 * 4 * 2048 * size // ranks - 2 * 12 * saved
    assert saved > 0


def test_layouts_beside_convolutions_and_channels():
    """Many convolutions want few parts. What a kernel by channels sends is the same for any parts of equal size."""
    shapes = Shapes(16, 2, 64, 64, torch.bfloat16, torch.device("cuda"))
    auto, given = Auto(H100, (Ring(),)), {"mask": Causal(), "shapes": shapes}
    rows, channels, size = RowShapes(4, 2**24), ChannelShapes(4096, 2, 3, 64), 2**17
    assert auto.layout(size, 8, **given, states=rows, layers=(1, 10**5)) == contiguous(size, 8)
    assert auto.layout(size, 8, **given, states=channels, layers=(1, 10**5)) == head_tail(size, 8)


def test_other_hardware_on_one_rank_is_an_error_on_all():
    def on(rank: int):
        strategy = Auto(FREE if rank else SLOW)
        q = torch.ones(1, 4, 8, 8)
        return context_attention(q, q, q, cp_mesh(2), strategy=strategy)

    for error in run_ranks(on, 2, return_errors=True):
        assert isinstance(error, ValueError)
        assert "strategy" in str(error)
