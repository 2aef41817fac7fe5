"""Under a ModuleContextParallel the tokens may be along any dim of a model's inputs: what mixes or counts them is
refused there too, and what does not is exact."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cp_styles import ModuleContextParallel, head_tail, parallelize_module
from cp_styles.testing import run_ranks
from tests.oracle import error
from tests.ranks.attention_case import EXACT, cp_mesh

WIDTH, LENGTH, RANKS, IDS = 8, 12, 2, 7
POSITIONS = torch.arange(LENGTH)
LAYOUT = head_tail(LENGTH, RANKS)


def one_hot(ids: torch.Tensor) -> torch.Tensor:
    return F.one_hot(ids, IDS).double()


# How a program hands over ids [B, L], and how its model gets [B, L, IDS] from that.
ARRANGED = {
    "[L, B], a view": (lambda ids: ids.t(), lambda x: one_hot(x.t())),
    "[L, B]": (lambda ids: ids.t().contiguous(), lambda x: one_hot(x.t())),
    "[L, B, C]": (lambda ids: one_hot(ids).transpose(0, 1), lambda x: x.transpose(0, 1)),
    "[B, C, L]": (lambda ids: one_hot(ids).mT, lambda x: x.mT),
    "[2, B, L]": (lambda ids: torch.stack([ids, ids]), lambda x: one_hot(x[1])),
    "[B, L, 2]": (lambda ids: torch.stack([ids, ids], -1), lambda x: one_hot(x[..., 1])),
    "[B, L] of floats": (lambda ids: ids.double(), lambda x: x[..., None] * torch.arange(IDS)),
    "[L] of one sequence": (lambda ids: ids[0].clone(), lambda x: one_hot(x)[None]),
    "an object": (lambda ids: SimpleNamespace(ids=ids.clone()), lambda x: one_hot(x.ids)),
}
# What a model makes of its tokens [L, B, C] before the first attention.
WRONG = {
    "rolled": lambda model, x: x + x.roll(1, 0),
    "a recurrence": lambda model, x: model.gru(x)[0],
    "a mean": lambda model, x: x + x.mean(0),
    "sums": lambda model, x: x + x.cumsum(0),
    "rows of a table": lambda model, x: x + model.table[: x.size(0)],
    "counted": lambda model, x: x + model.embedded(torch.arange(x.size(0)))[:, None],
}


class Model(nn.Module):
    """As torch's tutorial: inside, tokens are along the first dim."""

    def __init__(self, arranged: str, wrong: str | None = None) -> None:
        super().__init__()
        self.read, self.wrong = ARRANGED[arranged][1], WRONG.get(wrong or "")
        self.embedding, self.gru, self.embedded = nn.Linear(IDS, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Embedding(64, WIDTH)
        self.table = nn.Buffer(torch.randn(64, 1, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, norm_first=True)

    def forward(self, x, positions=None):
        x = self.embedding(self.read(x)).transpose(0, 1)
        x = x if positions is None else x + self.table[positions]
        return self.layer(x if self.wrong is None else self.wrong(self, x)).transpose(0, 1)


def styled(model: nn.Module, **options) -> nn.Module:
    return parallelize_module(copy.deepcopy(model), cp_mesh(RANKS), ModuleContextParallel(layout=head_tail, **options))


@pytest.mark.parametrize("rows", [1, 2, LENGTH // RANKS])
@pytest.mark.parametrize("arranged", ARRANGED)
def test_tokens_along_any_dim(arranged: str, rows: int):
    """Also where a batch has as many rows as a rank has tokens."""
    torch.manual_seed(0)
    arrange, model = ARRANGED[arranged][0], Model(arranged).double()
    ids = torch.randint(IDS, (1 if "one sequence" in arranged else rows, LENGTH))
    wanted = model(arrange(ids), POSITIONS)

    def on(rank: int) -> float:
        out = styled(model)(arrange(LAYOUT.shard(ids, 1, rank)), LAYOUT.positions(rank))
        return error(out, LAYOUT.shard(wanted, 1, rank), whole=wanted)

    assert max(run_ranks(on, RANKS)) < EXACT


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("arranged", ARRANGED)
def test_what_mixes_or_counts_tokens_along_any_dim(arranged: str, wrong: str):
    model, arrange = Model(arranged, wrong).double(), ARRANGED[arranged][0]

    def on(rank: int, rows: int) -> None:
        ids = torch.ones(1 if "one sequence" in arranged else rows, LENGTH, dtype=torch.int64)
        styled(model)(arrange(LAYOUT.shard(ids, 1, rank)))

    for rows in (2, LENGTH // RANKS):
        errors = run_ranks(lambda rank, rows=rows: on(rank, rows), RANKS, return_errors=True)
        assert all(isinstance(each, NotImplementedError) for each in errors), errors
        assert all("without an attention call" in str(each) or "it counts this" in str(each) for each in errors), errors
        assert wrong != "a recurrence" or all("gru (GRU) carries" in str(each) for each in errors), errors


class Pools(Model):
    def forward(self, x, positions=None):
        return super().forward(x, positions).mean(1)


@pytest.mark.parametrize("cut", [False, True])
def test_a_classifier_that_pools_the_first_dim(cut: bool):
    model, ids = Pools("[L, B]").double(), torch.ones(3, LENGTH, dtype=torch.int64)

    def on(rank: int) -> None:
        x = LAYOUT.shard(ids.t(), 0, rank) if cut else LAYOUT.shard(ids, 1, rank).t().contiguous()
        styled(model)(x, LAYOUT.positions(rank))

    errors = run_ranks(on, RANKS, return_errors=True)
    assert all("it has pooled them" in str(each) for each in errors), errors


class Both(nn.Module):
    """Adds tokens [L, B, C] to others [B, L, C]. No first attention tells them apart if there are L rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, norm_first=True)

    def forward(self, x, y):
        return self.layer(x + y.transpose(0, 1)).transpose(0, 1)


def test_the_dims_of_inputs_that_a_layout_has_cut_are_known():
    """What the error says, when two inputs have their tokens along different dims."""
    model, rows = Both().double(), LENGTH // RANKS
    x, y = torch.randn(LENGTH, rows, WIDTH).double(), torch.randn(rows, LENGTH, WIDTH).double()
    wanted = model(x, y)

    def on(rank: int, remembered: bool) -> float:
        parts = [LAYOUT.shard(x, 0, rank), LAYOUT.shard(y, 1, rank)]
        out = styled(model)(*(part if remembered else part.clone() for part in parts))
        return error(out, LAYOUT.shard(wanted, 1, rank), whole=wanted)

    assert max(run_ranks(lambda rank: on(rank, True), RANKS)) < EXACT
    errors = run_ranks(lambda rank: on(rank, False), RANKS, return_errors=True)
    words = r"are not along dim 1 of each, cut all inputs by layout\.shard\(x, dim, rank\)"
    assert all(re.search(words, str(each)) for each in errors), errors
