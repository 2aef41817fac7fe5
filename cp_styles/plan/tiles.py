"""A band cut into tiles, so that few kernel calls are needed.

A run is a range of query rows with linear bounds. If both bounds are constant, the run is a rectangle. If the upper
bound grows by one with each row, it is a rectangle and a causal triangle. Everything else is cut into small blocks with
an explicit mask.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Query rows of a block with an explicit mask. Small, so that few masked pairs are computed; but large enough that a
# kernel call is not mostly overhead.
_BLOCK = 128
# Runs of fewer rows than this join their neighbours into one block with an explicit mask.
_SHORT = 32


class Cover(enum.Enum):
    """Which keys of a tile its queries attend to."""

    FULL = "full"
    CAUSAL = "causal"  # square; row i sees keys 0 .. i
    PARTIAL = "partial"  # an explicit mask


class Tile(NamedTuple):
    """One kernel call: local query rows x rows of what came from one source."""

    q: tuple[int, int]
    kv: tuple[int, int]
    cover: Cover


class Runs(NamedTuple):
    """Query rows ``start .. stop - 1``, ascending; row ``start + i`` of a run sees the keys ``[a + i da, b + i db)``.

    There is at least one key in each row. ``end`` is ``b`` of the last row. All fields have an entry for each run.
    """

    start: list[int]
    stop: list[int]
    a: list[int]
    end: list[int]
    da: list[int]
    db: list[int]


def tiles_of(runs: Runs, sizes: Iterable[int], *, biased: bool, small_tiles: bool) -> Iterator[tuple[Tile, ...]]:
    """For each source, tiles that cover each attended pair once.

    Args:
        runs: the runs of all sources.
        sizes: the number of runs of each source.
        biased: all tiles have an explicit mask.
        small_tiles: see :func:`~cp_styles.plan.make_plan`.
    """
    long = [run for run, (start, stop) in enumerate(zip(runs.start, runs.stop, strict=True)) if stop - start >= _SHORT]
    last = 0
    for size in sizes:
        first, last = last, last + size
        tiles: list[Tile] = []
        for begin, end in _groups(runs, long, first, last):
            if small_tiles and not biased and _few_more_keys(runs, begin, end):
                for run in range(begin, end):
                    tiles += _rows_apart(runs, run) if _climbs(runs, run) else _of_one(runs, run)
            elif biased or end - begin > 1:
                tiles += _explicit(runs, begin, end)
            else:
                tiles += _of_one(runs, begin)
        yield tuple(tiles)


def _groups(runs: Runs, long: list[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Runs ``first .. last - 1`` in groups: short runs are grouped with their neighbours, long ones are alone.

    Yields the first run of each group, and one past its last.
    """
    for end in (*long[bisect_left(long, first) : bisect_left(long, last)], last):
        while first < end:
            begin, first = first, bisect_right(runs.stop, runs.start[first] + _BLOCK, first + 1, end)
            yield begin, first
        if end < last:
            yield end, end + 1
            first = end + 1


def _of_one(runs: Runs, run: int) -> list[Tile]:
    start, stop, a, end, da, db = [column[run] for column in runs]
    if stop - start == 1 or not (da or db):
        return [Tile((start, stop), (a, end), Cover.FULL)]
    if da:
        return _explicit(runs, run, run + 1)
    # The upper bound grows by one with each row: a rectangle, then a causal triangle that ends with the last key.
    below = end - (stop - start)
    triangle = Tile((start, stop), (below, end), Cover.CAUSAL)
    return [Tile((start, stop), (a, below), Cover.FULL), triangle] if below > a else [triangle]


def _climbs(runs: Runs, run: int) -> bool:
    """Whether a short run sees other keys in each row, as it does from document to document of one row."""
    return runs.da[run] > 0 and runs.stop[run] - runs.start[run] < _SHORT


def _few_more_keys(runs: Runs, first: int, last: int) -> bool:
    """Whether tiles without a mask have few more keys than one tile for all the runs: at most twice as many.

    Documents share none; stripes and windows share most, and each tile comes with a copy of its keys.
    """
    keys = sum(
        sum(stop - start for start, stop in _keys_by_row(runs, run))
        if _climbs(runs, run)
        else runs.end[run] - runs.a[run]
        for run in range(first, last)
    )
    return keys <= 2 * (max(runs.end[first:last]) - min(runs.a[first:last]))


def _keys_by_row(runs: Runs, run: int) -> list[tuple[int, int]]:
    start, stop, a, end, da, db = [column[run] for column in runs]
    return [(a + da * (row - start), end - db * (stop - 1 - row)) for row in range(start, stop)]


def _rows_apart(runs: Runs, run: int) -> list[Tile]:
    keys = _keys_by_row(runs, run)
    return [Tile((row, row + 1), found, Cover.FULL) for row, found in enumerate(keys, runs.start[run])]


def _explicit(runs: Runs, first: int, last: int) -> list[Tile]:
    """Blocks of rows with an explicit mask over the union of what their rows attend to."""
    if last - first > 1:
        keys = min(runs.a[first:last]), max(runs.end[first:last])
        return [Tile((runs.start[first], runs.stop[last - 1]), keys, Cover.PARTIAL)]
    start, stop, a, end, da, db = [column[first] for column in runs]
    blocks = [(row, min(row + _BLOCK, stop)) for row in range(start, stop, _BLOCK)]
    return [Tile(rows, (a + da * (rows[0] - start), end - db * (stop - rows[1])), Cover.PARTIAL) for rows in blocks]
