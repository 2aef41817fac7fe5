"""Strategies and layouts in the order of their predicted time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cp_styles.explain.candidates import problem_of, replace_device
from cp_styles.explain.hardware import Hardware
from cp_styles.explain.rehearse import Shapes, kernel_of
from cp_styles.explain.report import Explanation, explained
from cp_styles.layout import SequenceLayout, layout_made_by
from cp_styles.mask import Mask
from cp_styles.strategies import Strategy


class Choice(NamedTuple):
    """A strategy and a layout that can be chosen. ``problem`` says why it cannot, and what to do; empty if it can."""

    strategy: Strategy
    layout_name: str
    explanation: Explanation | None
    problem: str = ""

    @property
    def seconds(self) -> float:
        if self.explanation is None:
            return float("inf")
        return sum(entry.total for entry in self.explanation.seconds)


def ranked(
    strategies: Sequence[Strategy],
    layouts: dict[str, Callable[[int, int], SequenceLayout]],
    *,
    length: int,
    ranks: int,
    mask: Mask,
    shapes: Shapes,
    hardware: Hardware,
    memory: bool = True,
    most: int = 4,
) -> list[Choice]:
    """All combinations, the fastest first, those that cannot be taken last. No communication."""
    shapes = replace_device(shapes, hardware)
    kernel = kernel_of(shapes, None)
    found: list[Choice] = []
    for name, balancer in layouts.items():
        layout = layout_made_by(balancer, length, ranks)
        for strategy in strategies:
            problem = problem_of(strategy, ranks, shapes)
            if problem:
                found.append(Choice(strategy, name, None, problem))
                continue
            cuts = layout, layout
            made = explained(strategy, cuts, mask, kernel, shapes, hardware=hardware, memory=memory, most=most)
            held = made.peak_memory + layout.lengths[0] * (2 * shapes.query_row + shapes.kv_row)
            too_much = ""
            if held > hardware.memory:
                has = f"{hardware.name} has {hardware.memory / 2**30:.0f}"
                too_much = f"needs {held / 2**30:.1f} GiB for one attention, {has}: take more ranks, or keep=0"
            found.append(Choice(strategy, name, made, too_much))
    return sorted(found, key=lambda choice: (bool(choice.problem), choice.seconds))
