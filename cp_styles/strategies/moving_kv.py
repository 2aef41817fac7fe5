"""Strategies that send keys and values to the queries: the common part of ring and all-gather attention.

Both run the same plan. They differ only in their *rounds*: which sources' keys arrive together. Every transfer goes
directly from owner to user. In the forward a rank receives exactly the rows that its queries attend to. In the backward
it sends their gradients directly to the owner. So the bytes are the bytes of the plan, the minimum for the layout.

[Note: moving tensors]
block      k and v of some rows and heads, in one message or two, see Block in schedule.py
residual   lse [B, H, L] in the accumulation dtype, then the kept messages
gradients  one message of dk and one message of dv, [B, rows, g, D] in the accumulation dtype, from user to owner
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from cp_styles._lib.bounded_cache import LatestEntries
from cp_styles._lib.compat import named_range
from cp_styles._lib.contents import REMEDY, raise_later
from cp_styles._lib.device_copies import captures_graph, tensor_on
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.group_state import state_of
from cp_styles.comm.point_to_point import PendingTransfers, exchange, open_group
from cp_styles.kernels import Kernel
from cp_styles.kernels.base import Bound, TensorSpec, TilePositions, bind_tile
from cp_styles.kernels.bias_levels import RowLevels, SplitQueries
from cp_styles.kernels.choice_by_tile import kernel_for_selected
from cp_styles.kernels.merge import EMPTY_LSE, OnlineSoftmax, RowSum, accumulation_dtype, sink_gradient
from cp_styles.kernels.packing import is_dense, part_of
from cp_styles.kernels.selected import Picks
from cp_styles.masks import Mask
from cp_styles.plan.selected import gathers_keys
from cp_styles.plan.tiles import Cover, Tile
from cp_styles.strategies.base import Attention, ResidualPlaces, Spec, Strategy
from cp_styles.strategies.packs import Call, row_index
from cp_styles.strategies.schedule import (
    Block,
    GradientMessages,
    Keys,
    Place,
    Schedule,
    Span,
    Step,
    make_schedule,
)

# With more ranges of rows, copies of rows and sums of gradients use an index of the rows.
_MAX_RANGES = 4

# The largest number of bytes of keys and values that arrive together in a forward without a backward. One key head may
# have more.
_MAX_ARRIVAL_BYTES = 2**24

# The largest number of bytes of copies of the output and of its gradient in a backward. With 32 heads of 128 in 16
# bits, these are 8K rows. Kernels for more rows take so long that a copy for each tile does not count.
_MAX_COPY_BYTES = 2**27


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
        """The distances from 1 to ``ranks - 1``, each once, in groups that arrive together.

        The source of rank r at a distance is the rank r - distance.
        """

    def on(self, ranks):
        found, name = self.rounds(ranks), type(self).__name__
        named = [distance for each in found for distance in (each if isinstance(each, Sequence) else [repr(each)])]
        if sorted(named, key=str) != sorted(range(1, ranks), key=str):
            raise ValueError(
                f"{name}.rounds({ranks}) returned {found!r}. It must return groups, which name each of the distances 1 "
                f"to {ranks - 1} once, such as {[(distance,) for distance in range(1, ranks)]}"
            )
        return self

    def without_kept_keys(self):
        return replace(self, keep=0)  # pyright: ignore[reportArgumentType] - subclasses are dataclasses

    def residual_places(self, attention, q_BHLD, k_BGMD, v_BGME):
        return self._get_setup(attention, q_BHLD, k_BGMD, v_BGME).residual

    def logsumexp(self, attention, q_BHLD, k_BGMD, v_BGME, residual):
        setup = self._get_setup(attention, q_BHLD, k_BGMD, v_BGME)
        lse_BHL = setup.residual.views(residual)[0]
        lse_BHL = lse_BHL.masked_fill(lse_BHL <= EMPTY_LSE / 2, float("-inf"))
        return lse_BHL if setup.levels is None else (lse_BHL + setup.levels.level).to(lse_BHL.dtype)

    def forward(self, attention, q_BHLD, k_BGMD, v_BGME, sink_H=None, residual=None):
        heads = at_once = k_BGMD.shape[1]
        if residual is None:  # no backward: ranges of heads in turns. All ranks use the mean number of keys of a rank
            together = max(map(len, self.rounds(attention.ranks)), default=0) * attention.kv_layout.length
            head = k_BGMD.shape[0] * (k_BGMD.shape[3] + v_BGME.shape[3]) * k_BGMD.element_size()
            at_once = max(_MAX_ARRIVAL_BYTES * attention.ranks // max(head * together, 1), 1)
        if at_once < heads:
            outs, share, before = [], q_BHLD.shape[1] // heads, attention.heads[0] if attention.heads else 0
            for first in range(0, heads, at_once):
                keys, queries = slice(first, first + at_once), slice(first * share, (first + at_once) * share)
                mask_heads = before + queries.start, before + min(queries.stop, q_BHLD.shape[1])
                known = attention.known
                turn = known.get(mask_heads) or known.setdefault(mask_heads, replace(attention, heads=mask_heads))
                sink = None if sink_H is None else sink_H[queries]
                tensors = q_BHLD[:, queries], k_BGMD[:, keys], v_BGME[:, keys]
                outs.append(self.forward(turn, *tensors, sink).transpose(1, 2))
            return torch.cat(outs, 2).transpose(1, 2)
        setup = self._get_setup(attention, q_BHLD, k_BGMD, v_BGME)
        q = q_BHLD if setup.levels is None else setup.levels.zero_drowned(q_BHLD)
        steps = setup.prepare("forward", attention, attention.kernel, q, k_BGMD, v_BGME)
        run = _Run(setup, steps, attention, k_BGMD, v_BGME, residual)
        shape = *q.shape[:3], setup.out_dim
        merged = OnlineSoftmax(shape, setup.dtype, q.device, q_BHLD, merge=attention.kernel.merge)
        queries = _Queries(attention.kernel, (q,))
        for step, work in steps:
            arrived = run.wait_for_keys(step)
            with named_range("step", step.number, "attend to keys of", *step.sources):
                for _, calls in work:
                    for call in calls:
                        out, lse = run.compute(call, queries, arrived[call.keys.arrival])
                        merged.add(call.q_heads, call.tile.q, out, lse, call.q_index)
                        del out, lse  # free the memory for the next tile
            del arrived  # free the memory for the next message
        del queries
        if sink_H is not None:
            merged.add_sink(sink_H, setup.levels and setup.levels.level)
        out, lse = merged.result()
        if residual is not None:
            run.lse.copy_(lse)
        return out if out.dtype == q_BHLD.dtype else out.to(q_BHLD.dtype)

    def backward(self, attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H=None):
        setup = self._get_setup(attention, q_BHLD, k_BGMD, v_BGME)
        kernel, levels, q = attention.kernel, setup.levels, q_BHLD
        if levels is not None and levels.drowned is not None:
            kernel, q = SplitQueries(kernel), levels.split_queries(q_BHLD)
        steps = setup.prepare("backward", attention, kernel, q, k_BGMD, v_BGME)
        run = _Run(setup, steps, attention, k_BGMD, v_BGME, residual)
        dq_sum = RowSum(q.shape, setup.wide, q.device)
        returns = _GradientReturn(run)
        queries = _Queries(kernel, (grad_BHLE, q, out_BHLE, run.lse))
        for step, work in steps:
            arrived = run.wait_for_keys(step)
            # Source by source, so that the gradients of at most one source wait to be sent.
            for messages, calls in work:
                assert messages is not None  # in a backward
                gradients = []
                if messages.keys is not None:
                    gradients = run.compute_gradients(messages.keys, calls, queries, arrived, dq_sum)
                returns.send(messages, gradients)
            del arrived  # free the memory for the next message
        del queries
        dq, dk, dv = dq_sum.result(), *returns.result()
        if q.shape != q_BHLD.shape:
            dq = dq[..., : q_BHLD.shape[3]]
        dsink = None if sink_H is None else sink_gradient(sink_H, grad_BHLE, out_BHLE, run.lse, levels and levels.level)
        return dq.to(q_BHLD.dtype), dk.to(k_BGMD.dtype), dv.to(v_BGME.dtype), dsink

    def _get_setup(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Setup:
        key = self, q.shape, k.shape, v.shape, q.dtype, q.device
        known = attention.known
        return known.get(key) or known.setdefault(key, _make_setup(self, attention, q, k, v))


class _Call(NamedTuple):
    """A call of the kernel for a tile or a pack, prepared for all runs of a schedule."""

    bound: Bound  # the kernel, for tiles of this shape
    keys: Keys
    tile: Call
    q_heads: Span
    kv_heads: Span  # numbered in ``keys``
    part: tuple[Span, Span]  # heads and rows, numbered in the arrival of the keys: for a pack, all rows of the keys
    places: tuple[Place, Place] | None  # of the part in the buffer. None for this rank's own keys
    q_index: torch.Tensor | None  # the rows of a pack
    kv_index: torch.Tensor | None


# The work of a step: the calls with each of its keys, in a backward with the exchange of the gradients.
_Work: TypeAlias = list[tuple[GradientMessages | None, list[_Call]]]
_PreparedSteps: TypeAlias = list[tuple[Step, _Work]]


@dataclass(frozen=True, eq=False)
class _Setup:
    """The part of a run that does not depend on tensor values. It is the same at every layer and step.

    Attributes:
        schedule: the steps of this rank.
        levels: the levels that are subtracted from the biases of an additive mask; None if no row has a level.
        wide: the dtype in which results of tiles are summed, and gradients travel. The dtype of the inputs for a single
            tile without messages.
        dtype: the dtype of tiles.
        residual: the logsumexp, then the messages that are kept.
        out_dim: the head dim of the output.
    """

    schedule: Schedule
    levels: RowLevels | None
    wide: torch.dtype
    dtype: torch.dtype
    residual: ResidualPlaces
    out_dim: int
    _prepared: dict[Any, _PreparedSteps] = field(init=False, default_factory=dict, repr=False)

    def prepare(self, phase: str, attention: Attention, kernel: Kernel, *tensors: torch.Tensor) -> _PreparedSteps:
        """The steps of a phase, with the kernel bound to their tiles. ``tensors``: query, key and value. Cached."""
        key = phase, kernel.switches()
        known = self._prepared.get(key)
        if known is None:
            steps = self.schedule.backward if phase == "backward" else self.schedule.forward
            binder = _Binder(phase, attention, kernel, tensors, self.dtype)
            known = self._prepared[key] = [(step, binder.prepare(step)) for step in steps]
        return known


@dataclass(frozen=True, eq=False)
class _Binder:
    """Binds the kernel to the tiles of a schedule."""

    phase: str
    attention: Attention
    kernel: Kernel
    tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    bounds: dict[Any, Bound] = field(default_factory=dict)

    def prepare(self, step: Step) -> _Work:
        if self.phase == "forward":
            return [(None, self._calls_with(step, keys)) for keys in step.keys]
        return [(x, [] if x.keys is None else self._calls_with(step, x.keys)) for x in step.gradients]

    def _calls_with(self, step: Step, keys: Keys) -> list[_Call]:
        arrival, (first, stop), count = step.arrivals[keys.arrival], keys.q_heads, keys.block.shape[2]
        arrived = arrival.block if step.travels or arrival.kept is not None else None
        # One call, or one for each query head if tiles are copies in a wider dtype.
        heads = [(keys.q_heads, (0, count))]
        if self.dtype != self.tensors[0].dtype:
            places = ((head, (head - first) * count // (stop - first)) for head in range(first, stop))
            heads = [((head, head + 1), (key_head, key_head + 1)) for head, key_head in places]
        if self.phase == "forward":
            return [self._bind(arrived, keys, tile, *each) for tile in keys.calls for each in heads]
        return [self._bind(arrived, keys, tile, *each) for each in heads for tile in keys.calls]

    def _bind(self, arrived: Block | None, keys: Keys, tile: Call, q_heads: Span, kv_heads: Span) -> _Call:
        """``arrived``: the block in the buffer of the keys. None for this rank's own keys."""
        query, rows = self.tensors[0], (tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0])
        pack = q_index = kv_index = places = None
        if not isinstance(tile, Tile):
            key, tables = (tile, query.shape[0], query.device), self.attention.tables
            pack, q_index, kv_index = tables.get(key) or tables.setdefault(key, tile.on(*key[1:]))
            rows = sum(pack.lengths[0]), sum(pack.lengths[1])
        first = keys.block.heads[0]  # the arrival has all heads
        part = (first + kv_heads[0], first + kv_heads[1]), tile.kv if kv_index is None else (0, keys.block.shape[1])
        if arrived is not None:
            places = arrived.places(*part)
        copies = arrived is None or kv_index is not None or self.dtype != query.dtype
        sizes = (q_heads[1] - q_heads[0], rows[0]), *[(kv_heads[1] - kv_heads[0], rows[1])] * 2
        key = sizes, tile.cover, tile.window, id(pack), copies
        if key not in self.bounds:
            specs = [
                TensorSpec(torch.Size((x.shape[0], *size, x.shape[3])), self.dtype, x.device, in_message=not copies)
                for x, size in zip(self.tensors, sizes, strict=True)
            ]
            options = {"causal": tile.cover is Cover.CAUSAL, "scale": self.attention.scale, "pack": pack}
            options |= {"biased": tile.cover is Cover.PARTIAL, "window": tile.window}
            kernel = kernel_for_selected(self.kernel) if tile.cover is Cover.SELECTED else self.kernel
            assert kernel is not None
            self.bounds[key] = bind_tile(kernel, self.phase, specs, **options)
        return _Call(self.bounds[key], keys, tile, q_heads, kv_heads, part, places, q_index, kv_index)


def _make_setup(strategy: MovingKV, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Setup:
    layouts, mask, kernel = (attention.q_layout, attention.kv_layout), attention.mask, attention.kernel
    for layout, rank, group in kernel.only_for:
        here = attention.group.group_name if attention.group else group
        if (layout, rank, group) != (layouts[0], attention.rank, here):
            raise ValueError(
                f"the score_mod reads query_rows of rank {rank} of {list(layout.lengths)[:8]} queries, in another "
                f"layout, or of other ranks, than the attention's, of {list(layouts[0].lengths)[:8]}: give both calls "
                "one layout and one mesh, and the attention Ring() or AllGather(), for Ulysses() gives a rank queries "
                f"of all ranks{see('Rows of other queries')}"
            )
    rounds = tuple(map(tuple, strategy.rounds(attention.ranks)))
    shapes = (tuple(x.shape) for x in (q, k, v))
    # A tile of several sources must not be a copy.
    joins = q.shape[0] == 1 and kernel.streams_keys and kernel.tile_dtype(q.dtype) == q.dtype
    gathers = kernel_for_selected(kernel) is not None and gathers_keys(mask, q.shape[1], k.shape[1])
    options = kernel.small_tiles, kernel.windows, joins, rounds, strategy.keep
    wide = accumulation_dtype(q.dtype)
    widening = wide.itemsize // q.dtype.itemsize
    schedule = make_schedule(*layouts, mask.pattern, attention.rank, *options, *shapes, widening, gathers)
    levels = None
    # Tensors on the meta device have no biases.
    if mask.additive and q.numel() and attention.kv_layout.length and q.device.type != "meta":
        positions = attention.q_layout.positions(attention.rank, q.device)
        biases, keys = partial(_masked_bias, mask, attention.heads, wide), attention.kv_layout.length
        # The host waits for a GPU once for each content of a mask. In inference mode the content has no version.
        content = repr(mask), mask.content, attention.heads, attention.q_layout, attention.rank
        waits = q.device.type != "cpu" and not torch.is_inference_mode_enabled()
        key = (*content, keys, wide, kernel.positional) if waits else None
        # No row is drowned with a score_mod, which may change the logits of a query of zeros.
        read = partial(_read_once, key)
        levels = RowLevels.find(biases, positions, keys, wide, drowns=not kernel.positional, read=read)
    # Results of tiles are summed if there are several, or if drowned rows are computed separately.
    sums = schedule.tiles > 1 or (levels is not None and levels.drowned is not None)
    # With another dim of the value, torch's attention on one device computes in the wider dtype too.
    widens = sums or v.shape[-1] != q.shape[-1]
    lse: Spec = (tuple(q.shape[:3]), wide)
    wide = wide if widens or attention.ranks > 1 else q.dtype
    residual = ResidualPlaces([lse, *(((size,), k.dtype) for size in schedule.kept)])
    tile_dtype = kernel.tile_dtype(q.dtype) if widens and not gathers else q.dtype
    return _Setup(schedule, levels, wide, tile_dtype, residual, kernel.dims(k, v)[1])


_level_flags: LatestEntries[Any, list[bool]] = LatestEntries(256)


def _read_once(key: Any, flags: torch.Tensor) -> list[bool]:
    """The numbers of ``flags``, cached for ``key`` unless it is None."""
    known = None if key is None else _level_flags.get(key)
    if known is None:
        return _read_on_host(flags) if key is None else _level_flags.put(key, _read_on_host(flags))
    if not all(known) and not captures_graph():
        unknown = (flags > tensor_on(flags.device, known, torch.bool)).any()
        raise_later(unknown, f"an additive mask was filled again. {REMEDY}")
    return known


def _read_on_host(flags: torch.Tensor) -> list[bool]:
    return flags.tolist()


# [Note: memory] A step waits for its message, then starts the next message, and computes meanwhile. So at most three
# messages of keys are alive, forward and backward, for any number of ranks: the current keys, the next ones, and this
# rank's keys that are being sent. In a forward on a GPU, small messages come in pairs, because a tile of two sources
# needs one merge: see _PAIRED in schedule.py. A forward without a backward computes one range of heads after another:
# messages of a range take at most 16 MiB, or have one key head.
#
# While three messages are alive, a backward computes by groups of key heads and sends the gradients of each group,
# which take at most half the bytes of queries. Kept keys come first, and are computed at once, as the last keys are.
# Own keys come last, with all heads: their results become the sums. Until then sums have the rows of received gradients
# alone. In 16 bits, where sums are wider than keys, a backward always computes by groups. On a GPU, a group fills the
# device (_LEAST_BLOCKS in schedule.py), and the output and its gradient are copied once by the heads of groups
# (_MAX_COPY_BYTES). A tile in float32 of inputs in 16 bits has copies of one query head at a time.
class _Run:
    """One rank's run of its schedule: sends messages in order, and computes with received keys.

    The constructor starts the first transfers. Call :meth:`wait_for_keys` for each of ``steps``, in order.
    """

    def __init__(self, setup: _Setup, steps: _PreparedSteps, attention: Attention, k, v, residual) -> None:
        self.setup, self.attention, self.rank = setup, attention, attention.rank
        self.k, self.v, self.group = k, v, attention.group
        self.state = None if attention.group is None else state_of(attention.group)
        # The logsumexp, then the kept messages.
        self.lse, *self._kept = setup.residual.views(residual) if residual is not None else [k.new_empty(0)]
        self.number = 0  # of the present step
        self._to_start = iter(steps)
        self._pending: tuple[list[torch.Tensor], PendingTransfers] | None = None
        self._packed: dict[Block, tuple[torch.Tensor, ...]] = {}
        self.by_index = k.device.type != "cpu"  # a launch for each range takes as long as a copy on a GPU
        if self.by_index:
            open_group(attention.group, k.device)
        self._start_next()

    def wait_for_keys(self, step: Step) -> list[Any]:
        """Wait for the keys of a step, and start the next transfers. Returns a buffer for each of its arrivals, or k
        and v for this rank's own keys."""
        self.number = step.number
        if step.travels:
            assert self._pending is not None
            arrived, pending = self._pending
            self._pending = None
            with named_range("step", step.number, "wait for keys of", *step.sources):
                pending.wait()  # before the next messages are packed, so that sent messages can be freed
            self._start_next()
            return arrived
        own = partial(Block.copy_or_view, k_BGMD=self.k, v_BGME=self.v)
        return [
            own(x.block, index=self.index(x.block)) if x.kept is None else self._kept[x.kept] for x in step.arrivals
        ]

    def compute(self, call: _Call, queries: _Queries, keys: Any) -> tuple[torch.Tensor, ...]:
        """The results of a call of the kernel, with ``keys`` that :meth:`wait_for_keys` has returned."""
        # A method, so that the mask of a tile and copies of the arguments end with it. They are as large as the tile.
        if call.places is None:
            k, v = part_of(keys[0], *call.part), part_of(keys[1], *call.part)
        else:
            first, (of_k, of_v) = keys.storage_offset(), call.places
            k = keys.as_strided(of_k.size, of_k.strides, first + of_k.offset)
            v = keys.as_strided(of_v.size, of_v.strides, first + of_v.offset)
        if call.kv_index is not None:
            k, v = (part_of(x, (0, x.shape[1]), (0, 0), call.kv_index) for x in (k, v))
        if k.dtype != self.setup.dtype:
            k, v = k.to(self.setup.dtype), v.to(self.setup.dtype)
        options: dict[str, Any] = {}
        if call.tile.cover is Cover.PARTIAL:
            queries.latest = None, None  # free the memory for the mask
            options["bias"] = self._make_bias(call)
        if call.tile.cover is Cover.SELECTED:
            options["picks"] = self._make_picks(call)
        if self.attention.kernel.positional:
            first = 0 if self.attention.heads is None else self.attention.heads[0]
            options["where"] = TilePositions(*self._positions(call), first + call.q_heads[0])
        return call.bound.run(queries.select(call, self.setup.dtype), k, v, **options)

    def compute_gradients(
        self, keys: Keys, calls: list[_Call], queries: _Queries, arrived: list[Any], dq: RowSum
    ) -> list[torch.Tensor]:
        """dk and dv for some keys, in any dtype. Gradients of queries are added to ``dq``.

        Keys that no later group of heads has are removed from ``arrived``.
        """
        of_arrival = arrived[keys.arrival]
        if keys.is_last:
            arrived[keys.arrival] = None
        batch, rows, heads, _ = keys.block.shape
        with named_range("step", self.number, "gradients with keys of", keys.source):
            if len(calls) == 1 and calls[0].kv_index is None and calls[0].tile.kv == (0, rows):
                tile_dq, *gradients = self.compute(calls[0], queries, of_arrival)
                dq.add(calls[0].q_heads, calls[0].tile.q, tile_dq, calls[0].q_index)
                return gradients
            dk, dv = (RowSum((batch, heads, rows, dim), self.setup.wide, self.k.device) for dim in keys.block.dims)
            for call in calls:
                tile_dq, tile_dk, tile_dv = self.compute(call, queries, of_arrival)
                dq.add(call.q_heads, call.tile.q, tile_dq, call.q_index)
                dk.add(call.kv_heads, call.tile.kv, tile_dk, call.kv_index)
                dv.add(call.kv_heads, call.tile.kv, tile_dv, call.kv_index)
                del tile_dq, tile_dk, tile_dv
        return [dk.result(), dv.result()]

    def _start_next(self) -> None:
        """Start the transfers of the next step that has transfers."""
        for step, _ in self._to_start:
            if step.travels:
                break
        else:
            self._packed = {}
            return
        with named_range("step", step.number, "start keys of", *step.sources):
            kept, new = self._kept, self.k.new_empty  # kept keys arrive in the residual
            buffers = [new(x.block.size) if x.kept is None or not kept else kept[x.kept] for x in step.arrivals]
            # A block is packed once for all ranks of a step, and for the next step if it sends the same block.
            before, packed = self._packed, {}
            if before:
                self._packed = before = {block: before[block] for _, block in step.sends if block in before}
            for _, block in step.sends:
                if block not in packed:
                    packed[block] = before[block] if block in before else block.pack(self.k, self.v, self.index(block))
            self._packed = packed
            receives = []
            for arrival, buffer in zip(step.arrivals, buffers, strict=True):
                parts = buffer.split_with_sizes(arrival.sizes) if arrival.sizes[1:] else (buffer,)
                receives += zip(arrival.sources, parts, strict=True)
            sends = [(rank, message) for rank, block in step.sends for message in packed[block]]
            self._pending = buffers, exchange(sends, receives, self.group, self.state)

    def index(self, block: Block) -> torch.Tensor | None:
        """The index of the rows of a block. None for at most _MAX_RANGES ranges, and on a CPU."""
        if not self.by_index or len(block.rows) <= _MAX_RANGES:
            return None
        key, tables = (block, self.k.device), self.attention.tables
        return tables[key] if key in tables else tables.setdefault(key, row_index(block.rows, self.k.device))

    def _positions(self, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Global positions of the queries and of the keys of a tile."""
        attention, device, keys, tile = self.attention, self.k.device, call.keys, call.tile
        if device.type == "meta":  # shapes only
            q_rows, kv_rows = (self.k.new_empty(stop - start, dtype=torch.int64) for start, stop in (tile.q, tile.kv))
            return q_rows, kv_rows
        q_positions = attention.q_layout.positions(attention.rank, device, rows=tile.q)
        pieces, row = [], 0  # row: the index of the first row of a range, among the rows of the block
        for start, stop in keys.block.rows:
            low, high = max(tile.kv[0], row), min(tile.kv[1], row + stop - start)
            if low < high:
                rows = start + low - row, start + high - row
                pieces.append(attention.kv_layout.positions(keys.source, device, rows=rows))
            row += stop - start
        return q_positions, pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _make_bias(self, call: _Call) -> torch.Tensor:
        attention, levels, dtype = self.attention, self.setup.levels, self.setup.dtype
        first = 0 if attention.heads is None else attention.heads[0]
        heads = first + call.q_heads[0], first + call.q_heads[1]
        mask = attention.mask if call.tile.band is None else attention.mask.bands[call.tile.band]
        bias = _masked_bias(mask, heads, dtype, *self._positions(call))
        return (bias if levels is None else levels.subtract(bias, call.q_heads, call.tile.q)).to(dtype)

    def _make_picks(self, call: _Call) -> Picks:
        attention, (q_positions, kv_positions) = self.attention, self._positions(call)
        first = 0 if attention.heads is None else attention.heads[0]
        heads = first + call.q_heads[0], first + call.q_heads[1]
        bounds, key_heads = attention.mask.bounds(q_positions), call.kv_heads[1] - call.kv_heads[0]
        return attention.mask.selected.picks(call.keys.source, kv_positions, bounds, len(self.k), heads, key_heads)


def _masked_bias(
    mask: Mask, heads: Span | None, dtype: torch.dtype, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor
) -> torch.Tensor:
    """The bias of some heads, -inf outside of the band. In ``dtype`` for masks without a bias."""
    outside = ~mask.allowed(q_positions_L, kv_positions_M)
    bias = mask.bias(q_positions_L, kv_positions_M)
    if bias is None:
        return torch.zeros(outside.shape, dtype=dtype, device=outside.device).masked_fill_(outside, float("-inf"))
    if heads is not None and bias.ndim > 2 and bias.shape[-3] > 1:
        bias = bias.narrow(-3, heads[0], heads[1] - heads[0])
    return bias.to(outside.device).masked_fill(outside, float("-inf"))


class _Queries:
    """The arguments of a kernel that depend on queries, from (query,) or from (grad, query, out, logsumexp)."""

    # A kernel with ``dense_rows`` would copy grad and out of a range of heads at each tile. So each range is copied
    # once, if the copies are small: see [Note: memory].

    def __init__(self, kernel: Kernel, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, (query,) = tensors, tensors[1:2] or tensors
        self._narrow, self._everything = query.dtype, ((0, query.shape[1]), (0, query.shape[2]))
        small = bool(tensors[1:]) and tensors[0].nbytes + tensors[2].nbytes <= _MAX_COPY_BYTES
        self._copies = small and kernel.dense_rows
        self._by_heads = {} if self._copies else {self._everything[0]: tensors}
        self.latest: tuple[Any, Any] = None, None

    def select(self, call: _Call, dtype: torch.dtype) -> Any:
        """The arguments of a call, in ``dtype``. Unless they are copies, they are kept for the next call."""
        before, arguments = self.latest
        if before == (call.bound, call.q_heads, call.tile.q):
            return arguments
        self.latest = before, arguments = None, None  # free the memory first
        group, (first, stop), rows = call.keys.q_heads, call.q_heads, call.tile.q
        tensors = self.of_heads(group)
        if call.q_heads != group or rows != self._everything[1] or call.q_index is not None:
            tensors = [part_of(x, (first - group[0], stop - group[0]), rows, call.q_index) for x in tensors]
        if dtype != self._narrow:
            return call.bound.queries([x.to(dtype) if x.dtype == self._narrow else x for x in tensors])
        arguments = call.bound.queries(tensors)
        if call.q_index is None and call.tile.cover is not Cover.PARTIAL:
            self.latest = (call.bound, call.q_heads, call.tile.q), arguments
        return arguments

    def of_heads(self, heads: Span) -> Sequence[torch.Tensor]:
        """The tensors of a range of query heads."""
        if heads not in self._by_heads:
            if any(heads[0] < stop and start < heads[1] for start, stop in self._by_heads):
                self._by_heads.clear()  # overlapping ranges belong to another step
            grad, query, out, lse = [part_of(x, heads, self._everything[1]) for x in self._tensors]
            if self._copies:
                grad, out = [
                    x if is_dense(x.shape, x.stride(), (0, 2, 1, 3)) else x.transpose(1, 2).contiguous().transpose(1, 2)
                    for x in (grad, out)
                ]
                lse = lse.contiguous()
            self._by_heads[heads] = grad, query, out, lse
        return self._by_heads[heads]


class _GradientReturn:
    """Sends gradients of keys and values to their owners, and sums the gradients of this rank's rows."""

    # A transfer starts when its gradients are computed. The order is the same on all ranks, because NCCL and gloo match
    # the messages of two ranks by order. Received gradients are added before the next transfer starts.

    def __init__(self, run: _Run) -> None:
        self._run = run
        wide, device = run.setup.wide, run.k.device
        self._sums = RowSum(run.k.shape, wide, device), RowSum(run.v.shape, wide, device)
        self._pending: tuple[GradientMessages, list[torch.Tensor], PendingTransfers] | None = None

    def send(self, messages: GradientMessages, gradients: list[torch.Tensor]) -> None:
        """Add the gradients of ``messages.keys`` to the sums if the keys are this rank's. Otherwise send them.

        ``gradients`` is [dk, dv], or empty if there are none. It is emptied.
        """
        run = self._run
        if messages.keys is not None and messages.source == run.rank:
            self._add_to_sums(messages.keys.block, gradients)
            del gradients[:]
            return
        self._finish_transfer()
        with named_range("step", run.number, "start gradients to", messages.source):
            # No copy if the gradients are wide, with the memory order [B, rows, g, D] of fused kernels.
            dtype = run.setup.wide
            sends = [(messages.source, x) for x in _by_rows(gradients, dtype)]
            del gradients[:]
            received = []
            if messages.block is not None:
                shape = messages.block.shape[:3]
                received = [run.k.new_empty((*shape, dim), dtype=dtype) for dim in messages.block.dims]
            pending = exchange(sends, [(messages.peer, x) for x in received], run.group, run.state)
        self._pending = messages, received, pending

    def result(self) -> list[torch.Tensor]:
        """``[dk, dv]`` of this rank's rows, summed over all ranks."""
        self._finish_transfer()
        return list(map(RowSum.result, self._sums))

    def _finish_transfer(self) -> None:
        if self._pending is None:
            return
        (messages, gradients, pending), number = self._pending, self._run.number
        self._pending = None
        with named_range("step", number, "wait for gradients of", messages.peer):
            pending.wait()
        if messages.block is not None:
            self._add_to_sums(messages.block, [x.transpose(1, 2) for x in gradients])

    def _add_to_sums(self, block: Block, gradients: Sequence[torch.Tensor]) -> None:
        if len(block.rows) == 1:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.add(block.heads, block.rows[0], gradient)
            return
        index = self._run.index(block)
        if index is not None:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.add(block.heads, (block.rows[0][0], block.rows[-1][1]), gradient, index)
            return
        at = 0
        for start, stop in block.rows:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.add(block.heads, (start, stop), gradient[:, :, at : at + stop - start])
            at += stop - start


def _by_rows(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous tensors [B, L, H, D] in ``dtype``."""
    rows = [x.transpose(1, 2) for x in tensors]
    if not rows or rows[0].dtype == dtype:
        return [x.contiguous() for x in rows]
    return [x.to(dtype, memory_format=torch.contiguous_format) for x in rows]


@dataclass(frozen=True)
class Ring(MovingKV):
    """In step s, rank r computes with the keys of rank r - s, while the keys of rank r - s - 1 are being sent.

    Each rank sends its keys directly to the ranks that need them, and not from neighbour to neighbour. So only needed
    rows are sent, and gradients need P - 1 hops instead of P.

    Communication of one attention. K is the bytes of one rank's keys and values, G the bytes of their gradients
    (float32 or wider). Forward: at most (P - 1) K. Backward: (P - 1) G, and again the keys that were not kept, (P - 1 -
    keep) K.

    Memory of one attention on one rank, for any number of ranks. Q is the bytes of its queries (or of the output).
    Between forward and backward: the inputs, the output, its logsumexp, and at most ``keep`` K. In the forward: Q for
    the output, three messages, and the result of a tile; on a GPU up to six, of at most 64 MiB each in 16 bits. In the
    backward: the gradients, three messages, and gradients of three groups of key heads: one is computed, one is sent,
    and one arrives. See [Note: memory] in moving_kv.py.
    In 16 bits gradients are summed in float32; on CPU tiles are computed in float32, from copies of one head.
    tutorials/performance.md has the bytes.

    Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023).

    Attributes:
        keep: number of sources whose received keys and values are kept for the backward. Keys and values of other
            sources are sent again. 0 keeps none; the number of ranks keeps all.

    Raises:
        ValueError: ``keep`` is not an integer, or negative.

    Example::

        style = AttentionContextParallel(strategy=Ring(keep=0))  # the least memory
    """

    keep: int = 1

    def rounds(self, ranks):
        return [(distance,) for distance in range(1, ranks)]


@dataclass(frozen=True)
class AllGather(MovingKV):
    """The keys of all other ranks arrive in one exchange, which runs while the rank computes with its own keys.

    It is an all-gather without the rows that the rank does not need. It has one latency; a ring has P - 1.

    Communication of one attention: as :class:`Ring`.

    Memory of one attention on one rank: forward and backward each hold all keys and values that the rank needs, at most
    (P - 1) K, while they run. This does not shrink with more ranks. Gradients are sent source by source, so at most
    keys of two sources are alive. Between forward and backward it keeps what a ring keeps.

    Source: the context parallelism of Llama 3 (Dubey et al., 2024).

    Attributes:
        keep: as in :class:`Ring`.

    Raises:
        ValueError: ``keep`` is not an integer, or negative.

    Example::

        style = AttentionContextParallel(strategy=AllGather())
    """

    keep: int = 1

    def rounds(self, ranks):
        return [tuple(range(1, ranks))] if ranks > 1 else []
