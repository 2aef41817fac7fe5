"""What torch's compiled flex_attention does on CUDA, in plain torch ops, for one tile; and what it refuses.

The rules are those of torch 2.11 to 2.15; each names the place in torch's sources that it was read in. Beside float16,
bfloat16 and float32 it takes float64, so that what is exact can be told from what is nearly right.

Shapes: B batch, H query heads, G key/value heads, L queries, M keys, D head dim, E value head dim.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.overrides import TorchFunctionMode

from cp_styles.functions import flex as door
from cp_styles.kernels import flex_compiled
from tests.cuda_ops import KernelError


@contextlib.contextmanager
def compiled_flex_on_cpu() -> Iterator[Counter[str]]:
    """Tiles of compiled flex_attention go to the stand-in, for CPU tensors too. Counts its forwards and backwards."""
    calls: Counter[str] = Counter()

    def takes(q_BHLD: torch.Tensor, v_BGME: torch.Tensor) -> bool:
        return min(q_BHLD.shape[3], v_BGME.shape[3]) >= 16

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_compiled, "_compile", lambda function: function)
        patch.setattr(flex_compiled, "flex_attention", lambda *args, **options: _attend(calls, *args, **options))
        patch.setattr(door, "compiled_takes", takes)
        flex_compiled._compile_variant.cache_clear()
        try:
            yield calls
        finally:
            flex_compiled._compile_variant.cache_clear()


def _demand(condition: bool, message: str, kind: type[Exception] = KernelError) -> None:
    if not condition:
        raise kind(message)


def _attend(
    calls: Counter[str],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Callable[..., torch.Tensor],
    scale: float,
    enable_gqa: bool,
    return_aux: AuxRequest,
) -> tuple[torch.Tensor, AuxOutput]:
    # nn/attention/flex_attention.py and _inductor/kernel/flex/flex_attention.py
    _demand(q.dtype == k.dtype == v.dtype, "mixed query, key, and value dtype is not supported", ValueError)
    _demand(q.shape[3] == k.shape[3], "query and key must have the same embedding dimension", ValueError)
    _demand(q.shape[0] == k.shape[0], "Bq and Bkv must broadcastable", ValueError)
    _demand(q.shape[1] == k.shape[1] or enable_gqa, "query and key/value heads", ValueError)
    _demand(q.shape[1] % k.shape[1] == 0, "query heads must be a multiple of key/value heads", ValueError)
    _demand(min(q.shape[3], v.shape[3]) >= 16, "NYI: embedding dimension must be at least 16", NotImplementedError)
    _demand(0 not in (*q.shape, *k.shape, *v.shape), "empty")
    _demand(return_aux.lse and not return_aux.max_scores, "only the logsumexp is asked for here")
    calls["forward"] += 1
    share = q.shape[1] // k.shape[1]
    logits: torch.Tensor = _Logits.apply(q, k, scale, share, calls)  # pyright: ignore[reportAssignmentType]
    places = [
        torch.arange(size, dtype=torch.int32, device=q.device).view([-1 if at == dim else 1 for at in range(4)])
        for dim, size in enumerate(logits.shape)
    ]
    with _OneIndexEach() if torch.is_grad_enabled() else contextlib.nullcontext():
        scores = score_mod(logits, *places)
    out, lse = _Softmax.apply(scores.to(logits.dtype), v, share)  # pyright: ignore[reportGeneralTypeIssues]
    return out, AuxOutput(lse=lse, max_scores=None)


class _OneIndexEach(TorchFunctionMode):
    """validate_joint_graph: a backward into a tensor that score_mod indexes twice is refused."""

    def __init__(self) -> None:
        super().__init__()
        self._indexed: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and args[0].is_leaf and args[0].requires_grad:
            message = "Using multiple indexing operations on the same tensor that requires gradients"
            _demand(id(args[0]) not in self._indexed, message, NotImplementedError)
            self._indexed.add(id(args[0]))
        return func(*args, **(kwargs or {}))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to ``dtype``, as what a matrix product on tensor cores is given."""
    return _wide(x.to(dtype))


class _Logits(torch.autograd.Function):
    """q k^T scale, of which the kernel keeps float32. Gradients of logits are rounded to the inputs' dtype."""

    @staticmethod
    def forward(ctx, q, k, scale: float, share: int, calls: Counter[str]):
        ctx.save_for_backward(q, k)
        ctx.scale, ctx.share, ctx.calls = scale, share, calls
        return _wide(q) @ _wide(k).repeat_interleave(share, 1).mT * scale

    @staticmethod
    def backward(ctx, grad):
        ctx.calls["backward"] += 1
        q, k = ctx.saved_tensors
        ds = _as(grad, q.dtype)
        dq = ds @ _wide(k).repeat_interleave(ctx.share, 1) * ctx.scale
        dk = (ds.mT @ _wide(q) * ctx.scale).unflatten(1, (k.shape[1], -1)).sum(2)  # templates/flex_backwards.py.jinja
        return dq.to(q.dtype), dk.to(k.dtype), None, None, None


class _Softmax(torch.autograd.Function):
    """``(out, lse)``. A row that sees nothing has out 0 and lse -inf, and no gradients."""

    @staticmethod
    def forward(ctx, scores, v, share: int):
        dtype = v.dtype
        most = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - most.masked_fill(most == -math.inf, 0.0))
        total = p.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0.0, 1.0)
        out = (_as(p, dtype) @ _wide(v).repeat_interleave(share, 1) / total).to(dtype)
        lse = (most + torch.log(total)).squeeze(-1)
        ctx.save_for_backward(scores, v, out, lse)
        ctx.share = share
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        scores, v, out, lse = ctx.saved_tensors
        _demand(grad.dtype == out.dtype, "grad_out has the dtype of out")
        grad, lse = _wide(grad), lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
        p = torch.exp(scores - lse)
        delta = (grad * _wide(out)).sum(-1, keepdim=True) - grad_lse.unsqueeze(-1)
        dv = (_as(p, v.dtype).mT @ grad).unflatten(1, (v.shape[1], -1)).sum(2)
        return p * (grad @ _wide(v).repeat_interleave(ctx.share, 1).mT - delta), dv.to(v.dtype), None
