"""The programs of test_compile_cache.py: attention by inductor, and whether a cache on disk had it.

Each job is ``what/layout``: a door, or the trap.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_styles import Causal, Ring, contiguous, head_tail
from cp_styles.engine.config import AttentionConfig, config_in_graph
from tests.ranks.attention_case import Problem, run_attention
from tests.ranks.compiling import door

LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail}
RANKS = 2
LENGTHS = (16, 13)  # equal parts on two ranks, and unequal ones

# -- the trap: an op that hides its configuration --

torch.library.define("cp_styles_tests::hidden", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")


@torch.library.impl("cp_styles_tests::hidden", "CompositeImplicitAutograd")
def _hidden(q, k, v):
    """Taken apart while it is traced, after torch has made the key of the graph in which it stands."""
    arguments = (None, None, None, hidden_config, False, None, True, "")
    return torch.ops.cp_styles.attention(q, k, v, *arguments)[:3]


hidden_config: AttentionConfig | None = None


def hide(mesh: DeviceMesh, layout):
    global hidden_config
    hidden_config = config_in_graph("trap", "cp", mesh.get_group().group_name, Ring(), layout, Causal(), None).config
    return lambda *qkv: torch.ops.cp_styles_tests.hidden(*qkv)[0]


class Turned(nn.Module):
    """An attention and something to compile after it: the dim of each head is turned, and turned back.

    By matrix products, for which inductor generates no kernel: the C++ compiler would take seconds for each.
    """

    def __init__(self, attend, dim: int) -> None:
        super().__init__()
        self.attend = attend
        self.turn = torch.eye(dim, dtype=torch.float64).roll(1, 0)

    def forward(self, query, key, value):
        return self.attend(query, key, value) @ self.turn @ self.turn.T


def main(folder: Path, *, jobs: str, after: str = "") -> int:
    """Prints, by job, [error, hits, misses]. It begins when the processes of the jobs ``after`` have ended theirs."""
    torch.set_num_threads(1)
    ended = dist.FileStore(str(folder / "ended jobs"), 2 * RANKS)
    if after:
        ended.wait([f"{after} on {rank}" for rank in range(RANKS)], timedelta(seconds=300))
    dist.init_process_group("gloo")
    mesh, said = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)), {}
    rank, problems = dist.get_rank(), [Problem(length=length, kv_heads=2) for length in LENGTHS]
    # Of each rank its own: otherwise a rank that comes later finds what the other one has just compiled.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] += f"/{rank}"
    for job in jobs.split():
        what, name = job.split("/")
        layout = LAYOUTS[name]
        block = Turned(hide(mesh, layout) if what == "trap" else door(what, mesh, layout=layout), dim=8)
        counters.clear()
        # The first length is a graph with static shapes, and the second then one with dynamic ones.
        several = problems if job == "function/contiguous" else problems[:1]
        attend = torch.compile(block, fullgraph=True)
        errors = [max(run_attention(attend, problem, rank, RANKS, layout=layout)) for problem in several]
        found = counters["aot_autograd"]
        said[job] = [max(errors), found["autograd_cache_hit"], found["autograd_cache_miss"]]
        torch.compiler.reset()
    print(json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    ended.set(f"{jobs} on {rank}", "")
    return 0
