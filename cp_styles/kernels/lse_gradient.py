"""Gradients of the logsumexp, with any kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cp_styles.kernels.base import OtherBackward, TileCall


@dataclass(frozen=True)
class LseGradient(OtherBackward):
    """``inner`` for a backward whose ``grad`` has one more column: the gradient of the logsumexp.

    A kernel computes d logits = p (grad v^T - sum(grad out)). The derivative of the logsumexp is p. So one more column,
    with value 0 and out -1, adds its gradient inside the parentheses.
    """

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, **options):
        return _cut(self.inner.backward(*_widened(grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL), **options))

    def backward_tiles(self, tiles):
        wider = (TileCall(_widened(*tensors), options) for tensors, options in tiles)
        for index, gradients in self.inner.backward_tiles(wider):
            yield index, _cut(gradients)


def _widened(grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL) -> tuple[torch.Tensor, ...]:
    """The tensors of a backward with the additional column."""
    # CUDA kernels take head dims that are multiples of 8, so add eight columns.
    q, k, v = (F.pad(x, (0, 8)) for x in (q_BHLD, k_BGMD, v_BGME))
    return F.pad(grad_BHLE, (0, 7)), q, k, v, F.pad(out_BHLE, (0, 8), value=-1.0), lse_BHL


def _cut(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x[..., :-8] for x in gradients)
    return dq, dk, dv
