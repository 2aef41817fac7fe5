"""The exact communication and computation of attention: bytes, kernel calls, and when a round is started."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from cp_styles.comm import point_to_point
from cp_styles.comm.agreement import WIDTH
from cp_styles.functions.attention import context_attention
from cp_styles.kernels import Kernel
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Causal, Documents, SlidingWindow
from cp_styles.plan import make_plan
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.covering import plain, sampled
from tests.ranks.attention_case import Core, Problem, cp_mesh, parallel, run_attention

LENGTH = 16


class Counting(Kernel):
    """A kernel that notes its calls, and the query heads and key/value heads it was given."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, int]] = []
        self.backwards: list[tuple[int, int]] = []

    def forward(self, q, k, v, **options):
        self.forwards.append((q.shape[1], k.shape[1]))
        return CPU_FLASH.forward(q, k, v, **options)

    def backward(self, grad, q, k, v, out, lse, **options):
        self.backwards.append((q.shape[1], k.shape[1]))
        return CPU_FLASH.backward(grad, q, k, v, out, lse, **options)

    def check(self, q, k, v, *, biased):
        CPU_FLASH.check(q, k, v, biased=biased)


def costs(problem: Problem, ranks: int, door: str, **options) -> tuple[float, list[CommunicationTrace], list[Counting]]:
    """Bytes of all ranks, forward and backward, in units of one rank's query shard; the traces; the kernels.

    What ranks tell each other, all-gathers of WIDTH integers, is not counted: everything else is point to point.
    """
    layout, mask = options.pop("layout"), options.pop("mask")

    def on(rank: int):
        mesh, kernel = cp_mesh(ranks), Counting()
        if door == "style":
            attend = parallel(Core(causal=False), mesh, kernel=kernel, layout=layout, mask=mask, **options)
        else:
            attend = partial(context_attention, mesh=mesh, kernel=kernel, layout=layout, mask=mask, **options)
        with CommunicationTrace() as trace:
            run_attention(attend, problem, rank, ranks, layout=layout)
        return trace, kernel

    traces, kernels = zip(*run_ranks(on, ranks), strict=True)
    sent = 0
    for trace in traces:
        assert set(trace.calls) <= {"send", "all_to_all", "all_gather"}
        agreed = [size for name, size in trace.events if name == "all_gather"]
        # On the call; and before the first backward, that all ranks are through with their forwards.
        meetings = 2 if ranks > 1 else 0
        assert agreed == [WIDTH * 8 * (ranks - 1)] * meetings
        sent += sum(size for name, size in trace.events if name != "all_gather")
    return sent / (problem.inputs[0].nbytes / ranks), list(traces), list(kernels)


@sampled(2, door=["style", "function"], strategy=[Ring, AllGather],
         sent=[(1, (0, 0, 0)), (2, (9, 6, 6)), (4, (54, 49, 36))])  # fmt: skip
def test_bytes_of_causal_head_tail(door: str, strategy, sent: tuple[int, tuple[int, int, int]]):
    """u = one rank's query shard; of N (N - 1) pairs of ranks, half need all of the other's keys and half of them half,
    so 3/4 * 2 u a pair forward, as many gradients home, and once more where keys are not kept: N = 2: 6 u and 9 u.
    By default those of one source are kept: with N = 4, that is half of a source's keys, 1 u, on all ranks but rank 0,
    which needs all, 2 u.
    """
    ranks, units = sent
    problem = Problem(length=LENGTH, dtype=torch.float32)
    for chosen, expected in zip((strategy(keep=0), strategy(), strategy(keep=64)), units, strict=True):
        sent, _, kernels = costs(problem, ranks, door, strategy=chosen, layout=head_tail, mask=Causal())
        assert sent == expected
        for rank, kernel in enumerate(kernels):
            calls = ranks
            for distance in range(1 + chosen.keep, ranks - 1 if strategy is Ring else 0):
                # Of the 4 u of gradients of all keys, or 2 u of half of them, a backward computes 1/2 u at once.
                calls += 3 if rank < distance else 1
            assert (len(kernel.forwards), len(kernel.backwards)) == (ranks, calls)


@pytest.mark.parametrize("mask", [SlidingWindow(1, 0), Documents((3, 4, 4, 5)) & Causal()], ids=plain)
def test_few_rows_travel_with_all_heads(mask):
    """A ring sends keys that are as many as queries in two groups of heads, but not the few rows that a window needs:
    one kernel call a source. Ranks that need many rows of each other, here none, would still share groups."""
    problem = Problem(length=LENGTH, dtype=torch.float32)
    _, traces, kernels = costs(problem, 4, "function", strategy=Ring(), layout=contiguous, mask=mask)
    own = contiguous(LENGTH, 4)
    for rank, (trace, kernel) in enumerate(zip(traces, kernels, strict=True)):
        plan = make_plan(own, own, mask, rank)
        tiles = sum(len(part.tiles) for part in plan.parts)
        assert kernel.forwards == kernel.backwards == [(4, 4)] * tiles
        # Keys to one message, and gradients of keys and of values home.
        sources = sum(part.count > 0 for part in plan.parts) - 1
        assert trace.calls["send"] == sum(map(bool, plan.sends)) + 2 * sources


@pytest.mark.parametrize("keep", [0, 1])
def test_low_precision_keys_travel_as_they_are_and_gradients_in_float32(keep: int):
    problem = Problem(length=LENGTH, dtype=torch.bfloat16)
    units, _, _ = costs(problem, 2, "style", strategy=Ring(keep=keep), layout=head_tail, mask=Causal())
    assert units == 3 + 2 * 3 + (0 if keep else 3)


@pytest.mark.parametrize("how", ["no_grad", "no input wants a gradient"])
def test_without_a_backward_nothing_is_kept(how: str):
    """Half of the bytes, and no memory for a backward that cannot come."""
    problem = Problem(length=LENGTH, dtype=torch.float32)

    def on(rank: int):
        core = parallel(Core(), cp_mesh(2))
        leaves, _ = problem.shard(head_tail, rank, 2)
        leaves = [x.detach() for x in leaves] if how != "no_grad" else leaves
        with CommunicationTrace() as trace, torch.set_grad_enabled(how != "no_grad"):
            out = core(*leaves)
        assert not out.requires_grad
        return sum(size for name, size in trace.events if name == "send")

    assert sum(run_ranks(on, 2)) == 3 * problem.inputs[0].nbytes / 2


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_next_keys_are_on_their_way_while_these_are_computed(keep: int, kv_heads: int):
    """The order on a rank: a step's transfers are started before the kernel works on the step before it.

    A backward works on keys by groups of heads while other keys are on their way, on kept ones and on the last ones at
    once, and on its own last, while gradients are. With nothing kept it works on its own while the first keys are sent.
    """
    problem = Problem(length=LENGTH, causal=False, kv_heads=kv_heads, dtype=torch.float32)
    log: list[str] = []

    class Logged(Counting):
        def forward(self, *args, **options):
            if self.rank == 0:
                log.append("compute")
            return super().forward(*args, **options)

        def backward(self, *args, **options):
            if self.rank == 0:
                log.append("gradient")
            return super().backward(*args, **options)

    class Wire(CommunicationTrace):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = len(self.events)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if func.namespace == "cp_styles":
                return result  # what is inside it has passed here op by op
            log.extend(name for name, _ in self.events[before:] if name == "send" and self.rank == 0)
            return result

    def on(rank: int):
        kernel, wire = Logged(), Wire()
        kernel.rank = wire.rank = rank
        attend = partial(context_attention, mesh=cp_mesh(3), strategy=Ring(keep=keep), kernel=kernel)
        with wire:
            run_attention(attend, problem, rank, 3)

    run_ranks(on, 3)
    # A "home" is the sends of dk and of dv. Kept messages are worked on first, since there is nothing to wait for.
    crowded = "gradient home " * kv_heads
    backward = {
        0: f"send gradient send {crowded} gradient home",
        1: "send gradient home gradient home gradient",
        2: "gradient home gradient home gradient",
    }
    expected = f"send compute send compute compute {backward[keep]}"
    assert log == expected.replace("home", "send send").split()


@pytest.mark.parametrize(("most", "calls"), [(0, {"send": 4 * 3}), (2**18, {"all_to_all": 4})])
def test_the_three_gradients_of_heads_travel_in_one_message(most: int, calls: dict[str, int], monkeypatch):
    """Heads there, output back, its gradient there, and the gradients of query, key and value back."""
    monkeypatch.setattr(point_to_point, "MOST_OVER_GLOO", most)
    problem = Problem(length=LENGTH, dtype=torch.float32)
    _, traces, _ = costs(problem, 4, "function", strategy=Ulysses(), layout=contiguous, mask=Causal())
    assert [{name: count for name, count in trace.calls.items() if name != "all_gather"} for trace in traces] == [
        calls
    ] * 4


def test_the_largest_block_of_all_ranks_decides_how_heads_travel(monkeypatch):
    """All ranks must take one way. Blocks of rank 0 and of its peers have other sizes."""
    problem = Problem(length=17, heads=4, kv_heads=4, dtype=torch.float32)
    largest = problem.inputs[0][:, :2, :9].numel() * 3 * 4  # rows of rank 0, of two heads of each of three tensors
    monkeypatch.setattr(point_to_point, "MOST_OVER_GLOO", largest)
    _, traces, _ = costs(problem, 2, "function", strategy=Ulysses(), layout=contiguous, mask=Causal())
    assert [trace.calls["all_to_all"] for trace in traces] == [4] * 2
    monkeypatch.setattr(point_to_point, "MOST_OVER_GLOO", largest - 1)
    _, traces, _ = costs(problem, 2, "function", strategy=Ulysses(), layout=contiguous, mask=Causal())
    assert [(trace.calls["all_to_all"], trace.calls["send"]) for trace in traces] == [(2, 2)] * 2


@pytest.mark.parametrize("strategy", [Ring(), AllGather(), Ulysses(), Ulysses(size=1)], ids=plain)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_is_nobody_elses_memory(strategy, ranks: int):
    """What a forward keeps for its backward would live as long as the output does, and change with it."""
    problem = Problem(length=LENGTH)

    def on(rank: int) -> bool:
        mesh = cp_mesh(ranks)
        leaves, _ = problem.shard(contiguous(LENGTH, ranks), rank, ranks)
        options = {"strategy": strategy, "layout": contiguous}
        doors = (partial(context_attention, mesh=mesh, **options), parallel(Core(causal=False), mesh, **options))
        outs = [attend(*(leaf.detach().requires_grad_() for leaf in leaves)) for attend in doors]
        return all(out.untyped_storage().nbytes() == out.nbytes for out in outs)

    assert run_ranks(on, ranks) == [True] * ranks


@pytest.mark.parametrize("strategy", [Ring(), Ring(keep=0), AllGather()], ids=plain)
@pytest.mark.parametrize("rows_first", [True, False])
def test_results_have_the_memory_order_of_one_device(strategy, rows_first: bool):
    """That of torch's own op: the output that of the query, gradients [B, L, H, D]. So a view of the output is a view
    on ranks too, and the projections around an attention copy nothing."""
    ranks, layout = 4, head_tail(LENGTH, 4)
    inputs = [torch.randn(1, LENGTH // ranks, 4, 8).transpose(1, 2) for _ in range(4)]

    def strides(attend) -> list[tuple[int, ...]]:
        *qkv, grad = (x.clone() if rows_first else x.contiguous() for x in inputs)
        qkv = [x.requires_grad_() for x in qkv]
        out = attend(*qkv)
        return [x.stride() for x in (out, *torch.autograd.grad(out, qkv, grad))]

    def on(rank: int) -> list[tuple[int, ...]]:
        mesh = cp_mesh(ranks)
        return strides(partial(context_attention, mesh=mesh, strategy=strategy, layout=layout, mask=Causal()))

    assert run_ranks(on, ranks) == [strides(partial(F.scaled_dot_product_attention, is_causal=True))] * ranks
