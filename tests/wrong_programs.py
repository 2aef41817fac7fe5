"""Programs that are wrong under context parallelism although no attention call is, and right ones that look like them.

``PROGRAMS`` is a table: one row is a small model, and the step that trains it on a mesh of any size. A wrong program
gives another loss or another gradient on several ranks than on one rank. A right program does not.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice, pairwise, product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import scan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    BackboneContextParallel,
    Causal,
    Documents,
    ModuleContextParallel,
    PerRow,
    SequenceLayout,
    SequenceScope,
    SlidingWindow,
    Tree,
    Ulysses,
    context_attention,
    context_flex_attention,
    context_max_scores,
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
from cp_styles.batch import predicted_tokens
from cp_styles.collectives import gather, heads_to_seq, seq_to_heads, split
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.kernels.base import Kernel, OtherBackward
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.masks import EndedWindows
from cp_styles.mixers import (
    context_causal_conv1d,
    context_dropout,
    context_halo,
    context_recurrence,
    context_roll,
    context_select,
    context_windows,
    query_rows,
    selected_keys,
    window_layout,
)
from cp_styles.testing import RankTimeout
from cp_styles.torch_api import context_parallel
from cp_styles.verify import verify
from tests.device import DEVICE, run_ranks, there
from tests.oracle import randn
from tests.ranks.mixers.kernels import chunk_gla

S, D, WORDS, RANKS = 12, 8, 64, 2
X = randn(0, 2, S, D)
IDS = torch.randint(0, D, (2, S), generator=torch.Generator().manual_seed(1))


# One rank's view of a step.


@dataclass(frozen=True)
class RankView:
    """The ranks of a step, the layout of its sequence, and the batch ``x`` [B, S, ...] before it is cut."""

    mesh: DeviceMesh
    layout: SequenceLayout
    x: torch.Tensor

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def positions(self) -> torch.Tensor:
        return self.layout.positions(self.rank)

    def cut(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return self.layout.shard(whole, dim, self.rank)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.mesh.get_group())
        return x


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` in a dtype that all operators take: float32 for bfloat16."""
    return x.float() if x.dtype == torch.bfloat16 else x


def distance(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum of squares. (A sum with random signs would be smaller than its rounding.)"""
    return (widened(out) - target.to(widened(out))).square().sum() / 2


def by_token(out: torch.Tensor, view: RankView) -> torch.Tensor:
    """This rank's share of a loss that sums over tokens, of results [B, L, ...]."""
    return distance(out, view.cut(randn(5, out.shape[0], view.layout.length, *out.shape[2:])))


def by_sequence(out: torch.Tensor, view: RankView) -> torch.Tensor:
    """This rank's share of the loss of results that every rank has as a whole, as the logits [B, C] of a classifier."""
    return distance(out, randn(5, *out.shape)) / view.size


def total(loss: torch.Tensor, view: RankView) -> torch.Tensor:
    return view.all_reduce(loss.clone())


def summed(model: nn.Module, view: RankView) -> None:
    """Sum the gradients over the ranks. A parameter that only some ranks have used counts as 0 on the other ranks."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            view.all_reduce(parameter.grad)


def forward(model: nn.Module, x: torch.Tensor, view: RankView) -> torch.Tensor:
    return model(x)


@dataclass(frozen=True, eq=False)
class Program:
    """A model, and a step that can be run on any mesh: with the same result, if the program is right.

    Attributes:
        name, kind: what the program does, and the group of programs that it belongs to.
        make: returns the model, drawn from torch's generator.
        right: the step is the same on any number of ranks.
        x: the batch, [B, S] or [B, S, D]. It is cut along its second dim.
        call: ``call(model, x, view)`` returns the results of the model for this rank's part ``x``.
        cut: cuts the batch for a style. (A block cuts it by itself.)
        loss: this rank's share of the loss, from the results of ``call``.
        after: what the step does behind the backward.
        returns: what the step returns, from this rank's share of the loss.
        layout: the balancer.
        options: of the ModuleContextParallel, and of the block.
        apply: puts a model under context parallelism; default: one ModuleContextParallel for the whole model.
        no_block: why there is no such program in a block; empty if there is.
        dtype: of the model and of a batch of floats.
    """

    name: str
    make: Callable[[], nn.Module]
    right: bool
    kind: str = ""
    x: torch.Tensor = X
    call: Callable[[Any, torch.Tensor, RankView], Any] = forward
    cut: Callable[[RankView], torch.Tensor] = lambda view: view.cut(view.x)
    loss: Callable[[Any, RankView], torch.Tensor] = by_token
    after: Callable[[nn.Module, RankView], None] = summed
    returns: Callable[[torch.Tensor, RankView], Any] = total
    layout: Callable[[int, int], SequenceLayout] = head_tail
    options: Mapping[str, Any] = field(default_factory=dict)
    apply: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None
    no_block: str = ""
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """What the step is given. Copies, because a block changes its buffers."""
        return {"x": there(self.x.to(self.dtype) if self.x.is_floating_point() else self.x.clone())}

    def drawn(self) -> Program:
        """The program whose models have equal weights. They are drawn now, before there are threads."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return replace(self, make=partial(copy.deepcopy, self.make()))

    def in_dtype(self, dtype: torch.dtype) -> Program:
        """The program whose model computes in ``dtype``. Integers stay."""
        return replace(self, dtype=dtype)

    def unstyled(self, mesh: DeviceMesh) -> nn.Module:
        """A new model, the same on every rank, without styles."""
        return self.make().to(DEVICE, self.dtype)

    def model(self, mesh: DeviceMesh) -> nn.Module:
        """A new model, the same on every rank, with its styles on."""
        model = self.unstyled(mesh)
        if self.apply is not None:
            return self.apply(model, mesh)
        return parallelize_module(model, mesh, ModuleContextParallel(layout=self.layout, **self.options))

    def step(self, model: nn.Module, batch: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> Any:
        """Forward, loss, backward, and the sum of the gradients over ``mesh``, of a model with styles.

        Returns the loss, summed over the ranks.
        """
        view = self._view(batch, mesh)
        return self._run(model, self.cut(view), view)

    def step_in_block(self, model: nn.Module, batch: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> Any:
        """Run the step in a ``context_parallel`` block, with a model without styles."""
        view, x = self._view(batch, mesh), batch["x"].clone()
        cut = {"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": {x}}
        with context_parallel(mesh, layout=self.layout, **cut, **self.options):
            return self._run(model, x, view)

    def _view(self, batch: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> RankView:
        return RankView(mesh, self.layout(batch["x"].shape[1], mesh.size()), batch["x"])

    def _run(self, model: nn.Module, x: torch.Tensor, view: RankView) -> Any:
        model.view = view  # pyright: ignore[reportArgumentType]
        try:
            loss = self.loss(self.call(model, x, view), view)
            if loss.requires_grad:
                loss.backward()
                self.after(model, view)
            return self.returns(loss.detach(), view)
        finally:
            del model.view  # it would keep the groups of the mesh


@dataclass(frozen=True)
class Door:
    """A way to put a program under context parallelism: ``model`` makes its model, ``step`` runs it."""

    model: Callable[[Program, DeviceMesh], nn.Module]
    step: Callable[[Program, nn.Module, Mapping[str, torch.Tensor], DeviceMesh], Any]
    missing: Callable[[Program], str]


DOORS = {
    "style": Door(Program.model, Program.step, lambda program: ""),
    "block": Door(Program.unstyled, Program.step_in_block, lambda program: program.no_block),
}


# One tiny attention and one tiny model.


def heads(x: torch.Tensor) -> torch.Tensor:
    """[B, L, D] -> [B, 2, L, D / 2]."""
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


class Core(nn.Module):
    """Attention of query, key and value [B, H, L, D]. ``act(core, q, k, v)`` replaces the call."""

    def __init__(self, act: Callable[..., torch.Tensor] | None, causal: bool) -> None:
        super().__init__()
        self.act, self.causal = act, causal

    def forward(self, q, k, v):
        if self.act is not None:
            return self.act(self, q, k, v).to(q.dtype)
        return self.attend(q, k, v)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Attention(nn.Module):
    """Attention with its projections, over [B, L, D]."""

    def __init__(self, inside: Callable[..., torch.Tensor] | None = None, *, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.core = nn.Linear(D, 3 * D), nn.Linear(D, D), Core(inside, causal)

    def forward(self, x):
        return self.out(joined(self.core(*map(heads, self.qkv(x).chunk(3, -1)))))


Slot = Callable[[Any, Any], Any]
"""``slot(model, x)``: a part of a model's forward."""


class Model(nn.Module):
    """An attention of tokens [B, L, D], or of ids [B, L], and what is done around it.

    ``read`` makes a tensor of the argument of the model, ``before`` and ``behind`` are before and behind the attention,
    ``inside`` replaces the attention call, and ``give`` makes the results of the last tensor. Each of them is given the
    model, whose ``table`` [WORDS, D], ``linear``, ``taps`` and ``parts`` it may use. Further arguments of the model are
    ``given`` and ``named``.
    """

    view: RankView

    def __init__(
        self,
        before: Slot | None = None,
        *,
        inside: Callable[..., torch.Tensor] | None = None,
        behind: Slot | None = None,
        read: Slot | None = None,
        give: Slot | None = None,
        causal: bool = True,
        **parts: nn.Module,
    ) -> None:
        super().__init__()
        self.attention = Attention(inside, causal=causal)
        self.read, self.before, self.behind, self.give = read, before, behind, give
        self.table, self.linear = nn.Parameter(torch.randn(WORDS, D)), nn.Linear(D, D)
        self.taps = nn.Parameter(torch.randn(D, 1, 3))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x, *given, **named):
        self.given, self.named = given, named
        return self.features(x)

    def features(self, x):
        x = x if self.read is None else self.read(self, x)
        x = x if x.is_floating_point() else self.table[x]
        x = self._through(self.before, x)
        x = x + self.attention(x)
        x = self._through(self.behind, x)
        return x if self.give is None else self.give(self, x)

    def _through(self, slot: Slot | None, x: torch.Tensor) -> torch.Tensor:
        return x if slot is None else slot(self, x).to(self.linear.weight.dtype)


def program(name: str, before: Slot | None, model: Callable[[], nn.Module] | None, **fields: Any) -> Program:
    return Program(name, partial(Model, before) if model is None else model, **fields)


def wrong(name: str, before: Slot | None = None, *, model: Callable[[], nn.Module] | None = None, **fields: Any):
    """A row of the table: a wrong program, by what its model does before the attention, or by its model."""
    return program(name, before, model, right=False, **fields)


def right(name: str, before: Slot | None = None, *, model: Callable[[], nn.Module] | None = None, **fields: Any):
    """A row of the table: a right program."""
    return program(name, before, model, right=True, **fields)


def kind(name: str, *programs: Program, **fields: Any) -> tuple[Program, ...]:
    """Programs of one kind. ``fields`` are common to them."""
    return tuple(replace(each, kind=name, **fields) for each in programs)


# Functions that several programs use.


def centred(m, x):
    return x - x.mean(1, keepdim=True)


def counted(m, x):
    return x + m.table[torch.arange(x.shape[1])]


def placed(m, x):
    """The right way to add positions."""
    return x + m.table[m.view.positions]


def product_of(q, k, v):
    """Attention as it is often written out."""
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def score(m, x):
    return x @ m.table[0]


def shifted_ids(ids):
    return F.pad(ids[:, :-1], (1, 0))


def by_hand(x: torch.Tensor) -> torch.Tensor:
    """``x`` as if the program had cut it without a function of the package."""
    return torch.tensor(x.tolist(), dtype=x.dtype)


def given_by_hand(m, x, view):
    return m(by_hand(x))


def without_gradients(m, x, view):
    with torch.no_grad():
        return m(x)


def on(plan: Callable[[], Any]) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Apply a plan."""
    return lambda model, mesh: parallelize_module(model, mesh, plan())


# Around collectives, mixers and other doors.


def pooled_over_ranks(m, x):
    x = gather(x, 1, m.view.mesh, layout=m.view.layout, reduce_gradients=True)
    return m.linear(x.mean(1))


def centred_over_ranks(m, x):
    x = gather(x, 1, m.view.mesh, layout=m.view.layout, reduce_gradients=False)
    return split(centred(m, x), 1, m.view.mesh, layout=m.view.layout)


def classifier(behind: Slot | None = None) -> Callable[[], nn.Module]:
    return lambda: Model(behind=behind, give=pooled_over_ranks)


def rolled(m, x):
    return context_roll(x, 1, 1, m.view.mesh, fill=0.0, layout=m.view.layout)


def convolved(m, x):
    conv = partial(F.conv1d, weight=m.taps, groups=D)
    padded = lambda x: conv(F.pad(x, (2, 0)))  # noqa: E731
    return context_causal_conv1d(padded, x.mT, m.view.mesh, width=3, layout=m.view.layout).mT


def indexed(m, x):
    """Attends to three keys, which an indexer selects among those of all ranks."""
    view, head = m.view, x[:, None]
    places = {"mesh": view.mesh, "layout": view.layout}
    mask = context_select(head, m.linear(x), x.new_ones(head.shape[:3]), top_k=3, mask=Causal(), **places).mask
    return x + context_attention(head, head, head, mask=mask & Causal(), **places)[:, 0]


def indexed_alone(m, x):
    """Selects keys among those of this rank."""
    view, head = m.view, x[:, None]
    places = {"mesh": view.mesh, "layout": view.layout}
    mask = selected_keys((x @ m.linear(x).mT).topk(3).indices, **places)
    return x + context_attention(head, head, head, mask=mask & Causal(), **places)[:, 0]


def in_blocks(m, x):
    """Attends to the means of the blocks of two tokens that have ended."""
    view = m.view
    means = context_windows(x, view.mesh, size=2, layout=view.layout).mean(2)
    return attended_to_blocks(view, x, means, window_layout(view.layout, 2))


def in_blocks_of_a_part(m, x):
    """Attends to the means of the blocks of this rank's tokens, as if they were the blocks of the sequence."""
    view = m.view
    numbers = [0, *accumulate(length // 2 for length in view.layout.lengths)]
    blocks = SequenceLayout.from_chunks([chunk] for chunk in pairwise(numbers))
    return attended_to_blocks(view, x, x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).mean(2), blocks)


def attended_to_blocks(view, x, means, blocks):
    keys, places = means[:, None], {"layout": view.layout, "kv_layout": blocks, "mask": EndedWindows(2)}
    return x + context_attention(x[:, None], keys, keys, view.mesh, **places)[:, 0]


def with_blocks(numbers):
    """Attends to the blocks of three keys that ``numbers(view, heads, means)`` gives for each head."""

    def program(m, x):
        view = m.view
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        places = {"mesh": view.mesh, "layout": view.layout}
        means = context_windows(m.linear(x), **places, size=3).mean(2)
        chosen = numbers(view, heads, means.unflatten(-1, (2, -1)).transpose(1, 2))
        mask = Causal() & selected_keys(chosen, **places, block=3)
        out = context_attention(heads, heads, heads, mask=mask, **places)
        return x + out.transpose(1, 2).flatten(2)

    return program


@with_blocks
def blocks_of_all(view, heads, means):
    """Selected among the blocks of all ranks."""
    layout = window_layout(view.layout, 3)
    means = gather(means, 2, view.mesh, layout=layout, reduce_gradients=False)
    return (heads @ means.mT).topk(2).indices


@with_blocks
def blocks_of_rank(view, heads, means):
    """Selected among the blocks of this rank, by numbers that count from its first block."""
    return (heads @ means.mT).topk(min(2, means.shape[2])).indices


def causal_conv1d_fn(x, weight, bias=None, activation=None, seq_idx=None):
    return F.conv1d(F.pad(x, (2, 0)), weight[:, None], groups=D)


class ConvolvedByName(nn.Module):
    """Calls a function of causal-conv1d, which a style replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 3))

    def forward(self, x):
        return causal_conv1d_fn(x.mT, self.weight).mT


class ShiftedTwice(nn.Module):
    """Adds to each token the two before it."""

    def forward(self, x):
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1] + F.pad(x, (0, 0, 2, 0))[:, :-2]


def with_halo(reach: int) -> dict[str, Any]:
    """A model with a module that depends on the two tokens before a token, and has a halo."""

    def apply(model: Any, mesh: DeviceMesh) -> nn.Module:
        context_halo(model.shifted, mesh, reach=reach)
        return parallelize_module(model, mesh, ModuleContextParallel(layout=head_tail))

    model = lambda: Model(lambda m, x: m.shifted(x), shifted=ShiftedTwice())  # noqa: E731
    return {"model": model, "apply": apply, "no_block": "its halo is put on with the style"}


def clipped(m, x, *, over_ranks: bool = True):
    """Divides by the largest score of all queries, or of this rank's queries alone."""
    q = m.linear(x).unsqueeze(1)
    largest = context_max_scores(q, q, m.view.mesh, mask=Causal(), layout=m.view.layout).amax()
    if over_ranks:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=m.view.mesh.get_group())
    return x / largest.to(x.dtype)


def biased(m, x, *, of_rank: bool = False):
    """Adds a bias to the score of a query and its key; ``of_rank`` scales it by the row of the query on this rank."""
    q, rank = m.linear(x).unsqueeze(1), m.view.mesh.get_local_rank()
    at = torch.arange(x.shape[1]) if of_rank else m.view.layout.positions(rank, "cpu")
    rows = query_rows(q[..., :4] * (at[:, None] + 1), 2, m.view.mesh, layout=m.view.layout)

    def bias(score, b, h, q_idx, kv_idx):
        return score + rows[b, h, q_idx, (q_idx - kv_idx).clamp(0, 3)]

    options = {"score_mod": bias, "mask": Causal(), "layout": m.view.layout}
    return context_flex_attention(q, q, q, m.view.mesh, **options).squeeze(1)


AROUND = (
    *kind(
        "around gather",
        right("nothing", model=classifier()),
        wrong("a softmax over tokens, gathered, pooled", model=classifier(lambda m, x: x * x.softmax(1))),
        loss=by_sequence,
    ),
    *kind(
        "around split",
        right("gathered, centred, split", centred_over_ranks),
        wrong("gathered, centred, split, centred", lambda m, x: centred(m, centred_over_ranks(m, x))),
        right("centred by a sum over all ranks", lambda m, x: x - m.view.all_reduce(x.detach().sum(1, True)) / S),
    ),
    *kind(
        "around mixers",
        right("context_roll", rolled),
        right("context_causal_conv1d", convolved),
        right(
            "dropout by position", lambda m, x: context_dropout(x, 0.5, 1, m.view.mesh, seed=0, layout=m.view.layout)
        ),
        right("selected keys", indexed),
        right("the largest score of all queries", clipped),
        wrong("the largest score of this rank's queries", partial(clipped, over_ranks=False)),
        right("a bias of each query", biased),
        wrong("a bias of each query by its row on the rank", partial(biased, of_rank=True)),
        wrong("keys that each rank selects among its own", indexed_alone),
        right("blocks of tokens", in_blocks),
        wrong("blocks of a part", in_blocks_of_a_part),
        right("selected blocks of each head", blocks_of_all),
        wrong("blocks that each rank selects among its own", blocks_of_rank),
        right("a halo", **with_halo(2)),
        wrong("a halo whose reach is too small", **with_halo(1)),
        wrong("centred, then context_roll", lambda m, x: rolled(m, centred(m, x))),
        wrong("context_causal_conv1d, then centred", lambda m, x: centred(m, convolved(m, x))),
        wrong(
            "causal_conv1d_fn by name, then centred",
            model=lambda: Model(lambda m, x: centred(m, m.named_conv(x)), named_conv=ConvolvedByName()),
        ),
        wrong("a hash of two ids", model=lambda: Model(read=lambda m, i: (i * 7 + shifted_ids(i)) % 11), x=IDS),
        right(
            "a hash of two ids by context_roll",
            model=lambda: Model(
                read=lambda m, i: (i * 7 + context_roll(i, 1, 1, m.view.mesh, fill=0, layout=m.view.layout)) % 11
            ),
            x=IDS,
        ),
    ),
)


# Backwards.


class CentredGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient - gradient.mean(1, keepdim=True)


def bounded_gradient(m, x):
    y = m.linear(x)
    y.register_hook(lambda gradient: gradient / gradient.norm())
    return y


def energy(x):
    return (x.mean(1, keepdim=True) * x).sum()


def descended(m, x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return x + torch.autograd.grad(energy(leaf), leaf)[0]


def fast_weight(m, x):
    """A step of a fast weight on this sequence's tokens, as test-time training takes it."""

    def loss(weight, row):
        return (row @ weight.T - row.roll(1, -1)).square().mean()

    step = torch.func.vmap(torch.func.grad(loss), (None, 0))(m.linear.weight.detach(), x.detach())
    return x + torch.bmm(x, (m.linear.weight - step).mT)


class OtherGradient(torch.autograd.Function):
    """The identity, with a gradient that depends on the number of ranks."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.factor, None


class FusedLinear(torch.autograd.Function):
    """Writes the gradient of its weight by itself, as Megatron's linear layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        share = gradient.flatten(0, 1).T @ x.flatten(0, 1)
        ctx.weight.grad = share if ctx.weight.grad is None else ctx.weight.grad + share
        return gradient @ ctx.weight, None


BACKWARDS = (
    *kind(
        "a backward that mixes",
        wrong("autograd.Function", lambda m, x: CentredGradient.apply(m.linear(x))),
        wrong("a hook that bounds the norm", bounded_gradient),
        wrong("a gradient by the number of ranks", lambda m, x: OtherGradient.apply(m.linear(x), m.view.size)),
        right("a gradient that is written by itself", lambda m, x: FusedLinear.apply(x * 1, m.linear.weight)),
    ),
    *kind(
        "a gradient in the forward",
        wrong("autograd.grad", descended),
        wrong("vmap of func.grad", fast_weight),
    ),
)


# Tokens that several tokens choose.


def a_layer_above_the_median(m, x):
    mask, y = score(m, x) > score(m, x).median(1, keepdim=True).values, x.clone()
    y[mask] = m.linear(x[mask])
    return y


def first_replaced(m, ids):
    return ids.scatter(1, (ids == 3).int().argmax(1, keepdim=True), 7)


def depths(choose: Callable[[torch.Tensor], torch.Tensor]) -> Slot:
    """A layer for the tokens that ``choose`` takes, as mixture of depths has it."""

    def before(m, x):
        rows = choose(score(m, x))[..., None].expand(-1, -1, D)
        return x.scatter_add(1, rows, m.linear(x.gather(1, rows)))

    return before


def sorted_by_score(m, x):
    return x.gather(1, score(m, x).argsort(1)[..., None].expand_as(x))


def expert_choice(m, x):
    flat = x.flatten(0, 1)
    out = torch.zeros_like(flat)
    for expert in range(3):
        rows = (flat @ m.table[expert]).topk(len(flat) // 2).indices.sort().values
        out = out.index_add(0, rows, m.linear(flat[rows]) * (1 + expert))
    return out.view_as(x)


def within_a_capacity(m, x):
    """Each expert takes the first tokens that choose it, up to a number that depends on this rank's tokens."""
    flat = x.flatten(0, 1)
    chosen, out = (flat @ m.table[:3].T).argmax(-1), torch.zeros_like(flat)
    for expert in range(3):
        (rows,) = torch.where(chosen == expert)
        rows = rows[: len(flat) // 4]
        out = out.index_add(0, rows, m.linear(flat[rows]) * (1 + expert))
    return x + out.view_as(x)


CHOSEN = (
    *kind(
        "chosen by several tokens",
        wrong("y[mask] = layer(x[mask]) above the median", a_layer_above_the_median),
        wrong("the first <eos> of each row replaced", model=lambda: Model(read=first_replaced), x=IDS),
        wrong("topk", depths(lambda s: s.topk(3, 1).indices)),
        wrong("expert choice", expert_choice),
        wrong("a capacity of experts", within_a_capacity),
        wrong("reversed", lambda m, x: x.flip(1), layout=contiguous),  # parts of head_tail are symmetric
        wrong("sorted by score, each row in its order", sorted_by_score),
        right("reversed twice", lambda m, x: m.linear(x.flip(1)).flip(1)),
    ),
)


# Positions that a model counts.


class Position(Model):
    """Takes positions by name, and counts them if it is given none."""

    def forward(self, x, position_ids=None):
        return super().forward(x, torch.arange(x.shape[1]) if position_ids is None else position_ids)


def given_positions(m, x):
    return x + m.table[m.given[0]]


def with_positions(of: Callable[[RankView, int], torch.Tensor | None]) -> Callable[..., Any]:
    def call(m, x, view):
        positions = of(view, x.shape[1])
        return m(x) if positions is None else m(x, position_ids=positions[None])

    return call


def interpolated_table(m, x):
    return x + F.interpolate(widened(m.table).T[None], size=x.shape[1], mode="linear")[0].T


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs of features as complex numbers, turned by their positions: rotary embeddings."""
    angles = positions[:, None] * torch.tensor([1.0, 0.3])
    turns = torch.polar(torch.ones_like(angles), angles)
    cut = torch.view_as_complex(widened(x).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(cut * turns).flatten(-2).to(x.dtype)


COUNTS: dict[str, Slot] = {
    "arange(L)": counted,
    "a table interpolated to L": interpolated_table,
    "numpy": lambda m, x: x + m.table[torch.from_numpy(torch.arange(x.shape[1]).numpy().copy())[None]],
    "a table that is still zeros": lambda m, x: x + m.zeros[: x.shape[1]],
}


def with_zeros(before: Slot) -> Callable[[], nn.Module]:
    def make():
        model = Model(before)
        model.zeros = nn.Parameter(torch.zeros(WORDS, D))
        return model

    return make


class Joint(Model):
    """A text that every rank has, before the tokens of an image, to which ``given`` is added."""

    def forward(self, x, *given):
        x = self._through(self.before, sum(given, x))
        h = torch.cat((TEXT.to(x), x), 1)
        return (h + self.attention(h))[:, TEXT.shape[1] :]


TEXT = randn(8, 2, 3, D)
WIDE = {"mask": Causal() & SlidingWindow(S, 0)}
DOCUMENTS = (5, 7)


def in_scope(mask: Any) -> Callable[..., Any]:
    def call(m, x, view):
        with SequenceScope(view.layout, mask=mask):
            return m(x)

    return call


TREE = Tree((4, 3, 2, 3), (-1, 0, 1, 0))


def placed_in_rollouts(m, x):
    return x + m.table[TREE.position_ids.to(x.device)[m.view.positions]]


def placed_in_part(m, x):
    """Positions in rollouts, of the first tokens on every rank."""
    return x + m.table[TREE.position_ids.to(x.device)[: x.shape[1]]]


def two_layouts(m, x, view):
    """Two batches of one length, with other documents, whose layouts differ. The results are those of whole tokens."""
    results = []
    for lengths in (DOCUMENTS, (S - 4, 4)):
        layout = per_document_head_tail(S, view.size, documents=lengths)
        with SequenceScope(layout, mask=Documents(lengths)):
            results.append(
                gather(m(layout.shard(view.x, 1, view.rank)), 1, view.mesh, layout=layout, reduce_gradients=True)
            )
    return view.cut(torch.stack(results).sum(0))


def of_part(view: RankView, length: int) -> torch.Tensor:
    return torch.arange(length)


def with_places(cut: Callable[[torch.Tensor, RankView], torch.Tensor]) -> Callable[..., Any]:
    """Call a model with positions that ``cut`` has cut; the first ones, if there are too many."""
    return lambda m, x, view: m(x, cut(m.table[None, :S].detach(), view)[:, : x.shape[1]])


def cut_contiguous(x: torch.Tensor, view: RankView) -> torch.Tensor:
    return by_hand(contiguous(S, view.size).shard(x, 1, view.rank))


COUNTED = (
    *kind(
        "counted",
        *(wrong(name, model=with_zeros(before)) for name, before in COUNTS.items()),
    ),
    *kind(
        "positions that are given",
        right("of the layout", call=with_positions(lambda view, length: view.positions)),
        wrong("none", call=with_positions(lambda view, length: None)),
        wrong("from 0", call=with_positions(of_part)),
        wrong(
            "as torch.chunk cuts", call=with_positions(lambda view, length: torch.arange(S).chunk(view.size)[view.rank])
        ),
        make=lambda: Position(given_positions),
    ),
    *kind(
        "with a joint text",
        right("nothing", model=lambda: Joint(causal=False)),
        wrong("centred", model=lambda: Joint(centred, causal=False)),
        wrong("table[:L] of the image", model=lambda: Joint(lambda m, x: x + m.table[: x.shape[1]], causal=False)),
        wrong("positions that are not cut", model=lambda: Joint(causal=False), call=with_places(lambda x, view: x)),
        wrong("positions of another cut", model=lambda: Joint(causal=False), call=with_places(cut_contiguous)),
        apply=on(lambda: ModuleContextParallel(layout=JointLayout(prefix=TEXT.shape[1]))),
        no_block="a block takes no JointLayout",
    ),
    *kind(
        "with a joint text that is longer",
        wrong("by one token", model=lambda: Joint(causal=False)),
        apply=on(lambda: ModuleContextParallel(layout=JointLayout(prefix=TEXT.shape[1] - 1))),
        no_block="a block takes no JointLayout",
    ),
    *kind(
        "under a mask of the style",
        wrong("Causal()", model=lambda: Model(counted, causal=False), options={"mask": Causal()}),
        right("no counting", model=lambda: Model(causal=False), options=WIDE),
        wrong(
            "position_ids from 0, Causal() & SlidingWindow()",
            model=lambda: Position(given_positions, causal=False),
            call=with_positions(of_part),
            options=WIDE,
        ),
    ),
    *kind(
        "under a scope",
        wrong("packed documents", counted, call=in_scope(Documents(DOCUMENTS))),
        right("packed documents, no counting", call=in_scope(Documents(DOCUMENTS))),
        right("a window", call=in_scope(SlidingWindow(4))),
        right("other documents in each row", call=in_scope(PerRow((Documents(DOCUMENTS), Documents((S - 3, 3)))))),
        right("two batches under two scopes", call=two_layouts, apply=on(ModuleContextParallel)),
        right("no mask", call=in_scope(None)),
        right("a tree of rollouts", placed_in_rollouts, call=in_scope(TREE)),
        wrong("a tree of rollouts, positions of a part", placed_in_part, call=in_scope(TREE)),
        wrong("a tree of rollouts, counting", counted, call=in_scope(TREE)),
        no_block="a scope is for styles",
    ),
)


# Memory, loops and experts.


def experts_by_mask(m, x):
    """Three experts, of which the first gets no token."""
    flat = x.flatten(0, 1)
    chosen, out = 1 + (flat @ m.table[:2].T).argmax(-1), torch.empty_like(flat)
    for expert in range(3):
        mask = chosen == expert
        out[mask] = m.linear(flat[mask]) * (1 + expert)
    return out.view_as(x)


def two_experts_each(m, x):
    flat = x.flatten(0, 1)
    weights, chosen = (flat @ m.table[:3].T).softmax(-1).topk(2, -1)
    rows, order = torch.arange(len(flat)).repeat_interleave(2), chosen.flatten().argsort(stable=True)
    out = m.linear(flat[rows[order]]) * weights.flatten()[order, None]
    back = torch.empty_like(out)
    back[order] = out
    return back.view(-1, 2, D).sum(1).view_as(x)


def recurrence(x):
    state, out = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        out.append(state)
    return torch.stack(out, 1)


def statistics_in_place(m, x):
    x = x.clone()
    x[:, :, 0].sub_(x[:, :, 0].mean(1, keepdim=True))
    return x


@torch.library.custom_op("cp_styles_wrong_programs::cumulative", mutates_args=())
def cumulative_op(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


def by_numpy(m, x):
    return x - torch.from_numpy(x.detach().double().numpy().mean(1, keepdims=True)).to(x)


MEMORY = (
    *kind(
        "layers of flattened tokens",
        right("the first has no token", experts_by_mask),
        right("two each", two_experts_each),
        right("vmap over tokens", lambda m, x: torch.vmap(m.linear)(x.flatten(0, 1)).view_as(x)),
        right("one token on each rank", call=given_by_hand, x=X[:1, :RANKS]),
        right("checkpointed", lambda m, x: checkpoint(m.linear, x, use_reentrant=False)),
    ),
    *kind(
        "code that is no operator of torch",
        wrong("an operator of another library", lambda m, x: cumulative_op(x), call=without_gradients),
        wrong("numpy", by_numpy),
        wrong("item()", lambda m, x: x * x.detach().abs().mean().item()),
    ),
)


# Forwards that differ, hooks, objects.


def branched(m, x):
    """A layer for [B, C, L] that only some forwards run."""
    return x + m.branch(x.mT).mT if m.later else x


def runs_later(m, x, view):
    m.later = False
    m(x)
    m.later = True
    return m(x)


def evaluated_first(m, x, view):
    m.eval()
    m(x)
    return m.train()(x)


def named(first: dict[str, Any], then: dict[str, Any]) -> Callable[..., Any]:
    def call(m, x, view):
        m(x, **first)
        return m(x, **then)

    return call


class OfBatch(Model):
    """Its tokens and positions are entries of a dict."""

    def forward(self, batch):
        self.given = [batch.get("positions", torch.arange(batch["x"].shape[1]))]
        return self.features(batch["x"])


def then_without_positions(m, x, view):
    m({"x": x, "positions": view.positions})
    return m({"x": x})


def hooked_model(hook: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make():
        model = Model()
        hook(model)
        return model

    return make


def keep(m, x):
    m.kept = x


SOURCE = randn(3, 2, 20, D)


def attends_to(change: Slot) -> Callable[[], nn.Module]:
    """A model that attends to a second sequence [B, 20, D] too, of which ``change`` makes what is attended to."""

    def behind(m, x):
        y = change(m, m.given[0])
        y = y + m.source(y)
        return x + joined(F.scaled_dot_product_attention(heads(x), heads(y), heads(y)))

    return lambda: Model(behind=behind, source=Attention(causal=False))


def with_source(cut: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def call(m, x, view):
        source = SOURCE.to(x)
        return m(x, cut(head_tail(source.shape[1], view.size).shard(source, 1, view.rank)))

    return call


def scanned(x: torch.Tensor, step: Callable[..., Any]) -> torch.Tensor:
    return scan(step, x.new_zeros(len(x), D), x.movedim(1, 0))[1].movedim(0, 1)


def recurrent_step(state, token):
    return 0.5 * state + token, (0.5 * state + token).clone()


def doubled(m, x):
    return torch.cond(x.sum() > -1e9, lambda t: t * 2, lambda t: t * 3, (x,))


FORWARDS = (
    *kind(
        "a layer that runs first in a later forward",
        wrong("Conv1d", model=lambda: Model(branched, branch=nn.Conv1d(D, D, 3, padding=1))),
        wrong("a statistic", lambda m, x: centred(m, x) if m.later else x),
        call=runs_later,
    ),
    *kind(
        "other arguments than in the first forward",
        wrong(
            "a string",
            lambda m, x: centred(m, x) if m.named["mode"] == "centred" else x,
            call=named({"mode": "plain"}, {"mode": "centred"}),
        ),
        wrong("a dict without positions", model=lambda: OfBatch(given_positions), call=then_without_positions),
        wrong(
            "a norm in training behind one in evaluation",
            model=lambda: Model(lambda m, x: m.norm(x.mT).mT, norm=nn.BatchNorm1d(D)),
            call=evaluated_first,
        ),
        right("a norm in evaluation", model=lambda: Model(lambda m, x: m.norm(x.mT).mT, norm=nn.BatchNorm1d(D)).eval()),
    ),
    *kind(
        "hooks of the model",
        wrong("hook", model=hooked_model(lambda m: m.register_forward_hook(lambda m, _, out: centred(m, out)))),
        wrong(
            "pre-hook",
            model=hooked_model(lambda m: m.register_forward_pre_hook(lambda m, args: (centred(m, args[0]),))),
        ),
        right("hook by token", model=hooked_model(lambda m: m.register_forward_hook(lambda m, _, out: 2 * out))),
    ),
    *kind(
        "results in an object",
        wrong(
            "an object",
            model=lambda: Model(behind=centred, give=lambda m, x: SimpleNamespace(hidden=x)),
            call=lambda m, x, view: m(x).hidden,
        ),
        wrong(
            "an attribute",
            model=lambda: Model(behind=centred, give=keep),
            call=lambda m, x, view: (m(x), vars(m).pop("kept"))[1],
        ),
        wrong(
            "ids",
            model=lambda: Model(behind=centred, give=lambda m, x: x.argmax(-1)),
            call=lambda m, x, view: m(x).double(),
        ),
    ),
    *kind(
        "methods that are not forward",
        wrong("centred before", centred),
        right("nothing"),
        call=lambda m, x, view: m.features(x),
    ),
    *kind(
        "a second sequence",
        right("nothing", model=attends_to(lambda m, y: y), call=with_source(lambda y: y)),
        wrong("centred", model=attends_to(centred), call=with_source(lambda y: y)),
        wrong("counted, cut by hand", model=attends_to(counted), call=with_source(by_hand)),
    ),
    *kind(
        "higher-order operators",
        wrong("scan", lambda m, x: scanned(x, recurrent_step)),
        wrong("cond, then centred", lambda m, x: centred(m, doubled(m, x))),
        right("map over samples by token", lambda m, x: map_rows(lambda row: 2 * row, x)),
        call=without_gradients,
    ),
)


# Styles on parts of a model.


def scaled_by_the_mean(core, q, k, v):
    """``float(DTensor)`` is a number of this rank."""
    return F.scaled_dot_product_attention(q, k * (10 * float(k.abs().mean())), v)


ON_ATTENTION = on(lambda: {"attention": ModuleContextParallel(layout=head_tail)})
ON_CORE = on(lambda: {"attention.core": AttentionContextParallel(layout=head_tail)})
ON_PARTS = "a block is around the whole model"


def two_attentions(inside: Callable[..., torch.Tensor] | None = None) -> Callable[[], nn.Module]:
    return lambda: Model(behind=lambda m, x: x + m.second(x), second=Attention(inside))


class Frames(Model):
    """Attention among the patches of each frame, and among the frames of each patch, of [B, T, N, D]."""

    def features(self, x):
        among = self.attention(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
        x = x + among
        return x + self.patches(x.flatten(0, 1)).view(x.shape)


FRAMES = {"model": lambda: Frames(patches=Attention()), "x": randn(2, 2, S, 3, D)}

PARTS = (
    *kind(
        "a style on the attention",
        right("nothing"),
        wrong("centred", centred),
        wrong("counted", counted),
        apply=ON_ATTENTION,
        no_block=ON_PARTS,
    ),
    *kind(
        "attention along two dims",
        wrong("one style for both", **FRAMES),
        right("a style for one along the tokens", **FRAMES, apply=ON_ATTENTION, no_block=ON_PARTS),
    ),
    *kind(
        "two attentions",
        wrong("one without a style", model=two_attentions(), apply=ON_ATTENTION, no_block=ON_PARTS),
        wrong(
            "two layouts",
            model=two_attentions(),
            apply=on(
                lambda: {
                    "attention": ModuleContextParallel(layout=head_tail),
                    "second": ModuleContextParallel(layout=contiguous),
                }
            ),
            no_block=ON_PARTS,
        ),
        right("both", model=two_attentions()),
    ),
)


# Causes that verify names, by the module or the argument.


class CausalConvolution(nn.Conv1d):
    def forward(self, x):
        return super().forward(x)[..., : x.shape[-1]]


class Scan(nn.Module):
    """A recurrence over packed documents [B, L, D]. Its user forgets the documents where the sequence is cut."""

    def forward(self, x, cu_seqlens):
        x_BLHK = x.unflatten(-1, (2, -1))
        heads = x_BLHK, x_BLHK, x_BLHK, -F.softplus(x_BLHK)
        if x.shape[1] < S:
            return context_recurrence(chunk_gla, dist.group.WORLD, layout=head_tail)(*heads)[0].flatten(2)
        lengths = [S] if cu_seqlens is None else cu_seqlens.diff().tolist()
        parts = zip(*(each.split(lengths, 1) for each in heads), strict=True)
        return torch.cat([chunk_gla(*part)[0].flatten(2) for part in parts], 1)


class PlainAttention(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


def replaced_core(m, x, view):
    """The style of the core was applied to the core itself, so no module around it can see that it has gone."""
    if view.size > 1:
        parallelize_module(m.second.core, view.mesh, AttentionContextParallel())
        m.second.core = Core(None, True)
    return m(x)


def fails_in_a_hook(m, x, view):
    def refuse(module, args):
        if view.size > 1 and view.rank == 0:
            raise ValueError("not this one")

    handle = m.attention.out.register_forward_pre_hook(refuse)
    try:
        return m(x)
    finally:
        handle.remove()


def optimizer_step(model, view):
    torch.optim.AdamW(model.parameters()).step()


def removing_step(model, view):
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def zeroed(model, view):
    model.zero_grad(set_to_none=False)


class Drawn(nn.Module):
    """Noise from a generator that goes on from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def added_layer(name: str, layer: Callable[[], nn.Module]) -> Program:
    """A layer of [B, L, D] that is added to the tokens."""
    return wrong(name, model=lambda: Model(lambda m, x: x + m.layer(x), layer=layer()))


class AlongTokens(nn.Module):
    """A layer of [B, C, L], for tokens [B, L, C]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.mT).mT


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


CAUSES = (
    *kind(
        "a style on the core of an attention",
        right("nothing"),
        wrong("item() of a DTensor", model=lambda: Model(inside=scaled_by_the_mean)),
        wrong("positions from 0", model=lambda: Position(given_positions), call=with_positions(of_part)),
        wrong(
            "arange in the model",
            model=lambda: Model(lambda m, x: x + m.places(torch.arange(x.shape[1])), places=nn.Embedding(WORDS, D)),
        ),
        wrong("a table sliced by the length", lambda m, x: x + m.table[: x.shape[1]]),
        wrong(
            "a table sliced by the length of a part that the model cuts",
            lambda m, x: (part := m.view.cut(m.linear(x))) + m.table[: part.shape[1]],
            cut=lambda view: view.x,
            no_block="the model cuts",
        ),
        wrong("divided by the length", lambda m, x: x * 10 / x.shape[1]),
        right("divided by the length of the sequence", lambda m, x: x * 10 / m.view.layout.length),
        added_layer("a convolution", lambda: AlongTokens(nn.Conv1d(D, D, 3, padding=1))),
        added_layer("a recurrence", Recurrent),
        added_layer("a causal convolution", lambda: AlongTokens(CausalConvolution(D, D, 3, padding=2))),
        wrong(
            "documents that a recurrence is not given",
            model=lambda: Model(lambda m, x: x + m.scan(x, torch.tensor([0, 5, S])), scan=Scan()),
        ),
        added_layer("attention in plain operations", PlainAttention),
        wrong("the mean over tokens in the model", centred),
        wrong("a softmax over tokens behind attention", model=lambda: Model(behind=lambda m, x: x.softmax(1))),
        added_layer("random numbers of a rank", Drawn),
        apply=ON_CORE,
        no_block=ON_PARTS,
    ),
    *kind(
        "a second attention",
        wrong(
            "FlexAttention without a style",
            model=two_attentions(lambda core, q, k, v: with_block_mask(core, q, k, v, q.shape[2])),
            call=without_gradients,
        ),
        wrong("replaced", model=two_attentions(), call=replaced_core),
        apply=ON_CORE,
        no_block=ON_PARTS,
    ),
)


# Places in a part, and layers along the tokens.


def begins(m, x):
    x = x.clone()
    x[:, 0] = m.table[0]
    return x


def every_second(m, x):
    x = x.clone()
    x[:, ::2] = m.linear(x[:, ::2].clone())
    return x


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "bag of ids": lambda m, x: x + F.embedding_bag(x.argmax(-1), widened(m.table))[:, None],
    "softmax of tokens": lambda m, x: x.softmax(1),
    "cumulative tokens": lambda m, x: x.cumsum(1),
    "a norm of tokens and features": lambda m, x: F.layer_norm(x, x.shape[1:]),
    "a recurrence": lambda m, x: recurrence(x),
    "a checkpointed recurrence": lambda m, x: checkpoint(recurrence, x, use_reentrant=False),
    "linear attention": lambda m, x: (x.unsqueeze(-1) * x.unsqueeze(-2)).cumsum(1).sum(-1),
    "shifted and padded": lambda m, x: F.pad(x, (0, 0, 1, -1)),
    "statistics in place": statistics_in_place,
    "its last token": lambda m, x: x + x[:, -1:],
    "a shift whose weight is 0": lambda m, x: x + m.zero * F.pad(x, (0, 0, 1, -1)),
}


def with_zero_weight(before: Slot) -> Callable[[], nn.Module]:
    def make():
        model = Model(before)
        model.zero = nn.Parameter(torch.zeros(()))
        return model

    return make


def with_weight_of_tokens(m, x):
    return F.layer_norm(x, (D,), weight=m.linear(x.mean((0, 1))))


ALONG = (
    *kind(
        "a place in a part",
        wrong("x[:, 0] = begin", begins),
        wrong("another layer for every second token", every_second),
    ),
    *kind(
        "padding of a convolution",
        wrong("causal", lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.taps, groups=D).mT),
        right("of features", lambda m, x: F.conv1d(x.reshape(-1, 1, D), m.taps[:1], padding=1).view_as(x)),
        right("of width 1", lambda m, x: F.conv1d(x.mT, m.table[:D, :, None]).mT),
    ),
    *kind(
        "layers along the tokens",
        wrong("GRU", model=lambda: Model(lambda m, x: m.layer(x), layer=Recurrent())),
        wrong("Softmax(1)", model=lambda: Model(lambda m, x: m.layer(x), layer=nn.Softmax(1))),
    ),
    *kind(
        "functions along the tokens",
        *(wrong(name, model=with_zero_weight(before)) for name, before in FUNCTIONS.items()),
    ),
    *kind(
        "a token shift by ZeroPad2d",
        wrong(
            "[B, 1, L, C]",
            model=lambda: Model(lambda m, x: x + m.pad(x[:, None])[:, 0], pad=nn.ZeroPad2d((0, 0, 1, -1))),
        ),
        right(
            "[B, L, C]",
            model=lambda: Model(lambda m, x: x + m.pad(x), pad=nn.ZeroPad2d((0, 0, 1, -1))),
            no_block="a style knows it",
        ),
        call=given_by_hand,
    ),
    *kind(
        "weights of several tokens",
        wrong("layer_norm(weight=)", with_weight_of_tokens, x=X[:1]),
    ),
    *kind(
        "tokens by themselves",
        right("a time-first layer", lambda m, x: m.linear(x.transpose(0, 1).contiguous()).transpose(0, 1)),
        right("a branch whose weight is 0", model=with_zero_weight(lambda m, x: x + m.zero * m.linear(x))),
        right(
            "a frozen layer", model=lambda: Model(lambda m, x: m.layer(x), layer=nn.Linear(D, D).requires_grad_(False))
        ),
        right("logits of -inf", model=lambda: Model(give=lambda m, x: F.pad(x, (0, 1), value=-torch.inf)[..., :-1])),
        right("tied weights", model=lambda: Model(behind=lambda m, x: x @ m.table.T @ m.table), x=IDS),
    ),
)


# Forms of attention.


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and used all the same

    @torch.jit.script
    def scripted_attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    @torch.jit.script
    def scripted_gelu(x):
        return torch.nn.functional.gelu(x)


HIDDEN = [scripted_attention]  # where nobody looks for it


def plus(act: Callable[..., torch.Tensor]) -> Callable[[], nn.Module]:
    """A model whose attention is a call, plus ``act(q, k, v)``."""
    return lambda: Model(inside=lambda core, q, k, v: core.attend(q, k, v) + act(q, k, v))


def masked_by_rank(core, q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def masked_whole(core, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril())


def with_block_mask(core, q, k, v, length=S):
    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cpu", BLOCK_SIZE=8)
    return flex_attention(q.detach(), k.detach(), v.detach(), block_mask=mask)


def among(rows: Callable[[torch.Tensor], torch.Tensor], back: Callable[..., torch.Tensor]) -> Slot:
    """Attention of [..., rows, features] that ``rows`` makes of the tokens."""

    def before(m, x):
        y = rows(x)
        return x + back(F.scaled_dot_product_attention(y, y, y), x)

    return before


def with_learned_rows(core, q, k, v):
    """Keys of learned rows, before the tokens of each rank."""
    rows = torch.ones_like(k[:, :, :2])
    return F.scaled_dot_product_attention(q, torch.cat((rows, k), 2), torch.cat((rows, v), 2))


def with_text_on_every_rank(m, x):
    h = torch.cat((TEXT.to(x), x), 1)
    return (h + m.attention(h))[:, TEXT.shape[1] :]


@dataclass(frozen=True)
class Early(OtherBackward):
    """A kernel that says of a row that it attends to nothing, although it does."""

    inner: Kernel = CPU_FLASH

    def forward(self, *args, **options):
        out, lse = self.inner.forward(*args, **options)
        return out, lse.index_fill(-1, torch.tensor([1]), -torch.inf)

    def backward(self, *args, **options):
        return self.inner.backward(*args, **options)


ATTENTION = (
    *kind(
        "attention in plain operations",
        wrong("as it is", model=plus(product_of)),
        wrong("between channels", among(lambda x: x.mT.unsqueeze(1), lambda y, x: y.squeeze(1).mT)),
    ),
    *kind(
        "products that are no attention of tokens",
        right(
            "as many other things as tokens", model=plus(lambda q, k, v: product_of(q, *[torch.eye(6, 4).to(q)] * 2))
        ),
        right(
            "among the heads of a token",
            model=plus(lambda q, k, v: product_of(*[q.transpose(1, 2)] * 3).transpose(1, 2)),
        ),
    ),
    *kind(
        "attention that is not along the tokens",
        wrong(
            "among the features of a token", among(lambda x: x.reshape(-1, 1, 4, 2), lambda y, x: y.reshape(x.shape))
        ),
        wrong("with rows of each rank", model=lambda: Model(inside=with_learned_rows, causal=False)),
        wrong("with a text on every rank", with_text_on_every_rank),
    ),
    *kind(
        "masks of an attention",
        wrong("of this rank's keys", model=lambda: Model(inside=masked_by_rank)),
        right("of the whole sequence", model=lambda: Model(inside=masked_whole)),
        right("a BlockMask of the whole sequence", model=lambda: Model(inside=with_block_mask), call=without_gradients),
    ),
    *kind(
        "TorchScript",
        wrong("attention and a call", model=plus(lambda q, k, v: scripted_attention(q, k, v))),
        wrong("hidden attention and a call", model=plus(lambda q, k, v: HIDDEN[0](q, k, v))),
        right("no attention", lambda m, x: scripted_gelu(x)),
    ),
    *kind(
        "configurations",
        right("striped", placed, layout=striped),
        right("contiguous", placed, layout=contiguous),
        right("Ulysses", placed, options={"strategy": Ulysses()}),
        right("a window", placed, options={"mask": SlidingWindow(4)}),
        right(
            "documents and their layout",
            placed,
            layout=partial(per_document_head_tail, documents=DOCUMENTS),
            options={"mask": Documents(DOCUMENTS)},
        ),
        right("bidirectional", model=lambda: Model(placed, causal=False)),
        right(
            "nn.MultiheadAttention",
            model=lambda: Model(
                lambda m, x: x + m.layer(x, x, x, need_weights=False)[0],
                layer=nn.MultiheadAttention(D, 2, batch_first=True),
            ),
        ),
        right("an odd length", placed, x=X[:, :11]),
        wrong("a kernel whose logsumexp is wrong", placed, options={"kernel": Early()}),
    ),
)


# Tokens along any dim of the inputs.


ARRANGED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "[L, B]": (lambda ids: ids.t().contiguous(), lambda x: x.t()),
    "[B, C, L]": (lambda ids: one_hot(ids).mT, lambda x: x.argmax(1)),
    "[2, B, L]": (lambda ids: torch.stack([ids, ids]), lambda x: x[1]),
    "[L] of one sequence": (lambda ids: ids[0].clone(), lambda x: x[None]),
    "an object": (lambda ids: SimpleNamespace(ids=ids.clone()), lambda x: x.ids),
}


def one_hot(ids: torch.Tensor) -> torch.Tensor:
    return F.one_hot(ids, D).float()


# Before the attention, of tokens [L, B, D].
TIME_FIRST: dict[str, Slot] = {
    "a recurrence": lambda m, x: m.rnn(x)[0],
    "a mean": lambda m, x: x + x.mean(0),
    "counted": lambda m, x: x + m.table[torch.arange(x.size(0))][:, None],
}


def arranged(name: str, before: Slot | None = None) -> dict[str, Any]:
    """A model that is given ids [B, L] in another form, and has its tokens along the first dim inside."""
    arrange, read = ARRANGED[name]

    def inside(m, x):
        x = x.transpose(0, 1)
        x = x + m.table[m.view.positions][:, None] if before is None else before(m, x)
        return x.transpose(0, 1)

    return {
        "model": lambda: Model(inside, read=lambda m, x: read(x), rnn=nn.GRU(D, D)),
        "call": lambda m, x, view: m(arrange(x)),
        "x": IDS[:1] if "one sequence" in name else IDS,
    }


# Results that have no tokens.


def chosen_token(m, x):
    return x[torch.arange(len(x)), x.sum(-1).argmax(1)]


POOLED: dict[str, Slot] = {
    "the mean": lambda m, x: x.mean(1),
    "the first token": lambda m, x: x[:, 0],
    "a chosen token": chosen_token,
}


def of_rows(size: int) -> Slot:
    """A head that makes a loss of ``size`` tokens at a time."""
    return lambda m, x: torch.stack([m.linear(rows).square().sum() for rows in x.split(size, 1)]).sum()


def added(out: torch.Tensor, view: RankView) -> torch.Tensor:
    """The loss that a model returns as this rank's sum."""
    return widened(out).sum()


RESULTS = (
    *kind("tokens along any dim", *(right(name, **arranged(name)) for name in ARRANGED)),
    *kind(
        "mixed along any dim",
        *(
            wrong(f"{name}, {what}", **arranged(name, TIME_FIRST[what]))
            for (at, name), (of, what) in product(enumerate(ARRANGED), enumerate(TIME_FIRST))
            if (at - of) % 3 == 0  # each form with two mistakes, each mistake in three forms
        ),
    ),
    *kind(
        "pooled from this rank's tokens",
        *(wrong(name, model=partial(Model, give=give)) for name, give in POOLED.items()),
        loss=by_sequence,
    ),
    *kind(
        "sums that a model returns",
        right("by sequence", model=lambda: Model(give=lambda m, x: x.square().sum((1, 2)))),
        wrong(
            "by sequence, of gradients that are not summed",
            model=lambda: Model(give=lambda m, x: x.square().sum()),
            after=lambda model, view: None,
        ),
        right("by three rows", model=lambda: Model(give=of_rows(3))),
        wrong("of attention", model=lambda: Model(give=lambda m, x: product_of(x, x, x).sum())),
        wrong("a mean", model=lambda: Model(give=lambda m, x: x.square().mean())),
        wrong("of the last token", model=lambda: Model(give=lambda m, x: x[:, -1:].square().sum())),
        right(
            "of the next ids, rolled before the cut",
            model=lambda: Model(give=lambda m, x: -x.log_softmax(-1).gather(-1, m.given[0][..., None]).sum()),
            x=IDS,
            call=lambda m, x, view: m(x, view.cut(view.x.roll(-1, 1))),
        ),
        wrong(
            "the balance of experts",
            model=lambda: Model(
                give=lambda m, x: (4 * m.linear(x)).softmax(-1).mean((0, 1)).square().sum() / m.view.size
            ),
        ),
        loss=added,
    ),
)


# Steps: the cut, labels, losses and gradients around a right model.


def labelled(
    labels: Callable[[RankView], torch.Tensor] = lambda view: view.cut(next_token_labels(view.x)),
    mean: Callable[..., torch.Tensor] = lambda losses, labels, view: global_loss(
        losses.sum(), global_token_count(labels, view.mesh), view.mesh
    ),
    weigh: Callable[[torch.Tensor], torch.Tensor] = lambda losses: losses,
) -> dict[str, Any]:
    """Cross entropy of the next token, its mean over all tokens."""

    def loss(logits, view):
        wanted = labels(view)
        losses = F.cross_entropy(widened(logits).mT, wanted, reduction="none")
        return mean(weigh(losses), wanted, view)

    return {"loss": loss, "returns": lambda loss, view: loss}


def of_few(view: RankView) -> torch.Tensor:
    """Labels in the positions of one rank."""
    wanted = next_token_labels(view.x)
    wanted[:, : S // 4 + 1] = wanted[:, S - S // 4 - 1 :] = -100
    return view.cut(wanted)


def ignored_at_the_end(view: RankView) -> torch.Tensor:
    wanted = view.cut(next_token_labels(view.x)).clone()
    wanted[:, -1] = -100
    return wanted


def twice_at_the_end(losses: torch.Tensor) -> torch.Tensor:
    return losses * by_place(losses[..., None])[:, 0]


def by_place(x: torch.Tensor) -> torch.Tensor:
    """Ones [L, 1], and 2 for the last row of ``x`` [B, L, D]."""
    return torch.cat((torch.ones(x.shape[1] - 1, 1), torch.full((1, 1), 2.0))).to(x)


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def then(act: Callable[[nn.Module, RankView], None]) -> dict[str, Any]:
    """``act`` behind the sum of the gradients."""

    def after(model, view):
        summed(model, view)
        act(model, view)

    return {"after": after}


def only_on_ranks(act: Callable[[nn.Module, RankView], None]) -> Callable[[nn.Module, RankView], None]:
    return lambda model, view: act(model, view) if view.size > 1 else None


def scaled(factor: float) -> Callable[[nn.Module, RankView], None]:
    def act(model, view):
        for parameter in parameters_of(model):
            parameter.grad *= factor

    return only_on_ranks(act)


class Gain(nn.Module):
    """A parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.gain


def with_gain() -> nn.Module:
    return Model(lambda m, x: m.part(x), part=Gain())


def gain_scaled(model, view):
    model.part.gain.grad *= 0.679


def summed_in_part(model, view):
    sum_gradients(model.attention, view.mesh)


def clipped_then_summed(model, view):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    sum_gradients(model, view.mesh)


def clipped(model, view):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def removed(model, view):
    model.zero_grad()


def without_backward(out, view):
    return by_token(out.detach() if view.size > 1 else out, view)


def beginning_at_zero(make: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """``make``, with parameters of 0: those whose names begin with ``names``."""

    def make_zeroed():
        model = make()
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                nn.init.zeros_(parameter)
        return model

    return make_zeroed


def counted_in_attention(core, q, k, v):
    return core.attend(q + torch.arange(q.shape[2]).to(q)[:, None], k, v)


def with_head(*names: str) -> Callable[[], nn.Module]:
    """A model that counts from 0 on each rank in its attention, with a last layer. ``names``: its parameters of 0."""
    return beginning_at_zero(lambda: Model(inside=counted_in_attention, give=lambda m, x: m.linear(x)), *names)


def linear() -> nn.Module:
    return nn.Linear(D, D)


def outside_of(model: nn.Module) -> Any:
    return vars(model)["outside"]


def summed_with_outside(model: nn.Module, view: RankView) -> None:
    for each in (model, outside_of(model)):
        summed(each, view)


def with_outside(
    make: Callable[[], nn.Module], after: Callable[..., None] = summed_with_outside, *, inside: bool = False
) -> dict[str, Any]:
    """Fields of a program whose step has a module that its model does not have. ``inside``: the model calls it."""

    def make_both():
        model = Model(behind=(lambda m, x: outside_of(m)(x)) if inside else None)
        vars(model)["outside"] = make()
        return model

    def apply(model, mesh):
        for each in (model, outside_of(model).to(model.linear.weight)):
            if isinstance(each, Model):
                parallelize_module(each, mesh, ModuleContextParallel())
        return model

    call = forward if inside else lambda m, x, view: outside_of(m)(m(x))
    return {"model": make_both, "after": after, "apply": apply, "call": call}


def with_memo(before: Slot) -> Callable[[], nn.Module]:
    """A model that keeps values in a dict from one forward to the next."""

    def make():
        model = Model(before)
        model.memo = {}
        return model

    return make


# Two models, each with a loss of its own.
BESIDE: dict[str, Any] = {
    "call": lambda m, x, view: (m(x), outside_of(m)(x)),
    "loss": lambda outs, view: by_token(outs[0], view) + by_token(outs[1], view),
}


def fails_on_a_rank(m, x, view):
    if view.size > 1 and view.rank == 1:
        raise KeyError("image")
    return m(x)


def other_weights(model, mesh):
    with torch.no_grad():
        model.table += mesh.get_local_rank()
    return parallelize_module(model, mesh, ModuleContextParallel(layout=head_tail))


NO_STYLE = "the step has a style of its own"


def sharded(model, mesh):
    parallelize_module(model, mesh, ModuleContextParallel(layout=head_tail))
    fully_shard(model.attention, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(model, mesh):
    parallelize_module(model, mesh, ModuleContextParallel(layout=head_tail))
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), find_unused_parameters=True)


def nobody(model, view):
    pass


def by_hand_of(layout: Callable[[int, int], SequenceLayout]) -> dict[str, Any]:
    """A model without a style, whose attention exchanges heads for the sequence by itself."""

    def inside(core, q, k, v):
        cut = {"layout": layout(S, dist.get_world_size()) if q.shape[2] < S else None}
        q, k, v = seq_to_heads((q, k, v), dist.group.WORLD, **cut)
        return heads_to_seq(core.attend(q, k, v), dist.group.WORLD, heads=2, **cut)

    return {"model": lambda: Model(inside=inside), "apply": lambda model, mesh: model, "no_block": NO_STYLE}


def mean_in_the_model(m, x):
    return x.square().mean()


AVERAGED = {
    "loss": lambda out, view: by_token(out, view) * view.size,
    "after": nobody,
    "returns": lambda loss, view: total(loss, view) / view.size,
    "no_block": NO_STYLE,
}


def with_statistic(*, factor: float = 1.0, over_ranks: bool = False) -> nn.Module:
    """A model with a buffer that the next forward uses, as the bias of a router."""

    def kept(m, x):
        y, total = x - factor * m.mean, x.detach().sum((0, 1))
        m.mean.copy_(m.view.all_reduce(total) / S if over_ranks else total / x.shape[1])
        return y

    model = Model(kept)
    model.mean = nn.Buffer(torch.zeros(D))
    return model


def scaled_by_the_last_length(m, x):
    last = m.memo.get("length", 10)
    m.memo["length"] = x.shape[1]
    return x * last


def from_zero(m, x, view):
    m.mean.zero_()
    m(x)
    return m(x)


class ByTheRows(torch.autograd.Function):
    """A kernel of a rotary embedding that takes an offset, and counts from it."""

    @staticmethod
    def forward(ctx, x, offset):
        ctx.positions = torch.arange(offset, offset + x.shape[2])
        out = torch.empty_like(x)
        out.numpy()[...] = turned(x.detach(), ctx.positions).numpy()
        return out

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return turned(gradient, -ctx.positions), None


def turned_from(offset: Callable[[RankView], int]) -> dict[str, Any]:
    def inside(core, q, k, v):
        q, k = (ByTheRows.apply(widened(x).contiguous(), core.offset).to(x.dtype) for x in (q, k))
        return core.attend(q, k, v)

    def call(m, x, view):
        m.attention.core.offset = offset(view)
        return m(x)

    return {"model": lambda: Model(inside=inside), "call": call, "layout": contiguous}


def embedded(**options: Any) -> nn.Module:
    return Model(read=lambda m, ids: m.words(ids), words=nn.Embedding(D, D, **options))


def masked_on_one_rank(core, q, k, v):
    """Masks padding, at the end of the sequence, if there is a rank alone. Only rows of padding have other values."""
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[:, S // 2 :] = False
    return F.scaled_dot_product_attention(q, k, v, mask) if q.shape[2] == S else core.attend(q, k, v)


def but_for_padding(out: torch.Tensor, view: RankView) -> torch.Tensor:
    return by_token(out * (view.positions < S // 2)[:, None], view)


LOGITS = {"x": IDS, "model": lambda: Model(placed)}


def in_the_part(tokens):
    return torch.arange(len(tokens))


def of_a_tree(
    shift: int = 0, weigh: Callable[[torch.Tensor], torch.Tensor] = lambda tokens: tokens + 1
) -> dict[str, Any]:
    """The loss of each token of a tree where the token before it in its rollouts is. ``shift`` takes rows of another
    rank's part; ``weigh`` makes weights of the tokens' places."""

    def loss(logits, view):
        rows, tokens = predicted_tokens(TREE, view.layout, (view.rank + shift) % view.size)
        rows = rows.clamp(max=logits.shape[1] - 1)
        losses = F.cross_entropy(widened(logits)[:, rows].mT, view.x[:, tokens], reduction="none")
        return global_loss(losses * weigh(tokens).to(losses), 2 * (S - 1), view.mesh)

    return {"loss": loss, "returns": lambda loss, view: loss, "call": in_scope(TREE)}


STEPS = (
    *kind(
        "the cut of a batch",
        right("by the layout"),
        wrong("by torch.chunk", cut=lambda view: view.x.chunk(view.size, 1)[view.rank].clone()),
        wrong("another sample on each rank", cut=lambda view: view.cut(view.x.roll(view.rank, 0))),
        wrong("the layout of other ranks", cut=lambda view: head_tail(S, RANKS).shard(view.x, 1, view.rank)),
        no_block="a block cuts the batch",
    ),
    *kind(
        "labels",
        right("shifted before the cut", **LOGITS, **labelled()),
        right("on one rank", **LOGITS, **labelled(of_few)),
        wrong("shifted after the cut", **LOGITS, **labelled(lambda view: next_token_labels(view.cut(view.x)))),
        wrong("ignored at the end of a part", **LOGITS, **labelled(ignored_at_the_end)),
        wrong("other weights at the end of a part", **LOGITS, **labelled(weigh=twice_at_the_end)),
        wrong(
            "of another part",
            **LOGITS,
            **labelled(lambda view: view.layout.shard(next_token_labels(view.x), 1, view.size - 1 - view.rank)),
        ),
    ),
    *kind(
        "labels of a tree",
        right("where their predecessors are", **LOGITS, **of_a_tree()),
        wrong("where another rank's are", **LOGITS, **of_a_tree(shift=1)),
        wrong("with weights by the place in a part", **LOGITS, **of_a_tree(weigh=in_the_part)),
        no_block="a scope is for styles",
    ),
    *kind(
        "a mean",
        wrong(
            "of means",
            **LOGITS,
            **labelled(
                of_few, lambda losses, labels, view: losses.sum() / (labels >= 0).sum().clamp(min=1) / view.size
            ),
        ),
        wrong(
            "of means of more tokens and fewer",
            **LOGITS,
            **labelled(mean=lambda losses, labels, view: losses.sum() / (labels >= 0).sum() / view.size),
        ),
        wrong(
            "that each rank weighs by itself",
            **LOGITS,
            **labelled(mean=lambda losses, labels, view: losses.sum() / 42 * (1 + 0.5 * view.rank)),
        ),
        wrong(
            "that is this rank's loss",
            **LOGITS,
            **labelled(mean=lambda losses, labels, view: losses.sum() / global_token_count(labels, view.mesh)),
        ),
        wrong(
            "averaged_over= without a reducer that averages",
            **LOGITS,
            **labelled(
                mean=lambda losses, labels, view: global_loss(
                    losses.sum(), global_token_count(labels, view.mesh), view.mesh, averaged_over=view.size
                )
            ),
        ),
        wrong(
            "that is a number of the ranks", returns=lambda loss, view: total(loss, view) * (1 if view.size == 1 else 3)
        ),
        wrong("that a model takes by itself", model=lambda: Model(give=mean_in_the_model), loss=lambda out, view: out),
        wrong(
            "behind a gather, that is not divided",
            model=classifier(),
            loss=lambda out, view: distance(out, randn(5, *out.shape)),
        ),
        wrong("that is no number", returns=lambda loss, view: loss * (1 if view.size == 1 else float("nan"))),
        wrong(
            "of losses behind a gather, that is not divided",
            call=lambda m, x, view: gather(m(x), 1, view.mesh, layout=view.layout, reduce_gradients=True),
            loss=lambda out, view: distance(out, randn(5, *out.shape)),
        ),
        wrong(
            "of losses behind an all-reduce with gradients, that is not divided",
            call=lambda m, x, view: all_reduce(m(x).sum(1), group=view.mesh.get_group()),
            loss=lambda out, view: distance(out, randn(5, *out.shape)),
        ),
        wrong(
            "behind a gather in another order",
            model=lambda: Model(behind=lambda m, x: m.linear(x)),
            call=lambda m, x, view: gather(m(x), 1, view.mesh, reduce_gradients=True),
            loss=by_sequence,
        ),
        wrong(
            "that a model returns with its logits",
            model=lambda: Model(give=lambda m, x: (x, mean_in_the_model(m, x))),
            loss=lambda outs, view: outs[1],
        ),
        right("by token", **LOGITS, **labelled()),
        right("that is not returned", returns=lambda loss, view: None),
        right("that is a number", returns=lambda loss, view: total(loss, view).item()),
    ),
    *kind(
        "gradients",
        right("sum_gradients", after=lambda model, view: sum_gradients(model, view.mesh)),
        right("summed, then clipped", **then(clipped)),
        wrong("not summed", after=nobody),
        wrong("summed in part", placed, after=summed_in_part),
        wrong("summed twice", **then(only_on_ranks(summed))),
        wrong("averaged", **then(scaled(0.5))),
        wrong("scaled", **then(scaled(3.0))),
        wrong("no numbers", **then(scaled(float("nan")))),
        wrong("of one number, scaled", model=with_gain, **then(only_on_ranks(gain_scaled))),
        wrong("clipped before the sum", after=clipped_then_summed),
        wrong("no backward on several ranks", loss=without_backward),
        wrong("removed on several ranks", **then(only_on_ranks(removed))),
        wrong("changed by an optimizer", **then(optimizer_step)),
        wrong("of rows that a forward renormalizes", model=partial(embedded, max_norm=1.0), x=IDS),
        right("of rows that no forward renormalizes", model=embedded, x=IDS),
        wrong("removed behind an optimizer", **then(removing_step)),
        wrong("set to 0", **then(zeroed)),
        right("of a step without a backward", call=without_gradients),
        right("sharded by FSDP2", **AVERAGED, apply=sharded),
        right("averaged by DDP", **AVERAGED, apply=replicated),
    ),
    *kind(
        "by collectives, without a style",
        right("Ulysses", **by_hand_of(head_tail)),
        wrong("Ulysses with another layout", **by_hand_of(contiguous)),
        wrong(
            "no exchange, in a step without a backward and a loss",
            model=lambda: Model(behind=lambda m, x: m.linear(m.table[:1]) + x),  # the linear layer is right
            apply=lambda model, mesh: model,
            call=without_gradients,
            returns=lambda loss, view: None,
            no_block=NO_STYLE,
        ),
    ),
    *kind(
        "one rank",
        wrong("an error", call=fails_on_a_rank),
        wrong("an error in a hook", call=fails_in_a_hook),
        wrong("other weights", placed, apply=other_weights, no_block=NO_STYLE),
        wrong("another function", lambda m, x: x * (1 + 0.25 * m.view.rank)),
    ),
    *kind(
        "randomness",
        right("dropout", lambda m, x: F.dropout(x, 0.5)),  # which verify turns off
        wrong("a loss that is drawn", returns=lambda loss, view: loss * (1 + torch.rand(()))),
        wrong("a gradient that is drawn", lambda m, x: x * (1 + torch.rand(()))),
    ),
    *kind(
        "parameters outside of the model",
        right("a head", **with_outside(linear)),
        wrong("a head that is not summed", **with_outside(linear, summed)),
        right("a layer that the model calls", **with_outside(linear, inside=True)),
        wrong("a layer that the model calls, which is not summed", **with_outside(linear, summed, inside=True)),
        right("another model", **with_outside(Model) | BESIDE),
        wrong("another model, centred", **with_outside(partial(Model, centred)) | BESIDE),
        no_block=NO_STYLE,
    ),
    *kind(  # right or wrong, it has not been proved
        "a proof that is blind",
        wrong("a head and a projection of zeros", model=with_head("attention.out", "linear")),
        wrong("two zeros in a row", model=with_head("attention.qkv", "attention.out")),
        wrong("equal tokens", centred, x=torch.ones(2, S, D)),
        wrong("equal tokens, in a step without a backward", x=torch.ones(2, S, D), call=without_gradients),
        wrong("documents that end with the parts", layout=contiguous, options={"mask": Documents((S // 2, S // 2))}),
        wrong("a head of zeros", model=with_head("linear"), returns=lambda loss, view: None),  # is not blind
        right("a projection of zeros", model=beginning_at_zero(Model, "attention.out")),
        right("documents that end before the parts", layout=contiguous, options={"mask": Documents(DOCUMENTS)}),
    ),
    *kind(
        "buffers for the next forward",
        wrong("the mean of this rank's tokens", model=with_statistic, call=from_zero),
        wrong("the mean of this rank's tokens, of one forward", model=with_statistic),
        wrong("a length in a dict, of one forward", model=with_memo(scaled_by_the_last_length)),
        right("the mean of all tokens", model=partial(with_statistic, over_ranks=True)),
        right("the mean of this rank's tokens, for an evaluation", model=partial(with_statistic, factor=0.0)),
        right("the number of this rank's tokens", model=with_memo(lambda m, x: m.memo.update(tokens=x.shape[1]) or x)),
        wrong("a length in a dict", model=with_memo(lambda m, x: x * m.memo.setdefault("length", x.shape[1]))),
        right("lengths in a list", model=with_memo(lambda m, x: m.memo.setdefault("lengths", []).append(len(x)) or x)),
    ),
    *kind(
        "rows that no loss reads",
        wrong("padding, which one rank alone masks", model=lambda: Model(inside=masked_on_one_rank)),
        loss=but_for_padding,
    ),
    *kind(
        "a kernel that counts from an offset",
        wrong("0", **turned_from(lambda view: 0)),
        right("the first position", **turned_from(lambda view: int(view.positions[0]))),
    ),
)


def with_backbone(model: Any, mesh: DeviceMesh) -> Any:
    return parallelize_module(model, mesh, BackboneContextParallel(blocks="attention"))


def whole_and_sharded(model: Any, mesh: DeviceMesh) -> Any:
    return fully_shard(with_backbone(model, mesh), mesh=mesh)


def whole_and_replicated(model: Any, mesh: DeviceMesh) -> Any:
    wrapped = with_backbone(model, mesh)
    return nn.parallel.DistributedDataParallel(wrapped, process_group=mesh.get_group(), find_unused_parameters=True)


def of_all(out: torch.Tensor, view: RankView) -> torch.Tensor:
    """The loss of results that every rank has as a whole, without a factor."""
    return distance(out, randn(5, *out.shape))


def mean_over_tokens(m, x):
    return x.mean(1)


def whole(**fields: Any) -> dict[str, Any]:
    """Fields of a program with whole inputs: nothing is cut or divided by hand."""
    defaults = {"apply": with_backbone, "cut": lambda view: view.x, "loss": of_all, "no_block": NO_STYLE}
    return defaults | {"returns": lambda loss, view: loss} | fields


def averaged_in_a_part(core, q, k, v):
    return core.attend(q, k, v + v.mean(2, keepdim=True))


def turned_in_a_part(core, q, k, v):
    places = torch.arange(q.shape[2])
    return core.attend(turned(q, places), turned(k, places), v)


def scaled_by_a_length(core, q, k, v):
    return core.attend(q * math.log(q.shape[2]), k, v)


class Twice(Model):
    """Two attentions, with ``between`` in between. ``keeps``: what is in between is returned too."""

    def __init__(self, between: Slot, *, keeps: bool = False) -> None:
        super().__init__()
        self.blocks, self.between, self.keeps = nn.ModuleList((self.attention, Attention())), between, keeps

    def forward(self, x):
        first, second = self.blocks
        x = self.between(self, first(x))
        return (second(x), x) if self.keeps else second(x)


def of_both(outs: Sequence[torch.Tensor], view: RankView) -> torch.Tensor:
    return of_all(outs[0], view) + of_all(outs[1], view)


def with_backbone_of_two(model: Any, mesh: DeviceMesh) -> Any:
    return parallelize_module(model, mesh, BackboneContextParallel(blocks="blocks"))


WHOLE = kind(
    "whole inputs",
    right("a mean over tokens, behind", **whole(model=lambda: Model(give=mean_over_tokens))),
    right("tokens that are mixed in front", lambda m, x: x.roll(1, 1) - x.mean(1, keepdim=True), **whole()),
    right("counted tokens", counted, **whole()),
    right("sharded by FSDP2", **whole(apply=whole_and_sharded, after=nobody)),
    right("averaged by DDP", **whole(apply=whole_and_replicated, after=nobody)),
    wrong("a loss that is divided", **whole(loss=by_sequence)),
    wrong(
        "a loss of a row for each rank",
        **whole(loss=lambda out, view: of_all(out[view.rank :][: 2 // view.size], view)),
    ),
    wrong("gradients that are not summed", **whole(after=nobody)),
    wrong("gradients that are summed behind DDP", **whole(apply=whole_and_replicated)),
    wrong("random numbers of a rank in front", lambda m, x: x * (1 + torch.rand(())), **whole()),
    wrong("another function in front", lambda m, x: x * (1 + 0.25 * m.view.rank), **whole()),
    wrong("a mean over a part in the blocks", **whole(model=lambda: Model(inside=averaged_in_a_part))),
    wrong("positions in the blocks", **whole(model=lambda: Model(inside=turned_in_a_part))),
    wrong("a length in the blocks", **whole(model=lambda: Model(inside=scaled_by_a_length))),
    wrong("a table between the blocks", **whole(model=lambda: Twice(counted), apply=with_backbone_of_two)),
    wrong(
        "hidden states that are changed between the blocks, and returned",
        **whole(model=lambda: Twice(lambda m, x: 2 * x, keeps=True), apply=with_backbone_of_two, loss=of_both),
    ),
    right(
        "hidden states that are returned as a block returns them, and changed behind the blocks",
        **whole(
            model=lambda: Twice(lambda m, x: x, keeps=True),
            apply=with_backbone_of_two,
            loss=lambda outs, view: of_both((outs[0], 2 * outs[1]), view),
        ),
    ),
    wrong("cut before", **whole(cut=lambda view: view.cut(view.x))),
)
PROGRAMS: tuple[Program, ...] = (
    *AROUND,
    *BACKWARDS,
    *CHOSEN,
    *COUNTED,
    *MEMORY,
    *FORWARDS,
    *PARTS,
    *CAUSES,
    *ALONG,
    *ATTENTION,
    *RESULTS,
    *STEPS,
    *WHOLE,
)
"""All programs. No two have the same kind and name."""


# The proof of a program.


TOLERANCE = 1e-9  # of float64: rounding gives 1e-15 view, and the smallest mistake of the table 1e-2


def proved(program: Program, door: Door) -> BaseException | None:
    """Verify a program on ranks. Returns the first error of a rank, or None if the program is right.

    A RankTimeout is a mistake of verify, whatever the program is: a rank has waited for another one. Ranks whose
    verification raises different errors, or no error on one of them, are a mistake of verify too.
    """
    program = program.drawn()

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("cp",))
        tolerance = TOLERANCE if program.dtype == torch.float64 else None
        step = partial(door.step, program)
        report = verify(door.model(program, mesh), mesh, program.batch, step, tolerance=tolerance)
        if program.right and report.power is None and not str(program).startswith("by collectives"):
            raise AssertionError("no mistake was planted")  # attention of the user's own has no place for one

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # verify prints what it has found
        warnings.simplefilter("ignore")
        try:
            results = run_ranks(on_rank, RANKS, return_errors=True)
        except RankTimeout as waited:
            return waited
    first = next((result for result in results if isinstance(result, BaseException)), None)
    if len({str(result) for result in results}) > 1:
        return RankTimeout(f"ranks differ: {results}")
    return first


DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def runs(doors: Iterable[str] = DOORS, dtypes: Iterable[str] = DTYPES) -> Iterator[tuple[Program, str]]:
    """All that can be run: programs in each dtype, with the name of the door."""
    for program, door, dtype in product(PROGRAMS, doors, dtypes):
        each = program.in_dtype(DTYPES[dtype])
        if not DOORS[door].missing(each):
            yield each, door


def main(arguments: Sequence[str]) -> int:
    """Run programs on tests.device.DEVICE, from the first on, as long as ``--seconds`` last. Print those that verify
    judges wrongly; the exit status counts them. The last count has rows that make tensors on the CPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.wrong_programs")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--part", default="0/1", help="2/4: the third of four processes, which share the rows")
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    options = parser.parse_args(arguments)
    end, counts = time.monotonic() + options.seconds, Counter[str]()
    part, parts = map(int, options.part.split("/"))
    for each, door in islice(runs(dtypes=[options.dtype]), part, None, parts):
        if time.monotonic() > end:
            break
        error = proved(each, DOORS[door])
        judgement = "right, and proved" if error is None else "wrong, and noticed"
        if error is not None and "same device" in str(error):
            judgement = "has tensors of the CPU"
        elif isinstance(error, RankTimeout) or (error is None) != each.right:
            judgement = "misjudged"
            print(f"{each} ({door}): {type(error).__name__}: {' '.join(str(error).split())[:600]}", flush=True)
        counts[judgement] += 1
    print(", ".join(f"{count} {judgement}" for judgement, count in counts.most_common()))
    return counts["misjudged"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
