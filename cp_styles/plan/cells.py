"""The queries of one rank and the keys of one source, cut into cells by the blocks of a mask that is not a band."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask


@dataclass(frozen=True)
class Cells:
    """Cells: maximal ranges of local rows within one block of each of the mask's grids.

    Attributes:
        cover: ``[q cells, kv cells]``: 0 no pairs, 1 some pairs, 2 all pairs.
        q_edges, kv_edges: local rows at which cells start, and the end of the last one.
        needed: bool for each row of the source.
    """

    cover: torch.Tensor
    q_edges: torch.Tensor
    kv_edges: torch.Tensor
    needed: torch.Tensor


def cells(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> Cells:
    q, kv = q_layout.positions(rank, "cpu"), kv_layout.positions(source, "cpu")
    blocks = [(q // grid.block[0], kv // grid.block[1]) for grid in mask.grids]
    q_edges, kv_edges = (_edges(list(side)) for side in zip(*blocks, strict=True))
    cover = torch.full((len(q_edges) - 1, len(kv_edges) - 1), 2, device="cpu")
    for grid, (q_block, kv_block) in zip(mask.grids, blocks, strict=True):
        found = grid.cover[q_block[q_edges[:-1]]][:, kv_block[kv_edges[:-1]]]
        cover = torch.minimum(cover, found.long())
    # Intersect the cells with the band: 0 if the band has no pair of a cell, unchanged if it has all of them.
    a, b = _intervals(q_layout, kv_layout, mask, rank, source)
    cell = torch.repeat_interleave(q_edges.diff())
    empty, size = b <= a, len(kv)

    def over_cells(values: torch.Tensor, how: str) -> torch.Tensor:
        return torch.zeros(cover.shape[0], 1, dtype=torch.int64, device="cpu").scatter_reduce(
            0, cell[:, None], values[:, None], how, include_self=False
        )

    outside = (kv_edges[:-1] >= over_cells(b, "amax")) | (
        kv_edges[1:] <= over_cells(a.masked_fill(empty, size), "amin")
    )
    within = (kv_edges[:-1] >= over_cells(a.masked_fill(empty, size), "amax")) & (kv_edges[1:] <= over_cells(b, "amin"))
    some = torch.minimum(cover, torch.tensor(1, device="cpu"))
    cover = torch.where(outside, 0, some if mask.biased_everywhere else torch.where(within, cover, some))
    needed = (cover > 0).any(0).repeat_interleave(kv_edges.diff()) & _inside(a, b, size)
    return Cells(cover, q_edges, kv_edges, needed)


def _edges(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Rows at which some block number changes, and both ends."""
    rows = blocks[0].numel()
    changed = torch.zeros(rows + 1, dtype=torch.bool, device="cpu")
    changed[[0, rows]] = True
    for block in blocks:
        changed[1:-1] |= block.diff() != 0
    return torch.nonzero(changed).flatten()


def _intervals(
    q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each local query row, the half-open range of the source's local rows it attends to (empty: a == b == 0)."""
    lo, hi = mask.bounds(q_layout.positions(rank, "cpu"))
    kv_positions = kv_layout.positions(source, "cpu")
    # Local rows are sorted by position, so a range of positions is a range of local rows.
    a = torch.searchsorted(kv_positions, lo)
    b = torch.searchsorted(kv_positions, hi)
    empty = b <= a
    return a.masked_fill(empty, 0), b.masked_fill(empty, 0)


def _inside(a: torch.Tensor, b: torch.Tensor, size: int) -> torch.Tensor:
    """The union of the intervals: a boolean for each of ``size`` rows."""
    some = b > a
    depth = torch.zeros(size + 1, dtype=torch.int64, device="cpu")
    ones = torch.ones_like(a[some])
    depth.index_add_(0, a[some], ones)
    depth.index_add_(0, b[some], -ones)
    return depth.cumsum(0)[:size] > 0
