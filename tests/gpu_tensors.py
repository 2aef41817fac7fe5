"""Tensors that say they are on a GPU, and rules of CUDA and NCCL that hold for them; on ranks that are threads.

What such a tensor holds is on the CPU, and so are its ops: those of attention are the stand-ins of tests/cuda_ops.py.

- What makes the host wait for the device is an error (:class:`Synchronizes`): reading a number, a copy to the host, a
  copy from it that blocks, ``torch.tensor(..., device="cuda")``, and ops whose result's shape depends on numbers.
- float32 products are of inputs rounded to TF32 where that is allowed.
- Communication is asynchronous: what is received is NaN until it was waited for; what is sent may not change before.
- A batch of messages is not the first operation of a group; all messages are in batches; a message holds a tensor of
  the device; and the batches of all ranks, each rank's one after the other, must come to an end (:meth:`Nccl.verify`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from cp_styles._lib.compat import group_of_op, resolve_group, run_kernel
from cp_styles.comm import point_to_point
from cp_styles.comm.point_to_point import Message
from tests.cuda_ops import Seen, cuda_ops_on_cpu
from tests.gpu_record import messages_of

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
# Reading, and what has a result whose shape depends on numbers.
_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.item.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class Synchronizes(AssertionError):
    """The host would wait for the device."""


class BreaksRule(AssertionError):
    """NCCL would hang, or fail, or mix up messages."""


_may_wait, _counting = threading.local(), threading.local()


@contextlib.contextmanager
def device_ops() -> Iterator[Counter[str]]:
    """How often this thread calls each op of device tensors, views among them. "upload": copies from the host."""
    _counting.ops = Counter()
    try:
        yield _counting.ops
    finally:
        del _counting.ops


def _waits(what: str) -> None:
    if not getattr(_may_wait, "now", False):
        raise Synchronizes(what)


class OnGpu(torch.Tensor):
    """A tensor whose ``device`` is a GPU; ``inner`` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.arriving: torch.Tensor | None = None

    device = property(lambda self: DEVICE)  # pyright: ignore[reportAssignmentType]
    is_cpu = property(lambda self: False)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol):
        raise Synchronizes("a copy of its numbers")

    def cpu(self, *_: Any, **__: Any):
        _waits(".cpu()")
        return self.inner.clone()

    def tolist(self):
        _waits(".tolist()")
        return self.inner.tolist()

    def numpy(self, **_: Any):
        raise Synchronizes(".numpy()")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if hasattr(_counting, "ops"):
            _counting.ops[func.name().partition(".")[0]] += 1
        if func.namespace == "c10d":
            return _collective(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return _functional(func, args, kwargs)
        if func.namespace == "cp_styles":
            return run_kernel(func, args, kwargs)
        if func in _READS:
            _waits(str(func))
        if func in _INDEXED and _looks_for_positions(*args[1:]):
            _waits(f"{func} by a mask")
        if func is aten.copy_.default and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
            if args[1].ndim and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                raise Synchronizes("a copy between host and device that blocks")
            _note_upload(args[1])
        else:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and not isinstance(x, OnGpu) and x.ndim:
                    raise BreaksRule(f"{func}: expected all tensors to be on the same device, got {tuple(x.shape)}")
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        inner = tree_map(_inner, args)
        if func in (aten.mm.default, aten.bmm.default) and torch.backends.cuda.matmul.fp32_precision == "tf32":
            inner = [_in_tf32(x) for x in inner]
        result = func(*inner, **tree_map(_inner, kwargs))
        wrapped = tree_map(lambda x: OnGpu(x) if isinstance(x, torch.Tensor) else x, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _note_upload(source: torch.Tensor) -> None:
    if hasattr(_counting, "ops") and not isinstance(source, OnGpu):
        _counting.ops["upload"] += 1


def _looks_for_positions(indices: Sequence[torch.Tensor | None], value: Any = None, *_: Any) -> bool:
    if not any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices):
        return False
    # TensorAdvancedIndexing.cpp, canDispatchToMaskedFill: a number of the host is filled in where the mask is.
    return not (isinstance(value, torch.Tensor) and not isinstance(value, OnGpu) and value.numel() == 1)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def _in_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits after the first."""
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _collective(func, args, kwargs):
    group = group_of_op(args)
    assert group is not None
    _nccl().note(group, func.name())
    result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    work = result[-1] if isinstance(result, tuple) else result
    # Its first argument is what is changed in place, and the first of what it returns.
    return (args[0], work) if isinstance(result, tuple) else work


def _functional(func, args, kwargs):
    """A functional collective: its result is poisoned until ``wait_tensor``, or until torch's DTensor wraps it, which
    waits where it is read."""
    name = func.name().split("::")[1]
    if name in ("wait_tensor", "_wrap_tensor_autograd"):
        (made,) = args
        if (unfinished := _nccl().unfinished) is not None:
            unfinished.append(made)
        elif made.arriving is not None:
            made.inner.copy_(torch.ops._c10d_functional.wait_tensor(made.arriving))
            made.arriving = None
        return made
    _nccl().note(resolve_group(next(x for x in reversed(args) if isinstance(x, str))), name)
    arriving = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    made = OnGpu(_poisoned(torch.empty_like(arriving)))
    made.arriving = arriving
    return made


def _poisoned(memory: torch.Tensor) -> torch.Tensor:
    return memory.fill_(float("nan") if memory.is_floating_point() else 113)


class _Work:
    """Of a batch of messages. With ``unfinished``, where it stays, the host does not wait, and receives poison."""

    def __init__(self, unfinished: list[Any] | None) -> None:
        self.unfinished = unfinished
        self.works: list[Any] = []
        self.received: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(self, *_: Any) -> bool:
        if self.unfinished is not None:
            self.unfinished.append(self)
            return True
        for work in self.works:
            work.wait()
        for visible, arrived in self.received:
            visible.copy_(arrived)
        for visible, sent in self.sent:
            same = visible.reshape(-1).view(torch.uint8).equal(sent.reshape(-1).view(torch.uint8))
            if not same:
                raise BreaksRule("a message was changed while it was under way")
        self.works, self.received, self.sent = [], [], []
        return True


class Nccl:
    """The operations of ranks over each group, in order: ("all-reduce",), ("all-to-all",), or for a batch
    ("batch", ((kind, peer, elements), ...))."""

    def __init__(self, *, runs_ahead: bool = False) -> None:
        self.unfinished: list[Any] | None = [] if runs_ahead else None
        self.logs: dict[tuple[int, ...], dict[int, list[tuple]]] = defaultdict(lambda: defaultdict(list))
        self._lock = threading.Lock()

    def note(self, group: dist.ProcessGroup, *what: Any) -> None:
        with self._lock:
            log = self.logs[tuple(dist.get_process_group_ranks(group))][group.rank()]
            if not log and what[0] == "batch":
                raise BreaksRule("the first operation of a group is a batch of messages")
            log.append(what)

    def batch(self, batch: Sequence[Message], group: dist.ProcessGroup, tag: int) -> Any:
        """For :func:`cp_styles.comm.point_to_point.move_batch`."""
        kinds = {True: "send", False: "recv"}
        self.note(group, "batch", tuple((kinds[is_sent], peer, tensor.numel()) for is_sent, peer, tensor in batch))
        return self._start(batch, group)

    def all_to_all(self, group: dist.ProcessGroup, received: Any, sent: Any, *call: Any) -> Any:
        """For ``ProcessGroup.alltoall_base``."""
        *sizes, options = call
        if not options.asyncOp:
            raise BreaksRule("an all-to-all on the stream of the caller")
        self.note(group, "all-to-all")
        return self._start(messages_of(received, sent, *sizes, group.rank()), group)

    def _start(self, batch: Sequence[Message], group: dist.ProcessGroup) -> _Work:
        work = _Work(self.unfinished)
        for message in batch:
            if not isinstance(message[2], OnGpu):
                raise BreaksRule("a message of the host")
            if not message[2].is_contiguous():
                raise BreaksRule("Tensors must be contiguous")
        for is_sent, peer, tensor in sorted(batch, key=lambda message: not message[0]):
            visible: torch.Tensor = read(tensor)
            memory = visible.clone()
            if is_sent:
                work.sent.append((visible, memory))
                work.works.append(_SEND(group, [memory.clone()], peer, 0))
            else:
                work.received.append((visible, memory))
                _poisoned(visible)
                work.works.append(_RECV(group, [memory], peer, 0))
        return work

    def verify(self) -> None:
        """Raise unless the operations of all ranks, each rank's one after the other, come to an end."""
        for ranks, logs in self.logs.items():
            queues = {rank: list(logs[rank]) for rank in range(len(ranks))}
            left: dict[int, list] = {}
            while any(queues.values()):
                for rank, queue in queues.items():
                    if queue and rank not in left:
                        left[rank] = list(queue[0][1]) if queue[0][0] == "batch" else [queue[0][0]]
                moved = False
                for rank, mine in left.items():
                    for entry in [each for each in mine if isinstance(each, tuple)]:
                        kind, peer, size = entry
                        # Between two ranks messages are matched by order.
                        if next(e for e in mine if e[:2] == entry[:2]) is not entry:
                            continue
                        wanted = "recv" if kind == "send" else "send"
                        match = next((e for e in left.get(peer, ()) if e[:2] == (wanted, rank)), None)
                        if kind == "send" and match is not None:
                            if match[2] != size:
                                raise BreaksRule(f"ranks {rank} and {peer} mean messages of {size} and {match[2]}")
                            mine.remove(entry)
                            left[peer].remove(match)
                            moved = True
                heads = [queue[0] for queue in queues.values() if queue]
                if len(heads) == len(ranks) and len({head[0] for head in heads}) == 1 and heads[0][0] != "batch":
                    for rank in left:
                        left[rank] = []
                for rank in [rank for rank, mine in left.items() if not mine]:
                    del left[rank]
                    queues[rank].pop(0)
                    moved = True
                if not moved:
                    raise BreaksRule(f"ranks {ranks} wait for each other: {left}")


_current: Nccl | None = None


def _nccl() -> Nccl:
    assert _current is not None
    return _current


class _Event:
    """For ``torch.Event``: what was recorded some time ago has happened, and the host need not wait for it."""

    records = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = 0

    def record(self, *_: Any) -> None:
        _Event.records += 1
        self.number = _Event.records

    def query(self) -> bool:
        return _Event.records - self.number >= 64

    def synchronize(self) -> None:
        if not self.query():
            _waits("an event that was recorded just now")


class Gpu:
    """What :func:`gpus` gives: the log of communication, the attention ops that were called, and how often one of the
    functions that may wait for the device was called."""

    def __init__(self, nccl: Nccl, seen: Seen) -> None:
        self.nccl, self.seen, self.waits = nccl, seen, 0


def put(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU, as a leaf."""
    return OnGpu(tensor.detach()).requires_grad_(tensor.requires_grad)


def read(tensor: Any) -> torch.Tensor:
    """From the GPU, by who may wait: a test."""
    return tensor.detach().inner


_OVER_BACKENDS = (
    *("all_gather", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *("all_gather_into_tensor", "reduce_scatter_tensor"),
)
_SEND, _RECV = dist.ProcessGroup.send, dist.ProcessGroup.recv
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "empty_strided", "tensor", "as_tensor")


@contextlib.contextmanager
def gpus(
    *,
    nccl_only: bool = False,
    batches: bool = True,
    waits: Sequence[str] = (),
    runs_ahead: bool = False,
    verified: bool = True,
) -> Iterator[Gpu]:
    """While inside, factories make tensors on the device where they are told so; with ``nccl_only`` groups have no
    backend for the CPU. ``batches``: whether the backend of the device makes batches. ``waits``: the functions, by
    their paths, that may wait for the device. ``runs_ahead``: a wait for a message does not hold the host; what is
    received stays poison, so this shows errors and no numbers. ``verified``: all messages come to an end."""
    global _current

    def waiting(real):
        def run(*args, **kwargs):
            gpu.waits += 1
            _may_wait.now = True
            try:
                return real(*args, **kwargs)
            finally:
                _may_wait.now = False

        return run

    def factory(name: str, real):
        def make(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            if torch.device(kwargs.get("device") or "cpu").type != "cuda":
                return real(*args, **kwargs)
            if hasattr(_counting, "ops"):
                _counting.ops[f"aten::{name}"] += 1
            if name in ("tensor", "as_tensor"):
                raise Synchronizes(f"torch.{name}(..., device='cuda')")
            return OnGpu(real(*args, **{**kwargs, "device": "cpu"}))

        return make

    def to(self, *args, **kwargs):
        rest = [x for x in args if not isinstance(x, (torch.device, str))]
        target = kwargs.pop("device", None)
        target = next((x for x in args if isinstance(x, (torch.device, str))), target)
        if target is not None:
            there = torch.device(target).type == "cuda"
            if isinstance(self, OnGpu) and torch.device(target).type == "cpu":
                _waits(".to('cpu')")
                return real_to(self.inner.clone(), *rest, **kwargs)
            if there and not isinstance(self, OnGpu):
                if not (kwargs.get("non_blocking") or any(x is True for x in rest)):
                    raise Synchronizes("a copy to the device that blocks")
                kwargs.pop("non_blocking", None)
                _note_upload(self)
                return OnGpu(real_to(self.detach(), *rest, **kwargs).clone())
            if not there:
                rest = [target, *rest]
        return real_to(self, *rest, **kwargs) if rest or kwargs else self

    def on_device_only(name: str, real):
        def run(*args, **kwargs):
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(x, torch.Tensor) and not isinstance(x, OnGpu) for x in leaves):
                raise BreaksRule(f"{name} of a tensor of the host: no backend type associated with device type cpu")
            return real(*args, **kwargs)

        return run

    real_to = torch.Tensor.to
    with torch.device("cpu"):  # torch makes its table of these functions once, at the first use of a default device
        torch.empty(0)
    _current = Nccl(runs_ahead=runs_ahead)
    with pytest.MonkeyPatch.context() as patch, cuda_ops_on_cpu() as seen:
        gpu = Gpu(_current, seen)
        for name in _FACTORIES:
            patch.setattr(torch, name, factory(name, getattr(torch, name)))
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch, "Event", _Event)
        patch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
        patch.setattr(point_to_point, "move_batch", _current.batch)
        patch.setattr(point_to_point, "makes_batches", lambda group, device: batches and device.type == "cuda")
        patch.setattr(dist.ProcessGroup, "alltoall_base", lambda group, *call: _nccl().all_to_all(group, *call))
        for path in waits:
            patch.setattr(path, waiting(resolve_name(path)))
        if nccl_only:
            patch.setattr("cp_styles.comm.point_to_point.has_cpu_backend", lambda group: False)
            for name in _OVER_BACKENDS:
                patch.setattr(dist, name, on_device_only(name, getattr(dist, name)))
            for name in ("send", "recv"):
                patch.setattr(dist.ProcessGroup, name, on_device_only(name, getattr(dist.ProcessGroup, name)))
        yield gpu
        if verified:
            _current.verify()
    _current = None
