"""Keys that an indexer has selected for each query: a mask whose rows are numbers of keys, or of blocks of keys.

A tile gathers the keys of its queries, or materializes its own part of the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import torch

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.checksum import version_of
from cp_styles._lib.contents import Contents
from cp_styles._lib.device_copies import DeviceTables
from cp_styles._lib.troubleshooting import see
from cp_styles.kernels.selected import GatheredRows, Picks, units_of
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Full, Mask
from cp_styles.plan.linear import make_holders

# Queries of one range have as many keys as the first of them, which has the most. Others have at least this share.
_LEAST_FILLED = 3 / 4

# The time of a gathered pair, in pairs of a head of a tile with an explicit mask, by device: once for all heads that
# share its keys, and for each of these heads. Measured on a CPU with 64 dims, forward and backward. On a GPU not
# measured: estimated from the bytes of copies in float32.
_COSTS, _COSTS_ON_GPU = {"cpu": (14.0, 1.5)}, (280.0, 2.0)


# The largest number of numbers that are sorted at a time, and dtypes of these numbers.
_SORTED, _INTS = 2**22, (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Selection(Mask):
    """Which keys the queries of this rank have selected, on the host: the pattern of :class:`Selected`.

    Attributes:
        layouts: the layout of queries, and of the keys among which they select.
        rank: this rank.
        selected_S: bool for each key of the whole sequence: some query of this rank has selected it.
        sent: for each destination, bool for each row of this rank: some query of that rank has selected it.
        counts_BGPK: the number of queries that have selected 0, 1, .. keys (or blocks) of each rank.
        block: the number of consecutive keys of a block.
        crosses: the keys are of another sequence than the queries.
    """

    layouts: tuple[SequenceLayout, SequenceLayout]
    rank: int
    selected_S: torch.Tensor
    sent: tuple[torch.Tensor, ...]
    counts_BGPK: torch.Tensor
    block: int = 1
    crosses: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]

    bounds, breaks = Full.bounds, Full.breaks
    has_bias = True  # pyright: ignore[reportAssignmentType]

    @property
    def only_for(self) -> tuple[Any, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.layouts, self.rank

    def needed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        """No key travels that no query has selected. One of both is this rank's, and all of a rank's are asked for."""
        if not len(q_positions_L):
            return torch.zeros(len(kv_positions_M), dtype=torch.bool, device="cpu")
        queries, _ = make_holders(*self.layouts)
        peer = int(queries.holder(queries.chunk(q_positions_L[:1])))
        return self.selected_S[kv_positions_M] if peer == self.rank else self.sent[peer]

    @cached_property
    def positions(self) -> DeviceTables:
        """The positions of the queries of this rank, ascending."""
        return DeviceTables(self.layouts[0].positions(self.rank, "cpu"))

    def widths(self, source: int, groups: list[int]) -> Iterator[tuple[int, int]]:
        """The numbers of queries and of keys (or blocks) of ranges of the queries that have keys of ``source``.

        For all rows of the batch, and for one unit of heads with each of ``groups``. Queries with most keys are first.
        """
        counts = self.counts_BGPK[:, groups, source].sum((0, 1)).tolist()
        rows = width = 0
        for keys in range(len(counts) - 1, 0, -1):
            if not counts[keys]:
                continue
            if keys < _LEAST_FILLED * width:
                yield rows, width
                rows = width = 0
            rows, width = rows + counts[keys], width or keys
        if rows:
            yield rows, width

    def pairs(self) -> float:
        """The mean number of pairs of queries and gathered keys of a head."""
        rows, groups, ranks, _ = self.counts_BGPK.shape
        widths = (x for source in range(ranks) for x in self.widths(source, list(range(groups))))
        return sum(queries * keys for queries, keys in widths) * self.block / max(rows * groups, 1)


def gathers_keys(mask: Mask, heads: int, key_heads: int) -> bool:
    """Whether tiles of ``mask`` gather their keys: its remaining parts are bands, and few keys are selected."""
    selections = [part for part in mask.pattern.parts if isinstance(part, Selection)]
    others = [part for part in mask.pattern.parts if not isinstance(part, Selection)]
    if len(selections) != 1 or mask.selected is None or any(part.has_gaps or part.has_bias for part in others):
        return False
    (selection,) = selections
    together = max(heads // max(key_heads, selection.counts_BGPK.shape[1]), 1)
    keys = int(selection.selected_S.sum()) / max(len(selection.selected_S), 1)
    band = int(mask.pattern.work(selection.positions.host[0], len(selection.selected_S)).sum())
    shared, each = _COSTS.get(mask.selected.chosen_BGLK.device.type, _COSTS_ON_GPU)
    return selection.pairs() * (shared / together + each) <= keys * band


@dataclass(frozen=True, eq=False, repr=False)
class Selected(Mask):
    """Each query attends to its own selected keys. :func:`~cp_styles.mixers.context_select` makes such a mask.

    The mask is of *this rank's* queries, and holds for one layout. Combine it with the mask of the layer:
    ``Causal() & selected``. Positions that the remaining masks forbid stay hidden. Strategies that move keys (``Ring``,
    ``AllGather``) send the selected keys alone. ``Ulysses`` cannot, because its queries change ranks.

    Args:
        chosen_BGLK: int32 or int64 [B, G, L, K], or [1, G, L, K] for all rows of the batch: the positions of the
            selected keys of this rank's queries, or the numbers of blocks of keys, in any order; -1 for none. Each of G
            equal ranges of the query heads has its own. Do not change the tensor in place.
        of_rank: the rows that travel.
        counts_BGPL: how many keys (or blocks) of each rank each query has selected.
        contents: what the tensor held when these rows were found.
        heads: the number of query heads, once it is known.

    Example::

        mask = Causal() & selected_keys(positions_BLK, mesh, layout=layout)
        out = context_attention(q, k, v, mesh, mask=mask, layout=layout)
    """

    chosen_BGLK: torch.Tensor
    of_rank: Selection
    counts_BGPL: torch.Tensor
    contents: Contents | None = field(default=None, repr=False)
    heads: int | None = None
    _version: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", version_of(self.chosen_BGLK))

    def __repr__(self) -> str:
        # Ranks compare this text, and each has its own positions.
        batch, groups, _, count = self.chosen_BGLK.shape
        blocks = f" blocks of {self.of_rank.block}" if self.of_rank.block > 1 else ""
        return f"Selected({count}{blocks} of {self.length} keys, {batch} rows, {groups} groups)"

    @property
    def pattern(self) -> Mask:
        return self.of_rank

    @property
    def only_for(self) -> tuple[Any, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of_rank.only_for

    @property
    def crosses(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of_rank.crosses

    @property
    def positional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.crosses

    has_bias, additive = True, False  # pyright: ignore[reportAssignmentType]

    @property
    def length(self) -> int:
        return self.of_rank.layouts[1].length

    @property
    def varies_by_head_or_row(self) -> bool:
        return self.chosen_BGLK.shape[:2] != (1, 1)

    bounds, breaks = Full.bounds, Full.breaks

    def needed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        return self.of_rank.needed(q_positions_L, kv_positions_M)

    def check(self, shape: tuple[int, int, int, int]) -> None:
        (rows, groups), lengths = self.chosen_BGLK.shape[:2], tuple(layout.length for layout in self.of_rank.layouts)
        if rows not in (1, shape[0]) or shape[2:] != lengths:
            raise ValueError(
                f"keys were selected for {rows} rows of {lengths[0]} positions, the attention has {shape[0]} rows, "
                f"{shape[2]} queries and {shape[3]} keys, of {lengths[1]}: select keys for each call"
                f"{see('A mask of another length')}"
            )
        if shape[1] % groups:
            raise ValueError(
                f"keys were selected for {groups} groups of heads, the attention has {shape[1]} query heads: give one "
                "choice for all heads, for each key head, for each query head, or for another divisor of the query "
                "heads"
            )

    def for_heads(self, count: int) -> Selected:
        return self if count == self.heads else replace(self, heads=count)

    @property
    def selected(self) -> Selected:
        return self

    def check_unchanged(self) -> None:
        self._check_version()
        if self.contents is not None and not self.contents.are_in(self.chosen_BGLK, f"the tensor of {self!r}"):
            self._refuse_changes()

    def _check_version(self) -> None:
        if version_of(self.chosen_BGLK) != self._version:
            self._refuse_changes()

    def _refuse_changes(self) -> NoReturn:
        raise RuntimeError(f"the positions of {self!r} were changed in place; give a copy")

    def row(self, index: int) -> Mask:
        if self.chosen_BGLK.shape[0] == 1:
            return self
        chosen, counts, whole = (
            x[index : index + 1] for x in (self.chosen_BGLK, self.counts_BGPL, self.of_rank.counts_BGPK)
        )
        return Selected(chosen, replace(self.of_rank, counts_BGPK=whole), counts, heads=self.heads)

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        self._check_version()
        device, keys, block = self.chosen_BGLK.device, kv_positions_M.shape[0], self.of_rank.block
        rows = torch.searchsorted(self.of_rank.positions.on(device)[0], q_positions_L.to(device))
        wanted_BGLK = self.chosen_BGLK.index_select(2, rows).to(kv_positions_M.dtype)
        # Keys of several sources in one tile are not in the order of positions. The first key of a block stands for it.
        block_M = kv_positions_M.to(device) // block
        sorted_M = block_M.sort().values
        place_BGLK = torch.searchsorted(sorted_M, wanted_BGLK).clamp(max=keys - 1)
        column_BGLK = torch.where(sorted_M[place_BGLK] == wanted_BGLK, place_BGLK, keys)
        bias = torch.full((*wanted_BGLK.shape[:3], keys + 1), float("-inf"), device=device)
        bias = bias.scatter_(-1, column_BGLK, 0.0).index_select(-1, torch.searchsorted(sorted_M, block_M))
        groups = bias.shape[1]
        return bias if groups == 1 or self.heads is None else bias.repeat_interleave(self.heads // groups, 1)

    @cached_property
    def _by_rank(self) -> torch.Tensor:
        """The numbers of each query in the order of the ranks that hold their keys, plus that rank times the number of
        blocks and one: [B, G, L, N]. A block of several ranks is there once for each."""
        blocks = -(-self.length // self.of_rank.block)
        holders, chosen = holders_of_blocks(self.of_rank.layouts[1], self.of_rank.block), self.chosen_BGLK
        table = holders.on(chosen.device)[0] * (blocks + 1)  # [ranks that share a block, blocks + 1]
        many = (self.of_rank.layouts[1].ranks + 1) * (blocks + 1) >= 2**31
        numbers = chosen.new_empty(*chosen.shape[:3], chosen.shape[3] * len(table), dtype=_INTS[many])
        step = max(_SORTED // max(numbers[:, :, :1].numel(), 1), 1)
        for part, result in zip(chosen.split(step, 2), numbers.split(step, 2), strict=True):
            part = part.long()
            each = torch.cat([of_block[part] + part for of_block in table], 3)  # a key of no block: after all blocks
            result.copy_(each.sort(3).values)
        return numbers

    def picks(
        self,
        source: int,
        kv_positions_M: torch.Tensor,
        bounds: tuple[torch.Tensor, torch.Tensor],
        batch: int,
        heads: tuple[int, int],
        key_heads: int,
    ) -> Picks:
        """The keys of a tile that each query of this rank has selected.

        Args:
            source: the rank that holds the keys.
            kv_positions_M: their positions.
            bounds: the first and one past the last position that each query may attend to.
            batch: the rows of the batch.
            heads: the range of the query heads.
            key_heads: the number of key heads of the tile.
        """
        self._check_version()
        selection, (rows_of, groups, queries, _) = self.of_rank, self.chosen_BGLK.shape
        size = (self.heads or heads[1]) // groups
        units = units_of(heads, key_heads, size)
        step = (heads[1] - heads[0]) // units
        widths = selection.widths(source, [head // size for head in range(*heads, step)])
        sizes = tuple((rows * batch // rows_of, width * selection.block) for rows, width in widths)
        device, block, keys = self.chosen_BGLK.device, selection.block, kv_positions_M.shape[0]
        if kv_positions_M.device.type == "meta":  # shapes only
            rows = kv_positions_M.new_empty

            def gather_nothing(first: int, stop: int, width: int) -> GatheredRows:
                columns = rows(stop - first, width)
                return GatheredRows(rows(stop - first), columns, columns > 0)

            return Picks(units, sizes, gather_nothing)
        group_U = (torch.arange(units, device=device) * step + heads[0]) // size
        order = self.counts_BGPL[:, :, source].index_select(1, group_U).expand(batch, -1, -1).flatten()
        order = order.argsort(descending=True, stable=True)
        blocks, choices, numbers = -(-self.length // block), self._by_rank.shape[3], self._by_rank.flatten()
        starts = self.counts_BGPL[:, :, :source].sum(2).flatten()
        # From positions to keys of the tile; the last one is of none.
        column = torch.full((self.length + 1,), keys, device=device)
        column.index_copy_(0, kv_positions_M.to(device), torch.arange(keys, device=device))
        lo, hi = (x.to(device) for x in bounds)

        def gather(first: int, stop: int, width: int) -> GatheredRows:
            rows = order[first:stop]
            unit, query = rows // queries, rows % queries
            row = (unit // units if rows_of > 1 else 0) * groups + group_U[unit % units]
            row = row * queries + query
            at = (starts[row][:, None] + torch.arange(width // block, device=device)).clamp(max=choices - 1)
            # A number of a later rank is beyond all keys here, and the last number may come again.
            wanted = numbers[row[:, None] * choices + at].long() - source * (blocks + 1)
            again = torch.zeros_like(wanted, dtype=torch.bool)
            again[:, 1:] = wanted[:, 1:] == wanted[:, :-1]
            wanted = wanted[..., None] * block + torch.arange(block, device=device)
            wanted = wanted.masked_fill_(again[..., None], self.length).clamp_(max=self.length).flatten(1)
            columns = column[wanted]
            hidden = (columns == keys) | (wanted < lo[query, None]) | (wanted >= hi[query, None])
            return GatheredRows(rows, columns.clamp_(max=keys - 1), hidden)

        return Picks(units, sizes, gather)


@remembered(16)
def holders_of_blocks(layout: SequenceLayout, block: int) -> DeviceTables:
    """The ranks that hold keys of each block, each once, [n, blocks + 1]; as many as ranks for none, and at the end."""
    blocks = -(-layout.length // block)
    owner = torch.full((blocks * block,), layout.ranks, device="cpu")
    for rank in range(layout.ranks):
        owner[layout.positions(rank, "cpu")] = rank
    owner = owner.view(blocks, block).sort(1).values
    owner[:, 1:].masked_fill_(owner[:, 1:] == owner[:, :-1], layout.ranks)
    owner = owner.sort(1).values
    most = max([1, *(owner < layout.ranks).sum(1).tolist()])
    owner = owner[:, :most]
    return DeviceTables(torch.cat((owner, owner.new_full((1, owner.shape[1]), layout.ranks))).T.contiguous())
