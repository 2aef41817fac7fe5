"""What needs a GPU: python tests/gpu.py, on a machine with one or several. It writes down what came out.

    python tests/gpu.py [--out gpu_record.jsonl] [--only kernels bench ...] [--seconds 600] [--total 570]
    python tests/gpu.py --total 570 --resume gpu_record.jsonl     cases that have no line in this record
    python tests/gpu.py --dry-run      the plan, a line of JSON for each case; nothing runs

Each case is a process of its own, with its limit and its own process group, which is ended with it. A line of JSON for
each case is written when it ends: to the file and to the screen. FIRST are those that say most, one or two of each
stage: some minutes. The others follow in the order of the stages:

kernels   the real ops: each kernel, dtype and head dim, with all covers, explicit masks, packs and merges, against
          float64 on the CPU and beside torch's own attention in the same dtype
nccl      one rank that sends to itself in a batch, and steps in which CUDA raises where the host waits
ranks     two ranks on one GPU: messages are copied to the host and sent by gloo. Autograd has its own threads there
compile   the style under torch.compile, default and with CUDA graphs, on one rank
job       the main job of the README
grid      with several GPUs: rows of the parity grid over NCCL, a rank for each
bench     milliseconds, TFLOP/s, launches, the host's share and max_memory_allocated, of kernels and of an attention

``--stand-ins`` takes the CPU and tests/cuda_ops.py in place of a GPU: it shows that the plan runs, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cp_styles import AllGather, AttentionContextParallel, Causal, Documents, Full, SlidingWindow, Ulysses  # noqa: E402
from cp_styles.functions.attention import context_attention  # noqa: E402
from cp_styles.functions.flex import context_flex_attention  # noqa: E402
from cp_styles.kernels import CUDA_CUDNN, CUDA_EFFICIENT, CUDA_FLASH, Kernel, kernel_for_tiles  # noqa: E402
from cp_styles.kernels.merge import OnlineSoftmax, RowSum  # noqa: E402
from cp_styles.kernels.packing import Pack  # noqa: E402
from cp_styles.layout import SequenceLayout, head_tail  # noqa: E402
from tests.cuda_ops import CUDNN, EFFICIENT, FLASH, ON_GPU, REFERENCE, ByTile, cuda_ops_on_cpu  # noqa: E402
from tests.oracle import attend_and_differentiate, attention_inputs, error, expected_attention, randn  # noqa: E402

Found = dict[str, Any]
LOW = (torch.float16, torch.bfloat16)
# Against torch's attention on one device in the same dtype: a merge rounds once more. Half a rounding beside it.
RATIO, FLOOR = 1.5, 0.25
STAND_INS = "--stand-ins" in sys.argv
DEVICE = "cpu" if STAND_INS else "cuda"
KERNELS = {"flash": CUDA_FLASH, "efficient": CUDA_EFFICIENT, "cuDNN": CUDA_CUDNN}
STANDING_IN: dict[str, Kernel] = {"flash": FLASH, "efficient": EFFICIENT, "cuDNN": CUDNN}


class Case(NamedTuple):
    """``run`` returns what is to be written down; it raises, or has "bad", if something is wrong."""

    stage: str
    run: Callable[[], Found]
    seconds: int = 120
    ranks: int = 1
    gpus: int = 1


def kernel_line(name: str, given: list[torch.Tensor]) -> Kernel:
    """The kernel, and those that get the tiles that it does not take."""
    if not STAND_INS:
        return kernel_for_tiles(given, named=KERNELS[name])
    plain = [STANDING_IN[name], *(kernel for kernel in (FLASH, EFFICIENT, REFERENCE) if kernel != STANDING_IN[name])]
    return ByTile(tuple(plain), (EFFICIENT, REFERENCE))


def worse(found: list[torch.Tensor], expected: list[torch.Tensor], alone: list[float]) -> list[tuple[float, float]]:
    """The pairs of errors, of ours and of torch's, in which ours is too large."""
    slack = FLOOR * torch.finfo(found[0].dtype).eps
    errors = [error(x.cpu(), wanted) for x, wanted in zip(found, expected, strict=True)]
    return [(mine, one) for mine, one in zip(errors, alone, strict=True) if not mine <= RATIO * one + slack]


def kernel(name: str, dtype: torch.dtype, dim: int, kv_heads: int) -> Found:
    covers: list[tuple[str, int, int, dict[str, Any]]] = [
        ("full", 256, 384, {}),
        ("causal", 256, 256, {"causal": True}),
        ("odd", 100, 77, {}),
        ("one query", 1, 64, {}),
        ("two keys", 64, 2, {}),  # with one the gradients of queries and keys are 0
        ("mask", 100, 77, {"bias": True}),
        ("window", 200, 300, {"window": (100, 0)}),
        ("from", 200, 300, {"window": (100, -1)}),
        ("to", 200, 300, {"window": (-1, 0)}),
    ]
    bad: Found = {}
    tiles: dict[bool, list[Any]] = {True: [], False: []}  # what may be packed, by whether it is causal
    for cover, length, keys, how in covers:
        inputs, cotangent = attention_inputs(
            length=length, kv_length=keys, heads=8, kv_heads=kv_heads, dim=dim, dtype=dtype, batch=1
        )
        mask, bias = torch.ones(length, keys, dtype=torch.bool), None
        before, after = how.get("window", (-1, 0 if how.get("causal") else -1))
        mask = mask.tril(keys - length + after) if after >= 0 else mask
        mask = mask.triu(keys - length - before) if before >= 0 else mask
        if how.get("bias"):
            bias = randn(9, length, keys).masked_fill(randn(8, length, keys) > 1.0, float("-inf")).to(dtype)
        expected = expected_attention(inputs, cotangent, mask, bias=None if bias is None else bias.double())
        given, grad = [x.to(DEVICE) for x in inputs], cotangent.to(DEVICE)
        bias = None if bias is None else bias.to(DEVICE)
        hidden = torch.zeros(length, keys, dtype=dtype).masked_fill(~mask, float("-inf")).to(DEVICE)
        torchs = partial(F.scaled_dot_product_attention, attn_mask=hidden if bias is None else bias, enable_gqa=True)
        alone = [
            error(x.cpu(), y)
            for x, y in zip(attend_and_differentiate(torchs, given, grad), expected, strict=True)
        ]  # fmt: skip
        line = kernel_line(name, given)
        options = {"causal": bool(how.get("causal")), "bias": bias, "scale": dim**-0.5}
        if line.windows:
            options["window"] = how.get("window")
        elif "window" in how:
            continue
        out, lse = line.forward(*given, **options)
        found = [out, *line.backward(grad, *given, out, lse, **options)]
        bad[cover] = worse(found, expected, alone)
        if bias is None and "window" not in how:
            tiles[options["causal"]].append(((grad, *given), expected, alone))
    for causal, parts in tiles.items():
        lengths = tuple(tuple(tensors[side].shape[2] for tensors, *_ in parts) for side in (1, 2))
        grad, *given = (torch.cat(x, 2) for x in zip(*(tensors for tensors, *_ in parts), strict=True))
        line = kernel_line(name, given)
        if not line.small_tiles:
            continue
        options = {"causal": causal, "bias": None, "scale": dim**-0.5, "pack": Pack.of(lengths, 1, grad.device)}
        out, lse = line.forward(*given, **options)
        found = [out, *line.backward(grad, *given, out, lse, **options)]
        by_tile = zip(*(x.split(lengths[index > 1], 2) for index, x in enumerate(found)), strict=True)
        for index, (mine, (_, expected, alone)) in enumerate(zip(by_tile, parts, strict=True)):
            bad[f"packed {'causal' if causal else 'full'} {index}"] = worse(list(mine), expected, alone)
    bad["merged"] = merged(kernel_line(name, list(tiles[False][0][0][1:])), dim**-0.5, *tiles[False][0])
    return {"bad": {cover: pairs for cover, pairs in bad.items() if pairs}, "checked": len(bad)}


def merged(line: Kernel, scale: float, tensors: list[torch.Tensor], expected: list[torch.Tensor], alone: list[float]):
    """A tile in three parts of keys, merged and summed."""
    (grad, q, k, v), options = tensors, {"causal": False, "bias": None, "scale": scale}
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
    return worse([x.to(q.dtype) for x in (out, *(total.result() for total in sums))], expected, alone)


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


class Staged:
    """The messages of a batch over the host: gloo sends no memory of a GPU. Its wait holds the host, as NCCL's does
    not, until they have come; what reads them then waits on the stream."""

    def __init__(self, ops: list[dist.P2POp]) -> None:
        self.stream, self.received, self.works = None if STAND_INS else torch.cuda.Stream(), [], []
        hosts = [torch.empty(op.tensor.shape, dtype=op.tensor.dtype, pin_memory=not STAND_INS) for op in ops]
        with self._aside():
            for op, host in zip(ops, hosts, strict=True):
                if op.op is dist.isend:
                    host.copy_(op.tensor, non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
        for op, host in zip(ops, hosts, strict=True):
            sends = op.op is dist.isend
            assert op.group is not None
            self.works.append((op.group.send if sends else op.group.recv)([host], op.group_peer, op.tag))
            if not sends:
                self.received.append((op.tensor, host))
        self.hosts = hosts

    def wait(self, *_: Any) -> bool:
        for work in self.works:
            work.wait()
        with self._aside():
            for tensor, host in self.received:
                tensor.copy_(host, non_blocking=True)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return True

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream of the copies, after what was started before."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            yield


def errors_of(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], cut: SequenceLayout, rank: int
) -> list[float]:
    """Of a rank's parts, on the scale of the whole ones. Gradients that vanish are on the scale of the output."""
    pairs = [(x.cpu(), cut.shard(y, 2, rank), y) for x, y in zip(found, expected, strict=True)]
    return [error(x, part, whole=y if y.norm() > 1e-6 else expected[0]) for x, part, y in pairs]


def two_ranks(strategy: str, dtype: torch.dtype) -> Found:
    with contextlib.ExitStack() as stack:
        there, back = (lambda x: x.to(DEVICE)), (lambda x: x.cpu())
        if STAND_INS:
            from tests import gpu_tensors

            stack.enter_context(gpu_tensors.gpus())
            there, back = gpu_tensors.put, gpu_tensors.read
        dist.batch_isend_irecv = lambda ops: [Staged(ops)]
        real_sum = dist.all_reduce

        def all_reduce_on_host(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            host = back(tensor)
            real_sum(host, *args, **options)
            tensor.copy_(host, non_blocking=True)

        dist.all_reduce = all_reduce_on_host
        return {"bad": staged(strategy, dtype, there, back)}


def staged(strategy: str, dtype: torch.dtype, there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]):
    bad = {}
    with group("gloo") as (rank, ranks):
        for name, mask in {
            "causal": Causal(),
            "window": SlidingWindow(40, 0),
            "documents": Documents((50, 3, 70, 14)) & Causal(),
        }.items():
            inputs, cotangent = attention_inputs(length=137, heads=4, kv_heads=2, dim=64, dtype=dtype)
            seen = torch.ones(137, 137, dtype=torch.bool).tril()
            if name == "window":
                seen = seen.triu(-40)
            if name == "documents":
                ids = torch.repeat_interleave(torch.arange(4), torch.tensor((50, 3, 70, 14)))
                seen &= ids[:, None] == ids[None]
            expected = expected_attention(inputs, cotangent, seen)
            cut = head_tail(137, ranks)
            how = {"ring": None, "all-gather": AllGather(), "ulysses": Ulysses()}[strategy]
            options = {"strategy": how, "kernel": ON_GPU if STAND_INS else None}
            attend = partial(context_attention, group=dist.group.WORLD, mask=mask, layout=cut, **options)
            parts = [there(cut.shard(x, 2, rank)) for x in (*inputs, cotangent)]
            found = attend_and_differentiate(attend, parts[:3], parts[3])
            errors = errors_of([back(x) for x in found], expected, cut, rank)
            if not max(errors) <= 6 * torch.finfo(dtype).eps:
                bad[name] = errors
    return bad


def to_itself() -> Found:
    """Batches in which a rank sends to itself, and attentions in which CUDA raises where the host waits."""
    with group("nccl"):
        world = dist.group.WORLD
        sent, received = torch.randn(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
        dist.all_reduce(torch.zeros(1, device=DEVICE))
        if not STAND_INS:
            ops = [dist.P2POp(dist.isend, sent, 0, world), dist.P2POp(dist.irecv, received, 0, world)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if not torch.equal(sent, received):
                return {"bad": "a rank that sends to itself"}
        parts = [torch.randn(1, 4, 256, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        for mask in (Causal(), SlidingWindow(100, 0), Documents((100, 156)) & Causal()):
            for step in range(4):  # the first may wait, for what is made once
                leaves = [x.clone().requires_grad_() for x in parts]
                if not STAND_INS:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error" if step else "default")
                context_attention(*leaves, world, layout=head_tail, mask=mask).sum().backward()
                if not STAND_INS:
                    torch.cuda.set_sync_debug_mode("default")
    return {"bad": ""}


def ahead(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, float("-inf"))


def compiled(mode: str, door: str = "style") -> Found:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.ranks.attention_case import Core

    with group("nccl") as (_, ranks):
        mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("cp",))
        inputs, cotangent = attention_inputs(length=256, dim=64, dtype=torch.bfloat16)
        module = parallelize_module(Core(), mesh, AttentionContextParallel(layout=head_tail))
        if door == "flex":
            attend = partial(context_flex_attention, group=mesh, score_mod=ahead, layout=head_tail)
        else:
            attend = torch.compile(module, fullgraph=True, **{"backend": "aot_eager"} if STAND_INS else {"mode": mode})
        expected = expected_attention(inputs, cotangent, torch.ones(256, 256).tril().bool())
        given, grad = [x.to(DEVICE) for x in inputs], cotangent.to(DEVICE)
        found = [attend_and_differentiate(attend, given, grad) for _ in range(3)][-1]
        errors = [error(x.cpu(), y) for x, y in zip(found, expected, strict=True)]
    return {"bad": [] if max(errors) <= 6 * torch.finfo(torch.bfloat16).eps else errors}


def job() -> Found:
    """One rank for each GPU."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    rest = ["--steps", "5"] if not STAND_INS else ["--steps", "1", "--seq-len", "64"]
    sys.argv[1:] = ["--cp", str(ranks), "--tp", "1", "--device", DEVICE, "--dtype", "bfloat16", *rest]
    sys.path.insert(0, str(ROOT / "tutorials"))
    if find_spec("matplotlib") is None:  # the job is looked at, not its picture
        sys.modules["picture"] = SimpleNamespace(save_picture=lambda *_: None)  # pyright: ignore[reportArgumentType]
    import train_llama

    return {"bad": train_llama.main() or ""}


def rows() -> Found:
    """Rows of the parity grid over NCCL, a rank for each GPU."""
    from tests.ranks.parity_grid import LAYOUTS, MASKS, STRATEGIES, Row, makes_sense

    bad = {}
    with group("cpu:gloo,cuda:nccl") as (rank, ranks):
        for index, (strategy, mask, layout) in enumerate((s, m, x) for s in STRATEGIES for m in MASKS for x in LAYOUTS):
            dtype = (*LOW, torch.float32)[index % 3]
            row = Row(strategy, mask, layout, "flash", (4, 2), dtype, ranks, 137)
            if index % 7 or not makes_sense(row):
                continue
            value, cut = row.value(), row.cut()
            inputs, cotangent = attention_inputs(length=137, heads=4, kv_heads=2, dim=64, dtype=dtype)
            bias = None if value.bias is None else value.bias.double()
            expected = expected_attention(inputs, cotangent, value.sees, bias=bias)
            parts = [cut.shard(x, 2, rank).to(DEVICE) for x in inputs]
            options = {"strategy": STRATEGIES[strategy], "layout": cut, "mask": value.mask}
            attend = partial(context_attention, group=dist.group.WORLD, **options)
            found = attend_and_differentiate(attend, parts, cut.shard(cotangent, 2, rank).to(DEVICE))
            errors = errors_of(found, expected, cut, rank)
            if not max(errors) <= 6 * torch.finfo(dtype).eps:
                bad[str(row)] = errors
    return {"bad": bad}


# -- times --


def clocked(run: Callable[[], Any], repeats: int = 8) -> Found:
    """The best of some, in milliseconds: until the host is back, and until the device is done; and the most memory."""
    host, whole = [], []
    for _ in range(1 if STAND_INS else repeats):
        if not STAND_INS:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        run()
        host.append(time.perf_counter() - begun)
        if not STAND_INS:
            torch.cuda.synchronize()
        whole.append(time.perf_counter() - begun)
    peak = 0 if STAND_INS else torch.cuda.max_memory_allocated()
    return {"ms": min(whole) * 1e3, "host ms": min(host) * 1e3, "peak MiB": round(peak / 2**20)}


def kernel_times(name: str, dim: int, kv_heads: int) -> Found:
    lines: Found = {}
    for length in (256,) if STAND_INS else (2048, 8192, 32768):
        q, *kv = (
            torch.randn(1, length, heads, dim, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
            for heads in (32, kv_heads, kv_heads)
        )
        line = kernel_line(name, [q, *kv])
        for causal in (False, True):
            options = {"causal": causal, "bias": None, "scale": dim**-0.5}
            out, lse = line.forward(q, *kv, **options)
            forward = clocked(partial(line.forward, q, *kv, **options))
            backward = clocked(partial(line.backward, q, q, *kv, out, lse, **options))
            flops = 4 * 32 * length * length * dim / (2 if causal else 1)
            for phase, found, times in (("forward", forward, 1.0), ("backward", backward, 2.5)):
                found["TFLOP/s"] = flops * times / found["ms"] / 1e9
                lines[f"{length} {'causal' if causal else 'full'} {phase}"] = found
    return lines


def attention_times() -> Found:
    lines: Found = {}
    with group("nccl"):
        for length in (512,) if STAND_INS else (4096, 16384, 65536):
            masks = {"causal": Causal(), "full": Full(), "window": SlidingWindow(min(4096, length // 4) - 1, 0)}
            masks["documents"] = Documents((64,) * (length // 64)) & Causal()
            for name, mask in masks.items():
                leaves = [
                    torch.randn(1, 16, length, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
                    for _ in range(3)
                ]
                attend = partial(context_attention, *leaves, dist.group.WORLD, layout=head_tail, mask=mask)
                attend().sum().backward()  # plans are made
                found = clocked(lambda attend=attend: attend().sum().backward())
                with torch.profiler.profile() as trace:
                    attend().sum().backward()
                found["launches"] = sum(event.name.startswith("cudaLaunchKernel") for event in trace.events())
                lines[f"{length} {name}"] = found
    return lines


def leaving() -> Found:
    """A case that leaves a process behind."""
    return {"left": subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid}


def plan(gpus: int) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, one in KERNELS.items():
        for dtype in one.dtypes:
            for dim in (64, 128, 256):
                if dim <= (one.most_dim or dim):
                    for kv_heads in (1, 8):
                        what = f"kernels {name} {str(dtype)[6:]} D={dim} G={kv_heads}"
                        cases[what] = Case("kernels", partial(kernel, name, dtype, dim, kv_heads))
    cases["nccl to itself"] = Case("nccl", to_itself)
    for strategy in ("ring", "all-gather", "ulysses"):
        for dtype in (torch.bfloat16, torch.float32):
            what = f"ranks {strategy} {str(dtype)[6:]}"
            cases[what] = Case("ranks", partial(two_ranks, strategy, dtype), ranks=2)
    for mode in ("default", "reduce-overhead"):
        cases[f"compile {mode}"] = Case("compile", partial(compiled, mode), 300)
    # Its backward with rows that are slices is neither shown nor refuted to be right.
    cases["compile flex"] = Case("compile", partial(compiled, "default", "flex"), 300)
    cases["job"] = Case("job", job, 300, ranks=max(gpus, 1))
    cases["grid"] = Case("grid", rows, 500, ranks=max(gpus, 2), gpus=2)
    for name in KERNELS:
        for dim, kv_heads in ((64, 32), (128, 8)):
            what = f"bench {name} D={dim} G={kv_heads}"
            cases[what] = Case("bench", partial(kernel_times, name, dim, kv_heads), 200)
    cases["bench attention"] = Case("bench", attention_times, 300)
    return {name: cases[name] for name in (*FIRST, *(name for name in cases if name not in FIRST))}


FIRST = (
    "kernels flash bfloat16 D=128 G=8",
    "kernels efficient float32 D=128 G=8",
    "kernels cuDNN bfloat16 D=128 G=8",
    "nccl to itself",
    "ranks ring bfloat16",
    "bench attention",
    "bench flash D=128 G=8",
    "bench cuDNN D=128 G=8",
    "compile flex",
    "compile default",
    "compile reduce-overhead",
    "job",
    "ranks ulysses bfloat16",
)


# For the test of what ends with a case.
HIDDEN = {"self, leaving": Case("self", leaving), "self, late": Case("self", partial(time.sleep, 600), 1)}  # pyright: ignore


def hardware() -> Found:
    found: Found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found |= {"cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found["gpus"] = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return found


def perform(name: str, case: Case) -> int:
    """In the process of a case, or of one of its ranks. The last line says what was found."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks)}
        if case.ranks > 1:
            return ended_ranks(case.ranks)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    with cuda_ops_on_cpu() if STAND_INS and case.stage != "ranks" else contextlib.nullcontext():
        found = case.run()
    print("FOUND " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(1 if found.get("bad") else 0)  # a thread of gloo may abort at the interpreter's shutdown


def ended_ranks(count: int) -> int:
    """The largest exit status. After a rank that has failed the others have some seconds to say why."""
    named = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | names) for names in named]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        for rank in ranks:
            rank.wait(5)
    return max(abs(rank.poll() or 0) for rank in ranks)  # those that are left end with the case


def outcome(name: str, case: Case, seconds: float) -> Found:
    """Run a case in a process group of its own, which ends with it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", name, *(["--stand-ins"] if STAND_INS else [])]
    ours = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    begun = time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, **ours}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
        code: int | str = process.returncode
    except subprocess.TimeoutExpired:
        code, said = f"ended after {seconds:.0f} s", ""
    with contextlib.suppress(ProcessLookupError):  # what it has started may be there still
        os.killpg(process.pid, signal.SIGKILL)
    if code != process.returncode:
        said, _ = process.communicate()
    found = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("FOUND ")]
    line: Found = {"case": name, "ok": code == 0, "seconds": round(time.monotonic() - begun, 1), "found": found}
    return line if code == 0 else {**line, "code": code, "said": said[-3000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_record.jsonl"), help="where the record goes")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names begin so")
    parser.add_argument("--seconds", type=float, default=590.0, help="the most for a case (default 590)")
    parser.add_argument("--total", type=float, default=1e9, help="the most for all: no case begins later")
    parser.add_argument("--resume", type=Path, help="a record: cases with a line in it are left out")
    parser.add_argument("--dry-run", action="store_true", help="print the plan")
    parser.add_argument("--stand-ins", action="store_true", help="without a GPU: to try the plan")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpus = 2 if STAND_INS else torch.cuda.device_count()
    cases = plan(gpus)
    if options.case:
        return perform(options.case, (cases | HIDDEN)[options.case])
    everything = cases | (HIDDEN if options.only == ["self"] else {})
    chosen = {name: case for name, case in everything.items() if name.startswith(tuple(options.only))}
    for line in options.resume.read_text().splitlines() if options.resume else ():
        chosen.pop(json.loads(line).get("case"), None)
    if options.dry_run:
        for name, case in chosen.items():
            about = {"ranks": case.ranks, "gpus": case.gpus, "seconds": min(case.seconds, options.seconds)}
            print(json.dumps({"case": name, "stage": case.stage, **about}), flush=True)
        return 0
    if not gpus:
        print(f"no GPU here: torch {torch.__version__} sees no CUDA device. Run this on a machine that has one.")
        return 2
    failed, end = 0, time.monotonic() + options.total
    with options.out.open("a" if options.out == options.resume else "w") as record:
        for name, case in ({"hardware": None} | chosen).items():
            left = end - time.monotonic()
            if left < 20:
                break
            line = hardware() if case is None else {"case": name, "ok": True, "skipped": f"needs {case.gpus} GPUs"}
            if case is not None and case.gpus <= gpus:
                line = outcome(name, case, min(case.seconds, options.seconds, left))
            failed += not line.get("ok", True)
            for file in (record, sys.stdout):
                print(json.dumps(line), file=file, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
