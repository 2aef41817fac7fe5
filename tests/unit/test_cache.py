"""The cache is bounded by bytes, and the estimates of bytes are close to what Python allocates."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from cp_styles.bounded_cache import remembered
from cp_styles.layout import SequenceLayout, by_work, head_tail, per_document_head_tail, striped
from cp_styles.mask import Causal, Documents
from cp_styles.plan import make_plan


def test_the_latest_that_fit_are_kept():
    made = []

    @remembered(lambda arguments, value: len(value), limit=10)
    def text(size: int) -> str:
        made.append(size)
        return "x" * size

    for size, held in ((4, 4), (5, 9), (4, 9), (3, 7), (4, 7), (5, 9), (50, 50), (50, 50), (1, 1)):
        assert len(text(size)) == size
        assert text.held == held
    assert made == [4, 5, 3, 5, 50, 1]  # 4 was used after 5, which left first; what is larger than all stays alone
    assert text.made == len(made)
    text.clear()
    assert text.held == 0


@pytest.mark.parametrize("name", ["head-tail", "per document", "by work", "striped"])
def test_what_a_plan_and_a_layout_take(name: str):
    """Within a factor of two: numbers below 257 take nothing, and equal tuples may be shared."""
    documents = tuple(100 + 13 * index % 997 for index in range(300))
    length, mask = sum(documents), Documents(documents) & Causal()
    make = {
        "head-tail": lambda: head_tail(length, 512),
        "per document": lambda: per_document_head_tail(length, 64, documents=documents),
        "by work": lambda: by_work(length, 64, mask=mask),
        "striped": lambda: striped(length, 8, block=64),
    }[name]

    def allocated(function):
        gc.freeze()  # so that a collection looks at what the function leaves, and takes no second in a long run
        tracemalloc.start()
        try:
            value = function()
            gc.collect()
            return value, tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.unfreeze()

    layout, size = allocated(make)
    assert size / 2 <= layout.nbytes <= 2 * size
    make_plan(layout, layout, mask, 0)  # what torch loads once
    plan, size = allocated(lambda: make_plan(SequenceLayout(layout.chunks), layout, mask, 1))
    assert size / 2 <= plan.nbytes <= 2 * size


def test_a_cache_can_be_left_aside():
    made: list[int] = []

    @remembered(lambda arguments, value: 1, limit=10)
    def twice(number: int) -> int:
        made.append(number)
        return 2 * number

    twice(1)
    with twice.forgotten():
        assert twice(1) == 2
        twice(3)
    assert (made, twice.held) == ([1, 1, 3], 1)
    twice(1)
    assert made == [1, 1, 3]
    twice(3)
    assert made == [1, 1, 3, 3]
