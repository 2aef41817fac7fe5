"""The named ranges of a forward and a backward in torch.profiler's trace: what a rank starts, waits for and computes.

They also show the order that hides transfers: what the next step needs is started before this step computes. And when
the ranks agree: after this one has packed its first message, and before it is sent.
"""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cp_styles import Ring, Ulysses, context_attention, contiguous
from cp_styles._lib.compat import named_range
from cp_styles.strategies import Strategy
from cp_styles.testing import run_ranks
from tests.ranks.attention_case import Problem, cp_mesh, run_attention

RING = """
attention forward: context_attention
step 1 start keys of 2
agreement: context_attention
step 0 attend to keys of 0
step 1 wait for keys of 2
step 2 start keys of 1
step 1 attend to keys of 2
step 2 wait for keys of 1
step 2 attend to keys of 1
attention backward: context_attention
step 1 start keys of 1
agreement: context_attention
step 0 gradients with keys of 2
step 0 start gradients to 2
step 1 wait for keys of 1
step 1 gradients with keys of 1
step 1 wait for gradients of 1
step 1 start gradients to 1
step 2 gradients with keys of 0
step 2 wait for gradients of 2
"""
ULYSSES = """
attention forward: context_attention
start heads
agreement: context_attention
wait for heads
attend
start output
wait for output
attention backward: context_attention
start gradient of output
agreement: context_attention
wait for gradient of output
gradients
start gradients
wait for gradients
"""


@pytest.mark.parametrize(
    ("strategy", "ranks", "kv_heads", "expected"),
    [(Ring(), 3, 2, RING), (Ulysses(), 2, 4, ULYSSES)],
    ids=["Ring", "Ulysses"],
)
def test_what_a_trace_shows(strategy: Strategy, ranks: int, kv_heads: int, expected: str):
    problem, layout = Problem(length=24, kv_heads=kv_heads, causal=False), contiguous(24, ranks)
    named = set(expected.strip().splitlines())

    def on(rank: int) -> list[str]:
        attend = partial(context_attention, mesh=cp_mesh(ranks), strategy=strategy, layout=layout)
        run_attention(attend, problem, rank, ranks, layout=layout)  # the first call also makes parts of the group
        # One profiler at a time.
        with profile(activities=[ProfilerActivity.CPU]) if rank == 0 else contextlib.nullcontext() as trace:
            run_attention(attend, problem, rank, ranks, layout=layout)
        if trace is None:
            return []
        events = sorted(trace.events(), key=lambda event: event.time_range.start)
        return [event.name for event in events if event.name in named]

    found = run_ranks(on, ranks)[0]
    inner = [name for name in found if not name.startswith("step") or strategy == Ring()]
    assert inner == expected.strip().splitlines()


def test_the_page_shows_this_order():
    page = (Path(__file__).parents[3] / "tutorials/troubleshooting.md").read_text()
    (shown,) = re.findall(r"<!-- ranges -->\n```text\n(.*?)```", page, re.DOTALL)
    assert RING.strip().startswith(shown)


def test_without_a_profiler_there_is_no_range():
    assert named_range("a") is named_range("b")
    with profile(activities=[ProfilerActivity.CPU]), named_range("a", 1) as inside:
        assert isinstance(inside, torch.profiler.record_function)
