"""DTensors on several axes of a composed mesh as inputs of styles that work on one axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles._compat import hooks_in_order, tree_map_only
from cp_styles.styles.dtensors import placed
from cp_styles.styles.mesh_axes import Placements, axis_in, chunk


class _InputForm(NamedTuple):
    """The form of a module's input: its mesh and placements, the index of the style's axis, and its rows."""

    mesh: DeviceMesh
    placements: Placements
    own_axis: int
    rows: dict[int, tuple[int, int]]  # for each dim that other axes cut: (local size, global size)


class AxisAdapter:
    """Removes the axes other than the style's from the inputs of a module, and adds them to its outputs again.

    If a Linear got DTensors on [cp, tp], DTensor would propagate them, and would gather the sequence over cp to add a
    bias. So the module gets DTensors on the axis of the style alone, with this rank's rows. Parameters stay on this
    axis. Their gradients are this rank's share (``sum_gradients``). No communication.

    Args:
        who: the style and the module, for messages.
        axis: the 1-D mesh of the style.
        composed: the mesh that the style was given.
        keeps_rows: whether all dims but the last have the same size in the module's output as in its input.
    """

    def __init__(self, who: str, axis: DeviceMesh, composed: DeviceMesh, keeps_rows: bool) -> None:
        self._who = who
        self._axis = axis
        self._composed = composed
        self._keeps_rows = keeps_rows
        self._form: _InputForm | None = None

    def register(self, module: nn.Module) -> None:
        """Register hooks that run before the style's own on inputs, and after them on outputs."""
        module.register_forward_pre_hook(self._lower, prepend=True)
        module.register_forward_hook(self._lift)
        hooks_in_order(module)

    def _lower(self, module: nn.Module, args: Any) -> Any:
        if self._form is not None:  # from a forward that failed
            self._form = None
        return tree_map_only(DTensor, self._on_own_axis, args)

    def _on_own_axis(self, value: DTensor) -> DTensor:
        if value.device_mesh.ndim == 1:
            return value
        (name,) = self._axis.mesh_dim_names or ("",)
        what = f"{self._who}: got a DTensor on mesh axes {value.device_mesh.mesh_dim_names} with {value.placements}"
        try:
            own_axis = axis_in(value.device_mesh, self._composed, name)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
        if own_axis is None:
            raise ValueError(f"{what}: it lacks the axis {name!r} of the style")
        if not self._keeps_rows:
            raise NotImplementedError(
                f"{what}, but this style takes DTensors on {name!r} alone. ColwiseParallel, RowwiseParallel and "
                "SequenceParallel take DTensors on several axes and redistribute over their own: leave this style out"
            )
        placement, others = value.placements[own_axis], {*range(value.device_mesh.ndim)} - {own_axis}
        cut = {axis: other.dim for axis in others if type(other := value.placements[axis]) is Shard}
        features = value.ndim - 1 if value.is_floating_point() else None  # and tokens have none
        if len(cut) < len(others) or features in cut.values():
            raise ValueError(
                f"{what}: every axis other than {name!r} must cut rows, such as Shard(1) of [B, S, W]. With other "
                "placements the sum of the parameter gradients would not be that of one device"
            )
        if type(placement) is Shard and any(axis > own_axis for axis, dim in cut.items() if dim == placement.dim):
            raise ValueError(f"{what}: {name!r} must come after the axes that cut the same dim, as tp in ('cp', 'tp')")
        shape, place = list(value.shape), value.device_mesh.get_coordinate() or ()
        for axis, dim in cut.items():
            start, stop = chunk(shape[dim], value.device_mesh.size(axis), place[axis])
            shape[dim] = stop - start
        rows = {dim: (shape[dim], value.shape[dim]) for dim in cut.values()}
        self._form = _InputForm(value.device_mesh, value.placements, own_axis, rows)
        return placed(value.to_local(), self._axis, (placement,), shape)

    def _lift(self, module: nn.Module, args: Any, output: Any) -> Any:
        form, self._form = self._form, None
        return output if form is None else tree_map_only(DTensor, lambda value: self._on_all_axes(value, form), output)

    def _on_all_axes(self, value: DTensor, form: _InputForm) -> torch.Tensor:
        if value.device_mesh != self._axis:
            return value
        (placement,) = value.placements
        shape = list(value.shape)
        for dim, (rows, whole) in form.rows.items():
            assert shape[dim] == rows  # a Linear, an Embedding or a norm: what the styles took
            shape[dim] = whole
        placements = (*form.placements[: form.own_axis], placement, *form.placements[form.own_axis + 1 :])
        if isinstance(placement, Shard) and placement in placements[form.own_axis + 1 :]:
            raise ValueError(
                f"{self._who}: the output would be {placements} on {form.mesh.mesh_dim_names}, but the axis "
                "of the style must come after the axes that cut the same dim, as tp in ('cp', 'tp')"
            )
        return placed(value.to_local(), form.mesh, placements, shape)
