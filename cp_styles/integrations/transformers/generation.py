"""Generation: a prompt that is cut over the ranks, and samples that each rank has alone.

Shapes: B batch, S whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles._lib.checksum import digest
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts
from cp_styles.engine.binding import Binding
from cp_styles.functions.decode import cache_argument
from cp_styles.integrations.layers import CANNOT_CONTINUE, path_without_cache
from cp_styles.integrations.transformers.attention import BUCKET, attention_function
from cp_styles.integrations.transformers.caches import TransformersCache, cache_class, encoder_keys
from cp_styles.integrations.transformers.inputs import calls_of_style
from cp_styles.layouts import contiguous
from cp_styles.styles.module import groups_of
from cp_styles.verify.step import as_one_rank


@contextmanager
def on_this_rank(model: nn.Module) -> Iterator[None]:
    """Run ``model`` in the ``with`` as without its style: on tokens that this rank has alone. Without gradients, as in
    ``torch.no_grad()``.

    ::

        with on_this_rank(model):
            completions = model.generate(**prompts_of_this_rank, max_new_tokens=64)

    For samples that each rank makes or scores by itself. Functions of this package over the ranks of the style have
    this rank alone too. Until the end of the ``with`` all calls of the model are such calls, also of other threads.
    Models have the attention that transformers gives their class by default. FSDP2 still gathers parameters in each
    forward, so let all ranks run equally many: ``synced_gpus=True`` of ``generate()``. Wrappers and adapters stay.

    No communication.

    Raises:
        ValueError: ``model`` has no ModuleContextParallel and no BackboneContextParallel.
    """
    groups = groups_of(model)
    if not groups:
        raise ValueError(
            f"on_this_rank: {type(model).__name__} has neither a ModuleContextParallel nor a BackboneContextParallel: "
            "call it as it is"
        )
    attention = import_module("transformers").AttentionInterface()
    device = next(model.parameters()).device.type
    with torch.no_grad(), ExitStack() as stack:
        for group in groups:
            mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("cp",))
            stack.enter_context(as_one_rank(mesh, mesh, is_off=True))
        models: list[Any] = [each for each in model.modules() if hasattr(each, "set_attn_implementation")]
        for each in models:
            name = each.config._attn_implementation
            if attention.get(name) is attention_function:
                each.set_attn_implementation({"": each.get_correct_attn_implementation(None)})
                stack.callback(each.set_attn_implementation, {"": name})
        yield


@torch.no_grad()
def prefill(
    model: nn.Module,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> Any:
    """Run a prompt, sharded over the ranks, and return a cache for ``generate(input_ids, cache=cache)``.

    Before 5.24 transformers calls this argument ``past_key_values``. The prefill runs all tokens except the last, whose
    logits give the first new token: ``generate()`` itself runs this token, as with any cache. Give ``generate()`` the
    whole prompt again, and the same ``attention_mask``.

    Args:
        model: a decoder under a ModuleContextParallel, with ``attn_implementation=register_attention()``.
        input_ids: [B, S], the *whole* prompt, equal on all ranks.
        attention_mask: [B, S] of the whole prompt if there is padding, on the left.
        position_ids: [B, S] of the whole prompt, if they differ from the positions that ``generate()`` computes.

    Returns:
        A ``Cache`` of transformers, of which each rank holds a shard, for this model and this prompt. It supports beam
        search, and a further prompt of the same conversation, for which every rank computes all tokens. Assisted
        decoding is refused.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then as the model's forward.

    Raises:
        ValueError, NotImplementedError: on every rank, if any rank's input is invalid or the ranks differ.
    """
    calls = calls_of_style(model, "prefill")
    binding = calls.binding
    _agree_on_prompt(binding, model, input_ids, attention_mask, position_ids)
    if attention_mask is not None:
        attention_mask = attention_mask.bool()
        if position_ids is None:  # as generate() computes them
            position_ids = (attention_mask.long().cumsum(1) - 1).masked_fill(~attention_mask, 0)
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    length = input_ids.shape[1] - 1
    if position_ids is None:
        position_ids = torch.arange(length + 1, device=input_ids.device).unsqueeze(0)
    layout = binding.layout_for(length)
    if min(layout.lengths) == 0:  # too short to shard: generate() runs the whole prompt on every rank
        layout = contiguous(0, layout.ranks)
    cache = cache_class(TransformersCache)(binding, layout, attention_mask)
    cache.last_position = int(position_ids.max())  # including the token that generate() will run
    if layout.length:
        rank, parameters = binding.group.rank(), inspect.signature(type(model).forward).parameters
        inputs: dict[str, Any] = {cache_argument(parameters): cache, "use_cache": True}
        if "position_ids" in parameters:
            inputs["position_ids"] = layout.shard(position_ids[..., :-1], -1, rank)
        if "logits_to_keep" in parameters:
            # Not a number: for that Gemma 4 cuts the queries of its last layers, and here they are of a part.
            inputs["logits_to_keep"] = torch.tensor([-1], device=input_ids.device)
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask[:, :-1]
        model(layout.shard(input_ids[:, :-1], 1, rank), **inputs)
    cache.prefilled = True
    cache.get_seq_length()  # raises if no attention has used the cache
    cache.tokens_BS = input_ids[:, : layout.length].clone()
    return cache


@torch.no_grad()
def encode(model: nn.Module, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None) -> dict[str, Any]:
    """Run the encoder of a model, sharded over the ranks, for ``generate(input_ids, **encode(model, input_ids))``.

    Each rank keeps its shard of the encoder's output, and of the keys that the decoder's cross-attention computes from
    it. The decoder's own tokens are handled as after :func:`prefill`.

    Args:
        model: an encoder with a decoder, such as T5, under a ModuleContextParallel, with
            ``attn_implementation=register_attention()``.
        input_ids: [B, S], the *whole* input of the encoder, equal on all ranks.
        attention_mask: [B, S] of the whole input if there is padding. Also give it to ``generate()``.

    Returns:
        The arguments ``encoder_outputs`` and ``cache`` of one ``generate()``, for this rank; before 5.24 of
        transformers ``past_key_values``.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then as the encoder's forward.

    Raises:
        ValueError, NotImplementedError: on every rank, if any rank's input is invalid or the ranks differ.
    """
    calls = calls_of_style(model, "encode")
    binding = calls.binding
    _agree_on_prompt(binding, model, input_ids, attention_mask, encodes=True)
    encoder: Any = model.get_encoder()  # pyright: ignore[reportCallIssue]
    layout = binding.layout_for(input_ids.shape[1])
    inputs: dict[str, Any] = {}
    if "position_ids" in inspect.signature(type(encoder).forward).parameters:
        inputs["position_ids"] = layout.positions(binding.group.rank(), input_ids.device).unsqueeze(0)
    elif not any(hasattr(module, BUCKET) for module in encoder.modules()):
        raise NotImplementedError(
            f"{binding.name}: {type(encoder).__name__} takes no position_ids, and has no biases by distance: it counts "
            "its tokens by itself, and here they are a part. Generate without context parallelism"
        )
    if min(layout.lengths) == 0:
        raise ValueError(
            f"{binding.name}: {layout.length} tokens are too few for {layout.ranks} ranks: encode without context "
            "parallelism"
        )
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    outputs = encoder(layout.shard(input_ids, 1, binding.group.rank()), **inputs)
    if not calls.forward_state.calls:
        raise NotImplementedError(
            f"{binding.name}: {type(encoder).__name__} called no attention that is context parallel"
        )
    cache = cache_class(TransformersCache)(binding, contiguous(0, layout.ranks))
    cache.prefilled = True
    caches = import_module("transformers").EncoderDecoderCache(cache, encoder_keys(binding, layout))
    return {"encoder_outputs": outputs, cache_argument(inspect.signature(type(model).forward).parameters): caches}


def _agree_on_prompt(
    binding: Binding,
    model: nn.Module,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    *,
    encodes: bool = False,
) -> None:
    tensors = {"attention_mask": attention_mask, "position_ids": position_ids}

    def describe() -> tuple[dict[str, Any], StatusRow]:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) != encodes:
            kind, other = ("a decoder alone", "prefill") if encodes else ("an encoder and a decoder", "encode")
            raise ValueError(f"{binding.name}: {type(model).__name__} has {kind}: call {other} instead")
        if (path := path_without_cache(model)) is not None:
            raise NotImplementedError(CANNOT_CONTINUE.format(f"{binding.name}: {path}"))
        if model.training:
            raise ValueError(f"{binding.name}: {type(model).__name__} is in training mode: call model.eval() first")
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ValueError(f"{binding.name}: input_ids must be the whole prompt, [B, S], got {_shape_of(tokens)}")
        for what, x in tensors.items():
            if x is not None and x.shape[-1] != tokens.shape[1]:
                raise ValueError(
                    f"{binding.name}: {what} of shape {_shape_of(x)} for a prompt of shape {_shape_of(tokens)}: "
                    "both are of the whole prompt"
                )
        if attention_mask is not None and not encodes and not bool(attention_mask[:, -1].all()):
            raise ValueError(
                f"{binding.name}: the prompt is padded on the right: pad it on the left, as generate() asks for"
            )
        compared = {"the prompt, which is cut here: pass the whole one": tokens, **tensors}
        return {what: None if x is None else (_shape_of(x), digest(x)) for what, x in compared.items()}, StatusRow()

    agree_on_facts(describe, Meeting.DECODE, (binding.name, binding.axis, binding.group))


def _shape_of(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else x
