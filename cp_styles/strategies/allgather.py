"""All-gather attention: everybody's keys at once."""

from __future__ import annotations

from dataclasses import dataclass

from cp_styles.strategies.moving_kv import MovingKV


@dataclass(frozen=True)
class AllGather(MovingKV):
    """All other ranks' keys come in one exchange, under way while the rank works on its own.

    An all-gather that leaves out the rows nobody needs: one latency instead of a ring's P - 1.

    Communication of one attention: that of :class:`~cp_styles.strategies.ring.Ring`.

    Memory of one attention on a rank: forward and backward each hold the keys and values of the whole sequence that
    the rank needs, at most (P - 1) K, while they run. That does not shrink as ranks are added. Gradients leave source
    by source: at most two sources' are alive. Between forward and backward it keeps what a ring does.

    Source: the context parallelism of Llama 3 (Dubey et al., 2024).

    Attributes:
        keep: of how many sources the received keys and values stay for the backward; those of the others are sent
            again. 0 keeps none, a number as large as the number of ranks keeps all.
    """

    keep: int = 1

    def rounds(self, ranks):
        return [tuple(range(1, ranks))] if ranks > 1 else []
