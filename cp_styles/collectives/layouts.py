"""A layout for hybrid strategies, in addition to those of :mod:`cp_styles.layout`."""

from __future__ import annotations

from itertools import accumulate

from cp_styles.layout import Chunk, SequenceLayout, even_sizes, ranges_of


def nested_layout(outer: SequenceLayout, inner_ranks: int) -> SequenceLayout:
    """The part of each rank of ``outer``, cut again among ``inner_ranks`` ranks: for ring x Ulysses.

    Rank ``o * inner_ranks + i`` is inner rank i of outer rank o, as on a mesh with the axes (outer, inner). A gather
    over the inner axis alone gives the part of outer rank o. Nothing is communicated.

    Args:
        outer: the layout over the outer (ring) ranks.
        inner_ranks: number of inner (Ulysses) ranks that share the part of one outer rank. The first get the remainder.

    Raises:
        ValueError: ``inner_ranks`` is below 1.

    Source: Fang and Zhao, USP: A Unified Sequence Parallelism Approach (2024).
    """
    if inner_ranks < 1:
        raise ValueError(f"inner_ranks must be at least 1, got {inner_ranks}")
    cut: list[list[Chunk]] = []
    for chunks, length in zip(outer.chunks, outer.lengths, strict=True):
        edges = list(accumulate((stop - start for start, stop in chunks), initial=0))
        for begin, end in ranges_of(even_sizes(length, inner_ranks)):
            # The chunk at `edge` in local order starts at the global position `start`. Take its part in [begin, end).
            cut.append(
                [
                    (start + max(begin - edge, 0), start + min(end - edge, stop - start))
                    for edge, (start, stop) in zip(edges, chunks, strict=False)
                    if max(begin - edge, 0) < min(end - edge, stop - start)
                ]
            )
    return SequenceLayout.from_chunks(cut)
