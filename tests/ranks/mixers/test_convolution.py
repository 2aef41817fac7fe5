"""Causal convolutions over any cut: against one process in float64, and the bytes that travel."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_styles import contiguous
from cp_styles.layouts import SequenceLayout, striped
from cp_styles.mixers import context_causal_conv1d
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.layouts import packs
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh, refused

CHANNELS = 3
# Sums of W products in float64; one row too many or too few gives 1e-1.
EXACT = 1e-14


def conv(weight_CW: torch.Tensor, bias_C: torch.Tensor):
    """A depthwise causal convolution with bias and activation, as models have them."""

    def run(x_BCL: torch.Tensor) -> torch.Tensor:
        padding = weight_CW.shape[1] - 1
        out = torch.conv1d(x_BCL, weight_CW[:, None], bias_C, padding=padding, groups=CHANNELS)
        return torch.nn.functional.silu(out[..., : x_BCL.shape[-1]])

    return run


def on_one(inputs, cotangent_BCS, documents):
    """[out, gradients] of one process, document by document."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    x, *parameters = leaves
    spans = pairwise(accumulate(documents, initial=0))
    out = torch.cat([conv(*parameters)(x[..., low:high]) for low, high in spans], -1)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent_BCS)]


def on_ranks(layout: SequenceLayout, documents, inputs, cotangent_BCS):
    """The same on ranks: parts put together, gradients of parameters summed; and the bytes that each rank sent."""
    width = inputs[1].shape[1]

    def main(rank: int):
        mesh = cp_mesh(layout.ranks)
        x = layout.shard(inputs[0], 2, rank).clone().requires_grad_()
        leaves = [x, *(each.clone().requires_grad_() for each in inputs[1:])]
        with CommunicationTrace() as trace:
            out = context_causal_conv1d(conv(*leaves[1:]), x, mesh, width=width, documents=documents, layout=layout)
            out.mul_(1.0)  # as a model may: no view that cannot be changed
        sent = sum(size for name, size in trace.events if name.startswith("all_to_all"))
        return [out.detach(), *torch.autograd.grad(out, leaves, layout.shard(cotangent_BCS, 2, rank))], sent

    found = run_ranks(main, layout.ranks)
    parts = list(zip(*(each for each, _ in found), strict=True))
    whole = [layout.unshard(each, 2) for each in parts[:2]] + [torch.stack(each).sum(0) for each in parts[2:]]
    return whole, [sent for _, sent in found]


def drawn(width: int, length: int):
    inputs = randn(0, 2, CHANNELS, length), randn(1, CHANNELS, width), randn(2, CHANNELS)
    return inputs, randn(3, 2, CHANNELS, length)


def rows_sent(layout: SequenceLayout, documents, width: int) -> list[int]:
    """Pair by pair: the rows of each rank that others need before a position of theirs that is not beside one."""
    owner = {p: rank for rank in range(layout.ranks) for p in layout.positions(rank).tolist()}
    begins = [low for low, high in pairwise(accumulate(documents, initial=0)) for _ in range(low, high)]
    count = [0] * layout.ranks
    for position, rank in owner.items():
        follows = position > begins[position] and owner[position - 1] == rank
        for before in () if follows else range(max(position - width + 1, begins[position]), position):
            count[owner[before]] += owner[before] != rank
    return count


@settings(max_examples=15, deadline=None)
@given(packs(), st.integers(2, 6))
def test_equals_one_process_and_sends_the_rows_before(pack, width: int):
    layout, documents = pack
    inputs, cotangent = drawn(width, layout.length)
    found, sent = on_ranks(layout, documents, inputs, cotangent)
    for one, expected in zip(found, on_one(inputs, cotangent, documents), strict=True):
        assert error(one, expected) < EXACT
    assert sent == [rows * 2 * CHANNELS * 8 for rows in rows_sent(layout, documents, width)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": contiguous(9, 2)}, "cuts 9 positions for 2 ranks"),
        ({"layout": striped}, "hold .* but the layout gives them"),
        ({"documents": (3, 4)}, "documents of 7 positions in a sequence of 8"),
        ({"width": 0}, "width=0 must be"),
        ({"seq_dim": 5}, "seq_dim=5 is not a dim"),
    ],
)
@pytest.mark.parametrize("wrong", [(0, 1), (1,)])
def test_errors_reach_every_rank(options, message, wrong):
    lengths = (5, 3) if options.get("layout") is striped else (4, 4)

    def act(rank: int, mesh) -> None:
        said = {"width": 4, "layout": contiguous if lengths == (4, 4) else striped} | (options if rank in wrong else {})
        context_causal_conv1d(lambda x: x, torch.ones(1, 1, lengths[rank]), mesh, **said)

    refused(act, message + ("" if len(wrong) == 2 else "|disagree on"))  # one rank alone may only differ from the other


@pytest.mark.parametrize(
    ("conv", "widths", "message"),
    [(lambda x: x, (4, 3), "disagree on width"), (lambda x: x[..., 1:], (4, 4), r"conv returned \d+ tokens for \d+")],
)
def test_convolutions_that_are_another_on_one_rank_or_cut_their_end(conv, widths, message):
    def act(rank: int, mesh) -> None:
        context_causal_conv1d(conv, torch.ones(1, 1, 4), mesh, width=widths[rank], layout=contiguous)

    refused(act, message)
