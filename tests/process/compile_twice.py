"""One rank of one process of test_compile_cache.py: attention by inductor, and whether a cache on disk had it.

Each job is ``what/layout``: a door, or the trap.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_styles import Causal, Ring, contiguous, head_tail
from cp_styles.engine.op import config_text
from tests.ranks.attention_case import Problem, run_attention
from tests.ranks.compiling import Block, door

LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail}
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


def main(rank: int, ranks: int, store: str, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh, said = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), {}
    problems = [Problem(length=length, kv_heads=2) for length in LENGTHS]
    for job in jobs:
        what, name = job.split("/")
        layout = LAYOUTS[name]
        block = Block(hide(mesh, layout) if what == "trap" else door(what, mesh, layout=layout))
        counters.clear()
        # The first length is a graph with static shapes, and the second then one with dynamic ones.
        several = problems if what == "function" else problems[:1]
        attend = torch.compile(block, fullgraph=True)
        errors = [max(run_attention(attend, problem, rank, ranks, layout=layout)) for problem in several]
        found = counters["aot_autograd"]
        said[job] = [max(errors), found["autograd_cache_hit"], found["autograd_cache_miss"]]
        torch.compiler.reset()
    print(json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
