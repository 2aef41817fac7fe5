"""The host's work for one attention on a GPU does not grow: see tests/benchmarks/account.py."""

from __future__ import annotations

import pytest

from tests.benchmarks.account import STRATEGIES, account

# The calls of a forward and backward, ops at top level, received messages and batches. Calls depend a little on the
# versions of torch and Python.
KNOWN = {
    ("ring", 8): (1473, 189, 40, 17),
    ("ring", 2): (641, 62, 4, 2),
    ("all-gather", 8): (1238, 181, 40, 9),
    ("Ulysses", 8): (852, 95, 42, 0),  # in one all-to-all
}
ROOM = 1.05


@pytest.mark.parametrize(("strategy", "ranks"), KNOWN)
def test_the_calls_of_the_host(strategy: str, ranks: int):
    found = account(STRATEGIES[strategy], ranks, 4096)
    calls, ops, received, batches = KNOWN[strategy, ranks]
    assert calls / ROOM <= found.calls.total() <= calls * ROOM, found.calls.most_common()
    assert ops / ROOM <= found.ops.top.total() <= ops * ROOM, found.ops.top
    assert (found.received, found.batches) == (received, batches)
