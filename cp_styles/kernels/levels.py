"""Rows of an additive mask whose numbers are all far from 0, as where padding is masked with finfo.min or -1e9.

A logsumexp near -1e9 has no digits left for the logarithm of a number of keys: tiles of such a row cannot be merged,
and their probabilities cannot be had back from it. So the row's largest bias, its *level*, is taken off all of its
biases, which changes no softmax. It is exact: numbers no further apart than they are from 0 have a difference that
their format holds, and what is further below the level has no weight.

On one device a level beyond all digits of the logits also *drowns* them: adding them changes nothing, and the row
attends by its biases alone (finfo.min everywhere: the mean of the values). Kernels are given a query of 0 for it.

Shapes: B batch, H query heads, L local queries, D head dim, E value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cp_styles.kernels.base import Kernel
from cp_styles.mask import Mask

# Levels nearer to 0 than this stay: what is that far below has no weight (e^-128), so the differences are exact.
_LEAST = 128.0
# Levels with a gap of at least half of this to the next number drown logits up to a quarter of it.
_ORDINARY = 32.0
# Biases that are looked at together.
_BIASES = 2**22


@dataclass(frozen=True)
class RowLevels:
    """What is taken off the biases of each query.

    Attributes:
        level: ``[B, H, L]``, with 1 where it broadcasts; 0 for most rows.
        drowned: bool ``[B, H, L, 1]``, likewise: rows that attend by their biases alone; None if there are none.
    """

    level: torch.Tensor
    drowned: torch.Tensor | None

    @classmethod
    def of(
        cls,
        mask: Mask,
        q_positions_L: torch.Tensor,
        keys: int,
        heads: tuple[int, int] | None,
        dtype: torch.dtype,
        *,
        drowns: bool,
    ) -> RowLevels | None:
        """Of queries that see ``mask``, whose biases every rank has for all of the ``keys``; None where no row has a
        level. ``dtype`` is that of the logits, ``drowns`` says whether rows can be drowned. No communication; the host
        waits for the mask's device."""
        kv_positions = torch.arange(keys, device=q_positions_L.device)

        def biases(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            bias = of_heads(mask.bias(rows, columns), heads)
            assert bias is not None  # or it would not be an additive mask
            return bias.masked_fill(~mask.allowed(rows, columns).to(bias.device), float("-inf"))

        one_row = keys * biases(q_positions_L[:1], kv_positions[:1]).numel()
        best = [biases(rows, kv_positions).amax(-1) for rows in q_positions_L.split(max(1, _BIASES // one_row))]
        level = torch.cat(best, -1).to(q_positions_L.device)
        level = level.to(torch.promote_types(level.dtype, dtype))[(None,) * (3 - level.ndim)]
        level = level.masked_fill(~level.isfinite() | (level.abs() < _LEAST), 0.0)
        drowned = level.abs() * torch.finfo(dtype).eps >= _ORDINARY
        drowned &= drowns
        some, some_drowned = torch.stack([level.any(), drowned.any()]).tolist()
        return cls(level, drowned.unsqueeze(-1) if some_drowned else None) if some else None

    def off(self, bias: torch.Tensor, heads: tuple[int, int], rows: tuple[int, int]) -> torch.Tensor:
        """The biases of some of the heads and rows, by their levels."""
        level = self.level[:, :, rows[0] : rows[1]]
        level = level if level.shape[1] == 1 else level[:, heads[0] : heads[1]]
        return bias - level.unsqueeze(-1)

    def quiet(self, q_BHLD: torch.Tensor) -> torch.Tensor:
        """The queries without those that are drowned."""
        return q_BHLD if self.drowned is None else q_BHLD.masked_fill(self.drowned, 0.0)

    def split(self, q_BHLD: torch.Tensor) -> torch.Tensor:
        """The queries for :class:`BesideDrowned`."""
        assert self.drowned is not None
        return torch.cat((self.quiet(q_BHLD), q_BHLD.masked_fill(~self.drowned, 0.0)), -1)


def of_heads(bias: torch.Tensor | None, heads: tuple[int, int] | None) -> torch.Tensor | None:
    """The biases of some of the query heads, where heads have biases of their own."""
    if bias is None or heads is None or bias.ndim < 3 or bias.shape[-3] == 1:
        return bias
    return bias.narrow(-3, heads[0], heads[1] - heads[0])


@dataclass(frozen=True)
class BesideDrowned(Kernel):
    """``inner`` for a backward whose queries are twice as wide: those that are not drowned, and beside them the others.

    Keys have 0 beside the others, so these take no part in the logits; but what they give to the gradient of the keys,
    which is made of d logits and queries, comes out there.
    """

    inner: Kernel

    @property
    def positional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.positional

    @property
    def small_tiles(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.small_tiles

    def forward(self, q_BHLD, k_BGMD, v_BGME, **options):
        return self.inner.forward(q_BHLD, k_BGMD, v_BGME, **options)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, **options):
        dim = k_BGMD.shape[-1]
        # Before what is there: LseGradient adds its columns after it.
        grad, v, out = (F.pad(x, (dim, 0)) for x in (grad_BHLE, v_BGME, out_BHLE))
        dq, dk, dv = self.inner.backward(grad, q_BHLD, F.pad(k_BGMD, (0, dim)), v, out, lse_BHL, **options)
        return dq, dk[..., :dim] + dk[..., dim:], dv[..., dim:]

    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        self.inner.check(q_BHLD, k_BGMD, v_BGME, biased=biased)

    def tile_dtype(self, dtype):
        return self.inner.tile_dtype(dtype)
