"""The choice of a kernel for each tile. A rank chooses for its own tiles only, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from cp_styles.kernels.base import Bound, BoundKernel, Kernel, OtherBackward, bind_tile, in_order, is_own
from cp_styles.kernels.latent import LatentKernel
from cp_styles.kernels.merge import Merge
from cp_styles.kernels.reference import ReferenceKernel
from cp_styles.kernels.sdpa import SDPA_KERNELS, SdpaKernel
from cp_styles.kernels.selected import SelectedKernel


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
class ByTile(BoundKernel):
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

    @cached_property
    def _switched_kernel(self) -> Kernel:
        """A kernel with switches. The kernels of this package have the same."""
        return next((kernel for kernel in self.plain if kernel.switches()), self.plain[0])

    @property
    def content(self):
        return hash(tuple(kernel.content for kernel in (*self.plain, *self.masked)))

    def bind(self, phase, specs, *, causal, scale, biased=False, window=None, pack=None):
        kernel = self.choose_for_tile(specs, causal=causal, biased=biased, window=window, pack=pack)
        if kernel is not None:
            options = {"scale": scale, "biased": biased, "window": window, "pack": pack}
            return bind_tile(kernel, phase, specs, causal=causal, **options)
        if pack is not None:
            each = partial(getattr(self, phase), causal=causal, bias=None, scale=scale, window=window)
            query = int(phase == "backward")
            return Bound(tuple, lambda *tensors: pack.one_by_one(each, in_order(*tensors), query))
        q, k, _ = specs
        bound = self.bind(phase, specs, causal=causal, scale=scale, biased=True)
        mask = window, q.shape[2], k.shape[2], q.dtype, q.device

        def run(queries: Any, k: torch.Tensor, v: torch.Tensor) -> Any:
            # Tiles without a bias share arguments of queries, which a tile with a bias may take for itself.
            return bound.run(copy(queries), k, v, bias=_make_band_bias(*mask))

        return Bound(bound.queries, run)

    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        (self.masked if biased else self.plain)[-1].check(q_BHLD, k_BGMD, v_BGME, biased=biased)

    def switches(self):
        return self._switched_kernel.switches()

    def tile_dtype(self, dtype):
        """The dtype that the first kernels of both kinds prefer. If they differ, ``dtype``, which all kernels take."""
        dtypes = {kernel.tile_dtype(dtype) for kernel in (self.plain[0], self.masked[0])}
        return dtypes.pop() if len(dtypes) == 1 else dtype

    def choose_for_tile(
        self, specs: Sequence[Any], *, causal: bool, biased: bool, window: Any = None, pack: Any = None
    ) -> Kernel | None:
        """The kernel of a tile whose query, key and value are like ``specs``.

        None for a pack that no kernel takes, and for a band that no kernel with windows takes.
        """
        kernels = self.masked if biased else self.plain
        last = kernels[-1]
        if window is not None or pack is not None:
            last = None
            kernels = [x for x in kernels if x.windows >= (window is not None) and x.small_tiles >= (pack is not None)]
        return next((x for x in kernels if x.takes(*specs, causal=causal, biased=biased)), last)


def kernel_for_selected(kernel: Kernel) -> Kernel | None:
    """The kernel that gathers keys in place of ``kernel``, or None if ``kernel`` is not softmax attention of this
    package: its tiles have an explicit mask."""
    if isinstance(kernel, OtherBackward):
        inner = kernel_for_selected(kernel.inner)
        return inner and replace(kernel, inner=inner)
    if isinstance(kernel, ByTile):
        found = list(map(kernel_for_selected, (*kernel.plain, *kernel.masked)))
        return None if None in found else found[0]
    return SelectedKernel() if isinstance(kernel, SdpaKernel | ReferenceKernel) and is_own(kernel) else None


def _make_band_bias(window: Any, rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The explicit mask [L, M] of a band: see Kernel.windows."""
    ahead = torch.arange(keys, device=device) - torch.arange(keys - rows, keys, device=device)[:, None]
    before, after = (size if size >= 0 else keys for size in window)
    outside = (ahead < -before) | (ahead > after)
    return torch.zeros(ahead.shape, dtype=dtype, device=device).masked_fill_(outside, float("-inf"))
