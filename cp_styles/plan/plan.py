"""What a rank computes and what it needs from whom: derived from (layouts, mask), never branched on.

A band mask (see :mod:`cp_styles.mask`) gives every query position an interval of key positions, whose ends stay or
climb by one a position over a few long pieces (:func:`~cp_styles.mask.pieces_of`). So does, piece by piece, the
interval of a source's local rows that a local query row sees: it leaves its course only where an end of the interval
comes to another chunk. A rank looks at its own pieces and at the chunks they reach, all at once, and cuts each source's
part into tiles (:mod:`cp_styles.plan.tiles`); of the others' pieces it looks at how far they reach into its own chunks,
which is what it sends. Nobody makes another rank's plan.

Masks that are no bands are planned by blocks of positions instead, see :class:`~cp_styles.mask.BlockGrid`. Forward and
backward use the same tiles. Pure: no process group, no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch

from cp_styles.cache import remembered
from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask, Pieces, pieces_of, work_from
from cp_styles.plan.cells import cells
from cp_styles.plan.rectangles import rectangles
from cp_styles.plan.tiles import Cover, Run, Stretch, Tile, runs_of, tiles_of

__all__ = ["Cover", "Part", "Plan", "Rows", "Tile", "attended_pairs", "imbalance", "make_plan"]

Rows = tuple[tuple[int, int], ...]
"""Ascending half-open ranges of a rank's local rows."""


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
    def nbytes(self) -> int:
        """About what it takes in memory: some objects a tile, and a tuple of two numbers a range of rows."""
        ranges = sum(len(part.rows) for part in self.parts) + sum(map(len, self.sends))
        return 400 * sum(len(part.tiles) for part in self.parts) + 120 * ranges + 300 * len(self.parts)

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


def _size(arguments: tuple[Any, ...], plan: Plan) -> int:
    q_layout, kv_layout, mask, *_ = arguments
    return q_layout.nbytes + kv_layout.nbytes + mask.nbytes + plan.nbytes


@remembered(_size)
def _make_plan(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, small_tiles: bool) -> Plan:
    if mask.grids:
        others = [peer for peer in range(q_layout.ranks) if peer != rank]
        parts = tuple(_block_part(q_layout, kv_layout, mask, rank, source) for source in range(q_layout.ranks))
        sends = {peer: _ranges(cells(q_layout, kv_layout, mask, peer, rank).needed) for peer in others}
    else:
        queries = _Chunks(q_layout)
        keys = queries if kv_layout == q_layout else _Chunks(kv_layout)
        pieces = pieces_of(mask, q_layout.length, kv_layout.length, queries.starts)
        holders = queries.holders(pieces.start)
        own = pieces.where(holders == rank)
        courses = _courses(own, queries.rows(torch.tensor(rank), own.start), keys)
        parts = tuple(_parts(courses, keys, biased=mask.has_bias, small_tiles=small_tiles))
        sends = _sends(pieces, holders, keys, rank)
    return Plan(rank, parts, tuple(sends.get(peer, ()) for peer in range(q_layout.ranks)))


def attended_pairs(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int) -> int:
    """Number of (query, key) pairs that ``rank`` computes: its work."""
    return int(_work(q_layout, kv_layout.length, mask)[rank])


def imbalance(layout: SequenceLayout, mask: Mask) -> float:
    """Largest over mean work of the ranks, 1.0 being perfect: how long the slowest keeps the others waiting."""
    work = _work(layout, layout.length, mask).tolist()
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0


def _work(layout: SequenceLayout, keys: int, mask: Mask) -> torch.Tensor:
    """The pairs of each rank."""
    chunks = _Chunks(layout)
    work = work_from(mask, chunks.bounds[:-1], layout.length, keys)
    return torch.zeros(layout.ranks, dtype=torch.int64).index_add_(0, chunks.holder, work)


class _Chunks:
    """A layout as tables: int64 ``[chunks]``, in the order of (rank, position)."""

    def __init__(self, layout: SequenceLayout) -> None:
        self.length, self.ranks = layout.length, layout.ranks
        edges = torch.tensor(list(chain.from_iterable(chain.from_iterable(layout.chunks))), dtype=torch.int64)
        self.starts, stops = edges.view(-1, 2).unbind(1)
        self._sizes = stops - self.starts
        self._ranks = torch.arange(self.ranks).repeat_interleave(torch.tensor([len(own) for own in layout.chunks]))
        lengths = torch.tensor(layout.lengths)
        # Rows of the rank before each chunk.
        self._rows = self._sizes.cumsum(0) - self._sizes - (lengths.cumsum(0) - lengths)[self._ranks]
        self._keys = self._key(self._ranks, self.starts)
        # In the order of positions: where chunks start, with the end of the sequence, and who holds them.
        self.bounds, order = self.starts.sort()
        self.bounds = torch.cat((self.bounds, torch.tensor([self.length])))
        self.holder = self._ranks[order]

    def _key(self, rank: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return rank * (self.length + 1) + position

    def holders(self, positions: torch.Tensor) -> torch.Tensor:
        """Who holds these positions."""
        return self.holder[torch.searchsorted(self.bounds, positions, right=True) - 1]

    def rows(self, rank: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """How many rows of a rank are at positions before these."""
        if not self.length:
            return torch.zeros_like(positions)
        chunk = (torch.searchsorted(self._keys, self._key(rank, positions), right=True) - 1).clamp(min=0)
        inside = torch.minimum(positions - self.starts[chunk], self._sizes[chunk]) + self._rows[chunk]
        return torch.where((self._ranks[chunk] == rank) & (inside > 0), inside, 0)


@dataclass(frozen=True)
class _Courses:
    """Ranges of own rows over which the interval of a source's rows that they see stays its course, and is not empty:
    int64 ``[N]``, ascending in (source, row).

    Attributes:
        source: whose rows are seen.
        row, count: the own rows.
        a, b: the interval of the first one.
        a_last, b_last: the interval of the last one.
    """

    source: torch.Tensor
    row: torch.Tensor
    count: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_last: torch.Tensor
    b_last: torch.Tensor


def _courses(own: Pieces, own_rows: torch.Tensor, keys: _Chunks) -> _Courses:
    counts = own.stop - own.start
    found = []
    # Who holds what a piece reaches: chunk by chunk, or everybody, whichever is less to look at.
    first, last = own.reach
    first, last = torch.searchsorted(keys.bounds, first, right=True) - 1, torch.searchsorted(keys.bounds, last)
    many = last - first >= keys.ranks
    piece, index = _expanded(torch.where(many, 0, first), torch.where(many, keys.ranks, last))
    found.append(
        (torch.where(many[piece], index, keys.holder[index.clamp(max=len(keys.holder) - 1)]), piece, index * 0)
    )
    # Where a bound comes to the start of a chunk, or to the end of one.
    for bound, step in ((own.lo, own.lo_step), (own.hi, own.hi_step)):
        first = torch.searchsorted(keys.bounds, bound, right=True)
        last = torch.searchsorted(keys.bounds, bound + step * (counts - 1), right=True)
        piece, index = _expanded(first, last)
        row = keys.bounds[index] - bound[piece]
        found += [
            (keys.holder[chunk[there]], piece[there], row[there])
            for chunk in (index - 1, index)
            for there in [(chunk >= 0) & (chunk < len(keys.holder))]
        ]
    source, piece, row = (torch.cat(column) for column in zip(*found, strict=True))
    rows, pieces = int(counts.max()) + 1 if len(counts) else 1, max(len(counts), 1)
    place = ((source * pieces + piece) * rows + row).unique()
    row, piece, source = place % rows, place // rows % pieces, place // (rows * pieces)
    stop = torch.where(place[1:] // rows == place[:-1] // rows, row[1:], counts[piece[:-1]])
    stop = torch.cat((stop, counts[piece[-1:]]))
    a, b, a_last, b_last = (
        keys.rows(source, bound[piece] + step[piece] * at)
        for at in (row, stop - 1)
        for bound, step in ((own.lo, own.lo_step), (own.hi, own.hi_step))
    )
    # What is empty at one end only is empty in one row, for it opens or closes by one a row.
    late, early = ((b == a) & (b_last > a_last)).long(), ((b > a) & (b_last == a_last)).long()
    some = (b > a) | (b_last > a_last)
    alone = stop - row <= 1
    rise = [torch.where(alone, 0, (end > begin).long()) for begin, end in ((a, a_last), (b, b_last))]
    columns = (
        source,
        own_rows[piece] + row + late,
        stop - row - late - early,
        a + rise[0] * late,
        b + rise[1] * late,
        a_last - rise[0] * early,
        b_last - rise[1] * early,
    )
    return _Courses(*(column[some] for column in columns))


def _parts(courses: _Courses, keys: _Chunks, *, biased: bool, small_tiles: bool) -> Iterator[Part]:
    starts, stops = _union(courses.source, courses.a, courses.b_last, keys.length)
    # From the source's local rows to their place among the rows that travel.
    line = courses.source * (keys.length + 1)
    sizes = stops - starts
    before = sizes.cumsum(0) - sizes
    sources = starts // (keys.length + 1)
    before -= before[torch.searchsorted(sources, sources)]
    index = torch.searchsorted(starts, line + courses.a, right=True) - 1
    shift = starts[index] - line - before[index]
    needed = _by_rank(starts, stops, keys.length)
    stretches = {
        source: list(entries) for source, entries in groupby(_stretches(courses, shift), lambda entry: entry[0])
    }
    for source in range(keys.ranks):
        runs: Iterator[Run] = runs_of(stretch for _, stretch in stretches.get(source, ()))
        tiles = tuple(tiles_of(runs, biased=biased, small_tiles=small_tiles))
        yield Part(source, needed.get(source, ()), tiles)


def _stretches(courses: _Courses, shift: torch.Tensor) -> Iterator[tuple[int, Stretch]]:
    """The moves from row to row, each source's own; like ones that follow each other as one."""
    a, b, a_last, b_last = (x - shift for x in (courses.a, courses.b, courses.a_last, courses.b_last))
    inner = courses.count - 1
    none = torch.zeros(min(len(inner), 1), dtype=torch.int64)
    last_row = courses.row + inner
    # After the moves inside each course comes the one to the next.
    over = torch.cat(((courses.source.diff() == 0) & (last_row[:-1] + 1 == courses.row[1:]), none.bool()))
    da, db = (torch.cat((x[1:] - y[:-1], none)) for x, y in ((a, a_last), (b, b_last)))
    over &= (da >= 0) & (da <= 1) & (db >= 0) & (db <= 1)
    moves = [
        torch.stack(pair, 1).flatten()
        for pair in (
            (inner, torch.ones_like(inner)),
            (courses.row, last_row),
            (a, a_last),
            (b, b_last),
            ((a_last > a).long(), torch.where(over, da, -1)),
            ((b_last > b).long(), torch.where(over, db, -1)),
            (courses.source, courses.source),
        )
    ]
    steps, row, a, b, da, db, source = (column[moves[0] > 0] for column in moves)
    new = (da.diff() != 0) | (db.diff() != 0) | (da[1:] < 0)
    first = torch.nonzero(torch.cat((none == 0, new))).flatten()
    total = steps.cumsum(0)
    steps = torch.diff(torch.cat((total[first] - steps[first], total[-1:])))
    for count, *stretch in zip(steps.tolist(), *(x[first].tolist() for x in (row, a, b, da, db, source)), strict=True):
        yield stretch[-1], Stretch(count, *stretch[:-1])


def _sends(pieces: Pieces, holders: torch.Tensor, keys: _Chunks, rank: int) -> dict[int, Rows]:
    """By destination, the rows of ``rank`` that its queries see."""
    first, last = (keys.rows(torch.tensor(rank), position) for position in pieces.reach)
    there = (last > first) & (holders != rank)
    return _by_rank(*_union(holders[there], first[there], last[there], keys.length), keys.length)


def _expanded(first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each i, the numbers ``first[i] .. last[i] - 1``: all the i, and all the numbers."""
    counts = (last - first).clamp(min=0)
    which = torch.arange(len(counts)).repeat_interleave(counts)
    return which, torch.arange(len(which)) - (counts.cumsum(0) - counts - first)[which]


def _union(
    rank: torch.Tensor, first: torch.Tensor, last: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The union of the ranges ``[first, last)`` of ranks' rows: ascending, apart from each other, on a line on which
    the rows of rank r begin at ``r (length + 1)``."""
    starts, order = (rank * (length + 1) + first).sort()
    reach = (rank * (length + 1) + last)[order].cummax(0).values if len(order) else starts
    apart = starts[1:] > reach[:-1]
    some = apart.new_ones(min(len(order), 1))
    return starts[torch.cat((some, apart))], reach[torch.cat((apart, some))]


def _by_rank(starts: torch.Tensor, stops: torch.Tensor, length: int) -> dict[int, Rows]:
    """What :func:`_union` gave, by rank."""
    ranks = starts // (length + 1)
    columns = (ranks, starts - ranks * (length + 1), stops - ranks * (length + 1))
    entries = zip(*(column.tolist() for column in columns), strict=True)
    return {rank: tuple((a, b) for _, a, b in own) for rank, own in groupby(entries, lambda entry: entry[0])}


def _ranges(inside: torch.Tensor) -> Rows:
    """Where ``inside`` is true, as ascending ranges."""
    inside = inside.to(torch.int8)
    edges = torch.diff(inside, prepend=inside.new_zeros(1), append=inside.new_zeros(1))
    starts, stops = torch.nonzero(edges == 1).flatten(), torch.nonzero(edges == -1).flatten()
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _block_part(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, source: int) -> Part:
    found = cells(q_layout, kv_layout, mask, rank, source)
    # Rows that do not travel leave no gap in what arrives.
    arriving = torch.cat((torch.zeros(1, dtype=torch.int64), found.needed.cumsum(0)))[found.kv_edges]
    kept = arriving.diff() > 0
    kv_edges = [0, *arriving[1:][kept].tolist()]
    regions = rectangles(found.cover[:, kept], found.q_edges.tolist(), kv_edges)
    tiles = (Tile(q, kv, Cover.FULL if full else Cover.PARTIAL) for q, kv, full in regions)
    return Part(source, _ranges(found.needed), tuple(tiles))
