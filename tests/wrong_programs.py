"""Programs that are wrong under context parallelism although no attention call is, and right ones that look like them.

``PROGRAMS`` is a table: one row is a small model, and the step that trains it on a mesh of any size. A wrong program
gives another loss or another gradient on several ranks than on one rank. A right program does not.

Run ``python -m tests.wrong_programs`` to count how many of them :func:`cp_styles.verify.verify` notices.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
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
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    Causal,
    Documents,
    ModuleContextParallel,
    SequenceLayout,
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
from cp_styles.collectives import gather, split
from cp_styles.joint_layout import JointLayout
from cp_styles.kernels.base import Kernel, OtherBackward
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.mixers import context_causal_conv1d, context_roll
from cp_styles.testing import RankTimeout, run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import verify
from tests.oracle import randn

S, D, WORDS, RANKS = 12, 8, 64, 2
X = randn(0, 2, S, D)
IDS = torch.randint(0, D, (2, S), generator=torch.Generator().manual_seed(1))
_MAKING = threading.Lock()  # ranks are threads, and share torch's generator


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
        return {"x": self.x.to(self.dtype) if self.x.is_floating_point() else self.x.clone()}

    def in_dtype(self, dtype: torch.dtype) -> Program:
        """The program whose model computes in ``dtype``. Integers stay."""
        return replace(self, dtype=dtype)

    def unstyled(self, mesh: DeviceMesh) -> nn.Module:
        """A new model, the same on every rank, without styles."""
        with _MAKING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().to(self.dtype)

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


def counted_features(m, x):
    return x * torch.arange(x.shape[1])[:, None]


def rolled(m, x):
    return context_roll(x, 1, 1, m.view.mesh, fill=0.0, layout=m.view.layout)


def convolved(m, x):
    conv = partial(F.conv1d, weight=m.taps, groups=D)
    padded = lambda x: conv(F.pad(x, (2, 0)))  # noqa: E731
    return context_causal_conv1d(padded, x.mT, m.view.mesh, width=3, layout=m.view.layout).mT


def causal_conv1d_fn(x, weight, bias=None, activation=None, seq_idx=None):
    return F.conv1d(F.pad(x, (2, 0)), weight[:, None], groups=D)


class ConvolvedByName(nn.Module):
    """Calls a function of causal-conv1d, which a style replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 3))

    def forward(self, x):
        return causal_conv1d_fn(x.mT, self.weight).mT


AROUND = (
    *kind(
        "around gather",
        right("nothing", model=classifier()),
        wrong("a softmax over tokens, gathered, pooled", model=classifier(lambda m, x: x * x.softmax(1))),
        wrong("counted, gathered, pooled", model=classifier(counted_features)),
        loss=by_sequence,
    ),
    *kind(
        "around split",
        right("gathered, centred, split", centred_over_ranks),
        wrong("gathered, centred, split, centred", lambda m, x: centred(m, centred_over_ranks(m, x))),
        wrong("weighted, gathered, centred, split", lambda m, x: centred_over_ranks(m, x * x.softmax(1))),
        right("centred by a sum over all ranks", lambda m, x: x - m.view.all_reduce(x.detach().sum(1, True)) / S),
    ),
    *kind(
        "around mixers",
        right("context_roll", rolled),
        right("context_causal_conv1d", convolved),
        wrong("centred, then context_roll", lambda m, x: rolled(m, centred(m, x))),
        wrong("counted, then context_roll", lambda m, x: rolled(m, counted(m, x))),
        wrong("context_roll, then centred", lambda m, x: centred(m, rolled(m, x))),
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


def summed_by_vjp(m, x):
    return torch.func.vjp(lambda y: y.cumsum(1), x.detach())[1](x.detach())[0]


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
        wrong("func.grad", lambda m, x: x + torch.func.grad(energy)(x.detach())),
        wrong("vmap of func.grad", fast_weight),
        wrong("func.vjp of a cumulative sum", summed_by_vjp),
    ),
)


# Tokens that several tokens choose.


def put(mask_of: Slot) -> Slot:
    def before(m, x):
        y = x.clone()
        y[mask_of(m, x)] = 0
        return y

    return before


def above_the_median(m, x):
    return score(m, x) > score(m, x).median(1, keepdim=True).values


def a_layer_above_the_median(m, x):
    mask, y = above_the_median(m, x), x.clone()
    y[mask] = m.linear(x[mask])
    return y


def two_best_removed(m, x):
    y = x.clone()
    y[torch.arange(len(x))[:, None], score(m, x).topk(2, 1).indices] = 0
    return y


def two_best_removed_by_scatter(m, x):
    return x.scatter(1, score(m, x).topk(2, 1).indices[..., None].expand(-1, -1, D), 0.0)


def first_replaced(m, ids):
    return ids.scatter(1, (ids == 3).int().argmax(1, keepdim=True), 7)


def depths(choose: Callable[[torch.Tensor], torch.Tensor]) -> Slot:
    """A layer for the tokens that ``choose`` takes, as mixture of depths has it."""

    def before(m, x):
        rows = choose(score(m, x))[..., None].expand(-1, -1, D)
        return x.scatter_add(1, rows, m.linear(x.gather(1, rows)))

    return before


def standardized(m, x):
    mask = x[..., :1] > 0
    rows = x[mask[..., 0]]
    return x.masked_scatter(mask, (rows - rows.mean(0)) / rows.std(0))


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
        wrong("masked_fill behind the first event", lambda m, x: x.masked_fill((x[..., :1] > 0.5).cumsum(1) > 0, 0.0)),
        wrong("y[mask] = 0 behind the first event", put(lambda m, x: (x[..., 0] > 0.5).cumsum(1) > 0)),
        wrong("y[mask] = 0 above the median", put(above_the_median)),
        wrong("y[mask] = layer(x[mask]) above the median", a_layer_above_the_median),
        wrong("the two best by topk are set to 0", two_best_removed),
        wrong("the two best are set to 0 by scatter", two_best_removed_by_scatter),
        wrong("the largest by index_fill", lambda m, x: x.index_fill(1, score(m, x).sum(0).argmax()[None], 0.0)),
        wrong("the first <eos> of each row replaced", model=lambda: Model(read=first_replaced), x=IDS),
        right("y[mask] = 0 by token", put(lambda m, x: x[..., 0] > 0.5)),
    ),
    *kind(
        "chosen by sort",
        wrong("topk", depths(lambda s: s.topk(3, 1).indices)),
        wrong("argsort", depths(lambda s: s.argsort(1, descending=True)[:, :3])),
        wrong("sort", depths(lambda s: s.sort(1, descending=True).indices[:, :3])),
        wrong("expert choice", expert_choice),
        wrong("a capacity of experts", within_a_capacity),
    ),
    *kind(
        "masked scatter",
        wrong("rows by their statistics", standardized),
        wrong("rolled", lambda m, x: x.masked_scatter(torch.ones_like(x, dtype=torch.bool), x.roll(1, 1))),
    ),
    *kind(
        "rows in another order",
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


def rows_as_features(m, x):
    return m.join(torch.cat((x, m.table[: x.shape[1]].expand(x.shape[0], -1, -1)), -1))


def one_number_more(m, x):
    t = torch.arange(x.shape[1]).to(x)[None, :, None] / 10
    return m.join(torch.cat((x, t.expand(x.shape[0], -1, 1)), -1))


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs of features as complex numbers, turned by their positions: rotary embeddings."""
    angles = positions[:, None] * torch.tensor([1.0, 0.3])
    turns = torch.polar(torch.ones_like(angles), angles)
    cut = torch.view_as_complex(widened(x).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(cut * turns).flatten(-2).to(x.dtype)


def rotary(positions: Callable[[Model, int], torch.Tensor]) -> Callable[[], nn.Module]:
    """A model that turns queries and keys."""

    def turn(core, q, k, v):
        at = positions(core.model(), q.shape[2])
        return core.attend(turned(q, at), turned(k, at), v)

    def make():
        model = Model(inside=turn)
        model.attention.core.model = lambda: model
        return model

    return make


def sums_of_ones(x):
    return torch.ones(x.shape[1], x.shape[1]).tril().sum(1).long()


COUNTS: dict[str, Slot] = {
    "arange(L)": counted,
    "arange(1, L + 1)": lambda m, x: x + m.table[torch.arange(1, x.shape[1] + 1)],
    "arange(2, L + 2)": lambda m, x: x + m.table[torch.arange(2, x.shape[1] + 2)],
    "table[1 : L + 1], behind a row for [CLS]": lambda m, x: x + m.table[1 : x.shape[1] + 1],
    "arange(L - 1, -1, -1)": lambda m, x: x + m.table[torch.arange(x.shape[1] - 1, -1, -1)],
    "arange(0, 2 L, 2)": lambda m, x: x + m.table[torch.arange(0, 2 * x.shape[1], 2)],
    "a list from 1": lambda m, x: x + m.table[torch.tensor(list(range(1, x.shape[1] + 1)))],
    "a table interpolated to L": interpolated_table,
    "table.split": lambda m, x: x + m.table.split([x.shape[1], WORDS - x.shape[1]])[0],
    "ones(L).nonzero()": lambda m, x: x + m.table[torch.ones(x.shape[1]).nonzero()[:, 0]],
    "sums of tril(ones)": lambda m, x: x + m.table[sums_of_ones(x)],
    "eye(L)": lambda m, x: x + torch.eye(x.shape[1], S)[:, :D],
    "hann_window(L)": lambda m, x: x * torch.hann_window(x.shape[1])[:, None],
    "linspace(0, 1, L + 1)[1:]": lambda m, x: x * torch.linspace(0, 1, x.shape[1] + 1)[1:, None],
    "0.9 ** arange(L, 0, -1)": lambda m, x: x * (0.9 ** torch.arange(x.shape[1], 0, -1))[:, None],
    "x / arange(1, L + 1)": lambda m, x: x / torch.arange(1, x.shape[1] + 1)[:, None],
    "the first rows of a table": lambda m, x: x + m.table[: x.shape[1]],
    "the first rows of a batch of tables": lambda m, x: x + m.table[None, : x.shape[1], :] * 0.5,
    "looked up by a range": lambda m, x: x + F.embedding(torch.arange(x.shape[1]), m.table),
    "angles of a range": lambda m, x: x * torch.outer(torch.arange(x.shape[1]).to(m.table), m.table[0]).cos(),
    "a list": lambda m, x: x + m.table[torch.tensor(list(range(x.shape[1])))],
    "numpy": lambda m, x: x + m.table[torch.from_numpy(torch.arange(x.shape[1]).numpy().copy())[None]],
    "sums of ones": lambda m, x: x + m.table[torch.ones(x.shape[:2], dtype=torch.int64).cumsum(1)],
    "linspace(0, 1, L)": lambda m, x: x * torch.linspace(0, 1, x.shape[1])[:, None],
    "a table that is still zeros": lambda m, x: x + m.zeros[: x.shape[1]],
    "divided by L": lambda m, x: x * 10 / x.shape[1],
}


def with_zeros(before: Slot) -> Callable[[], nn.Module]:
    def make():
        model = Model(before)
        model.zeros = nn.Parameter(torch.zeros(WORDS, D))
        return model

    return make


class Joint(Model):
    """A text that every rank has, before the tokens of an image."""

    def forward(self, x):
        x = self._through(self.before, x)
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


def of_part(view: RankView, length: int) -> torch.Tensor:
    return torch.arange(length)


COUNTED = (
    *kind(
        "counted",
        *(wrong(name, model=with_zeros(before)) for name, before in COUNTS.items()),
    ),
    *kind(
        "counted for rotary embeddings",
        wrong("a range", model=rotary(lambda m, length: torch.arange(length))),
        right("positions of the layout", model=rotary(lambda m, length: m.view.positions)),
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
        "positions of a table",
        wrong("its first rows", model=lambda: Model(lambda m, x: x + m.table[None, : x.size(1)])),
        right("its rows at the positions", placed),
        right("its rows, cut by the layout", lambda m, x: x + m.view.cut(m.table[None, :S])),
        x=IDS,
    ),
    *kind(
        "positions as features",
        wrong("table[:L]", model=lambda: Model(rows_as_features, join=nn.Linear(2 * D, D))),
        wrong("arange(L)", model=lambda: Model(one_number_more, join=nn.Linear(D + 1, D))),
    ),
    *kind(
        "with a joint text",
        right("nothing", model=lambda: Joint(causal=False)),
        wrong("centred", model=lambda: Joint(centred, causal=False)),
        wrong("table[:L] of the image", model=lambda: Joint(lambda m, x: x + m.table[: x.shape[1]], causal=False)),
        apply=on(lambda: ModuleContextParallel(layout=JointLayout(prefix=TEXT.shape[1]))),
        no_block="a block takes no JointLayout",
    ),
    *kind(
        "under a mask of the style",
        wrong("Causal()", model=lambda: Model(counted, causal=False), options={"mask": Causal()}),
        wrong("Causal() & SlidingWindow()", model=lambda: Model(counted, causal=False), options=WIDE),
        right("no counting", model=lambda: Model(causal=False), options=WIDE),
        wrong(
            "position_ids from 0, Causal()",
            model=lambda: Position(given_positions, causal=False),
            call=with_positions(of_part),
            options={"mask": Causal()},
        ),
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
        right("no mask", call=in_scope(None)),
        no_block="a scope is for styles",
    ),
)


# Memory, loops and experts.


def interleaved(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Pairs of features, turned, as rotary embeddings are often written."""
    out[..., ::2], out[..., 1::2] = x[..., ::2] * 0.6 - x[..., 1::2] * 0.8, x[..., 1::2] * 0.6 + x[..., ::2] * 0.8
    return out


def turned_in(make: Callable[[torch.Tensor], torch.Tensor]) -> Slot:
    return lambda m, x: interleaved(x, make(x))


def linear_attention(m, x):
    q, k, v = (interleaved(y, torch.empty_like(y)) for y in (x, m.linear(x), x))
    return x + q @ (k.mT @ v) / 10


def heads_in_empty(m, x):
    h = x.new_empty(x.shape[0], 2, x.shape[1], 4)
    for head in range(2):
        h[:, head] = m.linear(x)[..., 4 * head : 4 * head + 4]
    return x + joined((h @ h.mT).softmax(-1) @ h)


def shift_in(make: Callable[[torch.Tensor], torch.Tensor]) -> Slot:
    def before(m, x):
        earlier = make(x)
        earlier[:, 0], earlier[:, 1:] = 0, x[:, :-1]
        return x + earlier

    return before


def temporal_shift(m, x):
    out = torch.empty_like(x)
    out[:, 1:, :2], out[:, :1, :2], out[..., 2:] = x[:, :-1, :2], 0, x[..., 2:]
    return m.linear(out)


def attention_by_sample(m, x):
    y = torch.empty_like(x)
    for row in range(len(x)):
        y[row] = m.attention(x[row : row + 1])[0]
    return y + m.conv(y.mT).mT


def attention_by_sample_alone(m, x):
    return x + torch.cat([m.attention(row) for row in x.split(1)])


def ids_in_empty(m, ids):
    shifted = torch.empty_like(ids)
    shifted[:, 1:], shifted[:, 0] = ids[:, :-1], 11
    return shifted


def experts_by_mask(make: Callable[[torch.Tensor], torch.Tensor], first: int = 0) -> Slot:
    """Three experts, of which the first ``first`` get no token."""

    def before(m, x):
        flat = x.flatten(0, 1)
        chosen, out = first + (flat @ m.table[: 3 - first].T).argmax(-1), make(flat)
        for expert in range(3):
            mask = chosen == expert
            out[mask] = m.linear(flat[mask]) * (1 + expert)
        return out.view_as(x)

    return before


def experts_by_index(m, x):
    flat = x.flatten(0, 1)
    chosen, out = (flat @ m.table[:3].T).argmax(-1), torch.zeros_like(flat)
    for expert in range(3):
        (rows,) = torch.where(chosen == expert)
        out = out.index_add(0, rows, m.linear(flat[rows]) * (1 + expert))
    return out.view_as(x)


def experts_sorted(m, x):
    flat = x.flatten(0, 1)
    order = (flat @ m.table[:3].T).argmax(-1).argsort(stable=True)
    rows = m.linear(flat[order])
    return torch.empty_like(rows).index_copy(0, order, rows).view_as(x)


def two_experts_each(m, x):
    flat = x.flatten(0, 1)
    weights, chosen = (flat @ m.table[:3].T).softmax(-1).topk(2, -1)
    rows, order = torch.arange(len(flat)).repeat_interleave(2), chosen.flatten().argsort(stable=True)
    out = m.linear(flat[rows[order]]) * weights.flatten()[order, None]
    back = torch.empty_like(out)
    back[order] = out
    return back.view(-1, 2, D).sum(1).view_as(x)


def experts_scattered(m, x):
    flat = x.flatten(0, 1)
    weights, chosen = (flat @ m.table[:3].T).topk(2, -1)
    full = torch.full((len(flat), 3), -torch.inf).to(x).scatter(1, chosen, weights).softmax(-1)
    return torch.einsum("te,tde->td", full, torch.stack([m.linear(flat), flat, flat.sin()], -1)).view_as(x)


def all_experts(m, x):
    flat = x.flatten(0, 1)
    each = torch.bmm(flat.expand(3, -1, -1), m.table[: 3 * D].view(3, D, D)).view(3, *x.shape)
    return (each * (flat @ m.table[:3].T).softmax(-1).T.reshape(3, *x.shape[:2], 1)).sum(0)


def recurrence(x):
    state, out = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        out.append(state)
    return torch.stack(out, 1)


def recurrence_in_empty(m, x):
    out, state = torch.empty_like(x), torch.zeros_like(x[:, 0])
    for token in range(x.shape[1]):
        state = 0.5 * state + x[:, token]
        out[:, token] = state
    return out


def tokens_in_empty(m, x):
    out = torch.empty_like(x)
    for token in range(x.shape[1]):
        out[:, token] = m.linear(x[:, token])
    return out


def complex_in_place(m, x):
    y = widened(x).clone()
    torch.view_as_complex(y.view(*x.shape[:2], 4, 2)).mul_(2j)
    return y


def zeros_then_complex(m, x):
    y = widened(x).clone()
    y[x < 0] = 0
    return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (4, 2))) * 2j).flatten(2)


def statistics_in_place(m, x):
    x = x.clone()
    x[:, :, 0].sub_(x[:, :, 0].mean(1, keepdim=True))
    return x


def a_feature_in_place(m, x):
    x = x.clone()
    x[:, :, 0] = x[:, :, 1].sin()
    x[..., 2:4].mul_(2)
    return x


class CumulativeKernel(torch.autograd.Function):
    """As kernels in Triton are called: torch makes the memory, and code that is no operator of torch writes to it."""

    @staticmethod
    def forward(ctx, x, make):
        out = make(x)
        out.numpy()[...] = x.detach().numpy().cumsum(1)
        return out

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.flip(1).cumsum(1).flip(1), None


class KernelByToken(torch.autograd.Function):
    """A kernel in ``empty`` memory that works on each token alone."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out.numpy()[...] = 2 * x.detach().numpy()
        return out

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient


def by_kernel(make: Callable[[torch.Tensor], torch.Tensor]) -> Slot:
    return lambda m, x: m.linear(CumulativeKernel.apply(widened(x * 1), make).to(x.dtype))


@torch.library.custom_op("cp_styles_wrong_programs::cumulative", mutates_args=())
def cumulative_op(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


def by_numpy(m, x):
    return x - torch.from_numpy(x.detach().double().numpy().mean(1, keepdims=True)).to(x)


MEMORY = (
    *kind(
        "memory that is written in parts",
        right("turned in empty", turned_in(torch.empty_like)),
        right("turned in zeros", turned_in(torch.zeros_like)),
        wrong("in zeros, then centred", lambda m, x: centred(m, turned_in(torch.zeros_like)(m, x))),
        wrong("in empty, then centred", lambda m, x: centred(m, turned_in(torch.empty_like)(m, x))),
        wrong("linear attention of turned tokens", linear_attention),
        wrong("plain attention of heads in empty", heads_in_empty),
        wrong("a token shift in empty", shift_in(torch.empty_like)),
        wrong("a token shift in zeros", shift_in(torch.zeros_like)),
        wrong("a temporal shift", temporal_shift),
        right("attention by sample", attention_by_sample_alone),
        wrong(
            "attention by sample, then a convolution",
            model=lambda: Model(attention_by_sample, conv=nn.Conv1d(D, D, 3, padding=1)),
        ),
        wrong("ids that are shifted right", model=lambda: Model(read=ids_in_empty), x=IDS),
        right("token by token in empty", tokens_in_empty),
        right("a feature in place", a_feature_in_place),
        wrong("statistics in place", statistics_in_place),
        right("filled", lambda m, x: torch.empty_like(x).fill_(2.0) * x),
        right("copied into", lambda m, x: torch.empty_like(x).copy_(x)),
        right("zeros that stay zeros", lambda m, x: x + torch.zeros_like(x)),
        right("scattered into zeros", lambda m, x: torch.zeros_like(x).scatter(2, torch.ones_like(x).long(), x)),
    ),
    *kind(
        "experts",
        right("by a mask into zeros", experts_by_mask(torch.zeros_like)),
        right("the first has no token, zeros", experts_by_mask(torch.zeros_like, first=1)),
        right("the first has no token, empty", experts_by_mask(torch.empty_like, first=1)),
        right("by index", experts_by_index),
        right("sorted", experts_sorted),
        right("two each", two_experts_each),
        right("scattered", experts_scattered),
        right("all of them", all_experts),
    ),
    *kind(
        "operators without a rule",
        right("a turn in place by view_as_complex", complex_in_place),
        right("y[y < 0] = 0, then view_as_complex", zeros_then_complex),
        right("torch._foreach_mul", lambda m, x: torch.stack(torch._foreach_mul(list(x.unbind(1)), 2.0), 1)),
        right("upsampled and taken again", lambda m, x: F.interpolate(widened(x).mT, scale_factor=2)[..., ::2].mT),
        right("vmap over tokens", lambda m, x: torch.vmap(m.linear)(x.flatten(0, 1)).view_as(x)),
        right("one token on each rank", call=given_by_hand, x=X[:1, :RANKS]),
        right("positions from a layout", lambda m, x: joined(turned(heads(x), m.view.positions))),
        right("cut along another dim", lambda m, x: F.pad(x, (0, 0, 2, 1))[:, 2:-1]),
        right("joined and split", lambda m, x: torch.cat((x[:, :1], x), 1).split((1, x.shape[1]), 1)[1] * 2),
        right("checkpointed", lambda m, x: checkpoint(m.linear, x, use_reentrant=False)),
        right("the products of learned rows", lambda m, x: product_of(x, m.table[:6], m.table[:6])),
    ),
    *kind(
        "code that is no operator of torch",
        wrong("a kernel in empty", by_kernel(torch.empty_like)),
        wrong("a kernel in an empty shape", by_kernel(lambda x: torch.empty(x.shape, dtype=x.dtype))),
        wrong("a kernel in zeros", by_kernel(torch.zeros_like)),
        wrong("a kernel in another shape", by_kernel(lambda x: x.new_empty(x.numel()).view_as(x))),
        right("a kernel by token", lambda m, x: KernelByToken.apply(widened(x * 1))),
        wrong("an operator of another library", lambda m, x: cumulative_op(x), call=without_gradients),
        wrong("numpy", by_numpy),
        wrong("item()", lambda m, x: x * x.detach().abs().mean().item()),
        wrong("places of nonzero", lambda m, x: x + (x[..., 0] > 0).nonzero()[0, 1]),
    ),
)


# Forwards that differ, hooks, objects.


def with_branch(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer for [B, C, L] that only some forwards run."""
    return lambda: Model(lambda m, x: x + m.branch(x.mT).mT if m.later else x, branch=layer())


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


def centred_often(m, x):
    for _ in range(m.named["loops"]):
        x = centred(m, x)
    return x


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


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Conv1d": lambda: nn.Conv1d(D, D, 3, padding=1),
    "Sequential(Conv1d)": lambda: nn.Sequential(nn.Conv1d(D, D, 3, padding=1), nn.GELU()),
    "BatchNorm1d": lambda: nn.BatchNorm1d(D),
    "GroupNorm": lambda: nn.GroupNorm(2, D),
    "AvgPool1d": lambda: nn.AvgPool1d(3, 1, 1),
}
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
        *(wrong(name, model=with_branch(layer)) for name, layer in LAYERS.items()),
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
        wrong("an integer", centred_often, call=named({"loops": 0}, {"loops": 2})),
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
        "inputs in an object",
        wrong(
            "and a mask",
            model=lambda: Model(centred, read=lambda m, batch: batch.x),
            call=lambda m, x, view: m(SimpleNamespace(x=by_hand(x)), torch.ones(x.shape[:2], dtype=torch.bool)),
        ),
        wrong(
            "an object of an object",
            model=lambda: Model(centred, read=lambda m, outer: outer.batch.x),
            call=lambda m, x, view: m(SimpleNamespace(batch=SimpleNamespace(x=by_hand(x)))),
        ),
    ),
    *kind(
        "results in an object",
        wrong("a tensor", model=lambda: Model(behind=centred)),
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
        wrong("counted", counted),
        wrong("centred behind", model=lambda: Model(behind=centred)),
        right("nothing"),
        call=lambda m, x, view: m.features(x),
    ),
    *kind(
        "a second sequence",
        right("nothing", model=attends_to(lambda m, y: y), call=with_source(lambda y: y)),
        wrong("centred", model=attends_to(centred), call=with_source(lambda y: y)),
        wrong("counted", model=attends_to(counted), call=with_source(lambda y: y)),
        wrong("counted, cut by hand", model=attends_to(counted), call=with_source(by_hand)),
        wrong("centred, cut by hand", model=attends_to(centred), call=with_source(by_hand)),
    ),
    *kind(
        "higher-order operators",
        wrong("scan", lambda m, x: scanned(x, recurrent_step)),
        wrong("map over samples", lambda m, x: map_rows(lambda row: row - row.mean(0), x)),
        wrong("cond, then centred", lambda m, x: centred(m, doubled(m, x))),
        right("scan of single tokens", lambda m, x: scanned(x, lambda state, token: (state.clone(), 2 * token))),
        right("map over samples by token", lambda m, x: map_rows(lambda row: 2 * row, x)),
        right("cond", lambda m, x: doubled(m, x)),
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
        "a style on the core of an attention",
        right("nothing"),
        wrong("centred", centred),
        wrong("counted", counted),
        wrong("item() of a DTensor", model=lambda: Model(inside=scaled_by_the_mean)),
        apply=ON_CORE,
        no_block=ON_PARTS,
    ),
    *kind(
        "attention along two dims",
        wrong("one style for both", **FRAMES),
        right("a style for one along the tokens", **FRAMES, apply=ON_ATTENTION, no_block=ON_PARTS),
    ),
    *kind(
        "two attentions",
        wrong(
            "one without a style",
            model=lambda: Model(behind=lambda m, x: x + m.second(x), second=Attention()),
            apply=ON_ATTENTION,
            no_block=ON_PARTS,
        ),
        wrong(
            "two layouts",
            model=lambda: Model(behind=lambda m, x: x + m.second(x), second=Attention()),
            apply=on(
                lambda: {
                    "attention": ModuleContextParallel(layout=head_tail),
                    "second": ModuleContextParallel(layout=contiguous),
                }
            ),
            no_block=ON_PARTS,
        ),
        right("both", model=lambda: Model(behind=lambda m, x: x + m.second(x), second=Attention())),
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


def shifted_features(m, x):
    out = torch.zeros_like(x)
    out[:, 1:, :2], out[..., 2:] = x[:, :-1, :2], x[..., 2:]
    return out


def next_classes(x):
    return x.argmax(-1).roll(-1, 1)


def neighbours(x):
    return (torch.arange(x.shape[1]) - 1).clamp(min=0)[None, :, None].expand(x.shape)


def summed_by_pair(m, x):
    pairs = (torch.arange(x.shape[1]) // 2)[None, :, None].expand(x.shape)
    return torch.zeros_like(x).scatter_add(1, pairs, x).gather(1, pairs)


def along(name: str, layer: Callable[[], nn.Module], **fields: Any) -> Program:
    """A layer for [B, C, L], added to the tokens."""
    return wrong(name, model=lambda: Model(lambda m, x: x + m.layer(x.mT).mT, layer=layer()), **fields)


def shift_in_place(m, x):
    return x + F.pad(x, (0, 0, 1, -1))


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "log-probabilities of the next": lambda m, x: x + x.log_softmax(-1).gather(-1, next_classes(x)[..., None]),
    "cross entropy of the next": lambda m, x: (
        x + F.cross_entropy(widened(x).mT, next_classes(x), reduction="none")[..., None]
    ),
    "embeddings of the next": lambda m, x: x + F.embedding(next_classes(x), m.table),
    "mean of complex numbers": lambda m, x: x + torch.complex(*[widened(x)] * 2).mean(1, keepdim=True).real,
    "bag of ids": lambda m, x: x + F.embedding_bag(x.argmax(-1), widened(m.table))[:, None],
    "place among different ids": lambda m, x: x + m.table[x.argmax(-1).unique(return_inverse=True)[1]],
    "how often": lambda m, x: x * x.argmax(-1).flatten().bincount(minlength=D)[x.argmax(-1)][..., None],
    "singular values": lambda m, x: x + torch.linalg.svdvals(widened(x).detach())[:, :1, None],
    "softmax of tokens": lambda m, x: x.softmax(1),
    "cumulative tokens": lambda m, x: x.cumsum(1),
    "sorted tokens": lambda m, x: x.sort(1).values,
    "mean of buckets": lambda m, x: x + torch.bucketize(widened(x), torch.arange(3.0)).to(x).mean(1, keepdim=True),
    "fourier of tokens": lambda m, x: torch.fft.fft(widened(x), dim=1).real,
    "a norm of tokens and features": lambda m, x: F.layer_norm(x, x.shape[1:]),
    "a recurrence": lambda m, x: recurrence(x),
    "a recurrence backwards": lambda m, x: recurrence(x.flip(1)).flip(1),
    "a recurrence in empty": recurrence_in_empty,
    "a checkpointed recurrence": lambda m, x: checkpoint(recurrence, x, use_reentrant=False),
    "linear attention": lambda m, x: (x.unsqueeze(-1) * x.unsqueeze(-2)).cumsum(1).sum(-1),
    "einsum": lambda m, x: torch.einsum("blm,bmd->bld", torch.einsum("bld,bmd->blm", x, x), x),
    "mixed by a matrix": lambda m, x: (x.mT @ m.table[: x.shape[1], :1].expand(-1, x.shape[1])).mT,
    "shifted": lambda m, x: torch.cat((x[:, 1:], x[:, :1]), 1),
    "shifted and padded": lambda m, x: F.pad(x, (0, 0, 1, -1)),
    "shifted and added": lambda m, x: x + F.pad(x, (0, 0, 1, -1)),
    "rolled": lambda m, x: x + x.roll(1, 1),
    "tokens gathered by rank": lambda m, x: x + x.gather(1, x.topk(3, 1).indices.sort(1).values[:, :1]),
    "neighbours by gather": lambda m, x: x + x.gather(1, neighbours(x)),
    "summed by pair": summed_by_pair,
    "differences": lambda m, x: torch.diff(x, dim=1, prepend=x[:, :1]),
    "distances": lambda m, x: x + (x[:, :, None] - x[:, None]).square().sum(-1) @ x / 10,
    "its last token": lambda m, x: x + x[:, -1:],
    "its largest token": lambda m, x: x * x.amax(1, keepdim=True),
    "in a window": lambda m, x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "interpolated": lambda m, x: F.interpolate(widened(x).mT, scale_factor=2, mode="linear")[..., : x.shape[1]].mT,
    "max pooling": lambda m, x: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "a batch of frames, centred": lambda m, x: centred(m, x.view(*x.shape[:2], 2, 4)).flatten(2),
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


def with_bias_of_tokens(m, x):
    return F.group_norm(x[0], 2, m.table[0], m.linear(x.mean((0, 1))))[None]


ALONG = (
    *kind(
        "a place in a part",
        wrong("x[:, 0] = begin", begins),
        wrong("cat((begin, x[:, 1:]))", lambda m, x: torch.cat((m.table[:1].expand(2, 1, D), x[:, 1:]), 1)),
        wrong("the last token weighs twice", model=lambda: Model(behind=lambda m, x: x * by_place(x))),
        wrong("another layer for every second token", every_second),
        wrong("some features shifted, behind", model=lambda: Model(behind=shifted_features)),
    ),
    *kind(
        "padding of a convolution",
        *(along(mode, partial(nn.Conv1d, D, D, 3, padding=1, padding_mode=mode)) for mode in ("zeros", "circular")),
        *(along(mode, partial(nn.Conv1d, D, D, 3, padding=1, padding_mode=mode)) for mode in ("reflect", "replicate")),
        wrong("a circular shift", lambda m, x: x + F.pad(x.mT, (1, 0), mode="circular")[..., :-1].mT),
        wrong("causal", lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.taps, groups=D).mT),
        right("of features", lambda m, x: F.conv1d(x.reshape(-1, 1, D), m.taps[:1], padding=1).view_as(x)),
        right("of width 1", lambda m, x: F.conv1d(x.mT, m.table[:D, :, None]).mT),
    ),
    *kind(
        "layers along the tokens",
        along("batch norm", lambda: nn.BatchNorm1d(D)),
        along("group norm", lambda: nn.GroupNorm(2, D)),
        along("instance norm", lambda: nn.InstanceNorm1d(D)),
        along("average pooling", lambda: nn.AvgPool1d(3, 1, 1)),
        wrong("GRU", model=lambda: Model(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(D, D, batch_first=True))),
        wrong("LSTM", model=lambda: Model(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, D, batch_first=True))),
        wrong("Softmax(1)", model=lambda: Model(lambda m, x: m.layer(x), layer=nn.Softmax(1))),
        wrong("bilinear, mean", model=lambda: Model(lambda m, x: x + m.f(x, x).mean(1, True), f=nn.Bilinear(D, D, D))),
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
        wrong("layer_norm(weight=)", with_weight_of_tokens),
        wrong("group_norm(bias=) of each token", with_bias_of_tokens),
        wrong("conv1d of width 1", lambda m, x: F.conv1d(x.mT, (x[0].T @ x[0])[..., None] / 10).mT),
        x=X[:1],
    ),
    *kind(
        "tokens by themselves",
        right("log-probabilities of ids", lambda m, x: x.log_softmax(-1).gather(-1, x.argmax(-1)[..., None]) + x),
        right("buckets", lambda m, x: F.embedding(torch.bucketize(widened(x[..., 0]), torch.arange(3.0)), m.table)),
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


def masked_product(q, k, v):
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def masked_by_rank(core, q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def masked_whole(core, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril())


def with_block_mask(core, q, k, v):
    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, S, S, device="cpu", BLOCK_SIZE=8)
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
        wrong("masked", model=plus(masked_product)),
        wrong("alone", model=lambda: Model(inside=lambda core, q, k, v: product_of(q, k, v))),
        wrong("einsum", model=plus(lambda q, k, v: torch.einsum("bhlm,bhmd->bhld", (q @ k.mT).softmax(-1), v))),
        wrong("one head", model=plus(lambda q, k, v: product_of(q[0, 0], k[0, 0], v[0, 0]))),
        wrong("linear attention by product", model=plus(lambda q, k, v: q @ (k.mT @ v) / 10)),
        wrong("between channels", among(lambda x: x.mT.unsqueeze(1), lambda y, x: y.squeeze(1).mT)),
    ),
    *kind(
        "products that are no attention of tokens",
        right("a softmax of features", model=plus(lambda q, k, v: q.softmax(-1) * v)),
        right(
            "a product without a softmax",
            model=plus(lambda q, k, v: q @ torch.ones(4, 6).to(q) @ torch.ones(6, 4).to(q)),
        ),
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
        wrong("of the first two tokens", among(lambda x: x[:, None, :2], lambda y, x: y.mean(2))),
        wrong("of every second token", among(lambda x: x[:, None, ::2], lambda y, x: y.mean(2))),
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
    "[L, B], a view": (lambda ids: ids.t(), lambda x: x.t()),
    "[L, B]": (lambda ids: ids.t().contiguous(), lambda x: x.t()),
    "[L, B, C]": (lambda ids: one_hot(ids).transpose(0, 1), lambda x: x.argmax(-1).t()),
    "[B, C, L]": (lambda ids: one_hot(ids).mT, lambda x: x.argmax(1)),
    "[2, B, L]": (lambda ids: torch.stack([ids, ids]), lambda x: x[1]),
    "[B, L, 2]": (lambda ids: torch.stack([ids, ids], -1), lambda x: x[..., 1]),
    "[B, L] of floats": (lambda ids: ids.double(), lambda x: x.long()),
    "[L] of one sequence": (lambda ids: ids[0].clone(), lambda x: x[None]),
    "an object": (lambda ids: SimpleNamespace(ids=ids.clone()), lambda x: x.ids),
}


def one_hot(ids: torch.Tensor) -> torch.Tensor:
    return F.one_hot(ids, D).float()


# Before the attention, of tokens [L, B, D].
TIME_FIRST: dict[str, Slot] = {
    "rolled": lambda m, x: x + x.roll(1, 0),
    "a recurrence": lambda m, x: m.rnn(x)[0],
    "a mean": lambda m, x: x + x.mean(0),
    "sums": lambda m, x: x + x.cumsum(0),
    "rows of a table": lambda m, x: x + m.table[: x.size(0), None],
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
    "the largest": lambda m, x: x.amax(1),
    "the sum": lambda m, x: x.sum(1),
    "scores": lambda m, x: m.linear(x.mean(1))[:, 0],
    "the first token": lambda m, x: x[:, 0],
    "the last token": lambda m, x: x[:, [-1]],
    "a chosen token": chosen_token,
    "a gathered token": lambda m, x: x.gather(1, x.sum(-1).argmax(1)[:, None, None].expand(-1, 1, D))[:, 0],
    "the class of a token": lambda m, x: m.linear(x[:, 0]).log_softmax(-1)[:, 3],
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
        right("row by row", model=lambda: Model(give=of_rows(1))),
        right("by three rows", model=lambda: Model(give=of_rows(3))),
        wrong("of centred tokens", model=lambda: Model(give=lambda m, x: centred(m, x).square().sum())),
        wrong("of attention", model=lambda: Model(give=lambda m, x: product_of(x, x, x).sum())),
        wrong("a mean", model=lambda: Model(give=lambda m, x: x.square().mean())),
        wrong("of the last token", model=lambda: Model(give=lambda m, x: x[:, -1:].square().sum())),
        wrong(
            "of the next ids by gather",
            model=lambda: Model(give=lambda m, x: -x.log_softmax(-1).gather(-1, m.ids.roll(-1, 1)[..., None]).sum()),
            x=IDS,
            call=lambda m, x, view: (setattr(m, "ids", x), m(x))[1],
        ),
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
        wrong("of pairs of tokens", model=lambda: Model(give=lambda m, x: (x @ x.mT).sigmoid().sum())),
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


def summed_in_part(model, view):
    sum_gradients(model.attention, view.mesh)


def clipped_then_summed(model, view):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    summed(model, view)


def clipped(model, view):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def removed(model, view):
    model.zero_grad()


def without_backward(out, view):
    return by_token(out.detach() if view.size > 1 else out, view)


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


AVERAGED = {
    "loss": lambda out, view: by_token(out, view) * view.size,
    "after": nobody,
    "returns": lambda loss, view: total(loss, view) / view.size,
    "no_block": NO_STYLE,
}


def kept_statistic(m, x):
    """A buffer that the next forward uses, as the bias of a router."""
    y = x - m.mean
    m.mean.copy_(x.detach().mean((0, 1)))
    return y


def with_statistic() -> nn.Module:
    model = Model(kept_statistic)
    model.mean = nn.Buffer(torch.zeros(D))
    return model


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


LOGITS = {"x": IDS, "model": lambda: Model(placed)}

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
        "a mean",
        wrong(
            "of means",
            **LOGITS,
            **labelled(
                of_few, lambda losses, labels, view: losses.sum() / (labels >= 0).sum().clamp(min=1) / view.size
            ),
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
        wrong("that is no number", returns=lambda loss, view: loss * (1 if view.size == 1 else float("nan"))),
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
        wrong("clipped before the sum", after=clipped_then_summed),
        wrong("no backward on several ranks", loss=without_backward),
        wrong("removed on several ranks", **then(only_on_ranks(removed))),
        right("of a step without a backward", call=without_gradients),
        right("sharded by FSDP2", **AVERAGED, apply=sharded),
        right("averaged by DDP", **AVERAGED, apply=replicated),
    ),
    *kind(
        "one rank",
        wrong("an error", call=fails_on_a_rank),
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
        "buffers for the next forward",
        wrong("the mean of this rank's tokens", model=with_statistic, call=from_zero),
    ),
    *kind(
        "a kernel that counts from an offset",
        wrong("0", **turned_from(lambda view: 0)),
        right("the first position", **turned_from(lambda view: int(view.positions[0]))),
    ),
)
PROGRAMS: tuple[Program, ...] = (
    *AROUND,
    *BACKWARDS,
    *CHOSEN,
    *COUNTED,
    *MEMORY,
    *FORWARDS,
    *PARTS,
    *ALONG,
    *ATTENTION,
    *RESULTS,
    *STEPS,
)
"""All programs. No two have the same kind and name."""


# The proof of a program, and the command.


TOLERANCE = 1e-9  # of float64: rounding gives 1e-15 view, and the smallest mistake of the table 1e-2


def proved(program: Program, door: Door) -> BaseException | None:
    """Verify a program on ranks. Returns the first error of a rank, or None if the program is right.

    A RankTimeout is a mistake of verify, whatever the program is: a rank has waited for another one.
    """

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        tolerance = TOLERANCE if program.dtype == torch.float64 else None
        verify(door.model(program, mesh), mesh, program.batch, partial(door.step, program), tolerance=tolerance)

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # verify prints what it has found
        warnings.simplefilter("ignore")
        try:
            results = run_ranks(on_rank, RANKS, return_errors=True, timeout_seconds=20)
        except RankTimeout as waited:
            return waited
    return next((result for result in results if isinstance(result, BaseException)), None)


DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def runs(kind: str = "", doors: Iterable[str] = DOORS, dtypes: Iterable[str] = DTYPES) -> Iterator[tuple[Program, str]]:
    """All that can be run: programs in each dtype, with the name of the door."""
    for program, door, dtype in product(PROGRAMS, doors, dtypes):
        each = program.in_dtype(DTYPES[dtype])
        if kind in each.kind and not DOORS[door].missing(each):
            yield each, door


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the programs, print how many were noticed, and name those that were judged wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tests.wrong_programs", description=main.__doc__)
    parser.add_argument("--kind", default="", help="only kinds whose name has this text")
    parser.add_argument("--door", choices=DOORS, action="append", help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: all")
    options = parser.parse_args(arguments)
    doors, dtypes = options.door or list(DOORS), options.dtype or list(DTYPES)
    todo = list(runs(options.kind, doors, dtypes))
    columns = [(door, dtype) for door in doors for dtype in dtypes]
    found: dict[str, Counter[Any]] = {each.kind: Counter() for each, _ in todo}
    misjudged: list[str] = []
    for index, (each, door) in enumerate(todo):
        if sys.stderr.isatty():
            done = "#" * (30 * index // len(todo))
            print(f"\r[{done:30}] {index}/{len(todo)} {each.kind[:40]:40}", end="", file=sys.stderr, flush=True)
        error, dtype = proved(each, DOORS[door]), str(each.dtype).removeprefix("torch.")
        found[each.kind][each.right, door, dtype] += 1
        if error is not None:
            found[each.kind][each.right, door, dtype, "noticed"] += 1
        if each.right != (error is None) or isinstance(error, RankTimeout):
            words = "was not noticed" if error is None else f"raised {type(error).__name__}: {error}"
            misjudged.append(f"{each} ({door}, {dtype}) is {'right' if each.right else 'wrong'} and {words}")
    if sys.stderr.isatty():
        print(f"\r{'':90}\r", end="", file=sys.stderr)
    for line in _table(found, columns):
        print(line)
    print(*misjudged, sep="\n")
    return bool(misjudged)


def _table(found: Mapping[str, Counter[Any]], columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each kind, and one for all. A cell is "noticed/run"."""
    titles = [f"{door} {dtype}" for door, dtype in columns]
    rows = [["kind", "wrong", *titles, "right", *titles]]

    def row(name: str, programs: Sequence[Program], counts: Counter[Any]) -> list[str]:
        cells = [name]
        for right in (False, True):
            cells.append(str(sum(each.right == right for each in programs)))
            cells += [f"{counts[right, *column, 'noticed']}/{counts[right, *column]}" for column in columns]
        return cells

    for name, counts in found.items():
        rows.append(row(name, [each for each in PROGRAMS if each.kind == name], counts))
    rows.append(row("all", [each for each in PROGRAMS if each.kind in found], sum(found.values(), Counter())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        name, *numbers = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield "  ".join((name, *numbers)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
