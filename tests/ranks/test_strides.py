"""Inputs of any layout in memory, through every door: what torch's attention takes on one device."""

from __future__ import annotations

import pytest
import torch

from cp_styles import contiguous
from cp_styles.testing import run_ranks
from tests.oracle import attention_inputs, error, expected_attention
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.ranks.doors import DOORS, LENGTH


def apart(x: torch.Tensor) -> torch.Tensor:
    """[B, H, D, S] in memory: a row's numbers do not stand one after the other."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("door", [door for door in DOORS if door != "by_style"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_whose_numbers_stand_apart(door: str, ranks: int):
    inputs, cotangent = attention_inputs(length=LENGTH, batch=1)
    expected = expected_attention(inputs, cotangent, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    layout = contiguous(LENGTH, ranks)

    def on(rank: int):
        mesh = cp_mesh(ranks)
        leaves = [apart(layout.shard(x, 2, rank)).requires_grad_() for x in inputs]
        assert all(x.stride(-1) != 1 for x in leaves)
        out = DOORS[door](mesh, *leaves)
        found = [out, *torch.autograd.grad(out, leaves, apart(layout.shard(cotangent, 2, rank)))]
        with torch.inference_mode():
            found.append(DOORS[door](mesh, *leaves).clone())
        return [x.detach() for x in found]

    for parts, wanted in zip(zip(*run_ranks(on, ranks), strict=True), [*expected, expected[0]], strict=True):
        assert error(layout.unshard(list(parts), 2), wanted) < EXACT
