"""The one exchange that all collectives are made of: ranks exchange rows of a matrix for columns.

Legend: R rows, C columns, P ranks. A tensor is viewed as ``[R, *lead, C, *trail]``: the row dim, the dims before the
column dim, the column dim, the dims after it. Rank i has the rows ``rows.layout.chunks[i]``. Rank j needs the columns
``columns[t][j]`` of tensor t.

    to columns:  every rank has its rows of all columns      ->  all rows of the columns that it needs
    to rows:     every rank has all rows of its columns      ->  its rows of all columns; columns that several ranks
                                                                 had are summed

Each direction is the adjoint of the other, for any columns:

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
from typing import NamedTuple

import torch

from cp_styles._compat import is_traced, resolve_group, start_all_gather, start_all_to_all, wait_tensor
from cp_styles.collectives.peers import Peers
from cp_styles.collectives.rows import Rows
from cp_styles.comm.point_to_point import transfer_error
from cp_styles.layout import Chunk

Tensors = tuple[torch.Tensor, ...]


class Started(NamedTuple):
    """A message that is being sent: the flat receive buffer, and the tensors, which must live until it has arrived."""

    wire: torch.Tensor | None
    tensors: Tensors


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
            return Started(None, tensors)
        packed, sent, received = self._message(tensors)
        shared = len(sent) == 1
        if shared and len(set(self.rows.sizes)) == 1:
            return Started(start_all_gather(_sendable(packed), self.peers.size, self.peers.name), tensors)
        if shared:
            packed, sent = packed.expand(self.peers.size, -1).reshape(-1), sent * self.peers.size
        wire = _sendable(packed)
        items = packed.element_size() // wire.element_size()
        received, sent = [items * n for n in received], [items * n for n in sent]
        return Started(start_all_to_all(wire, received, sent, self.peers.name), tensors)

    def finish(self, started: Started) -> Tensors:
        """Wait and unpack.

        To columns: views of one buffer with the rows outermost; one copy if the layout is not contiguous.
        To rows: contiguous tensors; one copy.
        """
        if started.wire is None:
            return started.tensors
        wire = arrived(started.wire, self.peers).view(started.tensors[0].dtype)
        views = [self.rows_first(x) for x in started.tensors]
        return self._unpack_columns(wire, views) if self.to_columns else self._unpack_rows(wire, views)

    def _message(self, tensors: Tensors) -> tuple[torch.Tensor, list[int], list[int]]:
        """The packed tensors, and the number of elements sent to and received from each rank.

        If the list of sent numbers has one entry, every rank gets the same block.
        """
        views = [self.rows_first(x) for x in tensors]
        lead, rank, sizes = prod(self.lead(views[0])), self.peers.rank, self.rows.sizes
        widths = [self.width(peer, views) for peer in range(self.peers.size)]
        of_rows = [size * lead * widths[rank] for size in sizes]  # this rank's columns, of the rows of each rank
        of_columns = [sizes[rank] * lead * width for width in widths]  # this rank's rows, of the columns of each one
        if not self.to_columns:
            return self._pack_rows(views), of_rows, of_columns
        return self._pack_columns(views, widths), of_columns[:1] if self._is_gather() else of_columns, of_rows

    # The four copies. To columns: pack, unpack. To rows: pack, unpack.

    def _pack_columns(self, views: list[torch.Tensor], widths: list[int]) -> torch.Tensor:
        """Flat: a block ``[own rows, *lead, width]`` for each rank; for a gather the one block that all ranks need."""
        c, ranks = self.column_axis, self.peers.size
        if self._is_gather():
            return _side_by_side(views, c)
        if len({x.shape[c + 1 :] for x in views}) == 1 and all(map(_is_even_cut, self.columns)):
            # One kernel, instead of one for each rank and tensor.
            blocks = [x.unflatten(c, (ranks, x.shape[c] // ranks)).movedim(c, 0) for x in views]
            return (blocks[0].contiguous() if len(blocks) == 1 else torch.cat(blocks, c + 1)).view(-1)
        head = views[0].shape[:c]
        wire = views[0].new_empty(prod(head) * sum(widths))
        for rank, block in enumerate(wire.split([prod(head) * width for width in widths])):
            _copy_side_by_side(block.view(*head, widths[rank]), views, c, [columns[rank] for columns in self.columns])
        return wire

    def _unpack_columns(self, wire: torch.Tensor, views: list[torch.Tensor]) -> Tensors:
        c, rank = self.column_axis, self.peers.rank
        width = self.width(rank, views)
        whole = self.rows.to_global(wire.view(sum(self.rows.sizes), *self.lead(views[0]), width))
        columns = [chunks[rank] for chunks in self.columns]
        return tuple(part.movedim(0, self.row_dim) for part in columns_in_block(whole, views, c, columns))

    def _pack_rows(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Flat: the rows in rank order, each with this rank's columns of all tensors."""
        c, pieces = self.column_axis, list(zip(*map(self.rows.by_rank, views), strict=True))
        if len(pieces) == 1:
            return _side_by_side(pieces[0], c)
        if len(views) == 1:
            return torch.cat([piece for (piece,) in pieces]).view(-1)
        wire = views[0].new_empty(*views[0].shape[:c], self.width(self.peers.rank, views))
        for block, piece in zip(wire.split([x.shape[0] for x, *_ in pieces]), pieces, strict=True):
            _copy_side_by_side(block, piece, c, [(0, x.shape[c]) for x in piece])
        return wire.view(-1)

    def _unpack_rows(self, wire: torch.Tensor, views: list[torch.Tensor]) -> Tensors:
        c = self.column_axis
        head = (self.rows.sizes[self.peers.rank], *self.lead(views[0]))
        widths = [self.width(rank, views) for rank in range(self.peers.size)]
        blocks = [
            columns_in_block(block.view(*head, width), views, c, [columns[rank] for columns in self.columns])
            for rank, (block, width) in enumerate(
                zip(wire.split([prod(head) * width for width in widths]), widths, strict=True)
            )
        ]
        by_tensor = zip(*blocks, strict=True)
        # A list: 2.15 fails to compile a generator that adds tensors ("generator already executing").
        in_order = [tuple([part.movedim(0, self.row_dim) for part in parts]) for parts in by_tensor]
        return tuple(
            [merged_columns(parts, cols, self.column_dim) for parts, cols in zip(in_order, self.columns, strict=True)]
        )

    # Geometry.

    @property
    def column_axis(self) -> int:
        """The column dim, counted with the row dim moved to the front."""
        return self.column_dim + (self.column_dim < self.row_dim)

    def rows_first(self, x: torch.Tensor) -> torch.Tensor:
        """A view of ``x`` with the row dim moved to the front."""
        return x.movedim(self.row_dim, 0)

    def lead(self, view: torch.Tensor) -> tuple[int, ...]:
        """The sizes between the rows and the columns of a tensor with the rows first."""
        return tuple(view.shape[1 : self.column_axis])

    def width(self, rank: int, views: Sequence[torch.Tensor]) -> int:
        """Number of elements that ``rank`` needs of one row and one lead index, of all tensors together."""
        trails = [prod(x.shape[self.column_axis + 1 :]) for x in views]
        return sum((cols[rank][1] - cols[rank][0]) * trail for cols, trail in zip(self.columns, trails, strict=True))

    def _is_gather(self) -> bool:
        """Whether every rank needs the same columns."""
        return all(len(set(columns)) == 1 for columns in self.columns)


def arrived(wire: torch.Tensor, peers: Peers) -> torch.Tensor:
    """What a functional collective over the peers receives. It waits for it."""
    if is_traced():
        return wait_tensor(wire)
    try:
        return wait_tensor(wire)
    except RuntimeError as error:
        raise transfer_error(error, range(peers.size), resolve_group(peers.name)) from error


def columns_in_block(block: torch.Tensor, views: Sequence[torch.Tensor], c: int, columns: Sequence[Chunk]) -> Tensors:
    """Views ``[R, *lead, columns, *trail]`` of the columns of each tensor in a block ``[R, *lead, width]``.

    This is the definition of a block, for packing and unpacking, here and in strategies/all_to_all.py. Copies that need
    no views of a block (of a single tensor, or of columns that are cut evenly) make the same order.
    """
    parts, at = [], 0  # of the tensors, whose rows come first, only the dims after ``c`` are read: those of a column
    for x, (start, stop) in zip(views, columns, strict=True):
        shape = (stop - start, *x.shape[c + 1 :])
        parts.append(block.narrow(-1, at, prod(shape)).unflatten(-1, shape))
        at += prod(shape)
    return tuple(parts)


def merged_columns(parts: Tensors, columns: tuple[Chunk, ...], dim: int) -> torch.Tensor:
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
    # Call .to() and .contiguous() only where they change something: on 2.11 a compiled Function that ends with one that
    # does nothing has a gradient of zero.
    if len(merged) != 1:
        return torch.cat(merged, dim) if merged else parts[0]
    return merged[0] if merged[0].is_contiguous() else merged[0].contiguous()


def _is_even_cut(columns: tuple[Chunk, ...]) -> bool:
    """Whether each column goes to one rank, in rank order, and all ranks get equally many."""
    is_cut = columns[0][0] == 0 and all(left[1] == right[0] for left, right in pairwise(columns))
    return is_cut and len({stop - start for start, stop in columns}) == 1


def _side_by_side(views: Sequence[torch.Tensor], c: int) -> torch.Tensor:
    """Flat: each row with all columns of all tensors. A single tensor in this order is not copied."""
    if len(views) == 1:
        return views[0].contiguous().view(-1)
    wire = views[0].new_empty(*views[0].shape[:c], sum(prod(x.shape[c:]) for x in views))
    _copy_side_by_side(wire, views, c, [(0, x.shape[c]) for x in views])
    return wire.view(-1)


def _copy_side_by_side(block: torch.Tensor, views: Sequence[torch.Tensor], c: int, columns: list[Chunk]) -> None:
    for part, x, (start, stop) in zip(columns_in_block(block, views, c, columns), views, columns, strict=True):
        part.copy_(x.narrow(c, start, stop - start))


_UNKNOWN_TO_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _sendable(packed: torch.Tensor) -> torch.Tensor:
    """Tensors of dtypes that gloo does not know, viewed as bytes. Nothing is computed on the wire."""
    is_float8 = packed.dtype.is_floating_point and packed.element_size() == 1
    if packed.dtype.is_complex or is_float8 or packed.dtype in _UNKNOWN_TO_GLOO:
        return packed.view(torch.uint8)
    return packed
