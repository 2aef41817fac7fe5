"""DTensors without communication: local tensors as DTensors and back, and the private mesh inside a module."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from cp_styles._lib.bounded_cache import LatestEntries
from cp_styles._lib.compat import (
    IS_ANY_TRUE,
    default_dispatch,
    dtensor_spec,
    new_dtensor,
    sdpa_handlers,
    without_communication,
)
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.group_state import state_of
from cp_styles.comm.point_to_point import refuse_destroyed
from cp_styles.kernels.sdpa import SDPA_KERNELS
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.styles.mesh_axes import Placements, chunk_sizes

_PREFIX = "cp_styles:"
NO_COMMUNICATION = "none: nothing may gather the sequence inside a context-parallel module"


# [Note: private mesh] A module's inputs are DTensors on a private view of the user's axis, over which nothing
# communicates. A function mode (attention.py) intercepts attention on these DTensors before it becomes an operator. An
# operator that reaches DTensor's dispatcher would attend to this rank's shard only. So our handlers there raise.
def private_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The private 1-D mesh over a group. No communication."""
    meshes = state_of(group).get_or_create(_PrivateMeshes)
    if device_type not in meshes:
        refuse_destroyed(group)
        mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"{_PREFIX}{group.group_name}",))
        # Strategies use the group itself. Only DTensor would communicate over this mesh: it would gather the sequence
        # for ops other than attention (dropout, a matmul of q and k), and assume equal parts.
        meshes[device_type] = without_communication(mesh, NO_COMMUNICATION)
    return meshes[device_type]


class _PrivateMeshes(dict[str, DeviceMesh]):
    """The private meshes over a group, one for each device type, because DTensor's caches keep every mesh forever."""


def is_private(tensor: Any) -> bool:
    """Whether this is a DTensor on a private mesh."""
    return isinstance(tensor, DTensor) and (tensor.device_mesh.mesh_dim_names or ("",))[0].startswith(_PREFIX)


def install_handlers() -> None:
    """Put our handlers into DTensor's table, if they are not there. The previous handlers still handle other meshes."""
    # Called before every forward, because torch's own context parallelism replaces and restores the table.
    table = sdpa_handlers()
    if list(map(type, table.values())).count(_Handler) == len(_HANDLED):  # no look-ups: torch hashes ops in Python
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


def _run_on_shard(op: torch._ops.OpOverload, tensor: DTensor) -> torch.Tensor:
    # Anomaly detection looks for NaN in a gradient. It looks at this rank's shard.
    return op(tensor.to_local())


_HANDLED: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _refuse,
    **{kernel.forward_op: _refuse for kernel in SDPA_KERNELS},
    IS_ANY_TRUE: _run_on_shard,
}


# -- conversions in a fraction of the time of DTensor's functions --


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    """The local tensor as a DTensor of a global ``shape``, with the memory order of ``local``. No communication."""
    spec = spec_of(local, mesh, placements, shape)
    if mesh.ndim == 1:
        return placed_as((spec,), local)[0]
    global_shape = {"shape": spec.tensor_meta.shape, "stride": spec.stride}
    return DTensor.from_local(local, mesh, placements, run_check=False, **global_shape)


def placed_in_graph(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """:func:`placed` while torch.compile traces, with the global shape of equal shards."""
    return DTensor.from_local(local, mesh, placements, run_check=False)


def spec_of(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> Any:
    """The spec for :func:`placed_as` of a local tensor of a global shape, with the memory order of the local tensor."""
    # The key has the identity of the mesh, which the entry keeps alive. An equal mesh may belong to another rank, or to
    # groups that were destroyed. Tensors may share a spec: DTensor's own sharding rules return shared specs too.
    key = id(mesh), placements, tuple(shape), local.shape, local.stride(), local.dtype
    spec = _specs.get(key)
    if spec is None:
        strides = _strides(local.shape, local.stride(), torch.Size(shape))
        spec = _specs.put(key, dtensor_spec(mesh, placements, torch.Size(shape), strides, local.dtype))
    return spec


_specs: LatestEntries[Any, Any] = LatestEntries(256)


class _Placed(torch.autograd.Function):
    """``DTensor.from_local`` on one axis, in a fraction of its time: every call of a style makes four DTensors."""

    @staticmethod
    def forward(ctx, specs, *tensors):
        ctx.set_materialize_grads(False)
        ctx.specs, dtensors = specs, tuple(map(new_dtensor, map(torch.Tensor.detach, tensors), specs))
        ctx.mark_non_differentiable(*itertools.compress(dtensors, map(operator.not_, ctx.needs_input_grad[1:])))
        return dtensors

    @staticmethod
    def backward(ctx, *grads):
        local_grads: list[torch.Tensor | None] = []
        for grad, spec in zip(grads, ctx.specs, strict=True):
            if grad is not None and grad.placements != spec.placements:
                grad = grad.redistribute(placements=spec.placements)
            local_grads.append(None if grad is None else grad.to_local())
        return None, *local_grads


# ``placed_as(specs, *tensors)``: :func:`placed` on one axis for several tensors, which share a node of autograd.
placed_as: Callable[..., tuple[DTensor, ...]] = _Placed.apply


class _Local(torch.autograd.Function):
    """See :func:`local_tensors`."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        ctx.like, parts = [], []
        for tensor in tensors:
            ctx.like.append((tensor.device_mesh, tensor.placements, tensor.shape))
            local = tensor.to_local()
            parts.append(local.view_as(local))  # autograd writes into the objects that are returned
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        # With create_graph=True, second derivatives reach a node that refuses them.
        pairs = zip(grads, ctx.like, strict=True)
        return tuple([None if grad is None else placed(grad, *like) for grad, like in pairs])


# ``DTensor.to_local`` of several tensors, without communication and in a fraction of its time. Their gradients have the
# placements of the tensors.
local_tensors: Callable[..., tuple[torch.Tensor, ...]] = _Local.apply


def declared_size(layout: SequenceLayout | Balancer, rank: int, ranks: int, rows: int) -> int:
    """The global size of a dim, as it is declared to DTensor, if this rank has ``rows``. No communication."""
    fits = isinstance(layout, SequenceLayout) and layout.lengths[rank] == rows
    if fits and layout.lengths == chunk_sizes(layout.length, ranks):
        return layout.length
    # A size from which DTensor computes this rank's rows, so that views and expansions inside the module are right.
    # Ranks may declare different sizes. The sizes are never compared, and no result depends on them.
    return rows * ranks if rows else rank


def _strides(local_shape: torch.Size, local_strides: tuple[int, ...], shape: torch.Size) -> tuple[int, ...]:
    """Strides for the global ``shape`` with the memory order, the gaps and the expanded dims of the local tensor."""
    # torch decides by the global strides which dims a view may join.
    expanded = {d for d in range(len(shape)) if local_shape[d] > 1 and local_strides[d] == 0}
    order = sorted(set(range(len(shape))) - expanded, key=lambda d: (local_strides[d], -d))
    strides, step, local_step = [0] * len(shape), 1, 1
    for d in order:
        if local_shape[d] > 1 and local_strides[d] > local_step:
            step, local_step = step * -(-local_strides[d] // local_step), local_strides[d]
        strides[d] = step
        step *= max(shape[d], 1)
        local_step *= max(local_shape[d], 1)
    return tuple(strides)
