"""The buffers of a context_parallel block: tensors that are replaced by this rank's part in place, and restored.

[Note: cut buffers] A buffer is cut in place: the same tensor object gets other data (``tensor.data``). At the end of
the block it gets its whole data back. This needs no copy. It works with views of the buffer, and for leaves that
require grad.

A graph that is made inside the block may save the tensor object. Its backward may run when the object is whole again.
So tensors saved inside a block are saved as aliases (:class:`Aliases`).

The gradient of a leaf has the shape of the part, also if the backward runs after the block. While autograd accumulates
it, the leaf has the data of the part again (:meth:`CutBuffer.follow_gradient`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from cp_styles._lib.compat import saved_tensors_hooks_on_top, uncompiled
from cp_styles._lib.troubleshooting import see
from cp_styles.layouts import SequenceLayout
from cp_styles.layouts.layout import find_cut, mark_cut


class CutBuffer:
    """A buffer of a block, and this rank's part of it. See [Note: cut buffers].

    ``restored``: whether the buffer is whole again after the block.
    """

    def __init__(self, buffer: torch.Tensor, dim: int, layout: SequenceLayout, restored: bool) -> None:
        self.buffer, self.dim, self.layout, self.restored = buffer, dim, layout, restored

    def cut(self, rank: int) -> None:
        # A copy in any case: changes of the part in place must not change the whole tensor.
        self.data = self.layout.shard(self.buffer.detach(), self.dim, rank).clone(memory_format=torch.contiguous_format)
        grad = self.buffer.grad if self.buffer.is_leaf else None
        if grad is not None and grad.shape != self.data.shape:
            raise ValueError(
                f"a buffer of shape {tuple(self.buffer.shape)} already has a .grad of that shape. The gradients of "
                f"this rank's part, {tuple(self.data.shape)}, cannot be added to it: set .grad to None before the block"
            )

    def replace_data(self) -> Callable[[], None]:
        """Replace the buffer's data by the part. Call the returned function to restore the data."""
        buffer, previous_cut = self.buffer, find_cut(self.buffer)
        with torch.inference_mode(False):  # training refuses inference tensors later
            data = buffer.data

        def undo() -> None:
            if buffer.grad_fn is not None:  # changed in place inside the block; the graph belongs to the part
                with contextlib.suppress(RuntimeError):  # views cannot be detached in place; __exit__ raises for them
                    buffer.detach_()
            _set_data(buffer, data)
            mark_cut(buffer, previous_cut)

        _set_data(buffer, self.data)
        mark_cut(buffer, (self.layout, self.dim))
        return undo

    def follow_gradient(self) -> None:
        """Register hooks on a leaf, so that gradients that arrive after the block find the data of the part."""
        if not (self.buffer.requires_grad and self.buffer.is_leaf):
            return
        node, undo = get_gradient_edge(self.buffer).node, []

        def replace_data(_: Any) -> None:
            grad = self.buffer.grad
            if grad is not None and grad.shape != self.data.shape:
                raise RuntimeError(
                    f"the backward of a context_parallel block has a gradient for this rank's part, "
                    f"{tuple(self.data.shape)}, of a buffer that already has a .grad of shape {tuple(grad.shape)}: "
                    "set .grad to None before the backward"
                )
            undo.append(self.replace_data())

        node.register_prehook(replace_data)
        node.register_hook(lambda *_: undo.pop()())


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    if tensor.requires_grad:
        # The gradient accumulator of a leaf keeps the shape of the leaf. Data of another dtype makes torch drop it.
        other = torch.float64 if data.dtype == torch.float32 else torch.float32
        tensor.data = data.new_empty(0, dtype=other)
    tensor.data = data


class Aliases(torch.autograd.graph.saved_tensors_hooks):
    """Saves tensors for the backward with their current data, independent of the tensor object.

    See [Note: cut buffers]. Hooks that were active before (offloading, a checkpoint's) still get the saved tensors.
    torch does not check tensors saved by hooks for changes in place, so this class checks them.
    """

    def __init__(self) -> None:
        outer = saved_tensors_hooks_on_top()

        def pack(tensor: torch.Tensor) -> Any:
            alias = tensor.detach()  # an output that its own graph holds would never be freed
            return outer[0](alias) if outer is not None else (alias, alias._version)

        def unpack(saved: Any) -> torch.Tensor:
            if outer is not None:
                return outer[1](saved)
            alias, version = saved
            if alias._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(alias.shape)} that the backward needs was modified by an in-place "
                    f"operation: it was saved at version {version} and is at {alias._version}"
                )
            return alias

        super().__init__(uncompiled(pack), uncompiled(unpack))  # in a graph the version would be a constant


def check_plain(buffer: Any) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"buffers must be tensors, got {type(buffer).__name__}")
    if isinstance(buffer, DTensor):
        raise TypeError(f"a buffer of shape {tuple(buffer.shape)} is a DTensor: pass plain tensors (to_local())")


def check_buffer(buffer: Any) -> None:
    """Raise for a buffer that cannot be cut in place."""
    check_plain(buffer)
    shape = tuple(buffer.shape)
    if isinstance(buffer, nn.Parameter):
        raise TypeError(
            f"a buffer of shape {shape} is an nn.Parameter, which an optimizer holds: leave it out, and index this "
            "rank's rows of it in the model by position ids that are a buffer"
        )
    if buffer.grad_fn is not None:
        raise ValueError(
            f"a buffer of shape {shape} is the result of a computation that requires grad, and cutting it in place "
            "would break its graph: use context_parallel_shard, which is differentiable, or compute it in the block"
            f"{see('A buffer that was computed')}"
        )


def normalize_dim(buffer: torch.Tensor, dim: int) -> int:
    if not -buffer.ndim <= dim < buffer.ndim:
        raise ValueError(f"a buffer of shape {tuple(buffer.shape)} has no sequence dim {dim}")
    return dim % buffer.ndim
