"""Notes on losses and gradients over a group, for the functions that take losses and sums after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_styles._lib.bounded_cache import facts_about
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import world_group


def note_loss(group: dist.ProcessGroup, token_count: torch.Tensor | float | None = None) -> None:
    """Count a loss over ``group``; without ``token_count`` what a user may compute a loss from, as a gather."""
    state_of(group).get_or_create(Losses).number += 1
    notes: StepNotes | None = state_of(world_group()).objects.get(StepNotes)
    if notes is not None:
        count = None if token_count is None else float(token_count)
        notes.losses.append((dist.get_process_group_ranks(group), count))


class StepNotes:
    """Notes for :func:`cp_styles.verify.verify` on this rank's part of the step with all ranks."""

    def __init__(self) -> None:
        self.labels: list[int] = []  # of each batch that is cut, how many of this rank's tokens have a label
        self.losses: list[tuple[list[int], float | None]] = []  # the ranks and the token_count of each note_loss()


@dataclass(eq=False)
class Losses:
    """The losses over a group."""

    number: int = 0  # includes token counts and gathers, from which a user may compute a loss
    checked: set[str] = field(default_factory=set)  # functions whose check a host has read from a device
    # By the proof of a model: names of parameters that were found equal on the ranks.
    equal: WeakKeyDictionary[Any, set[str]] = field(default_factory=WeakKeyDictionary)


class ReplicatedGathers:
    """The backwards, since the last step, of gathers over a group whose gradient is not reduced.

    Attributes:
        compared: the next :func:`sum_gradients` compares gradients.
        in_front: the ids of the leaves before these gathers.
        summed: gradients were summed, so the next backward begins a step.
    """

    # All ranks compute the same after such a gather: a gradient that is equal on all ranks is whole, and a sum would be
    # P times too large. Parameters before the gather are left out: for simple losses, such as a sum, the ranks' shares
    # may be equal.

    def __init__(self) -> None:
        self.compared, self.in_front, self.summed = False, set[int](), True
        self._steps = self._backwards = 0

    def note(self, leaves: Callable[[], Iterable[torch.Tensor] | None]) -> None:
        """Note one backward. ``leaves`` returns the leaves before the gather, or None if they are not known."""
        if self.summed:
            self._steps += 1
            self._backwards = 0
            self.compared, self.summed = not self._steps & (self._steps - 1), False
            self.in_front.clear()
        self._backwards += 1
        if self.compared:
            # A limit, because some programs never call sum_gradients.
            found = leaves() if self._backwards < _MOST_BACKWARDS else None
            self.compared = found is not None
            self.in_front.update(map(id, found or ()))


_MOST_BACKWARDS = 256


class Summed(NamedTuple):
    ranks: tuple[int, ...]  # the ranks over which a gradient was summed
    by: str  # the function that summed it, for messages


def summed_over(parameter: torch.Tensor) -> tuple[Summed, ...]:
    """The valid notes on the gradient of ``parameter``."""
    # A note is valid until the gradient changes. If a backward has added to the gradient, it stays valid.
    if parameter.grad is None:
        return ()
    version, notes = facts_about(parameter.grad).get(Summed, (None, ()))
    return notes if version in (None, parameter.grad._version) else ()


def note_summed(parameter: torch.Tensor, *notes: Summed) -> None:
    """Replace the notes on the gradient of ``parameter``."""
    assert parameter.grad is not None
    facts_about(parameter.grad)[Summed] = parameter.grad._version, notes
