"""A step written for torch's context_parallel: by another import, with the loss that it left to the user."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import global_loss, global_token_count, sum_gradients
from cp_styles.torch_api import context_parallel
from tests.first_hours import nanogpt

REFUSAL = r"sum_gradients"
TOKENS = torch.arange(16).view(1, 16) % 11


def model() -> nn.Module:
    return nanogpt.GPTWithPositions().double()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return TOKENS.clone(), TOKENS.roll(-1, 1), torch.arange(16)


def alone(model: nn.Module) -> torch.Tensor:
    tokens, labels, positions = batch()
    logits, _ = model(tokens, pos=positions)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss


def before(model: nn.Module, mesh: DeviceMesh) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        tokens, labels, positions = batch()
        with context_parallel(mesh, buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 0]):
            logits, _ = model(tokens, pos=positions)
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def after(model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    tokens, labels, positions = batch()
    with context_parallel(mesh, buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 0]):
        logits, _ = model(tokens, pos=positions)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = global_loss(losses, global_token_count(labels, mesh), mesh)
        loss.backward()
    sum_gradients(model, mesh)
    return loss
