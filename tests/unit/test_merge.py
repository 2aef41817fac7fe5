"""Partial attentions merged, and partial gradients summed, in the accumulation dtype."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_styles import Ring, context_attention
from cp_styles.kernels import ReferenceKernel, merge
from cp_styles.kernels.base import LseGradient
from cp_styles.kernels.choice_by_tile import ByTile
from cp_styles.kernels.merge import (
    EMPTY_LSE,
    FUSED_MERGE,
    FusedMerge,
    OnlineSoftmax,
    RowSum,
    TorchMerge,
    accumulation_dtype,
)
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.testing import run_ranks
from tests.gpu_tensors import OnGpu
from tests.oracle import attention_inputs, error

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


class Counted(TorchMerge):
    def __init__(self, takes: bool) -> None:
        object.__setattr__(self, "answer", takes)
        object.__setattr__(self, "calls", [])

    def takes(self, out_BHLE, new_out_BHLE):
        return self.answer

    def __call__(self, out_BHLE, *tensors):
        self.calls.append(out_BHLE.shape)
        super().__call__(out_BHLE, *tensors)


@pytest.mark.parametrize("takes", [True, False])
def test_tiles_are_merged_as_the_kernel_says(takes: bool):
    """By its object, or by torch's operations where that takes no such tensors."""
    counted = Counted(takes)
    kernel = replace(CPU_FLASH, merge=counted)
    (q, k, v), _ = attention_inputs(length=8)

    def attend(rank: int) -> torch.Tensor:
        parts = [x.chunk(2, 2)[rank] for x in (q, k, v)]
        return context_attention(*parts, dist.group.WORLD, kernel=kernel, strategy=Ring())

    whole = torch.cat(run_ranks(attend, 2), 2)
    assert error(whole, CPU_FLASH.forward(q, k, v, causal=False, bias=None, scale=q.shape[-1] ** -0.5)[0]) < 1e-14
    assert counted.calls == [(*q.shape[:2], 4, q.shape[3])] * (2 * takes)  # each rank has two tiles
    assert LseGradient(kernel).merge is ByTile((kernel, ReferenceKernel()), (ReferenceKernel(),)).merge is counted
    assert repr(kernel) == repr(CPU_FLASH)  # which ranks compare


def test_which_tensors_are_merged_in_triton(monkeypatch):
    """Real ones on CUDA, in the dtypes that it computes, where it runs."""
    tried = []
    monkeypatch.setattr(merge, "_runs_triton", lambda device: not tried.append(device))
    shape, low, single, double = (1, 1, 2, 3), torch.bfloat16, torch.float32, torch.float64
    real = {dtype: torch.zeros(shape, dtype=dtype) for dtype in (low, torch.float16, single, double)}
    with FakeTensorMode():
        fake = torch.zeros(shape, device="cuda")
    assert fake.device.type == "cuda"
    for other in (real[single], torch.zeros(shape, device="meta"), fake, OnGpu(real[single])):
        assert not FUSED_MERGE.takes(other, other)
    assert not tried
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 1))
    for tile in (low, torch.float16, single):
        assert FUSED_MERGE.takes(real[single], real[tile])
    assert set(tried) == {torch.device("cuda", 1)}
    assert not FUSED_MERGE.takes(real[single], real[double])
    assert not FUSED_MERGE.takes(real[double], real[low])
    assert not FUSED_MERGE.takes(real[single], OnGpu(real[single]))
    assert not FUSED_MERGE.takes(real[single][:, :, :1].expand(1, 2**15, 2**15, 3), real[low])
    monkeypatch.setattr(merge, "_runs_triton", lambda device: False)
    assert not FUSED_MERGE.takes(real[single], real[low])


def test_where_triton_does_not_run(monkeypatch):
    """It is tried once on a device. torch's operations take its place, with a warning if it is installed."""
    tried = merge._runs_triton.__wrapped__
    monkeypatch.setattr(merge, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not tried(CPU)
    monkeypatch.setattr(merge, "find_spec", lambda name: name)
    said: list[BaseException] = [RuntimeError("Failed to find C compiler"), torch.OutOfMemoryError()]

    def fails(*tensors):
        raise said.pop(0)

    with monkeypatch.context() as patch:
        patch.setattr(FusedMerge, "__call__", fails)
        with pytest.warns(
            UserWarning, match=r"on cpu: RuntimeError: Failed to find C(?s:.*)set CC(?s:.*)TorchMerge\(\)"
        ):
            assert not tried(CPU)
        with pytest.raises(torch.OutOfMemoryError):  # which says nothing of Triton
            tried(CPU)
    monkeypatch.setattr(FusedMerge, "__call__", TorchMerge.__call__)
    assert tried(CPU)
