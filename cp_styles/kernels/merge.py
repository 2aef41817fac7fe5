"""Online softmax: merges results of tiles of the same queries in the accumulation dtype."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import compress
from math import prod
from typing import Any

import torch

from cp_styles.kernels.packing import memory_order, part_of

# The logsumexp of a query without keys. It is finite, so that a difference is not NaN, and far below any logit of a
# float32 dot product.
EMPTY_LSE = -1e30


# float64 for float64; float32 for all other floating-point dtypes.
accumulation_dtype: Callable[[torch.dtype], torch.dtype] = partial(torch.promote_types, torch.float32)


class Merge(ABC):
    """Merges a tile into the result of earlier tiles, in place. Kernels carry such an object: see ``Kernel.merge``.

    ``out_BHLE`` and ``lse_BHL`` are the result of earlier tiles, in the accumulation dtype. ``new_out_BHLE`` and
    ``new_lse_BHL`` are the tile. ``index`` has the row of ``out`` for each row of the tile, each row once. None: the
    rows are the same. No communication.
    """

    def takes(self, out_BHLE: torch.Tensor, new_out_BHLE: torch.Tensor) -> bool:
        """Whether it can merge such tensors. If not, TorchMerge does."""
        return True

    @abstractmethod
    def __call__(
        self,
        out_BHLE: torch.Tensor,
        lse_BHL: torch.Tensor,
        new_out_BHLE: torch.Tensor,
        new_lse_BHL: torch.Tensor,
        index: torch.Tensor | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class TorchMerge(Merge):
    """A merge by torch's operations, which read and write 18 bytes for each number of a tile in 16 bits."""

    # An interpolation in place, which does not overflow and does not subtract large numbers.

    def __call__(self, out_BHLE, lse_BHL, new_out_BHLE, new_lse_BHL, index=None):
        if index is not None:
            before = lse_BHL.index_select(2, index)
            lse_BHL.index_copy_(2, index, torch.logaddexp(before, new_lse_BHL))
            # The weights of all rows take less memory than a copy of the rows.
            weight = torch.ones_like(lse_BHL).index_copy_(2, index, torch.sigmoid(before - new_lse_BHL))
            out_BHLE.mul_(weight.unsqueeze(-1))
            out_BHLE.index_add_(2, index, new_out_BHLE * torch.sigmoid(new_lse_BHL - before).unsqueeze(-1))
            return
        weight = torch.sigmoid(new_lse_BHL - lse_BHL)
        torch.logaddexp(lse_BHL, new_lse_BHL, out=lse_BHL)
        out_BHLE.lerp_(new_out_BHLE.to(out_BHLE.dtype), weight.unsqueeze(-1))


@dataclass(frozen=True)
class FusedMerge(Merge):
    """A merge in one kernel of Triton, which reads and writes 10 bytes for each number.

    It takes float32 sums of tiles in float16, bfloat16 or float32 on CUDA, where Triton is installed and runs.
    """

    def takes(self, out_BHLE, new_out_BHLE):
        # Tensors of a subclass, fake ones for example, may have no memory.
        real = type(out_BHLE) is type(new_out_BHLE) is torch.Tensor and out_BHLE.device.type == "cuda"
        dtypes = out_BHLE.dtype == torch.float32 and new_out_BHLE.dtype in _TILES
        # The kernel counts heads and rows in 32 bits.
        return real and dtypes and out_BHLE.shape[1] * out_BHLE.shape[2] < 2**30 and _runs_triton(out_BHLE.device)

    def __call__(self, out_BHLE, lse_BHL, new_out_BHLE, new_lse_BHL, index=None):
        from cp_styles.kernels.fused_merge import merge_rows  # imports Triton

        merge_rows(out_BHLE, lse_BHL, new_out_BHLE, new_lse_BHL, index)


_TILES = (torch.float16, torch.bfloat16, torch.float32)
TORCH_MERGE, FUSED_MERGE = TorchMerge(), FusedMerge()


@cache
def _runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed, compiles a merge and starts it on this GPU. Tried once, with one number."""
    # Ranks may differ. The merges differ in rounding only, and each rank merges the tiles of its own queries, whose
    # output and logsumexp only its own backward reads. The host does not wait for the result.
    if find_spec("triton") is None:
        return False
    out, lse = torch.zeros(1, 1, 1, 1, device=device), torch.zeros(1, 1, 1, device=device)
    try:
        FUSED_MERGE(out, lse, torch.zeros_like(out), torch.zeros_like(lse))
    except torch.OutOfMemoryError:  # not an error of Triton
        raise
    except Exception as error:
        warnings.warn(
            f"Triton cannot run the merge of tiles on {device}: {type(error).__name__}: {error}\nTorch's operations "
            "merge them, which takes longer. Triton needs a C compiler (set CC) and a cache folder that it can write "
            "(set TRITON_CACHE_DIR). kernel=replace(CUDA_FLASH, merge=TorchMerge()) does without Triton",
            stacklevel=2,
        )
        return False
    return True


class OnlineSoftmax:
    """Merges ``(out_BHLD, lse_BHL)`` of tiles over the rows of L queries.

    With p_t = exp(lse_t): out = sum_t p_t out_t / sum_t p_t and lse = log sum_t p_t, tile by tile (Milakov
    and Gimelshein, 2018; Rabe and Staats, 2021). ``merge`` computes it, or TorchMerge for tensors that ``merge`` does
    not take. ``dtype`` is the dtype of the tiles, which are merged in its accumulation dtype. A single tile that covers
    everything is returned unchanged. Otherwise ``out`` has the memory order of ``like_BHLD``.
    """

    def __init__(
        self,
        out_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        like_BHLD: torch.Tensor | None = None,
        merge: Merge = FUSED_MERGE,
    ) -> None:
        self._like = like_BHLD
        self._merge = merge
        self._shape = out_shape
        self._dtype = accumulation_dtype(dtype)
        self._device = device
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._complete = False  # the first tile covers everything
        self._filled: dict[tuple[int, int], list[int]] = {}  # by heads: edges of the filled ranges of rows, ascending

    def add(
        self,
        heads: tuple[int, int],
        rows: tuple[int, int],
        out_BHLD: torch.Tensor,
        lse_BHL: torch.Tensor,
        index: torch.Tensor | None = None,
    ) -> None:
        """Merge a tile of these heads and query rows; with ``index``, of the rows in the index, each once.

        The tensors may be kept and changed in place.
        """
        fresh = not self._complete and self._is_fresh(heads, rows)
        all_rows = 0, self._shape[2]
        if self._out is None or self._lse is None:
            if index is None and rows == all_rows and heads == (0, self._shape[1]):
                self._out, self._lse, self._complete = out_BHLD, lse_BHL, True
                return
            self._out, self._lse = self._make_empty()
        if self._out.dtype != self._dtype:
            self._out = self._out.to(self._dtype)
        out, lse = (part_of(x, heads, rows if index is None else all_rows) for x in (self._out, self._lse))
        if index is not None and fresh:
            out.index_copy_(2, index, out_BHLD.to(out.dtype))
            lse.index_copy_(2, index, lse_BHL)
            return
        if fresh:
            out.copy_(out_BHLD)
            lse.copy_(lse_BHL)
            return
        merge = self._merge if self._merge.takes(out, out_BHLD) else TORCH_MERGE
        merge(out, lse, out_BHLD, lse_BHL, index)

    def _is_fresh(self, heads: tuple[int, int], rows: tuple[int, int]) -> bool:
        """Whether no earlier tile has any of these heads and rows."""
        fresh = True
        for (start, stop), edges in self._filled.items():
            fresh = fresh and not (start < heads[1] and heads[0] < stop and _overlaps(edges, rows))
        edges = self._filled.setdefault(heads, [])
        first, last = bisect_left(edges, rows[0]), bisect_right(edges, rows[1])
        edges[first:last] = compress(rows, (first % 2 == 0, last % 2 == 0))
        return fresh

    def add_sink(self, sink_H: torch.Tensor, level_BHL: torch.Tensor | None = None) -> None:
        """Merge one more key for each head, with the logit ``sink_H`` for every query and the value 0.

        ``level_BHL`` was subtracted from all other logits.
        """
        out, lse = self.result()
        self._out = apply_sink(out, lse, sink_H, level_BHL)
        self._lse = torch.logaddexp(lse, _sink_logit(sink_H, lse.dtype, level_BHL))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, lse)``. Rows without keys have out = 0 and lse = EMPTY_LSE."""
        if self._out is None or self._lse is None:
            return self._make_empty()
        return self._out, self._lse

    def _make_empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = _zeros(self._shape, self._dtype, self._device, self._like)
        return out, torch.full(self._shape[:3], EMPTY_LSE, dtype=self._dtype, device=self._device)


def _overlaps(edges: list[int], rows: tuple[int, int]) -> bool:
    """Whether the range of rows overlaps the ranges with these edges."""
    place = bisect_right(edges, rows[0])
    return place % 2 == 1 or bisect_left(edges, rows[1]) > place


def merge_all(outs_PBHLE: torch.Tensor, lses_PBHL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out_BHLE, lse_BHL)`` of queries, merged at once from P results of these queries over different keys.

    Rows without keys have out = 0 and lse = EMPTY_LSE in each result, and in the merged result.
    """
    lse_BHL = torch.logsumexp(lses_PBHL, 0)
    weights = torch.exp(lses_PBHL - lse_BHL)
    return (outs_PBHLE * weights.unsqueeze(-1)).sum(0), lse_BHL


class RowSum:
    """Sums tiles of gradients ``[B, H, rows, D]`` into the rows of a whole tensor.

    A tile that covers everything becomes the sum itself. Partial tiles before it wait until then, if they are at most
    half as large. This avoids writing and reading zeros.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._sum: torch.Tensor | None = None
        self._waiting: dict[Any, torch.Tensor] = {}

    def add(
        self, heads: tuple[int, int], rows: tuple[int, int], tile: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """Add a tile to these heads and rows; with ``index``, to the rows in the index, which may repeat.

        The tensor may be kept and changed in place.
        """
        everything = index is None and rows == (0, self._shape[2]) and heads == (0, self._shape[1])
        if self._sum is not None:
            if everything:
                self._sum.add_(tile)
            elif index is None:
                part_of(self._sum, heads, rows).add_(tile)  # not +=, which also copies the sum to itself
            else:
                part_of(self._sum, heads, (0, self._shape[2])).index_add_(2, index, tile.to(self._dtype))
            return
        if self._waiting and (same := self._waiting.get((heads, rows, index))) is not None:
            same.add_(tile)
            return
        for ((head, last_head), (row, last_row), sum_index), larger in self._waiting.items() if self._waiting else ():
            contains = head <= heads[0] and heads[1] <= last_head and row <= rows[0] <= rows[1] <= last_row
            if index is sum_index and contains:
                first = rows[0] - row
                larger[:, heads[0] - head : heads[1] - head, first : first + tile.shape[2]].add_(tile)
                return
        if everything:
            self._sum = tile if tile.dtype == self._dtype else tile.to(self._dtype)
            if self._waiting:
                self._add_waiting()
        elif 2 * sum(map(torch.Tensor.numel, (*self._waiting.values(), tile))) <= prod(self._shape):
            self._waiting[heads, rows, index] = tile.to(self._dtype)
        else:
            self.result()
            self.add(heads, rows, tile, index)

    def result(self) -> torch.Tensor:
        if self._sum is None:
            self._sum = _zeros(self._shape, self._dtype, self._device)
            self._add_waiting()
        return self._sum

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for (heads, rows, index), tile in waiting.items():
            self.add(heads, rows, tile, index)


def _zeros(
    shape_BHLD: tuple[int, ...], dtype: torch.dtype, device: torch.device, like_BHLD: torch.Tensor | None = None
) -> torch.Tensor:
    """Zeros in the memory order of ``like_BHLD``. None: the order of the gradients of torch's kernels, [B, L, H, D]."""
    order, back = memory_order((3, 1, 2, 0) if like_BHLD is None else like_BHLD.stride())
    zeros = torch.zeros([shape_BHLD[dim] for dim in order], dtype=dtype, device=device)
    return zeros.permute(back)


def apply_sink(
    out_BHLE: torch.Tensor, lse_BHL: torch.Tensor, sink_H: torch.Tensor, level_BHL: torch.Tensor | None = None
) -> torch.Tensor:
    """``out`` with one more key for each head, with the logit ``sink_H`` for every query and the value 0.

    ``sink_H`` may have a logit for each query, [B, H, L]. ``level_BHL`` was subtracted from all other logits.
    Differentiable.
    """
    # The other keys keep exp(lse) / (exp(lse) + exp(sink)) of the probability.
    kept_BHL = torch.sigmoid(lse_BHL - _sink_logit(sink_H, lse_BHL.dtype, level_BHL))
    return out_BHLE * kept_BHL.unsqueeze(-1).to(out_BHLE.dtype)


def _sink_logit(sink_H: torch.Tensor, dtype: torch.dtype, level_BHL: torch.Tensor | None) -> torch.Tensor:
    """The logit of a sink minus the level of each row, in ``dtype``, broadcastable to [B, H, L]."""
    sink = sink_H.to(dtype) if sink_H.ndim > 1 else sink_H.to(dtype)[:, None]
    return sink if level_BHL is None else (sink - level_BHL).to(dtype)


def sink_gradient(
    sink_H: torch.Tensor,
    grad_BHLE: torch.Tensor,
    out_BHLE: torch.Tensor,
    lse_BHL: torch.Tensor,
    level_BHL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the logit of a sink from the merged ``out`` and ``lse``, summed over batch and these queries: [H]."""
    # A key with value 0 and probability p has d logit = p (grad . 0 - grad . out).
    p_BHL = torch.exp(_sink_logit(sink_H, lse_BHL.dtype, level_BHL) - lse_BHL)
    # Head by head in the wide dtype: products in 16 bits would be rounded, and copies of all heads would be large.
    dots_BHL = torch.empty_like(lse_BHL)
    for dots, grad, out in zip(dots_BHL.unbind(1), grad_BHLE.unbind(1), out_BHLE.unbind(1), strict=True):
        dots.copy_((grad.to(dots.dtype) * out).sum(-1))
    return -(p_BHL * dots_BHL).sum((0, 2)).to(sink_H.dtype)
