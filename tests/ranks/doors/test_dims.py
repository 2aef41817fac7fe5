"""Under a ModuleContextParallel the tokens may be along any dim of a model's inputs."""

from __future__ import annotations

import copy
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


class Model(nn.Module):
    """As torch's tutorial: inside, tokens are along the first dim."""

    def __init__(self, arranged: str) -> None:
        super().__init__()
        self.read, self.embedding = ARRANGED[arranged][1], nn.Linear(IDS, WIDTH)
        self.table = nn.Buffer(torch.randn(64, 1, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, norm_first=True)

    def forward(self, x, positions):
        x = self.embedding(self.read(x)).transpose(0, 1)
        return self.layer(x + self.table[positions]).transpose(0, 1)


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
