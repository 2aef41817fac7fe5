"""The doors to context-parallel attention, each as a function of a mesh and local query, key and value: causal, cut
contiguously."""

from __future__ import annotations

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
    context_varlen_attention,
    contiguous,
)
from cp_styles.torch_api import context_parallel

# Of the whole sequence, in every test that uses these.
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


DOORS = {door.__name__: door for door in (by_function, by_module, by_block, by_style, by_flex, by_score_mod, by_varlen)}
