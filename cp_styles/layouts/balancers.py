"""Balancers: functions of (length, ranks) that return a SequenceLayout."""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles.layouts.layout import SequenceLayout, Stripes
from cp_styles.layouts.ranges import Chunk, even_sizes, ranges_of
from cp_styles.masks import Mask
from cp_styles.masks.linear_pieces import work_from

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
        ranks: number of ranks, P. It need not divide ``length``. The first ranks hold the remainder, a position each.
            The first chunk of a rank has one more of an odd number: early positions are less work.

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
