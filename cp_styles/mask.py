"""Who attends to whom, said in global positions.

Every mask here that has structure is a band: query position ``p`` attends to one interval ``[lo(p), hi(p))`` of key
positions. Bands are closed under conjunction (``causal & window`` intersects the intervals), so the plan, the work
of a layout, the rows that must travel and the dense oracle all derive from one function, :meth:`Mask.bounds`.
What no band can say (an arbitrary boolean or additive mask) is :class:`Dense`, which adds a bias on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch.utils.weak import WeakTensorKeyDictionary

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

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor | None:
        """What is added to the logits inside the band, broadcastable to ``[B, H, L, M]``; None for plain bands."""
        return None

    @property
    def has_bias(self) -> bool:
        return False

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
    def length(self) -> int | None:
        """The sequence length this mask was written for, or None when it fits any."""
        return None

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


@dataclass(frozen=True)
class Causal(Mask):
    """Position p attends to 0 .. p."""

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), q_positions_L + 1


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Position p attends to p - left .. p + right, both included; None means no bound on that side.

    ``SlidingWindow(w - 1, 0)`` is the causal window of ``w`` tokens that model configurations call
    ``sliding_window=w``.
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"SlidingWindow {name} must be >= 0 or None, got {value}")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = UNBOUNDED if self.left is None else self.left
        right = UNBOUNDED if self.right is None else self.right
        return (q_positions_L - left).clamp(min=0), q_positions_L + right + 1


@dataclass(frozen=True)
class Chunked(Mask):
    """Attention within chunks of ``size`` positions (Llama 4 style); with ``Causal()``: ``Causal() & Chunked(n)``."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Chunked size must be at least 1, got {self.size}")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = q_positions_L - q_positions_L % self.size
        return start, start + self.size


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, but the first ``prefix`` positions are visible to all."""

    prefix: int

    def __post_init__(self) -> None:
        if self.prefix < 0:
            raise ValueError(f"PrefixLM prefix must be >= 0, got {self.prefix}")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), (q_positions_L + 1).clamp(min=self.prefix)


@dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: a position attends within its own document only; add ``& Causal()`` for causal documents.

    ``prefixes``, one a document, makes the first so many positions of each document visible to all of it
    (prefix-LM a document): positions then see ``max(p + 1, prefix end)`` and no further.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...] | None = None
    _ends: torch.Tensor = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(int(size) for size in self.lengths))
        if any(size < 1 for size in self.lengths):
            raise ValueError(f"document lengths must be at least 1, got {min(self.lengths)}")
        if self.prefixes is not None:
            object.__setattr__(self, "prefixes", tuple(int(size) for size in self.prefixes))
            if len(self.prefixes) != len(self.lengths) or any(
                not 0 <= p <= n for p, n in zip(self.prefixes, self.lengths, strict=True)
            ):
                raise ValueError("prefixes must give one length a document, between 0 and that document's length")
        object.__setattr__(self, "_ends", torch.tensor(self.lengths, dtype=torch.int64).cumsum(0))
        object.__setattr__(self, "_hash", hash((self.lengths, self.prefixes)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor | Sequence[int]) -> Documents:
        """From cumulative lengths ``[0, n0, n0 + n1, ...]`` as varlen attention kernels take them."""
        ends = torch.as_tensor(cu_seqlens, dtype=torch.int64).cpu()
        if ends.ndim != 1 or ends.numel() < 2 or int(ends[0]) != 0:
            raise ValueError(f"cu_seqlens must be 1-D and start with 0, got shape {tuple(ends.shape)}")
        lengths = (ends[1:] - ends[:-1]).tolist()
        if min(lengths) < 0:
            raise ValueError("cu_seqlens must not decrease")
        return cls(tuple(size for size in lengths if size))

    @classmethod
    def from_ids(cls, ids_S: torch.Tensor) -> Documents | PerRow:
        """From one document id a position; a document is a run of equal ids. [B, S] gives each row its own documents.

        Raises:
            ValueError: when an id comes back after another one: those positions would attend to each other through
                a gap, which packed documents cannot say; use :class:`Dense`.
        """
        if ids_S.ndim == 2:
            return PerRow(tuple(cls.from_ids(row) for row in ids_S))
        if ids_S.ndim != 1:
            raise ValueError(f"document ids must be [S] or [B, S], got shape {tuple(ids_S.shape)}")
        values, lengths = torch.unique_consecutive(ids_S.cpu(), return_counts=True)
        if values.unique().numel() != values.numel():
            raise ValueError("a document id returns after another document; give it an id of its own, or use Dense")
        return cls(tuple(lengths.tolist()))

    @classmethod
    def from_positions(cls, positions_S: torch.Tensor) -> Documents | PerRow:
        """From position ids that restart at 0 with every document, as packed batches carry them. [B, S] gives each row
        its own documents."""
        if positions_S.ndim == 2:
            return PerRow(tuple(cls.from_positions(row) for row in positions_S))
        if positions_S.ndim != 1 or (positions_S.numel() and int(positions_S[0]) != 0):
            raise ValueError(f"positions must be [S] or [B, S] and start with 0, got shape {tuple(positions_S.shape)}")
        positions = positions_S.cpu().long()
        starts = torch.nonzero(positions == 0).flatten()
        lengths = torch.diff(starts, append=torch.tensor([positions.numel()]))
        expected = torch.arange(positions.numel()) - torch.repeat_interleave(starts, lengths)
        if not torch.equal(positions, expected):
            raise ValueError("positions must count up by one inside a document and restart at 0")
        return cls(tuple(lengths.tolist()))

    @property
    def length(self) -> int:
        return int(self._ends[-1]) if self.lengths else 0

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ends = self._ends.to(q_positions_L.device)
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=q_positions_L.device)
        index = torch.bucketize(q_positions_L, ends, right=True)
        start, stop = ends[index] - lengths[index], ends[index]
        if self.prefixes is not None:
            prefixes = torch.tensor(self.prefixes, dtype=torch.int64, device=q_positions_L.device)
            stop = torch.maximum(q_positions_L + 1, start + prefixes[index])
        return start, stop


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Any boolean (True: attend) or additive float mask, broadcastable to ``[B, H, S_q, S_kv]``, whole on every rank.

    Compared by the identity of the tensor, which must not change in place afterwards. A float mask that requires grad
    is refused: its gradient would have to be assembled from every rank's tiles, and nobody here does that yet.
    """

    tensor: torch.Tensor
    _version: int = field(init=False, default=0)

    @property
    def pattern(self) -> Mask:
        return SomeBias()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __post_init__(self) -> None:
        if self.tensor.ndim < 2 or self.tensor.ndim > 4:
            raise ValueError(f"a dense mask must broadcast to [B, H, S_q, S_kv], got shape {tuple(self.tensor.shape)}")
        if self.tensor.dtype != torch.bool and not self.tensor.is_floating_point():
            raise TypeError(f"a dense mask must be bool (True: attend) or float (added), got {self.tensor.dtype}")
        object.__setattr__(self, "_version", _version(self.tensor))
        if self.tensor.requires_grad:
            raise NotImplementedError(
                "the gradient of an attention bias is not computed under context parallelism: detach() the mask, or "
                "run the module that learns it without AttentionContextParallel"
            )

    @property
    def has_bias(self) -> bool:
        return True

    @property
    def content(self) -> int:
        return digest(self.tensor)

    @property
    def length(self) -> int | None:
        sizes = [size for size in self.tensor.shape[-2:] if size != 1]
        return sizes[-1] if sizes else None

    def check(self, shape: tuple[int, int, int, int]) -> None:
        sizes = tuple(self.tensor.shape)
        if any(size not in (1, whole) for size, whole in zip(sizes, shape[-len(sizes) :], strict=True)):
            raise ValueError(
                f"a dense mask of shape {sizes} does not broadcast to [B, H, S_q, S_kv] = {list(shape)}: give the mask "
                "of the whole sequence, rows and columns in the order of positions"
            )

    def row(self, index: int) -> Mask:
        if self.tensor.ndim < 4 or self.tensor.shape[0] == 1:
            return self
        if index >= self.tensor.shape[0]:
            raise ValueError(f"{self!r} has no row {index} of the batch")
        return Dense(self.tensor[index : index + 1])

    def __repr__(self) -> str:
        return f"Dense({tuple(self.tensor.shape)}, {self.tensor.dtype})"

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Full().bounds(q_positions_L)

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor:
        if _version(self.tensor) != self._version:
            raise RuntimeError(f"{self!r} was changed in place after it was given as a mask; give a copy")
        bias = self.tensor
        for dim, positions in ((-2, q_positions_L), (-1, kv_positions_M)):
            if bias.shape[dim] != 1:
                bias = bias.index_select(dim, positions.to(bias.device))
        if bias.dtype == torch.bool:
            return torch.zeros(bias.shape, device=bias.device).masked_fill_(~bias, float("-inf"))
        return bias


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def digest(tensor: torch.Tensor) -> int:
    """A checksum of 63 bits of what a tensor holds, the same on every machine; remembered until the tensor changes.

    One pass over the tensor, and on CUDA a wait for the device.
    """
    found = _digests.get(tensor)
    if found is None or found[0] != _version(tensor):
        found = _digests[tensor] = (_version(tensor), _checksum(tensor.detach()))
    return found[1]


_digests: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _checksum(tensor: torch.Tensor) -> int:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    total = 0
    for start, piece in enumerate(tensor.contiguous().view(-1).view(torch.uint8).split(_PIECE)):
        words = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
        # Odd factors that differ by place; integers, which wrap alike everywhere, and not floats.
        places = torch.arange(start * _PIECE, start * _PIECE + words.numel(), device=words.device)
        total += int((words * (places * 0x9E3779B97F4A7C1 * 2 + 1)).sum())
    return total % 2**63


_PIECE = 2**23  # bytes at a time, so that a large mask needs little more memory


@dataclass(frozen=True)
class SomeBias(Full):
    """The pattern of a mask with a bias. Caches of plans hold this one instead, and no tensor."""

    @property
    def has_bias(self) -> bool:
        return True


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

    def bias(self, q_positions_L: torch.Tensor, kv_positions_M: torch.Tensor) -> torch.Tensor | None:
        biases = [bias for part in self.parts if (bias := part.bias(q_positions_L, kv_positions_M)) is not None]
        return reduce(torch.add, biases) if biases else None


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
