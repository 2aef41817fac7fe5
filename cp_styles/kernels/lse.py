"""Gradients of the logsumexp, with any kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cp_styles.kernels.base import Kernel, TileCall


@dataclass(frozen=True)
class LseGradient(Kernel):
    """``inner`` for a backward whose ``grad`` has one more column: the gradient of the logsumexp.

    A kernel computes d logits = p (grad v^T - sum(grad out)). The derivative of the logsumexp is p. So one more column,
    with value 0 and out -1, adds its gradient inside the parentheses.
    """

    inner: Kernel

    @property
    def positional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.positional

    @property
    def small_tiles(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.small_tiles

    @property
    def content(self):
        return self.inner.content

    def forward(self, q_BHLD, k_BGMD, v_BGME, **options):
        return self.inner.forward(q_BHLD, k_BGMD, v_BGME, **options)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, **options):
        return _cut(self.inner.backward(*_widened(grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL), **options))

    def forward_tiles(self, tiles):
        return self.inner.forward_tiles(tiles)

    def backward_tiles(self, tiles):
        wider = (TileCall(_widened(*tensors), options) for tensors, options in tiles)
        for index, gradients in self.inner.backward_tiles(wider):
            yield index, _cut(gradients)

    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        self.inner.check(q_BHLD, k_BGMD, v_BGME, biased=biased)

    def tile_dtype(self, dtype):
        return self.inner.tile_dtype(dtype)


def _widened(grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL) -> tuple[torch.Tensor, ...]:
    """The tensors of a backward with the additional column."""
    # CUDA kernels take head dims that are multiples of 8, so add eight columns.
    q, k, v = (F.pad(x, (0, 8)) for x in (q_BHLD, k_BGMD, v_BGME))
    return F.pad(grad_BHLE, (0, 7)), q, k, v, F.pad(out_BHLE, (0, 8), value=-1.0), lse_BHL


def _cut(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x[..., :-8] for x in gradients)
    return dq, dk, dv
