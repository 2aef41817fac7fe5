"""Detects gradients that were not reduced over the sequence axis: after a step the ranks' parameters differ.

Context parallelism leaves every rank with its own share of each gradient. If an optimizer steps with shares, the
parameters of the ranks become different. There is no other error, and the loss may still fall. Equal parameters have
equal bits. So each rank puts a checksum of its parameters into the all-gather before an attention.

Parameters are compared, not gradients. Training loops reduce gradients in many ways and at many times: FSDP2 and DDP in
the backward, a sum after several backwards, clipping before or after it, a GradScaler that skips a step. In all of them
the parameters must be equal after the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from cp_styles._lib.checksum import version_of
from cp_styles._lib.compat import graph_task_id, running_modules
from cp_styles._lib.troubleshooting import see
from cp_styles.collectives.replicas import (
    Difference,
    Replica,
    UnreducedGradientsError,
    find_differences,
    named_parameters,
    replica_number,
    replicas_of,
    shared_replicas,
)
from cp_styles.comm.agreement import Meeting, StatusRow, start_status
from cp_styles.comm.group_state import Forwards, state_of
from cp_styles.engine.observers import CheckedCall, RankCheck

_MOST_NAMED = 4  # parameters that an error names
_REQUIRES_GRAD = attrgetter("requires_grad")


class UnreducedGradientsWarning(UserWarning):
    """Replaces :class:`UnreducedGradientsError` with ``Checks(only_warn=True)``, and where parameters differ by no more
    than rounding."""


class ParameterWatch(RankCheck):
    """Compares the parameters of the models that attend over one group between its ranks.

    The model is the outermost module with parameters whose forward runs in this thread, a wrapper included. In a step
    that is compiled as a whole no forward runs. There it is the root of the plan with the style, or the module to which
    the style was applied. A function outside of a module has no model, and nothing is compared.

    Compared are all parameters of the model that are trained, but for these: parameters that Checks(local=...) names,
    DTensors and parameters of FSDP1 that are cut over these ranks, parameters without memory, and parameters that only
    some ranks have. After steps of ZeroRedundancyOptimizer ranks are equal even if nobody summed the gradients.

    Compares at the attentions number 1, 2, 4, 8, ... of each model, in forwards for a backward; after a recomputation
    in all forwards, because a reentrant checkpoint runs them without gradient. Attentions are counted anew when a
    parameter is trained, or changed, for the first time. So a step with unreduced gradients is noticed in the next
    forward of a new model, and of a layer that is unfrozen or has its first step. After n right attentions it is
    noticed within n more. (Changes are read from version counters. Fused optimizers, ``.data``, and lists of DTensors
    do not count there.) A comparison reads up to 65,536 elements of each parameter and waits for the device.
    Comparisons become rare, so their cost disappears in the long run.

    Communication: none, because the checksum is part of the row that ranks exchange before each attention. Only if
    checksums differ there is one all-gather of 40 bytes for each parameter, after two small ones if names differ too.
    """

    def __init__(self) -> None:
        self._attentions = self._step = 0
        self._counts: WeakKeyDictionary[Any, _Count] = WeakKeyDictionary()
        self._count: _Count | None = None  # of the model that calls, if the call counts
        self._forwards: Forwards | None = None
        self._warned = self._warned_of_rounding = self._recomputes = False
        self._replicas: Mapping[str, Replica] = {}

    def number(self, call: CheckedCall) -> int:
        """A checksum of the parameters of the model that calls; 0 if they are not compared now."""
        group, self._replicas, self._count = call.where[2], {}, None
        if self._warned or group.size() == 1 or torch.compiler.is_exporting():
            return 0
        trains = self._recomputes or call.trains or any(map(_REQUIRES_GRAD, call.tensors))
        if graph_task_id() >= 0:
            self._recomputes = trains
            return 0
        key = _running_model() if call.model is None else call.model
        if key is None or not trains:
            return 0
        self._forwards = self._forwards or state_of(group).get_or_create(Forwards)
        if not self._forwards.open:
            self._step += 1
        count = self._counts.get(key)
        if count is None:  # styles on several parts of a model share its count
            model = _model_of(call)  # a module may have no truth value, as one of torch.compile
            count = self._counts[key] = self._counts.setdefault(key if model is None else model, _Count())
        self._count = count
        if count.step != self._step:
            count.step = self._step
            if count.waiting and count.has_news():
                count.attentions = 0
        # A power of two has no bit in common with the number below it.
        if self._attentions & (self._attentions + 1) and count.attentions & (count.attentions + 1):
            return 0
        if (model := _model_of(call)) is None:
            return 0
        count.follow(model)
        ranks = set(dist.get_process_group_ranks(group))
        self._replicas = replicas_of(model, ranks, group)
        return replica_number([self._replicas])

    def judge(self, numbers: Sequence[int], call: CheckedCall) -> None:
        """Raise or warn on all ranks if their checksums differ. Communication: see the class."""
        count, replicas = self._count, self._replicas
        self._count, self._replicas = None, {}  # the replicas keep parameters alive
        if count is not None:  # here no rank has refused the call, so the counts stay equal on all ranks
            self._attentions += 1
            count.attentions += 1
        if 0 in numbers or len(set(numbers)) == 1:
            return
        if len({number >> 32 for number in numbers}) > 1:
            replicas = shared_replicas(replicas, call.where[2])
        differences = find_differences(replicas, call.where[2], self._attentions)
        if not differences:
            return
        beyond = any(each.beyond_rounding for each in differences.values())
        if beyond and count is not None:
            count.attentions = 0  # compare again at the next attention, in case the caller catches the error
        text = _describe(differences, replicas, beyond, call)
        # A user may turn warnings into errors, and then all ranks must raise.
        start_status(partial(self._report, text, beyond, call.checks.only_warn), Meeting.WARNING, *call.where)()

    def _report(self, text: str, beyond: bool, only_warn: bool) -> StatusRow:
        if beyond and not only_warn:
            raise UnreducedGradientsError(text)
        if beyond or not self._warned_of_rounding:
            self._warned, self._warned_of_rounding = beyond, True
            warnings.warn(text, UnreducedGradientsWarning, stacklevel=2)
        return StatusRow()


@dataclass(slots=True, eq=False)
class _Count:
    """The attentions of a model since a parameter was trained or changed for the first time.

    Attributes:
        attentions: their number.
        step: in which ``waiting`` was looked at. A step begins with the first attention after a backward.
        waiting: the parameters that were not changed yet, with their versions, and whether they are trained.
    """

    attentions: int = 0
    step: int = 0
    waiting: list[tuple[ref[torch.Tensor], int, bool]] = field(default_factory=list)
    _followed: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def follow(self, model: nn.Module) -> None:
        for parameter in dict(named_parameters(model)).values():
            # functional_call puts other tensors into a model for one forward.
            if isinstance(parameter, nn.Parameter) and parameter not in self._followed:
                self._followed[parameter] = None
                self.waiting.append((ref(parameter), version_of(parameter), parameter.requires_grad))

    def has_news(self) -> bool:
        """Whether a parameter is trained, or was changed, for the first time."""
        news, waiting = False, self.waiting
        self.waiting = []
        for reference, version, trained in waiting:
            if (parameter := reference()) is None:
                continue
            changed = version_of(parameter) != version
            news |= changed or parameter.requires_grad != trained
            if not changed:
                self.waiting.append((reference, version, parameter.requires_grad))
        return news


def _running_model() -> nn.Module | None:
    """The outermost module with parameters whose forward runs in this thread. A graph of torch.compile has none."""
    for module, *_ in reversed(running_modules()):
        if next(module.parameters(), None) is not None:
            return module
    return None


def _model_of(call: CheckedCall) -> nn.Module | None:
    model = _running_model()
    return call.model.model() if model is None and call.model is not None else model


def _describe(
    differences: Mapping[str, Difference], replicas: Mapping[str, Replica], beyond: bool, call: CheckedCall
) -> str:
    """The text of an error or warning, equal on all ranks."""
    (name, axis, _), model = call.where, _model_of(call)
    listing = ", ".join(f"{path} {tuple(replicas[path].part.shape)}" for path in [*differences][:_MOST_NAMED])
    listing += ", ..." if len(differences) > _MOST_NAMED else ""
    rest = _APART.format(axis=axis) if beyond else _ROUNDED
    modules = [] if model is None else model.named_modules()
    tables = {f"{path}.weight" for path, module in modules if getattr(module, "max_norm", None)}
    if beyond and differences.keys() <= tables:
        rest = _RENORMALIZED
    return (
        f"{name}: the ranks of mesh axis {axis!r} hold different parameters: {len(differences)} of the "
        f"{len(replicas)} that were compared, {listing}. {rest}{see('Parameters that differ')}"
    )


_APART = (
    "From here on the ranks train different models. Each rank has its own share of every gradient: call "
    "sum_gradients(model, mesh[{axis!r}]) between backward() and the optimizer's step, or use FSDP2 or DDP over a mesh "
    "that contains this axis. Begin with one seed on all ranks. Name parameters that are meant to differ, such as "
    "experts, in checks=Checks(local=[experts])"
)
_RENORMALIZED = (
    "A forward renormalizes the rows of its own tokens alone (max_norm= of nn.Embedding): leave it out, and "
    "renormalize the weight on all ranks after the optimizer's step"
)
_ROUNDED = (
    "They differ by no more than the rounding of sums in another order. Reduce over this axis last, or over all axes "
    "at once, to keep the ranks equal"
)
