"""torch's context-parallel API, with our engine behind it: change the import, keep the code.

::

    from cp_styles import context_parallel, context_parallel_unshard, set_rotate_method

    with context_parallel(mesh["cp"], buffers=[tokens, labels, table], buffer_seq_dims=[1, 1, 0]):
        loss = loss_fn(model(tokens), labels)  # this rank's part of each; attention over the whole sequence
        loss.backward()

What torch keeps in globals of the process is here an argument, or a default of the *current context* (contextvars: a
thread, an asyncio task). Nothing is patched: inside the block a TorchFunctionMode sees the attention calls of this
thread, and nobody else's. A rank's gradients are its share: sum them over the mesh (``sum_gradients``, FSDP2, DDP).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from cp_styles.collectives import gather
from cp_styles.comm.point_to_point import gather_numbers
from cp_styles.kernels import Kernel
from cp_styles.layout import head_tail
from cp_styles.mask import Mask
from cp_styles.strategies import AllGather, Ring, Strategy
from cp_styles.torch_api.balancers import Cut, layout_of
from cp_styles.torch_api.buffers import check_plain, dim_of
from cp_styles.torch_api.context_block import (
    ContextParallelBlock,
    agree_on,
    group_of,
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
) -> ContextParallelBlock:
    """A block in which ``buffers`` are this rank's parts, and attention runs over the whole sequence.

    The first four arguments are torch's ``context_parallel``'s; so is what the block does to the buffers. Everything
    else holds more often: any length and number of ranks (parts may differ by a token then), one-dimensional buffers,
    buffers that require grad (their ``.grad`` is that of the part), views, no buffers at all, causal and not, any float
    dtype, nested blocks (the innermost counts), exceptions, a backward inside, after, or with other blocks open.

    Args:
        mesh: the ranks that share the sequence: 1-D, ``mesh["cp"]`` of a composed one.
        buffers: tensors with a sequence dim, whole and the same on every rank; one of another length than the rest is
            refused (of a longer table, pass the ``[:length]`` that belongs to the sequence), unless ``layout`` is a
            function, which then cuts each length on its own (cross-attention).
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: those that may stay cut after the block.
        strategy: how keys and queries meet; default what :func:`set_rotate_method` says.
        layout: how the sequence is cut; default ``head_tail``, of the buffers' length if there are any. Then attention
            over another length is refused; a function takes any. Parts that you cut yourself, where there are no
            buffers, must be those of this cut: nobody can see it of them.
        mask: who attends to whom, beside ``is_causal`` of the calls; in global positions.
        kernel: computes the tiles.

    Returns:
        A context manager, good for any number of uses, one after another.

    Communication: at entry one all-gather of 13 integers, so that all ranks hear of one rank's mistake. Cutting and
    restoring send nothing.

    Raises (at entry, on every rank): ValueError for a composed mesh, numbers of dims and buffers that differ, lengths
    that differ, a buffer that is cut already or that is the result of a computation which requires grad, or whose
    ``.grad`` is not of the part's shape; TypeError for parameters and what is no plain tensor. What attention calls
    raise, :class:`~cp_styles.styles.ModuleContextParallel` says.
    """
    return ContextParallelBlock(
        mesh, buffers, buffer_seq_dims, no_restore_buffers, strategy=strategy, layout=layout, mask=mask, kernel=kernel
    )


def set_rotate_method(rotate_method: str) -> RotateMethod:
    """Say how keys travel in the blocks that are entered from here on: torch's function, without its global.

    It holds in the current context (contextvars): the thread or asyncio task that calls it, and what is started from
    there with a copy of its context. Other threads start with "allgather". ``context_parallel(strategy=...)`` goes
    before it. As a ``with`` statement it holds until the end of the block::

        with set_rotate_method("alltoall"):
            ...

    Args:
        rotate_method: "allgather" (the default) is ``AllGather()``: all keys at once. "alltoall" is ``Ring()``: the
            keys of one other rank at a time.

    Raises:
        NotImplementedError: for another name, as torch does; give ``context_parallel`` a ``strategy`` object.
    """
    strategies: dict[str, Strategy] = {"allgather": AllGather(), "alltoall": Ring()}
    if rotate_method not in strategies:
        raise NotImplementedError(
            f'set_rotate_method takes "allgather" or "alltoall", got {rotate_method!r}; other strategies, Ulysses() '
            "for example, go to context_parallel(strategy=...)"
        )
    before = rotation.get()
    rotation.set(strategies[rotate_method])
    return RotateMethod(before)


class RotateMethod(contextlib.AbstractContextManager[None]):
    """What :func:`set_rotate_method` returns: leaving it brings the method before back."""

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
    """This rank's parts of whole tensors, as new tensors: torch's ``_context_parallel_shard``, made public.

    Args:
        mesh: the ranks that share the sequence: 1-D.
        buffers: a list, or a mapping by name, of tensors that are whole on every rank. A BlockMask stays whole, for the
            attention cuts it itself.
        seq_dims: the sequence dim of each, in the same form.
        load_balancer: how the sequence is cut. Inside a :func:`context_parallel` block None is that block's cut.
            Outside it has to be said: torch cuts contiguously there and tells its attention so by a global.

    Returns:
        The parts, a list or dict as given. Differentiable; nothing is communicated, so what one rank does wrong alone
        only that rank hears of. The attention must be given the same cut.

    Raises:
        ValueError: no cut, or one for another length or number of ranks; numbers or names that differ.
        TypeError: for DTensors and what is no tensor.
    """
    group = group_of("context_parallel_shard", mesh)
    block = open_on(group)
    if load_balancer is None and block is None:
        raise ValueError(
            "context_parallel_shard outside of a context_parallel block needs load_balancer=, which says how to cut: "
            "contiguous (what torch does with None) or head_tail, for example, and the attention must be given the "
            "same: context_parallel(mesh, layout=...)"
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
    """The whole tensors from every rank's parts, on every rank; without gradient, as torch's.

    Args:
        mesh: the ranks that share the sequence: 1-D.
        buffers: this rank's parts.
        seq_dims: the sequence dim of each.
        load_balancer: how the sequence was cut. None inside a :func:`context_parallel` block is that block's cut;
            outside, ``head_tail``, which is the blocks' default.

    Communication: two all-gathers of a few integers; then one all-gather (an all-to-all where parts differ in length) a
    buffer: a rank sends its part to the P - 1 others.

    Raises:
        ValueError: on every rank, for parts whose lengths are not those of the cut; outside of a block without a
            ``load_balancer``, when the last one on this mesh was not cut by default.
        TypeError: for DTensors and what is no tensor.
    """
    group, axis = group_of("context_parallel_unshard", mesh), (mesh.mesh_dim_names or ("cp",))[0]
    block = open_on(group)

    def check() -> list[tuple[torch.Tensor, int]]:
        pairs = pairs_of(buffers, seq_dims)
        for buffer, _ in pairs:
            check_plain(buffer)
        if load_balancer is None and block is None and last_cut.get() == ranks_of(group):
            raise ValueError(
                "context_parallel_unshard after a context_parallel block with a layout= of its own: pass the same as "
                "load_balancer="
            )
        return [(buffer, dim_of(buffer, dim)) for buffer, dim in pairs]

    pairs = agree_on(
        "context_parallel_unshard", axis, group, check, lambda pairs: [(dim, x.ndim, x.dtype) for x, dim in pairs]
    )
    cut = load_balancer if load_balancer is not None else block.layout if block is not None else head_tail
    rows = gather_numbers([buffer.shape[dim] for buffer, dim in pairs] or [0], group)
    layouts = []
    for index in range(len(pairs)):
        found = tuple(row[index] for row in rows)
        layouts.append(layout_of(cut, sum(found), group.size()))
        if layouts[-1].lengths != found:
            raise ValueError(
                f"context_parallel_unshard: the ranks hold {list(found)} positions, the cut gives them "
                f"{list(layouts[-1].lengths)}: pass the load_balancer that they were cut with"
            )
    return [
        gather(buffer, dim, group, reduce_gradients=False, layout=layout).contiguous()
        for (buffer, dim), layout in zip(pairs, layouts, strict=True)
    ]
