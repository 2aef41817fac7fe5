"""Band masks: each query attends to one interval of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cp_styles._lib.device_copies import DeviceTables
from cp_styles.masks.algebra import UNBOUNDED, Full, Mask, PerRow


@dataclass(frozen=True)
class Causal(Mask):
    """Position p attends to 0 .. p.

    Example::

        first, stop = Causal().bounds(torch.tensor([0, 5]))
        assert (first.tolist(), stop.tolist()) == ([0, 0], [1, 6])  # key 0, and the keys 0 to 5
    """

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), q_positions_L + 1

    breaks, separates = Full.breaks, False


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Position p attends to p - left .. p + right, both included. None means no bound on that side.

    ``SlidingWindow(w - 1, 0)`` is the causal window of ``w`` tokens, called ``sliding_window=w`` in many model
    configurations.

    Raises:
        ValueError: ``left`` or ``right`` is negative.

    Example::

        first, stop = SlidingWindow(2, 1).bounds(torch.tensor([7]))
        assert (int(first), int(stop)) == (5, 9)  # the keys 5 to 8
    """

    left: int | None
    right: int | None = 0
    separates, local = False, True

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"SlidingWindow {name} must be >= 0 or None, got {value}")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = UNBOUNDED if self.left is None else self.left
        right = UNBOUNDED if self.right is None else self.right
        return (q_positions_L - left).clamp(min=0), q_positions_L + right + 1

    def breaks(self, length: int) -> torch.Tensor:
        return torch.tensor([self.left or 0], device="cpu")


@dataclass(frozen=True)
class Chunked(Mask):
    """Attention within chunks of ``size`` positions (as in Llama 4). For causal chunks: ``Causal() & Chunked(n)``.

    Raises:
        ValueError: ``size`` is below 1.

    Example::

        first, stop = (Chunked(4) & Causal()).bounds(torch.tensor([6]))
        assert (int(first), int(stop)) == (4, 7)  # the keys 4 to 6
    """

    size: int
    local = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Chunked size must be at least 1, got {self.size}")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = q_positions_L - q_positions_L % self.size
        return start, start + self.size

    def breaks(self, length: int) -> torch.Tensor:
        return torch.arange(0, length, self.size, device="cpu")


@dataclass(frozen=True)
class EndedWindows(Mask):
    """Keys of another sequence, one for each window of ``size`` tokens. A query attends to windows that have ended.

    The query at position p attends to the keys 0 .. (p + 1) // size - 1: to the window in which it is only if it is its
    last token, as in DeepSeek-V4 (HCA, CSA) and NSA. Give the attention the layout of these keys as ``kv_layout=``,
    such as :func:`~cp_styles.mixers.window_layout`.

    Raises:
        ValueError: ``size`` is below 1.

    Example::

        first, stop = EndedWindows(4).bounds(torch.tensor([2, 3, 8]))
        assert stop.tolist() == [0, 1, 2]
    """

    size: int
    positional, crosses, separates = False, True, False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"EndedWindows size must be at least 1, got {self.size}")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), (q_positions_L + 1) // self.size

    def breaks(self, length: int) -> torch.Tensor:
        if self.size == 1:
            return Full.breaks(self, length)  # pyright: ignore[reportArgumentType]
        return torch.arange(self.size - 1, length + 1, self.size, device="cpu")


@dataclass(frozen=True)
class Shifted(Mask):
    """``inner`` for queries that are a later part of the sequence of the keys: the tokens ``first``, ``first`` + 1, ...

    Prompts in pieces and caches of earlier pieces have such queries. The keys are all tokens so far, with a layout of
    their own, ``kv_layout=``. See :func:`~cp_styles.layouts.join_layouts`.

    Raises:
        ValueError: ``first`` is negative, or ``inner`` has gaps or biases.

    Example::

        first, stop = Shifted(Causal(), 100).bounds(torch.tensor([0, 5]))
        assert stop.tolist() == [101, 106]
    """

    inner: Mask
    first: int
    positional, crosses = False, True

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError(f"Shifted first must be >= 0, got {self.first}")
        several = len(self.inner.rows) > 1 or len(self.inner.bands) > 1
        if several or self.inner.has_gaps or self.inner.has_bias or self.inner.crosses:
            raise ValueError(
                f"Shifted takes a mask of intervals (Causal, SlidingWindow, Chunked, Documents and their "
                f"conjunctions), got {self.inner!r}: give another mask a class with bounds of its own"
            )

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.bounds(q_positions_L + self.first)

    def breaks(self, length: int) -> torch.Tensor:
        return self.inner.breaks(length + self.first) - self.first

    @property
    def separates(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.separates

    @property
    def local(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.local

    @property
    def length(self) -> int | None:
        return self.inner.length

    @property
    def pattern(self) -> Mask:
        return Shifted(self.inner.pattern, self.first)

    @property
    def content(self) -> int:
        return self.inner.content


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, and every position also attends to the first ``prefix`` positions.

    Raises:
        ValueError: ``prefix`` is negative.

    Example::

        first, stop = PrefixLM(3).bounds(torch.tensor([0, 5]))
        assert stop.tolist() == [3, 6]  # position 0 attends to the whole prefix
    """

    prefix: int

    def __post_init__(self) -> None:
        if self.prefix < 0:
            raise ValueError(f"PrefixLM prefix must be >= 0, got {self.prefix}")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q_positions_L), (q_positions_L + 1).clamp(min=self.prefix)

    def breaks(self, length: int) -> torch.Tensor:
        return torch.tensor([self.prefix], device="cpu")


@dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: a position attends only within its own document. For causal documents add ``& Causal()``.

    Args:
        lengths: the lengths of the documents, in order, each at least 1.
        prefixes: one length for each document. With it, each document is a prefix-LM: position p attends to its
            document up to ``max(p + 1, end of the prefix)``.

    Raises:
        ValueError: a length is below 1, or the prefixes do not fit the lengths.

    Example::

        mask = Documents((2, 3)) & Causal()
        assert Documents.from_cu_seqlens([0, 2, 5]) == Documents.from_ids(torch.tensor([7, 7, 8, 8, 8]))
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...] | None = None
    _tables: DeviceTables = field(init=False, compare=False, repr=False)  # starts, ends and prefixes
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
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
        tables = [lengths.cumsum(0) - lengths, lengths.cumsum(0)]
        if self.prefixes is not None:
            tables.append(torch.tensor(self.prefixes, dtype=torch.int64, device="cpu"))
        object.__setattr__(self, "_tables", DeviceTables(*tables))
        object.__setattr__(self, "_hash", hash((self.lengths, self.prefixes)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor | Sequence[int]) -> Documents:
        """From cumulative lengths ``cu_seqlens = [0, n0, n0 + n1, ...]``, as varlen attention kernels take them.

        Raises:
            ValueError: they do not begin with 0, or decrease.
        """
        ends = torch.as_tensor(cu_seqlens, dtype=torch.int64, device="cpu").cpu()
        if ends.ndim != 1 or ends.numel() < 2 or int(ends[0]) != 0:
            raise ValueError(f"cu_seqlens must be 1-D and start with 0, got shape {tuple(ends.shape)}")
        lengths = (ends[1:] - ends[:-1]).tolist()
        if min(lengths) < 0:
            raise ValueError("cu_seqlens must not decrease")
        return cls(tuple(size for size in lengths if size))

    @classmethod
    def from_ids(cls, ids_S: torch.Tensor) -> Documents | PerRow:
        """From one document id for each position, ``ids_S``. A document is a run of equal ids.

        Ids of shape [S] give one mask. Ids of shape [B, S] give each row of the batch its own documents.

        Raises:
            ValueError: an id returns after another id. A document with a gap is not a band; use :class:`Dense`.
        """
        ids_S = torch.as_tensor(ids_S, device="cpu")
        if ids_S.ndim == 2:
            return PerRow(tuple(cls.from_ids(row) for row in ids_S))
        if ids_S.ndim != 1:
            raise ValueError(f"document ids must be [S] or [B, S], got shape {tuple(ids_S.shape)}")
        values, lengths = torch.unique_consecutive(ids_S, return_counts=True)
        if values.unique().numel() != values.numel():
            raise ValueError("a document id returns after another document; give it an id of its own, or use Dense")
        return cls(tuple(lengths.tolist()))

    @classmethod
    def from_positions(cls, positions_S: torch.Tensor) -> Documents | PerRow:
        """From position ids ``positions_S`` that restart at 0 in every document, as packed batches often have them.

        Positions of shape [B, S] give each row of the batch its own documents.

        Raises:
            ValueError: positions do not count up by one inside a document, or do not begin with 0.
        """
        positions_S = torch.as_tensor(positions_S, device="cpu")
        if positions_S.ndim == 2:
            return PerRow(tuple(cls.from_positions(row) for row in positions_S))
        if positions_S.ndim != 1 or (positions_S.numel() and int(positions_S[0]) != 0):
            raise ValueError(f"positions must be [S] or [B, S] and start with 0, got shape {tuple(positions_S.shape)}")
        positions = positions_S.long()
        starts = torch.nonzero(positions == 0).flatten()
        lengths = torch.diff(starts, append=torch.tensor([positions.numel()], device="cpu"))
        expected = torch.arange(positions.numel(), device="cpu") - torch.repeat_interleave(starts, lengths)
        if not torch.equal(positions, expected):
            raise ValueError("positions must count up by one inside a document and restart at 0")
        return cls(tuple(lengths.tolist()))

    @property
    def documents(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.lengths

    @property
    def length(self) -> int:
        return int(self._tables.host[1][-1]) if self.lengths else 0

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        starts, ends, *prefixes = self._tables.on(q_positions_L.device)
        index = torch.bucketize(q_positions_L, ends, right=True)
        start, stop = starts[index], ends[index]
        if self.prefixes is not None:
            stop = torch.maximum(q_positions_L + 1, start + prefixes[0][index])
        return start, stop

    def breaks(self, length: int) -> torch.Tensor:
        starts, ends, *prefixes = self._tables.host
        return torch.cat((ends, starts + prefixes[0])) if prefixes else ends


@dataclass(frozen=True)
class WithBlocks(Mask):
    """The keys of ``inner``, and all keys of the query's own block: the tokens of one picture see each other.

    Attributes:
        inner: a mask whose intervals contain the query's own position, or no key.
        blocks: the first position and the end of each block, in order. At least one block.
        tokens: the length of the whole sequence.

    Example::

        first, stop = WithBlocks(Causal(), ((2, 5),), 8).bounds(torch.tensor([1, 3]))
        assert stop.tolist() == [2, 5]  # position 3 also attends to the key behind it, 4
    """

    inner: Mask
    blocks: tuple[tuple[int, int], ...]
    tokens: int
    _tables: DeviceTables = field(init=False, compare=False, repr=False)  # starts and ends

    def __post_init__(self) -> None:
        starts, ends = torch.tensor(self.blocks, dtype=torch.int64, device="cpu").T.contiguous()
        object.__setattr__(self, "_tables", DeviceTables(starts, ends))

    @property
    def length(self) -> int:
        return self.tokens

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (first, stop), (starts, ends) = self.inner.bounds(q_positions_L), self._tables.on(q_positions_L.device)
        at = torch.searchsorted(starts, q_positions_L, right=True).sub(1).clamp(min=0)
        start, end = starts[at], ends[at]
        inside, sees = (start <= q_positions_L) & (q_positions_L < end), first < stop
        wider = torch.where(sees, start.minimum(first), start), torch.where(sees, end.maximum(stop), end)
        return torch.where(inside, wider[0], first), torch.where(inside, wider[1], stop)
