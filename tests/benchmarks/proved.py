"""What it costs to notice situations that were not proved: python tests/benchmarks/proved.py.

Warm training steps of a small model on two ranks that are threads. One copy was compared by verify, so each attention
is held against the situations of its proof. Another copy has ``verified=True``, and nothing is held against anything.
The copies take turns, a step each. Printed are medians of the processor time of rank 0's main thread, which forwards
run on, and the median of the ratios of neighbours, whose spread is larger than what is measured. So the time of the
look of one warm attention is printed too. Run it alone.

Not collected by pytest.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import BatchSharder, Causal, ModuleContextParallel, parallelize_module
from cp_styles.checks import proof_of
from cp_styles.comm.checks import CHECKS
from cp_styles.engine.observers import CheckedCall
from cp_styles.testing import run_ranks
from cp_styles.verify import verify

sys.path.append(str(Path(__file__).parents[2]))
from tutorials.llama import Llama, LlamaConfig


def step(model: nn.Module, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
    sharder = BatchSharder(mesh)
    batch = sharder(tokens)
    loss = batch.loss(model(batch.tokens, batch.positions))
    loss.backward()
    sharder.sum_gradients(model)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    llama = Llama(LlamaConfig(vocabulary=64, width=64, layers=options.layers, heads=4, kv_heads=2, hidden=128))
    tokens = torch.randint(64, (1, options.tokens))

    def on(rank: int) -> tuple[float, list[tuple[float, float]]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        proved, given = copy.deepcopy(llama), copy.deepcopy(llama)
        parallelize_module(proved, mesh, ModuleContextParallel())
        parallelize_module(given, mesh, ModuleContextParallel(verified=True))
        verify(proved, mesh, tokens, step)
        pairs = []
        for _ in range(options.steps):
            seconds = []
            for model in (proved, given):
                torch.distributed.barrier()
                begin = time.thread_time()
                step(model, tokens, mesh)
                seconds.append(time.thread_time() - begin)
                model.zero_grad()
            pairs.append((seconds[0], seconds[1]))
        proof, query = proof_of(proved), torch.zeros(1, 4, options.tokens // 2, 16)
        call = CheckedCall(("a look", "cp", mesh.get_group()), CHECKS, [query], trains=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            look = partial(proof.attends, call, (1, "", 1), frozenset([Causal]), ())
            look()
            return timeit(look, number=10_000) / 10_000, pairs[options.steps // 10 :]

    seconds, pairs = run_ranks(on, 2)[0]
    first, second = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    share = options.layers * 1e3 * seconds / first
    print(
        f"{options.layers} layers, {options.tokens} tokens: {first:.2f} ms with a proof, {second:.2f} ms without, "
        f"ratio {statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-quarter]:.3f}); "
        f"a look takes {1e6 * seconds:.1f} us, {share:.2%} of the step"
    )


if __name__ == "__main__":
    main()
