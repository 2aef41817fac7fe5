"""Which ``with`` is around a call, where several are open and do not end in the reverse order of their beginnings.

A generator may stop inside a ``with`` and go on when others have been opened, or be closed by another thread.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any, TypeVar

AnyOpening = TypeVar("AnyOpening", bound="Opening")


class Opening:
    """One ``with`` of a scope or a block, from its beginning to its end."""

    ended = False

    def open_in(self, variable: ContextVar[tuple[Any, ...]]) -> None:
        """Begin: become the last of the openings in a context variable."""
        before = variable.get()
        generators = list(_running_generators())
        self._generator, self._stopped = generators[0] if generators else None, []
        if before:
            before = tuple(opening for opening in before if not opening.ended)
            # What stopped in a generator before this began. When that generator runs again, it is around the call.
            self._stopped = [opening for opening in before if opening._generator not in (None, *generators)]
        self._variable, self._token = variable, variable.set((*before, self))

    def end(self) -> None:
        """Leave the context variable. Others in it may have begun earlier or later, and stay."""
        others = tuple(opening for opening in self._variable.get() if opening is not self)
        try:
            self._variable.reset(self._token)
        except ValueError:  # it began in another context, whose variable cannot be set from here
            self.ended = True
        self._variable.set(others)
        self._generator, self._stopped = None, []

    _variable: ContextVar[tuple[Any, ...]]
    _token: Token[tuple[Any, ...]]
    _generator: FrameType | None
    _stopped: list[Opening]


def innermost(openings: Sequence[AnyOpening]) -> AnyOpening | None:
    """That of these openings of one context which is nearest around the running code. None if all have ended."""
    openings = [opening for opening in openings if not opening.ended] if openings else openings
    if not openings:
        return None
    last = openings[-1]
    if last._stopped:
        by_generator = {opening._generator: opening for opening in openings if opening in (*last._stopped, last)}
        for frame in _running_generators():
            if frame in by_generator:
                return by_generator[frame]
    return last


def _running_generators() -> Iterator[FrameType]:
    """The frames of generators that are running in this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
            yield frame
        frame = frame.f_back
