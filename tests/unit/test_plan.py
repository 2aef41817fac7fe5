"""A plan computes every attended pair once and receives only the rows that it needs; the plans of all ranks agree."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_styles._lib import bounded_cache
from cp_styles._lib.bounded_cache import another_cache
from cp_styles.explain import explain
from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.layouts.layout import Stripes
from cp_styles.masks import Causal, Dense, Documents, Full, Mask, SlidingWindow
from cp_styles.plan import Plan, attended_pairs, imbalance, make_plan
from cp_styles.plan.linear import get_chunks
from cp_styles.plan.plan import RowRanges, SourcePart
from cp_styles.plan.tiles import Cover, Tile
from cp_styles.strategies import AllGather, Ring
from tests.layouts import layouts
from tests.oracle import allowed, mask_cases
from tests.ranks.flex_case import DOCUMENTS

MASK_NAMES = sorted(mask_cases(8))


def row_numbers(rows: RowRanges) -> list[int]:
    return [row for start, stop in rows for row in range(start, stop)]


def pairs_of(tile: Tile, part: SourcePart, visible: torch.Tensor) -> torch.Tensor:
    """How often a tile computes each pair of (local query row, local row of the source): ``visible``'s shape."""
    rows = torch.tensor(row_numbers(part.rows))[tile.kv[0] : tile.kv[1]]
    queries = torch.arange(*tile.q)
    seen = torch.ones(len(queries), len(rows), dtype=torch.int64)
    if tile.cover is Cover.CAUSAL:
        assert len(queries) == len(rows)  # what Kernel.forward is promised
        seen = seen.tril()
    assert (tile.window is not None) == (tile.cover is Cover.BAND)
    if tile.window is not None:
        before, after = (size if size >= 0 else 2**30 for size in tile.window)
        own = len(rows) - len(queries)  # the key of the first query
        seen = seen.tril(own + after).triu(own - before)
    assert tile.pairs == int(seen.sum())
    counts = torch.zeros(visible.shape, dtype=torch.int64)
    counts[queries[:, None], rows[None, :]] = seen
    # An explicit mask is applied to the tile, so what it computes is what is visible.
    return counts * visible if tile.cover is Cover.PARTIAL else counts


def covers(layout: SequenceLayout, mask: Mask, **options) -> set[Cover]:
    """Of all ranks' tiles."""
    plans = [make_plan(layout, layout, mask, rank, **options) for rank in range(layout.ranks)]
    return {tile.cover for plan in plans for part in plan.parts for tile in part.tiles}


def check_plans(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, seen: torch.Tensor) -> None:
    plans = [make_plan(q_layout, kv_layout, mask, rank) for rank in range(q_layout.ranks)]
    check_tiles(plans, q_layout, kv_layout, mask, seen)
    pairs = int(seen.sum())
    how = {"small_tiles": pairs % 3 > 0, "windows": pairs % 2 > 0}  # one of them for each case, as if drawn
    others = [make_plan(q_layout, kv_layout, mask, rank, **how) for rank in range(q_layout.ranks)]
    check_tiles(others, q_layout, kv_layout, mask, seen)
    for plan, other in zip(plans, others, strict=True):  # only tiles differ
        assert [part.rows for part in plan.parts] == [part.rows for part in other.parts]
        assert plan.sends == other.sends


def check_tiles(
    plans: list[Plan], q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, seen: torch.Tensor
) -> None:
    for rank, plan in enumerate(plans):
        mine = seen[q_layout.positions(rank)]
        assert mask.has_gaps or attended_pairs(q_layout, kv_layout, mask, rank) == int(mine.sum())
        assert plan.received_rows == sum(part.count for part in plan.parts if part.source != rank)
        for source, part in enumerate(plan.parts):
            visible = mine[:, kv_layout.positions(source)]
            assert part.source == source
            assert row_numbers(part.rows) == torch.nonzero(visible.any(0)).flatten().tolist()
            ends = q_layout.positions(rank), kv_layout.positions(source)
            bands = [visible & band.allowed(*ends) for band in mask.bands]
            counts = torch.zeros_like(visible.long())
            for tile in part.tiles:
                assert (tile.band is None) == (len(bands) == 1 or mask.has_gaps)
                counts += pairs_of(tile, part, visible if tile.band is None else bands[tile.band])
            assert torch.equal(counts, visible.long())
            for tile in part.tiles:  # no kernel is asked for nothing
                assert 0 <= tile.q[0] < tile.q[1] <= len(mine)
                assert 0 <= tile.kv[0] < tile.kv[1] <= part.count
            expected = () if source == rank else part.rows
            assert plans[source].sends[rank] == expected, "what one receives is what the other sends"


@settings(max_examples=25)
@given(layouts(), st.data())
def test_every_attended_pair_once(layout: SequenceLayout, data: st.DataObject):
    length = layout.length
    names = MASK_NAMES if length >= 5 else ["full", "causal", "window", "prefix"]
    case = mask_cases(max(length, 5))[data.draw(st.sampled_from(names))]
    check_plans(layout, layout, case.mask, allowed(case.sees, length, length))


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(0, 20), st.integers(0, 20))
def test_queries_and_keys_of_different_lengths(data, ranks: int, queries: int, keys: int):
    q_layout, kv_layout = data.draw(layouts(queries, ranks)), data.draw(layouts(keys, ranks))
    check_plans(q_layout, kv_layout, Full(), torch.ones(queries, keys, dtype=torch.bool))


@settings(max_examples=25)
@given(
    st.integers(2, 9),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 3, 6])), min_size=2, max_size=2),
    st.sampled_from(["full", "causal", "window", "window both sides", "window ahead", "chunked", "prefix"]),
)
@example(7, [(40, 1), (40, 1)], "window")
@example(9, [(60, 6), (60, 1)], "causal")
def test_stripes(ranks: int, cuts: list[tuple[int, int]], name: str):
    """Of queries and of keys, of different lengths and blocks. The examples have windows that pass between the rows of
    a rank, and queries that look into several blocks of keys."""
    (queries, block), (keys, kv_block) = cuts
    case = mask_cases(60)[name]
    layouts = striped(queries, ranks, block=block), striped(keys, ranks, block=kv_block)
    check_plans(*layouts, case.mask, allowed(case.sees, queries, keys))


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=6),
    st.sampled_from([contiguous, head_tail, striped, partial(striped, block=3), partial(striped, block=33)]),
    st.integers(1, 4),
    st.sampled_from(["plain", "causal", "window"]),
)
@example([300, 1, 1, 1, 40], head_tail, 2, "causal")
def test_every_attended_pair_once_where_blocks_are_cut(documents: list[int], balancer, ranks: int, kind: str):
    """Longer than the plan's blocks of queries (128) and its shortest run (32)."""
    mask = Documents(documents) & {"plain": Full(), "causal": Causal(), "window": SlidingWindow(50, 0)}[kind]
    length = sum(documents)
    positions = torch.arange(length)
    layout = balancer(length, ranks)
    # The bounds were held to their definition in test_mask.py; pair by pair would take minutes at these lengths.
    check_plans(layout, layout, mask, mask.allowed(positions, positions))


@dataclass(frozen=True)
class Between(Mask):
    """Each query sees the keys between its two bounds, which follow no order."""

    los: tuple[int, ...]
    his: tuple[int, ...]

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(self.los)[q_positions_L], torch.tensor(self.his)[q_positions_L]


@settings(max_examples=25)
@given(layouts(), st.data())
@example(contiguous(6, 2), None)
@example(head_tail(6, 1), None)
def test_bounds_that_rise_and_fall(layout: SequenceLayout, data: st.DataObject | None):
    """From row to row, so that neither the first nor the last row of a block has its outermost bound. The examples see
    one key less a row."""
    length = layout.length
    assume(length)  # without positions there are no bounds
    bound = st.lists(st.integers(0, length), min_size=length, max_size=length)
    if data is None:
        los, his = [0] * length, list(range(length, 0, -1))
    else:
        los, his = data.draw(bound), data.draw(bound)
    seen = torch.tensor([[low <= key < high for key in range(length)] for low, high in zip(los, his, strict=True)])
    check_plans(layout, layout, Between(tuple(los), tuple(his)), seen.reshape(length, length))


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("length", [16, 1024])
def test_head_tail_causal_is_one_kernel_call_a_part(ranks: int, length: int):
    layout = head_tail(length * ranks, ranks)
    for rank in range(ranks):
        for part in make_plan(layout, layout, Causal(), rank).parts:
            assert len(part.tiles) == 1
    assert Cover.PARTIAL not in covers(layout, Causal())
    # Head-tail is equal to a block: the work of the ranks differs by nothing.
    assert imbalance(layout, Causal()) == 1.0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_full_attention_is_one_kernel_call_a_part_in_any_layout(ranks: int):
    for balancer in (contiguous, head_tail, striped):
        layout = balancer(37, ranks)
        tiles = [part.tiles for rank in range(ranks) for part in make_plan(layout, layout, Full(), rank).parts]
        assert all([tile.cover for tile in some] == [Cover.FULL] for some in tiles)


def test_imbalance_is_largest_over_mean():
    # Rank 0 attends to 1 + 2 = 3 pairs, rank 1 to 3 + 4 = 7: 7 / 5.
    assert imbalance(contiguous(4, 2), Causal()) == 1.4
    assert imbalance(contiguous(0, 2), Causal()) == 1.0


def test_dense_masks_need_an_explicit_mask_in_every_tile():
    layout = contiguous(6, 2)
    mask = Dense(torch.ones(6, 6, dtype=torch.bool)) & Causal()
    assert covers(layout, mask) == {Cover.PARTIAL}


@pytest.mark.parametrize("scale", [1, 7, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("balancer", [contiguous, head_tail, striped, "per document"])
def test_documents_need_no_explicit_mask_where_small_tiles_are_welcome(scale: int, causal: bool, balancer):
    documents = tuple(scale * length for length in DOCUMENTS)
    mask = Documents(documents) & Causal() if causal else Documents(documents)
    if balancer == "per document":
        balancer = partial(per_document_head_tail, documents=documents)
    layout = balancer(sum(documents), 4)
    assert Cover.PARTIAL not in covers(layout, mask, small_tiles=True)


BALANCERS = {"contiguous": contiguous, "head_tail": head_tail, "striped": partial(striped, block=64)}


@pytest.mark.parametrize("balancer", BALANCERS.values(), ids=BALANCERS)
@pytest.mark.parametrize("size", [4096, 1000])
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_window_is_some_kernel_calls(balancer, size: int, ranks: int):
    """8K rows a rank: a band for each source and each chunk of rows, and what is before and behind it."""
    layout, mask = balancer(8192 * ranks, ranks), SlidingWindow(size - 1, 0)
    for rank in range(ranks):
        parts = make_plan(layout, layout, mask, rank, small_tiles=True, windows=True).parts
        tiles = [tile for part in parts for tile in part.tiles]
        if balancer in (contiguous, head_tail):
            assert len(tiles) <= (4 if size == 4096 else 6)  # two chunks, with a triangle at each end of the band
            assert Cover.PARTIAL not in {tile.cover for tile in tiles}
        assert sum(tile.pairs for tile in tiles) >= attended_pairs(layout, layout, mask, rank)


def test_small_tiles_that_would_see_the_same_keys_again_and_again_join():
    """Windows, and stripes of more rows than one: a tile a row would be as many copies of the keys."""
    for layout, mask in (
        (contiguous(256, 2), SlidingWindow(20, 0)),
        (partial(striped, block=4)(256, 2), Causal()),
    ):
        for rank in range(2):
            assert make_plan(layout, layout, mask, rank) == make_plan(layout, layout, mask, rank, small_tiles=True)


@dataclass(frozen=True, eq=False)
class Asked(Mask):
    """A mask that notes of how many positions it is asked, and equals no other, so that nothing of it is remembered."""

    inner: Mask
    positions: list[int] = field(default_factory=list)

    def bounds(self, q_positions_L):
        self.positions.append(q_positions_L.numel())
        return self.inner.bounds(q_positions_L)

    def breaks(self, length):
        return self.inner.breaks(length)


@pytest.mark.parametrize(
    ("length", "ranks", "mask"),
    [
        (2**20, 64, Causal()),
        (2**20, 1024, Causal()),
        (10 * 2**20, 1024, Causal()),
        (2**20, 64, SlidingWindow(4095, 0)),
        (1000 * 1648, 64, Documents((1648,) * 1000) & Causal()),
    ],
)
def test_a_plan_looks_at_chunks_and_pieces_never_at_positions(length: int, ranks: int, mask: Mask):
    """Nor at what another rank computes: its work is what a rank has itself, and one look at the pieces of all."""
    layout, asked = head_tail(length, ranks), Asked(mask)
    plan = make_plan(layout, layout, asked, ranks // 3)
    pieces = 2 * ranks + len(mask.breaks(length)) + 2
    # At both ends and in the middle of each piece, once for the plan and once to find the pieces.
    assert sum(asked.positions) <= 6 * pieces
    assert sum(len(part.tiles) for part in plan.parts) <= max(ranks, length // ranks // 128 + 4)
    by_work_asked = Asked(mask)
    by_work(length, ranks, mask=by_work_asked)
    assert sum(by_work_asked.positions) <= 6 * (16 * ranks + pieces)


def test_what_does_not_depend_on_the_rank_is_made_once():
    """By what cuts the sequence, and by the plans of the ranks, where they are threads, of layers with other masks, and
    of the rows of a batch."""
    mask = Asked(Causal())
    layout = by_work(96, 4, mask=mask)
    asked, tables = sum(mask.positions), get_chunks.cache_info().misses
    for rank in range(4):
        make_plan(layout, layout, mask, rank)
        make_plan(layout, layout, Causal(), rank)
    assert sum(mask.positions) == asked
    assert get_chunks.cache_info().misses == tables + 1


class Operations(TorchDispatchMode):
    """Counts the operations on tensors, views included, and the entries of the largest result."""

    count = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        result = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


def test_a_plan_is_as_many_operations_whatever_its_size():
    """Each takes microseconds: what short sequences, and tests, wait for. Before most of them were joined, 750."""
    counts = []
    for layout, mask in (
        (head_tail(200, 4), Documents((20, 30, 50, 100)) & Causal()),
        (head_tail(2**20, 64), Documents((2**16,) * 16) & Causal()),
        (by_work(2**15, 64, mask=Causal()), Documents((2**10,) * 32) & Causal()),
    ):
        with another_cache():
            for rank in range(2):
                with Operations() as operations:
                    make_plan(layout, layout, mask, rank)
                counts.append(operations.count)
    assert len(set(counts[::2])) == len(set(counts[1::2])) == 1
    assert counts[0] <= 520
    assert counts[1] <= 360  # the mask's pieces and the layout's tables are there


STRIPED_DOCUMENTS = tuple(300 * length for length in DOCUMENTS)


@pytest.mark.parametrize(
    ("length", "mask", "largest", "tiles", "planned"),
    [
        # A segment for each rank and piece of the mask, of 7 numbers each. Sources before and after a bound.
        (2**20, Causal(), 7 * 64, 64, 2),
        (2**40, Causal(), 7 * 64, 64, 2),
        (2**40, Full(), 7 * 64, 64, 1),
        (2**20, SlidingWindow(20, 0), 7 * 2 * 64, 21 * 128, 1),  # 21 ranks hold keys, to each belong blocks of 128 rows
        (28_500, Documents(STRIPED_DOCUMENTS) & Causal(), 7 * 28 * 64, 64 * 9, 13),
        (28_500, Documents(STRIPED_DOCUMENTS) & SlidingWindow(1023, 0), 7 * 38 * 64, 64 * 5, 13),
    ],
)
def test_stripes_at_64_ranks_list_neither_positions_nor_chunks(
    monkeypatch: pytest.MonkeyPatch, length: int, mask: Mask, largest: int, tiles: int, planned: int
):
    """A layout and a plan, in exact numbers: the entries of the largest tensor, the kernel calls, the sources that were
    planned. Others are attended to like one of them, and share its tiles."""
    monkeypatch.setattr(Stripes, "chunks", None)
    monkeypatch.setattr(bounded_cache, "as_constants", nullcontext)  # it switches modes off, the one here too
    tables = get_chunks.cache_info().misses
    with another_cache(), Operations() as operations:
        layout = striped(length, 64)
        plan = make_plan(layout, layout, mask, 40)
    assert operations.largest == largest
    assert operations.count <= 520
    assert get_chunks.cache_info().misses == tables
    assert sum(len(part.tiles) for part in plan.parts) == tiles
    assert len({id(part.tiles) for part in plan.parts if part.tiles}) == planned


@pytest.mark.parametrize("length", [2**20, 2**20 + 70])
def test_causal_stripes_at_64_ranks_are_a_shifted_diagonal_for_each_source(length: int):
    """What a rank computes of a source is one kernel call on a causal square. Of ranks above it, a row sees one key
    less, so that its first row sees none of theirs. The strategy makes as many calls (Brandon et al., 2023)."""
    layout = striped(length, 64)
    for rank in (0, 5, 40, 63):
        plan, rows = make_plan(layout, layout, Causal(), rank), layout.lengths[rank]
        for source, part in enumerate(plan.parts):
            less = int(source > rank)
            assert part.rows == ((0, rows - less),)
            assert part.tiles == (Tile((less, rows), (0, rows - less), Cover.CAUSAL),)
        sent = [layout.lengths[peer] - (rank > peer) for peer in range(64)]
        assert plan.sends == tuple(((0, sent[peer]),) if peer != rank else () for peer in range(64))
    for strategy in (Ring(), AllGather()):
        made = explain(length, ranks=64, heads=1, head_dim=8, layout=striped, strategy=strategy, rank=40)
        assert len(made.runs[40].forward.calls) == len(made.runs[40].backward.calls) == 64
    assert imbalance(layout, Causal()) < 1 + 64 / 2**14


@pytest.mark.parametrize(("block", "planned"), [(1, 2), (16, 3), (128, 3)])
def test_sources_that_stripes_see_alike_are_planned_once(block: int, planned: int):
    """Those before the rank, the rank itself, and those after it."""
    layout = striped(2**15 + 100, 64, block=block)
    for rank, count in ((40, planned), (63, planned - 1)):
        parts = make_plan(layout, layout, Causal(), rank).parts
        assert len({id(part.tiles) for part in parts}) == count


def picture(layout: SequenceLayout, mask: Mask) -> str:
    """All plans in words: which of whose rows each rank needs, and the kernel calls on them."""
    lines = []
    for rank in range(layout.ranks):
        for part in make_plan(layout, layout, mask, rank).parts:
            tiles = ", ".join(f"q{list(tile.q)} kv{list(tile.kv)} {tile.cover.value}" for tile in part.tiles)
            lines.append(f"{rank} <- {part.source}  rows {[list(rows) for rows in part.rows]}  {tiles or 'nothing'}")
    return "\n".join(lines)


def test_the_plans_of_three_small_cases():
    assert_expected_inline(
        picture(head_tail(16, 2), Causal()),
        """\
0 <- 0  rows [[0, 8]]  q[0, 8] kv[0, 8] causal
0 <- 1  rows [[0, 8]]  q[4, 8] kv[0, 8] full
1 <- 0  rows [[0, 4]]  q[0, 8] kv[0, 4] full
1 <- 1  rows [[0, 8]]  q[0, 8] kv[0, 8] causal""",
    )
    assert_expected_inline(
        picture(contiguous(128, 2), SlidingWindow(3, 0)),
        """\
0 <- 0  rows [[0, 64]]  q[0, 4] kv[0, 4] causal, q[4, 64] kv[1, 64] partial
0 <- 1  rows []  nothing
1 <- 0  rows [[61, 64]]  q[0, 3] kv[0, 3] partial
1 <- 1  rows [[0, 64]]  q[0, 4] kv[0, 4] causal, q[4, 64] kv[1, 64] partial""",
    )
    assert_expected_inline(
        picture(contiguous(12, 3), Documents((5, 1, 6)) & Causal()),
        """\
0 <- 0  rows [[0, 4]]  q[0, 4] kv[0, 4] causal
0 <- 1  rows []  nothing
0 <- 2  rows []  nothing
1 <- 0  rows [[0, 4]]  q[0, 1] kv[0, 4] full
1 <- 1  rows [[0, 4]]  q[0, 4] kv[0, 4] partial
1 <- 2  rows []  nothing
2 <- 0  rows []  nothing
2 <- 1  rows [[2, 4]]  q[0, 4] kv[0, 2] full
2 <- 2  rows [[0, 4]]  q[0, 4] kv[0, 4] causal""",
    )
