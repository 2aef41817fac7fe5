"""The program of test_compile_tp_cp.py: compiled layers on several mesh axes; and where inductor waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile

from cp_styles import (
    AttentionContextParallel,
    Causal,
    ColwiseParallel,
    ModuleContextParallel,
    RowwiseParallel,
    context_attention,
    head_tail,
    save_attention,
)
from tests.oracle import dense_attention, error, randn
from tests.process.several import in_a_world
from tests.ranks import composition

WIDTH, HEADS, LENGTH = 12, 4, 16


class Core(nn.Module):
    def __init__(self, attn_mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.attn_mask = attn_mask

    def forward(self, query, key, value):
        causal = self.attn_mask is None
        return F.scaled_dot_product_attention(query, key, value, self.attn_mask, is_causal=causal)


class DenseCore(nn.Module):
    def forward(self, query, key, value):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        return dense_attention(query, key, value, mask)


class Layer(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for index, parameter in enumerate(self.parameters()):
            parameter.data = randn(index, *parameter.shape) * 0.3

    def forward(self, x):
        query, key, value = (
            project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for project in (self.wq, self.wk, self.wv)
        )
        return x + self.wo(self.core(query, key, value).transpose(1, 2).flatten(2))


def layer_error(
    mesh: DeviceMesh, core: nn.Module, *, local: bool, keys: ColwiseParallel | None = None, layout=head_tail
) -> float:
    """Of the compiled layer to one process' in output, input gradient and parameter gradients."""
    x, cotangent = randn(10, 2, LENGTH, WIDTH), randn(11, 2, LENGTH, WIDTH)
    reference = Layer(DenseCore())
    leaf = x.clone().requires_grad_()
    wanted = reference(leaf)
    wanted.backward(cotangent)
    plan = {
        "wq": ColwiseParallel(use_local_output=local),
        "w[kv]": keys or ColwiseParallel(use_local_output=local),
        "core": AttentionContextParallel(),
        "wo": RowwiseParallel(input_layouts=Shard(-1)),
    }
    model = parallelize_module(Layer(core), mesh, plan)
    own, rank = layout(LENGTH, mesh["cp"].size()), mesh["cp"].get_local_rank()
    mine = own.shard(x, 1, rank).clone().requires_grad_()
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(mine)
    out.backward(own.shard(cotangent, 1, rank))
    errors = [error(out, own.shard(wanted, 1, rank))]
    # The input is whole on every tp rank, and so is its gradient.
    errors.append(error(mine.grad, own.shard(leaf.grad, 1, rank)))
    for (_, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = found.grad.full_tensor()
        dist.all_reduce(whole, group=mesh.get_group("cp"))
        errors.append(error(whole, expected.grad))
    return max(errors)


class Joins(Core):
    def forward(self, query, key, value):
        return super().forward(query, key, value).transpose(1, 2).flatten(2)


def refusals(mesh: DeviceMesh) -> list[str]:
    """Errors of masks of single heads, as many as this rank has, so that no shape shows it; and of joined heads."""
    mask = torch.ones(1, HEADS // 2, LENGTH, LENGTH, dtype=torch.bool)
    said = []
    for core in (Core(mask), Joins()):
        plan = {"w[qkv]": ColwiseParallel(use_local_output=False), "core": AttentionContextParallel()}
        model = parallelize_module(Layer(core), mesh, plan)
        mine = head_tail(LENGTH, 2).shard(randn(10, 2, LENGTH, WIDTH), 1, mesh["cp"].get_local_rank())
        try:
            torch.compile(model, backend="aot_eager", fullgraph=True)(mine)
        except Exception as error:  # torch wraps what it meets while it traces, in several kinds
            said.append(f"{error}")
        torch.compiler.reset()
    return said


class Positions(nn.Module):
    """A model of which it is known that it counts its tokens, unless it is given positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(LENGTH, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, tokens_BL: torch.Tensor, position_ids: torch.Tensor | None = None):
        if position_ids is None:
            position_ids = torch.arange(0, tokens_BL.shape[1], device=tokens_BL.device)
        x_BHLD = (self.tokens(tokens_BL) + self.places(position_ids)).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x_BHLD, x_BHLD, x_BHLD, is_causal=True)


def without_positions(mesh: DeviceMesh) -> tuple[float, int, str]:
    """A model that counts its tokens, compiled: the error without positions, and the graphs with them."""
    layout, rank, said = head_tail(LENGTH, 2), mesh.get_local_rank(), "nothing"
    tokens = torch.arange(LENGTH).flip(0).unsqueeze(0)
    mine, places = layout.shard(tokens, 1, rank), layout.positions(rank).unsqueeze(0)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Positions()
    whole = model(tokens)
    parallelize_module(model, mesh, ModuleContextParallel())
    counter = CompileCounterWithBackend("aot_eager")
    act = torch.compile(model, backend=counter)
    wrong = error(act(mine, places), layout.shard(whole, 2, rank), whole=whole)
    graphs = counter.frame_count
    torch.compiler.reset()
    try:
        act(mine)
    except ValueError as problem:
        said = str(problem)
    torch.compiler.reset()
    return wrong, graphs, said


def order_of_waiting(mesh: DeviceMesh) -> list[str]:
    """The order in which inductor starts a gather over tp, attends over cp, waits for the gather and uses it."""
    tp, query = mesh["tp"], torch.randn(1, 2, 4, 4)

    def overlapping(x, q):
        gathered = DTensor.from_local(x, tp, [Shard(0)], run_check=False).redistribute(placements=[Replicate()])
        out = context_attention(q, q, q, mesh["cp"], mask=CAUSAL)
        return gathered.to_local() @ out

    _, code = run_and_get_code(torch.compile(overlapping, fullgraph=True), torch.randn(4, 4), query)
    names = {"all_gather_into_tensor": "start", "cp_styles.attention": "attend", "wait_tensor": "wait"}
    body = code[-1].split("def call(")[-1].splitlines()
    calls = [line for line in body if "torch.ops." in line and "assert_" not in line]
    return [step for line in calls for name, step in names.items() if f"{name}.default(" in line]


CAUSAL = Causal()


def allocated(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """What ``run`` returns, and by this process' allocator, which torch's profiler listens to: the most bytes that were
    alive meanwhile, and those that still are. (No mode sees what a compiled graph allocates.)"""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        result = run()
    events = trace.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    return result, max(accumulate(sizes)), sum(sizes)


def held(attend: Callable[..., torch.Tensor]) -> list[float]:
    """What an attention over all ranks keeps until its backward, and the most in that, in units of its query."""
    rows, heads, dim = 64, 8, 64
    grad, *leaves = (torch.ones(1, rows, heads, dim).transpose(1, 2) for _ in range(4))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    attend(*leaves).backward(grad)  # what is made once is there
    for leaf in leaves:
        leaf.grad = None
    out, _, kept = allocated(lambda: attend(*leaves))
    _, most, _ = allocated(lambda: out.backward(grad))
    return [round(size / grad.nbytes, 2) for size in (kept, kept + most)]


def training_error(cp: DeviceMesh) -> tuple[float, int]:
    """Of a training step with FSDP2, and checkpoints that keep the attention of compiled layers: of the loss and all
    gradients, against one process. And how many graphs a rank has compiled: its layers share one."""
    counters.clear()
    model = parallelize_module(composition.new_model(), cp, composition.cp_plan(2))
    for index, layer in enumerate(model.layers):
        layer.compile(backend="aot_eager", fullgraph=True)
        model.layers[index] = checkpoint_wrapper(layer, context_fn=save_attention())
    composition.shard(model, cp)
    run = composition.training(model, cp, composition.cp_of, averaged_over=DeviceMesh.size)
    loss, alone = run.backward(composition.batch_of(0)).item(), composition.alone(1)
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): x.grad for name, x in model.named_parameters()}
    errors = [error(composition.whole(gradients[name]), wanted) for name, wanted in alone.gradients.items()]
    return max(abs(loss - alone.losses[0]), *errors), counters["stats"]["unique_graphs"]


def memory(mesh: DeviceMesh) -> tuple[list[float], list[float]]:
    """Eager and compiled."""

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return context_attention(*qkv, mesh, mask=CAUSAL)

    return held(attend), held(torch.compile(attend, backend="aot_eager", fullgraph=True))


@in_a_world
def at_night(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    replicated = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    errors = [layer_error(mesh, Core(), local=True), layer_error(mesh, Core(), local=False, keys=replicated)]
    torch.compiler.reset()
    print(json.dumps({"errors": errors, "refused": refusals(mesh)}), flush=True)


@in_a_world
def main(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    said: dict[str, Any] = {"dtensors": layer_error(mesh, Core(), local=False)}
    said["order"] = order_of_waiting(mesh)
    torch.compiler.reset()
    if mesh["tp"].get_local_rank() == 0:  # the ranks of one attention: those of the other would compile the same
        said["without positions"] = without_positions(mesh["cp"])
        said["training"] = training_error(mesh["cp"])
        torch.compiler.reset()
        said["memory"] = memory(mesh["cp"])
    print(json.dumps(said), flush=True)
    torch.compiler.reset()
