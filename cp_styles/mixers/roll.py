"""torch.roll over a sharded sequence, for models that predict several tokens."""

from __future__ import annotations

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import uncompiled
from cp_styles._lib.device_copies import DeviceTables
from cp_styles.collectives.peers import check_dim
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.mixers.convolution import exchange_rows
from cp_styles.mixers.fragments import CallFacts, CutSequence, Packed, RowExchange, row_exchange


@uncompiled
def context_roll(
    x: torch.Tensor,
    shifts: int,
    seq_dim: int,
    mesh: MeshOrGroup,
    *,
    fill: float | None = None,
    layout: SequenceLayout | Balancer | None = None,
    documents: Packed = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """``torch.roll`` of each document of a sharded sequence.

    With ``shifts=1`` and ``fill=0`` each token gets the token before it, and the first one 0: token shifts, n-grams.
    With -1 and 1, and ``fill=0``, they are the neighbors of a convolution that looks both ways.

    With ``shifts=-1`` each token gets the value of the next token, which may be on another rank: the embeddings of the
    next tokens in multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

    Args:
        x: this rank's tokens, of any dtype.
        shifts: the number of positions by which values move to higher positions.
        seq_dim: the dim of the sequence in ``x``.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        fill: replaces values that would wrap around the ends of the document. None: they wrap.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        documents: lengths of the packed documents of the whole sequence. Default: the documents of the scope's mask;
            without one, one document.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        A tensor like ``x``. Its gradient goes back to the rank that holds the token.

    Communication: one all-gather of some integers; one all-to-all of the rows that are on other ranks, at most
    ``abs(shifts)`` for each fragment of a document on a rank. The backward sends their gradients.

    Raises:
        ValueError, TypeError: on every rank, if any rank's input is invalid or the ranks differ.

    Example::

        next_BLC = context_roll(hidden_BLC, -1, 1, mesh, layout=layout)
    """
    sequence = CutSequence.from_call("context_roll", mesh, layout, documents, checks)

    def describe() -> CallFacts:
        check_dim(x, seq_dim, "seq_dim")
        if not isinstance(shifts, int):
            raise TypeError(f"{sequence.name}: shifts={shifts!r} must be an int: one dim is rolled")
        return [x], seq_dim, {"shifts": shifts, "seq_dim": seq_dim, "fill": fill}

    with sequence.compared_call(describe) as cut:
        dim = seq_dim % x.ndim
        plan, empty = roll_exchange(cut.layout, cut.documents, shifts, fill is None, cut.peers.rank)
        out = exchange_rows(cut.peers, plan, x, dim, check=sequence.checks.agreement)
    if fill:  # slots without a row are zeros already
        out = out.masked_fill(empty.on(x.device)[0].view(-1, *[1] * (x.ndim - 1 - dim)), fill)
    return out


@remembered(16)  # few entries: each has a number for every position, on the device too
def roll_exchange(
    layout: SequenceLayout, documents: tuple[int, ...], shifts: int, wraps: bool, rank: int
) -> tuple[RowExchange, DeviceTables]:
    """The exchange of ``rank`` for a roll in each document, and a mask of the slots of ``rank`` that get no row."""
    sizes = torch.tensor(documents, device="cpu")
    size, end = sizes.repeat_interleave(sizes), sizes.cumsum(0).repeat_interleave(sizes)
    source = torch.arange(layout.length, device="cpu") - (end - size) - shifts
    inside = (source >= 0) & (source < size) | wraps
    source = source % size + end - size
    needs = []
    for peer in range(layout.ranks):
        positions = layout.positions(peer, "cpu")
        has_source = inside[positions]
        needs.append((source[positions[has_source]], torch.nonzero(has_source).flatten()))
    empty = torch.ones(layout.lengths[rank], dtype=torch.bool, device="cpu").index_fill_(0, needs[rank][1], 0)
    return row_exchange(layout, needs, len(empty), rank), DeviceTables(empty)
