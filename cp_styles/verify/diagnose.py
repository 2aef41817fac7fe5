"""Why a step differs from the step on one process: finds the first difference, and tests possible causes.

Causes are tested. The first module with equal inputs and a different output runs once more on one rank, with the
suspected mistake: on this rank's rows alone, or without the documents. If this run gives the rank's result, the mistake
is the cause. Otherwise the report says that the cause is not known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_styles._lib.compat import WHOLE_CALL, tensors_in, tree_leaves, tree_map
from cp_styles._lib.troubleshooting import see
from cp_styles.engine.observers import attention_listener
from cp_styles.layouts import SequenceLayout, contiguous, head_tail, striped
from cp_styles.mixers.halo import reach_of
from cp_styles.styles.backbone import backbone_of
from cp_styles.verify.compare import Comparison, ExpectedPart, ExpectedRows, add_squares, factor, squares
from cp_styles.verify.record import ATTENTION, Call, Key, UnhandledAttention, plain_name


def findings(comparison: Comparison, model: nn.Module, axis: DeviceMesh) -> list[str]:
    """The first mistake in the order of a step, in sentences; empty if there is none.

    Parts of ``model`` are run to test causes, with one rank in place of the ranks of the sequence, ``axis``.
    """
    wrong_gradients = any(map(comparison.is_wrong, comparison.parameters.values()))
    if text := _describe_other_length(comparison):
        return [text]
    for call in comparison.calls:
        wrong = call.kind == ATTENTION and comparison.wrong_inputs(call)
        wrong = wrong or comparison.is_wrong(comparison.outputs.get(call.key))
        if wrong and not (call.parent is None and _is_share(comparison, call)):
            texts = _diagnose_forward(comparison, model, call, axis.size())
            return texts if wrong_gradients or not comparison.parameters else [*texts[:-1], texts[-1] + _NOT_READ]
    if not wrong_gradients:
        return []
    root = comparison.calls[-1]
    local = comparison.local_calls.get(root.key, root)
    pairs = zip(root.outputs, local.outputs, strict=False)
    if any(comparison.gather(backbone_of(model) is not None and any(x.shape != y.shape for x, y in pairs))):
        return [
            f"{root}: it returns this rank's part of what it computes between its blocks, and its results are whole. "
            "Return hidden states as blocks return them, and change them behind the last block"
        ]
    return _diagnose_loss(comparison) or _diagnose_gradients(comparison, axis)


# The forward.


def _is_share(comparison: Comparison, call: Call) -> bool:
    """Whether the numbers that ``call`` returns on the ranks add up to its number on one process: shares of a loss."""
    outputs = call.outputs if (local := comparison.local_calls.get(call.key)) is None else local.outputs
    ranks = comparison.gather([float(x) for x in outputs if x.numel() == 1])
    sums = [(x, x.new_tensor(sum(each))) for x, *each in zip(call.outputs, *ranks, strict=False)]
    return 0 < len(call.outputs) == len(sums) and all(comparison.equal(total, x) for x, total in sums)


def _diagnose_forward(comparison: Comparison, model: nn.Module, first: Call, ranks: int) -> list[str]:
    # A wrong input comes from the parent, or from a call before: go up until all inputs are right. Inputs that cannot
    # be compared, as a text and a part that are joined, say nothing.
    node, inner = first, None
    while (wrong := comparison.wrong_inputs(node)) or (inner is not None and not comparison.knows(node)):
        if node.parent is None:
            break
        node, inner = node.parent, node if wrong else inner
    if wrong:
        return [f"argument {name!r} of {node}: {_describe_argument(comparison, node, name, ranks)}" for name in wrong]
    where = f"{node}: its output" if inner is None else f"{node}: what it gives to {inner.name}"
    calls = [comparison.local_calls.get(call.key) for call in (node, inner or node)]
    tensors = [x for call in calls if call is not None for x in (*call.inputs.values(), *call.outputs)]
    if any(comparison.gather(None in calls or any(isinstance(x, DTensor) for x in tensors))):
        return [f"{where} is wrong, and all inputs that can be compared are right. The cause is not known"]
    if inner is not None:
        for name in comparison.wrong_inputs(inner):
            if _examine_argument(comparison, inner, name, ranks)[0]:
                return [f"{where}, {name!r}, counts from 0 on each rank: positions are forgotten. {_remedy(model)}"]
    return [_WrongCall(comparison, model, node, inner, where).cause()]


def _describe_argument(comparison: Comparison, root: Call, name: str, ranks: int) -> str:
    """The mistake in an argument of the model that is not this rank's shard."""
    counts, cuts, layouts = _examine_argument(comparison, root, name, ranks)
    if counts:
        return (
            "counts from 0 on each rank, as if each part were a sequence of its own: positions are forgotten. Pass "
            "layout.positions(rank)"
        )
    if cuts:
        return f"layout mismatch: it is cut with {min(cuts)}, and attention ran with another layout ({layouts})"
    if not layouts:
        return "it has the shape of what one process is given, and another value: give every rank the same"
    return f"it is not this rank's part of what one process is given, by attention's layout ({layouts})"


def _examine_argument(comparison: Comparison, call: Call, name: str, ranks: int) -> tuple[bool, set[str], str]:
    """Three facts of an input of a call: whether it counts from 0 on every rank, the balancers that give every rank its
    value, and the layouts of attention."""
    whole, local_call = call.inputs[name], comparison.local_calls.get(call.key)
    local = None if local_call is None else local_call.inputs.get(name)
    part = comparison.shards.part(whole, local)
    counts, cuts, layout = False, [], ""
    if local is not None and part is not None and local.numel():
        dim = part.dim if isinstance(part, ExpectedRows) else local.ndim - 1
        if not local.is_floating_point() and local.ndim:
            counts = bool((local.movedim(dim, -1) == torch.arange(local.shape[dim], device=local.device)).all())
        if isinstance(part, ExpectedRows):
            layout = part.layout.describe()
            for balancer in (contiguous, head_tail, striped):
                rows = balancer(whole.shape[dim], ranks).positions(comparison.shards.rank, whole.device)
                if rows.numel() == local.shape[dim] and not squares(local, whole.index_select(dim, rows)).difference:
                    cuts.append(balancer.__name__)
    all_count, all_cuts, layouts = zip(*comparison.gather((counts, cuts, layout)), strict=True)
    return all(all_count), set.intersection(*map(set, all_cuts)), ", ".join(dict.fromkeys(filter(None, layouts)))


class _WrongCall:
    """The first wrong call: the inputs of ``node`` are right, but its output, or an input of the nested call ``inner``,
    is wrong."""

    def __init__(self, comparison: Comparison, model: nn.Module, node: Call, inner: Call | None, where: str) -> None:
        self._remedy, backbone = _remedy(model), backbone_of(model)
        self._comparison, self._node, self._inner, self._where = comparison, node, inner, where
        self._modules = {plain_name(name): module for name, module in model.named_modules()}
        self._gather, self._shards, self._equal = comparison.gather, comparison.shards, comparison.equal
        self._local, target = comparison.local_calls[node.key], comparison.local_calls[(inner or node).key]
        self._expected = node.outputs if inner is None else list(inner.inputs.values())
        self._actual = target.outputs if inner is None else list(target.inputs.values())
        end = target.attended[1] if inner is None else target.attended[0]
        self._args, self._kwargs = self._local.args, self._local.kwargs
        if backbone is not None and self._modules[node.name] in [region.blocks[0] for region in backbone.regions]:
            self._args, self._kwargs = tree_map(self._cut, (self._args, self._kwargs))
        # Code that ran before the wrong tensors existed.
        self._attentions = comparison.parallel.recording.attentions[self._local.attended[0] : end]

    def _cut(self, x: Any) -> Any:
        """An argument of a block, which was recorded in front of the style that cuts it."""
        dims = range(x.ndim) if isinstance(x, torch.Tensor) else ()
        cuts = [(dim, layout) for dim in dims for layout in self._shards.layouts if layout.length == x.shape[dim]]
        return x.index_select(cuts[0][0], cuts[0][1].positions(self._shards.rank, x.device)) if cuts else x

    def cause(self) -> str:
        """Test the causes in turn. Communication: all-gathers of small objects."""
        node = self._node
        if text := self._describe_lost_documents():
            return f"{node}: {text}"
        if text := self._describe_small_reach():
            return f"{node}: {text}"
        anywhere = any(self._gather(any(attention is not None for attention in self._attentions)))
        if self._reproduces(lambda: self._rerun(self._args, self._kwargs), whole=False):
            if any(self._gather(None in self._attentions)):
                return (
                    f"{node}: its attention ran on each rank's part alone. No style of the plan covers the call, or it "
                    "is an attention that the style does not know: add the module to the plan"
                )
            if not anywhere:
                return self._cause_if_local_only({}, {}, "")
        calls = [call for call in self._comparison.calls if call.parent is node and call.kind != ATTENTION]
        calls = [call for call in calls if self._inner is None or not self._inner.within(call)]
        inside = {call.key: call.output for call in calls}
        if inside and anywhere:
            calls = self._comparison.local_calls
            outputs = {key: calls[key].output for key in inside if key in calls}
            if self._reproduces(lambda: self._rerun(self._args, self._kwargs, outputs=outputs), whole=False):
                return self._cause_if_local_only(inside, outputs, ", in its own code between the modules")
        if text := self._describe_other_layout():
            return f"{node}: {text}"
        wrong = self._wrong_positions()
        positions = _list_positions(self._gather(set() if wrong is None else wrong[0]))
        return f"{self._where} is wrong at {positions}, and its inputs are right. The cause is not known"

    def _cause_if_local_only(self, inside: Mapping[Key, Any], local_inside: Mapping[Key, Any], code: str) -> str:
        """The cause if each rank's result is the result for its shard alone, as if that were the sequence.

        ``inside``, ``local_inside``: outputs of the modules in the call, on one process and on this rank, if the
        mistake is in the code between these modules.
        """
        if text := self._describe_pooling():
            return text
        wholes = self._node.args, self._node.kwargs, inside
        parts = self._args, self._kwargs, local_inside

        def run(change: Callable[[torch.Tensor, ExpectedPart], torch.Tensor]) -> list[torch.Tensor]:
            args, kwargs, outputs = self._change_shards(wholes, parts, change)
            return self._rerun(args, kwargs, outputs=outputs)

        def differs(change: Callable[..., torch.Tensor], take: Callable[..., torch.Tensor]) -> bool:
            return any(self._gather(_true_without_error(lambda: self._differs(run(change), take))))

        if differs(self._change_other_tokens, lambda x, part: part.take(x)):
            return (
                f"{self._node}: it carries values from token to token{code}, and no attention that a style takes over "
                "does that (a recurrence, a convolution along the sequence, a norm over tokens, attention in plain "
                f"operations): each rank's ends at its own part. {self._count_missing_rows()}"
                f"{see('A layer that mixes tokens')}"
            )
        if all(self._gather(_true_without_error(lambda: self._equals_first_rows(run(self._move_tokens_first))))):
            return (
                f"{self._where} on each rank is the result for the first positions: positions are forgotten. "
                f"{self._remedy}"
            )
        if differs(self._keep_first_tokens, self._keep_first_tokens):
            return (
                f"{self._where} depends on the number of tokens, and each rank takes the number of its part "
                "(x.shape[1]). Let it take the length of the whole sequence, layout.length"
            )
        return (
            f"{self._where} on each rank is the result for its part alone, as if it were the whole sequence. The cause "
            "is not known"
        )

    def _count_missing_rows(self) -> str:
        """Which tokens of each shard are wrong, and the function that gives them the rows or the state they need."""
        wrong, reach, longest = self._wrong_positions(), 0, 0
        first_is_wrong = wrong is None
        if wrong is not None:
            for start, stop in wrong[1].chunks[self._shards.rank]:
                positions = wrong[0].intersection(range(start, stop))
                first_is_wrong |= start == 0 and bool(positions)
                reach = max([reach, *(position - start + 1 for position in positions)])
                longest = max(longest, stop - start)
        first, reaches, lengths = zip(*self._gather((first_is_wrong, reach, longest)), strict=True)
        reach = max(reaches)
        if any(first):  # the first fragment of the sequence lacks no earlier token
            return (
                "It reads later tokens too. Add a sum over tokens up over the ranks, gather(part[None], 0, mesh, "
                "reduce_gradients=True).sum(0) of cp_styles.collectives; give a convolution that looks both ways its "
                "neighbors by context_halo(module, mesh, reach=(in front, behind)) or context_roll(x, shift, seq_dim, "
                "mesh, fill=0.0) of cp_styles.mixers; or gather the tokens, call it on all, and cut the result"
            )
        if all(reach < length for length in lengths if length):
            return (
                f"Only the first {reach} tokens of a part are wrong: the rows before it are missing, as in a "
                f"convolution of {reach + 1} taps. Call it by context_causal_conv1d(conv, x, mesh, width={reach + 1}) "
                f"of cp_styles.mixers, or give the module to context_halo(module, mesh, reach={reach}); a shift of ids "
                "or other tensors by context_roll(x, shift, seq_dim, mesh, fill=0)"
            )
        return (
            "The first part is right: the state is not passed on. Call the kernel of a recurrence by "
            "context_recurrence(kernel, mesh) of cp_styles.mixers, and scaled_dot_product_attention for attention"
        )

    def _describe_lost_documents(self) -> str | None:
        """The cause if the ranks ignored the arguments that give the documents."""
        node = self._node
        names = [name for name in _DOCUMENTS if isinstance(node.arguments.get(name), torch.Tensor)]
        args = [None if name in names else x for name, x in zip(node.names, node.args, strict=False)]
        args = (*args, *node.args[len(args) :])
        kwargs = {name: None if name in names else x for name, x in node.kwargs.items()}
        if not names or not self._reproduces(lambda: self._rerun(args, kwargs)):
            return None
        return (
            f"documents are not separated: the ranks got its output without {', '.join(names)}, so a state goes on "
            "from one document to the next. Give context_recurrence or context_causal_conv1d the documents of the "
            "whole sequence (documents=), or open a SequenceScope(layout, mask=Documents(...))"
        )

    def _describe_small_reach(self) -> str | None:
        """The cause if a module with a halo reads tokens out of its reach."""
        reach, wrong = reach_of(self._modules[self._node.name]), self._wrong_positions()
        if reach is None:
            return None

        def reads_more() -> bool:
            assert wrong is not None
            position = min(wrong[0])

            def change(whole: torch.Tensor, part: ExpectedPart) -> torch.Tensor:
                """``whole`` with other values at the tokens out of reach."""
                assert isinstance(part, ExpectedRows)
                rows = torch.arange(part.layout.length, device=whole.device)
                rows = rows[(rows < position - reach[0]) | (rows > position + reach[1])]
                return whole.index_copy(part.dim, rows, whole.index_select(part.dim, rows.roll(1)))

            wholes, parts = (self._node.args, self._node.kwargs), (self._args, self._kwargs)
            results = self._rerun(*self._change_shards(wholes, parts, change))
            return self._differs(
                results, lambda x, part: isinstance(part, ExpectedRows) and x.select(part.dim, position)
            )

        if not any(self._gather(_true_without_error(reads_more))):
            return None
        return (
            f"its output depends on more tokens than its halo has, {reach[0]} in front of a token and {reach[1]} "
            "behind it: give context_halo a larger reach=, the sum of the reaches of the layers in it"
        )

    def _change_shards(
        self, wholes: Any, parts: Any, change: Callable[[torch.Tensor, ExpectedPart], torch.Tensor]
    ) -> Any:
        """``wholes``, with ``change`` applied to the tensors that are sharded."""
        if len(tree_leaves(wholes)) != len(tree_leaves(parts)):
            raise ValueError("the ranks have different arguments")
        locals_ = iter(tree_leaves(parts))

        def change_one(whole: Any) -> Any:
            local = next(locals_)
            if not isinstance(whole, torch.Tensor) or not isinstance(local, torch.Tensor):
                return whole
            part = self._shards.part(whole, local)
            return whole if part is None or part.layout is None else change(whole, part)

        return tree_map(change_one, wholes)

    @staticmethod
    def _change_other_tokens(whole: torch.Tensor, part: ExpectedPart) -> torch.Tensor:
        """``whole`` with other values at the tokens of other ranks."""
        others = torch.ones(whole.numel(), dtype=torch.bool, device=whole.device)
        others[part.take(torch.arange(whole.numel(), device=whole.device).view(whole.shape)).flatten()] = False
        flat = whole.flatten().clone()
        if flat.is_floating_point():
            flat[others] = flat[others].flip(0) * 1.5 + flat[others].abs().mean()
        else:
            flat[others] = flat[others].roll(1)
        return flat.view(whole.shape)

    def _move_tokens_first(self, whole: torch.Tensor, part: ExpectedPart) -> torch.Tensor:
        """``whole`` with this rank's tokens first."""
        if not isinstance(part, ExpectedRows):
            raise ValueError("tokens are flattened with the batch")
        rows = part.layout.positions(self._shards.rank, whole.device)
        others = torch.ones(part.layout.length, dtype=torch.bool, device=whole.device).index_fill(0, rows, False)
        return whole.index_select(part.dim, torch.cat((rows, others.nonzero().flatten())))

    @staticmethod
    def _keep_first_tokens(whole: torch.Tensor, part: ExpectedPart) -> torch.Tensor:
        """The first tokens of ``whole``, as many as this rank has."""
        assert isinstance(part, ExpectedRows)
        return whole.narrow(part.dim, 0, part.expected.shape[part.dim])

    def _sharded(self, results: Sequence[torch.Tensor]) -> list[tuple[ExpectedPart, torch.Tensor, torch.Tensor]]:
        """The parts of the wrong tensors that have rows of tokens, with their result and their value on this rank."""
        parts = [(self._shards.part(x, local), local) for x, local in zip(self._expected, self._actual, strict=True)]
        known = zip(parts, results, strict=True)
        return [(part, x, local) for (part, local), x in known if part is not None and part.layout is not None]

    def _differs(self, results: Sequence[torch.Tensor], take: Callable[[torch.Tensor, ExpectedPart], Any]) -> bool:
        """Whether a result differs from the result on one process at the tokens that ``take`` takes of both."""
        pairs = zip(self._sharded(results), self._sharded(self._expected), strict=True)
        return not all(self._equal(take(x, part), take(whole, part)) for (part, x, _), (_, whole, _) in pairs)

    def _equals_first_rows(self, results: Sequence[torch.Tensor]) -> bool:
        """Whether the first rows of the results are this rank's results."""
        sharded = self._sharded(results)
        return bool(sharded) and all(self._equal(self._keep_first_tokens(x, part), y) for part, x, y in sharded)

    def _reproduces(self, run: Callable[[], list[torch.Tensor]], *, whole: bool = True) -> bool:
        """Whether ``run`` reproduces the wrong result on every rank. If ``whole``, parts that cannot be compared are
        ignored."""

        def ask() -> bool:
            errors = [self._shards.compare(*pair) for pair in zip(run(), self._actual, strict=True)]
            total = add_squares(errors)
            return total is not None and total.error() <= self._comparison.tolerance and (whole or None not in errors)

        return all(self._gather(_true_without_error(ask)))

    def _describe_pooling(self) -> str:
        """The cause if the wrong tensors have no rows of tokens on any rank."""
        sizes = {size for rank in self._gather(self._wrong_sizes()) for size in rank}
        if not sizes or None in sizes:
            return ""
        if sizes == {1}:
            return (
                f"{self._where} has a number that differs between the ranks: a loss, or a mean, of each rank's own "
                "tokens. Let the model return logits, and take the loss of all tokens: batch.loss(logits) of "
                "BatchSharder, or global_loss(losses, global_token_count(labels, mesh), mesh)"
            )
        return (
            f"{self._where} differs from its value for all tokens, and has no row per token: it is pooled from this "
            "rank's part (a mean, a sum, a maximum, the first or the last token). Give the model whole inputs, and "
            "BackboneContextParallel in place of ModuleContextParallel; or gather the tokens before, by "
            "cp_styles.collectives.gather: both on the page Training"
        )

    def _wrong_sizes(self) -> list[int | None]:
        """For each tensor that is wrong on this rank its number of elements; None if it has rows of tokens."""
        pairs = [(self._shards.part(*pair), pair[1]) for pair in zip(self._expected, self._actual, strict=True)]
        wrong = [(part, x) for part, x in pairs if part is not None and not self._equal(x, part.expected)]
        return [x.numel() if part.layout is None else None for part, x in wrong]

    def _describe_other_layout(self) -> str | None:
        """The cause if the inputs are sharded with one layout, and the attention ran with another layout."""
        local = self._local.inputs
        parts = (self._shards.part(whole, local.get(name)) for name, whole in self._node.inputs.items())
        cut = {part.layout for part in parts if part is not None and part.layout is not None}
        attended = {attention.layouts[0] for attention in self._attentions if attention is not None}
        lengths = {layout.length for layout in (*cut, *attended)}
        if not all(self._gather(len(cut) == len(attended) == len(lengths) == 1 and cut != attended)):
            return None
        inputs, attention = cut.pop(), attended.pop()
        return (
            f"layout mismatch: its inputs are cut with {inputs.describe()}, and its attention ran with "
            f"{attention.describe()}. Give all styles the layout with which the step cuts"
        )

    def _rerun(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, outputs: Mapping[Key, Any] | None = None
    ) -> list[torch.Tensor]:
        """Run the call again with one rank, and return the tensors that were wrong. With ``outputs``, the modules in
        the call do not run, and return these outputs."""
        node, inner, calls, outputs = self._node, self._inner, self._comparison.calls, outputs or {}
        module, attends = self._modules[node.name], inner is not None and inner.kind == ATTENTION
        inputs, results = list[list[torch.Tensor]](), list[Any]()

        def note(*args: Any, **kwargs: Any) -> None:
            assert inner is not None
            inputs.append(list(replace(inner, args=args, kwargs=kwargs).inputs.values()))

        def replay(name: str) -> Callable[..., Any]:
            values = iter([outputs[call.key] for call in calls if call.name == name and call.key in outputs])
            noted = inner is not None and inner.name == name
            return lambda *args, **kwargs: (noted and note(*args, **kwargs), next(values))[1]

        self._comparison.restore()
        with contextlib.ExitStack() as stack:
            for name in {key[0] for key in outputs}:
                # Without its hooks: a style on it would miss its attention.
                child = self._modules[name]
                stack.callback(setattr, child, WHOLE_CALL, getattr(child, WHOLE_CALL))
                setattr(child, WHOLE_CALL, replay(name))
            if attends:
                listener = attention_listener.set(lambda strategy, attention, *tensors: note(*tensors[:3]))
                stack.callback(attention_listener.reset, listener)
            elif inner is not None:
                add = partial(self._modules[inner.name].register_forward_pre_hook, prepend=True, with_kwargs=True)
                stack.callback(add(lambda module, args, kwargs: note(*args, **kwargs)).remove)
            keep = module.register_forward_hook(lambda module, args, output: results.append(output), prepend=True)
            stack.callback(keep.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(UnhandledAttention([], note if attends else None))
            try:
                results.append(module(*args, **kwargs))
            except NotImplementedError:  # a style on the module may miss its attention too
                if not results:
                    raise
        if inner is None:
            return tensors_in(results[-1])
        ran = [x for x in calls if x.within(node) and not any(x.within(each) for each in calls if each.key in outputs)]
        same = [x.key for x in ran if (x.kind == ATTENTION if attends else x.name == inner.name)]
        return inputs[same.index(inner.key)]

    def _wrong_positions(self) -> tuple[set[int], SequenceLayout] | None:
        """The wrong positions on this rank, and their layout. None if they are not known."""
        wrong, layout = set[int](), None
        for part, _, local in self._sharded(self._expected):
            if isinstance(part, ExpectedRows) and layout in (None, part.layout):
                layout = part.layout
                positions = layout.positions(self._shards.rank, "cpu").tolist()
                rows = zip(positions, local.unbind(part.dim), part.expected.unbind(part.dim), strict=True)
                wrong |= {position for position, *row in rows if not self._equal(*row)}
        return None if layout is None else (wrong, layout)


def _describe_other_length(comparison: Comparison) -> str:
    """The cause if an attention had more positions on the ranks than with one rank, or fewer."""
    steps = comparison.reference.recording, comparison.parallel.recording
    lengths = [[ran and ran.layouts[0].length for ran in step.attentions] for step in steps]
    other = [pair for pair in zip(*lengths, strict=False) if None not in pair and pair[0] != pair[1]]
    if not all(comparison.gather(bool(other) and len(lengths[0]) == len(lengths[1]))):
        return ""
    return (
        f"attention ran over {other[0][1]} positions on the ranks, and over {other[0][0]} with one rank. Tokens that "
        "every rank has, as a text, count once for each rank, unless they are the prefix= or suffix= of a JointLayout: "
        "give it their number"
    )


def _true_without_error(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except Exception:  # a module may refuse to run alone, or with other values
        return False


# The loss, and what the backward makes of it.


def _diagnose_loss(comparison: Comparison) -> list[str]:
    """Findings about the loss, if the gradient of the model's output is wrong. The output is right."""
    root, ranks = comparison.calls[-1], comparison.loss_gradients
    parts = [part for part in ranks if part is not None]
    if len(parts) < len(ranks) or comparison.loss_factor() is not None:
        return []
    wrong = [part for part in parts if part.wrong]
    if wrong and all(part.rolled for part in wrong):
        return [
            f"the loss: what {root} returned is right, and its gradient is wrong where a rank's tokens are not "
            "followed by their next one. Labels were rolled after the cut: make them for the whole sequence "
            "(next_token_labels), then cut them as the tokens"
        ]
    if wrong:
        return [
            f"the loss: what {root} returned is right, and its gradient is not, at "
            f"{_list_positions([set(part.wrong) for part in parts])}: labels, weights or the loss itself are not those "
            "of this rank's tokens, or a gather in front of it has them in another order (layout=)"
        ]
    factors = [part.factor for part in parts]
    counts = [part.factor * part.tokens for part in parts]
    why = "the ranks' losses are not parts of one mean"
    if max(counts) - min(counts) <= comparison.tolerance * max(map(abs, counts)):
        why = "each rank has divided by the number of its own tokens"
    return [
        f"the loss: its gradient is {', '.join(f'{x:.4g}' for x in factors)} times the gradient of one process on the "
        f"ranks, in turn: {why}. Divide the sum by the tokens of all: global_loss(losses, global_token_count(labels, "
        "mesh), mesh)"
    ]


def _diagnose_gradients(comparison: Comparison, axis: DeviceMesh) -> list[str]:
    kinds: dict[tuple[str, float], list[str]] = {}
    for name in comparison.parameters:
        kinds.setdefault(_classify_gradient(comparison, axis, name), []).append(name)
    partly = kinds.pop(("right", 1.0), None)
    kinds.pop(("zero", 1.0), None)
    first, texts = _describe_first_gradient(comparison), []
    if len(kinds) == 1 and not partly and next(iter(kinds))[0] == "times":
        first = ""  # one factor of all gradients says more than the first wrong one
    for (kind, by), names in kinds.items():
        what = f"the gradients of {len(names)} of {len(comparison.parameters)} parameters ({join_first(names)})"
        if kind == "share":
            texts.append(
                f"gradients are {'partly reduced' if partly else 'unreduced'}: {what} are each rank's own share, "
                "and were not summed over the ranks of the sequence. Call sum_gradients(model, mesh) with all "
                "parameters after the backward, or use FSDP2 or DDP over this axis"
            )
        elif kind == "not finite":
            texts.append(f"{what} are not finite on the ranks{first}. The cause is not known")
        elif kind == "times" and not first:
            why = _explain_factor(by, comparison.loss_factor(), axis.size())
            texts.append(f"{what} are {by:g} times the gradients of one process: {why}")
        elif all(name.startswith(OUTSIDE) for name in names) and partly:
            texts.append(
                f"{what} are wrong, and gradients of the model are right: the mistake is in modules that have them. "
                "verify(module, mesh, batch, step), with these modules in place of the model, names it"
            )
        elif not first and comparison.loss_factor() == 1 and len(names) == len(comparison.parameters) > 1:
            texts.append(
                f"{what} are wrong, and all outputs and their gradients are right: something changes gradients between "
                "the backward and their sum, as clip_grad_norm_ does, by another factor on each rank. Sum gradients "
                "first (sum_gradients), then clip"
            )
        elif not first and comparison.loss_factor() == 1:
            texts.append(
                f"{what} are wrong, and all outputs and their gradients are right: such a parameter multiplies values "
                "of other tokens, or the number of a token in this rank's part, and is 0 now (a token shift, or a "
                "table that begins at zero). The values that it multiplies mix or count the tokens of a part"
                f"{see('A layer that mixes tokens')}"
            )
        else:
            texts.append(f"{what} are wrong{first}. The cause is not known")
    return texts


def _is_near(number: float, other: float) -> bool:
    return abs(number - other) < 1e-3 * abs(other)


def _explain_factor(by: float, of_loss: float | None, ranks: int) -> str:
    """The cause of a factor ``by`` of gradients, if the gradient of the loss has the factor ``of_loss``."""
    if of_loss is None and _is_near(by, ranks):
        return (
            "each rank adds the loss of the whole sequence, as behind a gather. Divide it: (loss / mesh.size())"
            f".backward(), with the mesh that the step is given{see('Gradients behind a gather')}"
        )
    if of_loss is None and _is_near(by, 1 / ranks):
        return (
            "they are averaged over the sequence's ranks, or a loss behind a gather with reduce_gradients=False is "
            f"divided by the number of ranks{see('Gradients behind a gather')}"
        )
    if of_loss is None:
        return "the loss, or the reduction of gradients, has another factor than on one process"

    if _is_near(of_loss, 1) and _is_near(by, ranks):
        return "they are reduced twice over the sequence's ranks. Reduce each gradient once"
    if _is_near(of_loss, 1) and _is_near(by, 1 / ranks):
        return (
            "they are averaged over the sequence's ranks. Give global_loss averaged_over= the size of the mesh that "
            "the step is given, or sum them"
        )
    if abs(by - of_loss) < min(1e-3 * abs(of_loss), 0.1 * abs(of_loss - 1)):
        return (
            f"the gradient of the loss is {of_loss:g} times the gradient of one process on each rank, and the "
            "reduction adds the ranks' shares. A mean over this rank's tokens alone does that, a token count of labels "
            "that are not cut, a loss behind a gather or an all-reduce with gradients that is not divided by the "
            "ranks, and global_loss with averaged_over= where no reducer averages"
        )
    return f"the gradient of the loss is {of_loss:.4g} times its value on one process, and code after it does the rest"


def _classify_gradient(comparison: Comparison, axis: DeviceMesh, name: str) -> tuple[str, float]:
    """right, zero, share, times, not finite or wrong, with the factor of the gradient; equal on every rank.

    Communication: an all-reduce of the gradient."""
    pair, gather, same = comparison.pair(name), comparison.gather, comparison.same_gradient
    # Ranks must agree on the shapes before they all-reduce.
    shapes = gather(pair and [tuple(x.shape) for x in pair])
    if not all(each and each[0] == each[1] for each in shapes):
        return "wrong", 1.0
    assert pair is not None
    share, expected = pair
    total = share.clone()
    if len({each[0] for each in shapes}) == 1:  # otherwise they are shards of FSDP2
        dist.all_reduce(total, group=axis.get_group())
    by = factor(share, expected)
    facts = (
        same(share, expected),
        same(total, expected),
        same(share, by * expected),
        by,
        bool(share.isfinite().all()),
        int(expected.count_nonzero()),
    )
    right, shares, times, factors, finite, numbers = zip(*gather(facts), strict=True)
    if all(right):
        return ("right" if max(numbers) else "zero"), 1.0
    if not all(finite):
        return "not finite", 1.0
    # One number is a multiple of every other. So its factor counts only if it is one that has a cause.
    causes = axis.size(), 1 / axis.size(), comparison.loss_factor() or 1.0
    known = max(numbers) > 1 or any(_is_near(by, cause) for cause in causes)
    if all(times) and known and max(factors) - min(factors) < 1e-3 and abs(by) > 1e-3:
        return "times", round(factors[0], 3 if abs(factors[0] - 1) > 1e-3 else 6)
    return ("share" if all(shares) else "wrong"), 1.0


def _describe_first_gradient(comparison: Comparison) -> str:
    """A clause that names the first wrong gradient in the order of the backward; empty if there is none."""
    calls = [call for call in reversed(comparison.calls) if comparison.is_wrong(comparison.gradients.get(call.key))]
    first = next((call for call in calls if not any(other.within(call) for other in calls)), None)
    return "" if first is None else f": the first wrong gradient of a backward is at {first}'s output"


OUTSIDE = "outside of the model: "
"""The names of parameters of the step that the model does not have begin with this."""
_NOT_READ = (
    ". All gradients are right, so the loss reads nothing that is wrong. If these are rows of padding, give the ranks "
    "the mask that one rank is given"
)
_DOCUMENTS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx", "documents")


def _remedy(model: nn.Module) -> str:
    """The remedy for positions that count from 0 on each rank."""
    if backbone_of(model) is None:
        return "It counts this rank's tokens from 0. Give the model positions, layout.positions(rank)"
    return (
        "Code in the blocks and between them counts this rank's tokens from 0. Make positions, or a table, before the "
        "first block, and give them to the blocks as an argument (seq_dims=)"
        f"{see('Positions that are made between the blocks')}"
    )


def join_first(names: Sequence[str]) -> str:
    """The first four names."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _list_positions(ranks: Sequence[set[int]]) -> str:
    everywhere = sorted(set().union(*ranks))
    if not everywhere:
        return "some places"
    shown = ", ".join(map(str, everywhere[:8])) + (", ..." if len(everywhere) > 8 else "")
    return f"{len(everywhere)} positions ({shown})"
