"""Windows of tokens over any cut: against unfold of the whole sequence, and the bytes that travel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_styles import Causal, Documents, SequenceScope, contiguous, head_tail
from cp_styles.layouts import SequenceLayout, striped
from cp_styles.mixers import context_windows, window_layout
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.layouts import packs
from tests.oracle import randn
from tests.ranks.attention_case import cp_mesh, refused


def on_one(x: torch.Tensor, size: int, before: int) -> torch.Tensor:
    if x.shape[1] < size:
        return x[:, :0, None].expand(-1, -1, before + size, -1)
    return F.pad(x, (0, 0, before, 0)).unfold(1, before + size, size).mT


def on_ranks(layout: SequenceLayout, size: int, before: int, x: torch.Tensor, cotangent: torch.Tensor | None = None):
    """The windows of all ranks in order, the gradient of x, and the bytes that each rank sent."""
    windows = window_layout(layout, size)

    def main(rank: int):
        mesh = cp_mesh(layout.ranks)
        local = layout.shard(x, 1, rank).clone().requires_grad_(cotangent is not None)
        with CommunicationTrace() as trace:
            out = context_windows(local, mesh, size=size, before=before, layout=layout)
        sent = sum(bytes_ for name, bytes_ in trace.events if name.startswith("all_to_all"))
        if cotangent is not None:
            out.backward(windows.shard(cotangent, 1, rank))
        return out.detach(), local.grad, sent

    outs, grads, sent = zip(*run_ranks(main, layout.ranks), strict=True)
    return windows.unshard(outs, 1), None if cotangent is None else layout.unshard(grads, 1), sent


def check(layout: SequenceLayout, size: int, before: int) -> None:
    """Rows are copied, so the outputs have the same bits; a sum of a few gradients in another order may round."""
    x = randn(0, 2, layout.length, 3)
    whole = x.clone().requires_grad_()
    expected = on_one(whole, size, before)
    cotangent = randn(1, *expected.shape)
    expected.backward(cotangent)
    out, grad, _ = on_ranks(layout, size, before, x, cotangent)
    assert torch.equal(out, expected)
    assert grad is not None
    torch.testing.assert_close(grad, whole.grad, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close((out * cotangent).sum(), (x * grad).sum(), rtol=1e-12, atol=1e-12)  # the adjoint


@settings(max_examples=12, deadline=None)
@given(packs(), st.integers(1, 7), st.integers(0, 9))
def test_any_cut(pack, size: int, before: int):
    check(pack[0], size, before)


@pytest.mark.parametrize("balancer", [contiguous, head_tail, striped])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("length", [17, 3])
def test_each_layout(balancer, ranks: int, length: int):
    """Also of a sequence that is shorter than a window."""
    check(balancer(length, ranks), 4, 2)


def test_ids():
    ids = torch.arange(12)[None, :, None]
    assert torch.equal(on_ranks(head_tail(12, 3), 5, 1, ids)[0], on_one(ids, 5, 1))


def test_the_layout_of_windows():
    """Windows of 4 end at 3, 7, 11: the rank with that position has it."""
    assert window_layout(contiguous(13, 2), 4).chunks == (((0, 1),), ((1, 3),))
    assert window_layout(contiguous(3, 2), 4).lengths == (0, 0)
    with pytest.raises(ValueError, match="size=0 must be a number of tokens"):
        window_layout(contiguous(3, 2), 0)


def test_bytes():
    """A row has 3 numbers of 8 bytes. Rank 1 has positions 7 to 13 and lacks 4 to 6 of its first window, and the 2
    before it; rank 0 lacks nothing. Windows of one token share the rows before them, which travel once."""
    x = randn(0, 1, 14, 3)
    assert on_ranks(contiguous(14, 2), 4, 2, x)[2] == (5 * 24, 0)
    assert on_ranks(contiguous(14, 2), 1, 6, x)[2] == (6 * 24, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": 0}, ValueError, "size=0 must be a number of tokens, at least 1"),
        ({"before": -1}, ValueError, "before=-1 must be a number of tokens, at least 0"),
        ({"size": 2.0}, ValueError, "size=2.0 must be a number"),
        ({"layout": contiguous(9, 2)}, ValueError, "cuts 9 positions for 2 ranks"),
    ],
)
@pytest.mark.parametrize("wrong", [(0, 1), (1,)])
def test_errors_reach_every_rank(options, error, message: str, wrong):
    def act(rank: int, mesh) -> None:
        context_windows(torch.ones(1, 4, 3), mesh, **({"size": 2} | (options if rank in wrong else {})))

    differs = "" if len(wrong) == 2 else "|disagree on"  # a rank with a good argument says that it differs
    refused(act, message + differs, error)


def test_packed_documents_are_refused():
    """Their windows would begin with each document."""

    def act(rank: int, mesh) -> None:
        with SequenceScope(head_tail(8, 2), mask=Causal() & Documents((3, 5))):
            context_windows(torch.ones(1, 4, 3), mesh, size=2)

    refused(act, "give one document in a call", NotImplementedError)
