"""The bounds of a mask as a few linear pieces, from which plans and work are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.troubleshooting import see
from cp_styles.masks.algebra import All, KeyRange, Mask, split_at


class Pieces(NamedTuple):
    """Ranges of queries over which both ends of the interval of keys are linear. All columns are int64 ``[N]``.

    There are three units: queries and keys as positions of the sequence; queries and keys as local rows of two ranks;
    or keys as numbers among the sent rows.

    Attributes:
        rank: the rank that holds the queries, if they are positions (0 if ranks do not matter); the rank that holds the
            keys, if they are rows.
        start: the first query. Each query of a piece attends to some key.
        count: the number of queries.
        lo, hi: the interval of the first query.
        lo_step, hi_step: growth of the ends with each query: 0, or the positions from one query to the next.
    """

    rank: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    lo_step: torch.Tensor
    hi_step: torch.Tensor

    @property
    def first(self) -> torch.Tensor:
        """The intervals of the first queries: int64 ``[2, N]``."""
        return torch.stack((self.lo, self.hi))

    @property
    def steps(self) -> torch.Tensor:
        """Growth of both ends: int64 ``[2, N]``."""
        return torch.stack((self.lo_step, self.hi_step))

    @property
    def last(self) -> torch.Tensor:
        """The intervals of the last queries: int64 ``[2, N]``."""
        return torch.addcmul(self.first, self.steps, self.count - 1)

    @property
    def end(self) -> torch.Tensor:
        """``hi`` of the last queries."""
        return torch.addcmul(self.hi, self.hi_step, self.count - 1)

    @property
    def reach(self) -> torch.Tensor:
        """The range of keys to which any query of a piece attends: int64 ``[2, N]``."""
        return torch.stack((self.lo, self.end))

    @property
    def work(self) -> torch.Tensor:
        """The number of (query, key) pairs of each piece."""
        size = self.hi - self.lo
        return (2 * size + (self.hi_step - self.lo_step) * (self.count - 1)) * self.count // 2

    @classmethod
    def joined(cls, groups: Sequence[Pieces]) -> Pieces:
        """The pieces of all ``groups``, one group after another."""
        return groups[0] if len(groups) == 1 else cls(*map(torch.cat, zip(*groups, strict=True)))

    def at(self, index: torch.Tensor) -> Pieces:
        return Pieces(*torch.stack(self)[:, index].unbind())

    def where(self, condition: torch.Tensor) -> Pieces:
        return self.at(torch.nonzero(condition).flatten())

    def part(self, skipped: torch.Tensor, count: torch.Tensor) -> Pieces:
        """``count`` queries of each piece, after the first ``skipped`` queries."""
        lo, hi = torch.addcmul(self.lo, self.lo_step, skipped), torch.addcmul(self.hi, self.hi_step, skipped)
        return Pieces(self.rank, self.start + skipped, count, lo, hi, self.lo_step, self.hi_step)

    def cut(self, positions: torch.Tensor) -> Pieces:
        """Cut the pieces at ``positions``."""
        start = torch.cat((self.start, positions)).unique()
        index = torch.searchsorted(self.start, start, right=True) - 1
        # Queries before the first piece, and in the gaps between pieces, attend to nothing.
        stop = self.start + self.count
        inside = torch.nonzero((start < stop[index]) & (index >= 0)).flatten() if len(stop) else index[:0]
        start, uncut, stop = start[inside], self.at(index[inside]), stop[index[inside]]
        return uncut.part(start - uncut.start, torch.minimum(stop, torch.cat((start[1:], stop[-1:]))) - start)


def cut_into_pieces(mask: Mask, queries: int, keys: int, cuts: torch.Tensor) -> list[Pieces]:
    """For each band of ``mask`` its pieces for ``queries`` positions and ``keys`` keys, cut at positions ``cuts``."""
    return [pieces.cut(cuts) for pieces in _make_pieces(mask.pattern, queries, keys)]


@remembered(64)  # for layouts that balance work, and for every plan
def _make_pieces(mask: Mask, queries: int, keys: int) -> tuple[Pieces, ...]:
    return tuple(_make_pieces_of_band(band, queries, keys) for band in mask.bands)


def _make_pieces_of_band(mask: Mask, queries: int, keys: int) -> Pieces:
    within = All((*mask.parts, KeyRange(0, keys)))
    first, last = split_at(within.breaks(queries), queries)
    more = last - first
    middle = more // 2
    lo, hi = (bound.view(3, -1) for bound in within.bounds(torch.cat((first, first + middle, last))))
    lo_step, hi_step = (lo[2] > lo[0]).long(), (hi[2] > hi[0]).long()
    for bound, step in ((lo, lo_step), (hi, hi_step)):
        if not torch.equal(bound[1:] - bound[0], step * torch.stack((middle, more))):
            raise ValueError(f"{mask}: breaks() leaves out a position where a bound changes its course")
    lo, hi = lo[0], hi[0]
    # If the bounds converge or diverge, some positions at one end may attend to nothing.
    size, opening = hi - lo, hi_step - lo_step
    skipped = torch.where(opening > 0, (1 - size).clamp(min=0), 0)
    count = torch.where(opening < 0, torch.minimum(more + 1, size), more + 1 - skipped)
    count = count.masked_fill((opening == 0) & (size <= 0), 0)
    pieces = Pieces(torch.zeros_like(first), first, more + 1, lo, hi, lo_step, hi_step)
    return pieces.part(skipped, count).where(count > 0)


def has_own_work(mask: Mask) -> bool:
    """Whether a mask overrides :meth:`Mask.work`, the number of keys of each position."""
    return any(type(part).work is not Mask.work for part in mask.parts)


def refuse_shorter(mask: Mask, queries: int) -> None:
    """Raise ValueError if the mask is for fewer positions than ``queries``."""
    # A mask for more positions may be right: a cross-attention may have more keys than queries.
    if mask.length is not None and mask.length < queries:
        raise ValueError(
            f"the mask is for {mask.length} positions, the layout for {queries}: both are for the whole sequence"
            f"{see('A mask of another length')}"
        )


def work_from(mask: Mask, starts: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """The number of (query, key) pairs in each range of queries: int64, in the shape of ``starts``.

    A range goes from a position of ``starts`` to the next position, or to ``queries``. ``starts`` ascend from 0.
    """
    refuse_shorter(mask, queries)
    total = torch.zeros_like(starts)
    for row in mask.rows:
        if has_own_work(row):
            positions = torch.arange(queries, device="cpu")
            work = row.work(positions, keys)
        else:
            pieces = Pieces.joined(cut_into_pieces(row, queries, keys, starts))
            positions, work = pieces.start, pieces.work
        total.index_add_(0, torch.searchsorted(starts, positions, right=True) - 1, work)
    return total
