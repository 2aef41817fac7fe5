"""Which errors of a rank its peers know: comm/turn.py."""

from __future__ import annotations

import pytest

from cp_styles.comm.turn import Turn


def of_a_meeting(turn: Turn) -> ValueError:
    """An error that all ranks raise."""
    turn.begin()
    error = ValueError("all ranks raise it")
    turn.note_known(error)
    return error


def test_an_error_of_a_meeting_is_known_and_so_is_what_wraps_it():
    turn, error = Turn(), RuntimeError("the program's")
    assert turn.must_tell(error)
    error.__cause__ = of_a_meeting(turn)
    assert not turn.must_tell(error)
    assert Turn().must_tell(error)  # the peers in another group do not know


def test_a_step_that_begins_where_an_error_is_handled():
    turn = Turn()
    try:
        raise of_a_meeting(turn)
    except ValueError:
        turn.begin()
        with pytest.raises(RuntimeError) as caught:
            raise RuntimeError("of the next step") from None
    assert turn.must_tell(caught.value)


def test_errors_that_refer_to_each_other():
    turn, first, second = Turn(), ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    assert turn.must_tell(first)
    turn.note_known(second)
    assert not turn.must_tell(first)
