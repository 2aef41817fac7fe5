"""The function mode that calls scaled_dot_product_attention as one fused op, inside an AttentionContextParallel.

Otherwise torch would decompose the call if no fused kernel takes the *DTensors*, because of their strides, head dims,
batch, mask or the enabled backends. These do not matter here, because the op only passes the call to the handler in
dtensor_handlers.py. Routing does not depend on this mode, it goes by mesh. A call without this mode, such as in a
recomputation inside the module, works if torch does not decompose it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from cp_styles.engine.binding import refuse_grouped
from cp_styles.engine.dtensor_handlers import binding_of, carrier, watch_values
from cp_styles.kernels.autocast import as_attended
from cp_styles.kernels.sdpa import SDPA_CALLS, names_of
from cp_styles.mask import Dense, causal_bias


class FusedCalls(TorchFunctionMode):
    """Entered around the forward of a module. It has no state."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SDPA_CALLS:
            return _attend(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _refuse_sequence_of_other_dims(name: str, query: DTensor) -> None:
    """Raise ValueError if a query that is not [B, H, S, D] has the sequence where torch's op expects it."""
    if query.placements[0].is_shard(query.ndim - 2):
        raise ValueError(
            f"{name}: scaled_dot_product_attention was called with a query of {query.ndim} dims, {tuple(query.shape)}. "
            "The attention over all ranks needs 4 (batch, heads, sequence, head dim): give query, key and value the "
            "missing ones, such as query.unsqueeze(0)"
        )


def _attend(
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    binding = None
    if isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor):
        binding = binding_of(query.device_mesh)
        if binding is not None and not query.ndim == key.ndim == value.ndim == 4:
            _refuse_sequence_of_other_dims(binding.name, query)
            binding = None
    if binding is None:
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return func(query, key, value, **options, enable_gqa=enable_gqa)
    if query.shape[1] != key.shape[1]:
        refuse_grouped(binding.name, query.shape[1], key.shape[1], enable_gqa)
    attn_mask, is_causal = causal_bias(attn_mask, is_causal)
    if attn_mask is not None and not isinstance(attn_mask, DTensor):
        Dense(attn_mask)  # raises for a tensor that is not a mask, and for one that requires grad
    query, key, value = tensors = as_attended((query, key, value))
    op = carrier(query.device.type, masked=attn_mask is not None).forward_op
    names = names_of(op)
    said = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "compute_log_sumexp": True,
        "return_debug_mask": False,
        "scale": scale,
    }
    results = op(**dict(zip(names.arguments, map(said.__getitem__, names.arguments.values()), strict=True)))
    out = results[names.returns.index("out")]
    watch_values(binding, out, tensors)
    return out
