"""Every way to call a context-parallel attention, by name: functions of this rank's query, key, value [B, H, S, D]."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from cp_styles import (
    AttentionContextParallel,
    Causal,
    Full,
    Mask,
    ModuleContextParallel,
    SequenceScope,
    context_attention,
    context_flex_attention,
    context_latent_attention,
    context_varlen_attention,
    contiguous,
    flex_attention,
)
from cp_styles.torch_api import context_parallel
from tests.ranks.attention_case import Core

Attend = Callable[..., torch.Tensor]
LENGTH = 13  # of the whole sequence, where a test does not name another


def combined(causal: bool, mask: Mask | None) -> Mask:
    """The conjunction of a module's own ``is_causal`` and its style's mask."""
    own = Causal() if causal else Full()
    return own if mask is None else mask & own if causal else mask


def with_column(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """As the oracle returns them: the logsumexp as a last column, 0 for rows without keys."""
    return torch.cat([out, lse.masked_fill(lse == -torch.inf, 0.0)[..., None]], -1)


def rows_first(attend: Attend) -> Attend:
    """``attend`` of tensors [B, S, H, D]."""
    return lambda *qkv: attend(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)


def causal_scores(score, b, h, query, key):
    return torch.where(key <= query, score, float("-inf"))


def within(scope: SequenceScope, attend: Attend, *qkv: torch.Tensor) -> torch.Tensor:
    with scope:
        return attend(*qkv)


def causal_blocks(length: int) -> Any:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")


class FlexCore(nn.Module):
    """A user's module that calls FlexAttention."""

    def __init__(self, *, lse: bool = False, **options: Any) -> None:
        super().__init__()
        self.lse, self.options = lse, options

    def forward(self, query, key, value):
        given = {"return_aux": AuxRequest(lse=True)} if self.lse else {}
        found = flex_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **given, **self.options)
        return with_column(found[0], found[1].lse) if self.lse else found


class PackedCore(nn.Module):
    """A user's module that calls torch's varlen_attn, for each row of the batch as a pack."""

    def __init__(self, cu_seqlens: Sequence[int], *, lse: bool = False, **options: Any) -> None:
        super().__init__()
        self.cu, self.longest = torch.tensor(cu_seqlens, dtype=torch.int32), max(b - a for a, b in pairwise(cu_seqlens))
        self.lse, self.options = lse, options

    def forward(self, query, key, value):
        options = dict(self.options)
        if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        if self.lse:
            options["return_aux"] = varlen.AuxRequest(lse=True)
        bounds = self.cu, self.cu.clone(), self.longest, self.longest
        return by_row(lambda *pack: varlen.varlen_attn(*pack, *bounds, **options), self.lse, query, key, value)


def by_row(attend: Callable[..., Any], lse: bool, *qkv: torch.Tensor) -> torch.Tensor:
    """One row of the batch after the other, as packs have none."""
    found = [attend(*pack) for pack in zip(*(x.transpose(1, 2) for x in qkv), strict=True)]
    if lse:
        return torch.stack([with_column(out.transpose(0, 1), column) for out, column in found])
    return (torch.stack(found) if len(found) > 1 else found[0][None]).transpose(1, 2)  # one result is not copied


def by_function(mesh, *, causal, mask, length, lse=False, seq_dim=2, **options) -> Attend:
    attend = partial(context_attention, mesh=mesh, mask=combined(causal, mask), **options)
    if lse:
        attend = partial(attend, return_lse=True)
    if seq_dim == 2:
        return attend if not lse else lambda *qkv: with_column(*attend(*qkv))
    attend = partial(attend, seq_dim=1)
    if not lse:
        return rows_first(attend)

    def columns(*qkv: torch.Tensor) -> torch.Tensor:
        out, column = attend(*(x.transpose(1, 2) for x in qkv))
        return with_column(out.transpose(1, 2), column)

    return columns


def by_latents(mesh, *, causal, mask, length, **options) -> Attend:
    """Keys and values of all heads as one latent, which an identity for each head expands. One key head has rotary dims
    too, as they are shared by all query heads."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (groups, dim), (*_, value_dim) = (k.shape[1], k.shape[3]), v.shape
        rotary_dim = dim // 2 if groups == 1 else 0
        nope, rot = k[..., : dim - rotary_dim], k[:, 0, :, dim - rotary_dim :]
        rows = dim - rotary_dim + value_dim
        weight = torch.eye(groups * rows, dtype=q.dtype, device=q.device).unflatten(0, (groups, rows))
        weight = weight.repeat_interleave(q.shape[1] // groups, 0).flatten(0, 1)
        latent = torch.cat((nope, v), -1).transpose(1, 2).flatten(2)
        return context_latent_attention(q, latent, rot, weight, mesh, mask=combined(causal, mask), **options)

    return attend


def by_flex(mesh, *, causal, mask, length, lse=False, **options) -> Attend:
    """A ``block_mask`` takes the place of the mask, ``score_mod`` is added to it."""
    if "block_mask" not in options:
        options["mask"] = combined(causal, mask)
    attend = partial(context_flex_attention, mesh=mesh, enable_gqa=True, **options)
    if not lse:
        return attend

    def columns(*qkv: torch.Tensor) -> torch.Tensor:
        out, more = attend(*qkv, return_aux=AuxRequest(lse=True))
        return with_column(out, more.lse)

    return columns


def by_scores(mesh, *, causal, mask, length, **options) -> Attend:
    return partial(context_flex_attention, mesh=mesh, enable_gqa=True, score_mod=causal_scores, **options)


def by_varlen(mesh, *, causal, mask, length, lse=False, cu_seqlens=None, **options) -> Attend:
    """One document, unless ``cu_seqlens`` has more."""
    how = {"window_size": (-1, 0)} if causal and mask is None else {"mask": mask and combined(causal, mask)}
    bounds = [0, length] if cu_seqlens is None else cu_seqlens
    options = {"mesh": mesh, "cu_seqlens": bounds, "return_lse": lse} | how | options
    return partial(by_row, partial(context_varlen_attention, **options), lse)


def in_module(style, mesh, *, causal, mask, length, core=None, scope=None, seq_dim=2, **options) -> Attend:
    """``scope``: a SequenceScope around each call, from which a style without a layout has it."""
    core = core or Core(causal=causal, seq_dim=seq_dim)
    given = {"seq_dim": 1} if seq_dim == 1 else {}
    styled = parallelize_module(core, mesh, style(mask=mask, **given, **options))
    attend = styled if seq_dim == 2 else rows_first(styled)
    return attend if scope is None else partial(within, scope, attend)


def in_scope(mesh, *, mask, layout, **options) -> Attend:
    return in_module(ModuleContextParallel, mesh, mask=None, scope=SequenceScope(layout, mask=mask), **options)


def in_block(mesh, *, causal, mask, length, core=None, **options) -> Attend:
    core = core or Core(causal=causal)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        with context_parallel(mesh, mask=mask, **options):
            return core(*qkv)

    return attend


def flex_in_module(mesh, *, causal, length, core=None, **options) -> Attend:
    core = core or FlexCore(block_mask=causal_blocks(length) if causal else None)
    return in_module(ModuleContextParallel, mesh, causal=causal, length=length, core=core, **options)


def varlen_in_module(mesh, *, causal, length, core=None, **options) -> Attend:
    core = core or PackedCore([0, length], window_size=(-1, 0 if causal else -1))
    return in_module(ModuleContextParallel, mesh, causal=causal, length=length, core=core, **options)


@dataclass(frozen=True)
class Door:
    """``make(mesh, causal=, mask=, length=, **options)``, and what else a call by this door can have.

    ``takes``: "sdpa" if it calls torch's scaled_dot_product_attention, whose call has a mask; a "scope" around it;
    "sink", "lse", "scores", a "kernel" by name, "autocast", "keys" of another number, and "packs" alone.
    """

    make: Callable[..., Attend]
    takes: frozenset[str]


def _door(make: Callable[..., Attend], *takes: str) -> Door:
    return Door(make, frozenset(takes))


_OF_SDPA = ("sdpa", "kernel", "autocast", "keys")
DOORS: dict[str, Door] = {
    "style": _door(partial(in_module, AttentionContextParallel), *_OF_SDPA, "scope"),
    "module": _door(partial(in_module, ModuleContextParallel), *_OF_SDPA, "scope", "sink"),
    "function": _door(by_function, "sink", "lse", "kernel", "autocast", "keys"),
    "latents": _door(by_latents, "kernel", "autocast", "keys"),
    "flex": _door(by_flex, "lse", "scores", "keys"),
    "score_mod": _door(by_scores),
    "varlen": _door(by_varlen, "lse", "packs"),
    "block": _door(in_block, *_OF_SDPA),
    "scope": _door(in_scope, *_OF_SDPA),
    "style, [B, S, H, D]": _door(partial(in_module, AttentionContextParallel, seq_dim=1), *_OF_SDPA, "scope"),
    "function, [B, S, H, D]": _door(partial(by_function, seq_dim=1), "sink", "lse", "kernel", "autocast", "keys"),
    "flex in module": _door(flex_in_module, "lse", "scores", "scope", "keys"),
    "varlen in module": _door(varlen_in_module, "lse", "packs"),
}
# Each way in once.
EACH = ("style", "module", "function", "flex", "score_mod", "varlen", "block")


def door(
    name: str, mesh: Any, *, causal: bool = True, mask: Mask | None = None, length: int = LENGTH, **options: Any
) -> Attend:
    """The function that a user of the door ``name`` calls.

    Args:
        causal: the call is causal, in the words of the door.
        mask: a mask of the package besides, of the style or the function.
        length: the whole sequence's.
        options: of the style or function, such as strategy and layout; ``core`` is a user's module.
    """
    return DOORS[name].make(mesh, causal=causal, mask=mask, length=length, **options)


def cut_contiguously(name: str, mesh: Any, *qkv: torch.Tensor) -> torch.Tensor:
    return door(name, mesh, layout=contiguous)(*qkv)
