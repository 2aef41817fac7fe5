"""Strategies that send keys and values to the queries: the common part of ring and all-gather attention.

Both run the same plan. They differ only in their *rounds*: which sources' keys arrive together. Every transfer goes
directly from owner to user. In the forward a rank receives exactly the rows that its queries attend to. In the backward
it sends their gradients directly to the owner. So the bytes are those of the plan, the minimum for the layout.

[Note: moving tensors]
message    1-D: rows of k as [B, g, rows, D], then rows of v as [B, g, rows, E], each contiguous. Packing it is the only
           copy
residual   lse [B, H, L] in the accumulation dtype, then the messages of the sources that are kept
gradients  one message of dk and one of dv, [B, rows, g, D] in the accumulation dtype, from user to owner

[Note: memory] While one message is used, the next one and the gradients of the previous one are being sent. So at most
two messages of keys and two of gradients are alive at any time, forward and backward, for any number of ranks. If there
are several rounds, and the keys and values of a source are larger than a query shard (as without grouped heads), the
key heads are sent in groups, one after the other. So a message is never larger than a query shard. What is no larger
than that divided by the number of groups, as a document's or a window's few rows, is sent with all heads in the first
group. Both ranks know the number of rows, and so how they are sent.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from cp_styles.comm.point_to_point import Pending, Transfers, exchange, open_group
from cp_styles.kernels import Kernel, TileCall, Where
from cp_styles.kernels.levels import BesideDrowned, RowLevels, of_heads
from cp_styles.kernels.merge import EMPTY_LSE, OnlineSoftmax, RowSum, accumulation_dtype, sink_gradient
from cp_styles.plan import Cover, Part, Plan, Rows, Tile, make_plan
from cp_styles.profiler_ranges import named_range
from cp_styles.strategies.base import Attention, Spec, Strategy, residual_views

Span: TypeAlias = tuple[int, int]
"""A half-open range, of heads or of rows."""

Messages: TypeAlias = Sequence[tuple[int, torch.Tensor]]
"""Pairs of a rank and the tensor that is sent to it or received from it."""


class Arrived(NamedTuple):
    """A part of the plan, and some heads of the rows of k and v that it needs, or their gradients."""

    part: Part
    heads: Span
    k: torch.Tensor
    v: torch.Tensor


class Step(NamedTuple):
    """What is computed together.

    Attributes:
        keys: (distance, heads): the rank r computes with these key heads of the rank r - distance. 0 is itself.
        sends: (distance, heads): the rank r + distance computes with these key heads of this rank, in the same step.
        travels: whether these keys must be sent. Otherwise they are there already.
    """

    keys: tuple[tuple[int, Span], ...]
    sends: tuple[tuple[int, Span], ...]
    travels: bool

    @property
    def distances(self) -> list[int]:
        """Those of ``keys`` and of ``sends``, each once."""
        return list(dict.fromkeys(distance for distance, _ in (*self.keys, *self.sends)))


class MovingKV(Strategy):
    """Base of strategies that send keys and values. Subclasses define :meth:`rounds` and ``keep``."""

    keep: int

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 0:
            raise ValueError(
                f"{type(self).__name__} keep must be a number of sources, 0 or more, got {self.keep!r}: 0 keeps no "
                "received keys for the backward, a number as large as the number of ranks keeps all"
            )

    @abstractmethod
    def rounds(self, ranks: int) -> Sequence[Sequence[int]]:
        """Every distance from 1 to ``ranks - 1`` once, in groups that arrive together. The sources of rank r are the
        ranks r - distance."""

    def keeping_nothing(self):
        return replace(self, keep=0)  # pyright: ignore[reportArgumentType] - subclasses are dataclasses

    def prepare(self, q_layout, kv_layout, mask, rank, *, small_tiles):
        make_plan(q_layout, kv_layout, mask, rank, small_tiles=small_tiles)

    def residual_specs(self, attention, q_BHLD, k_BGMD, v_BGME):
        return attention.once(
            (self, q_BHLD.shape, k_BGMD.shape, v_BGME.shape, q_BHLD.dtype),
            lambda: self._specs(_PlanRun(self, attention, q_BHLD, k_BGMD, v_BGME)),
        )

    def _specs(self, walk: _PlanRun) -> list[Spec]:
        counts = [walk.part(distance).count for distance in walk.kept]
        lse: Spec = (tuple(walk.q.shape[:3]), walk.wide)
        return [lse, *(((walk.size(count, walk.k.shape[1]),), walk.k.dtype) for count in counts)]

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        walk = _PlanRun(self, attention, q_BHLD, k_BGMD, v_BGME)
        lse_BHL = walk.kept_in(residual)[0]
        lse_BHL = lse_BHL.masked_fill(lse_BHL <= EMPTY_LSE / 2, float("-inf"))
        return lse_BHL if walk.level is None else (lse_BHL + walk.level).to(lse_BHL.dtype)

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        with _PlanRun(self, attention, q_BHLD, k_BGMD, v_BGME) as walk:
            lse_BHL, *kept = walk.kept_in(residual)

            q = q_BHLD.to(walk.dtype)
            if walk.levels is not None:
                q = walk.levels.quiet(q)
            merged = OnlineSoftmax((*q.shape[:3], v_BGME.shape[3]), walk.dtype, q.device, q_BHLD)
            for _, arrived in walk.arrivals(walk.forward_steps, kept):
                walk.forward(arrived, q, merged)
                del arrived  # free its memory for the next step
            if sink_H is not None:
                merged.add_sink(sink_H, walk.level)
            out, lse = merged.result()
            if residual is not None:
                lse_BHL.copy_(lse)
            return out.to(q_BHLD.dtype)

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        with _PlanRun(self, attention, q_BHLD, k_BGMD, v_BGME) as walk:
            lse_BHL, *kept = walk.kept_in(residual)

            q, grad, out = (x.to(walk.dtype) for x in (q_BHLD, grad_BHLE, out_BHLE))
            kernel = attention.kernel
            if walk.levels is not None and walk.levels.drowned is not None:
                kernel, q = BesideDrowned(kernel), walk.levels.split(q)
            dq = RowSum(q.shape, walk.wide, q.device)
            home = _GradientReturn(walk)
            for step, arrived in walk.arrivals(walk.backward_steps, kept):
                returning = dict(step.sends)
                # One source after the other, so that the gradients of at most one source wait to be sent.
                for distance in step.distances:
                    found = []
                    if arrived and arrived[0].part.source == walk.source(distance):
                        found = [walk.backward(kernel, arrived.pop(0), (grad, q), (out, lse_BHL), dq)]
                    home.bring(distance, found, returning.get(distance))
            dk, dv = home.result()
            dsink = None if sink_H is None else sink_gradient(sink_H, grad, out, lse_BHL, walk.level)
            return dq.result()[..., : q_BHLD.shape[3]].to(q_BHLD.dtype), dk.to(k_BGMD.dtype), dv.to(v_BGME.dtype), dsink


class _PlanRun:
    """One rank's run of its plan: sends messages in order, and yields keys and values of each part as they arrive."""

    def __init__(self, strategy: MovingKV, attention: Attention, q, k, v) -> None:
        self.attention = attention
        self.q, self.k, self.v = q, k, v
        way = attention.once(
            (strategy, q.shape[1], k.shape[1], k.shape[3], v.shape[3]), lambda: _way(strategy, attention, q, k, v)
        )
        self.rank, self.ranks, self.plan, self.kept, self.forward_steps, self.backward_steps, tiles = way
        self.wide = accumulation_dtype(q.dtype)
        levels = self.levels
        # Results of tiles are summed if there are several, or if drowned rows are computed separately.
        sums = tiles > 1 or (levels is not None and levels.drowned is not None)
        self.dtype = attention.kernel.tile_dtype(q.dtype) if sums else q.dtype
        self._strategy = strategy
        self._step = 0
        self._messages: dict[tuple[Span, Rows], torch.Tensor] = {}
        self._transfers = Transfers()

    def __enter__(self) -> _PlanRun:
        open_group(self.attention.group, self.q.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._transfers.__exit__(kind)

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        """:func:`~cp_styles.comm.point_to_point.exchange`. Leaving the context waits for it, after an error too."""
        return self._transfers.note(exchange(sends, receives, self.attention.group))

    @property
    def levels(self) -> RowLevels | None:
        """The levels that are subtracted from the biases of an additive mask; None if there are none."""
        attention, device = self.attention, self.q.device
        if not attention.mask.additive or not self.q.numel() or not attention.kv_layout.length:
            return None
        if device.type == "meta":  # only shapes are computed
            return None
        # With a score_mod the logit of a query of zeros is not known.
        drowns = not attention.kernel.positional

        def make() -> RowLevels | None:
            q_positions, keys = attention.q_layout.positions(self.rank, device), attention.kv_layout.length
            return RowLevels.of(attention.mask, q_positions, keys, attention.heads, self.wide, drowns=drowns)

        return attention.once((RowLevels, self.wide, device, drowns), make)

    @property
    def level(self) -> torch.Tensor | None:
        """The level of each row, broadcastable to [B, H, L]; None for 0."""
        return None if self.levels is None else self.levels.level

    def kept_in(self, residual: torch.Tensor | None) -> list[torch.Tensor]:
        """Views of ``residual``: the logsumexp, and the kept messages. Without a residual: an empty logsumexp."""
        if residual is None:
            return [self.q.new_empty(0)]
        specs = self._strategy.residual_specs(self.attention, self.q, self.k, self.v)
        return residual_views(specs, residual)

    def source(self, distance: int) -> int:
        """The rank whose keys this rank gets over ``distance``."""
        return (self.rank - distance) % self.ranks

    def part(self, distance: int) -> Part:
        """The part of the plan for the keys of the source at ``distance``."""
        return self.plan.parts[self.source(distance)]

    def size(self, rows: int, heads: int) -> int:
        """Number of elements of a message of ``rows`` rows and ``heads`` key heads."""
        return self.k.shape[0] * heads * rows * (self.k.shape[3] + self.v.shape[3])

    def of_queries(self, heads: Span) -> Span:
        """The query heads that attend to these key heads."""
        share = self.q.shape[1] // max(self.k.shape[1], 1)
        return heads[0] * share, heads[1] * share

    def arrivals(self, steps: Sequence[Step], kept: Sequence[torch.Tensor]) -> Iterator[tuple[Step, list[Arrived]]]:
        """Each step with its parts, as they arrive. The next messages are received while the caller computes.

        ``kept`` are the buffers in the residual, for messages that are kept for the backward.
        """
        places = dict(zip(self.kept, kept, strict=False))
        queue = [(number, step) for number, step in enumerate(steps) if step.travels]
        under_way = self._start(queue, places)
        for self._step, step in enumerate(steps):
            messages: dict[int, torch.Tensor] = {}
            if step.travels:
                messages, pending = under_way
                under_way = self._start(queue, places)
                with self.named("wait for keys of", *(self.source(distance) for distance, _ in step.keys)):
                    pending.wait()
            found = []
            for distance, heads in step.keys:
                part = self.part(distance)
                if distance:
                    message = messages.pop(distance) if step.travels else self._place(places, distance, heads)
                    found.append(self._arrived(part, heads, message))
                    del message
                elif part.rows:
                    found.append(self._own(part, heads))
            yield step, found
            del found

    def named(self, *words: object) -> contextlib.AbstractContextManager[object]:
        """A named range of the present step."""
        return named_range("step", self._step, *words)

    def forward(self, arrived: Sequence[Arrived], q: torch.Tensor, merged: OnlineSoftmax) -> None:
        """Attend to the keys of ``arrived`` and add the results to ``merged``."""
        tiles = _masked_last([(entry, tile) for entry in arrived for tile in entry.part.tiles])
        with self.named("attend to keys of", *(entry.part.source for entry in arrived)):
            results = self.attention.kernel.forward_tiles(self._calls(tiles, (q,)))
            for index, (out, lse) in results:
                entry, tile = tiles[index]
                merged.add(self.of_queries(entry.heads), tile.q, out, lse)

    def backward(
        self,
        kernel: Kernel,
        entry: Arrived,
        before: tuple[torch.Tensor, ...],
        after: tuple[torch.Tensor, ...],
        dq: RowSum,
    ) -> Arrived:
        """The part with ``dk`` and ``dv`` of its rows. Gradients of queries are added to ``dq``.

        ``before`` and ``after`` are the arguments of the kernel before and after k and v.
        """
        part, heads = entry.part, entry.heads
        sums = [RowSum(x.shape, self.wide, x.device) for x in (entry.k, entry.v)]
        tiles = _masked_last([(entry, tile) for tile in part.tiles])
        del entry  # its memory is freed with the tiles
        with self.named("gradients with keys of", part.source):
            results = kernel.backward_tiles(self._calls(tiles, before, after))
            for index, (tile_dq, *gradients) in results:
                tile = tiles[index][1]
                dq.add(self.of_queries(heads), tile.q, tile_dq)
                for total, gradient in zip(sums, gradients, strict=True):
                    total.add((0, heads[1] - heads[0]), tile.kv, gradient)
        return Arrived(part, heads, *(total.result() for total in sums))

    def _calls(
        self,
        tiles: Sequence[tuple[Arrived, Tile]],
        before: tuple[torch.Tensor, ...],
        after: tuple[torch.Tensor, ...] = (),
    ) -> Iterator[TileCall]:
        """The arguments of the kernel for each tile: heads and rows of ``before``, of k and v, and of ``after``.

        They are made one by one, because an explicit mask is as large as its tile. None if there are no elements.
        """
        for (part, heads, k, v), tile in tiles if self.q.numel() else ():
            own = slice(*self.of_queries(heads))
            queries = [[_rows(x[:, own], tile.q) for x in tensors] for tensors in (before, after)]
            tensors = (*queries[0], _rows(k, tile.kv), _rows(v, tile.kv), *queries[1])
            yield TileCall(tensors, self._options(part, tile, heads))

    def _options(self, part: Part, tile: Tile, heads: Span) -> dict:
        """The kernel's keyword arguments for a tile."""
        bias = self._bias(part, tile, heads) if tile.cover is Cover.PARTIAL else None
        options = {"causal": tile.cover is Cover.CAUSAL, "bias": bias, "scale": self.attention.scale}
        if self.attention.kernel.positional:
            first = 0 if self.attention.heads is None else self.attention.heads[0]
            options["where"] = Where(*self._positions(part, tile), first + self.of_queries(heads)[0])
        return options

    def _start(
        self, queue: list[tuple[int, Step]], places: dict[int, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], Pending]:
        """Start the transfers of the next step in ``queue``, if any. Returns the receive buffers by distance."""
        if not queue:
            self._messages = {}
            return {}, Pending((), ())
        number, step = queue.pop(0)
        with named_range("step", number, "start keys of", *(self.source(distance) for distance, _ in step.keys)):
            messages = {distance: self._place(places, distance, heads) for distance, heads in step.keys}
            destinations = [(self.rank + distance) % self.ranks for distance, _ in step.sends]
            wanted = [(heads, self.plan.sends[peer]) for peer, (_, heads) in zip(destinations, step.sends, strict=True)]
            # Equal rows are packed once for all destinations of a step, and for the next step if it sends them too.
            self._messages = {key: self._messages[key] for key in wanted if key in self._messages}
            for key in wanted:
                if key not in self._messages:
                    self._messages[key] = self._packed(*key)
            sends = [(peer, self._messages[key]) for peer, key in zip(destinations, wanted, strict=True)]
            receives = [(self.source(distance), message) for distance, message in messages.items()]
            return messages, self.exchange(sends, receives)

    def _place(self, places: dict[int, torch.Tensor], distance: int, heads: Span) -> torch.Tensor:
        """The buffer of a message: in the residual if it is kept, else new memory."""
        count = self.part(distance).count
        if distance in places:
            return places[distance][self.size(count, heads[0]) : self.size(count, heads[1])]
        return self.k.new_empty(self.size(count, heads[1] - heads[0]))

    def _packed(self, heads: Span, rows: Rows) -> torch.Tensor:
        """The message with these heads and rows of this rank."""
        message = self.k.new_empty(self.size(_count(rows), heads[1] - heads[0]))
        for target, tensor in zip(self._split(message, heads, _count(rows)), (self.k, self.v), strict=True):
            _gather_rows(_heads(tensor, heads), rows, out=target)
        return message

    def _split(self, message: torch.Tensor, heads: Span, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of k and v in a message of ``rows`` rows; see [Note: moving tensors]."""
        shapes = [(x.shape[0], heads[1] - heads[0], rows, x.shape[3]) for x in (self.k, self.v)]
        sizes = [prod(shape) for shape in shapes]
        k, v = (part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True))
        return k, v

    def _own(self, part: Part, heads: Span) -> Arrived:
        packed = self._messages.get((heads, part.rows))
        if packed is not None:  # packed for other ranks; contiguous, which is good for kernels
            return self._arrived(part, heads, packed)
        k, v = (_gather_rows(_heads(x, heads), part.rows).to(self.dtype) for x in (self.k, self.v))
        return Arrived(part, heads, k, v)

    def _arrived(self, part: Part, heads: Span, message: torch.Tensor) -> Arrived:
        return Arrived(part, heads, *self._split(message.to(self.dtype), heads, part.count))

    def _positions(self, part: Part, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Global positions of the queries and of the keys of a tile."""
        attention, device = self.attention, self.q.device
        if device.type == "meta":  # only shapes are computed
            return tuple(self.q.new_empty(stop - start, dtype=torch.int64) for start, stop in (tile.q, tile.kv))
        q_positions = attention.q_layout.positions(self.rank, device, rows=tile.q)
        pieces, row = [], 0  # row: the tile's number of the first row of a range
        for start, stop in part.rows:
            low, high = max(tile.kv[0], row), min(tile.kv[1], row + stop - start)
            if low < high:
                rows = start + low - row, start + high - row
                pieces.append(attention.kv_layout.positions(part.source, device, rows=rows))
            row += stop - start
        return q_positions, pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _bias(self, part: Part, tile: Tile, heads: Span) -> torch.Tensor:
        attention, device = self.attention, self.q.device
        q_positions, kv_positions = self._positions(part, tile)
        outside = ~attention.mask.allowed(q_positions, kv_positions)
        own = self.of_queries(heads)
        first = 0 if attention.heads is None else attention.heads[0]
        bias = of_heads(attention.mask.bias(q_positions, kv_positions), (first + own[0], first + own[1]))
        if bias is None:
            bias = torch.zeros(outside.shape, dtype=self.dtype, device=device)
        if self.levels is not None:
            bias = self.levels.off(bias.to(device), own, tile.q)
        return bias.to(device, self.dtype).masked_fill(outside, float("-inf"))


class _Way(NamedTuple):
    """The part of a run that does not depend on tensor values. It is the same at every layer and step.

    Attributes:
        rank, ranks: this rank and the size of the group.
        plan: the plan of this rank.
        kept: distances of the sources whose messages are kept in the residual.
        forward_steps, backward_steps: the steps in order, which is the same on every rank.
        tiles: the number of tiles.
    """

    rank: int
    ranks: int
    plan: Plan
    kept: list[int]
    forward_steps: list[Step]
    backward_steps: list[Step]
    tiles: int


def _way(strategy: MovingKV, attention: Attention, q, k, v) -> _Way:
    rank, ranks = attention.rank, attention.ranks
    small_tiles = attention.kernel.small_tiles
    plan = make_plan(attention.q_layout, attention.kv_layout, attention.mask, rank, small_tiles=small_tiles)
    rounds = [tuple(distances) for distances in strategy.rounds(ranks)]
    kept = [distance for distances in rounds for distance in distances][: strategy.keep]
    groups = _groups(q, k, v) if len(rounds) > 1 else [(0, k.shape[1])]
    lengths, query, key = attention.q_layout.lengths, *_row_sizes(q, k, v)

    def spans(peer: int, rows: int) -> list[Span]:
        small = rows * key * len(groups) <= query * min(lengths[rank], lengths[peer])
        return [(0, k.shape[1])] if small else groups

    distances = [distance for each in rounds for distance in each]
    keys = {d: spans((rank - d) % ranks, plan.parts[(rank - d) % ranks].count) for d in distances}
    sends = {d: spans((rank + d) % ranks, _count(plan.sends[(rank + d) % ranks])) for d in distances}
    keys[0] = groups if any(len(found) > 1 for found in (*keys.values(), *sends.values())) else [(0, k.shape[1])]

    # Every rank takes every step, also one in which it has nothing to do: the messages of two ranks match by order.
    def step(group: int, distances: Sequence[int], *, travels: bool) -> list[Step]:
        coming, going = (
            tuple((d, found[d][group]) for d in distances if d in found and group < len(found[d]))
            for found in (keys, sends)
        )
        return [Step(coming, going, travels)]

    forward, backward = [], []
    for group in range(len(groups)):
        own = step(group, (0,), travels=False)
        forward += own
        for each in rounds:
            forward += step(group, each, travels=True)
        # Steps with kept messages come first: they need not wait, and the other messages are sent meanwhile.
        for others in (False, True):
            backward += own if others else []
            chosen = [[d for d in each if (d not in kept) == others] for each in rounds]
            for each in filter(None, chosen):
                backward += step(group, each, travels=others)
    tiles = sum(len(plan.parts[(rank - d) % ranks].tiles) for each in forward for d, _ in each.keys)
    return _Way(rank, ranks, plan, kept, forward, backward, tiles)


def _groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Span]:
    """Key heads in as few groups as possible, such that a row of k and v of a group is at most a row of queries."""
    heads, (query, key) = k.shape[1], _row_sizes(q, k, v)
    parts = min(heads, -(-key // max(query, 1))) or 1
    return list(pairwise(heads * index // parts for index in range(parts + 1)))


def _row_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """Elements of a row of queries, and of a row of k and v."""
    return q.shape[1] * q.shape[3], k.shape[1] * (k.shape[3] + v.shape[3])


class _GradientReturn:
    """Sends gradients of keys and values to their owners, and sums the gradients of this rank's own rows.

    A transfer starts when its gradients are computed. The order is the same on all ranks, because NCCL and gloo match
    the messages of two ranks by order. Received gradients are added before the next transfer starts.
    """

    def __init__(self, walk: _PlanRun) -> None:
        self._walk = walk
        self._sums = [RowSum(x.shape, walk.wide, x.device) for x in (walk.k, walk.v)]
        self._under_way: tuple[Span | None, Rows, list[torch.Tensor], Pending, int] | None = None

    def bring(self, distance: int, found: list[Arrived], returning: Span | None) -> None:
        """Take the gradients of the keys that came over ``distance``: add them if they are this rank's, else send them.

        ``found`` has them, and is emptied; it may be empty. ``returning`` are the key heads of which this rank gets
        gradients from the rank at the same distance in the other direction; None for none.
        """
        walk = self._walk
        if distance == 0:
            for part, heads, dk, dv in found:
                self._add(heads, part.rows, (dk, dv))
            found.clear()
            return
        self._settle()
        source, peer = walk.source(distance), (walk.rank + distance) % walk.ranks
        with walk.named("start gradients to", source):
            # In the memory order of kernel outputs, [B, rows, G, D], so that no packing is needed.
            sends = [(source, x.transpose(1, 2).contiguous()) for part, heads, *xs in found for x in xs]
            found.clear()
            rows, receives = walk.plan.sends[peer], []
            if returning is not None:
                shape = (walk.k.shape[0], _count(rows), returning[1] - returning[0])
                receives = [walk.k.new_empty(*shape, x.shape[3], dtype=walk.wide) for x in (walk.k, walk.v)]
            pending = walk.exchange(sends, [(peer, x) for x in receives])
        self._under_way = returning, rows, receives, pending, peer

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dk, dv)`` of this rank's rows, summed over all ranks."""
        self._settle()
        dk, dv = (total.result() for total in self._sums)
        return dk, dv

    def _settle(self) -> None:
        if self._under_way is None:
            return
        heads, rows, gradients, pending, peer = self._under_way
        self._under_way = None
        with self._walk.named("wait for gradients of", peer):
            pending.wait()
        if heads is not None:
            self._add(heads, rows, [x.transpose(1, 2) for x in gradients])

    def _add(self, heads: Span, rows: Rows, grads: Sequence[torch.Tensor]) -> None:
        offset = 0
        for start, stop in rows:
            for total, grad in zip(self._sums, grads, strict=True):
                total.add(heads, (start, stop), grad[:, :, offset : offset + stop - start])
            offset += stop - start


def _masked_last(tiles: list[tuple[Arrived, Tile]]) -> list[tuple[Arrived, Tile]]:
    """Tiles with an explicit mask last: a kernel may compute the others in one call, and another kernel these."""
    return sorted(tiles, key=lambda entry: entry[1].cover is Cover.PARTIAL)


def _heads(tensor: torch.Tensor, heads: Span) -> torch.Tensor:
    return tensor[:, heads[0] : heads[1]]


def _rows(tensor: torch.Tensor, rows: Span) -> torch.Tensor:
    return tensor[:, :, rows[0] : rows[1]]


def _count(rows: Rows) -> int:
    return sum(stop - start for start, stop in rows)


def _gather_rows(tensor: torch.Tensor, rows: Rows, out: torch.Tensor | None = None) -> torch.Tensor:
    """The given rows of [B, H, rows, D]. A view if they are one range; otherwise, or with ``out``, one copy."""
    pieces = [_rows(tensor, (start, stop)) for start, stop in rows]
    if out is None:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
    offset = 0
    for piece in pieces:
        _rows(out, (offset, offset + piece.shape[2])).copy_(piece)
        offset += piece.shape[2]
    return out
