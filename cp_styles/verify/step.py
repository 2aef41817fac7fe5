"""Runs a step on one process, or on ranks, and keeps its results."""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles._compat import FlexAsWritten, part_of_group, tensors_in, without_groups
from cp_styles.checksum import checksum, fingerprint
from cp_styles.comm.point_to_point import TransferError, break_off, collective
from cp_styles.engine.run import listener
from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask
from cp_styles.testing import CommunicationTrace, clear_frames
from cp_styles.verify.compare import Gather, StepResult
from cp_styles.verify.record import AttentionsSeen, Recording, plain_name

StepFunction: TypeAlias = Callable[[nn.Module, Any, DeviceMesh], torch.Tensor | float | None]
"""``step(model, batch, mesh)``: a forward, a loss, a backward, and whatever reduces the gradients; returns the loss."""


WEIGHTS = "the model's "


class OtherRankError(RuntimeError):
    """Another rank has raised an error outside of the step."""


@dataclass(frozen=True)
class _Failed:
    """Gathered in place of a value by a rank that has raised. It takes part in no further gather."""

    text: str


def gather_over(mesh: DeviceMesh) -> Gather:
    """A function that gathers an object from all ranks of ``mesh``, in the order of the mesh. It raises on all of them
    if one has failed, see :func:`telling_others`."""

    def gather(value: Any) -> list[Any]:
        values = [value]
        for axis in reversed(range(mesh.ndim)):
            group = mesh.get_group(axis)
            ranks: list[Any] = [None] * group.size()
            with collective(group, f"verify (mesh axis {(mesh.mesh_dim_names or ('cp',))[axis]!r})"):
                dist.all_gather_object(ranks, values, group=group)
            values = [x for rank in ranks for x in rank]
        failed = [x for x in values if isinstance(x, _Failed)]
        if failed and not isinstance(value, _Failed):
            raise OtherRankError(f"verify: another rank has raised {failed[0].text}")
        return values

    return gather


@contextlib.contextmanager
def telling_others(gather: Gather, *common: type[BaseException]) -> Iterator[None]:
    """Tell the other ranks, at their next gather, of an error that they may not have. Errors of the types ``common``
    are raised by all of them."""
    try:
        yield
    except (OtherRankError, *common):
        raise
    except Exception as error:
        gather(_Failed(f"{type(error).__name__}: {error}"))
        raise


@contextlib.contextmanager
def ending_connections(mesh: DeviceMesh) -> Iterator[None]:
    """If this rank is interrupted, its connections end: the others wait for it, and it can tell them nothing."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        for axis in range(mesh.ndim):
            break_off(mesh.get_group(axis), error)
        raise


@contextlib.contextmanager
def mesh_of_one(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """The axes of ``mesh``, with this rank alone on each, for a ``with``. No communication with other ranks."""
    rank = dist.get_rank()
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    alone = _mesh_over([group] * mesh.ndim, torch.tensor(rank, device="cpu").reshape((1,) * mesh.ndim), mesh)
    try:
        yield alone
    finally:
        dist.destroy_process_group(group)
        without_groups(alone)


@contextlib.contextmanager
def mesh_of_its_own(mesh: DeviceMesh, gather: Gather) -> Iterator[DeviceMesh]:
    """The ranks of ``mesh`` with groups that end with the ``with``.

    When a rank fails in the middle of a step, others may wait for it, in whatever communication the step has. They
    learn of it because its connections end; the groups of ``mesh`` itself go on.
    """
    name = gather(uuid.uuid4().hex)[0]
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    groups = [part_of_group(x, dist.get_process_group_ranks(x), f"{x.group_name}/{name}") for x in groups]
    copied = _mesh_over(groups, mesh.mesh, mesh)
    try:
        with ending_connections(copied):
            yield copied
    finally:
        for group in groups:
            dist.destroy_process_group(group)
        without_groups(copied)
        del group, groups, copied
        gc.collect()  # a connection ends when nothing holds its group


def _mesh_over(groups: list[dist.ProcessGroup], ranks: torch.Tensor, like: DeviceMesh) -> DeviceMesh:
    if like.ndim == 1:
        return DeviceMesh.from_group(groups[0], like.device_type, mesh_dim_names=like.mesh_dim_names)
    return DeviceMesh.from_group(groups, like.device_type, mesh=ranks, mesh_dim_names=like.mesh_dim_names)


@dataclass(frozen=True)
class Alone:
    """A step on one process.

    Attributes:
        removed: the parameters that had a gradient, and have none at its end.
        unapplied: masks of SequenceScopes that were not applied, see AttentionsSeen.
    """

    result: StepResult
    removed: tuple[str, ...]
    unapplied: tuple[str, ...]


@dataclass(frozen=True)
class Ran:
    """An attention that a strategy has run: its mask, and which positions each rank has held."""

    mask: Mask
    layouts: tuple[SequenceLayout, SequenceLayout]


@dataclass(frozen=True)
class Failure:
    """What a step has raised on this rank, with the module. ``of_transfer``: another rank may be why."""

    text: str
    of_transfer: bool


def run_alone(model: nn.Module, batch: Any, mesh: DeviceMesh, step: StepFunction, scopes_over: str | None) -> Alone:
    """The step on one process. With ``scopes_over``, the masks of SequenceScopes over that axis apply."""
    with_gradient: set[str] = set()

    def note(name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and bool(parameter.grad.any()):
            with_gradient.add(name)

    named = {plain_name(name): x for name, x in model.named_parameters() if x.requires_grad}
    handles = [x.register_post_accumulate_grad_hook(partial(note, name)) for name, x in named.items()]
    try:
        with AttentionsSeen(scopes_over) as seen:
            recording = Recording(model, seen.masks)
            loss = _run(recording, batch, mesh, step, model)
    except Exception as error:
        error.add_note(
            "verify: this is the step on one process, without the plan. Give reference= if that needs another model"
        )
        raise
    finally:
        for handle in handles:
            handle.remove()
    removed = [name for name in with_gradient if (grad := named[name].grad) is None or not bool(grad.any())]
    return Alone(_finish(recording, model, loss), tuple(sorted(removed)), tuple(sorted(seen.unapplied)))


def run_together(
    model: nn.Module,
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module],
    mesh: DeviceMesh,
    batch: Any,
    step: StepFunction,
    trace: CommunicationTrace,
) -> StepResult | Failure:
    """The step on the ranks. Its recording notes each attention as Ran. After an error nothing holds ``mesh``."""
    ran: list[Ran] = []

    def listen(call: Any, attention: Any = None, *tensors: Any) -> None:
        if attention is not None:  # and no other mixer of tokens
            ran.append(Ran(attention.mask, (attention.q_layout, attention.kv_layout)))

    token = listener.set(listen)
    as_written = FlexAsWritten()  # where no style takes it: torch.compile would trace the modes of this
    recording = None
    try:
        parallel = parallelize(model, mesh)
        recording = Recording(parallel, ran)
        with trace:
            loss = _run(recording, batch, mesh, step, parallel)
        return _finish(recording, parallel, loss)
    except Exception as error:
        where = f"in {recording.open[-1]}: " if recording is not None and recording.open else ""
        failure = Failure(f"{where}{type(error).__name__}: {error}", _is_of_transfer(error))
        clear_frames(error)
    finally:
        as_written.end()
        listener.reset(token)
    return failure


def _is_of_transfer(error: BaseException) -> bool:
    """Whether communication has raised it, and not what the ranks have compared."""
    if isinstance(error, TransferError) or isinstance(error.__cause__, TransferError):
        return True
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    return isinstance(error, RuntimeError) and module in ("torch.distributed.distributed_c10d", "torch._ops")


def _run(
    recording: Recording, batch: Any, mesh: DeviceMesh, step: StepFunction, model: nn.Module
) -> torch.Tensor | float | None:
    model.zero_grad()
    with recording:
        return step(model, copy.deepcopy(batch), mesh)


def _finish(recording: Recording, model: nn.Module, loss: torch.Tensor | float | None) -> StepResult:
    """Communication: that of DTensor, for gradients that are DTensors."""
    if not (loss is None or isinstance(loss, int | float) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise TypeError(f"verify: the step returns {type(loss).__name__}{shape}: let it return the loss, or None")
    gradients = {plain_name(name): None if x.grad is None else _whole(x.grad) for name, x in model.named_parameters()}
    return StepResult(recording, gradients, float(_whole(loss)) if isinstance(loss, torch.Tensor) else loss)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def checksums(batch: Any, model: nn.Module) -> dict[str, int]:
    """Checksums of the entries of the batch, and of the parameters and buffers of the model, by name."""
    entries = batch.items() if isinstance(batch, Mapping) else [("", batch)]
    entries = [(f"batch[{name!r}]" if isinstance(batch, Mapping) else "the batch", value) for name, value in entries]
    tensors = model.state_dict(keep_vars=True).items()
    entries += [(WEIGHTS + name, value) for name, value in tensors if isinstance(value, torch.Tensor)]
    return {name: fingerprint([*map(_facts, tensors_in(value))] or [value]) for name, value in entries}


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, None if tensor.device.type == "meta" else checksum(tensor)
