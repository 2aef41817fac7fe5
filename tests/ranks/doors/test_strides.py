"""Strides of 0, through every door; tests/fuzz.py draws others."""

from __future__ import annotations

import torch

from cp_styles import contiguous
from cp_styles.testing import run_ranks
from tests.covering import sampled
from tests.oracle import attention_inputs, expected_attention
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.ranks.each_door import DOORS, LENGTH

EXPANDED = {
    "batch": lambda x: x[:1].expand(2, -1, -1, -1),
    "heads": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "positions": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
    "dims": lambda x: x[..., :1].expand(-1, -1, -1, 8),
    "all": lambda x: x[:1, :1, :1, :1].expand(2, 4, x.shape[2], 8),
}


@sampled(1, dims=EXPANDED, door=list(DOORS))
def test_expanded_keys_and_values(door: str, dims: str):
    """Strides of 0, as ``expand`` makes them of keys that heads share."""
    inputs, cotangent = attention_inputs(length=LENGTH)
    layout = contiguous(LENGTH, 3)
    if dims in ("positions", "all"):  # one position for all of a rank would be another for the next
        inputs[1:] = [x[:, :, :1].expand_as(x) for x in inputs[1:]]
    inputs[1:] = [EXPANDED[dims](x) for x in inputs[1:]]
    expected = expected_attention(inputs, cotangent, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def on(rank: int):
        own = [layout.shard(x, 2, rank).clone() for x in inputs]
        leaves = [own[0].requires_grad_(), *(EXPANDED[dims](x).requires_grad_() for x in own[1:])]
        assert 0 in leaves[1].stride()
        out = DOORS[door](cp_mesh(3), *leaves)
        return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, layout.shard(cotangent, 2, rank)))]

    for parts, wanted in zip(zip(*run_ranks(on, 3), strict=True), expected, strict=True):
        # With keys alike, dq is what rounding leaves of terms as large as the others.
        assert float((layout.unshard(list(parts), 2) - wanted).norm()) < EXACT * float(expected[3].norm())
