"""The ranks of the command ``doctor``. They exchange results through a store, also where their groups do not work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from socket import gethostname
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cp_styles.comm.point_to_point import abort_group


class Wrong(Exception):
    """A result of this rank is wrong. The ranks can go on."""


# The other ranks raise these too, or do not wait for messages of the rank that raises.
_HARMLESS = Wrong, ValueError, TypeError, NotImplementedError, AssertionError


class RanksFailed(RuntimeError):
    """Raised on every rank. ``errors``: the text of each rank that has failed. ``fatal``: the ranks cannot go on."""

    def __init__(self, errors: dict[int, str], fatal: bool) -> None:
        super().__init__(f"ranks {[*errors]} have failed")
        self.errors, self.fatal = errors, fatal


class Line(NamedTuple):
    """The result of a check in words, and its facts for JSON. The text of a check that is ``skipped`` says why."""

    text: str
    facts: Any = None
    skipped: bool = False


@dataclass
class World:
    """This rank among its peers."""

    store: Any  # of all ranks
    rank: int
    size: int
    device: torch.device
    seconds: float  # how long a rank waits for its peers
    nbytes: int  # size of the messages whose bandwidth is measured
    mesh: Any = None  # all ranks, as the axis "cp"
    hosts: Sequence[str] = ()  # by rank
    links: Sequence[tuple[int, int, float, float]] = ()  # two ranks, seconds of a message, bytes a second each way
    check: str = "start"  # the name of the running check
    deadline: float = inf  # its end, by time.monotonic
    _gathers: int = 0

    def run(self, name: str, check: Callable[[World], Line]) -> Line:
        """Run a check. Raises RanksFailed, on every rank, if it fails on one, or if one does not come to its end."""
        self.check, line, text, fatal = name, Line(""), "", False
        self._set_deadline()
        try:
            line = check(self)
        except RanksFailed:
            raise
        except Exception as error:
            text, fatal = f"{type(error).__name__}: {error}", not isinstance(error, _HARMLESS)
            self.complain(text)
            if fatal and dist.group.WORLD is not None:  # peers that wait for this rank get an error at once
                abort_group(dist.group.WORLD, error)
        finally:
            self.deadline = inf
        self.gather(text=text, fatal=fatal)
        return line

    def gather(self, value: Any = None, *, text: str = "", fatal: bool = False) -> list[Any]:
        """The values of all ranks, through the store.

        Raises RanksFailed on every rank if one gives the ``text`` of an error, or does not come in time.
        """
        before, self.deadline, self._gathers = self.deadline, inf, self._gathers + 1
        keys, come = [f"{self._gathers}/{rank}" for rank in range(self.size)], range(self.size)
        patience = 1.2 * self.seconds + 1  # peers that wait over gloo have their errors before
        try:
            self.store.set(keys[self.rank], json.dumps([value, text, fatal]))
            try:
                self.store.wait(keys, timedelta(seconds=patience))
            except dist.DistStoreError:
                come = [rank for rank in come if self.store.check([keys[rank]])]
            rows = dict(zip(come, map(json.loads, self.store.multi_get([keys[rank] for rank in come])), strict=True))
        except RuntimeError as error:
            raise RanksFailed({self.rank: f"the store has failed: {error}"}, fatal=True) from error
        missing = f"has not come to the end in {patience:.0f} s: it is slow, hangs, or has ended"
        errors = {rank: rows[rank][1] if rank in rows else missing for rank in range(self.size)}
        if any(errors.values()):
            fatal = len(rows) < self.size or any(row[2] for row in rows.values())
            raise RanksFailed({rank: text for rank, text in errors.items() if text}, fatal)
        if before < inf:
            self._set_deadline()
        return [rows[rank][0] for rank in range(self.size)]

    def _set_deadline(self) -> None:
        # A wait for a device ends by the deadline alone. Over gloo it raises before, and peers name a rank that hangs.
        self.deadline = time.monotonic() + (self.seconds if self.device.type == "cuda" else 2.5 * self.seconds + 5)

    def complain(self, text: str) -> None:
        """Print an error of this rank at once: a launcher may end the process before its peers know."""
        print(f"\ndoctor: rank {self.rank} on {gethostname()}, {self.check!r}: {text}", file=sys.stderr, flush=True)

    def seconds_of(self, run: Callable[[], Any], times: int = 30, *, on_device: bool = True) -> float:
        """The median time of ``run``, after a first run. ``on_device``: with the work that it gives to the device."""
        wait = torch.cuda.synchronize if on_device and self.device.type == "cuda" else lambda: None
        seconds = []
        for _ in range(times + 1):
            wait()
            start = time.perf_counter()
            run()
            wait()
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])
