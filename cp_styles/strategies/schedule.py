"""The schedule of one rank: its steps, in which it sends and receives keys and values, and computes. Without tensors.

A schedule depends on the plan, the shapes of a call, and the rounds and ``keep`` of the strategy. It is made once, and
each call runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles.kernels.packing import part_of
from cp_styles.layouts import SequenceLayout
from cp_styles.layouts.ranges import rows_in
from cp_styles.masks import Mask
from cp_styles.plan import make_plan
from cp_styles.plan.plan import RowRanges
from cp_styles.plan.tiles import Cover, Tile
from cp_styles.strategies.packs import Call, Shape, make_calls

Span: TypeAlias = tuple[int, int]
"""A half-open range, of heads or of rows."""

# The least number of blocks in a group of heads of a backward. Flash attention divides its work into blocks of 128 keys
# of one query head. Four blocks for each of the 132 multiprocessors of an H100. Two would take 8 to 21 % less memory at
# 4K and 8K rows, and about twice the calls, sums and messages: with 32:32 heads and 4K rows, 24 to 28 ms on an H200 in
# place of 13. The number is a constant, because all ranks must cut their messages at the same heads.
_LEAST_BLOCKS, _KEYS_OF_BLOCK = 4 * 132, 128

# The largest number of elements of messages that come in pairs, in a forward on a GPU. The keys of a pair are one tile:
# half the merges, for three messages more. Longer tiles take so much longer than their merges that memory counts.
_PAIRED = 2**25

# The largest number of elements of a block whose k and v are one message: a copy takes less time than a message. Not
# tuned on a GPU. Sender and receiver decide by the size of the block alone.
_MOST_JOINED = 2**19

Rounds: TypeAlias = tuple[tuple[int, ...], ...]
"""Distances in groups that arrive together. The source of rank r at a distance is the rank r - distance."""


class Place(NamedTuple):
    """The place [B, g, rows, D] of keys or values in a message, as arguments of ``as_strided``."""

    size: Shape
    strides: Shape
    offset: int


@dataclass(frozen=True, eq=False)
class Block:
    """Some key heads and rows of one rank's keys and values, which travel together.

    A small block is one message, [B, rows, g, D + E]: each row has k, then v. A larger one is two messages, k [B, rows,
    g, D] and v [B, rows, g, E]. These are no copies if k and v lie so in memory, and arrive in one buffer.

    Attributes:
        heads: the key heads.
        rows: the rows, numbered on the rank that holds them.
        shape: [B, rows, g, D + E].
        dims: D of k and E of v.
        joined: whether the block is one message.
    """

    heads: Span
    rows: RowRanges
    shape: Shape
    dims: tuple[int, int]
    joined: bool

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each message."""
        size = prod(self.shape)
        k_size = size // max(sum(self.dims), 1) * self.dims[0]
        return (size,) if self.joined else (k_size, size - k_size)

    @cached_property
    def size(self) -> int:
        """The number of elements of the buffer."""
        return sum(self.sizes)

    def places(self, heads: Span, rows: Span) -> tuple[Place, Place]:
        """The places of k and of v in the buffer, for some of the block's heads and rows, numbered from its first."""
        batch, count, groups, width = self.shape
        places, size = [], (batch, heads[1] - heads[0], rows[1] - rows[0])
        for dim, first in zip(self.dims, (0, self.dims[0] if self.joined else self.sizes[0]), strict=True):
            step = width if self.joined else dim
            offset = first + (rows[0] * groups + heads[0]) * step
            places.append(Place((*size, dim), (count * groups * step, step, groups * step, 1), offset))
        return places[0], places[1]

    def pack(self, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, index: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The messages, from keys and values of the rank that holds the block. ``index``: the rows, or None."""
        k, v = self.copy_or_view(k_BGMD, v_BGME, index)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return (torch.cat((k, v), 3).flatten(),) if self.joined else (k.contiguous(), v.contiguous())

    def copy_or_view(
        self, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, index: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the block, on the rank that holds it: views if the rows are one range, otherwise one copy."""
        if len(self.rows) == 1 or index is not None:
            rows = self.rows[0]
            return part_of(k_BGMD, self.heads, rows, index), part_of(v_BGME, self.heads, rows, index)
        k, v = (x[:, self.heads[0] : self.heads[1]].transpose(1, 2) for x in (k_BGMD, v_BGME))
        return rows_in(k, 1, self.rows).transpose(1, 2), rows_in(v, 1, self.rows).transpose(1, 2)


class Arrival(NamedTuple):
    """Keys in one tensor: this rank's own keys, a block of another rank, or in a forward blocks of several sources.

    Attributes:
        sources: the source of each message, in the order of memory.
        sizes: the number of elements of each message.
        block: the heads and rows, source by source.
        kept: the index of the block among the kept blocks. None if it is not kept.
    """

    sources: tuple[int, ...]
    sizes: tuple[int, ...]
    block: Block
    kept: int | None


class Keys(NamedTuple):
    """A group of key heads of an arrival, with which this rank computes at once. Their gradients travel together.

    Attributes:
        source: the rank that holds the keys; the first one of several.
        arrival: the index of the arrival among the step's arrivals.
        block: the heads and rows of the group. The arrival has all heads.
        q_heads: the query heads that attend to the keys.
        calls: the calls of the kernel, in order.
        is_last: whether no later group has keys of this arrival.
    """

    source: int
    arrival: int
    block: Block
    q_heads: Span
    calls: tuple[Call, ...]
    is_last: bool


class GradientMessages(NamedTuple):
    """One exchange of gradients in a backward.

    Attributes:
        source: the rank that holds ``keys``, and receives their gradients. It may be this rank.
        keys: the keys whose gradients this rank has computed. None if there are none.
        peer: the rank that sends gradients of this rank's keys.
        block: the heads and rows of these gradients. None if the peer sends none.
    """

    source: int
    keys: Keys | None
    peer: int
    block: Block | None


class Step(NamedTuple):
    """One step of a schedule.

    Attributes:
        number: the number of the step, from 0.
        travels: whether the keys are received in this step. Otherwise they are this rank's own, or kept.
        arrivals: the keys with which this rank computes.
        sources: the ranks that hold these keys.
        keys: the arrivals, or groups of their heads, with which this rank computes at once.
        sends: (rank, block) of each message that this rank sends in this step.
        gradients: the exchanges of a backward, in an order that is the same on all ranks. A forward has none.
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
        forward, backward: the steps in order. Every rank takes every step, also a step without work, because the
            messages of two ranks match by order.
        kept: the number of elements of each message that is kept in the residual.
        tiles: the number of tiles of a forward.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[int, ...]
    tiles: int


@remembered(256)  # a batch has a schedule for each row, if the masks of rows differ
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
    gathers: bool = False,
) -> Schedule:
    """The schedule of ``rank``. See :func:`~cp_styles.plan.make_plan` for the first arguments; ``pattern`` belongs to
    the mask.

    Args:
        joins: keys of several sources that arrive together in a forward are one tile, if the same queries attend to all
            keys. For a batch of one row: messages of more rows are not adjacent in memory.
        rounds: the distances from 1 to the number of ranks - 1, each once.
        keep: number of sources whose messages are kept for the backward.
        q_shape: shape of the local query [B, H, L, D].
        k_shape: shape of the local key [B, G, M, D].
        v_shape: shape of the local value [B, G, M, E].
        widening: bytes of a number of a gradient over the bytes of a key.
        gathers: see :func:`~cp_styles.plan.make_plan`. Ranks may differ in it.
    """
    options = {"small_tiles": small_tiles, "windows": windows, "gathers": gathers}
    plan = make_plan(q_layout, kv_layout, pattern, rank, **options)
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
            all_calls[id(tiles)] = make_calls(tiles, (q_shape, k_shape, v_shape), small_tiles=small_tiles)
        return all_calls[id(tiles)]

    def blocks(rows: RowRanges, spans: Sequence[Span]) -> list[Block]:
        """A block for each range of heads. Equal blocks are one object, so that they are packed once."""
        spans = spans if rows else ()
        return [all_blocks.setdefault((heads, rows), _make_block(heads, rows, k_shape, v_shape)) for heads in spans]

    def plan_message(distance: int, partner: int, rows: RowRanges) -> list[tuple[Block, Sequence[Block]]]:
        """The message with ``rows`` between this rank and ``partner``, in either direction, and its groups of heads.

        A backward computes with a group at once. The list is empty if there are no rows.
        """
        # Sender and receiver get the same result: the size of the smaller query shard counts.
        queries = query * min(lengths[rank], lengths[partner])
        # Three messages are alive: the current keys, the next ones, and own keys that are being sent. Not for kept
        # keys, nor in the last round.
        limits_memory = len(rounds) > 1 and distance not in (*kept, distances[-1])
        spans = group_heads(_count_rows(rows), queries, limits_memory=limits_memory)
        return [(block, blocks(rows, spans)) for block in blocks(rows, all_heads)]

    def group_heads(rows: int, queries: int, *, limits_memory: bool) -> list[Span]:
        """Ranges of key heads with which a backward computes at once, with so many ``rows`` of keys."""
        # With limits_memory, gradients of a range take at most half the bytes of ``queries``. Gradients that are wider
        # than keys take at most the bytes of queries, in two ranges at least. On a GPU a range has at least
        # _LEAST_BLOCKS, because each call costs launches and time of the host.
        size = key * rows * widening * (2 if limits_memory else 1)
        count = max(-(-size // max(queries, 1)) if limits_memory or finer else 1, 1 + finer)
        if small_tiles:
            count = min(count, q_shape[0] * q_shape[1] * -(-rows // _KEYS_OF_BLOCK) // _LEAST_BLOCKS)
        count = min(key_heads, count) or 1
        return list(pairwise(key_heads * index // count for index in range(count + 1)))

    received = {d: plan_message(d, source(d), plan.parts[source(d)].rows) for d in distances}
    sent = {d: plan_message(d, peer(d), plan.sends[peer(d)]) for d in distances}
    own = plan.parts[rank].rows
    own_heads = group_heads(lengths[rank], query * lengths[rank], limits_memory=False)
    received[0] = [(block, blocks(own, own_heads)) for block in blocks(own, all_heads)]
    sent[0] = []

    def step(number: int, distances: Sequence[int], travels: bool, *, back: bool) -> Step:
        arrivals, keys, gradients = [], [], []
        for d in distances:
            source_keys = []
            for block, groups in received[d]:
                calls, at = calls_with(source(d)), kept.index(d) if d in kept else None
                arrival = Arrival((source(d),) * len(block.sizes), block.sizes, block, at)
                may_join = joins and not back and arrivals
                if may_join and (joined := _join_arrivals(arrivals[-1], arrival, keys[-1].calls, calls)):
                    sources, sizes, rows, calls = joined
                    block = _make_block(block.heads, rows, k_shape, v_shape, joined=block.joined)
                    arrivals[-1] = Arrival(sources, sizes, block, None)
                    keys[-1] = keys[-1]._replace(block=block, calls=calls)
                    continue
                for group in groups if back else [block]:
                    q_heads = group.heads[0] * share, group.heads[1] * share
                    source_keys.append(
                        Keys(source(d), len(arrivals), group, q_heads, calls, group.heads[1] == key_heads)
                    )
                arrivals.append(arrival)
            keys += source_keys
            pairs = zip_longest(source_keys, (group for _, groups in sent[d] for group in groups)) if back else ()
            gradients += [GradientMessages(source(d), returned, peer(d), block) for returned, block in pairs]
        sends = [(peer(d), block) for d in distances for block, _ in sent[d]]
        sources = dict.fromkeys(source for arrival in arrivals for source in arrival.sources)
        fields = (arrivals, sources, keys, sends, gradients)
        return Step(number, travels, *map(tuple, fields))  # pyright: ignore[reportArgumentType]

    # Steps with kept messages come first: they need no wait, and the remaining messages are sent meanwhile. Own keys
    # come last, while the last gradients are sent. Without kept keys they come first, while the first keys are sent.
    at_hand, missing = ([[d for d in x if (d in kept) == is_kept] for x in rounds] for is_kept in (True, False))
    order = [(x, False) for x in at_hand if x], [(x, True) for x in missing if x]
    own_keys = [((0,), False)]
    # All ranks decide by the mean of their keys.
    pairs_rounds = joins and small_tiles and key * kv_layout.length <= _PAIRED * ranks
    forward = [*own_keys, *((arriving, True) for arriving in (_pair_rounds(rounds, kept) if pairs_rounds else rounds))]
    backward = [*order[0], *order[1], *own_keys] if kept else [*own_keys, *order[1]]
    sizes = tuple(sum(block.size for block, _ in received[distance]) for distance in kept)
    forward, backward = (
        tuple(step(number, *arguments, back=back) for number, arguments in enumerate(way))
        for way, back in ((forward, False), (backward, True))
    )
    calls = [call for d in (0, *distances) for _ in received[d] for call in calls_with(source(d))]
    tiles = sum(1 if isinstance(call, Tile) else len(call.lengths[0]) for call in calls)
    return Schedule(forward, backward, sizes, tiles)


def _pair_rounds(rounds: Rounds, kept: Sequence[int]) -> list[tuple[int, ...]]:
    """The rounds, with rounds of one source in pairs. Kept messages stay single: the residual separates them."""
    unpaired = [arriving for arriving in rounds if len(arriving) > 1 or not set(arriving).isdisjoint(kept)]
    single = [distance for arriving in rounds if arriving not in unpaired for distance in arriving]
    return [*unpaired, *(tuple(single[first : first + 2]) for first in range(0, len(single), 2))]


def _join_arrivals(
    before: Arrival, after: Arrival, calls_before: tuple[Call, ...], calls_after: tuple[Call, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], RowRanges, tuple[Call, ...]] | None:
    """Sources, sizes, rows and calls of two arrivals as one. None unless all queries attend to all keys of both."""
    if (before.kept, after.kept, len(calls_before), len(calls_after)) != (None, None, 1, 1):
        return None
    queries, rows = calls_before[0].q, before.block.rows + after.block.rows
    full_tiles = [Tile(queries, (0, _count_rows(arrival.block.rows)), Cover.FULL) for arrival in (before, after)]
    if [*calls_before, *calls_after] != full_tiles or before.block.joined != after.block.joined:
        return None
    # In memory, k of all sources, then v of all sources; or both together.
    half = len(before.sources) // (1 if after.block.joined else 2)
    sources, sizes = (
        x[:half] + y[:1] + x[half:] + y[1:] for x, y in ((before.sources, after.sources), (before.sizes, after.sizes))
    )
    return sources, sizes, rows, (Tile(queries, (0, _count_rows(rows)), Cover.FULL),)


def _make_block(heads: Span, rows: RowRanges, k_shape: Shape, v_shape: Shape, *, joined: bool | None = None) -> Block:
    dims = k_shape[3], v_shape[3]
    shape = k_shape[0], _count_rows(rows), heads[1] - heads[0], sum(dims)
    return Block(heads, rows, shape, dims, prod(shape) <= _MOST_JOINED if joined is None else joined)


def _count_rows(rows: RowRanges) -> int:
    return sum(stop - start for start, stop in rows)
