"""Sequence layouts: which global positions each rank holds.

Tokens, labels, positions, masks, the attention plan and unsharding are all derived from a :class:`SequenceLayout`.
A load balancer is a function that returns a SequenceLayout.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from numbers import Integral
from operator import ge, itemgetter
from typing import Any, TypeAlias

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.troubleshooting import see
from cp_styles.masks import Mask
from cp_styles.masks.linear_pieces import work_from

Chunk: TypeAlias = tuple[int, int]
"""A half-open range ``(start, stop)`` of global positions."""


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


def holds(dtype: torch.dtype, value: float) -> bool:
    """Whether tensors of ``dtype`` can hold ``value``. torch wraps -100 to 156 in uint8, and cuts 0.5 to 0."""
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    bounds = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bounds[0] <= value <= bounds[1] and value == int(value)


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


Balancer: TypeAlias = Callable[[int, int], SequenceLayout]
"""``balancer(length, ranks)`` returns the layout of a sequence of ``length`` positions on ``ranks`` ranks."""


def contiguous(length: int, ranks: int) -> SequenceLayout:
    """One range for each rank, in rank order. The first ranks get the remainder.

    Under a causal mask the work is not balanced: the last rank has most of it. See :func:`head_tail`.

    Args:
        length: number of positions.
        ranks: number of ranks. It need not divide ``length``.

    Example::

        assert contiguous(10, 3).chunks == (((0, 4),), ((4, 7),), ((7, 10),))
    """
    _check_sizes(length, ranks)
    return SequenceLayout.from_chunks([chunk] for chunk in ranges_of(even_sizes(length, ranks)))


def head_tail(length: int, ranks: int) -> SequenceLayout:
    """Cut into 2 P chunks. Rank r holds chunks r and 2 P - 1 - r. Causal work is equal. Also called zigzag.

    Args:
        length: number of positions.
        ranks: number of ranks, P. It need not divide ``length``.

    Source: Brandon et al., Striped Attention (2023), and the causal balance of Megatron-LM's context parallelism.

    Example::

        assert head_tail(8, 2).chunks == (((0, 2), (6, 8)), ((2, 6),))
    """
    return per_document_head_tail(length, ranks, documents=[length], cut_all=True)


def per_document_head_tail(
    length: int, ranks: int, *, documents: Sequence[int], cut_all: bool = False
) -> SequenceLayout:
    """Cut each document head-tail by itself. Causal work and tokens are balanced for documents of any length.

    All tokens of a document that is cut head-tail have equal cost, which is higher in a longer document. Ranks are
    filled one after the other, with a mixture of a document whose tokens cost more than the average and a document
    whose tokens cost less, in the proportion that costs the average. When one of the two ends, the next document of its
    kind follows. So most short documents stay whole on one rank, and a long document is cut over few neighbouring
    ranks. A rank attends to few other ranks, in few tiles.

    The mixtures are rounded to whole tokens. If the work is then unbalanced by more than 2 %, as it may be in very
    short sequences, all documents are cut over all ranks, if this is better balanced.

    Args:
        length: number of positions; the sum of ``documents``.
        ranks: number of ranks.
        documents: lengths of the packed documents, in order.
        cut_all: cut all documents over all ranks, also the shortest document. The remainder of each document goes to
            the ranks with the fewest tokens so far.

    Raises:
        ValueError: ``documents`` do not add up to ``length``.
        TypeError: ``documents`` are not numbers, but for example the lengths of each row of a batch.

    Example::

        layout = per_document_head_tail(1000, 4, documents=[600, 300, 100])
        assert layout.lengths == (250, 250, 250, 250)
    """
    _check_sizes(length, ranks)
    if not all(isinstance(size, Integral) for size in documents):
        raise TypeError(
            f"per_document_head_tail takes the lengths of the documents as int, got {documents!r}; all rows of a batch "
            "are cut at the same positions. For documents that differ from row to row take "
            "by_work(length, ranks, mask=PerRow([Documents(lengths) & Causal() for lengths in rows])), or "
            "BatchSharder, which is given document_ids [B, S]"
        )
    if sum(documents) != length or any(size < 0 for size in documents):
        raise ValueError(f"document lengths must be >= 0 and add up to {length}, got a sum of {sum(documents)}")
    if cut_all:
        return SequenceLayout.from_chunks(_cut_every_document(documents, ranks)[1])
    best = _pair_documents(documents, ranks)
    if best[0] * ranks * 100 > sum(map(_causal_work, documents)) * 102:
        best = min(best, _cut_every_document(documents, ranks), key=itemgetter(0))
    return SequenceLayout.from_chunks(best[1])


def _causal_work(size: int, start: int = 0) -> int:
    """Twice the causal work of ``size`` positions of a document, from its position ``start`` on."""
    return size * (2 * start + size + 1)


class _DocumentCut:
    """A document that is cut head-tail, from its ends to its middle.

    Attributes:
        size: number of positions of the document.
        left: the number of positions that are not planned for a rank yet.
    """

    def __init__(self, start: int, size: int) -> None:
        self.size = self.left = size
        self._start, self._head, self._tail = start, 0, size

    def take(self, tokens: int) -> tuple[list[Chunk], int]:
        """Take ``tokens`` positions, half at the head and half at the tail. Returns chunks, and twice their work."""
        first, last = tokens - tokens // 2, tokens // 2
        head, tail = self._head, self._tail - last
        self._head, self._tail = head + first, tail
        chunks = [(self._start + at, self._start + at + size) for at, size in ((head, first), (tail, last))]
        return chunks, _causal_work(first, head) + _causal_work(last, tail)


def _start_cuts(documents: Sequence[int]) -> list[_DocumentCut]:
    return [_DocumentCut(end - size, size) for end, size in zip(accumulate(documents), documents, strict=True) if size]


def _cut_every_document(documents: Sequence[int], ranks: int) -> tuple[int, list[list[Chunk]]]:
    """Cut all documents over all ranks. Returns (twice the work of the busiest rank, chunks of all ranks)."""
    # The remainder of a document goes to the ranks with the most room.
    room, work = list(even_sizes(sum(documents), ranks)), [0] * ranks
    by_rank: list[list[Chunk]] = [[] for _ in range(ranks)]
    for document in sorted(_start_cuts(documents), key=lambda document: -document.size):
        least, more = divmod(document.size, ranks)
        most = set(sorted(range(ranks), key=lambda rank: -room[rank])[:more])
        for rank in range(ranks):
            tokens = least + (rank in most)
            chunks, pairs = document.take(tokens)
            by_rank[rank] += chunks
            room[rank] -= tokens
            work[rank] += pairs
    return max(work), by_rank


def _pair_documents(documents: Sequence[int], ranks: int) -> tuple[int, list[list[Chunk]]]:
    """Mix long and short documents as :func:`per_document_head_tail` describes. Returns as _cut_every_document."""
    by_rank: list[list[Chunk]] = []
    length, remaining, most = sum(documents), sum(map(_causal_work, documents)), 0
    cuts = _start_cuts(documents)
    queues = [
        deque(document for document in cuts if (document.size + 1) * length >= remaining),
        deque(document for document in cuts if (document.size + 1) * length < remaining),
    ]
    for rank, room in enumerate(even_sizes(length, ranks)):
        planned: dict[_DocumentCut, int] = {}
        due = remaining // (ranks - rank)
        while room:
            # If only one kind of documents is left, long and short are one document.
            first = [queue[0] for queue in queues if queue]
            long, short = first[0], first[-1]
            # The number of tokens of the long document with which the rank gets the work that is due.
            more, unit = due - room * (short.size + 1), long.size - short.size
            long_tokens = min(max((2 * more + unit) // (2 * unit), 0), room) if unit else room
            short_tokens = room - long_tokens
            # Take both in this proportion, up to the end of one of them.
            if long_tokens > long.left and long.left * short_tokens <= short.left * long_tokens:
                long_tokens, short_tokens = long.left, long.left * short_tokens // long_tokens
            elif short_tokens > short.left:
                long_tokens, short_tokens = short.left * long_tokens // short_tokens, short.left
            for document, tokens in ((long, long_tokens), (short, short_tokens)):
                if tokens:
                    planned[document] = planned.get(document, 0) + tokens
                    document.left -= tokens
                    room -= tokens
                    due -= tokens * (document.size + 1)
            for queue in queues:
                if queue and not queue[0].left:
                    queue.popleft()
        shares = [document.take(tokens) for document, tokens in planned.items()]
        by_rank.append([chunk for chunks, _ in shares for chunk in chunks])
        work = sum(pairs for _, pairs in shares)
        remaining -= work
        most = max(most, work)
    return most, by_rank


def striped(length: int, ranks: int, *, block: int = 1) -> SequenceLayout:
    """Blocks of ``block`` positions, given to the ranks in turn (Brandon et al., Striped Attention, 2023).

    With blocks of one position, causal attention to a source is one kernel call on a causal square, and neither layout
    nor plan grows with the length. With larger blocks there is a call for each block and source, or a call with an
    explicit mask for several short blocks.

    Args:
        length: number of positions.
        ranks: number of ranks.
        block: positions of a block.

    Raises:
        ValueError: ``block`` is below 1.

    Example::

        assert striped(8, 2, block=2).chunks == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    """
    _check_sizes(length, ranks)
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    return SequenceLayout(Stripes(length, ranks, block)) if ranks > 1 else contiguous(length, ranks)


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


def by_work(length: int, ranks: int, *, mask: Mask, block: int | None = None) -> SequenceLayout:
    """Equal work under *any* band mask. Blocks of positions, the heaviest first, go to the rank with the least work.

    Ranks hold equally many blocks, so that the rest of the model is balanced too. This is the longest-processing-time
    rule (Graham, 1969), which MagiAttention's dispatch also uses. If an imbalance of more than 1 % is left, the busiest
    rank and the least busy rank exchange a block, repeatedly.

    Where a balancer is expected, bind the mask: ``functools.partial(by_work, mask=Causal() & Documents(lengths))``.

    Args:
        length: number of positions.
        ranks: number of ranks.
        mask: which keys each query attends to.
        block: positions of a block. Smaller blocks balance better and cut the sequence into more chunks. Default: a
            rank holds about 16 blocks.

    Raises:
        ValueError: ``block`` is below 1, or the mask is for a shorter sequence.

    Example::

        layout = by_work(1024, 4, mask=SlidingWindow(99))
        assert imbalance(layout, SlidingWindow(99)) < 1.01
    """
    _check_sizes(length, ranks)
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    block = block or max(1, -(-length // (16 * ranks)))
    work = work_from(mask, torch.arange(0, length, block, device="cpu"), length, length).tolist()
    holder, done = [0] * len(work), [0] * ranks
    room = [-(-len(work) // ranks)] * ranks
    least = list(range(ranks))  # a heap of (work * ranks + rank) for the ranks with room
    for index in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        rank = holder[index] = least[0] % ranks
        room[rank] -= 1
        done[rank] += work[index]
        if room[rank]:
            heapq.heapreplace(least, done[rank] * ranks + rank)
        else:
            heapq.heappop(least)
    _exchange_blocks(holder, done, work)
    by_rank: list[list[Chunk]] = [[] for _ in range(ranks)]
    first = 0
    for index, (rank, later) in enumerate(pairwise((*holder, None)), 1):
        if rank is not None and rank != later:
            by_rank[rank].append((first * block, min(index * block, length)))
            first = index
    return SequenceLayout(tuple(map(tuple, by_rank)))


def _exchange_blocks(holder: list[int], done: list[int], work: Sequence[int]) -> None:
    """Exchange blocks between the busiest rank and the least busy rank, in place.

    ``holder`` is the rank of each block, ``done`` is the work of each rank.
    """
    # Until the busiest rank has at most 1 % more than the mean, or no exchange helps.
    ranks, total = range(len(done)), sum(done)
    for _ in ranks:
        most, least = max(ranks, key=done.__getitem__), min(ranks, key=done.__getitem__)
        gap = done[most] - done[least]
        if done[most] * len(done) * 100 <= total * 101:
            return
        heavy, light = ([index for index, rank in enumerate(holder) if rank == each] for each in (most, least))
        gaps = ((abs(gap - 2 * (work[a] - work[b])), a, b) for a in heavy for b in light)
        new_gap, a, b = min(gaps, default=(gap, 0, 0))
        if new_gap >= gap:
            return
        holder[a], holder[b] = least, most
        done[most] += work[b] - work[a]
        done[least] += work[a] - work[b]


def layout_made_by(cut: SequenceLayout | Balancer, length: int, ranks: int) -> SequenceLayout:
    """Call a balancer and check the layout that it returns. A layout as ``cut`` is only checked."""
    # Results of the balancers of this module, alone or with constants bound by functools.partial, are cached. Other
    # balancers may depend on data that changes between batches, so they are called every time.
    if not isinstance(cut, SequenceLayout) and not may_vary(cut):
        return _cached_layout(_bound_values(cut), length, ranks)
    return _call_balancer(cut, length, ranks)


def layout_of_one(layout: Any) -> Any:
    """Replace a layout for several ranks by the layout of one rank. A balancer is returned unchanged."""
    return contiguous(layout.length, 1) if isinstance(layout, SequenceLayout) else layout


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


def may_vary(cut: SequenceLayout | Balancer) -> bool:
    """Whether a balancer may return other layouts: it is no function of this module with constants."""
    if isinstance(cut, SequenceLayout):
        return False
    function, constants = _bound_values(cut)[:2]
    return function not in _BALANCERS or not all(map(_is_constant, constants))


def describe_cut(cut: SequenceLayout | Balancer) -> SequenceLayout | str:
    """The description of a layout or balancer that ranks compare. For a user's own function they compare results."""
    if isinstance(cut, SequenceLayout):
        return cut
    function, values, names = _bound_values(cut)
    return "a balancer" if may_vary(cut) else f"{function.__name__}{values or ''}{names or ''}"


def _bound_values(balancer: Balancer) -> tuple[Any, tuple[Any, ...], tuple[str, ...]]:
    """The function of a balancer, its bound values, and the names of the last values."""
    # A key of caches, because a partial object compares by identity. Masks are replaced by their patterns, which
    # determine a layout and hold no tensor of a caller.
    if not isinstance(balancer, functools.partial):
        return balancer, (), ()
    values = (*balancer.args, *balancer.keywords.values())
    values = tuple(value.pattern if isinstance(value, Mask) else value for value in values)
    return balancer.func, values, tuple(balancer.keywords)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (int, Mask))


@remembered(64)
def _cached_layout(parts: tuple[Any, tuple[Any, ...], tuple[str, ...]], length: int, ranks: int) -> SequenceLayout:
    function, constants, names = parts
    first = len(constants) - len(names)
    named = dict(zip(names, constants[first:], strict=True))
    return _call_balancer(functools.partial(function, *constants[:first], **named), length, ranks)


def _call_balancer(cut: SequenceLayout | Balancer, length: int, ranks: int) -> SequenceLayout:
    layout = cut(length, ranks) if callable(cut) else cut
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"a layout must be a SequenceLayout or a function that makes one, such as head_tail: {cut}")
    if (layout.length, layout.ranks) != (length, ranks):
        source = "the layout is" if layout is cut else f"{cut} returned one"
        raise ValueError(
            f"a layout must cut {length} positions for {ranks} ranks, and {source} for {layout.length} positions on "
            f"{layout.ranks} ranks: give the layout of this sequence, or a balancer such as head_tail"
        )
    return layout


_BALANCERS = frozenset((contiguous, head_tail, per_document_head_tail, striped, by_work))


def _check_sizes(length: int, ranks: int) -> None:
    if ranks < 1 or length < 0:
        raise ValueError(f"a layout needs length >= 0 and ranks >= 1, got length={length}, ranks={ranks}")


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Cut ``length`` into ``parts`` sizes that differ by at most one. The larger sizes come first."""
    base, extra = divmod(length, parts)
    return tuple(base + (index < extra) for index in range(parts))


def ranges_of(sizes: Iterable[int]) -> tuple[Chunk, ...]:
    """Consecutive half-open ranges of these sizes."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


def join_ranges(ranges: Iterable[Chunk]) -> list[Chunk]:
    """Join each range that begins where the previous range ends. The positions and their order do not change."""
    joined: list[Chunk] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def rows_in(tensor: torch.Tensor, dim: int, ranges: Sequence[Chunk]) -> torch.Tensor:
    """The rows of ``tensor`` along ``dim`` that are in ``ranges``: a view for one range, otherwise one copy."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return tensor.narrow(dim, start, stop - start)
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


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
