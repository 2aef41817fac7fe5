"""Models of Hugging Face's transformers under :class:`~cp_styles.styles.ModuleContextParallel`.

transformers calls registered functions for the attention of its models and for their masks: :func:`register_attention`
registers the functions of this file. The mask function is called with this rank's lengths, for each kind of layer. It
does not evaluate the mask, but recognizes its parts (causal, a window, chunks, documents, padding), and returns a
:class:`~cp_styles.masks.Mask` of the whole sequence. A mask with other parts is refused.

Written for transformers 5. Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, S whole
sequence, D head dim, E value head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.hooks import RemovableHandle

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import checksum, digest
from cp_styles._lib.compat import uncompiled, without_function_modes
from cp_styles._lib.introspect import input_names
from cp_styles._lib.troubleshooting import see
from cp_styles.checks.positions import counts_mask, find_padding_position
from cp_styles.checks.transformers_models import frame_of, option_of
from cp_styles.collectives import gather
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts, start_status
from cp_styles.comm.checks import Checks
from cp_styles.engine.binding import Binding, refuse_dropout
from cp_styles.engine.custom_ops import attend
from cp_styles.engine.scope import open_entries
from cp_styles.functions.decode import DecodeCall, cache_argument, cache_of
from cp_styles.functions.join import join_attentions
from cp_styles.integrations.latents import note_latent, take_latents
from cp_styles.integrations.transformers_cache import EncoderKeys, TransformersCache, cache_class, encoder_keys, past_of
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layouts import SequenceLayout, contiguous
from cp_styles.masks import Causal, Chunked, Documents, Full, Mask, PerRow, SlidingWindow, WithBlocks
from cp_styles.masks.algebra import UNBOUNDED, KeyRange
from cp_styles.masks.block_mask import FlexMask
from cp_styles.masks.tree import find_tree
from cp_styles.mixers.by_name import CANNOT_CONTINUE, TOKENS_OF_GROUPS, biases_of_queries, path_without_cache
from cp_styles.mixers.compressed import KeysOfWindows, take_windows
from cp_styles.mixers.query_rows import QueryRows
from cp_styles.mixers.selection import mask_of_layer
from cp_styles.strategies import AllGather, Ulysses
from cp_styles.styles.module import calls_in, groups_of
from cp_styles.verify.step import as_one_rank


def register_attention(name: str = "context_parallel") -> str:
    """Register ``attn_implementation=name`` in transformers; returns ``name``. Further calls change nothing.

    Pass the name to ``from_config``, ``from_pretrained`` or ``model.set_attn_implementation``. The model then runs only
    under a ModuleContextParallel; for one device choose "sdpa" or "eager" instead. No communication.
    """
    import_module("transformers").AttentionInterface.register(name, _attend)
    import_module("transformers.masking_utils").AttentionMaskInterface.register(name, _make_mask)
    return name


def send_latents(model: nn.Module) -> list[RemovableHandle]:
    """Let the latents of ``model`` travel between ranks, in place of the keys and values of all heads.

    ::

        model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())
        parallelize_module(model, mesh, ModuleContextParallel())
        send_latents(model)  # on every rank, after adapters

    For models with multi-head latent attention, such as DeepSeek-V3: layers with ``expand_kv`` and ``kv_b_proj``. The
    results are the same, in the bytes of :func:`~cp_styles.context_latent_attention`. Its docstring names the price:
    each rank expands the latents that it receives. The model expands the latents of its own tokens too, for their
    rotary part alone. Decoding after ``prefill`` does not change.

    No communication.

    Args:
        model: the model, or a part of it.

    Returns:
        The handles of the hooks on ``kv_b_proj``, to remove them. Then heads travel again.

    Raises:
        ValueError: no layer of ``model`` has latents, or its attention is not the function of
            :func:`register_attention`.
        NotImplementedError: a ``kv_b_proj`` is not a plain linear layer without a bias, such as a layer with an
            adapter. In the forward, on every rank: its weight is a DTensor, or the model computes its keys in another
            way.
    """
    layers: list[tuple[str, Any]] = [
        (name, layer) for name, layer in model.named_modules() if hasattr(layer, "expand_kv")
    ]
    if not layers:
        raise ValueError(
            f"send_latents: {type(model).__name__} has no layer that expands latents (expand_kv, kv_b_proj): leave "
            "send_latents out, or call context_latent_attention in the attention of your own model"
        )
    for name, layer in layers:
        _refuse_other_attention(name, layer.config)
        up = layer.kv_b_proj
        if not isinstance(up, nn.Linear) or type(up).forward is not nn.Linear.forward or up.bias is not None:
            raise NotImplementedError(
                f"send_latents: {name}.kv_b_proj is {up}, and latents are expanded by the weight of a plain nn.Linear "
                "without a bias alone: leave send_latents out, or leave kv_b_proj out of the adapters"
            )
    hooks = [partial(note_latent, partial(_refuse_other_attention, name, layer.config)) for name, layer in layers]
    return [layer.kv_b_proj.register_forward_hook(hook) for (_, layer), hook in zip(layers, hooks, strict=True)]


def _refuse_other_attention(name: str, config: Any) -> None:
    """Raise unless the attention of the layer ``name`` is :func:`_attend`, which takes the latents."""
    implementation = config._attn_implementation
    if import_module("transformers").AttentionInterface().get(implementation) is not _attend:
        raise ValueError(
            f"send_latents: {name} attends by {implementation!r}, which sends its heads: make the model with "
            "attn_implementation=register_attention(), or call model.set_attn_implementation(register_attention())"
        )


@uncompiled
def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers: query [B, H, L, D], key [B, G, M, D] and value [B, G, M, E] of this rank
    (in decoding, keys of its part of the cache).

    ``attention_mask`` is the result of :func:`_make_mask`, or a tensor or BlockMask of the *whole* sequence. ``s_aux``
    are logits of sinks [H], ``position_bias`` learned biases by distance, as in T5, ``indices`` the keys that an
    indexer has selected. Other arguments change nothing: tests/clients/test_arguments.py lists them.
    """
    calls = _require_active_calls("attention")
    binding = calls.begin_call()
    name, past = binding.name, past_of(calls.inputs)[0]
    # One rank has all tokens: the model's own biases, keys and values.
    alone = binding.group.size() == 1 and (past is None or not past.prefilled)
    of_queries = None if position_bias is None else biases_of_queries(calls, module, position_bias)
    with binding.telling():
        biases_DH, own = None, None
        if position_bias is not None:
            biases_DH = _distance_biases(module, position_bias, attention_mask)
            is_own = alone and of_queries is None and (biases_DH is None or len(position_bias) == 1)
            own = position_bias if is_own else None
        mask: Mask = Full()
        dense: torch.Tensor | None = None
        if isinstance(attention_mask, _WholeMask):
            mask, dense = attention_mask.mask, attention_mask.padding
        elif isinstance(attention_mask, BlockMask):
            mask = FlexMask.per_row(attention_mask)
        elif isinstance(attention_mask, Mask):  # the keys that an indexer has selected
            mask = attention_mask
        elif attention_mask is not None:
            dense = attention_mask
        elif getattr(module, "is_causal", True) if is_causal is None else is_causal:
            mask = Causal()
        chosen = block_indices if indices is None else indices
        selected = None if chosen is None else mask_of_layer(chosen)
        if block_indices is not None and (dense is not None or binding.mask & mask != Causal()):
            raise NotImplementedError(TOKENS_OF_GROUPS.format(f"{name}: {type(module).__name__}"))
        mask = mask if selected is None else mask & selected
        latents, problem = take_latents(module, query, key, value)
        sink_H = s_aux.to_local() if isinstance(s_aux, DTensor) else s_aux
        score_mod = None if softcap is None else _cap_logits(softcap)
        if own is not None and (
            biases_DH is not None or sinks is not None or own.requires_grad or bool((own != 0).any())
        ):
            score_mod = _add_own_biases(own)
        elif biases_DH is not None:
            score_mod = _add_biases(biases_DH)
        elif of_queries is not None:
            score_mod = _add_biases_of_queries(of_queries)
        if block_indices is not None and selected is None and alone:
            dense, chosen = _own_block_mask(module, block_indices, query), None
        refuse_dropout(name, dropout)
        if position_bias is not None and biases_DH is own is of_queries is None and bool((position_bias != 0).any()):
            raise NotImplementedError(
                f"{name}: {type(module).__name__} adds a position_bias to its logits that was computed from this "
                "rank's lengths, as if its tokens were the first of the sequence. Only learned biases by distance, "
                "as in T5, are supported: run this model without context parallelism"
            )
        if position_bias is not None and softcap is not None:
            raise NotImplementedError(f"{name}: {type(module).__name__} has a position_bias and a softcap")
        if problem is not None:
            raise problem
        if latents is not None and (softcap is not None or position_bias is not None):
            raise NotImplementedError(
                f"{name}: {type(module).__name__} changes its logits, which send_latents does not support: leave it out"
            )
        if attention_mask is None and is_causal and calls.forward_state.layer_mask is not None:
            raise NotImplementedError(
                f"{name}: {type(module).__name__} attends without a mask, but the model made "
                f"{calls.forward_state.layer_mask} for its layers: something drops it on its way, as accelerate "
                "does with cp_size in a ParallelismConfig. Leave that out, or give the model neither padding nor "
                "packed documents"
                f"{see('A mask that is dropped')}"
            )
        if sinks is not None:
            if score_mod is None or sinks.ndim != 4:
                raise NotImplementedError(
                    f"{name}: {type(module).__name__} gives its attention sinks= of each query, which is supported "
                    "with a position_bias of each query alone, as in Inkling 2: run this model without context "
                    "parallelism"
                )
            sink_H = sinks.squeeze(-1)
        if cache is not None:
            raise NotImplementedError(f"{name}: a paged cache is not supported under context parallelism")
        if chosen is not None and selected is None:
            raise NotImplementedError(
                f"{name}: {type(module).__name__} attends to keys that an unknown indexer has selected among this "
                "rank's keys: let context_select of cp_styles.mixers select them among all keys, or give "
                "selected_keys their numbers among all keys, and call context_attention"
            )
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim != 4:
            raise ValueError(
                f"{name}: {type(module).__name__} attends with a mask of shape {tuple(attention_mask.shape)}, where a "
                "mask is [B, 1 or H, S, S] of the whole sequence"
            )
    options = {"mask": mask, "attn_mask": dense, "scale": scaling, "sink_H": sink_H, "score_mod": score_mod}

    windows = take_windows(module)
    if windows is not None:
        out_BHLE = _attend_to_windows(calls, binding.with_mask(mask), (query, key, value), windows, scaling, sink_H)
    elif past is not None and past.prefilled:
        out_BHLE = _decode(calls, binding, past, module, (query, key, value), options)
    else:
        tensors = query, key, value
        out_BHLE = calls.attend_with(binding, tensors, latents=None if alone else latents, **options)
        if past is not None:
            past.attended(getattr(module, "layer_idx", None), mask)
    return out_BHLE.transpose(1, 2).contiguous(), None


def _attend_to_windows(
    calls: AttentionCalls,
    binding: Binding,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    windows: KeysOfWindows,
    scale: float | None,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """The attention to this rank's part of the tokens, and of the keys behind them that a compressor has made."""
    query, *keys = tensors
    sizes = keys[0].shape[2] - windows.count, windows.count
    near, far = zip(*(x.split(sizes, 2) for x in keys), strict=True)
    parts = [attend(binding, (query, *near), scale=scale, wants_lse=True)[:2]]
    if windows.layout.length:
        # Selected keys stay with the queries that have selected them, and windows are few.
        strategy = AllGather(keep=0) if isinstance(binding.strategy, Ulysses) else binding.strategy
        other = calls.begin_call().with_keys(windows.layout, windows.mask, strategy)
        parts.append(attend(other, (query, *far), scale=scale, wants_lse=True)[:2])
    return join_attentions(*parts, sink_H=sink_H)[0]


def _decode(
    calls: AttentionCalls,
    binding: Binding,
    past: TransformersCache,
    module: nn.Module,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """The attention of new tokens, which are equal on all ranks."""
    query, key, value = tensors
    cache, name, expanded = cache_of(key), binding.name, None
    if cache is None and hasattr(module, "expand_kv"):  # MLA: the model computes keys and values from cached latents
        number: Any = module.layer_idx
        cache, expanded = past.layers[number], (key, value)
    elif cache is None or cache_of(value) is not cache:
        raise NotImplementedError(
            f"{name}: {type(module).__name__} changes the keys or values of its cache before it attends to them, or "
            "attends to others. It cannot decode with a cache that is cut over the ranks: generate without context "
            "parallelism"
            f"{see('A cache that a model changes')}"
        )
    assert cache is not None
    # Ranks must draw the same tokens, so the first call compares the states of their generators.
    equal_number = 0
    sampling_frame = frame_of("_sample") if calls.forward_state.calls == 1 else None
    if sampling_frame is not None and sampling_frame.f_locals.get("do_sample"):
        on_gpu = query.device.type == "cuda"
        equal_number = checksum(torch.cuda.get_rng_state(query.device) if on_gpu else torch.get_rng_state())
    call = DecodeCall(**options, equal_number=equal_number, expanded=expanded)
    out_BHLE = calls.decode_with(binding, query, cache, call)
    if cache in past.layers:
        past.attended(past.layers.index(cache), binding.mask & options["mask"])
    return out_BHLE


def _own_block_mask(module: Any, block_indices: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The mask of MiniMax M3 for the blocks that its indexer has selected, on one rank, by its own code."""
    length = query.shape[2]
    positions = torch.arange(length, device=query.device).expand(query.shape[0], -1)
    return module.indexer.build_block_mask(block_indices, None, length, query.dtype, query.device, positions)


def _distance_biases(module: nn.Module, position_bias: torch.Tensor, attention_mask: Any) -> torch.Tensor | None:
    """T5's learned biases by distance, [2 S - 1, H]: for keys S - 1 positions before the query to S - 1 after it. None
    if ``position_bias`` was not computed from a table of such biases."""
    # The first layer computes ``position_bias`` from its table, for this rank's lengths, and passes it to later layers.
    # Its values are not used: the table gives the biases for all distances of the whole sequence.
    table = getattr(module, "relative_attention_bias", None)
    if isinstance(table, nn.Embedding) and isinstance(attention_mask, _WholeMask) and hasattr(module, _BUCKET):
        length, bucket = max(attention_mask.seq_lengths), getattr(module, _BUCKET)
        options = {
            "bidirectional": not module.is_decoder,
            "num_buckets": module.relative_attention_num_buckets,
            "max_distance": module.relative_attention_max_distance,
        }
        parameters = inspect.signature(bucket).parameters  # UMT5's function takes none of the options
        with torch.no_grad():
            distances_D = torch.arange(1 - length, length, device=table.weight.device)
            buckets_D = bucket(distances_D, **{name: x for name, x in options.items() if name in parameters})
        facts_about(position_bias)[_distance_biases] = table(buckets_D)
    return facts_about(position_bias).get(_distance_biases)


_BUCKET = "_relative_position_bucket"


def _add_biases(biases_DH: torch.Tensor) -> Callable[..., torch.Tensor]:
    zero = biases_DH.shape[0] // 2

    def add(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return score + biases_DH[kv_idx - q_idx + zero, h]

    return add


def _add_own_biases(position_bias: torch.Tensor) -> Callable[..., torch.Tensor]:
    rows = len(position_bias)

    def add(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return score + position_bias[b if rows > 1 else 0, h, q_idx, kv_idx]

    return add


def _add_biases_of_queries(biases: QueryRows) -> Callable[..., torch.Tensor]:
    reach = biases.rows.shape[3]

    def add(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        distance = q_idx - kv_idx
        near = (distance >= 0) & (distance < reach)
        return score + torch.where(near, biases[b, h, q_idx, distance.clamp(0, reach - 1)], 0.0)

    return add


def _cap_logits(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@uncompiled
@torch.no_grad()
def _make_mask(
    batch_size: int,
    q_length: int,
    q_offset: int | torch.Tensor = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> _WholeMask:
    """The mask function of transformers: ``mask_function`` and ``attention_mask`` as a mask of the whole sequence.

    ``attention_mask`` is [B, S] of the *whole* sequence; or this rank's shard if it is True everywhere. ``q_offset`` is
    the number of tokens in a cache: 0, or the length of a cache of :func:`prefill`.

    Communication: one all-gather of some integers; and one of position ids, if any rank's position ids are not the
    positions of one sequence.
    """
    calls = AttentionCalls.current()
    if calls is None:  # in front of the blocks, where a BackboneContextParallel leaves the sequence whole
        return _make_whole_mask(batch_size, q_length, int(q_offset), mask_function, attention_mask, config)
    past, encoder = past_of(calls.inputs)
    with without_function_modes():
        if past is not None and past.prefilled:
            mask, padding, length = _make_mask_of_new(calls, past, encoder, q_length, mask_function, attention_mask)
            return _WholeMask(mask, padding, batch_size, length)
        of_call = (batch_size, q_length, int(q_offset)), mask_function, attention_mask, config
        mask, padding, length = _make_prompt_mask(calls, *of_call)
    whole_mask = _WholeMask(mask, padding, batch_size, length)
    if padding is not None or mask not in (Full(), Causal()):
        calls.forward_state.layer_mask = whole_mask
    return whole_mask


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
            if attention.get(name) is _attend:
                each.set_attn_implementation({"": each.get_correct_attn_implementation(None)})
                stack.callback(each.set_attn_implementation, {"": name})
        yield


def position_ids_of(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The positions that ``model`` gives to the tokens of whole sequences on one device. Shard them with the tokens.

    ::

        position_ids = layout.shard(position_ids_of(model, tokens), 1, rank)

    Most models count from 0. RoBERTa's family, ESM and MPNet count from the position after the position of padding, and
    do not count padding. OPT and BioGPT count the tokens that ``attention_mask`` shows. No communication.

    Args:
        model: a model of transformers.
        input_ids: [B, S], the tokens of whole sequences.
        attention_mask: [B, S], 0 for padding. None: no padding.

    Returns:
        Positions, [B, S].
    """
    if attention_mask is not None and counts_mask(model):
        return attention_mask.cumsum(1) * attention_mask - 1
    padding = find_padding_position(model)
    if padding is not None:
        present = (input_ids != padding).long()
        return present.cumsum(1) * present + padding
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)


# The sequence dim of each argument of a language model. None: every rank needs the whole argument.
_SEQ_DIMS = {
    **dict.fromkeys(("input_ids", "inputs_embeds", "visual_pos_masks", "per_layer_inputs"), 1),
    "position_ids": -1,
    "attention_mask": None,
}


def cut_inputs_of(language_model: nn.Module) -> RemovableHandle:
    """Let the language model in a vision-language model shard its inputs, which are whole after the vision tower.

    ::

        parallelize_module(model, mesh, {"model.language_model": ModuleContextParallel()})
        cut_inputs_of(model.model.language_model)
        logits = model(input_ids=tokens, pixel_values=pixel_values).logits  # whole inputs, logits of this rank's part

    Every rank runs the vision tower on all pictures. As for any parameter, its gradients are shares: sum them.
    No communication. The inputs of the whole model must be equal on all ranks: BatchSharder compares them.

    Args:
        language_model: the module with the ModuleContextParallel, whose layout shards the inputs.

    Returns:
        The handle of a forward pre-hook, to remove it.

    Raises:
        ValueError: ``language_model`` has no style.
        NotImplementedError: ``language_model`` is a text tower, as in CLIP and SigLIP, which pools its tokens. In the
            forward: a tensor may or may not have a sequence dim.
    """
    calls = _calls_in(language_model, "cut_inputs_of")
    if "inputs_embeds" not in input_names(language_model):
        raise NotImplementedError(
            f"{calls.binding.name}: {type(language_model).__name__} takes no inputs_embeds, so it is no language model "
            "among whose tokens pictures are put. A text tower pools its tokens, and would pool this rank's tokens "
            f"alone: apply BackboneContextParallel to the whole model{see('Pictures among the tokens')}"
        )

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        inputs: dict[str, Any] = dict(zip(input_names(module), args, strict=False)) | kwargs
        tokens: torch.Tensor = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        layout, rank = calls.binding.layout_for(tokens.shape[1]), calls.binding.group.rank()
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = torch.arange(layout.length, device=tokens.device).unsqueeze(0)
        pictures, features = inputs.get("visual_pos_masks"), inputs.pop("deepstack_visual_embeds", None)
        unknown = [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in _SEQ_DIMS]
        if unknown:
            raise NotImplementedError(
                f"{calls.binding.name}: {type(module).__name__} was given {unknown}, and it is not known how to cut "
                "them: cut the embeddings yourself, and call the language model with this rank's part of all arguments"
            )
        cuts = [(name, dim) for name, dim in _SEQ_DIMS.items() if dim is not None and inputs.get(name) is not None]
        part: dict[str, Any] = {name: layout.shard(inputs[name], dim, rank).contiguous() for name, dim in cuts}
        if pictures is not None and features is not None:  # features have one row for each token of a picture, in order
            rows = layout.shard(pictures.flatten().cumsum(0).view_as(pictures) - 1, 1, rank)[part["visual_pos_masks"]]
            part["deepstack_visual_embeds"] = [feature[rows] for feature in features]
        return (), inputs | part

    return language_model.register_forward_pre_hook(cut, with_kwargs=True, prepend=True)


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
    calls = _calls_in(model, "prefill")
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
    calls = _calls_in(model, "encode")
    binding = calls.binding
    _agree_on_prompt(binding, model, input_ids, attention_mask, encodes=True)
    encoder: Any = model.get_encoder()  # pyright: ignore[reportCallIssue]
    layout = binding.layout_for(input_ids.shape[1])
    inputs: dict[str, Any] = {}
    if "position_ids" in inspect.signature(type(encoder).forward).parameters:
        inputs["position_ids"] = layout.positions(binding.group.rank(), input_ids.device).unsqueeze(0)
    elif not any(hasattr(module, _BUCKET) for module in encoder.modules()):
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


def _calls_in(model: nn.Module, function: str) -> AttentionCalls:
    calls = calls_in(model)
    if calls is None:
        raise ValueError(
            f"{function}: {type(model).__name__} has no ModuleContextParallel: apply the style first "
            "(parallelize_module(model, mesh, ModuleContextParallel())); on one device call generate() alone"
        )
    return calls


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


class _ComputesWithMaskError(NotImplementedError, AttributeError):
    """Also an AttributeError, because models call hasattr on masks."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this model computes with its attention mask ({what}): its attention is written in plain operations and "
            "knows no attention interface of transformers (RemBERT, MPT, Mvp, TrOCR and LED for example), so each rank "
            "would attend to its own tokens. It cannot be context parallel without a change of its code: let its "
            "attention call scaled_dot_product_attention"
        )


class _WholeMask(BlockMask):
    """A mask of the whole sequence that a model passes to its layers.

    It is a BlockMask, because models pass only tensors and BlockMasks on unchanged. ``padding`` is bool [B, 1, 1, S],
    True for keys to attend to; None if there is no padding.
    """

    def __init__(self, mask: Mask, padding: torch.Tensor | None, batch: int, length: int) -> None:
        self.mask = mask
        self.padding = padding
        self.seq_lengths = length, length
        self._batch = batch

    @property
    def shape(self) -> tuple[int, int, int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(rows of the batch, 1, queries, keys), of the whole sequence."""
        return self._batch, 1, *self.seq_lengths

    def to(self, *args: Any, **kwargs: Any) -> _WholeMask:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This mask, for any ``args`` and ``kwargs``: its positions are on the host."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Raises for attributes of tensors, with which a model would compute."""
        if name == "dtype":
            return self[0]
        if hasattr(torch.Tensor, name):
            raise _ComputesWithMaskError(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getitem__(self, index: Any) -> BlockMask:
        """This mask, if ``index`` keeps all of it. Head 0 is all heads, to which one mask is given."""
        parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        whole = [_keeps_all(part, size) for part, size in zip(parts, self.shape, strict=False)]
        if len(whole) == len(parts) and all(whole[:1] + whole[2:]) and (all(whole) or parts[1] == 0):
            return self
        raise NotImplementedError(
            f"this model cuts its attention mask itself ({index}), and here the mask is of the whole sequence: it is "
            "not supported through transformers' attention interface. If logits_to_keep=n asks for it, as in Gemma 4, "
            "leave that out, or give it as a tensor of positions"
        )

    def __and__(self, selected: Mask) -> _WholeMask:
        """This mask with the keys that an indexer has selected."""
        return _WholeMask(self.mask & selected, self.padding, self._batch, self.seq_lengths[0])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _ComputesWithMaskError(func.__name__)

    def __repr__(self) -> str:
        padding = None if self.padding is None else tuple(self.padding.shape)
        return f"WholeMask({self.mask!r}, padding={padding}, shape={self.shape})"

    __str__ = __repr__


def _keeps_all(part: Any, size: int) -> bool:
    """Whether an index of one dim keeps all of it."""
    return isinstance(part, slice) and part.indices(size) == (0, size, 1)


@dataclass
class _MaskPieces:
    """The parts of a mask function.

    Attributes:
        masks: masks that do not depend on rows or documents.
        chunk: size of chunks, counted from each row's first token that is not left padding, or in each document.
        documents: the number of the document of each token [B, L], if transformers has found more than one.
        widened: masks in addition to which each token sees its own block.
        blocks: for each row, or for all, the first position and the end of each block. Empty: no blocks.
        numbered: the number of tokens of which it is known whether they are in a block.
        unpacked: the error of packed documents; empty if there is none.
    """

    masks: list[Mask]
    chunk: int | None = None
    documents: torch.Tensor | None = None
    widened: Sequence[Mask] = ()
    blocks: Sequence[tuple[tuple[int, int], ...]] = ()
    numbered: int = 0
    unpacked: str = ""

    @property
    def packed(self) -> bool:
        return self.documents is not None

    @property
    def causal(self) -> bool:
        return Causal() in (*self.masks, *self.widened)

    @property
    def unmasked(self) -> bool:
        """Whether every token sees every key, but for padding and documents, as in cross-attention."""
        return not (self.masks or self.widened) and self.chunk is None


def _require_active_calls(what: str, config: Any = None) -> AttentionCalls:
    calls = AttentionCalls.current()
    if calls is None:
        masks = import_module("transformers.masking_utils")
        word = cache_argument(inspect.signature(masks.create_causal_mask).parameters)
        ready = "" if config is None else _describe_ready_masks(config)
        ready = ready and f"; if its language model has it, give the model {ready}"
        raise RuntimeError(
            f"a model asks for {what} with attn_implementation of cp_styles, outside of a ModuleContextParallel: apply "
            f"the style to the model (parallelize_module(model, mesh, ModuleContextParallel())){ready}. Or choose "
            'attn_implementation="sdpa" for one device; models that were made of one config object share it, so each '
            f"needs a copy.deepcopy(config). generate() with a static cache: give it {word}=prefill(model, input_ids)"
        )
    return calls


def _describe_ready_masks(config: Any) -> str:
    """The form of a user's masks that a model takes: one mask for all layers, or one for each kind of layer."""
    kinds, window = sorted(set(getattr(config, "layer_types", None) or ())), option_of(config, "sliding_window")
    tensor = "boolean tensor [B, 1, S, S] of the whole sequence"
    within = f", the mask & (query - key < {window}) for layers with a window" if window else ""
    if len(kinds) < 2:
        return f"attention_mask as a {tensor}{within}"
    return (
        f"attention_mask as a dict with a {tensor} for each kind of its layers, {kinds}{within} (a tensor alone would "
        "be the mask of all layers, without their windows)"
    )


def _parse_mask_function(mask_function: Callable[..., Any], name: str, config: Any = None) -> _MaskPieces:
    """The parts of a mask function of transformers.masking_utils, by the names of its functions and their closures."""
    pieces = _MaskPieces([])
    for function, in_documents in _conjuncts(mask_function):
        closure = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        what = function.__qualname__.split(".")[0] if function.__module__ == "transformers.masking_utils" else ""
        if what == "causal_mask_function":
            pieces.masks.append(Causal())
        elif what == "bidirectional_mask_function":
            pass
        elif what == "sliding_window_overlay":
            window = closure["sliding_window"]
            # 0 if the configuration disables the window. No layer uses this mask then: it hides everything.
            pieces.masks.append(SlidingWindow(window - 1, None) if window > 0 else KeyRange(0, 0))
        elif what == "sliding_window_bidirectional_overlay":
            pieces.masks.append(SlidingWindow(closure["sliding_window"], closure["sliding_window"]))
        elif what == "chunked_overlay":
            pieces.chunk = closure["chunk_size"]
        elif what == "packed_sequence_mask_function":
            pieces.documents = closure["packed_sequence_mask"]
        elif what == "or_masks" and (ids := _find_block_ids(function)) is not None:
            inner = _parse_mask_function(closure["mask_functions"][0], name, config)
            blocks = None
            if inner.causal and inner.chunk is None and not (inner.packed or inner.blocks or pieces.blocks):
                blocks = _find_blocks(ids)
            if blocks is None:
                raise NotImplementedError(
                    f"{name}: in the mask of this model tokens of one block see each other, and the block has a gap, "
                    "as several pictures that see each other (Molmo 2), or no causal mask is joined to it: that is no "
                    f"interval of keys for each query. Give the model its masks ready, {_describe_ready_masks(config)}"
                )
            pieces.widened, pieces.blocks, pieces.numbered = inner.masks, blocks, ids.shape[1]
            if in_documents:
                pieces.unpacked = (
                    f"{name}: in packed documents transformers finds the tokens of a picture, which see each other, by "
                    "positions within documents, where other tokens are. Give the model its masks ready, "
                    f"{_describe_ready_masks(config)}"
                )
        else:
            raise NotImplementedError(
                f"{name}: the mask of this model has a piece {function.__module__}.{function.__qualname__} that is not "
                "known, and it cannot be evaluated on this rank's part alone. Give the model its masks ready, "
                f"{_describe_ready_masks(config)}"
            )
    return pieces


def _conjuncts(function: Callable[..., Any], in_documents: bool = False) -> Iterator[tuple[Any, bool]]:
    """The mask functions that ``function`` combines by "and", each with whether it is given positions in documents."""
    what = getattr(function, "__qualname__", "").split(".")[0]
    closure = inspect.getclosurevars(function).nonlocals if what in _COMBINED else {}
    if what == "and_masks":
        for part in closure["mask_functions"]:
            yield from _conjuncts(part, in_documents)
    elif what == "remap_positions_for_packed_sequence":
        yield from _conjuncts(closure["mask_function"], True)
    elif what == "or_masks" and (ids := _find_block_ids(function)) is not None and bool((ids < 0).all()):
        yield from _conjuncts(closure["mask_functions"][0], in_documents)
    else:
        yield function, in_documents


_COMBINED = "and_masks", "or_masks", "remap_positions_for_packed_sequence"


def _find_block_ids(function: Callable[..., Any]) -> torch.Tensor | None:
    """The number of the block of each token, if ``function`` is a mask or tokens of one block. None for others."""
    if getattr(function, "__qualname__", "").split(".")[0] != "or_masks":
        return None
    _, *others = inspect.getclosurevars(function).nonlocals["mask_functions"]
    if [getattr(each, "__qualname__", "").split(".")[0] for each in others] != ["blockwise_overlay"]:
        return None
    return inspect.getclosurevars(others[0]).nonlocals["block_sequence_ids"]


def _find_blocks(ids_BS: torch.Tensor) -> list[tuple[tuple[int, int], ...]] | None:
    """For each row, the first position and the end of the tokens of each number; -1 is none. None if the
    tokens of a number are not consecutive."""
    rows = list[tuple[tuple[int, int], ...]]()
    for row in ids_BS.cpu():
        ids, lengths = row.unique_consecutive(return_counts=True)
        ends, inside = lengths.cumsum(0), ids >= 0
        if ids[inside].unique().numel() < int(inside.sum()):
            return None
        rows.append(tuple(zip((ends - lengths)[inside].tolist(), ends[inside].tolist(), strict=True)))
    return rows


def _for_rows(rows: Sequence[Mask]) -> Mask:
    """The mask of a batch with a mask for each row."""
    return rows[0] if all(row == rows[0] for row in rows) else PerRow(tuple(rows))


# The mask, the padding that the mask does not contain, and the length of the whole sequence.
_MaskPaddingLength = tuple[Mask, torch.Tensor | None, int]
# Flags of a rank's row in the meeting: properties of its positions and of its padding. Above them is the number of
# tokens whose blocks it was given.
_AS_LAID_OUT, _PACKED, _JUMPS, _MASKED, _FROM_ZERO = 1, 2, 4, 8, 16
_FLAGS = 5


def _make_prompt_mask(
    calls: AttentionCalls,
    sizes: tuple[int, int, int],
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    config: Any,
) -> _MaskPaddingLength:
    """The mask of sharded tokens. ``sizes``: rows of the batch, tokens of this rank, tokens of a cache."""
    binding, (batch, length, offset) = calls.binding, sizes
    name, group = binding.name, binding.group
    pieces = _MaskPieces([])
    positions_BL: torch.Tensor | None = None

    def build() -> StatusRow:
        nonlocal pieces, positions_BL
        if offset:
            raise NotImplementedError(
                f"{name}: the model is asked to go on after {offset} tokens of a cache that does not know how it "
                "is cut over the ranks: decode with the cache that prefill(model, input_ids) of "
                "cp_styles.integrations.transformers returns"
            )
        pieces = _parse_mask_function(mask_function, name, config)
        flags = _MASKED * (attention_mask is not None and not bool(attention_mask.all()))
        if attention_mask is None and pieces.causal:
            inputs = (calls.inputs.get(name) for name in ("decoder_position_ids", "position_ids"))
            candidates = (_find_text_positions(x, batch, length) for x in inputs)
            positions_BL = next((x for x in candidates if x is not None), None)
        if positions_BL is None and pieces.packed:
            raise ValueError(
                f"{name}: transformers has found packed documents in position ids that the model has made itself, from "
                "this rank's part: give the model position_ids of this rank's tokens (layout.positions(rank))"
            )
        guess = 0
        if positions_BL is not None:
            device = positions_BL.device
            whole, layout = _infer_length(binding, length)
            laid_out = False
            if layout is not None:
                laid_out = bool((positions_BL == _expected_positions(binding, layout, device)).all())
            flags |= _AS_LAID_OUT * laid_out
            counted_BL = torch.arange(length, device=device) + (positions_BL[:, :1] == 1).long()
            flags |= _FROM_ZERO * bool((positions_BL == counted_BL).all())
            flags |= _JUMPS * bool((positions_BL.diff(dim=1) != 1).any())
            guess = whole << 1 | 1  # the whole length for which _AS_LAID_OUT was tested
        flags |= _PACKED * pieces.packed | pieces.numbered << _FLAGS
        width = 0 if attention_mask is None else attention_mask.shape[1]
        return StatusRow(q_length=length, kv_length=width, numbers=(guess, flags))

    rows = start_status(build, Meeting.MASK, name, binding.axis, group)()
    whole = sum(row.q_length for row in rows)
    guesses, flags = rows.columns.numbers
    if numbered := {flag >> _FLAGS for flag in flags} - {0, whole}:
        raise ValueError(
            f"{name}: tokens of one picture see each other, and which tokens these are was given for {min(numbered)} "
            f"of {whole} tokens: give every rank token_type_ids or mm_token_type_ids of the whole sequence, "
            'BatchSharder(mesh, seq_dims={"token_type_ids": None}); or apply the style to the language model alone, '
            f"with cut_inputs_of{see('Pictures among the tokens')}"
        )
    if any(flag & _MASKED for flag in flags):
        _refuse_partial_padding(name, attention_mask, [row.kv_length for row in rows], length, whole, pieces)
    else:
        attention_mask = None
    documents, tree = None, find_tree(binding.mask)
    laid_out = all(flag & _AS_LAID_OUT for flag in flags) and {guess >> 1 for guess in guesses} == {whole}
    if positions_BL is not None and all(guesses) and not laid_out:
        if tree is not None and tree.length == whole:  # the attention refuses a tree of another length
            raise ValueError(f"{name}: {_NOT_IN_ROLLOUTS}, each rank its part, as BatchSharder does")
        layout, lengths = binding.layout_for(whole), [row.q_length for row in rows]
        if tuple(lengths) != layout.lengths:
            raise ValueError(
                f"{name}: the ranks hold {lengths} positions, but the layout gives them {list(layout.lengths)}: cut "
                "the inputs with the layout that the attention uses"
            )
        positions_BS = gather(
            positions_BL, 1, group, reduce_gradients=False, layout=layout, checks=Checks(agreement=False)
        ).cpu()
        alone = len(rows) > 1 and all(flag & _FROM_ZERO for flag in flags)
        packed, jumps = (any(flag & kind for flag in flags) for kind in (_PACKED, _JUMPS))
        known = [row.documents for row in binding.mask.rows]
        documents = _find_documents(name, positions_BS, alone, packed, jumps, known)
    return *_build_mask(pieces, documents, attention_mask, whole), whole


_NOT_IN_ROLLOUTS = (
    "position_ids are not the positions in the rollouts of the Tree that a SequenceScope or a style has as its mask: "
    "give tree.position_ids"
)


def _expected_positions(binding: Binding, layout: SequenceLayout, device: torch.device) -> torch.Tensor:
    """The positions of this rank's tokens: in the sequence, or in the rollouts of a tree."""
    positions, tree = layout.positions(binding.group.rank(), device), find_tree(binding.mask)
    return positions if tree is None or tree.length != layout.length else tree.position_ids.to(device)[positions]


def _make_whole_mask(
    batch: int,
    length: int,
    offset: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    config: Any,
) -> _WholeMask:
    """The mask of a whole sequence, outside of modules with a style. No communication. If the sequence was a part, the
    attention raises."""
    name = "a mask outside of context-parallel modules"
    if offset:
        raise NotImplementedError(
            f"{name}: the model goes on after {offset} tokens of a cache: decode without the style"
        )
    pieces, documents = _parse_mask_function(mask_function, name, config), None
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    tree = find_tree(*(entry.scope.mask for entry in open_entries.get() if not entry.ended))
    if tree is not None and attention_mask is None and pieces.causal:
        # transformers numbers the runs of positions, and takes each for a document.
        runs = (tree.position_ids.diff(prepend=tree.position_ids.new_zeros(1) - 1) != 1).cumsum(0)
        found = runs.new_zeros(length) if pieces.documents is None else pieces.documents.cpu()
        if tree.length == length and bool((found != runs).any()):
            raise ValueError(f"{name}: {_NOT_IN_ROLLOUTS}")
    elif pieces.documents is not None and attention_mask is None:
        edges = torch.nn.functional.pad(pieces.documents.cpu().diff(dim=1) != 0, (1, 1), value=True)
        documents = [tuple(row.nonzero().flatten().diff().tolist()) for row in edges]
    mask, padding = _build_mask(pieces, documents, attention_mask, length)
    if attention_mask is not None and padding is None:
        mask = mask & Documents((length,))  # ranges of keys name no length
    return _WholeMask(mask, padding, batch, length)


def _make_mask_of_new(
    calls: AttentionCalls,
    past: TransformersCache,
    encoder: EncoderKeys | None,
    length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
) -> _MaskPaddingLength:
    """The mask of tokens that follow a prefilled prompt. No communication: the inputs are equal on all ranks."""
    name, whole = calls.binding.name, past.get_seq_length() + length
    pieces = _parse_mask_function(mask_function, name)
    if pieces.blocks:
        raise NotImplementedError(
            f"{name}: tokens of one picture see each other, and prefill has run the prompt without pictures: generate "
            "without context parallelism"
        )
    crosses = encoder is not None and pieces.unmasked
    if encoder is not None and crosses:
        whole = encoder.prompt.length
        attention_mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    if attention_mask is not None and attention_mask.shape[1] != whole:
        raise ValueError(
            f"{name}: attention_mask of shape {tuple(attention_mask.shape)}, where the prompt and the new tokens, "
            f"or the encoder's, are {whole}: give the mask of all of them"
        )
    if not crosses:
        past.check_padding(attention_mask)
    return *_build_mask(pieces, None, attention_mask, whole), whole


def _find_text_positions(ids: Any, batch: int, length: int) -> torch.Tensor | None:
    """The position ids [B, L] in which transformers searches documents, from the argument of the model. None if it has
    another shape."""
    if not isinstance(ids, torch.Tensor):
        return None
    if ids.ndim == 3 and ids.shape[0] == 4:  # text, time, height and width
        ids = ids[0]
    if ids.ndim == 1:
        ids = ids.unsqueeze(0)
    if ids.ndim != 2 or ids.shape[1] != length or ids.shape[0] not in (1, batch):
        return None
    return ids.expand(batch, length)


def _infer_length(binding: Binding, length: int) -> tuple[int, SequenceLayout | None]:
    """The probable length of the whole sequence, and its layout if that gives this rank ``length`` tokens."""
    if isinstance(binding.layout, SequenceLayout):
        whole = binding.layout.length
    else:
        lengths = {q: whole for (q, _), (whole, _) in binding.forwards.lengths.items()}
        whole = lengths.get(length, length * binding.group.size())
    try:
        layout = binding.layout_for(whole)
    except Exception:  # a balancer may refuse this length, which is a guess
        return whole, None
    return whole, layout if layout.lengths[binding.group.rank()] == length else None


def _find_documents(
    name: str, positions_BS: torch.Tensor, alone: bool, packed: bool, jumps: bool, known: list[tuple[int, ...] | None]
) -> list[tuple[int, ...]] | None:
    """The lengths of the documents in each row: documents begin where positions restart. None: one document a row.

    ``known``: the documents of the mask of the scope or the style, for each row or for all rows.
    """
    begins = positions_BS.diff(dim=1) != 1
    if not begins.any():
        return None
    edges = torch.nn.functional.pad(begins, (1, 1), value=True)  # before the first token, and behind the last
    found = [tuple(row.nonzero().flatten().diff().tolist()) for row in edges]
    if found == (known if len(known) > 1 else known * len(found)):  # such as one whole document on each rank
        return found
    if alone:
        raise ValueError(
            f"{name}: on every rank position_ids count from 0 or 1 to the end of its part, as if no other rank had "
            "a part: give each rank the positions of its own tokens, layout.positions(rank)"
        )
    first_BS = (positions_BS[:, :1] == 1).long().expand_as(begins)  # all documents of a row may begin at 1
    starts, first = positions_BS[:, 1:][begins], first_BS[begins]
    if (wrong := (starts != 0) & (starts != first)).any():
        odd = int(starts[wrong][0])
        raise ValueError(
            f"{name}: position_ids neither count on nor restart in the order of the sequence (one goes on at "
            f"{odd}): cut them with the layout that the attention uses, layout.shard or layout.positions(rank). Tokens "
            f"that a wrapper puts in front must be there before the cut{see('Tokens in front of a part')}"
        )
    if not packed:
        if jumps:  # transformers does not separate documents in this call: the model has a cache
            return None
        raise ValueError(
            f"{name}: position_ids restart where a rank's part begins, and nowhere else, so it is not known whether "
            "transformers separates these documents: give them as a SequenceScope's mask, and count positions on"
        )
    return found


def _refuse_partial_padding(
    name: str, attention_mask: torch.Tensor | None, widths: list[int], length: int, whole: int, pieces: _MaskPieces
) -> None:
    """Raise for padding that does not cover the whole sequence. The attention checks keys of another sequence."""
    others = pieces.unmasked and len(set(widths)) == 1 and widths[0] != length
    if others or all(width == whole for width in widths):
        return
    shape = None if attention_mask is None else tuple(attention_mask.shape)
    raise ValueError(
        f"{name}: attention_mask of shape {shape} marks padding, and this rank holds {length} of {whole} tokens: give "
        f"every rank the mask of the whole sequence, [B, {whole}], which is no buffer of a context_parallel block"
    )


def _build_mask(
    pieces: _MaskPieces, documents: list[tuple[int, ...]] | None, attention_mask: torch.Tensor | None, length: int
) -> tuple[Mask, torch.Tensor | None]:
    """The mask, and the padding [B, 1, 1, S] that the mask cannot express."""
    common = reduce(Mask.__and__, pieces.masks, Full())
    if pieces.blocks:
        inner = reduce(Mask.__and__, pieces.widened)
        of_rows = [WithBlocks(inner, blocks, pieces.numbered) if blocks else inner for blocks in pieces.blocks]
        common = common & _for_rows(of_rows)
    chunk, padding = pieces.chunk, None
    rows: list[Mask] = []
    if documents is not None and pieces.unpacked:
        raise NotImplementedError(pieces.unpacked)
    if documents is not None:
        rows = [Documents(lengths if chunk is None else _split_into_chunks(lengths, chunk)) for lengths in documents]
    elif attention_mask is not None:
        present = attention_mask.cpu()
        first = present.int().argmax(1).tolist()
        ranges = [(low, low + count) for low, count in zip(first, present.sum(1).tolist(), strict=True)]
        without_gaps = all(bool(row[low:stop].all()) for row, (low, stop) in zip(present, ranges, strict=True))
        if without_gaps and common.parts:
            # Without padding on the right, one mask for any length: each new token then has an equal mask.
            rows = [KeyRange(low, UNBOUNDED if stop == length else stop) for low, stop in ranges]
        else:
            padding = attention_mask[:, None, None, :]
        if chunk is not None:
            lengths = [[*([low] if low else []), length - low] for low in first]
            chunks = [Documents(_split_into_chunks(of_row, chunk)) for of_row in lengths]
            rows = [row & mask for row, mask in zip(rows, chunks, strict=True)] if rows else list(chunks)
    elif chunk is not None:
        rows = [Chunked(chunk)]
    return common & _for_rows(rows) if rows else common, padding


def _split_into_chunks(lengths: Any, size: int) -> tuple[int, ...]:
    """Split each length into chunks of ``size``; the last chunk may be smaller."""
    return tuple(min(size, length - start) for length in lengths for start in range(0, length, size))
