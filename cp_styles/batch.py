"""Batches under context parallelism: labels, positions, shards, and the loss and gradients of the whole sequence.

Everything here takes and gives plain tensors, and none of it knows about attention. A training step::

    labels = next_token_labels(tokens, document_ids=ids)         # of the whole sequence, before it is cut
    mine = shard_batch({"tokens": tokens, "labels": labels}, layout, rank, seq_dims={"tokens": 1, "labels": 1})
    logits = model(mine["tokens"], layout.positions(rank))
    losses = cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum")
    loss = global_loss(losses, global_token_count(mine["labels"], cp), cp)
    loss.backward()
    sum_gradients(model, cp)

``cp`` is the process group, or the 1-D mesh, over which the sequence is cut, and ``rank`` the rank in it.

Who sums the gradients? Every rank's backward gives its own share, and exactly one reducer must add them up. Where
sequences differ over a data-parallel axis too, the tokens are counted and the loss and gradients summed over both:
``both = mesh["dp", "cp"]._flatten("dp_cp")`` takes the place of ``cp`` in the last three lines above, and below.

- nobody else: ``sum_gradients(model, cp)``, as above;
- FSDP2: ``fully_shard(..., mesh=cp)`` of each layer and the model, ``global_loss(..., cp, averaged_over=cp.size())``;
- HSDP: ``fully_shard(..., mesh=mesh["dp", "cp"])``, ``global_loss(..., both, averaged_over=both.size())``;
- DDP: ``DistributedDataParallel(model, process_group=cp.get_group())``, ``averaged_over=cp.size()``;
- FSDP2 over dp alone: ``global_loss(..., both, averaged_over=mesh["dp"].size())``, then ``sum_gradients(model, cp)``.

FSDP2 and DDP divide by the number of ranks they reduce over, and ``averaged_over`` multiplies by it beforehand, so that
ranks may hold any number of tokens. (``FSDPModule.set_gradient_divide_factor(1.0)`` in place of it says the same, where
the backend can: gloo cannot in float32.) An accumulation of micro-batches changes nothing: give every
:func:`global_loss` the count of all of them, and sum (or let FSDP2 and DDP synchronize) after the last.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from cp_styles.comm.agreement import Meeting, StatusRow, end_forwards, exchange_status, fingerprint
from cp_styles.comm.point_to_point import shares_ranks
from cp_styles.layout import SequenceLayout

Group: TypeAlias = dist.ProcessGroup | DeviceMesh
"""The ranks that share a sequence: a process group or a 1-D mesh, ``mesh["cp"]``."""

IGNORE_INDEX = -100
"""The label of a token that is not predicted: the default of ``torch.nn.functional.cross_entropy``."""


def next_token_labels(
    tokens: torch.Tensor,
    *,
    document_ids: torch.Tensor | None = None,
    shift: int = 1,
    seq_dim: int = -1,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """For every token of the *whole* sequence, the token ``shift`` places on; cut it afterwards, with the tokens.

    Labels rolled after the cut are wrong at every shard boundary: the next token is on another rank.

    Args:
        tokens: integers, with the whole sequence along ``seq_dim``.
        document_ids: integers that broadcast to ``tokens``; a run of equal ones along ``seq_dim`` is a document.
            None: the sequence is one document. From lengths:
            ``torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))``.
        shift: how far ahead; 1 for next-token prediction, 2 and more for multi-token prediction.
        seq_dim: the dim of ``tokens`` that is the sequence.
        ignore_index: stands wherever the document or the sequence ends before the label.

    Returns:
        Labels in the shape of ``tokens``. No communication.

    Raises:
        ValueError: ``shift`` below 1, or ``document_ids`` that do not broadcast to ``tokens``.
    """
    if shift < 1:
        raise ValueError(f"shift says how many tokens ahead the label is and must be at least 1, got {shift}")
    labels = torch.full_like(tokens, ignore_index)
    kept = tokens.shape[seq_dim] - shift
    if kept <= 0:
        return labels
    ahead = tokens.narrow(seq_dim, shift, kept)
    if document_ids is not None:
        starts = _document_starts(_broadcast(document_ids, tokens), seq_dim)
        same = starts.narrow(seq_dim, shift, kept) == starts.narrow(seq_dim, 0, kept)
        ahead = ahead.where(same, ignore_index)
    labels.narrow(seq_dim, 0, kept).copy_(ahead)
    return labels


def document_positions(document_ids: torch.Tensor, *, seq_dim: int = -1) -> torch.Tensor:
    """Positions that start again at 0 in every document, for the *whole* sequence; cut them with the tokens.

    For positions that run through the whole sequence, ``layout.positions(rank)`` is all it takes.

    Args:
        document_ids: integers; a run of equal ones along ``seq_dim`` is a document.

    Returns:
        int64, in the shape of ``document_ids``. No communication.
    """
    return _index_along(document_ids, seq_dim) - _document_starts(document_ids, seq_dim)


def shard_batch(
    batch: Mapping[str, torch.Tensor], layout: SequenceLayout, rank: int, *, seq_dims: Mapping[str, int | None]
) -> dict[str, torch.Tensor]:
    """What ``rank`` holds of every entry of a batch.

    Args:
        batch: whole tensors by name.
        layout: the cut; the attention must be given the same.
        rank: the rank within the cp group.
        seq_dims: for every entry of ``batch`` the dim that is the sequence, or None for an entry that every rank needs
            whole. Nothing is guessed: position ids of shape [3, B, S] have their sequence at 2, and a batch as long as
            its sequence has two dims that look alike. Names that ``batch`` lacks are passed over.

    Returns:
        The same names, each tensor with ``layout.lengths[rank]`` in place of the whole length. No communication.

    Raises:
        ValueError: an entry without a dim in ``seq_dims``, or one whose dim is not as long as the layout.
    """
    unnamed = [name for name in batch if name not in seq_dims]
    if unnamed:
        raise ValueError(
            f"seq_dims does not say which dim of {unnamed} is the sequence: "
            "name it, or None for an entry that every rank needs whole"
        )
    mine = {}
    for name, whole in batch.items():
        dim = seq_dims[name]
        if dim is None:
            mine[name] = whole
            continue
        if not -whole.ndim <= dim < whole.ndim or whole.shape[dim] != layout.length:
            raise ValueError(
                f'"{name}" of shape {tuple(whole.shape)} is not {layout.length} long at dim {dim}, where the layout '
                f'cuts: correct seq_dims["{name}"], or build the layout for this length'
            )
        mine[name] = layout.shard(whole, dim, rank)
    return mine


def global_token_count(labels: torch.Tensor, group: Group, *, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """How many tokens of all ranks have a label: int64, 0-dim, the same on every rank.

    Over several micro-batches, add up their counts and give the sum to every :func:`global_loss`.

    Communication: one all-reduce of one integer; before it, where there were forwards of attention since the ranks last
    heard from each other, one all-gather of some integers over the attention's group, as the first backward does it.
    """
    group = _process_group(group)
    end_forwards()
    count = (labels != ignore_index).sum()
    dist.all_reduce(count, group=group)
    return count


def global_loss(
    token_losses: torch.Tensor, token_count: torch.Tensor | int, group: Group, *, averaged_over: int = 1
) -> torch.Tensor:
    """The mean loss of all tokens of all ranks, as one device would have it, whoever holds how many of them.

    The value is the global one on every rank; the gradient is this rank's share of it. So the gradients *summed* over
    ``group`` (:func:`sum_gradients`) are those of one device. A mean of means would weigh tokens by where they live.

    Args:
        token_losses: this rank's losses, summed or one by one (``reduction="sum"`` or ``"none"``), with zeros for
            ignored tokens; any shape. A DTensor must be replicated.
        token_count: from :func:`global_token_count`. 0 gives nan, as on one device.
        group: the ranks that share the tokens; a mesh of data and context parallel ranks, flattened, is one too.
        averaged_over: how many ranks' gradients the reducer *averages*, so that it makes their sum: what it divides by
            is multiplied to the gradient (not to the value). 1 for :func:`sum_gradients`, which divides by nothing; the
            number of ranks for FSDP2 and DDP, see the top of this file.

    Returns:
        0-dim, in the dtype of ``token_losses``, but at least float32.

    Communication: forward one all-reduce of one number, and the all-gather of :func:`global_token_count`, unless it or
    a backward has come since the last forward; backward none.

    Raises:
        ValueError: for a DTensor that is not replicated, or ``averaged_over`` below 1.
    """
    if averaged_over < 1:
        raise ValueError(f"averaged_over is a number of ranks, 1 where gradients are summed, got {averaged_over}")
    if isinstance(token_losses, DTensor):
        if any(placement != Replicate() for placement in token_losses.placements):
            raise ValueError(
                f"token_losses are placed {token_losses.placements}: redistribute them to Replicate() first, "
                "or the sum would count them wrongly"
            )
        token_losses = token_losses.to_local()
    group = _process_group(group)
    end_forwards()
    total = token_losses.sum(dtype=torch.promote_types(token_losses.dtype, torch.float32))
    return _SumOverGroup.apply(total, group, averaged_over) / token_count


class _SumOverGroup(torch.autograd.Function):
    """all_reduce: a share on every rank -> the sum on every rank; backward: the gradient, scaled, no communication.

    Every rank calls backward on the same sum, which is one loss and not as many as there are ranks.
    """

    @staticmethod
    def forward(ctx, share: torch.Tensor, group: dist.ProcessGroup, averaged_over: int) -> torch.Tensor:
        total = share.clone()
        dist.all_reduce(total, group=group)
        ctx.averaged_over = averaged_over
        return total

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0] * ctx.averaged_over, None, None


@torch.no_grad()
def sum_gradients(
    parameters: nn.Module | Iterable[torch.Tensor],
    group: Group,
    *,
    bucket_bytes: int = 25 * 2**20,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Sum ``.grad`` over the ranks of ``group``, in place, once after the last backward of a step.

    Context parallelism leaves every rank with the gradients of its own tokens; this makes them those of the sequence.
    It is not for parameters that FSDP2 or DDP already reduce over the same ranks.

    A parameter without a gradient on some ranks (its tokens are elsewhere) gets one; without a gradient on all of them
    it is left at None. A DTensor parameter is summed by its local tensor; a gradient that is placed otherwise than its
    parameter (torch leaves those of SequenceParallel norms as partial sums) is first redistributed to the placements
    of the parameter, so that they are the same on every rank.

    Args:
        parameters: a module, or its parameters; the same ones in the same order on every rank. Frozen ones are skipped.
        group: the cp ranks.
        bucket_bytes: gradients of one dtype travel together, flat, about this many bytes at a time; this is also the
            extra memory.
        reduce_dtype: travels and is summed; None for at least float32, whatever dtype the gradients have. Those of
            bfloat16 parameters are rounded once, then, and not once a rank; half the bytes with ``torch.bfloat16``.

    Communication: an all-gather of :data:`~cp_styles.comm.agreement.WIDTH` integers, an all-reduce a bucket, and, when
    ranks differ in which gradients they have, one of a byte a parameter.

    Raises:
        ValueError: on every rank, when ranks do not have the same parameters, or when they are reduced over ranks of
            ``group`` already: by a DDP module, as DTensors on a mesh that spreads over them, or by this function,
            since when nothing has changed the gradients. (What a backward has added since is not told from what a
            zero_grad and a backward make: sum once a step, after the last of its backwards.)
    """
    group = _process_group(group)

    def check() -> list[torch.Tensor]:
        if isinstance(parameters, nn.Module):
            _refuse_ddp(parameters, group)
        given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        trained = [parameter for parameter in dict.fromkeys(given) if parameter.requires_grad]
        _refuse_spread(trained, group)
        _refuse_summed(trained, group)
        return trained

    summed = _with_gradient_anywhere(check, group)
    known = [_summed_over(parameter) for parameter in summed]
    gradients = [_local_gradient(parameter) for parameter in summed]
    for bucket in _buckets(gradients, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat = flat.to(reduce_dtype or torch.promote_types(flat.dtype, torch.float32))
        dist.all_reduce(flat, group=group)
        for gradient, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(piece.view_as(gradient))
    for parameter, before in zip(summed, known, strict=True):
        _note_summed(parameter, (*before, tuple(dist.get_process_group_ranks(group))))


def _refuse_ddp(module: nn.Module, group: dist.ProcessGroup) -> None:
    ranks = set(dist.get_process_group_ranks(group))
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel):
            reduced = dist.get_process_group_ranks(child.process_group)
            both = sorted(ranks.intersection(reduced))
            if len(both) > 1:
                raise ValueError(
                    f"sum_gradients over ranks {sorted(ranks)}: {name or 'the module'} is DistributedDataParallel over "
                    f"{both} and has reduced its gradients there. Leave sum_gradients out, and give global_loss "
                    f"averaged_over={len(reduced)}"
                )


def _refuse_summed(parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    ranks = set(dist.get_process_group_ranks(group))
    for parameter in parameters:
        for known in _summed_over(parameter):
            if len(ranks.intersection(known)) > 1:
                raise ValueError(
                    f"sum_gradients over ranks {sorted(ranks)}: the gradient of a parameter of shape "
                    f"{tuple(parameter.shape)} is summed over some of them already, and nothing has changed it since; "
                    "twice, it would count every token as often as there are ranks. Sum once, after the last backward"
                )


def _summed_over(parameter: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """The ranks over which a gradient was summed, by a mark on it that holds until it changes."""
    version, groups = getattr(parameter.grad, _SUMMED, (None, ()))
    return groups if parameter.grad is not None and version == parameter.grad._version else ()


def _note_summed(parameter: torch.Tensor, ranks: tuple[tuple[int, ...], ...]) -> None:
    assert parameter.grad is not None  # it was summed
    setattr(parameter.grad, _SUMMED, (parameter.grad._version, ranks))


_SUMMED = "_cp_styles_summed"


def _refuse_spread(parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    for mesh in {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}:
        if shares_ranks(mesh, group):
            raise ValueError(
                f"sum_gradients over ranks {sorted(dist.get_process_group_ranks(group))}: a DTensor parameter lives on "
                f"{mesh}, which spreads over the same ranks, and its gradient is reduced there: leave such parameters "
                "out"
            )


def _with_gradient_anywhere(check: Callable[[], list[torch.Tensor]], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Of the parameters that ``check`` returns, those that have a gradient on at least one rank: the same on every
    rank."""
    parameters: list[torch.Tensor] = []
    present = b""

    def build() -> StatusRow:
        nonlocal parameters, present
        parameters = check()
        present = bytes(parameter.grad is not None for parameter in parameters)
        kinds = [(tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape), str(p.dtype)) for p in parameters]
        return StatusRow(inputs=fingerprint(kinds), call=zlib.crc32(present))

    rows = exchange_status(build, Meeting.GRADIENTS, "sum_gradients", "group", group)
    if len({row.inputs for row in rows}) > 1:
        raise ValueError(
            f"sum_gradients: the ranks of the group do not have the same parameters (this one has {len(parameters)} "
            "that are trained): pass the same ones, in the same order, with the same shapes and dtypes, on every rank"
        )
    if len({row.call for row in rows}) > 1:
        device = parameters[0].device if parameters else torch.device("cpu")
        anywhere = torch.tensor(list(present), dtype=torch.uint8, device=device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        present = bytes(anywhere.tolist())
    return [parameter for parameter, has in zip(parameters, present, strict=True) if has]


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``parameter.grad``, after making sure that it exists and is placed as its parameter is."""
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
        return gradient.to_local()
    parameter.grad = gradient
    return gradient


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


def _process_group(group: Group) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        raise TypeError(f'expected a process group or a 1-D mesh such as mesh["cp"], got {type(group).__name__}')
    if group.ndim != 1:
        raise ValueError(f'expected a 1-D mesh, got axes {group.mesh_dim_names}: pass the one meant, mesh["cp"]')
    return group.get_group()


def _broadcast(document_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    try:
        return document_ids.expand_as(tokens)
    except RuntimeError:
        raise ValueError(
            f"document_ids of shape {tuple(document_ids.shape)} do not broadcast to tokens {tuple(tokens.shape)}: "
            "give one id a token, or one a position that all rows share"
        ) from None


def _index_along(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """int64 in the shape of ``tensor``: its own index along ``dim``, everywhere."""
    shape = [1] * tensor.ndim
    shape[dim] = -1
    return torch.arange(tensor.shape[dim], device=tensor.device).view(shape).expand_as(tensor)


def _document_starts(document_ids: torch.Tensor, seq_dim: int) -> torch.Tensor:
    """Where the document of each token begins, int64: the same number is the same document."""
    index = _index_along(document_ids, seq_dim)
    if document_ids.shape[seq_dim] < 2:
        return index
    begins = document_ids.diff(dim=seq_dim) != 0
    starts = torch.zeros_like(index)
    starts.narrow(seq_dim, 1, begins.shape[seq_dim]).copy_(index.narrow(seq_dim, 1, begins.shape[seq_dim]) * begins)
    return starts.cummax(seq_dim).values
