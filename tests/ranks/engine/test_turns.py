"""Every cell of tests/turns.py: one rank fails before, between or behind two calls, and every rank hears of it."""

from __future__ import annotations

import sys
from dataclasses import astuple
from typing import Any

import pytest

from tests.covering import covering
from tests.turns import DOORS, HOW, MOMENTS, Cell, cells, planted, run_cell


def sampled_cells() -> list[Any]:
    """Few cells that hold every pair of door, how, moment, rank and end, and further ones at night."""
    found = list(cells())
    rows = [tuple(sys.intern(str(value)) for value in astuple(cell)) for cell in found]
    by_day = set(covering(2, rows))
    # Compilations take seconds.
    by_day = {at for at in by_day if not HOW[found[at].how].compiles or found[at].door in ("module", "function")}
    night = (pytest.mark.nightly,)
    return [pytest.param(cell, marks=() if at in by_day else night, id=str(cell)) for at, cell in enumerate(found)]


@pytest.mark.parametrize("cell", sampled_cells())
def test_every_rank_hears_of_it(cell: Cell):
    told = run_cell(cell)
    if DOORS[cell.door].fail is planted:
        assert told[cell.faulty] == "Planted: on this rank alone"
        assert all(words.endswith("Planted: on this rank alone") for words in told), told
    assert any(f"[{cell.faulty}]" in words or "disagree on" in words for words in told), told


def test_the_table():
    """Each door is in it, and with each moment where something encloses the code between the calls."""
    found = {(cell.door, cell.moment) for cell in cells()}
    assert {name for name, _ in found} == DOORS.keys() - {"cores"}
    enclosed = [name for name, door in DOORS.items() if door.fail is planted and name != "cores"]
    assert found >= {(name, moment) for name in enclosed for moment in MOMENTS}
