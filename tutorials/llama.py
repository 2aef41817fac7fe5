"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. And the one plan that parallelizes it.

The model's code does not depend on parallelism. It keeps two conventions. Positions are an argument, because a rank's
tokens need not start at 0 nor be neighbours. And ``scaled_dot_product_attention`` is called in a module of its own that
receives query, key and value.

Shapes: B batch, L local tokens, W width, H query heads, G key/value heads, D head dim; H and G are this rank's share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles import (
    AttentionContextParallel,
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


@dataclass(frozen=True)
class LlamaConfig:
    vocabulary: int
    width: int = 128
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 352
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def rotary_table(positions: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype) -> torch.Tensor:
    """cos and sin of every position's angles: ``[2, L, D / 2]``, from float64 whatever the dtype of the model."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = positions.to(torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def rotate(x_BHLD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table
    first, second = x_BHLD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class CoreAttention(nn.Module):
    """What context parallelism is applied to: query, key and value of this rank's tokens, positions already in them."""

    def forward(self, q_BHLD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLD: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q_BHLD, k_BGLD, v_BGLD, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        self.core = CoreAttention()

    def forward(self, x_BLW: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        # -1 and not a number of heads: under tensor parallelism there are fewer of them here.
        q_BHLD, k_BGLD, v_BGLD = (
            linear(x_BLW).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        out_BHLD = self.core(rotate(q_BHLD, table), rotate(k_BGLD, table), v_BGLD)
        return self.wo(out_BHLD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BLW: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BLW)) * self.w3(x_BLW))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BLW: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x_BLW = x_BLW + self.attention(self.attention_norm(x_BLW), table)
        return x_BLW + self.feed_forward(self.feed_forward_norm(x_BLW))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BL: torch.Tensor, positions_L: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, L, vocabulary]`` of tokens that stand at ``positions_L`` of the whole sequence."""
        config = self.config
        table = rotary_table(positions_L, config.head_dim, config.rope_base, self.norm.weight.dtype)
        x_BLW = self.embed(tokens_BL)
        for layer in self.layers:
            x_BLW = layer(x_BLW, table)
        return self.out(self.norm(x_BLW))


def parallel_plan(attention: AttentionContextParallel) -> dict[str, ParallelStyle]:
    """The plan of the whole model on a mesh with the axes "cp" and "tp", for one call of ``parallelize_module``.

    cp cuts the sequence among ranks, and only the attention is told. Within a cp rank, tp cuts heads and features
    where there are some, and this rank's part of the sequence in between (sequence parallelism).
    """
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.core": attention,
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
