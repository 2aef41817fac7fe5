"""Rectangles in a grid of blocks: few and large tiles for masks that are not bands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import torch

Edges: TypeAlias = list[int]
"""The start of each cell of one dim, and the end of the last one."""

# Cells smaller than this are joined with their neighbours: for smaller ones a kernel call is mostly overhead.
_CELL = 128
# Largest rectangle with an explicit mask, in pairs: the mask is materialized.
_PAIRS = 2**20


def rectangles(
    cover: torch.Tensor, q_edges: Edges, kv_edges: Edges
) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool]]:
    """Rectangles ``(query rows, key rows, full)`` that cover each nonzero cell of ``cover`` once.

    Args:
        cover: ``[q cells, kv cells]``: 0 no pairs, 1 some pairs, 2 all pairs.
        q_edges: the rows at which cells of queries start and end.
        kv_edges: the same for keys.
    """
    cover, q_edges = _coarser(cover, q_edges)
    turned, kv_edges = _coarser(cover.T, kv_edges)
    cover = turned.T
    found = [_stacked(cover), [(y, x, state) for x, y, state in _stacked(cover.T)]]
    for (i, i_end), (j, j_end), state in min(found, key=len):
        first, last = kv_edges[j], kv_edges[j_end]
        rows = (q_edges[i], q_edges[i_end])
        # Full rectangles need no mask and may have any size.
        step = rows[1] - rows[0] if state == 2 else max(_CELL, _PAIRS // (last - first))
        for start in range(*rows, step):
            yield (start, min(start + step, rows[1])), (first, last), state == 2


def _stacked(cover: torch.Tensor) -> list[tuple[tuple[int, int], tuple[int, int], int]]:
    """Runs of equal state in a row of cells, joined with equal runs in the rows below."""
    done, growing = [], {}
    for i, row in enumerate([*cover.tolist(), []]):
        cuts = [0, *(j for j in range(1, len(row)) if row[j] != row[j - 1]), len(row)]
        runs = {(j, stop, row[j]) for j, stop in pairwise(cuts) if stop > j and row[j]}
        for run in [run for run in growing if run not in runs]:
            done.append(((growing.pop(run), i), run[:2], run[2]))
        for run in runs:
            growing.setdefault(run, i)
    return sorted(done)


def _coarser(cover: torch.Tensor, edges: Edges) -> tuple[torch.Tensor, Edges]:
    """Join small neighbouring cells of the first dim. The state is theirs if they agree, else 1."""
    kept = [0]
    for index in range(1, len(edges) - 1):
        if edges[index + 1] - edges[kept[-1]] > _CELL:
            kept.append(index)
    if len(kept) == cover.shape[0] or not cover.numel():
        return cover, edges
    group = torch.zeros(cover.shape[0], dtype=torch.int64, device="cpu")
    group[kept[1:]] = 1
    index = group.cumsum(0)[:, None].expand(cover.shape)
    shape = (len(kept), cover.shape[1])
    least, most = (
        torch.full(shape, value, device="cpu").scatter_reduce(0, index, cover.long(), how)
        for value, how in ((2, "amin"), (0, "amax"))
    )
    return torch.where(least == most, least, 1), [*(edges[start] for start in kept), edges[-1]]
