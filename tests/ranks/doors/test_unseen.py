"""Attention that is called without Python raises an error if it can be detected. It would be local to each rank."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import ModuleContextParallel, contiguous
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import context_parallel
from tests.oracle import attention_inputs, randn
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


class Named(nn.Module):
    def forward(self, *tensors):
        return scripted(*tensors).sum() + F.scaled_dot_product_attention(*tensors).sum()


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
    ("module", "message"),
    [
        (Named, "scripted is TorchScript with attention in it"),
        (Below, "RecursiveScriptModule is TorchScript with attention in it"),
    ],
)
def test_torchscript(module, message: str):
    with pytest.raises(RankError) as caught:
        results(lambda *args: by_module(module(), *args))
    assert str(caught.value).count(message) == 2, str(caught.value)


@pytest.mark.parametrize("door", [by_module, by_block])
def test_torchscript_without_attention(door):
    results(lambda *args: door(Fine(), *args))


@pytest.mark.parametrize("before", [False, True], ids=["never any", "after attention"])
def test_blocks_without_attention(before: bool, recwarn):
    """A loss, a router, attention over heads: right. If there never was attention, there is a warning."""
    logits, labels = randn(0, 1, 8, 5), torch.arange(8)[None] % 5

    def on(rank: int) -> None:
        mesh, given, wanted = cp_mesh(2), logits.clone(), labels.clone()
        if before:
            with context_parallel(mesh):
                F.scaled_dot_product_attention(*[randn(3, 1, 2, 4, 4)] * 3)
        with context_parallel(mesh, buffers=[given, wanted], buffer_seq_dims=[1, 1]), torch.no_grad():
            F.cross_entropy(given.flatten(0, 1), wanted.flatten())
            torch.softmax(given[0] @ randn(1, 5, 4), -1) @ randn(2, 4, 3)  # as many experts as tokens
            heads = given[:, :, None, :].expand(-1, -1, 4, -1)
            torch.softmax(heads @ heads.mT, -1) @ heads

    run_ranks(on, 2)
    texts = [str(each.message) for each in recwarn if "no attention was called inside" in str(each.message)]
    assert bool(texts) is not before
