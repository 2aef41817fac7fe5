"""The warning if gradients are not summed over cp.

Every test of this suite fails on an ``UnreducedGradientsWarning`` (see pyproject.toml), so the ones that train, here
and elsewhere, show as well that there is no false alarm.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles.batch import sum_gradients
from cp_styles.engine.gradient_watch import ParameterWatch, UnreducedGradientsWarning
from cp_styles.functions.attention import context_attention
from cp_styles.layout import contiguous
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import randn
from tests.ranks import composition
from tests.ranks.attention_case import Core, Projected, cp_mesh
from tests.ranks.composition import RANKS, dp_cp, shard, training


def steps_of(model: nn.Module, act, *, steps: int = 3, reduce=lambda: None, micro: int = 1) -> None:
    """SGD steps on random inputs that differ between ranks, so that shares do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for part in range(micro):
            x = randn(1000 * torch.distributed.get_rank() + 10 * step + part, 1, 4, 10)
            act(x).square().sum().backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()


class ByFunction(Projected):
    """Its attention by ``context_attention``, with no style on it."""

    def __init__(self, mesh) -> None:
        super().__init__(Core())
        self.core.forward = lambda *qkv: context_attention(*qkv, mesh, layout=contiguous)


class Two(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def attended_by_style(mesh) -> nn.Module:
    model = Two(Projected(Core()), Projected(Core()))
    return parallelize_module(model, mesh, {"layers.*.core": composition.AttentionContextParallel(layout=contiguous)})


def attended_by_module(mesh) -> nn.Module:
    return parallelize_module(Two(Projected(Core()), Projected(Core())), mesh, ModuleContextParallel(layout=contiguous))


def attended_by_function(mesh) -> nn.Module:
    return Two(ByFunction(mesh), ByFunction(mesh))


def warned(act, ranks: int = 2) -> list[str]:
    """The warnings that ``act`` gives on all ranks together."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(act, ranks, timeout_seconds=20)
    return [str(each.message) for each in caught if issubclass(each.category, UnreducedGradientsWarning)]


DOORS = [attended_by_style, attended_by_module, attended_by_function]


@pytest.mark.parametrize("attended", DOORS)
@pytest.mark.parametrize("micro", [1, 3])
def test_a_model_that_nobody_reduces_is_told(attended, micro: int):
    """Once, on each rank, with micro-batches accumulated or not."""

    def on(rank: int) -> None:
        model = attended(cp_mesh(2))
        steps_of(model, model, steps=4, micro=micro)

    texts = warned(on)
    assert len(texts) == 2
    assert len(set(texts)) == 1
    for word in ("mesh axis 'cp' hold different parameters", "sum_gradients(model, mesh['cp'])", "FSDP2", "DDP"):
        assert word in texts[0]


def test_a_warning_turned_into_an_error_is_one_on_every_rank():
    def on(rank: int) -> None:
        model = attended_by_module(cp_mesh(2))
        with pytest.raises(UnreducedGradientsWarning):
            steps_of(model, model)

    run_ranks(on, 2, timeout_seconds=20)


def test_fsdp_over_the_wrong_axis_is_told():
    """Reduced over dp, by a reducer that hides when it writes parameters, and not over cp."""

    def on(rank: int) -> None:
        mesh, both = dp_cp()
        model = shard(parallelize_module(composition.new_model(), mesh["cp"], composition.cp_plan(2)), mesh["dp"])
        training(model, mesh["cp"], both, dp=mesh["dp"], averaged_over=2).run(3)

    assert len(warned(on, RANKS)) == RANKS


def test_tensor_parallel_shards_are_compared_along_cp_alone():
    """Told when they are not reduced, and silent (see the compositions above) when they are."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        attention = composition.AttentionContextParallel(layout=composition.LAYOUTS[2])
        model = parallelize_module(composition.new_model(), mesh, composition.parallel_plan(attention))
        training(model, mesh["cp"], mesh["cp"]).run(3)

    assert len(warned(on, RANKS)) == RANKS


@pytest.mark.parametrize("attended", DOORS)
@pytest.mark.parametrize("case", ["summed", "summed, micro-batches", "frozen", "no step", "own inputs", "no grad"])
def test_no_false_alarm(attended, case: str):
    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended(mesh)
        if case.startswith("summed"):
            micro = 3 if "micro" in case else 1
            steps_of(model, model, steps=5, reduce=lambda: sum_gradients(model, mesh), micro=micro)
        elif case == "frozen":  # and a head that is trained, locally, behind the last attention
            model.requires_grad_(False)
            head = nn.Linear(10, 10).double()
            steps_of(head, lambda x: head(model(x)))
        elif case == "no step":
            for seed in range(4):
                model(randn(seed + rank, 1, 4, 10)).sum().backward()
        elif case == "own inputs":  # leaves that differ by right
            model.requires_grad_(False)
            for seed in range(4):
                model(randn(seed + rank, 1, 4, 10).requires_grad_()).sum().backward()
        else:
            for parameter in model.parameters():
                parameter.data = parameter.data + rank
            with torch.no_grad():
                model(randn(rank, 1, 4, 10))

    assert warned(on) == []


def test_looks_grow_rare_and_send_nothing_more():
    def on(rank: int):
        weight = nn.Parameter(randn(0, 10, 10))
        watch, group = ParameterWatch(), cp_mesh(2).get_group()
        with CommunicationTrace() as trace:
            numbers = []
            for _ in range(20):
                numbers.append(watch.look([randn(rank, 3, 10) @ weight], group))
                watch.compare([0, 0], "nobody", "cp", group)
        assert not trace.events
        assert watch.look([randn(rank, 3, 10)], group) == 0  # nothing behind it
        watch.compare([0, 7], "nobody", "cp", group)  # one rank has nothing to say, so there is nothing to compare
        return [(index, number) for index, number in enumerate(numbers, 1) if number]

    first, second = run_ranks(on, 2)
    assert [index for index, _ in first] == [1, 2, 4, 8, 16]
    assert first == second


def test_a_refused_call_leaves_the_looks_in_step():
    """One rank refuses its input, all ranks hear of it, and the next step is compared as ever."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended_by_function(mesh)
        x = randn(0, 1, 2, 4, 6).requires_grad_()
        with pytest.raises(ValueError, match=r"refused|4 dims"):
            context_attention(x if rank else x[0], x, x, mesh)
        steps_of(model, model)

    assert len(warned(on)) == 2


def test_what_shows_in_the_number():
    """A step of the size of Adam's first, up here and down there; and one bit."""

    def on(rank: int):
        group = cp_mesh(2).get_group()
        signs = torch.ones(64).index_fill(0, torch.arange(32), -1.0)
        weights = [torch.ones(64), 1 + 1e-3 * signs, 1 - 1e-3 * signs, torch.ones(64).nextafter(2 * torch.ones(64))]
        weights += [torch.ones(64, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
        return [ParameterWatch().look([nn.Parameter(weight)], group) for weight in weights]

    first, second = run_ranks(on, 2)
    assert first == second
    assert len({*first}) == len(first)


def test_parameters_that_fsdp_gave_away_are_not_read():
    """The projections in FSDP units of their own: freed by the time of the attention."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended_by_style(mesh)
        for layer in model.layers:
            for name in ("q", "k", "v"):
                fully_shard(getattr(layer, name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps_of(model, model)

    assert warned(on) == []
