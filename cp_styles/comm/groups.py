"""The process group of a user's argument, which may be a group or a mesh, and the group that replaces it in verify."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles._lib.compat import is_traced, ranks_along, without_dispatch_modes
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.group_state import GroupState, state_of

MeshOrGroup: TypeAlias = DeviceMesh | tuple[DeviceMesh, str] | dist.ProcessGroup
"""The ranks that share a sequence: a 1-D mesh, ``mesh["cp"]``; a mesh and the name of an axis; or a process group."""


def axis_and_group(name: str, mesh: MeshOrGroup, *, ordered: bool = True) -> tuple[str, dist.ProcessGroup]:
    """The ranks that share the sequence, and the name of their axis for messages. No communication.

    Args:
        name: name of the function that was called, for messages.
        mesh: a mesh with one axis, ``(mesh, axis name)``, or a process group.
        ordered: whether the order of the ranks matters, see :func:`refuse_other_order`. It does not for a sum.

    Raises:
        TypeError: ``mesh`` is none of these.
        ValueError: a mesh of several axes without the name of one, an unknown axis, a mesh whose ranks are in another
            order than the ranks of its group, a group that this rank is not in.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f'{name} needs a 1-D mesh, got axes {mesh.mesh_dim_names}: pass mesh["cp"]')
        axis = (mesh.mesh_dim_names or ("cp",))[0]
        if is_traced():  # torch.compile cannot read the contents of a mesh
            return axis, mesh.get_group()
        group = _group_on(mesh, name)
        state = state_of(now := group_now(group))
        state.operations.axis = axis
        if ordered and mesh not in state.objects.get(_InOrder, ()):
            refuse_other_order(mesh, group)
            state.get_or_create(_InOrder).add(mesh)  # once, because reading the ranks takes as long as a small tile
        return axis, now
    if isinstance(mesh, dist.ProcessGroup):
        return "group", group_now(mesh)
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:  # dist.new_group returns it on ranks outside of the group
        raise ValueError(f"{name}: this rank is not in the group: call it on the group's own ranks only")
    composed, axis = mesh if isinstance(mesh, tuple) and len(mesh) == 2 else (None, None)
    if not (isinstance(composed, DeviceMesh) and isinstance(axis, str)):
        got = type(mesh).__name__
        raise TypeError(f"{name} needs a 1-D DeviceMesh, (mesh, axis name) or a process group, got {got}")
    if axis not in (composed.mesh_dim_names or ()):
        raise ValueError(f"{name}: the mesh has the axes {composed.mesh_dim_names}, not {axis!r}: name one of them")
    if is_traced():  # torch.compile cannot slice a mesh
        return axis, composed.get_group(axis)
    return axis_and_group(name, composed[axis], ordered=ordered)


class _InOrder(WeakSet[DeviceMesh]):
    """Meshes whose ranks were found to be in the order of the group."""


def _group_on(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """The group of a 1-D mesh. Raises ValueError on a rank that is not in it."""
    try:
        return mesh.get_group()
    except IndexError:
        raise ValueError(
            f"{name}: rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}: start as many processes "
            "as the mesh has ranks (torchrun --nproc-per-node), make the mesh of all of them, or leave this call out "
            f"on ranks that are not in it{see('A rank that is not in the mesh')}"
        ) from None


class Role:
    """The role of a group while :func:`cp_styles.verify.verify` runs a step, or a model runs on this rank alone: it is
    replaced, or replaces another."""

    # In the state of the group and not in a context variable, because a backward on a device has its own thread.

    def __init__(self) -> None:
        self.stand_in: dist.ProcessGroup | None = None  # replaces this group: of as many ranks, or of this rank alone
        self.mesh: DeviceMesh | None = None  # the mesh of the step, where this rank is alone on the axis of this group
        self.objects: dict[Any, Any] = {}  # what other layers have made over the stand-in; they end with it
        self.is_off = False  # modules over this group run as without their style: see on_this_rank
        self.alone = False  # the group is this rank alone, and replaces the ranks of a sequence
        self.planted: Any = None  # a mistake in all attentions and mixers over such a group: see verify/planted.py


def group_now(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group``, or its stand-in."""
    role: Role | None = state_of(group).objects.get(Role)
    return group if role is None or role.stand_in is None else role.stand_in


def state_if_simple(mesh: MeshOrGroup) -> GroupState | None:
    """The state of the group now of a 1-D mesh or group, without a check of its order. None for other arguments."""
    group = mesh
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
        group = _group_on(mesh, "attention")
    if not isinstance(group, dist.ProcessGroup):
        return None
    state = state_of(group)
    role: Role | None = state.objects.get(Role)
    return state if role is None or role.stand_in is None else state_of(role.stand_in)


def refuse_other_order(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Raise ValueError, on every rank, if a 1-D mesh and its group have the ranks in different orders."""
    # DTensor and get_local_rank() number ranks by the mesh, and communication by the group. A rank would hold one shard
    # of the sequence and be treated as the holder of another.
    with without_dispatch_modes():  # a checkpoint would count these operations, and its recomputation skips them
        lines, ranks, group_ranks = ranks_along(mesh), mesh.mesh.tolist(), dist.get_process_group_ranks(group)
    # Groups have their ranks in ascending order. So all ranks of a mesh of several axes can check all its lines.
    ascending = group_ranks == sorted(group_ranks)
    unordered = [ranks] if ranks != group_ranks else [line for line in lines if ascending and line != sorted(line)]
    if unordered:
        raise ValueError(
            f"mesh axis {mesh.mesh_dim_names} has the ranks {unordered[0]}, in another order than its process group, "
            f"{sorted(unordered[0])}: make a mesh whose ranks ascend along the axis of the sequence"
        )


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor; None for a local tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def shares_ranks(mesh: DeviceMesh, group: dist.ProcessGroup) -> bool:
    """Whether some axis of ``mesh`` has more than one rank of ``group``. No communication."""
    ranks = set(dist.get_process_group_ranks(group))
    return any(
        len(ranks.intersection(dist.get_process_group_ranks(mesh.get_group(axis)))) > 1 for axis in range(mesh.ndim)
    )


# The group of all ranks. The caller has a mesh, so there is one. A partial, because each attention asks for it.
world_group: Callable[[], dist.ProcessGroup] = partial(getattr, dist.group, "WORLD")


def world() -> ref[dist.ProcessGroup] | None:
    """A key of this rank for tables of the process, in which ranks may be threads, each with its own world."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return None if group is None else ref(group)
