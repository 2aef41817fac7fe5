"""Layers of a model that would compute with one rank's tokens alone, by their class or config."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from cp_styles._lib.compat import never_compile_alone
from cp_styles._lib.troubleshooting import see
from cp_styles.functions.decode import find_layer_caches
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.mixers.halo import reach_of

_POOLS = nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d
_MIXING = (nn.RNNBase, nn.Conv1d, nn.BatchNorm1d, nn.SyncBatchNorm, *_POOLS)


def refuse_mixing_layers(model: nn.Module, name: str, local: Iterable[nn.Module]) -> None:
    """Register a hook on each layer in ``model`` of a class of torch that carries values from token to token.

    The hook refuses calls, because the layer would see this rank's tokens alone. It allows layers in the modules
    ``local``; calls by a mixer of this package, which has all the rows that it needs; and new tokens after a prompt,
    which are whole on every rank.
    """
    allowed = {id(layer) for part in local for layer in part.modules()}
    for path, layer in model.named_modules():
        if isinstance(layer, _MIXING) and id(layer) not in allowed:
            layer.register_forward_pre_hook(partial(_refuse_mixing, name, path or "the module itself"))


def refuse_uneven_sequence_parallelism(model: nn.Module, name: str, local: Iterable[nn.Module]) -> None:
    """Register a hook on each layer of ``model`` whose parameters torch's SequenceParallel has replicated.

    The hook refuses a number of tokens that the tensor-parallel ranks do not divide.
    """
    # torch assumes parts of equal length. With others gloo ends the process at its next collective.
    for path, layer in model.named_modules():
        parameters = list(layer.parameters(recurse=False))
        if parameters and all(isinstance(x, DTensor) and x.placements == (Replicate(),) for x in parameters):
            layer.register_forward_pre_hook(partial(_refuse_uneven, name, path or "the module itself"))


def refuse_rotary_embedding_outside(model: nn.Module, name: str) -> None:
    """Raise for a rotary embedding outside of ``model`` whose frequencies depend on the longest position."""
    # Inside of the model the mode intercepts the maximum of the positions. verify finds no difference where the batch
    # is shorter than the length from which these frequencies change, so the error must come here.
    options = getattr(getattr(model, "config", None), "rope_parameters", None)
    options = options if isinstance(options, dict) else {}
    # The options are the same for all layers, or in a dict by kind of layers.
    kinds = [str(each.get("rope_type")) for each in (options, *options.values()) if isinstance(each, dict)]
    rope = next((kind for kind in kinds if kind == "longrope" or "dynamic" in kind), None)
    if rope is not None and not any(hasattr(layer, "rope_type") for layer in model.modules()):
        raise NotImplementedError(
            f"{name}: the frequencies of its rotary embedding ({rope}) depend on the longest position of the sequence, "
            "and the embedding is outside of the module, where it sees the positions of this rank alone: apply the "
            "style to the whole model, which has the embedding in it"
        )


# The two hooks need no communication: their errors end the forward, and its style notifies the remaining ranks.


def _refuse_uneven(name: str, path: str, layer: nn.Module, args: Any) -> None:
    x = args[0] if args else None
    calls = None if torch.compiler.is_dynamo_compiling() else AttentionCalls.current()
    if calls is None or not isinstance(x, DTensor) or len(x.placements) > 1:
        return
    ranks, dim = x.device_mesh.size(), getattr(next(iter(x.placements), None), "dim", None)
    local_length = 0 if dim is None else x.shape[dim] // ranks  # torch has multiplied it by the number of ranks
    # Candidates for this rank's number of tokens: the second sizes of the model's inputs.
    lengths = [x.shape[1] for x in calls.inputs.values() if isinstance(x, torch.Tensor) and x.ndim > 1]
    uneven = [n for n in lengths if n % ranks and local_length in (n // ranks, -(-n // ranks))]
    if not uneven:
        return
    raise ValueError(
        f"{name}: {path} ({type(layer).__name__}, with SequenceParallel of torch) gets a part of {uneven[0]} tokens, "
        f"which {ranks} tensor-parallel ranks do not divide, but torch assumes parts of equal length. Pad the "
        "sequence: BatchSharder(..., pad_to_multiple_of=2 * n), with n = the context-parallel ranks times the "
        f"tensor-parallel ranks{see('A part that tensor parallelism does not divide')}"
    )


def _refuse_mixing(name: str, path: str, layer: nn.Module, args: Any) -> None:
    if not _mixes(layer) or reach_of(layer) is not None:
        return
    if not torch.compiler.is_dynamo_compiling():  # else the error ends the trace, and the forward runs uncompiled
        calls = AttentionCalls.current()
        if calls is None or calls.forward_state.mixing:
            return
        past = find_layer_caches(calls.inputs)
        if past is not None and past.prefilled:
            return
    by = "Call it through context_causal_conv1d or context_recurrence of cp_styles.mixers"
    if isinstance(layer, nn.Conv1d):
        reach = (layer.kernel_size[0] - 1) * layer.dilation[0]
        if _looks_ahead(layer):
            front = reach // 2 if layer.padding == "same" else int(layer.padding[0])
            by = "It looks both ways: give its taps the tokens of context_roll(x, shift, seq_dim, mesh, fill=0.0), or "
            by += f"the rows around its part by context_halo(layer, mesh, reach={front, reach - front}, seq_dim=-1)"
        else:
            by += f", or give the module around it to context_halo(module, mesh, reach={reach})"
    raise NotImplementedError(
        f"{name}: {path} ({type(layer).__name__}) carries values from token to token, but gets this rank's tokens "
        f"alone. {by}, or gather the tokens "
        "before it (cp_styles.collectives.gather) and cut its result. If its input is whole on each rank, or it mixes "
        f"within a row of its input, name it in local=[{path!r}] of the style"
        f"{see('A layer that mixes tokens')}"
    )


def _looks_ahead(layer: nn.Conv1d) -> bool:
    """Whether its padding puts later tokens under its taps. A causal one is padded in front, or its end is cut off."""
    reach = (layer.kernel_size[0] - 1) * layer.dilation[0]
    return layer.padding == "same" or (isinstance(layer.padding, tuple) and 0 < int(layer.padding[0]) < reach)


def _mixes(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv1d):
        return layer.kernel_size[0] > 1
    if isinstance(layer, nn.BatchNorm1d | nn.SyncBatchNorm):
        return layer.training or layer.running_mean is None
    return True


# Hooks are traced with the module's call or not compiled at all: alone they would not see that they run uncompiled.
never_compile_alone(_refuse_uneven, nor_what_it_calls=True)
never_compile_alone(_refuse_mixing, nor_what_it_calls=True)
