"""Context-parallel attention as a function of local tensors: the engine without DTensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles.kernels import Kernel
from cp_styles.layout import Balancer, SequenceLayout, head_tail
from cp_styles.mask import Full, Mask
from cp_styles.state import Binding
from cp_styles.strategies import Attention, Ring, Strategy
from cp_styles.strategies.base import new_residual


def context_attention(
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    v_BGME: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer = head_tail,
    strategy: Strategy | None = None,
    kernel: Kernel | None = None,
    scale: float | None = None,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a sequence of which this rank holds a part: equal to one device's on the whole.

    Args:
        q_BHLD: local query, cut by ``layout``.
        k_BGMD: local key, cut likewise; H is a multiple of G (GQA), and G heads are what travels.
        v_BGME: local value.
        group: the ranks that share the sequence: a process group or a 1-D mesh.
        mask: who attends to whom, in global positions; default everybody to everybody.
        layout: the cut, or the balancer that made it.
        strategy: how queries and keys meet; default ``Ring()``, whose docstring gives the bytes.
        kernel: computes the tiles; default the fastest of torch's that can.
        scale: of the logits; default 1/sqrt(D).
        sink_H: a learned logit a query head that takes part in every softmax and gives nothing (attention sinks); the
            same on all ranks. Its gradient is this rank's share: sum it over the group, as any parameter's.

    Returns:
        ``out_BHLE`` of the local queries, in their dtype.

    Communication: one all-gather of six integers, then the strategy's. Backward: the strategy's.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, when any rank's input is bad or they do not fit.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"context_attention needs a 1-D mesh, got axes {group.mesh_dim_names}: pass mesh['cp']")
        axis, group = (group.mesh_dim_names or ("cp",))[0], group.get_group()
    elif isinstance(group, dist.ProcessGroup):
        axis = "group"
    else:
        raise TypeError(f"context_attention needs a process group or a 1-D DeviceMesh, got {type(group).__name__}")
    binding = Binding("context_attention", axis, group, strategy or Ring(), layout, mask or Full(), kernel)
    return attend(binding, (q_BHLD, k_BGMD, v_BGME), scale=scale, sink_H=sink_H)


def attend(
    binding: Binding,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    sink_H: torch.Tensor | None = None,
    refuse: Callable[[], None] | None = None,
) -> torch.Tensor:
    """What :func:`context_attention` does, for a binding; ``refuse`` raises for what this rank alone may see."""

    def check() -> None:
        if refuse is not None:
            refuse()
        check_local(binding.name, tensors)
        heads = tensors[0].shape[1]
        if sink_H is not None and tuple(sink_H.shape) != (heads,):
            raise ValueError(
                f"{binding.name}: sink_H must be one logit for each of {heads} query heads, got {tuple(sink_H.shape)}"
            )

    lengths = binding.agree(check, tensors, 2, attn_mask, {"is_causal": is_causal, "scale": scale})
    attention = binding.attention(*lengths, tensors, is_causal=is_causal, attn_mask=attn_mask, scale=scale)
    return _ContextAttention.apply(*tensors, sink_H, attention, binding.strategy)


def check_local(name: str, tensors: tuple[torch.Tensor, ...]) -> None:
    """Refuse what no attention takes: not plain tensors, not 4-D, dtypes or devices that differ."""
    for label, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a tensor, got {type(tensor).__name__}")
        if isinstance(tensor, DTensor):
            raise TypeError(f"{name}: {label} is a DTensor; pass this rank's part, tensor.to_local()")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name}: {label} must have 4 dims (batch, heads, sequence, head dim), got {tuple(tensor.shape)}"
            )
    if len({(x.dtype, x.device) for x in tensors}) > 1 or not tensors[0].is_floating_point():
        raise ValueError(
            f"{name}: query, key and value must share one floating-point dtype and one device, got "
            f"{[(str(x.dtype), str(x.device)) for x in tensors]}"
        )


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, attention: Attention, strategy: Strategy):
        residual = None
        if any(ctx.needs_input_grad):
            residual = new_residual(strategy.residual_specs(attention, q, k, v), q.device)
        out = strategy.forward(attention, q, k, v, sink, residual)
        ctx.save_for_backward(q, k, v, out, residual, sink)
        ctx.attention, ctx.strategy = attention, strategy
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *ctx.strategy.backward(ctx.attention, grad, *ctx.saved_tensors), None, None
