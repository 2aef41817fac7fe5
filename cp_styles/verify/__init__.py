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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles.styles import parallelize_module
from cp_styles.styles.base import ContextParallelStyle
from cp_styles.testing import CommunicationTrace
from cp_styles.verify.compare import WHOLE, Comparison, Gather, Places, StepResult
from cp_styles.verify.diagnose import findings, some
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
            scopes_over = None if reference is not None else (axis.mesh_dim_names or ("cp",))[0]
            with mesh_of_one(mesh) as alone:
                one, again = (run_alone(copy.deepcopy(single), batch, alone, step, scopes_over) for _ in range(2))
            _refuse(title, _unusable(one, gather) or _random(one.result, again.result, gather, tolerance))

        trace = CommunicationTrace()
        with mesh_of_its_own(mesh, gather) as own_mesh:
            many = run_together(copy.deepcopy(model), partial(_parallel, plan), own_mesh, batch, step, trace)
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


def _failed(failures: list[Failure | None]) -> list[str]:
    """Texts for what the step has raised on ranks. Those that lost the connection to another one are not the cause."""
    raised = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    ranks: dict[str, list[int]] = {}
    for rank, failure in [(rank, failure) for rank, failure in raised if not failure.of_transfer] or raised:
        ranks.setdefault(failure.text, []).append(rank)
    return [
        text if len(where) == len(failures) else f"on rank {', '.join(map(str, where))}: {text}"
        for text, where in list(ranks.items())[:3]
    ]


def _differences(ranks: list[dict[str, int]]) -> list[str]:
    """Texts for entries of the batch and parameters that differ between ranks."""
    names = dict.fromkeys(name for sums in ranks for name in sums)
    apart = [name for name in names if len({sums.get(name) for sums in ranks}) > 1]
    weights = [name for name in apart if name.startswith(WEIGHTS)]
    entries = [name for name in apart if not name.startswith(WEIGHTS)]
    texts = []
    if entries:
        texts.append(
            f"the sample differs between ranks ({', '.join(entries)}): all ranks of one sequence take part in one "
            "batch. Give them the same one, and let the step cut it"
        )
    if weights:
        texts.append(
            f"the ranks begin with different weights ({some(weights)}): seed them alike, or load one state dict"
        )
    return texts


def _unusable(one: Alone, gather: Gather) -> list[str]:
    """A text for a step of one process with which nothing can be compared."""
    text = None
    bad = [name for name, x in one.result.gradients.items() if x is not None and not bool(x.isfinite().all())]
    if not one.result.recording.calls:
        text = "the step does not call the model that it is given"
    elif one.result.loss is not None and not math.isfinite(one.result.loss):
        text = (
            f"on one process, without the plan, the loss is {one.result.loss}: choose a batch and weights for which it "
            "is finite"
        )
    elif bad:
        text = (
            f"on one process, without the plan, gradients are not finite ({some(bad)}): choose a batch and weights for "
            "which they are"
        )
    elif one.removed:
        text = (
            f"the step removes gradients before it ends ({some(one.removed)}), so they cannot be compared: leave "
            "zero_grad() out of it, and optimizers that set gradients to None"
        )
    return list(filter(None, gather(text)))[:1]


def _random(one: StepResult, again: StepResult, gather: Gather, tolerance: float) -> list[str]:
    """A text for the first module in which two runs on one process differ, or for different losses of the ranks."""
    same = Comparison(one, again, WHOLE, gather, tolerance)
    for call in same.calls:
        if same.is_wrong(same.outputs.get(call.key)):
            return [
                f"two runs on one process differ, first in {call}: dropout is on, or something else is drawn at "
                "random. Call model.eval() (it trains all the same), or set dropout to 0"
            ]
    losses, others = zip(*gather((one.loss, again.loss)), strict=True)
    drawn = [name for name, error in same.parameters.items() if same.is_wrong(error)]
    if drawn or not all(_near(*pair, tolerance) for pair in zip(losses, others, strict=True)):
        return [
            f"two runs of the step on one process differ in {f'gradients ({some(drawn)})' if drawn else 'the loss'}: "
            "the step draws something at random, or goes on from where it was (an iterator, a counter)"
        ]
    if not all(_near(loss, losses[0], tolerance) for loss in losses):
        return [
            f"the step of one process has another loss on each rank ({', '.join(map(_number, losses))}): "
            "the sample differs between ranks. The step must not choose it by the rank of the process"
        ]
    return []


def _near(loss: float | None, other: float | None, tolerance: float) -> bool:
    """Whether losses are equal but for rounding; None is the loss of a step that returns none."""
    return loss == other or (None not in (loss, other) and math.isclose(loss, other, rel_tol=tolerance))  # pyright: ignore


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
    one, ran = alone.result, many.recording.attentions
    layouts = tuple(dict.fromkeys(layout for attention in ran for layout in attention.layouts))
    comparison = Comparison(one, many, Places(layouts, axis.get_local_rank()), gather, tolerance)
    texts = findings(comparison, single, axis) if any(gather(bool(ran))) else [_NO_ATTENTION]
    losses = gather(many.loss)
    loss: tuple[float, ...] = ()
    if one.loss is not None and None not in losses:
        loss = float(one.loss), *map(float, losses)
    texts = texts or _of_loss(one.loss, losses, tolerance)
    if not (texts or loss or comparison.parameters or comparison.outputs):
        texts = [
            "nothing could be compared: the step returns no loss and leaves no gradients, and no output of a module "
            "has the shape of a rank's tokens. Let it return the loss"
        ]
    if texts and alone.unapplied:
        texts.append(
            f"on one process the mask of the SequenceScope ({', '.join(alone.unapplied)}) was not applied: verify can "
            "do that for bands in scaled_dot_product_attention alone. Give it reference=, a model that makes it itself"
        )
    traces = gather((dict(trace.calls), trace.sent_bytes))
    kinds = sorted({name for calls, _ in traces for name in calls})
    outputs, gradients = comparison.outputs, comparison.gradients
    report = Report(
        title=title,
        findings=tuple(texts),
        modules=tuple(
            ModuleErrors(call.name, call.kind, outputs.get(call.key), gradients.get(call.key))
            for call in one.recording.calls
        ),
        parameters=tuple(comparison.parameters.items()),
        loss=loss,
        calls=tuple((name, max(calls.get(name, 0) for calls, _ in traces)) for name in kinds),
        sent_bytes=tuple(sent for _, sent in traces),
        tolerance=tolerance,
    )
    if texts:
        raise VerificationError(report)
    return report


def _of_loss(one: float | None, ranks: list[float | None], tolerance: float) -> list[str]:
    """Findings about the loss that a step returns. All gradients are right."""
    if all(_near(loss, one, tolerance) for loss in ranks):
        return []
    shown = ", ".join(map(_number, ranks))
    losses = [loss for loss in ranks if loss is not None]
    if one is None or len(losses) < len(ranks):
        return [f"the step returns {_number(one)} as its loss on one process, and {shown} on the ranks"]
    why = "return the mean over the tokens of all ranks, as global_loss does"
    if not all(map(math.isfinite, losses)):
        why = f"it is {shown}. The cause is not known"
    return [f"the loss that the step returns is another number than on one process, and all gradients are right: {why}"]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


_NO_ATTENTION = (
    "no attention ran context parallel: the plan covers none that the model calls, or the step does not call the model"
)


def _refuse(title: str, texts: list[str]) -> None:
    if texts:
        raise VerificationError(Report(title, tuple(texts)))


def _sequence_axis(plan: Plan, mesh: DeviceMesh) -> DeviceMesh:
    """The axis that cuts the sequence: that of the plan's styles, or the only one, or "cp"."""
    if mesh.ndim == 1:
        return mesh
    styles = plan.values() if isinstance(plan, Mapping) else [plan]
    names = {style.mesh_axis for style in styles if isinstance(style, ContextParallelStyle)} or {"cp"}
    return mesh[names.pop()]
