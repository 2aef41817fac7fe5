"""All-gather attention: everybody's keys at once."""

from __future__ import annotations

from dataclasses import dataclass

from cp_styles.strategies.moving_kv import MovingKV


@dataclass(frozen=True)
class AllGather(MovingKV):
    """All other ranks' keys come in one exchange, under way while the rank works on its own.

    An all-gather that leaves out the rows nobody needs. Same bytes as :class:`~cp_styles.strategies.ring.Ring`, one
    latency instead of P - 1, and memory for all keys a rank needs at once.
    Source: the context parallelism of Llama 3 (Dubey et al., 2024).

    Attributes:
        keep_kv: keep received keys and values for the backward instead of sending them again.
    """

    keep_kv: bool = True

    def rounds(self, rank, ranks):
        return [tuple((rank - step) % ranks for step in range(1, ranks))] if ranks > 1 else []
