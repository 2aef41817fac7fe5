"""The attention function that transformers calls in each layer.

Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, S whole sequence, D head dim, E value
head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import checksum
from cp_styles._lib.compat import uncompiled
from cp_styles._lib.troubleshooting import see
from cp_styles.checks.transformers_models import frame_of
from cp_styles.engine.binding import Binding, refuse_dropout
from cp_styles.engine.custom_ops import attend
from cp_styles.functions.decode import DecodeCall, cache_of
from cp_styles.functions.join import join_attentions
from cp_styles.integrations.layers import TOKENS_OF_GROUPS, biases_of_queries
from cp_styles.integrations.transformers.caches import TransformersCache, past_of
from cp_styles.integrations.transformers.latents import take_latents
from cp_styles.integrations.transformers.masks import WholeMask, require_active_calls
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.masks import Causal, Full, Mask
from cp_styles.masks.block_mask import FlexMask
from cp_styles.mixers.compressed import KeysOfWindows, take_windows
from cp_styles.mixers.query_rows import QueryRows
from cp_styles.mixers.selection import mask_of_layer
from cp_styles.strategies import AllGather, Ulysses


@uncompiled
def attention_function(
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

    ``attention_mask`` is the result of :func:`make_mask`, or a tensor or BlockMask of the *whole* sequence. ``s_aux``
    are logits of sinks [H], ``position_bias`` learned biases by distance, as in T5, ``indices`` the keys that an
    indexer has selected. Other arguments change nothing: tests/clients/test_arguments.py lists them.
    """
    calls = require_active_calls("attention")
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
        if isinstance(attention_mask, WholeMask):
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
    if isinstance(table, nn.Embedding) and isinstance(attention_mask, WholeMask) and hasattr(module, BUCKET):
        length, bucket = max(attention_mask.seq_lengths), getattr(module, BUCKET)
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


BUCKET = "_relative_position_bucket"


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
