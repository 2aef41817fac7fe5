"""What torch's CUDA varlen flash op does, in plain torch ops on CPU, with what it checks and what it only assumes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles._lib.compat import run_kernel
from cp_styles.kernels import VarlenKernel

# What stands for CUDA_FLASH: tiles alone go to torch's CPU kernel, packs to aten's varlen ops, which torch has on CUDA
# only, and here below.
STAND_IN = VarlenKernel(
    "_scaled_dot_product_flash_attention_for_cpu", "cpu", (torch.float64, torch.float32, torch.bfloat16)
)


# The names of aten's varlen ops, and of what tiles go to one by one.
PACKED = ("aten::_flash_attention_forward", "aten::_flash_attention_backward")
ALONE = (STAND_IN.forward_op.name(), f"{STAND_IN.forward_op.name()}_backward")


class Ops(TorchDispatchMode):
    """The attention ops that were called, and the arguments of the last call of each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.seen: dict[str, dict] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.name():
            names = (argument.name for argument in func._schema.arguments)
            self.counts[func.name()] += 1
            self.seen[func.name()] = dict(zip(names, args, strict=False)) | (kwargs or {})
        if func.namespace == "cp_styles":  # opaque otherwise
            with self:
                return run_kernel(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def varlen_ops_on_cpu() -> Iterator[None]:
    """aten's varlen flash ops, under their own schemas, for CPU tensors, on all threads."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", varlen_forward, "CPU")
        library.impl("_flash_attention_backward", varlen_backward, "CPU")
        yield
    finally:
        library._destroy()


def varlen_forward(
    q,
    k,
    v,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **unused,
):
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert set(unused.values()) <= {None}
    if cum_seq_q is None:
        return _forward_alone(
            q, k, v, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale,
            window_size_left=window_size_left, window_size_right=window_size_right,
        )  # fmt: skip
    sees = is_causal, window_size_left, window_size_right
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q))
    for rows, columns, hidden in _documents(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, *sees):
        logits = _logits(q[rows], k[columns], hidden, scale)
        lse[:, rows] = torch.logsumexp(logits, -1)
        out[rows] = (torch.softmax(logits, -1) @ _heads_first(v[columns], q)).transpose(0, 1).to(q.dtype)
    empty = torch.empty(0)
    return out, lse, torch.empty(2, dtype=torch.uint64), empty, empty


def varlen_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    _,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **unused,
):
    assert dropout_p == 0.0
    assert set(unused.values()) <= {None}
    if cum_seq_q is None:
        return _backward_alone(
            grad, q, k, v, out, lse, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, _, scale=scale,
            window_size_left=window_size_left, window_size_right=window_size_right,
        )  # fmt: skip
    sees = is_causal, window_size_left, window_size_right
    assert grad.dtype == out.dtype == q.dtype
    assert grad.shape == out.shape == q.shape
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == _wide(q)
    assert lse.is_contiguous()  # the CUDA kernel takes the pointer
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for rows, columns, hidden in _documents(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, *sees):
        q_HLD, grad_HLD, out_HLD = (x[rows].transpose(0, 1).to(lse.dtype) for x in (q, grad, out))
        k_HMD, v_HMD = (_heads_first(x[columns], q) for x in (k, v))
        p = torch.exp(_logits(q[rows], k[columns], hidden, scale) - lse[:, rows].unsqueeze(-1))
        ds = p * (grad_HLD @ v_HMD.mT - (grad_HLD * out_HLD).sum(-1, keepdim=True)) * scale
        dq[rows] = (ds @ k_HMD).transpose(0, 1).to(q.dtype)
        for target, gradient in ((dk, ds.mT @ q_HLD), (dv, p.mT @ grad_HLD)):
            target[columns] = gradient.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1).to(q.dtype)
    return dq, dk, dv


_ALL = 2**30


def _bounds(batch: int, rows: int, other) -> torch.Tensor:
    assert other is None  # both or none
    return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32)


def _forward_alone(q, k, v, cum_seq_k, max_q, max_k, *rest, **options):
    """Without bounds: [B, L, H, D] of any strides but for the last. The results are laid out as the kernel does it."""
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    bounds = [_bounds(*x.shape[:2], cum_seq_k) for x in (q, k)]
    pack = (x.flatten(0, 1) for x in (q, k, v))
    out, lse, *others = varlen_forward(*pack, *bounds, max_q, max_k, *rest, **options)
    lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return torch.empty_like(q).copy_(out.view(q.shape)), lse, *others


def _backward_alone(grad, q, k, v, out, lse, cum_seq_k, max_q, max_k, *rest, **options):
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.is_contiguous()  # the CUDA kernel takes the pointer
    bounds = [_bounds(*x.shape[:2], cum_seq_k) for x in (q, k)]
    pack = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    lse = lse.transpose(0, 1).flatten(1).contiguous()
    gradients = varlen_backward(*pack, lse, *bounds, max_q, max_k, *rest, **options)
    return tuple(torch.empty_like(x).copy_(y.view(x.shape)) for x, y in zip((q, k, v), gradients, strict=True))


def _documents(
    q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, causal, left, right
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows of each document, its keys, and which pairs of it are hidden; none of them may be left out."""
    assert q.ndim == 3
    assert k.shape == v.shape
    assert q.shape[2] == k.shape[2] <= 256
    assert q.shape[2] % 8 == 0 or q.dtype in (torch.float32, torch.float64)  # which the CUDA kernel does not take
    assert q.shape[1] % k.shape[1] == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    bounds = []
    for cum, tensor in ((cum_seq_q, q), (cum_seq_k, k)):
        assert cum.dtype == torch.int32
        assert cum.is_contiguous()
        assert cum.device == tensor.device
        assert int(cum[0]) == 0
        assert int(cum[-1]) == tensor.shape[0]
        bounds.append(cum.tolist())
    assert max_q > 1  # the CUDA kernel has another way for 1
    # flash_api.cpp: -1 or more than all keys is no window; causal is a window of 0 on the right.
    left, right = (_ALL if size is None or not 0 <= size < max_k else size for size in (left, right))
    right = 0 if causal else right
    for q_start, q_stop, k_start, k_stop in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        queries, keys = q_stop - q_start, k_stop - k_start
        assert 0 < queries <= max_q
        assert 0 < keys <= max_k
        # Aligned at the bottom right, as the op does it; SDPA aligns at the top left.
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + right).triu(keys - queries - left)
        assert bool(visible.any(1).all())  # what is left of a row that sees nothing is nobody's business
        yield slice(q_start, q_stop), slice(k_start, k_stop), ~visible
    assert len(bounds[0]) == len(bounds[1])


def _logits(q_LHD: torch.Tensor, k_MGD: torch.Tensor, hidden: torch.Tensor, scale: float | None) -> torch.Tensor:
    assert scale is not None
    logits = q_LHD.transpose(0, 1).to(_wide(q_LHD)) @ _heads_first(k_MGD, q_LHD).mT * scale
    return logits.masked_fill(hidden, float("-inf"))


def _heads_first(kv_MGD: torch.Tensor, q_LHD: torch.Tensor) -> torch.Tensor:
    """[H, M, D]: a head for each of the query's."""
    return kv_MGD.transpose(0, 1).to(_wide(kv_MGD)).repeat_interleave(q_LHD.shape[1] // kv_MGD.shape[1], 0)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
