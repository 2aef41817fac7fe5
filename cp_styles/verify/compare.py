"""Compares a step on ranks with the step on one process: each tensor of a rank with its part of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from cp_styles.layouts import SequenceLayout
from cp_styles.verify.record import ATTENTION, Call, Key, Recording

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks of a mesh, by rank. Communication: one all-gather of objects for each axis."""
_K = TypeVar("_K")


@dataclass(frozen=True)
class Squares:
    """Sums of squares: of a difference, and of the tensor that it is relative to. They are added over ranks."""

    difference: float
    norm: float

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.difference + other.difference, self.norm + other.norm)

    def error(self, floor: float = 0.0) -> float:
        """The norm of the difference, relative to the norm of the tensor, or to ``floor`` if that is larger."""
        if self.difference == 0:
            return 0.0
        norm = max(math.sqrt(self.norm), floor)
        ratio = math.sqrt(self.difference) / norm if norm else math.inf
        # Each comparison with NaN is false: an error of NaN would pass as no error.
        return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True)
class ExpectedPart:
    """A rank's part of a tensor of one process, ``expected``.

    Attributes:
        take: returns this part of any tensor of the whole shape.
        layout: the layout that shards it. None: the part is the whole tensor.
    """

    expected: torch.Tensor
    take: Callable[[torch.Tensor], torch.Tensor]
    layout: SequenceLayout | None


@dataclass(frozen=True)
class ExpectedRows(ExpectedPart):
    """A part along ``dim``, which holds the sequence alone. In other parts, the tokens are flattened with the batch."""

    layout: SequenceLayout
    dim: int


@dataclass(frozen=True)
class ShardLookup:
    """The positions that a rank holds, by the layouts of the attentions of a step: there may be several lengths."""

    layouts: Sequence[SequenceLayout]
    rank: int

    def parts(self, whole: torch.Tensor, shape: Sequence[int]) -> Iterator[ExpectedPart]:
        """The parts of ``whole`` with this ``shape``. Tokens may be flattened with dims around them."""
        if tuple(whole.shape) == tuple(shape):
            yield ExpectedPart(whole, lambda x: x, None)
            return
        dims = [dim for dim in range(whole.ndim) if whole.ndim == len(shape) and whole.shape[dim] != shape[dim]]
        if len(dims) != 1:
            return
        dim = dims[0]
        for layout in self.layouts:
            index = layout.positions(self.rank, whole.device)
            times, rest = divmod(whole.shape[dim], layout.length)
            if rest or shape[dim] != times * index.numel():
                continue
            if times == 1:
                take = partial(torch.index_select, dim=dim, index=index)
                yield ExpectedRows(take(whole), take, layout, dim)
                continue
            # [B * S], [S * B], or [B * S * H], as in the norm of a gated delta layer: B is not known, so try each.
            for before in (divisor for divisor in range(1, times + 1) if times % divisor == 0):
                sizes = before, layout.length, times // before
                take = partial(_flattened_rows, dim=dim, sizes=sizes, index=index)
                yield ExpectedPart(take(whole), take, layout)

    def part(self, whole: torch.Tensor | None, local: torch.Tensor | None) -> ExpectedPart | None:
        """The part, among :meth:`parts`, that is nearest to ``local``. None if no part has its shape."""
        if whole is None or local is None or isinstance(local, DTensor):
            return None
        parts = self.parts(whole, local.shape)
        return min(parts, key=lambda part: squares(local, part.expected).error(), default=None)

    def compare(self, whole: torch.Tensor | None, local: torch.Tensor | None) -> Squares | None:
        """The comparison of ``local`` with its part of ``whole``. None if no part has its shape."""
        part = self.part(whole, local)
        return None if part is None or local is None else squares(local, part.expected)


def _flattened_rows(tensor: torch.Tensor, dim: int, sizes: tuple[int, int, int], index: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(dim, sizes).index_select(dim + 1, index).flatten(dim, dim + 2)


def squares(actual: torch.Tensor, expected: torch.Tensor) -> Squares:
    """The comparison of tensors of equal shape. Equal infinities differ by 0, and so do two NaNs."""
    wide = torch.float64 if not actual.is_complex() else torch.complex128
    actual, expected = actual.detach().to(wide), expected.detach().to(wide)
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = (actual - expected).masked_fill(equal, 0.0).abs()
    norm = expected.abs().masked_fill(~expected.isfinite(), 0.0)
    return Squares(float(difference.square().sum()), float(norm.square().sum()))


def factor(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The factor with which ``expected`` is nearest to ``actual``."""
    actual, expected = actual.detach().double().flatten(), expected.detach().double().flatten()
    norm = float(expected @ expected)
    return float(actual @ expected) / norm if norm else 1.0


def add_squares(comparisons: Iterable[Squares | None]) -> Squares | None:
    """The sum of the entries that are not None. None if all are None."""
    terms = [term for term in comparisons if term is not None]
    return sum(terms[1:], terms[0]) if terms else None


def _add_ranks(ranks: Sequence[Mapping[_K, Squares | None]]) -> dict[_K, Squares]:
    keys = dict.fromkeys(key for rank in ranks for key in rank)
    totals = {key: add_squares(rank.get(key) for rank in ranks) for key in keys}
    return {key: total for key, total in totals.items() if total is not None}


Kept = Mapping[Key, Sequence[torch.Tensor | None]]
"""A rank's rows of the outputs of modules, by call."""
Gradients = Mapping[str, torch.Tensor | None]
"""A rank's parts of the gradients of parameters; None for parameters without one."""


def output_errors(actual: Kept, expected: Kept, gather: Gather) -> dict[Key, float]:
    """The errors over all ranks of the outputs that can be compared, by call."""
    terms: dict[Key, Squares | None] = {}
    for key, tensors in actual.items():
        pairs = zip(tensors, expected.get(key, ()), strict=False)
        terms[key] = add_squares(squares(a, b) for a, b in pairs if a is not None and b is not None)
    return {key: total.error() for key, total in _add_ranks(gather(terms)).items()}


def gradient_errors(
    actual: Gradients, expected: Gradients, gather: Gather, tolerance: float
) -> tuple[dict[str, float], float]:
    """The error of each parameter's gradient over all ranks, and the smallest norm that errors are relative to.

    A missing gradient counts as 0.
    """
    terms: dict[str, Squares | None] = {}
    units = 0.0
    for name in dict.fromkeys((*expected, *actual)):
        if (pair := gradient_pair(actual, expected, name)) is not None:
            terms[name] = squares(*pair) if pair[0].shape == pair[1].shape else Squares(math.inf, 0.0)
            units = max(units, 100 * torch.finfo(pair[1].dtype).eps)
    ranks, all_units = zip(*gather((terms, units)), strict=True)
    totals = _add_ranks(ranks)
    largest = max((total.norm for total in totals.values() if math.isfinite(total.norm)), default=0.0) ** 0.5
    # A gradient may be 0 up to rounding, as for the bias of keys. Its error is relative to a part of the largest
    # gradient's norm, such that 100 units in the last place of that gradient are within the tolerance.
    floor = min(1e-2, max(all_units) / tolerance) * largest
    return {name: total.error(floor) for name, total in totals.items()}, floor / len(ranks) ** 0.5


def gradient_pair(actual: Gradients, expected: Gradients, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A parameter's gradients in two steps. A missing gradient is 0. None if both are missing."""
    first, second = actual.get(name), expected.get(name)
    if first is None and second is None:
        return None
    zero = torch.zeros_like(second if first is None else first)  # pyright: ignore[reportArgumentType]
    return zero if first is None else first, zero if second is None else second


class Leeway:
    """The largest error that counts as rounding, by call and by parameter."""

    def __init__(self, tolerance: float, calls: Mapping[Key, float], parameters: Mapping[str, float]) -> None:
        self.tolerance, self._calls, self._parameters = tolerance, calls, parameters

    def of(self, what: Key | str) -> float:
        """The tolerance of a call's output, or of a parameter's gradient."""
        noise = self._parameters.get(what, 0.0) if isinstance(what, str) else self._calls.get(what, 0.0)
        # Four times the effect of changed last bits: two steps, each with two independent roundings, differ by less.
        return self.tolerance + 4 * noise

    def margin(self, what: Key | str) -> float:
        """The error from which on a planted mistake is seen: ten tolerances, at most a tenth, and the rounding."""
        return self.of(what) + min(9 * self.tolerance, 0.1)

    def moved(self, errors: Mapping[Any, float]) -> list[Any]:
        """The calls or parameters that a planted mistake moves."""
        return [what for what, error in errors.items() if not error <= self.margin(what)]

    def scaled(self, what: Key | str, error: float) -> float:
        """``error``, scaled such that it can be compared with the common tolerance."""
        return error * self.tolerance / self.of(what)

    def wrong(self, errors: Mapping[Any, float]) -> list[Any]:
        """The calls or parameters whose errors are more than rounding."""
        return [what for what, error in errors.items() if not error <= self.of(what)]


@dataclass(frozen=True)
class StepResult:
    """The results of a step."""

    recording: Recording
    gradients: Gradients


@dataclass(frozen=True)
class LossGradient:
    """The gradient of the model's output on a rank, relative to the gradient on one process.

    Attributes:
        factor: the factor between both gradients.
        wrong: the positions at which they differ by more than this factor.
        rolled: whether they differ as with labels that were rolled after sharding.
        tokens: the number of this rank's tokens with a gradient on one process.
    """

    factor: float
    wrong: tuple[int, ...]
    rolled: bool
    tokens: int


class Comparison:
    """Compares ``parallel``, a step on the ranks, with ``reference``, the same step on one process.

    Every rank takes the same decisions, because gathered values alone decide.

    Attributes:
        reference, parallel: the results of the steps.
        shards: the positions that this rank holds.
        restore: puts back the state before the step, with which each run of a part of the model begins.
        calls: the calls of the reference. Parents end after their children.
        local_calls: this rank's calls, by key.
        inputs, outputs, gradients: errors over all ranks, by call (and the input's name), if they can be compared. The
            gradients are gradients of outputs.
        parameters: the error over all ranks, by parameter. A missing gradient counts as 0.
        loss_gradients: by rank; None if they cannot be compared.
    """

    restore: Callable[[], None]

    def __init__(
        self, reference: StepResult, parallel: StepResult, shards: ShardLookup, gather: Gather, leeway: Leeway
    ) -> None:
        self.reference, self.parallel, self.shards, self.gather = reference, parallel, shards, gather
        self._leeway, self.tolerance = leeway, leeway.tolerance
        self.calls = reference.recording.calls
        self.local_calls = {call.key: call for call in parallel.recording.calls}
        self.loss_gradients: list[LossGradient | None] = gather(self._loss_gradient())
        errors, self._floor = gradient_errors(parallel.gradients, reference.gradients, gather, self.tolerance)
        self.parameters = {name: leeway.scaled(name, error) for name, error in errors.items()}
        self.inputs, self.outputs, self.gradients = self._errors_of_calls()

    def is_wrong(self, error: float | None) -> bool:
        """Whether the error exceeds the tolerance. None (not compared) counts as no error."""
        return error is not None and not error <= self.tolerance

    def equal(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether tensors are equal up to rounding."""
        return actual.shape == expected.shape and squares(actual, expected).error() <= self.tolerance

    def same_gradient(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether gradients of a parameter are equal up to rounding."""
        return squares(actual, expected).error(self._floor) <= self.tolerance

    def wrong_inputs(self, call: Call) -> list[str]:
        """Names of the inputs of ``call`` that are wrong on any rank."""
        return [name for name in call.inputs if self.is_wrong(self.inputs.get((call.key, name)))]

    def knows(self, call: Call) -> bool:
        """Whether an input of ``call`` can be compared."""
        return any((call.key, name) in self.inputs for name in call.inputs)

    def pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A parameter's gradient on ranks and with one rank, see :func:`gradient_pair`."""
        return gradient_pair(self.parallel.gradients, self.reference.gradients, name)

    def loss_factor(self) -> float | None:
        """The common factor of the loss's gradient on all ranks, such as ``averaged_over`` of global_loss. None if the
        factors differ, or are not known."""
        factors = [x.factor for x in self.loss_gradients if x is not None and not x.wrong]
        if not factors or len(factors) < len(self.loss_gradients):
            return None
        common = max(factors) - min(factors) <= self.tolerance * max(map(abs, factors))
        return factors[0] if common and factors[0] else None

    def _errors_of_calls(self) -> tuple[dict[tuple[Key, str], float], dict[Key, float], dict[Key, float]]:
        scale, compare = self.loss_factor() or 1.0, self.shards.compare
        inputs: dict[tuple[Key, str], Squares | None] = {}
        outputs: dict[Key, Squares | None] = {}
        gradients: dict[Key, Squares | None] = {}
        for call in self.calls:
            local = self.local_calls.get(call.key)
            if local is None:
                continue
            local_inputs = local.inputs
            inputs |= {(call.key, name): compare(whole, local_inputs.get(name)) for name, whole in call.inputs.items()}
            if len(call.outputs) == len(local.outputs):
                outputs[call.key] = add_squares(map(compare, call.outputs, local.outputs))
                scaled = (None if whole is None else whole * scale for whole in call.gradients)
                gradients[call.key] = add_squares(map(compare, scaled, local.gradients))
        of_inputs, of_outputs, of_gradients = zip(*self.gather((inputs, outputs, gradients)), strict=True)
        totals = _add_ranks(of_gradients)
        floor = 1e-2 * max((total.norm**0.5 for total in totals.values()), default=0.0)
        of_input = {key: total.error() for key, total in _add_ranks(of_inputs).items()}
        owners = {call.key: (call.parent if call.kind == ATTENTION else None) or call for call in self.calls}
        return (
            {(key, name): self._leeway.scaled(owners[key].key, error) for (key, name), error in of_input.items()},
            {key: self._leeway.scaled(key, total.error()) for key, total in _add_ranks(of_outputs).items()},
            {key: self._leeway.scaled(key, total.error(floor)) for key, total in totals.items()},
        )

    def _loss_gradient(self) -> LossGradient | None:
        root = self.calls[-1] if self.calls else None
        local = None if root is None else self.local_calls.get(root.key)
        if root is None or local is None:
            return None
        pairs = zip(root.gradients, local.gradients, strict=False)
        whole, actual = next((pair for pair in pairs if pair[0] is not None), (None, None))
        part = self.shards.part(whole, actual)
        if actual is None or not isinstance(part, ExpectedRows):
            return None
        positions = part.layout.positions(self.shards.rank, actual.device)
        gradient, expected = (x.double().movedim(part.dim, 0).flatten(1) for x in (actual, part.expected))
        # The last positions of fragments: after sharding, a roll of labels gives these a wrong next token.
        last = torch.ones_like(positions, dtype=torch.bool)
        last[:-1] = positions.diff() != 1
        labelled = (expected != 0).any(1)
        inner = ~last & labelled
        by = factor(gradient[inner], expected[inner]) if bool(inner.any()) else factor(gradient, expected)
        error, expected = gradient - by * expected, by * expected
        scale = self.tolerance * max(float(expected.norm()), 1e-300)
        wrong = ~(error.norm(dim=1) <= scale / max(len(error), 1) ** 0.5)
        if bool((error.norm() <= scale).item()):
            wrong = torch.zeros_like(wrong)
        rolled = part.dim < actual.ndim - 1 and bool(inner.any()) and not bool((wrong & ~last).any())
        if rolled:
            # Another label changes two entries of a row of the gradient of a cross entropy: the old and the new class.
            # Without a label, the row is 0.
            gradient, expected, error = (x.reshape(-1, actual.shape[-1]) for x in (gradient, expected, error))
            relabelled = (error.abs() > 1e-6 * expected.abs().amax().clamp(min=1e-300)).sum(1) <= 2
            unlabelled = ~(gradient != 0).any(1) | ~(expected != 0).any(1)
            rolled = bool((relabelled | unlabelled).all())
        return LossGradient(by, tuple(positions[wrong].tolist()), rolled, int(labelled.sum()))
