"""Errors of torch's context-parallel API in this package, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles import contiguous, flex_attention, head_tail
from cp_styles.testing import CommunicationTrace, run_ranks
from cp_styles.torch_api import context_parallel, context_parallel_shard, context_parallel_unshard
from tests.ranks.attention_case import cp_mesh

RANKS = 2


def enter(mesh, *buffers, dims=None, **options):
    with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=dims or [0] * len(buffers), **options):
        raise AssertionError("was not refused")


def kept_cut(mesh):
    whole = torch.arange(8)
    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0], no_restore_buffers={whole}):
        pass
    enter(mesh, whole)


def cut_in_an_open_block(mesh):
    whole = torch.arange(8)
    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0]):
        enter(mesh, whole)


def with_a_whole_gradient(mesh):
    whole = torch.ones(8, requires_grad=True)
    whole.sum().backward()
    enter(mesh, whole)


def attend_to_another_length(mesh):
    q = torch.randn(1, 1, 3, 4)
    with context_parallel(mesh, buffers=[torch.arange(8)], buffer_seq_dims=[0]):
        F.scaled_dot_product_attention(q, q, q)


def attend(**options):
    def call(mesh):
        q = torch.randn(1, 1, 4, 4)
        with context_parallel(mesh):
            F.scaled_dot_product_attention(q, q, q, **options)

    return call


def alone_without_buffers(mesh):
    q = torch.randn(1, 1, 4, 4)
    with context_parallel(mesh, strategy="ring" if mesh.get_local_rank() == 1 else None):
        F.scaled_dot_product_attention(q, q, q)


def other_layouts_without_buffers(mesh):
    q = torch.randn(1, 1, 4, 4)
    with context_parallel(mesh, layout=(contiguous, head_tail)[mesh.get_local_rank()]):
        F.scaled_dot_product_attention(q, q, q)


def by_operator(mesh):
    q = torch.randn(1, 1, 4, 4)
    with context_parallel(mesh):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)


class TakesPositions(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, input_ids, position_ids=None):
        q = torch.randn(1, 1, 4, 16)
        return self.attend(q, q, q)


def without_positions(attention):
    """In a second block: what a first one has read of the model is kept."""

    def call(mesh):
        model, mine = TakesPositions(attention), contiguous(8, RANKS).positions(mesh.get_local_rank())
        with context_parallel(mesh, layout=contiguous):
            model(mine[None], position_ids=mine[None])
        with context_parallel(mesh, layout=contiguous):
            model(mine[None])

    return call


A = torch.arange(8)
REFUSED = {
    "no positions": (without_positions(F.scaled_dot_product_attention), "takes position_ids and was given none"),
    "no positions, flex": (without_positions(flex_attention), "takes position_ids and was given none"),
    "composed mesh": (
        lambda mesh: enter(init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))),
        r'mesh\["cp"\]',
    ),
    "no mesh": (lambda mesh: enter(None), "needs a 1-D DeviceMesh, .* or a process group"),
    "a dim too few": (lambda mesh: enter(mesh, A, A, dims=[0]), "2 buffers and 1 sequence dims"),
    "one tensor": (
        lambda mesh: context_parallel(mesh, buffers=A, buffer_seq_dims=[0]).__enter__(),
        "put it into a list",
    ),
    "no such dim": (lambda mesh: enter(mesh, A, dims=[1]), "no sequence dim 1"),
    "not a subset": (lambda mesh: enter(mesh, A, no_restore_buffers={A.clone()}), "subset of buffers"),
    "a parameter": (lambda mesh: enter(mesh, nn.Parameter(torch.ones(8))), "nn.Parameter"),
    "a DTensor": (lambda mesh: enter(mesh, DTensor.from_local(A, mesh, [Shard(0)])), "to_local"),
    "no tensor": (lambda mesh: enter(mesh, [1, 2]), "got list"),
    "a result": (lambda mesh: enter(mesh, torch.ones(8, requires_grad=True) * 2), "context_parallel_shard"),
    "cut already, kept": (kept_cut, "part of a sequence already"),
    "cut already, open": (cut_in_an_open_block, "part of a sequence already"),
    "a gradient already": (with_a_whole_gradient, "set .grad to None before"),
    "twice, differently": (lambda mesh: enter(mesh, *[torch.ones(8, 8)] * 2, dims=[0, 1]), "given twice"),
    "ranks differ": (
        lambda mesh: enter(mesh, torch.ones(8 + mesh.get_local_rank())),
        "disagree on the buffers, .*: ranks .1. differ",
    ),
    "one rank alone": (
        lambda mesh: enter(mesh, A, dims=[mesh.get_local_rank()]),
        r"no sequence dim 1|ranks \[1\] of mesh axis 'cp' have failed",
    ),
    "one rank alone, without buffers": (alone_without_buffers, r"Strategy object|ranks \[1\] .* refused"),
    "other layouts, without buffers": (other_layouts_without_buffers, "disagree on .*layout"),
    "a layout of other ranks": (lambda mesh: enter(mesh, A, layout=head_tail(8, 5)), "5 ranks"),
    "no layout": (lambda mesh: enter(mesh, A, layout="zigzag"), "layout must be"),
    "no strategy": (lambda mesh: enter(mesh, A, strategy="ring"), "Strategy object"),
    "attention over another length": (attend_to_another_length, "cuts 8 positions"),
    "dropout": (attend(dropout_p=0.1), "dropout_p=0.1"),
    "an operator below": (by_operator, "use scaled_dot_product_attention"),
    "shard without a cut": (lambda mesh: context_parallel_shard(mesh, [A], [0]), "contiguous.*head_tail"),
    "shard: names differ": (lambda mesh: context_parallel_shard(mesh, {"a": A}, {"b": 0}, head_tail), "same entries"),
    "shard: other length": (lambda mesh: context_parallel_shard(mesh, [A], [0], head_tail(9, RANKS)), "9 positions"),
    "unshard: lengths": (
        lambda mesh: context_parallel_unshard(mesh, [A[: 3 + 3 * mesh.get_local_rank()]], [0]),
        "hold .3, 6.",
    ),
    "unshard: no tensor": (lambda mesh: context_parallel_unshard(mesh, [7], [0]), "got int"),
}


def test_the_entry_of_a_block_without_buffers_sends_nothing():
    def on(rank: int):
        with CommunicationTrace() as trace, context_parallel(cp_mesh(RANKS), layout=contiguous):
            pass
        return trace.events

    assert run_ranks(on, RANKS) == [[]] * RANKS


@pytest.mark.filterwarnings("ignore:.*no attention was called inside")
@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_on_every_rank(call, words):
    for found in run_ranks(lambda rank: call(cp_mesh(RANKS)), RANKS, return_errors=True):
        assert isinstance(found, (ValueError, TypeError, NotImplementedError)), found
        with pytest.raises(type(found), match=words):
            raise found
