"""What attention is: one process, dense, float64, plain torch ops; shares no code with the package.

Masks are written here a second time, as a question about two positions, so that a mistake in the package's bounds
cannot hide in its own oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cp_styles.mask import Causal, Chunked, Documents, Full, Mask, PrefixLM, SlidingWindow

Sees = Callable[[int, int], bool]
"""Whether the query at the first position attends to the key at the second."""


def allowed(sees: Sees, queries: int, keys: int) -> torch.Tensor:
    """The mask as booleans ``[queries, keys]``, asked pair by pair."""
    pairs = [[sees(query, key) for key in range(keys)] for query in range(queries)]
    return torch.tensor(pairs, dtype=torch.bool).reshape(queries, keys)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    sink_H: torch.Tensor | None = None,
    with_lse: bool = False,
) -> torch.Tensor:
    """softmax(q k^T scale + bias) v over ``[B, H, S, D]``; rows that see nothing are zero. Differentiable.

    A sink is one more logit of each head, which adds nothing. The logsumexp is a last column, 0 for rows without keys.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if sink_H is not None:
        column = sink_H[None, :, None, None].expand(*logits.shape[:3], 1)
        return torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1] @ value
    dead = (logits == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    if not with_lse:
        return weights @ value
    lse = logits.masked_fill(dead, 0.0).logsumexp(-1, keepdim=True).masked_fill(dead, 0.0)
    return torch.cat([weights @ value, lse], -1)


def attend_and_differentiate(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], cotangent: torch.Tensor
) -> list[torch.Tensor]:
    """``[out, dq, dk, dv]`` of ``attend(q, k, v)`` for the output gradient ``cotangent``."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def expected_attention(
    inputs: list[torch.Tensor], cotangent: torch.Tensor, mask: torch.Tensor | None = None, **options
) -> list[torch.Tensor]:
    """``[out, dq, dk, dv]`` in float64, whatever dtype the inputs have."""
    wide = [tensor.double() for tensor in inputs]
    return attend_and_differentiate(lambda *qkv: dense_attention(*qkv, mask, **options), wide, cotangent.double())


# A float64 result this small is zero but for the rounding of terms that cancel, as the gradient of the query is where
# there is one key, or a key's bias. The terms are products of a few random numbers of variance 1.
VANISHING = 1e-12


def error(found: torch.Tensor, expected: torch.Tensor, *, whole: torch.Tensor | None = None) -> float:
    """Norm of the difference over the norm of ``whole`` (of ``expected`` if None), infinite if that is NaN.

    Where that norm is VANISHING, what is left is rounding of terms of size 1: the difference is taken as it is. A
    rank's part of a result is compared on the scale of the ``whole`` result.
    """
    assert found.shape == expected.shape, f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
    difference = float((found.detach().double() - expected.detach().double()).norm())
    scale = float((expected if whole is None else whole).detach().double().norm())
    # max() of several errors passes over NaN, but not over infinity.
    return difference / (scale if scale > VANISHING else 1.0) if math.isfinite(difference) else math.inf


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Drawn in float64 and rounded: the same numbers in every dtype, from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attention_inputs(
    seed: int = 0,
    *,
    length: int,
    kv_length: int | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Whole ``[query, key, value]`` and a cotangent for the output. Random cotangents: ones would hide most of dq."""
    kv_heads, kv_length = kv_heads or heads, length if kv_length is None else kv_length
    query, cotangent = (randn(seed + i, batch, heads, length, dim, dtype=dtype) for i in (0, 3))
    key, value = (randn(seed + i, batch, kv_heads, kv_length, dim, dtype=dtype) for i in (1, 2))
    return [query, key, value], cotangent


@dataclass(frozen=True)
class MaskCase:
    """A mask of the package beside its definition."""

    mask: Mask
    sees: Sees


def document_of(lengths: tuple[int, ...]) -> Callable[[int], int]:
    """The document that a position is in, counted from 0."""
    ids = [index for index, size in enumerate(lengths) for _ in range(size)]
    return ids.__getitem__


def mask_cases(length: int) -> dict[str, MaskCase]:
    """Every mask with structure, and conjunctions of them, for a sequence of ``length`` >= 5 positions."""
    lengths = (1, length // 2, 1, length - length // 2 - 2)
    document = document_of(lengths)
    prefixes = (1, length // 4, 0, (length - length // 2 - 2) // 2)
    starts = [sum(lengths[:index]) for index in range(4)]

    def in_prefix(key: int) -> bool:
        return key - starts[document(key)] < prefixes[document(key)]

    cases = {
        "full": (Full(), lambda p, j: True),
        "causal": (Causal(), lambda p, j: j <= p),
        "window": (SlidingWindow(3, 0), lambda p, j: p - 3 <= j <= p),
        "window both sides": (SlidingWindow(2, 4), lambda p, j: p - 2 <= j <= p + 4),
        "window ahead": (SlidingWindow(None, 2), lambda p, j: j <= p + 2),
        "chunked": (Chunked(5), lambda p, j: p // 5 == j // 5),
        "prefix": (PrefixLM(4), lambda p, j: j <= p or j < 4),
        "documents": (Documents(lengths), lambda p, j: document(p) == document(j)),
        "prefix documents": (
            Documents(lengths, prefixes),
            lambda p, j: document(p) == document(j) and (j <= p or in_prefix(j)),
        ),
        "causal documents": (Documents(lengths) & Causal(), lambda p, j: document(p) == document(j) and j <= p),
        "causal chunks": (Causal() & Chunked(3), lambda p, j: p // 3 == j // 3 and j <= p),
        "windowed documents": (
            SlidingWindow(2, 1) & Documents(lengths),
            lambda p, j: document(p) == document(j) and p - 2 <= j <= p + 1,
        ),
    }
    return {name: MaskCase(mask, sees) for name, (mask, sees) in cases.items()}
