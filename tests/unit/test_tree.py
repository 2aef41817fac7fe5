"""Trees of rollouts: each pair once, no key that nobody sees, and positions as of the rollouts one by one."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import Tree as ExportedTree
from cp_styles.batch import predicted_tokens
from cp_styles.layouts import by_work, contiguous, head_tail, striped
from cp_styles.masks import Causal, Chunked, Dense, Documents, Mask, PerRow, PrefixLM, SlidingWindow, Tree, WithBlocks
from cp_styles.masks.block_mask import FlexMask
from cp_styles.plan import attended_pairs, imbalance, make_plan
from tests.layouts import layouts
from tests.unit.test_plan import check_plans, pairs_of


@st.composite
def trees(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 1, 2, 3, 7, 40)) -> Tree:
    """Trees of up to 8 nodes, with one or more roots, in any order in which parents come first."""
    lengths = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(lengths))]
    return Tree(tuple(lengths), tuple(parents))


def paths_of(tree: Tree) -> list[list[int]]:
    """The tokens of each rollout, from the arguments of the tree alone."""
    ranges, paths = [], []
    for length, parent in zip(tree.lengths, tree.parents, strict=True):
        start = sum(map(len, ranges))
        ranges.append(range(start, start + length))
        paths.append([*(paths[parent] if parent >= 0 else []), *ranges[-1]])
    return [path for node, path in enumerate(paths) if node not in tree.parents]


def seen_in(tree: Tree, left: int | None = None) -> torch.Tensor:
    """Each rollout as a sequence of its own, put together."""
    seen = torch.zeros(tree.length, tree.length, dtype=torch.bool)
    for path in map(torch.tensor, paths_of(tree)):
        alone = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        seen[path[:, None], path] |= alone if left is None else alone.triu(-left)
    return seen


WINDOWS = st.sampled_from([None, None, 0, 1, 5, 38])
DEEP = Tree((3, 1, 4, 2, 2, 5), (-1, 0, 0, 2, 2, 0))


@settings(max_examples=60)
@given(trees(), WINDOWS, st.data())
@example(Tree((5, 40, 40), (-1, 0, 0)), None, None)
@example(Tree((40, 3, 40, 3), (-1, 0, 1, 0)), 38, None)
def test_every_pair_of_a_rollout_once_and_no_key_too_many(tree: Tree, left: int | None, data: st.DataObject | None):
    """As one device with the rollouts one by one; also under a mask of positions, and next to a mask with gaps."""
    seen, length = seen_in(tree, left), tree.length
    mask = tree if left is None else SlidingWindow(left, 3) & tree
    positions = torch.arange(length)
    assert torch.equal(mask.allowed(positions, positions), seen)
    assert torch.equal(mask.work(positions, length), seen.sum(1))
    layout = head_tail(length, 2) if data is None else data.draw(layouts(length))
    check_plans(layout, layout, mask, seen)
    check_plans(layout, layout, Causal() & mask, seen)
    if length > 2:
        documents = Documents((length // 3, length - length // 3))
        check_plans(layout, layout, documents & mask, seen & documents.allowed(positions, positions))
    blocks = create_block_mask(lambda b, h, q, k: (q // 5 + k // 5) % 3 > 0, None, None, length, length, "cpu", 5)
    sparse = FlexMask(blocks)
    both = seen & ((positions[:, None] // 5 + positions // 5) % 3 > 0)
    plans = [make_plan(layout, layout, sparse & mask, rank) for rank in range(layout.ranks)]
    held = [layout.positions(rank) for rank in range(layout.ranks)]
    rows = [[int(both[mine][:, keys].any(0).sum()) for keys in held] for mine in held]
    needed = [sum(counts) - counts[rank] for rank, counts in enumerate(rows)]
    assert [plan.received_rows for plan in plans] == needed


def test_full_blocks_of_a_block_mask_next_to_a_tree():
    """Long enough that no block is joined with its neighbours: a full block has pairs that the tree hides."""
    tree = Tree((300, 212, 512), (-1, 0, 0))
    blocks = create_block_mask(lambda b, h, q, k: (q // 256 != 3) | (k // 256 != 1), None, None, 1024, 1024, "cpu", 256)
    places = torch.arange(1024)
    seen = seen_in(tree) & ((places[:, None] // 256 != 3) | (places // 256 != 1))
    for layout in (contiguous(1024, 2), head_tail(1024, 2)):
        for rank in range(2):
            for source, part in enumerate(make_plan(layout, layout, FlexMask(blocks) & tree, rank).parts):
                visible = seen[layout.positions(rank)][:, layout.positions(source)]
                counts = sum((pairs_of(tile, part, visible) for tile in part.tiles), torch.zeros_like(visible.long()))
                assert torch.equal(counts, visible.long())


@given(trees((1, 2, 3)))
def test_positions_predecessors_and_weights_are_of_the_rollouts(tree: Tree):
    assert ExportedTree is Tree
    paths = paths_of(tree)
    weights = torch.arange(1.0, 1 + len(paths))
    expected = torch.zeros(tree.length)
    for number, path in enumerate(paths):
        assert tree.tokens(number).tolist() == path
        assert tree.position_ids[path].tolist() == list(range(len(path)))
        assert tree.predecessors[path].tolist() == [-1, *path[:-1]]
        expected[path] += weights[number]
    assert torch.equal(tree.weights(weights), expected)


@given(trees((1, 2, 3)), st.data())
def test_each_token_is_predicted_once_by_the_rank_of_its_predecessor(tree: Tree, data: st.DataObject):
    layout, found = data.draw(layouts(tree.length)), []
    for rank in range(layout.ranks):
        rows, tokens = predicted_tokens(tree, layout, rank)
        assert torch.equal(layout.positions(rank)[rows], tree.predecessors[tokens])
        found += tokens.tolist()
    assert sorted(found) == [token for token, before in enumerate(tree.predecessors.tolist()) if before >= 0]


def test_what_siblings_would_see_is_not_computed():
    """A prompt of 512 tokens and 16 rollouts of 64 to 94 tokens on 4 ranks: pairs of tiles are the pairs of the tree.
    The prompt is one rectangle for all rollouts of a rank, so there are about as many calls as nodes."""
    tree = Tree((512, *range(64, 96, 2)), (-1, *[0] * 16))
    for cut in (contiguous, head_tail):
        layout = cut(tree.length, 4)
        plans = [make_plan(layout, layout, tree, rank) for rank in range(4)]
        tiles = [tile for plan in plans for part in plan.parts for tile in part.tiles]
        pairs = sum(attended_pairs(layout, layout, tree, rank) for rank in range(4))
        # A node whose cut leaves fewer than 32 rows in a part has a tile with a mask.
        assert sum(tile.pairs for tile in tiles) <= 1.01 * pairs
        assert len(tiles) <= 50
    assert pairs == int(seen_in(tree).sum())


def test_the_longest_branch_first_makes_two_levels():
    """Nine turns, each with a second branch: a node goes on after its parent, as if it were one node with it."""
    trunk_first = Tree((8,) * 18, (-1, *range(8), *range(8, -1, -1)))
    leaf_first = Tree((8,) * 18, (-1, 0, *(parent for turn in range(0, 16, 2) for parent in (turn, turn + 2))))
    assert len(trunk_first.bands) == 2
    assert len(leaf_first.bands) == 9
    assert len(Tree((3, 4, 5), (-1, 0, 1)).bands) == 1
    assert len(Tree((3, 4, 5), (-1, -1, -1)).bands) == 1


def test_balance():
    """The work of the slowest rank / mean work, as the page says."""
    tree = Tree((16_384, *[192] * 256), (-1, *[0] * 256))
    of = {cut: imbalance(cut(tree.length, 8), tree) for cut in (head_tail, contiguous, partial(by_work, mask=tree))}
    assert [round(value, 2) for value in of.values()] == [1.14, 1.14, 1.0]


@pytest.mark.parametrize(
    ("lengths", "parents", "left", "message"),
    [
        ((), (), None, "0 lengths and 0 parents: give both for each node, and one node at least"),
        ((3, 4), (-1,), None, "2 lengths and 1 parents"),
        ((3, 0), (-1, 0), None, "node 1 has 0 tokens, and a node has at least 1: leave it out, and give its children"),
        ((3, 4), (-1, 1), None, "the parent of node 1 is 1, and a parent is an earlier node, or -1 for a root: put"),
        ((3, 4), (-2, 0), None, "the parent of node 0 is -2"),
        ((3, 4), (-1, 0), -1, "left must be >= 0 or None, got -1"),
    ],
)
def test_what_is_no_tree(lengths, parents, left, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        Tree(lengths, parents, left)


def test_lengths_that_are_no_integers():
    with pytest.raises(TypeError, match="lengths are integers, one for each node, got"):
        Tree((2.5,), (-1,))  # pyright: ignore[reportArgumentType]
    assert Tree(torch.tensor([2, 3]), [-1, 0]) == Tree((2, 3), (-1, 0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "other",
    [Chunked(4), PrefixLM(3), WithBlocks(Causal(), ((0, 2),), 17), Documents((17,), (3,))],
    ids=lambda mask: type(mask).__name__,
)
def test_masks_that_mean_something_else_in_a_rollout(other: Mask):
    for one, two in ((DEEP, other), (other, DEEP), (PerRow((DEEP,)), other)):
        with pytest.raises(NotImplementedError, match=r"a Tree and .* along its rollout, .*one by one"):
            _ = one & two


def test_a_window_is_counted_along_the_rollout():
    assert SlidingWindow(5) & DEEP & SlidingWindow(3) == Tree(DEEP.lengths, DEEP.parents, 3)
    assert DEEP & SlidingWindow(None, 2) == DEEP
    assert (SlidingWindow(5) & DEEP).local
    assert not DEEP.local
    both = Tree(DEEP.lengths, DEEP.parents, 2) & DEEP & Tree(DEEP.lengths, (-1, 0, 1, 2, 3, 0))
    positions = torch.arange(17)
    assert torch.equal(both.allowed(positions, positions), seen_in(DEEP, 2))
    mask = SlidingWindow(1) & DEEP & Dense(torch.ones(17, 17, dtype=torch.bool))
    positions = torch.arange(17)
    assert torch.equal(mask.allowed(positions, positions), seen_in(DEEP, 1))


def test_a_tree_of_another_length():
    with pytest.raises(ValueError, match="the mask was made for 17 positions, the sequence has 18"):
        DEEP.check((1, 1, 18, 18))
    with pytest.raises(ValueError, match=r"the tree has 17 tokens, the layout cuts 18: .* as a further root"):
        predicted_tokens(DEEP, striped(18, 2), 0)
    with pytest.raises(ValueError, match=r"weights of shape \(3,\) for 4 rollouts: give one for each leaf"):
        DEEP.weights(torch.ones(3))
