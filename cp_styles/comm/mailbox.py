"""A row of numbers from every rank of a group to every other one, as direct messages over gloo.

[Note: direct messages] An all-gather of gloo is run by a thread of its own, in 2 (P - 1) messages one after the other.
These messages are posted by the calling thread, all at once. The messages alone take 0.10 ms instead of 0.23 ms on 2
ranks, 0.8 instead of 3.2 on 4, 1.9 instead of 11 on 8, and 97 instead of 168 on 64, which share 2 processor cores. The
receives of the next gather are posted together with a gather. So a row arrives without waiting for its receiver to ask
for it, and a rank that comes last does not wait at all.

[Note: numbered gathers] All ranks count the gathers over a group alike, also those that they leave unread. The number
is in the tag of each message, so a row that was left unread is never taken for one of a later gather. Two ranks
exchange messages in the order in which they posted them. So when a gather is complete, all earlier ones are. Until then
their buffers are kept here: gloo stops reading from a rank whose message has lost its buffer.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from cp_styles._compat import let_profilers_record

# How many numbers a row has: those of the agreement.
WIDTH = 9
# Tags from here on belong to these messages. Those of keys, values and gradients have tags from 2**29 on. Users count
# from 0.
_FIRST_TAG, _TAGS = 2**30, 2**30


def end_connections(gloo: Any) -> None:
    """End all connections of a gloo backend. What other ranks wait for raises on them at once.

    Gloo does so when a wait has timed out: see unbound_buffer.cc, ``signalException``. Such a wait needs a connection
    that still stands. A peer that has ended its own leaves none to it, but others may wait for this rank: so every peer
    is tried.
    """
    never, rank = torch.empty(1, device="cpu"), gloo.rank()
    for distance in range(1, gloo.size()):
        with contextlib.suppress(RuntimeError):
            gloo.recv([never], (rank + distance) % gloo.size(), _FIRST_TAG + _TAGS - 1).wait(timedelta(milliseconds=1))


Posted: TypeAlias = dist.Work | RuntimeError
"""A message that is under way, or the error of posting it. It concerns one rank, and the others get their messages."""


class _Gather(NamedTuple):
    """The messages of one gather. ``receives`` are by rank, and may be posted before the gather starts."""

    rows: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    sends: list[Posted]
    receives: dict[int, Posted]


class Mailbox:
    """The gathers of a group. ``gloo`` is a backend between its ranks."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._shape = gloo.size(), WIDTH
        self._rank = gloo.rank()
        self._peers = [(self._rank + distance) % gloo.size() for distance in range(1, gloo.size())]
        self._gathers: dict[int, _Gather] = {}
        self._started = 0

    def start(self, mine: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Send ``mine`` to all others. The number of the gather, and the rows of all ranks, to be read after ``wait``.

        It never fails: :meth:`wait` says which rank cannot be reached.
        """
        number = self._started
        before = self._gathers.get(number - 1)
        now = self._gathers.get(number) or self._new_gather(number)
        now.parts[self._rank].copy_(mine)
        self._started = number + 1
        let_profilers_record(False)  # requests for the next row may outlive a profiler
        try:
            if before is not None and len(before.sends) < len(self._peers):
                self._post(number - 1, before)  # the rest, because that was interrupted: the others wait for it
            self._post(number, now)
        finally:
            let_profilers_record(True)
        return number, now.rows

    def wait(self, number: int) -> tuple[int, RuntimeError] | None:
        """Wait until all rows of the gather have arrived. If one cannot arrive: its rank and why.

        Errors are returned, not raised, and without their tracebacks: these would keep the connections open.
        """
        gather = self._gathers.get(number)
        if gather is None:  # a later one is complete
            return None
        for peer in reversed(self._peers):
            posted = gather.receives[peer]
            if isinstance(posted, RuntimeError):
                return peer, posted
            try:
                posted.wait()
            except RuntimeError as error:
                return peer, error.with_traceback(None)
        # A rank that has sent its row had asked for this one's before: it is written, or will be. The sends are kept
        # and not waited for, because such a wait of gloo may not end if the rank has ended since.
        for old in list(self._gathers):
            if old < number:
                self._gathers.pop(old, None)
        return None

    def _new_gather(self, number: int) -> _Gather:
        with torch.inference_mode(False):  # a result for a checkpoint, which needs its version
            rows = torch.empty(self._shape, dtype=torch.int64, device="cpu")
        gather = self._gathers[number] = _Gather(rows, rows.unbind(), [], {})
        return gather

    def _post(self, number: int, now: _Gather) -> None:
        """Post what is not posted yet: the messages of a gather that has started, and the receives of the next one."""
        mine, gloo = now.parts[self._rank], self._gloo
        then = self._gathers.get(number + 1) or self._new_gather(number + 1)
        # Message and request for the next one go to a rank together: it is woken once for both.
        for peer in self._peers[len(now.sends) :]:
            for gather, its_number in ((now, number), (then, number + 1)):
                if peer not in gather.receives:
                    try:
                        gather.receives[peer] = gloo.recv([gather.parts[peer]], peer, _FIRST_TAG + its_number % _TAGS)
                    except RuntimeError as error:
                        gather.receives[peer] = error.with_traceback(None)
            try:
                now.sends.append(gloo.send([mine], peer, _FIRST_TAG + number % _TAGS))
            except RuntimeError as error:
                now.sends.append(error.with_traceback(None))
