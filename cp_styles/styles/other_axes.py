"""DTensors on several axes of a composed mesh, for styles that work on one of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles._compat import hooks_in_order, tree_map_only
from cp_styles.engine.dtensor_handlers import placed
from cp_styles.engine.mesh_axes import OtherAxes, Placements, other_axes_of


class _Came(NamedTuple):
    """How a module's input came: the axes beside the style's, its placements on them, and its rows."""

    other_axes: OtherAxes
    others: Placements
    rows: dict[int, tuple[int, int]]  # of each dim that the others cut: how many on this rank, and in all


class AxisAdapter:
    """Takes the axes that are not its style's away from what comes into a module, and gives them back to what leaves.

    A Linear on DTensors of [cp, tp] would be DTensor's to propagate, and for the sake of a bias that gathers the
    sequence over cp. So the module sees DTensors on the style's axis alone, whose rows are this rank's part. Parameters
    stay on the one axis, and their gradients are this rank's share (``sum_gradients``). No communication.

    Args:
        who: the style and the module, for messages.
        axis: the 1-D mesh of the style.
        composed: the mesh the style was given.
        keeps_rows: whether all dims of the module's input but the last come out as they went in.
    """

    def __init__(self, who: str, axis: DeviceMesh, composed: DeviceMesh, keeps_rows: bool) -> None:
        self._who = who
        self._axis = axis
        self._composed = composed
        self._keeps_rows = keeps_rows
        self._came: _Came | None = None

    def register(self, module: nn.Module) -> None:
        """Before the style's own hooks on the way in, after them on the way out."""
        module.register_forward_pre_hook(self._lower, prepend=True)
        module.register_forward_hook(self._lift)
        hooks_in_order(module)

    def _lower(self, module: nn.Module, args: Any) -> Any:
        if self._came is not None:  # from a forward that failed
            self._came = None
        return tree_map_only(DTensor, self._without, args)

    def _without(self, value: DTensor) -> DTensor:
        if value.device_mesh.ndim == 1:
            return value
        (name,) = self._axis.mesh_dim_names or ("",)
        what = f"{self._who}: got a DTensor on mesh axes {value.device_mesh.mesh_dim_names} with {value.placements}"
        found = other_axes_of(value.device_mesh, self._composed, (name,))
        if isinstance(found, str) or found.seq_axis is None:
            raise ValueError(
                f"{what}: {found if isinstance(found, str) else f'it lacks the axis {name!r} of the style'}"
            )
        if not self._keeps_rows:
            raise NotImplementedError(
                f"{what}, but this style takes DTensors on {name!r} alone. ColwiseParallel, RowwiseParallel and "
                "SequenceParallel take such ones, and redistribute over their axis by themselves: leave this one out"
            )
        others, own = found.others(value.placements), value.placements[found.seq_axis]
        cut = {axis: each.dim for axis, each in zip(found.axes, others, strict=True) if type(each) is Shard}
        features = value.ndim - 1 if value.is_floating_point() else None  # and tokens have none
        if len(cut) < len(others) or features in cut.values():
            raise ValueError(
                f"{what}: every axis beside {name!r} must cut rows, as Shard(1) does of [B, S, W]. Of anything else "
                "the gradients of parameters would not sum up to one device's"
            )
        if type(own) is Shard and any(axis > found.seq_axis for axis, dim in cut.items() if dim == own.dim):
            raise ValueError(f"{what}: {name!r} must come after the axes that cut the same dim, as tp in ('cp', 'tp')")
        shape, place = list(value.shape), value.device_mesh.get_coordinate() or ()
        for axis, dim in cut.items():
            size = -(-shape[dim] // value.device_mesh.size(axis))
            shape[dim] = min(size, max(shape[dim] - place[axis] * size, 0))
        self._came = _Came(found, others, {dim: (shape[dim], value.shape[dim]) for dim in cut.values()})
        return placed(value.to_local(), self._axis, (own,), shape)

    def _lift(self, module: nn.Module, args: Any, output: Any) -> Any:
        came, self._came = self._came, None
        return output if came is None else tree_map_only(DTensor, lambda value: self._with(value, came), output)

    def _with(self, value: DTensor, came: _Came) -> torch.Tensor:
        if value.device_mesh != self._axis:
            return value
        (own,) = value.placements
        shape = list(value.shape)
        for dim, (rows, whole) in came.rows.items():
            assert shape[dim] == rows  # a Linear, an Embedding or a norm: what the styles took
            shape[dim] = whole
        placements = came.other_axes.joined(own, came.others)
        assert came.other_axes.seq_axis is not None  # seen when it came
        if isinstance(own, Shard) and own in placements[came.other_axes.seq_axis + 1 :]:
            raise ValueError(
                f"{self._who}: the output would be {placements} on {came.other_axes.mesh.mesh_dim_names}, where the "
                "style's axis must come after those that cut the same dim, as tp in ('cp', 'tp')"
            )
        return placed(value.to_local(), came.other_axes.mesh, placements, shape)
