"""Copies between host and GPU that do not make the host wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def tensor_on(
    device: torch.device, values: int | Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Numbers, or a host tensor, on ``device``.

    ``torch.tensor(values, device=device)`` waits until the GPU has finished its queue. This copy does not wait. The
    source is read before the call returns.
    """
    source = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    return source.to(device, non_blocking=True)


def read_later(number: torch.Tensor) -> Callable[[], int]:
    """A function that returns the integer in a tensor without dims.

    The copy from a GPU starts here. Only a call of the returned function waits for it.
    """
    if number.device.type == "cpu":
        value = int(number)
        return lambda: value
    host = torch.empty((), dtype=number.dtype, pin_memory=True, device="cpu")
    host.copy_(number, non_blocking=True)
    copied = torch.Event(number.device)
    copied.record()

    def read() -> int:
        copied.synchronize()
        return int(host)

    return read


def captures_graph() -> bool:
    """Whether a CUDA graph records what this thread does. The host can read nothing from the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
