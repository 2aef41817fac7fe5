"""Copies between host and GPU that do not make the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_styles._lib.bounded_cache import as_constants, remembered
from cp_styles._lib.compat import is_traced


def tensor_on(
    device: torch.device, values: int | Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy numbers, or a host tensor, to ``device``. The host does not wait, and may change the source afterwards."""
    # torch.tensor(values, device=device) waits until the GPU has finished its queue.
    source = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    return source.to(device, non_blocking=True)


class DeviceTables:
    """Tables of numbers on the host, such as indices. Each device gets one copy, at the first use.

    A copy takes as much memory on the device as the tables on the host, as long as this object lives. Threads may share
    the object.

    Attributes:
        host: the tables.
    """

    def __init__(self, *host: torch.Tensor) -> None:
        self.host = host
        self._copies: dict[tuple[torch.device, int], tuple[torch.Tensor, ...]] = {}

    def __reduce__(self) -> tuple[type[DeviceTables], tuple[torch.Tensor, ...]]:
        return DeviceTables, self.host  # pickles and copies get no memory of a device

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The tables on ``device``: the same tensors at each call. Do not change them in place."""
        if device.type == "cpu":
            return self.host
        # A CUDA graph would read a cached copy after the end of this object. So it records a copy, or torch refuses.
        if captures_graph():
            return tuple([tensor_on(device, x) for x in self.host])
        # Nothing orders a copy on one stream and its use, or its end, on another. So each stream has its own copy.
        streams = device.type == "cuda" and torch.cuda.is_initialized()
        key = device, torch.cuda.current_stream(device).cuda_stream if streams else 0
        if key not in self._copies:
            with as_constants():
                copies = tuple([tensor_on(device, x) for x in self.host])
            # A new dict, of the last few streams, because another thread may be reading the old one.
            self._copies = {**dict([*self._copies.items()][-3:]), key: copies}
            return copies
        return self._copies[key]


def numbers_on(device: torch.device, values: tuple[int, ...]) -> torch.Tensor:
    """A few integers on ``device``, copied once for all calls with these values: see :func:`tensor_on`."""
    return tensor_on(device, values) if is_traced() else _table_of(values).on(device)[0]


@remembered(64)
def _table_of(values: tuple[int, ...]) -> DeviceTables:
    return DeviceTables(torch.tensor(values, dtype=torch.int64, device="cpu"))


class Later:
    """The integer in a tensor without dims, whose copy from a GPU starts here. A call returns it, and waits."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._copied = number, None
        if number.device.type != "cpu":
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True, device="cpu")
            self._number.copy_(number, non_blocking=True)
            self._copied = torch.Event(number.device)
            self._copied.record()

    def has_arrived(self) -> bool:
        """Whether a call does not wait."""
        return self._copied is None or self._copied.query()

    def __call__(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._number)


def captures_graph() -> bool:
    """Whether a CUDA graph records this thread's calls. The host can read nothing from the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
