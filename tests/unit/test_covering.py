"""Of the products that tests sample, every pair is run by default, and the rest at night."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering, sampled


def meetings(rows, strength: int) -> set:
    return {each for row in rows for each in combinations(enumerate(row), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 7), (2, 30), (3, 168)])
def test_few_rows_hold_every_meeting(strength: int, most: int):
    rows = list(product("abc", range(4), (True, False), range(7)))
    chosen = [rows[index] for index in covering(strength, rows)]
    assert meetings(chosen, strength) == meetings(rows, strength)
    assert len(chosen) <= most


def test_rows_that_are_not_there_are_not_asked_for():
    mark = sampled(2, lambda x, y, z: x or y, x=[0, 1], y=[0, 1, 2], z=["a", "b"])
    rows = {parameters.values: bool(parameters.marks) for parameters in mark.args[1].all}
    assert rows.keys() == {(x, y, z) for x, y, z in product((0, 1), (0, 1, 2), "ab") if x or y}
    today = [row for row, at_night in rows.items() if not at_night]
    assert meetings(today, 2) == meetings(rows, 2)
    assert len(today) < len(rows)
