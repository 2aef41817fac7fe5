"""Caches: of functions that are decorated with :func:`remembered`, of facts about one object, and of a few entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import lru_cache, update_wrapper
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cp_styles._lib.compat import without_dispatch_modes

T = TypeVar("T")
K = TypeVar("K")


class LatestEntries(OrderedDict[K, T]):
    """A table of the last ``most`` entries."""

    def __init__(self, most: int = 16) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, value: T) -> T:
        self[key] = value
        while len(self) > self.most:
            self.popitem(last=False)
        return value


def is_value(thing: object) -> bool:
    """Whether a cache may keep ``thing``: it consists of plain values, in tuples and frozen dataclasses."""
    made = vars(type(thing)).get("__dataclass_params__")  # None for a class that only inherits from a dataclass
    if made is not None:
        return made.frozen and all(is_value(getattr(thing, each.name)) for each in fields(cast(Any, thing)))
    if isinstance(thing, tuple):
        return all(map(is_value, thing))
    return isinstance(thing, (bool, int, float, str, torch.dtype, type, type(None)))


_about: WeakIdKeyDictionary = WeakIdKeyDictionary()


def facts_about(thing: Any) -> dict[Any, Any]:
    """Facts about an object of a caller, such as a tensor, by the function that computed them. The table ends with the
    object, so no value may hold the object."""
    table: dict[Any, Any] | None = _about.get(thing)
    if table is None:
        table = _about[thing] = {}
    return table


# Results are kept separately for each value of this. A ContextVar, because ranks may be threads.
_current: ContextVar[object] = ContextVar("bounded_cache", default=None)


@contextmanager
def as_constants() -> Iterator[None]:
    """A context that makes plain tensors, for tensors that outlive the call."""
    # Autograd does not save tensors of inference mode. Fake tensors of a dispatch mode have no numbers. The mode of a
    # checkpoint expects the same operators in a recomputation, where a cached tensor is not made again.
    with torch.inference_mode(False), without_dispatch_modes():
        yield


def remembered(entries: int) -> Callable[[Callable[..., T]], Remembered[T]]:
    """A decorator for pure functions of hashable arguments: the last ``entries`` results are kept (an ``lru_cache``).

    Arguments and results may hold numbers, texts and tables of positions on the host, which may have copies on devices
    (``DeviceTables``). They hold neither a process group nor a tensor of a caller.
    """
    # A group belongs to one rank, but ranks may be threads that share the results. Two threads that need the same
    # result at the same time may both compute it.
    return lambda function: Remembered(function, entries)


class Remembered(Generic[T]):
    """A cached function, made by :func:`remembered`. ``cache_info`` and ``cache_clear`` come from ``lru_cache``."""

    def __init__(self, function: Callable[..., T], entries: int) -> None:
        def make(_cache: object, *arguments: Hashable) -> T:
            with as_constants():
                return function(*arguments)

        self._cached = lru_cache(entries)(make)
        self.cache_info, self.cache_clear = self._cached.cache_info, self._cached.cache_clear
        update_wrapper(self, function)

    def __call__(self, *arguments: Hashable) -> T:
        return self._cached(_current.get(), *arguments)


@contextmanager
def another_cache() -> Iterator[None]:
    """A context with an empty cache for this thread, which ends with the context."""
    token = _current.set(object())
    try:
        yield
    finally:
        _current.reset(token)
