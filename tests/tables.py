"""Strategies, layouts, kernels and dtypes that tests combine, by name. Masks are in oracle.py, doors in doors.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from cp_styles import whole_documents
from cp_styles.kernels import Kernel, ReferenceKernel
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.masks import Causal, Mask
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses
from tests.cuda_ops import DEFAULT

STRATEGIES: dict[str, Strategy] = {
    "ring": Ring(),
    "ring, sent again": Ring(keep=0),
    "all-gather": AllGather(),
    "all-gather, sent again": AllGather(keep=0),
    "Ulysses": Ulysses(),
    "Ulysses x ring": Ulysses(size=2),
    "Ulysses x all-gather": Ulysses(inner=AllGather(keep=0), size=2),
    "Ulysses x Ulysses": Ulysses(inner=Ulysses(), size=2),
}
KERNELS: dict[str, Kernel | None] = {
    "default": None,
    "flash": CPU_FLASH,
    "reference": ReferenceKernel(),
    "CUDA's": DEFAULT,  # see tests/cuda_ops.py
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def divides(strategy: str, ranks: int) -> bool:
    """Two ranks exchange heads, so two must divide the ranks."""
    return not (strategy.startswith("Ulysses x") and ranks % 2)


def from_owners(cuts: list[int], owners: list[int], ranks: int) -> SequenceLayout:
    """The piece between two cuts to the rank that is named for it."""
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for piece, owner in zip(pairwise(cuts), owners, strict=True):
        chunks[owner].append(piece)
    return SequenceLayout.from_chunks(chunks)


def uneven(length: int, ranks: int) -> SequenceLayout:
    """Chunks of many lengths by hand; the last rank (of several) is empty."""
    cuts = sorted([0, min(1, length), length // 3, length // 3 + 1, max(length - 1, 0), length])
    return from_owners(cuts, [index * 2 % max(ranks - 1, 1) for index in range(5)], ranks)


def dealt(length: int, ranks: int, seed: int = 0) -> SequenceLayout:
    """Chunks at random places for random ranks; some ranks may have none."""
    dice = random.Random(seed)
    cuts = sorted({0, length, *(dice.randrange(length + 1) for _ in range(2 * ranks))})
    return from_owners(cuts, [dice.randrange(ranks) for _ in cuts[1:]], ranks)


def of_documents(length: int, ranks: int) -> SequenceLayout:
    return per_document_head_tail(length, ranks, documents=three_documents(length))


def three_documents(length: int) -> tuple[int, ...]:
    first = min(1, length)
    return first, length // 2, length - length // 2 - first


Cut = Callable[[int, int], SequenceLayout]

LAYOUTS: dict[str, Callable[[Mask], Cut]] = {
    "contiguous": lambda _: contiguous,
    "head_tail": lambda _: head_tail,
    "striped": lambda _: striped,
    "striped in twos": lambda _: partial(striped, block=2),
    "per_document_head_tail": lambda _: of_documents,
    "whole_documents": lambda _: (
        lambda length, ranks: whole_documents(length, ranks, documents=three_documents(length))
    ),
    "by_work": lambda mask: partial(by_work, mask=mask),
    "uneven": lambda _: uneven,
    "dealt": lambda _: dealt,
}


def cut_by(name: str, mask: Mask | None = None, seed: int = 0) -> Cut:
    """The balancer of this name, for a mask."""
    cut = LAYOUTS[name](Causal() if mask is None else mask)
    return partial(cut, seed=seed) if cut is dealt else cut
