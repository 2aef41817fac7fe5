"""The figures of an explanation are the figures of real runs: bytes, messages, kernel calls and memory."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_styles import (
    AllGather,
    Causal,
    Dense,
    Documents,
    Mask,
    PerRow,
    Ring,
    SequenceLayout,
    Tree,
    Ulysses,
    by_work,
    context_attention,
    contiguous,
    head_tail,
    per_document_head_tail,
    striped,
)
from cp_styles.comm import point_to_point
from cp_styles.comm.agreement import WIDTH
from cp_styles.explain import explain, explain_calls
from cp_styles.explain.events import Phase, Transfer
from cp_styles.plan import make_plan
from cp_styles.plan.tiles import Cover
from cp_styles.strategies import Strategy
from cp_styles.testing import CommunicationTrace, MemoryTrace, run_ranks
from tests.covering import in_parts
from tests.oracle import mask_cases
from tests.ranks.attention_case import Core, cp_mesh, parallel
from tests.varlen_op import Ops

LENGTH, HEADS, KV_HEADS, DIM = 137, 6, 3, 16
DOCUMENTS = (1, 68, 1, 67)
STRATEGIES: tuple[Strategy, ...] = (
    Ring(),
    Ring(keep=0),
    Ring(keep=3),
    AllGather(),
    AllGather(keep=0),
    Ulysses(),
    Ulysses(size=2),
    Ulysses(inner=AllGather(keep=0), size=2),
)
MASKS: dict[str, Mask] = {
    **{name: case.mask for name, case in mask_cases(LENGTH).items()},
    "dense": Dense(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()),
    "short branches": Tree((17, *[4] * 30), (-1, *[0] * 30)),
    "rows": PerRow((Documents((60, 77)), Causal())),
}
LAYOUTS = {
    "head_tail": lambda ranks, mask: head_tail(LENGTH, ranks),
    "contiguous": lambda ranks, mask: contiguous(LENGTH, ranks),
    "striped": lambda ranks, mask: striped(LENGTH, ranks, block=5),
    "documents": lambda ranks, mask: per_document_head_tail(LENGTH, ranks, documents=DOCUMENTS),
    "by_work": lambda ranks, mask: by_work(LENGTH, ranks, mask=mask) if not mask.has_bias else head_tail(LENGTH, ranks),
}


class Calls(Ops):
    """Counts the calls of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func._schema.name and func.namespace == "aten":
            self.kernels.append(func.overloadpacket.__name__)
        return super().__torch_dispatch__(func, types, args, kwargs)


def measured(attend: Any, inputs: list[torch.Tensor], grad: torch.Tensor, ranks: int) -> dict[str, Any]:
    agreement = [("all_gather", WIDTH * 8 * (ranks - 1))]
    found: dict[str, Any] = {}
    inputs = [x.requires_grad_() for x in inputs]
    with MemoryTrace() as memory:
        out = attend(*inputs)
        found |= {"kept": memory.live, "forward": memory.peak}
        memory.reset()
        out.backward(grad)
    found["backward"] = memory.peak
    del out
    for x in inputs:
        x.grad = None
    with CommunicationTrace() as forward, Calls() as kernels:
        out = attend(*inputs)
    with CommunicationTrace() as backward:
        out.backward(grad)
    found["kernels"] = kernels.kernels
    for name, trace in (("sent", forward), ("sent back", backward)):
        found[name] = [event for event in trace.events if [event] != agreement]
    return found


def sends(phase: Phase) -> list[tuple[str, int]]:
    return [("send", x.nbytes) for x in phase.events if isinstance(x, Transfer) and x.outgoing and x.nbytes]


def as_sent(messages: list[tuple[str, int]], events: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The messages with the next ones together where an all-to-all has moved them: an event has its bytes alone."""
    left, made = list(messages), []
    for name, nbytes in events:
        together = 0
        while left and (not together or (name == "all_to_all" and together < nbytes)):
            together += left.pop(0)[1]
        made.append((name, together))
    return made + left


CASES = [
    (strategy, name, list(LAYOUTS)[(index + index // len(MASKS)) % len(LAYOUTS)])
    for index, (strategy, name) in enumerate(product(STRATEGIES, MASKS))
]


@in_parts(31)
@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.float64), (2, torch.bfloat16), (4, torch.float32)])
def test_explained_is_measured(ranks: int, dtype: torch.dtype, part: int, monkeypatch: pytest.MonkeyPatch):
    """Every message in order, every kernel call, and the peaks; each mask and each strategy, with layouts in turn.

    MemoryTrace also sees what the ranks tell each other and what a call says to its backward: some hundred bytes. And
    of a mask the positions of a tile, which are int64, and booleans for its pairs, three times. It does not see the
    numbers of the key heads that Ulysses pairs with query heads.
    """
    cases = [case for case in CASES if ranks > 1 or case[2] == "head_tail"]
    cases = [case for case in cases if ranks % 2 == 0 or getattr(case[0], "size", None) is None]
    cases = cases[(part + 5 * ranks) % 31 :: 31]  # no common factor with the number of masks; others for other ranks
    if part % 2 == 0:  # as large blocks of heads
        monkeypatch.setattr(point_to_point, "MOST_OVER_GLOO", 0)

    def on(rank: int) -> list[dict[str, Any]]:
        found = []
        for strategy, name, cut in cases:
            layout = LAYOUTS[cut](ranks, MASKS[name])
            tensors = [
                torch.ones(2, layout.lengths[rank], heads, DIM, dtype=dtype).transpose(1, 2)
                for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            ]
            group = dist.group.WORLD
            attend = partial(context_attention, mesh=group, strategy=strategy, layout=layout, mask=MASKS[name])
            found.append(measured(attend, tensors[:3], tensors[3], ranks))
        return found

    results = run_ranks(on, ranks)
    for index, (strategy, name, cut) in enumerate(cases):
        mask = MASKS[name]
        layout: SequenceLayout = LAYOUTS[cut](ranks, mask)
        shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "batch": 2, "dtype": dtype, "device": "cpu"}
        made = explain(LENGTH, ranks=ranks, layout=layout, mask=mask, strategy=strategy, **shape)
        for rank, run in made.runs.items():
            found, where = results[rank][index], (strategy, name, cut, rank)
            for phase, events in ((run.forward, found["sent"]), (run.backward, found["sent back"])):
                assert events == as_sent(sends(phase), events), where
            assert found["kernels"] == [call.kernel for call in run.forward.calls], where
            explicit = any(call.cover == "partial" for call in run.forward.calls)
            rows = max(made.layout.lengths)
            # Heads that are copied in float32 are a tile each. While one is made, the one before has its mask.
            masks = 3 + 4 * (dtype == torch.bfloat16)
            beside = 1024 + explicit * (64 * rows + masks * rows * LENGTH)
            # A mask of a user computes distances of positions and remainders of them, in int64.
            pairs = max(queries * keys for call in run.forward.calls for *_, queries, keys in call.tiles)
            beside += 2 * 8 * pairs * name.startswith("dilated")
            # The logsumexp of a range of rows, which is kept for the next tile with these queries.
            beside += 2 * HEADS * rows * (8 if dtype == torch.float64 else 4)
            # The thread of gloo holds the sent and received blocks of an all-to-all until it is run again.
            at_once = [nbytes for way, nbytes in found["sent"] + found["sent back"] if way == "all_to_all"]
            beside += 2 * sum(at_once)
            for what, mine in (
                ("kept", sum(run.forward.live_at_end.values())),
                ("forward", run.forward.peak),
                ("backward", run.backward.peak),
            ):
                assert -beside * explicit - 8 * HEADS <= found[what] - mine <= beside, (what, found[what], mine, where)


def test_short_branches_of_a_tree():
    """Tiles of the second band have explicit masks. Messages, and the pairs of all heads, are as in the plan."""
    mask, shape = MASKS["short branches"], {"heads": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    made = explain(LENGTH, ranks=3, mask=mask, **shape)
    for rank, run in made.runs.items():
        plan = make_plan(made.layout, made.layout, mask, rank)
        tiles = [tile for part in plan.parts for tile in part.tiles]
        assert 1 in {tile.band for tile in tiles if tile.cover is Cover.PARTIAL}
        assert sorted(call.pairs for call in run.forward.calls) == sorted(2 * tile.pairs for tile in tiles)
        received = [x.nbytes for x in run.forward.events if isinstance(x, Transfer) and not x.outgoing]
        assert sum(received) == plan.received_rows * 2 * 2 * 16 * 4


def test_ranges_of_a_short_causal_tile():
    """The backward of CPU's kernel computes a causal tile of 384 to 640 rows in four ranges, with explicit masks."""
    made = explain(512, ranks=1, heads=2, head_dim=16, dtype=torch.float32, device="cpu").runs[0]

    def on(rank: int) -> tuple[int, list[str]]:
        q, k, v = (torch.ones(1, 512, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3))
        attend = partial(context_attention, q, k, v, dist.group.WORLD, mask=Causal())
        grad = torch.ones(1, 512, 2, 16).transpose(1, 2)
        out = attend()
        with Calls() as calls:
            out.backward(grad)
        q.grad = k.grad = v.grad = out = None
        with MemoryTrace() as memory:
            out = attend()
            memory.reset()
            out.backward(grad)
        return memory.peak, calls.kernels

    ((peak, kernels),) = run_ranks(on, 1)
    assert kernels == [call.kernel for call in made.backward.calls]
    assert len(kernels) == 4
    assert 0 <= peak - made.backward.peak < 1024


def test_calls_of_a_module_are_explained():
    """A live call through a style says the same as an explanation from shapes alone."""
    expected = explain(16, ranks=2, heads=4, head_dim=8, dtype=torch.float32, device="cpu", strategy=AllGather())

    def on(rank: int) -> list[str]:
        core = parallel(Core(), cp_mesh(2), strategy=AllGather())
        with explain_calls() as calls:
            for _ in range(3):
                core(*(torch.ones(1, 4, 8, 8) for _ in range(3)))
        core(*(torch.ones(1, 4, 8, 8) for _ in range(3)))  # not listened to
        return [str(call) for call in calls]

    assert run_ranks(on, 2) == [[str(expected)]] * 2
