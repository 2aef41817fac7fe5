"""Keys and values travel to the queries: what ring and all-gather attention share.

Both walk the same plan and differ only in which sources' keys arrive together, their *rounds*. Every transfer goes
straight from owner to user: forward a rank receives exactly the rows its queries attend to, backward it sends their
gradients straight home. The bytes are therefore the plan's, the least there are for the layout.

[Note: moving tensors]
message    1-D: rows of k as [B, g, rows, D], then of v as [B, g, rows, E], each contiguous; the one copy the wire needs
residual   lse [B, H, L] in the accumulation dtype; then the messages of the sources that are kept
gradients  one message of dk and one of dv, [B, rows, g, D] in the accumulation dtype, from user to owner

[Note: memory] While one message is worked on, the next one is on its way, and so is the gradient of the one before. So
at any time at most two messages of keys and two of gradients are alive, forward and backward, for any number of ranks.
Where there are several rounds, and a source's keys and values are larger than a query shard (as without grouped
heads), the key heads go in groups, one after the other, so that a message is never larger than a query shard.
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

from cp_styles.comm.point_to_point import Pending, TransferError, exchange
from cp_styles.kernels import BesideDrowned, Kernel, RowLevels, TileCall, Where
from cp_styles.kernels.levels import of_heads
from cp_styles.kernels.merge import EMPTY_LSE, OnlineSoftmax, RowSum, accumulation_dtype, sink_gradient
from cp_styles.plan import Cover, Part, Plan, Rows, Tile, make_plan
from cp_styles.strategies.base import Attention, Spec, Strategy, residual_views

Span: TypeAlias = tuple[int, int]
"""A half-open range, of heads or of rows."""

Messages: TypeAlias = Sequence[tuple[int, torch.Tensor]]
"""Ranks, and what goes to or comes from them."""

Arrived: TypeAlias = tuple[Part, torch.Tensor, torch.Tensor]
"""A part of the plan with the k and v rows it needs, or with their gradients."""


class Step(NamedTuple):
    """Some sources' keys and values of some heads, which are computed together.

    Attributes:
        heads: of the key heads, those whose turn it is.
        distances: how far the sources are: those of rank r are the ranks r - d. 0 is the rank itself.
        travels: whether they have to be received; else they are at hand.
    """

    heads: Span
    distances: tuple[int, ...]
    travels: bool


class MovingKV(Strategy):
    """Subclasses say which sources' keys arrive together, and of how many sources they are kept for the backward."""

    keep: int

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 0:
            raise ValueError(
                f"{type(self).__name__} keep must be a number of sources, 0 or more, got {self.keep!r}: 0 keeps no "
                "received keys for the backward, a number as large as the number of ranks keeps all"
            )

    @abstractmethod
    def rounds(self, ranks: int) -> Sequence[Sequence[int]]:
        """Every distance from 1 to ``ranks - 1`` once, in groups; see :attr:`Step.distances`."""

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
            merged = OnlineSoftmax((*q.shape[:3], v_BGME.shape[3]), walk.dtype, q.device)
            for heads, arrived in walk.arrivals(walk.forward_steps, kept):
                walk.forward(heads, arrived, q, merged)
                del arrived  # room for what comes next
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
            for heads, arrived in walk.arrivals(walk.backward_steps, kept):
                # One source after the other, so that no more than one's gradients wait to be sent home.
                while arrived:
                    home.bring(heads, *walk.backward(kernel, heads, arrived.pop(0), (grad, q), (out, lse_BHL), dq))
            dk, dv = home.result()
            dsink = None if sink_H is None else sink_gradient(sink_H, grad, out, lse_BHL, walk.level)
            return dq.result()[..., : q_BHLD.shape[3]].to(q_BHLD.dtype), dk.to(k_BGMD.dtype), dv.to(v_BGME.dtype), dsink


class _PlanRun:
    """One rank's way through its plan: who sends what when, and the keys and values of each part as they arrive."""

    def __init__(self, strategy: MovingKV, attention: Attention, q, k, v) -> None:
        self.attention = attention
        self.q, self.k, self.v = q, k, v
        way = attention.once(
            (strategy, q.shape[1], k.shape[1], k.shape[3], v.shape[3]), lambda: _way(strategy, attention, q, k, v)
        )
        self.rank, self.ranks, self.plan, self.groups, self.kept, self.forward_steps, self.backward_steps, tiles = way
        self.wide = accumulation_dtype(q.dtype)
        levels = self.levels
        # A sum is made of several tiles, and of one in which rows are drowned.
        sums = tiles > 1 or (levels is not None and levels.drowned is not None)
        self.dtype = attention.kernel.tile_dtype(q.dtype) if sums else q.dtype
        self._strategy = strategy
        self._messages: dict[tuple[Span, Rows], torch.Tensor] = {}
        self._started: list[Pending] = []

    def __enter__(self) -> _PlanRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # Transfers that nobody waits for would meet those of the next attention, and the ranks fall out of step. But
        # where a transfer failed there is no next one, and the peers of the others may wait for a rank that is gone;
        # and who interrupts a program does not want to wait.
        if kind is None or issubclass(kind, TransferError) or not issubclass(kind, Exception):
            return
        with contextlib.suppress(TransferError):  # the failure on its way up says more
            for pending in self._started:
                pending.wait()

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        """:func:`~cp_styles.comm.point_to_point.exchange`, finished whatever happens."""
        self._started = [pending for pending in self._started if not pending.done]
        self._started.append(exchange(sends, receives, self.attention.group))
        return self._started[-1]

    @property
    def levels(self) -> RowLevels | None:
        """What is taken off an additive mask's biases; None where there is nothing to take off."""
        attention, device = self.attention, self.q.device
        if not attention.mask.additive or not self.q.numel() or not attention.kv_layout.length:
            return None
        if device.type == "meta":  # somebody asks for shapes
            return None
        # Where a score_mod follows, nobody knows what a query of 0 would come to.
        drowns = not attention.kernel.positional

        def make() -> RowLevels | None:
            q_positions, keys = attention.q_layout.positions(self.rank, device), attention.kv_layout.length
            return RowLevels.of(attention.mask, q_positions, keys, attention.heads, self.wide, drowns=drowns)

        return attention.once((RowLevels, self.wide, device, drowns), make)

    @property
    def level(self) -> torch.Tensor | None:
        """The level of each row, [B, H, L] or what broadcasts to it; None for 0."""
        return None if self.levels is None else self.levels.level

    def kept_in(self, residual: torch.Tensor | None) -> list[torch.Tensor]:
        """The logsumexp in a residual and the places of kept messages; the logsumexp goes nowhere without one."""
        if residual is None:
            return [self.q.new_empty(0)]
        specs = self._strategy.residual_specs(self.attention, self.q, self.k, self.v)
        return residual_views(specs, residual)

    def part(self, distance: int) -> Part:
        """What this rank does with the keys of the source at that distance."""
        return self.plan.parts[(self.rank - distance) % self.ranks]

    def size(self, rows: int, heads: int) -> int:
        """Elements of a message of so many rows and key heads."""
        return self.k.shape[0] * heads * rows * (self.k.shape[3] + self.v.shape[3])

    def of_queries(self, heads: Span) -> Span:
        """The query heads that attend to these key heads."""
        share = self.q.shape[1] // max(self.k.shape[1], 1)
        return heads[0] * share, heads[1] * share

    def arrivals(self, steps: Sequence[Step], kept: Sequence[torch.Tensor]) -> Iterator[tuple[Span, list[Arrived]]]:
        """The heads and parts of each step, when they are at hand; the next that travels is under way meanwhile.

        ``kept`` are the places in the residual: what travels to one of them stays there.
        """
        places = dict(zip(self.kept, kept, strict=False))
        queue = [step for step in steps if step.travels]
        under_way = self._start(queue, places)
        for heads, distances, travels in steps:
            messages: dict[int, torch.Tensor] = {}
            if travels:
                messages, pending = under_way
                under_way = self._start(queue, places)
                pending.wait()
            found = []
            for distance in distances:
                part = self.part(distance)
                if distance:
                    message = messages.pop(distance) if travels else self._place(places, distance, heads)
                    found.append(self._arrived(part, heads, message))
                    del message
                elif part.rows:
                    found.append(self._own(part, heads))
            yield heads, found
            del found

    def forward(self, heads: Span, arrived: Sequence[Arrived], q: torch.Tensor, merged: OnlineSoftmax) -> None:
        """Attend to what has arrived."""
        tiles = _masked_last([(entry, tile) for entry in arrived for tile in entry[0].tiles])
        results = self.attention.kernel.forward_tiles(self._calls(heads, tiles, (q,)))
        for index, (out, lse) in results:
            merged.add(self.of_queries(heads), tiles[index][1].q, out, lse)

    def backward(
        self,
        kernel: Kernel,
        heads: Span,
        entry: Arrived,
        before: tuple[torch.Tensor, ...],
        after: tuple[torch.Tensor, ...],
        dq: RowSum,
    ) -> Arrived:
        """The part with ``dk`` and ``dv`` of the rows that it needs; what comes to queries is added to ``dq``.

        ``before`` and ``after`` are what a kernel is given before and after k and v.
        """
        part, *kv = entry
        sums = [RowSum(x.shape, self.wide, x.device) for x in kv]
        tiles = _masked_last([(entry, tile) for tile in part.tiles])
        results = kernel.backward_tiles(self._calls(heads, tiles, before, after))
        for index, (tile_dq, *gradients) in results:
            tile = tiles[index][1]
            dq.add(self.of_queries(heads), tile.q, tile_dq)
            for total, gradient in zip(sums, gradients, strict=True):
                total.add((0, heads[1] - heads[0]), tile.kv, gradient)
        dk, dv = (total.result() for total in sums)
        return part, dk, dv

    def _calls(
        self,
        heads: Span,
        tiles: Sequence[tuple[Arrived, Tile]],
        before: tuple[torch.Tensor, ...],
        after: tuple[torch.Tensor, ...] = (),
    ) -> Iterator[TileCall]:
        """What a kernel is given for each tile: its heads and rows of ``before``, of k and v, and of ``after``.

        One by one, since a mask is made for a tile, and is as large. Nothing where there is no head or no batch.
        """
        own = slice(*self.of_queries(heads))
        for (part, k, v), tile in tiles if self.q.numel() else ():
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

    def _start(self, queue: list[Step], places: dict[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], Pending]:
        """Start the next step that travels, if there is one: what will arrive, by distance."""
        if not queue:
            self._messages = {}
            return {}, Pending((), ())
        heads, distances, _ = queue.pop(0)
        messages = {distance: self._place(places, distance, heads) for distance in distances}
        destinations = [(self.rank + distance) % self.ranks for distance in distances]
        wanted = [(heads, self.plan.sends[peer]) for peer in destinations]
        # The same rows are packed once, for all of a step, and for the next step where that sends them too.
        self._messages = {key: self._messages[key] for key in wanted if key in self._messages}
        for key in wanted:
            if key not in self._messages:
                self._messages[key] = self._packed(*key)
        sends = [(peer, self._messages[key]) for peer, key in zip(destinations, wanted, strict=True)]
        sources = ((self.rank - distance) % self.ranks for distance in distances)
        return messages, self.exchange(sends, list(zip(sources, messages.values(), strict=True)))

    def _place(self, places: dict[int, torch.Tensor], distance: int, heads: Span) -> torch.Tensor:
        """Where a message is kept, or arrives: in the residual, or in memory of its own."""
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
        """k and v inside a message of so many rows; see [Note: moving tensors]."""
        shapes = [(x.shape[0], heads[1] - heads[0], rows, x.shape[3]) for x in (self.k, self.v)]
        sizes = [prod(shape) for shape in shapes]
        k, v = (part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True))
        return k, v

    def _own(self, part: Part, heads: Span) -> Arrived:
        packed = self._messages.get((heads, part.rows))
        if packed is not None:  # for others, and contiguous, which kernels like
            return self._arrived(part, heads, packed)
        k, v = (_gather_rows(_heads(x, heads), part.rows).to(self.dtype) for x in (self.k, self.v))
        return part, k, v

    def _arrived(self, part: Part, heads: Span, message: torch.Tensor) -> Arrived:
        return part, *self._split(message.to(self.dtype), heads, part.count)

    def _positions(self, part: Part, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the queries and keys of a tile, in the whole sequence."""
        attention, device = self.attention, self.q.device
        q_positions = attention.q_layout.positions(self.rank, device)[tile.q[0] : tile.q[1]]
        kv_positions = _gather_rows(attention.kv_layout.positions(part.source, device), part.rows, dim=0)
        return q_positions, kv_positions[tile.kv[0] : tile.kv[1]]

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
    """Of a walk, all that does not depend on its tensors; the same at every layer and step.

    Attributes:
        rank, ranks: of the group.
        plan: this rank's.
        groups: the key heads, as they take turns.
        kept: distances of the sources whose messages stay in the residual.
        forward_steps, backward_steps: what is computed, in order; the same on every rank.
        tiles: how many there are.
    """

    rank: int
    ranks: int
    plan: Plan
    groups: list[Span]
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
    forward, backward = [], []
    for heads in groups:
        own = Step(heads, (0,), False)
        forward += [own, *(Step(heads, distances, True) for distances in rounds)]
        # Kept messages leave nothing to wait for: first, so that the others, and their gradients, travel meanwhile.
        for others in (False, True):
            chosen = [tuple(d for d in distances if (d not in kept) == others) for distances in rounds]
            backward += [own] if others else []
            backward += [Step(heads, distances, others) for distances in chosen if distances]
    tiles = sum(len(part.tiles) for part in plan.parts)
    return _Way(rank, ranks, plan, groups, kept, forward, backward, tiles * len(groups))


def _groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Span]:
    """Key heads in so few groups that a row of k and v of one is no larger than a row of queries."""
    heads = k.shape[1]
    query, key = q.shape[1] * q.shape[3], heads * (k.shape[3] + v.shape[3])
    parts = min(heads, -(-key // max(query, 1))) or 1
    return list(pairwise(heads * index // parts for index in range(parts + 1)))


class _GradientReturn:
    """Gradients of keys and values on their way back to the owner, and their sum there.

    Every rank starts a transfer when it has computed what it sends, and in the same order as all others, because NCCL
    and gloo match the messages of two ranks by order alone. What comes is added before the next transfer starts.
    """

    def __init__(self, walk: _PlanRun) -> None:
        self._walk = walk
        self._sums = [RowSum(x.shape, walk.wide, x.device) for x in (walk.k, walk.v)]
        self._under_way: tuple[Span, Rows, list[torch.Tensor], Pending] | None = None

    def bring(self, heads: Span, part: Part, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Take the gradients of some heads of a part: sum what is at home, send home what is not."""
        walk = self._walk
        if part.source == walk.rank:
            self._add(heads, part.rows, (dk, dv))
            return
        self._settle()
        peer = (2 * walk.rank - part.source) % walk.ranks  # as far as the source, on the other side
        rows = walk.plan.sends[peer]
        # In the order in which kernels leave gradients, [B, rows, G, D], so that nothing has to be packed.
        sends = [x.transpose(1, 2).contiguous() for x in (dk, dv)]
        shape = (dk.shape[0], _count(rows), heads[1] - heads[0])
        receives = [x.new_empty(*shape, x.shape[3]) for x in (dk, dv)]
        pending = walk.exchange([(part.source, x) for x in sends], [(peer, x) for x in receives])
        self._under_way = heads, rows, receives, pending

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dk, dv)`` of this rank's rows, everybody's share included."""
        self._settle()
        dk, dv = (total.result() for total in self._sums)
        return dk, dv

    def _settle(self) -> None:
        if self._under_way is None:
            return
        heads, rows, (dk, dv), pending = self._under_way
        self._under_way = None
        pending.wait()
        self._add(heads, rows, (dk.transpose(1, 2), dv.transpose(1, 2)))

    def _add(self, heads: Span, rows: Rows, grads: tuple[torch.Tensor, torch.Tensor]) -> None:
        offset = 0
        for start, stop in rows:
            for total, grad in zip(self._sums, grads, strict=True):
                total.add(heads, (start, stop), grad[:, :, offset : offset + stop - start])
            offset += stop - start


def _masked_last(tiles: list[tuple[Arrived, Tile]]) -> list[tuple[Arrived, Tile]]:
    """A kernel may take the others together, and another one those with a mask."""
    return sorted(tiles, key=lambda entry: entry[1].cover is Cover.PARTIAL)


def _heads(tensor: torch.Tensor, heads: Span) -> torch.Tensor:
    return tensor[:, heads[0] : heads[1]]


def _rows(tensor: torch.Tensor, rows: Span) -> torch.Tensor:
    return tensor[:, :, rows[0] : rows[1]]


def _count(rows: Rows) -> int:
    return sum(stop - start for start, stop in rows)


def _gather_rows(tensor: torch.Tensor, rows: Rows, dim: int = 2, out: torch.Tensor | None = None) -> torch.Tensor:
    """The given rows of a tensor along ``dim``: a view where they are one range, else (or into ``out``) one copy."""
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in rows]
    if out is None:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    offset = 0
    for piece in pieces:
        out.narrow(dim, offset, piece.shape[dim]).copy_(piece)
        offset += piece.shape[dim]
    return out
