"""All-gather attention: the keys of all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass

from cp_styles.strategies.moving_kv import MovingKV


@dataclass(frozen=True)
class AllGather(MovingKV):
    """The keys of all other ranks arrive in one exchange, which runs while the rank computes with its own keys.

    It is an all-gather without the rows that the rank does not need. It has one latency, where a ring has P - 1.

    Communication of one attention: that of :class:`~cp_styles.strategies.ring.Ring`.

    Memory of one attention on one rank: forward and backward each hold all keys and values that the rank needs, at most
    (P - 1) K, while they run. This does not shrink with more ranks. Gradients are sent source by source, so at most
    those of two sources are alive. Between forward and backward it keeps what a ring keeps.

    Source: the context parallelism of Llama 3 (Dubey et al., 2024).

    Attributes:
        keep: number of sources whose received keys and values are kept for the backward. Those of other sources are
            sent again. 0 keeps none; the number of ranks keeps all.

    Raises:
        ValueError: ``keep`` is not an integer, or negative.

    Example::

        style = AttentionContextParallel(strategy=AllGather())
    """

    keep: int = 1

    def rounds(self, ranks):
        return [tuple(range(1, ranks))] if ranks > 1 else []
