"""Protocols for guarantees that surround the attention. The engine knows no guarantee by name.

A guarantee that ranks compare is a RankCheck: :mod:`cp_styles.checks` puts its class into RANK_CHECKS. A guarantee
about the training of a model is a ModelObserver: a style gives it to its bindings. A guarantee about the arguments of
a module is a ForwardObserver: see function_mode.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from cp_styles.comm.agreement import Caller
from cp_styles.comm.checks import Checks
from cp_styles.comm.group_state import GroupState


class ModelObserver(Protocol):
    """Observes the training of one model. It stands for the model, also as a key."""

    def forward_begins(self, state: GroupState) -> None:
        """The ranks have agreed on an attention whose backward may follow, the first since the last loss."""

    def backward_begins(self, state: GroupState) -> None:
        """The backward of an attention begins."""


@dataclass(slots=True, eq=False)
class CheckedCall:
    """A call about which ranks agree, for RankChecks.

    Attributes:
        where: name of the module or function, name of the mesh axis, and the group.
        checks: what the user wants to be checked.
        tensors: the local inputs, such as query, key and value.
        model: stands for the model of the module that calls; None for a function.
        trains: a backward may follow.
        orders: a causal attention, and the first of a forward whose inputs no layout is known to have cut.
    """

    where: Caller
    checks: Checks
    tensors: Sequence[torch.Tensor]
    model: ModelObserver | None = None
    trains: bool = False
    orders: bool = False


class RankCheck(Protocol):
    """One number in the row that ranks exchange before a call, and its meaning. There is one object for each group."""

    def learn(self, checks: Checks) -> None:
        """A style or function over the group has these checks. By default nothing is learnt."""

    def number(self, call: CheckedCall) -> int:
        """This rank's number. No communication."""
        ...

    def judge(self, numbers: Sequence[int], call: CheckedCall) -> None:
        """Raise, on every rank, if the ranks' numbers show an error."""

    def backward_in_graph(self, group: dist.ProcessGroup) -> None:
        """The backward of a compiled graph runs, whose forward no check has seen being recorded. By default ignored."""


RANK_CHECKS: list[Callable[[], RankCheck]] = []
"""The classes, in the order of their numbers. Filled when the package is imported, and constant from then on."""


attention_listener: ContextVar[Callable[..., Any] | None] = ContextVar("attention_listener", default=None)
"""Called with the arguments of each strategy's forward in this context: see ``cp_styles.explain.explain_calls``."""

mixer_listener: ContextVar[Callable[..., Any] | None] = ContextVar("mixer_listener", default=None)
"""Called with the group and the layout of each mixer's call in this context: see ``cp_styles.verify``."""


class RankChecks(list[RankCheck]):
    """The RankChecks of one group, in the order of their numbers in a row."""

    def __init__(self) -> None:
        super().__init__(kind() for kind in RANK_CHECKS)
