"""The only place that calls Strategy.forward and backward, for the op of attention.

Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from cp_styles._compat import named_range
from cp_styles.comm.agreement import begin_backward
from cp_styles.comm.group_state import GroupPhase
from cp_styles.comm.point_to_point import Operation
from cp_styles.engine.binding import Binding
from cp_styles.kernels import FlexKernel
from cp_styles.kernels.base import LseGradient
from cp_styles.strategies import Attention

listener: ContextVar[Callable[..., Any] | None] = ContextVar("attention_listener", default=None)
"""Called with the arguments of each strategy's forward in this context: see ``cp_styles.explain.explain_calls``."""


def run_forward(
    binding: Binding,
    attention: Attention,
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    v_BGME: torch.Tensor,
    sink_H: torch.Tensor | None = None,
    *,
    keep: bool,
    wants_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out_BHLE, lse_BHL, residual)`` of an attention on which the ranks have agreed. lse is empty unless
    ``wants_lse``, and the residual unless ``keep`` or that.

    Communication: that of the strategy.
    """
    strategy, tensors, filled = binding.strategy, (q_BHLD, k_BGMD, v_BGME), keep or wants_lse
    if (listens := listener.get()) is not None:
        listens(strategy, attention, *tensors, sink_H)
    with named_range("attention forward:", binding.name), Operation(binding.group, binding.group_state):
        shape, dtype = strategy.residual_places(attention, *tensors).spec if filled else ((0,), torch.uint8)
        residual = torch.empty(shape, dtype=dtype, device=q_BHLD.device)
        out = strategy.forward(attention, *tensors, sink_H, residual if filled else None)
        lse = strategy.logsumexp(attention, *tensors, residual) if wants_lse else q_BHLD.new_empty(0)
    binding.group_state.phase = GroupPhase.IDLE  # later errors are not errors of the attention
    return out, lse, residual


def run_backward(
    binding: Binding,
    attention: Attention,
    grad_BHLE: torch.Tensor,
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    v_BGME: torch.Tensor,
    out_BHLE: torch.Tensor,
    residual: torch.Tensor,
    sink_H: torch.Tensor | None = None,
    *,
    forward: int,
    grad_lse_BHL: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Sequence[torch.Tensor]]:
    """``(dq, dk, dv, dsink, shares)``. ``shares`` are the gradients of the tensors that a score_mod learns.
    ``forward`` is the number of the forward: see :class:`~cp_styles.comm.group_state.GroupState`.

    dsink and ``shares`` are this rank's share of a sum over the group. Communication: that of
    :func:`~cp_styles.comm.agreement.begin_backward`, then that of the strategy.
    """
    if isinstance(attention.kernel, FlexKernel):
        attention.kernel.check_unchanged()
    strategy, state = binding.strategy, binding.group_state
    if binding.model is not None and binding.group.size() > 1:
        binding.model.backward_begins(state)
    begin_backward(binding.group, forward, binding.checks.agreement)
    with named_range("attention backward:", binding.name), Operation(binding.group, state, forward):
        shares: Sequence[torch.Tensor] = ()
        if isinstance(attention.kernel, FlexKernel):
            shares = tuple(map(torch.zeros_like, attention.kernel.learned))
            attention = replace(attention, kernel=replace(attention.kernel, shares=shares))
        if grad_lse_BHL is not None:
            attention = replace(attention, kernel=LseGradient(attention.kernel))
            grad_BHLE = torch.cat((grad_BHLE, grad_lse_BHL.unsqueeze(-1).to(grad_BHLE.dtype)), -1)
        grads = strategy.backward(attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H)
    return *grads, shares
