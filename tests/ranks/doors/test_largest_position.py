"""The largest position inside of a module is the maximum over the whole sequence, and other maxima stay local."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import scaled_dot_product_attention

from cp_styles import ModuleContextParallel, head_tail, parallelize_module
from cp_styles.testing import run_ranks
from tests.ranks.attention_case import cp_mesh

LENGTH, RANKS = 16, 2


class Asks(nn.Module):
    def __init__(self, of: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x, position_ids):
        self.largest = torch.max(self.of(x, position_ids))
        return scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    ("of", "largest"),
    [
        (lambda x, positions: positions, [LENGTH - 1] * RANKS),
        (lambda x, positions: positions[None], [LENGTH - 1] * RANKS),
        (lambda x, positions: positions * 1, [LENGTH - 1, LENGTH - 1 - LENGTH // 4]),
        # A DTensor of the same last size has no memory to compare.
        (lambda x, positions: DTensor.from_local(positions * 1, cp_mesh(RANKS), [Replicate()]).abs(), None),
    ],
)
def test_the_largest_of_all_ranks(of, largest):
    layout = head_tail(LENGTH, RANKS)

    def on(rank: int) -> float:
        model = parallelize_module(Asks(of), cp_mesh(RANKS), ModuleContextParallel(verified=True))
        model(torch.ones(1, 1, LENGTH // RANKS, 8), position_ids=layout.positions(rank)[None])
        found = model.largest
        return float(found.to_local() if isinstance(found, DTensor) else found)

    own = [float(layout.positions(rank).max()) for rank in range(RANKS)]
    assert run_ranks(on, RANKS) == (own if largest is None else largest)
