"""Training with context_parallel as accelerate and others write it: losses and parameters of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cp_styles import contiguous, global_loss, global_token_count, head_tail, next_token_labels, sum_gradients
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import context_parallel
from tests.ranks.attention_case import on_every_rank
from tests.covering import sampled
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh

LENGTH, VOCABULARY, WIDTH, STEPS = 13, 11, 8, 4


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        for index, parameter in enumerate(self.parameters()):
            parameter.data = randn(seed + index, *parameter.shape) * WIDTH**-0.5

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """What matters of a causal language model: it takes the names that a batch of a data loader has."""

    def __init__(self, around: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        for seed, table in enumerate((self.tokens, self.positions)):
            table.weight.data = randn(seed, *table.weight.shape)
        self.blocks = nn.ModuleList(Block(10 * (1 + index)) for index in range(2))
        self.around = around

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = self.around(block, x)
        return x @ self.tokens.weight.T


def batches() -> list[dict[str, torch.Tensor]]:
    """As the data loader of every process gives them: whole, the labels shifted before anything is cut."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(STEPS)]
    return [
        {
            "input_ids": ids,
            "labels": next_token_labels(ids),
            "position_ids": torch.arange(LENGTH).expand(2, LENGTH),  # a view with a stride of 0, as models make them
        }
        for ids in tokens
    ]


def train(around, mesh=None, **options) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of all steps and the parameters after them, by one process or by those of a mesh."""
    model = Model(around)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for batch in batches():
        buffers = list(batch.values())
        if mesh is None:
            logits = model(batch["input_ids"], batch["position_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
        else:
            with context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers), **options
            ):
                logits = model(batch["input_ids"], batch["position_ids"])
                each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                loss = global_loss(each, global_token_count(batch["labels"], mesh), mesh)
                loss.backward()
            sum_gradients(model, mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


AROUND = {
    "plain": lambda block, x: block(x),
    "checkpointed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "checkpointed, reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),  # trl#4314
}


def differences(rank, ranks, around, **options) -> float:
    losses, parameters = train(around, cp_mesh(ranks), **options)
    expected_losses, expected = train(AROUND["plain"])
    worst = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    return max(worst, *(error(*pair) for pair in zip(parameters, expected, strict=True)))


# AdamW divides by the root of the second moment, which makes more of a gradient near zero's last bits; a token too many
# or too few shows at 1e-3.
SAME = 1e-10


@sampled(1, around=AROUND, ranks=[3, 2])
def test_the_same_training_as_on_one_device(around: str, ranks: int):
    assert max(run_ranks(differences, ranks, ranks, AROUND[around])) < SAME


@pytest.mark.parametrize("layout", [head_tail, contiguous])
def test_with_a_cut_of_ones_own(layout):
    def rank_main(rank):
        return differences(rank, 2, AROUND["plain"], layout=layout)

    assert max(run_ranks(rank_main, 2)) < SAME


def test_a_batch_that_is_cut_already_is_refused():
    """Two epochs over the same tensors, which no_restore_buffers leaves cut: torch would cut the parts again."""
    batch = batches()[0]

    def rank_main(rank):
        ids = batch["input_ids"].clone()
        for _ in range(2):
            with context_parallel(cp_mesh(2), buffers=[ids], buffer_seq_dims=[1], no_restore_buffers=[ids]):
                pass

    with pytest.raises(RankError, match="no_restore_buffers"):
        run_ranks(rank_main, 2)


@on_every_rank(2)
def test_a_buffer_that_was_filled_again_is_not(mesh, rank: int):
    """One tensor for all batches, which the data loader resizes and fills."""
    first, second = (batch["input_ids"] for batch in batches()[:2])
    ids = first.clone()
    for whole in (first, second):
        ids.resize_(whole.shape).copy_(whole)
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], no_restore_buffers=[ids]):
            assert torch.equal(ids, head_tail(LENGTH, 2).shard(whole, 1, rank))
