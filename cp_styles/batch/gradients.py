"""The sum of gradients over the ranks of a sequence, once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import device_checksum
from cp_styles._lib.troubleshooting import see
from cp_styles.batch.averages import MeanByHand
from cp_styles.batch.forwards import all_forwards
from cp_styles.collectives.notes import ReplicatedGathers, Summed, note_summed, summed_over
from cp_styles.collectives.replicas import named_parameters
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import MeshOrGroup, axis_and_group, shares_ranks
from cp_styles.comm.point_to_point import Operation, collective


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
