"""The merge of a tile in one kernel of Triton. merge.py imports this module only to run it."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

# The numbers that a program computes: 16 for each thread, which loads 16 bytes at a time. Not tuned on a GPU.
_NUMBERS = 2048
_MOST_COLUMNS = 256


@triton.jit(do_not_specialize=["heads", "rows", "lse_b", "lse_h", "new_lse_b", "new_lse_h"])
def _merge(
    out,
    lse,
    new_out,
    new_lse,
    index,
    heads,
    rows,
    out_b,
    out_h,
    out_l,
    out_e,
    lse_b,
    lse_h,
    lse_l,
    new_out_b,
    new_out_h,
    new_out_l,
    new_out_e,
    new_lse_b,
    new_lse_h,
    new_lse_l,
    DIM: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge ``BLOCK`` rows of one batch entry, counted over heads and rows in memory order."""
    blocks = (heads * rows + BLOCK - 1) // BLOCK
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = number < heads * rows
    # Offsets may be beyond 2^31.
    if HEADS_FIRST:
        head, new_row = (number // rows).to(tl.int64), (number % rows).to(tl.int64)
    else:
        head, new_row = (number % heads).to(tl.int64), (number // heads).to(tl.int64)
    row = new_row
    if index is not None:
        row = tl.load(index + new_row, mask=inside, other=0)

    lse += batch * lse_b + head * lse_h + row * lse_l
    new_lse += batch * new_lse_b + head * new_lse_h + new_row * new_lse_l
    old, new = tl.load(lse, mask=inside, other=0.0), tl.load(new_lse, mask=inside, other=0.0).to(tl.float32)
    # The difference of equal infinities is NaN.
    difference = tl.where(old == new, 0.0, new - old)
    ratio = tl.exp(-tl.abs(difference))  # of the smaller probability to the larger one: it does not overflow
    larger, smaller = 1.0 / (1.0 + ratio), ratio / (1.0 + ratio)
    weight = tl.where(difference >= 0, smaller, larger)[:, None]
    new_weight = tl.where(difference >= 0, larger, smaller)[:, None]
    tl.store(lse, tl.maximum(old, new) + tl.log(1.0 + ratio), mask=inside)

    out += (batch * out_b + head * out_h + row * out_l)[:, None]
    new_out += (batch * new_out_b + head * new_out_h + new_row * new_out_l)[:, None]
    for first in range(0, DIM, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        there = inside[:, None] & (column < DIM)
        values = tl.load(out + column * out_e, mask=there, other=0.0)
        new_values = tl.load(new_out + column * new_out_e, mask=there, other=0.0).to(tl.float32)
        tl.store(out + column * out_e, values * weight + new_values * new_weight, mask=there)


def merge_rows(
    out_BHLE: torch.Tensor,
    lse_BHL: torch.Tensor,
    new_out_BHLE: torch.Tensor,
    new_lse_BHL: torch.Tensor,
    index: torch.Tensor | None = None,
) -> None:
    """Merge a tile into ``out`` and ``lse``, float32, in place. No communication, and the host does not wait.

    Args:
        out_BHLE: the merged output so far, with any strides.
        lse_BHL: its logsumexp.
        new_out_BHLE: the output of the tile: float16, bfloat16 or float32, with any strides.
        new_lse_BHL: its logsumexp.
        index: the row of ``out`` for each row of the tile, each row once. None: the rows are the same.
    """
    batch, heads, rows, dim = new_out_BHLE.shape
    columns = min(1 << (dim - 1).bit_length(), _MOST_COLUMNS)
    block = _NUMBERS // columns
    with torch.cuda.device_of(out_BHLE):  # Triton starts kernels on the current device
        cast(Any, _merge)[(batch * -(-heads * rows // block),)](  # its types, where Triton is there, are of a program
            out_BHLE,
            lse_BHL,
            new_out_BHLE,
            new_lse_BHL,
            None if index is None else index.contiguous(),
            heads,
            rows,
            *out_BHLE.stride(),
            *lse_BHL.stride(),
            *new_out_BHLE.stride(),
            *new_lse_BHL.stride(),
            DIM=dim,
            HEADS_FIRST=out_BHLE.stride(1) > out_BHLE.stride(2),
            BLOCK=block,
            COLUMNS=columns,
        )
