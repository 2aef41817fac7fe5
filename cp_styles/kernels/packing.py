"""Packs: tiles of documents in one call of a kernel.

Shapes: the tensors of a pack are [B, H, T, D], where T counts the rows of all its tiles. Kernels for documents take
[B T, H, D], with N documents in each row of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from cp_styles._lib.device_copies import tensor_on

# A tile with more query rows than LONG_TILE is not packed: with 32 heads it has as many blocks of 128 queries as a GPU
# has multiprocessors. cuDNN takes no packs, and is 1.7 times as fast as flash. A tile with up to FEW_ROWS query rows of
# all heads fills half of an H100 at most, and is packed. On an H200, documents of 1,310 rows and 4 heads took 6 to 9 ms
# packed and 47 ms one by one. Other limits have not been compared.
LONG_TILE, FEW_ROWS = 1024, 64 * 128
# Maximum bytes of the copies in a pack, and of the memory that the kernel and the sums allocate in addition.
MOST_BYTES = 2**29


def bytes_of_tile(q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...], rows: int, keys: int):
    """Bytes that a tile of ``rows`` and ``keys`` adds to a pack in a backward in 16 bits, for whole tensors of these
    shapes [B, H, S, D]."""
    (batch, heads, _, dim), (_, kv_heads, _, dim_v) = q_shape, v_shape
    copies = 2 * (rows * heads * (dim + 2 * dim_v) + keys * kv_heads * (k_shape[3] + dim_v))
    # mha_varlen_bwd sums dq in float32, with 128 more rows for each document. Then dq is added in float32.
    sums = 4 * heads * ((rows + 128) * (-(-dim // 32) * 32) + rows * dim)
    return batch * (copies + sums)


@dataclass(frozen=True, eq=False)
class Pack:
    """The documents of a pack.

    Attributes:
        lengths: the number of queries of each document, and the number of keys of each document.
        bounds: the cumulative lengths over all rows of the batch, of queries and of keys: int32 [B N + 1].
    """

    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    bounds: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, lengths: tuple[tuple[int, ...], tuple[int, ...]], batch: int, device: torch.device) -> Pack:
        q_bounds, kv_bounds = (
            tensor_on(device, list(accumulate(sizes * batch, initial=0)), torch.int32) for sizes in lengths
        )
        return cls(lengths, (q_bounds, kv_bounds))

    def one_by_one(
        self, run: Callable[..., tuple[torch.Tensor, ...]], tensors: tuple[torch.Tensor, ...], query: int
    ) -> tuple[torch.Tensor, ...]:
        """Call ``run`` for each document and join the results. ``query`` is the index of the query in ``tensors``."""
        keys = (query + 1, query + 2)
        parts = [x.split(self.lengths[index in keys], 2) for index, x in enumerate(tensors)]
        return tuple([torch.cat(x, 2) for x in zip(*(run(*tile) for tile in zip(*parts, strict=True)), strict=True)])


def part_of(
    tensor: torch.Tensor, heads: tuple[int, int], rows: tuple[int, int], index: torch.Tensor | None = None
) -> torch.Tensor:
    """Some heads and rows of [B, H, L, D] or [B, H, L]: a view, or with an ``index`` of the rows a copy."""
    if heads != (0, tensor.shape[1]):
        tensor = tensor[:, heads[0] : heads[1]]
    if index is not None:
        return tensor.transpose(1, 2).index_select(1, index).transpose(1, 2)
    return tensor if rows == (0, tensor.shape[2]) else tensor[:, :, rows[0] : rows[1]]


@lru_cache(256)
def memory_order(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of a tensor in the order of memory, outermost first, and the inverse permutation."""
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    return tuple(order), tuple(map(order.index, range(len(strides))))


@lru_cache(256)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """Whether a tensor has no gaps in memory, with its dims in this order, outermost first."""
    size = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != size:
            return False
        size *= shape[dim]
    return True
