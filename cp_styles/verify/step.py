"""Runs a step on one process, or on ranks, and keeps its results."""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles.comm.checksum import checksum
from cp_styles.verify.diagnose import Gather, StepResult
from cp_styles.verify.record import AttentionsSeen, Recording, plain_name, tensors_of

StepFunction: TypeAlias = Callable[[nn.Module, Any, DeviceMesh], torch.Tensor | None]
"""``step(model, batch, mesh)``: a forward, a loss, a backward, and whatever reduces the gradients; returns the loss."""


WEIGHTS = "the model's "


def gather_over(mesh: DeviceMesh) -> Gather:
    """A function that gathers an object from all ranks of ``mesh``, in the order of the mesh."""

    def gather(value: Any) -> list[Any]:
        found = [value]
        for axis in reversed(range(mesh.ndim)):
            group = mesh.get_group(axis)
            ranks: list[Any] = [None] * group.size()
            dist.all_gather_object(ranks, found, group=group)
            found = [each for rank in ranks for each in rank]
        return found

    return gather


def mesh_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of ``mesh``, with this rank alone on each. No communication with other ranks."""
    rank = dist.get_rank()
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    if mesh.ndim == 1:
        return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    own = torch.tensor(rank).reshape((1,) * mesh.ndim)
    return DeviceMesh.from_group([group] * mesh.ndim, mesh.device_type, mesh=own, mesh_dim_names=mesh.mesh_dim_names)


def run_step(
    model: nn.Module, batch: Any, mesh: DeviceMesh, step: StepFunction, seen: AttentionsSeen | None
) -> StepResult:
    recording = Recording(model, seen)
    return finish(recording, model, run_recorded(recording, batch, mesh, step, model))


def run_recorded(
    recording: Recording, batch: Any, mesh: DeviceMesh, step: StepFunction, model: nn.Module
) -> torch.Tensor | None:
    model.zero_grad()
    with recording:
        return step(model, copy.deepcopy(batch), mesh)


def finish(recording: Recording, model: nn.Module, loss: torch.Tensor | None) -> StepResult:
    """Communication: that of DTensor, for gradients that are DTensors."""
    gradients = {plain_name(name): None if x.grad is None else _whole(x.grad) for name, x in model.named_parameters()}
    return StepResult(recording, gradients, None if loss is None else _whole(loss.detach()))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def checksums(batch: Any, model: nn.Module) -> dict[str, int]:
    """Checksums of the entries of the batch, and of the parameters and buffers of the model, by name."""
    entries: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {"": batch}
    found = {}
    for name, value in entries.items():
        tensors = tensors_of(value)
        label = f"batch[{name!r}]" if isinstance(batch, Mapping) else "the batch"
        found[label] = _checksum(tensors) if tensors else zlib.crc32(repr(value).encode())
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found[WEIGHTS + name] = _checksum([value])
    return found


def _checksum(tensors: list[torch.Tensor]) -> int:
    facts = [(tuple(x.shape), str(x.dtype), checksum(x)) for x in tensors if x.device.type != "meta"]
    return zlib.crc32(pickle.dumps(facts))
