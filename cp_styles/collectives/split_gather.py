"""Split a dim over the ranks, gather it, and reduce-scatter, with gradients that the caller chooses explicitly."""

from __future__ import annotations

from enum import Enum

import torch

from cp_styles._lib.dtypes import holds
from cp_styles.collectives.autograd import (
    LinearMap,
    Replicated,
    differentiable,
    gather_exchange,
    note_gather,
    note_replicated_gradients,
    scale_gradient,
)
from cp_styles.collectives.peers import CallSignature, Group, Peers, check_dim, compare_calls, get_peers, make_signature
from cp_styles.collectives.rows import Layout, Rows, check_local, contiguous_rows, make_rows, make_rows_for
from cp_styles.comm.checks import CHECKS, Checks


class GradScale(Enum):
    """How the gradient of the whole tensor is scaled.

    Let L be the loss, the sum of the losses of all ranks, and P the size of the group.

    Attributes:
        NONE: the exact gradient of L: the **sum** over the group.
        DOWN: 1/P of it: the **mean** over the group, which is the gradient of the mean of the ranks' losses.
        UP: P times it. This cancels a later mean over the same ranks, such as the averaging of parameter gradients in
            DistributedDataParallel or FSDP over a mesh that includes this group.
    """

    NONE = "sum over the group"
    DOWN = "mean over the group"
    UP = "sum over the group, times its size"

    def factor(self, ranks: int) -> float:
        """The factor of the exact gradient, in a group of ``ranks``."""
        return {GradScale.NONE: 1.0, GradScale.DOWN: 1.0 / ranks, GradScale.UP: float(ranks)}[self]


def split(
    x: torch.Tensor,
    dim: int,
    mesh: Group,
    *,
    layout: Layout = None,
    fill: float = 0,
    grad_scale: GradScale = GradScale.NONE,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """Keep this rank's part of a tensor that is the same on every rank.

    ::

        forward:   R      -> S(dim)      nothing is sent
        backward:  S(dim) -> R           all-gather: every rank gets the whole gradient

    Args:
        x: a tensor of any dtype and number of dims. The caller must ensure that its values are the same on every rank.
        dim: the dim to cut.
        fill: the value of the padding, with :class:`Padded`.
        grad_scale: how the gradient is scaled: see :class:`GradScale`. The gradients of parameters that ``x`` was
            computed from are whole on every rank. ``sum_gradients`` refuses them, but for GradScale.DOWN, with which
            each rank has 1/P of them.
        mesh, layout, checks: see :mod:`cp_styles.collectives`.

    Returns:
        This rank's part, in the order of the layout, contiguous on every rank: at most one copy.

    Communication: nothing in the forward. In the backward one all-gather (an all-to-all for uneven sizes): a rank sends
    the gradient of its part, without padding, P - 1 times.

    Raises:
        ValueError: ``fill`` that the dtype cannot hold; and as all functions of this package.
    """
    peers, at, rows = _resolve_whole("split", x, dim, mesh, layout, grad_scale, checks, fill)
    part = _apply(Replicated(gather_exchange(peers, at, x.ndim, rows), cuts=True), x, checks)
    if grad_scale is not GradScale.DOWN:
        note_replicated_gradients(part, x, peers)
    return rows.fill(scale_gradient(part, grad_scale.factor(peers.size)), at, fill).contiguous()


def gather(
    x: torch.Tensor,
    dim: int,
    mesh: Group,
    *,
    reduce_gradients: bool,
    layout: Layout = None,
    grad_scale: GradScale = GradScale.NONE,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """Gather the parts of all ranks, on every rank.

    ::

        forward:   S(dim) -> R           all-gather
        backward:  R      -> S(dim)      reduce_gradients=False: this rank's part of its gradient, nothing is sent
                   P(sum) -> S(dim)      reduce_gradients=True: reduce-scatter

    Args:
        x: this rank's part. Only its size in ``dim`` may differ between ranks.
        dim: the dim to gather.
        reduce_gradients: False if all ranks compute the same thing with the result. Each rank then has the whole
            gradient, and L is counted once. Parameters behind the gather get whole gradients, which ``sum_gradients``
            refuses: with parameters there use True, and divide the loss by P. True if ranks compute different things
            (other heads, rows or targets), or each 1/P of the same loss, and L is the sum of their losses. A wrong
            value gives wrong gradients without an error, so there is no default.
        grad_scale: how the gradient is scaled: see :class:`GradScale`.
        mesh, layout, checks: see :mod:`cp_styles.collectives`.

    Returns:
        The whole tensor in global order, without padding. It may be a view of the receive buffer: do not change it in
        place.

    Communication: one all-gather (an all-to-all for uneven sizes, so that padding is not sent): a rank sends its part
    P - 1 times. In the backward nothing, or one reduce-scatter.

    Raises:
        ValueError, TypeError: as :func:`split`; also if ``x`` does not have the size that the layout gives this rank.
    """
    whole, part, peers = gather_parts(
        x, dim, mesh, reduce_gradients=reduce_gradients, layout=layout, grad_scale=grad_scale, checks=checks
    )
    # With another scale equal gradients on all ranks may be right: UP is for a loss that is divided by P.
    note_gather(whole, part, peers, reduced=reduce_gradients or grad_scale is not GradScale.NONE)
    return whole


def gather_parts(
    x: torch.Tensor,
    dim: int,
    mesh: Group,
    *,
    reduce_gradients: bool,
    layout: Layout = None,
    grad_scale: GradScale = GradScale.NONE,
    checks: Checks = CHECKS,
) -> tuple[torch.Tensor, torch.Tensor, Peers]:
    """:func:`gather` without a note for sum_gradients: the whole tensor, the part without padding, and the peers."""
    peers = get_peers(mesh)

    def describe() -> CallSignature:
        at = check_dim(x, dim, "dim")
        check_local(make_rows(layout, peers), x, at, peers)
        return _signature(x, at, at, layout, grad_scale, reduce_gradients=reduce_gradients)

    lengths = compare_calls(peers, "gather", describe, checks.agreement)
    at = dim % x.ndim
    rows = make_rows(layout, peers) or contiguous_rows(lengths)
    exchange = gather_exchange(peers, at, x.ndim, rows)
    part = scale_gradient(rows.trim(x, at, peers.rank), grad_scale.factor(peers.size))
    return _apply(exchange if reduce_gradients else Replicated(exchange), part, checks), part, peers


def reduce_scatter(
    x: torch.Tensor, dim: int, mesh: Group, *, layout: Layout = None, checks: Checks = CHECKS
) -> torch.Tensor:
    """Sum a tensor over the ranks and keep this rank's part of the sum.

    ::

        forward:   P(sum) -> S(dim)      reduce-scatter
        backward:  S(dim) -> R           all-gather

    Args:
        x: this rank's summand, of the same shape on every rank.
        dim: the dim to cut.
        mesh, layout, checks: see :mod:`cp_styles.collectives`.

    Returns:
        This rank's part; padding is zero. The summands are added in rank order, in float32 or wider. So every run gives
        the same bits, for even and uneven sizes.

    Communication: one all-to-all; the sum is local. A rank sends ``x`` without its own part, as in any reduce-scatter,
    and holds P blocks of its part for a short time. The backward is one all-gather, as in :func:`split`.

    Raises:
        ValueError, TypeError: as :func:`split`.
    """
    peers, at, rows = _resolve_whole("reduce_scatter", x, dim, mesh, layout, GradScale.NONE, checks)
    return rows.fill(_apply(gather_exchange(peers, at, x.ndim, rows).adjoint(), x, checks), at)


def _resolve_whole(
    call: str,
    x: torch.Tensor,
    dim: int,
    mesh: Group,
    layout: Layout,
    grad_scale: GradScale,
    checks: Checks,
    fill: float = 0,
) -> tuple[Peers, int, Rows]:
    """The peers, the dim counted from the front, and the rows by which ``x``, whole on every rank, is cut."""
    peers = get_peers(mesh)

    def describe() -> CallSignature:
        at = check_dim(x, dim, "dim")
        make_rows_for(layout, x, at, peers)
        if not holds(x.dtype, fill):
            raise ValueError(f"a tensor of dtype {x.dtype} cannot hold fill={fill}: give it another dtype, x.long()")
        return _signature(x, -1, at, layout, grad_scale)

    compare_calls(peers, call, describe, checks.agreement)
    at = dim % x.ndim
    return peers, at, make_rows_for(layout, x, at, peers)


def _signature(
    x: torch.Tensor, uneven_dim: int, dim: int, layout: Layout, grad_scale: GradScale, **same: bool
) -> CallSignature:
    if not isinstance(grad_scale, GradScale):
        raise TypeError(f"grad_scale must be GradScale.NONE, GradScale.DOWN or GradScale.UP, got {grad_scale!r}")
    return make_signature(x, uneven_dim, dim=dim, layout=layout, grad_scale=grad_scale.name, **same)


def _apply(op: LinearMap, x: torch.Tensor, checks: Checks) -> torch.Tensor:
    """``op(x)``, with a last dim of one column for :func:`gather_exchange`."""
    return differentiable(op, x.unsqueeze(-1), check=checks.agreement)[0].squeeze(-1)
