"""torch's PrepareModule styles, which make DTensors of inputs and outputs, on their axis of a composed mesh."""

from __future__ import annotations

from torch.distributed.tensor import parallel as torch_parallel

from cp_styles.styles.mesh_axis import OnMeshAxis


class PrepareModuleInput(OnMeshAxis, torch_parallel.PrepareModuleInput):
    """:class:`torch.distributed.tensor.parallel.PrepareModuleInput`, on its own axis of a composed mesh."""


class PrepareModuleOutput(OnMeshAxis, torch_parallel.PrepareModuleOutput):
    """:class:`torch.distributed.tensor.parallel.PrepareModuleOutput`, on its own axis of a composed mesh."""


class PrepareModuleInputOutput(OnMeshAxis, torch_parallel.PrepareModuleInputOutput):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one style, as in torch."""
