"""The error when nobody sums the gradients over cp, from models under torch.compile.

At night all of it, which tests/ranks/engine/test_unreduced.py holds by default for models that are not compiled.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from cp_styles.batch import sum_gradients
from cp_styles.checks.gradient_watch import UnreducedGradientsError
from cp_styles.comm.checks import Checks
from cp_styles.layouts import contiguous
from cp_styles.styles import ModuleContextParallel
from tests.covering import at_night
from tests.oracle import randn
from tests.ranks import training_scene
from tests.ranks.attention_case import Projected, cp_mesh
from tests.ranks.compiling import Grouped, cannot_compile_on_threads, on_every_rank, ranks_here, run_ranks
from tests.ranks.training_scene import RIGHT, inputs, steps_of

pytestmark = cannot_compile_on_threads

RANKS = 2
DOORS = ["style", "module", "function"]


class Layers(nn.Module):
    """Attentions with their projections, one after the other. One is compiled in half the time of two."""

    def __init__(self, number: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Projected(Grouped()) for _ in range(number)))

    def forward(self, x):
        return self.layers(x)


def attended(door: str, mesh, layers: int = 2, **options) -> nn.Module:
    return training_scene.attended(door, mesh, Layers(layers), **options)


warned, raised = (partial(act, run=run_ranks) for act in (training_scene.warned, training_scene.raised))


def compiled(model: nn.Module, how: str):
    """The whole model as one graph, or a graph a layer, with autograd between them as ever."""
    if how == "model":
        return torch.compile(model, backend="aot_eager", fullgraph=True)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize("how", ["model", *at_night("layers")])
@pytest.mark.parametrize("door", ["function", *at_night("style", "module")])
def test_a_model_that_nobody_reduces_is_an_error(door: str, how: str):
    def on(rank: int) -> None:
        model = attended(door, cp_mesh(RANKS), layers=1 if how == "model" else 2)
        steps_of(model, compiled(model, how))

    text = raised(on)
    assert "mesh axis 'cp' hold different parameters" in text
    assert "layers.0.q.weight (24, 10)" in text


@pytest.mark.nightly
@on_every_rank(RANKS)
def test_the_corrected_program_runs(mesh):
    """With the wrong model still there."""
    wrong, right = (attended("module", mesh, layers=1) for _ in range(2))
    with pytest.raises(UnreducedGradientsError):
        steps_of(wrong, compiled(wrong, "model"))
    steps_of(right, compiled(right, "model"), steps=5, reduce=lambda: sum_gradients(right, mesh))


@pytest.mark.nightly
@pytest.mark.parametrize("door", DOORS)
def test_a_warning_where_that_is_asked_for(door: str):
    def on(rank: int) -> None:
        model = attended(door, cp_mesh(RANKS), layers=1, checks=Checks(only_warn=True))
        steps_of(model, compiled(model, "model"), steps=5)

    texts = warned(on)
    assert len(texts) == ranks_here(RANKS)
    assert all("hold different parameters" in text for text in texts)


@pytest.mark.nightly
@on_every_rank(RANKS)
def test_what_differs_by_right_is_told_outside_of_graphs(mesh, rank: int):
    """By a style, or by a call that is not compiled."""
    model = Layers(1)
    check = Checks(local=(model.layers[0].q,))
    function = attended("function", mesh, layers=1, checks=check)
    with pytest.raises(Exception, match=r"cannot take Checks\(local=...\) into a graph"):
        compiled(function, "model")(randn(rank, 1, 4, 10))
    dist.barrier()
    parallelize_module(model, mesh, ModuleContextParallel(layout=contiguous, checks=check))
    shared = [x for name, x in model.named_parameters() if not name.startswith("layers.0.q")]
    steps_of(model, compiled(model, "model"), steps=4, reduce=lambda: sum_gradients(shared, mesh))


@pytest.mark.nightly
@on_every_rank(RANKS)
def test_a_compiled_optimizer(mesh, rank: int):
    model = attended("module", mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for seed in range(3):
        model(inputs(seed)).square().sum().backward()
        sum_gradients(model, mesh)
        step()
        optimizer.zero_grad()
        dist.barrier()


@pytest.mark.nightly  # by day a step of tests/process/compile_tp_cp.py, in which the warning would be an error
@pytest.mark.parametrize("case", ["own inputs", "another optimizer", "frozen", "no grad"])
def test_no_false_alarm(case: str):
    def on(rank: int) -> None:
        mesh = cp_mesh(RANKS)
        RIGHT[case](mesh, compiled(attended("module", mesh, layers=1), "model"))

    assert warned(on) == []


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["cp", "dp"])
def test_fsdp(axis: str):
    """FSDP frees what a unit gathered: the parameters of the others cannot be read then, those of the last one can.
    Over another axis than the sequence's nobody sums."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
        model = attended("style", mesh["cp"])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh[axis])
        fully_shard(model, mesh=mesh[axis])
        steps_of(model, compiled(model, "layers"), steps=5)

    assert warned(on) == [] if axis == "cp" else raised(on)


@pytest.mark.nightly
def test_parameters_of_tensor_parallelism_are_told():
    """DTensors on another axis, of which a rank has a part that it has in common with others along cp."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("cp", "tp"))
        model = attended("style", mesh["cp"], layers=1)
        parallelize_module(model, mesh["tp"], {f"layers.*.{name}": ColwiseParallel() for name in "qkv"})
        steps_of(model, compiled(model, "model"), steps=2)

    raised(on)
