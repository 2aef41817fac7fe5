"""SequenceLayout: which global positions each rank holds, and the parts of a tensor that it cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from operator import ge
from typing import Any

import torch

from cp_styles._lib.troubleshooting import see
from cp_styles.layouts.ranges import Chunk, even_sizes, join_ranges, ranges_of, rows_in


@dataclass(frozen=True)
class Stripes:
    """Blocks of ``block`` positions, given to ``ranks`` ranks in turn; the last block may be shorter.

    Rank r holds ``block`` positions in each ``period``, from position ``r block`` on. Three numbers describe all
    stripes, and only :meth:`chunks` lists them.
    """

    length: int
    ranks: int
    block: int

    def __post_init__(self) -> None:
        if min(self.length, self.ranks - 2, self.block - 1) < 0:
            raise ValueError(f"stripes need length >= 0, ranks >= 2 and block >= 1, got {self}")

    @property
    def period(self) -> int:
        """The number of positions from a block of a rank to its next block."""
        return self.ranks * self.block

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        periods, rest = divmod(self.length, self.period)
        starts = range(0, self.period, self.block)
        return tuple(periods * self.block + min(max(rest - start, 0), self.block) for start in starts)

    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """A list of the blocks of each rank."""
        starts = (range(first, self.length, self.period) for first in range(0, self.period, self.block))
        return tuple(tuple((start, min(start + self.block, self.length)) for start in line) for line in starts)

    def positions(self, rank: int, device: torch.device | str | None = None, *, rows: Chunk) -> torch.Tensor:
        """See :meth:`SequenceLayout.positions`."""
        row = torch.arange(*rows, device=device)
        return row // self.block * self.period + row % self.block + rank * self.block

    def part(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """The part of a whole tensor that ``rank`` holds along ``dim >= 0``: a view for blocks of one, else a copy."""
        if self.block == 1:
            return whole[(slice(None),) * dim + (slice(rank, None, self.ranks),)]
        return whole.index_select(dim, self.positions(rank, whole.device, rows=(0, self.lengths[rank])))

    def rows_rank_by_rank(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The index of each position in the concatenation of the rows of all ranks: int64 ``[length]``."""
        periods, rest = divmod(self.length, self.period)
        position = torch.arange(self.length, device=device)
        start = position // self.block % self.ranks * self.block  # offset of the rank's block in each period
        return start * periods + start.clamp(max=rest) + position // self.period * self.block + position % self.block


@dataclass(frozen=True)
class SequenceLayout:
    """The positions ``0 .. length - 1`` cut into an ascending list of chunks for each rank.

    Rank ``r`` holds the concatenation of ``chunks[r]``, in that order. Ranks may hold different numbers of tokens, or
    none. Every position has exactly one owner. Build a layout with a balancer (:func:`contiguous`, :func:`head_tail`,
    ...), or from chunks of your own with :meth:`from_chunks`.

    Attributes:
        held: the chunks of each rank, or :class:`Stripes` for all ranks. Chunks that are stripes become Stripes, if a
            rank has more than one chunk. So equal cuts are equal layouts.
        length: the number of positions of the whole sequence.
        lengths: the number of positions of each rank.

    Example::

        layout = head_tail(10, 2)
        assert layout.chunks == (((0, 3), (8, 10)), ((3, 8),))
        assert layout.positions(0).tolist() == [0, 1, 2, 8, 9]
        parts = [layout.shard(torch.arange(10), 0, rank) for rank in range(2)]
        assert layout.unshard(parts, 0).tolist() == list(range(10))
    """

    held: tuple[tuple[Chunk, ...], ...] | Stripes
    length: int = field(init=False, compare=False)
    lengths: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        held = self.held
        if isinstance(held, Stripes) and held.length <= held.period:
            held = held.chunks()
        if not isinstance(held, Stripes):
            lengths = _check_chunks(held)
            held = _find_stripes(held, sum(lengths)) or held
        else:
            lengths = held.lengths
        object.__setattr__(self, "held", held)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "length", sum(lengths))

    def __hash__(self) -> int:
        return self._hash

    # Computed once, because layouts are cache keys of plans and may have thousands of chunks.
    _hash = cached_property(lambda self: hash(self.held))

    @classmethod
    def from_chunks(cls, chunks: Iterable[Iterable[Chunk]]) -> SequenceLayout:
        """A layout from ``chunks``: for each rank half-open ranges of global positions, in any order.

        Chunks are sorted, touching chunks are joined, and empty chunks are dropped.

        Raises:
            ValueError: a position has no owner, or two.
        """
        return cls(tuple(tuple(join_ranges(sorted(c for c in held if c[1] > c[0]))) for held in chunks))

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """For each rank, half-open ranges of global positions, ascending; no two of them touch."""
        # The chunks of Stripes are listed at the first use. Plans and cuts do not need this list.
        return self.held.chunks() if isinstance(self.held, Stripes) else self.held

    @property
    def ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return len(self.lengths)

    def positions(
        self, rank: int, device: torch.device | str | None = None, *, rows: Chunk | None = None
    ) -> torch.Tensor:
        """Global positions of the tokens of ``rank``, in local order: int64 ``[lengths[rank]]`` on ``device``.

        ``rows`` limits the result to a half-open range of the local rows. No communication.
        """
        first, last = (0, self.lengths[rank]) if rows is None else rows
        if isinstance(self.held, Stripes):
            return self.held.positions(rank, device, rows=(first, last))
        parts, row = [], 0  # row: the local row of the chunk's first token
        for start, stop in self.chunks[rank]:
            low, high = max(first, row), min(last, row + stop - start)
            if low < high:
                parts.append(torch.arange(start + low - row, start + high - row, device=device))
            row += stop - start
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    def shard(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """The part of a whole ``tensor`` that ``rank`` holds along ``dim``.

        Contiguous on every rank: at most one copy, and a view of ``tensor`` if a rank's only chunk is contiguous.
        Differentiable. No communication. The result carries a mark with its layout (see :func:`find_cut`), so that
        attention with another layout refuses it.

        Raises:
            ValueError: ``tensor.shape[dim]`` is not :attr:`length`.
        """
        if tensor.shape[dim] != self.length:
            raise ValueError(
                f"the layout cuts a sequence of {self.length} positions, but dim {dim} of a tensor of shape "
                f"{tuple(tensor.shape)} has {tensor.shape[dim]}: pass the whole sequence and its dim, or build the "
                f"layout for {tensor.shape[dim]} positions"
            )
        # Contiguous on every rank, so that a view of another shape works on all ranks or on none.
        part = self.part(tensor, dim, rank).contiguous()
        mark_cut(part, (self, dim % tensor.ndim))
        return part

    def part(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """:meth:`shard` along ``dim`` for ``rank``, without the check of ``tensor`` and without a mark."""
        if isinstance(self.held, Stripes):
            return self.held.part(tensor, dim % tensor.ndim, rank).contiguous()
        return rows_in(tensor, dim, self.held[rank])

    def unshard(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole tensor from the ``parts`` of all ranks, given in this process: the inverse of :meth:`shard`.

        ``dim`` is the sequence dim. One copy. Differentiable. No communication: between processes use
        :func:`cp_styles.collectives.gather` with this layout.

        Raises:
            ValueError: there is not one part for each rank, or a part does not have the length of its rank.
        """
        lengths = tuple(part.shape[dim] for part in parts)
        if lengths != self.lengths:
            raise ValueError(
                f"ranks hold {self.lengths} positions in this layout, the parts have {lengths} on dim {dim}"
            )
        if isinstance(self.held, Stripes):
            return torch.cat(tuple(parts), dim).index_select(dim, self.held.rows_rank_by_rank(parts[0].device))
        pieces: list[tuple[int, torch.Tensor]] = []
        for part, rank_chunks in zip(parts, self.held, strict=True):
            offset = 0
            for start, stop in rank_chunks:
                pieces.append((start, part.narrow(dim, offset, stop - start)))
                offset += stop - start
        if not pieces:
            return parts[0]
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], dim)

    def describe(self) -> str:
        """A text with one line for each rank: the number of its tokens, and its chunks."""
        lines = [f"{self.length} positions on {self.ranks} ranks"]
        for rank, rank_chunks in enumerate(self.chunks):
            shown = " ".join(f"[{start}, {stop})" for start, stop in rank_chunks[:6])
            shown += " ..." if len(rank_chunks) > 6 else ""
            lines.append(f"  rank {rank}: {self.lengths[rank]:>6} in {len(rank_chunks)} chunks {shown}")
        return "\n".join(lines)


_CUT = "_cp_styles_cut"


def find_cut(tensor: torch.Tensor) -> tuple[SequenceLayout, int] | None:
    """(layout, dim) if :meth:`SequenceLayout.shard` returned this tensor object, otherwise None."""
    return getattr(tensor, _CUT, None)


def find_cuts(values: Iterable[Any]) -> list[tuple[torch.Tensor, SequenceLayout]]:
    """The tensors among ``values`` that a layout has cut, each with its layout."""
    pairs = []
    for value in values:  # not a comprehension, so that torch.compile can trace it
        cut = getattr(value, _CUT, None)
        if cut is not None:
            pairs.append((value, cut[0]))
    return pairs


def refuse_other_cut(name: str, tensors: Iterable[Any], layout: SequenceLayout, shown: str) -> None:
    """Raise ValueError for a tensor that another layout of equal length and ranks has cut.

    ``shown`` is the text of ``layout`` in the message.
    """
    for tensor, cut in find_cuts(tensors):
        if cut != layout and (cut.length, cut.ranks) == (layout.length, layout.ranks):
            raise ValueError(
                f"{name}: an input of shape {tuple(tensor.shape)} was cut with another layout than this call uses "
                f"({shown}); give both the same one, by layout= or by a SequenceScope around both"
                f"{see('A tensor that was cut with another layout')}"
            )


def mark_cut(tensor: torch.Tensor, cut: tuple[SequenceLayout, int] | None) -> None:
    """Make :func:`find_cut` return ``cut`` for this tensor object."""
    if cut is not None:
        setattr(tensor, _CUT, cut)
    elif find_cut(tensor) is not None:
        delattr(tensor, _CUT)


def nested_layout(outer: SequenceLayout, inner_ranks: int) -> SequenceLayout:
    """Cut the part of each rank of ``outer`` again among ``inner_ranks`` ranks: for ring x Ulysses.

    Rank ``o * inner_ranks + i`` is inner rank i of outer rank o, as on a mesh with the axes (outer, inner). A gather
    over the inner axis alone gives the part of outer rank o. No communication.

    Args:
        outer: the layout over the outer (ring) ranks.
        inner_ranks: number of inner (Ulysses) ranks that share the part of one outer rank. The first ones get the
            remainder.

    Raises:
        ValueError: ``inner_ranks`` is below 1.

    Source: Fang and Zhao, USP: A Unified Sequence Parallelism Approach (2024).
    """
    if inner_ranks < 1:
        raise ValueError(f"inner_ranks must be at least 1, got {inner_ranks}")
    cut: list[list[Chunk]] = []
    for chunks, length in zip(outer.chunks, outer.lengths, strict=True):
        edges = list(accumulate((stop - start for start, stop in chunks), initial=0))
        for begin, end in ranges_of(even_sizes(length, inner_ranks)):
            # The chunk at `edge` in local order starts at the global position `start`. Take its part in [begin, end).
            cut.append(
                [
                    (start + max(begin - edge, 0), start + min(end - edge, stop - start))
                    for edge, (start, stop) in zip(edges, chunks, strict=False)
                    if max(begin - edge, 0) < min(end - edge, stop - start)
                ]
            )
    return SequenceLayout.from_chunks(cut)


def join_layouts(*layouts: SequenceLayout) -> SequenceLayout:
    """The layout of keys of several sequences, which each rank has joined in this order: for ``kv_layout=``.

    The keys of the first sequence are numbered first, then the keys of the second, and so on. Heads that draft tokens,
    rolling caches, two streams and later parts of a prompt have such keys.

    Raises:
        ValueError: there is none, or they are for different numbers of ranks.

    Example::

        keys = join_layouts(contiguous(4, 2), contiguous(6, 2))
        assert keys.chunks == (((0, 2), (4, 7)), ((2, 4), (7, 10)))
    """
    if len({layout.ranks for layout in layouts}) != 1:
        raise ValueError(f"join_layouts: layouts for {[layout.ranks for layout in layouts]} ranks: give all one number")
    firsts = accumulate((layout.length for layout in layouts), initial=0)
    moved = [
        [[(first + start, first + stop) for start, stop in chunks] for chunks in layout.chunks]
        for first, layout in zip(firsts, layouts, strict=False)
    ]
    return SequenceLayout.from_chunks([*chain(*of_rank)] for of_rank in zip(*moved, strict=True))


def _check_chunks(chunks: tuple[tuple[Chunk, ...], ...]) -> tuple[int, ...]:
    """The number of positions of each rank. Raises ValueError for chunks that are not a :class:`SequenceLayout`."""
    starts, stops = _split_edges(chain.from_iterable(chunks))
    if sorted(starts) != [0, *sorted(stops)][:-1] or any(map(ge, starts, stops)):
        starts, stops = _split_edges(sorted(zip(starts, stops, strict=True)))
        edges = zip(starts, stops, [0, *stops], strict=False)
        start, stop, expected = next(entry for entry in edges if entry[0] != entry[2] or entry[1] <= entry[0])
        raise ValueError(
            f"chunks must cover every position once, in non-empty half-open ranges: found ({start}, {stop}) "
            f"where position {expected} comes next"
        )
    lengths = []
    for rank, rank_chunks in enumerate(chunks):
        starts, stops = _split_edges(rank_chunks)
        if any(map(ge, stops, starts[1:])):
            raise ValueError(
                f"the chunks of rank {rank} must ascend and not touch, got {rank_chunks}; see from_chunks()"
            )
        lengths.append(sum(stops) - sum(starts))
    return tuple(lengths)


def _find_stripes(chunks: tuple[tuple[Chunk, ...], ...], length: int) -> Stripes | None:
    """The Stripes that equal these chunks. None if there are none, or if no rank has more than one chunk."""
    if len(chunks) < 2 or len(chunks[0]) < 2 or chunks[0][1][0] != len(chunks) * chunks[0][0][1]:
        return None
    stripes = Stripes(length, len(chunks), chunks[0][0][1])
    return stripes if stripes.chunks() == chunks else None


def _split_edges(chunks: Iterable[Chunk]) -> tuple[list[int], list[int]]:
    chunks = list(chunks)
    return [start for start, _ in chunks], [stop for _, stop in chunks]
