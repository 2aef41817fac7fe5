"""Many tiles in one call: packs and their parts, the varlen ops' schemas, and the same results as tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_styles.kernels import CPU_FLASH, CUDA_FLASH, Kernel, TileCall, sdpa
from cp_styles.kernels.base import LseGradient
from cp_styles.kernels.packing import Packing
from tests.oracle import error, expected_attention, randn
from tests.varlen_op import ALONE, PACKED, STAND_IN, Ops, varlen_ops_on_cpu

# Queries, keys and cover, in an order that mixes covers; one query, one key, and equal and other lengths.
TILES = ((5, 5, True), (3, 7, False), (1, 1, True), (1, 9, False), (8, 8, True), (4, 4, False))
# As in tests/unit/test_kernels.py: sums of few terms.
EXACT = 1e-14

Results = Sequence[Sequence[torch.Tensor]]


def tile_calls(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 8, scale: float = 0.3, **to
) -> list[TileCall]:
    """Forwards of TILES."""
    calls = []
    for seed, (queries, keys, causal) in enumerate(TILES):
        shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
        # [B, L, H, D] in memory, some of longer rows, as tiles of a plan are.
        tensors = (randn(10 * seed + i, batch, size + 3, h, dim)[:, 2:-1] for i, (h, size) in enumerate(shapes))
        options = {"causal": causal, "bias": None, "scale": scale}
        calls.append(TileCall(tuple(x.transpose(1, 2).to(**to) for x in tensors), options))
    return calls


def run(kernel: Kernel, calls: list[TileCall]) -> list[list[torch.Tensor]]:
    """``[out, dq, dk, dv]`` of each."""
    forwards = dict(kernel.forward_tiles(enumerate(calls)))
    backwards = [
        TileCall((randn(99, *forwards[index][0].shape).to(q), q, k, v, *forwards[index]), options)
        for index, ((q, k, v), options) in enumerate(calls)
    ]
    gradients = dict(kernel.backward_tiles(enumerate(backwards)))
    assert set(forwards) == set(gradients) == set(range(len(calls)))
    return [[forwards[index][0], *gradients[index]] for index in range(len(calls))]


def expected(calls: list[TileCall]) -> list[list[torch.Tensor]]:
    results = []
    for (q, k, v), options in calls:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = mask.tril() if options["causal"] else mask
        cotangent = randn(99, *q.shape)
        inputs = [x.cpu() for x in (q, k, v)]
        results.append(expected_attention(inputs, cotangent.to(q.dtype), mask, scale=options["scale"]))
    return results


def errors(results: Results, wanted: Results) -> list[float]:
    """Of each result of each tile."""
    return [
        error(mine, theirs)
        for found, right in zip(results, wanted, strict=True)
        for mine, theirs in zip(found, right, strict=True)
    ]


def test_a_pack_is_taken_apart_again():
    tiles = [randn(seed, batch, 3, rows, 4) for seed, (batch, rows) in enumerate(((2, 5), (1, 1), (3, 2)))]
    packing = Packing.of(tiles)
    assert packing.bounds(torch.device("cpu")).tolist() == [0, 5, 10, 11, 13, 15, 17]
    assert packing.bounds(torch.device("cpu")).dtype == torch.int32
    assert packing.longest == 5
    pack, lse = packing.join(tiles), packing.join_lse([x[..., 0] for x in tiles])
    assert (pack.shape, lse.shape) == ((17, 3, 4), (3, 17))
    assert pack.is_contiguous()
    assert lse.is_contiguous()
    assert torch.equal(pack[5:10], tiles[0][1].transpose(0, 1))
    for mine, row, tile in zip(packing.split(pack), packing.split_lse(lse), tiles, strict=True):
        assert torch.equal(mine, tile)
        assert torch.equal(row, tile[..., 0])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("scale", [0.3, -0.7, 0.0])
def test_tiles_together_are_tiles(kv_heads: int, batch: int, scale: float):
    calls = tile_calls(batch=batch, kv_heads=kv_heads, scale=scale)
    with varlen_ops_on_cpu(), Ops() as ops:
        results = run(STAND_IN, calls)
    assert ops.counts == dict.fromkeys(PACKED, 2)
    assert max(errors(results, expected(calls))) < EXACT


def test_tiles_with_a_mask_and_tiles_alone_go_as_they_did():
    calls = tile_calls()[:3]
    calls[2].options.update(causal=False, bias=torch.zeros(1, 1, dtype=torch.float64))
    with varlen_ops_on_cpu(), Ops() as ops:
        results = run(STAND_IN, calls)
    assert ops.counts == dict.fromkeys(ALONE, 3)
    assert max(errors(results, expected(calls))) < EXACT


@pytest.mark.parametrize(("most", "forwards"), [(12_000, {PACKED[0]: 2, ALONE[0]: 2}), (25_000, {PACKED[0]: 2})])
def test_a_pack_has_a_largest_size(most: int, forwards: dict[str, int], monkeypatch):
    """In bytes: 512 (queries + keys) of a forward. Two full tiles of 10 rows fit, 8 more do not; nor do causal ones of
    10, 2 and 16; all fit the second limit. A backward has 128 float32 rows more for each document, so there all are
    alone."""
    monkeypatch.setattr(sdpa, "_MOST_BYTES", most)
    calls = tile_calls()
    with varlen_ops_on_cpu(), Ops() as ops:
        results = run(STAND_IN, calls)
    assert ops.counts == {**forwards, ALONE[1]: 6}
    assert max(errors(results, expected(calls))) < EXACT


def test_long_tiles_go_alone(monkeypatch):
    """Of 2 batch rows: 8 queries and 5 are more than 9, and of the causal ones that leaves the one of one query."""
    monkeypatch.setattr(sdpa, "_LONG_TILE", 9)
    calls = tile_calls()
    with varlen_ops_on_cpu(), Ops() as ops:
        results = run(STAND_IN, calls)
    assert ops.counts == {PACKED[0]: 1, PACKED[1]: 1, ALONE[0]: 3, ALONE[1]: 3}
    assert max(errors(results, expected(calls))) < EXACT


def test_gradients_of_logsumexps_go_together_as_well():
    calls = tile_calls()
    forwards = dict(CPU_FLASH.forward_tiles(enumerate(calls)))
    backwards = [
        TileCall((randn(7, *q.shape[:3], q.shape[3] + 1), q, k, v, *forwards[index]), options)
        for index, ((q, k, v), options) in enumerate(calls)
    ]
    with varlen_ops_on_cpu(), Ops() as ops:
        found = dict(LseGradient(STAND_IN).backward_tiles(enumerate(backwards)))
    assert ops.counts == {PACKED[1]: 2}
    gradients = [LseGradient(CPU_FLASH).backward(*tensors, **options) for tensors, options in backwards]
    assert max(errors([found[index] for index in range(len(calls))], gradients)) < EXACT


def test_tiles_of_one_query():
    """The op's way for decoding, which it takes where no document has two queries, is not for training."""
    calls = [call for call in tile_calls() if call.tensors[0].shape[2] == 1] * 2
    with varlen_ops_on_cpu(), Ops() as ops:
        run(STAND_IN, calls)
    assert ops.counts == dict.fromkeys(PACKED, 2)
    assert [ops.seen[name]["max_q"] for name in PACKED] == [2, 2]


def test_only_a_varlen_kernel_holds_tiles_back():
    """Others are given a tile when its result is asked for: a mask of one tile at a time is in memory."""
    made = []

    def tiles():
        for index, call in enumerate(tile_calls()):
            made.append(index)
            yield index, call

    results = CPU_FLASH.forward_tiles(tiles())
    assert next(results)[0] == 0
    assert made == [0]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_cuda_kernel_fits_the_schemas_of_this_torch(kv_heads: int):
    """Shapes and dtypes of both directions without a GPU. On a torch built for CPU, fake tensors must be meta's."""
    device = "cuda" if torch.backends.cuda.is_built() else "meta"
    with FakeTensorMode(), Ops() as ops:
        calls = tile_calls(kv_heads=kv_heads, dim=64, dtype=torch.bfloat16, device=device)
        forwards = dict(CUDA_FLASH.forward_tiles(enumerate(calls)))
        for index, ((q, _, _), _) in enumerate(calls):
            out, lse = forwards[index]
            assert (tuple(out.shape), out.dtype) == (tuple(q.shape), torch.bfloat16)
            assert (tuple(lse.shape), lse.dtype) == (tuple(q.shape[:3]), torch.float32)
        backwards = [
            TileCall((torch.empty_like(q), q, k, v, *forwards[index]), options)
            for index, ((q, k, v), options) in enumerate(calls)
        ]
        gradients = dict(CUDA_FLASH.backward_tiles(enumerate(backwards)))
    for index, ((q, k, v), _) in enumerate(calls):
        assert [tuple(x.shape) for x in gradients[index]] == [tuple(x.shape) for x in (q, k, v)]
        assert {x.dtype for x in gradients[index]} == {torch.bfloat16}
    assert ops.counts == dict.fromkeys(PACKED, 2)
    for name in PACKED:
        seen = ops.seen[name]  # of the full tiles, which come last
        assert seen["scale"] == 0.3
        assert (seen["max_q"], seen["max_k"], seen["is_causal"]) == (4, 9, False)
        assert [tuple(seen[x].shape) for x in ("cum_seq_q", "cum_seq_k")] == [(7,), (7,)]
        assert seen["cum_seq_q"].dtype == torch.int32
        assert tuple(seen["query"].shape) == (16, 4, 64)
        assert tuple(seen["key"].shape) == (40, kv_heads, 64)
    backward = ops.seen[PACKED[1]]
    assert tuple(backward["logsumexp"].shape) == (4, 16)  # [H, T], which is what the forward's has as well
    assert all(backward[x].is_contiguous() for x in ("logsumexp", "cum_seq_q", "cum_seq_k"))


def test_the_logsumexp_of_a_pack_is_heads_by_rows():
    with FakeTensorMode():
        q, bounds = torch.empty(20, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(4, dtype=torch.int32)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, q, q, bounds.to("meta"), bounds.to("meta"), 9, 9, 0.0, True, False
        )
    assert (tuple(out.shape), tuple(lse.shape), lse.dtype) == ((20, 4, 64), (4, 20), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cuda_tiles_together_are_as_good_as_one_by_one(kv_heads: int):
    calls = tile_calls(kv_heads=kv_heads, dim=64, dtype=torch.bfloat16, device="cuda")
    together = run(CUDA_FLASH, calls)
    alone = [run(CUDA_FLASH, [call])[0] for call in calls]
    # Of all tiles as one vector: where a query has one key its gradient is 0, and the error a rounding, good or bad.
    together, alone, wanted = (
        [torch.cat([x.cpu().double().flatten() for x in parts]) for parts in zip(*results, strict=True)]
        for results in (together, alone, expected(calls))
    )
    for packed, single, right in zip(together, alone, wanted, strict=True):
        assert error(packed, right) <= 1.1 * error(single, right)
