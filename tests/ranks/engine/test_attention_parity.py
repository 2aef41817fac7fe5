"""What the parity grid does not have: rows before heads, float16, uneven heads, forwards of other shapes."""

from __future__ import annotations

import sys
from functools import cache
from itertools import product

import pytest
import torch

from cp_styles.functions.attention import context_attention
from cp_styles.layout import contiguous, head_tail
from cp_styles.mask import Causal, Dense, Full
from cp_styles.strategies import AllGather, Ring, Ulysses, moving_kv
from cp_styles.testing import run_ranks
from tests.covering import at_night, in_parts
from tests.oracle import attend_and_differentiate, attention_inputs, dense_attention, error, expected_attention, randn
from tests.ranks.attention_case import EXACT, Core, DenseCore, Problem, cp_mesh, on_every_rank, parallel, run_attention

STRATEGIES = (Ring(), Ring(keep=0), AllGather(), AllGather(keep=0))
BALANCERS = (contiguous, head_tail)
MASKS = {True: Causal(), False: Full()}


@cache
def problem(length: int, causal: bool, kv_heads: int, scale: float | None) -> Problem:
    return Problem(length=length, causal=causal, kv_heads=kv_heads, scale=scale)


@pytest.mark.parametrize(
    ("strategy", "rows"), [(Ring(), 9), (AllGather(), 27), (Ulysses(inner=Ring(), size=2), 6)], ids=str
)
def test_heads_that_attend_by_turns(strategy, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Without a backward: 3 of 5 key heads and then the others, or one of Ulysses' 2 and 3; biases and sinks by head.

    ``rows``: how many of one key head may arrive together.
    """
    (q, k, v), _ = attention_inputs(length=12, heads=10, kv_heads=5, dim=8)
    bias, sink_H = randn(1, 1, 10, 12, 12), randn(2, 10)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    expected = dense_attention(q, k, v, mask, bias=bias, sink_H=sink_H)
    monkeypatch.setattr(moving_kv, "_LONG", rows * q.shape[0] * 2 * 8 * q.element_size())
    layout = head_tail(12, 4)

    def on(rank: int) -> float:
        part = [layout.shard(x, 2, rank) for x in (q, k, v)]
        options = {"mask": Causal() & Dense(bias), "strategy": strategy, "layout": layout}
        with torch.no_grad():
            out = context_attention(*part, cp_mesh(4), sink_H=sink_H, **options)
        return error(out, layout.shard(expected, 2, rank), whole=expected)

    assert max(run_ranks(on, 4)) < EXACT


@on_every_rank(3)
def test_rows_before_heads(mesh, rank: int):
    """[B, S, H, D], as projections leave them."""
    core = parallel(Core(seq_dim=1), mesh, seq_dim=1)
    return max(run_attention(core, problem(13, True, 2, None), rank, 3, seq_dim=1))


@in_parts(2)
@pytest.mark.parametrize("ranks", [8, *at_night(2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_good_as_one_device(dtype: torch.dtype, ranks: int, part: int):
    """Against float64 on the same rounded inputs, at most 1.1 times the error of one device's SDPA, + 1e-7.

    1.1: tiles are merged in float32, so all that may differ is the order of float32 sums. It must not grow with the
    ring (ring-flash-attention#42), hence 8 ranks and the same bound.
    """
    inputs, cotangent = attention_inputs(length=512, dim=32, batch=1, kv_heads=2, dtype=dtype)
    settings = [
        (strategy, balancer, causal, ("style", "function")[(index + part) % 2])
        for index, (strategy, (balancer, causal)) in enumerate(
            product((Ring(), AllGather()), zip(BALANCERS * 2, (True, False, False, True), strict=True))
        )
    ]
    expected, device = {}, {}
    for causal in (True, False):
        mask = torch.ones(512, 512, dtype=torch.bool).tril() if causal else None
        expected[causal] = expected_attention(inputs, cotangent, mask)
        one = attend_and_differentiate(Core(causal=causal), inputs, cotangent)
        device[causal] = [error(*pair) for pair in zip(one, expected[causal], strict=True)]

    def on(rank: int):
        mesh = cp_mesh(ranks)
        results = []
        for strategy, balancer, causal, door in settings:
            layout = balancer(512, ranks)
            leaves = [layout.shard(x, 2, rank) for x in inputs]
            if door == "style":
                attend = parallel(Core(causal=causal), mesh, strategy=strategy, layout=layout)
            else:
                options = {"mask": MASKS[causal], "strategy": strategy, "layout": layout}
                attend = lambda *qkv, options=options: context_attention(*qkv, mesh, **options)  # noqa: E731
            results.append(attend_and_differentiate(attend, leaves, layout.shard(cotangent, 2, rank)))
        return results

    by_rank = run_ranks(on, ranks)
    for index, (strategy, balancer, causal, door) in enumerate(settings):
        layout = balancer(512, ranks)
        for what in range(4):
            parts = [by_rank[rank][index][what] for rank in range(ranks)]
            assert {part.dtype for part in parts} == {dtype}
            found = error(layout.unshard(parts, 2), expected[causal][what])
            assert found <= 1.1 * device[causal][what] + 1e-7, (
                strategy,
                balancer,
                causal,
                door,
                ["out", "dq", "dk", "dv"][what],
            )


@pytest.mark.parametrize("attention", [Core, DenseCore])
@on_every_rank(2)
def test_a_forward_that_is_called_past_its_module(mesh, rank: int, attention):
    """``module.forward(...)`` calls no hooks, and attends to the whole sequence as ``module(...)`` does, or is refused
    as that is."""
    whole = problem(13, True, 2, None)
    core = parallel(attention(), mesh)
    for act in (core, core.forward, core):
        if attention is Core:
            assert max(run_attention(act, whole, rank, 2)) < EXACT
        else:
            with pytest.raises(Exception, match="no scaled_dot_product_attention was called inside"):
                run_attention(act, whole, rank, 2)


class Wrapper(torch.nn.Module):
    """A forward that names no arguments."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@on_every_rank(2)
def test_a_forward_that_names_no_arguments(mesh, rank: int):
    given = Problem(length=13, causal=True)
    module = parallel(Wrapper(Core()), mesh)

    def by_name(*qkv: torch.Tensor) -> torch.Tensor:
        return module(**dict(zip(("query", "key", "value"), qkv, strict=True)))

    errors = run_attention(module, given, rank, 2)
    if sys.version_info[:2] == (3, 13):  # Signature.bind gives the name of a positional-only argument to **kwargs
        return max(errors + run_attention(by_name, given, rank, 2))
    with pytest.raises(TypeError, match=r"'query' parameter is positional only|missing a required (pos|argument)"):
        by_name(*given.shard(head_tail, rank, 2)[0])
    return max(errors)
