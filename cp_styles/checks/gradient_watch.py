"""Detects gradients that were not reduced over the sequence axis: after a step the ranks' parameters differ.

Context parallelism leaves every rank with its own share of each gradient. If an optimizer steps with shares, the
parameters of the ranks become different. There is no other error, and the loss may still fall. Equal parameters have
equal bits. So each rank puts a checksum of its parameters into the all-gather before an attention.

Parameters are compared, not gradients. Training loops reduce gradients in many ways and at many times: FSDP2 and DDP in
the backward, a sum after several backwards, clipping before or after it, a GradScaler that skips a step. In all of them
the parameters must be equal after the step.

[Note: which parameters] The autograd graph behind an attention's inputs contains the parameters in front of the
attention. The remaining parameters are found in the optimizer: if it has stepped one of the former, all its parameters
are compared. So the parameters of another model, which may be wrong, or which an error keeps alive, are not compared.
(Optimizers without a parameter in the graph are ignored. Some wrappers give an optimizer flat parts of equal size on
each rank, whose meaning only the wrapper knows.) Parameters that are DTensors over the sequence axis are meant to
differ, and DTensor reduces their gradients. With FSDP2 the graph contains gathered tensors, which no optimizer has.
Then the optimizers of DTensors are searched, and a parameter that differs must be in one model with the tensor in the
graph.

[Note: compiled] Inside a compiled graph, the autograd graph does not lead from an attention's inputs to parameters.
When the backward of the graph runs, the running node is the node of the whole graph, and leads to the inputs of the
graph. So a backward notes these parameters, and later forwards compare them, until an error has named them. Reentrant
checkpoints are similar: their forward has no graph. Their recomputation notes the parameters in it and in front of it.

[Note: ZeRO] ZeroRedundancyOptimizer steps each parameter on one rank, and sends it to the remaining ranks. So the ranks
have equal parameters even if nobody summed the gradients. In its steps number 1, 2, 4, ... gradients are compared too.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from cp_styles._compat import (
    current_autograd_node,
    graph_task_id,
    running_modules,
    without_dispatch_modes,
)
from cp_styles.checksum import device_checksum, on_host
from cp_styles.comm.agreement import Meeting, StatusRow, start_status
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import mesh_of, shares_ranks, world, world_group
from cp_styles.comm.point_to_point import gather_numbers, reduce_max
from cp_styles.engine.observers import CheckedCall, RankCheck
from cp_styles.replicas import ROUNDING, UnreducedGradientsError, local_ids, named_parameters, sample
from cp_styles.troubleshooting import see

_MOST_NODES = 5000  # nodes of a graph that are searched for parameters
_MOST_OF_GRADIENT = 2**10  # elements of a gradient that are kept, see [Note: ZeRO]
_MOST_COMPARED = 32  # parameters whose values are reduced over the ranks after their checksums differed
_MOST_NAMED = 4  # parameters that an error names
_REQUIRES_GRAD = attrgetter("requires_grad")
T = TypeVar("T")


class UnreducedGradientsWarning(UserWarning):
    """Replaces :class:`UnreducedGradientsError` with ``Checks(only_warn=True)``, and where parameters differ by no more
    than rounding."""


@dataclass(frozen=True)
class Finding:
    """The text of a difference, equal on all ranks. ``beyond_rounding``: parameters differ by more than rounding."""

    text: str
    beyond_rounding: bool


class ParameterWatch(RankCheck):
    """Compares the parameters behind the attentions of one group between its ranks.

    Compares at the attentions number 1, 2, 4, 8, ... that have parameters behind them. The attentions of each model are
    counted, and counted anew when an optimizer has stepped a parameter for the first time. So a step with unreduced
    gradients is noticed in the next forward of a new model, of a new optimizer and of a layer that is unfrozen. After n
    right attentions it is noticed within n more. A comparison reads up to 65,536 elements of each parameter and waits
    for the device. Comparisons become rare, so their cost disappears in the long run.

    Communication: none, because the checksum is part of the row that ranks exchange before each attention. Only if
    checksums differ there is one all-gather of 8 bytes for each parameter, and one all-reduce of at most 32 MiB.
    """

    def __init__(self) -> None:
        follow_optimizers()
        self._attentions = self._backwards = 0
        self._counts_by_model: WeakKeyDictionary[object, _Count] = WeakKeyDictionary()
        self._count = _Count()
        self._first_steps: _FirstSteps | None = None
        self._is_counted = self._warned = self._warned_of_rounding = False
        self._nearest_only = False  # compare the nearest parameter alone: the ranks have found different ones
        self._noted: dict[int, ref[torch.Tensor]] = {}
        self._checksums: list[_Checksum] = []

    def number(self, call: CheckedCall) -> int:
        """A checksum of the parameters behind the tensors of a call; 0 if they are not compared now."""
        tensors, group, model = call.tensors, call.where[2], call.model
        self._checksums = []
        recomputes = graph_task_id() >= 0
        if recomputes:
            self.backward_in_graph(group, tensors)
        trained = any(map(_REQUIRES_GRAD, tensors)) or bool(self._noted)
        self._is_counted = trained and group.size() > 1 and not recomputes and not torch.compiler.is_exporting()
        if not self._is_counted or self._warned:
            return 0
        self._count = self._counts_by_model.setdefault(self if model is None else model, _Count())
        if self._first_steps is None:
            self._first_steps = state_of(world_group()).get_or_create(_FirstSteps)
        if self._count.parameters != self._first_steps.parameters:
            self._count.parameters, self._count.attentions = self._first_steps.parameters, 0
        # A power of two has no bit in common with the number below it.
        if self._attentions & (self._attentions + 1) and self._count.attentions & (self._count.attentions + 1):
            return 0
        with torch.no_grad():
            chosen = self._choose_parameters(list(_find_parameters(tensors)), group)
            sums = on_host([device_checksum(sample(entry.part)) for entry in chosen])
        self._checksums = list(zip(chosen, sums, strict=True))
        if not chosen:
            return 0
        which = zlib.crc32(repr([(tuple(entry.part.shape), entry.part.dtype) for entry in chosen]).encode())
        # Sorted, because the order in the graph differs where one rank has one more copy in it, for its strides.
        return (which % 2**30 + 1) << 32 | zlib.crc32(repr(sorted(sums)).encode())

    def backward_in_graph(self, group: dist.ProcessGroup, recomputed: Sequence[torch.Tensor] = ()) -> None:
        """Note, weakly, the parameters behind the node whose backward is running, and behind ``recomputed`` tensors,
        which a reentrant checkpoint has detached from the graph. See [Note: compiled].

        Only in the backwards number 1, 2, 4, 8, .... No communication.
        """
        self._backwards += 1
        node = current_autograd_node()
        if node is not None and group.size() > 1 and not self._backwards & (self._backwards - 1):
            self._noted = {key: reference for key, reference in self._noted.items() if reference() is not None}
            parameters = *_find_parameters(recomputed), *_walk_to_leaves([node])
            self._noted.update((id(parameter), ref(parameter)) for parameter in parameters)

    def judge(self, numbers: Sequence[int], call: CheckedCall) -> None:
        """Raise or warn on all ranks if their checksums differ. Communication: see the class."""
        if self._is_counted:  # here no rank has refused the call, so the counts stay equal on all ranks
            self._attentions += 1
            self._count.attentions += 1
        if any(numbers) and (finding := self._find_difference(numbers, *call.where)) is not None:
            # A user may turn warnings into errors, and then all ranks must raise.
            start_status(partial(self._report, finding, call.checks.only_warn), Meeting.WARNING, *call.where)()

    def _find_difference(
        self, numbers: Sequence[int], name: str, axis: str, group: dist.ProcessGroup
    ) -> Finding | None:
        checksums, self._checksums = self._checksums, []  # the list keeps parameters alive
        if 0 in numbers or len(set(numbers)) == 1:
            return None
        if len({number >> 32 for number in numbers}) > 1:
            if not self._nearest_only:
                self._nearest_only = True
                self._count_attentions(-1)  # compare again at the next attention
            return None
        with torch.no_grad(), without_dispatch_modes():
            finding = self._examine(checksums, name, axis, group)
        if finding is not None and finding.beyond_rounding:
            # Compare again at the next attention, in case the caller catches this error. Forget the noted parameters:
            # they stay different, even if the caller corrects the program and makes a new model.
            self._count_attentions(-self._is_counted)
            self._noted, self._backwards = {}, 0
        return finding

    def _count_attentions(self, attentions: int) -> None:
        self._attentions += attentions
        self._count.attentions += attentions

    def _report(self, finding: Finding, only_warn: bool) -> StatusRow:
        if finding.beyond_rounding and not only_warn:
            raise UnreducedGradientsError(finding.text)
        if not finding.beyond_rounding and self._warned_of_rounding:
            return StatusRow()
        self._warned, self._warned_of_rounding = finding.beyond_rounding, True
        warnings.warn(finding.text, UnreducedGradientsWarning, stacklevel=2)
        return StatusRow()

    def _choose_parameters(self, behind: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[_ComparedPart]:
        """The parameters behind an attention, and all parameters of their optimizers."""
        nearest, excluded = behind[0] if behind else None, local_ids(state_of(group))
        if self._nearest_only:
            return list(_select_comparable(behind, group, excluded))[:1]
        behind = [*behind, *_list_alive(self._noted.values())]
        ids = set(map(id, behind))
        # Parameters of optimizers come first: their order is the same on all ranks.
        stepped = [(optimizer, _list_trained(optimizer)) for optimizer in _find_optimizers()]
        of_this_model = [optimizer for optimizer, trained in stepped if not ids.isdisjoint(map(id, trained))]
        parameters = [x for optimizer, trained in stepped if optimizer in of_this_model for x in trained]
        gathered = not ids.issubset(map(id, parameters))
        # FSDP1 shards its flat parameters, except the nearest one, which it has gathered for this forward.
        parameters += [x for x in behind if x is nearest or not isinstance(x, FlatParameter)]
        chosen = list(_select_comparable(parameters, group, excluded))
        for optimizer, trained in stepped:
            if optimizer in of_this_model:
                chosen += _list_gradients(optimizer, excluded)
            elif gathered and any(mesh_of(x) is not None for x in trained):
                chosen += _select_comparable(trained, group, excluded, model_tensors=(behind[0], *trained))
        return chosen

    def _examine(self, checksums: list[_Checksum], name: str, axis: str, group: dist.ProcessGroup) -> Finding | None:
        columns = zip(*gather_numbers([number for _, number in checksums], group), strict=True)
        differing = [entry for (entry, _), column in zip(checksums, columns, strict=True) if len(set(column)) > 1]
        # Parameters of one optimizer share these tensors, so search the modules once for each optimizer.
        optimizers = {id(entry.model_tensors): entry.model_tensors for entry in differing if entry.model_tensors}
        of_other_models = {key for key, tensors in optimizers.items() if not _are_of_one_model(tensors)}
        differing = [entry for entry in differing if id(entry.model_tensors) not in of_other_models]
        if not differing:
            return None
        compared = differing[:: -(-len(differing) // _MOST_COMPARED)]
        values = [sample(entry.part).double() for entry in compared]
        spread = reduce_max([x for value in values for x in (value, -value)], group)
        tolerance = ROUNDING * math.sqrt(self._attentions)
        beyond = False
        for most, least in zip(spread[::2], spread[1::2], strict=True):
            difference, norm = (most + least).norm().item(), torch.maximum(most.abs(), least.abs()).norm().item()
            beyond = beyond or not difference <= tolerance * norm  # true for nan
        entries = differing[:_MOST_NAMED]
        paths = _name_parameters()
        names = [paths.get(id(entry.parameter), "one of shape") for entry in entries]
        listing = ", ".join(f"{path} {tuple(entry.shape)}" for path, entry in zip(names, entries, strict=True))
        listing += ", ..." if len(differing) > _MOST_NAMED else ""
        but, so = _GRADIENTS if all(entry.is_gradient for entry in differing) else _PARAMETERS
        rest = so + _REMEDY.format(axis=axis) if beyond else _ROUNDED
        tables = [x for module, *_ in running_modules() for x in module.modules() if getattr(x, "max_norm", None)]
        if beyond and {id(entry.parameter) for entry in differing}.issubset(id(x.weight) for x in tables):
            rest = _RENORMALIZED
        text = (
            f"{name}: the ranks of mesh axis {axis!r} {but}hold different parameters: {len(differing)} of the "
            f"{len(checksums)} that were compared, {listing}. {rest}{see('Parameters that differ')}"
        )
        return Finding(text, beyond)


_PARAMETERS = ("", "From here on the ranks train different models. ")
_GRADIENTS = ("would, without ZeroRedundancyOptimizer, ", "They made a step with different gradients. ")
_REMEDY = (
    "Each rank has its own share of every gradient: call sum_gradients(model, mesh[{axis!r}]) between backward() and "
    "the optimizer's step, or use FSDP2 or DDP over a mesh that contains this axis. Begin with one seed on all ranks. "
    "Name parameters that are meant to differ, such as experts, in checks=Checks(local=[experts])"
)
_RENORMALIZED = (
    "A forward renormalizes the rows of its own tokens alone (max_norm= of nn.Embedding): leave it out, and "
    "renormalize the weight on all ranks after the optimizer's step"
)
_ROUNDED = (
    "They differ by no more than the rounding of sums in another order. Reduce over this axis last, or over all axes "
    "at once, to keep the ranks equal"
)


@dataclass(frozen=True, eq=False)
class _ComparedPart:
    """The part of a parameter that is compared.

    Attributes:
        parameter: the parameter.
        part: this rank's part of it, or elements of its gradient.
        is_gradient: whether it is the gradient, see [Note: ZeRO].
        model_tensors: a tensor behind the attention, and the parameters of the optimizer, which must be in one model
            with it; empty if the parameter is known to be in this model.
    """

    parameter: torch.Tensor
    part: torch.Tensor
    is_gradient: bool = False
    model_tensors: tuple[torch.Tensor, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape if self.is_gradient else self.part.shape


_Checksum = tuple[_ComparedPart, int]
"""A compared part, and its checksum."""


@dataclass(slots=True, eq=False)
class _Count:
    """The attentions of a model since optimizers of this rank had stepped ``parameters`` different parameters."""

    attentions: int = 0
    parameters: int = 0


@dataclass(eq=False)
class _FirstSteps:
    """The number of different parameters that the optimizers of this rank have stepped."""

    parameters: int = 0


@dataclass(eq=False)
class _Steps:
    """Facts about an optimizer that has made a step.

    Attributes:
        world: the default process group of the rank that stepped. (Ranks may be threads.)
        number: the number of steps.
        stepped: the ids of the parameters that had a gradient in a step.
        gradients: the parameters and elements of their gradients, see [Note: ZeRO].
    """

    world: ref[dist.ProcessGroup] | None
    number: int = 0
    stepped: set[int] = field(default_factory=set)
    gradients: Sequence[tuple[ref[torch.Tensor], torch.Tensor]] = ()


# The optimizers that have made a step, in order.
_stepped: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()


@functools.cache
def follow_optimizers() -> None:
    """From now on, note which optimizers make a step. Registers a hook of torch, once in a process."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    steps, default_group = _stepped.get(optimizer), world()
    if steps is None or steps.world != default_group:
        steps = _stepped[optimizer] = _Steps(default_group)
    steps.number += 1
    if default_group is not None and (everyone := default_group()) is not None:
        stepped = {id(x) for part in optimizer.param_groups for x in part["params"] if x.grad is not None}
        state_of(everyone).get_or_create(_FirstSteps).parameters += len(stepped - steps.stepped)
        steps.stepped |= stepped
    package = sys.modules.get("torch.distributed.optim")  # a slow import; a program with such an optimizer has made it
    zero = package is not None and isinstance(optimizer, package.ZeroRedundancyOptimizer)
    if zero and not steps.number & (steps.number - 1):
        with torch.no_grad(), without_dispatch_modes():
            steps.gradients = [
                (ref(x), sample(x.grad, _MOST_OF_GRADIENT).clone())
                for x in _list_trained(optimizer)
                if x.grad is not None and x.grad.layout == torch.strided and mesh_of(x.grad) is None
            ]


def _list_trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [x for part in optimizer.param_groups for x in part["params"] if x.requires_grad]


def _list_gradients(optimizer: Optimizer, excluded: set[int]) -> Iterator[_ComparedPart]:
    for reference, elements in _stepped[optimizer].gradients:
        parameter = reference()
        if parameter is not None and id(parameter) not in excluded:
            yield _ComparedPart(parameter, elements, is_gradient=True)


def _find_optimizers() -> list[Optimizer]:
    """The optimizers of this rank, the largest first."""
    # The optimizer inside of ZeRO has a part of the parameters, which differs between ranks, so it comes last.
    # keyrefs() is a list: ranks that are threads add optimizers of their own meanwhile.
    optimizers, group = _list_alive(_stepped.keyrefs()), world()
    optimizers = [x for x in optimizers if group is not None and (steps := _stepped.get(x)) and steps.world == group]
    return sorted(optimizers, key=lambda optimizer: -sum(len(group["params"]) for group in optimizer.param_groups))


def _list_alive(references: Iterable[ref[T]]) -> list[T]:
    return [item for reference in references if (item := reference()) is not None]


def _find_parameters(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Trained parameters from which ``tensors`` were computed, the nearest first."""
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            yield tensor
    yield from _walk_to_leaves([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])


def _walk_to_leaves(nodes: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Parameters to which ``nodes`` of the autograd graph lead, the nearest first."""
    # The node of a compiled graph leads to its parameters in the order of their use in the graph.
    waiting = deque(nodes)
    visited = set(waiting)
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        # A leaf that is not a parameter is an input, and each rank has its part of it.
        if isinstance(leaf, nn.Parameter):
            yield leaf
        following = [after for after, _ in node.next_functions if after is not None and after not in visited]
        visited.update(following)
        waiting.extend(following)


def _select_comparable(
    parameters: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    excluded: set[int],
    model_tensors: tuple[torch.Tensor, ...] = (),
) -> Iterator[_ComparedPart]:
    """The parameters that should be equal on all ranks of ``group``, each with the part that this rank holds."""
    is_sharded: dict[Any, bool] = {}
    for parameter in {id(x): x for x in parameters}.values():
        part, mesh = parameter.detach(), mesh_of(parameter)
        if mesh is not None:
            if mesh not in is_sharded:
                is_sharded[mesh] = shares_ranks(mesh, group)
            if is_sharded[mesh]:
                continue  # the shards are meant to differ, and DTensor reduces their gradients
            part = part.to_local()  # pyright: ignore[reportAttributeAccessIssue] - it is a DTensor
        # FSDP frees the memory of gathered parameters after their use.
        if id(parameter) not in excluded and part.numel() and part.untyped_storage().nbytes():
            yield _ComparedPart(parameter, part, model_tensors=model_tensors)


def _are_of_one_model(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the first tensor may be in one model with some of the remaining tensors."""
    names = _name_parameters()
    return id(tensors[0]) not in names or any(id(tensor) in names for tensor in tensors[1:])


def _name_parameters() -> dict[int, str]:
    """The names of the parameters, also of sharded ones, of the model whose forward runs in this thread, by id."""
    # Not by gc.get_objects(): it holds what ends in other threads meanwhile, such as their table of torch's caches,
    # which torch then destroys without Python's lock.
    modules = running_modules()
    if not modules:
        return {}
    model = modules[-1][0]
    return {id(parameter): name for name, parameter in reversed(named_parameters(model))}
