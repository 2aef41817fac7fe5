"""Keys that an indexer has selected for each query: a mask whose rows are positions.

A tile materializes its own part of the mask alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch

from cp_styles.checksum import version_of
from cp_styles.contents import Contents
from cp_styles.device_copies import DeviceTables
from cp_styles.layout import SequenceLayout
from cp_styles.mask import Full, Mask
from cp_styles.plan.linear import make_holders
from cp_styles.troubleshooting import see


@dataclass(frozen=True, eq=False)
class Selection(Mask):
    """Which keys the queries of this rank have selected, on the host: the pattern of :class:`Selected`.

    Attributes:
        layouts: the layout of queries, and of the keys among which they select.
        rank: this rank.
        selected_S: bool for each key of the whole sequence: some query of this rank has selected it.
        sent: for each destination, bool for each row of this rank: some query of that rank has selected it.
    """

    layouts: tuple[SequenceLayout, SequenceLayout]
    rank: int
    selected_S: torch.Tensor
    sent: tuple[torch.Tensor, ...]

    bounds, breaks = Full.bounds, Full.breaks
    has_bias = True  # pyright: ignore[reportAssignmentType]

    @property
    def crosses(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.layouts[0] != self.layouts[1]

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


@dataclass(frozen=True, eq=False, repr=False)
class Selected(Mask):
    """Each query attends to its own selected keys. :func:`~cp_styles.mixers.context_select` makes such a mask.

    The mask is of *this rank's* queries, and holds for one layout. Combine it with the mask of the layer:
    ``Causal() & selected``. Positions that the remaining masks forbid stay hidden. Strategies that move keys (``Ring``,
    ``AllGather``) send the selected keys alone. ``Ulysses`` cannot, because its queries change ranks.

    Args:
        positions_BLK: int32 or int64 [B, L, K], or [1, L, K] for all rows of the batch: the positions of the selected
            keys of this rank's queries, in any order; -1 for none. Do not change the tensor in place.
        of_rank: the rows that travel.
        contents: what the tensor held when these rows were found.

    Example::

        mask = Causal() & selected_keys(positions_BLK, mesh, layout=layout)
        out = context_attention(q, k, v, mesh, mask=mask, layout=layout)
    """

    positions_BLK: torch.Tensor
    of_rank: Selection
    contents: Contents | None = field(default=None, repr=False)
    _version: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", version_of(self.positions_BLK))

    def __repr__(self) -> str:
        # Ranks compare this text, and each has its own positions.
        batch, _, count = self.positions_BLK.shape
        return f"Selected({count} of {self.length} keys, {batch} rows)"

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
        return self.positions_BLK.shape[0] != 1

    bounds, breaks = Full.bounds, Full.breaks

    def needed(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        return self.of_rank.needed(q_positions_L, kv_positions_M)

    def check(self, shape: tuple[int, int, int, int]) -> None:
        rows, lengths = self.positions_BLK.shape[0], tuple(layout.length for layout in self.of_rank.layouts)
        if rows not in (1, shape[0]) or shape[2:] != lengths:
            raise ValueError(
                f"keys were selected for {rows} rows of {lengths[0]} positions, the attention has {shape[0]} rows, "
                f"{shape[2]} queries and {shape[3]} keys, of {lengths[1]}: select keys for each call"
                f"{see('A mask of another length')}"
            )

    def check_unchanged(self) -> None:
        self._check_version()
        if self.contents is not None and not self.contents.are_in(self.positions_BLK, f"the tensor of {self!r}"):
            self._refuse_changes()

    def _check_version(self) -> None:
        if version_of(self.positions_BLK) != self._version:
            self._refuse_changes()

    def _refuse_changes(self) -> NoReturn:
        raise RuntimeError(f"the positions of {self!r} were changed in place; give a copy")

    def row(self, index: int) -> Mask:
        if self.positions_BLK.shape[0] == 1:
            return self
        return Selected(self.positions_BLK[index : index + 1], self.of_rank)

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        self._check_version()
        positions, keys = self.positions_BLK, kv_positions_M.shape[0]
        device = positions.device
        rows = torch.searchsorted(self.of_rank.positions.on(device)[0], q_positions_L.to(device))
        wanted_BLK = positions.index_select(1, rows).to(kv_positions_M.dtype)
        # Keys of several sources in one tile are not in the order of positions.
        sorted_M, order_M = kv_positions_M.to(device).sort()
        place_BLK = torch.searchsorted(sorted_M, wanted_BLK).clamp(max=keys - 1)
        column_BLK = torch.where(sorted_M[place_BLK] == wanted_BLK, order_M[place_BLK], keys)
        bias = torch.full((*wanted_BLK.shape[:2], keys + 1), float("-inf"), device=device)
        return bias.scatter_(-1, column_BLK, 0.0)[:, None, :, :keys]
