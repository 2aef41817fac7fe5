"""The eager exchange of Ulysses, by point-to-point messages. Shapes and strides are computed once, not at each call.

Blocks have the form of :mod:`cp_styles.collectives.exchange`: ``[rows, *lead, columns of all tensors side by side]``.
Not all-to-alls: one of gloo copies more, and sends a rank its own block. In a large one a killed rank is noticed after
the timeout of the group only. On idle cores both take equal processor time; on busy ones an all-to-all takes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from cp_styles._compat import without_dispatch_modes
from cp_styles.collectives.exchange import Exchange, Tensors, columns_in_block, merged_columns
from cp_styles.comm.point_to_point import PendingTransfers, exchange, open_group

Sizes = tuple[int, ...]


class _Place(NamedTuple):
    """Where some columns of one tensor are in a block."""

    columns: tuple[int, int]
    shape: Sizes
    strides: Sizes
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)


class Direct:
    """An ``Exchange`` (see collectives/exchange.py) for tensors of given shapes, in both directions. No autograd.

    Attributes:
        in_order: rows arrive in the order of positions, which holds for contiguous layouts.
        arriving: number of elements that :meth:`start` receives.

    ``shapes`` are the shapes on the side where each rank has its rows of all columns. ``group`` is the group of the
    exchange's peers, of two ranks at least. The reference is weak: what is remembered must not keep a group alive.
    """

    def __init__(self, way: Exchange, shapes: Sequence[Sizes], group: ref[dist.ProcessGroup]) -> None:
        self.way, self.shapes = way, shapes
        self._group = group
        rank, sizes = way.peers.rank, way.rows.sizes
        lead = prod(_first(tuple(shapes[0]), way.row_dim)[1 : way.column_axis])
        self._others = [peer for peer in range(way.peers.size) if peer != rank]
        # To columns: the block that this rank sends to each rank, and the block of all rows that it receives.
        blocks = [self._block(peer, sizes[rank]) for peer in range(way.peers.size)]
        self._blocks = [places for places, _ in blocks]
        self._leaving = [sizes[rank] * lead * width for _, width in blocks]
        self._whole, width = self._block(rank, sum(sizes))
        received = [size * lead * width for size in sizes]
        self._received = list(zip(accumulate(received, initial=0), received, strict=False))
        self.arriving = sum(received)
        self.in_order = way.rows.in_order
        # To rows: the shapes that go to each rank, its rows of this rank's columns, and those that come from it.
        mine = [_first(place.shape, way.row_dim)[1:] for place in self._whole]
        self._going = [(peer, [(sizes[peer], *shape) for shape in mine]) for peer in self._others]
        self._coming = [
            (peer, [_first(place.shape, way.row_dim) for place in self._blocks[peer]]) for peer in self._others
        ]

    def start(self, place: torch.Tensor | None, *tensors: torch.Tensor) -> Arriving:
        """Start to send each rank the columns that it needs.

        ``place``, flat with :attr:`arriving` elements, gets the rows in the order of positions. None: new memory does.
        Communication: one message to every other rank. The adjoint is :meth:`leave`.
        """
        wire = tensors[0].new_empty(self.arriving) if place is None or not self.in_order else place
        rank, own_block = self.way.peers.rank, self._received[self.way.peers.rank]
        # All ranks get here at the same time. If two ranks that share processors post messages at once, the gloo
        # thread of one can interrupt a post of the other that holds a lock which it then polls for. So every second
        # rank copies its own block before it posts, and the others after.
        if rank % 2:
            self._pack(rank, wire.narrow(0, *own_block), tensors)
        sends = [(peer, self._pack(peer, wire.new_empty(self._leaving[peer]), tensors)) for peer in self._others]
        receives = [(peer, wire.narrow(0, *self._received[peer])) for peer in self._others]
        pending = self._exchange(sends, receives)
        if not rank % 2:
            self._pack(rank, wire.narrow(0, *own_block), tensors)
        return Arriving(wire, place, pending)

    def _exchange(self, sends: list[Any], receives: list[Any]) -> PendingTransfers:
        group = self._group()
        assert group is not None, "its attention holds the group of an exchange that runs"
        open_group(group, sends[0][1].device)
        return exchange(sends, receives, group)

    def _pack(self, peer: int, block: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Fill ``block`` with the columns that ``peer`` needs of this rank's rows."""
        for place, x in zip(self._blocks[peer], tensors, strict=True):
            place.of(block).copy_(x.narrow(self.way.column_dim, *place.columns))
        return block

    def views(self, flat: torch.Tensor) -> Tensors:
        """Views of ``flat``, which has the rows in the order of positions: all rows of this rank's columns."""
        return tuple(place.of(flat) for place in self._whole)

    def arrived(self, arriving: Arriving) -> Tensors:
        """All rows of this rank's columns of each tensor, when they have come."""
        wire, place, pending = arriving
        pending.wait()
        if not self.in_order:
            received, wire = wire, torch.empty_like(wire) if place is None else place
            shape = sum(self.way.rows.sizes), -1
            self.way.rows.to_global(received.view(shape), out=wire.view(shape))
        return self.views(wire)

    def leave(self, tensors: list[torch.Tensor]) -> Leaving:
        """Start to send each rank its rows of this rank's columns of all tensors.

        Each tensor is removed from the list when it is packed, so that its memory is free. A single one whose rows are
        contiguous in memory is sent without packing. Communication: one message to every other rank. :class:`Joined`
        reads the result. The adjoint is :meth:`start`.
        """
        layout, peers, like = self.way.rows.layout, self.way.peers, tensors[0].new_empty(0)
        if len(self.shapes) == 1:
            x = tensors.pop(0).movedim(self.way.row_dim, 0)
            sends = [(peer, layout.part(x, 0, peer).flatten().contiguous()) for peer, _ in self._going]
            parts = [[layout.part(x, 0, peers.rank).clone()] * peers.size]  # x is free once it is sent
        else:
            going = [(peer, *_places(like, shapes)) for peer, shapes in self._going]
            sends = [(peer, message) for peer, message, _ in going]
            parts = []
            for places in zip(*(places for *_, places in going), strict=True):
                x = tensors.pop(0).movedim(self.way.row_dim, 0)
                for (peer, *_), place in zip(going, places, strict=True):
                    place.copy_(layout.part(x, 0, peer))
                parts.append([layout.part(x, 0, peers.rank).clone()] * peers.size)
                del x
        receives = []
        for peer, shapes in self._coming:
            message, received = _places(like, shapes)
            receives.append((peer, message))
            for parts_of_tensor, part in zip(parts, received, strict=True):
                parts_of_tensor[peer] = part
        return Leaving(parts, self._exchange(sends, receives))

    def _block(self, rank: int, rows: int) -> tuple[list[_Place], int]:
        """Where the columns that ``rank`` needs are in a block of ``rows`` rows, and the width of the block.

        The places are those of the views that an :class:`Exchange` makes of such a block. Tensors without data have
        the same strides.
        """
        way, columns = self.way, [chunks[rank] for chunks in self.way.columns]
        with without_dispatch_modes():
            rows_first = [way.rows_first(torch.empty(shape, device="meta")) for shape in self.shapes]
            width = way.width(rank, rows_first)
            block = torch.empty(rows, *way.lead(rows_first[0]), width, device="meta")
            parts = [x.movedim(0, way.row_dim) for x in columns_in_block(block, rows_first, way.column_axis, columns)]
        return [
            _Place((start, stop - start), tuple(x.shape), x.stride(), int(x.storage_offset()))
            for x, (start, stop) in zip(parts, columns, strict=True)
        ], width


class Arriving(NamedTuple):
    """The flat receive buffer; the buffer for the rows in the order of positions, if given; and the transfer."""

    wire: torch.Tensor
    place: torch.Tensor | None
    pending: PendingTransfers


class Leaving(NamedTuple):
    """Tensors on their way back, see :meth:`Direct.leave`: of each, every rank's part, to be read after
    ``pending.wait()``."""

    parts: list[list[torch.Tensor]]
    pending: PendingTransfers


class Joined:
    """Joins the parts that :meth:`Direct.leave` brings, from exchanges of the same rows with different columns."""

    def __init__(self, directs: Sequence[Direct]) -> None:
        self._row_dim, self._axis = directs[0].way.row_dim, directs[0].way.column_axis
        totals = [shape[directs[0].way.column_dim] for shape in directs[0].shapes]
        by_tensor = zip(*(direct.way.columns for direct in directs), strict=True)
        self._columns = [tuple(chunk for columns in by_direct for chunk in columns) for by_direct in by_tensor]
        # Whether each column comes from exactly one rank.
        self._owners = [_owners(columns, total) for columns, total in zip(self._columns, totals, strict=True)]

    def of(self, leaving: Sequence[Leaving]) -> list[torch.Tensor]:
        """This rank's rows of all columns of each tensor, from each exchange. It waits for them, and takes them.

        Columns of several ranks are summed. Rows are outermost in memory, as projections have them.
        """
        for started in leaving:
            started.pending.wait()
        results = []
        for columns, owners in zip(self._columns, self._owners, strict=True):
            parts = [part for started in leaving for part in started.parts.pop(0)]
            if owners:
                whole = torch.cat([parts[owner] for owner in owners], self._axis)
            else:
                whole = merged_columns(tuple(parts), columns, self._axis)
            results.append(whole.movedim(0, self._row_dim))
        return results


def _places(like: torch.Tensor, shapes: Sequence[Sizes]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A message for tensors of these shapes, one after the other, and their places in it."""
    sizes = list(map(prod, shapes))
    message = like.new_empty(sum(sizes))
    return message, [part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True)]


def _first(values: Sizes, dim: int) -> Sizes:
    """``values`` with the one of ``dim`` moved to the front."""
    return (values[dim], *values[:dim], *values[dim + 1 :])


def _owners(columns: Sequence[tuple[int, int]], total: int) -> list[int]:
    """The ranks, sorted by their columns, if several ranks share the columns and none overlap. Otherwise empty."""
    order = sorted((rank for rank, (start, stop) in enumerate(columns) if stop > start), key=lambda r: columns[r])
    edges = [edge for rank in order for edge in columns[rank]]
    cut = edges[::2] == [0, *edges[1:-1:2]] and edges[-1:] == [total]
    return order if cut and len(order) > 1 else []
