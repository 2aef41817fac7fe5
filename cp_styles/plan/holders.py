"""Which rank holds which position, as tables of tensors, by which a plan looks up many positions at once."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.layout import SequenceLayout, Stripes
from cp_styles.mask import Pieces


class Segments(NamedTuple):
    """Rows of ranks over which both bounds are linear: int64 ``[N]``.

    Attributes:
        holder: the rank whose rows they are.
        start: the position of the first row.
        count: number of rows.
        lo, hi: the bounds of the first row.
        lo_step, hi_step: growth of the bounds with each row: 0, or the positions from one row to the next.
    """

    holder: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    lo_step: torch.Tensor
    hi_step: torch.Tensor

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bounds (lo, hi) of the first row, and those of the last row: two int64 ``[2, N]``."""
        first = torch.stack((self.lo, self.hi))
        return first, torch.addcmul(first, torch.stack((self.lo_step, self.hi_step)), self.count - 1)

    @property
    def reach(self) -> torch.Tensor:
        """The range of keys that the rows attend to, taken together: first and one-past-last, int64 ``[2, N]``."""
        return torch.stack((self.lo, torch.addcmul(self.hi, self.hi_step, self.count - 1)))

    @property
    def work(self) -> torch.Tensor:
        """Number of (query, key) pairs of each segment."""
        first = self.hi - self.lo
        return (2 * first + (self.hi_step - self.lo_step) * (self.count - 1)) * self.count // 2

    def where(self, which: torch.Tensor) -> Segments:
        return Segments(*torch.stack(self)[:, torch.nonzero(which).flatten()].unbind())


class Crossings(NamedTuple):
    """Where bounds reach the start of another chunk: int64 ``[N]``.

    Attributes:
        which: the index of the bound.
        row: the row, counted from the first one of the bound.
        before, after: the ranks that hold the chunk before, and the chunk that is reached.
    """

    which: torch.Tensor
    row: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


class Chunks:
    """A layout as tables of its chunks. Each rank has an additional empty chunk first, so that every position has a
    chunk before it.

    Attributes:
        length: length of the sequence.
        ranks: number of ranks.
        bounds: start positions of the chunks, ascending, and the end of the sequence: int64 ``[chunks + 1]``.
        block: positions of each chunk, if the layout is :class:`Stripes`; else 0.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self.length, self.ranks = layout.length, layout.ranks
        self.block = layout.held.block if isinstance(layout.held, Stripes) else 0
        ranks, starts, stops = _table(layout)
        # The local row at which each chunk ends, and the offset from a position in it to its local row.
        lengths = torch.tensor(layout.lengths, device="cpu")
        sizes = stops - starts
        self._stop_row = sizes.cumsum(0) - (lengths.cumsum(0) - lengths)[ranks]
        self._to_row = self._stop_row - stops
        self._line = ranks * (self.length + 1) + starts
        self.bounds, order = starts[sizes > 0].sort()
        self.bounds = torch.cat((self.bounds, torch.tensor([self.length], device="cpu")))
        holder = ranks[sizes > 0][order]
        self._holder = torch.cat((holder, holder[-1:]))  # the last one is repeated for the end

    def segments(self, pieces: Pieces) -> Segments:
        """The rows of all ranks that attend to some key. The pieces are cut at :attr:`bounds`."""
        start, stop, *bounds = pieces
        return Segments(self.holder(self.chunk(start)), start, stop - start, *bounds)

    def chunk(self, positions: torch.Tensor) -> torch.Tensor:
        """The numbers of the chunks, by position, that these positions are in."""
        return torch.searchsorted(self.bounds, positions, right=True) - 1

    def holder(self, chunks: torch.Tensor) -> torch.Tensor:
        """The ranks that hold the chunks of these numbers."""
        return self._holder[chunks]

    def rows(self, rank: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        """The number of rows of ``rank`` at positions before these."""
        chunk = torch.searchsorted(self._line, rank * (self.length + 1) + positions, right=True) - 1
        return torch.minimum(positions + self._to_row[chunk], self._stop_row[chunk])

    def crossings(self, bound: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Crossings:
        """The chunks that bounds reach on the way from ``bound``, in chunk ``first``, to chunk ``last``."""
        which, chunk = expanded(first + 1, last + 1)
        return Crossings(which, self.bounds[chunk] - bound[which], self._holder[chunk - 1], self._holder[chunk])

    def attended(self, rank: int, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of ``rank`` that the rows of each segment attend to, taken together: first and one-past-last."""
        first, last = self.rows(rank, segments.reach)
        return first, last


class SinglePositions:
    """Stripes of one position, as arithmetic: nothing is listed. The methods are those of :class:`Chunks`.

    Only for queries and keys that are both cut so. From a row to the next one, which is a position of the same rank, a
    bound moves by as many positions or not at all: to another row of every rank, or to the same one.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self.length, self.ranks, self.block = layout.length, layout.ranks, 1
        self.bounds = torch.empty(0, dtype=torch.int64, device="cpu")

    def segments(self, pieces: Pieces) -> Segments:
        start, stop, lo, hi, lo_step, hi_step = (column[:, None] for column in pieces)
        skipped = (torch.arange(self.ranks, device="cpu") - start) % self.ranks
        count = (stop - start - skipped + self.ranks - 1) // self.ranks
        first = start + skipped
        table = torch.broadcast_tensors(
            first % self.ranks,
            first,
            count,
            lo + lo_step * skipped,
            hi + hi_step * skipped,
            lo_step * self.ranks,
            hi_step * self.ranks,
        )
        return Segments(*(column.flatten() for column in table)).where(count.flatten() > 0)

    def chunk(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def holder(self, chunks: torch.Tensor) -> torch.Tensor:
        return chunks % self.ranks

    def rows(self, rank: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        return (positions - rank + self.ranks - 1) // self.ranks

    def crossings(self, bound: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Crossings:
        return Crossings(*first.new_empty(4, 0))

    def attended(self, rank: int, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        first, last, once = self.rows(rank, torch.cat((segments.reach, segments.hi[None])))
        # Where both bounds grow, all rows attend to equally many.
        nothing = (once == first) & (segments.lo_step > 0) & (segments.hi_step > 0)
        return first, torch.where(nothing, first, last)


Holders: TypeAlias = Chunks | SinglePositions


def holders_of(q_layout: SequenceLayout, kv_layout: SequenceLayout) -> tuple[Holders, Holders]:
    """Which ranks hold the queries, and which hold the keys. Tables of chunks are cached."""
    if all(isinstance(layout.held, Stripes) and layout.held.block == 1 for layout in (q_layout, kv_layout)):
        return SinglePositions(q_layout), SinglePositions(kv_layout)
    return chunks_of(q_layout), chunks_of(kv_layout)


def first_alike(queries: Holders, keys: Holders, segments: Segments) -> torch.Tensor:
    """The first ranks of groups of neighbours. These segments attend to the same rows of each rank of a group.

    In stripes, a bound lies in the block of at most one rank. The ranks before that one have a block more below the
    bound than the ranks after it. In other layouts, each rank is a group.
    """
    if not queries.block == keys.block > 0:
        return torch.arange(keys.ranks, device="cpu")
    ends = torch.cat(segments.ends).flatten()
    ends = torch.cat((ends.new_zeros(1), ends, ends + keys.block - 1))
    return (ends // keys.block % keys.ranks).unique()


@remembered  # layers with other masks share it
def chunks_of(layout: SequenceLayout) -> Chunks:
    """The tables of a layout; cached."""
    return Chunks(layout)


def _table(layout: SequenceLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rank, the start and the stop of each chunk and of the empty ones, rank by rank."""
    held = layout.held
    if isinstance(held, Stripes):
        periods = -(-held.length // held.period)
        first = torch.arange(0, held.period, held.block, device="cpu")[:, None]
        starts = first + torch.arange(-1, periods, device="cpu") * held.period
        starts[:, 0] = 0
        stops = (starts + held.block).clamp(max=held.length)
        stops[:, 0] = 0
        ranks = torch.arange(held.ranks, device="cpu")[:, None].expand_as(starts)
        some = starts < held.length
        return ranks[some], starts[some], stops[some]
    edges = chain.from_iterable(chain.from_iterable(((0, 0), *own) for own in held))
    starts, stops = torch.frombuffer(array("q", edges), dtype=torch.int64).view(-1, 2).unbind(1)
    sizes = torch.tensor([len(own) + 1 for own in held], device="cpu")
    return torch.arange(layout.ranks, device="cpu").repeat_interleave(sizes), starts, stops


def expanded(first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers ``first[i] .. last[i] - 1`` for all i, concatenated: (the i of each number, the numbers)."""
    counts = last - first
    which = torch.repeat_interleave(counts)
    return which, torch.arange(len(which), device="cpu") - (counts.cumsum(0) - counts - first)[which]
