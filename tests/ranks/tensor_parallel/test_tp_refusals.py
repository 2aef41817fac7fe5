"""Errors of AttentionContextParallel for DTensors on other axes, the same on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from cp_styles.layout import SequenceLayout, head_tail
from cp_styles.mask import Dense
from cp_styles.testing import run_ranks
from tests.oracle import randn
from tests.ranks.attention_case import EXACT, Core, Problem, parallel
from tests.ranks.tensor_parallel.tp_cp_case import HEADS, WHOLE, Cut, composed_mesh, exact


def refused(act, *sizes: int, names=("cp", "tp")) -> str:
    """What every rank says; a good call is exact right after it."""

    def on(rank: int) -> str:
        mesh = composed_mesh(*sizes, names=names)
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            act(mesh)
        cut = Cut(Problem(length=12, kv_heads=2))
        assert max(cut.errors(parallel(Core(), mesh), mesh)) < EXACT
        return str(caught.value)

    texts = run_ranks(on, 4, timeout_seconds=20)
    assert len(set(texts)) == 1, texts
    return texts[0]


def inputs_on(mesh: DeviceMesh, *placements, shape=(2, 4, 6, 8)) -> list[DTensor]:
    """Query, key and value of which every rank has ``shape``."""
    each = placements if isinstance(placements[0], list) else [list(placements)] * 3
    return [DTensor.from_local(randn(0, *shape), mesh, p, run_check=False) for p in each]


def core_on(mesh: DeviceMesh, **style) -> nn.Module:
    return parallel(Core(), mesh, **style)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            lambda m: core_on(m)(*inputs_on(m["tp"], Partial())),
            "query is Partial(sum) on mesh axis 'tp', which is Partial, i.e. not yet reduced: redistribute it to "
            "Shard(1) (heads) or Replicate() on that axis before the module",
        ),
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
    ],
)
def test_other_dtensors_are_refused(act, text: str):
    assert text in refused(act)


def test_heads_that_have_not_their_keys():
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

    for text in run_ranks(on, 4, timeout_seconds=20):
        assert "nothing may gather the sequence inside a context-parallel module" in text
        assert "no fused attention op was reached inside the module" in text
