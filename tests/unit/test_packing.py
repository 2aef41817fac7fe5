"""Many tiles in one call: which tiles a pack has, the varlen ops' schemas, and the same results as tile by tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_styles.kernels import Kernel, packing
from cp_styles.kernels.base import LseGradient
from cp_styles.kernels.choice_by_tile import ByTile
from cp_styles.kernels.packing import Pack, part_of
from cp_styles.kernels.sdpa import CPU_FLASH, CUDA_FLASH
from cp_styles.plan.tiles import Cover, Tile
from cp_styles.strategies.packs import PackedTiles, make_calls, row_index
from tests.oracle import error, expected_attention, randn
from tests.varlen_op import ALONE, PACKED, STAND_IN, Ops, varlen_ops_on_cpu

CPU = torch.device("cpu")
# Queries and keys of causal tiles and of others; one query, one key.
LENGTHS = {True: ((5, 1, 8), (5, 1, 8)), False: ((3, 1, 4), (7, 9, 4))}
# As in tests/unit/test_kernels.py: sums of few terms.
EXACT = 1e-14


def pack_of(
    causal: bool, batch: int = 2, kv_heads: int = 2, dim: int = 8, scale: float = 0.3, **to
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Gradient of the output, query, key and value of tiles, and what a kernel is told of them."""
    q_lengths, kv_lengths = LENGTHS[causal]
    rows, keys = sum(q_lengths), sum(kv_lengths)
    shapes = ((4, rows), (4, rows), (kv_heads, keys), (kv_heads, keys))
    # [B, L, H, D] in memory, of longer rows, as parts of a rank's tensors are.
    tensors = [
        randn(i, batch, size + 3, heads, dim)[:, 2:-1].transpose(1, 2).to(**to)
        for i, (heads, size) in enumerate(shapes)
    ]
    pack = Pack.of(LENGTHS[causal], batch, tensors[0].device)
    return tensors, {"causal": causal, "bias": None, "scale": scale, "pack": pack}


def run(kernel: Kernel, tensors: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """``[out, dq, dk, dv]``."""
    grad, *given = tensors
    out, lse = kernel.forward(*given, **options)
    return [out, *kernel.backward(grad, *given, out, lse, **options)]


def expected(tensors: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    q_ids, kv_ids = (torch.arange(3).repeat_interleave(torch.tensor(sizes)) for sizes in options["pack"].lengths)
    mask = q_ids[:, None] == kv_ids
    mask = mask.tril() if options["causal"] else mask
    grad, *given = (x.cpu() for x in tensors)
    return expected_attention(given, grad, mask, scale=options["scale"])


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(error(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("scale", "causal"), [(0.3, True), (-0.7, True), (0.0, True), (0.3, False)])
def test_tiles_together_are_tiles(kv_heads: int, batch: int, scale: float, causal: bool):
    tensors, options = pack_of(causal, batch=batch, kv_heads=kv_heads, scale=scale)
    with varlen_ops_on_cpu(), Ops() as ops:
        found = run(STAND_IN, tensors, options)
    assert ops.counts == dict.fromkeys(PACKED, 1)
    assert worst(found, expected(tensors, options)) < EXACT


@pytest.mark.parametrize("causal", [True, False])
def test_where_no_kernel_takes_a_pack_its_tiles_go_one_by_one(causal: bool):
    tensors, options = pack_of(causal)
    with Ops() as ops:
        found = run(ByTile((CPU_FLASH,), (CPU_FLASH,)), tensors, options)
    assert ops.counts == dict.fromkeys(ALONE, 3)
    assert worst(found, expected(tensors, options)) < EXACT


def test_gradients_of_logsumexps_go_together_as_well():
    (grad, q, k, v), options = pack_of(True)
    grad = torch.cat((grad, randn(7, *grad.shape[:3], 1)), -1)
    with varlen_ops_on_cpu(), Ops() as ops:
        out, lse = STAND_IN.forward(q, k, v, **options)
        found = LseGradient(STAND_IN).backward(grad, q, k, v, out, lse, **options)
    assert ops.counts == dict.fromkeys(PACKED, 1)
    single = LseGradient(ByTile((CPU_FLASH,), (CPU_FLASH,)))
    assert worst(list(found), list(single.backward(grad, q, k, v, out, lse, **options))) < EXACT


def test_tiles_of_one_query():
    """The op's way for decoding, which it takes where no document has two queries, is not for training."""
    q, k = randn(0, 1, 4, 3, 8), randn(1, 1, 2, 3, 8)
    options = {"causal": False, "bias": None, "scale": 0.3, "pack": Pack.of(((1, 1, 1), (1, 1, 1)), 1, CPU)}
    with varlen_ops_on_cpu(), Ops() as ops:
        run(STAND_IN, [q, q, k, k], options)
    assert [ops.seen[name]["max_q"] for name in PACKED] == [2, 2]


# -- which tiles --


def tile(start: int, rows: int, keys: int = 8, cover: Cover = Cover.FULL, window=None, at: int = 0) -> Tile:
    return Tile((start, start + rows), (at, at + keys), cover, window)


SHAPES = ((2, 4, 40, 8), (2, 2, 40, 8), (2, 2, 40, 8))


def names(tiles: list[Tile], **options) -> list[list[int]]:
    """The first rows of the tiles of each call."""
    calls = make_calls(tiles, SHAPES, **{"small_tiles": True} | options)
    rows = []
    for call in calls:
        starts = [call.q[0]]
        if isinstance(call, PackedTiles):
            flat = [row for start, stop in call.rows[0] for row in range(start, stop)]
            starts, at = [], 0
            for count in call.lengths[0]:
                starts.append(flat[at])
                at += count
        rows.append(starts)
    return rows


def test_tiles_of_one_cover_are_packed():
    mask, band = Cover.PARTIAL, Cover.BAND
    tiles = [
        tile(0, 4, cover=mask),
        tile(0, 8, cover=Cover.CAUSAL),
        tile(4, 4),
        tile(8, 8, cover=Cover.CAUSAL, at=8),
        tile(16, 4, cover=band, window=(3, 0)),
        tile(20, 4, cover=band, window=(2, 0)),
        tile(24, 4),
        tile(28, 4, cover=band, window=(3, 0)),
    ]
    assert names(tiles) == [[0, 8], [4, 24], [16, 28], [20], [0]]
    assert names(tiles, small_tiles=False) == [[0], [4], [8], [16], [20], [24], [28], [0]]
    # A row of queries is in a pack once, or its results could not be merged at once.
    assert names([tile(0, 4), tile(2, 4), tile(6, 4)]) == [[0], [2, 6]]


def test_long_tiles_go_alone(monkeypatch):
    """Of 2 batch rows: 5 queries are more than 9. With 4 heads, these are 40 rows of all heads."""
    monkeypatch.setattr(packing, "LONG_TILE", 9)
    monkeypatch.setattr(packing, "FEW_ROWS", 39)
    assert names([tile(0, 4), tile(4, 5), tile(9, 4)]) == [[4], [0, 9]] or names(
        [tile(0, 4), tile(4, 5), tile(9, 4)]
    ) == [[0, 9], [4]]
    monkeypatch.setattr(packing, "FEW_ROWS", 40)
    assert names([tile(0, 4), tile(4, 5), tile(9, 4)]) == [[0, 4, 9]]


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "packed"),
    [
        (1, 32, 1024, True),
        (1, 32, 1025, False),
        (1, 4, 1310, True),
        (1, 4, 2048, True),
        (1, 4, 2049, False),
        (2, 4, 1310, False),
        (1, 4, 4096, False),
    ],
)
def test_tiles_that_fill_half_of_a_gpu_go_alone(batch: int, heads: int, rows: int, packed: bool):
    """4 heads are those of a rank of 8 after the exchange of Ulysses. Two halves of 8K rows are left to cuDNN."""
    shapes = tuple((batch, count, 2 * rows, 128) for count in (heads, heads // 4, heads // 4))
    tiles = [tile(start, rows, rows, Cover.CAUSAL, at=start) for start in (0, rows)]
    assert len(make_calls(tiles, shapes, small_tiles=True)) == (1 if packed else 2)  # pyright: ignore


def test_a_pack_has_a_largest_size(monkeypatch):
    """In 16 bits, of a tile of 4 rows and 8 keys: 4 * 4 * 24 numbers of queries, gradients and outputs, 8 * 2 * 16 of
    keys, 132 rows of dq in float32 with 32 columns for each of 4 heads, and 4 rows of 8."""
    size = 2 * (2 * (4 * 4 * 24 + 8 * 2 * 16) + 4 * 4 * (132 * 32 + 4 * 8))
    assert packing.bytes_of_tile(*SHAPES, 4, 8) == size
    tiles = [tile(4 * index, 4) for index in range(5)]
    for most, wanted in ((5 * size, [[0, 4, 8, 12, 16]]), (2 * size, [[0, 4], [8, 12], [16]]), (1, 5)):
        monkeypatch.setattr(packing, "MOST_BYTES", most)
        assert names(tiles) == (wanted if most > 1 else [[4 * index] for index in range(5)])


def test_rows_of_a_pack():
    """Neighbours are one range, and a view; otherwise rows are copied, keys that two tiles share for each."""
    pack = PackedTiles.of([tile(0, 4, at=0), tile(4, 2, at=8), tile(8, 3, at=4)])
    assert (pack.q, pack.kv, pack.lengths) == ((0, 11), (0, 16), ((4, 2, 3), (8, 8, 8)))
    assert pack.rows == (((0, 6), (8, 11)), ((0, 16), (4, 12)))
    documents, *indices = pack.on(2, CPU)
    assert [x.tolist() for x in documents.bounds] == [[0, 4, 6, 9, 13, 15, 18], [0, 8, 16, 24, 32, 40, 48]]
    assert {x.dtype for x in documents.bounds} == {torch.int32}
    tensor = randn(0, 2, 3, 20, 5)
    for index, ranges in zip(indices, pack.rows, strict=True):
        rows = [row for start, stop in ranges for row in range(start, stop)]
        assert index is not None
        assert index.tolist() == rows
        assert torch.equal(part_of(tensor, (1, 3), (0, 16), index), tensor[:, 1:3, rows])
        assert torch.equal(part_of(tensor[..., 0], (1, 3), (0, 16), index), tensor[:, 1:3, rows, 0])
    assert row_index(((3, 9),), CPU) is None


# -- the ops of CUDA --


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_cuda_kernel_fits_the_schemas_of_this_torch(kv_heads: int):
    """Shapes and dtypes of both directions without a GPU. On a torch built for CPU, fake tensors must be meta's."""
    device = "cuda" if torch.backends.cuda.is_built() else "meta"
    with FakeTensorMode(), Ops() as ops:
        tensors, options = pack_of(False, kv_heads=kv_heads, dim=64, dtype=torch.bfloat16, device=device)
        grad, q, k, v = tensors
        out, lse = CUDA_FLASH.forward(q, k, v, **options)
        assert (tuple(out.shape), out.dtype) == (tuple(q.shape), torch.bfloat16)
        assert (tuple(lse.shape), lse.dtype) == (tuple(q.shape[:3]), torch.float32)
        gradients = CUDA_FLASH.backward(grad, q, k, v, out, lse, **options)
    assert [tuple(x.shape) for x in gradients] == [tuple(x.shape) for x in (q, k, v)]
    assert {x.dtype for x in gradients} == {torch.bfloat16}
    assert ops.counts == dict.fromkeys(PACKED, 1)
    for name in PACKED:
        seen = ops.seen[name]
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
    tensors, options = pack_of(True, kv_heads=kv_heads, dim=64, dtype=torch.bfloat16, device="cuda")
    grad, *given = tensors
    together = run(CUDA_FLASH, tensors, options)
    single = {name: value for name, value in options.items() if name != "pack"}
    out, lse = options["pack"].one_by_one(lambda *x: CUDA_FLASH.forward(*x, **single), tuple(given), 0)
    backward = (grad, *given, out, lse)
    alone = [out, *options["pack"].one_by_one(lambda *x: CUDA_FLASH.backward(*x, **single), backward, 1)]
    for packed, one, right in zip(together, alone, expected(tensors, options), strict=True):
        assert error(packed.cpu(), right) <= 1.1 * error(one.cpu(), right)
