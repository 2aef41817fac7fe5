"""Ranks as threads: how run_ranks reports a rank that is blocked until the timeout."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from cp_styles.testing import RankTimeout, run_ranks


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
