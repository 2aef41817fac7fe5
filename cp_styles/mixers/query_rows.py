"""query_rows: tensors of this rank's queries for the score_mod of a FlexAttention over all ranks."""

from __future__ import annotations

from typing import Any

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import uncompiled
from cp_styles._lib.device_copies import DeviceTables
from cp_styles.collectives.peers import check_dim
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.kernels.flex import note_rows_of_queries
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.mixers.fragments import Cut, CutSequence


class QueryRows:
    """A tensor with a row for each query of this rank. An index of the rows is a position of the whole sequence.

    Made by :func:`query_rows`. Other ranks have the remaining rows: at their positions the values are NaN.

    Attributes:
        rows: the rows of this rank.
        dim: the dim of the rows.
    """

    def __init__(self, x: torch.Tensor, dim: int, cut: Cut) -> None:
        # A view, because the caller's tensor may be read in another way too. One row of zeros stands in for none.
        self.rows = x.view_as(x) if x.shape[dim] else x.sum(dim, keepdim=True)
        self.dim = dim
        (at,) = _rows_by_position(cut.layout, cut.peers.rank).on(x.device)
        self._at = at.view_as(at)  # ranks of another group may share the table
        for tensor in (self.rows, self._at):
            note_rows_of_queries(tensor, (cut.layout, cut.peers.rank, cut.peers.name))

    def __getitem__(self, indices: Any) -> torch.Tensor:
        """``x[indices]`` of the whole tensor, with a number or a tensor of numbers for each dim."""
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != self.rows.ndim or any(x is None or isinstance(x, (slice, type(...))) for x in indices):
            raise TypeError(
                f"query_rows: a tensor of {self.rows.ndim} dims needs as many indices, such as rows[b, h, q_idx, ...], "
                f"with q_idx in place {self.dim}; got {indices!r}"
            )
        at = self._at[indices[self.dim]]
        found = self.rows[(*indices[: self.dim], at.clamp(min=0), *indices[self.dim + 1 :])]
        return torch.where(at >= 0, found, float("nan"))


@uncompiled
def query_rows(
    x: torch.Tensor,
    seq_dim: int,
    mesh: MeshOrGroup,
    *,
    layout: SequenceLayout | Balancer | None = None,
    checks: Checks = CHECKS,
) -> QueryRows:
    """A tensor that each rank has for its own queries, for the ``score_mod`` of an attention over all ranks.

    A bias that each query computes, as in Transformer-XL, Conformer, DeBERTa and Inkling, has no rows for the queries
    of other ranks, and is larger than the queries. The score_mod reads it by the position of the query, as on one
    device. Ranks compare neither the values nor the number of rows. Queries must stay on their rank: give the attention
    ``Ring()`` or ``AllGather()``.

    Args:
        x: this rank's rows, float; CPU or CUDA. Its gradient is whole: it needs no sum over the ranks. Integers of
            tokens, such as segments, are small: gather them.
        seq_dim: the dim of the queries in ``x``.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        layout: the layout of the queries, or the balancer that makes it. Default: the layout of the
            :class:`~cp_styles.SequenceScope` around the call, else of the style or block; without one ``head_tail``.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        :class:`QueryRows`, to be indexed with one index for each dim, and the position of the query in ``seq_dim``. For
        the position of a query of another rank, such as a key's, the value is NaN.

    Communication: one all-gather of some integers. Memory: a table of 8 bytes for each position of the sequence.

    Raises:
        ValueError, TypeError: on every rank, if any rank's input is invalid or the ranks differ. ValueError by an
            attention with another layout, or whose queries change ranks.

    Source: Dai et al., Transformer-XL (2019), for the biases.

    Example::

        rel = query_rows(rel_BHLR, 2, mesh, layout=layout)  # a bias for each of R distances, of this rank's queries
        def bias(score, b, h, q_idx, kv_idx):
            distance = q_idx - kv_idx
            near = (distance >= 0) & (distance < R)
            return score + torch.where(near, rel[b, h, q_idx, distance.clamp(0, R - 1)], 0.0)
        out = context_flex_attention(q, k, v, mesh, score_mod=bias, mask=Causal(), layout=layout)
    """
    sequence = CutSequence.from_call("query_rows", mesh, layout, (), checks)
    return rows_of_queries(sequence, x, seq_dim)


def rows_of_queries(sequence: CutSequence, x: torch.Tensor, seq_dim: int) -> QueryRows:
    """:func:`query_rows` for a sequence."""

    def describe() -> Any:
        check_dim(x, seq_dim, "seq_dim")
        if not x.is_floating_point():
            raise TypeError(
                f"{sequence.name}: got {x.dtype}, and only numbers with a NaN can say that a row is not here: let the "
                "score_mod read the integers of all tokens, by cp_styles.collectives.gather"
            )
        return [x], seq_dim, {"seq_dim": seq_dim}

    with sequence.compared_call(describe) as cut:
        return QueryRows(x, seq_dim % x.ndim, cut)


@remembered(16)  # few entries: each has a number for every position, on the device too
def _rows_by_position(layout: SequenceLayout, rank: int) -> DeviceTables:
    """The row of each position on this rank; -1 where another rank has it."""
    rows = torch.full((layout.length,), -1, dtype=torch.int64, device="cpu")
    own = layout.positions(rank, "cpu")
    rows[own] = torch.arange(len(own), device="cpu")
    return DeviceTables(rows)
