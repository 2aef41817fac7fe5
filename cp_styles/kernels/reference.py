"""The reference kernel: attention in plain torch ops, for any device, dtype, head dims and bias. Slow and simple."""

from __future__ import annotations

import torch

from cp_styles.kernels.autocast import without_autocast
from cp_styles.kernels.base import Kernel
from cp_styles.kernels.merge import EMPTY_LSE, accumulation_dtype


class ReferenceKernel(Kernel):
    """Materializes the logits of a tile in the accumulation dtype (float32, or float64 for float64).

    Example::

        style = AttentionContextParallel(kernel=ReferenceKernel())
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale):
        with without_autocast(q_BHLD.device):
            logits_BGRLM = self._logits(q_BHLD, k_BGMD, causal, bias, scale)
            lse = torch.logsumexp(logits_BGRLM, -1)
            lse = lse.masked_fill(lse == float("-inf"), EMPTY_LSE)
            out = matmul(torch.exp(logits_BGRLM - lse.unsqueeze(-1)), v_BGME.to(lse.dtype).unsqueeze(2))
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale):
        dtype = accumulation_dtype(q_BHLD.dtype)
        groups = (k_BGMD.shape[1], -1)
        q, grad, out = (x.to(dtype).unflatten(1, groups) for x in (q_BHLD, grad_BHLE, out_BHLE))
        k, v = (x.to(dtype).unsqueeze(2) for x in (k_BGMD, v_BGME))
        lse = lse_BHL.to(dtype).unflatten(1, groups).unsqueeze(-1)
        with without_autocast(q.device):
            p = torch.exp(self._logits(q_BHLD, k_BGMD, causal, bias, scale) - lse)
            ds = p * (matmul(grad, v.mT) - (grad * out).sum(-1, keepdim=True)) * scale
            return matmul(ds, k).flatten(1, 2), matmul(ds.mT, q).sum(2), matmul(p.mT, grad).sum(2)

    def check(self, q_BHLD, k_BGMD, v_BGME, *, biased):
        pass

    def tile_dtype(self, dtype):
        return accumulation_dtype(dtype)

    @staticmethod
    def _logits(q_BHLD, k_BGMD, causal, bias, scale):
        dtype = accumulation_dtype(q_BHLD.dtype)
        groups = k_BGMD.shape[1]
        logits = matmul(q_BHLD.to(dtype).unflatten(1, (groups, -1)), k_BGMD.to(dtype).mT.unsqueeze(2)) * scale
        if bias is not None:
            bias = bias.to(dtype).expand(q_BHLD.shape[0], q_BHLD.shape[1], *logits.shape[-2:])
            logits = logits + bias.unflatten(1, (groups, -1))
        if causal:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(future, float("-inf"))
        return logits


# The bits of a float32 that TF32 keeps: 10 bits of the fraction.
_KEPT = ~0x1FFF


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in the full precision of the dtype."""
    # If the user allows TF32 (``torch.set_float32_matmul_precision``), a GPU rounds the inputs of a float32 product to
    # TF32. Then each input is split into two parts that TF32 represents, and three products of parts are added.
    if a.dtype != torch.float32 or a.device.type != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return a @ b
    (a_high, a_low), (b_high, b_low) = _parts(a), _parts(b)
    return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 11 bits of each number, which TF32 represents, and the remaining 13 bits, of which TF32 keeps 11."""
    high = (x.view(torch.int32) & _KEPT).view(torch.float32)
    return high, x - high
