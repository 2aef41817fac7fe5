"""Tables of the process that one rank walks through while other ranks, which are threads, add to them."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import cp_styles.testing
from cp_styles.comm import group_state

# Walks for this time make thousands, of which some fail if the table must not grow meanwhile.
SECONDS, ENTRIES = 0.4, 300


@contextmanager
def adding(add: Callable[[], object]) -> Iterator[None]:
    """Another thread that adds all the time."""
    done, interval = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not done.is_set():
            add()

    other = threading.Thread(target=run)
    sys.setswitchinterval(1e-5)
    other.start()
    try:
        yield
    finally:
        done.set()
        other.join()
        sys.setswitchinterval(interval)


def a_group() -> dist.ProcessGroup:
    return dist.ProcessGroup(0, 1)  # pyright: ignore[reportCallIssue] - its stub knows a store only


def test_a_table_that_grows_meanwhile():
    kept = [a_group() for _ in range(ENTRIES)]
    for each in kept:
        group_state.state_of(each)
    with adding(lambda: group_state.state_of(a_group())):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            _ = [*group_state.states()]


def test_ops_are_made_before_ranks_are_threads() -> None:
    """Two threads that make the object of an op at once ended the process. See ``resolve_operators``."""
    for packet in (torch.ops.c10d.allgather_, torch.ops.aten.slice_backward, torch.ops.cp_styles.gather_numbers):
        assert "default" in vars(packet), packet


def test_nothing_holds_all_objects_of_the_process():
    """While another thread ends: torch then destroys objects without Python's lock. Only the test of ranks as threads
    looks at all objects, when its threads have ended."""
    package = Path(cp_styles.testing.__file__).parent
    looks = re.compile(r"^[^#]*\bgc\.get_(objects|refer)", re.MULTILINE)
    found = {path.name for path in package.rglob("*.py") if looks.search(path.read_text())}
    assert found <= {"testing.py"}


def test_a_rank_may_end_between_two_looks():
    class Ends(threading.Thread):
        looks = 0

        def is_alive(self) -> bool:
            self.looks += 1
            return self.looks == 1

    ends = Ends(target=lambda: None)
    ends.start()
    cp_styles.testing._wait_for_threads([ends], 1.0)
    assert ends.looks == 2
