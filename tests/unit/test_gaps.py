"""Masks with gaps: exactly the rows that some query attends to are received, and what is received is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, reduce

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles.layouts import SequenceLayout, contiguous, head_tail, striped
from cp_styles.masks import Causal, Documents, Full, Mask, PrefixLM, SlidingWindow
from cp_styles.masks.algebra import UNBOUNDED
from cp_styles.masks.block_mask import FlexMask
from cp_styles.plan import make_plan
from tests.layouts import layouts
from tests.oracle import Dilated
from tests.unit.test_plan import Between, check_tiles


@dataclass(frozen=True)
class Drawn(Mask):
    """Pairs in any order, of which the bias tells. The answer to a plan is its own."""

    seed: int
    length: int = 96

    @property
    def pairs(self) -> torch.Tensor:
        return pairs_of(self.seed, self.length)

    bounds, has_bias, additive = Full.bounds, True, False

    def bias(self, q_positions_L, kv_positions_M):
        seen = self.pairs[q_positions_L][:, kv_positions_M]
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))

    def needed(self, q_positions_L, kv_positions_M):
        return self.pairs[q_positions_L][:, kv_positions_M].any(0)


@cache
def pairs_of(seed: int, length: int) -> torch.Tensor:
    """Some pairs; some queries see nothing, and some keys are seen by none."""
    drawn = torch.rand(length, length, generator=torch.Generator().manual_seed(seed)) < 0.02 + 0.3 * (seed % 3 == 0)
    return drawn & (torch.arange(length) % 5 != 3)[:, None] & (torch.arange(length) % 7 != 2)


def drawn_blocks(length: int, seed: int, block: int) -> FlexMask:
    """Blocks that are full or absent: what a plan knows of a BlockMask."""
    chosen = pairs_of(seed, 96)[:: max(block, 1), :: max(block, 1)]

    def mask_mod(b, h, q, kv):
        return chosen[q // block, kv // block]

    return FlexMask(create_block_mask(mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=block))


def dense(mask: Mask, length: int) -> torch.Tensor:
    """Pair by pair: bool ``[S, S]``."""
    positions = torch.arange(length)
    seen, bias = mask.allowed(positions, positions), mask.bias(positions, positions)
    return seen if bias is None else seen & (bias.broadcast_to(1, 1, length, length)[0, 0] == 0)


def check(q_layout: SequenceLayout, mask: Mask, seen: torch.Tensor) -> None:
    plans = [make_plan(q_layout, q_layout, mask, rank) for rank in range(q_layout.ranks)]
    check_tiles(plans, q_layout, q_layout, mask, seen)


SETS = st.sampled_from(["dilated", "dilated both ways", "drawn", "blocks"])
BANDS = st.sampled_from([None, Causal(), SlidingWindow(4, 9), PrefixLM(7), "documents"])


@settings(max_examples=60)
@given(layouts(), st.lists(SETS, min_size=1, max_size=2), BANDS, st.integers(0, 9), st.integers(1, 5))
@example(striped(32, 2), ["dilated"], None, 3, 2)
@example(head_tail(31, 3), ["dilated both ways"], Causal(), 3, 3)
@example(striped(24, 3), ["drawn", "blocks"], "documents", 0, 2)
@example(contiguous(30, 4), ["blocks"], SlidingWindow(4, 9), 0, 4)
def test_the_rows_that_a_dense_mask_needs_travel_and_no_others(
    layout: SequenceLayout, kinds: list[str], band: Mask | str | None, seed: int, step: int
):
    length = layout.length
    if not length:
        return
    make = {
        "dilated": lambda: Dilated(3 + 2 * seed, step),
        "dilated both ways": lambda: Dilated(seed, step, both=True),
        "drawn": lambda: Drawn(seed),
        "blocks": lambda: drawn_blocks(length, seed, step),
    }
    masks = [make[kind]() for kind in kinds]
    if band == "documents":
        band = Documents((length // 3, length - length // 3)) if length > 2 else None
    seen = torch.stack([dense(mask, length) for mask in (*masks, band or Full())]).all(0)
    check(layout, reduce(Mask.__and__, masks, band or Full()), seen)


@pytest.mark.parametrize(("documents", "received"), [(None, 0), ((32, 31), 0), ((11, 52), 0)])
def test_a_dilated_window_of_two_in_stripes_of_two_ranks_receives_nothing(documents, received: int):
    """Each rank holds every second position, and attends to every second one: as an interval, 31 rows."""
    mask, layout = Dilated(62, 2), striped(63, 2)
    mask = mask if documents is None else mask & Documents(documents)
    assert [make_plan(layout, layout, mask, rank).received_rows for rank in range(2)] == [received] * 2
    assert [make_plan(layout, layout, SlidingWindow(62), rank).received_rows for rank in range(2)] == [31, 31]


@dataclass(frozen=True, eq=False)
class Counted(Dilated):
    """Notes of how many pairs it is asked, and equals no other mask, so that nothing of it is remembered."""

    pairs: list[int] = field(default_factory=list)

    def allowed(self, q_positions_L, kv_positions_M):
        self.pairs.append(q_positions_L.numel() * kv_positions_M.numel())
        return super().allowed(q_positions_L, kv_positions_M)


@pytest.mark.parametrize(
    ("cut", "received"),
    # The keys in front of each chunk that are in its window. In stripes those of three ranks of seven, but for keys
    # behind the last query of a document.
    [(contiguous, 4094), (head_tail, 2 * 4094), (striped, 3 * 2**14 - 4)],
)
def test_long_plans_look_at_few_pairs(cut, received: int):
    """Pairs of 2^14 queries are made in parts that fit into memory. A key that is seen is not asked for again."""
    mask, layout = Counted(4095, 2), cut(2**17, 8)
    plan = make_plan(layout, layout, mask & Documents((2**16, 2**16)), 3)
    assert plan.received_rows == received
    assert max(mask.pairs) <= 2**21
    assert sum(mask.pairs) <= 2**29


def test_queries_of_a_block_that_look_at_keys_far_apart():
    """Rank 0 has the queries 0 and 2 of one block, which see the keys 1 and 9 of rank 1. Query 4 looks at key 3, in a
    block that it does not see."""
    blocks = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1]], dtype=torch.bool)
    sparse = create_block_mask(lambda b, h, q, kv: blocks[q // 4, kv // 4], None, None, 12, 12, "cpu", BLOCK_SIZE=4)
    band = Between((1, 0, 9, 0, 3, *[0] * 7), (2, 0, 10, 0, 4, *[0] * 7))
    mask, layout = FlexMask(sparse) & band, striped(12, 2)
    check(layout, mask, dense(FlexMask(sparse), 12) & dense(band, 12))
    assert make_plan(layout, layout, mask, 0).received_rows == 2


@dataclass(frozen=True)
class EvenKeys(Mask):
    """Says which keys are needed, and no pairs, as a selection does."""

    bounds, has_bias = Full.bounds, True

    def needed(self, q_positions_L, kv_positions_M):
        return kv_positions_M % 2 == 0


@dataclass(frozen=True)
class Forgetful(Dilated):
    """Its own answer leaves out one key, for the queries of one rank."""

    key: int = 4
    least: int = 6

    def needed(self, q_positions_L, kv_positions_M):
        forgets = (kv_positions_M == self.key) & bool(q_positions_L[0] >= self.least)
        return super().needed(q_positions_L, kv_positions_M) & ~forgets


@dataclass(frozen=True)
class Wide(Dilated):
    """Allows pairs of a query with keys after it, which are outside of its bounds."""

    def allowed(self, q_positions_L, kv_positions_M):
        return (q_positions_L[:, None] - kv_positions_M) % self.step == 0


@dataclass(frozen=True)
class Widened(Wide):
    def bounds(self, q_positions_L):
        return torch.zeros_like(q_positions_L), torch.full_like(q_positions_L, UNBOUNDED)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mask_whose_own_answer_leaves_out_a_key(rank: int):
    """All ranks say so, though the messages of one alone would lack a row."""
    layout = contiguous(12, 2)
    message = "Forgetful.needed leaves out the key at position 4, to which the query at position 6 attends by Forgetful"
    for mask in (Forgetful(6, 2), Forgetful(6, 2) & Causal()):
        with pytest.raises(ValueError, match=message):
            make_plan(layout, layout, mask, rank)
    assert make_plan(layout, layout, Dilated(6, 2), 1).received_rows == 6  # the remedy


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mask_that_allows_pairs_outside_of_its_bounds(rank: int):
    layout, message = contiguous(12, 2), "Wide.bounds leaves out the key at position 2, to which the query at "
    for mask in (Wide(6, 2), Wide(6, 2) & Causal()):
        with pytest.raises(ValueError, match=message + r"position 0 attends .* begin allowed with super\(\).allowed"):
            make_plan(layout, layout, mask, rank)
    # The remedies: every second key of all positions, and of the bounds.
    assert make_plan(layout, layout, Widened(6, 2), rank).received_rows == 6
    assert make_plan(layout, layout, Dilated(6, 2), rank).received_rows == 6 * rank


@pytest.mark.parametrize("query", [0, 251, 700])
def test_every_query_of_a_short_plan_is_looked_at(query: int):
    class Once(Dilated):
        def allowed(self, q_positions_L, kv_positions_M):
            once = (q_positions_L[:, None] == query) & (kv_positions_M == 1000)
            return super().allowed(q_positions_L, kv_positions_M) | once

    with pytest.raises(ValueError, match=f"key at position 1000, to which the query at position {query} attends"):
        make_plan(contiguous(1024, 3), contiguous(1024, 3), Once(6, 2), 1)


def test_a_conjunction_asks_every_part():
    keys = torch.arange(8)
    assert (EvenKeys() & Causal()).needed(torch.tensor([2, 5]), keys).nonzero().flatten().tolist() == [0, 2, 4]
    assert (EvenKeys() & Dilated(6, 3)).needed(torch.tensor([5, 7]), keys).nonzero().flatten().tolist() == [2, 4]
    assert not EvenKeys().needed(keys[:0], keys[:0]).any()
