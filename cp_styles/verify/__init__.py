"""Verify a model under context parallelism: the same step on one process and on ranks, module by module.

::

    report = verify(model, plan, mesh, batch, step)

``step`` is the user's own: what a training loop does between ``zero_grad`` and the optimizer. See :func:`verify`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles._compat import flattened
from cp_styles.engine.run import listener
from cp_styles.layout import SequenceLayout
from cp_styles.styles import parallelize_module
from cp_styles.styles.base import ContextParallelStyle
from cp_styles.testing import CommunicationTrace
from cp_styles.verify.compare import Places
from cp_styles.verify.diagnose import Comparison, Gather, StepResult
from cp_styles.verify.record import AttentionsSeen, Recording
from cp_styles.verify.report import ModuleErrors, Report, VerificationError
from cp_styles.verify.step import (
    WEIGHTS,
    StepFunction,
    checksums,
    finish,
    gather_over,
    mesh_of_one,
    run_recorded,
    run_step,
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
            the loss, the backward and what reduces the gradients. It returns the loss of the whole batch, or None.
        reference: the model for one process, if ``model`` itself cannot run there. An example is a model of
            transformers that has its attention from ``register_attention``. It gets the weights of ``model``.
        tolerance: the largest error, relative to the norm. Rounding in float32 gives 1e-5 at most, and one key too many
            or too few 1e-2 in a small batch. Choose 1e-10 for a model that computes in float64 throughout.

    Returns:
        A report, the same on every rank; print it.

    Communication: that of the step; all-gathers of small objects over the axes of ``mesh``; an all-reduce of gradients
    that are wrong.

    Raises:
        VerificationError: on every rank, if the steps differ, or if the step on the ranks raises. It names the first
            wrong module. It names the cause too, if that is one of these: positions, labels, layout, a dropped mask or
            window, a layer that carries a state, attention on a part, gradients that are not reduced once, dropout, or
            samples or weights that differ between ranks.
        ValueError: parameters in lower precision, whose rounding would hide what is wrong.
    """
    low = {x.dtype for x in model.parameters() if x.is_floating_point() and torch.finfo(x.dtype).bits < 32}
    if low:
        raise ValueError(
            f"verify: the model has parameters of {', '.join(map(str, low))}, whose rounding hides mistakes: give it "
            "model.float() or model.double()"
        )
    gather = gather_over(mesh)
    title = f"{type(model).__name__} on {mesh.size()} ranks, mesh axes {mesh.mesh_dim_names}"
    _refuse(title, _differences(gather(checksums(batch, model))))

    single = copy.deepcopy(model if reference is None else reference)
    if reference is not None:
        single.load_state_dict(model.state_dict())
    alone = mesh_of_one(mesh)
    one, again = (_on_one(copy.deepcopy(single), batch, alone, step, title, gather) for _ in range(2))
    _refuse(title, _random(one, again, gather, tolerance))

    many, layouts, trace, error = _on_ranks(copy.deepcopy(model), plan, mesh, batch, step)
    raised = list(dict.fromkeys(each for each in gather(error) if each is not None))
    _refuse(title, raised[:3])
    assert many is not None
    return _report(title, single, one, many, plan, mesh, layouts, trace, gather, tolerance)


def _on_one(
    model: nn.Module, batch: Any, mesh: DeviceMesh, step: StepFunction, title: str, gather: Gather
) -> StepResult:
    made = error = None
    try:
        with AttentionsSeen() as seen:
            made = run_step(model, batch, mesh, step, seen)
    except Exception as raised:
        error = raised
    texts = [each for each in gather(None if error is None else f"{type(error).__name__}: {error}") if each is not None]
    if error is not None:
        error.add_note(
            "verify: this is the step on one process, without the plan. Give reference= if that needs another model"
        )
        raise error
    _refuse(title, [f"on one process, without the plan, on another rank: {text}" for text in texts[:1]])
    assert made is not None
    return made


def _on_ranks(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, batch: Any, step: StepFunction
) -> tuple[StepResult | None, dict[int, SequenceLayout], CommunicationTrace, str | None]:
    """The step; the layouts with which attention ran; its communication; and what it raised, with the module."""
    layouts: dict[int, SequenceLayout] = {}
    trace = CommunicationTrace()

    def listen(strategy: Any, attention: Any, *tensors: Any) -> None:
        for layout in (attention.kv_layout, attention.q_layout):
            layouts[layout.length] = layout

    token = listener.set(listen)
    recording = None
    try:
        if isinstance(plan, ParallelStyle | Mapping):
            parallel = parallelize_module(model, mesh, plan)
        else:
            parallel = plan(model, mesh)
        recording = Recording(parallel)
        with trace:
            loss = run_recorded(recording, batch, mesh, step, parallel)
        return finish(recording, parallel, loss), layouts, trace, None
    except Exception as error:
        where = f"in {recording.open[-1]}: " if recording is not None and recording.open else ""
        return None, layouts, trace, f"{where}{type(error).__name__}: {error}"
    finally:
        listener.reset(token)


def _differences(ranks: list[dict[str, int]]) -> list[str]:
    """Texts for entries of the batch and parameters that differ between ranks."""
    apart = [name for name in ranks[0] if len({each.get(name) for each in ranks}) > 1]
    found = []
    weights = [name for name in apart if name.startswith(WEIGHTS)]
    entries = [name for name in apart if not name.startswith(WEIGHTS)]
    if entries or any(each.keys() != ranks[0].keys() for each in ranks):
        found.append(
            f"the sample differs between ranks ({', '.join(entries) or 'its entries'}): all ranks of one sequence take "
            "part in one batch. Give them the same one, and let the step cut it"
        )
    if weights:
        found.append(
            f"the ranks begin with different weights ({', '.join(weights[:4])}{', ...' if len(weights) > 4 else ''}): "
            "seed them alike, or load one state dict"
        )
    return found


def _random(one: StepResult, again: StepResult, gather: Gather, tolerance: float) -> list[str]:
    """A text for the first module in which two runs on one process differ, or for different losses of the ranks."""
    nowhere = Places({}, 0)
    found = None
    for call, other in zip(one.recording.calls, again.recording.calls, strict=False):
        pairs = zip(call.outputs, other.outputs, strict=False)
        errors = [each.error() for each in (nowhere.compare(*pair) for pair in pairs) if each is not None]
        if any(not error <= tolerance for error in errors):
            found = (
                f"two runs on one process differ, first in {call}: dropout is on, or something else is drawn at "
                "random. Call model.eval() (it trains all the same), or set dropout to 0"
            )
            break
    named = [each for each in gather(found) if each is not None]
    if named:
        return named[:1]
    losses = gather(None if one.loss is None else float(one.loss))
    first = losses[0]
    if first is not None and any(abs(each - first) > tolerance * abs(first) for each in losses):
        return [
            f"the step of one process has another loss on each rank ({', '.join(f'{each:.6g}' for each in losses)}): "
            "the sample differs between ranks. The step must not choose it by the rank of the process"
        ]
    return []


def _report(
    title: str,
    single: nn.Module,
    one: StepResult,
    many: StepResult,
    plan: Plan,
    mesh: DeviceMesh,
    layouts: dict[int, SequenceLayout],
    trace: CommunicationTrace,
    gather: Gather,
    tolerance: float,
) -> Report:
    axis = _sequence_axis(plan, mesh)
    group, rank = axis.get_group(), axis.get_local_rank()

    def over_sequence(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    found = Comparison(single, one, many, Places(layouts, rank), axis.size(), over_sequence, gather, tolerance)
    findings = found.findings() if any(gather(bool(layouts))) else [_NO_ATTENTION]
    losses = gather(None if many.loss is None else float(many.loss))
    loss: tuple[float, ...] = ()
    if one.loss is not None and all(each is not None for each in losses):
        loss = float(one.loss), *losses
        if not findings and any(abs(each - loss[0]) > tolerance * abs(loss[0]) for each in losses):
            findings = [
                "the loss that the step returns is another number than on one process, and all gradients are right: "
                "return the mean over the tokens of all ranks, as global_loss does"
            ]
    traces = gather((dict(trace.calls), trace.sent_bytes))
    kinds = sorted({name for calls, _ in traces for name in calls})
    report = Report(
        title=title,
        findings=tuple(findings),
        modules=tuple(
            ModuleErrors(call.name, call.kind, found.errors.outputs[call.key], found.errors.gradients[call.key])
            for call in one.recording.calls
        ),
        parameters=tuple(found.parameters.items()),
        loss=loss,
        calls=tuple((name, max(calls.get(name, 0) for calls, _ in traces)) for name in kinds),
        sent_bytes=tuple(sent for _, sent in traces),
        tolerance=tolerance,
    )
    if findings:
        raise VerificationError(report)
    return report


_NO_ATTENTION = (
    "no attention ran context parallel: the plan covers none that the model calls, or the step does not call the model"
)


def _refuse(title: str, findings: list[str]) -> None:
    if findings:
        raise VerificationError(Report(title, tuple(findings)))


def _sequence_axis(plan: Plan, mesh: DeviceMesh) -> DeviceMesh:
    """The axis that cuts the sequence: that of the plan's styles, or the only one, or "cp"."""
    if mesh.ndim == 1:
        return mesh
    styles = plan.values() if isinstance(plan, Mapping) else [plan]
    names = {style.mesh_axis for style in styles if isinstance(style, ContextParallelStyle)} or {"cp"}
    name = names.pop()
    return mesh[name] if isinstance(name, str) else flattened(mesh, tuple(name))
