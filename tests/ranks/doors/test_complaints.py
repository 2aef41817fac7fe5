"""What users of other packages reported of theirs, tried here."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cp_styles import BatchSharder, contiguous, parallelize_module, sum_gradients
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests.first_hours import nanogpt
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, run_attention

PROBLEM = Problem(length=13)
HELD = partial(F.scaled_dot_product_attention, is_causal=True)


class Held(nn.Module):
    def forward(self, query, key, value):
        return HELD(query, key, value)


@pytest.mark.parametrize("style", [AttentionContextParallel, ModuleContextParallel])
def test_a_function_held_since_import_and_deterministic_algorithms(style):
    def on(rank: int) -> float:
        core = parallelize_module(Held(), cp_mesh(2), style())
        return max(run_attention(core, PROBLEM, rank, 2))

    torch.use_deterministic_algorithms(True)  # of the process: before there are threads
    try:
        assert max(run_ranks(on, 2)) < EXACT
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("labelled", [range(2), range(0)], ids=["rank 0 alone", "none"])
def test_ranks_without_labels(labelled: range):
    """The mean is over those that there are; without any it is nan on all ranks, as on one device."""
    tokens = torch.arange(13).view(1, 13) % 7
    labels = torch.where(torch.isin(torch.arange(13), torch.tensor([*labelled, -1]) + 1), tokens, -100)
    table = nn.Embedding(7, 7).double()
    table.weight.data = randn(0, 7, 7)
    one = copy.deepcopy(table)
    expected = F.cross_entropy(one(tokens)[0, :-1], labels[0, 1:])
    expected.backward()

    def on(rank: int) -> None:
        mine, sharder = copy.deepcopy(table), BatchSharder(cp_mesh(2), layout=contiguous)
        batch = sharder({"input_ids": tokens, "labels": labels})
        loss = batch.loss(mine(batch.tokens))
        loss.backward()
        sharder.sum_gradients(mine)
        if labelled:
            assert max(error(loss.detach(), expected.detach()), error(mine.weight.grad, one.weight.grad)) < EXACT
        else:
            assert bool(loss.isnan()) is bool(expected.isnan()) is True

    run_ranks(on, 2)


class Fused(nanogpt.GPT):
    """Its head and its loss are one function, a chunk at a time: the logits of all tokens never exist at once."""

    def hidden(self, tokens, positions):
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens, positions, targets=None):
        return self.loss(self.hidden(tokens, positions), tokens.roll(-1, 1) if targets is None else targets)

    def loss(self, x, targets):
        losses = []
        for part, chosen in zip(x.flatten(0, 1).split(5), targets.flatten().split(5), strict=True):
            logits = self.head(part)
            losses.append((logits.logsumexp(1) - logits.gather(1, chosen[:, None])[:, 0]).sum())
        return torch.stack(losses).sum()


@pytest.mark.parametrize("door", ["module", "block", "block, its loss outside"])
def test_a_fused_loss_that_rolls_its_ids(door: str):
    """Refused if it rolls those of a part; exact with targets that were rolled before the cut."""
    torch.manual_seed(0)
    one, tokens = Fused().double(), torch.arange(24).view(2, 12) * 5 % 11
    model = copy.deepcopy(one)
    expected = one(tokens, torch.arange(12))
    expected.backward()

    def on(rank: int, rolled: bool) -> float:
        mine, mesh = copy.deepcopy(model), cp_mesh(2)
        if door == "module":
            parallelize_module(mine, mesh, ModuleContextParallel())
            batch = BatchSharder(mesh, seq_dims={"targets": 1})({"input_ids": tokens, "targets": tokens.roll(-1, 1)})
            loss = mine(batch.tokens, batch.positions, batch["targets"] if rolled else None)
            loss.backward()
        else:
            buffers = [tokens.clone(), torch.arange(12), tokens.roll(-1, 1)]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 0, 1]):
                part, positions, targets = buffers[0], buffers[1], buffers[2] if rolled else None
                if door == "block":
                    loss = mine(part, positions, targets)
                else:
                    loss = mine.loss(mine.hidden(part, positions), part.roll(-1, 1) if targets is None else targets)
                loss.backward()
        sum_gradients(mine, mesh)
        torch.distributed.all_reduce(total := loss.detach(), group=mesh.get_group())
        pairs = zip(mine.parameters(), one.parameters(), strict=True)
        return max(error(total, expected.detach()), *(error(x.grad, y.grad) for x, y in pairs))

    errors = run_ranks(lambda rank: on(rank, False), 2, return_errors=True)
    assert all("takes by gather" in str(each) and "shifted after the cut" in str(each) for each in errors), errors
    assert max(run_ranks(lambda rank: on(rank, True), 2)) < EXACT
