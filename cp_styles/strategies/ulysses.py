"""Ulysses attention: every rank gets the whole sequence of some heads. And its hybrid with an inner strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import named_range
from cp_styles._lib.device_copies import tensor_on
from cp_styles.collectives.exchange import Blocks, Exchange
from cp_styles.collectives.heads import head_exchange
from cp_styles.collectives.peers import Peers
from cp_styles.collectives.rows import Rows
from cp_styles.layouts import SequenceLayout, striped
from cp_styles.layouts.layout import Stripes
from cp_styles.layouts.ranges import Chunk
from cp_styles.strategies.base import Attention, ResidualPlaces, Spec, Strategy
from cp_styles.strategies.moving_kv import Ring


@dataclass(frozen=True)
class Ulysses(Strategy):
    """All-to-all from sequence shards to head shards, attention, and all-to-all back.

    Communication of one attention. Q is the bytes of one rank's query, K' the bytes of its key and value. (A KV head is
    sent to each rank that has a query head of its group, and to no other.) Forward: (U - 1)/U (2 Q + K'), in two
    all-to-alls. Backward: the same. The inner strategy adds its own. There may be fewer KV heads than ranks, and head
    counts need not divide: then ranks with a head more than others send more than that.

    Memory of one attention on one rank. Between forward and backward: the output, its logsumexp, Q + K' for the inputs
    of its heads, Q for their output, and what ``inner`` keeps. In the forward: that, and messages of Q + K' (twice if
    the layout is not contiguous). In the backward: the inner strategy's, then the gradients, and a message with
    them, or with one of them if they are large.

    Source: Jacobs et al., DeepSpeed Ulysses (2023); the hybrid: Fang and Zhao, USP (2024).

    Attributes:
        inner: the strategy among ranks that hold the same heads.
        size: number of neighbouring ranks that exchange heads (U). It must divide the number of ranks. None: all ranks
            of the axis.

    Raises:
        TypeError: ``inner`` is not a Strategy, or ``chunks`` is given, which no longer exists.
        ValueError: ``size`` is below 1; when the strategy is bound, ``size`` does not divide the ranks.

    Example::

        style = AttentionContextParallel(strategy=Ulysses(inner=Ring(), size=8))  # 8 ranks of a machine exchange heads
    """

    reads_inputs: ClassVar[bool] = False
    inner: Strategy = field(default_factory=lambda: Ring())  # torch.compile traces a function, and not the class
    size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Strategy):
            raise TypeError(f"Ulysses inner must be a Strategy object such as Ring(), got {self.inner!r}")
        if self.size is not None and self.size < 1:
            raise ValueError(f"Ulysses size must be at least 1, got {self.size}")

    def without_kept_keys(self):
        return replace(self, inner=self.inner.without_kept_keys())

    def on(self, ranks):
        size = self.size_on(ranks)
        inner = self.inner.on(ranks // size)
        return inner if size == 1 else replace(self, inner=inner)

    def residual_places(self, attention, q_BHLD, k_BGMD, v_BGME):
        return self._levels(attention, q_BHLD, k_BGMD, v_BGME).residual

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        levels = self._levels(attention, q_BHLD, k_BGMD, v_BGME)
        buffers, kept_out, inner_residual = levels.split_residual(residual)
        q, k, v = levels.exchange_heads(buffers, q_BHLD, k_BGMD, v_BGME)
        with named_range("attend"):
            k, v = levels.pair_keys(k, v)
            out = self.inner.forward(levels.inner, q, k, v, levels.select_heads(sink_H), inner_residual)
        del q, k, v
        if kept_out is not None:
            kept_out.copy_(out)
        # The output in the residual is sent, so that the memory of ``out`` is free for the result.
        heads = [out if kept_out is None else kept_out]
        del out
        _, to_sequence = levels.exchange_like_queries(levels.out_dim)
        return levels.exchange("output", to_sequence, heads)[0]

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        levels = self._levels(attention, q_BHLD, k_BGMD, v_BGME)
        buffers, out, inner_residual = levels.split_residual(residual)
        assert out is not None  # a backward has a residual
        assert inner_residual is not None
        to_heads, _ = levels.exchange_like_queries(grad_BHLE.shape[3])
        (grad,) = levels.exchange("gradient of output", to_heads, [grad_BHLE])
        q, k, v = levels.received_heads(buffers)
        with named_range("gradients"):
            k, v = levels.pair_keys(k, v)
            local_sink = levels.select_heads(sink_H)
            *grads, local_dsink = self.inner.backward(levels.inner, grad, q, k, v, out, inner_residual, local_sink)
            grads[1:] = levels.unpair_gradients(*grads[1:])
        del grad, q, k, v  # free the memory for the messages
        dsink = None if sink_H is None else torch.zeros_like(sink_H)
        if local_dsink is not None:
            levels.select_heads(dsink).copy_(local_dsink)
        results = []
        for way in levels.ways_back:
            leaving = grads[: len(way.op.columns)]
            del grads[: len(way.op.columns)]
            results += levels.exchange("gradients", way, leaving)
        dq, dk, dv = results
        return dq, dk, dv, dsink

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        levels = self._levels(attention, q_BHLD, k_BGMD, v_BGME)
        buffers, _, inner_residual = levels.split_residual(residual)
        q, k, v = levels.received_heads(buffers)
        assert inner_residual is not None
        lse = self.inner.logsumexp(levels.inner, q, *levels.pair_keys(k, v), inner_residual)
        _, to_sequence = levels.exchange_like_queries(1)
        return levels.exchange("logsumexp", to_sequence, [lse.unsqueeze(-1)])[0].squeeze(-1)

    def _levels(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Levels:
        key = self, q.shape, k.shape, v.shape, q.dtype, q.device
        return attention.known.get(key) or attention.known.setdefault(key, _Levels(self, attention, q, k, v))

    def size_on(self, ranks: int) -> int:
        """The number of ranks that exchange heads if ``ranks`` share the sequence.

        Raises:
            ValueError: ``size`` does not divide ``ranks``.
        """
        size = ranks if self.size is None else self.size
        if ranks % size:
            raise ValueError(
                f"Ulysses(size={size}) does not divide the {ranks} ranks of the sequence axis: give a size that does, "
                "or leave it out for all of them"
            )
        return size


class _Geometry(NamedTuple):
    """The part of :class:`_Levels` that does not depend on tensor values. It is the same at every layer and step.

    Attributes:
        queries: the exchange of queries.
        exchanges: one exchange for query, key and value together; two if keys are cut differently from queries.
        layouts: the layouts of queries and keys on the inner level.
        own: the range of query heads of this rank.
        kv_heads: the number of KV heads that this rank receives.
        pairs: for each query head of this rank, its KV head. None if kernels pair the heads correctly by order.
    """

    queries: Exchange
    exchanges: tuple[Exchange, ...]
    layouts: tuple[SequenceLayout, SequenceLayout]
    own: Chunk
    kv_heads: int
    pairs: tuple[int, ...] | None


@remembered(64)
def _make_geometry(
    peers: Peers, first: int, q_layout: SequenceLayout, kv_layout: SequenceLayout, heads: int, kv_heads: int
) -> _Geometry:
    q_cut, kv_cut = (_renumber_neighbours(layout, first, peers.size) for layout in (q_layout, kv_layout))
    exchange = head_exchange(peers, (heads, kv_heads, kv_heads), q_cut, seq_dim=2, heads_dim=1)
    queries, exchanges = exchange._replace(columns=exchange.columns[:1]), (exchange,)
    if kv_cut != q_cut:  # cross-attention
        exchanges = queries, exchange._replace(rows=Rows(kv_cut), columns=exchange.columns[1:])
    (start, stop), (kv_start, kv_stop) = (columns[peers.rank] for columns in exchange.columns[:2])
    count, kv_count, share = stop - start, kv_stop - kv_start, heads // max(kv_heads, 1)
    pairs = tuple(head // share - kv_start for head in range(start, stop))
    regular = kv_count and count % kv_count == 0
    even = regular and pairs == tuple(index // (count // kv_count) for index in range(count))
    layouts = join_neighbours(q_layout, peers.size), join_neighbours(kv_layout, peers.size)
    return _Geometry(queries, exchanges, layouts, (start, stop), kv_count, None if even or not pairs else pairs)


# [Note: two levels] There are P = U x R ranks. U neighbouring ranks exchange sequence for heads. Then each rank holds
# all positions of these U ranks, for 1/U of the heads. The inner strategy runs among the R ranks that hold the same
# heads. R = 1 is plain Ulysses: the inner attention has the whole sequence on one rank.
class _Levels:
    """Both levels of calls of one shape: the exchange of heads, and the attention of this rank's heads.

    Attributes:
        inner: the attention of this rank's heads; see [Note: two levels].
        ways: the exchange of query, key and value; two in cross-attention.
        ways_back: the exchange of their gradients.
        residual: the received q, k and v of this rank's heads, their output, and the inner residual.
        out_dim: the head dim of the output.
    """

    def __init__(self, strategy: Ulysses, attention: Attention, q, k, v) -> None:
        size = strategy.size_on(attention.ranks)
        group, inner_group = attention.split(attention.group, size)
        assert group is not None, "for one rank, Strategy.on takes the inner strategy"
        first = attention.rank - attention.rank % size
        # Peers without the name of the group, because groups of equal sizes have equal geometries.
        peers = Peers("", group.rank(), group.size())
        geometry = _make_geometry(peers, first, attention.q_layout, attention.kv_layout, q.shape[1], k.shape[1])
        # One message for query, key and value, unless keys are cut differently from queries.
        self._messages = (slice(0, 3),) if len(geometry.exchanges) == 1 else (slice(0, 1), slice(1, 3))
        shapes = (q.shape, k.shape, v.shape)
        self._group = ref(group)  # weak, because this object is cached, and must not keep a group alive
        ways = [*zip(geometry.exchanges, (shapes[members] for members in self._messages), strict=True)]
        self.ways = [Blocks(way, of_way) for way, of_way in ways]
        back = [(way.adjoint(), of_way) for way, of_way in ways]
        # Gradients of 2 MiB or more on a rank are sent one by one, without packing. Each is freed before the next one.
        if attention.q_layout.length * prod((*q.shape[:2], q.shape[3], q.itemsize)) >= 2**21 * attention.ranks:
            back = [
                (way._replace(columns=(cut,)), (shape,))
                for way, of_way in back
                for cut, shape in zip(way.columns, of_way, strict=True)
            ]
        self.ways_back = [Blocks(way, of_way) for way, of_way in back]
        self._queries, self._q_shape = geometry.queries, tuple(q.shape)
        self._like_queries: dict[int, tuple[Blocks, Blocks]] = {}
        start, stop = geometry.own
        before = 0 if attention.heads is None else attention.heads[0]
        self.inner = replace(
            attention,
            group=inner_group,
            q_layout=geometry.layouts[0],
            kv_layout=geometry.layouts[1],
            heads=(before + start, before + stop),
            kernel=attention.kernel.with_heads((start, stop)),
        )
        self.out_dim = attention.kernel.dims(k, v)[1]
        self._local_heads = slice(start, stop)
        self._heads, self._kv_heads = stop - start, geometry.kv_heads
        self._pairs = None if geometry.pairs is None else tensor_on(q.device, geometry.pairs)
        self.residual = ResidualPlaces(self._residual_specs(strategy.inner, q, k, v))

    def exchange_like_queries(self, dim: int) -> tuple[Blocks, Blocks]:
        """The exchanges, to heads and back, of tensors with the shape of queries but for the last dim ``dim``.

        Such tensors are the output, its gradient, and the logsumexp.
        """
        if dim not in self._like_queries:
            shapes = ((*self._q_shape[:3], dim),)
            self._like_queries[dim] = Blocks(self._queries, shapes), Blocks(self._queries.adjoint(), shapes)
        return self._like_queries[dim]

    def split_residual(self, residual: torch.Tensor | None) -> _Kept:
        """Views of ``residual``: buffers of the received tensors, output, and inner residual. None without one."""
        if residual is None:
            return None, None, None
        *buffers, out, inner = self.residual.views(residual)
        return buffers, out.transpose(1, 2), inner

    def _residual_specs(self, inner: Strategy, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Spec]:
        queries, keys = (layout.lengths[self.inner.rank] for layout in (self.inner.q_layout, self.inner.kv_layout))
        kv_heads = self._kv_heads if self._pairs is None else self._heads
        batch, _, _, dim, dtype = *q.shape, q.dtype
        tensors = (
            torch.empty(batch, *shape, dtype=dtype, device="meta")
            for shape in ((self._heads, queries, dim), (kv_heads, keys, k.shape[3]), (kv_heads, keys, v.shape[3]))
        )
        kept = inner.residual_places(self.inner, *tensors).spec
        out: Spec = ((batch, queries, self._heads, self.out_dim), dtype)  # in the memory order of kernel outputs
        return [*(((sum(way.received),), dtype) for way in self.ways), out, kept]

    def exchange_heads(self, buffers: list[torch.Tensor] | None, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value from sequence shards to head shards: one all-to-all, or two in cross-attention.

        They are received in ``buffers``, or in temporary memory with None.
        """
        # Loops and not comprehensions: an error's traceback would keep captured objects, and with them the groups.
        started, results = [], []
        with named_range("start heads"):
            for way, buffer, members in zip(self.ways, buffers or [None] * len(self.ways), self._messages, strict=True):
                started.append(way.post(list(tensors[members]), self._live_group(), buffer))
        with named_range("wait for heads"):
            for way in self.ways:
                results += way.finish(started.pop(0))
        return results

    def exchange(self, name: str, way: Blocks, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Exchange the tensors. The list is emptied. ``name`` is for traces."""
        with named_range("start", name):
            started = way.post(tensors, self._live_group())
        with named_range("wait for", name):
            return way.finish(started)

    def _live_group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "its attention holds the group of an exchange that runs"
        return group

    def received_heads(self, buffers: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Views of query, key and value in ``buffers``."""
        assert buffers is not None  # a backward has a residual
        return [x for way, buffer in zip(self.ways, buffers, strict=True) for x in way.view_columns(buffer)]

    def pair_keys(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values arranged so that kernels pair them correctly with the query heads."""
        return (k, v) if self._pairs is None else (k.index_select(1, self._pairs), v.index_select(1, self._pairs))

    def unpair_gradients(self, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The adjoint of :meth:`pair_keys`."""
        if self._pairs is None:
            return grads
        shape = (self._q_shape[0], self._kv_heads)
        return tuple(x.new_zeros(*shape, *x.shape[2:]).index_add_(1, self._pairs, x) for x in grads)

    def select_heads(self, per_head_H: torch.Tensor | None) -> Any:
        """A view of this rank's heads in a tensor that has all heads on every rank. None for None."""
        return None if per_head_H is None else per_head_H[self._local_heads]


_Kept: TypeAlias = tuple[list[torch.Tensor] | None, torch.Tensor | None, torch.Tensor | None]
"""Buffers of the received query, key and value; the output; the inner residual."""


def join_neighbours(layout: SequenceLayout, size: int) -> SequenceLayout:
    """The layout of the inner level, in which ``size`` neighbouring ranks are one rank."""
    if isinstance(held := layout.held, Stripes):
        return striped(layout.length, layout.ranks // size, block=held.block * size)
    chunks = layout.chunks
    return SequenceLayout.from_chunks(
        chain.from_iterable(chunks[first : first + size]) for first in range(0, len(chunks), size)
    )


def _renumber_neighbours(layout: SequenceLayout, first: int, size: int) -> SequenceLayout:
    """The layout of the positions of ``size`` neighbouring ranks, renumbered from 0 without gaps."""
    if isinstance(held := layout.held, Stripes):
        return striped(sum(layout.lengths[first : first + size]), size, block=held.block)
    members = layout.chunks[first : first + size]
    offsets: dict[Chunk, int] = {}
    total = 0
    for chunk in sorted(chain.from_iterable(members)):
        offsets[chunk] = total
        total += chunk[1] - chunk[0]
    return SequenceLayout.from_chunks(
        [(offsets[chunk], offsets[chunk] + chunk[1] - chunk[0]) for chunk in rank_chunks] for rank_chunks in members
    )
