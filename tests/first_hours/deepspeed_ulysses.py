"""Attention with all-to-alls over heads by hand, as DeepSpeed-Ulysses has it, with tensors [B, S, H, D]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import Causal, Ulysses, context_attention, contiguous, sum_gradients

REFUSAL = r"layout cuts|disagree on shape"
HIDDEN = torch.randn(1, 13, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Attention(nn.Module):
    """Three heads, which two ranks cannot share evenly: DeepSpeed refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 72), nn.Linear(24, 16)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, 3, 8)).unbind(2)  # each [B, S, H, D]


def model() -> nn.Module:
    return Attention().double()


def alone(model: nn.Module) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in model.heads(HIDDEN))
    loss = model.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).square().sum()
    loss.backward()
    return loss


def before(model: nn.Module, mesh: DeviceMesh) -> None:
    layout = contiguous(13, mesh.size())
    q, k, v = model.heads(layout.shard(HIDDEN, 1, mesh.get_local_rank()))
    context_attention(q, k, v, mesh, mask=Causal(), layout=layout, strategy=Ulysses())


def after(model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    layout = contiguous(13, mesh.size())
    q, k, v = model.heads(layout.shard(HIDDEN, 1, mesh.get_local_rank()))
    out = context_attention(q, k, v, mesh, mask=Causal(), layout=layout, strategy=Ulysses(), seq_dim=1)
    share = model.out(out.flatten(2)).square().sum()
    share.backward()
    sum_gradients(model, mesh)
    torch.distributed.all_reduce(total := share.detach().clone(), group=mesh.get_group())
    return total
