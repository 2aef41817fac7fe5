"""A ring with nothing around it: what the schedule of a ring costs on this machine, whoever runs it.

The bytes are those of ``Ring()`` under ``head_tail``: the keys of one source are kept for the backward, those of the
others are sent again. With more than two ranks it sends all gradients of a source at once, where ``Ring()`` sends some
in groups of heads, and holds more memory. There is no style, no check of an argument, no agreement of ranks, and
nothing but what causal attention of equal parts needs. So what it costs above the ideal is the price of
kernels on tiles, of merging them and of gloo's messages. What ``Ring()`` costs above it is the price of doors, checks
and agreement, and with more than two ranks of groups.

Results were compared with dense attention: equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from cp_styles.kernels import Kernel


class BareRing(torch.autograd.Function):
    """Of this rank's first and last chunk of q, k and v [B, H, L, D], with as many key heads as query heads."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        rank, ranks, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2
        scale = 1 / math.sqrt(q.shape[3])
        keys = _Keys(k, v)
        keys.start(1)
        out, lse = kernel.forward(q, k, v, causal=True, bias=None, scale=scale)
        for distance in range(1, ranks):
            if distance + 1 < ranks:
                keys.start(distance + 1)
            their_k, their_v = keys.wait(distance)
            rows = slice(0 if rank >= distance else half, None)  # of the queries that attend to them
            other, other_lse = kernel.forward(q[:, :, rows], their_k, their_v, causal=False, bias=None, scale=scale)
            share = torch.sigmoid(other_lse - lse[:, :, rows]).unsqueeze(-1)
            out[:, :, rows].lerp_(other, share)
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], other_lse)
            if distance == 1:
                ctx.kept = their_k, their_v
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        (grad,) = grads
        rank, ranks, half, group = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2, dist.group.WORLD
        keys = _Keys(k, v)
        if ranks > 2:
            keys.start(2)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        under_way: list[Any] = []

        def settle() -> None:
            if under_way:
                works, rows, (their_dk, their_dv), _ = under_way.pop()
                for work in works:
                    work.wait()
                dk[:, :, rows] += their_dk.transpose(1, 2)
                dv[:, :, rows] += their_dv.transpose(1, 2)

        for distance in (1, 0, *range(2, ranks)):
            if distance == 0:
                options = {"causal": True, "bias": None, "scale": ctx.scale}
                for total, part in zip(
                    (dq, dk, dv), ctx.kernel.backward(grad, q, k, v, out, lse, **options), strict=True
                ):
                    total += part
                continue
            if 1 < distance < ranks - 1:
                keys.start(distance + 1)
            their_k, their_v = ctx.kept if distance == 1 else keys.wait(distance)
            rows = slice(0 if rank >= distance else half, None)
            part, *found = ctx.kernel.backward(
                *(x[:, :, rows] for x in (grad, q)),
                their_k,
                their_v,
                out[:, :, rows],
                lse[:, :, rows],
                causal=False,
                bias=None,
                scale=ctx.scale,
            )
            dq[:, :, rows] += part
            settle()
            source, peer = (rank - distance) % ranks, (rank + distance) % ranks
            sent = [x.transpose(1, 2).contiguous() for x in found]
            mine = slice(None) if peer < rank else slice(0, half)
            received = [
                torch.empty_like(x[:, :, mine].transpose(1, 2), memory_format=torch.contiguous_format) for x in (k, v)
            ]
            works = [*(group.send([x], source, 0) for x in sent), *(group.recv([x], peer, 0) for x in received)]
            under_way.append((works, mine, received, sent))
        settle()
        return dq, dk, dv, None


class _Keys:
    """The keys and values that travel: for each distance d, from the rank d before this one."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._k, self._v = k, v
        self._under_way: dict[int, Any] = {}

    def start(self, distance: int) -> None:
        rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        half, (source, peer) = self._k.shape[2] // 2, ((rank - distance) % ranks, (rank + distance) % ranks)
        # A rank attends to the first chunk of a rank before it, and with its last chunk to both of a rank after it.
        sent = torch.stack([x if peer < rank else x[:, :, :half] for x in (self._k, self._v)])
        rows = half if source < rank else 2 * half
        received = sent.new_empty(2, *self._k.shape[:2], rows, self._k.shape[3])
        works = group.send([sent], peer, 0), group.recv([received], source, 0)
        self._under_way[distance] = works, received, sent

    def wait(self, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
        works, received, _ = self._under_way.pop(distance)
        for work in works:
            work.wait()
        return received[0], received[1]
