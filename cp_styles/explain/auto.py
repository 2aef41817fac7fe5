"""Strategies and layouts in the order of their predicted time, and a strategy that takes the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.explain.candidates import layouts_for, problem_of, replace_device, strategies_for
from cp_styles.explain.hardware import H100, Hardware
from cp_styles.explain.rehearse import Shapes, kernel_of
from cp_styles.explain.report import Explanation, explained
from cp_styles.layout import SequenceLayout, layout_made_by
from cp_styles.mask import Mask
from cp_styles.strategies import Attention, Strategy


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
    all_choices: list[Choice] = []
    for name, balancer in layouts.items():
        layout = layout_made_by(balancer, length, ranks)
        all_choices += choices(strategies, name, (layout, layout), mask, shapes, hardware, memory=memory, most=most)
    return sorted(all_choices, key=lambda choice: (bool(choice.problem), choice.seconds))


def choices(
    strategies: Sequence[Strategy],
    layout_name: str,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    shapes: Shapes,
    hardware: Hardware,
    *,
    memory: bool,
    most: int,
) -> list[Choice]:
    """The strategies for one attention, in their order. ``memory`` and ``most`` are those of ``explained``."""
    kernel, result = kernel_of(shapes, None), []
    for strategy in strategies:
        explanation, problem = None, problem_of(strategy, layouts[0].ranks, shapes)
        if not problem:
            explanation = explained(
                strategy, layouts, mask, kernel, shapes, hardware=hardware, memory=memory, most=most
            )
            held = explanation.peak_memory + layouts[0].lengths[0] * (2 * shapes.query_row + shapes.kv_row)
            if held > hardware.memory:
                has = f"{hardware.name} has {hardware.memory / 2**30:.0f}"
                problem = f"needs {held / 2**30:.1f} GiB for one attention, {has}: take more ranks, or keep=0"
        result.append(Choice(strategy, layout_name, explanation, problem))
    return result


@dataclass(frozen=True)
class Auto(Strategy):
    """Runs the strategy that is predicted to be the fastest for the layout, the mask and the shapes of a call.

    Every rank makes the same choice, because it depends on nothing that differs between ranks. It is made once for each
    layout, mask and shape, and takes about as long as rehearsing one rank for each candidate. :meth:`choice` explains
    it. With :meth:`layout` the layout is chosen too.

    All ranks must have equal ``hardware``: ``Hardware.measure(group)`` gives them the same figures. If one rank has
    other figures, every rank raises.

    Communication and memory: those of the chosen strategy.

    Attributes:
        hardware: the machine for which times are predicted.
        candidates: strategies to choose from. None: rings with and without kept keys, all-gather, and Ulysses over all
            ranks and over 2, 4 and 8.
        lean: whether the chosen strategy keeps no received keys.

    Raises:
        TypeError: ``hardware`` is not a Hardware, or ``candidates`` are not strategies.
    """

    hardware: Hardware = H100
    candidates: tuple[Strategy, ...] | None = None
    lean: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.hardware, Hardware):
            raise TypeError(f"Auto hardware must be a Hardware object such as H100, got {self.hardware!r}")
        if self.candidates is not None and (
            not self.candidates or not all(isinstance(x, Strategy) and not isinstance(x, Auto) for x in self.candidates)
        ):
            raise TypeError(f"Auto candidates must be a tuple of strategies such as Ring(), got {self.candidates!r}")

    def keeping_nothing(self):
        return replace(self, lean=True)

    def choice(self, layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask, shapes: Shapes) -> Explanation:
        """The explanation of the strategy that is chosen for a call, for one rank: the busiest of some.

        Args:
            layouts: the layouts of queries and of keys.
            mask: which keys each query attends to.
            shapes: the shapes of the tensors.

        Raises:
            ValueError: no candidate can run.
        """
        shapes = replace_device(shapes, self.hardware)
        strategy = _choice(self.hardware, self.candidates, *layouts, mask.pattern, shapes)
        options = {"hardware": self.hardware, "memory": False, "most": 1}
        return explained(strategy, layouts, mask.pattern, kernel_of(shapes, None), shapes, **options)

    def layout(self, length: int, ranks: int, *, mask: Mask, shapes: Shapes) -> SequenceLayout:
        """The layout with which the fastest strategy is fastest, for example for a SequenceScope. No communication.

        Args:
            length: number of positions.
            ranks: number of ranks.
            mask: which keys each query attends to.
            shapes: the shapes of the tensors.

        Raises:
            ValueError: no candidate can run on this number of ranks.
        """
        strategies = self.candidates or strategies_for(ranks, self.hardware)
        options = {"length": length, "ranks": ranks, "mask": mask, "shapes": shapes, "hardware": self.hardware}
        best = ranked(strategies, layouts_for(mask), memory=False, most=1, **options)[0].explanation
        if best is None:
            raise ValueError(f"none of {strategies} can run on {ranks} ranks")
        return best.layout

    def residual_specs(self, attention, q_BHLD, k_BGMD, v_BGME):
        return self._chosen(attention, q_BHLD, k_BGMD, v_BGME).residual_specs(attention, q_BHLD, k_BGMD, v_BGME)

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        chosen = self._chosen(attention, q_BHLD, k_BGMD, v_BGME)
        return chosen.forward(attention, q_BHLD, k_BGMD, v_BGME, sink_H, residual)

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        chosen = self._chosen(attention, q_BHLD, k_BGMD, v_BGME)
        return chosen.backward(attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H)

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        return self._chosen(attention, q_BHLD, k_BGMD, v_BGME).logsumexp(attention, q_BHLD, k_BGMD, v_BGME, residual)

    def _chosen(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Strategy:
        # Not what differs between forward and backward, such as a kernel that is wrapped.
        shapes = Shapes(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device, q.shape[0])
        call = attention.q_layout, attention.kv_layout, attention.mask.pattern, replace_device(shapes, self.hardware)
        chosen = _choice(self.hardware, self.candidates, *call)
        return chosen.keeping_nothing() if self.lean else chosen


@remembered
def _choice(
    hardware: Hardware,
    candidates: tuple[Strategy, ...] | None,
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    shapes: Shapes,
) -> Strategy:
    strategies = candidates or strategies_for(q_layout.ranks, hardware)
    rows = choices(strategies, "", (q_layout, kv_layout), mask, shapes, hardware, memory=False, most=1)
    best = min(rows, key=lambda choice: (bool(choice.problem), choice.seconds))
    if best.explanation is None:
        raise ValueError(f"Auto: none of its candidates can run: { ({x.strategy: x.problem for x in rows}) }")
    return best.strategy
