"""The cells of tests/turns.py on threads: one rank fails before, between or behind two calls, and all hear of it."""

from __future__ import annotations

import sys
from dataclasses import astuple
from typing import Any

import pytest

from cp_styles.comm.group_state import state_of
from cp_styles.testing import run_ranks
from tests.covering import covering
from tests.ranks.attention_case import cp_mesh
from tests.turns import DOORS, HOW, MOMENTS, RANKS, At, Cell, cells, planted, run_cell


def sampled_cells() -> list[Any]:
    """Few cells that hold every pair of door, how, moment, rank and end, and further ones at night."""
    found = [cell for cell in cells() if not HOW[cell.how].compiles]  # see tests/process/test_turns.py
    rows = [tuple(sys.intern(str(value)) for value in astuple(cell)) for cell in found]
    by_day = set(covering(2, rows))
    night = (pytest.mark.nightly,)
    return [pytest.param(cell, marks=() if at in by_day else night, id=str(cell)) for at, cell in enumerate(found)]


@pytest.mark.parametrize("cell", sampled_cells())
def test_every_rank_hears_of_it(cell: Cell):
    told = run_cell(cell)
    if DOORS[cell.door].fail is planted:
        assert told[cell.faulty] == "Planted: on this rank alone"
        assert all(words.endswith("Planted: on this rank alone") for words in told), told
    assert any(f"[{cell.faulty}]" in words or "disagree on" in words for words in told), told


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_end_of_a_recomputation_is_told_to_nobody(reentrant: bool):
    """A checkpoint ends it by an error where the backward needs no more of it. Two attentions run, run again and have a
    backward, each with one row."""

    def on(rank: int) -> int:
        mesh = cp_mesh(RANKS)
        act, how = DOORS["module"].make(mesh), HOW["recomputed, reentrant" if reentrant else "recomputed"]
        act(At(how)).sum().backward()
        return state_of(mesh.get_group()).mailbox._started

    assert run_ranks(on, RANKS) == [6] * RANKS


def test_the_table():
    """Each door is in it, and with each moment where something encloses the code between the calls."""
    found = {(cell.door, cell.moment) for cell in cells()}
    assert {name for name, _ in found} == DOORS.keys() - {"cores"}
    enclosed = [name for name, door in DOORS.items() if door.fail is planted and name != "cores"]
    assert found >= {(name, moment) for name in enclosed for moment in MOMENTS}
