"""The buffers of FSDP2 in a step without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cp_styles._lib.compat import graph_task_id


def padded_numel(x: torch.Tensor, gpus: int) -> int:
    """The numbers of a parameter in the shards of all GPUs: FSDP2 pads the first dim."""
    return x.numel() // x.shape[0] * math.ceil(x.shape[0] / gpus) * gpus


class FsdpBuffers:
    """Makes and frees the buffers of ``fully_shard`` for each layer and for the rest of the model.

    Seen in torch 2.13 (``_fsdp_param_group.py``, ``_fsdp_collectives.py``). An all-gather of a unit packs a copy of the
    rank's shards, cast to ``dtype``, into a flat buffer, from which whole parameters are copied. In the forward this
    buffer lives until the next unit has its own, in the backward it is made one unit ahead. Whole parameters of a layer
    live while it runs, the rest of the model's until the end. Gradients are copied into the buffer of a reduce-scatter,
    which lives until the next unit needs it, and become shards.

    Args:
        model, layers: the model, and its layers in their order.
        gpus: the number of ranks over which parameters are sharded.
        dtype, master: the dtype of whole parameters, and the bytes of a number in shards and in reductions.
        label: says what a tensor is.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        gpus: int,
        dtype: torch.dtype,
        master: int,
        label: Callable[[str, torch.Tensor], None],
    ) -> None:
        own = {id(x) for layer in layers for x in layer.parameters()}
        rest = [x for x in model.parameters() if id(x) not in own]
        self._parameters = [*([*layer.parameters()] for layer in layers), rest]
        self._layers, self._gpus, self._label = layers, gpus, label
        self._numel = [sum(padded_numel(x, gpus) for x in unit) for unit in self._parameters]
        self._itemsize, self._master = dtype.itemsize, master
        self._whole: dict[int, torch.Tensor] = {}
        self._ahead: dict[int, torch.Tensor | None] = {}
        self._shards: list[torch.Tensor] = []
        self._late = self._reduced = None

    def _make(self, label: str, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self._label(label, made)
        return made

    def _gather(self, unit: int) -> torch.Tensor | None:
        if self._gpus == 1:
            return None
        shard = self._numel[unit] // self._gpus if self._itemsize < self._master else 0
        cast = self._make("FSDP2: buffers of all-gathers", shard * self._itemsize)
        flat = self._make("FSDP2: buffers of all-gathers", self._numel[unit] * self._itemsize)
        del cast
        return flat

    def _copy_out(self, unit: int) -> None:
        self._whole[unit] = self._make("FSDP2: whole parameters", self._numel[unit] * self._itemsize)

    def begin(self) -> None:
        """The forward of the model begins."""
        self._forward_begins(len(self._layers))

    def _forward_begins(self, unit: int) -> None:
        self._late = self._gather(unit)
        self._copy_out(unit)

    def hooks(self) -> Iterator[Any]:
        """Add hooks to the layers."""
        for number, layer in enumerate(self._layers):

            def before(layer: Any, args: Any, number: int = number) -> None:
                if graph_task_id() == -1:  # no checkpoint, which runs a layer again
                    self._forward_begins(number)
                    self._label("inputs of the layers", args[0])
                    if number == 0:
                        args[0].register_hook(lambda grad: self._backward_ends(0))

            def after(layer: Any, args: Any, output: Any, number: int = number) -> None:
                if graph_task_id() == -1:
                    del self._whole[number]
                    hidden = output if isinstance(output, torch.Tensor) else output[0]
                    hidden.register_hook(lambda grad: self._backward_begins(number))

            yield layer.register_forward_pre_hook(before)
            yield layer.register_forward_hook(after)

    def forward_ends(self) -> None:
        """The forward of the model ends."""
        self._late = None

    def backward_begins(self) -> None:
        """The backward of the model begins."""
        self._ahead[len(self._layers) - 1] = self._gather(len(self._layers) - 1)

    def _backward_begins(self, unit: int) -> None:
        if unit + 1 < len(self._layers):
            self._backward_ends(unit + 1)
        flat = self._ahead.pop(unit)
        self._copy_out(unit)
        del flat
        if unit > 0:
            self._ahead[unit - 1] = self._gather(unit - 1)

    def _backward_ends(self, unit: int) -> None:
        del self._whole[unit]
        self._reduced = None
        self._reduced = self._make("FSDP2: buffer of the reduce-scatter", self._numel[unit] * self._master)
        for x in self._parameters[unit]:
            x.grad = None
        self._shards.append(self._make("gradients, shards", self._numel[unit] // self._gpus * self._master))

    def end(self) -> None:
        """The backward of the model ends."""
        self._backward_ends(len(self._layers))
