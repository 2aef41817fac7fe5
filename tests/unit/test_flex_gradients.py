"""Gradients of tiles from differentiating a tile alone: their sum is the gradient of the whole attention."""

from __future__ import annotations

import pytest
import torch

from cp_styles.kernels.flex_compiled import tile_gradients
from cp_styles.kernels.merge import EMPTY_LSE
from tests.oracle import error, randn

B, H, L, M, D = 2, 4, 9, 14, 6
# float64: sums of few terms, and a quotient of probabilities, in which the logits' roundings count e-fold.
EXACT = 1e-13


def attention(q, k, v, learned, hidden_LM):
    """Dense and differentiable: ``(out, lse)``, and lse is -inf where a query sees nothing."""
    cap, table_HM = learned
    share = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(share, 1).mT
    logits = cap * torch.tanh(logits / cap) + table_HM[:, None]
    dead = hidden_LM.all(-1, keepdim=True)
    logits = logits.masked_fill(hidden_LM, float("-inf")).masked_fill(dead, 0.0)
    lse = torch.logsumexp(logits, -1)
    p = torch.softmax(logits, -1).masked_fill(dead, 0.0)
    return p @ v.repeat_interleave(share, 1), lse.masked_fill(dead.squeeze(-1), float("-inf"))


@pytest.mark.parametrize("cuts", [(M,), (5, 9), (1, 6, 7)])
def test_summed_over_tiles_they_are_the_wholes(cuts: tuple[int, ...]):
    """With queries that see nothing in a tile, and one that sees nothing at all."""
    q, k, v, grad = randn(0, B, H, L, D), randn(1, B, 2, M, D), randn(2, B, 2, M, D), randn(3, B, H, L, D)
    learned = [randn(4) ** 2 + 1, randn(5, H, M)]
    hidden = randn(6, L, M) > 0.5
    hidden[:, 1:5][3] = True
    hidden[2] = True
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *learned)]
    out, lse = attention(leaves[0], leaves[1], leaves[2], leaves[3:], hidden)
    wanted = torch.autograd.grad((out * grad).sum(), leaves)

    lse = lse.detach().masked_fill(hidden.all(-1), EMPTY_LSE)
    found = [torch.zeros_like(x) for x in wanted]
    values = [x.requires_grad_() for x in learned]
    start = 0
    for size in cuts:
        columns = slice(start, start + size)
        start += size

        def tile(q, k, v, columns=columns):
            return attention(q, k, v, (values[0], values[1][:, columns]), hidden[:, columns])

        dq, dk, dv, shares = tile_gradients(
            tile, (q, k[:, :, columns], v[:, :, columns]), values, grad, out.detach(), lse
        )
        found[1][:, :, columns] += dk
        found[2][:, :, columns] += dv
        for total, share in zip((found[0], *found[3:]), (dq, *shares), strict=True):
            total += share
    for mine, theirs in zip(found, wanted, strict=True):
        assert error(mine, theirs) < EXACT
