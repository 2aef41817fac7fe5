"""The bounds of a mask as a few linear pieces. Plans and work are computed from these, not position by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.mask.algebra import All, Full, Mask, PerRow, stretches
from cp_styles.troubleshooting import see


class Pieces(NamedTuple):
    """Ranges of query positions over which each bound is linear. All fields are int64 [N].

    Attributes:
        start, stop: the ranges, ascending. Every position of a range attends to some key; positions between ranges
            attend to none.
        lo, hi: the bounds at ``start``, within the keys.
        lo_step, hi_step: growth of the bounds with each position, 0 or 1.
    """

    start: torch.Tensor
    stop: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    lo_step: torch.Tensor
    hi_step: torch.Tensor

    @property
    def reach(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The range of keys that the positions of each piece attend to, taken together: first and one-past-last."""
        return self.lo, self.hi + self.hi_step * (self.stop - self.start - 1)

    @property
    def work(self) -> torch.Tensor:
        """Number of (query, key) pairs of each piece."""
        count = self.stop - self.start
        first = self.hi - self.lo
        return (2 * first + (self.hi_step - self.lo_step) * (count - 1)) * count // 2

    def cut(self, positions: torch.Tensor) -> Pieces:
        """The same, with none of ``positions`` inside of a piece."""
        start = torch.cat((self.start, positions)).unique()
        piece = torch.searchsorted(self.start, start, right=True) - 1
        # Before the first piece, and in the gaps between them, nothing is seen.
        within = torch.nonzero((start < self.stop[piece]) & (piece >= 0)).flatten() if len(self.start) else piece[:0]
        start, piece = start[within], piece[within]
        _, stop, lo, hi, lo_step, hi_step = torch.stack(self)[:, piece].unbind()
        later = start - self.start[piece]
        stop = torch.minimum(stop, torch.cat((start[1:], stop[-1:])))
        return Pieces(start, stop, lo + lo_step * later, hi + hi_step * later, lo_step, hi_step)

    def where(self, which: torch.Tensor) -> Pieces:
        return Pieces(*torch.stack(self)[:, torch.nonzero(which).flatten()].unbind())


def pieces_of(mask: Mask, queries: int, keys: int, cuts: torch.Tensor) -> Pieces:
    """The pieces of the band of ``mask`` for ``queries`` positions and ``keys`` keys, cut at the positions ``cuts``."""
    return _uncut(mask.pattern, queries, keys).cut(cuts)


@remembered  # asked by layouts that balance work, and by every plan
def _uncut(mask: Mask, queries: int, keys: int) -> Pieces:
    within = All((*(mask.parts if isinstance(mask, All) else (mask,)), _Within(keys)))
    first, last = stretches(within.breaks(queries), queries)
    more = last - first
    middle = more // 2
    lo, hi = (bound.view(3, -1) for bound in within.bounds(torch.cat((first, first + middle, last))))
    lo_step, hi_step = (lo[2] > lo[0]).long(), (hi[2] > hi[0]).long()
    for bound, step in ((lo, lo_step), (hi, hi_step)):
        if not torch.equal(bound[1:] - bound[0], step * torch.stack((middle, more))):
            raise ValueError(f"{mask}: breaks() leaves out a position where a bound changes its course")
    lo, hi = lo[0], hi[0]
    # Where the bounds converge or diverge, some positions at one end may attend to nothing.
    seen, opening = hi - lo, hi_step - lo_step
    skipped = torch.where(opening > 0, (1 - seen).clamp(min=0), 0)
    count = torch.where(opening < 0, torch.minimum(more + 1, seen), more + 1 - skipped)
    count = count.masked_fill((opening == 0) & (seen <= 0), 0)
    start = first + skipped
    found = Pieces(start, start + count, lo + lo_step * skipped, hi + hi_step * skipped, lo_step, hi_step)
    return found.where(count > 0)


def counts_by_itself(mask: Mask) -> bool:
    """Whether a mask has its own count of the keys of each position: :meth:`Mask.work`."""
    parts = mask.parts if isinstance(mask, All) else (mask,)
    return any(type(part).work is not Mask.work for part in parts)


def refuse_shorter(mask: Mask, queries: int) -> None:
    """Raise ValueError if the mask is for fewer positions. (For more: the keys of a cross-attention may be more.)"""
    if mask.length is not None and mask.length < queries:
        raise ValueError(
            f"the mask is for {mask.length} positions, the layout for {queries}: both are for the whole sequence"
            f"{see('A mask of another length')}"
        )


def work_from(mask: Mask, starts: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Number of (query, key) pairs in each range of queries: int64, in the shape of ``starts``.

    Ranges go from each position of ``starts`` to the next one; the last goes to ``queries``. ``starts`` ascend from 0.
    """
    refuse_shorter(mask, queries)
    if isinstance(mask, PerRow):
        return torch.stack([work_from(row, starts, queries, keys) for row in mask.masks]).sum(0)
    if counts_by_itself(mask):
        positions = torch.arange(queries, device="cpu")
        work = mask.work(positions, keys)
    else:
        pieces = pieces_of(mask, queries, keys, starts)
        positions, work = pieces.start, pieces.work
    return torch.zeros_like(starts).index_add_(0, torch.searchsorted(starts, positions, right=True) - 1, work)


@dataclass(frozen=True)
class _Within(Full):
    """Restricts the bounds of a mask to the existing keys."""

    keys: int

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), torch.full_like(q_positions_L, self.keys)

    def breaks(self, length: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device="cpu")
