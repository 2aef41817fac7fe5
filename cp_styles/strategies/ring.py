"""Ring attention: one source's keys at a time."""

from __future__ import annotations

from dataclasses import dataclass

from cp_styles.strategies.moving_kv import MovingKV


@dataclass(frozen=True)
class Ring(MovingKV):
    """In step s, rank r computes with the keys of rank r - s, while those of rank r - s - 1 are being sent.

    Each rank sends its keys directly to the ranks that need them, and not from neighbour to neighbour. So only needed
    rows are sent, and gradients need P - 1 hops instead of P.

    Communication of one attention. K is the bytes of one rank's keys and values, G those of their gradients (float32 or
    wider). Forward: at most (P - 1) K. Backward: (P - 1) G, and again the keys that were not kept, (P - 1 - keep) K.

    Memory of one attention on one rank, for any number of ranks. Q is the bytes of its queries (or of the output).
    Between forward and backward: the inputs, the output, its logsumexp, and at most ``keep`` K. In the forward: Q for
    the output, three messages, and the result of a tile. In the backward: the gradients, three messages, and gradients
    of three messages: one is computed, one is sent, and one arrives. With more than two ranks a message is at most the
    smaller of K and Q: see [Note: memory] in moving_kv.py. In 16 bits gradients are summed in float32, and on CPU tiles
    are computed in float32, from copies of query, output and its gradient. tutorials/costs.md has the bytes.

    Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023).

    Attributes:
        keep: number of sources whose received keys and values are kept for the backward. Those of other sources are
            sent again. 0 keeps none; the number of ranks keeps all.

    Raises:
        ValueError: ``keep`` is not an integer, or negative.

    Example::

        style = AttentionContextParallel(strategy=Ring(keep=0))  # the least memory
    """

    keep: int = 1

    def rounds(self, ranks):
        return [(distance,) for distance in range(1, ranks)]
