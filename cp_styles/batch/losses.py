"""The loss of the whole sequence: token counts, losses by chunks, and their mean over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from cp_styles._lib.checksum import on_host
from cp_styles._lib.compat import replaces_mean_of_fsdp
from cp_styles._lib.device_copies import captures_graph
from cp_styles._lib.dtypes import holds
from cp_styles._lib.troubleshooting import see
from cp_styles.batch.averages import Average, MeanByHand, find_average
from cp_styles.batch.forwards import end_forwards, forwards_here
from cp_styles.batch.labels import IGNORE_INDEX
from cp_styles.collectives.notes import Losses, note_loss
from cp_styles.collectives.replicas import (
    Difference,
    Replica,
    UnreducedGradientsError,
    find_differences,
    replica_number,
    replicas_of,
)
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import MeshOrGroup, axis_and_group
from cp_styles.comm.point_to_point import collective


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


@dataclass(eq=False)
class _ComparedModels:
    """The models of a loss whose parameters are compared over its ranks, with the numbers of all ranks for them."""

    # The numbers travel with the loss, and 0 says that nothing is compared, so ranks need not agree on it before.

    models: list[tuple[Any, dict[str, Replica]]] = field(default_factory=list)
    by_rank: torch.Tensor | None = None

    @cached_property
    def number(self) -> int:
        """See :func:`~cp_styles.collectives.replicas.replica_number`."""
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
