"""Which maps of a recurrence travel, so that each fragment gets the state before it: in log2 of their number rounds.

[Note: doubling] Affine maps compose in the order of positions: ``M2 (M1 S + S1) + S2``. In each round a fragment's map
is composed with that of the fragment ``distance`` before it, and reaches back twice as far. One that reaches back to
the start of its document has no M, and its state travels alone. In a last round each fragment gets the state before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch

from cp_styles.bounded_cache import remembered
from cp_styles.layout import Chunk, SequenceLayout
from cp_styles.mixers.fragments import Fragment, RowExchange, fragments_of, row_exchange

Round: TypeAlias = tuple[tuple[tuple[int, bool] | None, ...], ...]
"""For each rank and each of its slots, whose map goes there, by its number, and whether without M; None for zeros."""


class Maps(NamedTuple):
    """The maps of one call, in the order of positions.

    Attributes:
        fragments: whose they are.
        rounds: those of doubling have a slot for each map, the last one for each fragment that does not begin a
            document, and for the final state. Empty if there are no maps.
    """

    fragments: tuple[Fragment, ...]
    rounds: tuple[Round, ...]

    def sent(self, rank: int) -> Iterator[tuple[int, int, bool]]:
        """For each map that ``rank`` sends to another one: the round, its number, and whether its state is alone."""
        for number, each in enumerate(self.rounds):
            for peer, slots in enumerate(each):
                yield from ((number, *slot) for slot in slots if slot and self.fragments[slot[0]].rank == rank != peer)


@remembered
def maps_of(layout: SequenceLayout, documents: tuple[int, ...], final: bool) -> Maps:
    """Those of the fragments after which their document goes on; and of the last one of all if its state is wanted."""
    fragments, ranks = fragments_of(layout, documents), range(layout.ranks)
    mapped: list[Fragment] = []
    begins: list[int] = []  # the number of the first map of the document
    states: list[list[tuple[int, bool] | None]] = [[] for _ in ranks]
    for each in fragments:
        if not each.first:
            states[each.rank].append((len(mapped) - 1, True))
        if not each.last or (final and each is fragments[-1]):
            begins.append(len(mapped) if each.first else begins[-1])
            mapped.append(each)
    if final:
        for slots in states:
            slots.append((len(mapped) - 1, True))
    rounds, distance = [], 1
    while any(number - begin >= distance for number, begin in enumerate(begins)):
        needs = [
            (number - distance, number - 2 * distance < begin) if number - distance >= begin else None
            for number, begin in enumerate(begins)
        ]
        rounds.append(tuple(tuple(needs[n] for n, each in enumerate(mapped) if each.rank == rank) for rank in ranks))
        distance *= 2
    return Maps(tuple(mapped), (*rounds, tuple(map(tuple, states))) if mapped else ())


@remembered
def exchanges_of(
    layout: SequenceLayout, documents: tuple[int, ...], final: bool, values: int, columns: int, rank: int
) -> tuple[RowExchange, ...]:
    """What ``rank`` sends and receives in each round: columns of maps, of which the state has ``values``."""
    mapped, rounds = maps_of(layout, documents, final)
    owned: list[list[Chunk]] = [[] for _ in range(layout.ranks)]
    for number, each in enumerate(mapped):
        owned[each.rank].append((number * columns, (number + 1) * columns))
    held, exchanges = SequenceLayout.from_chunks(owned), []
    for each in rounds:
        width, needs = (values if each is rounds[-1] else columns), []
        for slots in each:
            spans = [
                (need[0] * columns + at, slot * width + at)
                for slot, need in enumerate(slots)
                for at in range((values if need[1] else columns) if need else 0)
            ]
            rows = torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 2)
            needs.append((rows[:, 0], rows[:, 1]))
        exchanges.append(row_exchange(held, needs, len(each[rank]) * width, rank))
    return tuple(exchanges)
