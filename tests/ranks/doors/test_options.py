"""Options of calls that tests/fuzz.py does not draw, or seldom: two lengths, sinks of infinity, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cp_styles.functions.attention import context_attention
from cp_styles.layout import head_tail
from cp_styles.mask import Causal
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.testing import run_ranks
from tests.oracle import dense_attention, error, randn
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, parallel, run_attention
from tests.ranks.leak_scene import Scene, refusals

STRATEGIES = (Ring(), Ring(keep=0), AllGather(), AllGather(keep=0), Ulysses(), Ulysses(size=2))
RANKS = 4


def worst(problem: Problem, calls, ranks: int = RANKS) -> float:
    """Largest error of the calls, (layout, options) each, over ranks and over out, dq, dk and dv."""

    def on(rank: int):
        mesh = cp_mesh(ranks)
        found = []
        for layout, options in calls:
            attend = partial(context_attention, mesh=mesh, layout=layout, **options)
            found += run_attention(attend, problem, rank, ranks, layout=layout)
        assert all(size == size for size in found), "NaN"
        return max(found)

    return max(run_ranks(on, ranks))


# -- sinks --


def test_a_sink_of_minus_infinity_is_none():
    problem = Problem(length=13, kv_heads=2)
    sink = torch.full((4,), float("-inf"), dtype=torch.float64)
    assert worst(problem, [(head_tail, {"strategy": s, "mask": Causal(), "sink_H": sink}) for s in STRATEGIES]) < EXACT


def test_sinks_of_another_shape_are_refused():
    for shape in ((2,), (1, 4), ()):
        text = refusals(lambda s, shape=shape: context_attention(*s.leaves()[0], s.mesh, sink_H=torch.zeros(shape)))
        assert "sink_H must be one logit for each of 4 query heads" in text


def test_what_is_not_there_is_refused_by_name():
    """prime-rl#3397: an argument swallowed by **kwargs. Nothing here takes any, so a softcap is a TypeError at once."""

    def softcap(s: Scene):
        context_attention(*s.leaves()[0], s.mesh, softcap=30.0)

    def dropout(s: Scene):
        context_attention(*s.leaves()[0], s.mesh, dropout_p=0.1)

    assert "unexpected keyword argument 'softcap'" in refusals(softcap)
    assert "unexpected keyword argument 'dropout_p'" in refusals(dropout)

    class Swallowing(Core):
        def forward(self, query, key, value, **kwargs):
            return super().forward(query, key, value)

    def s_aux(s: Scene):
        parallel(Swallowing(), s.mesh)(*s.leaves()[0], s_aux=torch.zeros(4))

    assert "got a tensor 's_aux' of shape (4,) beside query, key and value" in refusals(s_aux)


# -- what users of others trip over --


@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("strategy", [Ring(), AllGather(), Ulysses(size=2)])
def test_other_dims_and_the_logsumexp(seq_dim: int, return_lse: bool, strategy):
    """lse goes on to the loss too, for its gradient."""
    wholes = [randn(seed, 2, heads, 21, 8).requires_grad_() for seed, heads in enumerate((6, 2, 2))]
    cotangent, causal = randn(3, 2, 6, 21, 9), torch.ones(21, 21, dtype=torch.bool).tril()
    if not return_lse:
        cotangent[..., 8] = 0
    expected = dense_attention(*wholes, causal, with_lse=True)
    grads = torch.autograd.grad(expected, wholes, cotangent)
    layout = head_tail(21, RANKS)

    def on(rank: int):
        leaves = [layout.shard(x.detach(), 2, rank).clone().requires_grad_() for x in wholes]
        given = [x.transpose(1, 2) for x in leaves] if seq_dim == 1 else leaves
        options = {"strategy": strategy, "seq_dim": seq_dim, "return_lse": return_lse}
        out = context_attention(*given, cp_mesh(RANKS), mask=Causal(), layout=layout, **options)
        out, lse = out if return_lse else (out, out.new_zeros(2, 6, layout.lengths[rank]))
        out = out.transpose(1, 2) if seq_dim == 1 else out
        whole = torch.cat((out, lse[..., None]), -1)
        return whole.detach(), *torch.autograd.grad(whole, leaves, layout.shard(cotangent, 2, rank))

    found = [layout.unshard(parts, 2) for parts in zip(*run_ranks(on, RANKS), strict=True)]
    expected = expected.detach()[..., : 9 if return_lse else 8]
    assert error(found[0][..., : 9 if return_lse else 8], expected) < EXACT
    assert max(error(*pair) for pair in zip(found[1:], grads, strict=True)) < EXACT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_dim": 3}, "seq_dim=3 must be 2"),
        ({"return_lse": True, "sink_H": torch.zeros(2)}, "return_lse=True is not"),
    ],
)
def test_what_one_rank_alone_asks_for(options, words: str):
    def on(rank: int):
        x = torch.zeros(1, 2, 4, 8)
        context_attention(x, x, x, cp_mesh(2), **(options if rank else {}))

    other, own = run_ranks(on, 2, return_errors=True)
    assert words in str(own)
    assert "ranks [1] of mesh axis 'cp' refused" in str(other)
