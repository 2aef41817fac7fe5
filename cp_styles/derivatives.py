"""Derivatives that attention here has not: second ones, and forward-mode. Refused in words, instead of wrong or 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cp_styles._compat import has_tangent


def refuse_tangents(name: str, tensors: Sequence[torch.Tensor | None]) -> None:
    """Raise NotImplementedError for a tensor that forward-mode differentiation has given a tangent."""
    if torch.compiler.is_compiling():
        return
    if any(tensor is not None and has_tangent(tensor) for tensor in tensors):
        raise NotImplementedError(
            f"{name}: forward-mode differentiation (torch.func.jvp, jacfwd, dual tensors) does not go through context "
            "parallelism, as it does not through torch's fused attention: use reverse mode (backward, autograd.grad)"
        )


def first_derivatives_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A ``backward(ctx, *grads)`` whose results, under ``create_graph``, raise where they are differentiated again.

    torch's own ``once_differentiable`` raises if the incoming gradient requires grad. This one also does if only a
    saved tensor does: the gradient of attention depends on query, key and value, whatever came in.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        sources = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        results = [x for x in found if x is not None]
        final = iter(_Final.apply(len(results), *results, *sources) if sources and results else results)
        return tuple(None if x is None else next(final) for x in found)

    return run


class _Final(torch.autograd.Function):
    """The first tensors as they are, as functions of the others that nobody can differentiate."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "second derivatives through context-parallel attention (create_graph=True, then a backward through the "
            "gradient) are not computed, as they are not by torch's fused attention. Leave create_graph out, or "
            "compute this penalty with an attention in plain ops on one device"
        )
