"""Checksums of tensors and values, by which ranks compare their contents."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from cp_styles._lib.bounded_cache import facts_about

_PIECE = 2**23  # bytes at a time, so that a large tensor needs little more memory
_GOLDEN = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, as a signed integer: neighbours get distant numbers


def checksum(tensor: torch.Tensor) -> int:
    """A 63-bit checksum of the bytes of a tensor, in the order of its elements. Every machine computes the same number.

    It reads the tensor once. On CUDA the host waits for the device. Expanded dims count once. No communication.
    """
    return int(device_checksum(tensor)) % 2**63


def device_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum on the device of the tensor, as one int64 that may be negative."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    # A view as bytes needs a stride of 1. view(-1) does not change the stride of a single number, which may be 0.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index, piece in enumerate(flat.view(torch.uint8).split(_PIECE)):
        words = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
        # Each word is mixed with its index, by a function that is not linear: in linear checksums words a b b a and
        # b a a b are equal, like any changes that cancel. Integers, unlike floats, give the same sum in any order.
        start = index * _PIECE // 8
        keys = torch.arange(start, start + words.numel(), device=words.device).mul_(_GOLDEN).add_(words)
        total += _mix(keys).sum()
    return total


def on_host(numbers: Sequence[torch.Tensor]) -> list[int]:
    """The values of 0-dim integers. The host waits once for each device."""
    values_of: dict[torch.device, list[int]] = {}
    for device in {number.device for number in numbers}:
        values_of[device] = torch.stack([number for number in numbers if number.device == device]).tolist()
    iterators = {device: iter(values) for device, values in values_of.items()}
    return [next(iterators[number.device]) for number in numbers]


def _mix(keys: torch.Tensor) -> torch.Tensor:
    """Permute the 64-bit integers in place: Stafford's mix 13, after which one changed bit changes half of the bits."""
    _xor_shift(keys, 30).mul_(-0x40A7B892E31B1A47)
    _xor_shift(keys, 27).mul_(-0x6B2FB644ECCEEE15)
    return _xor_shift(keys, 31)


def _xor_shift(keys: torch.Tensor, bits: int) -> torch.Tensor:
    # The mask makes it a logical shift. The shift of signed integers copies the sign.
    return keys.bitwise_xor_((keys >> bits).bitwise_and_((1 << 64 - bits) - 1))


def fingerprint(values: Sequence[Any]) -> int:
    """A 32-bit checksum of the repr of some values, the same in all processes."""
    # Not hash(): Python salts the hash of strings differently in every process.
    return zlib.crc32(repr(values).encode())


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor, which grows with each change in place."""
    return 0 if tensor.is_inference() else tensor._version


def digest(tensor: torch.Tensor) -> int:
    """The :func:`checksum` of a tensor, cached until the tensor changes."""
    table = facts_about(tensor)
    entry = table.get(digest)
    if entry is None or entry[0] != version_of(tensor):
        entry = table[digest] = (version_of(tensor), checksum(tensor))
    return entry[1]
