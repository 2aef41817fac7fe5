"""Detects gradients that were not reduced over the sequence axis: after a step the ranks' parameters differ.

Context parallelism leaves every rank with its own share of each gradient. If an optimizer steps with shares, the
parameters of the ranks become different. There is no other error, and the loss may still fall. Equal parameters have
equal bits. So each rank puts a checksum of its parameters into the all-gather before an attention.

Parameters are compared, not gradients. Training loops reduce gradients in many ways and at many times: FSDP2 and DDP in
the backward, a sum after several backwards, clipping before or after it, a GradScaler that skips a step. In all of them
the parameters must be equal after the step.

[Note: which parameters] The autograd graph behind an attention's inputs contains parameters. It contains only those in
front of the attention. The other ones are found in the optimizer: if it has stepped one of these parameters, all its
parameters are compared. So a model is not asked about the parameters of another one, which may be wrong, or which an
error keeps alive. (Other optimizers are ignored. Some wrappers give an optimizer flat parts, of equal size on each
rank, whose meaning only the wrapper knows.) Parameters that are DTensors over the sequence axis are meant to differ,
and DTensor reduces their gradients. With FSDP2 the graph contains tensors that it has gathered, which no optimizer
knows. Then the optimizers of DTensors are asked, and what differs must be in one model with the tensor in the graph.

[Note: compiled] Inside a compiled graph, the autograd graph does not lead from an attention's inputs to parameters.
When the backward of the graph runs, the running node is the node of the whole graph, and leads to the inputs of the
graph. So a backward notes these parameters, and later forwards compare them, until an error has named them. Reentrant
checkpoints are similar: their forward has no graph. Their recomputation notes what is in it and in front of it.

[Note: ZeRO] ZeroRedundancyOptimizer steps each parameter on one rank, and sends it to the remaining ranks. So the ranks
have equal parameters even if nobody summed the gradients. In its steps number 1, 2, 4, ... gradients are compared too.
"""

from __future__ import annotations

import functools
import gc
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

from cp_styles._compat import current_autograd_node, graph_task_id, without_dispatch_modes
from cp_styles.checksum import device_checksum, on_host
from cp_styles.comm.agreement import Meeting, StatusRow, start_status
from cp_styles.comm.checks import Checks
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import mesh_of, shares_ranks, world, world_group
from cp_styles.comm.point_to_point import gather_numbers, reduce_max
from cp_styles.engine.observers import CheckedCall, RankCheck
from cp_styles.troubleshooting import see

_MOST_NODES = 5000  # of a graph that are asked for their parameter
_MOST_ELEMENTS = 2**16  # of a parameter that are compared, spread over it
_MOST_OF_GRADIENT = 2**10  # elements of a gradient that are kept, see [Note: ZeRO]
_MOST_COMPARED = 32  # parameters whose values travel once they are known to differ
_MOST_NAMED = 4
_REQUIRES_GRAD = attrgetter("requires_grad")
T = TypeVar("T")
# By how much float32 sums in another order may change parameters, relative to their norm, in one step. Steps add up
# as a random walk does.
_ROUNDING = 64 * torch.finfo(torch.float32).eps


class UnreducedGradientsError(ValueError):
    """The ranks of the sequence axis hold different parameters: gradients were not reduced over it."""


class UnreducedGradientsWarning(UserWarning):
    """The warning in place of :class:`UnreducedGradientsError`, where ``Checks(only_warn=True)`` asks for a warning; or
    parameters that differ by no more than rounding."""


@dataclass(frozen=True)
class Finding:
    """The result of a comparison, equal on all ranks. ``beyond_rounding``: parameters differ by more than that."""

    text: str
    beyond_rounding: bool


class ParameterWatch(RankCheck):
    """Compares the parameters behind the attentions of one group between its ranks.

    Compares at the attentions number 1, 2, 4, 8, ... that have parameters behind them. The attentions of each model are
    counted, and counted anew when an optimizer has stepped a parameter for the first time. So a step with unreduced
    gradients is noticed in the next forward of a new model, of a new optimizer and of a layer that is unfrozen; and
    within n attentions after n right ones. A comparison reads up to 65,536 elements of each parameter and waits for the
    device. Comparisons become rare, so their cost disappears in the long run.

    Communication: none, because the checksum is part of the row that ranks exchange before each attention. Only if
    checksums differ there is one all-gather of 8 bytes for each parameter, and one all-reduce of at most 32 MiB.
    """

    def __init__(self) -> None:
        follow_optimizers()
        self._attentions = self._backwards = 0
        self._counts_of: WeakKeyDictionary[object, _Count] = WeakKeyDictionary()
        self._count = _Count()
        self._news: _News | None = None
        self._counts = self._warned = self._warned_of_rounding = False
        self._nearest_only = False  # where ranks do not know the same parameters
        self._known: dict[int, ref[torch.Tensor]] = {}
        self._local: dict[int, ref[Any]] = {}
        self._looked_at: list[_LookedAt] = []

    def learn(self, checks: Checks) -> None:
        """Leave out what is meant to differ, see :class:`~cp_styles.comm.checks.Checks`."""
        if checks.local:
            self._local.update((id(item), ref(item)) for item in checks.local)

    def number(self, call: CheckedCall) -> int:
        """A checksum of the parameters behind the tensors of a call; 0 if they are not compared now."""
        tensors, group, model = call.tensors, call.where[2], call.model
        self._looked_at = []
        recomputes = graph_task_id() >= 0
        if recomputes:
            self.backward_in_graph(group, tensors)
        trained = any(map(_REQUIRES_GRAD, tensors)) or bool(self._known)
        self._counts = trained and group.size() > 1 and not recomputes and not torch.compiler.is_exporting()
        if not self._counts or self._warned:
            return 0
        self._count = self._counts_of.setdefault(self if model is None else model, _Count())
        if self._news is None:
            self._news = state_of(world_group()).get_or_create(_News)
        if self._count.parameters != self._news.parameters:
            self._count.parameters, self._count.attentions = self._news.parameters, 0
        # A power of two has no bit in common with the number below it.
        if self._attentions & (self._attentions + 1) and self._count.attentions & (self._count.attentions + 1):
            return 0
        with torch.no_grad():
            behind = list(_parameters_behind(tensors))
            local = self._ids_of_local()
            chosen = list(_comparable(behind, group, local))[:1] if self._nearest_only else self._all(behind, group)
            sums = on_host([device_checksum(_sampled(entry.part)) for entry in chosen])
        self._looked_at = list(zip(chosen, sums, strict=True))
        if not chosen:
            return 0
        which = zlib.crc32(repr([(tuple(entry.part.shape), entry.part.dtype) for entry in chosen]).encode())
        # Sorted: what is nearest in the graph differs where one rank has a copy more in it, for its strides.
        return (which % 2**30 + 1) << 32 | zlib.crc32(repr(sorted(sums)).encode())

    def backward_in_graph(self, group: dist.ProcessGroup, recomputed: Sequence[torch.Tensor] = ()) -> None:
        """Note, weakly, the parameters behind the node whose backward is running. See [Note: compiled].

        Also the parameters behind ``recomputed`` tensors, which a reentrant checkpoint has detached from the graph,
        too.

        It does so at the backwards number 1, 2, 4, 8, .... No communication.
        """
        self._backwards += 1
        node = current_autograd_node()
        if node is not None and group.size() > 1 and not self._backwards & (self._backwards - 1):
            self._known = {key: reference for key, reference in self._known.items() if reference() is not None}
            parameters = *_parameters_behind(recomputed), *_leaves_behind([node])
            self._known.update((id(parameter), ref(parameter)) for parameter in parameters)

    def judge(self, numbers: Sequence[int], call: CheckedCall) -> None:
        """Raise or warn on all ranks if their checksums differ. Communication: see the class."""
        if self._counts:  # added here, where no rank has refused, so that the ranks' numbers are equal
            self._attentions += 1
            self._count.attentions += 1
        if any(numbers) and (finding := self._compared(numbers, *call.where)) is not None:
            # A user may turn warnings into errors, and then all ranks must raise.
            start_status(partial(self._tell, finding, call.checks.only_warn), Meeting.WARNING, *call.where)()

    def _compared(self, numbers: Sequence[int], name: str, axis: str, group: dist.ProcessGroup) -> Finding | None:
        looked_at, self._looked_at = self._looked_at, []  # it keeps parameters alive
        if 0 in numbers or len(set(numbers)) == 1:
            return None
        if len({number >> 32 for number in numbers}) > 1:
            if not self._nearest_only:
                self._nearest_only = True
                self._add(-1)  # the next attention looks again
            return None
        with torch.no_grad(), without_dispatch_modes():
            finding = self._examine(looked_at, name, axis, group)
        if finding is not None and finding.beyond_rounding:
            self._add(-self._counts)  # whoever goes on is told again
            self._known, self._backwards = {}, 0  # and the program that is corrected is not
        return finding

    def _add(self, attentions: int) -> None:
        self._attentions += attentions
        self._count.attentions += attentions

    def _tell(self, finding: Finding, only_warn: bool) -> StatusRow:
        if finding.beyond_rounding and not only_warn:
            raise UnreducedGradientsError(finding.text)
        if not finding.beyond_rounding and self._warned_of_rounding:
            return StatusRow()
        self._warned, self._warned_of_rounding = finding.beyond_rounding, True
        warnings.warn(finding.text, UnreducedGradientsWarning, stacklevel=2)
        return StatusRow()

    def _all(self, behind: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[_Compared]:
        """The parameters behind an attention, and all parameters of their optimizers. These come first, in an order
        that is the same on all ranks."""
        nearest = behind[0] if behind else None
        behind = [*behind, *_alive(self._known.values())]
        ids, left_out = set(map(id, behind)), self._ids_of_local()
        stepped = [(optimizer, _trained(optimizer)) for optimizer in _optimizers_here()]
        of_this_model = [optimizer for optimizer, trained in stepped if not ids.isdisjoint(map(id, trained))]
        parameters = [x for optimizer, trained in stepped if optimizer in of_this_model for x in trained]
        gathered = not ids.issubset(map(id, parameters))
        # FSDP1 cuts its flat parameters by itself; the nearest one is whole.
        parameters += [x for x in behind if x is nearest or not isinstance(x, FlatParameter)]
        chosen = list(_comparable(parameters, group, left_out))
        for optimizer, trained in stepped:
            if optimizer in of_this_model:
                chosen += _gradients_of(optimizer, left_out)
            elif gathered and any(mesh_of(x) is not None for x in trained):
                chosen += _comparable(trained, group, left_out, beside=(behind[0], *trained))
        return chosen

    def _ids_of_local(self) -> set[int]:
        return {
            id(parameter)
            for item in _alive(self._local.values())
            for parameter in (item.parameters() if isinstance(item, nn.Module) else [item])
        }

    def _examine(self, looked_at: list[_LookedAt], name: str, axis: str, group: dist.ProcessGroup) -> Finding | None:
        columns = zip(*gather_numbers([number for _, number in looked_at], group), strict=True)
        differing = [entry for (entry, _), column in zip(looked_at, columns, strict=True) if len(set(column)) > 1]
        optimizers = {id(entry.beside): entry.beside for entry in differing if entry.beside}
        of_others = {key for key, beside in optimizers.items() if not _of_one_model(beside)}
        differing = [entry for entry in differing if id(entry.beside) not in of_others]
        if not differing:
            return None
        few = differing[:: -(-len(differing) // _MOST_COMPARED)]
        values = [_sampled(entry.part).double() for entry in few]
        spread = reduce_max([x for value in values for x in (value, -value)], group)
        tolerance = _ROUNDING * math.sqrt(self._attentions)
        beyond = False
        for most, least in zip(spread[::2], spread[1::2], strict=True):
            difference, norm = (most + least).norm().item(), torch.maximum(most.abs(), least.abs()).norm().item()
            beyond = beyond or not difference <= tolerance * norm  # nan differs
        named = differing[:_MOST_NAMED]
        names = [path for _, path in places_of([entry.parameter for entry in named])]
        listed = ", ".join(f"{path} {tuple(entry.shape)}" for path, entry in zip(names, named, strict=True))
        listed += ", ..." if len(differing) > _MOST_NAMED else ""
        but, so = _GRADIENTS if all(entry.is_gradient for entry in differing) else _PARAMETERS
        rest = so + _REMEDY.format(axis=axis) if beyond else _ROUNDED
        text = (
            f"{name}: the ranks of mesh axis {axis!r} {but}hold different parameters: {len(differing)} of the "
            f"{len(looked_at)} that were compared, {listed}. {rest}{see('Parameters that differ')}"
        )
        return Finding(text, beyond)


_PARAMETERS = ("", "From here on the ranks train different models. ")
_GRADIENTS = ("would, without ZeroRedundancyOptimizer, ", "They made a step with different gradients. ")
_REMEDY = (
    "Each rank has its own share of every gradient: call sum_gradients(model, mesh[{axis!r}]) between backward() and "
    "the optimizer's step, or use FSDP2 or DDP over a mesh that contains this axis. Begin with one seed on all ranks. "
    "Name parameters that are meant to differ, such as experts, in checks=Checks(local=[experts])"
)
_ROUNDED = (
    "They differ by no more than sums in another order do. Reduce over this axis last, or over all axes at once, to "
    "keep the ranks equal"
)


@dataclass(frozen=True, eq=False)
class _Compared:
    """The parts of a parameter that are compared.

    Attributes:
        parameter: the parameter.
        part: this rank's part of it, or elements of its gradient.
        is_gradient: see [Note: ZeRO].
        beside: a tensor behind the attention, and the parameters of the optimizer, which must be in one model with it;
            empty if that is known.
    """

    parameter: torch.Tensor
    part: torch.Tensor
    is_gradient: bool = False
    beside: tuple[torch.Tensor, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape if self.is_gradient else self.part.shape


_LookedAt = tuple[_Compared, int]
"""The compared tensors, and their checksum."""


@dataclass(slots=True, eq=False)
class _Count:
    """The attentions of a model since ``parameters`` parameters had been stepped on this rank."""

    attentions: int = 0
    parameters: int = 0


@dataclass(eq=False)
class _News:
    """How many parameters the optimizers of this rank have stepped for the first time."""

    parameters: int = 0


@dataclass(eq=False)
class _Steps:
    """Facts about an optimizer that has made a step.

    Attributes:
        world: where it did. (Ranks may be threads.)
        number: of steps.
        stepped: the ids of the parameters for which it had a gradient.
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
    steps, here = _stepped.get(optimizer), world()
    if steps is None or steps.world != here:
        steps = _stepped[optimizer] = _Steps(here)
    steps.number += 1
    if here is not None and (everyone := here()) is not None:
        stepped = {id(x) for part in optimizer.param_groups for x in part["params"] if x.grad is not None}
        state_of(everyone).get_or_create(_News).parameters += len(stepped - steps.stepped)
        steps.stepped |= stepped
    package = sys.modules.get("torch.distributed.optim")  # slow to import, and who has such an optimizer has done it
    zero = package is not None and isinstance(optimizer, package.ZeroRedundancyOptimizer)
    if zero and not steps.number & (steps.number - 1):
        with torch.no_grad(), without_dispatch_modes():
            steps.gradients = [
                (ref(x), _sampled(x.grad, _MOST_OF_GRADIENT).clone())
                for x in _trained(optimizer)
                if x.grad is not None and x.grad.layout == torch.strided and mesh_of(x.grad) is None
            ]


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [x for part in optimizer.param_groups for x in part["params"] if x.requires_grad]


def _gradients_of(optimizer: Optimizer, left_out: set[int]) -> Iterator[_Compared]:
    for reference, elements in _stepped[optimizer].gradients:
        parameter = reference()
        if parameter is not None and id(parameter) not in left_out:
            yield _Compared(parameter, elements, is_gradient=True)


def _optimizers_here() -> list[Optimizer]:
    """The optimizers of this rank, those with more parameters first. (Inside of ZeRO each rank has one with a part.)"""
    # keyrefs() is a list: ranks that are threads add optimizers of their own meanwhile.
    optimizers, here = _alive(_stepped.keyrefs()), world()
    optimizers = [x for x in optimizers if here is not None and (steps := _stepped.get(x)) and steps.world == here]
    return sorted(optimizers, key=lambda optimizer: -sum(len(group["params"]) for group in optimizer.param_groups))


def _alive(references: Iterable[ref[T]]) -> list[T]:
    return [thing for reference in references if (thing := reference()) is not None]


def _parameters_behind(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Trained parameters that ``tensors`` were computed from, nearest first."""
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            yield tensor
    yield from _leaves_behind([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])


def _leaves_behind(nodes: Sequence[Any]) -> Iterator[torch.Tensor]:
    """As above, from nodes of the autograd graph. For the node of a compiled graph, in the order of use in it."""
    waiting = deque(nodes)
    seen = set(waiting)
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        # A leaf that is not a parameter is an input, of which each rank has its part.
        if isinstance(leaf, nn.Parameter):
            yield leaf
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting.extend(following)


def _comparable(
    parameters: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    left_out: set[int],
    beside: tuple[torch.Tensor, ...] = (),
) -> Iterator[_Compared]:
    """The parameters that should be equal on all ranks of ``group``, each with the part that this rank holds."""
    spread: dict[Any, bool] = {}
    for parameter in {id(x): x for x in parameters}.values():
        part, mesh = parameter.detach(), mesh_of(parameter)
        if mesh is not None:
            if mesh not in spread:
                spread[mesh] = shares_ranks(mesh, group)
            if spread[mesh]:
                continue  # its parts are meant to differ, and DTensor reduces its gradient
            part = part.to_local()  # pyright: ignore[reportAttributeAccessIssue] - it is a DTensor
        # FSDP frees what it gathered.
        if id(parameter) not in left_out and part.numel() and part.untyped_storage().nbytes():
            yield _Compared(parameter, part, beside=beside)


def _sampled(part: torch.Tensor, most: int = _MOST_ELEMENTS) -> torch.Tensor:
    """At most so many elements of a parameter, at equal distances."""
    flat = part.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))]


def _of_one_model(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the first tensor may be in one model with some of the remaining tensors."""
    first, *others = [model for model, _ in places_of(tensors)] or [None]
    return first is None or first in others or not any(others)


def places_of(parameters: Sequence[torch.Tensor]) -> list[tuple[int | None, str]]:
    """The models, and the names in them, of parameters of the modules that are alive.

    A model is the id of the module around all others. A parameter that no module has is (None, "one of shape").
    """
    wanted = {id(parameter) for parameter in parameters}
    names: dict[int, tuple[nn.Module, str]] = {}
    parents: dict[int, tuple[nn.Module, str]] = {}
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or "_modules" not in vars(module):
            continue
        for key, parameter in module._parameters.items():
            if id(parameter) in wanted:
                names.setdefault(id(parameter), (module, key))
        for key, child in module._modules.items():
            parents.setdefault(id(child), (module, key))

    def place(parameter: torch.Tensor) -> tuple[int | None, str]:
        if id(parameter) not in names:
            return None, "one of shape"
        module, name = names[id(parameter)]
        while id(module) in parents:
            module, key = parents[id(module)]
            name = f"{key}.{name}"
        return id(module), name

    return [place(parameter) for parameter in parameters]
