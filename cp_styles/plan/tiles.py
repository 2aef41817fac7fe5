"""A band cut into tiles, so that few kernel calls are needed.

A run is a range of query rows with linear bounds. If both bounds are constant, the run is a rectangle. If the upper
bound grows by one with each row, it is a rectangle and a causal triangle. Everything else is cut into small blocks with
an explicit mask.
"""

from __future__ import annotations

import enum
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


class Run(NamedTuple):
    """Query rows ``start .. stop - 1``; row ``start + i`` sees the keys ``[a + i da, b + i db)``, at least one."""

    start: int
    stop: int
    a: int
    b: int
    da: int
    db: int

    @property
    def end(self) -> int:
        """One past the last key of the last row."""
        return self.b + self.db * (self.stop - self.start - 1)

    def within(self, start: int, stop: int) -> Run:
        """The part of this run in a range of rows."""
        skipped = max(start - self.start, 0)
        first, a, b = self.start + skipped, self.a + self.da * skipped, self.b + self.db * skipped
        return self._replace(start=first, stop=min(stop, self.stop), a=a, b=b)


def tiles_of(runs: Iterable[Run], *, biased: bool, small_tiles: bool) -> Iterator[Tile]:
    """Tiles that cover each attended pair of the runs once. With ``biased``, all have an explicit mask."""
    for group in _groups(runs):
        for together in _apart(group) if small_tiles and not biased else (group,):
            start, stop, a, b, da, db = run = together[0]
            if biased or len(together) > 1 or (da and stop - start > 1):
                yield from _explicit(together)
            elif not db or stop - start == 1:
                yield Tile((start, stop), (a, b), Cover.FULL)
            else:  # b grows by one with each row: a rectangle, then a causal triangle that ends with the last key
                if b - 1 > a:
                    yield Tile((start, stop), (a, b - 1), Cover.FULL)
                yield Tile((start, stop), (b - 1, run.end), Cover.CAUSAL)


def _groups(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Groups of runs: short runs are grouped with their neighbours."""
    group: list[Run] = []
    for run in runs:
        short = run.stop - run.start < _SHORT
        if group and not (short and run.stop - group[0].start <= _BLOCK):
            yield group
            group = []
        group.append(run)
        if not short:
            yield group
            group = []
    if group:
        yield group


def _apart(group: list[Run]) -> list[list[Run]]:
    """The group cut into tiles without a mask, where they have few more keys than one tile for all: at most twice.

    Documents share none; stripes and windows share most, and each tile comes with a copy of its keys.
    """
    runs: list[Run] = []
    for run in group:
        climbs = run.da and run.stop - run.start < _SHORT  # as it does from document to document of one row
        runs += [run.within(row, row + 1) for row in range(run.start, run.stop)] if climbs else [run]
    keys = sum(run.end - run.a for run in runs)
    return (
        [[run] for run in runs] if keys <= 2 * (max(run.end for run in runs) - min(run.a for run in runs)) else [group]
    )


def _explicit(group: list[Run]) -> Iterator[Tile]:
    """Blocks of rows with an explicit mask over the union of what their rows attend to."""
    start, stop = group[0].start, group[-1].stop
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        found = group
        if (first, last) != (start, stop):
            found = [run.within(first, last) for run in group if run.start < last and run.stop > first]
        if found:
            yield Tile((first, last), (min([run.a for run in found]), max([run.end for run in found])), Cover.PARTIAL)
