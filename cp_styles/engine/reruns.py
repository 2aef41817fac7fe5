"""Activation checkpoints inside a function mode: what they run again in a backward enters the mode again.

A checkpoint may run its function when the module or block around it has ended, or in the middle of the backward of
another one. So the first attention call inside a checkpoint wraps the function that it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cp_styles._compat import function_modes, leave_function_mode, running_reruns, saved_tensors_hooks_on_top
from cp_styles.engine.binding import Binding


class RerunMode(TorchFunctionMode):
    """A mode for the calls of one module or block, and for those of their recomputations."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        # Of each time that it is entered: the place among the modes of the thread, and the checkpoints around it. These
        # run again what enters the mode by itself.
        self._entered: list[tuple[int, set[int]]] = []

    @property
    def unscoped(self) -> Binding:
        """The binding of its calls where no scope is open."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        around = set[int]()
        if saved_tensors_hooks_on_top() is not None or not torch.is_grad_enabled():
            around.update(id(owner) for owner, _ in running_reruns())
        self._entered.append((len(function_modes()), around))
        _modes.set((*_modes.get(), self))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop()
        others = list(_modes.get())
        if self in others:  # else it was entered in another context
            del others[len(others) - 1 - others[::-1].index(self)]
        _modes.set(tuple(others))
        leave_function_mode(self)

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """What a recomputation enters."""
        return self

    def is_around(self) -> bool:
        """Whether the running code is inside the module or block."""
        return True

    def remember(self) -> None:
        """Make the checkpoints between the mode and the present call enter it when they run again.

        Raises:
            NotImplementedError: there is an autograd.Function of which it is not known whether it runs the call again.
        """
        # A checkpoint may be under way: all of them hook saved tensors, or run without gradients.
        if saved_tensors_hooks_on_top() is None and torch.is_grad_enabled():
            return
        if not self._entered:  # compiled code has entered it, without __enter__, and does so again
            return
        depth, around = self._entered[-1]
        for owner, attribute in running_reruns():
            if id(owner) in around:
                continue
            if attribute is None:
                self._refuse_unknown(owner)
                continue
            fn = getattr(owner, attribute)
            rerun = fn if isinstance(fn, _Rerun) else _Rerun(fn, ())
            if all(mode is not self for _, mode in rerun.modes):
                modes = sorted([*rerun.modes, (depth, self)], key=lambda entry: entry[0])
                setattr(owner, attribute, _Rerun(rerun.fn, tuple(modes)))

    def _refuse_unknown(self, owner: Any) -> None:
        if not torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self._name}: attention inside {type(owner).__name__}, an autograd.Function. If its backward runs "
                "the attention again, this may happen outside of the module or block: use torch.utils.checkpoint, or "
                "call the module, or open the block, inside the function that is run again"
            )


@dataclass(frozen=True)
class _Rerun:
    """A function that a checkpoint runs again in a backward, and the modes that it enters then, outermost first."""

    fn: Callable[..., Any]
    modes: tuple[tuple[int, RerunMode], ...]

    def __call__(self, *args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for _, mode in self.modes:
                stack.enter_context(mode.again())
            return self.fn(*args)


def remember_in_all() -> None:
    """For an attention in compiled code, which no mode sees: :meth:`RerunMode.remember` of all that are entered."""
    for mode in _modes.get():
        if mode.is_around():
            mode.remember()


# The modes that are entered in this context, innermost last. While compiled code runs, torch's own list is empty.
_modes: ContextVar[tuple[RerunMode, ...]] = ContextVar("rerun_modes", default=())
