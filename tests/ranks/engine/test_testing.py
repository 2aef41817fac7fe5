"""Ranks as threads: how run_ranks reports a rank that is blocked until the timeout, and a seed for all ranks."""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo import eval_frame
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _device, _python_dispatch

from cp_styles import testing
from cp_styles.testing import CommunicationTrace, RankError, RankTimeout, SharedSeedError, run_ranks


class Waits:
    """Rank 0 waits until its timeout for rank 1, which does not end before."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __call__(self, rank: int) -> str:
        if rank == 1:
            self.ended.wait(60)
            return "came late"
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            return "caught"
        finally:
            self.ended.set()
        return "heard"


def test_a_timeout_that_was_caught_fails_all_the_same():
    with pytest.raises(RankTimeout, match="until the timeout of 3"):
        run_ranks(Waits(), 2, timeout_seconds=3)


def test_a_timeout_that_is_expected():
    assert run_ranks(Waits(), 2, timeout_seconds=3, may_time_out=True) == ["caught", "came late"]


@pytest.mark.parametrize(("before", "first", "waited"), [(0.0, 0.6, True), (0.5, 0.6, False), (0.0, 1.0, False)])
def test_a_wait_that_a_busy_machine_sees_late(before: float, first: float, waited: bool):
    """It may have begun at 0; it has not begun before 0.5; too little of it was seen."""
    code = test_a_wait_that_a_busy_machine_sees_late.__code__
    look = testing._Look((0, code, 0), "line", before, first, last=3.0)
    assert look.waited(3.0, now=3.1) == waited


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


LEFT_SET = {
    "dispatch modes": (CommunicationTrace, _python_dispatch.is_in_any_mode_without_ignore_compile_internals),
    "default devices": (default_device, lambda: _device.CURRENT_DEVICE),
}


@pytest.mark.parametrize("what", LEFT_SET)
def test_what_ends_in_turns_leaves_nothing_set(what):
    """The second one to end puts back what was set while the first one ran. torch.compile guards it."""
    enter, is_set = LEFT_SET[what]
    turn = [threading.Event() for _ in range(3)]

    def on(rank: int) -> None:
        first, second, third = turn
        if rank == 0:
            with enter():
                first.set()
                second.wait(10)
            third.set()
        else:
            first.wait(10)
            with enter():
                second.set()
                third.wait(10)

    assert not is_set()
    run_ranks(on, 2)
    assert not is_set()


class Switch:
    """Rank 1 seeds and draws between the seed and the draw of rank 0, always."""

    def __init__(self) -> None:
        self.seeded, self.drawn = threading.Event(), threading.Event()

    def __call__(self, rank: int) -> torch.Tensor:
        if rank == 1:
            assert self.seeded.wait(10)
        torch.manual_seed(0)
        if rank == 0:
            self.seeded.set()
            assert self.drawn.wait(10)
        drawn = torch.randn(3)
        self.drawn.set()
        return drawn


def test_higher_order_operators_on_threads_leave_graph_breaks_alone():
    """Such an operator sets a count of the process, and the second one to end puts back the first one's. Behind a graph
    break torch.compile then compiles nothing. (Two calls of torch.cond in turns would not be certain to leave it.)"""
    run_ranks(lambda rank: getattr(eval_frame, "set_fullgraph_compiled_frame_count", id)(0), 2)
    counter = CompileCounterWithBackend("eager")

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(step, backend=counter)(torch.ones(2))
    assert counter.frame_count == 2


def test_a_seed_on_a_rank_of_several_is_an_error():
    """Whether the threads switched between the seed and the draw or not."""
    first, second = run_ranks(Switch(), 2, may_seed=True)
    assert not torch.equal(first, second)  # two ranks with one seed, and not one number is equal
    for main in (Switch(), lambda rank: torch.manual_seed(rank), lambda rank: rank or torch.seed()):
        with pytest.raises(SharedSeedError, match=r"Seed and draw before run_ranks.* torch.Generator"):
            run_ranks(main, 2)
    with pytest.raises(SharedSeedError) as caught:
        run_ranks(lambda rank: torch.manual_seed(0) and 1 / 0, 2, return_errors=True)
    assert isinstance(caught.value.__cause__, RankError)
    assert run_ranks(lambda rank: torch.manual_seed(3) and torch.rand(()).item(), 1) == [
        torch.rand((), generator=torch.Generator().manual_seed(3)).item()
    ]


def test_draws_and_seeds_that_are_put_back_are_no_error():
    def forks(rank: int) -> None:
        if rank == 0:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)

    torch.manual_seed(5)
    state = torch.get_rng_state()
    for main in (lambda rank: None, forks, lambda rank: torch.Generator().manual_seed(rank)):
        run_ranks(main, 2)
        assert torch.equal(torch.get_rng_state(), state)
    first = run_ranks(lambda rank: rank or torch.rand(4), 2)[0]
    assert not torch.equal(run_ranks(lambda rank: rank or torch.rand(4), 2)[0], first)
    torch.manual_seed(5)
    assert torch.equal(run_ranks(lambda rank: rank or torch.rand(4), 2)[0], first)


def test_a_rank_ends_while_another_one_holds_its_table():
    """As gc.get_objects() holds it. Without Python's lock, torch would destroy what DTensor has cached for the thread,
    and the process would be aborted (seen on 2.14; on 2.13 in one of twenty runs)."""
    noted, held = threading.Event(), threading.Event()
    first: list[threading.Thread] = []

    def on(rank: int) -> None:
        x = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()])
        assert torch.equal((x + x).to_local(), torch.full((4,), 2.0))
        repr([[rank]])  # puts a list into the thread's table, which the garbage collector looks at from then on
        if rank == 0:
            first.append(threading.current_thread())
            noted.set()
            held.wait(60)
        else:
            noted.wait(60)
            tables = [x for x in gc.get_objects() if type(x) is dict and any("DTensor" in str(key) for key in x)]
            held.set()
            first[0].join()
            assert tables or torch.__version__ < "2.13"

    run_ranks(on, 2)


def test_an_error_shows_its_lines_and_holds_nothing():
    """Variables and closures of its frames would hold groups, whose threads would live as long as the error."""
    held: list[weakref.ref[nn.Module]] = []

    def on(rank: int) -> None:
        module, group = nn.Linear(2, 2), dist.group.WORLD
        held.append(weakref.ref(module))

        def inner() -> None:
            raise KeyError(module, group) if rank > 1 else ValueError("of a forward")

        module.register_forward_hook(lambda *_: inner())  # torch calls it in a closure that holds the module
        module(torch.ones(2))

    errors = run_ranks(on, 2, return_errors=True)
    assert [reference() for reference in held] == [None, None]
    for error in errors:
        lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)]
        assert lines[-1] == 'raise KeyError(module, group) if rank > 1 else ValueError("of a forward")'
        assert "module(torch.ones(2))" in lines
        assert all(not frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
