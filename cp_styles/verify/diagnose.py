"""Why a step differs from that of one process: finds the first difference, and tests possible causes.

A cause is not guessed from numbers. The first module whose output differs though its inputs are equal is run once more
on one process, with the suspected mistake: on this rank's rows alone, or with another mask. If the result is that of
the rank, the mistake is the cause. Otherwise the cause is not known, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cp_styles._compat import tensors_in, tree_leaves, tree_map
from cp_styles.layout import contiguous, head_tail, striped
from cp_styles.mask import PerRow
from cp_styles.troubleshooting import see
from cp_styles.verify.compare import ExpectedPart, Places, Squares, all_squares, factor, squares
from cp_styles.verify.record import AttentionMask, AttentionsSeen, Call, Key, OtherMasks, Recording, plain_name

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks of the mesh, by rank. Communication: one all-gather of objects for each axis."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step. ``gradients`` by parameter, whole; None for parameters without a gradient."""

    recording: Recording
    gradients: Mapping[str, torch.Tensor | None]
    loss: float | None


@dataclass(frozen=True)
class Errors:
    """Errors by call, over all ranks. None where nothing can be compared."""

    inputs: Mapping[Key, Mapping[str, float | None]]
    outputs: Mapping[Key, float | None]
    gradients: Mapping[Key, float | None]


@dataclass(frozen=True)
class _LossGradient:
    """The gradient of the model's output on a rank, against that of one process.

    Attributes:
        by: the factor with which they are nearest to each other.
        right: whether they are equal up to this factor.
        wrong: the positions at which they are not.
        at_ends: whether all of those are ends of runs of consecutive positions, and some of each kind have a gradient.
        like_labels: whether they differ there as with another label, or with none.
        tokens: how many tokens of this rank have a gradient on one process.
    """

    by: float
    right: bool
    wrong: tuple[int, ...]
    at_ends: bool
    like_labels: bool
    tokens: int


class Comparison:
    """Compares ``many``, a step on the ranks, with ``one``, the same step on one process.

    Every rank takes the same decisions, because what a decision depends on is gathered.

    Args:
        model: the model for one process, which has not run yet. Parts of it are run to test causes.
        places: which positions this rank holds, by the layouts with which attention ran.
        ranks: how many ranks share the sequence.
        over_sequence: sums a tensor over these ranks.
        gather: see :data:`Gather`.
    """

    def __init__(
        self,
        model: nn.Module,
        one: StepResult,
        many: StepResult,
        places: Places,
        ranks: int,
        over_sequence: Callable[[torch.Tensor], torch.Tensor],
        gather: Gather,
        tolerance: float,
    ) -> None:
        self._modules = {plain_name(name): module for name, module in model.named_modules()}
        self._one, self._many, self._places, self._ranks = one, many, places, ranks
        self._over_sequence, self._gather, self._tolerance = over_sequence, gather, tolerance
        self._calls = one.recording.calls
        self._local = {call.key: call for call in many.recording.calls}
        gradients = [x for x in one.gradients.values() if x is not None]
        # A gradient may be 0 up to rounding (that of a key's bias). So errors are relative to at least a part of the
        # largest gradient's norm: as much as its rounding may be 100 units in the last place.
        units = max((100 * torch.finfo(x.dtype).eps for x in gradients), default=0.0)
        self._floor_part = min(1e-2, units / tolerance)
        self._floor = self._floor_part * max((float(x.double().norm()) for x in gradients), default=0.0)
        self._of_loss = gather(self._loss_gradient())
        self.errors = self._all_errors()
        self.parameters = self._parameter_errors()

    def findings(self) -> list[str]:
        """The first mistake in the order of a step, in sentences; empty if there is none."""
        wrong = [call for call in self._calls if self._is_wrong(self.errors.outputs[call.key])]
        if wrong:
            return self._in_forward(wrong[0])
        if not any(map(self._is_wrong, self.parameters.values())):
            return []
        return self._in_loss() or self._in_gradients()

    # Numbers.

    def _is_wrong(self, error: float | None) -> bool:
        return error is not None and not error <= self._tolerance

    def _all_errors(self) -> Errors:
        by = self._common_factor() or 1.0
        mine = [self._squares_of(call, self._local.get(call.key), by) for call in self._calls]
        inputs, outputs, gradients = {}, {}, {}
        for call, ranks in zip(self._calls, zip(*self._gather(mine), strict=True), strict=True):
            given = [all_squares([each[0].get(name) for each in ranks]) for name in call.inputs]
            inputs[call.key] = {
                name: None if total is None else total.error() for name, total in zip(call.inputs, given, strict=True)
            }
            outputs[call.key] = all_squares([each[1] for each in ranks])
            gradients[call.key] = all_squares([each[2] for each in ranks])
        floor = self._floor_part * max((each.norm**0.5 for each in gradients.values() if each), default=0.0)
        return Errors(
            inputs,
            {key: total and total.error() for key, total in outputs.items()},
            {key: total and total.error(floor) for key, total in gradients.items()},
        )

    def _squares_of(
        self, call: Call, local: Call | None, by: float
    ) -> tuple[dict[str, Squares | None], Squares | None, Squares | None]:
        if local is None:
            return {}, None, None
        compare, given = self._places.compare, local.inputs
        inputs = {name: compare(whole, given.get(name)) for name, whole in call.inputs.items()}
        outputs = gradients = None
        if len(call.outputs) == len(local.outputs):
            pairs = list(zip(call.outputs, local.outputs, strict=True))
            outputs = all_squares([compare(*pair) for pair in pairs])
            back = zip(call.gradients, local.gradients, strict=True)
            gradients = all_squares([compare(None if whole is None else whole * by, mine) for whole, mine in back])
        return inputs, outputs, gradients

    def _parameter_errors(self) -> dict[str, float]:
        """The largest error of all ranks, by parameter. A missing gradient counts as 0."""
        mine = {}
        for name in sorted(self._one.gradients.keys() | self._many.gradients.keys()):
            gradient, expected = self._pair(name)
            if gradient is not None and expected is not None:
                mine[name] = (
                    squares(gradient, expected).error(self._floor) if gradient.shape == expected.shape else torch.inf
                )
        ranks = self._gather(mine)
        names = [name for name in self._one.gradients if any(name in each for each in ranks)]
        names += sorted({name for each in ranks for name in each} - set(names))
        return {name: max(each.get(name, 0.0) for each in ranks) for name in names}

    def _pair(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradient on ranks and on one process, of which a missing one is 0. (None, None) if both are missing."""
        actual, expected = self._many.gradients.get(name), self._one.gradients.get(name)
        like = actual if actual is not None else expected
        zero = None if like is None else torch.zeros_like(like)
        return (zero if actual is None else actual), (zero if expected is None else expected)

    # The forward.

    def _in_forward(self, first: Call) -> list[str]:
        node, target, at_input = first, first, False
        while any(self._is_wrong(error) for error in self.errors.inputs[node.key].values()):
            if node.parent is None:
                return self._at_inputs(node)
            node, target, at_input = node.parent, node, True
        return [self._cause(node, target, at_input)]

    def _at_inputs(self, root: Call) -> list[str]:
        """Arguments of the model that are not this rank's part."""
        findings = []
        wrong = [name for name, error in self.errors.inputs[root.key].items() if self._is_wrong(error)]
        for name in wrong:
            counts, cuts, held = self._argument(root, name)
            if counts:
                text = (
                    "counts from 0 on each rank, as if each part were a sequence of its own: positions are forgotten. "
                    "Pass layout.positions(rank)"
                )
            elif cuts:
                text = f"layout mismatch: it is cut with {min(cuts)}, and attention ran with another layout ({held})"
            else:
                text = f"it is not this rank's part of what one process is given, by attention's layout ({held})"
            findings.append(f"argument {name!r} of {root}: {text}")
        return findings

    def _argument(self, call: Call, name: str) -> tuple[bool, set[str], str]:
        """Of an input of a call: whether it counts from 0 on every rank; the layouts by which it is cut on every rank;
        and the positions that the ranks hold."""
        local = self._local.get(call.key)
        ranks = self._gather(self._own_argument(call.inputs[name], None if local is None else local.inputs.get(name)))
        cuts = set.intersection(*(set(each[1]) for each in ranks))
        return all(each[0] for each in ranks), cuts, ", ".join(dict.fromkeys(each[2] for each in ranks if each[2]))

    def _own_argument(self, whole: torch.Tensor, local: torch.Tensor | None) -> tuple[bool, list[str], str]:
        part = None if local is None or isinstance(local, DTensor) else self._places.part(whole, local)
        if local is None or part is None or not local.numel():
            return False, [], ""
        counts = False
        dim = local.ndim - 1 if part.dim is None else part.dim
        if not local.is_floating_point() and local.ndim:
            counts = bool((local.movedim(dim, -1) == torch.arange(local.shape[dim], device=local.device)).all())
        if part.dim is None or part.layout is None:
            return counts, [], ""
        cut = []
        for balancer in (contiguous, head_tail, striped):
            rows = balancer(whole.shape[dim], self._ranks).positions(self._places.rank, whole.device)
            if rows.numel() == local.shape[dim] and not squares(local, whole.index_select(dim, rows)).difference:
                cut.append(balancer.__name__)
        return counts, cut, part.layout.describe()

    def _cause(self, node: Call, target: Call, at_input: bool) -> str:
        """Why ``target``'s output (or its input) is wrong, made in ``node``, whose inputs are right."""
        where = f"{node}: what it gives to {target.name}" if at_input else f"{node}: its output"
        local, own = self._local.get(node.key), self._local.get(target.key)
        if any(self._gather(local is None or own is None or self._has_dtensors(local) or self._has_dtensors(own))):
            return f"{where} is wrong, and what can be compared of its inputs is right. The cause is not known"
        assert local is not None
        assert own is not None
        mine = list(own.inputs.values()) if at_input else own.outputs
        if at_input:
            for name in (name for name, error in self.errors.inputs[target.key].items() if self._is_wrong(error)):
                if self._argument(target, name)[0]:
                    return f"{where}, {name!r}, counts from 0 on each rank: positions are forgotten.{_GIVE_POSITIONS}"
        until = target.attended[0] if at_input else node.attended[1]
        until_local = own.attended[0] if at_input else local.attended[1]
        masks = self._one.recording.attentions[node.attended[0] : until]
        ran = self._many.recording.attentions[local.attended[0] : until_local]
        again = partial(self._again, node, target, at_input)
        if text := self._without_documents(node, again, mine):
            return f"{node}: {text}"
        if self._explains(lambda: again(local.args, local.kwargs), mine, whole=False):
            if any(self._gather(len(ran) < len(masks))):
                return (
                    f"{node}: its attention ran on each rank's part alone. No style of the plan covers the call, or it "
                    "is an attention that the style does not know: add the module to the plan"
                )
            if not any(self._gather(bool(ran))):
                return self._of_part(node, where, local, own, at_input, again, own_code=False)
        for text, change in self._other_masks(masks, ran):
            if self._explains(lambda change=change: again(node.args, node.kwargs, change=change), mine):
                return f"{node}: {text}"
        inside = [call for call in self._calls if call.parent is node]
        if inside and any(self._gather(bool(ran))):
            outputs = {call.key: self._local[call.key].output for call in inside if call.key in self._local}
            if self._explains(lambda: again(local.args, local.kwargs, outputs=outputs), mine, whole=False):
                return self._of_part(node, where, local, own, at_input, again, own_code=True)
        if other := self._other_layout(node, local, ran):
            return f"{node}: {other}"
        positions = self._wrong_positions(target, own, at_input)
        return f"{where} is wrong at {positions}, and its inputs are right. The cause is not known"

    def _of_part(
        self,
        node: Call,
        where: str,
        local: Call,
        own: Call,
        at_input: bool,
        again: Callable[..., list[torch.Tensor]],
        *,
        own_code: bool,
    ) -> str:
        """The cause if each rank's result is that of its part alone, as if it were a whole sequence.

        With ``own_code``, the modules in ``node`` are right, and it is the node's code between them that is run.
        """
        inside = {call.key: call for call in self._calls if own_code and call.parent is node}
        wholes = node.args, node.kwargs, {key: call.output for key, call in inside.items()}
        parts = local.args, local.kwargs, {key: self._local[key].output for key in inside}
        expected = next(call for call in self._calls if call.key == own.key)
        right, mine = (list(each.inputs.values()) if at_input else each.outputs for each in (expected, own))

        def run(change: Callable[[torch.Tensor, ExpectedPart], torch.Tensor]) -> list[torch.Tensor]:
            args, kwargs, outputs = self._changed(wholes, parts, change)
            return again(args, kwargs, outputs=outputs if own_code else None)

        mixes = self._holds(lambda: self._differs_here(run(self._others_changed), right, mine), every=False)
        if mixes:
            code = ", in its own code between the modules" if own_code else ""
            return (
                f"{node}: it carries values from token to token{code}, and no attention that a style takes over does "
                "that (a recurrence, a convolution along the sequence, a norm over tokens, attention in plain "
                f"operations): each rank's ends at its own part. {self._lost(right, mine)}"
                f"{see('A layer that mixes tokens')}"
            )
        if self._holds(lambda: self._is_first(run(self._own_first), mine)):
            return f"{where} on each rank is that of the first positions: positions are forgotten.{_GIVE_POSITIONS}"
        return (
            f"{where} on each rank is that for its part alone, as if that were the whole sequence. Why it is another "
            "one with all tokens is not known"
        )

    def _lost(self, right: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> str:
        """How many tokens at the beginning of each part are wrong, and the function that passes on what they miss."""
        reach = shortest = 0
        part = self._places.part(right[0], mine[0]) if right and mine else None
        first_is_wrong = part is None or part.dim is None or part.layout is None
        if part is not None and part.dim is not None and part.layout is not None:
            rows = zip(mine[0].unbind(part.dim), part.expected.unbind(part.dim), strict=True)
            wrong, row = [not self._equal(*pair) for pair in rows], 0
            for start, stop in part.layout.chunks[self._places.rank]:
                here, row = wrong[row : row + stop - start], row + stop - start
                first_is_wrong |= start == 0 and any(here)
                reach = max([reach, *(at + 1 for at, each in enumerate(here) if each)])
                shortest = max(shortest, stop - start)
        ranks = self._gather((first_is_wrong, reach, shortest))
        reach = max(each[1] for each in ranks)
        if any(each[0] for each in ranks):  # of what is before the first token, nothing is missing
            return "Such a layer is not context parallel: keep it out of the model"
        if all(reach < each[2] for each in ranks if each[2]):
            return (
                f"Only the first {reach} tokens of a part are wrong: the rows before it are missing, as in a "
                f"convolution of {reach + 1} taps. Call it by context_causal_conv1d(conv, x, mesh, width={reach + 1}) "
                "of cp_styles.mixers"
            )
        return (
            "The first part is right: the state is not passed on. Call the kernel of a recurrence by "
            "context_recurrence(kernel, mesh) of cp_styles.mixers, and scaled_dot_product_attention for attention"
        )

    def _without_documents(
        self, node: Call, again: Callable[..., list[torch.Tensor]], mine: Sequence[torch.Tensor]
    ) -> str | None:
        """Whether the ranks have not used the arguments of ``node`` that say where documents begin."""
        given = dict(zip(node.names, node.args, strict=False)) | dict(node.kwargs)
        names = [name for name in _DOCUMENTS if isinstance(given.get(name), torch.Tensor)]
        args = [None if name in names else x for name, x in zip(node.names, node.args, strict=False)]
        args = (*args, *node.args[len(args) :])
        kwargs = {name: None if name in names else x for name, x in node.kwargs.items()}
        if not names or not self._explains(lambda: again(args, kwargs), mine):
            return None
        return (
            f"documents are not kept apart: the ranks got its output without {', '.join(names)}, so a state goes on "
            "from one document to the next. Give context_recurrence or context_causal_conv1d the documents of the "
            "whole sequence (documents=), or open a SequenceScope(layout, mask=Documents(...))"
        )

    def _changed(self, wholes: Any, parts: Any, change: Callable[[torch.Tensor, ExpectedPart], torch.Tensor]) -> Any:
        """``wholes``, with the tensors changed of which the ranks hold parts."""
        local = iter(tree_leaves(parts))

        def one(whole: Any) -> Any:
            mine = next(local)
            if not isinstance(whole, torch.Tensor) or not isinstance(mine, torch.Tensor):
                return whole
            part = self._places.part(whole, mine)
            return whole if part is None or part.layout is None else change(whole, part)

        if len(tree_leaves(wholes)) != len(tree_leaves(parts)):
            raise ValueError("the ranks have other arguments")
        return tree_map(one, wholes)

    @staticmethod
    def _others_changed(whole: torch.Tensor, part: ExpectedPart) -> torch.Tensor:
        """Other values where other ranks have their tokens."""
        others = torch.ones(whole.numel(), dtype=torch.bool, device=whole.device)
        others[part.take(torch.arange(whole.numel(), device=whole.device).view(whole.shape)).flatten()] = False
        flat = whole.flatten().clone()
        if flat.is_floating_point():
            flat[others] = flat[others].flip(0) * 1.5 + flat[others].abs().mean()
        else:
            flat[others] = flat[others].roll(1)
        return flat.view(whole.shape)

    def _own_first(self, whole: torch.Tensor, part: ExpectedPart) -> torch.Tensor:
        """This rank's tokens before all others."""
        if part.dim is None or part.layout is None:
            raise ValueError("tokens are flattened with the batch")
        own = part.layout.positions(self._places.rank, whole.device)
        others = torch.ones(part.layout.length, dtype=torch.bool, device=whole.device).index_fill(0, own, False)
        return whole.index_select(part.dim, torch.cat((own, others.nonzero().flatten())))

    def _differs_here(
        self, results: Sequence[torch.Tensor], right: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]
    ) -> bool:
        """Whether a result is another one than ``right`` at this rank's tokens."""
        for other, whole, local in zip(results, right, mine, strict=True):
            part = self._places.part(whole, local)
            if part is not None and part.layout is not None and not self._equal(part.take(other), part.expected):
                return True
        return False

    def _is_first(self, results: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> bool:
        """Whether the first rows of a result are this rank's."""
        compared = False
        for whole, local in zip(results, mine, strict=True):
            part = self._places.part(whole, local)
            if part is not None and part.layout is not None:
                if part.dim is None or not self._equal(whole.narrow(part.dim, 0, local.shape[part.dim]), local):
                    return False
                compared = True
        return compared

    def _equal(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        return actual.shape == expected.shape and squares(actual, expected).error() <= self._tolerance

    def _holds(self, ask: Callable[[], bool], *, every: bool = True) -> bool:
        """Whether it holds on every rank, or on any. It does not where a module cannot be run so."""
        try:
            answer = ask()
        except Exception:  # of a module that cannot be run by itself, or with other values
            answer = False
        return (all if every else any)(self._gather(answer))

    def _other_masks(self, masks: Sequence[AttentionMask | None], ran: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Possible mistakes in masks: a text, and the change to calls on one process that makes the same mistake."""
        seen = [mask for mask in masks if mask is not None]
        masked = next((mask.attn_mask for mask in seen if mask.attn_mask is not None), None)
        if masked is not None:
            what, remedy = _describe(masked)
            text = f"{what} is dropped: the ranks got attention without it. {remedy}"
            yield text, lambda given: given | {"attn_mask": None}
            yield text, lambda given: given | {"attn_mask": None, "is_causal": True}
        elif any(mask.is_causal for mask in seen):
            text = "the causal mask is dropped: give the style mask=Causal(), or the call is_causal=True"
            yield text, lambda given: given | {"is_causal": False}
        others = list(dict.fromkeys(each.mask for each in ran))
        if len(others) == 1 and not (others[0].has_bias or others[0].grids or isinstance(others[0], PerRow)):
            mask = others[0]

            def change(given: dict[str, Any]) -> dict[str, Any]:
                query, key = (
                    torch.arange(given[name].shape[-2], device=given[name].device) for name in ("query", "key")
                )
                return given | {"attn_mask": mask.allowed(query, key), "is_causal": False}

            yield (
                f"on the ranks its attention has the mask {mask!r}, and on one process, where no style applies, "
                "another one. If that of the plan is meant, let reference= be a model that makes it itself; otherwise "
                "take it out of the plan",
                change,
            )

    def _other_layout(self, node: Call, local: Call, ran: Sequence[Any]) -> str | None:
        """Whether the inputs are cut with one layout, and the attention ran with another one."""
        cut = set()
        for name, whole in node.inputs.items():
            mine = local.inputs.get(name)
            part = None if mine is None else self._places.part(whole, mine)
            if part is not None and part.layout is not None:
                cut.add(part.layout)
        attended = {each.layouts[0] for each in ran}
        facts = self._gather(len(cut) == len(attended) == 1 and cut != attended)
        if not all(facts):
            return None
        (given,), (used,) = cut, attended
        return (
            f"layout mismatch: its inputs are cut with {given.describe()}, and its attention ran with "
            f"{used.describe()}. Give all styles the layout with which the step cuts"
        )

    def _explains(
        self, run: Callable[[], list[torch.Tensor]], mine: Sequence[torch.Tensor], *, whole: bool = True
    ) -> bool:
        """Whether on every rank ``run`` gives ``mine``; or that as its part, if it gives the ``whole``."""

        def ask() -> bool:
            pairs = list(zip(run(), mine, strict=True))
            errors = [
                self._places.compare(a, b) if whole else squares(a, b) if a.shape == b.shape else None for a, b in pairs
            ]
            total = all_squares(errors)
            return total is not None and total.error() <= self._tolerance and (whole or None not in errors)

        return self._holds(ask)

    def _again(
        self,
        node: Call,
        target: Call,
        at_input: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        outputs: Mapping[Key, Any] | None = None,
    ) -> list[torch.Tensor]:
        """The outputs of ``target``, or its inputs, in another run of ``node``.

        ``change`` changes the arguments of attention calls. With ``outputs``, the modules in ``node`` do not run, and
        return these.
        """
        inside = [call for call in self._calls if call.name == target.name and call.within(node)]
        inputs: list[list[torch.Tensor]] = []
        module, watched = self._modules[node.name], self._modules[target.name]

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = Call(target.key, target.kind, None, args, kwargs, target.names, (0, 0)).inputs
            inputs.append(list(given.values()))

        handle = watched.register_forward_pre_hook(note, with_kwargs=True) if at_input else None
        replaced = self._replace_forwards(node, outputs or {})
        try:
            with torch.no_grad(), AttentionsSeen(), nullcontext() if change is None else OtherMasks(change):
                output = module(*args, **kwargs)
        finally:
            for each in replaced:
                del each.forward
            if handle is not None:
                handle.remove()
        if at_input:
            return inputs[[call.key for call in inside].index(target.key)]
        return tensors_in(output)

    def _replace_forwards(self, node: Call, outputs: Mapping[Key, Any]) -> list[nn.Module]:
        """Let the modules that ``node`` calls return ``outputs``, one after the other. The modules."""
        returned = {}
        for call in self._calls:
            if call.parent is node and call.key in outputs:
                returned.setdefault(call.name, []).append(outputs[call.key])
        for name, values in returned.items():
            following = iter(values)
            self._modules[name].forward = lambda *args, _following=following, **kwargs: next(_following)
        return [self._modules[name] for name in returned]

    def _wrong_positions(self, target: Call, local: Call, at_input: bool) -> str:
        """Which positions of ``target``'s first output (or input) are wrong on any rank."""
        wholes = list(target.inputs.values()) if at_input else target.outputs
        mine = list(local.inputs.values()) if at_input else local.outputs
        wrong: set[int] = set()
        if wholes and mine and not isinstance(mine[0], DTensor):
            part = self._places.part(wholes[0], mine[0])
            if part is not None and part.dim is not None and part.layout is not None:
                positions = part.layout.positions(self._places.rank, "cpu").tolist()
                rows = zip(mine[0].unbind(part.dim), part.expected.unbind(part.dim), positions, strict=True)
                wrong = {at for row, expected, at in rows if self._is_wrong(squares(row, expected).error())}
        return _positions(self._gather(wrong))

    @staticmethod
    def _has_dtensors(call: Call) -> bool:
        return any(isinstance(x, DTensor) for x in (*call.inputs.values(), *call.outputs))

    # The loss, and what the backward makes of it.

    def _loss_gradient(self) -> _LossGradient | None:
        """The gradient of the model's output, against that of one process. None if it cannot be compared."""
        root = self._calls[-1] if self._calls else None  # parents end after their children
        local = None if root is None else self._local.get(root.key)
        if root is None or local is None:
            return None
        pairs = zip(root.gradients, local.gradients, local.outputs, strict=False)
        whole, mine, output = next(((a, b, c) for a, b, c in pairs if a is not None), (None, None, None))
        if whole is None or mine is None or output is None or isinstance(mine, DTensor):
            return None
        part = self._places.part(whole, mine)
        if part is None or part.dim is None or part.layout is None:
            return None
        positions = part.layout.positions(self._places.rank, whole.device)
        gradient, expected = (x.double().movedim(part.dim, 0).flatten(1) for x in (mine, part.expected))
        last = torch.ones_like(positions, dtype=torch.bool)
        last[:-1] = positions.diff() != 1
        labelled = (expected != 0).any(1)
        inner = ~last & labelled
        by = factor(gradient[inner], expected[inner]) if bool(inner.any()) else factor(gradient, expected)
        error = gradient - by * expected
        scale = self._tolerance * max(float((by * expected).norm()), 1e-300)
        wrong = ~(error.norm(dim=1) <= scale / max(len(error), 1) ** 0.5)
        right = bool((error.norm() <= scale).item())
        of_label = (
            self._differ_as_labels(gradient, by * expected, mine.shape[-1]) if part.dim < whole.ndim - 1 else False
        )
        return _LossGradient(
            by,
            right,
            () if right else tuple(positions[wrong].tolist()),
            bool(inner.any()) and not bool((wrong & ~last).any()),
            of_label,
            int(labelled.sum()),
        )

    @staticmethod
    def _differ_as_labels(gradient: torch.Tensor, expected: torch.Tensor, classes: int) -> bool:
        """Whether gradients of logits differ as those of a cross entropy with other labels, or with none.

        With another label, two entries of a row differ: one class less, another more.
        """
        gradient, expected = (x.reshape(-1, classes) for x in (gradient, expected))
        error = gradient - expected
        other = (error.abs() > 1e-6 * expected.abs().amax().clamp(min=1e-300)).sum(1) <= 2
        none = ~(gradient != 0).any(1) | ~(expected != 0).any(1)
        return bool((other | none).all())

    def _common_factor(self) -> float | None:
        """The factor of the loss's gradient on all ranks, such as ``averaged_over`` of global_loss. None if there is no
        such factor, or it is not known."""
        scaled = [each for each in self._of_loss if each is not None and each.right]
        if len(scaled) < len(self._of_loss):
            return None
        factors = [each.by for each in scaled]
        common = max(factors) - min(factors) <= self._tolerance * max(map(abs, factors))
        return factors[0] if common and factors[0] else None

    def _in_loss(self) -> list[str]:
        """Findings about the loss: the model's output is right, and its gradient is wrong."""
        root, ranks = self._calls[-1], self._of_loss
        parts = [each for each in ranks if each is not None]
        if len(parts) < len(ranks) or self._common_factor() is not None:
            return []
        wrong = [each for each in parts if not each.right]
        if wrong and all(each.at_ends and each.like_labels for each in wrong):
            return [
                f"the loss: what {root} returned is right, and its gradient is wrong where a rank's tokens are not "
                "followed by their next one. Labels were rolled after the cut: make them for the whole sequence "
                "(next_token_labels), then cut them as the tokens"
            ]
        if wrong:
            return [
                f"the loss: what {root} returned is right, and its gradient is not, at "
                f"{_positions([set(each.wrong) for each in parts])}: labels, weights or the loss itself are not those "
                "of this rank's tokens"
            ]
        factors = [each.by for each in parts]
        shown = ", ".join(f"{each:.4g}" for each in factors)
        text = f"the loss: its gradient is {shown} times that of one process on the ranks, in turn: "
        counts = [each.by * each.tokens for each in parts]
        if max(counts) - min(counts) <= self._tolerance * max(map(abs, counts)):
            text += "each rank has divided by the number of its own tokens. "
        else:
            text += "the ranks' losses are not parts of one mean. "
        return [
            text + "Divide the sum by the tokens of all: global_loss(losses, global_token_count(labels, mesh), mesh)"
        ]

    def _in_gradients(self) -> list[str]:
        kinds: dict[str, list[str]] = {}
        for name in self.parameters:
            kinds.setdefault(self._kind_of(name), []).append(name)
        wrong = {kind: names for kind, names in kinds.items() if kind != "right"}
        findings = []
        for kind, names in wrong.items():
            what = f"the gradients of {len(names)} of {len(self.parameters)} parameters ({some(names)})"
            if kind == "share":
                partly = "right" in kinds
                findings.append(
                    f"gradients are {'partly reduced' if partly else 'unreduced'}: {what} are each rank's own share, "
                    "and were not summed over the ranks of the sequence. Call sum_gradients(model, mesh) with all "
                    "parameters after the backward, or use FSDP2 or DDP over this axis"
                )
            elif kind == "not finite":
                findings.append(
                    f"{what} are not finite on the ranks{self._first_wrong_gradient()}. The cause is not known"
                )
            elif kind.startswith("times") and not self._first_wrong_gradient():
                by = float(kind.split()[1])
                findings.append(f"{what} are {by:.4g} times those of one process: {self._why_times(by)}")
            else:
                findings.append(f"{what} are wrong{self._first_wrong_gradient()}. The cause is not known")
        return findings

    def _why_times(self, by: float) -> str:
        of_loss, ranks = self._common_factor(), self._ranks
        if of_loss is None:
            return "the loss, or the reduction of gradients, has another factor than on one process"

        def near(number: float, other: float) -> bool:
            return abs(number - other) < 1e-3 * abs(other)

        if near(of_loss, 1) and near(by, ranks):
            return "they are reduced twice over the sequence's ranks. Reduce each gradient once"
        if near(of_loss, 1) and near(by, 1 / ranks):
            return "they are averaged over the sequence's ranks. Give global_loss averaged_over=, or sum them"
        if near(by, of_loss):
            return (
                f"the gradient of the loss is {of_loss:.4g} times that of one process on each rank, and the reduction "
                "adds the ranks' shares. A mean over this rank's tokens alone does that, and global_loss with "
                "averaged_over= where no reducer averages"
            )
        return (
            f"that of the loss is {of_loss:.4g} times that of one process, and what follows the backward does the rest"
        )

    def _kind_of(self, name: str) -> str:
        """right, share, times FACTOR, not finite or wrong; the same on every rank. Communication: a sum over ranks."""
        share, expected = self._pair(name)
        if not all(self._gather(share is not None and expected is not None and share.shape == expected.shape)):
            return "wrong"
        assert share is not None
        assert expected is not None
        total = self._over_sequence(share)

        def near(a: torch.Tensor, b: torch.Tensor) -> bool:
            return squares(a, b).error(self._floor) <= self._tolerance

        by = factor(share, expected)
        ranks = self._gather(
            (
                near(share, expected),
                near(total, expected),
                near(share, by * expected),
                by,
                bool(share.isfinite().all()),
            )
        )
        if all(each[0] for each in ranks):
            return "right"
        if not all(each[4] for each in ranks):
            return "not finite"
        factors = [each[3] for each in ranks]
        if all(each[2] for each in ranks) and max(factors) - min(factors) < 1e-3 and abs(by) > 1e-3:
            return f"times {factors[0]:.3f}"
        if all(each[1] for each in ranks):
            return "share"
        return "wrong"

    def _first_wrong_gradient(self) -> str:
        """Words for the first wrong gradient in the order of the backward; empty if there is none."""
        wrong = [call for call in reversed(self._calls) if self._is_wrong(self.errors.gradients[call.key])]
        inner = [call for call in wrong if not any(other.within(call) for other in wrong)]
        return f": the first wrong gradient of a backward is that of {inner[0]}'s output" if inner else ""


_DOCUMENTS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx", "documents")
_GIVE_POSITIONS = " It counts this rank's tokens from 0. Give the model positions, layout.positions(rank)"


def some(names: Sequence[str]) -> str:
    """The first of them."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _positions(ranks: Sequence[set[int]]) -> str:
    everywhere = sorted(set().union(*ranks))
    if not everywhere:
        return "some places"
    shown = ", ".join(map(str, everywhere[:8])) + (", ..." if len(everywhere) > 8 else "")
    return f"{len(everywhere)} positions ({shown})"


def _describe(mask: torch.Tensor) -> tuple[str, str]:
    """A text for what an attn_mask hides, and the remedy for the ranks."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    shape = tuple(mask.shape)
    if allowed.ndim >= 2 and allowed.shape[-1] == allowed.shape[-2]:
        positions = torch.arange(allowed.shape[-1], device=allowed.device)
        behind = positions[:, None] - positions[None, :]
        seen = behind.expand(allowed.shape)[allowed]
        if seen.numel():
            low, high = int(seen.min()), int(seen.max())
            band = (behind >= low) & (behind <= high)
            if bool((allowed == band).all()) and high < allowed.shape[-1] - 1:
                after = "" if low == 0 else f", {-low}"
                return (
                    f"a sliding window of {high + 1} positions",
                    f"Give the style mask=SlidingWindow({high}{after})",
                )
    return (
        f"a mask (attn_mask of shape {shape}, which hides {1 - float(allowed.double().mean()):.0%})",
        "Pass attn_mask of the whole sequence on every rank, give the style a mask, or open a SequenceScope(layout, "
        "mask=Documents(...))",
    )
