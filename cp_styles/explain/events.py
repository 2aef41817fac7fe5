"""The shapes of an attention, and the events and the memory that its dry run records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from cp_styles.kernels import Kernel
from cp_styles.kernels.base import TensorSpec
from cp_styles.kernels.latent import LatentKernel


class Shapes(NamedTuple):
    """The shapes of an attention, without lengths.

    Attributes:
        heads, kv_heads: number of query heads, and of heads of keys and values.
        head_dim, value_dim: head dims of queries and keys, and of values.
        dtype: dtype of query, key and value.
        device: device of query, key and value; it decides which kernels compute.
        batch: number of rows of the batch.
        latent: the dims of a latent and of a rotary key, if these travel in place of heads: see
            :func:`~cp_styles.context_latent_attention`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    batch: int = 1
    latent: tuple[int, int] | None = None

    @classmethod
    def of(cls, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Shapes:
        """The shapes of a call of ``kernel`` with these local tensors."""
        (batch, heads, _, dim), latent = q.shape, (k.shape[3], v.shape[3]) if isinstance(kernel, LatentKernel) else None
        return cls(heads, k.shape[1], dim, kernel.dims(k, v)[1], q.dtype, q.device, batch, latent)

    def named_kernel(self, named: Kernel | None) -> Kernel | None:
        """The kernel that a call names if its user names ``named``."""
        if self.latent is None:
            return named
        return LatentKernel(self.latent[0], self.head_dim - self.latent[1], self.value_dim, named)

    @property
    def learned(self) -> torch.Tensor | None:
        """The flat weight that expands latents, without data."""
        if self.latent is None:
            return None
        rows = self.heads * (self.head_dim - self.latent[1] + self.value_dim)
        return torch.empty(rows * self.latent[0], dtype=self.dtype, device="meta")

    def row_bytes(self, heads: int, dim: int) -> int:
        """Bytes of one position of a tensor with ``heads`` heads of ``dim`` dims."""
        return self.batch * heads * dim * self.dtype.itemsize

    @property
    def query_row(self) -> int:
        """Bytes of one position's queries."""
        return self.row_bytes(self.heads, self.head_dim)

    @property
    def kv_row(self) -> int:
        """Bytes of one position's key and value, or of its latent and rotary key."""
        return sum(self.row_bytes(self._kv_heads, dim) for dim in self._kv_dims)

    @property
    def _kv_heads(self) -> int:
        return self.kv_heads if self.latent is None else 1

    @property
    def _kv_dims(self) -> tuple[int, int]:
        return self.latent or (self.head_dim, self.value_dim)

    def tensors(self, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value without data, of ``queries`` and ``keys`` rows. [B, rows, heads, dim] in memory."""
        q, k, v = (
            torch.empty(self.batch, rows, heads, dim, dtype=self.dtype, device="meta").transpose(1, 2)
            for rows, heads, dim in (
                (queries, self.heads, self.head_dim),
                *((keys, self._kv_heads, dim) for dim in self._kv_dims),
            )
        )
        return q, k, v

    def specs(self) -> tuple[TensorSpec, ...]:
        """Query, key and value of one row on their device, for :meth:`Kernel.check`."""
        return tuple(TensorSpec(x.shape, x.dtype, self.device) for x in self.tensors(1, 1))


class Transfer(NamedTuple):
    """One message.

    Attributes:
        peer: the sender or receiver, counted in the whole group.
        nbytes: the size of the message.
        outgoing: whether this rank sends it.
    """

    peer: int
    nbytes: int
    outgoing: bool


class WaitEvent(NamedTuple):
    """The rank waits for a transfer, given by its number among all transfers of this rank."""

    transfer: int


class KernelCall(NamedTuple):
    """One call of a kernel, which computes one tile or a pack of tiles.

    Attributes:
        kernel: name of the kernel.
        backward: whether it is a backward.
        cover: "full", "causal" (one edge is a diagonal), "window" (two edges are), "partial" (with an explicit mask) or
            "selected" (each query has keys of its own).
        tiles: the (batch, query heads, key heads, queries, keys) of each tile.
        dims: head dims of queries and of values, as the kernel gets them.
        itemsize: bytes of a number.
    """

    kernel: str
    backward: bool
    cover: str
    tiles: tuple[tuple[int, int, int, int, int], ...]
    dims: tuple[int, int]
    itemsize: int

    @property
    def pairs(self) -> int:
        """Computed (query, key) pairs of all heads."""
        whole = (batch * heads * queries * keys for batch, heads, _, queries, keys in self.tiles)
        hidden = (batch * heads * queries * (queries - 1) // 2 for batch, heads, _, queries, _ in self.tiles)
        return sum(whole) - self.edges * sum(hidden)

    @property
    def edges(self) -> int:
        """The number of edges of a tile that are diagonals."""
        return {"causal": 1, "window": 2}.get(self.cover, 0)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products: two products forward, five backward."""
        dim, value_dim = self.dims
        return 2 * self.pairs * ((3 * dim + 2 * value_dim) if self.backward else (dim + value_dim))


class MemoryOp(NamedTuple):
    """An operation outside of the kernels (packing, adding, merging, masking, expanding latents).

    Attributes:
        nbytes: the bytes that it reads and writes.
        flops: multiplications and additions of a matrix product.
    """

    nbytes: int
    flops: int = 0


Event: TypeAlias = Transfer | WaitEvent | KernelCall | MemoryOp


@dataclass
class Phase:
    """The forward or the backward of a rank.

    Attributes:
        events: the events in their order.
        peak: the most bytes that are alive at once, without the inputs and the output's gradient.
        parts: the bytes of the peak by purpose.
        live_at_end: the bytes that are alive at the end, by purpose.
    """

    events: list[Event]
    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    live_at_end: dict[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> list[KernelCall]:
        """The kernel calls."""
        return [event for event in self.events if isinstance(event, KernelCall)]

    @property
    def sent(self) -> Counter[int]:
        """Bytes by the rank that receives them."""
        return self._bytes(outgoing=True)

    @property
    def received(self) -> Counter[int]:
        """Bytes by the rank that sends them."""
        return self._bytes(outgoing=False)

    def _bytes(self, *, outgoing: bool) -> Counter[int]:
        sizes: Counter[int] = Counter()
        for event in self.events:
            if isinstance(event, Transfer) and event.outgoing == outgoing:
                sizes[event.peer] += event.nbytes
        return sizes


@dataclass(frozen=True)
class RankRun:
    """The dry run of one rank: a forward and its backward."""

    rank: int
    forward: Phase
    backward: Phase
