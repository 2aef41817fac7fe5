"""torch's load balancers, with the same constructor arguments and the layouts of this package.

A balancer of torch computes an order of the positions, which is cut into equal pieces for the ranks. Here it has a
:class:`~cp_styles.layout.SequenceLayout` instead, for any length. Use ``balancer.layout`` wherever this package takes a
layout. The functions of :mod:`cp_styles.torch_api.api` also take the balancer itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_styles._compat import torch_order_of_documents
from cp_styles.layout import Balancer, SequenceLayout, by_block_work, head_tail, layout_made_by, per_document_head_tail


class LoadBalancer(ABC):
    """Base of the load balancers: a layout, with torch's name and arguments."""

    @cached_property
    def layout(self) -> SequenceLayout:
        """Which positions each rank holds. Cached. No communication."""
        return self._make()

    @abstractmethod
    def _make(self) -> SequenceLayout: ...

    @property
    def _device(self) -> torch.device | str:
        return "cpu"

    def generate_indices(self, restore: bool = False) -> torch.Tensor:
        """The order as an index tensor: int64 ``[1, length]``, the same for all rows of a batch.

        Args:
            restore: False: ``whole[indices]`` has the positions of rank 0, then those of rank 1, and so on. Rank r has
                ``layout.lengths[r]`` of them, which may differ. True: the inverse, so that
                ``whole[indices][restore_indices]`` is ``whole``.
        """
        layout = self.layout
        order = torch.cat([layout.positions(rank, self._device) for rank in range(layout.ranks)])
        return (order.argsort() if restore else order)[None]

    # The name that torch's own functions call, for example when they shard a BlockMask.
    _generate_indices = generate_indices

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout.length} positions, {self.layout.ranks} ranks)"


class HeadTailLoadBalancer(LoadBalancer):
    """:func:`~cp_styles.layout.head_tail`, with the arguments of torch's balancer of the same name.

    Args:
        seq_length: any number of positions. (torch needs a multiple of twice the ranks.)
        world_size: number of ranks.
        device: device of the index tensors.

    Example: see :func:`~cp_styles.torch_api.context_parallel_shard`.
    """

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device = "cpu") -> None:
        self.seq_length, self.world_size, self.device = seq_length, world_size, device

    @property
    def _device(self) -> torch.device | str:
        return self.device

    def _make(self) -> SequenceLayout:
        return head_tail(self.seq_length, self.world_size)


class PerDocumentHeadTailLoadBalancer(LoadBalancer):
    """Each rank holds what the installed torch's balancer of the same name and arguments gives it, in ascending order.

    torch takes lengths that are multiples of twice the ranks. For others it is
    :func:`~cp_styles.layout.per_document_head_tail` with ``cut_all``: every rank holds a part of every document. So
    does torch, but for versions up to 2.14: there the first documents go to the first ranks, which is not balanced.
    Where the cut need not be torch's, use ``per_document_head_tail``.

    A balancer is not a mask. Give the attention the documents too (``mask=Documents(lengths)``).

    Args:
        seq_length_per_doc: lengths of the packed documents of each row of the batch, ``[rows][documents]``. Any
            lengths. (torch needs multiples of twice the ranks.)
        world_size: number of ranks.
        device: device of the index tensors.

    Raises:
        TypeError: for a flat list of lengths.
        NotImplementedError: for rows with different documents. Each row would need its own layout.

    Example::

        balancer = PerDocumentHeadTailLoadBalancer([[600, 400]], mesh.size())
        (part,) = context_parallel_shard(mesh, [tokens], [1], balancer)
    """

    def __init__(
        self, seq_length_per_doc: Sequence[Sequence[int]], world_size: int, device: str | torch.device = "cpu"
    ) -> None:
        rows = seq_length_per_doc.tolist() if isinstance(seq_length_per_doc, torch.Tensor) else seq_length_per_doc
        if not rows or any(isinstance(row, int) for row in rows):
            raise TypeError(
                "seq_length_per_doc must have one list of document lengths for each row of the batch, or one list for "
                f"all rows, such as [[300, 10, 690]]; got {seq_length_per_doc!r}"
            )
        rows = [[int(size) for size in row] for row in rows]
        if any(row != rows[0] for row in rows):
            raise NotImplementedError(
                f"the {len(rows)} rows of the batch have different documents, but one layout cuts all rows: pack the "
                "documents of the batch into one row, or cut all rows with head_tail and give the attention the "
                "documents of each row as a mask (PerRow)"
            )
        self.seq_length_per_doc, self.world_size, self.device = rows, world_size, device

    @property
    def _device(self) -> torch.device | str:
        return self.device

    def _make(self) -> SequenceLayout:
        (lengths,) = self.seq_length_per_doc[:1]
        order = torch_order_of_documents(lengths, self.world_size)
        if order is None:
            return per_document_head_tail(sum(lengths), self.world_size, documents=lengths, cut_all=True)
        size, chunks = len(order) // self.world_size, [[] for _ in range(self.world_size)]
        begins = [at for at in range(len(order)) if at % size == 0 or order[at] != order[at - 1] + 1]
        for begin, end in pairwise([*begins, len(order)]):
            chunks[begin // size].append((order[begin], order[end - 1] + 1))
        return SequenceLayout.from_chunks(chunks)


class PTRRLoadBalancer(LoadBalancer):
    """Equal work under a BlockMask. Whole blocks of queries are distributed by the number of key blocks they attend to.

    The name is torch's, which distributes blocks round-robin, forth and back. Here the heaviest block goes to the rank
    with the least work (Graham, 1969). Ranks get equally many blocks if the number of blocks divides. Work is summed
    over the rows and heads of the mask, so one layout fits a batch whose rows differ. Index tensors are on the device
    of the mask.

    Args:
        block_mask: a mask of self-attention: as many queries as keys. Query and key blocks may have any sizes.
        world_size: number of ranks.

    Raises:
        TypeError: ``block_mask`` is not a BlockMask.
        ValueError: for a mask of cross-attention.

    Example::

        block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1000, 1000, device="cpu")
        (part,) = context_parallel_shard(mesh, [tokens], [1], PTRRLoadBalancer(block_mask, mesh.size()))
    """

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        if not isinstance(block_mask, BlockMask):
            raise TypeError(
                f"PTRRLoadBalancer balances a BlockMask, got {type(block_mask).__name__}; for the masks of this "
                "package use by_work(length, ranks, mask=mask)"
            )
        queries, keys = block_mask.seq_lengths
        if queries != keys:
            raise ValueError(
                f"the BlockMask has {queries} queries and {keys} keys, which are not one sequence: cut each of them "
                "with its own layout"
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
        # The mask may be padded to whole blocks. The last block may have fewer rows, and so less work.
        rows = [min(block, length - start) for start in range(0, length, block)]
        work = [count * size for count, size in zip(per_block, rows, strict=False)]
        return by_block_work(length, self.world_size, work=work, block=block)


Cut: TypeAlias = LoadBalancer | SequenceLayout | Balancer
"""How a sequence is cut: a load balancer, a layout, or a function (length, ranks) -> layout such as ``head_tail``."""


def layout_of(cut: Cut, length: int, ranks: int) -> SequenceLayout:
    """The layout that ``cut`` gives for ``length`` positions on ``ranks`` ranks.

    Raises:
        ValueError: it is a layout for another length or number of ranks.
        TypeError: ``cut`` has a wrong type.
    """
    layout = cut.layout if isinstance(cut, LoadBalancer) else cut
    if isinstance(layout, SequenceLayout):
        if (layout.length, layout.ranks) != (length, ranks):
            raise ValueError(
                f"the layout has {layout.length} positions for {layout.ranks} ranks, but there are {length} "
                f"positions and {ranks} ranks"
            )
        return layout
    if not callable(layout):
        raise TypeError(
            f"expected a load balancer of cp_styles, a SequenceLayout, or a function such as head_tail, got {cut!r}"
        )
    return layout_made_by(layout, length, ranks)
