"""What a rank computes and what it needs from whom: derived from (layouts, mask), never branched on.

For one rank's queries and one source's keys, a band mask (see :mod:`cp_styles.mask`) leaves an interval
``[a_i, b_i)`` of the source's local rows for each local query row ``i``. Where ``a`` and ``b`` stay, the attended
region is a rectangle; where ``b`` climbs by one a row, it is a rectangle and a causal triangle; everything else is cut
into small blocks with an explicit mask. Head-tail's three cases, contiguous, striped, documents and windows all
fall out of that one walk. Masks that are no bands are planned by blocks of positions instead, see
:class:`~cp_styles.mask.BlockGrid`. Forward and backward use the same tiles. Pure: no process group, no device.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask
from cp_styles.rectangles import rectangles

Rows = tuple[tuple[int, int], ...]
"""Ascending half-open ranges of a rank's local rows."""

# Query rows of a block with an explicit mask. Small enough that what the block computes in vain stays small, large
# enough that a kernel call is not mostly overhead.
_BLOCK = 128
# Runs of fewer rows than this join their neighbours into one block with an explicit mask.
_SHORT = 32


class Cover(enum.Enum):
    """How a tile's queries see its keys."""

    FULL = "full"
    CAUSAL = "causal"  # square; row i sees keys 0 .. i
    PARTIAL = "partial"  # an explicit mask


@dataclass(frozen=True)
class Tile:
    """One kernel call: local query rows x rows of what came from one source."""

    q: tuple[int, int]
    kv: tuple[int, int]
    cover: Cover


@dataclass(frozen=True)
class Part:
    """What one rank does with one source's keys and values.

    ``rows`` are the local rows of the source that the rank needs (exactly those some query attends to); ``tiles``
    index key rows *within* ``rows``, as they arrive.
    """

    source: int
    rows: Rows
    tiles: tuple[Tile, ...]

    @property
    def count(self) -> int:
        """Number of rows needed."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Plan:
    """A rank's share of an attention.

    Attributes:
        rank: whose plan this is.
        parts: by source rank, its own included.
        sends: by destination rank, which of this rank's rows go there (its own entry is empty).
    """

    rank: int
    parts: tuple[Part, ...]
    sends: tuple[Rows, ...]

    @property
    def received_rows(self) -> int:
        """Rows that come from other ranks: what the wire carries to this rank."""
        return sum(part.count for part in self.parts if part.source != self.rank)


def make_plan(
    q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, *, small_tiles: bool = False
) -> Plan:
    """The plan of ``rank`` for queries cut by ``q_layout`` and keys cut by ``kv_layout`` under ``mask``; cached.

    ``small_tiles`` says that many small tiles cost little: short runs then stay what they are, rather than join into a
    block with an explicit mask, unless they see the same keys many times over. What travels is the same.
    """
    return _make_plan(q_layout, kv_layout, mask.pattern, rank, small_tiles)


@lru_cache(maxsize=1024)
def _make_plan(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, small_tiles: bool) -> Plan:
    ranks = q_layout.ranks
    parts = tuple(_part(q_layout, kv_layout, mask, rank, source, small_tiles) for source in range(ranks))
    sends = tuple(() if peer == rank else _rows(q_layout, kv_layout, mask, peer, rank) for peer in range(ranks))
    return Plan(rank, parts, sends)


def attended_pairs(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int) -> int:
    """Number of (query, key) pairs that ``rank`` computes: its work."""
    return int(mask.work(q_layout.positions(rank), kv_layout.length).sum())


def imbalance(layout: SequenceLayout, mask: Mask) -> float:
    """Largest over mean work of the ranks, 1.0 being perfect: how long the slowest keeps the others waiting."""
    work = [attended_pairs(layout, layout, mask, rank) for rank in range(layout.ranks)]
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0


def _intervals(
    q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per local query row, the half-open interval of the source's local rows it attends to (empty: a == b == 0)."""
    lo, hi = mask.bounds(q_layout.positions(rank))
    kv_positions = kv_layout.positions(source)
    # Local rows ascend in position, so an interval of positions is an interval of local rows.
    a = torch.searchsorted(kv_positions, lo)
    b = torch.searchsorted(kv_positions, hi)
    empty = b <= a
    return a.masked_fill(empty, 0), b.masked_fill(empty, 0)


def _inside(a: torch.Tensor, b: torch.Tensor, size: int) -> torch.Tensor:
    """The union of the intervals: a boolean for each of ``size`` rows."""
    some = b > a
    depth = torch.zeros(size + 1, dtype=torch.int64)
    ones = torch.ones_like(a[some])
    depth.index_add_(0, a[some], ones)
    depth.index_add_(0, b[some], -ones)
    return depth.cumsum(0)[:size] > 0


def _ranges(inside: torch.Tensor) -> Rows:
    """Where ``inside`` is true, as ascending ranges."""
    inside = inside.to(torch.int8)
    edges = torch.diff(inside, prepend=inside.new_zeros(1), append=inside.new_zeros(1))
    starts, stops = torch.nonzero(edges == 1).flatten(), torch.nonzero(edges == -1).flatten()
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _rows(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> Rows:
    """The rows of the source that the rank needs."""
    if mask.grids:
        return _ranges(_cells(q_layout, kv_layout, mask, rank, source).needed)
    a, b = _intervals(q_layout, kv_layout, mask, rank, source)
    return _ranges(_inside(a, b, kv_layout.lengths[source]))


@dataclass(frozen=True)
class _Cells:
    """One rank's queries and one source's keys, cut where they pass from one block of the mask's grids to another.

    Attributes:
        cover: ``[q cells, kv cells]``: 0 nothing, 1 some pairs, 2 all pairs.
        q_edges, kv_edges: local rows where cells start, and where the last one ends.
        needed: bool a row of the source.
    """

    cover: torch.Tensor
    q_edges: torch.Tensor
    kv_edges: torch.Tensor
    needed: torch.Tensor


def _cells(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> _Cells:
    q, kv = q_layout.positions(rank), kv_layout.positions(source)
    blocks = [(q // grid.block[0], kv // grid.block[1]) for grid in mask.grids]
    q_edges, kv_edges = (_edges(list(side)) for side in zip(*blocks, strict=True))
    cover = torch.full((len(q_edges) - 1, len(kv_edges) - 1), 2)
    for grid, (q_block, kv_block) in zip(mask.grids, blocks, strict=True):
        found = grid.cover[q_block[q_edges[:-1]]][:, kv_block[kv_edges[:-1]]]
        cover = torch.minimum(cover, found.long())
    # What the band leaves of the cells: nothing where it passes all rows of one by, all where it holds all of them.
    a, b = _intervals(q_layout, kv_layout, mask, rank, source)
    cell = torch.repeat_interleave(q_edges.diff())
    empty, size = b <= a, len(kv)

    def over_cells(values: torch.Tensor, how: str) -> torch.Tensor:
        return torch.zeros(cover.shape[0], 1, dtype=torch.int64).scatter_reduce(
            0, cell[:, None], values[:, None], how, include_self=False
        )

    outside = (kv_edges[:-1] >= over_cells(b, "amax")) | (
        kv_edges[1:] <= over_cells(a.masked_fill(empty, size), "amin")
    )
    within = (kv_edges[:-1] >= over_cells(a.masked_fill(empty, size), "amax")) & (kv_edges[1:] <= over_cells(b, "amin"))
    some = torch.minimum(cover, torch.tensor(1))
    cover = torch.where(outside, 0, some if mask.biased_everywhere else torch.where(within, cover, some))
    needed = (cover > 0).any(0).repeat_interleave(kv_edges.diff()) & _inside(a, b, size)
    return _Cells(cover, q_edges, kv_edges, needed)


def _edges(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Rows before which some of the block numbers change, with both ends."""
    rows = blocks[0].numel()
    changed = torch.zeros(rows + 1, dtype=torch.bool)
    changed[[0, rows]] = True
    for block in blocks:
        changed[1:-1] |= block.diff() != 0
    return torch.nonzero(changed).flatten()


def _block_part(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> Part:
    cells = _cells(q_layout, kv_layout, mask, rank, source)
    # Rows that do not travel leave no gap in what arrives.
    arriving = torch.cat((torch.zeros(1, dtype=torch.int64), cells.needed.cumsum(0)))[cells.kv_edges]
    kept = arriving.diff() > 0
    kv_edges = [0, *arriving[1:][kept].tolist()]
    found = rectangles(cells.cover[:, kept], cells.q_edges.tolist(), kv_edges)
    tiles = (Tile(q, kv, Cover.FULL if full else Cover.PARTIAL) for q, kv, full in found)
    return Part(source, _ranges(cells.needed), tuple(tiles))


def _part(
    q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int, small_tiles: bool
) -> Part:
    if mask.grids:
        return _block_part(q_layout, kv_layout, mask, rank, source)
    a, b = _intervals(q_layout, kv_layout, mask, rank, source)
    rows = _ranges(_inside(a, b, kv_layout.lengths[source]))
    if not rows:
        return Part(source, (), ())
    # From the source's local rows to their place among the rows that travel.
    starts, stops = (torch.tensor(side) for side in zip(*rows, strict=True))
    before = torch.cumsum(stops - starts, 0) - (stops - starts)
    index = torch.searchsorted(starts, a, right=True).sub_(1).clamp_(min=0)
    shift = torch.where(b > a, starts[index] - before[index], 0)
    tiles = _tiles(a - shift, b - shift, mask.has_bias, small_tiles)
    return Part(source, rows, tuple(tiles))


def _tiles(a: torch.Tensor, b: torch.Tensor, biased: bool, small_tiles: bool) -> Iterator[Tile]:
    """Cut the region {(i, j): a_i <= j < b_i} into tiles, each attended pair in exactly one."""
    for group in _groups(a, b):
        for runs in _apart(a, b, group) if small_tiles and not biased else [group]:
            yield from _group_tiles(a, b, runs, biased)


def _groups(a: torch.Tensor, b: torch.Tensor) -> Iterator[list[tuple[int, int]]]:
    """Runs, short ones with their neighbours."""
    group: list[tuple[int, int]] = []
    for start, stop in _runs(a, b):
        short = stop - start < _SHORT
        if group and not (short and stop - group[0][0] <= _BLOCK):
            yield group
            group = []
        group.append((start, stop))
        if not short:
            yield group
            group = []
    if group:
        yield group


def _apart(a: torch.Tensor, b: torch.Tensor, group: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The group cut into tiles without a mask, where they have few more keys than one tile for all: at most twice.

    Documents share none; stripes and windows share most, and each tile comes with a copy of its keys.
    """
    runs: list[tuple[int, int]] = []
    for start, stop in group:
        climbs = int(a[start]) != int(a[stop - 1])  # as it does from document to document of one row
        runs += [(row, row + 1) for row in range(start, stop)] if climbs and stop - start < _SHORT else [(start, stop)]
    low, high = a[[start for start, _ in runs]], b[[stop - 1 for _, stop in runs]]
    return [[run] for run in runs] if int((high - low).sum()) <= 2 * int(high.max() - low.min()) else [group]


def _runs(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Maximal ranges of non-empty rows whose bounds move by a constant step, 0 or 1 each."""
    rows = a.numel()
    filled = b > a
    da, db = a.diff(), b.diff()
    lawful = (da >= 0) & (da <= 1) & (db >= 0) & (db <= 1) & filled[1:] & filled[:-1]
    # step[i] is the move from row i to i + 1; -1 where no run may go on.
    step = torch.where(lawful, da * 2 + db, -1)
    changes = torch.nonzero((step[1:] != step[:-1]) | (step[1:] < 0)).flatten() + 1
    start = 0
    # Rows after which a run may end. The first step of a run is what defines it, so it never ends there.
    for last in [*([0] if rows > 1 and int(step[0]) < 0 else []), *changes.tolist(), rows - 1]:
        if last < start or (last == start and last < rows - 1 and int(step[last]) >= 0):
            continue
        if bool(filled[start]):
            yield start, last + 1
        start = last + 1


def _group_tiles(a: torch.Tensor, b: torch.Tensor, group: list[tuple[int, int]], biased: bool) -> Iterator[Tile]:
    """Tiles of one run, or of several short ones as one block."""
    start, stop = group[0][0], group[-1][1]
    (a_first, b_first), (a_last, b_last) = ((int(a[row]), int(b[row])) for row in (start, stop - 1))
    if biased or len(group) > 1 or a_first != a_last:
        yield from _explicit(a, b, start, stop)
    elif b_first == b_last:
        yield Tile((start, stop), (a_first, b_first), Cover.FULL)
    else:  # b climbs by one a row: the causal triangle ends at b_last, a rectangle stands before it
        if b_first - 1 > a_first:
            yield Tile((start, stop), (a_first, b_first - 1), Cover.FULL)
        yield Tile((start, stop), (b_first - 1, b_last), Cover.CAUSAL)


def _explicit(a: torch.Tensor, b: torch.Tensor, start: int, stop: int) -> Iterator[Tile]:
    """Blocks of rows with an explicit mask over the union of what their rows attend to."""
    for first in range(start, stop, _BLOCK):
        rows = slice(first, min(first + _BLOCK, stop))
        filled = b[rows] > a[rows]
        if bool(filled.any()):
            low, high = int(a[rows][filled].min()), int(b[rows].max())
            yield Tile((rows.start, rows.stop), (low, high), Cover.PARTIAL)
