"""Decoding with a cache that is cut over the ranks: exact, in no more memory than a part, and loud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    Causal,
    Checks,
    Chunked,
    Dense,
    Documents,
    Full,
    Mask,
    PerRow,
    SlidingWindow,
    Tree,
    contiguous,
    head_tail,
    striped,
)
from cp_styles.comm.agreement import WIDTH
from cp_styles.functions.decode import DecodeCall, KVCache, context_decode, decode
from cp_styles.masks.algebra import KeyRange
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import dense_attention, error, randn
from tests.ranks.attention_case import every_rank_raises

# float64 sums in another order give 1e-15; one key too many or too few gives 1e-2.
EXACT = 1e-12
BATCH, HEADS, GROUPS, DIM, PROMPT = 2, 4, 2, 8, 17
STEPS = (1, 1, 1, 5, 1, 1)  # tokens at a time: one, and once a further prompt
TOTAL = PROMPT + sum(STEPS)

WINDOW = SlidingWindow(5, 0)
PADDED = PerRow((Causal() & KeyRange(3, 2**60), Causal()))
HOLES = torch.ones(BATCH, 1, 1, TOTAL, dtype=torch.bool)
HOLES[0, :, :, :4] = HOLES[1, :, :, 9] = False

CASES: dict[str, tuple[Mask, Callable[[int, int, int], bool]]] = {
    "causal": (Causal(), lambda row, p, j: j <= p),
    "window": (WINDOW & Causal(), lambda row, p, j: p - 5 <= j <= p),
    "chunks": (Causal() & Chunked(6), lambda row, p, j: j <= p and p // 6 == j // 6),
    "padding": (PADDED, lambda row, p, j: (3 if row == 0 else 0) <= j <= p),
    "full": (Full(), lambda row, p, j: True),
}


def allowed(sees: Callable[[int, int, int], bool], queries: range, keys: int) -> torch.Tensor:
    rows = [[[sees(row, p, j) for j in range(keys)] for p in queries] for row in range(BATCH)]
    return torch.tensor(rows)[:, None]


def tensors(dim_v: int = DIM, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Whole query, key and value, of prompt and new tokens."""
    shapes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, dim_v))
    return tuple(randn(seed, BATCH, h, TOTAL, d, dtype=dtype) for seed, (h, d) in enumerate(shapes))


def decoded(
    rank: int, ranks: int, layout: Any, mask: Mask, *, given: tuple[torch.Tensor, ...], **options: Any
) -> list[tuple[int, torch.Tensor]]:
    """The length of the cache and the output, at each step."""
    q, k, v = given
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    cut = layout(PROMPT, ranks)
    cache = KVCache(mesh, cut, *(cut.shard(x[:, :, :PROMPT], 2, rank) for x in (k, v)))
    attn_mask, found = options.pop("attn_mask", None), []
    for step in STEPS:
        new = slice(cache.length, cache.length + step)
        cache.append(k[:, :, new], v[:, :, new])
        hidden = None if attn_mask is None else attn_mask[..., : cache.length]
        out = context_decode(q[:, :, new], cache, mask=mask, attn_mask=hidden, **options)
        found.append((cache.length, out))
    assert torch.equal(cache.keys, k[:, :, cache.positions()])
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(1, head_tail), (2, contiguous), (3, head_tail), (3, striped)])
@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_one_device(case: str, ranks: int, layout: Any):
    mask, sees = CASES[case]
    q, k, v = given = tensors()
    found = run_ranks(lambda rank: decoded(rank, ranks, layout, mask, given=given), ranks)
    for (length, out), step in zip(found[0], STEPS, strict=True):
        queries = range(length - step, length)
        wanted = dense_attention(
            q[:, :, queries.start : length], k[:, :, :length], v[:, :, :length], allowed(sees, queries, length)
        )
        assert error(out, wanted) < EXACT
    for other in found[1:]:  # to the bit: ranks that choose tokens by them choose the same ones
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(found[0], other, strict=True))


@pytest.mark.parametrize("checks", [Checks(), Checks(agreement=False)], ids=repr)
def test_a_dense_mask_sinks_scale_and_another_head_dim(checks: Any):
    sink, (q, k, v) = randn(9, HEADS), tensors(dim_v=6)
    options = {"sink_H": sink, "scale": 0.3, "attn_mask": HOLES, "checks": checks}
    found = run_ranks(lambda rank: decoded(rank, 2, head_tail, Causal(), given=(q, k, v), **options), 2)[0]
    for (length, out), step in zip(found, STEPS, strict=True):
        queries = range(length - step, length)
        seen = allowed(lambda row, p, j: j <= p and bool(HOLES[row, 0, 0, j]), queries, length)
        whole = (q[:, :, queries.start : length], k[:, :, :length], v[:, :, :length])
        wanted = dense_attention(*whole, seen, scale=0.3, sink_H=sink)
        assert error(out, wanted) < EXACT


def test_low_precision_is_as_good_as_one_device():
    given = tensors(dtype=torch.bfloat16)
    found = run_ranks(lambda rank: decoded(rank, 3, head_tail, Causal(), given=given), 3)[0]
    q, k, v = given
    length, out = found[-1]
    mine = q[:, :, length - 1 : length]
    one = torch.nn.functional.scaled_dot_product_attention(mine, k, v, enable_gqa=True)
    wanted = dense_attention(mine.double(), k.double(), v.double())
    assert out.dtype == torch.bfloat16
    assert error(out, wanted) <= 1.1 * error(one, wanted) + 1e-7


@pytest.mark.parametrize("ranks", [2, 3])
def test_cross_attention_to_encoder_keys_that_are_cut(ranks: int):
    """More queries than keys: positions of the two sequences do not correspond. Nothing is ever appended."""
    q, k, v = tensors()
    few, seen = 7, HOLES[..., :7]

    def on(rank: int) -> list[torch.Tensor]:
        mesh, layout = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), contiguous(few, ranks)
        cache = KVCache(mesh, layout, *(layout.shard(x[:, :, :few], 2, rank) for x in (k, v)))
        return [context_decode(q, cache, mask=Full(), attn_mask=each) for each in (None, seen)]

    for found, mask in zip(run_ranks(on, ranks)[0], (None, seen), strict=True):
        assert error(found, dense_attention(q, k[:, :, :few], v[:, :, :few], mask)) < EXACT


def test_no_rank_holds_more_than_its_part():
    """In bytes: each rank's prompt, and one new token in P, with room for an eighth more, which is made once in as many
    tokens; under a window no more than twice what it needs."""
    prompt, new, ranks = 96, 30, 3
    k, v = (randn(seed, 1, GROUPS, prompt + new, DIM) for seed in (0, 1))
    q, one = randn(2, 1, HEADS, prompt + new, DIM), 2 * GROUPS * DIM * 8

    def on(rank: int) -> tuple[list[int], list[int], dict[str, int], int]:
        mesh, layout = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), head_tail(prompt, ranks)
        part = [layout.shard(x[:, :, :prompt], 2, rank) for x in (k, v)]
        full, near = KVCache(mesh, layout, *part), KVCache(mesh, layout, *part)
        whole, windowed = [full.nbytes], []
        for p in range(prompt, prompt + new):
            for cache in (full, near):
                cache.append(k[:, :, p : p + 1], v[:, :, p : p + 1])
            with CommunicationTrace() as trace:
                context_decode(q[:, :, p : p + 1], full)
            context_decode(q[:, :, p : p + 1], near, mask=SlidingWindow(8, 0))
            near.forget(p + 1 - 8)  # the first that the next one needs
            whole.append(full.nbytes)
            windowed.append(near.nbytes)
        return whole, windowed, dict(trace.calls), trace.sent_bytes

    found = run_ranks(on, ranks)
    for whole, windowed, calls, sent in found:
        assert whole[0] == prompt // ranks * one
        assert (prompt + new) // ranks * one <= whole[-1] <= (prompt + new) // ranks * one * 9 / 8
        assert len(set(whole)) == 3  # 32 of the prompt; with 5 and then 5 more
        assert max(windowed[ranks:]) <= 2 * 9 * one
        assert calls == {"all_gather": 2}
        # The row of the agreement; then the result of each head, its logsumexp, and a checksum.
        assert sent == (ranks - 1) * 8 * (WIDTH + HEADS * (DIM + 1) + 1)


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_a_cache_that_is_made_in_one_mode_and_grows_in_another(modes):
    q, k, v = tensors()
    expected = dense_attention(q[:, :, -1:], k, v)

    def on(rank: int) -> torch.Tensor:
        with modes[0]():
            layout = head_tail(k.shape[2] - 5, 2)
            cache = KVCache(dist.group.WORLD, layout, *(layout.shard(x[:, :, :-5], 2, rank) for x in (k, v)))
            cache.append(k[:, :, -5:-3], v[:, :, -5:-3])
        for p in range(3, 0, -1):
            with modes[1]():
                cache.append(k[:, :, -p:][:, :, :1], v[:, :, -p:][:, :, :1])
        return context_decode(q[:, :, -1:], cache)

    assert all(error(out, expected) < EXACT for out in run_ranks(on, 2))


def test_tokens_that_are_taken_back():
    q, k, v = tensors()

    def on(rank: int) -> torch.Tensor:
        mesh, layout = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)), head_tail(PROMPT, 3)
        cache = KVCache(mesh, layout, *(layout.shard(x[:, :, :PROMPT], 2, rank) for x in (k, v)))
        wrong = randn(7, BATCH, GROUPS, 4, DIM)
        cache.append(wrong, wrong)
        cache.crop(PROMPT)
        cache.append(k[:, :, PROMPT : PROMPT + 2], v[:, :, PROMPT : PROMPT + 2])
        cache.select_rows(torch.tensor([1, 1]))
        return context_decode(q[:, :, PROMPT : PROMPT + 2], cache)

    seen = torch.ones(2, PROMPT + 2, dtype=torch.bool).tril(PROMPT)
    rows = [x[[1, 1], :, : PROMPT + 2] for x in (k, v)]
    assert error(run_ranks(on, 3)[1], dense_attention(q[:, :, PROMPT : PROMPT + 2], *rows, seen)) < EXACT


def refused(words: str, run: Callable[[int, Any, KVCache, torch.Tensor], Any]) -> None:
    """Every rank raises, and one says why; nobody waits."""
    q, k, v = tensors()

    def on(rank: int) -> None:
        mesh, layout = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), contiguous(PROMPT, 2)
        cache = KVCache(mesh, layout, *(layout.shard(x[:, :, :PROMPT], 2, rank) for x in (k, v)))
        run(rank, mesh, cache, q[:, :, :1])

    with every_rank_raises(words):
        run_ranks(on, 2)


REFUSED: dict[str, tuple[str, Callable[[int, Any, KVCache, torch.Tensor], Any]]] = {
    "other tokens": ("decode different tokens", lambda rank, mesh, cache, q: context_decode(q + rank, cache)),
    "another random state": (
        "decode different tokens",
        lambda rank, mesh, cache, q: decode("decode", q, cache, DecodeCall(Causal(), equal_number=rank)),
    ),
    "a token more on one rank": (
        "disagree on how many positions",
        lambda rank, mesh, cache, q: (
            cache.append(*(x[:, :, :1].repeat(1, 1, 2 - rank, 1) for x in (cache.keys, cache.values))),
            context_decode(q, cache),
        ),
    ),
    "the same without agreement": (
        "decode different tokens",
        lambda rank, mesh, cache, q: (
            cache.append(*(x[:, :, :1].repeat(1, 1, 2 - rank, 1) for x in (cache.keys, cache.values))),
            context_decode(q, cache, checks=Checks(agreement=False)),
        ),
    ),
    "another mask": (
        "disagree on the mask",
        lambda rank, mesh, cache, q: context_decode(q, cache, mask=SlidingWindow(3 + rank)),
    ),
    "other queries' shape": (
        "disagree on the query",
        lambda rank, mesh, cache, q: context_decode(q.repeat(1, 1, 1 + rank, 1), cache),
    ),
    "one rank without a query": (
        "must be plain tensors",
        lambda rank, mesh, cache, q: context_decode(q if rank else "q", cache),
    ),  # pyright: ignore[reportArgumentType]
    "a mask of another length": (
        "the mask was made for 16 positions",
        lambda rank, mesh, cache, q: context_decode(q, cache, mask=Causal() & Documents((8, 8))),
    ),
    "a mask of biases": (
        "is not one interval of keys for each query",
        lambda rank, mesh, cache, q: context_decode(q, cache, mask=Dense(torch.ones(PROMPT, PROMPT, dtype=torch.bool))),
    ),
    "a tree": (
        "is not one interval of keys for each query, as decoding needs: pass a boolean attn_mask",
        lambda rank, mesh, cache, q: context_decode(q, cache, mask=Tree((PROMPT - 4, 2, 2), (-1, 0, 0))),
    ),
    "a mask of a part": (
        "one column for each position",
        lambda rank, mesh, cache, q: context_decode(q, cache, attn_mask=torch.ones(1, 1, 1, 8, dtype=torch.bool)),
    ),
    "gradients": (
        "decoding has no backward",
        lambda rank, mesh, cache, q: context_decode(q.clone().requires_grad_(), cache),
    ),
    "keys of another batch": (
        "new keys and values of shapes",
        lambda rank, mesh, cache, q: cache.append(cache.keys[:1], cache.values[:1]),
    ),
    "keys of another batch on one rank": (
        "new keys and values of shapes",
        lambda rank, mesh, cache, q: (
            None if rank else cache.append(cache.keys[:1], cache.values[:1]),
            context_decode(q, cache),
        ),
    ),
    "the prompt taken back": ("cannot be removed", lambda rank, mesh, cache, q: cache.crop(3)),
    "a part of another layout": (
        "but the layout gives rank",
        lambda rank, mesh, cache, q: KVCache(mesh, contiguous(PROMPT + 9, 2), cache.keys, cache.values),
    ),
    "keys that were freed": (
        "whose keys this cache has freed",
        lambda rank, mesh, cache, q: (cache.forget(5), context_decode(q, cache)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    refused(*REFUSED[case])
