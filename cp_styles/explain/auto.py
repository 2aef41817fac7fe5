"""Strategies and layouts in the order of their predicted time, and a strategy that takes the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.explain.candidates import documents_of, layouts_for, problem_of, strategies_for
from cp_styles.explain.hardware import H100, Hardware
from cp_styles.explain.rehearse import Shapes, kernel_of
from cp_styles.explain.report import Explanation, explained
from cp_styles.explain.states import MixerShapes, StateShapes
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


# Of one rank, the busiest of some, and without its memory: times alone.
_ROUGHLY: dict[str, Any] = {"memory": False, "most": 1}


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
    progress: Callable[[str], None] = lambda name: None,
) -> list[Choice]:
    """All combinations, the fastest first, those that cannot be taken last. No communication.

    ``progress`` is called before each strategy and layout, with their names.
    """
    shapes = shapes._replace(device=torch.device(hardware.device))
    all_choices: list[Choice] = []
    for name, balancer in layouts.items():
        layout = layout_made_by(balancer, length, ranks)
        for strategy in strategies:
            progress(f"{strategy}, {name}")
            call = [strategy], name, (layout, layout), mask, shapes, hardware
            all_choices += choices(*call, memory=memory, most=most)
    return sorted(all_choices, key=_by_time)


def _by_time(choice: Choice) -> tuple[bool, float]:
    return bool(choice.problem), choice.seconds


def choices(
    strategies: Sequence[Strategy],
    layout_name: str,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    shapes: Shapes,
    hardware: Hardware,
    **options: Any,
) -> list[Choice]:
    """The strategies for one attention, in their order. ``options`` are those of ``explained``."""
    kernel, result = kernel_of(shapes, None), []
    for strategy in strategies:
        explanation, problem = None, problem_of(strategy, layouts[0].ranks, shapes)
        if not problem:
            explanation = explained(strategy, layouts, mask, kernel, shapes, hardware=hardware, **options)
            memory = explanation.peak_memory + layouts[0].lengths[0] * (2 * shapes.query_row + shapes.kv_row)
            if memory > hardware.memory:
                has = f"{hardware.name} has {hardware.memory / 2**30:.0f}"
                problem = f"needs {memory / 2**30:.1f} GiB for one attention, {has}: take more ranks, or keep=0"
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
        shapes = shapes._replace(device=torch.device(self.hardware.device))
        strategy = _choice(self.hardware, self.candidates, *layouts, mask.pattern, shapes)
        kernel = kernel_of(shapes, None)
        return explained(strategy, layouts, mask.pattern, kernel, shapes, hardware=self.hardware, **_ROUGHLY)

    def layout(
        self,
        length: int,
        ranks: int,
        *,
        mask: Mask,
        shapes: Shapes,
        states: MixerShapes | None = None,
        layers: tuple[int, int] = (1, 1),
    ) -> SequenceLayout:
        """The layout with which the fastest strategy is fastest, for example for a SequenceScope. No communication.

        Args:
            length: number of positions.
            ranks: number of ranks.
            mask: which keys each query attends to.
            shapes: the shapes of the tensors.
            states: the shapes of the recurrences, or other mixers, beside the attentions, if the model has them.
            layers: numbers of attentions and of recurrences.

        Raises:
            ValueError: no candidate can run on this number of ranks.
        """
        strategies = self.candidates or strategies_for(ranks, self.hardware)
        options = {"length": length, "ranks": ranks, "mask": mask, "shapes": shapes, "hardware": self.hardware}
        rows = ranked(strategies, layouts_for(mask), **_ROUGHLY, **options)
        able = [row.explanation for row in rows if row.explanation is not None]
        if not able:
            raise ValueError(f"none of {strategies} can run on {ranks} ranks")
        if states is None:
            return able[0].layout
        documents = documents_of(mask)

        def total(explanation: Explanation) -> float:
            recurring = states.seconds(explanation.layout, documents, self.hardware)
            return layers[0] * sum(phase.total for phase in explanation.seconds) + layers[1] * recurring

        return min(able, key=total).layout

    def residual_places(self, attention, q_BHLD, k_BGMD, v_BGME):
        return self._chosen(attention, q_BHLD, k_BGMD, v_BGME).residual_places(attention, q_BHLD, k_BGMD, v_BGME)

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
        device = torch.device(self.hardware.device)
        shapes = Shapes(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, device, q.shape[0])
        layouts = attention.q_layout, attention.kv_layout
        chosen = _choice(self.hardware, self.candidates, *layouts, attention.mask.pattern, shapes)
        return chosen.keeping_nothing() if self.lean else chosen


@remembered(16)
def _choice(
    hardware: Hardware,
    candidates: tuple[Strategy, ...] | None,
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    shapes: Shapes,
) -> Strategy:
    strategies = candidates or strategies_for(q_layout.ranks, hardware)
    rows = choices(strategies, "", (q_layout, kv_layout), mask, shapes, hardware, **_ROUGHLY)
    best = min(rows, key=_by_time)
    if best.explanation is None:
        raise ValueError(f"Auto: none of its candidates can run: { ({x.strategy: x.problem for x in rows}) }")
    return best.explanation.strategy


class HybridChoice(NamedTuple):
    """Layouts of a model's attentions and of its recurrences; equal names are one layout, which never changes.

    Attributes:
        attention_layout, state_layout: names of the layouts.
        strategy: the fastest for the attentions.
        attention, states, changes: predicted seconds of all attentions, of all recurrences, and of the all-to-alls
            that change the layout of the hidden states between them, forward and backward.
        sent: bytes that the busiest rank sends for all of it.
    """

    attention_layout: str
    state_layout: str
    strategy: Strategy
    attention: float
    states: float
    changes: float
    sent: int

    @property
    def total(self) -> float:
        """Seconds of all of it."""
        return self.attention + self.states + self.changes


def explain_hybrid(
    length: int,
    *,
    ranks: int,
    mask: Mask,
    shapes: Shapes,
    states: StateShapes,
    layers: tuple[int, int],
    width: int,
    hardware: Hardware,
) -> list[HybridChoice]:
    """Layouts for a model with recurrences beside attention, the fastest first: one for all layers, or two.

    Attention is balanced by its work, recurrences by their tokens, and they send a state for each part of a document. A
    change of layout would send the hidden states of tokens that move by one all-to-all, before and after each
    attention, with contiguous parts for the recurrences.

    Args:
        length: number of positions.
        ranks: number of ranks that share them.
        mask: which keys each query attends to. Its documents are those of the recurrences too.
        shapes: the shapes of an attention.
        states: the shapes of a recurrence.
        layers: numbers of attentions and of recurrences.
        width: of the hidden states.
        hardware: the machine for which times are predicted.

    Raises:
        ValueError: no strategy can run on this number of ranks.

    Example::

        choices = explain_hybrid(
            2**17, ranks=8, mask=Causal(), shapes=Shapes(16, 2, 256, 256, torch.bfloat16, torch.device("cuda")),
            states=StateShapes(32, 128, 128), layers=(12, 36), width=2048, hardware=H100,
        )
        print(choices[0])
    """
    documents, balancers, (attentions, recurrences) = documents_of(mask), layouts_for(mask), layers
    layouts = {name: layout_made_by(balancer, length, ranks) for name, balancer in balancers.items()}
    options = {"length": length, "ranks": ranks, "mask": mask, "shapes": shapes, "hardware": hardware}
    fastest: dict[str, Choice] = {}
    for choice in ranked(strategies_for(ranks, hardware), balancers, **_ROUGHLY, **options):
        if not choice.problem:
            fastest.setdefault(choice.layout_name, choice)
    if not fastest:
        raise ValueError(f"explain_hybrid: no strategy can run on {ranks} ranks")
    _, bandwidth, latency = hardware.link(0, ranks - 1)
    row, choices = states.batch * width * shapes.dtype.itemsize, []
    for name, choice in fastest.items():
        assert choice.explanation is not None
        sent = sum(choice.explanation.sent(phase) for phase in ("forward", "backward"))
        for other in dict.fromkeys((name, "contiguous")):  # contiguous parts send the fewest states
            layout = layouts[other]
            moves = 4 * attentions  # to the attention's layout and back, forward and backward
            held = ([set(x.positions(rank).tolist()) for rank in range(ranks)] for x in (layouts[name], layout))
            moved = moves * row * max(len(before - after) for before, after in zip(*held, strict=True))
            changes = moved / bandwidth + moves * (latency + 2 * hardware.op_floor) if moved else 0.0
            recurring = recurrences * states.seconds(layout, documents, hardware)
            total = attentions * sent + 2 * recurrences * max(states.sent(layout, documents)) + moved
            times = attentions * choice.seconds, recurring, changes
            choices.append(HybridChoice(name, other, choice.strategy, *times, total))
    return sorted(choices, key=lambda choice: choice.total)
