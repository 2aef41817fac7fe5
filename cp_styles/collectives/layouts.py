"""Layouts of hybrids and of packed documents, beside the balancers of :mod:`cp_styles.layout`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from cp_styles.collectives._rows import even_sizes, ranges_of
from cp_styles.layout import Chunk, SequenceLayout


def nested_layout(outer: SequenceLayout, inner_ranks: int) -> SequenceLayout:
    """What each rank of ``outer`` holds, cut once more among ``inner_ranks`` ranks: ring x Ulysses.

    Rank ``o * inner_ranks + i`` is inner rank i of outer rank o, as on a mesh of the axes (outer, inner): gathering
    over the inner axis alone gives back what ``outer`` gives rank o. Nothing is communicated.

    Args:
        outer: the layout over the outer (ring) ranks.
        inner_ranks: how many (Ulysses) ranks share what one outer rank holds; remainders go to the first of them.

    Raises:
        ValueError: when ``inner_ranks`` is below 1.

    Source: Fang and Zhao, USP: A Unified Sequence Parallelism Approach (2024).
    """
    if inner_ranks < 1:
        raise ValueError(f"inner_ranks must be at least 1, got {inner_ranks}")
    cut: list[list[Chunk]] = []
    for own, length in zip(outer.chunks, outer.lengths, strict=True):
        edges = list(accumulate((stop - start for start, stop in own), initial=0))
        for begin, end in ranges_of(even_sizes(length, inner_ranks)):
            # A chunk at `edge` of the local order starts at the global `start`: shift what [begin, end) has of it.
            cut.append(
                [
                    (start + max(begin - edge, 0), start + min(end - edge, stop - start))
                    for edge, (start, stop) in zip(edges, own, strict=False)
                    if max(begin - edge, 0) < min(end - edge, stop - start)
                ]
            )
    return SequenceLayout.from_chunks(cut)


def per_document_layout(length: int, ranks: int, *, documents: Sequence[int]) -> SequenceLayout:
    """Every packed document cut contiguously over all ranks, the remainder of each to the first ranks.

    A rank holds its part of the first document, then of the second, and so on; gathering puts every document together
    again. For causal attention see :func:`cp_styles.layout.per_document_head_tail`.

    Args:
        length: number of positions; the sum of ``documents``.
        ranks: number of ranks.
        documents: lengths of the packed documents, in order.

    Raises:
        ValueError: when the documents do not add up to ``length``.
    """
    if sum(documents) != length or any(size < 0 for size in documents) or ranks < 1:
        raise ValueError(
            f"documents must be lengths >= 0 that add up to {length}, on at least one rank: got a sum of "
            f"{sum(documents)}, ranks={ranks}"
        )
    starts = accumulate(documents, initial=0)
    cuts = [
        [(start + a, start + b) for a, b in ranges_of(even_sizes(size, ranks))]
        for start, size in zip(starts, documents, strict=False)
    ]
    return SequenceLayout.from_chunks([cut[rank] for cut in cuts] for rank in range(ranks))
