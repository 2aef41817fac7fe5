"""Whether a training run fits: the plans of a model over all GPUs, with their memory and their predicted time.

A plan is a number of ranks that share a sequence (cp), a strategy and a layout; the remaining GPUs are data-parallel
groups (dp), and FSDP2 shards parameters over all. Memory is a step without data (:mod:`cp_styles.explain.model_step`)
with the dry run of its attention; the time of attention is predicted in :mod:`cp_styles.explain.report`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from cp_styles.explain.candidates import find_problem, suggest_strategies
from cp_styles.explain.dry_run import kernel_of
from cp_styles.explain.hardware import Hardware
from cp_styles.explain.model_step import AttentionBytes, Step, StepModel
from cp_styles.explain.report import Explanation, busiest_rank, explained
from cp_styles.explain.step_trace import StepOptions
from cp_styles.layouts import Balancer, contiguous, head_tail
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.strategies import Ring, Strategy

RESERVE = 0.05
"""The part of a GPU's memory that CUDA, NCCL and gaps of the allocator take. Assumed."""
_LAYOUTS: dict[str, Balancer] = {"head_tail": head_tail, "contiguous": contiguous}
_UNIT = 1024  # tokens of a rank, in which the longest sequence is counted
_LEAST = 4096  # tokens of a rank, from which memory is linear in them


class Optimizer(NamedTuple):
    """The class in ``torch.optim``, and the float32 numbers that it keeps for each parameter."""

    name: str
    moments: int


ADAMW, SGD = Optimizer("AdamW", 2), Optimizer("SGD", 0)


class StepSeconds(NamedTuple):
    """Predicted time of a step: attention, other matrix products, all other operations, and messages of FSDP2 beyond
    these."""

    attention: float
    products: float
    others: float
    messages: float


@dataclass(frozen=True)
class Plan:
    """A way to train a model on all GPUs.

    Attributes:
        cp, dp: ranks that share a sequence, and groups of them.
        strategy, layout_name: of the attention.
        options: the fastest form of a step that fits; if none fits, the form with the least memory.
        length, rows: positions of a sequence, and of the busiest rank.
        nbytes: the most bytes of this rank.
        longest: the longest sequence that fits with checkpoints and, where the model can, a loss from chunks. It is a
            multiple of 1,024 tokens of a rank, and 0 if it is less than 4,096.
        seconds: predicted time of a step, in which each group trains on its batch.
        fits: whether ``length`` fits.
    """

    cp: int
    dp: int
    strategy: Strategy
    layout_name: str
    options: StepOptions
    length: int
    rows: int
    nbytes: int
    longest: int
    seconds: StepSeconds
    fits: bool

    @property
    def speed(self) -> float:
        """Positions of all groups in a second."""
        return self.dp * self.length / sum(self.seconds)


class Fit:
    """The plans of a model on ``model.gpus`` GPUs. No communication, no device.

    Args:
        model: the model without data.
        hardware: the machine. Its ``memory`` is one GPU's.
        optimizer: what the optimizer keeps.
        progress: called with the name of the next plan.

    Attributes:
        held: the bytes that a GPU holds between steps, without gradients.
        moments: the bytes that the optimizer keeps for each parameter.
        room: the bytes of a GPU that a run can take.
        product_rate: operations of matrix products in a second, as explain has them for latents.
        sent: the bytes that a GPU sends for FSDP2 in a step: parameters for the forward and the backward, gradients.
        bandwidth: the bytes a second of these messages.
    """

    def __init__(
        self,
        model: StepModel,
        hardware: Hardware,
        optimizer: Optimizer = ADAMW,
        progress: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.model, self.hardware, self.optimizer, self._progress = model, hardware, optimizer, progress
        self.moments = 4 * optimizer.moments
        sizes = {"parameters": model.master, f"moments of {optimizer.name}": self.moments}
        self.held = {name: size * model.shard_numel for name, size in sizes.items() if size}
        self.room = int(hardware.memory * (1 - RESERVE))
        self.product_rate = hardware.flops * hardware.cudnn_rate
        self.sent = model.shard_numel * (model.gpus - 1) * (2 * model.dtype.itemsize + model.master)
        self.bandwidth = hardware.bandwidth if model.gpus <= hardware.node_ranks else hardware.far_bandwidth

    def plans(self, length: int, strategies: Sequence[Strategy] = ()) -> list[Plan]:
        """The plans for sequences of ``length``: each divisor of the GPUs with each strategy that can run. Plans that
        fit come first, by tokens a second, and then the plans with the longest sequences.

        Raises:
            NotImplementedError: the memory of the model is not predicted.
        """
        if not self.model.find_kinds():
            raise NotImplementedError(f"{type(self.model.model).__name__} calls no attention: there is nothing to plan")
        plans = list[Plan]()
        for cp in (size for size in range(1, self.model.gpus + 1) if self.model.gpus % size == 0):
            for strategy in [Ring()] if cp == 1 else strategies or suggest_strategies(cp, self.hardware):
                if not any(find_problem(strategy, cp, kind.shapes) for kind in self.model.kinds):
                    self._progress(f"cp {cp}, {strategy}")
                    plans.append(self._plan(length, cp, strategy))
        return sorted(plans, key=lambda plan: (-plan.fits, -plan.speed if plan.fits else -plan.longest, plan.nbytes))

    def parts(self, plan: Plan) -> dict[str, int]:
        """The bytes at the peak of a step by what they are, without parameters and optimizer."""
        reports = self._reports(plan.length, plan.cp, plan.strategy, plan.layout_name)
        return self.model.parts(plan.options, plan.rows, list(map(_bytes_of, reports)))

    def step(self, plan: Plan) -> Step:
        """The step of a plan."""
        return self.model.step(plan.options, plan.rows)

    def _plan(self, length: int, cp: int, strategy: Strategy) -> Plan:
        found = {name: self._reports(length, cp, strategy, name) for name in _LAYOUTS}
        forms = self._forms(strategy)
        if self._nbytes(forms[-1], found["head_tail"]) > self.room:
            forms = forms[-1:]  # no other form has less
        times = {name: self._seconds(forms[-1], reports).attention for name, reports in found.items()}
        name = next(name for name in _LAYOUTS if times[name] <= 1.01 * min(times.values()))
        costs = [(self._nbytes(form, found[name]), self._seconds(form, found[name]), form) for form in forms]
        fitting = [cost for cost in costs if cost[0] <= self.room]
        nbytes, seconds, form = min(fitting, key=lambda cost: sum(cost[1])) if fitting else min(costs)
        where, rows = (cp, self.model.gpus // cp, strategy, name, form), _rows_of(found[name])
        longest = self.longest(cp, strategy, name, length)
        return Plan(*where, length, rows, nbytes, longest, seconds, bool(fitting))

    def _forms(self, strategy: Strategy) -> list[StepOptions]:
        """The forms of a step; the last has the least memory."""
        chunked = (False, True) if self.model.can_chunk else (False,)
        return [StepOptions(*form, strategy.reads_inputs) for form in product((False, True), chunked)]

    def _reports(self, length: int, cp: int, strategy: Strategy, layout_name: str) -> list[Explanation]:
        layout, reports = layout_made_by(_LAYOUTS[layout_name], length, cp), []
        for mask, shapes, has_sink in self.model.kinds:
            rank, call = busiest_rank((layout, layout), mask), (mask, kernel_of(shapes), shapes)
            options = {"hardware": self.hardware, "rank": rank, "has_sink": has_sink}
            reports.append(explained(strategy.on(cp), (layout, layout), *call, **options))
        return reports

    def _nbytes(self, form: StepOptions, reports: Sequence[Explanation]) -> int:
        rows = _rows_of(reports)
        peak, _ = self.model.step(form, rows).peak(rows * self.model.batch, list(map(_bytes_of, reports)))
        return peak + sum(self.held.values())

    def longest(self, cp: int, strategy: Strategy, layout_name: str = "head_tail", near: int = 2**17) -> int:
        """The longest sequence that fits: see :class:`Plan`. The search begins at ``near``."""
        form = self._forms(strategy)[-1]

        def measure(units: int) -> int:
            return self._nbytes(form, self._reports(units * _UNIT * cp, cp, strategy, layout_name))

        # Memory is nearly a straight line: look where the line of the last two lengths says, within the bounds.
        least, fits, beyond = _LEAST // _UNIT, _LEAST // _UNIT - 1, 0
        units, last = max(least, near // (_UNIT * cp)), (0, sum(self.held.values()))
        for attempt in range(100):
            nbytes = measure(units)
            fits, beyond = (units, beyond) if nbytes <= self.room else (fits, units)
            if beyond and beyond - fits <= 1:
                break
            slope = max(1.0, (nbytes - last[1]) / (units - last[0]))
            last = units, nbytes
            guess = units + int((self.room - nbytes) / slope)
            if attempt > 10:  # the line misleads
                guess = (fits + beyond) // 2 if beyond else 2 * fits
            units = max(fits + 1, min(guess, beyond - 1) if beyond else guess)
        return fits * _UNIT * cp if fits >= least else 0

    def _seconds(self, form: StepOptions, reports: Sequence[Explanation]) -> StepSeconds:
        machine, rows = self.hardware, _rows_of(reports)
        step, tokens = self.model.step(form, rows), rows * self.model.batch
        attention = 0.0
        for (forwards, backwards), report in zip(step.calls, reports, strict=True):
            attention += forwards * report.seconds[0].total + backwards * report.seconds[1].total
        products, others = step.flops * tokens / self.product_rate, step.copied * tokens / machine.copy_bandwidth
        messages = self.sent / self.bandwidth - attention - products - others
        return StepSeconds(attention, products, others, max(0.0, messages))


def _rows_of(reports: Sequence[Explanation]) -> int:
    """The positions of the simulated rank."""
    return max(report.layout.lengths[rank] for report in reports for rank in report.runs)


def _bytes_of(report: Explanation) -> AttentionBytes:
    ((rank, run),) = report.runs.items()
    out = report.layout.lengths[rank] * report.shapes.row_bytes(report.shapes.heads, report.shapes.value_dim)
    kept = sum(run.forward.live_at_end.values()) - out
    return AttentionBytes(kept, run.forward.peak, run.backward.peak - kept - out)
