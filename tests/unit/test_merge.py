"""Partial attentions merged, and partial gradients summed, in the accumulation dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_styles.kernels.merge import EMPTY_LSE, OnlineSoftmax, RowSum, accumulation_dtype
from tests.oracle import error

CPU = torch.device("cpu")
HEAD = (0, 1)  # all there are


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 2), st.integers(0, 5), st.integers(1, 6)), max_size=8))
def test_tiles_of_any_rows_and_heads(places: list[tuple[int, int, int, int]]):
    """A tile is copied to rows that none has begun, and merged with others. Against each row's weights."""
    softmax, generator = OnlineSoftmax((1, 2, 6, 1), torch.float64, CPU), torch.Generator().manual_seed(0)
    weight, total = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64)
    for first, heads, start, rows in places:
        head, row = slice(first, min(first + heads, 2)), slice(start, min(start + rows, 6))
        out, lse = torch.randn(2, 1, head.stop - first, row.stop - start, dtype=torch.float64, generator=generator)
        weight[head, row] += lse[0].exp()
        total[head, row] += lse[0].exp() * out[0]
        softmax.add((head.start, head.stop), (row.start, row.stop), out.unsqueeze(-1), lse)
    out, lse = softmax.result()
    some = weight > 0
    # Up to eight merges of float64.
    assert torch.allclose(lse[0][some], weight[some].log(), rtol=0, atol=1e-13)
    assert torch.allclose(out[0, ..., 0][some], (total / weight)[some], rtol=1e-13, atol=1e-13)
    assert bool((lse[0][~some] == EMPTY_LSE).all())


def test_nothing_at_all_is_zero_and_empty():
    out, lse = OnlineSoftmax((1, 1, 2, 3), torch.float32, CPU).result()
    assert not out.any()
    assert bool((lse == EMPTY_LSE).all())
    assert not RowSum((1, 1, 2, 3), torch.float32, CPU).result().any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_far_apart_logsumexps_neither_overflow_nor_lose_the_larger(sign: float):
    softmax = OnlineSoftmax((1, 1, 2, 3), torch.float32, CPU)
    small, large = torch.full((1, 1, 2), -1e4 * sign), torch.full((1, 1, 2), 1e4 * sign)
    softmax.add(HEAD, (0, 2), torch.full((1, 1, 2, 3), 1.0 if sign > 0 else 2.0), small)
    softmax.add(HEAD, (0, 2), torch.full((1, 1, 2, 3), 2.0 if sign > 0 else 1.0), large)
    softmax.add(HEAD, (0, 2), torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), EMPTY_LSE))
    out, lse = softmax.result()
    assert torch.equal(out, torch.full((1, 1, 2, 3), 2.0))
    assert torch.equal(lse, torch.full((1, 1, 2), 1e4))


@pytest.mark.parametrize("first_whole", [True, False])
def test_low_precision_tiles_are_merged_in_float32(first_whole: bool):
    """A kernel that returns bfloat16: 64 equal tiles add one rounding of the last merge at most, not 64."""
    tile = torch.full((1, 1, 2, 4), 1.0, dtype=torch.bfloat16)
    softmax = OnlineSoftmax((1, 1, 2, 4), torch.bfloat16, CPU)
    if not first_whole:
        softmax.add(HEAD, (0, 1), torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16), torch.full((1, 1, 1), EMPTY_LSE))
    for index in range(64):
        softmax.add(HEAD, (0, 2), tile + index * 2**-7, torch.zeros(1, 1, 2))
    out, lse = softmax.result()
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    mean = torch.stack([tile + index * 2**-7 for index in range(64)]).double().mean(0)
    assert error(out, mean) < 1e-6  # float32's rounding, 64 times; bfloat16's would be 4e-3
    assert error(lse, torch.full((1, 1, 2), 64.0).log()) < 1e-6


def test_one_whole_tile_is_not_copied():
    tile, lse = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 2)
    softmax = OnlineSoftmax((1, 1, 2, 4), torch.bfloat16, CPU)
    softmax.add(HEAD, (0, 2), tile, lse)
    assert softmax.result()[0] is tile


def test_row_sum_adds_and_keeps_the_first_whole_tile():
    total = RowSum((1, 1, 4, 2), torch.float32, CPU)
    first = torch.ones(1, 1, 4, 2)
    total.add(HEAD, (0, 4), first)
    assert total.result() is first  # no copy where there is one tile
    total.add(HEAD, (1, 3), torch.ones(1, 1, 2, 2, dtype=torch.bfloat16))
    assert total.result()[0, 0, :, 0].tolist() == [1, 2, 2, 1]


def test_row_sum_adds_parts_that_come_before_a_whole_tile():
    """They wait for it, if they are at most half as large. A part of one that waits is added to that."""
    for later in ((1, 3), (0, 2), (2, 3)):
        total = RowSum((1, 1, 4, 2), torch.float32, CPU)
        for rows in ((1, 3), later, (0, 4)):
            total.add(HEAD, rows, torch.ones(1, 1, rows[1] - rows[0], 2))
        expected = [1 + int(1 <= row < 3) + int(later[0] <= row < later[1]) for row in range(4)]
        assert total.result()[0, 0, :, 0].tolist() == expected


def test_accumulation_dtype():
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    assert [accumulation_dtype(dtype) for dtype in dtypes] == [torch.float64, *[torch.float32] * 3]
