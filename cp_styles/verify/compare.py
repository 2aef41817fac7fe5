"""Compares a rank's tensor with its part of the tensor of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from cp_styles.layout import SequenceLayout


@dataclass(frozen=True)
class Squares:
    """Sums of the squares of a difference, and of the tensor that it is relative to. They are added over ranks."""

    difference: float
    norm: float

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.difference + other.difference, self.norm + other.norm)

    def error(self, floor: float = 0.0) -> float:
        """The norm of the difference, relative to the norm of the tensor, or to ``floor`` if that is larger.

        Infinite where it is NaN: each comparison with NaN is false, so an error of NaN would pass for none.
        """
        if self.difference == 0:
            return 0.0
        norm = max(math.sqrt(self.norm), floor)
        ratio = math.sqrt(self.difference) / norm if norm else math.inf
        return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True)
class ExpectedPart:
    """A rank's part of a tensor of one process, ``expected``.

    Attributes:
        take: the same part of another tensor of the whole one's shape.
        dim: the sequence dim. None: tokens are flattened with the batch, or this is the whole tensor.
        layout: the layout that cuts it. None: this is the whole tensor.
    """

    expected: torch.Tensor
    take: Callable[[torch.Tensor], torch.Tensor]
    dim: int | None = None
    layout: SequenceLayout | None = None


@dataclass(frozen=True)
class Places:
    """Which positions a rank holds, by the layouts with which attention ran: of several lengths, or batches."""

    layouts: Sequence[SequenceLayout]
    rank: int

    def parts(self, whole: torch.Tensor, shape: Sequence[int]) -> Iterator[ExpectedPart]:
        """The parts of ``whole`` that a tensor of ``shape`` may be. Tokens and batch may be flattened, in two ways."""
        if tuple(whole.shape) == tuple(shape):
            yield ExpectedPart(whole, lambda x: x)
            return
        if whole.ndim != len(shape):
            return
        dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]]
        if len(dims) != 1:
            return
        dim = dims[0]
        for layout in self.layouts:
            own = layout.positions(self.rank, whole.device)
            times, rest = divmod(whole.shape[dim], layout.length)
            if rest or shape[dim] != times * own.numel():
                continue
            if times == 1:
                take = partial(torch.index_select, dim=dim, index=own)
                yield ExpectedPart(take(whole), take, dim, layout)
                continue
            for inner in (dim + 1, dim):
                sizes = (times, layout.length) if inner > dim else (layout.length, times)
                take = partial(_flattened_rows, dim=dim, sizes=sizes, inner=inner, own=own)
                yield ExpectedPart(take(whole), take, None, layout)

    def part(self, whole: torch.Tensor, local: torch.Tensor) -> ExpectedPart | None:
        """The part, of those of :meth:`parts`, that is nearest to ``local``. None if there is none."""
        candidates = list(self.parts(whole, local.shape))
        return min(candidates, key=lambda part: squares(local, part.expected).error()) if candidates else None

    def compare(self, whole: torch.Tensor | None, local: torch.Tensor | None) -> Squares | None:
        """The comparison of ``local`` with its part of ``whole``. None if its shape is not that of a part."""
        if whole is None or local is None or isinstance(local, DTensor):
            return None
        part = self.part(whole, local)
        return None if part is None else squares(local, part.expected)


def _flattened_rows(
    tensor: torch.Tensor, dim: int, sizes: tuple[int, int], inner: int, own: torch.Tensor
) -> torch.Tensor:
    return tensor.unflatten(dim, sizes).index_select(inner, own).flatten(dim, dim + 1)


def squares(actual: torch.Tensor, expected: torch.Tensor) -> Squares:
    """The comparison of tensors of equal shape. Equal infinities, and two NaNs, differ by 0."""
    wide = torch.float64 if not actual.is_complex() else torch.complex128
    mine, wanted = actual.detach().to(wide), expected.detach().to(wide)
    same = (mine == wanted) | (mine.isnan() & wanted.isnan())
    difference = (mine - wanted).masked_fill(same, 0.0).abs()
    norm = wanted.abs().masked_fill(~wanted.isfinite(), 0.0)
    return Squares(float(difference.square().sum()), float(norm.square().sum()))


def factor(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The factor with which ``expected`` is nearest to ``actual``."""
    mine, wanted = actual.detach().double().flatten(), expected.detach().double().flatten()
    norm = float(wanted @ wanted)
    return float(mine @ wanted) / norm if norm else 1.0


def all_squares(pairs: Sequence[Squares | None]) -> Squares | None:
    """The sum of the entries that are not None. None if there are none."""
    terms = [each for each in pairs if each is not None]
    return sum(terms[1:], terms[0]) if terms else None
