"""Strategies: how queries, keys and values of different ranks reach one kernel.

A strategy is a pair of functions of local tensors, forward and backward.

Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist

from cp_styles.comm.point_to_point import split_group
from cp_styles.kernels import Kernel
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Mask

Split: TypeAlias = Callable[[Any, int], tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]]
"""From a group and the size of its subgroups to the subgroups of this rank: see [Note: two levels] in ulysses.py."""


@dataclass(frozen=True)
class Attention:
    """The configuration of one attention over a sharded sequence, without the tensors. No communication.

    Attributes:
        group: the ranks that share the sequence. None for a single rank.
        q_layout: which query positions each rank holds.
        kv_layout: which key positions each rank holds. It differs from ``q_layout`` in cross-attention.
        mask: which keys each query attends to, in global positions.
        kernel: computes a tile.
        scale: factor of the logits.
        heads: the range of the query heads among the heads of the mask. None: all heads.
        split: makes the subgroups of ``group`` for two levels, like
            :func:`~cp_styles.comm.point_to_point.split_group`.
        known: a cache of strategies, for results that depend on the configuration and on shapes. It holds no tensor of
            a call.
        tables: a cache of indices of rows, by the object that they belong to. ``replace`` passes it on, for example for
            the same attention with the weight of a call in its kernel.
    """

    group: dist.ProcessGroup | None
    q_layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    kernel: Kernel
    scale: float
    heads: tuple[int, int] | None = None
    split: Split = field(default=split_group, compare=False, repr=False)
    tables: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    known: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def rank(self) -> int:
        """This rank, of :attr:`ranks`."""
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return self.q_layout.ranks


Spec: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor inside a residual."""


class Strategy(ABC):
    """Base of strategies: how keys and values, or heads, get to the queries of other ranks.

    Strategies are immutable and compare by value, so they can be shared and used as cache keys. A subclass defines the
    forward and the backward of local tensors; one that moves keys derives from ``MovingKV``, and CONTRIBUTING.md has an
    example. Its docstring states communication and memory.
    """

    reads_inputs: ClassVar[bool] = True
    """Whether the backward reads query, key, value and output, and not only their shapes."""

    def on(self, ranks: int) -> Strategy:
        """The strategy that runs on this number of ranks. Raises ValueError if this strategy cannot."""
        return self

    def without_kept_keys(self) -> Strategy:
        """This strategy with ``keep=0``, for selective checkpointing, where results of a forward outlive the layer."""
        return self

    @abstractmethod
    def residual_places(
        self, attention: Attention, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor, v_BGME: torch.Tensor
    ) -> ResidualPlaces:
        """The tensors in the residual of a call. See [Note: residual]. Cached in ``attention``.

        Only configuration, shapes and dtypes of ``attention``, ``q_BHLD``, ``k_BGMD`` and ``v_BGME`` are read.
        """

    @abstractmethod
    def forward(
        self,
        attention: Attention,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        sink_H: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``out_BHLE`` of the local queries. Every rank of the group must call it.

        Args:
            attention: the configuration.
            q_BHLD: local query.
            k_BGMD: local key.
            v_BGME: local value.
            sink_H: attention sinks: one logit for each head, which takes part in the softmax of every query and adds
                nothing to the output.
            residual: is filled if it is given, which is the case when a backward may follow.
        """

    @abstractmethod
    def backward(
        self,
        attention: Attention,
        grad_BHLE: torch.Tensor,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        out_BHLE: torch.Tensor,
        residual: torch.Tensor,
        sink_H: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``(dq, dk, dv, dsink)``, in shapes and dtypes of the local inputs. dsink is this rank's share of the sum.

        Args:
            attention: as in :meth:`forward`, and so are ``q_BHLD``, ``k_BGMD``, ``v_BGME`` and ``sink_H``.
            grad_BHLE: gradient of the output.
            out_BHLE: output of the forward. Output and inputs have no values unless ``reads_inputs``.
            residual: the residual that the forward has filled.
        """

    @abstractmethod
    def logsumexp(
        self,
        attention: Attention,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``lse_BHL`` of the local queries, from the ``residual`` of a forward. -inf for queries without keys.

        ``attention``, ``q_BHLD``, ``k_BGMD`` and ``v_BGME`` are as in the forward.
        """


# [Note: residual] A backward reads query, key, value, out, and *one* flat tensor of bytes, the residual: the logsumexp,
# and received data that the strategy keeps instead of sending it again. Autograd saves a single tensor, checkpointing
# drops and recomputes it, and save_on_cpu moves it.
#
# Tensors in the residual start at multiples of this number of bytes, for vector loads.
_ALIGNMENT = 64


class ResidualPlaces:
    """The places of tensors in a residual: see [Note: residual].

    Attributes:
        spec: shape and dtype of the residual: uint8 ``[bytes]``.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self._places: list[tuple[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]] = []
        end = 0
        for shape, dtype in specs:
            strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
            self._places.append((end, (shape, strides, dtype)))
            end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.spec: Spec = (end,), torch.uint8

    def views(self, residual: torch.Tensor) -> list[torch.Tensor]:
        """Views of the tensors in a residual, in the order of the specs."""
        # A hook of saved tensors may return a residual at any offset, or an empty one whose strides cannot be viewed.
        if residual.storage_offset() % _ALIGNMENT:
            residual = residual.clone()
        offset = residual.storage_offset()
        return [
            residual.view(dtype).as_strided(shape, strides, (offset + start) // dtype.itemsize)
            if 0 not in shape
            else residual.new_empty(shape, dtype=dtype)
            for start, (shape, strides, dtype) in self._places
        ]
