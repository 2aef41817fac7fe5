"""The schedule of one rank: its steps, in which it sends and receives keys and values, and computes. Without tensors.

A schedule depends on the plan, the shapes of a call, and the rounds and ``keep`` of the strategy. It is made once, and
each call runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap, zip_longest
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.layout import SequenceLayout, rows_in
from cp_styles.mask import Mask
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

Rounds: TypeAlias = tuple[tuple[int, ...], ...]
"""Distances in groups that arrive together. The source of rank r at a distance is the rank r - distance."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some key heads and rows of one rank's keys and values. A block is one message, [B, rows, g, D + E]: each row has
    k, then v.

    Attributes:
        heads: the key heads.
        rows: the rows, numbered on the rank that holds them.
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

    @cached_property
    def place(self) -> tuple[slice, ...]:
        """The index in k and v [B, G, M, D] of the heads, and of the rows if these are one range."""
        return slice(None), *starmap(slice, (self.heads, *self.rows) if len(self.rows) == 1 else (self.heads,))

    def views_of(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [B, g, rows, D] of k and v in a message."""
        k, v = message.view(self.shape).split(self.dims, 3)
        return k.transpose(1, 2), v.transpose(1, 2)

    def pack(self, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """Copy keys and values of the rank that holds the block into a message. ``index``: the rows.

        One copy; two copies for several ranges of rows without an index.
        """
        message = k_BGMD.new_empty(self.size)
        for target, tensor in zip(message.view(self.shape).split(self.dims, 3), (k_BGMD, v_BGME), strict=True):
            part = tensor[self.place if index is None else self.place[:2]].transpose(1, 2)
            if index is not None:
                torch.index_select(part, 1, index, out=target)
            else:  # not cat(out=), which does not write to a view of one row
                target.copy_(part if len(self.rows) == 1 else rows_in(part, 1, self.rows))
        return message

    def copy_or_view(
        self, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, index: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the block, on the rank that holds it: views if the rows are one range, otherwise one copy."""
        if index is not None:
            k, v = k_BGMD[self.place[:2]], v_BGME[self.place[:2]]
            return k.index_select(2, index), v.index_select(2, index)
        k, v = k_BGMD[self.place], v_BGME[self.place]
        return (k, v) if len(self.rows) == 1 else (rows_in(k, 2, self.rows), rows_in(v, 2, self.rows))


class Arrival(NamedTuple):
    """Keys in one tensor: this rank's own keys, a message, or in a forward the messages of several sources.

    Attributes:
        messages: (source, number of elements) of each message, in the order of memory.
        block: the heads and rows, source by source in this order.
        kept: the index of the message among the kept messages. None if it is not kept.
    """

    messages: tuple[tuple[int, int], ...]
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
    """

    source: int
    arrival: int
    block: Block
    q_heads: Span
    calls: tuple[Call, ...]


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
        return _split_heads(key_heads, count)

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
                arrival = Arrival(((source(d), block.size),), block, at)
                may_join = joins and not back and arrivals
                if may_join and (joined := _join_arrivals(arrivals[-1], arrival, keys[-1].calls, calls)):
                    messages, rows, calls = joined
                    block = _make_block(block.heads, rows, k_shape, v_shape)
                    arrivals[-1], keys[-1] = Arrival(messages, block, None), keys[-1]._replace(block=block, calls=calls)
                    continue
                for group in groups if back else [block]:
                    q_heads = group.heads[0] * share, group.heads[1] * share
                    source_keys.append(Keys(source(d), len(arrivals), group, q_heads, calls))
                arrivals.append(arrival)
            keys += source_keys
            pairs = zip_longest(source_keys, (group for _, groups in sent[d] for group in groups)) if back else ()
            gradients += [GradientMessages(source(d), returned, peer(d), block) for returned, block in pairs]
        sends = [(peer(d), block) for d in distances for block, _ in sent[d]]
        sources = [source for arrival in arrivals for source, _ in arrival.messages]
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
) -> tuple[tuple[tuple[int, int], ...], RowRanges, tuple[Call, ...]] | None:
    """Messages, rows and calls of two arrivals as one. None unless all queries attend to all keys of both."""
    if (before.kept, after.kept, len(calls_before), len(calls_after)) != (None, None, 1, 1):
        return None
    queries, rows = calls_before[0].q, before.block.rows + after.block.rows
    full_tiles = [Tile(queries, (0, _count_rows(arrival.block.rows)), Cover.FULL) for arrival in (before, after)]
    if [*calls_before, *calls_after] != full_tiles:
        return None
    return before.messages + after.messages, rows, (Tile(queries, (0, _count_rows(rows)), Cover.FULL),)


def _split_heads(heads: int, parts: int) -> list[Span]:
    """Split heads into ``parts`` ranges, at most one for each head."""
    parts = min(heads, parts) or 1
    return list(pairwise(heads * index // parts for index in range(parts + 1)))


def _make_block(heads: Span, rows: RowRanges, k_shape: Shape, v_shape: Shape) -> Block:
    dims = k_shape[3], v_shape[3]
    return Block(heads, rows, (k_shape[0], _count_rows(rows), heads[1] - heads[0], sum(dims)), dims)


def _count_rows(rows: RowRanges) -> int:
    return sum(stop - start for start, stop in rows)
