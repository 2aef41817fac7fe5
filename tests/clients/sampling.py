"""Two processes sample tokens: with one seed those of one process; with different seeds an error on both."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import ModuleContextParallel, parallelize_module
from cp_styles.integrations.transformers import prefill
from tests.clients.hugging_face import NAME, StayDouble, tokens_of
from tests.clients.test_generate import greedy, model_of

generate = greedy(12, do_sample=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank, model, tokens = dist.get_rank(), model_of("llama"), tokens_of()
    one, mine = copy.deepcopy(model), copy.deepcopy(model)
    one.set_attn_implementation("dense")
    torch.manual_seed(3)
    with StayDouble():
        wanted = generate(one, tokens, None)
    mine.set_attn_implementation(NAME)
    parallelize_module(mine, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), ModuleContextParallel())
    with StayDouble():
        cache = prefill(mine, tokens)
        torch.manual_seed(3)
        assert torch.equal(generate(mine, tokens, cache), wanted)
        cache = prefill(mine, tokens)
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match="decode different tokens"):
            generate(mine, tokens, cache)
    print(f"rank {rank} sampled as one process, and noticed another seed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
