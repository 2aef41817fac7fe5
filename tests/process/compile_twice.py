"""One rank of one process of test_compile_cache.py: attention by inductor, and whether a cache on disk had it."""

import json
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import Causal, context_attention, contiguous, head_tail
from tests.ranks.attention_case import Problem, run_attention

LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail}


def main(rank: int, ranks: int, store: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh, said = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), []
    for name in names:
        layout = LAYOUTS[name]

        @torch.compile(fullgraph=True)
        def attend(query, key, value, layout=layout):
            return context_attention(query, key, value, mesh, mask=MASK, layout=layout)

        counters.clear()
        errors = run_attention(attend, Problem(length=16, kv_heads=2), rank, ranks, layout=layout)
        found = counters["aot_autograd"]
        said.append([max(errors), found["autograd_cache_hit"], found["autograd_cache_miss"]])
        torch.compiler.reset()
    print(json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()


MASK = Causal()

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
