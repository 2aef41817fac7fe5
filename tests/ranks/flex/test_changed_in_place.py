"""A mask whose tensors are changed in place after it was made: every rank raises, whoever holds the mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import Causal, Dense, FlexMask, Mask, PerRow, head_tail
from cp_styles.testing import run_ranks
from tests.doors import door
from tests.oracle import error, expected_attention, randn
from tests.ranks.attention_case import EXACT, cp_mesh

LENGTH, RANKS = 13, 2
LAYOUT = head_tail(LENGTH, RANKS)
INPUTS = [randn(i, 2, 2, LENGTH, 4) for i in range(4)]  # query, key, value and a cotangent


DOORS = ("function", "flex", "module", "style", "scope")


def attended(name: str, mask: Mask, mesh) -> Callable[..., torch.Tensor]:
    return door(name, mesh, causal=False, mask=mask, layout=LAYOUT)


def block_mask_of(ids, *, sink=False, rows=False):
    def mod(b, h, q, k):
        row = b if rows else 0
        return ((ids[row, q] == ids[row, k]) | (k % 5 == 0) & sink) & (q >= k)

    return create_block_mask(mod, 2 if rows else None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=4)


MASKS = {
    "band": lambda ids: FlexMask(block_mask_of(ids)),
    "blocks": lambda ids: FlexMask(block_mask_of(ids, sink=True)),
    "rows": lambda ids: FlexMask.per_row(block_mask_of(ids, rows=True)),
    "beside a band": lambda ids: FlexMask(block_mask_of(ids)) & Causal(),
    "beside rows": lambda ids: FlexMask(block_mask_of(ids, rows=True)) & PerRow((Causal(), Causal())),
}


def allowed(name: str, ids: torch.Tensor) -> torch.Tensor:
    same = ids[:, None, :, None] == ids[:, None, None, :]
    if name == "blocks":
        same = same | (torch.arange(LENGTH) % 5 == 0)
    return (same if "rows" in name else same[:1]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize("changes", [range(RANKS), [1]], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(
    ("name", "mask"), [*((name, "band") for name in DOORS), *(("module", mask) for mask in MASKS if mask != "band")]
)
def test_every_rank_raises_at_the_next_call(name: str, mask: str, changes):
    """A backward that comes after the change uses the values of its forward."""
    before = torch.arange(LENGTH).expand(2, -1) // torch.tensor([[5], [7]])
    *whole, grad = INPUTS
    wanted = expected_attention(whole, grad, allowed(mask, before))

    def on(rank: int):
        ids = before.clone()
        attend = attended(name, MASKS[mask](ids), cp_mesh(RANKS))
        leaves = [LAYOUT.shard(x, 2, rank).requires_grad_() for x in whole]
        out = attend(*leaves)
        if rank in changes:
            ids.zero_()
        found = [out.detach(), *torch.autograd.grad(out, leaves, LAYOUT.shard(grad, 2, rank))]
        try:
            attend(*leaves)
        except Exception as problem:
            return found, problem
        return found, None

    found, problems = zip(*run_ranks(on, RANKS), strict=True)
    for parts, expected in zip(zip(*found, strict=True), wanted, strict=True):
        assert error(LAYOUT.unshard(parts, 2), expected) < EXACT
    for rank, problem in enumerate(problems):
        if rank in changes:
            assert isinstance(problem, RuntimeError)
            assert "changed in place after the BlockMask was first used" in str(problem)
        else:
            assert "rank 1" in str(problem) or "ranks [1]" in str(problem), problem


def test_tensors_of_inference_mode():
    """They have no version. An evaluation loop may refill them all the same."""
    with torch.inference_mode():
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        mask = FlexMask(block_mask_of(ids))
        mask.check_unchanged()
        ids[:, 3:] = 1
        with pytest.raises(RuntimeError, match="changed in place"):
            mask.check_unchanged()


def test_a_dense_mask():
    def on(rank: int) -> None:
        tensor = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        attend = attended("module", Dense(tensor), cp_mesh(RANKS))
        parts = [LAYOUT.shard(x, 2, rank) for x in INPUTS[:3]]
        attend(*parts)
        tensor[rank:, 0] = False  # not the same on all ranks
        attend(*parts)

    for problem in run_ranks(on, RANKS, return_errors=True):
        assert "was changed in place after it was given as a mask" in str(problem)
