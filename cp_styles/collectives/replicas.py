"""Parameters that several ranks hold: which are meant to be equal, and which are equal no more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from cp_styles._lib.checksum import device_checksum, fingerprint, on_host
from cp_styles._lib.compat import sharded_parameters, without_dispatch_modes
from cp_styles.comm.group_state import state_of
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


class LocalItems(WeakIdKeyDictionary):
    """The modules and parameters that are meant to differ between the ranks of a group: ``local`` of its Checks."""


def sample(part: torch.Tensor, most: int = _MOST_ELEMENTS) -> torch.Tensor:
    """At most ``most`` elements of a parameter, at equal distances."""
    flat = part.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))]


class Replica(NamedTuple):
    """This rank's part of a parameter, and the number of that part: equal numbers are meant to be equal parts."""

    part: torch.Tensor
    number: int


@torch.no_grad()
def replicas_of(model: nn.Module, ranks: set[int], group: dist.ProcessGroup) -> dict[str, Replica]:
    """The trained parameters of ``model`` of which several of ``ranks`` may hold the same part, once each, without the
    :class:`LocalItems` of ``group``. No communication."""
    found: dict[str, Replica] = {}
    local = [*state_of(group).get_or_create(LocalItems)]
    left_out = {id(x) for item in local for x in (item.parameters() if isinstance(item, nn.Module) else [item])}
    left_out |= _cut_by_fsdp1(model, ranks)
    with without_dispatch_modes():
        for name, parameter in dict(named_parameters(model)).items():
            if not parameter.requires_grad or id(parameter) in left_out:
                continue
            left_out.add(id(parameter))
            part, place, held_by = parameter.detach(), [], 1
            if isinstance(part, DTensor):
                mesh, coordinates = part.device_mesh, part.device_mesh.get_coordinate() or ()
                for axis, (at, placement) in enumerate(zip(coordinates, part.placements, strict=False)):
                    if placement != Replicate():
                        place.append(at)
                        held_by *= max(1, _number_of_ranks(mesh.get_group(axis), ranks))
                part = part.to_local()
            # FSDP frees the memory of gathered parameters after their use.
            freed = part.is_meta or (part.numel() and not part.untyped_storage().nbytes())
            if held_by < len(ranks) and not freed:
                found[name] = Replica(part, fingerprint([place, tuple(part.shape)]))
    return found


def _number_of_ranks(group: dist.ProcessGroup | None, ranks: set[int]) -> int:
    return len(ranks.intersection(dist.get_process_group_ranks(group)))


def _cut_by_fsdp1(model: nn.Module, ranks: set[int]) -> set[int]:
    """The ids of the parameters that FSDP1 cuts over several of ``ranks``."""
    wrappers = [x for x in model.modules() if isinstance(x, FullyShardedDataParallel)]
    cut = [x for x in wrappers if _number_of_ranks(x.process_group, ranks) > 1]
    return {id(parameter) for wrapper in cut for parameter in wrapper.parameters()}


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
    which, content = fingerprint(list(map(list, models))), fingerprint([[x.number for x in parts], sums])
    return (which % 2**20 + 1) << 32 | content


def shared_replicas(replicas: Mapping[str, Replica], group: dist.ProcessGroup) -> dict[str, Replica]:
    """The replicas whose name every rank of ``group`` has, in the same order on all ranks.

    Communication: an all-gather of a number, and an all-gather of 8 bytes for each replica.
    """
    keys = sorted((fingerprint([name]), name) for name in replicas)
    most = max(row[0] for row in gather_numbers([len(keys)], group))
    rows = gather_numbers([key for key, _ in keys] + [-1] * (most - len(keys)), group)
    shared = set(rows[0]).intersection(*rows)
    return {name: replicas[name] for key, name in keys if key in shared}


class Difference(NamedTuple):
    """A parameter of which ranks with the same part hold different values.

    Attributes:
        beyond_rounding: they differ by more than rounding.
        equal_before: on every rank they were equal before.
        parties: the ranks that hold equal values.
    """

    beyond_rounding: bool
    equal_before: bool
    parties: list[list[int]]


@torch.no_grad()
def find_differences(
    replicas: Mapping[str, Replica], group: dist.ProcessGroup, steps: int, equal_before: Iterable[str] = ()
) -> dict[str, Difference]:
    """The parameters that differ between the ranks of ``group``. ``steps``: after which sums may have added rounding.

    Every rank has the same names in ``replicas``. Communication: one all-gather of 40 bytes for each parameter.
    """
    if not replicas:
        return {}
    with without_dispatch_modes():
        rows = gather_numbers([x for facts in _describe(replicas, set(equal_before)) for x in facts], group)
    found, members = dict[str, Difference](), dist.get_process_group_ranks(group)
    for index, name in enumerate(replicas):
        ranks = [row[5 * index : 5 * index + 5] for row in rows]
        for number in {facts[0] for facts in ranks}:
            same = [(rank, facts) for rank, facts in zip(members, ranks, strict=True) if facts[0] == number]
            parties: dict[int, list[int]] = {}
            for rank, facts in same:
                parties.setdefault(facts[2], []).append(rank)
            if len(parties) > 1:
                beyond = _is_beyond([facts[3:] for _, facts in same], ROUNDING * math.sqrt(steps))
                found[name] = Difference(beyond, all(facts[1] for facts in ranks), list(parties.values()))
                if beyond:
                    break
    return found


def project(part: torch.Tensor) -> tuple[float, float]:
    """A sum of the elements of ``part`` with random factors, and their norm. Sums of two parts differ about as much as
    the norm of the difference."""
    # Factors and not signs: gradients of a bias add up to 0 in front of a softmax, and a few equal signs would hide it.
    values, generator = sample(part).double().cpu(), torch.Generator("cpu").manual_seed(0)
    factors = torch.randn(values.numel(), generator=generator, dtype=torch.float64, device="cpu")
    return float(values @ factors), float(values.norm())


def _describe(replicas: Mapping[str, Replica], equal_before: set[str]) -> list[tuple[int, ...]]:
    """For each part: its number, whether it was equal before, a checksum, and its sum and norm as bits of floats."""
    sums = on_host([device_checksum(sample(x.part)) for x in replicas.values()])
    floats = torch.tensor([project(x.part) for x in replicas.values()], dtype=torch.float64, device="cpu")
    bits = floats.view(torch.int64).tolist()
    entries = zip(replicas.items(), sums, bits, strict=True)
    return [(x.number, int(name in equal_before), content, *both) for (name, x), content, both in entries]


def _is_beyond(bits: Sequence[Sequence[int]], tolerance: float) -> bool:
    """Whether sums differ by more than ``tolerance``, relative to the norms. ``bits``: of each rank's sum and norm."""
    sums, norms = torch.tensor(bits, dtype=torch.int64, device="cpu").view(torch.float64).unbind(1)
    return not float(sums.max() - sums.min()) <= tolerance * float(norms.max())  # true for nan
