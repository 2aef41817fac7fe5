"""The fixed cost of a call, beside another version of the package: python tests/benchmarks/fixed_cost.py OTHER_TREE

OTHER_TREE is a checkout of another commit (git worktree add OTHER_TREE COMMIT). Both trees run the same small
attention (S=128), forward and backward, on two processes, in turns, because a machine is not equally fast all the time.

For every door and tree, the median over the runs of: the median time of a call, and the lower quartile of the time that
rank 0's main thread computes in a call. The latter depends less on what else the machine does. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

LENGTH, RANKS, WARM = 128, 2, 30
DOORS = ("style", "module", "block", "function")


class Attend(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def measure(rank: int, store: str, calls: int, found: str) -> None:
    from cp_styles import AttentionContextParallel, Causal, ModuleContextParallel, context_attention, contiguous
    from cp_styles.torch_api import context_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    style = parallelize_module(Attend(), mesh, AttentionContextParallel(layout=contiguous))
    module = parallelize_module(Attend(), mesh, ModuleContextParallel(layout=contiguous))
    plain = Attend()

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        with context_parallel(mesh, layout=contiguous):
            return plain(*tensors)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return context_attention(*tensors, mesh, mask=Causal(), layout=contiguous)

    tensors = [torch.randn(1, 4, LENGTH // RANKS, 32, requires_grad=True) for _ in range(3)]
    times: dict[str, tuple[float, float]] = {}
    for name, attend in zip(DOORS, (style, module, block, function), strict=True):
        walls, computing = [], []
        for _ in range(WARM + calls):
            wall, own = time.perf_counter(), time.thread_time()
            attend(*tensors).sum().backward()
            computing.append(time.thread_time() - own)
            walls.append(time.perf_counter() - wall)
        times[name] = statistics.median(walls[WARM:]), statistics.quantiles(computing[WARM:])[0]
    if rank == 0:
        Path(found).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def run(tree: Path, calls: int) -> dict[str, tuple[float, float]]:
    """The times of one tree, in processes of its own."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", str(calls)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("other", nargs="?", type=Path, help="a checkout of another commit")
    options.add_argument("--runs", type=int, default=6, help="of each tree")
    options.add_argument("--calls", type=int, default=200, help="of each door in a run")
    options.add_argument("--measure", type=int, metavar="CALLS", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.measure:
        with tempfile.TemporaryDirectory() as folder:
            found = f"{folder}/found"
            mp.spawn(measure, (f"{folder}/store", arguments.measure, found), RANKS)
            print(Path(found).read_text())
        return
    if arguments.other is None:
        options.error("give a checkout of another commit")
    trees = {"other": arguments.other.resolve(), "this": Path(__file__).parents[2]}
    runs: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in trees}
    for _ in range(arguments.runs):
        for name, tree in trees.items():
            runs[name].append(run(tree, arguments.calls))
    print("| door | other ms | this ms | ratio | computing: other ms | this ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for door in DOORS:
        cells = []
        for which in (0, 1):
            other, this = (statistics.median(each[door][which] for each in runs[name]) for name in trees)
            cells += [f"{1000 * other:.2f}", f"{1000 * this:.2f}", f"{this / other:.3f}"]
        print("|", door, "|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
