"""One rank's share of an attention, run without data: what it sends, computes and holds, in order.

The strategy itself runs, forward and backward, with meta tensors and a
:class:`~cp_styles.explain.rehearsal_group.Rehearsal` in place of the process group. So the figures are those of the
plan that a real run executes. No process group is needed, nothing is sent, and no memory is used. Kernels are replaced
by *outlined* ones, which record their calls and return results of the right shapes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles.bounded_cache import another_cache
from cp_styles.explain.rehearsal_group import Rehearsal, Transfer, Waited, split_rehearsal
from cp_styles.kernels import Kernel, ReferenceKernel, SdpaKernel, VarlenKernel, kernel_for_tiles
from cp_styles.kernels.base import OtherBackward
from cp_styles.kernels.choice_by_tile import ByTile
from cp_styles.kernels.merge import accumulation_dtype
from cp_styles.kernels.sdpa import names_of
from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask
from cp_styles.strategies import Attention, Strategy, strategy_on


class Shapes(NamedTuple):
    """The tensors of an attention, beside their lengths.

    Attributes:
        heads, kv_heads: query heads, and heads of keys and values.
        dim, value_dim: head dims of queries and keys, and of values.
        dtype: of query, key and value.
        device: where they are; it decides which kernels compute.
        batch: rows of the batch.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    batch: int = 1

    def row_bytes(self, heads: int, dim: int) -> int:
        """Bytes of one position of a tensor with ``heads`` heads of ``dim`` dims."""
        return self.batch * heads * dim * self.dtype.itemsize

    @property
    def query_row(self) -> int:
        """Bytes of one position's queries."""
        return self.row_bytes(self.heads, self.dim)

    @property
    def kv_row(self) -> int:
        """Bytes of one position's key and value."""
        return self.row_bytes(self.kv_heads, self.dim) + self.row_bytes(self.kv_heads, self.value_dim)

    def tensors(self, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value without data, of ``queries`` and ``keys`` rows. [B, rows, heads, dim] in memory."""
        q, k, v = (
            torch.empty(self.batch, rows, heads, dim, dtype=self.dtype, device="meta").transpose(1, 2)
            for rows, heads, dim in (
                (queries, self.heads, self.dim),
                (keys, self.kv_heads, self.dim),
                (keys, self.kv_heads, self.value_dim),
            )
        )
        return q, k, v

    def named(self, queries: int, keys: int) -> tuple[Named, Named, Named]:
        """The same ``queries`` and ``keys``, with their device, as :meth:`Kernel.check` needs them."""
        return tuple(Named(x.shape, x.dtype, self.device) for x in self.tensors(queries, keys))  # pyright: ignore


class Named(NamedTuple):
    """The properties of a tensor by which kernels decide whether they take it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class KernelCall(NamedTuple):
    """One call of a kernel, which computes one tile or a pack of them.

    Attributes:
        kernel: its name.
        backward: whether it is a backward.
        cover: "full", "causal" (one edge is a diagonal), "window" (two are) or "partial" (with an explicit mask).
        tiles: the (batch, query heads, key heads, queries, keys) of each tile.
        dims: head dims of queries and of values, as the kernel gets them.
        itemsize: bytes of a number.
    """

    kernel: str
    backward: bool
    cover: str
    tiles: tuple[tuple[int, int, int, int, int], ...]
    dims: tuple[int, int]
    itemsize: int

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are computed, of all heads."""
        whole = (batch * heads * queries * keys for batch, heads, _, queries, keys in self.tiles)
        beyond = (batch * heads * queries * (queries - 1) // 2 for batch, heads, _, queries, _ in self.tiles)
        return sum(whole) - self.edges * sum(beyond)

    @property
    def edges(self) -> int:
        """How many edges of the tiles are diagonals."""
        return {"causal": 1, "window": 2}.get(self.cover, 0)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products: two products forward, five backward."""
        dim, value_dim = self.dims
        return 2 * self.pairs * ((3 * dim + 2 * value_dim) if self.backward else (dim + value_dim))


class Copied(NamedTuple):
    """An operation outside of the kernels (packing, adding, merging, masking): the bytes that it reads and writes."""

    nbytes: int


Event: TypeAlias = Transfer | Waited | KernelCall | Copied


class TooManyCalls(Exception):
    """A rehearsal would take long; see :func:`rehearse`."""


@dataclass
class Phase:
    """What a rank does in a forward or in a backward.

    Attributes:
        events: what happens, in order.
        peak: the most bytes that are alive at once, beside the inputs and the output's gradient.
        parts: those bytes by what they are for.
        left: the bytes that are alive at the end, by what they are for.
    """

    events: list[Event]
    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> list[KernelCall]:
        return [event for event in self.events if isinstance(event, KernelCall)]

    @property
    def sent(self) -> Counter[int]:
        """Bytes by the rank that they go to."""
        return self._bytes(outgoing=True)

    @property
    def received(self) -> Counter[int]:
        """Bytes by the rank that they come from."""
        return self._bytes(outgoing=False)

    def _bytes(self, *, outgoing: bool) -> Counter[int]:
        sizes: Counter[int] = Counter()
        for event in self.events:
            if isinstance(event, Transfer) and event.outgoing == outgoing:
                sizes[event.peer] += event.nbytes
        return sizes


@dataclass(frozen=True)
class RankRun:
    """One rank's run: a forward and its backward."""

    rank: int
    forward: Phase
    backward: Phase


def kernel_of(shapes: Shapes, named: Kernel | None) -> Kernel:
    """The kernel, or kernels, that compute the tiles of such tensors; see :func:`kernel_for_tiles`."""
    return kernel_for_tiles(shapes.named(1, 1), named=named)  # pyright: ignore[reportArgumentType]


def rehearse(
    strategy: Strategy,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    kernel: Kernel,
    shapes: Shapes,
    rank: int,
    *,
    sink: bool = False,
    memory: bool = True,
    most_calls: int | None = None,
) -> RankRun:
    """What ``rank`` does for one attention with (query, key) ``layouts``; no communication, no process group.

    Without ``memory`` the bytes of tensors and copies are not counted, which takes less time. TooManyCalls is raised
    for a forward or backward with more kernel calls than ``most_calls``.
    """
    strategy, notes = strategy_on(strategy, layouts[0].ranks, mask), _Notes(memory, most_calls)
    attention, (q, k, v) = _call(layouts, mask, kernel, shapes, rank, notes)
    sink_H = torch.empty(shapes.heads, dtype=torch.float32, device="meta") if sink else None
    size, dtype = strategy.residual_places(attention, q, k, v).spec
    grad = q.new_empty(shapes.batch, q.shape[2], shapes.heads, shapes.value_dim).transpose(1, 2)
    with notes:
        residual = q.new_empty(size, dtype=dtype)
        notes.label("kept for the backward", residual)
        out = strategy.forward(attention, q, k, v, sink_H, residual)
        notes.label("output", out)
        forward = notes.phase()
        notes.begin()
        grads = strategy.backward(attention, grad, q, k, v, out, residual, sink_H)
        notes.label("gradients", *(x for x in grads if x is not None))
        backward = notes.phase()
    return RankRun(rank, forward, backward)


def planning_seconds(
    strategy: Strategy,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    kernel: Kernel,
    shapes: Shapes,
    rank: int,
) -> float:
    """Seconds in which this machine's CPU makes the plan of ``rank`` for one attention, as if none were cached."""
    strategy = strategy_on(strategy, layouts[0].ranks, mask)
    attention, tensors = _call(layouts, mask, kernel, shapes, rank, _Notes(False, None))
    with another_cache():
        start = time.perf_counter()
        strategy.residual_places(attention, *tensors)  # what a strategy keeps follows from its plan
        return time.perf_counter() - start


def _call(
    layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask, kernel: Kernel, shapes: Shapes, rank: int, notes: _Notes
) -> tuple[Attention, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The attention of ``rank``, which writes into ``notes``, and its query, key and value without data."""
    q_layout, kv_layout = layouts
    group = Rehearsal(notes, rank, range(q_layout.ranks)) if q_layout.ranks > 1 else None
    outlined = _outlined(kernel, notes, shapes.device)
    scale = 1.0 / math.sqrt(shapes.dim)
    options = {"scale": scale, "split": split_rehearsal}
    attention = Attention(group, q_layout, kv_layout, _Outlined(mask, shapes.dtype), outlined, **options)
    return attention, shapes.tensors(q_layout.lengths[rank], kv_layout.lengths[rank])


class _Notes(TorchDispatchMode):
    """What a rehearsal has noted, in order; and the bytes of storages that are created and alive, as
    ``cp_styles.testing.MemoryTrace`` counts them for data.

    Attributes:
        events: what operations and kernels compute, transfers that are started, and waits for them.
        transfers: the number of transfers so far.
    """

    def __init__(self, memory: bool, most_calls: int | None) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.transfers = self._calls = 0
        self._memory, self._most_calls = memory, most_calls
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage: reference, number
        self._sizes: list[int] = []  # by number
        self._labels: list[str] = []
        self._peak, self._at_peak, self._bound = 0, [], 0

    def begin(self) -> None:
        """Start the events anew, and the peak from what is alive now."""
        self.events, self.transfers, self._calls = [], 0, 0
        self._peak, self._at_peak = -1, []
        self._look()

    def called(self, *call: Any) -> None:
        """Note a :class:`KernelCall` with these fields."""
        self._calls += 1
        if self._most_calls is not None and self._calls > self._most_calls:
            raise TooManyCalls(f"more than {self._most_calls:,} kernel calls on a rank")
        self.events.append(KernelCall(*call))

    def phase(self) -> Phase:
        """The events and the memory since :meth:`begin`."""
        return Phase(list(self.events), self._peak, self._by_label(self._at_peak), self._by_label(self._numbers()))

    def label(self, what: str, *tensors: torch.Tensor) -> None:
        """Label the storage of tensors with its purpose. A later label replaces an earlier one, except ``_KEPT``."""
        for tensor in tensors if self._memory else ():
            entry = self._alive.get(StorageWeakRef(tensor.untyped_storage()).cdata)
            if entry is not None and self._labels[entry[1]] != _KEPT:
                self._labels[entry[1]] = what

    def _by_label(self, numbers: Sequence[int]) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for number in numbers:
            sizes[self._labels[number]] += self._sizes[number]
        return dict(sizes)

    def _numbers(self) -> list[int]:
        for key in [key for key, (storage, _) in self._alive.items() if storage.expired()]:
            del self._alive[key]
        return [number for _, number in self._alive.values()]

    def _look(self, fresh: int = 0) -> None:
        self._bound += fresh
        if fresh and self._bound <= self._peak:
            return  # whatever has been freed meanwhile
        numbers = self._numbers()
        live = self._bound = sum(self._sizes[number] for number in numbers)
        if live > self._peak:
            self._peak, self._at_peak = live, numbers

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, returns = kwargs or {}, func._schema.returns
        if func._schema.is_mutable:  # there is no data to change
            self.events.append(Copied(sum(x.nbytes for x in _tensors_in((*args, *kwargs.values())))))
            return kwargs.get("out", args[0])
        if returns and returns[0].alias_info is not None:  # a view
            return func(*args, **kwargs)
        inputs = _tensors_in((*args, *kwargs.values()))
        result = _made(func, args, kwargs, inputs)
        storages = {StorageWeakRef(x.untyped_storage()).cdata for x in inputs}  # _unsafe_view is none by its schema
        fresh = new_bytes = 0
        for x in _tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
            reference = StorageWeakRef(x.untyped_storage())
            if reference.cdata not in storages:
                fresh += x.nbytes
                if self._memory:
                    self._alive[reference.cdata] = reference, len(self._sizes)
                    self._sizes.append(x.untyped_storage().nbytes())
                    new_bytes += self._sizes[-1]
                    self._labels.append(_OTHER)
        if fresh:
            if self._memory:
                self._look(new_bytes)
            if func.overloadpacket not in _WITHOUT_DATA:
                self.events.append(Copied(fresh + sum(x.nbytes for x in inputs)))
        return result


def _made(func: Any, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
    """The result of an operation. Frequent ones are made here: torch's functions for meta tensors take long."""
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


_KEPT, _OTHER = "kept for the backward", "sums and copies"
_aten = torch.ops.aten
_COPIES = (_aten._to_copy, _aten.clone)
_POINTWISE = (_aten.sigmoid, _aten.sub, _aten.add, _aten.mul)
_WITHOUT_DATA = (_aten.empty, _aten.new_empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty_strided)


def _outlined(kernel: Kernel, notes: _Notes, device: torch.device) -> Kernel:
    if isinstance(kernel, ByTile):
        plain, masked = (tuple(_outlined(x, notes, device) for x in line) for line in (kernel.plain, kernel.masked))
        return ByTile(plain, masked)
    outline: Any = _OutlinedOther(kernel)
    if isinstance(kernel, SdpaKernel):
        kind = _OutlinedVarlen if isinstance(kernel, VarlenKernel) else _OutlinedSdpa
        outline = kind(**{entry.name: getattr(kernel, entry.name) for entry in fields(kernel)})
    object.__setattr__(outline, "notes", notes)
    object.__setattr__(outline, "device", device)
    return outline


class _Op:
    """Mixin before a class of torch's kernels: calls of its op are recorded, and return tensors without data."""

    notes: _Notes
    device: torch.device
    packed: tuple[tuple[int, int, int, int, int], ...] | None = None

    def takes(self, q_BHLD, k_BGMD, v_BGME, *, causal, biased):
        q, k, v = (Named(x.shape, x.dtype, self.device) for x in (q_BHLD, k_BGMD, v_BGME))
        return super().takes(q, k, v, causal=causal, biased=biased)  # pyright: ignore[reportAttributeAccessIssue]

    def _call(self, op: Any, **values: Any) -> tuple[Any, ...]:
        q, k, v = values["query"], values["key"], values["value"]
        cover = "causal" if values["is_causal"] else "full" if values.get("attn_mask") is None else "partial"
        window = (values.get("window_size_left"), values.get("window_size_right"))
        if window != (None, None):
            cover = "causal" if -1 in window else "window"
        tiles = ((*q.shape[:2], k.shape[1], q.shape[2], k.shape[2]),) if self.packed is None else self.packed
        name, backward = names_of(op), "grad_out" in values
        dims = q.shape[-1], v.shape[-1]
        self.notes.called(op.overloadpacket.__name__, backward, cover, tiles, dims, q.itemsize)
        tensors = _results(q, k, v, backward, by_rows=self.packed is not None)
        self.notes.label("tiles", *tensors)
        if backward:
            inside = _inside(op.overloadpacket.__name__, tiles, dims, q.itemsize) if self.device.type == "cuda" else 0
            self.notes.label("inside of kernels", q.new_empty(inside, dtype=torch.uint8))
            return tensors
        results = dict.fromkeys(name.returns) | {"out": tensors[0], "logsumexp": tensors[1]}
        return tuple(results.values())


def _inside(name: str, tiles: Sequence[tuple[int, ...]], dims: tuple[int, int], itemsize: int) -> int:
    """Bytes that a CUDA op allocates in a backward beside its results."""
    # flash_api.cpp (mha_bwd, mha_varlen_bwd): dq and a number for each row in float32; dk and dv for each query head.
    # cuDNN's workspace has the same tensors (cudnn-frontend, CompositeSDPABackwardNode: dQ_accum, softmax_sum,
    # dK_fullhead, dV_fullhead). The record of an H200 confirms it for head dim 128.
    # mem_eff_attention/kernel_backward.h: the same of dq; not counted are dk and dv, for some head dims in 16 bits.
    dim, total = max(dims), 0
    packed, per_query_head = not name.startswith("_scaled"), "efficient" not in name
    for batch, heads, kv_heads, rows, keys in tiles:
        rows = rows + 128 if packed else -(-rows // 128) * 128 if per_query_head else -(-rows // 64) * 64
        step = 64 if dim > 128 and per_query_head else 32
        total += 4 * batch * heads * rows * (-(-dim // step) * step + 1)
        if per_query_head and heads != kv_heads:
            total += itemsize * batch * heads * keys * sum(dims)
    return total


class _OutlinedSdpa(_Op, SdpaKernel):
    pass


class _OutlinedVarlen(_Op, VarlenKernel):
    def forward(self, *tensors, **options):
        return self._noted(super().forward, tensors, *tensors[:2], **options)

    def backward(self, *tensors, **options):
        return self._noted(super().backward, tensors, *tensors[1:3], **options)

    def _noted(self, run: Any, tensors: Any, q: torch.Tensor, k: torch.Tensor, **options: Any) -> Any:
        pack, window = options.get("pack"), options.get("window")
        lengths = ((q.shape[2],), (k.shape[2],)) if pack is None else pack.lengths
        tiles = tuple((*q.shape[:2], k.shape[1], *sizes) for sizes in zip(*lengths, strict=True))
        object.__setattr__(self, "packed", tiles if pack or window else None)
        return run(*tensors, **options)


class _OutlinedOther(OtherBackward):
    """An outlined kernel that is not one of torch's. The reference runs, so that its memory is counted."""

    notes: _Notes
    positional: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    def forward(self, q_BHLD, k_BGMD, v_BGME, **options):
        return self._run("forward", (q_BHLD, k_BGMD, v_BGME), (), options)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, **options):
        return self._run("backward", (q_BHLD, k_BGMD, v_BGME), (grad_BHLE, out_BHLE, lse_BHL), options)

    def _run(self, phase: str, tensors: Any, others: Any, options: dict[str, Any]) -> Any:
        (q, k, v), backward = tensors, phase == "backward"
        cover = "causal" if options["causal"] else "full" if options["bias"] is None else "partial"
        tiles = ((q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]),)
        self.notes.called(type(self.inner).__name__, backward, cover, tiles, (q.shape[-1], v.shape[-1]), q.itemsize)
        if isinstance(self.inner, ReferenceKernel):
            results = getattr(self.inner, phase)(*others[:1], q, k, v, *others[1:], **options)
        else:
            results = _results(q, k, v, backward)
        self.notes.label("tiles", *results)
        return results


def _results(q: Any, k: Any, v: Any, backward: bool, *, by_rows: bool = False) -> tuple[torch.Tensor, ...]:
    """``(out, lse)`` or ``(dq, dk, dv)``, the rows outermost in memory, of tiles [B, H, L, D]. ``by_rows``: of tiles
    [B, L, H, D] or packs [T, H, D]."""

    def like(x: torch.Tensor, dim: int) -> torch.Tensor:
        if by_rows:
            return x.new_empty(*x.shape[:-1], dim)
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1], dim).transpose(1, 2)

    if backward:
        return tuple(like(x, x.shape[-1]) for x in (q, k, v))
    heads_first = q.transpose(-3, -2) if by_rows else q
    return like(q, v.shape[-1]), q.new_empty(heads_first.shape[:-1], dtype=accumulation_dtype(q.dtype))


@dataclass(frozen=True)
class _Outlined(Mask):
    """A mask whose plan is that of ``inner``, and whose tiles have explicit masks without data."""

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
    def grids(self):
        return self.inner.grids

    def row(self, index: int) -> Mask:
        return replace(self, inner=self.inner.row(index))
