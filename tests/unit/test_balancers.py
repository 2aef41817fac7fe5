"""What the page Migration writes in place of torch's load balancers, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import FlexMask, by_work, contiguous, head_tail, per_document_head_tail
from cp_styles.layouts.balancers import layout_made_by

theirs = pytest.importorskip("torch.distributed.tensor.experimental._attention")


def causal(batch, head, query, key):
    return query >= key


def held(order, ranks):
    """What each rank holds of torch's order, ascending."""
    return [own.sort().values.tolist() for own in order.view(ranks, -1)]


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (48, 3), (64, 8), (6, 1)])
def test_head_tail_is_torchs_order(length, ranks):
    (order,) = theirs._HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices()
    layout = head_tail(length, ranks)
    assert [layout.positions(rank).tolist() for rank in range(ranks)] == held(order, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_documents_are_cut_as_by_torch(ranks):
    """From 2.15 on. Earlier versions give the first documents to the first ranks, which is not balanced."""
    lengths, start, expected = [8, 16, 24], 0, [[] for _ in range(ranks)]
    for size in lengths:
        (order,) = theirs._HeadTailLoadBalancer(size, ranks, "cpu")._generate_indices()
        for rank, own in enumerate(held(order, ranks)):
            expected[rank] += [start + position for position in own]
        start += size
    layout = per_document_head_tail(sum(lengths), ranks, documents=lengths, cut_all=True)
    assert [layout.positions(rank).tolist() for rank in range(ranks)] == expected


DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([300, 20, 500, 204]))


def documents(batch, head, query, key):
    return (query >= key) & (DOCUMENTS[query] == DOCUMENTS[key])


def rows_differ(batch, head, query, key):
    return torch.where(batch == 0, query >= key, query <= key)


@pytest.mark.parametrize("mask_mod", [causal, documents, rows_differ])
def test_a_block_mask_is_balanced_as_well_as_by_torch(mask_mod):
    mask = create_block_mask(mask_mod, 2 if mask_mod is rows_differ else 1, 1, 1024, 1024, device="cpu", BLOCK_SIZE=32)
    (order,) = theirs._PTRRLoadBalancer(mask, 4)._generate_indices()[:1]
    layout, at = by_work(1024, 4, mask=FlexMask.per_row(mask)), torch.arange(1024)
    assert len(set(layout.lengths)) == 1
    work = sum(mask_mod(row, 0, at[:, None], at).sum(-1) for row in torch.arange(mask.shape[0]))
    ours = max(int(work[layout.positions(rank)].sum()) for rank in range(4))
    assert ours <= max(int(work[own].sum()) for own in order.view(4, -1))
    assert ours <= 1.01 * int(work.sum()) / 4


@pytest.mark.parametrize(
    ("cut", "ranks", "kind", "words"),
    [
        (
            head_tail(8, 2),
            4,
            ValueError,
            "must cut 8 positions for 4 ranks, and the layout is for 8 positions on 2 ranks",
        ),
        (head_tail(9, 2), 2, ValueError, "the layout is for 9 positions"),
        (7, 2, TypeError, "such as head_tail: 7"),
        (theirs._HeadTailLoadBalancer(8, 2, "cpu"), 2, TypeError, "such as head_tail: <.*LoadBalancer"),
    ],
)
def test_what_is_refused(cut, ranks, kind, words):
    with pytest.raises(kind, match=words):
        layout_made_by(cut, 8, ranks)


def test_layout_or_balancer_gives_the_same_layout():
    assert layout_made_by(contiguous, 9, 2) == contiguous(9, 2)
    assert layout_made_by(head_tail(9, 2), 9, 2) == head_tail(9, 2)
