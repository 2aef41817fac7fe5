"""FlexAttention's BlockMask as a mask of this package, in global positions.

Most BlockMasks are bands (causal, windows, packed documents, prefixes, and their conjunctions). The analysis of a
BlockMask evaluates ``mask_mod`` once on its partial blocks. If the mask is a band, it has the plan, the bytes and the
kernels of a band. Otherwise it is planned block by block, and the values of ``mask_mod`` in partial blocks are kept.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import checksum
from cp_styles._lib.contents import Contents
from cp_styles._lib.device_copies import DeviceTables
from cp_styles._lib.introspect import captured_tensors
from cp_styles._lib.troubleshooting import see
from cp_styles.masks import Mask, PerRow
from cp_styles.masks.algebra import UNBOUNDED, BlockGrid

# Number of pairs for which mask_mod is evaluated at a time, with some int64 temporaries of this size.
_PAIRS = 2**22


class FlexMask(Mask):
    """A BlockMask of the *whole* sequence (``create_block_mask(mask_mod, B, H, S, S)``).

    Blocks may have any size, also non-square. Lengths need not divide. The mask may differ between rows of the batch
    and between heads. As in FlexAttention's kernels, the blocks of the BlockMask count first: full blocks are attended
    entirely, absent ones not at all, and ``mask_mod`` decides inside partial ones.

    Each BlockMask object is analyzed once: ``mask_mod`` is evaluated on its partial blocks. If the mask is not a
    band, one byte for each pair of a partial block is kept. No communication. The BlockMask must be the same on all
    ranks, which compare the results of the analysis.

    Args:
        block_mask: the BlockMask, for the lengths of the whole sequence.

    Raises:
        TypeError: ``block_mask`` is not a BlockMask.
        RuntimeError: here, or on every rank at an attention with the mask: a tensor of the BlockMask, or that
            ``mask_mod`` reads, holds other numbers than at the analysis (on a GPU at a later attention, if the version
            of the tensor is the same). A backward uses what its forward used.

    Example::

        by_frame = create_block_mask(lambda b, h, q, k: q // 100 >= k // 100, None, None, 1000, 1000, device="cpu")
        mask = FlexMask(by_frame) & SlidingWindow(300)
    """

    positional = False  # pyright: ignore[reportAssignmentType]

    def __init__(self, block_mask: BlockMask) -> None:
        if not isinstance(block_mask, BlockMask):
            raise TypeError(
                f"FlexMask takes a BlockMask of the whole sequence (create_block_mask), got {type(block_mask).__name__}"
            )
        self.block_mask = block_mask
        self._analysis = _get_analysis(block_mask)
        self._row: int | None = None  # the row of the batch, if this is the mask of a single row

    @classmethod
    def per_row(cls, block_mask: BlockMask) -> Mask:
        """The mask of ``block_mask``; or a :class:`~cp_styles.masks.PerRow` if each row of the batch has its own band.

        Rows have their own bands in packed documents that differ between rows, for example.
        """
        mask = cls(block_mask)
        rows = mask._analysis.bands
        return mask if rows is None or not mask.grids else PerRow(tuple(map(mask.row, range(len(rows)))))

    @property
    def varies_by_head_or_row(self) -> bool:
        return self._row is None and _dims_of(self.block_mask)[:2] != (1, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlexMask) and other.block_mask is self.block_mask and other._row == self._row

    def __hash__(self) -> int:
        return hash((id(self.block_mask), self._row))

    def __repr__(self) -> str:
        # Ranks compare this text. The pattern's digest represents the result of the analysis.
        return f"FlexMask({self.block_mask.shape}, BLOCK_SIZE={self.block_mask.BLOCK_SIZE}, {self.pattern!r})"

    @property
    def content(self) -> int:
        return self._analysis.content

    @property
    def length(self) -> int:
        return self.pattern.keys

    bounds, work, has_bias, grids, additive = (  # pyright: ignore[reportAssignmentType]
        property(attrgetter(f"pattern.{name}")) for name in ("bounds", "work", "has_bias", "grids", "additive")
    )

    @property
    def pattern(self) -> BlockPattern:
        bands = self._analysis.bands
        return self._analysis.pattern if self._row is None or bands is None else bands[self._row]

    def check_unchanged(self) -> None:
        self._analysis.check_unchanged()

    def check(self, shape: tuple[int, int, int, int]) -> None:
        batch, heads, *lengths = _dims_of(self.block_mask)
        batch = batch if self._row is None else 1
        if tuple(lengths) != shape[2:]:
            raise ValueError(
                f"the BlockMask was made for {lengths[0]} queries and {lengths[1]} keys, the whole sequence has "
                f"{shape[2]} and {shape[3]}: create_block_mask takes the lengths of the whole sequence, not of a rank's"
                f"{see('A BlockMask of another length')}"
            )
        for size, needed, what in ((batch, shape[0], "rows of the batch"), (heads, shape[1], "query heads")):
            if size not in (1, needed):
                raise ValueError(f"the BlockMask was made for {size} {what}, the attention has {needed}")

    def row(self, index: int) -> Mask:
        if _dims_of(self.block_mask)[0] == 1 or self._row is not None:
            return self
        if self._analysis.bands is not None:
            mask = copy.copy(self)
            mask._row = index
            return mask
        raise NotImplementedError(
            "a BlockMask that differs between rows of the batch cannot be combined with a mask for each row (PerRow): "
            "express both in mask_mod"
        )

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor | None:
        if not self.has_bias:
            return None
        analysis, mask = self._analysis, self.block_mask
        device = analysis.states.device
        q, kv = q_positions_L.to(device), kv_positions_M.to(device)
        rows, columns = mask.BLOCK_SIZE
        states, places = (x[:, :, q // rows][:, :, :, kv // columns] for x in (analysis.states, analysis.places))
        # For blocks that are not partial, places is 0 and not used.
        allowed = (states == 2) | (states == 1) & analysis.bits[places, (q % rows)[:, None], kv % columns]
        return torch.zeros(allowed.shape, device=device).masked_fill_(~allowed, float("-inf"))


@dataclass(frozen=True, eq=False)
class BlockPattern(Mask):
    """The part of a BlockMask that plans depend on. Compared by value; it holds no tensor of the user.

    ``lo`` and ``hi`` are the interval of keys of each query, ``counts`` the number of keys to which it attends.
    ``grid`` has the blocks. It is None for a band, where each query attends to its whole interval.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    counts: torch.Tensor
    grid: BlockGrid | None
    keys: int
    _digest: bytes = field(init=False)
    _tables: DeviceTables = field(init=False)

    def __post_init__(self) -> None:
        parts = [self.lo, self.hi, self.counts, *([] if self.grid is None else [self.grid.cover])]
        text = hashlib.blake2b(repr((self.keys, self.grid and self.grid.block)).encode(), digest_size=16)
        for part in parts:
            part = part.contiguous()
            text.update(ctypes.string_at(part.data_ptr(), part.numel() * part.element_size()))
        object.__setattr__(self, "_digest", text.digest())
        object.__setattr__(self, "_tables", DeviceTables(self.lo, self.hi, self.counts))

    @property
    def length(self) -> int:
        return self.keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockPattern) and other._digest == self._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"{'band' if self.grid is None else 'blocks'} {self._digest.hex()}"

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lo, hi, _ = self._tables.on(q_positions_L.device)
        return lo[q_positions_L], hi[q_positions_L]

    def work(self, q_positions_L: torch.Tensor, keys: int) -> torch.Tensor:
        return self._tables.on(q_positions_L.device)[2][q_positions_L]

    @property
    def has_bias(self) -> bool:
        return self.grid is not None

    additive = False  # pyright: ignore[reportAssignmentType]

    @property
    def grids(self) -> tuple[BlockGrid, ...]:
        return () if self.grid is None else (self.grid,)


@dataclass(frozen=True)
class _Analysis:
    """The result of the analysis of a BlockMask.

    Attributes:
        pattern: the pattern for all rows of the batch and all heads together.
        bands: a pattern for each row of the batch, if each row is a band for all heads; otherwise None.
        states: ``[B, H, q blocks, kv blocks]``: 0 absent, 1 partial, 2 full; on the mask's device.
        places: the index into ``bits`` of each partial block, in the shape of ``states``.
        bits: bool ``[partial blocks, queries, keys]``: the values of mask_mod. Empty for bands.
        read: the tensors of the BlockMask and those that mask_mod reads, with what they held.
        content: a checksum of ``states`` and ``bits``, which ranks compare.
    """

    pattern: BlockPattern
    bands: tuple[BlockPattern, ...] | None
    states: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor
    read: tuple[tuple[torch.Tensor, Contents], ...]
    content: int

    def check_unchanged(self) -> None:
        for tensor, contents in self.read:
            what = f"a tensor of shape {tuple(tensor.shape)} of a BlockMask, or that its mask_mod reads,"
            if not contents.are_in(tensor, what):
                raise RuntimeError(
                    f"{what} was changed in place after the BlockMask was first used: make a new BlockMask for the new "
                    f"values{see('Memory that is filled again')}"
                )


def _get_analysis(block_mask: BlockMask) -> _Analysis:
    table = facts_about(block_mask)
    analysis = table.get(_analyze)
    if analysis is None:
        with torch.no_grad():
            analysis = table[_analyze] = _analyze(block_mask)
    analysis.check_unchanged()
    return analysis


def _analyze(mask: BlockMask) -> _Analysis:
    batch, heads, queries, keys = _dims_of(mask)
    rows, columns = mask.BLOCK_SIZE
    states = _read_states(mask)
    blocks = states.flatten(0, 1)
    device, (masks, q_blocks, kv_blocks) = blocks.device, blocks.shape
    heights = (queries - torch.arange(q_blocks, device=device) * rows).clamp(0, rows)
    widths = (keys - torch.arange(kv_blocks, device=device) * columns).clamp(0, columns)

    starts = torch.arange(kv_blocks, device=device) * columns
    full = blocks == 2
    lo = torch.where(full, starts, UNBOUNDED).amin(-1).repeat_interleave(rows, 1)
    hi = torch.where(full, starts + widths, 0).amax(-1).repeat_interleave(rows, 1)
    counts = (full * widths).sum(-1).repeat_interleave(rows, 1)
    places, bits_of_groups = torch.zeros_like(blocks, dtype=torch.int64), []
    for (n, i, j), bits in _evaluate_partial_blocks(mask, blocks, queries, keys):
        places[n, i, j] = torch.arange(len(n), device=device) + sum(map(len, bits_of_groups))
        bits_of_groups.append(bits)
        area = bits.sum((1, 2))
        blocks[n, i, j] = torch.where(area == 0, 0, torch.where(area == heights[i] * widths[j], 2, 1)).to(blocks.dtype)
        inside = j[:, None, None] * columns + torch.arange(columns, device=device)
        index = (n[:, None] * q_blocks * rows + i[:, None] * rows + torch.arange(rows, device=device)).flatten()
        first, last = torch.where(bits, inside, UNBOUNDED).amin(-1), torch.where(bits, inside + 1, 0).amax(-1)
        lo.view(-1).scatter_reduce_(0, index, first.flatten(), "amin")
        hi.view(-1).scatter_reduce_(0, index, last.flatten(), "amax")
        counts.view(-1).index_add_(0, index, bits.sum(-1).flatten())

    lo, hi, counts = (x[:, :queries].cpu() for x in (lo.where(hi > 0, 0), hi, counts))
    cover = torch.where((blocks == 2).all(0), 2, (blocks > 0).any(0).long()).to(torch.uint8).cpu()

    def pattern(members: slice) -> BlockPattern:
        low, high, count = (x[members] for x in (lo, hi, counts))
        band = bool((count == high - low).all() and (low == low[:1]).all() and (high == high[:1]).all())
        low = torch.where(high > 0, low, UNBOUNDED).amin(0)
        high = high.amax(0)
        low = low.where(high > 0, 0)
        grid = None if band else BlockGrid((rows, columns), cover)
        return BlockPattern(low, high, (count.sum(0) + count.shape[0] - 1) // count.shape[0], grid, keys)

    joint = pattern(slice(0, masks))
    rows_bands = [pattern(slice(b * heads, (b + 1) * heads)) for b in range(batch)] if joint.grid and batch > 1 else []
    bands = tuple(rows_bands) if rows_bands and all(row.grid is None for row in rows_bands) else None
    own = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    read = *(x for x in own if x is not None), *captured_tensors(mask.mask_mod, (0, 0, 0, 0), device)
    read = tuple((tensor, Contents(tensor)) for tensor in read)
    if not joint.grid or not bits_of_groups:
        bits_of_groups = [torch.zeros(1, rows, columns, dtype=torch.bool, device=device)]
    bits = torch.cat(bits_of_groups)
    content = hash((checksum(bits), checksum(states)))  # places follow from states
    return _Analysis(joint, bands, states, places.view(states.shape), bits, read, content)


def _dims_of(mask: BlockMask) -> tuple[int, int, int, int]:
    """(batch, heads, queries, keys) for which a BlockMask was made."""
    *outer, queries, keys = mask.shape
    batch, heads = (*(1,) * (2 - len(outer)), *outer)
    return batch, heads, queries, keys


def _read_states(mask: BlockMask) -> torch.Tensor:
    """``[B, H, q blocks, kv blocks]``: 0 absent, 1 partial, 2 full."""
    batch, heads, _, _ = _dims_of(mask)
    kv_blocks = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    states = None
    for state, number, indices in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        if number is None or indices is None:
            continue
        number = number.reshape(batch, heads, -1)
        indices = indices.reshape(*number.shape, -1).long()
        valid = torch.arange(indices.shape[-1], device=indices.device) < number[..., None]
        if states is None:
            states = indices.new_zeros(*number.shape, kv_blocks + 1, dtype=torch.uint8)
        # Entries of the list beyond its number are not valid. An extra column takes them.
        states.scatter_(-1, torch.where(valid, indices, kv_blocks), state)
    assert states is not None
    return states[..., :kv_blocks].contiguous()


def _evaluate_partial_blocks(
    mask: BlockMask, blocks: torch.Tensor, queries: int, keys: int
) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Values of mask_mod in partial blocks, some blocks at a time: ``((n, i, j), [blocks, rows, columns])``."""
    rows, columns = mask.BLOCK_SIZE
    heads, device = _dims_of(mask)[1], blocks.device
    block = torch.vmap(torch.vmap(mask.mask_mod, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
    evaluate = torch.vmap(block, in_dims=(0, 0, 0, 0))
    partial_blocks = torch.nonzero(blocks == 1)
    for group in partial_blocks.split(max(1, _PAIRS // (rows * columns))) if len(partial_blocks) else ():
        n, i, j = group.unbind(1)
        q = i[:, None] * rows + torch.arange(rows, device=device)
        kv = j[:, None] * columns + torch.arange(columns, device=device)
        # Tensors that mask_mod reads may have the length of the sequence, so clamp the positions.
        bits = evaluate(n // heads, n % heads, q.clamp(max=queries - 1), kv.clamp(max=keys - 1))
        yield (n, i, j), bits & (q < queries)[:, :, None] & (kv < keys)[:, None, :]
