"""Cases that the grid does not have: heads by turns, large gradients, a loss of the logsumexp alone, other forwards,
outputs that stay DTensors."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from cp_styles.functions.attention import context_attention
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Causal, Dense, Full
from cp_styles.strategies import AllGather, Ring, Ulysses, moving_kv
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import attention_inputs, dense_attention, error, expected_attention, randn
from tests.ranks.attention_case import EXACT, Core, DenseCore, Problem, cp_mesh, on_every_rank, parallel, run_attention


@pytest.mark.parametrize(
    ("strategy", "rows"), [(Ring(), 9), (AllGather(), 27), (Ulysses(inner=Ring(), size=2), 6)], ids=str
)
def test_heads_that_attend_by_turns(strategy, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Without a backward: 3 of 5 key heads and then the others, or one of Ulysses' 2 and 3; biases and sinks by head.

    ``rows``: how many of one key head may arrive together.
    """
    (q, k, v), _ = attention_inputs(length=12, heads=10, kv_heads=5, dim=8)
    bias, sink_H = randn(1, 1, 10, 12, 12), randn(2, 10)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    expected = dense_attention(q, k, v, mask, bias=bias, sink_H=sink_H)
    monkeypatch.setattr(moving_kv, "_MAX_ARRIVAL_BYTES", rows * q.shape[0] * 2 * 8 * q.element_size())
    layout = head_tail(12, 4)

    def on(rank: int) -> float:
        part = [layout.shard(x, 2, rank) for x in (q, k, v)]
        options = {"mask": Causal() & Dense(bias), "strategy": strategy, "layout": layout}
        with torch.no_grad():
            out = context_attention(*part, cp_mesh(4), sink_H=sink_H, **options)
        return error(out, layout.shard(expected, 2, rank), whole=expected)

    assert max(run_ranks(on, 4)) < EXACT


@pytest.mark.parametrize(
    ("lengths", "layout", "strategy", "messages"),
    [
        ((260, None), contiguous, Ulysses(), 6),  # query, key and value; output; its gradient; theirs, 3
        ((257, None), contiguous, Ulysses(), 4),  # of which one rank has 129; one message for the three
        ((265, None), head_tail, Ulysses(), 6),
        ((265, 131), contiguous, Ulysses(), 7),
    ],
)
def test_large_gradients_of_heads_go_back_one_after_the_other(lengths, layout, strategy: Ulysses, messages: int):
    """If a rank has 2 MiB of queries, on average: the ranks must send alike. A query has 16,320 bytes."""
    length, kv_length = lengths
    problem = Problem(length=length, kv_length=kv_length, heads=6, kv_heads=3, dim=340, batch=1, causal=not kv_length)
    mask = Full() if kv_length else Causal()

    def on(rank: int) -> tuple[float, int]:
        attend = partial(context_attention, mesh=cp_mesh(2), mask=mask, layout=layout, strategy=strategy)
        with CommunicationTrace() as trace:
            worst = max(run_attention(attend, problem, rank, 2, layout=layout))
        return worst, trace.calls["send"]

    for worst, sent in run_ranks(on, 2):
        assert worst < EXACT
        assert sent == messages


@pytest.mark.parametrize("attention", [Core, DenseCore])
@on_every_rank(2)
def test_a_forward_that_is_called_past_its_module(mesh, rank: int, attention):
    """``module.forward(...)`` calls no hooks, and attends to the whole sequence as ``module(...)`` does, or is refused
    as that is."""
    whole = Problem(length=13, kv_heads=2)
    core = parallel(attention(), mesh)
    for act in (core, core.forward, core):
        if attention is Core:
            assert max(run_attention(act, whole, rank, 2)) < EXACT
        else:
            with pytest.raises(Exception, match="no scaled_dot_product_attention was called inside"):
                run_attention(act, whole, rank, 2)


class Wrapper(torch.nn.Module):
    """A forward that names no arguments."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@on_every_rank(2)
def test_a_forward_that_names_no_arguments(mesh, rank: int):
    given = Problem(length=13, causal=True)
    module = parallel(Wrapper(Core()), mesh)

    def by_name(*qkv: torch.Tensor) -> torch.Tensor:
        return module(**dict(zip(("query", "key", "value"), qkv, strict=True)))

    errors = run_attention(module, given, rank, 2)
    if sys.version_info[:2] == (3, 13):  # Signature.bind gives the name of a positional-only argument to **kwargs
        return max(errors + run_attention(by_name, given, rank, 2))
    with pytest.raises(TypeError, match=r"'query' parameter is positional only|missing a required (pos|argument)"):
        by_name(*given.shard(head_tail, rank, 2)[0])
    return max(errors)


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
    """Heads joined, views, expanded sizes: what attention modules do with their output, by DTensor's own rules; and
    with inputs, which lie in memory as projections return them."""
    problem = Problem(length=length)

    class Joined(Core):
        def forward(self, query, key, value):
            query = query.flatten(0, 1).unflatten(0, query.shape[:2])
            out = super().forward(query, key, value).transpose(1, 2).contiguous()
            return out.view(out.shape[0], out.shape[1], -1).unsqueeze(0).expand(1, -1, -1, -1)[0]

    core = parallel(Joined(), mesh)

    def attend(*qkv):
        projected = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
        return core(*projected).unflatten(2, (4, 8)).transpose(1, 2)

    return max(run_attention(attend, problem, rank, 3))


def test_a_loss_of_the_logsumexp_alone():
    """The output has no gradient, and its place in the backward is taken by zeros."""
    q, k, v = (randn(seed, 1, 2, 12, 8).requires_grad_() for seed in range(3))
    wanted = torch.autograd.grad((q @ k.mT / 8**0.5).logsumexp(-1).square().sum(), (q, k))
    layout = head_tail(12, 2)

    def on(rank: int) -> float:
        own = [layout.shard(x.detach(), 2, rank).requires_grad_() for x in (q, k, v)]
        _, lse = context_attention(*own, cp_mesh(2), layout=layout, return_lse=True)
        pairs = zip(torch.autograd.grad(lse.square().sum(), own[:2]), wanted, strict=True)
        return max(error(mine, layout.shard(whole, 2, rank), whole=whole) for mine, whole in pairs)

    assert max(run_ranks(on, 2)) < EXACT
