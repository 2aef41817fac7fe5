"""The agreement of ranks before an operation: they exchange a row of numbers, and all raise if the rows do not fit."""

from __future__ import annotations

import contextlib
import enum
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from cp_styles._lib.checksum import fingerprint
from cp_styles._lib.compat import graph_task_id, named_range, resolve_group, stops_recomputation, without_dispatch_modes
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.group_state import GroupState, state_of
from cp_styles.comm.point_to_point import (
    WIDTH,
    Mailbox,
    abort_group,
    check_not_aborted,
    gather_numbers,
    offer_numbers,
    start_numbers,
)
from cp_styles.comm.turn import Turn


class Meeting(enum.IntEnum):
    """The operations before which ranks meet. ``words`` describe, for messages, where a rank is."""

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


_BACKWARD_MEETINGS = (Meeting.BACKWARD, Meeting.COLLECTIVE_BACKWARD)
# Added to the number of a meeting inside a backward: a recomputed attention must not match the first run of another.
_RECOMPUTED = 64


class StatusRow(NamedTuple):
    """The row of numbers of one rank. Each meeting uses the fields that it needs.

    Attributes:
        q_length: number of local queries, or another number that may differ between ranks.
        kv_length: number of local keys.
        good: 0 if this rank has failed.
        meeting: the :class:`Meeting` of this rank.
        who: a hash of the name of the module or function.
        place: the module and the index of the call in its forward, see :func:`pack_call_number`; in a backward, the
            number of its forward.
        facts: a hash of the facts that must be equal on all ranks, see :func:`compare`.
        numbers: the numbers of the checks, see :class:`~cp_styles.engine.observers.RankCheck`.
    """

    q_length: int = 0
    kv_length: int = 0
    good: int = 1
    meeting: int = 0
    who: int = 0
    place: int = 0
    facts: int = 0
    numbers: tuple[int, ...] = (0, 0)


_FIRST_CHECK = len(StatusRow._fields) - 1
assert _FIRST_CHECK + len(StatusRow().numbers) == WIDTH  # rows of this width are direct messages


def pack_call_number(which: int, index: int) -> int:
    """Pack ``which``, a hash of the caller, and the index of its call into one number. 0 is unknown and matches any."""
    return which * _CALLS_OF_MODULE + index % _CALLS_OF_MODULE


_CALLS_OF_MODULE = 2**16


class StatusRows(Sequence[StatusRow]):
    """The rows of all ranks, in group order.

    Attributes:
        columns: the values of all ranks for each field; in ``numbers`` for each check.
        equal: whether rows differ in lengths only, so that nothing is left to compare.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        """``rows`` have WIDTH numbers each."""
        self._numbers = rows
        fields = tuple(zip(*rows, strict=True))
        self.columns: Any = StatusRow._make((*fields[:_FIRST_CHECK], fields[_FIRST_CHECK:]))
        self.equal = False not in [field == field[:1] * len(rows) for field in fields[2:]]

    @cached_property
    def _rows(self) -> list[StatusRow]:  # most meetings read the columns alone
        return [StatusRow._make((*row[:_FIRST_CHECK], tuple(row[_FIRST_CHECK:]))) for row in self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


# [Note: meetings] Before each operation, the ranks of a group exchange one row of numbers each (:class:`StatusRow`).
# All rows have the same width, and each has the number of its operation (meeting). So ranks at different operations,
# for example because a loop is longer on one rank, read each other's rows, instead of waiting or mixing up messages.
# Ranks meet before every attention, and before its backward, with the number of the forward. A different number or
# order of calls is therefore an error at the next attention over the group, forward or backward, or at a function of
# :mod:`cp_styles.batch`. If a rank makes no further such call, its peers wait for the timeout of the group.
#
# [Note: agreement without waiting] A rank with a known length starts the meeting and goes on: it makes its plan, packs
# its messages, or computes with its own keys. It reads the rows before its first message, and at the latest before the
# attention returns. So an error on one rank is still an error on every rank, and every sent message has a receiver.
def start_status(
    build: Callable[[], StatusRow],
    meeting: Meeting,
    name: str,
    axis: str,
    group: dist.ProcessGroup,
    *,
    agrees: bool = True,
    assumed: Callable[[Sequence[int]], Sequence[Sequence[int]]] | None = None,
    path: str = "",
    state: GroupState | None = None,
    judge: Callable[[StatusRows], object] | None = None,
) -> Callable[[], StatusRows]:
    """Start a meeting: see [Note: meetings]. The result, a function, waits for and returns the rows of all ranks.

    If ``build`` raises an Exception, this rank raises it after the meeting, and its peers raise too.

    Args:
        build: makes this rank's row. It is called at once.
        meeting, name, axis, group: the operation, and its caller for messages.
        agrees: False: the ranks exchange nothing.
        assumed: makes the rows of all ranks from this rank's row, if they exchange nothing. None: it is not possible.
        path: the module that calls, for messages.
        state: the state of the group, if the caller has it.
        judge: is called with the rows of all ranks, and raises on every rank if they do not fit.

    Communication: one all-gather of a row; none unless ``agrees``. A rank that has failed sends its reason.

    Raises:
        ValueError: on every rank, if a rank has failed, or if the ranks are not at the same meeting.
    """
    state = state or check_not_aborted(group, name)
    operations = state.operations
    if operations.broken:
        check_not_aborted(group, name)  # raises
    if operations.check is not None:
        operations.run_deferred_check()  # of an attention in which this meeting is
    problem: Exception | None = None
    row = StatusRow(good=0)
    try:
        with without_dispatch_modes():
            row = build()
    except Exception as error:
        problem = error
    except BaseException as error:  # an interrupt: after it, this program may go on at another place than its peers
        abort_group(group, error)
        raise
    operations.user, operations.axis = name, axis
    recomputed = _RECOMPUTED if meeting not in _BACKWARD_MEETINGS and graph_task_id() >= 0 else 0
    row = row._replace(meeting=meeting + recomputed, who=zlib.crc32(name.encode()))
    numbers: Any = *row[:_FIRST_CHECK], *row.numbers
    started = _StartedMeeting(numbers, problem, meeting, name, axis, group, path, state.turn, judge)
    if not agrees:
        if problem is not None:
            abort_group(group, problem)  # peers take part in the operation, and wait for this rank's messages
            raise problem
        if assumed is None:
            problem = ValueError(
                f"{name}: Checks(agreement=False) needs the lengths of all ranks: give the attention a SequenceLayout "
                "such as head_tail(length, ranks) instead of a balancer, or open a SequenceScope"
            )
            state.turn.note_known(problem)  # every rank raises it
            raise problem
        rows = assumed(numbers)
        started.gathered = lambda: rows
        return started
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
    """A meeting that has started. Calling it waits for the other ranks, and returns the rows of all ranks."""

    # A class and not a closure: the traceback of an error would keep the closure and its group alive. Connections would
    # then stay open, and another rank would wait for this rank.

    row: Sequence[int]
    problem: Exception | None
    meeting: Meeting
    name: str
    axis: str
    group: dist.ProcessGroup
    path: str
    turn: Turn
    judge: Callable[[StatusRows], object] | None
    gathered: Callable[[], Sequence[Sequence[int]]] | None = None

    def __call__(self) -> StatusRows:
        self.turn.begin()
        try:
            with named_range("agreement:", self.name):
                rows = StatusRows((self.gathered or start_numbers(self.row, self.group))())
        except BaseException as error:  # peers may have this rank's row, and wait for its messages
            abort_group(self.group, error)
            if isinstance(error, RuntimeError):
                error.add_note(
                    f"{self.name}: this happened while this rank, {self.meeting.words}, waited for the other ranks "
                    f"of mesh axis {self.axis!r}: one of them has failed, or calls attention fewer times"
                )
            raise
        try:
            if self.problem is not None or not rows.equal:
                self._compare(rows)
            if self.judge is not None:
                self.judge(rows)
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: peers wait until this rank has read their reasons
                abort_group(self.group, error)
            self.turn.note_known(error)
            raise
        return rows

    def _compare(self, rows: StatusRows) -> None:
        """Raise if this rank or another one has failed, or if the ranks are not at the same call."""
        mailbox, failed = state_of(self.group).mailbox, [rank for rank, row in enumerate(rows) if not row.good]
        if self.problem is not None:
            if isinstance(mailbox, Mailbox):
                _send_reason(f"{type(self.problem).__name__}: {self.problem}", mailbox, rows)
            raise self.problem
        if failed:
            reasons = [f"; rank {rank}: {_read_reason(mailbox, rank)}" for rank in failed]
            raise ValueError(
                f"{self.name}: ranks {failed} of mesh axis {self.axis!r} have failed, and this rank stops with them"
                f"{see('Another rank has failed')}{''.join(reasons[:_MAX_RANKS_SHOWN])}"
            )
        _raise_if_at_different_calls(rows, self.name, self.axis, self.path)


def tell_peers(name: str, group: dist.ProcessGroup, error: BaseException, *, agrees: bool = True) -> None:
    """Tell the other ranks, at their next meeting, that this rank has failed, unless they know: see [Note: turns].

    ``error`` is the error that this rank raises. It waits for at most half a minute, because peers may wait for this
    rank somewhere else. Communication: one all-gather of a row, and the text of the error to each peer. Unless
    ``agrees``, the ranks have no meetings, and this rank ends its connections.
    """
    state = state_of(group)
    if group.size() == 1 or not isinstance(error, Exception) or stops_recomputation(error):
        return
    # An error in an operation ends it, and a group that was destroyed has no peers.
    if state.operations.agreed or not state.turn.must_tell(error) or not is_of_this_world(group):
        return
    state.turn.note_known(error)
    if not agrees:
        abort_group(group, error)
        return
    row = StatusRow(good=0, meeting=Meeting.ATTENTION, who=zlib.crc32(name.encode()))
    numbers: Any = *row[:_FIRST_CHECK], *row.numbers
    reason = f"{type(error).__name__}: {error}"  # a reference to the error would keep the group
    offer_numbers(numbers, group, _PATIENCE_SECONDS, partial(_send_reason, reason))


@contextlib.contextmanager
def telling(name: str, group: dist.ProcessGroup, *, agrees: bool = True) -> Iterator[None]:
    """A context that tells the other ranks of an error that leaves it: see :func:`tell_peers`."""
    try:
        yield
    except Exception as error:
        tell_peers(name, group, error, agrees=agrees)
        raise


_PATIENCE_SECONDS = 30.0


def _send_reason(reason: str, mailbox: Mailbox, rows: Sequence[Sequence[Any]]) -> None:
    """Send the reason of this rank to the ranks that have not failed."""
    with contextlib.suppress(RuntimeError), without_dispatch_modes():  # the error of this rank is more useful
        mailbox.send_text(reason, [rank for rank, row in enumerate(rows) if row[_GOOD]])


def _read_reason(mailbox: Mailbox | None, rank: int) -> str:
    """The reason of a rank that has failed."""
    with contextlib.suppress(RuntimeError), without_dispatch_modes():  # the rank has ended
        if mailbox is not None:
            return mailbox.read_text(rank)
    return "its error has the reason"


_GOOD = StatusRow._fields.index("good")


def _are_at_different_calls(rows: StatusRows) -> bool:
    """Whether the ranks are at different meetings or calls. A number 0 is unknown, and matches any number."""
    which, index = {row.place // _CALLS_OF_MODULE for row in rows}, {row.place % _CALLS_OF_MODULE for row in rows}
    return len({(row.meeting, row.who) for row in rows}) > 1 or len(which - {0}) > 1 or len(index - {0}) > 1


def _raise_if_at_different_calls(rows: StatusRows, name: str, axis: str, path: str) -> None:
    if not _are_at_different_calls(rows):
        return
    shown = enumerate(rows[:_MAX_RANKS_SHOWN])
    here = ", ".join(f"rank {rank} is {_describe_position(row, rows)}" for rank, row in shown)
    here += f" (this rank: in {path!r})" if path else ""
    more = ", ..." if len(rows) > _MAX_RANKS_SHOWN else ""
    raise ValueError(
        f"{name}: the ranks of mesh axis {axis!r} are not at the same place: {here}{more}. They call attention, or "
        "another function that communicates over this axis, a different number of times or in a different order: "
        "loops and conditions must depend on values that are the same on all ranks"
        f"{see('Ranks at different places')}"
    )


_MAX_RANKS_SHOWN = 16


def _describe_position(row: StatusRow, rows: StatusRows) -> str:
    recomputed, meeting = divmod(row.meeting, _RECOMPUTED)
    text = Meeting(meeting).words
    which, index = divmod(row.place, _CALLS_OF_MODULE)
    if index:
        text += f" (call {index} of its module's forward)"
    if which and meeting in _BACKWARD_MEETINGS:
        text += f" (call {which} over these ranks)"
    elif which and len({other.place // _CALLS_OF_MODULE for other in rows}) > 1:
        text += f" in module {which:08x}"
    if recomputed:
        text += " again, in a backward"
    if len({other.who for other in rows}) > 1:
        text += f" in module or function {row.who:08x}"
    return text


def begin_backward(group: dist.ProcessGroup | None, forward: int, agrees: bool) -> None:
    """Start the meeting of the backward of forward number ``forward``. The ranks compare before the first message.

    Communication: one all-gather of a row; none unless ``agrees``.
    """
    if group is None or group.size() == 1:
        return
    if not agrees:
        check_not_aborted(group)
        return
    state = state_of(group)
    where = state.operations.user, state.operations.axis, group
    row = partial(StatusRow, place=pack_call_number(forward, 0))
    state.operations.check = start_status(row, Meeting.BACKWARD, *where, state=state)


def is_of_this_world(group: dist.ProcessGroup) -> bool:
    """Whether the group belongs to this rank (ranks may be threads) and was not destroyed."""
    try:
        return resolve_group(group.group_name) is group
    except RuntimeError:
        return False


Caller: TypeAlias = tuple[str, str, dist.ProcessGroup]
"""The caller of a meeting: the name of the module or function, the name of the mesh axis, and the group."""


def agree_on_facts(
    describe: Callable[[], tuple[Mapping[str, Any], StatusRow]],
    meeting: Meeting,
    where: Caller,
    advice: str = "",
    path: str = "",
    **options: Any,
) -> StatusRows:
    """Run a meeting that compares facts. ``describe()`` returns the facts by name, and a row for the other fields.

    ``path`` and ``options``: see :func:`start_status`. Raises ValueError on every rank, see :func:`compare`.
    """
    facts: dict[str, Any] = {}

    def build() -> StatusRow:
        described, row = describe()
        facts.update(described)
        return row._replace(facts=fingerprint(list(map(plain, facts.values()))))

    judge = partial(compare, where=(path or where[0], *where[1:]), facts=lambda: facts, advice=advice)
    return start_status(build, meeting, *where, path=path, judge=judge, **options)()


def compare(rows: StatusRows, where: Caller, facts: Callable[[], Mapping[str, Any]], advice: str = "") -> None:
    """Raise ValueError on every rank unless all rows have the same ``facts``.

    ``facts()`` returns the hashed values by name. The message names one that differs, with short texts of its values.
    Communication: none; before an error one all-gather of these texts.
    """
    (name, axis, group), numbers = where, rows.columns.facts
    odd = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    if not odd:
        return
    try:
        text = json.dumps({fact: short(value) for fact, value in facts().items()})
    except Exception as error:  # peers wait for this rank's texts
        text = json.dumps({"a value without a text": short(f"{type(error).__name__}: {error}")})
    text = text if len(text) <= TEXT_BYTES else json.dumps({"the facts": short(text)})
    ranks = [json.loads(text) for text in gather_texts(text, group)]
    names = dict.fromkeys(fact for texts in ranks for fact in texts)
    fact = next((fact for fact in names if len({texts.get(fact) for texts in ranks}) > 1), "")
    values = ", ".join(f"rank {rank}: {texts.get(fact)}" for rank, texts in enumerate(ranks[:_MAX_RANKS_SHOWN]))
    if not fact:
        fact, values = f"one of {', '.join(names)}", "their texts are equal"
    raise ValueError(
        f"{name}: the ranks of mesh axis {axis!r} disagree on {fact}: ranks {odd} differ from rank 0 ({values})"
        f"{advice}{see('Ranks that disagree')}"
    )


def gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """The texts of all ranks, cut after TEXT_BYTES, the size of a message. Nothing is unpickled."""
    numbers = list(text.encode(errors="replace").ljust(TEXT_BYTES)[:TEXT_BYTES])
    try:
        return [bytes(row).decode(errors="replace").rstrip() for row in gather_numbers(numbers, group)]
    except BaseException as error:  # peers wait for this text
        abort_group(group, error)
        raise


TEXT_BYTES = 4096


def short(value: Any) -> str:
    """The :func:`plain` text of a value, cut if it is long. Strings are their own texts."""
    text = value if isinstance(value, str) else plain(value)
    return text if len(text) <= 120 else f"{text[:80]}... (crc {zlib.crc32(text.encode()):08x})"


def plain(value: Any) -> str:
    """A text for ``value`` that is equal on every rank: without addresses, functions by name."""
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
