"""The proof of a model: one step of it with all ranks, and the same step with one rank, compared."""

from __future__ import annotations

import copy
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles.checks.proof import StepProofs, proof_of
from cp_styles.collectives.notes import StepNotes
from cp_styles.comm.point_to_point import abort_group
from cp_styles.layouts import SequenceLayout
from cp_styles.mixers.randomness import DropoutByPosition
from cp_styles.styles.on_mesh_axis import take_axis
from cp_styles.verify.compare import Comparison, Leeway, ShardLookup, StepResult, gradient_errors, output_errors
from cp_styles.verify.diagnose import OUTSIDE, findings, join_first
from cp_styles.verify.other_axes import examine_other_axes
from cp_styles.verify.other_groups import OtherGroups
from cp_styles.verify.planted import PlantedCut
from cp_styles.verify.record import Key, Outputs, Recording
from cp_styles.verify.report import COARSE, ModuleErrors, Power, Report, VerificationError, describe_blind
from cp_styles.verify.rounding import TOLERANCE, Perturbed, tolerance_for, unit_of, unit_of_all
from cp_styles.verify.step import (
    WEIGHTS,
    ModelState,
    StepFailure,
    StepFunction,
    StepRun,
    abort_on_interrupt,
    as_one_rank,
    broadcast_errors,
    checksums,
    communicates,
    gather_over,
    over_temporary_groups,
    recovery_note,
    run_or_failure,
    run_step,
    weights,
)


def verify(
    model: nn.Module,
    mesh: DeviceMesh,
    batch: Any,
    step: StepFunction,
    *,
    mesh_axis: str = "cp",
    plain: StepFunction | None = None,
    tolerance: float | None = None,
) -> Report:
    """Prove that a step of ``model`` equals the step of one device: run it with all ranks, and with one, and compare.

    ``model`` is the model that will be trained, in place: with its styles, FSDP2, DDP, tensor parallelism, checkpoints
    and adapters. For the reference, this rank alone takes the place of the ranks of ``mesh_axis``: every style,
    ``context_parallel`` block and function of this package works over one rank. The step is the same code in all runs,
    and must shard the batch for the size of the mesh that it is given. The remaining axes of the mesh are unchanged.

    These are compared, over the ranks of the axis:

    - the output of the model: a rank is expected to have the rows that the layout of the attention gives it;
    - the outputs of all modules, which show where a mistake is (and in a step without a backward, that there is one);
    - the loss that the step returns;
    - the gradients of all parameters after the step, also of parameters outside of the model to which a ``backward()``
      of the step leads;
    - buffers and plain attributes after the step. Where they differ, the results of a second step that follows.

    A comparison that cannot fail proves nothing. So a last step with one rank has a planted mistake: each attention and
    mixer is cut where the parts of the ranks end, as if the ranks ran it alone. If that moves neither the loss nor a
    gradient (nor an output, without a backward) by ten tolerances, nothing is proved, which is an error.

    Afterwards gradients are None, and buffers, plain attributes of modules (also in dicts, lists and sets), training
    flags and random states are as before, also after an error. (FSDP2 does not recover from an error in its forward;
    the error says so.) Dropout is off in all runs. Compiled modules run without their graphs: their eager code is
    proved.

    Args:
        model: the model, in any floating-point dtype.
        mesh: the ranks; the axis of the sequence, and others if the step needs them.
        batch: a small whole batch, equal on every rank of the axis. Usually a dict of tensors.
        step: ``step(model, batch, mesh)`` does the work of the training loop over the ``mesh`` that it is given: it
            shards the batch, runs forward, loss and backward, and reduces the gradients. It returns the loss of the
            whole batch, or None.
        plain: the reference, if it is not ``step`` with one rank: your old step, with the whole batch. It finds changes
            that the new step makes with any number of ranks (other positions, no mask, another loss). It runs the model
            with its styles, whose masks apply to one rank too.
        mesh_axis: the axis that shards the sequence. A 1-D mesh may have any name.
        tolerance: the largest error that counts as rounding, relative to a norm. None: 1e-4 for float32, 1e-5 for
            float64. (One key too many or too few makes an error of 1e-2 in a small batch.) In lower precision: two
            units in the last place, and four times the effect of changed last bits, which one more run measures.

    Returns:
        A report, equal on every rank. The first rank also prints its first line.

    Memory: the gradients twice (sharded as in training), and this rank's rows of the outputs of modules. Time: four
    small steps, five in lower precision; if the step is wrong, three or four, two more, and some parts of the model.

    Communication: the messages of the steps, and all-gathers of small objects over the axes of ``mesh``.

    Raises:
        VerificationError: on every rank, if the steps differ, if the step raises on any rank, if nothing can be
            compared, or if the comparison does not notice the planted mistake. It names the first wrong module. It also
            names the cause, if a test shows one of these: positions, labels, layout, a layer that mixes tokens,
            attention on a shard, gradients that are not reduced exactly once, samples or weights that differ between
            ranks, random numbers.
        ValueError: parameters have gradients, the ``tolerance`` is invalid, or the mesh does not have the axis.
        TypeError: the step returns neither one number nor None.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"verify(model, mesh, batch, step) needs a DeviceMesh as its second argument, got {type(mesh).__name__}. "
            "It takes no plan any more: apply it first, parallelize_module(model, mesh, plan), and verify the model "
            "that you will train"
        )
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(
            f"verify: tolerance={tolerance!r} is not an error relative to a norm: choose 1e-4, or 1e-10 in float64"
        )
    axis = take_axis(mesh, mesh_axis, "verify")
    if present := [name for name, x in model.named_parameters() if x.grad is not None]:
        raise ValueError(
            f"verify: parameters have gradients ({join_first(present)}), to which the step would add: call "
            "model.zero_grad() before, or verify before training"
        )
    title = f"{type(model).__name__} on {mesh.size()} ranks, mesh axes {mesh.mesh_dim_names}"
    return _Verification(model, mesh, axis, batch, (step, plain or step), tolerance, title).report()


class _Moved(NamedTuple):
    """Results of a step that a planted mistake moves on a rank.

    Attributes:
        used: whether there was an attention or mixer in which to plant it.
        takes: whether an attention or mixer has lost a key or a row by it.
        measured: whether rounding is small enough to see it.
        gradients, outputs, loss: what it moves.
        nonzero: the gradients that are not 0 without it.
    """

    used: bool
    takes: bool
    measured: bool
    gradients: list[str]
    outputs: list[Key]
    loss: bool
    nonzero: list[str]


class _Verification:
    """The runs of a step, and their comparison. ``steps``: the step with all ranks, and the step with one.

    Every rank takes the same decisions, because gathered values alone decide.
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
        self._tolerance, self._title = tolerance, title
        self._gather_all = gather_over(mesh)
        self._gather_axis = gather_over(axis)  # the ranks that share this rank's sequence
        self._outside: dict[nn.Parameter, str] = {}  # parameters of the step that the model does not have
        self._others = set[int]()  # all of these in the step with all ranks, by id
        self._progress = _Progress(title if dist.get_rank() == int(mesh.mesh.flatten()[0]) else "")

    def report(self) -> Report:
        """Run the steps, compare them, and restore the model's state."""
        with abort_on_interrupt(self._mesh), torch.enable_grad():
            with broadcast_errors(self._gather_all, VerificationError):
                self._refuse(_describe_differences(self._gather_axis(checksums(self._batch, self._model))))
                self._state, before = ModelState(self._model), weights(self._model, sharded=True)
            try:
                report = self._run_and_compare(before)
            finally:
                self._state.restore()
                self._progress.end()
        for proof in {*self._proofs, proof_of(self._model)}:
            # Another model of the step may lack a proof. The whole model of a pipeline may be gone.
            model = proof.model()
            if model is None or self._others.isdisjoint(map(id, model.parameters())):
                proof.proved(frozenset(report.unseen), self._proofs.get(proof))
        self._progress.print(report.line)
        return report

    def _run_and_compare(self, before: dict[str, int]) -> Report:
        parallel, local = self._run_with_all_ranks(lambda attentions: Outputs(self._model, _keep))
        state = self._state.values()
        layouts = tuple(dict.fromkeys(x for ran in parallel.attentions if ran is not None for x in ran.layouts))
        rank = self._axis.get_local_rank()
        lookup = ShardLookup(layouts, rank)
        for situations in self._proofs.values():  # one rank runs the whole sequence
            situations.lengths.update([x.length for x in layouts if x.lengths[rank] in situations.lengths])

        replicated: set[tuple[Key, int]] = set()
        cut = False  # whether an output on the ranks has another shape than with one rank

        # The reference keeps the rows that this rank has: whole outputs of all modules would not fit.
        def keep_rows(key: Key, at: int, whole: torch.Tensor) -> torch.Tensor | None:
            nonlocal cut
            outputs = local.kept.get(key, [])
            mine = outputs[at] if at < len(outputs) else None
            cut = cut or (mine is not None and mine.shape != whole.shape)
            part = lookup.part(whole, mine)
            if part is not None and part.layout is None:
                replicated.add((key, at))
            return None if part is None else part.expected.clone()

        with broadcast_errors(self._gather_all, VerificationError):
            reference, expected = self._run_with_one_rank(lambda attentions: Outputs(self._model, keep_rows))
            values = self._state.values()
            differing = [
                name for name in {**state, **values} if not _is_part(lookup, state.get(name), values.get(name))
            ]
            state = self._gather_all(differing)
            self._refuse(_describe_changes(before, weights(self._model, sharded=True)))
            self._others = set(map(id, parallel.outside))
            self._outside = self._name_outside([x for x in parallel.outside if x in reference.outside])
            parallel, reference = self._with_outside(parallel), self._with_outside(reference)
            self._refuse(_describe_unusable(reference, bool(expected.kept)))
            tensors = [*reference.gradients.values(), *(x for kept in expected.kept.values() for x in kept)]
            unit = max(self._gather_all(unit_of_all(tensors)))
            tolerance = self._tolerance or tolerance_for(unit)
            for key, at in replicated:
                if expected.trained and not key[0]:
                    # An output of the model may be this rank's share of a sum. Gradients show whether it is.
                    expected.kept[key][at] = None
            outputs = output_errors(local.kept, expected.kept, self._gather_axis)
            parameters = self._parameter_errors(parallel, reference, tolerance)
            losses = self._gather_axis((reference.loss, parallel.loss))
            other = examine_other_axes(self._model, self._mesh, self._axis, self._batch, parallel, self._notes, before)
            unseen = self._find_unseen(layouts, takes_means=bool(parameters) or reference.loss is not None)
            del parallel, tensors
            repeated = self._repeat(reference, expected, keep_rows, tolerance)
            leeway = Leeway(tolerance, {}, {})
            if self._tolerance is None and tolerance > TOLERANCE:
                noisy, changed = self._run_with_one_rank(lambda attentions: Perturbed(self._model, keep_rows))
                calls = output_errors(changed.kept, expected.kept, self._gather_axis)
                leeway = Leeway(tolerance, calls, self._parameter_errors(noisy, reference, tolerance))
                del noisy, changed
            moved = self._plant(reference, expected, keep_rows, leeway, layouts)
            outputs = {key: error for key, error in outputs.items() if repeated.get(key, 0.0) <= tolerance}
            results = expected.results(outputs)
            wrong = [*leeway.wrong({key: outputs[key] for key in results}), *leeway.wrong(parameters)]
            wrong += [_LOSS for alone, ran in losses if not _is_near(alone, ran, leeway.of(_LOSS))][:1]
            report = self._build_report(expected.kinds, outputs, results, parameters, losses, leeway)
            report = replace(report, unseen=unseen)
            ranks = self._gather_all(wrong)
            # A program may exchange tensors by collectives, and attend to them by itself. Without layouts its rows are
            # not compared, so gradients must show that it is exact.
            by_gradients = any(self._gather_all(cut and bool(parameters))) and not any(ranks)
            if not by_gradients and not any(self._gather_all(bool(layouts))):
                raise VerificationError(replace(report, findings=(_describe_no_attention(ranks),)))
            if not any(self._gather_all(bool(outputs or parameters or reference.loss is not None))):
                raise VerificationError(replace(report, findings=(_NOTHING,)))
            if not any(ranks):
                mistakes, notes = zip(*self._gather_all(other), strict=True)
                self._raise_if_any(next(filter(None, mistakes), []))
                noted = [*next(filter(None, notes), []), *self._examine_state(sorted(set().union(*state)), leeway)]
                return self._with_power(replace(report, notes=tuple(noted)), moved)
            del expected  # a run that finds causes keeps more
        if any(names not in ([], [_LOSS]) for names in ranks):
            texts = self._find_causes(leeway)
        else:  # gradients show that no module is the cause
            texts = _describe_loss(reference.loss, [x for _, x in losses], leeway.of(_LOSS))
        texts = next(filter(None, self._gather_all(texts if wrong else [])), [])
        names = _join_names(next(filter(None, ranks)))
        texts = texts or [f"more than rounding differs from one device: {names}. The cause is not known"]
        raise VerificationError(replace(report, findings=tuple(texts)))

    def _examine_state(self, names: list[str], leeway: Leeway) -> list[str]:
        """A note on state that differs after the step (``names``). Two more steps in a row: raises if they differ."""
        if not names:
            return []

        def twice(step: StepFunction, model: nn.Module, batch: Any, mesh: DeviceMesh) -> Any:
            step(model, copy.deepcopy(batch), mesh)
            model.zero_grad()
            return step(model, batch, mesh)

        self._progress.expect(2)
        self._steps = partial(twice, self._steps[0]), partial(twice, self._steps[1])
        parallel, _ = self._run_with_all_ranks(lambda attentions: Outputs(self._model, _keep))
        reference, _ = self._run_with_one_rank(lambda attentions: Outputs(self._model, _keep))
        wrong = leeway.wrong(self._parameter_errors(parallel, reference, leeway.tolerance))
        wrong += [] if _is_near(reference.loss, parallel.loss, leeway.of(_LOSS)) else [_LOSS]
        what = f"state that the step leaves ({join_first(names)}) differs from one device"
        remedy = "Make a mean or a length that the next forward uses from the whole sequence: sum it over the ranks"
        self._refuse(
            [f"the {what}, and so does a second step in a row: {_join_names(wrong)}. {remedy}"] if wrong else []
        )
        return [f"The {what}, without an effect on a second step"]

    def _repeat(self, reference: StepRun, expected: Outputs, keep_rows: Any, tolerance: float) -> dict[Key, float]:
        """The differences of outputs when the step with one rank is repeated. Raises if its results differ."""
        repeated, outputs = self._run_with_one_rank(lambda attentions: Outputs(self._model, keep_rows))
        errors, leeway = output_errors(outputs.kept, expected.kept, self._gather_axis), Leeway(tolerance, {}, {})
        losses, repeated_losses = zip(*self._gather_axis((reference.loss, repeated.loss)), strict=True)
        drawn = leeway.wrong(self._parameter_errors(repeated, reference, tolerance))
        texts: list[str] = []
        # With equal gradients and losses, outputs may differ: to learn shapes, a pipeline runs its stages on
        # uninitialized memory.
        without_gradients = not expected.trained and leeway.wrong(errors)
        equal_losses = all(_is_near(*pair, tolerance) for pair in zip(losses, repeated_losses, strict=True))
        if drawn or without_gradients or not equal_losses:
            first = next((key for key in expected.kinds if not errors.get(key, 0.0) <= tolerance), None)
            if first is not None:
                texts = [
                    f"two steps with one rank differ, first in {first[0] or 'the model'} ({expected.kinds[first]}): "
                    "something is drawn at random. Draw it for the whole sequence from a seed, and cut it as the tokens"
                ]
            texts = texts or [
                f"two steps with one rank differ in {f'gradients ({join_first(drawn)})' if drawn else 'the loss'}: "
                "the step uses random numbers, or keeps state between calls (an iterator, a counter)"
            ]
        if not texts and not all(_is_near(loss, losses[0], tolerance) for loss in losses):
            texts = [
                f"the step with one rank has another loss on each rank ({', '.join(map(_format_loss, losses))}): "
                "the sample differs between ranks. The step must not choose it, or the seed of random numbers, by the "
                "rank of the process"
            ]
        self._refuse(texts)
        return errors

    def _with_outside(self, run: StepRun) -> StepRun:
        """``run``, whose gradients include the gradients of parameters outside of the model."""
        outside = {name: run.outside.get(parameter) for parameter, name in self._outside.items()}
        return replace(run, gradients={**run.gradients, **outside})

    def _name_outside(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, str]:
        """Names for parameters that the model does not have."""
        models = [model for proof in self._proofs if (model := proof.model()) is not None]
        names = {x: f"{type(model).__name__}.{name}" for model in models for name, x in model.named_parameters()}
        named, found = dict[nn.Parameter, str](), set[str]()
        for at, x in enumerate(parameters):
            name = names.get(x, f"parameter {at} {tuple(x.shape)}")
            named[x] = OUTSIDE + (f"{name} ({at})" if name in found else name)  # of two models of one class
            found.add(name)
        return named

    def _find_unseen(self, layouts: Sequence[SequenceLayout], *, takes_means: bool) -> tuple[str, ...]:
        """ "tokens" and "labels", of which the ranks had equally many, if the step takes a mean by itself.

        A mean of the ranks' means is then right by chance.
        """
        counts = self._gather_axis(self._notes.labels)
        equal = {
            "tokens": all(len(set(layout.lengths)) == 1 for layout in layouts) if layouts else None,
            "labels": all(each == counts[0] for each in counts) if any(counts) else None,
        }
        ranks = self._gather_all((equal, takes_means and not self._notes.losses and len(counts) > 1))
        if not all(takes for _, takes in ranks):
            return ()
        known = {what: [each[what] for each, _ in ranks if each[what] is not None] for what in equal}
        return tuple(what for what, values in known.items() if values and all(values))

    def _plant(
        self,
        reference: StepRun,
        expected: Outputs,
        keep_rows: Any,
        leeway: Leeway,
        layouts: Sequence[SequenceLayout],
    ) -> _Moved:
        """Repeat the step with one rank with a planted mistake: what it moves.

        Raises if the step communicates over ranks for which this rank stands.
        """
        # Only here, because it does not matter to this run how a mode rounds.
        planted, groups = PlantedCut(layouts), OtherGroups(self._axis.mesh.tolist())
        run, outputs = self._run_with_one_rank(lambda attentions: Outputs(self._model, keep_rows), planted, groups)
        self._refuse(groups.found)
        errors = output_errors(outputs.kept, expected.kept, self._gather_axis)
        parameters = self._parameter_errors(run, reference, leeway.tolerance)
        return _Moved(
            used=planted.used,
            takes=planted.takes,
            measured=any(leeway.of(what) < COARSE for what in (parameters or errors)),
            gradients=leeway.moved(parameters),
            outputs=leeway.moved(errors),
            loss=not _is_near(reference.loss, run.loss, leeway.margin(_LOSS)),
            nonzero=[name for name, x in reference.gradients.items() if x is not None and bool(x.any())],
        )

    def _with_power(self, report: Report, moved: _Moved) -> Report:
        """``report`` with what a planted mistake has moved. Raises if that is nothing: no mistake could be seen."""
        ranks: list[_Moved] = self._gather_all(moved)
        if not any(each.used for each in ranks):
            return report
        names = {name for name, _ in report.parameters}
        seen = {what for each in ranks for what in (each.gradients if names else each.outputs)}
        power = Power(
            moved=len(seen),
            of=len(names) or len(report.modules),
            loss=any(each.loss for each in ranks),
            zero=tuple(sorted(names.difference(*(each.nonzero for each in ranks)))),
            takes=any(each.takes for each in ranks),
        )
        report = replace(report, power=power)
        if not (seen or power.loss) and any(each.measured for each in ranks):
            modules = dict.fromkeys(key[0] for each in ranks for key in each.outputs)
            raise VerificationError(replace(report, findings=(describe_blind(power, self._batch, list(modules)),)))
        return report

    def _build_report(
        self,
        kinds: Mapping[Key, str],
        outputs: Mapping[Key, float],
        results: Sequence[Key],
        parameters: Mapping[str, float],
        losses: Sequence[tuple[float | None, float | None]],
        leeway: Leeway,
    ) -> Report:
        """The report, equal on every rank, with the largest error of all ranks for each entry."""
        worst = max((*(outputs[key] for key in results), *parameters.values()), default=0.0)
        unused = [key[0] for key in leeway.wrong(outputs) if key not in results]
        drops = any(isinstance(x, nn.Dropout) and x.p > 0 and x.training for x in self._model.modules())
        drops = drops and not any(isinstance(x, DropoutByPosition) for x in self._model.modules())  # asks for one seed
        processes, states = map(set, zip(*self._gather_axis((os.getpid(), self._state.drawn_from)), strict=True))
        same_dropout = drops and len(states) == 1 < len(processes)  # threads of one process share their generator
        ranks = self._gather_all((kinds, outputs, parameters, losses, worst, unused, same_dropout))
        all_kinds, all_outputs, all_parameters, all_losses, all_worst, all_unused, dropouts = zip(*ranks, strict=True)
        first = [x for pairs in all_losses[:1] for x in (pairs[0][0], *(parallel for _, parallel in pairs))]
        names = dict.fromkeys(name for each in all_parameters for name in each)
        modules = {key: kind for each in all_kinds for key, kind in each.items()}
        return Report(
            title=self._title,
            findings=(),
            modules=tuple(ModuleErrors(key[0], kind, _largest(all_outputs, key)) for key, kind in modules.items()),
            parameters=tuple((name, _largest(all_parameters, name) or 0.0) for name in names),
            loss=() if None in first else tuple(first),
            worst=max(all_worst),
            unused=tuple(dict.fromkeys(name for each in all_unused for name in each)),
            same_dropout=any(dropouts),
            tolerance=leeway.tolerance,
            rounding=max((leeway.of(key) - leeway.tolerance for key in (*outputs, *parameters)), default=0.0) / 4,
        )

    def _run_with_all_ranks(self, recording: Callable[[list[Any]], Any]) -> tuple[StepRun, Any]:
        """Run the step with all ranks."""
        self._state.restore()
        failures: list[StepFailure | None] = []
        run = partial(run_step, self._model, self._batch, self._mesh, self._steps[0], recording)
        self._notes, self._proofs = StepNotes(), StepProofs()
        with over_temporary_groups(self._mesh, self._gather_all, self._notes, self._proofs) as groups:
            result = run_or_failure(run, recovery_note(self._model))
            groups.leave()
            if not isinstance(result, StepFailure):
                failures = self._gather_all(None)  # after it, no message of the step is in flight
        self._progress.step()
        if isinstance(result, StepFailure):
            if communicates(self._model, self._mesh) and not groups.all_have_left():
                # Ranks wait for this one in FSDP2 or DDP, whose groups belong to the user.
                for at in range(self._mesh.ndim):
                    abort_group(self._mesh.get_group(at), RuntimeError(result.text))
                raise VerificationError(Report(self._title, (f"on rank {dist.get_rank()}: {result.text}",)))
            failures = self._gather_all(result)
        self._raise_if_any(_describe_failures(failures))
        assert not isinstance(result, StepFailure)
        return self._with_outside(result[0]), result[1]

    def _run_with_one_rank(
        self,
        recording: Callable[[list[Any]], Any],
        planted: PlantedCut | None = None,
        around: AbstractContextManager[Any] | None = None,
    ) -> tuple[StepRun, Any]:
        """Run the step with this rank in place of the ranks of the sequence, in the context ``around``."""
        self._state.restore()
        ranks = self._axis.mesh.tolist()
        with as_one_rank(self._mesh, self._axis, planted) as mesh, around or nullcontext():
            try:
                result = run_step(self._model, self._batch, mesh, self._steps[1], recording)
            except Exception as error:
                error.add_note(
                    "verify: this was the step with one rank in place of all of the sequence. Let the step cut the "
                    "batch, and make layouts, groups and the schedules of a pipeline, for the mesh that it is given"
                    f"{recovery_note(self._model)}"
                )
                raise
        self._progress.step()
        if len(ranks) > 1 and any(ran is not None and ran.ranks == ranks for ran in result[0].attentions):
            raise ValueError(
                f"verify: attention runs over a process group of the ranks {ranks} that the mesh does not have: give "
                "verify the mesh that the styles and functions were given"
            )
        return self._with_outside(result[0]), result[1]

    def _find_causes(self, leeway: Leeway) -> list[str]:
        """Run the step twice more, record all calls, and name the first mistake. No text if none is found."""
        self._progress.expect(2)
        parallel, local = self._run_with_all_ranks(partial(Recording, self._model))
        with broadcast_errors(self._gather_all, VerificationError):
            reference, whole = self._run_with_one_rank(partial(Recording, self._model))
            layouts = tuple(dict.fromkeys(x for ran in parallel.attentions if ran is not None for x in ran.layouts))
            comparison = Comparison(
                StepResult(whole, reference.gradients),
                StepResult(local, parallel.gradients),
                ShardLookup(layouts, self._axis.get_local_rank()),
                self._gather_axis,
                leeway,
            )
            comparison.restore = self._state.restore
            with as_one_rank(self._mesh, self._axis):
                return findings(comparison, self._model, self._axis)

    def _parameter_errors(self, actual: StepRun, expected: StepRun, tolerance: float) -> dict[str, float]:
        return gradient_errors(actual.gradients, expected.gradients, self._gather_axis, tolerance)[0]

    def _refuse(self, texts: list[str]) -> None:
        """Raise on every rank if any rank has texts. Communication: one all-gather of objects."""
        self._raise_if_any(next((each for each in self._gather_all(texts) if each), []))

    def _raise_if_any(self, texts: Sequence[str]) -> None:
        if texts:
            raise VerificationError(Report(self._title, tuple(texts)))


class _Progress:
    """A line on the terminal while steps run, after the first two seconds. Nothing is printed without a title."""

    def __init__(self, title: str) -> None:
        self._title, self._begin, self._done, self._steps, self._shown = title, time.monotonic(), 0, 5, False

    def expect(self, steps: int) -> None:
        """Add further steps to the total."""
        self._steps = self._done + steps

    def step(self) -> None:
        """Count a step that has ended."""
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

    def print(self, text: str) -> None:
        """Print a line that remains."""
        if self._title:
            print(text)


def _keep(key: Key, at: int, x: torch.Tensor) -> torch.Tensor | None:
    return None if isinstance(x, DTensor) else x.clone()


def _is_part(lookup: ShardLookup, mine: Any, whole: Any) -> bool:
    """Whether a value that the step leaves on this rank is its part of the value with one rank, or equal to it."""
    if isinstance(mine, list) and isinstance(whole, list):
        return len(mine) == len(whole) and all(map(partial(_is_part, lookup), mine, whole))
    if not isinstance(mine, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return type(mine) is type(whole) and mine == whole
    compared = lookup.compare(whole, mine)
    return compared is not None and compared.error() <= min(TOLERANCE, tolerance_for(unit_of(mine)))


def _largest(ranks: Sequence[Mapping[Any, float]], key: Any) -> float | None:
    return max((each[key] for each in ranks if key in each), default=None)


def _join_names(wrong: Sequence[Any]) -> str:
    return join_first([what if isinstance(what, str) else (what[0] or "the output of the model") for what in wrong])


def _describe_failures(failures: list[StepFailure | None]) -> list[str]:
    """Texts for errors of the step, with their ranks."""
    raised = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    ranks_by_text: dict[str, list[int]] = {}
    # A rank that lost its connection fails because another rank has failed: show that rank's error.
    for rank, failure in [(rank, failure) for rank, failure in raised if not failure.of_transfer] or raised:
        ranks_by_text.setdefault(failure.text, []).append(rank)
    return [
        text if len(ranks) == len(failures) else f"on rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in list(ranks_by_text.items())[:3]
    ]


def _describe_differences(ranks: list[dict[str, int]]) -> list[str]:
    """Texts for entries of the batch and parameters that differ between ranks."""
    names = dict.fromkeys(name for sums in ranks for name in sums)
    different = [name for name in names if len({sums.get(name) for sums in ranks}) > 1]
    weights = [name for name in different if name.startswith(WEIGHTS)]
    entries = [name for name in different if not name.startswith(WEIGHTS)]
    texts = []
    if entries:
        texts.append(
            f"the sample differs between ranks ({', '.join(entries)}): all ranks of one sequence take part in one "
            "batch. Give them the same one, and let the step cut it"
        )
    if weights:
        texts.append(
            f"the ranks begin with different weights ({join_first(weights)}): give them one seed, or load "
            "one state dict"
        )
    return texts


def _describe_changes(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """A text for a step that changes parameters."""
    names = [name.removeprefix(WEIGHTS) for name in before if after.get(name) != before[name]]
    return names and [
        f"the step changes parameters ({join_first(names)}), and they are changed now: load or make them again. Leave "
        "the optimizer out of the step, and optimizers that run in the backward"
    ]


def _describe_unusable(reference: StepRun, called: bool) -> list[str]:
    """A text for a step with one rank whose results cannot be compared."""
    bad = [name for name, x in reference.gradients.items() if x is not None and not bool(x.isfinite().all())]
    if not called:
        return ["the step does not call the model that it is given"]
    if reference.loss is not None and not math.isfinite(reference.loss):
        return [f"with one rank the loss is {reference.loss}: choose a batch and weights for which it is finite"]
    if bad:
        return [f"with one rank gradients are not finite ({join_first(bad)}): choose another batch, or other weights"]
    return list(reference.removed) and [
        f"the step removes gradients before it ends ({join_first(reference.removed)}), so they cannot be compared: "
        "leave zero_grad() out of it, and optimizers that set gradients to None"
    ]


def _is_near(loss: float | None, other: float | None, tolerance: float) -> bool:
    """Whether losses are equal up to rounding. None: a step that returns no loss."""
    return loss == other or (None not in (loss, other) and math.isclose(loss, other, rel_tol=tolerance))  # pyright: ignore


def _describe_loss(reference: float | None, ranks: list[float | None], tolerance: float) -> list[str]:
    """Findings about the loss that a step returns, if all gradients are right."""
    if all(_is_near(loss, reference, tolerance) for loss in ranks):
        return []
    shown = ", ".join(map(_format_loss, ranks))
    losses = [loss for loss in ranks if loss is not None]
    if reference is None or len(losses) < len(ranks):
        return [f"the step returns {_format_loss(reference)} as its loss with one rank, and {shown} on the ranks"]
    why = "return the mean over the tokens of all ranks, as global_loss does"
    if not all(map(math.isfinite, losses)):
        why = f"it is {shown}. The cause is not known"
    elif _is_near(sum(losses), reference, tolerance):
        why = "each rank returns its share. Return the sum of the shares, by an all-reduce, or None"
    return [f"the loss that the step returns is another number than with one rank, and all gradients are right: {why}"]


def _format_loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


_LOSS = "the loss"
_NOTHING = (
    "nothing could be compared: the step returns no loss and leaves no gradients, and no output of a module has the "
    "shape of a rank's tokens. Let it return the loss"
)


def _describe_no_attention(wrong: Sequence[Sequence[str]]) -> str:
    names = _join_names(next(filter(None, wrong), []))
    differs = f", and more than rounding differs from one device: {names}" if names else ""
    return (
        f"no attention ran context parallel{differs}: no style or block covers attention that the model calls, or the "
        "step does not call the model. If it exchanges tensors by cp_styles.collectives, check their dims, layouts and "
        "reduce_gradients="
    )
