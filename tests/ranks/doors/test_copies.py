"""A copy.deepcopy of a model with styles is as exact as the model, and has every check of it: with its own state, its
own proof and its own name."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from cp_styles import (
    AttentionContextParallel,
    BackboneContextParallel,
    BatchSharder,
    Checks,
    ModuleContextParallel,
    UnreducedGradientsError,
    parallelize_module,
    sum_gradients,
)
from cp_styles.checks import proof_of
from cp_styles.layouts import head_tail
from cp_styles.testing import RankError, run_ranks
from tests.covering import sampled
from tests.oracle import error, filled, randn
from tests.ranks.attention_case import EXACT, Core, Projected, cp_mesh
from tests.tiny_lm import SelfAttention

LENGTH, WORDS, WIDTH, RANKS = 12, 17, 16, 2
TOKENS = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
LAYOUT = head_tail(LENGTH, RANKS)


class Layers(nn.Module):
    """Layers of attention over tokens, or over hidden states, in an ``order`` that the caller may name."""

    def __init__(self, cores: bool = False) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        width = 10 if cores else WIDTH
        self.layers = nn.ModuleList([Projected(Core()) if cores else SelfAttention(width) for _ in range(2)])
        self.into, self.head = nn.Linear(WIDTH, width), nn.Linear(width, WORDS)
        filled(self.double())

    def forward(self, tokens, position_ids, order=(0, 1)):
        x = self.into(self.embed(tokens) + self.places(position_ids))
        for index in order:
            x = x + self.layers[index](x)
        return self.head(x)


def in_a_module(model: Layers, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return parallelize_module(model, mesh, ModuleContextParallel(**options))


def in_cores(model: Layers, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"layers.*.core": AttentionContextParallel(**options)})


DOORS = {"module": (False, in_a_module), "core": (True, in_cores)}


def parts(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return LAYOUT.shard(TOKENS, 1, rank), LAYOUT.positions(rank)[None]


def trained(model: nn.Module, mesh: DeviceMesh, rank: int, **options: Any) -> torch.Tensor:
    batch = BatchSharder(mesh, **options)(TOKENS)
    loss = batch.loss(model(batch.tokens, batch.positions[None]))
    loss.backward()
    return loss.detach()


def a_whole_batch(model: Any, mesh: DeviceMesh, rank: int) -> None:
    model.eval()
    with torch.no_grad():
        model(TOKENS, torch.arange(LENGTH).flip(0)[None])  # which do not count from 0


def another_order(model: Any, mesh: DeviceMesh, rank: int) -> None:
    model(*parts(rank), order=(rank, 1 - rank))


def positions_from_0(model: Any, mesh: DeviceMesh, rank: int) -> None:
    model(parts(rank)[0], torch.arange(LENGTH // RANKS)[None])


def averaged_by_fsdp(model: Any, mesh: DeviceMesh, rank: int) -> None:
    trained(fully_shard(model, mesh=mesh), mesh, rank)


def gradients_of_a_rank(model: Any, mesh: DeviceMesh, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        trained(model, mesh, rank)
        optimizer.step()


@dataclass(frozen=True)
class Mistake:
    """What the ranks do with a model, the words of their error, and the doors that look."""

    act: Callable[[Any, DeviceMesh, int], None]
    words: str
    doors: tuple[str, ...] = ("module", "core")


MISTAKES = {
    "a whole batch": Mistake(a_whole_batch, "were given the same tokens"),
    "another order": Mistake(another_order, "are not at the same place"),
    "positions from 0": Mistake(positions_from_0, "position_ids count from 0", ("module",)),
    "FSDP2 without averaged_over": Mistake(averaged_by_fsdp, "FSDP2 averages gradients over 2"),
    "gradients that nobody sums": Mistake(gradients_of_a_rank, "hold different parameters"),
}


def deepcopied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model).module


def copied_twice(model: nn.Module) -> nn.Module:
    return copy.deepcopy(copy.deepcopy(model))


WAYS = {"deepcopy": deepcopied, "AveragedModel": averaged, "a copy of a copy": copied_twice}


@sampled(
    2,
    lambda name, door, **_: door in MISTAKES[name].doors,
    name=list(MISTAKES),
    door=list(DOORS),
    way=list(WAYS),
    ended=[False, True],
)
def test_a_copy_has_the_checks_of_the_model(name: str, door: str, way: str, ended: bool):
    """Also after three forwards of the model, whose checks of values then wait for the fourth."""
    mistake, (cores, apply) = MISTAKES[name], DOORS[door]

    def on(rank: int, copies: bool) -> None:
        mesh = cp_mesh(RANKS)
        model = apply(Layers(cores), mesh, verified=True)
        if copies:
            for grad in (True, False) * 3:
                with torch.set_grad_enabled(grad):
                    model(*parts(rank))
            original, model = model, WAYS[way](model)
            if ended:
                del original
                gc.collect()
            model.requires_grad_()  # AveragedModel's copy
        mistake.act(model, mesh, rank)

    texts = []
    for copies in (False, True):
        with pytest.raises(RankError, match=mistake.words) as caught:
            run_ranks(on, RANKS, copies, timeout_seconds=20)
        texts.append({rank: str(told) for rank, told in caught.value.errors.items()})
    assert texts[0] == texts[1]
    assert len(texts[0]) == RANKS


@pytest.mark.parametrize("door", DOORS)
def test_a_copy_is_exact_and_has_its_own_proof(door: str):
    cores, apply = DOORS[door]
    one = Layers(cores)
    whole = one(TOKENS, torch.arange(LENGTH)[None])
    wanted = nn.functional.cross_entropy(whole[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    wanted.backward()

    def on(rank: int) -> tuple[float, float, str]:
        mesh = cp_mesh(RANKS)
        model = apply(Layers(cores), mesh)
        copied = copy.deepcopy(model)
        del model
        gc.collect()
        sharder = BatchSharder(mesh)
        out = error(copied(*parts(rank)).detach(), LAYOUT.shard(whole.detach(), 1, rank))
        trained(copied, mesh, rank)
        sharder.sum_gradients(copied)
        grads = zip(copied.parameters(), one.parameters(), strict=True)
        proofs = {str(type(proof_of(copied).model()).__name__), str(proof_of(copied).missed)}
        return out, max(error(mine.grad, its.grad, whole=its.grad) for mine, its in grads), " ".join(sorted(proofs))

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        results = run_ranks(on, RANKS)
    assert max(max(out, grads) for out, grads, _ in results) < EXACT
    assert [proof for *_, proof in results] == ["Layers True"] * RANKS
    said = [str(each.message) for each in given if "runs context parallel" in str(each.message)]
    assert len(said) == 1
    assert said[0].startswith("Layers runs context parallel")


def test_a_copy_keeps_what_the_user_has_proved_and_no_more():
    def on(rank: int) -> list[bool]:
        mesh = cp_mesh(RANKS)
        model = in_a_module(Layers(), mesh, verified=True)
        early = copy.deepcopy(in_a_module(Layers(), mesh))
        part = copy.deepcopy(model.layers)  # a part: its outermost module has the proof
        proofs = [proof_of(each) for each in (model, copy.deepcopy(model), part, early)]
        assert len(set(proofs)) == 4
        return [proof.verified for proof in proofs]

    assert run_ranks(on, RANKS) == [[True, True, True, False]] * RANKS


def test_parameters_that_may_differ_are_of_the_copy_too():
    """A right program: each rank has experts of its own, and trains a copy."""

    def on(rank: int) -> None:
        mesh = cp_mesh(RANKS)
        model = Layers()
        with torch.no_grad():
            model.into.weight.mul_(1 + rank)
        in_a_module(model, mesh, verified=True, checks=Checks(local=[model.into, model.head.bias]))
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        for _ in range(2):
            trained(copied, mesh, rank)
            sum_gradients([x for x in copied.parameters() if x.shape != copied.into.weight.shape], mesh)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            copied.places.weight.add_(rank)  # these must not
        trained(copied, mesh, rank)

    with pytest.raises(RankError, match=r"places\.weight") as caught:
        run_ranks(on, RANKS)
    assert {*map(type, caught.value.errors.values())} == {UnreducedGradientsError}


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attentions, self.head = nn.ModuleList([SelfAttention(WIDTH)]), nn.Linear(WIDTH, 3)
        filled(self.double())

    def forward(self, x):
        for attention in self.attentions:
            x = x + attention(x)
        return self.head(x.mean(1))


def test_a_backbone_copied_finds_the_mean_of_its_own_reducer():
    """The copy is sharded by FSDP2, the model is not."""
    x, one = randn(5, 2, LENGTH, WIDTH), Pooled()
    one(x).square().sum().backward()

    def on(rank: int) -> float:
        mesh = cp_mesh(RANKS)
        model = parallelize_module(Pooled(), mesh, BackboneContextParallel(ModuleContextParallel(verified=True)))
        copied: Any = fully_shard(copy.deepcopy(model), mesh=mesh)
        copied(x).square().sum().backward()
        grads = zip(copied.parameters(), one.parameters(), strict=True)
        return max(error(mine.grad.full_tensor(), its.grad) for mine, its in grads)

    assert max(run_ranks(on, RANKS)) < EXACT


@pytest.mark.parametrize("door", DOORS)
def test_a_copy_that_is_made_in_a_forward(door: str):
    """As of a teacher that a hook makes at the first step."""
    cores, apply = DOORS[door]
    wanted = Layers(cores)(TOKENS, torch.arange(LENGTH)[None]).detach()

    def on(rank: int) -> float:
        made: list[Any] = []
        model = apply(Layers(cores), cp_mesh(RANKS), verified=True)
        model.layers[0].register_forward_pre_hook(lambda *_: None if made else made.append(copy.deepcopy(model)))
        model(*parts(rank))
        with pytest.raises(ValueError, match="were given the same tokens"):
            a_whole_batch(made[0], cp_mesh(RANKS), rank)
        return error(made[0](*parts(rank)).detach(), LAYOUT.shard(wanted, 1, rank))

    assert max(run_ranks(on, RANKS)) < EXACT
