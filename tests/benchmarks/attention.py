"""Ours against the ideal, side by side in one run: python tests/benchmarks/attention.py [--seq-len 2048 --ranks 2 ...].

The ideal: every rank runs its share of the heads over the whole sequence, alone; nothing is sent. Ours runs through the
DTensor door (a module under AttentionContextParallel), forward and backward, in rounds interleaved with the ideal's,
one process a rank with one thread each.

    wall      median over rounds of the paired ratio ours / ideal; a round ends when its slowest rank does
    CPU       the same of the CPU time of all ranks
    overhead  (CPU time of all ranks - that inside attention kernels) / that inside attention kernels, of our own run:
              all that is not attention, communication included, and nearly immune to a busy machine
    system    the operating system's CPU time, for sockets and page faults, over that inside attention kernels; of all
              rounds together, because it is counted in ticks
    wire, kept  bytes sent by all ranks, and bytes alive on rank 0 after the forward beyond its inputs and output, in
              units of u, one rank's query shard
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import AllGather, AttentionContextParallel, Kernel, Ring, Strategy, Ulysses, contiguous, head_tail
from cp_styles.kernels import CPU_FLASH
from cp_styles.layout import Balancer
from cp_styles.testing import CommunicationTrace

# 2 ranks x 1 thread, gloo, B=1, H=8, D=64, causal, float32, forward + backward, torch 2.13: (wall, overhead) at S =
# 2048. Measured with this method on another machine of the kind, through thin adapters onto torch's CPU flash op, no
# DTensor.
PEERS = {
    "torch ring, all-gather": (1.41, 28.9, "16 u"),
    "torch ring, all-to-all": (1.35, 23.3, "16 u"),
    "ring-flash-attention zigzag": (1.35, 13.7, "16 u"),
    "yunchang USP (ring 2)": (1.37, 18.0, "16 u"),
    "yunchang Ulysses": (1.27, 15.8, "8 u"),
}

STRATEGIES: dict[str, tuple[Strategy, Balancer]] = {
    "Ring()": (Ring(), head_tail),
    "Ring(keep=0)": (Ring(keep=0), head_tail),
    "AllGather()": (AllGather(), head_tail),
    "Ulysses()": (Ulysses(), contiguous),
}


@dataclass(frozen=True)
class TimedKernel(Kernel):
    """A kernel that adds up the CPU time of this thread inside it."""

    inner: Kernel = CPU_FLASH
    spent: list[float] = field(default_factory=lambda: [0.0], compare=False)

    def forward(self, *tensors, **options):
        return self._timed(self.inner.forward, *tensors, **options)

    def backward(self, *tensors, **options):
        return self._timed(self.inner.backward, *tensors, **options)

    def check(self, *tensors, biased):
        self.inner.check(*tensors, biased=biased)

    def tile_dtype(self, dtype):
        return self.inner.tile_dtype(dtype)

    def _timed(self, call, *tensors, **options):
        before = time.thread_time()
        result = call(*tensors, **options)
        self.spent[0] += time.thread_time() - before
        return result


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@dataclass
class Row:
    """What one contender did in each round, on this rank."""

    name: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)
    system: list[float] = field(default_factory=list)
    wire: int = 0
    kept: int = 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", choices=STRATEGIES, action="append", help="this one beside the ideal; may be repeated"
    )
    parser.add_argument(
        "--keep-freed-memory",
        action="store_true",
        help="tell glibc not to give large buffers back at every free, for the ideal and ours alike: without, much of "
        "the overhead is the page faults of taking them anew",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    args = parser.parse_args()
    if args.seq_len % (2 * args.ranks) or args.heads % args.ranks or args.heads % args.kv_heads:
        parser.error("the ideal needs --seq-len to be a multiple of 2 x --ranks, and --heads of --ranks and --kv-heads")
    return args


def work(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(rank)

    def tensors(batch_heads_rows: list[tuple[int, int]]) -> list[torch.Tensor]:
        # [B, S, H, D] in memory, as projections leave them.
        return [
            torch.randn(1, rows, heads, args.head_dim, generator=generator, dtype=dtype).transpose(1, 2)
            for heads, rows in batch_heads_rows
        ]

    contenders: list[tuple[Row, nn.Module, list[torch.Tensor], TimedKernel | None]] = []
    share, kv_share = args.heads // args.ranks, max(args.kv_heads // args.ranks, 1)
    whole = tensors([(heads, args.seq_len) for heads in (share, kv_share, kv_share, share)])
    contenders.append((Row("ideal: heads split, nothing sent"), Core(), whole, None))
    local = args.seq_len // args.ranks
    shard = tensors([(heads, local) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)])
    for name in args.only or STRATEGIES:
        strategy, balancer = STRATEGIES[name]
        kernel, layout = TimedKernel(), balancer(args.seq_len, args.ranks)
        style = AttentionContextParallel(strategy=strategy, layout=layout, kernel=kernel)
        contenders.append((Row(name), parallelize_module(Core(), mesh, style), shard, kernel))
    for index in range(args.rounds + 2):
        # Each round begins with another one, so that none always meets the memory that the same one has left.
        turn = index % len(contenders)
        for row, module, inputs, kernel in contenders[turn:] + contenders[:turn]:
            measure(row, module, inputs, kernel, first=index == 0)
            if index < 2:  # warm-up
                row.wall, row.cpu, row.kernels, row.system = [], [], [], []
        if rank == 0:
            print(f"\rround {index + 1}/{args.rounds + 2}", end="", flush=True)
    rows: list[list[Row]] = [[] for _ in range(args.ranks)]
    dist.all_gather_object(rows, [row for row, *_ in contenders])
    if rank == 0:
        report(args, rows, shard[0])
    dist.barrier()
    dist.destroy_process_group()


def measure(
    row: Row, module: nn.Module, inputs: list[torch.Tensor], kernel: TimedKernel | None, *, first: bool
) -> None:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    if first:
        with CommunicationTrace() as trace:
            out = module(q, k, v)
            row.kept = sum(x.untyped_storage().nbytes() for x in saved_tensors(out) if x is not q)
            out.backward(inputs[3])
        row.wire = trace.sent_bytes
        return
    dist.barrier()
    if kernel is not None:
        kernel.spent[0] = 0.0
    wall, cpu, system = time.perf_counter(), time.process_time(), os.times().system
    module(q, k, v).backward(inputs[3])
    row.cpu.append(time.process_time() - cpu)
    row.wall.append(time.perf_counter() - wall)
    row.system.append(os.times().system - system)
    row.kernels.append(kernel.spent[0] if kernel is not None else row.cpu[-1])


def saved_tensors(out: torch.Tensor) -> list[torch.Tensor]:
    """What the graph behind ``out`` holds, each storage once, beside views of the leaves."""
    seen: dict[int, torch.Tensor] = {}
    stack, nodes = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for name in dir(node):
            value = getattr(node, name, None) if name.startswith("_saved_") else None
            if isinstance(value, torch.Tensor):
                value = value.to_local() if hasattr(value, "to_local") else value
                seen[value.untyped_storage().data_ptr()] = value
        stack.extend(parent for parent, _ in node.next_functions)
    return list(seen.values())


def report(args: argparse.Namespace, rows: list[list[Row]], query: torch.Tensor) -> None:
    unit = query.numel() * query.element_size()
    rounds = range(len(rows[0][0].wall))

    def slowest(index: int, turn: int) -> float:
        return max(ranks[index].wall[turn] for ranks in rows)

    def total(index: int, turn: int, what: str) -> float:
        return sum(getattr(ranks[index], what)[turn] for ranks in rows)

    print(
        f"\rtorch {torch.__version__}, {args.ranks} ranks x 1 thread, gloo, B=1 H={args.heads}:{args.kv_heads} "
        f"D={args.head_dim} S={args.seq_len} causal {args.dtype}, forward + backward, {len(rounds)} rounds"
    )
    print(f"{'':<34}{'wall':>7}{'CPU':>7}{'overhead':>10}{'system':>8}{'wire':>8}{'kept':>8}")
    for index, row in enumerate(rows[0]):
        wall = statistics.median(slowest(index, turn) / slowest(0, turn) for turn in rounds)
        cpu = statistics.median(total(index, turn, "cpu") / total(0, turn, "cpu") for turn in rounds)
        over = statistics.median(total(index, t, "cpu") / total(index, t, "kernels") - 1 for t in rounds)
        system, kernels = (sum(total(index, t, what) for t in rounds) for what in ("system", "kernels"))
        wire = sum(ranks[index].wire for ranks in rows) / unit
        shown, kept = (f"{over:.1%}", f"{row.kept / unit:>6.1f} u") if index else ("-", "")
        print(f"{row.name:<34}{wall:>7.2f}{cpu:>7.2f}{shown:>10}{system / kernels:>8.1%}{wire:>6.1f} u{kept}")
    best = statistics.median(slowest(0, turn) for turn in rounds)
    print(f"ideal: {best * 1e3:.0f} ms a forward and backward")
    print("peers, S=2048 on 2 ranks, elsewhere by the same method:")
    for name, (wall, over, wire) in PEERS.items():
        print(f"{name:<34}{wall:>7.2f}{'':>7}{over:>8.1f} %{'':>8}{wire:>9}")


if __name__ == "__main__":
    arguments = parse()
    if arguments.keep_freed_memory:  # read by the C library when the ranks start
        os.environ.update(MALLOC_MMAP_THRESHOLD_=str(2**30), MALLOC_TRIM_THRESHOLD_=str(2**32))
    torch.multiprocessing.start_processes(
        work, args=(arguments, 20000 + os.getpid() % 20000), nprocs=arguments.ranks, start_method="spawn"
    )
