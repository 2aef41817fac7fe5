"""The agreement of ranks before an operation: they exchange a row of numbers, and all raise if the rows do not fit.

[Note: meetings] Before each operation, the ranks of a group exchange one row of numbers each (:class:`StatusRow`). All
rows have the same width, and each says for which operation (meeting) it is. So ranks at different operations (for
example because a loop is longer on one rank) read each other's rows, instead of waiting or mixing up messages. Ranks
meet before every attention, and before its backward, where they say of which forward it is. A different number or order
of calls is therefore noticed at the next attention over the group, forward or backward, or at a function of
:mod:`cp_styles.batch`. If a rank does none of these any more, its peers wait for the timeout of the group.

[Note: agreement without waiting] A rank that knows its lengths starts the meeting and goes on: it makes its plan, packs
what it will send, or computes what needs no message. It reads the rows before its first message, and at the
latest before the attention returns. So an error on one rank is still an error on every rank, and no message was sent
that nobody receives.
"""

from __future__ import annotations

import enum
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from cp_styles._compat import graph_task_id, named_range, resolve_group, without_dispatch_modes
from cp_styles.checksum import fingerprint
from cp_styles.comm.group_state import GroupPhase, GroupState, state_of, states
from cp_styles.comm.point_to_point import (
    WIDTH,
    abort_group,
    check_not_aborted,
    gather_numbers,
    offer_numbers,
    start_numbers,
)
from cp_styles.troubleshooting import see


class RankStatus(enum.IntEnum):
    """Whether a rank can take part in the operation."""

    NO_CALL = -1
    BAD_INPUTS = 0
    GOOD = 1


class Meeting(enum.IntEnum):
    """The operations before which ranks meet. ``words`` say where a rank is."""

    words: str

    ATTENTION = 1, "about to attend"
    LAYOUT = 3, "comparing layouts"
    WARNING = 4, "about to warn"
    BACKWARD = 5, "in a backward"
    BLOCK = 6, "at a function of torch's context-parallel API"
    GRADIENTS = 7, "about to sum gradients"
    COLLECTIVE = 8, "at a function of cp_styles.collectives"
    MASK = 9, "making a mask"
    DECODE = 10, "about to decode"
    BATCH = 11, "cutting a batch"
    FORWARDS = 12, "through with the forward"
    COLLECTIVE_BACKWARD = 13, "in the backward of a function of cp_styles.collectives"
    POSITIONS = 14, "asking for the largest position"

    def __new__(cls, number: int, words: str) -> Meeting:
        meeting = int.__new__(cls, number)
        meeting._value_, meeting.words = number, words
        return meeting


_OF_BACKWARDS = (Meeting.BACKWARD, Meeting.COLLECTIVE_BACKWARD)
# Added to a meeting inside a backward: a recomputed attention must not meet one that runs for the first time.
_AGAIN = 64


class StatusRow(NamedTuple):
    """The row of numbers of one rank. Each meeting uses the fields that it needs.

    Attributes:
        q_length: number of local queries, or another number that may differ between ranks.
        kv_length: number of local keys.
        status: a :class:`RankStatus`.
        meeting: the :class:`Meeting` of this rank.
        who: a hash of the name of the module or function.
        place: the module and the index of the call in its forward, see :func:`pack_call_number`; in a backward, the
            number of its forward.
        facts: a hash of what must be the same on all ranks, see :func:`compare`.
        numbers: others, which the caller judges, see :class:`~cp_styles.engine.observers.RankCheck`.
    """

    q_length: int = 0
    kv_length: int = 0
    status: int = RankStatus.GOOD
    meeting: int = 0
    who: int = 0
    place: int = 0
    facts: int = 0
    numbers: tuple[int, ...] = (0, 0)


_OWN = len(StatusRow._fields) - 1
assert _OWN + len(StatusRow().numbers) == WIDTH  # such rows travel directly


def pack_call_number(which: int, index: int) -> int:
    """``which`` of several equal callers, and an index below _INDICES, as one number. 0 is unknown and matches any."""
    return which * _INDICES + index % _INDICES


_INDICES = 2**16


class StatusRows(list[StatusRow]):
    """The rows of all ranks, in group order.

    Attributes:
        columns: all ranks' values of each field; ``numbers`` has them for each check.
        equal: whether rows differ in nothing but lengths, so that there is nothing to compare.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        """``rows`` have WIDTH numbers each."""
        super().__init__()
        for row in rows:
            self.append(StatusRow._make((*row[:_OWN], tuple(row[_OWN:]))))
        fields = tuple(zip(*rows, strict=True))
        self.columns: Any = StatusRow._make((*fields[:_OWN], fields[_OWN:]))
        self.equal = [*map(len, map(set, fields[2:]))] == [1] * (WIDTH - 2)


def start_status(
    build: Callable[[], StatusRow],
    meeting: Meeting,
    name: str,
    axis: str,
    group: dist.ProcessGroup,
    *,
    agrees: bool = True,
    assumed: Callable[[StatusRow], Sequence[StatusRow]] | None = None,
    path: str = "",
    state: GroupState | None = None,
) -> Callable[[], StatusRows]:
    """Start a meeting. The result returns the rows of all ranks; ``build()`` makes this rank's row, now. See
    [Note: meetings].

    Unless the ranks agree (``agrees``), ``assumed`` makes the rows of all ranks from this rank's row, as if all ranks
    made the same call; None if they are not known. ``path`` is the module that calls, for messages. ``state`` is the
    state of the group, if the caller has it.

    If ``build`` raises an Exception, this rank raises it when all know, and its peers raise too.
    (Other BaseExceptions, such as KeyboardInterrupt, end the connections of the group.)
    Communication: one all-gather of a row; none unless ``agrees``. If a rank refuses, one of its reason.

    Raises:
        ValueError: on every rank, if one has refused, or if the ranks are not at the same meeting.
    """
    state = state or check_not_aborted(group, name)
    operations = state.operations
    if operations.broken:
        check_not_aborted(group, name)  # raises
    operations.check = None  # of an attention that has failed
    problem: Exception | None = None
    row = StatusRow(status=RankStatus.BAD_INPUTS)
    try:
        with without_dispatch_modes():
            row = build()
    except Exception as error:
        problem = error
    except BaseException as error:  # an interrupt. A program that goes on after it is not where its peers are
        abort_group(group, error)
        raise
    operations.user, operations.axis = name, axis
    again = _AGAIN if meeting not in _OF_BACKWARDS and graph_task_id() >= 0 else 0
    mine = row._replace(meeting=meeting + again, who=zlib.crc32(name.encode()))
    if not agrees:
        if problem is not None:
            abort_group(group, problem)  # its peers take part, and wait for this rank's messages
            raise problem
        if assumed is None:
            raise ValueError(
                f"{name}: Checks(agreement=False) needs the lengths of all ranks: give the attention a SequenceLayout "
                "such as head_tail(length, ranks) instead of a balancer, or open a SequenceScope"
            )
        rows: Any = [(*row[:_OWN], *row.numbers) for row in assumed(mine)]
        return partial(StatusRows, rows)
    numbers: Any = *mine[:_OWN], *mine.numbers
    started = _StartedMeeting(numbers, problem, meeting, name, axis, group, path)
    if problem is not None:
        started()
    try:
        started.gathered = start_numbers(numbers, group, state)
    except BaseException as error:  # its peers wait for this rank's row
        abort_group(group, error)
        raise
    return started


@dataclass
class _StartedMeeting:
    """A meeting that has started. Calling it waits for the other ranks, and returns the rows.

    Not a function inside of :func:`start_status`: an error's traceback would keep that and the group in it, whose
    connections then stay open, and another rank would wait for this one.
    """

    mine: Sequence[int]
    problem: Exception | None
    meeting: Meeting
    name: str
    axis: str
    group: dist.ProcessGroup
    path: str
    gathered: Callable[[], Sequence[Sequence[int]]] | None = None

    def __call__(self) -> StatusRows:
        try:
            with named_range("agreement:", self.name):
                rows = StatusRows((self.gathered or start_numbers(self.mine, self.group))())
        except BaseException as error:  # its peers may have this rank's row, and count on it
            abort_group(self.group, error)
            if isinstance(error, RuntimeError):
                error.add_note(
                    f"{self.name}: this happened while this rank, {self.meeting.words}, waited for the other ranks "
                    f"of mesh axis {self.axis!r}: one of them has failed, or calls attention fewer times"
                )
            raise
        if self.problem is None and rows.equal:
            return rows
        reasons = self._reasons(rows)
        if self.problem is not None:
            raise self.problem
        _raise_if_refused(rows, self.name, self.axis, reasons)
        _raise_if_apart(rows, self.name, self.axis, self.path)
        return rows

    def _reasons(self, rows: StatusRows) -> str:
        """Why ranks have refused, if some have, and all are here to say and to read it."""
        refused = [rank for rank, row in enumerate(rows) if row.status == RankStatus.BAD_INPUTS]
        if len(refused) in (0, len(rows)) or RankStatus.NO_CALL in rows.columns.status or _apart(rows):
            return ""
        problem = self.problem
        texts = _texts("" if problem is None else f"{type(problem).__name__}: {problem}"[: _ROOM // 8], self.group)
        return "".join(f"; rank {rank}: {texts[rank]}" for rank in refused[:_MOST_SHOWN])


def report_failure(name: str, group: dist.ProcessGroup) -> None:
    """Tell the other ranks, at their next meeting, that this rank has failed. Call it before raising an error.

    It does nothing inside a backward, or if its peers know already or cannot learn of it: see
    :class:`~cp_styles.comm.group_state.GroupPhase`.
    It waits for its peers for at most half a minute, because they may be waiting for this rank somewhere else.
    """
    state = state_of(group)
    if group.size() > 1 and graph_task_id() < 0 and state.phase is not GroupPhase.TOGETHER:
        state.phase = GroupPhase.TOGETHER
        row = StatusRow(status=RankStatus.NO_CALL, meeting=Meeting.ATTENTION, who=zlib.crc32(name.encode()))
        numbers: Any = *row[:_OWN], *row.numbers
        offer_numbers(numbers, group, _PATIENCE_SECONDS)


_PATIENCE_SECONDS = 30.0


def _raise_if_refused(rows: StatusRows, name: str, axis: str, reasons: str) -> None:
    for status, what in (
        (RankStatus.BAD_INPUTS, "their inputs"),
        (RankStatus.NO_CALL, "the attention inside"),
    ):
        refused = [rank for rank, row in enumerate(rows) if row.status == status]
        if refused:
            raise ValueError(
                f"{name}: ranks {refused} of mesh axis {axis!r} refused {what} (their own error says why); this rank "
                f"stops with them{see('Another rank has refused')}{reasons}"
            )


def _apart(rows: StatusRows) -> bool:
    """Whether the ranks are at different meetings or places. A number 0 is not known, and fits any other."""
    which, index = {row.place // _INDICES for row in rows}, {row.place % _INDICES for row in rows}
    return len({(row.meeting, row.who) for row in rows}) > 1 or len(which - {0}) > 1 or len(index - {0}) > 1


def _raise_if_apart(rows: StatusRows, name: str, axis: str, path: str) -> None:
    if not _apart(rows):
        return
    here = ", ".join(f"rank {rank} is {_where(row, rows)}" for rank, row in enumerate(rows[:_MOST_SHOWN]))
    here += f" (this rank: in {path!r})" if path else ""
    more = ", ..." if len(rows) > _MOST_SHOWN else ""
    raise ValueError(
        f"{name}: the ranks of mesh axis {axis!r} are not at the same place: {here}{more}. They call attention, or "
        "another function that communicates over this axis, a different number of times or in a different order: "
        "loops and conditions must depend on values that are the same on all ranks"
        f"{see('Ranks at different places')}"
    )


_MOST_SHOWN = 16


def _where(row: StatusRow, rows: StatusRows) -> str:
    again, meeting = divmod(row.meeting, _AGAIN)
    text = Meeting(meeting).words
    which, index = divmod(row.place, _INDICES)
    if index:
        text += f" (call {index} of its module's forward)"
    if which and meeting in _OF_BACKWARDS:
        text += f" (call {which} over these ranks)"
    elif which and len({other.place // _INDICES for other in rows}) > 1:
        text += f" in module {which:08x}"
    if again:
        text += " again, in a backward"
    if len({other.who for other in rows}) > 1:
        text += f" in module or function {row.who:08x}"
    return text


def begin_backward(group: dist.ProcessGroup | None, forward: int, agrees: bool) -> None:
    """The meeting at the start of the backward of forward number ``forward``. It ends before the first message.

    Communication: one all-gather of a row; none unless ``agrees``.
    """
    if group is None or group.size() == 1:
        return
    state = check_not_aborted(group)
    state.phase = GroupPhase.BACKWARD
    if agrees:
        state.forward_open = False
        row, where = (
            StatusRow(place=pack_call_number(forward, 0)),
            (state.operations.user, state.operations.axis, group),
        )
        state.operations.check = start_status(lambda: row, Meeting.BACKWARD, *where, state=state)


def end_forwards(caller: dist.ProcessGroup) -> None:
    """Meet the ranks of every group over which this rank has run attention since the last such meeting.

    For functions that communicate over ``caller``, all of whose ranks call them. They meet in any case over ``caller``
    if they have ever attended over it, else over the groups of its parts: some ranks may be at their next attention,
    and would not hear of the function. Communication: one all-gather of a row over each such group.
    """
    # A fact decides that is equal on all ranks of a group: some ranks may have attended over other groups since.
    callers = set(dist.get_process_group_ranks(caller))
    whole = bool(state_of(caller).lengths)
    for group, state in states():
        if not state.lengths or state.stand_in is not None or not is_of_this_world(group):
            continue
        among = group is caller if whole else callers.issuperset(dist.get_process_group_ranks(group))
        if state.forward_open or among:
            state.forward_open = False
            start_status(StatusRow, Meeting.FORWARDS, state.operations.user, state.operations.axis, group)()


def is_of_this_world(group: dist.ProcessGroup) -> bool:
    """Whether the group belongs to this rank (ranks may be threads) and was not destroyed."""
    try:
        return resolve_group(group.group_name) is group
    except RuntimeError:
        return False


Caller: TypeAlias = tuple[str, str, dist.ProcessGroup]
"""Who meets: the name of the module or function, the name of the mesh axis, and the group."""


def agree_on_facts(
    describe: Callable[[], tuple[Mapping[str, Any], StatusRow]],
    meeting: Meeting,
    where: Caller,
    advice: str = "",
    path: str = "",
    **options: Any,
) -> StatusRows:
    """A meeting at which facts are compared. ``describe()`` returns them by name, and what else is in the row.

    ``path`` and ``options``: see :func:`start_status`. Raises ValueError on every rank, see :func:`compare`.
    """
    facts: dict[str, Any] = {}

    def build() -> StatusRow:
        described, row = describe()
        facts.update(described)
        return row._replace(facts=fingerprint(list(map(plain, facts.values()))))

    rows = start_status(build, meeting, *where, path=path, **options)()
    compare(rows, (path or where[0], *where[1:]), lambda: facts, advice)
    return rows


def compare(rows: StatusRows, where: Caller, facts: Callable[[], Mapping[str, Any]], advice: str = "") -> None:
    """Raise ValueError on every rank unless all rows have the same ``facts``.

    ``facts()`` are the values of which the number is a hash, by name, so that one of them differs. Messages show short
    texts of them. Communication: none; before an error one all-gather of these texts.
    """
    (name, axis, group), numbers = where, rows.columns.facts
    odd = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    if not odd:
        return
    try:
        text = json.dumps({what: short(value) for what, value in facts().items()})
    except Exception as error:  # its peers wait for this rank's texts
        text = json.dumps({"a value without a text": short(f"{type(error).__name__}: {error}")})
    text = text if len(text) <= _ROOM else json.dumps({"the facts": short(text)})
    ranks = [json.loads(text) for text in _texts(text, group)]
    whats = dict.fromkeys(what for texts in ranks for what in texts)
    named = next((what for what in whats if len({texts.get(what) for texts in ranks}) > 1), "")
    listed = ", ".join(f"rank {rank}: {texts.get(named)}" for rank, texts in enumerate(ranks[:_MOST_SHOWN]))
    if not named:
        named, listed = f"one of {', '.join(whats)}", "their texts are equal"
    raise ValueError(
        f"{name}: the ranks of mesh axis {axis!r} disagree on {named}: ranks {odd} differ from rank 0 ({listed})"
        f"{advice}{see('Ranks that disagree')}"
    )


def _texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """The texts of all ranks, in one message of fixed size: nothing is unpickled."""
    numbers = list(text.encode(errors="replace").ljust(_ROOM)[:_ROOM])
    try:
        return [bytes(row).decode(errors="replace").rstrip() for row in gather_numbers(numbers, group)]
    except BaseException as error:  # its peers wait for this text
        abort_group(group, error)
        raise


_ROOM = 4096


def short(value: Any) -> str:
    """A short :func:`plain` text for a value; short texts stay."""
    text = value if isinstance(value, str) else plain(value)
    return text if len(text) <= 120 else f"{text[:80]}... (crc {zlib.crc32(text.encode()):08x})"


def plain(value: Any) -> str:
    """A text for ``value`` that is the same on every rank: without addresses, functions by name."""
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
