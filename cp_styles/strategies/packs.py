"""Packs: tiles that a kernel computes in one call, and whose results are merged in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from cp_styles._lib.device_copies import tensor_on
from cp_styles.kernels import packing
from cp_styles.layouts.ranges import join_ranges
from cp_styles.plan.plan import RowRanges
from cp_styles.plan.tiles import Cover, Tile

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedTiles:
    """Tiles of one cover and window, without common rows of queries.

    Attributes:
        q, kv: the ranges from the first row to the last row, of queries and of keys.
        rows: the rows of queries and of keys, tile by tile, in as few ranges as possible.
        lengths: the number of queries of each tile, and the number of keys of each tile.
    """

    q: tuple[int, int]
    kv: tuple[int, int]
    cover: Cover
    window: tuple[int, int] | None
    rows: tuple[RowRanges, RowRanges]
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    band = None  # no tile of a pack has an explicit mask

    @classmethod
    def of(cls, tiles: Sequence[Tile]) -> PackedTiles:
        sides = [tile.q for tile in tiles], [tile.kv for tile in tiles]
        hulls = ((min(side)[0], max(stop for _, stop in side)) for side in sides)
        lengths = (tuple([stop - start for start, stop in side]) for side in sides)
        return cls(*hulls, *tiles[0][2:4], tuple(tuple(join_ranges(side)) for side in sides), tuple(lengths))  # pyright: ignore

    def on(self, batch: int, device: torch.device) -> tuple[packing.Pack, torch.Tensor | None, torch.Tensor | None]:
        """The pack on a device, and the indices of its rows of queries and of keys."""
        q_index, kv_index = (row_index(rows, device) for rows in self.rows)
        return packing.Pack.of(self.lengths, batch, device), q_index, kv_index


Call: TypeAlias = Tile | PackedTiles
"""The work of a kernel in one call."""


def make_calls(tiles: Sequence[Tile], shapes: tuple[Shape, Shape, Shape], *, small_tiles: bool) -> tuple[Call, ...]:
    """The kernel calls for the ``tiles`` of one source, in order. Tiles with keys for each query come last.

    ``shapes`` are the shapes of the local query, key and value [B, H, S, D]. ``small_tiles``: the kernel takes packs.
    """
    masked = [tile for tile in tiles if tile.cover in (Cover.PARTIAL, Cover.SELECTED)]
    unmasked = [tile for tile in tiles if tile.cover not in (Cover.PARTIAL, Cover.SELECTED)]
    if not small_tiles:
        return (*unmasked, *masked)
    batch, heads = shapes[0][:2]
    packs: list[list[Tile]] = []
    newest: dict[object, tuple[list[Tile], int]] = {}  # the latest pack of each cover and window, with its bytes
    for tile in unmasked:
        rows, keys = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
        if batch * rows > packing.LONG_TILE and batch * heads * rows > packing.FEW_ROWS:
            packs.append([tile])
            continue
        kind, nbytes = (tile.cover, tile.window), packing.bytes_of_tile(*shapes, rows, keys)
        pack, total = newest.get(kind, ([], 0))
        if not pack or pack[-1].q[1] > tile.q[0] or total + nbytes > packing.MOST_BYTES:
            pack, total = [], 0
            packs.append(pack)
        pack.append(tile)
        newest[kind] = pack, total + nbytes
    return (*(pack[0] if len(pack) == 1 else PackedTiles.of(pack) for pack in packs), *masked)


def row_index(ranges: RowRanges, device: torch.device) -> torch.Tensor | None:
    """The rows of several ``ranges`` as int64. None for a single range."""
    return tensor_on(device, [row for rows in ranges for row in range(*rows)]) if len(ranges) > 1 else None
