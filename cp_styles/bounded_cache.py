"""One cache for the results of all functions that are decorated with :func:`remembered`, bounded by bytes; and tables
of a few entries, for what belongs to one object."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, Generic, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cp_styles._compat import without_dispatch_modes

T = TypeVar("T")
K = TypeVar("K")

LIMIT = 2**26
"""Bytes of all results together: 64 MiB."""

# What is taken beside the payload: by an object, a tensor of torch, an entry of the cache with its key.
_OBJECT, _TENSOR, _ENTRY = 150, 450, 400


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
    """What is known about an object of a caller, such as a tensor, by the function that knows it. It ends with the
    object, which no value may hold."""
    table: dict[Any, Any] | None = _about.get(thing)
    if table is None:
        table = _about[thing] = {}
    return table


class BoundedCache:
    """Results of functions, by function and arguments: those that were used last, in at most ``limit`` bytes together.

    Threads may share it. What several entries have in common, such as a layout, counts once. At least the latest result
    is kept.

    Attributes:
        held: bytes of the entries: arguments and results.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clear()
        self.renew_lock()

    def renew_lock(self) -> None:
        """A new lock for a forked process: at the fork, another thread of the parent may have held the old one."""
        self.lock = threading.Lock()

    def clear(self) -> None:
        self.held = 0
        self.entries: OrderedDict[tuple[Any, tuple[Any, ...]], tuple[Any, int, tuple[int, ...]]] = OrderedDict()
        # By id: an object, its bytes, and how many entries it is part of. An entry keeps its objects alive.
        self._objects: dict[int, tuple[Any, int, int]] = {}

    def put(self, key: tuple[Any, tuple[Any, ...]], value: T) -> T:
        """The value that another thread has put meanwhile, or else ``value``."""
        objects: dict[int, tuple[Any, int]] = {}
        size_of_entry = _ENTRY + _measure((key[1], value), objects)
        with self.lock:
            if key in self.entries:
                return self.entries[key][0]
            self.entries[key] = value, size_of_entry, tuple(objects)
            self.held += size_of_entry
            for name, (item, size) in objects.items():
                _, size, users = self._objects.get(name, (item, size, 0))
                self._objects[name] = item, size, users + 1
                self.held += 0 if users else size
            while self.held > self.limit and len(self.entries) > 1:
                _, size_of_entry, names = self.entries.popitem(last=False)[1]
                self.held -= size_of_entry
                for name in names:
                    item, size, users = self._objects.pop(name)
                    if users > 1:
                        self._objects[name] = item, size, users - 1
                    else:
                        self.held -= size
        return value


def _measure(value: Any, objects: dict[int, tuple[Any, int]]) -> int:
    """The bytes of numbers, texts and tuples. Adds the objects in them to ``objects``, with their bytes, by id.

    An object that has ``nbytes`` counts these, and the attributes that have ``nbytes`` themselves. Otherwise, all of
    its attributes count. Types, functions and other things that belong to the program take nothing.
    """
    if isinstance(value, (int, float, str, bytes)):
        return sys.getsizeof(value) if value is not True and value is not False else 0
    if isinstance(value, (tuple, list, frozenset)):
        return sys.getsizeof(value) + sum(_measure(item, objects) for item in value)
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(_measure(item, objects) for item in (*value, *value.values()))
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":  # a copy of a table on the host: see DeviceTables
            return _TENSOR
        storage = value.untyped_storage()  # views may share it
        objects[storage.data_ptr()] = value, storage.nbytes()
        return _TENSOR
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, type) or not attributes or id(value) in objects:
        return 0
    objects[id(value)] = value, 0
    size = getattr(value, "nbytes", None)
    if size is None:
        size = sum(_measure(item, objects) for item in attributes.values())
    else:
        for item in attributes.values():
            if hasattr(item, "nbytes"):
                _measure(item, objects)
    objects[id(value)] = value, _OBJECT + size
    return 0


shared = BoundedCache(LIMIT)
"""The results of all functions in this process."""

os.register_at_fork(after_in_child=shared.renew_lock)

_current: ContextVar[BoundedCache] = ContextVar("bounded_cache", default=shared)


@contextmanager
def as_constants() -> Iterator[None]:
    """A context for tensors that outlive the call: plain ones, whatever mode the first call is made in. Autograd does
    not save tensors of inference mode. Fake tensors have no numbers, and a recomputation makes nothing again."""
    with torch.inference_mode(False), without_dispatch_modes():
        yield


class Remembered(Generic[T]):
    """A pure function of hashable arguments, whose results are in the cache of all such functions.

    Arguments and results may hold numbers, texts and tables of positions on the host, which may have copies on devices
    (``DeviceTables``). They hold no process group, because a group belongs to one rank and ranks may be threads, and no
    tensor of a caller. Two threads that need the same result at the same time may both compute it. They get the same
    object.

    Attributes:
        made: number of results that were computed, not found in the cache.
    """

    def __init__(self, function: Callable[..., T]) -> None:
        self._function, self.made = function, 0
        update_wrapper(self, function)

    def __call__(self, *arguments: Hashable) -> T:
        return once((self, arguments), self._make)

    def _make(self, *arguments: Hashable) -> T:
        self.made += 1
        with as_constants():
            return self._function(*arguments)


def once(key: tuple[Any, tuple[Any, ...]], make: Callable[..., T]) -> T:
    """The result of ``make``, called with ``key[1]``, in the cache of all such results. See :func:`remembered`."""
    cache = _current.get()
    with cache.lock:
        entry = cache.entries.get(key)
        if entry is not None:
            cache.entries.move_to_end(key)
            return entry[0]
    return cache.put(key, make(*key[1]))


remembered = Remembered  # as a decorator


@contextmanager
def another_cache(limit: int = LIMIT) -> Iterator[BoundedCache]:
    """Inside, this thread's results go into a cache that is empty at first, and ends with the block."""
    cache = BoundedCache(limit)
    token = _current.set(cache)
    try:
        yield cache
    finally:
        _current.reset(token)
