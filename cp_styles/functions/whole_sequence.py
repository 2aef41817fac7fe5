"""Calls whose result depends on the whole sequence: the largest position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_styles._lib.compat import never_compiled
from cp_styles.comm.agreement import Meeting, StatusRow, start_status
from cp_styles.functions.decode import find_layer_caches

MAXIMUM = {torch.max, torch.Tensor.max}


@never_compiled
def largest_position(calls: Any, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, a maximum; over all ranks if the tensor is the module's position ids.

    ``calls`` is the mode that has intercepted the call.

    Communication: one all-gather of some integers; none after or in a prefill, and none for other tensors.
    """
    # "dynamic" and "longrope" rotary embeddings choose their frequencies by torch.max(position_ids), but a rank has the
    # positions of its part.
    largest, binding, inputs = function(*args, **kwargs), calls.unscoped, calls.inputs
    position_ids = [x for name, x in inputs.items() if name.endswith("position_ids")]
    if binding.group.size() == 1 or kwargs or len(args) != 1 or not any(_is_view(args[0], x) for x in position_ids):
        return largest
    past = find_layer_caches(inputs)
    if past is not None:  # new tokens are whole on every rank; the cache of a prompt has its last position
        return largest if past.prefilled else largest.new_tensor(past.last_position)
    where = binding.name, binding.axis, binding.group
    rows = start_status(lambda: StatusRow(q_length=int(largest)), Meeting.POSITIONS, *where)()
    return largest.new_tensor(max(row.q_length for row in rows))


def _is_view(x: torch.Tensor, base: Any) -> bool:
    """Whether ``x`` is ``base``, or all of it under another shape."""
    if not type(x) is type(base) is torch.Tensor:  # a DTensor has no memory of its own
        return False
    if not x.numel() or x.shape[-1:] != base.shape[-1:]:
        return False
    return x.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
