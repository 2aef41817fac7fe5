"""Refuses positions that count from the beginning of one rank's part, made by a model or passed to it."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import torch
from torch import nn

from cp_styles._lib.introspect import forward_parameters, input_names
from cp_styles._lib.troubleshooting import see
from cp_styles.engine.binding import Binding
from cp_styles.functions.decode import find_cache, find_layer_caches
from cp_styles.intercept.function_mode import AttentionCalls, ForwardObserver
from cp_styles.layouts import SequenceLayout

POSITIONS = "position_ids"
_WORDS = ("pos", "freqs", "rotary", "cos")  # in the names of arguments that are made of positions
# Words of arguments about something else than the tokens of the sequence: image_position_ids, visual_pos_masks.
_NOT_OF_TOKENS = {"image", "img", "video", "pixel", "patch", "frame", "audio", "vision", "visual", "entity", "bbox"}
_COUNTS = "create_position_ids_from_input_ids"  # the function of transformers that counts from the padding's position
_NO_TRACE = "compile its layers, or the model without fullgraph=True"
_POSITIONS_OF_TOKENS = (
    "layout.shard(position_ids_of(model, tokens), 1, rank), with the tokens of the whole sequence and position_ids_of "
    "of cp_styles.integrations.transformers"
)


class PositionCheck(ForwardObserver):
    """Checks the positions among the arguments of a forward. It reads the values of tensors in the forwards number 1,
    2, 4, 8, .... No communication."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        """``names``: the arguments that are made of positions."""
        self._inputs = input_names(module)
        self._names, self._forwards = names, 0
        self._required = [name for name in names if name.endswith(POSITIONS)]
        self._padding = find_padding_position(module)
        self._counts_mask = counts_mask(module)
        self._first = 0 if self._padding is None else self._padding + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionCheck:
        copied = memo[id(self)] = copy.copy(self)
        copied._forwards = 0  # of the copied module
        return copied

    @classmethod
    def of(cls, module: nn.Module) -> PositionCheck | None:
        """A check of a forward with an argument that is made of positions; None for other forwards."""
        names = [name for name in forward_parameters(module) if any(word in name for word in _WORDS)]
        names = [name for name in names if not _NOT_OF_TOKENS.intersection(name.split("_"))]
        return cls(module, names) if names else None

    def forward_begins(
        self, calls: AttentionCalls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise for positions that are missing or begin at 0 on each rank."""
        binding = calls.source.unscoped  # a trace of a wrapper around the model does not read a mode's properties
        if binding.group.size() == 1:
            return  # verify runs a step with one rank, on the whole sequence
        who = f"{binding.name}: {type(module).__name__}"
        inputs = dict(zip(self._inputs, args, strict=False)) | kwargs
        if torch.compiler.is_dynamo_compiling():
            # An error ends the trace, and the forward runs uncompiled, where every rank raises. With fullgraph=True
            # torch.compile raises an error that shows this one.
            if find_cache(inputs) is None:
                self._refuse_missing(who, inputs)
            if self._counts_mask and inputs.get("attention_mask") is not None:
                raise NotImplementedError(f"{who} counts positions by a mask, whose values no trace has: {_NO_TRACE}")
            return
        self._forwards += 1
        past = find_layer_caches(inputs)
        if past is not None and past.prefilled:
            return  # new tokens are whole on every rank
        self._refuse_missing(who, inputs)
        if self._counts_mask:
            self._refuse_uncounted(who, binding, inputs.get("attention_mask"), inputs.get(POSITIONS))
        if self._forwards & (self._forwards - 1):  # not a power of two: on a GPU the host waits for the values
            return
        # The second sizes of tensors are candidates for this rank's number of tokens.
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        lengths = [x.shape[1] for x in tensors.values() if x.ndim > 1 and x.shape[1] > 1]
        for name in self._names:
            if name in tensors:
                _refuse_local_positions(calls.binding, name, tensors[name], lengths, self._first)
        if past is None:  # in a prefill generate() itself counts from 0
            self._refuse_positions_of_padding(who, tensors.get(POSITIONS), tensors.get("input_ids"))

    def _refuse_uncounted(self, who: str, binding: Binding, mask: Any, positions: Any) -> None:
        """Raise if positions [B, L] are not counted by a mask [B, S] of the whole sequence, as on one device."""
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not isinstance(positions, torch.Tensor):
            return
        layout, rank = binding.layout_for(mask.shape[1]), binding.group.rank()
        counted, shown = (layout.shard(x, 1, rank) for x in (mask.cumsum(1) - 1, mask != 0))
        if counted.shape[1] == positions.shape[-1] and bool((shown & (counted != positions)).any()):
            raise ValueError(
                f"{who} counts positions by its attention_mask, so padding in front of tokens moves them, and these "
                "position_ids count the padding: give position_ids_of(model, tokens, attention_mask) of the whole "
                "sequence, cut as the tokens are; with a BatchSharder, as position_ids of the batch. The function "
                "position_ids_of is in cp_styles.integrations.transformers"
            )

    def _refuse_missing(self, who: str, inputs: dict[str, Any]) -> None:
        for name in self._required:
            if inputs.get(name) is not None:
                continue
            if inputs.get("inputs_embeds") is not None:
                raise ValueError(
                    f"{who} was given inputs_embeds= without {name}. A wrapper that makes embeddings on each rank, as "
                    "for prompt tuning, puts its tokens in front of every part: make the embeddings of the whole "
                    'sequence, and cut them, BatchSharder(mesh)({"inputs_embeds": ..., "labels": ...})'
                    f"{see('Tokens in front of a part')}"
                )
            advice = "layout.positions(rank).unsqueeze(0)" if self._padding is None else _POSITIONS_OF_TOKENS
            raise ValueError(
                f"{who} takes {name} and was given none: it would count this rank's tokens from "
                f"{self._first}. Pass {name}={advice}, as **batch.inputs of BatchSharder and ContextParallelTrainer "
                "do; a context_parallel block takes the positions of the whole sequence as one of its buffers. If the "
                "model does not use them, apply the style with checks=Checks(inputs=False)"
                f"{see('Positions that count from 0')}"
            )

    def _refuse_positions_of_padding(
        self, who: str, positions: torch.Tensor | None, tokens: torch.Tensor | None
    ) -> None:
        padding = self._padding
        if padding is None or positions is None or tokens is None or positions.shape[-1] != tokens.shape[-1]:
            return
        if bool(((positions <= padding) & (tokens != padding)).any()):
            raise ValueError(
                f"{who} counts tokens from position {padding + 1}, because {padding} is the position of padding, but "
                f"{POSITIONS} have a token at {padding} or below. Pass {POSITIONS}={_POSITIONS_OF_TOKENS}; or apply "
                "the style with checks=Checks(inputs=False) if the model was trained with positions from 0"
                f"{see('Positions after the position of padding')}"
            )


def _refuse_local_positions(
    binding: Binding, name: str, positions: torch.Tensor, lengths: list[int], first: int
) -> None:
    """Raise for positions that count from ``first`` on a rank whose part begins elsewhere."""
    length = positions.shape[-1] if positions.ndim else 0
    if positions.is_floating_point() or positions.is_complex() or not (length in lengths or name.endswith(POSITIONS)):
        return  # a table, or positions of other tokens than this rank's
    counted = torch.arange(first, first + length, device=positions.device)
    from_first = bool((positions == counted).all()) or _rows_begin_at_0(positions)
    if not from_first or binding.mask.separates:
        return  # positions in documents count from 0 too
    begin = _find_begin(binding, length)
    if begin:
        remedy = f"pass {_POSITIONS_OF_TOKENS if first else 'layout.positions(rank)'}"
        if positions.ndim == 3:
            remedy = "cut them with the tokens, or let cut_inputs_of of cp_styles.integrations.transformers do it"
        raise ValueError(
            f"{binding.name}: {name} count from {first} to {first + length - 1} on this rank, whose part of the "
            f"sequence begins at {first + begin}: {remedy}. "
            "If these are documents that each begin at 0, open a SequenceScope(layout, mask=Documents(...)). If the "
            "tokens are whole on all ranks, as a text with a cut image, leave the style off their attention"
            f"{see('Positions that count from 0')}"
        )


def _find_begin(binding: Binding, length: int) -> int:
    """The first position of this rank's ``length`` tokens; 0 if the layout gives the rank another number of tokens."""
    rank, layout = binding.group.rank(), binding.layout
    # A balancer gets the length of the sequence if all ranks hold as many tokens. It may raise for another length.
    with contextlib.suppress(Exception):
        layout = layout if isinstance(layout, SequenceLayout) else binding.layout_for(length * binding.group.size())
        if length and layout.lengths[rank] == length:
            return int(layout.positions(rank, "cpu")[0])
    return 0


def _rows_begin_at_0(positions: torch.Tensor) -> bool:
    # Positions in time, height and width, [3 or 4, B, S], where nothing has cut the inputs of a language model. Rows
    # with padding on the left begin with some value twice. The longest row of a batch has no padding.
    if positions.ndim != 3 or positions.shape[-1] < 2:
        return False
    start, second = positions[..., 0], positions[..., 1]
    padded = (start == second).all(0)
    from_0 = (start == 0).all(0) & ~padded
    return bool((from_0 | padded).all() & from_0.any())


def counts_mask(model: nn.Module) -> bool:
    """Whether a table of positions counts the tokens that a mask shows, as in OPT."""
    tables = (child for child in model.modules() if isinstance(child, nn.Embedding))
    return any("attention_mask" in forward_parameters(table) for table in tables)


def find_padding_position(model: nn.Module) -> int | None:
    """The position of padding tokens, if the first token has the position after it. None for models that count from 0.

    It is also the id of the padding token.
    """
    # Such models have a table of positions with a row for padding, and transformers' function that makes positions.
    for module in model.modules():
        padding, kind = getattr(module, "padding_idx", None), type(module)
        table = hasattr(module, "position_embeddings") or hasattr(module, "weights")
        counts = hasattr(kind, _COUNTS) or hasattr(sys.modules.get(kind.__module__), _COUNTS)
        if isinstance(padding, int) and table and counts:
            return padding
    return None
