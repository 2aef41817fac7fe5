"""nn.MultiheadAttention: the computation of torch's multi_head_attention_forward, around an attention call.

A function mode intercepts torch's function as one call. The mode is not active inside of that call, so it cannot
intercept the attention that torch calls there.

Shapes: B batch, H heads, L local queries, M local keys, S whole queries, T whole keys, E width, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from cp_styles.masks.dense import check_plain_mask


def multi_head_attention(
    attend: Callable[..., torch.Tensor],
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, None]:
    """``(out_LBE, None)`` of query [L, B, E], key and value [M, B, ...], with the arguments of torch's function.

    ``attn_mask`` [S, T] or [B * H, S, T] and ``key_padding_mask`` [B, T] cover the whole sequence. With ``is_causal``,
    ``attn_mask`` is not read. ``attend`` takes the arguments of scaled_dot_product_attention.

    Raises:
        NotImplementedError: for weights (``need_weights``), and for additional keys (``add_bias_kv``, static keys).
    """
    if need_weights:
        raise NotImplementedError(
            f"{name}: nn.MultiheadAttention would return the attention weights (need_weights=True is its default), a "
            "matrix of the whole sequence that no rank has: call it with need_weights=False"
        )
    if add_zero_attn or any(x is not None for x in (bias_k, bias_v, static_k, static_v)):
        raise NotImplementedError(
            f"{name}: nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys attends to keys in "
            "addition to the sequence, which is not supported: make it without these options"
        )
    batched = query.ndim == 3
    if not batched:  # equal objects stay equal objects, so that self-attention is one projection below
        with_batch = {id(x): x.unsqueeze(1) for x in (query, key, value)}
        query, key, value = (with_batch[id(x)] for x in (query, key, value))
    inputs = query, key, value
    if in_proj_weight is not None and query is key and key is value:
        projected = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight) if in_proj_weight is None else in_proj_weight.chunk(3)
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        projected = [F.linear(*operands) for operands in zip(inputs, weights, biases, strict=True)]  # pyright: ignore
    q_BHLD, k_BHMD, v_BHMD = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in projected)

    mask = None
    if attn_mask is not None and not is_causal:
        mask = _make_bias(attn_mask, query.dtype)
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        padding = _make_bias(key_padding_mask, query.dtype)
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    out_BHLD = attend(q_BHLD, k_BHMD, v_BHMD, mask, dropout_p if training else 0.0, is_causal)
    out_LBE = F.linear(out_BHLD.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return (out_LBE if batched else out_LBE.squeeze(1)), None


def _make_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias of a boolean mask (True: hidden); other masks are a bias already."""
    check_plain_mask(mask)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask
