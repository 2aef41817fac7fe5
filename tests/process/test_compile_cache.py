"""Inductor through every door; and the trap of a cache that outlives its process: a graph compiled for one layout,
found again for another.

torch keys its cache on disk by the graph. What a graph does not show, it does not see; hence the configuration is an
argument in it. An op of the test's own (compile_twice.py) hides it, and falls into the trap: the first processes leave
it a graph of contiguous parts, and the second ones, whose parts are others, attend by that one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.attention_case import EXACT

ROOT = Path(__file__).parents[2]
RANKS = 2

pytestmark = pytest.mark.process


def start(folder: Path, *jobs: str) -> list[dict[str, list[float]]]:
    """Fresh processes that compile attention, job after job: of each rank, by job, [error, hits, misses]."""
    store = folder / f"store of {len(jobs)} jobs"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    # Files, because a pipe that nobody reads while the other process is waited for stops its process when it is full.
    errors = [folder / f"errors of rank {rank}, {len(jobs)} jobs" for rank in range(RANKS)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.process.compile_twice", str(rank), str(RANKS), str(store), *jobs],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors[rank].open("w"),
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = []
    for process, file in zip(running, errors, strict=True):
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, file.read_text()
        said.append(json.loads(out.splitlines()[-1]))
    return said


def test_every_door_and_the_cache(tmp_path):
    for of_rank in start(tmp_path, "function/contiguous", "style/contiguous", "trap/contiguous"):
        for job, (error, hits, misses) in of_rank.items():
            assert error < EXACT, job
            assert hits == 0, job
            assert misses > 0, job
    jobs = ("function/head_tail", "function/contiguous", "module/head_tail")
    jobs += ("style/contiguous", "style/head_tail", "trap/head_tail")
    for of_rank in start(tmp_path, *jobs):
        for job in jobs[:-1]:
            assert of_rank[job][0] < EXACT, job
        # What the processes before compiled is found by these, where it is the same attention.
        for job in ("function/contiguous", "style/contiguous"):
            error, hits, misses = of_rank[job]
            assert hits > 0, job
            assert misses == 0, job
        assert of_rank["function/head_tail"][1] == of_rank["module/head_tail"][1] == of_rank["style/head_tail"][1] == 0
        error, hits, misses = of_rank["trap/head_tail"]
        assert (hits, misses) == (1, 0)
        assert error > 0.1  # so this is how it looks where a configuration hides
