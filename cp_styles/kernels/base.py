"""What a local attention kernel must be able to do for the plan: one tile forward, one tile backward.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), L queries, M keys, D head dim, E value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

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


class TileCall(NamedTuple):
    """The arguments of one ``forward`` or ``backward``: its tensors, and its keyword arguments."""

    tensors: tuple[torch.Tensor, ...]
    options: dict[str, Any]


class Kernel(ABC):
    """Attention of one tile on one device. Stateless; L and M are never 0."""

    # Whether forward and backward take one more keyword, ``where`` (a Where).
    positional: ClassVar[bool] = False
    # Whether many small tiles cost little, so that the plan need not join them.
    small_tiles: ClassVar[bool] = False
    # Whether it takes every tile of an attention that it takes: see takes().
    takes_all: ClassVar[bool] = True

    @property
    def content(self) -> int:
        """A number, the same in all processes, that differs where kernels differ in what their texts do not say."""
        return 0

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

    def forward_tiles(self, tiles: Iterable[TileCall]) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """``forward`` of tiles of one attention, whose keys have all arrived: (number of the tile, its result) each.

        One by one as they are asked for, so that no two of them are in memory together. A kernel that is better at
        several in one call overrides it; results may come in any order.
        """
        for index, (tensors, options) in enumerate(tiles):
            yield index, self.forward(*tensors, **options)

    def backward_tiles(
        self, tiles: Iterable[TileCall]
    ) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """``backward`` of tiles of one attention, likewise."""
        for index, (tensors, options) in enumerate(tiles):
            yield index, self.backward(*tensors, **options)

    @abstractmethod
    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        """Raise NotImplementedError, with a remedy, for what the kernel cannot do.

        Asked once for tensors of one shape, dtype and device, with ``biased`` for tiles that have an explicit mask:
        only those may matter.
        """

    def takes(
        self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, causal: bool, biased: bool
    ) -> bool:
        """Whether to give it this tile, of an attention for which :meth:`check` has passed; if not, another kernel gets
        the tile. Tiles differ in rows, and in a backward the head dims may be larger than the attention's."""
        return True

    def tile_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype to run the tiles of inputs of ``dtype`` when there are several to merge.

        A kernel that can only return low precision adds one rounding a tile; one that is as fast in float32 need not.
        """
        return dtype
