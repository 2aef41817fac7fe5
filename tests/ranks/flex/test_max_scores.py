"""The largest score of each query over the keys of all ranks, against dense scores in float64; its bytes and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AllGather,
    Causal,
    Dense,
    Documents,
    Full,
    ModuleContextParallel,
    Ring,
    SequenceScope,
    SlidingWindow,
    Ulysses,
    context_attention,
    context_flex_attention,
    context_max_scores,
    contiguous,
    flex_attention,
    head_tail,
    save_attention,
    striped,
)
from cp_styles.kernels import max_scores
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import EndedWindows, Mask
from cp_styles.mixers import selected_keys
from cp_styles.testing import CommunicationTrace, MemoryTrace, run_ranks
from tests.covering import sampled
from tests.oracle import MASKS, MaskValue, Sizes, randn
from tests.ranks import flex_case as case
from tests.ranks.attention_case import EXACT, cp_mesh, refused
from tests.ranks.flex_case import FlexProblem
from tests.tables import DTYPES, LAYOUTS, STRATEGIES, divides

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 29, 8


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH, kv_heads: int = KV_HEADS) -> list[torch.Tensor]:
    shapes = (BATCH, HEADS, length, DIM), (BATCH, kv_heads, length, DIM)
    return [randn(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def largest(q: torch.Tensor, k: torch.Tensor, value: MaskValue, scale: float | None = None) -> torch.Tensor:
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if value.bias is None else scores + value.bias.double()
    return (scores if value.sees is None else scores.masked_fill(~value.sees, -math.inf)).amax(-1)


def largest_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, where there are keys. Queries without keys must be the same."""
    seen = wanted > -math.inf
    assert torch.equal(found > -math.inf, seen)
    difference = (found.double() - wanted).where(seen, 0.0).abs()
    return float(difference.max()) if math.isfinite(float(difference.sum())) else math.inf


def judge(value: MaskValue, layout: SequenceLayout, q: torch.Tensor, k: torch.Tensor, **options: Any) -> float:
    def on(rank: int) -> torch.Tensor:
        mesh, mask = cp_mesh(layout.ranks), value.mask
        if value.selected is not None:
            chosen = layout.shard(value.selected, 2, rank).expand(len(q), -1, -1, -1)
            mask = mask & selected_keys(chosen, mesh, block=value.block, layout=layout)
        parts = (layout.shard(x, 2, rank).requires_grad_() for x in (q, k))
        found = context_max_scores(*parts, mesh, mask=mask, layout=layout, **options)
        assert not found.requires_grad
        assert found.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
        return found

    return largest_error(layout.unshard(run_ranks(on, layout.ranks), 2), largest(q, k, value, options.get("scale")))


def bound(q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest error of products that are summed in float32: roundings of terms, scale and bias."""
    if q.dtype == torch.float64:
        return EXACT
    terms = q.double().abs() @ k.double().abs().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return (DIM + 3) * 2**-24 * (float(terms.max()) * DIM**-0.5 + 4.0)


@sampled(
    1,
    where=lambda strategy, ranks, name, **_: (
        divides(strategy, ranks) and not ("selected" in name and "Ulysses" in strategy)
    ),
    name=[name for name in MASKS if "BlockMask" not in name],
    cut=list(LAYOUTS),
    strategy=list(STRATEGIES),
    ranks=[1, 2, 3, 4],
    dtype=list(DTYPES),
    kv_heads=[1, 2, 4],
)
def test_over_all_keys(name: str, cut: str, strategy: str, ranks: int, dtype: str, kv_heads: int):
    q, k = inputs(DTYPES[dtype], kv_heads=kv_heads)
    value = MASKS[name](Sizes(LENGTH, LENGTH, HEADS, BATCH, q.dtype, seed=ranks))
    layout = LAYOUTS[cut](value.mask)(LENGTH, ranks)
    assert judge(value, layout, q, k, strategy=STRATEGIES[strategy]) < bound(q, k)


def test_a_query_with_keys_in_several_packs():
    """Tokens of a picture see one another, and whole documents are on one rank."""
    test_over_all_keys("pictures", "whole_documents", "ring", 3, "float32", 1)


RANDOM = [name for name in MASKS if name.startswith(("bool", "float", "another"))]


@pytest.mark.parametrize("seed", range(12))
def test_random_masks(seed: int):
    q, k = inputs()
    value = MASKS[RANDOM[seed % len(RANDOM)]](Sizes(LENGTH, LENGTH, HEADS, BATCH, seed=100 + seed))
    layout = LAYOUTS["dealt"](value.mask)(LENGTH, 1 + seed % 4)
    assert judge(value, layout, q, k, scale=-0.3 if seed % 2 else None) < EXACT


@pytest.mark.parametrize(
    "name", ["full", "causal", "window both sides", "windowed documents", "float BHLM", "float L1"]
)
def test_blocks_of_few_scores(name: str, monkeypatch):
    """Long tiles are computed in blocks of queries and of keys."""
    monkeypatch.setattr(max_scores, "_SCORES", BATCH * HEADS * 3 * 4)
    monkeypatch.setattr(max_scores, "_KEYS", 4)
    q, k = inputs()
    value = MASKS[name](Sizes(LENGTH, LENGTH, HEADS, BATCH))
    for layout in (contiguous(LENGTH, 2), head_tail(LENGTH, 3), striped(LENGTH, 2)):
        assert judge(value, layout, q, k) < EXACT


def test_keys_of_another_sequence():
    q, k = inputs(length=24)[0], randn(5, BATCH, KV_HEADS, 7, DIM)
    sees = torch.arange(7) < (torch.arange(24)[:, None] + 1) // 3
    layouts = head_tail(24, 2), contiguous(7, 2)

    def on(rank: int) -> torch.Tensor:
        parts = (cut.shard(x, 2, rank) for cut, x in zip(layouts, (q, k), strict=True))
        options = {"mask": EndedWindows(3), "layout": layouts[0], "kv_layout": layouts[1]}
        return context_max_scores(*parts, cp_mesh(2), **options)

    found = layouts[0].unshard(run_ranks(on, 2), 2)
    assert largest_error(found, largest(q, k, MaskValue(Full(), sees))) < EXACT


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_additive_masks_of_padding(fill: float):
    """Rows that are padding as a whole keep the number that masks them, as the sum on one device has it."""
    q, k = inputs(torch.float32)
    bias = torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), fill)
    bias[1, :, -5:] = fill
    expected = (q @ k.repeat_interleave(2, 1).mT * DIM**-0.5 + bias).amax(-1)
    layout = contiguous(LENGTH, 2)

    def on(rank: int) -> torch.Tensor:
        parts = (layout.shard(x, 2, rank) for x in (q, k))
        return context_max_scores(*parts, cp_mesh(2), mask=Dense(bias), layout=layout)

    found = layout.unshard(run_ranks(on, 2), 2)
    # One rounding of -1e9 in float32 is 32, and the order of the products of the remaining rows is another.
    torch.testing.assert_close(found, expected, rtol=2**-23, atol=bound(q, k))


@pytest.mark.parametrize("strategy", [Ring(), Ring(keep=3), AllGather(), Ulysses()], ids=str)
def test_keys_alone_travel(strategy):
    """And with heads, queries and the result too: half of each on two ranks."""
    (q, k), layout = inputs(), contiguous(24, 2)

    def on(rank: int) -> list[tuple[str, int]]:
        parts = [layout.shard(x[:, :, :24], 2, rank) for x in (q, k)]
        with CommunicationTrace() as trace:
            context_max_scores(*parts, cp_mesh(2), layout=layout, strategy=strategy)
        return [event for event in trace.events if event[1]]

    q_bytes, k_bytes, result = (BATCH * heads * 12 * dim * 8 for heads, dim in ((4, DIM), (2, DIM), (4, 1)))
    moving = {"send": k_bytes}
    if isinstance(strategy, Ulysses):
        moving = {"all_to_all": (q_bytes + k_bytes + result) // 2}
    for events in run_ranks(on, 2):
        sent = {name: sum(size for each, size in events if each == name) for name in moving}
        assert sent == moving, events


def test_memory_does_not_grow_with_the_square():
    """Blocks of scores: far less than the scores of a tile, and no received keys are kept."""
    length, heads = 8192, 4
    layout = head_tail(length, 2)
    q, k = (randn(seed, 1, heads, length, 8, dtype=torch.float32) for seed in range(2))

    def on(rank: int, mask: Mask) -> int:
        parts = [layout.shard(x, 2, rank).contiguous() for x in (q, k)]
        with MemoryTrace() as trace:
            context_max_scores(*parts, cp_mesh(2), mask=mask, layout=layout)
        return trace.peak

    of_scores, of_keys = 4 * max_scores._SCORES, heads * length // 2 * 8 * 4
    for mask in (Causal(), SlidingWindow(3000, 0), Documents((5000, 3192)) & Causal(), Full()):
        # One block of scores, and its mask of bytes three times. All pairs of a rank would take 536 MB.
        assert max(run_ranks(partial(on, mask=mask), 2)) < 2 * of_scores + 10 * of_keys < 80e6


@pytest.mark.parametrize("strategy", [Ring, AllGather])
def test_received_keys_are_not_kept(strategy):
    """For a backward that does not come."""
    layout = contiguous(4096, 4)
    q, k = (randn(seed, 1, 2, 4096, 8, dtype=torch.float32) for seed in range(2))

    def on(rank: int, keep: int) -> int:
        parts = [layout.shard(x, 2, rank).contiguous() for x in (q, k)]
        with MemoryTrace() as trace:
            context_max_scores(*parts, cp_mesh(4), layout=layout, strategy=strategy(keep))
        return trace.peak

    assert run_ranks(partial(on, keep=3), 4) == run_ranks(partial(on, keep=0), 4)


# -- flex_attention --

SCORES: dict[str, tuple[Callable[..., torch.Tensor] | None, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "none": (None, lambda: ()),
    "alibi": (case.alibi, lambda: ()),
    "relative bias": (case.relative_bias, lambda: (randn(20, 4, 2 * LENGTH),)),
    "softcap": (case.softcap, lambda: ()),
    "learned": (case.learned_softcap, lambda: (randn(21) ** 2 + 1, randn(22, 4) * 0.1)),
    "masking": (case.own_mask, lambda: ()),
}
MODS = {"none": None, "causal": case.causal, "sinks and window": case.sinks_and_window}


def largest_of(whole: FlexProblem) -> torch.Tensor:
    q, k, _ = whole.inputs
    scores = q.double() @ k.double().repeat_interleave(whole.heads // whole.kv_heads, 1).mT * whole.dim**-0.5
    where = case.pairs(*scores.shape)
    if whole.score_mod is not None:
        scores = whole.score_mod(whole.learned, scores, *where)
    return (scores if whole.mask_mod is None else scores.masked_fill(~whole.mask_mod(*where), -math.inf)).amax(-1)


@sampled(
    2,
    where=lambda strategy, ranks, **_: divides(strategy, ranks),
    score=list(SCORES),
    mask=list(MODS),
    cut=["contiguous", "head_tail", "dealt", "uneven"],
    strategy=["ring", "all-gather", "Ulysses", "Ulysses x ring"],
    ranks=[1, 2, 3],
    how=["function", "module", "checkpointed", "selective", "lse too"],
)
def test_max_scores_of_flex_attention(score: str, mask: str, cut: str, strategy: str, ranks: int, how: str):
    """And output, logsumexp and gradients as without them."""
    score_mod, learned = SCORES[score]
    whole = FlexProblem(MODS[mask], score_mod, learned(), length=LENGTH, block=8)
    layout = LAYOUTS[cut](Causal())(LENGTH, ranks)
    options: dict[str, Any] = {"layout": layout, "strategy": STRATEGIES[strategy]}

    def on(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = []
        attend = partial(context_flex_attention, mesh=cp_mesh(ranks), **options)
        if how == "module":
            attend = parallelize_module(Flex(), cp_mesh(ranks), ModuleContextParallel(**options))

        def run(*qkv: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            call = partial(attend, return_aux=AuxRequest(lse=how != "module", max_scores=True), **given)
            if how in ("checkpointed", "selective"):
                more = {} if how == "checkpointed" else {"context_fn": save_attention()}
                out, aux = checkpoint(call, *qkv, use_reentrant=False, **more)
            else:
                out, aux = call(*qkv)
            assert not aux.max_scores.requires_grad
            found.append(aux.max_scores)
            if aux.lse is None:
                return out, attend(*qkv, return_aux=AuxRequest(lse=True), **given)[1].lse
            return out, aux.lse

        results = whole.run(run, layout, rank)
        return found[0], results

    found = run_ranks(on, ranks)
    assert max(whole.errors([results for _, results in found], layout)) < EXACT
    assert largest_error(layout.unshard([scores for scores, _ in found], 2), largest_of(whole)) < EXACT


class Flex(nn.Module):
    def forward(self, query, key, value, **options):
        return flex_attention(query, key, value, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_as_torch_on_one_device(dtype: torch.dtype):
    """torch's implementation in plain operations. Its function refuses maxima on CPU, and so its operator is called,
    which returns them in base 2."""
    q, k, v = (randn(seed, 2, 4, LENGTH, DIM, dtype=dtype) for seed in range(3))
    block_mask = create_block_mask(case.sinks_and_window, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx == 5, -math.inf, 2.0 * torch.tanh(score / 2.0) - h)

    _, _, in_base_2 = math_attention(q, k, v, score_mod, block_mask.as_tuple(), 0.3, {})
    wanted, layout = in_base_2 * math.log(2), head_tail(LENGTH, 2)
    given = {"score_mod": score_mod, "block_mask": block_mask, "scale": 0.3, "layout": layout}

    def on(rank: int) -> torch.Tensor:
        parts = [layout.shard(x, 2, rank) for x in (q, k, v)]
        options = {"return_aux": AuxRequest(max_scores=True)} | given
        _, aux = context_flex_attention(*parts, dist.group.WORLD, **options)
        assert aux.lse is None
        return aux.max_scores

    found = layout.unshard(run_ranks(on, 2), 2)
    assert found.dtype == wanted.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found[:, :, 5] == -math.inf).all()
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound(q, k))


def test_of_compiled_code():
    """A call in a compiled function breaks its graph, and has the same result."""
    (q, k), layout = inputs(torch.float32), head_tail(LENGTH, 2)

    def on(rank: int) -> bool:
        parts, mesh = [layout.shard(x, 2, rank) for x in (q, k)], cp_mesh(2)
        call = lambda q, k: context_max_scores(q + 1, k, mesh, mask=Causal(), layout=layout) * 2  # noqa: E731
        return torch.equal(torch.compile(call, backend="aot_eager")(*parts), call(*parts))

    assert all(run_ranks(on, 2))


def test_under_autocast_and_in_a_scope():
    """The scores of attention there: of inputs in bfloat16, under the scope's mask."""
    (q, k), layout = inputs(torch.float32), head_tail(LENGTH, 2)
    value = MASKS["causal documents"](Sizes(LENGTH, LENGTH))

    def on(rank: int) -> torch.Tensor:
        parts = [layout.shard(x, 2, rank) for x in (q, k)]
        with SequenceScope(layout, mask=value.mask), torch.autocast("cpu", torch.bfloat16):
            return context_max_scores(*parts, cp_mesh(2))

    rounded = [x.bfloat16() for x in (q, k)]
    found = layout.unshard(run_ranks(on, 2), 2)
    assert largest_error(found, largest(*rounded, value)) < bound(*rounded)


def test_numbers_that_are_none_are_seen():
    """NaN of one key is NaN for the queries that attend to it, as in torch's maximum."""
    (q, k), layout = inputs(), contiguous(LENGTH, 3)
    k[:, :, 12] = math.nan

    def on(rank: int) -> torch.Tensor:
        return context_max_scores(*(layout.shard(x, 2, rank) for x in (q, k)), cp_mesh(3), mask=Causal(), layout=layout)

    found = layout.unshard(run_ranks(on, 3), 2)
    assert torch.equal(found.isnan()[0, 0], torch.arange(LENGTH) >= 12)


Q, K, V = (randn(seed, 1, 2, 8, 4) for seed in range(3))
MAXIMA, LSE = AuxRequest(lse=True, max_scores=True), AuxRequest(lse=True)
WHOLE: BlockMask = create_block_mask(case.causal, None, None, 16, 16, device="cpu")
WRONG: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "one rank without maxima": (
        lambda rank, mesh: context_flex_attention(Q, K, V, mesh, block_mask=WHOLE, return_aux=(MAXIMA, LSE)[rank]),
        "disagree",
    ),
    "one rank attends": (
        lambda rank, mesh: context_max_scores(Q, K, mesh) if rank else context_attention(Q, K, V, mesh),
        "not at the same place",
    ),
    "heads that do not fit": (
        lambda rank, mesh: context_max_scores(Q, torch.cat([K, K[:, :1]], 1), mesh),
        "2 query heads are not a multiple of 3 key",
    ),
    "head dims that differ": (
        lambda rank, mesh: context_max_scores(Q, K[..., :3].contiguous(), mesh),
        "the head dims of query and key differ: 4 and 3",
    ),
    "no tensor on one rank": (lambda rank, mesh: context_max_scores(Q, K if rank else None, mesh), "key must be a"),  # pyright: ignore
    "three dims": (lambda rank, mesh: context_max_scores(Q[0], K, mesh), "query must have 4 dims"),
    "two dtypes": (lambda rank, mesh: context_max_scores(Q, K.float(), mesh), "share one floating-point dtype"),
    "another layout": (
        lambda rank, mesh: context_max_scores(Q, K, mesh, layout=contiguous(30, 2)),
        "cuts 30 positions",
    ),
    "a tensor of another cut": (
        lambda rank, mesh: context_max_scores(
            striped(16, 2).shard(torch.cat([Q, Q], 2), 2, rank), K, mesh, layout=contiguous(16, 2)
        ),
        "was cut with another layout",
    ),
    "another scale": (lambda rank, mesh: context_max_scores(Q, K, mesh, scale=1.0 + rank), "disagree on scale"),
    "another mask": (lambda rank, mesh: context_max_scores(Q, K, mesh, mask=(Full(), Causal())[rank]), "on mask"),
    "another score_mod": (
        lambda rank, mesh: context_flex_attention(
            Q, K, V, mesh, score_mod=lambda score, *_: score + rank, return_aux=MAXIMA
        ),
        "disagree on",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_an_error_on_every_rank(name: str):
    refused(*WRONG[name], (ValueError, TypeError))
