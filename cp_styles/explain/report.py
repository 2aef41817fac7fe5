"""The report of an attention on many ranks before it runs: what each rank holds, computes, sends and keeps."""

from __future__ import annotations

import html
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cp_styles.engine.observers import attention_listener
from cp_styles.explain.dry_run import dry_run, kernel_of
from cp_styles.explain.events import RankRun, Shapes
from cp_styles.explain.hardware import Hardware, Seconds, seconds_of
from cp_styles.explain.text import format_explanation
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.masks import Causal, Mask
from cp_styles.plan import attended_pairs, imbalance
from cp_styles.strategies import Ring, Strategy, Ulysses
from cp_styles.strategies.ulysses import join_neighbours

# With more ranks than this, only a sample is simulated.
_MOST_RANKS = 16


@dataclass(frozen=True)
class Explanation:
    """One attention on ``layout.ranks`` ranks. Print it, show it in a notebook, or read its figures.

    Attributes:
        strategy, mask, kernel, shapes: the arguments of the attention.
        layout, kv_layout: the layouts of queries, and of keys and values.
        hardware: the machine for which times are predicted. None: no times.
        runs: the dry runs by rank: all of up to 16 ranks, else a sample.
    """

    strategy: Strategy
    layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    kernel: Kernel
    shapes: Shapes
    hardware: Hardware | None
    runs: dict[int, RankRun]

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return self.layout.ranks

    @property
    def node_ranks(self) -> int:
        """The ranks of a node: from the hardware, else from torchrun (LOCAL_WORLD_SIZE), else all ranks."""
        ranks = self.hardware.node_ranks if self.hardware else int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        return min(ranks or self.ranks, self.ranks)

    @cached_property
    def work(self) -> dict[int, int]:
        """(query, key) pairs of all heads that each simulated rank computes in a forward."""
        return {rank: sum(call.pairs for call in run.forward.calls) for rank, run in self.runs.items()}

    @property
    def busiest(self) -> int:
        """The simulated rank that computes the most."""
        return max(self.work, key=self.work.__getitem__)

    @cached_property
    def imbalance(self) -> float:
        """Work of the busiest simulated rank / mean work of the simulated ranks."""
        total = sum(self.work.values())
        return max(self.work.values()) * len(self.work) / total if total else 1.0

    @cached_property
    def layout_imbalance(self) -> float | None:
        """Work of the busiest rank / mean work of all ranks, by the layout alone. None in cross-attention."""
        if self.layout != self.kv_layout:
            return None
        # Ranks that exchange heads share their work equally.
        exchange = self.strategy.size_on(self.ranks) if isinstance(self.strategy, Ulysses) else 1
        return imbalance(join_neighbours(self.layout, exchange), self.mask)

    @cached_property
    def seconds(self) -> tuple[Seconds, Seconds]:
        """Predicted time of the forward and of the backward, each of its slowest rank.

        Raises:
            ValueError: there is no ``hardware``.
        """
        if self.hardware is None:
            raise ValueError("predicted times need a machine: explain(..., hardware=H100)")
        forward = max(seconds_of(run.forward, rank, self.hardware) for rank, run in self.runs.items())
        return forward, max(seconds_of(run.backward, rank, self.hardware) for rank, run in self.runs.items())

    @cached_property
    def peak_memory(self) -> int:
        """The most bytes that a simulated rank holds, without query, key, value and the output's gradient."""
        return max(max(run.forward.peak, run.backward.peak) for run in self.runs.values())

    @cached_property
    def kept_memory(self) -> int:
        """The most bytes that a simulated rank keeps from forward to backward, with its output."""
        return max(self.kept_inputs(rank) + sum(run.forward.live_at_end.values()) for rank, run in self.runs.items())

    def kept_inputs(self, rank: int) -> int:
        """The bytes of query, key and value of ``rank``; 0 if autograd does not keep them."""
        queries, keys = self.layout.lengths[rank], self.kv_layout.lengths[rank]
        return self.strategy.reads_inputs * (queries * self.shapes.query_row + keys * self.shapes.kv_row)

    def sent(self, phase: str = "forward") -> int:
        """The most bytes that a simulated rank sends in ``phase``: "forward" or "backward"."""
        return max(sum(getattr(run, phase).sent.values()) for run in self.runs.values())

    @property
    def kernel_calls(self) -> Counter[str]:
        """The number of calls of each kernel by the simulated ranks."""
        phases = [phase for run in self.runs.values() for phase in (run.forward, run.backward)]
        return Counter(call.kernel for phase in phases for call in phase.calls)

    def as_dict(self) -> dict[str, Any]:
        """The figures in types of JSON."""
        facts: dict[str, Any] = {
            "strategy": str(self.strategy),
            "mask": str(self.mask)[:200],
            "latent": self.shapes.latent,
            "ranks": self.ranks,
            "length": self.layout.length,
            "imbalance": self.imbalance,
            "layout_imbalance": self.layout_imbalance,
            "sent_forward": self.sent("forward"),
            "sent_backward": self.sent("backward"),
            "peak_memory": self.peak_memory,
            "kept_memory": self.kept_memory,
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

    def __str__(self) -> str:
        return format_explanation(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    length: int,
    *,
    ranks: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_dim: int | None = None,
    kv_length: int | None = None,
    kv_layout: SequenceLayout | Balancer | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer = head_tail,
    strategy: Strategy | None = None,
    kernel: Kernel | None = None,
    has_sink: bool = False,
    latent_dim: int | None = None,
    rotary_dim: int = 0,
    hardware: Hardware | None = None,
    rank: int | None = None,
) -> Explanation:
    """Simulate one attention over ``length`` positions on ``ranks`` ranks, forward and backward.

    The strategy itself runs without data (see :mod:`cp_styles.explain.dry_run`), so the figures are the figures of a
    real run. No process group, no communication, no device. To choose a strategy, compare ``seconds`` or ``sent()`` of
    each candidate in a loop, or run ``python -m cp_styles explain``.

    Args:
        length: number of positions of the whole sequence.
        ranks: number of ranks that share it.
        heads, kv_heads: numbers of query heads and of key/value heads. Default of kv_heads: heads.
        head_dim, value_dim: head dims of queries and keys, and of values. Default of value_dim: head_dim.
        kv_length: number of keys, for cross-attention.
        kv_layout: the layout of these keys, or the balancer that makes it. Default: as ``layout``.
        batch: rows of the batch.
        dtype, device: dtype and device type of the tensors. This machine need not have such a device.
        mask: which keys each query attends to; default ``Causal()``.
        layout: the layout, or the balancer that makes it.
        strategy: how keys and values get to the queries; default ``Ring()``.
        kernel: as in :func:`~cp_styles.context_attention`.
        has_sink: whether there are attention sinks.
        latent_dim, rotary_dim: explain :func:`~cp_styles.context_latent_attention`, where a latent of ``latent_dim``
            numbers and ``rotary_dim`` of the dims of a key travel. Without them the heads travel.
        hardware: the machine for which times are predicted. Its device replaces ``device``.
        rank: simulate only this rank. Default: all of up to 16 ranks, else a sample with the busiest rank.

    Raises:
        ValueError, NotImplementedError: for arguments that the attention itself would refuse.

    Example::

        explanation = explain(4096, ranks=4, heads=8, head_dim=64, mask=Causal(), strategy=Ring())
        print(explanation)
        assert explanation.imbalance == 1.0
    """
    mask, strategy = Causal() if mask is None else mask, strategy or Ring()
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"explain: kv_heads={kv_heads} does not divide heads={heads}")
    if ranks < 1 or length < 1:
        raise ValueError(f"explain needs at least one rank and one position, got ranks={ranks}, length={length}")
    if rank is not None and not 0 <= rank < ranks:
        raise ValueError(f"explain: rank={rank} must be one of the {ranks} ranks, 0 to {ranks - 1}")
    device = device if hardware is None else hardware.device
    if not 0 <= rotary_dim <= (head_dim if latent_dim else 0) or (latent_dim and kv_heads != heads):
        raise ValueError(
            f"explain: latent_dim={latent_dim} and rotary_dim={rotary_dim} with {heads} heads of {head_dim} and "
            f"{kv_heads} key heads: latents are expanded to all query heads, and rotary dims are a part of head_dim"
        )
    latent = (latent_dim, rotary_dim) if latent_dim else None
    shapes = Shapes(heads, kv_heads, head_dim, value_dim or head_dim, dtype, torch.device(device), batch, latent)
    if kv_length is None:
        kv_length = kv_layout.length if isinstance(kv_layout, SequenceLayout) else length
    sides = (layout, length), (kv_layout or layout, kv_length)
    cuts = [layout_made_by(cut, size, ranks) for cut, size in sides]
    mask.check((batch, heads, length, kv_length))
    mask = mask.for_heads(heads)
    return explained(
        strategy,
        (cuts[0], cuts[1]),
        mask,
        kernel_of(shapes, kernel),
        shapes,
        hardware=hardware,
        has_sink=has_sink,
        rank=rank,
    )


class explain_calls:
    """Explains the attentions that run inside a ``with``, through any door.

    ::

        with explain_calls(hardware=H100) as calls:
            model(tokens, positions)
        print(calls[0])

    The ``with`` returns a list, which is filled at its end: one :class:`Explanation` for each different call.
    Attentions inside a graph of torch.compile are included. No communication.

    Args:
        hardware: the machine for which times are predicted.
        rank: simulate only this rank. Default: as in :func:`explain`.
    """

    def __init__(self, *, hardware: Hardware | None = None, rank: int | None = None) -> None:
        self._hardware, self._rank = hardware, rank

    def __enter__(self) -> list[Explanation]:
        self._explanations: list[Explanation] = []
        self._calls: dict[Any, tuple[Any, ...]] = {}
        self._token = attention_listener.set(self._record)
        return self._explanations

    def __exit__(self, kind: object, *exception: object) -> None:
        attention_listener.reset(self._token)
        if kind is not None:
            return
        for strategy, attention, shapes, has_sink in self._calls.values():
            layouts = attention.q_layout, attention.kv_layout
            options = {"hardware": self._hardware, "rank": self._rank, "has_sink": has_sink}
            self._explanations.append(explained(strategy, layouts, attention.mask, attention.kernel, shapes, **options))

    def _record(self, strategy: Any, attention: Any, q: Any, k: Any, v: Any, sink: Any) -> None:
        shapes = Shapes.of(attention.kernel, q, k, v)
        key = strategy, attention.q_layout, attention.kv_layout, attention.mask, shapes, sink is not None
        self._calls.setdefault(key, (strategy, attention, shapes, sink is not None))


def explained(
    strategy: Strategy,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    kernel: Kernel,
    shapes: Shapes,
    *,
    hardware: Hardware | None = None,
    has_sink: bool = False,
    rank: int | None = None,
    most: int = _MOST_RANKS,
) -> Explanation:
    """:func:`explain` with other arguments. With more than ``most`` ranks, simulate a sample with the busiest rank.

    If the rank has selected keys (:func:`~cp_styles.mixers.context_select`), simulate this rank.
    """
    ranks = layouts[0].ranks
    strategy = strategy.on(ranks)
    if mask.only_for is not None:
        _, rank = mask.only_for  # which keys other ranks have selected is not known here
    if rank is not None or most <= 1:
        simulated = [busiest_rank(layouts, mask) if rank is None else rank]
    else:
        simulated = range(ranks) if ranks <= most else _sample_ranks(layouts, mask)
    runs = {each: dry_run(strategy, layouts, mask, kernel, shapes, each, has_sink=has_sink) for each in simulated}
    return Explanation(strategy, *layouts, mask, kernel, shapes, hardware, runs)


def busiest_rank(layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask) -> int:
    """The rank with the most (query, key) pairs among eight ranks that are spread evenly."""
    spread = sorted({index * (layouts[0].ranks - 1) // 7 for index in range(8)})
    return max(spread, key=lambda rank: attended_pairs(*layouts, mask, rank))


def _sample_ranks(layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask) -> list[int]:
    """The busiest rank and one in the middle; with fewer than 256 ranks also the first and the last ones."""
    # The first and the last rank exchange less with one side, and hold less. With a window and head_tail, the last but
    # one holds the most.
    ranks = layouts[0].ranks
    return sorted({busiest_rank(layouts, mask), ranks // 2, *({0, ranks - 2, ranks - 1} if ranks < 256 else ())})
