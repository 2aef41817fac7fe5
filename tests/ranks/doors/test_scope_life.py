"""Bound meshes are few, and are reused only when no scope and no graph needs them any more."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import AttentionContextParallel, Documents, SequenceScope, head_tail
from cp_styles.testing import run_ranks
from tests.oracle import error
from tests.ranks.attention_case import EXACT

RANKS, LENGTH = 2, 24
LAYOUT = head_tail(LENGTH, RANKS)


class Core(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Scaled(Core):
    """Only a parameter wants a gradient, so no input's node is there to hold anything."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, q, k, v):
        return super().forward(q * self.temperature, k, v)


def draw(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1, 2, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(4)]


def dense(first: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    position = torch.arange(LENGTH)
    same = (position[:, None] < first) == (position[None, :] < first)
    allowed = same & (position[:, None] >= position[None, :])
    logits = (q @ k.mT / 2).masked_fill(~allowed, float("-inf"))
    return logits.softmax(-1) @ v


def meshes() -> int:
    gc.collect()
    # By type and not isinstance, which asks every object for its class: torch has some that load libraries for that.
    return sum(type(each) is DeviceMesh for each in gc.get_objects())


def styled(core: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    return parallelize_module(core, mesh, AttentionContextParallel())


def test_one_mesh_serves_batch_after_batch():
    def body(rank):
        core = styled(Core())
        shards = [LAYOUT.shard(x, 2, rank) for x in draw(0)]
        for first in range(1, LENGTH):
            q, k, v = (x.clone().requires_grad_() for x in shards[:3])
            with SequenceScope(LAYOUT, mask=Documents((first, LENGTH - first))):
                out = core(q, k, v)
            out.backward(shards[3])
        return core

    before = meshes()
    cores = run_ranks(body, RANKS)
    after = meshes()
    # A rank has the user's mesh and, while a batch's graph lives on as the next is computed, two bound ones.
    assert cores
    assert after - before <= 3 * RANKS


@pytest.mark.parametrize("core_type", [Core, Scaled])
@pytest.mark.parametrize("keep_leaves", [True, False])
def test_a_graph_keeps_its_binding_while_other_batches_come_and_go(core_type, keep_leaves):
    whole = draw(1)
    temperature = 1.5 if core_type is Scaled else 1.0
    reference = [x.clone().requires_grad_() for x in whole[:3]]
    factor = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    dense(5, reference[0] * factor, *reference[1:]).backward(whole[3])

    def body(rank):
        core = styled(core_type())
        shards = [LAYOUT.shard(x, 2, rank) for x in whole]
        wanted = core_type is Core
        inputs = [x.clone().requires_grad_(wanted) for x in shards[:3]]
        with SequenceScope(LAYOUT, mask=Documents((5, LENGTH - 5))):
            out = core(*inputs)
        for first in range(6, 12):  # the first batch's scope is gone; only its graph is left
            gc.collect()
            with SequenceScope(LAYOUT, mask=Documents((first, LENGTH - first))):
                core(*(x.clone().requires_grad_() for x in shards[:3])).backward(shards[3])
        for parameter in core.parameters():
            parameter.grad = None
        if not keep_leaves:
            core_parameters = list(core.parameters())
            del core
        out.backward(shards[3])
        parameters = list(core.parameters()) if keep_leaves else core_parameters
        return [x.grad for x in inputs], [p.grad for p in parameters]

    results = run_ranks(body, RANKS)
    if core_type is Scaled:
        # The ranks' shares add up; 1e-12 is a thousand float64 roundings of a sum of a few hundred terms.
        total = sum(parameters[0] for _, parameters in results)
        torch.testing.assert_close(total, factor.grad, rtol=1e-12, atol=1e-12)
    else:
        for index, expected in enumerate(x.grad for x in reference):
            found = LAYOUT.unshard([inputs[index] for inputs, _ in results], 2)
            assert error(found, expected) < EXACT
