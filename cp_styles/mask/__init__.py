"""Who attends to whom, said in global positions.

Every mask here that has structure is a band: query position ``p`` attends to one interval ``[lo(p), hi(p))`` of key
positions. Bands are closed under conjunction (``causal & window`` intersects the intervals), so the plan, the work
of a layout, the rows that must travel and the dense oracle all derive from one function, :meth:`Mask.bounds`.
What no band can say (an arbitrary boolean or additive mask) is :class:`Dense`, which adds a bias on top.
"""

from cp_styles.mask.algebra import UNBOUNDED, All, BlockGrid, Full, Mask, PerRow
from cp_styles.mask.bands import Causal, Chunked, Documents, PrefixLM, SlidingWindow
from cp_styles.mask.dense import Dense, SomeBias, digest
from cp_styles.mask.pieces import Pieces, pieces_of, work_from

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
    "digest",
    "pieces_of",
    "work_from",
]
