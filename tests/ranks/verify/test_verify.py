"""verify on a whole model: its report, and the command. test_wrong_programs.py has the mistakes that it names."""

from __future__ import annotations

import copy
import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    BatchSharder,
    Causal,
    ModuleContextParallel,
    UnverifiedModelWarning,
    context_attention,
    flex_attention,
    global_loss,
    global_token_count,
    head_tail,
    next_token_labels,
    parallelize_module,
    sum_gradients,
)
from cp_styles.__main__ import main
from cp_styles.checks import proof_of
from cp_styles.collectives.notes import Losses
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import Role
from cp_styles.testing import MemoryTrace, RankError, run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import Report, VerificationError, verify
from cp_styles.verify.compare import ShardLookup, Squares, gradient_errors, output_errors, squares
from cp_styles.verify.step import ModelState
from tests.covering import at_night, rows_at_night, sampled
from tutorials.llama import Llama, LlamaConfig, parallel_plan

LENGTH, RANKS = 22, 2
CONFIG = LlamaConfig(vocabulary=32, width=16, layers=1, heads=4, kv_heads=2, hidden=24)
PARAMETERS = 12


def llama() -> Llama:
    generator = torch.Generator().manual_seed(0)
    model = Llama(CONFIG).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


WIDE = LlamaConfig(vocabulary=32, width=128, layers=2, heads=4, kv_heads=2, hidden=384)
TOKENS = torch.randint(0, 32, (2, LENGTH), generator=torch.Generator().manual_seed(1))
CORES = {"layers.*.attention.core": AttentionContextParallel()}
REDUCED = "gradients", "a count", "a log", "a gather", "functional", "in the backward"


def step(
    model: nn.Module,
    batch: Any,
    mesh: Any,
    *,
    mean: Callable[..., torch.Tensor] = lambda losses, labels, cp: global_loss(
        losses, global_token_count(labels, cp), cp
    ),
    reduce: Callable[..., None] = sum_gradients,
) -> torch.Tensor:
    """A training step, with a mistake in one of its parts where a test puts one."""
    cp = mesh["cp"] if mesh.ndim > 1 else mesh
    layout, rank = head_tail(batch["tokens"].shape[1], cp.size()), cp.get_local_rank()
    wanted = layout.shard(next_token_labels(batch["tokens"]), 1, rank)
    logits = model(layout.shard(batch["tokens"], 1, rank), layout.positions(rank))
    losses = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    loss = mean(losses, wanted, cp)
    loss.backward()
    reduce(model, cp)
    return loss


def parallel(model: nn.Module, plan: Any, mesh: Any) -> nn.Module:
    """A copy of the model for this rank, with the plan."""
    model = copy.deepcopy(model)
    return plan(model, mesh) if callable(plan) else parallelize_module(model, mesh, plan)


def run(
    model: nn.Module,
    plan: Any = CORES,
    act: Callable[..., Any] = step,
    *,
    batch: Any = None,
    ranks: int = RANKS,
    tolerance: float | None = 1e-10,
    **options: Any,
) -> list[Report]:
    batch = {"tokens": TOKENS} if batch is None else batch

    def on(rank: int) -> Report:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        given = batch(rank) if callable(batch) else batch
        return verify(parallel(model, plan, mesh), mesh, given, act, tolerance=tolerance, **options)

    return run_ranks(on, ranks)


def wrong(*args: Any, words: str, findings: int | None = 1, **options: Any) -> Report:
    """Every rank raises the same; there is one finding, with these words."""
    with pytest.raises(RankError) as caught:
        run(*args, **options)
    errors = list(caught.value.errors.values())
    assert len(errors) == RANKS
    assert all(isinstance(error, VerificationError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    report = errors[0].report
    assert findings is None or len(report.findings) == findings, report.findings
    assert re.search(words, report.findings[0]), report.findings
    return report


def mistake(**parts: Any) -> Callable[..., torch.Tensor]:
    """The step with a part that differs on ranks."""
    return lambda model, batch, mesh: step(model, batch, mesh, **parts)


# No false alarm.


@sampled(1, plan=[CORES, ModuleContextParallel()], ranks=[2, 3])
def test_a_step_that_is_exact(plan, ranks: int):
    reports = run(llama(), plan, ranks=ranks)
    assert len({str(report) for report in reports}) == 1
    report = reports[0]
    assert not report.findings
    assert all(each.forward is not None and each.forward < 1e-10 for each in report.modules)
    names, worst = {each.name for each in report.modules}, max(error for _, error in report.parameters)
    assert 0 < worst < 1e-10
    assert names >= {"", "embed", "layers.0.attention.core"}
    assert len(report.parameters) == len(list(llama().parameters()))
    assert report.loss[1:] == pytest.approx([report.loss[0]] * ranks)
    text = str(report)
    assert text.isascii()
    assert max(map(len, text.splitlines()[1:])) < 110
    assert text.splitlines()[0].endswith(
        f"equal to one device: {len(names)} modules, {PARAMETERS} gradients, worst {worst:.0e}; "
        f"a planted mistake moved {PARAMETERS} of {PARAMETERS} gradients"
    )


def test_the_power_of_a_proof_is_in_its_line():
    """Gradients that the planted mistake moves, with names of zeros; outputs in a step without a backward."""
    model = llama()
    nn.init.zeros_(model.layers[0].attention.wo.weight)
    report = run(model)[0]
    assert report.power is not None
    before = ("attention.wk", "attention.wq", "attention.wv", "attention_norm")
    assert report.power.zero == tuple(f"layers.0.{name}.weight" for name in before)
    words = rf"moved \d of {PARAMETERS} gradients \(4 of {PARAMETERS} gradients are exactly 0, in layers.0.attention.w"
    assert re.search(words, report.line)
    assert 0 < report.power.moved <= PARAMETERS - 4

    def without_gradients(model, batch, mesh):
        with torch.no_grad():
            layout, rank = head_tail(LENGTH, mesh.size()), mesh.get_local_rank()
            model(layout.shard(batch["tokens"], 1, rank), layout.positions(rank))

    report = run(llama(), act=without_gradients)[0]
    assert report.power is not None
    assert 3 < report.power.moved < report.power.of == len(report.modules)  # not the layers in front of the attention
    assert report.line.endswith(f"a planted mistake moved {report.power.moved} of {report.power.of} outputs")


def test_only_what_was_compared_is_proved():
    """One of two models of a step. Gradients that the second one had before are there afterwards."""

    def on(rank: int) -> tuple[bool, ...]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        actor, critic = (parallel(llama(), ModuleContextParallel(), mesh) for _ in range(2))
        before = [torch.full_like(x, 7) for x in critic.parameters()]
        for x, grad in zip(critic.parameters(), before, strict=True):
            x.grad = grad

        def act(model, batch, mesh):
            loss = step(model, batch, mesh)
            step(critic, batch, mesh)
            return loss

        report = verify(actor, mesh, {"tokens": TOKENS}, act, tolerance=1e-10)
        assert len(report.parameters) == 2 * PARAMETERS
        assert [name for name, _ in report.parameters][-1].startswith("outside of the model: Llama.")
        assert all(
            x.grad is grad and bool((grad == 7).all()) for x, grad in zip(critic.parameters(), before, strict=True)
        )
        return proof_of(actor).verified, proof_of(critic).verified, proof_of(critic.layers[0]).verified

    assert run_ranks(on, 2) == [(True, False, False)] * 2


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def test_a_proof_that_is_blind():
    """Equal tokens hide a mean over the tokens of a rank. With other tokens it is found."""

    model, plan = llama(), ModuleContextParallel()
    model.layers[0].feed_forward = nn.Sequential(model.layers[0].feed_forward, Centred())
    report = wrong(model, plan, batch={"tokens": torch.zeros_like(TOKENS)}, words="^the proof is blind.*equal")
    assert report.line.endswith(": NOT PROVED")
    assert report.power is not None
    assert (report.power.moved, report.power.loss) == (0, False)
    wrong(model, plan, words="carries values from token to token")


@pytest.mark.parametrize(
    ("what", "fixed"),
    [*((what, False) for what in REDUCED), ("functional", True), *rows_at_night(*((what, True) for what in REDUCED))],
)
def test_a_group_that_is_not_of_the_mesh(what: str, fixed: bool):
    """A right step that communicates over the default group. With the group of the given mesh it is proved."""

    def act(model, tokens, mesh):
        sharder, group = BatchSharder(mesh), mesh.get_group() if fixed else dist.group.WORLD
        batch = sharder(tokens)
        logits = model(batch.tokens, batch.positions)
        losses = cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
        loss = batch.loss(logits)
        if what == "a count":
            count = (batch["shift_labels"] >= 0).sum()
            dist.all_reduce(count, group=group)
            loss = losses / count
        if what == "a log":
            dist.all_reduce(loss.detach().clone(), group=group)
        if what == "a gather":
            dist.all_gather_object([None] * dist.get_world_size(group), loss.item(), group=group)
        if what == "functional":
            funcol.all_reduce(loss.detach(), "sum", group).sum()
        if what == "in the backward":
            logits.register_hook(lambda gradient: dist.all_reduce(gradient.clone(), group=group))
        loss.backward()
        if what == "gradients":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        else:
            sharder.sum_gradients(model)

    if fixed:
        assert not run(llama(), ModuleContextParallel(), act, batch=TOKENS)[0].findings
    else:
        words = (
            r"^the step with one rank communicates over the ranks \[0, 1\]: \w+ at test_verify.py:\d+, in .*get_group"
        )
        wrong(llama(), ModuleContextParallel(), act, batch=TOKENS, words=words)


def in_module(name: str, code: str, **names: Any) -> Callable[..., Any]:
    """The function ``run`` of a module that is not installed."""
    made = {"__name__": name, "dist": dist, **names}
    exec(code, made)
    return made["run"]


@pytest.mark.parametrize("by_trl", [True, False])
def test_metrics_of_trl(by_trl: bool):
    """Its losses combine metrics over all processes by accelerate. The same call by the user's step is refused."""
    combine = in_module("accelerate.utils.operations", "def run(x):\n    dist.all_reduce(x)\n    return x")
    metrics = in_module("trl.trainer.sft_trainer", "def run(x):\n    return combine(x)", combine=combine)

    def act(model, tokens, mesh):
        sharder = BatchSharder(mesh)
        batch = sharder(tokens)
        loss = batch.loss(model(batch.tokens, batch.positions))
        (metrics if by_trl else combine)(loss.detach().clone())
        loss.backward()
        sharder.sum_gradients(model)

    if by_trl:
        assert not run(llama(), ModuleContextParallel(), act, batch=TOKENS)[0].findings
    else:
        wrong(llama(), ModuleContextParallel(), act, batch=TOKENS, words=r"all_reduce at test_verify.py:\d+, in act")


def test_collectives_that_change_nothing_with_equal_values():
    """Over the default group too, and FSDP2's own, with a norm of gradients, over the ranks of the sequence."""

    def act(model, batch, mesh):
        def mean(losses, labels, cp):
            return global_loss(losses, global_token_count(labels, cp), cp, averaged_over=cp.size())

        def clip(model, cp):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

        loss = step(model, batch, mesh, mean=mean, reduce=clip)
        dist.all_reduce(loss.detach().clone(), op=dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(1), 0)
        dist.barrier()
        return loss

    def plan(model, mesh):
        return fully_shard(parallelize_module(model, mesh, CORES), mesh=mesh)

    assert not run(llama(), plan, act)[0].findings


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class FlexCore(nn.Module):
    """FlexAttention with a score_mod or a BlockMask of the whole sequence, as a model of one device has it."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, q, k, v):
        def causal(b, h, query, key):
            return query >= key

        if self.masked:
            mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

        def score(logits, b, h, query, key):
            return torch.where(query >= key, logits, float("-inf"))

        return flex_attention(q, k, v, score_mod=score, enable_gqa=True)


@sampled(1, plan=[ModuleContextParallel(), None], masked=[False, True])
def test_flex_attention_on_a_cpu(plan, masked: bool):
    """torch's own has no backward on a CPU. The run with one rank, and a plain step, attend by kernels of ours."""
    model = llama()
    for layer in model.layers:
        layer.attention.core = FlexCore(masked)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]

    def old(model, batch, mesh=None):
        logits = model(batch["tokens"], torch.arange(LENGTH))[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
        loss.backward()
        return loss

    if plan is None:
        run(model, lambda model, mesh: model, in_a_block)
    else:
        run(model, plan)
        run(model, plan, plain=old)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        old(model, {"tokens": TOKENS})  # else the test shows nothing


class Slope(nn.Module):
    """A score_mod that reads an attribute, which ranks do not compare."""

    slope = 0.0

    def score(self, logits, b, h, query, key):
        return torch.where(query >= key, logits - self.slope * (query - key), float("-inf"))

    def forward(self, q, k, v):
        return flex_attention(q, k, v, score_mod=self.score, enable_gqa=True)


@pytest.mark.parametrize("more", [0.0, 0.05])
def test_scores_that_differ_by_an_attribute(more: float):
    def plan(model: nn.Module, mesh: Any) -> nn.Module:
        for layer in model.layers:
            layer.attention.core = Slope()
            layer.attention.core.slope = 0.1 + more * dist.get_rank()
        return parallelize_module(model, mesh, ModuleContextParallel())

    if more:
        wrong(llama(), plan, words="the step with one rank has another loss on each rank")
    else:
        run(llama(), plan)


class OverHeads(nn.Module):
    """torch's own FlexAttention, in front of a model's layers, over the heads of each token."""

    def __init__(self, layer: nn.Module, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.attend = layer, attend

    def forward(self, x, *args):
        rows = x.detach().flatten(0, 1).unflatten(-1, (1, 2, -1))
        return self.layer(x + self.attend(rows, rows, rows).flatten(1).view_as(x), *args)


@pytest.mark.parametrize("compiled", [False, *at_night(True)])
def test_torchs_flex_attention_outside_of_the_styles(compiled: bool):
    """It compiles its operator by itself, as one graph, and so looks into what verify has entered."""
    torchs = torch.nn.attention.flex_attention.flex_attention
    model = llama()
    model.layers[0] = OverHeads(model.layers[0], torch.compile(torchs, backend="eager") if compiled else torchs)
    names = "layers.0.layer.attention.core", *(f"layers.{at}.attention.core" for at in range(1, len(model.layers)))
    run(model, {name: AttentionContextParallel() for name in names})


def test_fsdp_and_checkpoints():
    """A plan that is a function; gradients that a reducer averages, after a loss with averaged_over."""

    def plan(model: nn.Module, mesh: Any) -> nn.Module:
        parallelize_module(model, mesh, CORES)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def averaged(losses, labels, cp):
        return global_loss(losses, global_token_count(labels, cp), cp, averaged_over=cp.size())

    model = llama()
    for layer in model.layers:
        layer.feed_forward = Checkpointed(layer.feed_forward)
    (report, _) = run(model, plan, mistake(mean=averaged, reduce=lambda model, cp: None))
    assert all(error < 1e-10 for _, error in report.parameters)
    names = [each.name for each in report.modules]
    assert len(names) == len(set(names))  # what is recomputed does not count
    forgotten = mistake(
        mean=lambda losses, labels, cp: global_loss(losses, global_token_count(labels, cp), cp, averaged_over=1),
        reduce=lambda model, cp: None,
    )
    wrong(llama(), plan, forgotten, words="are 0.5 times the gradients of one process: they are averaged")


@pytest.mark.nightly  # by default a right step: test_a_rank_whose_part_of_a_gradient_is_zero
def test_axes_of_tensor_parallelism():
    """Where modules hold parts of features, the loss and the parameters' gradients are compared."""

    def on(rank: int, **parts: Any) -> Report:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        plan = parallel_plan(AttentionContextParallel())
        model = parallelize_module(llama(), mesh, plan)
        return verify(model, mesh, {"tokens": TOKENS[:, :20]}, mistake(**parts), tolerance=1e-10)

    with pytest.raises(RankError, match="gradients are unreduced: the gradients of 12 of 12"):
        run_ranks(lambda rank: on(rank, reduce=lambda model, cp: None), 4)


def test_axes_that_share_a_group():
    """On one process, both axes of a mesh have the default group."""

    def on(rank: int) -> Report:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp", "tp"))
        assert mesh.get_group("cp") is mesh.get_group("tp")
        model = parallelize_module(llama(), mesh, parallel_plan(AttentionContextParallel()))
        return verify(model, mesh, {"tokens": TOKENS}, step, tolerance=1e-10)

    assert len(run_ranks(on, 1)[0].parameters) == PARAMETERS


def test_a_rank_whose_part_of_a_gradient_is_zero():
    """Tokens of the first half of the vocabulary, whose rows of the embedding are on the first rank of tp."""

    def on(rank: int) -> Report:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model = parallelize_module(llama(), mesh, parallel_plan(AttentionContextParallel()))
        half = model.embed.weight.shape[0] // 2
        return verify(model, mesh, {"tokens": TOKENS[:, :20] % half}, step, tolerance=1e-10)

    report = run_ranks(on, 4)[0]
    assert report.modules[-1].forward is not None
    assert len(report.parameters) == PARAMETERS


class Counted(nn.Module):
    """A layer that changes what it holds: a buffer, a number, a plain tensor, a table that it makes at first, and what
    is in a dict, a list and a set."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(16), 0
        self.seen = torch.zeros(1)
        self.memo, self.names = {"places": [torch.zeros(())]}, {"a"}

    def forward(self, x):
        self.norm(x.detach().flatten(0, 1).float())  # for its buffers alone
        self.calls += 1
        self.seen += 1
        self.table = torch.ones(1)
        self.memo.setdefault("length", x.shape[1])
        self.memo["places"][0].add_(1)
        self.memo["places"].append(x.mean())
        self.names.add(len(self.names))
        self.new = [1]
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool):
    """Buffers, numbers, tables, flags, random states and gradients are as before; the next steps are as without it."""

    def act(model: nn.Module, batch: Any, mesh: Any) -> torch.Tensor:
        model.layers[0].train()
        torch.rand(1)  # the generator of all threads, which nothing else uses here
        if fails and mesh.size() == 1:
            raise KeyError("planned")
        return step(model, batch, mesh)

    def on(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = parallel(whole, CORES, mesh).eval()
        counted = model.layers[0].feed_forward[1]
        counted.norm.train()
        before, kept = copy.deepcopy(model.state_dict()), (counted.memo, counted.memo["places"], counted.names)
        if fails:
            with pytest.raises(KeyError, match="planned"):
                verify(model, mesh, {"tokens": TOKENS}, act)
        else:
            verify(model, mesh, {"tokens": TOKENS}, act, tolerance=1e-5)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert (counted.calls, counted.seen.item(), hasattr(counted, "table")) == (0, 0, False)
        assert (counted.memo, counted.names, hasattr(counted, "new")) == ({"places": [torch.zeros(())]}, {"a"}, False)
        assert all(x is y for x, y in zip(kept, (counted.memo, counted.memo["places"], counted.names), strict=True))
        assert counted.norm.training
        assert not model.layers[0].training
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(module._forward_hooks and "_after" in str(module._forward_hooks) for module in [counted])
        state = state_of(mesh.get_group())
        assert state.get_or_create(Role).stand_in is None
        assert (state.get_or_create(Losses).number, state.operations.forwards) == (0, 0)
        loss = step(model, {"tokens": TOKENS}, mesh)  # over the user's own group
        return loss.item(), state.get_or_create(Losses).number

    whole = llama()
    whole.layers[0].feed_forward = nn.Sequential(whole.layers[0].feed_forward, Counted())
    drawn = torch.get_rng_state()
    losses = run_ranks(on, 2)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert losses[0] == losses[1]
    assert losses[0][1] == 2  # a count and a loss


def test_state_that_differs_without_an_effect():
    """Statistics and a length of a part, which no later step reads, are named in the line of a right step."""
    whole = llama()
    whole.layers[0].feed_forward = nn.Sequential(whole.layers[0].feed_forward, Counted())
    report = run(whole, tolerance=1e-5)[0]
    words = r"The state that the step leaves \(layers.0.feed_forward.1.*\) differs from one device, without an effect"
    assert re.search(words, report.line), report.line


class Hooked(nn.Module):
    """A layer that registers a hook at its first forward, and notes it in a flag, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hooked = nn.Identity(), False

    def forward(self, x):
        if not self.hooked:
            self.inner.register_forward_hook(lambda module, inputs, output: 2 * output)
            self.hooked = True
        return self.inner(x)


def test_hooks_that_a_model_registers_on_itself():
    """Each run begins without them, and so does training."""
    whole = llama()
    whole.layers[0].feed_forward = nn.Sequential(whole.layers[0].feed_forward, Hooked())

    def on(rank: int, prove: bool) -> float:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = parallel(whole, CORES, mesh)
        if prove:
            verify(model, mesh, {"tokens": TOKENS}, step)
            hooked = model.layers[0].feed_forward[1]
            assert (len(hooked.inner._forward_hooks), hooked.hooked) == (0, False)
        return step(model, {"tokens": TOKENS}, mesh).item()

    assert run_ranks(on, 2, True) == run_ranks(on, 2, False)


def warned(act: Callable[[int], None]) -> list[str]:
    """What is warned about models that were never compared while ``act`` runs on ranks."""
    with warnings.catch_warnings(record=True) as caught:  # in all threads
        warnings.simplefilter("always", UnverifiedModelWarning)
        run_ranks(act, 2)
    return [str(each.message) for each in caught if each.category is UnverifiedModelWarning]


def trained(rank: int, *, proved: bool, plan: Any, act: Callable[..., Any] = step) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = parallel(llama(), plan, mesh).train()
    if proved:
        verify(model, mesh, {"tokens": TOKENS}, act)
    for _ in range(2):
        act(model, {"tokens": TOKENS}, mesh)
        model.zero_grad()


def in_a_block(model: nn.Module, batch: Any, mesh: Any, **options: Any) -> torch.Tensor:
    tokens, places = batch["tokens"].clone(), torch.arange(LENGTH)
    labels = next_token_labels(tokens)
    with context_parallel(mesh, buffers=[tokens, places, labels], buffer_seq_dims=[1, 0, 1], **options):
        logits = model(tokens, places)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = global_loss(losses, global_token_count(labels, mesh), mesh)
        loss.backward()
    sum_gradients(model, mesh)
    return loss


@pytest.mark.parametrize("style", [AttentionContextParallel, ModuleContextParallel])
def test_a_model_that_was_never_compared_warns_once(style):
    plan = {"layers.*.attention.core": style()}
    (text,) = warned(partial(trained, proved=False, plan=plan))
    assert text.startswith("Llama runs context parallel")
    assert "verify(model, mesh, batch, step)" in text
    assert warned(partial(trained, proved=True, plan=plan)) == []
    assert warned(partial(trained, proved=False, plan={"layers.*.attention.core": style(verified=True)})) == []


def test_a_model_in_a_block_warns_too():
    def plan(model: nn.Module, mesh: Any) -> nn.Module:
        return model

    (text,) = warned(partial(trained, proved=False, plan=plan, act=in_a_block))
    assert text.startswith("Llama runs context parallel")
    assert warned(partial(trained, proved=True, plan=plan, act=in_a_block)) == []
    assert warned(partial(trained, proved=False, plan=plan, act=partial(in_a_block, verified=True))) == []


def test_an_old_call_says_what_to_write():
    with pytest.raises(
        TypeError, match=r"takes no plan any more: apply it first, parallelize_module\(model, mesh, plan"
    ):
        verify(llama(), CORES, {}, step)  # pyright: ignore


def test_gradients_that_are_there_are_refused():
    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = parallel(llama(), CORES, mesh)
        step(model, {"tokens": TOKENS}, mesh)
        with pytest.raises(ValueError, match=r"have gradients \(embed.weight, .* model.zero_grad\(\) before"):
            verify(model, mesh, {"tokens": TOKENS}, step)
        model.zero_grad()
        verify(model, mesh, {"tokens": TOKENS}, step)

    run_ranks(on, 2)


def test_a_plain_step_shows_what_the_recipe_changes():
    """A position that one rank and several have alike, and the model alone has not."""

    def shifted(model: nn.Module, batch: Any, mesh: Any) -> torch.Tensor:
        layout, rank = head_tail(batch["tokens"].shape[1], mesh.size()), mesh.get_local_rank()
        logits = model(layout.shard(batch["tokens"], 1, rank), layout.positions(rank) * 2)
        loss = global_loss(logits.square().sum(), 1, mesh)
        loss.backward()
        sum_gradients(model, mesh)
        return loss

    def plain(model: nn.Module, batch: Any, mesh: Any) -> torch.Tensor:
        loss = model(batch["tokens"], torch.arange(LENGTH)).square().sum()
        loss.backward()
        return loss

    run(llama(), act=shifted)
    wrong(llama(), act=shifted, plain=plain, words="argument 'positions_L' of the model")


class Called(nn.Module):
    """Attention by a function of the real mesh, which the model was given when it was made."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, q, k, v):
        return context_attention(q, k, v, self.mesh, mask=Causal(), layout=head_tail(LENGTH, self.mesh.size()))


def test_what_was_given_the_real_mesh_follows():
    """A function in the model, which has run on all ranks before, a sharder that was made before the step, functions of
    cp_styles.batch."""

    def on(rank: int, *, shift: bool) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model, sharder = parallel(llama(), lambda model, mesh: model, mesh), BatchSharder(mesh)
        for layer in model.layers:
            layer.attention.core = Called(mesh)
        if shift:
            model.norm.register_forward_hook(lambda module, args, x: x + x.roll(1, 1))

        def act(model: nn.Module, tokens: torch.Tensor, given: Any) -> torch.Tensor:
            batch = sharder(tokens)
            loss = batch.loss(model(batch.tokens, batch.positions))
            loss.backward()
            sum_gradients(model, mesh)
            return loss

        if not shift:
            act(model, TOKENS, mesh)
            model.zero_grad()
        return verify(model, mesh, TOKENS, act, tolerance=1e-10).line

    assert "equal to one device" in run_ranks(partial(on, shift=False), 2)[0]
    with pytest.raises(RankError, match="carries values from token to token"):
        run_ranks(partial(on, shift=True), 2)


def test_an_error_with_one_rank_on_one_rank():
    """The rank that raises has its error, with what it is about; the other one hears of it."""

    def act(model: nn.Module, batch: Any, mesh: Any) -> torch.Tensor:
        if mesh.size() == 1 and dist.get_rank() == 1:
            raise KeyError("planned")
        return step(model, batch, mesh)

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = parallel(llama(), CORES, mesh)
        words = "rank 1 has raised KeyError" if rank == 0 else "planned"
        with pytest.raises((KeyError, RuntimeError), match=words) as caught:
            verify(model, mesh, {"tokens": TOKENS}, act)
        if rank == 1:
            assert "the step with one rank in place of all of the sequence" in caught.value.__notes__[-1]
        verify(model, mesh, {"tokens": TOKENS}, step)

    run_ranks(on, 2)


def test_a_compiled_model_is_proved_without_its_graphs():
    """Before and after its graphs are made, which know the lengths of two ranks."""
    traced: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = torch.compile(parallel(llama(), ModuleContextParallel(), mesh), backend=backend)
        verify(model, mesh, {"tokens": TOKENS}, step)
        dist.barrier()
        assert not traced
        dist.barrier()
        step(model, {"tokens": TOKENS}, mesh)
        model.zero_grad()
        dist.barrier()
        graphs = len(traced)
        assert graphs
        verify(model, mesh, {"tokens": TOKENS}, step)
        dist.barrier()
        assert len(traced) == graphs

    run_ranks(on, 2)


def test_the_gradients_are_kept_twice_at_most():
    """Beside what a step needs: its gradients once, and those of the step with all ranks. The model is large, and its
    activations are small."""

    def on(rank: int, *, proved: bool) -> int:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = parallel(wide, CORES, mesh)
        with MemoryTrace() as trace:
            if proved:
                verify(model, mesh, {"tokens": TOKENS[:1, :6]}, step)
            else:
                step(model, {"tokens": TOKENS[:1, :6]}, mesh)
        return trace.peak

    wide = Llama(WIDE)
    sizes = [x.nbytes for x in wide.parameters()]
    needed, peak = (max(run_ranks(partial(on, proved=proved), 2)) for proved in (False, True))
    assert sum(sizes) < needed
    # Gradients are compared one by one, in float64: some copies of the largest one.
    assert peak - needed < 1.1 * sum(sizes) + 8 * max(sizes)


def test_a_module_that_calls_no_attention():
    words = (
        r"^in layers.0.feed_forward \(FeedForward\): NotImplementedError: .*no scaled_dot_product_attention was called"
    )
    plan = {"layers.*.feed_forward": ModuleContextParallel(), **CORES}
    wrong(llama(), plan, words=words)
    wrong(llama(), lambda model, mesh: model, words="no attention ran context parallel")


class Logged(nn.Module):
    """Computes the mean over tokens, for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Mean()

    def forward(self, x):
        self.mean(x.detach())
        return x


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((0, 1))


def test_an_output_on_which_nothing_depends():
    model = llama()
    model.layers[0].attention.wo = nn.Sequential(model.layers[0].attention.wo, Logged())
    name = "layers.0.attention.wo.1.mean"
    for report in run(model):
        assert report.unused == (name,)
        assert report.line.endswith(f". The outputs of {name} differ, and nothing in the step depends on them")


# Ranks.


def test_a_step_that_takes_another_sample_on_each_rank():
    def by_rank(model, batch, mesh):
        return step(model, {"tokens": batch["tokens"].roll(dist.get_rank(), 0)[:1]}, mesh)

    wrong(llama(), act=by_rank, words="has another loss on each rank .* the sample differs between ranks")
    other = lambda rank: {"tokens": TOKENS.roll(rank, 0)}  # noqa: E731
    wrong(llama(), batch=other, words=r"the sample differs between ranks \(batch\['tokens'\]\)")


def test_what_is_compared():
    """Errors of all ranks; gradients that one step alone has; tokens that are flattened with the batch."""
    key, x, layout = ("", 0), torch.arange(1.0, 9.0), head_tail(4, 2)
    of_peer = {key: Squares(1.0, 3.0)}
    assert output_errors({key: [x[:1]]}, {key: [x[:1]]}, lambda own: [own, of_peer]) == {key: 0.5}
    assert gradient_errors({"w": None}, {"w": x}, lambda own: [own], 1e-5)[0] == {"w": 1.0}
    own = layout.shard(x.view(2, 4), 1, 0).flatten()
    found = [ShardLookup([layout], 0).compare(x, part) for part in (own, own + 1)]
    assert [each and each.error() > 0 for each in found] == [False, True]


def test_what_is_no_finite_number_is_compared():
    """Masked logits are infinite in both steps; what is no number in one of them alone is an error."""
    logits, lost = torch.tensor([-inf, nan, 1.0]), torch.tensor([-inf, nan, nan])
    assert squares(logits, logits).error() == 0.0
    assert squares(lost, logits).error() == squares(logits, lost).error() == inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_night(torch.float16)])
def test_low_precision_is_judged_by_its_rounding(dtype):
    """Right steps are right, and a wrong one is not excused by rounding."""
    report = run(llama().to(dtype), tolerance=None)[0]
    assert 0 < report.rounding < 0.1
    assert "of which rounding" in report.line
    assert "is not seen" not in report.line
    assert "a mistake below 2e+00 is not seen: run verify in float32 too" in replace(report, rounding=0.5).line
    wrong(
        llama().to(dtype), act=mistake(reduce=lambda model, cp: None), tolerance=None, words="unreduced", findings=None
    )


def test_float64_shows_a_mistake_that_float32_hides():
    def reduce(model: nn.Module, cp: Any) -> None:
        sum_gradients(model, cp)
        for parameter in model.parameters() if cp.size() > 1 else ():
            parameter.grad *= 1 + 5e-5

    wrong(llama(), act=mistake(reduce=reduce), tolerance=None, words=r"are 1\.00005 times .* code after it")
    assert "worst 5e-05" in run(llama().float(), act=mistake(reduce=reduce), tolerance=None)[0].line


# The command; its report of a step that is exact is in the test of the tutorial's example.


def case() -> dict[str, Any]:
    return {
        "model": llama(),
        "plan": CORES,
        "batch": {"tokens": TOKENS},
        "step": mistake(reduce=lambda model, cp: None),
    }


def broken() -> dict[str, Any]:
    return {"model": llama()}


def test_the_command_reports_and_fails(capsys):
    with pytest.raises(SystemExit) as found:
        main(["verify", f"{__file__}:case", "--mesh", "cp=2"])
    assert found.value.code == 1
    said = capsys.readouterr().out
    assert "Llama on 2 ranks, mesh axes ('cp',): WRONG" in said
    assert "gradients are unreduced" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"{__file__}", "argument FILE.py:FUNCTION: .*give a file or module and a function"),
        ("nowhere.py:case", "there is no file nowhere.py"),
        ("nowhere.at_all:case", "there is no module nowhere; a file is given with .py"),
        (f"{__file__}:nothing", "has no function nothing"),
        (f"{__file__}:broken", "its dict has no batch, step"),
        (f"{__file__}:case --mesh cp", "argument --mesh: 'cp': give axes and their sizes"),
    ],
    ids=["no function", "no file", "no module", "nothing", "broken", "mesh"],
)
def test_bad_input_names_the_option(arguments: str, words: str, capsys):
    with pytest.raises(SystemExit) as found:
        main(["verify", *arguments.split()])
    assert found.value.code == 2
    assert re.search(words, capsys.readouterr().err)


def test_dropout_that_draws_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch):
    """Said in the line of a model that is right. Threads share their generator, and draw one after the other."""
    model = llama()
    attention = model.layers[0].attention
    attention.wo = nn.Sequential(attention.wo, drop := nn.Dropout(0.5))
    words = "Dropout, which is off here, would draw the same numbers on all ranks: torch.manual_seed(seed + rank)"
    assert words not in run(model)[0].line
    with monkeypatch.context() as processes:
        processes.setattr(os, "getpid", threading.get_ident)
        assert all(words in report.line for report in run(model))
        drop.p = 0.0
        assert words not in run(model)[0].line
        drop.p = 0.5
        assert words not in run(model.eval())[0].line
        model.train()

        class Seeded(ModelState):
            def __init__(self, model: nn.Module) -> None:
                super().__init__(model)
                self.drawn_from = dist.get_rank()

        processes.setattr("cp_styles.verify.verification.ModelState", Seeded)
        assert words not in run(model)[0].line
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(ModelState(model).drawn_from)
    assert drawn[0] == drawn[1] != drawn[2]
