"""Which ranks a parameter's gradient is the sum of already, so that nobody sums it twice."""

from __future__ import annotations

from typing import NamedTuple

import torch

_SUMMED = "_cp_styles_summed"


class Summed(NamedTuple):
    """``ranks`` that a gradient is the sum of, and what has made it so, for messages."""

    ranks: tuple[int, ...]
    by: str


def summed_over(parameter: torch.Tensor) -> tuple[Summed, ...]:
    """What is noted on the gradient. A note is valid until the gradient changes."""
    version, notes = getattr(parameter.grad, _SUMMED, (None, ()))
    return notes if parameter.grad is not None and version == parameter.grad._version else ()


def note_summed(parameter: torch.Tensor, *notes: Summed) -> None:
    """Note it on the gradient, in place of other notes."""
    assert parameter.grad is not None
    setattr(parameter.grad, _SUMMED, (parameter.grad._version, notes))
