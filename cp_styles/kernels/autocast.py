"""The effect of ``torch.autocast`` on scaled_dot_product_attention, applied to attention that is not that function."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter

import torch

from cp_styles._compat import any_autocast, is_traced

_DTYPE = attrgetter("dtype")


def _lower(device: torch.device) -> torch.dtype | None:
    kind = device.type
    # torch.compile on 2.11 cannot trace is_autocast_available. The devices that it compiles for have autocast.
    has_autocast = is_traced() or torch.amp.is_autocast_available(kind)
    if not has_autocast or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def attended_dtypes(tensors: Sequence[torch.Tensor]) -> tuple[torch.dtype, ...]:
    """The dtypes in which scaled_dot_product_attention would take tensors of one device here.

    Autocast does not change float64 and non-floating dtypes.
    """
    dtypes = tuple(map(_DTYPE, tensors))
    lower = _lower(tensors[0].device) if any_autocast() else None
    return dtypes if lower is None else tuple([_lowered(dtype, lower) for dtype in dtypes])


def _lowered(dtype: torch.dtype, lower: torch.dtype) -> torch.dtype:
    return lower if dtype.is_floating_point and dtype != torch.float64 else dtype


def as_attended(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``tensors`` of one device as scaled_dot_product_attention would take them here. Differentiable."""
    if not is_traced() and not any_autocast():
        return tuple(tensors)
    lower = _lower(tensors[0].device)
    return tuple(tensors) if lower is None else tuple([x.to(_lowered(x.dtype, lower)) for x in tensors])


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, for code that chooses its dtypes itself.

    The caller's autocast may be active in the forward of an op, and in a backward that was called under autocast.
    """
    if _lower(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
