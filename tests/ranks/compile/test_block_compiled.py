"""torch.compile and context_parallel blocks: compiled code inside a block, and blocks inside compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from cp_styles.layouts import head_tail
from cp_styles.torch_api import context_parallel, context_parallel_unshard
from tests.covering import at_night
from tests.ranks.attention_case import EXACT, Problem
from tests.ranks.compiling import RANKS, cannot_compile_on_threads, on_every_rank
from tests.ranks.doors.torch_api_scene import LENGTH, Batch, gradients, run

pytestmark = cannot_compile_on_threads

BATCH = Batch(layers=1)


def check(model, out: torch.Tensor, mesh) -> None:
    (whole,) = context_parallel_unshard(mesh, [out], [1])
    assert BATCH.errors([whole, *gradients(model, mesh)]) < EXACT


def a_batch(model) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """The block's arguments, and of its buffers the input and the cotangent, which stays cut."""
    arguments = BATCH.buffers(model)
    x, cotangent = arguments["buffers"][:2]
    for parameter in model.parameters():
        parameter.grad = None
    return {**arguments, "no_restore_buffers": [cotangent]}, x, cotangent


@pytest.mark.parametrize("backward", ["after", *at_night("inside")])
@pytest.mark.parametrize("fullgraph", [False, *at_night(True)])
@on_every_rank(RANKS)
def test_a_compiled_model_inside(mesh, fullgraph: bool, backward: str):
    """From step to step, each in a block of its own, by the same graphs."""
    model = BATCH.model()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(run, backend=counter, fullgraph=fullgraph), []
    for _ in range(3):
        arguments, x, cotangent = a_batch(model)
        with context_parallel(mesh, **arguments):
            out = compiled(model, x)
            if backward == "inside":
                out.backward(cotangent)
        if backward == "after":
            out.backward(cotangent)
        check(model, out, mesh)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[2] > 0
    dist.barrier()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reentrant", [False, True])
@on_every_rank(RANKS)
def test_checkpointed_compiled_layers(mesh, rank: int, reentrant: bool, backend: str):
    """The recomputation comes after the block and enters it again, also where inductor's graph shows no mode what it
    calls, and the layer reads no buffer that would be of another size by then."""
    problem, layout = Problem(length=13), head_tail(13, RANKS)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(query, key, value):
        # Nothing for which inductor generates a kernel: the C++ compiler would take seconds for each.
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    for _ in range(2):
        leaves, cotangent = problem.shard(layout, rank, RANKS)
        with context_parallel(mesh, layout=head_tail):
            out = checkpoint(layer, *leaves, use_reentrant=reentrant)
        out.backward(cotangent)
        found = [out.detach(), *(leaf.grad for leaf in leaves)]
        assert max(problem.errors(found, layout, rank, RANKS)) < EXACT


@pytest.mark.parametrize("backward", ["inside", *at_night("after")])
@on_every_rank(RANKS)
def test_a_block_inside_a_compiled_function(mesh, backward: str):
    """Its graph breaks there, and what the block calls is compiled; as one graph it is refused, in words."""

    def step(mesh, arguments, model, x, cotangent):
        with context_parallel(mesh, **arguments):
            out = run(model, x)
            if backward == "inside":
                out.backward(cotangent)
        return out

    model = BATCH.model()
    arguments, x, cotangent = a_batch(model)
    with pytest.raises(Exception, match="compile what is called inside the block"):
        torch.compile(step, backend="eager", fullgraph=True)(mesh, arguments, model, x, cotangent)
    assert x.shape[1] == LENGTH  # nothing was cut
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter)
    for _ in range(2):
        arguments, x, cotangent = a_batch(model)
        out = compiled(mesh, arguments, model, x, cotangent)
        if backward == "after":
            out.backward(cotangent)
        check(model, out, mesh)
    assert counter.frame_count > 0
    dist.barrier()
