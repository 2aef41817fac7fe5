"""What an attention on many ranks will do, before it runs: what each rank holds, computes, sends and keeps."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from cp_styles.engine.run import listener
from cp_styles.explain.candidates import layouts_for, problem_of, strategies_for
from cp_styles.explain.hardware import Hardware, Seconds, seconds_of
from cp_styles.explain.picture import plot
from cp_styles.explain.rehearse import RankRun, Shapes, TooManyCalls, kernel_of, planning_seconds, rehearse
from cp_styles.explain.states import ChannelShapes, ExplainedMixer, RowShapes, StateShapes
from cp_styles.explain.text import text_of
from cp_styles.kernels import SDPA_KERNELS, Kernel, ReferenceKernel
from cp_styles.layout import Balancer, SequenceLayout, head_tail, layout_made_by
from cp_styles.mask import Causal, Mask, PerRow
from cp_styles.mixers.fragments import MixerCall
from cp_styles.plan import attended_pairs, imbalance, make_plan
from cp_styles.strategies import Ring, Strategy, Ulysses
from cp_styles.strategies.ulysses import joined

# Up to this many ranks all are rehearsed; of more, some.
_ALL = 16
# Another strategy with more kernel calls than these, and than twice the calls of the explained one, is only named slow.
_MANY = 500
# Rows and columns of a heatmap.
_CELLS = 32


@dataclass(frozen=True)
class Explanation:
    """One attention on ``layout.ranks`` ranks. Print it, show it in a notebook, or call :meth:`plot`.

    Attributes:
        strategy, mask, kernel, shapes: the attention that is explained.
        layout, kv_layout: the layouts of queries, and of keys and values.
        hardware: the machine for which times are predicted. None: no times.
        runs: the rehearsed ranks, by rank: all of up to 16 ranks, else some of them.
        others: runs of other strategies for the same attention, if they are known. Else they are rehearsed.
    """

    strategy: Strategy
    layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    kernel: Kernel
    shapes: Shapes
    hardware: Hardware | None
    runs: dict[int, RankRun]
    others: Mapping[Strategy, Mapping[int, RankRun]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return self.layout.ranks

    @property
    def node_ranks(self) -> int:
        """The ranks of a node: of the hardware, else as torchrun says (LOCAL_WORLD_SIZE), else all."""
        ranks = self.hardware.node_ranks if self.hardware else int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        return min(ranks or self.ranks, self.ranks)

    @cached_property
    def work(self) -> dict[int, int]:
        """(query, key) pairs of all heads that each rehearsed rank computes in a forward."""
        return {rank: sum(call.pairs for call in run.forward.calls) for rank, run in self.runs.items()}

    @property
    def busiest(self) -> int:
        """The rehearsed rank that computes the most."""
        return max(self.work, key=self.work.__getitem__)

    @cached_property
    def imbalance(self) -> float:
        """Work of the busiest over the mean work, of the rehearsed ranks."""
        total = sum(self.work.values())
        return max(self.work.values()) * len(self.work) / total if total else 1.0

    @cached_property
    def seconds(self) -> tuple[Seconds, Seconds]:
        """Predicted time of the forward and of the backward, each of the rank that takes longest.

        Raises:
            ValueError: there is no ``hardware``.
        """
        if self.hardware is None:
            raise ValueError("times need to know the machine: explain(..., hardware=H100)")
        forward = max(seconds_of(run.forward, rank, self.hardware) for rank, run in self.runs.items())
        return forward, max(seconds_of(run.backward, rank, self.hardware) for rank, run in self.runs.items())

    @cached_property
    def planning(self) -> float:
        """Seconds in which this machine's CPU makes the plan of one rank, for a new mask or layout (timed).

        They are not in :attr:`seconds`, because plans are cached. With packed documents every batch is new.
        """
        cuts = self.layout, self.kv_layout
        return planning_seconds(self.strategy, cuts, self.mask, self.kernel, self.shapes, self.busiest)

    @cached_property
    def peak_memory(self) -> int:
        """The most bytes that a rehearsed rank holds beside query, key, value and the output's gradient."""
        return max(max(run.forward.peak, run.backward.peak) for run in self.runs.values())

    @cached_property
    def kept_memory(self) -> int:
        """The most bytes that a rehearsed rank keeps from forward to backward, its output included."""
        return max(self.kept_inputs(rank) + sum(run.forward.left.values()) for rank, run in self.runs.items())

    def kept_inputs(self, rank: int) -> int:
        """The bytes of query, key and value of ``rank``; 0 if autograd does not keep them."""
        queries, keys = self.layout.lengths[rank], self.kv_layout.lengths[rank]
        return self.strategy.reads_inputs * (queries * self.shapes.query_row + keys * self.shapes.kv_row)

    def sent(self, phase: str = "forward") -> int:
        """The most bytes that a rehearsed rank sends in ``phase``: "forward" or "backward"."""
        return max(sum(getattr(run, phase).sent.values()) for run in self.runs.values())

    @cached_property
    def heatmap(self) -> tuple[list[int], list[tuple[int, int]], list[list[float]]]:
        """Ranks (rows), ranges of ranks (columns), and what share of the pairs of queries and keys the tiles cover."""
        mask = self.mask.row(0) if isinstance(self.mask, PerRow) else self.mask
        rows = _spread(self.ranks, _CELLS)
        step = -(-self.ranks // _CELLS)
        columns = [(first, min(first + step, self.ranks)) for first in range(0, self.ranks, step)]
        lines, how = [], {"small_tiles": self.kernel.small_tiles, "windows": self.kernel.windows}
        for rank in rows:
            plan = make_plan(self.layout, self.kv_layout, mask, rank, **how)
            queries, keys = self.layout.lengths[rank], self.kv_layout.lengths
            covered = [sum(tile.pairs for tile in part.tiles) for part in plan.parts]
            whole = [(sum(covered[first:last]), queries * sum(keys[first:last])) for first, last in columns]
            lines.append([pairs / most if most else 0.0 for pairs, most in whole])
        return rows, columns, lines

    @cached_property
    def kernels(self) -> list[tuple[str, str]]:
        """Each kernel that was considered, and why it is used or not."""
        phases = [phase for run in self.runs.values() for phase in (run.forward, run.backward)]
        used = Counter(call.kernel for phase in phases for call in phase.calls)
        flash = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        what = f"calls on {len(self.runs)} ranks; the first that takes these tensors"
        active = {name: f". Flash attention is {flash}" if flash and "flash" in name else "" for name in used}
        lines = [(name, f"{count} {what}{active[name]}") for name, count in used.items()]
        tensors: Any = self.shapes.named(1, 1)
        for kernel in (*SDPA_KERNELS, ReferenceKernel()):
            name = getattr(kernel, "name", type(kernel).__name__)
            why = "another one that takes these tensors comes first"
            if any(name in other for other in used):
                continue
            try:
                kernel.check(*tensors, biased=False)
            except NotImplementedError as problem:
                why = str(problem)
            lines.append((name, f"not used: {why}"))
        return lines

    @cached_property
    def considered(self) -> list[tuple[str, str]]:
        """Other layouts and strategies, and what they would change or why they are not possible."""
        return [*_other_layouts(self), *_other_strategies(self)]

    def as_dict(self) -> dict[str, Any]:
        """The figures, as JSON takes them."""
        facts: dict[str, Any] = {
            "strategy": str(self.strategy),
            "mask": str(self.mask)[:200],
            "ranks": self.ranks,
            "length": self.layout.length,
            "imbalance": self.imbalance,
            "layout_imbalance": self.layout_imbalance,
            "sent_forward": self.sent("forward"),
            "sent_backward": self.sent("backward"),
            "peak_memory": self.peak_memory,
            "kept_memory": self.kept_memory,
            "planning": self.planning,
        }
        if self.hardware is not None:
            forward, backward = self.seconds
            facts |= {"hardware": self.hardware.name, "forward": forward._asdict(), "backward": backward._asdict()}
        facts["by_rank"] = {
            rank: {
                "pairs": self.work[rank],
                "sent": [dict(run.forward.sent), dict(run.backward.sent)],
                "received": [dict(run.forward.received), dict(run.backward.received)],
                "memory": run.backward.parts,
            }
            for rank, run in self.runs.items()
        }
        return facts

    @property
    def layout_imbalance(self) -> float | None:
        """Work of the busiest over the mean work, of all ranks, by the layout alone. None in cross-attention.

        Ranks that exchange heads (Ulysses) share their work equally.
        """
        if self.layout != self.kv_layout:
            return None
        return self.imbalance_with(self.layout)

    def imbalance_with(self, layout: SequenceLayout) -> float:
        """The same with another layout for as many ranks."""
        exchange = self.strategy.size_on(self.ranks) if isinstance(self.strategy, Ulysses) else 1
        return imbalance(joined(layout, exchange), self.mask)

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def plot(self, path: str | None = None) -> Any:
        """A figure of the heatmap, work, bytes and memory by rank; written to ``path`` if given. Needs matplotlib."""
        return plot(self, path)


def explain(
    length: int,
    *,
    ranks: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_dim: int | None = None,
    kv_length: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer = head_tail,
    strategy: Strategy | None = None,
    kernel: Kernel | None = None,
    sink: bool = False,
    hardware: Hardware | None = None,
    rank: int | None = None,
) -> Explanation:
    """What one attention over ``length`` positions on ``ranks`` ranks does, forward and backward.

    The strategy itself runs without data (see :mod:`cp_styles.explain.rehearse`), so the figures are those of a real
    run. No process group, no communication, no device.

    Args:
        length: number of positions of the whole sequence.
        ranks: number of ranks that share it.
        heads, kv_heads: numbers of query heads and of key/value heads. Default: as many key heads as query heads.
        head_dim, value_dim: head dims of queries and keys, and of values. Default: the same.
        kv_length: number of keys, for cross-attention.
        batch: rows of the batch.
        dtype, device: dtype and device type of the tensors. This machine need not have such a device.
        mask: which keys each query attends to; default ``Causal()``.
        layout: the layout, or the balancer that makes it.
        strategy: how keys and values get to the queries; default ``Ring()``.
        kernel: as in :func:`~cp_styles.context_attention`.
        sink: whether there are attention sinks.
        hardware: the machine for which times are predicted. Its device replaces ``device``.
        rank: explain only this rank. Default: all of up to 16 ranks, else some of them, among them the busiest.

    Raises:
        ValueError, NotImplementedError: for what the attention itself would refuse.

    Example::

        made = explain(4096, ranks=4, heads=8, head_dim=64, mask=Causal(), strategy=Ring())
        print(made)
        assert made.imbalance == 1.0
    """
    mask, strategy = Causal() if mask is None else mask, strategy or Ring()
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"explain: kv_heads={kv_heads} does not divide heads={heads}")
    if ranks < 1 or length < 1:
        raise ValueError(f"explain needs at least one rank and one position, got ranks={ranks}, length={length}")
    if rank is not None and not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} among {ranks} ranks")
    device = device if hardware is None else hardware.device
    shapes = Shapes(heads, kv_heads, head_dim, value_dim or head_dim, dtype, torch.device(device), batch)
    cuts = [layout_made_by(layout, size, ranks) for size in (length, length if kv_length is None else kv_length)]
    mask.check((batch, heads, length, cuts[1].length))
    return explained(
        strategy, (cuts[0], cuts[1]), mask, kernel_of(shapes, kernel), shapes, hardware=hardware, sink=sink, rank=rank
    )


class explain_calls:
    """Explains the attentions that run inside a ``with``, through any door.

    ::

        with explain_calls(hardware=H100) as calls:
            model(tokens, positions)
        print(calls[0])

    The ``with`` returns a list, which is filled at its end: one :class:`Explanation` for each different call, and after
    these one :class:`ExplainedMixer` for each different call of :mod:`cp_styles.mixers`. Attentions inside a graph of
    torch.compile are included. No communication.

    Args:
        hardware: the machine for which times are predicted.
        rank: explain only this rank. Default: as in :func:`explain`.
    """

    def __init__(self, *, hardware: Hardware | None = None, rank: int | None = None) -> None:
        self._hardware, self._rank = hardware, rank

    def __enter__(self) -> list[Any]:
        self._explanations: list[Any] = []
        self._calls: dict[Any, tuple[Any, ...]] = {}
        self._mixers: Counter[ExplainedMixer] = Counter()
        self._token = listener.set(self._note)
        return self._explanations

    def __exit__(self, kind: object, *exception: object) -> None:
        listener.reset(self._token)
        if kind is not None:
            return
        for strategy, attention, shapes, sink in self._calls.values():
            layouts = attention.q_layout, attention.kv_layout
            options = {"hardware": self._hardware, "rank": self._rank, "sink": sink}
            self._explanations.append(explained(strategy, layouts, attention.mask, attention.kernel, shapes, **options))
        self._explanations += [call._replace(calls=count) for call, count in self._mixers.items()]

    def _note(self, call: Any, attention: Any = None, q: Any = None, k: Any = None, v: Any = None, sink: Any = None):
        if isinstance(call, MixerCall):
            shapes = {"rows": RowShapes, "states": StateShapes, "channels": ChannelShapes}[call.kind](**call.sizes)
            self._mixers[ExplainedMixer(shapes, call.cut.layout, call.cut.documents, self._hardware)] += 1
            return
        shapes = Shapes(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device, q.shape[0])
        key = call, attention.q_layout, attention.kv_layout, attention.mask, shapes, sink is not None
        self._calls.setdefault(key, (call, attention, shapes, sink is not None))


def explained(
    strategy: Strategy,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    kernel: Kernel,
    shapes: Shapes,
    *,
    hardware: Hardware | None = None,
    sink: bool = False,
    rank: int | None = None,
    memory: bool = True,
    most: int = _ALL,
) -> Explanation:
    """:func:`explain`, from the parts. Of more than ``most`` ranks, some are rehearsed: the busiest is one of them."""
    ranks = layouts[0].ranks
    strategy = strategy.on(ranks)
    chosen = [rank] if rank is not None else range(ranks) if ranks <= most else _sample(layouts[0], mask, most)
    options = {"sink": sink, "memory": memory}
    runs = {r: rehearse(strategy, layouts, mask, kernel, shapes, r, **options) for r in chosen}
    return Explanation(strategy, *layouts, mask, kernel, shapes, hardware, runs)


def _sample(layout: SequenceLayout, mask: Mask, most: int) -> list[int]:
    """The ranks to rehearse: the busiest of some; of fewer than 256 ranks also the first and the last."""
    busiest = max(_spread(layout.ranks, 8), key=lambda rank: attended_pairs(layout, layout, mask, rank))
    return [busiest] if most <= 1 or layout.ranks >= 256 else sorted({0, busiest, layout.ranks - 1})


def _spread(ranks: int, most: int) -> list[int]:
    """Up to ``most`` ranks, evenly, the first and the last among them."""
    if ranks <= most:
        return list(range(ranks))
    return sorted({index * (ranks - 1) // (most - 1) for index in range(most)})


def _other_layouts(explanation: Explanation) -> Iterator[tuple[str, str]]:
    if explanation.layout != explanation.kv_layout:
        return
    current = explanation.imbalance_with(explanation.layout)
    for name, balancer in layouts_for(explanation.mask).items():
        layout = layout_made_by(balancer, explanation.layout.length, explanation.ranks)
        if layout == explanation.layout:
            continue
        other = explanation.imbalance_with(layout)
        verdict = "balances better" if other < current - 0.005 else "no better" if other < current + 0.005 else "worse"
        yield f"layout {name}", f"imbalance {other:.3f} instead of {current:.3f}: {verdict}"


def _other_strategies(explanation: Explanation) -> Iterator[tuple[str, str]]:
    rank, cuts = explanation.busiest, (explanation.layout, explanation.kv_layout)
    current = explanation.runs[rank]
    call = cuts, explanation.mask, explanation.kernel, explanation.shapes, rank
    most_calls = max(_MANY, *(2 * len(phase.calls) for phase in (current.forward, current.backward)))
    for strategy in strategies_for(explanation.ranks, explanation.hardware):
        if strategy == explanation.strategy:
            continue
        if problem := problem_of(strategy, explanation.ranks, explanation.shapes):
            yield str(strategy), f"rejected: {problem}"
            continue
        try:
            other = explanation.others.get(strategy, {}).get(rank)
            if other is None or max(len(other.forward.calls), len(other.backward.calls)) > most_calls:
                other = rehearse(strategy, *call, most_calls=most_calls)
        except TooManyCalls as many:
            yield str(strategy), f"slow: {many} in a forward or a backward"
            continue
        sent = [sum(run.forward.sent.values()) + sum(run.backward.sent.values()) for run in (current, other)]
        memory = other.backward.peak / max(current.backward.peak, 1)
        yield str(strategy), f"bytes x{sent[1] / max(sent[0], 1):.2f}, peak memory x{memory:.2f}"
