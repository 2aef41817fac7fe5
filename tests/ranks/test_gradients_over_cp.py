"""Who sums the gradients over cp: FSDP2, DDP, ``sum_gradients``, and the warning when it is nobody.

Every test of this suite fails on an ``UnreducedGradientsWarning`` (see pyproject.toml), so the ones that train here
and elsewhere also show that there is no false alarm.
"""

from __future__ import annotations

import contextlib
import warnings
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cp_styles.batch import global_loss, global_token_count, sum_gradients
from cp_styles.functional import context_attention
from cp_styles.layout import SequenceLayout, contiguous
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import CommunicationTrace, run_ranks
from cp_styles.unreduced import ParameterWatch, UnreducedGradientsWarning
from tests.oracle import error, randn
from tests.ranks import composition
from tests.ranks.attention_case import Core, Projected, cp_mesh
from tests.ranks.composition import RANKS, Training, alone, dp_cp, one_cp, shard, training

# Sums in another order, a few 1e-16 a term, carried through three steps of AdamW, which divides by small numbers; the
# smallest mistake, one missing label out of 120, is 1e-3.
EXACT = 1e-11


def assert_same_training(make, steps: int) -> str:
    """On every rank: losses, first gradients and final parameters are one process'. Returns what rank 0 sent."""

    def on(rank: int):
        run = make().run(steps)
        return run.losses, run.gradients, run.parameters(), run.counted()

    single = alone(steps)
    runs = run_ranks(on, RANKS)
    for losses, gradients, parameters, _ in runs:
        assert losses == pytest.approx(single.losses, abs=EXACT)
        for found, wanted in ((gradients, single.gradients), (parameters, single.parameters())):
            assert max(error(found[name], wanted[name]) for name in found) < EXACT
    assert {name for run in runs for name in run[2]} == single.parameters().keys()  # stages have some of them each
    return runs[0][-1]


def test_sum_gradients_over_dp_and_cp():
    assert_expected_inline(
        assert_same_training(composition.by_sum_gradients, 3),
        """\
all_gather: 2 calls, 96 bytes
all_reduce: 4 calls, 217032 bytes
send: 30720 bytes""",
    )


def test_fsdp_over_dp_and_cp():
    assert_expected_inline(
        assert_same_training(composition.by_fsdp_over_dp_cp, 3),
        """\
all_gather: 7 calls, 201504 bytes
all_reduce: 2 calls, 24 bytes
reduce_scatter: 3 calls, 108480 bytes
send: 30720 bytes""",
    )


def test_fsdp_over_cp():
    assert_expected_inline(
        assert_same_training(composition.by_fsdp_over_cp, 3),
        """\
all_gather: 7 calls, 201696 bytes
all_reduce: 2 calls, 24 bytes
reduce_scatter: 3 calls, 108480 bytes
send: 106496 bytes""",
    )


def test_ddp_over_cp():
    assert_expected_inline(
        assert_same_training(composition.by_ddp_over_cp, 3),
        """\
all_gather: 2 calls, 288 bytes
all_reduce: 3 calls, 216984 bytes
broadcast: 2 calls, 276 bytes
send: 106496 bytes""",
    )


def test_hsdp_replicas_over_dp_shards_over_cp():
    assert_expected_inline(
        assert_same_training(composition.by_hsdp, 3),
        """\
all_gather: 7 calls, 134368 bytes
all_reduce: 5 calls, 72344 bytes
reduce_scatter: 3 calls, 72320 bytes
send: 30720 bytes""",
    )


def test_fsdp_over_dp_and_sum_gradients_over_cp():
    found = assert_same_training(composition.by_fsdp_over_dp_and_sum_gradients_over_cp, 3)
    assert_expected_inline(
        found,
        """\
all_gather: 7 calls, 134368 bytes
all_reduce: 4 calls, 72376 bytes
reduce_scatter: 3 calls, 72320 bytes
send: 30720 bytes""",
    )


def test_fsdp_over_cp_with_tensor_parallelism():
    """Sequence-parallel norms, whose gradients are partial sums over tp, are reduced over both."""
    assert_same_training(composition.by_fsdp_over_cp_with_tp, 3)  # what it sends differs between versions of torch


def test_fsdp_that_is_told_to_sum():
    """FSDP2's own divisor in place of ``averaged_over``. In float64: gloo has no scaled sum for float32."""

    def make() -> Training:
        mesh, both = dp_cp()
        model = shard(parallelize_module(composition.new_model(), mesh["cp"], composition.cp_plan(2)), both)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
        return training(model, mesh["cp"], both, dp=mesh["dp"])

    assert_same_training(make, 2)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("where", ["layers", "attention"])
@pytest.mark.parametrize("make", [composition.by_fsdp_over_cp, composition.by_fsdp_over_cp_with_tp])
def test_checkpointing_under_fsdp(make, where: str, use_reentrant: bool):
    """Whole layers, and the attention inside of them, recomputed in the middle of FSDP's and TP's backward."""

    def checkpointed() -> Training:
        run = make()
        for layer in run.model.layers:
            module = layer if where == "layers" else layer.attention
            module.forward = partial(checkpoint, module.forward, use_reentrant=use_reentrant)
        return run

    assert_same_training(checkpointed, 2)


@pytest.mark.parametrize("style", ["AttentionContextParallel", "ModuleContextParallel"])
def test_styles_on_what_fsdp_has_sharded(style: str):
    """The other order: FSDP2 first (the compositions above apply it last, as tensor parallelism asks for)."""

    def make() -> Training:
        cp = one_cp()
        module = {"layers.*": ModuleContextParallel(layout=composition.LAYOUTS[4])}
        model = shard(composition.new_model(), cp)
        parallelize_module(model, cp, module if style == "ModuleContextParallel" else composition.cp_plan(4))
        return training(model, cp, cp, averaged_over=cp.size())

    assert_same_training(make, 2)


def test_ddp_over_dp_and_cp():
    def make() -> Training:
        mesh, both = dp_cp()
        model = parallelize_module(composition.new_model(), mesh["cp"], composition.cp_plan(2))
        model = DistributedDataParallel(model, process_group=both.get_group())
        return training(model, mesh["cp"], both, dp=mesh["dp"], averaged_over=both.size())

    assert_same_training(make, 2)


@pytest.mark.parametrize("reducer", ["FSDP2", "DDP", "sum_gradients"])
def test_micro_batches_that_are_reduced_once(reducer: str):
    """Gradients of four micro-batches, each with the count of all of them, and one reduction after the last."""

    def make() -> Training:
        cp = one_cp()
        model = parallelize_module(composition.new_model(), cp, composition.cp_plan(4))
        if reducer == "FSDP2":
            shard(model, cp)
        elif reducer == "DDP":
            model = DistributedDataParallel(model, process_group=cp.get_group())

        def backward(batch):
            rows = [{name: x[row : row + 1] for name, x in batch.items()} for row in range(composition.ROWS)]
            layout, rank = composition.LAYOUTS[4], cp.get_local_rank()
            count = sum(global_token_count(layout.shard(row["labels"], 1, rank), cp) for row in rows)
            total = 0
            for index, row in enumerate(rows):
                last = index == len(rows) - 1
                if reducer == "FSDP2":
                    model.set_requires_gradient_sync(last)
                unsynced = reducer == "DDP" and not last
                with model.no_sync() if unsynced else contextlib.nullcontext():
                    losses, _ = composition.token_losses(model, row, cp)
                    averaged_over = 1 if reducer == "sum_gradients" else cp.size()
                    loss = global_loss(losses, count, cp, averaged_over=averaged_over)
                    loss.backward()
                total += loss.detach()
            if reducer == "sum_gradients":
                sum_gradients(model, cp)
            return total

        return Training(backward, model)

    assert_same_training(make, 3)


@pytest.mark.parametrize("make", [composition.by_fsdp_over_cp, composition.by_ddp_over_cp])
def test_a_rank_without_tokens(make, monkeypatch):
    """Its share of every gradient is zero, and its reducer waits for it all the same."""
    layout = SequenceLayout.from_chunks([[(0, 20)], [], [(20, 21), (30, 46)], [(21, 30)]])
    monkeypatch.setitem(composition.LAYOUTS, 4, layout)
    assert_same_training(make, 2)


def test_what_ddp_has_reduced_is_not_summed_again():
    def on(rank: int) -> None:
        run = composition.by_ddp_over_cp()
        run.backward(composition.batch_of(0))
        with pytest.raises(ValueError, match=r"has reduced its gradients there.*averaged_over=4"):
            sum_gradients(run.model, one_cp())

    run_ranks(on, RANKS)


def test_averaged_over_scales_the_gradient_alone():
    def on(rank: int):
        losses = torch.ones(3, dtype=torch.float64, requires_grad=True)
        loss = global_loss(losses, 4, cp_mesh(2), averaged_over=2)
        loss.backward()
        with pytest.raises(ValueError, match="averaged_over is a number of ranks, 1 where gradients are summed, got 0"):
            global_loss(losses, 4, cp_mesh(2), averaged_over=0)
        return loss.item(), losses.grad.tolist()

    assert run_ranks(on, 2) == [(1.5, [0.5, 0.5, 0.5])] * 2


# -- nobody does --


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
