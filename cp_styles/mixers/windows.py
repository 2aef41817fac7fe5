"""Windows of tokens over a sharded sequence, for layers that compress or select blocks of keys."""

from __future__ import annotations

from itertools import accumulate

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import uncompiled
from cp_styles._lib.device_copies import DeviceTables
from cp_styles.collectives.peers import check_dim
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.masks import PerRow
from cp_styles.mixers.convolution import exchange_rows
from cp_styles.mixers.fragments import CallFacts, CutSequence, RowExchange, document_lengths, row_exchange


def window_layout(layout: SequenceLayout, size: int) -> SequenceLayout:
    """The layout of the complete windows of ``size`` tokens: a rank has the windows whose last token it has.

    Args:
        layout: the layout of the tokens.
        size: tokens of a window. Window w has the positions from w * size on.

    Returns:
        The layout of a sequence of ``layout.length // size`` windows, to gather or attend to results of windows. No
        communication.

    Raises:
        ValueError: ``size`` is below 1.

    Example::

        numbers = window_layout(head_tail(1000, 2), 128).positions(rank)  # this rank's windows
    """
    if size < 1:
        raise ValueError(f"window_layout: size={size} must be a number of tokens, at least 1")
    return SequenceLayout.from_chunks(
        [(start // size, stop // size) for start, stop in chunks if start // size < stop // size]
        for chunks in layout.chunks
    )


@uncompiled
def context_windows(
    x_BLC: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    size: int,
    before: int = 0,
    layout: SequenceLayout | Balancer | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """The complete windows of a sharded sequence whose last token this rank has, each with the tokens in front of it.

    For layers that pool, compress or score blocks of keys, such as native sparse attention
    (https://arxiv.org/abs/2502.11089). Windows and parts need not be aligned. On one device it is
    ``F.pad(x, (0, 0, before, 0)).unfold(1, before + size, size).mT``.

    Args:
        x_BLC: this rank's tokens [B, L, ...], of any dtype.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        size: tokens of a window. Window w has the positions from w * size on.
        before: how many tokens in front of each window come with it.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        [B, n, before + size, ...], the n windows that :func:`window_layout` gives this rank, in order. Tokens before
        the sequence are zeros. Tokens of an incomplete window at its end are left out. The gradient of a token goes
        back to the rank that holds it. All ranks take part in the backward, also a rank without windows.

    Communication: one all-gather of some integers; one all-to-all of the rows that a rank lacks, each once. The
    backward sends their gradients.

    Raises:
        ValueError, TypeError: on every rank, if any rank's input is invalid or the ranks differ.
        NotImplementedError: on every rank, for packed documents, whose windows would begin with each document.

    Example::

        blocks_BNWC = context_windows(x_BLC, mesh, size=64, layout=layout)
        keys_BNC = blocks_BNWC.mean(2)
    """
    sequence = CutSequence.from_call("context_windows", mesh, layout, None, checks)

    def describe() -> CallFacts:
        packed = sequence.documents
        if packed is not None and (isinstance(packed, PerRow) or len(document_lengths(packed)) > 1):
            raise NotImplementedError(
                f"{sequence.name}: the sequence has packed documents, and windows would begin with each of them: give "
                "one document in a call, outside of the SequenceScope with documents"
            )
        check_dim(x_BLC, 1, "seq_dim")
        for name, number, least in (("size", size, 1), ("before", before, 0)):
            if type(number) is not int or number < least:
                raise ValueError(f"{sequence.name}: {name}={number!r} must be a number of tokens, at least {least}")
        return [x_BLC], 1, {"size": size, "before": before}

    with sequence.compared_call(describe) as cut:
        plans = window_exchanges(cut.layout, cut.documents, size, before, cut.peers.rank)
        others = exchange_rows(cut.peers, plans[0], x_BLC, 1, check=sequence.checks.agreement)
        windows = exchange_rows(cut.peers, plans[1], torch.cat((x_BLC, others), 1), 1, check=False)
    return windows.unflatten(1, (windows.shape[1] // (before + size), before + size))


@remembered(16)
def window_exchanges(
    layout: SequenceLayout, documents: tuple[int, ...], size: int, before: int, rank: int
) -> tuple[RowExchange, RowExchange]:
    """The exchange of the rows that ``rank`` lacks, each once; and, without messages, the windows of these and its own
    rows. A window has no rows of other documents than its last token's: verify cuts documents to plant a mistake."""
    edges, numbers = torch.tensor((0, *accumulate(documents)), device="cpu"), window_layout(layout, size)

    def rows_of(peer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first = numbers.positions(peer, "cpu")[:, None] * size
        positions = first + torch.arange(-before, size, device="cpu")
        there = positions >= edges[torch.searchsorted(edges, first + size - 1, right=True) - 1]
        needed = positions[there].unique()
        return positions, there, needed[~torch.isin(needed, layout.positions(peer, "cpu"))]

    lacking = [rows_of(peer)[2] for peer in range(layout.ranks)]
    exchange = row_exchange(layout, [(each, _range(each)) for each in lacking], len(lacking[rank]), rank)
    positions, there, _ = rows_of(rank)
    held = torch.cat((layout.positions(rank, "cpu"), lacking[rank]))
    row = torch.empty(layout.length, dtype=torch.int64, device="cpu").index_copy_(0, held, _range(held))
    local = DeviceTables(row[positions[there]], torch.nonzero(there.flatten()).flatten())
    none = (0,) * layout.ranks
    return exchange, RowExchange(there.numel(), none, none, local, crosses=False)


def _range(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(like), device="cpu")
