"""The examples of CONTRIBUTING.md pass the checks of the built-in masks, balancers, strategies and kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_styles.mask import Full
from cp_styles.testing import run_ranks
from tests.covering import in_parts
from tests.cuda_ops import cuda_ops_on_cpu
from tests.layouts import layouts
from tests.oracle import allowed, attention_inputs, error, expected_attention, mask_cases, randn
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.ranks.engine.test_parity_grid import attempt, problem
from tests.ranks.parity_grid import KERNELS, LAYOUTS, MASKS, STRATEGIES, MaskValue, Row, grid, makes_sense
from tests.unit.test_plan import check_plans

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()

GRID = grid()  # made before an example joins its axes
# The axes of the grid, and the value on each whose rows an example takes over.
AXES = {
    "mask": (MASKS, "causal"),
    "layout": (LAYOUTS, "head_tail"),
    "strategy": (STRATEGIES, "ring"),
    "kernel": (KERNELS, "flash"),
}


def block(kind: str, what: str) -> str:
    return re.search(rf"<!-- {kind}: {what} -->\n```python\n(.*?)```", TEXT, re.DOTALL)[1]


def example(what: str, right: str = "", wrong: str = "") -> dict[str, Any]:
    """The example's row of the grid; with ``right`` replaced by ``wrong`` in its code."""
    source = block("object", what)
    assert not right or source.count(right) == 1
    names: dict[str, Any] = {}
    exec(source.replace(right, wrong) if right else source, names)
    return eval(f"{{{block('row', what)}}}", names)


def value_of(what: str, entry: Any) -> Any:
    """As the grid has it: masks are told the length and what the oracle is told."""
    if what != "mask":
        return entry
    mask, sees = entry
    return lambda length, *_: MaskValue(mask, allowed(sees, length, length))


def rows_of(what: str, name: str, ranks: int) -> list[Row]:
    """Rows of the grid with the example in the place of a built-in one, in float64, on so many ranks."""
    axis = "layout" if what == "balancer" else what
    taken = [row for row in GRID if getattr(row, axis) == AXES[axis][1]]
    rows = {replace(row, **{axis: name}, dtype=torch.float64, ranks=ranks): None for row in taken}
    return [row for row in rows if makes_sense(row)]


def wrong_rows(rows: list[Row], ranks: int) -> list[tuple[Row, float]]:
    for row in rows:  # the oracle's work is done once, not once a rank
        problem(row.mask, row.heads, row.dtype, row.length)

    def on(rank: int):
        mesh = cp_mesh(ranks)
        return [attempt(row, index, rank, mesh) for index, row in enumerate(rows)]

    wrong = []
    with cuda_ops_on_cpu():
        found = run_ranks(on, ranks)
    for row, *parts in zip(rows, *found, strict=True):
        expected, layout = problem(row.mask, row.heads, row.dtype, row.length)[2], row.cut()
        whole = [layout.unshard(by_rank, 2) for by_rank in zip(*parts, strict=True)]
        worst = max(error(*pair) for pair in zip(whole, expected, strict=True))
        if not worst <= EXACT:  # NaN is wrong too
            wrong.append((row, worst))
    return wrong


@in_parts(8)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("what", ["mask", "balancer", "strategy", "kernel"])
def test_the_rows_of_the_grid(what: str, ranks: int, part: int, monkeypatch):
    """Out and gradients in float64, through both doors, with every other axis of the grid: other rows for each number
    of ranks."""
    entries = example(what)
    for name, entry in entries.items():
        monkeypatch.setitem(AXES["layout" if what == "balancer" else what][0], name, value_of(what, entry))
        rows = rows_of(what, name, ranks)
        first = 4 * (ranks - 1 + 4 * part) % len(rows)
        assert wrong_rows((rows * 2)[first : first + 4], ranks) == []
    if what == "kernel":
        assert set(entries["counting"].calls) == {"backward"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_them_together(ranks: int, monkeypatch):
    chosen = {}
    for what in ("mask", "balancer", "strategy", "kernel"):
        axis = "layout" if what == "balancer" else what
        name, entry = next(iter(example(what).items()))
        monkeypatch.setitem(AXES[axis][0], name, value_of(what, entry))
        chosen[axis] = name
    rows = [Row(**chosen, heads=(6, 3), dtype=torch.float64, ranks=ranks, length=length) for length in (5, 23, 137)]
    assert wrong_rows([row for row in rows for _ in range(2)], ranks) == []


@settings(max_examples=25)
@given(layouts())
def test_every_attended_pair_once_under_the_mask(layout):
    for mask, sees in example("mask").values():
        check_plans(layout, layout, mask, allowed(sees, layout.length, layout.length))


@settings(max_examples=25)
@given(st.integers(5, 40), st.integers(1, 6), st.data())
def test_every_attended_pair_once_in_the_layout(length: int, ranks: int, data: st.DataObject):
    cases = mask_cases(length)
    case = cases[data.draw(st.sampled_from(sorted(cases)))]
    for balancer in example("balancer").values():
        layout = balancer(length, ranks, case.mask)
        assert (layout.length, layout.ranks) == (length, ranks)
        check_plans(layout, layout, case.mask, allowed(case.sees, length, length))


@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_balancer_has_fewer_positions_than_ranks(length: int):
    for balancer in example("balancer").values():
        assert sum(balancer(length, 5, Full()).lengths) == length


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


SABOTAGE = {
    "mask": ("self.size + 1) * self.size", "self.size + 1) * self.size - 1"),
    "strategy": ("range(1, ranks)\n", "range(2, ranks)\n"),
    "kernel": ("return self.inner.backward(grad, q,", "return self.inner.backward(grad, q * 1.001,"),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_mistakes_are_noticed(what: str, monkeypatch):
    name, entry = next(iter(example(what, *SABOTAGE[what]).items()))
    monkeypatch.setitem(AXES[what][0], name, value_of(what, entry))
    rows = [row for row in rows_of(what, name, 3) if row.length == 23][:4]
    assert wrong_rows(rows, 3)


def test_a_balancer_that_loses_positions_is_noticed():
    (balancer,) = example("balancer", "range(0, length, block)", "range(block, length, block)").values()
    with pytest.raises(ValueError, match="where position 0 comes next"):
        balancer(23, 3, Full())
