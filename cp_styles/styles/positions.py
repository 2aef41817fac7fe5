"""Models of transformers whose tokens count from the position after that of padding: RoBERTa's family, ESM, MPNet."""

from __future__ import annotations

import sys

import torch
from torch import nn

_COUNTS = "create_position_ids_from_input_ids"


def padding_position(model: nn.Module) -> int | None:
    """The position of padding tokens, if the first token has the one after it. None for models that count from 0.

    It is also the id of the padding token. Such models have a table of positions with a row for padding, and beside it
    transformers' function that makes positions from token ids.
    """
    for module in model.modules():
        padding, kind = getattr(module, "padding_idx", None), type(module)
        table = hasattr(module, "position_embeddings") or hasattr(module, "weights")
        if isinstance(padding, int) and table and _counts(kind):
            return padding
    return None


def _counts(kind: type[nn.Module]) -> bool:
    return hasattr(kind, _COUNTS) or hasattr(sys.modules.get(kind.__module__), _COUNTS)


def positions_after_padding(tokens_BS: torch.Tensor, padding: int) -> torch.Tensor:
    """Positions [B, S] of whole sequences, where padding tokens are not counted and have the position ``padding``."""
    present = (tokens_BS != padding).long()
    return present.cumsum(1) * present + padding
