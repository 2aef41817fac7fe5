"""The processes of test_compile_cache.py: attention by inductor, and whether a cache on disk had it.

    python -m tests.process.compile_twice FOLDER JOBS JOBS

Each job is ``what/layout``: a door, or the trap. For each list of jobs there are processes of their own, forks of one
that has compiled nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch._inductor.compile_fx  # which each process imports where it compiles
import torch.distributed as dist
from torch import multiprocessing
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_styles import Causal, Ring, contiguous, head_tail
from cp_styles.engine.op import config_text
from tests.process.several import leave
from tests.ranks.attention_case import Problem, run_attention
from tests.ranks.compiling import Block, door

LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail}
RANKS = 2
LENGTHS = (16, 13)  # equal parts on two ranks, and unequal ones

# -- the trap: an op that hides its configuration --

torch.library.define("cp_styles_tests::hidden", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")


@torch.library.impl("cp_styles_tests::hidden", "CompositeImplicitAutograd")
def _hidden(q, k, v):
    """Taken apart while it is traced, after torch has made the key of the graph in which it stands."""
    arguments = (None, None, None, hidden_config, False, None, True, "")
    return torch.ops.cp_styles.attention(q, k, v, *arguments)


hidden_config = ""


def hide(mesh: DeviceMesh, layout):
    global hidden_config
    hidden_config = config_text("trap", "cp", mesh.get_group().group_name, Ring(), layout, Causal(), None).config
    return lambda *qkv: torch.ops.cp_styles_tests.hidden(*qkv)[0]


def main(rank: int, folder: Path, jobs: str) -> NoReturn:
    torch.set_num_threads(1)
    place = dist.FileStore(str(folder / f"store of {jobs}".replace("/", " ")), RANKS)
    dist.init_process_group("gloo", store=place, rank=rank, world_size=RANKS)
    mesh, said = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)), {}
    problems = [Problem(length=length, kv_heads=2) for length in LENGTHS]
    for job in jobs.split():
        what, name = job.split("/")
        layout = LAYOUTS[name]
        block = Block(hide(mesh, layout) if what == "trap" else door(what, mesh, layout=layout))
        counters.clear()
        # The first length is a graph with static shapes, and the second then one with dynamic ones.
        several = problems if what == "function" else problems[:1]
        attend = torch.compile(block, fullgraph=True)
        errors = [max(run_attention(attend, problem, rank, RANKS, layout=layout)) for problem in several]
        found = counters["aot_autograd"]
        said[job] = [max(errors), found["autograd_cache_hit"], found["autograd_cache_miss"]]
        torch.compiler.reset()
    said_by(folder, rank, jobs).write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
    leave()


def said_by(folder: Path, rank: int, jobs: str) -> Path:
    return folder / f"{rank} of {jobs}".replace("/", " ")


if __name__ == "__main__":
    for jobs in sys.argv[2:]:
        multiprocessing.start_processes(main, (Path(sys.argv[1]), jobs), nprocs=RANKS, start_method="fork")
