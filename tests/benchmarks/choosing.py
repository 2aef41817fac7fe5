"""Predicted times beside measured ones, on the machine at hand: python tests/benchmarks/choosing.py [--help].

Attentions of several lengths, heads, masks, strategies and numbers of ranks run on CPU, one process a rank with one
thread each, forward and backward, through context_attention. Their times are predicted with the figures of
Hardware.measure(), taken by the same ranks before. None of the figures is fitted to the times that are predicted.

    measured   median over rounds of the slowest rank's ms; the strategies of a case take turns in each round
    predicted  Explanation.seconds, forward and backward
    pairs      of strategies of one case, and of all rows, whose measured times differ by more than 10 %: how many are
               predicted in that order
    Auto       for each case, the measured time of what Auto chooses over the fastest measured one
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from functools import partial
from itertools import combinations, product
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_styles import AllGather, Causal, Mask, Ring, SlidingWindow, Ulysses, context_attention, head_tail
from cp_styles.explain import Auto, Hardware, Shapes
from cp_styles.explain.rehearse import kernel_of
from cp_styles.explain.report import explained
from cp_styles.strategies import Strategy

STRATEGIES: tuple[Strategy, ...] = (Ring(), Ring(keep=0), AllGather(), Ulysses())
DIM = 64


class Case(NamedTuple):
    length: int
    heads: int
    kv_heads: int
    mask: Mask

    def __str__(self) -> str:
        mask = "causal" if self.mask == Causal() else "window 256"
        return f"{self.length} positions, {self.heads}:{self.kv_heads} heads, {mask}"


CASES = {
    2: [
        *(Case(length, 8, kv, Causal()) for length, kv in product((512, 1024, 2048, 4096), (8, 2))),
        *(Case(length, 8, 8, SlidingWindow(255, 0)) for length in (1024, 4096)),
    ],
    4: [Case(length, 8, kv, Causal()) for length, kv in product((1024, 2048), (8, 2))],
}


class Row(NamedTuple):
    case: str
    strategy: Strategy
    predicted: float
    measured: float


def work(rank: int, ranks: int, rounds: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    machine = Hardware.measure(group)
    if rank == 0:
        print(
            f"\n{ranks} ranks, measured: {machine.flops / 1e9:.0f} GFLOP/s, half at {machine.half_rows:.0f} queries, "
            f"backward {machine.backward_rate:.2f}, beyond the diagonal {machine.beyond_diagonal:.0f} keys, "
            f"kernel floor {machine.kernel_floor * 1e6:.0f} us, op floor {machine.op_floor * 1e6:.0f} us, copies "
            f"{machine.copy_bandwidth / 1e9:.1f} GB/s, messages {machine.bandwidth / 1e9:.1f} GB/s "
            f"+ {machine.latency * 1e6:.0f} us, a call {machine.call_floor * 1e3:.2f} ms"
        )
    found: list[Row] = []
    ratios: list[float] = []
    for case in CASES[ranks]:
        layout = head_tail(case.length, ranks)
        rows = measured(case, machine, group, rounds)
        chosen = Auto(machine, STRATEGIES).choice((layout, layout), case.mask, shapes_of(case))
        times = {row.strategy: row.measured for row in rows}
        ratios.append(times[chosen.strategy] / min(times.values()))
        found += rows
        if rank == 0:
            for row in rows:
                mark = " <- Auto" if row.strategy == chosen.strategy else ""
                print(
                    f"  {row.case:<42}{row.strategy!s:<42.42}{1e3 * row.predicted:>8.2f}{1e3 * row.measured:>8.2f} ms"
                    f"{row.predicted / row.measured - 1:>+6.0%}{mark}",
                    flush=True,
                )
    if rank == 0:
        summary(found, ratios)
    dist.barrier()
    dist.destroy_process_group()


def shapes_of(case: Case) -> Shapes:
    return Shapes(case.heads, case.kv_heads, DIM, DIM, torch.float32, torch.device("cpu"))


def measured(case: Case, machine: Hardware, group: dist.ProcessGroup, rounds: int) -> list[Row]:
    ranks, layout = group.size(), head_tail(case.length, group.size())
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, grad = (torch.randn(1, case.length // ranks, n, DIM).transpose(1, 2) for n in heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    times: dict[Strategy, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for index in range(rounds + 2):
        for strategy in STRATEGIES[index % 4 :] + STRATEGIES[: index % 4]:
            attend = partial(context_attention, group=group, mask=case.mask, strategy=strategy, layout=layout)
            dist.barrier()
            start = time.perf_counter()
            attend(*inputs).backward(grad)
            spent = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if index >= 2:  # after the warm-up
                times[strategy].append(spent.item())
    rows, shapes = [], shapes_of(case)
    for strategy, seconds in times.items():
        made = explained(
            strategy, (layout, layout), case.mask, kernel_of(shapes, None), shapes, hardware=machine, memory=False
        )
        predicted = sum(phase.total for phase in made.seconds)
        rows.append(Row(f"{case}", strategy, predicted, statistics.median(seconds)))
    return rows


def summary(rows: list[Row], ratios: list[float]) -> None:
    errors = [abs(row.predicted / row.measured - 1) for row in rows]
    counts = {"of one case": [0, 0], "of all rows": [0, 0]}
    for one, other in combinations(rows, 2):
        if abs(math.log(one.measured / other.measured)) > math.log(1.1):
            right = (one.predicted > other.predicted) == (one.measured > other.measured)
            for name in ("of one case", "of all rows") if one.case == other.case else ("of all rows",):
                counts[name][0] += right
                counts[name][1] += 1
    print(f"  {len(rows)} rows: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    for name, (right, pairs) in counts.items():
        print(f"  pairs {name} in the right order: {right} of {pairs}" + (f" ({right / pairs:.0%})" if pairs else ""))
    print(f"  Auto over the fastest: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, choices=CASES, action="append", help="default: 2 and 4")
    arguments = parser.parse_args()
    for ranks in arguments.ranks or CASES:
        port = 20000 + (os.getpid() + ranks) % 20000
        torch.multiprocessing.start_processes(work, (ranks, arguments.rounds, port), nprocs=ranks, start_method="spawn")


if __name__ == "__main__":
    main()
