"""Two processes sample tokens: with one seed those of one process; with different seeds an error on both. And they
train on rollouts by the lines of the page: the same as one process does on its own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import ModuleContextParallel, parallelize_module
from cp_styles.integrations.transformers import prefill
from tests.clients.hugging_face import NAME, StayDouble, largest_error, tokens_of
from tests.clients.test_generate import greedy, model_of
from tests.clients.test_preferences import PROMPT, grpo_alone, models, on_a_rank, parameters_of
from tests.clients.test_transformers import EXACT
from tests.pages import example

generate = greedy(12, do_sample=True)


def train_on_rollouts() -> None:
    """GRPO: each rank makes the same completions, with the model as without its style."""
    (model,), prompts = models(1), tokens_of(PROMPT)
    names = {"model": model, "batches": [prompts] * 2, "seed": 0, "new_tokens": 15, "updates": 2}
    names["advantages_of"] = lambda x: x[:, -5:].double().mean(1) - 30
    one, rollouts = copy.deepcopy(model).eval(), []

    def rollout() -> torch.Tensor:
        torch.manual_seed(0)
        with StayDouble():
            rollouts.append(one.generate(prompts, do_sample=True, max_new_tokens=15))
        return rollouts[-1]

    losses = grpo_alone(one, rollout, names["advantages_of"], 2)
    found = on_a_rank(names, example("grpo"))
    assert torch.equal(found["tokens"], rollouts[-1])
    assert not torch.equal(*rollouts)  # the second was made by the model that the first one changed
    assert (
        largest_error((found["loss"].detach(), parameters_of(found["model"])), (losses[-1], parameters_of(one))) < EXACT
    )


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
    train_on_rollouts()
    print(f"rank {rank} sampled as one process, and noticed another seed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
