"""Layers of other projects with linear attention, state spaces or short convolutions, known by names of functions.

[Note: mixers by name] Such a layer calls its kernels as Python functions, which a TorchFunctionMode does not see. Under
a ModuleContextParallel, the layer gets a subclass of its class. Its forward is the same code with other globals, in
which functions of this package replace kernels with known names, and call these kernels. So plain functions, installed
packages and kernels of a hub are all supported. The class, its module and its library do not change. With one rank
the layer's own code runs, see :func:`_runs_own_code`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import BoundArguments
from itertools import accumulate
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from cp_styles._lib.compat import uncompiled
from cp_styles._lib.subclassing import UnpicklableMixin, insert_mixin
from cp_styles._lib.troubleshooting import see
from cp_styles.functions.decode import CACHE_ARGUMENTS, GENERATE_ALONE, LayerCaches, find_cache
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Causal, Dense, Mask, SlidingWindow
from cp_styles.mixers.by_channels import Channels
from cp_styles.mixers.compressed import (
    AtPositions,
    compress,
    select_blocks,
    select_by_states,
    select_windows,
    take_windows,
)
from cp_styles.mixers.convolution import last_rows, run_convolution
from cp_styles.mixers.fragments import (
    DOCUMENT_ARGUMENTS,
    CutSequence,
    bind_arguments,
    find_documents,
    mark_mixing,
    refuse_arguments,
)
from cp_styles.mixers.halo import Halo
from cp_styles.mixers.query_rows import QueryRows, rows_of_queries
from cp_styles.mixers.recurrence import KNOWN, WKV, Recurrence, run_recurrence
from cp_styles.mixers.selection import mask_of_layer, select_by_layer
from cp_styles.styles.module import LAYER_CHANGES

_REASON = "under context parallelism layers with linear attention run outside of torch.compile's graphs"


def run_known_mixers(module: nn.Module) -> None:
    """Change the class of ``module`` if it is a known token mixer, or if its forward calls known mixers by name. Also
    the class of its token shifts, which add a row in front and remove the last row (RWKV)."""
    replaced: dict[str, Callable[..., Any]] = {}
    for name in ("forward", "_rnn_scan", "build_attention_mask_from_topk", "build_block_mask"):
        plain = getattr(type(module), name, None)
        how = _replacement_for(plain) or (_run_with_handlers if _calls_known_mixer(plain) else None)
        if how is not None:
            replaced[name] = how
    if replaced:
        insert_mixin(module, _MixesTokens, partial(_replacement_methods, replaced))
    for child in module.children():
        if isinstance(child, nn.ZeroPad2d) and child.padding == (0, 0, 1, -1):
            insert_mixin(child, _MixesTokens, partial(_replacement_methods, {"forward": _run_token_shift}))


class _MixesTokens(UnpicklableMixin):
    """Mixin before the class of a layer, whose forward gets other globals. See [Note: mixers by name]."""


def _calls_known_mixer(forward: Any) -> bool:
    """Whether a function, or the function that it decorates, calls a known mixer by name."""
    inner = _find_decorated(forward)
    if inner is not None:
        return _calls_known_mixer(inner)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return any(name in _MIXERS and callable(forward.__globals__.get(name)) for name in names)


def _find_decorated(function: Any) -> Any:
    """The decorated function, if ``function`` is a decorator's wrapper that has it in its closure."""
    inner = getattr(function, "__wrapped__", None)
    cells = getattr(function, "__closure__", None) or ()
    return inner if inner is not None and any(cell.cell_contents is inner for cell in cells) else None


def _replace_globals(function: FunctionType, handlers: Mapping[str, Callable[[Any], Any]]) -> FunctionType:
    """A copy of ``function`` whose global ``name`` is ``handlers[name](the global)``."""
    inner, cells, named = _find_decorated(function), function.__closure__, function.__globals__
    if inner is not None:
        copied = CellType(_replace_globals(inner, handlers))
        cells = tuple(copied if cell.cell_contents is inner else cell for cell in cells or ())
    else:
        used = [name for name in function.__code__.co_names if name in handlers and callable(named.get(name))]
        named = {**named, **{name: handlers[name](named[name]) for name in used}}
    copy = FunctionType(function.__code__, named, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _replacement_methods(replaced: Mapping[str, Callable[..., Any]], cls: type[nn.Module]) -> dict[str, Any]:
    return {name: _replacement_method(name, how, cls) for name, how in replaced.items()}


def _replacement_method(name: str, how: Callable[..., Any], cls: type[nn.Module]) -> Any:
    plain = getattr(cls, name)
    parameters = inspect.signature(plain)

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls = AttentionCalls.current()
        bound = parameters.bind(self, *args, **kwargs)
        if calls is None or _continues_prompt(calls, bound.arguments):
            return plain(self, *args, **kwargs)
        if how not in _DECIDE_THEMSELVES and _runs_own_code(calls):
            return _run_own(calls, plain, *bound.args, **bound.kwargs)
        return how(calls, plain, bound)

    return functools.wraps(plain)(uncompiled(method, _REASON))


def _runs_own_code(calls: AttentionCalls) -> bool:
    """Whether a layer runs its own code: one rank has all tokens, of one document, and verify plants no mistake."""
    binding = calls.unscoped  # in verify's step with one rank: what replaces a layer is compared with the layer
    alone = binding.group.size() == 1 and binding.role.planted is None
    return alone and find_documents(binding.name, calls.binding.mask) is None and find_cache(calls.inputs) is None


def _run_own(calls: AttentionCalls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mark_mixing():
        return calls.run_mixer(partial(function, *args, **kwargs))


def _run_with_handlers(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    own = _runs_own_code(calls)
    handlers = {name: partial(partial, _call_handler, calls, own, how) for name, how in _HANDLERS.items()}
    return _replace_globals(plain, handlers)(*bound.args, **bound.kwargs)


def _call_handler(calls: AttentionCalls, own: bool, how: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = bind_arguments(function, args, kwargs) if own else {}
    if not own or any(arguments.get(name) is not None for name in DOCUMENT_ARGUMENTS):
        return how(calls, function, *args, **kwargs)
    return _run_own(calls, function, *args, **kwargs)


def _run_token_shift(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    layer, x_BLC = bound.args
    return _run_mixer(calls, "a token shift", lambda cut: run_convolution(cut, partial(plain, layer), x_BLC, 1, 2), {})


def _continues_prompt(calls: AttentionCalls, arguments: dict[str, Any]) -> bool:
    """Whether the call follows a prompt, with tokens and states that are equal on all ranks. A cache that the model has
    created itself is removed from ``arguments``."""
    past = find_cache(calls.inputs)
    if isinstance(past, LayerCaches):
        return past.prefilled
    if past is not None:
        raise NotImplementedError(
            f"{calls.binding.name}: a cache was given to a model that has states as well as keys and values, and does "
            "not know how they are cut over the ranks: give it the cache that prefill(model, input_ids) of "
            "cp_styles.integrations.transformers returns"
        )
    arguments.update({name: None for name in CACHE_ARGUMENTS if name in arguments})
    return False


def rows_at_end(x_BCL: torch.Tensor, count: int) -> torch.Tensor:
    """The last rows of the sequence of the running module, on every rank: the state of its convolution."""
    calls = AttentionCalls.current()
    assert calls is not None
    return _run_mixer(calls, "the state of a convolution", lambda cut: last_rows(cut, x_BCL, 2, count), {})


def _run_mixer(calls: AttentionCalls, name: str, run: Callable[[CutSequence], Any], kwargs: dict[str, Any]) -> Any:
    """``run(sequence)``. Arguments for documents are removed from ``kwargs``."""
    binding = calls.binding

    def run_on_sequence() -> Any:
        where = binding.axis, binding.group, binding.layout
        name_of_call = f"{binding.name}: {name} of {calls.forward_state.path or 'the module itself'}"
        documents = find_documents(name_of_call, binding.mask)
        sequence = CutSequence(name_of_call, *where, documents, binding.checks)
        return run(sequence.with_documents_from(kwargs))

    return calls.run_mixer(run_on_sequence)


def _run_convolution(dim: int, calls: AttentionCalls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """causal_conv1d_fn of the package causal-conv1d and of transformers: [B, C, L]. causal_conv1d of FLA: [B, L, C]."""
    name = function.__name__
    arguments = bind_arguments(function, args, kwargs)
    first, weight_CW = next(iter(arguments)), arguments["weight"]
    x = arguments.pop(first)

    def run(sequence: CutSequence) -> Any:
        refuse_arguments(sequence.name, arguments, _UNSUPPORTED)

        def conv(x: torch.Tensor) -> torch.Tensor:
            out = function(**{first: x}, **arguments)
            return out[0] if isinstance(out, tuple) else out

        return run_convolution(sequence, conv, x, dim, weight_CW.shape[-1])

    out = _run_mixer(calls, name, run, arguments)
    return (out, None) if name == "causal_conv1d" else out


_UNSUPPORTED = (
    *("initial_states", "return_final_states", "final_states_out"),  # of causal-conv1d
    *("initial_state", "output_final_state", "residual", "cp_context"),  # of FLA
)


def _run_kernel(how: Any, calls: AttentionCalls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    arguments = bind_arguments(function, args, kwargs)
    return _run_mixer(calls, function.__name__, lambda cut: run_recurrence(cut, function, how, **arguments), arguments)


def _decline_fusion(calls: AttentionCalls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Return None: transformers then calls the convolution and the scan separately."""


def _refuse(remedy: str, calls: AttentionCalls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    name = f"{calls.binding.name}: {getattr(function, '__name__', 'a function')} of {calls.forward_state.path}"
    raise NotImplementedError(f"{name} is not supported: {remedy}")


def _mask_padding(calls: AttentionCalls, function: Callable[..., Any], x_BLC: torch.Tensor, attention_mask: Any) -> Any:
    """apply_mask_to_padding_states of transformers, with this rank's part of the mask of the whole sequence."""
    # The layer itself would take the last positions of the mask for this rank's tokens.
    mask_BS, binding = calls.inputs.get("attention_mask"), calls.binding
    ranks, rank, length = binding.group.size(), binding.group.rank(), x_BLC.shape[1]
    if not isinstance(mask_BS, torch.Tensor) or mask_BS.ndim != 2:
        # The model was given masks of its layers, or runs in a block: the layer's own mask is whole, or this rank's.
        if attention_mask is None or ranks == 1:
            return x_BLC if attention_mask is None else function(x_BLC, attention_mask)
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
            raise ValueError(
                f"{binding.name}: {calls.forward_state.path} pads by a mask that is no tensor [B, S]: give the model "
                "attention_mask [B, S] of the whole sequence"
            )
        if attention_mask.shape[1] == length:
            return function(x_BLC, attention_mask)
        mask_BS = attention_mask
    layout = binding.layout if isinstance(binding.layout, SequenceLayout) else binding.layout_for(mask_BS.shape[1])
    if layout.length == mask_BS.shape[1] and layout.lengths[rank] == length:
        return function(x_BLC, layout.shard(mask_BS, 1, rank))
    if ranks > 1 and not bool(mask_BS.all()):
        raise ValueError(
            f"{binding.name}: attention_mask of shape {tuple(mask_BS.shape)} marks padding, and this rank holds "
            f"{length} tokens: give every rank the mask of the whole sequence"
        )
    return x_BLC


def _run_channels(how: Channels, calls: AttentionCalls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A kernel by channels that also returns a state, in a layer that does not use the state."""
    arguments = bind_arguments(function, args, kwargs)
    arguments.pop("return_state", None)

    def outputs(**kwargs: Any) -> Any:
        return function(**kwargs)[0]

    name = getattr(function, "__name__", "the kernel")
    return _run_mixer(calls, name, lambda cut: run_recurrence(cut, outputs, how, **arguments), arguments), None


def _run_mlstm(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    """xLSTMBackend of transformers: a matrix as the state of each head, with a normalizer and a maximum."""
    return _run_channels(_MLSTM, calls, partial(plain, bound.args[0]), *bound.args[1:], **bound.kwargs)


_MLSTM = Channels(cut=("value", "query", "key", "igate", "fgate"), left_out=("c_initial", "n_initial", "m_initial"))


def _run_griffin_layer(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> tuple[torch.Tensor, None]:
    """RecurrentGemmaRecurrentBlock of transformers: a convolution, and a number as the state of each channel."""
    layer, x_BLC, position_ids = bound.args[:3]
    if find_cache(calls.inputs) is not None:
        raise NotImplementedError(
            f"{calls.binding.name}: {calls.forward_state.path} keeps its states in itself, where no cache finds them: "
            f"{GENERATE_ALONE}"
        )
    x_BCL = layer.linear_x(x_BLC).mT

    def conv(x_BCL: torch.Tensor) -> torch.Tensor:
        return layer.conv_1d(x_BCL)[..., : x_BCL.shape[2]]

    x_BCL = _run_mixer(calls, "conv_1d", lambda cut: run_convolution(cut, conv, x_BCL, 2, layer.conv1d_width), {})
    return layer.linear_out(layer.rg_lru(x_BCL.mT, position_ids) * layer.act_fn(layer.linear_y(x_BLC))), None


def _run_real_gated_lru(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> tuple[torch.Tensor, None]:
    layer, x_BLC, gate_BLC, reset = bound.args[:4]

    def scan(k: torch.Tensor, v: torch.Tensor, initial_state: Any = None, output_final_state: bool = True) -> Any:
        state, ends = (None if initial_state is None else initial_state[..., 0, 0]), torch.zeros_like(k[:, :, :1, 0])
        out_BLC, state_BC = plain(layer, v[..., 0], k[..., 0], ends.bool(), state)
        return out_BLC[..., None], state_BC[..., None, None]

    k, v = (gate_BLC * ~reset)[..., None], x_BLC[..., None]
    return _run_kernel(Recurrence(diagonal=True), calls, scan, k, v)[0][..., 0], None


def _run_lightning_layer(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> tuple[torch.Tensor, None]:
    """MiniMaxLightningAttention of transformers, whose forward contains the recurrence."""
    layer, x_BLC, _, attention_mask = bound.args[:4]
    qkv = layer.act_fn(layer.qkv_proj(x_BLC))
    qkv = _mask_padding(calls, lambda x_BLC, mask_BL: x_BLC * mask_BL[..., None].to(x_BLC.dtype), qkv, attention_mask)
    q, k, v = qkv.unflatten(-1, (layer.num_attention_heads, -1)).chunk(3, -1)
    slope_H, size = layer.slope_rate.flatten(), layer.block_size
    out, _ = _run_kernel(Recurrence(diagonal=True), calls, lightning_attention, q, k, v, slope_H=slope_H, size=size)
    return layer.out_proj(layer.output_gate(x_BLC).sigmoid() * layer.norm(out.flatten(-2))), None


def lightning_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slope_H: torch.Tensor,
    size: int,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S_t = exp(-slope) S_{t-1} + k_t v_t``, ``out_t = q_t S_t``, in blocks of ``size``; q, k, v [B, L, H, D]."""
    slope, outs = slope_H[:, None, None], []
    state = k.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[3]) if initial_state is None else initial_state.to(k.dtype)
    for q_BHLK, k_BHLK, v_BHLV in zip(*(x.transpose(1, 2).split(size, 2) for x in (q, k, v)), strict=True):
        at = torch.arange(1, q_BHLK.shape[2] + 1, device=q.device)[:, None]
        behind = at - at.T
        near = (q_BHLK @ k_BHLK.mT) * (-slope * behind.clamp(min=0)).exp().to(q.dtype).where(behind >= 0, 0.0)
        outs.append(near @ v_BHLV + (q_BHLK * (-slope * at).exp().to(q.dtype)) @ state)
        left = (-slope * (len(at) - at)).exp().to(k.dtype)
        state = (-slope * len(at)).exp().to(state.dtype) * state + (k_BHLK * left).mT @ v_BHLV
    return torch.cat(outs, 2).transpose(1, 2), state


class _IndexerKeys:
    """Stands for the cache of an indexer: takes the keys of some tokens, and returns ``keys_BSD`` in their place."""

    def __init__(self, keys_BSD: torch.Tensor | None = None) -> None:
        self.taken_BLD, self._keys_BSD = torch.empty(0, device="cpu"), keys_BSD

    def update_indexer(self, k_BLD: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.taken_BLD = k_BLD
        return k_BLD[:, :1] if self._keys_BSD is None else self._keys_BSD


def _run_indexer(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> torch.Tensor:
    """The indexers of DeepSeek-V3.2 and of its relatives in transformers: the selected keys of each query."""
    layer, arguments = bound.args[0], {name: x for name, x in bound.arguments.items() if name != "self"}
    x_BLC, whole = arguments["hidden_states"], arguments["attention_mask"]
    cache = next(name for name in CACHE_ARGUMENTS if name in bound.signature.parameters)

    def run_layer(rows: slice, allowed_BlS: torch.Tensor, keys: _IndexerKeys | None) -> torch.Tensor:
        def part(x: Any) -> Any:
            if isinstance(x, tuple):  # cos and sin
                return tuple(map(part, x))
            return x[:, rows] if isinstance(x, torch.Tensor) else x

        return plain(
            layer,
            **{name: part(x) for name, x in (arguments | {"attention_mask": None}).items()}
            | {"attention_mask": allowed_BlS, cache: keys},
        )

    def make_keys() -> torch.Tensor:
        taken = _IndexerKeys()
        run_layer(slice(None), torch.ones(1, x_BLC.shape[1], 1, dtype=torch.bool, device=x_BLC.device), taken)
        return taken.taken_BLD

    def select(rows: slice, keys_BSD: torch.Tensor | None, allowed_BlS: torch.Tensor) -> torch.Tensor:
        return run_layer(rows, allowed_BlS, None if keys_BSD is None else _IndexerKeys(keys_BSD))

    def run(sequence: CutSequence) -> torch.Tensor:
        mask = getattr(whole, "mask", None)
        if not isinstance(mask, Mask):
            raise NotImplementedError(
                f"{sequence.name}: the indexer selects keys under a mask of this rank's part: choose "
                "attn_implementation=register_attention() of cp_styles.integrations.transformers"
            )
        if arguments.get(cache) is not None:
            raise NotImplementedError(f"{sequence.name}: an indexer with a cache is not supported: {GENERATE_ALONE}")
        mask = calls.binding.mask & (mask if whole.padding is None else mask & Dense(whole.padding))
        # The mask has the documents.
        return select_by_layer(replace(sequence, documents=()), x_BLC, mask, layer.n_heads, make_keys, select)

    return _run_mixer(calls, "an indexer", run, {})


def _run_compressor(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> tuple[torch.Tensor, None]:
    """The compressors of DeepSeek-V4 in transformers: a key for each window. Their attention reads the mask of these
    keys by :func:`~cp_styles.mixers.compressed.take_windows`."""
    layer, *tensors = bound.args[:4]
    return _run_mixer(calls, "a compressor", lambda cut: compress(cut, plain, layer, *tensors), {}), None


def _run_window_indexer(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> torch.Tensor:
    layer, *tensors = bound.args[:4]
    return _run_mixer(calls, "an indexer", lambda cut: select_windows(cut, plain, layer, *tensors), {})


def _run_grouped_attention(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    """An attention of transformers with keys for groups of tokens, of which its mask knows nothing.

    DeepseekV4Attention has windows, and Qwen4ExpTextAttention selects blocks.
    """
    layer, whole, binding = bound.args[0], bound.arguments["attention_mask"], calls.binding
    selects = hasattr(layer, "indexer")
    if not selects and getattr(layer, "compressor", None) is None:
        return plain(*bound.args, **bound.kwargs)
    with binding.telling():
        mask = getattr(whole, "mask", None)
        if not isinstance(mask, Mask):
            raise NotImplementedError(
                f"{binding.name}: {calls.forward_state.path} has a mask of this rank's part: choose "
                "attn_implementation=register_attention() of cp_styles.integrations.transformers"
            )
        _refuse_cache(calls)
        known = {Causal} if selects else {Causal, SlidingWindow}
        own_parts = {type(part) for part in binding.mask.parts}
        if whole.padding is not None or not known.issuperset((*map(type, mask.parts), *own_parts)):
            _refuse_groups(calls)
        if own_parts:  # a window of tokens says nothing of the keys of windows
            raise NotImplementedError(
                f"{binding.name}: {calls.forward_state.path} attends to groups of tokens too, of which "
                f"{binding.mask!r} says nothing: leave mask= out of the style, the model has its own mask"
            )
    if selects:
        whole.dtype = torch.bool  # the attention asks, before it takes the conjunction
    if _runs_own_code(calls):
        x_BLC = bound.arguments["hidden_states"]
        positions = torch.arange(x_BLC.shape[1], device=x_BLC.device)
        own = mask.allowed(positions, positions)
        if not selects:
            own = torch.zeros_like(own, dtype=x_BLC.dtype).masked_fill(~own, float("-inf"))
        bound.arguments["attention_mask"] = own.expand(len(x_BLC), 1, -1, -1)
    try:
        return plain(*bound.args, **bound.kwargs)
    finally:  # an error between the compressor and the attention
        take_windows(layer)


def _run_block_indexer(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    """Qwen4ExpTextQSAIndexer of transformers: blocks of tokens."""
    layer, x_BLC, rotary = bound.args[:3]
    rotate = inspect.unwrap(plain).__globals__["apply_rotary_pos_emb"]
    return _run_mixer(calls, "an indexer", lambda cut: select_blocks(cut, layer, x_BLC, rotary, rotate), {})


def _run_pool_indexer(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> torch.Tensor:
    """Glm5NextTextIndexer of transformers: pools of tokens with learned weights."""
    layer, *tensors = bound.args[:4]
    with calls.binding.telling():
        _refuse_cache(calls)
        given = calls.inputs.get("attention_mask")
        has_padding = isinstance(given, torch.Tensor) and not bool(given.all())
        if has_padding or calls.binding.mask.parts:
            _refuse_groups(calls)

    def run(cache: Any, at_l: torch.Tensor, *part: torch.Tensor) -> torch.Tensor:
        return plain(AtPositions(layer, at_l), *part, cache)

    return _run_mixer(calls, "an indexer", lambda cut: select_by_states(cut, run, *tensors, heads=layer.n_heads), {})


def _run_head_indexer(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> torch.Tensor:
    """MiniMaxM3VLIndexer of transformers: blocks of keys for each key head."""
    layer, x_BLC, rotary, _, positions_BL = bound.args[:5]
    with calls.binding.telling():
        _refuse_cache(calls)

    def run(cache: Any, at_l: torch.Tensor, x_BlC: torch.Tensor, cos: Any, sin: Any, positions_Bl: Any) -> torch.Tensor:
        return plain(layer, x_BlC, (cos, sin), cache, positions_Bl)

    tensors, options = (x_BLC, *rotary, positions_BL), {"heads": layer.num_heads, "dim": 2, "block": layer.block_size}
    return _run_mixer(calls, "an indexer", lambda cut: select_by_states(cut, run, *tensors, **options), {})


def _mask_of_selected(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    """Glm5NextTextAttention.build_attention_mask_from_topk of transformers."""
    selected = mask_of_layer(bound.arguments["topk_indices"])
    if selected is None:
        return plain(*bound.args, **bound.kwargs)
    functions, chosen = import_module("transformers").AttentionInterface(), bound.args[0].config._attn_implementation
    if getattr(functions.get(chosen), "__module__", "").partition(".")[0] != __name__.partition(".")[0]:
        _refuse_own_function(calls)
    return selected


def _mask_of_blocks(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    """MiniMaxM3VLIndexer.build_block_mask of transformers, for functions of transformers alone."""
    if mask_of_layer(bound.arguments["block_indices"]) is not None:
        _refuse_own_function(calls)
    return plain(*bound.args, **bound.kwargs)


def _run_at_positions(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    """InklingAttention of transformers, which scales queries by their positions and learns these from its cache."""
    x_BLC = bound.arguments["hidden_states"]

    def positions(sequence: CutSequence) -> torch.Tensor:
        with sequence.compared_call(lambda: ([x_BLC], 1, {})) as cut:
            at = cut.layout.positions(cut.peers.rank, "cpu")
            # Each document counts anew.
            starts = torch.tensor([0, *accumulate(cut.documents)], device="cpu")[:-1]
            return (at - starts[torch.searchsorted(starts, at, right=True) - 1]).to(x_BLC.device)

    bound.arguments["cache"] = _QueryPositions(_run_mixer(calls, "an attention with positions", positions, {}))
    return plain(*bound.args, **bound.kwargs)


class _QueryPositions:
    """Gives an attention of Inkling the positions of this rank's queries, in place of a cache. It keeps nothing."""

    def __init__(self, positions_L: torch.Tensor) -> None:
        self._positions_L = positions_L

    def get_query_offset(self, layer: int) -> torch.Tensor:
        """The number that the layer adds to the number of each row."""
        return self._positions_L - torch.arange(len(self._positions_L), device=self._positions_L.device)

    def get_mask_sizes(self, queries: int, layer: int) -> tuple[int, int]:
        return 1, 0  # one key: nobody reads the positions of keys

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def _run_distances(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> torch.Tensor:
    """Biases of each query for each distance [B, H, L, R], in place of the biases for this rank's keys."""
    layer, x_BLC = bound.args[:2]
    with calls.binding.telling():
        _refuse_cache(calls)
    distances = torch.arange(layer.rel_extent, device=x_BLC.device)
    if "key_positions" in bound.arguments:
        bound.arguments["query_positions"] = distances.new_zeros(x_BLC.shape[1])
        bound.arguments["key_positions"] = -distances
    else:
        bound.arguments["relative_distance"] = distances.expand(x_BLC.shape[1], -1)
    return plain(*bound.args, **bound.kwargs)


def biases_of_queries(calls: AttentionCalls, module: nn.Module, bias: torch.Tensor) -> QueryRows | None:
    """The ``bias`` that :func:`_run_distances` has computed for an attention; None if it was computed in another way.

    Communication: one all-gather of some integers.
    """
    methods = [getattr(type(child).forward, "__qualname__", "") for child in module.children()]
    replacements = [_WITHOUT_KERNEL.get(method, (None,))[0] for method in methods]
    if _run_distances not in replacements or _runs_own_code(calls):
        return None
    return _run_mixer(calls, "a position_bias", lambda cut: rows_of_queries(cut, bias, 2), {})


def _run_with_rows_before(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> torch.Tensor:
    """Inkling2DynamicShortConvolution of transformers, whose weights differ from token to token."""
    layer, x_BLC, dynamic_BLC = bound.args[:3]
    binding, ids = calls.binding, bound.arguments.get("kwargs", {}).get("seq_idx")
    name = f"{binding.name}: a convolution of {calls.forward_state.path or 'the module itself'}"
    kept = _mask_padding(calls, lambda _, mask_BL: mask_BL, x_BLC, bound.arguments.get("conv_mask"))
    tokens = {"hidden_states": x_BLC, "dynamic_input": dynamic_BLC, "conv_mask": None if kept is x_BLC else kept}
    documents = None
    if ids is not None:
        sequence = CutSequence(name, binding.axis, binding.group, binding.layout, None, binding.checks)
        with binding.telling():
            documents = replace(sequence, packed=(None, ids)).document_lengths()
    halo = Halo(name, binding.group, (layer.conv_kernel_size - 1, 0), 1, (), binding.layout, documents, binding.checks)
    return halo.run(partial(plain, layer), (), (), tokens)


def _run_over_depth(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    """The attention of each token to its states of earlier layers, in Inkling 2: it mixes no tokens."""
    return plain(_Eager(bound.args[0]), *bound.args[1:], **bound.kwargs)


class _Eager:
    """A layer of transformers that attends by the function in its own file, in plain operations."""

    def __init__(self, layer: Any) -> None:
        self._layer, self.config = layer, SimpleNamespace(_attn_implementation="eager")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _refuse_own_function(calls: AttentionCalls) -> NoReturn:
    with calls.binding.telling():
        raise NotImplementedError(
            f"{calls.binding.name}: {calls.forward_state.path} attends to selected keys by a function of transformers: "
            "choose attn_implementation=register_attention() of cp_styles.integrations.transformers"
        )


CANNOT_CONTINUE = (
    f"{{}} has a cache whose parts on the ranks are not known: {GENERATE_ALONE}"
    f"{see('Layers without a cache over the ranks')}"
)


def _refuse_cache(calls: AttentionCalls) -> None:
    if find_cache(calls.inputs) is not None:
        raise NotImplementedError(CANNOT_CONTINUE.format(f"{calls.binding.name}: {calls.forward_state.path}"))


def path_without_cache(model: nn.Module) -> str | None:
    """The path of the first layer that cannot continue a prompt; None without such layers."""
    for path, module in model.named_modules():
        method = getattr(getattr(type(module), "forward", None), "__qualname__", "")  # TorchScript has none
        if _WITHOUT_KERNEL.get(method, (None,))[0] in _WITHOUT_CACHE:
            return path
    return None


TOKENS_OF_GROUPS = (
    "{} makes groups of consecutive tokens, which would have tokens of padding or of several documents: give the model "
    f"one document in each row, without attention_mask{see('Layers with keys for groups of tokens')}"
)


def _refuse_groups(calls: AttentionCalls) -> NoReturn:
    raise NotImplementedError(TOKENS_OF_GROUPS.format(f"{calls.binding.name}: {calls.forward_state.path}"))


def _replacement_for(method: Any) -> Callable[..., Any] | None:
    """The replacement for a method that mixes tokens without a kernel. The code of an unknown version of the library
    is refused, because it may compute something else."""
    how, *digests = _WITHOUT_KERNEL.get(getattr(method, "__qualname__", ""), (None,))
    if how is None or _calls_known_mixer(method):
        return None
    try:
        source = inspect.getsource(method)
    except OSError:
        source = ""
    return how if hashlib.sha256(source.encode()).hexdigest()[:16] in digests else _refuse_unknown


def _refuse_unknown(calls: AttentionCalls, plain: Any, bound: BoundArguments) -> Any:
    if calls.unscoped.group.size() == 1:
        return plain(*bound.args, **bound.kwargs)
    raise NotImplementedError(
        f"{calls.binding.name}: {calls.forward_state.path} mixes tokens by {plain.__qualname__}, "
        "whose code in this version of the library is not known: use transformers 5.23 or 5.24, or keep the layer out "
        "of the model"
    )


_WITHOUT_CACHE = _run_compressor, _run_block_indexer, _run_pool_indexer, _run_head_indexer, _run_distances
# They run the layer's own code on one rank themselves, or parts of it.
_DECIDE_THEMSELVES = (
    *(_run_with_handlers, _run_indexer, _run_grouped_attention, _mask_of_selected, _mask_of_blocks),
    _run_over_depth,
)
# By the name of the method, with hashes of its code in transformers 5.23 and 5.24.
_WITHOUT_KERNEL: dict[str, tuple[Any, ...]] = {
    "MiniMaxLightningAttention.forward": (_run_lightning_layer, "69bc3f622840097c", "03c3f915c0c99c09"),
    "RecurrentGemmaRecurrentBlock.forward": (_run_griffin_layer, "cce3570274ab15aa"),
    "RecurrentGemmaRglru._rnn_scan": (_run_real_gated_lru, "edcf0cbffabce491"),
    **{
        f"{name}Indexer.forward": (_run_indexer, code)
        for code, names in {
            "d661c778bc189986": ("DeepseekV32", "AXK2"),
            "5b484bc355c707d6": ("GlmMoeDsa", "Dots3NoteText"),
            "1dc7cea02eefd0a1": ("HYV4",),
            "cc77e0d2bf12a2bd": ("MistralLarge4Text",),
        }.items()
        for name in names
    },
    "DeepseekV4Attention.forward": (_run_grouped_attention, "7e61a222ad0603b7"),
    "DeepseekV4HCACompressor.forward": (_run_compressor, "3fb94114cb4ed493"),
    "DeepseekV4CSACompressor.forward": (_run_compressor, "3644b0ea966e20d2"),
    "DeepseekV4Indexer.forward": (_run_window_indexer, "428c5223ef907ac9"),
    "Glm5NextTextIndexer.forward": (_run_pool_indexer, "66575baacb826ee2"),
    "Glm5NextTextAttention.build_attention_mask_from_topk": (_mask_of_selected, "ec33b58c76890c6d"),
    "InklingAttention.forward": (_run_at_positions, "f6ccf3041597db63"),
    "InklingRelativeLogits.forward": (_run_distances, "252e09d1807c2d05"),
    **{
        f"{name}.forward": (how, code)
        for version in ("Inkling2", "Inkling2Loop")
        for name, how, code in (
            (f"{version}RelativePositionBias", _run_distances, "55b2f2f777126056"),
            (f"{version}DynamicShortConvolution", _run_with_rows_before, "55d4c0545c4995ac"),
            (f"{version}BlockAttentionResidual", _run_over_depth, "71ff309947e33f69"),
        )
    },
    "Inkling2LoopMessageAttentionResidual.forward": (_run_over_depth, "14773c51f8cd6170"),
    "MiniMaxM3VLIndexer.build_block_mask": (_mask_of_blocks, "e8ea72594f572815"),
    "MiniMaxM3VLIndexer.forward": (_run_head_indexer, "83606351ef7f4edc"),
    "Qwen4ExpTextAttention.forward": (_run_grouped_attention, "444d6c7e850d338a"),
    "Qwen4ExpTextQSAIndexer.forward": (_run_block_indexer, "d4ef05fac7a7e54d"),
    "xLSTMBackend.forward": (_run_mlstm, "ada65c0d031ae105"),
}
_MIXERS = {
    "causal_conv1d_fn": partial(_run_convolution, 2),
    "causal_conv1d": partial(_run_convolution, 1),
    "mamba_split_conv1d_scan_combined": partial(_refuse, "give the layer use_mem_eff_path=False"),
    **{name: partial(_run_kernel, how) for name, how in KNOWN.items()},
    "rwkv_linear_attention": partial(_run_channels, WKV),
}
_HANDLERS: dict[str, Callable[..., Any]] = _MIXERS | {
    **dict.fromkeys(("mamba2_split_conv1d_scan_combined", "mamba_inner_fn"), _decline_fusion),
    "apply_mask_to_padding_states": _mask_padding,
}
LAYER_CHANGES.append(run_known_mixers)
