"""The state of a process group on this rank: its user, the agreements of its ranks, and whether they can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from cp_styles._lib.bounded_cache import LatestEntries
from cp_styles.comm.turn import Turn

T = TypeVar("T")


# [Note: operations] The messages of a forward, a backward or a collective are one *operation*. The ranks agree on it
# before its first message, and then each rank sends and receives the messages of its plan. A rank that leaves it by an
# error owes its peers messages. Peers would wait for these, or match later messages with them, as NCCL matches by
# order. So such a rank ends its connections over gloo. Every rank that waits for it gets an error at once, leaves its
# own operation, and ends its own connections. The remaining ranks get the error at their next meeting, which is over
# gloo too. From then on every call over the group raises.
#
# The number of the operation is the tag of its messages. So gloo never mixes up messages of two operations.
@dataclass(eq=False, slots=True)
class Operations:
    """State that a group and its parts share: their operations. Only ``check`` may hold the group.

    Attributes:
        user: the module or function that uses the group, for messages.
        axis: the name of the mesh axis of its ranks, for messages; "group" if only the group is known.
        check: a deferred check. It runs once, at the latest before the next message over the group or a part of it.
            If it raises, no message of the operation was sent. See [Note: agreement without waiting] in agreement.py.
        agreed: the ranks have agreed on the running operation, so peers wait for messages of this rank.
        forwards: the number of attention forwards on which the ranks have agreed. A backward has the number of its
            forward.
        collectives: the number of operations of :mod:`cp_styles.collectives`.
        backward_of: the number of the forward whose backward runs; 0 in a forward.
        unmet: a backward runs on which the ranks do not agree, so they may run others. Tags of messages show it.
        broken: the error by which this rank has left an operation; empty if there was none.
    """

    user: str = "attention"
    axis: str = "group"
    check: Callable[[], object] | None = None
    agreed: bool = False
    forwards: int = 0
    collectives: int = 0
    backward_of: int = 0
    unmet: bool = False
    broken: str = ""

    def name_of(self, user: str) -> str:
        """The name of a module or function that uses the group, with the axis."""
        return user if "mesh axis" in user else f"{user} (mesh axis {self.axis!r})"

    def run_deferred_check(self) -> None:
        """Run :attr:`check` now, if there is one."""
        while self.check is not None:  # a check may set another one
            check, self.check = self.check, None
            check()
            self.agreed = True


@dataclass(eq=False)
class GroupState:
    """The state of a group on this rank: its messages and the agreement of its ranks. It must not hold the group.

    Attributes:
        operations: the operations over the group, shared with its parts.
        turn: which errors of this rank its peers know.
        opened: there was a collective on a device.
        host: gloo for a group without a CPU backend, for agreement; False if it does not connect the ranks.
        mailbox: sends rows of numbers as direct messages; None for a group with a CPU backend other than gloo, and
            "new" before the first row.
        parts: parts of the group, by their ranks. Never the group itself.
        batches: the batches of an exchange, by its messages (is_sent, peer).
        objects: facts of other modules about the group, by their classes, see :meth:`get_or_create`.
    """

    operations: Operations = field(default_factory=Operations)
    turn: Turn = field(default_factory=Turn)
    opened: bool = False
    host: Any = None
    mailbox: Any = "new"
    parts: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    batches: LatestEntries[Any, list[list[int]]] = field(default_factory=lambda: LatestEntries(256))
    objects: dict[Any, Any] = field(default_factory=dict)

    def get_or_create(self, kind: Callable[[], T]) -> T:
        """The only object of this class for the group. It is made at the first use."""
        found = self.objects.get(kind)
        return self.objects.setdefault(kind, kind()) if found is None else found  # another thread may make it too


class Forwards:
    """The attention and mixers of a sequence that is split over a group, for the losses and backwards after them."""

    def __init__(self) -> None:
        # The number of modules to which each style was applied over the group.
        self.modules: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Global numbers of queries and keys, by the local numbers, in the latest call with these.
        self.lengths: LatestEntries[tuple[int, int], tuple[int, int]] = LatestEntries(256)
        self.open = False  # the ranks have agreed on forwards since the last meeting for a backward
        self.thread = 0  # has run the latest forward; 0 before the first one
        self.separated = 0  # the number of the last forward whose mask may separate the documents of a pack
        # Proofs of the models whose attention has run, for a backward, since the last loss or backward.
        self.training: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.trained: WeakSet[Any] = WeakSet()  # the same, since the last sum of a sharder
        self.loss_groups: set[str] = set()  # names of groups with losses of the sequence: see batch/forwards.py


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def state_of(group: dist.ProcessGroup) -> GroupState:
    state = _states.get(group)
    return _states.setdefault(group, GroupState()) if state is None else state


def register_part(part: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Let ``part`` share the operations of ``group``."""
    # Not the whole state, which holds the part.
    _states[part] = GroupState(state_of(group).operations)


def states() -> Iterator[tuple[dist.ProcessGroup, GroupState]]:
    """All groups of this process and their states, also groups of other ranks that are threads."""
    for reference in _states.keyrefs():  # a list, because other threads add groups
        if (group := reference()) is not None:
            yield group, _states[group]
