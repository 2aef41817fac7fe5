"""Runs a strategy row by row of the batch, for masks that differ between rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from cp_styles.masks import Mask
from cp_styles.strategies.base import Attention, ResidualPlaces, Strategy


@dataclass(frozen=True)
class PerRowStrategy(Strategy):
    """Runs ``inner`` for each row of the batch, with the mask of that row. Bindings choose it for such masks.

    Communication: the inner strategy's, once for each row.
    """

    inner: Strategy

    def without_kept_keys(self):
        return replace(self, inner=self.inner.without_kept_keys())

    @property
    def reads_inputs(self):
        return self.inner.reads_inputs

    def residual_places(self, attention, q_BHLD, k_BGMD, v_BGME):
        rows = self._split_rows(attention, None, q_BHLD, k_BGMD, v_BGME)
        return ResidualPlaces([self.inner.residual_places(row, q, k, v).spec for row, (q, k, v), _ in rows])

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        rows = self._split_rows(attention, residual, q_BHLD, k_BGMD, v_BGME)
        return _join_rows([self.inner.forward(row, q, k, v, sink_H, kept) for row, (q, k, v), kept in rows])

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        rows = self._split_rows(attention, residual, q_BHLD, k_BGMD, v_BGME, out_BHLE, grad_BHLE)
        grads = [self.inner.backward(row, grad, q, k, v, out, kept, sink_H) for row, (q, k, v, out, grad), kept in rows]
        dq, dk, dv, dsink = zip(*grads, strict=True)
        return _join_rows(dq), _join_rows(dk), _join_rows(dv), None if sink_H is None else reduce(torch.add, dsink)

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        rows = self._split_rows(attention, residual, q_BHLD, k_BGMD, v_BGME)
        return torch.cat([self.inner.logsumexp(row, q, k, v, kept) for row, (q, k, v), kept in rows])

    def _split_rows(
        self, attention: Attention, residual: torch.Tensor | None, *tensors: torch.Tensor
    ) -> list[tuple[Attention, Any, Any]]:
        """For each row of the batch: its attention, its tensors with a batch of 1, and its part of the residual."""
        kept: list[Any] = [None] * tensors[0].shape[0]
        if residual is not None:
            kept = self.residual_places(attention, *tensors[:3]).views(residual)
        cut = zip(*(x.split(1) for x in tensors), strict=True)

        rows, known = [], attention.known
        for index, row in enumerate(cut):
            key = PerRowStrategy, index
            of_row = known.get(key) or known.setdefault(key, replace(attention, mask=attention.mask.row(index)))
            rows.append((of_row, row, kept[index]))
        return rows


def strategy_on(strategy: Strategy, ranks: int, mask: Mask) -> Strategy:
    """The strategy for ``ranks`` ranks. It runs row by row of the batch if ``mask`` differs between rows."""
    strategy = strategy.on(ranks)
    per_row = mask.rows != (mask,) and not isinstance(strategy, PerRowStrategy)
    return PerRowStrategy(strategy) if per_row else strategy


def _join_rows(rows: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Join rows [1, H, L, D] to [B, H, L, D], in the memory order of kernel outputs: [B, L, H, D]."""
    return torch.cat([x.transpose(1, 2) for x in rows]).transpose(1, 2)
