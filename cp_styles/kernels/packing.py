"""Tiles of different lengths joined into one pack of documents for varlen kernels, and split again.

Shapes: a tile is [B, H, L, D], with any B. The pack is [T, H, D], with T rows: tile after tile, and in each tile batch
row after batch row. N documents: one for each batch row of each tile. A tile alone is not packed: it is [B, L, H, D],
a view, and has no bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cp_styles.device_copies import tensor_on


@dataclass(frozen=True)
class Packing:
    """Where the rows of tiles are in a pack.

    Attributes:
        sizes: (batch, rows) of each tile.
    """

    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tiles: Sequence[torch.Tensor]) -> Packing:
        """The packing of tiles ``[B, H, L, D]``."""
        return cls(tuple((tile.shape[0], tile.shape[2]) for tile in tiles))

    @property
    def longest(self) -> int:
        """Rows of the longest document."""
        return max(rows for _, rows in self.sizes)

    def bounds(self, device: torch.device) -> torch.Tensor | None:
        """Cumulative lengths of the documents: int32 ``[N + 1]``, ``[0, n0, n0 + n1, ...]``."""
        if len(self.sizes) == 1:
            return None
        lengths = (rows for batch, rows in self.sizes for _ in range(batch))
        return tensor_on(device, list(accumulate(lengths, initial=0)), torch.int32)

    def join(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tiles ``[B, H, L, D]`` joined to ``[T, H, D]``, contiguous: one copy."""
        if len(tiles) == 1:
            return tiles[0].transpose(1, 2)
        return torch.cat([row.transpose(0, 1) for tile in tiles for row in tile]).contiguous()

    def join_lse(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tiles ``[B, H, L]`` joined to ``[H, T]``, contiguous: one copy."""
        if len(tiles) == 1:
            return tiles[0].contiguous()
        return torch.cat([row for tile in tiles for row in tile], 1).contiguous()

    def split(self, pack_THD: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[B, H, L, D]`` of the pack; [B, L, H, D] in memory."""
        if len(self.sizes) == 1:
            return [pack_THD.transpose(1, 2)]
        pieces = pack_THD.split([batch * rows for batch, rows in self.sizes])
        return [piece.unflatten(0, size).transpose(1, 2) for piece, size in zip(pieces, self.sizes, strict=True)]

    def split_lse(self, lse_HT: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[B, H, L]`` of the pack."""
        if len(self.sizes) == 1:
            return [lse_HT]
        pieces = lse_HT.split([batch * rows for batch, rows in self.sizes], 1)
        return [piece.unflatten(1, size).transpose(0, 1) for piece, size in zip(pieces, self.sizes, strict=True)]
