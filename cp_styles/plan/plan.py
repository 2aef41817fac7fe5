"""The plan of a rank: what it computes, and which rows it needs from other ranks. Derived from (layouts, mask).

A band mask (see :mod:`cp_styles.mask`) gives each query position an interval of key positions. Over a few long pieces,
each end of the interval is constant or grows by one with each position (:func:`~cp_styles.mask.pieces_of`). The same
holds for the interval of a source's local rows to which a local query row attends. It changes its slope only where an
end of the interval reaches another chunk. A rank looks at its own pieces and at the chunks that they reach, in a few
tensor operations, and cuts each source's part into tiles (:mod:`cp_styles.plan.tiles`). From the pieces of other ranks
it computes which of its own rows they need: these are the rows that it sends. No rank makes the plan of another.

In :class:`~cp_styles.layout.Stripes` of one position nothing is cut at chunks (:mod:`cp_styles.plan.holders`): from a
row to the next, an end of the interval moves by one of the source's rows, or not at all. So causal attention to a
source is one tile, a diagonal that is shifted by a row for sources above the rank. In stripes of any size, many sources
are attended to alike. These are planned once.

Masks that are not bands are planned by blocks of positions, see :class:`~cp_styles.mask.BlockGrid`. Forward and
backward use the same tiles. The functions are pure: no process group, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask, PerRow, counts_by_itself, pieces_of, refuse_shorter
from cp_styles.plan.cells import cells
from cp_styles.plan.holders import Holders, Segments, expanded, first_alike, holders_of
from cp_styles.plan.rectangles import rectangles
from cp_styles.plan.tiles import Cover, Runs, Tile, tiles_of

RowRanges = tuple[tuple[int, int], ...]
"""Ascending half-open ranges of a rank's local rows."""


@dataclass(frozen=True)
class SourcePart:
    """The part of a plan for the keys and values of one source.

    ``rows`` are the local rows of the source that the rank needs (exactly those some query attends to); ``tiles``
    index key rows *within* ``rows``, as they arrive.
    """

    source: int
    rows: RowRanges
    tiles: tuple[Tile, ...]

    @cached_property
    def count(self) -> int:
        """Number of rows needed."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Plan:
    """The plan of one rank for an attention.

    Attributes:
        rank: whose plan this is.
        parts: by source rank, its own included.
        sends: by destination rank, which of this rank's rows go there (its own entry is empty).
    """

    rank: int
    parts: tuple[SourcePart, ...]
    sends: tuple[RowRanges, ...]

    @property
    def nbytes(self) -> int:
        """Approximate size in memory: some objects for each tile, and a tuple of two numbers for each range of rows."""
        tiles = {id(part.tiles): len(part.tiles) for part in self.parts}  # sources may share them, and rows
        rows = {id(part.rows): len(part.rows) for part in self.parts}
        ranges = sum(rows.values()) + sum(map(len, self.sends))
        return 260 * sum(tiles.values()) + 110 * ranges + 100 * len(self.parts) + 600

    @property
    def received_rows(self) -> int:
        """Number of rows that this rank receives from other ranks."""
        return sum(part.count for part in self.parts if part.source != self.rank)


def make_plan(
    q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, *, small_tiles: bool = False
) -> Plan:
    """The plan of ``rank`` for queries cut by ``q_layout`` and keys cut by ``kv_layout`` under ``mask``; cached.

    With ``small_tiles``, many small tiles cost little. Short runs are then not joined into a block with an explicit
    mask, unless many of them attend to the same keys. The rows that are sent do not depend on it.
    """
    return _make_plan(q_layout, kv_layout, mask.pattern, rank, small_tiles)


@remembered
def _make_plan(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, small_tiles: bool) -> Plan:
    if mask.grids:
        others = [peer for peer in range(q_layout.ranks) if peer != rank]
        parts = tuple(_block_part(q_layout, kv_layout, mask, rank, source) for source in range(q_layout.ranks))
        sends = {peer: _ranges(cells(q_layout, kv_layout, mask, peer, rank).needed) for peer in others}
    else:
        queries, keys = holders_of(q_layout, kv_layout)
        segments = queries.segments(pieces_of(mask, q_layout.length, kv_layout.length, queries.bounds))
        own = segments.where(segments.holder == rank)
        firsts = first_alike(queries, keys, own)
        courses = _courses(own, queries.rows(rank, own.start), keys, firsts)
        parts = _parts(courses, keys, firsts, biased=mask.has_bias, small_tiles=small_tiles)
        sends = _sends(segments, keys, rank)
    return Plan(rank, parts, tuple(sends.get(peer, ()) for peer in range(q_layout.ranks)))


def attended_pairs(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int) -> int:
    """Number of (query, key) pairs that ``rank`` computes: its work.

    Queries are cut by ``q_layout``, keys by ``kv_layout``. ``mask`` says which keys each query attends to.
    """
    return int(_work(q_layout, kv_layout.length, mask)[rank])


def imbalance(layout: SequenceLayout, mask: Mask) -> float:
    """The work of the busiest rank over the mean work of all ranks. 1.0 is perfect balance. No communication.

    Args:
        layout: the layout of queries and keys.
        mask: which keys each query attends to. A :class:`~cp_styles.PerRow` counts the work of all rows together.

    Raises:
        ValueError: the mask is for a shorter sequence.

    Example::

        assert imbalance(head_tail(1024, 4), Causal()) == 1.0
        assert imbalance(contiguous(1024, 4), Causal()) > 1.7
    """
    work = _work(layout, layout.length, mask).tolist()
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0


def _work(layout: SequenceLayout, keys: int, mask: Mask) -> torch.Tensor:
    """The pairs of each rank."""
    refuse_shorter(mask, layout.length)
    if isinstance(mask, PerRow):
        return torch.stack([_work(layout, keys, row) for row in mask.masks]).sum(0)
    queries, _ = holders_of(layout, layout)
    if counts_by_itself(mask):
        positions = torch.arange(layout.length, device="cpu")
        holder, work = queries.holder(queries.chunk(positions)), mask.work(positions, keys)
    else:
        segments = queries.segments(pieces_of(mask, layout.length, keys, queries.bounds))
        holder, work = segments.holder, segments.work
    return torch.zeros(layout.ranks, dtype=torch.int64, device="cpu").index_add_(0, holder, work)


class _Courses(NamedTuple):
    """Ranges of own rows over which the interval of a source's rows that they attend to is linear and not empty.

    int64, ascending in (source, row).

    Attributes:
        source: the rank whose rows are attended to: ``[N]``.
        row, count: the first of the own rows, and their number: ``[N]``.
        first: the interval of the first row: ``[2, N]``.
        last: the interval of the last row: ``[2, N]``.
    """

    source: torch.Tensor
    row: torch.Tensor
    count: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def _courses(own: Segments, own_rows: torch.Tensor, keys: Holders, firsts: torch.Tensor) -> _Courses:
    number, counts = len(own.start), own.count
    bound, end = own.ends
    step = torch.stack((own.lo_step, own.hi_step))
    first, last = keys.chunk(bound), keys.chunk(end)
    crossing, row, before, after = keys.crossings(bound.flatten(), first.flatten(), last.flatten())
    crossing = crossing % max(number, 1)
    # The ranks that hold keys which a segment reaches: those of its chunks, or all ranks if there are fewer ranks. Of
    # ranks that are attended to alike, the first.
    first, last = first[0], last[1] + 1
    many = last - first >= keys.ranks
    piece, index = expanded(torch.where(many, 0, first), torch.where(many, len(firsts), last))
    source = torch.where(many[piece], firsts[index % len(firsts)], keys.holder(index))
    source = firsts[torch.searchsorted(firsts, source, right=True) - 1]
    # Rows of segments at which the interval of a source may change its slope: the first row, and rows at which a bound
    # reaches another chunk.
    rows = int(counts.max()) + 1 if number else 1
    line = torch.cat((source, before, after)) * number
    line += torch.cat((piece, crossing, crossing))
    place = (line * rows + torch.cat((torch.zeros_like(piece), row, row))).unique()
    line, row = place // rows, place % rows
    source, piece = line // max(number, 1), line % max(number, 1)
    stop = counts[piece]
    stop[:-1] = torch.where(line.diff() == 0, row[1:], stop[:-1])
    ends = torch.stack((row, stop - 1))
    found = keys.rows(source, bound[:, None, piece] + step[:, None, piece] * ends)
    # An interval that is empty at one end only is empty in one row there, because its size changes by one a row.
    filled = found[0] < found[1]
    some = torch.nonzero(filled.any(0)).flatten()
    first, last = found[:, :, some].unbind(1)
    late, early = (~filled[:, some]).long()
    rise = last > first
    table = torch.stack((source, own_rows[piece] + row, stop - row))[:, some]
    return _Courses(table[0], table[1] + late, table[2] - late - early, first + rise * late, last - rise * early)


def _parts(
    courses: _Courses, keys: Holders, firsts: torch.Tensor, *, biased: bool, small_tiles: bool
) -> tuple[SourcePart, ...]:
    starts, stops = _union(courses.source, courses.first[0], courses.last[1], keys.length)
    # The offset from the source's local rows to their index among the rows that are sent.
    line = courses.source * (keys.length + 1)
    sizes = stops - starts
    before = sizes.cumsum(0) - sizes
    sources = starts // (keys.length + 1)
    before -= before[torch.searchsorted(sources, sources)]
    index = torch.searchsorted(starts, line + courses.first[0], right=True) - 1
    shift = (starts - before)[index] - line
    needed = _by_rank(starts, stops, keys.length)
    runs, sizes = _runs(courses._replace(first=courses.first - shift, last=courses.last - shift), keys.ranks)
    tiles = list(tiles_of(runs, sizes, biased=biased, small_tiles=small_tiles))
    planned = pairwise((*firsts.tolist(), keys.ranks))
    return tuple(
        SourcePart(source, needed.get(first, ()), tiles[first])
        for first, end in planned
        for source in range(first, end)
    )


def _runs(courses: _Courses, ranks: int) -> tuple[Runs, list[int]]:
    """Runs of rows, as long as possible, ascending in (source, row), and the number of runs of each source.

    A row between two runs belongs to the first one. A run has at least one row.
    """
    source, row, count, first, last = courses
    ones = torch.ones_like(row)
    # Steps from row to row: those inside each course, and the one from its last row to the next course. A step that is
    # not linear is -1.
    over = first[:, 1:] - last[:, :-1]
    on = ((over == 0) | (over == 1)).all(0) & (source.diff() == 0) & ((row + count)[:-1] == row[1:])
    out = torch.full_like(first, -1)
    out[:, :-1] = torch.where(on, over, -1)
    inner = torch.cat((torch.stack((count - 1, row, source)), first, (last > first).long()))
    moves = torch.stack((inner, torch.cat((torch.stack((ones, row + count - 1, source)), last, out))), 2).flatten(1)
    moves = moves[:, torch.nonzero(moves[0]).flatten()]
    # Join consecutive equal steps.
    rise = moves[5:]
    new = (rise.diff() != 0).any(0) | (rise[0, 1:] < 0)
    begin = torch.nonzero(torch.cat((ones[:1] > 0, new))).flatten()
    stop = moves[0].cumsum(0)
    steps = torch.cat(((stop - moves[0])[begin], stop[-1:])).diff()
    _, row, source, a, b, da, db = moves[:, begin]
    # In a sequence of single steps, every second one belongs to a run, and the others lead to the next run. Count from
    # the last step that is not single. A row is not in a run yet if the step before it is not linear.
    index = torch.arange(len(steps), device="cpu")
    other = da < 0
    single = (steps == 1) & ~other
    before = torch.cat((-ones[:1], torch.where(single, -1, index).cummax(0).values[:-1])) if len(steps) else index
    free = other[before] ^ ((index - before) % 2 == 0)
    taken = torch.nonzero(free | ~(other | single)).flatten()
    skipped = (~free).long()
    da, db = da.clamp(min=0), db.clamp(min=0)
    stop = row + torch.where(other, 1, steps + 1)
    table = torch.stack((source, row + skipped, stop, a + da * skipped, torch.addcmul(b, db, steps), da, db))[:, taken]
    return Runs(*table[1:].tolist()), table[0].bincount(minlength=ranks).tolist()


def _sends(segments: Segments, keys: Holders, rank: int) -> dict[int, RowRanges]:
    """For each destination, the rows of ``rank`` that its queries attend to."""
    first, last = keys.attended(rank, segments)
    there = torch.nonzero((last > first) & (segments.holder != rank)).flatten()
    return _by_rank(*_union(segments.holder[there], first[there], last[there], keys.length), keys.length)


def _union(
    rank: torch.Tensor, first: torch.Tensor, last: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The union of the ranges ``[first, last)`` of the ranks' rows, as ascending ranges that do not touch.

    They are on one line, on which the rows of rank r begin at ``r (length + 1)``.
    """
    starts, order = (rank * (length + 1) + first).sort()
    reach = (rank * (length + 1) + last)[order].cummax(0).values if len(order) else starts
    apart = starts[1:] > reach[:-1]
    some = apart.new_ones(min(len(order), 1))
    return starts[torch.cat((some, apart))], reach[torch.cat((apart, some))]


def _by_rank(starts: torch.Tensor, stops: torch.Tensor, length: int) -> dict[int, RowRanges]:
    """The result of :func:`_union`, split by rank."""
    ranks = starts // (length + 1)
    ranges = map(tuple, (torch.stack((starts, stops), 1) - (ranks * (length + 1))[:, None]).tolist())
    return {rank: tuple(islice(ranges, size)) for rank, size in enumerate(ranks.bincount().tolist()) if size}


def _ranges(inside: torch.Tensor) -> RowRanges:
    """Where ``inside`` is true, as ascending ranges."""
    inside = inside.to(torch.int8)
    edges = torch.diff(inside, prepend=inside.new_zeros(1), append=inside.new_zeros(1))
    starts, stops = torch.nonzero(edges == 1).flatten(), torch.nonzero(edges == -1).flatten()
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _block_part(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> SourcePart:
    found = cells(q_layout, kv_layout, mask, rank, source)
    # Received rows are contiguous: rows that are not sent leave no gap.
    arriving = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), found.needed.cumsum(0)))[found.kv_edges]
    kept = arriving.diff() > 0
    kv_edges = [0, *arriving[1:][kept].tolist()]
    regions = rectangles(found.cover[:, kept], found.q_edges.tolist(), kv_edges)
    tiles = (Tile(q, kv, Cover.FULL if full else Cover.PARTIAL) for q, kv, full in regions)
    return SourcePart(source, _ranges(found.needed), tuple(tiles))
