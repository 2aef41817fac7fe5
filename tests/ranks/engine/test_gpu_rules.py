"""Attention over tensors that say they are on a GPU: no step makes the host wait for the device, and what goes through
NCCL keeps its rules. See tests/gpu_tensors.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, product

import pytest
import torch
import torch.distributed as dist

from cp_styles._lib.compat import connect_gloo
from cp_styles.comm import point_to_point
from cp_styles.explain.dry_run import dry_run, kernel_of
from cp_styles.explain.events import MemoryOp, Shapes
from cp_styles.functions.attention import context_attention
from cp_styles.kernels import Kernel, ReferenceKernel, packing
from cp_styles.layouts import contiguous, head_tail, striped
from cp_styles.masks import Causal, Documents, Full, SlidingWindow
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.testing import RankError, run_ranks
from tests.covering import plain, sampled
from tests.cuda_ops import DEFAULT, EFFICIENT, EFFICIENT_FLOAT32, ON_GPU, cuda_ops_on_cpu
from tests.gpu_tensors import BreaksRule, Nccl, Synchronizes, device_ops, gpus, put, read
from tests.oracle import (
    allowed,
    attend_and_differentiate,
    attention_inputs,
    document_of,
    error,
    expected_attention,
    randn,
)
from tests.ranks.attention_case import EXACT, Problem
from tests.unit.test_batches import naive

STRATEGIES = [
    (Ring(), 3),
    (Ring(keep=0), 4),
    (AllGather(), 3),
    (Ulysses(), 2),
    (Ulysses(), 3),
    (Ulysses(size=2), 4),
    (Ulysses(inner=AllGather(keep=0), size=2), 4),
]
LENGTHS = (13, 1, 40, 10)
MASKED = replace(EFFICIENT, device_type="cuda")  # has no windows
MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": SlidingWindow(6, 0),
    "window, masked": SlidingWindow(6, 0),
    "documents": Documents(LENGTHS) & Causal(),
    "prefix documents": Documents(LENGTHS, (4, 1, 9, 0)),
}


def sees(mask: str):
    document, starts = document_of(LENGTHS), (0, 13, 14, 54)
    return {
        "causal": lambda p, j: j <= p,
        "full": lambda p, j: True,
        "window": lambda p, j: p - 6 <= j <= p,
        "window, masked": lambda p, j: p - 6 <= j <= p,
        "documents": lambda p, j: document(p) == document(j) and j <= p,
        "prefix documents": lambda p, j: (
            document(p) == document(j) and (j <= p or j - starts[document(j)] < (4, 1, 9, 0)[document(j)])
        ),
    }[mask]


def errors_on_gpu(attend: Callable[..., torch.Tensor], problem: Problem, layout, rank: int, ranks: int) -> float:
    """The largest of a forward and a backward over this rank's tensors, which say that they are on a GPU."""
    leaves, cotangent = problem.shard(layout, rank, ranks)
    given = [put(x) for x in leaves]
    out = attend(*given)
    out.backward(put(cotangent))
    return max(problem.errors([read(out), *(read(x.grad) for x in given)], layout, rank, ranks))


def on_gpus(
    problem: Problem,
    ranks: int,
    *,
    steps: int = 1,
    nccl_only: bool = False,
    batches: bool = True,
    waits=(),
    layout=head_tail,
    **options,
):
    """The largest error of each rank after so many forwards and backwards, and the log of what was communicated."""

    def on(rank: int) -> float:
        attend = partial(context_attention, mesh=dist.group.WORLD, layout=layout, **options)
        return max(errors_on_gpu(attend, problem, layout, rank, ranks) for _ in range(steps))

    with gpus(nccl_only=nccl_only, batches=batches, waits=waits) as gpu:
        errors = run_ranks(on, ranks)
    return max(errors), gpu


@sampled(1, way=STRATEGIES, mask=list(MASKS))
def test_no_step_waits_for_the_device(way, mask: str):
    """Forward and backward, of several layouts; the first step is like all others but for what it makes once."""
    strategy, ranks = way
    length = sum(LENGTHS)
    problem = Problem(length=length, heads=6, kv_heads=3, mask=allowed(sees(mask), length, length), scale=0.3)
    layout = {"documents": striped, "window": contiguous}.get(mask, head_tail)
    kernel = MASKED if mask == "window, masked" else ON_GPU
    worst, gpu = on_gpus(problem, ranks, strategy=strategy, mask=MASKS[mask], layout=layout, scale=0.3, kernel=kernel)
    assert worst < EXACT
    flash = {"_flash_attention_forward", "_scaled_dot_product_flash_attention"}
    efficient = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
    assert (efficient if kernel is MASKED else flash) & set(gpu.seen.calls)


@pytest.mark.parametrize("unconnected", [{1}, {0, 1, 2}])
def test_machines_that_gloo_does_not_connect(unconnected: set[int], monkeypatch):
    """All ranks agree on the device, and say so once, if gloo fails on one of them."""

    def fails(group: dist.ProcessGroup, name: str, *args):
        gloo = connect_gloo(group, name, *args)
        if group.rank() in unconnected:
            raise RuntimeError("Connection refused")
        return gloo

    monkeypatch.setattr("cp_styles.comm.point_to_point.connect_gloo", fails)
    problem, reads = Problem(length=24), ["cp_styles.comm.point_to_point._read_rows"]
    options = {"mask": Causal(), "kernel": ON_GPU, "strategy": Ring()}
    with pytest.warns(UserWarning, match="GLOO_SOCKET_IFNAME") as warned:
        worst, gpu = on_gpus(problem, 3, steps=2, nccl_only=True, waits=reads, **options)
    assert worst < EXACT
    assert len(warned) == 3  # one of each rank, which are threads here
    assert all(f"on {len(unconnected)} ranks: rank {min(unconnected)}: Conn" in str(w.message) for w in warned)
    assert gpu.waits == 3 * 4  # a forward and a backward, twice
    assert all([what for what, *_ in log].count("c10d::allgather_") == 4 for log in gpu.nccl.logs[0, 1, 2].values())


def test_what_is_chosen_for_bfloat16():
    """And float32: with no kernel named, tiles go to flash, which has windows, and to efficient attention."""
    for dtype, plain_kernel in ((torch.bfloat16, "flash"), (torch.float32, "efficient")):
        problem = Problem(length=64, heads=2, dtype=dtype, mask=allowed(sees("window"), 64, 64))
        worst, gpu = on_gpus(problem, 2, mask=SlidingWindow(6, 0))
        assert worst < (2e-2 if dtype == torch.bfloat16 else 1e-5)  # some roundings of 2^-9, or of 2^-24
        assert all(plain_kernel in name or name.startswith("_flash") for name in gpu.seen.calls)
        problem = Problem(length=64, heads=2, dtype=dtype)
        worst, gpu = on_gpus(problem, 2, mask=Causal())
        assert worst < (2e-2 if dtype == torch.bfloat16 else 1e-5)
        assert all(plain_kernel in name or name.startswith("_flash") for name in gpu.seen.calls)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_sinks_do_not_wait_for_the_device(ranks: int):
    """They change at every step, and ranks compare what they hold: on a GPU, what they held 64 calls ago. Of those
    calls few have a backward."""
    length, steps = 16, 70
    sink = randn(3, 4)
    (q, k, v), cotangent = attention_inputs(length=length)
    layout = head_tail(length, ranks)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    logits = (leaves[0] @ leaves[1].mT * 8**-0.5).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    column = leaves[3].view(1, 4, 1, 1).expand(2, 4, length, 1)
    weights = torch.softmax(torch.cat((logits, column), -1), -1)[..., :-1]
    expected = torch.autograd.grad(weights @ leaves[2], leaves, cotangent)

    def on(rank: int):
        parts = [layout.shard(x, 2, rank) for x in (q, k, v, cotangent)]
        given: list[torch.Tensor] = []
        for step in range(steps):
            given = [put(x.requires_grad_()) for x in (*parts[:3], sink)]
            out = context_attention(
                *given[:3], dist.group.WORLD, layout=layout, mask=Causal(), sink_H=given[3], kernel=ON_GPU
            )
            if step % 23 == 0:  # the first, and the last
                out.backward(put(parts[3]))
        return [read(x.grad) for x in given]

    with gpus():
        grads = run_ranks(on, ranks)
    for wanted, parts in zip(expected[:3], list(zip(*grads, strict=True))[:3], strict=True):
        assert error(layout.unshard(list(parts), 2), wanted) < EXACT
    assert error(sum(part[3] for part in grads), expected[3]) < EXACT


def ops_of(ranks: int) -> list[Counter[str]]:
    """The device ops of a forward and of a backward on the last rank, whose keys every rank needs; grouped heads."""
    problem = Problem(length=16 * 8, batch=1, heads=8, kv_heads=2, dtype=torch.bfloat16)

    def on(rank: int) -> list[Counter[str]]:
        leaves, cotangent = problem.shard(head_tail, rank, ranks)
        given, grad = [put(x) for x in leaves], put(cotangent)
        with device_ops() as forward:
            out = context_attention(*given, dist.group.WORLD, layout=head_tail, mask=Causal(), kernel=ON_GPU)
        with device_ops() as backward:
            out.backward(grad)
        return [forward, backward]

    with gpus():
        return run_ranks(on, ranks)[-1]


def test_the_ops_of_a_step_of_a_ring():
    """Four more ranks add two steps of two sources to a forward, and four steps to a backward. Ops without views: a
    buffer for keys, flash, five to merge. In a backward: a buffer for keys, flash, the sum of dq, dk and dv in float32,
    and their buffers and sums for this rank's own keys. Gradients are sent as flash returns them, in the memory order
    of the message of keys: no copy."""
    for eight, four, steps, most in zip(ops_of(8), ops_of(4), (2, 4), (26, 40), strict=True):
        step = {name: (count - four[name]) / steps for name, count in eight.items() if count != four[name]}
        assert sum(step.values()) <= most
        assert not step.keys() & {"aten::zeros", "aten::full", "aten::copy_", "aten::clone", "aten::contiguous"}
        assert sum(count for name, count in step.items() if "attention" in name) == 1


@sampled(
    1,
    strategy=[
        Ring(),
        Ring(keep=0),
        AllGather(),
        AllGather(keep=0),
        Ulysses(size=2),
        Ulysses(inner=AllGather(), size=2),
    ],
    ranks=[4, 6],
    mask=["causal", "full", "window"],
    length=[64, 61, 7],
    layout=[contiguous, head_tail],
)
def test_keys_of_several_sources_are_one_tile(strategy, ranks: int, mask: str, length: int, layout):
    """In a batch of one row. Also where ranks have no rows, and messages of different sizes."""
    problem = Problem(length=length, batch=1, heads=4, kv_heads=2, mask=allowed(sees(mask), length, length))
    worst, gpu = on_gpus(problem, ranks, mask=MASKS[mask], kernel=ON_GPU, strategy=strategy, layout=layout)
    assert worst < EXACT
    if isinstance(strategy, AllGather) and mask == "full" and length == 64:  # own, kept, and all others at once
        assert gpu.seen.calls["_scaled_dot_product_flash_attention"] == ranks * (2 + strategy.keep)


def test_kernels_that_copy_keys_get_the_keys_of_one_source():
    """Efficient attention has no grouped heads: keys are repeated, one source after the other."""
    problem = Problem(length=64, batch=1, heads=4, kv_heads=2, mask=allowed(sees("full"), 64, 64))
    worst, gpu = on_gpus(problem, 4, mask=Full(), kernel=MASKED, strategy=AllGather())
    assert worst < EXACT
    assert gpu.seen.calls["_scaled_dot_product_efficient_attention"] == 4 * 4


@pytest.mark.parametrize(("most", "copies"), [(2**27, 0), (0, 4 * (8 + 2))])
def test_out_and_its_gradient_are_copied_once_by_groups_of_heads(most: int, copies: int, monkeypatch):
    """Flash copies tensors that are not dense, [B, L, H, D]. Each of 4 ranks has 8 tiles of one head and two of all.
    Without the copies by groups, flash copies out at the former and the gradient, here [B, H, L, D], at the latter."""
    monkeypatch.setattr("cp_styles.strategies.schedule._LEAST_BLOCKS", 1)
    monkeypatch.setattr("cp_styles.strategies.moving_kv._MAX_COPY_BYTES", most)
    length = 4 * 48
    sees_all = allowed(sees("full"), length, length)
    problem = Problem(length=length, batch=1, heads=4, kv_heads=4, mask=sees_all)
    worst, gpu = on_gpus(problem, 4, mask=Full(), kernel=ON_GPU, strategy=Ring(keep=0), layout=contiguous)
    assert worst < EXACT
    assert gpu.seen.copies == copies


def documents_of(count: int, tokens: int) -> tuple[int, ...]:
    """In each of 8 chunks so many of so many tokens together, and one of 8 tokens over each border of two chunks: the
    messages of contiguous and head-tail layouts are those few rows, however many documents there are."""
    inside = (tokens // count,) * count
    return (4, *(*inside, 8) * 7, *inside, 4)


def ops_over_documents(documents: tuple[int, ...], layout, strategy) -> list[list[Counter[str]]]:
    """The device ops of each rank, of a forward and a backward over documents. An earlier call with the layout has
    copied an index of its rows to the device."""
    mask, length = Documents(documents) & Causal(), sum(documents)

    def on(rank: int) -> list[Counter[str]]:
        q, *kv, grad = (put(randn(index, 1, heads, length // 4, 8)) for index, heads in enumerate((2, 1, 1, 2)))
        given = [x.requires_grad_() for x in (q, *kv)]
        options = {"layout": layout, "mask": mask, "strategy": strategy, "kernel": ON_GPU}
        with torch.no_grad():
            context_attention(*given, dist.group.WORLD, **options | {"mask": Causal()})
        with device_ops() as forward:
            out = context_attention(*given, dist.group.WORLD, **options)
        with device_ops() as backward:
            out.backward(grad)
        return [forward, backward]

    with gpus():
        return run_ranks(on, 4)


@sampled(1, strategy=[Ring(), AllGather(), Ulysses()], layout=[contiguous, head_tail, striped])
def test_the_ops_of_a_pack_do_not_grow_with_its_documents(strategy, layout):
    """A pack is one call, one merge and one sum, whatever its rows are; and so are messages of many ranges of rows.
    Views count too, but for those that are joined."""
    few, many = (ops_over_documents(documents_of(count, 64), layout, strategy) for count in (2, 4))
    for ranks in (few, many):
        for ops in chain.from_iterable(ranks):
            del ops["aten::slice"], ops["aten::narrow"]
    assert few == many


@sampled(1, kv_heads=[4, 2], batch=[1, 2], strategy=[Ring(), Ring(keep=0), AllGather(), Ulysses(), Ulysses(size=2)])
def test_long_documents_of_few_heads_are_packed(strategy, batch: int, kv_heads: int, monkeypatch):
    """Six documents of 16 to 21 tokens; more than 4 are long here. After Ulysses a rank has one head of all of them.
    No other test has these lengths, whose schedules are cached."""
    lengths = (16, 21, 19, 17, 20, 19)
    document, length = document_of(lengths), sum(lengths)
    sees = allowed(lambda p, j: document(p) == document(j) and j <= p, length, length)
    problem = Problem(length=length, batch=batch, heads=4, kv_heads=kv_heads, mask=sees)
    monkeypatch.setattr(packing, "LONG_TILE", 4)
    options = {"mask": Documents(lengths) & Causal(), "kernel": ON_GPU, "layout": contiguous}
    worst, gpu = on_gpus(problem, 4, strategy=strategy, **options)
    assert worst < EXACT
    packed = [gpu.seen.calls[f"_flash_attention_{phase}"] for phase in ("forward", "backward")]
    assert all(packed)  # without windows, packs alone have this op
    if strategy == Ulysses():
        assert packed == [4, 4]


@pytest.mark.parametrize("strategy", [Ring(), AllGather(), Ulysses()], ids=plain)
def test_the_ops_of_messages_do_not_grow_with_their_ranges_of_rows(strategy):
    """In stripes a rank sends of each document all rows but one. Views count too."""
    few, many = (ops_over_documents((60,) * count, striped, strategy) for count in (8, 24))
    assert few == many


def test_the_calls_of_a_window():
    """Of 4,096 at 8K rows a rank, alone and in documents, in a dry run for a GPU: 1,800 without windows."""
    shapes = Shapes(32, 8, 128, 128, torch.bfloat16, torch.device("cuda"))
    window, length = SlidingWindow(4095, 0), 8 * 8192
    masks = window, Documents((length // 2,) * 2) & window
    for layout, mask, strategy in product((contiguous, head_tail), masks, (Ring(), AllGather(), Ulysses())):
        given = strategy, (layout(length, 8),) * 2, mask, kernel_of(shapes, None), shapes
        for run in (dry_run(*given, rank) for rank in (0, 3, 7)):
            assert len(run.forward.calls) <= 4
            assert len(run.backward.calls) <= 6  # some by halves of the heads
            # Tiles without an edge go to cuDNN where torch is built with it.
            assert all("flash" in call.kernel or "cudnn" in call.kernel for call in run.forward.calls)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "calls", "copies", "peak"),
    [(4096, 32, 8, 43, 689), (4096, 8, 8, 43, 377), (8192, 32, 18, 103, 1150), (8192, 8, 13, 76, 658)],
)
def test_the_calls_of_a_backward(rows: int, kv_heads: int, calls: int, copies: int, peak: int):
    """On the fourth of 8 ranks, in a dry run for a GPU; the peak in MiB. With groups of half as many blocks the rows
    are: (18, 103, 575), (13, 76, 329), (37, 233, 1012), (16, 95, 658). With packed copies of k and v, and
    of gradients that had been widened: (8, 49, 848), (8, 49, 377), (18, 113, 1344), (13, 84, 690)."""
    shapes = Shapes(32, kv_heads, 128, 128, torch.bfloat16, torch.device("cuda"))
    layouts = (head_tail(8 * rows, 8),) * 2
    run = dry_run(Ring(), layouts, Causal(), kernel_of(shapes, None), shapes, 3)
    assert len(run.backward.calls) == calls
    assert sum(isinstance(event, MemoryOp) for event in run.backward.events) == copies
    assert round(run.backward.peak / 2**20) == peak
    # Own keys, the kept ones, and three pairs of sources. Messages of 32 heads and 8K rows come one by one.
    assert len(run.forward.calls) == (8 if rows * kv_heads > 2**17 else 5)


def test_the_calls_of_documents_after_ulysses():
    """Of 51 documents of 1,310 tokens, 8K rows a rank, on the fourth of 8 ranks in a dry run for a GPU; the peak in
    MiB. One by one they took 51 calls and 141 other ops forward, 51 and 321 backward, and 577 MiB."""
    shapes = Shapes(32, 8, 128, 128, torch.bfloat16, torch.device("cuda"))
    layouts, documents = (head_tail(8 * 8192, 8),) * 2, (1310,) * 50 + (36,)
    run = dry_run(Ulysses(), layouts, Documents(documents) & Causal(), kernel_of(shapes, None), shapes, 3)
    for phase, copies in ((run.forward, 10), (run.backward, 14)):
        assert len(phase.calls) == 1
        assert sum(isinstance(event, MemoryOp) for event in phase.events) == copies
    assert round(run.backward.peak / 2**20) == 655


@sampled(1, strategy=[Ring(), AllGather()], layout=[contiguous, head_tail, striped])
def test_the_ops_of_many_documents_are_those_of_few(strategy, layout):
    """In a dry run for a GPU: what is computed, and what is copied, merged and added."""
    shapes = Shapes(8, 2, 64, 64, torch.bfloat16, torch.device("cuda"))
    counts = []
    for count in (2, 8, 64):  # 25, 73, and 521 documents
        documents = documents_of(count, 1024)
        layouts = (layout(sum(documents), 4),) * 2
        given = strategy, layouts, Documents(documents) & Causal(), kernel_of(shapes, None), shapes
        runs = [dry_run(*given, rank) for rank in range(4)]
        phases = [phase for run in runs for phase in (run.forward, run.backward)]
        counts.append([Counter(type(event).__name__ for event in phase.events) for phase in phases])
    assert counts[0] == counts[1] == counts[2]
    assert all(count["KernelCall"] for count in counts[0])


# Each of the rules, broken on purpose.


def broken(path: str, replacement, match: str, kind: type[Exception], **options):
    problem = Problem(length=64, kv_heads=2, heads=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, replacement)
        with pytest.raises((RankError, kind), match=match):
            on_gpus(problem, 2, **{"mask": Causal(), "kernel": ON_GPU} | options)


def test_a_group_whose_first_operation_is_a_batch_is_noticed():
    path = "cp_styles.strategies.moving_kv.open_group"
    broken(path, lambda *_: None, "first operation of a group", BreaksRule, strategy=Ring())


@pytest.mark.parametrize(
    ("most", "batches", "wanted"),
    [
        (256, True, {"all-to-all"}),
        (2, True, {"batch", "c10d::allreduce_"}),  # a collective sets up the group
        (256, False, {"c10d::send", "c10d::recv_"}),
    ],
)
def test_heads_move_in_an_all_to_all(most: int, batches: bool, wanted: set[str]):
    """They move in batches where it would have too many messages, and one by one on a backend without batches."""
    problem = Problem(length=64, kv_heads=2, heads=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cp_styles.comm.point_to_point.MOST_OPERATIONS", most)
        worst, gpu = on_gpus(problem, 2, batches=batches, mask=Causal(), kernel=ON_GPU, strategy=Ulysses())
    assert worst < EXACT
    assert {kind for log in gpu.nccl.logs[0, 1].values() for kind, *_ in log} == wanted


def test_reading_before_waiting_is_noticed():
    def finish(self) -> None:
        for work in self.works:
            for transfer in work.works:
                transfer.wait()

    problem = Problem(length=24, kv_heads=2, heads=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cp_styles.comm.point_to_point.PendingTransfers.wait", finish)
        worst, _ = on_gpus(problem, 2, mask=Causal(), kernel=ON_GPU)
    assert not worst < EXACT


def test_copies_that_block_are_noticed():
    def tensor(device, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    def copy(device, values, dtype=torch.int64):
        return (values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)).to(device)

    masked = {"mask": Documents((41, 23)) & SlidingWindow(6, 0), "kernel": MASKED}
    broken("cp_styles._lib.device_copies.tensor_on", copy, "a copy to the device that blocks", Synchronizes, **masked)
    broken(
        "cp_styles.kernels.packing.tensor_on", tensor, r"torch\.tensor", Synchronizes, mask=Documents((10,) * 6 + (4,))
    )


def test_batches_that_wait_for_each_other_are_noticed():
    """Both ranks receive before they send, in two batches; in one batch they may."""
    for batches, hangs in (([("recv",), ("send",)], True), ([("recv", "send")], False)):
        log = Nccl()
        for rank in range(2):
            entries = [("batch", tuple((kind, 1 - rank, 4) for kind in kinds)) for kinds in batches]
            log.logs[0, 1][rank] = [("all-reduce",), *entries]
        if hangs:
            with pytest.raises(BreaksRule, match="wait for each other"):
                log.verify()
        else:
            log.verify()


MANY = Problem(length=48, batch=1, heads=8, kv_heads=8)


@pytest.mark.parametrize("strategy", [AllGather(), AllGather(keep=0), Ulysses()], ids=plain)
def test_many_messages_are_several_batches(strategy, monkeypatch):
    """On 8 ranks, with a limit of 4 operations: a batch for each distance."""
    monkeypatch.setattr(point_to_point, "MOST_OPERATIONS", 4)
    worst, gpu = on_gpus(MANY, 8, strategy=strategy, mask=Causal(), kernel=ON_GPU)
    assert worst < EXACT
    batches = [what[1] for log in gpu.nccl.logs[tuple(range(8))].values() for what in log if what[0] == "batch"]
    assert max(map(len, batches)) <= 4
    assert len(batches) >= 8 * 7 * 2


@pytest.mark.parametrize("strategy", [AllGather(), Ulysses()], ids=plain)
def test_batches_that_are_cut_by_place_wait_for_each_other(strategy, monkeypatch):
    monkeypatch.setattr(point_to_point, "MOST_OPERATIONS", 4)
    monkeypatch.setattr(point_to_point, "cut_batches", naive)
    with pytest.raises(BreaksRule, match="wait for each other"):
        on_gpus(MANY, 8, strategy=strategy, mask=Causal(), kernel=ON_GPU)


@sampled(1, ranks=[2, 4, 8], mask=[Causal(), Full()], dtype=[torch.bfloat16, torch.float16])
def test_tiles_that_come_back_in_low_precision(mask, ranks: int, dtype: torch.dtype):
    """A kernel on CUDA rounds each tile's results, and the merged ones are rounded again. The same kernel on the whole
    sequence rounds its result once (``last``). Where the tiles of a result are independent, the squares of their norms
    sum to the square of its norm, so that their roundings have together the norm of ``last``, however many they are:
    ``ours^2 = alone^2 + last^2``. (Seen: 0.28 to 1.21 of last^2. Rows with one tile have no such rounding, and tiles of
    a gradient cancel a little.) Tiles in float32 leave one rounding, and that of no probabilities: below ``alone``.
    """
    length, causal = 256, isinstance(mask, Causal)
    inputs, cotangent = attention_inputs(length=length, heads=2, dim=64, dtype=dtype)
    allows = torch.ones(length, length).tril().bool() if causal else None
    expected = expected_attention(inputs, cotangent, allows)
    layout = head_tail(length, ranks)

    def errors(found: list[torch.Tensor]) -> list[float]:
        return [error(*pair) for pair in zip(found, expected, strict=True)]

    def on(rank: int, kernel: Kernel) -> list[torch.Tensor]:
        attend = partial(context_attention, mesh=dist.group.WORLD, layout=layout, mask=mask, kernel=kernel)
        parts = [layout.shard(x, 2, rank) for x in inputs]
        return attend_and_differentiate(attend, parts, layout.shard(cotangent, 2, rank))

    def merged(kernel: Kernel) -> list[float]:
        found = zip(*run_ranks(partial(on, kernel=kernel), ranks), strict=True)
        return errors([layout.unshard(list(parts), 2) for parts in found])

    last = errors([x.to(dtype) for x in expected])
    with cuda_ops_on_cpu():
        options = {"causal": causal, "bias": None, "scale": 1 / 8}
        out, lse = DEFAULT.forward(*inputs, **options)
        alone = errors([out, *DEFAULT.backward(cotangent, *inputs, out, lse, **options)])
        rounded, wide = merged(DEFAULT), merged(EFFICIENT_FLOAT32)
    for ours, one, rounding in zip(rounded, alone, last, strict=True):
        assert ours**2 <= one**2 + 1.25 * rounding**2, (rounded, alone, last)
    assert all(ours < one for ours, one in zip(wide, alone, strict=True)), (wide, alone)
    assert max(ours / one for ours, one in zip(rounded, alone, strict=True)) > 1.1  # what the page on GPUs says


def test_products_in_all_digits_where_tf32_is_allowed():
    """Of the kernels in plain ops. TF32 has 10 bits: the products of a kernel that follows it are off by 1e-3."""
    inputs, cotangent = attention_inputs(length=40, kv_heads=2, dtype=torch.float32)
    expected = expected_attention(inputs, cotangent)
    options = {"causal": False, "bias": None, "scale": 8**-0.5}
    kernel, before = ReferenceKernel(), torch.backends.cuda.matmul.fp32_precision

    def worst() -> float:
        given = [put(x) for x in inputs]
        out, lse = kernel.forward(*given, **options)
        found = [out, *kernel.backward(put(cotangent), *given, out, lse, **options)]
        return max(error(read(mine), wanted) for mine, wanted in zip(found, expected, strict=True))

    with gpus(), pytest.MonkeyPatch.context() as patch:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            assert worst() < 1e-6
            patch.setattr("cp_styles.kernels.reference.matmul", torch.matmul)
            assert worst() > 1e-4
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
