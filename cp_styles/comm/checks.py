"""Which checks run: one object, which every style and function takes as ``checks=``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Checks:
    """Which checks run: of the calls of all ranks, of their parameters, and of the arguments of models.

    **Calls.** By default the ranks agree before every attention, and before every backward of one. Promise: if one rank
    refuses its inputs, or the ranks' calls differ, or one calls attention or a backward more often than its peers or
    in another order, then every rank raises, and nothing waits for a timeout. If one rank fails in the middle of an
    attention, every rank raises, and the process groups are of no use any more.

    **Parameters.** By default all ranks raise :class:`~cp_styles.UnreducedGradientsError` at an attention of the first
    step after the step in which gradients were not reduced over the sequence axis, or only in part. They compare the
    parameters of the outermost module whose forward runs. Functions outside of a module compare none, and steps of
    ZeroRedundancyOptimizer leave no difference.

    **Inputs.** ``ModuleContextParallel`` and ``context_parallel`` refuse mistakes in the arguments of a model. These
    are: no ``position_ids`` for a forward that takes them; positions, under any name, that count from 0 on each rank;
    labels that a model of transformers would shift after the cut; windows for which it would make masks from this
    rank's lengths. A block looks at them when a model first calls attention in it. Computations from the
    number of a model's tokens are not looked at: :func:`~cp_styles.verify.verify` finds these.

    Args:
        agreement: False: the ranks never agree, and each assumes that its peers make equal calls. For jobs that ran
            with the default before. The layout of the attention must be a ``SequenceLayout``, of the style or
            call, or of a ``SequenceScope``. Nothing is promised where ranks differ: if their lengths, plans or order of
            calls differ, a rank waits until the timeout of the process group or the transport raises. If only values
            differ (a scale, a mask with the same shape of plan), the result is silently wrong. Unreduced gradients are
            not found.
        only_warn: give an :class:`~cp_styles.UnreducedGradientsWarning` about parameters instead of the error, once
            for each process group.
        local: parameters that are meant to differ between these ranks, such as experts that exist on one rank only.
            Modules, with all their parameters, and single parameters. They are left out of the comparison for all
            attention over these ranks. (DTensors that are cut over these ranks need not be named.)
        inputs: False: the arguments of models are not checked. For models that handle context parallelism themselves.

    Communication: an all-gather of a row of integers for each attention, on the host, and one before each backward. A
    second all-gather compares the results of a balancer that is not a function of this package. With a SequenceLayout a
    rank does not wait for it at once: see [Note: agreement without waiting] in comm/agreement.py. None without
    ``agreement``.

    Raises:
        TypeError: ``local`` has an item that is neither a module nor a parameter.

    Example::

        experts = torch.nn.Linear(8, 8)  # other ones on each rank
        style = ModuleContextParallel(checks=Checks(local=[experts]))
    """

    agreement: bool = True
    only_warn: bool = False
    local: Sequence[nn.Module | nn.Parameter] = field(default=(), compare=False)
    inputs: bool = True
    _ids: tuple[int, ...] = field(init=False, repr=False)  # parameters compare by their values

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", tuple(self.local))
        object.__setattr__(self, "_ids", tuple(map(id, self.local)))
        for item in self.local:
            if not isinstance(item, (nn.Module, nn.Parameter)):
                raise TypeError(f"Checks(local=...) takes modules and parameters, got {type(item).__name__}")


CHECKS = Checks()
"""The default."""
