"""Why a step differs from that of one process: finds the first difference, and tests possible causes.

A cause is not guessed from numbers alone. The module in question is run once more, on one process, with the suspected
mistake: on this rank's rows alone, or without its mask. If the result is that of the rank, the mistake is the cause.
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

from cp_styles.layout import contiguous, head_tail, striped
from cp_styles.styles.guards import mixes
from cp_styles.troubleshooting import see
from cp_styles.verify.compare import ExpectedPart, Places, Squares, all_squares, factor, squares
from cp_styles.verify.record import AttentionMask, Call, Key, OtherMasks, Recording, plain_name, tensors_of

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks of the mesh, by rank. Communication: one all-gather of objects for each axis."""

# A gradient may be 0 up to rounding (that of a key's bias). So errors are relative to at least this part of the largest
# gradient.
FLOOR = 1e-2


@dataclass(frozen=True)
class StepResult:
    """The results of a step. ``gradients`` by parameter, whole; None for parameters without a gradient."""

    recording: Recording
    gradients: Mapping[str, torch.Tensor | None]
    loss: torch.Tensor | None


@dataclass(frozen=True)
class Errors:
    """Errors by call, over all ranks. None where nothing can be compared."""

    inputs: Mapping[Key, Mapping[str, float | None]]
    outputs: Mapping[Key, float | None]
    gradients: Mapping[Key, float | None]


class Comparison:
    """Compares ``many``, a step on the ranks, with ``one``, the same step on one process.

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
        norms = (float(x.double().norm()) for x in one.gradients.values() if x is not None)
        self._floor = FLOOR * max(norms, default=0.0)
        self.errors = self._all_errors()
        self.parameters = self._parameter_errors()

    def findings(self) -> list[str]:
        """What is wrong: the first thing in the order of a step."""
        wrong = [call for call in self._calls if self._is_wrong(self.errors.outputs[call.key])]
        if wrong:
            return self._of_forward(wrong[0])
        if not any(error > self._tolerance for error in self.parameters.values()):
            return []
        return self._of_loss() or self._of_gradients()

    # Numbers.

    def _is_wrong(self, error: float | None) -> bool:
        return error is not None and not error <= self._tolerance

    def _all_errors(self) -> Errors:
        by = self._common_factor()
        mine = [self._squares_of(call, self._local.get(call.key), by) for call in self._calls]
        inputs, outputs, gradients = {}, {}, {}
        for call, ranks in zip(self._calls, zip(*self._gather(mine), strict=True), strict=True):
            given = [all_squares([each[0].get(name) for each in ranks]) for name in call.inputs]
            inputs[call.key] = {
                name: None if found is None else found.error() for name, found in zip(call.inputs, given, strict=True)
            }
            outputs[call.key] = all_squares([each[1] for each in ranks])
            gradients[call.key] = all_squares([each[2] for each in ranks])
        floor = FLOOR * max((each.norm**0.5 for each in gradients.values() if each), default=0.0)
        return Errors(
            inputs,
            {key: found and found.error() for key, found in outputs.items()},
            {key: found and found.error(floor) for key, found in gradients.items()},
        )

    def _common_factor(self) -> float:
        """The factor of all gradients on ranks, such as ``averaged_over`` of global_loss; 1 if they differ."""
        verdicts = self._gather(self._verdict())
        factors = [each[2] for each in verdicts if each is not None and each[0] and each[1]]
        common = len(factors) == len(verdicts) and max(factors) - min(factors) <= self._tolerance * abs(factors[0])
        return factors[0] if common and factors[0] else 1.0

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
        for name, expected in self._one.gradients.items():
            found = self._many.gradients.get(name)
            if expected is not None or found is not None:
                mine[name] = self._squares(found, expected).error(self._floor)
        ranks = self._gather(mine)
        return {name: max(each.get(name, 0.0) for each in ranks) for name in mine}

    @staticmethod
    def _squares(found: torch.Tensor | None, expected: torch.Tensor | None) -> Squares:
        like = found if found is not None else expected
        assert like is not None
        zero = torch.zeros_like(like)
        return squares(zero if found is None else found, zero if expected is None else expected)

    # The forward.

    def _of_forward(self, first: Call) -> list[str]:
        node, target, at_input = first, first, False
        while any(self._is_wrong(error) for error in self.errors.inputs[node.key].values()):
            if node.parent is None:
                return self._of_inputs(node)
            node, target, at_input = node.parent, node, True
        return [self._cause(node, target, at_input)]

    def _of_inputs(self, root: Call) -> list[str]:
        """Arguments of the model that are not this rank's part."""
        local, found = self._local[root.key].inputs, []
        wrong = [name for name, error in self.errors.inputs[root.key].items() if self._is_wrong(error)]
        for name in wrong:
            mine = self._argument(root.inputs[name], local.get(name))
            facts = self._gather(mine)
            held = ", ".join(dict.fromkeys(str(fact[2]) for fact in facts))
            if all(fact[0] for fact in facts):
                text = (
                    "counts from 0 on each rank, as if each part were a sequence of its own: positions are forgotten. "
                    "Pass layout.positions(rank)"
                )
            elif cuts := set.intersection(*(set(fact[1]) for fact in facts)):
                text = f"layout mismatch: it is cut with {min(cuts)}, and attention ran with another layout ({held})"
            else:
                text = f"it is not this rank's part of what one process is given, by attention's layout ({held})"
            found.append(f"argument {name!r} of {root}: {text}")
        return found

    def _argument(self, whole: torch.Tensor, local: torch.Tensor | None) -> tuple[bool, list[str], str]:
        """Whether it counts from 0; layouts that it is cut with; and the positions that attention has."""
        if local is None:
            return False, [], ""
        counts = False
        part = self._places.part(whole, local)
        if part is not None and not local.is_floating_point() and local.numel():
            dim = local.ndim - 1 if part.dim is None else part.dim
            counts = bool((local.movedim(dim, -1) == torch.arange(local.shape[dim], device=local.device)).all())
        length, cut = None if part is None or part.dim is None else whole.shape[part.dim], []
        for balancer in (contiguous, head_tail, striped):
            if length is not None and part is not None and part.dim is not None:
                positions = balancer(length, self._ranks).positions(self._places.rank, whole.device)
                if (
                    positions.numel() == local.shape[part.dim]
                    and not squares(local, whole.index_select(part.dim, positions)).difference
                ):
                    cut.append(balancer.__name__)
        held = "" if length is None else self._places.layouts[length].describe()
        return counts, cut, held

    def _cause(self, node: Call, target: Call, at_input: bool) -> str:
        """Why ``target``'s output (or its input) is wrong, made in ``node``, whose inputs are right."""
        where = f"{node}: what it gives to {target.name}" if at_input else f"{node}: its output"
        local = self._local.get(node.key)
        if local is None or self._has_dtensors(local):
            return f"{where} is wrong, and its inputs are right"
        mine = list(self._local[target.key].inputs.values()) if at_input else self._local[target.key].outputs

        def alone(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            return self._again(node, target, at_input, args, kwargs, None)

        if self._explains(partial(alone, *local.args, **local.kwargs), mine, whole=False):
            return self._of_module_alone(node, target, at_input, alone, local)
        masks = self._one.recording.masks[slice(*node.attended)]
        for said, is_causal in self._other_masks(masks):
            if self._explains(partial(self._again, node, target, at_input, node.args, node.kwargs, is_causal), mine):
                return f"{node}: {said}"
        return f"{where} is wrong at {self._wrong_positions(target, at_input)}, and its inputs are right"

    def _of_module_alone(self, node: Call, target: Call, at_input: bool, alone: Callable[..., Any], local: Call) -> str:
        until = target.attended[0] if at_input else node.attended[1]
        if until > node.attended[0]:
            return (
                f"{node}: its attention ran on each rank's part alone. No style of the plan covers the call, or it is "
                "an attention that the style does not know: add the module to the plan"
            )
        rows = {layout.lengths[self._places.rank] for layout in self._places.layouts.values()}
        length = next(iter(rows)) if len(rows) == 1 else None
        found = mixes(alone, local.args, local.kwargs, length)
        if any(self._gather(bool(found))):
            return (
                f"{node}: it carries values from token to token without an attention call (a recurrence, a "
                "convolution along the sequence, a norm over tokens), and each rank's ends at its own part. Such a "
                f"layer is not context parallel: keep it out of the model{see('A layer that mixes tokens')}"
            )
        return (
            f"{node}: its output on each rank is that of the first positions: positions are forgotten. It counts this "
            "rank's tokens from 0. Give the model positions, layout.positions(rank)"
        )

    def _other_masks(self, masks: Sequence[AttentionMask | None]) -> Iterator[tuple[str, Callable[[bool], bool]]]:
        known = [mask for mask in masks if mask is not None]
        masked = next((mask.attn_mask for mask in known if mask.attn_mask is not None), None)
        if masked is not None:
            what, remedy = _describe(masked)
            said = f"{what} is dropped: the ranks got attention without it. {remedy}"
            yield said, lambda is_causal: is_causal
            yield said, lambda is_causal: True
        elif any(mask.is_causal for mask in known):
            yield (
                "the causal mask is dropped: give the style mask=Causal(), or the call is_causal=True",
                lambda _: False,
            )

    def _explains(
        self, run: Callable[[], list[torch.Tensor]], mine: Sequence[torch.Tensor], *, whole: bool = True
    ) -> bool:
        """Whether on every rank ``run`` gives ``mine``; or that as its part, if it gives the ``whole``."""
        try:
            found = run()
            pairs = list(zip(found, mine, strict=True))
            if whole:
                errors = [self._places.compare(*pair) for pair in pairs]
            else:
                errors = [squares(a, b) if a.shape == b.shape else None for a, b in pairs]
            total = all_squares(errors)
            holds = total is not None and total.error() <= self._tolerance
        except Exception:  # of a module that cannot be run by itself
            holds = False
        return all(self._gather(holds))

    def _again(
        self,
        node: Call,
        target: Call,
        at_input: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_causal: Callable[[bool], bool] | None,
    ) -> list[torch.Tensor]:
        """What ``target`` returns, or is given, in another run of ``node``; with the graph, where grad is enabled."""
        inside = [call.key for call in self._calls if call.name == target.name and call.within(node)]
        found: list[list[torch.Tensor]] = []
        module, watched = self._modules[node.name], self._modules[target.name]
        if at_input:

            def note(module: nn.Module, args: Any, kwargs: Any) -> None:
                given = Call(target.key, target.kind, None, args, kwargs, target.names, (0, 0)).inputs
                found.append(list(given.values()))

            handle = watched.register_forward_pre_hook(note, with_kwargs=True)
        else:
            handle = None
        try:
            with nullcontext() if is_causal is None else OtherMasks(is_causal):
                output = module(*args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
        if at_input:
            return found[inside.index(target.key)]
        return tensors_of(output)

    def _wrong_positions(self, target: Call, at_input: bool) -> str:
        """Which positions of ``target``'s first output (or input) are wrong on any rank."""
        local = self._local[target.key]
        wholes = list(target.inputs.values()) if at_input else target.outputs
        mine = list(local.inputs.values()) if at_input else local.outputs
        wrong: set[int] = set()
        if wholes and mine and not isinstance(mine[0], DTensor):
            part = self._places.part(wholes[0], mine[0])
            if part is not None and part.dim is not None:
                positions = self._places.layouts[wholes[0].shape[part.dim]].positions(self._places.rank).tolist()
                rows = zip(mine[0].unbind(part.dim), part.expected.unbind(part.dim), positions, strict=True)
                wrong = {at for row, expected, at in rows if squares(row, expected).error() > self._tolerance}
        everywhere = sorted(set().union(*self._gather(wrong)))
        if not everywhere:
            return "some places"
        shown = ", ".join(map(str, everywhere[:8])) + (", ..." if len(everywhere) > 8 else "")
        return f"{len(everywhere)} positions ({shown})"

    @staticmethod
    def _has_dtensors(call: Call) -> bool:
        return any(isinstance(x, DTensor) for x in (*call.inputs.values(), *call.outputs))

    # The loss, and what the backward makes of it.

    def _of_loss(self) -> list[str]:
        """For a correct output of the model: what is wrong in its gradient, which comes from the loss."""
        root, verdicts = self._calls[-1], self._gather(self._verdict())
        if any(each is None for each in verdicts):
            return []
        inner_is_right = all(each[0] for each in verdicts)
        factors = [each[2] for each in verdicts]
        if inner_is_right and any(not each[1] for each in verdicts):
            return [
                f"the loss: what {root} returned is right, and its gradient is wrong where a rank's tokens are not "
                "followed by their next one. Labels were rolled after the cut: make them for the whole sequence "
                "(next_token_labels), then cut them as the tokens"
            ]
        if not inner_is_right:
            return [
                f"the loss: what {root} returned is right, and its gradient is not: labels, weights or the loss "
                "itself are not those of this rank's tokens"
            ]
        if max(factors) - min(factors) > self._tolerance * max(map(abs, factors)):
            shown = ", ".join(f"{each:.4g}" for each in factors)
            return [
                f"the loss: its gradient is {shown} times that of one process on the ranks, in turn: each rank has "
                "divided by the number of its own tokens. Divide the sum by the tokens of all: global_loss(losses, "
                "global_token_count(labels, mesh), mesh)"
            ]
        return []

    def _verdict(self) -> tuple[bool, bool, float] | None:
        """Whether the gradient of the model's output is right up to a factor, inside runs of consecutive positions and
        at their ends; and the factor. None if it cannot be compared."""
        root = self._calls[-1]  # parents end after their children
        local = self._local.get(root.key)
        if local is None:
            return None
        pairs = zip(root.gradients, local.gradients, strict=False)
        whole, mine = next(((a, b) for a, b in pairs if a is not None), (None, None))
        if whole is None or mine is None or isinstance(mine, DTensor):
            return None
        part = self._places.part(whole, mine)
        if part is None or part.dim is None:
            return None
        layout = self._places.layouts[whole.shape[part.dim]]
        positions = layout.positions(self._places.rank, whole.device)
        last = torch.ones_like(positions, dtype=torch.bool)
        last[:-1] = positions.diff() != 1
        of_inner, of_last = ((_select(mine, part, rows), _select(part.expected, part, rows)) for rows in (~last, last))
        by = factor(*of_inner)
        norm = max(float((by * part.expected.double()).norm()), 1e-300)
        right = [
            float((found.double() - by * expected.double()).norm()) <= self._tolerance * norm
            for found, expected in (of_inner, of_last)
        ]
        return right[0], right[1], by

    def _of_gradients(self) -> list[str]:
        kinds: dict[str, list[str]] = {}
        for name in self.parameters:
            kinds.setdefault(self._kind_of(name), []).append(name)
        wrong = {kind: names for kind, names in kinds.items() if kind != "right"}
        found = []
        for kind, names in wrong.items():
            what = f"the gradients of {len(names)} of {len(self.parameters)} parameters ({_some(names)})"
            if kind == "share":
                partly = "right" in kinds
                found.append(
                    f"gradients are {'partly reduced' if partly else 'unreduced'}: {what} are each rank's own share, "
                    "and were not summed over the ranks of the sequence. Call sum_gradients(model, mesh) with all "
                    "parameters after the backward, or use FSDP2 or DDP over this axis"
                )
            elif kind.startswith("times"):
                by = float(kind.split()[1])
                found.append(f"{what} are {by:.4g} times those of one process: {self._why_times(by)}")
            else:
                found.append(f"{what} are wrong{self._first_wrong_gradient()}")
        return found

    def _why_times(self, by: float) -> str:
        if abs(by - self._ranks) < 1e-3 * self._ranks:
            return (
                "they are reduced twice over the sequence's ranks (or summed once by a reducer that averages nothing "
                "after a loss with averaged_over). Reduce each gradient once"
            )
        if abs(by * self._ranks - 1) < 1e-3:
            return "they are averaged over the sequence's ranks. Give global_loss averaged_over=, or sum them"
        return "the loss or its reduction has another factor than on one process"

    def _kind_of(self, name: str) -> str:
        """right, share, times FACTOR or wrong; the same on every rank. Communication: a sum over the ranks."""
        expected, found = self._one.gradients.get(name), self._many.gradients.get(name)
        like = expected if expected is not None else found
        assert like is not None
        zero = torch.zeros_like(like)
        expected, found = (zero if x is None else x for x in (expected, found))
        total = self._over_sequence(found)

        def near(a: torch.Tensor, b: torch.Tensor) -> bool:
            return squares(a, b).error(self._floor) <= self._tolerance

        by = factor(found, expected)
        mine = near(found, expected), near(total, expected), near(found, by * expected), by
        ranks = self._gather(mine)
        if all(each[0] for each in ranks):
            return "right"
        factors = [each[3] for each in ranks]
        if all(each[2] for each in ranks) and max(factors) - min(factors) < 1e-3:
            return f"times {factors[0]:.3f}"
        if all(each[1] for each in ranks):
            return "share"
        return "wrong"

    def _first_wrong_gradient(self) -> str:
        """In the order of the backward."""
        wrong = [call for call in reversed(self._calls) if self._is_wrong(self.errors.gradients[call.key])]
        inner = [call for call in wrong if not any(other.within(call) for other in wrong)]
        return f": the first wrong gradient of a backward is that of {inner[0]}'s output" if inner else ""


def _select(tensor: torch.Tensor, part: ExpectedPart, rows: torch.Tensor) -> torch.Tensor:
    assert part.dim is not None
    return tensor.movedim(part.dim, 0)[rows]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _describe(mask: torch.Tensor) -> tuple[str, str]:
    """A text for what an attn_mask hides, and the remedy for the ranks."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    shape = tuple(mask.shape)
    if allowed.ndim >= 2 and allowed.shape[-1] == allowed.shape[-2]:
        behind = torch.arange(allowed.shape[-1])[:, None] - torch.arange(allowed.shape[-1])[None, :]
        behind = behind.to(allowed.device)
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
