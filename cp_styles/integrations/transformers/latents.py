"""Models of transformers with multi-head latent attention (MLA): their latents travel in place of their heads.

Such a model expands the latents of its own tokens by a linear layer, ``kv_b_proj``, and calls its attention function
with keys and values of all heads. A hook on this layer notes its latents for the attention function of
:mod:`~cp_styles.integrations.transformers`: see :func:`~cp_styles.integrations.transformers.send_latents`.

Written for transformers 5.24. Shapes: B batch, H heads, S tokens of this rank, R dim of a latent, r rotary dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.compat import uncompiled, without_function_modes
from cp_styles.functions.latent import LatentCall, NotedLatent
from cp_styles.intercept.function_mode import AttentionCalls


@uncompiled
def note_latent(check: Callable[[], None], up: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """A forward hook for ``kv_b_proj``: the next attention takes the latent in ``args``, and ``output``.

    ``check`` raises if the next attention takes no latents.
    """
    # The arguments of a hook behind the forward are the final arguments, after all hooks in front of it.
    if AttentionCalls.current() is not None:
        check()
        facts_about(up)[NotedLatent] = NotedLatent(args[0], output)


def take_latents(
    layer: nn.Module, q_BHSD: torch.Tensor, k_BHSD: torch.Tensor, v_BHSE: torch.Tensor
) -> tuple[LatentCall | None, Exception | None]:
    """The latents from which ``layer`` has computed its key and value, or the reason why they are not known. Neither
    without :func:`note_latent`. No communication."""
    up = getattr(layer, "kv_b_proj", None)
    noted = None if up is None else facts_about(up).pop(NotedLatent, None)
    if up is None or noted is None:
        return None, None
    with without_function_modes():
        (latent, expanded), name = noted, type(layer).__name__
        kinds = [type(x) for x in (latent, expanded, up.weight)]
        if not {*kinds} <= {torch.Tensor, nn.Parameter}:
            return None, NotImplementedError(
                f"{name}: send_latents needs plain tensors, got {[kind.__name__ for kind in kinds]} as latent, "
                "expanded latent and weight of kv_b_proj: leave kv_b_proj out of the tensor-parallel plan, and wrap "
                "whole layers with FSDP2"
            )
        nope_dim = up.weight.shape[0] // q_BHSD.shape[1] - v_BHSE.shape[3]
        rot = k_BHSD[:, 0, :, nope_dim:].clone()  # a view would keep the keys of all heads alive
        if not _is_expanded(up, expanded, rot, k_BHSD, v_BHSE):
            return None, NotImplementedError(
                f"{name} computes its keys and values in another way than by its kv_b_proj alone: leave send_latents "
                "out, so that its heads travel"
            )
        return LatentCall(q_BHSD, latent.flatten(1, -2), rot, up.weight), None


def _is_expanded(
    up: nn.Module, expanded: torch.Tensor, rot_BSr: torch.Tensor, k_BHSD: torch.Tensor, v_BHSE: torch.Tensor
) -> bool:
    """Whether key and value are the output of ``up``, and the rotary key for all heads."""
    (batch, heads, rows, dim), rotary_dim = k_BHSD.shape, rot_BSr.shape[2]
    if expanded.numel() != batch * heads * rows * (dim - rotary_dim + v_BHSE.shape[3]):
        return False
    if v_BHSE.untyped_storage().data_ptr() != expanded.untyped_storage().data_ptr():
        return False
    known = facts_about(up)
    if _is_expanded not in known:  # numbers are compared once, because the host waits for them
        kv = expanded.reshape(batch, rows, heads, -1).transpose(1, 2)[:, :, :1]
        rot = rot_BSr[:, None, :1].expand(-1, heads, -1, -1)
        wanted = torch.cat((kv[..., : dim - rotary_dim], rot, kv[..., dim - rotary_dim :]), 3)
        known[_is_expanded] = torch.equal(wanted, torch.cat((k_BHSD[:, :, :1], v_BHSE[:, :, :1]), 3))
    return known[_is_expanded]
