"""The process group of a user's argument, which may be a group or a mesh, and the name of its axis."""

from __future__ import annotations

from typing import TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles._compat import is_traced, ranks_along, without_dispatch_modes
from cp_styles.comm.group_state import state_of
from cp_styles.troubleshooting import see

GroupOrMesh: TypeAlias = dist.ProcessGroup | DeviceMesh
"""The ranks that share a sequence: a process group or a 1-D mesh, ``mesh["cp"]``."""


def axis_and_group(name: str, group: GroupOrMesh, *, ordered: bool = True) -> tuple[str, dist.ProcessGroup]:
    """The ranks that share the sequence, and the name of their axis for messages. No communication.

    Args:
        name: name of the function that was called, for messages.
        group: a process group, or a mesh with one axis.
        ordered: whether the order of the ranks matters, see :func:`refuse_other_order`. It does not for a sum.

    Raises:
        TypeError: ``group`` is neither.
        ValueError: a mesh of several axes, or one whose ranks are in another order than its group's; a group that this
            rank is not in.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f'{name} needs a 1-D mesh, got axes {group.mesh_dim_names}: pass mesh["cp"]')
        axis = (group.mesh_dim_names or ("cp",))[0]
        if is_traced():  # torch.compile does not know the contents of a mesh
            return axis, group.get_group()
        ranks = _group_on(group, name)
        state = state_of(ranks)
        state.operations.axis = axis
        if ordered and group not in state.in_order:
            refuse_other_order(group, ranks)
            state.in_order.add(group)  # looking at the ranks takes as long as a small tile
        return axis, acting(ranks)
    if isinstance(group, dist.ProcessGroup):
        return "group", acting(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what dist.new_group returns on the other ranks
        raise ValueError(f"{name}: this rank is not in the group: call it on the group's own ranks only")
    raise TypeError(f"{name} needs a process group or a 1-D DeviceMesh, got {type(group).__name__}")


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


def acting(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group``, or the group that takes its place while :func:`cp_styles.verify.verify` runs a step."""
    stand_in = state_of(group).stand_in
    if stand_in is None:
        return group
    state_of(stand_in.group).operations.axis = state_of(group).operations.axis
    return stand_in.group


def group_behind(ranks: GroupOrMesh) -> dist.ProcessGroup | None:
    """The group of what a call gives, where it was seen before; None for what :func:`axis_and_group` refuses."""
    if isinstance(ranks, DeviceMesh):
        return acting(_group_on(ranks, "attention")) if ranks.ndim == 1 else None
    return acting(ranks) if isinstance(ranks, dist.ProcessGroup) else None


def refuse_other_order(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Raise ValueError, on every rank, if a 1-D mesh and its group have the ranks in different orders.

    DTensor and get_local_rank() number ranks by the mesh, and communication by the group, so a rank would hold one part
    of the sequence and be treated as holding another.
    """
    with without_dispatch_modes():  # a recomputation does not look again
        lines, ranks, group_ranks = ranks_along(mesh), mesh.mesh.tolist(), dist.get_process_group_ranks(group)
    # Groups have their ranks in ascending order. So all ranks of a mesh of several axes can look at all lines of it.
    ascending = group_ranks == sorted(group_ranks)
    apart = [ranks] if ranks != group_ranks else [line for line in lines if ascending and line != sorted(line)]
    if apart:
        raise ValueError(
            f"mesh axis {mesh.mesh_dim_names} has the ranks {apart[0]}, in another order than its process group, "
            f"{sorted(apart[0])}: make a mesh whose ranks ascend along the axis of the sequence"
        )


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor; None for a tensor that is this rank's alone."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def shares_ranks(mesh: DeviceMesh, group: dist.ProcessGroup) -> bool:
    """Whether some axis of ``mesh`` has more than one rank of ``group``. No communication."""
    ranks = set(dist.get_process_group_ranks(group))
    return any(
        len(ranks.intersection(dist.get_process_group_ranks(mesh.get_group(axis)))) > 1 for axis in range(mesh.ndim)
    )


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None  # the caller has a mesh
    return group


def world() -> ref[dist.ProcessGroup] | None:
    """Which rank this is, for tables of the whole process: ranks may be threads, each with a world of its own."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return None if group is None else ref(group)
