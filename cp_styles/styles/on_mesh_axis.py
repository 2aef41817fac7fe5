"""Styles on a composed mesh: each style takes its own axis, so that one plan is enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, Shard

from cp_styles._compat import is_traced
from cp_styles.comm.agreement import report_failure
from cp_styles.styles.axis_adapter import AxisAdapter
from cp_styles.troubleshooting import see


def take_axis(device_mesh: DeviceMesh, axis: str, who: str) -> DeviceMesh:
    """The 1-D mesh on which ``who`` works: ``device_mesh[axis]``, or ``device_mesh`` itself when it is 1-D.

    A 1-D mesh is taken whatever its name, as torch's own styles do. No communication.

    Raises:
        TypeError: ``device_mesh`` is not a DeviceMesh.
        ValueError: ``device_mesh`` has several axes and none of them is called ``axis``.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"{who} needs a DeviceMesh, got {type(device_mesh).__name__}: "
            'call init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), for example'
        )
    if device_mesh.ndim == 1:
        return device_mesh
    names = device_mesh.mesh_dim_names
    if names is None or axis not in names:
        axes = f"axes {names}" if names else f"{device_mesh.ndim} axes without names"
        raise ValueError(
            f'{who} works on the mesh axis "{axis}", but the mesh has {axes}: name one of them "{axis}", '
            'say which one is meant with mesh_axis="...", or pass the 1-D mesh of that axis'
            f"{see('A mesh without this axis')}"
        )
    return device_mesh[axis]


_APPLIED = "_cp_styles_applied"


class OnMeshAxis(ParallelStyle):
    """Mixin for torch's styles (as the first base): adds ``mesh_axis``, and accepts composed meshes.

    Inputs are plain tensors of any shape and floating dtype, or DTensors on the axis. Styles of a Linear, an Embedding
    or a norm also take DTensors on the composed mesh if the other axes cut rows: see
    :class:`~cp_styles.styles.axis_adapter.AxisAdapter`. Hooks and other errors are torch's.

    Args:
        mesh_axis: the name of the axis in a mesh with several axes. A 1-D mesh is used whatever its name.
        input_layouts, output_layouts, desired_input_layouts, desired_output_layouts, input_kwarg_layouts,
            desired_input_kwarg_layouts, use_local_input, use_local_output, sequence_dim: as in the class of the same
            name in :mod:`torch.distributed.tensor.parallel`, each where torch's class has it.

    Raises:
        TypeError, ValueError: when applied, if the mesh is not a DeviceMesh or lacks the axis, or if the module has the
            style already; at a call, for DTensors whose other axes do not cut rows, and, on every rank, for outputs
            that leave as plain tensors and are cut by rows (``Shard(1)``) whose number the axis does not divide.
        NotImplementedError: DTensors on several axes reach a style for inputs or outputs of any module.
    """

    _keeps_rows = False  # whether all dims but the last have the same size in the output as in the input

    mesh_axis: str

    _others: tuple[dist.ProcessGroup, ...] = ()  # the other axes of the mesh that it was given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # parallelize_module passes a composed mesh as it is, so take the axis here.
        axis = take_axis(device_mesh, self.mesh_axis, f"{type(self).__name__} on {type(module).__name__}")
        mark = (
            f"{type(self).__name__} over mesh axis {self.mesh_axis!r}"  # a text, so that copies of the module keep it
        )
        if mark in module.__dict__.get(_APPLIED, ()):  # inputs would be sharded or gathered twice
            raise ValueError(
                f"{mark} is on {type(module).__name__} already: apply a style to a module once, and a plan to a model "
                "once"
            )
        names = device_mesh.mesh_dim_names or ()
        self._others = tuple(
            device_mesh.get_group(name) for name in names if device_mesh.ndim > 1 and name != self.mesh_axis
        )
        applied = super()._apply(module, axis)  # pyright: ignore[reportAbstractUsage]
        applied.__dict__.setdefault(_APPLIED, set()).add(mark)
        if device_mesh.ndim > 1:
            who = f"{type(self).__name__} on {type(module).__name__}"
            AxisAdapter(who, axis, device_mesh, self._keeps_rows).register(applied)
        return applied

    def _refuse_uneven(self, where: str, shape: Sequence[int], placement: Placement, axis: DeviceMesh) -> None:
        """Raise if rows of ``shape`` cannot be cut evenly over the axis: plain parts do not tell how many there are.

        The next style would take this rank's part for one of an even cut, and the ranks' messages would not fit. All
        ranks of the axis see that alike. Those of other axes, which may hold another number of rows, are told.
        """
        if not isinstance(placement, Shard):
            return
        dim = placement.dim % len(shape)
        if dim == len(shape) - 1 or shape[dim] % axis.size() == 0:
            return
        problem = ValueError(
            f"{type(self).__name__} on {where}: the size {axis.size()} of mesh axis {self.mesh_axis!r} "
            f"does not divide the {shape[dim]} rows that this rank has of the sequence (dim {dim} of {tuple(shape)}), "
            "and as plain tensors the parts do not tell how many there are: choose a length whose part on each rank "
            f"{axis.size()} divides, pad the sequence before it is cut, or leave out sequence parallelism, Shard({dim})"
            f"{see('A part that tensor parallelism does not divide')}"
        )
        if not is_traced():
            for group in self._others:
                report_failure(f"{type(self).__name__} on {where}", group)
        raise problem

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, mesh_axis={self.mesh_axis!r})"
