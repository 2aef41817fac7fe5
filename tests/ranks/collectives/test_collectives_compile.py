"""torch.compile, fullgraph: the same bits as eager, forward and backward, and the same message."""

from functools import partial

import pytest
import torch

from cp_styles.collectives import Padded, all_to_all, gather, heads_to_seq, reduce_scatter, seq_to_heads, split
from cp_styles.layouts import SequenceLayout, head_tail
from tests.oracle import randn
from tests.ranks.collectives.collectives_reference import world
from tests.ranks.compiling import cannot_compile_on_threads, run_ranks

pytestmark = cannot_compile_on_threads

SIZES = (3, 4)
LAYOUT = head_tail(7, 2)


def ulysses(q, k):
    q, k = seq_to_heads((q, k), world(), layout=LAYOUT)
    return heads_to_seq(q * k, world(), heads=3, layout=LAYOUT)


def shard(rank: int, heads: int) -> torch.Tensor:
    return LAYOUT.shard(randn(heads, 1, heads, 7, 4), 2, rank)


CASES = {
    "all_to_all, rows outside": (
        lambda x: all_to_all(x.sin(), 2, 0, world(), gather_sizes=SIZES),
        lambda rank: [randn(rank, SIZES[rank], 2, 5)],
    ),
    "all_to_all, columns outside": (
        lambda x: all_to_all(x.sin(), 0, 2, world(), gather_sizes=SIZES),
        lambda rank: [randn(rank, 5, 2, SIZES[rank])],
    ),
    "all_to_all, asynchronous": (
        lambda x: all_to_all(x.sin(), 0, 1, world(), async_op=True).wait(),
        lambda rank: [randn(rank, 4, 3)],
    ),
    "ulysses, grouped queries, head-tail": (ulysses, lambda rank: [shard(rank, 3), shard(rank, 1)]),
    "split": (lambda x: split(x.sin(), 1, world(), layout=LAYOUT), lambda rank: [randn(0, 2, 7)]),
    "split with filling": (lambda x: split(x.sin(), 1, world(), layout=Padded(7)), lambda rank: [randn(0, 2, 7)]),
    "gather": (lambda x: gather(x.sin(), 1, world(), reduce_gradients=False), lambda rank: [randn(rank, 2, 3)]),
    "gather and reduce": (
        lambda x: gather(x.sin(), 0, world(), layout=SIZES, reduce_gradients=True),
        lambda rank: [randn(rank, SIZES[rank], 2)],
    ),
    "reduce_scatter": (lambda x: reduce_scatter(x.sin(), 0, world()), lambda rank: [randn(rank, 5, 2)]),
}


def compare_with_eager(fn, inputs_of, backend: str) -> None:
    def main(rank):
        results = []
        for call in (fn, torch.compile(fn, backend=backend, fullgraph=True)):
            xs = [x.clone().requires_grad_() for x in inputs_of(rank)]
            y = call(*xs)
            results.append((y, *torch.autograd.grad(y, xs, randn(50 + rank, *y.shape))))
        for eager, compiled in zip(*results, strict=True):
            # The compiler may fuse and reorder the pointwise work around the exchange: rounding, no more.
            torch.testing.assert_close(compiled, eager, rtol=1e-13, atol=1e-13)

    torch.compiler.reset()  # this rank's number is in the graph: ranks that are threads share what they compile
    run_ranks(main, 2)


# Heads are exchanged by an all_to_all of rows and columns. The backward of "gather and reduce" is a reduce_scatter, and
# of a split a gather.
LIKE_OTHERS = (
    "all_to_all, rows outside",
    "all_to_all, columns outside",
    "split",
    "split with filling",
    "gather",
    "reduce_scatter",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in LIKE_OTHERS)) for name in CASES]
)
def test_aot_eager(name):
    compare_with_eager(*CASES[name], backend="aot_eager")


@pytest.mark.nightly  # by default by aot_eager; and attention by inductor: tests/process/test_compile_cache.py
def test_several_exchanges_by_inductor():
    """One graph, and unequal parts."""

    def block(x):
        mine = split(x, 2, world(), layout=LAYOUT)
        q, k = seq_to_heads((mine, mine[:, :1]), world(), layout=LAYOUT)
        out = heads_to_seq(q * k, world(), heads=3, layout=LAYOUT)
        return gather(out, 2, world(), layout=LAYOUT, reduce_gradients=True)

    compare_with_eager(block, lambda rank: [randn(0, 1, 3, 7, 4)], backend="inductor")


@pytest.mark.parametrize("chunks", [[[(0, 2), (6, 8)], [(2, 6)]], [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]])
def test_a_layout_that_no_code_has_read(chunks):
    """A table that it caches at its first use would be computed in the graph."""
    whole = randn(0, sum(stop - start for each in chunks for start, stop in each), 3)

    def main(rank):
        fresh, equal = SequenceLayout.from_chunks(chunks), SequenceLayout.from_chunks(chunks)
        part, together = equal.shard(whole, 0, rank), partial(all_rows, layout=fresh)
        torch.testing.assert_close(all_rows(part, equal), whole)
        compiled = torch.compile(together, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(part), whole)

    torch.compiler.reset()
    run_ranks(main, 2)


def all_rows(x, layout):
    return gather(x, 0, world(), layout=layout, reduce_gradients=False)
