"""Values that tensors of a dtype can hold."""

from __future__ import annotations

import math

import torch


def holds(dtype: torch.dtype, value: float) -> bool:
    """Whether tensors of ``dtype`` can hold ``value``. torch wraps -100 to 156 in uint8, and cuts 0.5 to 0."""
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    bounds = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bounds[0] <= value <= bounds[1] and value == int(value)
