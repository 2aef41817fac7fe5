"""The steps of one rank that sends keys and values to the queries of other ranks. Derived; without tensors.

A schedule follows from the plan, the shapes of a call, and the rounds and ``keep`` of the strategy. So it is made once,
and a call only walks over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.layout import SequenceLayout, rows_in
from cp_styles.mask import Mask
from cp_styles.plan import make_plan
from cp_styles.plan.plan import RowRanges
from cp_styles.plan.tiles import Cover, Tile
from cp_styles.strategies.packs import Call, Shape, calls_of

Span: TypeAlias = tuple[int, int]
"""A half-open range, of heads or of rows."""

# A group of heads in a backward has at least so many blocks of 128 keys of one query head, as flash attention divides
# its work: four for each of the 132 multiprocessors of an H100. Two would take 8 to 21 % less memory at 4K and 8K rows,
# and about twice the calls, sums and messages: with 32:32 heads and 4K rows, 24 to 28 ms on an H200 in place of 13. All
# ranks must cut their messages at the same heads, so this is a constant.
_LEAST_BLOCKS, _KEYS_OF_BLOCK = 4 * 132, 128

# On a GPU, messages of up to so many elements come in pairs in a forward. The keys of a pair are one tile: half the
# merges, for three messages more. Longer tiles take so much longer than their merges that memory counts.
_PAIRED = 2**25

Rounds: TypeAlias = tuple[tuple[int, ...], ...]
"""Distances in groups that arrive together. The source of rank r at a distance is the rank r - distance."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some key heads and rows of one rank's keys and values. They travel as one message, [B, rows, g, D + E]: each row
    has k, then v.

    Attributes:
        heads: the key heads.
        rows: the rows, as the rank that holds them counts them.
        shape: of the message.
        dims: D of k and E of v.
    """

    heads: Span
    rows: RowRanges
    shape: Shape
    dims: tuple[int, int]

    @cached_property
    def size(self) -> int:
        """The number of elements of the message."""
        return prod(self.shape)

    def in_message(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [B, g, rows, D] of k and v in a message. Kernels return gradients in their memory order, by rows."""
        k, v = message.view(self.shape).split(self.dims, 3)
        return k.transpose(1, 2), v.transpose(1, 2)

    def packed(self, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """The message, from the keys and values of the rank that holds them. ``index``: the rows. One copy; two without
        an index, if the rows are several ranges."""
        message = k_BGMD.new_empty(self.size)
        for target, tensor in zip(message.view(self.shape).split(self.dims, 3), (k_BGMD, v_BGME), strict=True):
            part = tensor[:, slice(*self.heads)].transpose(1, 2)
            if index is None:
                target.copy_(rows_in(part, 1, self.rows))  # cat(out=) writes nothing to a view of one row and head
            else:
                torch.index_select(part, 1, index, out=target)
        return message

    def unpacked(
        self, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, index: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the rank that holds them: views if the rows are one range, otherwise one copy."""
        k, v = k_BGMD[:, slice(*self.heads)], v_BGME[:, slice(*self.heads)]
        if index is None:
            return rows_in(k, 2, self.rows), rows_in(v, 2, self.rows)
        return k.index_select(2, index), v.index_select(2, index)


class Arrival(NamedTuple):
    """Keys that are in one tensor: this rank's own, a message, or in a forward the messages of several sources.

    Attributes:
        messages: (source, number of elements) of each message, in the order of memory.
        block: the heads and rows, of each source in this order.
        kept: if the message is kept in the residual, which of the kept messages it is.
    """

    messages: tuple[tuple[int, int], ...]
    block: Block
    kept: int | None


class Keys(NamedTuple):
    """Some key heads of an arrival, with which this rank computes at once. Their gradients travel together.

    Attributes:
        source: the rank that holds them; the first of several.
        arrival: which of the step's arrivals has them.
        block: their heads and rows. The arrival has all heads.
        q_heads: the query heads that attend to them.
        calls: of the kernel, in this order.
    """

    source: int
    arrival: int
    block: Block
    q_heads: Span
    calls: tuple[Call, ...]


class GradientMessages(NamedTuple):
    """In a backward: where the gradients of keys go, and which gradients come in exchange.

    Attributes:
        source: the rank that holds the keys, and gets their gradients. It may be this rank.
        keys: the keys. None: this rank has computed with none.
        peer: the rank from which gradients of this rank's keys come.
        block: these keys. None: no gradients come.
    """

    source: int
    keys: Keys | None
    peer: int
    block: Block | None


class Step(NamedTuple):
    """Work that is computed together.

    Attributes:
        number: its number, from 0.
        travels: whether its keys must be sent. Otherwise they are there already.
        arrivals: the keys with which this rank computes.
        sources: the ranks that hold them.
        keys: the keys with which it computes at once: each of ``arrivals``, or groups of its heads.
        sends: (rank, block): what this rank sends in the same step.
        gradients: the messages of a backward, in an order that is the same on all ranks. A forward has none.
    """

    number: int
    travels: bool
    arrivals: tuple[Arrival, ...]
    sources: tuple[int, ...]
    keys: tuple[Keys, ...]
    sends: tuple[tuple[int, Block], ...]
    gradients: tuple[GradientMessages, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The schedule of one rank.

    Attributes:
        forward, backward: the steps in order. Every rank takes every step, also one in which it has nothing to do: the
            messages of two ranks match by order.
        kept: numbers of elements of the messages that are kept in the residual.
        tiles: number of tiles of a forward.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[int, ...]
    tiles: int


@remembered(256)  # one for each row of a batch, if their masks differ
def make_schedule(
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    pattern: Mask,
    rank: int,
    small_tiles: bool,
    windows: bool,
    joins: bool,
    rounds: Rounds,
    keep: int,
    q_shape: Shape,
    k_shape: Shape,
    v_shape: Shape,
    widening: int,
) -> Schedule:
    """The schedule of ``rank``. See :func:`~cp_styles.plan.make_plan` for the first arguments; ``pattern`` belongs to
    the mask.

    Args:
        joins: keys of several sources that arrive together in a forward are one tile, if the same queries attend to all
            of them. For a batch of one row: messages of more rows are not adjacent in memory.
        rounds: every distance from 1 to the number of ranks - 1 once.
        keep: number of sources whose messages are kept for the backward.
        q_shape: shape of the local query [B, H, L, D].
        k_shape: shape of the local key [B, G, M, D].
        v_shape: shape of the local value [B, G, M, E].
        widening: bytes of a number of a gradient over the bytes of a key.
    """
    plan = make_plan(q_layout, kv_layout, pattern, rank, small_tiles=small_tiles, windows=windows)
    ranks, lengths, key_heads = q_layout.ranks, q_layout.lengths, k_shape[1]
    share = q_shape[1] // max(key_heads, 1)
    distances = [distance for arriving in rounds for distance in arriving]
    kept = distances[:keep]
    # Elements of a row of queries, and of a row of k and v.
    query, key = q_shape[1] * q_shape[3], key_heads * (k_shape[3] + v_shape[3])
    all_heads = [(0, key_heads)]
    finer = widening > 1 and bool(distances)
    all_blocks: dict[tuple[Span, RowRanges], Block] = {}
    all_calls: dict[int, tuple[Call, ...]] = {}  # sources may share their tiles

    def source(distance: int) -> int:
        return (rank - distance) % ranks

    def peer(distance: int) -> int:
        return (rank + distance) % ranks

    def calls_with(keys: int) -> tuple[Call, ...]:
        tiles = plan.parts[keys].tiles if prod(q_shape) else ()
        if id(tiles) not in all_calls:
            all_calls[id(tiles)] = calls_of(tiles, (q_shape, k_shape, v_shape), small_tiles=small_tiles)
        return all_calls[id(tiles)]

    def blocks(rows: RowRanges, spans: Sequence[Span]) -> list[Block]:
        """One for each range of heads; the same object for the same rows, so that they are packed once."""
        return [all_blocks.setdefault((heads, rows), _block(heads, rows, k_shape, v_shape)) for heads in spans if rows]

    def parted(distance: int, other: int, rows: RowRanges) -> list[tuple[Block, Sequence[Block]]]:
        """The message with ``rows`` between this rank and the ``other`` one, in either direction, if there is one; and
        what a backward computes at once: all of it, or groups of its heads."""
        # Sender and receiver get the same result: the size of the smaller query shard counts.
        queries = query * min(lengths[rank], lengths[other])
        # Beside keys at hand there are others that come, and own ones that leave. Not with kept keys and the last ones.
        crowded = len(rounds) > 1 and distance not in (*kept, distances[-1])
        return [
            (block, blocks(rows, parts(_count(rows), queries, crowded=crowded))) for block in blocks(rows, all_heads)
        ]

    def parts(rows: int, queries: int, *, crowded: bool) -> list[Span]:
        """Ranges of key heads with which a backward computes at once, with so many ``rows`` of keys.

        The gradients of a range take at most half the bytes of ``queries`` if memory is ``crowded``. Gradients that are
        wider than keys take at most the bytes of queries, and there are two ranges at least. On a GPU no range has less
        than _LEAST_BLOCKS: each call costs launches and time of the host.
        """
        count = -(-key * rows * widening * (2 if crowded else 1) // max(queries, 1)) if crowded or finer else 1
        count = max(count, 1 + finer)
        if small_tiles:
            count = min(count, q_shape[0] * q_shape[1] * -(-rows // _KEYS_OF_BLOCK) // _LEAST_BLOCKS)
        return _cut(key_heads, count)

    received = {d: parted(d, source(d), plan.parts[source(d)].rows) for d in distances}
    sent = {d: parted(d, peer(d), plan.sends[peer(d)]) for d in distances}
    own = plan.parts[rank].rows
    of_own = parts(lengths[rank], query * lengths[rank], crowded=False)
    received[0] = [(block, blocks(own, of_own)) for block in blocks(own, all_heads)]
    sent[0] = []

    def step(number: int, distances: Sequence[int], travels: bool, *, back: bool) -> Step:
        arrivals, keys, gradients = [], [], []
        for d in distances:
            source_keys = []
            for block, parts in received[d]:
                calls, at = calls_with(source(d)), kept.index(d) if d in kept else None
                arrival = Arrival(((source(d), block.size),), block, at)
                if joins and not back and arrivals and (both := _joined(arrivals[-1], arrival, keys[-1].calls, calls)):
                    messages, rows, calls = both
                    block = _block(block.heads, rows, k_shape, v_shape)
                    arrivals[-1], keys[-1] = Arrival(messages, block, None), keys[-1]._replace(block=block, calls=calls)
                    continue
                for part in parts if back else [block]:
                    q_heads = part.heads[0] * share, part.heads[1] * share
                    source_keys.append(Keys(source(d), len(arrivals), part, q_heads, calls))
                arrivals.append(arrival)
            keys += source_keys
            pairs = zip_longest(source_keys, (part for _, parts in sent[d] for part in parts)) if back else ()
            gradients += [GradientMessages(source(d), returned, peer(d), block) for returned, block in pairs]
        sends = [(peer(d), block) for d in distances for block, _ in sent[d]]
        sources = [source for arrival in arrivals for source, _ in arrival.messages]
        fields = (arrivals, sources, keys, sends, gradients)
        return Step(number, travels, *map(tuple, fields))  # pyright: ignore[reportArgumentType]

    # Steps with kept messages come first: they need not wait, and the remaining messages are sent meanwhile. Own keys
    # come last, while the last gradients are sent; first, if nothing else is there while the first keys are sent.
    here, away = ([[d for d in arriving if (d in kept) == still] for arriving in rounds] for still in (True, False))
    order = [(arriving, False) for arriving in here if arriving], [(arriving, True) for arriving in away if arriving]
    own_keys = [((0,), False)]
    # All ranks decide by the mean of their keys.
    paired = joins and small_tiles and key * kv_layout.length <= _PAIRED * ranks
    forward = [*own_keys, *((arriving, True) for arriving in (_in_pairs(rounds, kept) if paired else rounds))]
    backward = [*order[0], *order[1], *own_keys] if kept else [*own_keys, *order[1]]
    sizes = tuple(sum(block.size for block, _ in received[distance]) for distance in kept)
    forward, backward = (
        tuple(step(number, *arguments, back=back) for number, arguments in enumerate(way))
        for way, back in ((forward, False), (backward, True))
    )
    calls = [call for d in (0, *distances) for _ in received[d] for call in calls_with(source(d))]
    tiles = sum(1 if isinstance(call, Tile) else len(call.lengths[0]) for call in calls)
    return Schedule(forward, backward, sizes, tiles)


def _in_pairs(rounds: Rounds, kept: Sequence[int]) -> list[tuple[int, ...]]:
    """The rounds of one source, two and two, but for those whose messages are kept: these are elsewhere in memory."""
    alone = [arriving for arriving in rounds if len(arriving) > 1 or not set(arriving).isdisjoint(kept)]
    single = [distance for arriving in rounds if arriving not in alone for distance in arriving]
    return [*alone, *(tuple(single[first : first + 2]) for first in range(0, len(single), 2))]


def _joined(
    before: Arrival, after: Arrival, calls_before: tuple[Call, ...], calls_after: tuple[Call, ...]
) -> tuple[tuple[tuple[int, int], ...], RowRanges, tuple[Call, ...]] | None:
    """Messages, rows and calls of two arrivals, if one tile attends to all keys of both: else None."""
    if (before.kept, after.kept, len(calls_before), len(calls_after)) != (None, None, 1, 1):
        return None
    queries, rows = calls_before[0].q, before.block.rows + after.block.rows
    whole = [Tile(queries, (0, _count(arrival.block.rows)), Cover.FULL) for arrival in (before, after)]
    if [*calls_before, *calls_after] != whole:
        return None
    return before.messages + after.messages, rows, (Tile(queries, (0, _count(rows)), Cover.FULL),)


def _cut(heads: int, parts: int) -> list[Span]:
    """Heads in ``parts`` ranges, or in as many as there are heads."""
    parts = min(heads, parts) or 1
    return list(pairwise(heads * index // parts for index in range(parts + 1)))


def _block(heads: Span, rows: RowRanges, k_shape: Shape, v_shape: Shape) -> Block:
    dims = k_shape[3], v_shape[3]
    return Block(heads, rows, (k_shape[0], _count(rows), heads[1] - heads[0], sum(dims)), dims)


def _count(rows: RowRanges) -> int:
    return sum(stop - start for start, stop in rows)
