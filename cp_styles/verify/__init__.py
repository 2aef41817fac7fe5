"""Verify a model under context parallelism: the same step on one process and on ranks, module by module.

::

    report = verify(model, plan, mesh, batch, step)

``step`` is the user's own: what a training loop does between ``zero_grad`` and the optimizer. See :func:`verify`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles.styles import parallelize_module
from cp_styles.styles.base import ContextParallelStyle
from cp_styles.testing import CommunicationTrace
from cp_styles.verify.compare import Places, squares
from cp_styles.verify.diagnose import Comparison, Gather, StepResult, some
from cp_styles.verify.report import ModuleErrors, Report, VerificationError
from cp_styles.verify.step import (
    WEIGHTS,
    Alone,
    Failure,
    StepFunction,
    checksums,
    ending_connections,
    gather_over,
    mesh_of_its_own,
    mesh_of_one,
    run_alone,
    run_together,
    telling_others,
)

__all__ = ["ModuleErrors", "Report", "VerificationError", "verify"]

Plan: TypeAlias = ParallelStyle | Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], nn.Module]
"""As for ``parallelize_module``; or a function that takes a model and a mesh and returns the parallel model."""


def verify(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    batch: Any,
    step: StepFunction,
    *,
    reference: nn.Module | None = None,
    tolerance: float = 1e-4,
) -> Report:
    """Run ``step`` on one process, and with ``plan`` on the ranks of ``mesh``, and compare all that can be compared.

    All ranks must call it. First each rank runs the whole batch alone, twice, with a copy of ``model``, on a mesh of
    one rank with the axes of ``mesh``. Then all ranks run it together, with a copy to which ``plan`` is applied. So the
    step is the same code in all runs, and cuts the batch for as many ranks as its mesh has.

    These are compared:

    - the outputs of every module, of which a rank has the rows that the layout of the attention gives it;
    - the loss that the step returns;
    - the gradients of the modules' outputs, and those of the parameters after the step.

    Args:
        model: a model in float32 or float64, on the device of the mesh, without dropout. It is not changed.
        plan: see :data:`Plan`.
        mesh: the ranks; the axis of the sequence, and others if the plan has them.
        batch: what the step is given: one whole, small batch, the same on every rank. Mostly a dict of tensors.
        step: ``step(model, batch, mesh)`` does what the training loop does. It cuts the batch, and runs the forward,
            the loss, the backward and what reduces the gradients. It returns the loss of the whole batch, or None. Its
            ``mesh`` has the ranks and axes of ``mesh`` over groups of its own, which end with verify: so ranks that
            wait for one that has failed learn of it at once.
        reference: the model for one process, if ``model`` itself cannot run there. An example is a model of
            transformers that has its attention from ``register_attention``. It gets the weights of ``model``.
        tolerance: the largest error, relative to the norm. Rounding in float32 gives 1e-5 at most, and one key too many
            or too few 1e-2 in a small batch. Choose 1e-10 for a model that computes in float64 throughout.

    Returns:
        A report, the same on every rank; print it.

    Communication: that of the step; all-gathers of small objects over the axes of ``mesh``; an all-reduce of gradients
    that are wrong.

    Raises:
        VerificationError: on every rank, if the steps differ, if the step raises on some rank, or if nothing can be
            compared. It names the first wrong module. It names the cause too, if a test shows that it is one of these:
            positions, labels, layout, a mask or window that only one side has, a layer that mixes tokens, attention on
            a part, gradients that are not reduced once, dropout, or samples or weights that differ between ranks.
        ValueError: parameters in lower precision, whose rounding would hide what is wrong; a bad ``tolerance``.
        TypeError: the step returns something else than one number or None.
    """
    low = {x.dtype for x in model.parameters() if x.is_floating_point() and torch.finfo(x.dtype).bits < 32}
    if low:
        raise ValueError(
            f"verify: the model has parameters of {', '.join(map(str, low))}, whose rounding hides mistakes: give it "
            "model.float() or model.double()"
        )
    if not 0 < tolerance < 1:
        raise ValueError(
            f"verify: tolerance={tolerance!r} is no error relative to a norm: choose 1e-4, or 1e-10 in float64"
        )
    with ending_connections(mesh):
        gather = gather_over(mesh)
        title = f"{type(model).__name__} on {mesh.size()} ranks, mesh axes {mesh.mesh_dim_names}"
        axis = _sequence_axis(plan, mesh)
        with telling_others(gather, VerificationError):
            _refuse(title, _differences(gather(checksums(batch, model))))
            single = copy.deepcopy(model if reference is None else reference)
            if reference is not None:
                single.load_state_dict(model.state_dict())
        scopes_over = None if reference is not None else _name_of(axis)
        with mesh_of_one(mesh) as alone:
            one, again = (
                _on_one(copy.deepcopy(single), batch, alone, step, title, gather, scopes_over) for _ in range(2)
            )
        with telling_others(gather, VerificationError):
            _refuse(title, _unusable(one, gather) or _random(one, again, gather, tolerance))

        trace = CommunicationTrace()
        with mesh_of_its_own(mesh, gather) as own:
            many = run_together(copy.deepcopy(model), partial(_parallel, plan), own, batch, step, trace)
            if isinstance(many, StepResult):
                failures = gather(None)  # the others have finished too, or failed: no message is under way
        if isinstance(many, Failure):
            failures = gather(many)
        _refuse(title, _failed(failures))
        assert isinstance(many, StepResult)
        with telling_others(gather, VerificationError):
            return _report(title, single, one, many, axis, trace, gather, tolerance)


def _parallel(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if isinstance(plan, ParallelStyle | Mapping):
        return parallelize_module(model, mesh, plan)
    return plan(model, mesh)


def _on_one(
    model: nn.Module,
    batch: Any,
    mesh: DeviceMesh,
    step: StepFunction,
    title: str,
    gather: Gather,
    scopes_over: str | None,
) -> Alone:
    alone = error = None
    try:
        alone = run_alone(model, batch, mesh, step, scopes_over)
    except Exception as raised:
        error = raised
    texts = [each for each in gather(None if error is None else f"{type(error).__name__}: {error}") if each is not None]
    if error is not None:
        error.add_note(
            "verify: this is the step on one process, without the plan. Give reference= if that needs another model"
        )
        raise error
    _refuse(title, [f"on one process, without the plan, on another rank: {text}" for text in texts[:1]])
    assert alone is not None
    return alone


def _failed(failures: list[Failure | None]) -> list[str]:
    """Texts for what the step has raised on ranks. Those that lost the connection to another one are not the cause."""
    raised = [(rank, each) for rank, each in enumerate(failures) if each is not None]
    causes = [(rank, each) for rank, each in raised if not each.of_transfer] or raised
    ranks: dict[str, list[int]] = {}
    for rank, each in causes:
        ranks.setdefault(each.text, []).append(rank)
    return [
        text if len(where) == len(failures) else f"on rank {', '.join(map(str, where))}: {text}"
        for text, where in list(ranks.items())[:3]
    ]


def _differences(ranks: list[dict[str, int]]) -> list[str]:
    """Texts for entries of the batch and parameters that differ between ranks."""
    apart = [name for name in ranks[0] if len({each.get(name) for each in ranks}) > 1]
    findings = []
    weights = [name for name in apart if name.startswith(WEIGHTS)]
    entries = [name for name in apart if not name.startswith(WEIGHTS)]
    if entries or len({tuple(name for name in each if not name.startswith(WEIGHTS)) for each in ranks}) > 1:
        findings.append(
            f"the sample differs between ranks ({', '.join(entries) or 'its entries'}): all ranks of one sequence take "
            "part in one batch. Give them the same one, and let the step cut it"
        )
    if weights:
        findings.append(
            f"the ranks begin with different weights ({', '.join(weights[:4])}{', ...' if len(weights) > 4 else ''}): "
            "seed them alike, or load one state dict"
        )
    return findings


def _unusable(one: Alone, gather: Gather) -> list[str]:
    """A text for a step of one process with which nothing can be compared."""
    finding = None
    bad = [name for name, x in one.result.gradients.items() if x is not None and not bool(x.isfinite().all())]
    if not one.result.recording.calls:
        finding = "the step does not call the model that it is given"
    elif one.result.loss is not None and not math.isfinite(one.result.loss):
        finding = (
            f"on one process, without the plan, the loss is {one.result.loss}: choose a batch and weights for which it "
            "is finite"
        )
    elif bad:
        finding = (
            f"on one process, without the plan, gradients are not finite ({some(bad)}): choose a batch and weights for "
            "which they are"
        )
    elif one.removed:
        finding = (
            f"the step removes gradients before it ends ({some(one.removed)}), so they cannot be compared: leave "
            "zero_grad() out of it, and optimizers that set gradients to None"
        )
    return [each for each in gather(finding) if each is not None][:1]


def _random(one: Alone, again: Alone, gather: Gather, tolerance: float) -> list[str]:
    """A text for the first module in which two runs on one process differ, or for different losses of the ranks."""
    nowhere = Places((), 0)

    def differ(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        compared = nowhere.compare(tensor, other)
        return (tensor is None) != (other is None) or (compared is not None and not compared.error() <= tolerance)

    first, second = one.result, again.result
    finding = None
    for call, other in zip(first.recording.calls, second.recording.calls, strict=False):
        if any(differ(*pair) for pair in zip(call.outputs, other.outputs, strict=False)):
            finding = (
                f"two runs on one process differ, first in {call}: dropout is on, or something else is drawn at "
                "random. Call model.eval() (it trains all the same), or set dropout to 0"
            )
            break
    floor = max((float(x.norm()) for x in first.gradients.values() if x is not None), default=0.0)
    if finding is None:
        pairs = [(name, x, second.gradients.get(name)) for name, x in first.gradients.items()]
        named = [
            name
            for name, x, y in pairs
            if (x is None) != (y is None)
            or (x is not None and y is not None and squares(x, y).error(floor) > tolerance)
        ]
        losses = [each.loss for each in (first, second)]
        if named or (None not in losses and not math.isclose(*losses, rel_tol=tolerance)):  # pyright: ignore
            finding = (
                "two runs of the step on one process differ in "
                f"{f'gradients ({some(named)})' if named else 'the loss'}: the step draws something at random, "
                "or goes on from where it was (an iterator, a counter)"
            )
    named = [each for each in gather(finding) if each is not None]
    if named:
        return named[:1]
    losses = gather(first.loss)
    if len({each is None for each in losses}) > 1 or (
        losses[0] is not None and not all(math.isclose(each, losses[0], rel_tol=tolerance) for each in losses)
    ):
        return [
            f"the step of one process has another loss on each rank ({', '.join(map(_number, losses))}): "
            "the sample differs between ranks. The step must not choose it by the rank of the process"
        ]
    return []


def _report(
    title: str,
    single: nn.Module,
    alone: Alone,
    many: StepResult,
    axis: DeviceMesh,
    trace: CommunicationTrace,
    gather: Gather,
    tolerance: float,
) -> Report:
    one, group, rank = alone.result, axis.get_group(), axis.get_local_rank()

    def over_sequence(tensor: torch.Tensor) -> torch.Tensor:
        gather(None)  # no rank has failed
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    ran = many.recording.attentions
    layouts = tuple(dict.fromkeys(layout for each in ran for layout in each.layouts))
    comparison = Comparison(single, one, many, Places(layouts, rank), axis.size(), over_sequence, gather, tolerance)
    findings = comparison.findings() if any(gather(bool(ran))) else [_NO_ATTENTION]
    losses = gather(many.loss)
    loss: tuple[float, ...] = ()
    if one.loss is not None and all(each is not None for each in losses):
        loss = float(one.loss), *map(float, losses)
    if not findings:
        findings = _of_loss(one.loss, losses, tolerance)
    if (
        not findings
        and not loss
        and not comparison.parameters
        and not any(error is not None for error in comparison.errors.outputs.values())
    ):
        findings = [
            "nothing could be compared: the step returns no loss and leaves no gradients, and no output of a module "
            "has the shape of a rank's tokens. Let it return the loss"
        ]
    if findings and alone.unapplied:
        findings.append(
            f"on one process the mask of the SequenceScope ({', '.join(alone.unapplied)}) was not applied: verify can "
            "do that for bands in scaled_dot_product_attention alone. Give it reference=, a model that makes it itself"
        )
    traces = gather((dict(trace.calls), trace.sent_bytes))
    kinds = sorted({name for calls, _ in traces for name in calls})
    report = Report(
        title=title,
        findings=tuple(findings),
        modules=tuple(
            ModuleErrors(
                call.name, call.kind, comparison.errors.outputs[call.key], comparison.errors.gradients[call.key]
            )
            for call in one.recording.calls
        ),
        parameters=tuple(comparison.parameters.items()),
        loss=loss,
        calls=tuple((name, max(calls.get(name, 0) for calls, _ in traces)) for name in kinds),
        sent_bytes=tuple(sent for _, sent in traces),
        tolerance=tolerance,
    )
    if findings:
        raise VerificationError(report)
    return report


def _of_loss(one: float | None, ranks: list[float | None], tolerance: float) -> list[str]:
    """Findings about the loss that a step returns. All gradients are right."""
    losses = [each for each in ranks if each is not None]
    if (one is None or len(losses) < len(ranks)) and not (one is None and not losses):
        shown = ", ".join(map(_number, ranks))
        return [f"the step returns {_number(one)} as its loss on one process, and {shown} on the ranks"]
    if one is None or all(math.isclose(each, one, rel_tol=tolerance) for each in losses):
        return []
    why = "return the mean over the tokens of all ranks, as global_loss does"
    if not all(map(math.isfinite, losses)):
        why = f"it is {', '.join(map(_number, losses))}. The cause is not known"
    return [f"the loss that the step returns is another number than on one process, and all gradients are right: {why}"]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


_NO_ATTENTION = (
    "no attention ran context parallel: the plan covers none that the model calls, or the step does not call the model"
)


def _name_of(axis: DeviceMesh) -> str:
    return (axis.mesh_dim_names or ("cp",))[0]


def _refuse(title: str, findings: list[str]) -> None:
    if findings:
        raise VerificationError(Report(title, tuple(findings)))


def _sequence_axis(plan: Plan, mesh: DeviceMesh) -> DeviceMesh:
    """The axis that cuts the sequence: that of the plan's styles, or the only one, or "cp"."""
    if mesh.ndim == 1:
        return mesh
    styles = plan.values() if isinstance(plan, Mapping) else [plan]
    names = {style.mesh_axis for style in styles if isinstance(style, ContextParallelStyle)} or {"cp"}
    return mesh[names.pop()]
