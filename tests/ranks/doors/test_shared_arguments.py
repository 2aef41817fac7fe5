"""Arguments that the functions share: ``mesh`` as a mesh and the name of an axis, and ``kernel``."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    BatchSharder,
    Causal,
    ModuleContextParallel,
    context_attention,
    context_flex_attention,
    context_max_scores,
    context_varlen_attention,
    contiguous,
    global_loss,
    global_token_count,
    parallelize_module,
    sum_gradients,
)
from cp_styles.collectives import all_to_all, gather, heads_to_seq, reduce_scatter, seq_to_heads, split
from cp_styles.functions.decode import KVCache
from cp_styles.kernels import ReferenceKernel
from cp_styles.mixers import Channels, context_causal_conv1d, context_recurrence, context_roll
from tests.doors import FlexCore, causal_scores
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, on_every_rank

Q = [randn(seed, 1, 2, 4, 8) for seed in range(3)]  # of one rank: [B, H, L, D]
PACK = [x[0].transpose(0, 1) for x in Q]


def summed(mesh) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    sum_gradients([parameter], mesh)
    return parameter.grad


def cumulated(u: torch.Tensor) -> torch.Tensor:
    return u.cumsum(1)


FUNCTIONS = {
    "attention": lambda mesh: context_attention(*Q, mesh),
    "flex": lambda mesh: context_flex_attention(*Q, mesh),
    "varlen": lambda mesh: context_varlen_attention(*PACK, mesh, [0, 8]),
    "max_scores": lambda mesh: context_max_scores(*Q[:2], mesh),
    "all_to_all": lambda mesh: all_to_all(Q[0], 1, 2, mesh),
    "split": lambda mesh: split(Q[0], 2, mesh),
    "gather": lambda mesh: gather(Q[0], 2, mesh, reduce_gradients=True),
    "reduce_scatter": lambda mesh: reduce_scatter(Q[0], 2, mesh),
    "heads": lambda mesh: heads_to_seq(seq_to_heads(Q[0], mesh), mesh),
    "convolution": lambda mesh: context_causal_conv1d(lambda x: x.cumsum(-1) - x, Q[0][0], mesh, width=9),
    "recurrence": lambda mesh: context_recurrence(cumulated, mesh, recurrence=Channels(("u",), seq_dim=1))(u=Q[0][0]),
    "roll": lambda mesh: context_roll(Q[0], 1, 2, mesh),
    "count": lambda mesh: global_token_count(torch.ones(1, 4, dtype=torch.long), mesh),
    "loss": lambda mesh: global_loss(torch.ones(3), 6, mesh),
    "sum_gradients": summed,
    "batch": lambda mesh: BatchSharder(mesh)(torch.arange(9)[None])["input_ids"],
    "cache": lambda mesh: KVCache(mesh, contiguous(8, 2), Q[1], Q[2]).group.size() * torch.ones(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@on_every_rank(2)
def test_a_mesh_and_the_name_of_an_axis(rank: int, name: str):
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    call = FUNCTIONS[name]
    assert torch.equal(call((whole, "cp")), call(whole["cp"]))
    with pytest.raises(ValueError, match=r"the mesh has the axes \('dp', 'cp'\), not 'tp': name one of them"):
        call((whole, "tp"))
    with pytest.raises(TypeError, match=r"\(mesh, axis name\) or a process group, got tuple"):
        call((whole,))


class Counted(ReferenceKernel):
    """Counts its tiles."""

    tiles = 0

    def forward(self, *args, **kwargs):
        Counted.tiles += 1
        return super().forward(*args, **kwargs)


@on_every_rank(2)
def test_the_kernel_of_a_call(mesh, rank: int):
    calls = {
        "attention": lambda **how: context_attention(*Q, mesh, mask=Causal(), **how),
        "flex": lambda **how: context_flex_attention(*Q, mesh, mask=Causal(), **how),
        "varlen": lambda **how: context_varlen_attention(*PACK, mesh, [0, 8], window_size=(-1, 0), **how),
    }
    for call in calls.values():
        before = Counted.tiles
        assert error(call(kernel=Counted()), call()) < EXACT
        assert Counted.tiles > before


@on_every_rank(2)
def test_no_kernel_computes_a_score_mod(mesh, rank: int):
    """Neither the kernel of a call nor of a style. Without it, the remedy, both are exact."""
    expected = context_attention(*Q, mesh, mask=Causal())

    def by_call(**how: ReferenceKernel) -> torch.Tensor:
        return context_flex_attention(*Q, mesh, score_mod=causal_scores, **how)

    def by_style(**how: ReferenceKernel) -> torch.Tensor:
        return parallelize_module(FlexCore(score_mod=causal_scores), mesh, ModuleContextParallel(**how))(*Q)

    for call in (by_call, by_style):
        with pytest.raises(
            NotImplementedError, match=r"ReferenceKernel.* cannot compute a score_mod: leave kernel= out"
        ):
            call(kernel=ReferenceKernel())
        assert error(call(), expected) < EXACT
