"""Selective activation checkpointing: a recomputation does not communicate, and gradients are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from cp_styles import flex_attention
from cp_styles.comm.agreement import WIDTH
from cp_styles.engine.checkpoint import save_attention
from cp_styles.engine.scope import SequenceScope
from cp_styles.layouts import head_tail
from cp_styles.masks import Documents
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import CommunicationTrace, MemoryTrace, run_ranks
from tests.covering import sampled
from tests.doors import door
from tests.oracle import allowed, document_of, randn
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, on_every_rank, run_attention
from tests.ranks.flex_case import FlexProblem, causal, relative_bias

RANKS = 3
DOORS = ["style", "module", "function"]
OTHER_CALLS = ["flex", "score_mod", "varlen"]
PROBLEM = Problem(length=13, kv_heads=2)


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    """``x``, by two ops that save their results: a recomputation has to come by here."""
    return x.exp().log()


class Layer(nn.Module):
    """An attention with something to recompute before and after it."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.runs = 0

    def forward(self, query, key, value):
        self.runs += 1
        return there_and_back(self.attend(*map(there_and_back, (query, key, value))))


def layer(name: str, mesh: DeviceMesh, **options: Any) -> Layer:
    return Layer(door(name, mesh, **options))


def events_of(attend: Callable[..., torch.Tensor], rank: int, problem: Problem = PROBLEM) -> list[tuple[str, int]]:
    """What this rank sends for a forward and backward, which are one device's."""
    with CommunicationTrace() as trace:
        assert max(run_attention(attend, problem, rank, RANKS)) < EXACT
    return trace.events


def checkpointed(layer: nn.Module, context_fn: Callable[[], Any] | None = None) -> Callable[..., torch.Tensor]:
    options = {} if context_fn is None else {"context_fn": context_fn}
    return lambda *qkv: checkpoint(layer, *qkv, use_reentrant=False, **options)


@sampled(1, name=[*DOORS, *OTHER_CALLS], strategy=[Ring(), Ring(keep=0), AllGather(), Ulysses()])
@on_every_rank(RANKS)
def test_a_recomputation_that_communicates_nothing(mesh, rank: int, name: str, strategy):
    """Exactly the events of no checkpoint where nothing is kept; a plain one agrees and sends the keys once more."""
    own, lean = (layer(name, mesh, strategy=chosen) for chosen in (strategy, strategy.without_kept_keys()))
    events_of(own, rank)  # from here on every rank knows the global length by its own
    for _ in range(2):  # the second time everything that is remembered is there
        without = events_of(lean, rank)
        runs = own.runs
        assert events_of(checkpointed(own, save_attention()), rank) == without
        assert own.runs == runs + 2  # it was recomputed
    again = Counter(events_of(checkpointed(own), rank)) - Counter(events_of(own, rank))
    calls = {"varlen": PROBLEM.inputs[0].shape[0]}.get(name, 1)
    assert again["all_gather", WIDTH * 8 * (RANKS - 1)] == calls
    assert sum(again.values()) > 1


@sampled(
    1,
    name=[*DOORS, *OTHER_CALLS],
    strategy=[Ring(keep=2), AllGather(keep=2), Ulysses(inner=Ring(keep=2), size=1)],
)
@on_every_rank(RANKS)
def test_no_received_keys_outlive_the_layer(mesh, rank: int, name: str, strategy):
    """As many bytes stay after the forward as with a strategy that keeps nothing, whatever this one is told to keep."""
    leaves, cotangent = PROBLEM.shard(head_tail, rank, RANKS)
    live = []
    for chosen, context_fn in (
        (strategy, save_attention()),
        (strategy.without_kept_keys(), save_attention()),
        (strategy, None),
    ):
        attend = layer(name, mesh, strategy=chosen)
        attend = attend if context_fn is None else checkpointed(attend, context_fn)
        attend(*leaves).backward(cotangent)  # what is made once is there
        with MemoryTrace() as trace:
            out = attend(*leaves)
            live.append(trace.live)
        out.backward(cotangent)
    assert live[0] == live[1] < live[2]


@pytest.mark.parametrize("name", DOORS)
@on_every_rank(RANKS)
def test_beside_a_policy_of_ones_own(mesh, rank: int, name: str):
    """It is asked about everything but the attention."""
    asked: Counter[Any] = Counter()

    def own_policy(context, op, *args, **kwargs):
        asked[op] += 1
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.exp.default else CheckpointPolicy.MUST_RECOMPUTE

    own = layer(name, mesh)
    assert max(run_attention(checkpointed(own, save_attention(own_policy)), PROBLEM, rank, RANKS)) < EXACT
    assert asked[torch.ops.aten.exp.default]
    assert not any("attention" in str(op) or "gather" in str(op) for op in asked)


@pytest.mark.parametrize("name", ["style", "module"])
@pytest.mark.parametrize("open_later", [False, True])
@on_every_rank(RANKS)
def test_under_a_scope(mesh, rank: int, name: str, open_later: bool):
    """The batch's scope has ended, or another one is open, when the backward comes."""
    lengths = (5, 8)
    document = document_of(lengths)
    problem = Problem(length=13, kv_heads=2, mask=allowed(lambda p, j: document(p) == document(j) and j <= p, 13, 13))
    own = layer(name, mesh, strategy=Ring(keep=0))

    def attend(*qkv, context_fn=None):
        with SequenceScope(head_tail(13, RANKS), mask=Documents(lengths)) as scope:
            fn = None if context_fn is None else partial(scope.for_checkpoint, context_fn)
            return own(*qkv) if fn is None else checkpointed(own, fn)(*qkv)

    without = events_of(attend, rank, problem)
    with CommunicationTrace() as trace:
        leaves, cotangent = problem.shard(head_tail, rank, RANKS)
        out = attend(*leaves, context_fn=save_attention())
        with SequenceScope(head_tail(13, RANKS)) if open_later else nullcontext():
            out.backward(cotangent)
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    assert max(problem.errors(found, head_tail, rank, RANKS)) < EXACT
    assert trace.events == without


class FlexLayer(nn.Module):
    """flex_attention with a score_mod that learns, as models call it."""

    def __init__(self, problem: FlexProblem) -> None:
        super().__init__()
        self.block_mask = problem.block_mask
        self.table = nn.Parameter(problem.learned[0].clone())

    def forward(self, query, key, value):
        def bias(score, b, h, q_idx, kv_idx):
            return relative_bias((self.table,), score, b, h, q_idx, kv_idx)

        query, key, value = map(there_and_back, (query, key, value))
        aux = AuxRequest(lse=True)
        options = {"block_mask": self.block_mask, "enable_gqa": True, "return_aux": aux}
        out, aux = flex_attention(query, key, value, bias, **options)
        return there_and_back(out), aux.lse


def test_flex_attention_in_a_module():
    """What it learns, and the logsumexp, which is differentiated too."""
    problem = FlexProblem(mask_mod=causal, score_mod=relative_bias, learned=(randn(5, 4, 61) / 4,), length=30)
    layout = head_tail(30, RANKS)

    def on(rank: int):
        model = parallelize_module(FlexLayer(problem), cp_mesh(RANKS), ModuleContextParallel(strategy=Ring(keep=0)))

        def attend(query, key, value, context_fn=None):
            options = {} if context_fn is None else {"context_fn": context_fn}
            return checkpoint(model, query, key, value, use_reentrant=False, **options)

        found = []
        for act in (model, partial(attend, context_fn=save_attention()), attend):
            model.table.grad = None
            leaves = [layout.shard(x, 2, rank).clone().requires_grad_() for x in problem.inputs]
            with CommunicationTrace() as trace:
                out, lse = act(*leaves)
                cotangents = [layout.shard(x, 2, rank) for x in problem.cotangents]
                torch.autograd.backward([out, lse], cotangents)
            grads = [x.grad for x in (*leaves, model.table)]
            found.append(([out.detach(), lse.detach(), *grads], trace.events))
        return found

    ranks = run_ranks(on, RANKS)
    for index in range(3):
        assert max(problem.errors([found[index][0] for found in ranks], layout)) < EXACT
    for plain, selective, full in ranks:
        assert plain[1] == selective[1]
        assert len(full[1]) > len(plain[1])
