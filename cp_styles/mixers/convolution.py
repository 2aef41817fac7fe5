"""Causal convolutions over a sharded sequence: the rows before each fragment come from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import start_all_to_all, uncompiled
from cp_styles.collectives.autograd import differentiable
from cp_styles.collectives.exchange import Tensors, wait_received
from cp_styles.collectives.peers import Peers, check_dim
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.mixers.fragments import (
    CallFacts,
    CutSequence,
    Packed,
    RowExchange,
    mark_mixing,
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
    """A causal convolution over a sharded sequence. The result equals the result on one device.

    ``y_t = f(x_{t-W+1}, ..., x_t)``, with zeros before the first token of a document. ``conv`` computes this for a
    whole sequence, with its bias and activation. It is called once, on all fragments, each after the W - 1 rows before
    it. A token shift (RWKV) is W = 2.

    Args:
        conv: maps a tensor like ``x`` of any number of tokens to as many outputs. Rows before the first token count as
            zeros, as in causal convolutions.
        x: this rank's tokens, of any floating-point dtype.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        width: W, the number of taps.
        seq_dim: the dim of the sequence in ``x`` and in the output.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        documents: lengths of the packed documents of the whole sequence, which are independent. Default: the documents
            of the scope's mask; without one, one document.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        The outputs of this rank's tokens. Gradients of the weights are this rank's share: sum them over the group.

    Communication: one all-gather of some integers; one all-to-all of at most W - 1 rows before each fragment; nothing
    if no document crosses ranks. The backward sends the gradients of these rows.

    Raises:
        ValueError, TypeError: on every rank, if any rank's input is invalid or the ranks differ.

    Example::

        conv = lambda x_BCL: causal_conv1d_fn(x_BCL, weight_CW, bias_C, activation="silu")
        out_BCL = context_causal_conv1d(conv, x_BCL, mesh, width=4, layout=layout)
    """
    sequence = CutSequence.from_call("context_causal_conv1d", mesh, layout, documents, checks)
    return run_convolution(sequence, conv, x, seq_dim, width)


@mark_mixing()
def run_convolution(
    sequence: CutSequence, conv: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, seq_dim: int, width: int
) -> torch.Tensor:
    """:func:`context_causal_conv1d` over a CutSequence."""

    def describe() -> CallFacts:
        check_dim(x, seq_dim, "seq_dim")
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"{sequence.name}: width={width} must be a number of taps, at least 1")
        return [x], seq_dim, {"width": width, "seq_dim": seq_dim}

    with sequence.compared_call(describe) as cut:
        along = seq_dim % x.ndim
        reach = 0 if cut.whole else width - 1
        exchange, sizes = rows_before(cut.layout, cut.documents, reach, cut.peers.rank)
        slots = exchange_rows(cut.peers, exchange, x, along, check=sequence.checks.agreement)
    before = slots.tensor_split(len(sizes), along)
    rows = torch.cat([part for pair in zip(before, x.split(sizes, along), strict=True) for part in pair], along)
    out = conv(rows)
    if out.shape[along] != rows.shape[along]:
        raise ValueError(
            f"{sequence.name}: conv returned {out.shape[along]} tokens for {rows.shape[along]}: it must return an "
            "output for each token, without its padding"
        )
    if len(sizes) == 1:  # callers may change this view in place, which autograd forbids for parts of a split
        return out.narrow(along, reach, sizes[0])
    return torch.cat(out.split([count for size in sizes for count in (reach, size)], along)[1::2], along)


def last_rows(sequence: CutSequence, x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """The last ``count`` rows of the last document, or all its rows, on every rank."""
    with sequence.compared_call(lambda: ([x], dim, {"count": count})) as cut:
        plan = rows_from_end(cut.layout, min(count, cut.documents[-1]), cut.peers.rank)
        return exchange_rows(cut.peers, plan, x, dim, check=sequence.checks.agreement)


@remembered(16)
def rows_from_end(layout: SequenceLayout, count: int, rank: int) -> RowExchange:
    """The exchange that gives every rank the last ``count`` rows of the sequence."""
    rows = torch.arange(layout.length - count, layout.length, device="cpu")
    return row_exchange(layout, [(rows, torch.arange(count, device="cpu"))] * layout.ranks, count, rank)


def exchange_rows(peers: Peers, plan: RowExchange, x: torch.Tensor, dim: int, *, check: bool) -> torch.Tensor:
    """The slots of ``plan`` with their rows. Slots without a row are zeros."""
    rows = RowMap(peers, dim, plan, x.shape[dim])
    (slots,) = rows(x) if peers.size == 1 else differentiable(rows, x, check=check and plan.crosses)
    return slots


class RowMap(NamedTuple):
    """The linear map from the rows of all ranks to the slots of this rank; its adjoint if ``backward``."""

    peers: Peers
    dim: int
    plan: RowExchange
    length: int
    backward: bool = False

    def adjoint(self) -> RowMap:
        return self._replace(backward=not self.backward)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        (x,) = tensors
        plan, rows = self.plan, x.movedim(self.dim, 0)
        order = -1 if self.backward else 1
        sent, received = (plan.sent, plan.received)[::order]
        sources, targets = plan.rows.on(x.device)[::order]
        packed, row = rows.index_select(0, sources), rows.shape[1:]
        if plan.crosses:
            receive, send = ([prod(row) * count for count in by_peer] for by_peer in (received, sent))
            packed = wait_received(start_all_to_all(packed.reshape(-1), receive, send, self.peers.name), self.peers)
            packed = packed.view(len(targets), *row)
        if not self.backward:
            slots = rows.new_zeros(plan.slots, *row).index_copy(0, targets, packed)
        else:  # a row may fill several slots: add their gradients
            wide = torch.promote_types(x.dtype, torch.float32)
            slots = rows.new_zeros(self.length, *row, dtype=wide).index_add(0, targets, packed.to(wide)).to(x.dtype)
        return (slots.movedim(0, self.dim),)
