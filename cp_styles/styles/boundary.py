"""SequenceBoundary: converts the tensors of a module's caller to DTensors with Shard on the sequence, and back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_styles._lib.bounded_cache import LatestEntries
from cp_styles._lib.compat import constant_under_compile
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import Role, group_now
from cp_styles.engine.config import LiveObject
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.styles.dtensors import (
    declared_size,
    local_tensors,
    placed,
    placed_as,
    placed_in_graph,
    private_mesh,
    spec_of,
)
from cp_styles.styles.mesh_axes import Placements, axis_in, find_local_heads, refuse_placements, select_key_heads


class InputForm(NamedTuple):
    """The form of a module's query that is a DTensor on axes other than the sequence axis. Outputs get the same form.

    Attributes:
        mesh, placements: of the query.
        seq_axis: the index of the sequence axis in ``mesh``. None if it has none.
        head_dim: the dim of the heads.
        heads: the range of this rank's heads.
        pairs: for each of these query heads, the index of its key head among this rank's key heads.
        global_sizes: the numbers of rows of the batch and of query heads, over all axes.
        local_sizes: the same numbers on this rank.
    """

    mesh: DeviceMesh
    placements: Placements
    seq_axis: int | None
    head_dim: int
    heads: tuple[int, int]
    pairs: tuple[int, ...]
    global_sizes: tuple[int, int] = (0, 0)
    local_sizes: tuple[int, int] = (0, 0)

    def cuts(self, dim: int) -> bool:
        """Whether some axis cuts ``dim``: 0 for the batch, or ``head_dim``."""
        return Shard(dim) in self.placements

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The names of the axes, other than the sequence axis, that cut the batch or the heads."""
        names = enumerate(self.mesh.mesh_dim_names or ())
        return tuple(name for axis, name in names if axis != self.seq_axis and self.placements[axis].is_shard())

    def place_output(self, name: str, shape: Sequence[int], seq: int) -> Placements:
        """The placements of an output with this local ``shape``, whose dim ``seq`` is the sequence.

        Raises:
            ValueError: an axis cuts the batch or the heads, and the shape does not show where they are.
        """
        rows, heads = self.cuts(0), self.cuts(self.head_dim)
        has_rows = seq > 0 and shape[0] == self.local_sizes[0]
        has_heads = len(shape) == 4 and 0 < seq < 3 and shape[3 - seq] == self.local_sizes[1]
        if (rows and not has_rows) or (heads and not (has_rows and has_heads)):
            raise ValueError(
                f"{name}: an output has the shape {tuple(shape)} on this rank, which does not show the rows of the "
                f"batch and the heads that mesh axes {self.cut_axes} cut: return [B, H, S, D] or [B, S, H, D] with the "
                "rows and heads of the query, and join or reduce heads outside of the module"
                f"{see('An output whose heads are not found')}"
            )
        return tuple(
            Shard(seq) if axis == self.seq_axis else Shard(3 - seq) if placement == Shard(self.head_dim) else placement
            for axis, placement in enumerate(self.placements)
        )

    def reduce_gradient(self, share: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of a parameter inside the module over the axes that cut heads or rows.

        The result is still this rank's share of the sequence. Communication: one all-reduce over each of these axes.
        """
        partial = tuple(Partial() if placement.is_shard() else Replicate() for placement in self.placements)
        reduced = [Partial() if axis == self.seq_axis else Replicate() for axis in range(self.mesh.ndim)]
        return placed(share, self.mesh, partial, share.shape).redistribute(placements=reduced).to_local()


# [Note: boundary] Inputs may be local tensors, DTensors on the sequence axis, or DTensors on other axes of the composed
# mesh, such as tp. Inside the module they are DTensors on a private 1-D mesh of the sequence. Other axes come off at
# the boundary: attention mixes neither heads nor rows of the batch, so the module gets this rank's heads and rows, and
# the key heads that these query heads need. Outputs get the form of the query again.
#
# Under torch.compile the lengths of the shards are not known, and the boundary uses DTensor's own, slower functions.
# Each rank then declares that all ranks hold as many tokens as it does. No local result depends on this.
class SequenceBoundary:
    """Converts the inputs and outputs of a module.

    Args:
        group: the ranks that share the sequence.
        axis: the 1-D mesh of the sequence.
        composed: the mesh that the style was given.
        seq_dim: the sequence dim of the module's inputs.
        use_local_output: whether outputs are local tensors, if inputs are not DTensors on other axes.
    """

    def __init__(
        self, group: dist.ProcessGroup, axis: DeviceMesh, composed: DeviceMesh, seq_dim: int, use_local_output: bool
    ) -> None:
        self._given_ranks, self._role = (group, axis, composed), state_of(group).get_or_create(Role)
        self._seq_dim = seq_dim
        self._use_local_output = use_local_output
        self._specs: LatestEntries[Any, Sequence[Any]] = LatestEntries(64)  # of inputs, by shapes, strides and dtypes
        self._forms: LatestEntries[Any, InputForm] = LatestEntries(16)
        self.live = LiveObject(weakref.ref(self))

    def _ranks(self) -> tuple[dist.ProcessGroup, DeviceMesh, DeviceMesh]:
        """Group, axis and composed mesh; meshes of one rank while verify runs the step on this rank alone."""
        (group, axis, composed), mesh = self._given_ranks, self._role.mesh
        if mesh is None:
            return self._given_ranks
        axis = mesh if mesh.ndim == 1 else mesh[axis.mesh_dim_names or ()]
        return group_now(group), axis, axis if composed.ndim == 1 else mesh

    def local(
        self, name: str, labels: Sequence[str], inputs: Sequence[Any]
    ) -> tuple[tuple[Any, ...], InputForm | None]:
        """Query, key and value as local tensors, and their form if they are DTensors on axes other than the sequence.

        Key and value have the heads that this rank's query heads need. No communication in the forward. The backward
        has two all-reduces over an axis that cuts the query's heads and replicates key and value.

        Raises:
            ValueError: the inputs are DTensors on a mesh or with placements that attention cannot take.
        """
        axis, dim, head_dim = self._ranks()[1], self._seq_dim, 3 - self._seq_dim
        local = tuple([x.to_local() if isinstance(x, DTensor) else x for x in inputs])
        on_sequence = [
            not isinstance(x, DTensor) or (x.device_mesh == axis and x.placements == (Shard(dim),)) for x in inputs
        ]
        if all(on_sequence) or any(getattr(x, "ndim", 0) != 4 for x in local):  # check_local refuses other dims
            return local, None
        is_on = [(x.device_mesh, x.placements) if isinstance(x, DTensor) else (None, ()) for x in inputs]
        query, *keys = inputs
        counts = query.shape[head_dim], keys[0].shape[head_dim]
        form = form_of(self.live, tuple(labels), on_sequence.index(False), tuple(is_on), counts)
        if isinstance(form, str):
            raise ValueError(f"{name}: {form}")
        if torch.compiler.is_dynamo_compiling() and (form.seq_axis is not None or any(_is_uneven(x) for x in inputs)):
            raise ValueError(
                f"{name}: under torch.compile DTensors must have even shards, and DTensors on the sequence axis and "
                "other axes together are not supported"
            )
        if query.placements != keys[0].placements:
            # Each rank computes the share of its own query heads. The backward of redistribute sums the shares.
            grad_placements = [
                key if key == of_query else Partial()
                for of_query, key in zip(query.placements, keys[0].placements, strict=True)
            ]
            keys = [x.redistribute(placements=x.placements).to_local(grad_placements=grad_placements) for x in keys]
            local = local[0], *[select_key_heads(x, form.pairs, head_dim) for x in keys]
        sizes = (query.shape[0], query.shape[head_dim]), (local[0].shape[0], local[0].shape[head_dim])
        # torch.compile cannot trace _replace, and on 2.11 no comparison of the placements of ``form``.
        fields = form.seq_axis, form.head_dim, form.heads, form.pairs
        return local, InputForm(query.device_mesh, query.placements, *fields, *sizes)

    def enter(
        self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, layouts: Sequence[SequenceLayout | Balancer]
    ) -> Sequence[DTensor]:
        """Convert local query, key and value to DTensors on the private mesh over ``group``. No communication.

        ``layouts``: the layouts of queries and of keys of the call, or one of both, or the balancers that make them.
        """
        if torch.compiler.is_dynamo_compiling():
            mesh, placements = mesh_in_graph(self.live, tensors[0].device.type), [Shard(self._seq_dim)]
            return [placed_in_graph(tensor, mesh, placements) for tensor in tensors]
        q, k, v = tensors
        metas = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype
        key = metas, q.device.type, group.group_name, *[x.lengths for x in layouts if isinstance(x, SequenceLayout)]
        specs = self._specs.get(key)
        if specs is None:
            rank, ranks, dim = group.rank(), group.size(), self._seq_dim
            mesh, specs = private_mesh(group, q.device.type), []
            for tensor, layout in zip(tensors, (layouts[0], layouts[-1], layouts[-1]), strict=True):
                shape = list(tensor.shape)
                shape[dim] = declared_size(layout, rank, ranks, shape[dim])
                specs.append(spec_of(tensor, mesh, (Shard(dim),), shape))
            self._specs.put(key, specs)
        return placed_as(specs, *tensors)

    def leave(
        self, name: str, private: DeviceMesh, form: InputForm | None, scale: tuple[int, int], output: DTensor
    ) -> torch.Tensor:
        """Convert an output on the ``private`` mesh to the form of the inputs. Other DTensors are returned unchanged.

        ``scale`` is the number of queries that was declared to DTensor, and the true number. No communication.

        Raises:
            ValueError: the output is not sharded along the sequence, or its shape does not show the dims that other
                axes cut.
        """
        if output.device_mesh != private:
            return output
        (placement,), in_graph = output.placements, torch.compiler.is_dynamo_compiling()
        if not isinstance(placement, Shard):
            raise ValueError(
                f"{name}: an output of shape {tuple(output.shape)} is {placement!r}, not sharded along the sequence: "
                "the module reduced or gathered the sequence dim. Do that outside of the module"
            )
        local = output.to_local() if in_graph else local_tensors(output)[0]
        if form is None and self._use_local_output:
            return local
        seq, shape, (declared, length) = placement.dim, list(local.shape), scale
        if form is None or form.seq_axis is not None:
            shape[seq] = output.shape[seq] // declared * length if declared else 0
        if form is None:
            return placed(local, self._ranks()[1], (placement,), shape)
        placements = form.place_output(name, local.shape, seq)
        if in_graph:
            return placed_in_graph(local, form.mesh, placements)
        if form.cuts(0):
            shape[0] = form.global_sizes[0]
        if form.cuts(form.head_dim):
            shape[3 - seq] = form.global_sizes[1]
        return placed(local, form.mesh, placements, shape)

    def form_of(
        self,
        labels: tuple[str, ...],
        first: int,
        is_on: tuple[tuple[DeviceMesh | None, Placements], ...],
        counts: tuple[int, int],
    ) -> InputForm:
        """The form of inputs with these meshes and placements.

        ``first`` is the index of the first input on other axes, ``counts`` are the numbers of all query and key heads.
        """
        (_, axis, composed), dim = self._ranks(), self._seq_dim
        key = axis, composed, is_on, counts
        if key in self._forms:
            return self._forms[key]
        mesh, placements = is_on[first]
        assert mesh is not None
        found = f"{labels[first]} is a DTensor on mesh axes {mesh.mesh_dim_names} with {placements}"
        expected = f"expected a local tensor, or a DTensor on {axis.mesh_dim_names} with Shard({dim})"
        if mesh == axis:
            raise ValueError(f"{found}; {expected}")
        if composed.ndim == 1:
            raise ValueError(
                f"{found}; {expected}, because the style was given the 1-D mesh {composed.mesh_dim_names}: for "
                "DTensors on other axes pass the composed mesh to parallelize_module, or let the style before this one "
                f"return local tensors (use_local_output=True){see('DTensors on other axes')}"
            )
        for label, (other, _) in zip(labels, is_on, strict=True):
            if other != mesh:
                on = "local" if other is None else f"on mesh axes {other.mesh_dim_names}"
                raise ValueError(f"{found}, but {label} is {on}: pass all three on the same mesh")
        try:
            seq_axis = axis_in(mesh, composed, (axis.mesh_dim_names or ("cp",))[0])
        except ValueError as error:
            raise ValueError(f"{found}: {error}. Otherwise {expected}") from None
        if seq_axis is None and not self._use_local_output:
            raise ValueError(
                f"{found}. Outputs are then DTensors on the same axes, and use_local_output=False has no meaning for "
                f"them: leave it out, or pass DTensors on a mesh that also has {axis.mesh_dim_names}"
            )
        query, keys, values = [each for _, each in is_on]
        refuse_placements(labels, (query, keys, values), mesh.mesh_dim_names or (), seq_axis, dim, 3 - dim)
        heads = find_local_heads(mesh, query, keys, counts, 3 - dim)
        return self._forms.put(key, InputForm(mesh, query, seq_axis, 3 - dim, *heads))

    def private_mesh(self, device_type: str) -> DeviceMesh:
        return private_mesh(self._ranks()[0], device_type)


# torch.compile does not trace the next two functions. It keeps their results, and guards their arguments.
@constant_under_compile
def form_of(boundary: LiveObject, *arguments: Any) -> InputForm | str:
    """:meth:`SequenceBoundary.form_of`, or the text of its error, which traced code can raise."""
    try:
        return boundary.reference().form_of(*arguments)  # pyright: ignore[reportOptionalMemberAccess]
    except ValueError as error:
        return str(error)


@constant_under_compile
def mesh_in_graph(boundary: LiveObject, device_type: str) -> DeviceMesh:
    return boundary.reference().private_mesh(device_type)  # pyright: ignore[reportOptionalMemberAccess]


def _is_uneven(tensor: DTensor) -> bool:
    even = list(tensor.to_local().shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            even[placement.dim] *= tensor.device_mesh.size(axis)
    return tuple(even) != tuple(tensor.shape)
