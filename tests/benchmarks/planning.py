"""What a batch costs before its first kernel: python tests/benchmarks/planning.py.

Its layout, which every rank makes alike, and then a rank's own plan, as CPU time of one thread, with nothing
remembered: of three ranks the one that takes longest, of some runs the one that takes least. ``found`` is what the plan
costs once it is there, as it is at every layer but the first.
``tiles`` are kernel calls of one forward, ``from`` is from how many other ranks keys come.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from cp_styles import Causal, Documents, SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles._lib.bounded_cache import another_cache
from cp_styles.masks import Mask
from cp_styles.plan import imbalance, make_plan

_RUNS = 7


class Exact(NamedTuple):
    """What every machine finds alike."""

    tiles: int
    sources: int
    imbalance: float


class Times(NamedTuple):
    layout: float
    plan: float
    found: float


def seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()  # the machine may have other things to do
    function()
    return time.thread_time() - start


def some_ranks(layout: SequenceLayout) -> list[int]:
    return sorted({0, layout.ranks // 2, layout.ranks - 1})


def exact(layout: SequenceLayout, mask: Mask) -> Exact:
    plans = [make_plan(layout, layout, mask, rank) for rank in some_ranks(layout)]
    return Exact(
        max(sum(len(part.tiles) for part in plan.parts) for plan in plans),
        max(sum(part.count > 0 for part in plan.parts if part.source != plan.rank) for plan in plans),
        imbalance(layout, mask),
    )


def times(make_layout: Callable[[], SequenceLayout], mask: Mask) -> Times:
    layout = make_layout()
    ranks = some_ranks(layout)

    def from_nothing(rank: int) -> tuple[float, float]:
        with another_cache():
            return seconds(make_layout), seconds(lambda: make_plan(layout, layout, mask, rank))

    costs = [min((from_nothing(rank) for _ in range(_RUNS)), key=sum) for rank in ranks]
    make_plan(layout, layout, mask, ranks[-1])
    return Times(*max(costs, key=sum), seconds(lambda: make_plan(layout, layout, mask, ranks[-1])))


def documents_of(number: int) -> tuple[int, ...]:
    """Lengths as of files: many short ones, few long ones."""
    draw = random.Random(number)
    return tuple(1 + int(draw.lognormvariate(6.8, 1.1)) for _ in range(number))


def layouts(documents: tuple[int, ...], mask: Mask) -> dict[str, Callable[[int, int], SequenceLayout]]:
    return {
        "per document": partial(per_document_head_tail, documents=documents),
        "by work": partial(by_work, mask=mask),
        "head-tail": head_tail,
        "contiguous": contiguous,
        "striped": striped,
        "stripes of 16": partial(striped, block=16),
    }


def cases() -> Iterator[tuple[str, str, Callable[[], SequenceLayout], Mask]]:
    """The sequence, the layout's name, what makes the layout, the mask."""
    for length, ranks in ((2**17, 8), (2**20, 64), (2**20, 1024), (10 * 2**20, 1024)):
        for name, balancer in (("head-tail", head_tail), ("striped", striped)):
            yield f"{length >> 10:,}K causal tokens", name, partial(balancer, length, ranks), Causal()
    yield "1,024K causal tokens", "stripes of 128", partial(striped, 2**20, 64, block=128), Causal()
    for number, ranks in ((28, 8), (28, 64), (200, 64), (1000, 64)):
        documents = documents_of(number)
        mask, length = Documents(documents) & Causal(), sum(documents)
        for name, balancer in layouts(documents, mask).items():
            yield f"{number:,} documents, {length:,} tokens", name, partial(balancer, length, ranks), mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'ms':<64}{'layout':>9}{'plan':>9}{'found':>9}{'tiles':>7}{'from':>6}{'imbalance':>11}")
    for sequence, name, make_layout, mask in cases():
        layout = make_layout()
        made, what = exact(layout, mask), f"{sequence}, {layout.ranks} ranks, {name}"
        milliseconds = "".join(f"{1e3 * value:>9.2f}" for value in times(make_layout, mask))
        print(f"{what:<64}{milliseconds}{made.tiles:>7}{made.sources:>6}{made.imbalance:>11.3f}", flush=True)


if __name__ == "__main__":
    main()
