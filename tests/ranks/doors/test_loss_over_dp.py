"""A loss over data-parallel ranks too: what nothing sums over these is an error, of a training and of verify."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cp_styles import (
    AttentionContextParallel,
    BatchSharder,
    Checks,
    ModuleContextParallel,
    UnreducedGradientsError,
    parallelize_module,
    sum_gradients,
)
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import VerificationError, verify
from tests.oracle import error, filled
from tests.ranks.attention_case import EXACT, Core
from tests.tiny_lm import LanguageModel

WORDS, LENGTH, STEPS = 17, 13, 2
TOKENS = [torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(seed)) for seed in range(STEPS)]


class WithCore(LanguageModel):
    """The attention is a module that receives query, key and value."""

    def __init__(self) -> None:
        super().__init__(WORDS, width=8)
        self.core = Core()

    def logits(self, x: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.attention.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + self.core(q, k, v).transpose(1, 2).flatten(2))


def new_model() -> nn.Module:
    return filled(WithCore().double())


def alone() -> list[torch.Tensor]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens in TOKENS:
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def by_module(model: nn.Module, mesh: DeviceMesh, checks: Checks) -> Callable[..., Any]:
    return parallelize_module(model, mesh, ModuleContextParallel(verified=True, checks=checks))


def by_core(model: nn.Module, mesh: DeviceMesh, checks: Checks) -> Callable[..., Any]:
    return parallelize_module(model, mesh, {"core": AttentionContextParallel(verified=True, checks=checks)})


def by_block(model: nn.Module, mesh: DeviceMesh, checks: Checks) -> Callable[..., Any]:
    def forward(*args: Any) -> torch.Tensor:
        with context_parallel(mesh, verified=True, checks=checks):
            return model(*args)

    return forward


DOORS = {"core": by_core, "module": by_module, "block": by_block}


def all_reduce(model: nn.Module, mesh: DeviceMesh, divisor: int) -> None:
    """The sum, or a mean, that a program takes by itself."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(gradient, group=mesh.get_group())
        gradient /= divisor


@dataclass(frozen=True)
class Recipe:
    """The axes of FSDP2 or DDP, the axes in ``averaged_over``, and what follows the backward: f(model, mesh, both)."""

    axes: tuple[str, ...] = ()
    averaged_over: tuple[str, ...] = ()
    after: Callable[[nn.Module, DeviceMesh, DeviceMesh], None] = lambda model, mesh, both: None
    ddp: bool = False
    spoiled: str = ""


def sum_over(axis: str) -> Callable[[nn.Module, DeviceMesh, DeviceMesh], None]:
    return lambda model, mesh, both: sum_gradients(model, both if axis == "both" else mesh[axis])


def mean_over(axis: str) -> Callable[[nn.Module, DeviceMesh, DeviceMesh], None]:
    return lambda model, mesh, both: all_reduce(model, mesh[axis], 2)


DIVERGE = "global_loss over ranks .*: these ranks hold different parameters: . of the 5 that were compared.* equal on"
BOTH = ("dp", "cp")
RECIPES = {
    "summed over both": Recipe(after=sum_over("both")),
    "summed over one axis after another": Recipe(
        after=lambda *where: [sum_over("cp")(*where), sum_over("dp")(*where)][0]
    ),
    "HSDP": Recipe(BOTH, BOTH),
    "FSDP2 over dp, summed over cp": Recipe(("dp",), ("dp",), sum_over("cp")),
    "FSDP2 over dp, a mean over cp": Recipe(("dp",), BOTH, mean_over("cp")),
    "FSDP2 over cp, a mean over dp": Recipe(("cp",), BOTH, mean_over("dp")),
    "DDP over cp, a mean over dp": Recipe(("cp",), BOTH, mean_over("dp"), ddp=True),
    "summed over cp alone": Recipe(after=sum_over("cp"), spoiled=DIVERGE),
    "FSDP2 over cp alone": Recipe(("cp",), BOTH, spoiled=DIVERGE),
    "DDP over cp alone": Recipe(("cp",), BOTH, ddp=True, spoiled=DIVERGE),
    "FSDP2 over dp, a sum in place of a mean": Recipe(
        ("dp",), BOTH, sum_over("cp"), spoiled="sum_gradients over ranks .*averaged_over=4, and FSDP2 averages over 2"
    ),
}


def a_step(
    forward: Callable[..., Any], model: nn.Module, tokens: torch.Tensor, mesh: DeviceMesh, recipe: Recipe
) -> torch.Tensor:
    both = mesh["dp", "cp"]._flatten("dp_cp")
    averaged_over = math.prod(mesh[axis].size() for axis in recipe.averaged_over)
    batch = BatchSharder(mesh["cp"], loss_mesh=both, averaged_over=averaged_over)(tokens)
    loss = batch.loss(forward(batch.tokens, batch.positions))
    loss.backward()
    recipe.after(model, mesh, both)
    return loss


def made(recipe: Recipe, door: Any, checks: Checks | None = None) -> tuple[nn.Module, Callable[..., Any], DeviceMesh]:
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), new_model()
    forward = door(model, mesh["cp"], checks or Checks())
    if recipe.ddp:
        wrapped = DistributedDataParallel(model, process_group=mesh[recipe.axes].get_group())
        forward = door(wrapped, mesh["cp"], checks or Checks()) if door is by_block else wrapped
    elif recipe.axes:
        fully_shard(model, mesh=mesh[recipe.axes])
    return model, forward, mesh


def rows(tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Two sequences on the first rank of dp, and one on the second one."""
    return tokens.tensor_split(2)[mesh["dp"].get_local_rank()]


def train(rank: int, recipe: Recipe, door: Any, checks: Checks | None = None) -> float:
    model, forward, mesh = made(recipe, door, checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens in TOKENS:
        a_step(forward, model, rows(tokens, mesh), mesh, recipe)
        optimizer.step()
        optimizer.zero_grad()
    full = [x.full_tensor() if isinstance(x, DTensor) else x for x in model.parameters()]
    return max(error(x.detach(), y) for x, y in zip(full, alone(), strict=True))


ROWS = [(name, door) for name in RECIPES for door in DOORS]
AT_NIGHT = [(name, door) for name, door in ROWS if door != "core" and name != "summed over cp alone"]


@pytest.mark.parametrize(
    ("name", "door"), [row if row not in AT_NIGHT else pytest.param(*row, marks=pytest.mark.nightly) for row in ROWS]
)
def test_a_training(name: str, door: str):
    recipe = RECIPES[name]
    found = run_ranks(partial(train, recipe=recipe, door=DOORS[door]), 4, return_errors=True)
    if not recipe.spoiled:
        assert all(isinstance(each, float) and each < EXACT for each in found), found
        return
    kind = UnreducedGradientsError if recipe.spoiled is DIVERGE else ValueError
    for each in found:
        assert isinstance(each, kind)
        assert re.search(recipe.spoiled, str(each))


def test_models_of_one_class_in_one_loss():
    """Each is compared with itself: in the order of the forwards, which all ranks have."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        models = nn.ModuleList(new_model() for _ in range(6))
        for index, model in enumerate(models):
            by_module(model, mesh["cp"], Checks())
            torch._foreach_mul_([x.data for x in model.parameters()], 1 + index / 10)

        def forward(*args: Any) -> torch.Tensor:
            return torch.stack([model(*args) for model in models]).sum(0)

        optimizer = torch.optim.SGD(models.parameters(), lr=0.5)
        for tokens in TOKENS:
            a_step(forward, models, rows(tokens, mesh), mesh, RECIPES["summed over cp alone"])
            optimizer.step()
            optimizer.zero_grad()

    for each in run_ranks(on, 4, return_errors=True):
        assert re.search(DIVERGE, str(each))


def test_a_sum_after_means_by_hand():
    """A step is judged by its own ``averaged_over``, also where no reducer is searched: in the third one."""
    names = ["FSDP2 over dp, a mean over cp"] * 2 + ["FSDP2 over dp, summed over cp"]

    def on(rank: int) -> float:
        model, forward, mesh = made(RECIPES[names[0]], by_module)
        for name in names:
            model.zero_grad()
            a_step(forward, model, rows(TOKENS[0], mesh), mesh, RECIPES[name])
        found: list[Any] = [x.grad for x in model.parameters()]
        return max(error(x.full_tensor(), y) for x, y in zip(found, wanted, strict=True))

    model = new_model()
    F.cross_entropy(model(TOKENS[0])[:, :-1].flatten(0, 1), TOKENS[0][:, 1:].flatten()).backward()
    wanted: list[Any] = [x.grad for x in model.parameters()]
    assert max(run_ranks(on, 4)) < EXACT


def test_the_ranks_with_equal_parameters_are_named():
    for each in run_ranks(
        partial(train, recipe=RECIPES["summed over cp alone"], door=by_module), 4, return_errors=True
    ):
        assert "now equal on [0, 1] and [2, 3]" in str(each)


@pytest.mark.parametrize("named", [False, True])
def test_experts_of_data_parallel_ranks(named: bool):
    """Parameters that differ from the beginning are not compared, and named ones never are."""

    def on(rank: int) -> None:
        mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), new_model()
        expert: Any = model.get_submodule("head")
        if not named:
            expert.weight.data += mesh["dp"].get_local_rank()
        local = [expert] if named else []
        forward = by_module(model, mesh["cp"], Checks(local=local))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for tokens in TOKENS:
            a_step(forward, model, rows(tokens, mesh), mesh, Recipe(after=sum_over("both")))
            if named:
                expert.weight.grad *= 1 + mesh["dp"].get_local_rank()
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(on, 4)


class TestVerify:
    def verdict(self, recipe: Recipe, loss_over: str = "both") -> list[Any]:
        def on(rank: int) -> str:
            model, forward, mesh = made(recipe, by_module)

            def step(model: nn.Module, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
                if loss_over == "both":
                    return a_step(forward, model, tokens, mesh, recipe)
                averaged_over = mesh["cp"].size() if recipe.axes else 1
                batch = BatchSharder(mesh["cp"], averaged_over=averaged_over)(tokens)
                loss = batch.loss(forward(batch.tokens, batch.positions))
                loss.backward()
                if not isinstance(model, FSDPModule):
                    sum_gradients(model, mesh["cp"])
                return loss

            return verify(model, mesh, rows(TOKENS[0], mesh), step, tolerance=1e-10).line

        return run_ranks(on, 4, return_errors=True)

    @pytest.mark.parametrize("name", ["summed over both", "HSDP", "FSDP2 over dp, summed over cp"])
    def test_right_steps_have_no_note(self, name: str):
        for line in self.verdict(RECIPES[name]):
            assert "equal to one device" in line
            assert "Over mesh axis" not in line

    @pytest.mark.parametrize("name", ["summed over cp alone", "FSDP2 over cp alone"])
    def test_what_nothing_sums_is_a_mistake(self, name: str):
        for each in self.verdict(RECIPES[name]):
            assert isinstance(each, VerificationError)
            assert re.search("over mesh axis 'dp' the gradients of .* nothing sums", " ".join(str(each).split()))

    def test_a_loss_of_one_axis_gets_a_note(self):
        """Local steps may be meant, and means of means with one number of tokens everywhere are exact."""
        for line in self.verdict(Recipe(), "cp"):
            assert re.search("Over mesh axis 'dp' the gradients of . of 5 .* nothing in the step reduces them", line)
        for line in self.verdict(RECIPES["HSDP"], "cp"):
            assert "Over mesh axis 'dp' each loss is a mean over the tokens of its own ranks (24 and 12)" in line
