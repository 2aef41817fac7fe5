"""Tensor parallelism: torch's ColwiseParallel and RowwiseParallel on their axis of a composed mesh."""

from __future__ import annotations

from torch.distributed.tensor import parallel as torch_parallel

from cp_styles.styles.mesh_axis import OnMeshAxis


class ColwiseParallel(OnMeshAxis, torch_parallel.ColwiseParallel):
    """Shard a Linear or an Embedding by its output features over the mesh axis ``mesh_axis``.

    Arguments and behaviour are those of :class:`torch.distributed.tensor.parallel.ColwiseParallel`. Other axes of a
    composed mesh are not affected. Under context parallelism, every cp rank runs this style on its part of the
    sequence. The gradients of the parameters must then be summed over cp (``sum_gradients``).

    Args:
        mesh_axis: the name of the axis in a mesh with several axes. A 1-D mesh is used whatever its name.

    Inputs may be DTensors on the composed mesh if the other axes cut rows: see
    :class:`~cp_styles.styles.other_axes.AxisAdapter`.

    Raises:
        TypeError, ValueError: for a mesh that :func:`cp_styles.styles.mesh_axis.take_axis` refuses.
    """

    _keeps_rows = True


class RowwiseParallel(OnMeshAxis, torch_parallel.RowwiseParallel):
    """Shard a Linear or an Embedding by its input features over the mesh axis ``mesh_axis``.

    Like :class:`ColwiseParallel` of this module, for :class:`torch.distributed.tensor.parallel.RowwiseParallel`. A
    Linear may have a bias: the module gets DTensors on this axis only, so the bias is added once, and nothing is
    gathered over other axes.
    """

    _keeps_rows = True
