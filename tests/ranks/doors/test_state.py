"""State of a parallel model: its keys, checkpoints that load on other meshes, copies, pickles."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize

from cp_styles.batch import sum_gradients
from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, striped
from cp_styles.masks import Causal
from cp_styles.styles import (
    AttentionContextParallel,
    ColwiseParallel,
    ModuleContextParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from cp_styles.testing import run_ranks
from tests.covering import at_night
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Core, Projected, cp_mesh, on_every_rank
from tests.ranks.composition import (
    LAYOUTS,
    Training,
    alone,
    batch_of,
    cp_of,
    cp_plan,
    new_model,
    one_cp,
    shard,
    training,
)
from tests.ranks.leak_scene import refusals
from tutorials.llama import parallel_plan

LENGTHS = {
    "contiguous": contiguous(11, 3),
    "head_tail": head_tail(13, 4),
    "striped": striped(40, 3),
    "by_work": by_work(100, 3, mask=Causal()),
    "a rank without tokens": SequenceLayout.from_chunks([[(0, 3), (5, 9)], [], [(3, 5)]]),
    "no tokens": contiguous(0, 2),
}


def cp_and_tp() -> tuple[DeviceMesh, Training]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    plan = parallel_plan(AttentionContextParallel(layout=LAYOUTS[2]))
    model = parallelize_module(new_model(), mesh, plan)
    return mesh, training(model, mesh, cp_of, sum_over=cp_of)


@on_every_rank(4)
def test_the_keys_are_those_of_the_plain_model():
    plain = new_model().state_dict()
    mesh, run = cp_and_tp()
    assert list(run.model.state_dict()) == list(plain)
    for style in (AttentionContextParallel(), ModuleContextParallel()):
        where = "layers.*.attention.core" if isinstance(style, AttentionContextParallel) else "layers.*"
        model = parallelize_module(new_model(), mesh["cp"], {where: style})
        state = model.state_dict()
        assert list(state) == list(plain)
        assert all(torch.equal(state[name], plain[name]) for name in plain)
        model.load_state_dict(plain)


# -- checkpoints --


def advance(run: Training, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(run.backward(batch_of(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def by_sum_gradients_over_cp() -> Training:
    cp = one_cp()
    return training(parallelize_module(new_model(), cp, cp_plan(4)), cp, cp_of, sum_over=cp_of)


def by_fsdp_over_cp() -> Training:
    cp = one_cp()
    model = shard(parallelize_module(new_model(), cp, cp_plan(4)), cp)
    return training(model, cp, cp_of, averaged_over=DeviceMesh.size)


@pytest.mark.parametrize("then", [by_fsdp_over_cp, *at_night(by_sum_gradients_over_cp)])
def test_a_checkpoint_of_cp_2_tp_2_goes_on_under_cp_4_tp_1(tmp_path, then: Callable[[], Training]):
    """Parameters and AdamW's moments; the four losses are those of one process that never stopped."""

    def before(rank: int) -> list[float]:
        _, run = cp_and_tp()
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3)
        losses = advance(run, optimizer, range(2))
        model_state, optimizer_state = get_state_dict(run.model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
        return losses

    def after(rank: int) -> list[float]:
        run = then()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()  # what is right afterwards was loaded
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3)
        model_state, optimizer_state = get_state_dict(run.model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
        set_state_dict(run.model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        return advance(run, optimizer, range(2, 4))

    wanted = alone(4).losses
    for losses in run_ranks(before, 4):
        assert losses == pytest.approx(wanted[:2], abs=1e-11)
    for losses in run_ranks(after, 4):
        assert losses == pytest.approx(wanted[2:], abs=1e-11)


@pytest.mark.parametrize("layout", LENGTHS.values(), ids=LENGTHS)
def test_a_layout_is_its_chunks_in_any_checkpoint(tmp_path, layout: SequenceLayout):
    """Plain tuples of integers: json, ``torch.save`` with its safe loader, and DCP bring the same layout back."""
    assert SequenceLayout.from_chunks(json.loads(json.dumps(layout.chunks))) == layout
    buffer = io.BytesIO()
    torch.save({"layout": layout.chunks}, buffer)
    buffer.seek(0)
    assert SequenceLayout.from_chunks(torch.load(buffer, weights_only=True)["layout"]) == layout
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout

    def on(rank: int) -> None:
        dcp.save({"layout": json.dumps(layout.chunks), "step": 3}, checkpoint_id=tmp_path)
        state = {"layout": "", "step": 0}
        dcp.load(state, checkpoint_id=tmp_path)
        assert SequenceLayout.from_chunks(json.loads(state["layout"])) == layout
        assert state["step"] == 3

    run_ranks(on, 2)


# -- copies and pickles --


def attended(model: Projected, mesh: DeviceMesh, rank: int) -> list[torch.Tensor]:
    """Output and parameter gradients over all ranks' rows."""
    model.zero_grad()
    out = model(contiguous(8, 2).shard(randn(7, 1, 8, 10), 1, rank))
    out.square().sum().backward()
    sum_gradients(model, mesh)
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


STYLES = [AttentionContextParallel, ModuleContextParallel]


@pytest.mark.parametrize("style", STYLES)
@on_every_rank(2)
def test_copies_of_a_parallel_module(mesh, rank: int, style):
    """As parallel as what they were copied from, with parameters of their own; what they share is the mesh."""
    model = Projected(Core())
    before = copy.deepcopy(model)
    parallelize_module(model.core, mesh, style(layout=contiguous))
    twin = copy.deepcopy(model)
    wanted = attended(model, mesh, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    again = copy.deepcopy(twin)  # a copy's copy
    for each in (twin, again):
        assert max(error(*pair) for pair in zip(attended(each, mesh, rank), wanted, strict=True)) < EXACT
    assert type(before.core) is Core


@pytest.mark.parametrize("style", STYLES)
@on_every_rank(2)
def test_pickles_of_a_parallel_module(mesh, style):
    """The weights are pickled as ever; the module is bound to processes, and says so."""
    model = Projected(Core())
    parallelize_module(model.core, mesh, style())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    Projected(Core()).load_state_dict(torch.load(buffer, weights_only=True))
    for dump in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        for module in (model, model.core):
            with pytest.raises(TypeError, match=r"Core is context parallel.*save its state_dict"):
                dump(module)


# -- twice --

TWICE = {
    "AttentionContextParallel": (Core, AttentionContextParallel),
    "ModuleContextParallel": (Core, ModuleContextParallel),
    "ColwiseParallel": (lambda: nn.Linear(4, 4), lambda: ColwiseParallel(mesh_axis="cp")),
    "RowwiseParallel": (lambda: nn.Linear(4, 4), lambda: RowwiseParallel(mesh_axis="cp")),
    "SequenceParallel": (lambda: nn.LayerNorm(4), lambda: SequenceParallel(mesh_axis="cp")),
    "PrepareModuleInput": (
        nn.Identity,
        lambda: PrepareModuleInput(mesh_axis="cp", input_layouts=Shard(1), desired_input_layouts=Replicate()),
    ),
    "PrepareModuleOutput": (
        nn.Identity,
        lambda: PrepareModuleOutput(mesh_axis="cp", output_layouts=Shard(1), desired_output_layouts=Replicate()),
    ),
    "PrepareModuleInputOutput": (
        nn.Identity,
        lambda: PrepareModuleInputOutput(
            mesh_axis="cp",
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        ),
    ),
}


@pytest.mark.parametrize(("module", "style"), TWICE.values(), ids=TWICE)
def test_a_style_applied_twice(module, style):
    """An error, and not a double shard; of a copy as well. A module of its own takes the same style object."""

    def act(scene) -> None:
        given, one = module(), style()
        parallelize_module(module(), scene.mesh, one)
        parallelize_module(copy.deepcopy(parallelize_module(given, scene.mesh, one)), scene.mesh, style())

    said = refusals(act)
    assert said.startswith("ValueError")
    assert type(module()).__name__ in said


def test_a_plan_applied_twice():
    def act(scene) -> None:
        mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("cp", "tp"))
        model = new_model()
        parallelize_module(model, mesh, parallel_plan(AttentionContextParallel()))
        parallelize_module(model, mesh, parallel_plan(AttentionContextParallel()))

    assert "RowwiseParallel over mesh axis 'tp' is on Embedding already" in refusals(act)


class Tempered(Core):
    """An attention module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))

    def forward(self, query, key, value):
        return super().forward(query * self.temperature.squeeze(0), key, value)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("order", ["parametrized first", "style first"])
@pytest.mark.parametrize("style", [ModuleContextParallel, AttentionContextParallel])
def test_parametrizations_come_and_go(style: Callable[..., Any], order: str):
    x, layout = randn(3, 1, 12, 10), head_tail(12, 2)
    wanted = Projected(Tempered())
    with torch.no_grad():
        wanted.q.weight.mul_(2), wanted.core.temperature.mul_(2)
        out = wanted(x)

    def on(rank: int) -> None:
        model = Projected(Tempered())
        classes = [type(module).__name__ for module in model.modules()]
        changes = [
            lambda: parametrize.register_parametrization(model.q, "weight", Doubled()),
            lambda: parametrize.register_parametrization(model.core, "temperature", Doubled()),
        ]
        applied = model if style is ModuleContextParallel else model.core
        apply = partial(parallelize_module, applied, cp_mesh(2), style(layout=layout))
        for change in (*changes, apply) if order == "parametrized first" else (apply, *changes):
            change()
        for each in (model, copy.deepcopy(model)):
            assert error(each(layout.shard(x, 1, rank)), layout.shard(out, 1, rank)) < EXACT
        parametrize.remove_parametrizations(model.q, "weight")  # of the copy too, which shares torch's class
        parametrize.remove_parametrizations(model.core, "temperature")
        assert error(model(layout.shard(x, 1, rank)), layout.shard(out, 1, rank)) < EXACT
        assert [type(module).__name__ for module in model.modules()] == classes

    run_ranks(on, 2)
