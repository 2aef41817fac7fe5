"""To a GPU and back without waiting for it: the host can run ahead for as long as it reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def tensor_on(
    device: torch.device, values: int | Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Numbers, or a tensor of the host, on ``device``.

    ``torch.tensor(values, device=device)`` waits for everything that a GPU has still to do. This copy does not: what is
    copied is read before the call returns.
    """
    made = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return made.to(device, non_blocking=True)


def read_later(number: torch.Tensor) -> Callable[[], int]:
    """The integer in a tensor without dims, for whom asks later. From a GPU the copy starts here, and only who asks
    waits for it."""
    if number.device.type == "cpu":
        value = int(number)
        return lambda: value
    host = torch.empty((), dtype=number.dtype, pin_memory=True)
    host.copy_(number, non_blocking=True)
    copied = torch.Event(number.device)
    copied.record()

    def read() -> int:
        copied.synchronize()
        return int(host)

    return read
