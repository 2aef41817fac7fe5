"""Compiled flex_attention with a score_mod, on a stand-in of torch's kernel for CUDA: see tests/flex_op.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import AuxRequest

from cp_styles.comm.point_to_point import TransferError
from cp_styles.engine.binding import Binding
from cp_styles.functions.flex import FlexCall, flex_attend
from cp_styles.kernels import CompiledFlexKernel
from cp_styles.kernels.base import TilePositions
from cp_styles.layouts import SequenceLayout, contiguous, head_tail, striped
from cp_styles.masks import Full
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses
from cp_styles.testing import RankError, run_ranks
from tests.covering import sampled
from tests.flex_op import compiled_flex_on_cpu
from tests.gpu_tensors import gpus, put, read
from tests.oracle import error, randn
from tests.ranks import flex_case as case
from tests.ranks.attention_case import EXACT
from tests.ranks.flex_case import FlexProblem

LENGTH = 61
DIM = 16


TABLES = (randn(20, 4, 2 * LENGTH), randn(22, 4) * 0.1)
MASKS: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "causal": case.causal,
    "window": case.sinks_and_window,
    "documents": case.both(case.of_documents((20, 1, 9, 31)), case.causal),
}
SCORES = {"own mask": (case.own_mask, ()), "biased": (case.biased_softcap, TABLES)}
STRATEGIES = [(Ring(), 3), (Ring(keep=0), 2), (AllGather(), 2), (Ulysses(), 2), (Ulysses(size=2), 4)]
LAYOUTS = {"head_tail": head_tail, "contiguous": contiguous, "striped": striped}


def attend_on(layout: SequenceLayout, strategy: Strategy) -> Callable[..., tuple]:
    """What a compiled call inside a context-parallel module comes to."""

    def attend(*tensors: torch.Tensor, **options) -> tuple:
        binding = Binding("flex", "cp", dist.group.WORLD, strategy, layout, Full())
        call = FlexCall(**options, return_lse=True, compiled=True)
        return call.result(*flex_attend(binding, tensors, call))  # pyright: ignore

    return attend


@cache
def problem_of(mask: str, score: str) -> FlexProblem:
    return FlexProblem(MASKS[mask], *SCORES[score], length=LENGTH, dim=DIM)


@sampled(2, make=list(LAYOUTS), way=STRATEGIES, score=list(SCORES), mask=list(MASKS))
def test_the_grid(make: str, way: tuple[Strategy, int], score: str, mask: str):
    """Out, logsumexp, and the gradients of both, also into what score_mod learns."""
    strategy, ranks = way
    problem, layout = problem_of(mask, score), LAYOUTS[make](LENGTH, ranks)
    with compiled_flex_on_cpu() as calls:
        found = run_ranks(lambda rank: problem.run(attend_on(layout, strategy), layout, rank), ranks)
    assert max(problem.errors(found, layout)) < EXACT
    assert calls["backward"] >= ranks


@sampled(1, dtype=[torch.bfloat16, torch.float16], ranks=[2, 8])
def test_low_precision(ranks: int, dtype: torch.dtype):
    """Beside the rounding of each tile, there is that of a tile's gradient: it is scaled by the tile's share of the
    probabilities. Of independent tiles each has the norm of one rounding of the result (``last``), as in
    test_tiles_that_come_back_in_low_precision."""
    problem, layout = FlexProblem(case.causal, case.own_mask, length=256, dim=64, dtype=dtype), head_tail(256, ranks)

    def errors(layout: SequenceLayout) -> list[float]:
        on = attend_on(layout, Ring())
        return problem.errors(run_ranks(lambda rank: problem.run(on, layout, rank), layout.ranks), layout)

    with compiled_flex_on_cpu():
        alone, ours = errors(head_tail(256, 1)), errors(layout)
    for place, roundings in ((0, 1), (2, 2), (3, 2), (4, 2)):
        last = error(problem.expected[place].to(dtype), problem.expected[place])
        assert ours[place] ** 2 <= alone[place] ** 2 + 1.25 * roundings * last**2, (place, ours, alone)


@sampled(1, way=[(Ring(), 3), (AllGather(), 2), (Ulysses(size=2), 4)], dim=[16, 8])
def test_no_tile_waits_for_the_device(way: tuple[Strategy, int], dim: int):
    """Tables are compared once, where they are new. Compiled, and in plain ops where the head dim is too small."""
    strategy, ranks = way
    dtype, layout = torch.float32, head_tail(LENGTH, ranks)
    tables = [x.to(dtype) for x in TABLES]
    problem = FlexProblem(None, case.biased_softcap, tuple(tables), length=LENGTH, dim=dim, dtype=dtype)
    cotangents = problem.cotangents[0], problem.cotangents[1].to(dtype)

    def on(rank: int) -> list[torch.Tensor]:
        learned = [put(x.requires_grad_()) for x in tables]
        grads = [put(layout.shard(x, 2, rank)) for x in cotangents]
        found: list[torch.Tensor] = []

        def score_mod(score, b, h, q, kv):
            return case.biased_softcap(learned, score, b, h, q, kv)

        for _ in range(2):
            leaves = [put(layout.shard(x, 2, rank).requires_grad_()) for x in problem.inputs]
            out, lse = attend_on(layout, strategy)(*leaves, score_mod=score_mod, enable_gqa=True)
            shares = torch.autograd.grad((out, lse), [*leaves, *learned], grads)
            found = [read(out), read(lse), *map(read, shares)]
        return found

    with compiled_flex_on_cpu() as calls, gpus(waits=["cp_styles._lib.checksum.checksum"]) as gpu:
        # Float32: some hundred roundings of 6e-8 in a sum.
        assert max(problem.errors(run_ranks(on, ranks), layout)) < 1e-5
    assert bool(calls) == (dim == 16)
    assert gpu.waits == 2 * ranks


def test_head_dims_below_16_are_computed_in_plain_ops():
    problem, layout = FlexProblem(case.causal, case.biased_softcap, TABLES, length=LENGTH, dim=15), head_tail(LENGTH, 2)
    with compiled_flex_on_cpu() as calls:
        found = run_ranks(lambda rank: problem.run(attend_on(layout, Ring()), layout, rank), 2)
    assert max(problem.errors(found, layout)) < EXACT
    assert not calls


def indexed_twice(learned, score, b, h, q, kv):
    return score + learned[0][h, q] + learned[0][h, kv]


def test_what_torch_refuses_is_refused_on_every_rank():
    """A table that learns and is indexed twice, of which torch's kernel has no gradient."""
    problem = FlexProblem(None, indexed_twice, (randn(20, 4, LENGTH),), length=LENGTH, dim=DIM)
    layout = head_tail(LENGTH, 3)
    with compiled_flex_on_cpu(), pytest.raises(RankError) as refused:
        run_ranks(lambda rank: problem.run(attend_on(layout, Ring()), layout, rank), 3)
    errors, refusal = refused.value.errors.values(), "Using multiple indexing operations"
    # A slow rank may get the end of its connections before it calls the kernel.
    assert all(refusal in str(error) or isinstance(error, TransferError) for error in errors)
    assert len(errors) == 3
    assert any(refusal in str(error) for error in errors)


def test_the_stand_in_reads_a_tile_in_its_place():
    """Positions and heads: a mistake in them is none of rounding."""
    q, k, v = randn(0, 2, 4, 16, DIM), randn(1, 2, 2, 16, DIM), randn(2, 2, 2, 16, DIM)
    where = TilePositions(torch.arange(40, 71, 2), torch.arange(5, 21), 2)
    slopes = torch.tensor([0.5, -0.25, 0.125, 1.0, 2.0, 0.1], dtype=torch.float64)
    kernel = CompiledFlexKernel(lambda score, b, h, q, kv: score - slopes[h] * (q - kv).abs())
    with compiled_flex_on_cpu():
        out, lse = kernel.forward(q, k, v, causal=True, bias=None, scale=0.3, where=where)
    distances = (where.q_L[:, None] - where.kv_M).abs()
    logits = q @ k.repeat_interleave(2, 1).mT * 0.3 - slopes[2:, None, None] * distances
    logits = logits.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
    assert error(out, torch.softmax(logits, -1) @ v.repeat_interleave(2, 1)) < EXACT
    assert error(lse, torch.logsumexp(logits, -1)) < EXACT


def test_the_largest_scores_of_a_compiled_call():
    """They equal the scores of a call that is not compiled: plain operations compute both."""
    whole, layout = FlexProblem(case.causal, case.biased_softcap, TABLES, length=LENGTH, dim=DIM), head_tail(LENGTH, 2)

    def on(rank: int, compiled: bool) -> torch.Tensor:
        found = []

        def attend(*tensors: torch.Tensor, **options) -> tuple:
            binding = Binding("flex", "cp", dist.group.WORLD, Ring(), layout, Full())
            call = FlexCall(**options, return_aux=AuxRequest(lse=True, max_scores=True), compiled=compiled)
            out, aux = call.result(*flex_attend(binding, tensors, call))  # pyright: ignore
            found.append(aux.max_scores)
            return out, aux.lse

        whole.run(attend, layout, rank)
        return found[0]

    with compiled_flex_on_cpu() as calls:
        by_kernel = run_ranks(lambda rank: on(rank, True), 2)
        assert calls["forward"]
    assert all(map(torch.equal, by_kernel, run_ranks(lambda rank: on(rank, False), 2)))
