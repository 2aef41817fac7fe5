"""The state of a process group on this rank: its user, the agreements of its ranks, and whether they can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_styles.bounded_cache import LatestEntries
from cp_styles.comm.checks import Checks
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
        broken: the error by which this rank has left an operation; empty if there was none.
    """

    user: str = "attention"
    axis: str = "group"
    check: Callable[[], object] | None = None
    agreed: bool = False
    forwards: int = 0
    collectives: int = 0
    backward_of: int = 0
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

    @property
    def tag(self) -> int:
        """The tag of the messages of the running operation."""
        number = 2 * self.backward_of + 1 if self.backward_of else 2 * self.forwards
        return _FIRST_TAG + number % _FIRST_TAG


# Users count their tags from 0, and rows of numbers have tags from 2**30 on.
_FIRST_TAG = 2**29


@dataclass(eq=False)
class StandIn:
    """A group that replaces another group on this rank, wherever a style, block or function resolves it.

    Attributes:
        group: of as many ranks, or of this rank alone.
        mesh: the mesh of the step, with this rank alone on the axis of the sequence; None for a group of as many ranks.
        objects: objects that other layers have made over ``group``. They end with it.
    """

    # An attribute of the group's state and not a context variable, because a backward on a device has its own thread.

    group: dist.ProcessGroup
    mesh: DeviceMesh | None = None
    objects: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class GroupState:
    """The state of a group on this rank. It must not hold the group.

    Attributes:
        operations: the operations over the group, shared with its parts.
        turn: which errors of this rank its peers know.
        forward_open: the ranks have agreed on forwards since the last meeting for a backward.
        thread: the thread that has run the latest forward; 0 before the first one.
        losses: the names of groups over which losses of this sequence are, see
            :func:`~cp_styles.batch.states_here`.
        separated: the number of the last forward whose mask may have kept the documents of a pack apart.
        lengths: global numbers of queries and keys, by the local numbers, in the latest call with these.
        modules: the number of modules to which each style was applied over this group.
        meshes: the private meshes of styles over this group: see :mod:`cp_styles.styles.dtensors`.
        in_order: meshes whose ranks were found to be in the order of the group.
        opened: there was a collective on a device.
        host: gloo for a group without a CPU backend, for agreement; False if it does not connect the ranks.
        mailbox: sends rows of numbers as direct messages; None for a group with a CPU backend other than gloo, and
            "new" before the first row.
        parts: parts of the group, by their ranks. Never the group itself.
        objects: objects of other layers, see :meth:`get_or_create`.
        local: modules and parameters that are meant to differ between the ranks, by id.
        stand_in: the group that replaces this group while :func:`cp_styles.verify.verify` runs a step.
        alone: the group is this rank alone, and replaces the ranks of a sequence in such a run.
        planted: a mistake in the attentions of such a run, :class:`~cp_styles.verify.planted.PlantedCut`, or None.
        training: proofs of the models whose attention has run, for a backward, since the last loss or backward.
        trained: proofs of the models whose attention has run, for a backward, since the last sum of a sharder.
        notes: of the group of all ranks, in the step of verify with all ranks:
            :class:`~cp_styles.checks.proof.StepNotes`. None otherwise.
    """

    operations: Operations = field(default_factory=Operations)
    turn: Turn = field(default_factory=Turn)
    forward_open: bool = False
    thread: int = 0
    losses: set[str] = field(default_factory=set)
    separated: int = 0
    lengths: LatestEntries[tuple[int, int], tuple[int, int]] = field(default_factory=partial(LatestEntries, 256))
    modules: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    meshes: dict[Any, Any] = field(default_factory=dict)
    in_order: WeakSet[DeviceMesh] = field(default_factory=WeakSet)
    opened: bool = False
    host: Any = None
    mailbox: Any = "new"
    parts: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    objects: dict[Any, Any] = field(default_factory=dict)
    local: dict[int, ref[Any]] = field(default_factory=dict)
    stand_in: StandIn | None = None
    alone: bool = False
    planted: Any = None
    training: WeakKeyDictionary[Any, None] = field(default_factory=WeakKeyDictionary)
    trained: WeakSet[Any] = field(default_factory=WeakSet)
    notes: Any = None

    def learn(self, checks: Checks) -> None:
        """Note what the checks of a style or function over the group leave out."""
        self.local.update((id(item), ref(item)) for item in checks.local)

    def get_or_create(self, kind: Callable[[], T]) -> T:
        """The only object of this class for the group. It is made at the first use."""
        if kind not in self.objects:
            self.objects[kind] = kind()
        return self.objects[kind]


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
        group = reference()
        state = None if group is None else _states.get(group)
        if group is not None and state is not None:
            yield group, state
