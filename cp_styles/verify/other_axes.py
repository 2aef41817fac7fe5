"""Checks of a step over the axes of the mesh that do not share a sequence: whether gradients are reduced over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles.collectives.notes import StepNotes
from cp_styles.collectives.replicas import project
from cp_styles.comm.groups import mesh_of, shares_ranks
from cp_styles.verify.diagnose import join_first
from cp_styles.verify.record import plain_name
from cp_styles.verify.step import WEIGHTS, StepRun, checksums, gather_over


class OtherAxis(NamedTuple):
    """Sentences on an axis: mistakes, and facts that may be meant."""

    findings: list[str]
    notes: list[str]


class _Facts(NamedTuple):
    """One rank's facts. ``gradients``: weights, and the gradient's sum with random signs and norm, by parameter."""

    batch: Mapping[str, int]
    gradients: Mapping[str, tuple[int, float, float]]
    losses: list[tuple[list[int], float]]


def examine_other_axes(
    model: nn.Module,
    mesh: DeviceMesh,
    axis: DeviceMesh,
    batch: object,
    run: StepRun,
    notes: StepNotes,
    weights: Mapping[str, int],
) -> OtherAxis:
    """Examine the axes of ``mesh``, other than ``axis``, whose ranks have other batches.

    ``run`` and ``notes`` are of the step with all ranks, and ``weights`` are checksums from before.

    Communication: an all-gather of some numbers for each parameter over each such axis.
    """
    found = OtherAxis([], [])
    losses = [(ranks, count) for ranks, count in notes.losses if count is not None]
    names = mesh.mesh_dim_names or ()
    for name in [name for name in names if name not in (axis.mesh_dim_names or ()) and mesh[name].size() > 1]:
        along = mesh[name]
        group, gradients = along.get_group(), dict[str, tuple[int, float, float]]()
        for path, parameter in model.named_parameters():
            key, sharded = plain_name(path), mesh_of(parameter)
            gradient = run.gradients.get(key)
            if gradient is not None and not (sharded is not None and shares_ranks(sharded, group)):
                gradients[key] = (weights.get(WEIGHTS + key, 0), *project(gradient))
        facts = _Facts(checksums(batch, nn.Module()), gradients, losses)
        _judge(name, gather_over(along)(facts), set(dist.get_process_group_ranks(group)), found)
    return found


def _judge(name: str, ranks: list[_Facts], here: set[int], found: OtherAxis) -> None:
    if all(facts.batch == ranks[0].batch for facts in ranks):  # as over an axis of tensor or pipeline parallelism
        return
    common = [key for key in ranks[0].gradients if all(key in facts.gradients for facts in ranks)]
    common = [key for key in common if len({facts.gradients[key][0] for facts in ranks}) == 1]  # not experts
    norms = {key: max(facts.gradients[key][2] for facts in ranks) for key in common}
    floor = 1e-2 * max(norms.values(), default=0.0)  # gradients that nearly vanish are rounding
    differing = []
    for key in common:
        sums = [facts.gradients[key][1] for facts in ranks]
        if not max(sums) - min(sums) <= _TOLERANCE * max(norms[key], floor):
            differing.append(key)
    spans = any(len(here.intersection(group)) > 1 for facts in ranks for group, _ in facts.losses)
    if differing:
        which = f"the gradients of {len(differing)} of {len(common)} parameters ({join_first(differing)}) differ"
        if spans:
            found.findings.append(
                f"over mesh axis {name!r} {which}, and the loss is a mean over the tokens of its ranks: nothing sums "
                "these gradients. Give sum_gradients the mesh of the loss, or FSDP2 or DDP this axis too"
            )
        else:
            found.notes.append(f"Over mesh axis {name!r} {which}: nothing in the step reduces them")
    counts = [[count for _, count in facts.losses] for facts in ranks]
    if not differing and not spans and any(each != counts[0] for each in counts):
        texts = " and ".join(f"{each[0]:.0f}" for each in counts[:4] if each)
        found.notes.append(
            f"Over mesh axis {name!r} each loss is a mean over the tokens of its own ranks ({texts}), and gradients "
            "are reduced over this axis: tokens count differently than on one device, unless the loss is over both "
            "axes (loss_mesh= of BatchSharder)"
        )


_TOLERANCE = 1e-2  # of a gradient's norm: more than rounding, less than the difference of two samples
