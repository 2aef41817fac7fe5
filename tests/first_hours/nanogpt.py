"""A hand-written language model, as nanoGPT's users have it: it counts its own tokens, makes its own loss, and without
labels gives the logits of the last token alone."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import BatchSharder, ModuleContextParallel, next_token_labels, parallelize_module

TOKENS = torch.arange(26).view(2, 13) % 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.qkv(self.norm(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class GPT(nn.Module):
    last_alone = True

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 16), nn.Embedding(64, 16)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 11)

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        return self.logits_and_loss(self.wte(idx) + self.wpe(pos), targets)

    def logits_and_loss(self, x, targets=None):
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, [-1]] if targets is None and self.last_alone else x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, new_tokens):
        for _ in range(new_tokens):
            idx = torch.cat((idx, self(idx)[0][:, -1].argmax(-1, keepdim=True)), 1)
        return idx


class GPTWithPositions(GPT):
    """The lines that change."""

    last_alone = False

    def forward(self, idx, targets=None, pos=None):
        pos = torch.arange(idx.size(1)) if pos is None else pos
        return self.logits_and_loss(self.wte(idx) + self.wpe(pos), targets)


def model() -> nn.Module:
    return GPT().double()


def alone(model: nn.Module) -> torch.Tensor:
    """The loss on one process, after backward."""
    _, loss = model(TOKENS, next_token_labels(TOKENS, ignore_index=-1))
    loss.backward()
    return loss


def before(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, ModuleContextParallel())
    batch = BatchSharder(mesh)(TOKENS)
    model(batch.tokens, batch["shift_labels"])


def after(model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    model.__class__ = GPTWithPositions
    samples = copy.deepcopy(model).eval()
    samples.load_state_dict(model.state_dict(), assign=True)
    parallelize_module(model, mesh, ModuleContextParallel())
    sharder = BatchSharder(mesh)
    batch = sharder(TOKENS)
    logits, _ = model(batch.tokens, pos=batch.positions)
    loss = batch.loss(logits)
    loss.backward()
    sharder.sum_gradients(model)
    assert samples.generate(TOKENS, 3).shape == (2, 16)
    return loss
