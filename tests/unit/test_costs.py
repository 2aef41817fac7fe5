"""The formulas of tutorials/performance.md, as they stand there, against the bytes that a dry run sends and holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cp_styles import AllGather, Full, Ring, Ulysses, contiguous
from cp_styles.explain import Explanation, explain
from cp_styles.strategies import Strategy
from tests.covering import at_night

PAGE = (Path(__file__).parents[2] / "tutorials/performance.md").read_text()
LENGTH, DIM = 384, 16


def row(section: str, strategy: str) -> list[str]:
    """The formulas behind a strategy's name in the first table of a section."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    found, *_ = [line for line in text.splitlines() if line.startswith("|") and f"`{strategy}`" in line.split("|")[1]]
    return [cell.strip() for cell in found.strip("|").split("|")[1:]]


def value(formula: str, **letters: float) -> float:
    """``(U - 1) / U (2 Q + K')``: what stands beside each other is multiplied."""
    formula = formula.replace("K'", "K_")
    formula = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return eval(formula, {"__builtins__": {}}, letters)


def letters(ranks: int, heads: int, kv_heads: int, dtype: torch.dtype, exchange: int = 1) -> dict[str, float]:
    size, batch = dtype.itemsize, 1
    keys, queries = (
        2 * batch * (LENGTH // ranks) * kv_heads * DIM * size,
        batch * (LENGTH // ranks) * heads * DIM * size,
    )
    letters = {"P": ranks, "K": keys, "Q": queries, "g": max(1, 4 / size), "U": exchange, "R": ranks // exchange}
    return letters | {"K_": keys * max(1, exchange / kv_heads)}


def explained(strategy: Strategy, ranks: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Explanation:
    shape = {"ranks": ranks, "heads": heads, "kv_heads": kv_heads, "head_dim": DIM, "dtype": dtype, "device": "cpu"}
    return explain(LENGTH, mask=Full(), layout=contiguous, strategy=strategy, **shape)


@pytest.mark.parametrize("ranks", [2, 4, *at_night(8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_night(torch.float32)])
def test_bytes_on_the_wire(ranks: int, dtype: torch.dtype):
    for keep in (0, 1):
        forward, backward = row("Bytes on the wire", "Ring(keep=n)")
        for strategy in (Ring(keep=keep), AllGather(keep=keep)):
            made, known = explained(strategy, ranks, 8, 2, dtype), letters(ranks, 8, 2, dtype) | {"n": keep}
            assert made.sent("forward") == value(forward, **known)
            assert made.sent("backward") == value(backward, **known)
    # Heads that the ranks divide, and key heads that they divide or that divide them: what the page says.
    for heads, kv_heads in ((8, 8), (8, 2), (8, 1), (8, 4), (16, 16)):
        forward, backward = row("Bytes on the wire", "Ulysses()")
        made, known = explained(Ulysses(), ranks, heads, kv_heads, dtype), letters(ranks, heads, kv_heads, dtype, ranks)
        assert made.sent("forward") == value(forward, **known)
        assert made.sent("backward") == value(backward, **known)
        forward, backward = row("Bytes on the wire", "Ulysses(inner=Ring(keep=n), size=U)")
        strategy = Ulysses(inner=Ring(keep=1), size=2)
        made, known = explained(strategy, ranks, heads, kv_heads, dtype), letters(ranks, heads, kv_heads, dtype, 2)
        known["n"] = min(1, ranks // 2 - 1)
        assert made.sent("forward") == value(forward, **known)
        assert made.sent("backward") == value(backward, **known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_from_forward_to_backward(dtype: torch.dtype):
    """The output, its logsumexp, and what the page says. All but some bytes for each tensor."""
    for strategy, name in (
        (Ring(keep=2), "Ring(keep=n)"),
        (AllGather(), "AllGather(keep=n)"),
        (Ulysses(), "Ulysses()"),
    ):
        (formula,) = row("Memory", name)
        known = letters(4, 8, 2, dtype, 4) | {"n": getattr(strategy, "keep", 0)}
        expected = known["Q"] + 4 * 8 * LENGTH // 4 + value(formula.partition(":")[0], **known)
        assert 0 <= explained(strategy, 4, 8, 2, dtype).kept_memory - expected < 600


def test_other_head_counts_send_more_with_ulysses():
    """Which the page says, instead of a formula."""
    forward, backward = row("Bytes on the wire", "Ulysses()")
    made, known = explained(Ulysses(), 8, 12, 4, torch.float32), letters(8, 12, 4, torch.float32, 8)
    assert made.sent("forward") > value(forward, **known)
    assert made.sent("backward") > 1.4 * value(backward, **known)
