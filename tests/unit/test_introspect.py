"""Differences between callables that ranks find by ``describe_code``: code, and numbers in closures and partials."""

from __future__ import annotations

import functools

import pytest
import torch

from cp_styles._lib.introspect import describe_code


class Slopes:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def method(self, score, b, h, q, k):
        return score * self.factor

    def twice(self, score, b, h, q, k):
        return score * 2.0 * self.factor


def times(factor, score, b, h, q, k):
    return score * factor


def through_a_closure(factor: float):
    def helper():
        return factor

    return lambda score, b, h, q, k: score * helper()


def with_a_default(factor: float):
    def score_mod(score, b, h, q, k, factor=factor):
        return score * factor

    return score_mod


READ = {
    "closure": through_a_closure,
    "default": with_a_default,
    "partial": lambda factor: functools.partial(times, factor),
    "a tensor's shape": lambda factor: functools.partial(times, torch.ones(int(factor))),
    "constants": lambda factor: Slopes(0.0).method if factor == 1.0 else Slopes(0.0).twice,
}


@pytest.mark.parametrize("name", READ)
def test_what_a_function_has_is_in_its_text(name: str):
    make = READ[name]
    assert describe_code(make(1.0)) == describe_code(make(1.0))
    assert describe_code(make(1.0)) != describe_code(make(2.0))


def test_attributes_of_objects_are_not():
    """verify tells ranks whose objects differ: see test_verify.py."""
    assert describe_code(Slopes(1.0).method) == describe_code(Slopes(2.0).method)
    assert describe_code(Slopes(1.0)) == describe_code(Slopes(2.0)) != describe_code(times)


def test_a_function_that_knows_itself():
    def score_mod(score, b, h, q, k):
        return score_mod(score, b, h, q, k)

    assert "..." in describe_code(score_mod)
