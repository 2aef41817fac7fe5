"""verify notices every wrong program of tests/wrong_programs.py, and calls no right program wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from cp_styles.testing import RankTimeout
from tests.covering import at_night
from tests.wrong_programs import DOORS, PROGRAMS, Program, main, proved, runs


def judged(program: Program, door: str) -> None:
    error = proved(program, DOORS[door])
    assert not isinstance(error, RankTimeout), error
    assert (error is None) == program.right, error


def rows(some: Iterable[tuple[Program, str]], others: Iterable[tuple[Program, str]] = ()) -> pytest.MarkDecorator:
    """Parametrize a test with ``some``, and at night with ``others``."""
    values: list[Any] = [pytest.param(*each, id=f"{each[0]} ({each[1]})") for each in some]
    night = [pytest.param(*each, id=f"{each[0]} ({each[1]})", marks=at_night(0)[0].marks) for each in others]
    return pytest.mark.parametrize(("program", "door"), [*values, *night])


@rows(runs(dtypes=["float64"]))
def test_a_program(program: Program, door: str):
    judged(program, door)


@rows(runs(doors=["style"], dtypes=["bfloat16"]), runs(doors=["block"], dtypes=["bfloat16"]))
def test_a_program_in_bfloat16(program: Program, door: str):
    """Blocks are for the night: the dtype matters to verify, and not to the door."""
    judged(program, door)


def test_the_table():
    """Each row has a name of its own, and says what happened at 8693cb7. Each door has right and wrong programs."""
    names = Counter(map(str, PROGRAMS))
    assert max(names.values()) == 1
    assert {each.flow for each in PROGRAMS if each.right} == {"right", "refused"}
    assert {each.flow for each in PROGRAMS if not each.right} == {"silent", "refused"}
    assert {(door, each.right) for each, door in runs(dtypes=["float64"])} == {
        (door, right) for door in DOORS for right in (False, True)
    }


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--kind", "around split", "--dtype", "float64"]) == 0
    titles, *lines = [line.split() for line in capsys.readouterr().out.strip().splitlines()]
    assert titles[:3] == ["kind", "wrong", "flow"]
    assert [line[-8:] for line in lines] == [["2", "0", "2/2", "2/2", "2", "0", "0/2", "0/2"]] * 2
