"""A number that tells tensors apart, for ranks that ask each other whether they hold the same."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_PIECE = 2**23  # bytes at a time, so that a large tensor needs little more memory


def checksum(tensor: torch.Tensor) -> int:
    """63 bits of all the bits of a tensor in the order of its elements, the same on every machine.

    One pass over it, and on CUDA a wait for the device. Dims that are expanded count once. No communication.
    """
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    total = 0
    for index, piece in enumerate(tensor.contiguous().view(-1).view(torch.uint8).split(_PIECE)):
        words = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
        # Odd factors that differ by place, or what goes up here and down there would cancel; integers, which wrap
        # alike everywhere, and not floats.
        places = torch.arange(index * _PIECE, index * _PIECE + words.numel(), device=words.device)
        total += int((words * (places * 0x9E3779B97F4A7C1 * 2 + 1)).sum())
    return total % 2**63


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows whenever the tensor is changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def digest(tensor: torch.Tensor) -> int:
    """The :func:`checksum` of a tensor, remembered until it changes."""
    found = _digests.get(tensor)
    if found is None or found[0] != version_of(tensor):
        found = _digests[tensor] = (version_of(tensor), checksum(tensor))
    return found[1]


_digests: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
