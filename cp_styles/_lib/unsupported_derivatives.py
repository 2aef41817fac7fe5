"""Refusal of derivatives that are not supported: second derivatives, forward-mode differentiation, torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cp_styles._lib.compat import forward_mode_level, has_tangent, is_in_torch_func, is_traced, torch_func_transform
from cp_styles._lib.troubleshooting import see


def refuse_transforms(name: str, tensors: Sequence[torch.Tensor | None]) -> None:
    """Raise NotImplementedError if a tensor is in forward-mode differentiation, or in a transform of torch.func."""
    if is_traced():
        return
    for tensor in tensors if forward_mode_level() >= 0 else ():
        if tensor is not None and has_tangent(tensor):
            raise NotImplementedError(
                f"{name}: forward-mode differentiation (torch.func.jvp, jacfwd, dual tensors) is not supported under "
                "context parallelism, nor by torch's fused attention: use reverse mode (backward, autograd.grad)"
            )
    for tensor in tensors if torch_func_transform() is not None else ():
        if tensor is not None and is_in_torch_func(tensor):
            raise NotImplementedError(
                f"{name}: transforms of torch.func are not supported under context parallelism. In place of grad, vjp "
                "or jacrev call backward() or torch.autograd.grad; in place of vmap give the batch as the first dim"
            )


def first_derivatives_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorator for ``backward(ctx, *grads)``. Its results, under ``create_graph``, raise if differentiated again."""
    # torch's once_differentiable raises if the incoming gradient requires grad. This decorator also raises if only a
    # saved tensor requires grad, because the gradient of attention depends on query, key and value too.

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return gradients
        sources = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        results = [x for x in gradients if x is not None]
        final = iter(_NoSecondDerivative.apply(len(results), *results, *sources) if sources and results else results)
        return tuple(None if x is None else next(final) for x in gradients)

    return run


class _NoSecondDerivative(torch.autograd.Function):
    """Returns the first ``count`` tensors. They depend on all tensors, and their backward raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "second derivatives through context-parallel attention (create_graph=True, then a backward through the "
            "gradient) are not supported, nor by torch's fused attention. Do not use create_graph, or compute this "
            "penalty with an attention in plain ops on one device"
            f"{see('Second derivatives')}"
        )
