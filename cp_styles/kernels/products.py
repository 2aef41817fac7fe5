"""Matrix products in all the digits of their dtype."""

from __future__ import annotations

import torch

# What is left of a float32 in TF32: 10 bits after the leading one.
_KEPT = ~0x1FFF


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``. On a GPU a float32 product is one of inputs rounded to TF32 where the user has allowed that
    (``torch.set_float32_matmul_precision``); then this one is three of those, of parts that TF32 holds."""
    if a.dtype != torch.float32 or a.device.type != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return a @ b
    (a_high, a_low), (b_high, b_low) = _parts(a), _parts(b)
    return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What TF32 holds of each number, and the rest, of which it holds as much as float32 needs."""
    high = (x.view(torch.int32) & _KEPT).view(torch.float32)
    return high, x - high
