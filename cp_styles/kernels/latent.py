"""Multi-head latent attention: a kernel whose keys and values are latents, which it expands for some heads at a time.

Shapes: B batch, H query heads, L queries, M keys, R dim of a latent, r rotary dims, D head dim of queries and keys,
E head dim of values, K = D - r + E the rows of a head in the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from cp_styles.kernels.autocast import without_autocast
from cp_styles.kernels.base import Kernel, TensorSpec, tile_function
from cp_styles.kernels.merge import accumulation_dtype


@dataclass(frozen=True)
class LatentKernel(Kernel):
    """Attention with the keys ``[c W_k, k_rot]`` and the values ``c W_v`` of each head, for latents c.

    The tensors of a tile that other kernels call key and value are the latent ``c_B1MR`` and the rotary part of the key
    ``rot_B1Mr``, which all heads share. So these travel between ranks, and so do their gradients. A tile expands them
    for a range of heads, calls ``inner``, and continues with the next range: forward, and again in the backward.

    Memory of a tile, in addition to the kernel ``inner``: keys and values of ``head_rows`` rows, counted over heads, or
    of one head; in a backward also their gradients, and the gradient of the weight in float32 or wider.

    Source: DeepSeek-V2 (2024), multi-head latent attention.

    Attributes:
        latent_dim: R.
        nope_dim: D - r, the dims of a key without rotary positions.
        value_dim: E.
        inner: computes the attention of expanded keys. None: the fastest that can.
        head_rows: heads x rows of keys that are expanded at once, at least one head. The default fills a GPU with
            blocks of 128 keys of one head.
        weight_HKR: for each head first the rows of its keys, then the rows of its values. None: not given yet.
        share_HKR: sum of the gradients of the weight over the tiles of a backward.
    """

    latent_dim: int
    nope_dim: int
    value_dim: int
    inner: Kernel | None = None
    head_rows: int = 2**16
    weight_HKR: torch.Tensor | None = field(default=None, repr=False, compare=False)
    share_HKR: torch.Tensor | None = field(default=None, repr=False, compare=False)

    small_tiles, windows, streams_keys, merge = (  # pyright: ignore[reportAssignmentType]
        property(attrgetter(f"tiles.{name}")) for name in ("small_tiles", "windows", "streams_keys", "merge")
    )

    @property
    def positional(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner is not None and self.inner.positional

    @property
    def content(self):
        return 0 if self.inner is None else self.inner.content

    @property
    def tiles(self) -> Kernel:
        """The kernel of expanded tiles."""
        assert self.inner is not None, "kernel_for_tiles chooses it"
        return self.inner

    def dims(self, k_BGMD, v_BGME):
        return self.nope_dim + v_BGME.shape[3], self.value_dim

    def with_heads(self, heads):
        return replace(
            self,
            weight_HKR=None if self.weight_HKR is None else self.weight_HKR[slice(*heads)],
            share_HKR=None if self.share_HKR is None else self.share_HKR[slice(*heads)],
        )

    def with_learned(self, learned, *, backward):
        assert learned is not None
        weight_HKR = learned.view(-1, self.nope_dim + self.value_dim, self.latent_dim)
        if not backward:
            return replace(self, weight_HKR=weight_HKR), ()
        share_HKR = torch.zeros_like(weight_HKR, dtype=accumulation_dtype(learned.dtype))
        return replace(self, weight_HKR=weight_HKR, share_HKR=share_HKR), (share_HKR,)

    def expanded_specs(self, tensors: Sequence[Any]) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """The properties of expanded query, key and value, for a call with these query, latent and rotary keys."""
        q, latent, _ = tensors
        shapes = ((*q.shape[:2], latent.shape[2], dim) for dim in (q.shape[3], self.value_dim))
        q, k, v = (TensorSpec(torch.Size(shape), q.dtype, q.device) for shape in (q.shape, *shapes))
        return q, k, v

    def check(self, q_BHLD, k_BGMD, v_BGME, *, biased):
        self.tiles.check(*self.expanded_specs((q_BHLD, k_BGMD, v_BGME)), biased=biased)  # pyright: ignore

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, bias, **options):
        parts = []
        with without_autocast(q_BHLD.device):
            for _, weight_hKR, (q,), of_range in self._ranges(k_BGMD, (q_BHLD,), bias, options):
                k, v = self._expand(weight_hKR, k_BGMD, v_BGME)
                parts.append(tile_function(self.tiles, "forward")(q, k, v, **of_range))
        outs, lses = zip(*parts, strict=True)
        return _join_heads(outs), _join_heads(lses)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, bias, **options):
        assert self.share_HKR is not None
        wide, dqs = self.share_HKR.dtype, []
        dlatent_BMR, drot_BMr = (torch.zeros_like(x[:, 0], dtype=wide) for x in (k_BGMD, v_BGME))
        with without_autocast(q_BHLD.device):
            tensors = grad_BHLE, q_BHLD, out_BHLE, lse_BHL
            for heads, weight_hKR, (grad, q, out, lse), of_range in self._ranges(k_BGMD, tensors, bias, options):
                k, v = self._expand(weight_hKR, k_BGMD, v_BGME)
                dq, dk, dv = tile_function(self.tiles, "backward")(grad, q, k, v, out, lse, **of_range)
                del k, v
                dqs.append(dq)
                drot_BMr += dk[..., self.nope_dim :].sum(1, dtype=wide)
                dkv_BMN = torch.cat((dk[..., : self.nope_dim], dv), -1).transpose(1, 2).flatten(2)
                del dk, dv
                dlatent_BMR += dkv_BMN @ weight_hKR.flatten(0, 1)
                latent_TR = k_BGMD[:, 0].to(dkv_BMN.dtype).flatten(0, 1)
                self.share_HKR[slice(*heads)] += (dkv_BMN.flatten(0, 1).mT @ latent_TR).view(weight_hKR.shape)
        return _join_heads(dqs), dlatent_BMR[:, None], drot_BMr[:, None]

    def _ranges(
        self,
        k_BGMD: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        options: dict[str, Any],
    ) -> Iterator[tuple[tuple[int, int], torch.Tensor, list[torch.Tensor], dict[str, Any]]]:
        """For ranges of heads: the range, the weight, the part of ``tensors`` [B, H, ...], and the kernel's options."""
        weight_HKR = self.weight_HKR
        assert weight_HKR is not None
        heads, narrow = tensors[0].shape[1], k_BGMD.dtype
        wide = self.tiles.tile_dtype(narrow)
        step = max(1, self.head_rows // max(k_BGMD.shape[0] * k_BGMD.shape[2], 1))
        for first in range(0, heads, step):
            part = slice(first, first + step)
            own = [x[:, part].to(wide) if x.dtype == narrow else x[:, part] for x in tensors]
            of_range = options | {"bias": _heads_of(bias, part)}
            if "where" in options:
                of_range["where"] = options["where"]._replace(head=options["where"].head + first)
            yield (first, min(first + step, heads)), weight_HKR[part].to(wide), own, of_range

    def _expand(
        self, weight_hKR: torch.Tensor, latent_B1MR: torch.Tensor, rot_B1Mr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Key [B, h, M, D] and value [B, h, M, E] of some heads, rows outermost in memory, in the weight's dtype."""
        heads, dtype = len(weight_hKR), weight_hKR.dtype
        flat_BMN = latent_B1MR[:, 0].to(dtype) @ weight_hKR.flatten(0, 1).mT
        nope, v = flat_BMN.unflatten(2, (heads, -1)).split((self.nope_dim, self.value_dim), 3)
        rot = rot_B1Mr.to(dtype).transpose(1, 2).expand(-1, -1, heads, -1)
        return torch.cat((nope, rot), 3).transpose(1, 2), v.transpose(1, 2)


def _heads_of(bias: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    return bias if bias is None or bias.ndim < 3 or bias.shape[-3] == 1 else bias[..., heads, :, :]


def _join_heads(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [B, h, L, ...] of ranges of heads as one, with the memory order of the first."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 3:
        return torch.cat(tuple(parts), 1)
    return torch.cat([x.transpose(1, 2) for x in parts], 2).transpose(1, 2)
