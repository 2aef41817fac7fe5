"""Reducers that average gradients over the ranks of a sequence: FSDP2 and DDP."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from cp_styles._lib.compat import meshes_of_fsdp


class MeanByHand(NamedTuple):
    """The ``averaged_over`` of a loss, and the reducer that averages over fewer ranks: the program does the rest."""

    averaged_over: int
    reducer: str
    over: int


class Average(NamedTuple):
    reducer: str  # "FSDP2", or the class of the DDP module
    ranks: int  # the number of ranks of a sequence over which it averages gradients
    parameters: set[int]  # the ids of the parameters


def find_average(model: nn.Module, ddp: nn.Module | None, ranks: set[int]) -> Average:
    """The reducer that averages gradients of ``model`` over most of ``ranks``. ``ddp`` is the DDP module around it."""
    averaging = [Average("", 0, set())]
    if isinstance(ddp, DistributedDataParallel):
        both = ranks.intersection(dist.get_process_group_ranks(ddp.process_group))
        reduced = {id(x) for name, x in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
        averaging.append(Average(type(ddp).__name__, len(both), reduced))
    reduced = set[int]()
    for module in model.modules():
        if isinstance(module, FSDPModule) and any(map(_NEEDS_GRAD, module.parameters())):
            over = max([_count_common_ranks(mesh, ranks) for mesh in meshes_of_fsdp(module)], default=0)
            reduced |= set(map(id, module.parameters())) if over > 1 else set()
            averaging.append(Average("FSDP2", over, reduced))
    return max(averaging, key=attrgetter("ranks"))


_NEEDS_GRAD = attrgetter("requires_grad")


def _count_common_ranks(mesh: DeviceMesh, ranks: set[int]) -> int:
    """The number of ``ranks`` on the axes of ``mesh`` through this rank."""
    groups = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    return math.prod(max(1, len(ranks.intersection(group))) for group in groups)
