"""A mask whose tensors are changed in place after it was made: every rank raises, whoever holds the mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.varlen import varlen_attn

from cp_styles import (
    Causal,
    Dense,
    Documents,
    FlexMask,
    Mask,
    ModuleContextParallel,
    PerRow,
    context_attention,
    context_flex_attention,
    context_varlen_attention,
    head_tail,
    parallelize_module,
)
from cp_styles.mixers import selected_keys
from cp_styles.testing import run_ranks
from tests.covering import sampled
from tests.doors import door
from tests.oracle import error, expected_attention, randn
from tests.ranks.attention_case import EXACT, cp_mesh, refused

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


# Memory that is filled again: with a version, and without one.
FILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "in place": lambda x, new: x.copy_(new),
    "numpy": lambda x, new: np.copyto(x.numpy(), new.numpy()),
    "data": lambda x, new: x.data.copy_(new),
    "storage": lambda x, new: x.untyped_storage().copy_(new.clone().untyped_storage()),
}


@sampled(
    2,
    lambda name, mask, **_: mask == "band" or name == "module",
    name=list(DOORS),
    mask=list(MASKS),
    fill=list(FILLS),
    changes=[range(RANKS), [1]],
)
def test_every_rank_raises_at_the_next_call(name: str, mask: str, fill: str, changes):
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
            FILLS[fill](ids, torch.zeros_like(ids))
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


@pytest.mark.parametrize("fill", FILLS)
def test_a_block_mask_that_is_filled_again(fill: str):
    """Its own tensors; numbers that are equal are no change."""
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    block_mask = block_mask_of(ids)
    mask = FlexMask(block_mask)
    FILLS[fill](ids, torch.zeros_like(ids))
    mask.check_unchanged()
    FILLS[fill](block_mask.kv_indices, torch.ones_like(block_mask.kv_indices))
    with pytest.raises(RuntimeError, match="of a BlockMask, or that its mask_mod reads, was changed in place"):
        FlexMask(block_mask)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("through", ["function", "module"])
def test_documents_of_the_next_batch(through: str, fill: str):
    """A loader fills cu_seqlens again for each batch, and every layer of it gets the same tensor."""
    whole = [x[0].transpose(0, 1) for x in INPUTS[:3]]
    batches = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 10, 13], [0, 2, 4, 13], [0, 1, 12, 13])]

    def on(rank: int) -> list[torch.Tensor]:
        cu, mesh = batches[0].clone(), cp_mesh(RANKS)
        parts, found = [LAYOUT.shard(x, 0, rank) for x in whole], []
        model = parallelize_module(Packed(), mesh, ModuleContextParallel(layout=LAYOUT, verified=True))
        for ends in batches:
            FILLS[fill](cu, ends)
            for _ in range(2):
                if through == "module":
                    found.append(model(*parts, cu))
                else:
                    found.append(context_varlen_attention(*parts, mesh, cu, layout=LAYOUT))
        return found

    for at, parts in enumerate(zip(*run_ranks(on, RANKS), strict=True)):
        ids = Documents.from_cu_seqlens(batches[at // 2]).bounds(torch.arange(LENGTH))[0]
        wanted = expected_attention([x[:1] for x in INPUTS[:3]], INPUTS[3][:1], ids[:, None] == ids)[0]
        assert error(LAYOUT.unshard(parts, 0).transpose(0, 1)[None], wanted) < EXACT


class Packed(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return varlen_attn(q, k, v, cu, cu, LENGTH, LENGTH)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("fill", FILLS)
def test_selected_positions(fill: str):
    def act(rank: int, mesh) -> None:
        positions = torch.zeros(1, LAYOUT.lengths[rank], 1, dtype=torch.int64)
        mask = selected_keys(positions, mesh, layout=LAYOUT)
        parts = [LAYOUT.shard(x, 2, rank) for x in INPUTS[:3]]
        context_attention(*parts, mesh, mask=mask, layout=LAYOUT)
        FILLS[fill](positions, torch.full_like(positions, LENGTH - 1))
        context_attention(*parts, mesh, mask=mask, layout=LAYOUT)

    refused(act, "were changed in place; give a copy", RuntimeError)


@pytest.mark.parametrize("fill", [fill for fill in FILLS if fill != "in place"])
def test_an_additive_mask_of_the_next_batch(fill: str):
    """Rows of padding at finfo.min, where the batch before had none: their levels are found anew."""
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    least = torch.finfo(torch.float64).min
    biases = [torch.zeros(LENGTH, LENGTH).double().masked_fill(~sees, hidden) for hidden in (float("-inf"), least)]
    biases[1][:3] = least

    def on(rank: int) -> list[torch.Tensor]:
        mask, mesh = biases[0].clone(), cp_mesh(RANKS)
        parts, found = [LAYOUT.shard(x, 2, rank) for x in INPUTS[:3]], []
        for bias in biases:
            FILLS[fill](mask, bias)
            found.append(context_attention(*parts, mesh, mask=Dense(mask), layout=LAYOUT))
        return found

    for parts, bias in zip(zip(*run_ranks(on, RANKS), strict=True), biases, strict=True):
        wanted = F.scaled_dot_product_attention(*INPUTS[:3], bias)
        assert error(LAYOUT.unshard(parts, 2), wanted) < EXACT


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
    def act(rank: int, mesh) -> None:
        tensor = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        attend = attended("module", Dense(tensor), mesh)
        parts = [LAYOUT.shard(x, 2, rank) for x in INPUTS[:3]]
        attend(*parts)
        tensor[rank:, 0] = False  # not the same on all ranks
        attend(*parts)

    refused(act, "was changed in place after it was given as a mask", (RuntimeError, ValueError))


def test_a_table_with_nan():
    """Missing times are nan, which is not equal to itself."""
    times = torch.arange(24.0)
    times[[5, 11]] = torch.nan
    block_mask = create_block_mask(
        lambda b, h, q, k: (times[q] >= times[k]) | (q == k), None, None, 24, 24, device="cpu"
    )
    layout, x = head_tail(24, 2), randn(0, 1, 2, 24, 8)

    def on(rank: int) -> list[torch.Tensor]:
        mesh, part = cp_mesh(2), layout.shard(x, 2, rank)
        attend = partial(context_flex_attention, part, part, part, mesh, block_mask=block_mask, layout=layout)
        return [attend(), attend()]

    for first, second in run_ranks(on, 2):
        assert torch.equal(first, second)
