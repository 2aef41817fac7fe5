"""Rows of numbers that all ranks of a group get from each other, as direct messages over gloo."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_styles._lib.compat import cpu_backend_of, in_process_store
from cp_styles.comm.point_to_point import (
    WIDTH,
    Mailbox,
    TransferError,
    gather_numbers,
    offer_numbers,
    start_numbers,
)
from cp_styles.testing import run_ranks
from tests.ranks.attention_case import on_every_rank
from tests.ranks.collectives.collectives_reference import world

RANKS = 3


def row(*numbers: int) -> list[int]:
    return [*numbers, *[0] * (WIDTH - len(numbers))]


def rows_of(gather: int) -> list[list[int]]:
    return [row(rank, gather) for rank in range(RANKS)]


class Interrupted(BaseException):
    """What ends a rank's forward anywhere: KeyboardInterrupt, SystemExit."""


class Interruptible:
    """A backend that is interrupted when it is to post its ``at``-th message."""

    def __init__(self, gloo: Any, at: int) -> None:
        self._gloo, self._left = gloo, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def send(self, *arguments: Any) -> dist.Work:
        return self._at("send", arguments)

    def recv(self, *arguments: Any) -> dist.Work:
        return self._at("recv", arguments)

    def _at(self, name: str, arguments: tuple[Any, ...]) -> dist.Work:
        self._left -= 1
        if self._left == 0:
            raise Interrupted
        return getattr(self._gloo, name)(*arguments)


@on_every_rank(RANKS)
def test_a_row_that_was_left_unread_is_not_taken_for_a_later_one(rank: int):
    """Each rank leaves others; nothing waits for a rank that has left, and what it got is forgotten."""
    group = world()
    for gather in range(30):
        finish = start_numbers(row(rank, gather), group)
        if gather % RANKS != rank:
            assert finish() == rows_of(gather)
        del finish
    assert gather_numbers(row(rank, 30), group) == rows_of(30)


def test_nothing_is_kept_of_gathers_that_were_left_unread():
    def on(rank: int) -> int:
        mailbox = Mailbox(cpu_backend_of(world(), "gloo"))
        for gather in range(30):
            number, rows = mailbox.start(torch.tensor(row(rank, gather)))
            if rank or gather == 29:
                assert mailbox.wait(number) is None
                assert rows.tolist() == rows_of(gather)
        return len(mailbox._gathers)

    assert run_ranks(on, RANKS) == [2] * RANKS  # the sends of the last, the receives of the next


@pytest.mark.parametrize("at", range(1, 3 * (RANKS - 1) + 1))
@on_every_rank(RANKS)
def test_a_rank_that_was_interrupted_and_goes_on(rank: int, at: int):
    """In the middle of its messages. The rest of them are sent first, and each rank reads the rows of one gather."""
    gloo = cpu_backend_of(world(), "gloo")
    mailbox = Mailbox(Interruptible(gloo, at) if rank == 1 else gloo)
    for gather in range(4):
        mine = torch.tensor(row(rank, gather))
        if rank == 1 and gather == 0:
            with pytest.raises(Interrupted):
                mailbox.start(mine)
            mine.fill_(-1)  # the caller's
            continue
        number, rows = mailbox.start(mine)
        assert number == gather
        assert mailbox.wait(number) is None
        assert rows.tolist() == rows_of(gather)


@on_every_rank(RANKS)
def test_a_row_that_is_offered_waits_for_ranks_that_come_late(rank: int):
    """The patience of the rank that offers it is over by then. The connections are not."""
    group = world()
    for gather in (0, 2):
        if rank == 1:
            start = time.monotonic()
            offer_numbers(row(rank, gather), group, 0.1, lambda *_: None)
            assert time.monotonic() - start >= 0.1
        dist.barrier()
        if rank != 1:
            assert gather_numbers(row(rank, gather), group) == rows_of(gather)
        assert gather_numbers(row(rank, gather + 1), group) == rows_of(gather + 1)


def test_a_row_is_read_after_its_rank_has_ended():
    """Rank 1 says that it has failed, to ranks that are elsewhere, and ends. Then they come, and hear of it."""
    store = in_process_store()

    def on(rank: int) -> None:
        group = world()
        assert gather_numbers(row(rank, 0), group) == rows_of(0)
        if rank == 1:
            start_numbers(row(rank, 1), group)
            del group
            dist.destroy_process_group()
            store.set("ended", "")
            return
        store.wait(["ended"])
        assert gather_numbers(row(rank, 1), group) == rows_of(1)
        with pytest.raises(TransferError, match=r"a transfer with rank 1 \(of all processes\) failed: that rank has"):
            gather_numbers(row(rank, 2), group)

    run_ranks(on, RANKS)


@pytest.mark.parametrize("others", ["late", "at another gather"])
def test_a_gather_waits_as_long_as_the_group_says(others: str):
    """Rows of another gather are not what it waits for."""
    store = in_process_store()

    def on(rank: int) -> None:
        group = world()
        if rank == 0:
            with pytest.raises(TransferError, match=r"a transfer with rank [12] .* Timed out waiting 2000ms"):
                gather_numbers(row(0), group)
            store.set("noticed", "")
            return
        if others == "at another gather":
            mailbox = Mailbox(cpu_backend_of(group, "gloo"))
            mailbox._started = 1  # a mistake: it has started none
            mailbox.start(torch.tensor(row(rank, 1)))
        store.wait(["noticed"])  # with the connections open

    run_ranks(on, RANKS, timeout_seconds=2.0, may_time_out=True)


@on_every_rank(RANKS)
def test_rows_belong_to_no_mode(rank: int):
    """The receives of a gather are posted with the one before. A checkpoint asks for the version of what it keeps."""
    group = world()
    with torch.inference_mode():
        assert gather_numbers(row(rank, 0), group) == rows_of(0)
    rows = torch.ops.cp_styles.gather_numbers(torch.tensor(row(rank, 1)), group.group_name)
    assert rows._version >= 0
    assert start_numbers(row(rank, 2), group)() == rows_of(2)  # it has waited for ``rows`` too
    assert rows.tolist() == rows_of(1)


def test_no_profiler_hears_of_messages_that_may_outlive_it():
    """torch ends the process with a segmentation fault if a transfer that a profiler has heard of ends after it."""

    def on(rank: int) -> set[str]:
        group = world()
        gather_numbers(row(rank), group)
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            if rank == 0
            else nullcontext() as p
        ):
            gather_numbers(row(rank), group)
            dist.barrier()
        gather_numbers(row(rank), group)
        return set() if p is None else {event.name for event in p.events()}

    heard = run_ranks(on, 2)[0]
    assert "gloo:barrier" in heard  # it does hear of transfers
    assert not {"gloo:send", "gloo:recv"} & heard


def test_other_backends_gather_as_they_can():
    """A backend without messages: torch's fake one, whose all-gather gives every rank its own row."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        assert list(map(list, gather_numbers(row(7), world()))) == [row(7)] * 4
    finally:
        dist.destroy_process_group()
