"""One cache for all plans, bounded by bytes. The bytes that it counts are close to what Python allocates."""

from __future__ import annotations

import gc
import os
import signal
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from cp_styles import (
    Causal,
    Dense,
    Documents,
    SequenceLayout,
    SlidingWindow,
    by_work,
    head_tail,
    per_document_head_tail,
    striped,
)
from cp_styles.bounded_cache import LIMIT, BoundedCache, LatestEntries, Remembered, another_cache, remembered, shared
from cp_styles.layout import layout_made_by
from cp_styles.plan import make_plan
from cp_styles.strategies.schedule import make_schedule
from cp_styles.strategies.ulysses import joined


@remembered
def text(size: int) -> str:
    return "x" * size


@remembered
def other_text(size: int) -> str:
    return "y" * size


def test_the_latest_of_all_functions_are_kept():
    with another_cache(limit=10_000) as cache:
        text(2000)
        one = cache.held  # the text, and what each entry takes
        assert 2000 < one < 3000
        other_text(2000)
        text(2001)
        assert 3 * one <= cache.held <= 3 * one + 10
        made = text.made, other_text.made
        text(2000)  # now the other function's is the oldest
        text(6000)
        assert cache.held <= cache.limit
        assert (text.made, other_text.made) == (made[0] + 1, made[1])
        text(2000)
        assert text.made == made[0] + 1
        other_text(2000)
        assert other_text.made == made[1] + 1
        text(50_000)  # what is larger than all stays, alone
        assert (len(cache.entries), text.made) == (1, made[0] + 2)
        text(50_000)
        assert text.made == made[0] + 2
        text(1)
        assert cache.held < one
        cache.clear()
        assert cache.held == 0


def test_what_entries_have_in_common_counts_once():
    @remembered
    def about(layout: SequenceLayout, number: int) -> tuple[SequenceLayout, int]:
        return layout, number

    layout = per_document_head_tail(20_000, 8, documents=(100,) * 200)
    with another_cache(limit=layout.nbytes + 5000) as cache:
        for number in range(300, 330):
            about(layout, number)
        assert layout.nbytes < cache.held <= cache.limit
        assert len(cache.entries) > 4
        cache.limit = 0
        text(1)
        assert cache.held < 1000  # the layout has gone with the last one that has it


def batch(draw: Random, ranks: int, documents: int) -> tuple[SequenceLayout, Documents]:
    lengths = tuple(draw.randrange(10, 2000) for _ in range(documents))
    mask = Documents(lengths)
    balancer = draw.choice(
        (
            head_tail,
            partial(striped, block=64),
            partial(by_work, mask=mask & Causal()),
            partial(per_document_head_tail, documents=lengths),
        )
    )
    return layout_made_by(balancer, sum(lengths), ranks), mask


def plan_layers(layout: SequenceLayout, mask: Documents, rank: int = 0) -> None:
    """What the layers of a model need for a batch: two masks, two strategies."""
    shape = 1, 8, layout.lengths[rank], 64
    rounds = tuple((distance,) for distance in range(1, layout.ranks))
    for layer in (mask & Causal(), mask & SlidingWindow(500)):
        make_schedule(layout, layout, layer.pattern, rank, False, False, False, rounds, 1, shape, shape, shape, 1)
        make_plan(joined(layout, 2), joined(layout, 2), layer, rank // 2)


@pytest.mark.parametrize(("ranks", "documents"), [(2, 28), (8, 40)])
def test_the_bytes_that_are_counted_are_those_that_are_taken(ranks: int, documents: int):
    """Within a third: equal tuples of numbers may be shared, and numbers below 257 take nothing."""
    draw = Random(0)
    plan_layers(*batch(draw, ranks, documents))  # what torch loads once
    gc.freeze()  # so that a collection looks at what is made here, and takes no second in a long run
    tracemalloc.start()
    try:
        with another_cache() as cache:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(4):
                plan_layers(*batch(draw, ranks, documents))
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
            taken += sum(storages(cache).values())  # which tracemalloc does not see
            assert taken / 1.33 <= cache.held <= 1.33 * taken
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def inside(value: object, seen: dict[int, object]) -> Iterator[object]:
    """All objects that an object refers to, but not those of the program."""
    if isinstance(value, type | Remembered) or type(value).__name__ in ("module", "function") or id(value) in seen:
        return
    seen[id(value)] = value
    yield value
    for each in gc.get_referents(value):
        yield from inside(each, seen)


def storages(cache: BoundedCache) -> dict[int, int]:
    tensors = [x for x in inside(cache.entries, {}) if isinstance(x, torch.Tensor)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def test_thousands_of_new_documents_stay_below_one_bound():
    """All functions' results together, while each alone would be far below the bound."""
    draw, names = Random(1), set()
    with another_cache(limit=2**20) as cache:
        for _ in range(20):
            plan_layers(*batch(draw, 4, 28))
            assert cache.held <= cache.limit
            names |= {key[0].__name__ for key in cache.entries}
        assert {"make_schedule", "_make_plan", "_uncut", "joined", "chunks_of", "_remembered"} <= names
        assert cache.held > cache.limit / 2


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tutorials/costs.md"])
def test_the_bound_is_that_of_the_pages(page: str):
    assert shared.limit == LIMIT
    assert f"{LIMIT >> 20} MiB" in (Path(__file__).parents[2] / page).read_text()


def test_nothing_of_a_caller_is_kept():
    """Not the tensor of a mask, by which a layout balances work or a plan is made."""
    dense = Dense(torch.rand(64, 64) > 0.5)
    tensor = weakref.ref(dense.tensor)
    with another_cache() as cache:
        layout = layout_made_by(partial(by_work, mask=dense & Causal()), 64, 2)
        assert layout == by_work(64, 2, mask=dense & Causal())
        assert layout_made_by(partial(by_work, mask=dense & Causal()), 64, 2) is layout
        make_plan(layout, layout, dense & Causal(), 0)
        assert len(cache.entries) > 3
        del dense
        assert tensor() is None
        found = [x for x in inside(cache.entries, {}) if isinstance(x, torch.Tensor)]
        assert {(x.dtype, x.device.type) for x in found} == {(torch.int64, "cpu")}


def test_threads_get_the_same_object():
    both = threading.Barrier(2)

    @remembered
    def slow(number: int) -> list[int]:
        both.wait(10)  # both compute it
        return [number]

    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(slow(7))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (slow.made, len(found)) == (2, 2)
    assert found[0] is found[1]


def test_a_fork_does_not_inherit_a_lock_that_is_taken():
    """As of a data loader's worker, forked while another thread has it."""
    with shared.lock:
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            os._exit(0 if text(3) == "xxx" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_another_cache_is_this_threads_alone():
    text(10)
    made = text.made
    with another_cache():
        text(10)
        assert text.made == made + 1
        thread = threading.Thread(target=text, args=(10,))
        thread.start()
        thread.join()
        assert text.made == made + 1
    text(10)
    assert text.made == made + 1


def test_a_table_of_the_latest_entries():
    table: LatestEntries[int, str] = LatestEntries(2)
    assert [table.put(number, str(number)) for number in range(3)] == ["0", "1", "2"]
    assert dict(table) == {1: "1", 2: "2"}
