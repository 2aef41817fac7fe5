"""What the parity grid does not have: is_causal beside a mask, and inputs and outputs as real models have them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cp_styles.functions.attention import context_attention
from cp_styles.layout import contiguous, head_tail
from cp_styles.mask import Causal, Documents
from cp_styles.testing import run_ranks
from tests.oracle import (
    error,
    expected_attention,
)
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, parallel, run_attention


def test_is_causal_is_one_more_mask():
    documents = (5, 1, 10)
    seen = torch.block_diag(*(torch.ones(size, size) for size in documents)).bool().tril()
    problem = Problem(length=16, mask=seen)

    def on(rank: int):
        core = parallel(Core(causal=True), cp_mesh(2), mask=Documents(documents))
        return max(run_attention(core, problem, rank, 2))

    assert max(run_ranks(on, 2)) < EXACT


@pytest.mark.parametrize("balancer", [contiguous, head_tail])
def test_outputs_that_stay_dtensors(balancer):
    """use_local_output=False: DTensors with the whole shape, whatever reduction's gradient comes back to them."""
    problem = Problem(length=12)
    weights = problem.cotangent[:, :, :1].clone()  # the same for all positions, so that a sum over them can weigh
    ones = weights.expand_as(problem.cotangent)
    expected = expected_attention(problem.inputs, ones, torch.ones(12, 12, dtype=torch.bool).tril())

    def on(rank: int):
        mesh = cp_mesh(3)
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

    assert max(run_ranks(on, 3)) < EXACT


@pytest.mark.parametrize("door", ["style", "function"])
def test_gradients_of_every_shape_of_memory(door: str):
    """The expanded gradient of a sum, a transposed one, and inputs that are [B, S, H, D] in memory."""
    problem = Problem(length=12, kv_heads=2)
    ones = torch.ones_like(problem.cotangent)
    expected = expected_attention(problem.inputs, ones, torch.ones(12, 12, dtype=torch.bool).tril())

    def on(rank: int):
        mesh = cp_mesh(2)
        attend = parallel(Core(), mesh) if door == "style" else partial(context_attention, group=mesh, mask=Causal())
        layout = head_tail(12, 2)
        leaves, _ = problem.shard(layout, rank, 2)
        leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
        out = attend(*leaves)
        assert out.stride() == leaves[0].stride(), "as the native op: the stride order of the query"
        grads = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        transposed = torch.ones(2, out.shape[2], 4, 8, dtype=torch.float64).transpose(1, 2)
        again = torch.autograd.grad(out, leaves, transposed)
        wanted = [layout.shard(x, 2, rank) for x in (*expected, *expected[1:])]
        return max(error(*pair) for pair in zip((out, *grads, *again), wanted, strict=True))

    assert max(run_ranks(on, 2)) < EXACT


def test_uneven_dtensors_are_not_handed_out():
    """DTensor takes every dim for cut as torch.chunk cuts, so full_tensor() of these would be wrong."""
    problem = Problem(length=13)

    def on(rank: int):
        core = parallel(Core(), cp_mesh(3), use_local_output=False)
        with pytest.raises(ValueError, match=r"has \[5, 5, 3\] on its ranks, but the layout gives \[5, 4, 4\]"):
            core(*problem.shard(head_tail, rank, 3)[0])

    run_ranks(on, 3)


@pytest.mark.parametrize(
    "length",
    [
        12,
        13,
    ],
)
def test_reshapes_inside_the_module(length: int):
    """Heads joined, views, expanded sizes: what attention modules do with their output, by DTensor's own rules."""
    problem = Problem(length=length)

    class Joined(Core):
        def forward(self, query, key, value):
            out = super().forward(query, key, value).transpose(1, 2).contiguous()
            return out.view(out.shape[0], out.shape[1], -1).unsqueeze(0).expand(1, -1, -1, -1)[0]

    def on(rank: int):
        core = parallel(Joined(), cp_mesh(3))
        return max(run_attention(lambda *qkv: core(*qkv).unflatten(2, (4, 8)).transpose(1, 2), problem, rank, 3))

    assert max(run_ranks(on, 3, timeout_seconds=5.0)) < EXACT
