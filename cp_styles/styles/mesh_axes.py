"""The axes of a composed mesh other than the sequence axis, and the placements of query, key and value on them.

Query, key and value [B, H, S, D] may be DTensors on axes other than the sequence axis: tensor parallelism shards heads,
data parallelism shards the batch. Attention does not mix heads or rows of the batch, so each rank computes its own. The
only condition is that a rank has the key heads that its query heads need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from cp_styles._lib.device_copies import numbers_on
from cp_styles._lib.troubleshooting import see

Placements = tuple[Placement, ...]


def axis_in(mesh: DeviceMesh, composed: DeviceMesh, name: str) -> int | None:
    """The index of the axis ``name`` in ``mesh``. None if it has no such axis.

    Raises:
        ValueError: the axes of ``mesh`` are not axes of ``composed``, or have other ranks there.
    """
    names, all_names = mesh.mesh_dim_names, composed.mesh_dim_names or ()
    if not names or any(name not in all_names for name in names):
        raise ValueError(f"they are not axes of the mesh {all_names} that the style was given")
    axes = tuple(all_names.index(name) for name in names)
    # The global ranks over these axes, at this rank's coordinates on all other axes.
    coordinates = (composed.mesh == dist.get_rank()).nonzero()[0].tolist()
    index = tuple(slice(None) if axis in axes else coordinates[axis] for axis in range(composed.ndim))
    if not torch.equal(mesh.mesh, composed.mesh[index].permute([sorted(axes).index(axis) for axis in axes])):
        raise ValueError(
            f"they are not over the ranks that the axes of these names have in the mesh {all_names} of the style"
        )
    return names.index(name) if name in names else None


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """The range of rows of part ``index``, if DTensor cuts ``length`` rows."""
    # DTensor cuts as torch.chunk does.
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """The numbers of rows of all parts, if DTensor cuts ``length`` rows."""
    return tuple(stop - start for start, stop in (chunk(length, parts, index) for index in range(parts)))


def refuse_placements(
    labels: Sequence[str],
    placements: Sequence[Placements],
    names: tuple[str, ...],
    seq_axis: int | None,
    seq_dim: int,
    head_dim: int,
) -> None:
    """Raise ValueError unless attention can take query, key and value with these placements on the axes ``names``.

    Attention mixes neither rows of the batch nor heads, so these may be cut on axes other than ``seq_axis``.
    """
    for axis, (name, *of_axis) in enumerate(zip(names, *placements, strict=True)):
        for label, placement in zip(labels, of_axis, strict=True):
            if axis == seq_axis:
                if placement == Shard(seq_dim):
                    continue
                raise ValueError(
                    f"{label} is {placement!r} on the sequence axis {name!r} of {names}, not Shard({seq_dim}): cut it "
                    "with the attention's layout, or check seq_dim"
                )
            if placement.is_replicate() or placement in (Shard(0), Shard(head_dim)):
                continue
            why = "is not supported for attention"
            if isinstance(placement, Partial):
                why = "is Partial, i.e. not yet reduced"
            elif placement == Shard(seq_dim):
                why = "cuts the sequence a second time"
            elif placement == Shard(3):
                why = "cuts the head dim"
            raise ValueError(
                f"{label} is {placement!r} on mesh axis {name!r}, which {why}: redistribute it to Shard({head_dim}) "
                "(heads) or Replicate() on that axis before the module"
            )
        query, *keys = of_axis
        if keys[0] != keys[1] or not (query == keys[0] or (query == Shard(head_dim) and keys[0].is_replicate())):
            raise ValueError(
                f"query, key and value are {tuple(of_axis)} on mesh axis {name!r}: give all three the same placement, "
                f"or query Shard({head_dim}) and both others Replicate()"
            )


def find_local_heads(
    mesh: DeviceMesh, query: Placements, key: Placements, counts: tuple[int, int], head_dim: int
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The range of this rank's query heads, and for each of these the index of its key head among this rank's.

    ``counts`` are the numbers of all query and key heads, ``query`` and ``key`` the placements, which
    :func:`refuse_placements` accepts.

    Raises:
        ValueError: on every rank, if some rank has no query heads, or lacks a key head of its query heads.
    """
    q_heads, kv_heads = counts
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads{see('Heads that do not fit')}"
        )
    coordinates = tuple(mesh.get_coordinate() or ())
    cut = [axis for axis, placement in enumerate(query) if placement == Shard(head_dim)]
    local: tuple[tuple[int, int], tuple[int, ...]] = (0, 0), ()
    # Every rank computes the heads of all ranks, so that all of them raise.
    for place in itertools.product(
        *(range(mesh.size(axis)) if axis in cut else (coordinates[axis],) for axis in range(mesh.ndim))
    ):
        ranges = []
        for placements, (start, stop) in ((query, (0, q_heads)), (key, (0, kv_heads))):
            for axis, placement in enumerate(placements):
                if placement == Shard(head_dim):
                    first, last = chunk(stop - start, mesh.size(axis), place[axis])
                    start, stop = start + first, start + last
            ranges.append((start, stop))
        (start, stop), (first, last) = ranges
        pairs = tuple(head // (q_heads // kv_heads) - first for head in range(start, stop))
        if not pairs or pairs[0] < 0 or pairs[-1] >= last - first:
            raise ValueError(
                f"{q_heads} query heads and {kv_heads} key/value heads cannot be cut over mesh axes "
                f"{[(mesh.mesh_dim_names or ())[axis] for axis in cut]}: the rank at {[place[axis] for axis in cut]} "
                f"gets query heads {start} to {stop - 1} and key heads {first} to {last - 1}, which do not belong "
                "together. Replicate key and value over these axes, or use sizes that divide"
            )
        if place == coordinates:
            local = (start, stop), pairs
    return local


def select_key_heads(kv: torch.Tensor, pairs: tuple[int, ...], head_dim: int) -> torch.Tensor:
    """The key heads of :func:`find_local_heads`, arranged as kernels expect for grouped queries. A view if possible."""
    first, size = pairs[0], pairs[-1] + 1 - pairs[0]
    group = len(pairs) // size  # query heads of a key head, if each key head has equally many
    if len(pairs) == group * size and all(pair == first + index // group for index, pair in enumerate(pairs)):
        return kv if size == kv.shape[head_dim] else kv.narrow(head_dim, first, size)
    return kv.index_select(head_dim, numbers_on(kv.device, pairs))
