"""All masks and layouts, through both doors; and inputs and outputs as real models have them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cp_styles.functions.attention import context_attention
from cp_styles.kernels import CPU_FLASH, ReferenceKernel
from cp_styles.layout import SequenceLayout, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.mask import Causal, Dense, Documents
from cp_styles.strategies import AllGather, Ring
from cp_styles.testing import run_ranks
from tests.covering import sampled
from tests.oracle import (
    allowed,
    attend_and_differentiate,
    attention_inputs,
    error,
    expected_attention,
    mask_cases,
    randn,
)
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, parallel, run_attention

LENGTH = 21


def uneven(length: int, ranks: int) -> SequenceLayout:
    """Chunks of many lengths; the last rank is empty (but for a single one)."""
    ends = [0, 1, length // 3, length // 3 + 2, length]
    holders = max(ranks - 1, 1)
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for index in range(4):
        chunks[index % holders].append((ends[index], ends[index + 1]))
    return SequenceLayout.from_chunks(chunks)


BALANCERS = {
    "contiguous": contiguous,
    "head_tail": head_tail,
    "striped": striped,
    "blocks": partial(striped, block=2),
    "documents": partial(per_document_head_tail, documents=(1, 9, 11)),
    "uneven": uneven,
}


@sampled(1, balancing=list(BALANCERS), ranks=[3, 2])
def test_every_mask(balancing: str, ranks: int):
    """Windows and chunks are not trained as full causal (accelerate#4177), documents stay apart (trl#6843)."""
    cases, balancer = mask_cases(LENGTH), BALANCERS[balancing]
    problems = {
        name: Problem(length=LENGTH, kv_heads=2, mask=allowed(case.sees, LENGTH, LENGTH))
        for name, case in cases.items()
    }

    def on(rank: int):
        mesh = cp_mesh(ranks)
        worst = {}
        for index, (name, case) in enumerate(cases.items()):
            strategy = (Ring(), AllGather(keep=0))[index % 2]
            kernel = (None, ReferenceKernel())[index // 2 % 2]
            options = {"strategy": strategy, "layout": balancer, "kernel": kernel, "mask": case.mask}
            run = partial(run_attention, problem=problems[name], rank=rank, ranks=ranks, layout=balancer)
            worst[name, "function"] = max(run(partial(context_attention, group=mesh, **options)))
            worst[name, "style"] = max(run(parallel(Core(causal=False), mesh, **options)))
            # The call's is_causal is one more mask.
            if name == "causal documents":
                options["mask"] = cases["documents"].mask
                worst[name, "is_causal"] = max(run(parallel(Core(causal=True), mesh, **options)))
        return {where: size for where, size in worst.items() if not size <= EXACT}

    assert run_ranks(on, ranks) == [{}] * ranks


@pytest.mark.parametrize("shape", [(2, 4, LENGTH, LENGTH), (4, LENGTH, LENGTH), (1, LENGTH), (LENGTH, 1)])
def test_dense_masks(shape: tuple[int, ...]):
    """Additive and boolean, with rows that see nothing; alone and with Causal()."""
    bias = randn(7, *shape).masked_fill(randn(8, *shape) > 1.0, float("-inf"))
    if shape[-1] == LENGTH and shape[-2] == LENGTH:
        bias[..., 5, :] = float("-inf")
    inputs, cotangent = attention_inputs(length=LENGTH, kv_heads=2)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    problems = []
    for mask, options in (
        (Dense(bias), {"bias": bias}),
        (Dense(bias > 0), {"mask": (bias > 0).expand(*shape[:-2], LENGTH, LENGTH)}),
        (Dense(bias) & Causal(), {"bias": bias, "mask": causal}),
    ):
        problem = Problem(length=LENGTH, kv_heads=2)
        problem.expected = expected_attention(inputs, cotangent, **options)
        problems.append((mask, problem))

    def on(rank: int):
        group = cp_mesh(3)
        return max(
            max(run_attention(partial(context_attention, group=group, mask=mask), problem, rank, 3))
            for mask, problem in problems
        )

    assert max(run_ranks(on, 3)) < EXACT


@pytest.mark.parametrize(("queries", "keys"), [(9, 14), (14, 9), (5, 1), (1, 7)])
def test_cross_attention(queries: int, keys: int):
    problem = Problem(length=queries, kv_length=keys, kv_heads=2, causal=False)

    def on(rank: int):
        mesh = cp_mesh(3)
        return max(
            *run_attention(
                partial(context_attention, group=mesh, layout=contiguous), problem, rank, 3, layout=contiguous
            ),
            *run_attention(parallel(Core(causal=False), mesh, strategy=AllGather()), problem, rank, 3),
        )

    assert max(run_ranks(on, 3)) < EXACT


@pytest.mark.parametrize("length", range(1, 8))
def test_short_sequences(length: int):
    """pytorch#159706: down to one token, on more ranks than there are tokens; TransformerEngine#3331: no padding."""
    problem = Problem(length=length, kv_heads=1)

    def on(rank: int):
        mesh = cp_mesh(4)
        style = parallel(Core(), mesh, strategy=Ring())
        function = partial(context_attention, group=mesh, mask=Causal(), layout=striped, strategy=AllGather())
        return max(*run_attention(style, problem, rank, 4), *run_attention(function, problem, rank, 4, layout=striped))

    assert max(run_ranks(on, 4)) < EXACT


def test_one_key_more_than_a_block_and_documents_of_one_token():
    """Lengths around the plan's blocks of 128 queries, where covers change."""
    lengths = (1, 130, 1, 1, 129, 31, 33)
    length = sum(lengths)
    mask = Documents(lengths) & Causal()
    positions = torch.arange(length)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    dense = (ids[:, None] == ids[None, :]) & (positions[:, None] >= positions[None, :])
    problem = Problem(length=length, mask=dense, batch=1)

    def on(rank: int):
        mesh = cp_mesh(3)
        found = []
        for balancer in (contiguous, head_tail, partial(per_document_head_tail, documents=lengths)):
            attend = partial(context_attention, group=mesh, mask=mask, layout=balancer)
            found += run_attention(attend, problem, rank, 3, layout=balancer)
        return max(found)

    assert max(run_ranks(on, 3)) < EXACT


def test_full_attention_under_the_balanced_layout():
    """pytorch#141429: is_causal=False crashed under the default load balancing."""
    problem = Problem(length=16, causal=False)
    worst = run_ranks(lambda rank: max(run_attention(parallel(Core(causal=False), cp_mesh(2)), problem, rank, 2)), 2)
    assert max(worst) < EXACT


def test_float32_runs_on_a_fused_kernel():
    """torchtitan#3340, pytorch#147793: float32 fell to the MATH backend, and context parallelism failed there."""
    problem = Problem(length=16, dtype=torch.float32)
    worst = run_ranks(lambda rank: max(run_attention(parallel(Core(), cp_mesh(2)), problem, rank, 2)), 2)
    assert max(worst) < 1e-6  # float32's rounding is 6e-8 an operation


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


def test_a_kernel_that_returns_low_precision_is_merged_in_float32():
    """As CUDA's kernels: every tile is rounded once. Merged in bfloat16, 16 tiles would round another 16 times."""
    kernel = replace(CPU_FLASH, wide_tiles=False)
    inputs, cotangent = attention_inputs(length=256, batch=1, dtype=torch.bfloat16)
    expected = expected_attention(inputs, cotangent)
    one = attend_and_differentiate(Core(causal=False), inputs, cotangent)
    layout = head_tail(256, 16)

    def on(rank: int):
        attend = partial(context_attention, group=cp_mesh(16), kernel=kernel)
        return attend_and_differentiate(
            attend, [layout.shard(x, 2, rank) for x in inputs], layout.shard(cotangent, 2, rank)
        )

    for parts, alone, exact in zip(zip(*run_ranks(on, 16), strict=True), one, expected, strict=True):
        # One more rounding as large as the first: sqrt(2), and a little for chance. Measured: 0.93 to 1.27.
        assert error(layout.unshard(parts, 2), exact) < 1.5 * error(alone, exact)


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
