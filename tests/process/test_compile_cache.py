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

from tests.process.compile_twice import RANKS, said_by
from tests.ranks.attention_case import EXACT

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process


def test_every_door_and_the_cache(tmp_path):
    first = "function/contiguous style/contiguous trap/contiguous"
    second = "function/head_tail function/contiguous module/head_tail style/contiguous style/head_tail trap/head_tail"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.process.compile_twice", tmp_path, first, second]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr

    def said(jobs: str) -> list[dict[str, list[float]]]:
        """Of each rank, by job, [error, hits, misses]."""
        return [json.loads(said_by(tmp_path, rank, jobs).read_text()) for rank in range(RANKS)]

    for of_rank in said(first):
        for job, (error, hits, misses) in of_rank.items():
            assert error < EXACT, job
            assert hits == 0, job
            assert misses > 0, job
    for of_rank in said(second):
        for job in second.split()[:-1]:
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
