"""The exchange of all collectives: ranks exchange rows of a matrix for columns.

Legend: R rows, C columns, P ranks. A tensor is viewed as ``[R, *lead, C, *trail]``: the row dim, the dims before the
column dim, the column dim, the dims after it. Rank i has the rows ``rows.layout.chunks[i]``. Rank j needs the columns
``columns[t][j]`` of tensor t.

    to columns:  every rank has its rows of all columns      ->  all rows of the columns that it needs
    to rows:     every rank has all rows of its columns      ->  its rows of all columns; columns that several ranks
                                                                 had are summed

The two directions are adjoint, for any columns:

    columns cut among the ranks       all-to-all, and the all-to-all back
    KV heads that several ranks need  grouped-query Ulysses, and the sum of their gradients
    every rank needs all columns      all-gather, and reduce-scatter (sum)

The block ``i -> j`` is sent as ``[rows of i, *lead, columns of j of all tensors side by side]``. The rows are
outermost. So "to columns" does not copy the received blocks, and "to rows" does not copy the sent blocks, if the
tensor has that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from cp_styles._lib.compat import is_traced, resolve_group, start_all_gather, start_all_to_all, wait_tensor
from cp_styles._lib.device_copies import DeviceTables
from cp_styles.collectives.peers import Peers
from cp_styles.collectives.rows import Rows, row_orders
from cp_styles.comm.point_to_point import (
    PendingTransfers,
    exchange,
    has_all_to_all,
    open_group,
    post_all_to_all,
    transfer_error,
)
from cp_styles.layouts.ranges import Chunk

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Sizes: TypeAlias = tuple[int, ...]


class StartedExchange(NamedTuple):
    """An exchange that is running.

    Attributes:
        wire: the flat receive buffer.
        blocks: the layout of the buffer; None in a group of one rank, where nothing is sent.
        alive: the tensors, which must live until the message has arrived; or the transfers, which hold their tensors.
        out: the flat buffer for the result; None: new memory.
    """

    wire: torch.Tensor | None
    blocks: Blocks | None
    alive: Tensors | PendingTransfers
    out: torch.Tensor | None = None


class Exchange(NamedTuple):
    """A linear map of the local tensors of all ranks of a group: see the top of this file.

    Call it with the tensors, or call ``start(*tensors)`` and later ``finish``, with other work in between. Autograd
    does not record it: use :func:`differentiable`, or call it in the forward of an autograd Function, and its
    ``adjoint()`` in the backward.

    Attributes:
        peers: the group. In a group of one rank the map is the identity.
        row_dim: the dim of the rows, in every tensor.
        column_dim: the dim of the columns, in every tensor.
        rows: which rows each rank has.
        columns: for each tensor and rank, the half-open range of columns that the rank needs.
        to_columns: the direction.
    """

    peers: Peers
    row_dim: int
    column_dim: int
    rows: Rows
    columns: tuple[tuple[Chunk, ...], ...]
    to_columns: bool = True

    def adjoint(self) -> Exchange:
        return self._replace(to_columns=not self.to_columns)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        return self.finish(self.start(*tensors))

    def start(self, *tensors: torch.Tensor) -> StartedExchange:
        """Pack (at most one copy) and send one message to each rank. Do not change the tensors before ``finish``."""
        if self.peers.size == 1:
            return StartedExchange(None, None, tensors)
        blocks, ranks = Blocks(self, [x.shape for x in tensors]), self.peers.size
        packed = blocks.pack([*tensors])
        wire = _view_for_wire(packed)
        if blocks.shared:
            if len(set(self.rows.sizes)) == 1:  # an all-gather takes shards of equal size only
                return StartedExchange(start_all_gather(wire, ranks, self.peers.name), blocks, tensors)
            wire = wire.repeat(ranks)  # reshape() of an expanded number would be a view with stride 0
        items = packed.element_size() // wire.element_size()
        received, sent = [items * n for n in blocks.received], [items * n for n in blocks.sent]
        return StartedExchange(start_all_to_all(wire, received, sent, self.peers.name), blocks, tensors)

    def finish(self, started: StartedExchange) -> Tensors:
        """Wait and unpack.

        To columns: views of one buffer with the rows outermost; one copy if the layout is not contiguous.
        To rows: contiguous tensors; one copy.
        """
        wire, blocks, alive, _ = started
        assert isinstance(alive, tuple)
        if wire is None or blocks is None:
            return alive
        wire = wait_received(wire, self.peers).view(alive[0].dtype)
        return blocks.unpack_columns(wire) if self.to_columns else blocks.unpack_rows(wire)

    @property
    def column_axis(self) -> int:
        """The column dim, counted with the row dim moved to the front."""
        return self.column_dim + (self.column_dim < self.row_dim)


class Blocks:
    """The messages of an :class:`Exchange` for tensors of fixed shapes: their sizes, and the copies before and after.

    Attributes:
        op: the exchange.
        sent, received: the number of elements to each rank, and from each rank, this rank among them.
        shared: whether every rank needs the same columns, so that all ranks get the same block.
    """

    def __init__(self, op: Exchange, shapes: Sequence[Sizes]) -> None:
        self.op, self._axis = op, op.column_axis
        row, c, rank, sizes = op.row_dim, op.column_axis, op.peers.rank, op.rows.sizes
        firsts = [(shape[row], *shape[:row], *shape[row + 1 :]) for shape in shapes]  # rows first
        # The columns of each tensor that each rank needs, and their number of elements in one row and one lead index.
        self._columns = [
            [(stop - start, *first[c + 1 :]) for (start, stop), first in zip(cuts, firsts, strict=True)]
            for cuts in zip(*op.columns, strict=True)
        ]
        self._widths = [sum(map(prod, columns)) for columns in self._columns]
        lead = firsts[0][1:c]
        self._own_shape, self._whole_shape = (sizes[rank], *lead), (sum(sizes), *lead, self._widths[rank])
        # Elements of this rank's columns in each rank's rows, and of this rank's rows in each rank's columns.
        row_sizes = [size * prod(lead) * self._widths[rank] for size in sizes]
        column_sizes = [prod(self._own_shape) * width for width in self._widths]
        self.sent, self.received = (column_sizes, row_sizes) if op.to_columns else (row_sizes, column_sizes)
        self._total_received = sum(self.received)
        self._largest = max(sizes) * prod(lead) * max(self._widths)  # block of any two ranks
        self.shared = op.to_columns and all(len(set(columns)) == 1 for columns in op.columns)
        self._is_even = all(map(_is_even_cut, op.columns))
        self._places: dict[Any, Any] = {}

    def post(
        self, tensors: list[torch.Tensor], group: dist.ProcessGroup, out: torch.Tensor | None = None
    ) -> StartedExchange:
        """Send a block to every other rank of ``group``, the group of the peers, which has two ranks at least.

        To rows, ``tensors`` is emptied, so that each tensor is free once it is packed. A single tensor whose rows are
        contiguous in memory is sent without packing. To columns, ``out``, flat, gets the result. Not for complex
        numbers.
        """
        # Large blocks are messages over gloo, because its all-to-all copies more, and sends a rank its own block.
        rank, ranks = self.op.peers.rank, self.op.peers.size
        at_once = has_all_to_all(group, tensors[0].device, self._largest * tensors[0].itemsize)
        if not self.op.to_columns:
            packed = self._pack_rows(tensors, self._orders)
            wire = packed.new_empty(self._total_received)  # allocated here, where the tensors are free
            if at_once:
                return StartedExchange(wire, self, post_all_to_all(wire, packed, (self.received, self.sent), group))
            outgoing, incoming = packed.split_with_sizes(self.sent), wire.split_with_sizes(self.received)
            incoming[rank].copy_(outgoing[rank])
            return StartedExchange(wire, self, self._exchange(outgoing, incoming, group))
        columns, wire = self._prepare_columns(tensors), out
        if wire is None or self._orders is not None:
            wire = columns[0].new_empty(self._total_received)
        if at_once:
            packed = wire.new_empty(sum(self.sent))
            self._fill(packed, 0, ranks, columns)
            return StartedExchange(wire, self, post_all_to_all(wire, packed, (self.received, self.sent), group), out)
        before, after = sum(self.sent[:rank]), sum(self.sent[rank + 1 :])
        packed, incoming = wire.new_empty(before + after), wire.split_with_sizes(self.received)
        self._fill(packed.narrow(0, 0, before), 0, rank, columns)
        self._fill(packed.narrow(0, before, after), rank + 1, ranks, columns)
        outgoing = packed.split_with_sizes([*self.sent[:rank], 0, *self.sent[rank + 1 :]])
        pending = self._exchange(outgoing, incoming, group)
        self._fill(incoming[rank], rank, rank + 1, columns)  # while the messages move
        return StartedExchange(wire, self, pending, out)

    def _exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> PendingTransfers:
        """Start to send and receive a block for each rank. This rank's own block does not move."""
        open_group(group, incoming[0].device)
        peers = [peer for peer in range(self.op.peers.size) if peer != self.op.peers.rank]
        return exchange([(peer, outgoing[peer]) for peer in peers], [(peer, incoming[peer]) for peer in peers], group)

    def finish(self, started: StartedExchange) -> Tensors:
        """Wait for the transfers of :meth:`post`, and unpack. As :meth:`Exchange.finish`, but results to rows have the
        rows outermost, as projections return them."""
        wire, _, pending, out = started
        assert isinstance(pending, PendingTransfers)
        assert wire is not None
        pending.wait()
        if self.op.to_columns:
            if self._orders is not None:
                whole = None if out is None else out.view(self._whole_shape)
                wire = torch.index_select(wire.view(self._whole_shape), 0, self._orders.on(wire.device)[1], out=whole)
            return tuple(self.view_columns(wire))
        if not self._is_even:
            return self.unpack_rows(wire, rows_outermost=True)
        front, column = (len(self._widths), *self._own_shape), self._axis
        parts = self._views(wire, front, 0, column)  # the ranks in front of their columns
        parts = [_make_contiguous(x.flatten(column, column + 1)) for x in parts]
        return tuple([x.movedim(0, self.op.row_dim) for x in parts])

    def pack(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Copy the tensors to a flat buffer with a block for each rank, or a single block if it is :attr:`shared`."""
        if not self.op.to_columns:
            return self._pack_rows(tensors)
        c = self._axis
        columns = self._prepare_columns(tensors)
        if self.shared:
            if len(columns) == 1:
                return columns[0].contiguous().view(-1)
            wire = columns[0].new_empty(self.sent[0])
            self._fill(wire, 0, 1, columns)
        elif self._is_even and len({columns[1:] for columns in self._columns[0]}) == 1:
            # One kernel, instead of one for each tensor.
            wire = (columns[0].contiguous() if len(columns) == 1 else torch.cat(columns, c + 1)).view(-1)
        else:
            wire = columns[0].new_empty(sum(self.sent))
            self._fill(wire, 0, len(self.sent), columns)
        return wire

    def _prepare_columns(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views with the rows first, and a dim for the ranks in front of the rows if columns are cut evenly."""
        c, row, ranks = self._axis, self.op.row_dim, len(self._widths)
        if is_traced() or not self._is_even:  # a graph cannot read the offset of a tensor
            views = [x.movedim(row, 0) for x in tensors]
            sizes = [(*x.shape[:c], ranks, x.shape[c] // ranks, *x.shape[c + 1 :]) for x in views if self._is_even]
            return [x.view(size).movedim(c, 0) for x, size in zip(views, sizes, strict=True)] if sizes else views
        views = []
        for x in tensors:
            strides, shape = x.stride(), x.shape
            size = [shape[row], *shape[:row], *shape[row + 1 :]]
            steps = [strides[row], *strides[:row], *strides[row + 1 :]]
            size[c] //= ranks
            views.append(x.as_strided((ranks, *size), (size[c] * steps[c], *steps), x.storage_offset()))
        return views

    def _fill(self, flat: torch.Tensor, first: int, last: int, columns: list[torch.Tensor]) -> None:
        """Fill ``flat`` with the blocks of the ranks ``first`` to ``last - 1``, from :meth:`_prepare_columns`."""
        if first == last:
            return
        if self._is_even:  # a copy for each tensor, instead of one for each rank and tensor
            if last - first < len(self._widths):
                columns = [x.narrow(0, first, last - first) for x in columns]
            front = last - first, *self._own_shape
            if is_traced():  # sizes may be symbols
                parts = self._split_block(flat.view(*front, self._widths[first]), first)
            else:
                parts = self._views(flat, front, first, 0)
            for part, x in zip(parts, columns, strict=True):
                part.copy_(x)
            return
        for rank, block in enumerate(flat.split(self.sent[first:last]), first):
            parts = self._split_block(block.view(*self._own_shape, self._widths[rank]), rank)
            for part, x, (start, stop) in zip(parts, columns, [cut[rank] for cut in self.op.columns], strict=True):
                part.copy_(x.narrow(self._axis, start, stop - start))

    def unpack_columns(self, wire: torch.Tensor) -> Tensors:
        parts = self._split_block(self.op.rows.to_global(wire.view(self._whole_shape)), self.op.peers.rank)
        return tuple([part.movedim(0, self.op.row_dim) for part in parts])

    def view_columns(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of this rank's columns in ``whole``, which has all rows in the order of positions."""
        return self._views(whole, self._whole_shape[:-1], self.op.peers.rank, self.op.row_dim)

    def _views(self, flat: torch.Tensor, front: Sizes, rank: int, first_dim: int) -> list[torch.Tensor]:
        """The views of :meth:`_split_block` in a buffer of ``[*front, width]``, with the first dim at ``first_dim``."""
        key = front, rank, first_dim
        if key not in self._places:
            places, before, width = [], 0, self._widths[rank]
            for shape in self._columns[rank]:
                size = *front, *shape
                strides = [width * prod(front[dim + 1 :]) for dim in range(len(front))]
                strides += [prod(shape[dim + 1 :]) for dim in range(len(shape))]
                dims = [*range(1, first_dim + 1), 0, *range(first_dim + 1, len(size))]
                places.append(([size[dim] for dim in dims], [strides[dim] for dim in dims], before))
                before += prod(shape)
            self._places[key] = places
        first = flat.storage_offset()
        return [flat.as_strided(size, strides, first + before) for size, strides, before in self._places[key]]

    @cached_property
    def _orders(self) -> DeviceTables | None:
        return row_orders(self.op.rows.layout)

    def _pack_rows(self, tensors: list[torch.Tensor], orders: DeviceTables | None = None) -> torch.Tensor:
        """Copy to a flat buffer: rows in rank order, each with this rank's columns of all tensors. Empties the list.

        ``orders``: of the rows, if the caller has them.
        """
        if len(tensors) == 1:
            x = tensors.pop().movedim(self.op.row_dim, 0)
            x = self.op.rows.to_ranks(x) if orders is None else x.index_select(0, orders.on(x.device)[0])
            return x.contiguous().view(-1)
        wire = tensors[0].new_empty(self._whole_shape)
        for part in self._split_block(wire, self.op.peers.rank):
            self.op.rows.to_ranks(tensors.pop(0).movedim(self.op.row_dim, 0), part)
        return wire.view(-1)

    def unpack_rows(self, wire: torch.Tensor, *, rows_outermost: bool = False) -> Tensors:
        """All columns of this rank's rows: contiguous, or with the rows outermost in memory."""
        # The dims of rows and columns in the parts that are concatenated.
        row_dim, column_dim = (0, self._axis) if rows_outermost else (self.op.row_dim, self.op.column_dim)
        if self._is_even:  # one permuted copy of each tensor
            ranks = len(self._widths)
            block = wire.view(ranks, *self._own_shape, self._widths[0])
            parts = [x.movedim(1, row_dim + 1) for x in self._split_block(block, 0)]
            parts = [x.movedim(0, column_dim).flatten(column_dim, column_dim + 1) for x in parts]
            merged = [_make_contiguous(x) for x in parts]  # flatten() returns a view if each rank has one column
        else:
            blocks = [
                self._split_block(block.view(*self._own_shape, width), rank)
                for rank, (block, width) in enumerate(zip(wire.split(self.received), self._widths, strict=True))
            ]
            # Lists: 2.15 fails to compile a generator that adds tensors ("generator already executing").
            in_rank_order = [[part.movedim(0, row_dim) for part in parts] for parts in zip(*blocks, strict=True)]
            cuts = self.op.columns
            merged = [merge_columns(parts, cut, column_dim) for parts, cut in zip(in_rank_order, cuts, strict=True)]
        return tuple([x.movedim(0, self.op.row_dim) for x in merged] if rows_outermost else merged)

    def _split_block(self, block: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Views ``[..., columns, *trail]`` of the columns of each tensor in a block ``[..., width]`` of ``rank``.

        This defines the order in a block. Copies without such views (of a single tensor, or of columns that are cut
        evenly) write the same order.
        """
        front, shapes = block.shape[:-1], self._columns[rank]
        parts = block.split_with_sizes(list(map(prod, shapes)), -1) if len(shapes) > 1 else (block,)
        return [part.view(*front, *shape) for part, shape in zip(parts, shapes, strict=True)]


def wait_received(wire: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Wait for a functional collective over the peers, and return its result."""
    if is_traced():
        return wait_tensor(wire)
    try:
        return wait_tensor(wire)
    except RuntimeError as error:
        raise transfer_error(error, range(peers.size), resolve_group(peers.name)) from error


def merge_columns(parts: Sequence[torch.Tensor], columns: tuple[Chunk, ...], dim: int) -> torch.Tensor:
    """Concatenate the ranks' columns. Columns of several ranks are summed in rank order, in float32 or wider."""
    dtype = parts[0].dtype
    merged = []
    for low, high in pairwise(sorted({edge for chunk in columns for edge in chunk})):
        first, *further = [
            part.narrow(dim, low - start, high - low)
            for part, (start, stop) in zip(parts, columns, strict=True)
            if start <= low and high <= stop
        ]
        wide = further and dtype in (torch.float16, torch.bfloat16)
        total = first.float() if wide else first
        for part in further:
            total = total + part
        merged.append(total.to(dtype) if wide else total)
    if len(merged) != 1:
        return torch.cat(merged, dim) if merged else parts[0]
    return _make_contiguous(merged[0])


def _make_contiguous(x: torch.Tensor) -> torch.Tensor:
    # Call .to() and .contiguous() only where they change something: on 2.11 a compiled Function that ends with one that
    # does nothing has a gradient of zero.
    return x if x.is_contiguous() else x.contiguous()


def _is_even_cut(columns: tuple[Chunk, ...]) -> bool:
    """Whether each column goes to one rank, in rank order, and all ranks get the same number."""
    is_cut = columns[0][0] == 0 and all(left[1] == right[0] for left, right in pairwise(columns))
    return is_cut and len({stop - start for start, stop in columns}) == 1


_UNKNOWN_TO_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _view_for_wire(packed: torch.Tensor) -> torch.Tensor:
    """A view as bytes if gloo does not support the dtype. No backend computes with the numbers."""
    is_float8 = packed.dtype.is_floating_point and packed.element_size() == 1
    if packed.dtype.is_complex or is_float8 or packed.dtype in _UNKNOWN_TO_GLOO:
        return packed.view(torch.uint8)
    return packed
