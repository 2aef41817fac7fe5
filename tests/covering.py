"""Few rows of a product of parameters that hold every pair of their values; the other rows are run at night."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations, product
from typing import Any

import pytest


def plain(value: Any) -> str:
    """The id of a parameter, the same in every process: pytest-xdist compares them."""
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", str(value))


def covering(strength: int, rows: Sequence[tuple[Any, ...]]) -> list[int]:
    """Indices of few of the rows, in which all ``strength`` values of as many columns meet that meet in any row.

    The same ones every time: one after the other the first row with most that is new.
    """
    numbers = [{id(value): index for index, value in enumerate(column)} for column in zip(*rows, strict=True)]
    held = [
        set(combinations([(column, numbers[column][id(value)]) for column, value in enumerate(row)], strength))
        for row in rows
    ]
    left, chosen = set().union(*held), []
    # A row adds less with each row that is chosen. So the first of the heap is the best of all, if it still
    # adds as much as when it was counted.
    heap = [(-len(each), index) for index, each in enumerate(held)]
    heapq.heapify(heap)
    while left:
        counted, index = heap[0]
        adds = len(held[index] & left)
        if adds < -counted:
            heapq.heapreplace(heap, (-adds, index))
            continue
        heapq.heappop(heap)
        chosen.append(index)
        left -= held[index]
    return sorted(chosen)


class Sampled(Sequence[Any]):
    """Rows of a product, which are made when pytest collects the test: those of the night only if they are run."""

    night = True  # whether tests of the night are run: conftest.py

    def __init__(self, strength: int, where: Callable[..., bool], axes: dict[str, Sequence[Any]]) -> None:
        self._strength, self._where, self._axes = strength, where, axes

    @cached_property
    def all(self) -> list[Any]:
        """All rows; those of the night are marked."""
        axes = self._axes
        rows = [row for row in product(*axes.values()) if self._where(**dict(zip(axes, row, strict=True)))]
        by_day = {*covering(self._strength, rows)}
        marks = [() if index in by_day else (pytest.mark.nightly,) for index in range(len(rows))]
        return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]

    @cached_property
    def _now(self) -> list[Any]:
        return [row for row in self.all if self.night or not row.marks]

    def __getitem__(self, index: Any) -> Any:
        return self._now[index]

    def __len__(self) -> int:
        return len(self._now)


def at_night(*values: Any) -> list[Any]:
    """Values of a parameter that are run at night, beside others that are run by default."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def rows_at_night(*rows: tuple[Any, ...]) -> list[Any]:
    """Rows of several parameters that are run at night."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def in_parts(number: int, by_day: int = 1) -> pytest.MarkDecorator:
    """Parametrizes a test with ``part``: it takes every ``number``-th row of a product of its own. The first parts are
    run by default, and further parts at night."""
    return pytest.mark.parametrize("part", [*range(by_day), *at_night(*range(by_day, number))])


def sampled(
    strength: int, where: Callable[..., bool] = lambda **_: True, **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrizes a test with the product of the axes, of which a covering part is run by default.

    Args:
        strength: 2 for every pair of values of two axes, 1 for every value.
        where: the rows of the product that there are, by their values.
    """
    return pytest.mark.parametrize(tuple(axes), Sampled(strength, where, axes), ids=plain)
