"""Checksums of tensors, by which ranks compare whether they hold the same values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cp_styles.device_copies import read_later

_PIECE = 2**23  # bytes at a time, so that a large tensor needs little more memory


def checksum(tensor: torch.Tensor) -> int:
    """A 63-bit checksum of the bytes of a tensor, in the order of its elements. The same on every machine.

    It reads the tensor once. On CUDA the host waits for the device. Expanded dims count once. No communication.
    """
    return int(device_checksum(tensor)) % 2**63


def device_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum where the tensor is, one int64, but for its sign."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index, piece in enumerate(tensor.contiguous().view(-1).view(torch.uint8).split(_PIECE)):
        words = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
        # The factors are odd and differ by place, otherwise opposite changes would cancel. Integers, unlike floats,
        # give the same sum in any order.
        places = torch.arange(index * _PIECE, index * _PIECE + words.numel(), device=words.device)
        total += (words * (places * 0x9E3779B97F4A7C1 * 2 + 1)).sum()
    return total


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor, which grows with each change in place."""
    return 0 if tensor.is_inference() else tensor._version


def digest(tensor: torch.Tensor) -> int:
    """The :func:`checksum` of a tensor, cached until the tensor changes."""
    found = _digests.get(tensor)
    if found is None or found[0] != version_of(tensor):
        found = _digests[tensor] = (version_of(tensor), checksum(tensor))
    return found[1]


def delayed_digest(tensor: torch.Tensor, earlier: deque[Callable[[], int]]) -> int:
    """The :func:`digest` of a tensor that changes at every step.

    On a GPU the host would have to wait for it. There it is the digest of the tensor of _DELAY calls before, and 0 at
    the first _DELAY calls. ``earlier`` holds the digests that were not read yet. No communication.
    """
    if tensor.device.type == "cpu":
        return digest(tensor)
    earlier.append(read_later(device_checksum(tensor)))
    return earlier.popleft()() % 2**63 if len(earlier) > _DELAY else 0


# The number of calls by which the host may run ahead of its device.
_DELAY = 64
_digests: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
