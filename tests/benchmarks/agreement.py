"""What the agreement of the ranks costs: python tests/benchmarks/agreement.py [--ranks 2 8 64].

One process a rank, one thread each, gloo over loopback. For each number of ranks:

    meeting   ms of one meeting, an all-gather of a row on the host (median over all repeats, slowest rank)
    call      ms of a forward and backward of a small attention (128 positions, 8 heads of 64, causal, Ring) through the
              style with a SequenceLayout, by how often the ranks agree; the two take turns

More ranks than processors wait for each other's turns as well, so figures of 8 and 64 ranks on few processors are upper
bounds. Only up to 8 ranks attend.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import AttentionContextParallel, Checks, head_tail
from cp_styles.comm.agreement import WIDTH
from cp_styles.comm.point_to_point import gather_numbers

LENGTH, HEADS, DIM = 128, 8, 64


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def slowest(seconds: float, group: dist.ProcessGroup) -> float:
    spent = torch.tensor([seconds])
    dist.all_reduce(spent, dist.ReduceOp.MAX, group)
    return spent.item()


def work(rank: int, ranks: int, rounds: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    group, numbers, repeats = mesh.get_group(), list(range(WIDTH)), 20
    meetings = []
    for index in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            gather_numbers(numbers, group)
        spent = slowest((time.perf_counter() - start) / repeats, group)
        meetings += [spent] * (index >= 2)
    if rank == 0:
        print(f"{ranks} ranks: meeting {1e3 * statistics.median(meetings):.2f} ms", flush=True)
    if ranks <= 8:
        torch.manual_seed(rank)  # with equal inputs the attention would refuse a batch that nobody has cut
        layout = head_tail(LENGTH, ranks)
        calls = {
            checks: parallelize_module(Core(), mesh, AttentionContextParallel(layout=layout, checks=checks))
            for checks in (Checks(), Checks(agreement=False))
        }
        times: dict[object, list[float]] = {checks: [] for checks in calls}
        x = [torch.randn(1, HEADS, LENGTH // ranks, DIM, requires_grad=True) for _ in range(3)]
        for index in range(10 * rounds + 16):
            for checks, attend in calls.items():
                dist.barrier()
                start = time.perf_counter()
                attend(*x).sum().backward()
                spent = slowest(time.perf_counter() - start, group)
                times[checks] += [spent] * (index >= 16)
        if rank == 0:
            for checks, spent in times.items():
                print(f"  agreement={checks.agreement!s:<5} call {1e3 * statistics.median(spent):.2f} ms", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        port = 20000 + (os.getpid() + ranks) % 20000
        torch.multiprocessing.start_processes(work, (ranks, arguments.rounds, port), ranks, start_method="fork")


if __name__ == "__main__":
    main()
