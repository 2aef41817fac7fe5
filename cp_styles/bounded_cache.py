"""A cache of function results that is bounded by bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """A pure function of hashable arguments, with a cache of its latest results of at most ``limit`` bytes.

    Threads may share it. Two threads that need the same result at the same time may both compute it.

    Attributes:
        made: number of results that were computed, not found in the cache.
        held: bytes of the cached results, measured by ``size``.
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
            while self.held > self._limit and len(self._found) > 1:  # keep at least the latest result
                self.held -= self._found.popitem(last=False)[1][1]
        return value

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """Inside, every result is computed anew. Afterwards the cache is as it was before."""
        with self._lock:
            kept = self._found, self.held
            self._found, self.held = OrderedDict(), 0
        try:
            yield
        finally:
            with self._lock:
                self._found, self.held = kept

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._found.clear()
            self.held = 0


def remembered(
    size: Callable[[tuple[Any, ...], Any], int], limit: int = 2**26
) -> Callable[[Callable[..., T]], Remembered[T]]:
    """Decorator that makes a function :class:`Remembered`. ``size(arguments, value)`` is the bytes of a result."""
    return lambda function: Remembered(function, size, limit)
