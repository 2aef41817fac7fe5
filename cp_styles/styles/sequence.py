"""Sequence parallelism: torch's style on its axis of a composed mesh."""

from __future__ import annotations

from torch.distributed.tensor import parallel as torch_parallel

from cp_styles.styles.mesh_axis import OnMeshAxis


class SequenceParallel(OnMeshAxis, torch_parallel.SequenceParallel):
    """Run a norm (or dropout) with its input cut along the sequence over the mesh axis ``mesh_axis``.

    The arguments and what they do are those of :class:`torch.distributed.tensor.parallel.SequenceParallel`, and so is
    its trap: the parameters are taken as they are on every rank, never broadcast. Under context parallelism "the
    sequence" is the slice the cp rank holds, and it must divide by the size of this axis when the input is a plain
    tensor.

    Args:
        mesh_axis: the axis to take from a mesh of several; a 1-D mesh is taken whatever its name.
    """

    _keeps_rows = True
