"""The first forward of a ModuleContextParallel is followed, and nothing of the program notices it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import ModuleContextParallel, contiguous, head_tail
from cp_styles.testing import MemoryTrace, run_ranks
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh

WIDTH, LENGTH, RANKS = 8, 12, 2
CUT = head_tail(LENGTH, RANKS)
TOKENS = torch.arange(LENGTH)[None] % 7
POSITIONS = torch.arange(LENGTH)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, rotations=None):
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if rotations is not None:
            turn = [torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * rotations for y in (q, k)]
            q, k = (torch.view_as_real(y).flatten(-2) for y in turn)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Tokens, another module, an attention, and the same module again."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.embedding, self.attention, self.inner = nn.Embedding(7, WIDTH), Attention(), nn.ModuleList(inner)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for module in self.inner:
            x = module(x)
        return self.attention(x)


def styled(model: nn.Module, **options: Any) -> nn.Module:
    mesh, mine = cp_mesh(RANKS), copy.deepcopy(model)
    return parallelize_module(mine, mesh, ModuleContextParallel(layout=head_tail, **options))


def made(model: Any) -> Any:
    torch.manual_seed(0)
    return model().double()


# Nothing is noticed.


class Fused(torch.autograd.Function):
    """Adds to the weight's ``main_grad`` in its backward, as Megatron's linear layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad += gradient.flatten(0, 1).T @ x.flatten(0, 1)
        return gradient @ weight, None


class FusedLinear(nn.Linear):
    def forward(self, x):
        return Fused.apply(x, self.weight)


def test_backwards_run_once():
    """And none of a made-up loss."""
    model = made(lambda: Model(FusedLinear(WIDTH, WIDTH, bias=False)))

    def gradient_of(mine: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        weight = mine.inner[0].weight
        weight.main_grad = torch.zeros_like(weight)
        mine(tokens).square().sum().backward()
        return weight.main_grad

    wanted = gradient_of(copy.deepcopy(model), TOKENS)
    parts = run_ranks(lambda rank: gradient_of(styled(model), CUT.shard(TOKENS, 1, rank)), RANKS)
    assert error(sum(parts), wanted) < 1e-12


def test_memory_of_large_results():
    """The first forward takes what the second takes: one copy of the logits, and not two."""

    class WithHead(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 20_000, bias=False)

        def forward(self, tokens):
            return self.head(super().forward(tokens))

    model = WithHead()

    def on(rank: int) -> list[int]:
        mine, peaks = styled(model), []
        for _ in range(2):
            with MemoryTrace() as trace:
                mine(CUT.shard(TOKENS, 1, rank)).sum().backward()
            peaks.append(trace.peak)
        return peaks

    for first, second in run_ranks(on, RANKS):
        assert first <= 1.02 * second


# Each forward that may be another is followed.


def refusals(act: Any) -> str:
    errors = run_ranks(act, RANKS, return_errors=True)
    assert all(isinstance(each, ValueError | NotImplementedError) for each in errors), errors
    return "\n".join(map(str, errors))


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, width, padding=width // 2)

    def forward(self, x):
        return self.inner(x.mT).mT


class Centred(nn.Module):
    def __init__(self, centres: bool) -> None:
        super().__init__()
        self.centres, self.linear = centres, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        return x - x.mean(1, keepdim=True) if self.centres else x


class TokenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.mT).mT


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (Convolution(1), Convolution(3)),
        lambda: (Centred(False), Centred(True)),
        lambda: (nn.Linear(WIDTH, WIDTH), nn.Softmax(1)),
        lambda: (nn.Linear(WIDTH, WIDTH), nn.AvgPool2d((3, 1), 1, (1, 0))),
    ],
)
def test_modules_of_one_class_and_leaves_of_torch(layers):
    model = made(lambda: Model(*layers()))
    words = refusals(lambda rank: styled(model)(CUT.shard(TOKENS, 1, rank)))
    assert re.search(
        r"carries values from token to token without an attention call: \w+ at \S+test_first_forward", words
    )


def test_a_norm_that_ran_in_evaluation_before_training():
    model = made(lambda: Model(TokenNorm()))

    def on(rank: int) -> None:
        mine = styled(model).eval()
        mine(CUT.shard(TOKENS, 1, rank))
        mine.train()(CUT.shard(TOKENS, 1, rank))

    assert "inner.0.norm (BatchNorm1d) carries values from token to token" in refusals(on)


def test_a_layer_that_the_first_forwards_left_out():
    class Dropping(Model):
        left_out = True

        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.attention(x if self.left_out else self.inner[0](x))

    model = made(lambda: Dropping(Centred(True)))

    def on(rank: int) -> None:
        mine = styled(model)
        for _ in range(2):
            mine(CUT.shard(TOKENS, 1, rank))
        mine.left_out = False
        mine(CUT.shard(TOKENS, 1, rank))

    assert r"inner.0 (Centred) carries values from token to token" in refusals(on)


# Positions from tables.


class Table(Model):
    """As torch's tutorial and minGPT take positions: the first rows of a table. ``positions`` are the remedy."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        table = torch.zeros(1, 64, WIDTH) if trained else randn(1, 1, 64, WIDTH)
        self.table = nn.Parameter(table) if trained else nn.Buffer(table)

    def forward(self, tokens, positions=None):
        x = self.embedding(tokens)
        x = x + (self.table[:, : x.size(1)] if positions is None else self.table[:, positions])
        return x + self.attention(x)


class Rotating(Model):
    """As Llama's reference."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1])).double()
        self.rotations = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens, positions=None):
        rotations = self.rotations[: tokens.shape[1]] if positions is None else self.rotations[positions]
        return self.attention(self.embedding(tokens), rotations)


class Summing(Model):
    """As m2m_100 and its like: positions are sums of the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, tokens, positions=None):
        positions = tokens.ne(-1).int().cumsum(1) if positions is None else positions + 1
        return self.attention(self.embedding(tokens) + self.table(positions))


@pytest.mark.parametrize("layout", [head_tail, contiguous])
@pytest.mark.parametrize("model", [lambda: Table(True), lambda: Table(False), Rotating, Summing])
def test_positions_that_a_model_counts(model, layout):
    """Refused with the line; exact with the remedy."""
    one, cut = made(model), layout(LENGTH, RANKS)

    def on(rank: int, *positions: torch.Tensor) -> torch.Tensor:
        mine = parallelize_module(copy.deepcopy(one), cp_mesh(RANKS), ModuleContextParallel(layout=layout))
        return mine(cut.shard(TOKENS, 1, rank), *(cut.shard(each, 0, rank) for each in positions)).detach()

    words = refusals(on)
    assert re.search(
        r"(takes the first 6 rows of a table of 64|carries values .* cumsum) at \S+test_first_forward.py:\d+", words
    )
    found = cut.unshard(run_ranks(lambda rank: on(rank, POSITIONS), RANKS), 1)
    assert error(found, one(TOKENS).detach()) < 1e-12


def test_positions_of_a_table_that_was_cut():
    """What ``shard`` cut has this rank's rows."""
    one = made(lambda: Table(False))

    def on(rank: int) -> torch.Tensor:
        mine = styled(one)
        mine.table = CUT.shard(mine.table[:, :LENGTH], 1, rank)
        return mine(CUT.shard(TOKENS, 1, rank)).detach()

    assert error(CUT.unshard(run_ranks(on, RANKS), 1), one(TOKENS).detach()) < 1e-12
