"""The forwards before a loss: whose ranks a loss meets, so that no rank waits at its next attention."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch.distributed as dist

from cp_styles.comm.agreement import Meeting, StatusRow, is_of_this_world, start_status
from cp_styles.comm.group_state import Forwards, state_of, states
from cp_styles.comm.groups import group_now


def end_forwards(caller: dist.ProcessGroup) -> None:
    """Meet the ranks of every group over which attention has run since the last meeting: see :func:`forwards_here`.

    For functions that communicate over ``caller``: all its ranks must call them. Ranks at their next attention raise
    then, instead of waiting. Communication: one all-gather of a row over each such group.
    """
    callers = set(dist.get_process_group_ranks(caller))
    attends = bool(state_of(caller).get_or_create(Forwards).lengths)
    for group, forwards in forwards_here(caller):
        if not forwards.lengths or group_now(group) is not group:
            continue
        # Ranks may have attended over other groups since. So they always meet over ``caller`` if they have ever
        # attended over it, else over the groups inside of it: these facts are equal on all ranks of a group. But not
        # over groups whose losses are over others, as of a training that was in this thread before.
        always = group is caller if attends else callers.issuperset(dist.get_process_group_ranks(group))
        always = always and (group is caller or not forwards.loss_groups or caller.group_name in forwards.loss_groups)
        if forwards.open or always:
            forwards.open = False
            forwards.loss_groups.add(caller.group_name)
            operations = state_of(group).operations
            start_status(StatusRow, Meeting.FORWARDS, operations.user, operations.axis, group)()


def forwards_here(caller: dist.ProcessGroup) -> Iterator[tuple[dist.ProcessGroup, Forwards]]:
    """The groups of this rank whose forwards a function over ``caller`` may end, and these: without groups that are the
    business of another thread, which may communicate over them now.

    A group is this thread's business if its latest forward was, or if losses of its sequence are over ``caller``. If no
    group inside of ``caller`` is, the only one there is: then the forward has run in another thread than this function.
    """
    mine, others = list[tuple[dist.ProcessGroup, Forwards]](), list[tuple[dist.ProcessGroup, Forwards]]()
    callers, of_caller = set(dist.get_process_group_ranks(caller)), state_of(caller).get_or_create(Forwards)
    known = bool(of_caller.lengths or of_caller.modules)  # a sequence is split over the caller's ranks
    for group, forwards in all_forwards():
        # A group without a forward may get its first one, of another thread, while the caller meets the ranks of a
        # group before it. So it is no business of this thread now.
        if forwards.thread == 0 and group is not caller:
            continue
        inside, losses = callers.issuperset(dist.get_process_group_ranks(group)), forwards.loss_groups
        if group is caller or forwards.thread == threading.get_ident() or caller.group_name in losses:
            mine.append((group, forwards))
            known = known or (inside and (caller.group_name in losses if losses else forwards.thread != 0))
        elif inside and not losses and group_now(group) is group:
            others.append((group, forwards))
    yield from mine if known or len(others) != 1 else [*mine, *others]


def all_forwards() -> Iterator[tuple[dist.ProcessGroup, Forwards]]:
    """The groups of this rank that were not destroyed, and the forwards over them."""
    for group, state in states():
        if is_of_this_world(group):
            yield group, state.get_or_create(Forwards)
