"""Tensor and context parallelism in one plan: a Llama on a (cp, tp) mesh trains as on one process.

The tutorial's model with its plan changed so that DTensors pass between its modules: between the projections and the
attention (on tp), or everywhere (on the composed mesh). float64. Gradients of one step within 1e-12 of one process's:
sums of some hundred terms in another order are 1e-15 each, and one key or one bias counted twice is 1e-2. Losses of 20
AdamW steps within 1e-9: a step divides by the root of a square, which lifts differences of tiny gradients.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from cp_styles import (
    AttentionContextParallel,
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Ulysses,
    global_loss,
    global_token_count,
    head_tail,
    next_token_labels,
    sum_gradients,
)
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import error, randn
from tests.ranks.tensor_parallel.tp_cp_case import composed_mesh
from tutorials.llama import Llama, LlamaConfig, parallel_plan

CONFIG = LlamaConfig(40, width=32, layers=1, heads=4, kv_heads=2, hidden=48)
ROWS, LENGTH, STEPS = 2, 24, 20
GRADIENTS, LOSSES = 1e-12, 1e-9


def new_model(config: LlamaConfig = CONFIG, *, biased: bool = True) -> Llama:
    """With biases where tensor parallelism sums: behind the attention and the feed-forward."""
    model = Llama(config)
    for layer in model.layers if biased else ():
        layer.attention.wo = nn.Linear(config.heads * config.head_dim, config.width)
        layer.feed_forward.w2 = nn.Linear(config.hidden, config.width)
    for index, parameter in enumerate(model.double().parameters()):
        drawn = randn(index, *parameter.shape)
        parameter.data = drawn * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + drawn / 10
    return model


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, next_token_labels(tokens)


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, Counter[str]] = field(default_factory=dict)

    def counted(self) -> str:
        """What a step sends over which axis."""
        return "\n".join(
            f"{axis}: " + ", ".join(f"{name} {count}" for name, count in sorted(calls.items()))
            for axis, calls in self.calls.items()
        )


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@cache
def alone(config: LlamaConfig = CONFIG, steps: int = STEPS) -> Run:
    model, run = new_model(config), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, labels = batch_of(step)
        loss = F.cross_entropy(model(tokens, torch.arange(LENGTH)).flatten(0, 1), labels.flatten())
        loss.backward()
        run.losses.append(loss.item())
        if step == 0:
            run.gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return run


Forward = Callable[[Llama, DeviceMesh, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(model: Llama, mesh: DeviceMesh, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return model(tokens, positions)


def train(
    mesh: DeviceMesh,
    parallelize: Callable[[Llama, DeviceMesh], None],
    *,
    config: LlamaConfig = CONFIG,
    steps: int = STEPS,
    forward: Forward = plain,
    around_loss: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    backward_inside: bool = True,
) -> Run:
    """The same steps on this rank; ``backward_inside``: of ``around_loss``, else only the loss's own backward is."""
    model, run, cp = new_model(config), Run(), mesh["cp"]
    parallelize(model, mesh)
    layout, own = head_tail(LENGTH, cp.size()), cp.get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, labels = (layout.shard(x, 1, own) for x in batch_of(step))
        with CommunicationTrace() as trace:
            with around_loss():
                logits = forward(model, mesh, tokens, layout.positions(own))
                of_loss = logits if backward_inside else logits.detach().requires_grad_()
                losses = F.cross_entropy(of_loss.flatten(0, 1), labels.flatten(), reduction="sum")
                loss = global_loss(losses, global_token_count(labels, cp), cp)
                loss.backward()
            if not backward_inside:
                logits.backward(of_loss.grad)
            sum_gradients(model, cp)
        run.losses.append(loss.item())
        if step == 0:
            run.gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        if step == 1 or steps == 1:  # the first step sets groups up
            run.calls = {name: trace.calls_over(mesh[name]) for name in mesh.mesh_dim_names or ()}
            assert sum(sum(calls.values()) for calls in run.calls.values()) == sum(trace.calls.values())
        optimizer.step()
        optimizer.zero_grad()
    return run


def check(runs: list[Run], config: LlamaConfig = CONFIG) -> Run:
    """All ranks' losses and gradients are one process's; the first rank's run."""
    expected = alone(config)
    for run in runs:
        assert run.gradients.keys() == expected.gradients.keys()
        for name, gradient in run.gradients.items():
            assert error(gradient, expected.gradients[name]) < GRADIENTS, name
        for mine, theirs in zip(run.losses, expected.losses, strict=False):
            assert abs(mine - theirs) < LOSSES
    assert all(run.calls == runs[0].calls for run in runs)
    return runs[0]


# -- plans --


def dtensor_plan(attention: AttentionContextParallel, *, kv=None) -> dict:
    """DTensors on tp from the projections through the attention; the rotary table becomes one too."""
    plan = parallel_plan(attention)
    del plan["layers.*.attention.w[qkv]"]
    return {
        **plan,
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), Replicate()), desired_input_layouts=(Replicate(), Replicate())
        ),
        "layers.*.attention.wq": ColwiseParallel(use_local_output=False),
        "layers.*.attention.w[kv]": kv or ColwiseParallel(use_local_output=False),
    }


def whole_dtensor_plan(attention: AttentionContextParallel) -> dict:
    """DTensors on the composed mesh between all modules; no module is told to gather, each style does on its axis."""
    stay = {"use_local_output": False}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **stay),
        "layers.*.attention_norm": SequenceParallel(**stay),
        "layers.*.attention.w[qkv]": ColwiseParallel(input_layouts=Shard(1), **stay),
        "layers.*.attention.core": attention,
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1), **stay),
        "layers.*.feed_forward_norm": SequenceParallel(**stay),
        "layers.*.feed_forward.w[13]": ColwiseParallel(input_layouts=Shard(1), **stay),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), **stay),
        "norm": SequenceParallel(**stay),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), **stay),
    }


def by(plan: dict) -> Callable[[Llama, DeviceMesh], None]:
    def parallelize(model: Llama, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh, plan)

    return parallelize


# -- the tests --


def table_on_the_mesh(model: Llama, mesh: DeviceMesh) -> None:
    """The rotary table meets DTensors of the composed mesh, so it must be one."""

    def hook(module: nn.Module, args):
        x, table = args
        if not isinstance(table, DTensor):
            table = DTensor.from_local(table, mesh, [Shard(1), Replicate()], run_check=False)
        return x, table

    for layer in model.layers:
        layer.attention.register_forward_pre_hook(hook)


def on_the_mesh(model: Llama, mesh: DeviceMesh, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    tokens = DTensor.from_local(tokens, mesh, [Shard(1), Replicate()], run_check=False)
    logits = model(tokens, positions)
    assert isinstance(logits, DTensor)
    assert logits.placements == (Shard(1), Replicate())
    return logits.to_local()


def between(mesh: DeviceMesh, steps: int = 1) -> Run:
    """DTensors between projections and attention."""
    return train(mesh, by(dtensor_plan(AttentionContextParallel())), steps=steps)


def end_to_end(mesh: DeviceMesh, steps: int = 1) -> Run:
    """No module gathers the sequence over cp, whatever has a bias: over cp go the ring and the loss and gradients."""

    def parallelize(model: Llama, mesh: DeviceMesh) -> None:
        by(whole_dtensor_plan(AttentionContextParallel()))(model, mesh)
        table_on_the_mesh(model, mesh)

    return train(mesh, parallelize, forward=on_the_mesh, steps=steps)


ONE_KEY_HEAD = replace(CONFIG, kv_heads=1)


def one_key_head(mesh: DeviceMesh) -> Run:
    """For two tp ranks: gathered over tp behind its projection, its gradient summed there."""
    gathered = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    plan = dtensor_plan(AttentionContextParallel(strategy=Ulysses()), kv=gathered)
    return train(mesh, by(plan), config=ONE_KEY_HEAD, steps=1)


def with_loss_parallel(mesh: DeviceMesh, barrier: threading.Barrier, inside: bool = True) -> Run:
    """It puts handlers into DTensor's table and takes them out again; ours stay, for the backward too."""
    plan = dtensor_plan(AttentionContextParallel())
    plan["out"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)

    @contextlib.contextmanager
    def shared():
        """One table for all threads: the first rank changes it while the others wait."""
        context = loss_parallel()
        barrier.wait()
        if mesh.get_rank() == 0:
            context.__enter__()
        barrier.wait()
        yield
        barrier.wait()
        if mesh.get_rank() == 0:
            context.__exit__(None, None, None)
        barrier.wait()

    try:
        return train(mesh, by(plan), steps=1, around_loss=shared, backward_inside=inside)
    except BaseException:
        barrier.abort()
        raise


def test_every_plan_is_the_training_of_one_process():
    """On one mesh, for which DTensor finds the placements of each operation once."""
    barrier = threading.Barrier(4)

    def on(rank: int) -> list[Run]:
        mesh = composed_mesh()
        local = train(mesh, by(parallel_plan(AttentionContextParallel())), steps=1)
        return [local, between(mesh), end_to_end(mesh), one_key_head(mesh), with_loss_parallel(mesh, barrier)]

    plans = [list(runs) for runs in zip(*run_ranks(on, 4), strict=True)]
    configs = [CONFIG, CONFIG, CONFIG, ONE_KEY_HEAD, CONFIG]
    counted = [check(runs, config).counted() for runs, config in zip(plans, configs, strict=True)]
    assert_expected_inline(
        "\n".join(counted),
        """\
cp: all_gather 5, all_reduce 3, send 3
tp: all_gather 7, all_reduce 3, reduce_scatter 6
cp: all_gather 5, all_reduce 3, send 3
tp: all_gather 7, all_reduce 3, reduce_scatter 6
cp: all_gather 5, all_reduce 3, send 3
tp: all_gather 10, all_reduce 3, reduce_scatter 9
cp: all_gather 5, all_reduce 3, all_to_all 4
tp: all_gather 9, all_reduce 5, reduce_scatter 6
cp: all_gather 5, all_reduce 3, send 3
tp: all_gather 6, all_reduce 6, reduce_scatter 6""",
    )


@pytest.mark.nightly
@pytest.mark.parametrize("training", [between, end_to_end])
def test_twenty_steps(training: Callable[..., Run]):
    check(run_ranks(lambda rank: training(composed_mesh(), steps=STEPS), 4))


@pytest.mark.nightly
def test_a_backward_after_loss_parallel():
    barrier = threading.Barrier(4)
    check(run_ranks(lambda rank: with_loss_parallel(composed_mesh(), barrier, inside=False), 4))


def test_a_part_that_is_a_view():
    """What layout.shard cuts has gaps in memory: by the strides torch joins the rows of a Linear."""
    x, gradient = randn(0, 2, 8, 6), randn(1, 2, 8, 4)
    linear = nn.Linear(6, 4).double()
    expected = linear(x)
    expected.backward(gradient)

    def on(rank: int) -> None:
        mesh = composed_mesh()
        mine = copy.deepcopy(linear)
        mine.zero_grad()
        parallelize_module(mine, mesh, ColwiseParallel(use_local_output=False))
        own = mesh.get_local_rank("cp")
        part, wanted, cotangent = (whole.detach()[:, own * 4 : own * 4 + 4] for whole in (x, expected, gradient))
        assert not part.is_contiguous()
        out = mine(DTensor.from_local(part, mesh, [Shard(1), Replicate()], run_check=False))
        assert (out.device_mesh, out.placements, out.shape) == (mesh, (Shard(1), Shard(2)), expected.shape)
        assert torch.allclose(out.redistribute(mesh, [Shard(1), Replicate()]).to_local(), wanted, rtol=0, atol=1e-14)
        out.redistribute(mesh, [Shard(1), Replicate()]).to_local().backward(cotangent)
        sum_gradients(mine, mesh["cp"])
        for name, parameter in mine.named_parameters():
            alone = linear.get_parameter(name).grad
            assert alone is not None
            assert torch.allclose(whole(parameter.grad), alone, rtol=0, atol=1e-13)

    run_ranks(on, 4)


def refused(style, *placements, names=("cp", "tp"), shape=(2, 4, 6)) -> str:
    """What every rank says to a DTensor that is placed so on the composed mesh."""

    def on(rank: int) -> str:
        mesh = composed_mesh(names=names)
        module = nn.LayerNorm(6) if isinstance(style, SequenceParallel) else nn.Linear(6, 4)
        parallelize_module(module, mesh, style)
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            module(DTensor.from_local(torch.zeros(shape), mesh, placements, run_check=False))
        return str(caught.value)

    texts = run_ranks(on, 4)
    assert len(set(texts)) == 1, texts
    return texts[0]


def test_what_styles_on_one_axis_refuse_of_the_composed_mesh():
    colwise = ColwiseParallel()
    for placement in (Replicate(), Shard(2)):
        assert "every axis other than 'tp' must cut rows, such as Shard(1)" in refused(colwise, placement, Replicate())
    text = "'tp' must come after the axes that cut the same dim, as tp in ('cp', 'tp')"
    assert text in refused(colwise, Shard(1), Shard(1), names=("tp", "cp"))
    rowwise = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    assert "axis of the style must come after the axes that cut the same dim" in refused(
        rowwise, Replicate(), Shard(1), names=("tp", "cp")
    )
    prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    assert "but this style takes DTensors on 'tp' alone" in refused(prepare, Shard(1), Replicate())


@pytest.mark.nightly  # by day an attention: test_tp_attention.py
@pytest.mark.parametrize("names", [("cp", "dp", "tp"), ("tp", "cp"), ("dp", "cp", "tp")], ids=str)
def test_other_meshes(names):
    sizes = tuple({"dp": 1}.get(name, 2) for name in names)
    plan = dtensor_plan(AttentionContextParallel())
    check(run_ranks(lambda rank: train(composed_mesh(*sizes, names=names), by(plan), steps=1), 4))
