"""Ulysses: from a part of the sequence with all heads to all of the sequence with a part of the heads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from cp_styles.collectives._autograd import differentiable, start
from cp_styles.collectives._exchange import Exchange
from cp_styles.collectives._group import Facts, Group, Peers, consult, dim_of, facts_of, peers_of
from cp_styles.collectives._rows import (
    Layout,
    Rows,
    check_local,
    contiguous_rows,
    even_sizes,
    ranges_of,
    rows_of,
    rows_of_whole,
)
from cp_styles.layout import Chunk

TensorOrTensors = TypeVar("TensorOrTensors", torch.Tensor, Sequence[torch.Tensor])


def head_exchange(
    group: Group | Peers, *, heads: Sequence[int], seq_sizes: Layout, seq_dim: int, head_dim: int, ndim: int = 4
) -> Exchange:
    """The exchange under :func:`seq_to_heads`, for use inside an autograd Function of your own.

    ``e(q, k, v)`` takes S(seq) to S(heads), ``e.adjoint()(dq, dk, dv)`` takes gradients the other way (and sums those
    of KV heads that several ranks had). For heads cut without repetition ``adjoint()`` is also the inverse: the way of
    the attention's output. ``e.finish(e.start(q, k, v))`` leaves room for other work in between. Autograd does not
    see it, and it checks nothing: the ranks must agree on the arguments. Equal arguments give equal exchanges.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None for the identity.
        heads: the number of heads of each tensor that goes into the one message, queries first.
        seq_sizes: how the sequence is cut: SequenceLayout or the size of each rank's part; not None, not Padded.
        seq_dim: the dim of the sequence. Counted from the front, or negative.
        head_dim: the dim of the heads, likewise.
        ndim: number of dims of the tensors.

    Returns:
        An exchange of tensors with ``seq_dim`` and ``head_dim``; their dims in front of ``head_dim`` must be the same,
        those behind it may differ. After it the tensors are views of one buffer with the sequence outermost.

    Communicates, when called, one all-to-all; a rank sends its rows of the heads that each other rank needs, once.

    Raises:
        ValueError: see :func:`head_ranges`; a layout for another number of ranks.
    """
    peers = peers_of(group)
    rows = rows_of(seq_sizes, peers)
    if rows is None or rows.shard is not None:
        raise ValueError("head_exchange needs to know the size of each rank: pass a SequenceLayout or one size a rank")
    ranges = tuple(head_ranges(count, heads[0], peers.size) for count in heads)
    return Exchange(peers, seq_dim % ndim, head_dim % ndim, rows, ranges)


def head_ranges(count: int, query_heads: int, ranks: int) -> tuple[Chunk, ...]:
    """Which of ``count`` heads each rank needs, when the query heads are dealt as evenly as can be, first ranks first.

    With grouped queries several ranks may need one KV head; with fewer query heads than ranks some ranks get none.

    Raises:
        ValueError: when ``count`` does not divide ``query_heads``.
    """
    if count < 1 or query_heads % count:
        raise ValueError(
            f"{query_heads} query heads cannot share {count} key/value heads: the second number must divide the first "
            "(the first tensor is the queries)"
        )
    group = query_heads // count
    ranges = ranges_of(even_sizes(query_heads, ranks))
    return tuple((start // group, -(-stop // group)) for start, stop in ranges)


def seq_to_heads(
    tensors: TensorOrTensors,
    group: Group,
    *,
    seq_dim: int = 2,
    head_dim: int = 1,
    layout: Layout = None,
    check: bool = True,
    async_op: bool = False,
) -> Any:
    """All of the sequence, a part of the heads: what attention needs. q, k and v go in one message.

    ::

        forward:   S(seq) -> S(heads)
        backward:  S(heads) -> S(seq)      gradients of KV heads that several ranks had are summed, in float32 at least

    ::

        q, k, v = seq_to_heads((q, k, v), group)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = heads_to_seq(out, group, heads=query_heads)

    Args:
        tensors: a tensor, or a sequence of them of one dtype, queries first: ``[B, H, S, D]`` in the order of torch's
            attention, or any other with ``seq_dim`` and ``head_dim``. Number of heads, and what is behind the head dim
            (except the sequence), may differ between tensors. The number of query heads is a multiple of the others'.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None.
        seq_dim: the dim of the sequence, here this rank's part.
        head_dim: the dim of the heads, here all of them.
        layout: how the sequence is cut, see :data:`Layout`. The result is in global order. With :class:`Padded` the
            filling is dropped here and never sent. None: contiguous parts of whatever sizes the ranks have; without
            ``check``, and under torch.compile, of this rank's size.
        check: see :func:`all_to_all`.
        async_op: see :func:`all_to_all`.

    Returns:
        The tensor, or a tuple of tensors: the whole sequence of this rank's query heads (dealt as evenly as can be,
        remainder to the first ranks; none for ranks beyond the number of heads), and the KV heads these attend to, once
        each, so that ``enable_gqa=True`` pairs them rightly. Where that pairing is not regular on this rank (3 query
        heads to 2 KV heads, say) KV heads are repeated, one for each query head, after they have travelled. The
        tensors are views of one buffer, the sequence outermost; do not change them in place.

    Communicates one all-to-all; a rank sends its part of the sequence of each head to every other rank that needs it.
    One copy before, none after (one, for a layout that is not contiguous). ``check`` adds what it adds to
    :func:`all_to_all`.

    Raises:
        ValueError: bad dims, head counts that do not divide, tensors that do not fit together, a layout that is not
            this tensor's, ranks that disagree: on every rank, with ``check``.
        TypeError: for a DTensor (pass its ``to_local()``), what is not a layout, or not a group.

    Source: Jacobs et al., DeepSpeed Ulysses (2023); one message for q, k, v and KV heads fewer than ranks are not in
        it.
    """
    peers = peers_of(group)
    single = isinstance(tensors, torch.Tensor)
    listed: tuple[torch.Tensor, ...] = (tensors,) if single else tuple(tensors)
    resolved: list[Rows | None] = []

    def describe() -> Facts:
        facts = [_head_facts(x, seq_dim, head_dim) for x in listed]
        if not facts:
            raise ValueError("seq_to_heads got no tensors: pass (q, k, v)")
        seq, head = seq_dim % listed[0].ndim, head_dim % listed[0].ndim
        for x in listed:
            head_ranges(x.shape[head], listed[0].shape[head], peers.size)
            if _frame(x, seq, head) != _frame(listed[0], seq, head):
                raise ValueError(
                    f"one message needs one dtype and the same sizes in dim {seq} and in front of dim {head}: "
                    f"bring these together, or call once for each: {[(tuple(x.shape), x.dtype) for x in listed]}"
                )
        rows = rows_of(layout, peers)
        check_local(rows, listed[0], seq, peers)
        resolved.append(rows)
        same = {f"{key} of tensor {index}": value for index, one in enumerate(facts) for key, value in one.same.items()}
        return Facts({**same, "layout": layout, "async_op": async_op}, facts[0].own)

    found = consult(peers, "seq_to_heads", describe, check)
    rows = resolved[0] or contiguous_rows(found)
    seq, head = seq_dim % listed[0].ndim, head_dim % listed[0].ndim
    queries = listed[0].shape[head]
    columns = tuple(head_ranges(x.shape[head], queries, peers.size) for x in listed)
    op = Exchange(peers, seq, head, rows, columns)
    own = even_sizes(queries, peers.size)
    first = sum(own[: peers.rank])
    counts = [x.shape[head] for x in listed]

    def paired(results: tuple[torch.Tensor, ...]) -> Any:
        paired = tuple(
            _pair(x, head, range(first, first + own[peers.rank]), queries // count)
            for x, count in zip(results, counts, strict=True)
        )
        return paired[0] if single else paired

    trimmed = [rows.trim(x, seq, peers.rank) for x in listed]
    return start(op, *trimmed).then(paired) if async_op else paired(differentiable(op, *trimmed))


def heads_to_seq(
    x: torch.Tensor,
    group: Group,
    *,
    seq_dim: int = 2,
    head_dim: int = 1,
    heads: int | None = None,
    layout: Layout = None,
    check: bool = True,
    async_op: bool = False,
) -> Any:
    """A part of the sequence, all of the heads: the way back of attention's output.

    ::

        forward:   S(heads) -> S(seq)
        backward:  S(seq) -> S(heads)

    Args:
        x: the whole sequence, in global order, of this rank's heads: ``[B, H, S, D]``, or any other order of dims.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None.
        seq_dim: the dim of the sequence, here all of it.
        head_dim: the dim of the heads, here this rank's.
        heads: how many heads there are in all, dealt as :func:`seq_to_heads` deals them. None: what the ranks have;
            without ``check``, and under torch.compile, that every rank has as many as this one.
        layout: how the sequence is to be cut, see :data:`Layout`; with :class:`Padded` shards are filled with zeros.
            None: contiguous parts as equal as can be, the remainder to the first ranks.
        check: see :func:`all_to_all`.
        async_op: see :func:`all_to_all`.

    Returns:
        This rank's part of the sequence with all heads; contiguous. With ``async_op`` a :class:`Pending` of it.

    Communicates one all-to-all; a rank sends ``x`` but for its own part of the sequence. One copy before (none if the
    sequence is the outermost dim in memory, as attention on what :func:`seq_to_heads` gives leaves it for B = 1), one
    after; filling is one more on the ranks that have any.

    Raises:
        ValueError, TypeError: as :func:`seq_to_heads`; also heads that are not this rank's share of ``heads``.

    Source: Jacobs et al., DeepSpeed Ulysses (2023).
    """
    peers = peers_of(group)
    resolved: list[Rows] = []

    def describe() -> Facts:
        facts = _head_facts(x, seq_dim, head_dim, own="heads")
        seq, head = seq_dim % x.ndim, head_dim % x.ndim
        rows = rows_of_whole(layout, x, seq, peers)
        if heads is not None and x.shape[head] != even_sizes(heads, peers.size)[peers.rank]:
            raise ValueError(
                f"rank {peers.rank} has {x.shape[head]} heads (dim {head} of {tuple(x.shape)}), but its share of "
                f"{heads} on {peers.size} ranks is {even_sizes(heads, peers.size)[peers.rank]}"
            )
        resolved.append(rows)
        return facts._replace(same={**facts.same, "heads": heads, "layout": layout, "async_op": async_op})

    found = consult(peers, "heads_to_seq", describe, check)
    rows = resolved[0]
    seq, head = seq_dim % x.ndim, head_dim % x.ndim
    sizes = found if heads is None else even_sizes(heads, peers.size)
    op = Exchange(peers, seq, head, rows, (ranges_of(sizes),), to_columns=False)
    if async_op:
        return start(op, x).then(lambda results: rows.fill(results[0], seq))
    return rows.fill(differentiable(op, x)[0], seq)


def _head_facts(x: torch.Tensor, seq_dim: int, head_dim: int, own: str = "seq") -> Facts:
    seq, head = dim_of(x, seq_dim, "seq_dim"), dim_of(x, head_dim, "head_dim")
    if seq == head:
        raise ValueError(f"seq_dim and head_dim are both dim {seq} of {tuple(x.shape)}: they must differ")
    return facts_of(x, head if own == "heads" else seq, dims=(seq, head))


def _frame(x: torch.Tensor, seq: int, head: int) -> tuple[Any, ...]:
    """What tensors of one message must have in common."""
    return x.dtype, x.ndim, x.shape[seq], tuple(size for dim, size in enumerate(x.shape[:head]) if dim != seq)


def _pair(x: torch.Tensor, head: int, queries: range, group: int) -> torch.Tensor:
    """KV heads such that this rank's query head i finds its own at ``i // (queries / KV heads)``, as torch pairs."""
    first = queries.start // group
    wanted = [query // group - first for query in queries]
    found = x.shape[head]
    if not wanted or (len(wanted) % found == 0 and wanted == [i // (len(wanted) // found) for i in range(len(wanted))]):
        return x
    return x.index_select(head, torch.tensor(wanted, device=x.device))
