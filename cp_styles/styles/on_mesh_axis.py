"""Styles on a composed mesh: each style takes its own axis, so that one plan is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, Shard

from cp_styles._lib.compat import hooks_in_order, is_traced, tree_map_only
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.agreement import tell_peers
from cp_styles.styles.dtensors import placed
from cp_styles.styles.mesh_axes import Placements, axis_in, chunk


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
            'name another axis with mesh_axis="...", or pass the 1-D mesh of that axis'
            f"{see('A mesh without this axis')}"
        )
    return device_mesh[axis]


_APPLIED = "_cp_styles_applied"


class OnMeshAxis(ParallelStyle):
    """Mixin for torch's styles (as the first base): adds ``mesh_axis``, and accepts composed meshes.

    Inputs are plain tensors of any shape and floating dtype, or DTensors on the axis. Styles of a Linear, an Embedding
    or a norm also take DTensors on the composed mesh if all remaining axes cut rows: see :class:`AxisAdapter`. Hooks
    and other errors are torch's.

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

    _other_groups: tuple[dist.ProcessGroup, ...] = ()  # over the remaining axes of a composed mesh

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # parallelize_module passes a composed mesh as it is, so take the axis here.
        axis = take_axis(device_mesh, self.mesh_axis, f"{type(self).__name__} on {type(module).__name__}")
        # A text and not an object, so that copies of the module keep it.
        mark = f"{type(self).__name__} over mesh axis {self.mesh_axis!r}"
        if mark in module.__dict__.get(_APPLIED, ()):  # inputs would be sharded or gathered twice
            raise ValueError(
                f"{mark} is on {type(module).__name__} already: apply a style to a module once, and a plan to a model "
                "once"
            )
        names = device_mesh.mesh_dim_names or ()
        self._other_groups = tuple(
            device_mesh.get_group(name) for name in names if device_mesh.ndim > 1 and name != self.mesh_axis
        )
        applied = super()._apply(module, axis)  # pyright: ignore[reportAbstractUsage]
        applied.__dict__.setdefault(_APPLIED, set()).add(mark)
        if device_mesh.ndim > 1:
            who = f"{type(self).__name__} on {type(module).__name__}"
            AxisAdapter(who, axis, device_mesh, self._keeps_rows).register(applied)
        return applied

    def _refuse_uneven(self, where: str, shape: Sequence[int], placement: Placement, axis: DeviceMesh) -> None:
        """Raise ValueError on every rank if rows of ``shape`` cannot be cut evenly over the axis."""
        # Plain tensors do not show the global number of rows. The next style would assume even shards, and the ranks'
        # messages would not fit.
        if not isinstance(placement, Shard):
            return
        dim = placement.dim % len(shape)
        if dim == len(shape) - 1 or shape[dim] % axis.size() == 0:
            return
        problem = ValueError(
            f"{type(self).__name__} on {where}: the size {axis.size()} of mesh axis {self.mesh_axis!r} "
            f"does not divide the {shape[dim]} rows that this rank has of the sequence (dim {dim} of {tuple(shape)}), "
            f"and plain tensors do not show the global number: pad the sequence to a length whose part on each rank "
            f"{axis.size()} divides, or leave out sequence parallelism, Shard({dim})"
            f"{see('A part that tensor parallelism does not divide')}"
        )
        if not is_traced():
            # All ranks of this axis raise. Ranks of other axes may hold another number of rows.
            for group in self._other_groups:
                tell_peers(f"{type(self).__name__} on {where}", group, problem)
        raise problem

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, mesh_axis={self.mesh_axis!r})"


# -- DTensors on several axes of a composed mesh, as inputs of styles that work on one axis --


class _ComposedForm(NamedTuple):
    """The form of a module's input: its mesh and placements, the index of the style's axis, and its rows."""

    mesh: DeviceMesh
    placements: Placements
    own_axis: int
    rows: dict[int, tuple[int, int]]  # for each dim that other axes cut: (local size, global size)


class AxisAdapter:
    """Removes the axes other than the style's from the inputs of a module, and adds them to its outputs again.

    The module gets DTensors on the axis of the style alone, with this rank's rows. Parameters stay on this axis. Their
    gradients are this rank's share (``sum_gradients``). No communication.

    Args:
        who: the style and the module, for messages.
        axis: the 1-D mesh of the style.
        composed: the mesh that the style was given.
        keeps_rows: whether all dims but the last have the same size in the module's output as in its input.
    """

    # A Linear with DTensors on [cp, tp] would gather the sequence over cp to add a bias.

    def __init__(self, who: str, axis: DeviceMesh, composed: DeviceMesh, keeps_rows: bool) -> None:
        self._who = who
        self._axis = axis
        self._composed = composed
        self._keeps_rows = keeps_rows
        self._form: _ComposedForm | None = None

    def register(self, module: nn.Module) -> None:
        """Register hooks that run before the style's own on inputs, and after them on outputs."""
        module.register_forward_pre_hook(self._remove_axes, prepend=True)
        module.register_forward_hook(self._restore_axes)
        hooks_in_order(module)

    def _remove_axes(self, module: nn.Module, args: Any) -> Any:
        if self._form is not None:  # the previous forward has failed
            self._form = None
        return tree_map_only(DTensor, self._take_own_axis, args)

    def _take_own_axis(self, value: DTensor) -> DTensor:
        if value.device_mesh.ndim == 1:
            return value
        (name,) = self._axis.mesh_dim_names or ("",)
        found = f"{self._who}: got a DTensor on mesh axes {value.device_mesh.mesh_dim_names} with {value.placements}"
        try:
            own_axis = axis_in(value.device_mesh, self._composed, name)
        except ValueError as error:
            raise ValueError(f"{found}: {error}") from None
        if own_axis is None:
            raise ValueError(f"{found}: it lacks the axis {name!r} of the style")
        if not self._keeps_rows:
            raise NotImplementedError(
                f"{found}, but this style takes DTensors on {name!r} alone. ColwiseParallel, RowwiseParallel and "
                "SequenceParallel take DTensors on several axes and redistribute over their own: leave this style out"
            )
        placement, other_axes = value.placements[own_axis], {*range(value.device_mesh.ndim)} - {own_axis}
        cut = {axis: shard.dim for axis in other_axes if type(shard := value.placements[axis]) is Shard}
        features_dim = value.ndim - 1 if value.is_floating_point() else None  # token ids have no features
        if len(cut) < len(other_axes) or features_dim in cut.values():
            raise ValueError(
                f"{found}: every axis other than {name!r} must cut rows, such as Shard(1) of [B, S, W]. With other "
                "placements the sum of the parameter gradients would not equal the sum on one device"
            )
        if type(placement) is Shard and any(axis > own_axis for axis, dim in cut.items() if dim == placement.dim):
            raise ValueError(f"{found}: {name!r} must come after the axes that cut the same dim, as tp in ('cp', 'tp')")
        shape, coordinates = list(value.shape), value.device_mesh.get_coordinate() or ()
        for axis, dim in cut.items():
            start, stop = chunk(shape[dim], value.device_mesh.size(axis), coordinates[axis])
            shape[dim] = stop - start
        rows = {dim: (shape[dim], value.shape[dim]) for dim in cut.values()}
        self._form = _ComposedForm(value.device_mesh, value.placements, own_axis, rows)
        return placed(value.to_local(), self._axis, (placement,), shape)

    def _restore_axes(self, module: nn.Module, args: Any, output: Any) -> Any:
        form, self._form = self._form, None
        return output if form is None else tree_map_only(DTensor, lambda x: self._place_on_all_axes(x, form), output)

    def _place_on_all_axes(self, value: DTensor, form: _ComposedForm) -> torch.Tensor:
        if value.device_mesh != self._axis:
            return value
        (placement,) = value.placements
        shape = list(value.shape)
        for dim, (local_rows, rows) in form.rows.items():
            assert shape[dim] == local_rows  # styles that keep rows take a Linear, an Embedding or a norm
            shape[dim] = rows
        placements = (*form.placements[: form.own_axis], placement, *form.placements[form.own_axis + 1 :])
        if isinstance(placement, Shard) and placement in placements[form.own_axis + 1 :]:
            raise ValueError(
                f"{self._who}: the output would be {placements} on {form.mesh.mesh_dim_names}, but the axis "
                "of the style must come after the axes that cut the same dim, as tp in ('cp', 'tp')"
            )
        return placed(value.to_local(), form.mesh, placements, shape)
