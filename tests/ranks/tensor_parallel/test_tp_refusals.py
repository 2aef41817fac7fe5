"""Errors of AttentionContextParallel for DTensors on other axes, the same on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_styles import (
    AttentionContextParallel,
    ColwiseParallel,
    ModuleContextParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    global_loss,
    global_token_count,
    next_token_labels,
    parallelize_module,
    sum_gradients,
)
from cp_styles.layouts import SequenceLayout, head_tail
from cp_styles.masks import Dense
from cp_styles.testing import run_ranks
from tests.covering import at_night, sampled
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Core, Problem, parallel
from tests.ranks.tensor_parallel.tp_cp_case import HEADS, WHOLE, Cut, Returns, Scaled, composed_mesh, exact, part_of
from tutorials.llama import Llama, LlamaConfig, parallel_plan


def refused(act, *sizes: int, names=("cp", "tp")) -> str:
    """What every rank says; a good call is exact right after it."""

    def on(rank: int) -> str:
        mesh = composed_mesh(*sizes, names=names)
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            act(mesh)
        cut = Cut(Problem(length=12, kv_heads=2))
        assert max(cut.errors(parallel(Core(), mesh), mesh)) < EXACT
        return str(caught.value)

    texts = run_ranks(on, 4)
    assert len(set(texts)) == 1, texts
    return texts[0]


def inputs_on(mesh: DeviceMesh, *placements, shape=(2, 4, 6, 8)) -> list[DTensor]:
    """Query, key and value of which every rank has ``shape``."""
    each = placements if isinstance(placements[0], list) else [list(placements)] * 3
    return [DTensor.from_local(randn(dist.get_rank(), *shape), mesh, p, run_check=False) for p in each]


def core_on(mesh: DeviceMesh, **style) -> nn.Module:
    return parallel(Core(), mesh, **style)


REFUSED = [
    (
        lambda m: core_on(m)(*inputs_on(m["tp"], Partial())),
        "query is Partial(sum) on mesh axis 'tp', which is Partial, i.e. not yet reduced: redistribute it to "
        "Shard(1) (heads) or Replicate() on that axis before the module",
    ),
    (lambda m: core_on(m)(*inputs_on(m["tp"], WHOLE, shape=(8,))), "query must have 4 dims"),
    (lambda m: core_on(m)(*inputs_on(m["tp"], Shard(2))), "cuts the sequence a second time"),
    (lambda m: core_on(m)(*inputs_on(m["tp"], Shard(3))), "cuts the head dim"),
    (
        lambda m: core_on(m)(*inputs_on(m["tp"], [WHOLE], [HEADS], [HEADS])),
        "give all three the same placement, or query Shard(1) and both others Replicate()",
    ),
    (lambda m: core_on(m)(*inputs_on(m["tp"], [HEADS], [HEADS], [WHOLE])), "give all three the same placement"),
    (
        lambda m: core_on(m["cp"])(*inputs_on(m["tp"], HEADS)),
        "because the style was given the 1-D mesh ('cp',): for DTensors on other axes pass the composed mesh to "
        "parallelize_module",
    ),
    (
        lambda m: core_on(m)(*inputs_on(m["tp"], HEADS)[:2], randn(0, 2, 4, 6, 8)),
        "but value is local: pass all three on the same mesh",
    ),
    (
        lambda m: core_on(m)(*inputs_on(init_device_mesh("cpu", (4,), mesh_dim_names=("world",)), HEADS)),
        "they are not axes of the mesh ('cp', 'tp') that the style was given",
    ),
    (
        lambda m: core_on(m)(*inputs_on(composed_mesh(names=("tp", "cp"))["tp"], HEADS)),
        "they are not over the ranks that the axes of these names have in the mesh ('cp', 'tp') of the style",
    ),
    (
        lambda m: core_on(m)(*inputs_on(m, WHOLE, HEADS)),
        "query is Replicate() on the sequence axis 'cp' of ('cp', 'tp'), not Shard(2)",
    ),
    (lambda m: core_on(m)(*inputs_on(m, Shard(1), WHOLE)), "query is Shard(dim=1) on the sequence axis 'cp'"),
    (lambda m: core_on(m)(*inputs_on(m["cp"], Shard(1))), "expected a local tensor, or a DTensor on ('cp',)"),
    (
        lambda m: core_on(m, use_local_output=False)(*inputs_on(m["tp"], HEADS)),
        "use_local_output=False has no meaning for them",
    ),
    (
        lambda m: core_on(m, mask=Dense(torch.ones(1, 4, 12, 12, dtype=torch.bool)))(*inputs_on(m["tp"], HEADS)),
        "a dense mask of shape (1, 4, 12, 12) does not broadcast to [B, H, S_q, S_kv] = [2, 8, 12, 12]",
    ),
]


def test_other_dtensors_are_refused():
    """On one mesh, and each on every rank; a good call is exact after all of them."""

    def on(rank: int) -> list[str]:
        mesh, said = composed_mesh(), []
        for act, _ in REFUSED:
            with pytest.raises((ValueError, NotImplementedError)) as caught:
                act(mesh)
            said.append(str(caught.value))
        cut = Cut(Problem(length=12, kv_heads=2))
        assert max(cut.errors(parallel(Core(), mesh), mesh)) < EXACT
        return said

    for said in run_ranks(on, 4):
        for text, (_, words) in zip(said, REFUSED, strict=True):
            assert words in text


def test_query_heads_on_another_rank_than_key_heads():
    """6 query heads are 3 and 3, their 3 key heads 2 and 1: the second rank would need a key head of the first."""
    cut = Cut(Problem(length=12, heads=6, kv_heads=3))

    def act(mesh: DeviceMesh) -> None:
        parts, _ = cut.problem.shard(head_tail, mesh.get_local_rank("cp"), 2)
        sizes = ((3, 3), (2, 1), (2, 1))
        leaves = []
        for x, split in zip(parts, sizes, strict=True):
            local = x.detach().split(split, 1)[mesh.get_local_rank("tp")].contiguous()
            stride = torch.empty(x.shape, device="meta").stride()
            leaves.append(DTensor.from_local(local, mesh["tp"], [HEADS], run_check=False, shape=x.shape, stride=stride))
        core_on(mesh)(*leaves)

    assert "6 query heads and 3 key/value heads cannot be cut over mesh axes ['tp']" in refused(act)


def test_uneven_sequences_do_not_become_dtensors_on_the_composed_mesh():
    """On tp alone they may, as DTensor does not know the sequence there."""
    layout = SequenceLayout.from_chunks([[(0, 5)], [(5, 12)]])
    exact(Cut(Problem(length=12, kv_heads=2), layout=layout))

    def act(mesh: DeviceMesh) -> None:
        own = mesh.get_local_rank("cp")
        local, shape = randn(0, 2, 2, layout.lengths[own], 8), torch.Size((2, 4, 12, 8))
        stride = torch.empty(shape, device="meta").stride()
        x = DTensor.from_local(local, mesh, [Shard(2), HEADS], run_check=False, shape=shape, stride=stride)
        core_on(mesh, layout=layout)(x, x, x)

    assert "a DTensor of 12 positions has [6, 6] on its ranks, but the layout gives [5, 7]" in refused(act)


def test_a_module_that_joins_the_sequence_with_the_heads():
    class Joins(Core):
        def forward(self, query, key, value):
            return super().forward(query, key, value).sum(2)

    def act(mesh: DeviceMesh) -> None:
        parallel(Joins(), mesh)(*Cut(Problem(length=12, kv_heads=2)).leaves(mesh))

    assert "not sharded along the sequence: the module reduced or gathered the sequence dim" in refused(act)


ENDS = {
    "joined": (lambda out: out.transpose(1, 2).flatten(2), HEADS, (2, 6, 16)),
    "mean": (lambda out: out.mean(1), HEADS, (2, 6, 8)),
    "kept mean": (lambda out: out.mean(1, keepdim=True), HEADS, (2, 1, 6, 8)),
    "turned": (lambda out: out.permute(0, 3, 2, 1), HEADS, (2, 8, 6, 2)),
    "row": (lambda out: out[:1], HEADS, (1, 2, 6, 8)),
    "two": (lambda out: (out, out.unsqueeze(0)), HEADS, (1, 2, 2, 6, 8)),
    "rows twice": (lambda out: out.repeat(2, 1, 1, 1), Shard(0), (2, 4, 6, 8)),
    "batch behind": (lambda out: out.permute(2, 1, 0, 3), Shard(0), (6, 4, 1, 8)),
}


@sampled(1, name=list(ENDS), full=[False, True])
def test_outputs_that_do_not_show_their_heads(name: str, full: bool):
    end, placement, shape = ENDS[name]

    def act(mesh: DeviceMesh) -> None:
        parallel(Returns(end), mesh)(*Cut(Problem(length=12, kv_heads=2), (placement,) * 3, full=full).leaves(mesh))

    text = refused(act)
    assert f"an output has the shape {shape} on this rank" in text
    assert "mesh axes ('tp',) cut: return [B, H, S, D] or [B, S, H, D]" in text


class HalfHeads(Core):
    """Attends with the first half of the heads that it is given."""

    def forward(self, query, key, value, attn_mask=None):
        half = (x[:, : x.shape[1] // 2] for x in (query, key, value))
        out = F.scaled_dot_product_attention(*half, attn_mask)
        return torch.cat([out, out], 1)


def test_masks_by_head_where_the_module_changes_the_heads():
    """One mask for all heads is exact there, as the error advises."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(1, 4, 12, 12, generator=generator) < 0.6

    def act(mesh: DeviceMesh) -> None:
        parallel(HalfHeads(), mesh)(*Cut(Problem(length=12)).leaves(mesh), mask)

    assert "query has 2 rows of the batch and 1 heads at the attention, not 2 and 2" in refused(act)

    def by_style(mesh: DeviceMesh) -> None:
        parallel(HalfHeads(), mesh, mask=Dense(mask))(*Cut(Problem(length=12)).leaves(mesh))

    assert "Give one mask for all" in refused(by_style)
    problem = Problem(length=12, causal=False, mask=mask[0, 0])
    expected = HalfHeads()(*(x.detach().unflatten(1, (2, 2)).flatten(0, 1) for x in problem.inputs), mask[:, :1])

    def on(rank: int) -> float:
        mesh = composed_mesh()
        out = parallel(HalfHeads(), mesh)(*Cut(problem).leaves(mesh), mask[:, :1])
        whole = expected.unflatten(0, (2, 2)).flatten(1, 2)  # of each half of the heads, as tp cuts them
        return error(part_of(out), head_tail(12, 2).shard(whole, 2, mesh.get_local_rank("cp")), whole=whole)

    assert max(run_ranks(on, 4)) < EXACT


def test_masks_by_row_where_the_batch_is_cut():
    def act(mesh: DeviceMesh) -> None:
        rows = Dense(torch.ones(2, 1, 12, 12, dtype=torch.bool))
        core_on(mesh, mask=rows)(*Cut(Problem(length=12, kv_heads=2), (Shard(0),) * 3).leaves(mesh))

    assert "a dense mask of shape (2, 1, 12, 12) does not broadcast to [B, H, S_q, S_kv] = [1, 4, 12, 12]" in refused(
        act
    )


def test_parameters_inside_want_inputs_of_one_form():
    """Without gradients any form will do."""
    problem = Problem(length=12, kv_heads=2)

    passed = []

    def act(mesh: DeviceMesh) -> None:
        core = parallel(Scaled(), mesh)
        core(*Cut(problem).leaves(mesh))
        core(*Cut(problem, (HEADS, WHOLE, WHOLE), full=True).leaves(mesh))
        parts = problem.shard(head_tail, mesh.get_local_rank("cp"), 2)[0]
        with torch.no_grad():
            core(*parts)
        passed.append(True)
        core(*parts)

    text = refused(act)
    assert "query was cut over mesh axes ('tp',) before and is over () now" in text
    assert "or apply the parameters before the module" in text
    assert len(passed) == 4


def test_gathering_the_sequence_inside_is_refused_beside_tp_too():
    """Over tp DTensor may communicate in the module, over the sequence axis it may not."""

    class Gathers(Core):
        def forward(self, query, key, value):
            return super().forward(query.softmax(2), key, value)

    def on(rank: int) -> str:
        mesh, cut = composed_mesh(), Cut(Problem(length=12, kv_heads=2))
        with pytest.raises(RuntimeError) as caught:
            parallel(Gathers(), mesh)(*cut.leaves(mesh))
        assert max(cut.errors(parallel(Core(), mesh), mesh)) < EXACT
        return "\n".join([str(caught.value), *caught.value.__notes__])

    for text in run_ranks(on, 4):
        assert "nothing may gather the sequence inside a context-parallel module" in text
        assert "no scaled_dot_product_attention was called inside" in text


@pytest.mark.parametrize("style", [AttentionContextParallel, ModuleContextParallel])
def test_two_axes_are_made_one(style):
    with pytest.raises(TypeError, match=r"mesh_axis is the name of one axis, got \('a', 'b'\).*Ulysses\(size=inner\)"):
        style(mesh_axis=("a", "b"))


def llama_step(length: int, mesh: DeviceMesh, *plans) -> list[torch.Tensor]:
    """Loss and gradients of the tutorial's model on a mesh with the axes cp and tp."""
    generator = torch.Generator().manual_seed(0)
    model = Llama(LlamaConfig(vocabulary=16, width=16, layers=1, heads=8, kv_heads=2, hidden=24)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    tokens = torch.randint(16, (2, length), generator=generator)
    cp, layout = mesh["cp"], head_tail(length, mesh["cp"].size())
    rank = cp.get_local_rank()
    for each in plans:
        parallelize_module(model, mesh, each)
    labels = layout.shard(next_token_labels(tokens), 1, rank)
    logits = model(layout.shard(tokens, 1, rank), layout.positions(rank))
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = global_loss(losses, global_token_count(labels, cp), cp)
    loss.backward()
    sum_gradients(model, cp)
    return [whole(loss.detach()), *(whole(parameter.grad) for parameter in model.parameters())]


def whole(x) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step_error(length: int, plans, *sizes: int) -> float:
    expected = run_ranks(lambda rank: llama_step(length, composed_mesh(1, 1)), 1)[0]
    found = run_ranks(lambda rank: llama_step(length, composed_mesh(*sizes), *plans()), sizes[0] * sizes[1])
    return max(error(a, b) for each in found for a, b in zip(each, expected, strict=True))


def with_attention():
    return parallel_plan(AttentionContextParallel(layout=head_tail))


def test_a_part_that_tp_does_not_divide():
    """22 tokens: every rank has 11. 23: those of one cp rank have 12, which would go on."""
    words = "RowwiseParallel on Embedding: the size 2 of mesh axis 'tp' does not divide the 11 rows"
    for length in (22, 23):
        errors = run_ranks(
            lambda rank, length=length: llama_step(length, composed_mesh(2, 2), with_attention()),
            4,
            return_errors=True,
        )
        assert all(isinstance(error, ValueError) for error in errors), errors
        own = [str(error).startswith(words) for error in errors]
        assert own == ([True] * 4 if length == 22 else [False, False, True, True])
        assert all(words in str(error) for error in errors), errors  # the text of a peer's error ends with it


def test_lengths_that_tp_divides_and_plans_without_sequence_parallelism():
    """What the error advises."""

    def without():
        plan = with_attention()
        plan = {path: style for path, style in plan.items() if not isinstance(style, SequenceParallel)}
        plan |= {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "layers.*.attention.wo": RowwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(),
            "out": ColwiseParallel(output_layouts=Replicate()),
        }
        return {path: style for path, style in plan.items() if not isinstance(style, PrepareModuleInput)}

    assert step_error(24, lambda: [with_attention()], 2, 2) < EXACT
    assert step_error(22, lambda: [without()], 2, 2) < EXACT


@pytest.mark.parametrize("sizes", [(1, 4), *at_night((2, 4))], ids=str)
def test_key_heads_that_tp_does_not_divide_are_replicated(sizes: tuple[int, int]):
    """What the page advises: 8 query heads and 2 key heads on a tp of 4."""

    def plan():
        heads = (Shard(1), Replicate(), Replicate())
        core = PrepareModuleInput(input_layouts=heads, desired_input_layouts=heads)
        return {
            path.replace("w[qkv]", "wq"): style for path, style in with_attention().items() if "core" not in path
        } | {"layers.*.attention.w[kv]": ColwiseParallel(output_layouts=Replicate()), "layers.*.attention.core": core}

    def both():
        return [plan(), {"layers.*.attention.core": AttentionContextParallel(layout=head_tail)}]

    assert step_error(16, both, *sizes) < EXACT
