"""all_to_all: bitwise against parts cut by hand, exact bytes, exact adjoint, and the forms it can be called in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles import Checks
from cp_styles.collectives import Pending, all_to_all
from cp_styles.collectives.exchange import Exchange
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import randn
from tests.ranks.collectives.collectives_reference import RANKS, SIZE, adjoint_gap, cut, parts, world


@st.composite
def problems(draw: st.DrawFn):
    """(shape, scatter dim, gather dim, sizes of both): any two dims of one to four more, in either order."""
    ranks = draw(RANKS)
    scatter_sizes, gather_sizes = draw(cut(ranks)), draw(cut(ranks))
    shape = draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    scatter, gather = draw(st.permutations(range(len(shape))))[:2]
    shape[scatter], shape[gather] = sum(scatter_sizes), sum(gather_sizes)
    return tuple(shape), scatter, gather, scatter_sizes, gather_sizes


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in another order in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


@settings(max_examples=15, deadline=None)
@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_cuts_one_dim_and_joins_the_other(problem, dtype):
    shape, scatter, gather, scatter_sizes, gather_sizes = problem
    whole = randn(0, *shape, dtype=dtype)
    mine, expected = parts(whole, gather_sizes, gather), parts(whole, scatter_sizes, scatter)

    def main(rank):
        for x in (mine[rank], strided(mine[rank])):
            with CommunicationTrace() as trace:
                y = all_to_all(
                    x, scatter, gather - len(shape), world(),
                    scatter_sizes=scatter_sizes, gather_sizes=gather_sizes, checks=Checks(agreement=False),
                )  # fmt: skip
            assert y.is_contiguous()
            # What this rank has of the parts of the others, and nothing else.
            others = mine[rank].numel() - mine[rank].narrow(scatter, 0, scatter_sizes[rank]).numel()
            assert trace.sent_bytes == others * whole.element_size()
            assert sum(trace.calls.values()) == (len(mine) > 1)
        back = all_to_all(y, gather, scatter, world(), scatter_sizes=gather_sizes)
        return y, back

    for rank, (y, back) in enumerate(run_ranks(main, len(mine))):
        assert torch.equal(y, expected[rank]), "forward"
        assert torch.equal(back, mine[rank]), "round trip"


@settings(max_examples=9, deadline=None)
@given(problem=problems(), async_op=st.booleans())
def test_backward_is_the_adjoint(problem, async_op):
    shape, scatter, gather, scatter_sizes, gather_sizes = problem
    mine = parts(randn(0, *shape), gather_sizes, gather)

    def fn(x):
        y = all_to_all(x, scatter, gather, world(), scatter_sizes=scatter_sizes, async_op=async_op)
        return y.wait() if async_op else y

    assert adjoint_gap(fn, [[x] for x in mine]) < 1e-13


@settings(max_examples=8, deadline=None)
@given(ranks=RANKS, scatter=SIZE, gather=SIZE)
def test_remainders_go_to_the_first_ranks(ranks, scatter, gather):
    whole = randn(0, scatter, 2, gather)
    mine, expected = whole.tensor_split(ranks, 2), whole.tensor_split(ranks, 0)
    for rank, y in enumerate(run_ranks(lambda rank: all_to_all(mine[rank], 0, 2, world()), ranks)):
        assert torch.equal(y, expected[rank])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.complex64, torch.float8_e4m3fn, torch.int8, torch.int16, torch.uint16], ids=str
)
def test_dtypes_that_gloo_does_not_know_travel_as_bytes(dtype):
    whole = randn(0, 3, 5).mul(8).to(dtype)
    mine, expected = whole.tensor_split(2, 1), whole.tensor_split(2, 0)
    for rank, y in enumerate(run_ranks(lambda rank: all_to_all(mine[rank], 0, 1, world()), 2)):
        assert torch.equal(y.view(torch.uint8), expected[rank].contiguous().view(torch.uint8))


class Copies(TorchDispatchMode):
    """Counts the elements that are copied on this rank, the exchange itself aside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten.cat):
            self.elements += out.numel()
        return out


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("scatter", "gather"), [(1, 2), (2, 1)])
def test_copies_once_on_each_side_and_once_in_all_without_a_batch(scatter, gather, batch, ranks):
    shape = [batch, 6, 6, 4]
    shape[gather] = 6 // ranks

    def main(rank):
        x = randn(rank, *shape)
        with Copies() as copies:
            all_to_all(x, scatter, gather, world(), checks=Checks(agreement=False))
        return copies.elements / x.numel()

    assert run_ranks(main, ranks) == [1 if batch == 1 else 2] * ranks


def test_second_derivative():
    """The backward is differentiable: an all-to-all again."""
    mine = parts(randn(0, 4, 3, 5), (2, 3), 2)

    def main(rank):
        x = mine[rank].clone().requires_grad_()
        fn = lambda x: all_to_all(x.sin(), 0, 2, world())  # noqa: E731
        weights = randn(7 + rank, *fn(x).shape)
        (grad,) = torch.autograd.grad((fn(x) ** 3 * weights).sum(), x, create_graph=True)
        direction = randn(17 + rank, *x.shape)
        (hessian_times_direction,) = torch.autograd.grad((grad * direction).sum(), x)
        whole_weights = all_to_all(weights, 2, 0, world(), scatter_sizes=(2, 3))
        local = x.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad((local.sin() ** 3 * whole_weights).sum(), local, create_graph=True)
        (expected,) = torch.autograd.grad((expected * direction).sum(), local)
        torch.testing.assert_close(hessian_times_direction, expected, rtol=1e-13, atol=1e-13)

    run_ranks(main, 2)


def test_async_sends_at_once_and_receives_in_wait_and_in_the_backward_likewise(monkeypatch):
    """Work done between call and wait() lies between the two halves, in the forward and in the backward."""
    log: list[list[str]] = [[], []]

    def logged(name):
        original = getattr(Exchange, name)

        def method(self, *args):
            log[self.peers.rank].append(name)
            return original(self, *args)

        return method

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rank):
            ctx.rank = rank
            log[rank].append("work")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            log[ctx.rank].append("work")
            return grad, None

    for name in ("start", "finish"):
        monkeypatch.setattr(Exchange, name, logged(name))

    def main(rank):
        x, other = (randn(seed + rank, 4, 2).requires_grad_() for seed in (0, 5))
        pending = all_to_all(x, 0, 1, world(), async_op=True)
        assert isinstance(pending, Pending)
        worked = Work.apply(other, rank)
        y = pending.wait()
        assert pending.wait() is y
        assert torch.equal(y, all_to_all(x, 0, 1, world()))
        log[rank].append("backward")
        (y.sum() * worked.sum()).backward()

    run_ranks(main, 2)
    assert log[0] == log[1] == ["start", "work", "finish", "start", "finish", "backward", "start", "work", "finish"]


@pytest.mark.parametrize("kind", ["group", "mesh", "axis"])
def test_every_form_of_group(kind):
    whole = randn(0, 4, 2, 6)

    def main(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        group = {"group": mesh.get_group("cp"), "mesh": mesh["cp"], "axis": (mesh, "cp")}[kind]
        at = rank % 2
        return all_to_all(whole.tensor_split(2, 2)[at] + rank // 2, 0, 2, group)

    for rank, y in enumerate(run_ranks(main, 4)):
        assert torch.equal(y, whole.tensor_split(2, 0)[rank % 2] + rank // 2)


@pytest.mark.parametrize("async_op", [False, True])
def test_no_group_is_the_identity(async_op):
    x = randn(0, 4, 3)
    y = all_to_all(x, 0, 1, None, async_op=async_op)
    assert (y.wait() if isinstance(y, Pending) else y) is x
