"""Sequence parallelism: torch's style on its axis of a composed mesh."""

from __future__ import annotations

from torch.distributed.tensor import parallel as torch_parallel

from cp_styles.styles.mesh_axis import OnMeshAxis


class SequenceParallel(OnMeshAxis, torch_parallel.SequenceParallel):
    """Run a norm (or dropout) with its input sharded along the sequence over the mesh axis ``mesh_axis``.

    Arguments and behaviour are those of :class:`torch.distributed.tensor.parallel.SequenceParallel`. Like there, the
    parameters are not broadcast: they must be equal on all ranks. Under context parallelism "the sequence" is the part
    of the cp rank. If the input is a plain tensor, the size of this axis must divide its length.

    Args:
        mesh_axis: the name of the axis in a mesh with several axes. A 1-D mesh is used whatever its name.
    """

    _keeps_rows = True
