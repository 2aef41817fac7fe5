"""split, gather, reduce_scatter: layouts, bytes, and what each gradient means."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from cp_styles import Checks, sum_gradients
from cp_styles.collectives import (
    GradScale,
    Padded,
    gather,
    nested_layout,
    reduce_scatter,
    split,
)
from cp_styles.collectives.rows import Rows, make_rows
from cp_styles.layouts import SequenceLayout, head_tail, per_document_head_tail, striped
from cp_styles.layouts.ranges import even_sizes
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.collectives.collectives_reference import adjoint_gap, world

LENGTH = 11

KINDS = {
    "remainder first": lambda ranks: None,
    "sizes": lambda ranks: (0,) * (ranks - 1) + (LENGTH,),
    "head-tail": lambda ranks: head_tail(LENGTH, ranks),
    "hybrid": lambda ranks: nested_layout(head_tail(LENGTH, 1 if ranks % 2 else 2), ranks if ranks % 2 else ranks // 2),
    "packed": lambda ranks: per_document_head_tail(LENGTH, ranks, documents=(4, 1, 0, 6), cut_all=True),
    "striped": lambda ranks: striped(LENGTH, ranks, block=2),
    "padded": lambda ranks: Padded(LENGTH),
}


@st.composite
def problems(draw: st.DrawFn):
    """(ranks, layout, dim, shape): any dim of a tensor of one to four."""
    ranks = draw(st.integers(1, 5))
    layout = KINDS[draw(st.sampled_from(sorted(KINDS)))](ranks)
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = LENGTH
    return ranks, layout, dim, tuple(shape)


def expected_part(whole: torch.Tensor, dim: int, layout, ranks: int, rank: int) -> torch.Tensor:
    """By the layout's own shard(), by torch, and by padding: none of them is the code under test."""
    if isinstance(layout, SequenceLayout):
        return layout.shard(whole, dim, rank)
    if isinstance(layout, Padded):
        widths = [0, 0] * (whole.ndim - dim)
        widths[-1] = -whole.shape[dim] % ranks
        return pad(whole, widths).chunk(ranks, dim)[rank]
    if layout is None:
        return whole.tensor_split(ranks, dim)[rank]
    return whole.split(list(layout), dim)[rank]


def rows(layout, ranks: int) -> Rows:
    from cp_styles.collectives.peers import Peers

    return make_rows(layout, Peers("", 0, ranks)) or make_rows(even_sizes(LENGTH, ranks), Peers("", 0, ranks))


@settings(max_examples=15, deadline=None)
@given(problem=problems(), dtype=st.sampled_from([torch.float64, torch.int32, torch.complex64]))
def test_split_cuts_and_gather_joins_bitwise_and_sends_no_more_than_it_must(problem, dtype):
    ranks, layout, dim, shape = problem
    whole = randn(0, *shape).mul(9).to(dtype)

    def main(rank):
        row = whole.numel() // LENGTH * whole.element_size()
        with CommunicationTrace() as trace:
            part = split(whole, dim, world(), layout=layout, checks=Checks(agreement=False))
        assert trace.sent_bytes == 0
        assert torch.equal(part, expected_part(whole, dim, layout, ranks, rank))
        assert part.is_contiguous()  # so that all ranks can view it as another shape, or none
        if isinstance(layout, Padded):  # filling must not come back, whatever is in it
            valid = rows(layout, ranks).sizes[rank]
            part = part.index_fill(dim, torch.arange(valid, part.shape[dim]), 77)
        given = rows(layout, ranks).sizes if layout is None else layout
        with CommunicationTrace() as trace:
            joined = gather(
                part, dim - len(shape), world(), reduce_gradients=False, layout=given, checks=Checks(agreement=False)
            )
        assert trace.sent_bytes == rows(layout, ranks).sizes[rank] * row * (ranks - 1)
        assert sum(trace.calls.values()) == (ranks > 1)
        assert torch.equal(joined, whole)
        if layout is None:
            assert torch.equal(gather(part, dim, world(), reduce_gradients=False), whole)

    run_ranks(main, ranks)


def test_even_parts_are_gathered_without_a_copy_for_each_rank():
    def main(rank):
        with CommunicationTrace() as trace:
            gather(
                randn(rank, 4, 2),
                1,
                world(),
                reduce_gradients=False,
                layout=[2, 2, 2],
                checks=Checks(agreement=False),
            )
        return trace.events

    assert run_ranks(main, 3) == [[("all_gather", 2 * 4 * 2 * 8)]] * 3


@settings(max_examples=12, deadline=None)
@given(problem=problems(), kind=st.sampled_from(["split", "gather same", "gather different", "reduce_scatter"]))
def test_backward_is_the_adjoint(problem, kind):
    ranks, layout, dim, shape = problem
    whole = randn(0, *shape)
    shards = [[expected_part(whole, dim, layout, ranks, rank)] for rank in range(ranks)]
    if kind == "split":
        gap = adjoint_gap(lambda x: split(x, dim, world(), layout=layout), [[whole]] * ranks, replicated_in=True)
    elif kind == "gather same":
        fn = lambda x: gather(x, dim, world(), layout=layout, reduce_gradients=False)  # noqa: E731
        gap = adjoint_gap(fn, shards, replicated_out=True)
    elif kind == "gather different":
        gap = adjoint_gap(lambda x: gather(x, dim, world(), layout=layout, reduce_gradients=True), shards)
    else:
        gap = adjoint_gap(
            lambda x: reduce_scatter(x, dim, world(), layout=layout), [[randn(rank, *shape)] for rank in range(ranks)]
        )
    assert gap < 1e-13


@settings(max_examples=8, deadline=None)
@given(problem=problems())
def test_reduce_scatter_sums_and_sends_what_is_not_its_own(problem):
    ranks, layout, dim, shape = problem
    summands = [randn(rank, *shape) for rank in range(ranks)]
    total = torch.stack(summands).sum(0)

    def main(rank):
        with CommunicationTrace() as trace:
            part = reduce_scatter(summands[rank], dim, world(), layout=layout, checks=Checks(agreement=False))
        torch.testing.assert_close(part, expected_part(total, dim, layout, ranks, rank), rtol=1e-14, atol=1e-14)
        others = LENGTH - rows(layout, ranks).sizes[rank]
        assert trace.sent_bytes == others * (total.numel() // LENGTH) * 8 * (ranks > 1)

    run_ranks(main, ranks)


@pytest.mark.parametrize("scale", GradScale)
@pytest.mark.parametrize("op", ["split", "gather same", "gather different"])
def test_grad_scale_is_a_sum_or_a_mean_over_the_group(op, scale):
    factor = {GradScale.NONE: 1.0, GradScale.DOWN: 1 / 3, GradScale.UP: 3.0}[scale]
    whole, part = randn(0, 6, 2), randn(1, 2, 2)
    cotangents = [randn(5 + rank, *(2, 2) if op == "split" else (6, 2)) for rank in range(3)]

    def main(rank):
        if op == "split":
            x = whole.clone().requires_grad_()
            split(x, 0, world(), grad_scale=scale).backward(cotangents[rank])
            return x.grad
        x = part.clone().requires_grad_()
        reduce = op == "gather different"
        gather(x, 0, world(), reduce_gradients=reduce, grad_scale=scale).backward(cotangents[rank])
        return x.grad

    for rank, grad in enumerate(run_ranks(main, 3)):
        exact = {
            "split": torch.cat(cotangents),
            "gather same": cotangents[rank][2 * rank : 2 * rank + 2],
            "gather different": torch.stack(cotangents).sum(0)[2 * rank : 2 * rank + 2],
        }[op]
        torch.testing.assert_close(grad, exact * factor, rtol=1e-15, atol=1e-15)


def test_gather_over_the_inner_axis_of_a_hybrid_gives_what_the_outer_rank_holds():
    outer = head_tail(13, 2)
    layout = nested_layout(outer, 3)
    whole = randn(0, 2, 13)

    def main(rank):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("ring", "ulysses"))
        part = split(whole, 1, world(), layout=layout)
        held = gather(part, 1, (mesh, "ulysses"), reduce_gradients=False)
        assert torch.equal(held, outer.shard(whole, 1, rank // 3))
        return gather(held, 1, (mesh, "ring"), layout=outer, reduce_gradients=False)

    for joined in run_ranks(main, 6):
        assert torch.equal(joined, whole)


def test_no_group_is_the_identity():
    x = randn(0, 3, 4)
    assert torch.equal(split(x, 1, None), x)
    assert torch.equal(gather(x, 1, None, reduce_gradients=True), x)
    assert torch.equal(reduce_scatter(x, 1, None), x)
    assert torch.equal(split(x, 1, None, layout=Padded(4, multiple=3), fill=2.0), pad(x, (0, 2), value=2.0))


@pytest.mark.parametrize("ranks", [0, -1])
def test_layouts_for_no_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match="at least"):
        nested_layout(head_tail(4, 2), ranks)
    with pytest.raises(ValueError, match="multiple >= 1"):
        Padded(4, multiple=ranks)


def test_each_document_contiguously_as_migration_says():
    """MindSpeed's split of packed samples: parts of each sample, and in the backward their gradients, over P."""
    scope: dict = {}
    exec(example("each document"), scope)
    documents, ranks = [5, 7, 1, 0, 4], 3
    layout = scope["each_contiguous"](documents, ranks)
    x, cotangent = (randn(seed, sum(documents), 2) for seed in (1, 2))
    parts = [piece.tensor_split(ranks) for piece in x.split(documents)]
    expected = [torch.cat([piece[rank] for piece in parts]) for rank in range(ranks)]

    def on(rank: int) -> None:
        leaf = x.clone().requires_grad_()
        part = split(leaf, 0, world(), layout=layout, grad_scale=GradScale.DOWN)
        assert torch.equal(part, expected[rank])
        part.backward(layout.shard(cotangent, 0, rank))
        assert error(leaf.grad, cotangent / ranks) < 1e-15  # a product of one number

    run_ranks(on, ranks)


@pytest.mark.parametrize("sums", [False, True])
def test_gradients_of_what_slice_inputs_cut(sums: bool):
    """A slice leaves a rank its share; split leaves it the whole, which is not summed, or a P-th with DOWN."""
    x, weight = randn(1, LENGTH, 3), randn(2, 3, 3)
    whole = weight.clone().requires_grad_()
    (x @ whole).square().sum().backward()

    def on(rank: int) -> float:
        group, layer = world(), torch.nn.Linear(3, 3, bias=False).double()
        layer.weight.data = weight.T.clone()
        scale = GradScale.DOWN if sums else GradScale.NONE
        split(layer(x), 0, group, layout=Padded(LENGTH), grad_scale=scale).square().sum().backward()
        if sums:
            sum_gradients(layer, group)
        return error(layer.weight.grad, whole.grad.T)

    assert max(run_ranks(on, 3)) < 1e-14
