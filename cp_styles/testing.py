"""Ranks as threads, and what they put on the wire: for tests, notebooks and anybody who debugs a plan.

The ranks are threads of this process, but the communication is real: gloo over the loopback interface, so
point-to-point, collectives, sub-groups and DTensor behave as they do between processes, at a tenth of a second a run.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from cp_styles._compat import (
    in_process_store,
    process_group_of,
    resolve_group,
    run_kernel,
    thread_local_world,
    tree_leaves,
    without_groups,
)

T = TypeVar("T")


class RankError(RuntimeError):
    """What :func:`run_ranks` raises when ranks failed: ``errors`` maps each failed rank to its exception."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        lines = (f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items()))
        super().__init__("\n".join(lines))


class RankTimeout(AssertionError):
    """What :func:`run_ranks` raises when a rank waited for the others as long as it may, whatever came of it."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    return_errors: bool = False,
    may_time_out: bool = False,
) -> list[T]:
    """Run ``fn(rank, *args)`` on ``world_size`` threads, each a rank of its own gloo process group.

    ``fn`` sees an initialized default group: ``torch.distributed.get_rank()`` and ``init_device_mesh("cpu", ...)``
    work as under torchrun, and so does the code written against them. The random generator is shared by all threads:
    draw inputs outside, or from a ``torch.Generator`` of your own.

    Args:
        fn: called once a rank with the rank first.
        world_size: number of ranks.
        timeout_seconds: how long a rank waits for the others in one collective.
        return_errors: put a rank's exception in its place of the result instead of raising.
        may_time_out: a rank that runs into the timeout is what this run is about.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        RankError: when ranks failed, with the exception of each; the first one to fail is the cause.
        RankTimeout: when a rank stood at one place for as long as the timeout, unless ``may_time_out``: an error that
            came of it may have been caught, or taken for the one that was expected.
    """
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}
    store = in_process_store()

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_seconds)
            )
            results[rank] = fn(rank, *args)
        except BaseException as error:
            errors[rank] = error
            # A rank that failed must not keep its peers waiting: its sockets close when nothing holds the groups any
            # more, so the locals of the frames that failed go too. File names and lines stay.
            traceback.clear_frames(error.__traceback__)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with thread_local_world(), _only_new_objects():
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        waited = _join(threads, timeout_seconds)
        _forget_groups()
    if waited and not may_time_out:
        failed = RankError(errors) if errors else None
        raise RankTimeout(f"ranks waited for the others until the timeout of {timeout_seconds} s: {waited}") from failed
    if return_errors:
        results = [errors.get(rank, result) for rank, result in enumerate(results)]
        return results
    if errors:
        first = next(iter(errors.values()))
        raise RankError(errors) from first
    return results


def _join(threads: list[threading.Thread], seconds: float) -> dict[int, str]:
    """Wait for the threads; by number, where those stood that did not move for so long.

    They are looked at from outside, now and then, for an exception that a timeout raises may be caught inside.
    """
    step = min(0.25, seconds / 20)
    stood: dict[int, tuple[Any, float]] = {}
    found: dict[int, str] = {}
    while any(thread.is_alive() for thread in threads):
        next(thread for thread in threads if thread.is_alive()).join(step)
        frames, now = sys._current_frames(), time.monotonic()
        for rank, thread in enumerate(threads):
            frame = frames.get(thread.ident or 0)
            place = None if frame is None else (id(frame), frame.f_code, frame.f_lasti)
            since = stood[rank][1] if rank in stood and stood[rank][0] == place else now
            stood[rank] = place, since
            if frame is not None and now - since > seconds - 3 * step:
                found[rank] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        del frames, frame
    return found


@contextlib.contextmanager
def _only_new_objects() -> Iterator[None]:
    """Have the garbage collector look at nothing that was there before, so that asking it for something is quick."""
    gc.freeze()
    try:
        yield
        gc.collect()  # of this run only, while that is cheap: cycles hold groups too, and thawed they would grow old
    finally:
        gc.unfreeze()


def _forget_groups() -> None:
    """Take the groups, all destroyed now, out of the meshes that hold them, for DTensor's caches hold every mesh for
    good. A group that lives has threads that poll, and thousands of them are what a test run would leave otherwise."""
    for each in gc.get_objects():
        # Not isinstance, which asks every object for its class: torch has some that load libraries for that.
        if type(each) is DeviceMesh:
            without_groups(each)


class CommunicationTrace(TorchDispatchMode):
    """Counts what this rank (this thread) sends while the mode is on: collectives by name, payload bytes, op order.

    A ``with CommunicationTrace() as trace:`` block around forward and backward sees point-to-point, c10d collectives
    and functional collectives, DTensor's included, because all of them pass the dispatcher.

    ``trace.calls`` counts by short name (``send``, ``all_gather``, ...); ``trace.sent_bytes`` is what leaves this rank:
    a send its tensor; an all-to-all what is not for itself; an all-gather its shard P - 1 times; a reduce-scatter
    (P - 1)/P of its input; an all-reduce 2 (P - 1)/P of it; a broadcast its tensor P - 1 times on the source
    (these are the bandwidth-optimal algorithms; a backend may send more). ``trace.events`` lists (name, bytes), and
    :meth:`calls_over` counts what went over one axis of a mesh.

    It looks into the ops of this package, and so hides them from modes that were entered before it: enter it outside of
    a selective checkpoint, not inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self._groups: list[tuple[int, ...]] = []  # the ranks of each event

    def calls_over(self, axis: DeviceMesh) -> Counter[str]:
        """The calls, by short name, whose group has the ranks of a 1-D mesh."""
        ranks = tuple(axis.mesh.tolist())
        return Counter(name for (name, _), group in zip(self.events, self._groups, strict=True) if group == ranks)

    @property
    def calls(self) -> Counter[str]:
        return Counter(name for name, _ in self.events)

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.events)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it sends for this op comes back here op by op
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            group = _group_of(args)
            event = None if group is None else _event_of(func, args, group)
            if event is not None and group is not None:
                self.events.append(event)
                self._groups.append(tuple(dist.get_process_group_ranks(group)))
        if func.namespace == "cp_styles":  # opaque to everybody else
            with self:
                return run_kernel(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class MemoryTrace(TorchDispatchMode):
    """Counts the bytes of the tensors that this rank (this thread) makes while the mode is on, storage by storage.

    ``with MemoryTrace() as trace:`` around forward and backward. ``trace.live`` is what is alive now of what was made
    since the mode was entered, ``trace.peak`` the most there was at once, since then or since :meth:`reset`. What was
    there before does not count. The numbers are those of the tensors, the same on every machine: what an op allocates
    for itself and frees before it returns, and an allocator's rounding, are not in them.

    Like :class:`CommunicationTrace` it looks into the ops of this package.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def live(self) -> int:
        """Bytes alive."""
        for key in [key for key, (storage, _) in self._live.items() if storage.expired()]:
            del self._live[key]
        return sum(size for _, size in self._live.values())

    def reset(self) -> None:
        """Let :attr:`peak` count from now on."""
        self.peak = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come back here
        if func.namespace == "cp_styles":
            with self:
                return run_kernel(func, args, kwargs or {})
        given = {StorageWeakRef(x.untyped_storage()).cdata for x in tree_leaves((args, kwargs)) if _has_storage(x)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if _has_storage(made):
                storage = made.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in given:
                    self._live[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, self.live)
        return result


def _has_storage(value: Any) -> bool:
    """Whether it is a tensor with memory of its own: no wrapper of others, as DTensor is."""
    return isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) and value.device.type != "meta"


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Of a communication op's arguments; None for wait_tensor and the like, which send nothing."""
    group = next((g for g in map(process_group_of, args) if g is not None), None)
    if group is None:  # functional collectives carry the group's name, last or nearly so
        tags = [a for a in args if isinstance(a, str) and a not in ("sum", "avg", "max", "min", "product")]
        return resolve_group(tags[-1]) if tags else None
    return group


def _event_of(func: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[str, int] | None:
    name = func._schema.name.split("::")[1].strip("_").removesuffix("_out")
    size, rank = group.size(), group.rank()
    if name.startswith("recv"):
        return None
    if name == "send":
        return "send", _nbytes(args[0])
    if name in ("alltoall_base", "all_to_all_single"):
        if name == "alltoall_base":
            sent, splits = args[1], args[4]
        else:
            sent, splits = args[0], args[2]
        own = splits[rank] * _nbytes(sent) // max(sent.shape[0], 1) if splits else _nbytes(sent) // size
        return "all_to_all", _nbytes(sent) - own
    if name == "alltoall":
        return "all_to_all", _nbytes(args[1]) - _nbytes(args[1][rank])
    if "allgather" in name or "all_gather" in name:
        shard = args[0] if func.namespace != "c10d" else args[1]
        return "all_gather", _nbytes(shard) * (size - 1)
    if "reduce_scatter" in name:
        whole = args[0] if func.namespace != "c10d" else args[1]
        return "reduce_scatter", _nbytes(whole) * (size - 1) // size
    if "allreduce" in name or "all_reduce" in name:
        return "all_reduce", 2 * _nbytes(args[0]) * (size - 1) // size
    if "broadcast" in name:
        return "broadcast", _nbytes(args[0]) * (size - 1) if args[2] == rank else 0
    if "barrier" in name:
        return "barrier", 0
    return name, _nbytes(args[0]) + _nbytes(args[1] if len(args) > 1 else None)
