"""Rotary tables of complex numbers under the names that mean positions, as blocks of Llama and of video models take
them: exact at every door, loss and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import BatchSharder, ModuleContextParallel, contiguous, head_tail
from cp_styles.batch import sum_gradients
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, cp_mesh

LENGTH, RANKS, HEADS, TOKENS = 16, 2, 2, 11


def table(positions: torch.Tensor, dim: int) -> torch.Tensor:
    """[L, D / 2]"""
    turns = positions[:, None].double() / 100 ** (torch.arange(0, dim, 2) / dim)
    return torch.polar(torch.ones_like(turns), turns)


def turned(x_BHLD: torch.Tensor, table_LD: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x_BHLD.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * table_LD).flatten(-2)


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * dim, 3 * HEADS * dim)

    def forward(self, x, freqs_cis):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = turned(q, freqs_cis), turned(k, freqs_cis)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(TOKENS, HEADS * dim), Layer(dim)
        self.head = nn.Linear(HEADS * dim, TOKENS)

    def run(self, tokens, turns):
        return self.head(self.layer(self.embedding(tokens), turns))


class Freqs(Model):
    def forward(self, tokens, freqs_cis):
        return self.run(tokens, freqs_cis)


class Position(Model):
    def forward(self, pos_cis, tokens):
        return self.run(tokens, pos_cis)


class Rotary(Model):
    def forward(self, tokens, rotary):
        return self.run(tokens, rotary)


def called(model: nn.Module, tokens: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    return model(turns, tokens) if isinstance(model, Position) else model(tokens, turns)


@pytest.mark.parametrize("dim", [8, 2 * LENGTH // RANKS], ids=["[8, 4]", "[8, 8], as many as tokens"])
@pytest.mark.parametrize("kind", [Freqs, Position, Rotary])
@pytest.mark.parametrize("door", ["model", "layer", "block", "sharder"])
def test_a_complex_table(door: str, kind: type[Model], dim: int):
    torch.manual_seed(0)
    model, layout = kind(dim).double(), (contiguous if door == "layer" else head_tail)(LENGTH, RANKS)
    tokens = randn(0, 2, LENGTH).argsort(1) % TOKENS
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), 1)
    whole = table(torch.arange(LENGTH), dim)
    expected = copy.deepcopy(model)
    F.cross_entropy(called(expected, tokens, whole).flatten(0, 1), labels.flatten()).backward()

    def on(rank: int) -> list[torch.Tensor]:
        mine, mesh = copy.deepcopy(model), cp_mesh(RANKS)
        share = 1 / int((labels != -100).sum())
        if door == "block":
            buffers = [tokens.clone(), labels.clone(), whole.clone()]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], layout=layout):
                logits = called(mine, buffers[0], buffers[2])
                (F.cross_entropy(logits.flatten(0, 1), buffers[1].flatten(), reduction="sum") * share).backward()
        else:
            style = ModuleContextParallel(layout=layout)
            parallelize_module(mine, mesh, {"layer": style} if door == "layer" else style)
            if door == "sharder":
                batch = BatchSharder(mesh, layout=layout)(tokens)
                batch.loss(called(mine, batch.tokens, table(layout.positions(rank), dim))).backward()
            else:
                logits = called(mine, layout.shard(tokens, 1, rank), layout.shard(whole, 0, rank))
                target = layout.shard(labels, 1, rank)
                (F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") * share).backward()
        sum_gradients(mine, mesh)
        return [parameter.grad for parameter in mine.parameters()]

    for gradients in run_ranks(on, RANKS):
        for mine, parameter in zip(gradients, expected.parameters(), strict=True):
            assert error(mine, parameter.grad) < EXACT
