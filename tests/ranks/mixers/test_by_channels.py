"""Kernels without an initial state, by channels: against one process in float64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from cp_styles import contiguous, head_tail
from cp_styles.layouts import SequenceLayout, striped
from cp_styles.mixers import Channels, context_recurrence
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh, refused
from tests.ranks.mixers.kernels import selective_scan_fn

EXACT = 1e-13  # float64 sums over ranks in another order
BATCH, STATES = 2, 3


def inputs(channels, length):
    tokens = {at: randn(i, BATCH, channels, length) for i, at in enumerate(("u", "delta", "z"))}
    tokens |= {at: randn(i, BATCH, STATES, length) for i, at in enumerate("BC", 3)}
    weights = {"A": -randn(5, channels, STATES).exp(), "D": randn(6, channels), "delta_bias": randn(7, channels)}
    return tokens, weights


@pytest.mark.parametrize(
    ("layout", "channels", "documents"),
    [
        (contiguous(9, 2), 4, (9,)),
        (head_tail(11, 3), 5, (4, 7)),  # channels do not divide
        (striped(7, 4), 2, (7,)),  # fewer channels than ranks
        (SequenceLayout.from_chunks([[(0, 5)], [], [(5, 6)]]), 4, (2, 4)),  # a rank without tokens
    ],
)
def test_equals_one_process(layout, channels, documents):
    tokens, weights = inputs(channels, layout.length)
    cotangents = randn(8, BATCH, channels, layout.length), randn(9, BATCH, channels, STATES)

    def main(rank: int):
        mesh = cp_mesh(layout.ranks)
        leaves = {at: layout.shard(x, 2, rank).clone().requires_grad_() for at, x in tokens.items()}
        leaves |= {at: x.clone().requires_grad_() for at, x in weights.items()}
        scan = context_recurrence(selective_scan_fn, mesh, layout=layout, documents=documents)
        with CommunicationTrace() as trace:
            out, last = scan(**leaves, delta_softplus=True, return_last_state=True)
        sent = sum(size for _, size in trace.events[1:])  # after the agreement
        # The last state is the same on all ranks, and each uses it for a share of the loss.
        mine = layout.shard(cotangents[0], 2, rank), cotangents[1] * (rank + 1) / sum(range(layout.ranks + 1))
        grads = torch.autograd.grad((out, last), list(leaves.values()), mine)
        return [out.detach(), *grads], sent, last.detach()

    found = run_ranks(main, layout.ranks)
    leaves = {at: x.clone().requires_grad_() for at, x in (tokens | weights).items()}
    spans, whole = pairwise(accumulate(documents, initial=0)), {at: leaves[at] for at in weights}
    runs = [{at: leaves[at][..., low:high] for at in tokens} for low, high in spans]
    runs = [selective_scan_fn(**run, **whole, delta_softplus=True, return_last_state=True) for run in runs]
    out, last = torch.cat([out for out, _ in runs], 2), runs[-1][1]
    expected = [out.detach(), *torch.autograd.grad((out, last), list(leaves.values()), cotangents)]
    assert all(error(each, last) < EXACT for *_, each in found)
    for number, (each, one) in enumerate(zip(zip(*(out for out, *_ in found), strict=True), expected, strict=True)):
        assert error(layout.unshard(each, 2) if number <= len(tokens) else sum(each), one) < EXACT

    def part(rank):
        return len(range(channels)[rank :: layout.ranks])  # as many as of an even cut

    for rank, (_, sent, _) in enumerate(found):
        mine, others = layout.lengths[rank], [peer for peer in range(layout.ranks) if peer != rank]
        shared = sum(2 * STATES * mine for peer in others if part(peer))
        back = sum(part(rank) * layout.lengths[peer] for peer in others)
        last = part(rank) * STATES * len(others)
        assert sent == 8 * BATCH * (3 * mine * sum(map(part, others)) + shared + back + last)


def test_ranks_that_want_other_results():
    tokens, weights = inputs(4, 6)

    def act(rank: int, mesh) -> None:
        how = Channels(cut=("u",), shared=("B", "C"), parameters=("A",))
        scan = context_recurrence(lambda u, A, B, C, return_last_state=False: u, mesh, recurrence=how)
        scan(tokens["u"], weights["A"], tokens["B"], tokens["C"], bool(rank))

    refused(act, "return_last_state")
