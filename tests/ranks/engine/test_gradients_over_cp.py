"""Sums of gradients over cp by FSDP2, DDP and ``sum_gradients``, beside the compositions that run on processes:
tests/process/test_composition.py. For gradients that are not summed see test_unreduced.py."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cp_styles.batch import global_loss, global_token_count, sum_gradients
from cp_styles.layouts import SequenceLayout
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import run_ranks
from tests.covering import at_night
from tests.oracle import error
from tests.ranks import composition
from tests.ranks.attention_case import cp_mesh
from tests.ranks.composition import RANKS, Training, alone, dp_cp, one_cp, shard, training

# Sums in another order, a few 1e-16 a term, carried through two steps of AdamW, which divides by small numbers; the
# smallest mistake, one missing label out of 120, is 1e-3.
EXACT = 1e-11


def assert_same_training(make, steps: int) -> None:
    """On every rank: losses, first gradients and final parameters are one process'."""

    def on(rank: int):
        run = make().run(steps)
        return run.losses, run.gradients, run.parameters()

    single = alone(steps)
    runs = run_ranks(on, RANKS)
    for losses, gradients, parameters in runs:
        assert losses == pytest.approx(single.losses, abs=EXACT)
        for found, wanted in ((gradients, single.gradients), (parameters, single.parameters())):
            assert max(error(found[name], wanted[name]) for name in found) < EXACT
    assert {name for run in runs for name in run[2]} == single.parameters().keys()  # stages have some of them each


def test_fsdp_that_is_told_to_sum():
    """FSDP2's own divisor in place of ``averaged_over``. In float64: gloo has no scaled sum for float32."""

    def make() -> Training:
        mesh = dp_cp()
        model = parallelize_module(composition.new_model(), mesh["cp"], composition.cp_plan(2))
        model = shard(model, composition.dp_with_cp(mesh))
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
        return training(model, mesh)

    assert_same_training(make, 2)


@pytest.mark.parametrize("use_reentrant", [False, *at_night(True)])
@pytest.mark.parametrize("what", ["layers", *at_night("attention")])
@pytest.mark.parametrize("make", [composition.by_fsdp_over_cp, *at_night(composition.by_fsdp_over_cp_with_tp)])
def test_checkpointing_under_fsdp(make, what: str, use_reentrant: bool):
    """Whole layers, and the attention inside of them, recomputed in the middle of FSDP's and TP's backward."""

    def checkpointed() -> Training:
        run = make()
        for layer in run.model.layers:
            module = layer if what == "layers" else layer.attention
            module.forward = partial(checkpoint, module.forward, use_reentrant=use_reentrant)
        return run

    assert_same_training(checkpointed, 2)


@pytest.mark.parametrize("style", ["ModuleContextParallel", *at_night("AttentionContextParallel")])
def test_styles_on_what_fsdp_has_sharded(style: str):
    """The other order: FSDP2 first (the compositions above apply it last, as tensor parallelism asks for)."""

    def make() -> Training:
        cp = one_cp()
        module = {"layers.*": ModuleContextParallel(layout=composition.LAYOUTS[4])}
        model = shard(composition.new_model(), cp)
        parallelize_module(model, cp, module if style == "ModuleContextParallel" else composition.cp_plan(4))
        return training(model, cp, composition.cp_of, averaged_over=DeviceMesh.size)

    assert_same_training(make, 2)


@pytest.mark.nightly  # by default DDP over cp and FSDP2 over dp and cp: tests/process/test_composition.py
def test_ddp_over_dp_and_cp():
    def make() -> Training:
        mesh = dp_cp()
        model = parallelize_module(composition.new_model(), mesh["cp"], composition.cp_plan(2))
        model = DistributedDataParallel(model, process_group=composition.dp_with_cp(mesh).get_group())
        return training(model, mesh, averaged_over=DeviceMesh.size)

    assert_same_training(make, 2)


@pytest.mark.parametrize("reducer", ["FSDP2", *at_night("sum_gradients", "DDP")])
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

    assert_same_training(make, 2)


@pytest.mark.parametrize("make", [composition.by_fsdp_over_cp, *at_night(composition.by_ddp_over_cp)])
def test_a_rank_without_tokens(make, monkeypatch):
    """Its share of every gradient is zero, and its reducer waits for it all the same."""
    layout = SequenceLayout.from_chunks([[(0, 20)], [], [(20, 21), (30, 46)], [(21, 30)]])
    monkeypatch.setitem(composition.LAYOUTS, 4, layout)
    assert_same_training(make, 2)


def test_averaged_over_scales_the_gradient_alone():
    def on(rank: int):
        losses = torch.ones(3, dtype=torch.float64, requires_grad=True)
        loss = global_loss(losses, 4, cp_mesh(2), averaged_over=2)
        loss.backward()
        with pytest.raises(ValueError, match=r"averaged_over must be a number of ranks \(1 where .*\), got 0"):
            global_loss(losses, 4, cp_mesh(2), averaged_over=0)
        return loss.item(), losses.grad.tolist()

    assert run_ranks(on, 2) == [(1.5, [0.5, 0.5, 0.5])] * 2
