"""Numbers that tensors of a caller held when they were read, and whether they hold these numbers still.

torch counts changes in place, but not those through NumPy, ``tensor.data``, a storage, or a kernel of one's own. So
numbers are compared.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

from cp_styles._lib.bounded_cache import as_constants
from cp_styles._lib.checksum import version_of
from cp_styles._lib.compat import dispatch_modes_entered
from cp_styles._lib.device_copies import Later, captures_graph
from cp_styles._lib.troubleshooting import see

_MOST = 2**22  # numbers of a tensor that are compared: of a larger one some, spread over it
REMEDY = (
    "torch does not count changes by NumPy, .data, a storage or a kernel of your own: after them call "
    f"torch.autograd.graph.increment_version(tensor), or give a new tensor{see('Memory that is filled again')}"
)

# Results of comparisons on a device, with the texts of their errors, for this thread's next attention.
running_comparisons: ContextVar[tuple[tuple[Later, str], ...]] = ContextVar("comparisons", default=())


class Contents:
    """A copy of the numbers of a tensor. It does not hold the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = version_of(tensor)
        with as_constants():
            self._copy = _numbers(tensor).clone()
        self._comparison: Later | None = None

    def are_in(self, tensor: torch.Tensor, what: str) -> bool:
        """Whether a tensor holds these numbers. No communication.

        On a GPU the host would wait for the answer. So while the version of the tensor is unchanged, the comparison
        runs on the device, one at a time, and an attention that finds its result raises an error with ``what``.
        """
        if tensor.device.type == "cpu" and not dispatch_modes_entered():
            same = torch.equal(_numbers(tensor), self._copy)
        elif tensor.device.type == "cpu" or tensor.is_inference() or version_of(tensor) != self._version:
            with as_constants():
                same = torch.equal(_numbers(tensor), self._copy)
        else:
            if not captures_graph() and (self._comparison is None or self._comparison.has_arrived()):
                with as_constants():
                    differs = (_numbers(tensor) != self._copy).any()
                self._comparison = raise_later(differs, f"{what} was filled again. {REMEDY}")
            return True
        if same:
            self._version = version_of(tensor)
        return same


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that are compared: a view, or a copy of a part. Floats are compared by bits, since nan is not nan."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        tensor = tensor.view(_BITS[tensor.dtype.itemsize])
    if tensor.numel() <= _MOST:
        return tensor
    return tensor.reshape(-1)[:: -(-tensor.numel() // _MOST)]


def raise_later(problem: torch.Tensor, text: str) -> Later:
    """Let the attention of this thread that finds ``problem``, a bool on a device, to be true raise an error. The host
    does not wait for it."""
    result = Later(problem.long())
    running_comparisons.set((*running_comparisons.get(), (result, text)))
    return result


def raise_what_was_found() -> None:
    """Raise RuntimeError for a comparison whose result has arrived from the device. The host does not wait."""
    running = running_comparisons.get()
    arrived = [(result, text) for result, text in running if result.has_arrived()]
    running_comparisons.set(tuple([entry for entry in running if entry not in arrived]))
    for result, text in arrived:
        if result():
            raise RuntimeError(f"after an earlier attention had used what it held before, {text}")
