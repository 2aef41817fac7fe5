"""The parity grid: its axes, which rows of their product make sense, and which of those are run.

``python -m tests.ranks.parity_grid`` prints what it covers, for tutorials/support.md.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import combinations, product

import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles.kernels import ReferenceKernel
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.layout import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.mask import Causal, Dense, Documents, Mask
from cp_styles.mask.block_mask import FlexMask
from cp_styles.strategies import AllGather, Ring, Ulysses
from tests.cuda_ops import DEFAULT
from tests.oracle import allowed, mask_cases, randn

STRATEGIES = {
    "ring": Ring(),
    "ring, sent again": Ring(keep=0),
    "all-gather": AllGather(),
    "all-gather, sent again": AllGather(keep=0),
    "Ulysses": Ulysses(),
    "Ulysses x ring": Ulysses(size=2),
    "Ulysses x all-gather": Ulysses(inner=AllGather(keep=0), size=2),
}
KERNELS = {"flash": CPU_FLASH, "reference": ReferenceKernel(), "CUDA's": DEFAULT}  # see tests/cuda_ops.py
# Query and key/value heads: MHA, groups, one key head, fewer heads than ranks, heads that no number of ranks divides.
HEADS = ((4, 4), (4, 2), (6, 1), (3, 3), (6, 3))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
RANKS = (1, 2, 3, 4, 5, 8)
# Shorter than 8 ranks; a prime; beyond the plan's block of 128 queries, which no number of ranks here divides. Each
# with a batch that makes an error in low precision an average of some hundred rows.
BATCHES = {5: 32, 23: 8, 137: 2}
LENGTHS = tuple(BATCHES)


@dataclass(frozen=True)
class MaskValue:
    """A mask of the package beside what the oracle is told, both as large as the sequence."""

    mask: Mask
    sees: torch.Tensor | None = None
    bias: torch.Tensor | None = None


Dealer = Callable[[int, int, torch.dtype], MaskValue]
"""``(length, heads, dtype)`` to a mask."""


@cache
def _pairs(name: str, length: int) -> MaskValue:
    case = mask_cases(length)[name]
    return MaskValue(case.mask, allowed(case.sees, length, length))


def _ones(length: int, heads: int, dtype: torch.dtype) -> MaskValue:
    return MaskValue(Documents((1,) * length), torch.eye(length, dtype=torch.bool))


def _dense(shape: str, boolean: bool, causal: bool, length: int, heads: int, dtype: torch.dtype) -> MaskValue:
    """``shape``: a letter a dim; B, H, L and M are whole, 1 broadcasts. Some rows of whole masks see nothing."""
    sizes = [{"B": BATCHES[length], "H": heads, "L": length, "M": length, "1": 1}[letter] for letter in shape]
    bias = randn(7, *sizes).masked_fill(randn(8, *sizes) > 1.0, float("-inf"))
    if "L" in shape and "M" in shape:
        bias[..., length // 2, :] = float("-inf")
    sees = torch.ones(length, length, dtype=torch.bool).tril() if causal else None
    if boolean:
        allows = bias > -0.5
        whole = allows.expand(*sizes[:-2], length, length)
        return MaskValue(
            Dense(allows) & (Causal() if causal else Dense(allows)), whole if sees is None else whole & sees
        )
    bias = bias.to(dtype)
    return MaskValue(Dense(bias) & Causal() if causal else Dense(bias), sees, bias)


def _sink_and_window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """No band: the first tokens, and a window that is wider in every second head."""
    return (q >= kv) & ((kv < 3) | (q - kv < 4 + 9 * (h % 2)))


def _two_documents(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A band, of another document in each row of the batch."""
    return (q >= kv) & ((q < 11 + b) == (kv < 11 + b))


@cache
def _block_mask(mod: Callable[..., torch.Tensor], length: int, heads: int, dtype: torch.dtype) -> MaskValue:
    sizes = (BATCHES[length], heads, length, length)
    whole = [torch.arange(size) for size in sizes]
    sees = mod(*(index.view([-1 if dim == place else 1 for place in range(4)]) for dim, index in enumerate(whole)))
    blocks = create_block_mask(mod, *sizes, device="cpu", BLOCK_SIZE=(32, 16))
    return MaskValue(FlexMask(blocks), sees.expand(sizes))


MASKS: dict[str, Dealer] = {
    **{name: partial(lambda name, length, *_: _pairs(name, length), name) for name in mask_cases(5)},
    "documents of one": _ones,
    **{f"bool {shape}": partial(_dense, shape, True, False) for shape in ("LM", "HLM", "1M")},
    **{f"float {shape}": partial(_dense, shape, False, False) for shape in ("LM", "BHLM", "B1LM", "1HLM", "L1")},
    "bool BHLM & causal": partial(_dense, "BHLM", True, True),
    "float H1M & causal": partial(_dense, "H1M", False, True),
    "BlockMask": partial(_block_mask, _sink_and_window),
    "BlockMask of documents": partial(_block_mask, _two_documents),
}


def uneven(length: int, ranks: int) -> SequenceLayout:
    """Chunks of many lengths by hand; the last rank (of several) is empty."""
    cuts = sorted([0, min(1, length), length // 3, length // 3 + 1, max(length - 1, 0), length])
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for index in range(5):
        chunks[index * 2 % max(ranks - 1, 1)].append((cuts[index], cuts[index + 1]))
    return SequenceLayout.from_chunks(chunks)


def _documents(length: int, ranks: int, mask: Mask) -> SequenceLayout:
    return per_document_head_tail(length, ranks, documents=(1, length // 2, length - length // 2 - 1))


LAYOUTS: dict[str, Callable[[int, int, Mask], SequenceLayout]] = {
    "contiguous": lambda length, ranks, mask: contiguous(length, ranks),
    "head_tail": lambda length, ranks, mask: head_tail(length, ranks),
    "striped": lambda length, ranks, mask: striped(length, ranks, block=2),
    "per_document_head_tail": _documents,
    "by_work": lambda length, ranks, mask: by_work(length, ranks, mask=mask),
    "uneven": lambda length, ranks, mask: uneven(length, ranks),
}


@dataclass(frozen=True)
class Row:
    strategy: str
    mask: str
    layout: str
    kernel: str
    heads: tuple[int, int]
    dtype: torch.dtype
    ranks: int
    length: int

    def value(self) -> MaskValue:
        return MASKS[self.mask](self.length, self.heads[0], self.dtype)

    def cut(self) -> SequenceLayout:
        return LAYOUTS[self.layout](self.length, self.ranks, self.value().mask)


AXES = {
    "strategy": STRATEGIES,
    "mask": MASKS,
    "layout": LAYOUTS,
    "kernel": KERNELS,
    "heads": HEADS,
    "dtype": DTYPES,
    "ranks": RANKS,
    "length": LENGTHS,
}
assert [axis.name for axis in fields(Row)] == list(AXES)


def makes_sense(row: Row) -> bool:
    """The only rule: two ranks exchange heads, so two must divide the ranks."""
    return not (row.strategy.startswith("Ulysses x") and row.ranks % 2)


def pairs_of(row: Row) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """What a row covers: its values on every two axes."""
    return set(combinations([(axis, getattr(row, axis)) for axis in AXES], 2))


class _Draw:
    """Draws rows, the same ones every time, of which each covers as many pairs not seen before as it can."""

    def __init__(self) -> None:
        self.seen: set[tuple[tuple[str, object], tuple[str, object]]] = set()
        self.rows: list[Row] = []
        self._random = random.Random(0)
        # Few of eight, which take longest.
        self._values = {axis: tuple(values) for axis, values in AXES.items()} | {"ranks": (1, 2, 2, 3, 4, 4, 5, 8)}

    def row(self, draws: int, **fixed: object) -> None:
        drawn = [
            Row(**{axis: fixed[axis] if axis in fixed else self._random.choice(self._values[axis]) for axis in AXES})
            for _ in range(draws)
        ]
        self.rows.append(max(filter(makes_sense, drawn), key=lambda row: len(pairs_of(row) - self.seen)))
        self.seen |= pairs_of(self.rows[-1])


@cache
def grid() -> tuple[Row, ...]:
    """Every two values of any two axes: every strategy x mask once, and rows for the pairs that are left."""
    draw = _Draw()
    for strategy, mask in product(STRATEGIES, MASKS):
        draw.row(50, strategy=strategy, mask=mask)
    for pair in sorted(possible_pairs(), key=str):
        if pair not in draw.seen:
            draw.row(200, **dict(pair))
    return tuple(draw.rows)


@cache
def whole_grid() -> tuple[Row, ...]:
    """Every strategy x mask x layout once, of which plans are made, and other values drawn for each."""
    draw = _Draw()
    for strategy, mask, layout in product(STRATEGIES, MASKS, LAYOUTS):
        draw.row(12, strategy=strategy, mask=mask, layout=layout)
    return tuple(draw.rows)


def possible_pairs() -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Pairs of values that some row of the product of all axes has."""
    possible = {
        ((one, x), (other, y)) for one, other in combinations(AXES, 2) for x, y in product(AXES[one], AXES[other])
    }
    senseless = {
        (("strategy", strategy), ("ranks", ranks))
        for strategy, ranks in product(STRATEGIES, RANKS)
        if strategy.startswith("Ulysses x") and ranks % 2
    }
    return possible - senseless


def missing_pairs() -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return possible_pairs() - set().union(*map(pairs_of, grid()))


_SHOWN = {
    "strategy": "strategies",
    "mask": "masks",
    "layout": "layouts",
    "kernel": "kernels",
    "heads": "query heads, key heads",
    "dtype": "dtypes",
    "ranks": "ranks",
    "length": "positions",
}


def coverage() -> str:
    """What the grid covers, as tutorials/support.md shows it: its values, and how many rows have each."""
    lines = [f"{len(grid())} rows:", "", "| axis | values, and the rows that have each |", "|---|---|"]
    for axis, values in AXES.items():
        counts = Counter(getattr(row, axis) for row in grid())
        names = (str(value).removeprefix("torch.") for value in values)
        shown = "; ".join(f"{name}: {counts[value]}" for name, value in zip(names, values, strict=True))
        lines.append(f"| {_SHOWN[axis]} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(coverage())
