"""Random numbers by position: equal on any number of ranks, and to the published generator."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    Checks,
    ModuleContextParallel,
    SequenceScope,
    contiguous,
    head_tail,
    parallelize_module,
    sum_gradients,
)
from cp_styles.layouts import SequenceLayout
from cp_styles.mixers import context_dropout, context_rand, context_randn, derive_seed, randomness, replace_dropout
from cp_styles.testing import run_ranks
from tests.layouts import layouts
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh, on_every_rank, refused


def on_ranks(layout: SequenceLayout, dim: int, call: Any, x: torch.Tensor) -> torch.Tensor:
    def main(rank: int) -> torch.Tensor:
        mesh = cp_mesh(layout.ranks)
        return call(layout.shard(x, dim, rank), mesh=mesh, layout=layout)

    return layout.unshard(run_ranks(main, layout.ranks), dim)


def splitmix64(seed: int, count: int) -> list[float]:
    """With integers of Python, from the paper."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return [(mix((seed + at * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for at in range(count)]


def test_the_published_generator():
    x = randn(0, 2, 5, 3)
    found = on_ranks(contiguous(5, 1), 1, partial(context_rand, seq_dim=1, seed=7), x)
    assert found.flatten().tolist() == splitmix64(derive_seed((7, 0)) % 2**64, 30)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_cut(data: st.DataObject):
    layout, dim = data.draw(layouts(length=data.draw(st.integers(1, 24)))), data.draw(st.sampled_from((0, 1, 2, -1)))
    dtype = data.draw(st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
    shape = [2, 3, 2]
    shape[dim] = layout.length
    x, one = randn(0, *shape, dtype=dtype), contiguous(layout.length, 1)
    seed = data.draw(st.integers(-(2**70), 2**70))
    for call, exact in ((context_rand, True), (partial(context_dropout, p=0.3), True), (context_randn, False)):
        draw = partial(call, seq_dim=dim, seed=seed)
        found, wanted = on_ranks(layout, dim, draw, x), on_ranks(one, dim, draw, x)
        assert found.dtype == dtype
        # Vectors and single numbers round log and cos in different ways.
        assert torch.equal(found, wanted) if exact else error(found, wanted) <= torch.finfo(dtype).eps


def test_several_turns(monkeypatch):
    x, draw = randn(0, 2, 50, 3), partial(context_rand, seq_dim=1, seed=3)
    wanted = on_ranks(contiguous(50, 1), 1, draw, x)
    monkeypatch.setattr(randomness, "_NUMBERS", 40)
    assert torch.equal(on_ranks(head_tail(50, 3), 1, draw, x), wanted)


def test_moments_and_independence():
    """200,000 numbers: a mean is off by 5 standard errors once in two million runs. The draws are always the same."""
    x = torch.empty(1, 2000, 100, dtype=torch.float64)
    draws = [on_ranks(contiguous(2000, 1), 1, partial(context_rand, seq_dim=1, seed=seed), x)[0] for seed in (0, 1)]
    normal = on_ranks(contiguous(2000, 1), 1, partial(context_randn, seq_dim=1, seed=0), x)[0]
    bound = 5 / x.numel() ** 0.5
    for uniform in draws:
        assert abs(float(uniform.mean()) - 0.5) < bound * 12**-0.5
        assert abs(float(uniform.var()) * 12 - 1) < bound * 0.9
    assert abs(float(normal.mean())) < bound
    assert abs(float(normal.var()) - 1) < bound * 2**0.5
    assert abs(float((normal**4).mean()) - 3) < bound * 96**0.5
    pairs = [(draws[0], draws[1]), (draws[0][1:], draws[0][:-1]), (draws[0][:, 1:], draws[0][:, :-1])]
    for one, other in [*pairs, (normal, draws[0])]:
        both = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))
        assert abs(float(both[0, 1])) < 1.01 * bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype: torch.dtype):
    """In bfloat16 a step is 1/256, and yet a five-hundredth is dropped."""

    def main(rank: int) -> list[torch.Tensor]:
        mesh = cp_mesh(1)
        x = randn(0, 1, 1000, 100, dtype=dtype).requires_grad_()
        out = context_dropout(x, 0.002, 1, mesh, seed=5)
        out.backward(torch.ones_like(out))
        assert context_dropout(x, 0.002, 1, mesh, seed=5, training=False) is x
        assert not context_dropout(x, 1.0, 1, mesh, seed=5).any()
        assert torch.equal(context_dropout(x, 0.0, 1, mesh, seed=5), x)
        return [x.detach(), out.detach(), x.grad]

    x, out, grad = run_ranks(main, 1)[0]
    kept = out != 0
    assert abs(float((~kept).double().mean()) - 0.002) < 5 * (0.002 / x.numel()) ** 0.5
    assert torch.equal(out, torch.where(kept, x / 0.998, 0))
    assert torch.equal(grad, torch.where(kept, torch.ones_like(x) / 0.998, 0))


# -- models --


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        q, k, v = self.qkv(self.dropout(x)).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
        return x + self.dropout(
            self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        )


def trained(ranks: int, balancer: Any = head_tail) -> list[torch.Tensor]:
    """Output and gradients of two layers; each calls its dropout twice."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), randn(1, 2, 21, 8)

    def main(rank: int) -> list[torch.Tensor]:
        mesh = cp_mesh(ranks)
        mine, layout = copy.deepcopy(model), balancer(21, ranks)
        names = replace_dropout(mine, mesh, layout=layout, generator=torch.Generator().manual_seed(4))
        assert names == ["0.dropout", "1.dropout"]
        assert mine.state_dict().keys() == model.state_dict().keys()
        parallelize_module(mine, mesh, ModuleContextParallel(layout=layout, verified=True))
        out = mine(layout.shard(x, 1, rank))
        out.backward(layout.shard(randn(2, *x.shape), 1, rank))
        sum_gradients(mine, mesh)
        return [out.detach(), *(p.grad for p in mine.parameters())]

    outs, *gradients = zip(*run_ranks(main, ranks), strict=True)
    return [balancer(21, ranks).unshard(list(outs), 1), *(of_ranks[0] for of_ranks in gradients)]


def test_a_model_trains_equally_on_any_number_of_ranks():
    wanted = trained(1)
    for ranks, balancer in ((2, head_tail), (3, contiguous)):
        for found, expected in zip(trained(ranks, balancer), wanted, strict=True):
            assert error(found, expected) < 1e-12
    assert error(trained(1)[0], wanted[0]) == 0


@on_every_rank(1)
def test_each_call_draws_anew_and_a_recomputation_draws_again(mesh):
    """From torch's own generator, which a checkpoint restores."""
    x, model = randn(1, 2, 20, 8), nn.Sequential(Layer(), Layer())
    replace_dropout(model, mesh)
    copied = copy.deepcopy(model)  # keeps its dropouts
    results = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=False), copied):
        torch.manual_seed(3)
        out = call(x)
        out.sum().backward()
        results.append([out.detach(), *(p.grad for p in (copied if call is copied else model).parameters())])
        copied.zero_grad()
        model.zero_grad()
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
    assert not torch.equal(model(x), results[0][0])
    assert torch.equal(model.eval()(x), model(x))


def test_a_scope_says_the_layout_and_nothing_is_compared():
    x = randn(0, 2, 12, 3)

    def main(rank: int) -> torch.Tensor:
        mesh, layout = cp_mesh(2), contiguous(12, 2)
        with SequenceScope(layout):
            return context_rand(layout.shard(x, 1, rank), 1, mesh, seed=1, checks=Checks(agreement=False))

    wanted = on_ranks(contiguous(12, 1), 1, partial(context_rand, seq_dim=1, seed=1), x)
    assert torch.equal(torch.cat(run_ranks(main, 2), 1), wanted)


def test_seeds():
    seeds = {derive_seed(numbers) for numbers in itertools.product(range(-3, 4), repeat=3)}
    assert len(seeds) == 7**3
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert derive_seed([2**80]) != derive_seed([2**80 + 1])


# -- errors --


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, mesh, rank: context_rand(x, 1, mesh, seed=rank), r"disagree on the seed: ranks \[1\] differ"),
        (lambda x, mesh, rank: context_rand(x, 1, mesh, seed=0.5), "seed=0.5 must be an integer"),
        (lambda x, mesh, rank: context_dropout(x, 2 - rank, 1, mesh, seed=0), "p=2 must be a probability"),
        (lambda x, mesh, rank: context_randn(x.long() if rank else x, 1, mesh, seed=0), "need a floating-point tensor"),
    ],
)
def test_refused_on_every_rank(call: Any, words: str):
    refused(lambda rank, mesh: call(randn(0, 2, 6, 3), mesh, rank), words, (ValueError, TypeError))


@on_every_rank(1)
def test_a_model_without_such_modules(mesh):
    model = nn.Sequential(Layer(), Layer())
    with pytest.raises(ValueError, match=r"Sequential has no nn.Dropout with a name in \['layers.\*'\]"):
        replace_dropout(model, mesh, names=["layers.*"])
    assert replace_dropout(model, mesh, names=["*.dropout"]) == ["0.dropout", "1.dropout"]
    with pytest.raises(ValueError, match=r"has no nn\.Dropout: print the names"):
        replace_dropout(model, mesh)
