"""A video model that makes its own tokens by a convolution over the whole video, and attends to a padded text."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import ModuleContextParallel, contiguous, parallelize_module
from tests.pages import example

REFUSAL = r"made for the \d+ keys of one rank's part\. .* See \"A mask of one part\""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


VIDEO, TEXT, TIME = drawn(2, 3, 5, 6, 6), drawn(2, 7, 16), drawn(2, 16)
TEXT_MASK = (torch.arange(7) < torch.tensor([[7], [4]]))[:, None, None]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2, 8)).permute(2, 0, 3, 1, 4)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 48), nn.Linear(16, 16)
        self.query, self.key_value, self.scales = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 32)
        self.attention = Attention()

    def forward(self, x, angles, text, text_mask, time):
        scale, shift = self.scales(time)[:, None].chunk(2, -1)
        q, k, v = heads(self.qkv(self.norm(x) * (1 + scale) + shift))
        x = x + self.out(self.attention(q * angles.cos(), k * angles.sin(), v).transpose(1, 2).flatten(2))
        (q,), (k, v) = heads(self.query(x)), heads(self.key_value(text))
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=text_mask).transpose(1, 2).flatten(2)


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(3, 16, (3, 2, 2), (1, 2, 2), (1, 0, 0))  # overlaps in time
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 12)
        self.last = nn.Conv3d(3, 3, 3, padding=1)  # behind the gather

    def embed(self, video):
        return self.patches(video).flatten(2).transpose(1, 2)

    def rotary(self, video):
        return torch.arange(video[0, 0].numel() // 4)[:, None] / torch.arange(1, 9)

    def picture(self, x):
        return self.last(x.view(2, 5, 3, 3, 2, 2, 3).permute(0, 6, 1, 2, 4, 3, 5).reshape(2, 3, 5, 6, 6))

    def forward(self, video, text, text_mask, time):
        x, angles = self.embed(video), self.rotary(video)
        for block in self.blocks:
            x = block(x, angles, text, text_mask, time)
        return self.picture(self.head(x))


def model() -> nn.Module:
    return DiT().double()


loss_of = partial(F.mse_loss, target=VIDEO.flip(1))


def alone(model: nn.Module) -> torch.Tensor:
    loss = loss_of(model(VIDEO, TEXT, TEXT_MASK, TIME))
    loss.backward()
    return loss


def before(model: nn.Module, mesh: DeviceMesh) -> None:
    """The style on whole blocks, which attend to the text too."""
    parallelize_module(model, mesh, {"blocks.*": ModuleContextParallel(layout=contiguous)})
    model(VIDEO, TEXT, TEXT_MASK, TIME)


def after(model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    """The lines of the page."""
    scope = {"model": model, "mesh": mesh, "parallelize_module": parallelize_module, "loss_of": loss_of}
    scope |= {"video": VIDEO, "text": TEXT, "text_mask": TEXT_MASK, "time": TIME}
    exec(example("own tokens"), scope)
    return scope["loss"]
