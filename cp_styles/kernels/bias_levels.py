"""Rows of an additive mask whose biases are all far from 0, for example padding masked with finfo.min or -1e9.

A logsumexp near -1e9 has no digits left for the logarithm of the number of keys. Tiles of such a row could not be
merged, and probabilities could not be computed from it. Therefore the row's largest bias, its *level*, is subtracted
from all its biases, which does not change the softmax. The subtraction is exact for biases close to the level. Biases
far below the level have no weight.

On one device a level may be so large that adding a logit to it does not change it. The logits are then *drowned*: the
row attends by its biases alone (finfo.min everywhere gives the mean of the values). Kernels get a query of 0 for it.

Shapes: B batch, H query heads, L local queries, D head dim, E value head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cp_styles.kernels.base import OtherBackward, tile_function

# Levels closer to 0 than this are not subtracted. A bias that is lower by this has no weight (e^-128).
_LEAST = 128.0
# A level drowns logits up to a quarter of this, if the gap to the next floating-point number is at least half of this.
_ORDINARY = 32.0
# Number of biases that are processed together.
_BIASES = 2**22


@dataclass(frozen=True)
class RowLevels:
    """The levels of the rows of an additive mask.

    Attributes:
        level: ``[B, H, L]``, or dims of size 1 that broadcast. It is subtracted from the biases; 0 for most rows.
        drowned: bool ``[B, H, L, 1]``, or dims of size 1: rows that attend by their biases alone. None if no row does.
    """

    level: torch.Tensor
    drowned: torch.Tensor | None

    @classmethod
    def find(
        cls,
        biases: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        q_positions_L: torch.Tensor,
        keys: int,
        dtype: torch.dtype,
        *,
        drowns: bool,
        read: Callable[[torch.Tensor], list[bool]],
    ) -> RowLevels | None:
        """The levels of some queries over all ``keys`` keys. None if no row has a level.

        ``biases`` returns biases for queries and keys at given positions, -inf where there is no attention. ``dtype``
        is the dtype of the logits. ``drowns``: rows can be drowned. ``read`` returns the two numbers in its
        argument, or cached ones, for which the host does not wait for the device. No communication.
        """
        kv_positions = torch.arange(keys, device=q_positions_L.device)
        one_row = keys * biases(q_positions_L[:1], kv_positions[:1]).numel()
        largest = [biases(rows, kv_positions).amax(-1) for rows in q_positions_L.split(max(1, _BIASES // one_row))]
        level = torch.cat(largest, -1)
        level = level.to(torch.promote_types(level.dtype, dtype))[(None,) * (3 - level.ndim)]
        level = level.masked_fill(~level.isfinite() | (level.abs() < _LEAST), 0.0)
        drowned = (level.abs() * torch.finfo(dtype).eps >= _ORDINARY) & drowns
        has_level, has_drowned = read(torch.stack([level.any(), drowned.any()]))
        return cls(level, drowned.unsqueeze(-1) if has_drowned else None) if has_level else None

    def subtract(self, bias: torch.Tensor, heads: tuple[int, int], rows: tuple[int, int]) -> torch.Tensor:
        """Subtract the levels of some heads and rows from their biases."""
        level = self.level[:, :, rows[0] : rows[1]]
        level = level if level.shape[1] == 1 else level[:, heads[0] : heads[1]]
        return bias - level.unsqueeze(-1)

    def zero_drowned(self, q_BHLD: torch.Tensor) -> torch.Tensor:
        """The queries, with 0 for drowned rows."""
        return q_BHLD if self.drowned is None else q_BHLD.masked_fill(self.drowned, 0.0)

    def split_queries(self, q_BHLD: torch.Tensor) -> torch.Tensor:
        """The queries for :class:`SplitQueries`, twice as wide."""
        assert self.drowned is not None
        return torch.cat((self.zero_drowned(q_BHLD), q_BHLD.masked_fill(~self.drowned, 0.0)), -1)


@dataclass(frozen=True)
class SplitQueries(OtherBackward):
    """``inner`` for a backward whose queries are twice as wide: queries of ordinary rows, then of drowned rows."""

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, **options):
        dim = k_BGMD.shape[-1]
        # Keys are 0 in the second half, so drowned queries do not change the logits. The gradient of the keys is
        # d logits times queries. Its second half is the share of drowned queries, which is added.
        # The tensors are padded at the front, because LseGradient adds its columns at the end.
        grad, v, out = (F.pad(x, (dim, 0)) for x in (grad_BHLE, v_BGME, out_BHLE))
        backward, k = tile_function(self.inner, "backward"), F.pad(k_BGMD, (0, dim))
        dq, dk, dv = backward(grad, q_BHLD, k, v, out, lse_BHL, **options)
        return dq, dk[..., :dim] + dk[..., dim:], dv[..., dim:]
