"""The exchanges of Ulysses: a part of the sequence with all heads <-> the whole sequence with a part of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from cp_styles._lib.device_copies import numbers_on
from cp_styles.collectives.autograd import differentiable, start
from cp_styles.collectives.exchange import Exchange
from cp_styles.collectives.peers import CallSignature, Group, Peers, check_dim, compare_calls, get_peers, make_signature
from cp_styles.collectives.rows import Layout, Rows, check_local, contiguous_rows, make_rows, make_rows_for
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.layouts import SequenceLayout
from cp_styles.layouts.ranges import Chunk, even_sizes, ranges_of

TensorOrTensors = TypeVar("TensorOrTensors", torch.Tensor, Sequence[torch.Tensor])


def head_exchange(
    peers: Peers, heads: Sequence[int], layout: SequenceLayout, *, seq_dim: int, heads_dim: int
) -> Exchange:
    """The exchange of :func:`seq_to_heads` for tensors of ``heads`` heads, queries first. Autograd does not record it.

    ``e(q, k, v)`` goes from S(seq) to S(heads). ``e.adjoint()(dq, dk, dv)`` takes the gradients back, and sums the
    gradients of KV heads that several ranks had. If no head is on several ranks, ``adjoint()`` is also the inverse, for
    the output of the attention. All ranks must pass the same arguments. Equal arguments give equal exchanges.
    """
    ranges = tuple(head_ranges(count, heads[0], peers.size) for count in heads)
    return Exchange(peers, seq_dim, heads_dim, Rows(layout), ranges)


def head_ranges(count: int, query_heads: int, ranks: int) -> tuple[Chunk, ...]:
    """The range of ``count`` heads that each rank needs. Query heads are cut evenly; the first ranks get the remainder.

    With grouped queries, several ranks may need the same KV head. With fewer query heads than ranks, some ranks have
    none.

    Raises:
        ValueError: ``count`` does not divide ``query_heads``.
    """
    if query_heads == count == 0:  # a rank without heads, whose heads are cut further
        return ((0, 0),) * ranks
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
    mesh: Group,
    *,
    seq_dim: int = 2,
    heads_dim: int = 1,
    layout: Layout = None,
    checks: Checks = CHECKS,
    async_op: bool = False,
) -> Any:
    """Gather the sequence and cut the heads, so that attention can run locally. q, k and v are sent in one message.

    ::

        forward:   S(seq) -> S(heads)
        backward:  S(heads) -> S(seq)      gradients of KV heads that several ranks had are summed in float32 or wider

    ::

        q, k, v = seq_to_heads((q, k, v), mesh)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = heads_to_seq(out, mesh, heads=query_heads)

    Args:
        tensors: a tensor, or several of one dtype, queries first. The order of dims may be ``[B, H, S, D]``, as in
            torch's attention, or any other. The number of heads, and the sizes after the head dim (except the
            sequence), may differ between tensors. The number of query heads is a multiple of the remaining numbers.
        seq_dim: the dim of the sequence; this rank's part of it.
        heads_dim: the dim of the heads; all of them.
        mesh, layout, checks, async_op: see :mod:`cp_styles.collectives`.

    Returns:
        The tensor, or a tuple of tensors, in global order, without padding. The first has the whole sequence of this
        rank's query heads. These are cut as evenly as possible: the first ranks get the remainder, ranks beyond the
        number of heads get none. The remaining tensors have the KV heads to which these queries attend, once each, so
        that ``enable_gqa=True`` pairs them correctly. If the pairing on this rank is not regular (3 query heads to 2 KV
        heads, for example), KV heads are repeated after the exchange, one for each query head. The tensors are views of
        one buffer, the sequence outermost. Do not change them in place.

    Communication: one all-to-all. A rank sends its part of the sequence of each head to every other rank that needs
    it. One copy before; none after, or one if the layout is not contiguous.

    Raises:
        ValueError: head counts that do not divide, tensors that do not fit together; and as all functions of this
            package.

    Source: Jacobs et al., DeepSpeed Ulysses (2023). The paper has no single message for q, k and v, and no fewer KV
        heads than ranks.
    """
    peers = get_peers(mesh)
    single = isinstance(tensors, torch.Tensor)
    inputs: tuple[torch.Tensor, ...] = (tensors,) if single else tuple(tensors)

    def describe() -> CallSignature:
        described = [_head_signature(x, seq_dim, heads_dim) for x in inputs]
        if not described:
            raise ValueError("seq_to_heads got no tensors: pass (q, k, v)")
        seq, head = seq_dim % inputs[0].ndim, heads_dim % inputs[0].ndim
        for x in inputs:
            head_ranges(x.shape[head], inputs[0].shape[head], peers.size)
            if _message_key(x, seq, head) != _message_key(inputs[0], seq, head):
                raise ValueError(
                    f"one message needs one dtype and the same sizes in dim {seq} and in front of dim {head}: "
                    f"bring these together, or call once for each: {[(tuple(x.shape), x.dtype) for x in inputs]}"
                )
        rows = make_rows(layout, peers)
        for x in inputs:
            check_local(rows, x, seq, peers)
        same: dict[str, Any] = {"layout": layout, "async_op": async_op}
        for index, (facts, _) in enumerate(described):
            same |= {f"{name} of tensor {index}": fact for name, fact in facts.items()}
        return same, described[0][1]

    lengths = compare_calls(peers, "seq_to_heads", describe, checks.agreement)
    rows = make_rows(layout, peers) or contiguous_rows(lengths)
    seq, head = seq_dim % inputs[0].ndim, heads_dim % inputs[0].ndim
    queries = inputs[0].shape[head]
    columns = tuple(head_ranges(x.shape[head], queries, peers.size) for x in inputs)
    op = Exchange(peers, seq, head, rows, columns)
    head_counts = even_sizes(queries, peers.size)
    first = sum(head_counts[: peers.rank])
    counts = [x.shape[head] for x in inputs]

    def pair_heads(results: tuple[torch.Tensor, ...]) -> Any:
        paired = tuple(
            _repeat_kv_heads(x, head, range(first, first + head_counts[peers.rank]), queries // count)
            for x, count in zip(results, counts, strict=True)
        )
        return paired[0] if single else paired

    trimmed = [rows.trim(x, seq, peers.rank) for x in inputs]
    if async_op:
        return start(op, *trimmed, check=checks.agreement).then(pair_heads)
    return pair_heads(differentiable(op, *trimmed, check=checks.agreement))


def heads_to_seq(
    x: torch.Tensor,
    mesh: Group,
    *,
    seq_dim: int = 2,
    heads_dim: int = 1,
    heads: int | None = None,
    layout: Layout = None,
    checks: Checks = CHECKS,
    async_op: bool = False,
) -> Any:
    """Gather the heads and cut the sequence: the inverse of :func:`seq_to_heads`, for the output of the attention.

    ::

        forward:   S(heads) -> S(seq)
        backward:  S(seq) -> S(heads)

    Args:
        x: the whole sequence, in global order, of this rank's heads: ``[B, H, S, D]``, or any other order of dims.
        seq_dim: the dim of the sequence; all of it.
        heads_dim: the dim of the heads; this rank's heads.
        heads: the total number of heads, cut as :func:`seq_to_heads` cuts them. None: the numbers that the ranks have.
        mesh, layout, checks, async_op: see :mod:`cp_styles.collectives`.

    Returns:
        This rank's part of the sequence with all heads; contiguous, padded with zeros with :class:`Padded`. With
        ``async_op`` a :class:`Pending` of it.

    Communication: one all-to-all. A rank sends ``x`` without its own part of the sequence. One copy before, one after,
    and one more on ranks that pad. The first is not needed if the sequence is the outermost dim in memory. Attention on
    the result of :func:`seq_to_heads` has that order if B = 1.

    Raises:
        ValueError, TypeError: as :func:`seq_to_heads`; also if the heads are not this rank's share of ``heads``.

    Source: Jacobs et al., DeepSpeed Ulysses (2023).
    """
    peers = get_peers(mesh)

    def describe() -> CallSignature:
        same = {"heads": heads, "layout": layout, "async_op": async_op}
        facts = _head_signature(x, seq_dim, heads_dim, uneven_heads=True, **same)
        make_rows_for(layout, x, seq_dim % x.ndim, peers)
        head = heads_dim % x.ndim
        if heads is not None and x.shape[head] != even_sizes(heads, peers.size)[peers.rank]:
            raise ValueError(
                f"rank {peers.rank} has {x.shape[head]} heads (dim {head} of {tuple(x.shape)}), but its share of "
                f"{heads} on {peers.size} ranks is {even_sizes(heads, peers.size)[peers.rank]}"
            )
        return facts

    head_counts = compare_calls(peers, "heads_to_seq", describe, checks.agreement)
    seq, head = seq_dim % x.ndim, heads_dim % x.ndim
    rows = make_rows_for(layout, x, seq, peers)
    sizes = head_counts if heads is None else even_sizes(heads, peers.size)
    op = Exchange(peers, seq, head, rows, (ranges_of(sizes),), to_columns=False)
    if async_op:
        return start(op, x, check=checks.agreement).then(lambda results: rows.fill(results[0], seq))
    return rows.fill(differentiable(op, x, check=checks.agreement)[0], seq)


def _head_signature(
    x: torch.Tensor, seq_dim: int, heads_dim: int, *, uneven_heads: bool = False, **same: Any
) -> CallSignature:
    seq, head = check_dim(x, seq_dim, "seq_dim"), check_dim(x, heads_dim, "heads_dim")
    if seq == head:
        raise ValueError(f"seq_dim and heads_dim are both dim {seq} of {tuple(x.shape)}: they must differ")
    return make_signature(x, head if uneven_heads else seq, dims=(seq, head), **same)


def _message_key(x: torch.Tensor, seq: int, head: int) -> tuple[Any, ...]:
    """The properties that tensors of one message must share."""
    return x.dtype, x.ndim, x.shape[seq], tuple(size for dim, size in enumerate(x.shape[:head]) if dim != seq)


def _repeat_kv_heads(x: torch.Tensor, head: int, queries: range, group: int) -> torch.Tensor:
    """KV heads for torch's pairing, by which query head i of this rank uses KV head ``i // (queries / KV heads)``."""
    first = queries.start // group
    kv_heads = tuple([query // group - first for query in queries])
    count, heads = len(kv_heads), x.shape[head]
    # Without queries, or with a regular pairing, torch pairs the heads itself.
    if not count or (count % heads == 0 and kv_heads == tuple([i // (count // heads) for i in range(count)])):
        return x
    return x.index_select(head, numbers_on(x.device, kv_heads))
