"""Ours against the ideal, and against peers, side by side in one run: python tests/benchmarks/attention.py [--help].

Causal attention, ours through ``AttentionContextParallel``. The ideal: every rank runs its share of the heads over the
whole sequence, alone; nothing is sent. All run forward and backward, in rounds interleaved with the ideal's, one
process a rank with one thread each.

    wall      median over rounds of the paired ratio to the ideal; a round ends when its slowest rank does
    CPU       the same of the CPU time of all ranks
    overhead  (CPU time of all ranks - that inside attention kernels) / that inside attention kernels, of the same
              run: all that is not attention, communication included, and nearly immune to a busy machine
    system    the operating system's CPU time, for sockets and page faults, over that inside attention kernels; of all
              rounds together, because it is counted in ticks
    wire, kept  bytes sent by all ranks, and bytes that autograd keeps on rank 0 after the forward, its inputs and its
              output included, in units of u, one rank's query shard
    ms        median time of the slowest rank

--peers adds torch's own ring, and ring-flash-attention and yunchang where they can be imported; see peers.py.
--over-gloo adds Ulysses() with all blocks in gloo's all-to-all, and with all blocks in messages.
--bare adds the schedule of Ring() with nothing around it; see bare.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from bare import BareRing
from peers import Attend, peers
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    AllGather,
    AttentionContextParallel,
    Ring,
    Ulysses,
    contiguous,
    head_tail,
    parallelize_module,
)
from cp_styles.comm import point_to_point
from cp_styles.kernels import Kernel
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.layouts import Balancer
from cp_styles.strategies import Strategy
from cp_styles.testing import CommunicationTrace

sys.path.append(str(Path(__file__).parents[2]))
from tests.ranks.attention_case import Core

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


class Contender(NamedTuple):
    """``kernel`` knows the time inside kernels; None where it is not known, or is all of it. ``most_over_gloo``:
    the largest block in bytes of an all-to-all over gloo, if it is not the package's."""

    row: Row
    attend: Attend
    inputs: list[torch.Tensor]
    kernel: TimedKernel | None
    most_over_gloo: int | None = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peers", action="store_true", help="other implementations in the same run")
    parser.add_argument(
        "--over-gloo", action="store_true", help="Ulysses by all-to-all and by messages in the same run"
    )
    parser.add_argument("--bare", action="store_true", help="a ring without doors and agreement")
    parser.add_argument("--json", metavar="FILE", help="write wall, overhead and ms of each, which times.py reads")
    parser.add_argument(
        "--only", choices=STRATEGIES, action="append", help="this one beside the ideal; may be repeated"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    args = parser.parse_args()
    if args.bare and args.heads != args.kv_heads:
        parser.error("--bare needs as many --kv-heads as --heads")
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

    share, kv_share = args.heads // args.ranks, max(args.kv_heads // args.ranks, 1)
    whole = tensors([(heads, args.seq_len) for heads in (share, kv_share, kv_share, share)])
    contenders = [Contender(Row("ideal: heads split, nothing sent"), Core(), whole, None)]
    local = args.seq_len // args.ranks
    shard = tensors([(heads, local) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)])
    ways: list[tuple[str, str, int | None]] = [(name, name, None) for name in args.only or STRATEGIES]
    if args.over_gloo:
        ways += [("Ulysses()", "Ulysses(), an all-to-all", 2**62), ("Ulysses()", "Ulysses(), messages", 0)]
    for name, label, most in ways:
        strategy, balancer = STRATEGIES[name]
        kernel, layout = TimedKernel(), balancer(args.seq_len, args.ranks)
        style = AttentionContextParallel(strategy=strategy, layout=layout, kernel=kernel, verified=True)
        attend = parallelize_module(Core(), mesh, style)
        contenders.append(Contender(Row(label), attend, shard, kernel, most))
    missing: dict[str, str] = {}
    if args.bare:
        kernel = TimedKernel()
        contenders.append(Contender(Row("a bare ring"), partial(bare_ring, kernel), shard, kernel))
    if args.peers:
        found, missing = peers()
        for name, peer in found.items():
            inputs = [x.transpose(1, 2) for x in shard] if peer.rows_first else shard
            contenders.append(Contender(Row(name), peer.attend, inputs, None))
    for index in range(args.rounds + 2):
        # In another order each round, the same on all ranks: one that always follows its like finds its code and its
        # memory warm.
        for contender in random.Random(index).sample(contenders, len(contenders)):
            measure(contender, first=index == 0)
            if index < 2:  # warm-up
                row = contender.row
                row.wall, row.cpu, row.kernels, row.system = [], [], [], []
        if rank == 0:
            print(f"\rround {index + 1}/{args.rounds + 2}", end="", flush=True)
    rows: list[list[Row]] = [[] for _ in range(args.ranks)]
    dist.all_gather_object(rows, [contender.row for contender in contenders])
    if rank == 0:
        timed = [contender.kernel is not None for contender in contenders]
        report(args, rows, shard[0], timed, missing)
    dist.barrier()
    dist.destroy_process_group()


def bare_ring(kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return BareRing.apply(q, k, v, kernel)  # pyright: ignore[reportReturnType]


def measure(contender: Contender, *, first: bool) -> None:
    most = point_to_point.MOST_OVER_GLOO if contender.most_over_gloo is None else contender.most_over_gloo
    with patch.object(point_to_point, "MOST_OVER_GLOO", most):
        _measure(contender, first=first)


def _measure(contender: Contender, *, first: bool) -> None:
    row, attend, inputs, kernel, _ = contender
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    if first:
        with CommunicationTrace() as trace:
            out = attend(q, k, v)
            row.kept = sum(x.untyped_storage().nbytes() for x in saved_tensors(out))
            out.backward(inputs[3])
        row.wire = trace.sent_bytes
        return
    dist.barrier()
    if kernel is not None:
        kernel.spent[0] = 0.0
    wall, cpu, system = time.perf_counter(), time.process_time(), os.times().system
    attend(q, k, v).backward(inputs[3])
    row.cpu.append(time.process_time() - cpu)
    row.wall.append(time.perf_counter() - wall)
    row.system.append(os.times().system - system)
    row.kernels.append(kernel.spent[0] if kernel is not None else row.cpu[-1])


def saved_tensors(out: torch.Tensor) -> list[torch.Tensor]:
    """What the graph behind ``out`` holds, each storage once."""
    seen: dict[int, torch.Tensor] = {}
    stack, nodes = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        found = [getattr(node, name, None) for name in dir(node) if name.startswith("_saved_")]
        for value in (*found, *getattr(node, "saved_tensors", ())):  # of torch's nodes, and of a Function's
            if isinstance(value, torch.Tensor):
                value = value.to_local() if hasattr(value, "to_local") else value
                seen[value.untyped_storage().data_ptr()] = value
        stack.extend(parent for parent, _ in node.next_functions)
    return list(seen.values())


def report(
    args: argparse.Namespace, rows: list[list[Row]], query: torch.Tensor, timed: list[bool], missing: dict[str, str]
) -> None:
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
    print(f"{'':<34}{'wall':>7}{'CPU':>7}{'overhead':>10}{'system':>8}{'wire':>8}{'kept':>8}{'ms':>9}")
    written = {}
    for index, row in enumerate(rows[0]):
        wall = statistics.median(slowest(index, turn) / slowest(0, turn) for turn in rounds)
        cpu = statistics.median(total(index, turn, "cpu") / total(0, turn, "cpu") for turn in rounds)
        wire = sum(ranks[index].wire for ranks in rows) / unit
        shown, system, over = "-", "-", None
        if timed[index]:
            over = statistics.median(total(index, t, "cpu") / total(index, t, "kernels") - 1 for t in rounds)
            ticks, kernels = (sum(total(index, t, what) for t in rounds) for what in ("system", "kernels"))
            shown, system = f"{over:.1%}", f"{ticks / kernels:.1%}"
        ms = statistics.median(slowest(index, turn) for turn in rounds) * 1e3
        bytes_shown = f"{wire:>6.1f} u{row.kept / unit:>6.1f} u"
        print(f"{row.name:<34}{wall:>7.3f}{cpu:>7.3f}{shown:>10}{system:>8}{bytes_shown}{ms:>9.2f}")
        written[row.name] = {"wall": wall, "overhead": over, "ms": ms}
    if args.json:
        Path(args.json).write_text(json.dumps(written))
    for name, reason in missing.items():
        print(f"{name:<34}does not run here: {reason}")


if __name__ == "__main__":
    arguments = parse()
    torch.multiprocessing.start_processes(
        work, args=(arguments, 20000 + os.getpid() % 20000), nprocs=arguments.ranks, start_method="spawn"
    )
