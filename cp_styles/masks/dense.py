"""Masks that are a tensor, boolean or additive."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias, CausalVariant

from cp_styles._lib.checksum import digest, version_of
from cp_styles._lib.troubleshooting import see
from cp_styles._lib.unsupported_derivatives import refuse_transforms
from cp_styles.masks.algebra import Full, Mask


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean (True: attend) or additive float mask, broadcastable to ``[B, H, S_q, S_kv]``, whole on every rank.

    Two Dense masks are equal if they hold one tensor object. Do not change the tensor in place. A float mask that
    requires grad is refused, because its gradient is not implemented.

    Args:
        tensor: the mask, of 2 to 4 dims. Rows and columns are in the order of positions.

    Raises:
        ValueError: the shape does not broadcast to 4 dims, or, at a call, to the dims of the attention.
        TypeError: the dtype is neither bool nor floating point, or the tensor is of a subclass of torch.Tensor.
        NotImplementedError: the tensor requires grad.

    Example::

        mask = Dense(torch.rand(1000, 1000) > 0.5) & Causal()
    """

    tensor: torch.Tensor
    positional, has_bias = False, True  # pyright: ignore[reportAssignmentType]
    _version: int = field(init=False, default=0)

    @property
    def pattern(self) -> Mask:
        return SomeBias()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __post_init__(self) -> None:
        check_plain_mask(self.tensor)
        if self.tensor.ndim < 2 or self.tensor.ndim > 4:
            raise ValueError(f"a dense mask must broadcast to [B, H, S_q, S_kv], got shape {tuple(self.tensor.shape)}")
        if self.tensor.dtype != torch.bool and not self.tensor.is_floating_point():
            raise TypeError(f"a dense mask must be bool (True: attend) or float (added), got {self.tensor.dtype}")
        refuse_transforms("a dense mask", (self.tensor,))
        object.__setattr__(self, "_version", version_of(self.tensor))
        if self.tensor.requires_grad:
            raise NotImplementedError(
                "the gradient of an attention bias is not computed under context parallelism: use "
                "flex_attention with a score_mod that reads the table, or detach() the mask"
                f"{see('A learned attention bias')}"
            )

    bounds, breaks = Full.bounds, Full.breaks

    @property
    def additive(self) -> bool:
        return self.tensor.dtype != torch.bool

    @property
    def content(self) -> int:
        return digest(self.tensor)

    @property
    def varies_by_head_or_row(self) -> bool:
        return any(size != 1 for size in self.tensor.shape[:-2])

    @property
    def length(self) -> int | None:
        sizes = [size for size in self.tensor.shape[-2:] if size != 1]
        return sizes[-1] if sizes else None

    def check(self, shape: tuple[int, int, int, int]) -> None:
        sizes = tuple(self.tensor.shape)
        if any(size not in (1, expected) for size, expected in zip(sizes, shape[-len(sizes) :], strict=True)):
            raise ValueError(
                f"a dense mask of shape {sizes} does not broadcast to [B, H, S_q, S_kv] = {list(shape)}: give the mask "
                "of the whole sequence, rows and columns in the order of positions"
                f"{see('A mask of another length')}"
            )

    def row(self, index: int) -> Mask:
        if self.tensor.ndim < 4 or self.tensor.shape[0] == 1:
            return self
        if index >= self.tensor.shape[0]:
            raise ValueError(f"{self!r} has no row {index} of the batch")
        return Dense(self.tensor[index : index + 1])

    def __repr__(self) -> str:
        return f"Dense({tuple(self.tensor.shape)}, {self.tensor.dtype})"

    def check_unchanged(self) -> None:
        if version_of(self.tensor) != self._version:
            raise RuntimeError(f"{self!r} was changed in place after it was given as a mask; give a copy")

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        self.check_unchanged()
        bias = self.tensor
        rows, columns = q_positions_L.to(bias.device), kv_positions_M.to(bias.device)
        # Select rows and columns in one step, because rows with all columns would be much larger than a tile.
        if bias.shape[-2] != 1 and bias.shape[-1] != 1:
            bias = bias[..., rows[:, None], columns]
        elif bias.shape[-2] != 1:
            bias = bias.index_select(-2, rows)
        elif bias.shape[-1] != 1:
            bias = bias.index_select(-1, columns)
        if bias.dtype == torch.bool:
            return torch.zeros(bias.shape, device=bias.device).masked_fill_(~bias, float("-inf"))
        return bias


def causal_bias(attn_mask: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor | None, bool]:
    """``(attn_mask, is_causal)``, with torch's ``causal_upper_left(...)`` and ``causal_lower_right(...)`` as causal.

    A ``causal_lower_right`` for more keys than queries stays, and :func:`check_plain_mask` refuses it.
    """
    # torch too ignores the lengths of the mask, which may be the lengths of the shard or of the whole sequence.
    if isinstance(attn_mask, CausalBias) and not is_causal:
        square = attn_mask.seq_len_q == attn_mask.seq_len_kv
        if square or attn_mask.variant == CausalVariant.UPPER_LEFT:
            return None, True
    return attn_mask, is_causal


def check_plain_mask(tensor: torch.Tensor) -> None:
    """Raise TypeError for subclasses of torch.Tensor, whose memory need not have the values of the mask."""
    if isinstance(tensor, CausalBias):
        raise TypeError(
            f"an attn_mask {tensor.variant.name} for {tensor.seq_len_q} queries and {tensor.seq_len_kv} keys is not a "
            "tensor of values: for a causal mask pass is_causal=True, or Causal() where a mask object is expected; "
            "for another one the boolean mask of the whole sequence"
        )
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise TypeError(
            f"a mask must be a plain torch.Tensor, got {type(tensor).__module__}.{type(tensor).__qualname__}: pass the "
            "values of the whole sequence's mask as a plain tensor"
        )


@dataclass(frozen=True)
class SomeBias(Mask):
    """The pattern of a mask with a bias. Caches of plans hold it instead of the mask with its tensor."""

    bounds, breaks, has_bias = Full.bounds, Full.breaks, True  # pyright: ignore[reportAssignmentType]
