"""The error when nobody sums the gradients over cp, or somebody only those of some parameters.

It is raised in every test of this suite that trains, so these show as well that there is no false alarm.
"""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_styles.batch import sum_gradients
from cp_styles.checks import proof_of
from cp_styles.checks.gradient_watch import (
    ParameterWatch,
    UnreducedGradientsError,
    UnreducedGradientsWarning,
)
from cp_styles.comm.checks import Checks
from cp_styles.engine.observers import CheckedCall
from cp_styles.functions.attention import context_attention
from cp_styles.layouts import contiguous
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import CommunicationTrace, RankError, run_ranks
from tests.covering import at_night, sampled
from tests.oracle import randn
from tests.ranks import composition
from tests.ranks.attention_case import Core, Projected, cp_mesh, on_every_rank, refused
from tests.ranks.composition import RANKS, cp_of, dp_cp, shard, training
from tests.ranks.training_scene import DOORS, RIGHT, ByHand, Two, attended, inputs, raised, steps_of, warned

ONLY_WARN = Checks(only_warn=True)


@sampled(1, door=DOORS, micro=[1, 3])
def test_a_model_that_nobody_reduces_is_an_error_in_the_second_step(door: str, micro: int):
    """On each rank, with micro-batches accumulated or not."""
    steps = [0, 0]

    def on(rank: int) -> None:
        model = attended(door, cp_mesh(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: steps.__setitem__(rank, steps[rank] + 1))
        steps_of(model, model, steps=4, micro=micro, optimizer=optimizer)

    text = raised(on)
    assert steps == [1, 1]
    for word in (
        "mesh axis 'cp' hold different parameters",
        "of the 16 that were compared, layers.0.q.weight (24, 10)",
        "sum_gradients(model, mesh['cp'])",
        "FSDP2",
        "DDP",
        "Checks(local=[experts])",
    ):
        assert word in text


@pytest.mark.parametrize("door", [DOORS[0], *at_night(*DOORS[1:])])
def test_a_model_in_a_reentrant_checkpoint(door: str):
    """Its forward has no graph; no parameter is in front of it."""

    def on(rank: int) -> None:
        model = attended(door, cp_mesh(2))
        steps_of(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True), steps=4)

    assert "of the 16 that were compared, layers.0.q.weight (24, 10)" in raised(on)


def test_a_later_step_of_a_model_in_reentrant_checkpoints():
    """Checkpoints of layers, after right steps."""

    def on(rank: int) -> None:
        mesh, wrong = cp_mesh(2), False
        model = attended("module", mesh)
        model.layers.forward = lambda x: checkpoint(
            nn.Sequential.forward, model.layers, x.requires_grad_(), use_reentrant=True
        )
        reduce = lambda: wrong or sum_gradients(model, mesh)  # noqa: E731
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        steps_of(model, model, steps=3, reduce=reduce, optimizer=optimizer)
        wrong = True
        steps_of(model, model, steps=5, reduce=reduce, optimizer=optimizer)

    raised(on)


@pytest.mark.parametrize("door", [DOORS[0], *at_night(*DOORS[1:])])
def test_a_warning_where_that_is_asked_for(door: str):
    """Once, on each rank."""

    def on(rank: int) -> None:
        model = attended(door, cp_mesh(2), checks=ONLY_WARN)
        steps_of(model, model, steps=5)

    texts = warned(on)
    assert len(texts) == 2
    assert len(set(texts)) == 1
    assert "hold different parameters" in texts[0]


@on_every_rank(2)
def test_what_is_no_checks_object(mesh):
    with pytest.raises(TypeError, match=r"checks must be a Checks object such as Checks\(\), got 'warn'"):
        attended("style", mesh, checks="warn")
    with pytest.raises(TypeError, match="takes modules and parameters, got str"):
        Checks(local=("experts",))


ENDS = ["kept", "in a cycle"]


@sampled(1, door=[*DOORS, "fsdp"], end=ENDS)
@on_every_rank(2)
def test_a_wrong_model_does_not_make_a_right_one_fail(door: str, end: str):
    """In a notebook: the error, the program corrected, a new model. Or the wrong one was tried once, and is kept."""
    if door == "fsdp":  # over another axis, where optimizers have DTensors that graphs do not
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        model_of, cp = lambda: shard(attended("module", mesh["cp"]), mesh["dp"]), mesh["cp"]
    else:
        cp = cp_mesh(2)
        model_of = partial(attended, door, cp)
    model, cycle = model_of(), []
    if end == "kept":
        steps_of(model, model, steps=1)
    else:
        with pytest.raises(UnreducedGradientsError) as caught:
            steps_of(model, model)
        cycle += [cycle, caught.value]
        del model, caught
    again = model_of()
    steps_of(again, again, steps=5, reduce=lambda: sum_gradients(again, cp))
    wrong = model_of()
    with pytest.raises(UnreducedGradientsError):
        steps_of(wrong, wrong, steps=20)


@sampled(1, door=DOORS, by=["sum_gradients", "DDP"])
def test_zero(door: str, by: str):
    """ZeroRedundancyOptimizer, which steps each parameter on one rank and sends it to its peers."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended(door, mesh)
        act = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group()) if by == "DDP" else model
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        reduce = partial(sum_gradients, model, mesh) if by == "sum_gradients" else lambda: None
        steps_of(model, act, steps=5, reduce=reduce, optimizer=optimizer)

    assert warned(on) == []


@on_every_rank(2)
def test_who_goes_on_after_the_error_is_told_again(mesh):
    model = attended("module", mesh)
    with pytest.raises(UnreducedGradientsError):
        steps_of(model, model)
    for _ in range(5):
        with pytest.raises(UnreducedGradientsError):
            model(inputs(0))


class _Counted(torch.optim.SGD):
    """Counts its steps, so that a test knows in which one an error came."""

    steps = 0

    def step(self) -> None:
        super().step()
        self.steps += 1


class _CountedByHand(ByHand):
    """The same, with steps that no version of a parameter shows."""

    steps = 0

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters)

    def step(self) -> None:
        super().step()
        self.steps += 1


NEWS = {
    "another model": _Counted,
    "a layer unfrozen later": _Counted,
    "a layer unfrozen for an optimizer of somebody's own": _CountedByHand,
    "a layer with its first step": _Counted,
}


@sampled(1, door=DOORS, case=list(NEWS))
def test_news_after_a_right_training_is_compared_at_once(door: str, case: str):
    """In the step after the first wrong one, whatever was trained before: SFT and then DPO, or a notebook."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended(door, mesh)
        model.head.requires_grad_("unfrozen" not in case)
        summed = [*(model if case == "another model" else model.layers).parameters()]
        optimizer = _Counted(summed, lr=1e-3)
        steps_of(model, model, steps=9, reduce=lambda: sum_gradients(summed, mesh), optimizer=optimizer)
        model.zero_grad()
        if case == "another model":
            model, summed = attended(door, mesh), []
        model.head.requires_grad_()
        optimizer = NEWS[case](model.parameters(), lr=1e-2)
        try:
            steps_of(model, model, steps=8, reduce=lambda: summed and sum_gradients(summed, mesh), optimizer=optimizer)
        finally:
            assert optimizer.steps == 1

    raised(on)


def test_news_of_the_second_of_two_models():
    """Each has a forward in every step, and its own looks."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        both = nn.ModuleList(attended("module", mesh) for _ in range(2))
        late = both[1].head
        late.requires_grad_(False)
        summed, optimizer = [x for x in both.parameters() if x.requires_grad], _Counted(both.parameters(), lr=1e-4)

        def train(steps: int) -> None:
            reduce = lambda: sum_gradients(summed, mesh)  # noqa: E731
            steps_of(both, lambda x: both[0](x) + both[1](x), steps=steps, reduce=reduce, optimizer=optimizer)

        train(9)
        late.requires_grad_()
        try:
            train(8)
        finally:
            assert optimizer.steps == 10

    assert "2 of the 16 that were compared, head.weight" in raised(on)


@pytest.mark.parametrize("door", ["style", "module"])
def test_another_model_with_an_optimizer_of_somebodys_own(door: str):
    """Its attentions are counted from its first one. (7 attentions of the first model: the next is the 8th.)"""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended(door, mesh)
        for _ in range(5):
            model(inputs(0))
        model = attended(door, mesh)
        steps_of(model, model, steps=2, optimizer=ByHand(model.parameters()))

    raised(on)


@sampled(1, door=DOORS, left_out=["head", "layers.0", "layers.1"])
def test_parameters_that_are_left_out_are_named(door: str, left_out: str):
    """In front of an attention, between two, and behind the last."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended(door, mesh)
        others = [x for name, x in model.named_parameters() if not name.startswith(left_out)]
        steps_of(model, model, reduce=lambda: sum_gradients(others, mesh))

    text = raised(on)
    assert f"{2 if left_out == 'head' else 7} of the 16 that were compared, {left_out}." in text


def test_styles_on_parts_of_a_model_compare_the_whole():
    """Without a plan for it. The model is known by its forward."""

    def on(rank: int) -> None:
        mesh, model = cp_mesh(2), Two(Projected(Core()), Projected(Core()))
        for layer in model.layers:
            parallelize_module(layer.core, mesh, AttentionContextParallel(layout=contiguous))
        steps_of(model, model, reduce=lambda: sum_gradients(model.layers, mesh))

    assert "2 of the 16 that were compared, head.weight" in raised(on)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_ranks_with_other_parameters_compare_what_they_share(reduced: bool, used: bool):
    """An expert more on one rank."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended("module", mesh)
        shared = [*model.parameters()]
        if rank:
            model.extra = nn.Linear(10, 10).double()
        act = (lambda x: model(model.extra(x))) if rank and used else model
        steps_of(model, act, steps=5, reduce=lambda: reduced and sum_gradients(shared, mesh))

    if reduced:
        assert warned(on) == []
    else:
        assert "16 of the 16 that were compared" in raised(on)


@sampled(2, door=["style", "module"], axis=["dp", "cp"], originals=[False, True])
def test_fsdp1(door: str, axis: str, originals: bool):
    """Its parts over cp differ. Over another axis ranks along cp have the same ones, which nobody sums."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = FullyShardedDataParallel(
            attended(door, mesh["cp"]),
            process_group=mesh[axis].get_group(),
            auto_wrap_policy=ModuleWrapPolicy({Projected}),
            device_id=torch.device("cpu"),
            use_orig_params=originals,
        )
        steps_of(model, model, steps=5, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))

    if axis == "cp":
        assert warned(on, 4) == []
    else:
        errors = run_ranks(on, 4, return_errors=True)
        assert {type(error) for error in errors} == {UnreducedGradientsError}, errors


def test_what_fsdp_does_not_have_is_named():
    """Layers sharded over cp, and a head that nobody thought of."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended("style", mesh)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        steps_of(model, model)

    text = raised(on)
    assert "different parameters: 2 of the " in text
    assert "that were compared, head.weight (10, 10), head.bias (10,). " in text


def test_fsdp_over_another_axis_with_a_sum_of_some():
    """Its parameters are DTensors there, of which ranks along cp hold the same."""

    def on(rank: int) -> None:
        mesh = dp_cp()
        model = shard(parallelize_module(composition.new_model(), mesh["cp"], composition.cp_plan(2)), mesh["dp"])
        run = training(model, mesh, averaged_over=lambda mesh: mesh["dp"].size())
        backward = run.backward

        def partly(batch):
            loss = backward(batch)
            sum_gradients([x for name, x in model.named_parameters() if not name.startswith("out.")], mesh["cp"])
            return loss

        run.backward = partly
        run.run(3)

    text = raised(on, RANKS)
    assert "different parameters: 1 of the " in text
    assert "that were compared, out.weight (20, 32)." in text  # FSDP2 has it, and in a forward no module does


class WithExpert(Projected):
    """What no other rank has, as with experts that live on one rank: the same name, another parameter."""

    def __init__(self) -> None:
        super().__init__(Core())
        self.expert = nn.Linear(10, 10).double()
        self.expert.weight.data = randn(dist.get_rank(), 10, 10) / 3

    def forward(self, x):
        return super().forward(x + self.expert(x))


@pytest.mark.parametrize("named", [False, True])
def test_experts_that_live_on_one_rank(named: bool):
    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = Two(WithExpert(), WithExpert())
        experts = [layer.expert for layer in model.layers]
        check = Checks(local=(experts[0], *experts[1].parameters()) if named else ())
        parallelize_module(model, mesh, ModuleContextParallel(layout=contiguous, checks=check))
        mine = {id(x) for expert in experts for x in expert.parameters()}
        shared = [x for x in model.parameters() if id(x) not in mine]
        steps_of(model, model, steps=5, reduce=lambda: sum_gradients(shared, mesh))

    if named:
        run_ranks(on, 2)
    else:
        assert "layers.0.expert.weight (10, 10)" in (text := raised(on))
        assert "Checks(local=[experts])" in text


def test_ranks_that_begin_apart():
    def on(rank: int) -> None:
        model = attended("module", cp_mesh(2))
        model.layers[0].q.weight.data += rank
        model(inputs(0))

    assert "1 of the 16 that were compared, layers.0.q.weight" in raised(on)


def test_rounding_is_no_error():
    """Sums in another order on each rank, of float32 parameters: a warning, once; and an error when it is more."""

    def on(rank: int, apart: float = 3e-7) -> None:
        mesh = cp_mesh(2)
        model = attended("module", mesh).float()

        def act(x):
            return model(x.float())

        def reduce() -> None:
            sum_gradients(model, mesh)
            model.layers[0].q.weight.grad.mul_(1 + apart * rank)

        steps_of(model, act, steps=5, reduce=reduce)

    texts = warned(on)
    assert len(texts) == 2
    assert "1 of the 16 that were compared, layers.0.q.weight (24, 10). They differ by no more than" in texts[0]
    with pytest.raises(RankError, match="train different models"):
        run_ranks(partial(on, apart=3e-2), 2)


def test_a_warning_that_is_an_error_on_one_rank_is_one_on_every_rank():
    """``python -W error`` of one process: the others hear of it, and do not wait."""

    def on(rank: int) -> None:
        model = attended("module", cp_mesh(2), checks=ONLY_WARN)
        steps_of(model, model)

    def on_rank_1(message, category, *_, **__) -> None:
        # Not that of torch 2.11 when a style is applied.
        if dist.get_rank() == 1 and category is UnreducedGradientsWarning:
            raise message

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = on_rank_1
        first, second = run_ranks(on, 2, return_errors=True)
    assert isinstance(second, UnreducedGradientsWarning)
    assert isinstance(first, ValueError)
    assert "ranks [1] of mesh axis 'cp' have failed" in str(first)


def test_tensor_parallel_shards_are_compared_along_cp_alone():
    """Told when they are not reduced, and silent (see the compositions above) when they are."""

    def act(*_) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        attention = composition.AttentionContextParallel(layout=composition.LAYOUTS[2])
        model = parallelize_module(composition.new_model(), mesh, composition.parallel_plan(attention))
        training(model, mesh, cp_of).run(3)

    refused(act, "mesh axis 'cp' hold different parameters", UnreducedGradientsError, ranks=RANKS)


@sampled(1, door=DOORS, case=list(RIGHT))
def test_no_false_alarm(door: str, case: str):
    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        RIGHT[case](mesh, attended(door, mesh))

    assert warned(on) == []


def call_of(model: nn.Module, mesh, x: torch.Tensor) -> CheckedCall:
    """A call by a style on the model."""
    return CheckedCall(("nobody", "cp", mesh.get_group()), Checks(), [x], proof_of(model))


class Parts(nn.Module):
    """Two parts, whose calls the test makes in the forward of the whole."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = randn(seed, *parameter.shape)

    def forward(self, x, part: int, act):
        return act(self.parts[part], self.parts[part](x))


def test_check_interval_doubles_without_messages():
    """Over all parts of a model that have a style."""

    def on(rank: int):
        model, watch, mesh = Parts(), ParameterWatch(), cp_mesh(2)

        def act(part: nn.Module, x: torch.Tensor) -> int:
            call = call_of(part, mesh, x)
            number = watch.number(call)
            watch.judge([0, 0], call)
            return number

        with CommunicationTrace() as trace:
            numbers = [model(randn(rank, 3, 10), index % 2, act) for index in range(20)]
        assert not trace.events
        x = model.parts[0](randn(rank, 3, 10))
        assert act(model.parts[0], x.detach()) == 0  # no gradient
        call = call_of(model, mesh, x)
        call.model = None
        assert watch.number(call) == 0  # a function outside of a module
        watch.judge([0, 7], call)  # one rank has nothing to say, so there is nothing to compare
        return [(index, number) for index, number in enumerate(numbers, 1) if number]

    first, second = run_ranks(on, 2)
    assert [index for index, _ in first] == [1, 2, 4, 8, 16]
    assert first == second


def test_a_refused_call_leaves_the_looks_in_step():
    """One rank refuses its input, all ranks hear of it, and the next step is compared as ever."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended("function", mesh)
        x = randn(0, 1, 2, 4, 6).requires_grad_()
        with pytest.raises(ValueError, match=r"refused|4 dims"):
            context_attention(x if rank else x[0], x, x, mesh)
        steps_of(model, model)

    raised(on)


def test_checksum_detects_differences():
    """A step of the size of Adam's first, up here and down there; and one bit."""

    def on(rank: int):
        mesh = cp_mesh(2)
        signs = torch.ones(64).index_fill(0, torch.arange(32), -1.0)
        weights = [torch.ones(64), 1 + 1e-3 * signs, 1 - 1e-3 * signs, torch.ones(64).nextafter(2 * torch.ones(64))]
        weights += [torch.ones(64, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
        models = [nn.ParameterList([weight]) for weight in weights]
        return [ParameterWatch().number(call_of(model, mesh, model[0])) for model in models]

    first, second = run_ranks(on, 2)
    assert first == second
    assert len({*first}) == len(first)


def test_parameters_that_fsdp_gave_away_are_not_read():
    """The projections in FSDP units of their own: freed by the time of the attention."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = attended("style", mesh)
        for layer in model.layers:
            for name in ("q", "k", "v"):
                fully_shard(getattr(layer, name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps_of(model, model)

    assert warned(on) == []
