"""Refuses arguments with which a model of transformers would compute on one rank's tokens: labels, caches, windows."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from cp_styles._lib.compat import calling_frames
from cp_styles._lib.introspect import forward_parameters, input_names, list_wrapped
from cp_styles._lib.troubleshooting import see
from cp_styles.functions.decode import (
    CACHE_ARGUMENTS,
    GENERATE_ALONE,
    LayerCaches,
    cache_argument,
    find_cache,
    find_layer_caches,
)
from cp_styles.intercept.function_mode import AttentionCalls, ForwardObserver

_TOKENS = "input_ids", "inputs_embeds", "hidden_states"


class TransformersCheck(ForwardObserver):
    """Checks the arguments and outputs of a forward that is called as models of transformers are. No communication."""

    def __init__(self, module: nn.Module) -> None:
        self._names = input_names(module)
        self._makes_loss = any(hasattr(type(model), "loss_function") for model in list_wrapped(module))
        self._windows = list_windows(module)
        self._configs = [getattr(model, "config", None) for model in list_wrapped(module)]

    @classmethod
    def of(cls, module: nn.Module) -> TransformersCheck | None:
        """A check of a forward that takes tokens, labels or caches by these names; None for other forwards."""
        words = {*_TOKENS, *CACHE_ARGUMENTS, "labels", "pixel_values"}
        return cls(module) if words.intersection(forward_parameters(module)) else None

    def forward_begins(
        self, calls: AttentionCalls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise for arguments that are not this rank's part of a whole sequence."""
        binding, kind = calls.source.unscoped, type(module).__name__  # see PositionCheck.forward_begins
        if binding.group.size() == 1:
            return  # verify runs a step with one rank, on the whole sequence
        name = binding.name
        who, inputs = f"{name}: {kind}", dict(zip(self._names, args, strict=False)) | kwargs
        past = find_cache(inputs)
        if torch.compiler.is_dynamo_compiling():
            if past is None:
                self._refuse_windows(calls, kind, inputs)
            return
        cache = find_layer_caches(inputs)
        if cache is not None and cache.prefilled:
            _check_new_tokens(name, kind, inputs, cache, has_encoder=cache is not past)
            return  # new tokens are whole on every rank
        if frame_of("generate") is not None:
            raise NotImplementedError(
                f"{who} is called by generate() of transformers, which would append a token of its own to each rank's "
                f"part of the sequence: give it {cache_argument(self._names)}=prefill(model, input_ids) of "
                f"cp_styles.integrations.transformers; or {GENERATE_ALONE}"
                f"{see('generate() without a cache that is cut')}"
            )
        if pictures := [name for name, x in inputs.items() if x is not None and name.startswith("pixel_values")]:
            raise NotImplementedError(
                f"{who} makes tokens of {pictures[0]} inside, where its vision tower would attend as if each rank had "
                "a part of the picture. Apply the style to the language model alone, with "
                "cut_inputs_of(model.model.language_model) of cp_styles.integrations.transformers. To an encoder "
                "without a language model apply BackboneContextParallel"
                f"{see('Pictures among the tokens')}"
            )
        if self._makes_loss:
            _refuse_labels(who, inputs)
        cached = 0 if (length := getattr(past, "get_seq_length", None)) is None else int(length())
        if cached > 0:
            raise NotImplementedError(
                f"{who} is called with a cache of {cached} tokens that is not cut over the ranks: decode with the "
                "cache that prefill(model, input_ids) of cp_styles.integrations.transformers returns. Learned keys in "
                "front of the tokens (prefix tuning) are such a cache: tune a prompt, or adapters (LoRA), instead"
                f"{see('Tokens in front of a part')}"
            )
        tokens = next((x for x in map(inputs.get, _TOKENS) if isinstance(x, torch.Tensor) and x.ndim > 1), None)
        by_sdpa = any(getattr(config, "_attn_implementation", None) == "sdpa" for config in self._configs)
        if by_sdpa and tokens is not None and tokens.shape[1] == 1:
            raise ValueError(
                f"{who} is given one token on this rank, which transformers' sdpa attention takes for a new token that "
                "attends to all keys: take fewer ranks, or attn_implementation=register_attention() of "
                "cp_styles.integrations.transformers"
            )
        self._refuse_windows(calls, kind, inputs)

    def forward_ends(self, calls: AttentionCalls, module: nn.Module, output: Any) -> None:
        """Raise for an output whose values on the ranks do not add up to the value of one device. No communication,
        unless it raises."""
        if torch.compiler.is_dynamo_compiling() or not isinstance(output, Mapping) or output.get("aux_loss") is None:
            return
        raise NotImplementedError(
            f"{calls.unscoped.name}: {type(module).__name__} returns an aux_loss, the balance of experts on this "
            "rank's tokens alone, and has added it to its loss if it made one. The ranks' values do not add up to the "
            f"balance of all tokens: set output_router_logits=False{see('A loss for the balance of experts')}"
        )

    def _refuse_windows(self, calls: AttentionCalls, kind: str, inputs: dict[str, Any]) -> None:
        window = next((window for window, config in self._windows if makes_local_masks(config)), None)
        mask = inputs.get("attention_mask")
        if window is None or isinstance(mask, Mapping) or (mask is not None and getattr(mask, "ndim", 4) == 4):
            return
        binding = calls.source.now()[0]
        if binding.mask.local:
            return  # the style makes the window, with positions of the whole sequence
        raise NotImplementedError(
            f"{binding.name}: layers of {kind} have {window}, and the model would make their masks from this "
            "rank's part of the tokens. Choose attn_implementation=register_attention() of "
            "cp_styles.integrations.transformers, or apply a style with mask=SlidingWindow(size - 1) (or "
            "Chunked(size)) to the attention modules that have it"
            f"{see('A window that a part does not show')}"
        )


def _check_new_tokens(name: str, kind: str, inputs: dict[str, Any], cache: LayerCaches, *, has_encoder: bool) -> None:
    if inputs.get("use_cache") is False:
        raise ValueError(
            f"{name}: {kind} was given a cache and use_cache=False, which generate() also takes from "
            "model.generation_config or model.config: pass use_cache=True, or leave out the cache"
        )
    layer, first = next(iter(cache.caches), None), frame_of("_prefill") is not None
    if layer is None:
        return
    if has_encoder and layer.length and first:
        raise ValueError(
            f"{name}: {kind} was given a cache that an earlier generate() has used: call encode for each generate()"
        )
    generate, prompt = frame_of("generate"), cache.tokens_BS
    if generate is None:
        return
    tokens = generate.f_locals.get("input_ids")
    if layer.length == cache.prompt.length and prompt is not None and isinstance(tokens, torch.Tensor):
        length, begin = prompt.shape[1], tokens[:, : prompt.shape[1]].to(prompt.device)
        # generate() gives the model only the last token of its prompt. Beams repeat the rows.
        if begin.shape == prompt.shape and not torch.equal(begin, prompt):
            raise ValueError(
                f"{name}: generate() was given other tokens than the {length} of the prompt that was prefilled: the "
                "cache is of another prompt. Call prefill for each prompt"
            )
    new = next((x.shape[1] for x in map(inputs.get, _TOKENS) if isinstance(x, torch.Tensor) and x.ndim > 1), None)
    positions = inputs.get("position_ids")
    # The host need not wait for each token that follows the first.
    if new == 1 and layer.length != cache.prompt.length and not first:
        return
    # A mask counts the tokens of padded rows, and then positions are not the places in the cache.
    if new is None or inputs.get("attention_mask") is not None or positions is None or positions.ndim != 2:
        return
    last, expected = int(positions[0, -1]) if positions.numel() else -1, layer.length + new - 1
    if last != expected:
        raise ValueError(
            f"{name}: generate() gives {kind} tokens up to position {last}, but with this cache of "
            f"{layer.length} positions and {new} new tokens it is {expected}: the cache is of another prompt, was used "
            "by an earlier generate(), or an assistant decodes. Call prefill for each prompt, and decode without an "
            f"assistant{see('A cache of another prompt')}"
        )


def _refuse_labels(who: str, inputs: dict[str, Any]) -> None:
    has = {name for name, x in inputs.items() if x is not None}
    if has >= {"start_positions", "end_positions"}:
        raise ValueError(
            f"{who} makes the loss of start_positions= and end_positions= by itself, over this rank's tokens as "
            "classes: apply BackboneContextParallel in place of ModuleContextParallel, and give it the whole batch"
            f"{see('A loss over tokens as classes')}"
        )
    if "labels" in has and getattr(inputs["labels"], "ndim", 0) == 1:
        raise ValueError(
            f"{who} is given labels= with a class for each sequence, and would pool this rank's tokens: apply "
            "BackboneContextParallel in place of ModuleContextParallel, and give it the whole batch"
            f"{see('Labels of sequences')}"
        )
    if "labels" in has and "shift_labels" not in has:
        raise ValueError(
            f"{who} makes the loss from labels= by itself, on this rank's part: labels would be shifted after the cut. "
            "Cut the batch by batch = BatchSharder(mesh)(batch), and take batch.loss(model(**batch.inputs).logits); or "
            "pass shift_labels= (made before the cut) and num_items_in_batch= (of all ranks) too; in a Trainer of "
            f"transformers put ContextParallelTrainer before it{see('Labels inside a model')}"
        )
    if "labels" in has and "num_items_in_batch" not in has:
        raise ValueError(
            f"{who} would return the mean over this rank's tokens, but a mean of the ranks' means is another number: "
            "with BatchSharder take batch.loss(model(**batch.inputs).logits); or pass num_items_in_batch="
            "global_token_count(labels, mesh) too, then each rank's loss is its share of the mean"
        )


def frame_of(function: str) -> FrameType | None:
    """The frame of a running function of transformers that samples tokens: "generate", or a function that it calls."""
    # Frames, because a forward in generate() has the arguments of any other forward.
    if torch.is_grad_enabled():
        return None
    for frame in calling_frames():
        if frame.f_code.co_name == function and frame.f_globals.get("__name__", "").startswith("transformers."):
            return frame
    return None


def list_windows(module: nn.Module) -> list[tuple[str, Any]]:
    """The windows and chunks of the layers in a model, or of one attention module: "sliding_window=64", and the config.

    A user may change the attention implementation in the config later.
    """
    windows, configs = list[tuple[str, Any]](), dict[type, Any]()
    for child in module.modules():
        config, index = getattr(child, "config", None), getattr(child, "layer_idx", None)
        if configs.setdefault(type(config), child) is not child:
            continue  # the config of the model, or a copy of it
        # As in transformers: layer_types names the layers that have a window. Without it all layers have it, if the
        # class of the config has the option. A config object may also have options of other models.
        kinds = getattr(config, "layer_types", None)
        layer = index if isinstance(index, int) else None
        if kinds is not None and layer is not None:
            kinds = kinds[layer : layer + 1]
        for option, word in (("sliding_window", "sliding"), ("attention_chunk_size", "chunk")):
            size = option_of(config, option, layer)
            if not isinstance(size, int) or size <= 0:
                continue
            in_all_layers = kinds is None and option in inspect.signature(type(config)).parameters
            if in_all_layers or any(word in kind for kind in kinds or ()):
                windows.append((f"{option}={size}", config))
    return windows


def option_of(config: Any, option: str, layer: int | None = None) -> Any:
    """An option of a configuration, or None. Where its layers have their own: the option of ``layer``, or of the first
    layer that has one."""
    try:
        return getattr(config, option, None)
    except RuntimeError:  # of transformers: the layers have their own
        layers = list(config.per_layer_config)
        sizes = [getattr(each, option, None) for each in (layers if layer is None else layers[layer : layer + 1])]
        return next((size for size in sizes if size is not None), None)


def makes_local_masks(config: Any) -> bool:
    """Whether a model with this config makes its masks by functions of transformers, which see this rank's part alone,
    and not by functions that register_attention() or a user has registered."""
    implementation = getattr(config, "_attn_implementation", None)
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:  # a model of the user in the form of transformers' models
        return implementation in ("sdpa", "eager")
    function = None if implementation is None else masking.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    return getattr(function, "__module__", None) == masking.__name__
