"""The largest score of each query: a kernel and a merge in which maxima take the place of logsumexps.

Shapes: B batch, H query heads, G key heads, L queries, M keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from cp_styles.kernels.autocast import without_autocast
from cp_styles.kernels.base import Kernel
from cp_styles.kernels.flex import FlexKernel
from cp_styles.kernels.merge import EMPTY_LSE, Merge, accumulation_dtype
from cp_styles.kernels.reference import matmul

# Number of scores that are computed at a time, of at most so many keys.
_SCORES, _KEYS = 2**23, 2**10


@dataclass(frozen=True)
class MaxMerge(Merge):
    """The maximum of two maxima. The values have no head dims."""

    def __call__(self, out_BHLE, lse_BHL, new_out_BHLE, new_lse_BHL, index=None):
        if index is None:
            torch.maximum(lse_BHL, new_lse_BHL, out=lse_BHL)
        else:
            lse_BHL.index_copy_(2, index, torch.maximum(lse_BHL.index_select(2, index), new_lse_BHL))


@dataclass(frozen=True)
class MaxScores(Kernel):
    """The largest score of each query, in place of the logsumexp: in float32, or in float64 for float64. No backward.

    The values of a tile have 0 head dims, and so has its output. So keys alone travel. A block of scores is computed
    at a time. A tile with an explicit mask has this mask in memory, as in attention.

    Attributes:
        scores: computes scores with a score_mod. None: the scores are q k^T scale, with the bias of the mask.
    """

    scores: FlexKernel | None = None
    merge = MaxMerge()

    @property
    def positional(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scores is not None

    @property
    def small_tiles(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scores is None

    windows = small_tiles  # pyright: ignore[reportAssignmentType]

    @property
    def content(self):
        return 0 if self.scores is None else self.scores.content

    @property
    def only_for(self):
        return () if self.scores is None else self.scores.only_for

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale, window=None, pack=None, **where):
        options = {"causal": causal, "bias": bias, "scale": scale}
        if pack is not None:
            return pack.one_by_one(partial(self.forward, window=window, **options), (q_BHLD, k_BGMD, v_BGME), 0)
        if self.scores is not None:
            max_BHL = self.scores.max_scores(q_BHLD, k_BGMD, **options, **where)
        else:
            with without_autocast(q_BHLD.device):
                max_BHL = _max_of_blocks(q_BHLD, k_BGMD, bias, scale, (-1, 0) if causal else window or (-1, -1))
        return q_BHLD[..., :0], max_BHL.masked_fill(max_BHL == -math.inf, EMPTY_LSE)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale):
        raise NotImplementedError("the largest scores have no gradient: detach them")

    def check(self, q_BHLD, k_BGMD, v_BGME, *, biased):
        pass


def _max_of_blocks(
    q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, bias: torch.Tensor | None, scale: float, window: tuple[int, int]
) -> torch.Tensor:
    """The largest score of each query, -inf without keys, in the accumulation dtype. ``window``: see Kernel.windows."""
    dtype, device, (batch, heads, queries, _) = accumulation_dtype(q_BHLD.dtype), q_BHLD.device, q_BHLD.shape
    groups, keys = k_BGMD.shape[1:3]
    before, after = (math.inf if size < 0 else size for size in window)
    max_BHL = torch.full((batch, heads, queries), -math.inf, dtype=dtype, device=device)
    own_L1, numbers_M = torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        bias = bias.expand(*bias.shape[:2], queries, keys)
    columns = min(keys, _KEYS)
    rows = max(1, _SCORES // (batch * heads * columns))
    for (first, last), (first_key, last_key) in product(_blocks(queries, rows), _blocks(keys, columns)):
        # Distances from the query's own key, see Kernel.windows, to the keys of the block.
        least, most = (distance + queries - keys for distance in (first_key - last + 1, last_key - 1 - first))
        if most < -before or least > after:
            continue
        # The query heads of a key head are rows of one product, so that no key is copied.
        q = q_BHLD[:, :, first:last].to(dtype).unflatten(1, (groups, -1)).flatten(2, 3)
        scores = matmul(q, k_BGMD[:, :, first_key:last_key].to(dtype).mT).mul_(scale)
        scores = scores.view(batch, heads, last - first, last_key - first_key)
        if bias is not None:
            scores += bias[:, :, first:last, first_key:last_key]
        if least < -before or most > after:
            own, those = own_L1[first:last], numbers_M[first_key:last_key]
            scores.masked_fill_((those < own - before) | (those > own + after), -math.inf)
        block = max_BHL[:, :, first:last]
        torch.maximum(block, scores.amax(-1), out=block)
        del scores  # free the memory for the next block
    return max_BHL


def _blocks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``size``, in order."""
    for first in range(0, length, size):
        yield first, min(first + size, length)
