"""torch's tensor-parallel styles, each on its own axis of a composed mesh.

Under context parallelism every cp rank runs a style on its shard of the sequence. The gradients of the parameters must
then be summed over cp (``sum_gradients``). Communication: inputs and outputs are redistributed over the axis of the
style alone.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.placement_types import Placement, Shard

from cp_styles.styles.on_mesh_axis import OnMeshAxis

Inputs: TypeAlias = Placement | tuple[Placement | None, ...] | None
"""Placements of a module's positional inputs: one for all, or one for each input. None leaves an input as it is."""


class _EvenOutputs(OnMeshAxis):
    """Refuses plain outputs whose rows the axis does not divide."""

    _keeps_rows = True

    def _prepare_output_fn(  # a static method in torch
        self, output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if use_local_output:
            self._refuse_uneven(type(mod).__name__, outputs.shape, output_layouts[0], device_mesh)
        return super()._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)  # pyright: ignore


class ColwiseParallel(_EvenOutputs, torch_parallel.ColwiseParallel):
    """torch's style that shards a Linear or an Embedding by its output features, over the mesh axis ``mesh_axis``.
    Arguments and errors: see :class:`~cp_styles.styles.on_mesh_axis.OnMeshAxis`.

    Example::

        plan = {"attention.wq": ColwiseParallel(), "attention.wo": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cuda", (2, 4), mesh_dim_names=("cp", "tp")), plan)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        mesh_axis: str = "tp",
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.mesh_axis = mesh_axis


class RowwiseParallel(_EvenOutputs, torch_parallel.RowwiseParallel):
    """torch's style that shards a Linear or an Embedding by its input features, over the mesh axis ``mesh_axis``.

    A Linear may have a bias: the module gets DTensors on this axis only, so the bias is added once, and nothing is
    gathered over other axes. Arguments, errors and example: see :class:`ColwiseParallel`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        mesh_axis: str = "tp",
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.mesh_axis = mesh_axis


class SequenceParallel(OnMeshAxis, torch_parallel.SequenceParallel):
    """torch's style that runs a norm (or dropout) with its input sharded along the sequence, over ``mesh_axis``.

    As in torch, the parameters are not broadcast: they must be equal on all ranks. Under context parallelism "the
    sequence" is the part of the cp rank. If the input is a plain tensor, the size of this axis must divide its length.
    No communication where the input is cut along the sequence already. Arguments and errors: see
    :class:`~cp_styles.styles.on_mesh_axis.OnMeshAxis`.

    Example::

        plan = {"norm": SequenceParallel(), "wq": ColwiseParallel(input_layouts=Shard(1))}
    """

    _keeps_rows = True

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False, mesh_axis: str = "tp") -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        self.mesh_axis = mesh_axis

    def _prepare_output_fn(self, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        if use_local_output:
            self._refuse_uneven(type(mod).__name__, outputs.shape, outputs.placements[0], device_mesh)
        return super()._prepare_output_fn(use_local_output, mod, outputs, device_mesh)  # pyright: ignore


class PrepareModuleInput(OnMeshAxis, torch_parallel.PrepareModuleInput):
    """torch's style that makes a module's inputs DTensors, and redistributes them, over the mesh axis ``mesh_axis``.
    Arguments and errors: see :class:`~cp_styles.styles.on_mesh_axis.OnMeshAxis`.

    Example::

        plan = {"attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())}
    """

    def __init__(
        self,
        *,
        input_layouts: Inputs = None,
        desired_input_layouts: Inputs = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        mesh_axis: str = "tp",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.mesh_axis = mesh_axis


class PrepareModuleOutput(OnMeshAxis, torch_parallel.PrepareModuleOutput):
    """torch's style that makes a module's outputs DTensors, and redistributes them, over the mesh axis ``mesh_axis``.
    Arguments and errors: see :class:`~cp_styles.styles.on_mesh_axis.OnMeshAxis`.

    Example::

        plan = {"attention": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))}
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
        mesh_axis: str = "tp",
    ) -> None:
        super().__init__(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        self.mesh_axis = mesh_axis

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        if self.use_local_output:
            tensors = outputs if isinstance(outputs, tuple) else (outputs,)
            for out, kind, leaves in zip(tensors, self.output_layouts, self.desired_output_layouts, strict=False):
                if isinstance(out, torch.Tensor) and kind is not None and (isinstance(out, DTensor) or kind != leaves):
                    shape = list(out.shape)
                    if isinstance(kind, Shard) and not isinstance(out, DTensor):
                        shape[kind.dim] *= device_mesh.size()
                    self._refuse_uneven("a module", shape, leaves, device_mesh)
        return super()._prepare_out_fn(outputs, device_mesh)


class PrepareModuleInputOutput(OnMeshAxis, torch_parallel.PrepareModuleInputOutput):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one, with the arguments and errors of both.
    ``use_local_input`` hands the module plain tensors. Example: see :class:`PrepareModuleInput`.
    """

    def __init__(
        self,
        *,
        input_layouts: Inputs = None,
        desired_input_layouts: Inputs = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
        mesh_axis: str = "tp",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_input=use_local_input,
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        self.mesh_axis = mesh_axis
