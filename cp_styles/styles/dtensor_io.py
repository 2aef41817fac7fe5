"""Local tensors as DTensors and back, without communication and in a fraction of the time of DTensor's functions."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from cp_styles._compat import dtensor_spec, new_dtensor
from cp_styles.bounded_cache import LatestEntries
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.styles.mesh_axes import Placements, chunk_sizes


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    """The local tensor as a DTensor of a global ``shape``, with the memory order of ``local``. No communication."""
    spec = spec_of(local, mesh, placements, shape)
    if mesh.ndim == 1:
        return placed_as((spec,), local)[0]
    global_shape = {"shape": spec.tensor_meta.shape, "stride": spec.stride}
    return DTensor.from_local(local, mesh, placements, run_check=False, **global_shape)


def placed_in_graph(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """:func:`placed` while torch.compile traces: of a global shape as if all ranks had as much as this one."""
    return DTensor.from_local(local, mesh, placements, run_check=False)


def spec_of(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> Any:
    """The spec for :func:`placed_as` of a local tensor of a global shape, with the memory order of the local tensor."""
    # By the mesh itself, which the entry keeps: an equal one may be another rank's, or of groups that were destroyed.
    # Many tensors may share a spec: DTensor's own sharding rules return shared ones too.
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
        ctx.specs, made = specs, tuple(map(new_dtensor, map(torch.Tensor.detach, tensors), specs))
        ctx.mark_non_differentiable(*itertools.compress(made, map(operator.not_, ctx.needs_input_grad[1:])))
        return made

    @staticmethod
    def backward(ctx, *grads):
        local_grads: list[torch.Tensor | None] = []
        for grad, spec in zip(grads, ctx.specs, strict=True):
            if grad is not None and grad.placements != spec.placements:
                grad = grad.redistribute(placements=spec.placements)
            local_grads.append(None if grad is None else grad.to_local())
        return None, *local_grads


# ``placed_as(specs, *tensors)``: :func:`placed` on one axis for several tensors, by their specs. They share a node of
# autograd.
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
        # With create_graph=True they go on to a node that refuses second derivatives.
        pairs = zip(grads, ctx.like, strict=True)
        return tuple([None if grad is None else placed(grad, *like) for grad, like in pairs])


# ``DTensor.to_local`` of several tensors, without communication and in a fraction of its time. Their gradients have the
# placements of the tensors.
local_tensors: Callable[..., tuple[torch.Tensor, ...]] = _Local.apply


def declared_size(layout: SequenceLayout | Balancer, rank: int, ranks: int, rows: int) -> int:
    """The global size of a dim of which this rank has ``rows``, as it is declared to DTensor. No communication.

    It is the true size if the layout is known, and DTensor would make the same parts. Otherwise it is a size for which
    DTensor's rule gives this rank its rows, so that views and expansions inside the module are right. Ranks may then
    declare different sizes. These are never compared, and no result depends on them.
    """
    exact = isinstance(layout, SequenceLayout) and layout.lengths[rank] == rows
    if exact and layout.lengths == chunk_sizes(layout.length, ranks):
        return layout.length
    return rows * ranks if rows else rank


def _strides(local_shape: torch.Size, local_strides: tuple[int, ...], shape: torch.Size) -> tuple[int, ...]:
    """Strides for the global ``shape`` with the memory order, the gaps and the expanded dims of the local tensor.

    torch uses the global strides to decide which dims a view may join.
    """
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
