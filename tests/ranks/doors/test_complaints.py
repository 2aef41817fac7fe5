"""What users of other packages reported of theirs, tried here."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cp_styles import BatchSharder, contiguous, parallelize_module
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import run_ranks
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
