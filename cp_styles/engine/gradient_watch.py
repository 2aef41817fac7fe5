"""Detects that gradients of a model are not reduced over the sequence axis: after a step its parameters differ.

Under context parallelism each rank has its own share of each gradient. If the optimizer steps with these shares, the
parameters of the ranks drift apart, and nothing fails: the loss still decreases. But equal parameters have equal bits.
So a checksum of one parameter, in the all-gather that every attention makes anyway, shows the difference.

[Note: compiled] Inside a compiled graph there is no autograd path from the inputs of an attention to parameters. But in
the backward, the running autograd node is that of the graph, and it leads to the graph's inputs. So a backward
remembers a parameter, and later forwards use that one.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from cp_styles._compat import current_autograd_node, is_traced
from cp_styles.comm.checksum import checksum
from cp_styles.comm.groups import shares_ranks

_MOST_NODES = 500  # autograd nodes that are searched for a parameter; that of a query's projection is about ten away
_MOST_ELEMENTS = 2**16
_MOST_REMEMBERED = 8  # of compiled models; several, because FSDP frees those that are not in use


class UnreducedGradientsWarning(UserWarning):
    """The ranks of the sequence axis hold different parameters: gradients were not reduced over it."""


class ParameterWatch:
    """Compares one parameter, from which an attention's inputs were computed, between the ranks of a sequence.

    It compares at the attentions number 1, 2, 4, 8, ... So a difference is seen before the number of forwards has
    doubled, and the cost (on CUDA the host waits for the device) vanishes in the long run. Comparing when the version
    of the parameter changes would not work with FSDP2, which hides its writes.
    """

    def __init__(self, told: WeakSet[dist.ProcessGroup] | None = None) -> None:
        """``told``: the groups that were warned already. The modules of a model share this set."""
        self._told: WeakSet[dist.ProcessGroup] = WeakSet() if told is None else told
        self._attentions = self._backwards = 0
        self._counts = False
        self._remembered: list[ref[torch.Tensor]] = []
        self._looked_at: torch.Size | None = None

    def look(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> int:
        """A checksum of the nearest parameter from which ``tensors`` were computed, or 0. No communication."""
        self._looked_at = None
        trained = any(x.requires_grad for x in tensors)
        remembered = [] if trained else [found for each in self._remembered if (found := each()) is not None]
        self._counts = group.size() > 1 and (trained or bool(remembered)) and not is_traced()
        # True unless the number of this attention is a power of two.
        if not self._counts or self._attentions & (self._attentions + 1) or group in self._told:
            return 0
        for parameter in _parameters_behind(tensors) if trained else remembered:
            part = _comparable(parameter, group)
            if part is not None:
                self._looked_at = part.shape
                return _number_of_bits(part)
        return 0

    def remember(self, group: dist.ProcessGroup) -> None:
        """Called in the backward of a compiled attention: keep a weak reference to the nearest parameter.

        It does so at the backwards number 1, 2, 4, 8, ... No communication.
        """
        self._backwards += 1
        node = current_autograd_node()
        if node is None or group.size() == 1 or self._backwards & (self._backwards - 1):
            return
        self._remembered = [each for each in self._remembered if each() is not None]
        nearest = next((x for x in _leaves_behind([node]) if _comparable(x, group) is not None), None)
        if nearest is not None and all(each() is not nearest for each in self._remembered):
            self._remembered = [*self._remembered[1 - _MOST_REMEMBERED :], ref(nearest)]

    def compare(self, numbers: Sequence[int], name: str, axis: str, group: dist.ProcessGroup) -> str | None:
        """The warning for :meth:`tell` if ranks have different numbers, once for each model and group. Else None.

        The result is the same on every rank.
        """
        self._attentions += self._counts  # counted here, where no rank has refused, so that all ranks count the same
        if 0 in numbers or len(set(numbers)) == 1:
            return None
        self._told.add(group)
        return (
            f"{name}: the ranks of mesh axis {axis!r} hold different parameters (seen in one of shape "
            f"{tuple(self._looked_at or ())}), so from here on they train different models. Context parallelism leaves "
            f"each rank its own share of every gradient. Sum the shares: sum_gradients(model, mesh[{axis!r}]) between "
            "backward() and the optimizer's step, or FSDP2 (fully_shard) or DDP over a mesh that contains this axis; "
            "cp_styles/batch.py has the line for each. Ranks that began with different weights look the same: seed "
            "them alike"
        )

    def tell(self, what: str) -> None:
        warnings.warn(what, UnreducedGradientsWarning, stacklevel=2)


_watches: WeakKeyDictionary[dist.ProcessGroup, ParameterWatch] = WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> ParameterWatch:
    """The watch of ``group``, for attention that does not belong to a module."""
    return _watches.setdefault(group, ParameterWatch())


def _parameters_behind(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The parameters that require grad and from which ``tensors`` were computed, nearest first."""
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            yield tensor
    yield from _leaves_behind([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])


def _leaves_behind(nodes: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The parameters that autograd ``nodes`` lead to, nearest first; for a compiled graph's node in order of use."""
    waiting = deque(nodes)
    seen = set(waiting)
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        # Leaves that are not parameters are inputs, which differ between ranks.
        if isinstance(leaf, nn.Parameter):
            yield leaf
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting.extend(following)


def _comparable(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The local part of ``parameter``, if all ranks of ``group`` should hold the same and it can be read. Else None."""
    if isinstance(parameter, DTensor):
        if shares_ranks(parameter.device_mesh, group):
            return None  # its parts may differ, and its gradient is reduced by DTensor
        parameter = parameter.to_local()
    # FSDP frees the storage of gathered parameters.
    return parameter if parameter.numel() and parameter.untyped_storage().nbytes() else None


def _number_of_bits(parameter: torch.Tensor) -> int:
    """A checksum that is never 0. For large parameters it uses a sample of elements, evenly spread."""
    flat = parameter.detach().reshape(-1)
    return checksum(flat[:: -(-flat.numel() // _MOST_ELEMENTS)]) or 1
