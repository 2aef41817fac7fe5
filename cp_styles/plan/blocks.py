"""Tiles for masks that are not bands: cells of (rows of a rank, rows of a source), joined to large rectangles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask
from cp_styles.plan.linear import RowRanges
from cp_styles.plan.tiles import Cover, Tile

# Smaller cells are joined with their neighbours, because a kernel call for them would be mostly overhead.
CELL = 128
# Largest rectangle with an explicit mask, in pairs, because the mask is materialized.
PAIRS = 2**20


class Cells(NamedTuple):
    """Cells: maximal ranges of local rows within one block of each of the mask's grids.

    Attributes:
        cover: ``[q cells, kv cells]``: 0 no pairs, 1 some pairs, 2 all pairs.
        q_edges, kv_edges: local rows at which cells start, and the end of the last cell.
        needed: bool for each row of the source.
    """

    cover: torch.Tensor
    q_edges: torch.Tensor
    kv_edges: torch.Tensor
    needed: torch.Tensor


def block_tiles(
    q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int
) -> tuple[RowRanges, tuple[Tile, ...]]:
    """The rows of ``source`` that ``rank`` needs, and tiles of the rank's rows and of these received rows."""
    cover, q_edges, kv_edges, needed = _make_cells(q_layout, kv_layout, mask, rank, source)
    # Received rows are contiguous: rows that are not sent leave no gap.
    received = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), needed.cumsum(0)))[kv_edges]
    nonempty = received.diff() > 0
    tiles = _make_tiles(cover[:, nonempty], q_edges.tolist(), [0, *received[1:][nonempty].tolist()])
    return find_ranges(needed), tuple(tiles)


def needed_rows(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> RowRanges:
    """The rows of ``source`` that ``rank`` needs."""
    return find_ranges(_make_cells(q_layout, kv_layout, mask, rank, source).needed)


def _make_cells(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> Cells:
    q, kv = q_layout.positions(rank, "cpu"), kv_layout.positions(source, "cpu")
    blocks = [(q // grid.block[0], kv // grid.block[1]) for grid in mask.grids]
    q_edges, kv_edges = (_find_edges(list(side)) for side in zip(*blocks, strict=True))
    cover = torch.full((len(q_edges) - 1, len(kv_edges) - 1), 2, device="cpu")
    for grid, (q_block, kv_block) in zip(mask.grids, blocks, strict=True):
        cover = torch.minimum(cover, grid.cover[q_block[q_edges[:-1]]][:, kv_block[kv_edges[:-1]]].long())
    # The range of the source's rows in the interval of each query row. Rows are sorted by position.
    first, last = (torch.searchsorted(kv, bound) for bound in mask.bounds(q))
    empty, size = last <= first, len(kv)
    last = last.masked_fill(empty, 0)
    least, first = first.masked_fill(empty, size), first.masked_fill(empty, 0)
    # Intersect the cells with the band: 0 if the band has no pair of a cell, unchanged if it has all pairs.
    index = torch.repeat_interleave(q_edges.diff())

    def reduce_by_cell(values: torch.Tensor, reduction: str) -> torch.Tensor:
        return torch.zeros(cover.shape[0], 1, dtype=torch.int64, device="cpu").scatter_reduce(
            0, index[:, None], values[:, None], reduction, include_self=False
        )

    starts, stops = kv_edges[:-1], kv_edges[1:]
    outside = (starts >= reduce_by_cell(last, "amax")) | (stops <= reduce_by_cell(least, "amin"))
    within = (starts >= reduce_by_cell(least, "amax")) & (stops <= reduce_by_cell(last, "amin"))
    partial = torch.minimum(cover, torch.tensor(1, device="cpu"))
    cover = torch.where(outside, 0, partial if mask.biased_everywhere else torch.where(within, cover, partial))
    # A row is in some interval if more intervals have begun than ended.
    depth = torch.zeros(size + 1, dtype=torch.int64, device="cpu")
    depth.index_add_(0, first, torch.ones_like(first)).index_add_(0, last, -torch.ones_like(last))
    needed = (cover > 0).any(0).repeat_interleave(kv_edges.diff()) & (depth.cumsum(0)[:size] > 0)
    return Cells(cover, q_edges, kv_edges, needed)


def _find_edges(blocks: list[torch.Tensor]) -> torch.Tensor:
    """The rows at which a block number changes, and both ends."""
    rows = blocks[0].numel()
    changed = torch.zeros(rows + 1, dtype=torch.bool, device="cpu")
    changed[[0, rows]] = True
    for block in blocks:
        changed[1:-1] |= block.diff() != 0
    return torch.nonzero(changed).flatten()


def find_ranges(inside: torch.Tensor) -> RowRanges:
    """The ascending ranges in which ``inside`` is true."""
    edges = torch.nonzero(torch.nn.functional.pad(inside.to(torch.int8), (1, 1)).diff()).flatten().tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _make_tiles(cover: torch.Tensor, q_edges: list[int], kv_edges: list[int]) -> Iterator[Tile]:
    """Rectangles that cover each nonzero cell of ``cover`` once."""
    cover, q_edges = _join_small_cells(cover, q_edges)
    transposed, kv_edges = _join_small_cells(cover.T, kv_edges)
    by_columns = [(rows, columns, state) for columns, rows, state in _rectangles(transposed)]
    for (i, i_end), (j, j_end), state in min(_rectangles(transposed.T), by_columns, key=len):
        keys, (start, stop) = (kv_edges[j], kv_edges[j_end]), (q_edges[i], q_edges[i_end])
        if state == 2:  # no mask, so any size
            yield Tile((start, stop), keys, Cover.FULL)
            continue
        step = max(CELL, PAIRS // (keys[1] - keys[0]))
        for row in range(start, stop, step):
            yield Tile((row, min(row + step, stop)), keys, Cover.PARTIAL)


def _rectangles(cover: torch.Tensor) -> list[tuple[tuple[int, int], tuple[int, int], int]]:
    """Join runs of equal state in a row of cells with equal runs in the rows below: (rows, columns, state)."""
    done, growing = [], {}
    for i, row in enumerate([*cover.tolist(), []]):
        cuts = [0, *(j for j in range(1, len(row)) if row[j] != row[j - 1]), len(row)]
        runs = {(j, stop, row[j]) for j, stop in pairwise(cuts) if stop > j and row[j]}
        for run in [run for run in growing if run not in runs]:
            done.append(((growing.pop(run), i), run[:2], run[2]))
        for run in runs:
            growing.setdefault(run, i)
    return sorted(done)


def _join_small_cells(cover: torch.Tensor, edges: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Join small neighbouring cells of the first dim. Cells with different states get the state 1."""
    first = [0]
    for index in range(1, len(edges) - 1):
        if edges[index + 1] - edges[first[-1]] > CELL:
            first.append(index)
    if len(first) == cover.shape[0] or not cover.numel():
        return cover, edges
    group = torch.zeros(cover.shape[0], dtype=torch.int64, device="cpu")
    group[first[1:]] = 1
    index = group.cumsum(0)[:, None].expand(cover.shape)
    shape = (len(first), cover.shape[1])
    least, most = (
        torch.full(shape, value, device="cpu").scatter_reduce(0, index, cover.long(), how)
        for value, how in ((2, "amin"), (0, "amax"))
    )
    return torch.where(least == most, least, 1), [*(edges[start] for start in first), edges[-1]]
