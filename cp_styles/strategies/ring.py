"""Ring attention: one source's keys at a time."""

from __future__ import annotations

from dataclasses import dataclass

from cp_styles.strategies.moving_kv import MovingKV


@dataclass(frozen=True)
class Ring(MovingKV):
    """In step s, rank r works on the keys of rank r - s while those of rank r - s - 1 are on their way.

    Keys come straight from their owner rather than from hand to hand round the ring, so only the rows that are needed
    travel, and gradients need P - 1 hops, not P.

    Communication of one attention, with K the bytes of one rank's keys and values and G those of their gradients, which
    are float32 at least: forward at most (P - 1) K; backward (P - 1) G, and once more the keys of the sources that are
    not kept, (P - 1 - keep) K.

    Memory of one attention on a rank, for any number of ranks, with Q the bytes of its queries (and of the output):
    between forward and backward the inputs, the output, its logsumexp and at most ``keep`` K. In the forward at most
    Q for the output and three messages, one of a tile's results among them; in the backward the gradients, and at most
    two messages and two gradients of them that travel. A message is at most the smaller of K and Q, where there are
    more than two ranks; see [Note: memory] in moving_kv.py. ``tests/ranks/engine/test_memory.py`` pins these numbers.

    Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023).

    Attributes:
        keep: of how many sources the received keys and values stay for the backward; those of the others are sent
            again. 0 keeps none, a number as large as the number of ranks keeps all.
    """

    keep: int = 1

    def rounds(self, ranks):
        return [(distance,) for distance in range(1, ranks)]
