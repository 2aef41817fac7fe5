"""Which positions each rank holds: every one once, cut and put together again."""

import pickle
from itertools import accumulate

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from cp_styles.engine.config import rebuild, take_apart
from cp_styles.layouts import SequenceLayout, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.layouts.layout import Stripes
from cp_styles.masks import Causal, Documents
from cp_styles.plan import imbalance
from cp_styles.strategies.ulysses import _renumber_neighbours, join_neighbours
from tests.layouts import layouts
from tests.oracle import randn

BALANCERS = [contiguous, head_tail, striped]


@given(layouts())
def test_every_position_has_one_owner(layout: SequenceLayout):
    held = [layout.positions(rank) for rank in range(layout.ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(layout.length))
    assert tuple(map(len, held)) == layout.lengths
    for positions in held:  # the plan searches in them
        assert bool((positions.diff() > 0).all())


@given(layouts(), st.sampled_from([0, 1, -1]))
def test_unshard_undoes_shard(layout: SequenceLayout, dim: int):
    shape = [3, 2]
    shape.insert(dim if dim >= 0 else 2, layout.length)
    whole = randn(0, *shape)
    parts = [layout.shard(whole, dim, rank) for rank in range(layout.ranks)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, layout.positions(rank)))
        assert part.is_contiguous()  # so that all ranks can view it as another shape, or none
    assert torch.equal(layout.unshard(parts, dim), whole)


def test_shard_is_differentiable_and_one_chunk_is_a_view():
    whole = randn(0, 8, 2).requires_grad_()
    assert contiguous(8, 2).shard(whole, 0, 1)._base is whole
    head_tail(8, 2).shard(whole, 0, 1).sum().backward()
    assert whole.grad[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@given(st.integers(0, 70), st.integers(1, 9))
def test_balancers_give_all_ranks_the_same_number_of_tokens_or_one_more(length: int, ranks: int):
    for balancer in BALANCERS:
        layout = balancer(length, ranks)
        assert (layout.length, layout.ranks) == (length, ranks)
        assert max(layout.lengths) - min(layout.lengths) <= 1


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 5))
def test_per_document_head_tail_cuts_every_document(documents: list[int], ranks: int):
    layout = per_document_head_tail(sum(documents), ranks, documents=documents, cut_all=True)
    start = 0
    for size in documents:
        shares = [
            sum(
                min(stop, start + size) - max(first, start)
                for first, stop in own
                if first < start + size and stop > start
            )
            for own in layout.chunks
        ]
        assert sum(shares) == size
        assert max(shares) - min(shares) <= 1
        start += size
    assert max(layout.lengths) - min(layout.lengths) <= 1  # remainders go to whoever holds least


@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2000)), max_size=12), st.integers(1, 9))
def test_per_document_head_tail_gives_all_ranks_as_many_tokens(documents: list[int], ranks: int):
    """Whatever stays whole. Never less balanced than all of them cut, unless within 2 %."""
    length, mask = sum(documents), Documents([size for size in documents if size]) & Causal()
    layout = per_document_head_tail(length, ranks, documents=documents)
    assert (layout.length, layout.ranks) == (length, ranks)
    assert max(layout.lengths) - min(layout.lengths) <= 1
    assert layout == per_document_head_tail(length, ranks, documents=tuple(documents))
    if length:
        every = per_document_head_tail(length, ranks, documents=documents, cut_all=True)
        assert imbalance(layout, mask) <= max(1.02, imbalance(every, mask))


def test_the_last_tokens_of_a_long_document_get_their_share_of_a_short_one():
    """And so the rank where a long document ends has as much work as the others. Without, the work is 2.3 % apart, and
    all documents would be cut instead."""
    documents = (200, 9, 19, 2388, 20, 718, 1917, 233, 2471, 17, 235, 191)
    layout = per_document_head_tail(sum(documents), 4, documents=documents)
    assert imbalance(layout, Documents(documents) & Causal()) <= 1.0004
    ends = list(accumulate(documents))
    whole = [
        any(start <= end - size and end <= stop for own in layout.chunks for start, stop in own)
        for end, size in zip(ends, documents, strict=True)
    ]
    assert sum(whole) >= 6


def test_a_long_document_is_cut_over_all_ranks():
    for length, ranks in ((16, 2), (1000, 7), (5, 9)):
        assert per_document_head_tail(length, ranks, documents=[length]) == head_tail(length, ranks)
    layout = per_document_head_tail(100_000 + 64 * 50, 4, documents=[100_000] + [50] * 64)
    for own in layout.chunks:
        held = [(start, stop) for start, stop in own if start < 100_000]
        assert sum(min(stop, 100_000) - start for start, stop in held) == 25_000
        assert len(own) <= 2 + 16 + 1  # and short ones stay whole, but for what it takes to fill ranks up


def test_head_tail_is_a_head_and_its_tail():
    assert head_tail(16, 2).chunks == (((0, 4), (12, 16)), ((4, 12),))
    # The remainder goes to heads first, then to tails.
    assert_expected_inline(
        head_tail(22, 3).describe(),
        """\
22 positions on 3 ranks
  rank 0:      8 in 2 chunks [0, 4) [18, 22)
  rank 1:      7 in 2 chunks [4, 8) [15, 18)
  rank 2:      7 in 1 chunks [8, 15)""",
    )


def test_striped_deals_blocks():
    assert striped(7, 2, block=2).chunks == (((0, 2), (4, 6)), ((2, 4), (6, 7)))
    with pytest.raises(ValueError, match="block must be at least 1"):
        striped(7, 2, block=0)


@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 9))
def test_stripes_are_their_chunks(length: int, ranks: int, block: int):
    """However they were said. Where no rank has more than one chunk, they are no stripes: contiguous."""
    layout, starts = striped(length, ranks, block=block), range(0, length, block)
    own = [[(start, min(start + block, length)) for start in starts[rank::ranks]] for rank in range(ranks)]
    listed = SequenceLayout.from_chunks(own)
    assert layout == listed
    assert hash(layout) == hash(listed)
    assert (layout.length, layout.lengths, layout.ranks) == (length, listed.lengths, ranks)
    assert layout.chunks == listed.chunks == SequenceLayout(layout.chunks).chunks
    several = ranks > 1 and length > ranks * block
    assert isinstance(layout.held, Stripes) == isinstance(listed.held, Stripes) == several
    last = [position for position in range(length) if position // block % ranks == ranks - 1]
    assert layout.positions(ranks - 1).tolist() == last
    if length > block and ranks > 1:
        assert SequenceLayout.from_chunks(own[::-1]) != layout
        assert striped(length + 1, ranks, block=block) != layout


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_neighbours_as_one_rank_and_among_themselves(data: st.DataObject, groups: int, size: int):
    """As Ulysses sees them, for which stripes are stripes again."""
    layout = data.draw(layouts(ranks=groups * size))
    for group in range(groups):
        members = [layout.positions(group * size + member) for member in range(size)]
        together = torch.cat(members).sort().values
        assert torch.equal(join_neighbours(layout, size).positions(group), together)
        cut = _renumber_neighbours(layout, group * size, size)
        assert all(torch.equal(together[cut.positions(member)], own) for member, own in enumerate(members))


def test_chunks_that_are_nearly_stripes_are_not():
    for chunks in (
        [[(0, 2), (4, 6)], [(2, 4), (6, 9)]],
        [[(0, 2), (4, 7)], [(2, 4), (7, 9)]],
        [[(0, 2), (6, 8)], [(2, 4), (8, 9)], [(4, 5)], [(5, 6)]],
        [[(1, 2), (4, 6)], [(0, 1), (2, 4)]],
    ):
        layout = SequenceLayout.from_chunks(chunks)
        assert layout.held == layout.chunks == tuple(map(tuple, chunks))


@pytest.fixture
def nothing_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes whose chunks are asked for are an error."""

    def listed(self: Stripes):
        raise AssertionError(f"{self} listed")

    monkeypatch.setattr(Stripes, "chunks", listed)


@pytest.mark.usefixtures("nothing_listed")
def test_striped_layout_is_three_numbers_when_sent():
    """Among ranks, to graphs and to other processes. More chunks than any machine could list."""
    layout = striped(2**45 + 3, 64)
    assert layout.lengths == (2**39 + 1,) * 3 + (2**39,) * 61
    assert layout == SequenceLayout(Stripes(2**45 + 3, 64, 1)) != striped(2**45 + 3, 64, block=2)
    assert pickle.loads(pickle.dumps(layout)) == layout == rebuild(take_apart(layout, []))
    assert len(pickle.dumps(layout)) < 2000
    assert len(repr(take_apart(layout, []))) < 200
    assert len(repr(layout)) < 2000
    assert join_neighbours(layout, 8) == striped(2**45 + 3, 8, block=8)
    assert _renumber_neighbours(layout, 0, 8) == striped(2**42 + 3, 8)


@pytest.mark.usefixtures("nothing_listed")
def test_stripes_are_cut_in_one_operation():
    whole = randn(0, 13, 2).requires_grad_()
    layout = striped(13, 3, block=2)
    parts = [layout.shard(whole, 0, rank) for rank in range(3)]
    assert [part.grad_fn.name() for part in parts] == ["IndexSelectBackward0"] * 3
    assert torch.equal(layout.unshard(parts, 0), whole)
    parts[2].sum().backward()
    assert whole.grad[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0]


def test_from_chunks_sorts_joins_and_drops_empty_ones():
    layout = SequenceLayout.from_chunks([[(4, 6), (0, 2), (2, 3), (5, 5)], [(3, 4)], []])
    assert layout.chunks == (((0, 3), (4, 6)), ((3, 4),), ())
    assert layout == SequenceLayout(layout.chunks)
    assert hash(layout) == hash(SequenceLayout(layout.chunks))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[(0, 2)], [(3, 4)]], r"found \(3, 4\) where position 2 comes next"),
        ([[(0, 2)], [(1, 4)]], r"found \(1, 4\) where position 2 comes next"),
        ([[(1, 2)]], r"found \(1, 2\) where position 0 comes next"),
    ],
)
def test_gaps_and_overlaps_are_refused(chunks, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout.from_chunks(chunks)


def test_wrong_lengths_are_refused_with_the_numbers():
    layout = contiguous(8, 2)
    with pytest.raises(
        ValueError, match=r"cuts a sequence of 8 positions, but dim 1 of a tensor of shape \(2, 9\) has 9"
    ):
        layout.shard(torch.zeros(2, 9), 1, 0)
    with pytest.raises(ValueError, match=r"ranks hold \(4, 4\) positions in this layout, the parts have \(4, 5\)"):
        layout.unshard([torch.zeros(4), torch.zeros(5)], 0)
    with pytest.raises(ValueError, match="add up to 8, got a sum of 7"):
        per_document_head_tail(8, 2, documents=[3, 4])
    with pytest.raises(ValueError, match="length=8, ranks=0"):
        contiguous(8, 0)


def test_a_balancer_is_held_to_what_it_was_asked():
    assert layout_made_by(contiguous, 8, 2) is layout_made_by(contiguous, 8, 2)
    with pytest.raises(ValueError, match=r"must cut 8 positions for 2 ranks, and .* returned one for 9"):
        layout_made_by(lambda length, ranks: contiguous(9, ranks), 8, 2)
    with pytest.raises(TypeError, match="must be a SequenceLayout or a function"):
        layout_made_by(lambda length, ranks: None, 8, 2)


@pytest.mark.parametrize("layout", [head_tail(50, 3), striped(50, 3), striped(50, 3, block=4), contiguous(50, 3)])
def test_positions_of_some_rows(layout):
    for rank in range(layout.ranks):
        whole = layout.positions(rank)
        for rows in ((0, len(whole)), (0, 1), (3, 3), (5, 13), (len(whole) - 2, len(whole))):
            torch.testing.assert_close(layout.positions(rank, rows=rows), whole[slice(*rows)], rtol=0, atol=0)
