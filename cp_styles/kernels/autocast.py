"""What ``torch.autocast`` does to scaled_dot_product_attention, for attention that is not it."""

from __future__ import annotations

import contextlib

import torch


def _lower(device: torch.device) -> torch.dtype | None:
    kind = device.type
    # torch.compile on 2.11 cannot ask whether there is autocast for a device; what it compiles for has it.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if not known or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def attended_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which scaled_dot_product_attention would take ``tensor`` here: autocast leaves float64 and
    non-floats."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor.dtype
    return _lower(tensor.device) or tensor.dtype


def as_attended(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as scaled_dot_product_attention would take it here. Differentiable."""
    return tensor.to(attended_dtype(tensor))


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """For code that says its dtypes itself, where the caller's autocast may reach: an op's forward, and a backward that
    was called under autocast."""
    if _lower(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
