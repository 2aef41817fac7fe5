"""The effect of ``torch.autocast`` on scaled_dot_product_attention, applied to attention that is not that function."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch


def _lower(device: torch.device) -> torch.dtype | None:
    kind = device.type
    # torch.compile on 2.11 cannot trace is_autocast_available. The devices that it compiles for have autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if not known or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def attended_dtypes(tensors: Sequence[torch.Tensor]) -> tuple[torch.dtype, ...]:
    """The dtypes in which scaled_dot_product_attention would take tensors of one device here.

    Autocast does not change float64 and non-floating dtypes.
    """
    dtypes = tuple([x.dtype for x in tensors])
    lower = _lower(tensors[0].device)
    if lower is None:
        return dtypes
    return tuple([lower if x.is_floating_point and x != torch.float64 else x for x in dtypes])


def as_attended(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``tensors`` of one device as scaled_dot_product_attention would take them here. Differentiable."""
    dtypes = attended_dtypes(tensors)
    return tuple([x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)])


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, for code that chooses its dtypes itself.

    The caller's autocast may be active in the forward of an op, and in a backward that was called under autocast.
    """
    if _lower(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
