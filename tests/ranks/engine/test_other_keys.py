"""Keys of another sequence than the queries, with a layout of their own: kv_layout=."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import (
    AllGather,
    AttentionContextParallel,
    Causal,
    Chunked,
    Dense,
    Documents,
    Full,
    PerRow,
    Ring,
    SlidingWindow,
    Tree,
    Ulysses,
    context_attention,
    context_flex_attention,
    contiguous,
    head_tail,
    parallelize_module,
    striped,
)
from cp_styles.explain import explain
from cp_styles.functions.join import join_attentions
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.layouts import SequenceLayout, join_layouts
from cp_styles.masks import EndedWindows, Mask, Shifted
from cp_styles.mixers import selected_keys
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.covering import sampled
from tests.oracle import attend_and_differentiate, attention_inputs, dense_attention, error, expected_attention
from tests.ranks.attention_case import EXACT, Core, cp_mesh, refused

LENGTH = 24
LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail, "striped": striped}
STRATEGIES = [Ring(), Ring(keep=0), AllGather(), AllGather(keep=0), Ulysses(), Ulysses(size=1)]


def uneven(length: int, ranks: int) -> SequenceLayout:
    """The last rank has the first keys, and rank 0 the most."""
    first = length // (2 * ranks)
    edges = [first * index for index in range(ranks)] + [length]
    return SequenceLayout.from_chunks([(edges[index], edges[index + 1])] for index in reversed(range(ranks)))


# The number of keys, and the mask over their numbers.
KEYS: dict[str, tuple[int, Mask]] = {
    "full": (17, Full()),
    "as many keys": (LENGTH, Full()),
    "ended windows": (LENGTH // 5, EndedWindows(5)),
    "windows of one": (LENGTH, EndedWindows(1)),
    "a later part": (40, Shifted(Causal(), 16)),
    "a later part, window": (40, Shifted(SlidingWindow(7) & Causal(), 16)),
    "a later part, documents": (40, Shifted(Causal() & Documents((9, 20, 11)), 16)),
    "a later part, chunks": (40, Shifted(Causal() & Chunked(8), 16)),
    "dense": (17, Dense(torch.rand(LENGTH, 17, generator=torch.Generator().manual_seed(0)) > 0.4)),
    "dense, windows": (4, EndedWindows(5) & Dense(torch.rand(LENGTH, 4, generator=torch.Generator().manual_seed(1)))),
}


def allowed_of(mask: Mask, keys: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    positions = torch.arange(LENGTH), torch.arange(keys)
    return mask.allowed(*positions), mask.bias(*positions)


def judged(
    keys: int,
    mask: Mask,
    layouts: tuple[SequenceLayout, SequenceLayout],
    ranks: int,
    door: str = "function",
    **how: Any,
) -> float:
    """The worst error of outputs and gradients."""
    inputs, cotangent = attention_inputs(length=LENGTH, kv_length=keys, heads=4, kv_heads=4)
    allowed, bias = allowed_of(mask, keys)
    expected = expected_attention(inputs, cotangent, allowed, bias=bias)
    sides = (layouts[0], layouts[1], layouts[1])

    def on(rank: int) -> float:
        mesh = cp_mesh(ranks)
        leaves = [cut.shard(x, 2, rank).detach().requires_grad_() for cut, x in zip(sides, inputs, strict=True)]
        options = {"mask": mask, "layout": layouts[0], "kv_layout": layouts[1], **how}
        if door == "style":
            attend = parallelize_module(Core(causal=False), mesh, AttentionContextParallel(**options))
        else:
            attend = partial(context_attention, mesh=mesh, **options)
        if door == "compiled":
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        found = attend_and_differentiate(attend, leaves, layouts[0].shard(cotangent, 2, rank))
        wanted = [cut.shard(x, 2, rank) for cut, x in zip((layouts[0], *sides), expected, strict=True)]
        return max(
            error(mine, whole_part, whole=x) for mine, whole_part, x in zip(found, wanted, expected, strict=True)
        )

    return max(run_ranks(on, ranks))


@sampled(
    2,
    name=list(KEYS),
    cut=list(LAYOUTS),
    of_keys=[*LAYOUTS.values(), uneven],
    strategy=STRATEGIES,
    ranks=[1, 2, 4],
    door=["function", "style"],
)
def test_keys_with_a_layout_of_their_own(name: str, cut: str, of_keys, strategy, ranks: int, door: str):
    keys, mask = KEYS[name]
    layouts = LAYOUTS[cut](LENGTH, ranks), of_keys(keys, ranks)
    assert judged(keys, mask, layouts, ranks, door, strategy=strategy) < EXACT


@pytest.mark.parametrize("name", ["full", "a later part, window", "dense"])
@pytest.mark.parametrize("fixed", [True, False])
def test_in_a_graph(name: str, fixed: bool):
    torch._dynamo.reset()
    keys, mask = KEYS[name]
    layouts = head_tail(LENGTH, 2), striped(keys, 2)
    given: dict[str, Any] = {} if fixed else {"layout": head_tail, "kv_layout": striped}
    assert judged(keys, mask, layouts, 2, "compiled", **given) < EXACT


def test_a_block_mask_of_two_sequences():
    inputs, cotangent = attention_inputs(length=LENGTH, kv_length=10, heads=4, kv_heads=4)
    block_mask = create_block_mask(lambda b, h, i, j: i % 10 >= j, None, None, LENGTH, 10, device="cpu", BLOCK_SIZE=4)
    allowed = torch.arange(LENGTH)[:, None] % 10 >= torch.arange(10)
    expected = expected_attention(inputs, cotangent, allowed)
    cuts = head_tail(LENGTH, 2), *[striped(10, 2)] * 2

    def on(rank: int) -> float:
        leaves = [cut.shard(x, 2, rank).detach().requires_grad_() for cut, x in zip(cuts, inputs, strict=True)]
        options = {"layout": head_tail, "kv_layout": striped, "block_mask": block_mask}
        attend = partial(context_flex_attention, mesh=cp_mesh(2), **options)
        found = attend_and_differentiate(attend, leaves, cuts[0].shard(cotangent, 2, rank))
        wanted = [cut.shard(x, 2, rank) for cut, x in zip((cuts[0], *cuts), expected, strict=True)]
        return max(map(error, found, wanted))

    assert max(run_ranks(on, 2)) < EXACT


@sampled(1, strategy=[Ring(), Ring(keep=0), AllGather()], ranks=[1, 2, 3], rows=[1, 2], ended=[True, False])
def test_selected_windows(strategy, ranks: int, rows: int, ended: bool):
    """Each query selects some keys of another sequence; -1 for none. No key travels that no query has selected."""
    count = LENGTH // 3
    inputs, cotangent = attention_inputs(length=LENGTH, kv_length=count, heads=4, kv_heads=2)
    drawn = torch.rand(rows, LENGTH, count, generator=torch.Generator().manual_seed(ranks))
    chosen = torch.where(drawn.topk(3, -1).values > 0.7, drawn.topk(3, -1).indices, -1)
    chosen[:, :5] = -1
    picked = torch.zeros(rows, LENGTH, count + 1, dtype=torch.bool).scatter_(-1, chosen % (count + 1), True)[
        ..., :count
    ]
    band = EndedWindows(3) if ended else Full()
    allowed = (picked & band.allowed(torch.arange(LENGTH), torch.arange(count)))[:, None]
    expected = expected_attention(inputs, cotangent, allowed)
    cut, of_keys = head_tail(LENGTH, ranks), striped(count, ranks)
    cuts = cut, of_keys, of_keys

    def on(rank: int) -> tuple[float, int, int]:
        mesh = cp_mesh(ranks)
        leaves = [each.shard(x, 2, rank).detach().requires_grad_() for each, x in zip(cuts, inputs, strict=True)]
        mask = band & selected_keys(cut.shard(chosen, 1, rank), mesh, layout=cut, kv_layout=of_keys)
        attend = partial(context_attention, mesh=mesh, mask=mask, layout=cut, kv_layout=of_keys, strategy=strategy)
        with CommunicationTrace() as trace:
            found = attend_and_differentiate(attend, leaves, cut.shard(cotangent, 2, rank))
        sent = sum(size for kind, size in trace.events if kind == "send")
        wanted = [each.shard(x, 2, rank) for each, x in zip((cut, *cuts), expected, strict=True)]
        worst = max(error(a, b, whole=c) for a, b, c in zip(found, wanted, expected, strict=True))
        mine = picked.any(0)[cut.positions(rank, "cpu")].any(0)
        mine[of_keys.positions(rank, "cpu")] = False
        return worst, sent, int(mine.sum())

    found = run_ranks(on, ranks)
    assert max(worst for worst, _, _ in found) < EXACT
    if strategy == AllGather():
        sent = sum(sent for _, sent, _ in found)  # forward, and gradients in the backward
        selected = 2 * 2 * inputs[1][:, :, 0].nbytes * sum(rows for _, _, rows in found)
        assert sent == selected or (ended and sent < selected)  # windows that no query of a rank has behind it stay


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_softmax_over_two_sequences(sinks: bool, ranks: int):
    """The first queries have no keys of the second sequence, and the first one none of the first sequence either."""
    (q, k, v), cotangent = attention_inputs(length=LENGTH, heads=4, kv_heads=2)
    (_, other_k, other_v), _ = attention_inputs(length=LENGTH, kv_length=6, heads=4, kv_heads=2, seed=5)
    sink_H = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) if sinks else None
    positions = torch.arange(LENGTH)
    near = Dense((positions[:, None] > positions) & (positions[:, None] < positions + 5))
    allowed = torch.cat((near.tensor, EndedWindows(4).allowed(positions, torch.arange(6))), 1)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, other_k, other_v)]
    whole_sink = None if sink_H is None else sink_H.clone().requires_grad_()
    joined = torch.cat((leaves[1], leaves[3]), 2), torch.cat((leaves[2], leaves[4]), 2)
    out = dense_attention(leaves[0], *joined, allowed, sink_H=whole_sink)
    out.backward(cotangent)
    cut, of_keys = head_tail(LENGTH, ranks), contiguous(6, ranks)
    cuts = cut, cut, cut, of_keys, of_keys

    def on(rank: int) -> tuple[float, Any]:
        mesh, own = cp_mesh(ranks), None if sink_H is None else sink_H.clone().requires_grad_()
        mine = [each.shard(x.detach(), 2, rank).requires_grad_() for each, x in zip(cuts, leaves, strict=True)]
        attend = partial(context_attention, mine[0], mesh=mesh, layout=cut, return_lse=True)
        parts = attend(*mine[1:3], mask=near), attend(*mine[3:], mask=EndedWindows(4), kv_layout=of_keys)
        found, lse = join_attentions(*parts, sink_H=own)
        found.backward(cut.shard(cotangent, 2, rank))
        assert bool((lse == -torch.inf).any()) == (not sinks and 0 in cut.positions(rank))
        pairs = [(found, cut.shard(out, 2, rank), out)]
        pairs += [(x.grad, each.shard(y.grad, 2, rank), y.grad) for each, x, y in zip(cuts, mine, leaves, strict=True)]
        return max(error(a, b, whole=c) for a, b, c in pairs), None if own is None else own.grad

    results = run_ranks(on, ranks)
    assert max(worst for worst, _ in results) < EXACT
    if whole_sink is not None:
        assert error(sum(grad for _, grad in results), whole_sink.grad) < EXACT


def test_a_join_in_low_precision_is_as_exact_as_one_softmax():
    """It computes in the dtype of the logsumexps, float32."""
    (q, k, v), _ = attention_inputs(length=64, heads=2, kv_heads=2, dim=16)
    wanted = dense_attention(q, k, v, torch.ones(64, 64, dtype=torch.bool))
    low = [x.bfloat16() for x in (q, k, v)]

    def on(rank: int) -> tuple[float, float]:
        attend = partial(context_attention, low[0], mesh=cp_mesh(1), layout=contiguous, return_lse=True)
        halves = [
            attend(*(x[:, :, half] for x in low[1:]), kv_layout=contiguous) for half in (slice(20), slice(20, 64))
        ]
        out, lse = join_attentions(*halves)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        return error(out.double(), wanted), error(attend(*low[1:])[0].double(), wanted)

    ((joined, one),) = run_ranks(on, 1)
    assert joined < 1.5 * one  # one more rounding, of each part to bfloat16


def test_what_cannot_be_joined():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="at least one attention"):
        join_attentions()
    with pytest.raises(ValueError, match="are not of the same queries"):
        join_attentions((out, lse), (out[:, :, :1], lse[:, :, :1]))
    with pytest.raises(ValueError, match="one logit for each of 2 query heads"):
        join_attentions((out, lse), sink_H=torch.zeros(3))


def attempt(rank: int, mesh: Any, *, keys: int = 12, of_keys: Any = contiguous, **options: Any) -> None:
    q = head_tail(LENGTH, 2).shard(torch.ones(1, 2, LENGTH, 4), 2, rank)
    k = of_keys(keys, 2).shard(torch.ones(1, 2, keys, 4), 2, rank)
    context_attention(q, k, k, mesh, **({"layout": head_tail(LENGTH, 2)} | options))


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a mask of positions": (lambda r: {"kv_layout": contiguous, "mask": Causal()}, ValueError, "positions of the two"),
    "a mask of positions, as many keys": (
        lambda r: {"kv_layout": head_tail, "of_keys": head_tail, "keys": LENGTH, "mask": Causal()},
        ValueError,
        r"or a mask over numbers of keys, as Shifted and EndedWindows",
    ),
    "no layout of keys": (
        lambda r: {"mask": EndedWindows(2), "layout": head_tail, "of_keys": head_tail},
        ValueError,
        "pass the layout of these keys as kv_layout=",
    ),
    "another number of ranks": (lambda r: {"kv_layout": contiguous(12, 3)}, ValueError, "the kv_layout cuts .* for 3"),
    "another length": (lambda r: {"kv_layout": contiguous(14, 2)}, ValueError, r"the layout cuts 14 positions"),
    "keys that another layout has cut": (lambda r: {"kv_layout": striped}, ValueError, "was cut with another layout"),
    "no layout": (lambda r: {"kv_layout": 3}, TypeError, "kv_layout must be a SequenceLayout or a function"),
    "ranks that differ": (lambda r: {"kv_layout": contiguous(12, 2) if r else contiguous}, ValueError, "kv_layout"),
    "a joint layout": (
        lambda r: {"kv_layout": contiguous, "layout": JointLayout(prefix=2, rest=head_tail)},
        NotImplementedError,
        "a JointLayout lays out keys with queries",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_layouts_of_keys_are_errors_on_every_rank(case: str):
    options, kind, text = BAD[case]
    refused(lambda rank, mesh: attempt(rank, mesh, **options(rank)), text, kind)


def test_masks_over_other_keys():
    with pytest.raises(ValueError, match="size must be at least 1"):
        EndedWindows(0)
    with pytest.raises(ValueError, match="first must be >= 0"):
        Shifted(Causal(), -1)
    for mask in (Dense(torch.ones(4, 4)), EndedWindows(2), PerRow((Causal(), Causal())), Tree((3, 2, 2), (-1, 0, 0))):
        with pytest.raises(ValueError, match="takes a mask of intervals"):
            Shifted(mask, 1)
    assert (EndedWindows(3) & Full()).crosses
    assert not EndedWindows(3).separates
    assert not Shifted(Causal(), 1).separates
    assert Shifted(Documents((3, 4)), 1).separates
    assert Shifted(SlidingWindow(2), 1).local
    assert not (Causal() & Full()).crosses


def test_layouts_of_joined_keys():
    pieces = head_tail(8, 2), contiguous(3, 2)
    joined = join_layouts(*pieces)
    assert joined.chunks == (((0, 2), (6, 10)), ((2, 6), (10, 11)))
    whole = torch.arange(11)
    for rank in range(2):
        parts = pieces[0].shard(whole[:8], 0, rank), pieces[1].shard(whole[8:], 0, rank)
        assert joined.shard(whole, 0, rank).tolist() == torch.cat(parts).tolist()
    with pytest.raises(ValueError, match="give all one number"):
        join_layouts(head_tail(8, 2), head_tail(8, 3))
    with pytest.raises(ValueError, match="give all one number"):
        join_layouts()


def test_explain_predicts_the_bytes_of_other_keys():
    """A ring over windows sends the windows that a rank's queries see, and not as many rows as tokens."""
    sizes = {"ranks": 2, "heads": 4, "head_dim": 8, "dtype": torch.float64, "device": "cpu", "strategy": AllGather()}
    made = explain(LENGTH, layout=head_tail, kv_layout=contiguous(6, 2), mask=EndedWindows(4), **sizes)
    inputs, cotangent = attention_inputs(length=LENGTH, kv_length=6, heads=4, kv_heads=4, dim=8, batch=1)
    cuts = head_tail(LENGTH, 2), *[contiguous(6, 2)] * 2

    def on(rank: int) -> tuple[int, int]:
        leaves = [cut.shard(x, 2, rank).detach().requires_grad_() for cut, x in zip(cuts, inputs, strict=True)]
        options = {"layout": head_tail, "kv_layout": cuts[1], "mask": EndedWindows(4), "strategy": AllGather()}
        traces = CommunicationTrace(), CommunicationTrace()
        with traces[0]:
            out = context_attention(*leaves, cp_mesh(2), **options)
        with traces[1]:
            out.backward(cuts[0].shard(cotangent, 2, rank))
        forward, backward = (sum(size for kind, size in trace.events if kind == "send") for trace in traces)
        return forward, backward

    for (forward, backward), run in zip(run_ranks(on, 2), made.runs.values(), strict=True):
        assert (forward, backward) == (run.forward.sent.total(), run.backward.sent.total())
