"""What a local attention kernel must be able to do for the plan: one tile forward, one tile backward.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), L queries, M keys, D head dim, E value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch


class Where(NamedTuple):
    """Where a tile is in the whole attention.

    Attributes:
        q_L: global position of each query.
        kv_M: global position of each key.
        head: which of the whole attention's query heads the tile's first one is.
    """

    q_L: torch.Tensor
    kv_M: torch.Tensor
    head: int


class Kernel(ABC):
    """Attention of one tile on one device. Stateless; L and M are never 0."""

    # Whether forward and backward take one more keyword, ``where`` (a Where).
    positional: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        *,
        causal: bool,
        bias: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out_BHLE, lse_BHL)``: the tile's softmax(q k^T scale + bias) v and its logsumexp (float32 or float64).

        ``causal`` comes with L == M and is aligned at the top left. ``bias`` broadcasts to [B, H, L, M]; a row that it
        masks altogether gives out = 0 and lse = EMPTY_LSE.
        """

    @abstractmethod
    def backward(
        self,
        grad_BHLE: torch.Tensor,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        out_BHLE: torch.Tensor,
        lse_BHL: torch.Tensor,
        *,
        causal: bool,
        bias: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(dq, dk, dv)`` of the tile, given ``out`` and ``lse`` of the *whole* attention (all tiles merged)."""

    @abstractmethod
    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        """Raise NotImplementedError, with a remedy, for what the kernel cannot do.

        Asked once for tensors of one shape, dtype and device: only those may matter.
        """

    def tile_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype to run the tiles of inputs of ``dtype`` when there are several to merge.

        A kernel that can only return low precision adds one rounding a tile; one that is as fast in float32 need not.
        """
        return dtype
