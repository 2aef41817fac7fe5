"""Attention masks, in global positions.

A mask with structure is a band: query position ``p`` attends to one interval ``[lo(p), hi(p))`` of key positions. The
conjunction of bands is a band: ``causal & window`` intersects their intervals. So one function, :meth:`Mask.bounds`,
defines the plan, the work of a layout, the rows that must be sent, and :meth:`Mask.allowed`. An arbitrary boolean or
additive mask is :class:`Dense`, which adds a bias to the logits.
"""

from cp_styles.mask.algebra import UNBOUNDED, All, BlockGrid, Full, Mask, PerRow
from cp_styles.mask.bands import Causal, Chunked, Documents, PrefixLM, SlidingWindow
from cp_styles.mask.dense import Dense, SomeBias, causal_bias, check_plain_mask, digest
from cp_styles.mask.linear_pieces import Pieces, counts_by_itself, pieces_of, refuse_shorter, work_from

__all__ = [
    "UNBOUNDED",
    "All",
    "BlockGrid",
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "Full",
    "Mask",
    "PerRow",
    "Pieces",
    "PrefixLM",
    "SlidingWindow",
    "SomeBias",
    "causal_bias",
    "check_plain_mask",
    "counts_by_itself",
    "digest",
    "pieces_of",
    "refuse_shorter",
    "work_from",
]
