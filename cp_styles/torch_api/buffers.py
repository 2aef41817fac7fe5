"""Tensors that are this rank's part of a sequence for a while, in place: what a context_parallel block does to buffers.

[Note: cut buffers] A buffer is cut in place by giving the same tensor object other data (``tensor.data``), and restored
by giving it the data back: no copy, whatever views of it there are, and also if it is a leaf that requires grad. A
graph made inside may have saved the very object, and its backward may come when that holds the whole again: what is
saved inside a block is therefore saved under another name (:class:`Aliases`). A leaf's gradient is that of the part,
wherever the backward runs: for the moment it arrives, the leaf is the part again (:meth:`Part.follow_gradient`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from cp_styles._compat import saved_tensors_hooks_on_top, uncompiled
from cp_styles.layout import SequenceLayout, cut_with, mark_cut


class Part:
    """A buffer of a block, and this rank's part of it. See [Note: cut buffers]."""

    def __init__(self, buffer: torch.Tensor, dim: int, layout: SequenceLayout, restored: bool) -> None:
        self.buffer, self.dim, self.layout, self.restored = buffer, dim, layout, restored

    def cut(self, rank: int) -> None:
        # A copy, also of a single chunk: what happens to the part in place must not reach the whole.
        self.data = self.layout.shard(self.buffer.detach(), self.dim, rank).clone(memory_format=torch.contiguous_format)
        grad = self.buffer.grad if self.buffer.is_leaf else None
        if grad is not None and grad.shape != self.data.shape:
            raise ValueError(
                f"a buffer of shape {tuple(self.buffer.shape)} has a .grad of that shape already, and the gradients of "
                f"this rank's part, {tuple(self.data.shape)}, cannot be added to it: set it to None before the block"
            )

    def put(self) -> Callable[[], None]:
        """Make the buffer the part; calling what is returned makes it what it was."""
        buffer, layout = self.buffer, cut_with(self.buffer)
        with torch.inference_mode(False):  # what is made in that mode could never be trained with
            data = buffer.data

        def undo() -> None:
            if buffer.grad_fn is not None:  # computed inside, in place: that is not of the whole
                with contextlib.suppress(RuntimeError):  # views cannot, which __exit__ says
                    buffer.detach_()
            set_data(buffer, data)
            mark_cut(buffer, layout)

        set_data(buffer, self.data)
        mark_cut(buffer, self.layout)
        return undo

    def follow_gradient(self) -> None:
        """Before a leaf becomes the whole again: the gradients that its part still gets find the part."""
        if not (self.buffer.requires_grad and self.buffer.is_leaf):
            return
        node, undo = get_gradient_edge(self.buffer).node, []

        def find(_: Any) -> None:
            grad = self.buffer.grad
            if grad is not None and grad.shape != self.data.shape:
                raise RuntimeError(
                    f"the backward of a context_parallel block has a gradient for this rank's part, "
                    f"{tuple(self.data.shape)}, of a buffer that has a .grad of shape {tuple(grad.shape)} already: "
                    "set that to None before"
                )
            undo.append(self.put())

        def leave(*_: Any) -> None:
            undo.pop()()

        node.register_prehook(find)
        node.register_hook(leave)


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    if tensor.requires_grad:
        # A leaf's gradient accumulator remembers the shape it was made for; data of another dtype makes torch drop it.
        other = torch.float64 if data.dtype == torch.float32 else torch.float32
        tensor.data = data.new_empty(0, dtype=other)
    tensor.data = data


class Aliases(torch.autograd.graph.saved_tensors_hooks):
    """Saves tensors for the backward as what they are now, not by the object that holds them.

    See [Note: cut buffers]. Hooks that were there before (offloading, a checkpoint's) get what is saved, as they would
    without. torch checks only itself whether a saved tensor was changed in place, so that is done here.
    """

    def __init__(self) -> None:
        before = saved_tensors_hooks_on_top()

        def pack(tensor: torch.Tensor) -> Any:
            alias = tensor.detach()  # and not the tensor: an output that its own graph holds would never be freed
            return before[0](alias) if before is not None else (alias, alias._version)

        def unpack(saved: Any) -> torch.Tensor:
            if before is not None:
                return before[1](saved)
            alias, version = saved
            if alias._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(alias.shape)} that the backward needs was modified by an in-place "
                    f"operation: it was saved at version {version} and is at {alias._version}"
                )
            return alias

        super().__init__(uncompiled(pack), uncompiled(unpack))  # a version is no constant


def check_plain(buffer: Any) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"buffers are tensors, got {type(buffer).__name__}")
    if isinstance(buffer, DTensor):
        raise TypeError(f"a buffer of shape {tuple(buffer.shape)} is a DTensor: pass plain tensors, to_local()")


def check_buffer(buffer: Any) -> None:
    """Refuse what cannot be cut in place."""
    check_plain(buffer)
    shape = tuple(buffer.shape)
    if isinstance(buffer, nn.Parameter):
        raise TypeError(
            f"a buffer of shape {shape} is an nn.Parameter, which an optimizer and others hold: take this rank's "
            "rows of it in the model, by position ids that are a buffer"
        )
    if buffer.grad_fn is not None:
        raise ValueError(
            f"a buffer of shape {shape} is the result of a computation that requires grad, and cutting it in place "
            "would cut its graph: use context_parallel_shard, which is differentiable, or compute it inside the block"
        )


def dim_of(buffer: torch.Tensor, dim: int) -> int:
    if not -buffer.ndim <= dim < buffer.ndim:
        raise ValueError(f"a buffer of shape {tuple(buffer.shape)} has no sequence dim {dim}")
    return dim % buffer.ndim
