"""Ulysses attention: every rank gets the whole sequence of some heads. Also its hybrid with an inner strategy.

[Note: two levels] There are P = U x R ranks. U neighbouring ranks exchange sequence for heads. Then each rank holds all
positions of these U ranks, for 1/U of the heads. The inner strategy runs among the R ranks that hold the same heads.
R = 1 is plain Ulysses: the inner attention has the whole sequence on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import ref

import torch

from cp_styles.cache import remembered
from cp_styles.collectives._direct import Direct
from cp_styles.collectives._exchange import Exchange
from cp_styles.collectives._group import Peers, peers_of
from cp_styles.collectives.heads import head_exchange
from cp_styles.comm.point_to_point import split_group
from cp_styles.device import tensor_on
from cp_styles.layout import Chunk, SequenceLayout, Stripes, striped
from cp_styles.strategies.base import Attention, Spec, Strategy, new_residual, residual_views
from cp_styles.strategies.ring import Ring


@dataclass(frozen=True)
class Ulysses(Strategy):
    """All-to-all from sequence shards to head shards, attention, and all-to-all back.

    Communication of one attention. Q is the bytes of one rank's query, K' those of its key and value. (A KV head is
    sent to each rank that has a query head of its group, and to no other.) Forward: (U - 1)/U (2 Q + K'), in two
    all-to-alls. Backward: the same. The inner strategy adds its own. There may be fewer KV heads than ranks, and head
    counts need not divide.

    Memory of one attention on one rank. Between forward and backward: the inputs, the output, its logsumexp, Q + K' for
    the inputs of its heads, Q for their output, and what ``inner`` keeps. In the forward: that, and messages of Q + K'
    (twice if the layout is not contiguous). In the backward: that of the inner strategy, then the gradients, which are
    sent one at a time, with at most 2 Q beside them.

    Source: Jacobs et al., DeepSpeed Ulysses (2023); the hybrid: Fang and Zhao, USP (2024).

    Attributes:
        inner: the strategy among ranks that hold the same heads.
        size: number of neighbouring ranks that exchange heads (U). It must divide the number of ranks. None: all ranks
            of the axis, or of the second axis if the style has two mesh axes.
    """

    inner: Strategy = field(default_factory=Ring)
    size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Strategy):
            raise TypeError(f"Ulysses inner must be a Strategy object such as Ring(), got {self.inner!r}")
        if self.size is not None and self.size < 1:
            raise ValueError(f"Ulysses size must be at least 1, got {self.size}")

    def over_two_axes(self, inner):
        if self.size not in (None, inner):
            raise ValueError(
                f"{self} says size={self.size}, but the second mesh axis has {inner} ranks; leave size out"
            )
        return replace(self, size=inner)

    def keeping_nothing(self):
        return replace(self, inner=self.inner.keeping_nothing())

    def check_ranks(self, ranks):
        self.inner.check_ranks(ranks // self.size_on(ranks))

    def prepare(self, q_layout, kv_layout, mask, rank, *, small_tiles):
        size = self.size_on(q_layout.ranks)
        layouts = joined(q_layout, size), joined(kv_layout, size)
        self.inner.prepare(*layouts, mask, rank // size, small_tiles=small_tiles)

    def residual_specs(self, attention, q_BHLD, k_BGMD, v_BGME):
        return self._levels(attention, q_BHLD, k_BGMD, v_BGME).specs

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        levels = self._levels(attention, q_BHLD, k_BGMD, v_BGME)
        places, kept_out, inner_residual = levels.kept_in(residual, q_BHLD)
        levels.to_heads(places, q_BHLD, k_BGMD, v_BGME)
        q, k, v = levels.in_heads(places, q_BHLD, k_BGMD, v_BGME)
        sink = levels.of_heads(sink_H)
        out = self.inner.forward(levels.inner, q, *levels.paired(k, v), sink, inner_residual)
        way, heads = levels.like_queries(out.shape[3]), [out]
        if kept_out is not None:
            kept_out.copy_(out)
            if not way.trivial:  # send from the residual, so that the memory of ``out`` is free for the result
                heads = [kept_out]
        del out
        return way.home(heads)[0]

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        levels = self._levels(attention, q_BHLD, k_BGMD, v_BGME)
        places, out, inner_residual = levels.kept_in(residual, q_BHLD)
        assert out is not None  # a backward has a residual
        assert inner_residual is not None
        way = levels.like_queries(grad_BHLE.shape[3])
        (grad,) = way.to_columns(grad_BHLE)
        q, k, v = levels.in_heads(places, q_BHLD, k_BGMD, v_BGME)
        k, v = levels.paired(k, v)
        sink = levels.of_heads(sink_H)
        *grads, dsink = self.inner.backward(levels.inner, grad, q, k, v, out, inner_residual, sink)
        grads[1:] = levels.unpaired(*grads[1:])
        del grad  # free its memory for what follows
        dq, dk, dv = levels.to_sequence(grads)
        return dq, dk, dv, levels.among_heads(dsink, sink_H)

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        levels = self._levels(attention, q_BHLD, k_BGMD, v_BGME)
        places, _, inner_residual = levels.kept_in(residual, q_BHLD)
        assert inner_residual is not None
        q, k, v = levels.in_heads(places, q_BHLD, k_BGMD, v_BGME)
        lse = self.inner.logsumexp(levels.inner, q, *levels.paired(k, v), inner_residual)
        return levels.like_queries(1).home([lse.unsqueeze(-1)])[0].squeeze(-1)

    def _levels(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Levels:
        return attention.once(
            (self, q.shape, k.shape, v.shape, q.dtype, q.device), lambda: _Levels(self, attention, q, k, v)
        )

    def size_on(self, ranks: int) -> int:
        """Number of ranks that exchange heads if ``ranks`` share the sequence."""
        size = ranks if self.size is None else self.size
        if ranks % size:
            raise ValueError(f"Ulysses(size={size}) does not divide the {ranks} ranks of the sequence axis")
        return size


class _Geometry(NamedTuple):
    """The part of a two-level call that does not depend on tensor values. It is the same at every layer and step.

    Attributes:
        queries: the exchange of queries.
        exchanges: one exchange for query, key and value together; two if keys are cut differently from queries.
        layouts: the layouts of queries and keys on the inner level.
        own: the query heads of this rank.
        kv_heads: the number of KV heads that this rank gets.
        pairs: the KV head that each query head of this rank needs; None if kernels pair them correctly by order.
    """

    queries: Exchange
    exchanges: tuple[Exchange, ...]
    layouts: tuple[SequenceLayout, SequenceLayout]
    own: Chunk
    kv_heads: int
    pairs: tuple[int, ...] | None


@remembered(lambda arguments, value: sum(x.nbytes for x in (*arguments[2:4], *value.layouts)))
def _geometry(
    peers: Peers, first: int, q_layout: SequenceLayout, kv_layout: SequenceLayout, heads: int, kv_heads: int
) -> _Geometry:
    q_cut, kv_cut = (_among(layout, first, peers.size) for layout in (q_layout, kv_layout))
    exchange = head_exchange(peers, heads=(heads, kv_heads, kv_heads), seq_sizes=q_cut, seq_dim=2, head_dim=1)
    queries = exchange._replace(columns=exchange.columns[:1])
    exchanges = (exchange,)
    if kv_cut != q_cut:  # cross-attention
        keys = head_exchange(peers, heads=(heads, kv_heads), seq_sizes=kv_cut, seq_dim=2, head_dim=1)
        exchanges = (queries, keys._replace(columns=(keys.columns[1],) * 2))
    (start, stop), (kv_start, kv_stop) = (columns[peers.rank] for columns in exchange.columns[:2])
    own, kv_own = stop - start, kv_stop - kv_start
    share = heads // kv_heads
    pairs = tuple(head // share - kv_start for head in range(start, stop))
    regular = kv_own and own % kv_own == 0
    even = regular and pairs == tuple(index // (own // kv_own) for index in range(own))
    layouts = joined(q_layout, peers.size), joined(kv_layout, peers.size)
    return _Geometry(queries, exchanges, layouts, (start, stop), kv_own, None if even or not pairs else pairs)


class _Levels:
    """The exchanges and the inner attention for calls of one shape; see [Note: two levels]."""

    def __init__(self, strategy: Ulysses, attention: Attention, q, k, v) -> None:
        size = strategy.size_on(attention.ranks)
        group, inner_group = split_group(attention.group, size)
        first = attention.rank - attention.rank % size
        layouts = (attention.q_layout, attention.kv_layout)
        geometry = _geometry(peers_of(group), first, *layouts, q.shape[1], k.shape[1])
        # One message for all three, unless keys are cut differently from queries.
        self._messages = (slice(0, 3),) if len(geometry.exchanges) == 1 else (slice(0, 1), slice(1, 3))
        shapes = (q.shape, k.shape, v.shape)
        self._group = None if group is None else ref(group)
        ways = zip(geometry.exchanges, self._messages, strict=True)
        self._ways = [Direct(way, shapes[which], self._group) for way, which in ways]
        self._geometry, self._q_shape = geometry, tuple(q.shape)
        self._like_queries: dict[int, Direct] = {}
        start, stop = geometry.own
        before = 0 if attention.heads is None else attention.heads[0]
        self.inner = replace(
            attention,
            group=inner_group,
            q_layout=geometry.layouts[0],
            kv_layout=geometry.layouts[1],
            heads=(before + start, before + stop),
        )
        self._own = slice(start, stop)
        self._heads, self._kv_heads = stop - start, geometry.kv_heads
        self._pairs = None if geometry.pairs is None else tensor_on(q.device, geometry.pairs)
        self.specs = self._residual_specs(strategy.inner, q, v)

    def like_queries(self, dim: int) -> Direct:
        """The exchange of tensors shaped like queries with a last dim ``dim``: output, its gradient, logsumexp."""
        if dim not in self._like_queries:
            self._like_queries[dim] = Direct(self._geometry.queries, ((*self._q_shape[:3], dim),), self._group)
        return self._like_queries[dim]

    def kept_in(
        self, residual: torch.Tensor | None, q: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """Buffers for the received query, key and value, for the output of these heads, and for the inner residual.

        They are views of ``residual``. Without one, only the first exist, as temporary memory.
        """
        if residual is None:
            return [q.new_empty(way.arriving) for way in self._ways], None, None
        *places, out, inner = residual_views(self.specs, residual)
        return places, out.transpose(1, 2), inner

    def _residual_specs(self, inner: Strategy, q: torch.Tensor, v: torch.Tensor) -> list[Spec]:
        """The received q, k and v of this rank's heads, their output, and the inner residual."""
        queries, keys = (layout.lengths[self.inner.rank] for layout in (self.inner.q_layout, self.inner.kv_layout))
        kv_heads = self._kv_heads if self._pairs is None else self._heads
        batch, _, _, dim, dtype = *q.shape, q.dtype
        dim_v = v.shape[3]
        tensors = (
            torch.empty(batch, *shape, dtype=dtype, device="meta")
            for shape in ((self._heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v))
        )
        kept = new_residual(inner.residual_specs(self.inner, *tensors), torch.device("meta"))
        out: Spec = ((batch, queries, self._heads, dim_v), dtype)  # in the memory order of kernel outputs
        return [*(((way.arriving,), dtype) for way in self._ways), out, ((kept.numel(),), kept.dtype)]

    def to_heads(self, places: list[torch.Tensor], *tensors: torch.Tensor) -> None:
        """Query, key and value from sequence shards to head shards: one all-to-all, or two in cross-attention."""
        arriving = [
            place if way.in_order else place.new_empty(way.arriving)
            for way, place in zip(self._ways, places, strict=True)
        ]
        ways = zip(self._ways, arriving, self._messages, strict=True)
        for pending in [way.start(wire, *tensors[which]) for way, wire, which in ways]:
            pending.wait()
        for way, wire, place in zip(self._ways, arriving, places, strict=True):
            if not way.in_order:
                way.sort(wire, place)

    def in_heads(self, places: list[torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Views of what :meth:`to_heads` wrote to ``places``."""
        ways = zip(self._ways, places, self._messages, strict=True)
        return [x for way, place, which in ways for x in way.views(place, *tensors[which])]

    def to_sequence(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """The adjoint of :meth:`to_heads`. Gradients of shared KV heads are summed. The list is emptied."""
        messages = [grads[which] for which in self._messages]
        grads.clear()
        return [x for way, message in zip(self._ways, messages, strict=True) for x in way.home(message)]

    def paired(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values arranged so that kernels pair them correctly with the query heads."""
        return (k, v) if self._pairs is None else (k.index_select(1, self._pairs), v.index_select(1, self._pairs))

    def unpaired(self, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The adjoint of :meth:`paired`."""
        if self._pairs is None:
            return grads
        shape = (self._q_shape[0], self._kv_heads)
        return tuple(x.new_zeros(*shape, *x.shape[2:]).index_add_(1, self._pairs, x) for x in grads)

    def of_heads(self, per_head_H: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's heads of a tensor that has all heads on every rank."""
        return None if per_head_H is None else per_head_H[self._own]

    def among_heads(self, own: torch.Tensor | None, like_H: torch.Tensor | None) -> torch.Tensor | None:
        """The adjoint of :meth:`of_heads`: zeros for the heads of other ranks."""
        if own is None or like_H is None:
            return None
        whole = torch.zeros_like(like_H)
        whole[self._own] = own
        return whole


@remembered(lambda arguments, value: arguments[0].nbytes + value.nbytes)
def joined(layout: SequenceLayout, size: int) -> SequenceLayout:
    """The layout of the inner level: each group of ``size`` neighbouring ranks counts as one."""
    if isinstance(held := layout.held, Stripes):
        return striped(layout.length, layout.ranks // size, block=held.block * size)
    chunks = layout.chunks
    return SequenceLayout.from_chunks(
        [chunk for own in chunks[first : first + size] for chunk in own] for first in range(0, len(chunks), size)
    )


@remembered(lambda arguments, value: arguments[0].nbytes + value.nbytes)
def _among(layout: SequenceLayout, first: int, size: int) -> SequenceLayout:
    """How the positions of ``size`` neighbouring ranks are cut among them, renumbered from 0 without gaps."""
    if isinstance(held := layout.held, Stripes):
        return striped(sum(layout.lengths[first : first + size]), size, block=held.block)
    members = layout.chunks[first : first + size]
    offsets: dict[Chunk, int] = {}
    total = 0
    for chunk in sorted(chunk for own in members for chunk in own):
        offsets[chunk] = total
        total += chunk[1] - chunk[0]
    return SequenceLayout.from_chunks(
        [(offsets[chunk], offsets[chunk] + chunk[1] - chunk[0]) for chunk in own] for own in members
    )
