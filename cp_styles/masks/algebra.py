"""The base class of masks, and combinations of masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise, product
from math import inf
from typing import Any

import torch

from cp_styles._lib.troubleshooting import see

# A bound without effect, larger than any position. The sum of two does not overflow int64.
UNBOUNDED = 2**60


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """Blocks of (query, key) positions, for masks that are not bands.

    Attributes:
        block: size of a block in positions: (queries, keys).
        cover: uint8 ``[query blocks, key blocks]`` on the host. 0: no query of the block attends to any of its keys. 1:
            the bias of the mask decides. 2: each query attends to each key.
    """

    block: tuple[int, int]
    cover: torch.Tensor


def make_cells(
    grids: Sequence[BlockGrid], q: torch.Tensor, kv: torch.Tensor, begins: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ranges of queries and of keys at these positions that are within one block of each grid.

    Returns the cover ``[ranges of queries, ranges of keys]``, as in :class:`BlockGrid`; the first query of each range,
    and the number of queries; and likewise for keys. ``begins``: whether each query but the first begins a range.
    """
    blocks = [(q // grid.block[0], kv // grid.block[1]) for grid in grids]
    edges = []
    for side, positions in enumerate((q, kv)):
        changed = torch.ones(len(positions) + 1, dtype=torch.bool, device="cpu")
        changed[1:-1] = False if side or begins is None else begins
        for pair in blocks:
            changed[1:-1] |= pair[side].diff() != 0
        edges.append(torch.nonzero(changed).flatten())
    cover = torch.full((len(edges[0]) - 1, len(edges[1]) - 1), 2, device="cpu")
    for grid, (q_block, kv_block) in zip(grids, blocks, strict=True):
        cover = torch.minimum(cover, grid.cover[q_block[edges[0][:-1]]][:, kv_block[edges[1][:-1]]].long())
    return cover, *edges


class Mask:
    """Base of all masks: which keys each query attends to, in positions of the whole sequence. No communication.

    Masks are immutable and hashable, and are combined with ``&``. Subclasses are frozen dataclasses with two methods:
    :meth:`bounds`, the interval of keys of each query, and, if there are gaps in it, :meth:`allowed`. All else follows,
    the rows that are sent too. CONTRIBUTING.md has an example of each.
    """

    positional = True  # whether positions of queries correspond to positions of keys: both are of one sequence
    crosses = False  # whether bounds number the keys of another sequence, for positions of queries of this one
    separates = True  # whether it may hide tokens of one document of a pack from tokens of the next
    local = False  # whether a query attends to keys near it alone: a window, or chunks
    documents: tuple[int, ...] | None = None  # the lengths of the packed documents that it separates
    only_for: tuple[Any, int] | None = None  # (layouts, rank) of queries and keys for which alone it is known

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First and one-past-last key position that each of ``q_positions_L`` may attend to: two int64 ``[L]``."""
        raise NotImplementedError

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        # Attributes that describe the bounds of a base class do not hold for other bounds.
        if "bounds" in vars(cls) and getattr(cls.__base__, "bounds", None) is not Mask.bounds:
            for name in {"breaks", "parts", "positional", "crosses", "separates", "local"} - vars(cls).keys():
                setattr(cls, name, getattr(Mask, name))

    def breaks(self, length: int) -> torch.Tensor:
        """Positions below ``length`` where a bound may change its slope: int64, in any order.

        Between two breaks each bound is constant, or grows by one with each position. Additional breaks are allowed.
        This default compares the bounds of all positions. Subclasses that can compute their breaks override it.
        """
        steps = torch.stack([bound.diff() for bound in self.bounds(torch.arange(length, device="cpu"))])
        jumps = ((steps < 0) | (steps > 1)).any(0)
        turns = (steps[:, 1:] != steps[:, :-1]).any(0) & ~jumps[1:] & ~jumps[:-1]
        return torch.cat([torch.nonzero(where).flatten() + 1 for where in (jumps, turns)])

    @property
    def bands(self) -> tuple[Mask, ...]:
        """Masks of one interval for each query, which together are this mask: no pair is in two of them.

        A mask with several bands overrides it, and its own ``bounds`` contain them. Plans cut tiles of each band.
        """
        return (self,)

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor | None:
        """The bias inside the band, broadcastable to ``[B, H, L, M]``. None for bands without bias.

        It is added to the logits of the queries at ``q_positions_L`` and the keys at ``kv_positions_M``.
        """
        return None

    def needed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        """Which of the keys at ``kv_positions_M`` some query at ``q_positions_L`` attends to: bool ``[M]``.

        Plans ask a mask with gaps for the queries of a rank and the keys of a rank, ascending, on the host. Each rank
        asks for the queries of all ranks: the answer depends on positions alone. A key too many costs its bytes. A key
        too few is an error if the mask defines :meth:`allowed`, for the queries at which a plan looks: see there.
        This default compares pairs. Override it where a rule says it sooner; ``a & b`` asks all parts, and compares.
        """
        q, kv, none, by_pairs = q_positions_L, kv_positions_M, q_positions_L[:0], False
        first, stop = (torch.searchsorted(kv, bound) for bound in self.bounds(q))
        first = first.minimum(stop)
        # Queries of a cell see a range: their intervals touch. A key is in one if more have begun than ended.
        begins = (first[1:] > stop[:-1]) | (first[:-1] > stop[1:])
        cover, q_edges, kv_edges = make_cells(self.grids, q, kv, begins)
        q_cell, kv_cell = (torch.repeat_interleave(edges.diff()) for edges in (q_edges, kv_edges))
        least = torch.zeros_like(q_edges).scatter_reduce(0, q_cell, first, "amin", include_self=False)
        most = torch.zeros_like(q_edges).scatter_reduce(0, q_cell, stop, "amax", include_self=False)
        row, column = torch.nonzero(cover, as_tuple=True)
        low, high = kv_edges[column].maximum(least[row]), kv_edges[column + 1].minimum(most[row])
        depth = torch.zeros(len(kv) + 1, dtype=torch.int64, device="cpu")
        depth.index_add_(0, low, torch.ones_like(low)).index_add_(0, high.maximum(low), -torch.ones_like(low))
        found = depth.cumsum(0)[:-1] > 0
        for part in self.parts:
            if part is not self and type(part).needed is not Mask.needed:
                found &= part.needed(q, kv)
            by_pairs |= type(part).allowed is not Mask.allowed or len(part.bands) > 1
            by_pairs |= part.has_gaps and part.bias(none, none) is not None
        missing = found & by_pairs
        width = 1 + int((stop - first).sum()) // max(len(q), 1)
        step = max(128, min(width, 2**20 // width))
        # From the last queries, which mostly see most keys: a key is asked for until a query sees it.
        for end in range(len(q), 0, -step):
            rows, keys = slice(max(end - step, 0), end), torch.nonzero(missing).flatten()
            if not len(keys):
                break
            keys = keys[(keys >= first[rows].min()) & (keys < stop[rows].max())]
            seen, bias = self.allowed(q[rows], kv[keys]), self.bias(q[rows], kv[keys])
            seen = seen & (cover[q_cell[rows]][:, kv_cell[keys]] > 0)
            seen = seen if bias is None else seen & (bias != -inf).cpu()
            missing[keys[seen.flatten(0, -2).any(0)]] = False
        return found & ~missing

    @property
    def has_gaps(self) -> bool:
        """Whether a query may attend to some keys of its interval alone, so that plans ask :meth:`needed`."""
        own = type(self).allowed is not Mask.allowed or type(self).needed is not Mask.needed
        return own or bool(self.grids)

    @property
    def has_bias(self) -> bool:
        """Whether the band alone does not define the mask, so that tiles need an explicit mask."""
        return type(self).allowed is not Mask.allowed

    @property
    def additive(self) -> bool:
        """Whether the bias has values other than 0 and -inf."""
        return self.has_bias and type(self).bias is not Mask.bias

    @property
    def grids(self) -> tuple[BlockGrid, ...]:
        """Grids that restrict the mask further than the band: see :class:`BlockGrid`."""
        return ()

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks of which this is the conjunction. None for :class:`Full`."""
        return (self,)

    @property
    def rows(self) -> tuple[Mask, ...]:
        """The masks of the rows of the batch, if a row is planned alone; otherwise this mask."""
        return (self,)

    @property
    def pattern(self) -> Mask:
        """The part of this mask that a plan depends on: the band, and whether there is a bias, but not its tensor."""
        return self

    @property
    def content(self) -> int:
        """A hash of the contents of tensors, which the repr does not show. Ranks compare it."""
        return 0

    @property
    def varies_by_head_or_row(self) -> bool:
        """Whether the mask differs between rows of the batch or between heads."""
        return False

    @property
    def length(self) -> int | None:
        """The sequence length that this mask is for. None if it fits any length."""
        return None

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a tensor of the mask has been changed in place. Called at each attention."""

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raise ValueError unless the mask fits an attention of the global ``shape`` [B, H, S_q, S_kv]."""
        if self.length not in (None, shape[3]):
            raise ValueError(
                f"the mask was made for {self.length} positions, the sequence has {shape[3]}"
                f"{see('A mask of another length')}"
            )

    def allowed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        """The mask but for a bias, as booleans ``[L, M]``, for ``q_positions_L`` and ``kv_positions_M``.

        The default is the bands. A mask with gaps overrides it, as ``super().allowed(...) & ...``. A plan raises for a
        pair that :meth:`bounds` or :meth:`needed` leave out; one of more than 2**20 pairs looks at some queries alone.
        """
        bounds = (band.bounds(q_positions_L) for band in self.bands)
        kv = kv_positions_M[None, :]
        return reduce(torch.logical_or, ((kv >= lo[:, None]) & (kv < hi[:, None]) for lo, hi in bounds))

    def work(self, q_positions_L: torch.Tensor, keys: int) -> torch.Tensor:
        """The number of keys, of ``keys``, to which each of ``q_positions_L`` attends: int64 ``[L]``. For balancers."""
        bounds = (band.bounds(q_positions_L) for band in self.bands)
        return reduce(torch.add, ((hi.clamp(max=keys) - lo).clamp(min=0) for lo, hi in bounds))

    def row(self, index: int) -> Mask:
        """The mask of row ``index`` of the batch."""
        return self

    def joined(self, parts: tuple[Mask, ...]) -> tuple[Mask, ...]:
        """The ``parts`` of a conjunction, of which this mask is one. A mask may take some into itself, or refuse them.

        Called by ``&``. The default changes nothing.
        """
        return parts

    def for_heads(self, count: int) -> Mask:
        """The mask of an attention with so many query heads."""
        return self

    @property
    def selected(self) -> Any:
        """The part of this mask that has keys for each query, if there is one part that has; otherwise None."""
        return None

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, PerRow):
            return PerRow(tuple(self.row(index) & mask for index, mask in enumerate(other.masks)))
        parts = tuple(dict.fromkeys((*self.parts, *other.parts)))
        for part in parts:
            parts = part.joined(parts)
        return All(parts) if len(parts) > 1 else (parts[0] if parts else Full())


@dataclass(frozen=True)
class Full(Mask):
    """Every query attends to every key."""

    parts, positional, separates = (), False, False  # pyright: ignore[reportAssignmentType]

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), torch.full_like(q_positions_L, UNBOUNDED)

    def breaks(self, length: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class KeyRange(Mask):
    """Every query attends to the keys ``first`` .. ``stop - 1``, such as the tokens of a padded row."""

    first: int
    stop: int

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(q_positions_L, self.first), torch.full_like(q_positions_L, self.stop)

    breaks = Full.breaks


class _CompositeMask(Mask):
    """Base of masks that consist of masks."""

    masks: tuple[Mask, ...]

    @property
    def pattern(self) -> Mask:
        return type(self)(tuple(mask.pattern for mask in self.masks))  # pyright: ignore[reportCallIssue]

    @property
    def content(self) -> int:
        return hash(tuple(mask.content for mask in self.masks))

    has_bias, has_gaps, additive, varies_by_head_or_row, positional, crosses, separates, local = (
        property(lambda self, name=name: any(getattr(mask, name) for mask in self.masks))
        for name in [
            "has_bias",
            "has_gaps",
            "additive",
            "varies_by_head_or_row",
            "positional",
            "crosses",
            "separates",
            "local",
        ]
    )

    @property
    def only_for(self) -> tuple[Any, int] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return next((mask.only_for for mask in self.masks if mask.only_for is not None), None)

    def check_unchanged(self) -> None:
        for mask in self.masks:
            mask.check_unchanged()


@dataclass(frozen=True)
class All(_CompositeMask):
    """The conjunction of masks, made by ``&``."""

    masks: tuple[Mask, ...]
    parts = property(lambda self: self.masks)

    @property
    def documents(self) -> tuple[int, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        edges = {edge for part in self.parts for edge in accumulate(part.documents or ())}
        return tuple(high - low for low, high in pairwise((0, *sorted(edges)))) if edges else None

    @property
    def grids(self) -> tuple[BlockGrid, ...]:
        return tuple(grid for part in self.parts for grid in part.grids)

    @cached_property
    def bands(self) -> tuple[Mask, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        combined = product(*(part.bands for part in self.parts))
        return (self,) if all(len(part.bands) == 1 for part in self.parts) else tuple(map(All, combined))

    def work(self, q_positions_L: torch.Tensor, keys: int) -> torch.Tensor:
        # The least work of the parts is an upper bound. The intersection may be smaller.
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

    def for_heads(self, count: int) -> Mask:
        return reduce(Mask.__and__, (part.for_heads(count) for part in self.parts))

    @property
    def selected(self) -> Any:
        found = [part.selected for part in self.parts if part.selected is not None]
        return found[0] if len(found) == 1 else None

    def check(self, shape: tuple[int, int, int, int]) -> None:
        for part in self.parts:
            part.check(shape)

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        los, his = zip(*(part.bounds(q_positions_L) for part in self.parts), strict=True)
        return reduce(torch.maximum, los), reduce(torch.minimum, his)

    def breaks(self, length: int) -> torch.Tensor:
        breaks = torch.cat([part.breaks(length) for part in self.parts])
        first, last = split_at(breaks, length)
        both = torch.cat((first, last))
        sides = (torch.stack(side) for side in zip(*(part.bounds(both) for part in self.parts), strict=True))
        # Between breaks of the parts, the maximum of the lower bounds is the largest constant bound or the largest
        # growing bound. It has a break where the growing bound overtakes. Likewise for the minimum of upper bounds.
        for side, largest in zip(sides, (True, False), strict=True):
            before, after = side.chunk(2, dim=1)
            none = -2 * UNBOUNDED if largest else 2 * UNBOUNDED
            climbs = after > before
            stays, rises = (
                bound.amax(0) if largest else bound.amin(0)
                for bound in (before.masked_fill(climbs, none), (before - first).masked_fill(~climbs, none))
            )
            meet = stays - rises
            breaks = torch.cat((breaks, meet[(meet > first) & (meet < last)]))
        return breaks

    def allowed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        return reduce(torch.logical_and, (part.allowed(q_positions_L, kv_positions_M) for part in self.parts))

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor | None:
        biases = [bias for part in self.parts if (bias := part.bias(q_positions_L, kv_positions_M)) is not None]
        return reduce(torch.add, biases) if biases else None


def split_at(breaks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split ``0 .. length - 1`` at ``breaks``. Returns the first and the last position of each piece, two int64."""
    first = torch.cat((breaks.new_zeros(min(length, 1)), breaks[(breaks > 0) & (breaks < length)])).unique()
    return first, torch.cat((first[1:] - 1, first.new_full((min(length, 1),), length - 1)))


@dataclass(frozen=True)
class PerRow(_CompositeMask):
    """One mask for each row of the batch, for example for packed documents that differ between rows.

    Rows are computed one by one, each with its own plan: only the keys that its mask needs are sent. All rows share one
    layout; ``by_work(S, P, mask=...)`` balances the sum of their work.

    Args:
        masks: one mask for each row, none of them a PerRow.

    Raises:
        TypeError: ``masks`` is empty, or has items that are not masks.
        ValueError: the masks are for different lengths.

    Example::

        mask = Causal() & PerRow((Documents((4, 6)), Documents((10,))))  # for a batch of two rows
    """

    masks: tuple[Mask, ...]
    rows, varies_by_head_or_row = property(lambda self: self.masks), True

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        if not self.masks or any(not isinstance(mask, Mask) or isinstance(mask, PerRow) for mask in self.masks):
            raise TypeError(f"PerRow takes one mask for each row of the batch, got {self.masks!r}")
        if len({mask.length for mask in self.masks} - {None}) > 1:
            raise ValueError(f"the rows' masks are for {[mask.length for mask in self.masks]} positions: give all one")

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

    def for_heads(self, count: int) -> Mask:
        return PerRow(tuple(mask.for_heads(count) for mask in self.masks))

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, PerRow) and len(other.masks) != len(self.masks):
            raise ValueError(f"masks for {len(self.masks)} and for {len(other.masks)} rows were combined")
        return PerRow(tuple(mask & other.row(index) for index, mask in enumerate(self.masks)))
