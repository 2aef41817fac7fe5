"""Models that count their tokens and take no positions, such as Bart: they get the positions of a rank's tokens."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from cp_styles._lib.compat import uncompiled
from cp_styles._lib.introspect import input_names, is_model
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layouts import SequenceLayout
from cp_styles.layouts.layout import find_cut

_POSITIONS = "position_ids"
_NOT_IN_GRAPHS = (
    "a model that counts its tokens is given their positions outside of torch.compile's graphs: compile without "
    "fullgraph=True"
)


def hand_over_positions(model: nn.Module, calls: AttentionCalls) -> None:
    """Hook ``model``, if it takes tokens and no positions, and has tables of transformers that take positions.

    Where a layout has cut its tokens, the tables get the positions of this rank's tokens. Other tokens are counted by
    the model, as before. No communication.
    """
    # In a user's own model, a document may begin with this rank's part, and its positions at 0.
    tables = [
        child
        for child in model.children()
        if isinstance(child, nn.Embedding)
        and type(child).__module__.startswith("transformers.")
        and _takes_positions(child)
    ]
    if tables and is_model(model) and not _takes_positions(model):
        cut = _CutTokens(calls)
        model.register_forward_pre_hook(cut.note, with_kwargs=True)
        for table in tables:
            table.register_forward_pre_hook(cut.hand_over, with_kwargs=True)


def _takes_positions(module: nn.Module) -> bool:
    return _POSITIONS in inspect.signature(type(module).forward).parameters


class _CutTokens:
    """The tokens of the latest forward of one model, and the layout that has cut them."""

    def __init__(self, calls: AttentionCalls) -> None:
        self._calls = calls
        self._tokens: tuple[SequenceLayout, torch.device] | None = None

    @partial(uncompiled, reason=_NOT_IN_GRAPHS)
    def note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model."""
        inputs = dict(zip(input_names(model), args, strict=False)) | kwargs
        tokens = next((x for x in map(inputs.get, ("input_ids", "inputs_embeds")) if x is not None), None)
        self._tokens, cut = None, None if tokens is None else find_cut(tokens)
        if tokens is not None and cut is not None and cut[1] == 1:
            layout = cut[0]
            self._tokens = (layout, tokens.device) if layout.ranks == self._calls.unscoped.group.size() else None

    @partial(uncompiled, reason=_NOT_IN_GRAPHS)
    def hand_over(self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of a table of positions."""
        if self._tokens is None:
            return None
        layout, device = self._tokens
        inputs = dict(zip(input_names(table), args, strict=False)) | kwargs
        positions, given = layout.positions(self._calls.unscoped.group.rank(), device), inputs.get(_POSITIONS)
        if given is not None:  # the model has counted, or a hook of the user knows better. A GPU need not wait for that
            if given.shape[-1] != len(positions):
                return None
            counted = torch.arange(len(positions), device=device)
            positions = torch.where((given == counted).all(), positions, given)
        return (), inputs | {_POSITIONS: positions}
