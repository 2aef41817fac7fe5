"""flex_attention for models: torch's function, and context parallel inside of a style's module or a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from cp_styles._lib.compat import FLEX_FUNCTION
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.kernels.flex import ScoreMod


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
    **others: Any,
) -> Any:
    """torch's flex_attention, with its arguments and results, for models that run under context parallelism.

    Inside a module with :class:`~cp_styles.ModuleContextParallel`, or inside a ``context_parallel`` block, it attends
    over the whole sequence. Elsewhere it calls torch's function. torch's function itself is refused inside.

    Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.

    Args:
        query: [B, H, L, D], this rank's part, as the layout of the style or the block cuts it.
        key: [B, G, M, D], cut in the same way.
        value: [B, G, M, E].
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, with positions of the whole sequence. The gradient of a
            tensor that it reads is this rank's share, like the gradient of any parameter.
        block_mask: a BlockMask of the *whole* sequence. Rows of keys that it does not need are not sent.
        scale: factor of the logits; default 1/sqrt(D).
        enable_gqa: H may be a multiple of G.
        return_lse: also return the logsumexp.
        kernel_options: torch's. Under context parallelism ``BACKEND`` is refused, and tuning changes nothing.
        return_aux: ``AuxRequest(lse=True)`` for the logsumexp, ``AuxRequest(max_scores=True)`` for the largest score of
            each query: see :func:`~cp_styles.context_flex_attention`.
        others: further arguments of torch's function, which are refused under context parallelism.

    Returns:
        The output [B, H, L, E]; ``(out, lse)`` with ``return_lse``, ``(out, AuxOutput)`` with ``return_aux``.

    Communication: none outside. Inside: one agreement of the ranks, then the strategy's; with ``max_scores`` also the
    communication of :func:`~cp_styles.context_max_scores`.

    Raises:
        ValueError, TypeError, NotImplementedError: inside, on every rank, if the input of one is bad, if the ranks
            differ, or in a module with :class:`~cp_styles.AttentionContextParallel`, whose tensors are DTensors.

    torch.compile takes it into a graph outside. Inside, it breaks the graph there, or raises with ``fullgraph=True``.

    Example::

        class FlexLayer(torch.nn.Module):
            def forward(self, q, k, v, block_mask):
                return flex_attention(q, k, v, block_mask=block_mask)  # not the function of torch.nn.attention

        layer = parallelize_module(FlexLayer(), mesh, ModuleContextParallel(layout=contiguous))
        block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1000, 1000, device="cpu")
        out = layer(*(contiguous(1000, 2).shard(whole, 2, mesh.get_local_rank()) for whole in qkv), block_mask)
    """
    tensors = query, key, value
    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": enable_gqa}
    options |= {"return_lse": return_lse, "kernel_options": kernel_options, "return_aux": return_aux}
    calls = AttentionCalls.current()
    if calls is None:
        return FLEX_FUNCTION(*tensors, **options, **others)
    return calls.attend_flex(tensors, options | {"others": others}, compiled=torch.compiler.is_dynamo_compiling())
