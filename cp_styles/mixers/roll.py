"""torch.roll over a sequence that is cut, for models that predict several tokens."""

from __future__ import annotations

import torch

from cp_styles._compat import uncompiled
from cp_styles.bounded_cache import remembered
from cp_styles.collectives.peers import dim_of
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.device_copies import DeviceTables
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.mixers.convolution import exchanged
from cp_styles.mixers.fragments import CutSequence, Described, Packed, RowExchange, row_exchange


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
    """``torch.roll`` of each document of a sequence of which this rank holds a part.

    With ``shifts=-1`` each token gets what the next token has, also where that is on another rank: the embeddings of
    the next tokens in multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

    Args:
        x: this rank's tokens, of any dtype.
        shifts: by how many positions values move towards higher positions.
        seq_dim: the dim of the sequence in ``x``.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        fill: what stands where a value would come from the far end of the document. None: that value.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        documents: lengths of the packed documents of the whole sequence. Default: the documents of the scope's mask;
            without one, one document.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        A tensor like ``x``. Its gradient goes back to the rank that holds the token.

    Communication: one all-gather of some integers; one all-to-all of the rows that are on other ranks: for each
    fragment of a document that a rank holds, ``abs(shifts)`` at most. The backward sends their gradients back.

    Raises:
        ValueError, TypeError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        next_BLC = context_roll(hidden_BLC, -1, 1, mesh, layout=layout)
    """
    sequence = CutSequence.of_call("context_roll", mesh, layout, documents, checks)

    def describe() -> Described:
        dim_of(x, seq_dim, "seq_dim")
        if not isinstance(shifts, int):
            raise TypeError(f"{sequence.name}: shifts={shifts!r} must be an int: one dim is rolled")
        return [x], seq_dim, {"shifts": shifts, "seq_dim": seq_dim, "fill": fill}

    with sequence.compared_call(describe) as cut:
        dim = seq_dim % x.ndim
        plan, empty = roll_exchange(cut.layout, cut.documents, shifts, fill is None, cut.peers.rank)
        out = exchanged(cut.peers, plan, x, dim, check=sequence.checks.agreement)
    if fill:  # slots without a row are zeros already
        out = out.masked_fill(empty.on(x.device)[0].view(-1, *[1] * (x.ndim - 1 - dim)), fill)
    return out


@remembered(16)  # few, because entries have a number for each position, on the device too
def roll_exchange(
    layout: SequenceLayout, documents: tuple[int, ...], shifts: int, wraps: bool, rank: int
) -> tuple[RowExchange, DeviceTables]:
    """The row at each position is needed by the position ``shifts`` behind it, in its document. And of each slot of
    ``rank``, whether no row goes to it."""
    sizes = torch.tensor(documents, device="cpu")
    size, end = sizes.repeat_interleave(sizes), sizes.cumsum(0).repeat_interleave(sizes)
    source = torch.arange(layout.length, device="cpu") - (end - size) - shifts
    inside = (source >= 0) & (source < size) | wraps
    source = source % size + end - size
    needs = []
    for peer in range(layout.ranks):
        positions = layout.positions(peer, "cpu")
        needy = inside[positions]
        needs.append((source[positions[needy]], torch.nonzero(needy).flatten()))
    empty = torch.ones(layout.lengths[rank], dtype=torch.bool, device="cpu").index_fill_(0, needs[rank][1], 0)
    return row_exchange(layout, needs, len(empty), rank), DeviceTables(empty)
