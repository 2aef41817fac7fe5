"""Ring attention: one source's keys at a time."""

from __future__ import annotations

from dataclasses import dataclass

from cp_styles.strategies.moving_kv import MovingKV


@dataclass(frozen=True)
class Ring(MovingKV):
    """In step s, rank r works on the keys of rank r - s while those of rank r - s - 1 are on their way.

    Keys come straight from their owner rather than from hand to hand round the ring, so only the rows that are needed
    travel, and gradients need P - 1 hops, not P. Communication a layer, with K the bytes of one rank's keys and values:
    forward at most (P - 1) K; backward (P - 1) K in the gradient's dtype, and (P - 1) K again unless ``keep_kv``.
    Memory: two steps' keys, or with ``keep_kv`` all that were received, until the backward.
    Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023).

    Attributes:
        keep_kv: keep received keys and values for the backward instead of sending them again.
    """

    keep_kv: bool = True

    def rounds(self, rank, ranks):
        return [((rank - step) % ranks,) for step in range(1, ranks)]
