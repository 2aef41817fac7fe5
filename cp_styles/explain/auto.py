"""A strategy that chooses among strategies by predicted time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cp_styles.cache import remembered
from cp_styles.explain.candidates import layouts_for, problem_of, replace_device, strategies_for
from cp_styles.explain.choices import ranked
from cp_styles.explain.hardware import H100, Hardware
from cp_styles.explain.rehearse import Shapes, kernel_of
from cp_styles.explain.report import Explanation, explained
from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask
from cp_styles.plan import make_plan
from cp_styles.strategies import Attention, Strategy


@dataclass(frozen=True)
class Auto(Strategy):
    """Runs the strategy that is predicted to be the fastest for the layout, the mask and the shapes of a call.

    Every rank makes the same choice, because it depends on nothing that differs between ranks. It is made once for each
    layout, mask and shape, and takes about as long as rehearsing one rank for each candidate: tens of milliseconds on 8
    ranks, seconds on hundreds. :meth:`choice` explains it. With :meth:`layout` the layout is chosen too.

    Ranks must have equal ``hardware``: ``Hardware.measure(group)`` gives all of them the same figures. Other figures on
    one rank are an error on all.

    Communication and memory: those of the chosen strategy.

    Attributes:
        hardware: the machine.
        candidates: strategies to choose from. None: rings with and without kept keys, all-gather, and Ulysses over all
            ranks and over 2, 4 and 8.
        lean: whether the chosen strategy keeps no received keys.
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

    def prepare(self, q_layout, kv_layout, mask, rank, *, small_tiles):
        make_plan(q_layout, kv_layout, mask, rank, small_tiles=small_tiles)

    def choice(self, layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask, shapes: Shapes) -> Explanation:
        """The explanation of the strategy that is chosen for a call, of one rank: the busiest of some."""
        return _choice(self.hardware, self.candidates, *layouts, mask.pattern, replace_device(shapes, self.hardware))

    def layout(self, length: int, ranks: int, *, mask: Mask, shapes: Shapes) -> SequenceLayout:
        """The layout with which the fastest strategy is faster than with any other layout: for a SequenceScope."""
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
        chosen = self.choice((attention.q_layout, attention.kv_layout), attention.mask, shapes).strategy
        return chosen.keeping_nothing() if self.lean else chosen


@remembered(lambda arguments, value: sum(x.nbytes for x in arguments[2:5]) + 2000)
def _choice(
    hardware: Hardware,
    candidates: tuple[Strategy, ...] | None,
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    shapes: Shapes,
) -> Explanation:
    ranks, kernel = q_layout.ranks, kernel_of(shapes, None)
    strategies = candidates or strategies_for(ranks, hardware)
    problems = {strategy: problem_of(strategy, ranks, shapes) for strategy in strategies}
    possible = [strategy for strategy, problem in problems.items() if not problem]
    if not possible:
        raise ValueError(f"Auto: none of its candidates can run: {problems}")
    cuts = q_layout, kv_layout
    found = [
        explained(strategy, cuts, mask, kernel, shapes, hardware=hardware, memory=False, most=1)
        for strategy in possible
    ]
    return min(found, key=lambda made: sum(entry.total for entry in made.seconds))
