"""Selective activation checkpointing: recompute a layer, but not its attention, nor what the ranks exchange for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy

import cp_styles.engine.op
import cp_styles.functions.flex  # noqa: F401 - these two define what is kept
from cp_styles.kernels import SDPA_KERNELS

Policy: TypeAlias = Callable[..., CheckpointPolicy]
"""``policy(context, op, *args, **kwargs)``, as ``create_selective_checkpoint_contexts`` takes it."""


def save_attention(others: Policy | None = None) -> Policy:
    """A policy that keeps what attention returned, so that the recomputation in the backward communicates nothing.

    ::

        contexts = partial(create_selective_checkpoint_contexts, save_attention())
        x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    Kept are each attention's output and its residual (logsumexp, and the received keys and values that the strategy is
    told to ``keep``), and the ranks' agreement before it; with ``torch.compile`` likewise. Under a SequenceScope give
    ``context_fn=partial(scope.for_checkpoint, contexts)``. With ``Ring(keep=0)`` nothing is kept but output and
    logsumexp; its backward fetches all keys again.

    Args:
        others: the policy for all other ops; default: recompute them.
    """

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _KEPT:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE if others is None else others(context, op, *args, **kwargs)

    return policy


_KEPT = {
    torch.ops.cp_styles.attention.default,
    torch.ops.cp_styles.flex_attention.default,  # varlen_attn too
    torch.ops.cp_styles.gather_numbers.default,
    *(kernel.forward_op for kernel in SDPA_KERNELS),  # AttentionContextParallel, called eagerly
}
