"""What this rank knows of a process group and its parts: who uses them, what is still to check, whether they can go on.

[Note: operations] The messages of a forward, a backward or a collective are one *operation*. The ranks agree on it
before its first message, and all of them then send and receive what its plan says. A rank that leaves it by an error
owes the others messages. They would wait for these, or take later messages for them: NCCL matches messages by order,
and its ranks do not stand still. So such a rank ends its connections over gloo. Every rank that waits for it gets an
error at once, leaves its own operation, and ends its own connections. All others learn of it at their next meeting,
which is over gloo too. From then on the group is of no use, and every call over it raises.

The number of the operation is the tag of its messages. Gloo never takes a message of one operation for one of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist


@dataclass(eq=False, slots=True)
class GroupState:
    """The state of a group, which its parts share. It must not hold the group, but for ``check``.

    Attributes:
        user: the module or function that uses the group, for messages.
        axis: the name of the mesh axis of its ranks, for messages; "group" if only the group is known.
        check: is called once, before the next message: see :func:`check_later`.
        agreed: the ranks have agreed on the operation that is under way, so the others count on this rank.
        forwards: the number of attention forwards on which the ranks have agreed. That of a forward names it in its
            backward.
        collectives: the same for :mod:`cp_styles.collectives`.
        backward_of: the number of the forward whose backward is under way; 0 in a forward.
        modules: to how many modules each style was applied over this group.
        meshes: the private meshes of styles over this group: see :mod:`cp_styles.styles.private_mesh`.
        broken: the error by which this rank has left an operation; empty if there was none.
    """

    user: str = "attention"
    axis: str = "group"
    check: Callable[[], object] | None = None
    agreed: bool = False
    forwards: int = 0
    collectives: int = 0
    backward_of: int = 0
    modules: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    meshes: dict[Any, Any] = field(default_factory=dict)
    broken: str = ""

    def name_of(self, user: str) -> str:
        """The name of a module or function that uses the group, with the axis."""
        return user if "mesh axis" in user else f"{user} (mesh axis {self.axis!r})"

    @property
    def tag(self) -> int:
        """The tag of the messages of the operation that is under way."""
        number = 2 * self.backward_of + 1 if self.backward_of else 2 * self.forwards
        return _FIRST_TAG + number % _FIRST_TAG


# Users count their tags from 0, and rows of numbers have tags from 2**30 on.
_FIRST_TAG = 2**29


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def state_of(group: dist.ProcessGroup) -> GroupState:
    found = _states.get(group)
    return _states.setdefault(group, GroupState()) if found is None else found


def share_state(part: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Let ``part`` have the state of ``group``."""
    _states[part] = state_of(group)


def check_later(group: dist.ProcessGroup, check: Callable[[], object]) -> None:
    """Call ``check`` before the next message over ``group`` or a part of it, or at the next :func:`settle`.

    So the ranks agree while each of them prepares, or computes what needs nothing of the others. If ``check`` raises,
    no message was sent that another rank would have to receive.
    """
    state_of(group).check = check


def drop_check(group: dist.ProcessGroup) -> None:
    """Drop the check of :func:`check_later`: an attention has failed on this rank."""
    state_of(group).check = None


def settle(group: dist.ProcessGroup | None) -> None:
    """Run the check of :func:`check_later` now, if there is one."""
    state = None if group is None else _states.get(group)
    while state is not None and state.check is not None:  # one may find that there is more to check
        check, state.check = state.check, None
        check()
        state.agreed = True
