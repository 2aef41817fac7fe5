"""Cuts a band into tiles for few kernel calls.

A run is a range of query rows with linear bounds. If both bounds are constant, the run is a rectangle. If a bound grows
by one with each row, the run is a band, which is one tile for kernels with windows. For other kernels, a band with a
growing upper bound only is a rectangle and a causal triangle. All other bands are cut into small blocks with an
explicit mask.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch

from cp_styles.masks.linear_pieces import Pieces

# Query rows of a block with an explicit mask. Few rows, so that few masked pairs are computed, but enough rows that a
# kernel call is not mostly overhead.
_BLOCK = 128
# Runs with fewer rows join their neighbours in one block with an explicit mask.
_SHORT = 32


class Cover(enum.Enum):
    """Which keys of a tile its queries attend to."""

    FULL = "full"
    CAUSAL = "causal"  # square; row i attends to keys 0 .. i
    BAND = "band"  # see Tile.window
    PARTIAL = "partial"  # an explicit mask
    SELECTED = "selected"  # keys of its own for each query


class Tile(NamedTuple):
    """One kernel call: local query rows x rows of the keys from one source.

    ``window`` of a band: the numbers of keys before and after its own key that each query attends to; -1 for all. The
    own key of the last query is the last key, and the own key moves by one with each query. ``band`` is the number of
    the band of the mask whose pairs the tile has. None: all pairs of the mask.
    """

    q: tuple[int, int]
    kv: tuple[int, int]
    cover: Cover
    window: tuple[int, int] | None = None
    band: int | None = None

    @property
    def pairs(self) -> int:
        """The number of pairs of queries and keys. Pairs that an explicit mask hides count too."""
        queries, keys = self.q[1] - self.q[0], self.kv[1] - self.kv[0]
        edges = int(self.cover is Cover.CAUSAL) if self.window is None else sum(size >= 0 for size in self.window)
        return queries * keys - edges * (queries * (queries - 1) // 2)


class Run(NamedTuple):
    """Query rows ``start .. stop - 1``; row ``start + i`` attends to the keys ``[lo + i lo_step, hi + i hi_step)``.

    Each row has at least one key. ``end`` is ``hi`` of the last row.
    """

    start: int
    stop: int
    lo: int
    end: int
    lo_step: int
    hi_step: int

    def keys(self, first: int, stop: int) -> tuple[int, int]:
        """The range of keys to which any of the rows ``first .. stop - 1`` attends."""
        return self.lo + self.lo_step * (first - self.start), self.end - self.hi_step * (self.stop - stop)


def make_tiles(runs: Pieces, ranks: int, *, biased: bool, small_tiles: bool, windows: bool) -> list[tuple[Tile, ...]]:
    """For each source, tiles that cover each attended pair once.

    Args:
        runs: runs of query rows and of sent rows, ascending in (source, row).
        ranks: the number of sources.
        biased: all tiles have an explicit mask.
        small_tiles, windows: see :func:`~cp_styles.plan.make_plan`.
    """
    # Lists by column, because there may be as many runs as documents or stripes, and most are joined to blocks.
    columns = runs.start, runs.start + runs.count, runs.lo, runs.end, runs.lo_step, runs.hi_step
    columns = torch.stack(columns).tolist()
    starts, stops, los, ends, *_ = columns
    long = torch.nonzero(runs.count >= _SHORT).flatten().tolist()
    result, last = [], 0
    for size in runs.rank.bincount(minlength=ranks).tolist():
        first, last = last, last + size
        tiles: list[Tile] = []
        for begin, end in _groups(starts, stops, long, first, last):
            keys = min(los[begin:end]), max(ends[begin:end])
            if small_tiles and not biased:
                rows = zip(*(x[begin:end] for x in columns), strict=True)
                separate = [tile for row in rows for tile in _split_run(Run(*row), windows)]
                # Documents share no keys. Stripes and windows share most keys, and each tile would copy its keys.
                if sum(tile.kv[1] - tile.kv[0] for tile in separate) <= 2 * (keys[1] - keys[0]):
                    tiles += separate
                    continue
            if end - begin > 1:
                tiles.append(Tile((starts[begin], stops[end - 1]), keys, Cover.PARTIAL))
            else:
                run = Run(*(column[begin] for column in columns))
                tiles += _mask_run(run) if biased else _tile_run(run, windows)
        result.append(tuple(tiles))
    return result


def _groups(starts: list[int], stops: list[int], long: list[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Group the runs ``first .. last - 1``: short runs with their neighbours, long runs alone.

    Yields the first run of each group, and one past its last.
    """
    for end in (*long[bisect_left(long, first) : bisect_left(long, last)], last):
        while first < end:
            begin, first = first, bisect_right(stops, starts[first] + _BLOCK, first + 1, end)
            yield begin, first
        if end < last:
            yield end, end + 1
            first = end + 1


def _tile_run(run: Run, windows: bool) -> list[Tile]:
    start, stop, lo, end, lo_step, hi_step = run
    if stop - start == 1 or not (lo_step or hi_step):
        return [Tile((start, stop), (lo, end), Cover.FULL)]
    below = end - (stop - start)
    if windows and (lo_step or below > lo):
        window = below - lo if lo_step else -1, 0 if hi_step else -1
        return [Tile((start, stop), (lo, end), Cover.BAND, window)]
    if lo_step:
        return _mask_run(run)
    # The upper bound grows by one with each row: a rectangle, then a causal triangle that ends with the last key.
    triangle = Tile((start, stop), (below, end), Cover.CAUSAL)
    return [Tile((start, stop), (lo, below), Cover.FULL), triangle] if below > lo else [triangle]


def _split_run(run: Run, windows: bool) -> list[Tile]:
    """Tiles of a run without a mask. Without windows, a short run with other keys in each row is cut into rows."""
    if windows or not run.lo_step or run.stop - run.start >= _SHORT:
        return _tile_run(run, windows)
    return [Tile((row, row + 1), run.keys(row, row + 1), Cover.FULL) for row in range(run.start, run.stop)]


def _mask_run(run: Run) -> list[Tile]:
    """Blocks of rows with an explicit mask over the keys to which any of their rows attends."""
    blocks = [(row, min(row + _BLOCK, run.stop)) for row in range(run.start, run.stop, _BLOCK)]
    return [Tile(rows, run.keys(*rows), Cover.PARTIAL) for rows in blocks]
