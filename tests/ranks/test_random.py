"""A part of the random cases of tests/cases.py, tests/mixers.py and tests/programs.py: the same ones every time."""

from __future__ import annotations

import pytest

from tests import cases, mixers, programs
from tests.seeds import shown

AT_ONCE = 10


def rows(count: int, whole: int) -> list:
    """The first seeds of each test: ``count`` cases by default, and ``whole`` at night."""
    by_day = range(0, count, AT_ONCE)
    return [*by_day, *(pytest.param(first, marks=pytest.mark.nightly) for first in range(count, whole, AT_ONCE))]


@pytest.mark.parametrize("first", rows(100, 2000))
def test_attentions(first: int):
    """By day cases in which a rank differs, or with a second call: the grid has the remaining cases."""
    for seed in range(first, first + AT_ONCE):
        case = cases.draw(seed)
        if seed < 100 and case.odd is None and case.then is None:
            continue
        if case.compiled != "no" or (case.odd is not None and case.odd[1] == "compiled"):
            continue  # compiled attentions take a hundred times as long; they have tests of their own
        verdict = cases.judge(case)
        assert verdict.good, f"{verdict.kind}: {verdict.words}: {shown(case)}"


@pytest.mark.parametrize("first", rows(30, 1000))
def test_mixers(first: int):
    for seed in range(first, first + AT_ONCE):
        case = mixers.draw(seed)
        verdict = mixers.judge(case)
        assert verdict.good, f"{verdict.kind}: {verdict.words}: {shown(case)}"


@pytest.mark.parametrize("first", rows(10, 200))
def test_programs(first: int):
    for seed in range(first, first + AT_ONCE):
        program = programs.draw(seed)
        assert not (problem := programs.judge(program)), f"{problem}: {shown(program)}"
