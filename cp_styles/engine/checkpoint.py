"""Selective activation checkpointing: recompute a layer without its attention and without its messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.compat import dispatch_modes

# The operators whose results are kept.
_KEPT = frozenset(("cp_styles::attention", "cp_styles::gather_numbers"))

Policy: TypeAlias = Callable[..., CheckpointPolicy]
"""``policy(context, op, *args, **kwargs)``, as ``create_selective_checkpoint_contexts`` takes it."""

Contexts: TypeAlias = Callable[[], tuple[Any, Any]]
"""The type of ``context_fn`` in ``torch.utils.checkpoint.checkpoint``."""


def save_attention(others: Policy | None = None) -> Contexts:
    """A ``context_fn`` that keeps the results of attention, so that the recomputation does not communicate.

    Example::

        x = checkpoint(layer, x, use_reentrant=False, context_fn=save_attention())

    The checkpoint keeps the output and the logsumexp of each attention, and the agreement of the ranks before it.
    (``Ulysses`` also keeps the tensors that its all-to-all received.) Received keys and values are not kept, for any
    ``keep`` of the strategy: the backward receives them again. With ``torch.compile`` inside the checkpoint or around
    it, ``keep`` of the strategy counts: ``Ring(keep=0)`` keeps none. Under a SequenceScope pass
    ``context_fn=partial(scope.for_checkpoint, save_attention())``.

    Args:
        others: the policy for all other ops; default: recompute them.
    """
    return partial(_contexts, others)


def _contexts(others: Policy | None) -> tuple[Any, Any]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op.name() in _KEPT:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE if others is None else others(context, op, *args, **kwargs)

    modes = create_selective_checkpoint_contexts(policy)
    for mode in modes:  # results_are_kept finds the mark on the mode stack of its thread
        facts_about(mode)[save_attention] = True
    return modes


def results_are_kept() -> bool:
    """Whether a checkpoint of :func:`save_attention` runs. Results then outlive the layer."""
    return any(save_attention in facts_about(mode) for mode in dispatch_modes())
