"""Plans for masks with gaps: the rows of a source that a rank needs, and tiles of them.

Tiles are blocks of rows with an explicit mask. Where a mask has grids, they are cells of (rows of a rank, rows of a
source), joined to large rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import torch

from cp_styles.masks import Mask
from cp_styles.masks.algebra import make_cells
from cp_styles.plan.linear import RowRanges
from cp_styles.plan.tiles import Cover, Tile

# Smaller cells are joined with their neighbours, because a kernel call for them would be mostly overhead.
CELL = 128
# Largest rectangle with an explicit mask, in pairs, because the mask is materialized.
PAIRS = 2**20
# Pairs at which a plan looks to compare the methods of a mask. But it looks at this many queries at least.
_LOOKED_AT, _FEWEST = 2**20, 16


def refuse_contradictions(mask: Mask, q: Sequence[torch.Tensor], kv: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if ``allowed`` of a mask has a pair that its ``bounds`` or its ``needed`` leave out.

    ``q`` and ``kv`` are the positions of the queries and of the keys of each rank. All ranks look at the same queries,
    so that all raise: at all if there are 2**20 pairs at most, else at every n-th query of each rank. These have so
    many pairs, but they are 16 queries at least, and one of each rank.
    """
    parts = [part for part in mask.parts if type(part).allowed is not Mask.allowed]
    queries, keys = (sum(map(len, positions)) for positions in (q, kv))
    step = min(-(-queries * keys // _LOOKED_AT), queries // _FEWEST)
    step = max(step - 1 + step % 2, 1)  # odd, so that the queries are not all even
    for part, rows, columns in product(parts, q, kv):
        some = rows[::step]
        pairs = part.allowed(some, columns)
        left_out = {"bounds": pairs & ~Mask.allowed(part, some, columns)}
        if type(part).needed is not Mask.needed:
            left_out["needed"] = pairs & ~part.needed(rows, columns)
        for method, wrong in left_out.items():
            if wrong.any():
                *_, query, key = torch.nonzero(wrong)[0].tolist()
                name, remedy = type(part).__name__, "return True for it, or leave out the method needed"
                if method == "bounds":
                    remedy = "widen the bounds, or begin allowed with super().allowed(...) &"
                raise ValueError(
                    f"{name}.{method} leaves out the key at position {int(columns[key])}, to which the query at "
                    f"position {int(some[query])} attends by {name}.allowed. It would not be sent: {remedy}"
                )


def needed_tiles(mask: Mask, q: torch.Tensor, kv: torch.Tensor, gathers: bool) -> tuple[RowRanges, tuple[Tile, ...]]:
    """The rows of a source that a rank needs, and tiles of the rank's rows and of these received rows.

    ``q`` and ``kv`` are the positions of the rank's queries and of the source's keys. ``gathers``: one tile, whose keys
    are gathered.
    """
    needed = mask.needed(q, kv)
    if gathers:
        keys = int(needed.sum())
        return find_ranges(needed), (Tile((0, len(q)), (0, keys), Cover.SELECTED),) if keys and len(q) else ()
    tiles = _tiles_of_cells(mask, q, kv, needed) if mask.grids else _tiles_of_rows(mask, q, kv[needed])
    return find_ranges(needed), tuple(tiles)


def _tiles_of_rows(mask: Mask, q: torch.Tensor, keys: torch.Tensor) -> Iterator[Tile]:
    """Blocks of query rows, with the received rows to which any of them may attend."""
    low, high = (torch.searchsorted(keys, bound) for bound in mask.bounds(q))
    step = max(CELL, PAIRS // max(len(keys), 1))
    for row in range(0, len(low), step):
        some = high[row : row + step] > low[row : row + step]
        if some.any():
            columns = int(low[row : row + step][some].min()), int(high[row : row + step][some].max())
            yield Tile((row, min(row + step, len(low))), columns, Cover.PARTIAL)


def _tiles_of_cells(mask: Mask, q: torch.Tensor, kv: torch.Tensor, needed: torch.Tensor) -> Iterator[Tile]:
    cover, q_edges, kv_edges = make_cells(mask.grids, q, kv)
    # The range of the source's rows in the interval of each query row. Rows are sorted by position.
    first, last = (torch.searchsorted(kv, bound) for bound in mask.bounds(q))
    empty = last <= first
    last, least, first = last.masked_fill(empty, 0), first.masked_fill(empty, len(kv)), first.masked_fill(empty, 0)
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
    # A bias in full blocks too, and several bands.
    if any((part.has_bias or len(part.bands) > 1) and not part.grids for part in mask.parts):
        cover = partial
    cover = torch.where(outside, 0, torch.where(within, cover, partial))
    # Received rows are contiguous: rows that are not sent leave no gap.
    received = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), needed.cumsum(0)))[kv_edges]
    nonempty = received.diff() > 0
    return _make_tiles(cover[:, nonempty], q_edges.tolist(), [0, *received[1:][nonempty].tolist()])


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
