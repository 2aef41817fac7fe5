"""Bytes and predicted times of a recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cp_styles.explain.hardware import Hardware
from cp_styles.layout import SequenceLayout
from cp_styles.mixers.fragments import fragments_of

# A gated delta rule of 64 heads of 128, 32K tokens, forward and backward, takes 15.56 ms on an H800 (published by
# flash-linear-attention): 0.1 of the rate of the attention kernel. Its chunks have 64 tokens.
_RATE, _CHUNK = 0.1, 64


class StateShapes(NamedTuple):
    """A recurrence with a matrix as the state of each head, as in :func:`~cp_styles.mixers.context_recurrence`.

    Attributes:
        heads: heads of values.
        keys, values: rows and columns of a state.
        diagonal: the state decays by a number for each head or row (Mamba-2, gated linear attention), not by a matrix.
        batch: rows of the batch.
    """

    heads: int
    keys: int
    values: int
    diagonal: bool = False
    batch: int = 1

    def sent(self, layout: SequenceLayout, documents: Sequence[int] | None = None) -> list[int]:
        """Bytes that each rank sends in a forward, in float32. A backward sends as many.

        Args:
            layout: which positions each rank holds.
            documents: the lengths of packed documents; None for one.
        """
        size = 4 * self.batch * self.heads * self.keys * (self.values + (1 if self.diagonal else self.keys))
        ranks, sizes = layout.ranks, [0] * layout.ranks
        for each in fragments_of(layout, tuple(documents or (layout.length,))):
            sizes[each.rank] += 0 if each.last else size * (ranks - 1)
        return sizes

    def seconds(self, layout: SequenceLayout, documents: Sequence[int] | None, hardware: Hardware) -> float:
        """Predicted time of a forward and a backward of the rank that takes longest.

        Args:
            layout: which positions each rank holds.
            documents: the lengths of packed documents; None for one.
            hardware: the machine.
        """
        each_token = 2 * self.batch * self.heads * (2 * self.keys * self.values + _CHUNK * (self.keys + self.values))
        again = 1 + 1 / self.values if self.diagonal else 1 + self.keys / self.values  # the map, before the outputs
        runs, calls = [0.0] * layout.ranks, [0] * layout.ranks
        for each in fragments_of(layout, tuple(documents or (layout.length,))):
            twice = not (each.first or each.last)
            runs[each.rank] += (each.rows[1] - each.rows[0]) * (1 + again * twice)
            calls[each.rank] += 1 + twice
        _, bandwidth, latency = hardware.link(0, layout.ranks - 1)
        sent = max(self.sent(layout, documents))
        # A backward is twice a forward. The chunks of a fragment are one kernel; its launches are those of some others.
        kernels = max(
            3 * run * each_token / (_RATE * hardware.flops) + 6 * count * hardware.kernel_floor
            for run, count in zip(runs, calls, strict=True)
        )
        return kernels + 2 * (hardware.call_floor + (sent > 0) * (latency + sent / bandwidth))
