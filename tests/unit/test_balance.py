"""The balance of work and of tokens between ranks: goals as numbers, on masks and documents of real sizes."""

from __future__ import annotations

import random
import sysconfig
from functools import cache, partial
from itertools import accumulate, combinations
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.masks import Causal, Chunked, Dense, Documents, Full, Mask, PerRow, PrefixLM, SlidingWindow
from cp_styles.masks.block_mask import FlexMask
from cp_styles.plan import attended_pairs, imbalance, make_plan

RANKS, LENGTH = 64, 131072
GOAL = 1.02  # by_work, largest over mean work


@cache
def library_documents(length: int, seed: int) -> tuple[int, ...]:
    """Packed documents as long as files of the standard library in tokens (4 bytes each), drawn with replacement.

    The last one is cut off where the sequence ends, as packing does. The files are those of whatever Python runs this;
    the goal has to hold for any of them.
    """
    sizes = [path.stat().st_size // 4 for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    sizes = [size for size in sizes if size]
    assert len(sizes) > 100
    draw = random.Random(seed)
    drawn: list[int] = []
    while sum(drawn) < length:
        drawn.append(draw.choice(sizes))
    ends = [min(end, length) for end in accumulate(drawn)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False) if end > start)


def documents_of(number: int) -> tuple[int, ...]:
    """Many short ones, few long ones."""
    draw = random.Random(number)
    return tuple(1 + int(draw.lognormvariate(6.8, 1.1)) for _ in range(number))


def tokens_differ_by(layout: SequenceLayout) -> int:
    return max(layout.lengths) - min(layout.lengths)


MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "full": Full(),
    "window 512": SlidingWindow(511, 0),
    "window 4096": SlidingWindow(4095, 0),
    "window both sides": SlidingWindow(1000, 1000),
    "chunks": Causal() & Chunked(8192),
    "prefix": PrefixLM(5000),
    **{f"documents {seed}": Documents(library_documents(LENGTH, seed)) for seed in range(2)},
    **{f"causal documents {seed}": Documents(library_documents(LENGTH, seed)) & Causal() for seed in range(3)},
    "windowed documents": Documents(library_documents(LENGTH, 3)) & SlidingWindow(2047, 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_by_work_at_64_ranks(name: str):
    """The work within 2 %, and every rank as many tokens as any other, to a block: the rest of the model waits too."""
    mask = MASKS[name]
    layout = by_work(LENGTH, RANKS, mask=mask)
    assert imbalance(layout, mask) <= GOAL
    assert tokens_differ_by(layout) <= LENGTH // (16 * RANKS)


@pytest.mark.parametrize("ranks", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("length", [8192, 131071])
def test_by_work_on_other_sizes(ranks: int, length: int):
    """Where lengths do not divide the last block is short, which costs at most a block of tokens."""
    for mask in (Causal(), SlidingWindow(100, 0)):
        layout = by_work(length, ranks, mask=mask)
        assert (layout.length, layout.ranks) == (length, ranks)
        # Blocks of 1/16 of a rank; a short last one leaves its rank up to a block short of work.
        assert imbalance(layout, mask) <= 1 + 1 / 16
        assert tokens_differ_by(layout) <= -(-length // (16 * ranks))


def test_smaller_blocks_balance_better():
    mask = MASKS["causal documents 0"]
    found = [imbalance(by_work(LENGTH, RANKS, mask=mask, block=block), mask) for block in (512, 128, 32)]
    assert found == sorted(found, reverse=True)
    assert found[-1] <= 1.005


def test_by_work_is_never_far_from_what_any_layout_can_do():
    """Against brute force: two ranks, every deal of equally many blocks; greedy is within 4/3 of the best (Graham)."""
    draw = random.Random(1)
    for _ in range(10):
        lengths = tuple(draw.randint(1, 4) for _ in range(3))
        length, mask = sum(lengths), Documents(lengths) & Causal()
        blocks = range(length)
        best = min(
            imbalance(
                SequenceLayout.from_chunks([[(b, b + 1) for b in blocks if (b in mine) == own] for own in (1, 0)]), mask
            )
            for mine in map(set, combinations(blocks, length // 2))
        )
        assert imbalance(by_work(length, 2, mask=mask, block=1), mask) <= 4 / 3 * best


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_head_tail_causal(ranks: int):
    """Equal to the block where the length divides, else to a row of work; the contiguous cut is what it saves from."""
    for length in (65536, 65537, 131071):
        layout = head_tail(length, ranks)
        assert imbalance(layout, Causal()) <= 1.001
        assert tokens_differ_by(layout) <= 1
    # (P^2 - (P-1)^2) / P^2 of the triangle on the last rank: 2 - 1/P, field.md's limit P / (2 P - 1).
    assert imbalance(contiguous(65536, ranks), Causal()) == pytest.approx(2 - 1 / ranks, rel=1e-3)


def test_per_document_head_tail_at_64_ranks():
    """Its remainders weigh where documents are not much longer than 128 pieces; by_work is there for those."""
    lengths = library_documents(LENGTH, 0)
    mask = Documents(lengths) & Causal()
    layout = per_document_head_tail(LENGTH, RANKS, documents=lengths)
    assert imbalance(layout, mask) <= 1.02
    assert tokens_differ_by(layout) <= 1
    # What the mask that it is not for does to it: head_tail knows nothing of documents.
    assert imbalance(head_tail(LENGTH, RANKS), mask) > 1.2


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("spread", ["uniform", "sorted", "equal", "log-normal", "library"])
def test_tiles_of_a_thousand_documents_grow_with_what_a_rank_attends_to(spread: str, ranks: int):
    """Documents x ranks would be 64,000 tiles; 17,797 they were when every document was cut over all 64 ranks."""
    draw = random.Random(7)
    lengths = {
        "uniform": tuple(draw.randint(100, 3200) for _ in range(1000)),
        "sorted": tuple(sorted(draw.randint(100, 3200) for _ in range(1000))),
        "equal": (1650,) * 1000,
        "log-normal": tuple(1 + int(draw.lognormvariate(6.8, 1.1)) for _ in range(1000)),
        "library": library_documents(1_650_000, 7),
    }[spread]
    mask, length = Documents(lengths) & Causal(), sum(lengths)
    layout = per_document_head_tail(length, ranks, documents=lengths)
    assert imbalance(layout, mask) <= 1.02
    assert tokens_differ_by(layout) <= 1
    for small_tiles in (True, False):
        for rank in range(0, ranks, 7):
            plan = make_plan(layout, layout, mask, rank, small_tiles=small_tiles)
            assert sum(len(part.tiles) for part in plan.parts) <= 500


@pytest.mark.parametrize(
    ("number", "ranks", "tiles", "sources"), [(28, 8, 13, 4), (28, 64, 47, 38), (200, 64, 29, 21), (1000, 64, 50, 19)]
)
def test_documents_that_are_cut_lie_on_few_ranks(number: int, ranks: int, tiles: int, sources: int):
    """28 documents on 64 ranks were 312 tiles and all 63 other ranks, and 1.012."""
    lengths = documents_of(number)
    mask, length = Documents(lengths) & Causal(), sum(lengths)
    layout = per_document_head_tail(length, ranks, documents=lengths)
    assert imbalance(layout, mask) <= 1.006
    assert tokens_differ_by(layout) <= 1
    for small_tiles in (True, False):
        plans = [make_plan(layout, layout, mask, rank, small_tiles=small_tiles) for rank in range(ranks)]
        assert max(sum(len(part.tiles) for part in plan.parts) for plan in plans) <= tiles
        assert max(sum(part.count > 0 for part in plan.parts if part.source != plan.rank) for plan in plans) <= sources


@pytest.mark.parametrize(
    "mask",
    [
        Documents((30, 34)),
        Causal() & Documents((30, 34)),
        PerRow((Documents((64,)), Documents((30, 34)))),
        FlexMask(create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)),
        Dense(torch.ones(64, 64, dtype=torch.bool)),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_a_mask_for_a_shorter_sequence(mask: Mask):
    """A longer one may be right: the keys of a cross-attention."""
    balancer = partial(by_work, mask=mask)
    for act in (lambda: balancer(100, 2), lambda: imbalance(head_tail(100, 2), mask)):
        with pytest.raises(ValueError, match=r"mask is for 64 positions, the layout for 100.*A mask of another length"):
            act()
    assert by_work(50, 2, mask=mask).length == 50
    if not isinstance(mask, Dense):  # of which a layout needs nothing
        with pytest.raises(ValueError, match="mask is for 64 positions"):
            layout_made_by(balancer, 100, 2)


@pytest.mark.parametrize("number", [28, 200, 1000])
def test_by_work_on_documents_of_all_lengths(number: int):
    """Few heavy blocks among many light ones: dealt one by one, each to who has least, they leave 1.043."""
    mask = Documents(documents_of(number)) & Causal()
    layout = by_work(mask.length or 0, RANKS, mask=mask)
    assert imbalance(layout, mask) <= 1.01
    assert tokens_differ_by(layout) <= -(-layout.length // (16 * RANKS))


@pytest.mark.parametrize("name", ["causal", "window 512", "causal documents 0"])
def test_imbalance_counts_pairs(name: str):
    """Largest over mean of what the ranks' plans compute, with the whole's work as their sum."""
    mask, layout = MASKS[name], partial(by_work, mask=MASKS[name])(LENGTH, 8)
    work = [attended_pairs(layout, layout, mask, rank) for rank in range(8)]
    whole = contiguous(LENGTH, 1)
    assert sum(work) == attended_pairs(whole, whole, mask, 0)
    assert imbalance(layout, mask) == pytest.approx(max(work) / (sum(work) / 8))
