"""Attention masks, in global positions.

It imports _lib. Begin with `algebra.py`.

Most masks are bands: query position ``p`` attends to one interval ``[lo(p), hi(p))`` of key positions. The conjunction
of bands is a band: ``causal & window`` intersects their intervals. So one function, :meth:`Mask.bounds`, defines the
plan, the work of a layout, the sent rows, and :meth:`Mask.allowed`, which a mask with gaps overrides. A :class:`Tree`
is several bands, :attr:`Mask.bands`. An arbitrary boolean or additive mask is :class:`Dense`, which adds a bias to the
logits.
"""

from cp_styles.masks.algebra import Full, Mask, PerRow
from cp_styles.masks.bands import Causal, Chunked, Documents, EndedWindows, PrefixLM, Shifted, SlidingWindow, WithBlocks
from cp_styles.masks.dense import Dense
from cp_styles.masks.tree import Tree

__all__ = [
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "EndedWindows",
    "Full",
    "Mask",
    "PerRow",
    "PrefixLM",
    "Shifted",
    "SlidingWindow",
    "Tree",
    "WithBlocks",
]
