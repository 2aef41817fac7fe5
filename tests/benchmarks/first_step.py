"""Times the first step of a model, later steps, and verify before them:

    torchrun --nproc-per-node 2 tests/benchmarks/first_step.py [--verify] [--models 5]

A small Llama on the CPU, forward, backward and the sum of gradients, in milliseconds: the median over models, each of
which is new. The process has run a step of another model before. The file also runs in an earlier checkout, without
--verify. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from cp_styles import BatchSharder, ModuleContextParallel, parallelize_module
from cp_styles.verify import verify
from tutorials.llama import Llama, LlamaConfig


def step(model: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
    sharder = BatchSharder(mesh)
    batch = sharder(tokens)
    loss = batch.loss(model(batch.tokens, batch.positions))
    loss.backward()
    sharder.sum_gradients(model)
    return loss


def milliseconds(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", action="store_true", help="prove each model before its first step")
    parser.add_argument("--models", type=int, default=5, help="how many models; default 5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    tokens = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {"verify": [], "first step": [], "later step": []}
    for number in range(options.models + 1):
        torch.manual_seed(number)
        model = Llama(LlamaConfig(vocabulary=64, width=64, layers=4, heads=4, kv_heads=2, hidden=128))
        parallelize_module(model, mesh, ModuleContextParallel())
        found = (
            {"verify": milliseconds(lambda model=model: verify(model, mesh, tokens, step))} if options.verify else {}
        )
        for name in ("first step", "later step", "later step"):
            found[name] = milliseconds(lambda model=model: step(model, tokens, mesh))
            model.zero_grad()
        for name, value in found.items() if number else ():  # the first model warms the process up
            times[name].append(value)
    if dist.get_rank() == 0:
        for name, values in times.items():
            if values:
                print(f"{name:10} {statistics.median(values):7.1f} ms ({min(values):.1f} to {max(values):.1f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
