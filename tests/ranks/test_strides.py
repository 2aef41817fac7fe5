"""Inputs of any layout in memory, through every door: what torch's attention takes on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import (
    AttentionContextParallel,
    Causal,
    ModuleContextParallel,
    context_attention,
    context_flex_attention,
    context_parallel,
    context_varlen_attention,
    contiguous,
)
from cp_styles.testing import run_ranks
from tests.oracle import attention_inputs, error, expected_attention
from tests.ranks.attention_case import EXACT, cp_mesh

LENGTH = 13


class Attend(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def by_function(mesh, *tensors):
    return context_attention(*tensors, mesh, mask=Causal(), layout=contiguous)


def by_module(mesh, *tensors):
    return parallelize_module(Attend(), mesh, ModuleContextParallel(layout=contiguous))(*tensors)


def by_block(mesh, *tensors):
    with context_parallel(mesh, layout=contiguous):
        return Attend()(*tensors)


def by_style(mesh, *tensors):
    return parallelize_module(Attend(), mesh, AttentionContextParallel(layout=contiguous))(*tensors)


def by_flex(mesh, *tensors):
    return context_flex_attention(*tensors, mesh, mask=Causal(), layout=contiguous)


def by_score_mod(mesh, *tensors):
    def causal(score, b, h, query, key):
        return torch.where(key <= query, score, float("-inf"))

    return context_flex_attention(*tensors, mesh, score_mod=causal, layout=contiguous)


def by_varlen(mesh, *tensors):
    packs = (x[0].transpose(0, 1) for x in tensors)
    out = context_varlen_attention(*packs, mesh, [0, LENGTH], window_size=(-1, 0), layout=contiguous)
    return out.transpose(0, 1)[None]


DOORS = {door.__name__: door for door in (by_function, by_module, by_block, by_flex, by_score_mod, by_varlen)}


def apart(x: torch.Tensor) -> torch.Tensor:
    """[B, H, D, S] in memory: a row's numbers do not stand one after the other."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_whose_numbers_stand_apart(door, ranks: int):
    inputs, cotangent = attention_inputs(length=LENGTH, batch=1)
    expected = expected_attention(inputs, cotangent, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    layout = contiguous(LENGTH, ranks)

    def on(rank: int):
        mesh = cp_mesh(ranks)
        leaves = [apart(layout.shard(x, 2, rank)).requires_grad_() for x in inputs]
        assert all(x.stride(-1) != 1 for x in leaves)
        out = door(mesh, *leaves)
        found = [out, *torch.autograd.grad(out, leaves, apart(layout.shard(cotangent, 2, rank)))]
        with torch.inference_mode():
            found.append(door(mesh, *leaves).clone())
        return [x.detach() for x in found]

    for parts, wanted in zip(zip(*run_ranks(on, ranks), strict=True), [*expected, expected[0]], strict=True):
        assert error(layout.unshard(list(parts), 2), wanted) < EXACT
