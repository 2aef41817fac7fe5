"""Tensor parallelism: torch's Colwise and Rowwise styles on their axis of a composed mesh."""

from __future__ import annotations

from torch.distributed.tensor import parallel as torch_parallel

from cp_styles.styles.mesh_axis import OnMeshAxis


class ColwiseParallel(OnMeshAxis, torch_parallel.ColwiseParallel):
    """Cut a Linear or an Embedding by its output features over the mesh axis ``mesh_axis``.

    The arguments and what they do are those of :class:`torch.distributed.tensor.parallel.ColwiseParallel`. On a
    composed mesh the other axes are not touched: under context parallelism every cp rank runs this style on its own
    slice of the sequence, and the gradients of the parameters are still to be summed over cp (``sum_gradients``).

    Args:
        mesh_axis: the axis to take from a mesh of several; a 1-D mesh is taken whatever its name.

    DTensors on the composed mesh are taken too, where the other axes cut rows: see
    :class:`~cp_styles.styles.other_axes.AxisAdapter`.

    Raises:
        TypeError, ValueError: when applied to what :func:`cp_styles.styles.mesh_axis.take_axis` refuses.
    """

    _keeps_rows = True


class RowwiseParallel(OnMeshAxis, torch_parallel.RowwiseParallel):
    """Cut a Linear or an Embedding by its input features over ``mesh_axis``.

    As :class:`ColwiseParallel` of this module, for :class:`torch.distributed.tensor.parallel.RowwiseParallel`. A
    Linear with bias is right as well: the module sees this one axis only, so the bias is added once, and nothing is
    gathered over the others.
    """

    _keeps_rows = True
