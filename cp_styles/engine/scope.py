"""SequenceScope: the layout and mask of one batch, for the context-parallel modules that run inside a ``with``."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from cp_styles._lib.compat import graph_task_id
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.groups import world
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.masks import Full, Mask

AnyOpening = TypeVar("AnyOpening", bound="Opening")


class SequenceScope:
    """Binds one batch's layout and mask to the context-parallel attention under it.

    Example::

        documents = Documents.from_cu_seqlens([0, 300, 1000])
        layout = per_document_head_tail(1000, 2, documents=documents.lengths)
        with SequenceScope(layout, mask=documents):
            out = core(*(layout.shard(whole, 2, mesh.get_local_rank()) for whole in qkv))
        out.sum().backward()  # the forward has bound the scope: the backward may run after its end or in another scope

    A query attends to the keys that *both* the module's own mask and the scope's mask allow. If the style of a module
    names another layout than the scope, the call is refused.

    Activation checkpointing runs the forward again in the middle of a backward, where other scopes, or none, may be
    open. So give checkpoint the scope: ``checkpoint(fn, x, use_reentrant=False, context_fn=scope.for_checkpoint)``. Or
    open it inside the checkpointed function. Otherwise the attention raises an error.

    Args:
        layout: which positions of this batch each rank holds.
        mask: which keys each query attends to, in addition to the masks of the modules.
        mesh_axis: the sequence axis of the modules to which the scope applies. If attention runs under the scope over
            other axes only, without a scope of theirs, the end of the ``with`` raises ValueError.

    A scope holds in the thread, or asyncio task, that opens it, and where its context is copied to. While it is open,
    attention over this axis in another thread, without a scope of its own, is refused. Scopes may end in any order, and
    in another thread or task. In a generator, the scope of its own ``with`` counts, whatever else is open.

    No communication.

    Raises:
        TypeError: ``layout`` is not a SequenceLayout, or ``mask`` is not a Mask.
        ValueError: the mask is for another length than the layout.
    """

    def __init__(self, layout: SequenceLayout, *, mask: Mask | None = None, mesh_axis: str = "cp") -> None:
        if not isinstance(layout, SequenceLayout):
            raise TypeError(
                f"a SequenceScope needs this batch's SequenceLayout, such as head_tail(S, P), got {layout!r}"
            )
        mask = Full() if mask is None else mask
        if not isinstance(mask, Mask):
            raise TypeError(f"mask must be a Mask object such as Documents(lengths), got {mask!r}")
        if mask.length not in (None, layout.length):
            raise ValueError(
                f"SequenceScope: the mask is for {mask.length} positions, the layout cuts {layout.length}: make both "
                "for the whole sequence of this batch, with its padding"
            )
        self.layout = layout
        self.mask = mask
        self.mesh_axis = mesh_axis

    def __enter__(self) -> SequenceScope:
        entry = _ScopeEntry(self)
        entry.open_in(open_entries)
        all_open_entries[entry] = world()
        return self

    def __exit__(self, *exception: object) -> None:
        # No entry is kept in self, because several threads may have the scope open.
        entries = [*_list_entries_of_rank(), *open_entries.get()]
        entry = next((each for each in reversed(entries) if each.scope is self and each in all_open_entries), None)
        if entry is None:
            return  # the context that opened the scope is gone
        entry.end()
        del all_open_entries[entry]
        if exception[0] is None and entry.unscoped_axes and not entry.applied:
            raise ValueError(
                f"the SequenceScope over mesh axis {self.mesh_axis!r} applied to no attention, and attention over "
                f"{sorted(entry.unscoped_axes)} ran under it with the masks and layouts of the modules alone. Give the "
                "scope the axis of the modules, SequenceScope(..., mesh_axis=...)"
            )

    def for_checkpoint(
        self, context_fn: Callable[[], tuple[Any, Any]] | None = None
    ) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """A ``context_fn`` for torch.utils.checkpoint that opens this scope in the recomputation.

        To combine it with a ``context_fn`` of your own: ``partial(scope.for_checkpoint, context_fn)``.
        """
        if context_fn is None:
            return contextlib.nullcontext(), self
        forward, recomputation = context_fn()
        return forward, _NestedContexts(self, recomputation)

    def __repr__(self) -> str:
        return f"SequenceScope({self.layout.length} positions on {self.layout.ranks} ranks, mask={self.mask})"


# [Note: openings] Several scopes or blocks may be open, and may end in any order. A generator may be suspended inside a
# ``with``, and resume after other scopes were opened, or be closed by another thread. So each ``with`` is an Opening,
# and a call looks for the Opening that encloses it.
class Opening:
    """One ``with`` of a scope or a block, from its beginning to its end."""

    ended = False

    def open_in(self, variable: ContextVar[tuple[Any, ...]]) -> None:
        """Begin, and append this opening to the openings in a context variable."""
        before = variable.get()
        generators = list(_running_generators())
        self._generator, self._suspended = generators[0] if generators else None, []
        if before:
            before = tuple(opening for opening in before if not opening.ended)
            # Openings of suspended generators. If a generator resumes, its opening encloses the call.
            self._suspended = [opening for opening in before if opening._generator not in (None, *generators)]
        self._variable, self._token = variable, variable.set((*before, self))

    def end(self) -> None:
        """Remove this opening from the context variable. Earlier and later openings stay."""
        remaining = list(self._variable.get())
        if self in remaining:
            remaining.remove(self)
        try:
            self._variable.reset(self._token)
        except ValueError:  # it began in another context, whose variable cannot be set here
            self.ended = True
        self._variable.set(tuple(remaining))
        self._generator, self._suspended = None, []

    _variable: ContextVar[tuple[Any, ...]]
    _token: Token[tuple[Any, ...]]
    _generator: FrameType | None
    _suspended: list[Opening]


def innermost(openings: Sequence[AnyOpening]) -> AnyOpening | None:
    """The innermost opening of one context that encloses the running code. None if all have ended."""
    openings = [opening for opening in openings if not opening.ended] if openings else openings
    if not openings:
        return None
    last = openings[-1]
    if last._suspended:
        by_generator = {opening._generator: opening for opening in openings if opening in (*last._suspended, last)}
        for frame in _running_generators():
            if frame in by_generator:
                return by_generator[frame]
    return last


def _running_generators() -> Iterator[FrameType]:
    """The frames of the generators that run in this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
            yield frame
        frame = frame.f_back


class _ScopeEntry(Opening):
    """One ``with`` of a scope."""

    def __init__(self, scope: SequenceScope) -> None:
        self.scope = scope
        self.task = graph_task_id()  # the backward that opened the scope; < 0 outside of a backward
        self.applied = False  # to some attention
        self.unscoped_axes: set[str] = set()  # attention over these axes ran under it without a scope


class _NestedContexts(contextlib.AbstractContextManager[None]):
    """One context inside another. Both may be entered several times."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *exception: object) -> None:
        try:
            self._inner.__exit__(*exception)
        finally:
            self._outer.__exit__(*exception)


# The scopes that are open in this thread or task, in the order of opening.
open_entries: ContextVar[tuple[_ScopeEntry, ...]] = ContextVar("sequence_scopes", default=())
# The scopes that are open in any thread or task, and the rank that opened each.
all_open_entries: WeakKeyDictionary[_ScopeEntry, Any] = WeakKeyDictionary()


def _list_entries_of_rank() -> list[_ScopeEntry]:
    rank = world()
    entries = [reference() for reference in all_open_entries.keyrefs()]
    return [entry for entry in entries if entry is not None and all_open_entries.get(entry) == rank]


def open_scope(axis: str) -> SequenceScope | None:
    """The innermost scope over the mesh axis ``axis`` that is open in this thread or task."""
    entry = innermost([entry for entry in open_entries.get() if entry.scope.mesh_axis == axis])
    return None if entry is None else entry.scope


class ScopeHistory:
    """Finds the scope of a call, and keeps whether calls have had one: then a recomputation needs a scope."""

    was_scoped = False

    def find_scope(self, name: str, axis: str, layout: SequenceLayout | Balancer | None) -> SequenceScope | None:
        """The scope for a call of ``name`` over ``axis``. ``layout`` is the layout that the user gave, or None.

        Raises:
            RuntimeError: in a recomputation without its scope, and if the scope is open in another thread.
            ValueError: if ``layout`` differs from the layout of the scope.
        """
        entries = open_entries.get()
        entry = innermost([entry for entry in entries if entry.scope.mesh_axis == axis])
        if entry is not None:
            entry.applied = True
        else:
            for unused in entries:
                unused.unscoped_axes.add(axis)
        task = graph_task_id()
        if task >= 0 and (entry.task != task if entry is not None else self.was_scoped):
            raise RuntimeError(
                f"{name}: a call is being recomputed inside a backward, where the SequenceScope of its batch is not "
                "known: pass context_fn=scope.for_checkpoint to checkpoint (use_reentrant=False), or open the scope "
                f"inside the checkpointed function{see('A checkpoint under a SequenceScope')}"
            )
        if entry is None:
            if task < 0 and any(entry.scope.mesh_axis == axis for entry in _list_entries_of_rank()):
                raise RuntimeError(
                    f"{name}: a SequenceScope over mesh axis {axis!r} is open in another thread or asyncio task, and a "
                    "scope holds where it was opened: open it in the thread that runs the model, or run the model in a "
                    "copy of the context, contextvars.copy_context().run(model, ...)"
                    f"{see('A scope in another thread')}"
                )
            return None
        self.was_scoped = True
        cut = entry.scope.layout
        if layout is not None and cut != (
            layout if isinstance(layout, SequenceLayout) else layout_made_by(layout, cut.length, cut.ranks)
        ):
            raise ValueError(
                f"{name}: it has another layout than the SequenceScope around the call: cut the inputs with the "
                f"scope's layout (leave layout= out to use it){see('Two layouts for one call')}"
            )
        return entry.scope
