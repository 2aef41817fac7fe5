"""Prove a model under context parallelism: one step of it with all ranks, and the same step with one rank, compared.

::

    verify(model, mesh, batch, step)  # once, before training

``step`` is the user's own: what a training loop does between ``zero_grad`` and the optimizer. See :func:`verify`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles.checks.proof import Proof, proof_of
from cp_styles.comm.point_to_point import abort_group
from cp_styles.styles.on_mesh_axis import take_axis
from cp_styles.verify.compare import Comparison, Leeway, ShardLookup, StepResult, gradient_errors, output_errors
from cp_styles.verify.diagnose import findings, first_names
from cp_styles.verify.record import Key, Outputs, Recording
from cp_styles.verify.report import ModuleErrors, Report, VerificationError
from cp_styles.verify.rounding import Perturbed, unit_of_all
from cp_styles.verify.step import (
    WEIGHTS,
    ModelState,
    StepFailure,
    StepFunction,
    StepRun,
    as_one_rank,
    broadcast_errors,
    broken_by_error,
    checksums,
    communicates,
    ending_connections,
    gather_over,
    over_own_groups,
    run_step,
    run_together,
    weights,
)

__all__ = ["ModuleErrors", "Report", "VerificationError", "verify"]

_TOLERANCE = 1e-4


def verify(
    model: nn.Module,
    mesh: DeviceMesh,
    batch: Any,
    step: StepFunction,
    removed: Any = None,
    *,
    mesh_axis: str = "cp",
    plain: StepFunction | None = None,
    tolerance: float | None = None,
) -> Report:
    """Prove that a step of ``model`` equals the step of one device: run it with all ranks, and with one, and compare.

    ``model`` is the model that will be trained, in place: with its styles, FSDP2, DDP, tensor parallelism, checkpoints
    and adapters. For the reference this rank alone takes the place of the ranks of ``mesh_axis``: wherever a style, a
    ``context_parallel`` block or a function of this package works over that axis, it works over one rank. So the step
    is the same code in all runs, and cuts the batch for as many ranks as the mesh has that it is given. The remaining
    axes of the mesh stay as they are.

    These are compared, over the ranks of the axis:

    - the output of the model, of which a rank has the rows that the layout of the attention gives it; outputs of all
      modules, which tell where a mistake is (or, in a step without a backward, that there is one);
    - the loss that the step returns;
    - the gradients of all parameters after the step.

    Afterwards gradients are None, and buffers, plain attributes of modules, training flags and random states are as
    before, also after an error. (FSDP2 does not recover from an error inside of its forward; the error says so then.)
    Dropout is off in all runs. Compiled modules run without their graphs: the code that they were made from is proved.

    Args:
        model: the model, in any floating-point dtype.
        mesh: the ranks; the axis of the sequence, and others if the step needs them.
        batch: a small whole batch, the same on every rank of the axis. Mostly a dict of tensors.
        step: ``step(model, batch, mesh)`` does what the training loop does. It cuts the batch, and runs the forward,
            the loss, the backward and what reduces the gradients, all over the ``mesh`` that it is given. It returns
            the loss of the whole batch, or None.
        plain: the reference, if that is not ``step`` with one rank: your old step, with the whole batch, for what the
            new one changes whatever the number of ranks (positions that it gives, a mask that it leaves out, another
            loss). It sees the model with its styles, whose masks hold for one rank too.
        removed: raises TypeError. (There was a plan before ``mesh``.)
        mesh_axis: the axis that cuts the sequence. A 1-D mesh is used whatever its name.
        tolerance: the largest error that is rounding, relative to a norm. None: 1e-4 for float32 and float64. (One key
            too many or too few is 1e-2 in a small batch.) In lower precision it is two units in the last place and four
            times what changed last bits make of the model's step, measured by one more run.

    Returns:
        A report, the same on every rank. The first rank also prints its first line.

    Memory: the gradients twice (as they are sharded), and this rank's rows of the outputs of modules. Time: three small
    steps, four in lower precision; two more and some parts of the model if something is wrong.

    Communication: the steps' own, and all-gathers of small objects over the axes of ``mesh``.

    Raises:
        VerificationError: on every rank, if the steps differ, if the step raises on some rank, or if nothing can be
            compared. It names the first wrong module. It names the cause too, if a test shows that it is one of these:
            positions, labels, layout, a layer that mixes tokens, attention on a part, gradients that are not reduced
            once, samples or weights that differ between ranks, or random numbers.
        ValueError: parameters that have gradients; a bad ``tolerance``; a mesh without the axis.
        TypeError: the step returns something else than one number or None.
    """
    if removed is not None or not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"verify(model, mesh, batch, step) needs a DeviceMesh as its second argument, got {type(mesh).__name__}. "
            "It takes no plan any more: apply it first, parallelize_module(model, mesh, plan), and verify the model "
            "that you will train"
        )
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(
            f"verify: tolerance={tolerance!r} is no error relative to a norm: choose 1e-4, or 1e-10 in float64"
        )
    axis = take_axis(mesh, mesh_axis, "verify")
    if present := [name for name, x in model.named_parameters() if x.grad is not None]:
        raise ValueError(
            f"verify: parameters have gradients ({first_names(present)}), to which the step would add: call "
            "model.zero_grad() before, or verify before training"
        )
    title = f"{type(model).__name__} on {mesh.size()} ranks, mesh axes {mesh.mesh_dim_names}"
    return _Verification(model, mesh, axis, batch, (step, plain or step), tolerance, title).report()


class _Verification:
    """The runs of a step, and their comparison. Every rank takes the same decisions.

    ``steps``: the step with all ranks, and the step with one. ``everyone`` gathers over all ranks of the mesh, and
    ``line`` over the ranks that share this rank's sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        axis: DeviceMesh,
        batch: Any,
        steps: tuple[StepFunction, StepFunction],
        tolerance: float | None,
        title: str,
    ) -> None:
        self._model, self._mesh, self._axis, self._batch, self._steps = model, mesh, axis, batch, steps
        self._given, self._title = tolerance, title
        self._everyone, self._line = gather_over(mesh), gather_over(axis)
        self._proofs: set[Proof] = set()
        self._progress = _Progress(title if dist.get_rank() == int(mesh.mesh.flatten()[0]) else "")

    def report(self) -> Report:
        """Run, compare, and put everything back."""
        with ending_connections(self._mesh), torch.enable_grad():
            with broadcast_errors(self._everyone, VerificationError):
                self._refuse(_differences(self._line(checksums(self._batch, self._model))))
                self._state, before = ModelState(self._model), weights(self._model, sharded=True)
            try:
                report = self._compared(before)
            finally:
                self._state.restore()
                self._progress.end()
        for proof in {*self._proofs, proof_of(self._model)}:
            proof.verified = True
        self._progress.say(report.line)
        return report

    def _compared(self, before: dict[str, int]) -> Report:
        many, local = self._together(lambda attentions: Outputs(self._model, _kept))
        layouts = tuple(dict.fromkeys(x for ran in many.attentions if ran is not None for x in ran.layouts))
        places = ShardLookup(layouts, self._axis.get_local_rank())

        uncut: set[tuple[Key, int]] = set()

        def rows(key: Key, at: int, whole: torch.Tensor) -> torch.Tensor | None:
            of_call = local.kept.get(key, [])
            part = places.part(whole, of_call[at] if at < len(of_call) else None)
            if part is not None and part.layout is None:
                uncut.add((key, at))
            return None if part is None else part.expected.clone()

        with broadcast_errors(self._everyone, VerificationError):
            one, expected = self._alone(lambda attentions: Outputs(self._model, rows))
            self._refuse(_changed(before, weights(self._model, sharded=True)))
            self._refuse(_unusable(one, bool(expected.kept)))
            tensors = [*one.gradients.values(), *(x for kept in expected.kept.values() for x in kept)]
            unit = max(self._everyone(unit_of_all(tensors)))
            tolerance = self._given or max(_TOLERANCE, 2 * unit)
            for key, at in uncut:
                if expected.trained and not key[0]:  # it may be a rank's share of a sum: gradients show if it is not
                    expected.kept[key][at] = None
            outputs = output_errors(local.kept, expected.kept, self._line)
            parameters = self._errors(many, one, tolerance)
            losses = self._line((one.loss, many.loss))
            del many, tensors
            repeated = self._repeated(one, expected, rows, tolerance)
            leeway = Leeway(tolerance, {}, {})
            if unit and self._given is None:
                noisy, changed = self._alone(lambda attentions: Perturbed(self._model, rows))
                calls = output_errors(changed.kept, expected.kept, self._line)
                leeway = Leeway(tolerance, calls, self._errors(noisy, one, tolerance))
                del noisy, changed
            outputs = {key: error for key, error in outputs.items() if repeated.get(key, 0.0) <= tolerance}
            results = expected.results(outputs)
            wrong = [*leeway.wrong({key: outputs[key] for key in results}), *leeway.wrong(parameters)]
            wrong += [_LOSS for alone, ran in losses if not _near(alone, ran, leeway.of(_LOSS))][:1]
            report = self._report(expected.kinds, outputs, results, parameters, losses, leeway)
            if not any(self._everyone(bool(layouts))):
                raise VerificationError(replace(report, findings=(_NO_ATTENTION,)))
            if not any(self._everyone(bool(outputs or parameters or one.loss is not None))):
                raise VerificationError(replace(report, findings=(_NOTHING,)))
            ranks = self._everyone(wrong)
            if not any(ranks):
                return report
            del expected
        texts = self._causes(leeway) or _of_loss(one.loss, [x for _, x in losses], leeway.of(_LOSS))
        texts = next(filter(None, self._everyone(texts if wrong else [])), [])
        names = _names(next(filter(None, ranks)))
        texts = texts or [f"more than rounding differs from one device: {names}. The cause is not known"]
        raise VerificationError(replace(report, findings=tuple(texts)))

    def _repeated(self, one: StepRun, expected: Outputs, rows: Any, tolerance: float) -> dict[Key, float]:
        """The differences of outputs when the step with one rank is repeated.

        They are no error where all gradients and losses are equal: a pipeline runs its stages on memory that nobody has
        written, to learn shapes.
        """
        again, repeated = self._alone(lambda attentions: Outputs(self._model, rows))
        errors, leeway = output_errors(repeated.kept, expected.kept, self._line), Leeway(tolerance, {}, {})
        losses, others = zip(*self._line((one.loss, again.loss)), strict=True)
        drawn = leeway.wrong(self._errors(again, one, tolerance))
        texts: list[str] = []
        alone = not expected.trained and leeway.wrong(errors)
        if drawn or alone or not all(_near(*pair, tolerance) for pair in zip(losses, others, strict=True)):
            first = next((key for key in expected.kinds if not errors.get(key, 0.0) <= tolerance), None)
            if first is not None:
                texts = [
                    f"two steps with one rank differ, first in {first[0] or 'the model'} ({expected.kinds[first]}): "
                    "something is drawn at random. Draw it for the whole sequence from a seed, and cut it as the tokens"
                ]
            texts = texts or [
                f"two steps with one rank differ in {f'gradients ({first_names(drawn)})' if drawn else 'the loss'}: "
                "the step uses random numbers, or keeps state between calls (an iterator, a counter)"
            ]
        if not texts and not all(_near(loss, losses[0], tolerance) for loss in losses):
            texts = [
                f"the step with one rank has another loss on each rank ({', '.join(map(_number, losses))}): "
                "the sample differs between ranks. The step must not choose it by the rank of the process"
            ]
        self._refuse(texts)
        return errors

    def _report(
        self,
        kinds: Mapping[Key, str],
        outputs: Mapping[Key, float],
        results: Sequence[Key],
        parameters: Mapping[str, float],
        losses: Sequence[tuple[float | None, float | None]],
        leeway: Leeway,
    ) -> Report:
        """The report, equal on every rank: it has the largest of each error."""
        worst = max((*(outputs[key] for key in results), *parameters.values()), default=0.0)
        unused = [key[0] for key in leeway.wrong(outputs) if key not in results]
        drops = any(isinstance(x, nn.Dropout) and x.p > 0 and x.training for x in self._model.modules())
        processes, states = map(set, zip(*self._line((os.getpid(), self._state.drawn_from)), strict=True))
        share_state = drops and len(states) == 1 < len(processes)  # threads of one process share their generator
        ranks = self._everyone((kinds, outputs, parameters, losses, worst, unused, share_state))
        all_kinds, all_outputs, all_parameters, all_losses, worsts, unuseds, alikes = zip(*ranks, strict=True)
        first = [x for pairs in all_losses[:1] for x in (pairs[0][0], *(many for _, many in pairs))]
        names = dict.fromkeys(name for each in all_parameters for name in each)
        every = {key: kind for each in all_kinds for key, kind in each.items()}
        return Report(
            title=self._title,
            findings=(),
            modules=tuple(ModuleErrors(key[0], kind, _most(all_outputs, key)) for key, kind in every.items()),
            parameters=tuple((name, _most(all_parameters, name) or 0.0) for name in names),
            loss=() if None in first else tuple(first),
            worst=max(worsts),
            unused=tuple(dict.fromkeys(name for each in unuseds for name in each)),
            same_dropout=any(alikes),
            tolerance=leeway.tolerance,
            rounding=max((leeway.of(key) - leeway.tolerance for key in (*outputs, *parameters)), default=0.0) / 4,
        )

    def _together(self, recording: Callable[[list[Any]], Any]) -> tuple[StepRun, Any]:
        """The step with all ranks."""
        self._state.restore()
        failures: list[StepFailure | None] = []
        run = partial(run_step, self._model, self._batch, self._mesh, self._steps[0], recording)
        with over_own_groups(self._mesh, self._everyone) as own:
            ran = run_together(run, broken_by_error(self._model))
            own.leave()
            if not isinstance(ran, StepFailure):
                failures = self._everyone(None)  # all ranks have finished or failed: no message is under way
        self._proofs |= own.proofs
        self._progress.step()
        if isinstance(ran, StepFailure):
            if communicates(self._model, self._mesh) and not own.all_have_left():
                # Ranks wait for this one in FSDP2 or DDP, whose groups are the user's.
                for at in range(self._mesh.ndim):
                    abort_group(self._mesh.get_group(at), RuntimeError(ran.text))
                raise VerificationError(Report(self._title, (f"on rank {dist.get_rank()}: {ran.text}",)))
            failures = self._everyone(ran)
        self._refuse(_failed(failures), same=True)
        assert not isinstance(ran, StepFailure)
        return ran

    def _alone(self, recording: Callable[[list[Any]], Any]) -> tuple[StepRun, Any]:
        """The step with this rank in place of the ranks of the sequence."""
        self._state.restore()
        ranks = self._axis.mesh.tolist()
        with as_one_rank(self._mesh, self._axis) as mesh:
            try:
                result = run_step(self._model, self._batch, mesh, self._steps[1], recording)
            except Exception as error:
                error.add_note(
                    "verify: this was the step with one rank in place of all of the sequence. Let the step cut the "
                    "batch, and make layouts, groups and the schedules of a pipeline, for the mesh that it is given"
                    f"{broken_by_error(self._model)}"
                )
                raise
        self._progress.step()
        if len(ranks) > 1 and any(ran is not None and ran.ranks == ranks for ran in result[0].attentions):
            raise ValueError(
                f"verify: attention runs over a process group of the ranks {ranks} that the mesh does not have: give "
                "verify the mesh that the styles and functions were given"
            )
        return result

    def _causes(self, leeway: Leeway) -> list[str]:
        """Run the step twice more and keep everything, to name the first mistake. No text if it finds none."""
        self._progress.more(2)
        many, local = self._together(partial(Recording, self._model))
        with broadcast_errors(self._everyone, VerificationError):
            one, whole = self._alone(partial(Recording, self._model))
            layouts = tuple(dict.fromkeys(x for ran in many.attentions if ran is not None for x in ran.layouts))
            comparison = Comparison(
                StepResult(whole, one.gradients, one.loss),
                StepResult(local, many.gradients, many.loss),
                ShardLookup(layouts, self._axis.get_local_rank()),
                self._line,
                leeway,
            )
            self._state.restore()
            with as_one_rank(self._mesh, self._axis):
                return findings(comparison, self._model, self._axis)

    def _errors(self, actual: StepRun, expected: StepRun, tolerance: float) -> dict[str, float]:
        return gradient_errors(actual.gradients, expected.gradients, self._line, tolerance)[0]

    def _refuse(self, texts: list[str], *, same: bool = False) -> None:
        """Raise on every rank if there are texts on one. ``same``: all ranks have the same."""
        if not same:
            texts = next((each for each in self._everyone(texts) if each), [])
        if texts:
            raise VerificationError(Report(self._title, tuple(texts)))


class _Progress:
    """A line on the terminal while steps run, once they have taken some seconds. Only where there is a title."""

    def __init__(self, title: str) -> None:
        self._title, self._begin, self._done, self._steps, self._shown = title, time.monotonic(), 0, 4, False

    def more(self, steps: int) -> None:
        """Further steps follow."""
        self._steps = self._done + steps

    def step(self) -> None:
        """A step has ended."""
        self._done += 1
        seconds = time.monotonic() - self._begin
        if self._title and seconds > 2 and sys.stderr.isatty():
            self._steps, self._shown = max(self._steps, self._done), True
            bar = "#" * self._done + "." * (self._steps - self._done)
            print(f"\rverify [{bar}] step {self._done} of {self._steps}, {seconds:.0f} s", end="", file=sys.stderr)

    def end(self) -> None:
        """Remove the line."""
        if self._shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._title:
            print(text)


def _kept(key: Key, at: int, x: torch.Tensor) -> torch.Tensor | None:
    return None if isinstance(x, DTensor) else x.clone()


def _most(ranks: Sequence[Mapping[Any, float]], key: Any) -> float | None:
    return max((each[key] for each in ranks if key in each), default=None)


def _names(wrong: Sequence[Any]) -> str:
    return first_names([what if isinstance(what, str) else (what[0] or "the output of the model") for what in wrong])


def _failed(failures: list[StepFailure | None]) -> list[str]:
    """Texts for errors of the step on ranks. Ranks that lost the connection to another rank are not the cause."""
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
            f"the ranks begin with different weights ({first_names(weights)}): give them one seed, or load "
            "one state dict"
        )
    return texts


def _changed(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """A text for a step that trains the model."""
    names = [name.removeprefix(WEIGHTS) for name in before if after.get(name) != before[name]]
    return names and [
        f"the step changes parameters ({first_names(names)}), and they are changed now: load or make them again. Leave "
        "the optimizer out of the step, and optimizers that run in the backward"
    ]


def _unusable(one: StepRun, called: bool) -> list[str]:
    """A text for a step with one rank with which nothing can be compared."""
    bad = [name for name, x in one.gradients.items() if x is not None and not bool(x.isfinite().all())]
    if not called:
        return ["the step does not call the model that it is given"]
    if one.loss is not None and not math.isfinite(one.loss):
        return [f"with one rank the loss is {one.loss}: choose a batch and weights for which it is finite"]
    if bad:
        return [f"with one rank gradients are not finite ({first_names(bad)}): choose another batch, or other weights"]
    return list(one.removed) and [
        f"the step removes gradients before it ends ({first_names(one.removed)}), so they cannot be compared: leave "
        "zero_grad() out of it, and optimizers that set gradients to None"
    ]


def _near(loss: float | None, other: float | None, tolerance: float) -> bool:
    """Whether losses are equal but for rounding; None is the loss of a step that returns none."""
    return loss == other or (None not in (loss, other) and math.isclose(loss, other, rel_tol=tolerance))  # pyright: ignore


def _of_loss(one: float | None, ranks: list[float | None], tolerance: float) -> list[str]:
    """Findings about the loss that a step returns. All gradients are right."""
    if all(_near(loss, one, tolerance) for loss in ranks):
        return []
    shown = ", ".join(map(_number, ranks))
    losses = [loss for loss in ranks if loss is not None]
    if one is None or len(losses) < len(ranks):
        return [f"the step returns {_number(one)} as its loss with one rank, and {shown} on the ranks"]
    why = "return the mean over the tokens of all ranks, as global_loss does"
    if not all(map(math.isfinite, losses)):
        why = f"it is {shown}. The cause is not known"
    elif _near(sum(losses), one, tolerance):
        why = "each rank returns its share. Return the sum of the shares, by an all-reduce, or None"
    return [f"the loss that the step returns is another number than with one rank, and all gradients are right: {why}"]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


_LOSS = "the loss"
_NOTHING = (
    "nothing could be compared: the step returns no loss and leaves no gradients, and no output of a module has the "
    "shape of a rank's tokens. Let it return the loss"
)
_NO_ATTENTION = (
    "no attention ran context parallel: no style or block covers attention that the model calls, or the step does not "
    "call the model"
)
