"""verify judges steps with a planted mistake, and right ones: none is misjudged, and no cause is named that is not it.

Each mistake has the words of the report that name its cause, or those that say that it is not known.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    Documents,
    ModuleContextParallel,
    PerRow,
    SequenceScope,
    SlidingWindow,
    Ulysses,
    contiguous,
    flex_attention,
    global_loss,
    global_token_count,
    head_tail,
    next_token_labels,
    parallelize_module,
    per_document_head_tail,
    striped,
    sum_gradients,
)
from cp_styles.mixers import context_recurrence
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import VerificationError, verify
from tests.covering import at_night
from tests.ranks.mixers.kernels import chunk_gla
from tests.ranks.verify.test_verify import parallel

S, W, V = 22, 16, 19
BATCH = {"tokens": torch.randint(V, (2, S), generator=torch.Generator().manual_seed(0))}


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Attention and a position-wise layer. ``core`` attends, and ``extra`` is put behind the attention."""

    def __init__(self, core: nn.Module, extra: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.core, self.extra = nn.Linear(W, 3 * W), nn.Linear(W, W), core, extra
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.extra(x)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """``within`` is what the model does with the hidden states between embedding and blocks."""

    def __init__(
        self,
        core: Callable[[], nn.Module] = Core,
        extra: Callable[[], nn.Module] = nn.Identity,
        within: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: x,
        blocks: int = 2,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.places = nn.Embedding(V, W), nn.Embedding(2 * S, W)
            self.blocks = nn.ModuleList(Block(core(), extra()) for _ in range(blocks))
            self.head = nn.Linear(W, V, bias=False)
            self.to(torch.float64)
        self.within = within

    def forward(self, tokens, positions):
        x = self.within(self, self.embed(tokens) + self.places(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting(Model):
    """A model that makes its positions by ``count``, from its tokens."""

    def __init__(self, count: Callable[[Counting, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.count = count

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.count(self, tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cp_of(mesh: Any) -> Any:
    return mesh["cp"] if mesh.ndim > 1 else mesh


def step(
    model: nn.Module,
    batch: Any,
    mesh: Any,
    *,
    layout: Callable[[int, int], Any] = head_tail,
    cut: Callable[..., torch.Tensor] = lambda x, layout, rank: layout.shard(x, 1, rank),
    positions: Callable[..., torch.Tensor] = lambda layout, rank: layout.positions(rank),
    labels: Callable[..., torch.Tensor] = lambda tokens, cut: cut(next_token_labels(tokens)),
    mean: Callable[..., Any] = lambda losses, labels, cp: global_loss(losses, global_token_count(labels, cp), cp),
    losses: Callable[..., torch.Tensor] = lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"),
    after: Callable[..., None] = lambda model, cp: sum_gradients(model, cp),
    returns: Callable[..., Any] = lambda loss, cp: loss,
) -> Any:
    cp = cp_of(mesh)
    made, rank = layout(batch["tokens"].shape[1], cp.size()), cp.get_local_rank()
    cut_here = partial(cut, layout=made, rank=rank)
    wanted = labels(batch["tokens"], cut_here)
    logits = model(cut_here(batch["tokens"]), positions(made, rank))
    loss = mean(losses(logits.flatten(0, 1), wanted.flatten()), wanted, cp)
    loss.backward()
    after(model, cp)
    return returns(loss, cp)


@dataclass
class Case:
    model: Callable[[], nn.Module] = Model
    plan: Any = field(default_factory=lambda: {"blocks.*.core": AttentionContextParallel()})
    act: Callable[..., Any] = step
    batch: Any = field(default_factory=lambda: BATCH)
    mesh: dict[str, int] = field(default_factory=lambda: {"cp": 2})
    tolerance: float = 1e-10


def judged(case: Case) -> list[Any]:
    """What verify says on each rank: a report, or an error."""
    model = case.model()
    size = 1
    for each in case.mesh.values():
        size *= each

    def on(rank: int) -> Any:
        mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
        batch = case.batch(rank) if callable(case.batch) else case.batch
        given = model(rank) if callable(model) and not isinstance(model, nn.Module) else model
        return verify(parallel(given, case.plan, mesh), mesh, batch, case.act, tolerance=case.tolerance)

    return run_ranks(on, size, return_errors=True, timeout_seconds=20)


def but(**parts: Any) -> Callable[..., Any]:
    return partial(step, **parts)


def on_ranks(act: Callable[..., Any]) -> Callable[..., Any]:
    """``act(model, cp)`` after gradients are summed, where there are several ranks."""

    def after(model: nn.Module, cp: Any) -> None:
        sum_gradients(model, cp)
        if cp.size() > 1:
            act(model, cp)

    return after


# Parts of models.


class AlongTokens(nn.Module):
    """A layer for [B, C, S] on [B, S, C]."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x):
        return self.layer(x.mT).mT


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(W, W, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class CausalConvolution(nn.Conv1d):
    def forward(self, x):
        return super().forward(x)[..., : x.shape[-1]]


class Scan(nn.Module):
    """A recurrence over packed documents. Its user has forgotten them where the sequence is cut."""

    def forward(self, x, cu_seqlens):
        if x.shape[1] < S:
            scan = context_recurrence(chunk_gla, dist.group.WORLD, layout=head_tail)
            return scan(*Scan.heads(x))[0].flatten(2)
        ends = [0, S] if cu_seqlens is None else cu_seqlens.tolist()
        parts = [x[:, low:high] for low, high in itertools.pairwise(ends)]
        return torch.cat([chunk_gla(*Scan.heads(part))[0].flatten(2) for part in parts], 1)

    @staticmethod
    def heads(x):
        x_BLHK = x.unflatten(-1, (4, -1))
        return x_BLHK, x_BLHK, x_BLHK, -F.softplus(x_BLHK)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scan = Scan()

    def forward(self, x):
        return self.scan(x, torch.tensor([0, 9, S]))


class PlainAttention(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


class Flex(nn.Module):
    """With a BlockMask for the whole sequence, or one of the tokens that it is given."""

    def __init__(self, length: int | None = S) -> None:
        super().__init__()
        self.length = length

    def forward(self, q, k, v):
        length = self.length or q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cpu", BLOCK_SIZE=8)
        return flex_attention(q, k, v, block_mask=mask)


class Masked(nn.Module):
    """Attention with ``mask(length)``."""

    def __init__(self, mask: Callable[[int], torch.Tensor] | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        if self.mask is None:
            return F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q.shape[2]))


class Drawn(nn.Module):
    """Noise from a generator that goes on from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


DOCUMENTS = (9, S - 9)


class ByRank(nn.Module):
    """Another function on each rank of a sequence."""

    def forward(self, x):
        return x * (1.0 + (x.shape[1] < S) * 0.25 * dist.get_rank())


class OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.cut = x.shape[1] < S
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.5 if ctx.cut else 1.0)


class Backwards(nn.Module):
    """Another gradient on ranks."""

    def forward(self, x):
        return OtherGradient.apply(x)


class Behind(nn.Module):
    """Its own code between a model and the caller mixes tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens, positions):
        return torch.softmax(self.model(tokens, positions), 1)


def mixed(*cores: nn.Module) -> nn.Module:
    following = iter(cores)
    return Model(lambda: next(following))


def ignored_at_ends(tokens: torch.Tensor, cut: Callable[..., torch.Tensor]) -> torch.Tensor:
    wanted = cut(next_token_labels(tokens)).clone()
    wanted[:, -1] = -100
    return wanted


def half_at_the_end(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none").unflatten(0, (len(BATCH["tokens"]), -1))
    return losses.sum() - 0.5 * losses[:, -1].sum() * (losses.shape[1] < S)


def keeping(*names: str) -> Callable[..., None]:
    """Sums the gradients of some parameters."""

    def after(model: nn.Module, cp: Any) -> None:
        sum_gradients([x for name, x in model.named_parameters() if name.startswith(names)], cp)

    return after


def noisy(model: nn.Module, batch: Any, mesh: Any) -> Any:
    return step(model, batch, mesh, losses=lambda *x: F.cross_entropy(*x, reduction="sum") * (1 + torch.rand(())))


def fails_on_a_rank(model: nn.Module, batch: Any, mesh: Any) -> Any:
    if mesh.size() > 1 and mesh.get_local_rank() == 1:
        batch["image"]
    return step(model, batch, mesh)


def fails_in_a_hook(model: nn.Module, batch: Any, mesh: Any) -> Any:
    def refuse(module: nn.Module, args: Any) -> None:
        if mesh.size() > 1 and mesh.get_local_rank() == 0:
            raise ValueError("not this one")

    handle = model.blocks[1].up.register_forward_pre_hook(refuse)
    try:
        return step(model, batch, mesh)
    finally:
        handle.remove()


def other_weights() -> Any:
    model = Model()  # drawn here: ranks are threads, which share torch's generator

    def of_rank(rank: int) -> nn.Module:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.weight += rank
        return other

    return of_rank


def steps(model: nn.Module, cp: Any) -> None:
    sum_gradients(model, cp)
    torch.optim.AdamW(model.parameters()).step()


def removes(model: nn.Module, cp: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def zeroes(model: nn.Module, cp: Any) -> None:
    sum_gradients(model, cp)
    model.zero_grad(set_to_none=False)


def scaled(by: float) -> Callable[..., None]:
    def act(model: nn.Module, cp: Any) -> None:
        for x in model.parameters():
            x.grad *= by

    return on_ranks(act)


def clipped_before(model: nn.Module, cp: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    sum_gradients(model, cp)


def summed_again(model: nn.Module, cp: Any) -> None:
    for x in model.parameters():
        dist.all_reduce(x.grad, group=cp.get_group())


def without_backward(model: nn.Module, batch: Any, mesh: Any) -> Any:
    if mesh.size() == 1:
        return step(model, batch, mesh)
    layout, rank = head_tail(S, mesh.size()), mesh.get_local_rank()
    labels = layout.shard(next_token_labels(batch["tokens"]), 1, rank)
    logits = model(layout.shard(batch["tokens"], 1, rank), layout.positions(rank))
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return global_loss(losses, global_token_count(labels, mesh), mesh)


def replaces(model: nn.Module, batch: Any, mesh: Any) -> Any:
    """A style that was applied to a module itself: no module around it can see that it has gone."""
    if cp_of(mesh).size() > 1:
        parallelize_module(model.blocks[1].core, cp_of(mesh), AttentionContextParallel())
        model.blocks[1].core = Core()
    return step(model, batch, mesh)


def evaluates(model: nn.Module, batch: Any, mesh: Any) -> None:
    layout, rank = head_tail(S, mesh.size()), mesh.get_local_rank()
    with torch.no_grad():
        model(layout.shard(batch["tokens"], 1, rank), layout.positions(rank))


CUT_BY_HAND = {
    "cut": lambda x, layout, rank: x.chunk(layout.ranks, 1)[rank],
    "positions": lambda layout, rank: torch.arange(S).chunk(layout.ranks)[rank],
}
MIXES = r"carries values from token to token, and no attention"
ALONE = r"blocks.1.core \(Core\): its attention ran on each rank's part alone"
UNKNOWN = r"The cause is not known"


class Pooled(nn.Module):
    """A classifier of a mean over tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens, positions):
        return self.model(tokens, positions).mean(1)


def pooled_step(model: nn.Module, batch: Any, mesh: Any) -> torch.Tensor:
    layout, rank = head_tail(S, mesh.size()), mesh.get_local_rank()
    out = model(layout.shard(batch["tokens"], 1, rank), layout.positions(rank))
    loss = global_loss(out.square().sum(), mesh.size(), mesh)
    loss.backward()
    sum_gradients(model, mesh)
    return loss


# The first finding of the report, by mistake.
MISTAKES: dict[str, tuple[Case, str]] = {
    # Positions.
    "positions from 0": (
        Case(act=but(positions=lambda layout, rank: torch.arange(layout.lengths[rank]))),
        r"argument 'positions' of the model \(Model\): counts from 0",
    ),
    "arange in the model": (
        Case(lambda: Counting(lambda model, tokens: model.places(torch.arange(tokens.shape[1])))),
        r"the model \(Counting\): what it gives to places, 'input', counts from 0",
    ),
    "a table sliced by the length": (
        Case(lambda: Counting(lambda model, tokens: model.places.weight[: tokens.shape[1]])),
        r"the model \(Counting\): what it gives to blocks.0 .* the result for the first positions",
    ),
    "divided by the length": (
        Case(lambda: Model(within=lambda model, x: x * (10.0 / x.shape[1]))),
        r"what it gives to blocks.0 on each rank is the result for its part alone, .* is not known",
    ),
    # Layers.
    "a convolution": (
        Case(lambda: Model(extra=lambda: AlongTokens(lambda: nn.Conv1d(W, W, 3, padding=1)))),
        rf"blocks.0.extra.layer \(Conv1d\): it {MIXES} .* keep it out of the model",
    ),
    "a recurrence": (
        Case(lambda: Model(extra=Recurrent)),
        rf"blocks.0.extra.layer \(GRU\): it {MIXES} .* the state is not passed on.* context_recurrence",
    ),
    "a causal convolution": (
        Case(lambda: Model(extra=lambda: AlongTokens(lambda: CausalConvolution(W, W, 3, padding=2)))),
        rf"blocks.0.extra.layer \(CausalConvolution\): it {MIXES} .* first 2 tokens .* context_causal_conv1d.*width=3",
    ),
    "documents that a recurrence is not given": (
        Case(lambda: Model(extra=Packed)),
        r"blocks.0.extra.scan \(Scan\): documents are not separated: .* without cu_seqlens",
    ),
    "attention in plain operations": (
        Case(lambda: Model(extra=PlainAttention)),
        rf"blocks.0.extra \(PlainAttention\): it {MIXES}",
    ),
    "the mean over tokens in the model": (
        Case(lambda: Model(within=lambda model, x: x - x.mean(1, keepdim=True))),
        rf"the model \(Model\): it {MIXES}",
    ),
    "a pooled token": (
        Case(lambda: Pooled(Model()), plan={"model.blocks.*.core": AttentionContextParallel()}, act=pooled_step),
        r"the model \(Pooled\): its output .* pooled from this rank's part",
    ),
    "a softmax over tokens behind attention": (
        Case(lambda: Behind(Model()), plan={"model.blocks.*.core": AttentionContextParallel()}),
        r"carries values from token to token, in its own code between the modules",
    ),
    "another function by rank": (
        Case(lambda: Model(extra=ByRank)),
        r"blocks.0.extra \(ByRank\): its output .* is not known",
    ),
    "another gradient on ranks": (
        Case(lambda: Model(extra=Backwards)),
        rf"are wrong: the first wrong gradient of a backward is at blocks.1\..*'s output. {UNKNOWN}",
    ),
    # Attention.
    "attention that the plan leaves out": (Case(plan={"blocks.0.core": AttentionContextParallel()}), ALONE),
    "FlexAttention that the plan leaves out": (
        Case(lambda: mixed(Core(), Flex(None)), plan={"blocks.0.core": AttentionContextParallel()}, act=evaluates),
        r"blocks.1.core \(Flex\): its attention ran on each rank's part alone",
    ),
    "attention that replaces one with a style of its own": (
        Case(plan={"blocks.0.core": AttentionContextParallel()}, act=replaces),
        r"blocks.1 \(Block\): its attention ran on each rank's part alone",
    ),
    # The cut.
    "cut by hand": (Case(act=but(**CUT_BY_HAND)), r"'tokens' .*: layout mismatch: it is cut with contiguous"),
    "another layout in one layer": (
        Case(
            plan={
                "blocks.0.core": AttentionContextParallel(layout=contiguous),
                "blocks.1.core": AttentionContextParallel(layout=head_tail),
            },
            act=but(**CUT_BY_HAND),
        ),
        r"blocks.1.core \(Core\): layout mismatch: its inputs are cut with",
    ),
    # Labels and the loss.
    "labels rolled after the cut": (
        Case(act=but(labels=lambda tokens, cut: next_token_labels(cut(tokens)))),
        r"Labels were rolled after the cut",
    ),
    "labels ignored at the ends": (Case(act=but(labels=ignored_at_ends)), r"Labels were rolled after the cut"),
    "other labels": (
        Case(act=but(labels=lambda tokens, cut: (next_token_labels(cut(tokens)) + (cut(tokens).shape[1] < S)) % V)),
        r"its gradient is not, at .* positions .*: labels, weights or the loss itself",
    ),
    "other weights at the end": (
        Case(act=but(losses=half_at_the_end)),
        r"its gradient is not, at 1 positions .*: labels, weights or the loss itself",
    ),
    "all labels of striped ranks": (
        Case(
            act=but(
                layout=striped,
                labels=lambda tokens, cut: (
                    cut(next_token_labels(tokens).clamp(min=0)) // 2
                    if cut(tokens).shape[1] < S
                    else next_token_labels(tokens)
                ),
            ),
            plan={"blocks.*.core": AttentionContextParallel(layout=striped)},
        ),
        r"its gradient is not, at .* positions .*: labels, weights or the loss itself",
    ),
    "a mean of means": (
        Case(act=but(mean=lambda losses, labels, cp: losses / (labels != -100).sum() / cp.size())),
        r"its gradient is [\d.]+, [\d.]+ times .* own tokens",
    ),
    "a loss that each rank weighs by itself": (
        Case(act=but(mean=lambda losses, labels, cp: losses / 42 * (1 + 0.5 * cp.get_local_rank()))),
        r"its gradient is [\d.]+, [\d.]+ times .*not parts of one mean",
    ),
    "the loss of this rank": (
        Case(act=but(mean=lambda losses, labels, cp: losses / global_token_count(labels, cp))),
        r"the loss that the step returns is another number .*: each rank returns its share. Return the sum",
    ),
    "a loss that only ranks change": (
        Case(act=but(returns=lambda loss, cp: loss * (1 if cp.size() == 1 else 3))),
        r"the loss that the step returns is another number .*: return the mean over the tokens of all ranks",
    ),
    "a loss that is not a number": (
        Case(act=but(returns=lambda loss, cp: loss * (1 if cp.size() == 1 else float("nan")))),
        rf"the loss that the step returns .*: it is nan, nan. {UNKNOWN}",
    ),
    "averaged_over without a reducer that averages": (
        Case(
            act=but(
                mean=lambda losses, labels, cp: global_loss(
                    losses, global_token_count(labels, cp), cp, averaged_over=cp.size()
                )
            )
        ),
        r"are 2 times .*: the gradient of the loss is 2 times",
    ),
    # Gradients.
    "gradients that nobody sums": (Case(act=but(after=lambda model, cp: None)), r"gradients are unreduced"),
    "gradients of some": (Case(act=but(after=keeping("blocks"))), r"partly reduced: .* \(embed.weight, places.weight"),
    "gradients that are summed twice": (
        Case(act=but(after=on_ranks(summed_again))),
        r"are 2 times .*: they are reduced twice",
    ),
    "gradients that are averaged": (Case(act=but(after=scaled(0.5))), r"are 0.5 times .*averaged over"),
    "gradients with another factor": (
        Case(act=but(after=scaled(3.0))),
        r"are 3 times .*: the gradient of the loss is 1 times its value on one process, and code",
    ),
    "gradients that are not numbers": (
        Case(act=but(after=scaled(float("nan")))),
        rf"gradients of 19 of 19 parameters .* are not finite on the ranks.* {UNKNOWN}",
    ),
    "clipped before the sum": (
        Case(act=but(after=clipped_before)),
        r"19 of 19 parameters \(.* between the backward and their sum.* Sum gradients first",
    ),
    "no backward on the ranks": (Case(act=without_backward), rf"are wrong.* {UNKNOWN}"),
    "gradients that are removed": (
        Case(act=but(after=removes)),
        r"the step changes parameters .* Leave the optimizer out",
    ),
    "gradients that are set to 0": (Case(act=but(after=zeroes)), r"removes gradients before it ends"),
    # Ranks.
    "an error on one rank": (Case(act=fails_on_a_rank), r"^on rank 1: KeyError: 'image'"),
    "an error on one rank between attentions": (
        Case(act=fails_in_a_hook),
        r"^on rank 0: in blocks.1.up \(Linear\): ValueError: not this one",
    ),
    "another batch by rank": (
        Case(batch=lambda rank: {"tokens": BATCH["tokens"].roll(rank, 0)}),
        r"the sample differs between ranks \(batch\['tokens'\]\)",
    ),
    "other weights by rank": (Case(other_weights), r"begin with different weights \(the model's head.weight\)"),
    "a loss with noise": (Case(act=noisy), r"two runs of the step on one process differ in gradients"),
    "a loss that is drawn": (
        Case(act=but(returns=lambda loss, cp: loss * (1 + torch.rand(())))),
        r"two runs of the step on one process differ in the loss",
    ),
    "random numbers of a rank": (
        Case(lambda: Model(extra=Drawn)),
        r"two steps with one rank differ, first in blocks.0.extra \(Drawn\)",
    ),
    "an optimizer's step": (Case(act=but(after=steps)), r"the step changes parameters \(embed.weight"),
}


# Right steps.


class FlatTokens(nn.Module):
    """Tokens and batch in one dim, as experts see them; the two best of four experts each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(W, 4), nn.ModuleList(nn.Linear(W, W) for _ in range(4))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, which = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.nonzero(which == index, as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return out.view_as(x)


class FlatHeads(nn.Module):
    """Batch, tokens and heads in one dim, as for the norm of a gated delta layer of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(W // 4)

    def forward(self, x):
        return self.norm(x.view(-1, W // 4)).view_as(x)


class RecurrentCore(nn.Module):
    """A recurrence in place of an attention."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.recur = context_recurrence(chunk_gla, mesh)

    def forward(self, q, k, v):
        return self.recur(*(x.transpose(1, 2) for x in (q, k, v, -F.softplus(k))))[0].transpose(1, 2)


def recurrent(model: Any, mesh: Any) -> nn.Module:
    for block in model.blocks:
        block.core = RecurrentCore(mesh)
    return model


class TimeFirst(nn.Module):
    """[S, B, W] inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x):
        return self.layer(x.transpose(0, 1).contiguous()).transpose(0, 1)


class Gate(nn.Module):
    """A branch that begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(W))
        self.layer = nn.Linear(W, W)

    def forward(self, x):
        return self.gate * self.layer(x)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x):
        return checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=False)


class Forbidden(nn.Module):
    """Logits of -inf for a class that is never a label."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens, positions):
        logits = self.model(tokens, positions)
        return F.pad(logits, (0, 1), value=float("-inf"))


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(W, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def tied() -> nn.Module:
    model = Model()
    model.head.weight = model.embed.weight
    return model


def frozen() -> nn.Module:
    model = Model()
    model.embed.requires_grad_(False)
    model.blocks[0].qkv.requires_grad_(False)
    return model


def under(
    mask: Any, layout: Callable[[int, int], Any] = head_tail, act: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    def within(model: nn.Module, batch: Any, mesh: Any) -> Any:
        with SequenceScope(layout(S, mesh.size()), mask=mask):
            return step(model, batch, mesh, layout=layout) if act is None else act(model, batch, mesh)

    return within


def two_batches(model: nn.Module, batch: Any, mesh: Any) -> Any:
    """Of one length, under scopes of other documents, whose layouts differ; their gradients add up."""
    total = 0.0
    for lengths in (DOCUMENTS, (S - 4, 4)):
        layout = partial(per_document_head_tail, documents=lengths)
        with SequenceScope(layout(S, mesh.size()), mask=Documents(lengths)):
            total += step(model, batch, mesh, layout=layout, after=lambda model, cp: None)
    sum_gradients(model, mesh)
    return total


def in_a_block(model: nn.Module, batch: Any, mesh: Any) -> Any:
    with context_parallel(mesh, layout=head_tail(S, mesh.size())):
        return step(model, batch, mesh, after=lambda model, cp: sum_gradients(model, cp))


def clipped(model: nn.Module, cp: Any) -> None:
    sum_gradients(model, cp)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    parallelize_module(model, mesh, {"blocks.*.core": AttentionContextParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(model: nn.Module, mesh: Any) -> nn.Module:
    parallelize_module(model, mesh, {"blocks.*.core": AttentionContextParallel()})
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


def averaged(losses: torch.Tensor, labels: torch.Tensor, cp: Any) -> torch.Tensor:
    return global_loss(losses, global_token_count(labels, cp), cp, averaged_over=cp.size())


def few_labels(tokens: torch.Tensor, cut: Callable[..., torch.Tensor]) -> torch.Tensor:
    """All in the positions of one rank."""
    wanted = next_token_labels(tokens)
    wanted[:, : S // 4 + 1] = -100
    wanted[:, S - S // 4 - 1 :] = -100
    return cut(wanted)


def by_token(losses: torch.Tensor, labels: torch.Tensor, cp: Any) -> torch.Tensor:
    return global_loss((losses * 0.5).sum(), global_token_count(labels, cp), cp)


def styled(**options: Any) -> dict[str, Any]:
    return {"blocks.*.core": AttentionContextParallel(**options)}


BY_DOCUMENT = partial(per_document_head_tail, documents=DOCUMENTS)
NOBODY = {"after": lambda model, cp: None}

RIGHT: dict[str, Case] = {
    "attention": Case(),
    "the model": Case(plan=ModuleContextParallel()),
    "striped": Case(act=but(layout=striped), plan=styled(layout=striped)),
    "three ranks": Case(mesh={"cp": 3}),
    "Ulysses": Case(plan=styled(strategy=Ulysses())),
    "documents in a scope": Case(act=under(Documents(DOCUMENTS))),
    "documents of a layout": Case(act=under(Documents(DOCUMENTS), BY_DOCUMENT)),
    "a window in a scope": Case(act=under(SlidingWindow(4))),
    "documents by row": Case(act=under(PerRow((Documents(DOCUMENTS), Documents((S - 3, 3)))))),
    "a scope without a mask": Case(act=under(None)),
    "masks and a scope": Case(lambda: Model(lambda: Masked(lambda n: torch.ones(n, n).tril().bool())), plan=styled()),
    "two batches under two scopes": Case(act=two_batches),
    "recurrences alone": Case(plan=recurrent),
    "a block": Case(plan=lambda model, mesh: model, act=in_a_block),
    "FSDP": Case(plan=sharded, act=but(mean=averaged, **NOBODY)),
    "DDP": Case(plan=replicated, act=but(mean=averaged, **NOBODY)),
    "experts of flattened tokens": Case(lambda: Model(extra=FlatTokens)),
    "heads flattened with tokens": Case(lambda: Model(extra=FlatHeads)),
    "time first": Case(lambda: Model(extra=TimeFirst)),
    "a branch that is 0": Case(lambda: Model(extra=Gate)),
    "checkpoints": Case(lambda: Model(extra=Again)),
    "logits of -inf": Case(lambda: Forbidden(Model()), plan={"model.blocks.*.core": AttentionContextParallel()}),
    "a batch norm in eval": Case(lambda: Model(extra=lambda: AlongTokens(lambda: nn.BatchNorm1d(W))).eval()),
    "FlexAttention": Case(lambda: Model(Flex), plan=ModuleContextParallel(), act=evaluates),
    "nn.MultiheadAttention": Case(lambda: Model(extra=MultiHead), plan=ModuleContextParallel(layout=head_tail)),
    "tied weights": Case(tied),
    "frozen weights": Case(frozen),
    "clipped gradients": Case(act=but(after=clipped)),
    "dropout": Case(lambda: Model(extra=lambda: nn.Dropout(0.5))),
    "no backward": Case(act=evaluates),
    "no loss returned": Case(act=but(returns=lambda loss, cp: None)),
    "a number as loss": Case(act=but(returns=lambda loss, cp: loss.item())),
    "labels on one rank only": Case(act=but(labels=few_labels)),
    "losses by token": Case(act=but(losses=partial(F.cross_entropy, reduction="none"), mean=by_token)),
    "float32": Case(lambda: Model().float(), tolerance=1e-4),
    "cp of a larger mesh": Case(mesh={"dp": 2, "cp": 2}),
}

# By default one for each cause that is named; others are for the night.
SOME_MISTAKES = (
    *("arange in the model", "positions from 0", "labels rolled after the cut", "cut by hand"),
    *("a convolution", "a recurrence", "documents that a recurrence is not given", "the mean over tokens in the model"),
    *("gradients that nobody sums", "gradients that are summed twice", "gradients that are removed"),
    *("a loss that is not a number", "a mean of means", "random numbers of a rank", "an error on one rank"),
    *("attention that the plan leaves out", "another batch by rank", "other weights by rank"),
)
SOME_RIGHT = (
    *("documents in a scope", "two batches under two scopes", "experts of flattened tokens", "no backward"),
    *("heads flattened with tokens", "recurrences alone", "labels on one rank only", "logits of -inf"),
)


def rows(names: Any, some: tuple[str, ...]) -> list[Any]:
    assert set(some) <= set(names)
    return [*some, *at_night(*(name for name in names if name not in some))]


@pytest.mark.parametrize("name", rows(MISTAKES, SOME_MISTAKES))
def test_a_mistake(name: str):
    case, words = MISTAKES[name]
    errors = judged(case)
    assert all(isinstance(error, VerificationError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert re.search(words, errors[0].report.findings[0]), errors[0].report.findings


@pytest.mark.parametrize("name", rows(RIGHT, SOME_RIGHT))
def test_a_right_step(name: str):
    reports = judged(RIGHT[name])
    assert not any(isinstance(report, BaseException) for report in reports), reports
    assert ": equal to one device" in str(reports[0]).splitlines()[0]
    assert not reports[0].findings
    assert not reports[0].unused
