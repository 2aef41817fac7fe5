"""Ulysses: which heads each rank gets, the bytes that are sent, and attention with them compared with one device."""

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles import Checks
from cp_styles._lib.compat import run_kernel
from cp_styles.collectives import Padded, Pending, gather, heads_to_seq, nested_layout, seq_to_heads
from cp_styles.collectives.heads import head_ranges
from cp_styles.functions.attention import context_attention
from cp_styles.kernels import ReferenceKernel
from cp_styles.layouts import SequenceLayout, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.strategies import Ulysses
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import randn
from tests.ranks.collectives.collectives_reference import adjoint_gap, world

DIMS = {"BHSD": (2, 1), "BSHD": (1, 2), "SBHD": (0, 2), "HSBD": (1, 0)}
"""(seq_dim, head_dim) of the orders people keep their heads in."""


def order(x: torch.Tensor, name: str) -> torch.Tensor:
    """[B, H, S, D] in another order of dims."""
    return torch.einsum(f"bhsd->{name.lower()}", x)


packed = partial(per_document_head_tail, cut_all=True)
LAYOUTS = {
    "contiguous": contiguous,
    "head-tail": head_tail,
    "striped": striped,
    "hybrid": lambda length, ranks: nested_layout(head_tail(length, 1), ranks),
    "packed": lambda length, ranks: per_document_head_tail(
        length, ranks, documents=(length - 3, 0, 1, 2), cut_all=True
    ),
    "one rank has all": lambda length, ranks: SequenceLayout.from_chunks([[]] * (ranks - 1) + [[(0, length)]]),
}


@st.composite
def problems(draw: st.DrawFn):
    """(ranks, query heads, KV heads, layout, dims): heads fewer than ranks, groups that straddle ranks, plain ones."""
    ranks, kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](draw(st.integers(3, 12)), ranks)
    return ranks, heads, kv_heads, layout, draw(st.sampled_from(sorted(DIMS)))


def qkv(
    heads: int, kv_heads: int, length: int, v_dim: int = 3, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    return [
        randn(seed, 2, count, length, dim, dtype=dtype)
        for seed, (count, dim) in enumerate([(heads, 4), (kv_heads, 4), (kv_heads, v_dim)])
    ]


@settings(max_examples=15, deadline=None)
@given(problem=problems(), v_dim=st.sampled_from([3, 4]))
def test_one_message_brings_each_rank_the_heads_it_needs(problem, v_dim):
    ranks, heads, kv_heads, layout, name = problem
    whole = qkv(heads, kv_heads, layout.length, v_dim, torch.float32)
    seq, head = DIMS[name]
    group = heads // kv_heads
    ranges = [head_ranges(count, heads, ranks) for count in (heads, kv_heads, kv_heads)]

    def main(rank):
        mine = [order(layout.shard(x, 2, rank), name) for x in whole]
        with CommunicationTrace() as trace:
            arrived = seq_to_heads(
                mine, world(), seq_dim=seq, heads_dim=head, layout=layout, checks=Checks(agreement=False)
            )
        assert trace.calls == ({"all_to_all": 1} if ranks > 1 else {})
        # One message: of each head of each tensor this rank's rows, once for each other rank that attends to it.
        row = (
            2
            * 4
            * sum(
                (stop - start) * x.shape[3]
                for x, wanted in zip(whole, ranges, strict=True)
                for to, (start, stop) in enumerate(wanted)
                if to != rank
            )
        )
        assert trace.sent_bytes == layout.lengths[rank] * row
        own = head_ranges(heads, heads, ranks)[rank]
        found = [torch.einsum(f"{name.lower()}->bhsd", x) for x in arrived]
        assert torch.equal(found[0], whole[0][:, own[0] : own[1]])
        for x, original in zip(found[1:], whole[1:], strict=True):
            for index in range(own[1] - own[0]):
                # What enable_gqa pairs with this query head is what one device pairs with it.
                paired = x[:, index // (found[0].shape[1] // x.shape[1])]
                assert torch.equal(paired, original[:, (own[0] + index) // group])
        out = heads_to_seq(arrived[0], world(), seq_dim=seq, heads_dim=head, heads=heads, layout=layout)
        assert torch.equal(out, mine[0])
        assert out.is_contiguous() or ranks == 1

    run_ranks(main, ranks)


@settings(max_examples=8, deadline=None)
@given(problem=problems(), async_op=st.booleans())
def test_backward_of_qkv_is_the_adjoint(problem, async_op):
    ranks, heads, kv_heads, layout, name = problem
    seq, head = DIMS[name]
    whole = qkv(heads, kv_heads, layout.length)
    inputs = [[order(layout.shard(x, 2, rank), name) for x in whole] for rank in range(ranks)]

    def fn(*tensors):
        got = seq_to_heads(tensors, world(), seq_dim=seq, heads_dim=head, layout=layout, async_op=async_op)
        return got.wait() if isinstance(got, Pending) else got

    assert adjoint_gap(fn, inputs) < 1e-13


@settings(max_examples=8, deadline=None)
@given(problem=problems(), async_op=st.booleans())
def test_backward_of_the_way_back_is_the_adjoint(problem, async_op):
    ranks, heads, _, layout, name = problem
    seq, head = DIMS[name]
    whole = qkv(heads, 1, layout.length)[0]
    own = [whole[:, start:stop] for start, stop in head_ranges(heads, heads, ranks)]

    def fn(x):
        got = heads_to_seq(x, world(), seq_dim=seq, heads_dim=head, heads=heads, layout=layout, async_op=async_op)
        return got.wait() if isinstance(got, Pending) else got

    assert adjoint_gap(fn, [[order(x, name)] for x in own]) < 1e-13


@settings(max_examples=8, deadline=None)
@given(ranks=st.integers(1, 5), length=st.integers(1, 9), multiple=st.sampled_from([1, 3]), seed=st.integers(0, 9))
def test_padding_is_removed_forward_and_restored_backward(ranks, length, multiple, seed):
    whole = randn(seed, 1, 5, length, 2)
    layout = Padded(length, multiple)
    shard = layout.shard_size(ranks)
    assert shard % multiple == 0
    padded = pad(whole, (0, 0, 0, shard * ranks - length), value=float("nan"))

    def main(rank):
        x = padded.split(shard, 2)[rank].clone().requires_grad_()
        with CommunicationTrace() as trace:
            y = seq_to_heads(x, world(), layout=layout, checks=Checks(agreement=False))
            y.sum().backward()
        own = head_ranges(5, 5, ranks)[rank]
        valid = min(max(length - rank * shard, 0), shard)
        heads = own[1] - own[0]
        # Out go the valid rows of the heads of others, home come the gradients of the rows of others.
        assert trace.sent_bytes == (valid * (5 - heads) + (length - valid) * heads) * 2 * 8
        assert torch.equal(y, whole[:, own[0] : own[1]])
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x).index_fill(2, torch.arange(valid, shard), 0))
        home = heads_to_seq(y, world(), heads=5, layout=layout)
        assert torch.equal(home, pad(whole, (0, 0, 0, shard * ranks - length)).split(shard, 2)[rank])

    run_ranks(main, ranks)


def test_gradients_of_shared_kv_heads_are_summed_in_float32():
    """256 + 1 + 1 + 1 is 256 when added one by one in bfloat16, and 260 (259, rounded) when summed in float32."""
    values = (256.0, 1.0, 1.0, 1.0)

    def main(rank):
        q, k = torch.zeros(1, 4, 4, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 4, 1, dtype=torch.bfloat16)
        mine = [x.tensor_split(4, 2)[rank].clone().requires_grad_() for x in (q, k)]
        _, k = seq_to_heads(mine, world())
        (grad,) = torch.autograd.grad(k, mine[1], torch.full_like(k, values[rank]))
        return grad.item()

    assert run_ranks(main, 4) == [260.0] * 4


class Ops(TorchDispatchMode):
    """How often each op was called, also inside of this package's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        if func.namespace == "cp_styles":
            with self:
                return run_kernel(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block", [1, 3])
def test_stripes_are_not_moved_one_by_one(block: int):
    """The ops of a forward and a backward do not grow with the number of stripes; they may not be whole blocks."""

    def calls(length: int) -> list[Counter[str]]:
        layout = striped(length, 3, block=block)
        whole = qkv(6, 2, length, 4)

        def step(mine: list[torch.Tensor]) -> None:
            heads = seq_to_heads(mine, world(), layout=layout)
            part = heads_to_seq(heads[0], world(), layout=layout)
            attended = context_attention(*mine, world(), layout=layout, strategy=Ulysses(), kernel=ReferenceKernel())
            gathered = gather(attended, 2, world(), layout=layout, reduce_gradients=True)
            results = [*heads, part, gathered]
            torch.autograd.backward(results, [torch.ones_like(x) for x in results])

        def main(rank):
            mine = [layout.shard(x, 2, rank).requires_grad_() for x in whole]
            step(mine)  # makes the plan
            with Ops() as ops:
                step(mine)
            return ops.counts

        return run_ranks(main, 3)

    assert calls(50) == calls(130)


def test_no_group_is_the_identity():
    whole = qkv(4, 2, 5)
    assert all(x is y for x, y in zip(seq_to_heads(whole, None), whole, strict=True))
    assert seq_to_heads(whole[0], None) is whole[0]
    assert heads_to_seq(whole[0], None) is whole[0]
