"""Which kernel computes which tile: asked tile by tile, so that no rank has to know what another one's tiles are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from cp_styles.kernels.base import Kernel, TileCall
from cp_styles.kernels.reference import ReferenceKernel
from cp_styles.kernels.sdpa import SDPA_KERNELS


def kernel_for_tiles(
    tensors: Sequence[torch.Tensor], *, named: Kernel | None = None, preferred: Kernel | None = None
) -> Kernel:
    """What computes the tiles of a call with these query, key and value ``[B, H, S, D]``.

    Tiles without an explicit mask go to the kernel that the user ``named``; else to ``preferred``, where that takes the
    tensors; else to the first of SDPA_KERNELS that does, and last to the reference. Tiles with an explicit mask go to
    the same kernel where it takes masks, else to the first of the others that does. The choice depends on head dims,
    dtype and device, so it is the same on every rank.

    Raises:
        NotImplementedError: when the named kernel does not take the tensors; and when it takes no masks, and is told
            where its tiles are: what it computes then is more than softmax attention, and no other kernel stands in.
    """
    order = (*([preferred] if preferred else []), *SDPA_KERNELS, ReferenceKernel())

    def takes(kernel: Kernel, *, biased: bool) -> bool:
        try:
            kernel.check(*tensors, biased=biased)
        except NotImplementedError:
            return False
        return True

    if named is not None:
        named.check(*tensors, biased=False)
        if named.positional:
            named.check(*tensors, biased=True)
    plain = named or next(kernel for kernel in order if takes(kernel, biased=False))
    masked = next(kernel for kernel in (plain, *order) if takes(kernel, biased=True))
    return plain if masked is plain else ByTile(plain, masked)


@dataclass(frozen=True)
class ByTile(Kernel):
    """``plain`` for the tiles without an explicit mask, ``masked`` for those with one.

    Both compute the same function, each tile's logsumexp included, so tiles of both merge, and in a backward either is
    given the whole attention's ``out`` and ``lse``.
    """

    plain: Kernel
    masked: Kernel

    @property
    def small_tiles(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.plain.small_tiles

    @property
    def content(self):
        return hash((self.plain.content, self.masked.content))

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale):
        return self._of(bias).forward(q_BHLD, k_BGMD, v_BGME, causal=causal, bias=bias, scale=scale)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale):
        tensors = (grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL)
        return self._of(bias).backward(*tensors, causal=causal, bias=bias, scale=scale)

    def forward_tiles(self, tiles):
        return self._each(tiles, lambda kernel, run: kernel.forward_tiles(run))

    def backward_tiles(self, tiles):
        return self._each(tiles, lambda kernel, run: kernel.backward_tiles(run))

    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        (self.masked if biased else self.plain).check(q_BHLD, k_BGMD, v_BGME, biased=biased)

    def tile_dtype(self, dtype):
        """What both prefer; else that of the inputs, for which both were checked."""
        found = {kernel.tile_dtype(dtype) for kernel in (self.plain, self.masked)}
        return found.pop() if len(found) == 1 else dtype

    def _of(self, bias: torch.Tensor | None) -> Kernel:
        return self.plain if bias is None else self.masked

    def _each(
        self, tiles: Iterable[TileCall], how: Callable[[Kernel, Iterable[TileCall]], Iterator[tuple[int, Any]]]
    ) -> Iterator[tuple[int, Any]]:
        """(Number of the tile, its result) each; neighbours for one kernel are given to it together."""
        for plain, run in groupby(enumerate(tiles), lambda entry: entry[1].options["bias"] is None):
            numbers: list[int] = []
            kernel = self.plain if plain else self.masked
            for index, result in how(kernel, _noting(run, numbers)):
                yield numbers[index], result


def _noting(run: Iterable[tuple[int, TileCall]], numbers: list[int]) -> Iterator[TileCall]:
    """The calls of ``run``, one by one as they are asked for, and their numbers in ``numbers``."""
    for number, call in run:
        numbers.append(number)
        yield call
