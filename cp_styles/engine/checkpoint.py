"""Selective activation checkpointing: recompute a layer, but not its attention, nor what the ranks exchange for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cp_styles._compat import dispatch_modes
from cp_styles.engine.binding import Binding
from cp_styles.engine.scope import ScopedBinding
from cp_styles.kernels import SDPA_KERNELS

Policy: TypeAlias = Callable[..., CheckpointPolicy]
"""``policy(context, op, *args, **kwargs)``, as ``create_selective_checkpoint_contexts`` takes it."""

Contexts: TypeAlias = Callable[[], tuple[Any, Any]]
"""What ``torch.utils.checkpoint.checkpoint`` takes as its ``context_fn``."""

_Source = TypeVar("_Source", Binding, ScopedBinding, Binding | ScopedBinding)


def save_attention(others: Policy | None = None) -> Contexts:
    """A ``context_fn`` that keeps what attention returned, so that the recomputation in the backward communicates
    nothing.

    ::

        x = checkpoint(layer, x, use_reentrant=False, context_fn=save_attention())

    Kept are each attention's output and logsumexp, and the ranks' agreement before it (``Ulysses`` also keeps what its
    all-to-all brought). No received keys and values are kept, whatever the strategy's ``keep`` says: the backward
    receives them again. With ``torch.compile`` inside of the checkpoint, or around it, ``keep`` counts as ever:
    ``Ring(keep=0)`` keeps none. Under a SequenceScope give ``context_fn=partial(scope.for_checkpoint,
    save_attention())``.

    Args:
        others: the policy for all other ops; default: recompute them.
    """
    return partial(_contexts, others)


def _contexts(others: Policy | None) -> tuple[Any, Any]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _kept_ops():
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE if others is None else others(context, op, *args, **kwargs)

    modes = create_selective_checkpoint_contexts(policy)
    _saving.update(modes)
    return modes


# The modes that are save_attention's. One that is entered is on torch's stack of modes, in its thread.
_saving: WeakSet[Any] = WeakSet()


def as_kept(source: _Source) -> _Source:
    """What an attention is bound to, for a call now: inside a checkpoint of :func:`save_attention`, its results outlive
    the layer."""
    return source.keeping_nothing() if any(mode in _saving for mode in dispatch_modes()) else source


@cache
def _kept_ops() -> set[Any]:
    ops = torch.ops.cp_styles
    return {
        ops.attention.default,
        ops.flex_attention.default,  # varlen_attn too
        ops.gather_numbers.default,
        *(kernel.forward_op for kernel in SDPA_KERNELS),  # AttentionContextParallel, called eagerly
    }
