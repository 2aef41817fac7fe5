"""Bytes and predicted times of token mixers that are no attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cp_styles.collectives.heads import head_ranges
from cp_styles.explain import text
from cp_styles.explain.hardware import Hardware
from cp_styles.layout import SequenceLayout
from cp_styles.mixers.doubling import Needs, rounds_of
from cp_styles.mixers.fragments import fragments_of, rows_before
from cp_styles.mixers.roll import rolled

# A gated delta rule of 64 heads of 128, 32K tokens, forward and backward, takes 15.56 ms on an H800 (published by
# flash-linear-attention): 0.1 of the rate of the attention kernel. Its chunks have 64 tokens.
_RATE, _CHUNK = 0.1, 64


class MixerShapes:
    """The shapes of a token mixer."""

    def sent(self, layout: SequenceLayout, documents: Sequence[int] | None = None) -> list[int]:
        """Bytes that each rank sends in a forward. In a backward all ranks together send as many.

        ``layout``: which positions each rank holds. ``documents``: the lengths of packed documents; None for one.
        """
        raise NotImplementedError

    def seconds(self, layout: SequenceLayout, documents: Sequence[int] | None, hardware: Hardware) -> float:
        """Predicted time of a forward and a backward of the rank that takes longest, on ``hardware``.

        ``layout`` and ``documents`` are those of :meth:`sent`.
        """
        _, bandwidth, latency = hardware.link(0, layout.ranks - 1)
        sent = max(self.sent(layout, documents))
        floor = hardware.call_floor + (sent > 0) * latency
        messages = self.messages(layout, documents) * floor + sent / bandwidth
        return self.kernels(layout, documents, hardware) + 2 * messages

    def messages(self, layout: SequenceLayout, documents: Sequence[int] | None) -> int:
        """How often a rank waits for others in a forward; ``layout`` and ``documents`` are those of :meth:`sent`."""
        return 1

    def kernels(self, layout: SequenceLayout, documents: Sequence[int] | None, hardware: Hardware) -> float:
        """The part of :meth:`seconds` without messages; its arguments."""
        raise NotImplementedError


@dataclass(frozen=True)
class StateShapes(MixerShapes):
    """A recurrence with a matrix as the state of each head, as in :func:`~cp_styles.mixers.context_recurrence`.

    Attributes:
        heads: heads of values.
        keys, values: rows and columns of a state.
        diagonal: the state decays by a number for each head or row (Mamba-2, gated linear attention), not by a matrix.
        batch: rows of the batch.
        itemsize: bytes of a number of a state: 4, or 8 of float64.
        final: the state after the last token is wanted, as in a prefill.
    """

    heads: int
    keys: int
    values: int
    diagonal: bool = False
    batch: int = 1
    itemsize: int = 4
    final: bool = False

    def sent(self, layout, documents=None):
        column, sizes = self.itemsize * self.batch * self.heads * self.keys, [0] * layout.ranks
        for needs in self._rounds(layout, documents):
            for rank, of_rank in enumerate(needs):
                for holder, _, _, count in of_rank:
                    sizes[holder] += column * count * (holder != rank)
        return sizes

    def messages(self, layout, documents):
        return len(self._rounds(layout, documents))

    def _rounds(self, layout: SequenceLayout, documents: Sequence[int] | None) -> list[Needs]:
        columns, sizes = self.values + (1 if self.diagonal else self.keys), tuple(documents or (layout.length,))
        return rounds_of(layout, sizes, self.final, self.values, columns)[1]

    def kernels(self, layout, documents, hardware):
        each_token = 2 * self.batch * self.heads * (2 * self.keys * self.values + _CHUNK * (self.keys + self.values))
        again = 1 + 1 / self.values if self.diagonal else 1 + self.keys / self.values  # the map, before the outputs
        runs, calls = [0.0] * layout.ranks, [0] * layout.ranks
        for fragment in fragments_of(layout, tuple(documents or (layout.length,))):
            twice = not (fragment.first or fragment.last)
            runs[fragment.rank] += (fragment.rows[1] - fragment.rows[0]) * (1 + again * twice)
            calls[fragment.rank] += 1 + twice
        # A backward is twice a forward. The chunks of a fragment are one kernel; its launches are those of some others.
        return max(
            3 * run * each_token / (_RATE * hardware.flops) + 6 * count * hardware.kernel_floor
            for run, count in zip(runs, calls, strict=True)
        )


@dataclass(frozen=True)
class RowShapes(MixerShapes):
    """A causal convolution, as in :func:`~cp_styles.mixers.context_causal_conv1d`. Its time is that of its memory.

    Attributes:
        width: number of taps.
        row: bytes of a token, in all rows of the batch.
        roll: of a :func:`~cp_styles.mixers.context_roll` its shifts, and whether it wraps around.
    """

    width: int
    row: int
    roll: tuple[int, bool] | None = None

    def sent(self, layout, documents=None):
        documents, ranks = tuple(documents or (layout.length,)), range(layout.ranks)
        if self.roll is None:
            plans = [rows_before(layout, documents, self.width - 1, rank)[0].sent for rank in ranks]
        else:
            plans = [rolled(layout, documents, *self.roll, rank)[0].sent for rank in ranks]
        return [self.row * sum(plan[peer] for peer in ranks if peer != rank) for rank, plan in enumerate(plans)]

    def kernels(self, layout, documents, hardware):
        # Rows are put before the fragments, these are laid out in order, convolved, and taken out again.
        return 3 * (8 * max(layout.lengths) * self.row / hardware.copy_bandwidth + 4 * hardware.op_floor)


@dataclass(frozen=True)
class ChannelShapes(MixerShapes):
    """A kernel by channels, as in :func:`~cp_styles.mixers.context_recurrence`. Its time is that of its memory.

    Attributes:
        channels: how many.
        item: bytes of one channel of a token, in all rows of the batch.
        tensors: numbers of a channel of a token in the tensors that are cut by channels, beside the output.
        shared: bytes of a token in tensors that all channels need.
        final: bytes of the last state of one channel, in all rows of the batch, if it is wanted.
        out: numbers of a channel of a token in the output.
    """

    channels: int
    item: int
    tensors: int
    shared: int
    final: int = 0
    out: int = 1

    def sent(self, layout, documents=None):
        parts = [high - low for low, high in head_ranges(self.channels, self.channels, layout.ranks)]
        sizes = []
        for part, length in zip(parts, layout.lengths, strict=True):
            others = sum(map(bool, parts)) - bool(part)
            there = self.tensors * self.item * (self.channels - part) + self.shared * others
            last = part * self.final * (layout.ranks - 1)
            sizes.append(length * there + (layout.length - length) * part * self.item * self.out + last)
        return sizes

    def kernels(self, layout, documents, hardware):
        each_token = (self.tensors + self.out) * self.item * -(-self.channels // layout.ranks) + self.shared
        return 3 * (layout.length * each_token / hardware.copy_bandwidth + hardware.kernel_floor)


class ExplainedMixer(NamedTuple):
    """Equal calls of a token mixer.

    Attributes:
        shapes: of one of them.
        layout, documents: how its sequence is cut, and the lengths of its documents.
        hardware: the machine for which times are predicted. None: no times.
        calls: how many there were.
    """

    shapes: MixerShapes
    layout: SequenceLayout
    documents: tuple[int, ...]
    hardware: Hardware | None
    calls: int = 1

    def __str__(self) -> str:
        sent, hardware = max(self.shapes.sent(self.layout, self.documents)), self.hardware
        most = f"of {self.layout.ranks} ranks one sends {text.nbytes(sent)} at most in a forward"
        if hardware is not None:
            time = text.seconds(self.shapes.seconds(self.layout, self.documents, hardware))
            most += f", {time} with its backward on {hardware.name}"
        return f"{self.calls} x {self.shapes}: {most}"
