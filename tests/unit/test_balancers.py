"""torch's load balancers with the layouts of this package: torch's order where it has one, any length, real work."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import contiguous, head_tail
from cp_styles.torch_api import HeadTailLoadBalancer, PerDocumentHeadTailLoadBalancer, PTRRLoadBalancer
from cp_styles.torch_api.balancers import layout_of

theirs = pytest.importorskip("torch.distributed.tensor.experimental._attention")


def causal(batch, head, query, key):
    return query >= key


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (48, 3), (64, 8), (6, 1)])
@pytest.mark.parametrize("restore", [False, True])
def test_head_tail_is_torchs_order(length, ranks, restore):
    ours, torchs = (kind(length, ranks, "cpu") for kind in (HeadTailLoadBalancer, theirs._HeadTailLoadBalancer))
    assert torch.equal(ours.generate_indices(restore), torchs._generate_indices(restore).long())
    assert torch.equal(ours._generate_indices(restore=restore), ours.generate_indices(restore))


LENGTHS = [8, 16, 24]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_documents_give_every_rank_what_the_installed_torch_gives_it(ranks):
    layout = PerDocumentHeadTailLoadBalancer([LENGTHS], ranks, "cpu").layout
    (order,) = theirs._PerDocumentHeadTailLoadBalancer([LENGTHS], ranks, "cpu")._generate_indices()
    for rank, own in enumerate(order.view(ranks, -1)):
        assert torch.equal(layout.positions(rank), own.sort().values)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_documents_of_another_torch(ranks, monkeypatch):
    """From 2.15 on, a rank has a share of every document. So it has here at lengths that torch refuses."""
    lengths, start, expected = LENGTHS, 0, [[] for _ in range(ranks)]
    for size in lengths:
        (local,) = theirs._HeadTailLoadBalancer(size, ranks, "cpu")._generate_indices()
        for rank, piece in enumerate(local.view(ranks, -1)):
            expected[rank] += (piece + start).tolist()
        start += size
    order = torch.tensor([[position for own in expected for position in own]])
    kind = sys.modules[theirs._PerDocumentHeadTailLoadBalancer.__module__]._PerDocumentHeadTailLoadBalancer
    for other in (lambda self, restore=False: order, raising):
        monkeypatch.setattr(kind, "_generate_indices", other)
        balancer = PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu")
        assert torch.equal(balancer.generate_indices(), order)


def raising(*_, **__):
    raise AssertionError


@pytest.mark.parametrize(
    "balancer",
    [
        HeadTailLoadBalancer(13, 4),
        PerDocumentHeadTailLoadBalancer([[1, 7, 5]], 4),
        PerDocumentHeadTailLoadBalancer(torch.tensor([[6, 7]]).repeat(3, 1), 4, torch.device("cpu")),
        PTRRLoadBalancer(create_block_mask(causal, 2, 1, 13, 13, device="cpu", BLOCK_SIZE=2), 4),
    ],
    ids=repr,
)
def test_any_length(balancer):
    whole, layout = torch.arange(13) * 10, balancer.layout
    order, restore = balancer.generate_indices(), balancer.generate_indices(restore=True)
    assert order.shape == restore.shape == (1, 13)
    assert order.dtype == torch.int64
    parts = whole[order[0]].split(layout.lengths)
    for rank, part in enumerate(parts):
        assert torch.equal(part, layout.shard(whole, 0, rank))
    assert torch.equal(whole[order[0]][restore[0]], whole)
    assert layout is balancer.layout


def works(mask, layout):
    """Blocks of keys per rank, summed over rows and heads of the batch."""
    dense = mask.to_dense().sum(-1).sum((0, 1))
    block = mask.BLOCK_SIZE[0]
    return [int(dense[layout.positions(rank) // block].sum()) for rank in range(layout.ranks)]


DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([300, 20, 500, 204]))


def documents(batch, head, query, key):
    return (query >= key) & (DOCUMENTS[query] == DOCUMENTS[key])


def rows_differ(batch, head, query, key):
    return torch.where(batch == 0, query >= key, query <= key)


@pytest.mark.parametrize("mask_mod", [causal, documents, rows_differ])
@pytest.mark.parametrize("block", [32, (64, 16), 128])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ptrr_balances_the_blocks_of_the_mask(mask_mod, block, ranks):
    mask = create_block_mask(mask_mod, 2, 3, 1024, 1024, device="cpu", BLOCK_SIZE=block)
    layout = PTRRLoadBalancer(mask, ranks).layout
    assert len(set(layout.lengths)) == 1
    found, size = works(mask, layout), mask.BLOCK_SIZE[0]
    heaviest = int(mask.to_dense().sum(-1).sum((0, 1)).max()) * size
    assert max(found) - min(found) <= heaviest, "more than one block of queries apart"
    assert all(start % size == 0 for own in layout.chunks for start, _ in own)


@pytest.mark.parametrize("mask_mod", [causal, documents])
def test_ptrr_is_as_good_as_torchs(mask_mod):
    mask = create_block_mask(mask_mod, 1, 1, 1024, 1024, device="cpu", BLOCK_SIZE=32)
    (order,) = theirs._PTRRLoadBalancer(mask, 4)._generate_indices()
    dense = mask.to_dense().sum(-1)[0, 0]
    torchs = [int(dense[piece // 32].sum()) for piece in order.view(4, -1)]
    assert max(works(mask, PTRRLoadBalancer(mask, 4).layout)) <= max(torchs)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: PerDocumentHeadTailLoadBalancer([3, 4], 2), TypeError, "300, 10, 690"),
        (lambda: PerDocumentHeadTailLoadBalancer([], 2), TypeError, "for each row"),
        (lambda: PerDocumentHeadTailLoadBalancer([[3, 4], [4, 3]], 2), NotImplementedError, "2 rows.*different"),
        (lambda: PTRRLoadBalancer("causal", 2), TypeError, "by_work"),
        (
            lambda: PTRRLoadBalancer(create_block_mask(causal, 1, 1, 64, 128, device="cpu"), 2),
            ValueError,
            "64 queries and 128 keys",
        ),
        (lambda: layout_of(head_tail(8, 2), 8, 4), ValueError, "for 2 ranks, but there are 8"),
        (lambda: layout_of(HeadTailLoadBalancer(8, 2), 9, 2), ValueError, "8 positions"),
        (lambda: layout_of(7, 9, 2), TypeError, "a function such as head_tail"),
    ],
)
def test_what_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_a_cut_is_said_in_three_ways():
    assert layout_of(contiguous, 9, 2) == contiguous(9, 2)
    assert layout_of(head_tail(9, 2), 9, 2) == layout_of(HeadTailLoadBalancer(9, 2), 9, 2) == head_tail(9, 2)
