"""A sequence that differs from batch to batch: its layout and mask, bound to the modules under a ``with``."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from torch.distributed.device_mesh import DeviceMesh

from cp_styles._compat import current_graph_task
from cp_styles.dispatcher import bound_mesh
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.mask import Full, Mask
from cp_styles.state import Binding


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
        # One bound mesh a configuration: the modules of a model mostly share one.
        self._meshes: dict[Binding, DeviceMesh] = {}

    def __enter__(self) -> SequenceScope:
        _open.set((*_open.get(), (self, current_graph_task())))
        return self

    def __exit__(self, *exception: object) -> None:
        _open.set(_open.get()[:-1])  # and no token kept in self, which several threads may have open

    def for_checkpoint(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """The ``context_fn`` of torch.utils.checkpoint: nothing more in the forward, this scope in the "
        "recomputation."""
        return contextlib.nullcontext(), self

    def __repr__(self) -> str:
        return f"SequenceScope({self.layout.length} positions on {self.layout.ranks} ranks, mask={self.mask})"


# The open scopes and the backward each was opened in (None outside of any), innermost last.
_open: ContextVar[tuple[tuple[SequenceScope, int | None], ...]] = ContextVar("sequence_scopes", default=())

# The bound meshes of scopes that somebody still uses, a graph perhaps: a recomputation that makes its scope anew must
# find the mesh of its forward, for the gradients that arrive are on that one.
_alive: WeakValueDictionary[Binding, DeviceMesh] = WeakValueDictionary()


def _raise(error: Exception) -> None:
    raise error


class ScopedBinding:
    """A module's binding, and what it becomes under the scope of the moment."""

    def __init__(self, binding: Binding, layout: SequenceLayout | Balancer | None) -> None:
        """``layout`` is the one the user named, or None; ``binding`` holds the default then."""
        self._binding = binding
        self._named = layout
        self._mesh: DeviceMesh | None = None
        self._was_scoped = False

    def mesh(self, device_type: str) -> DeviceMesh:
        """The bound mesh for a call now, see :meth:`now`."""
        binding, scope = self._now()
        if scope is not None:
            if binding not in scope._meshes:
                mesh = _alive.get(binding)
                scope._meshes[binding] = _alive[binding] = mesh or bound_mesh(binding, device_type)
            return scope._meshes[binding]
        if self._mesh is None:
            self._mesh = bound_mesh(binding, device_type)
        return self._mesh

    def now(self) -> Binding:
        """The binding for a call now.

        Raises:
            RuntimeError: in a recomputation that was not given its scope.
            ValueError: when the module names another layout than the scope.
        """
        return self._now()[0]

    def _now(self) -> tuple[Binding, SequenceScope | None]:
        try:
            return self._resolve()
        except (ValueError, RuntimeError) as error:
            self._binding.agree(partial(_raise, error), (), 0)  # so that no rank waits for this one
            raise

    def _resolve(self) -> tuple[Binding, SequenceScope | None]:
        name, axis = self._binding.name, self._binding.axis
        scope, opened_in = next(
            ((scope, task) for scope, task in reversed(_open.get()) if scope.mesh_axis == axis), (None, None)
        )
        task = current_graph_task()
        if task is not None and opened_in != task and (scope is not None or self._was_scoped):
            raise RuntimeError(
                f"{name}: attention is being recomputed inside a backward, and which batch's SequenceScope it ran "
                "under is not known there: pass context_fn=scope.for_checkpoint to checkpoint (use_reentrant=False), "
                "or open the scope inside the checkpointed function"
            )
        if scope is None:
            return self._binding, None
        self._was_scoped = True
        if self._named is not None and self._layout_named(scope) != scope.layout:
            raise ValueError(
                f"{name}: the style names a layout that is not the one of the SequenceScope around the call; cut with "
                "one layout and attend with the same (leave layout= out of the style to take the scope's)"
            )
        return replace(self._binding, layout=scope.layout, mask=self._binding.mask & scope.mask), scope

    def _layout_named(self, scope: SequenceScope) -> SequenceLayout:
        if isinstance(self._named, SequenceLayout):
            return self._named
        return self._binding.layout_for(scope.layout.length)
