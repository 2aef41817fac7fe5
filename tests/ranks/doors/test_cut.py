"""Tensors cut with one layout and attended with another: an error, although the lengths are equal."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import (
    AttentionContextParallel,
    Causal,
    ModuleContextParallel,
    context_attention,
    contiguous,
    head_tail,
)
from cp_styles.collectives import gather, seq_to_heads
from cp_styles.functions.decode import KVCache
from cp_styles.mixers import context_causal_conv1d, context_roll
from cp_styles.testing import run_ranks
from tests.oracle import dense_attention, error
from tests.ranks.attention_case import EXACT, Core

RANKS, LENGTH = 3, 12
OWN_LENGTH = 15
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def functional(rank, tensors, layout):
    return context_attention(*tensors, dist.group.WORLD, mask=Causal(), layout=layout)


def styled(rank, tensors, layout):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    return parallelize_module(Core(), mesh, AttentionContextParallel(layout=layout))(*tensors)


@pytest.mark.parametrize("door", [functional, styled])
@pytest.mark.parametrize("odd", [None, 1])  # all ranks cut wrongly, or one alone
def test_another_cut_is_refused_on_every_rank(door, odd):
    whole = inputs()

    def body(rank):
        layout = contiguous if odd in (None, rank) else head_tail
        return door(rank, [layout(LENGTH, RANKS).shard(x, 2, rank) for x in whole], head_tail)

    errors = run_ranks(body, RANKS, return_errors=True)
    assert all(isinstance(error, ValueError) for error in errors)
    spoken = errors if odd is None else [errors[odd]]
    assert all("was cut with another layout than this call uses (head_tail)" in str(error) for error in spoken)


OTHERS = {
    "a convolution": lambda rank, q, k, v, group: context_causal_conv1d(
        lambda x: x, q, group, width=3, seq_dim=2, layout=head_tail
    ),
    "roll": lambda rank, q, k, v, group: context_roll(q, 1, 2, group, layout=head_tail),
    "gather": lambda rank, q, k, v, group: gather(q, 2, group, reduce_gradients=False, layout=head_tail(LENGTH, RANKS)),
    "by heads": lambda rank, q, k, v, group: seq_to_heads(
        (k.clone(), v), group, seq_dim=2, heads_dim=1, layout=head_tail(LENGTH, RANKS)
    ),
    "a cache": lambda rank, q, k, v, group: KVCache(group, head_tail(LENGTH, RANKS), k, v),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("layout", [contiguous, head_tail])
def test_other_functions_refuse_another_cut(call, layout):
    whole = [torch.cat((x, x[:, :1]), 1) for x in inputs()]  # 3 heads

    def body(rank):
        q, k, v = (layout(LENGTH, RANKS).shard(x, 2, rank) for x in whole)
        call(rank, q, k, v, dist.group.WORLD)

    errors = run_ranks(body, RANKS, return_errors=True)
    if layout is head_tail:
        assert errors == [None] * RANKS
    else:
        assert all("was cut with another layout than this call uses" in str(error) for error in errors), errors


@pytest.mark.parametrize("door", [functional, styled])
def test_the_same_cut_passes(door):
    whole = inputs()
    outs = run_ranks(lambda rank: door(rank, [head_tail(LENGTH, RANKS).shard(x, 2, rank) for x in whole], head_tail), 3)
    assert error(head_tail(LENGTH, RANKS).unshard(outs, 2), dense_attention(*whole, CAUSAL)) < EXACT


class Model(nn.Module):
    """From tokens, so that nothing that reaches its attention knows how they were cut."""

    def __init__(self):
        super().__init__()
        self.embed, self.core = nn.Embedding(11, 8, dtype=torch.float64), Core()
        self.embed.weight.data = torch.arange(88.0, dtype=torch.float64).view(11, 8).sin()  # the same on all ranks

    def forward(self, tokens):
        x = self.embed(tokens).unflatten(2, (2, 4)).transpose(1, 2)
        return self.core(x, x, x)


@pytest.mark.parametrize("on_model", [False, True])
def test_tokens_of_another_cut(on_model):
    """A model with a style is given them. A style on the attention alone gets what was computed from them."""
    whole = torch.arange(OWN_LENGTH)[None] % 11

    def body(rank):
        model, mesh = Model(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        parallelize_module(model if on_model else model.core, mesh, ModuleContextParallel(layout=head_tail))
        return model(contiguous(OWN_LENGTH, RANKS).shard(whole, 1, rank))

    found = run_ranks(body, RANKS, return_errors=True)
    assert all("was cut with another layout" in str(each) if on_model else torch.is_tensor(each) for each in found)


class Doubled(Model):
    """Gathers what was cut once more over another axis, as sequence parallelism does, before it attends."""

    def forward(self, tokens):
        return super().forward(torch.cat((tokens, tokens), 1))


@pytest.mark.parametrize("style", ["model", "function", "gathered"])
def test_a_layout_for_the_ranks_of_the_world(style):
    """dp 2 x cp 2, and tokens that were cut for 4 ranks: half of them are nowhere."""
    layout, length = head_tail(20, 4), 20

    def body(rank):
        cp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
        own = cp.get_local_rank()
        tokens = layout.shard(torch.arange(length)[None] % 11, 1, own)
        if style == "function":
            return context_attention(*(layout.shard(torch.ones(1, 2, length, 4), 2, own) for _ in range(3)), cp)
        model = Doubled() if style == "gathered" else Model()
        return parallelize_module(model, cp, ModuleContextParallel())(tokens)

    found = run_ranks(body, 4, return_errors=True)
    if style == "gathered":
        assert all(map(torch.is_tensor, found))
    else:
        assert all("with a layout for 4 ranks, mesh axis 'cp' has 2" in str(error) for error in found), found


def test_a_batch_that_a_layout_cut_is_no_sequence():
    """Rows for data parallel ranks, after the sequence was cut."""

    def body(rank):
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp"))
        model = parallelize_module(Model(), mesh["cp"], ModuleContextParallel())
        return model(contiguous(8, 4).shard(torch.arange(24).view(8, 3) % 11, 0, rank))

    assert all(out.shape == (2, 2, 3, 4) for out in run_ranks(body, 4))
