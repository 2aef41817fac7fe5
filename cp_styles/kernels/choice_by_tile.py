"""The choice of a kernel for each tile. A rank chooses for its own tiles only, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from cp_styles.kernels.base import Kernel, tile_function
from cp_styles.kernels.latent import LatentKernel
from cp_styles.kernels.merge import Merge
from cp_styles.kernels.reference import ReferenceKernel
from cp_styles.kernels.sdpa import SDPA_KERNELS


def kernel_for_tiles(tensors: Sequence[torch.Tensor], *, named: Kernel | None = None) -> Kernel:
    """The kernel for the tiles of a call with these query, key and value ``[B, H, S, D]``.

    Tiles without an explicit mask go to the kernel that the user ``named``, else to the first of SDPA_KERNELS that
    takes them, else to the reference. Tiles with an explicit mask go to the same kernel if it takes masks, else to the
    first of the remaining kernels that does. A tile that a kernel does not take goes to the next one. The choice
    depends on head dims, dtype and device. Ranks may choose differently. A LatentKernel stays, and gets the kernel for
    the tiles that it expands.

    Raises:
        NotImplementedError: the named kernel does not take the tensors. Or it takes no masks and is positional, so that
            no other kernel can replace it.
    """
    if isinstance(named, LatentKernel):
        return replace(named, inner=kernel_for_tiles(named.expanded_specs(tensors), named=named.inner))  # pyright: ignore
    order = (*SDPA_KERNELS, ReferenceKernel())

    def takes(kernel: Kernel, *, biased: bool) -> bool:
        try:
            kernel.check(*tensors, biased=biased)
        except NotImplementedError:
            return False
        return True

    if named is not None:
        named.check(*tensors, biased=False)
        if named.positional:  # it computes more than softmax attention
            named.check(*tensors, biased=True)
    plain = [*([named] if named else []), *(kernel for kernel in order if takes(kernel, biased=False))]
    masked = [kernel for kernel in (plain[0], *order) if takes(kernel, biased=True)]
    takes_all = plain[0] is masked[0] and plain[0].takes_all
    return plain[0] if takes_all else ByTile(tuple(plain), tuple(masked))


@dataclass(frozen=True)
class ByTile(Kernel):
    """Gives each tile to the first kernel that takes it: of ``masked`` with an explicit mask, of ``plain`` without one.

    All kernels compute the same function with its logsumexp. So their tiles can be merged, and each backward takes
    ``out`` and ``lse`` of the whole attention.
    """

    plain: tuple[Kernel, ...]
    masked: tuple[Kernel, ...]

    @property
    def small_tiles(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._short_tile_kernel.small_tiles

    @property
    def windows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._short_tile_kernel.windows

    @property
    def streams_keys(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._short_tile_kernel.streams_keys

    @property
    def dense_rows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._short_tile_kernel.dense_rows

    @property
    def merge(self) -> Merge:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.plain[0].merge

    @cached_property
    def _short_tile_kernel(self) -> Kernel:
        """The first kernel for tiles without a mask that takes short tiles. Plans are made for it."""
        return next(kernel for kernel in self.plain if not kernel.long_tiles)

    @property
    def content(self):
        return hash(tuple(kernel.content for kernel in (*self.plain, *self.masked)))

    def forward(self, *tensors, **options):
        return self._call_each_kernel("forward", tensors, 0, **options)

    def backward(self, *tensors, **options):
        return self._call_each_kernel("backward", tensors, 1, **options)

    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        (self.masked if biased else self.plain)[-1].check(q_BHLD, k_BGMD, v_BGME, biased=biased)

    def tile_dtype(self, dtype):
        """The dtype that the first kernels of both kinds prefer. If they differ, ``dtype``, which all kernels take."""
        dtypes = {kernel.tile_dtype(dtype) for kernel in (self.plain[0], self.masked[0])}
        return dtypes.pop() if len(dtypes) == 1 else dtype

    def choose_for_tile(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        causal: bool,
        bias: torch.Tensor | None,
        window: Any = None,
        pack: Any = None,
    ) -> tuple[Kernel | None, dict[str, Any]]:
        """The kernel of a tile with this query, key and value, and its keyword arguments except the scale.

        A band that no kernel with windows takes gets an explicit mask. The kernel is None for a pack that none takes.
        """
        if window is not None or pack is not None:
            extra = {name: value for name, value in (("window", window), ("pack", pack)) if value is not None}
            takers = (x for x in self.plain if x.windows >= ("window" in extra) and x.small_tiles >= ("pack" in extra))
            kernel = next((x for x in takers if x.takes(*tensors, causal=causal, biased=False)), None)
            if kernel is not None or pack is not None:
                return kernel, {"causal": causal, "bias": bias, **extra}
            bias = _make_band_bias(extra["window"], *tensors[:2])
        biased = bias is not None
        kernels = self.masked if biased else self.plain
        for kernel in kernels:
            if kernel.takes(*tensors, causal=causal, biased=biased):
                break
        return kernel, {"causal": causal, "bias": bias}

    def _call_each_kernel(
        self, phase: str, tensors: tuple[torch.Tensor, ...], query: int, *, scale: float, **options: Any
    ):
        """``query`` is the index of the query among ``tensors``."""
        kernel, arguments = self.choose_for_tile(tensors[query : query + 3], **options)
        if kernel is not None:
            return tile_function(kernel, phase)(*tensors, scale=scale, **arguments)
        single = options | {"pack": None, "scale": scale}
        return options["pack"].one_by_one(
            lambda *tile: self._call_each_kernel(phase, tile, query, **single), tensors, query
        )


def _make_band_bias(window: tuple[int, int], q_BHLD: torch.Tensor, k_BGMD: torch.Tensor) -> torch.Tensor:
    """The explicit mask [L, M] of a band: see Kernel.windows."""
    keys, device = k_BGMD.shape[2], q_BHLD.device
    ahead = torch.arange(keys, device=device) - torch.arange(keys - q_BHLD.shape[2], keys, device=device)[:, None]
    before, after = (size if size >= 0 else keys for size in window)
    outside = (ahead < -before) | (ahead > after)
    return torch.zeros(ahead.shape, dtype=q_BHLD.dtype, device=device).masked_fill_(outside, float("-inf"))
