"""Sequence layouts: which global positions each rank holds.

It imports _lib and masks. Begin with `layout.py`.

Tokens, labels, positions, masks, the attention plan and unsharding are all derived from a :class:`SequenceLayout`.
A load balancer is a function that returns a SequenceLayout.
"""

from cp_styles.layouts.balancers import Balancer, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.layouts.layout import SequenceLayout, join_layouts, nested_layout

__all__ = [
    "Balancer",
    "SequenceLayout",
    "by_work",
    "contiguous",
    "head_tail",
    "join_layouts",
    "nested_layout",
    "per_document_head_tail",
    "striped",
]
