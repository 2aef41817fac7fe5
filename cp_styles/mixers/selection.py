"""Sparse attention over keys that an indexer selects, over a sharded sequence.

DeepSeek-V3.2's indexer (https://arxiv.org/abs/2512.02556) has a small query for each head, one small key and a weight:
``score[q, k] = sum over heads of weight[q, h] * relu(query[q, h] . key[k])``. A query attends to the keys with the
largest scores. Every rank gathers the small keys. So a rank scores its own queries with all keys, and no score travels.

Shapes: B batch, I heads of the indexer, L local queries, S positions of the whole sequence, K selected keys of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.compat import start_all_to_all, uncompiled
from cp_styles._lib.contents import Contents
from cp_styles.collectives.autograd import differentiable, gather_exchange
from cp_styles.collectives.exchange import wait_received
from cp_styles.collectives.peers import Peers
from cp_styles.collectives.rows import Rows
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.engine.scope import open_scope
from cp_styles.kernels.merge import accumulation_dtype
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.masks import Full, Mask
from cp_styles.mixers.fragments import CallFacts, CutSequence
from cp_styles.plan.selected import Selected, Selection, holders_of_blocks

# The largest number of scores, or of numbers of selected keys, that are in memory at a time.
_SCORES = 2**24


Select: TypeAlias = Callable[[slice, torch.Tensor | None, torch.Tensor], torch.Tensor]


class SelectedKeys(NamedTuple):
    """The keys that :func:`context_select` has selected for this rank's queries.

    Attributes:
        mask: the mask for the attention, to combine with the mask of the layer.
        positions_BLK: their positions in the whole sequence, int64; -1 where a query may attend to fewer than K keys.
        scores_BLK: their scores in float32 or float64, the largest first, -inf for -1. They are differentiable.
    """

    mask: Selected
    positions_BLK: torch.Tensor
    scores_BLK: torch.Tensor


@uncompiled
def context_select(
    q_BILD: torch.Tensor,
    k_BLD: torch.Tensor,
    weights_BIL: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    top_k: int,
    mask: Mask | None = None,
    scale: float | None = None,
    layout: SequenceLayout | Balancer | None = None,
    checks: Checks = CHECKS,
) -> SelectedKeys:
    """The ``top_k`` keys with the largest scores of each query, among the keys that ``mask`` allows.

    ``score[q, k] = sum_i weights[i, q] * relu(scale * q[i, q] . k[k])``, as in DeepSeek-V3.2
    (https://arxiv.org/abs/2512.02556). The selection has no gradient. The scores have one, for a loss of the indexer:
    see :func:`selected_weights`.

    Args:
        q_BILD: queries of the indexer for this rank's tokens, float; CPU or CUDA.
        k_BLD: keys of the indexer for this rank's tokens, one head.
        weights_BIL: the weight of each head for this rank's tokens.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        top_k: the number of keys of a query. A sequence of fewer positions has that many. Of keys with equal scores,
            ``torch.topk`` may take any.
        mask: which keys a query may select, in addition to the mask of the scope around the call. Default: all. Give it
            the mask of the attention, which would hide some of the selected keys otherwise.
        scale: factor of the products; default 1/sqrt(D).
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        :class:`SelectedKeys`.

    Communication: one all-gather of some integers; one all-gather of ``k_BLD``, whose backward is a reduce-scatter; one
    all-to-all of S bytes, from which each rank learns which of its keys the peers have selected. The host waits for
    the device once.

    Raises:
        ValueError, TypeError: on every rank, if any rank's input is invalid or the ranks differ.
        NotImplementedError: ``mask`` differs between heads.

    Example::

        selected = context_select(index_q, index_k, index_weights, mesh, top_k=2048, mask=Causal(), layout=layout)
        out = context_attention(q, k, v, mesh, mask=Causal() & selected.mask, layout=layout)
    """
    sequence = CutSequence.from_call("context_select", mesh, layout, (), checks)
    scope = open_scope(sequence.axis)
    masks = [Full() if mask is None else mask, Full() if scope is None else scope.mask]

    def describe() -> CallFacts:
        tensors = q_BILD, k_BLD, weights_BIL
        if any(x.ndim != ndim for x, ndim in zip(tensors, (4, 3, 3), strict=True)):
            raise ValueError(
                f"{sequence.name}: q_BILD, k_BLD and weights_BIL have 4, 3 and 3 dims, got "
                f"{[tuple(x.shape) for x in tensors]}"
            )
        sizes = q_BILD.shape[:2], q_BILD.shape[::3], weights_BIL.shape[:2]
        if sizes != (weights_BIL.shape[:2], k_BLD.shape[::2], q_BILD.shape[:2]) or not q_BILD.is_floating_point():
            raise ValueError(
                f"{sequence.name}: q_BILD of shape {tuple(q_BILD.shape)} and dtype {q_BILD.dtype} does not fit k_BLD "
                f"{tuple(k_BLD.shape)} and weights_BIL {tuple(weights_BIL.shape)}: pass one small key, and a weight of "
                "each head and token"
            )
        return [q_BILD.movedim(2, 0), k_BLD.movedim(1, 0), weights_BIL.movedim(2, 0)], 0, _facts(top_k, masks, scale)

    with sequence.compared_call(describe) as cut:
        k_BSD = _gather(cut.peers, cut.layout, k_BLD, check=checks.agreement)
        factor = q_BILD.shape[-1] ** -0.5 if scale is None else scale
        where = _Allowed(masks[0] & masks[1], cut.layout, cut.peers.rank, q_BILD.device)
        scores_BLK, positions_BLK = _Select.apply(q_BILD, k_BSD, weights_BIL, where, factor, top_k)
        return SelectedKeys(_share(cut.peers, (cut.layout, cut.layout), positions_BLK), positions_BLK, scores_BLK)


@uncompiled
def selected_keys(
    chosen: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    block: int = 1,
    layout: SequenceLayout | Balancer | None = None,
    kv_layout: SequenceLayout | None = None,
    checks: Checks = CHECKS,
) -> Selected:
    """The mask of keys that an indexer of your own has selected for this rank's queries.

    Args:
        chosen: int32 or int64 [B, L, K]: positions in the whole sequence, -1 for none; CPU or CUDA. Or [B, G, L, K],
            with a choice for each group of heads: query head h of H has the choice of group h // (H / G). G is 1, the
            number of key heads, the number of query heads, or another divisor of H. B is 1 if all rows of the batch
            share their choice. For a style whose heads tensor parallelism cuts, H and G count the heads of all of its
            ranks. Do not change the tensor in place.
        block: the number of consecutive keys of a block. ``chosen`` then has numbers of blocks: block n has the
            positions from n * block on, as far as there are keys.
        mesh, layout, checks: as in :func:`context_select`.
        kv_layout: the layout of keys of another sequence, such as of windows of tokens: positions are then numbers of
            these keys. Give the attention the same one.

    A key travels to a rank, with all of its heads, if a query of this rank has selected it for any group and any row of
    the batch, and the remaining mask allows it to any query of the rank.

    If few keys are selected, and the remaining mask is a band, the attention gathers the keys of each query, and
    computes with these pairs alone. It then keeps the numbers once more, sorted, in int32 where they fit.

    Communication: one all-gather of some integers; one all-to-all of a byte for each key. The host waits for the device
    once.

    Raises:
        ValueError, TypeError: on every rank, if any rank's positions are no integers, or lie outside the sequence, or
            the ranks differ. The attention raises ValueError if G does not divide its query heads.

    Example::

        mask = Causal() & selected_keys(positions_BLK, mesh, layout=layout)
        by_key_head = Causal() & selected_keys(blocks_BGLK, mesh, block=64, layout=layout)
    """
    sequence = CutSequence.from_call("selected_keys", mesh, layout, (), checks)
    keys = kv_layout and sequence.of_these_ranks(kv_layout)

    def describe() -> CallFacts:
        if keys is not None and not isinstance(keys, SequenceLayout):
            raise TypeError(f"{sequence.name}: kv_layout must be a SequenceLayout, not a balancer, got {kv_layout!r}")
        if chosen.ndim not in (3, 4) or chosen.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"{sequence.name}: chosen must be int32 or int64 [B, L, K], or [B, G, L, K] with a choice for each "
                f"group of heads, got {chosen.dtype} {tuple(chosen.shape)}"
            )
        if type(block) is not int or block < 1:
            raise ValueError(f"{sequence.name}: block={block!r} must be the number of keys of a block, at least 1")
        if keys is not None and keys.ranks != sequence.group.size():
            raise ValueError(
                f"{sequence.name}: kv_layout is for {keys.ranks} ranks, the group has {sequence.group.size()}: make it "
                "for the ranks that share the sequence"
            )
        return [chosen], chosen.ndim - 2, {"block": block, "kv_layout": keys}

    with sequence.compared_call(describe) as cut:
        return _share(cut.peers, (cut.layout, keys or cut.layout), chosen, block, crosses=keys is not None)


@uncompiled
@torch.no_grad()
def selected_weights(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    lse_BHL: torch.Tensor,
    selected: SelectedKeys,
    mesh: MeshOrGroup,
    *,
    scale: float | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """The weights with which the attention has seen the selected keys, as the mean of the heads: the target of the
    indexer's own loss. It has no gradient.

    DeepSeek-V3.2 trains the indexer by the divergence of softmax(scores) from these weights. A rank's loss is the sum
    over its queries, divided by the number of all queries: see the example.

    Args:
        q_BHLD: the queries of the attention, CPU or CUDA.
        k_BGLD: its keys; H is a multiple of G.
        lse_BHL: its logsumexp: ``context_attention(..., return_lse=True)``.
        selected: the result of :func:`context_select`.
        mesh, checks: as in :func:`context_select`.
        scale: factor of the logits of the attention; default 1/sqrt(D).

    Returns:
        Weights [B, L, K] in the dtype of ``lse_BHL``, 0 for the position -1. They sum to 1 if the attention had the
        mask of ``selected``.

    Communication: one all-gather of some integers; one all-gather of each key head, one after the other.

    Raises:
        ValueError, TypeError: on every rank, if any rank's input is invalid or the ranks differ.
        NotImplementedError: on every rank, for keys of another sequence.

    Example::

        selected = context_select(index_q, index_k, index_weights, mesh, top_k=2048, mask=Causal(), layout=layout)
        out, lse = context_attention(q, k, v, mesh, mask=selected.mask, layout=layout, return_lse=True)
        target = selected_weights(q, k, lse, selected, mesh)
        log_p = selected.scores_BLK.log_softmax(-1)
        loss_of_rank = torch.where(target > 0, target * (target.log() - log_p), 0).sum() / (B * S)
    """
    sequence = CutSequence.from_call("selected_weights", mesh, selected.mask.of_rank.layouts[0], (), checks)

    def describe() -> CallFacts:
        if selected.mask.crosses:
            raise NotImplementedError(f"{sequence.name}: keys of another sequence (kv_layout=) are not supported")
        shapes = tuple(q_BHLD.shape), tuple(k_BGLD.shape), tuple(lse_BHL.shape)
        fits = q_BHLD.ndim == k_BGLD.ndim == 4 and shapes[0][:3] == shapes[2] and shapes[0][2:] == shapes[1][2:]
        if not fits or shapes[0][0] != shapes[1][0] or shapes[0][1] % shapes[1][1]:
            raise ValueError(f"{sequence.name}: q_BHLD, k_BGLD and lse_BHL do not fit: {shapes}")
        return [q_BHLD.movedim(2, 0), k_BGLD.movedim(2, 0), lse_BHL.movedim(2, 0)], 0, {"scale": scale}

    with sequence.compared_call(describe) as cut:
        (batch, heads, _, dim), groups = q_BHLD.shape, k_BGLD.shape[1]
        factor = dim**-0.5 if scale is None else scale
        positions = selected.positions_BLK
        total = lse_BHL.new_zeros(batch, *positions.shape[1:])
        for head in range(groups):
            k_BSD = _gather(cut.peers, cut.layout, k_BGLD[:, head], check=False).to(lse_BHL.dtype)
            of_head = slice(head * (heads // groups), (head + 1) * (heads // groups))
            q, lse = q_BHLD[:, of_head].to(lse_BHL.dtype), lse_BHL[:, of_head]
            for rows in _ranges(positions.shape[1], batch * positions.shape[2] * (dim + heads // groups)):
                keys_BLKD, found = _take(k_BSD, positions[:, rows])
                logits = (q[:, :, rows].transpose(1, 2) @ keys_BLKD.mT) * factor - lse[:, :, rows].mT.unsqueeze(-1)
                total[:, rows] += torch.where(found[:, :, None], logits.exp(), 0.0).sum(2)
        return total / heads


def select_by_layer(
    sequence: CutSequence,
    x_BLC: torch.Tensor,
    mask: Mask,
    heads: int,
    keys: Callable[[], torch.Tensor],
    select: Select,
) -> torch.Tensor:
    """Positions int32 [B, L, K] that the indexer of a model selects. :func:`mask_of_layer` gives their mask.

    Args:
        sequence: the sequence of the call.
        x_BLC: this rank's tokens.
        mask: which keys a query may select.
        heads: the number of heads of the indexer, all of which are scored at once.
        keys: computes the keys [B, L, D] of this rank's tokens.
        select: ``select(rows, keys_BSD, allowed_BlS)`` gives positions for a range of tokens; no keys with one rank.

    Communication: as :func:`context_select`.
    """
    with torch.no_grad(), sequence.compared_call(lambda: ([x_BLC], 1, _facts(1, [mask], None))) as cut:
        keys_BSD = None if cut.whole else _gather(cut.peers, cut.layout, keys(), check=False)
        allowed = _Allowed(mask, cut.layout, cut.peers.rank, x_BLC.device)
        parts = []
        for rows in _ranges(x_BLC.shape[1], 0 if cut.whole else x_BLC.shape[0] * heads * cut.layout.length):
            allowed_BlS = allowed(rows)
            part = select(rows, keys_BSD, allowed_BlS)
            found = allowed_BlS.expand(part.shape[0], -1, -1).gather(-1, part.long())
            parts.append(part.masked_fill(~found, -1))
        positions_BLK = torch.cat(parts, 1)
        facts_about(positions_BLK)[select_by_layer] = _share(cut.peers, (cut.layout, cut.layout), positions_BLK.clone())
    return positions_BLK


def mask_of_layer(positions_BLK: torch.Tensor) -> Selected | None:
    """The mask of positions that :func:`select_by_layer` has returned; None for other tensors."""
    return facts_about(positions_BLK).get(select_by_layer)


def _facts(top_k: int, masks: list[Any], scale: float | None) -> dict[str, Any]:
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise ValueError(f"context_select: top_k must be the number of keys of a query, 1 or more, got {top_k!r}")
    if not all(isinstance(mask, Mask) for mask in masks):
        raise TypeError(f"context_select: mask must be a Mask object such as Causal(), got {masks[0]!r}")
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    rows = [row for mask in masks for row in mask.rows]
    biases = [bias for row in rows if (bias := row.bias(nothing, nothing)) is not None]
    if any(bias.shape[-3:-2] not in ((), (1,)) for bias in biases):
        raise NotImplementedError(
            "context_select: the mask differs between heads, and an indexer selects one set of keys for all heads: "
            "give it a mask of all heads"
        )
    contents = [mask.content for mask in masks]
    return {"top_k": top_k, "mask": masks, "the contents of the mask": contents, "scale": scale}


def _gather(peers: Peers, layout: SequenceLayout, x_BLD: torch.Tensor, *, check: bool) -> torch.Tensor:
    """The rows of all ranks, in the order of positions. The backward adds the gradients of all ranks."""
    op = gather_exchange(peers, 1, 3, Rows(layout))
    return differentiable(op, x_BLD.unsqueeze(-1), check=check)[0].squeeze(-1)


@torch.no_grad()
def _share(
    peers: Peers,
    layouts: tuple[SequenceLayout, SequenceLayout],
    chosen: torch.Tensor,
    block: int = 1,
    *,
    crosses: bool = False,
) -> Selected:
    """The mask of positions, or of blocks. The ranks tell each other which keys they have selected."""
    layout, chosen_BGLK = layouts[1], chosen if chosen.ndim == 4 else chosen[:, None]
    # One byte for each key: a message of keys and values has thousands of times as many.
    device, blocks = chosen.device, -(-layout.length // block)
    flags = torch.zeros(blocks + 1, dtype=torch.uint8, device=device)
    at = chosen.flatten().long()
    flags.index_fill_(0, at.clamp(-1, blocks - 1) + 1, 1)
    flags.masked_fill_(((at < -1) | (at >= blocks)).any(), 2)  # each peer is told with its own flags
    flags = flags[1:].repeat_interleave(block)[: layout.length]
    needed = Rows(layout).to_ranks(flags)  # source by source
    sent, own = needed, layout.lengths[peers.rank]
    if peers.size > 1:
        started = start_all_to_all(needed.contiguous(), [own] * peers.size, list(layout.lengths), peers.name)
        sent = wait_received(started, peers)
    counts_BGPL = _count(layout, chosen_BGLK.clamp(-1, blocks - 1), block)
    numbers = chosen.shape[-1] + 1
    counts_BGPK = torch.zeros(*counts_BGPL.shape[:3], numbers, dtype=torch.int32, device=device)
    counts_BGPK.scatter_add_(3, counts_BGPL.long(), torch.ones_like(counts_BGPL))
    both = _read_on_host(torch.cat((flags, sent, counts_BGPK.flatten().view(torch.uint8))))
    both, found = both.split((layout.length + len(sent), len(both) - layout.length - len(sent)))
    if bool((both == 2).any()):
        what = "positions" if block == 1 else f"blocks of {block} keys"
        raise ValueError(
            f"selected_keys: a rank has {what} outside the sequence of {layout.length} tokens: pass {what} in "
            "the whole sequence, and -1 for none"
        )
    both = both.bool()
    sent = both[layout.length :].view(peers.size, own).unbind()
    found = found.clone().view(torch.int32).view(counts_BGPK.shape)
    selection = Selection(layouts, peers.rank, both[: layout.length], sent, found, block, crosses)
    return Selected(chosen_BGLK, selection, counts_BGPL, Contents(chosen_BGLK))


def _read_on_host(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.cpu()  # the host makes the plan


def _count(layout: SequenceLayout, chosen_BGLK: torch.Tensor, block: int) -> torch.Tensor:
    """How many keys, or blocks, of each rank each query has selected: int32 [B, G, P, L]."""
    ranks, shape, device = layout.ranks, chosen_BGLK.shape, chosen_BGLK.device
    holders = holders_of_blocks(layout, block).on(device)[0]  # [n, blocks + 1]
    total = torch.zeros(*shape[:3], ranks + 1, dtype=torch.int32, device=device)
    for rows in _ranges(shape[2], shape[0] * shape[1] * (shape[3] + ranks)):
        part = chosen_BGLK[:, :, rows].long()
        for holder in holders:  # a block of one rank has one
            at = holder[part]
            total[:, :, rows] = total[:, :, rows].scatter_add(3, at, torch.ones_like(at, dtype=torch.int32))
    return total[..., :ranks].transpose(2, 3).contiguous()


class _Allowed:
    """Which keys of the whole sequence rows of this rank's queries may select."""

    def __init__(self, mask: Mask, layout: SequenceLayout, rank: int, device: torch.device) -> None:
        self._masks = mask.rows
        self._positions = layout.positions(rank, device)
        self.keys = torch.arange(layout.length, device=device)

    def __call__(self, rows: slice) -> torch.Tensor:
        """bool [B, l, S], or [1, l, S] for all rows of the batch."""
        queries = self._positions[rows]
        return torch.cat([self._of_row(mask, queries) for mask in self._masks])

    def _of_row(self, mask: Mask, queries: torch.Tensor) -> torch.Tensor:
        allowed, bias = mask.allowed(queries, self.keys)[None], mask.bias(queries, self.keys)
        if bias is None:
            return allowed
        bias = bias[(None,) * (4 - bias.ndim)]
        return allowed & (bias[:, 0] != float("-inf")).to(allowed.device)


def _ranges(rows: int, numbers: int) -> Iterator[slice]:
    """Ranges of rows, each of which has ``numbers`` numbers in memory."""
    step = max(1, _SCORES // max(numbers, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _take(x_BSD: torch.Tensor, positions_BLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows at positions, [B, L, K, D], and where there is one, [B, L, K]."""
    batch, _, dim = x_BSD.shape
    index = positions_BLK.clamp(min=0).expand(batch, -1, -1)
    rows = x_BSD.gather(1, index.flatten(1)[..., None].expand(-1, -1, dim))
    return rows.view(*index.shape, dim), positions_BLK >= 0


class _Select(torch.autograd.Function):
    """The largest scores and their positions. The backward computes the selected scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BILD: torch.Tensor,
        k_BSD: torch.Tensor,
        weights_BIL: torch.Tensor,
        allowed: _Allowed,
        scale: float,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (batch, heads, queries, _), length = q_BILD.shape, k_BSD.shape[1]
        wide, count = accumulation_dtype(q_BILD.dtype), min(top_k, length)
        keys_BDS = k_BSD.to(wide).mT
        scores = q_BILD.new_empty(batch, queries, count, dtype=wide)
        positions = q_BILD.new_empty(batch, queries, count, dtype=torch.int64)
        for rows in _ranges(queries, batch * length):
            total = torch.zeros(batch, rows.stop - rows.start, length, dtype=wide, device=q_BILD.device)
            for head in range(heads):  # one after the other, for memory
                product = (q_BILD[:, head, rows].to(wide) @ keys_BDS).mul_(scale).relu_()
                total.addcmul_(product, weights_BIL[:, head, rows, None].to(wide))
            total.masked_fill_(~allowed(rows), float("-inf"))
            scores[:, rows], positions[:, rows] = total.topk(count)
        positions.masked_fill_(scores == float("-inf"), -1)
        ctx.save_for_backward(q_BILD, k_BSD, weights_BIL, positions)
        ctx.scale = scale
        ctx.mark_non_differentiable(positions)
        return scores, positions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLK: torch.Tensor, _: Any) -> tuple[Any, ...]:
        q_BILD, k_BSD, weights_BIL, positions = ctx.saved_tensors
        wide, (batch, heads, queries, dim) = grad_BLK.dtype, q_BILD.shape
        dq, dweights = torch.empty_like(q_BILD), torch.empty_like(weights_BIL)
        dk = torch.zeros(k_BSD.shape, dtype=wide, device=k_BSD.device)
        for rows in _ranges(queries, batch * positions.shape[2] * (dim + heads)):
            keys_BLKD, found = _take(k_BSD.to(wide), positions[:, rows])
            q_BLID, w_BLI = q_BILD[:, :, rows].transpose(1, 2).to(wide), weights_BIL[:, :, rows].mT.to(wide)
            grad = grad_BLK[:, rows].masked_fill(~found, 0.0)[:, :, None]
            product = (q_BLID @ keys_BLKD.mT) * ctx.scale
            dweights[:, :, rows] = (product.relu() * grad).sum(-1).mT
            dproduct = torch.where(product > 0, grad * w_BLI[..., None], 0.0) * ctx.scale
            dq[:, :, rows] = (dproduct @ keys_BLKD).transpose(1, 2)
            index = positions[:, rows].clamp(min=0).flatten(1)[..., None].expand(-1, -1, dim)
            dk.scatter_add_(1, index, (dproduct.mT @ q_BLID).flatten(1, 2))
        return dq, dk.to(k_BSD.dtype), dweights, None, None, None
