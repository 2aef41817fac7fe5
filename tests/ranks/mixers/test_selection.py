"""Attention to selected keys over any cut: against one process in float64, and the bytes that travel."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AllGather,
    Causal,
    Dense,
    Documents,
    Full,
    PerRow,
    Ring,
    SequenceScope,
    SlidingWindow,
    Ulysses,
    context_attention,
    contiguous,
    head_tail,
    striped,
)
from cp_styles.collectives import gather
from cp_styles.explain import explain_calls
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Mask
from cp_styles.mixers import context_select, selected_keys, selected_weights
from cp_styles.mixers import selection as selection_file
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.layouts import layouts
from tests.oracle import attend_and_differentiate, dense_attention, error, expected_attention, randn
from tests.ranks.attention_case import cp_mesh, on_every_rank, refused

BATCH, HEADS, GROUPS, INDEXERS, DIM, SMALL = 2, 4, 2, 3, 8, 5
SEQ_DIMS = (2, 2, 2, 2, 1, 2)  # of query, key, value; of query, key and weights of the indexer
EXACT = 1e-12  # float64 sums in another order give 1e-15; one key too many or too few gives 1e-2 and more


def inputs_of(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = [(heads, length, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    shapes += [(INDEXERS, length, SMALL), (length, SMALL), (INDEXERS, length)]
    return [randn(at, BATCH, *shape, dtype=dtype) for at, shape in enumerate(shapes)]


def divergence(scores: torch.Tensor, target: torch.Tensor, queries: int) -> torch.Tensor:
    log_p = scores.log_softmax(-1)
    return torch.where(target > 0, target * (target.log() - log_p), 0).sum() / (BATCH * queries)


def on_one(inputs: list[torch.Tensor], top_k: int, allowed: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output, loss of the indexer and gradients; ``allowed`` [B or 1, S, S]."""
    leaves = [x.detach().double().clone().requires_grad_() for x in inputs]
    q, k, v, index_q, index_k, weights = leaves
    products = (index_q @ index_k[:, None].mT * SMALL**-0.5).relu()
    scores, positions = (products * weights[..., None]).sum(1).masked_fill(~allowed, float("-inf")).topk(top_k)
    selected = torch.zeros(BATCH, *allowed.shape[1:], dtype=torch.bool).scatter_(-1, positions, True) & allowed
    out = dense_attention(q, k, v, selected[:, None])
    with torch.no_grad():
        logits = q @ k.repeat_interleave(HEADS // GROUPS, 1).mT * DIM**-0.5
        seen = logits.masked_fill(~selected[:, None], float("-inf")).softmax(-1).nan_to_num().mean(1)
    loss = divergence(scores, seen.gather(-1, positions), q.shape[2])
    cotangent = randn(9, *out.shape)
    return torch.stack((loss.detach(),)), [out.detach(), *torch.autograd.grad((out * cotangent).sum() + loss, leaves)]


def on_ranks(
    inputs: list[torch.Tensor], top_k: int, mask: Mask, layout: SequenceLayout, strategy: Any = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    def main(rank: int) -> list[torch.Tensor]:
        mesh = cp_mesh(layout.ranks)
        leaves = [layout.shard(x, dim, rank).clone().requires_grad_() for x, dim in zip(inputs, SEQ_DIMS, strict=True)]
        q, k, v, *indexer = leaves
        selected = context_select(*indexer, mesh, top_k=top_k, mask=mask, layout=layout)
        options = {"layout": layout, "strategy": strategy, "return_lse": True}
        out, lse = context_attention(q, k, v, mesh, mask=mask & selected.mask, **options)
        target = selected_weights(q, k, lse.detach(), selected, mesh)
        loss = divergence(selected.scores_BLK, target, layout.length)
        cotangent = layout.shard(randn(9, BATCH, HEADS, layout.length, DIM), 2, rank)
        ((out * cotangent).sum() + loss).backward()
        return [loss.detach(), out.detach(), *(x.grad for x in leaves)]

    loss, *tensors = zip(*run_ranks(main, layout.ranks), strict=True)
    together = [layout.unshard(list(parts), dim) for parts, dim in zip(tensors, (2, *SEQ_DIMS), strict=True)]
    return torch.stack((sum(loss),)), together


def compare(found: Any, wanted: Any, tolerance: float = EXACT) -> None:
    for each, expected in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        assert error(each, expected) < tolerance


def allowed_by(mask: Mask, length: int) -> torch.Tensor:
    positions = torch.arange(length)
    rows = mask.masks if isinstance(mask, PerRow) else (mask,)
    return torch.stack([row.allowed(positions, positions) for row in rows])


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_cut(data: st.DataObject):
    layout = data.draw(layouts(length=data.draw(st.integers(4, 24))))
    length = layout.length
    documents = Documents((length // 3, length - length // 3))
    masks = (Full(), Causal(), SlidingWindow(3, 1), Causal() & documents, PerRow((Causal(), documents & Causal())))
    mask, top_k = data.draw(st.sampled_from(masks)), data.draw(st.integers(1, 4))
    strategy = data.draw(st.sampled_from((Ring(), Ring(keep=0), AllGather())))
    inputs = inputs_of(length)
    # Some scores of the oracle are -inf, if queries may attend to few keys: their positions are no selection.
    compare(on_ranks(inputs, top_k, mask, layout, strategy), on_one(inputs, top_k, allowed_by(mask, length)))


def test_many_tiles_and_many_turns(monkeypatch):
    """Several tiles in a source, several ranges of rows in each part of the work."""
    monkeypatch.setattr(selection_file, "_SCORES", 2000)
    length, layout = 300, head_tail(300, 3)
    inputs = inputs_of(length)
    compare(on_ranks(inputs, 20, Causal(), layout), on_one(inputs, 20, allowed_by(Causal(), length)))


def test_a_sequence_that_is_shorter_than_top_k():
    inputs = inputs_of(6)
    compare(on_ranks(inputs, 50, Causal(), head_tail(6, 2)), on_one(inputs, 6, allowed_by(Causal(), 6)))


def test_a_dense_mask_too():
    holes = Dense(randn(30, 12, 12) > -0.5)
    allowed = (holes.tensor & torch.ones(12, 12, dtype=torch.bool).tril())[None]
    inputs = inputs_of(12)
    compare(on_ranks(inputs, 3, Causal() & holes, striped(12, 2)), on_one(inputs, 3, allowed))


def test_bfloat16():
    """The indexer is scored in float32. A tile rounds once more than one device: twice its error, as everywhere."""
    inputs = inputs_of(64, torch.bfloat16)
    wanted = on_one(inputs, 8, allowed_by(Causal(), 64))
    mask = torch.zeros(BATCH, 64, 64, dtype=torch.bool)

    def main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = cp_mesh(2)
        layout = head_tail(64, 2)
        q, k, v, *indexer = (layout.shard(x, dim, rank) for x, dim in zip(inputs, SEQ_DIMS, strict=True))
        selected = context_select(*indexer, mesh, top_k=8, mask=Causal(), layout=layout)
        assert selected.scores_BLK.dtype == torch.float32
        out = context_attention(q, k, v, mesh, mask=Causal() & selected.mask, layout=layout)
        return out, selected.positions_BLK

    outs, positions = zip(*run_ranks(main, 2), strict=True)
    layout = head_tail(64, 2)
    whole = layout.unshard(list(positions), 1)
    mask.scatter_(-1, whole.clamp(min=0), True).logical_and_(torch.ones(64, 64, dtype=torch.bool).tril())
    one = F.scaled_dot_product_attention(*inputs[:3], attn_mask=mask[:, None], enable_gqa=True)
    assert error(layout.unshard(list(outs), 2), wanted[1][0]) < 2 * error(one, wanted[1][0])


# -- bytes and memory --


def test_only_selected_rows_travel():
    """Every query selects its own position and the positions 0 and 5, of which rank 0 has both."""
    length, layout = 16, contiguous(16, 4)
    positions = torch.stack([torch.arange(length), torch.zeros(length).long(), torch.full((length,), 5)], -1)[None]

    def main(rank: int) -> tuple[int, int, int]:
        mesh = cp_mesh(4)
        own = layout.shard(positions, 1, rank).int()
        with CommunicationTrace() as trace:
            mask = selected_keys(own, mesh, layout=layout)
        flags = sum(size for name, size in trace.events if name == "all_to_all")
        q, k, v = (layout.shard(x, 2, rank).requires_grad_() for x in inputs_of(length)[:3])
        with CommunicationTrace() as trace, explain_calls() as explanations:
            out = context_attention(q, k, v, mesh, mask=mask, layout=layout)
        keys = sum(size for name, size in trace.events if name == "send")
        ((explained_rank, run),) = explanations[0].runs.items()
        assert (explained_rank, sum(run.forward.sent.values())) == (rank, keys)
        with CommunicationTrace() as trace:
            out.sum().backward()
        return flags, keys, sum(size for name, size in trace.events if name == "send")

    found = run_ranks(main, 4)
    row = BATCH * GROUPS * 2 * DIM * 8
    assert [flags for flags, _, _ in found] == [12] * 4  # a byte for each key of the others
    assert [keys for _, keys, _ in found] == [3 * row, 3 * row, 0, 0]  # 0 from rank 0, 5 from rank 1, to all others
    assert sum(gradients for _, _, gradients in found) >= 6 * row  # gradients go back; keys may be sent once more


def test_the_keys_of_the_indexer_travel_once():
    length, layout = 24, head_tail(24, 3)
    inputs = inputs_of(length)

    def main(rank: int) -> list[int]:
        mesh = cp_mesh(3)
        indexer = [layout.shard(x, dim, rank).requires_grad_() for x, dim in zip(inputs[3:], SEQ_DIMS[3:], strict=True)]
        with CommunicationTrace() as trace:
            selected = context_select(*indexer, mesh, top_k=3, mask=Causal(), layout=layout)
        sizes = [size for name, size in trace.events if name in ("all_gather", "all_to_all")][1:]  # after the agreement
        with CommunicationTrace() as trace:
            selected.scores_BLK[selected.positions_BLK >= 0].sum().backward()
        return [*sizes, *(size for name, size in trace.events if name == "all_to_all")]

    keys = 2 * BATCH * 8 * SMALL * 8
    assert run_ranks(main, 3) == [[keys, 16, keys]] * 3


class LargestResult(TorchDispatchMode):
    """The largest number of elements of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return found


def test_the_mask_is_never_whole(monkeypatch):
    """On one rank, where the dispatch mode sees all, no tensor has as many elements as rows times keys."""
    monkeypatch.setattr(selection_file, "_SCORES", 2**16)
    length = 3000
    shapes = ((1, 1, length, 4),) * 3 + ((1, 1, length, 4), (1, length, 4), (1, 1, length))
    leaves = [randn(at, *shape).requires_grad_() for at, shape in enumerate(shapes)]

    def main(rank: int) -> int:
        mesh = cp_mesh(1)
        with LargestResult() as largest:
            selected = context_select(*leaves[3:], mesh, top_k=4, mask=Causal())
            out = context_attention(*leaves[:3], mesh, mask=Causal() & selected.mask)
            (out.sum() + selected.scores_BLK[selected.positions_BLK >= 0].sum()).backward()
        return largest.numel

    assert run_ranks(main, 1)[0] < length * length / 4


# -- the way people write it --


def test_a_scope_and_a_checkpoint():
    """The scope's documents hold for the selection too. A recomputation selects the same keys."""
    length, documents = 20, Documents((7, 13))
    layout, inputs = striped(length, 2), inputs_of(length)
    wanted = on_one(inputs, 3, allowed_by(Causal() & documents, length))

    def main(rank: int) -> tuple[torch.Tensor, ...]:
        mesh = cp_mesh(2)
        leaves = [layout.shard(x, dim, rank).clone().requires_grad_() for x, dim in zip(inputs, SEQ_DIMS, strict=True)]

        def layer(q, k, v, *indexer):
            selected = context_select(*indexer, mesh, top_k=3, mask=Causal())
            return context_attention(q, k, v, mesh, mask=Causal() & selected.mask)

        scope = SequenceScope(layout, mask=documents)
        with scope:
            out = checkpoint(layer, *leaves, use_reentrant=False, context_fn=scope.for_checkpoint)
        out.backward(layout.shard(randn(9, BATCH, HEADS, length, DIM), 2, rank))
        return out.detach(), *(x.grad for x in leaves[:3])

    for parts, expected in zip(zip(*run_ranks(main, 2), strict=True), wanted[1][:4], strict=True):
        assert error(layout.unshard(list(parts), 2), expected) < EXACT


def test_a_compiled_model():
    """The selection is outside of the graph, and so is the attention, whose mask holds tensors."""
    length, layout, inputs = 12, head_tail(12, 2), inputs_of(12)
    wanted = on_one(inputs, 3, allowed_by(Causal(), length))

    def main(rank: int) -> torch.Tensor:
        mesh = cp_mesh(2)

        @torch.compile(backend="eager")
        def layer(q, k, v, *indexer):
            selected = context_select(*indexer, mesh, top_k=3, mask=Causal(), layout=layout)
            return attend(q * 1.0, k, v, mesh, mask=selected.mask, layout=layout)

        attend = torch.compiler.disable(context_attention)
        return layer(*(layout.shard(x, dim, rank) for x, dim in zip(inputs, SEQ_DIMS, strict=True)))

    assert error(layout.unshard(run_ranks(main, 2), 2), wanted[1][0]) < EXACT


def test_positions_of_an_indexer_of_ones_own():
    """It selects pairs of neighbouring keys of the whole sequence, by gathered keys."""
    length, layout, inputs = 12, head_tail(12, 2), inputs_of(12)

    def pairs(index_q: torch.Tensor, index_k: torch.Tensor) -> torch.Tensor:
        scores = (index_q.sum(1) @ index_k.mT).unflatten(-1, (length // 2, 2)).sum(-1)
        return (2 * scores.topk(2).indices[..., None] + torch.arange(2)).flatten(-2)

    chosen = torch.zeros(BATCH, length, length, dtype=torch.bool).scatter_(-1, pairs(inputs[3], inputs[4]), True)
    cotangent = randn(9, BATCH, HEADS, length, DIM)
    wanted = expected_attention(inputs[:3], cotangent, (chosen & allowed_by(Causal(), length))[:, None])

    def main(rank: int) -> list[torch.Tensor]:
        mesh = cp_mesh(2)
        q, k, v, index_q, index_k, _ = (
            layout.shard(x, dim, rank).clone() for x, dim in zip(inputs, SEQ_DIMS, strict=True)
        )
        keys = gather(index_k, 1, mesh, layout=layout, reduce_gradients=False)
        mask = Causal() & selected_keys(pairs(index_q, keys), mesh, layout=layout)
        attend = partial(context_attention, mesh=mesh, mask=mask, layout=layout)
        return attend_and_differentiate(attend, [q, k, v], layout.shard(cotangent, 2, rank))

    for parts, expected in zip(zip(*run_ranks(main, 2), strict=True), wanted, strict=True):
        assert error(layout.unshard(list(parts), 2), expected) < EXACT


@on_every_rank(1)
def test_a_mask_in_a_graph(mesh):
    mask, q = selected_keys(torch.zeros(1, 8, 1, dtype=torch.int64), mesh), randn(0, 1, 1, 8, 4)

    @torch.compile(backend="eager", fullgraph=True)
    def attend(q):
        return context_attention(q, q, q, mesh, mask=mask)

    with pytest.raises(Exception, match="a mask of selected keys holds tensors of this call"):
        attend(q)


# -- errors --


def attend_with(words: str, strategy: Any = None, layout_of_attention: Any = head_tail, change: Any = None) -> None:
    inputs = inputs_of(12)

    def act(rank: int, mesh: Any) -> None:
        q, k, v, *indexer = (head_tail(12, 2).shard(x, dim, rank) for x, dim in zip(inputs, SEQ_DIMS, strict=True))
        options: dict[str, Any] = {"top_k": 3, "mask": Causal(), "layout": head_tail(12, 2)}
        if change is not None:
            change(rank, indexer, options)
        mask = context_select(*indexer, mesh, **options).mask
        q, k, v = (x.clone() for x in (q, k, v))  # without the mark of their layout
        context_attention(q, k, v, mesh, mask=mask, layout=layout_of_attention(12, 2), strategy=strategy)

    refused(act, words, (ValueError, TypeError, NotImplementedError))


def only_rank_1(name: str, value: Any) -> Any:
    return lambda rank, indexer, options: options.update({name: value} if rank else {})


def weights_of_other_heads(rank: int, indexer: list[torch.Tensor], options: dict[str, Any]) -> None:
    indexer[2] = indexer[2][:, :1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": Ulysses()}, r"give both calls one layout, and the attention Ring\(\) or AllGather\(\)"),
        ({"layout_of_attention": contiguous}, "keys were selected for queries of 2 ranks"),
        ({"change": only_rank_1("top_k", 4)}, r"disagree on top_k: ranks \[1\] differ from rank 0"),
        ({"change": only_rank_1("top_k", 0)}, "top_k must be the number of keys of a query, 1 or more, got 0"),
        ({"change": only_rank_1("mask", None)}, r"disagree on mask: ranks \[1\] differ from rank 0"),
        ({"change": only_rank_1("mask", "causal")}, "mask must be a Mask object"),
        ({"change": weights_of_other_heads}, "pass one small key, and a weight of each head and token"),
        (
            {"change": lambda rank, indexer, options: options.update(mask=Dense(torch.ones(2, 3, 12, 12) > 0))},
            "differs between heads",
        ),
    ],
)
def test_refused_on_every_rank(options: dict[str, Any], words: str):
    attend_with(words, **options)


def test_positions_that_are_no_integers():
    words = re.escape("chosen must be int32 or int64 [B, L, K], or [B, G, L, K]")
    refused(lambda _, mesh: selected_keys(randn(0, 1, 4, 3), mesh, layout=contiguous(8, 2)), words, TypeError)


@pytest.mark.parametrize("position", [8, -2])
def test_positions_outside_the_sequence_on_one_rank(position: int):
    def act(rank: int, mesh: Any) -> None:
        positions = torch.zeros(1, 4, 1, dtype=torch.int64)
        positions[0, 1] = position if rank == 0 else -1
        selected_keys(positions, mesh, layout=contiguous)

    refused(act, "positions outside the sequence of 8 tokens")


@on_every_rank(1)
def test_a_mask_of_another_batch(mesh):
    mask = selected_keys(torch.zeros(3, 8, 1, dtype=torch.int64), mesh)
    with pytest.raises(ValueError, match="keys were selected for 3 rows of 8 positions, the attention has 2 rows"):
        context_attention(*(randn(at, 2, 1, 8, 4) for at in range(3)), mesh, mask=mask)
    mask.chosen_BGLK.add_(1)
    with pytest.raises(RuntimeError, match="were changed in place"):
        context_attention(*(randn(at, 3, 1, 8, 4) for at in range(3)), mesh, mask=mask)
