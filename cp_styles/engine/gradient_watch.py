"""Notices parameters whose gradients nobody reduces over the sequence axis: after a step they differ between ranks.

Context parallelism leaves every rank with its own share of each gradient. If an optimizer steps on shares, the ranks'
parameters come apart, and nothing fails: the loss goes on falling. But ranks with equal parameters have equal bits. So
each rank puts a checksum of its parameters into the all-gather that every attention makes anyway.

Parameters are compared, and not gradients: who reduces gradients, and when, is the training loop's affair (FSDP2 and
DDP in the backward, a sum after several backwards, a clip before or after it, a GradScaler that skips a step). Whatever
the loop does, after its step the ranks must hold the same.

[Note: which parameters] Behind an attention's inputs the autograd graph names parameters, but only those in front of
the attention, and with FSDP2 only those gathered just now. The optimizer names the rest: where it has stepped one of
these, or DTensors, its other parameters are compared as well. (Others are left alone: some wrappers give an optimizer
flat parts, of equal size on each rank, of what they alone know.) Parameters that are DTensors over the sequence axis
differ by right, and DTensor reduces their gradients.

[Note: compiled] Inside a compiled graph nothing leads from an attention's inputs back to parameters. But when its
backward runs, the node that runs is the graph's, and that leads to what the graph was given. So a backward remembers
these parameters, and the forwards after it look at them.
"""

from __future__ import annotations

import functools
import gc
import math
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from cp_styles._compat import current_autograd_node, current_graph_task, is_traced, without_dispatch_modes
from cp_styles.comm.checksum import device_checksum
from cp_styles.comm.groups import shares_ranks, world
from cp_styles.comm.point_to_point import gather_numbers, largest_over
from cp_styles.troubleshooting import see

_MOST_NODES = 5000  # of a graph that are asked for their parameter
_MOST_ELEMENTS = 2**16  # of a parameter that are compared, spread over it
_MOST_COMPARED = 32  # parameters whose values travel once they are known to differ
_MOST_NAMED = 4
# By how much float32 sums in another order may move parameters apart, relative to their norm, in one step. Steps add up
# as a random walk does.
_ROUNDING = 64 * torch.finfo(torch.float32).eps


class UnreducedGradientsError(ValueError):
    """The ranks of the sequence axis hold different parameters: gradients were not reduced over it."""


class UnreducedGradientsWarning(UserWarning):
    """The same as :class:`UnreducedGradientsError`, where ``GradientCheck(only_warn=True)`` asks for a warning; or
    parameters that differ by no more than rounding."""


@dataclass(frozen=True, eq=False)
class GradientCheck:
    """What to do about parameters that differ between the ranks of the sequence axis.

    By default all ranks raise :class:`UnreducedGradientsError` at an attention of the first step after the one in which
    gradients were not reduced, or only in part.

    Args:
        only_warn: give an :class:`UnreducedGradientsWarning` instead, once a process group.
        local: parameters that differ between these ranks by right, such as experts that live on one rank: modules,
            with all that is in them, and single parameters. They are left out of the comparison for all attention over
            these ranks. (DTensors that are cut over these ranks need not be named.)
    """

    only_warn: bool = False
    local: tuple[nn.Module | nn.Parameter, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", tuple(self.local))
        for each in self.local:
            if not isinstance(each, (nn.Module, nn.Parameter)):
                raise TypeError(f"GradientCheck(local=...) takes modules and parameters, got {type(each).__name__}")


RAISE = GradientCheck()


@dataclass(frozen=True)
class Finding:
    """What the ranks found, the same on all of them: ``apart`` is beyond rounding."""

    text: str
    apart: bool


class ParameterWatch:
    """Compares the parameters behind the attentions of one group between its ranks, now and then.

    At the attentions number 1, 2, 4, 8, ... that have parameters behind them: a step that left the ranks apart is seen
    before as many forwards again have gone by, and mostly in the next one. A look reads up to 65,536 elements of each
    parameter and waits for the device; in the long run that costs nothing. It sends nothing: the number travels in the
    row that ranks exchange before each attention. Only where the numbers differ there is one all-gather of 8 bytes a
    parameter, and one all-reduce of at most 32 MiB.
    """

    def __init__(self) -> None:
        follow_optimizers()
        self._attentions = self._backwards = 0
        self._counts = self._warned = self._warned_of_rounding = False
        self._nearest_only = False  # where ranks do not know the same parameters
        self._known: dict[int, ref[torch.Tensor]] = {}
        self._local: dict[int, ref[Any]] = {}
        self._looked_at: list[_LookedAt] = []

    def leave_out(self, local: Iterable[nn.Module | nn.Parameter]) -> None:
        """See :attr:`GradientCheck.local`."""
        self._local.update((id(each), ref(each)) for each in local)

    def look(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> int:
        """A number for the parameters behind ``tensors`` and their values; 0 says nothing. No communication."""
        self._looked_at = []
        trained = any(x.requires_grad for x in tensors)
        self._counts = (
            group.size() > 1 and (trained or bool(self._known)) and not is_traced() and current_graph_task() is None
        )
        # A power of two has no bit in common with the number below it.
        if not self._counts or self._attentions & (self._attentions + 1) or self._warned:
            return 0
        with torch.no_grad():
            behind = list(_parameters_behind(tensors))
            self._remember(behind)
            chosen = self._nearest(behind, group) if self._nearest_only else self._all(behind, group)
            sums = _on_host([device_checksum(_sampled(part)) for _, part in chosen])
        self._looked_at = [(*pair, number) for pair, number in zip(chosen, sums, strict=True)]
        if not chosen:
            return 0
        which = zlib.crc32(repr([(tuple(part.shape), part.dtype) for _, part in chosen]).encode())
        return (which % 2**30 + 1) << 32 | zlib.crc32(repr(sums).encode())

    def remember(self, group: dist.ProcessGroup) -> None:
        """Called in the backward of a compiled attention: keep in mind what it is differentiated for, weakly.

        At the backwards number 1, 2, 4, 8, ..., as looks are. No communication.
        """
        self._backwards += 1
        node = current_autograd_node()
        if node is not None and group.size() > 1 and not self._backwards & (self._backwards - 1):
            self._remember(_leaves_behind([node]))

    def compare(self, numbers: Sequence[int], name: str, axis: str, group: dist.ProcessGroup) -> Finding | None:
        """What the ranks' numbers say, the same on every rank. Communication: see the class, where they differ."""
        self._attentions += self._counts  # here, where no rank has refused, so that all ranks look at the same ones
        looked_at, self._looked_at = self._looked_at, []  # it keeps parameters alive
        if 0 in numbers or len(set(numbers)) == 1:
            return None
        if len({number >> 32 for number in numbers}) > 1:
            if not self._nearest_only:
                self._nearest_only, self._attentions = True, self._attentions - 1  # the next attention looks again
            return None
        with torch.no_grad(), without_dispatch_modes():
            finding = self._examine(looked_at, name, axis, group)
        if finding is not None and finding.apart:
            self._attentions -= self._counts  # whoever goes on is told again
        return finding

    def tell(self, finding: Finding, check: GradientCheck) -> None:
        """Raise or warn."""
        if finding.apart and not check.only_warn:
            raise UnreducedGradientsError(finding.text)
        if not finding.apart and self._warned_of_rounding:
            return
        self._warned, self._warned_of_rounding = finding.apart, True
        warnings.warn(finding.text, UnreducedGradientsWarning, stacklevel=2)

    def _remember(self, found: Iterable[torch.Tensor]) -> None:
        self._known = {key: each for key, each in self._known.items() if each() is not None}
        self._known.update((id(parameter), ref(parameter)) for parameter in found)

    def _nearest(self, behind: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[_Pair]:
        return list(_comparable(behind, group, self._ids_of_local()))[:1]

    def _all(self, behind: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[_Pair]:
        """Those of optimizers first, in their order, which is the same on all ranks whichever they have used."""
        known = [parameter for each in self._known.values() if (parameter := each()) is not None]
        among = {id(parameter) for parameter in known}
        found: list[torch.Tensor] = []
        for optimizer in _optimizers_here():
            parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
            if any(id(x) in among or isinstance(x, DTensor) for x in parameters):
                found += [x for x in parameters if x.requires_grad]
        # FSDP1 cuts its flat parameters by itself; the nearest one is whole.
        nearest = behind[0] if behind else None
        found += [x for x in known if x is nearest or not isinstance(x, FlatParameter)]
        return list(_comparable({id(x): x for x in found}.values(), group, self._ids_of_local()))

    def _ids_of_local(self) -> set[int]:
        return {
            id(parameter)
            for reference in self._local.values()
            if (each := reference()) is not None
            for parameter in (each.parameters() if isinstance(each, nn.Module) else [each])
        }

    def _examine(self, looked_at: list[_LookedAt], name: str, axis: str, group: dist.ProcessGroup) -> Finding | None:
        rows = gather_numbers([number for _, _, number in looked_at], group)
        differing = [
            each for each, column in zip(looked_at, zip(*rows, strict=True), strict=True) if len(set(column)) > 1
        ]
        if not differing:
            return None  # cannot be: equal numbers have equal checksums
        few = differing[:: -(-len(differing) // _MOST_COMPARED)]
        values = [_sampled(part).double() for _, part, _ in few]
        spread = largest_over([x for value in values for x in (value, -value)], group)
        tolerance = _ROUNDING * math.sqrt(self._attentions)
        apart = False
        for most, least in zip(spread[::2], spread[1::2], strict=True):
            difference, norm = (most + least).norm().item(), torch.maximum(most.abs(), least.abs()).norm().item()
            apart = apart or not difference <= tolerance * norm  # not a number is apart
        names = names_of([parameter for parameter, _, _ in differing[:_MOST_NAMED]])
        shown = ", ".join(f"{each} {tuple(part.shape)}" for each, (_, part, _) in zip(names, differing, strict=False))
        shown += ", ..." if len(differing) > _MOST_NAMED else ""
        rest = (_APART if apart else _ROUNDED).format(axis=axis)
        text = (
            f"{name}: the ranks of mesh axis {axis!r} hold different parameters: {len(differing)} of the "
            f"{len(looked_at)} that were compared, {shown}. {rest}{see('Parameters that differ')}"
        )
        return Finding(text, apart)


_APART = (
    "From here on the ranks train different models. Context parallelism leaves each rank its own share of every "
    "gradient. Sum the shares of all parameters: sum_gradients(model, mesh[{axis!r}]) between backward() and the "
    "optimizer's step, or FSDP2 (fully_shard) or DDP over a mesh that contains this axis; cp_styles/batch.py has the "
    "line for each. Ranks that began with different weights look the same: seed them alike. Parameters that differ by "
    "right, such as experts that live on one rank, are named by gradient_check=GradientCheck(local=[experts]) of the "
    "style or call; GradientCheck(only_warn=True) makes this a warning"
)
_ROUNDED = (
    "They differ by no more than sums in another order do. Reduce over this axis last, or over all axes at once, to "
    "keep the ranks equal"
)

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A parameter, and what of it this rank holds."""
_LookedAt = tuple[torch.Tensor, torch.Tensor, int]
"""The same, and its checksum."""

_watches: WeakKeyDictionary[dist.ProcessGroup, ParameterWatch] = WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> ParameterWatch:
    """The watch of all attention over ``group``."""
    found = _watches.get(group)
    return _watches.setdefault(group, ParameterWatch()) if found is None else found


# The optimizers that have made a step, each with the world (ranks may be threads) in which it did; the first one first.
_stepped: WeakKeyDictionary[Optimizer, ref[dist.ProcessGroup] | None] = WeakKeyDictionary()


@functools.cache
def follow_optimizers() -> None:
    """Have torch say which optimizers make a step, from now on."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        _stepped[optimizer] = world()


def _optimizers_here() -> list[Optimizer]:
    """Of this rank, those with more parameters first: what ZeRO wraps has a part of them on each rank."""
    here = [optimizer for optimizer, where in list(_stepped.items()) if where is not None and where == world()]
    return sorted(here, key=lambda each: -sum(len(group["params"]) for group in each.param_groups))


def _parameters_behind(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Trained parameters that ``tensors`` were computed from, nearest first."""
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            yield tensor
    yield from _leaves_behind([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])


def _leaves_behind(nodes: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The same from nodes of autograd's graph; of one that stands for a whole graph, in the order of use in it."""
    waiting = deque(nodes)
    seen = set(waiting)
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        # A leaf that is no parameter is somebody's input, which the ranks cut.
        if isinstance(leaf, nn.Parameter):
            yield leaf
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting.extend(following)


def _comparable(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup, left_out: set[int]) -> Iterator[_Pair]:
    """With what of it this rank holds, each parameter of which all ranks of ``group`` should hold the same."""
    spread: dict[Any, bool] = {}
    for parameter in parameters:
        part = parameter.detach()
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            if mesh not in spread:
                spread[mesh] = shares_ranks(mesh, group)
            if spread[mesh]:
                continue  # its parts differ by right, and DTensor knows how to reduce its gradient
            part = parameter.to_local().detach()
        # FSDP frees what it gathered.
        if id(parameter) not in left_out and part.numel() and part.untyped_storage().nbytes():
            yield parameter, part


def _sampled(part: torch.Tensor) -> torch.Tensor:
    """Of large parameters, elements spread over them."""
    flat = part.reshape(-1)
    return flat[:: -(-flat.numel() // _MOST_ELEMENTS)]


def _on_host(numbers: Sequence[torch.Tensor]) -> list[int]:
    """Integers of 0 dims, with one wait a device."""
    found: dict[torch.device, list[int]] = {}
    for device in {number.device for number in numbers}:
        found[device] = torch.stack([number for number in numbers if number.device == device]).tolist()
    iterators = {device: iter(values) for device, values in found.items()}
    return [next(iterators[number.device]) for number in numbers]


def names_of(parameters: Sequence[torch.Tensor]) -> list[str]:
    """What the modules that are alive call them, for an error's text; "one" for what no module holds."""
    wanted = {id(parameter) for parameter in parameters}
    names: dict[int, tuple[nn.Module, str]] = {}
    parents: dict[int, tuple[nn.Module, str]] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module) or "_modules" not in vars(each):
            continue
        for key, parameter in each._parameters.items():
            if id(parameter) in wanted:
                names.setdefault(id(parameter), (each, key))
        for key, child in each._modules.items():
            parents.setdefault(id(child), (each, key))

    def path(parameter: torch.Tensor) -> str:
        if id(parameter) not in names:
            return "one of shape"
        module, name = names[id(parameter)]
        while id(module) in parents:
            module, key = parents[id(module)]
            name = f"{key}.{name}"
        return name

    return [path(parameter) for parameter in parameters]
