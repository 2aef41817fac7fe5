"""Options that no other test passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel

from cp_styles import (
    Checks,
    PrepareModuleOutput,
    SequenceParallel,
    UnreducedGradientsError,
    context_flex_attention,
    context_varlen_attention,
    contiguous,
    next_token_labels,
    parallelize_module,
    styles,
)
from cp_styles.batch import chunked_token_losses
from cp_styles.collectives import GradScale, gather, split
from cp_styles.testing import CommunicationTrace, RankError, run_ranks
from cp_styles.torch_api import context_parallel
from tests.oracle import attention_inputs, dense_attention, error, randn
from tests.ranks.attention_case import EXACT, cp_mesh, on_every_rank

LENGTH = 12


class Echo(nn.Module):
    """Returns its inputs, and keeps what it got."""

    def forward(self, x, *, y=None):
        self.got = [(type(each), tuple(each.shape)) for each in (x, y) if each is not None]
        return x


INPUTS = {
    "input_layouts": Shard(1),
    "desired_input_layouts": Replicate(),
    "input_kwarg_layouts": {"y": Replicate()},
    "desired_input_kwarg_layouts": {"y": Shard(1)},
}
OUTPUTS = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}


def prepares(namespace: Any, local: bool) -> list[Any]:
    """The styles of ``namespace`` that change where tensors are."""
    return [
        namespace.PrepareModuleInput(**INPUTS, use_local_output=local),
        namespace.PrepareModuleOutput(**OUTPUTS, use_local_output=local),
        namespace.PrepareModuleInputOutput(**INPUTS, **OUTPUTS, use_local_input=not local, use_local_output=local),
    ]


@pytest.mark.parametrize("local", [False, True])
@on_every_rank(4)
def test_inputs_and_outputs_as_torchs_own(local: bool):
    """On the tp axis of a mesh as torch's on a mesh of that axis: what the module gets, and what it gives."""
    x, y = randn(0, 2, 4, 6), randn(1, 2, 4, 6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for own, original in zip(prepares(styles, local), prepares(parallel, local), strict=True):
        modules = parallelize_module(Echo(), mesh, own), parallelize_module(Echo(), mesh["tp"], original)
        keywords = {} if isinstance(own, PrepareModuleOutput) else {"y": y}
        mine, theirs = (module(x, **keywords) for module in modules)
        assert modules[0].got == modules[1].got
        assert type(mine) is type(theirs)
        mine, theirs = (each.to_local() if isinstance(each, DTensor) else each for each in (mine, theirs))
        assert torch.equal(mine, theirs)


@on_every_rank(4)
def test_a_norm_along_another_dim():
    """Its sequence is the first dim, of which each rank of tp has its rows. Rows that tp does not divide are refused,
    of any module's output too."""
    x = randn(0, 4, 2, 6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    norm = parallelize_module(nn.LayerNorm(6).double(), mesh, style)
    mine = x.chunk(2)[mesh["tp"].get_local_rank()]
    assert torch.equal(norm(mine), F.layer_norm(mine, (6,)))
    outputs = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    for module, rows in ((norm, distribute_tensor(x[:3], mesh["tp"], [Shard(0)])), (nn.Identity(), x[:3])):
        with pytest.raises(ValueError, match="does not divide the 3 rows"):
            (module if module is norm else parallelize_module(module, mesh, outputs))(rows)


def by_flex(mesh, qkv, **options):
    return context_flex_attention(*qkv, mesh, layout=contiguous, **options)


def by_varlen(mesh, qkv, **options):
    packs = (x[0].transpose(0, 1) for x in qkv)
    return context_varlen_attention(*packs, mesh, [0, LENGTH], layout=contiguous, **options)


class Attends(nn.Module):
    """A function in a module, whose parameters are compared."""

    def __init__(self, attend, mesh):
        super().__init__()
        self.linear, self.attend, self.mesh = nn.Linear(8, 8).double(), attend, mesh
        self.linear.weight.data, self.linear.bias.data = randn(1, 8, 8), randn(2, 8)

    def forward(self, x):
        x = self.linear(x)
        return self.attend(self.mesh, (x, x, x), **self.options)


@pytest.mark.parametrize("attend", [by_flex, by_varlen])
def test_parameters_that_are_meant_to_differ(attend):
    """Named, they are no error at the second step, after a call that names none; else they are, on every rank."""

    def on(rank: int, named: bool) -> None:
        model = Attends(attend, cp_mesh(2))
        model.options = {}
        model(randn(rank, 1, 2, LENGTH // 2, 8))
        model.options = {"checks": Checks(local=[model.linear])} if named else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(randn(10 * step + rank, 1, 2, LENGTH // 2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(on, 2, True)
    errors = run_ranks(on, 2, False, return_errors=True)
    assert [type(error) for error in errors] == [UnreducedGradientsError] * 2


class Positioned(nn.Module):
    def forward(self, x, position_ids):
        return F.scaled_dot_product_attention(x, x, x) + position_ids[:, None, :, None]


def test_a_block_that_does_not_look_at_inputs():
    """Positions of a part that count from 0 are the caller's own then."""
    (x, *_), _ = attention_inputs(length=LENGTH)
    layout = contiguous(LENGTH, 2)

    def on(rank: int, **options) -> float:
        positions = torch.arange(LENGTH // 2)[None].expand(2, -1)
        with context_parallel(cp_mesh(2), layout=contiguous, **options):
            out = Positioned()(layout.shard(x, 2, rank), positions)
        return error(out - positions[:, None, :, None], layout.shard(dense_attention(x, x, x), 2, rank))

    assert max(run_ranks(lambda rank: on(rank, checks=Checks(inputs=False)), 2)) < EXACT
    with pytest.raises(RankError, match="position_ids count from 0 to 5 on this rank"):
        run_ranks(on, 2)


@on_every_rank(2)
def test_means_of_gradients_and_no_comparison(rank: int):
    """The backward of a cut is a mean then, that of a gather too; and nothing is sent in front of either."""
    group = torch.distributed.group.WORLD
    x = randn(0, 4, 3).requires_grad_()
    with CommunicationTrace() as trace:
        mine = split(x, 0, group, grad_scale=GradScale.DOWN, checks=Checks(agreement=False))
    assert not trace.events
    whole = gather(mine, 0, group, reduce_gradients=True, grad_scale=GradScale.UP, checks=Checks(agreement=False))
    cotangent = randn(1 + rank, 4, 3)
    whole.backward(cotangent)
    # The sum over ranks, times 2, of each rank's part; then the parts of all, times 1/2.
    assert error(x.grad, randn(1, 4, 3) + randn(2, 4, 3)) < EXACT


def test_another_number_for_tokens_without_a_label():
    hidden, weight, tokens = randn(0, 6, 4), randn(1, 9, 4), torch.arange(6)
    labels = next_token_labels(tokens, ignore_index=-1)
    assert labels.tolist() == [1, 2, 3, 4, 5, -1]
    found = chunked_token_losses(hidden, weight, labels, ignore_index=-1, chunk_tokens=4)
    assert error(found, F.cross_entropy(hidden @ weight.T, labels, ignore_index=-1, reduction="sum")) < EXACT
