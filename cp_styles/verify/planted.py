"""A mistake for a step with one rank: every attention and mixer is cut, as if the ranks ran it on their parts alone.

:func:`cp_styles.verify.verify` plants it to learn whether its comparison can see a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Documents, Mask
from cp_styles.masks.algebra import UNBOUNDED


@dataclass(eq=False)
class PlantedCut:
    """The cut of all attentions and mixers over a group of one rank, which has it in its :class:`Role`.

    A sequence is cut where a part of a rank ends by one of the ``layouts``; at a third, if none has its length.

    Attributes:
        layouts: the layouts of the sequences on the ranks.
        used: whether a call was cut.
        takes: whether the cut takes a key or a row from such a call. Not where documents end at the cut.
    """

    layouts: Iterable[SequenceLayout]
    used: bool = False
    takes: bool = False
    _parts: dict[int, tuple[int, ...]] = field(init=False, default_factory=dict)

    def mask(self, mask: Mask, queries: int, keys: int) -> Mask:
        """``mask`` of an attention, cut."""
        if min(queries, keys) < 2:
            return mask
        same = queries == keys
        cut = mask & (Documents(self._lengths(keys)) if same else _Thirds(queries // 3 or 1, keys // 3 or 1))
        positions = torch.arange(queries, device="cpu")
        self._note(bool((cut.work(positions, keys) < mask.work(positions, keys)).any()))
        return cut

    def documents(self, documents: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths of the ``documents`` of a mixer's sequence, cut."""
        if sum(documents) < 2:
            return documents
        edges = sorted({0, *accumulate(documents), *accumulate(self._lengths(sum(documents)))})
        cut = tuple(stop - start for start, stop in pairwise(edges))
        self._note(len(cut) > len(documents))
        return cut

    def _note(self, takes: bool) -> None:
        self.used, self.takes = True, self.takes or takes

    def _lengths(self, length: int) -> tuple[int, ...]:
        """The lengths of the pieces of a sequence."""
        if length not in self._parts:
            edges = {edge for layout in self.layouts if layout.length == length for edge in _edges(layout)}
            edges = sorted({0, *(edges or {length // 3 or 1}), length})
            self._parts[length] = tuple(stop - start for start, stop in pairwise(edges))
        return self._parts[length]


def _edges(layout: SequenceLayout) -> Iterable[int]:
    """The positions at which the part of another rank begins."""
    chunks = sorted((start, rank) for rank, chunks in enumerate(layout.chunks) for start, _ in chunks)
    return [start for (_, before), (start, rank) in pairwise(chunks) if rank != before]


@dataclass(frozen=True)
class _Thirds(Mask):
    """For queries and keys of two sequences: the first queries attend to the first keys, the rest to the rest."""

    queries: int
    keys: int

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = q_positions_L < self.queries
        low, high = torch.zeros_like(q_positions_L), torch.full_like(q_positions_L, UNBOUNDED)
        return low.masked_fill(~first, self.keys), high.masked_fill(first, self.keys)
