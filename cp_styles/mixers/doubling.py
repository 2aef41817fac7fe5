"""The maps of a recurrence that ranks send, so that each fragment gets the state before it: log2(fragments) rounds.

[Note: doubling] Affine maps compose in the order of positions: ``M2 (M1 S + S1) + S2``. In each round the map of a
fragment is composed with the map of the fragment ``distance`` before it, and then covers twice as many fragments. A map
that covers its document from the start has no M: its state alone is sent. In a last round each fragment gets the state
before it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles.layouts import SequenceLayout
from cp_styles.mixers.fragments import Fragment, RowExchange, row_exchange, split_fragments

Needs: TypeAlias = list[list[tuple[int, int, int, int]]]
"""For each rank, the columns that it needs: (rank that holds them, first column, first slot, number of columns)."""


def plan_rounds(
    layout: SequenceLayout, documents: tuple[int, ...], final: bool, values: int, columns: int
) -> tuple[list[Fragment], list[Needs]]:
    """The fragments that need a map (all but the last of a document; also the last of all, if ``final``), and the needs
    of each round. Columns are numbered over all maps of a rank; the first ``values`` of each map are its state. A rank
    has slots for its maps, and in the last round for the states that it needs."""
    fragments, ranks = split_fragments(layout, documents), range(layout.ranks)
    mapped: list[Fragment] = []
    begins: list[int] = []  # the number of the first map of the document
    slots, filled, last = [], [0] * layout.ranks, [[] for _ in ranks]

    def state_for(rank: int) -> tuple[int, int, int, int]:
        return mapped[-1].rank, (len(mapped) - 1) * columns, len(last[rank]) * values, values

    for fragment in fragments:
        if not fragment.first:
            last[fragment.rank].append(state_for(fragment.rank))
        if not fragment.last or (final and fragment is fragments[-1]):
            begins.append(len(mapped) if fragment.first else begins[-1])
            mapped.append(fragment)
            slots.append(filled[fragment.rank])
            filled[fragment.rank] += columns
    for rank in ranks if final else ():
        last[rank].append(state_for(rank))
    rounds, distance = [], 1
    while reached := [number for number, begin in enumerate(begins) if number - distance >= begin]:
        rounds.append([[] for _ in ranks])
        for number in reached:
            count = values if number - 2 * distance < begins[number] else columns
            source = number - distance
            rounds[-1][mapped[number].rank].append((mapped[source].rank, source * columns, slots[number], count))
        distance *= 2
    return mapped, [*rounds, last] if mapped else []


@remembered(16)
def plan_exchanges(
    layout: SequenceLayout, documents: tuple[int, ...], final: bool, values: int, columns: int, rank: int
) -> tuple[tuple[Fragment, ...], frozenset[Fragment], tuple[RowExchange, ...]]:
    """The fragments of ``rank``, the fragments of all ranks that have a map, and the exchange of each round."""
    mapped, rounds = plan_rounds(layout, documents, final, values, columns)
    ranks = range(layout.ranks)
    spans = [(fragment.rank, (number * columns, (number + 1) * columns)) for number, fragment in enumerate(mapped)]
    maps = SequenceLayout.from_chunks([span for holder, span in spans if holder == peer] for peer in ranks)
    exchanges = []
    for needs in rounds:
        rows = [[(low + at, slot + at) for _, low, slot, count in need for at in range(count)] for need in needs]
        pairs: Any = [torch.tensor(row, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1) for row in rows]
        slots = len(needs[rank]) * values if needs is rounds[-1] else maps.lengths[rank]
        exchanges.append(row_exchange(maps, pairs, slots, rank))
    fragments = tuple(fragment for fragment in split_fragments(layout, documents) if fragment.rank == rank)
    return fragments, frozenset(mapped), tuple(exchanges)
