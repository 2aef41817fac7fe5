"""A strategy: how queries, keys and values meet. A pair of functions over local tensors, forward and backward.

Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.

[Note: residual] What a backward needs beside query, key, value and out travels in *one* flat tensor of bytes, the
residual: the logsumexp, and whatever the strategy keeps instead of sending it twice. One tensor, because that is what
every door can carry safely: autograd saves it, checkpointing drops and recomputes it, save_on_cpu moves it, and behind
DTensor's dispatcher it takes the place of the logsumexp, which nobody reads but the backward of the same op.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from cp_styles.kernels import Kernel
from cp_styles.layout import SequenceLayout
from cp_styles.mask import Mask

T = TypeVar("T")


@dataclass(frozen=True)
class Attention:
    """One attention over a sharded sequence: everything but the tensors.

    Attributes:
        group: the ranks that share the sequence; None when there is only this one.
        q_layout: which query positions each of them holds.
        kv_layout: likewise for keys and values; differs from ``q_layout`` in cross-attention.
        mask: who attends to whom, in global positions.
        kernel: computes a tile.
        scale: factor of the logits.
        heads: which of the mask's heads the query heads are, where a mask has any; None: all of them.
    """

    group: dist.ProcessGroup | None
    q_layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    kernel: Kernel
    scale: float
    heads: tuple[int, int] | None = None
    _known: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` makes, made once a key: what a strategy derives from an attention and the shapes of its tensors
        is the same at every layer and step that uses it, and must hold no tensor of a call."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        return self.q_layout.ranks


Spec: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor inside a residual."""


class Strategy(ABC):
    """Objects of this type are immutable and compare by value, so that they can be shared and cached by."""

    def check_ranks(self, ranks: int) -> None:  # noqa: B027 - most strategies take any number
        """Raise ValueError when the strategy cannot work on so many ranks."""

    def over_two_axes(self, inner: int) -> Strategy:
        """This strategy where the sequence is cut over two mesh axes, the second of size ``inner``."""
        raise ValueError(f"{self} works on one mesh axis; for two take Ulysses(inner={self}), or flatten them yourself")

    def keeping_nothing(self) -> Strategy:
        """This strategy, with no received keys kept for the backward: for a forward whose results outlive its layer."""
        return self

    def prepare(  # noqa: B027 - one that plans nothing has nothing to prepare
        self, q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int, *, small_tiles: bool
    ) -> None:
        """Make now, to be found by a call later, what follows from layouts and mask alone: plans. No communication."""

    @abstractmethod
    def residual_specs(
        self, attention: Attention, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor
    ) -> list[Spec]:
        """What the residual of a call holds; of the tensors only shapes and dtypes are read. See [Note: residual]."""

    @abstractmethod
    def forward(
        self,
        attention: Attention,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        sink_H: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``out_BHLE``; fills ``residual`` when there is one, that is when a backward may come.

        ``sink_H`` is one more logit for every query of a head, which takes its share of the softmax and gives nothing
        (attention sinks).
        """

    @abstractmethod
    def backward(
        self,
        attention: Attention,
        grad_BHLE: torch.Tensor,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        out_BHLE: torch.Tensor,
        residual: torch.Tensor,
        sink_H: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``(dq, dk, dv, dsink)``, shaped and typed like the local ones; dsink is this rank's share of a sum."""

    @abstractmethod
    def logsumexp(
        self,
        attention: Attention,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``lse_BHL`` of the local queries as a forward left it in ``residual``; -inf where there was no key."""


# Views of the residual start at multiples of this many bytes, as allocators align and vector loads like.
_ALIGNMENT = 64


def residual_views(specs: Sequence[Spec], residual: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a residual, as views, in the order of ``specs``."""
    views, offset = [], 0
    for shape, dtype in specs:
        size = prod(shape) * dtype.itemsize
        views.append(residual[offset : offset + size].view(dtype).view(shape))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return views


def new_residual(specs: Sequence[Spec], device: torch.device) -> torch.Tensor:
    """An uninitialized residual with room for ``specs``: uint8 ``[bytes]``."""
    size = sum(-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in specs)
    return torch.empty(size, dtype=torch.uint8, device=device)
