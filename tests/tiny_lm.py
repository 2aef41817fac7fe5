"""A tiny causal language model for tests whose model has no features of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    """Causal attention of two heads over [B, L, width]. A mask takes the place of the causal one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2).flatten(2)


class LanguageModel(nn.Module):
    """Embeddings of words, and of ``places`` positions if there are any; one attention; logits [B, L, words]."""

    def __init__(self, words: int, places: int = 0, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(places, width) if places else None
        self.attention, self.head = SelfAttention(width), nn.Linear(width, words)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.logits(self.embed(tokens), positions, mask)

    def logits(self, x: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x if self.place is None else x + self.place(positions)
        return self.head(x + self.attention(x, mask))


def language_model(words: int, places: int = 0, width: int = 16) -> LanguageModel:
    """A model of seed 0 in float64. Make it before there are threads, which would share the generator."""
    torch.manual_seed(0)
    return LanguageModel(words, places, width).double()


def gradients(model: nn.Module) -> torch.Tensor:
    """Gradients of all parameters, as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
