"""Attention in every combination of two values, of tests/cases.py, against the float64 oracle."""

from __future__ import annotations

import random
import re
from itertools import combinations
from pathlib import Path

import pytest

from tests import cases
from tests.cases import DIMENSIONS, GRID, Case, coverage, covering, grid, judge, pairs_of
from tests.doors import DOORS
from tests.seeds import shown
from tests.tables import divides

PARTS = 15


def check(rows: list[Case]) -> None:
    wrong = [f"{verdict.kind}: {verdict.words}: {shown(case)}" for case in rows if not (verdict := judge(case)).good]
    assert not wrong, f"{len(wrong)} wrong, such as\n" + "\n".join(wrong[:12])


@pytest.mark.parametrize("part", range(PARTS))
def test_grid(part: int):
    check([*grid()[part::PARTS]])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_every_two_values(part: int):
    """Of all dimensions."""
    names = tuple(name for name in DIMENSIONS if name != "compiled")
    check([*covering(names, compiled="no")[part::PARTS]])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", DIMENSIONS["strategy"])
@pytest.mark.parametrize("layout", DIMENSIONS["layout"])
def test_every_strategy_mask_and_layout(strategy: str, layout: str):
    """By the function, which takes all of them; other values at random."""
    fixed = {"door": "function", "strategy": strategy, "layout": layout}
    masks = (mask for mask in DIMENSIONS["mask"] if mask != "is_causal")
    drawn = (
        cases.drawn(random.Random(seed), seed, **fixed, mask=mask, ranks=2 + 2 * (seed % 2))
        for seed, mask in enumerate(masks)
    )
    check([*drawn])


def makes_sense(pair: tuple[tuple[str, object], tuple[str, object]]) -> bool:
    """Two ranks exchange heads, so two must divide the ranks. A door has kernels, or packs, or torch's own call."""
    found = dict(pair)
    door, mask = found.get("door", "function"), str(found.get("mask", "full"))
    takes = DOORS[str(door)].takes
    return (
        divides(str(found.get("strategy", "ring")), int(str(found.get("ranks", 2))))
        and ("kernel" in takes or found.get("kernel", "default") == "default")
        and (mask != "is_causal" or "sdpa" in takes or "door" not in found)
        and not ("packs" in takes and (mask.startswith(("prefix", "bool", "float", "BlockMask", "another"))))
    )


def test_what_the_grid_covers():
    """Every two values of any two dimensions meet that make sense together; the page shows it."""
    values = [(name, value) for name in GRID for value in dict.fromkeys(DIMENSIONS[name])]
    pairs = {pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    covered = set().union(*(pairs_of(case, GRID) for case in grid()))
    assert {pair for pair in pairs - covered if makes_sense(pair)} == set()
    page = (Path(__file__).parents[3] / "tutorials/support.md").read_text()
    (shown,) = re.findall(r"<!-- grid -->\n(.*?)\n<!-- end of grid -->", page, re.DOTALL)
    assert shown == coverage(), "put what python -m tests.cases prints into tutorials/support.md"
