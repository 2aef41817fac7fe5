"""Masks compared with their definition, pair by pair; and what their constructors accept and refuse."""

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_styles.masks import Causal, Chunked, Dense, Documents, Full, Mask, PerRow, PrefixLM, SlidingWindow
from cp_styles.masks.linear_pieces import cut_into_pieces, work_from
from tests.oracle import Dilated, MaskCase, allowed, mask_cases, randn

POSITIONS = torch.arange(17)


@pytest.mark.parametrize("name", mask_cases(17))
def test_bounds_are_the_definition(name: str):
    case = mask_cases(17)[name]
    expected = allowed(case.sees, 17, 17)
    assert torch.equal(case.mask.allowed(POSITIONS, POSITIONS), expected)
    # Any positions in any order: what a rank holds, in a layout of any kind.
    rows, columns = torch.tensor([16, 3, 4, 0]), torch.tensor([9, 2, 16])
    assert torch.equal(case.mask.allowed(rows, columns), expected[rows][:, columns])


def conjunction(names: list[str]) -> tuple[list[MaskCase], Mask]:
    cases = [mask_cases(17)[name] for name in names]
    return cases, reduce(Mask.__and__, (case.mask for case in cases))


# Windows of trees are no intersections: see test_tree.py.
BANDS = sorted(name for name in mask_cases(17) if "tree" not in name)
SOME_MASKS = st.lists(st.sampled_from(BANDS), min_size=1, max_size=4)


@given(SOME_MASKS)
def test_conjunction_is_and(names: list[str]):
    cases, mask = conjunction(names)
    expected = torch.stack([allowed(case.sees, 17, 17) for case in cases]).all(0)
    assert torch.equal(mask.allowed(POSITIONS, POSITIONS), expected)


@given(SOME_MASKS, st.lists(st.integers(0, 16), max_size=3), st.sampled_from([0, 5, 17, 30]), st.booleans())
def test_pieces_are_the_bounds(names: list[str], cuts: list[int], keys: int, told: bool):
    """Straight, ascending, all that see something, and no more than the mask's own breaks and the cuts make of it."""
    _, mask = conjunction(names)
    own = mask if told else Untold(mask)
    (pieces,) = cut_into_pieces(own, 17, keys, torch.tensor(cuts, dtype=torch.int64))
    found = [(-1, 0, 0)]
    for rank, start, count, lo, hi, lo_step, hi_step in zip(*(column.tolist() for column in pieces), strict=True):
        stop = start + count
        assert rank == 0
        assert not any(start < cut < stop for cut in cuts)
        assert {lo_step, hi_step} <= {0, 1}
        found += [(p, lo + lo_step * (p - start), hi + hi_step * (p - start)) for p in range(start, stop)]
    lo, hi = mask.bounds(POSITIONS)
    seen = torch.zeros(17, keys, dtype=torch.bool)
    for p, first, last in found[1:]:
        assert 0 <= first < last <= keys
        seen[p, first:last] = True
    assert [p for p, _, _ in found] == sorted({p for p, _, _ in found})
    assert torch.equal(seen, Mask.allowed(mask, POSITIONS, torch.arange(keys)))
    starts = torch.tensor([0, *sorted(set(cuts) - {0})])
    work = [int(seen[a:b].sum()) for a, b in pairwise([*starts.tolist(), 17])]
    assert work_from(own, starts, 17, keys).tolist() == work


@dataclass(frozen=True)
class Untold(Mask):
    """Says its bounds and nothing else, as a mask of the user's does."""

    inner: Mask

    def bounds(self, q_positions_L):
        return self.inner.bounds(q_positions_L)


def test_few_pieces_however_long_the_sequence_is():
    length = 10**9
    for mask, pieces in ((Causal(), 1), (SlidingWindow(4095, 0), 2), (SlidingWindow(100, 50), 3), (PrefixLM(500), 2)):
        assert len(cut_into_pieces(mask, length, length, torch.tensor([0]))[0].start) == pieces
    documents = Documents((length // 4,) * 4)
    assert len(cut_into_pieces(documents & Causal(), length, length, torch.tensor([0]))[0].start) == 4
    assert len(cut_into_pieces(documents & SlidingWindow(4095, 0), length, length, torch.tensor([0]))[0].start) == 8


def test_a_mask_that_changes_its_bounds_does_not_keep_its_base_classs_breaks():
    class Frames(Causal):
        def bounds(self, q_positions_L):
            return q_positions_L * 0, (q_positions_L // 4 + 1) * 4

    (pieces,) = cut_into_pieces(Frames(), 8, 8, torch.tensor([0]))
    assert [pieces.start.tolist(), pieces.hi.tolist()] == [[0, 4], [4, 8]]
    assert (Frames().separates, Causal().separates) == (True, False)

    class Wrong(Frames):
        def breaks(self, length):
            return torch.tensor([3])

    with pytest.raises(ValueError, match=r"Wrong.*: breaks\(\) leaves out a position"):
        cut_into_pieces(Wrong(), 8, 8, torch.tensor([0]))


WINDOW, TENSOR = SlidingWindow(3), Dense(torch.ones(7, 7, dtype=torch.bool))
BOTH = Documents((3, 4)) & Documents((5, 2)) & Causal()


@pytest.mark.parametrize(
    ("mask", "parts", "positional", "separates", "local", "has_gaps", "documents"),
    [
        (Full(), 0, False, False, False, False, None),
        (Causal(), 1, True, False, False, False, None),
        (Causal() & WINDOW, 2, True, False, True, False, None),
        (Chunked(3), 1, True, True, True, False, None),
        (BOTH, 3, True, True, False, False, (3, 2, 2)),
        (TENSOR, 1, False, True, False, False, None),
        (TENSOR & Dense(TENSOR.tensor.clone()), 2, False, True, False, False, None),
        (Dilated(3, 2), 1, True, True, False, True, None),
        (PerRow((WINDOW, WINDOW & BOTH)), 1, True, True, True, False, None),
        (PerRow((Full(), Dilated(3, 2))), 1, True, True, False, True, None),
    ],
)
def test_what_a_mask_says_of_itself(mask: Mask, parts: int, positional, separates, local, has_gaps, documents):
    assert len(mask.parts) == parts
    found = mask.positional, mask.separates, mask.local, mask.has_gaps, mask.documents
    assert found == (positional, separates, local, has_gaps, documents)


def test_rows_are_planned_one_by_one_where_each_has_a_mask():
    rows = Documents((3, 4)), WINDOW
    assert BOTH.rows == (BOTH,)
    assert (PerRow(rows) & Causal()).rows == tuple(row & Causal() for row in rows)


def test_masks_compare_by_what_they_say():
    assert Causal() & Full() == Causal()
    assert Full() & Full() == Full()
    assert Causal() & Documents((3, 4)) & Causal() == Causal() & Documents((3, 4))
    assert hash(Documents((3, 4))) == hash(Documents([3, 4]))
    assert Documents((3, 4)) != Documents((4, 3))
    assert Documents((3, 4)) != Documents((3, 4), (1, 0))
    tensor = torch.ones(4, 4, dtype=torch.bool)
    assert Dense(tensor) == Dense(tensor) != Dense(tensor.clone())  # comparing values would take a device's time


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_the_three_ways_to_say_documents_agree(lengths: list[int]):
    sizes = torch.tensor(lengths)
    ends = [0, *sizes.cumsum(0).tolist()]
    expected = Documents(lengths)
    assert Documents.from_cu_seqlens(ends) == expected
    assert Documents.from_cu_seqlens(torch.tensor(ends, dtype=torch.int32)) == expected
    ids = torch.arange(len(lengths)).repeat_interleave(sizes)
    positions = torch.cat([torch.arange(size) for size in lengths])
    assert Documents.from_ids(ids) == Documents.from_ids(ids.tolist()) == expected
    assert Documents.from_positions(positions) == Documents.from_positions(positions.tolist()) == expected
    assert expected.length == sum(lengths)


def test_empty_documents_are_dropped_from_cu_seqlens():
    assert Documents.from_cu_seqlens([0, 0, 3, 3, 5]) == Documents((3, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Documents((3, 0)), "at least 1, got 0"),
        (lambda: Documents((3, 4), (1,)), "one length a document"),
        (lambda: Documents((3, 4), (1, 5)), "between 0 and that document's length"),
        (lambda: Documents.from_cu_seqlens([1, 3]), "start with 0"),
        (lambda: Documents.from_cu_seqlens([[0, 3]]), "1-D"),
        (lambda: Documents.from_cu_seqlens([0]), "start with 0"),
        (lambda: Documents.from_cu_seqlens([0, 3, 2]), "must not decrease"),
        (lambda: Documents.from_ids(torch.tensor([[[0, 1]]])), r"must be \[S\] or \[B, S\], got shape \(1, 1, 2\)"),
        (lambda: Documents.from_ids(torch.tensor([0, 1, 0])), "returns after another document"),
        (lambda: Documents.from_positions(torch.tensor([1, 2])), "start with 0"),
        (lambda: Documents.from_positions(torch.tensor([0, 1, 3])), "count up by one"),
        (lambda: Documents.from_positions(torch.tensor([0, 1, 1])), "count up by one"),
        (lambda: SlidingWindow(-1), "left must be >= 0 or None, got -1"),
        (lambda: SlidingWindow(1, -1), "right must be >= 0 or None, got -1"),
        (lambda: Chunked(0), "at least 1, got 0"),
        (lambda: PrefixLM(-1), "must be >= 0, got -1"),
        (lambda: (Documents((3,)) & Documents((2, 2))).length, "different lengths"),
        (lambda: Dense(torch.ones(3)), "must broadcast"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_dense_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match=r"bool \(True: attend\) or float"):
        Dense(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="gradient of an attention bias"):
        Dense(torch.ones(3, 3, requires_grad=True))


@pytest.mark.parametrize("shape", [(5, 5), (1, 5), (5, 1), (2, 1, 5, 5), (3, 1, 5)])
def test_dense_gives_rows_and_columns_of_what_it_holds(shape: tuple[int, ...]):
    rows, columns = torch.tensor([4, 0]), torch.tensor([1, 2, 3])
    floats = randn(0, *shape)
    whole = floats.expand(*shape[:-2], 5, 5)
    expected = whole[..., rows, :][..., columns]
    found = Dense(floats).bias(rows, columns).expand(expected.shape)
    assert torch.equal(found, expected)
    booleans = Dense(floats > 0).bias(rows, columns).expand(expected.shape)
    assert torch.equal(booleans, torch.zeros(()).where(expected > 0, float("-inf")))
