"""Run ranks as threads, and count their communication and memory: for tests, notebooks and debugging.

The ranks are threads of this process, but they really communicate, with gloo over the loopback interface. So
point-to-point messages, collectives, sub-groups and DTensor behave as between processes. No process is started.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import CodeType, FunctionType, TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from cp_styles._lib.compat import (
    clear_caches_of_thread,
    group_of_op,
    in_process_store,
    resolve_group,
    resolve_operators,
    run_kernel,
    thread_local_world,
    without_groups,
)
from cp_styles._lib.live_storages import LiveStorages

T = TypeVar("T")


class RankError(RuntimeError):
    """Raised by :func:`run_ranks` if ranks failed. ``errors`` maps each failed rank to its exception."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        lines = (f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items()))
        super().__init__("\n".join(lines))


class RankTimeout(AssertionError):
    """Raised by :func:`run_ranks` if a rank waited for peers until the timeout, even if the error was caught."""


class SharedSeedError(RuntimeError):
    """Raised by :func:`run_ranks` if a rank of several has seeded the random generator that all its threads share."""


resolve_operators()  # before ranks are threads: two threads must not make the object of an op at the same time


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 300.0,
    return_errors: bool = False,
    may_time_out: bool = False,
    may_seed: bool = False,
) -> list[T]:
    """Run ``fn(rank, *args)`` on ``world_size`` threads. Each thread is a rank of one gloo process group.

    In ``fn`` the default group is initialized: ``torch.distributed.get_rank()`` and ``init_device_mesh("cpu", ...)``
    work as under torchrun. All threads share torch's random generator, so a seed in ``fn`` is an error: draw before
    ``run_ranks``, or from a ``torch.Generator`` of your own. They share the code that torch.compile makes too: in it
    ``get_rank()`` may be the number of another rank, so use the argument of ``fn``.

    Args:
        fn: called once for each rank; its first argument is the rank.
        world_size: number of ranks.
        args: further arguments of ``fn``.
        timeout_seconds: how long a rank waits for its peers in one collective.
        return_errors: return the exception of a failed rank in place of its result, instead of raising.
        may_time_out: do not raise RankTimeout. For tests of the timeout itself.
        may_seed: do not raise SharedSeedError. For code whose result depends on no number that it draws.

    Returns:
        The results of ``fn``, by rank.

    Raises:
        RankError: ranks failed. It holds the exception of each; its cause is the first one.
        RankTimeout: a rank was blocked at one place until the timeout, unless ``may_time_out``. This is raised even if
            the error was caught, or mistaken for an expected error.
        SharedSeedError: a rank of several has seeded torch's generator, unless ``may_seed``.

    Example::

        def total(rank):
            number = torch.tensor(float(rank))
            torch.distributed.all_reduce(number)
            return number.item()

        assert run_ranks(total, 4) == [6.0] * 4
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
            clear_frames(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            clear_caches_of_thread()

    with thread_local_world(), _only_new_objects(), _watch_seed() as was_seeded:
        # Daemons, because a rank that is blocked for ever must not keep the process alive.
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        waited = _wait_for_threads(threads, timeout_seconds)
        _forget_groups()
        seeded = was_seeded() and world_size > 1
    failed = RankError(errors) if errors else None
    if waited and not may_time_out:
        raise RankTimeout(
            f"ranks waited for their peers until the timeout of {timeout_seconds} s: {waited}"
        ) from failed
    if seeded and not may_seed:
        raise SharedSeedError(
            "a rank has seeded torch's generator, as torch.manual_seed does. Ranks are threads and share this "
            "generator, so the numbers that they draw depend on the order of the threads. Seed and draw before "
            "run_ranks, or draw from a torch.Generator of your own; pass may_seed=True if no result depends on them"
        ) from failed
    if return_errors:
        results = [errors.get(rank, result) for rank, result in enumerate(results)]
        return results
    if failed is not None:
        raise failed from next(iter(errors.values()))
    return results


@contextlib.contextmanager
def _watch_seed() -> Iterator[Callable[[], bool]]:
    """The context yields a function: whether torch's generator was seeded in the context. Draws do not count."""
    # The seed stays in the state of a generator while numbers are drawn, and goes back with a state that is restored.
    # So the ranks begin with a seed that no program chooses.
    before, drawn = torch.get_rng_state(), torch.Generator()
    drawn.set_state(before)
    mark = int(torch.randint(2**62, (), generator=drawn, device=drawn.device))
    torch.default_generator.manual_seed(mark)  # not torch.manual_seed, which seeds devices too
    marked = torch.get_rng_state()
    try:
        yield lambda: torch.initial_seed() != mark
    finally:
        if torch.equal(torch.get_rng_state(), marked):  # nothing was drawn
            torch.set_rng_state(before)


def clear_frames(error: BaseException) -> None:
    """Replace the frames of ``error``, and of its causes, by frames without variables. File names and lines stay."""
    # The variables hold process groups. The sockets of a failed rank close only when nothing holds its groups, and the
    # remaining ranks must not wait for it. frame.clear() would leave the closures of the functions, and torch runs each
    # forward with hooks in a closure that holds the module.
    todo: list[BaseException | None] = [error]
    cleared: set[int] = set()
    while todo:
        link = todo.pop()
        if link is not None and id(link) not in cleared:
            cleared.add(id(link))
            traceback.clear_frames(link.__traceback__)  # for those who hold a frame
            link.__traceback__ = _without_variables(link.__traceback__)
            todo += [link.__cause__, link.__context__]


def _without_variables(trace: TracebackType | None) -> TracebackType | None:
    """A copy of a traceback that shows the same lines, and holds no frame of it."""
    entries = [(entry.f_code, line) for entry, line in traceback.walk_tb(trace)]
    copied = None
    for code, line in reversed(entries):
        stub = _generator_of_nothing.__code__.replace(
            co_filename=code.co_filename,
            co_name=code.co_name,
            co_qualname=code.co_qualname,
            co_firstlineno=code.co_firstlineno,
        )
        # The frame of a generator that has not begun: unlike a frame that has run, it does not hold its caller's frame.
        copied = TracebackType(copied, FunctionType(stub, {})().gi_frame, -1, line)
    return copied


def _generator_of_nothing() -> Iterator[None]:
    yield


class _Look(NamedTuple):
    """Instruction that a thread was seen to run from ``first`` until ``last``, and not yet at ``before``."""

    instruction: tuple[int, CodeType, int]
    line: str
    before: float
    first: float
    last: float

    def waited(self, seconds: float, now: float) -> bool:
        """Whether it ran this for ``seconds``, if it runs something else ``now`` or ends."""
        # On a busy machine it may have begun long before it was first seen. So the time in which it was seen is no
        # measure: it is less than what has passed. Most of it must have been seen all the same, because a loop that is
        # seen twice at one instruction has not waited in between.
        return now - self.before >= seconds and self.last - self.first > 0.75 * seconds


def _wait_for_threads(threads: list[threading.Thread], seconds: float) -> dict[int, str]:
    """Wait for the threads. Returns, by rank, the line at which a thread was blocked for ``seconds``."""
    # The threads are inspected from outside, because the exception of a timeout may be caught inside.
    step = min(0.25, seconds / 20)
    seen: dict[int, _Look] = {}
    lines: dict[int, str] = {}
    before = time.monotonic()
    alive = threads
    while alive:
        alive[0].join(step)
        alive = [thread for thread in threads if thread.is_alive()]
        frames, now = sys._current_frames(), time.monotonic()
        for rank, thread in enumerate(threads):
            if rank in seen and seen[rank].waited(seconds, now):
                lines[rank] = seen[rank].line
            frame = frames.get(thread.ident or 0) if thread in alive else None
            if frame is None:
                seen.pop(rank, None)
                continue
            look = _Look(
                (id(frame), frame.f_code, frame.f_lasti),
                f"{frame.f_code.co_filename}:{frame.f_lineno}",
                before,
                now,
                now,
            )
            same = rank in seen and seen[rank].instruction == look.instruction
            seen[rank] = seen[rank]._replace(last=now) if same else look
        del frames, frame
        before = now
    return lines


@contextlib.contextmanager
def _only_new_objects() -> Iterator[None]:
    """Hide existing objects from the garbage collector."""
    gc.freeze()
    try:
        yield
        gc.collect()  # this run's cycles hold process groups; without the older objects their collection is fast
    finally:
        gc.unfreeze()


def _forget_groups() -> None:
    """Remove the destroyed groups from the meshes that hold them."""
    # DTensor's caches hold every mesh for ever. A group that stays alive has polling threads, and a test run would
    # leave thousands of them.
    for item in gc.get_objects():
        # Not isinstance: it reads __class__ of every object, and some objects of torch load libraries for that.
        if type(item) is DeviceMesh:
            without_groups(item)


class CommunicationTrace(TorchDispatchMode):
    """Records what this rank (this thread) sends while the mode is on: names, bytes and order of the operations.

    Use ``with CommunicationTrace() as trace:`` around forward and backward. It sees point-to-point messages, c10d
    collectives and functional collectives, also from DTensor.

    ``trace.calls`` counts calls by short name (``send``, ``all_gather``, ...). ``trace.events`` lists (name, bytes).
    :meth:`calls_over` counts the calls over one axis of a mesh. ``trace.sent_bytes`` is the sum of the bytes that leave
    this rank: the tensor for a send; all but its own part for an all-to-all; P - 1 times its shard for an all-gather;
    (P - 1)/P of its input for a reduce-scatter; 2 (P - 1)/P of it for an all-reduce; P - 1 times its tensor for a
    broadcast, on the source. These are the bandwidth-optimal algorithms; a backend may send more.

    The trace runs the ops of this package itself. So modes that were entered before it do not get these ops: enter it
    outside of a selective checkpoint, not inside.
    """

    supports_higher_order_operators = True  # FlexAttention on one device is such an operator, and calls the mode then

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self._groups: list[tuple[int, ...]] = []  # the ranks of each event

    def calls_over(self, axis: DeviceMesh) -> Counter[str]:
        """The calls so far, by short name, over the ranks of the 1-D mesh ``axis``. No communication."""
        ranks = tuple(axis.mesh.tolist())
        return Counter(name for (name, _), group in zip(self.events, self._groups, strict=True) if group == ranks)

    def _record(self, name: str, size: int, group: dist.ProcessGroup) -> None:
        self.events.append((name, size))
        self._groups.append(tuple(dist.get_process_group_ranks(group)))

    @property
    def calls(self) -> Counter[str]:
        """The calls so far, by short name."""
        return Counter(name for name, _ in self.events)

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return sum(size for _, size in self.events)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor handles the op first; the ops that it runs for it come back here
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            group = group_of_op(args)
            event = None if group is None else _describe_event(func, args, group)
            if event is not None and group is not None:
                self._record(*event, group)
        if func is torch.ops.cp_styles.gather_numbers.default:  # it counts as an all-gather, also if it sends messages
            group = resolve_group(args[1])
            self._record("all_gather", _count_bytes(args[0]) * (group.size() - 1), group)
            return func(*args, **(kwargs or {}))
        if func.namespace == "cp_styles":  # run our opaque op under this mode, to record its messages
            with self:
                return run_kernel(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class MemoryTrace(TorchDispatchMode):
    """Counts the bytes of the tensor storages that this rank (this thread) creates while the mode is on.

    Use ``with MemoryTrace() as trace:`` around forward and backward. ``trace.live`` is the bytes that were created
    since the mode was entered and are still alive. ``trace.peak`` is the maximum of ``live``, since the mode was
    entered or since :meth:`reset`. Older tensors do not count, nor do the numbers by which ranks agree before an
    attention (some hundred bytes). The bytes are the same on every machine: they include neither temporary memory
    inside an op nor the rounding of an allocator.

    Like :class:`CommunicationTrace` it runs the ops of this package itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages = LiveStorages()

    @property
    def live(self) -> int:
        """Bytes that are alive now."""
        return self._storages.nbytes

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once."""
        return self._storages.peak

    def reset(self) -> None:
        """Restart :attr:`peak` from the bytes that are alive now."""
        self._storages.reset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the ops on its local tensors come back here
        if func is torch.ops.cp_styles.gather_numbers.default:  # a thread of the backend may hold the row for longer
            self._storages.forget(args[0].untyped_storage())
            return func(*args, **(kwargs or {}))
        if func.namespace == "cp_styles":
            with self:
                return run_kernel(func, args, kwargs or {})
        kwargs = kwargs or {}
        existing = {id(storage): storage for storage in _find_storages((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        self._storages.add(storage for storage in _find_storages((result,)) if id(storage) not in existing)
        return result


def _find_storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors among arguments or results of an op."""
    for value in values:
        if isinstance(value, torch.Tensor):  # wrappers such as DTensors have no memory
            if not is_traceable_wrapper_subclass(value) and value.device.type != "meta":
                yield value.untyped_storage()
        elif isinstance(value, (list, tuple)):
            yield from _find_storages(value)


def _count_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_count_bytes(item) for item in value)
    return 0


def _describe_event(func: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[str, int] | None:
    name = func._schema.name.split("::")[1].strip("_").removesuffix("_out")
    size, rank = group.size(), group.rank()
    if name.startswith("recv"):
        return None
    if name == "send":
        return "send", _count_bytes(args[0])
    if name in ("alltoall_base", "all_to_all_single"):
        if name == "alltoall_base":
            sent, splits = args[1], args[4]
        else:
            sent, splits = args[0], args[2]
        kept_bytes = (
            splits[rank] * _count_bytes(sent) // max(sent.shape[0], 1) if splits else _count_bytes(sent) // size
        )
        return "all_to_all", _count_bytes(sent) - kept_bytes
    if name == "alltoall":
        return "all_to_all", _count_bytes(args[1]) - _count_bytes(args[1][rank])
    if "allgather" in name or "all_gather" in name:
        shard = args[0] if func.namespace != "c10d" else args[1]
        return "all_gather", _count_bytes(shard) * (size - 1)
    if "reduce_scatter" in name:
        whole = args[0] if func.namespace != "c10d" else args[1]
        return "reduce_scatter", _count_bytes(whole) * (size - 1) // size
    if "allreduce" in name or "all_reduce" in name:
        return "all_reduce", 2 * _count_bytes(args[0]) * (size - 1) // size
    if "broadcast" in name:
        return "broadcast", _count_bytes(args[0]) * (size - 1) if args[2] == rank else 0
    if "barrier" in name:
        return "barrier", 0
    return name, _count_bytes(args[0]) + _count_bytes(args[1] if len(args) > 1 else None)
