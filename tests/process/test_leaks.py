"""Memory, threads, groups and file descriptors of processes whose batches are all different: tests/leaks.py.

What is left of batches in tables of the package is in tests/ranks/doors/test_growth.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process


SOME = ("--batches=90", "--worlds=3", "--rows=18", "--different=5")
DOORS = ("--doors", "scoped", "a_block", "decoding", "a_group")


def leaks(*options: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/leaks.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)


@pytest.mark.nightly  # by day what is left of batches, and of a group in compiled code
def test_worlds_and_groups_leave_nothing():
    done = leaks(*SOME, *DOORS, seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_one_object_of_each_batch_is_noticed():
    done = leaks(*SOME, *DOORS, "--keep", seconds=900)
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(re.findall(r"rank \d: objects: (0\.9|1\.0)\d a batch", done.stdout)) == 2, done.stdout


@pytest.mark.nightly
def test_ten_thousand_batches_leave_nothing():
    done = leaks("--batches", "10000", seconds=7200)
    assert done.returncode == 0, done.stdout + done.stderr
