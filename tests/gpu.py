"""What needs a GPU: python tests/gpu.py, on a machine with one or several. It writes down what came out.

    python tests/gpu.py [--out gpu_record.md] [--only kernels ranks ...] [--ranks N]

kernels   each CUDA kernel, tile by tile, against float64 on the CPU and beside torch's own attention on the whole
ranks     rows of the parity grid over NCCL, with groups of "nccl" and of "cpu:gloo,cuda:nccl", in float16, bfloat16 and
          float32; and a step in which CUDA itself raises where the host waits
compile   the style under torch.compile, and compiled flex_attention with a score_mod, forward and backward
job       the main job of the README, with --device cuda
benchmark forward and backward of one attention on all ranks, beside torch's on one

With fewer GPUs than ranks, several ranks share one, where NCCL allows that (NCCL_MULTI_RANK_GPU_ENABLE).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cp_styles import AttentionContextParallel, Causal, Full, SlidingWindow, Ulysses, head_tail  # noqa: E402
from cp_styles.functions.attention import context_attention  # noqa: E402
from cp_styles.functions.flex import context_flex_attention  # noqa: E402
from cp_styles.kernels import CUDA_CUDNN, CUDA_EFFICIENT, CUDA_FLASH, kernel_for_tiles  # noqa: E402
from tests.oracle import attend_and_differentiate, attention_inputs, error, expected_attention  # noqa: E402

LOW = (torch.float16, torch.bfloat16)
# Against torch's attention on one device in the same dtype: a merge rounds once more. Half a rounding beside it.
RATIO, FLOOR = 1.5, 0.25
SECONDS = 1200


def hardware() -> list[str]:
    lines = [f"python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"]
    lines.append(f"cuDNN {torch.backends.cudnn.version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        lines.append(f"GPU {index}: {about.name}, {about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB")
    return lines


def report(what: str, errors: list[float], alone: list[float], dtype: torch.dtype) -> bool:
    slack = FLOOR * torch.finfo(dtype).eps
    good = all(mine <= RATIO * one + slack for mine, one in zip(errors, alone, strict=True))
    numbers = " ".join(f"{mine:.1e}/{one:.1e}" for mine, one in zip(errors, alone, strict=True))
    print(f"{'ok  ' if good else 'FAIL'} {what}: {numbers}", flush=True)
    return good


def errors_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [error(x.cpu(), wanted) for x, wanted in zip(found, expected, strict=True)]


def kernels() -> bool:
    good = True
    for kernel in (CUDA_FLASH, CUDA_EFFICIENT, CUDA_CUDNN):
        for dtype in kernel.dtypes:
            for dim, length, keys, causal in ((64, 256, 256, True), (64, 128, 320, False), (20, 100, 77, False)):
                what = f"{kernel.name} {dtype} D={dim} L={length} M={keys} causal={causal}"
                inputs, cotangent = attention_inputs(length=length, kv_length=keys, kv_heads=2, dim=dim, dtype=dtype)
                mask = torch.ones(length, keys).tril().bool() if causal else None
                expected = expected_attention(inputs, cotangent, mask)
                given, grad = [x.cuda() for x in inputs], cotangent.cuda()

                def one(q, k, v, causal=causal):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

                alone = errors_of(attend_and_differentiate(one, given, grad), expected)
                options = {"causal": causal, "bias": None, "scale": dim**-0.5}
                try:
                    line = kernel_for_tiles(given, named=kernel)
                    out, lse = line.forward(*given, **options)
                    found = [out, *line.backward(grad, *given, out, lse, **options)]
                except Exception as problem:
                    print(f"FAIL {what}: {problem!r}", flush=True)
                    good = False
                else:
                    good &= report(what, errors_of(found, expected), alone, dtype)
    return good


def _begin(backend: str) -> tuple[int, int]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend)
    return rank, ranks


def rows(backend: str) -> bool:
    """On a rank of torchrun: rows of the grid, each rank with its part."""
    from tests.ranks.parity_grid import LAYOUTS, STRATEGIES, Row, makes_sense
    from tests.ranks.parity_grid import MASKS as ALL

    rank, ranks = _begin(backend)
    good = True
    for index, (strategy, mask, layout) in enumerate((s, m, x) for s in STRATEGIES for m in ALL for x in LAYOUTS):
        dtype = (*LOW, torch.float32)[index % 3]
        row = Row(strategy, mask, layout, "flash", (4, 2), dtype, ranks, 137)
        if index % 7 or not makes_sense(row):
            continue
        value, cut = row.value(), row.cut()
        inputs, cotangent = attention_inputs(length=137, heads=4, kv_heads=2, dim=64, dtype=dtype)
        bias = None if value.bias is None else value.bias.double()
        expected = expected_attention(inputs, cotangent, value.sees, bias=bias)
        parts = [cut.shard(x, 2, rank).cuda() for x in inputs]

        def attend(q, k, v, row=row, cut=cut, value=value):
            options = {"strategy": STRATEGIES[row.strategy], "layout": cut, "mask": value.mask}
            return context_attention(q, k, v, dist.group.WORLD, **options)

        found = attend_and_differentiate(attend, parts, cut.shard(cotangent, 2, rank).cuda())
        wanted = [cut.shard(x, 2, rank) for x in expected]
        errors = [error(x.cpu(), y, whole=z) for x, y, z in zip(found, wanted, expected, strict=True)]
        eps = torch.finfo(dtype).eps
        good &= report(f"rank {rank} of {ranks} ({backend}) {row}", errors, [4 * eps] * 4, dtype)
    good &= _without_waiting(rank, ranks)
    dist.destroy_process_group()
    return good


def _without_waiting(rank: int, ranks: int) -> bool:
    """CUDA itself raises where the host waits for it; the first step of each kind may, for what is made once."""
    parts = [torch.randn(1, 4, 256 // ranks, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    good = True
    for mask in (Causal(), Causal() & SlidingWindow(100, 0)):
        for strategy in (None, Ulysses()):
            for step in range(4):
                leaves = [x.clone().requires_grad_() for x in parts]
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if step else "default")
                try:
                    options = {"layout": head_tail, "mask": mask, "strategy": strategy}
                    context_attention(*leaves, dist.group.WORLD, **options).sum().backward()
                except RuntimeError as problem:
                    print(f"FAIL rank {rank}: the host waits, {mask}, {strategy}: {problem}", flush=True)
                    good = False
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    return good


def compiled(backend: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.ranks.attention_case import Core

    rank, ranks = _begin(backend)
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    good, length, dtype = True, 256, torch.bfloat16
    inputs, cotangent = attention_inputs(length=length, dim=64, dtype=dtype)
    layout = head_tail(length, ranks)
    parts, grad = [layout.shard(x, 2, rank).cuda() for x in inputs], layout.shard(cotangent, 2, rank).cuda()
    module = parallelize_module(Core(), mesh, AttentionContextParallel(layout=layout))
    expected = expected_attention(inputs, cotangent, torch.ones(length, length).tril().bool())

    def scored(q, k, v):
        def ahead(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx >= kv_idx, score, float("-inf"))

        return context_flex_attention(q, k, v, mesh, score_mod=ahead, layout=layout)

    for what, attend in (("style", torch.compile(module, fullgraph=True)), ("score_mod", torch.compile(scored))):
        found = attend_and_differentiate(attend, parts, grad)
        errors = [error(x.cpu(), layout.shard(y, 2, rank), whole=y) for x, y in zip(found, expected, strict=True)]
        good &= report(f"rank {rank} compiled {what}", errors, [4 * torch.finfo(dtype).eps] * 4, dtype)
    dist.destroy_process_group()
    return good


def benchmark(backend: str) -> bool:
    rank, ranks = _begin(backend)
    for length in (4096, 16384, 65536):
        for mask in (Causal(), Full()):
            parts = [torch.randn(1, 16, length // ranks, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            times = []
            for _ in range(8):
                leaves = [x.clone().requires_grad_() for x in parts]
                torch.cuda.synchronize()
                dist.barrier()
                begun = time.perf_counter()
                context_attention(*leaves, dist.group.WORLD, layout=head_tail, mask=mask).sum().backward()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
            peak = torch.cuda.max_memory_allocated() / 2**30
            if rank == 0:
                print(
                    f"ok   {ranks} ranks, S={length}, {mask}: {min(times) * 1e3:.2f} ms, peak {peak:.2f} GiB",
                    flush=True,
                )
    dist.destroy_process_group()
    return True


def _torchrun(ranks: int, *args: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *args]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = ("kernels", "ranks", "compile", "job", "benchmark")
    parser.add_argument("--out", type=Path, default=Path("gpu_record.md"), help="where the record goes")
    parser.add_argument("--only", nargs="+", choices=steps, default=steps)
    parser.add_argument("--ranks", type=int, help="default: as many as GPUs, 2 on a single one")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU here: torch {torch.__version__} sees no CUDA device. Run this on a machine that has one.")
        return 2
    if options.worker:
        name, _, backend = options.worker.partition("=")
        work = {"kernels": kernels, "ranks": rows, "compile": compiled, "benchmark": benchmark}[name]
        return 0 if (work(backend) if backend else work()) else 1
    gpus = torch.cuda.device_count()
    ranks = options.ranks or max(gpus, 2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if ranks > gpus:
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    me = str(Path(__file__).resolve())
    both = "cpu:gloo,cuda:nccl"
    job = ["--cp", str(ranks), "--tp", "1", "--device", "cuda", "--dtype", "bfloat16", "--steps", "5"]
    commands = {
        "kernels": [[sys.executable, me, "--worker", "kernels"]],
        "ranks": [_torchrun(ranks, me, "--worker", f"ranks={backend}") for backend in ("nccl", both)],
        "compile": [_torchrun(ranks, me, "--worker", f"compile={both}")],
        "job": [_torchrun(ranks, str(ROOT / "tutorials/train_llama.py"), *job)],
        "benchmark": [_torchrun(ranks, me, "--worker", f"benchmark={both}")],
    }
    record = ["# Record of tests/gpu.py", "", *(f"- {line}" for line in (*hardware(), f"{ranks} ranks")), ""]
    print("\n".join(record), flush=True)
    failed = []
    for step in options.only:
        for command in commands[step]:
            print(f"{step}: {' '.join(command)}", flush=True)
            try:
                done = subprocess.run(
                    command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
                )
                output, code = done.stdout + done.stderr[-4000:], done.returncode
            except subprocess.TimeoutExpired as late:
                output, code = f"{late.stdout or ''}\nstill running after {SECONDS} s", 1
            failed += [step] if code else []
            print(output, flush=True)
            record += [f"## {step}: {'failed' if code else 'passed'}", "", "```", output.strip(), "```", ""]
            options.out.write_text("\n".join(record))
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all passed'}; the record is {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
