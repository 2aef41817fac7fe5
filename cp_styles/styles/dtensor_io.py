"""Conversion of a module's inputs to DTensors on the bound mesh, and of its outputs back.

Inputs may be local tensors, DTensors on the sequence axis, or DTensors on other axes of the composed mesh, such as tp.

[Note: lifting] A DTensor on tp with Shard on the heads is also a DTensor on [cp, tp], with Shard on the sequence added
in front. The local tensor is the same. So inputs are *lifted* to a bound mesh, which has the sequence axis first and
then the axes of the inputs. DTensor propagates the placements of tp through the module as usual: it may communicate
over tp, and never over the sequence axis. Outputs are *lowered* to the mesh of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles.engine.dtensor_handlers import install
from cp_styles.engine.mesh_axes import (
    OtherAxes,
    Placements,
    local_part,
    other_axes_of,
    placed,
    placed_together,
    refuse_placements,
    sequence_placement,
    sequence_sharded,
)
from cp_styles.troubleshooting import see


class DTensorIO:
    """Converts the inputs and outputs of one module.

    Args:
        axis: the 1-D mesh of the sequence.
        composed: the mesh that the style was given.
        seq_dim: the sequence dim of the module's inputs.
        use_local_output: whether outputs are local tensors, if inputs are not DTensors on other axes.
    """

    def __init__(self, axis: DeviceMesh, composed: DeviceMesh, seq_dim: int, use_local_output: bool) -> None:
        self._axis = axis
        self._composed = composed
        self._seq_dim = seq_dim
        self._use_local_output = use_local_output
        self._known: dict[DeviceMesh, OtherAxes | str] = {}

    @property
    def axes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """The 1-D mesh of the sequence, and the mesh of the style."""
        return self._axis, self._composed

    @property
    def _sequence(self) -> str:
        return (self._axis.mesh_dim_names or ("cp",))[0]

    def other_axes(self, labels: Sequence[str], inputs: Sequence[Any]) -> OtherAxes | None:
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
            raise ValueError(f"{what}; {expected}")
        if self._composed.ndim == 1:
            raise ValueError(
                f"{what}; {expected}, because the style was given the 1-D mesh {self._composed.mesh_dim_names}: for "
                "DTensors on other axes pass the composed mesh to parallelize_module, or let the style before this one "
                "return local tensors (use_local_output=True)"
                f"{see('DTensors on other axes')}"
            )
        for label, value in zip(labels, inputs, strict=True):
            if not isinstance(value, DTensor) or value.device_mesh != mesh:
                on = f"on mesh axes {value.device_mesh.mesh_dim_names}" if isinstance(value, DTensor) else "local"
                raise ValueError(f"{what}, but {label} is {on}: pass all three on the same mesh")
        found = self.of(mesh)
        if isinstance(found, str):
            raise ValueError(f"{what}: {found}. Otherwise {expected}")
        if found.seq_axis is None and not self._use_local_output:
            raise ValueError(
                f"{what}. Outputs are then DTensors on the same axes, and use_local_output=False has no meaning for "
                f"them: leave it out, or pass DTensors on a mesh that also has {self._axis.mesh_dim_names}"
            )
        for label, value in zip(labels, inputs, strict=True):
            if found.seq_axis is not None and value.placements[found.seq_axis] != Shard(dim):
                raise ValueError(
                    f"{label} is {value.placements[found.seq_axis]!r} on the sequence axis {self._sequence!r} of "
                    f"{mesh.mesh_dim_names}, not Shard({dim}): cut it with the attention's layout, or check seq_dim"
                )
        others = [found.others(value.placements) for value in inputs]
        refuse_placements(labels, others, found.names, dim, 3 - dim)
        return found

    def to_bound_mesh(
        self, values: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], bound: DeviceMesh, rows: Sequence[int]
    ) -> Sequence[DTensor]:
        """``values`` as DTensors on the bound mesh, with the local tensors ``parts`` and global sizes of ``rows``."""
        placements: list[Placements] = []
        shapes = []
        for value, part, size in zip(values, parts, rows, strict=True):
            if bound.ndim == 1:
                placement, shape = (Shard(self._seq_dim),), list(part.shape)
            else:
                assert isinstance(value, DTensor)  # other_axes() saw it
                found = self.of(value.device_mesh)
                assert isinstance(found, OtherAxes)
                placement, shape = (Shard(self._seq_dim), *found.others(value.placements)), list(value.shape)
            shape[self._seq_dim] = size
            placements.append(placement)
            shapes.append(shape)
        return placed_together(parts, bound, placements, shapes)

    def from_bound_mesh(self, name: str, output: DTensor, came: OtherAxes | None) -> torch.Tensor:
        """An output on the bound mesh, converted to the form of the inputs.

        Raises:
            ValueError: the output is not sharded along the sequence any more.
        """
        placement, others = sequence_placement(name, output)
        local = local_part(output, install)  # other code may have removed the handlers since the forward
        if came is None:
            if self._use_local_output:
                return local
            return sequence_sharded(local, self._axis, placement.dim, output.shape[placement.dim])
        shape = list(output.shape)
        if came.seq_axis is None:
            shape[placement.dim] = local.shape[placement.dim]
        return placed(local, came.mesh, came.joined(placement, others), shape)

    def of(self, mesh: DeviceMesh) -> OtherAxes | str:
        """The axes of ``mesh`` other than the sequence's; or a text that says why it is not supported."""
        if mesh not in self._known:
            self._known[mesh] = other_axes_of(mesh, self._composed, self._sequence)
        return self._known[mesh]
