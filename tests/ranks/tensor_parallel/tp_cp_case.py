"""One attention whose heads are sharded by tensor parallelism, on a (cp, tp) mesh; and its gathered result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.testing import run_ranks
from tests.ranks.attention_case import EXACT, Core, Problem, parallel

HEADS, WHOLE = Shard(1), Replicate()  # of [B, H, S, D], on tp


def composed_mesh(*sizes: int, names: tuple[str, ...] = ("cp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (2,) * len(names), mesh_dim_names=names)


def lay(part: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """This cp rank's part of a sequence as a DTensor: it is what the axes other than cp have in common."""
    shape = list(part.shape)
    for axis, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), placements, strict=True)):
        if name == "cp" and isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(axis)
        elif isinstance(placement, Shard):
            part = part.tensor_split(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    stride = torch.empty(shape, device="meta").stride()
    part = part.contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def part_of(tensor: DTensor) -> torch.Tensor:
    """What :func:`lay` laid."""
    names = tensor.device_mesh.mesh_dim_names or ()
    gathered = [
        placement if name == "cp" else Replicate() for name, placement in zip(names, tensor.placements, strict=True)
    ]
    return tensor.redistribute(placements=gathered).to_local()


@dataclass
class Cut:
    """How a problem comes to the module.

    Attributes:
        problem: the whole.
        placements: of query, key and value [B, H, S, D] on the axis beside cp.
        layout: the cut of the sequence.
        full: as DTensors on the composed mesh, not on the other axis alone.
        seq_dim: 1 for [B, S, H, D].
        axis: the name of the other axis.
    """

    problem: Problem
    placements: tuple[Placement, Placement, Placement] = (HEADS, HEADS, HEADS)
    layout: SequenceLayout | Balancer = head_tail
    full: bool = False
    seq_dim: int = 2
    axis: str = "tp"

    def leaves(self, mesh: DeviceMesh) -> list[DTensor]:
        """This rank's query, key and value, as leaves that want gradients."""
        parts, _ = self.problem.shard(self.layout, mesh.get_local_rank("cp"), mesh["cp"].size())
        return [self._lay(x, p, mesh).requires_grad_() for x, p in zip(parts, self.placements, strict=True)]

    def errors(self, core: Any, mesh: DeviceMesh, leaves: list[DTensor] | None = None) -> list[float]:
        """Of out, dq, dk and dv of a forward and a backward, as Problem.errors."""
        leaves = self.leaves(mesh) if leaves is None else leaves
        return self.finish(core(*leaves), leaves, mesh)

    def finish(self, out: DTensor, leaves: list[DTensor], mesh: DeviceMesh) -> list[float]:
        rank, ranks = mesh.get_local_rank("cp"), mesh["cp"].size()
        _, cotangent = self.problem.shard(self.layout, rank, ranks)
        laid = self._lay(cotangent, self.placements[0], mesh)
        assert (out.device_mesh, out.placements, out.shape) == (laid.device_mesh, laid.placements, laid.shape)
        out.backward(laid)
        found = [self._part(x) for x in (out.detach(), *(leaf.grad for leaf in leaves))]
        for leaf in leaves:
            assert leaf.grad is not None
            assert not any(placement.is_partial() for placement in leaf.grad.placements)  # 2.11 replicates uneven ones
        return self.problem.errors(found, self.layout, rank, ranks)

    def _lay(self, part_BHLD: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
        part = part_BHLD.detach()
        if self.seq_dim == 1:
            part = part.transpose(1, 2)
            placement = Shard(3 - placement.dim) if isinstance(placement, Shard) and placement.dim else placement
        if not self.full:
            return lay(part, mesh[self.axis], [placement])
        names = mesh.mesh_dim_names or ()
        of = {"cp": Shard(self.seq_dim), self.axis: placement}
        return lay(part, mesh, [of.get(name, Replicate()) for name in names])

    def _part(self, tensor: DTensor) -> torch.Tensor:
        part = part_of(tensor)
        return part.transpose(1, 2) if self.seq_dim == 1 else part


def exact(cut: Cut, *sizes: int, names: tuple[str, ...] = ("cp", "tp"), causal: bool = True, **style):
    """Out and gradients of all ranks are one device's."""
    ranks = torch.Size(sizes or (2,) * len(names)).numel()

    def on(rank: int) -> list[float]:
        mesh = composed_mesh(*sizes, names=names)
        core = Core(causal=causal, seq_dim=cut.seq_dim)
        return cut.errors(parallel(core, mesh, layout=cut.layout, seq_dim=cut.seq_dim, **style), mesh)

    errors = run_ranks(on, ranks)
    assert max(max(each) for each in errors) < EXACT, errors


class Scaled(Core):
    """A parameter meets a DTensor inside: a scalar, which DTensor takes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, query, key, value):
        return super().forward(query * self.gain, key * self.gain, value)


class Returns(Core):
    """``end`` makes the output of the module from the output of the attention."""

    def __init__(self, end: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.end = end

    def forward(self, query, key, value):
        return self.end(super().forward(query, key, value))
