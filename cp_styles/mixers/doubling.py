"""Which maps of a recurrence travel, so that each fragment gets the state before it: in log2 of their number rounds.

[Note: doubling] Affine maps compose in the order of positions: ``M2 (M1 S + S1) + S2``. In each round a fragment's map
is composed with the map of the fragment ``distance`` before it, and reaches back twice as far. A map that reaches back
to the start of its document has no M, and its state travels alone. In a last round each fragment gets the state before
it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.layout import SequenceLayout
from cp_styles.mixers.fragments import Fragment, RowExchange, fragments_of, row_exchange

Needs: TypeAlias = list[list[tuple[int, int, int, int]]]
"""For each rank, from which other one it needs which columns, for which of its slots: (holder, first, slot, count)."""


def rounds_of(
    layout: SequenceLayout, documents: tuple[int, ...], final: bool, values: int, columns: int
) -> tuple[list[Fragment], list[Needs]]:
    """The fragments that have a map: those after which their document goes on, and the last one of all if its state is
    wanted. And what is needed in each round. The columns of all maps are counted on; of each, its state has the first
    ``values``. A rank has slots for its maps, and in the last round for the states that it needs."""
    fragments, ranks = fragments_of(layout, documents), range(layout.ranks)
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
def exchanges_of(
    layout: SequenceLayout, documents: tuple[int, ...], final: bool, values: int, columns: int, rank: int
) -> tuple[tuple[Fragment, ...], frozenset[Fragment], tuple[RowExchange, ...]]:
    """The fragments of ``rank``, the fragments of all ranks that have a map, and what it exchanges in each round."""
    mapped, rounds = rounds_of(layout, documents, final, values, columns)
    ranks = range(layout.ranks)
    spans = [(fragment.rank, (number * columns, (number + 1) * columns)) for number, fragment in enumerate(mapped)]
    maps = SequenceLayout.from_chunks([span for holder, span in spans if holder == peer] for peer in ranks)
    exchanges = []
    for needs in rounds:
        rows = [[(low + at, slot + at) for _, low, slot, count in need for at in range(count)] for need in needs]
        pairs: Any = [torch.tensor(row, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1) for row in rows]
        slots = len(needs[rank]) * values if needs is rounds[-1] else maps.lengths[rank]
        exchanges.append(row_exchange(maps, pairs, slots, rank))
    fragments = tuple(fragment for fragment in fragments_of(layout, documents) if fragment.rank == rank)
    return fragments, frozenset(mapped), tuple(exchanges)
