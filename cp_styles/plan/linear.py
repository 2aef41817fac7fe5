"""Band masks in the coordinates of ranks: which rank holds a position, and which rows attend to which rows.

All ranges are one record, :class:`~cp_styles.masks.linear_pieces.Pieces`, in tables that a plan looks up and cuts in a
few operations.
"""

from __future__ import annotations

from array import array
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles.layouts import SequenceLayout
from cp_styles.layouts.layout import Stripes
from cp_styles.masks.linear_pieces import Pieces

RowRanges: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending half-open ranges of a rank's local rows."""


class Crossings(NamedTuple):
    """The places where an end of an interval reaches the start of another chunk: int64 ``[N]``.

    Attributes:
        end: the index of the end.
        query: the query at which it reaches the chunk, counted from the first query of the piece.
        before, after: the ranks that hold the previous chunk, and the chunk that is reached.
    """

    end: torch.Tensor
    query: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


class Chunks:
    """A layout as tables of its chunks.

    Attributes:
        length: length of the sequence.
        ranks: number of ranks.
        starts: start positions of the chunks, ascending, and the end of the sequence: int64 ``[chunks + 1]``.
        block: the size of a chunk, if the layout is :class:`Stripes`; otherwise 0.
    """

    # Each rank has an additional empty chunk first, so that every position has a chunk before it.

    def __init__(self, layout: SequenceLayout) -> None:
        self.length, self.ranks = layout.length, layout.ranks
        self.block = layout.held.block if isinstance(layout.held, Stripes) else 0
        ranks, starts, stops = _list_chunks(layout)
        # The local row at which each chunk ends, and the offset from a position in the chunk to its local row.
        lengths = torch.tensor(layout.lengths, device="cpu")
        sizes = stops - starts
        self._stop_row = sizes.cumsum(0) - (lengths.cumsum(0) - lengths)[ranks]
        self._to_row = self._stop_row - stops
        self._line = ranks * (self.length + 1) + starts
        self.starts, order = starts[sizes > 0].sort()
        self.starts = torch.cat((self.starts, torch.tensor([self.length], device="cpu")))
        holder = ranks[sizes > 0][order]
        self._holder = torch.cat((holder, holder[-1:]))  # the last holder is repeated for the end

    def by_rank(self, pieces: Pieces) -> Pieces:
        """Set the rank that holds each piece. The pieces are of positions, cut at ``starts``."""
        return pieces._replace(rank=self.holder(self.chunk(pieces.start)))

    def chunk(self, positions: torch.Tensor) -> torch.Tensor:
        """The number of the chunk of each position. Chunks are numbered by position."""
        return torch.searchsorted(self.starts, positions, right=True) - 1

    def holder(self, chunks: torch.Tensor) -> torch.Tensor:
        """The ranks that hold the chunks with these numbers."""
        return self._holder[chunks]

    def rows(self, rank: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        """The number of rows of ``rank`` at positions before these."""
        chunk = torch.searchsorted(self._line, rank * (self.length + 1) + positions, right=True) - 1
        return torch.minimum(positions + self._to_row[chunk], self._stop_row[chunk])

    def crossings(self, ends: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Crossings:
        """The chunks that ends of intervals reach on the way from chunk ``first`` to chunk ``last``."""
        end, chunk = _expand_ranges(first + 1, last + 1)
        return Crossings(end, self.starts[chunk] - ends[end], self._holder[chunk - 1], self._holder[chunk])

    def attended(self, rank: int, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
        """The range of rows of ``rank`` that any query of a piece attends to: first and one-past-last, by piece."""
        first, last = self.rows(rank, pieces.reach)
        return first, last


class SinglePositions:
    """Stripes of one position, as arithmetic without lists. It has the methods of :class:`Chunks`.

    Only for queries and keys that are both in such stripes.
    """

    # From a row to the next row of a rank, an end moves by ``ranks`` positions or not at all: by one row of every rank,
    # or to the same row.

    def __init__(self, layout: SequenceLayout) -> None:
        self.length, self.ranks, self.block = layout.length, layout.ranks, 1
        self.starts = torch.empty(0, dtype=torch.int64, device="cpu")

    def by_rank(self, pieces: Pieces) -> Pieces:
        pieces = Pieces(*(column[:, None] for column in pieces))
        skipped = (torch.arange(self.ranks, device="cpu") - pieces.start) % self.ranks
        _, start, count, lo, hi, *steps = pieces.part(skipped, -((skipped - pieces.count) // self.ranks))
        steps = [step * self.ranks for step in steps]
        table = torch.broadcast_tensors(start % self.ranks, start, count, lo, hi, *steps)
        return Pieces(*(column.flatten() for column in table)).where(count.flatten() > 0)

    def chunk(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def holder(self, chunks: torch.Tensor) -> torch.Tensor:
        return chunks % self.ranks

    def rows(self, rank: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        return (positions - rank + self.ranks - 1) // self.ranks

    def crossings(self, ends: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Crossings:
        return Crossings(*first.new_empty(4, 0))

    def attended(self, rank: int, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
        first, last, of_first = self.rows(rank, torch.cat((pieces.reach, pieces.hi[None])))
        # If both ends grow, all queries attend to equally many rows.
        nothing = (of_first == first) & (pieces.lo_step > 0) & (pieces.hi_step > 0)
        return first, torch.where(nothing, first, last)


Holders: TypeAlias = Chunks | SinglePositions


def make_holders(q_layout: SequenceLayout, kv_layout: SequenceLayout) -> tuple[Holders, Holders]:
    """The holders of queries and of keys. Tables of chunks are cached."""
    if all(isinstance(layout.held, Stripes) and layout.held.block == 1 for layout in (q_layout, kv_layout)):
        return SinglePositions(q_layout), SinglePositions(kv_layout)
    return get_chunks(q_layout), get_chunks(kv_layout)


@remembered(64)  # shared by layers with different masks
def get_chunks(layout: SequenceLayout) -> Chunks:
    return Chunks(layout)


def _list_chunks(layout: SequenceLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rank, the start and the stop of each chunk, rank by rank. The first chunk of a rank is empty."""
    if isinstance(stripes := layout.held, Stripes):
        periods = -(-stripes.length // stripes.period)
        first = torch.arange(0, stripes.period, stripes.block, device="cpu")[:, None]
        starts = first + torch.arange(-1, periods, device="cpu") * stripes.period
        starts[:, 0] = 0
        stops = (starts + stripes.block).clamp(max=stripes.length)
        stops[:, 0] = 0
        ranks = torch.arange(stripes.ranks, device="cpu")[:, None].expand_as(starts)
        inside = starts < stripes.length
        return ranks[inside], starts[inside], stops[inside]
    edges = chain.from_iterable(chain.from_iterable(((0, 0), *chunks) for chunks in layout.chunks))
    starts, stops = torch.frombuffer(array("q", edges), dtype=torch.int64).view(-1, 2).unbind(1)
    sizes = torch.tensor([len(chunks) + 1 for chunks in layout.chunks], device="cpu")
    return torch.arange(layout.ranks, device="cpu").repeat_interleave(sizes), starts, stops


def _expand_ranges(first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate the numbers ``first[i] .. last[i] - 1`` for all i. Returns (the i of each number, the numbers)."""
    counts = last - first
    index = torch.repeat_interleave(counts)
    return index, torch.arange(len(index), device="cpu") - (counts.cumsum(0) - counts - first)[index]


def first_equal_sources(queries: Holders, keys: Holders, pieces: Pieces) -> torch.Tensor:
    """The first rank of each group of neighbouring ranks. Pieces attend to the same rows of all ranks of a group."""
    # In stripes, an end lies in the block of at most one rank. Ranks before that rank have one more block below the end
    # than ranks after it. In other layouts, each rank is a group.
    if not queries.block == keys.block > 0:
        return torch.arange(keys.ranks, device="cpu")
    ends = torch.cat((pieces.first, pieces.last)).flatten()
    ends = torch.cat((ends.new_zeros(1), ends, ends + keys.block - 1))
    return (ends // keys.block % keys.ranks).unique()


def convert_to_rows(
    pieces: Pieces, rank: int, queries: Holders, keys: Holders, firsts: torch.Tensor
) -> tuple[Pieces, torch.Tensor]:
    """Convert the pieces of ``rank`` from positions to its rows and the rows of each source, source by source.

    ``firsts`` are the first ranks of groups of equal sources, which represent the groups. Returns also the index of the
    piece of which each result is a part. It ascends for each source.
    """
    number, counts = len(pieces.start), pieces.count
    ends, steps = pieces.first, pieces.steps
    first, last = keys.chunk(ends), keys.chunk(torch.addcmul(ends, steps, counts - 1))
    crossed, query, before, after = keys.crossings(ends.flatten(), first.flatten(), last.flatten())
    crossed = crossed % max(number, 1)
    # The sources of a piece are the holders of the chunks that it reaches, or all ranks if there are fewer ranks.
    first, last = first[0], last[1] + 1
    reaches_all = last - first >= keys.ranks
    index, chunk = _expand_ranges(torch.where(reaches_all, 0, first), torch.where(reaches_all, len(firsts), last))
    source = torch.where(reaches_all[index], firsts[chunk % len(firsts)], keys.holder(chunk))
    source = firsts[torch.searchsorted(firsts, source, right=True) - 1]
    # The interval of a source's rows may change its slope at the first query of a piece, and at a query where an end
    # reaches another chunk.
    size = int(counts.max()) + 1 if number else 1
    line = torch.cat((source, before, after)) * number + torch.cat((index, crossed, crossed))
    place = (line * size + torch.cat((torch.zeros_like(index), query, query))).unique()
    line, query = place // size, place % size
    source, index = line // max(number, 1), line % max(number, 1)
    stop = counts[index]
    stop[:-1] = torch.where(line.diff() == 0, query[1:], stop[:-1])
    rows = keys.rows(source, ends[:, None, index] + steps[:, None, index] * torch.stack((query, stop - 1)))
    # An interval that is empty at one end of a piece is empty for one query only: its size changes by one a query.
    filled = rows[0] < rows[1]
    nonempty = torch.nonzero(filled.any(0)).flatten()
    first, last = rows[:, :, nonempty].unbind(1)
    late, early = (~filled[:, nonempty]).long()
    row = queries.rows(rank, pieces.start)[index] + query
    source, row, count, index = torch.stack((source, row, stop - query, index))[:, nonempty]
    return Pieces(source, row, count, *first, *(last > first).long()).part(late, count - late - early), index


def number_sent_rows(pieces: Pieces, length: int) -> tuple[Pieces, dict[int, RowRanges]]:
    """Renumber the keys of ``pieces`` among the needed rows of a source. Returns the pieces, and these rows."""
    starts, stops = _union(pieces.rank, pieces.lo, pieces.end, length)
    sizes = stops - starts
    before = sizes.cumsum(0) - sizes
    sources = starts // (length + 1)
    before -= before[torch.searchsorted(sources, sources)]
    line = pieces.rank * (length + 1)
    shift = (starts - before)[torch.searchsorted(starts, line + pieces.lo, right=True) - 1] - line
    return pieces._replace(lo=pieces.lo - shift, hi=pieces.hi - shift), _split_by_rank(starts, stops, length)


def join_runs(pieces: Pieces) -> Pieces:
    """Join pieces to runs that are as long as possible. A row between two runs belongs to the first."""
    first, rise, ones = pieces.first, pieces.steps, torch.ones_like(pieces.start)
    last = torch.addcmul(first, rise, pieces.count - 1)
    # Steps from row to row: the steps inside of each piece, and the step from its last row to the next piece. A step
    # that is not linear is -1.
    stop = pieces.start + pieces.count
    gap = first[:, 1:] - last[:, :-1]
    is_linear = ((gap == 0) | (gap == 1)).all(0) & (pieces.rank.diff() == 0) & (stop[:-1] == pieces.start[1:])
    rise_to_next = torch.full_like(last, -1)
    rise_to_next[:, :-1] = torch.where(is_linear, gap, -1)
    inner = torch.cat((torch.stack((pieces.count - 1, pieces.start, pieces.rank)), first, rise))
    outer = torch.cat((torch.stack((ones, stop - 1, pieces.rank)), last, rise_to_next))
    moves = torch.stack((inner, outer), 2).flatten(1)
    moves = moves[:, torch.nonzero(moves[0]).flatten()]
    # Join consecutive equal steps.
    rise = moves[5:]
    new = (rise.diff() != 0).any(0) | (rise[0, 1:] < 0)
    begin = torch.nonzero(torch.cat((ones[:1] > 0, new))).flatten()
    total = moves[0].cumsum(0)
    steps = torch.cat(((total - moves[0])[begin], total[-1:])).diff()
    _, row, source, lo, hi, lo_step, hi_step = moves[:, begin]
    # In a sequence of single steps, every second step belongs to a run, and the rest leads to the next run. Steps are
    # counted from the last step that is not single. A row starts a run if the step before it is not linear.
    index = torch.arange(len(steps), device="cpu")
    broken = lo_step < 0
    single = (steps == 1) & ~broken
    before = torch.cat((-ones[:1], torch.where(single, -1, index).cummax(0).values[:-1])) if len(steps) else index
    free = broken[before] ^ ((index - before) % 2 == 0)
    selected = torch.nonzero(free | ~(broken | single)).flatten()
    runs = Pieces(source, row, steps + 1, lo, hi, lo_step.clamp(min=0), hi_step.clamp(min=0))
    skipped = (~free).long()
    return runs.part(skipped, torch.where(broken, 1, steps + 1) - skipped).at(selected)


def find_rows_to_send(pieces: Pieces, keys: Holders, rank: int) -> dict[int, RowRanges]:
    """For each other rank, the rows of ``rank`` that its queries attend to."""
    first, last = keys.attended(rank, pieces)
    sent = torch.nonzero((last > first) & (pieces.rank != rank)).flatten()
    return _split_by_rank(*_union(pieces.rank[sent], first[sent], last[sent], keys.length), keys.length)


def _union(
    rank: torch.Tensor, first: torch.Tensor, last: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The union of the ranges ``[first, last)`` of the ranks' rows, as ascending ranges that do not touch."""
    # All ranges are on one line, on which the rows of rank r begin at r (length + 1).
    starts, order = (rank * (length + 1) + first).sort()
    reach = (rank * (length + 1) + last)[order].cummax(0).values if len(order) else starts
    has_gap = starts[1:] > reach[:-1]
    edge = has_gap.new_ones(min(len(order), 1))
    return starts[torch.cat((edge, has_gap))], reach[torch.cat((has_gap, edge))]


def _split_by_rank(starts: torch.Tensor, stops: torch.Tensor, length: int) -> dict[int, RowRanges]:
    """Split the result of :func:`_union` by rank."""
    ranks = starts // (length + 1)
    ranges = map(tuple, (torch.stack((starts, stops), 1) - (ranks * (length + 1))[:, None]).tolist())
    return {rank: tuple(islice(ranges, size)) for rank, size in enumerate(ranks.bincount().tolist()) if size}
