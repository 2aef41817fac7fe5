"""Batches under context parallelism: labels, positions, shards, and the loss and gradients of the whole sequence.

The functions take and return plain tensors and do not depend on attention. A training step::

    labels = next_token_labels(tokens, document_ids=ids)         # of the whole sequence, before sharding
    part = shard_batch({"tokens": tokens, "labels": labels}, layout, rank, seq_dims={"tokens": 1, "labels": 1})
    logits = model(part["tokens"], layout.positions(rank))
    losses = cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
    loss = global_loss(losses, global_token_count(part["labels"], cp), cp)
    loss.backward()
    sum_gradients(model, cp)

``cp`` is the process group, or the 1-D mesh, over which the sequence is sharded. ``rank`` is the rank in it.

The backward of each rank computes its share of the gradients, and exactly one reducer must sum the shares. With an
additional data-parallel axis, count tokens and sum loss and gradients over both axes: use
``both = mesh["dp", "cp"]._flatten("dp_cp")`` instead of ``cp`` in the last three lines above, and below.

- no other reducer: ``sum_gradients(model, cp)``, as above;
- FSDP2: ``fully_shard(..., mesh=cp)`` of each layer and the model, ``global_loss(..., cp, averaged_over=cp.size())``;
- HSDP: ``fully_shard(..., mesh=mesh["dp", "cp"])``, ``global_loss(..., both, averaged_over=both.size())``;
- DDP: ``DistributedDataParallel(model, process_group=cp.get_group())``, ``averaged_over=cp.size()``;
- FSDP2 over dp alone: ``global_loss(..., both, averaged_over=mesh["dp"].size())``, then ``sum_gradients(model, cp)``.

FSDP2 and DDP divide by the number of ranks that they reduce over. ``averaged_over`` multiplies the gradient by this
number first, so ranks may hold any number of tokens. (``FSDPModule.set_gradient_divide_factor(1.0)`` has the same
effect if the backend supports it; gloo does not in float32.) With accumulation, give each :func:`global_loss` the
token count of all micro-batches, and sum (or let FSDP2 and DDP synchronize) after the last micro-batch.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import device_checksum, on_host
from cp_styles._lib.compat import meshes_of_fsdp, replaces_mean_of_fsdp
from cp_styles._lib.device_copies import captures_graph
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts, is_of_this_world, start_status
from cp_styles.comm.forwards import Forwards
from cp_styles.comm.group_state import state_of, states
from cp_styles.comm.groups import MeshOrGroup, axis_and_group, group_now, shares_ranks, world_group
from cp_styles.comm.point_to_point import Operation, collective
from cp_styles.layout import SequenceLayout, holds
from cp_styles.mask import Tree
from cp_styles.replicas import (
    Difference,
    Replica,
    UnreducedGradientsError,
    find_differences,
    named_parameters,
    replica_number,
    replicas_of,
)

__all__ = [
    "IGNORE_INDEX",
    "chunked_token_losses",
    "document_positions",
    "global_loss",
    "global_token_count",
    "next_token_labels",
    "predicted_tokens",
    "shard_batch",
    "sum_gradients",
]

IGNORE_INDEX = -100
"""The label of a token without a target: the default ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""


def next_token_labels(
    tokens: torch.Tensor,
    *,
    document_ids: torch.Tensor | None = None,
    shift: int = 1,
    seq_dim: int = -1,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Labels for the *whole* sequence: for each token, the token ``shift`` positions later. Shard them with the tokens.

    Labels that are shifted after sharding are wrong at every shard boundary: the next token is on another rank.

    Args:
        tokens: integers of any dtype, with the whole sequence along ``seq_dim``.
        document_ids: integers that broadcast to ``tokens``; a run of equal ids along ``seq_dim`` is a document. None:
            the sequence is one document. Ids from lengths of documents:
            ``torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))``.
        shift: 1 for next-token prediction, 2 and more for multi-token prediction.
        seq_dim: the dim of ``tokens`` that is the sequence.
        ignore_index: the label where the document or the sequence ends before the target.

    Returns:
        Labels in the shape and dtype of ``tokens``; in int64 if the dtype cannot hold ``ignore_index``, such as uint8.
        No communication.

    Raises:
        TypeError: tokens are not integers.
        ValueError: ``shift`` is below 1, ``tokens`` have no dim ``seq_dim``, or ``document_ids`` do not broadcast to
            ``tokens``.

    Example::

        labels = next_token_labels(torch.tensor([5, 6, 7, 8]), document_ids=torch.tensor([0, 0, 1, 1]))
        assert labels.tolist() == [6, -100, 8, -100]
    """
    if shift < 1:
        raise ValueError(f"shift is the number of tokens that the label is ahead; it must be at least 1, got {shift}")
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex:
        raise TypeError(f"next_token_labels: tokens must be integers, got {tokens.dtype}")
    if not -tokens.ndim <= seq_dim < tokens.ndim:
        raise ValueError(
            f"next_token_labels: tokens of shape {tuple(tokens.shape)} have no dim {seq_dim}: give seq_dim="
        )
    tokens = tokens if holds(tokens.dtype, ignore_index) else tokens.long()
    labels = torch.full_like(tokens, ignore_index)
    length = tokens.shape[seq_dim] - shift  # number of tokens with a target
    if length <= 0:
        return labels
    ahead = tokens.narrow(seq_dim, shift, length)
    if document_ids is not None:
        starts = _document_starts(_broadcast_ids(document_ids, tokens), seq_dim)
        same = starts.narrow(seq_dim, shift, length) == starts.narrow(seq_dim, 0, length)
        ahead = ahead.where(same, ignore_index)
    labels.narrow(seq_dim, 0, length).copy_(ahead)
    return labels


def document_positions(document_ids: torch.Tensor, *, seq_dim: int = -1) -> torch.Tensor:
    """Positions that restart at 0 in every document, for the *whole* sequence. Shard them with the tokens.

    For positions that count through the whole sequence, use ``layout.positions(rank)`` instead.

    Args:
        document_ids: integers; a run of equal ids along ``seq_dim`` is a document.
        seq_dim: the dim of ``document_ids`` that is the sequence.

    Returns:
        int64, in the shape of ``document_ids``. No communication.

    Example::

        assert document_positions(torch.tensor([0, 0, 1, 1, 1])).tolist() == [0, 1, 0, 1, 2]
    """
    return _index_along(document_ids, seq_dim) - _document_starts(document_ids, seq_dim)


def predicted_tokens(tree: Tree, layout: SequenceLayout, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a tree the logits of ``rank`` predict: the last token of a shared prefix predicts several.

    Each token but the first of each root is predicted once, on the rank that holds the token before it in its rollouts.

    Args:
        tree: the tree of the whole sequence.
        layout: the layout of the attention.
        rank: the rank within the cp group.

    Returns:
        Two int64 ``[N]`` on the host: rows of this rank, and the index of the token that each predicts, ascending. No
        communication.

    Raises:
        ValueError: tree and layout are for different lengths.

    Example::

        tree = Tree((3, 2, 2), (-1, 0, 0))
        rows, tokens = predicted_tokens(tree, contiguous(7, 2), 0)  # rank 0 holds the tokens 0 to 3
        assert (rows.tolist(), tokens.tolist()) == ([0, 1, 2, 3, 2], [1, 2, 3, 4, 5])
    """
    if tree.length != layout.length:
        raise ValueError(
            f"predicted_tokens: the tree has {tree.length} tokens, the layout cuts {layout.length}: make both for the "
            "whole sequence, with its padding as a further root"
        )
    held, before = layout.positions(rank, "cpu"), tree.predecessors
    row_S = torch.full((tree.length + 1,), -1, device="cpu")  # the entry behind the last belongs to -1, no token
    row_S[held] = torch.arange(len(held), device="cpu")
    tokens = torch.nonzero(row_S[before] >= 0).flatten()
    return row_S[before[tokens]], tokens


def shard_batch(
    batch: Mapping[str, torch.Tensor],
    layout: SequenceLayout,
    rank: int,
    *,
    seq_dims: Mapping[str, int | None],
    fill: Mapping[str, float] | None = None,
) -> dict[str, torch.Tensor]:
    """The shard of ``rank`` of every entry of a batch.

    Args:
        batch: whole tensors by name.
        layout: the layout of the attention. If it is longer than an entry, the entry is padded.
        rank: the rank within the cp group.
        seq_dims: the sequence dim of each entry of ``batch``. None: the entry stays whole, such as cu_seqlens or a mask
            of the whole sequence. Dims are not guessed: position ids of shape [3, B, S] have the sequence at dim 2, and
            B may equal S. Further names are ignored.
        fill: for entries that may be shorter than the layout, the value to pad them with at the end:
            ``{"tokens": pad_token_id, "labels": -100, "positions": 0}``. Causal attention does not attend to padding
            after its tokens; other attention needs a mask that hides it, and Documents a further document.

    Returns:
        A dict with the same names. Each tensor has ``layout.lengths[rank]`` in place of the whole length. No
        communication. To get whole results again, with the padding at the end, use ``layout.unshard`` with the shards
        of all ranks, or :func:`cp_styles.collectives.gather` with this layout.

    Raises:
        TypeError: an entry with a sequence dim is not a tensor.
        ValueError: an entry is missing in ``seq_dims``, is longer than the layout, or is shorter and has no ``fill``; a
            ``fill`` is given for an entry that stays whole, or does not fit its dtype; the layout has no such ``rank``.

    Example::

        layout, batch = head_tail(10, 2), {"tokens": torch.arange(10)[None]}
        part = shard_batch(batch, layout, 1, seq_dims={"tokens": 1})
        assert part["tokens"].tolist() == [[3, 4, 5, 6, 7]]
    """
    unnamed = [name for name in batch if name not in seq_dims]
    if unnamed:
        raise ValueError(
            f"seq_dims does not say which dim of {unnamed} is the sequence: "
            "give the dim, or None for an entry that every rank needs whole"
        )
    fill, parts = fill or {}, {}
    for name, whole in batch.items():
        dim = seq_dims[name]
        if dim is None:
            if name in fill:
                raise ValueError(f'fill["{name}"] is given, and seq_dims["{name}"] is None: it stays whole as it is')
            parts[name] = whole
            continue
        if not isinstance(whole, torch.Tensor):
            raise TypeError(
                f'"{name}" is a {type(whole).__name__}, and only tensors can be cut: make one of it (torch.tensor), or '
                f'say seq_dims["{name}"]=None if every rank needs it whole'
            )
        fits = -whole.ndim <= dim < whole.ndim
        if fits and whole.shape[dim] < layout.length and name in fill:
            whole = pad_at_end(name, whole, dim, layout.length - whole.shape[dim], fill[name])
        if not fits or whole.shape[dim] != layout.length:
            raise ValueError(
                f'"{name}" of shape {tuple(whole.shape)} is not {layout.length} long at dim {dim}, where the layout '
                f'cuts: correct seq_dims["{name}"], build the layout for this length, or pad a shorter one before '
                f'(shard_batch does, with fill["{name}"])'
            )
        parts[name] = layout.shard(whole, dim, rank)
    return parts


def pad_at_end(name: str, x: torch.Tensor, dim: int, padding: int, fill: float) -> torch.Tensor:
    """``x`` with ``padding`` more positions at the end of ``dim``. A copy."""
    if not holds(x.dtype, fill):
        raise ValueError(
            f'"{name}" of dtype {x.dtype} is padded with {fill}, which it cannot hold: give it another dtype, such as '
            f'batch["{name}"].long(), or another value'
        )
    shape = list(x.shape)
    shape[dim] = padding
    return torch.cat((x, x.new_full(shape, fill)), dim)


def global_token_count(labels: torch.Tensor, mesh: MeshOrGroup, *, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """Number of tokens of all ranks that have a label: int64, 0-dim, equal on every rank.

    With several micro-batches, add their counts and give the sum to each :func:`global_loss`.

    Args:
        labels: this rank's labels: integers of any shape.
        mesh: the ranks that share the tokens. It may be a flattened mesh of data and context parallel ranks.
        ignore_index: the label of a token without a target, which does not count.

    Raises:
        ValueError: on every rank, if a label of any rank is below 0 and not ``ignore_index``, as in data that marks
            missing labels by -1. On a GPU the host waits for this check only in the first call over the group. In later
            calls the count becomes 0, so the loss is not finite.

    Communication: one all-reduce of two integers. After attention over ranks of the group, first one all-gather of some
    integers over these ranks.

    Example: see :func:`global_loss`.
    """
    _, group = axis_and_group("global_token_count", mesh, ordered=False)
    note_loss(group)
    end_forwards(group)
    with collective(group, "global_token_count", ValueError):
        counted = (
            labels != ignore_index if holds(labels.dtype, ignore_index) else torch.ones_like(labels, dtype=torch.bool)
        )
        numbers = torch.stack((counted.sum(), (counted & (labels < 0)).sum()))
        dist.all_reduce(numbers, group=group)
        count, negative = numbers
        _raise_if_any(
            negative,
            group,
            "global_token_count",
            f"there are labels below 0 that are not ignore_index={ignore_index}, and they would "
            "count as classes: give global_token_count the ignore_index of the labels, or replace them "
            f"(labels.masked_fill(labels < 0, {ignore_index}))",
        )
        return count * (negative == 0)


def chunked_token_losses(
    hidden_BLD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_BL: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    token_weights_BL: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int = 1024,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """The sum of the losses of this rank's tokens, for :func:`global_loss`, from hidden states before the last layer.

    The logits of all tokens never exist at once: chunks of tokens are projected and reduced in turn, and again in the
    backward (one more product of hidden states and weight). With :func:`global_loss` the result equals the result of
    the whole sequence on one device, for any split. On a rank without tokens the sum is 0, and its backward runs as on
    the remaining ranks.

    Args:
        hidden_BLD: hidden states of this rank's tokens; any number of dims before the last.
        weight_VD: the weight of the last layer, an nn.Linear. Its gradient is this rank's share.
        labels_BL: this rank's labels, made for the whole sequence and then split.
        bias_V: the bias of the last layer.
        token_weights_BL: a factor for the loss of each token, for example to weight documents. Then divide by the sum
            of the weights instead of the number of tokens.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: the factor of ``logsumexp(logits) ** 2``, which is added to the loss of each token that has a label.
        chunk_tokens: tokens in a chunk. Memory: some tensors [chunk_tokens, V], in the dtype of the logits.
        ignore_index: the label of a token without a target.

    Returns:
        0-dim, in float32 or wider. No communication.

    Raises:
        ValueError: labels or weights that do not have the shape of the tokens.

    Example::

        losses = chunked_token_losses(hidden, head.weight, labels)  # in place of cross_entropy(head(hidden), ...)
        loss = global_loss(losses, global_token_count(labels, mesh), mesh)
    """
    tokens = hidden_BLD.shape[:-1]
    for name, x in (("labels_BL", labels_BL), ("token_weights_BL", token_weights_BL)):
        if x is not None and x.shape != tokens:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} for hidden states of {tuple(hidden_BLD.shape)}: give one for "
                "each of this rank's tokens (labels are made for the whole sequence and then split)"
            )

    def chunk_loss(hidden_CD: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor | None) -> torch.Tensor:
        logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        losses_C = F.cross_entropy(
            logits_CV, labels_C, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        if z_loss:
            losses_C = losses_C + z_loss * logits_CV.logsumexp(-1).square().where(labels_C != ignore_index, 0.0)
        return (losses_C if weights_C is None else losses_C * weights_C).sum()

    flat, labels = hidden_BLD.flatten(0, -2), labels_BL.flatten()
    weights = None if token_weights_BL is None else token_weights_BL.flatten()
    total = None
    for start in range(0, max(1, flat.shape[0]), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        inputs = flat[part], labels[part], None if weights is None else weights[part]
        loss = checkpoint(chunk_loss, *inputs, use_reentrant=False, preserve_rng_state=False)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def global_loss(
    token_losses: torch.Tensor, token_count: torch.Tensor | int, mesh: MeshOrGroup, *, averaged_over: int | None = None
) -> torch.Tensor:
    """The mean loss over all tokens of all ranks, as on one device. Ranks may hold different numbers of tokens.

    Every rank gets the global value. The gradient is this rank's share: the gradients *summed* over these ranks
    (:func:`sum_gradients`) equal the gradients on one device. (A mean of the ranks' means would weight tokens
    differently.)

    Args:
        token_losses: this rank's losses, as a sum or one for each token (``reduction="sum"`` or ``"none"``), with zeros
            for ignored tokens; any shape. A DTensor must be replicated.
        token_count: from :func:`global_token_count`: one number, equal on all ranks. 0 gives nan, as on one device.
        mesh: the ranks that share the tokens. It may be a flattened mesh of data and context parallel ranks.
        averaged_over: the number by which the reducer of gradients divides. The gradient (not the value) is multiplied
            by it, so that averaging gives the sum. 1 for :func:`sum_gradients`, which does not divide; the number of
            ranks for FSDP2 and DDP, see the top of this file. None: 1, but an error if FSDP2 or DDP averages the
            gradients of a model with a style over these ranks.

    Returns:
        0-dim, in the dtype of ``token_losses``, in float32 or wider.

    Communication: forward one all-reduce of 3 P + 1 numbers in float64, with P ranks; and the all-gather of
    :func:`global_token_count`. Backward none.

    Raises:
        ValueError: on every rank, if ranks differ in ``token_count`` or ``averaged_over``. On a GPU the host waits for
            this check only in the first call over the group. In later calls the loss and its gradient become nan.
            Also if a DTensor is not replicated, if ``token_count`` has several numbers, or if ``averaged_over`` is
            below 1, missing, or neither 1 nor the number of these ranks over which FSDP2 or DDP averages, nor a
            multiple of it, for gradients that your program averages over further ranks of them. (Reducers are
            searched in the calls number 1, 2, 4, 8, ....)
        UnreducedGradientsError: on every rank, if the loss is over more ranks than the attention of a model with a
            style, such as data-parallel ones, and its parameters were equal on them, and are not any more: gradients
            were not summed over all of them. The calls number 1, 2, 4, 8, ... of a model compare, at the cost of
            :class:`~cp_styles.Checks`. Parameters in ``Checks(local=...)`` are left out.

    Example::

        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = global_loss(losses, global_token_count(labels, mesh), mesh)
        loss.backward()
        sum_gradients(model, mesh)
    """
    if averaged_over is not None and averaged_over < 1:
        raise ValueError(f"averaged_over must be a number of ranks (1 where gradients are summed), got {averaged_over}")
    if isinstance(token_losses, DTensor):
        if any(placement != Replicate() for placement in token_losses.placements):
            raise ValueError(
                f"token_losses have the placements {token_losses.placements}: redistribute them to Replicate() first, "
                "otherwise the sum would be wrong"
            )
        token_losses = token_losses.to_local()
    _, group = axis_and_group("global_loss", mesh, ordered=False)
    if isinstance(token_count, torch.Tensor) and token_count.numel() != 1:
        raise ValueError(
            f"global_loss: token_count of shape {tuple(token_count.shape)} is not one number: it is the number of "
            "tokens of all ranks together, from global_token_count"
        )
    note_loss(group, token_count)
    compared = _refuse_other_average(group, averaged_over)
    averaged_over = averaged_over or 1
    end_forwards(group)
    with collective(group, "global_loss", ValueError):
        total = token_losses.sum(dtype=torch.promote_types(token_losses.dtype, torch.float32))
        summed = _SumOverGroup.apply(total, token_count, group, averaged_over, compared)
        compared.refuse_diverged(group)
        return summed / token_count


def note_loss(group: dist.ProcessGroup, token_count: torch.Tensor | float | None = None) -> None:
    """Count a loss over ``group``; without ``token_count`` what a user may compute a loss from, as a gather."""
    state_of(group).get_or_create(Losses).number += 1
    notes: StepNotes | None = state_of(world_group()).objects.get(StepNotes)
    if notes is not None:
        count = None if token_count is None else float(token_count)
        notes.losses.append((dist.get_process_group_ranks(group), count))


class StepNotes:
    """Notes for :func:`cp_styles.verify.verify` on this rank's part of the step with all ranks."""

    def __init__(self) -> None:
        self.labels: list[int] = []  # of each batch that is cut, how many of this rank's tokens have a label
        self.losses: list[tuple[list[int], float | None]] = []  # the ranks and the token_count of each note_loss()


@dataclass(eq=False)
class Losses:
    """The losses over a group."""

    number: int = 0  # includes token counts and gathers, from which a user may compute a loss
    checked: set[str] = field(default_factory=set)  # functions whose check a host has read from a device
    # By the proof of a model: names of parameters that were found equal on the ranks.
    equal: WeakKeyDictionary[Any, set[str]] = field(default_factory=WeakKeyDictionary)


@dataclass(eq=False)
class _ComparedModels:
    """The models of a loss whose parameters are compared over its ranks, with the numbers of all ranks for them."""

    # The numbers travel with the loss, and 0 says that nothing is compared, so ranks need not agree on it before.

    models: list[tuple[Any, dict[str, Replica]]] = field(default_factory=list)
    by_rank: torch.Tensor | None = None

    @cached_property
    def number(self) -> int:
        """See :func:`~cp_styles.replicas.replica_number`."""
        return replica_number([replicas for _, replicas in self.models])

    def refuse_diverged(self, group: dist.ProcessGroup) -> None:
        """Raise on every rank if parameters were equal on all ranks of ``group``, and are not any more."""
        if not self.number or self.by_rank is None:
            return
        numbers, known = [int(number) for number in self.by_rank.tolist()], state_of(group).get_or_create(Losses).equal
        if 0 in numbers or len({number >> 32 for number in numbers}) > 1:
            return
        for proof, replicas in self.models:
            differences = dict[str, Difference]()
            if len(set(numbers)) > 1:
                differences = find_differences(replicas, group, proof.losses, known.get(proof, ()))
            beyond = {name: each for name, each in differences.items() if each.beyond_rounding}
            known.setdefault(proof, set()).update(replicas.keys() - beyond.keys())
            diverged = [name for name, each in beyond.items() if each.equal_before]
            if diverged:
                first = f"{', '.join(diverged[:4])}{', ...' if len(diverged) > 4 else ''}"
                parties = _and(beyond[diverged[0]].parties)
                raise UnreducedGradientsError(
                    f"global_loss over ranks {sorted(dist.get_process_group_ranks(group))}: these ranks hold different "
                    f"parameters: {len(diverged)} of the {len(replicas)} that were compared, {first}, which were equal "
                    f"before (now equal on {parties}). Sum gradients over all ranks of the loss: "
                    "sum_gradients, FSDP2 or DDP over its mesh. Name parameters that are meant to differ, such as "
                    f"experts, in checks=Checks(local=[experts]){see('Parameters that differ')}"
                )


def _and(parties: list[list[int]]) -> str:
    return " and ".join(map(str, parties[:4])) + (" and ..." if len(parties) > 4 else "")


def end_forwards(caller: dist.ProcessGroup) -> None:
    """Meet the ranks of every group over which attention has run since the last meeting: see :func:`forwards_here`.

    For functions that communicate over ``caller``: all its ranks must call them. Ranks at their next attention raise
    then, instead of waiting. Communication: one all-gather of a row over each such group.
    """
    callers = set(dist.get_process_group_ranks(caller))
    attends = bool(state_of(caller).get_or_create(Forwards).lengths)
    for group, forwards in forwards_here(caller):
        if not forwards.lengths or group_now(group) is not group:
            continue
        # Ranks may have attended over other groups since. So they always meet over ``caller`` if they have ever
        # attended over it, else over the groups inside of it: these facts are equal on all ranks of a group. But not
        # over groups whose losses are over others, as of a training that was in this thread before.
        always = group is caller if attends else callers.issuperset(dist.get_process_group_ranks(group))
        always = always and (group is caller or not forwards.loss_groups or caller.group_name in forwards.loss_groups)
        if forwards.open or always:
            forwards.open = False
            forwards.loss_groups.add(caller.group_name)
            operations = state_of(group).operations
            start_status(StatusRow, Meeting.FORWARDS, operations.user, operations.axis, group)()


def forwards_here(caller: dist.ProcessGroup) -> Iterator[tuple[dist.ProcessGroup, Forwards]]:
    """The groups of this rank whose forwards a function over ``caller`` may end, and these: without groups that are the
    business of another thread, which may communicate over them now.

    A group is this thread's business if its latest forward was, or if losses of its sequence are over ``caller``. If no
    group inside of ``caller`` is, the only one there is: then the forward has run in another thread than this function.
    """
    mine, others = list[tuple[dist.ProcessGroup, Forwards]](), list[tuple[dist.ProcessGroup, Forwards]]()
    callers, of_caller = set(dist.get_process_group_ranks(caller)), state_of(caller).get_or_create(Forwards)
    known = bool(of_caller.lengths or of_caller.modules)  # a sequence is split over the caller's ranks
    for group, forwards in all_forwards():
        # A group without a forward may get its first one, of another thread, while the caller meets the ranks of a
        # group before it. So it is no business of this thread now.
        if forwards.thread == 0 and group is not caller:
            continue
        inside, losses = callers.issuperset(dist.get_process_group_ranks(group)), forwards.loss_groups
        if group is caller or forwards.thread == threading.get_ident() or caller.group_name in losses:
            mine.append((group, forwards))
            known = known or (inside and (caller.group_name in losses if losses else forwards.thread != 0))
        elif inside and not losses and group_now(group) is group:
            others.append((group, forwards))
    yield from mine if known or len(others) != 1 else [*mine, *others]


def all_forwards() -> Iterator[tuple[dist.ProcessGroup, Forwards]]:
    """The groups of this rank that were not destroyed, and the forwards over them."""
    for group, state in states():
        if is_of_this_world(group):
            yield group, state.get_or_create(Forwards)


class MeanByHand(NamedTuple):
    """The ``averaged_over`` of a loss, and the reducer that averages over fewer ranks: the program does the rest."""

    averaged_over: int
    reducer: str
    over: int


def _refuse_other_average(group: dist.ProcessGroup, averaged_over: int | None) -> _ComparedModels:
    """Raise unless ``averaged_over`` fits the number of ranks of ``group`` over which gradients are averaged. Returns
    the models whose parameters are compared now."""
    ranks = set(dist.get_process_group_ranks(group))
    averaging: list[Average] = []
    compared, models = _ComparedModels(), []
    divided = False  # by a number of the user
    for other, forwards in forwards_here(group):
        if forwards.training and ranks.issuperset(dist.get_process_group_ranks(other)):
            for proof in forwards.training:
                proof.losses += 1
                if proof.by_hand is not None and proof.by_hand.averaged_over != averaged_over:
                    proof.by_hand = None
                model = proof.model()
                if model is None or proof.losses & (proof.losses - 1):  # not a power of 2
                    continue
                if len(ranks) > other.size() and not captures_graph():
                    compared.models.append((proof, replicas_of(model, ranks, other)))
                models.append(proof)
                if averaged_over != 1:
                    averaging.append(find_average(model, proof.reducer and proof.reducer(), ranks))
                    sharded = [x for x in model.modules() if isinstance(x, FSDPModule)]
                    divided |= any(map(replaces_mean_of_fsdp, sharded))
            forwards.training.clear()
    reducer, over, _ = max(averaging, key=attrgetter("ranks"), default=Average("", 0, set()))
    fits = over <= 1 or averaged_over in (1, *(each.ranks for each in averaging))
    # A program may average over the remaining ranks by itself. If it does nothing, its parameters diverge.
    by_hand = not fits and averaged_over is not None and not averaged_over % over and averaged_over <= len(ranks)
    for proof in models:
        proof.by_hand = MeanByHand(averaged_over, reducer, over) if by_hand and averaged_over is not None else None
    if fits or by_hand:
        return compared
    if averaged_over is None:
        raise ValueError(
            f"global_loss over ranks {sorted(ranks)}: {reducer} averages gradients over {over} of them, which would be "
            f"{over} times too small. Give averaged_over={over} to global_loss, or to BatchSharder. If it sums them "
            f"(set_gradient_divide_factor(1.0)), give averaged_over=1{see('Gradients that are averaged')}"
        )
    if divided:
        return compared
    raise ValueError(
        f"global_loss over ranks {sorted(ranks)}: averaged_over={averaged_over}, and {reducer} averages gradients over "
        f"{over} of these ranks. With data parallelism too, the loss and the reducer take both axes, "
        f"both = mesh['dp', 'cp']._flatten('dp_cp'): BatchSharder(mesh['cp'], loss_mesh=both, "
        f"averaged_over=both.size()){see('Gradients that are averaged')}"
    )


class Average(NamedTuple):
    reducer: str  # "FSDP2", or the class of the DDP module
    ranks: int  # the number of ranks of a sequence over which it averages gradients
    parameters: set[int]  # the ids of the parameters


def find_average(model: nn.Module, ddp: nn.Module | None, ranks: set[int]) -> Average:
    """The reducer that averages gradients of ``model`` over most of ``ranks``. ``ddp`` is the DDP module around it."""
    averaging = [Average("", 0, set())]
    if isinstance(ddp, DistributedDataParallel):
        both = ranks.intersection(dist.get_process_group_ranks(ddp.process_group))
        reduced = {id(x) for name, x in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
        averaging.append(Average(type(ddp).__name__, len(both), reduced))
    reduced = set[int]()
    for module in model.modules():
        if isinstance(module, FSDPModule) and any(map(_NEEDS_GRAD, module.parameters())):
            over = max([_count_common_ranks(mesh, ranks) for mesh in meshes_of_fsdp(module)], default=0)
            reduced |= set(map(id, module.parameters())) if over > 1 else set()
            averaging.append(Average("FSDP2", over, reduced))
    return max(averaging, key=attrgetter("ranks"))


_NEEDS_GRAD = attrgetter("requires_grad")


def _count_common_ranks(mesh: DeviceMesh, ranks: set[int]) -> int:
    """The number of ``ranks`` on the axes of ``mesh`` through this rank."""
    groups = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    return math.prod(max(1, len(ranks.intersection(group))) for group in groups)


class _SumOverGroup(torch.autograd.Function):
    """forward: all-reduce of the ranks' shares. backward: the scaled gradient, without communication."""

    # The sum is one loss, although every rank calls backward on it: its gradient must not be summed over the ranks.

    @staticmethod
    def forward(
        ctx, share, token_count, group: dist.ProcessGroup, averaged_over: int, compared: _ComparedModels
    ) -> torch.Tensor:
        # In float64 on all ranks, because dtypes of losses may differ: a rank without tokens may create a zero itself.
        # Each rank writes the two numbers that must be equal, and the number of its parameters, into its own elements.
        numbers = share.new_zeros(1 + 3 * group.size(), dtype=torch.float64)
        numbers[0] = share
        by_rank, of_parameters = numbers[1:].view(3, -1).split((2, 1))
        of_parameters[:, group.rank()] = compared.number
        for element, value in zip(by_rank[:, group.rank()], (token_count, averaged_over), strict=True):
            if isinstance(value, torch.Tensor):
                element.copy_(value.detach().reshape(()), non_blocking=True)
            else:
                element.fill_(value)
        dist.all_reduce(numbers, group=group)
        compared.by_rank = of_parameters[0].detach()
        differ = (by_rank != by_rank[:, :1]).any()
        _raise_if_any(
            differ,
            group,
            "global_loss",
            f"the ranks of {sorted(dist.get_process_group_ranks(group))} divide by different numbers: "
            f"token_count or averaged_over differs (here averaged_over={averaged_over}). The count is of all "
            "ranks together, global_token_count(labels, group), over the same group",
        )
        ctx.factor = torch.where(differ, torch.nan, float(averaged_over))
        return numbers[0].where(~differ, torch.nan).to(share.dtype)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return grads[0] * ctx.factor.to(grads[0].dtype), None, None, None, None


def _raise_if_any(problem: torch.Tensor, group: dist.ProcessGroup, function: str, text: str) -> None:
    """Raise ValueError if ``problem``, equal on all ranks, is not 0. On a GPU the host waits for it only in the first
    call of a function over the group: in later calls, the caller makes its result nan or infinite instead."""
    checked = state_of(group).get_or_create(Losses).checked
    if problem.device.type != "cpu":
        if function in checked or captures_graph():
            return
        checked.add(function)
    if any(on_host([problem])):
        raise ValueError(f"{function}: {text}")


@torch.no_grad()
def sum_gradients(
    parameters: nn.Module | Iterable[torch.Tensor],
    mesh: MeshOrGroup,
    *,
    bucket_bytes: int = 25 * 2**20,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Sum ``.grad`` over the ranks of ``mesh``, in place. Call it once after the last backward of a step.

    Under context parallelism each rank has the gradients of its own tokens. The sums are the gradients of the whole
    sequence. Do not call it for parameters that FSDP2 or DDP already reduce over the same ranks.

    A parameter that has a gradient on any rank gets a gradient on all ranks. A parameter without a gradient on all
    ranks keeps None. For a DTensor parameter the local tensors are summed. If the placements of a gradient differ from
    the placements of its parameter, the gradient is first redistributed. (torch leaves the gradients of
    SequenceParallel norms as partial sums.)

    Args:
        parameters: a module, or its parameters, in the same order on every rank. Frozen parameters are skipped.
        mesh: the cp ranks: a 1-D mesh, (mesh, axis name), or a process group.
        bucket_bytes: size of a bucket. Gradients of one dtype are sent together in buckets; a larger gradient alone.
            The extra memory is one bucket in ``reduce_dtype``: twice the bytes for bfloat16 summed in float32.
        reduce_dtype: the dtype in which gradients are sent and summed. None: float32 or wider, for gradients of any
            dtype; gradients of bfloat16 parameters are then rounded once. ``torch.bfloat16`` halves the bytes.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), one all-reduce for each bucket, and one
    of a byte for each parameter if ranks have gradients of different parameters. If gradients after a gather are
    compared, one all-reduce of 16 bytes for each parameter.

    Raises:
        ValueError: on every rank, if ranks do not have the same parameters, differ in ``bucket_bytes`` or
            ``reduce_dtype``, or if gradients are already reduced over these ranks. The reducer may be DTensor
            (parameters on a mesh over these ranks), this function, the backward of
            :func:`~cp_styles.collectives.split`, or DDP around a model with a style or in a block. Sums by this
            function and by split are found only if nothing but a backward has changed the gradient since. DDP around
            models that call functions such as ``context_attention`` is found by :func:`~cp_styles.verify.verify` only.
            In the steps number 1, 2, 4, ... with the backward of a :func:`~cp_styles.collectives.gather` with
            ``reduce_gradients=False``, all gradients are compared: after such a gather they are already whole.
        NotImplementedError: on every rank, for sparse gradients.
        TransferError: a rank has ended, or has left this function before its end. The gradients are then None.

    Example: see :func:`global_loss`.
    """
    axis, group = axis_and_group("sum_gradients", mesh, ordered=False)

    def check() -> list[torch.Tensor]:
        listed = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        trained = [parameter for parameter in dict.fromkeys(listed) if parameter.requires_grad]
        _refuse_other_reducers(trained, group)
        _refuse_reduced(trained, group)
        return trained

    summed = _agree_on_gradients(check, axis, group, (bucket_bytes, str(reduce_dtype)))
    earlier = [summed_over(parameter) for parameter in summed]
    try:
        with Operation(group):
            gradients = [_local_gradient(parameter) for parameter in summed]
            for bucket in _buckets(gradients, bucket_bytes):
                _sum_bucket(bucket, group, reduce_dtype or torch.promote_types(bucket[0].dtype, torch.float32))
            for parameter, before in zip(summed, earlier, strict=True):
                note_summed(parameter, *before, Summed(tuple(dist.get_process_group_ranks(group)), "this function"))
                _keep_note_of_later_sums(parameter)
    except BaseException:
        for parameter in summed:  # a part of them is summed: an optimizer must not use these gradients
            parameter.grad = None
        raise


def _refuse_other_reducers(parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    proofs = [proof for _, forwards in all_forwards() for proof in forwards.trained]
    reducers = [proof.reducer() for proof in proofs if proof.reducer is not None and proof.reduces]
    ranks, ids = set(dist.get_process_group_ranks(group)), set(map(id, parameters))
    for proof in proofs:
        model = proof.model()
        means: MeanByHand | None = proof.by_hand
        if means is not None and model is not None and not ids.isdisjoint(id(x) for _, x in named_parameters(model)):
            raise ValueError(
                f"sum_gradients over ranks {sorted(ranks)}: global_loss had averaged_over={means.averaged_over}, and "
                f"{means.reducer} averages over {means.over} of its ranks. A program that averages gradients over the "
                "remaining ranks gives this number, and a sum makes them too large: give "
                f"averaged_over={means.over}{see('Gradients that are averaged')}"
            )
    if not reducers:
        return
    for model in [proof.model() for proof in proofs if not proof.reduces]:  # later, the model ran without DDP
        ids.difference_update(map(id, model.parameters() if model is not None else ()))
    for ddp in filter(None, reducers):
        reduced = dist.get_process_group_ranks(ddp.process_group)
        both = sorted(ranks.intersection(reduced))
        names = {name for name, parameter in ddp.module.named_parameters() if id(parameter) in ids}
        if len(both) > 1 and not names <= ddp.parameters_to_ignore:
            raise ValueError(
                f"sum_gradients over ranks {sorted(ranks)}: {type(ddp).__name__} averages the gradients of these "
                f"parameters over {both} in the backward. Do not call sum_gradients. Call global_loss with "
                f"averaged_over={len(reduced)}, but not for a BackboneContextParallel"
                f"{see('Gradients that are summed twice')}"
            )


def _refuse_reduced(parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    ranks = set(dist.get_process_group_ranks(group))
    for mesh in {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}:
        if shares_ranks(mesh, group):
            raise ValueError(
                f"sum_gradients over ranks {sorted(ranks)}: a DTensor parameter is on {mesh}, which has several of "
                "these ranks, so its gradient is already reduced over them: leave such parameters out"
            )
    for parameter in parameters:
        for note in summed_over(parameter):
            if len(ranks.intersection(note.ranks)) > 1:
                raise ValueError(
                    f"sum_gradients over ranks {sorted(ranks)}: the gradient of a parameter of shape "
                    f"{tuple(parameter.shape)} is already summed over some of them, by {note.by}. A second sum would "
                    "multiply it by the number of ranks. Sum once, after the last backward of a step, and call "
                    "zero_grad() before the next one. Leave out parameters in front of a collectives.split"
                    f"{see('Gradients that are summed twice')}"
                )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotImplementedError(
                f"sum_gradients: the gradient of a parameter of shape {tuple(parameter.shape)} is sparse "
                f"({parameter.grad.layout}), and only dense ones are summed: make the layer without sparse=True, or "
                "set parameter.grad = parameter.grad.to_dense() before"
            )


class ReplicatedGathers:
    """The backwards, since the last step, of gathers over a group whose gradient is not reduced.

    Attributes:
        compared: the next :func:`sum_gradients` compares gradients.
        in_front: the ids of the leaves before these gathers.
        summed: gradients were summed, so the next backward begins a step.
    """

    # All ranks compute the same after such a gather: a gradient that is equal on all ranks is whole, and a sum would be
    # P times too large. Parameters before the gather are left out: for simple losses, such as a sum, the ranks' shares
    # may be equal.

    def __init__(self) -> None:
        self.compared, self.in_front, self.summed = False, set[int](), True
        self._steps = self._backwards = 0

    def note(self, leaves: Callable[[], Iterable[torch.Tensor] | None]) -> None:
        """Note one backward. ``leaves`` returns the leaves before the gather, or None if they are not known."""
        if self.summed:
            self._steps += 1
            self._backwards = 0
            self.compared, self.summed = not self._steps & (self._steps - 1), False
            self.in_front.clear()
        self._backwards += 1
        if self.compared:
            # A limit, because some programs never call sum_gradients.
            found = leaves() if self._backwards < _MOST_BACKWARDS else None
            self.compared = found is not None
            self.in_front.update(map(id, found or ()))


_MOST_BACKWARDS = 256


def _refuse_equal_gradients(parameters: list[torch.Tensor], in_front: set[int], group: dist.ProcessGroup) -> None:
    sums = torch.zeros(2, len(parameters), dtype=torch.int64, device=parameters[0].device)
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None and id(parameter) not in in_front:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            valid = (gradient != 0).any() & gradient.isfinite().all()
            sums[:, index] = device_checksum(gradient) // 2 * valid  # halved, so that its negative is an int64 too
    sums[1].neg_()
    with collective(group, "sum_gradients"):
        dist.all_reduce(sums, op=dist.ReduceOp.MAX, group=group)
    whole = [p for p, most, least in zip(parameters, *sums.tolist(), strict=True) if most == -least != 0]
    if whole:
        raise ValueError(
            f"sum_gradients: the gradients of {len(whole)} parameters, of shapes {[tuple(p.shape) for p in whole[:4]]}"
            ", are the same on all ranks: behind a gather with reduce_gradients=False each rank computes the whole "
            f"gradient, which is not summed. Gather with reduce_gradients=True, and divide the loss by {group.size()} "
            "ranks before its backward. A head behind a BackboneContextParallel belongs into the model with the style"
            f"{see('Gradients behind a gather')}"
        )


class Summed(NamedTuple):
    ranks: tuple[int, ...]  # the ranks over which a gradient was summed
    by: str  # the function that summed it, for messages


def summed_over(parameter: torch.Tensor) -> tuple[Summed, ...]:
    """The valid notes on the gradient of ``parameter``."""
    # A note is valid until the gradient changes. If a backward has added to the gradient, it stays valid.
    if parameter.grad is None:
        return ()
    version, notes = facts_about(parameter.grad).get(Summed, (None, ()))
    return notes if version in (None, parameter.grad._version) else ()


def note_summed(parameter: torch.Tensor, *notes: Summed) -> None:
    """Replace the notes on the gradient of ``parameter``."""
    assert parameter.grad is not None
    facts_about(parameter.grad)[Summed] = parameter.grad._version, notes


def _keep_note_of_later_sums(parameter: torch.Tensor) -> None:
    weak = ref(parameter)

    def keep(_: torch.Tensor) -> None:
        handle.remove()
        summed = weak()
        if summed is not None and (notes := summed_over(summed)):
            facts_about(summed.grad)[Summed] = None, notes

    handle = parameter.register_hook(keep)  # runs before the next backward adds to the gradient


def _agree_on_gradients(
    check: Callable[[], list[torch.Tensor]], axis: str, group: dist.ProcessGroup, options: tuple[int, str]
) -> list[torch.Tensor]:
    """The parameters with a gradient on any rank, equal on every rank. ``options``: bucket_bytes and reduce_dtype."""
    parameters: list[torch.Tensor] = []
    present = b""

    def describe() -> tuple[dict[str, Any], StatusRow]:
        nonlocal parameters, present
        parameters = check()
        present = bytes(parameter.grad is not None for parameter in parameters)
        shapes = [tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape) for p in parameters]
        dtypes = [str((p if p.grad is None else p.grad).dtype) for p in parameters]
        facts = {
            "the number of parameters that require grad": len(parameters),
            "their shapes, and dtypes of gradients": (shapes, dtypes),
            "bucket_bytes": options[0],
            "reduce_dtype": options[1],
        }
        return facts, StatusRow(q_length=zlib.crc32(present), numbers=(gathers.compared, 0))

    gathers = state_of(group).get_or_create(ReplicatedGathers)
    rows = agree_on_facts(describe, Meeting.GRADIENTS, ("sum_gradients", axis, group))
    gathers.summed = True
    if parameters and all(rows.columns.numbers[0]):
        _refuse_equal_gradients(parameters, gathers.in_front, group)
    if len(set(rows.columns.q_length)) > 1:
        device = parameters[0].device if parameters else torch.device("cpu")
        with collective(group, "sum_gradients"):
            anywhere = torch.tensor(list(present), dtype=torch.uint8, device=device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        present = bytes(anywhere.tolist())
    return [parameter for parameter, has in zip(parameters, present, strict=True) if has]


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        if 0 in parameter.grad.stride():  # expanded: elements share memory, so it cannot be summed in place
            parameter.grad = parameter.grad.contiguous()
        return parameter.grad
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad.to_local()


def _buckets(gradients: list[torch.Tensor], most_bytes: int) -> Iterator[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for same_kind in kinds.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for gradient in same_kind:
            if bucket and size + gradient.nbytes > most_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        yield bucket


def _sum_bucket(gradients: list[torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients), dtype=dtype)
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        piece.view(gradient.shape).copy_(gradient)
    with collective(group, "sum_gradients"):
        dist.all_reduce(flat, group=group)
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view(gradient.shape))


def _broadcast_ids(document_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    try:
        return document_ids.expand_as(tokens)
    except RuntimeError:
        raise ValueError(
            f"document_ids of shape {tuple(document_ids.shape)} do not broadcast to tokens {tuple(tokens.shape)}: "
            "give one id for each token, or one for each position if all rows share them"
        ) from None


def _index_along(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * tensor.ndim
    shape[dim] = -1
    return torch.arange(tensor.shape[dim], device=tensor.device).view(shape).expand_as(tensor)


def _document_starts(document_ids: torch.Tensor, seq_dim: int) -> torch.Tensor:
    """The position at which the document of each token begins: int64."""
    index = _index_along(document_ids, seq_dim)
    if document_ids.shape[seq_dim] < 2:
        return index
    begins = document_ids.diff(dim=seq_dim) != 0
    starts = torch.zeros_like(index)
    starts.narrow(seq_dim, 1, begins.shape[seq_dim]).copy_(index.narrow(seq_dim, 1, begins.shape[seq_dim]) * begins)
    return starts.cummax(seq_dim).values
