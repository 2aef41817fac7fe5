"""Every door over tensors that say they are on a GPU, with meshes as ``init_device_mesh("cuda", ...)`` makes them: what
goes through NCCL keeps its rules, and no step waits for the device. See tests/gpu_tensors.py.

Groups are those of ``init_process_group("nccl")``, which have no backend for tensors of the host, and those of
``init_process_group("cpu:gloo,cuda:nccl")``.
"""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest

from cp_styles.batch import global_loss, global_token_count, shard_batch, sum_gradients
from cp_styles.checks.gradient_watch import UnreducedGradientsError
from cp_styles.functions.attention import context_attention
from cp_styles.functions.flex import context_flex_attention
from cp_styles.functions.varlen import context_varlen_attention
from cp_styles.layouts import head_tail
from cp_styles.masks import Dense
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import run_ranks
from tests.covering import at_night, plain, sampled
from tests.cuda_ops import ON_GPU
from tests.doors import door
from tests.gpu_tensors import gpus, put, read
from tests.oracle import allowed, error, randn
from tests.ranks.attention_case import EXACT, Core, Problem
from tests.ranks.composition import LAYOUTS, SEQ_DIMS, alone, batch_of, new_model, whole
from tests.ranks.engine.test_gpu_rules import errors_on_gpu
from tests.ranks.flex_case import FlexProblem, as_pack, both, causal, of_documents, pack_of
from tutorials.llama import parallel_plan

BACKENDS = {"nccl": True, "cpu:gloo,cuda:nccl": False}
STRATEGIES = [
    (Ring(), 3),
    (AllGather(keep=0), 2),
    (Ulysses(), 2),
    (Ulysses(size=2), 4),
]
BY_DAY = [STRATEGIES[0], STRATEGIES[3], *at_night(*STRATEGIES[1:3])]  # test_each_door has them all
LENGTH = 26


@sampled(1, name=["style", "module", "block", "function"], way=STRATEGIES, backend=list(BACKENDS))
def test_each_door(name: str, way: tuple[Strategy, int], backend: str):
    """Two steps, of which the second finds everything set up. The comparison of tokens waits in the first forwards."""
    strategy, ranks = way
    problem, layout = Problem(length=LENGTH, kv_heads=2, heads=4), head_tail(LENGTH, ranks)

    def on(rank: int) -> float:
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
        attend = door(name, mesh, layout=layout, strategy=strategy, kernel=ON_GPU)
        return max(errors_on_gpu(attend, problem, layout, rank, ranks) for _ in range(2))

    with gpus(nccl_only=BACKENDS[backend], waits=[TOKENS]) as gpu:
        assert max(run_ranks(on, ranks)) < EXACT
    assert gpu.waits == 2 * ranks * (name != "function")
    assert gpu.seen.calls["_scaled_dot_product_flash_attention"]


SEEDS = count(100)  # what a mask holds is new to the caches
TOKENS, WATCH = "cp_styles.checks.uncut_batch.on_host", "cp_styles.collectives.replicas.on_host"
DIGEST, LEVELS = "cp_styles._lib.checksum.checksum", "cp_styles.strategies.moving_kv._read_on_host"


class Masked(Core):
    """Attention with a mask that the module holds, as a model makes one for all of its layers."""

    mask: torch.Tensor

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, self.mask, enable_gqa=True)


@sampled(1, door=[AttentionContextParallel, ModuleContextParallel], way=STRATEGIES, kind=["bool", "float", "far"])
def test_dense_masks(door, way: tuple[Strategy, int], kind: str, monkeypatch):
    """Two steps with one tensor, one with another that holds the same, and one that does not: the host waits for what
    each of them holds, and once for the levels of such a float mask, whose rows may be far from 0."""
    monkeypatch.setattr("cp_styles.masks.dense.check_plain_mask", lambda tensor: None)  # tensors here are a subclass
    strategy, ranks = way
    layout, sees = head_tail(LENGTH, ranks), allowed(lambda p, j: (p + 3 * j) % 5 != 0 or j == p, LENGTH, LENGTH)
    added = sees if kind == "bool" else randn(next(SEEDS), LENGTH, LENGTH)
    if kind == "far":
        added[3] -= 256.0
    problem = Problem(length=LENGTH, kv_heads=2, heads=4, **({"mask": sees} if kind == "bool" else {"bias": added}))

    def on(rank: int) -> float:
        core, mesh = Masked(), init_device_mesh("cuda", (ranks,))
        attend = parallelize_module(core, mesh, door(strategy=strategy, layout=layout, kernel=ON_GPU))
        worst = 0.0
        for step in range(4):
            if step != 1:  # the last of other numbers with the same softmax
                core.mask = put(added + 1.0 if step == 3 and kind != "bool" else added.clone())
            worst = max(worst, errors_on_gpu(attend, problem, layout, rank, ranks))
        return worst

    with gpus(waits=[DIGEST, LEVELS]) as gpu:
        assert max(run_ranks(on, ranks)) < EXACT
    assert gpu.waits == ranks * (3 + 2 * (kind != "bool"))


DOCUMENTS = (9, 1, 16)
CU_SEQLENS = torch.tensor([0, 9, 10, 26], dtype=torch.int32)


@pytest.mark.parametrize("way", BY_DAY)
@pytest.mark.parametrize("backend", ["nccl", *at_night("cpu:gloo,cuda:nccl")])
def test_packed_documents(way: tuple[Strategy, int], backend: str):
    """With their bounds on the device: read once, when they are new."""
    strategy, ranks = way
    problem, layout = pack_of(DOCUMENTS, (-1, 0)), head_tail(LENGTH, ranks)

    def on(rank: int) -> list[torch.Tensor]:
        mesh, bounds = init_device_mesh("cuda", (ranks,)), put(CU_SEQLENS)

        options = {"layout": layout, "strategy": strategy, "return_lse": True, "window_size": (-1, 0)}
        attend = as_pack(lambda *qkv: context_varlen_attention(*qkv, mesh, bounds, **options))
        return flex_steps(problem, attend, layout, rank)

    with gpus(nccl_only=BACKENDS[backend], waits=["cp_styles.masks.bands.Documents.from_cu_seqlens"]) as gpu:
        assert max(problem.errors(run_ranks(on, ranks), layout)) < EXACT
    assert gpu.waits == ranks


@pytest.mark.parametrize("what", ["cu_seqlens", "an additive mask"])
def test_memory_that_a_kernel_fills_again(what: str, monkeypatch):
    """No call waits to see it. The results of comparisons are read once they have arrived, and all ranks raise."""
    monkeypatch.setattr("cp_styles.masks.dense.check_plain_mask", lambda tensor: None)  # tensors here are a subclass
    layout, packs = head_tail(LENGTH, 2), what == "cu_seqlens"
    before, after = CU_SEQLENS, torch.tensor([0, 3, 10, 26], dtype=torch.int32)
    if not packs:
        before, after = torch.zeros(LENGTH, LENGTH), torch.full((LENGTH, LENGTH), -1e9)

    def on(rank: int) -> tuple[int, str]:
        mesh, given = init_device_mesh("cuda", (2,)), put(before.clone())
        tensors = [put(layout.shard(randn(at, 1, 2, LENGTH, 4), 2, rank)) for at in range(3)]
        for call in range(100):
            if call == 2:
                given.inner.copy_(after)  # as a kernel does that torch does not know
            for _ in range(64):  # of the rest of a model
                torch.Event("cuda").record()
            try:
                if packs:
                    context_varlen_attention(*(x[0].transpose(0, 1) for x in tensors), mesh, given, layout=layout)
                else:
                    context_attention(*tensors, mesh, mask=Dense(given), layout=layout, kernel=ON_GPU)
            except RuntimeError as error:
                return call, str(error)
        return -1, ""

    with gpus(waits=["cp_styles.masks.bands.Documents.from_cu_seqlens", DIGEST, LEVELS]):
        calls, texts = zip(*run_ranks(on, 2), strict=True)
    assert calls == (3, 3)
    assert any("was filled again. torch does not count changes by NumPy" in text for text in texts)


@pytest.mark.parametrize("way", BY_DAY)
@pytest.mark.parametrize("backend", ["nccl", *at_night("cpu:gloo,cuda:nccl")])
def test_block_masks(way: tuple[Strategy, int], backend: str):
    strategy, ranks = way
    problem = FlexProblem(both(of_documents(DOCUMENTS), causal), length=LENGTH)
    layout = head_tail(LENGTH, ranks)

    def on(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cuda", (ranks,))

        def attend(q, k, v):
            options = {"block_mask": problem.block_mask, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
            out, aux = context_flex_attention(q, k, v, mesh, layout=layout, strategy=strategy, **options)
            return out, aux.lse

        return flex_steps(problem, attend, layout, rank)

    with gpus(nccl_only=BACKENDS[backend]):
        assert max(problem.errors(run_ranks(on, ranks), layout)) < EXACT


def flex_steps(problem: FlexProblem, attend, layout, rank: int) -> list[torch.Tensor]:
    """What the second of two steps finds."""
    cotangents = [put(layout.shard(x, 2, rank)) for x in problem.cotangents]
    found: list[torch.Tensor] = []
    for _ in range(2):
        leaves = [put(layout.shard(x, 2, rank).requires_grad_()) for x in problem.inputs]
        out, lse = attend(*leaves)
        torch.autograd.backward((out, lse), cotangents)
        found = [read(out), read(lse), *(read(x.grad) for x in leaves)]
    return found


LOSS = "cp_styles.batch.losses.on_host"


def model_on(mesh: DeviceMesh, style: AttentionContextParallel | ModuleContextParallel) -> nn.Module:
    """A layer of the model of the main job, with the parallel plan of the main job."""
    model = new_model(layers=1)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(put(parameter.detach())))
    plan = parallel_plan(style) if isinstance(style, AttentionContextParallel) else {"layers.*.attention": style}
    return parallelize_module(model, mesh, plan)


def backward(model: nn.Module, cp: DeviceMesh) -> torch.Tensor:
    """The step of the main job, up to the sum of gradients: the loss."""
    layout, rank = LAYOUTS[cp.size()], cp.get_local_rank()
    mine = {name: put(x) for name, x in shard_batch(batch_of(0), layout, rank, seq_dims=SEQ_DIMS).items()}
    logits = model(mine["tokens"], put(layout.positions(rank)))
    losses = F.cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum")
    loss = global_loss(losses, global_token_count(mine["labels"], cp), cp)
    loss.backward()
    return loss


def steps(model: nn.Module, cp: DeviceMesh, optimizer: torch.optim.Optimizer, *, sums: bool = False) -> torch.Tensor:
    """The loss of the last of some steps."""
    loss = torch.empty(0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = backward(model, cp)
        if sums:
            sum_gradients(model, cp)
        optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("strategy", "cp", "tp", "door", "backend"),
    [
        pytest.param(Ring(), 2, 2, AttentionContextParallel, "cpu:gloo,cuda:nccl", marks=pytest.mark.nightly),
        (Ring(), 2, 2, AttentionContextParallel, "nccl"),
        (Ulysses(), 2, 1, ModuleContextParallel, "nccl"),
        pytest.param(Ulysses(size=2), 4, 1, AttentionContextParallel, "nccl", marks=pytest.mark.nightly),
    ],
    ids=plain,
)
def test_the_main_job(strategy: Strategy, cp: int, tp: int, door, backend: str):
    """Loss and gradients of the model; the search for parameters that nobody reduces may wait, six times, the
    comparison of tokens three times, and the checks of counts and losses once."""

    def on(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
        mesh = init_device_mesh("cuda", (cp, tp), mesh_dim_names=("cp", "tp"))
        model = model_on(mesh, door(strategy=strategy, layout=LAYOUTS[cp], kernel=ON_GPU))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss = steps(model, mesh["cp"], optimizer, sums=True)
        return read(loss).item(), {name: read(whole(x.grad)) for name, x in model.named_parameters()}

    with gpus(nccl_only=BACKENDS[backend], waits=[TOKENS, WATCH, LOSS]) as gpu:
        found = run_ranks(on, cp * tp)
    single = alone(1, layers=1)
    for loss, gradients in found:
        assert loss == pytest.approx(single.losses[0], abs=EXACT)
        assert max(error(gradients[name], single.gradients[name]) for name in gradients) < EXACT
    assert gpu.waits <= (6 + 3 + 2) * cp * tp


@pytest.mark.parametrize("nccl_only", BACKENDS.values(), ids=BACKENDS)
def test_gradients_that_nobody_sums(nccl_only: bool):
    """The error comes on every rank, also where the ranks cannot compare parameters on the host."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("cp", "tp"))
        model = model_on(mesh, AttentionContextParallel(layout=LAYOUTS[2], kernel=ON_GPU))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UnreducedGradientsError):
            steps(model, mesh["cp"], optimizer)

    project = "cp_styles.collectives.replicas.project"
    with gpus(nccl_only=nccl_only, waits=[TOKENS, WATCH, LOSS, project]):
        run_ranks(on, 2)
