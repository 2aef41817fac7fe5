"""Recurrences over any cut: against one process in float64, document by document, and the bytes that travel."""

from __future__ import annotations

import functools
import time
from itertools import accumulate, groupby, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from cp_styles import Documents, SequenceScope, contiguous, head_tail
from cp_styles.comm.point_to_point import TransferError
from cp_styles.layouts import striped
from cp_styles.mixers import Recurrence, context_recurrence
from cp_styles.testing import CommunicationTrace, run_ranks
from tests import mixers
from tests.covering import at_night
from tests.layouts import packs
from tests.mixers import Mixing
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh, refused
from tests.ranks.mixers import kernels

# Sums in float64, in another order: 1e-15 a step of the state. A state that is not passed on gives 1e-1.
EXACT = 1e-12
BATCH, HEADS, KEYS, VALUES = 2, 2, 3, 4


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


def delta_rule(length, per_key=False):
    """Grouped: one key head, two value heads. With ``per_key`` it is KDA."""
    heads = HEADS if per_key else 1
    gates = (BATCH, length, HEADS, KEYS) if per_key else (BATCH, length, HEADS)
    q, k = (unit(randn(i, BATCH, length, heads, KEYS)) for i in range(2))
    v, g = randn(2, BATCH, length, HEADS, VALUES), -torch.nn.functional.softplus(randn(3, *gates))
    return kernels.chunk_gated_delta_rule, {"q": q, "k": k, "v": v, "g": g, "beta": randn(4, *gates[:3]).sigmoid()}, {}


def gla(length):
    q, k = (randn(i, BATCH, length, HEADS, KEYS) for i in range(2))
    v, g = randn(2, BATCH, length, HEADS, VALUES), -torch.nn.functional.softplus(randn(3, *k.shape))
    return kernels.chunk_gla, {"q": q, "k": k, "v": v, "g": g}, {}


def ssd(length):
    x, z = (randn(i, BATCH, length, HEADS, VALUES) for i in range(2))
    B, C = (randn(i, BATCH, length, 1, KEYS) for i in (2, 3))
    weights = {"A": -randn(5, HEADS).exp(), "D": randn(6, HEADS), "dt_bias": randn(7, HEADS)}
    tokens = {"x": x, "dt": randn(4, BATCH, length, HEADS), "B": B, "C": C, "z": z}
    return kernels.mamba_chunk_scan_combined, tokens, weights


FAMILIES = {"delta": delta_rule, "kda": lambda length: delta_rule(length, True), "gla": gla, "ssd": ssd}
OPTIONS = {"ssd": {"chunk_size": 4, "dt_softplus": True}}


def on_one(family, documents, cotangent):
    """[out, gradients] of one process."""
    kernel, tokens, weights = FAMILIES[family](sum(documents))
    leaves = {name: x.clone().requires_grad_() for name, x in (tokens | weights).items()}
    outs = []
    for low, high in pairwise(accumulate(documents, initial=0)):
        cut = {name: leaves[name][:, low:high] for name in tokens}
        out = kernel(**cut, **{name: leaves[name] for name in weights}, **OPTIONS.get(family, {}))
        outs.append(out[0] if isinstance(out, tuple) else out)
    out = torch.cat(outs, 1)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), cotangent)]


def on_ranks(family, layout, documents, cotangent):
    kernel, tokens, weights = FAMILIES[family](layout.length)

    def main(rank: int):
        mesh = cp_mesh(layout.ranks)
        leaves = {name: layout.shard(x, 1, rank).clone().requires_grad_() for name, x in tokens.items()}
        leaves |= {name: x.clone().requires_grad_() for name, x in weights.items()}
        scan = context_recurrence(kernel, mesh, layout=layout, documents=documents)
        with CommunicationTrace() as trace:
            out = scan(**leaves, **OPTIONS.get(family, {}))
        sent = sum(size for _, size in trace.events[1:])  # after the agreement
        out = out[0] if isinstance(out, tuple) else out
        grads = torch.autograd.grad(out, list(leaves.values()), layout.shard(cotangent, 1, rank))
        return [out.detach(), *grads], sent

    found = run_ranks(main, layout.ranks)
    parts = list(zip(*(each for each, _ in found), strict=True))
    whole = [layout.unshard(each, 1) for each in parts[: 1 + len(tokens)]]
    return whole + [torch.stack(each).sum(0) for each in parts[1 + len(tokens) :]], [sent for _, sent in found]


def cotangent_of(length):
    return randn(9, BATCH, length, HEADS, VALUES)


def columns_sent(layout, documents, columns) -> list[int]:
    """Document by document: columns of maps that each rank sends, of which the states have VALUES."""
    owner = {p: rank for rank in range(layout.ranks) for p in layout.positions(rank).tolist()}
    count = [0] * layout.ranks
    for low, high in pairwise(accumulate(documents, initial=0)):
        held = [rank for rank, _ in groupby(owner[position] for position in range(low, high))]
        for number, rank in enumerate(held[:-1]):  # to the fragments 1, 2, 4 ... behind it that have maps; to the next
            reach = [2**power for power in range(5) if number + 2**power < len(held) - 1]
            sizes = [(held[number + far], VALUES if number < far else columns) for far in reach]
            count[rank] += sum(size for peer, size in [*sizes, (held[number + 1], VALUES)] if peer != rank)
    return count


@settings(max_examples=15, deadline=None)
@given(packs(longest=14), st.sampled_from(list(FAMILIES)))
def test_equals_one_process_and_sends_the_maps(pack, family: str):
    layout, documents = pack
    cotangent = cotangent_of(layout.length)
    found, sent = on_ranks(family, layout, documents, cotangent)
    for one, expected in zip(found, on_one(family, documents, cotangent), strict=True):
        assert error(one, expected) < EXACT
    columns = VALUES + (KEYS if family in ("delta", "kda") else 1)
    assert sent == [each * BATCH * HEADS * KEYS * 8 for each in columns_sent(layout, documents, columns)]


# Cases of tests/mixers.py with plain numbers: rolls and convolutions too.
_SIZES: dict[str, Any] = {"ranks": 3, "length": 13, "batch": 2, "layout": "head_tail"}
NAMED = {
    **{f"{kind}, a balancer": Mixing(kind=kind, balancer=True, documents=2, heads=(2, groups), keys=3, **_SIZES)
       for kind, groups in (("delta", 1), ("kda", 2), ("gla", 2), ("ssd", 1), ("scan", 2))},
    **{f"{kind}, states": Mixing(kind=kind, heads=(2, 1), values=4, states="both", **_SIZES)
       for kind in ("delta", "ssd", "delta, values first")},
    "a document that begins with a part": Mixing(kind="gla", heads=(2, 2), documents=5, states="first"),
    "one number for every rank": Mixing(kind="scan", ranks=5, keys=1, values=2, states="last"),
    "cu_seqlens": Mixing(kind="gla", heads=(2, 2), documents=3, said_by="cu_seqlens", **_SIZES),
    "a convolution, a balancer": Mixing(balancer=True, width=4, **_SIZES),
    "a convolution in a scope": Mixing(documents=3, said_by="scope", width=4, **_SIZES | {"layout": "by_work"}),
    "a roll": Mixing(kind="roll", documents=2, width=3, **_SIZES),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_by_name(name: str):
    assert mixers.sensible(NAMED[name]) == NAMED[name]
    verdict = mixers.judge(NAMED[name])
    assert verdict.kind == "exact", verdict.words


@pytest.mark.nightly
@pytest.mark.parametrize(("balancer", "ranks"), [(contiguous, 16), (head_tail, 16), (contiguous, 32)])
def test_many_ranks_send_little(balancer, ranks):
    """Where an all-gather sends each map to all others."""
    layout, documents = balancer(64, ranks), (13, 51)
    found, sent = on_ranks("delta", layout, documents, cotangent_of(64))
    for one, expected in zip(found, on_one("delta", documents, cotangent_of(64)), strict=True):
        assert error(one, expected) < EXACT
    assert sent == [each * BATCH * HEADS * KEYS * 8 for each in columns_sent(layout, documents, VALUES + KEYS)]
    maps = len(layout.chunks[1]) * (ranks - 1)
    assert max(sent) < maps * BATCH * HEADS * KEYS * (VALUES + KEYS) * 8 / 3


@pytest.mark.parametrize("family", ["delta", "ssd", *at_night("kda", "gla")])
def test_bfloat16_by_ratio(family):
    """Errors against float64, over those of one device in bfloat16.

    Outputs: 1.1, as everywhere. A gradient is the sum of two results of the kernel's backward, each rounded to 16 bits,
    and is rounded itself: sqrt(3) of one rounding at most. Weights in float32 are sums over ranks: 1e-6.
    """
    kernel, tokens, weights = FAMILIES[family](24)
    layout, said = contiguous(24, 3), OPTIONS.get(family, {})
    tokens, cotangent = {name: x.bfloat16() for name, x in tokens.items()}, cotangent_of(24).bfloat16()
    weights = {name: x.float() for name, x in weights.items()}

    def step(function, given, share):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        out = function(**leaves, **said)
        out = out[0] if isinstance(out, tuple) else out
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), share.to(out.dtype))]

    def main(rank: int):
        mesh = cp_mesh(3)
        own = {name: layout.shard(x, 1, rank) for name, x in tokens.items()} | weights
        return step(context_recurrence(kernel, mesh, layout=layout), own, layout.shard(cotangent, 1, rank))

    exact = step(kernel, {name: x.double() for name, x in (tokens | weights).items()}, cotangent)
    one, parts = step(kernel, tokens | weights, cotangent), list(zip(*run_ranks(main, 3), strict=True))
    for number, (part, alone, right) in enumerate(zip(parts, one, exact, strict=True)):
        mine = layout.unshard(part, 1) if number <= len(tokens) else torch.stack(part).sum(0)
        assert error(mine.double(), right) <= (3**0.5 if number else 1.1) * error(alone.double(), right) + 1e-6


@pytest.mark.parametrize(
    "given", [{"reverse": True}, {"cp_context": 1}, {"initial_state": randn(0, 3, 2, KEYS, VALUES)}]
)
def test_what_a_kernel_does_on_one_device_alone_is_refused(given):
    kernel, tokens, _ = delta_rule(8)

    def act(rank: int, mesh) -> None:
        context_recurrence(kernel, mesh)(**{at: x[:, :4] for at, x in tokens.items()}, **(given if rank else {}))

    refused(act, "is not supported|one state for each row", (ValueError, NotImplementedError))


def test_errors_reach_every_rank():
    kernel, tokens, _ = gla(8)

    def act(rank: int, mesh) -> None:
        with pytest.raises(ValueError, match="it is not known how dict takes its arguments"):
            context_recurrence(dict, mesh)
        cut = {name: x[:, : 4 - (rank and name == "k")] for name, x in tokens.items()}
        context_recurrence(kernel, mesh)(**cut)

    refused(act, "must have the tokens of v along dim 1")


SCOPED = SequenceScope(head_tail(12, 2), mask=Documents((5, 4, 3)))


@pytest.mark.parametrize("reentrant", [False, True, None], ids=["not reentrant", "reentrant", "as the error says"])
def test_a_recomputation_without_its_scope(reentrant: bool | None):
    """It does not know the layout and the documents. With what the error says, it is exact."""
    kernel, tokens, _ = gla(12)
    layout, cotangent = SCOPED.layout, cotangent_of(12)

    def run(rank: int, mesh) -> list[torch.Tensor]:
        scan = context_recurrence(kernel, mesh)  # the scope is that around its call
        leaves = {name: layout.shard(x, 1, rank).clone().requires_grad_() for name, x in tokens.items()}

        def layer(*given: torch.Tensor) -> torch.Tensor:
            return scan(**dict(zip(leaves, given, strict=True)))[0]

        scope = {"context_fn": SCOPED.for_checkpoint} if reentrant is None else {}
        with SCOPED:
            out = checkpoint(layer, *leaves.values(), use_reentrant=bool(reentrant), **scope)
        out.backward(layout.shard(cotangent, 1, rank))
        return [out.detach(), *(leaf.grad for leaf in leaves.values())]

    if reentrant is not None:
        refused(run, "pass context_fn=scope.for_checkpoint", Exception)
        return
    found = list(zip(*run_ranks(lambda rank: run(rank, cp_mesh(2)), 2), strict=True))
    for parts, expected in zip(found, on_one("gla", (5, 4, 3), cotangent), strict=True):
        assert error(layout.unshard(parts, 1), expected) < EXACT


@pytest.mark.parametrize("wrong", [(0, 1), (1,)])
@pytest.mark.parametrize(
    ("given", "packed", "words"),
    [
        ({"layout": contiguous(12, 2)}, {}, "another layout than the SequenceScope"),
        ({}, {"cu_seqlens": torch.tensor([0, 6, 12])}, "give the same documents"),
        ({}, {"cu_seqlens": torch.tensor([1, 12])}, "must be 1-D and start with 0"),
        ({}, {"seq_idx": torch.arange(24).view(2, 12)}, "each row of the batch has documents of its own"),
    ],
)
def test_what_contradicts_the_scope_is_refused(given, packed, words, wrong):
    kernel, tokens, _ = gla(12)

    def act(rank: int, mesh) -> None:
        cut = {name: SCOPED.layout.shard(x, 1, rank) for name, x in tokens.items()}
        odd = rank in wrong
        with SCOPED:
            context_recurrence(kernel, mesh, **(given if odd else {}))(**cut, **(packed if odd else {}))

    refused(act, words, (ValueError, NotImplementedError))


def test_an_error_in_a_kernel_reaches_the_ranks_that_wait_for_its_state():
    _, tokens, _ = gla(12)
    layout = contiguous(12, 3)

    def main(rank: int):
        def chunk_gla(q, k, v, g, initial_state=None, output_final_state=False):
            if rank == 0:
                raise MemoryError("of rank 0")
            return kernels.chunk_gla(q, k, v, g, None, initial_state, output_final_state)

        mesh = cp_mesh(3)
        scan = context_recurrence(chunk_gla, mesh, layout=layout, recurrence=Recurrence(diagonal=True))
        scan(**{name: layout.shard(x, 1, rank) for name, x in tokens.items()})

    began = time.monotonic()
    errors = run_ranks(main, 3, return_errors=True)
    assert isinstance(errors[0], MemoryError)
    assert all(isinstance(each, TransferError) for each in errors[1:]), errors
    assert time.monotonic() - began < 60  # and none waits for a timeout


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("required", [True, False])
def test_arguments_that_are_left_out(required: bool, diagonal: bool):
    """A gate of the outputs, and an offset for each head: fragments in the middle, from three ranks on, are run for the
    map of their state too, with values of other columns."""
    (kernel, tokens, _), gate, offset = gla(12), randn(8, BATCH, 12, HEADS, VALUES), randn(9, HEADS)
    if not diagonal:
        kernel, tokens, _ = delta_rule(12)
    layout = contiguous(12, 3)

    def gated(q, k, v, g, gate, offset, beta=None, initial_state=None, output_final_state=False):
        more = {} if beta is None else {"beta": beta}
        run = {"initial_state": initial_state, "output_final_state": output_final_state}
        out, final = kernel(q, k, v, g, **more, **run)
        return out if gate is None else out * gate + offset[:, None], final

    def optional(q, k, v, g, beta=None, gate=None, offset=None, initial_state=None, output_final_state=False):
        return gated(q, k, v, g, gate, offset, beta, initial_state, output_final_state)

    used = gated if required else optional

    def main(rank: int) -> torch.Tensor:
        how = Recurrence(diagonal=diagonal, left_out=("gate", "offset"))
        scan = context_recurrence(used, cp_mesh(3), layout=layout, recurrence=how)
        mine = {name: layout.shard(x, 1, rank) for name, x in (tokens | {"gate": gate}).items()}
        return scan(**mine, offset=offset)[0]

    wanted = used(**tokens, gate=gate, offset=offset)[0]
    assert error(layout.unshard(run_ranks(main, 3), 1), wanted) < EXACT


@pytest.mark.parametrize("of_a_user", [False, True])
def test_balancers_that_cut_differently(of_a_user: bool):
    """Their parts may be as long, and what they need of each other is not the same."""
    kernel, tokens, _ = gla(12)

    def act(rank: int, mesh) -> None:
        def cut_by_rank(length: int, ranks: int):
            return striped(length, ranks, block=2 + rank)

        balancer = cut_by_rank if of_a_user else functools.partial(striped, block=2 + rank)
        cut = {name: balancer(12, 2).shard(x, 1, rank) for name, x in tokens.items()}
        context_recurrence(kernel, mesh, layout=balancer)(**cut)

    refused(act, "disagree on layout")
