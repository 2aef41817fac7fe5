"""Attention that is called without Python raises an error if it can be detected. It would be local to each rank."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import ModuleContextParallel, context_parallel, contiguous
from cp_styles.testing import RankError, run_ranks
from tests.oracle import attention_inputs
from tests.ranks.attention_case import cp_mesh

LENGTH = 12

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and used all the same

    @torch.jit.script
    def scripted(query, key, value):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    @torch.jit.script
    def harmless(x):
        return torch.nn.functional.gelu(x)

    class Attend(nn.Module):
        def forward(self, query, key, value):
            return F.scaled_dot_product_attention(query, key, value)

    scripted_module = torch.jit.script(Attend())

hidden = [scripted]  # where nobody looks for it


class Named(nn.Module):
    def forward(self, *tensors):
        return scripted(*tensors).sum() + F.scaled_dot_product_attention(*tensors).sum()


class Hidden(nn.Module):
    def forward(self, *tensors):
        seen = F.scaled_dot_product_attention(*tensors).transpose(1, 2).flatten(2)
        return harmless(hidden[0](*tensors)) * seen


class Below(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = scripted_module

    def forward(self, *tensors):
        return self.below(*tensors)


class Fine(nn.Module):
    def forward(self, *tensors):
        return harmless(F.scaled_dot_product_attention(*tensors))


def results(act, ranks: int = 2):
    inputs, _ = attention_inputs(length=LENGTH, batch=1)
    layout = contiguous(LENGTH, ranks)

    def on(rank: int):
        tensors = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        # What came before the module is not its: the rank's own, on purpose perhaps.
        tensors[0] = scripted_module(*tensors)
        return act(cp_mesh(ranks), *tensors)

    return run_ranks(on, ranks)


def by_module(module: nn.Module, mesh, *tensors):
    return parallelize_module(module, mesh, ModuleContextParallel(layout=contiguous))(*tensors)


def by_block(module: nn.Module, mesh, *tensors):
    with context_parallel(mesh, layout=contiguous):
        return module(*tensors).sum()


@pytest.mark.parametrize(
    ("door", "module", "message"),
    [
        (by_module, Named, "scripted is TorchScript with attention in it"),
        (by_module, Below, "RecursiveScriptModule is TorchScript with attention in it"),
        (by_module, Hidden, "attention ran inside that was not intercepted"),
        (by_block, Named, "attention ran inside that was not intercepted"),
        (by_block, Hidden, "attention ran inside that was not intercepted"),
        (by_block, Below, "attention ran inside that was not intercepted"),
    ],
)
def test_torchscript(door, module, message: str):
    with pytest.raises(RankError) as caught:
        results(lambda *args: door(module(), *args))
    assert str(caught.value).count(message) == 2, str(caught.value)


@pytest.mark.parametrize("door", [by_module, by_block])
def test_torchscript_without_attention(door):
    results(lambda *args: door(Fine(), *args))
