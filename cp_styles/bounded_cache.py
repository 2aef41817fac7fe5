"""Results of functions that are decorated with :func:`remembered`, and tables of a few entries, for what belongs to one
object."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, update_wrapper
from typing import Any, Generic, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cp_styles._compat import without_dispatch_modes

T = TypeVar("T")
K = TypeVar("K")


class LatestEntries(OrderedDict[K, T]):
    """A table of the entries that were put in last, of at most ``most``."""

    def __init__(self, most: int = 16) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, value: T) -> T:
        self[key] = value
        while len(self) > self.most:
            self.popitem(last=False)
        return value


_about: WeakIdKeyDictionary = WeakIdKeyDictionary()


def known_about(thing: Any) -> dict[Any, Any]:
    """Facts about an object of a caller, such as a tensor, by the function that computed them. It ends with the
    object, which no value may hold."""
    table: dict[Any, Any] | None = _about.get(thing)
    if table is None:
        table = _about[thing] = {}
    return table


# Results are kept separately for each value of this. A ContextVar, because ranks may be threads.
_current: ContextVar[object] = ContextVar("bounded_cache", default=None)


@contextmanager
def as_constants() -> Iterator[None]:
    """A context for tensors that outlive the call: plain ones, whatever mode the first call is made in. Autograd does
    not save tensors of inference mode. Fake tensors have no numbers, and a recomputation makes nothing again."""
    with torch.inference_mode(False), without_dispatch_modes():
        yield


def remembered(entries: int) -> Callable[[Callable[..., T]], Remembered[T]]:
    """A decorator for pure functions of hashable arguments: the last ``entries`` results are kept (an ``lru_cache``).

    Arguments and results may hold numbers, texts and tables of positions on the host, which may have copies on devices
    (``DeviceTables``). They hold no process group, because a group belongs to one rank and ranks may be threads, and no
    tensor of a caller. Two threads that need the same result at the same time may both compute it, and get equal ones.
    """
    return lambda function: Remembered(function, entries)


class Remembered(Generic[T]):
    """A function as :func:`remembered` makes it. ``cache_info`` and ``cache_clear`` come from ``lru_cache``."""

    def __init__(self, function: Callable[..., T], entries: int) -> None:
        def make(_cache: object, *arguments: Hashable) -> T:
            with as_constants():
                return function(*arguments)

        self._kept = lru_cache(entries)(make)
        self.cache_info, self.cache_clear = self._kept.cache_info, self._kept.cache_clear
        update_wrapper(self, function)

    def __call__(self, *arguments: Hashable) -> T:
        return self._kept(_current.get(), *arguments)


@contextmanager
def another_cache() -> Iterator[None]:
    """Inside, this thread's results are made anew, and are found inside only."""
    token = _current.set(object())
    try:
        yield
    finally:
        _current.reset(token)
