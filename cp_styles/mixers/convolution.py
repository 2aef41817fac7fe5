"""Causal convolutions over a sequence that is cut: the rows before each fragment come from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from cp_styles._compat import start_all_to_all, uncompiled
from cp_styles.bounded_cache import remembered
from cp_styles.collectives.autograd import differentiable
from cp_styles.collectives.exchange import Tensors, wait_received
from cp_styles.collectives.peers import Peers, dim_of
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.mixers.fragments import (
    CutSequence,
    Described,
    Packed,
    RowExchange,
    mixing,
    row_exchange,
    rows_before,
)


@uncompiled
def context_causal_conv1d(
    conv: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    width: int,
    seq_dim: int = -1,
    layout: SequenceLayout | Balancer | None = None,
    documents: Packed = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """A causal convolution over a sequence of which this rank holds a part. The result equals the result on one device.

    ``y_t = f(x_{t-W+1}, ..., x_t)``, with zeros before the first token of a document. ``conv`` computes this for a
    whole sequence, with bias, activation and what else it has. It is called once, with the W - 1 rows before each
    fragment in front of the fragment. A token shift (RWKV) is W = 2.

    Args:
        conv: maps a tensor like ``x`` of any number of tokens to as many outputs. It takes what is before the first
            token as zeros, as causal convolutions do.
        x: this rank's tokens, of any floating-point dtype.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        width: W, the number of taps.
        seq_dim: the dim of the sequence in ``x`` and in the output.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        documents: lengths of the packed documents of the whole sequence, which do not see each other. Default: the
            documents of the scope's mask; without one, one document.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        The outputs of this rank's tokens. Gradients of the weights are this rank's share: sum them over the group.

    Communication: one all-gather of some integers; one all-to-all of the rows before each fragment that other ranks
    hold, W - 1 of them at most; nothing if no document crosses ranks. The backward sends their gradients back.

    Raises:
        ValueError, TypeError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        conv = lambda x_BCL: causal_conv1d_fn(x_BCL, weight_CW, bias_C, activation="silu")
        out_BCL = context_causal_conv1d(conv, x_BCL, mesh, width=4, layout=layout)
    """
    sequence = CutSequence.of_call("context_causal_conv1d", mesh, layout, documents, checks)
    return run_convolution(sequence, conv, x, seq_dim, width)


@mixing()
def run_convolution(
    sequence: CutSequence, conv: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, seq_dim: int, width: int
) -> torch.Tensor:
    """:func:`context_causal_conv1d` of a sequence."""

    def describe() -> Described:
        dim_of(x, seq_dim, "seq_dim")
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"{sequence.name}: width={width} must be a number of taps, at least 1")
        return [x], seq_dim, {"width": width, "seq_dim": seq_dim}

    with sequence.compared_call(describe) as cut:
        along = seq_dim % x.ndim
        exchange, sizes = rows_before(cut.layout, cut.documents, width - 1, cut.peers.rank)
        before = exchanged(cut.peers, exchange, x, along, check=sequence.checks.agreement).tensor_split(
            len(sizes), along
        )
    rows = torch.cat([part for pair in zip(before, x.split(sizes, along), strict=True) for part in pair], along)
    out = conv(rows)
    if out.shape[along] != rows.shape[along]:
        raise ValueError(
            f"{sequence.name}: conv returned {out.shape[along]} tokens for {rows.shape[along]}: it must return an "
            "output for each token, without its padding"
        )
    if len(sizes) == 1:  # a view that may be changed in place, as no part of a split may
        return out.narrow(along, width - 1, sizes[0])
    return torch.cat(out.split([count for size in sizes for count in (width - 1, size)], along)[1::2], along)


def last_rows(sequence: CutSequence, x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """On every rank the last ``count`` rows of the last document, or as many as it has."""
    with sequence.compared_call(lambda: ([x], dim, {"count": count})) as cut:
        plan = rows_from_end(cut.layout, min(count, cut.documents[-1]), cut.peers.rank)
        return exchanged(cut.peers, plan, x, dim, check=sequence.checks.agreement)


@remembered(16)
def rows_from_end(layout: SequenceLayout, count: int, rank: int) -> RowExchange:
    """Each rank needs the last ``count`` rows of all."""
    rows = torch.arange(layout.length - count, layout.length, device="cpu")
    return row_exchange(layout, [(rows, torch.arange(count, device="cpu"))] * layout.ranks, count, rank)


def exchanged(peers: Peers, plan: RowExchange, x: torch.Tensor, dim: int, *, check: bool) -> torch.Tensor:
    """The slots of ``plan``, filled. Slots that no row goes to are zeros."""
    rows = RowsOfOthers(peers, dim, plan, x.shape[dim])
    (slots,) = rows(x) if peers.size == 1 else differentiable(rows, x, check=check and plan.crosses)
    return slots


class RowsOfOthers(NamedTuple):
    """The linear map from the local rows of all ranks to the slots of each; its adjoint if ``home``."""

    peers: Peers
    dim: int
    plan: RowExchange
    length: int
    home: bool = False

    def adjoint(self) -> RowsOfOthers:
        return self._replace(home=not self.home)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        (x,) = tensors
        plan, rows = self.plan, x.movedim(self.dim, 0)
        way = -1 if self.home else 1
        sent, received = (plan.sent, plan.received)[::way]
        leaving, arriving = plan.rows.on(x.device)[::way]
        packed, row = rows.index_select(0, leaving), rows.shape[1:]
        if plan.crosses:
            arrive, leave = ([prod(row) * count for count in by_peer] for by_peer in (received, sent))
            packed = wait_received(start_all_to_all(packed.reshape(-1), arrive, leave, self.peers.name), self.peers)
            packed = packed.view(len(arriving), *row)
        if not self.home:
            slots = rows.new_zeros(plan.slots, *row).index_copy(0, arriving, packed)
        else:  # several slots may have the same row
            wide = torch.promote_types(x.dtype, torch.float32)
            slots = rows.new_zeros(self.length, *row, dtype=wide).index_add(0, arriving, packed.to(wide)).to(x.dtype)
        return (slots.movedim(0, self.dim),)
