"""Memory, threads, groups and file descriptors of processes whose batches are all different: tests/leaks.py.

What is left of batches in tables of the package is in tests/ranks/doors/test_growth.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process


def leaks(*options: str, seconds: float) -> None:
    command = [sys.executable, "tests/leaks.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr


def test_worlds_and_groups_leave_nothing():
    doors = "scoped", "a_block", "decoding", "a_group"
    leaks("--batches", "60", "--worlds", "3", "--rows", "6", "--limit", "0.2", "--doors", *doors, seconds=300)


@pytest.mark.nightly
def test_ten_thousand_batches_leave_nothing():
    leaks("--batches", "10000", seconds=7200)
