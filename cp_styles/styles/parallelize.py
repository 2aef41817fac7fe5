"""torch's ``parallelize_module``, with an error where a path of the plan matches no module."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles._lib.introspect import matches
from cp_styles._lib.troubleshooting import see


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """:func:`torch.distributed.tensor.parallel.parallelize_module`, with an error for paths that match no module.

    torch only warns then, and the attention that was meant stays local to each rank. Here nothing is applied.

    Args:
        module: the model, or a part of it. It is changed, and returned.
        device_mesh: the mesh, which may have several axes: each style of this package takes its own.
        parallelize_plan: a style, or a mapping from names of modules to styles. Each part of a name between dots may
            hold ``*`` and ``?``.
        src_data_rank: as in torch: the rank of each axis whose parameters its peers get, for styles that distribute
            parameters. None: every rank uses its own.

    Communication: the styles'. Styles for context parallelism send nothing here.

    Raises:
        ValueError: a path of the plan matches no module. The message lists similar names.

    Example::

        plan = {"layers.*.attention": ModuleContextParallel(layout=head_tail)}
        parallelize_module(model, mesh, plan)
    """
    if isinstance(parallelize_plan, Mapping):
        paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
        unmatched = [pattern for pattern in parallelize_plan if not any(matches(path, pattern) for path in paths)]
        if unmatched:
            names = [name for name, _ in module.named_modules() if name]
            near = {path: get_close_matches(path, names, 3, 0.3) for path in unmatched}
            listed = "; ".join(
                f"{path!r}" + (f" (near: {', '.join(similar)})" if similar else "") for path, similar in near.items()
            )
            raise ValueError(
                f"the plan for {type(module).__name__} has paths that match no module: {listed}. Correct them: print "
                "the names with module.named_modules(); each part between dots may hold * and ?"
                f"{see('A path that matches no module')}"
            )
        parallelize_plan = dict(parallelize_plan)
    return torch_parallel.parallelize_module(module, device_mesh, parallelize_plan, src_data_rank=src_data_rank)
