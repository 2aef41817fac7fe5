"""What the tests of torch.compile share: the doors, something to compile around them, graphs to look at, and ranks.

torch 2.11 cannot compile on two threads, and 2.12 fails at it now and then ("you are using FX to symbolically trace").
There tests/ranks/compile/test_compile_in_processes.py runs the same files with a process for each rank: every process
runs all tests, and ``run_ranks`` is one rank of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import testing
from cp_styles.functions.attention import context_attention
from cp_styles.masks import Causal, Full
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from tests.ranks import attention_case
from tests.ranks.attention_case import Core, Problem

RANKS = 2
DOORS = ["style", "module", "function"]
LENGTHS = (13, 16)  # unequal parts on two ranks, and equal ones
PROBLEMS = {length: Problem(length=length, kv_heads=2) for length in LENGTHS}

# Of a process that is one rank: the rank, and a folder that it shares with the others.
RANK_HERE, MEETING_PLACE = "CP_STYLES_TEST_RANK", "CP_STYLES_TEST_FOLDER"
_rank = int(os.environ[RANK_HERE]) if RANK_HERE in os.environ else None

COMPILES_ON_THREADS = not torch.__version__.startswith(("2.11", "2.12"))
cannot_compile_on_threads = pytest.mark.skipif(
    not COMPILES_ON_THREADS and _rank is None,
    reason="this torch cannot compile on two threads; test_compile_in_processes.py runs this file",
)


def run_ranks(fn: Callable[[int], Any], world_size: int, *, timeout_seconds: float = 180.0) -> list[Any]:
    """As :func:`cp_styles.testing.run_ranks`; in a process that is one rank, that one alone."""
    if _rank is None:
        return testing.run_ranks(fn, world_size, timeout_seconds=timeout_seconds)
    rank = min(_rank, world_size - 1)  # a world of one is each process' own
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0].replace("/", ".")
    folder = Path(os.environ[MEETING_PLACE])
    name = test if world_size > 1 else f"{test} of {_rank}"
    _worlds[test] = _worlds.get(test, 0) + 1
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"{name} {_worlds[test]}"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        found = fn(rank)
        dist.barrier()  # so that no rank waits for one that has left
        return [found]
    finally:
        dist.destroy_process_group()


_worlds: dict[str, int] = {}
on_every_rank = partial(attention_case.on_every_rank, run=run_ranks)


def ranks_here(ranks: int = RANKS) -> int:
    """How many of them this process is."""
    return ranks if _rank is None else 1


class Grouped(Core):
    """The same without a comparison of two sizes, which would be a symbol where heads are one."""

    def forward(self, query, key, value):
        if self.seq_dim == 1:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2) if self.seq_dim == 1 else out


def door(name: str, mesh: DeviceMesh, core: nn.Module | None = None, **options: Any) -> Callable[..., torch.Tensor]:
    """Attention as a user of that door writes it, causal."""
    if name == "function":
        return partial(context_attention, mesh=mesh, mask=options.pop("mask", Full()) & Causal(), **options)
    style = {"style": AttentionContextParallel, "module": ModuleContextParallel}[name]
    return parallelize_module(core or Grouped(), mesh, style(**options))


def entered_together(module: nn.Module) -> nn.Module:
    """The same, whose ranks wait for each other as they enter it. A module that is entered while another thread
    compiles runs no hooks after an error, because ``torch.compiler.is_compiling()`` is the process'."""
    module.register_forward_pre_hook(torch.compiler.disable(lambda *_: dist.barrier()), prepend=True)
    return module


class Block(nn.Module):
    """Something to compile around an attention."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query, key, value):
        return self.attend(query.exp().log(), key * 1.0, value * 1.0) * 1.0


def compiled(attend: Callable[..., torch.Tensor], backend: Any = "aot_eager", **options: Any):
    return torch.compile(Block(attend), backend=backend, fullgraph=True, **options)


class Traces:
    """A backend that keeps the graphs, forward and backward, of what it compiles."""

    def __init__(self) -> None:
        self.forwards: list[torch.fx.GraphModule] = []
        self.backwards: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=self._keep_in(self.forwards),
            bw_compiler=self._keep_in(self.backwards),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _keep_in(graphs: list[torch.fx.GraphModule]):
        def compiler(graph, example_inputs):
            graphs.append(graph)
            return graph

        return compiler

    def ops(self, graphs: list[torch.fx.GraphModule]) -> list[str]:
        """The ops of this package, in order."""
        nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        return [str(node.target) for node in nodes if str(node.target).startswith("cp_styles.")]
