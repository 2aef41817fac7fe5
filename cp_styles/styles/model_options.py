"""What a model of transformers makes from the tokens that it is given: masks of windows and chunks, and positions.

With "sdpa", a model makes no mask at all for a sequence that is no longer than its window. Under context parallelism it
sees this rank's part alone. So the window is lost if the part fits in it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from textwrap import dedent
from typing import Any

import torch
from torch import nn

from cp_styles.introspect import names_in


def windows_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The windows and chunks of the attention layers in a model, or of one attention module: "sliding_window=64", and
    the config by which transformers makes its mask. A user may change the attention implementation in it.

    They come from attributes of modules, and from configs. As in transformers, ``layer_types`` of a config says which
    of its layers have a window or chunks. Without it all have the window, if the model's code names it, and none has
    chunks. (A config may have options of another model's.)
    """
    forwards = {inspect.unwrap(type(child).forward) for child in module.modules()}
    named = any(_WINDOW in names_in(forward) for forward in forwards)
    windows, config = dict[tuple[str, int], Any](), None
    for child in module.modules():
        sizes = [(option, getattr(child, option, None)) for option in _OPTIONS]
        own_config = getattr(child, "config", None)
        # Some parts, such as rotary embeddings, have a copy of the model's.
        if own_config is not None and type(own_config) is not type(config):
            config = own_config
            sizes += [(option, _of_layers(child, config, option, named)) for option in _OPTIONS]
        windows |= {(f"{at}={size}", id(config)): config for at, size in sizes if isinstance(size, int) and size > 0}
    return [(window, config) for (window, _), config in windows.items()]


def makes_local_masks(config: Any) -> bool:
    """Whether a model with this config makes its masks by functions of transformers, which see this rank's part alone.

    :func:`~cp_styles.integrations.transformers.register_attention` and users may register others.
    """
    implementation = getattr(config, "_attn_implementation", None)
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:  # a model that is written like those of transformers
        return implementation in ("sdpa", "eager")
    function = None if implementation is None else masking.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    return getattr(function, "__module__", None) == masking.__name__


_WINDOW, _CHUNK = _OPTIONS = "sliding_window", "attention_chunk_size"
_SLIDING = "sliding_attention"
# Kinds of layers without a window. One that is not known has the config's window, if there is one.
_WITHOUT = {
    *("full_attention", "indexed_attention", "minimax_m3_sparse"),
    *("linear_attention", "conv", "hybrid", "mamba", "moe", "mlp"),
}


def _of_layers(module: nn.Module, config: Any, option: str, named: bool) -> Any:
    """The window in ``config`` that some layers of ``module`` have; of an attention module that of its own layer."""
    kinds = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if kinds is None:
        kinds, index = [_SLIDING] * named, None
    layers = {kinds[index]} if isinstance(index, int) else set(kinds)
    chunked = {kind for kind in layers if "chunk" in kind}
    some = chunked if option == _CHUNK else layers - chunked - _WITHOUT
    return getattr(config, option, None) if some else None


def rope_outside(module: nn.Module) -> str | None:
    """The kind of the rotary embedding of ``module`` if it is outside of it, and its frequencies depend on the longest
    position ("dynamic", "longrope"); else None."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    kinds = [options.get("rope_type") for options in _by_layer(parameters)]
    inside = any(hasattr(child, "rope_type") for child in module.modules())
    return None if inside else next((kind for kind in kinds if kind == "longrope" or "dynamic" in str(kind)), None)


def _by_layer(parameters: Any) -> list[dict[str, Any]]:
    """The options of rotary embeddings: of all layers, and of each kind of layers."""
    of_all = parameters if isinstance(parameters, dict) else {}
    return [of_all, *(options for options in of_all.values() if isinstance(options, dict))]


def loss_takes_all(kind: type[nn.Module]) -> bool:
    """Whether a model knows shift_labels and the count, or gives its ``loss_function`` all that it is given itself.

    Others make the mean over the labels that they see.
    """
    if {"shift_labels", "num_items_in_batch"} <= inspect.signature(kind.forward).parameters.keys():
        return True
    for each in (base for base in kind.__mro__ if "forward" in vars(base)):
        try:
            tree = ast.parse(dedent(inspect.getsource(inspect.unwrap(vars(each)["forward"]))))
        except (OSError, SyntaxError, TypeError):
            return False
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = [(getattr(call.func, "attr", ""), any(x.arg is None for x in call.keywords)) for call in calls]
        if ("loss_function", True) in named or ("forward", True) not in named:  # forward: that of a base
            return ("loss_function", True) in named
    return False


_COUNTS = "create_position_ids_from_input_ids"


def padding_position(model: nn.Module) -> int | None:
    """The position of padding tokens, if the first token has the one after it. None for models that count from 0.

    It is also the id of the padding token. Such models have a table of positions with a row for padding, and beside it
    transformers' function that makes positions from token ids.
    """
    for module in model.modules():
        padding, kind = getattr(module, "padding_idx", None), type(module)
        table = hasattr(module, "position_embeddings") or hasattr(module, "weights")
        counts = hasattr(kind, _COUNTS) or hasattr(sys.modules.get(kind.__module__), _COUNTS)
        if isinstance(padding, int) and table and counts:
            return padding
    return None


def positions_after_padding(tokens_BS: torch.Tensor, padding: int) -> torch.Tensor:
    """Positions [B, S] of whole sequences, where padding tokens are not counted and have the position ``padding``."""
    present = (tokens_BS != padding).long()
    return present.cumsum(1) * present + padding
