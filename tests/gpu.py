"""The checks that need a GPU: python tests/gpu.py, on a machine with one or several. It writes a record.

    python tests/gpu.py [--out gpu_record.jsonl] [--only kernels bench ...] [--seconds 600] [--total 570]
    python tests/gpu.py --total 570 --resume gpu_record.jsonl     cases that have ended in this record are left out
    python tests/gpu.py --dry-run      the plan, a line of JSON for each case; nothing runs

A case is a process of its own, with its limit and its own process group, which is ended with it. The cases of one
kernel share a process. After each cover or setting a line of JSON is written to the file, and a short one to the
screen; then a line for the case. An exception costs one cover. A summary comes last. The stages:

kernels   the real ops: each kernel, dtype and head dim, with all covers, explicit masks, packs and merges, against
          float64 on the CPU, with the error of torch's own attention in the same dtype as the limit
nccl      one rank that sends to itself in a batch
ranks     two ranks on one GPU: messages are copied to the host and sent by gloo. Autograd has its own threads there
job       the main job of the README, with --cp 2 on one GPU by such messages
bench     milliseconds and TFLOP/s of kernels; tests/replay.py --time has an attention
compile   the style under torch.compile, default and with CUDA graphs, on one rank; flex_attention on two
grid      with several GPUs: rows of the parity grid over NCCL, a rank for each

``--stand-ins`` takes the CPU and tests/cuda_ops.py in place of a GPU: it shows that the plan runs, and nothing else.
"""

# ruff: noqa: E402 - the clock of --total starts before torch is imported

from __future__ import annotations

import time

BEGUN = time.monotonic()

import argparse
import contextlib
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import (
    AllGather,
    AttentionContextParallel,
    Causal,
    Documents,
    ModuleContextParallel,
    Ring,
    SlidingWindow,
    Ulysses,
    flex_attention,
)
from cp_styles.functions.attention import context_attention
from cp_styles.kernels import CompiledFlexKernel, Kernel
from cp_styles.kernels.choice_by_tile import kernel_for_tiles
from cp_styles.kernels.merge import OnlineSoftmax, RowSum
from cp_styles.kernels.packing import Pack
from cp_styles.kernels.sdpa import CUDA_CUDNN, CUDA_EFFICIENT, CUDA_FLASH
from cp_styles.layouts import SequenceLayout, head_tail
from tests.cuda_ops import CUDNN, EFFICIENT, FLASH, ON_GPU, REFERENCE, ByTile, cuda_ops_on_cpu
from tests.device import messages_over_the_host
from tests.gpu_record import (
    Check,
    Found,
    Record,
    device_is_lost,
    hardware,
    judge,
    run_checks,
    timed,
    tolerance,
)
from tests.oracle import attend_and_differentiate, attention_inputs, error, expected_attention, randn

LOW = (torch.float16, torch.bfloat16)
# Against torch's attention on one device in the same dtype: a merge rounds once more. Half a rounding is added.
RATIO, FLOOR = 1.5, 0.25
STAND_INS = "--stand-ins" in sys.argv
DEVICE = "cpu" if STAND_INS else "cuda"
KERNELS = {"flash": CUDA_FLASH, "efficient": CUDA_EFFICIENT, "cuDNN": CUDA_CUDNN}
STANDING_IN: dict[str, Kernel] = {"flash": FLASH, "efficient": EFFICIENT, "cuDNN": CUDNN}


class Case(NamedTuple):
    """``run`` gives the checks of a case. Cases with the same ``process`` share one; "" is one of its own."""

    stage: str
    run: Callable[[], Iterator[Check]]
    seconds: int = 120
    ranks: int = 1
    gpus: int = 1
    process: str = ""


def kernel_line(name: str, given: list[torch.Tensor]) -> Kernel:
    """The kernel, and those that get the tiles that it does not take."""
    if not STAND_INS:
        return kernel_for_tiles(given, named=KERNELS[name])
    plain = [STANDING_IN[name], *(kernel for kernel in (FLASH, EFFICIENT, REFERENCE) if kernel != STANDING_IN[name])]
    return ByTile(tuple(plain), (EFFICIENT, REFERENCE))


class Tile(NamedTuple):
    """Inputs of a kernel, expected results, and the errors of torch's own attention. None: torch has raised."""

    tensors: tuple[torch.Tensor, ...]
    expected: list[torch.Tensor]
    baseline: list[float] | None


def compare_tile(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], baseline: list[float] | None
) -> Found:
    """Our errors and torch's. Ours are bad if torch's do not explain them.

    In float32 :func:`tolerance` is always allowed. In each dtype it is the limit if torch's error is unknown, inf or
    nan.
    """
    dtype, errors = found[0].dtype, [error(x.cpu(), wanted) for x, wanted in zip(found, expected, strict=True)]

    def limit(torchs: float) -> float:
        if not math.isfinite(torchs):
            return tolerance(dtype)
        explained = RATIO * torchs + FLOOR * torch.finfo(dtype).eps
        return max(explained, tolerance(dtype)) if dtype == torch.float32 else explained

    ok = all(ours <= limit(torchs) for ours, torchs in zip(errors, baseline or [math.inf] * len(errors), strict=True))
    return judge(errors, dtype, math.inf) | {"ok": ok, "torch": baseline and [float(f"{x:.1e}") for x in baseline]}


class Cover(NamedTuple):
    """A tile of a kernel: queries and keys, and what is masked in it."""

    name: str
    length: int
    keys: int
    causal: bool = False
    bias: bool = False
    window: tuple[int, int] | None = None


COVERS = (
    Cover("full", 256, 384),
    Cover("causal", 256, 256, causal=True),
    Cover("odd", 100, 77),
    Cover("one query", 1, 64),
    Cover("two keys", 64, 2),  # with one the gradients of queries and keys are 0
    Cover("mask", 100, 77, bias=True),
    Cover("window", 200, 300, window=(100, 0)),
    Cover("from", 200, 300, window=(100, -1)),
    Cover("to", 200, 300, window=(-1, 0)),
)


def kernel(name: str, dtype: torch.dtype, dim: int, kv_heads: int) -> Iterator[Check]:
    """All covers of a kernel, then packs of those without explicit masks, then a tile in parts of its keys."""
    tiles: dict[str, Tile] = {}
    given = [torch.empty(1, heads, 2, dim, dtype=dtype, device=DEVICE) for heads in (8, kv_heads, kv_heads)]
    line = kernel_line(name, given)
    for cover in COVERS:
        if cover.window is None or line.windows:
            yield cover.name, partial(covered, name, cover, dtype, dim, kv_heads, tiles)
    for causal in (True, False) if line.small_tiles else ():
        names = [cover.name for cover in COVERS if not cover.bias and cover.window is None and cover.causal == causal]
        yield f"packed {'causal' if causal else 'full'}", partial(packed, name, dim**-0.5, causal, names, tiles)
    yield "merged", partial(merged, name, dim**-0.5, tiles)


def covered(name: str, cover: Cover, dtype: torch.dtype, dim: int, kv_heads: int, tiles: dict[str, Tile]) -> Found:
    """One tile, which is kept in ``tiles``."""
    length, keys = cover.length, cover.keys
    inputs, cotangent = attention_inputs(
        length=length, kv_length=keys, heads=8, kv_heads=kv_heads, dim=dim, dtype=dtype, batch=1
    )
    mask, bias = torch.ones(length, keys, dtype=torch.bool), None
    before, after = cover.window or (-1, 0 if cover.causal else -1)
    mask = mask.tril(keys - length + after) if after >= 0 else mask
    mask = mask.triu(keys - length - before) if before >= 0 else mask
    if cover.bias:
        bias = randn(9, length, keys).masked_fill(randn(8, length, keys) > 1.0, float("-inf")).to(dtype)
    expected = expected_attention(inputs, cotangent, mask, bias=None if bias is None else bias.double())
    given, grad = [x.to(DEVICE) for x in inputs], cotangent.to(DEVICE)
    hidden = torch.zeros(length, keys, dtype=dtype).masked_fill(~mask, float("-inf")) if bias is None else bias
    bias, failure = None if bias is None else bias.to(DEVICE), {}
    try:
        baseline = attend_and_differentiate(partial(torchs_attention, hidden.to(DEVICE)), given, grad)
        errors = [error(x.cpu(), wanted) for x, wanted in zip(baseline, expected, strict=True)]
    except Exception as failed:
        errors, failure = None, {"torch's error": f"{type(failed).__name__}: {failed}"[:200]}
    tiles[cover.name] = Tile((grad, *given), expected, errors)
    line = kernel_line(name, given)
    options: dict[str, Any] = {"causal": cover.causal, "bias": bias, "scale": dim**-0.5}
    options |= {"window": cover.window} if line.windows else {}
    out, lse = line.forward(*given, **options)
    return compare_tile([out, *line.backward(grad, *given, out, lse, **options)], expected, errors) | failure


def torchs_attention(hidden: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In efficient attention, with keys repeated for grouped heads: cuDNN would make a plan for each shape."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if not STAND_INS else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)


def packed(name: str, scale: float, causal: bool, covers: list[str], tiles: dict[str, Tile]) -> Found:
    """Tiles that were covered, in one call."""
    parts = [tiles[cover] for cover in covers]
    lengths = tuple(tuple(tile.tensors[side].shape[2] for tile in parts) for side in (1, 2))
    grad, *given = (torch.cat(x, 2) for x in zip(*(tile.tensors for tile in parts), strict=True))
    line = kernel_line(name, given)
    options = {"causal": causal, "bias": None, "scale": scale, "pack": Pack.of(lengths, 1, grad.device)}
    out, lse = line.forward(*given, **options)
    found = [out, *line.backward(grad, *given, out, lse, **options)]
    by_tile = zip(*(x.split(lengths[index > 1], 2) for index, x in enumerate(found)), strict=True)
    judgements = [
        compare_tile(list(found), tile.expected, tile.baseline) for found, tile in zip(by_tile, parts, strict=True)
    ]
    errors = [error for judgement in judgements for error in judgement["errors"]]
    return judgements[0] | {"ok": all(judgement["ok"] for judgement in judgements), "errors": errors, "torch": None}


def merged(name: str, scale: float, tiles: dict[str, Tile]) -> Found:
    """The first tile in three parts of its keys, merged and summed."""
    (grad, q, k, v), expected, baseline = tiles[COVERS[0].name]
    line, options = kernel_line(name, [q, k, v]), {"causal": False, "bias": None, "scale": scale}
    heads, rows = (0, q.shape[1]), (0, q.shape[2])
    softmax = OnlineSoftmax(q.shape, q.dtype, q.device)
    parts = [slice(0, 128), slice(128, 200), slice(200, k.shape[2])]
    for part in parts:
        softmax.add(heads, rows, *line.forward(q, k[:, :, part], v[:, :, part], **options))
    out, lse = softmax.result()
    sums = [RowSum(x.shape, torch.float32, q.device) for x in (q, k, v)]
    for part in parts:
        dq, dk, dv = line.backward(grad, q, k[:, :, part], v[:, :, part], out.to(q.dtype), lse, **options)
        sums[0].add(heads, rows, dq)
        sums[1].add((0, k.shape[1]), (part.start, part.stop), dk)
        sums[2].add((0, k.shape[1]), (part.start, part.stop), dv)
    return compare_tile([x.to(q.dtype) for x in (out, *(total.result() for total in sums))], expected, baseline)


# -- ranks --


@contextlib.contextmanager
def group(backend: str) -> Iterator[tuple[int, int]]:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not STAND_INS:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo" if STAND_INS else backend)
    try:
        yield rank, ranks
    finally:
        dist.destroy_process_group()


# Ranks that share a GPU have no NCCL: it refuses a second rank on a device.
ON_HOST = "cpu:gloo,cuda:gloo"


def errors_of(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], cut: SequenceLayout, rank: int
) -> list[float]:
    """Errors of a rank's shards, on the scale of the full results. Vanishing gradients: on the scale of the output."""
    pairs = [(x.cpu(), cut.shard(y, 2, rank), y) for x, y in zip(found, expected, strict=True)]
    return [error(x, part, whole=y if y.norm() > 1e-6 else expected[0]) for x, part, y in pairs]


def two_ranks(strategy: str, dtype: torch.dtype) -> Iterator[Check]:
    with contextlib.ExitStack() as stack:
        there, back = (lambda x: x.to(DEVICE)), torch.Tensor.cpu
        if STAND_INS:
            from tests import gpu_tensors

            stack.enter_context(gpu_tensors.gpus())
            there, back = gpu_tensors.put, gpu_tensors.read
        stack.enter_context(messages_over_the_host(back))
        rank, ranks = stack.enter_context(group(ON_HOST))
        cut = head_tail(137, ranks)
        how = {"ring": Ring(), "all-gather": AllGather(), "ulysses": Ulysses()}[strategy]
        options = {"strategy": how, "layout": cut, "kernel": ON_GPU if STAND_INS else None}

        def compare(mask: Any, seen: torch.Tensor) -> Found:
            inputs, cotangent = attention_inputs(length=137, heads=4, kv_heads=2, dim=64, dtype=dtype)
            expected = expected_attention(inputs, cotangent, seen)
            attend = partial(context_attention, mesh=dist.group.WORLD, mask=mask, **options)
            parts = [there(cut.shard(x, 2, rank)) for x in (*inputs, cotangent)]
            found = attend_and_differentiate(attend, parts[:3], parts[3])
            return judge(errors_of([back(x) for x in found], expected, cut, rank), dtype)

        causal, sizes = torch.ones(137, 137, dtype=torch.bool).tril(), (50, 3, 70, 14)
        ids = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
        yield "causal", partial(compare, Causal(), causal)
        yield "window", partial(compare, SlidingWindow(40, 0), causal.triu(-40))
        yield "documents", partial(compare, Documents(sizes) & Causal(), causal & (ids[:, None] == ids[None]))


def to_itself() -> Iterator[Check]:
    """A batch in which a rank sends to itself, after the collective that a group begins with."""

    def send() -> Found:
        sent, received = torch.randn(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
        dist.all_reduce(torch.zeros(1, device=DEVICE))
        if STAND_INS:  # gloo has no messages to itself
            return {}
        world = dist.group.WORLD
        ops = [dist.P2POp(dist.isend, sent, 0, world), dist.P2POp(dist.irecv, received, 0, world)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return {"ok": torch.equal(sent, received)}

    with group("nccl"):
        yield "batch", send


def compiled(mode: str) -> Iterator[Check]:
    from tests.ranks.attention_case import Core

    def compare(mesh: Any) -> Found:
        inputs, cotangent = attention_inputs(length=256, dim=64, dtype=torch.bfloat16)
        module = parallelize_module(Core(), mesh, AttentionContextParallel(layout=head_tail))
        attend = torch.compile(module, fullgraph=True, **{"backend": "aot_eager"} if STAND_INS else {"mode": mode})
        expected = expected_attention(inputs, cotangent, torch.ones(256, 256).tril().bool())
        given, grad = [x.to(DEVICE) for x in inputs], cotangent.to(DEVICE)
        found = [attend_and_differentiate(attend, given, grad) for _ in range(3)][-1]
        return judge([error(x.cpu(), y) for x, y in zip(found, expected, strict=True)], torch.bfloat16)

    with group("nccl") as (_, ranks):
        yield mode, partial(compare, init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("cp",)))


class FlexAttention(nn.Module):
    """Causal flex_attention with a bias by distance. What is computed before and after it is compiled too."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=DEVICE)

    @staticmethod
    def nearer(score, b, h, q_idx, kv_idx):
        return score - (q_idx - kv_idx) / 64.0

    def forward(self, q, k, v):
        out = flex_attention(q * 1.0, k, v, score_mod=self.nearer, block_mask=self.causal, enable_gqa=True)
        return out * 1.0


def compiled_flex() -> Iterator[Check]:
    """The caller of flex_attention is compiled. The parts of head-tail make tiles whose rows are slices of a rank's."""
    length, dtype = 512, torch.float32 if STAND_INS else torch.bfloat16
    real, tiles = CompiledFlexKernel._attend_tile, {"compiled": 0, "slices": 0}

    def counted(kernel: CompiledFlexKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any):
        results = real(kernel, q, k, v, **options)  # where torch has compiled too often it raises
        tiles["compiled"] += 1
        tiles["slices"] += min(q.shape[2], k.shape[2]) < length // 2
        return results

    def compare(mesh: Any, rank: int) -> Found:
        inputs, cotangent = attention_inputs(length=length, heads=4, kv_heads=2, dim=64, batch=1, dtype=dtype)
        cut = head_tail(length, mesh.size())
        module = parallelize_module(FlexAttention(length), mesh, ModuleContextParallel(layout=cut))
        attend = torch.compile(module, **{"backend": "aot_eager"} if STAND_INS else {})
        distances = torch.arange(length)[:, None] - torch.arange(length)
        expected = expected_attention(inputs, cotangent, distances >= 0, bias=-distances / 64.0)
        parts = [cut.shard(x, 2, rank).to(DEVICE) for x in (*inputs, cotangent)]
        found = attend_and_differentiate(attend, parts[:3], parts[3])
        judgement = judge(errors_of(found, expected, cut, rank), dtype)
        # With received keys: half of the rows on rank 0, half of the keys on rank 1.
        ok = judgement["ok"] and tiles["slices"] > 0
        return judgement | tiles | {"ok": ok, "note": f"tiles: {tiles['compiled']}, {tiles['slices']} of slices"}

    with contextlib.ExitStack() as stack:
        if STAND_INS:
            from tests.flex_op import compiled_flex_on_cpu

            stack.enter_context(compiled_flex_on_cpu())
        stack.enter_context(patch.object(CompiledFlexKernel, "_attend_tile", counted))
        stack.enter_context(messages_over_the_host())
        rank, ranks = stack.enter_context(group(ON_HOST))
        yield "flex", partial(compare, init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("cp",)), rank)


def job() -> Iterator[Check]:
    """The main job: a rank for each GPU over NCCL, or two ranks on one GPU with messages over the host."""
    ranks = int(os.environ["WORLD_SIZE"])
    rest = ["--steps", "5"] if not STAND_INS else ["--steps", "1", "--seq-len", "64"]
    sys.argv[1:] = ["--cp", str(ranks), "--tp", "1", "--device", DEVICE, "--dtype", "bfloat16", *rest]
    sys.path.insert(0, str(ROOT / "tutorials"))
    if find_spec("matplotlib") is None:  # the job is looked at, not its picture
        sys.modules["picture"] = SimpleNamespace(save_picture=lambda *_: None)  # pyright: ignore[reportArgumentType]
    import train_llama

    def train() -> Found:
        return {"ok": train_llama.main() == 0}

    with contextlib.ExitStack() as stack:
        if not STAND_INS and torch.cuda.device_count() < ranks:
            real = dist.init_process_group
            on_host = patch.object(dist, "init_process_group", lambda _, **options: real(ON_HOST, **options))
            stack.enter_context(on_host)
            stack.enter_context(messages_over_the_host())
        yield f"--cp {ranks}", train


def rows() -> Iterator[Check]:
    """Every seventh strategy, mask and layout over NCCL, a rank for each GPU."""
    from cp_styles.mixers.selection import selected_keys
    from tests.oracle import MASKS, Sizes
    from tests.tables import LAYOUTS, STRATEGIES, cut_by, divides

    def compare(strategy: str, mask: str, layout: str, dtype: torch.dtype, rank: int, ranks: int) -> Found:
        value = MASKS[mask](Sizes(137, 137, 4, 2, dtype))
        cut = cut_by(layout, value.mask)(137, ranks)
        inputs, cotangent = attention_inputs(length=137, heads=4, kv_heads=2, dim=64, dtype=dtype)
        bias = None if value.bias is None else value.bias.double()
        expected = expected_attention(inputs, cotangent, value.sees, bias=bias)
        parts = [cut.shard(x, 2, rank).to(DEVICE) for x in (*inputs, cotangent)]
        options: dict[str, Any] = {"strategy": STRATEGIES[strategy], "layout": cut, "mask": value.mask}
        if value.selected is not None:
            own = cut.shard(value.selected, 2, rank).to(DEVICE)
            options["mask"] &= selected_keys(own, dist.group.WORLD, block=value.block, layout=cut)
        attend = partial(context_attention, mesh=dist.group.WORLD, **options)
        return judge(errors_of(attend_and_differentiate(attend, parts[:3], parts[3]), expected, cut, rank), dtype)

    with group("cpu:gloo,cuda:nccl") as (rank, ranks):
        every = ((s, m, x) for s in STRATEGIES for m in MASKS for x in LAYOUTS)
        for index, (strategy, mask, layout) in enumerate(every):
            dtype = (*LOW, torch.float32)[index % 3]
            refused = mask == "selected & causal" and "Ulysses" in strategy  # see the page Troubleshooting
            if index % 7 == 0 and divides(strategy, ranks) and not refused:
                yield f"{strategy}, {mask}, {layout}", partial(compare, strategy, mask, layout, dtype, rank, ranks)


# -- times --


def kernel_times(name: str, dim: int, kv_heads: int) -> Iterator[Check]:
    """Milliseconds and TFLOP/s of one tile: forward, and backward."""

    def time_tile(length: int, causal: bool) -> Found:
        q, *kv = (
            torch.randn(1, length, heads, dim, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
            for heads in (32, kv_heads, kv_heads)
        )
        line, options = kernel_line(name, [q, *kv]), {"causal": causal, "bias": None, "scale": dim**-0.5}
        out, lse = line.forward(q, *kv, **options)
        repeats = 1 if STAND_INS else 7
        forward = timed(partial(line.forward, q, *kv, **options), repeats)
        backward = timed(partial(line.backward, q, q, *kv, out, lse, **options), repeats)
        flops = 4 * 32 * length * length * dim / (2 if causal else 1)
        for found, products in ((forward, 1.0), (backward, 2.5)):
            found["TFLOP/s"] = round(flops * products / found["ms"] / 1e9, 1)
        note = f"{forward['ms']:.3f} / {backward['ms']:.3f} ms, {forward['TFLOP/s']} / {backward['TFLOP/s']} TFLOP/s"
        return {"forward": forward, "backward": backward, "note": note}

    for length in (256,) if STAND_INS else (2048, 8192, 32768):
        for causal in (False, True):
            yield f"{length} {'causal' if causal else 'full'}", partial(time_tile, length, causal)


# -- the plan --


def plan(gpus: int) -> dict[str, Case]:
    """The cases by stage, the most telling first. ``gpus``: how many there are."""
    cases: dict[str, Case] = {}
    for name, one in KERNELS.items():
        shapes = [(dtype, dim, kv_heads) for dtype in one.dtypes for dim in (64, 96, 128, 256) for kv_heads in (1, 8)]
        for dtype, dim, kv_heads in sorted(shapes, key=lambda shape: shape != (one.dtypes[-1], 128, 8)):
            if dim <= (one.most_dim or dim):
                what = f"kernels {name} {str(dtype)[6:]} D={dim} G={kv_heads}"
                cases[what] = Case("kernels", partial(kernel, name, dtype, dim, kv_heads), process=f"kernels {name}")
    cases["nccl to itself"] = Case("nccl", to_itself)
    for strategy in ("ring", "ulysses", "all-gather"):
        for dtype in (torch.bfloat16, torch.float32):
            what = f"ranks {strategy} {str(dtype)[6:]}"
            cases[what] = Case("ranks", partial(two_ranks, strategy, dtype), ranks=2)
    cases["job"] = Case("job", job, 300, ranks=max(gpus, 2))
    for dim, kv_heads in ((128, 8), (64, 32)):
        for name in ("cuDNN", "flash", "efficient"):
            what = f"bench {name} D={dim} G={kv_heads}"
            cases[what] = Case("bench", partial(kernel_times, name, dim, kv_heads), process=f"bench {name}")
    cases["compile default"] = Case("compile", partial(compiled, "default"), 300)
    cases["compile flex"] = Case("compile", compiled_flex, 300, ranks=2)
    cases["compile reduce-overhead"] = Case("compile", partial(compiled, "reduce-overhead"), 300)
    cases["grid"] = Case("grid", rows, 500, ranks=max(gpus, 2), gpus=2)
    return cases


def left_behind() -> Found:
    return {"left": subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid}


def leaving() -> Iterator[Check]:
    """A case that leaves a process behind."""
    yield "left", left_behind


def cut_off() -> Iterator[Check]:
    """A case with a cover that raises, and one that takes too long."""
    yield "first", dict
    yield "raises", lambda: {}["nothing"]
    yield "third", dict
    yield "late", partial(time.sleep, 600)  # pyright: ignore[reportReturnType]


def crash() -> Iterator[Check]:
    yield "crash", partial(os._exit, 7)


# For the tests of what ends with a case.
HIDDEN = {
    "self, leaving": Case("self", leaving),
    "self, late": Case("self", cut_off, 3),
    "self, crash": Case("self", crash, process="self"),
    "self, next": Case("self", lambda: iter([("only", dict)]), process="self"),
}


# -- a process for a case --


def say(kind: str, line: Found) -> None:
    """Write a line for the parent process. Ranks share the pipe, so it is one write."""
    os.write(1, f"\n{kind} {json.dumps(line)}\n".encode())


def perform(names: list[str], cases: dict[str, Case]) -> int:
    """Run cases in this process, or one rank of a case. Returns the exit status.

    A line is written when a case begins, for each cover, and at the end of the case.
    """
    is_rank = "RANK" in os.environ
    failed = False
    for name in names:
        case, begun = cases[name], time.monotonic()
        if not is_rank:
            say("BEGUN", {"case": name})
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks)}
        if not is_rank and case.ranks > 1:
            ok = run_ranks(name, case.ranks) == 0
        else:
            os.environ |= {} if is_rank else {"RANK": "0", "LOCAL_RANK": "0"}
            ok = run_case(name, case)
        failed |= not ok
        if not is_rank:
            say("ENDED", {"case": name, "ok": ok, "seconds": round(time.monotonic() - begun, 1)})
        if not ok and device_is_lost():
            break
    return 1 if failed else 0


def run_case(name: str, case: Case) -> bool:
    """Run a case in this process. Returns whether all is well."""
    ok, rank = True, {"rank": int(os.environ["RANK"])} if case.ranks > 1 else {}
    with cuda_ops_on_cpu() if STAND_INS and case.stage != "ranks" else contextlib.nullcontext():
        for line in run_checks(name, case.run(), **rank):
            say("FOUND", line)
            ok &= line["ok"]
            if "error" in line and device_is_lost():
                return False
    return ok


def run_ranks(name: str, count: int) -> int:
    """The largest exit status. After a failure the remaining ranks have some seconds to print an error."""
    gpus = max(torch.cuda.device_count(), 1)
    named = [{"RANK": str(rank), "LOCAL_RANK": str(rank % gpus)} for rank in range(count)]
    command = [sys.executable, str(Path(__file__).resolve()), "--case", name, *(["--stand-ins"] if STAND_INS else [])]
    ranks = [subprocess.Popen(command, env=os.environ | names) for names in named]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        for rank in ranks:
            rank.wait(5)
    return max(abs(1 if rank.poll() is None else rank.poll()) for rank in ranks)  # the parent ends the remaining ranks


# Seconds that are left where a case may begin.
LEAST = 20.0


class Processes:
    """Runs cases, each in a process group that ends with it, and gives the lines as they come.

    ``seconds``: the most for a case. No case begins after ``end``, and each ends by then.
    """

    def __init__(self, cases: dict[str, Case], seconds: float, end: float) -> None:
        self._cases, self._seconds, self._end = cases, seconds, end

    def lines(self, names: list[str]) -> Iterator[Found]:
        """Lines of cases that share a process. If a case ends it, the remaining cases get a new process."""
        left = list(names)
        while left and self._end - time.monotonic() >= LEAST:
            yield from self._lines_of_process(left)

    def _lines_of_process(self, left: list[str]) -> Iterator[Found]:
        """Removes from ``left`` the cases that have ended."""
        command = [sys.executable, str(Path(__file__).resolve()), "--case", *left]
        process = subprocess.Popen(
            command + ["--stand-ins"] * STAND_INS,
            env={
                **{name: text for name, text in os.environ.items() if name not in ("RANK", "LOCAL_RANK")},
                "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT),
            },
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        name, begun, output = left[0], time.monotonic(), deque(maxlen=60)
        begins, running, late = False, True, False
        try:
            while running or not lines.empty():
                if running:
                    most = min(self._cases[name].seconds, self._seconds) if begins else self._seconds  # imports
                    late = time.monotonic() > min(begun + most, self._end)
                    running = not late and process.poll() is None
                    if not running:
                        end_group(process)
                        reader.join(5)  # then the queue has all lines
                try:
                    line = lines.get(timeout=0.2 if running else 0)
                except queue.Empty:
                    continue
                kind, _, text = line.partition(" ")
                if kind not in ("BEGUN", "FOUND", "ENDED"):
                    output.extend(filter(str.strip, [line]))
                    continue
                found = json.loads(text)
                if kind == "BEGUN":
                    name, begun, begins = found["case"], time.monotonic(), True
                    output.clear()
                    continue
                if kind == "ENDED":
                    left.remove(name)
                    found |= {} if found["ok"] else {"output": "".join(output)[-3000:]}
                yield found
                if kind == "ENDED" and self._end - time.monotonic() < LEAST:
                    return
        finally:
            end_group(process)
        if name in left:
            left.remove(name)
            seconds = round(time.monotonic() - begun, 1)
            code = f"ended after {seconds:.0f} s" if late else process.returncode
            yield {"case": name, "ok": False, "seconds": seconds, "code": code, "output": "".join(output)[-3000:]}


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("gpu_record.jsonl"), help="where the record goes")
    made.add_argument("--only", nargs="+", default=[""], help="cases whose names begin so")
    made.add_argument("--seconds", type=float, default=590.0, help="the most for a case (default 590)")
    made.add_argument("--total", type=float, default=1e9, help="the most for all, imports included")
    made.add_argument("--resume", type=Path, help="a record: cases that have ended in it are left out")
    made.add_argument("--dry-run", action="store_true", help="print the plan")
    made.add_argument("--stand-ins", action="store_true", help="without a GPU: to try the plan")
    made.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    return made


def main() -> int:
    options = parser().parse_args()
    gpus = 2 if STAND_INS else torch.cuda.device_count()
    cases = plan(gpus)
    if options.case:
        status = perform(options.case, cases | HIDDEN)
        os._exit(status)  # a thread of gloo may abort at the interpreter's shutdown
    everything = cases | (HIDDEN if options.only[0].startswith("self") else {})
    chosen = {name: case for name, case in everything.items() if name.startswith(tuple(options.only))}
    for line in options.resume.read_text().splitlines() if options.resume else ():
        ended = json.loads(line)
        if "cover" not in ended:
            chosen.pop(ended.get("case"), None)
    if options.dry_run:
        for name, case in chosen.items():
            about = {"ranks": case.ranks, "gpus": case.gpus, "seconds": min(case.seconds, options.seconds)}
            print(json.dumps({"case": name, "stage": case.stage, **about}), flush=True)
        return 0
    if not gpus:
        print(f"no GPU here: torch {torch.__version__} sees no CUDA device. Run this on a machine that has one.")
        return 2
    record = Record(options.out, append=options.out == options.resume)
    record.write(hardware())
    together: dict[str, list[str]] = {}
    for name, case in chosen.items():
        together.setdefault(case.process or name, []).append(name)
    processes = Processes(everything, options.seconds, BEGUN + options.total)
    for names in together.values():
        short = [name for name in names if everything[name].gpus > gpus]
        for name in short:
            record.write({"case": name, "ok": True, "note": f"skipped: needs {everything[name].gpus} GPUs"})
        ended = set(short)
        for line in processes.lines([name for name in names if name not in ended]):
            record.write(line)
            ended.add(line["case"])
        record.unfinished += len(set(names) - ended)
    return record.close()


if __name__ == "__main__":
    sys.exit(main())
