"""The context_parallel block: it cuts buffers in place and runs this thread's attention calls on the engine.

[Note: reruns] Activation checkpointing runs a function again in the middle of a backward, possibly after the block. So
an attention call inside a checkpoint, or one that gets a cut buffer, wraps the function of that checkpoint: when it
runs again, it first enters the block again (:class:`_Rerun`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_styles._compat import running_reruns, uncompiled
from cp_styles.comm.agreement import (
    Agreement,
    Meeting,
    StatusRow,
    exchange_status,
    fingerprint,
    ledger_of,
    offer_refusal,
)
from cp_styles.comm.groups import axis_and_group
from cp_styles.engine.binding import Binding, Tally, binding_of_call
from cp_styles.engine.custom_ops import watcher
from cp_styles.engine.gradient_watch import GradientCheck
from cp_styles.engine.scope import ScopedBinding
from cp_styles.intercept.function_mode import AttentionCalls, looks_now
from cp_styles.kernels import Kernel
from cp_styles.layout import Balancer, SequenceLayout, cut_with, head_tail, layout_made_by
from cp_styles.mask import Full, Mask
from cp_styles.strategies import AllGather, Strategy
from cp_styles.torch_api.balancers import Cut, LoadBalancer, layout_of
from cp_styles.torch_api.buffers import Aliases, CutBuffer, check_buffer, dim_of
from cp_styles.troubleshooting import see

_uncompiled = partial(
    uncompiled,
    reason="a context_parallel block cuts tensors in place and communicates, which cannot be in a graph of "
    "torch.compile: compile what is called inside the block, for example the model, or leave fullgraph=True out",
)


class ContextParallelBlock(contextlib.ContextDecorator):
    """Returned by :func:`~cp_styles.torch_api.api.context_parallel`: a context manager and a decorator."""

    def __init__(
        self,
        mesh: DeviceMesh,
        buffers: Sequence[torch.Tensor] | None,
        seq_dims: Sequence[int] | None,
        no_restore: Iterable[torch.Tensor] | None,
        *,
        strategy: Strategy | None,
        layout: Cut | None,
        mask: Mask | None,
        kernel: Kernel | None,
        gradient_check: GradientCheck,
        agreement: Agreement,
    ) -> None:
        self._axis, self._group = axis_and_group("context_parallel", mesh)
        self._buffers = [] if buffers is None else buffers
        self._seq_dims = [] if seq_dims is None else seq_dims
        self._no_restore = [] if no_restore is None else list(no_restore)
        self._strategy, self._layout, self._mask, self._kernel = strategy, layout, mask, kernel
        self._checks = {"gradient_check": gradient_check, "agreement": agreement}
        self._entered: list[tuple[_BlockEntry, contextlib.ExitStack]] = []

    @_uncompiled
    def __enter__(self) -> ContextParallelBlock:
        with torch.no_grad():
            entry = agree_on("context_parallel", self._axis, self._group, self._entry, attrgetter("facts"))
        with contextlib.ExitStack() as stack:
            stack.callback(self._note_cut)
            stack.enter_context(entry.inside([part for part in entry.parts if part.restored]))
            stack.callback(_open.set, _open.get())
            ledger = entry.scoped.unscoped.ledger
            ledger.engaged = ledger.backward_began = False
            _open.set((*_open.get(), entry))
            self._entered.append((entry, stack.pop_all()))
        return self

    @_uncompiled
    def __exit__(self, *exception: Any) -> None:
        entry, stack = self._entered.pop()
        stack.__exit__(*exception)
        if isinstance(exception[1], Exception) and not ledger_of(self._group).backward_began:
            offer_refusal(
                entry.name, self._axis, self._group
            )  # others may be at a call that this rank does not come to
        computed = [part.buffer for part in entry.parts if part.restored and part.buffer.grad_fn is not None]
        if computed and exception[0] is None:
            raise RuntimeError(
                f"a buffer of shape {tuple(computed[0].shape)}, a view, was changed in place by a computation with "
                "gradient inside the block. Its values are restored, but its autograd graph cannot be: compute out of "
                "place, pass a clone of the view, or put it in no_restore_buffers"
            )

    @property
    def layout(self) -> SequenceLayout | Balancer:
        """The layout while the block is entered. Without buffers: the function that cuts any length."""
        return self._now.layout

    @property
    def strategy(self) -> Strategy:
        """The strategy while the block is entered."""
        return self._now.strategy

    @property
    def _now(self) -> _BlockEntry:
        if not self._entered:
            raise RuntimeError("a context_parallel block has a layout and a strategy only while it is entered")
        return self._entered[-1][0]

    def _note_cut(self) -> None:
        last_cut.set(None if self._layout is None else ranks_of(self._group))

    def _entry(self) -> _BlockEntry:
        """Check everything, before anything is changed."""
        pairs = pairs_of(self._buffers, self._seq_dims)
        for buffer in self._no_restore:
            if all(buffer is not other for other, _ in pairs):
                raise ValueError("no_restore_buffers must be a subset of buffers, the same tensor objects")
        for buffer, _ in pairs:
            check_buffer(buffer)
        pairs = [(buffer, dim_of(buffer, dim)) for buffer, dim in pairs]
        for buffer, dim in pairs:
            self._refuse_part(buffer, dim)
        layout = self._layout.layout if isinstance(self._layout, LoadBalancer) else self._layout
        if layout is None:
            layout = self._default_layout(pairs)
        strategy = rotation.get() if self._strategy is None else self._strategy
        name = f"context_parallel (over mesh axis {self._axis!r})"
        where, mask = (name, self._axis, self._group), self._mask or Full()
        binding = binding_of_call(*where, strategy, layout, mask, self._kernel, **self._checks)
        strategy.check_ranks(self._group.size())
        named = None if self._layout is None and not pairs else layout
        parts: dict[int, CutBuffer] = {}
        for buffer, dim in pairs:
            restored = all(buffer is not other for other in self._no_restore)
            part = CutBuffer(buffer, dim, layout_of(layout, buffer.shape[dim], self._group.size()), restored)
            if parts.setdefault(id(buffer), part).dim != dim:
                raise ValueError(f"a buffer is given twice, with sequence dims {parts[id(buffer)].dim} and {dim}")
        for part in parts.values():
            part.cut(self._group.rank())
        facts = [(dim, tuple(buffer.shape), buffer.dtype) for buffer, dim in pairs]
        outer = _open.get()[-1] if _open.get() else None
        return _BlockEntry(binding, named, list(parts.values()), facts, outer)

    def _refuse_part(self, buffer: torch.Tensor, dim: int) -> None:
        layout, rank = cut_with(buffer), self._group.rank()
        if layout is not None and layout.ranks > 1 and buffer.shape[dim] == layout.lengths[rank % layout.ranks]:
            raise ValueError(
                f"a buffer of shape {tuple(buffer.shape)} is a part of a sequence already: it was cut by a block that "
                "is still open, by a block that did not restore it (no_restore_buffers), or by a layout's shard; leave "
                "it out of buffers"
                f"{see('A buffer that was cut before')}"
            )

    def _default_layout(self, pairs: list[tuple[torch.Tensor, int]]) -> SequenceLayout | Balancer:
        lengths = [buffer.shape[dim] for buffer, dim in pairs]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the buffers have {lengths} positions in their sequence dims, which is not one sequence. For a "
                "table that is longer than the sequence, pass the view table[:length] and let the model use it. For "
                "several sequences (cross-attention), give a function that cuts each of them: layout=head_tail"
                f"{see('Buffers of different lengths')}"
            )
        return layout_made_by(head_tail, lengths[0], self._group.size()) if lengths else head_tail


class _BlockEntry:
    """One entry of a block, with everything that is needed to enter it again. See [Note: reruns]."""

    def __init__(
        self,
        binding: Binding,
        named: SequenceLayout | Balancer | None,
        parts: list[CutBuffer],
        facts: list[Any],
        outer: _BlockEntry | None,
    ) -> None:
        self.name, self.group = binding.name, binding.group
        self.layout, self.strategy = binding.layout, binding.strategy
        self.scoped = ScopedBinding(binding, named)
        self.parts, self.facts, self.outer = parts, facts, outer
        self.buffers = {id(part.buffer) for part in parts}
        self._around = {id(owner) for owner, _ in running_reruns()}

    @contextlib.contextmanager
    def inside(self, put_back: list[CutBuffer]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                undo = part.put()
                if part in put_back:
                    stack.callback(undo)
                    stack.callback(part.follow_gradient)
            if put_back:
                stack.enter_context(Aliases())
            # The binding may be that of an earlier entry, or of a block around this one.
            tally = vars(self.scoped.unscoped.tally)
            stack.callback(tally.update, dict(tally))
            tally.update(vars(Tally()))
            stack.callback(watcher.set, watcher.get())
            watcher.set(self.remember)
            stack.enter_context(_BlockCalls(self))
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Enter the block again for a recomputation. Afterwards all buffers are restored to their present data."""
        with self.outer.again() if self.outer is not None else contextlib.nullcontext(), self.inside(self.parts):
            yield

    def remember(self) -> None:
        """Make the checkpoints around the present call enter this block, and the blocks around it, when they rerun."""
        for owner, attribute in running_reruns():
            entry = next((entry for entry in self.lineage() if id(owner) not in entry._around), None)
            if entry is None:
                continue
            if attribute is None:
                if not torch.is_grad_enabled():
                    raise NotImplementedError(
                        f"{self.name}: attention inside {type(owner).__name__}, an autograd.Function. If its backward "
                        "runs the attention again, this may happen outside of the block: use torch.utils.checkpoint, "
                        "or open the block inside the function that is run again"
                    )
                continue
            fn = getattr(owner, attribute)
            if isinstance(fn, _Rerun):
                if entry in fn.entry.lineage():
                    continue
                fn = fn.fn  # the wrapper of an enclosing block, which this entry enters too
            setattr(owner, attribute, _Rerun(fn, entry))

    def lineage(self) -> Iterator[_BlockEntry]:
        """This entry and the entries of the blocks around it, innermost first."""
        entry: _BlockEntry | None = self
        while entry is not None:
            yield entry
            entry = entry.outer


@dataclass(frozen=True)
class _Rerun:
    """A function that a checkpoint runs again in a backward, and the block that it enters then."""

    fn: Callable[..., Any]
    entry: _BlockEntry

    def __call__(self, *args: Any) -> Any:
        with self.entry.again():
            return self.fn(*args)


class _BlockCalls(AttentionCalls):
    """The attention calls of a block."""

    _notes = True

    def __init__(self, entry: _BlockEntry) -> None:
        super().__init__(entry.scoped, entry.name)
        self._entry = entry
        self._last: Any = None  # the autograd node of the latest tensor that a call got

    def _looks(self) -> bool:
        self._entries = _entries[self._entry.group] = _entries.get(self._entry.group, 0) + 1
        return looks_now(self._entries)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        last, self._last = self._last, None
        if exception[0] is None and last is not None:
            self.refuse_unseen([last])

    def note(self, args: tuple[Any, ...]) -> None:
        if self._first_node >= 0:
            for value in args:
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    self._last = value.grad_fn
        if not self._entry.buffers.isdisjoint(map(id, args)):
            self._entry.remember()

    def check_reruns(self) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._entry.remember()


def agree_on(
    name: str, axis: str, group: dist.ProcessGroup, check: Callable[[], Any], facts: Callable[[Any], list[Any]]
) -> Any:
    """The result of ``check``. Raises on every rank if ``check`` fails on one, or if the ranks' ``facts`` differ."""
    results = []

    def build() -> StatusRow:
        results.append(check())
        return StatusRow(inputs=fingerprint(facts(results[0])))

    rows = exchange_status(build, Meeting.BLOCK, name, axis, group)
    if rows.alike:
        return results[0]
    odd = [rank for rank, row in enumerate(rows) if row.inputs != rows[0].inputs]
    if odd:
        raise ValueError(
            f"{name}: ranks {odd} have other buffers than rank 0: their number, shapes, dtypes and sequence dims must "
            f"be the same on all ranks; on this rank they are {facts(results[0])}"
        )
    return results[0]


def pairs_of(buffers: Sequence[Any], seq_dims: Sequence[int]) -> list[tuple[Any, int]]:
    if isinstance(buffers, torch.Tensor):
        raise TypeError("buffers must be a list of tensors, got one tensor: put it into a list")
    if len(buffers) != len(seq_dims):
        raise ValueError(f"there are {len(buffers)} buffers and {len(seq_dims)} sequence dims: give one for each")
    return list(zip(buffers, seq_dims, strict=True))


def open_on(group: dist.ProcessGroup) -> _BlockEntry | None:
    """The innermost open block over these ranks in this context."""
    return next((entry for entry in reversed(_open.get()) if ranks_of(entry.group) == ranks_of(group)), None)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


rotation: ContextVar[Strategy] = ContextVar("rotate_method", default=AllGather())  # noqa: B039 - it is frozen
# The number of blocks that were entered, by group.
_entries: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
# The blocks that are open in this context, innermost last.
_open: ContextVar[tuple[_BlockEntry, ...]] = ContextVar("context_parallel_blocks", default=())
# The ranks of the last block that ended, if its cut was not the default.
last_cut: ContextVar[tuple[int, ...] | None] = ContextVar("context_parallel_last_cut", default=None)
