"""The group of a collective, and the comparison of the ranks' arguments before they communicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_styles._lib.compat import is_traced, resolve_group
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts, short
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import MeshOrGroup, axis_and_group
from cp_styles.layouts import SequenceLayout

Group: TypeAlias = MeshOrGroup | None
"""A 1-D mesh, (mesh, name of an axis), a process group, or None for no communication."""


class Peers(NamedTuple):  # torch.compile on 2.11 loses the fields of a dataclass
    """The name and size of a group, and this rank in it."""

    name: str
    rank: int
    size: int


def get_peers(mesh: Group | Peers) -> Peers:
    """The peers of ``mesh``. For None and a group of one, no process group is used.

    Raises as :func:`~cp_styles.comm.groups.axis_and_group`.
    """
    if mesh is None:
        return Peers("", 0, 1)
    if isinstance(mesh, Peers):
        return mesh
    _, group = axis_and_group("this function of cp_styles.collectives", mesh)
    return Peers(group.group_name, dist.get_rank(group), dist.get_world_size(group))


CallSignature: TypeAlias = tuple[Mapping[str, Any], StatusRow]
"""Facts that must be the same on all ranks, by name, and the row of numbers of this rank."""


def make_signature(x: torch.Tensor, uneven_dim: int, **same: Any) -> CallSignature:
    """The signature of a call with a tensor. Its size in ``uneven_dim`` may differ between ranks."""
    even = tuple("any" if dim == uneven_dim else size for dim, size in enumerate(x.shape))
    grad = x.requires_grad and torch.is_grad_enabled()
    facts = {"shape": even, "dtype": x.dtype, "requires_grad": grad, **same}
    return facts, StatusRow(q_length=x.shape[uneven_dim])


def compare_calls(peers: Peers, call: str, describe: Callable[[], CallSignature], check: bool) -> tuple[int, ...]:
    """Compare the calls of all ranks: see :func:`exchange_rows`. Returns the uneven size of each rank."""
    return tuple(row.q_length for row in exchange_rows(peers, call, describe, check))


def exchange_rows(peers: Peers, call: str, describe: Callable[[], CallSignature], check: bool) -> Sequence[StatusRow]:
    """Compare the calls of all ranks. Returns the row of each rank.

    ``describe`` checks this rank's arguments and returns its facts. If one rank has a bad argument, or if the ranks
    differ, all ranks raise.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`).
    """
    if peers.size == 1 or not check or is_traced():  # assume that the row of every rank is this rank's
        return (describe()[1],) * peers.size

    def facts() -> tuple[dict[str, str], StatusRow]:
        same, row = describe()
        return {"call": call} | {what: _short(value) for what, value in same.items()}, row

    group = resolve_group(peers.name)
    where = "cp_styles.collectives", state_of(group).operations.axis, group
    return agree_on_facts(facts, Meeting.COLLECTIVE, where, path=call)


def _short(value: Any) -> str:
    if isinstance(value, SequenceLayout):  # its repr may list thousands of chunks
        return f"{value.length} positions on {value.ranks} ranks (hash {hash(value):x})"
    return short(value)


def check_dim(x: torch.Tensor, dim: int, what: str) -> int:
    """``dim`` counted from the front. Raises TypeError if ``x`` is not a plain tensor, ValueError for a bad dim."""
    if isinstance(x, DTensor):
        raise TypeError(
            f"got a DTensor with placements {x.placements}: these functions move plain local tensors; pass "
            "x.to_local() and wrap the result with DTensor.from_local, or call x.redistribute()"
        )
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(x).__name__}")
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{what}={dim} is not a dim of a tensor of shape {tuple(x.shape)}")
    return dim % x.ndim
