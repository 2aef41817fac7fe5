"""A rank is killed, stopped or fails in the middle of an operation: tests/faults.py, on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import at_night

ROOT = Path(__file__).parents[2]
PLACES = [
    "agreement",
    "forward",
    "backward",
    "Ulysses",
    "all_to_all",
    "sum_gradients",
    "global_loss",
    "compiled",
    "verify",
]

pytestmark = pytest.mark.process


def faults(*options: str, seconds: float) -> str:
    command = [sys.executable, "tests/faults.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_some_faults_keep_the_promise():
    """One rank is killed, and one runs out of memory: the others know at once, and go on in new groups."""
    table = faults("--places", "backward", "--faults", "kill -9", "MemoryError", "--caught", "yes", seconds=900)
    assert table.count("TransferError") == 2


@pytest.mark.parametrize("place", at_night(*PLACES))
def test_every_fault_keeps_the_promise(place: str):
    faults("--places", place, seconds=9000)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["forward", "sum_gradients"])
def test_five_worlds_after_each_other_have_a_fault(place: str):
    faults("--places", place, "--faults", "exception", "SIGINT", "--caught", "yes", "--worlds", "5", seconds=900)
