"""Trainings whose ranks have inputs of their own, through every door: what sums their gradients is the test's."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import testing
from cp_styles.batch import sum_gradients
from cp_styles.checks.gradient_watch import UnreducedGradientsError, UnreducedGradientsWarning
from cp_styles.functions.attention import context_attention
from cp_styles.layouts import contiguous
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.torch_api import context_parallel
from tests.oracle import randn
from tests.ranks.attention_case import Core, Projected

DOORS = ["style", "module", "function", "block"]


class Two(nn.Module):
    """Two attentions, and something behind the last one, where no attention sees it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(10, 10).double()
        self.head.weight.data, self.head.bias.data = randn(1, 10, 10) / 3, randn(2, 10)

    def forward(self, x):
        return self.head(self.layers(x))


def attended(door: str, mesh: DeviceMesh, model: Any = None, **options: Any) -> nn.Module:
    """The model, whose attentions are at ``layers.*.core``, through a door."""
    model = model or Two(Projected(Core()), Projected(Core()))
    options = {"layout": contiguous} | options
    if door == "style":
        return parallelize_module(model, mesh, {"layers.*.core": AttentionContextParallel(**options)})
    if door == "module":
        return parallelize_module(model, mesh, ModuleContextParallel(**options))
    if door == "function":
        for layer in model.layers:
            layer.core.forward = lambda *qkv: context_attention(*qkv, mesh, **options)
        return model
    forward = model.forward

    def in_block(x: torch.Tensor) -> torch.Tensor:
        with context_parallel(mesh, **options):
            return forward(x)

    model.forward = in_block
    return model


def inputs(seed: int) -> torch.Tensor:
    """Another one on every rank."""
    return randn(1000 * dist.get_rank() + seed, 1, 4, 10)


def steps_of(
    model: nn.Module, act: Any, *, steps: int = 3, reduce=lambda: None, micro: int = 1, optimizer: Any = None
) -> None:
    """SGD steps on inputs that differ between ranks, so that shares do."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for part in range(micro):
            act(inputs(10 * step + part)).square().sum().backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()


def warned(act: Callable[[int], Any], ranks: int = 2, run: Callable[..., Any] = testing.run_ranks) -> list[str]:
    """The warnings that ``act`` gives on all ranks that are here, together."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(act, ranks)
    return [str(warning.message) for warning in caught if issubclass(warning.category, UnreducedGradientsWarning)]


def raised(act: Callable[[int], Any], ranks: int = 2, run: Callable[..., Any] = testing.run_ranks) -> str:
    """The UnreducedGradientsError that ``act`` raises, the same one on all ranks."""

    def on(rank: int) -> BaseException | None:
        try:
            act(rank)
        except Exception as error:
            return testing.clear_frames(error) or error
        return None

    errors = run(on, ranks)
    assert {type(error) for error in errors} == {UnreducedGradientsError}, errors
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


class ByHand:
    """An optimizer of somebody's own."""

    def __init__(self, parameters) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Scaled(torch.optim.SGD):
    """Steps by a GradScaler that finds an infinity now and then."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.scaler, self.steps = torch.amp.GradScaler("cpu", init_scale=4.0), itertools.count()
        self.plain = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self) -> None:
        if next(self.steps) == 1:
            self.param_groups[0]["params"][0].grad[0] = torch.inf
        self.scaler.step(self.plain)
        self.scaler.update()


class Several:
    """An optimizer for each module."""

    def __init__(self, *modules: nn.Module) -> None:
        self.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def by_hand(model: nn.Module, mesh: DeviceMesh, factor: float = 1.0) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group())
        parameter.grad *= factor


def clipped_before(model: nn.Module, mesh: DeviceMesh) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    sum_gradients(model, mesh)


def scaled(mesh: DeviceMesh, model: nn.Module) -> None:
    optimizer = Scaled(model.parameters())
    reduce = partial(sum_gradients, model, mesh)
    steps_of(model, lambda x: optimizer.scaler.scale(model(x)), steps=5, reduce=reduce, optimizer=optimizer)


def with_tokens_of_one_rank(mesh: DeviceMesh, model: nn.Module) -> None:
    """The others' do not come by its parameters."""
    model.extra = nn.Linear(10, 10).double()
    model.extra.weight.data, model.extra.bias.data = randn(5, 10, 10), randn(6, 10)
    steps_of(
        model,
        lambda x: model(model.extra(x) if dist.get_rank() else x),
        steps=5,
        reduce=partial(sum_gradients, model, mesh),
    )


def frozen(mesh: DeviceMesh, model: nn.Module) -> None:
    """And a head that is trained, locally, behind the last attention."""
    model.requires_grad_(False)
    head = nn.Linear(10, 10).double()
    steps_of(head, lambda x: head(model(x)))


def with_leaves_that_differ(mesh: DeviceMesh, model: nn.Module) -> None:
    model.requires_grad_(False)
    for seed in range(4):
        model(inputs(seed).requires_grad_()).sum().backward()


def without_gradients(mesh: DeviceMesh, model: nn.Module, mode: Callable[[], Any]) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + dist.get_rank()
    with mode():
        model(inputs(0))


def summed(act=lambda model: model, optimizer=lambda model: None, reduce=sum_gradients) -> Callable[..., None]:
    return lambda mesh, model: steps_of(
        model, act(model), steps=5, reduce=partial(reduce, model, mesh), optimizer=optimizer(model)
    )


# What tests/programs.py does not do.
RIGHT: dict[str, Callable[[DeviceMesh, Any], None]] = {
    "summed by hand": summed(reduce=by_hand),
    "averaged": summed(reduce=partial(by_hand, factor=0.5)),
    "clipped before": summed(reduce=clipped_before),
    "scaled": scaled,
    "two forwards": summed(lambda model: lambda x: model(x) + model(x + 1)),
    "one rank's": with_tokens_of_one_rank,
    "another optimizer": summed(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)),
    "two optimizers": summed(optimizer=lambda model: Several(model.layers[0], model.layers[1], model.head)),
    "optimizer by hand": summed(optimizer=lambda model: ByHand(model.parameters())),
    "frozen": frozen,
    "own inputs": with_leaves_that_differ,
    "no grad": partial(without_gradients, mode=torch.no_grad),
    "inference": partial(without_gradients, mode=torch.inference_mode),
}
