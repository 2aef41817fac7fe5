"""Other implementations of context-parallel attention, for benchmarks.

torch's own ring comes with torch. ring-flash-attention and yunchang run where they can be imported
(``pip install --no-deps ring-flash-attn yunchang``). Both call the package flash_attn, which needs CUDA;
:func:`stand_in_for_flash_attn` puts a module of that name in front of them that calls torch's flash op for CPU. What it
adds to them: views, and for ring-flash-attention a copy of each gradient of a tile into the buffers that it passes,
because the op for CPU returns its results.
Results were compared with dense attention: equal, but for the gradients of ring-flash-attention in float32. It keeps
sums in buffers that it overwrites where the conversion to float32 makes no copy. The work, and its time, is the same.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_styles import contiguous, head_tail
from cp_styles.layouts import Balancer

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Peer(NamedTuple):
    """``attend`` is causal attention over the ranks of the default group, of parts cut by ``layout``.

    ``rows_first``: its tensors are [B, S, H, D], and not [B, H, S, D]. All are contiguous as [B, S, H, D].
    """

    attend: Attend
    layout: Balancer
    rows_first: bool


class TorchRing(torch.autograd.Function):
    """The ring of torch's context parallelism around its attention op for CPU."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: str = "alltoall") -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        _attention.set_rotate_method(method)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        group = dist.group.WORLD
        out, lse, *_ = _attention._templated_ring_attention(group, 2, op, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        q, k, v, out, lse = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        dq, dk, dv, *_ = _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, op, grads[0], "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return dq, dk, dv, None


def peers(name: str = "") -> tuple[dict[str, Peer], dict[str, str]]:
    """Peers that can be made here, by name, and the reasons why the rest cannot. ``name``: this peer alone.

    Peers that call flash_attn leave a stand-in for it in this process.
    """
    makers: dict[str, Callable[[], Peer]] = {
        "torch ring, all-gather": lambda: _torch_ring("allgather"),
        "torch ring, all-to-all": lambda: _torch_ring("alltoall"),
        "ring-flash-attention zigzag": _zigzag,
        "yunchang Ulysses": _yunchang,
    }
    found, missing = {}, {}
    for each, make in makers.items() if not name else [(name, makers[name])]:
        try:
            found[each] = make()
        except (ImportError, AttributeError) as error:
            missing[each] = f"{type(error).__name__}: {error}"
    return found, missing


def _torch_ring(method: str) -> Peer:
    importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    return Peer(lambda q, k, v: TorchRing.apply(q, k, v, method), head_tail, False)  # pyright: ignore[reportReturnType]


@cache
def _zigzag() -> Peer:
    stand_in_for_flash_attn()
    spec = importlib.util.find_spec("ring_flash_attn")
    if spec is None:
        raise ImportError("No module named 'ring_flash_attn'")
    # Without its __init__, which also wants transformers.
    package = types.ModuleType("ring_flash_attn")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["ring_flash_attn"] = package
    function = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    return Peer(partial(function, causal=True), head_tail, True)


def _yunchang() -> Peer:
    stand_in_for_flash_attn()
    attention = importlib.import_module("yunchang.ulysses").UlyssesAttention(dist.group.WORLD)
    return Peer(partial(attention, causal=True), contiguous, True)


@cache
def stand_in_for_flash_attn() -> None:
    """Let ``import flash_attn`` find a module whose attention is torch's, of [B, S, H, D]. For this process."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    # ring-flash-attention passes arguments by the names that these have; yunchang wants them to be there.
    def forward(q, k, v, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, **others):
        out, lse = op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        **others,
    ):
        tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        grads = backward_op(*tensors, softmax_lse, 0.0, causal, scale=softmax_scale)
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place.copy_(grad.transpose(1, 2))

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **others):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    for name, value in {
        "_flash_attn_forward": forward,
        "_flash_attn_backward": backward,
        "_flash_attn_varlen_forward": forward,  # imported, and not called here
        "_flash_attn_varlen_backward": backward,
        "flash_attn_func": flash_attn_func,
    }.items():
        setattr(interface, name, value)
        setattr(package, name, value)
    package.__dict__.update(flash_attn_interface=interface, __version__="2.7.0", __spec__=None)
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})
