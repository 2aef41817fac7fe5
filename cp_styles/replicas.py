"""Parameters that several ranks hold: which are meant to be equal, and which are equal no more."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from cp_styles._compat import sharded_parameters, without_dispatch_modes
from cp_styles.checksum import device_checksum, on_host
from cp_styles.comm.group_state import GroupState
from cp_styles.comm.point_to_point import gather_numbers

_MOST_ELEMENTS = 2**16  # elements of a parameter that are compared, spread over it
# By how much float32 sums in another order may change parameters, relative to their norm, in one step. Steps add up
# as a random walk does.
ROUNDING = 64 * torch.finfo(torch.float32).eps


class UnreducedGradientsError(ValueError):
    """Ranks that must hold equal parameters hold different ones: gradients were not reduced over these ranks."""


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that modules hold, then FSDP2's shards, which have the same names: an optimizer has these, and in
    and after a forward the modules do not."""
    named = [*model.named_parameters(remove_duplicate=False)]
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            prefix = f"{path}." if path else ""
            named += [(prefix + name, parameter) for name, parameter in sharded_parameters(module)]
    return named


def local_ids(state: GroupState) -> set[int]:
    """The ids of parameters that users have named as meant to differ: see ``local`` of Checks."""
    alive = [item for reference in state.local.values() if (item := reference()) is not None]
    return {id(x) for item in alive for x in (item.parameters() if isinstance(item, nn.Module) else [item])}


def sample(part: torch.Tensor, most: int = _MOST_ELEMENTS) -> torch.Tensor:
    """At most ``most`` elements of a parameter, at equal distances."""
    flat = part.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))]


class Replica(NamedTuple):
    """This rank's part of a parameter, and the number of that part: equal numbers are meant to be equal parts."""

    part: torch.Tensor
    number: int


def replicas_of(model: nn.Module, ranks: set[int], excluded: set[int]) -> dict[str, Replica]:
    """The trained parameters of ``model`` of which several of ``ranks`` may hold the same part. No communication."""
    found: dict[str, Replica] = {}
    for name, parameter in dict(named_parameters(model)).items():
        if not parameter.requires_grad or id(parameter) in excluded or isinstance(parameter, FlatParameter):
            continue
        part, place, held_by = parameter.detach(), [], 1
        if isinstance(part, DTensor):
            mesh, coordinates = part.device_mesh, part.device_mesh.get_coordinate() or ()
            for axis, (at, placement) in enumerate(zip(coordinates, part.placements, strict=False)):
                if placement != Replicate():
                    place.append(at)
                    held_by *= max(1, len(ranks.intersection(dist.get_process_group_ranks(mesh.get_group(axis)))))
            part = part.to_local()
        if held_by < len(ranks):
            found[name] = Replica(part, zlib.crc32(repr(place).encode()))
    return found


@torch.no_grad()
def replica_number(models: Sequence[Mapping[str, Replica]]) -> int:
    """A number below 2**53 of the parts of all models: ranks with equal numbers hold equal parts, and ranks with equal
    ``number >> 32`` have parts of the same names. 0 without parts.

    It reads up to 65,536 elements of each parameter, and the host waits for the device. No communication.
    """
    parts = [x for replicas in models for x in replicas.values()]
    if not parts:
        return 0
    with without_dispatch_modes():
        sums = on_host([device_checksum(sample(x.part)) for x in parts])
    numbers = [x.number for x in parts]
    which, content = (zlib.crc32(repr(facts).encode()) for facts in (list(map(list, models)), [numbers, sums]))
    return (which % 2**20 + 1) << 32 | content


@torch.no_grad()
def find_diverged(
    replicas: Mapping[str, Replica], equal_before: Iterable[str], group: dist.ProcessGroup, steps: int
) -> tuple[list[str], list[str], list[list[int]]]:
    """The parameters that are equal on all ranks of ``group``, up to the rounding of ``steps`` steps; those that were
    equal before and are not now; and the ranks that hold equal values of a part of the first of these.

    Every rank has the same names in ``replicas``. Communication: one all-gather of 40 bytes for each parameter.
    """
    with without_dispatch_modes():
        rows = gather_numbers([x for facts in _describe(replicas, set(equal_before)) for x in facts], group)
    equal, diverged, parties = list[str](), list[str](), list[list[int]]()
    for index, name in enumerate(replicas):
        ranks = [row[5 * index : 5 * index + 5] for row in rows]
        number = _find_different(ranks, ROUNDING * math.sqrt(steps))
        if number is None:
            equal.append(name)
        elif all(known for _, known, _, _, _ in ranks):
            contents: dict[int, list[int]] = {}
            for rank, facts in zip(dist.get_process_group_ranks(group), ranks, strict=True):
                if facts[0] == number:
                    contents.setdefault(facts[2], []).append(rank)
            parties = parties or list(contents.values())
            diverged.append(name)
    return equal, diverged, parties


def project(part: torch.Tensor) -> tuple[float, float]:
    """A sum of the elements of ``part`` with random signs, and their norm. Sums of two parts differ about as much as
    the norm of the difference."""
    values = sample(part).double()
    drawn = torch.randint(2, (values.numel(),), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return float(values @ (2 * drawn - 1).to(values)), float(values.norm())


def _describe(replicas: Mapping[str, Replica], equal_before: set[str]) -> list[tuple[int, ...]]:
    """For each part: its number, whether it was equal before, a checksum, and its sum and norm as bits of floats."""
    sums = on_host([device_checksum(sample(x.part)) for x in replicas.values()])
    floats = torch.tensor([project(x.part) for x in replicas.values()], dtype=torch.float64, device="cpu")
    bits = floats.view(torch.int64).tolist()
    entries = zip(replicas.items(), sums, bits, strict=True)
    return [(x.number, int(name in equal_before), content, *both) for (name, x), content, both in entries]


def _find_different(ranks: Sequence[Sequence[int]], tolerance: float) -> int | None:
    """The number of parts that differ by more than ``tolerance``, relative to their norm."""
    for number in {facts[0] for facts in ranks}:
        same = [facts for facts in ranks if facts[0] == number]
        if len({facts[2] for facts in same}) > 1:
            floats = torch.tensor([facts[3:] for facts in same], dtype=torch.int64, device="cpu").view(torch.float64)
            sums, norms = floats.unbind(1)
            if not float(sums.max() - sums.min()) <= tolerance * float(norms.max()):  # true for nan
                return number
    return None
