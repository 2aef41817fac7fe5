"""query_rows: biases that each query computes, by distance, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import AuxRequest

from cp_styles import (
    AllGather,
    Causal,
    Checks,
    Documents,
    Full,
    Mask,
    Ring,
    SequenceLayout,
    SlidingWindow,
    Ulysses,
    context_flex_attention,
    contiguous,
    head_tail,
    striped,
)
from cp_styles._lib.introspect import captured_tensors
from cp_styles.engine.binding import binding_of_call
from cp_styles.functions.max_scores import max_scores
from cp_styles.kernels import FlexKernel
from cp_styles.mixers import query_rows
from cp_styles.testing import run_ranks
from tests.covering import sampled
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh, on_every_rank, refused

BATCH, HEADS, KV_HEADS, LENGTH, DIM, REACH = 2, 4, 2, 23, 8, 6
EXACT = 1e-13  # sums of float64 in another order


def few(length: int, ranks: int) -> SequenceLayout:
    """The last rank has no queries, and the first one nearly all."""
    edges = [0, length - ranks + 2, *range(length - ranks + 3, length + 1), length][: ranks + 1]
    return SequenceLayout.from_chunks([(edges[rank], edges[rank + 1])] for rank in range(ranks))


def bias_of(rel: Any) -> Any:
    def bias(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        distance = q_idx - kv_idx
        near = (distance >= 0) & (distance < REACH)
        return score + torch.where(near, rel[b, h, q_idx, distance.clamp(0, REACH - 1)], 0.0)

    return bias


def leaves() -> list[torch.Tensor]:
    shapes = (HEADS, LENGTH, DIM), (KV_HEADS, LENGTH, DIM), (KV_HEADS, LENGTH, DIM), (HEADS, LENGTH, REACH)
    return [randn(index, BATCH, *shape).requires_grad_() for index, shape in enumerate(shapes)]


def dense(mask: Mask) -> list[torch.Tensor]:
    """Output and gradients of one device, by plain operations."""
    q, k, v, rel = whole = leaves()
    at = torch.arange(LENGTH)
    distance = at[:, None] - at
    outside = (distance < 0) | (distance >= REACH)
    bias = rel.gather(-1, distance.clamp(0, REACH - 1).expand(BATCH, HEADS, -1, -1)).masked_fill(outside, 0.0)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = (q @ k.mT * DIM**-0.5 + bias).masked_fill(~mask.allowed(at, at), float("-inf"))
    out = scores.softmax(-1) @ v
    return [out, *torch.autograd.grad(out, whole, randn(9, *out.shape))]


def attend(mesh: Any, cut: SequenceLayout, mask: Mask, **options: Any) -> list[torch.Tensor]:
    rank = mesh.get_local_rank()
    parts = [cut.shard(x.detach(), 2, rank).requires_grad_() for x in leaves()]
    q, k, v, rel = parts
    # As a model computes it: a tensor that a layout has cut knows which one.
    rows = query_rows(rel * 1.0, -2, mesh, layout=options.pop("rows", cut))
    options = {"score_mod": bias_of(rows), "mask": mask, "layout": cut, **options}
    out = context_flex_attention(q, k, v, mesh, enable_gqa=True, **options)
    return [out, *torch.autograd.grad(out, parts, cut.shard(randn(9, BATCH, HEADS, LENGTH, DIM), 2, rank))]


@sampled(
    2,
    ranks=[1, 2, 3],
    balancer=[head_tail, contiguous, striped, few],
    strategy=[Ring(), Ring(keep=0), AllGather()],
    mask=[Causal(), Causal() & SlidingWindow(4), Causal() & Documents((9, LENGTH - 9)), Full()],
)
def test_exact(ranks: int, balancer: Any, strategy: Any, mask: Mask):
    cut = balancer(LENGTH, ranks) if ranks > 1 or balancer is not few else head_tail(LENGTH, 1)
    found = run_ranks(lambda rank: attend(cp_mesh(ranks), cut, mask, strategy=strategy), ranks)
    assert (
        max(error(cut.unshard([*x], 2), y) for x, y in zip(zip(*found, strict=True), dense(mask), strict=True)) < EXACT
    )


def test_the_largest_scores_have_the_bias():
    cut = head_tail(LENGTH, 2)

    def on(rank: int) -> torch.Tensor:
        mesh = cp_mesh(2)
        q, k, v, rel = (cut.shard(x.detach(), 2, rank) for x in leaves())
        options = {"mask": Causal(), "layout": cut, "return_aux": AuxRequest(max_scores=True)}
        mod = bias_of(query_rows(rel, 2, mesh, layout=cut))
        return context_flex_attention(q, k, v, mesh, score_mod=mod, enable_gqa=True, **options)[1].max_scores

    q, k, _, rel = leaves()
    at = torch.arange(LENGTH)
    distance = at[:, None] - at
    bias = rel.gather(-1, distance.clamp(0, REACH - 1).expand(BATCH, HEADS, -1, -1)).masked_fill(distance >= REACH, 0.0)
    scores = q @ k.repeat_interleave(2, 1).mT * DIM**-0.5 + bias
    wanted = scores.masked_fill(distance < 0, float("-inf")).amax(-1)
    assert error(cut.unshard(run_ranks(on, 2), 2), wanted) < EXACT


OF_OTHERS = "the score_mod reads query_rows of rank"


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": Ulysses()},
        {"rows": contiguous(LENGTH, 2), "layout": SequenceLayout.from_chunks([[(11, 23)], [(0, 11)]])},
    ],
    ids=["Ulysses", "another layout"],
)
def test_rows_of_other_queries_are_refused_on_every_rank(options: dict[str, Any]):
    cut = options.get("layout", head_tail(LENGTH, 2))
    refused(lambda _, mesh: attend(mesh, cut, Causal(), **options), OF_OTHERS)


def test_each_of_several_rows_is_checked():
    """The second one has another layout."""
    cut, other = contiguous(24, 2), SequenceLayout.from_chunks([[(12, 24)], [(0, 12)]])

    def act(_: int, mesh: Any) -> None:
        q = torch.zeros(1, 1, 12, 4)
        rows = [query_rows(torch.zeros(1, 1, 12, REACH), 2, mesh, layout=layout) for layout in (cut, other)]

        def bias(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            return score + rows[0][b, h, q_idx, 0] + rows[1][b, h, q_idx, 1]

        context_flex_attention(q, q, q, mesh, score_mod=bias, layout=cut)

    refused(act, OF_OTHERS)


def test_rows_of_another_axis_are_refused():
    """Rows over dp, whose ranks have as many queries, for an attention over cp. Ranks 0 and 3 have the same place on
    both axes."""

    def act(*_: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        q, cut = torch.zeros(1, 1, 12, 4), contiguous(24, 2)
        mod = bias_of(query_rows(torch.zeros(1, 1, 12, REACH), 2, mesh["dp"], layout=cut))
        context_flex_attention(q, q, q, mesh["cp"], score_mod=mod, layout=cut)

    refused(act, OF_OTHERS, ranks=4)


def test_maxima_of_other_queries_are_refused():
    """The first pass, over the keys, has queries of all ranks too."""
    cut = contiguous(24, 2)

    def act(_: int, mesh: Any) -> None:
        q = torch.zeros(1, 2, 12, 4)
        mod = bias_of(query_rows(torch.zeros(1, 2, 12, REACH), 2, mesh, layout=cut))
        binding = binding_of_call("largest", mesh, Ulysses(), cut, Full(), None, None, checks=Checks())
        read = [(x, 0) for x in captured_tensors(mod, (0.0, 0, 0, 0, 0), q.device)]
        max_scores(binding, q, q, scale=None, modified=FlexKernel(mod, read=tuple(read)))

    refused(act, OF_OTHERS)


def test_a_position_of_another_rank_is_nan():
    """A score_mod that reads the row of the key: on one device it has one."""
    cut = head_tail(LENGTH, 2)

    def on(rank: int) -> bool:
        mesh = cp_mesh(2)
        q, k, v, rel = (cut.shard(x.detach(), 2, rank) for x in leaves())
        rows = query_rows(rel, 2, mesh, layout=cut)

        def bias(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            return score + rows[b, h, kv_idx, 0]

        out = context_flex_attention(q, k, v, mesh, score_mod=bias, mask=Full(), layout=cut, enable_gqa=True)
        return bool(out.isnan().all())

    assert all(run_ranks(on, 2))


@on_every_rank(2)
def test_bad_indices_and_integers_are_refused(mesh):
    x = torch.zeros(3, 4)
    rows = query_rows(x, 1, mesh, layout=contiguous(8, 2))
    for indices in ((0,), (slice(None), 0), (0, ...), (0, None)):
        with pytest.raises(TypeError, match="a tensor of 2 dims needs as many indices"):
            rows[indices]
    with pytest.raises(TypeError, match="only numbers with a NaN"):
        query_rows(x.long(), 1, mesh, layout=contiguous(8, 2))
    with pytest.raises(ValueError, match="the layout cuts 10 positions"):
        query_rows(x, 1, mesh, layout=contiguous(10, 2))


def test_a_tensor_that_is_read_beside_its_rows_is_compared():
    """The mark is of the rows alone: the same tensor, read as it is, differs between ranks."""
    cut = contiguous(24, 2)

    def act(rank: int, mesh: Any) -> None:
        q = k = v = torch.randn(1, 1, 12, 4, generator=torch.Generator().manual_seed(rank))
        rows = query_rows(q, 2, mesh, layout=cut)

        def bias(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            return score + rows[b, h, q_idx, 0] + q[b, h, q_idx % 12, 0]

        context_flex_attention(q, k, v, mesh, score_mod=bias, layout=cut)

    refused(act, "the contents of the kernel")
