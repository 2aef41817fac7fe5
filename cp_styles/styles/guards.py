"""Checks around the attention calls of a model: mistakes that would give wrong numbers without an error.

Inside a ModuleContextParallel each rank has a part of the sequence. Most models are not written for that: they count
positions from 0, shift labels by one token, and make masks for the length of their input. What can be recognized by the
arguments of a model, or by its layers, is refused here, on every rank.
"""

from __future__ import annotations

import copy
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from cp_styles._compat import (
    graph_task_id,
    never_compile_alone,
    tree_leaves,
    tree_map,
    uncompiled,
    without_dispatch_modes,
)
from cp_styles.comm.agreement import Meeting, StatusRow, exchange_status, ledger_of
from cp_styles.engine.binding import Binding
from cp_styles.functions.decode import LayerCaches
from cp_styles.intercept.function_mode import AttentionCalls, names_of_inputs, wrapped_by
from cp_styles.layout import SequenceLayout
from cp_styles.mask import All, Causal, Chunked, Full, Mask, SlidingWindow
from cp_styles.troubleshooting import see

POSITIONS = "position_ids"


class MixingProbe:
    """Finds modules that carry values from token to token by other means than attention calls.

    Such are recurrent layers, state-space models, linear attention, convolutions along the sequence, and batch norms.
    In all of them a token's output depends on other tokens' inputs. Under context parallelism these would be the tokens
    of this rank's part only.

    Each module under a ModuleContextParallel is tested once, in its first forward, if no attention is called in it. It
    is run again on detached inputs, and one token's output is differentiated. A module is not tested if one with the
    same classes of submodules, in the same order, has passed: only their shapes can differ.
    """

    def __init__(self, name: str, names: Mapping[nn.Module, str]) -> None:
        self._name = name
        self._names = {id(module): path for module, path in names.items()}
        self._done: set[int] = set()
        self._cleared: set[tuple[Any, ...]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> MixingProbe:
        made = memo[id(self)] = MixingProbe(self._name, {})
        return made

    def asked(self, module: nn.Module) -> bool:
        return id(module) in self._done

    def ask(
        self, module: nn.Module, forward: Callable[..., Any], calls: AttentionCalls, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """What ``forward(*args, **kwargs)`` returns with ``calls`` entered. No communication.

        Raises:
            NotImplementedError: no attention was called in it, and an output depends on another token's input.
        """
        with calls:
            before = calls.attentions
            output = forward(*args, **kwargs)
            self._ask(module, forward, calls, calls.attentions != before, args, kwargs)
            return output

    @uncompiled
    def _ask(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        calls: AttentionCalls,
        attended: bool,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> None:
        if attended:
            self._done.add(id(module))
        elif self._can_run_again(module):
            structure = tuple(type(each) for each in module.modules())
            if structure in self._cleared:
                self._done.add(id(module))
            elif (length := _length(calls.inputs)) is None or length > 1:
                found = mixes(forward, args, kwargs, length)
                if found:
                    raise NotImplementedError(self._words(module, *found))
                if found is not None:
                    self._cleared.add(structure)
                self._done.add(id(module))

    @staticmethod
    def _can_run_again(module: nn.Module) -> bool:
        """Whether a second run would neither communicate nor change anything."""
        if torch.compiler.is_compiling() or graph_task_id() >= 0:
            return False
        return not any(
            isinstance(each, FSDPModule) or any(isinstance(x, DTensor) for x in each.parameters(recurse=False))
            for each in module.modules()
        )

    def _words(self, module: nn.Module, token: int, other: int) -> str:
        path = self._names.get(id(module)) or "a module inside"
        return (
            f"{self._name}: {path} ({type(module).__name__}) carries values from token to token without an attention "
            f"call: on this rank, the output of token {token} depends on the input of token {other}. A recurrence, a "
            "convolution along the sequence, linear attention, or a norm over tokens would end at this rank's part. "
            "It is not context parallel: keep such layers out of the model, or name the module in trusted= of the "
            "style if what it mixes is whole on each rank"
            f"{see('A layer that mixes tokens')}"
        )


never_compile_alone(MixingProbe.ask)


def mixes(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int | None
) -> tuple[int, int] | tuple[()] | None:
    """(a token, another token that its output depends on). Empty if there is none. None if it is not known.

    ``length`` is the number of tokens, if it is known. The result is None if ``forward`` raises.
    """
    try:
        return _mixed(forward, args, kwargs, length)
    except Exception:  # what it was called with cannot be copied, or it runs once only
        return None


def _mixed(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int | None
) -> tuple[int, int] | tuple[()] | None:
    leaves: list[torch.Tensor] = []

    def detached(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            known = value is None or isinstance(value, int | float | str | torch.dtype | nn.Module | BlockMask)
            return value if known else _copied(value)
        value = value.detach()
        value = value.clone() if value.is_inference() else value
        if value.is_floating_point() and value.ndim > 1:
            leaves.append(value.requires_grad_())
        return value

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        without_dispatch_modes(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()),
    ):
        outputs = tree_leaves(forward(*tree_map(detached, args), **tree_map(detached, dict(kwargs))))
        asked = None
        for out in outputs:
            if not isinstance(out, torch.Tensor) or not out.requires_grad or out.ndim < 2:
                continue
            for x in leaves:
                dim = _token_dim(x, out, length)
                if dim is None:
                    continue
                asked = ()
                token = x.shape[dim] // 2
                weights = torch.linspace(1.0, 2.0, out.select(dim, token).numel(), dtype=out.dtype, device=out.device)
                total = (out.select(dim, token).flatten() * weights).sum()
                (grad,) = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)
                if grad is not None:
                    per_token = grad.movedim(dim, 0).flatten(1).abs().amax(1)
                    per_token[token] = 0
                    if bool((per_token > 0).any()):
                        return token, int(per_token.argmax())
    return asked


def _copied(value: Any) -> Any:
    """A copy of an object that the forward may change, such as a cache. None if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return None


def _token_dim(x: torch.Tensor, out: torch.Tensor, length: int | None) -> int | None:
    """The dim of both along which tokens are; None if there is none."""
    dims = [d for d in range(min(x.ndim, out.ndim) - 1) if x.shape[d] == out.shape[d] > 1]
    if length is not None:
        dims = [d for d in dims if x.shape[d] % length == 0]
    elif x.ndim > 2:
        dims = [d for d in dims if d > 0]
    return dims[-1] if dims else None


class Forwards:
    """Runs forwards of a context-parallel module, or of modules inside of it, whose hooks have not run.

    Hooks run where a module is called. They do not run where a program calls ``model.forward``, or a model inside of
    the model (``model.model``, for hidden states instead of logits); nor where torch.compile has traced them, but not
    the forward. Then this does what the hooks do.
    """

    def __init__(self, top: nn.Module | None, mask: Mask, calls: AttentionCalls, *, check_inputs: bool) -> None:
        """``top``: the context-parallel module."""
        self._top, self._mask, self._calls, self._checks = top, mask, calls, check_inputs
        self._guards: dict[int, InputGuards] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Forwards:
        top, calls = memo.get(id(self._top)), copy.deepcopy(self._calls, memo)  # a part of it may be copied alone
        made = memo[id(self)] = Forwards(top, self._mask, calls, check_inputs=self._checks)
        return made

    def guards(self, module: nn.Module) -> InputGuards | None:
        """What looks at the arguments of this module: of the context-parallel one, and of models in it."""
        if not self._checks or (module is not self._top and not _is_model(module)):
            return None
        found = self._guards.get(id(module))
        if found is None:
            found = self._guards[id(module)] = InputGuards(module, self._mask, self._calls)
        return found

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        calls: AttentionCalls,
        probe: MixingProbe | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What ``forward(*args, **kwargs)`` returns, with ``calls`` entered, after the work of the hooks."""
        output = None
        try:
            self._begin(module, args, kwargs)
            if probe is None or probe.asked(module):
                with calls:
                    output = forward(*args, **kwargs)
            else:
                output = probe.ask(module, forward, calls, args, kwargs)
        finally:
            self._end(module, args, output)
        return output

    @uncompiled
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.start(module, args, kwargs)
        guards = self.guards(module)
        if guards is not None:
            guards.check(module, args, kwargs)

    @uncompiled
    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Also after an exception, with None."""
        try:
            guards = None if output is None else self.guards(module)
            if guards is not None:
                guards.check_output(module, args, output)
        finally:
            self._calls.leave(module, args, output, attends=module is self._top)


# Its frame is not compiled, because it enters a mode; the forward is.
never_compile_alone(Forwards.run)


class InputGuards:
    """Checks the arguments of a model's forward. Each module that ModuleContextParallel is applied to has one."""

    def __init__(self, module: nn.Module, mask: Mask, calls: AttentionCalls) -> None:
        self._calls, self._forwards = calls, 0
        binding = calls.binding
        self._name, self._alone = binding.name, binding.group.size() == 1
        models = [module]  # it may be a wrapper, or a wrapper of a wrapper
        while (inner := wrapped_by(models[-1])) is not None:
            models.append(inner)
        names = [name for each in models for name in inspect.signature(type(each).forward).parameters]
        self._names = names_of_inputs(module)
        self._positions = list(dict.fromkeys(name for name in names if name.endswith(POSITIONS)))
        self._has_loss = any(hasattr(type(each), "loss_function") for each in models)
        self._places = [name for name in names if _is_of_positions(name)]
        # transformers' attention interface counts distances itself, for tables of biases by distance.
        by_distance = any(hasattr(each, "_relative_position_bucket") for each in module.modules())
        self._may_count = by_distance and not any(_makes_masks(each) for each in models)
        makes_masks = any(_makes_masks(each) for each in models) and not _covers(mask)
        self._window = _smallest_window(models[-1]) if makes_masks else None

    def check(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: raise for arguments that are not this rank's part of a whole sequence.

        The values of tensors are looked at in the first forward, the second, the fourth and so on. Communication: in
        these forwards, one all-gather of some integers if there is a ``num_items_in_batch``.
        """
        if self._alone:
            return
        kind = type(module).__name__
        if torch.compiler.is_dynamo_compiling():
            traced = dict(zip(self._names, args, strict=False)) | kwargs
            if traced.get("past_key_values") is None:
                self._check_positions(kind, traced)
            return
        self._forwards += 1
        binding, inputs = self._calls.binding, self._calls.inputs
        past = inputs.get("past_key_values")
        own = getattr(past, "self_attention_cache", past)  # beside keys of an encoder
        if isinstance(own, LayerCaches) and own.prefilled:
            if inputs.get("use_cache") is False:
                raise ValueError(
                    f"{binding.name}: {kind} was given a cache and use_cache=False, which generate() also takes from "
                    "model.generation_config or model.config: pass use_cache=True, or leave out the cache"
                )
            _refuse_another_prompt(binding.name, kind, own, inputs)
            return  # new tokens, the same on all ranks and whole: nothing is cut
        if _generates():
            raise NotImplementedError(
                f"{binding.name}: {kind} is called by generate() of transformers, which would append a token of "
                "its own to each rank's part of the sequence: give it past_key_values=prefill(model, input_ids) of "
                "cp_styles.integrations.transformers; or generate without context parallelism, with a copy of "
                "the model that has no style"
                f"{see('generate() without a cache that is cut')}"
            )
        look = self._forwards & (self._forwards - 1) == 0
        self._check_positions(kind, inputs)
        for name in self._places if look else ():
            if isinstance(inputs.get(name), torch.Tensor):
                _refuse_local(binding, name, inputs[name], _lengths(inputs))
        cached = getattr(past, "get_seq_length", None)
        if cached is not None and int(cached()) > 0:
            raise NotImplementedError(
                f"{binding.name}: {kind} is asked to go on after {int(cached())} tokens of a cache that does not know "
                "how it is cut over the ranks: decode with the cache that prefill(model, input_ids) of "
                "cp_styles.integrations.transformers returns"
            )
        if self._has_loss:
            _refuse_labels(binding.name, kind, inputs)
            if look and inputs.get("num_items_in_batch") is not None:
                _compare_counts(binding, kind, inputs["num_items_in_batch"])
        if self._window is not None:
            self._refuse_window(binding, kind, inputs)

    def _check_positions(self, kind: str, inputs: Mapping[str, Any]) -> None:
        """Raise for positions that are missing, and in this forward for torch.arange from 0 in place of them.

        torch.compile can trace it. An error ends the trace, and the forward runs uncompiled, where every rank raises.
        With fullgraph=True torch.compile raises an error that shows this one.
        """
        for name in self._positions:
            if inputs.get(name) is None:
                raise ValueError(
                    f"{self._name}: {kind} takes {name} and was given none: it would count this rank's tokens from 0. "
                    f"Pass {name}=layout.positions(rank).unsqueeze(0); or apply the style with check_inputs=False if "
                    f"the model does not use them{see('Positions that count from 0')}"
                )
        if not self._may_count and all(inputs.get(name) is None for name in self._places):
            self._calls.watch_ranges(partial(_refuse_range, self._name, kind, _lengths(inputs)))

    def check_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook: raise for results that a model computes from all tokens of this rank together.

        No communication, unless it raises.
        """
        if torch.compiler.is_dynamo_compiling() or not isinstance(output, Mapping):
            return
        binding = self._calls.binding
        if binding.group.size() == 1:
            return
        length, logits, kind = _length(self._calls.inputs), output.get("logits"), type(module).__name__
        problem = None
        if output.get("aux_loss") is not None:
            problem = NotImplementedError(
                f"{binding.name}: {kind} returns an aux_loss, the balance of experts on this rank's tokens alone, and "
                "has added it to its loss if it made one. The ranks' values do not add up to that of all tokens: set "
                "output_router_logits=False"
                f"{see('A loss for the balance of experts')}"
            )
        elif isinstance(logits, torch.Tensor) and logits.ndim == 2 and length not in (None, logits.shape[1]):
            problem = NotImplementedError(
                f"{binding.name}: {kind} returns logits of shape {tuple(logits.shape)} for {length} tokens of this "
                "rank: it has pooled them, and the pooled token is another one on each rank. Take the hidden states, "
                "and pool those of all ranks (cp_styles.collectives.gather)"
                f"{see('A classifier that pools tokens')}"
            )
        if problem is not None:
            binding.refuse_call()
            raise problem

    def _refuse_window(self, binding: Binding, kind: str, inputs: Mapping[str, Any]) -> None:
        assert self._window is not None
        name, size = self._window
        mask = inputs.get("attention_mask")
        if isinstance(mask, Mapping) or (mask is not None and getattr(mask, "ndim", 4) == 4):
            return  # the caller's own masks
        length = _length(inputs)
        if length is not None and size < length * binding.group.size():
            raise NotImplementedError(
                f"{binding.name}: layers of {kind} have {name}={size}, and the model would make their masks from this "
                f"rank's {length} tokens. Choose attn_implementation=register_attention() of "
                "cp_styles.integrations.transformers, which makes them for the whole sequence; or apply a style with "
                f"mask=SlidingWindow({size} - 1) (or Chunked({size})) to the attention modules that have it"
            )


# Hooks are traced with the module's call or not compiled at all: alone they would not see that they run uncompiled.
for _hook in (InputGuards.check, InputGuards.check_output):
    never_compile_alone(_hook, nor_what_it_calls=True)


def _generates() -> bool:
    """Whether generate() of transformers is running in this thread. Its calls look like those of any other caller."""
    return _generating() is not None


def _generating() -> FrameType | None:
    """The frame of generate() of transformers that is running in this thread."""
    if torch.is_grad_enabled():
        return None
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__", "").startswith("transformers."):
            return frame
        frame = frame.f_back
    return None


def _refuse_local(binding: Binding, name: str, positions: torch.Tensor, lengths: list[int]) -> None:
    length = positions.shape[-1] if positions.ndim else 0
    if positions.is_floating_point() or (length not in lengths and not name.endswith(POSITIONS)):
        return  # a table, or of something else than this rank's tokens
    own = torch.arange(length, device=positions.device)
    if not isinstance(binding.mask, Full | Causal | SlidingWindow) or not bool((positions == own).all()):
        return  # documents count from 0 too
    try:
        whole = length * binding.group.size()
        layout = binding.layout if isinstance(binding.layout, SequenceLayout) else binding.layout_for(whole)
        mine = layout.positions(binding.group.rank())
    except Exception:  # of a length that may not be the call's
        return
    if mine.numel() and int(mine[0]) != 0:
        raise ValueError(
            f"{binding.name}: {name} count from 0 to {length - 1} on this rank, whose part of the sequence begins "
            f"at {int(mine[0])}: pass layout.positions(rank). If these are documents that each begin at 0, say so with "
            "a SequenceScope(layout, mask=Documents(...)) around the call"
            f"{see('Positions that count from 0')}"
        )


def _refuse_another_prompt(name: str, kind: str, cache: LayerCaches, inputs: Mapping[str, Any]) -> None:
    """Raise if the prompt of generate() is not the one that was prefilled: other tokens, or other positions."""
    held, positions, new = next(iter(cache.held), None), inputs.get(POSITIONS), _length(inputs)
    if held is None:
        return
    if held.length == cache.prompt.length:
        _refuse_other_tokens(name, cache)
    if not new or not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return
    # With padding the mask says how many there are. The host need not wait for each token that follows the prompt.
    if inputs.get("attention_mask") is None and (new > 1 or held.length == cache.prompt.length) and _generates():
        last, expected = int(positions[0, -1]), held.length + new - 1
        if last != expected:
            raise ValueError(
                f"{name}: generate() gives {kind} tokens up to position {last}, but with this cache of {held.length} "
                f"positions and {new} new tokens it is {expected}: the cache is of another prompt, or was used by an "
                "earlier generate(); or this is assisted decoding, which runs the whole prompt once more whatever the "
                "cache holds. Call prefill for each prompt, go on with the whole conversation from its start, "
                "and decode without an assistant"
            )


def _refuse_other_tokens(name: str, cache: LayerCaches) -> None:
    """Raise if generate() was given another prompt. It gives the model only the last token of it."""
    known, frame = cache.tokens_BS, _generating()
    given = None if frame is None else frame.f_locals.get("input_ids")
    if known is None or not isinstance(given, torch.Tensor) or given.ndim != 2 or given.shape[0] != known.shape[0]:
        return
    length = known.shape[1]
    if given.shape[1] >= length and not torch.equal(given[:, :length].to(known.device), known):
        raise ValueError(
            f"{name}: generate() is given other tokens than the {length} of the prompt that was prefilled: the cache "
            "is of another prompt. Call prefill for each prompt"
        )


def _is_model(module: nn.Module) -> bool:
    """Whether it takes tokens as models of transformers do, and so may count them, or make masks and losses."""
    return "input_ids" in inspect.signature(type(module).forward).parameters


def _is_of_positions(name: str) -> bool:
    return any(part in name for part in ("pos", "freqs", "rotary", "cos"))


def _lengths(inputs: Mapping[str, Any]) -> list[int]:
    """What may be this rank's number of tokens: the second sizes of the model's inputs."""
    return [x.shape[1] for x in inputs.values() if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] > 1]


def _refuse_range(
    name: str, kind: str, lengths: list[int], numbers: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise if a torch.arange with these arguments counts as many tokens as this rank may have, from 0."""
    start = kwargs.get("start", args[0] if len(args) > 1 else 0)
    step = kwargs.get("step", args[2] if len(args) > 2 else 1)
    if numbers.shape[0] in lengths and start == 0 and step == 1 and not numbers.is_floating_point():
        raise NotImplementedError(
            f"{name}: {kind} makes the numbers 0 to {numbers.shape[0] - 1} inside, as many as this rank has tokens, "
            "and takes no positions or was given none: it counts this rank's tokens as if they were the first "
            "ones. Give it positions (layout.positions(rank)), or change it to take them; or apply the style with "
            f"check_inputs=False if these numbers are not positions{see('Positions that count from 0')}"
        )


never_compile_alone(_refuse_range, nor_what_it_calls=True)


def _refuse_labels(name: str, kind: str, inputs: Mapping[str, Any]) -> None:
    if inputs.get("labels") is None:
        if inputs.get("shift_labels") is not None and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {kind} is given shift_labels= and no labels=, and makes no loss then. What has taken the "
                "labels out of the batch, a label smoother for example, would shift this rank's part of them: pass "
                "labels= too; or leave out both, and take the loss from the logits (chunked_token_losses, global_loss)"
                f"{see('Labels that were taken out of the batch')}"
            )
        return
    if inputs.get("shift_labels") is None:
        raise ValueError(
            f"{name}: {kind} makes the loss from labels= by itself, on this rank's part: labels would be shifted after "
            "the cut, and the mean would be of this rank's tokens. Take the logits, and use next_token_labels, "
            "layout.shard and global_loss; or pass shift_labels= (made for the whole sequence, then cut) and "
            "num_items_in_batch= (of all ranks) too"
            f"{see('Labels inside a model')}"
        )
    if inputs.get("num_items_in_batch") is None:
        raise ValueError(
            f"{name}: {kind} would return the mean over this rank's tokens, and a mean of the ranks' means is another "
            "number: pass num_items_in_batch=global_token_count(labels, mesh) too, then each rank's loss is its share "
            "of the mean"
        )


def _compare_counts(binding: Binding, kind: str, count: Any) -> None:
    """Raise on every rank unless the ranks divide their losses by the same number."""
    ledger = ledger_of(binding.group)
    ledger.engaged = True
    number = float(count)
    said = StatusRow(q_length=int(number), inputs=zlib.crc32(repr(number).encode()))
    rows = exchange_status(lambda: said, Meeting.BATCH, binding.name, binding.axis, binding.group)
    if len({row.inputs for row in rows}) > 1:
        raise ValueError(
            f"{binding.name}: {kind} is given num_items_in_batch={number:g}, and other numbers on other ranks "
            f"({[row.q_length for row in rows]}): it is the number of labels that all ranks have together. With "
            "numbers of their own the ranks return means, and a mean of means is another number: pass "
            "global_token_count(labels, mesh); a Trainer of transformers needs average_tokens_across_devices=True"
            f"{see('A number of labels for each rank')}"
        )
    ledger.engaged = False


def _makes_masks(module: nn.Module) -> bool:
    """Whether a model of transformers chooses its masks by an implementation that sees this rank's part alone."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return implementation in ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def _smallest_window(module: nn.Module) -> tuple[str, int] | None:
    found = [
        (getattr(child, name), name)
        for child in module.modules()
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(getattr(child, name, None), int)
    ]
    config = getattr(module, "config", None)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        found.append((getattr(config, "attention_chunk_size", 0), "attention_chunk_size"))
    sizes = [(size, name) for size, name in found if size]
    return None if not sizes else (min(sizes)[1], min(sizes)[0])


def _covers(mask: Mask) -> bool:
    """Whether a style's mask contains a window or chunks."""
    parts = mask.parts if isinstance(mask, All) else (mask,)
    return any(isinstance(part, SlidingWindow | Chunked) for part in parts)


def _length(inputs: Mapping[str, Any]) -> int | None:
    for name in ("input_ids", "inputs_embeds", "hidden_states"):
        given = inputs.get(name)
        if isinstance(given, torch.Tensor) and given.ndim > 1:
            return given.shape[1]
    return None
