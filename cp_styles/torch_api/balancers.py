"""torch's load balancers: its constructor arguments, our layouts.

What a balancer of torch's computes is an order of the positions whose equal pieces the ranks get. Here it is a
:class:`~cp_styles.layout.SequenceLayout`, which says the same and needs no length that divides. Whatever takes a layout
in the package takes ``balancer.layout``; the functions of :mod:`cp_styles.torch_api.api` take the balancer itself too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_styles.layout import Balancer, SequenceLayout, by_block_work, head_tail, layout_made_by, per_document_head_tail


class LoadBalancer(ABC):
    """A layout under the name and with the arguments that torch has for it."""

    @cached_property
    def layout(self) -> SequenceLayout:
        """Who holds which position. Made once; no communication."""
        return self._make()

    @abstractmethod
    def _make(self) -> SequenceLayout: ...

    @property
    def _device(self) -> torch.device | str:
        return "cpu"

    def generate_indices(self, restore: bool = False) -> torch.Tensor:
        """The order as an index tensor: int64 ``[1, length]``, the same for all rows of a batch.

        Args:
            restore: False: ``whole[indices]`` has the positions rank after rank, of which rank r holds
                ``layout.lengths[r]`` (torch's pieces are equal, these need not be). True: the inverse, so that
                ``whole[indices][restore_indices]`` is ``whole``.
        """
        layout = self.layout
        order = torch.cat([layout.positions(rank, self._device) for rank in range(layout.ranks)])
        return (order.argsort() if restore else order)[None]

    # The name torch's own functions look for, such as its BlockMask cutter when it is handed one of these.
    _generate_indices = generate_indices

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout.length} positions, {self.layout.ranks} ranks)"


class HeadTailLoadBalancer(LoadBalancer):
    """:func:`~cp_styles.layout.head_tail`, with the arguments of torch's balancer of that name.

    Args:
        seq_length: number of positions; any, where torch needs a multiple of twice the ranks.
        world_size: number of ranks.
        device: where index tensors are made.
    """

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device = "cpu") -> None:
        self.seq_length, self.world_size, self.device = seq_length, world_size, device

    @property
    def _device(self) -> torch.device | str:
        return self.device

    def _make(self) -> SequenceLayout:
        return head_tail(self.seq_length, self.world_size)


class PerDocumentHeadTailLoadBalancer(LoadBalancer):
    """:func:`~cp_styles.layout.per_document_head_tail` with ``cut_all``, as torch cuts: every rank holds a share of
    every document, the shortest too. The arguments are those of torch's balancer of that name.

    A balancer cuts; it is no mask. The attention must be told of the documents as well (``mask=Documents(lengths)``).

    Args:
        seq_length_per_doc: lengths of the packed documents of each row of the batch, ``[rows][documents]``; any
            lengths, where torch needs multiples of twice the ranks.
        world_size: number of ranks.
        device: where index tensors are made.

    Raises:
        TypeError: for a flat list of lengths.
        NotImplementedError: for rows with different documents. Every row would have a cut of its own, and then no
            position stands for the same token in all of them.
    """

    def __init__(
        self, seq_length_per_doc: Sequence[Sequence[int]], world_size: int, device: str | torch.device = "cpu"
    ) -> None:
        rows = seq_length_per_doc.tolist() if isinstance(seq_length_per_doc, torch.Tensor) else seq_length_per_doc
        if not rows or any(isinstance(row, int) for row in rows):
            raise TypeError(
                "seq_length_per_doc is a list of document lengths for every row of the batch, or one list for all of "
                f"them: [[300, 10, 690]], got {seq_length_per_doc!r}"
            )
        rows = [[int(size) for size in row] for row in rows]
        if any(row != rows[0] for row in rows):
            raise NotImplementedError(
                f"the {len(rows)} rows of the batch hold different documents, and one layout cuts them all: put the "
                "documents of the batch behind one another in one row, or cut all rows head_tail and give the "
                "attention each row's documents as a mask (PerRow)"
            )
        self.seq_length_per_doc, self.world_size, self.device = rows, world_size, device

    @property
    def _device(self) -> torch.device | str:
        return self.device

    def _make(self) -> SequenceLayout:
        (lengths,) = self.seq_length_per_doc[:1]
        return per_document_head_tail(sum(lengths), self.world_size, documents=lengths, cut_all=True)


class PTRRLoadBalancer(LoadBalancer):
    """Equal work under a BlockMask: whole blocks of queries, dealt by how many blocks of keys they attend to.

    The name is torch's, for its way of dealing in turn, forth and back; here the heaviest block goes to the rank with
    least work (Graham, 1969), and ranks get equally many blocks where their number divides. Work is summed over the
    rows and heads of the mask, so one layout serves a batch whose rows differ. Index tensors are made on the
    mask's device.

    Args:
        block_mask: of self-attention: as many queries as keys. Blocks may be of any size, query and key blocks of
            different ones.
        world_size: number of ranks.

    Raises:
        TypeError: for what is no BlockMask.
        ValueError: for a mask of cross-attention.
    """

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        if not isinstance(block_mask, BlockMask):
            raise TypeError(
                f"PTRRLoadBalancer balances a BlockMask, got {type(block_mask).__name__}; for the masks of this "
                "package there is by_work(length, ranks, mask=mask)"
            )
        queries, keys = block_mask.seq_lengths
        if queries != keys:
            raise ValueError(
                f"the BlockMask is of {queries} queries and {keys} keys, which are not one sequence: cut each of them "
                "with a layout of its own"
            )
        self.block_mask, self.world_size = block_mask, world_size

    @property
    def _device(self) -> torch.device | str:
        return self.block_mask.kv_num_blocks.device

    def _make(self) -> SequenceLayout:
        counts = self.block_mask.kv_num_blocks
        if self.block_mask.full_kv_num_blocks is not None:
            counts = counts + self.block_mask.full_kv_num_blocks
        per_block = counts.reshape(-1, counts.shape[-1]).sum(0).tolist()
        length, block = self.block_mask.seq_lengths[0], self.block_mask.BLOCK_SIZE[0]
        # A mask may be padded to whole blocks; and what is left of the last block is less work.
        rows = [min(block, length - start) for start in range(0, length, block)]
        work = [count * size for count, size in zip(per_block, rows, strict=False)]
        return by_block_work(length, self.world_size, work=work, block=block)


Cut: TypeAlias = LoadBalancer | SequenceLayout | Balancer
"""How a sequence is cut: a load balancer, a layout, or a function (length, ranks) -> layout such as ``head_tail``."""


def layout_of(cut: Cut, length: int, ranks: int) -> SequenceLayout:
    """The layout of a sequence of ``length`` positions on ``ranks`` ranks, however it is said.

    Raises:
        ValueError: when it is one for another length or number of ranks.
        TypeError: for what says no layout.
    """
    layout = cut.layout if isinstance(cut, LoadBalancer) else cut
    if isinstance(layout, SequenceLayout):
        if (layout.length, layout.ranks) != (length, ranks):
            raise ValueError(
                f"the cut is one of {layout.length} positions for {layout.ranks} ranks, but there are {length} "
                f"positions and {ranks} ranks"
            )
        return layout
    if not callable(layout):
        raise TypeError(
            f"a cut is a load balancer of cp_styles, a SequenceLayout, or a function such as head_tail, got {cut!r}"
        )
    return layout_made_by(layout, length, ranks)
