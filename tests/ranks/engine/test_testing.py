"""Ranks as threads: how run_ranks reports a rank that is blocked until the timeout."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch

from cp_styles.testing import CommunicationTrace, RankTimeout, run_ranks


def waits(rank: int) -> str:
    if rank == 1:
        time.sleep(3.5)
        return "came late"
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError:
        return "caught"
    return "heard"


def test_a_timeout_that_was_caught_fails_all_the_same():
    with pytest.raises(RankTimeout, match="until the timeout of 3"):
        run_ranks(waits, 2, timeout_seconds=3)


def test_a_timeout_that_is_expected():
    assert run_ranks(waits, 2, timeout_seconds=3, may_time_out=True) == ["caught", "came late"]


def test_dispatch_modes_that_end_in_turns_leave_no_flag():
    """The second one to end puts back what was set while the first one ran. torch.compile guards the flag."""
    turn = [threading.Event() for _ in range(3)]

    def on(rank: int) -> None:
        first, second, third = turn
        if rank == 0:
            with CommunicationTrace():
                first.set()
                second.wait(10)
            third.set()
        else:
            first.wait(10)
            with CommunicationTrace():
                second.set()
                third.wait(10)

    assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    run_ranks(on, 2)
    assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
