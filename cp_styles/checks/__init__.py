"""Checks around the attention: a file and an entry of a list here for each.

It imports _lib, collectives, comm, engine, functions, intercept, layouts and mixers. Begin with `layers.py`.

Nothing in comm, engine, functions, intercept or strategies imports this package. Styles and blocks import this file
alone, and no check by name. The proof of a model is an exception: bindings notify it of the model's training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from cp_styles.checks.gradient_watch import ParameterWatch
from cp_styles.checks.layers import (
    refuse_mixing_layers,
    refuse_rotary_embedding_outside,
    refuse_uneven_sequence_parallelism,
)
from cp_styles.checks.positions import PositionCheck
from cp_styles.checks.proof import Proof, proof_of, running_ddp
from cp_styles.checks.transformers_models import TransformersCheck
from cp_styles.checks.uncut_batch import UncutBatchCheck
from cp_styles.engine.observers import RANK_CHECKS
from cp_styles.intercept.function_mode import ForwardObserver

__all__ = ["Proof", "check_layers", "observers_of", "proof_of", "running_ddp"]

RANK_CHECKS += [ParameterWatch, UncutBatchCheck]
_LAYER_CHECKS: tuple[Callable[[nn.Module, str, Iterable[nn.Module]], None], ...] = (
    refuse_mixing_layers,
    refuse_uneven_sequence_parallelism,
)
_FORWARD_OBSERVERS: tuple[Callable[[nn.Module], ForwardObserver | None], ...] = (TransformersCheck.of, PositionCheck.of)


def check_layers(model: nn.Module, name: str, local: Iterable[nn.Module], *, inputs: bool) -> None:
    """Check the layers of a module to which a style is applied, at once or by hooks when the layers are called.

    ``local``: modules whose input is whole on each rank. ``inputs``: see :class:`~cp_styles.Checks`.
    """
    for check in _LAYER_CHECKS:
        check(model, name, local)
    if inputs:
        refuse_rotary_embedding_outside(model, name)


def observers_of(module: nn.Module) -> list[ForwardObserver]:
    """New observers of the forwards of a module."""
    return [observer for make in _FORWARD_OBSERVERS if (observer := make(module)) is not None]
