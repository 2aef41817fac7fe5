"""The effect of ``torch.autocast`` on scaled_dot_product_attention, applied to attention that is not that function."""

from __future__ import annotations

import contextlib

import torch


def _lower(device: torch.device) -> torch.dtype | None:
    kind = device.type
    # torch.compile on 2.11 cannot trace is_autocast_available. The devices that it compiles for have autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if not known or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def attended_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which scaled_dot_product_attention would take ``tensor`` here.

    Autocast does not change float64 and non-floating dtypes.
    """
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor.dtype
    return _lower(tensor.device) or tensor.dtype


def as_attended(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as scaled_dot_product_attention would take it here. Differentiable."""
    return tensor.to(attended_dtype(tensor))


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, for code that chooses its dtypes itself.

    The caller's autocast may be active in the forward of an op, and in a backward that was called under autocast.
    """
    if _lower(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
