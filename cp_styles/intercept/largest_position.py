"""The largest position of the whole sequence, which rotary embeddings of transformers ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from cp_styles._compat import never_compiled
from cp_styles.comm.agreement import Meeting, StatusRow, start_status
from cp_styles.decoding import LayerCaches, cache_given

MAXIMUM = {torch.max, torch.Tensor.max}


@never_compiled
def largest_position(calls: Any, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, a maximum; of the position ids in a function of transformers over all ranks.

    "dynamic" and "longrope" rotary embeddings choose their frequencies by ``torch.max(position_ids)``, in whose place a
    rank has those of its part. ``calls`` is the mode that has seen the call. New tokens after a prompt are whole.

    Communication: one all-gather of some integers; none after or in a prefill, and none for other tensors.
    """
    largest, binding = function(*args, **kwargs), calls.binding
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    of_library = frame.f_globals.get("__name__", "").startswith("transformers")  # code from a hub too
    asked = len(args) == 1 and not kwargs and frame.f_locals.get("position_ids") is args[0]
    if binding.group.size() == 1 or not (of_library and asked):
        return largest
    past = cache_given(calls.inputs)
    past = getattr(past, "self_attention_cache", past)
    if isinstance(past, LayerCaches):
        return largest if past.prefilled else largest.new_tensor(past.last_position)
    state = binding.group_state
    state.engaged = True
    where = binding.name, binding.axis, binding.group
    rows = start_status(lambda: StatusRow(q_length=int(largest)), Meeting.POSITIONS, *where)()
    state.engaged = False
    return largest.new_tensor(max(row.q_length for row in rows))
