"""What a mask is, and how masks combine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

# "No bound on this side": larger than any position, small enough that sums of two do not overflow int64.
UNBOUNDED = 2**60


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """Blocks of (query, key) positions, for masks that no band describes.

    Attributes:
        block: positions of a block: (queries, keys).
        cover: uint8 ``[query blocks, key blocks]`` on the host: 0 nobody attends to anything in the block, 1 the
            mask's bias says who does, 2 everybody does.
    """

    block: tuple[int, int]
    cover: torch.Tensor


class Mask:
    """Base of all masks: immutable, hashable, combined with ``&``. Subclasses define :meth:`bounds`."""

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First and one-past-last key position each query position may attend to: two int64 ``[L]``."""
        raise NotImplementedError

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        if "bounds" in vars(cls) and "breaks" not in vars(cls):
            cls.breaks = Mask.breaks  # those of its base say nothing about the new bounds

    def breaks(self, length: int) -> torch.Tensor:
        """Positions below ``length`` where a bound may leave its course: int64, in any order, some perhaps in vain.

        From one of them to the next, each bound stays, or climbs by one a position. This one looks at the bounds of
        all positions; masks that know it better say so.
        """
        steps = torch.stack([bound.diff() for bound in self.bounds(torch.arange(length))])
        jumps = ((steps < 0) | (steps > 1)).any(0)
        turns = (steps[:, 1:] != steps[:, :-1]).any(0) & ~jumps[1:] & ~jumps[:-1]
        return torch.cat([torch.nonzero(where).flatten() + 1 for where in (jumps, turns)])

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor | None:
        """What is added to the logits inside the band, broadcastable to ``[B, H, L, M]``; None for plain bands."""
        return None

    @property
    def has_bias(self) -> bool:
        return False

    @property
    def additive(self) -> bool:
        """Whether the bias holds other numbers than 0 and -inf."""
        return self.has_bias

    @property
    def biased_everywhere(self) -> bool:
        """Whether the bias must be asked for even where :attr:`grids` say that a block is full."""
        return self.has_bias

    @property
    def grids(self) -> tuple[BlockGrid, ...]:
        """What blocks, beside the band, say about who attends to whom: see :class:`BlockGrid`."""
        return ()

    @property
    def pattern(self) -> Mask:
        """This mask as far as a plan depends on it: the band, and that there is a bias, but not its tensor."""
        return self

    @property
    def content(self) -> int:
        """A number that differs where masks differ in what their texts do not say: what their tensors hold."""
        return 0

    @property
    def varies_by_head_or_row(self) -> bool:
        """Whether rows of the batch, or heads, have masks of their own."""
        return False

    @property
    def length(self) -> int | None:
        """The sequence length this mask was written for, or None when it fits any."""
        return None

    @property
    def nbytes(self) -> int:
        """About what it takes in memory: its tensors, and numbers in tuples."""
        values = vars(self).values()
        tensors = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        return tensors + sum(40 * len(value) for value in values if isinstance(value, tuple)) + 100

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raise ValueError unless the mask fits an attention of ``shape``, the whole [B, H, S_q, S_kv]."""
        if self.length not in (None, shape[3]):
            raise ValueError(f"the mask was made for {self.length} positions, the sequence has {shape[3]}")

    def allowed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        """The band as booleans ``[L, M]``: the definition that everything faster is tested against."""
        lo, hi = self.bounds(q_positions_L)
        kv = kv_positions_M[None, :]
        return (kv >= lo[:, None]) & (kv < hi[:, None])

    def work(self, q_positions_L: torch.Tensor, keys: int) -> torch.Tensor:
        """How many of ``keys`` keys each query attends to: int64 ``[L]``. What layouts balance."""
        lo, hi = self.bounds(q_positions_L)
        return (hi.clamp(max=keys) - lo).clamp(min=0)

    def row(self, index: int) -> Mask:
        """The mask of one row of the batch."""
        return self

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, PerRow):
            return PerRow(tuple(self.row(index) & mask for index, mask in enumerate(other.masks)))
        parts = tuple(part for mask in (self, other) for part in (mask.parts if isinstance(mask, All) else (mask,)))
        parts = tuple(dict.fromkeys(part for part in parts if not isinstance(part, Full)))
        return All(parts) if len(parts) > 1 else (parts[0] if parts else Full())


@dataclass(frozen=True)
class Full(Mask):
    """Everybody attends to everybody."""

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), torch.full_like(q_positions_L, UNBOUNDED)

    def breaks(self, length: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class All(Mask):
    """The conjunction of masks; made by ``&``."""

    parts: tuple[Mask, ...]

    @property
    def pattern(self) -> Mask:
        return All(tuple(part.pattern for part in self.parts))

    @property
    def has_bias(self) -> bool:
        return any(part.has_bias for part in self.parts)

    @property
    def content(self) -> int:
        return hash(tuple(part.content for part in self.parts))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def varies_by_head_or_row(self) -> bool:
        return any(part.varies_by_head_or_row for part in self.parts)

    @property
    def additive(self) -> bool:
        return any(part.additive for part in self.parts)

    @property
    def biased_everywhere(self) -> bool:
        return any(part.biased_everywhere for part in self.parts)

    @property
    def grids(self) -> tuple[BlockGrid, ...]:
        return tuple(grid for part in self.parts for grid in part.grids)

    def work(self, q_positions_L: torch.Tensor, keys: int) -> torch.Tensor:
        # At most what the least of them leaves; how much less, is not counted.
        works = (part.work(q_positions_L, keys) for part in self.parts)
        return reduce(torch.minimum, works, super().work(q_positions_L, keys))

    @property
    def length(self) -> int | None:
        lengths = {part.length for part in self.parts} - {None}
        if len(lengths) > 1:
            raise ValueError(f"masks for sequences of different lengths {sorted(lengths, key=str)} were combined")
        return lengths.pop() if lengths else None

    def row(self, index: int) -> Mask:
        return reduce(Mask.__and__, (part.row(index) for part in self.parts))

    def check(self, shape: tuple[int, int, int, int]) -> None:
        for part in self.parts:
            part.check(shape)

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        los, his = zip(*(part.bounds(q_positions_L) for part in self.parts), strict=True)
        return reduce(torch.maximum, los), reduce(torch.minimum, his)

    def breaks(self, length: int) -> torch.Tensor:
        found = torch.cat([part.breaks(length) for part in self.parts])
        first, last = stretches(found, length)
        ends = [
            [torch.stack(side) for side in zip(*(p.bounds(x) for p in self.parts), strict=True)] for x in (first, last)
        ]
        # Between breaks of the parts, the largest of their lower bounds is that of one which stays or of one which
        # climbs, and leaves its course where the two meet. Likewise the least of the upper bounds.
        for before, after, largest in zip(*ends, (True, False), strict=True):
            none = -2 * UNBOUNDED if largest else 2 * UNBOUNDED
            climbs = after > before
            stays, rises = (
                bound.amax(0) if largest else bound.amin(0)
                for bound in (before.masked_fill(climbs, none), (before - first).masked_fill(~climbs, none))
            )
            meet = stays - rises
            found = torch.cat((found, meet[(meet > first) & (meet < last)]))
        return found

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor | None:
        biases = [bias for part in self.parts if (bias := part.bias(q_positions_L, kv_positions_M)) is not None]
        return reduce(torch.add, biases) if biases else None


def stretches(breaks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last position of each stretch that ``breaks`` leave of ``0 .. length - 1``: two int64, ascending."""
    first = torch.cat((breaks.new_zeros(min(length, 1)), breaks[(breaks > 0) & (breaks < length)])).unique()
    return first, torch.cat((first[1:] - 1, first.new_full((min(length, 1),), length - 1)))


@dataclass(frozen=True)
class PerRow(Mask):
    """A mask for each row of the batch: packed documents that differ from row to row, for example.

    Rows attend one after the other, each by its own plan, so what the masks do not need does not travel. All rows are
    cut by one layout; ``by_work(S, P, mask=...)`` balances their sum.
    """

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        if not self.masks or any(not isinstance(mask, Mask) or isinstance(mask, PerRow) for mask in self.masks):
            raise TypeError(f"PerRow takes one mask for each row of the batch, got {self.masks!r}")
        if len({mask.length for mask in self.masks} - {None}) > 1:
            raise ValueError(f"the rows' masks are for {[mask.length for mask in self.masks]} positions: give all one")

    @property
    def has_bias(self) -> bool:
        return any(mask.has_bias for mask in self.masks)

    @property
    def content(self) -> int:
        return hash(tuple(mask.content for mask in self.masks))

    @property
    def varies_by_head_or_row(self) -> bool:
        return True

    @property
    def pattern(self) -> Mask:
        return PerRow(tuple(mask.pattern for mask in self.masks))

    @property
    def length(self) -> int | None:
        return next((mask.length for mask in self.masks if mask.length is not None), None)

    def check(self, shape: tuple[int, int, int, int]) -> None:
        if shape[0] != len(self.masks):
            raise ValueError(f"there are masks for {len(self.masks)} rows, the batch has {shape[0]}")
        for mask in self.masks:
            mask.check((1, *shape[1:]))

    def work(self, q_positions_L: torch.Tensor, keys: int) -> torch.Tensor:
        return reduce(torch.add, (mask.work(q_positions_L, keys) for mask in self.masks))

    def row(self, index: int) -> Mask:
        return self.masks[index]

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, PerRow) and len(other.masks) != len(self.masks):
            raise ValueError(f"masks for {len(self.masks)} and for {len(other.masks)} rows were combined")
        return PerRow(tuple(mask & other.row(index) for index, mask in enumerate(self.masks)))
