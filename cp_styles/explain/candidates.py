"""The strategies and layouts that may suit an attention, ranked by their predicted time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from cp_styles.batch.packs import whole_documents
from cp_styles.explain.dry_run import kernel_of
from cp_styles.explain.events import Shapes
from cp_styles.explain.hardware import Hardware
from cp_styles.explain.report import Explanation, busiest_rank, explained
from cp_styles.layouts import Balancer, by_work, contiguous, head_tail, per_document_head_tail
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.masks import Causal, Full, Mask
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses


class Candidate(NamedTuple):
    """A strategy and a layout. ``problem`` is the reason why they cannot run, with a remedy; empty if they can."""

    strategy: Strategy
    layout_name: str
    explanation: Explanation | None
    problem: str = ""

    @property
    def seconds(self) -> float:
        """Predicted time of the forward and the backward; infinite without an explanation."""
        if self.explanation is None:
            return float("inf")
        forward, backward = self.explanation.seconds
        return (forward + backward).total


def suggest_layouts(mask: Mask) -> dict[str, Balancer]:
    """Balancers that may suit a mask, by name."""
    layouts: dict[str, Balancer] = {"head_tail": head_tail, "contiguous": contiguous}
    if mask.documents is not None:
        layouts["per_document_head_tail"] = partial(per_document_head_tail, documents=mask.documents)
        layouts["whole_documents"] = partial(whole_documents, documents=mask.documents)
    # head_tail balances a causal mask, and contiguous a full one, in the fewest chunks.
    if not mask.has_bias and mask not in (Causal(), Full()):
        layouts["by_work"] = partial(by_work, mask=mask)
    return layouts


def suggest_strategies(ranks: int, hardware: Hardware) -> list[Strategy]:
    """Strategies that may suit a number of ranks: Ulysses over all ranks, and over the ranks of a node."""
    strategies: list[Strategy] = [Ring(), Ring(keep=0), AllGather(), Ulysses()]
    sizes = {size for size in (2, 4, 8, hardware.node_ranks) if 1 < size < ranks and not ranks % size}
    return [*strategies, *(Ulysses(size=size) for size in sorted(sizes))]


# Strategies in the form of the option --strategy: ring, ring:0, ulysses:8. The number is an argument of the strategy.
_NAMES: dict[str, tuple[Callable[..., Strategy], str]] = {
    "ring": (Ring, "keep"),
    "allgather": (AllGather, "keep"),
    "ulysses": (Ulysses, "size"),
}


def format_strategy(strategy: Strategy) -> str:
    """A strategy in the form of the option --strategy."""
    for name, (make, option) in _NAMES.items():
        if type(strategy) is make:
            number = getattr(strategy, option)
            return name if number == getattr(make(), option) else f"{name}:{number}"
    return str(strategy)


def parse_strategy(text: str) -> Strategy:
    """The strategy of the option --strategy.

    Raises:
        ValueError: there is none, or its number is wrong.
    """
    name, _, number = text.lower().partition(":")
    if name not in _NAMES or (number and not number.isdecimal()):
        forms = [form for each, (_, option) in _NAMES.items() for form in (each, f"{each}:{option.upper()}")]
        raise ValueError(f"{text!r} is not {', '.join(forms[:-1])} or {forms[-1]}")
    make, option = _NAMES[name]
    return make(**({option: int(number)} if number else {}))


def find_problem(strategy: Strategy, ranks: int, shapes: Shapes) -> str:
    """The reason why a strategy cannot run, or wastes ranks, with a remedy; empty if there is none."""
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


def rank_candidates(
    strategies: Sequence[Strategy],
    layouts: Mapping[str, Balancer],
    *,
    length: int,
    ranks: int,
    mask: Mask,
    shapes: Sequence[Shapes],
    hardware: Hardware,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Candidate]:
    """All combinations, the fastest first, and at the end the combinations that cannot run. No communication.

    ``shapes``: the ways in which keys and values may travel, as heads or as latents. ``progress`` is called before each
    combination, with its name.
    """
    candidates = []
    for name, balancer in layouts.items():
        layout = layout_made_by(balancer, length, ranks)
        rank = busiest_rank((layout, layout), mask)  # one rank, so that bytes, memory and time belong together
        for strategy, each in product(strategies, shapes):
            progress(f"{strategy}, {name}")
            explanation, problem = None, find_problem(strategy, ranks, each)
            if not problem:
                call = strategy, (layout, layout), mask, kernel_of(each), each
                explanation = explained(*call, hardware=hardware, rank=rank)
                memory = explanation.peak_memory + layout.lengths[rank] * (2 * each.query_row + each.kv_row)
                if memory > hardware.memory:
                    has = f"{hardware.name} has {hardware.memory / 2**30:.0f}"
                    problem = f"needs {memory / 2**30:.1f} GiB for one attention, {has}: take more ranks, or keep=0"
            candidates.append(Candidate(strategy, name, explanation, problem))
    return sorted(candidates, key=lambda candidate: (bool(candidate.problem), candidate.seconds))
