"""The mistake that verify plants: it cuts as it says, at every door, and is gone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import (
    Causal,
    Documents,
    Full,
    PerRow,
    SlidingWindow,
    context_attention,
    context_flex_attention,
    context_latent_attention,
    context_varlen_attention,
    contiguous,
    head_tail,
    striped,
)
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import Role
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.masks import Dense, Mask
from cp_styles.mixers import context_causal_conv1d, context_recurrence, context_roll
from cp_styles.testing import run_ranks
from cp_styles.verify.planted import PlantedCut
from cp_styles.verify.step import as_one_rank
from tests.oracle import randn
from tests.ranks.mixers.kernels import chunk_gla

S = 12
Q, K, V = (randn(seed, 2, 2, S, 8) for seed in range(3))
TEXT = randn(3, 2, 2, 7, 8), randn(4, 2, 2, 7, 8)
ROWS, TAPS, GATES = randn(5, 2, S, 8), randn(6, 8, 1, 3), -randn(7, 2, S, 2, 8).abs()
BIAS = torch.randn(S, S, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
LATENT = randn(9, 2, S, 6), randn(10, 2, S, 4), randn(11, 2 * (4 + 8), 6)  # latents, rotated keys, their projection
PACKED = Documents((5, 7))


def attention(mesh: Any, documents: Mask, mask: Mask, tensors: Any = (Q, K, V), **options: Any) -> torch.Tensor:
    return context_attention(*tensors, mesh, mask=mask & documents, **options)


def flex(mesh: Any, documents: Mask) -> torch.Tensor:
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cpu")
    options = {} if isinstance(documents, Full) else {"mask": documents}
    return context_flex_attention(
        Q, K, V, mesh, block_mask=blocks, score_mod=lambda s, b, h, q, k: s + q - k, **options
    )


def varlen(mesh: Any, documents: Mask) -> torch.Tensor:
    pack = [x[0].transpose(0, 1) for x in (Q, K, V)]
    return context_varlen_attention(*pack, mesh, [0, 5, S], window_size=(-1, 0), mask=documents)


def latent(mesh: Any, documents: Mask) -> torch.Tensor:
    return context_latent_attention(Q, *LATENT, mesh, mask=Causal() & documents)


def decoded(mesh: Any, documents: Mask) -> torch.Tensor:
    cache = KVCache(mesh, contiguous(S - 1, 1), K[:, :, :-1], V[:, :, :-1])
    cache.append(K[:, :, -1:], V[:, :, -1:])
    with torch.no_grad():
        return context_decode(Q[:, :, -1:], cache, mask=Causal() & documents)


def lengths_of(documents: Mask) -> tuple[int, ...]:
    return documents.lengths if isinstance(documents, Documents) else (S,)


def convolved(mesh: Any, documents: Mask) -> torch.Tensor:
    conv = lambda x: F.conv1d(F.pad(x, (2, 0)), TAPS, groups=8)  # noqa: E731
    return context_causal_conv1d(conv, ROWS.mT, mesh, width=3, documents=lengths_of(documents))


def rolled(mesh: Any, documents: Mask) -> torch.Tensor:
    return context_roll(ROWS, -1, 1, mesh, documents=lengths_of(documents))


def recurrent(mesh: Any, documents: Mask) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    return context_recurrence(chunk_gla, mesh, documents=lengths_of(documents))(q, k, v, GATES)[0]


DOORS: dict[str, Callable[[Any, Mask], torch.Tensor]] = {
    "causal": partial(attention, mask=Causal()),
    "full": partial(attention, mask=Full()),
    "a window": partial(attention, mask=SlidingWindow(4)),
    "documents": partial(attention, mask=Causal() & PACKED),
    "other documents in each row": partial(attention, mask=Causal() & PerRow((PACKED, Documents((3, 9))))),
    "a dense mask": partial(attention, mask=Dense(BIAS)),
    "flex": flex,
    "varlen": varlen,
    "latent": latent,
    "decode": decoded,
    "convolution": convolved,
    "roll": rolled,
    "recurrence": recurrent,
}
CUTS = {
    "no layout of this length": ((head_tail(S + 1, 2),), (S // 3, S - S // 3)),
    "contiguous": ((contiguous(S, 3),), (4, 4, 4)),
    "head_tail": ((head_tail(S, 2),), (3, 6, 3)),  # the second and the third quarter are of one rank
    "striped, and contiguous": ((striped(S, 2, block=3), contiguous(S, 2)), (3, 3, 3, 3)),
}


def on_one_rank(call: Callable[[Any], Any], planted: PlantedCut | None) -> Any:
    """The result of ``call`` with this rank in place of two."""

    def on(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with as_one_rank(mesh, mesh, planted) as alone:
            result = call(alone)
            group = alone.get_group()
        assert state_of(group).get_or_create(Role).planted is None
        return result

    return run_ranks(on, 2)[0]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("door", DOORS)
def test_the_cut_is_one_by_documents(door: str, cut: str):
    layouts, lengths = CUTS[cut]
    planted = PlantedCut(layouts)
    out = on_one_rank(lambda mesh: DOORS[door](mesh, Full()), planted)
    assert (planted.used, planted.takes) == (True, True)
    torch.testing.assert_close(out, on_one_rank(lambda mesh: DOORS[door](mesh, Documents(lengths)), None))
    whole = on_one_rank(lambda mesh: DOORS[door](mesh, Full()), None)
    assert float((out - whole).norm() / whole.norm()) > 0.05


@pytest.mark.parametrize("door", ["causal", "a dense mask", "roll"])
def test_it_is_cut_again_and_whole_again(door: str):
    """The same call with the cut and without it, in turn: nothing of it is kept."""

    def on(rank: int) -> list[torch.Tensor]:
        mesh, outs = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
        for planted in (None, PlantedCut(()), None):
            with as_one_rank(mesh, mesh, planted) as alone:
                outs.append(DOORS[door](alone, Full()))
        return outs

    before, cut, after = run_ranks(on, 2)[0]
    assert torch.equal(before, after)
    assert float((before - cut).norm()) > 0.1


def test_keys_of_another_sequence_are_cut_at_a_third():
    planted = PlantedCut([contiguous(S, 2)])
    out = on_one_rank(lambda mesh: context_attention(Q, *TEXT, mesh), planted)
    first = torch.arange(S) < S // 3
    mask = first[:, None] == (torch.arange(7) < 7 // 3)
    assert planted.used
    torch.testing.assert_close(out, F.scaled_dot_product_attention(Q, *TEXT, attn_mask=mask))


def test_gradients_are_those_of_the_cut():
    """In a backward the cut is the same, also behind a mask that is given with the call."""
    results = []
    for planted, mask in ((PlantedCut(()), Causal()), (None, Causal() & Documents((4, 8)))):
        tensors = [x.clone().requires_grad_() for x in (Q, K, V)]

        def call(mesh: Any, tensors: Any = tensors, mask: Mask = mask) -> list[torch.Tensor]:
            return list(torch.autograd.grad(attention(mesh, Full(), mask, tensors), tensors, Q))

        results.append(on_one_rank(call, planted))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("documents", [Documents((4, 8)), Documents((1,) * S)])
def test_documents_that_end_at_the_cut_lose_nothing(documents: Documents):
    planted = PlantedCut(())
    on_one_rank(lambda mesh: (attention(mesh, documents, Causal()), rolled(mesh, documents)), planted)
    assert (planted.used, planted.takes) == (True, False)


def test_one_token_is_not_cut():
    planted = PlantedCut(())
    one = [x[:, :, :1] for x in (Q, K, V)]
    on_one_rank(lambda mesh: (attention(mesh, Full(), Causal(), one), context_roll(ROWS[:, :1], 1, 1, mesh)), planted)
    assert not planted.used


def test_it_is_gone_after_an_error():
    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        groups = []
        with contextlib.suppress(KeyError), as_one_rank(mesh, mesh, PlantedCut(())) as alone:
            groups.append(alone.get_group())
            assert state_of(groups[0]).get_or_create(Role).planted is not None
            raise KeyError
        assert state_of(groups[0]).get_or_create(Role).planted is None

    run_ranks(on, 2)
