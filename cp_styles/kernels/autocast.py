"""The effect of ``torch.autocast`` on scaled_dot_product_attention, applied to attention that is not that function."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter

import torch

from cp_styles._lib.compat import any_autocast, is_traced

_DTYPE = attrgetter("dtype")


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    kind = device.type
    # torch.compile on 2.11 cannot trace is_autocast_available. All devices of torch.compile have autocast.
    has_autocast = is_traced() or torch.amp.is_autocast_available(kind)
    if not has_autocast or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def attention_dtypes(tensors: Sequence[torch.Tensor]) -> tuple[torch.dtype, ...]:
    """The dtypes to which scaled_dot_product_attention would cast tensors of one device here."""
    dtypes = tuple(map(_DTYPE, tensors))
    lower = _autocast_dtype(tensors[0].device) if any_autocast() else None
    return dtypes if lower is None else tuple([_cast_dtype(dtype, lower) for dtype in dtypes])


def _cast_dtype(dtype: torch.dtype, lower: torch.dtype) -> torch.dtype:
    # Autocast does not change float64 and non-floating dtypes.
    return lower if dtype.is_floating_point and dtype != torch.float64 else dtype


def cast_for_attention(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Cast ``tensors`` of one device as scaled_dot_product_attention would cast them here. Differentiable."""
    if not is_traced() and not any_autocast():
        return tuple(tensors)
    lower = _autocast_dtype(tensors[0].device)
    return tuple(tensors) if lower is None else tuple([x.to(_cast_dtype(x.dtype, lower)) for x in tensors])


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, for code that chooses its dtypes itself."""
    # Autocast may be active in the forward of an op, and in a backward that was called under autocast.
    if _autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
