"""Masks that differ between rows of the batch."""

from __future__ import annotations

import re

import pytest
import torch

from cp_styles import (
    Causal,
    Documents,
    PerRow,
    by_work,
    context_attention,
    contiguous,
    imbalance,
    per_document_head_tail,
)
from cp_styles.plan import make_plan
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import document_of
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, refused, run_attention

LENGTH = 21
ROWS = [(5, 1, 15), (21,), (7, 7, 7)]
DOCUMENTS = PerRow(tuple(Documents(row) for row in ROWS))


def seen(causal: bool = True) -> torch.Tensor:
    """The same written out: [B, 1, S, S]."""
    rows = [torch.tensor([document_of(row)(p) for p in range(LENGTH)]) for row in ROWS]
    mask = torch.stack([ids[:, None] == ids[None] for ids in rows])[:, None]
    return mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if causal else mask


def test_each_row_sends_what_its_own_mask_needs():
    """Row by row what the plan says, and nothing across documents: less than any mask that all rows share."""
    problem = Problem(length=LENGTH, batch=3, mask=seen(), causal=False)
    layout = contiguous(LENGTH, 3)

    def on(rank: int) -> int:
        q, k, v = (layout.shard(x, 2, rank) for x in problem.inputs)
        with CommunicationTrace() as trace:
            context_attention(q, k, v, cp_mesh(3), mask=DOCUMENTS & Causal(), layout=layout)
        return sum(size for name, size in trace.events if name == "send")

    row_bytes = 2 * 4 * 8 * 8  # key and value, 4 heads of 8, float64
    plans = [make_plan(layout, layout, Documents(row) & Causal(), rank) for row in ROWS for rank in range(3)]
    assert sum(run_ranks(on, 3)) == row_bytes * sum(plan.received_rows for plan in plans)
    assert all(plan.received_rows == 0 for plan in plans[6:]), "three documents on three ranks: nothing crosses"


def test_documents_of_each_row_for_a_balancer():
    """The error names by_work, with the mask that is the attention's too."""
    for documents in (ROWS, torch.tensor(ROWS[0])):
        with pytest.raises(TypeError, match=r"all rows of a batch are cut at the same positions") as found:
            per_document_head_tail(LENGTH, 2, documents=documents)  # pyright: ignore[reportArgumentType]
    (line,) = re.findall(r"take (by_work\(.*\)), or", str(found.value))
    layout = eval(line, globals() | {"length": LENGTH, "ranks": 2, "rows": ROWS})
    mask = eval(line.split("mask=")[1].removesuffix(")"), globals() | {"rows": ROWS})
    problem = Problem(length=LENGTH, batch=3, mask=seen(), causal=False)

    def on(rank: int) -> float:
        def attend(q, k, v):
            return context_attention(q, k, v, cp_mesh(2), mask=mask, layout=layout)

        return max(run_attention(attend, problem, rank, 2, layout=layout))

    assert max(run_ranks(on, 2)) < EXACT


def test_ids_and_positions_of_a_batch():
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in ROWS])
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in ROWS])
    assert Documents.from_ids(ids) == DOCUMENTS == Documents.from_positions(positions)


def test_balance_counts_all_rows():
    mask = DOCUMENTS & Causal()
    work = sum(mask.row(index).work(torch.arange(LENGTH), LENGTH) for index in range(3))
    assert torch.equal(mask.work(torch.arange(LENGTH), LENGTH), work)
    assert imbalance(by_work(LENGTH, 3, mask=mask, block=1), mask) < 1.05 < imbalance(contiguous(LENGTH, 3), mask)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="masks for 3 and for 2 rows were combined"):
        DOCUMENTS & PerRow((Causal(), Causal()))
    with pytest.raises(TypeError, match="one mask for each row"):
        PerRow((DOCUMENTS,))
    with pytest.raises(ValueError, match="positions: give all one"):
        PerRow((Documents((3,)), Documents((4,))))
    problem = Problem(length=LENGTH, batch=2, causal=False)

    def act(rank: int, mesh) -> None:
        run_attention(lambda *qkv: context_attention(*qkv, mesh, mask=DOCUMENTS), problem, rank, 2)

    refused(act, "masks for 3 rows, the batch has 2")
