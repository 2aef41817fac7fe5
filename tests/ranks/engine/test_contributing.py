"""The examples of CONTRIBUTING.md pass the checks of the built-in masks, balancers, strategies and kernels."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import BatchSharder, Ring, Ulysses, context_attention, contiguous, head_tail
from cp_styles.comm.point_to_point import TransferError
from cp_styles.kernels import ReferenceKernel
from cp_styles.kernels.base import OtherBackward
from cp_styles.masks import Causal, Full
from cp_styles.strategies.moving_kv import MovingKV
from cp_styles.testing import run_ranks
from cp_styles.verify import verify
from tests import cases
from tests.cases import Case, judge, sensible
from tests.covering import at_night, in_parts
from tests.layouts import layouts
from tests.oracle import MASKS, MaskValue, allowed, attention_inputs, error, expected_attention, mask_cases, randn
from tests.ranks.attention_case import cp_mesh
from tests.seeds import shown
from tests.tables import KERNELS, LAYOUTS, STRATEGIES
from tests.unit.test_plan import check_plans

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
# The dimension of each example, and the value whose rows of the grid it takes over.
TABLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mask": ("mask", MASKS, "causal"),
    "mask with gaps": ("mask", MASKS, "causal"),
    "balancer": ("layout", LAYOUTS, "head_tail"),
    "strategy": ("strategy", STRATEGIES, "ring"),
    "kernel": ("kernel", KERNELS, "reference"),
}


def block(kind: str, what: str) -> str:
    return re.search(rf"<!-- {kind}: {what} -->\n```python\n(.*?)```", TEXT, re.DOTALL)[1]


def example(what: str, right: str = "", wrong: str = "") -> dict[str, Any]:
    """The example's row of a table; with ``right`` replaced by ``wrong`` in its code."""
    source = block("object", what)
    assert not right or source.count(right) == 1
    names: dict[str, Any] = {}
    exec(source.replace(right, wrong) if right else source, names)
    return eval(f"{{{block('row', what)}}}", names)


@pytest.fixture
def enter(monkeypatch):
    """Puts an example into its table. A mask is told the sizes, and is put there with its oracle."""

    def put(what: str, name: str, entry: Any) -> None:
        if what.startswith("mask"):
            mask, sees = entry
            entry = lambda sizes: MaskValue(mask, allowed(sees, sizes.length, sizes.length))  # noqa: E731
        monkeypatch.setitem(TABLES[what][1], name, entry)
        cases._mask_of.cache_clear()

    return put


def rows_of(what: str, name: str, ranks: int) -> list[Case]:
    """Rows of the grid with the example in the place of a built-in one, in float64 with a backward, on these ranks."""
    dimension, _, taken = TABLES[what]
    # Without agreement a balancer, which a block always has, is refused.
    values = {dimension: name, "dtype": "float64", "ranks": ranks, "backward": "once", "autocast": False}
    values |= {"agreement": "every call"}
    rows = (replace(case, **values) for case in cases.grid() if getattr(case, dimension) == taken)
    return [case for case in dict.fromkeys(rows) if sensible(case) == case]


def wrong_rows(rows: list[Case]) -> list[str]:
    return [f"{verdict.words}: {shown(case)}" for case in rows if (verdict := judge(case)).kind != "exact"]


@in_parts(8)
@pytest.mark.parametrize("ranks", [2, 3, *at_night(1, 4)])
@pytest.mark.parametrize("what", TABLES)
def test_the_rows_of_the_grid(what: str, ranks: int, part: int, enter):
    """Out and gradients, with every other dimension of the grid: other rows for each number of ranks."""
    entries = example(what)
    for name, entry in entries.items():
        enter(what, name, entry)
        rows = rows_of(what, name, ranks)
        first = 3 * (ranks - 1 + 4 * part) % len(rows)
        assert wrong_rows((rows * 2)[first : first + 3]) == []
    if what == "kernel":
        assert set(entries["counting"].calls) == {"backward"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_them_together(ranks: int, enter):
    chosen = {}
    for what, (dimension, *_) in TABLES.items():
        name, entry = next(iter(example(what).items()))
        enter(what, name, entry)
        chosen[dimension] = name
    rows = [Case(**chosen, heads=(6, 3), ranks=ranks, length=length, door=door)
            for length, door in ((5, "function"), (23, "module"), (137, "style"))]  # fmt: skip
    assert wrong_rows(rows) == []


@pytest.mark.parametrize("what", ["mask", "mask with gaps"])
@settings(max_examples=10)
@given(layouts())
def test_every_attended_pair_once_under_the_mask(what: str, layout):
    for mask, sees in example(what).values():
        check_plans(layout, layout, mask, allowed(sees, layout.length, layout.length))


@settings(max_examples=10)
@given(st.integers(5, 40), st.integers(1, 6), st.data())
def test_every_attended_pair_once_in_the_layout(length: int, ranks: int, data: st.DataObject):
    cases = mask_cases(length)
    case = cases[data.draw(st.sampled_from(sorted(cases)))]
    for balancer in example("balancer").values():
        layout = balancer(case.mask)(length, ranks)
        assert (layout.length, layout.ranks) == (length, ranks)
        check_plans(layout, layout, case.mask, allowed(case.sees, length, length))


@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_balancer_has_fewer_positions_than_ranks(length: int):
    for balancer in example("balancer").values():
        assert sum(balancer(Full())(length, 5).lengths) == length


def test_tiles_of_the_kernel_are_attention():
    """As every kernel of tests/unit/test_kernels.py: causal, with a bias, and with rows that see nothing."""
    inputs, cotangent = attention_inputs(length=7, kv_heads=2)
    bias = randn(9, 7, 7).masked_fill(randn(8, 7, 7) > 0.5, float("-inf"))
    bias[3] = float("-inf")
    causal = allowed(lambda p, j: j <= p, 7, 7)
    for kernel in example("kernel").values():
        for options, expected in (
            ({"causal": True, "bias": None}, expected_attention(inputs, cotangent, causal, scale=0.5)),
            ({"causal": False, "bias": bias}, expected_attention(inputs, cotangent, bias=bias, scale=0.5)),
        ):
            out, lse = kernel.forward(*inputs, **options, scale=0.5)
            found = [out, *kernel.backward(cotangent, *inputs, out, lse, **options, scale=0.5)]
            assert max(error(*pair) for pair in zip(found, expected, strict=True)) < 1e-14


class _Cumulative(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.cumsum(1))


@pytest.mark.parametrize("kept", [False, True])
def test_the_style_is_proved_by_verify(kept: bool):
    """And one that asks the mesh is told why it has the wrong size."""
    names: dict[str, Any] = {}
    source = block("object", "style")
    exec(source.replace("get_peers(mesh).size", "mesh.size()") if kept else source, names)
    model = nn.Sequential(nn.Embedding(9, 8), _Cumulative(8, 9))

    def step(model: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharder = BatchSharder(mesh)
        batch = sharder(tokens)
        loss = batch.loss(model(batch.tokens))
        loss.backward()
        sharder.sum_gradients(model)
        return loss

    def on(rank: int) -> str:
        mine, mesh = copy.deepcopy(model), cp_mesh(2)
        parallelize_module(mine, mesh, {"1": names["WholeSequence"](12)})
        return verify(mine, mesh, torch.arange(12)[None] % 9, step).line

    for found in run_ranks(on, 2, return_errors=True):
        assert ("verify runs the step with one rank" in str(found)) if kept else isinstance(found, str), found


SABOTAGE = {
    "mask": ("self.size + 1) * self.size", "self.size + 1) * self.size - 1"),
    "mask with gaps": ("% self.step == 0", "% self.step < 2"),
    "strategy": ("range(1, ranks)\n", "range(2, ranks)\n"),
    "kernel": ("return self.inner.backward(grad, q,", "return self.inner.backward(grad, q * 1.001,"),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_mistakes_are_noticed(what: str, enter):
    name, entry = next(iter(example(what, *SABOTAGE[what]).items()))
    enter(what, name, entry)
    assert wrong_rows(rows_of(what, name, 3)[:4])


def test_a_balancer_that_loses_positions_is_noticed():
    (balancer,) = example("balancer", "range(0, length, block)", "range(block, length, block)").values()
    with pytest.raises(ValueError, match="where position 0 comes next"):
        balancer(Full())(23, 3)


ROUNDS: dict[str, Any] = {
    "one is missing": lambda ranks: [(distance,) for distance in range(2, ranks)],
    "one is there twice": lambda ranks: [(1,), *((distance,) for distance in range(1, ranks))],
    "its own": lambda ranks: [range(ranks)],
    "around": lambda ranks: [range(1, ranks + 1)],
    "no groups": lambda ranks: list(range(1, ranks)),
}


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("around", [False, True])
def test_rounds_name_each_distance_once(rounds: str, around: bool):
    """An error of all ranks, also inside of another strategy."""
    found_rounds = ROUNDS[rounds]

    @dataclass(frozen=True)
    class Own(MovingKV):
        keep: int = 1

        def rounds(self, ranks: int) -> Any:
            return (remedy or found_rounds)(ranks)

    remedy: Callable[[int], Any] | None = None
    parts = [randn(at, 1, 4, 3, 4) for at in range(3)]
    ranks, strategy = (4, Ulysses(Own(), size=2)) if around else (3, Own())

    def on(rank: int) -> None:
        context_attention(*parts, cp_mesh(ranks), layout=contiguous(3 * ranks, ranks), strategy=strategy)

    of = 2 if around else 3
    for found in run_ranks(on, ranks, return_errors=True):
        assert isinstance(found, ValueError)
        words = rf"Own.rounds\({of}\) returned .* each of the distances 1 to {of - 1} once, such as (.*)$"
        example = re.search(words, str(found))
        assert example, found
        remedy = lambda ranks, example=example[1]: ast.literal_eval(example)  # noqa: E731
    run_ranks(on, ranks)


class Wrong(ReferenceKernel):
    """Another kernel, one of whose results is changed."""

    def __init__(self, phase: str, change: Any) -> None:
        object.__setattr__(self, "changes", {phase: change})

    def forward(self, *tensors: torch.Tensor, **options: Any) -> Any:
        return self.changes.get("forward", lambda x: x)(super().forward(*tensors, **options))

    def backward(self, *tensors: torch.Tensor, **options: Any) -> Any:
        return self.changes.get("backward", lambda x: x)(super().backward(*tensors, **options))


RESULTS: dict[str, tuple[str, Any]] = {
    "lse in 16 bits": ("forward", lambda found: (found[0], found[1].bfloat16())),
    "lse with a dim more": ("forward", lambda found: (found[0], found[1][..., None])),
    "rows first": ("forward", lambda found: (found[0].transpose(1, 2), found[1])),
    "out alone": ("forward", lambda found: found[0]),
    "on another device": ("forward", lambda found: (found[0].to("meta"), found[1])),
    "lse in 32 bits": ("forward", lambda found: (found[0], found[1].float())),
    "out in 16 bits": ("forward", lambda found: (found[0].bfloat16(), found[1])),
    "out of one row": ("forward", lambda found: (found[0][:, :, :1], found[1])),
    "dq in 16 bits": ("backward", lambda found: (found[0].bfloat16(), *found[1:])),
    "no gradient of values": ("backward", lambda found: (*found[:2], None)),
    "gradients in another order": ("backward", lambda found: (found[2], found[0], found[1])),
}


@pytest.mark.parametrize("strategy", [Ring(), Ulysses()])
@pytest.mark.parametrize("result", RESULTS)
def test_what_a_kernel_from_outside_returns_is_checked(result: str, strategy: Any):
    """With its name. A rank that waits for the messages of one that has left says so."""
    phase, change = RESULTS[result]
    _expect_refusal(phase, change, strategy)


@pytest.mark.parametrize("result", RESULTS)
def test_later_results_are_checked_too(result: str):
    phase, change = RESULTS[result]
    seen = Counter()

    def from_the_second(found: Any) -> Any:
        seen[get_ident()] += 1
        return change(found) if seen[get_ident()] > 1 else found

    _expect_refusal(phase, from_the_second, Ring())


def _expect_refusal(phase: str, change: Any, strategy: Any) -> None:
    inputs, layout = [randn(at, 2, 2, 13, 4 if at < 2 else 6) for at in range(3)], head_tail(13, 2)

    def on(rank: int) -> None:
        leaves = [layout.shard(x, 2, rank).requires_grad_() for x in inputs]
        options = {"layout": layout, "strategy": strategy, "kernel": Wrong(phase, change)}
        context_attention(*leaves, cp_mesh(2), **options).sum().backward()

    found = run_ranks(on, 2, return_errors=True)
    named = [each for each in found if isinstance(each, TypeError)]
    assert named, found
    assert all(isinstance(each, TypeError | TransferError) for each in found), found
    assert all(re.match(rf"Wrong.{phase} returned .*, and must return (out|dq) \(2, \d, ", str(x)) for x in named), (
        found
    )
    assert all(("logsumexp" in str(x)) == (phase == "forward") for x in named), found


def test_a_kernel_that_leaves_tiles_to_the_next_one():
    """It is asked because its class defines ``takes``, also around another kernel."""
    computed: list[bool] = []

    class Plain(ReferenceKernel):
        def takes(self, *tensors: torch.Tensor, causal: bool, **options: Any) -> bool:
            return not causal

        def forward(self, *tensors: torch.Tensor, causal: bool, **options: Any) -> Any:
            computed.append(causal)
            return super().forward(*tensors, causal=causal, **options)

    class Around(OtherBackward):
        takes, forward, backward = Plain.takes, OtherBackward.forward, ReferenceKernel.backward

    assert not Around(ReferenceKernel()).takes_all
    inputs, layout = [randn(at, 1, 2, 12, 4) for at in range(3)], contiguous(12, 2)

    def on(rank: int) -> torch.Tensor:
        parts = [layout.shard(x, 2, rank) for x in inputs]
        return context_attention(*parts, cp_mesh(2), mask=Causal(), layout=layout, kernel=Plain())

    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert error(torch.cat(run_ranks(on, 2), 2), expected) < 1e-14
    assert computed == [False]  # the second rank with the keys of the first
