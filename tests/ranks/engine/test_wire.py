"""Only needed rows are sent: the bytes of the trace, the rows of the plan and a brute-force lower bound agree.

The lower bound asks the oracle's definition pair by pair: a row of another rank's keys has to come when some local
query attends to it, and its gradient has to go home; nothing else has to move in a ring or an all-gather.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from cp_styles.comm.agreement import WIDTH
from cp_styles.functions.attention import context_attention
from cp_styles.layouts import SequenceLayout, contiguous
from cp_styles.masks import Dense, SlidingWindow
from cp_styles.plan import make_plan
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.covering import sampled
from tests.oracle import allowed, mask_cases
from tests.ranks.attention_case import Problem, cp_mesh, run_attention
from tests.tables import LAYOUTS, cut_by

LENGTH, BATCH, HEADS, KV_HEADS, DIM = 29, 2, 4, 2, 8


def rows_needed(layout: SequenceLayout, seen: torch.Tensor) -> list[int]:
    """By rank, how many rows of others it cannot do without."""
    owners = torch.empty(layout.length, dtype=torch.int64)
    for rank in range(layout.ranks):
        owners[layout.positions(rank)] = rank
    return [int((seen[owners == rank].any(0) & (owners != rank)).sum()) for rank in range(layout.ranks)]


def rows_planned(layout: SequenceLayout, mask) -> list[int]:
    return [make_plan(layout, layout, mask, rank).received_rows for rank in range(layout.ranks)]


def traced(calls, strategy: Strategy, ranks: int, *, forward_only: bool = False) -> list[list[tuple[str, int]]]:
    """For each of ``calls``, triples of problem, layout and mask, what all ranks sent for it: (name, bytes).

    What ranks tell each other, an all-gather of WIDTH integers, is held to be one before the forward and one before the
    backward, and taken out.
    """

    def on(rank: int):
        mesh, traces = cp_mesh(ranks), []
        for problem, layout, mask in calls:
            attend = partial(context_attention, mesh=mesh, strategy=strategy, layout=layout, mask=mask)
            with CommunicationTrace() as trace:
                if forward_only:
                    with torch.no_grad():
                        attend(*problem.shard(layout, rank, ranks)[0])
                else:
                    # Bytes of something wrong would prove nothing. float32's rounding; float64 is the parity grid's.
                    assert max(run_attention(attend, problem, rank, ranks, layout=layout)) < 1e-5
            agreement = ("all_gather", WIDTH * 8 * (ranks - 1))
            assert trace.events.count(agreement) == (1 if forward_only else 2)
            traces.append([event for event in trace.events if event != agreement])
        return traces

    results = run_ranks(on, ranks)
    return [[event for events in by_rank for event in events] for by_rank in zip(*results, strict=True)]


def sent(events: list[tuple[str, int]]) -> int:
    return sum(size for _, size in events)


def row_bytes(problem: Problem) -> int:
    """A row of key and one of value, all batches and key/value heads (and not query heads)."""
    return 2 * BATCH * KV_HEADS * DIM * problem.inputs[0].element_size()


@sampled(1, ranks=[2, 3, 4, 8], layout=list(LAYOUTS))
def test_the_plan_is_the_lower_bound(layout: str, ranks: int):
    for case in mask_cases(LENGTH).values():
        own = cut_by(layout, case.mask)(LENGTH, ranks)
        assert rows_planned(own, case.mask) == rows_needed(own, allowed(case.sees, LENGTH, LENGTH))


BY_DAY = [("contiguous", Ring(keep=2)), ("striped", Ring(keep=0)), ("uneven", AllGather(keep=2))]
AT_NIGHT = product(LAYOUTS, [Ring(keep=2), Ring(keep=0), AllGather(keep=2), AllGather(keep=0)])


# By day the layouts whose messages are one, many and empty: the rows of every layout's plan are held above.
@pytest.mark.parametrize(
    ("layout", "strategy"), [*BY_DAY, *(pytest.param(*row, marks=pytest.mark.nightly) for row in AT_NIGHT)], ids=str
)
def test_the_wire_is_the_lower_bound(layout: str, strategy):
    """Forward the rows, backward their gradients, and the rows once more where they are not kept. GQA unexpanded."""
    ranks, calls, needed = 3, [], []
    for case in mask_cases(LENGTH).values():
        seen = allowed(case.sees, LENGTH, LENGTH)
        own = cut_by(layout, case.mask)(LENGTH, ranks)
        calls.append((Problem(length=LENGTH, kv_heads=KV_HEADS, mask=seen, dtype=torch.float32), own, case.mask))
        needed.append(sum(rows_needed(own, seen)))
    times = 2 if strategy.keep else 3
    for (problem, _, mask), events, rows in zip(calls, traced(calls, strategy, ranks), needed, strict=True):
        assert {name for name, _ in events} <= {"send"}
        assert sent(events) == times * rows * row_bytes(problem), mask


def test_a_dense_mask_sends_everything():
    """Documented, and so pinned: a dense mask is not searched for keys that no query attends to."""
    layout = contiguous(LENGTH, 3)
    mask = Dense(torch.eye(LENGTH, dtype=torch.bool))
    assert rows_planned(layout, mask) == [LENGTH - size for size in layout.lengths]
    # A band beside it is looked into.
    assert sum(rows_planned(layout, mask & SlidingWindow(1, 0))) == 2


def ulysses_one_way(problem: Problem, ranks: int, size: int) -> float:
    """The table's (U-1)/U (2 Q + K'), K' = K max(1, U / Hkv), of all ranks; Q and K are one rank's, K with V."""
    query, key, value = problem.inputs
    kept = key.nbytes + value.nbytes
    return (size - 1) / size * (2 * query.nbytes + kept * max(1, size / key.shape[1]))


def test_hybrid_sends_no_row_nobody_attends_to():
    """The inner level's plan is made of what U ranks hold together: a window stays a halo, of half of the heads."""
    window, ranks = SlidingWindow(3, 0), 4
    seen = allowed(mask_cases(32)["window"].sees, 32, 32)
    problem = Problem(length=32, heads=4, kv_heads=2, mask=seen, dtype=torch.float32)
    (events,) = traced([(problem, contiguous, window)], Ulysses(size=2), ranks)
    # One boundary between the two pairs of ranks: 3 rows of all heads (half of them a rank), there and back.
    assert sent(events) == 2 * ulysses_one_way(problem, ranks, 2) + 2 * 3 * row_bytes(problem)
