"""Matrix products in the full precision of their dtype, also where TF32 is allowed."""

from __future__ import annotations

import torch

# The bits of a float32 that TF32 keeps: 10 bits of the fraction.
_KEPT = ~0x1FFF


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in the full precision of the dtype.

    If the user has allowed TF32 (``torch.set_float32_matmul_precision``), a GPU rounds the inputs of a float32 product
    to TF32. Then each input is split into two parts that TF32 represents, and three products of parts are added.
    """
    if a.dtype != torch.float32 or a.device.type != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return a @ b
    (a_high, a_low), (b_high, b_low) = _parts(a), _parts(b)
    return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 11 bits of each number, which TF32 represents; and the other 13 bits, of which TF32 keeps 11."""
    high = (x.view(torch.int32) & _KEPT).view(torch.float32)
    return high, x - high
