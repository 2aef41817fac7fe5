"""Runs one rank of an attention without data, and records its messages, kernel calls and memory, in order.

The strategy itself runs, forward and backward, with meta tensors and a :class:`DryRunGroup` as its process group. So
the figures are the figures of the plan that a real run executes. Nothing is sent, and no process group is needed.
Kernels are wrapped: their calls are recorded, and return results of the right shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles._lib.live_storages import LiveStorages
from cp_styles.explain.events import (
    Event,
    KernelCall,
    MemoryOp,
    Phase,
    RankRun,
    Shapes,
    TensorSpec,
    Transfer,
    WaitEvent,
)
from cp_styles.kernels import Kernel, ReferenceKernel, SdpaKernel
from cp_styles.kernels.base import OtherBackward
from cp_styles.kernels.choice_by_tile import ByTile, kernel_for_tiles
from cp_styles.kernels.latent import LatentKernel
from cp_styles.kernels.merge import accumulation_dtype
from cp_styles.kernels.sdpa import FewShapesKernel, names_of
from cp_styles.kernels.selected import SelectedKernel
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Mask
from cp_styles.strategies import Attention, Strategy, strategy_on


def kernel_of(shapes: Shapes, named: Kernel | None = None) -> Kernel:
    """The kernel for tiles of tensors with these shapes; see :func:`kernel_for_tiles`."""
    return kernel_for_tiles(shapes.specs(), named=shapes.named_kernel(named))  # pyright: ignore[reportArgumentType]


def dry_run(
    strategy: Strategy,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    kernel: Kernel,
    shapes: Shapes,
    rank: int,
    *,
    has_sink: bool = False,
) -> RankRun:
    """Run ``rank`` of one attention with (query, key) ``layouts``. No communication, no process group."""
    strategy, recorder = strategy_on(strategy, layouts[0].ranks, mask), _Recorder(shapes.device)
    q_layout, kv_layout = layouts
    group = DryRunGroup(recorder, rank, range(q_layout.ranks)) if q_layout.ranks > 1 else None
    options: dict[str, Any] = {"scale": 1.0 / math.sqrt(shapes.head_dim), "split": split_dry_run}
    unfilled = _UnfilledMask(mask, shapes.dtype)
    kernel, learned = _wrap_kernel(kernel, recorder), shapes.learned
    forward_kernel, _ = kernel.with_learned(learned, backward=False)
    attention = Attention(group, q_layout, kv_layout, unfilled, forward_kernel, **options)
    q, k, v = shapes.tensors(q_layout.lengths[rank], kv_layout.lengths[rank])
    sink_H = torch.empty(shapes.heads, dtype=torch.float32, device="meta") if has_sink else None
    size, dtype = strategy.residual_places(attention, q, k, v).spec
    grad = q.new_empty(shapes.batch, q.shape[2], shapes.heads, shapes.value_dim).transpose(1, 2)
    with recorder:
        residual = q.new_empty(size, dtype=dtype)
        recorder.label(_KEPT, residual)
        out = strategy.forward(attention, q, k, v, sink_H, residual)
        recorder.label("output", out)
        forward = recorder.end_phase()
        learning, shares = kernel.with_learned(learned, backward=True)
        recorder.label("gradients", *shares)
        attention = replace(attention, kernel=learning) if shares else attention
        grads = strategy.backward(attention, grad, q, k, v, out, residual, sink_H)
        recorder.label("gradients", *(x for x in grads if x is not None))
        backward = recorder.end_phase()
    return RankRun(rank, forward, backward)


# -- messages --


class DryRunGroup(dist.ProcessGroup):
    """A process group that records the messages of ``rank``. ``members`` are its ranks in the whole group."""

    def __init__(self, recorder: _Recorder, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, len(members))  # pyright: ignore[reportCallIssue] - its stub knows a store only
        self.recorder = recorder
        self.members = tuple(members)
        self.runs_on = recorder.device
        self._subgroups: list[DryRunGroup] = []  # they live as long as this group, like subgroups of a real group

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _StartedTransfer:  # pyright: ignore
        return self._start(tensors, peer, True)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _StartedTransfer:  # pyright: ignore
        return self._start(tensors, peer, False)

    def alltoall_base(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, received: torch.Tensor, sent: torch.Tensor, to_receive: list[int], to_send: list[int], options: Any
    ) -> _StartedTransfer:
        recorder, first = self.recorder, self.recorder.transfers
        for buffer, sizes, outgoing in ((sent, to_send, True), (received, to_receive, False)):
            recorder.label("messages", buffer)
            for peer, size in enumerate(sizes):
                if size and peer != self.rank():
                    recorder.add_transfer(self.members[peer], size * buffer.itemsize, outgoing)
        return _StartedTransfer(recorder, range(first, recorder.transfers))

    def _start(self, tensors: Sequence[torch.Tensor], peer: int, outgoing: bool) -> _StartedTransfer:
        (tensor,) = tensors
        self.recorder.label("messages", tensor)
        number = self.recorder.add_transfer(self.members[peer], tensor.nbytes, outgoing)
        return _StartedTransfer(self.recorder, range(number, number + 1))

    def subgroup(self, members: Sequence[int]) -> DryRunGroup | None:
        """The group of some of the members, with this rank. None for a group of one."""
        if len(members) == 1:
            return None
        self._subgroups.append(DryRunGroup(self.recorder, members.index(self.members[self.rank()]), members))
        return self._subgroups[-1]


def split_dry_run(group: DryRunGroup | None, size: int) -> tuple[DryRunGroup | None, DryRunGroup | None]:
    """The two subgroups of a dry run, as :func:`~cp_styles.comm.point_to_point.split_group` makes them."""
    if group is None:
        return None, None
    first = group.rank() - group.rank() % size
    across = group.members[group.rank() % size :: size]
    return group.subgroup(group.members[first : first + size]), group.subgroup(across)


class _StartedTransfer:
    def __init__(self, recorder: _Recorder, numbers: range) -> None:
        self._recorder, self._numbers = recorder, numbers

    def wait(self) -> None:
        self._recorder.events += map(WaitEvent, reversed(self._numbers))


# -- operations and memory --

_KEPT, _OTHER = "kept for the backward", "sums and copies"
_aten = torch.ops.aten
_COPIES = (_aten._to_copy, _aten.clone)
_PRODUCTS = (_aten.mm, _aten.bmm)
_POINTWISE = (_aten.sigmoid, _aten.sub, _aten.add, _aten.mul)
_WITHOUT_DATA = (_aten.empty, _aten.new_empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty_strided)


class _Recorder(TorchDispatchMode):
    """Records the events of a phase in order, and the bytes of the storages that operations create.

    Attributes:
        device: the device of the attention. Its tensors here are meta tensors.
        events: the events of the phase.
        transfers: the number of transfers of the phase.
        pack: the tiles of the running kernel call, if it is a pack or a band.
        in_kernel: whether the reference kernel runs, whose products are counted as its call.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self._storages = device, LiveStorages()
        self.events: list[Event] = []
        self.transfers = 0
        self.pack: tuple[Any, ...] | None = None
        self.in_kernel = False

    def add_transfer(self, peer: int, nbytes: int, outgoing: bool) -> int:
        """Record a message. Returns its number in the phase."""
        self.events.append(Transfer(peer, nbytes, outgoing))
        self.transfers += 1
        return self.transfers - 1

    def end_phase(self) -> Phase:
        """Return the events and the memory of the phase, and begin the next phase."""
        storages, events = self._storages, self.events
        phase = Phase(events, storages.peak, storages.by_label(at_peak=True), storages.by_label())
        self.events, self.transfers = [], 0
        storages.reset()
        return phase

    def label(self, purpose: str, *tensors: torch.Tensor) -> None:
        """Label the storages of tensors. A later label replaces an earlier one, except ``_KEPT``."""
        for tensor in tensors:
            self._storages.label(tensor.untyped_storage(), purpose, unless=_KEPT)

    def record_call(self, kernel: str, backward: bool, cover: str, q: Any, k: Any, v: Any) -> KernelCall:
        """Record a call of a kernel with these tensors."""
        tiles = ((*q.shape[:2], k.shape[1], q.shape[2], k.shape[2]),) if self.pack is None else self.pack
        call = KernelCall(kernel, backward, cover, tiles, (q.shape[-1], v.shape[-1]), q.itemsize)
        self.events.append(call)
        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, kind = kwargs or {}, _classify(func)
        if kind is _Kind.VIEW:
            return func(*args, **kwargs)
        if kind is _Kind.ATTENTION:
            return self._kernel(func, args, kwargs)
        inputs = _tensors_in((*args, *kwargs.values()))
        if kind is _Kind.MUTABLE:  # meta tensors have no data to change
            self.events.append(MemoryOp(sum(x.nbytes for x in inputs)))
            return kwargs.get("out", args[0])
        result = _make_result(func, args, kwargs, inputs)
        outputs = _tensors_in(result if isinstance(result, (tuple, list)) else (result,))
        # Compare storages, because the schema of _unsafe_view does not tell that it returns a view.
        existing = {x.untyped_storage()._cdata for x in inputs}
        created = [x for x in outputs if x.untyped_storage()._cdata not in existing]
        self._storages.add((x.untyped_storage() for x in created), _OTHER)
        if kind is _Kind.DATA and (fresh := sum(x.nbytes for x in created)):
            is_product = func.overloadpacket in _PRODUCTS and not self.in_kernel
            flops = 2 * inputs[0].numel() * inputs[1].shape[-1] if is_product else 0
            self.events.append(MemoryOp(fresh + sum(x.nbytes for x in inputs), flops))
        return result

    def _kernel(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Record one of torch's attention ops, whose tensors are [B, H, L, D], or by rows in a pack."""
        arguments, returns = names_of(op)
        values = dict(zip(arguments.values(), args, strict=False)) | {arguments[x]: y for x, y in kwargs.items()}
        q, k, v = values["query"], values["key"], values["value"]
        cover = "causal" if values.get("is_causal") else "full" if values.get("attn_mask") is None else "partial"
        window = (values.get("window_size_left"), values.get("window_size_right"))
        if window != (None, None):
            cover = "causal" if -1 in window else "window"
        backward, name = "grad_out" in values, op.overloadpacket.__name__
        call = self.record_call(name, backward, cover, q, k, v)
        tensors = _empty_results(q, k, v, backward, by_rows=self.pack is not None)
        self._storages.add((x.untyped_storage() for x in tensors), "tiles")
        if backward:
            workspace = q.new_empty(_workspace_bytes(call) if self.device.type == "cuda" else 0, dtype=torch.uint8)
            self._storages.add([workspace.untyped_storage()], "inside of kernels")
            return tensors
        # The further results of the op, such as random states, are empty tensors or zeros.
        results = {"out": tensors[0], "logsumexp": tensors[1]}
        is_number = [str(returned.type) != "Tensor" for returned in op._schema.returns]
        return tuple(results.get(x, 0 if no else q.new_empty(0)) for x, no in zip(returns, is_number, strict=True))


class _Kind(Enum):
    """The kind of an operation: see :func:`_classify`."""

    ATTENTION = auto()
    MUTABLE = auto()
    VIEW = auto()
    EMPTY = auto()
    DATA = auto()


@cache
def _classify(op: torch._ops.OpOverload) -> _Kind:
    schema = op._schema  # slow to read, so the function is cached
    if op.namespace == "aten" and "_attention" in schema.name:
        return _Kind.ATTENTION
    if schema.is_mutable:
        return _Kind.MUTABLE
    if schema.returns and schema.returns[0].alias_info is not None:
        return _Kind.VIEW
    return _Kind.EMPTY if op.overloadpacket in _WITHOUT_DATA else _Kind.DATA


def _make_result(func: Any, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
    """The result of an operation."""
    # Frequent results are made here, because torch's functions for meta tensors take long.
    packet, dtype = func.overloadpacket, kwargs.get("dtype") or (inputs[0].dtype if inputs else None)
    if packet is _aten.new_empty:
        return torch.empty(args[1], dtype=dtype, device="meta")
    as_first = packet in _POINTWISE and len({(x.shape, x.dtype) for x in inputs}) == 1
    if not as_first and (packet not in _COPIES or kwargs.get("memory_format") not in (None, torch.preserve_format)):
        return func(*args, **kwargs)
    first = inputs[0]
    if first.ndim == 4 and (by_rows := first.transpose(1, 2)).is_contiguous():
        return torch.empty(by_rows.shape, dtype=dtype, device="meta").transpose(1, 2)
    return torch.empty_like(first, dtype=dtype)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    nested = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return [x for value in nested for x in value if isinstance(x, torch.Tensor)]


# -- kernels --


def _wrap_kernel(kernel: Kernel, recorder: _Recorder) -> Kernel:
    if isinstance(kernel, ByTile):
        plain, masked = (tuple(_wrap_kernel(x, recorder) for x in line) for line in (kernel.plain, kernel.masked))
        return ByTile(plain, masked)
    if isinstance(kernel, LatentKernel):
        return replace(kernel, inner=_wrap_kernel(kernel.tiles, recorder))
    if isinstance(kernel, FewShapesKernel):  # its choice depends on the shapes that this process has computed before
        kernel = SdpaKernel(**{entry.name: getattr(kernel, entry.name) for entry in fields(kernel)})
    return _RecordingKernel(kernel, recorder)


@dataclass(frozen=True)
class _RecordingKernel(OtherBackward):
    """Records the calls of ``inner``."""

    recorder: _Recorder = field(compare=False, repr=False)
    positional: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]
    long_tiles = property(attrgetter("inner.long_tiles"))  # pyright: ignore[reportAssignmentType]

    def takes(self, q_BHLD, k_BGMD, v_BGME, *, causal, biased):
        q, k, v = (TensorSpec(x.shape, x.dtype, self.recorder.device) for x in (q_BHLD, k_BGMD, v_BGME))
        return self.inner.takes(q, k, v, causal=causal, biased=biased)  # pyright: ignore[reportArgumentType]

    def forward(self, q_BHLD, k_BGMD, v_BGME, **options):
        return self._run(False, (q_BHLD, k_BGMD, v_BGME), (q_BHLD, k_BGMD, v_BGME), options)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, **options):
        tensors = grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL
        return self._run(True, tensors, (q_BHLD, k_BGMD, v_BGME), options)

    def _run(self, backward: bool, tensors: tuple[Any, ...], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        (q, k, v), recorder = inputs, self.recorder
        run = self.inner.backward if backward else self.inner.forward
        if isinstance(self.inner, SdpaKernel):
            pack, window = options.get("pack"), options.get("window")
            if pack is not None or window is not None:
                sizes = zip(*pack.lengths, strict=True) if pack else [(q.shape[2], k.shape[2])]
                recorder.pack = tuple((*q.shape[:2], k.shape[1], *size) for size in sizes)
            results = run(*tensors, **options)
            recorder.pack = None
            return results
        if isinstance(self.inner, SelectedKernel):  # its rows of queries have as many heads as a unit
            sizes, each = options["picks"].sizes, q.shape[1] // options["picks"].units
            recorder.pack = tuple((1, each, 1, *size) for size in sizes)
        # Like torch's kernels above, the reference runs, so that the memory of its copies is counted.
        covers = {"selected": "picks" in options, "causal": options["causal"], "full": options["bias"] is None}
        cover = next((cover for cover, found in covers.items() if found), "partial")
        recorder.record_call(type(self.inner).__name__, backward, cover, q, k, v)
        recorder.pack = None
        recorder.in_kernel = isinstance(self.inner, ReferenceKernel | SelectedKernel)
        results = run(*tensors, **options) if recorder.in_kernel else _empty_results(q, k, v, backward)
        recorder.in_kernel = False
        recorder.label("tiles", *results)
        return results


def _empty_results(q: Any, k: Any, v: Any, backward: bool, *, by_rows: bool = False) -> tuple[torch.Tensor, ...]:
    """``(out, lse)`` or ``(dq, dk, dv)`` without data, the rows outermost in memory, of tiles [B, H, L, D].

    ``by_rows``: of tiles [B, L, H, D] or packs [T, H, D].
    """

    def like(x: torch.Tensor, dim: int) -> torch.Tensor:
        if by_rows:
            return x.new_empty(*x.shape[:-1], dim)
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1], dim).transpose(1, 2)

    if backward:
        return tuple(like(x, x.shape[-1]) for x in (q, k, v))
    heads_first = q.transpose(-3, -2) if by_rows else q
    return like(q, v.shape[-1]), q.new_empty(heads_first.shape[:-1], dtype=accumulation_dtype(q.dtype))


def _workspace_bytes(call: KernelCall) -> int:
    """Bytes that a CUDA op allocates in a backward, without its results."""
    # flash_api.cpp (mha_bwd, mha_varlen_bwd): dq and a number for each row in float32; dk and dv for each query head.
    # cuDNN's workspace has the same tensors (cudnn-frontend, CompositeSDPABackwardNode: dQ_accum, softmax_sum,
    # dK_fullhead, dV_fullhead). The record of an H200 confirms it for head dim 128.
    # mem_eff_attention/kernel_backward.h: the same for dq. Its dk and dv (some head dims in 16 bits) are not counted.
    dim, total = max(call.dims), 0
    packed, per_query_head = not call.kernel.startswith("_scaled"), "efficient" not in call.kernel
    for batch, heads, kv_heads, rows, keys in call.tiles:
        rows = rows + 128 if packed else -(-rows // 128) * 128 if per_query_head else -(-rows // 64) * 64
        step = 64 if dim > 128 and per_query_head else 32
        total += 4 * batch * heads * rows * (-(-dim // step) * step + 1)
        if per_query_head and heads != kv_heads:
            total += call.itemsize * batch * heads * keys * sum(call.dims)
    return total


@dataclass(frozen=True)
class _UnfilledMask(Mask):
    """A mask with the plan of ``inner``, and explicit masks without data for its tiles."""

    inner: Mask
    dtype: torch.dtype

    @property
    def pattern(self) -> Mask:
        return self.inner.pattern

    def bounds(self, q_positions_L):
        return torch.empty_like(q_positions_L), torch.empty_like(q_positions_L)

    def bias(self, q_positions_L, kv_positions_M):
        if not self.inner.has_bias:
            return None
        return torch.empty(len(q_positions_L), len(kv_positions_M), dtype=self.dtype, device="meta")

    @property
    def has_bias(self) -> bool:
        return self.inner.has_bias

    @property
    def bands(self) -> tuple[Mask, ...]:
        return (self,) * len(self.inner.bands)

    def row(self, index: int) -> Mask:
        return replace(self, inner=self.inner.row(index))

    @property
    def selected(self) -> Any:
        return self.inner.selected
