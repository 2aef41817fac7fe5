"""The plan of a rank: its tiles, and the rows that it receives and sends. Derived from layouts and mask.

A band mask (see :mod:`cp_styles.masks`) gives each query position an interval of key positions. Over a few long pieces,
each end of the interval is constant or grows by one with each position: see ``cut_into_pieces`` in linear_pieces.py.
The same holds for the interval of a source's local rows to which a local query row attends: it changes its slope only
where an end of the interval reaches another chunk. A rank cuts its own pieces at these chunks, in a few tensor
operations, and each source's part into tiles (:mod:`cp_styles.plan.tiles`). From the pieces of other ranks it computes
the own rows that they need, which it sends. No rank makes the plan of another rank.

In :class:`~cp_styles.layouts.layout.Stripes` of one position, pieces are not cut at chunks
(:mod:`cp_styles.plan.linear`): from a row to the next, an end of the interval moves by one of the source's rows, or not
at all. So causal attention to a source is one tile, a diagonal that is shifted by a row for sources above the rank. In
stripes of any size, many sources have equal tiles, which are planned once.

A mask with gaps is asked which rows of a source the queries of a rank need: see :meth:`~cp_styles.masks.Mask.needed`.
Forward and backward use the same tiles. The functions are pure: no process group, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.troubleshooting import see
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Mask
from cp_styles.masks.linear_pieces import Pieces, cut_into_pieces, has_own_work, refuse_shorter
from cp_styles.plan.linear import (
    RowRanges,
    convert_to_rows,
    find_rows_to_send,
    first_equal_sources,
    join_runs,
    make_holders,
    number_sent_rows,
)
from cp_styles.plan.rows import find_ranges, needed_tiles, refuse_contradictions
from cp_styles.plan.tiles import Tile, make_tiles


@dataclass(frozen=True)
class SourcePart:
    """The part of a plan for the keys and values of one source.

    ``rows`` are the local rows of the source to which some query of the rank attends. The key rows of ``tiles`` are
    numbered *within* ``rows``, in the order of arrival.
    """

    source: int
    rows: RowRanges
    tiles: tuple[Tile, ...]

    @cached_property
    def count(self) -> int:
        """The number of needed rows."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Plan:
    """The plan of one rank for an attention.

    Attributes:
        rank: the rank that has this plan.
        parts: a part for each source rank, also for this rank.
        sends: for each destination rank, the rows of this rank that are sent there; empty for this rank.
    """

    rank: int
    parts: tuple[SourcePart, ...]
    sends: tuple[RowRanges, ...]

    @property
    def received_rows(self) -> int:
        """The number of rows that this rank receives from other ranks."""
        return sum(part.count for part in self.parts if part.source != self.rank)


def make_plan(
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    rank: int,
    *,
    small_tiles: bool = False,
    windows: bool = False,
    gathers: bool = False,
) -> Plan:
    """The plan of ``rank`` for queries cut by ``q_layout`` and keys cut by ``kv_layout`` under ``mask``; cached.

    With ``small_tiles``, short runs are not joined into a block with an explicit mask, unless many runs attend to the
    same keys. With ``windows``, there are tiles that are bands. With ``gathers``, a mask of selected keys has one tile
    for each source, whose keys are gathered. The sent rows do not depend on these options.

    Raises:
        ValueError: the mask is of keys that were selected for another layout.
    """
    return _make_plan(q_layout, kv_layout, mask.pattern, rank, small_tiles, windows, gathers)


@remembered(64)
def _make_plan(
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    rank: int,
    small_tiles: bool,
    windows: bool,
    gathers: bool,
) -> Plan:
    if mask.only_for is not None:
        layouts, known = mask.only_for
        if (q_layout, kv_layout) != layouts:
            layout = layouts[0]
            raise ValueError(
                f"the keys were selected for queries of {layout.ranks} ranks that hold {list(layout.lengths)[:8]} "
                f"positions, in another layout than the attention's, of {list(q_layout.lengths)[:8]}: give both calls "
                "one layout, and the attention Ring() or AllGather(), for Ulysses() gives a rank queries of all ranks"
                f"{see('Keys that were selected for other queries')}"
            )
        assert known == rank, "no rank knows which keys another rank has selected"
    if mask.has_gaps:
        q, kv = ([cut.positions(each, "cpu") for each in range(cut.ranks)] for cut in (q_layout, kv_layout))
        refuse_contradictions(mask, q, kv)
        parts = [SourcePart(source, *needed_tiles(mask, q[rank], keys, gathers)) for source, keys in enumerate(kv)]
        sends = {peer: find_ranges(mask.needed(rows, kv[rank])) for peer, rows in enumerate(q) if peer != rank}
    else:
        queries, keys = make_holders(q_layout, kv_layout)
        bands = cut_into_pieces(mask, q_layout.length, kv_layout.length, queries.starts)
        bands = [queries.by_rank(pieces) for pieces in bands]
        sends = find_rows_to_send(Pieces.joined(bands), keys, rank)
        bands = [pieces.where(pieces.rank == rank) for pieces in bands]
        pieces, count = Pieces.joined(bands), len(bands)
        firsts = first_equal_sources(queries, keys, pieces)
        pieces, index = convert_to_rows(pieces, rank, queries, keys, firsts)
        pieces, rows = number_sent_rows(pieces, keys.length)
        if count > 1:  # tiles of each source and band, as if each band of a source were a source
            band = torch.repeat_interleave(torch.tensor([len(each.start) for each in bands], device="cpu"))[index]
            pieces = pieces._replace(rank=pieces.rank * count + band)
        options = {"biased": mask.has_bias, "small_tiles": small_tiles, "windows": windows}
        tiles = make_tiles(join_runs(pieces), keys.ranks * count, **options)
        if count > 1:
            numbered = [tuple([tile._replace(band=at % count) for tile in x]) for at, x in enumerate(tiles)]
            tiles = [sum(numbered[at : at + count], ()) for at in range(0, len(numbered), count)]
        parts = [
            SourcePart(source, rows.get(first, ()), tiles[first])
            for first, stop in pairwise((*firsts.tolist(), keys.ranks))
            for source in range(first, stop)
        ]
    return Plan(rank, tuple(parts), tuple(sends.get(peer, ()) for peer in range(q_layout.ranks)))


def attended_pairs(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rank: int) -> int:
    """The number of (query, key) pairs that ``rank`` computes: its work.

    Queries are cut by ``q_layout``, keys by ``kv_layout``. ``mask`` says which keys each query attends to.
    """
    return int(_work(q_layout, kv_layout.length, mask)[rank])


def imbalance(layout: SequenceLayout, mask: Mask) -> float:
    """The work of the busiest rank over the mean work of all ranks. 1.0 is perfect balance. No communication.

    Args:
        layout: the layout of queries and keys.
        mask: which keys each query attends to. A :class:`~cp_styles.PerRow` counts the work of all rows together.

    Raises:
        ValueError: the mask is for a shorter sequence.

    Example::

        assert imbalance(head_tail(1024, 4), Causal()) == 1.0
        assert imbalance(contiguous(1024, 4), Causal()) > 1.7
    """
    work = _work(layout, layout.length, mask).tolist()
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0


def _work(layout: SequenceLayout, keys: int, mask: Mask) -> torch.Tensor:
    """The number of pairs of each rank."""
    refuse_shorter(mask, layout.length)
    queries, _ = make_holders(layout, layout)
    total = torch.zeros(layout.ranks, dtype=torch.int64, device="cpu")
    for row in mask.rows:
        if has_own_work(row):
            positions = torch.arange(layout.length, device="cpu")
            holder, work = queries.holder(queries.chunk(positions)), row.work(positions, keys)
        else:
            bands = cut_into_pieces(row, layout.length, keys, queries.starts)
            pieces = Pieces.joined([queries.by_rank(pieces) for pieces in bands])
            holder, work = pieces.rank, pieces.work
        total.index_add_(0, holder, work)
    return total
