"""FlexAttention's score_mod in torch's compiled kernel, which does not materialize the logits.

It is used for compiled calls of flex_attention, on devices on which torch's kernel returns the logsumexp. On CPU, tiles
are computed in plain ops. It calls torch's public function, compiled here for one tile.

Shapes: B batch, H query heads, G key/value heads, L queries, M keys, D head dim, E value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from cp_styles._lib.compat import RecompileLimitHit
from cp_styles.kernels.base import TilePositions
from cp_styles.kernels.flex import FlexKernel, context_of_user_code
from cp_styles.kernels.merge import EMPTY_LSE

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def compiled_takes(q_BHLD: torch.Tensor, v_BGME: torch.Tensor) -> bool:
    """Whether torch's compiled kernel can compute tiles of such tensors. Other tensors use plain ops."""
    dims = q_BHLD.shape[3], v_BGME.shape[3]
    return q_BHLD.device.type == "cuda" and q_BHLD.dtype in _DTYPES and min(dims) >= 16


@dataclass(frozen=True)
class CompiledFlexKernel(FlexKernel):
    """:class:`FlexKernel` with a call of compiled flex_attention for each tile, if :func:`compiled_takes` the tensors.

    The backward computes the tile again and differentiates it, in the dtype of the inputs. torch compiles one score_mod
    for a limited number of shapes (``torch._dynamo.config.recompile_limit``; it warns). Further tiles run in plain ops.
    """

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale, where: TilePositions):
        options = {"causal": causal, "bias": bias, "scale": scale, "where": where}
        try:
            with context_of_user_code(q_BHLD.device), torch.no_grad():
                out, lse = self._attend_tile(q_BHLD, k_BGMD, v_BGME, **options)
        except RecompileLimitHit:
            return super().forward(q_BHLD, k_BGMD, v_BGME, **options)
        return out, lse.masked_fill(lse == float("-inf"), EMPTY_LSE)

    def backward(
        self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale, where: TilePositions
    ):
        options = {"causal": causal, "bias": bias, "scale": scale, "where": where}
        inputs = (q_BHLD, k_BGMD, v_BGME)
        if all(tensor.ndim for tensor in self.learned):  # torch's backward has no gradient of tensors without dims
            try:
                with context_of_user_code(q_BHLD.device):
                    *gradients, shares = tile_gradients(
                        partial(self._attend_tile, **options), inputs, self.learned, grad_BHLE, out_BHLE, lse_BHL
                    )
            except RecompileLimitHit:
                pass
            else:
                for total, share in zip(self.shares, shares, strict=True):
                    total += share
                return tuple(gradients)
        return super().backward(grad_BHLE, *inputs, out_BHLE, lse_BHL, **options)

    def _attend_tile(self, q, k, v, *, causal: bool, bias: torch.Tensor | None, scale: float, where: TilePositions):
        """``(out, lse)`` of a tile in torch's kernel. lse is -inf for a query without keys."""
        bias = None if bias is None else bias[(None,) * (4 - bias.ndim)]
        variant = getattr(self.score_mod, "__code__", type(self.score_mod)), causal, bias is None
        head = torch.full((), where.head, device=q.device)  # a fill needs no copy from the host
        attend = _compile_variant(*variant, torch.is_grad_enabled())
        return attend(q, k, v, self.score_mod, where.q_L, where.kv_M, head, bias, causal, scale)

    def tile_dtype(self, dtype):
        return dtype


def tile_gradients(
    attend: Attend,
    inputs: Sequence[torch.Tensor],
    learned: Sequence[torch.Tensor],
    grad_BHLE: torch.Tensor,
    out_BHLE: torch.Tensor,
    lse_BHL: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """``(dq, dk, dv, gradients of learned)`` of one tile, given ``out`` and ``lse`` of the whole attention.

    ``attend`` computes the tile alone. It is differentiable in query, key, value and ``learned``.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out_tile, lse_tile = attend(*leaves)
    # The probabilities of the tile alone are the probabilities of the whole attention divided by w. So its output gets
    # the gradient w grad, and its logsumexp w sum(grad (out_tile - out)). A logit gets p (grad v^T - sum(grad out)).
    w = torch.exp(lse_tile.detach() - lse_BHL).unsqueeze(-1)  # 0 where lse_tile is -inf, because lse_BHL is finite
    grad = w * grad_BHLE
    # Compute the difference in the wide dtype.
    grad_lse = (grad * (out_tile.detach().to(grad.dtype) - out_BHLE)).sum(-1)
    dq, dk, dv, *shares = torch.autograd.grad(
        (out_tile, lse_tile),
        [*leaves, *learned],
        (grad.to(out_tile.dtype), grad_lse.to(lse_tile.dtype)),
        allow_unused=True,
        materialize_grads=True,
    )
    return dq, dk, dv, shares


def _attend_fused(q, k, v, mod, q_L, kv_M, head, bias, causal, scale):
    def tile_mod(score, b, h, q_idx, kv_idx):
        """``mod`` with global positions, and with the masks of the tile."""
        score = mod(score, b, h + head, q_L[q_idx], kv_M[kv_idx])
        if bias is not None:
            indices = zip((b, h, q_idx, kv_idx), bias.shape, strict=True)
            b, h, row, column = (index * 0 if size == 1 else index for index, size in indices)
            added = bias[b, h, row, column]
            score = torch.where(added == float("-inf"), float("-inf"), score + added)
        return torch.where(q_idx >= kv_idx, score, float("-inf")) if causal else score

    options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1], "return_aux": AuxRequest(lse=True)}
    out, aux = flex_attention(q, k, v, score_mod=tile_mod, **options)
    return out, aux.lse


_compile = partial(torch.compile, fullgraph=True)


@lru_cache(maxsize=256)
def _compile_variant(*variant: Hashable) -> Callable[..., Any]:
    """:func:`_attend_fused`, compiled for one variant."""
    # torch limits the recompilations of a code object. Each variant needs its own graph, so it gets a copy of the code.
    return _compile(FunctionType(_attend_fused.__code__.replace(), _attend_fused.__globals__, _attend_fused.__name__))
