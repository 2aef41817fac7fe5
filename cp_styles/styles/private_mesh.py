"""The mesh on which a module's inputs are DTensors: a private view of the user's axis, over which nothing communicates.

Attention on its DTensors is intercepted by a function mode (core_calls.py) before it is an operator. What DTensor would
do with the operator is a local attention on each rank's part, or nothing. So there DTensor's dispatcher raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles._compat import (
    IS_ANY_TRUE,
    default_dispatch,
    sdpa_handlers,
    without_communication,
)
from cp_styles.comm.group_state import state_of
from cp_styles.comm.point_to_point import refuse_destroyed
from cp_styles.kernels import SDPA_KERNELS
from cp_styles.troubleshooting import see

_PREFIX = "cp_styles:"
NO_COMMUNICATION = "none: nothing may gather the sequence inside a context-parallel module"


def private_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The private 1-D mesh over a group. There is only one, because DTensor's caches keep every mesh for ever.

    No communication.
    """
    meshes = state_of(group).meshes
    if device_type not in meshes:
        refuse_destroyed(group)
        mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"{_PREFIX}{group.group_name}",))
        # Strategies use the group itself. Only DTensor would communicate over this mesh: it would gather the sequence
        # for ops other than attention (dropout, a matmul of q and k), and assume equal parts.
        meshes[device_type] = without_communication(mesh, NO_COMMUNICATION)
    return meshes[device_type]


def is_private(tensor: Any) -> bool:
    """Whether this is a DTensor on a private mesh."""
    return isinstance(tensor, DTensor) and (tensor.device_mesh.mesh_dim_names or ("",))[0].startswith(_PREFIX)


def install_handlers() -> None:
    """Put our handlers into DTensor's table, if they are not there.

    Called before every forward, because other code replaces or restores the table (torch's own context parallelism does
    so when it is enabled and disabled). A handler that was there before still handles all other meshes.
    """
    table = sdpa_handlers()
    if list(map(type, table.values())).count(_Handler) == len(_HANDLED):  # torch hashes ops in Python
        return
    for op, ours in _HANDLED.items():
        present = table.get(op)
        if not isinstance(present, _Handler):
            table[op] = _Handler(ours, present)


class _Handler:
    """The handler of one op in DTensor's table: ours for private meshes, otherwise the previous one, or none."""

    def __init__(self, ours: Callable[..., Any], previous: Callable[..., Any] | None) -> None:
        self._ours, self._previous = ours, previous

    def __call__(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(map(is_private, (*args, *kwargs.values()))):
            return self._ours(op, *args)
        return (self._previous or default_dispatch)(op, args, kwargs)


def _refuse(op: torch._ops.OpOverload, *args: Any) -> None:
    raise NotImplementedError(
        f"{op}: attention on the inputs of a module with AttentionContextParallel, of shape {tuple(args[0].shape)} "
        "here, that was not called by Python code inside the module: it would see this rank's part alone. TorchScript "
        "calls operators without Python: do not script the module. Attend inside the module to what it was "
        f"given, and keep none of its tensors{see('No attention was reached')}"
    )


def _of_part(op: torch._ops.OpOverload, tensor: DTensor) -> torch.Tensor:
    # Anomaly detection asks whether a gradient has a NaN. Answer for this rank's part.
    return op(tensor.to_local())


_HANDLED: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _refuse,
    **{kernel.forward_op: _refuse for kernel in SDPA_KERNELS},
    IS_ANY_TRUE: _of_part,
}
