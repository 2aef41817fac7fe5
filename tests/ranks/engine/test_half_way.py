"""A rank leaves a forward, a backward or a collective by an error and goes on; backwards in another order on one rank.

All ranks raise soon, whatever the transport: over gloo the others stand still for this rank, over NCCL they run ahead.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pkgutil import resolve_name
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AllGather,
    Causal,
    Checks,
    Ring,
    Ulysses,
    context_attention,
    contiguous,
    global_loss,
    global_token_count,
    head_tail,
    save_attention,
    sum_gradients,
)
from cp_styles._lib.compat import cpu_backend_of
from cp_styles.batch import gradients
from cp_styles.collectives import (
    all_to_all,
    gather,
    heads_to_seq,
    reduce_scatter,
    seq_to_heads,
    split,
    sync_inputs,
)
from cp_styles.collectives.exchange import wait_received
from cp_styles.comm import point_to_point
from cp_styles.comm.agreement import Meeting, StatusRow, start_status
from cp_styles.comm.group_state import state_of
from cp_styles.comm.point_to_point import Mailbox, PendingTransfers, TransferError, end_connections
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.kernels import Kernel
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.mixers import Channels, Recurrence, context_recurrence
from cp_styles.mixers.recurrence import _KernelCall
from cp_styles.strategies.base import Strategy
from cp_styles.strategies.moving_kv import MovingKV
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel_unshard
from tests.covering import sampled
from tests.cuda_ops import ON_GPU
from tests.doors import door
from tests.gpu_tensors import BreaksRule, gpus, put
from tests.oracle import error as distance
from tests.oracle import randn
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, on_every_rank, refused
from tests.ranks.leak_scene import Stop, raising

RANKS, LENGTH = 3, 24
SOON = 60.0  # seconds, on a machine as busy as it may be; the groups' timeout is 300


class OutOfMemory(RuntimeError):
    """What a program catches, to skip a batch."""


@dataclass(frozen=True)
class Failing(Kernel):
    """Raises at one of the calls of ``inner``."""

    where: str = field(repr=False)
    inner: Kernel = CPU_FLASH
    left: list[int] = field(default_factory=lambda: [2], compare=False, repr=False)

    def forward(self, *args, **options):
        self._count("forward")
        return self.inner.forward(*args, **options)

    def backward(self, *args, **options):
        self._count("backward")
        return self.inner.backward(*args, **options)

    def _count(self, where: str) -> None:
        if where == self.where:
            self.left[0] -= 1
            if self.left[0] == 0:
                raise OutOfMemory

    def check(self, q, k, v, *, biased):
        self._count("check")
        self.inner.check(q, k, v, biased=biased)

    def tile_dtype(self, dtype):
        return self.inner.tile_dtype(dtype)


def caught(act: Callable[[], Any]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


Acts = tuple[Callable[[], Any], Callable[[], Any]]


def rank_1_leaves(ranks: int, acts: Callable[[int], Acts]) -> list[list[BaseException | None]]:
    """The errors of the two acts of each rank: rank 1 leaves its first act, and all ranks raise at once, and
    afterwards."""

    def on(rank: int) -> tuple[list[BaseException | None], float]:
        both, began = acts(rank), time.monotonic()
        return [caught(act) for act in both], time.monotonic() - began

    found = run_ranks(on, ranks)
    for rank, ((first, second), seconds) in enumerate(found):
        assert isinstance(first, OutOfMemory if rank == 1 else TransferError), first
        assert isinstance(second, TransferError), second
        assert seconds < SOON
    return [errors for errors, _ in found]


STRATEGIES = [Ring(), Ring(keep=0), AllGather(), Ulysses()]


def last_call(strategy: Strategy) -> list[int]:
    """The call of the kernel that fails: the second one, where there are two."""
    return [1 if isinstance(strategy, Ulysses) else 2]


@sampled(
    1,
    strategy=STRATEGIES,
    way=["forward", "backward"],
    checks=[Checks(), Checks(agreement=False)],
    most_over_gloo=[0, 2**18],
)
def test_one_rank_leaves_half_way_and_goes_on(strategy, way: str, checks, most_over_gloo: int, monkeypatch):
    monkeypatch.setattr(point_to_point, "MOST_OVER_GLOO", most_over_gloo)
    layout = head_tail(LENGTH, RANKS)
    problem = Problem(length=LENGTH, heads=6, kv_heads=6)

    def acts(rank: int) -> Acts:
        options = {"mask": Causal(), "layout": layout, "strategy": strategy, "checks": checks}
        attend = partial(context_attention, mesh=cp_mesh(RANKS), **options)
        leaves, cotangent = problem.shard(layout, rank, RANKS)
        kernel = Failing(way if rank == 1 else "nowhere", left=last_call(strategy))
        return lambda: attend(*leaves, kernel=kernel).backward(cotangent), lambda: attend(*leaves)

    found = rank_1_leaves(RANKS, acts)
    for rank, (first, _) in enumerate(found):
        words = rf"context_attention \(mesh axis 'cp'\): on rank {rank}, a transfer with rank [\d, ]+ \(of all"
        assert rank == 1 or re.match(words, str(first)), first
    assert "this rank has left an operation of the ranks half way, by OutOfMemory" in str(found[1][1])


def test_one_rank_leaves_between_the_agreement_and_its_first_message():
    """Its peers have its row, and wait for its keys."""

    def acts(rank: int) -> Acts:
        layout, mesh = head_tail(LENGTH, RANKS), cp_mesh(RANKS)
        leaves = Problem(length=LENGTH, heads=6, kv_heads=6).shard(layout, rank, RANKS)[0]
        kernel = Failing("check" if rank == 1 else "", left=[1])
        attend = partial(context_attention, *leaves, mesh, layout=layout, kernel=kernel)
        return attend, attend

    rank_1_leaves(RANKS, acts)


@on_every_rank(RANKS)
def test_ranks_that_all_refuse_a_call_can_go_on(mesh, rank: int):
    """A kernel that takes no such tensors says so on every rank, after the agreement."""
    layout, problem = head_tail(LENGTH, RANKS), Problem(length=LENGTH, heads=6, kv_heads=6)
    leaves = problem.shard(layout, rank, RANKS)[0]
    attend = partial(context_attention, mesh=mesh, mask=Causal(), layout=layout)

    @dataclass(frozen=True)
    class Refusing(Failing):
        def check(self, q, k, v, *, biased):
            raise NotImplementedError("no such head dim")

    with pytest.raises(NotImplementedError, match="no such head dim"):
        attend(*leaves, kernel=Refusing(""))
    assert distance(attend(*leaves), layout.shard(problem.expected[0], 2, rank)) < EXACT


def test_a_rank_that_hears_of_the_end_passes_it_on():
    """Rank 1 ends its connections. Rank 0 hears of it and ends its own, though its next peer is rank 1. Rank 2 waits
    for rank 0 alone."""
    last = threading.Event()

    def on(rank: int) -> float:
        group, message = dist.group.WORLD, torch.zeros(1)
        gloo = cpu_backend_of(group, "gloo")
        peer = {0: 1, 1: 0, 2: 0}[rank]
        receive = group.recv([message], peer, 7)
        dist.barrier()
        began = time.monotonic()
        if rank != 1:
            with pytest.raises(RuntimeError):
                receive.wait()
        end_connections(gloo)
        if rank == 2:
            last.set()
        last.wait(SOON)  # a rank that returns ends its connections in any case
        return time.monotonic() - began

    assert max(run_ranks(on, 3)) < SOON


@sampled(1, strategy=STRATEGIES, way=["forward", "backward"])
def test_ranks_that_do_not_stand_still_for_one_that_has_left(strategy, way: str):
    """As over NCCL: a wait does not hold the host, and messages match by order. The others compute with what has not
    come, and read at their next meeting that a rank has left."""
    layout = head_tail(LENGTH, RANKS)
    problem = Problem(length=LENGTH, heads=6, kv_heads=6)

    def on(rank: int) -> list[BaseException | None]:
        attend = partial(context_attention, mesh=dist.group.WORLD, mask=Causal(), layout=layout, strategy=strategy)
        given = [put(x) for x in problem.shard(layout, rank, RANKS)[0]]
        cotangent = put(problem.shard(layout, rank, RANKS)[1])
        kernel = Failing(way if rank == 1 else "nowhere", ON_GPU, last_call(strategy))
        return [
            caught(lambda: attend(*given, kernel=kernel).backward(cotangent)),
            caught(lambda: attend(*given, kernel=ON_GPU)),
            caught(lambda: attend(*given, kernel=ON_GPU)),
        ]

    # A forward that moves keys of three ranks has sent everything before its second kernel: nobody waits for a message.
    owes = not (isinstance(strategy, MovingKV) and way == "forward")
    waits = pytest.raises(BreaksRule, match="wait for each other") if owes else contextlib.nullcontext()
    with waits, gpus(nccl_only=True, runs_ahead=True):
        found = run_ranks(on, RANKS)
    assert isinstance(found[1][0], OutOfMemory)
    for rank, errors in enumerate(found):
        # A rank that had still to come to the meeting before the backward hears of it there.
        assert rank == 1 or isinstance(errors[0], TransferError | None)
        assert all(isinstance(error, TransferError) for error in errors[1:])


class FailsAt:
    """Counts what it does down to an error. 0: there is none."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OutOfMemory


class Derived(torch.autograd.Function):
    """forward: x; counts backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: FailsAt) -> torch.Tensor:
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.count()
        return grad, None


def recurrent(
    forward: FailsAt, backward: FailsAt, between: FailsAt
) -> Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]:
    """A recurrence whose states are sums of the outer products of keys and values."""

    def kernel(q, k, v, initial_state=None, output_final_state=False):
        forward()
        state = k.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[3]) if initial_state is None else initial_state
        state = Derived.apply(state + k.sum(1)[..., None] * v.sum(1)[..., None, :], backward)
        return torch.einsum("blhk,bhkv->blhv", q, state), state

    kernel.between = between  # pyright: ignore[reportFunctionMemberAccess]
    scan = partial(context_recurrence, kernel, recurrence=Recurrence(), layout=contiguous)
    return lambda x, group: scan(mesh=group)(x, x, x)[0]


def by_channels(
    forward: FailsAt, backward: FailsAt, _: FailsAt
) -> Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]:
    def kernel(u):
        forward()
        return Derived.apply(u.cumsum(1), backward)

    scan = partial(context_recurrence, kernel, recurrence=Channels(("u",), seq_dim=1), layout=contiguous)
    return lambda x, group: scan(mesh=group)(x.flatten(2))


# Which call of the kernel fails, or of its backward, or of that between two exchanges of a recurrence.
MIXERS = [
    *[(recurrent, (1, 0, 0)), (recurrent, (0, 1, 0)), (recurrent, (0, 0, 1))],
    *[(by_channels, (1, 0, 0)), (by_channels, (0, 1, 0))],
]


@pytest.mark.parametrize(("mixer", "when"), MIXERS)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_one_rank_leaves_a_mixer(mixer: Any, when: tuple[int, int, int], runs_ahead: bool, monkeypatch):
    """In a kernel that runs before an exchange or between two: all ranks raise, there or at their next meeting."""

    def on(rank: int) -> tuple[list[BaseException | None], float]:
        call, there = mixer(*map(FailsAt, when if rank == 2 else (0, 0, 0))), put if runs_ahead else torch.Tensor.clone
        group, began = dist.group.WORLD, time.monotonic()

        def step() -> None:
            x = there(randn(rank, 1, 3, 4, 4)).requires_grad_()
            call(x, group).sum().backward()

        errors = [caught(step)]
        if rank == 2 or errors[0] is None:
            errors.append(caught(step))
        return errors, time.monotonic() - began

    def after(call: Any, *states: torch.Tensor) -> torch.Tensor:
        return Derived.apply(composed(call, *states), call.kernel.between)

    composed = _KernelCall.compose
    monkeypatch.setattr(_KernelCall, "compose", after)
    with gpus(nccl_only=True, runs_ahead=True, verified=False) if runs_ahead else contextlib.nullcontext():
        found = run_ranks(on, 4)
    for rank, (errors, seconds) in enumerate(found):
        assert isinstance(errors[0], OutOfMemory if rank == 2 else TransferError | ValueError | None)
        assert isinstance(errors[-1], TransferError | ValueError), errors
        assert seconds < SOON


class EndedReceive:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


class ForgottenSend:
    """As gloo leaves a send of which a part was written, when the process at the other end is killed."""

    def wait(self) -> None:
        raise AssertionError("waits for the timeout of the group")


@on_every_rank(2)
def test_a_rank_that_sends_and_receives_hears_of_an_end_by_what_it_receives():
    x = torch.empty(1)
    pending = PendingTransfers([ForgottenSend(), EndedReceive()], [(True, 0, x), (False, 1, x)], dist.group.WORLD)
    with pytest.raises(TransferError, match="Connection closed by peer"):
        pending.wait()


def attends(*shapes: tuple[int, int], **options: Any) -> Callable[[], object]:
    """Attends with query, key and value of these numbers of heads and positions, of which all ranks have the first two
    alike, as a text that is whole on each."""

    def act() -> object:
        own = ((randn(1, 1, heads, 2, 8), randn(2 + dist.get_rank(), 1, heads, rows - 2, 8)) for heads, rows in shapes)
        return context_attention(*(torch.cat(both, 2) for both in own), cp_mesh(4), **options)

    return act


OF_KEYS: dict[str, Callable[[], object]] = {
    "ring": attends(*[(4, 4)] * 3),
    "two messages": attends((4, 4), (4, 6), (4, 6), strategy=Ulysses(), layout=contiguous),
    "two levels": attends(*[(4, 4)] * 3, strategy=Ulysses(size=2), layout=contiguous),
    "whole tokens": attends(*[(4, 6)] * 3, layout=JointLayout(prefix=2)),
}
OF_TENSORS: dict[str, Callable[[], object]] = {
    "gather": lambda: gather(randn(1, 4, 6), 1, dist.group.WORLD, reduce_gradients=False),
    "async_op": lambda: all_to_all(randn(1, 4, 3), 0, 1, dist.group.WORLD, async_op=True).wait(),
    "context_parallel_unshard": lambda: context_parallel_unshard(cp_mesh(4), [randn(1, 4, 6)], [1], contiguous),
}


@pytest.mark.parametrize(
    ("act", "at"),
    [
        *product(OF_KEYS, ["makes_batches", "PendingTransfers.wait"]),
        *product(OF_TENSORS, ["collectives.exchange.wait_received"]),
    ],
)
def test_an_error_of_a_transfer_keeps_no_group(act: str, at: str):
    """If the variables of its frames are cleared. What a function inside of a function has captured is none of them.

    Not of a module: torch's own such function, in ``Module._call_impl``, captures the module with its hooks.
    """
    groups: list[weakref.ref[dist.ProcessGroup]] = []

    def on(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        try:
            (OF_KEYS | OF_TENSORS)[act]()
        finally:
            groups.extend(map(weakref.ref, (group, *state_of(group).parts.values())))

    def fail(*args: Any) -> NoReturn:
        if at.endswith("wait_received"):
            # Gloo's thread has ended when this wait raises. Else the end of the group would wait for the thread, which
            # may send a message to a rank that has left, and would do so until the timeout.
            wait_received(*args)
        raise TransferError("ended")

    where = "" if at.startswith("collectives") else "comm.point_to_point."
    with mock.patch(f"cp_styles.{where}{at}", fail):
        errors = run_ranks(on, 4, return_errors=True)
    assert all(isinstance(error, TransferError) for error in errors), errors
    assert not any(group() for group in groups)


def test_an_error_between_two_backwards():
    """The rank that has left comes to its next attention while the others are in the backward of the first."""
    layout = head_tail(LENGTH, RANKS)
    problem = Problem(length=LENGTH)

    def on(rank: int) -> tuple[BaseException | None, BaseException | None, float]:
        attend = partial(context_attention, mesh=cp_mesh(RANKS), mask=Causal(), layout=layout)
        leaves, cotangent = problem.shard(layout, rank, RANKS)
        between = attend(*leaves) * 1.0

        def fail(grad: torch.Tensor) -> None:
            raise OutOfMemory

        if rank == 1:
            between.register_hook(fail)
        began = time.monotonic()
        first = caught(lambda: attend(between, between, between).backward(cotangent))
        second = caught(lambda: attend(*leaves)) if rank == 1 else None
        return first, second, time.monotonic() - began

    (first, _, _), (own, second, _), (third, _, _) = found = run_ranks(on, RANKS)
    assert isinstance(own, OutOfMemory)
    for each in (first, second, third):
        assert "rank 0 is in a backward (call 1 over these ranks), rank 1 is about to attend" in str(each)
    assert max(seconds for *_, seconds in found) < SOON


COLLECTIVES = {
    "all_to_all": lambda x, group: all_to_all(x, 0, 1, group),
    "all_to_all, async": lambda x, group: all_to_all(x, 0, 1, group, async_op=True).wait(),
    "split": lambda x, group: split(x, 0, group),
    "gather": lambda x, group: gather(x, 0, group, reduce_gradients=True),
    "reduce_scatter": lambda x, group: reduce_scatter(x, 0, group),
    "seq_to_heads": lambda x, group: seq_to_heads(x, group, seq_dim=0, heads_dim=1),
    "heads_to_seq": lambda x, group: heads_to_seq(x, group, heads=6, seq_dim=0, heads_dim=1),
}


@pytest.mark.parametrize("which", COLLECTIVES)
def test_collectives_whose_backwards_run_in_another_order(which: str):
    def act(rank: int, mesh: Any) -> None:
        x, y = (torch.randn(6, 2 if which == "heads_to_seq" else 6, requires_grad=True) for _ in range(2))
        results = [(COLLECTIVES[which](each, mesh), each) for each in (x, y)]
        for out, each in results if rank else reversed(results):
            torch.autograd.grad(out.sum(), each)

    words = r"in the backward of a function of cp_styles.collectives \(call 2 over these ranks\), rank 1"
    refused(act, words, ranks=RANKS)


DOORS = ["style", "module", "function", "flex"]


@sampled(1, which=DOORS, strategy=STRATEGIES, how=["plain", "checkpoint", "selective"])
def test_backwards_in_another_order_on_one_rank(which: str, strategy, how: str):
    """Of two attentions of equal shapes: all ranks raise, before the first gradient."""
    layout = head_tail(LENGTH, RANKS)
    problem = Problem(length=LENGTH, heads=6, kv_heads=6)

    def act(rank: int, mesh: Any) -> None:
        attend = door(which, mesh, layout=layout, strategy=strategy)
        if how != "plain":
            options = {"context_fn": save_attention()} if how == "selective" else {}
            attend = partial(checkpoint, attend, use_reentrant=False, **options)
        calls = []
        for _ in range(2):
            leaves, cotangent = problem.shard(layout, rank, RANKS)
            calls.append((attend(*leaves), leaves, cotangent))
        for out, leaves, cotangent in calls if rank else reversed(calls):
            torch.autograd.grad(out, leaves, cotangent)

    words = r"rank 0 is in a backward \(call 2 over these ranks\), rank 1 is in a backward \(call 1 over"
    refused(act, words, ranks=RANKS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_agreement_backwards_may_not_run_in_another_order(strategy: Strategy):
    """Gloo tells the messages of two backwards apart, so the ranks wait for each other, and no gradient is wrong."""
    layout, ranks = head_tail(LENGTH, 2), 2
    problem = Problem(length=LENGTH)

    def on(rank: int) -> None:
        options = {"layout": layout, "strategy": strategy, "checks": Checks(agreement=False)}
        attend = door("function", cp_mesh(ranks), **options)
        for step in range(2):
            calls = []
            for _ in range(3):
                leaves, cotangent = problem.shard(layout, rank, ranks)
                calls.append((attend(*leaves), leaves, cotangent))
            order = (0, 2, 1) if rank and step == 1 else (0, 1, 2)
            for index in order:
                out, leaves, cotangent = calls[index]
                torch.autograd.grad(out, leaves, cotangent)

    errors = run_ranks(on, ranks, timeout_seconds=4.0, return_errors=True, may_time_out=True)
    assert all(isinstance(error, TransferError) for error in errors)


def summed(group: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    sum_gradients([weight], group)


def decoded(group: Any) -> None:
    layout, x = head_tail(0, group.size()), torch.ones(1, 2, 1, 4)
    cache = KVCache(group, layout, x[:, :, :0], x[:, :, :0])
    for _ in range(group.size()):  # so that each rank has a key
        cache.append(x, x)
    context_decode(x, cache)


WITHOUT_ATTENTION = {
    "global_token_count": lambda group: global_token_count(torch.ones(3, dtype=torch.long), group),
    "global_loss": lambda group: global_loss(torch.ones(3), 9, group),
    "sum_gradients": summed,
    "context_decode": decoded,
    "cp_styles.collectives": lambda group: list(sync_inputs({"text": 1}, group)),
}


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_a_peer_has_ended_before_a_function_without_attention(name: str):
    def on(rank: int) -> tuple[BaseException | None, BaseException | None, float]:
        group, began = cp_mesh(RANKS).get_group(), time.monotonic()
        if rank == 1:
            return None, None, 0.0
        first = caught(lambda: WITHOUT_ATTENTION[name](group))
        return first, caught(lambda: WITHOUT_ATTENTION[name](group)), time.monotonic() - began

    for rank, (first, second, seconds) in enumerate(run_ranks(on, RANKS)):
        if rank != 1:
            assert isinstance(first, TransferError), first
            assert name in str(first)
            assert "that rank has ended, or left an operation" in str(first)
            assert isinstance(second, TransferError)
        assert seconds < SOON


@pytest.mark.parametrize("at", ["side_effect", "return_value.wait.side_effect"])
def test_a_rank_leaves_while_samples_are_on_their_way(at: str):
    with mock.patch.object(dist, "broadcast", **{at: RuntimeError("Connection closed by peer")}):
        refused(lambda _, mesh: list(sync_inputs(torch.ones(4), mesh)), r"sync_inputs \(mesh axis", TransferError)


def twice(act: Callable[[Any], Any]) -> Callable[[Any], Acts]:
    return lambda group: (partial(act, group), partial(act, group))


def collective(which: str, way: str, group: Any) -> Acts:
    call = partial(COLLECTIVES[which], torch.randn(8, 8, requires_grad=True), group)
    out = call()
    return call if way == "forward" else lambda: out.sum().backward(), call


# Where in a function rank 1 fails.
WITH_MESSAGES: dict[str, tuple[str, Callable[[Any], Acts]]] = {
    "sum_gradients": ("cp_styles.batch.gradients._sum_bucket", twice(summed)),
    "context_decode": ("cp_styles.functions.decode._find_visible_keys", twice(decoded)),
    "context_decode, its part": ("cp_styles.functions.decode._compute_part", twice(decoded)),
    "whole tokens": ("cp_styles.functions.joint_layout.JointLayout.whole", twice(lambda _: OF_KEYS["whole tokens"]())),
    **{f"{which}, {way}": ("cp_styles.collectives.exchange.Blocks.pack", partial(collective, which, way))
       for which in ("all_to_all", "all_to_all, async") for way in ("forward", "backward")},
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_MESSAGES)
def test_one_rank_leaves_a_function_that_communicates(name: str, monkeypatch):
    at, prepare = WITH_MESSAGES[name]
    fails, real = threading.local(), resolve_name(at)

    def run_or_fail(*args: Any) -> Any:
        if getattr(fails, "now", False):
            fails.now = False
            raise OutOfMemory
        return real(*args)

    def acts(rank: int) -> Acts:
        both = prepare(cp_mesh(4).get_group())
        fails.now = rank == 1
        return both

    monkeypatch.setattr(at, run_or_fail)
    rank_1_leaves(4, acts)


@on_every_rank(RANKS)
def test_one_rank_refuses_where_ranks_do_not_agree(mesh, rank: int):
    """The others attend, and its next call must not answer them."""
    layout = head_tail(LENGTH, RANKS)
    attend = partial(context_attention, mesh=mesh, layout=layout, checks=Checks(agreement=False))
    q, k, v = Problem(length=LENGTH).shard(layout, rank, RANKS)[0]
    told = "must share one floating-point dtype" if rank == 1 else None
    with pytest.raises(ValueError if rank == 1 else TransferError, match=told):
        attend(q, k.float() if rank == 1 else k, v)
    with pytest.raises(TransferError):
        attend(q, k, v)


@pytest.mark.parametrize("when", ["saying what it calls", "waiting for the others"])
def test_an_interrupt_in_an_agreement(when: str):
    """The program of rank 1 catches it, and goes on with its next call. The others must not take that for this one."""

    def on(rank: int) -> tuple[BaseException | None, BaseException | None, float]:
        group, began = cp_mesh(RANKS).get_group(), time.monotonic()

        def agree() -> None:
            start_status(StatusRow, Meeting.ATTENTION, "attention", "cp", group)()

        def interrupted() -> None:
            if when == "saying what it calls":
                start_status(raising(Stop()), Meeting.ATTENTION, "attention", "cp", group)()
            started = start_status(StatusRow, Meeting.ATTENTION, "attention", "cp", group)
            started.gathered = raising(Stop())
            started()

        agree()
        first = None
        try:
            (interrupted if rank == 1 else agree)()
        except BaseException as error:
            first = error
        return first, caught(agree), time.monotonic() - began

    results = run_ranks(on, RANKS)
    for rank, (first, second, seconds) in enumerate(results):
        if rank == 1:
            assert isinstance(first, Stop)
            assert "left an operation of the ranks half way, by Stop" in str(second)
        elif when == "saying what it calls":  # otherwise they may have its row already
            assert isinstance(first, TransferError)
            assert "attention (mesh axis 'cp')" in str(first)
        assert isinstance(second, TransferError)
        assert seconds < SOON


def test_an_interrupt_while_a_rank_reads_why_another_one_failed():
    """Rank 1 waits until its peers have its reason, and they never ask for it."""

    def on(rank: int) -> tuple[type, type, float]:
        group, began = cp_mesh(RANKS).get_group(), time.monotonic()
        where = Meeting.ATTENTION, "attention", "cp", group
        try:
            start_status(raising(ValueError("of rank 1")) if rank == 1 else StatusRow, *where)()
        except BaseException as error:
            first = type(error)
        second = caught(lambda: start_status(StatusRow, *where)())
        return first, type(second), time.monotonic() - began

    with mock.patch.object(Mailbox, "read_text", side_effect=Stop):
        found = run_ranks(on, RANKS)
    assert [first for first, *_ in found] == [Stop, ValueError, Stop]
    assert {second for _, second, _ in found} == {TransferError}
    assert all(seconds < SOON for *_, seconds in found)


def test_gradients_of_which_some_are_summed_are_given_to_no_optimizer(monkeypatch):
    fails, sum_bucket = threading.local(), gradients._sum_bucket

    def sum_or_fail(*args: Any) -> None:
        fails.left -= 1
        if fails.left == 0:
            raise OutOfMemory
        sum_bucket(*args)

    def on(rank: int) -> list[torch.Tensor | None]:
        fails.left = 2 if rank == 1 else -1
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        assert caught(lambda: sum_gradients(parameters, cp_mesh(RANKS), bucket_bytes=8)) is not None
        return [parameter.grad for parameter in parameters]

    monkeypatch.setattr(gradients, "_sum_bucket", sum_or_fail)
    assert run_ranks(on, RANKS) == [[None] * 3] * RANKS
