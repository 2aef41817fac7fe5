"""Ranges of positions: even sizes, joins, and the rows of a tensor in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

Chunk: TypeAlias = tuple[int, int]
"""A half-open range ``(start, stop)`` of global positions."""


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Cut ``length`` into ``parts`` sizes that differ by at most one. The larger sizes come first."""
    base, extra = divmod(length, parts)
    return tuple(base + (index < extra) for index in range(parts))


def ranges_of(sizes: Iterable[int]) -> tuple[Chunk, ...]:
    """Consecutive half-open ranges of these sizes."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


def join_ranges(ranges: Iterable[Chunk]) -> list[Chunk]:
    """Join each range that begins where the previous range ends. The positions and their order do not change."""
    joined: list[Chunk] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def rows_in(tensor: torch.Tensor, dim: int, ranges: Sequence[Chunk]) -> torch.Tensor:
    """The rows of ``tensor`` along ``dim`` that are in ``ranges``: a view for one range, otherwise one copy."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return tensor.narrow(dim, start, stop - start)
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)
