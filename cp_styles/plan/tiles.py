"""A band cut into tiles: runs of query rows whose keys stay or climb, as few kernel calls.

Where the bounds of a run stay, what it attends to is a rectangle; where the upper one climbs by one a row, it is a
rectangle and a causal triangle; everything else is cut into small blocks with an explicit mask.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Query rows of a block with an explicit mask. Small enough that what the block computes in vain stays small, large
# enough that a kernel call is not mostly overhead.
_BLOCK = 128
# Runs of fewer rows than this join their neighbours into one block with an explicit mask.
_SHORT = 32


class Cover(enum.Enum):
    """How a tile's queries see its keys."""

    FULL = "full"
    CAUSAL = "causal"  # square; row i sees keys 0 .. i
    PARTIAL = "partial"  # an explicit mask


@dataclass(frozen=True)
class Tile:
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
        """One past the last row's last key."""
        return self.b + self.db * (self.stop - self.start - 1)

    def within(self, start: int, stop: int) -> Run:
        """Those of its rows that are in a range."""
        skipped = max(start - self.start, 0)
        first, a, b = self.start + skipped, self.a + self.da * skipped, self.b + self.db * skipped
        return self._replace(start=first, stop=min(stop, self.stop), a=a, b=b)


class Stretch(NamedTuple):
    """``steps`` moves from a row to the next, all alike: by ``da`` and ``db``, or in another way where these are -1.

    The first row is ``row``, and sees the keys ``[a, b)``.
    """

    steps: int
    row: int
    a: int
    b: int
    da: int
    db: int


def runs_of(stretches: Iterable[Stretch]) -> Iterator[Run]:
    """Runs as long as possible, the first rows first. The last stretch is one in another way, out of the last row."""
    free = True  # whether the row where a stretch begins is in no run yet
    for steps, row, a, b, da, db in stretches:
        if da < 0:
            if free:
                yield Run(row, row + 1, a, b, 0, 0)
            free = True
        elif free or steps > 1:
            skipped = 0 if free else 1
            yield Run(row + skipped, row + steps + 1, a + da * skipped, b + db * skipped, da, db)
            free = False
        else:  # a single row is left, which goes on as the next stretch does
            free = True


def tiles_of(runs: Iterable[Run], *, biased: bool, small_tiles: bool) -> Iterator[Tile]:
    """Tiles that cover what the runs see, each pair once; all have an explicit mask where ``biased``."""
    for group in _groups(runs):
        for together in _apart(group) if small_tiles and not biased else [group]:
            yield from _group_tiles(together, biased)


def _groups(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Runs, short ones with their neighbours."""
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


def _group_tiles(group: list[Run], biased: bool) -> Iterator[Tile]:
    """Tiles of one run, or of several short ones as one block."""
    run = group[0]
    rows = run.stop - run.start
    if biased or len(group) > 1 or (run.da and rows > 1):
        yield from _explicit(group)
    elif not run.db or rows == 1:
        yield Tile((run.start, run.stop), (run.a, run.end), Cover.FULL)
    else:  # b climbs by one a row: the causal triangle ends with the last key, a rectangle stands before it
        if run.b - 1 > run.a:
            yield Tile((run.start, run.stop), (run.a, run.b - 1), Cover.FULL)
        yield Tile((run.start, run.stop), (run.b - 1, run.end), Cover.CAUSAL)


def _explicit(group: list[Run]) -> Iterator[Tile]:
    """Blocks of rows with an explicit mask over the union of what their rows attend to."""
    for first in range(group[0].start, group[-1].stop, _BLOCK):
        last = min(first + _BLOCK, group[-1].stop)
        found = [run.within(first, last) for run in group if run.start < last and run.stop > first]
        if found:
            yield Tile((first, last), (min(run.a for run in found), max(run.end for run in found)), Cover.PARTIAL)
