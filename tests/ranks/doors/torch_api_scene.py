"""A small model for the tests of context_parallel. Its tables are buffers that a block cuts and its graph saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import sum_gradients
from tests.oracle import error, randn

LENGTH, WIDTH, HEADS = 11, 8, 2


class Layer(nn.Module):
    """Multiplies by a table [S, width] as rotary embeddings do, attends, projects."""

    def __init__(self, seed: int = 0, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Parameter(randn(seed, WIDTH, 3 * WIDTH) * WIDTH**-0.5)
        self.out = nn.Parameter(randn(seed + 1, WIDTH, WIDTH) * WIDTH**-0.5)
        self.table: torch.Tensor
        self.register_buffer("table", randn(seed + 2, LENGTH, WIDTH), persistent=False)

    def forward(self, x_BSW):
        query, key, value = (
            t.view(*x_BSW.shape[:2], HEADS, -1).transpose(1, 2) for t in ((x_BSW * self.table) @ self.qkv).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return x_BSW + out.transpose(1, 2).flatten(2) @ self.out


class Batch:
    """A whole batch, a cotangent, and what one device makes of them."""

    def __init__(self, seed: int = 50, *, layers: int = 1, causal: bool = True) -> None:
        self.x, self.cotangent = randn(seed, 2, LENGTH, WIDTH), randn(seed + 1, 2, LENGTH, WIDTH)
        self.layers, self.causal = layers, causal
        model = self.model()
        out = run(model, self.x)
        out.backward(self.cotangent)
        self.expected = [out.detach(), *(parameter.grad for parameter in model.parameters())]

    def model(self) -> nn.ModuleList:
        return nn.ModuleList(Layer(10 * index, causal=self.causal) for index in range(self.layers))

    def buffers(self, model: nn.ModuleList) -> dict[str, Any]:
        """Arguments of context_parallel, with copies of the batch."""
        tables = [layer.table for layer in model]
        return {
            "buffers": [self.x.clone(), self.cotangent.clone(), *tables],
            "buffer_seq_dims": [1, 1, *(0 for _ in tables)],
        }

    def errors(self, found: list[torch.Tensor]) -> float:
        """The largest."""
        return max(error(*pair) for pair in zip(found, self.expected, strict=True))


def run(model: nn.ModuleList, x: torch.Tensor, around: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
    """All layers, each through ``around(layer, x)``."""
    for layer in model:
        x = layer(x) if around is None else around(layer, x)
    return x


def gradients(model: nn.ModuleList, mesh: DeviceMesh) -> list[torch.Tensor]:
    """One device's, from every rank's share."""
    sum_gradients(model, mesh)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
