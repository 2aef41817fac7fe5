"""Modules that are put into a model after a plan was applied to it: verify finds those whose attention is local."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import parallel as torch_parallel

from cp_styles import AttentionContextParallel, ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from cp_styles.comm.checks import Checks
from cp_styles.testing import run_ranks
from cp_styles.verify import VerificationError, verify
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Core, cp_mesh

RANKS, LENGTH, WIDTH = 2, 9, 6
LAYOUT = head_tail(LENGTH, RANKS)
X, COTANGENT = randn(0, 1, LENGTH, WIDTH), randn(1, 1, LENGTH, WIDTH)


class Attention(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight, self.core = nn.Parameter(randn(seed, WIDTH, 3 * WIDTH)), Core()

    def forward(self, x):
        return self.core(*(x @ self.weight)[:, None].chunk(3, -1))[:, 0]


class AnotherCore(Core):
    pass


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


class Layer(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.attention = Attention(seed)

    def forward(self, x):
        return x + self.attention(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed) for seed in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PLANS = {
    "style": {"layers.*.attention.core": AttentionContextParallel(layout=head_tail)},
    "module": {"layers.*.attention": ModuleContextParallel(layout=head_tail, checks=Checks(inputs=False))},
}


def replace_core(model: Model) -> None:
    model.layers[1].attention.core = AnotherCore()


def append_wrapped_layer(model: Model) -> None:
    model.layers.append(Wrapper(Layer(7)))


def wrap(model: Model) -> None:
    model.layers[0].attention = Wrapper(model.layers[0].attention)
    model.layers[1] = Wrapper(model.layers[1])


def prune(model: Model) -> None:
    del model.layers[1]


def expected(change) -> torch.Tensor:
    model = Model()
    change(model)
    return model(X).detach()


def step(model: nn.Module, batch: torch.Tensor, mesh) -> None:
    layout = head_tail(LENGTH, mesh.size())
    out = model(layout.shard(batch, 1, mesh.get_local_rank()))
    (out * layout.shard(COTANGENT, 1, mesh.get_local_rank())).sum().backward()
    sum_gradients(model, mesh)


PUT_IN = {replace_core: "layers.1.attention.core", append_wrapped_layer: "layers.3.module.attention"}


@pytest.mark.parametrize(("door", "change"), [("style", replace_core), ("module", append_wrapped_layer)])
def test_verify_finds_what_is_put_in_later_and_the_remedy_is_exact(door: str, change):
    path = PUT_IN[change]
    (style,) = PLANS[door].values()

    def on(rank: int) -> None:
        mesh = cp_mesh(RANKS)
        model = torch_parallel.parallelize_module(Model(), mesh, PLANS[door])
        verify(model, mesh, X, step)
        change(model)
        with pytest.raises(VerificationError, match=re.escape(path.replace(".module", ""))):  # wrappers have no names
            verify(model, mesh, X, step)
        parallelize_module(model.get_submodule(path), mesh, style)
        verify(model, mesh, X, step)

    run_ranks(on, RANKS)


@pytest.mark.parametrize("change", [wrap, prune], ids=lambda change: change.__name__)
@pytest.mark.parametrize("door", PLANS)
def test_other_changes_are_right(door: str, change):
    """Also of copies, and of a model some of whose modules have no style."""
    whole = expected(change)

    def on(rank: int) -> None:
        mesh, x = cp_mesh(RANKS), LAYOUT.shard(X, 1, rank)
        model = parallelize_module(Model(), mesh, PLANS[door])
        model(x)
        change(model)
        copied = copy.deepcopy(model)
        for each in (model, copied):
            assert error(each(x), LAYOUT.shard(whole, 1, rank)) < EXACT
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(model)

    run_ranks(on, RANKS)
