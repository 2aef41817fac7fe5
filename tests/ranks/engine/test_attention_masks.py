"""What the parity grid does not have: outputs that stay DTensors, and reshapes inside the module."""

from __future__ import annotations

import pytest
import torch

from cp_styles.layout import contiguous, head_tail
from tests.oracle import error, expected_attention
from tests.ranks.attention_case import Core, Problem, on_every_rank, parallel, run_attention


@pytest.mark.parametrize("balancer", [contiguous, head_tail])
@on_every_rank(3)
def test_outputs_that_stay_dtensors(mesh, rank: int, balancer):
    """use_local_output=False: DTensors with the whole shape, whatever reduction's gradient comes back to them."""
    problem = Problem(length=12)
    weights = problem.cotangent[:, :, :1].clone()  # the same for all positions, so that a sum over them can weigh
    ones = weights.expand_as(problem.cotangent)
    expected = expected_attention(problem.inputs, ones, torch.ones(12, 12, dtype=torch.bool).tril())
    core = parallel(Core(), mesh, layout=balancer, use_local_output=False)
    layout = balancer(12, 3)
    worst = []
    for reduce in (
        lambda out: (out.full_tensor() * weights).sum(),  # the same loss on every rank: counted once by DTensor
        lambda out: (out.sum(2, keepdim=True).full_tensor() * weights).sum(),
        lambda out: (out.to_local() * weights).sum(),
    ):
        leaves, _ = problem.shard(balancer, rank, 3)
        out = core(*leaves)
        assert out.shape == problem.inputs[0].shape
        assert out.device_mesh == mesh
        found = [out.to_local(), *torch.autograd.grad(reduce(out), leaves)]
        worst += [error(mine, layout.shard(whole, 2, rank)) for mine, whole in zip(found, expected, strict=True)]
    return max(worst)


@on_every_rank(3)
def test_uneven_dtensors_are_not_handed_out(mesh, rank: int):
    """DTensor takes every dim for cut as torch.chunk cuts, so full_tensor() of these would be wrong."""
    problem = Problem(length=13)
    core = parallel(Core(), mesh, use_local_output=False)
    with pytest.raises(ValueError, match=r"has \[5, 5, 3\] on its ranks, but the layout gives \[5, 4, 4\]"):
        core(*problem.shard(head_tail, rank, 3)[0])


@pytest.mark.parametrize("length", [12, 13])
@on_every_rank(3)
def test_reshapes_inside_the_module(mesh, rank: int, length: int):
    """Heads joined, views, expanded sizes: what attention modules do with their output, by DTensor's own rules."""
    problem = Problem(length=length)

    class Joined(Core):
        def forward(self, query, key, value):
            out = super().forward(query, key, value).transpose(1, 2).contiguous()
            return out.view(out.shape[0], out.shape[1], -1).unsqueeze(0).expand(1, -1, -1, -1)[0]

    core = parallel(Joined(), mesh)
    return max(run_attention(lambda *qkv: core(*qkv).unflatten(2, (4, 8)).transpose(1, 2), problem, rank, 3))
