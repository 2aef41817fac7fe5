"""Few rows of a product of parameters that hold every pair of their values; the other rows are run at night."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.ranks.attention_case import plain


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
    while left:
        chosen.append(max(range(len(rows)), key=lambda index: len(held[index] & left)))
        left -= held[chosen[-1]]
    return sorted(chosen)


def at_night(*values: Any) -> list[Any]:
    """Values of a parameter that are run at night, beside others that are run by default."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


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
    rows = [row for row in product(*axes.values()) if where(**dict(zip(axes, row, strict=True)))]
    chosen = covering(strength, rows)
    night = [() if index in chosen else (pytest.mark.nightly,) for index in range(len(rows))]
    return pytest.mark.parametrize(
        tuple(axes), [pytest.param(*row, marks=marks) for row, marks in zip(rows, night, strict=True)], ids=plain
    )
