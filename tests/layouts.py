"""Hypothesis strategies for layouts."""

from functools import partial
from itertools import pairwise

from hypothesis import strategies as st

from cp_styles.layouts import SequenceLayout, contiguous, head_tail, striped


@st.composite
def layouts(draw: st.DrawFn, length: int | None = None, ranks: int | None = None) -> SequenceLayout:
    """Any cut: the balancers', and chunks dealt out at random, ranks without tokens included."""
    length = draw(st.integers(0, 40)) if length is None else length
    ranks = draw(st.integers(1, 5)) if ranks is None else ranks
    stripes = partial(striped, block=draw(st.integers(1, 4)))
    balancer = draw(st.sampled_from([contiguous, head_tail, stripes, None]))
    if balancer is not None:
        return balancer(length, ranks)
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=8)) | {0, length})
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(cuts):
        chunks[draw(st.integers(0, ranks - 1))].append((start, stop))
    return SequenceLayout.from_chunks(chunks)


@st.composite
def packs(draw: st.DrawFn, longest: int = 24) -> tuple[SequenceLayout, tuple[int, ...]]:
    """A cut of 1 to ``longest`` positions, and the lengths of up to five documents in them."""
    layout = draw(layouts(length=draw(st.integers(1, longest))))
    ends = sorted(draw(st.sets(st.integers(1, layout.length), max_size=4)) | {0, layout.length})
    return layout, tuple(stop - start for start, stop in pairwise(ends))
