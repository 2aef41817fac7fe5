"""The one exchange that all collectives are made of: ranks exchange rows of a matrix for columns.

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
outermost. So "to columns" does not copy what arrives, and "to rows" does not copy what leaves, if the tensor has that
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from cp_styles._compat import is_traced, resolve_group, start_all_gather, start_all_to_all, wait_tensor
from cp_styles.collectives.peers import Peers
from cp_styles.collectives.rows import Rows
from cp_styles.comm.point_to_point import PendingTransfers, exchange, open_group, transfer_error
from cp_styles.layout import Chunk

Tensors = tuple[torch.Tensor, ...]


Sizes: TypeAlias = tuple[int, ...]


class Started(NamedTuple):
    """An exchange that is running.

    Attributes:
        wire: the flat receive buffer.
        blocks: what is in it; None in a group of one rank, where nothing is sent.
        alive: the tensors, which must live until the message has arrived; or the transfers, which hold theirs.
        place: the flat buffer for the result; None: new memory.
    """

    wire: torch.Tensor | None
    blocks: Blocks | None
    alive: Tensors | PendingTransfers
    place: torch.Tensor | None = None


class Exchange(NamedTuple):
    """A linear map of the local tensors of all ranks of a group: see the top of this file.

    Call it with the tensors, or call ``start(*tensors)`` and later ``finish``, with other work in between. Autograd
    does not record it. Use :func:`differentiable`, or call it in the forward, and its ``adjoint()`` in the backward, of
    an autograd Function.

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

    def start(self, *tensors: torch.Tensor) -> Started:
        """Pack (at most one copy) and send one message to each rank. Do not change the tensors before ``finish``."""
        if self.peers.size == 1:
            return Started(None, None, tensors)
        blocks, ranks = Blocks(self, [x.shape for x in tensors]), self.peers.size
        packed = blocks.pack([*tensors])
        wire = _sendable(packed)
        if blocks.shared:
            if len(set(self.rows.sizes)) == 1:
                return Started(start_all_gather(wire, ranks, self.peers.name), blocks, tensors)
            wire = wire.repeat(ranks)  # reshape() of an expanded number would be a view with stride 0
        items = packed.element_size() // wire.element_size()
        received, sent = [items * n for n in blocks.received], [items * n for n in blocks.sent]
        return Started(start_all_to_all(wire, received, sent, self.peers.name), blocks, tensors)

    def finish(self, started: Started) -> Tensors:
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
    """The messages of an :class:`Exchange` of tensors of given shapes: their sizes, and the copies before and after.

    Attributes:
        way: the exchange.
        sent, received: the number of elements that go to each rank and come from it, this rank among them.
        shared: whether every rank needs the same columns, so that one block goes to all.
    """

    def __init__(self, way: Exchange, shapes: Sequence[Sizes]) -> None:
        self.way, self._axis = way, way.column_axis
        row, c, rank, sizes = way.row_dim, way.column_axis, way.peers.rank, way.rows.sizes
        firsts = [(shape[row], *shape[:row], *shape[row + 1 :]) for shape in shapes]  # rows first
        self._others = [peer for peer in range(way.peers.size) if peer != rank]
        # The columns of each tensor that each rank needs, and their number of elements in one row and one lead index.
        self._columns = [
            [(stop - start, *first[c + 1 :]) for (start, stop), first in zip(cuts, firsts, strict=True)]
            for cuts in zip(*way.columns, strict=True)
        ]
        self._widths = [sum(map(prod, columns)) for columns in self._columns]
        lead = firsts[0][1:c]
        self._head, self._whole = (sizes[rank], *lead), (sum(sizes), *lead, self._widths[rank])
        of_rows = [size * prod(lead) * self._widths[rank] for size in sizes]  # this rank's columns, of each rank's rows
        of_columns = [prod(self._head) * width for width in self._widths]  # this rank's rows, of each rank's columns
        self.sent, self.received = (of_columns, of_rows) if way.to_columns else (of_rows, of_columns)
        self.shared = way.to_columns and all(len(set(columns)) == 1 for columns in way.columns)
        # Whether each column of each tensor goes to one rank, in rank order, and all ranks get equally many.
        self._even = all(map(_is_even_cut, way.columns))

    def post(self, tensors: list[torch.Tensor], group: dist.ProcessGroup, place: torch.Tensor | None = None) -> Started:
        """Send a message to every other rank of ``group``, the group of the peers, which has two ranks at least.

        Not an all-to-all: one of gloo copies more, and sends a rank its own block. In a large one a killed rank is
        noticed after the timeout of the group only. On idle cores both take equal processor time; on busy ones an
        all-to-all takes less.

        To rows, ``tensors`` is emptied, so that each is free once it is packed. A single one whose rows are contiguous
        in memory is sent without packing. To columns, ``place``, flat, gets the result. Not for complex numbers.
        """
        rank, ranks = self.way.peers.rank, self.way.peers.size
        if not self.way.to_columns:
            packed = self._pack_rows(tensors)
            wire = packed.new_empty(sum(self.received))  # not earlier: the tensors are free now
            leaving, arriving = packed.split_with_sizes(self.sent), wire.split_with_sizes(self.received)
            arriving[rank].copy_(leaving[rank])
            return Started(wire, self, self._transfers([leaving[peer] for peer in self._others], arriving, group))
        columns, before, after = self._columns_of(tensors), sum(self.sent[:rank]), sum(self.sent[rank + 1 :])
        wire = place
        if wire is None or not self.way.rows.in_order:
            wire = columns[0].new_empty(sum(self.received))
        packed, arriving = wire.new_empty(before + after), wire.split_with_sizes(self.received)
        # All ranks get here at the same time. If two ranks that share processors post messages at once, the gloo
        # thread of one can interrupt a post of its peer that holds a lock which it then polls for. So every second
        # rank copies its own block before it posts, and the remaining ranks after.
        if rank % 2:
            self._fill(arriving[rank], rank, rank + 1, columns)
        self._fill(packed.narrow(0, 0, before), 0, rank, columns)
        self._fill(packed.narrow(0, before, after), rank + 1, ranks, columns)
        pending = self._transfers(packed.split_with_sizes(self.sent[:rank] + self.sent[rank + 1 :]), arriving, group)
        if not rank % 2:
            self._fill(arriving[rank], rank, rank + 1, columns)
        return Started(wire, self, pending, place)

    def _transfers(
        self, sends: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> PendingTransfers:
        """Start to send to the remaining ranks and to receive from them; ``arriving`` has a block for this rank too."""
        open_group(group, arriving[0].device)
        receives = [(peer, arriving[peer]) for peer in self._others]
        return exchange([*zip(self._others, sends, strict=True)], receives, group)

    def finish(self, started: Started) -> Tensors:
        """Wait for what :meth:`post` has started, and unpack it: as :meth:`Exchange.finish`, but to rows the results
        have the rows outermost, as projections have them."""
        wire, _, pending, place = started
        assert isinstance(pending, PendingTransfers)
        assert wire is not None
        pending.wait()
        return self.unpack_columns(wire, place) if self.way.to_columns else self.unpack_rows(wire, rows_outermost=True)

    # The four copies. To columns: pack, unpack. To rows: pack, unpack.

    def pack(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Flat, a block for each rank; a single block if it is :attr:`shared`."""
        if not self.way.to_columns:
            return self._pack_rows(tensors)
        c = self._axis
        columns = self._columns_of(tensors)
        if self.shared:
            if len(columns) == 1:
                return columns[0].contiguous().view(-1)
            wire = columns[0].new_empty(self.sent[0])
            self._fill(wire, 0, 1, columns)
        elif self._even and len({columns[1:] for columns in self._columns[0]}) == 1:
            # One kernel, instead of one for each tensor.
            wire = (columns[0].contiguous() if len(columns) == 1 else torch.cat(columns, c + 1)).view(-1)
        else:
            wire = columns[0].new_empty(sum(self.sent))
            self._fill(wire, 0, len(self.sent), columns)
        return wire

    def _columns_of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views with the rows first; if columns are cut evenly, with a dim for the ranks in front of the rows."""
        c, ranks = self._axis, len(self._widths)
        views = [x.movedim(self.way.row_dim, 0) for x in tensors]
        if not self._even:
            return views
        sizes = [(*x.shape[:c], ranks, x.shape[c] // ranks, *x.shape[c + 1 :]) for x in views]
        return [x.view(size).movedim(c, 0) for x, size in zip(views, sizes, strict=True)]

    def _fill(self, flat: torch.Tensor, first: int, last: int, columns: list[torch.Tensor]) -> None:
        """Fill ``flat`` with the blocks of the ranks ``first`` to ``last - 1``, from :meth:`_columns_of`."""
        if first == last:
            return
        if self._even:  # a copy for each tensor, instead of one for each rank and tensor
            block = flat.view(last - first, *self._head, self._widths[first])
            for part, x in zip(self._parts(block, first), columns, strict=True):
                part.copy_(x.narrow(0, first, last - first))
            return
        for rank, block in enumerate(flat.split(self.sent[first:last]), first):
            parts = self._parts(block.view(*self._head, self._widths[rank]), rank)
            for part, x, (start, stop) in zip(parts, columns, [cut[rank] for cut in self.way.columns], strict=True):
                part.copy_(x.narrow(self._axis, start, stop - start))

    def unpack_columns(self, wire: torch.Tensor, place: torch.Tensor | None = None) -> Tensors:
        whole = self.way.rows.to_global(wire.view(self._whole), None if place is None else place.view(self._whole))
        return self.columns_in(whole)

    def columns_in(self, whole: torch.Tensor) -> Tensors:
        """Views of all rows of this rank's columns in ``whole``, which has the rows in the order of positions."""
        parts = self._parts(whole.view(self._whole), self.way.peers.rank)
        return tuple([part.movedim(0, self.way.row_dim) for part in parts])

    def _pack_rows(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Flat: the rows in rank order, each with this rank's columns of all tensors. The list is emptied."""
        if len(tensors) == 1:
            return self.way.rows.to_ranks(tensors.pop().movedim(self.way.row_dim, 0)).contiguous().view(-1)
        wire = tensors[0].new_empty(self._whole)
        for part in self._parts(wire, self.way.peers.rank):
            self.way.rows.to_ranks(tensors.pop(0).movedim(self.way.row_dim, 0), part)
        return wire.view(-1)

    def unpack_rows(self, wire: torch.Tensor, *, rows_outermost: bool = False) -> Tensors:
        """All columns of this rank's rows: contiguous, or with the rows outermost in memory."""
        # The dims of rows and columns in which the parts are joined.
        row_dim, column_dim = (0, self._axis) if rows_outermost else (self.way.row_dim, self.way.column_dim)
        if self._even:  # one permuted copy of each tensor
            ranks = len(self._widths)
            block = wire.view(ranks, *self._head, self._widths[0])
            parts = [x if rows_outermost else x.movedim(1, row_dim + 1) for x in self._parts(block, 0)]
            parts = [x.movedim(0, column_dim).flatten(column_dim, column_dim + 1) for x in parts]
            merged = [_contiguous(x) for x in parts]  # it may be a view, if each rank has one column
        else:
            blocks = [
                self._parts(block.view(*self._head, width), rank)
                for rank, (block, width) in enumerate(zip(wire.split(self.received), self._widths, strict=True))
            ]
            # Lists: 2.15 fails to compile a generator that adds tensors ("generator already executing").
            in_order = [[part.movedim(0, row_dim) for part in parts] for parts in zip(*blocks, strict=True)]
            cuts = self.way.columns
            merged = [merged_columns(parts, cut, column_dim) for parts, cut in zip(in_order, cuts, strict=True)]
        return tuple([x.movedim(0, self.way.row_dim) for x in merged] if rows_outermost else merged)

    def _parts(self, block: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Views ``[..., columns, *trail]`` of the columns of each tensor in a block ``[..., width]`` of ``rank``.

        This is the definition of a block. Copies that need no views of one (of a single tensor, or of columns that are
        cut evenly) make the same order.
        """
        front, shapes = block.shape[:-1], self._columns[rank]
        parts = block.split_with_sizes(list(map(prod, shapes)), -1) if len(shapes) > 1 else (block,)
        return [part.view(*front, *shape) for part, shape in zip(parts, shapes, strict=True)]


def wait_received(wire: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Wait for a functional collective over the peers; its result."""
    if is_traced():
        return wait_tensor(wire)
    try:
        return wait_tensor(wire)
    except RuntimeError as error:
        raise transfer_error(error, range(peers.size), resolve_group(peers.name)) from error


def merged_columns(parts: Sequence[torch.Tensor], columns: tuple[Chunk, ...], dim: int) -> torch.Tensor:
    """All columns, from each rank's part. Columns of several ranks are summed in rank order, in float32 or wider."""
    dtype = parts[0].dtype
    merged = []
    for low, high in pairwise(sorted({edge for chunk in columns for edge in chunk})):
        first, *others = [
            part.narrow(dim, low - start, high - low)
            for part, (start, stop) in zip(parts, columns, strict=True)
            if start <= low and high <= stop
        ]
        wide = others and dtype in (torch.float16, torch.bfloat16)
        total = first.float() if wide else first
        for part in others:
            total = total + part
        merged.append(total.to(dtype) if wide else total)
    if len(merged) != 1:
        return torch.cat(merged, dim) if merged else parts[0]
    return _contiguous(merged[0])


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    # Call .to() and .contiguous() only where they change something: on 2.11 a compiled Function that ends with one that
    # does nothing has a gradient of zero.
    return x if x.is_contiguous() else x.contiguous()


def _is_even_cut(columns: tuple[Chunk, ...]) -> bool:
    """Whether each column goes to one rank, in rank order, and all ranks get equally many."""
    is_cut = columns[0][0] == 0 and all(left[1] == right[0] for left, right in pairwise(columns))
    return is_cut and len({stop - start for start, stop in columns}) == 1


_UNKNOWN_TO_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _sendable(packed: torch.Tensor) -> torch.Tensor:
    """Tensors of dtypes that gloo does not know, viewed as bytes. Nothing is computed on the wire."""
    is_float8 = packed.dtype.is_floating_point and packed.element_size() == 1
    if packed.dtype.is_complex or is_float8 or packed.dtype in _UNKNOWN_TO_GLOO:
        return packed.view(torch.uint8)
    return packed
