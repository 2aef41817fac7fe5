"""Layouts and strategies that may be chosen for an attention, and why one cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cp_styles.explain.hardware import Hardware
from cp_styles.explain.rehearse import Shapes
from cp_styles.layout import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail
from cp_styles.mask import All, Causal, Documents, Full, Mask
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses


def documents_of(mask: Mask) -> tuple[int, ...] | None:
    """The lengths of the documents of a mask that has them."""
    parts = mask.parts if isinstance(mask, All) else (mask,)
    return next((part.lengths for part in parts if isinstance(part, Documents)), None)


def layouts_for(mask: Mask) -> dict[str, Callable[[int, int], SequenceLayout]]:
    """Balancers that may suit a mask, by name."""
    documents = documents_of(mask)
    layouts: dict[str, Callable[[int, int], SequenceLayout]] = {"head_tail": head_tail, "contiguous": contiguous}
    if documents is not None:
        layouts["per_document_head_tail"] = partial(per_document_head_tail, documents=documents)
    # A causal mask is balanced by head_tail, and none by contiguous, in the fewest parts.
    if not mask.has_bias and not isinstance(mask, Causal | Full):
        layouts["by_work"] = partial(by_work, mask=mask)
    return layouts


def strategies_for(ranks: int, hardware: Hardware | None = None) -> list[Strategy]:
    """Strategies that may suit a number of ranks: Ulysses over all ranks, and over the ranks of a node."""
    strategies: list[Strategy] = [Ring(), Ring(keep=0), AllGather(), Ulysses()]
    sizes = {size for size in (2, 4, 8) if size < ranks and not ranks % size}
    if hardware is not None and 1 < hardware.node_ranks < ranks and not ranks % hardware.node_ranks:
        sizes.add(hardware.node_ranks)
    return [*strategies, *(Ulysses(size=size) for size in sorted(sizes))]


def problem_of(strategy: Strategy, ranks: int, shapes: Shapes) -> str:
    """Why a strategy cannot run, or wastes ranks, and the remedy; empty if it does neither."""
    try:
        strategy = strategy.on(ranks)
        size = strategy.size_on(ranks) if isinstance(strategy, Ulysses) else 1
    except ValueError as error:
        return str(error)
    if size > shapes.heads:
        return (
            f"{size} ranks exchange {shapes.heads} query heads, so {size - shapes.heads} of them would have none: "
            f"take Ulysses(size=U) with U at most {shapes.heads}"
        )
    return ""
