"""Conversion of a module's inputs to DTensors on the private mesh, and of its outputs back.

Inputs may be local tensors, DTensors on the sequence axis, or DTensors on other axes of the composed mesh, such as tp.

[Note: lifting] A DTensor on tp with Shard on the heads is also a DTensor on [cp, tp], with Shard on the sequence added
in front. The local tensor is the same. So inputs are *lifted* to a private mesh, which has the sequence axis first and
then the axes of the inputs. DTensor propagates the placements of tp through the module as usual: it may communicate
over tp, and never over the sequence axis. Outputs are *lowered* to the mesh of the inputs.

Under torch.compile the lengths of the ranks' parts are not known, and DTensor's own functions take their place: each
rank declares that all ranks hold as many tokens as it does. No local result depends on this.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles.bounded_cache import LatestEntries
from cp_styles.comm.group_state import state_of
from cp_styles.engine.config import LiveObject
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.styles.mesh_axes import (
    OtherAxes,
    declared_size,
    keeps_apart,
    local_parts,
    other_axes_of,
    placed,
    placed_as,
    placed_in_graph,
    refuse_placements,
    sequence_placement,
    spec_of,
)
from cp_styles.styles.private_mesh import private_mesh
from cp_styles.troubleshooting import see


class DTensorIO:
    """Converts the inputs and outputs of one module.

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
        self._own = group, axis, composed
        self._seq_dim = seq_dim
        self._use_local_output = use_local_output
        self._known: dict[tuple[DeviceMesh, DeviceMesh], OtherAxes | str] = {}
        # Of inputs without other axes: how they are placed, by what they are beside their values.
        self._specs: LatestEntries[Any, Sequence[Any]] = LatestEntries(64)
        self.live = LiveObject(weakref.ref(self))

    def _ranks(self) -> tuple[dist.ProcessGroup, DeviceMesh, DeviceMesh]:
        """Group, axis and composed mesh. Where this rank takes the place of the ranks, they have one rank."""
        group, axis, composed = self._own
        stand_in = state_of(group).stand_in
        if stand_in is None or stand_in.mesh is None:
            return self._own
        mesh = stand_in.mesh
        one = mesh if mesh.ndim == 1 else mesh[axis.mesh_dim_names or ()]
        return stand_in.group, one, one if composed.ndim == 1 else mesh

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._ranks()[0]

    @property
    def _axis(self) -> DeviceMesh:
        return self._ranks()[1]

    @property
    def _composed(self) -> DeviceMesh:
        return self._ranks()[2]

    @property
    def _sequence(self) -> str:
        return (self._axis.mesh_dim_names or ("cp",))[0]

    def other_axes(self, name: str, labels: Sequence[str], inputs: Sequence[Any]) -> OtherAxes | None:
        """The other axes on which query, key and value are DTensors. None if there are none.

        Raises:
            ValueError: they are DTensors on a mesh or with placements that this attention does not take.
        """
        dim, first = self._seq_dim, None
        for index, x in enumerate(inputs):
            if isinstance(x, DTensor) and not (x.device_mesh == self._axis and x.placements == (Shard(dim),)):
                first = index
                break
        if first is None:
            return None
        mesh = inputs[first].device_mesh
        what = f"{labels[first]} is a DTensor on mesh axes {mesh.mesh_dim_names} with {inputs[first].placements}"
        expected = f"expected a local tensor, or a DTensor on {self._axis.mesh_dim_names} with Shard({dim})"
        if mesh == self._axis:
            raise ValueError(f"{name}: {what}; {expected}")
        if self._composed.ndim == 1:
            raise ValueError(
                f"{name}: {what}; {expected}, because the style was given the 1-D mesh "
                f"{self._composed.mesh_dim_names}: for DTensors on other axes pass the composed mesh to "
                "parallelize_module, or let the style before this one return local tensors (use_local_output=True)"
                f"{see('DTensors on other axes')}"
            )
        for label, value in zip(labels, inputs, strict=True):
            if not isinstance(value, DTensor) or value.device_mesh != mesh:
                on = f"on mesh axes {value.device_mesh.mesh_dim_names}" if isinstance(value, DTensor) else "local"
                raise ValueError(f"{name}: {what}, but {label} is {on}: pass all three on the same mesh")
        axes = self.of(mesh)
        if isinstance(axes, str):
            raise ValueError(f"{name}: {what}: {axes}. Otherwise {expected}")
        if axes.seq_axis is None and not self._use_local_output:
            raise ValueError(
                f"{name}: {what}. Outputs are then DTensors on the same axes, and use_local_output=False has no "
                f"meaning for them: leave it out, or pass DTensors on a mesh that also has {self._axis.mesh_dim_names}"
            )
        for label, value in zip(labels, inputs, strict=True):
            if axes.seq_axis is not None and value.placements[axes.seq_axis] != Shard(dim):
                raise ValueError(
                    f"{name}: {label} is {value.placements[axes.seq_axis]!r} on the sequence axis {self._sequence!r} "
                    f"of {mesh.mesh_dim_names}, not Shard({dim}): cut it with the attention's layout, or check seq_dim"
                )
        others = [axes.others(value.placements) for value in inputs]
        refuse_placements(name, labels, others, axes.names, dim, 3 - dim)
        return axes

    def lift(
        self,
        values: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        input_axes: OtherAxes | None,
        group: dist.ProcessGroup,
        layout: SequenceLayout | Balancer,
    ) -> Sequence[DTensor]:
        """``values`` with the local tensors ``parts`` as DTensors on the private mesh over ``group``. ``layout``: the
        layout of the call, or the balancer that makes it."""
        q, k, v = parts
        metas = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype
        key = metas, q.device.type, group.group_name, layout.lengths if isinstance(layout, SequenceLayout) else None
        if input_axes is None and key in self._specs:
            return placed_as(parts, self._specs[key])
        rank, ranks, dim = group.rank(), group.size(), self._seq_dim
        mesh, specs = private_mesh(group, q.device.type, input_axes), []
        for value, part in zip(values, parts, strict=True):
            others = ()
            shape = list(part.shape)
            if input_axes is not None:
                assert isinstance(value, DTensor)  # other_axes() saw it
                others, shape = input_axes.others(value.placements), list(value.shape)
            shape[dim] = declared_size(layout, rank, ranks, part.shape[dim])
            specs.append(spec_of(part, mesh, (Shard(dim), *others), shape))
        if input_axes is None:
            self._specs.put(key, specs)
        return placed_as(parts, specs)

    def lower(self, name: str, output: DTensor, input_axes: OtherAxes | None, scale: tuple[int, int]) -> torch.Tensor:
        """An output on the private mesh, converted to the form of the inputs. ``scale``: the number of queries that was
        declared to DTensor, and the true one.

        Raises:
            ValueError: the output is not sharded along the sequence any more.
        """
        placement, others = sequence_placement(name, output)
        (local,) = local_parts((output,))
        if input_axes is None and self._use_local_output:
            return local
        shape = list(output.shape)
        declared, length = scale
        if input_axes is not None and input_axes.seq_axis is None:
            shape[placement.dim] = local.shape[placement.dim]
        else:
            shape[placement.dim] = shape[placement.dim] // declared * length if declared else 0
        if input_axes is None:
            return placed(local, self._axis, (placement,), shape)
        return placed(local, input_axes.mesh, input_axes.joined(placement, others), shape)

    # -- under torch.compile --

    def traced_lift(self, values: Sequence[Any], private: DeviceMesh, input_mesh: DeviceMesh | None) -> list[DTensor]:
        others = () if input_mesh is None else values[0].placements
        parts = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        return [placed_in_graph(part, private, [Shard(self._seq_dim), *others]) for part in parts]

    def traced_lower(
        self, name: str, output: DTensor, private: DeviceMesh, input_mesh: DeviceMesh | None
    ) -> torch.Tensor:
        if output.device_mesh != private:
            return output
        _, others = sequence_placement(name, output)
        local = output.to_local()
        return local if input_mesh is None else placed_in_graph(local, input_mesh, others)

    def traced_mesh(self, name: str, inputs: Sequence[Any]) -> DeviceMesh | None:
        """The mesh of the inputs if they are DTensors on axes other than the sequence's. Else None."""
        elsewhere = [
            x
            for x in inputs
            if isinstance(x, DTensor) and not (x.device_mesh == self._axis and x.placements == (Shard(self._seq_dim),))
        ]
        if not elsewhere:
            return None
        mesh, placements = elsewhere[0].device_mesh, elsewhere[0].placements
        if (
            len(elsewhere) < 3
            or any(x.device_mesh != mesh or x.placements != placements for x in elsewhere)
            or not all(keeps_apart(placement, 3 - self._seq_dim) for placement in placements)
            or any(_uneven(x) for x in elsewhere)
        ):
            raise ValueError(
                f"{name}: under torch.compile query, key and value must be local tensors, or DTensors on one mesh with "
                "equal placements and even shards (Shard on the heads or the batch, or Replicate)"
            )
        return mesh

    def traced_private_mesh(self, device_type: str, input_mesh: DeviceMesh | None) -> DeviceMesh | str:
        """The private mesh for inputs on the mesh ``input_mesh``; or a text that says why there is none."""
        other_axes = None if input_mesh is None else self.of(input_mesh)
        if isinstance(other_axes, str):
            return f"query is a DTensor on mesh axes {input_mesh and input_mesh.mesh_dim_names}: {other_axes}"
        if other_axes is not None and other_axes.seq_axis is not None:
            return "DTensors on the sequence axis and other axes together are not supported under torch.compile"
        return private_mesh(self._group, device_type, other_axes)

    def of(self, mesh: DeviceMesh) -> OtherAxes | str:
        """The axes of ``mesh`` other than the sequence's; or a text that says why it is not supported."""
        key = mesh, self._composed
        if key not in self._known:
            self._known[key] = other_axes_of(*key, self._sequence)
        return self._known[key]


def _uneven(tensor: DTensor) -> bool:
    whole = list(tensor.to_local().shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            whole[placement.dim] *= tensor.device_mesh.size(axis)
    return tuple(whole) != tuple(tensor.shape)
