"""Modules that are put into a model after a plan was applied to it: refused where their attention would stay local."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import parallel as torch_parallel

from cp_styles import AttentionContextParallel, ModuleContextParallel, head_tail, parallelize_module
from cp_styles.testing import run_ranks
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Core, cp_mesh, on_every_rank

RANKS, LENGTH, WIDTH = 2, 9, 6
LAYOUT = head_tail(LENGTH, RANKS)
X = randn(0, 1, LENGTH, WIDTH)


class Attention(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight, self.core = nn.Parameter(randn(seed, WIDTH, 3 * WIDTH)), Core()

    def forward(self, x):
        return self.core(*(x @ self.weight)[:, None].chunk(3, -1))[:, 0]


class Another(nn.Module):
    """As adapters and kernels of other libraries are: other names inside."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.weight, self.inner = replaced.weight, Core()

    def forward(self, x):
        return self.inner(*(x @ self.weight)[:, None].chunk(3, -1))[:, 0]


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
    "module": {"layers.*.attention": ModuleContextParallel(layout=head_tail, check_inputs=False)},
}


def replace_attention(model: Model) -> None:
    model.layers[1].attention = Another(model.layers[1].attention)


def replace_core(model: Model) -> None:
    model.layers[1].attention.core = AnotherCore()


def replace_layer(model: Model) -> None:
    model.layers[2] = Layer(2)


def append_layer(model: Model) -> None:
    model.layers.append(Layer(7))


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


@pytest.mark.parametrize("late", [False, True], ids=["before a forward", "between forwards"])
@pytest.mark.parametrize(
    "change",
    [replace_attention, replace_core, replace_layer, append_layer, append_wrapped_layer],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("door", PLANS)
def test_what_is_put_in_later_is_refused_and_the_remedy_is_exact(door: str, change, late: bool):
    whole = expected(change)
    (style,) = PLANS[door].values()

    def on(rank: int) -> None:
        mesh, x = cp_mesh(RANKS), LAYOUT.shard(X, 1, rank)
        model = torch_parallel.parallelize_module(Model(), mesh, PLANS[door])
        if late:
            model(x)
        change(model)
        if (door, change) != ("module", replace_core):  # it is inside of a module with the style
            for _ in range(2):
                with pytest.raises(ValueError, match="after the style was applied, and has none") as error_info:
                    model(x)
            path = re.search(r"get_submodule\('([\w.]+)'\)", str(error_info.value))[1]
            parallelize_module(model.get_submodule(path), mesh, style)
        assert error(model(x), LAYOUT.shard(whole, 1, rank)) < EXACT

    run_ranks(on, RANKS)


@pytest.mark.parametrize("door", PLANS)
@on_every_rank(RANKS)
def test_one_rank_that_puts_a_module_in(mesh, rank: int, door: str):
    model = parallelize_module(Model(), mesh, PLANS[door])
    if rank:
        replace_layer(model)
    message = "layers.2.attention" if rank else r"ranks \[1\] of mesh axis 'cp' refused"
    with pytest.raises(ValueError, match=message):
        model(LAYOUT.shard(X, 1, rank))


@pytest.mark.parametrize("change", [wrap, prune], ids=lambda change: change.__name__)
@pytest.mark.parametrize("door", PLANS)
def test_other_changes_are_right(door: str, change):
    """Also of copies, in which a replaced module is found, and of a model some of whose modules have no style."""
    whole = expected(change)

    def on(rank: int) -> None:
        mesh, x = cp_mesh(RANKS), LAYOUT.shard(X, 1, rank)
        model = parallelize_module(Model(), mesh, PLANS[door])
        model(x)
        untouched = copy.deepcopy(model)
        change(model)
        copied = copy.deepcopy(model)
        for each in (model, copied):
            assert error(each(x), LAYOUT.shard(whole, 1, rank)) < EXACT
        replace_attention(untouched)
        with pytest.raises(ValueError, match="after the style was applied, and has none"):
            untouched(x)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(model)
        (path,) = PLANS[door]
        some = parallelize_module(Model(), mesh, {path.replace("*", "[01]"): PLANS[door][path]})
        some.layers[2] = Layer(2)  # without a style, as before
        some(x)

    run_ranks(on, RANKS)
