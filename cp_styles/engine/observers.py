"""Protocols for guarantees around the attention. The engine imports no guarantee.

A guarantee that ranks compare is a RankCheck: :mod:`cp_styles.checks` puts its class into RANK_CHECKS. A guarantee
about the training of a model is a ModelObserver: a style gives it to its bindings. A guarantee about the arguments of
a module is a ForwardObserver: see function_mode.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from cp_styles.comm.agreement import Caller
from cp_styles.comm.checks import Checks
from cp_styles.comm.group_state import Forwards

Place: TypeAlias = tuple[int, str, int]
"""The number of a module with a style, the path of a module in it, and the number of the call, 0 in a graph."""


class ModelObserver(Protocol):
    """Observes the training of one model, which it also identifies as a key."""

    @property
    def model(self) -> Callable[[], nn.Module | None]:
        """Returns the model, while it exists."""
        ...

    def attends(self, call: CheckedCall, place: Place, masks: frozenset[type], module_call: tuple[Any, ...]) -> None:
        """Called before an attention over several ranks, not in a recomputation. All ranks raise an error of one.
        ``masks``: classes of the mask's parts. ``module_call``: a module with the style and its arguments, or ()."""

    def forward_begins(self, forwards: Forwards) -> None:
        """Called at the first attention since the last loss whose backward may follow, after the agreement."""

    def backward_begins(self, forwards: Forwards) -> None:
        """Called before the backward of an attention."""


@dataclass(slots=True, eq=False)
class CheckedCall:
    """A call that ranks compare, for RankChecks.

    Attributes:
        where: name of the module or function, name of the mesh axis, and the group.
        checks: the checks that the user has chosen.
        tensors: the local inputs, such as query, key and value.
        model: the observer of the model that calls; None for a function.
        trains: a backward may follow.
        orders: the call is causal, and the first in a forward whose inputs carry no mark of a layout.
    """

    where: Caller
    checks: Checks
    tensors: Sequence[torch.Tensor]
    model: ModelObserver | None = None
    trains: bool = False
    orders: bool = False


class RankCheck(Protocol):
    """One number in the row that ranks exchange before a call, and its meaning. Each group has its own object."""

    def number(self, call: CheckedCall) -> int:
        """This rank's number. No communication."""
        ...

    def judge(self, numbers: Sequence[int], call: CheckedCall) -> None:
        """Raise, on every rank, if the ranks' numbers show an error."""


RANK_CHECKS: list[Callable[[], RankCheck]] = []
"""The classes, in the order of their numbers. The list is filled when the package is imported, and then constant."""


attention_listener: ContextVar[Callable[..., Any] | None] = ContextVar("attention_listener", default=None)
"""Called with the arguments of each strategy's forward in this context: see ``cp_styles.explain.explain_calls``."""

mixer_listener: ContextVar[Callable[..., Any] | None] = ContextVar("mixer_listener", default=None)
"""Called with the group and the layout of each mixer's call in this context: see ``cp_styles.verify``."""


class RankChecks(list[RankCheck]):
    """The RankChecks of one group, in the order of their numbers in a row."""

    def __init__(self) -> None:
        super().__init__(kind() for kind in RANK_CHECKS)
