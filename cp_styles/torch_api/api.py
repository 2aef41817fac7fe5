"""torch's context-parallel API on the engine of this package. Change the import and keep the code.

::

    from cp_styles.torch_api import context_parallel, context_parallel_unshard, set_rotate_method

    with context_parallel(mesh["cp"], buffers=[tokens, labels, table], buffer_seq_dims=[1, 1, 0]):
        loss = loss_fn(model(tokens), labels)  # this rank's part of each; attention over the whole sequence
        loss.backward()

torch keeps settings in globals of the process. Here settings are arguments, or defaults of the *current context*
(contextvars: a thread or an asyncio task). Nothing is patched: inside the block a TorchFunctionMode intercepts the
attention calls of this thread only. Gradients are each rank's share: sum them over the mesh (``sum_gradients``, FSDP2,
DDP).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from cp_styles.collectives import gather
from cp_styles.comm.groups import axis_and_group
from cp_styles.comm.point_to_point import gather_numbers
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.strategies import AllGather, Ring, Strategy
from cp_styles.torch_api.buffers import check_plain, normalize_dim
from cp_styles.torch_api.context_block import (
    check_on_ranks,
    find_open_block,
    last_layout,
    list_ranks,
    pair_buffers,
    rotation,
)


def set_rotate_method(rotate_method: str) -> contextlib.AbstractContextManager[object]:
    """Set the default strategy of the blocks that are entered afterwards: torch's function, without a global.

    It applies to the current context (contextvars): the thread or asyncio task that calls it, and tasks that copy its
    context. New threads start with "allgather". ``context_parallel(strategy=...)`` overrides it. In a ``with``
    statement it applies until the end of the ``with``.

    Args:
        rotate_method: "allgather" (the default) is ``AllGather()``: all keys at once. "alltoall" is ``Ring()``: the
            keys of one rank at a time.

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
    restore = contextlib.ExitStack()  # without a `with` nobody leaves it, and the method stays
    restore.callback(rotation.set, rotation.get())
    rotation.set(strategies[rotate_method])
    return restore


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Any] | Mapping[str, Any],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: SequenceLayout | Balancer | None = None,
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
    block = find_open_block(group)
    if load_balancer is None and block is None:
        raise ValueError(
            "context_parallel_shard outside of a context_parallel block needs load_balancer=, the layout: for example "
            "contiguous (torch's default there) or head_tail. Give the attention the same layout: "
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
        pairs = pair_buffers(buffers, seq_dims)

    def shard(buffer: Any, dim: int) -> Any:
        if isinstance(buffer, BlockMask):
            return buffer
        check_plain(buffer)
        dim = normalize_dim(buffer, dim)
        return layout_made_by(cut, buffer.shape[dim], group.size()).shard(buffer, dim, group.rank())

    parts = [shard(buffer, dim) for buffer, dim in pairs]
    return dict(zip(buffers, parts, strict=True)) if isinstance(buffers, Mapping) else parts


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    load_balancer: SequenceLayout | Balancer | None = None,
) -> list[torch.Tensor]:
    """The whole tensors from the parts of all ranks, on every rank. Without gradient, as in torch.

    Args:
        mesh: the ranks that share the sequence: 1-D.
        buffers: this rank's parts.
        seq_dims: the sequence dim of each part.
        load_balancer: how the sequence was cut. Inside a :func:`context_parallel` block, None is the layout of that
            block. Outside, None is the default of the blocks: the layout of the last block over this mesh, or
            ``head_tail``.

    Communication: two all-gathers of a few integers. Then, for each buffer, one all-gather (an all-to-all if parts
    differ in length): a rank sends its part P - 1 times.

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
    block = find_open_block(group)
    ranks, default = last_layout.get()
    default = default if ranks == list_ranks(group) else head_tail

    def check() -> list[tuple[torch.Tensor, int]]:
        pairs = pair_buffers(buffers, seq_dims)
        for buffer, _ in pairs:
            check_plain(buffer)
        if load_balancer is None and block is None and default is None:
            raise ValueError(
                "context_parallel_unshard after a context_parallel block with a layout= of its own: pass the same "
                "layout as load_balancer="
            )
        return [(buffer, normalize_dim(buffer, dim)) for buffer, dim in pairs]

    pairs = check_on_ranks(
        "context_parallel_unshard", axis, group, check, lambda pairs: [(dim, x.ndim, x.dtype) for x, dim in pairs]
    )
    cut = load_balancer if load_balancer is not None else block.layout if block is not None else default
    assert cut is not None
    rows = gather_numbers([buffer.shape[dim] for buffer, dim in pairs] or [0], group)
    layouts = []
    for index in range(len(pairs)):
        lengths = tuple(row[index] for row in rows)
        layouts.append(layout_made_by(cut, sum(lengths), group.size()))
        if layouts[-1].lengths != lengths:
            raise ValueError(
                f"context_parallel_unshard: the ranks hold {list(lengths)} positions, but the layout gives them "
                f"{list(layouts[-1].lengths)}: pass the load_balancer that they were cut with"
            )
    wholes = []
    for (buffer, dim), layout in zip(pairs, layouts, strict=True):
        wholes.append(gather(buffer, dim, group, reduce_gradients=False, layout=layout).contiguous())
    return wholes
