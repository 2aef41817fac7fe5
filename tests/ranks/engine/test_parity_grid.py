"""Attention in every combination of two values, of tests/cases.py, against the float64 oracle."""

from __future__ import annotations

import random
from itertools import combinations
from math import inf

import pytest

from tests import cases
from tests import covering as of_rows
from tests.cases import DIMENSIONS, GRID, Case, covering, grid, judge, pairs_of, sensible
from tests.doors import DOORS
from tests.seeds import shown
from tests.tables import divides

PARTS, BY_DAY = 15, 5


def check(rows: list[Case]) -> None:
    wrong = [f"{verdict.kind}: {verdict.words}: {shown(case)}" for case in rows if not (verdict := judge(case)).good]
    assert not wrong, f"{len(wrong)} wrong, such as\n" + "\n".join(wrong[:12])


def in_turns() -> list[Case]:
    """The rows of the grid. In the first ones each value of a dimension is found."""
    rows = [*grid()]
    first = of_rows.covering(1, [tuple(getattr(row, name) for name in GRID) for row in rows])
    return [rows[index] for index in first] + [row for index, row in enumerate(rows) if index not in first]


@of_rows.in_parts(PARTS, by_day=BY_DAY)
def test_grid(part: int):
    rows = in_turns()
    check(rows[len(rows) * part // PARTS : len(rows) * (part + 1) // PARTS])


@of_rows.in_parts(6, by_day=1)
@pytest.mark.usefixtures("large_blocks")
def test_heads_in_messages(part: int):
    check([row for row in in_turns() if "Ulysses" in row.strategy][part::6])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_every_two_values(part: int):
    """A covering of all dimensions."""
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


NAMED = {
    "rows before heads": Case(door="style, [B, S, H, D]", ranks=3, mask="is_causal", masked_by="call", length=13,
                              heads=(4, 2), layout="head_tail"),
    "the logsumexp goes on to the loss": Case(door="function, [B, S, H, D]", ranks=4, mask="causal", length=21, batch=2,
                                              heads=(6, 2), dim=8, lse=True, layout="head_tail"),
    "expanded keys": Case(door="module", ranks=3, mask="is_causal", masked_by="call", length=13, heads=(4, 4),
                          strides="of one head"),
    "one head on four ranks": Case(ranks=4, strategy="Ulysses x Ulysses", mask="causal", length=12),
    "one head on four ranks, saved elsewhere": Case(ranks=4, strategy="Ulysses", mask="causal", length=12, batch=2,
                                                    checkpoint="saved elsewhere"),
    "a sink of minus infinity is none": Case(ranks=4, mask="causal", length=13, heads=(4, 2), sink=-inf),
    "another mask in each row, a bias and sinks": Case(mask="another in each row & float", length=21, batch=3,
                                                       heads=(4, 4), sink=1.0, layout="head_tail"),
    "scores that learn": Case(door="flex in module", ranks=3, mask="BlockMask", masked_by="call", length=60, batch=2,
                              heads=(4, 2), score="learned", lse=True, layout="head_tail"),
    "scores that mask": Case(door="flex", strategy="Ulysses", mask="BlockMask of documents", masked_by="call",
                             length=60, batch=2, heads=(4, 2), score="masking", lse=True, layout="striped"),
    "two bands of the same queries by masks": Case(ranks=5, strategy="all-gather", layout="per_document_head_tail",
                                                   balancer=True, mask="causal documents", masked_by="style",
                                                   length=13, batch=2, heads=(6, 1), dim=7, dtype="float32",
                                                   kernel="CUDA's"),
    "documents and a window of varlen_attn": Case(door="varlen in module", ranks=4, mask="windowed documents",
                                                  masked_by="call", length=61, heads=(4, 2), lse=True),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_by_name(name: str):
    """Guarantees that the grid combines with everything, with plain numbers."""
    assert sensible(NAMED[name]) == NAMED[name]
    verdict = judge(NAMED[name])
    assert verdict.kind == "exact", verdict.words


NOT_OF_PACKS = (
    *("prefix", "dilated", "pictures", "tree", "windowed tree"),
    *("bool", "float", "BlockMask", "another", "selected"),
)


def makes_sense(pair: tuple[tuple[str, object], tuple[str, object]]) -> bool:
    """Two ranks exchange heads, so two must divide the ranks. A door has kernels, or packs, or torch's own call.

    The rank that has a query selects its keys, and under Ulysses other ranks have it.
    """
    found = dict(pair)
    door, mask = found.get("door", "function"), str(found.get("mask", "full"))
    takes = DOORS[str(door)].takes
    return (
        divides(str(found.get("strategy", "ring")), int(str(found.get("ranks", 2))))
        and ("kernel" in takes or found.get("kernel", "default") == "default")
        and (mask != "is_causal" or "sdpa" in takes or "door" not in found)
        and not ("packs" in takes and mask.startswith(NOT_OF_PACKS))
        and not (mask.startswith("selected") and "Ulysses" in str(found.get("strategy")))  # refused
    )


def test_what_the_grid_covers():
    """Every two values of any two dimensions meet that make sense together."""
    values = [(name, value) for name in GRID for value in dict.fromkeys(DIMENSIONS[name])]
    pairs = {pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    covered = set().union(*(pairs_of(case, GRID) for case in grid()))
    assert {pair for pair in pairs - covered if makes_sense(pair)} == set()
    by_day = in_turns()[: len(grid()) * BY_DAY // PARTS]
    for name in GRID:
        assert {str(getattr(case, name)) for case in by_day} == {str(getattr(case, name)) for case in grid()}
