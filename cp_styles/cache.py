"""Functions that remember what they returned, for as long as that takes little memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """A pure function of hashable arguments whose latest results are kept, as many as fit into ``limit`` bytes.

    Threads may share it; two that ask for the same at once may both make it.

    Attributes:
        made: how many results were made, rather than remembered.
        held: bytes of what is remembered now, as ``size`` says.
    """

    def __init__(self, function: Callable[..., T], size: Callable[[tuple[Any, ...], T], int], limit: int) -> None:
        self._function, self._size, self._limit = function, size, limit
        self._found: OrderedDict[tuple[Hashable, ...], tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.made = self.held = 0
        update_wrapper(self, function)

    def __call__(self, *arguments: Hashable) -> T:
        with self._lock:
            if arguments in self._found:
                self._found.move_to_end(arguments)
                return self._found[arguments][0]
        value = self._function(*arguments)
        size = self._size(arguments, value)
        with self._lock:
            self.made += 1
            if arguments not in self._found:
                self._found[arguments] = value, size
                self.held += size
            while self.held > self._limit and len(self._found) > 1:  # what was just made is used at once
                self.held -= self._found.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._found.clear()
            self.held = 0


def remembered(
    size: Callable[[tuple[Any, ...], Any], int], limit: int = 2**26
) -> Callable[[Callable[..., T]], Remembered[T]]:
    """Decorate a function to be :class:`Remembered`; ``size(arguments, value)`` is what a result takes, in bytes."""
    return lambda function: Remembered(function, size, limit)
