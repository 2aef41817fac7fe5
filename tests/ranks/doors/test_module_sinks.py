"""Attention sinks that are parameters of modules, under ModuleContextParallel: one more logit for each head."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_styles import AllGather, ModuleContextParallel, Ring, Ulysses, contiguous, flex_attention, head_tail
from cp_styles.batch import sum_gradients
from cp_styles.testing import run_ranks
from tests.covering import sampled
from tests.oracle import attention_inputs, dense_attention, error, randn
from tests.ranks.attention_case import EXACT, cp_mesh, on_every_rank

WIDTH, HEADS, LENGTH, RANKS = 12, 4, 13, 3


class Core(nn.Module):
    def forward(self, query, key, value, sinks=None):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class ByFlex(nn.Module):
    def forward(self, query, key, value, sinks=None):
        return flex_attention(query, key, value)


class DenseCore(nn.Module):
    def forward(self, query, key, value, sinks=None):
        causal = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        return dense_attention(query, key, value, causal, sink_H=sinks)


class Layer(nn.Module):
    """Sinks are this module's, the call is its child's."""

    def __init__(self, seed: int, core: nn.Module, sinks: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.core = core
        self.sinks = nn.Parameter(torch.zeros(HEADS)) if sinks else None
        for index, parameter in enumerate(self.parameters()):
            parameter.data = randn(seed + index, *parameter.shape) * parameter.shape[-1] ** -0.5

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.core(query, key, value, self.sinks).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Three layers, the one in the middle without sinks."""

    def __init__(self, core: type[nn.Module], ckpt=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(10 * index, core(), index != 1) for index in range(3))
        self.ckpt = ckpt

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.ckpt is None else checkpoint(layer, x, use_reentrant=self.ckpt == "reentrant")
        return x


X, COTANGENT = randn(1, 2, LENGTH, WIDTH), randn(2, 2, LENGTH, WIDTH)


def expected() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Model(DenseCore)
    out = model(X)
    out.backward(COTANGENT)
    return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@sampled(1, strategy=[Ring(), AllGather(), Ulysses()], ckpt=[None, "reentrant", "non-reentrant"])
def test_a_model_with_sinks(strategy, ckpt):
    wanted, grads = expected()
    layout = head_tail(LENGTH, RANKS)

    def on(rank: int) -> None:
        mesh = cp_mesh(RANKS)
        model = parallelize_module(Model(Core, ckpt), mesh, ModuleContextParallel(strategy=strategy, sink_name="sinks"))
        for each in (model, copy.deepcopy(model)):
            out = each(layout.shard(X, 1, rank).requires_grad_())
            out.backward(layout.shard(COTANGENT, 1, rank))
            assert error(out, layout.shard(wanted, 1, rank), whole=wanted) < EXACT
            sum_gradients(each, mesh)
            for name, parameter in each.named_parameters():
                assert error(parameter.grad, grads[name]) < EXACT, name
            each.zero_grad()

    run_ranks(on, RANKS)


@on_every_rank(2)
def test_a_copy_has_sinks_of_its_own(mesh, rank: int):
    model = parallelize_module(Model(Core), mesh, ModuleContextParallel(sink_name="sinks"))
    part = head_tail(LENGTH, 2).shard(X, 1, rank)
    before, other = model(part), copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].sinks += 3.0
    assert torch.equal(model(part), before)
    assert not torch.allclose(other(part), before)


@on_every_rank(2)
def test_what_does_not_fit_is_refused(mesh, rank: int):
    with pytest.raises(ValueError, match="has no module with a parameter 'sink'"):
        parallelize_module(Model(Core), mesh, ModuleContextParallel(sink_name="sink"))
    model = parallelize_module(Model(Core), mesh, ModuleContextParallel(sink_name="sinks"))
    model.layers[0].sinks = nn.Parameter(torch.zeros(HEADS - 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="one logit for each of 4 query heads"):
        model(head_tail(LENGTH, 2).shard(X, 1, rank))
    model = parallelize_module(Model(ByFlex), mesh, ModuleContextParallel(sink_name="sinks"))
    with pytest.raises(NotImplementedError, match="attention sinks are for scaled_dot_product_attention"):
        model(head_tail(LENGTH, 2).shard(X, 1, rank))


def test_a_module_from_elsewhere_takes_no_sink():
    """It is run by one that has sinks, but stands beside it: back in its own, calls are as there."""
    inputs, _ = attention_inputs(length=8, batch=1)
    layout = contiguous(8, 2)

    class Plain(nn.Module):
        def forward(self, *tensors):
            return F.scaled_dot_product_attention(*tensors)

    class WithSinks(nn.Module):
        def __init__(self, beside: nn.Module) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))
            self.beside = [beside]  # no child

        def forward(self, *tensors):
            return self.beside[0](*tensors), F.scaled_dot_product_attention(*tensors)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = Plain()
            self.sinking = WithSinks(self.plain)

        def forward(self, *tensors):
            return *self.sinking(*tensors), self.plain(*tensors)

    def on(rank: int):
        module = parallelize_module(Both(), cp_mesh(2), ModuleContextParallel(layout=layout, sink_name="sinks"))
        with torch.no_grad():
            return module(*(layout.shard(x, 2, rank) for x in inputs))

    beside, sunk, plain = (layout.unshard(list(parts), 2) for parts in zip(*run_ranks(on, 2), strict=True))
    wanted = dense_attention(*inputs)
    assert error(beside, wanted) < EXACT
    assert error(plain, wanted) < EXACT
    assert error(sunk, wanted) > 0.1
