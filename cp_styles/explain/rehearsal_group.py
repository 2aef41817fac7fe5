"""A process group without processes, which records what a strategy would send.

A strategy that runs with meta tensors and a :class:`Rehearsal` in place of its process group takes the same steps as in
a real run: the same messages, in the same order, with the same waits. Nothing is sent and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Transfer(NamedTuple):
    """One message.

    Attributes:
        peer: the rank at the other end, counted in the whole group.
        nbytes: the size of the message.
        outgoing: whether this rank sends it.
    """

    peer: int
    nbytes: int
    outgoing: bool


class Waited(NamedTuple):
    """The rank waits for a transfer, given by its number among all transfers of this rank."""

    transfer: int


class Rehearsal(dist.ProcessGroup):
    """The group of rank ``rank``. ``members`` are its ranks, as they are counted in the whole group."""

    def __init__(self, log: Any, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, len(members))  # pyright: ignore[reportCallIssue] - its stub knows a store only
        self.log = log
        self.members = tuple(members)
        self._parts: list[Rehearsal] = []  # alive as long as the whole, as those of a real group are

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _StartedTransfer:  # pyright: ignore
        return self._start(tensors, peer, True)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _StartedTransfer:  # pyright: ignore
        return self._start(tensors, peer, False)

    def _start(self, tensors: Sequence[torch.Tensor], peer: int, outgoing: bool) -> _StartedTransfer:
        (tensor,) = tensors
        self.log.label("messages", tensor)
        self.log.events.append(Transfer(self.members[peer], tensor.nbytes, outgoing))
        self.log.transfers += 1
        return _StartedTransfer(self.log, self.log.transfers - 1)

    def subgroup(self, members: Sequence[int]) -> Rehearsal | None:
        """The group of some of the members, this rank among them. None for a group of one."""
        if len(members) == 1:
            return None
        self._parts.append(Rehearsal(self.log, members.index(self.members[self.rank()]), members))
        return self._parts[-1]


def split_rehearsal(group: Rehearsal | None, size: int) -> tuple[Rehearsal | None, Rehearsal | None]:
    """The subgroups of a rehearsed group, as :func:`~cp_styles.comm.point_to_point.split_group` makes real ones."""
    if group is None:
        return None, None
    first = group.rank() - group.rank() % size
    across = group.members[group.rank() % size :: size]
    return group.subgroup(group.members[first : first + size]), group.subgroup(across)


class _StartedTransfer:
    """A transfer that has started."""

    def __init__(self, log: Any, number: int) -> None:
        self._log, self._number = log, number

    def wait(self) -> None:
        self._log.events.append(Waited(self._number))
