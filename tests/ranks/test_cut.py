"""Cut with one layout, attended with another: equal lengths hide it, the tensor's own memory of its cut does not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import AttentionContextParallel, context_attention, contiguous, head_tail
from cp_styles.testing import run_ranks

RANKS, LENGTH = 3, 12


class Core(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def functional(rank, tensors, layout):
    return context_attention(*tensors, dist.group.WORLD, layout=layout)


def styled(rank, tensors, layout):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    return parallelize_module(Core(), mesh, AttentionContextParallel(layout=layout))(*tensors)


@pytest.mark.parametrize("door", [functional, styled])
@pytest.mark.parametrize("odd", [None, 1])  # all ranks cut wrongly, or one alone
def test_another_cut_is_refused_on_every_rank(door, odd):
    whole = inputs()

    def body(rank):
        layout = contiguous if odd in (None, rank) else head_tail
        return door(rank, [layout(LENGTH, RANKS).shard(x, 2, rank) for x in whole], head_tail)

    errors = run_ranks(body, RANKS, return_errors=True)
    assert all(isinstance(error, ValueError) for error in errors)
    spoken = errors if odd is None else [errors[odd]]
    assert all("was cut with another layout than the attention uses (head_tail)" in str(error) for error in spoken)


@pytest.mark.parametrize("door", [functional, styled])
def test_the_same_cut_passes(door):
    whole = inputs()
    outs = run_ranks(lambda rank: door(rank, [head_tail(LENGTH, RANKS).shard(x, 2, rank) for x in whole], head_tail), 3)
    assert head_tail(LENGTH, RANKS).unshard(outs, 2).shape == whole[0].shape
