"""Some cells of tests/turns.py in processes: a program that catches its error, and one that waits for its peers."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.process.several import Program, in_a_world
from tests.turns import RANKS, Cell, perform

pytestmark = pytest.mark.process

CELLS = [
    *(Cell("core", "eager", moment, 1, True) for moment in ("before", "between", "behind")),
    *(Cell(door, "eager", "behind", 1, True) for door in ("module", "backbone", "block")),
    *(Cell(door, "recomputed", "between", 0, True) for door in ("module", "backbone")),
    Cell("function", "eager", "between", 1, True),
]


@in_a_world
def run_cells(folder: Path) -> None:
    told = {}
    for cell in CELLS:
        began = time.monotonic()
        words = perform(cell, dist.get_rank())
        told[str(cell)] = words, time.monotonic() - began
    (folder / f"turns {dist.get_rank()}.json").write_text(json.dumps(told))


PROGRAMS = {"turns": Program(RANKS, partial(run_cells))}


def test_cells_in_processes(on_processes):
    finished = on_processes["turns"]
    assert finished.statuses == [0] * RANKS, finished.said
    for rank in range(RANKS):
        told = json.loads((finished.folder / f"turns {rank}.json").read_text())
        assert told.keys() == {str(cell) for cell in CELLS}
        assert all("Error" in words or "Planted" in words for words, _ in told.values())
        assert max(seconds for _, seconds in told.values()) < 20  # the timeout of a group is half an hour
