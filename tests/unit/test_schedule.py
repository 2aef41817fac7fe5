"""The schedules of all ranks together: what one sends is what another expects, in the same order."""

import random
from dataclasses import replace

import pytest
import torch

from cp_styles import Causal, Documents, Full, SlidingWindow, contiguous, head_tail, striped
from cp_styles._lib.bounded_cache import another_cache
from cp_styles.kernels.sdpa import CUDA_FLASH
from cp_styles.masks import Mask
from cp_styles.plan.tiles import Cover
from cp_styles.strategies.moving_kv import _Queries
from cp_styles.strategies.schedule import Schedule, _make_block, make_schedule

LENGTH = 48
MASKS = (Causal(), Full(), SlidingWindow(5, 0), Documents((7, 20, 21)) & Causal())
LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail, "striped": striped}


def rounds_of(ranks: int, width: int) -> tuple[tuple[int, ...], ...]:
    distances = tuple(range(1, ranks))
    return tuple(distances[first : first + width] for first in range(0, len(distances), width))


def schedules(layout, mask: Mask, ranks: int, width: int, keep: int, heads: tuple[int, int]) -> list[Schedule]:
    cut, made = layout(LENGTH, ranks), []
    for rank in range(ranks):
        q_shape, k_shape = ((1, count, cut.lengths[rank], 4) for count in heads)
        rounds = rounds_of(ranks, width)
        how = mask.pattern, rank, False, False, True, rounds, keep
        made.append(make_schedule(cut, cut, *how, q_shape, k_shape, k_shape, 1))
    return made


CASES = [
    (layout, mask, ranks, width, keep, heads)
    for layout in LAYOUTS
    for mask in MASKS
    for ranks in (2, 3, 5)
    for width in (1, 2, 4)
    for keep in (0, 1, 2, 9)
    for heads in ((4, 4), (4, 2), (6, 1))
]


@pytest.mark.parametrize("part", range(4))
def test_messages_of_two_ranks_match_by_order(part: int, monkeypatch):
    monkeypatch.setattr("cp_styles.strategies.schedule._MOST_JOINED", (0, 100, 2**19, 2**19)[part])
    with another_cache():
        check_messages_of_two_ranks(part)


def check_messages_of_two_ranks(part: int) -> None:
    for layout, mask, ranks, width, keep, heads in random.Random(part).sample(CASES, 40):
        made = schedules(LAYOUTS[layout], mask, ranks, width, keep, heads)
        for way in ("forward", "backward"):
            steps = [getattr(each, way) for each in made]
            assert len({len(each) for each in steps}) == 1  # every rank takes every step
            for number, together in enumerate(zip(*steps, strict=True)):
                assert {(step.number, step.travels) for step in together} == {(number, together[0].travels)}
                going = {(rank, peer): block for rank, step in enumerate(together) for peer, block in step.sends}
                coming = [
                    (source, rank) for rank, step in enumerate(together) for source in step.sources if source != rank
                ]
                assert sorted(coming) == sorted(going)
                for rank, step in enumerate(together):
                    for index, (from_sources, sizes, block, _) in enumerate(step.arrivals):
                        assert block.heads == (0, heads[1])
                        sources = [*dict.fromkeys(from_sources)]
                        if (sent := [going[source, rank] for source in sources if source != rank]) or step.travels:
                            for source, each in zip(sources, sent, strict=True):
                                of_source = zip(from_sources, sizes, strict=True)
                                assert tuple(size for other, size in of_source if other == source) == each.sizes
                            assert block.rows == sum((each.rows for each in sent), ())
                            assert block.size == sum(each.size for each in sent) == sum(sizes)
                            # Rows of all sources are where the block says.
                            for side, place in enumerate(block.places((0, heads[1]), (0, block.shape[1]))):
                                first = sum(sizes[: len(sizes) // 2]) if side and not block.joined else 0
                                assert place.offset == first + (block.dims[0] if side and block.joined else 0)
                        # Each arrival is computed at once, or in groups of its heads.
                        parts = [keys for keys in step.keys if keys.arrival == index]
                        assert [head for keys in parts for head in range(*keys.block.heads)] == list(range(heads[1]))
                        for keys in parts:
                            assert (keys.source, keys.block.rows) == (sources[0], block.rows)
                        if way == "backward":
                            assert len(sources) == 1
                if way == "forward":
                    assert not any(step.gradients for step in together)
                    continue
                # Their gradients go home in the same step, in one order on all ranks.
                home, back = {}, {}
                orders = []
                for rank, step in enumerate(together):
                    assert [each.keys for each in step.gradients if each.keys is not None] == list(step.keys)
                    for each in step.gradients:
                        if each.keys is not None and each.source != rank:
                            home.setdefault((each.source, rank), []).append(
                                (each.keys.block.heads, each.keys.block.rows)
                            )
                        if each.block is not None:
                            back.setdefault((rank, each.peer), []).append((each.block.heads, each.block.rows))
                    orders.append([(rank - each.source) % ranks for each in step.gradients])
                assert home == back
                assert sorted(home) == sorted(coming)
                merged = sorted({distance for order in orders for distance in order})
                assert all(list(dict.fromkeys(order)) == [d for d in merged if d in order] for order in orders)
                assert all(order == sorted(order, key=merged.index) for order in orders)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [(0, 1), (1, 3)])
@pytest.mark.parametrize("rows", [((4, 5),), ((0, 7),), ((0, 1), (5, 6)), ((0, 2), (3, 4), (6, 9))])
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_a_message_has_the_rows_and_heads(batch: int, heads, rows, by_index: bool, by_rows: bool, joined: bool):
    """Also one row of one head, to which torch.cat(out=) writes nothing; keys in both memory orders."""
    k, v = torch.randn(batch, 3, 9, 4), torch.randn(batch, 3, 9, 6)
    if by_rows:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    block = _make_block(heads, rows, k.shape, v.shape, joined=joined)
    chosen = [row for start, stop in rows for row in range(start, stop)]
    messages = block.pack(k, v, torch.tensor(chosen) if by_index else None)
    assert tuple(x.numel() for x in messages) == block.sizes
    assert all(x.is_contiguous() for x in messages)
    message = torch.cat([x.flatten() for x in messages])
    for place, tensor in zip(block.places((0, len(range(*heads))), (0, len(chosen))), (k, v), strict=True):
        assert torch.equal(message.as_strided(*place), tensor[:, slice(*heads)][:, :, chosen])
    if len(chosen) > 1:
        for place, tensor in zip(block.places((0, 1), (1, len(chosen))), (k, v), strict=True):
            assert torch.equal(message.as_strided(*place), tensor[:, heads[0] : heads[0] + 1][:, :, chosen[1:]])


@pytest.mark.parametrize(("keep", "joined"), [(0, [3, 4]), (1, [1, 2, 4]), (8, [1] * 7)])
def test_keys_that_arrive_together_are_one_tile(keep: int, joined: list[int]):
    """On the fourth of 8 ranks, with head-tail: all queries see the heads of three ranks, the last queries all keys of
    four. Kept messages are where a backward looks for them."""
    cut, shape = head_tail(8 * 16, 8), (1, 2, 16, 4)
    how = Causal(), 3, False, False, True, rounds_of(8, 7), keep
    _, together = make_schedule(cut, cut, *how, shape, shape, shape, 1).forward
    assert [len(arrival.sources) for arrival in together.arrivals] == joined
    tiles = [call for keys in together.keys for call in keys.calls]
    assert all(tile.cover is Cover.FULL and tile.q in ((0, 16), (8, 16)) for tile in tiles)
    assert sum(tile.kv[1] for tile in tiles) == 3 * 8 + 4 * 16


@pytest.mark.parametrize(
    ("small_tiles", "dim", "joined"), [(True, 4, [1, 2, 2, 2]), (False, 4, [1] * 7), (True, 8, [1] * 7)]
)
def test_a_ring_on_a_gpu_has_small_messages_in_pairs(small_tiles: bool, dim: int, joined: list[int], monkeypatch):
    """On the last of 8 ranks, to whose keys all queries attend. The first message is kept, so it comes alone."""
    monkeypatch.setattr("cp_styles.strategies.schedule._PAIRED", 2 * 16 * 2 * 4)
    cut, shape = head_tail(8 * 16, 8), (1, 2, 16, dim)
    how = Causal(), 7, small_tiles, False, True, rounds_of(8, 1), 1
    _, *steps = make_schedule(cut, cut, *how, shape, shape, shape, 1).forward
    assert [len(arrival.sources) for step in steps for arrival in step.arrivals] == joined


@pytest.mark.parametrize("dense_rows", [True, False])
def test_heads_of_another_step_replace_copies(dense_rows: bool):
    """The heads of a kernel's group, dense if it wants them so. Copies of ranges that overlap are not kept."""
    kernel = replace(CUDA_FLASH, dense_rows=dense_rows)
    grad, q, out, lse = whole = [*(torch.randn(2, 4, 3, 8) for _ in range(3)), torch.randn(2, 4, 3)]
    queries = _Queries(kernel, (grad, q, out, lse))
    for heads in ((0, 4), (0, 2), (2, 4), (0, 3), (3, 4)):
        grad, q, out, lse = found = queries.of_heads(heads)
        for x, y in zip((grad, q, out, lse), whole, strict=True):
            assert torch.equal(x, y[:, slice(*heads)])
        assert found is queries.of_heads(heads)
        assert all(x.transpose(1, 2).is_contiguous() == dense_rows for x in (grad, out))
    assert [*queries._by_heads] == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    ("rows", "heads", "small_tiles", "parts"),
    [(8448, 8, True, 1), (8449, 8, True, 1), (16896, 8, True, 2), (16896, 16, True, 4), (99, 8, False, 4)],
)
@pytest.mark.parametrize("widening", [1, 2])
def test_a_group_of_heads_fills_a_gpu_four_times(rows: int, heads: int, small_tiles: bool, parts: int, widening: int):
    """8448 keys of 8 heads are 528 blocks of 128, four for each multiprocessor. Other kernels compute by any groups."""
    cut, q_shape, k_shape = contiguous(4 * rows, 4), (1, heads, rows, 64), (1, heads // widening, rows, 64)
    how = Causal(), 3, small_tiles, False, False, rounds_of(4, 1), 0
    schedule = make_schedule(cut, cut, *how, q_shape, k_shape, k_shape, widening)
    assert next(len(step.keys) for step in schedule.backward if step.travels) == parts
