"""Which callables ranks tell apart by :func:`code_of`: by every number that they read, and by nothing else."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from cp_styles.introspect import code_of


class Slopes:
    """``other`` and ``rank`` are read by nobody."""

    factor = 1.0

    def __init__(self, factor: float) -> None:
        self.factor = self.other = factor
        self.rank = factor

    def slope(self):
        return self.factor

    def method(self, score, b, h, q, k):
        return score * self.slope()

    def __call__(self, score, b, h, q, k):
        return self.method(score, b, h, q, k)

    def unread(self, score, b, h, q, k):
        return score * 2.0


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, score, b, h, q, k):
        return score * self.factor


class Property:
    def __init__(self, factor: float) -> None:
        self._factor = factor

    @property
    def factor(self):
        return self._factor

    @staticmethod
    def times(score, factor):
        return score * factor

    def __call__(self, score, b, h, q, k):
        return self.times(score, self.factor)


class ByName:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, score, b, h, q, k):
        return score * getattr(self, "factor")  # noqa: B009


class Layer(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = Inner(factor)
        self.layer_index = factor

    def forward(self, score, b, h, q, k):
        return self.inner(score)


class Inner(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, score):
        return score * self.factor


@dataclass(frozen=True)
class Record:
    factor: float

    def __call__(self, score, b, h, q, k):
        return score * self.factor


def class_of(factor: float):
    return type("Slopes", (Slopes,), {"factor": factor, "__init__": lambda self: None})()


def through_a_closure(factor: float):
    held = Slopes(factor)

    def helper():
        return held.slope()

    return lambda score, b, h, q, k: score * helper()


def times(factor, score, b, h, q, k):
    return score * factor


def through_a_global(factor: float):
    """As in two processes: each has a global of its own."""
    names = {"held": Slopes(factor), "__name__": "program", "FACTOR": factor}
    exec("def helper(): return FACTOR\ndef mod(score, b, h, q, k): return score * held.slope() * helper()", names)
    return names["mod"]


READ = {
    "method": lambda factor: Slopes(factor).method,
    "object": Slopes,
    "slots": Slots,
    "property": Property,
    "by name": ByName,
    "module": Layer,
    "a module's forward": lambda factor: Layer(factor).forward,
    "dataclass": Record,
    "class": class_of,
    "closure": through_a_closure,
    "partial": lambda factor: functools.partial(times, factor),
    "partial of a method": lambda factor: functools.partial(Slopes(factor).method),
    "lru_cache": lambda factor: functools.lru_cache(lambda score, b, h, q, k: score * factor),
    "vmap": lambda factor: torch.vmap(lambda score, b, h, q, k: score * factor),
    "global": through_a_global,
}


@pytest.mark.parametrize("name", READ)
def test_numbers_that_a_callable_reads_are_in_its_text(name: str):
    make = READ[name]
    assert code_of(make(1.0)) == code_of(make(1.0))
    assert code_of(make(1.0)) != code_of(make(2.0))


def test_what_a_callable_does_not_read_is_not():
    assert code_of(Slopes(1.0).unread) == code_of(Slopes(2.0).unread)
    first, second = Layer(1.0), Layer(1.0)
    first.layer_index = 7
    first.register_forward_hook(lambda *_: None)
    assert code_of(first) == code_of(second)


def test_objects_that_know_each_other():
    first, second = Slopes(1.0), Slopes(1.0)
    first.slope, second.slope = second, first
    assert "..." in code_of(first)
