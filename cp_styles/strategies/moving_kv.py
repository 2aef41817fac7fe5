"""Keys and values travel to the queries: what ring and all-gather attention share.

Both walk the same plan and differ only in which sources' keys arrive together, their *rounds*. Every transfer goes
straight from owner to user: forward a rank receives exactly the rows its queries attend to, backward it sends their
gradients straight home. The bytes are therefore the plan's, the least there are for the layout.

[Note: moving tensors]
message    1-D: rows of k as [B, G, rows, D], then of v as [B, G, rows, E], each contiguous; the one copy the wire needs
residual   lse [B, H, L] in the accumulation dtype; where KV is kept, the received messages, by source
gradients  one message of dk and one of dv, [B, rows, G, D] in the accumulation dtype, from user to owner
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from cp_styles.comm import Pending, exchange
from cp_styles.kernels import BesideDrowned, RowLevels, TileCall, Where
from cp_styles.kernels.levels import of_heads
from cp_styles.merge import EMPTY_LSE, OnlineSoftmax, RowSum, accumulation_dtype, sink_gradient
from cp_styles.plan import Cover, Part, Plan, Rows, Tile, make_plan
from cp_styles.strategies.base import Attention, Spec, Strategy, residual_views

Messages: TypeAlias = Sequence[tuple[int, torch.Tensor]]
"""Ranks, and what goes to or comes from them."""

_Rounds: TypeAlias = Sequence[Sequence[int]]

Arrived: TypeAlias = tuple[Part, torch.Tensor, torch.Tensor]
"""A part of the plan with the k and v rows it needs."""


class MovingKV(Strategy):
    """Subclasses say which sources' keys arrive together, and whether what arrived is kept for the backward."""

    keep_kv: bool

    @abstractmethod
    def rounds(self, rank: int, ranks: int) -> Sequence[Sequence[int]]:
        """The *other* ranks, in groups whose keys arrive together; every rank has the same number of groups."""

    def residual_specs(self, attention, q_BHLD, k_BGMD, v_BGME):
        return attention.once(
            (self, q_BHLD.shape, k_BGMD.shape, v_BGME.shape, q_BHLD.dtype),
            lambda: self._specs(_Walk(self, attention, q_BHLD, k_BGMD, v_BGME)),
        )

    def _specs(self, walk: _Walk) -> list[Spec]:
        counts = [walk.plan.parts[source].count for group in walk.sources for source in group] if self.keep_kv else []
        lse: Spec = (tuple(walk.q.shape[:3]), walk.wide)
        return [lse, *(((walk.size(count),), walk.k.dtype) for count in counts)]

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        walk = _Walk(self, attention, q_BHLD, k_BGMD, v_BGME)
        lse_BHL = walk.kept_in(residual)[0]
        lse_BHL = lse_BHL.masked_fill(lse_BHL <= EMPTY_LSE / 2, float("-inf"))
        return lse_BHL if walk.level is None else (lse_BHL + walk.level).to(lse_BHL.dtype)

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        with _Walk(self, attention, q_BHLD, k_BGMD, v_BGME) as walk:
            lse_BHL, *buffers = walk.kept_in(residual)

            q = q_BHLD.to(walk.dtype)
            if walk.levels is not None:
                q = walk.levels.quiet(q)
            softmax = OnlineSoftmax((*q.shape[:3], v_BGME.shape[3]), walk.dtype, q.device)
            for arrived in walk.fetched(buffers):
                tiles = walk.tiles(arrived)
                for index, (out, lse) in attention.kernel.forward_tiles(walk.calls(arrived, tiles, (q,))):
                    softmax.add(tiles[index][1].q, out, lse)
            if sink_H is not None:
                softmax.add_sink(sink_H, walk.level)
            out, lse = softmax.result()
            if residual is not None:
                lse_BHL.copy_(lse)
            return out.to(q_BHLD.dtype)

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        with _Walk(self, attention, q_BHLD, k_BGMD, v_BGME) as walk:
            lse_BHL, *buffers = walk.kept_in(residual)

            q, grad, out = (x.to(walk.dtype) for x in (q_BHLD, grad_BHLE, out_BHLE))
            kernel = attention.kernel
            if walk.levels is not None and walk.levels.drowned is not None:
                kernel, q = BesideDrowned(kernel), walk.levels.split(q)
            dq = RowSum(q.shape, walk.wide, q.device)
            home = _Homecoming(walk)
            # Kept messages leave nothing to wait for: remote keys first, so that their gradients travel meanwhile.
            for arrived in walk.kept(buffers) if self.keep_kv else walk.fetched([]):
                tiles = walk.tiles(arrived)
                sums = [[RowSum(x.shape, walk.wide, q.device) for x in (k, v)] for _, k, v in arrived]
                calls = walk.calls(arrived, tiles, (grad, q), (out, lse_BHL))
                for index, (tile_dq, tile_dk, tile_dv) in kernel.backward_tiles(calls):
                    place, tile = tiles[index]
                    dq.add(tile.q, tile_dq)
                    for total, share in zip(sums[place], (tile_dk, tile_dv), strict=True):
                        total.add(tile.kv, share)
                gradients = [
                    (part, dk.result(), dv.result()) for (part, _, _), (dk, dv) in zip(arrived, sums, strict=True)
                ]
                home.bring(gradients)
            dk, dv = home.result()
            dsink = None if sink_H is None else sink_gradient(sink_H, grad, out, lse_BHL, walk.level)
            return dq.result()[..., : q_BHLD.shape[3]].to(q_BHLD.dtype), dk.to(k_BGMD.dtype), dv.to(v_BGME.dtype), dsink


class _Walk:
    """One rank's way through its plan: who sends what when, and the keys and values of each part as they arrive."""

    def __init__(self, strategy: MovingKV, attention: Attention, q, k, v) -> None:
        self.strategy, self.attention = strategy, attention
        self.rank, self.plan, self.sources, self.destinations, tiles = attention.once(
            strategy, lambda: _way(strategy, attention)
        )
        self.q, self.k, self.v = q, k, v
        self.wide = accumulation_dtype(q.dtype)
        levels = self.levels
        # A sum is made of several tiles, and of one in which rows are drowned.
        sums = tiles > 1 or (levels is not None and levels.drowned is not None)
        self.dtype = attention.kernel.tile_dtype(q.dtype) if sums else q.dtype
        self._messages: dict[Rows, torch.Tensor] = {}
        self._started: list[Pending] = []

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # Transfers that nobody waits for would meet those of the next attention, and the ranks fall out of step.
        if kind is not None:
            for pending in self._started:
                with contextlib.suppress(RuntimeError):  # the failure on its way up says more
                    pending.wait()

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

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        """:func:`~cp_styles.comm.exchange`, finished whatever happens."""
        self._started.append(exchange(sends, receives, self.attention.group))
        return self._started[-1]

    def kept_in(self, residual: torch.Tensor | None) -> list[torch.Tensor]:
        """The logsumexp in a residual and the places of kept messages; the logsumexp goes nowhere without one."""
        if residual is None:
            return [self.q.new_empty(0)]
        specs = self.strategy.residual_specs(self.attention, self.q, self.k, self.v)
        return residual_views(specs, residual)

    def size(self, rows: int) -> int:
        """Elements of a message of so many rows."""
        batch, heads, _, dim = self.k.shape
        return batch * heads * rows * (dim + self.v.shape[3])

    def split(self, message: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v inside a message of so many rows; see [Note: moving tensors]."""
        (batch, heads, _, dim), dim_v = self.k.shape, self.v.shape[3]
        k, v = message.split((batch * heads * rows * dim, batch * heads * rows * dim_v))
        return k.view(batch, heads, rows, dim), v.view(batch, heads, rows, dim_v)

    def packed(self, rows: Rows) -> torch.Tensor:
        """The message with these rows of this rank; the same rows are packed once, whoever they go to."""
        if rows not in self._messages:
            message = self.k.new_empty(self.size(_count(rows)))
            for target, tensor in zip(self.split(message, _count(rows)), (self.k, self.v), strict=True):
                _gather_rows(tensor, rows, out=target)
            self._messages[rows] = message
        return self._messages[rows]

    def fetched(self, buffers: Sequence[torch.Tensor]) -> Iterator[list[Arrived]]:
        """The own part, then the parts of each round; the next round is under way while one is worked on."""
        places = iter(buffers)
        arriving = self._start(0, places)
        yield self._own()
        for index, group in enumerate(self.sources):
            messages, pending = arriving
            arriving = self._start(index + 1, places)
            pending.wait()
            yield [self._arrived(source, messages[source]) for source in group]

    def kept(self, buffers: Sequence[torch.Tensor]) -> Iterator[list[Arrived]]:
        """The parts of each round as the forward left them, the own part last."""
        places = iter(buffers)
        for group in self.sources:
            yield [self._arrived(source, next(places)) for source in group]
        yield self._own()

    def tiles(self, arrived: Sequence[Arrived]) -> list[tuple[int, Tile]]:
        """What to compute of parts, each tile with its part's place: nothing where there is no head or no batch.

        Tiles with a mask come last: a kernel may take the others together, and another one those with a mask.
        """
        if not self.q.numel():
            return []
        tiles = [(place, tile) for place, (part, _, _) in enumerate(arrived) for tile in part.tiles]
        return sorted(tiles, key=lambda entry: entry[1].cover is Cover.PARTIAL)

    def calls(
        self,
        arrived: Sequence[Arrived],
        tiles: Sequence[tuple[int, Tile]],
        before: tuple[torch.Tensor, ...],
        after: tuple[torch.Tensor, ...] = (),
    ) -> Iterator[TileCall]:
        """What a kernel is given for each tile: its rows of ``before``, of k and v, and of ``after``.

        One by one, since a mask is made for a tile, and is as large.
        """
        for place, tile in tiles:
            part, k, v = arrived[place]
            queries = [[_rows(x, tile.q) for x in tensors] for tensors in (before, after)]
            tensors = (*queries[0], _rows(k, tile.kv), _rows(v, tile.kv), *queries[1])
            yield TileCall(tensors, self.options(part, tile))

    def options(self, part: Part, tile: Tile) -> dict:
        """The kernel's keyword arguments for a tile."""
        bias = self._bias(part, tile) if tile.cover is Cover.PARTIAL else None
        options = {"causal": tile.cover is Cover.CAUSAL, "bias": bias, "scale": self.attention.scale}
        if self.attention.kernel.positional:
            heads = self.attention.heads
            options["where"] = Where(*self._positions(part, tile), 0 if heads is None else heads[0])
        return options

    def _start(self, index: int, places: Iterator[torch.Tensor]) -> tuple[dict[int, torch.Tensor], Pending]:
        if index == len(self.sources):
            return {}, Pending((), ())
        messages = {source: self._place(source, places) for source in self.sources[index]}
        sends = [(peer, self.packed(self.plan.sends[peer])) for peer in self.destinations[index]]
        return messages, self.exchange(sends, list(messages.items()))

    def _place(self, source: int, places: Iterator[torch.Tensor]) -> torch.Tensor:
        place = next(places, None)
        return self.k.new_empty(self.size(self.plan.parts[source].count)) if place is None else place

    def _own(self) -> list[Arrived]:
        part = self.plan.parts[self.rank]
        if not part.rows:
            return []
        if part.rows in self._messages:  # packed for others already, and contiguous, which kernels like
            return [self._arrived(self.rank, self._messages[part.rows])]
        k, v = (_gather_rows(x, part.rows).to(self.dtype) for x in (self.k, self.v))
        return [(part, k, v)]

    def _arrived(self, source: int, message: torch.Tensor) -> Arrived:
        part = self.plan.parts[source]
        return part, *self.split(message.to(self.dtype), part.count)

    def _positions(self, part: Part, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the queries and keys of a tile, in the whole sequence."""
        attention, device = self.attention, self.q.device
        q_positions = attention.q_layout.positions(self.rank, device)[tile.q[0] : tile.q[1]]
        kv_positions = _gather_rows(attention.kv_layout.positions(part.source, device), part.rows, dim=0)
        return q_positions, kv_positions[tile.kv[0] : tile.kv[1]]

    def _bias(self, part: Part, tile: Tile) -> torch.Tensor:
        attention, device = self.attention, self.q.device
        q_positions, kv_positions = self._positions(part, tile)
        outside = ~attention.mask.allowed(q_positions, kv_positions)
        bias = of_heads(attention.mask.bias(q_positions, kv_positions), attention.heads)
        if bias is None:
            bias = torch.zeros(outside.shape, dtype=self.dtype, device=device)
        if self.levels is not None:
            bias = self.levels.off(bias.to(device), tile.q)
        return bias.to(device, self.dtype).masked_fill(outside, float("-inf"))


def _way(strategy: MovingKV, attention: Attention) -> tuple[int, Plan, _Rounds, _Rounds, int]:
    """This rank, its plan, who sends to it and to whom it sends in each round, and the number of its tiles."""
    rank, ranks = attention.rank, attention.ranks
    small_tiles = attention.kernel.small_tiles
    plan = make_plan(attention.q_layout, attention.kv_layout, attention.mask, rank, small_tiles=small_tiles)
    tiles = sum(len(part.tiles) for part in plan.parts)
    return rank, plan, strategy.rounds(rank, ranks), _destinations(strategy, rank, ranks), tiles


class _Homecoming:
    """Gradients of keys and values on their way back to the owner, and their sum there.

    Every rank starts the transfers of a round when it has computed it, and in the same order as all others, because
    NCCL and gloo match the messages of two ranks by order alone.
    """

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        self._dk, self._dv = (RowSum(x.shape, walk.wide, x.device) for x in (walk.k, walk.v))
        self._arriving: list[tuple[list[tuple[int, torch.Tensor]], Pending]] = []

    def bring(self, gradients: Sequence[tuple[Part, torch.Tensor, torch.Tensor]]) -> None:
        """Take the gradients of a round (or of the own part): sum what is at home, send home what is not."""
        walk = self._walk
        own = [entry for entry in gradients if entry[0].source == walk.rank]
        for part, dk, dv in own:
            self._add(part.rows, dk, dv)
        if own or not gradients:
            return
        # In the order in which kernels leave gradients, [B, rows, G, D], so that nothing has to be packed.
        sends = [(part.source, x.transpose(1, 2).contiguous()) for part, *pair in gradients for x in pair]
        receives = [
            (peer, x.new_empty(x.shape[0], _count(walk.plan.sends[peer]), x.shape[1], x.shape[3], dtype=walk.wide))
            for peer in walk.destinations[len(self._arriving)]
            for x in (walk.k, walk.v)
        ]
        self._arriving.append((receives, walk.exchange(sends, receives)))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dk, dv)`` of this rank's rows, everybody's share included."""
        for messages, pending in self._arriving:
            pending.wait()
            for (peer, dk), (_, dv) in zip(messages[::2], messages[1::2], strict=True):
                self._add(self._walk.plan.sends[peer], dk.transpose(1, 2), dv.transpose(1, 2))
        return self._dk.result(), self._dv.result()

    def _add(self, rows: Rows, dk: torch.Tensor, dv: torch.Tensor) -> None:
        offset = 0
        for start, stop in rows:
            for total, grad in ((self._dk, dk), (self._dv, dv)):
                total.add((start, stop), grad[:, :, offset : offset + stop - start])
            offset += stop - start


@lru_cache(maxsize=1024)
def _destinations(strategy: MovingKV, rank: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """By round, the ranks that receive this rank's keys in it."""
    everyone = [strategy.rounds(peer, ranks) for peer in range(ranks)]
    return tuple(
        tuple(peer for peer in range(ranks) if rank in everyone[peer][index]) for index in range(len(everyone[rank]))
    )


def _rows(tensor: torch.Tensor, rows: tuple[int, int]) -> torch.Tensor:
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
