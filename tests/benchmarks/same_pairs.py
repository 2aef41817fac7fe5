"""Windows and documents beside dense causal attention of as many pairs: python tests/benchmarks/same_pairs.py [-h].

One process a rank with one thread, gloo, forward and backward through ``context_attention`` with ``Ring()``. Dense
causal attention has the length at which it attends to as many pairs, over as many ranks, and takes turns with the
others, in another order each round.

    pairs      millions that one head attends to, and the length at which causal attention has as many
    calls      kernel calls of rank 0 in a forward
    ms         median time of the slowest rank, beside that of dense attention
    ratio      median over the rounds of the paired ratio, for each pair attended
    CPU        the same of the CPU time of all ranks, which depends less on what else the machine does
    kernels    the same of the CPU time inside the kernels alone
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))

from attention import TimedKernel, document_lengths

from cp_styles import (
    Causal,
    Documents,
    Mask,
    SequenceLayout,
    SlidingWindow,
    context_attention,
    contiguous,
    head_tail,
    per_document_head_tail,
)
from cp_styles.plan import attended_pairs, make_plan

HEADS, DIM = 8, 64
HEADER = "| ranks | tokens, mask | pairs | dense | calls | ms | dense: ms | ratio | CPU | kernels |"


def cases(length: int, window: int, ranks: int) -> dict[str, tuple[Mask, SequenceLayout]]:
    documents = document_lengths(argparse.Namespace(mask="documents", seq_len=length))
    cut = per_document_head_tail(length, ranks, documents=documents)
    return {
        f"{length:,}, window of {window}": (SlidingWindow(window - 1, 0), contiguous(length, ranks)),
        f"{length:,}, {len(documents)} documents": (Documents(documents) & Causal(), cut),
    }


def work(rank: int, ranks: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(rank)
    for name, (mask, layout) in cases(options.seq_len, options.window, ranks).items():
        pairs = [attended_pairs(layout, layout, mask, each) for each in range(ranks)]
        dense = round(math.sqrt(2 * sum(pairs)) / 2 / ranks) * 2 * ranks
        contenders = []
        for which, cut in ((mask, layout), (Causal(), head_tail(dense, ranks))):
            shape = 1, cut.lengths[rank], HEADS, DIM
            inputs = [torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4)]
            kernel = TimedKernel()
            attend = partial(context_attention, mesh=dist.group.WORLD, mask=which, layout=cut, kernel=kernel)
            contenders.append((attend, inputs, kernel))
        spent: list[list[torch.Tensor]] = [[], []]
        for index in range(options.rounds + 2):
            for number in random.Random(index).sample((0, 1), 2):
                attend, inputs, kernel = contenders[number]
                leaves = [x.detach().requires_grad_() for x in inputs[:3]]
                dist.barrier()
                kernel.spent[0] = 0.0
                wall, cpu = time.perf_counter(), time.process_time()
                attend(*leaves).backward(inputs[3])
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                slowest, both = torch.tensor([wall]), torch.tensor([cpu, kernel.spent[0]])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                dist.all_reduce(both)
                spent[number] += [torch.cat((slowest, both))] * (index >= 2)
        if rank == 0:
            each = dense * (dense + 1) / 2 / sum(pairs)
            times = [torch.stack(found) for found in spent]
            wall, cpu, kernels = ((times[0] / times[1]).median(0).values * each).tolist()
            ms = [1e3 * statistics.median(found[:, 0].tolist()) for found in times]
            calls = sum(len(part.tiles) for part in make_plan(layout, layout, mask, 0).parts)
            cells = [ranks, name, f"{sum(pairs) / 1e6:.1f} M", f"{dense:,}", calls, *(f"{x:.0f}" for x in ms)]
            print("|", " | ".join(map(str, cells)), f"| {wall:.2f} | {cpu:.2f} | {kernels:.2f} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(HEADER + "\n" + "|---" * 10 + "|")
    for ranks in options.ranks:
        port = 20000 + (os.getpid() + ranks) % 20000
        torch.multiprocessing.start_processes(work, (ranks, options, port), ranks, start_method="spawn")


if __name__ == "__main__":
    main()
