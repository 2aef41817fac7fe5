"""Cells of tests/turns.py in processes: some programs that catch their error, and those that torch.compile compiles."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.process.several import Program, in_a_world
from tests.turns import HOW, RANKS, TIMEOUT, Cell, Heard, cells, heard, judged

pytestmark = pytest.mark.process

CELLS = [
    *(Cell("core", "eager", moment, 1, True) for moment in ("before", "between", "behind")),
    *(Cell(door, "eager", "behind", 1, True) for door in ("module", "backbone", "block")),
    *(Cell(door, "recomputed", "between", 0, True) for door in ("module", "backbone")),
    Cell("function", "eager", "between", 1, True),
]


# Compilations take seconds.
COMPILED = [cell for cell in cells() if HOW[cell.how].compiles]
AT_NIGHT = [cell for cell in COMPILED if cell.door not in ("module", "function") or not cell.caught or not cell.faulty]
CELLS += [cell for cell in COMPILED if cell not in AT_NIGHT]


@in_a_world
def run_cells(folder: Path, chosen: list[Cell], name: str) -> None:
    told = {}
    for cell in chosen:
        began = time.monotonic()
        told[str(cell)] = *heard(cell, dist.get_rank()), time.monotonic() - began
    (folder / f"{name} {dist.get_rank()}.json").write_text(json.dumps(told))


PROGRAMS = {
    name: Program(RANKS, partial(run_cells, chosen=chosen, name=name), at_night=chosen is AT_NIGHT)
    for name, chosen in {"turns": CELLS, "turns at night": AT_NIGHT}.items()
}


@pytest.mark.parametrize("name", ["turns", pytest.param("turns at night", marks=pytest.mark.nightly)])
def test_cells_in_processes(on_processes, name: str):
    finished = on_processes[name]
    assert finished.statuses == [0] * RANKS, finished.said
    by_rank = [json.loads((finished.folder / f"{name} {rank}.json").read_text()) for rank in range(RANKS)]
    assert all(told.keys() == {str(cell) for cell in (CELLS if name == "turns" else AT_NIGHT)} for told in by_rank)
    for cell in by_rank[0]:
        words, wrong, seconds = zip(*(told[cell] for told in by_rank), strict=True)
        judged([Heard(*each) for each in zip(words, wrong, strict=True)])
        assert max(seconds) < TIMEOUT  # 31 s at a load of 21; the timeout of a group is half an hour
