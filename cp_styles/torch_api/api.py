"""torch's context-parallel API on the engine of this package. Change the import and keep the code.

::

    from cp_styles.torch_api import context_parallel, context_parallel_unshard, set_rotate_method

    with context_parallel(mesh["cp"], buffers=[tokens, labels, table], buffer_seq_dims=[1, 1, 0]):
        loss = loss_fn(model(tokens), labels)  # this rank's part of each; attention over the whole sequence
        loss.backward()

torch keeps settings in globals of the process. Here they are arguments, or defaults of the *current context*
(contextvars: a thread or an asyncio task). Nothing is patched: inside the block a TorchFunctionMode intercepts the
attention calls of this thread only. Gradients are each rank's share: sum them over the mesh (``sum_gradients``, FSDP2,
DDP).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from cp_styles.collectives import gather
from cp_styles.comm.agreement import EVERY_CALL, Agreement
from cp_styles.comm.groups import axis_and_group
from cp_styles.comm.point_to_point import gather_numbers
from cp_styles.engine.gradient_watch import RAISE, GradientCheck
from cp_styles.kernels import Kernel
from cp_styles.layout import head_tail
from cp_styles.mask import Mask
from cp_styles.strategies import AllGather, Ring, Strategy
from cp_styles.torch_api.buffers import Cut, check_plain, dim_of, layout_of
from cp_styles.torch_api.context_block import (
    ContextParallelBlock,
    agree_on,
    last_cut,
    open_on,
    pairs_of,
    ranks_of,
    rotation,
)


def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[torch.Tensor] | None = None,
    strategy: Strategy | None = None,
    layout: Cut | None = None,
    mask: Mask | None = None,
    kernel: Kernel | None = None,
    gradient_check: GradientCheck = RAISE,
    agreement: Agreement = EVERY_CALL,
    check_inputs: bool = True,
) -> ContextParallelBlock:
    """A block in which ``buffers`` are this rank's parts, and attention runs over the whole sequence.

    The first four arguments are those of torch's ``context_parallel``, with the same effect on the buffers. More is
    supported than by torch:

    - any length and number of ranks; parts may then differ by one token;
    - buffers of one dim, buffers that require grad (``.grad`` is that of the part), views, no buffers;
    - causal and full attention, any float dtype;
    - nested blocks, of which the innermost counts, and exceptions;
    - a backward inside the block, after it, or while other blocks are open.

    Args:
        mesh: the ranks that share the sequence: 1-D, such as ``mesh["cp"]`` of a composed mesh.
        buffers: tensors with a sequence dim, whole and the same on every rank. All must have the same length (of a
            longer table, pass the view ``table[:length]``), unless ``layout`` is a function, which cuts each length by
            itself (cross-attention).
        buffer_seq_dims: the sequence dim of each buffer.
        no_restore_buffers: buffers that may stay cut after the block.
        strategy: how keys and values get to the queries. Default: see :func:`set_rotate_method`.
        layout: how the sequence is cut. Default: ``head_tail`` for the length of the buffers, or ``contiguous`` where
            torch's ``_cp_options.enable_load_balance`` is False; attention over another length is then refused. A
            function takes any length. Without buffers, the parts that you cut yourself must be those of this layout,
            which cannot be checked.
        mask: which keys each query attends to, in addition to ``is_causal`` of the calls; in global positions.
        kernel: computes the tiles.
        gradient_check: what to do if the ranks' gradients were not summed: :class:`~cp_styles.GradientCheck`.
        agreement: how often the ranks agree: :class:`~cp_styles.EveryCall` or :class:`~cp_styles.NoAgreement`.
        check_inputs: True refuses mistakes in the arguments of the models that call attention inside, as
            :class:`~cp_styles.styles.ModuleContextParallel` does: missing positions, labels that a model would shift
            after the cut, windows that it would lose. They are looked at when a model first calls attention in a block.
            And what mixes or counts tokens of the buffers: in the first, second, fourth, ... block over these ranks,
            and in the one after a block in which a model is new.

    Returns:
        A context manager. It may be entered any number of times, one after the other.

    Communication: at entry, if there are buffers, one agreement of the ranks, as :class:`~cp_styles.EveryCall` says.
    Cutting and restoring send nothing.

    Raises:
        ValueError: at entry, on every rank, for a composed mesh; for numbers of dims and of buffers that differ; for
            buffers of different lengths; for a buffer that is already cut, that is the result of a computation which
            requires grad, or whose ``.grad`` does not have the shape of the part.
        TypeError: at entry, on every rank, for parameters, and for objects that are not plain tensors.
        NotImplementedError: inside, or at its end, for attention in plain ops, such as that of an eager model of
            transformers, and for what else mixes or counts tokens.

    For the errors of attention calls see :class:`~cp_styles.styles.ModuleContextParallel`.

    Example::

        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            assert tokens.shape[1] == 500  # of 1000
            out = attend(*qkv_of(tokens))
        assert tokens.shape[1] == 1000
    """
    return ContextParallelBlock(
        mesh,
        buffers,
        buffer_seq_dims,
        no_restore_buffers,
        strategy=strategy,
        layout=layout,
        mask=mask,
        kernel=kernel,
        gradient_check=gradient_check,
        agreement=agreement,
        check_inputs=check_inputs,
    )


def set_rotate_method(rotate_method: str) -> RotateMethod:
    """Set the default strategy of the blocks that are entered afterwards: torch's function, without a global.

    It applies to the current context (contextvars): the thread or asyncio task that calls it, and tasks that copy its
    context. Other threads start with "allgather". ``context_parallel(strategy=...)`` overrides it. As a ``with``
    statement it applies until the end of the block.

    Args:
        rotate_method: "allgather" (the default) is ``AllGather()``: all keys at once. "alltoall" is ``Ring()``: the
            keys of one other rank at a time.

    Raises:
        NotImplementedError: for another name, as in torch. Give ``context_parallel`` a ``strategy`` object instead.

    No communication.

    Example::

        with set_rotate_method("alltoall"), context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            out = attend(*qkv_of(tokens))
    """
    strategies: dict[str, Strategy] = {"allgather": AllGather(), "alltoall": Ring()}
    if rotate_method not in strategies:
        raise NotImplementedError(
            f'set_rotate_method takes "allgather" or "alltoall", got {rotate_method!r}; for other strategies, such as '
            "Ulysses(), use context_parallel(strategy=...)"
        )
    before = rotation.get()
    rotation.set(strategies[rotate_method])
    return RotateMethod(before)


class RotateMethod(contextlib.AbstractContextManager[None]):
    """Returned by :func:`set_rotate_method`. Leaving this context restores the previous method."""

    def __init__(self, before: Strategy) -> None:
        self._before = before

    def __exit__(self, *exception: object) -> None:
        rotation.set(self._before)


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Any] | Mapping[str, Any],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: Cut | None = None,
) -> list[Any] | dict[str, Any]:
    """This rank's parts of whole tensors, as new tensors. torch has this as ``_context_parallel_shard``.

    Args:
        mesh: the ranks that share the sequence: 1-D.
        buffers: a list of tensors, or a mapping from names to tensors, whole on every rank. A BlockMask stays whole,
            because the attention cuts it itself.
        seq_dims: the sequence dim of each tensor, in the same form.
        load_balancer: how the sequence is cut. Inside a :func:`context_parallel` block, None is the layout of that
            block. Outside it is required. (torch cuts contiguously there, and its attention reads a global.)

    Returns:
        The parts, as a list or dict. Differentiable. No communication, so an error on one rank is raised on that rank
        only. The attention must use the same layout.

    Raises:
        ValueError: no layout, or a layout for another length or number of ranks; numbers or names that differ.
        TypeError: for DTensors and for objects that are not tensors.

    Example::

        (part,) = context_parallel_shard(mesh, [tokens], [1], head_tail)
    """
    _, group = axis_and_group("context_parallel_shard", mesh)
    block = open_on(group)
    if load_balancer is None and block is None:
        raise ValueError(
            "context_parallel_shard outside of a context_parallel block needs load_balancer=, which says how to cut: "
            "for example contiguous (torch's default there) or head_tail. Give the attention the same: "
            "context_parallel(mesh, layout=...)"
        )
    cut = block.layout if load_balancer is None and block is not None else load_balancer
    assert cut is not None
    if isinstance(buffers, Mapping):
        if not isinstance(seq_dims, Mapping) or buffers.keys() != seq_dims.keys():
            raise ValueError(f"seq_dims must name the same entries as buffers: {list(buffers)}, got {seq_dims!r}")
        pairs = [(buffers[name], seq_dims[name]) for name in buffers]
    else:
        if isinstance(seq_dims, Mapping):
            raise ValueError("seq_dims is a mapping and buffers is not: give both in the same form")
        pairs = pairs_of(buffers, seq_dims)

    def part(buffer: Any, dim: int) -> Any:
        if isinstance(buffer, BlockMask):
            return buffer
        check_plain(buffer)
        dim = dim_of(buffer, dim)
        return layout_of(cut, buffer.shape[dim], group.size()).shard(buffer, dim, group.rank())

    parts = [part(buffer, dim) for buffer, dim in pairs]
    return dict(zip(buffers, parts, strict=True)) if isinstance(buffers, Mapping) else parts


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    load_balancer: Cut | None = None,
) -> list[torch.Tensor]:
    """The whole tensors from the parts of all ranks, on every rank. Without gradient, as in torch.

    Args:
        mesh: the ranks that share the sequence: 1-D.
        buffers: this rank's parts.
        seq_dims: the sequence dim of each part.
        load_balancer: how the sequence was cut. Inside a :func:`context_parallel` block, None is the layout of that
            block. Outside, None is the default of the blocks: that of the last one over this mesh, or ``head_tail``.

    Communication: two all-gathers of a few integers. Then, for each buffer, one all-gather (an all-to-all if parts
    differ in length): a rank sends its part to the P - 1 others.

    Raises:
        ValueError: on every rank, if the lengths of the parts do not fit the layout; or, outside of a block and without
            ``load_balancer``, if the last block on this mesh did not have the default layout.
        TypeError: for DTensors and for objects that are not tensors.

    Example::

        (part,) = context_parallel_shard(mesh, [tokens], [1], head_tail)
        (whole,) = context_parallel_unshard(mesh, [part], [1], head_tail)
        assert torch.equal(whole, tokens)
    """
    axis, group = axis_and_group("context_parallel_unshard", mesh)
    block = open_on(group)
    ranks, default = last_cut.get()
    default = default if ranks == ranks_of(group) else head_tail

    def check() -> list[tuple[torch.Tensor, int]]:
        pairs = pairs_of(buffers, seq_dims)
        for buffer, _ in pairs:
            check_plain(buffer)
        if load_balancer is None and block is None and default is None:
            raise ValueError(
                "context_parallel_unshard after a context_parallel block with a layout= of its own: pass the same "
                "layout as load_balancer="
            )
        return [(buffer, dim_of(buffer, dim)) for buffer, dim in pairs]

    pairs = agree_on(
        "context_parallel_unshard", axis, group, check, lambda pairs: [(dim, x.ndim, x.dtype) for x, dim in pairs]
    )
    cut = load_balancer if load_balancer is not None else block.layout if block is not None else default
    assert cut is not None
    rows = gather_numbers([buffer.shape[dim] for buffer, dim in pairs] or [0], group)
    layouts = []
    for index in range(len(pairs)):
        lengths = tuple(row[index] for row in rows)
        layouts.append(layout_of(cut, sum(lengths), group.size()))
        if layouts[-1].lengths != lengths:
            raise ValueError(
                f"context_parallel_unshard: the ranks hold {list(lengths)} positions, but the layout gives them "
                f"{list(layouts[-1].lengths)}: pass the load_balancer that they were cut with"
            )
    wholes = []
    for (buffer, dim), layout in zip(pairs, layouts, strict=True):
        wholes.append(gather(buffer, dim, group, reduce_gradients=False, layout=layout).contiguous())
    return wholes
