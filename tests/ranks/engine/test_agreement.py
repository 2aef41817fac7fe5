"""How often ranks agree on attention, by the object that the user chooses, at every door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    Causal,
    Documents,
    EveryCall,
    ModuleContextParallel,
    NewCalls,
    NoAgreement,
    Ring,
    SequenceScope,
    SlidingWindow,
    Strategy,
    Ulysses,
    UnreducedGradientsError,
    context_attention,
    context_flex_attention,
    context_parallel,
    context_varlen_attention,
    contiguous,
    global_token_count,
    head_tail,
    save_attention,
)
from cp_styles.comm.agreement import WIDTH, Agreement
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, run_attention

RANKS, LENGTH = 2, 21


def styled(style: Any, mesh: Any, layout: Any, agreement: Agreement) -> Any:
    return parallelize_module(Core(), mesh, style(layout=layout, agreement=agreement))


def varlen(mesh: Any, layout: Any, agreement: Agreement) -> Any:
    def attend(q, k, v, **options):
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        ends = [0, LENGTH]
        out = context_varlen_attention(*packed, mesh, ends, window_size=(-1, 0), layout=layout, agreement=agreement)
        return out.transpose(0, 1)[None]

    return attend


def block(mesh: Any, layout: Any, agreement: Agreement) -> Any:
    def attend(q, k, v, **options):
        with context_parallel(mesh, layout=layout, agreement=agreement):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def function(attend: Any, mesh: Any, layout: Any, agreement: Agreement, **options: Any) -> Any:
    return partial(attend, group=mesh, mask=Causal(), layout=layout, agreement=agreement, **options)


# Each with the meetings of a first step: forward and backward, and at a block's entry.
DOORS: dict[str, tuple[Callable[..., Any], int]] = {
    "style": (partial(styled, AttentionContextParallel), 2),
    "module": (partial(styled, ModuleContextParallel), 2),
    "function": (partial(function, context_attention), 2),
    "flex": (partial(function, context_flex_attention, enable_gqa=True), 2),
    "varlen": (varlen, 2),
    "block": (block, 3),
}


def meetings(trace: CommunicationTrace) -> int:
    return trace.events.count(("all_gather", WIDTH * 8 * (RANKS - 1)))


def steps(door: str, agreement: Agreement, layout: Any, problems: list[Problem]) -> Iterator[tuple[int, float]]:
    """For each problem, on rank 0: the meetings of its step, and the largest error."""

    def on(rank: int) -> list[tuple[int, float]]:
        attend = DOORS[door][0](cp_mesh(RANKS), layout, agreement)
        found = []
        for problem in problems:
            with CommunicationTrace() as trace:
                error = max(run_attention(attend, problem, rank, RANKS, layout=layout))
            found.append((meetings(trace), error))
        return found

    return iter(run_ranks(on, RANKS, timeout_seconds=20)[0])


@pytest.mark.parametrize("door", DOORS)
def test_known_calls_need_no_meeting(door: str):
    """The sixth and the seventh have a batch of their own. Looks at parameters meet, at attentions 1, 2, 4, 8."""
    one, two = (Problem(length=LENGTH, kv_heads=2, batch=batch) for batch in (1, 2))
    problems = [one, one, one, one, one] + ([two, two] if door != "varlen" else [])
    found = list(steps(door, NewCalls(), head_tail(LENGTH, RANKS), problems))
    assert max(error for _, error in found) < EXACT
    entry = door == "block"
    first = DOORS[door][1]
    assert found[0][0] == first
    assert found[4][0] == entry + 1  # neither at a look nor new: before the backward they compare what was called
    if len(found) > 5:
        # All calls of the sixth are new and were compared, so its backward has nothing to add.
        assert [count for count, _ in found[5:]] == [first - 1, entry + 1]


@pytest.mark.parametrize("door", DOORS)
def test_no_meeting_at_all(door: str):
    problem = Problem(length=LENGTH, kv_heads=2, batch=1)
    found = list(steps(door, NoAgreement(), head_tail(LENGTH, RANKS), [problem] * 3))
    assert max(error for _, error in found) < EXACT
    assert [count for count, _ in found] == [int(door == "block")] * 3


@pytest.mark.parametrize("door", DOORS)
def test_a_balancer_makes_every_call_new(door: str):
    """Lengths of other ranks may change where a rank's own do not: 21 and 22 positions, of which rank 0 has 11."""
    lengths = [LENGTH] * 5 + ([LENGTH + 1, LENGTH] if door != "varlen" else [])
    problems = [Problem(length=length, kv_heads=2, batch=1) for length in lengths]
    found = list(steps(door, NewCalls(), contiguous, problems))
    assert max(error for _, error in found) < EXACT
    assert all(count >= 1 for count, _ in found)


@pytest.mark.parametrize("door", DOORS)
def test_no_agreement_needs_a_layout(door: str):
    def on(rank: int) -> None:
        x = torch.randn(1, 4, head_tail(LENGTH, RANKS).lengths[rank], 8)
        with pytest.raises(ValueError, match=r": NoAgreement\(\) needs the lengths of all ranks: .* SequenceLayout"):
            DOORS[door][0](cp_mesh(RANKS), head_tail, NoAgreement())(x, x, x)

    run_ranks(on, RANKS, timeout_seconds=5)


@pytest.mark.parametrize("door", ["style", "module"])
def test_under_a_scope(door: str):
    problem = Problem(length=LENGTH, kv_heads=2)

    def on(rank: int) -> list[int]:
        mesh, found = cp_mesh(RANKS), []
        attend = DOORS[door][0](mesh, None, NewCalls())
        for _ in range(5):
            with SequenceScope(head_tail(LENGTH, RANKS)), CommunicationTrace() as trace:
                assert max(run_attention(attend, problem, rank, RANKS, layout=head_tail)) < EXACT
            found.append(meetings(trace))
        return found

    first, *_, last = run_ranks(on, RANKS)[0]
    assert (first, last) == (2, 1)


@pytest.mark.parametrize("door", DOORS)
def test_a_new_call_that_one_rank_refuses_is_an_error_on_all(door: str):
    def on(rank: int) -> None:
        attend = DOORS[door][0](cp_mesh(RANKS), head_tail(LENGTH, RANKS), NewCalls())
        x = torch.randn(1, 4, head_tail(LENGTH, RANKS).lengths[rank], 8, dtype=torch.float64)
        with pytest.raises(ValueError, match="must share one floating-point dtype" if rank else "refused"):
            attend(x, x.float() if rank else x, x)

    run_ranks(on, RANKS, timeout_seconds=20)


@pytest.mark.parametrize("strategy", [Ring(), Ring(keep=0), Ulysses(chunks=2)], ids=str)
def test_no_message_is_left_where_the_ranks_do_not_agree(strategy: Strategy):
    """A rank reads what the others say while it prepares, and before it sends: the next attention is exact."""
    problem, layout = Problem(length=LENGTH, kv_heads=4), head_tail(LENGTH, RANKS)

    def on(rank: int) -> float:
        attend = partial(context_attention, group=cp_mesh(RANKS), mask=Causal(), layout=layout, strategy=strategy)
        leaves, _ = problem.shard(layout, rank, RANKS)
        errors = []
        for _ in range(2):
            with pytest.raises(ValueError, match="must share one floating-point dtype" if rank else "refused"):
                attend(leaves[0], leaves[1].float() if rank else leaves[1], leaves[2])
            with pytest.raises(ValueError, match="disagree on strategy, layout, mask or kernel"):
                attend(*leaves, mask=SlidingWindow(3) if rank else Causal())
            out = attend(*leaves)
            with pytest.raises(ValueError, match="are not at the same place"):
                attend(*leaves) if rank else out.sum().backward()
            errors += run_attention(attend, problem, rank, RANKS, layout=layout)
        return max(errors)

    assert max(run_ranks(on, RANKS, timeout_seconds=20)) < EXACT


def test_ranks_that_send_each_other_nothing_agree_too():
    """Documents end where the ranks do: the rows are read when the attention ends, forward and backward."""
    layout = contiguous(8, RANKS)

    def on(rank: int) -> None:
        attend = partial(context_attention, group=cp_mesh(RANKS), mask=Documents((4, 4)), layout=layout)
        x = torch.randn(1, 4, 4, 8, dtype=torch.float64, requires_grad=True)
        with pytest.raises(ValueError, match="must share one floating-point dtype" if rank else "refused"):
            attend(x, x.float() if rank else x, x)
        out = attend(x, x, x)
        with pytest.raises(ValueError, match="are not at the same place"):
            attend(x, x, x) if rank else out.sum().backward()

    run_ranks(on, RANKS, timeout_seconds=20)


@dataclass(frozen=True)
class Failing(Ring):
    """Fails before its first message."""

    def rounds(self, ranks):
        raise OSError("mine")


def test_an_error_that_a_disagreement_may_have_caused():
    """A rank that fails before its first message reads what the others say; its own error is the context."""
    layout = contiguous(8, RANKS)

    def on(rank: int) -> None:
        attend = partial(context_attention, group=cp_mesh(RANKS), layout=layout)
        x = torch.randn(1, 4, 4, 8, dtype=torch.float64)
        with pytest.raises(ValueError, match="disagree on strategy") as caught:
            attend(x, x, x, strategy=Failing() if rank else Ring())
        assert isinstance(caught.value.__context__, OSError if rank else NoneType)
        attend(x, x, x)
        with pytest.raises(OSError, match="mine"):
            attend(x, x, x, strategy=Failing())

    run_ranks(on, RANKS, timeout_seconds=20)


def test_a_known_call_that_one_rank_does_not_make_ends_with_the_timeout():
    """As NewCalls says: loud, and late."""

    def on(rank: int) -> None:
        attend = DOORS["function"][0](cp_mesh(RANKS), head_tail(LENGTH, RANKS), NewCalls())
        x = torch.randn(1, 4, head_tail(LENGTH, RANKS).lengths[rank], 8)
        for step in range(5):
            attend(x, x.double() if rank and step == 4 else x, x)

    errors = run_ranks(on, RANKS, timeout_seconds=1.5, return_errors=True, may_time_out=True)
    assert "TransferError" in repr(errors[0])
    assert "must share one floating-point dtype" in str(errors[1])


@pytest.mark.parametrize("then", ["backward", "count"])
@pytest.mark.parametrize("door", ["style", "module", "function"])
def test_known_calls_in_another_order_are_an_error_before_the_first_gradient(door: str, then: str):
    """Two attentions of other scales send the same rows. Both are known; rank 1 swaps them in the last step."""
    layout = head_tail(LENGTH, RANKS)

    def on(rank: int) -> None:
        mesh, style = cp_mesh(RANKS), {"style": AttentionContextParallel, "module": ModuleContextParallel}.get(door)
        attend = [
            function(context_attention, mesh, layout, NewCalls(), scale=scale)
            if style is None
            else parallelize_module(Core(scale=scale), mesh, style(layout=layout, agreement=NewCalls()))
            for scale in (None, 0.5)
        ]
        x = torch.randn(1, 4, layout.lengths[rank], 8, dtype=torch.float64, requires_grad=True)

        def step(order: list[int]) -> torch.Tensor:
            y = x
            for index in order:
                y = attend[index](y, y, y)
            return y.sum()

        for _ in range(6):  # known from the first; looks at parameters meet at some
            step([0, 1]).backward()
        x.grad, loss = None, step([1, 0] if rank else [0, 1])
        with pytest.raises(ValueError, match=r"ranks \[1\] of mesh axis .* have called other attentions than rank 0"):
            loss.backward() if then == "backward" else global_token_count(torch.zeros(3), mesh)
        assert x.grad is None
        step([0, 1]).backward()  # what was wrong is over

    run_ranks(on, RANKS, timeout_seconds=20)


def test_ranks_choose_alike():
    def on(rank: int) -> None:
        x = torch.randn(1, 4, head_tail(LENGTH, RANKS).lengths[rank], 8)
        attend = DOORS["function"][0](cp_mesh(RANKS), head_tail(LENGTH, RANKS), NewCalls() if rank else EveryCall())
        with pytest.raises(ValueError, match="disagree on strategy, layout, mask or kernel"):
            attend(x, x, x)

    run_ranks(on, RANKS, timeout_seconds=20)


def test_what_is_no_agreement_is_refused():
    def on(rank: int) -> None:
        with pytest.raises(
            TypeError, match=r"agreement must be EveryCall\(\), NewCalls\(\) or NoAgreement\(\), got None"
        ):
            DOORS["style"][0](cp_mesh(RANKS), head_tail, None)

    run_ranks(on, RANKS)


@pytest.mark.parametrize("how", ["plain", "selective"])
def test_checkpoints(how: str):
    problem = Problem(length=LENGTH, kv_heads=2)

    def on(rank: int) -> list[int]:
        layout, found = head_tail(LENGTH, RANKS), []
        attend = DOORS["module"][0](cp_mesh(RANKS), layout, NewCalls())
        options = {"context_fn": save_attention()} if how == "selective" else {}

        def again(*tensors: torch.Tensor, **more: Any) -> torch.Tensor:
            return checkpoint(partial(attend, **more), *tensors, use_reentrant=False, **options)

        for _ in range(6):
            with CommunicationTrace() as trace:
                assert max(run_attention(again, problem, rank, RANKS, layout=layout)) < EXACT
            found.append(meetings(trace))
        return found

    assert run_ranks(on, RANKS)[0][-1] == 1


def test_unreduced_gradients_are_found():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.core = nn.Linear(8, 8, bias=False), Core()
            nn.init.eye_(self.inner.weight)

        def forward(self, x):
            x = self.inner(x)
            return self.core(x, x, x)

    def on(rank: int) -> None:
        model, layout = Model(), head_tail(LENGTH, RANKS)
        parallelize_module(model.core, cp_mesh(RANKS), ModuleContextParallel(layout=layout, agreement=NewCalls()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(1, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0))

        def step() -> None:
            optimizer.zero_grad()
            model(layout.shard(x, 2, rank)).square().mean().backward()
            optimizer.step()

        step()
        with pytest.raises(UnreducedGradientsError):
            step()

    run_ranks(on, RANKS, timeout_seconds=20)
