"""The doors to context-parallel attention, each as a function of local query, key and value [B, H, S, D]: causal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cp_styles import (
    AttentionContextParallel,
    Causal,
    ModuleContextParallel,
    context_attention,
    context_flex_attention,
    context_varlen_attention,
    contiguous,
    parallelize_module,
)
from cp_styles.torch_api import context_parallel
from tests.ranks.attention_case import Core

# Of the whole sequence, where a test does not say another.
LENGTH = 13
STYLES = {"style": AttentionContextParallel, "module": ModuleContextParallel}
OTHERS = ("function", "flex", "score_mod", "varlen", "block")


def causal_scores(score, b, h, query, key):
    return torch.where(key <= query, score, float("-inf"))


def in_block(mesh: Any, options: dict[str, Any], *qkv: torch.Tensor) -> torch.Tensor:
    with context_parallel(mesh, **options):
        return Core()(*qkv)


def packed(mesh: Any, length: int, options: dict[str, Any], *qkv: torch.Tensor) -> torch.Tensor:
    """One row of the batch after the other, as packs have none."""
    packs = zip(*(x.transpose(1, 2) for x in qkv), strict=True)
    attend = partial(context_varlen_attention, mesh=mesh, cu_seqlens=[0, length], window_size=(-1, 0), **options)
    outs = [attend(*pack) for pack in packs]
    return (torch.stack(outs) if len(outs) > 1 else outs[0][None]).transpose(1, 2)  # one result is not copied


def door(name: str, mesh: Any, *, length: int = LENGTH, **options: Any) -> Callable[..., torch.Tensor]:
    """What a user of the door ``name`` calls. ``length`` is that of the whole sequence."""
    if name in STYLES:
        return parallelize_module(Core(), mesh, STYLES[name](**options))
    if name == "function":
        return partial(context_attention, mesh=mesh, mask=Causal(), **options)
    if name == "block":
        return partial(in_block, mesh, options)
    if name == "varlen":
        return partial(packed, mesh, length, options)
    how = {"mask": Causal()} if name == "flex" else {"score_mod": causal_scores}
    return partial(context_flex_attention, mesh=mesh, enable_gqa=True, **how, **options)


def cut_contiguously(name: str, mesh: Any, *qkv: torch.Tensor) -> torch.Tensor:
    return door(name, mesh, layout=contiguous)(*qkv)


DOORS = {name: partial(cut_contiguously, name) for name in (*STYLES, *OTHERS)}
