"""Sums by which ranks tell whether parameters differ by more than rounding: replicas.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from cp_styles.collectives.replicas import project


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_no_difference_of_opposite_elements_is_hidden(size: int):
    """As the gradients of a bias in front of a softmax, which add up to 0."""
    for plus, minus in itertools.permutations(range(size), 2):
        part = torch.zeros(size)
        part[plus], part[minus] = 1.0, -1.0
        assert abs(project(part)[0]) > 0.05 * 2**0.5
    assert abs(project(torch.ones(size))[0]) > 0.05 * size**0.5
