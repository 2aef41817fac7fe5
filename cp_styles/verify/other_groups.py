"""Finds collectives that a step with one rank makes over ranks that it should not know."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles._lib.compat import calling_frames, group_of_op
from cp_styles._lib.troubleshooting import see


class OtherGroups(TorchDispatchMode):
    """Notes the collectives of a step with one rank over a group that has other ranks of its sequence.

    Such a group is not made of the mesh that the step is given, so a sum over it adds the same result several times.
    Reducers are not noted: FSDP2 and DDP average equal gradients. Nor are collectives that change nothing if ranks have
    equal values: a maximum, a mean, a broadcast.

    Attributes:
        found: a text for the first one.
    """

    supports_higher_order_operators = True

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__()
        self._ranks, self.found = set(ranks), list[str]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside of the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the ops on its local tensors come back here
        if not self.found and getattr(func, "namespace", "") in _NAMESPACES and any(x in func.name() for x in _COMBINE):
            group = group_of_op(args)
            ranks = [] if group is None else dist.get_process_group_ranks(group)
            if len(self._ranks.intersection(ranks)) > 1 and not _MEAN_OR_BOUND.intersection(map(str, args[1:2])):
                self.found.extend(_describe_caller(ranks))
        return func(*args, **(kwargs or {}))


_NAMESPACES = "c10d", "_c10d_functional", "_c10d_functional_autograd"
_COMBINE = "reduce", "gather", "alltoall", "all_to_all"
_MEAN_OR_BOUND = {"avg", "max", "min", "band", "bor"}
# Frames between a collective and the code that calls it.
_API = (
    *("torch._compile", "torch._dynamo", "torch._library", "torch._ops", "torch.overrides", "torch.autograd.function"),
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.distributed.nn"),
    *("torch.distributed._functional_collectives", "accelerate."),
)
# DeepSpeed reduces gradients as FSDP2 does. Losses of TRL combine their metrics, on which no gradient depends.
_LIBRARIES = "torch.", "cp_styles.", "deepspeed.", "trl."


def _describe_caller(ranks: list[int]) -> list[str]:
    """A text that names the line of a collective over ``ranks``. None for collectives of torch's own reducers."""
    name = ""
    for frame in calling_frames():
        module = frame.f_globals.get("__name__", "")
        if module == __name__ or frame.f_code.co_name == "__torch_function__" or module.startswith(_API):
            if module.startswith("torch.distributed.") and frame.f_code.co_name != "wrapper":
                name = frame.f_code.co_name
                if str(_reduction_of(frame)).rpartition(".")[2].lower() in _MEAN_OR_BOUND:
                    return []
            continue
        if f"{module}.".startswith(_LIBRARIES):
            return []
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        return [
            f"the step with one rank communicates over the ranks {ranks}: {name} at {place}. This group is not made of "
            "the mesh that the step is given, where this rank is alone: it combines equal results, so the comparison "
            "holds for nothing. Give it the group of this mesh, group=mesh.get_group(), or take sum_gradients, "
            f"global_token_count and global_loss{see('A group that is not of the mesh')}"
        ]
    return []


def _reduction_of(frame: FrameType) -> Any:
    return frame.f_locals.get("op", frame.f_locals.get("reduceOp", ""))
