"""Tiles of many lengths as one pack of documents, as varlen kernels take them, and back.

Shapes: a tile is [B, H, L, D], and B of them may be 1 or more; the pack is [T, H, D], T rows: tile after tile, in each
batch row after batch row. N documents, one for each batch row of each tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Packing:
    """Where the rows of tiles are in a pack.

    Attributes:
        sizes: (batch, rows) of each tile.
    """

    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tiles: Sequence[torch.Tensor]) -> Packing:
        """Of tiles ``[B, H, L, D]``."""
        return cls(tuple((tile.shape[0], tile.shape[2]) for tile in tiles))

    @property
    def longest(self) -> int:
        """Rows of the longest document."""
        return max(rows for _, rows in self.sizes)

    def bounds(self, device: torch.device) -> torch.Tensor:
        """Where documents start and end: int32 ``[N + 1]``, ``[0, n0, n0 + n1, ...]``."""
        lengths = (rows for batch, rows in self.sizes for _ in range(batch))
        bounds = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
        # A copy that blocks would wait for all that the device has still to do, at every layer.
        return bounds.to(device, non_blocking=True)

    def join(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """``[B, H, L, D]`` each to ``[T, H, D]``, contiguous: one copy."""
        return torch.cat([row.transpose(0, 1) for tile in tiles for row in tile]).contiguous()

    def join_lse(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """``[B, H, L]`` each to ``[H, T]``, contiguous: one copy."""
        return torch.cat([row for tile in tiles for row in tile], 1).contiguous()

    def split(self, pack_THD: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[B, H, L, D]``, that are [B, L, H, D] in memory."""
        pieces = pack_THD.split([batch * rows for batch, rows in self.sizes])
        return [piece.unflatten(0, size).transpose(1, 2) for piece, size in zip(pieces, self.sizes, strict=True)]

    def split_lse(self, lse_HT: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[B, H, L]``."""
        pieces = lse_HT.split([batch * rows for batch, rows in self.sizes], 1)
        return [piece.unflatten(1, size).transpose(0, 1) for piece, size in zip(pieces, self.sizes, strict=True)]
