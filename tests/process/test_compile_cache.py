"""The trap of a cache that outlives its process: a graph compiled for one layout, found again for another.

torch keys its cache on disk by the graph. What a graph does not show, it does not see; hence the configuration is an
argument in it.
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


def start(folder: Path, *layouts: str) -> list[list[tuple[float, int, int]]]:
    """Fresh processes that compile attention for layout after layout: by rank and layout, (error, hits, misses)."""
    store = folder / f"store of {' '.join(layouts)}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.process.compile_twice", str(rank), str(RANKS), str(store), *layouts],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = []
    for process in running:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        said.append([tuple(each) for each in json.loads(out.splitlines()[-1])])
    return said


def test_another_layout_is_not_taken_from_the_cache(tmp_path):
    for by_layout in start(tmp_path, "contiguous"):
        assert by_layout[0][0] < EXACT
    for other, same in start(tmp_path, "head_tail", "contiguous"):
        assert other[0] < EXACT  # a graph of contiguous parts is off by the order of 1
        # The cache is there and works: what the processes before compiled is found by these.
        assert same[0] < EXACT
        assert (same[1], same[2]) == (1, 0)
