"""The compiled tests on torch 2.11 and 2.12, whose compilers are not safe on two threads: a process for each rank.

Two processes for all of them, started once, and not marked as tests that start processes: nox leaves those out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.compiling import COMPILES_ON_THREADS, MEETING_PLACE, RANK_HERE, RANKS

ROOT = Path(__file__).parents[3]
FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests" / "ranks").rglob("test_*.py")
    if "\npytestmark = cannot_compile_on_threads\n" in path.read_text()
)


@pytest.mark.skipif(COMPILES_ON_THREADS, reason="there the ranks are threads")
@pytest.mark.skipif(RANK_HERE in os.environ, reason="this is such a process")
@pytest.mark.parametrize("file", FILES)
def test_with_a_process_for_each_rank(file: str, tmp_path):
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-n", "0", file]
    environment = os.environ | {MEETING_PLACE: str(tmp_path)}
    running = [
        subprocess.Popen(
            command,
            env=environment | {RANK_HERE: str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=900)[0] for process in running]
    assert [process.returncode for process in running] == [0] * RANKS, "\n".join(said)
    assert all(" passed" in each for each in said), said  # all of a file would be skipped
