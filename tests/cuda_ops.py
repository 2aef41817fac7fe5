"""What torch's CUDA attention ops do, in plain torch ops on CPU: they read memory as the kernels do, refuse what the
kernels refuse, and leave what the kernels leave.

Each is registered under its own schema, so arguments are checked by torch itself. Where a kernel takes a pointer and
assumes strides, memory is read so here, whatever the tensor's strides say. Beside float16 and bfloat16 they take
float64, so that what is exact can be told from what is nearly right.

The rules are those of torch 2.11 to 2.15; each names the place in torch's sources that it was read in.

Shapes: B batch, H query heads, G key/value heads, L queries, M keys, D head dim, E value head dim.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from cp_styles.kernels import ReferenceKernel, SdpaKernel
from cp_styles.kernels.choice_by_tile import ByTile
from cp_styles.kernels.sdpa import CUDA_CUDNN, CUDA_EFFICIENT, CUDA_EFFICIENT_FLOAT32, CUDA_FLASH
from tests.varlen_op import varlen_backward, varlen_forward

NAN = math.nan
K = TypeVar("K", bound=SdpaKernel)


def on_cpu(kernel: K) -> K:
    """The kernel of a CUDA op, as it is but for the device: its op must be one of :func:`cuda_ops_on_cpu`."""
    return replace(kernel, device_type="cpu", dtypes=(torch.float64, *kernel.dtypes))


FLASH, EFFICIENT, CUDNN = on_cpu(CUDA_FLASH), on_cpu(CUDA_EFFICIENT), on_cpu(CUDA_CUDNN)
EFFICIENT_FLOAT32 = on_cpu(CUDA_EFFICIENT_FLOAT32)
REFERENCE = ReferenceKernel()
# What a call on CUDA gets: see kernel_for_tiles. The second is for a user who names cuDNN.
DEFAULT = ByTile((FLASH, EFFICIENT, REFERENCE), (EFFICIENT, REFERENCE))
ON_GPU = ByTile(  # the first, for tensors of tests/gpu_tensors.py
    tuple(replace(kernel, device_type="cuda") for kernel in (FLASH, EFFICIENT)),
    (replace(EFFICIENT, device_type="cuda"), REFERENCE),
)
NAMED_CUDNN = ByTile((CUDNN, FLASH, EFFICIENT, REFERENCE), (CUDNN, EFFICIENT, REFERENCE))


class Seen:
    """The ops that were called; how often flash copied out or its gradient; and cuDNN's plans: what each was built for,
    and the strides of out and its gradient."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.copies = 0
        self.plans: dict[tuple, tuple] = {}


class KernelError(RuntimeError):
    """What a TORCH_CHECK of a kernel raises, or what ends a program on a GPU."""


@contextlib.contextmanager
def cuda_ops_on_cpu() -> Iterator[Seen]:
    """The ops behind the CUDA kernels, for CPU tensors, on all threads."""
    library, seen = torch.library.Library("aten", "IMPL"), Seen()
    counting = threading.Lock()  # ranks are threads

    def counted(name, function):
        def run(*args, **options):
            with counting:
                seen.calls[name] += 1
            return function(*args, **options)

        return run

    def flash_backward(grad, q, k, v, out, *args, **options):
        # attention_backward.cu, _flash_attention_backward: contiguous() of [B, L, H, D]
        with counting:
            seen.copies += sum(not x.transpose(1, 2).is_contiguous() for x in (grad, out))
        return _flash_backward(grad, q, k, v, out, *args, **options)

    def cudnn_backward(*args, **options):
        return _cudnn_backward(seen.plans, *args, **options)

    ops = {
        "_scaled_dot_product_flash_attention": _flash_forward,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient_forward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
        "_flash_attention_forward": varlen_forward,
        "_flash_attention_backward": varlen_backward,
    }
    try:
        for name, function in ops.items():
            library.impl(name, counted(name, function), "CPU")
        yield seen
    finally:
        library._destroy()


# -- what all of them have in common --


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise KernelError(message)


def _memory(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """What a kernel finds that has been given the pointer, and takes the strides for granted."""
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    _demand(
        last < tensor.untyped_storage().nbytes() // tensor.element_size(), "reads beyond the end of a tensor's memory"
    )
    return tensor.as_strided(shape, strides)


def _rows_of(*tensors: torch.Tensor) -> None:
    """Kernels load rows in pieces of 16 bytes: an address that is no multiple of it ends the program."""
    for tensor in tensors:
        _demand(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        places = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        misaligned = [place for place in places if place * tensor.element_size() % 16]
        _demand(not misaligned and tensor.data_ptr() % 16 == 0, "misaligned address")


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _new(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_full(shape, math.nan, dtype=dtype)


def _by_rows(x_BHLD: torch.Tensor) -> torch.Tensor:
    """[B, L, H, D] in memory."""
    return x_BHLD.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_like(gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradients in the memory order of the inputs, dense, also where an input is a slice: ``at::empty_like``."""
    return tuple(torch.empty_like(x).copy_(grad) for grad, x in zip(gradients, inputs, strict=True))


def _logits(q, k, bias, causal: bool, scale: float, *, bottom_right: bool = False) -> torch.Tensor:
    logits = q.to(_wide(q)) @ _heads(k, q).mT * scale
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if causal:
        queries, keys = logits.shape[-2:]
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if bottom_right else 0)
        logits = logits.masked_fill(~visible, -math.inf)
    return logits


def _heads(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return kv.to(_wide(kv)).repeat_interleave(q.shape[1] // kv.shape[1], 1)


def _attend(q, k, v, bias, causal: bool, scale: float, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)``: probabilities are rounded to the inputs' dtype before they meet values. What is left of a row
    that sees nothing is nobody's business."""
    logits = _logits(q, k, bias, causal, scale, **how)
    lse = torch.logsumexp(logits, -1)
    most = logits.amax(-1, keepdim=True)
    p = torch.exp(logits - most)
    out = p.to(q.dtype).to(p.dtype) @ _heads(v, q) / p.sum(-1, keepdim=True)
    return _by_rows(out.to(q.dtype)), lse


def _differentiate(grad, q, k, v, out, lse, bias, causal: bool, scale: float, **how: bool) -> tuple[torch.Tensor, ...]:
    """``(dq, dk, dv)``; like flash, groups are summed in the inputs' dtype."""
    dtype, wide = q.dtype, _wide(q)
    p = torch.exp(_logits(q, k, bias, causal, scale, **how) - lse.unsqueeze(-1))
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    ds = (p * (grad.to(wide) @ _heads(v, q).mT - delta)).to(dtype).to(wide)
    dq = ds @ _heads(k, q) * scale
    dk = ds.mT @ q.to(wide) * scale
    dv = p.to(dtype).to(wide).mT @ grad.to(wide)
    dk, dv = (x.to(dtype).unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(dtype), dk, dv


def _check_flash(q, k, v, most: int = 256) -> None:
    """flash_attn/flash_api.cpp: mha_fwd and mha_bwd."""
    _demand(q.dtype in (torch.float16, torch.bfloat16, torch.float64), "FlashAttention only support fp16 and bf16")
    _demand(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    _demand(q.shape[3] == k.shape[3] == v.shape[3], "CHECK_SHAPE")
    _demand(q.shape[3] % 8 == 0 or q.dtype == torch.float64, "head_size must be a multiple of 8")
    _demand(q.shape[3] <= most, f"FlashAttention only supports head dimension at most {most}")
    _demand(q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1], "Number of heads")
    _demand(0 not in (*q.shape, *k.shape), "empty")
    _rows_of(q, k, v)


def _flash_forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale: float = NAN):
    assert dropout_p == 0.0
    assert not return_debug_mask
    _check_flash(q, k, v)
    out, lse = _attend(q, k, v, None, is_causal, scale, bottom_right=True)
    empty = torch.empty(0)
    return out, lse.contiguous(), empty, empty, q.shape[2], k.shape[2], torch.empty(2, dtype=torch.uint64), empty, empty


def _flash_backward(
    grad, q, k, v, out, lse, _cum_q, _cum_k, max_q, max_k, dropout_p, is_causal, *_seeds, scale: float = NAN
):
    """attention_backward.cu takes copies of out and its gradient that are laid out as the kernel reads them. mha_bwd
    makes each gradient in the memory order of its input."""
    assert dropout_p == 0.0
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    _check_flash(q, k, v)
    _demand(grad.dtype == out.dtype == q.dtype, "query and out must have the same dtype")
    _demand(grad.shape == out.shape == (*q.shape[:3], v.shape[3]), "CHECK_SHAPE")
    _demand(lse.dtype == _wide(q), "logsumexp is read as float")
    batch, heads, queries, _ = q.shape
    lse = _memory(lse, (batch, heads, queries), (heads * queries, queries, 1))
    return _laid_like(_differentiate(grad, q, k, v, out, lse, None, is_causal, scale, bottom_right=True), (q, k, v))


def _check_efficient(q, k, v, bias) -> None:
    """mem_eff_attention/kernel_forward.h and kernel_backward.h: check_supported; attention.cu for the bias."""
    _demand(q.dtype == k.dtype == v.dtype, "expected query, key and value of one dtype")
    _demand(q.shape[1] == k.shape[1] == v.shape[1], "query.size(2) == key.size(2)")  # until 2.14
    _demand(q.shape[3] == k.shape[3], "query.size(3) == key.size(3)")
    for x in (q, v):
        _demand(x.shape[3] * x.element_size() % 16 == 0, "requires last dimension of inputs to be divisible by 4 or 8")
    _rows_of(q, k, v)
    if bias is not None:
        _demand(bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype")
        _demand(tuple(bias.shape) == (*q.shape[:3], k.shape[2]), "attn_bias: wrong shape")
        _demand(bias.stride(3) == 1, "attn_bias: wrong alignment (last dimension must be contiguous)")
        _rows_of(bias)


_LSE_BLOCK = 32


def _efficient_forward(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale: float = NAN):
    assert dropout_p == 0.0
    _check_efficient(q, k, v, bias)
    out, lse = _attend(q, k, v, bias, is_causal, scale)
    room = -(-q.shape[2] // _LSE_BLOCK) * _LSE_BLOCK if compute_log_sumexp else 0
    padded = q.new_full((*q.shape[:2], room), math.inf, dtype=_wide(q))
    if compute_log_sumexp:
        padded[:, :, : q.shape[2]] = lse.masked_fill(lse == -math.inf, 0.0)  # kernel_forward.h: not -inf
    return out, padded, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)


def _efficient_backward(
    grad,
    q,
    k,
    v,
    bias,
    out,
    lse,
    _seed,
    _offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale: float = NAN,
):
    assert dropout_p == 0.0
    assert not grad_input_mask[3]
    _check_efficient(q, k, v, bias)
    batch, heads, queries, dim = *q.shape[:3], v.shape[3]
    _demand(grad.dtype == out.dtype == q.dtype, "expected out of the query's dtype")
    if q.dtype != torch.float32:
        # kernel_backward.h, Params::o_strideM: rows of out are H * E apart, whatever its strides are; where the kernel
        # makes no delta of them itself, torch does, and reads strides.
        _rows_of(out)
        strides = (out.stride(0), out.stride(1), heads * dim, 1)
        out = _memory(out, (batch, heads, queries, dim), strides)
    _demand(lse.dtype == _wide(q), "logsumexp is read as float")
    _demand(heads == 1 or lse.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)")
    _demand(batch == 1 or lse.stride(0) % 8 == 0, "LSE is not correctly aligned (strideB)")
    room = -(-queries // _LSE_BLOCK) * _LSE_BLOCK
    lse = _memory(lse, (batch, heads, room), (lse.stride(0), lse.stride(1), 1))
    # kernel_forward.h pads with infinity, and the backward has no other bound there: what is padded must weigh nothing.
    _demand(bool((lse[:, :, queries:] == math.inf).all()), "the logsumexp is not padded with infinity")
    gradients = _differentiate(grad, q, k, v, out, lse[:, :, :queries], bias, is_causal, scale)
    return *map(_by_rows, gradients), torch.empty(0)  # attention_backward.cu: at::empty([B, L, H, D])


def _check_cudnn(q, k, v) -> None:
    """sdp_utils.cpp: check_cudnn_tensor_shapes, with the head dims of cuDNN before 9.22. MHA.cpp before pull request
    175764: the output of an expanded query was laid out so that cuDNN refused it. Here nothing expanded is taken."""
    _demand(q.shape[3] <= 128 and v.shape[3] <= 128, "head_dim should be no more than 128")
    _demand(q.dtype == torch.float64 or not (q.shape[3] % 8 or v.shape[3] % 8), "head_dim should be a multiple of 8")
    _demand(k.shape[2] != 1, "cudnn SDPA does not support key/value sequence length 1")
    steps = [pair for x in (q, k, v) for pair in zip(x.shape, x.stride(), strict=True)]
    _demand(not any(size > 1 and not step for size, step in steps), "a stride of 0")
    _rows_of(q, k, v)


def _key(q, k, v, bias, causal: bool) -> tuple:
    """native/cudnn/MHA.cpp: what plans are found by; neither out's strides nor those of its gradient."""
    tensors = (q, k, v) if bias is None else (q, k, v, bias)
    return (*((tuple(x.shape), x.stride()) for x in tensors), q.dtype, causal)


def _cudnn_forward(
    q,
    k,
    v,
    bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale: float = NAN,
):
    assert dropout_p == 0.0
    assert not return_debug_mask
    _check_cudnn(q, k, v)
    out, lse = _attend(q, k, v, bias, is_causal, scale)
    lse = lse.masked_fill(lse == -math.inf, math.nan).unsqueeze(-1)
    order = sorted(range(4), key=lambda dim: (-q.stride(dim), dim))
    out = out.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    empty, seed = torch.empty(0), torch.empty((), dtype=torch.int64)
    return out, lse, empty, empty, q.shape[2], k.shape[2], seed, seed, empty


def _cudnn_backward(
    plans, grad, q, k, v, out, lse, _seed, _offset, bias, _cum_q, _cum_k, max_q, max_k, dropout_p, is_causal, *,
    scale: float = NAN,
):  # fmt: skip
    assert dropout_p == 0.0
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    _check_cudnn(q, k, v)
    _demand(tuple(lse.shape) == (*q.shape[:3], 1), "softmaxstats: [B, H, L, 1]")
    _rows_of(grad, out)
    strides = plans.setdefault(_key(q, k, v, bias, is_causal), (out.stride(), grad.stride()))
    out, grad = (_memory(x, x.shape, steps) for x, steps in zip((out, grad), strides, strict=True))
    lse = lse.squeeze(-1)
    dq, dk, dv = _differentiate(grad, q, k, v, out, lse, bias, is_causal, scale)
    if k.shape[2] % 128 == 64 and not is_causal:
        # Before 9.26: the second half of the last block of keys has logits of 0, not -inf, and keys of 0.
        dq = dq + (torch.exp(-lse.float()) * 0.0).unsqueeze(-1).to(dq.dtype)
    if q.shape[2] == 1:  # still in 9.26
        dk, dv = (x + torch.where(lse < 0, math.nan, 0.0).amax().to(x.dtype) for x in (dk, dv))
    return _laid_like((dq, dk, dv), (q, k, v))  # attention_backward.cu: at::empty_like
