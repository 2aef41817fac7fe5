"""torch.roll over any cut: against one process in float64, and the bytes that travel."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from cp_styles import ModuleContextParallel, contiguous, head_tail, parallelize_module
from cp_styles.layouts import SequenceLayout
from cp_styles.mixers import context_causal_conv1d, context_roll
from cp_styles.testing import CommunicationTrace, run_ranks
from cp_styles.torch_api import context_parallel
from tests.layouts import packs
from tests.oracle import randn
from tests.ranks.attention_case import cp_mesh, refused


def on_one(x: torch.Tensor, shifts: int, documents, fill) -> torch.Tensor:
    parts = []
    for part in x.split(list(documents), 1):
        size = part.shape[1]
        rolled = part.roll(shifts, 1)
        if fill is not None:
            source = torch.arange(size) - shifts
            rolled = rolled.masked_fill(((source < 0) | (source >= size))[:, None], fill)
        parts.append(rolled)
    return torch.cat(parts, 1)


def on_ranks(layout: SequenceLayout, shifts: int, documents, x, cotangent, fill=None):
    def main(rank: int):
        mesh = cp_mesh(layout.ranks)
        local = layout.shard(x, 1, rank).clone().requires_grad_(x.dtype.is_floating_point)
        with CommunicationTrace() as trace:
            out = context_roll(local, shifts, 1, mesh, layout=layout, documents=documents, fill=fill)
        sent = sum(size for name, size in trace.events if name.startswith("all_to_all"))
        if cotangent is not None:
            out.backward(layout.shard(cotangent, 1, rank))
        return out.detach(), local.grad, sent

    outs, grads, sent = zip(*run_ranks(main, layout.ranks), strict=True)
    return layout.unshard(outs, 1), None if cotangent is None else layout.unshard(grads, 1), sent


@settings(max_examples=9, deadline=None)
@given(packs(), st.integers(-30, 30), st.sampled_from((None, 0, -2.5)))
@example((contiguous(9, 2), (4, 5)), -1, None)  # around the ends of its document, and not of the sequence
def test_any_cut(pack, shifts: int, fill: float | None):
    layout, documents = pack
    x, cotangent = randn(0, 2, layout.length, 3), randn(1, 2, layout.length, 3)
    whole = x.clone().requires_grad_()
    expected = on_one(whole, shifts, documents, fill)
    expected.backward(cotangent)
    out, grad, _ = on_ranks(layout, shifts, documents, x, cotangent, fill)
    assert torch.equal(out, expected)
    assert torch.equal(grad, whole.grad)


def test_tokens_are_rolled_too():
    tokens = torch.arange(12)[None]
    out, _, _ = on_ranks(head_tail(12, 3), -1, None, tokens, None)
    assert torch.equal(out, tokens.roll(-1, 1))


def test_bytes():
    """Of contiguous parts, one row of 3 numbers in float64 for a shift by one, and none of the others."""
    x = randn(0, 1, 12, 3)
    assert on_ranks(contiguous(12, 3), -1, None, x, None)[2] == (24, 24, 24)
    assert on_ranks(contiguous(12, 3), -1, [4, 8], x, None)[2] == (0, 24, 24)


def test_ranks_that_differ():
    words = "context_roll: .* disagree on shifts: .*rank 0: .*, rank 1: "
    refused(lambda rank, mesh: context_roll(torch.zeros(1, 4, 3), -1 - rank, 1, mesh), words)


@pytest.mark.parametrize("shifts", [(1, 2), 1.0])
def test_one_number(shifts):
    refused(lambda _, mesh: context_roll(torch.zeros(1, 4, 3), shifts, 1, mesh), "shifts=", (ValueError, TypeError))


class Shifted(nn.Module):
    """Adds to each token the one before it, by a mixer that names no layout."""

    def __init__(self, mixer: str) -> None:
        super().__init__()
        self.mixer, self.mesh = mixer, cast(Any, None)

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        if self.mesh is None:
            return before
        if self.mixer == "roll":
            return context_roll(x, 1, 1, self.mesh, fill=0.0)
        return context_causal_conv1d(lambda x: F.pad(x, (0, 0, 1, -1)), x, self.mesh, width=2, seq_dim=1)

    def forward(self, x):
        q = (x + self.shifted(x))[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


@pytest.mark.parametrize("mixer", ["roll", "convolution"])
@pytest.mark.parametrize("door", ["style", "block"])
def test_the_layout_is_that_of_the_style_around_the_call(door: str, mixer: str):
    layout, x, model = contiguous(12, 2), randn(0, 2, 12, 4), Shifted(mixer)
    wanted = model(x)

    def on(rank: int) -> torch.Tensor:
        mine = Shifted(mixer)
        mine.mesh = cp_mesh(2)
        if door == "style":
            parallelize_module(mine, mine.mesh, ModuleContextParallel(layout=contiguous))
            return mine(layout.shard(x, 1, rank))
        buffer = x.clone()
        with context_parallel(mine.mesh, buffers=[buffer], buffer_seq_dims=[1], layout=contiguous):
            return mine(buffer)

    torch.testing.assert_close(layout.unshard(run_ranks(on, 2), 1), wanted, rtol=1e-12, atol=1e-12)
