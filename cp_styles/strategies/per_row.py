"""Masks that differ between rows of the batch: run a strategy for one row after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from cp_styles.strategies.base import Attention, ResidualPlaces, Strategy, residual_spec


@dataclass(frozen=True)
class PerRowStrategy(Strategy):
    """Runs ``inner`` for each row of the batch, with the mask of that row. Bindings choose it for such masks.

    Communication: that of the inner strategy, once for each row. So the number of messages grows with the rows.
    """

    inner: Strategy

    def keeping_nothing(self):
        return replace(self, inner=self.inner.keeping_nothing())

    def residual_specs(self, attention, q_BHLD, k_BGMD, v_BGME):
        rows = _rows(attention, q_BHLD, k_BGMD, v_BGME)
        return [residual_spec(self.inner.residual_specs(row, *tensors)) for row, tensors in rows]

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        kept = self._kept(attention, residual, q_BHLD, k_BGMD, v_BGME)
        rows = _rows(attention, q_BHLD, k_BGMD, v_BGME)
        rows_and_kept = zip(rows, kept, strict=True)
        return _joined([self.inner.forward(row, q, k, v, sink_H, views) for (row, (q, k, v)), views in rows_and_kept])

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        kept = self._kept(attention, residual, q_BHLD, k_BGMD, v_BGME)
        rows = _rows(attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE)
        grads = [
            self.inner.backward(row, grad, q, k, v, out, views, sink_H)
            for (row, (grad, q, k, v, out)), views in zip(rows, kept, strict=True)
        ]
        dq, dk, dv, dsink = zip(*grads, strict=True)
        return _joined(dq), _joined(dk), _joined(dv), None if sink_H is None else reduce(torch.add, dsink)

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        kept = self._kept(attention, residual, q_BHLD, k_BGMD, v_BGME)
        rows = _rows(attention, q_BHLD, k_BGMD, v_BGME)
        rows_and_kept = zip(rows, kept, strict=True)
        return torch.cat([self.inner.logsumexp(row, q, k, v, views) for (row, (q, k, v)), views in rows_and_kept])

    def _kept(self, attention, residual, q, k, v) -> list[Any]:
        if residual is None:
            return [None] * q.shape[0]
        return [*ResidualPlaces(self.residual_specs(attention, q, k, v)).views(residual)]


def _rows(attention: Attention, *tensors: torch.Tensor) -> list[tuple[Attention, Any]]:
    """For each row of the batch: its attention, and its tensors with a batch of 1."""
    return [
        (replace(attention, mask=attention.mask.row(index)), tuple(x[index : index + 1] for x in tensors))
        for index in range(tensors[0].shape[0])
    ]


def _joined(rows: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rows [1, H, L, D] joined to [B, H, L, D], in the memory order of kernel outputs: [B, L, H, D]."""
    return torch.cat([x.transpose(1, 2) for x in rows]).transpose(1, 2)
