"""Modules that look at a few tokens, over any cut: against one process in float64, and the bytes that travel."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    Causal,
    Documents,
    ModuleContextParallel,
    SequenceScope,
    context_attention,
    contiguous,
    head_tail,
    parallelize_module,
)
from cp_styles.layout import SequenceLayout, striped
from cp_styles.mixers import context_halo, context_roll
from cp_styles.testing import CommunicationTrace, run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import VerificationError, verify
from tests.layouts import layouts
from tests.oracle import error, randn

WIDTH, WORDS = 4, 11
# Sums of a few products in float64; a row too many or too few gives 1e-2 and more.
EXACT = 1e-13


class Dilated(nn.Module):
    """A causal convolution of 3 taps, 2 tokens apart, behind a shift by one. Rows before the first repeat it."""

    reach, seq_dim = 5, 1

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)

    def forward(self, x_BLC):
        x_BLC = torch.cat((x_BLC[:, :1], x_BLC[:, :-1]), 1)
        return F.silu(self.conv(F.pad(x_BLC.mT, (4, 0), mode="replicate"))).mT


class TwoSided(nn.Conv1d):
    """A convolution that looks one token back and two ahead, over [B, C, L]."""

    reach, seq_dim = (1, 2), -1

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 4)

    def forward(self, input):
        return super().forward(F.pad(input, (1, 2)))


class NGrams(nn.Module):
    """An embedding of hashed trigrams of ids."""

    reach, seq_dim = 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids_BL):
        before, two_before = (F.pad(ids_BL, (shift, 0))[:, :-shift] for shift in (1, 2))
        return self.table((ids_BL * 7 + before * 3 + two_before) % WORDS)


class Many(nn.Module):
    """Several tensors by position, by keyword and in a tuple; arguments without tokens; several results."""

    reach, seq_dim = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = (nn.Parameter(torch.randn(rows, WIDTH)) for rows in (1, WORDS))

    def forward(self, x_BLC, pair, scale=1.0, *, ids_BL, table_WC, nothing=None):
        y_BLC, mask_BL = pair
        late = F.pad(x_BLC * self.weight + table_WC[ids_BL] * mask_BL[..., None], (0, 0, 1, 0))[:, :-1]
        return {"late": late * scale, "ids": F.pad(ids_BL, (1, 0))[:, :-1]}, [y_BLC + late.sin(), nothing, 3]


def call(module: Any, *tokens: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a module returns."""
    if not isinstance(module, Many):
        return [module(*tokens)]
    x, y, ids, mask = tokens
    first, (second, nothing, three) = module(x, (y, mask), 0.5, ids_BL=ids, table_WC=module.table)
    assert (nothing, three) == (None, 3)
    return [first["late"], first["ids"], second]


def drawn(kind: type[nn.Module], length: int) -> tuple[Any, list[torch.Tensor]]:
    """A module in float64, and its tensors of tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = kind().double()
        ids = torch.randint(WORDS, (2, length))
    if kind is NGrams:
        return module, [ids]
    if kind is TwoSided:
        return module, [randn(0, 2, WIDTH, length)]
    x, y = randn(0, 2, length, WIDTH), randn(1, 2, length, WIDTH)
    return module, [x, y, ids, ids > 3] if kind is Many else [x]


def leaves_of(tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone().requires_grad_(x.is_floating_point()) for x in tokens]


def on_one(module: Any, tokens: list[torch.Tensor], documents):
    """Outputs, their cotangents, gradients of tokens and of parameters on one process, document by document."""
    leaves, dim = leaves_of(tokens), module.seq_dim
    parts = zip(*(x.split(documents, dim) for x in leaves), strict=True)
    outs = [torch.cat(each, dim) for each in zip(*(call(module, *part) for part in parts), strict=True)]
    cotangents = [randn(9 + at, *out.shape) for at, out in enumerate(outs)]
    return outs, cotangents, *gradients(module, leaves, outs, cotangents)


def gradients(module: Any, leaves: list[torch.Tensor], outs, cotangents):
    of_tokens, parameters = [x for x in leaves if x.requires_grad], [*module.parameters()]
    pairs = [(out, grad) for out, grad in zip(outs, cotangents, strict=True) if out.requires_grad]
    from_outs, with_cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(from_outs, [*of_tokens, *parameters], with_cotangents)
    return found[: len(of_tokens)], found[len(of_tokens) :]


def on_ranks(module: Any, layout: SequenceLayout, tokens: list[torch.Tensor], documents, cotangents, reach=None):
    """The same on ranks: parts put together, gradients of parameters summed. And for each rank the bytes it sent, and
    the lengths with which the module was called."""
    dim = module.seq_dim

    def main(rank: int):
        mesh = init_device_mesh("cpu", (layout.ranks,), mesh_dim_names=("cp",))
        mine, lengths, plain = copy.deepcopy(module), [], type(module).forward

        class Counted(type(module)):
            @functools.wraps(plain)
            def forward(self, *args, **kwargs):
                lengths.append(args[0].shape[dim])
                return plain(self, *args, **kwargs)

        mine.__class__ = Counted
        whole = "table_WC" if isinstance(mine, Many) else ()
        options = {"seq_dim": dim, "whole": whole, "layout": layout, "documents": documents}
        context_halo(mine, mesh, reach=module.reach if reach is None else reach, **options)
        leaves = leaves_of([layout.shard(x, dim, rank) for x in tokens])
        with CommunicationTrace() as trace:
            outs = call(mine, *leaves)
        sent = sum(size for name, size in trace.events if name.startswith("all_to_all"))
        found = gradients(mine, leaves, outs, [layout.shard(each, dim, rank) for each in cotangents])
        for out in outs:
            if out.is_floating_point():
                out.mul_(1.0)  # as a model may: no view that cannot be changed
        return [out.detach() for out in outs], *found, sent, lengths

    outs, of_tokens, of_parameters, sent, lengths = zip(*run_ranks(main, layout.ranks), strict=True)
    joined = [[layout.unshard(each, dim) for each in zip(*parts, strict=True)] for parts in (outs, of_tokens)]
    return *joined, [sum(each) for each in zip(*of_parameters, strict=True)], sent, lengths


def largest_error(found, wanted) -> float:
    pairs = [pair for each in zip(found, wanted, strict=True) for pair in zip(*each, strict=True)]
    return max(error(one.double(), other.double()) for one, other in pairs)


def check(kind: type[nn.Module], layout: SequenceLayout, documents) -> None:
    module, tokens = drawn(kind, layout.length)
    outs, cotangents, *wanted = on_one(module, tokens, documents)
    *found, _, _ = on_ranks(module, layout, tokens, documents, cotangents)
    assert largest_error(found, [outs, *wanted]) < EXACT


KINDS = [Dilated, TwoSided, NGrams, Many]


@st.composite
def cases(draw: st.DrawFn):
    layout = draw(layouts(length=draw(st.integers(1, 24))))
    cuts = sorted(draw(st.sets(st.integers(1, layout.length), max_size=3)) | {0, layout.length})
    return draw(st.sampled_from(KINDS)), layout, [high - low for low, high in pairwise(cuts)]


@settings(max_examples=20, deadline=None)
@given(cases())
def test_any_cut(case):
    check(*case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("balancer", [contiguous, head_tail, striped])
@pytest.mark.parametrize(("ranks", "documents"), [(1, (13,)), (1, (4, 9)), (2, (13,)), (3, (7, 1, 5)), (3, (2,))])
def test_each_layout(kind, balancer, ranks: int, documents):
    """With parts that are shorter than the reach, and ranks without tokens."""
    check(kind, balancer(sum(documents), ranks), documents)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_less_is_another_result(kind):
    """So the tests see rows that are missing, on each side."""
    module, tokens = drawn(kind, 12)
    outs, cotangents, *wanted = on_one(module, tokens, (12,))
    front, behind = (module.reach, 0) if isinstance(module.reach, int) else module.reach
    for reach in [(front - 1, behind), *([(front, behind - 1)] if behind else [])]:
        *found, _, _ = on_ranks(module, contiguous(12, 2), tokens, None, cotangents, reach)
        assert largest_error(found[:1], [outs]) > 1e-2
    *found, _, _ = on_ranks(module, contiguous(12, 2), tokens, None, cotangents, (front + 2, behind + 1))
    assert largest_error(found, [outs, *wanted]) < EXACT


def test_the_backward_is_the_adjoint():
    """Of a convolution without bias: <y, A x> = <A* y, x>."""
    module, (x,) = drawn(TwoSided, 11)
    nn.init.zeros_(module.bias)
    y = randn(7, *x.shape)
    (out,), (grad,), *_ = on_ranks(module, head_tail(11, 3), [x], (6, 5), [y])
    torch.testing.assert_close((y * out).sum(), (grad * x).sum(), rtol=1e-12, atol=1e-12)


def test_bytes_and_calls():
    """2 rows of 8 bytes for each row of the batch from the rank before; ids need none back. A rank's parts are one
    call, but for documents that begin or end."""
    module, tokens = drawn(NGrams, 12)
    _, cotangents, *_ = on_one(module, tokens, (12,))
    *_, sent, lengths = on_ranks(module, contiguous(12, 3), tokens, None, cotangents)
    assert (sent, lengths) == ((32, 32, 0), ([4], [6], [6]))
    *_, sent, lengths = on_ranks(module, contiguous(12, 3), tokens, (4, 8), cotangents)
    assert (sent, lengths) == ((0, 32, 0), ([4], [4], [6]))
    *_, lengths = on_ranks(module, head_tail(12, 3), tokens, (12,), cotangents)
    assert lengths == ([6], [8], [6])  # 2 + (2 + 2), (2 + 2) + (2 + 2), 2 + 4
    *_, lengths = on_ranks(module, contiguous(12, 2), tokens, (2, 2, 8), cotangents)
    assert lengths == ([2, 2, 2], [8])
    *_, sent, lengths = on_ranks(module, contiguous(2, 3), [tokens[0][:, :2]], None, [cotangents[0][:, :2]])
    assert lengths == ([1], [2], [1])  # the last rank has no token, and computes the first
