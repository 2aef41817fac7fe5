"""verify notices every wrong program of tests/wrong_programs.py, and calls no right program wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from cp_styles.testing import RankTimeout
from tests import wrong_programs
from tests.wrong_programs import DOORS, DTYPES, Program, main, proved, runs


def first_of_kinds() -> Collection[tuple[str, str, str]]:
    """The first wrong program of every kind, and the first right one of every second kind with one: at the doors in
    turn, every third in bfloat16."""
    doors: dict[str, list[str]] = {}
    for program, door in runs(dtypes=["float64"]):
        doors.setdefault(str(program), []).append(door)
    first: dict[tuple[str, bool], str] = {}
    for program in wrong_programs.PROGRAMS:
        if str(program) not in LONG:
            first.setdefault((program.kind, program.right), str(program))
    right = [name for (_, is_right), name in first.items() if is_right][::2]
    names = [name for (_, is_right), name in first.items() if not is_right or name in right]
    turns = [(name, doors[name], "float64" if index % 3 else "bfloat16") for index, name in enumerate(names)]
    return {(name, of_name[index % len(of_name)], dtype) for index, (name, of_name, dtype) in enumerate(turns)}


LONG = ("higher-order operators: scan",)
CHOSEN = first_of_kinds()


def rows(dtype: str) -> pytest.MarkDecorator:
    """Parametrize a test with all programs and doors. Those that are not chosen run at night."""
    values: list[Any] = []
    for program, door in runs(dtypes=[dtype]):
        marks = [] if (str(program), door, dtype) in CHOSEN else [pytest.mark.nightly]
        values.append(pytest.param(program, door, id=f"{program} ({door})", marks=marks))
    return pytest.mark.parametrize(("program", "door"), values)


def judged(program: Program, door: str) -> None:
    error = proved(program, DOORS[door])
    assert not isinstance(error, RankTimeout), error
    assert (error is None) == program.right, error


@rows("float64")
def test_a_program(program: Program, door: str):
    judged(program, door)


@rows("bfloat16")
def test_a_program_in_bfloat16(program: Program, door: str):
    judged(program, door)


def test_the_table():
    """Each row has a name of its own. Each door has right and wrong programs."""
    names = Counter(map(str, wrong_programs.PROGRAMS))
    assert max(names.values()) == 1
    everything = [(door, dtype, right) for door in DOORS for dtype in DTYPES.values() for right in (False, True)]
    assert {(door, each.dtype, each.right) for each, door in runs()} == set(everything)


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--kind", "around split", "--dtype", "float64", "--door", "style"]) == 0
    titles, *lines = [line.split() for line in capsys.readouterr().out.strip().splitlines()]
    assert titles == ["kind", "wrong", "style", "float64", "right", "style", "float64"]
    assert [line[-4:] for line in lines] == [["2", "2/2", "2", "0/2"]] * 2
