"""whole_documents: few documents are cut, and work and tokens are balanced."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cp_styles import Causal, Documents, SequenceLayout, imbalance, per_document_head_tail, whole_documents
from cp_styles.batch import packs
from tests.covering import rows_at_night

MIXES: dict[str, Callable[[random.Random], list[int]]] = {
    "short": lambda draw: [draw.randint(50, 800) for _ in range(200)],
    "long": lambda draw: [draw.randint(20_000, 60_000) for _ in range(6)],
    "fine-tuning": lambda draw: [int(min(32_768, draw.lognormvariate(6.2, 1.2))) + 1 for _ in range(120)],
    "one long": lambda draw: [30_000, *(draw.randint(100, 600) for _ in range(60))],
    "few": lambda draw: [draw.randint(100, 2_000) for _ in range(9)],
}


def cut_documents(layout: SequenceLayout, documents: list[int]) -> dict[int, int]:
    """The number of ranks of each document that several ranks have."""
    found, start = {}, 0
    for index, size in enumerate(documents):
        ranks = [
            rank
            for rank, chunks in enumerate(layout.chunks)
            if any(first < start + size and start < last for first, last in chunks)
        ]
        if len(ranks) > 1:
            found[index] = len(ranks)
        start += size
    return found


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_balanced(mix: str, ranks: int):
    for seed in range(10):
        documents = MIXES[mix](random.Random(seed))
        layout = whole_documents(sum(documents), ranks, documents=documents)
        assert imbalance(layout, Causal() & Documents(documents)) < 1.051  # pieces are rounded to whole tokens
        assert max(layout.lengths) * ranks <= 1.1 * sum(documents) + ranks


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_short_documents_are_not_cut(ranks: int):
    for seed in range(10):
        documents = MIXES["short"](random.Random(seed))
        assert cut_documents(whole_documents(sum(documents), ranks, documents=documents), documents) == {}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_long_document_is_cut_over_as_many_ranks_as_it_needs(ranks: int):
    documents = MIXES["one long"](random.Random(0))
    assert set(cut_documents(whole_documents(sum(documents), ranks, documents=documents), documents)) == {0}
    # A quarter of the work, and two ranks have less than a half each.
    documents = [1000, 1000, 1000, 1000]
    assert cut_documents(whole_documents(4000, 8, documents=documents), documents) == dict.fromkeys(range(4), 2)
    assert cut_documents(whole_documents(4000, 2, documents=documents), documents) == {}


def test_the_documents_of_a_rank_are_cut_head_tail():
    layout = whole_documents(800, 2, documents=[800])
    assert layout.chunks == (((0, 200), (600, 800)), ((200, 600),))


@pytest.mark.parametrize("documents", [[1], [1, 1], [2, 0, 1], [0, 0, 5], [], [7] * 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_tiny(documents: list[int], ranks: int):
    layout = whole_documents(sum(documents), ranks, documents=documents)
    assert layout.ranks == ranks
    assert layout.length == sum(documents)


@pytest.mark.parametrize("mix", MIXES)
def test_the_most_tokens_of_a_rank(mix: str):
    for seed in range(5):
        documents = MIXES[mix](random.Random(seed))
        total = sum(documents)
        for most in (-(-total // 8), -(-total // 8) + 5, total // 8 + total // 100):
            layout = whole_documents(total, 8, documents=documents, most=most)
            assert max(layout.lengths) <= most
            assert imbalance(layout, Causal() & Documents(documents)) < 1.051
    with pytest.raises(ValueError, match="8 ranks of at most 10 tokens hold fewer than 81"):
        whole_documents(81, 8, documents=[81], most=10)


@pytest.mark.parametrize(
    ("count", "ranks", "tries"), [(120, 8, 1), (2000, 64, 1), (4000, 512, 2), *rows_at_night((2000, 256, 8))]
)
def test_a_large_pack_takes_few_tries(count: int, ranks: int, tries: int, monkeypatch):
    """A document that is too large for a rank begins in pieces. The largest packs are given up."""
    draw, pairs = random.Random(0), []
    documents = [int(min(131_072, draw.lognormvariate(6.2, 1.2))) + 1 for _ in range(count)]
    place = packs._place
    monkeypatch.setattr(packs, "_place", lambda *call: pairs.append(count * ranks) or place(*call))
    layout = whole_documents(sum(documents), ranks, documents=documents)
    assert len(pairs) == tries
    assert sum(pairs) <= packs._MOST_PAIRS
    assert imbalance(layout, Causal() & Documents(documents)) < 1.051


def test_lengths_that_do_not_add_up():
    with pytest.raises(ValueError, match="add up to 10"):
        whole_documents(10, 2, documents=[3, 3])
    assert per_document_head_tail(6, 2, documents=[3, 3]).length == 6
