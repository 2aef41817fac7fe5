"""Split a dim over the ranks, put it together again, and say what that means for the gradient."""

from __future__ import annotations

from enum import Enum

import torch

from cp_styles.collectives._autograd import LinearMap, Own, Replicated, differentiable, gather_exchange, scale_gradient
from cp_styles.collectives._group import Facts, Group, Peers, consult, dim_of, facts_of, peers_of
from cp_styles.collectives._rows import (
    Layout,
    Rows,
    check_local,
    contiguous_rows,
    rows_of,
    rows_of_whole,
)


class GradScale(Enum):
    """What the gradient of the whole is, in terms of what the ranks of the group compute of it.

    Let the loss be L, the sum of what each rank contributes to it, and P the size of the group.

    Attributes:
        NONE: the gradient of L, exactly: the **sum** over the group.
        DOWN: 1/P of it: the **mean** over the group, the gradient of the mean of the ranks' losses.
        UP: P times it: what undoes a mean over the same ranks that is still to come, such as the averaging of
            parameter gradients in DistributedDataParallel or FSDP over a mesh that includes this group.
    """

    NONE = "sum over the group"
    DOWN = "mean over the group"
    UP = "sum over the group, times its size"

    def factor(self, ranks: int) -> float:
        """By what the exact gradient is multiplied."""
        return {GradScale.NONE: 1.0, GradScale.DOWN: 1.0 / ranks, GradScale.UP: float(ranks)}[self]


def split(
    x: torch.Tensor,
    dim: int,
    group: Group,
    *,
    layout: Layout = None,
    fill: float = 0,
    grad_scale: GradScale = GradScale.NONE,
    check: bool = True,
) -> torch.Tensor:
    """Keep this rank's part of a tensor that every rank has.

    ::

        forward:   R      -> S(dim)      nothing is sent
        backward:  S(dim) -> R           all-gather: every rank gets the whole gradient

    Args:
        x: one tensor, the same on every rank: any dtype, any number of dims.
        dim: the dim to cut.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None.
        layout: how it is cut, see :data:`Layout`: head-tail, hybrid (:func:`nested_layout`), packed documents
            (:func:`per_document_layout`), uneven sizes, :class:`Padded`, or None for contiguous parts as equal as can
            be.
        fill: the value of the filling, with :class:`Padded`.
        grad_scale: what becomes of the gradient: see :class:`GradScale`.
        check: see :func:`all_to_all`.

    Returns:
        This rank's part, in the order of the layout; a view of ``x`` where that is one range.

    Communicates nothing in the forward but the all-gather of ``check``; in the backward one all-gather (an all-to-all
    for uneven sizes): a rank sends the gradient of its part, without filling, to the P - 1 others.

    Raises:
        ValueError: a bad dim, a layout for another length or number of ranks, ranks that disagree: on every rank, with
            ``check``. That ``x`` holds the same values everywhere is the caller's promise.
        TypeError: for a DTensor (pass its ``to_local()``), what is not a layout, or not a group.
    """
    peers, at, rows = _resolve_whole("split", x, dim, group, layout, grad_scale, check)
    part = _apply(Own(gather_exchange(peers, at, x.ndim, rows)), x)
    return rows.fill(scale_gradient(part, grad_scale.factor(peers.size)), at, fill)


def gather(
    x: torch.Tensor,
    dim: int,
    group: Group,
    *,
    reduce_gradients: bool,
    layout: Layout = None,
    grad_scale: GradScale = GradScale.NONE,
    check: bool = True,
) -> torch.Tensor:
    """Put the ranks' parts together, on every rank.

    ::

        forward:   S(dim) -> R           all-gather
        backward:  R      -> S(dim)      reduce_gradients=False: this rank's part of its gradient, nothing is sent
                   P(sum) -> S(dim)      reduce_gradients=True: reduce-scatter

    Args:
        x: this rank's part; sizes in ``dim`` may differ between ranks, the others may not.
        dim: the dim to put together.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None.
        reduce_gradients: False when all ranks go on to compute the same thing with the result, so that each has the
            whole gradient already and L is counted once. True when they compute different things with it (other
            heads, other rows, other targets) and L is the sum. The wrong one is silently wrong, so there is no default.
        layout: how it is cut, see :func:`split`; the result is in global order, without filling. None: contiguous parts
            of whatever sizes the ranks have; without ``check``, and under torch.compile, of this rank's size.
        grad_scale: what becomes of the gradient: see :class:`GradScale`.
        check: see :func:`all_to_all`.

    Returns:
        The whole tensor. It may be a view of the receive buffer: do not change it in place.

    Communicates one all-gather (an all-to-all for uneven sizes, so that padding is not sent): a rank sends its part to
    the P - 1 others. In the backward nothing, or what :func:`reduce_scatter` communicates. ``check`` as in
    :func:`all_to_all`.

    Raises:
        ValueError, TypeError: as :func:`split`; a part that is not what the layout gives this rank.
    """
    peers = peers_of(group)

    def describe() -> Facts:
        at = dim_of(x, dim, "dim")
        check_local(rows_of(layout, peers), x, at, peers)
        return _facts(x, at, at, layout, grad_scale, reduce_gradients=reduce_gradients)

    found = consult(peers, "gather", describe, check)
    at = dim % x.ndim
    rows = rows_of(layout, peers) or contiguous_rows(found)
    exchange = gather_exchange(peers, at, x.ndim, rows)
    part = scale_gradient(rows.trim(x, at, peers.rank), grad_scale.factor(peers.size))
    return _apply(exchange if reduce_gradients else Replicated(exchange), part)


def reduce_scatter(
    x: torch.Tensor, dim: int, group: Group, *, layout: Layout = None, check: bool = True
) -> torch.Tensor:
    """Sum a tensor over the ranks, and keep this rank's part of the sum.

    ::

        forward:   P(sum) -> S(dim)      reduce-scatter
        backward:  S(dim) -> R           all-gather

    Args:
        x: this rank's summand, of the same shape on every rank.
        dim: the dim to cut.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None.
        layout: how it is cut, see :func:`split`; filling is zero.
        check: see :func:`all_to_all`.

    Returns:
        This rank's part. The summands are added in rank order, in float32 at least: the same bits on every run, for
        even and uneven sizes.

    Communicates one all-to-all, and adds here: a rank sends ``x`` but for its own part, as in any reduce-scatter, and
    holds P blocks of its part for a moment. The backward is one all-gather, as in :func:`split`.

    Raises:
        ValueError, TypeError: as :func:`split`.
    """
    peers, at, rows = _resolve_whole("reduce_scatter", x, dim, group, layout, GradScale.NONE, check)
    return rows.fill(_apply(gather_exchange(peers, at, x.ndim, rows).adjoint(), x), at)


def _resolve_whole(
    call: str, x: torch.Tensor, dim: int, group: Group, layout: Layout, grad_scale: GradScale, check: bool
) -> tuple[Peers, int, Rows]:
    """The group, the dim from the front, and how ``x``, which is whole on every rank, is cut."""
    peers = peers_of(group)

    def describe() -> Facts:
        at = dim_of(x, dim, "dim")
        rows_of_whole(layout, x, at, peers)
        return _facts(x, -1, at, layout, grad_scale)

    consult(peers, call, describe, check)
    at = dim % x.ndim
    return peers, at, rows_of_whole(layout, x, at, peers)


def _facts(x: torch.Tensor, own_dim: int, dim: int, layout: Layout, grad_scale: GradScale, **same: bool) -> Facts:
    if not isinstance(grad_scale, GradScale):
        raise TypeError(f"grad_scale must be GradScale.NONE, GradScale.DOWN or GradScale.UP, got {grad_scale!r}")
    return facts_of(x, own_dim, dim=dim, layout=layout, grad_scale=grad_scale.name, **same)


def _apply(op: LinearMap, x: torch.Tensor) -> torch.Tensor:
    """A gathering exchange moves a matrix of one column: see :func:`gather_exchange`."""
    return differentiable(op, x.unsqueeze(-1))[0].squeeze(-1)
