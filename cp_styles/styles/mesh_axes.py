"""The axes of a composed mesh other than the sequence axis, and the placements of query, key and value on them.

Query, key and value [B, H, S, D] may be DTensors on axes other than the sequence axis: tensor parallelism shards heads,
data parallelism shards the batch. Attention does not mix heads or rows of the batch, so each rank computes its own. The
only condition is that a rank has the key heads that its query heads need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from cp_styles._compat import dtensor_spec, dtensors_without_grad
from cp_styles.bounded_cache import LatestEntries
from cp_styles.device_copies import numbers_on
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.troubleshooting import see

_HEAD_DIM = 1  # of what reaches the attention: [B, H, S, D]
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class OtherAxes:
    """The axes, other than the sequence axis, of the mesh of query, key and value.

    Attributes:
        mesh: the mesh of query, key and value.
        seq_axis: the index of the sequence axis in it. None if it has none.
        grid: the global ranks of [sequence axis, *other axes], flat.
    """

    mesh: DeviceMesh
    seq_axis: int | None
    grid: tuple[int, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """The indices of the axes of ``mesh`` that are not the sequence axis."""
        return tuple(axis for axis in range(self.mesh.ndim) if axis != self.seq_axis)

    @property
    def names(self) -> tuple[str, ...]:
        names = self.mesh.mesh_dim_names
        assert names is not None  # found by them
        return tuple(names[axis] for axis in self.axes)

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(self.mesh.get_group(axis).group_name for axis in self.axes)

    def around(self, group: dist.ProcessGroup, device_type: str, name: str) -> DeviceMesh:
        """The mesh [``group`` under ``name``, *the other axes]. No communication."""
        groups = [group, *(self.mesh.get_group(axis) for axis in self.axes)]
        shape = (group.size(), *(self.mesh.size(axis) for axis in self.axes))
        grid = torch.tensor(self.grid, device="cpu").view(shape)
        return DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=(name, *self.names))

    def others(self, placements: Placements) -> Placements:
        """The placements on the other axes, from placements on ``mesh``."""
        return tuple(placements[axis] for axis in self.axes)

    def joined(self, seq: Placement, others: Placements) -> Placements:
        """The placements on ``mesh``, from those on the sequence axis (ignored if it has none) and on the others."""
        placements = list(others)
        if self.seq_axis is not None:
            placements.insert(self.seq_axis, seq)
        return tuple(placements)


def other_axes_of(mesh: DeviceMesh, composed: DeviceMesh, sequence: str) -> OtherAxes | str:
    """The other axes of ``mesh``, a mesh of axes of ``composed`` whose axis ``sequence`` cuts the sequence.

    Returns a text that says why, if ``mesh`` is not such a mesh.
    """
    names, all_names = mesh.mesh_dim_names, composed.mesh_dim_names or ()
    if not names or any(name not in all_names for name in names):
        return f"they are not axes of the mesh {all_names} that the style was given"
    axes = tuple(all_names.index(name) for name in names)
    if not torch.equal(mesh.mesh, _grid(composed, axes)):
        return f"they are not over the ranks that the axes of these names have in the mesh {all_names} of the style"
    others = tuple(axis for axis in axes if all_names[axis] != sequence)
    grid = _grid(composed, (all_names.index(sequence), *others))
    return OtherAxes(mesh, names.index(sequence) if sequence in names else None, tuple(grid.flatten().tolist()))


def _grid(mesh: DeviceMesh, axes: tuple[int, ...]) -> torch.Tensor:
    """The global ranks over ``axes`` of a mesh, in that order, at this rank's coordinates on all other axes."""
    ranks = mesh.mesh
    here = (ranks == dist.get_rank()).nonzero()[0].tolist()
    place = tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))
    order = sorted(axes)
    return ranks[place].permute([order.index(axis) for axis in axes])


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """The range of rows of part ``index``, if DTensor cuts ``length`` rows. It cuts as torch.chunk does."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """The numbers of rows of all parts, if DTensor cuts ``length`` rows."""
    return tuple(stop - start for start, stop in (chunk(length, parts, index) for index in range(parts)))


def keeps_apart(placement: Placement, head_dim: int) -> bool:
    """Whether query, key and value may have this placement on an axis other than the sequence axis.

    These are Shard on the batch or on the heads, and Replicate: attention mixes neither rows of the batch nor heads.
    """
    # Not by type(), which torch 2.11 does not know while it traces.
    return placement.is_replicate() or placement == Shard(0) or placement == Shard(head_dim)


def sequence_placement(name: str, output: DTensor) -> tuple[Shard, Placements]:
    """The placements of a module's output on a bound mesh: on the sequence axis, and on the other axes.

    Raises:
        ValueError: it is not sharded along the sequence any more.
    """
    placement, *others = output.placements
    if not isinstance(placement, Shard):
        raise ValueError(
            f"{name}: an output of shape {tuple(output.shape)} is {placement!r}, not sharded along the sequence: the "
            "module reduced or gathered the sequence dim. Do that outside of the module"
        )
    if others and any(isinstance(other, Shard) and other.dim == placement.dim for other in others):
        raise ValueError(
            f"{name}: an output of shape {tuple(output.shape)} has the placements {output.placements}: the module "
            "joined the sequence dim with a dim that other axes cut. Do that outside of the module"
        )
    return placement, tuple(others)


def refuse_placements(
    module: str,
    labels: Sequence[str],
    placements: Sequence[Placements],
    names: Sequence[str],
    seq_dim: int,
    head_dim: int,
) -> None:
    """Raise ValueError unless attention can take query, key and value with these placements on the axes ``names``."""
    for name, *of_axis in zip(names, *placements, strict=True):
        for label, placement in zip(labels, of_axis, strict=True):
            if keeps_apart(placement, head_dim):
                continue
            why = "is not supported for attention"
            if isinstance(placement, Partial):
                why = "is Partial, i.e. not yet reduced"
            elif isinstance(placement, Shard) and placement.dim == seq_dim:
                why = "cuts the sequence a second time"
            elif isinstance(placement, Shard) and placement.dim == 3:
                why = "cuts the head dim"
            raise ValueError(
                f"{module}: {label} is {placement!r} on mesh axis {name!r}, which {why}: redistribute it to "
                f"Shard({head_dim}) (heads) or Replicate() on that axis before the module"
            )
        query, *keys = of_axis
        if keys[0] != keys[1] or not (query == keys[0] or (query == Shard(head_dim) and keys[0].is_replicate())):
            raise ValueError(
                f"{module}: query, key and value are {tuple(of_axis)} on mesh axis {name!r}: give all three the same "
                f"placement, or query Shard({head_dim}) and both others Replicate()"
            )


@dataclass(frozen=True)
class HeadShare:
    """This rank's heads, if other axes shard the heads.

    Attributes:
        heads: the range of its query heads.
        of: the total number of query heads.
        pairs: for each of its query heads, the index of the key head it uses, among the key heads that this rank has.
    """

    heads: tuple[int, int]
    of: int
    pairs: tuple[int, ...]

    def of_keys(self, kv_BGMD: torch.Tensor) -> torch.Tensor:
        """The key heads that are needed, arranged so that kernels pair them correctly. A view if possible."""
        span = self._span
        if span is None:
            return kv_BGMD.index_select(1, numbers_on(kv_BGMD.device, self.pairs))
        return kv_BGMD if span == (0, kv_BGMD.shape[1]) else kv_BGMD.narrow(1, span[0], span[1] - span[0])

    @property
    def _span(self) -> tuple[int, int] | None:
        """The needed key heads as a range, if each is used by equally many query heads in order. Else None."""
        first, size = self.pairs[0], self.pairs[-1] + 1 - self.pairs[0]
        queries = len(self.pairs) // size
        regular = len(self.pairs) == queries * size and all(
            pair == first + index // queries for index, pair in enumerate(self.pairs)
        )
        return (first, first + size) if regular else None


def head_share(module: str, query: DTensor, key: DTensor) -> HeadShare:
    """The heads of this rank, for DTensors [B, H, S, D] on one mesh that :func:`refuse_placements` accepts.

    No communication.

    Raises:
        ValueError: on every rank, if some rank has no query heads, or not the key heads that they need.
    """
    mesh, of, keys_of = query.device_mesh, query.shape[_HEAD_DIM], key.shape[_HEAD_DIM]
    if keys_of == 0 or of % keys_of:
        raise ValueError(
            f"{module}: {of} query heads are not a multiple of {keys_of} key/value heads{see('Heads that do not fit')}"
        )
    # Not get_local_rank: it needs the groups of all axes, and the sequence axis of this mesh has none.
    here = tuple(mesh.get_coordinate() or ())
    cut = [axis for axis, placement in enumerate(query.placements) if placement == Shard(_HEAD_DIM)]
    share = None
    for place in itertools.product(
        *(range(mesh.size(axis)) if axis in cut else (here[axis],) for axis in range(mesh.ndim))
    ):
        (start, stop), (first, last) = (_interval(x, place) for x in (query, key))
        pairs = tuple(head // (of // keys_of) - first for head in range(start, stop))
        if not pairs or pairs[0] < 0 or pairs[-1] >= last - first:
            names = [(mesh.mesh_dim_names or ())[axis] for axis in cut]
            raise ValueError(
                f"{module}: {of} query heads and {keys_of} key/value heads cannot be cut over mesh axes {names}: "
                f"the rank at {[place[axis] for axis in cut]} gets query heads {start} to {stop - 1} and key heads "
                f"{first} to {last - 1}, which do not belong together. Replicate key and value over these axes, or "
                "use sizes that divide"
            )
        if place == here:
            share = HeadShare((start, stop), of, pairs)
    assert share is not None  # this rank is one of them
    return share


def _interval(tensor: DTensor, place: Sequence[int]) -> tuple[int, int]:
    """The range of heads of the rank at ``place`` of the mesh."""
    start, stop = 0, tensor.shape[_HEAD_DIM]
    for axis, placement in enumerate(tensor.placements):
        if placement == Shard(_HEAD_DIM):
            first, last = chunk(stop - start, tensor.device_mesh.size(axis), place[axis])
            start, stop = start + first, start + last
    return start, stop


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    """The rank's part as a DTensor of a global ``shape``, with the memory order of ``local``. No communication."""
    return placed_as((local,), (spec_of(local, mesh, placements, shape),))[0]


def placed_in_graph(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """:func:`placed` while torch.compile traces: of a global shape as if all ranks had as much as this one."""
    return DTensor.from_local(local, mesh, placements, run_check=False)


def spec_of(part: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> Any:
    """What :func:`placed_as` takes, for a part of a tensor of this global shape, with the memory order of the part."""
    # By the mesh itself, which the entry keeps: an equal one may be another rank's, or of groups that were destroyed.
    # Many tensors may share a spec: DTensor's own sharding rules return shared ones too.
    key = id(mesh), placements, tuple(shape), part.shape, part.stride(), part.dtype
    spec = _specs.get(key)
    if spec is None:
        strides = _strides(part.shape, part.stride(), torch.Size(shape))
        spec = _specs.put(key, dtensor_spec(mesh, placements, torch.Size(shape), strides, part.dtype))
    return spec


_specs: LatestEntries[Any, Any] = LatestEntries(256)


def placed_as(parts: Sequence[torch.Tensor], specs: Sequence[Any]) -> Sequence[DTensor]:
    """:func:`placed` for several parts, by their specs. They share a node of autograd, if there is one axis and all
    require grad."""
    if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        return dtensors_without_grad(parts, specs)
    if specs[0].mesh.ndim == 1 and all(map(_REQUIRES_GRAD, parts)):
        return _Placed.apply(specs, *parts)
    return [
        DTensor.from_local(
            part, spec.mesh, spec.placements, run_check=False, shape=spec.tensor_meta.shape, stride=spec.stride
        )
        for part, spec in zip(parts, specs, strict=True)
    ]


_REQUIRES_GRAD = attrgetter("requires_grad")


class _Placed(torch.autograd.Function):
    """``DTensor.from_local`` on one axis, in a fraction of its time: every call of a style makes four DTensors."""

    @staticmethod
    def forward(ctx, specs, *parts):
        ctx.set_materialize_grads(False)
        ctx.specs = specs
        return dtensors_without_grad(parts, specs)

    @staticmethod
    def backward(ctx, *grads):
        local_grads: list[torch.Tensor | None] = []
        for grad, spec in zip(grads, ctx.specs, strict=True):
            if grad is not None and grad.placements != spec.placements:
                grad = grad.redistribute(placements=spec.placements)
            local_grads.append(None if grad is None else grad.to_local())
        return None, *local_grads


def local_parts(tensors: Sequence[DTensor], gradients: Sequence[Placements] | None = None) -> Sequence[torch.Tensor]:
    """``to_local(grad_placements=...)`` of each, without communication. ``gradients``: default, as the tensors are."""
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)):
        return _Local.apply(gradients, *tensors)
    return [tensor.to_local() for tensor in tensors]


class _Local(torch.autograd.Function):
    """``DTensor.to_local`` of several tensors, in a fraction of its time."""

    @staticmethod
    def forward(ctx, gradients, *tensors):
        ctx.set_materialize_grads(False)
        ctx.like, parts = [], []
        for index, tensor in enumerate(tensors):
            placements = gradients[index] if gradients else tensor.placements
            ctx.like.append((tensor.device_mesh, placements, tensor.shape))
            local = tensor.to_local()
            parts.append(local.view_as(local))  # autograd writes into the objects that are returned
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        # With create_graph=True they go on to a node that refuses second derivatives.
        pairs = zip(grads, ctx.like, strict=True)
        return None, *[None if grad is None else placed(grad, *like) for grad, like in pairs]


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
