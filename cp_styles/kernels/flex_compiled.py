"""FlexAttention's score_mod in torch's compiled kernel, which does not materialize the logits.

It is used where flex_attention was compiled. It calls the public function, compiled here for one tile. Shapes: B batch,
H query heads, G key/value heads, L queries, M keys, D head dim, E value head dim.

[Note: logsumexp on CPU] torch's kernel for CPU does not return the logsumexp, which is needed to merge tiles. So a tile
gets one additional key, with a logit c for each query, and two additional columns of values. With Z the sum of exp of
the real logits, one column gives the share of the real keys, Z / (Z + exp c), and the other the share of the additional
key, exp c / (Z + exp c). Their quotient is exp(lse - c), computed without a difference of large numbers. The output is
divided by the first share. c is the logsumexp of a few of the keys, so the first share is at least one half. exp(lse -
c) must be in the range of float32. Tiles with a query for which it is not are computed in plain ops.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from cp_styles._compat import RecompileLimitHit
from cp_styles.device import tensor_on
from cp_styles.kernels.autocast import without_autocast
from cp_styles.kernels.base import Where
from cp_styles.kernels.flex import FlexKernel, ScoreMod
from cp_styles.kernels.merge import EMPTY_LSE

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

# The logsumexp of this many keys, at equal distances, is the estimate for all keys.
_GUESSED_FROM = 8
# Shares of the softmax below this have lost digits, or are 0, because of float32's smallest exponents.
_LEAST_SHARE = 1e-30
_LOW = (torch.float16, torch.bfloat16)


def compiled_takes(q_BHLD: torch.Tensor, v_BGME: torch.Tensor) -> bool:
    """Whether torch's compiled kernel can compute tiles of such tensors. Other tensors use plain ops."""
    dtype, device = q_BHLD.dtype, q_BHLD.device.type
    if dtype not in (torch.float32, *_LOW):
        return False
    if device == "cpu":  # it needs vector instructions
        return torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return device == "cuda" and min(q_BHLD.shape[3], v_BGME.shape[3]) >= 16


@dataclass(frozen=True)
class CompiledFlexKernel(FlexKernel):
    """:class:`FlexKernel` with a call of compiled flex_attention for each tile, if :func:`compiled_takes` the tensors.

    On CPU, torch has no backward, so that of FlexKernel is used, and tiles are computed in float32. On other devices
    the backward computes the tile again and differentiates it, in the dtype of the inputs. FlexKernel's backward is
    also used for learned tensors without dims, for which torch's backward has no gradient. torch compiles one score_mod
    for a limited number of shapes (``torch._dynamo.config.recompile_limit``; it warns). Further tiles run in plain ops.
    """

    on_cpu: bool = False

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale, where: Where):
        options = {"causal": causal, "bias": bias, "scale": scale, "where": where}
        tile = _OnCpu(self, **options) if self.on_cpu else _Fused(self, **options)
        try:
            with without_autocast(q_BHLD.device), torch.no_grad():
                found = tile(q_BHLD, k_BGMD, v_BGME)
        except RecompileLimitHit:
            found = None
        if found is None:
            return super().forward(q_BHLD, k_BGMD, v_BGME, **options)
        out, lse = found
        return out, lse.masked_fill(lse == float("-inf"), EMPTY_LSE)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale, where: Where):
        options = {"causal": causal, "bias": bias, "scale": scale, "where": where}
        inputs = (q_BHLD, k_BGMD, v_BGME)
        if not self.on_cpu and all(tensor.ndim for tensor in self.learned):
            try:
                with without_autocast(q_BHLD.device):
                    *found, shares = tile_gradients(
                        _Fused(self, **options), inputs, self.learned, grad_BHLE, out_BHLE, lse_BHL
                    )
            except RecompileLimitHit:
                pass
            else:
                for total, share in zip(self.shares, shares, strict=True):
                    total += share
                return tuple(found)
        return super().backward(grad_BHLE, *inputs, out_BHLE, lse_BHL, **options)

    def tile_dtype(self, dtype):
        return super().tile_dtype(dtype) if self.on_cpu else dtype


def tile_gradients(
    attend: Attend,
    inputs: Sequence[torch.Tensor],
    learned: Sequence[torch.Tensor],
    grad_BHLE: torch.Tensor,
    out_BHLE: torch.Tensor,
    lse_BHL: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """``(dq, dk, dv, gradients of learned)`` of one tile, given ``out`` and ``lse`` of the whole attention.

    ``attend`` computes the tile alone. It is differentiable in query, key, value and ``learned``. Its probabilities are
    those of the whole attention divided by w = exp(lse_tile - lse). So its output gets the gradient w grad, and its
    logsumexp gets w sum(grad (out_tile - out)). A logit then gets p (grad v^T - sum(grad out)), as required.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out_tile, lse_tile = attend(*leaves)
    w = torch.exp(lse_tile.detach() - lse_BHL).unsqueeze(-1)  # 0 where lse_tile is -inf, because lse_BHL is finite
    grad = w * grad_BHLE
    # Compute the difference in the wide dtype.
    grad_lse = (grad * (out_tile.detach().to(grad.dtype) - out_BHLE)).sum(-1)
    found = torch.autograd.grad(
        (out_tile, lse_tile),
        [*leaves, *learned],
        (grad.to(out_tile.dtype), grad_lse.to(lse_tile.dtype)),
        allow_unused=True,
    )
    dq, dk, dv, *shares = (
        torch.zeros_like(x) if dx is None else dx for x, dx in zip([*leaves, *learned], found, strict=True)
    )
    return dq, dk, dv, shares


class _Fused:
    """A tile on a device on which torch's kernel returns the logsumexp."""

    def __init__(
        self, kernel: CompiledFlexKernel, *, causal: bool, bias: torch.Tensor | None, scale: float, where: Where
    ) -> None:
        self._kernel, self._causal, self._scale, self._where = kernel, causal, scale, where
        self._bias = None if bias is None else bias[(None,) * (4 - bias.ndim)]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, lse)``. lse is -inf for a query without keys."""
        kernel, where = self._kernel, self._where
        head = tensor_on(q.device, where.head)
        place = (where.q_L, where.kv_M, head, self._bias)
        return self._run(_fused, q, k, v, kernel.score_mod, *place, self._causal, self._scale)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        mod = self._kernel.score_mod
        variant = getattr(mod, "__code__", type(mod)), self._causal, self._bias is None, torch.is_grad_enabled()
        return _compiled(function, *variant)(*args)


class _OnCpu(_Fused):
    """A tile on CPU. See [Note: logsumexp on CPU]."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``(out, lse)``, or None if the logsumexp of some query cannot be computed."""
        kernel, where, bias = self._kernel, self._where, self._bias
        q, k, v = (x.detach().float() for x in (q, k, v))  # torch refuses tensors that require grad on CPU
        guess = self._guess(q, k, v)
        dim = v.shape[3]
        keys = F.pad(k, (0, 0, 0, 1))
        values = F.pad(v, (0, 2, 0, 1))
        values[:, :, :-1, dim] = 1.0
        values[:, :, -1, dim + 1] = 1.0
        found = self._run(
            _with_key,
            q,
            keys,
            values,
            guess,
            kernel.score_mod,
            where.q_L,
            torch.cat((where.kv_M, where.kv_M[-1:])),  # a position that exists, because a score_mod may index with it
            torch.tensor(where.head),
            None if bias is None else F.pad(bias.float(), (0, 1 if bias.shape[3] > 1 else 0)),
            self._causal,
            self._scale,
        )
        out, real, other = found.split((dim, 1, 1), -1)
        real_BHL, other_BHL = real.squeeze(-1), other.squeeze(-1)
        lse = guess + torch.log(real_BHL) - torch.log(other_BHL)
        hidden = torch.zeros_like(lse, dtype=torch.bool)
        if bias is not None:
            hidden = hidden | (bias == float("-inf")).all(-1)
        known = hidden | (real_BHL > _LEAST_SHARE) & (other_BHL > _LEAST_SHARE)
        if not known.all():  # also if it is NaN
            return None
        return (out / real).masked_fill(hidden.unsqueeze(-1), 0.0), lse.masked_fill(hidden, float("-inf"))

    def _guess(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Logsumexp of some of the keys: [B, H, L]. 0 for queries that attend to none of them."""
        queries, keys = q.shape[2], k.shape[2]
        some = torch.linspace(0, keys - 1, min(keys, _GUESSED_FROM)).long()
        bias = self._bias
        if bias is not None and bias.shape[3] > 1:
            bias = bias[..., some]
        if self._causal:
            bias = torch.zeros(queries, len(some)).masked_fill_(torch.arange(queries)[:, None] < some, float("-inf"))
        where = self._where._replace(kv_M=self._where.kv_M[some])
        _, lse = FlexKernel.forward(
            self._kernel, q, k[:, :, some], v[:, :, some], causal=False, bias=bias, scale=self._scale, where=where
        )
        return lse.masked_fill(lse <= EMPTY_LSE / 2, 0.0)


def _of_tile(
    mod: ScoreMod,
    q_L: torch.Tensor,
    kv_M: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
) -> ScoreMod:
    """``mod`` with global positions, and with the masks of the tile."""

    def tile_mod(score, b, h, q_idx, kv_idx):
        score = mod(score, b, h + head, q_L[q_idx], kv_M[kv_idx])
        if bias is not None:
            indices = zip((b, h, q_idx, kv_idx), bias.shape, strict=True)
            b, h, row, column = (index * 0 if size == 1 else index for index, size in indices)
            added = bias[b, h, row, column]
            score = torch.where(added == float("-inf"), float("-inf"), score + added)
        return torch.where(q_idx >= kv_idx, score, float("-inf")) if causal else score

    return tile_mod


def _fused(q, k, v, mod, q_L, kv_M, head, bias, causal, scale):
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=_of_tile(mod, q_L, kv_M, head, bias, causal),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _with_key(q, k, v, logits_BHL, mod, q_L, kv_M, head, bias, causal, scale):
    last = k.shape[2] - 1
    tile_mod = _of_tile(mod, q_L, kv_M, head, bias, causal)

    def with_key(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx == last, logits_BHL[b, h, q_idx], tile_mod(score, b, h, q_idx, kv_idx))

    return flex_attention(q, k, v, score_mod=with_key, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


_compile = partial(torch.compile, fullgraph=True)


@lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], *variant: Hashable) -> Callable[..., Any]:
    """``function``, compiled for one variant.

    torch limits how often it recompiles a code object. A variant needs a graph of its own anyway, so it gets a copy of
    the code.
    """
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    # Sizes may be symbolic, except on CPU. There torch generates code that does not compile for some sizes of tensors
    # that a score_mod reads ("ks1" is replaced in "ks12": seen on 2.13).
    return _compile(copy, dynamic=False if function is _with_key else None)
