"""Layers of models that are no transformers': kernels by their names, and the functions, inside of a style."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import normalize, scaled_dot_product_attention, softplus

from cp_styles import ModuleContextParallel, contiguous, head_tail, sum_gradients
from cp_styles.mixers import context_causal_conv1d, context_recurrence, context_roll
from cp_styles.testing import run_ranks
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh, on_every_rank, refused
from tests.ranks.mixers import kernels
from tests.ranks.mixers.kernels import causal_conv1d, chunk_gated_delta_rule, mamba_split_conv1d_scan_combined

# Sums in float64, in another order: 1e-15 a step. A state or a row that is not passed on gives 1e-2.
EXACT = 1e-11
LENGTH, CHANNELS = 13, 8


def moved(forward):
    """A decorator, as libraries have them around such forwards."""

    @functools.wraps(forward)
    def decorated(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return decorated


class DeltaNet(nn.Module):
    """With the kernels' names as flash-linear-attention has them."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(randn(1, 3 * CHANNELS, 4) * 0.3)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS, dtype=torch.float64)
        self.gates = nn.Linear(CHANNELS, 4, dtype=torch.float64)

    @moved
    def forward(self, x_BLC):
        mixed, _ = causal_conv1d(self.qkv(x_BLC), self.taps, activation="silu")
        q, k, v = (each.unflatten(-1, (2, 4)) for each in mixed.chunk(3, -1))
        g, beta = self.gates(x_BLC).chunk(2, -1)
        out, _ = chunk_gated_delta_rule(normalize(q, dim=-1), normalize(k, dim=-1), v, -softplus(g), beta.sigmoid())
        return x_BLC + out.flatten(-2)


class Attention(nn.Module):
    def forward(self, x_BLC):
        x_BHLD = x_BLC.unflatten(-1, (2, 4)).transpose(1, 2)
        return scaled_dot_product_attention(x_BHLD, x_BHLD, x_BHLD, is_causal=True).transpose(1, 2).flatten(-2)


class ByFunctions(nn.Module):
    """The same as a hand-written model that calls the functions; ``mesh`` None is one process."""

    def __init__(self, mesh=None):
        super().__init__()
        self.mesh, self.taps = mesh, nn.Parameter(randn(1, CHANNELS, 4) * 0.3)

    def forward(self, x_BLC):
        def conv(x_BCL):
            return kernels.causal_conv1d_fn(x_BCL, self.taps)

        x_BCL, layout = x_BLC.mT, head_tail(LENGTH, 2)
        one = self.mesh is None
        y = (conv(x_BCL) if one else context_causal_conv1d(conv, x_BCL, self.mesh, width=4, layout=layout)).mT
        y = y + (torch.roll(x_BLC, 1, 1) if one else context_roll(x_BLC, 1, 1, self.mesh, layout=layout))
        scan = kernels.chunk_gla
        scan = scan if one else context_recurrence(scan, self.mesh, layout=layout)
        y_BLHK = y.unflatten(-1, (2, 4))
        return x_BLC + scan(y_BLHK, y_BLHK, y_BLHK, -softplus(y_BLHK))[0].flatten(-2)


def model_of(*layers):
    return nn.Sequential(*(layers or (DeltaNet(), Attention(), DeltaNet())))


def step(model, x, cotangent):
    out = model(x)
    out.backward(cotangent)
    return [out.detach(), *(each.grad for each in model.parameters())]


def on_ranks(model, layout, prepare=None):
    def main(rank: int):
        mesh = cp_mesh(layout.ranks)
        mine = copy.deepcopy(model)
        if prepare is not None:
            prepare(mine, mesh)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=layout))
        out, *_ = step(mine, layout.shard(X, 1, rank), layout.shard(COTANGENT, 1, rank))
        sum_gradients(mine, mesh)
        return [out, *(each.grad for each in mine.parameters())]

    found = run_ranks(main, layout.ranks)
    return [layout.unshard([each[0] for each in found], 1), *found[0][1:]]


X, COTANGENT = randn(2, 2, LENGTH, CHANNELS), randn(3, 2, LENGTH, CHANNELS)


@pytest.mark.parametrize("layout", [head_tail(LENGTH, 2), contiguous(LENGTH, 3)], ids=["head_tail", "contiguous"])
def test_kernels_by_name(layout):
    model = model_of()
    for one, expected in zip(on_ranks(model, layout), step(model, X, COTANGENT), strict=True):
        assert error(one, expected) < EXACT
    assert type(model[0]) is DeltaNet
    assert sys.modules[__name__].causal_conv1d is kernels.causal_conv1d


def test_functions_inside_of_a_style():
    """The tokens that a user's kernel mixes there are no mistake: other ranks' tokens were among them."""
    model = model_of(ByFunctions(), Attention())
    expected = step(model, X, COTANGENT)

    def prepare(mine, mesh):
        mine[0].mesh = mesh

    for one, each in zip(on_ranks(copy.deepcopy(model), head_tail(LENGTH, 2), prepare), expected, strict=True):
        assert error(one, each) < EXACT


class Heads(nn.Module):
    """As many heads as its projections give: all, or those of a rank of tp."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(CHANNELS, CHANNELS, dtype=torch.float64) for _ in range(4))
        self.g, self.beta = (nn.Linear(CHANNELS, 2, dtype=torch.float64) for _ in range(2))

    def forward(self, x_BLC):
        q, k, v = (each(x_BLC).unflatten(-1, (-1, 4)) for each in (self.q, self.k, self.v))
        q, k, g = normalize(q, dim=-1), normalize(k, dim=-1), -softplus(self.g(x_BLC))
        return x_BLC + self.out(chunk_gated_delta_rule(q, k, v, g, self.beta(x_BLC).sigmoid())[0].flatten(-2))


def test_heads_over_tensor_parallel_ranks():
    """Heads do not depend on each other. The style follows DTensors, whose rules run operators on fake tensors."""
    model, layout = model_of(Heads(), Attention(), Heads()), head_tail(LENGTH, 2)
    plan = {f"{at}.{name}": ColwiseParallel() for at in (0, 2) for name in ("q", "k", "v", "g", "beta")}
    plan |= {f"{at}.out": RowwiseParallel() for at in (0, 2)}

    def main(rank: int):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        mine, at = copy.deepcopy(model), mesh["cp"].get_local_rank()
        parallelize_module(mine, mesh["tp"], plan)
        parallelize_module(mine, mesh["cp"], ModuleContextParallel(layout=layout))
        out, *_ = step(mine, layout.shard(X, 1, at), layout.shard(COTANGENT, 1, at))
        sum_gradients(mine, mesh["cp"])
        return [out, *(each.grad.full_tensor() for each in mine.parameters())]

    found = run_ranks(main, 4)
    found = [layout.unshard([each[0] for each in found[::2]], 1), *found[0][1:]]
    for one, expected in zip(found, step(model, X, COTANGENT), strict=True):
        assert error(one, expected) < EXACT


class Fused(nn.Module):
    def forward(self, x_BLC):
        return mamba_split_conv1d_scan_combined(x_BLC)


class WithState(nn.Module):
    def forward(self, x_BLC):
        return causal_conv1d(x_BLC, x_BLC[0, :4].mT, output_final_state=True)[0]


@pytest.mark.parametrize(("layer", "words"), [(Fused, "use_mem_eff_path=False"), (WithState, "output_final_state")])
def test_refused(layer, words):
    model = model_of(layer(), Attention())

    def act(rank: int, mesh) -> None:
        mine = parallelize_module(copy.deepcopy(model), mesh, ModuleContextParallel())
        mine(head_tail(LENGTH, 2).shard(X, 1, rank))

    refused(act, words, NotImplementedError)


@on_every_rank(1)
def test_one_rank_calls_a_kernel_as_it_is_called(mesh):
    """As on one device: once, with all tokens and these arguments. Documents are of the function, not of the kernel."""
    q, k, v, g = (randn(seed, 2, LENGTH, 2, 4) for seed in range(4))
    calls = list[tuple[int, list[str]]]()

    def chunk_gla(q, k, v, g, **options):
        calls.append((q.shape[1], sorted(options)))
        return kernels.chunk_gla(q, k, v, g, **options)

    def conv(x_BCL):
        calls.append((x_BCL.shape[2], []))
        return kernels.causal_conv1d_fn(x_BCL, randn(5, CHANNELS, 4))

    for documents, wanted in ((None, [LENGTH]), ((5, LENGTH - 5), [5, LENGTH - 5])):
        out, _ = context_recurrence(chunk_gla, mesh, documents=documents)(q, k, v, g=-softplus(g), scale=0.5)
        assert [length for length, _ in calls] == wanted
        assert documents is not None or calls[0] == (LENGTH, ["scale"])
        parts = [x.split(wanted, 1) for x in (q, k, v, -softplus(g))]
        pieces = [kernels.chunk_gla(*part, scale=0.5)[0] for part in zip(*parts, strict=True)]
        assert torch.equal(out, torch.cat(pieces, 1))
        calls.clear()
    context_causal_conv1d(conv, X.mT, mesh, width=4)
    context_causal_conv1d(conv, X.mT, mesh, width=4, documents=(5, LENGTH - 5))
    assert calls == [(LENGTH, []), (LENGTH + 2 * 3, [])]  # with the rows before each document
