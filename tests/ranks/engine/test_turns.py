"""Every cell of tests/turns.py: one rank fails before, between or behind two calls, and every rank hears of it."""

from __future__ import annotations

import pytest

from tests.turns import DOORS, FAULTY, MOMENTS, Cell, cells, planted, run_cell


@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_every_rank_hears_of_it(cell: Cell):
    told = run_cell(cell)
    if DOORS[cell.door].fail is planted:
        assert told[FAULTY] == "Planted: on this rank alone"
    assert any(f"[{FAULTY}]" in words or "disagree on" in words for words in told), told


def test_the_table():
    """Each door is in it, and with each moment where something encloses the code between the calls."""
    found = {(cell.door, cell.moment) for cell in cells()}
    assert {name for name, _ in found} == DOORS.keys() - {"cores"}
    enclosed = [name for name, door in DOORS.items() if door.fail is planted and name != "cores"]
    assert found >= {(name, moment) for name in enclosed for moment in MOMENTS}
