"""A phase of a rehearsal as steps: what is sent and computed from one start of messages to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cp_styles.comm.rehearsal import Transfer
from cp_styles.explain.rehearse import KernelCall, Phase


class Step(NamedTuple):
    """What a rank does from one start of messages to the next.

    Attributes:
        sent, received: bytes by peer, of the messages that start with this step.
        calls: kernel calls.
        pairs: (query, key) pairs that are computed, of all heads.
    """

    sent: Counter[int]
    received: Counter[int]
    calls: int
    pairs: int


def steps_of(phase: Phase) -> list[Step]:
    """The steps of a forward or backward, in order."""
    steps, computed = [Step(Counter(), Counter(), 0, 0)], False
    for event in phase.events:
        if isinstance(event, Transfer):
            if computed:
                steps.append(Step(Counter(), Counter(), 0, 0))
                computed = False
            (steps[-1].sent if event.outgoing else steps[-1].received)[event.peer] += event.nbytes
        elif isinstance(event, KernelCall):
            last = steps[-1]
            steps[-1], computed = last._replace(calls=last.calls + 1, pairs=last.pairs + event.pairs), True
    return steps


def sequences(values: Sequence[int]) -> str:
    """Numbers as a short text: 0-3 5."""
    found: list[list[int]] = []
    for value in sorted(values):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    return " ".join(shown[:6]) + (" ..." if len(shown) > 6 else "")
