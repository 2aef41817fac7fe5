"""The axes of a composed mesh other than the sequence axis, and the placements of query, key and value on them.

Query, key and value [B, H, S, D] may be DTensors on axes other than the sequence axis: tensor parallelism shards heads,
data parallelism shards the batch. Attention does not mix heads or rows of the batch, so each rank computes its own. The
only condition is that a rank has the key heads that its query heads need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from cp_styles.device_copies import numbers_on
from cp_styles.troubleshooting import see

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class OtherAxes:
    """The axes, other than the sequence axis, of the mesh of query, key and value.

    Attributes:
        mesh: the mesh of query, key and value.
        seq_axis: the index of the sequence axis in it. None if it has none.
    """

    mesh: DeviceMesh
    seq_axis: int | None

    @property
    def axes(self) -> tuple[int, ...]:
        """The indices of the axes of ``mesh`` that are not the sequence axis."""
        return tuple(axis for axis in range(self.mesh.ndim) if axis != self.seq_axis)

    @property
    def names(self) -> tuple[str, ...]:
        names = self.mesh.mesh_dim_names
        assert names is not None  # found by them
        return tuple(names[axis] for axis in self.axes)

    def others(self, placements: Placements) -> Placements:
        """The placements on the other axes, from placements on ``mesh``."""
        return tuple(placements[axis] for axis in self.axes)

    def joined(self, seq: Placement, others: Placements) -> Placements:
        """The placements on ``mesh``: ``seq`` on the sequence axis (ignored if it has none), and ``others``."""
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
    return OtherAxes(mesh, names.index(sequence) if sequence in names else None)


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

    def of_keys(self, kv: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The key heads that are needed, arranged so that kernels pair them correctly. A view if possible."""
        span = self._span
        if span is None:
            return kv.index_select(head_dim, numbers_on(kv.device, self.pairs))
        return kv if span == (0, kv.shape[head_dim]) else kv.narrow(head_dim, span[0], span[1] - span[0])

    @property
    def _span(self) -> tuple[int, int] | None:
        """The needed key heads as a range, if each is used by equally many query heads in order. Else None."""
        first, size = self.pairs[0], self.pairs[-1] + 1 - self.pairs[0]
        queries = len(self.pairs) // size
        regular = len(self.pairs) == queries * size and all(
            pair == first + index // queries for index, pair in enumerate(self.pairs)
        )
        return (first, first + size) if regular else None


def head_share(module: str, query: DTensor, key: DTensor, head_dim: int) -> HeadShare:
    """The heads of this rank, for DTensors on one mesh that :func:`refuse_placements` accepts.

    No communication.

    Raises:
        ValueError: on every rank, if some rank has no query heads, or not the key heads that they need.
    """
    mesh, of, keys_of = query.device_mesh, query.shape[head_dim], key.shape[head_dim]
    if keys_of == 0 or of % keys_of:
        raise ValueError(
            f"{module}: {of} query heads are not a multiple of {keys_of} key/value heads{see('Heads that do not fit')}"
        )
    here = tuple(mesh.get_coordinate() or ())
    cut = [axis for axis, placement in enumerate(query.placements) if placement == Shard(head_dim)]
    share = None
    for place in itertools.product(
        *(range(mesh.size(axis)) if axis in cut else (here[axis],) for axis in range(mesh.ndim))
    ):
        (start, stop), (first, last) = (_head_range(x, place, head_dim) for x in (query, key))
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


def _head_range(tensor: DTensor, place: Sequence[int], head_dim: int) -> tuple[int, int]:
    """The range of heads of the rank at ``place`` of the mesh."""
    start, stop = 0, tensor.shape[head_dim]
    for axis, placement in enumerate(tensor.placements):
        if placement == Shard(head_dim):
            first, last = chunk(stop - start, tensor.device_mesh.size(axis), place[axis])
            start, stop = start + first, start + last
    return start, stop
