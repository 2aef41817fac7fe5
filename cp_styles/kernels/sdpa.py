"""The fused kernels of torch's scaled_dot_product_attention, called by their aten ops, for one tile or for several.

The ops compute the same function but differ in argument names and results. Arguments are matched to the schema of an op
by name. So one class serves all ops, and a changed signature in a torch version needs a change only here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from math import gcd
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from cp_styles.kernels.base import Bound, BoundKernel
from cp_styles.kernels.merge import EMPTY_LSE, FUSED_MERGE, Merge
from cp_styles.kernels.packing import LONG_TILE, is_dense, memory_order

# scaled_dot_product_attention, as the function and as an operator.
SDPA_CALLS = frozenset(
    {
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)

# Names of arguments in some schemas, and the common names used here.
_ALIASES = {"grad_out_": "grad_out", "output": "out", "attn_bias": "attn_mask"}
_ALIASES |= dict.fromkeys(("log_sumexp", "softmax_logsumexp"), "logsumexp")


class Names(NamedTuple):
    """The names of an op's arguments and results.

    Attributes:
        arguments: the common name of each argument, by its name in the schema.
        returns: the common names of the results.
    """

    arguments: dict[str, str]
    returns: tuple[str, ...]


@cache
def _get_op(name: str) -> torch._ops.OpOverload:
    """The op of this name in aten."""
    # Kernels have the name and not the op, because kernels are pickled, and ops cannot be.
    return getattr(torch.ops.aten, name).default


@cache
def names_of(op: torch._ops.OpOverload) -> Names:
    schema = op._schema  # reading it is slow, therefore the cache
    arguments = {argument.name: _ALIASES.get(argument.name, argument.name) for argument in schema.arguments}
    return Names(arguments, tuple(_ALIASES.get(returned.name, returned.name) or "" for returned in schema.returns))


@dataclass(frozen=True)
class SdpaKernel(BoundKernel):
    """One of torch's fused attention ops.

    The limits of an op are attributes of this class: :meth:`check` applies them to a whole attention, :meth:`takes` to
    a tile. Tensors that only need another memory layout are padded or copied: head dims that are not multiples of 16
    bytes, and rows that do not start at such a multiple.

    Attributes:
        name: the name of the op in aten. Its backward has ``_backward`` appended.
        device_type: the type of device on which the op runs.
        dtypes: the dtypes that the op takes.
        grouped: whether the op takes fewer key/value heads than query heads.
        wide_tiles: float32 tiles of low-precision inputs are affordable.
        lse_multiple: the op pads the logsumexp to a multiple of this many queries, with infinity.
        lse_column: the op's logsumexp is [B, H, L, 1].
        out_by_rows: the backward reads ``out`` as [B, L, H, E] in memory and ignores its strides.
        out_like_query: the backward may read ``out`` and its gradient with the strides of another call with the same
            query. So both get the memory order of the query.
        dense_rows: see :class:`Kernel`: torch's attention_backward.cu makes them contiguous, or this class does.
        row_bytes: rows must start, and head dims must end, at multiples of this number of bytes.
        most_dim: the largest head dim of a backward; None for any.
        one_dim: query and value must have equal head dims.
        whole_rows: the numbers of queries and of keys of a tile must be multiples of this.
        gates: further conditions on a GPU: keys of GATES.
        long_tiles: the kernel takes only tiles without a mask that have too many queries for a pack.
        merge: merges the tiles of an attention, if this is its first kernel.
    """

    name: str
    device_type: str
    dtypes: tuple[torch.dtype, ...]
    grouped: bool = True
    wide_tiles: bool = False
    lse_multiple: int = 1
    lse_column: bool = False
    out_by_rows: bool = False
    out_like_query: bool = False
    dense_rows: bool = False
    row_bytes: int = 1
    most_dim: int | None = None
    one_dim: bool = True
    whole_rows: int = 1
    gates: tuple[str, ...] = ()
    long_tiles: bool = False
    merge: Merge = field(default=FUSED_MERGE, repr=False)

    @property
    def takes_all(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.most_dim is None and self.whole_rows == 1

    @property
    def streams_keys(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.grouped  # ops without groups get keys that are repeated for the query heads

    @property
    def forward_op(self) -> torch._ops.OpOverload:
        """The op of the forward."""
        return _get_op(self.name)

    @property
    def takes_bias(self) -> bool:
        """Whether the op takes explicit masks."""
        return not self.long_tiles and "attn_mask" in names_of(self.forward_op).arguments.values()

    def bind(self, phase, specs, *, causal, scale, biased=False, window=None, pack=None):
        assert not biased or self.takes_bias  # otherwise the op would be called without the bias
        kind = _BoundBackward if phase == "backward" else _BoundForward
        bound = kind(self, specs, causal, scale, biased, window, pack)
        return Bound(bound.queries, bound.run)

    def check(self, q_BHLD, k_BGMD, v_BGME, *, biased):
        if (refusal := self._explain_refusal(q_BHLD, v_BGME, biased=biased)) is not None:
            raise NotImplementedError(refusal)

    def takes(self, q_BHLD, k_BGMD, v_BGME, *, causal, biased):
        rows, keys, step = q_BHLD.shape[2], k_BGMD.shape[2], self.whole_rows
        if rows % step or keys % step or (self.long_tiles and q_BHLD.shape[0] * rows <= LONG_TILE):
            return False
        return self._explain_refusal(q_BHLD, v_BGME, biased=biased) is None

    def _explain_refusal(self, q_BHLD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> str | None:
        """The text of an error if this kernel cannot take such tensors. None if it can."""
        dtype, device, dim = q_BHLD.dtype, q_BHLD.device, max(self.op_dims(q_BHLD, v_BGME))
        if device.type != self.device_type or dtype not in self.dtypes:
            return (
                f"{self.name} runs {self.dtypes} on {self.device_type}, got {dtype} on {device.type}; pass "
                "kernel=ReferenceKernel() or another kernel that does"
            )
        if self.most_dim is not None and dim > self.most_dim:
            return (
                f"{self.name} takes head dims up to {self.most_dim}, got {q_BHLD.shape[-1]} and {v_BGME.shape[-1]}; "
                "leave kernel= out, or pass kernel=CUDA_EFFICIENT or kernel=ReferenceKernel()"
            )
        if biased and not self.takes_bias:
            return (
                f"{self.name} takes no mask; choose another SDPA backend (efficient attention takes masks), or pass "
                "kernel=ReferenceKernel()"
            )
        for text, holds in map(GATES.__getitem__, self.gates if device.type == "cuda" else ()):
            if not holds(device, dtype, dim):
                return (
                    f"{self.name} needs {text}, got {dtype} and head dim {dim} on a GPU of capability "
                    f"{_capability(device)}; leave kernel= out, or pass kernel=ReferenceKernel() or another that does"
                )
        return None

    def switches(self):
        if not self.gates:
            return ()
        deterministic = torch.are_deterministic_algorithms_enabled()
        only_warns = deterministic and torch.is_deterministic_algorithms_warn_only_enabled()
        return deterministic, only_warns, torch.backends.cuda.cudnn_sdp_enabled()

    def tile_dtype(self, dtype):
        return torch.float32 if self.wide_tiles and dtype in (torch.float16, torch.bfloat16) else dtype

    def op_dims(self, q: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
        """The padded head dims for the op, of query and key, and of value."""
        # Columns of zeros in query and key do not change the logits. Additional columns of the output are removed.
        dim, dim_v, step = q.shape[-1], v.shape[-1], max(self.row_bytes // q.dtype.itemsize, 1)
        dim, dim_v = -(-dim // step) * step, -(-dim_v // step) * step
        return (max(dim, dim_v), max(dim, dim_v)) if self.one_dim else (dim, dim_v)


# Arguments of the ops, some of them in some versions of torch, for calls without a pack, a window and dropout.
_BOUNDS, _WINDOW = ("cum_seq_q", "cum_seq_k"), ("window_size_left", "window_size_right")
_UNUSED = dict.fromkeys((*_BOUNDS, *_WINDOW, "seqused_k", "alibi_slopes", "block_table", "num_splits"))
_UNUSED |= {"dropout_p": 0.0, "compute_log_sumexp": True, "return_debug_mask": False}
_PACKED = "_flash_attention_forward", "_flash_attention_backward"


class _BoundOp:
    """An op of a kernel with the arguments that tiles of one shape share: the common part of forward and backward."""

    back: ClassVar[bool]

    def __init__(self, kernel: SdpaKernel, specs, causal: bool, scale: float, biased: bool, window, pack) -> None:
        q, k, v = specs
        self.kernel, self.pack, self.biased = kernel, pack, biased
        self.packed = window is not None or pack is not None
        self.q_shape, self.k_shape, self.dtype = q.shape, k.shape, q.dtype
        self.dims, self.op_dims = (q.shape[3], v.shape[3]), kernel.op_dims(q, v)
        name = f"{kernel.name}_backward" if self.back else kernel.name
        self.op = _get_op(_PACKED[self.back] if self.packed else name)
        # The CPU kernel masks before it scales. A scale of 0 or below would turn hidden logits into NaN or infinity. So
        # queries are multiplied by the sign, and the scale is above 0.
        self.sign = 1.0 if scale > 0 else -1.0 if scale < 0 else 0.0
        values: dict[str, Any] = {"is_causal": causal, "scale": abs(scale) or 1.0, **_UNUSED}
        values |= {"max_q": q.shape[2], "max_k": k.shape[2], "grad_input_mask": [True, True, True, False]}
        if not biased:
            values["attn_mask"] = None
        if window is not None:
            values |= dict(zip(_WINDOW, window, strict=True))
        if pack is not None:
            # The largest lengths determine the grid, and may be larger than needed. With 1 query the CUDA kernel uses a
            # path for decoding, which permutes heads.
            values |= {"max_q": max(2, *pack.lengths[0]), "max_k": max(pack.lengths[1])}
            values |= dict(zip(_BOUNDS, pack.bounds, strict=True))
        names = names_of(self.op).arguments
        self.constants = {name: values[common] for name, common in names.items() if common in values}
        self.names = {common: name for name, common in names.items()}
        self.key, self.value, self.bias = (self.names.get(common, "") for common in ("key", "value", "attn_mask"))
        self.random: dict[str, torch.Tensor] | None = None  # made by the first call
        self.row_step = kernel.row_bytes // q.dtype.itemsize or 1
        # In a message, rows are aligned if the head dims need no padding.
        self.aligned = self.dims == self.op_dims and getattr(k, "in_message", False)

    def _by_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as _PACKED takes it: [B, L, H, D], of a pack [B T, H, D]."""
        rows = tensor.transpose(1, 2)
        return rows if self.pack is None else rows.flatten(0, 1)

    def _by_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_by_rows`."""
        return (rows if self.pack is None else rows.unflatten(0, (self.q_shape[0], -1))).transpose(1, 2)

    def _align(self, tensor: torch.Tensor, side: int) -> torch.Tensor:
        """Pad a tensor with columns of zeros to ``op_dims[side]``, and copy it if its rows are not aligned.

        ``side`` is 0 for query and key, and 1 for the tensors with the head dim of the value.
        """
        if (dim := self.op_dims[side]) != tensor.shape[3]:
            tensor = F.pad(tensor, (0, dim - tensor.shape[3]))
        strides, offset = tensor.stride(), int(tensor.storage_offset())
        # Out has the memory order of the query, which is not defined along expanded dims: torch before its pull request
        # 175764 then made an output that cuDNN refuses. Expanded keys would work (torch's pull request 191085), but
        # need an additional plan. The copy is as large as the gradients of these keys.
        dense = not self.kernel.out_like_query or 0 not in strides or tensor.numel() == 0
        if dense and _is_aligned(strides, offset, self.row_step):
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    def _run_op(self, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, **tensors: torch.Tensor) -> Any:
        """Call the op with ``tensors`` and with aligned key and value."""
        if not self.aligned:
            k, v = self._align(k, 0), self._align(v, 1)
        if not self.kernel.grouped:  # repeat keys and values for the query heads
            k, v = (x.repeat_interleave(self.q_shape[1] // self.k_shape[1], dim=1) for x in (k, v))
        if self.packed:
            k, v = self._by_rows(k), self._by_rows(v)
        tensors |= {self.key: k, self.value: v}
        if bias is not None:
            tensors[self.bias] = self._expand_bias(bias)
        return self.op(**self.constants, **tensors)

    def _expand_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The bias expanded to [B, H, L, M]. Expanded dims need no memory."""
        keys = self.k_shape[2]
        bias = bias.to(self.dtype).expand(*bias.shape[:-1], keys)
        bias = bias if bias.stride(-1) == 1 else bias.contiguous()
        padding = -keys % max(self.kernel.row_bytes // bias.element_size(), 1)
        return F.pad(bias, (0, padding))[..., :keys].expand(*self.q_shape[:3], keys)


class _BoundForward(_BoundOp):
    back = False

    def queries(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        (q,) = tensors
        q = self._align(q if self.sign == 1.0 else q * self.sign, 0)
        return {self.names["query"]: self._by_rows(q) if self.packed else q}

    def run(self, queries: Any, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None):
        out, lse, *_ = self._run_op(k, v, bias, **queries)
        if self.op_dims[1] != self.dims[1]:
            out = out[..., : self.dims[1]]
        if self.packed:
            out = self._by_heads(out)
        if self.pack is not None:
            lse = lse.unflatten(1, (self.q_shape[0], -1)).transpose(0, 1)
        if lse.ndim > 3:
            lse = lse.squeeze(3)
        if lse.shape[2] != self.q_shape[2]:
            lse = lse[:, :, : self.q_shape[2]]
        if bias is not None:
            # The logsumexp that a fused kernel returns for a fully masked row is not defined. Set it to EMPTY_LSE.
            masked_rows = (bias == float("-inf")).all(-1).expand(lse.shape)
            lse = lse.masked_fill(masked_rows, EMPTY_LSE)
            out = out.masked_fill(masked_rows.unsqueeze(-1), 0.0)
        return out, lse


class _BoundBackward(_BoundOp):
    back = True

    def queries(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        (grad, q, out, lse_BHL), kernel = tensors, self.kernel
        if self.biased:
            # For queries without keys. With a finite number far below all logits, padding keys of a block would have an
            # infinite probability in the kernel. With infinity all probabilities are 0.
            lse_BHL = lse_BHL.masked_fill(lse_BHL <= EMPTY_LSE / 2, float("inf"))
        if kernel.lse_multiple > 1 and torch.version.hip is None:
            lse_BHL = F.pad(lse_BHL, (0, -self.q_shape[2] % kernel.lse_multiple), value=float("inf"))
        lse = lse_BHL if self.pack is None else lse_BHL.transpose(0, 1).flatten(1)
        lse = lse.contiguous()  # CUDA kernels read it as contiguous and do not check it
        q = self._align(q if self.sign == 1.0 else q * self.sign, 0)
        out, grad = self._align(out, 1), self._align(grad, 1)
        if kernel.out_by_rows:
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        if kernel.out_like_query:  # dense, and with the memory order of the query
            order, back = memory_order(q.stride())
            if not is_dense(grad.shape, grad.stride(), order):
                grad = grad.permute(order).contiguous().permute(back)
            if not is_dense(out.shape, out.stride(), order):
                out = out.permute(order).contiguous().permute(back)
        if self.packed:
            grad, q, out = map(self._by_rows, (grad, q, out))
        lse, names = lse.unsqueeze(-1) if kernel.lse_column else lse, self.names
        arguments = {"grad_out": grad, "query": q, "out": out, "logsumexp": lse}
        if self.random is None:  # the state of random numbers, which is not read without dropout
            kinds = dict.fromkeys(("philox_seed", "philox_offset"), torch.int64)
            kinds |= dict.fromkeys(("rng_state", "unused"), torch.uint64)
            self.random = {names[x]: lse.new_empty(2, dtype=dtype) for x, dtype in kinds.items() if x in names}
        return self.random | {names[common]: tensor for common, tensor in arguments.items()}

    def run(self, queries: Any, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None):
        dq, dk, dv, *_ = self._run_op(k, v, bias, **queries)
        if self.biased:
            queries.clear()  # free the copy of the logsumexp, which tiles with a bias do not share
        if self.packed:
            dq, dk, dv = map(self._by_heads, (dq, dk, dv))
        if self.op_dims != self.dims:
            (dim, dim_v) = self.dims
            dq, dk, dv = dq[..., :dim], dk[..., :dim], dv[..., :dim_v]
        if dk.shape[1] != self.k_shape[1]:  # the sum over the query heads of each key head
            dk, dv = (x.unflatten(1, (self.k_shape[1], -1)).sum(2) for x in (dk, dv))
        return dq if self.sign == 1.0 else dq * self.sign, dk, dv


@lru_cache(256)
def _is_aligned(strides: tuple[int, ...], offset: int, step: int) -> bool:
    """Whether each row is contiguous, and starts at a multiple of ``step`` elements."""
    # The ops assume it, because CUDA ops load rows in aligned pieces of 16 bytes, without a check:
    # scaled_dot_product_attention checks it before it chooses an op.
    return strides[-1] == 1 and gcd(offset, *strides[:-1]) % step == 0


@dataclass(frozen=True)
class VarlenKernel(SdpaKernel):
    """Flash attention with its second op, _PACKED, which has windows, and takes a pack in one call: see packing.py."""

    # A single tile that is a band is passed as it is. Causal tiles are square, so the alignment of the causal mask for
    # more keys than queries does not matter.

    small_tiles: ClassVar[bool] = True
    windows: ClassVar[bool] = True


@dataclass(frozen=True)
class CpuFlashKernel(SdpaKernel):
    """torch's flash attention for CPU. It computes the backward of short causal tiles in four ranges of the rows.

    Each range has the keys up to its last row, and an explicit mask. The backward then holds gradients of a range in
    addition to their sums.
    """

    # torch computes whole blocks of 512 keys, also where causal hides most of a block. So the backward of a causal tile
    # of some hundred rows takes as long as a backward without a mask. Source: FlashAttentionKernel.cpp of torch, where
    # ``kvBlockSize`` does not depend on ``num_keys``.

    def bind(self, phase, specs, *, causal, scale, biased=False, window=None, pack=None):
        # Shorter tiles gain little. Longer tiles have larger blocks of queries, which masks slow down. In 16 bits,
        # gradients of keys would be rounded once more for each range.
        q, length = specs[0], specs[0].shape[2]
        if phase == "backward" and causal and not biased and 384 <= length <= 640 and q.dtype.itemsize >= 4:
            return Bound(tuple, partial(self._backward_by_ranges, scale))
        return super().bind(phase, specs, causal=causal, scale=scale, biased=biased, window=window, pack=pack)

    def _backward_by_ranges(self, scale, queries, k_BGMD, v_BGME):
        q_BHLD = queries[1]
        length = q_BHLD.shape[2]
        step = -(-length // 4)
        # The last columns of the mask are a triangle. Each range takes as many of the last columns as it has keys.
        mask = q_BHLD.new_full((step, length), float("-inf")).triu_(length - step + 1)
        dqs, sums, stop = [], [], length
        while stop:  # from the last rows, which attend to all keys
            rows, keys = slice((stop - 1) // step * step, stop), slice(stop)
            hidden = mask[step - (stop - rows.start) :, length - stop :]
            grad, q, out, lse = (x[:, :, rows] for x in queries)
            part = grad, q, k_BGMD[:, :, keys], v_BGME[:, :, keys], out, lse
            dq, *of_keys = self.backward(*part, causal=False, bias=hidden, scale=scale)
            dqs.insert(0, dq)
            if sums:
                sums[0][:, :, keys].add_(of_keys[0])
                sums[1][:, :, keys].add_(of_keys[1])
            sums, stop = sums or of_keys, rows.start
            del dq, of_keys  # free the memory for the next range
        return torch.cat([dq.transpose(1, 2) for dq in dqs], 1).transpose(1, 2), *sums


# Enough for 16 lengths: with a head-tail layout, dry runs count at most five shapes of tiles on a rank, forward and
# backward. A shape may need several plans: with a causal mask and without one, and for groups of the heads.
_MOST_SHAPES = 80
# The shapes that FewShapesKernel has computed, by device. Plans of cuDNN belong to threads and are never freed. So the
# shapes belong to the process, threads that are ranks share them, and no shape is removed. A refused shape is always
# refused, so that a recomputation and a backward get the kernel of the forward.
_computed_shapes: dict[torch.device, set[tuple[object, ...]]] = {}


@dataclass(frozen=True)
class FewShapesKernel(SdpaKernel):
    """A kernel for tiles of at most 80 shapes. Its op makes a plan for each new shape, which takes up to a second.

    A shape is a dtype and the sizes of query, key and value, except the heads. A dry run has no such limit.
    """

    def bind(self, phase, specs, **options):
        _computed_shapes.setdefault(specs[0].device, set()).add(_plan_key(*specs))
        return super().bind(phase, specs, **options)

    def takes(self, q_BHLD, k_BGMD, v_BGME, *, causal, biased):
        if not super().takes(q_BHLD, k_BGMD, v_BGME, causal=causal, biased=biased):
            return False
        computed = _computed_shapes.get(q_BHLD.device, ())
        if len(computed) < _MOST_SHAPES or _plan_key(q_BHLD, k_BGMD, v_BGME) in computed:
            return True
        warnings.warn(
            f"{self.name} has computed {_MOST_SHAPES} shapes of tiles on {q_BHLD.device}, and makes a plan for each: "
            "other shapes go to flash attention from now on. Pad sequences to few lengths, or pass kernel=CUDA_CUDNN",
            stacklevel=2,
        )
        return False


def _plan_key(q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor) -> tuple[object, ...]:
    """The dtype and sizes of a plan of cuDNN, without heads and strides, of which there are few."""
    return q_BHLD.dtype, q_BHLD.shape[0], *q_BHLD.shape[2:], *v_BGME.shape[2:]


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU. Without a GPU (fake tensors), a capability that supports everything."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


GATES: dict[str, tuple[str, Callable[[torch.device, torch.dtype, int], bool]]] = {
    "8.0": ("a GPU of compute capability 8.0 or later", lambda gpu, *_: _capability(gpu) >= (8, 0)),
    "8.0 for bfloat16": (
        "compute capability 8.0 or later for bfloat16",
        lambda gpu, dtype, _: dtype != torch.bfloat16 or _capability(gpu) >= (8, 0),
    ),
    "room for the backward": (  # sdp_utils.cpp
        "another head dim than 193 to 224 on capabilities 8.6, 8.9 and 12",
        lambda gpu, _, dim: not (192 < dim <= 224 and _capability(gpu) in ((8, 6), (8, 9), (12, 0), (12, 1))),
    ),
    "any order of sums": (
        "torch.use_deterministic_algorithms to be off",
        lambda *_: (
            not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled()
        ),
    ),
    "logsumexp by heads": (  # MHA.cpp: otherwise it is [B, L, H, 1] in memory in some calls, and the backward reads so
        "TORCH_CUDNN_SDPA_AVOID_RECOMPILE not to be 1",
        lambda *_: os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") != "1",
    ),
    # sdp_utils.cpp: GPUs on which torch prefers cuDNN. On CUDA 13 only the major number of the capability counts.
    "9.0, 10": (
        "a GPU of compute capability 9.0, 10.0 or 10.3",
        lambda gpu, *_: _capability(gpu) in ((9, 0), (10, 0), (10, 3)),
    ),
    "cuDNN 9.15": ("cuDNN newer than 9.15.0", lambda *_: (torch.backends.cudnn.version() or 0) > 91500),
    "cuDNN on": ("torch.backends.cuda.enable_cudnn_sdp(True)", lambda *_: torch.backends.cuda.cudnn_sdp_enabled()),
}
"""The conditions of fused ops, each as a text and a test of GPU, dtype and larger head dim (torch's sources, 2.11 to
2.15)."""
_16_BITS = (torch.float16, torch.bfloat16)
CPU_FLASH = CpuFlashKernel(
    "_scaled_dot_product_flash_attention_for_cpu", "cpu", (torch.float64, torch.float32, *_16_BITS), wide_tiles=True
)
"""torch's flash attention for CPU: float64, float32, bfloat16, float16. Low precision has tiles of float32."""
CUDA_FLASH = VarlenKernel(
    "_scaled_dot_product_flash_attention",
    "cuda",
    _16_BITS,
    dense_rows=True,
    row_bytes=16,
    most_dim=256,
    gates=("8.0", "room for the backward"),
)
"""Flash attention on CUDA: bfloat16 and float16, head dims up to 256 with a backward, compute capability 8.0. Its
small tiles are packed for torch's op for sequences of varying lengths."""
CUDA_EFFICIENT = SdpaKernel(
    "_scaled_dot_product_efficient_attention",
    "cuda",
    (torch.float32, *_16_BITS),
    grouped=False,  # takes groups from torch 2.15 on
    lse_multiple=32,
    out_by_rows=True,
    dense_rows=True,
    row_bytes=16,
    one_dim=False,
    gates=("8.0 for bfloat16",),
)
"""Memory-efficient attention on CUDA: float32, bfloat16 and float16, any head dim; takes explicit masks."""
CUDA_EFFICIENT_FLOAT32 = replace(CUDA_EFFICIENT, wide_tiles=True)
"""This kernel with tiles of float16 and bfloat16 computed in float32, so that only the merged result is rounded. An
attention in a single tile stays in its dtype."""
# Whole blocks of 128 rows: the backward of cuDNN can make NaN with half a block of keys (before 9.26) and with one
# query (9.26 too), it does not take one key, and every shape has a plan, which is compiled and never freed.
CUDA_CUDNN = SdpaKernel(
    "_scaled_dot_product_cudnn_attention",
    "cuda",
    _16_BITS,
    lse_column=True,
    out_like_query=True,
    dense_rows=True,
    row_bytes=16,
    most_dim=128,
    one_dim=False,
    whole_rows=128,
    gates=("8.0", "any order of sums", "logsumexp by heads"),
)
"""cuDNN's attention: bfloat16 and float16, head dims up to 128 with a backward, tiles of whole blocks of 128 rows,
compute capability 8.0. Not deterministic."""
CUDA_CUDNN_PREFERRED = FewShapesKernel(
    **vars(CUDA_CUDNN) | {"long_tiles": True, "gates": (*CUDA_CUDNN.gates, "9.0, 10", "cuDNN 9.15", "cuDNN on")}
)
"""This kernel for long tiles without a mask, on GPUs on which torch itself prefers it to flash attention, and for 80
shapes of tiles on each of them."""

SDPA_KERNELS = (CPU_FLASH, CUDA_CUDNN_PREFERRED, CUDA_FLASH, CUDA_EFFICIENT)
"""The kernels that call torch's fused ops, in the order of choice: see :func:`kernel_for_tiles`."""
