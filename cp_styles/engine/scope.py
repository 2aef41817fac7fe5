"""A sequence that differs from batch to batch: its layout and mask, bound to the modules under a ``with``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_styles._compat import current_graph_task
from cp_styles.engine.binding import Binding
from cp_styles.engine.config_text import to_text
from cp_styles.engine.dtensor_handlers import bound_mesh, rebind
from cp_styles.engine.mesh_axes import OtherAxes
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.mask import Full, Mask


class Lease:
    """A bound mesh in use: by its scope, a module's forward, and the graphs made with it. Then the next batch gets it.

    DTensor remembers every mesh it has seen, for ever: one a batch would be a leak, and slow, since nothing it knows of
    one mesh helps with the next.
    """

    def __init__(self, mesh: DeviceMesh, returns: list[DeviceMesh]) -> None:
        self.mesh = mesh
        self._returns = returns

    def __del__(self) -> None:
        self._returns.append(rebind(self.mesh, None))

    def hold_in_graph(self, tensor: torch.Tensor) -> None:
        """Stay in use for as long as the node that made ``tensor`` may run its backward."""
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[Lease] = self  # pyright: ignore[reportIndexIssue]


class SequenceScope:
    """Binds one batch's layout and mask to the context-parallel attention under it.

    ::

        documents = Documents.from_cu_seqlens(cu_seqlens)
        scope = SequenceScope(per_document_layout, mask=documents)
        with scope:
            loss = model(scope.layout.shard(tokens, 1, rank), ...)
        loss.backward()  # the attention was bound at its forward: right after the end, and beside other scopes

    Modules attend to who is allowed by *both* their own mask and the scope's. A module whose style names a layout is
    refused under a scope with another one.

    A recomputation (activation checkpointing) runs the forward again in the middle of a backward, where the scopes that
    happen to be open are not those of its batch: give checkpoint the scope, ``checkpoint(fn, x, use_reentrant=False,
    context_fn=scope.for_checkpoint)``, or open it inside the checkpointed function. Without, the attention refuses.

    Args:
        layout: who holds which position of this batch.
        mask: who attends to whom in it, beside the modules' own masks.
        mesh_axis: the sequence axis of the modules that are meant.
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
            raise ValueError(f"the mask is for {mask.length} positions, the layout cuts {layout.length}")
        self.layout = layout
        self.mask = mask
        self.mesh_axis = mesh_axis
        self._text: tuple[str, list[torch.Tensor]] | None = None
        # The modules' bindings that were resolved under this scope, for the next batch's scope to prepare.
        self._users: WeakSet[ScopedBinding] = WeakSet()
        # One bound mesh a configuration: the modules of a model mostly share one.
        self._leases: dict[Binding, Lease] = {}

    def __enter__(self) -> SequenceScope:
        _open.set((*_open.get(), (self, current_graph_task())))
        return self

    def __exit__(self, *exception: object) -> None:
        _open.set(_open.get()[:-1])  # and no token kept in self, which several threads may have open

    def prepare(self, like: SequenceScope) -> SequenceScope:
        """Make the plans of this batch before its step, for the modules that ran under the scope ``like``; returns
        this scope.

        A plan is made on the host at the first call that needs it, so a new batch's first layers would wait for it.
        Made ahead, while the device works on the batch before, it costs the step nothing::

            loss.backward()  # of the batch under ``scope``; the host is free again
            following = SequenceScope(next_layout, mask=next_documents).prepare(scope)

        Each module's calls are expected to be causal, or not, as they were. Masks that come with a call (``attn_mask``,
        a BlockMask) are not known ahead. No communication; what was not foreseen is made at its call, as ever.
        """
        for user in list(like._users):
            user.bound_to(self.layout, self.mask).prepare()
        return self

    def for_checkpoint(
        self, context_fn: Callable[[], tuple[Any, Any]] | None = None
    ) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """The ``context_fn`` of torch.utils.checkpoint: nothing more in the forward, this scope in the recomputation.

        With a ``context_fn`` of your own, ``partial(scope.for_checkpoint, context_fn)``: its contexts as well.
        """
        if context_fn is None:
            return contextlib.nullcontext(), self
        forward, recomputation = context_fn()
        return forward, _Both(self, recomputation)

    def config_text(self, tensors: list[torch.Tensor]) -> str:
        """Layout and mask as a text, spelled once; see :func:`~cp_styles.engine.config_text.to_text`."""
        if self._text is None:
            found: list[torch.Tensor] = []
            self._text = to_text((self.layout, self.mask), found), found
        tensors.extend(self._text[1])
        return self._text[0]

    def __repr__(self) -> str:
        return f"SequenceScope({self.layout.length} positions on {self.layout.ranks} ranks, mask={self.mask})"


class _Both(contextlib.AbstractContextManager[None]):
    """One context inside another; checkpoints may enter it several times."""

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


# The open scopes and the backward each was opened in (None outside of any), innermost last.
_open: ContextVar[tuple[tuple[SequenceScope, int | None], ...]] = ContextVar("sequence_scopes", default=())

# The leases that somebody still holds, a graph perhaps: a recomputation that makes its scope anew must find the mesh of
# its forward, for the gradients that arrive are on that one.
_alive: WeakValueDictionary[Binding, Lease] = WeakValueDictionary()


class ScopeHistory:
    """Whether an attention has ever run under a scope: then a recomputation without one is a mistake."""

    def __init__(self) -> None:
        self.was_scoped = False


class ScopedBinding:
    """A module's binding, and what it becomes under the scope of the moment."""

    def __init__(
        self, binding: Binding, layout: SequenceLayout | Balancer | None, history: ScopeHistory | None = None
    ) -> None:
        """``layout`` is the one the user named, or None; ``binding`` holds the default then."""
        self.unscoped = binding
        self.named = layout
        self.history = history or ScopeHistory()
        # One binding a scope, and not one a call: so that it lives as long as its scope, and is described once.
        self._under: WeakKeyDictionary[SequenceScope, Binding] = WeakKeyDictionary()
        self._free: dict[OtherAxes | None, list[DeviceMesh]] = {}
        self._lean: ScopedBinding | None = None
        self._latest: Lease | None = None  # so that calls of one length find the mesh of the one before

    @property
    def name(self) -> str:
        return self.unscoped.name

    def keeping_nothing(self) -> ScopedBinding:
        """What :meth:`Binding.keeping_nothing` is; the same one every time."""
        if self._lean is None:
            self._lean = ScopedBinding(self.unscoped.keeping_nothing(), self.named, self.history)
        return self._lean

    def lease(self, binding: Binding, device_type: str) -> Lease:
        """A bound mesh for ``binding``, which is what :meth:`now` gave and what the call adds to it."""
        lease = _alive.get(binding)
        if lease is None:
            lease = _alive[binding] = self._take(binding, device_type)
        scope = self._resolve()[1]
        if scope is None:
            self._latest = lease
        else:
            scope._leases[binding] = lease
        return lease

    def _take(self, binding: Binding, device_type: str) -> Lease:
        free = self._free.setdefault(binding.other_axes, [])
        mesh = rebind(free.pop(), binding) if free else bound_mesh(binding, device_type)
        return Lease(mesh, free)

    def now(self) -> Binding:
        """The binding for a call now.

        Raises:
            RuntimeError: in a recomputation that was not given its scope.
            ValueError: when the module names another layout than the scope.
        """
        return self.resolve()[0]

    def resolve(self) -> tuple[Binding, SequenceScope | None]:
        """What :meth:`now` returns, and the scope that made it so."""
        try:
            return self._resolve()
        except Exception as error:  # whatever it is, the others are to hear of it
            self.unscoped.refuse(error)

    def _resolve(self) -> tuple[Binding, SequenceScope | None]:
        name, axis = self.unscoped.name, self.unscoped.axis
        scope, opened_in = next(
            ((scope, task) for scope, task in reversed(_open.get()) if scope.mesh_axis == axis), (None, None)
        )
        task = current_graph_task()
        if task is not None and opened_in != task and (scope is not None or self.history.was_scoped):
            raise RuntimeError(
                f"{name}: attention is being recomputed inside a backward, and which batch's SequenceScope it ran "
                "under is not known there: pass context_fn=scope.for_checkpoint to checkpoint (use_reentrant=False), "
                "or open the scope inside the checkpointed function"
            )
        if scope is None:
            return self.unscoped, None
        self.history.was_scoped = True
        if self.named is not None and self._layout_named(scope) != scope.layout:
            raise ValueError(
                f"{name}: the style names a layout that is not the one of the SequenceScope around the call; cut with "
                "one layout and attend with the same (leave layout= out of the style to take the scope's)"
            )
        if scope not in self._under:
            self._under[scope] = self.bound_to(scope.layout, scope.mask)
            scope._users.add(self)
        return self._under[scope], scope

    def bound_to(self, layout: SequenceLayout, mask: Mask) -> Binding:
        """The binding under a scope of this layout and mask."""
        return replace(self.unscoped, layout=layout, mask=self.unscoped.mask & mask)

    def _layout_named(self, scope: SequenceScope) -> SequenceLayout:
        if isinstance(self.named, SequenceLayout):
            return self.named
        return self.unscoped.layout_for(scope.layout.length)
