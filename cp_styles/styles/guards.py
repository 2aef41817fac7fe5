"""Checks around the attention calls of a model: mistakes that would give wrong numbers without an error.

Inside a ModuleContextParallel each rank has a part of the sequence. Most models are not written for that: they count
positions from 0, shift labels by one token, and make masks for the length of their input. What can be recognized by the
arguments of a model, or by its layers, is refused here, on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from cp_styles._compat import never_compile_alone, uncompiled
from cp_styles.comm.agreement import Meeting, StatusRow, meet_alike
from cp_styles.decoding import LayerCaches, cache_given, word_for_cache
from cp_styles.engine.binding import Binding
from cp_styles.intercept.function_mode import AttentionCalls, names_of_inputs, wrapped_by
from cp_styles.layout import SequenceLayout
from cp_styles.mask import All, Causal, Chunked, Full, SlidingWindow
from cp_styles.styles.model_options import loss_takes_all, makes_local_masks, padding_position, windows_of
from cp_styles.troubleshooting import see

POSITIONS = "position_ids"


def refuse_mixing_layers(model: nn.Module, name: str, local: Iterable[nn.Module]) -> None:
    """Register a hook on each layer of torch in ``model`` whose class says that it carries values from token to token.

    The hook refuses calls: the layer would end at this rank's part of the tokens. It allows layers in the modules
    ``local``; calls by a mixer of this package, which has all the rows that it needs; and new tokens after a prompt,
    which are whole on every rank.
    """
    allowed = {id(layer) for part in local for layer in part.modules()}
    for path, layer in model.named_modules():
        if isinstance(layer, _MIXING) and id(layer) not in allowed:
            layer.register_forward_pre_hook(_MixingHook(name, path or "the module itself").check)


def refuse_uneven_sequence_parallelism(model: nn.Module, name: str) -> None:
    """Register a hook on each layer of ``model`` with which torch's SequenceParallel has replicated the parameters.

    The hook refuses a number of tokens that the tensor-parallel ranks do not divide: torch takes parts for equal, and
    gloo ends the process at its next collective.
    """
    for path, layer in model.named_modules():
        parameters = list(layer.parameters(recurse=False))
        if parameters and all(isinstance(x, DTensor) and x.placements == (Replicate(),) for x in parameters):
            layer.register_forward_pre_hook(_EvenHook(name, path or "the module itself").check)


@dataclass(frozen=True)
class _EvenHook:
    name: str
    path: str

    def check(self, layer: nn.Module, args: Any) -> None:
        """A forward pre-hook. No communication: an error ends the forward, which tells the remaining ranks."""
        x = args[0] if args else None
        calls = None if torch.compiler.is_dynamo_compiling() else AttentionCalls.entered()
        if calls is None or not isinstance(x, DTensor) or len(x.placements) > 1:
            return
        ranks, dim = x.device_mesh.size(), getattr(next(iter(x.placements), None), "dim", None)
        of_rank = 0 if dim is None else x.shape[dim] // ranks  # torch has multiplied it by the number of ranks
        uneven = [n for n in _lengths(calls.inputs) if n % ranks and of_rank in (n // ranks, -(-n // ranks))]
        if not uneven:
            return
        raise ValueError(
            f"{self.name}: {self.path} ({type(layer).__name__}, with SequenceParallel of torch) is given a part of "
            f"{uneven[0]} tokens, which {ranks} tensor-parallel ranks do not divide, and torch takes their parts for "
            "equal. Pad the sequence: BatchSharder(..., pad_to_multiple_of=2 * n), with n = the context-parallel ranks "
            f"times the tensor-parallel ranks{see('A part that tensor parallelism does not divide')}"
        )


@dataclass(frozen=True)
class _MixingHook:
    name: str
    path: str

    def check(self, layer: nn.Module, args: Any) -> None:
        """A forward pre-hook. No communication: an error ends the forward, which tells the remaining ranks."""
        if not _mixes(layer):
            return
        if not torch.compiler.is_dynamo_compiling():  # else the error ends the trace, and the forward runs uncompiled
            calls = AttentionCalls.entered()
            if calls is None or calls.tally.mixing:
                return
            past = cache_given(calls.inputs)
            past = getattr(past, "self_attention_cache", past)  # beside keys of an encoder
            if isinstance(past, LayerCaches) and past.prefilled:
                return
        raise NotImplementedError(
            f"{self.name}: {self.path} ({type(layer).__name__}) carries values from token to token, and would end at "
            "this rank's part of them. Call it through context_causal_conv1d (a causal convolution) or "
            "context_recurrence of cp_styles.mixers; or gather the tokens of all ranks before it "
            "(cp_styles.collectives.gather) and cut its result. If its input is whole on each rank, as after a "
            f"gather, or what it mixes stays within a row of its input: local=[{self.path!r}] of the style"
            f"{see('A layer that mixes tokens')}"
        )


_POOLS = nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d
_MIXING = (nn.RNNBase, nn.Conv1d, nn.BatchNorm1d, nn.SyncBatchNorm, *_POOLS)


def _mixes(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv1d):
        return layer.kernel_size[0] > 1
    if isinstance(layer, nn.BatchNorm1d | nn.SyncBatchNorm):
        return layer.training or layer.running_mean is None
    return True


class Forwards:
    """Does the work of a module's hooks where they have not run: where a program calls ``model.forward``, or a model
    inside of the model (``model.model``, for hidden states); or where torch.compile has traced them, not the forward.
    """

    def __init__(self, top: nn.Module | None, calls: AttentionCalls, *, check_inputs: bool) -> None:
        """``top``: the context-parallel module."""
        self._top, self._calls, self._checks = top, calls, check_inputs
        self._guards: dict[int, InputGuards] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Forwards:
        top, calls = memo.get(id(self._top)), copy.deepcopy(self._calls, memo)  # a part of it may be copied alone
        twin = memo[id(self)] = Forwards(top, calls, check_inputs=self._checks)
        return twin

    def guards(self, module: nn.Module) -> InputGuards | None:
        """The checks of the arguments: for the context-parallel module, and for models inside it. Else None."""
        if not self._checks or (module is not self._top and not is_model(module)):
            return None
        guards = self._guards.get(id(module))
        if guards is None:
            guards = self._guards[id(module)] = InputGuards(ModelFacts.of(module), self._calls)
        return guards

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        calls: AttentionCalls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        output = None
        try:
            self._begin(module, args, kwargs)
            with calls:
                output = forward(*args, **kwargs)
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
        """``output`` is None after an exception."""
        try:
            guards = None if output is None else self.guards(module)
            if guards is not None:
                guards.check_output(module, args, output)
        finally:
            self._calls.leave(module, args, output, attends=module is self._top)


# Its frame is not compiled, because it enters a mode; the forward is.
never_compile_alone(Forwards.run)


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What the checks of a model's arguments read of its class, config and layers.

    Attributes:
        places: its arguments that are made of positions, such as rotary tables too.
        losses: the classes of models that make a loss of labels.
        padding: the position of padding tokens, if it counts positions after that.
        mask_tokens: the token ids whose share of the tokens scales its embeddings.
    """

    names: tuple[str, ...]
    positions: list[str]
    places: list[str]
    losses: list[type[nn.Module]]
    windows: list[tuple[str, Any]]
    padding: int | None
    mask_tokens: list[Any]
    embeddings: list[nn.Embedding]

    @staticmethod
    def of(module: nn.Module) -> ModelFacts:
        models = [module]  # it may be a wrapper, or a wrapper of a wrapper
        while (inner := wrapped_by(models[-1])) is not None:
            models.append(inner)
        names = [name for model in models for name in inspect.signature(type(model).forward).parameters]
        return ModelFacts(
            names_of_inputs(module),
            positions=list(dict.fromkeys(name for name in names if name.endswith(POSITIONS))),
            places=[name for name in names if any(part in name for part in _WORDS_OF_POSITIONS)],
            losses=[type(model) for model in models if hasattr(type(model), "loss_function")],
            windows=windows_of(module),
            padding=padding_position(module),
            mask_tokens=[
                # Experts of NLLB have a token_dropout too, a probability, and know no mask token.
                layer.mask_token_id
                for layer in module.modules()
                if getattr(layer, "token_dropout", False) and hasattr(layer, "mask_token_id")
            ],
            embeddings=[layer for layer in module.modules() if isinstance(layer, nn.Embedding)],
        )

    @cached_property
    def mean_of_part(self) -> bool:
        """Whether a loss that it makes is the mean over this rank's labels, whatever it is given beside them."""
        return not all(map(loss_takes_all, self.losses))


_WORDS_OF_POSITIONS = ("pos", "freqs", "rotary", "cos")


def _where_to_cut(model: nn.Module) -> str:
    """The parts of a model with a vision tower that may have the style, by their names in it."""
    for path, part in model.named_modules():
        # The text towers of CLIP and SigLIP take no embeddings, and pool their tokens: they are blocks as below.
        if path.endswith(("language_model", "text_model")) and "inputs_embeds" in names_of_inputs(part):
            return (
                "Apply the style to the language model alone, and let that cut the embeddings of the whole sequence: "
                f'parallelize_module(model, mesh, {{"{path}": ModuleContextParallel()}}); cut_inputs_of(model.{path}), '
                "of cp_styles.integrations.transformers; and call the model with the whole batch"
            )
    lists = {path: part for path, part in model.named_modules() if path and isinstance(part, nn.ModuleList)}
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    outer.sort(key=lambda path: -len(lists[path]))
    paths = " or ".join(f'{{"{path}.*": ModuleContextParallel(layout=contiguous)}}' for path in outer[:2])
    return (
        "Apply the style to its blocks alone, and let two hooks cut the tokens in front of the first block and gather "
        f"them behind the last: parallelize_module(model, mesh, {paths or 'a plan with the paths of the blocks'}), and "
        "the hooks of the page; call the model with the whole batch, and divide its loss by the number of ranks"
    )


class InputGuards:
    """Checks the arguments of a model's forward. Each module that ModuleContextParallel is applied to has one."""

    def __init__(self, facts: ModelFacts, calls: AttentionCalls) -> None:
        self._facts, self._calls, self._forwards = facts, calls, 0
        self._name, self._ranks = calls.unscoped.name, calls.unscoped.group.size()

    def check(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: raise for arguments that are not this rank's part of a whole sequence.

        The values of tensors are looked at in the first forward, the second, the fourth and so on. Communication: in
        these forwards, one all-gather of some integers if there is a ``num_items_in_batch``.
        """
        if self._ranks == 1:
            return
        kind = type(module).__name__
        for embedding in self._facts.embeddings:
            if getattr(embedding, "neftune_noise_alpha", None) and embedding.training:
                raise NotImplementedError(
                    f"{self._name}: NEFTune (neftune_noise_alpha) adds noise to the embeddings of {kind}, with random "
                    "numbers of each rank's own, and of a size that follows from this rank's number of tokens: leave "
                    "it out"
                )
        inputs = dict(zip(self._facts.names, args, strict=False)) | kwargs
        if torch.compiler.is_dynamo_compiling():
            if cache_given(inputs) is None:
                self._check_positions(kind, inputs)
                self._refuse_windows(kind, inputs)
            return
        self._forwards += 1
        past = cache_given(inputs)
        cache = getattr(past, "self_attention_cache", past)  # beside keys of an encoder
        if isinstance(cache, LayerCaches) and cache.prefilled:
            if inputs.get("use_cache") is False:
                raise ValueError(
                    f"{self._name}: {kind} was given a cache and use_cache=False, which generate() also takes from "
                    "model.generation_config or model.config: pass use_cache=True, or leave out the cache"
                )
            if cache is not past and any(layer.length for layer in cache.held) and frame_of("_prefill") is not None:
                raise ValueError(
                    f"{self._name}: {kind} is given a cache that an earlier generate() has used: call encode for "
                    "each generate()"
                )
            _refuse_another_prompt(self._name, kind, cache, inputs)
            return  # new tokens, the same on all ranks and whole: nothing is cut
        if frame_of() is not None:
            raise NotImplementedError(
                f"{self._name}: {kind} is called by generate() of transformers, which would append a token of its "
                f"own to each rank's part of the sequence: give it {word_for_cache(self._facts.names)}="
                "prefill(model, input_ids) of cp_styles.integrations.transformers; or generate without context "
                "parallelism, with a copy of the model that has no style"
                f"{see('generate() without a cache that is cut')}"
            )
        for name, value in inputs.items():
            if value is None or not name.startswith("pixel_values"):
                continue
            raise NotImplementedError(
                f"{self._name}: {kind} makes tokens of {name} inside, where its vision tower would attend as if each "
                f"rank had a part of the picture. {_where_to_cut(module)}{see('Pictures among the tokens')}"
            )
        look = self._forwards & (self._forwards - 1) == 0
        checks = [partial(self._check_positions, kind, inputs)]
        if self._facts.losses:
            checks.append(partial(_refuse_labels, self._name, kind, inputs, self._facts))
        _raise_all(self._name, checks)
        tokens, masks = inputs.get("input_ids"), self._facts.mask_tokens
        if masks and isinstance(tokens, torch.Tensor) and bool(torch.isin(tokens, tokens.new_tensor(masks)).any()):
            raise NotImplementedError(
                f"{self._name}: {kind} has token_dropout, and scales its embeddings by the share of mask tokens "
                "among this rank's tokens, which is another one on each rank: give it no mask tokens, or set "
                "token_dropout=False in its config, and train it so"
            )
        padding = self._facts.padding
        for name in self._facts.places if look else ():
            if isinstance(inputs.get(name), torch.Tensor):
                first = 0 if padding is None else padding + 1
                _refuse_local(self._calls.binding, name, inputs[name], _lengths(inputs), first)
        if look and padding is not None and not isinstance(cache, LayerCaches):  # generate() itself counts from 0
            self._refuse_positions_of_padding(kind, inputs, padding)
        cached = getattr(past, "get_seq_length", None)
        if cached is not None and int(cached()) > 0:
            raise NotImplementedError(
                f"{self._name}: {kind} is asked to go on after {int(cached())} tokens of a cache that does not know "
                "how it is cut over the ranks: decode with the cache that prefill(model, input_ids) of "
                "cp_styles.integrations.transformers returns. Learned keys in front of the tokens (prefix tuning) are "
                f"such a cache: tune a prompt, or adapters (LoRA), instead{see('Tokens in front of a part')}"
            )
        if self._facts.losses and look and inputs.get("num_items_in_batch") is not None:
            _compare_counts(self._calls.binding, kind, inputs["num_items_in_batch"])
        self._refuse_windows(kind, inputs)

    def _check_positions(self, kind: str, inputs: Mapping[str, Any]) -> None:
        # torch.compile can trace it. An error ends the trace, and the forward runs uncompiled, where every rank raises.
        # With fullgraph=True torch.compile raises an error that shows this one.
        facts = self._facts
        for name in facts.positions:
            if inputs.get(name) is None and inputs.get("inputs_embeds") is not None:
                raise ValueError(
                    f"{self._name}: {kind} is given inputs_embeds= and no {name}. A wrapper that makes them on each "
                    "rank, as for prompt tuning, puts its tokens in front of every part: make the embeddings of the "
                    'whole sequence, and cut them, BatchSharder(mesh)({"inputs_embeds": ..., "labels": ...})'
                    f"{see('Tokens in front of a part')}"
                )
            if inputs.get(name) is None:
                first = 0 if facts.padding is None else facts.padding + 1
                advice = "layout.positions(rank).unsqueeze(0)" if facts.padding is None else _POSITIONS_OF_TOKENS
                raise ValueError(
                    f"{self._name}: {kind} takes {name} and was given none: it would count this rank's tokens from "
                    f"{first}. Pass {name}={advice}, as **batch.inputs of BatchSharder does (in a context_parallel "
                    "block those of the whole sequence, as one of its buffers); or apply the style with "
                    "check_inputs=False if the model does not use them"
                    f"{see('Positions that count from 0')}"
                )

    def _refuse_positions_of_padding(self, kind: str, inputs: Mapping[str, Any], padding: int) -> None:
        positions, tokens = inputs.get(POSITIONS), inputs.get("input_ids")
        if not isinstance(positions, torch.Tensor) or not isinstance(tokens, torch.Tensor):
            return
        if positions.shape[-1] == tokens.shape[-1] and bool(((positions <= padding) & (tokens != padding)).any()):
            raise ValueError(
                f"{self._name}: {kind} counts tokens from position {padding + 1}, because {padding} is the "
                f"position of padding, but {POSITIONS} give that or a smaller one to a token. Pass "
                f"{POSITIONS}={_POSITIONS_OF_TOKENS}; or apply the style with check_inputs=False if the model was "
                f"trained with positions from 0{see('Positions after that of padding')}"
            )

    def check_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook. No communication, unless it raises."""
        if torch.compiler.is_dynamo_compiling() or self._ranks == 1:
            return
        if isinstance(output, Mapping) and output.get("aux_loss") is not None:
            binding = self._calls.binding
            binding.refuse_call()
            raise NotImplementedError(
                f"{binding.name}: {type(module).__name__} returns an aux_loss, the balance of experts on this rank's "
                "tokens alone, and has added it to its loss if it made one. The ranks' values do not add up to that of "
                f"all tokens: set output_router_logits=False{see('A loss for the balance of experts')}"
            )

    def _refuse_windows(self, kind: str, inputs: Mapping[str, Any]) -> None:
        window = next((window for window, config in self._facts.windows if makes_local_masks(config)), None)
        if window is None:
            return
        mask = inputs.get("attention_mask")
        has_masks = isinstance(mask, Mapping) or (mask is not None and getattr(mask, "ndim", 4) == 4)
        of_style = self._calls.binding.mask
        parts = of_style.parts if isinstance(of_style, All) else (of_style,)
        if has_masks or any(isinstance(part, SlidingWindow | Chunked) for part in parts):
            return
        raise NotImplementedError(
            f"{self._name}: layers of {kind} have {window}, and the model would make their masks from this rank's part "
            "of the tokens. Choose attn_implementation=register_attention() of cp_styles.integrations.transformers, "
            "which makes them for the whole sequence; or apply a style with mask=SlidingWindow(size - 1) (or "
            "Chunked(size)) to the attention modules that have it"
            f"{see('A window that a part does not show')}"
        )


# Hooks are traced with the module's call or not compiled at all: alone they would not see that they run uncompiled.
for _hook in (InputGuards.check, InputGuards.check_output, _MixingHook.check, _EvenHook.check):
    never_compile_alone(_hook, nor_what_it_calls=True)


def frame_of(function: str = "generate") -> FrameType | None:
    """The frame of a function of transformers around this call, which looks like that of any other caller."""
    if torch.is_grad_enabled():
        return None
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__", "").startswith("transformers."):
            return frame
        frame = frame.f_back
    return None


_POSITIONS = "layout.positions(rank)"
_POSITIONS_OF_TOKENS = (
    "layout.shard(position_ids_of(model, tokens), 1, rank), with the tokens of the whole sequence and position_ids_of "
    "of cp_styles.integrations.transformers"
)


def _is_whole(x: torch.Tensor) -> bool:
    """Whether it holds whole numbers, as ids and positions do. Rotary tables may be complex."""
    return not (x.is_floating_point() or x.is_complex())


def _refuse_local(binding: Binding, name: str, positions: torch.Tensor, lengths: list[int], first: int) -> None:
    length = positions.shape[-1] if positions.ndim else 0
    if not _is_whole(positions) or (length not in lengths and not name.endswith(POSITIONS)):
        return  # a table, or of something else than this rank's tokens
    rank, counted = binding.group.rank(), torch.arange(first, first + length, device=positions.device)
    start = int(positions.flatten()[0]) - first if positions.numel() else 0
    # Where the ranks do not divide a sequence, ranks before this one may hold one token more than it.
    in_order = start if rank * length <= start <= rank * (length + 1) else rank * length
    from_0 = bool((positions == counted).all()) or _rows_begin_at_0(positions)
    if not isinstance(binding.mask, Full | Causal | SlidingWindow) or not (
        from_0 or bool((positions == counted + in_order).all())
    ):
        return  # documents count from 0 too
    part = _part_of(binding, length)
    if part is None:
        return
    begin = int(part[0])
    if from_0 and begin != 0:
        remedy = f"pass {_POSITIONS_OF_TOKENS if first else _POSITIONS}"
        if positions.ndim == 3:
            remedy = "cut them with the tokens, or let cut_inputs_of of cp_styles.integrations.transformers do it"
        raise ValueError(
            f"{binding.name}: {name} count from {first} to {first + length - 1} on this rank, whose part of the "
            f"sequence begins at {first + begin}: {remedy}. "
            "If these are documents that each begin at 0, open a SequenceScope(layout, mask=Documents(...)). If all "
            "ranks have them whole, as a text beside a cut image, apply the style to the other attentions alone"
            f"{see('Positions that count from 0')}"
        )
    # Of a balancer it is a guess how many tokens the ranks before this one hold: at most one more, or one less, each.
    near = 0 if isinstance(binding.layout, SequenceLayout) else rank
    consecutive = int(part[-1]) - begin == length - 1
    if not from_0 and not (consecutive and abs(in_order - begin) <= near):
        raise ValueError(
            f"{binding.name}: {name} are {in_order} to {in_order + length - 1} on this rank, as torch.chunk cuts, but "
            f"its part of the layout begins at {begin}: cut tokens and positions with layout.shard and "
            "layout.positions of the layout of the attention, or give the attention layout=contiguous"
            f"{see('Inputs that were cut in another way')}"
        )


def _part_of(binding: Binding, length: int) -> torch.Tensor | None:
    """The positions of this rank's ``length`` tokens. Of a balancer: if all ranks hold as many. None: of no part."""
    rank, layout = binding.group.rank(), binding.layout
    with contextlib.suppress(Exception):  # of a balancer, for a length that is not the call's
        layout = layout if isinstance(layout, SequenceLayout) else binding.layout_for(length * binding.group.size())
        if length and layout.lengths[rank] == length:
            return layout.positions(rank, "cpu")
    return None


def _rows_begin_at_0(positions: torch.Tensor) -> bool:
    # Of time, height and width, [3 or 4, B, S]. Rows with padding on the left begin with some value twice. The longest
    # row of a batch has no padding.
    if positions.ndim != 3 or positions.shape[-1] < 2:
        return False
    start, second = positions[..., 0], positions[..., 1]
    padded = (start == second).all(0)
    from_0 = (start == 0).all(0) & ~padded
    return bool((from_0 | padded).all() & from_0.any())


def _refuse_another_prompt(name: str, kind: str, cache: LayerCaches, inputs: Mapping[str, Any]) -> None:
    layer, positions, new = next(iter(cache.held), None), inputs.get(POSITIONS), _length(inputs)
    if layer is None:
        return
    if layer.length == cache.prompt.length:
        _refuse_other_tokens(name, cache)
    if new is None or not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return
    # With padding the mask says how many there are. The host need not wait for each token that follows the first.
    first = not new or new > 1 or layer.length == cache.prompt.length or frame_of("_prefill") is not None
    if inputs.get("attention_mask") is None and first and frame_of() is not None:
        last, expected = int(positions[0, -1]) if positions.numel() else -1, layer.length + new - 1
        if last != expected:
            raise ValueError(
                f"{name}: generate() gives {kind} tokens up to position {last}, but with this cache of {layer.length} "
                f"positions and {new} new tokens it is {expected}: the cache is of another prompt, or was used by an "
                "earlier generate(); or this is assisted decoding, which runs the whole prompt once more whatever the "
                "cache holds. Call prefill for each prompt (where prompts begin alike, copy.deepcopy(cache) for each), "
                "go on with the whole conversation from its start, and decode without an assistant"
            )


def _refuse_other_tokens(name: str, cache: LayerCaches) -> None:
    """Raise if generate() was given another prompt. It gives the model only the last token of it."""
    prompt, frame = cache.tokens_BS, frame_of()
    tokens = None if frame is None else frame.f_locals.get("input_ids")
    if prompt is None or not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.shape[0] != prompt.shape[0]:
        return
    length = prompt.shape[1]
    if tokens.shape[1] >= length and not torch.equal(tokens[:, :length].to(prompt.device), prompt):
        raise ValueError(
            f"{name}: generate() is given other tokens than the {length} of the prompt that was prefilled: the cache "
            "is of another prompt. Call prefill for each prompt"
        )


def is_model(module: nn.Module) -> bool:
    """Whether it takes tokens as models of transformers do, and so may count them, or make masks and losses."""
    return "input_ids" in inspect.signature(type(module).forward).parameters


def _lengths(inputs: Mapping[str, Any]) -> list[int]:
    """Candidates for this rank's number of tokens: the second sizes of the model's inputs."""
    return [x.shape[1] for x in inputs.values() if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] > 1]


def _in_plain_trainer() -> bool:
    """Whether a Trainer of transformers calls the model, and no ContextParallelTrainer."""
    names, frame = set[str](), sys._getframe(1)
    while frame is not None:
        names.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return "transformers.trainer" in names and "cp_styles.integrations.trainers" not in names


def _raise_all(name: str, checks: Sequence[Callable[[], None]]) -> None:
    problems: list[ValueError] = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(error)
    if problems and _in_plain_trainer():
        raise ValueError(
            f"{name}: a Trainer of transformers calls this model, and gives each rank other samples, whole, and makes "
            "its own loss. Put ContextParallelTrainer of cp_styles.integrations.trainers before it: class "
            "LongTrainer(ContextParallelTrainer, Trainer): ..., which cuts each batch and makes positions and labels"
            f"{see('A Trainer that does not cut')}"
        )
    if len(problems) > 1:
        raise ValueError(
            f"{' And: '.join(map(str, problems))}. All of this is done by batch = BatchSharder(mesh)(batch); loss = "
            "batch.loss(model(**batch.inputs).logits); in a Trainer of transformers by ContextParallelTrainer. Make "
            "the model with attn_implementation=register_attention(): then masks of padding and windows are exact too"
        )
    for problem in problems:
        raise problem


def _refuse_labels(name: str, kind: str, inputs: Mapping[str, Any], facts: ModelFacts) -> None:
    if inputs.get("start_positions") is not None and inputs.get("end_positions") is not None:
        raise ValueError(
            f"{name}: {kind} makes the loss of start_positions= and end_positions= by itself, over this rank's tokens "
            "as classes: leave them out, gather the logits of all tokens, and take the loss of those"
            f"{see('A loss over tokens as classes')}"
        )
    if inputs.get("labels") is None:
        if inputs.get("shift_labels") is not None and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {kind} is given shift_labels= and no labels=, and makes no loss then. What has taken the "
                "labels out of the batch, a label smoother for example, would shift this rank's part of them: pass "
                "labels= too; or leave out both, and take the loss from the logits (chunked_token_losses, global_loss)"
                f"{see('Labels that were taken out of the batch')}"
            )
        return
    if inputs.get("shift_labels") is None or facts.mean_of_part:
        shifted = (
            " (its own code makes it, and knows no shift_labels=; in a Trainer of transformers override compute_loss)"
            if facts.mean_of_part
            else "; or pass shift_labels= (made before the cut) and num_items_in_batch= (of all ranks) too"
        )
        raise ValueError(
            f"{name}: {kind} makes the loss from labels= by itself, on this rank's part: labels would be shifted after "
            "the cut, and the mean would be of this rank's tokens. Cut the batch by batch = BatchSharder(mesh)(batch), "
            "with shift=False for labels that are not the next token, and take "
            f"batch.loss(model(**batch.inputs).logits){shifted}{see('Labels inside a model')}"
        )
    if inputs.get("num_items_in_batch") is None:
        raise ValueError(
            f"{name}: {kind} would return the mean over this rank's tokens, and a mean of the ranks' means is another "
            "number: with BatchSharder take batch.loss(model(**batch.inputs).logits); or pass "
            "num_items_in_batch=global_token_count(labels, mesh) too, then each rank's loss is its share of the mean"
        )


def _compare_counts(binding: Binding, kind: str, count: Any) -> None:
    number = float(count)
    where = binding.name, binding.axis, binding.group
    advice = (
        f". {kind} divides by it, and it is the number of labels that all ranks have together. With numbers of their "
        "own the ranks return means, and a mean of means is another number: pass global_token_count(labels, mesh); a "
        f"Trainer of transformers needs average_tokens_across_devices=True{see('A number of labels for each rank')}"
    )
    with binding.group_state.together():
        meet_alike(lambda: ({"num_items_in_batch": number}, StatusRow()), Meeting.BATCH, where, advice)


def _length(inputs: Mapping[str, Any]) -> int | None:
    for name in ("input_ids", "inputs_embeds", "hidden_states"):
        value = inputs.get(name)
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return value.shape[1]
    return None
