"""What attention is: one process, dense, float64, plain torch ops; shares no code with the package.

Masks are written here a second time, as a question about two positions, so that a mistake in the package's bounds
cannot hide in its own oracle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_styles.masks import (
    Causal,
    Chunked,
    Dense,
    Documents,
    Full,
    Mask,
    PerRow,
    PrefixLM,
    SlidingWindow,
    Tree,
    WithBlocks,
)
from cp_styles.masks.block_mask import FlexMask

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
    score: Callable[..., torch.Tensor] | None = None,
    sink_H: torch.Tensor | None = None,
    with_lse: bool = False,
) -> torch.Tensor:
    """softmax(q k^T scale + bias) v over ``[B, H, S, D]``; rows that see nothing are zero. Differentiable.

    ``score(logits, b, h, q, kv)`` changes scaled logits, by the indices of every pair. A sink is one more logit of each
    head, which adds nothing. The logsumexp is a last column, 0 for rows without keys.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score is not None:
        places = (
            torch.arange(size).view([-1 if at == dim else 1 for at in range(4)])
            for dim, size in enumerate(logits.shape)
        )
        logits = score(logits, *places)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    keys = logits.shape[-1]
    if sink_H is not None:
        logits = torch.cat([logits, sink_H[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    dead = (logits == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    if not with_lse:
        return weights[..., :keys] @ value
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


M = TypeVar("M", bound=torch.nn.Module)


def filled(model: M, scale: float = 0.3) -> M:
    """``model`` itself, with parameters that depend on their number and shape alone."""
    for index, parameter in enumerate(model.parameters()):
        parameter.data = randn(index, *parameter.shape) * scale
    return model


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


def document_lengths(length: int) -> tuple[int, ...]:
    """The documents of :func:`mask_cases`."""
    return (1, length // 2, 1, length - length // 2 - 2)


@dataclass(frozen=True)
class Dilated(Mask):
    """Every ``step``-th of the last ``reach`` positions, and with ``both`` of the next: a mask with gaps of a user."""

    reach: int
    step: int
    both: bool = False

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (q_positions_L - self.reach).clamp(min=0), q_positions_L + 1 + self.reach * self.both

    def allowed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        distance_LM = q_positions_L[:, None] - kv_positions_M
        return super().allowed(q_positions_L, kv_positions_M) & (distance_LM % self.step == 0)


def mask_cases(length: int) -> dict[str, MaskCase]:
    """Every mask with structure, and conjunctions of them, for a sequence of ``length`` >= 5 positions."""
    lengths = document_lengths(length)
    document = document_of(lengths)
    prefixes = (1, length // 4, 0, (length - length // 2 - 2) // 2)
    starts = [sum(lengths[:index]) for index in range(4)]

    pictures = (0, length // 3), (length // 2, length - 1)

    def in_prefix(key: int) -> bool:
        return key - starts[document(key)] < prefixes[document(key)]

    # A prompt with two rollouts, and another prompt. The second rollout is a second band.
    parents = (-1, 0, 0, -1)
    paths = ((0,), (0, 1), (0, 2), (3,))

    def on_path(query: int, key: int) -> bool:
        return key <= query and document(key) in paths[document(query)]

    def place(position: int) -> int:
        """The number of tokens before a position in its rollout."""
        node = document(position)
        return position - starts[node] + sum(lengths[each] for each in paths[node][:-1])

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
        "pictures": (
            WithBlocks(Causal() & SlidingWindow(3, 0), pictures, length),
            lambda p, j: p - 3 <= j <= p or any(low <= p < high and low <= j < high for low, high in pictures),
        ),
        "tree": (Tree(lengths, parents), on_path),
        "windowed tree": (
            SlidingWindow(3) & Tree(lengths, parents) & Causal(),
            lambda p, j: on_path(p, j) and place(p) - place(j) <= 3,
        ),
        "causal chunks": (Causal() & Chunked(3), lambda p, j: p // 3 == j // 3 and j <= p),
        "windowed documents": (
            SlidingWindow(2, 1) & Documents(lengths),
            lambda p, j: document(p) == document(j) and p - 2 <= j <= p + 1,
        ),
        "dilated documents": (
            Dilated(9, 3) & Documents(lengths),
            lambda p, j: document(p) == document(j) and j in (p, p - 3, p - 6, p - 9),
        ),
    }
    return {name: MaskCase(mask, sees) for name, (mask, sees) in cases.items()}


# -- masks of a problem --


@dataclass(frozen=True)
class Sizes:
    """Whole lengths of queries and keys, query heads, the batch; dtype and seed of a mask that is a tensor."""

    length: int
    keys: int
    heads: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.float64
    seed: int = 0


@dataclass(frozen=True)
class MaskValue:
    """A mask of the package, and the oracle's: booleans or a bias, or both, that broadcast to [B, H, L, M].

    A call that is given ``tensor`` is in a module or block whose mask is ``band``. ``blocks`` is the mask for
    FlexAttention. Each rank combines ``mask`` with the keys that its queries have selected: ``selected`` [B, G, L, K]
    has the numbers of their blocks of ``block`` keys, or -1.
    """

    mask: Mask
    sees: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    band: Mask | None = None
    tensor: torch.Tensor | None = None
    blocks: BlockMask | None = None
    selected: torch.Tensor | None = None
    block: int = 1


@cache
def _pairs(name: str, length: int) -> MaskValue:
    case = mask_cases(length)[name]
    return MaskValue(case.mask, allowed(case.sees, length, length))


def _dense(shape: str, boolean: bool, causal: bool, sizes: Sizes) -> MaskValue:
    """``shape``: a letter a dim; B, H, L and M are whole, 1 broadcasts. Some rows of whole masks see nothing."""
    whole = {"B": sizes.batch, "H": sizes.heads, "L": sizes.length, "M": sizes.keys, "1": 1}
    shapes = [whole[letter] for letter in shape]
    bias = randn(7 + sizes.seed, *shapes).masked_fill(randn(8 + sizes.seed, *shapes) > 1.0, float("-inf"))
    if "L" in shape and "M" in shape:
        bias[..., sizes.length // 2, :] = float("-inf")
    tensor = bias > -0.5 if boolean else bias.to(sizes.dtype)
    band = Causal() if causal else None
    mask = Dense(tensor) if band is None else Dense(tensor) & band
    inside = torch.ones(sizes.length, sizes.keys, dtype=torch.bool)
    inside = inside.tril() if causal else inside
    sees, bias = (tensor & inside, None) if boolean else (inside if causal else None, tensor)
    return MaskValue(mask, sees, bias, band, tensor)


def _sink_and_window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """No band: the first tokens, and a window that is wider in every second head."""
    return (q >= kv) & ((kv < 3) | (q - kv < 4 + 9 * (h % 2)))


def _two_documents(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A band, of another document in each row of the batch."""
    return (q >= kv) & ((q < 11 + b) == (kv < 11 + b))


@cache
def _block_mask(mod: Callable[..., torch.Tensor], batch: int, heads: int, length: int) -> MaskValue:
    sizes = (batch, heads, length, length)
    whole = [torch.arange(size) for size in sizes]
    sees = mod(*(index.view([-1 if dim == place else 1 for place in range(4)]) for dim, index in enumerate(whole)))
    blocks = create_block_mask(mod, *sizes, device="cpu", BLOCK_SIZE=(32, 16))
    return MaskValue(FlexMask(blocks), sees.expand(sizes), blocks=blocks)


def _of_rows(sizes: Sizes) -> MaskValue:
    """Another mask in each row of the batch."""
    names = random.Random(sizes.seed).choices(sorted(mask_cases(sizes.length)), k=sizes.batch)
    rows = [_pairs(name, sizes.length) for name in names]
    sees = torch.stack([row.sees for row in rows if row.sees is not None])[:, None]
    return MaskValue(PerRow(tuple(row.mask for row in rows)), sees)


def _of_rows_and_heads(sizes: Sizes) -> MaskValue:
    rows, dense = _of_rows(sizes), _dense("BHLM", False, False, sizes)
    return replace(dense, mask=rows.mask & dense.mask, sees=rows.sees, band=rows.mask)


def _selected(sizes: Sizes) -> MaskValue:
    """Up to three keys, or blocks of keys, for each query, or for each of its heads; some queries have none."""
    rows, length = (sizes.batch if sizes.seed % 2 else 1), sizes.length
    groups, block = (sizes.heads if sizes.seed % 3 else 1), (1, 4)[sizes.seed // 2 % 2]
    generator, blocks = torch.Generator().manual_seed(sizes.seed), -(-length // block)
    selected = torch.randint(-blocks // 2, blocks, (rows, groups, length, 3), generator=generator).clamp(min=-1)
    sees = torch.zeros(rows, groups, length, blocks + 1, dtype=torch.bool).scatter_(-1, selected % (blocks + 1), True)
    sees = sees[..., :blocks].repeat_interleave(block, -1)[..., :length].tril()
    return MaskValue(Causal(), sees, selected=selected, block=block)


MASKS: dict[str, Callable[[Sizes], MaskValue]] = {
    **{name: partial(lambda name, sizes: _pairs(name, sizes.length), name) for name in mask_cases(5) if name != "full"},
    "full": lambda sizes: MaskValue(Full(), torch.ones(sizes.length, sizes.keys, dtype=torch.bool)),
    "documents of one": lambda sizes: MaskValue(
        Documents((1,) * sizes.length), torch.eye(sizes.length, dtype=torch.bool)
    ),
    **{f"bool {shape}": partial(_dense, shape, True, False) for shape in ("LM", "HLM", "1M")},
    **{f"float {shape}": partial(_dense, shape, False, False) for shape in ("LM", "BHLM", "B1LM", "1HLM", "L1")},
    "bool BHLM & causal": partial(_dense, "BHLM", True, True),
    "float H1M & causal": partial(_dense, "H1M", False, True),
    "BlockMask": lambda sizes: _block_mask(_sink_and_window, sizes.batch, sizes.heads, sizes.length),
    "BlockMask of documents": lambda sizes: _block_mask(_two_documents, sizes.batch, sizes.heads, sizes.length),
    "another in each row": _of_rows,
    "selected & causal": _selected,
    "another in each row & float": _of_rows_and_heads,
}
