"""Results of functions that are remembered: how many, for which thread, and nothing of a caller."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from cp_styles import Causal, Dense, Documents, by_work, head_tail
from cp_styles._lib.bounded_cache import LatestEntries, Remembered, another_cache, remembered
from cp_styles.layouts.balancers import _cached_layout, layout_made_by
from cp_styles.masks.linear_pieces import _make_pieces
from cp_styles.plan import make_plan
from cp_styles.plan.linear import get_chunks
from cp_styles.plan.plan import _make_plan
from cp_styles.strategies.schedule import make_schedule


@remembered(2)
def text(size: int) -> str:
    return "x" * size


def made() -> int:
    return text.cache_info().misses


def test_the_latest_results_are_kept():
    with another_cache():
        before = made()
        first = text(1000)
        text(1001)
        assert text(1000) is first
        assert made() == before + 2
        text(1002)  # in place of the one that was used longest ago
        assert text(1000) is first
        assert made() == before + 3
        text(1001)
        assert made() == before + 4


def test_thousands_of_new_documents_leave_few_entries():
    functions = (make_schedule, _make_plan, _make_pieces, get_chunks, _cached_layout)
    for size in range(300):
        mask = Documents((size + 1, 200)) & Causal()
        layout = layout_made_by(partial(by_work, mask=mask), size + 201, 2)
        shape = 1, 8, layout.lengths[0], 64
        make_schedule(layout, layout, mask.pattern, 0, False, False, False, ((1,),), 1, shape, shape, shape, 1)
    for function in functions:
        info = function.cache_info()
        assert info.currsize == info.maxsize <= 256


def inside(value: object, seen: dict[int, object]) -> Iterator[object]:
    """All objects that an object refers to, but not those of the program."""
    if isinstance(value, type) or type(value).__name__ in ("module", "function") or id(value) in seen:
        return
    seen[id(value)] = value
    yield value
    for each in gc.get_referents(value):
        yield from inside(each, seen)


def test_nothing_of_a_caller_is_kept():
    """Not the tensor of a mask, by which a layout balances work or a plan is made."""
    dense = Dense(torch.rand(64, 64) > 0.5)
    tensor = weakref.ref(dense.tensor)
    tables = [_cached_layout, _make_pieces, get_chunks, _make_plan]
    for each in tables:  # of the entries of earlier tests
        each.cache_clear()
    with another_cache():
        layout = layout_made_by(partial(by_work, mask=dense & Causal()), 64, 2)
        assert layout == by_work(64, 2, mask=dense & Causal())
        assert layout_made_by(partial(by_work, mask=dense & Causal()), 64, 2) is layout
        make_plan(layout, layout, dense & Causal(), 0)
        del dense
        assert tensor() is None
        assert all(isinstance(each, Remembered) and each.cache_info().currsize for each in tables)
        found = [x for each in tables for x in inside(each._cached, {}) if isinstance(x, torch.Tensor)]
        assert {(x.dtype, x.device.type) for x in found} == {(torch.int64, "cpu")}


def test_threads_that_make_the_same_get_equal_results():
    both = threading.Barrier(2)

    @remembered(4)
    def slow(number: int) -> list[int]:
        both.wait(10)  # both compute it
        return [number]

    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(slow(7))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[7], [7]]
    assert slow(7) in found


@pytest.mark.parametrize("layers", [1, 3])
def test_rows_with_masks_of_their_own_are_planned_once(layers: int):
    """As many as a batch has rows: their schedules are found again by the next layer."""
    layout = head_tail(512, 2)
    masks = [Documents((index + 1, 511 - index)) & Causal() for index in range(128)]
    with another_cache():
        before = make_schedule.cache_info().misses
        for mask in masks * layers:
            shape = 1, 8, 256, 64
            make_schedule(layout, layout, mask.pattern, 0, False, False, False, ((1,),), 1, shape, shape, shape, 1)
        assert make_schedule.cache_info().misses - before == len(masks)


def test_another_cache_is_this_threads_alone():
    with another_cache():
        text(10)
        before = made()
        with another_cache():
            pass
        text(10)  # of the cache around, again
        assert made() == before
        with another_cache():
            text(10)
            assert made() == before + 1
            thread = threading.Thread(target=text, args=(10,))
            thread.start()
            thread.join()
            assert made() == before + 2  # of the cache outside
        text(10)
    assert made() <= before + 3


def test_a_table_of_the_latest_entries():
    table: LatestEntries[int, str] = LatestEntries(2)
    assert [table.put(number, str(number)) for number in range(3)] == ["0", "1", "2"]
    assert dict(table) == {1: "1", 2: "2"}
