"""The interface of kernels: the attention of one tile, forward and backward.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), L queries, M keys, D head dim, E value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from cp_styles.kernels.merge import FUSED_MERGE, Merge
from cp_styles.kernels.outside import check_result


class TensorSpec(NamedTuple):
    """The properties of a tensor by which kernels decide whether they take it.

    Attributes:
        in_message: of a key or value, whether it is a view in a message, whose memory is aligned.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    in_message: bool = False


class TilePositions(NamedTuple):
    """The global position of a tile.

    Attributes:
        q_L: global position of each query.
        kv_M: global position of each key.
        head: global number of the tile's first query head.
    """

    q_L: torch.Tensor
    kv_M: torch.Tensor
    head: int


class Kernel(ABC):
    """Base of kernels: the attention of one tile on one device, forward and backward. No communication.

    A kernel has no state, is immutable and compares by value. L and M of a tile are never 0. Subclasses define
    :meth:`forward`, :meth:`backward` and :meth:`check`, and :meth:`bind` if many tiles share some work; CONTRIBUTING.md
    has an example. :meth:`check` raises
    NotImplementedError for tensors that the kernel does not take.
    """

    # Whether forward and backward take one more keyword, ``where`` (a TilePositions).
    positional: ClassVar[bool] = False
    # Whether many small tiles are cheap, so that the plan need not join them. Forward and backward then take one more
    # keyword, ``pack``: the Pack of several tiles of one cover, without a bias, or None.
    small_tiles: ClassVar[bool] = False
    # Whether forward and backward take one more keyword, ``window``: None, or for a tile that is a band, without a bias
    # and not causal, the numbers of keys before and after key i + M - L that query i attends to; -1 for all.
    windows: ClassVar[bool] = False
    # Whether the memory of a forward does not grow with the keys. Keys that arrive together are then one tile.
    streams_keys: bool = False
    # Whether a backward copies grad and out of a tile that are not dense [B, L, H, E] in memory.
    dense_rows: bool = False
    # Whether the kernel takes long tiles only. Plans are then made for the kernel that gets short tiles.
    long_tiles: bool = False
    # Merges the tiles. Ranks do not compare it, because merges differ in rounding only.
    merge: Merge = FUSED_MERGE

    @property
    def takes_all(self) -> bool:
        """Whether the kernel takes all tiles of an attention for which :meth:`check` passes: see :meth:`takes`."""
        return type(self).takes is Kernel.takes

    @property
    def content(self) -> int:
        """A hash of the contents that the repr does not show, equal in all processes. Ranks compare it."""
        return 0

    @property
    def only_for(self) -> tuple[Any, ...]:
        """(layout, rank, group) of the queries of which alone this kernel has rows, for each layout. Empty: of all."""
        return ()

    @abstractmethod
    def forward(
        self,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        *,
        causal: bool,
        bias: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out_BHLE, lse_BHL)``: the tile's softmax(q k^T scale + bias) v, in its dtype or wider, and its logsumexp,
        in float32, or in float64 for a tile in float64.

        Args:
            q_BHLD: the queries of the tile.
            k_BGMD: the keys of the tile.
            v_BGME: the values of the tile.
            causal: query i attends to the keys 0 to i only. Then L == M.
            bias: broadcasts to [B, H, L, M]. A row that it masks entirely gives out = 0 and lse = EMPTY_LSE.
            scale: factor of the logits.
        """

    @abstractmethod
    def backward(
        self,
        grad_BHLE: torch.Tensor,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        out_BHLE: torch.Tensor,
        lse_BHL: torch.Tensor,
        *,
        causal: bool,
        bias: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(dq, dk, dv)`` of the tile, in the dtype of its tensors or wider.

        Args:
            grad_BHLE: gradient of the output of the *whole* attention (all tiles merged), for the rows of the tile.
            q_BHLD: as in :meth:`forward`, and so are ``k_BGMD``, ``v_BGME``, ``causal``, ``bias`` and ``scale``.
            out_BHLE: output of the whole attention.
            lse_BHL: logsumexp of the whole attention.
        """

    @abstractmethod
    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        """Raise NotImplementedError, with a remedy, if the kernel cannot compute these tensors.

        The result may depend only on the shape, dtype and device of ``q_BHLD``, ``k_BGMD`` and ``v_BGME``. ``biased``
        means tiles with an explicit mask.
        """

    def bind(
        self,
        phase: str,
        specs: Sequence[Any],
        *,
        causal: bool,
        scale: float,
        biased: bool = False,
        window: tuple[int, int] | None = None,
        pack: Any = None,
    ) -> Bound:
        """The ``phase``, "forward" or "backward", for tiles whose query, key and value are like ``specs``.

        A strategy calls it once for many tiles, so a kernel can do here what they share. The default calls the phase.
        ``specs`` have shape, dtype and device; of key and value, they may say that these are in a message, see
        TensorSpec. ``biased``: the tiles have a bias, which they get when they run. The remaining arguments are the
        keywords of the phase but ``where``.
        """
        options = {"causal": causal, "scale": scale} | ({} if biased else {"bias": None})
        options |= ({"window": window} if self.windows else {}) | ({"pack": pack} if self.small_tiles else {})
        function = partial(tile_function(self, phase), **options)
        return Bound(tuple, lambda *tensors, **late: function(*in_order(*tensors), **late))

    def takes(
        self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, causal: bool, biased: bool
    ) -> bool:
        """Whether the kernel can compute this tile of an attention for which :meth:`check` has passed.

        If not, another kernel gets the tile. The result may depend only on shape, dtype and device of ``q_BHLD``,
        ``k_BGMD`` and ``v_BGME``. ``causal`` and ``biased`` are as in :meth:`forward` and :meth:`check`.
        """
        # Tiles differ in rows. In a backward, head dims may be larger than in the attention: see LseGradient.
        return True

    def switches(self) -> Hashable:
        """The settings of this process on which :meth:`takes` depends now. A kernel is bound anew when they change."""
        return ()

    def tile_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which to compute tiles of inputs of ``dtype``, if several tiles are merged."""
        # Each result in low precision adds a rounding. A kernel that is as fast in float32 can avoid it.
        return dtype

    def dims(self, k_BGMD: torch.Tensor, v_BGME: torch.Tensor) -> tuple[int, int]:
        """The head dims of queries and of the output, for tensors that travel as key and value."""
        return k_BGMD.shape[3], v_BGME.shape[3]

    def with_heads(self, heads: tuple[int, int]) -> Kernel:
        """This kernel for tiles with this range of the query heads. For kernels with a tensor for each head."""
        return self

    def with_learned(self, learned: torch.Tensor | None, *, backward: bool) -> tuple[Kernel, Sequence[torch.Tensor]]:
        """This kernel with the flat tensor that a call passes in addition to query, key and value.

        Returns also the sums of gradients that a ``backward`` fills, together as large as ``learned``. With
        ``backward``, raises RuntimeError if a tensor that the kernel holds has changed since the forward.
        """
        return self, ()


class Bound(NamedTuple):
    """The forward or the backward of a kernel for tiles of one shape: see :meth:`Kernel.bind`.

    Attributes:
        queries: from the tensors of the queries, (query,) in a forward and (grad, query, out, lse) in a backward, to
            the first argument of ``run``. Tiles with the same queries can share it.
        run: from it, key and value to the results of the tile. ``bias`` and ``where`` are keywords for tiles with them.
    """

    queries: Callable[[Sequence[torch.Tensor]], Any]
    run: Callable[..., tuple[torch.Tensor, ...]]


def in_order(queries: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of a tile as :meth:`Kernel.forward` takes them, or :meth:`Kernel.backward` with four ``queries``."""
    middle = (len(queries) + 1) // 2
    return *queries[:middle], k, v, *queries[middle:]


def bind_tile(kernel: Kernel, phase: str, specs: Sequence[Any], **options: Any) -> Bound:
    """:meth:`Kernel.bind` of a kernel, or of Kernel if a subclass has a ``phase`` of its own and no ``bind``."""
    defined = next(x for x in map(vars, type(kernel).__mro__) if "bind" in x or phase in x)
    return kernel.bind(phase, specs, **options) if "bind" in defined else Kernel.bind(kernel, phase, specs, **options)


class BoundKernel(Kernel):
    """Base of kernels that define :meth:`bind`. Their forward and backward call it."""

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale, window=None, pack=None):
        options = {"causal": causal, "scale": scale, "window": window, "pack": pack}
        return self._run("forward", (q_BHLD, k_BGMD, v_BGME), (q_BHLD,), bias, options)

    def backward(
        self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale, window=None, pack=None
    ):
        options = {"causal": causal, "scale": scale, "window": window, "pack": pack}
        queries = grad_BHLE, q_BHLD, out_BHLE, lse_BHL
        return self._run("backward", (q_BHLD, k_BGMD, v_BGME), queries, bias, options)

    def _run(self, phase: str, tensors: Any, queries: Any, bias: torch.Tensor | None, options: dict[str, Any]) -> Any:
        bound = self.bind(phase, tensors, biased=bias is not None, **options)
        return bound.run(bound.queries(queries), *tensors[1:], **({} if bias is None else {"bias": bias}))


def tile_function(kernel: Kernel, phase: str) -> Callable[..., Any]:
    """The ``forward`` or ``backward`` of a kernel. With a kernel from outside of this package it raises TypeError for a
    result that is not what :class:`Kernel` asks for."""
    return getattr(kernel, phase) if is_own(kernel) else partial(check_result, kernel, phase)


def is_own(kernel: Kernel) -> bool:
    """Whether the class of a kernel is of this package."""
    return type(kernel).__module__.startswith(_PACKAGE)


_PACKAGE = f"{__name__.partition('.')[0]}."


@dataclass(frozen=True)
class OtherBackward(Kernel):
    """Base of kernels that replace the backward of ``inner``."""

    inner: Kernel

    positional, small_tiles, windows, streams_keys = (  # pyright: ignore[reportAssignmentType]
        property(attrgetter(f"inner.{name}")) for name in ("positional", "small_tiles", "windows", "streams_keys")
    )
    dense_rows, merge, content, only_for = (  # pyright: ignore[reportAssignmentType]
        property(attrgetter(f"inner.{name}")) for name in ("dense_rows", "merge", "content", "only_for")
    )

    def forward(self, q_BHLD, k_BGMD, v_BGME, **options):
        return self.inner.forward(q_BHLD, k_BGMD, v_BGME, **options)

    def check(self, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor, *, biased: bool) -> None:
        self.inner.check(q_BHLD, k_BGMD, v_BGME, biased=biased)

    def takes(self, q_BHLD, k_BGMD, v_BGME, *, causal, biased):
        return self.inner.takes(q_BHLD, k_BGMD, v_BGME, causal=causal, biased=biased)

    def switches(self):
        return self.inner.switches()

    def tile_dtype(self, dtype):
        return self.inner.tile_dtype(dtype)


@dataclass(frozen=True)
class LseGradient(OtherBackward):
    """``inner`` for a backward whose ``grad`` has one more column: the gradient of the logsumexp."""

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, **options):
        # A kernel computes d logits = p (grad v^T - sum(grad out)). The derivative of the logsumexp is p. So one more
        # column, with value 0 and out -1, adds its gradient inside the parentheses. Eight columns are added, because
        # CUDA kernels take head dims that are multiples of 8.
        q, k, v = (F.pad(x, (0, 8)) for x in (q_BHLD, k_BGMD, v_BGME))
        grad, out = F.pad(grad_BHLE, (0, 7)), F.pad(out_BHLE, (0, 8), value=-1.0)
        backward = tile_function(self.inner, "backward")
        return tuple(x[..., :-8] for x in backward(grad, q, k, v, out, lse_BHL, **options))
