"""How often ranks agree on attention, by the object that the user chooses, at every door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    Causal,
    Checks,
    Documents,
    Ring,
    SequenceLayout,
    SequenceScope,
    SlidingWindow,
    Ulysses,
    context_attention,
    contiguous,
    head_tail,
    save_attention,
    striped,
)
from cp_styles.comm.agreement import WIDTH, Meeting, StatusRow, compare, start_status
from cp_styles.strategies import Strategy
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.doors import door
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, on_every_rank, run_attention

RANKS, LENGTH = 2, 21


DOORS = ["style", "module", "function", "flex", "varlen", "block"]


def attended(name: str, mesh: Any, layout: Any, checks: Checks) -> Any:
    return door(name, mesh, length=LENGTH, layout=layout, checks=checks)


def meetings(trace: CommunicationTrace) -> int:
    return trace.events.count(("all_gather", WIDTH * 8 * (RANKS - 1)))


@pytest.mark.parametrize("name", DOORS)
def test_no_meeting_at_all(name: str):
    layout = head_tail(LENGTH, RANKS)

    def on(rank: int) -> tuple[int, float]:
        attend = attended(name, cp_mesh(RANKS), layout, Checks(agreement=False))
        with CommunicationTrace() as trace:
            error = max(run_attention(attend, Problem(length=LENGTH, kv_heads=2, batch=1), rank, RANKS, layout=layout))
        return meetings(trace), error

    for count, error in run_ranks(on, RANKS):
        assert error < EXACT
        assert count == 0


@pytest.mark.parametrize("name", DOORS)
@on_every_rank(RANKS)
def test_no_agreement_needs_a_layout(mesh, rank: int, name: str):
    x = torch.randn(1, 4, head_tail(LENGTH, RANKS).lengths[rank], 8)
    with pytest.raises(
        ValueError, match=r": Checks\(agreement=False\) needs the lengths of all ranks: .* SequenceLayout"
    ):
        attended(name, mesh, head_tail, Checks(agreement=False))(x, x, x)


def of_a_user(length: int, ranks: int) -> SequenceLayout:
    return head_tail(length, ranks)


@pytest.mark.parametrize("name", ["style", "function", "block"])
@pytest.mark.parametrize(
    ("layout", "expected"),
    [(head_tail(LENGTH, RANKS), 1), (head_tail, 1), (partial(striped, block=3), 1), (of_a_user, 2)],
)
def test_meetings_of_a_layout(name: str, layout: Any, expected: int):
    """Lengths that do not divide, from the first call on. The results of a user's own function are compared."""

    def on(rank: int) -> list[int]:
        attend, counts = attended(name, cp_mesh(RANKS), layout, Checks()), []
        problem = Problem(length=LENGTH, kv_heads=2, batch=1)
        for _ in range(2):
            with CommunicationTrace() as trace:
                assert max(run_attention(attend, problem, rank, RANKS, layout=layout)) < EXACT
            counts.append(meetings(trace) - 1)  # before the backward
        return counts

    assert run_ranks(on, RANKS) == [[expected] * 2] * RANKS


@pytest.mark.parametrize("name", ["style", "module"])
def test_under_a_scope(name: str):
    problem = Problem(length=LENGTH, kv_heads=2)

    def on(rank: int) -> int:
        attend = attended(name, cp_mesh(RANKS), None, Checks(agreement=False))
        with SequenceScope(head_tail(LENGTH, RANKS)), CommunicationTrace() as trace:
            assert max(run_attention(attend, problem, rank, RANKS, layout=head_tail)) < EXACT
        return meetings(trace)

    assert run_ranks(on, RANKS) == [0] * RANKS


@pytest.mark.parametrize("strategy", [Ring(), Ring(keep=0), Ulysses()], ids=str)
@on_every_rank(RANKS)
def test_no_message_is_left_where_the_ranks_do_not_agree(mesh, rank: int, strategy: Strategy):
    """A rank reads what the others say while it prepares, and before it sends: the next attention is exact."""
    problem, layout = Problem(length=LENGTH, kv_heads=4), head_tail(LENGTH, RANKS)
    attend = partial(context_attention, mesh=mesh, mask=Causal(), layout=layout, strategy=strategy)
    leaves, _ = problem.shard(layout, rank, RANKS)
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError, match="must share one floating-point dtype" if rank else "have failed"):
            attend(leaves[0], leaves[1].float() if rank else leaves[1], leaves[2])
        with pytest.raises(ValueError, match="disagree on mask"):
            attend(*leaves, mask=SlidingWindow(3) if rank else Causal())
        out = attend(*leaves)
        with pytest.raises(ValueError, match="are not at the same place"):
            attend(*leaves) if rank else out.sum().backward()
        errors += run_attention(attend, problem, rank, RANKS, layout=layout)
    return max(errors)


@on_every_rank(RANKS)
def test_ranks_that_send_each_other_nothing_agree_too(mesh, rank: int):
    """Documents end where the ranks do: the rows are read when the attention ends, forward and backward."""
    layout = contiguous(8, RANKS)
    attend = partial(context_attention, mesh=mesh, mask=Documents((4, 4)), layout=layout)
    x = torch.randn(1, 4, 4, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="must share one floating-point dtype" if rank else "have failed"):
        attend(x, x.float() if rank else x, x)
    out = attend(x, x, x)
    with pytest.raises(ValueError, match="are not at the same place"):
        attend(x, x, x) if rank else out.sum().backward()


@dataclass(frozen=True)
class Failing(Ring):
    """Fails before its first message."""

    def forward(self, *arguments, **options):
        raise OSError("mine")


@on_every_rank(RANKS)
def test_an_error_that_a_disagreement_may_have_caused(mesh, rank: int):
    """A rank that fails before its first message reads what the others say; its own error is the context."""
    layout = contiguous(8, RANKS)
    attend = partial(context_attention, mesh=mesh, layout=layout)
    x = torch.randn(1, 4, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="disagree on strategy") as caught:
        attend(x, x, x, strategy=Failing() if rank else Ring())
    assert isinstance(caught.value.__context__, OSError if rank else NoneType)
    attend(x, x, x)
    with pytest.raises(OSError, match="mine"):
        attend(x, x, x, strategy=Failing())


@pytest.mark.parametrize("how", ["plain", "selective"])
def test_checkpoints(how: str):
    problem = Problem(length=LENGTH, kv_heads=2)

    def on(rank: int) -> int:
        layout = head_tail(LENGTH, RANKS)
        attend = attended("module", cp_mesh(RANKS), layout, Checks(agreement=False))
        options = {"context_fn": save_attention()} if how == "selective" else {}

        def again(*tensors: torch.Tensor, **more: Any) -> torch.Tensor:
            return checkpoint(partial(attend, **more), *tensors, use_reentrant=False, **options)

        with CommunicationTrace() as trace:
            assert max(run_attention(again, problem, rank, RANKS, layout=layout)) < EXACT
        return meetings(trace)

    assert run_ranks(on, RANKS) == [0] * RANKS


def same_texts(rank: int) -> dict[str, Any]:
    return {"mask": "windows", "scale": None}


def more_columns(rank: int) -> dict[str, Any]:
    return {f"column {column}": "x" * 100 + str(rank) for column in range(50)}


def without_a_text(rank: int) -> dict[str, Any]:
    if rank == 1:
        raise OSError("mine")
    return {"mask": "windows", "call": "\N{GREEK SMALL LETTER ALPHA}" * 90}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (same_texts, r"disagree on one of mask, scale: ranks \[1\] differ from rank 0 \(their texts are equal\)"),
        (more_columns, r"disagree on the facts: .*rank 0: .*crc [0-9a-f]+\), rank 1: .*crc"),
        (without_a_text, r"disagree on mask: .*\(rank 0: windows, rank 1: None\)"),
    ],
)
@on_every_rank(RANKS)
def test_texts_that_do_not_say_what_differs(mesh, rank: int, facts: Callable[[int], dict[str, Any]], text: str):
    """Every rank raises, and the next meeting is not mixed up."""
    where = "attention", "cp", mesh.get_group()
    rows = start_status(lambda: StatusRow(facts=rank), Meeting.BATCH, *where)()
    with pytest.raises(ValueError, match=text):
        compare(rows, where, partial(facts, rank))
    start_status(StatusRow, Meeting.BATCH, *where)()


@on_every_rank(RANKS)
def test_what_a_rank_has_refused_is_said_on_all(mesh, rank: int):
    """Also a text without an encoding; not where another rank is at another meeting, and may not come to read it."""

    def refuse() -> StatusRow:
        if rank == 1:
            raise KeyError("a mask of \ud800 rows")
        return StatusRow()

    where = "attention", "cp", mesh.get_group()
    with pytest.raises(KeyError if rank else ValueError, match=r"a mask of|rank 1: KeyError: 'a mask of "):
        start_status(refuse, Meeting.BATCH, *where)()
    with CommunicationTrace() as trace, pytest.raises(KeyError if rank else ValueError):
        start_status(refuse, Meeting.BATCH if rank else Meeting.DECODE, *where)()
    assert trace.events == [("all_gather", 8 * WIDTH)]
