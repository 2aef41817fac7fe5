"""An exchange from rank to rank, eager: what Ulysses makes at every layer and step, with the arithmetic done once.

The blocks are those of :mod:`cp_styles.collectives._exchange`, ``[rows, *lead, columns of all tensors side by side]``,
seen through strides. Point to point, because gloo then copies less than in its all-to-all, and because what stays on a
rank need not go through a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from cp_styles._compat import resolve_group
from cp_styles.collectives._exchange import Exchange, Tensors, merged_columns
from cp_styles.comm.point_to_point import Pending, exchange

Sizes = tuple[int, ...]


class _Place(NamedTuple):
    """Of one tensor, some columns in a block."""

    columns: tuple[int, int]
    shape: Sizes
    strides: Sizes
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)


class Direct:
    """The two directions of an :class:`~cp_styles.collectives.Exchange` for tensors of given shapes.

    ``shapes`` are those on the side where a rank has its rows of all columns. No autograd. A ``trivial`` one, of a
    group of one rank, gives back the tensors that it is given. ``in_order`` says whether rows arrive in the order of
    positions, as they do where the cut is contiguous.
    """

    def __init__(self, way: Exchange, shapes: Sequence[Sizes]) -> None:
        self._way, self._shapes = way, shapes
        self.trivial = way.peers.size == 1
        if self.trivial:
            self.arriving, self.in_order = 0, True
            return
        rank, sizes = way.peers.rank, way.rows.sizes
        self._axis = way.column_dim + (way.column_dim < way.row_dim)  # of the columns, where the rows come first
        lead = prod(_first(tuple(shapes[0]), way.row_dim)[1 : self._axis])
        self._others = [peer for peer in range(way.peers.size) if peer != rank]
        # To columns: my block for each rank, and the block of all rows that I have in the end.
        blocks = [self._block(peer, sizes[rank]) for peer in range(way.peers.size)]
        self._blocks = [places for places, _ in blocks]
        self._leaving = [sizes[rank] * lead * width for _, width in blocks]
        self._whole, width = self._block(rank, sum(sizes))
        received = [size * lead * width for size in sizes]
        self._received = list(zip(accumulate(received, initial=0), received, strict=False))
        self.arriving = sum(received)
        self.in_order = len(way.rows.in_rank_order()) <= 1
        # To rows: what comes from each rank, and whether every column comes from one.
        self._coming = [
            (peer, [_first(place.shape, way.row_dim) for place in self._blocks[peer]]) for peer in self._others
        ]
        self._owners = [
            _owners(columns, shape[way.column_dim]) for columns, shape in zip(way.columns, shapes, strict=True)
        ]

    def start(self, wire: torch.Tensor, *tensors: torch.Tensor) -> Pending:
        """Send each rank the columns that it wants; ``wire`` fills up, flat, of :attr:`arriving` elements.

        Communication: one message to every other rank. Its adjoint: :meth:`home`.
        """
        if self.trivial:
            return Pending((), ())
        rank, own = self._way.peers.rank, self._received[self._way.peers.rank]
        # Ranks come here together. Where two that share processors post messages at the same time, each one's gloo
        # thread, woken by the other, can interrupt a post that holds the lock it needs, and polls. So one of two
        # neighbours makes the copy that nobody waits for before it posts, the other after.
        if rank % 2:
            self._pack(rank, wire.narrow(0, *own), tensors)
        sends = [(peer, self._pack(peer, wire.new_empty(self._leaving[peer]), tensors)) for peer in self._others]
        receives = [(peer, wire.narrow(0, *self._received[peer])) for peer in self._others]
        pending = exchange(sends, receives, resolve_group(self._way.peers.name))
        if not rank % 2:
            self._pack(rank, wire.narrow(0, *own), tensors)
        return pending

    def _pack(self, peer: int, block: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Fill ``block`` with the columns that ``peer`` wants of this rank's rows."""
        for place, x in zip(self._blocks[peer], tensors, strict=True):
            place.of(block).copy_(x.narrow(self._way.column_dim, *place.columns))
        return block

    def sort(self, wire: torch.Tensor, place: torch.Tensor) -> None:
        """Copy what has arrived to ``place``, flat as well, with the rows in the order of positions; for ways that are
        not :attr:`in_order`."""
        shape = sum(self._way.rows.sizes), -1
        self._way.rows.to_global(wire.view(shape), out=place.view(shape))

    def views(self, flat: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        """All rows of this rank's columns of each tensor in ``flat``, which has the rows in the order of positions.
        (``tensors`` is what there is on a group of one.)"""
        return tensors if self.trivial else tuple(place.of(flat) for place in self._whole)

    def to_columns(self, *tensors: torch.Tensor) -> Tensors:
        """All rows of this rank's columns of each tensor. Communication: one message to every other rank."""
        if self.trivial:
            return tensors
        flat = tensors[0].new_empty(self.arriving)
        self.start(flat, *tensors).wait()
        if not self.in_order:
            wire, flat = flat, torch.empty_like(flat)
            self.sort(wire, flat)
        return self.views(flat)

    def home(self, tensors: list[torch.Tensor]) -> Tensors:
        """From all rows of this rank's columns to its rows of all columns; what several ranks had is summed.

        Each tensor goes by itself, so that one's memory, and that of what arrived for it, is free for the next: the
        list is emptied. Where the rows lie together nothing is packed, and what this rank keeps is not copied before
        it is merged. Communication: a message a tensor to every other rank. Its adjoint: :meth:`start`.

        Returns tensors with the rows outermost in memory, as projections have them.
        """
        if self.trivial:
            return tuple(tensors)
        return tuple([self._brought_home(tensors, place) for place in range(len(tensors))])

    def _brought_home(self, tensors: list[torch.Tensor], place: int) -> torch.Tensor:
        """This rank's rows of all columns of the first of ``tensors``, which is taken out of the list."""
        way, rank = self._way, self._way.peers.rank
        seen = tensors.pop(0).movedim(way.row_dim, 0)
        sends = [(peer, way.rows.own(seen, 0, peer).contiguous()) for peer in self._others]
        parts = [way.rows.own(seen, 0, rank)] * way.peers.size
        del seen  # what was packed stands for it now
        for peer, shapes in self._coming:
            parts[peer] = parts[rank].new_empty(shapes[place])
        exchange(sends, [(peer, parts[peer]) for peer in self._others], resolve_group(way.peers.name)).wait()
        del sends
        return self._merged(parts, place).movedim(0, way.row_dim)

    def _merged(self, parts: list[torch.Tensor], place: int) -> torch.Tensor:
        """All columns of a tensor, of which ``parts`` are from each rank."""
        owners = self._owners[place]
        if owners:
            return torch.cat([parts[owner] for owner in owners], self._axis)
        return merged_columns(tuple(parts), self._way.columns[place], self._axis)

    def _block(self, rank: int, rows: int) -> tuple[list[_Place], int]:
        """Where the columns that ``rank`` wants of so many rows are in a block, and the block's width."""
        way, places, width = self._way, [], 0
        shapes = [(*shape[: way.row_dim], rows, *shape[way.row_dim + 1 :]) for shape in self._shapes]
        wanted = [columns[rank] for columns in way.columns]
        total = sum(
            (stop - start) * prod(_first(shape, way.row_dim)[self._axis + 1 :])
            for shape, (start, stop) in zip(shapes, wanted, strict=True)
        )
        for shape, (start, stop) in zip(shapes, wanted, strict=True):
            shape = (*shape[: way.column_dim], stop - start, *shape[way.column_dim + 1 :])
            seen = _first(tuple(range(len(shape))), way.row_dim)
            strides, step = [0] * len(shape), 1
            for place, dim in reversed(list(enumerate(seen))):
                step = total if place == self._axis - 1 else step
                strides[dim] = step
                step *= shape[dim]
            places.append(_Place((start, stop - start), shape, tuple(strides), width))
            width += prod(_first(shape, way.row_dim)[self._axis :])
        return places, total


def _first(values: Sizes, dim: int) -> Sizes:
    """With the value of ``dim`` in front of the others."""
    return (values[dim], *values[:dim], *values[dim + 1 :])


def _owners(columns: Sequence[tuple[int, int]], total: int) -> list[int]:
    """The ranks in the order of the columns they have, if each column has one rank and there are several; else none."""
    order = sorted((rank for rank, (start, stop) in enumerate(columns) if stop > start), key=lambda r: columns[r])
    edges = [edge for rank in order for edge in columns[rank]]
    cut = edges[::2] == [0, *edges[1:-1:2]] and edges[-1:] == [total]
    return order if cut and len(order) > 1 else []
