"""How a dim is cut over the ranks of a group: the types that a caller can pass, and :class:`Rows` for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import is_traced, resolve_group
from cp_styles._lib.device_copies import DeviceTables
from cp_styles.collectives.peers import Peers
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import Role
from cp_styles.layouts import SequenceLayout
from cp_styles.layouts.layout import Stripes, refuse_other_cut
from cp_styles.layouts.ranges import even_sizes, join_ranges, ranges_of


@dataclass(frozen=True)
class Padded:
    """Shards of equal size, ``ceil(length / ranks)``, for any length. The last shards are padded.

    Padding exists only in the shards. It is never sent, and a gathered tensor does not have it. Its gradient is zero.

    Attributes:
        length: size of the whole dim without padding.
        multiple: the size of a shard is rounded up to a multiple of this.

    Raises:
        ValueError: ``length`` is negative, or ``multiple`` is below 1.
    """

    length: int
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.length < 0 or self.multiple < 1:
            raise ValueError(f"Padded needs length >= 0 and multiple >= 1, got {self}")

    def shard_size(self, ranks: int) -> int:
        """Size of each shard on ``ranks`` ranks, with padding."""
        return -(-self.length // (ranks * self.multiple)) * self.multiple


Layout: TypeAlias = SequenceLayout | Padded | Sequence[int] | None
"""How a dim is cut: a :class:`~cp_styles.layouts.SequenceLayout`, :class:`Padded`, the sizes of contiguous parts (one
for each rank), or None for contiguous parts that are as equal as possible (the first ranks get the remainder)."""


@remembered(64)
def row_orders(layout: SequenceLayout) -> DeviceTables | None:
    """The position of each row in rank order, and the row of each position. None if both orders are equal."""
    return None if _is_in_order(layout) else DeviceTables(*_make_orders(layout, torch.device("cpu")))


def _is_in_order(layout: SequenceLayout) -> bool:
    return not isinstance(layout.held, Stripes) and len(join_ranges(chain.from_iterable(layout.held))) <= 1


def _make_orders(layout: SequenceLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # Read ``held`` alone: in Python 3.11 a graph breaks where it computes a cached property.
    if isinstance(held := layout.held, Stripes):
        rows = held.rows_rank_by_rank(device)
        return _invert(rows), rows
    positions = torch.cat([torch.arange(*chunk, device=device) for chunk in chain.from_iterable(held)])
    return positions, _invert(positions)


def _invert(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


class Rows(NamedTuple):
    """How a dim is cut over ranks.

    Attributes:
        layout: the positions that each rank holds, without padding.
        shard: size of each rank's tensor in this dim if shards are padded, else None.
    """

    layout: SequenceLayout
    shard: int | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions that each rank holds, without padding."""
        return self.layout.lengths

    def local(self, rank: int) -> int:
        """Size of the tensor of ``rank`` in this dim, with padding."""
        return self.sizes[rank] if self.shard is None else self.shard

    def to_ranks(self, whole: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Reorder dim 0 from global order to rank order: the inverse of :meth:`to_global`."""
        orders = self._orders(whole.device)
        if orders is not None and (out is None or not is_traced()):  # a graph breaks at an out with strides
            return torch.index_select(whole, 0, orders[0], out=out)
        whole = whole if orders is None else whole.index_select(0, orders[0])
        return whole if out is None else out.copy_(whole)

    def to_global(self, shards: torch.Tensor) -> torch.Tensor:
        """Reorder dim 0 from rank order (concatenated shards) to global order. No copy if both orders are equal."""
        orders = self._orders(shards.device)
        return shards if orders is None else shards.index_select(0, orders[1])

    def _orders(self, device: torch.device) -> Sequence[torch.Tensor] | None:
        if is_traced():  # tables would be constants of the graph
            return None if _is_in_order(self.layout) else _make_orders(self.layout, device)
        orders = row_orders(self.layout)
        return None if orders is None else orders.on(device)

    def trim(self, x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """A shard without its padding (a view)."""
        return x if self.shard is None else x.narrow(dim, 0, self.sizes[rank])

    def fill(self, x: torch.Tensor, dim: int, value: float = 0) -> torch.Tensor:
        """A shard with its padding. A copy on ranks that have padding."""
        if self.shard is None or x.shape[dim] == self.shard:
            return x
        widths = [0, 0] * (x.ndim - dim)
        widths[-1] = self.shard - x.shape[dim]
        return torch.nn.functional.pad(x, widths, value=value)


def check_sizes(sizes: Sequence[int], peers: Peers, what: str) -> tuple[int, ...]:
    """``sizes`` as a tuple. Raises ValueError unless there is one size >= 0 for each rank."""
    sizes = tuple(sizes)
    if len(sizes) != peers.size or any(not isinstance(size, int) or size < 0 for size in sizes):
        raise ValueError(f"{what} must be one size >= 0 for each of the {peers.size} ranks, got {sizes}")
    return sizes


def make_rows(layout: Layout, peers: Peers) -> Rows | None:
    """The rows of a layout; None for None.

    Raises:
        ValueError: the layout is for another number of ranks.
        TypeError: it is not a layout.
    """
    if layout is None:
        return None
    if isinstance(layout, Padded):
        shard = layout.shard_size(peers.size)
        edges = [min(rank * shard, layout.length) for rank in range(peers.size + 1)]
        return Rows(SequenceLayout.from_chunks([chunk] for chunk in pairwise(edges)), shard)
    if isinstance(layout, SequenceLayout):
        if layout.ranks != peers.size:
            role: Role | None = None
            with contextlib.suppress(RuntimeError):  # of a group that was destroyed
                role = state_of(resolve_group(peers.name)).objects.get(Role) if peers.name else None
            in_verify = (
                ". verify runs the step with one rank first: a style or hook takes the size of get_peers(mesh) of "
                "cp_styles.collectives.peers in its call, and not the size of a mesh that it keeps"
            )
            raise ValueError(
                f"the layout is for {layout.ranks} ranks, the group has {peers.size}: build it for {peers.size} ranks"
                f"{in_verify if role is not None and role.alone else ''}"
            )
        return Rows(layout)
    if isinstance(layout, Sequence) and not isinstance(layout, str):
        return contiguous_rows(check_sizes(layout, peers, "layout"))
    raise TypeError(
        f"{type(layout).__name__} is not a layout: pass a SequenceLayout, Padded(length), one size a rank, or None"
    )


def contiguous_rows(sizes: Sequence[int]) -> Rows:
    """One contiguous range for each rank, in rank order."""
    return Rows(SequenceLayout.from_chunks([chunk] for chunk in ranges_of(sizes)))


def check_local(rows: Rows | None, x: torch.Tensor, dim: int, peers: Peers) -> None:
    """Raise ValueError unless ``x`` has the size of this rank's part of ``rows``, or if another layout has cut it."""
    if rows is None:
        return
    refuse_other_cut("cp_styles.collectives", (x,), rows.layout, f"{rows.layout.length} positions")
    if x.shape[dim] != rows.local(peers.rank):
        raise ValueError(
            f"the layout gives rank {peers.rank} {rows.local(peers.rank)} positions, but dim {dim} of its tensor "
            f"of shape {tuple(x.shape)} has {x.shape[dim]}: build the layout for this sequence, or pass the right dim"
        )


def make_rows_for(layout: Layout, x: torch.Tensor, dim: int, peers: Peers) -> Rows:
    """The rows of the layout, for the whole tensor ``x``. Raises ValueError if the layout has another length."""
    rows = make_rows(layout, peers) or contiguous_rows(even_sizes(x.shape[dim], peers.size))
    if x.shape[dim] != sum(rows.sizes):
        raise ValueError(
            f"the layout cuts {sum(rows.sizes)} positions, but dim {dim} of the whole tensor of shape {tuple(x.shape)} "
            f"has {x.shape[dim]}: build the layout for {x.shape[dim]} positions, or pass the right dim"
        )
    return rows
