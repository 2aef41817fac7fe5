"""BlockMasks as masks: the result of their analysis, and plans that compute every attended pair once."""

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, noop_mask

from cp_styles.layouts import by_work, contiguous, head_tail
from cp_styles.masks import Causal, Documents, Mask, PerRow, SlidingWindow
from cp_styles.masks.block_mask import FlexMask
from cp_styles.plan import attended_pairs, imbalance, make_plan
from cp_styles.plan.tiles import Cover
from tests.layouts import layouts
from tests.ranks.flex_case import causal, of_documents, sinks_and_window, window
from tests.unit.test_plan import check_plans, pairs_of, row_numbers


def made(mask_mod, length: int, *, batch=None, heads=None, block=16, keys: int | None = None) -> BlockMask:
    return create_block_mask(mask_mod, batch, heads, length, keys or length, device="cpu", BLOCK_SIZE=block)


def asked(mask_mod, length: int, batch: int = 1, heads: int = 1) -> torch.Tensor:
    """mask_mod pair by pair: bool ``[B, H, L, L]``."""
    numbers = [torch.arange(size) for size in (batch, heads, length, length)]
    return mask_mod(*torch.meshgrid(*numbers, indexing="ij")).expand(batch, heads, length, length)


LENGTHS = (40, 1, 25, 30)
BANDS = {
    "causal": (causal, Causal()),
    "documents": (of_documents(LENGTHS), Documents(LENGTHS)),
    "causal documents": (and_masks(causal, of_documents(LENGTHS)), Documents(LENGTHS) & Causal()),
    "window": (window(9), SlidingWindow(8, 0)),
}


@pytest.mark.parametrize("block", [8, 128, (32, 16), (16, 64)])
@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_recognized_and_planned_as_one(name: str, block):
    mask_mod, ours = BANDS[name]
    mask = FlexMask(made(mask_mod, 96, block=block))
    assert not mask.has_bias
    assert not mask.grids
    check_plans(head_tail(96, 3), head_tail(96, 3), mask, asked(mask_mod, 96)[0, 0])
    for rank in range(3):
        assert make_plan(*[head_tail(96, 3)] * 2, mask, rank) == make_plan(*[head_tail(96, 3)] * 2, ours, rank)


def check_block_plans(layout, mask: Mask, allowed: torch.Tensor, block: tuple[int, int]) -> None:
    """``allowed`` is bool ``[B, H, L, L]``."""
    union = allowed.any(0).any(0)
    if not mask.grids:
        assert (allowed == union).all()
        return check_plans(layout, layout, mask, union)
    positions = torch.arange(layout.length)
    for rank in range(layout.ranks):
        plan = make_plan(layout, layout, mask, rank)
        q = layout.positions(rank)
        for source, part in enumerate(plan.parts):
            kv = layout.positions(source)
            visible = union[q][:, kv]
            counts = sum((pairs_of(tile, part, visible) for tile in part.tiles), torch.zeros_like(visible.long()))
            assert torch.equal(counts, visible.long())
            # Needed are the key blocks that some query block of this rank attends to, and no row beside them.
            at = (positions[:, None] // block[0], positions[None, :] // block[1])
            blocks = torch.zeros(int(at[0].max()) + 1, int(at[1].max()) + 1, dtype=torch.int64)
            blocks.index_put_(at, union.long(), accumulate=True)
            needed = (blocks > 0)[q // block[0]].any(0)[kv // block[1]] if len(q) else torch.zeros(len(kv)) > 0
            got = torch.zeros(len(kv), dtype=torch.bool)
            got[row_numbers(part.rows)] = True
            assert not (got & ~needed).any()
            assert not (visible.any(0) & ~got).any()
            expected = () if source == rank else part.rows
            assert make_plan(layout, layout, mask, source).sends[rank] == expected
            for tile in part.tiles:
                assert 0 <= tile.q[0] < tile.q[1] <= len(q)
                assert 0 <= tile.kv[0] < tile.kv[1] <= part.count
                assert tile.cover is not Cover.CAUSAL
                rows = kv[row_numbers(part.rows)][tile.kv[0] : tile.kv[1]]
                seen = allowed[:, :, q[tile.q[0] : tile.q[1]]][:, :, :, rows]
                if tile.cover is Cover.FULL:
                    assert seen.all()
                else:
                    bias = mask.bias(q[tile.q[0] : tile.q[1]], rows)
                    inside = mask.allowed(q[tile.q[0] : tile.q[1]], rows)
                    assert torch.equal((bias == 0) & inside, seen.expand(*bias.shape))
    return None


@settings(max_examples=20)
@given(
    layouts(),
    st.sampled_from([1, 2, 4, (4, 2), (2, 8), 16]),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    st.integers(0, 9),
)
def test_every_attended_pair_once_under_random_masks(layout, block, shape, seed):
    length = layout.length
    if not length:
        return
    drawn = torch.rand(*shape, length, length, generator=torch.Generator().manual_seed(seed))
    # Empty, full and partial blocks, and rows that see nothing.
    coarse = torch.rand(1, 1, -(-length // 4), -(-length // 4), generator=torch.Generator().manual_seed(seed + 100))
    drawn = drawn * 0.5 + coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)[:, :, :length, :length] * 2
    table = (drawn > 0.75) & (torch.arange(length) % 7 != 3)[:, None]
    batch, heads = shape

    def mask_mod(b, h, q, kv):
        return table[b, h, q, kv]

    block_mask = made(mask_mod, length, batch=batch, heads=heads, block=block)
    check_block_plans(layout, FlexMask(block_mask), table, block_mask.BLOCK_SIZE)


@pytest.mark.parametrize("block", [16, (32, 16), 128])
def test_large_plans_have_few_tiles_and_exact_ones(block):
    mask = FlexMask(made(sinks_and_window, 600, block=block))
    assert mask.grids
    allowed = asked(sinks_and_window, 600)
    for layout in (contiguous(600, 3), head_tail(600, 2), by_work(600, 4, mask=mask)):
        check_block_plans(layout, mask, allowed, mask.block_mask.BLOCK_SIZE)
        tiles = sum(
            len(part.tiles) for rank in range(layout.ranks) for part in make_plan(layout, layout, mask, rank).parts
        )
        assert tiles < 60


def holes(b, h, q, kv):
    """No band, and most blocks full."""
    return (q >= kv) | (kv % 5 == 0)


@pytest.mark.parametrize("mask_mod", [sinks_and_window, holes])
@pytest.mark.parametrize("both_sides", [None, 30])
def test_with_a_band_beside(mask_mod, both_sides: int | None):
    mods, mask = [mask_mod, of_documents((250, 50))], FlexMask(made(mask_mod, 300)) & Documents((250, 50))
    if both_sides:
        mods.append(lambda b, h, q, kv: (q - kv).abs() <= both_sides)
        mask = mask & SlidingWindow(both_sides, both_sides)
    for layout in (contiguous(300, 1), contiguous(300, 2), head_tail(300, 3)):
        check_block_plans(layout, mask, asked(and_masks(*mods), 300), (16, 16))


def test_work_is_counted_and_balanced():
    allowed = asked(sinks_and_window, 300)[0, 0]
    mask = FlexMask(made(sinks_and_window, 300))
    layout = contiguous(300, 3)
    assert [attended_pairs(layout, layout, mask, rank) for rank in range(3)] == [
        int(allowed[layout.positions(rank)].sum()) for rank in range(3)
    ]
    uneven = made(lambda b, h, q, kv: (q >= kv) | (kv % 5 == 0), 300)
    assert (
        imbalance(by_work(300, 3, mask=FlexMask(uneven)), FlexMask(uneven)) < 1.02 < imbalance(layout, FlexMask(uneven))
    )


def test_blocks_count_where_mask_mod_says_more():
    """As FlexAttention's kernels have it: absent blocks are absent, full ones full, whatever mask_mod says."""
    number = torch.tensor([[[1, 1]]])
    block_mask = BlockMask.from_kv_blocks(
        number, torch.tensor([[[[0, 0], [0, 0]]]]), number, torch.tensor([[[[1, 0], [1, 0]]]]), 8, causal
    )
    allowed = torch.zeros(1, 1, 16, 16, dtype=torch.bool)
    allowed[:, :, :, 8:] = True
    allowed[:, :, :, :8] = asked(causal, 16)[..., :8]
    assert torch.equal(FlexMask(block_mask).pattern.work(torch.arange(16), 16), allowed[0, 0].sum(-1))
    check_block_plans(head_tail(16, 2), FlexMask(block_mask), allowed, (8, 8))
    # Partial blocks of which mask_mod leaves all are full ones: nobody is asked again.
    noop = BlockMask.from_kv_blocks(number, torch.tensor([[[[1, 0], [0, 1]]]]), BLOCK_SIZE=8, mask_mod=noop_mask)
    assert not FlexMask(noop).has_bias


def test_rows_of_the_batch_with_bands_of_their_own():
    ids = torch.tensor([[0] * 9 + [1] * 23, [0] * 20 + [1] * 12])
    block_mask = made(lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv), 32, batch=2)
    mask = FlexMask.per_row(block_mask)
    assert isinstance(mask, PerRow)
    layout = head_tail(32, 2)
    for row, lengths in enumerate(((9, 23), (20, 12))):
        assert make_plan(layout, layout, mask.row(row), 0) == make_plan(
            layout, layout, Documents(lengths) & Causal(), 0
        )
    assert FlexMask(block_mask).grids, "the same as one mask, for all rows at once"


def test_compared_by_what_is_in_it_and_nothing_kept_alive():
    tables = [torch.ones(32, 32, dtype=torch.bool).tril()]
    block_mask = made(partial(lambda table, b, h, q, kv: table[q, kv], tables[0]), 32)
    mask = FlexMask(block_mask)
    assert mask == FlexMask(block_mask)
    assert hash(mask) == hash(FlexMask(block_mask))
    assert mask.pattern == FlexMask(made(causal, 32, block=8)).pattern
    assert mask.pattern != FlexMask(made(sinks_and_window, 32)).pattern
    make_plan(*[contiguous(32, 2)] * 2, mask, 0)
    gone = weakref.ref(tables.pop())
    del block_mask, mask
    gc.collect()
    assert gone() is None


def test_mistakes():
    with pytest.raises(TypeError, match="takes a BlockMask of the whole sequence"):
        FlexMask(causal)  # pyright: ignore[reportArgumentType]
    mask = FlexMask(made(causal, 32, batch=2, heads=3))
    for shape, message in (
        ((2, 3, 16, 16), "made for 32 queries and 32 keys, the whole sequence has 16"),
        ((3, 3, 32, 32), "made for 2 rows of the batch, the attention has 3"),
        ((2, 6, 32, 32), "made for 3 query heads, the attention has 6"),
    ):
        with pytest.raises(ValueError, match=message):
            mask.check(shape)
