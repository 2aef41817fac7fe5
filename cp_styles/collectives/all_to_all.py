"""The all-to-all over two dims of a tensor, as Ulysses, expert and tensor parallelism use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cp_styles.collectives.autograd import differentiable, start
from cp_styles.collectives.exchange import Exchange
from cp_styles.collectives.peers import CallSignature, Group, check_dim, compare_calls, get_peers, make_signature
from cp_styles.collectives.rows import check_sizes, contiguous_rows
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.layouts.ranges import even_sizes, ranges_of


def all_to_all(
    x: torch.Tensor,
    scatter_dim: int,
    gather_dim: int,
    mesh: Group,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    checks: Checks = CHECKS,
    async_op: bool = False,
) -> Any:
    """Cut ``scatter_dim`` among the ranks and gather ``gather_dim``.

    ::

        forward:   S(gather_dim)  -> S(scatter_dim)
        backward:  S(scatter_dim) -> S(gather_dim)      the same all-to-all with dims and sizes swapped

    Args:
        x: this rank's tensor, of any dtype and number of dims. It has all of ``scatter_dim`` and this rank's part of
            ``gather_dim``. The other sizes are the same on all ranks.
        scatter_dim: the dim to cut. Dims may be negative.
        gather_dim: the dim to gather, in rank order.
        scatter_sizes: the size of each rank's part of ``scatter_dim``; the sum is ``x.shape[scatter_dim]``. None: as
            equal as possible, the first ranks get the remainder.
        gather_sizes: the size of each rank's part of ``gather_dim``. None: the sizes that the ranks have.
        mesh, checks, async_op: see :mod:`cp_styles.collectives`.

    Returns:
        The tensor, or with ``async_op`` a :class:`Pending` of it. It is contiguous, with this rank's part of
        ``scatter_dim`` and all of ``gather_dim``. In a group of one rank it is ``x`` itself. It may be a view of the
        receive buffer; autograd then refuses to change it in place (clone it first).

    Communication: one all-to-all. A rank sends ``x`` without its own part. It makes at most one contiguous copy before
    (none if ``scatter_dim`` is the outermost dim of a contiguous ``x``) and one after (none if ``gather_dim`` comes
    before ``scatter_dim``, and only dims of size one come before it). The backward sends the same, and every rank must
    run it, in the same order.

    Raises:
        ValueError: equal dims, sizes with a wrong sum; and as all functions of this package.

    Source: Jacobs et al., DeepSpeed Ulysses (2023), for the exchange of sequence and heads.
    """
    peers = get_peers(mesh)

    def describe() -> CallSignature:
        scatter, gather = check_dim(x, scatter_dim, "scatter_dim"), check_dim(x, gather_dim, "gather_dim")
        if scatter == gather:
            raise ValueError(f"scatter_dim and gather_dim are both dim {gather} of {tuple(x.shape)}: they must differ")
        if scatter_sizes is not None:
            parts = check_sizes(scatter_sizes, peers, "scatter_sizes")
            if sum(parts) != x.shape[scatter]:
                raise ValueError(
                    f"scatter_sizes {parts} add up to {sum(parts)}, but dim {scatter} of {tuple(x.shape)} has "
                    f"{x.shape[scatter]}"
                )
        if gather_sizes is not None:
            parts = check_sizes(gather_sizes, peers, "gather_sizes")
            if parts[peers.rank] != x.shape[gather]:
                raise ValueError(
                    f"gather_sizes {parts} give rank {peers.rank} {parts[peers.rank]}, but dim {gather} of its "
                    f"{tuple(x.shape)} has {x.shape[gather]}"
                )
        sizes = {"scatter_sizes": scatter_sizes, "gather_sizes": gather_sizes}
        sizes = {name: size and tuple(size) for name, size in sizes.items()}
        return make_signature(x, gather, dims=(scatter, gather), async_op=async_op, **sizes)

    gathered = compare_calls(peers, "all_to_all", describe, checks.agreement)
    scatter, gather = scatter_dim % x.ndim, gather_dim % x.ndim
    cut = even_sizes(x.shape[scatter], peers.size) if scatter_sizes is None else tuple(scatter_sizes)
    whole = gathered if gather_sizes is None else tuple(gather_sizes)
    # The rows of an exchange are outermost on the wire. With the outer dim as rows, one of the two copies is not needed
    # if the outer dim is dim 0. The remaining copy also makes the result contiguous.
    if gather < scatter:
        op = Exchange(peers, gather, scatter, contiguous_rows(whole), (ranges_of(cut),))
    else:
        op = Exchange(peers, scatter, gather, contiguous_rows(cut), (ranges_of(whole),), to_columns=False)
    if not async_op:
        return differentiable(op, x, check=checks.agreement)[0].contiguous()
    return start(op, x, check=checks.agreement).then(lambda results: results[0].contiguous())
