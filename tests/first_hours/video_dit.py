"""A video model that makes its own tokens: patches by a convolution over the whole video."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from cp_styles.collectives import gather, split

REFUSAL = r"mix"
VIDEO = torch.randn(1, 3, 6, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(3, 16, (3, 2, 2), (1, 2, 2), (1, 0, 0))  # overlaps in time
        self.layers, self.last = nn.ModuleList([Layer(), Layer()]), nn.Linear(16, 12)

    def embed(self, video):
        return self.patches(video).flatten(2).transpose(1, 2)

    def forward(self, video):
        x = self.embed(video)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def model() -> nn.Module:
    return DiT().double()


def alone(model: nn.Module) -> torch.Tensor:
    loss = model(VIDEO).square().mean()
    loss.backward()
    return loss


def before(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank is given a part of the frames."""
    parallelize_module(model, mesh, ModuleContextParallel())
    model(head_tail(6, mesh.size()).shard(VIDEO, 2, mesh.get_local_rank()))


def after(model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    """The patches are made of the whole video. The tokens are cut behind that, and put together before the loss."""
    parallelize_module(model, mesh, {"layers.*": ModuleContextParallel()})
    x = model.embed(VIDEO)
    layout = head_tail(x.shape[1], mesh.size())
    x = split(x, 1, mesh, layout=layout)
    for layer in model.layers:
        x = layer(x)
    whole = gather(model.last(x), 1, mesh, layout=layout, reduce_gradients=False)
    loss = whole.square().mean()
    loss.backward()
    sum_gradients([*model.layers.parameters(), *model.last.parameters()], mesh)
    return loss
