"""Query, key and value as DTensors of tensor parallelism: cut heads come off at the boundary, and are put on again.

float64 against the dense oracle, EXACT of attention_case.py. What goes over which axis is counted: over cp what the
strategy sends and nothing of DTensor's.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from cp_styles.engine.scope import SequenceScope
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Dense
from cp_styles.mixers import selected_keys
from cp_styles.plan import selected
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.styles.dtensors import is_private
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.covering import sampled
from tests.ranks.attention_case import EXACT, Core, Problem, parallel
from tests.ranks.tensor_parallel.tp_cp_case import HEADS, WHOLE, Cut, Returns, Scaled, composed_mesh, exact, part_of

ALIKE, QUERIES = (HEADS, HEADS, HEADS), (HEADS, WHOLE, WHOLE)


@sampled(2, placements=[ALIKE, QUERIES, (WHOLE,) * 3], full=[False, True], seq_dim=[1, 2])
def test_placements(placements, full: bool, seq_dim: int):
    """Heads cut, none, or those of queries alone; as DTensors on tp or on the composed mesh."""
    exact(Cut(Problem(length=12, kv_heads=2), placements, full=full, seq_dim=seq_dim))


@sampled(1, strategy=[Ring(keep=0), AllGather(), Ulysses()], layout=[head_tail, contiguous])
def test_strategies_and_lengths_that_do_not_divide(strategy, layout):
    exact(Cut(Problem(length=13, heads=8, kv_heads=4), layout=layout), strategy=strategy)
    exact(Cut(Problem(length=13, heads=8, kv_heads=4), QUERIES, layout=layout), strategy=strategy)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (6, 3), (10, 5), (3, 3), (12, 3)])
def test_key_heads_that_tp_does_not_divide(heads: int, kv_heads: int):
    """Replicated keys: a rank's query heads find theirs, also where these are no even share (6 of 3, 10 of 5), and
    where a share of whole size begins within a key head (12 of 3)."""
    exact(Cut(Problem(length=12, heads=heads, kv_heads=kv_heads), QUERIES))


def test_heads_that_tp_cuts_unevenly():
    """5 heads are 3 and 2: each query head has its key head on the same rank."""
    exact(Cut(Problem(length=12, heads=5, kv_heads=5)))


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("cp", "dp", "tp"), (2, 1, 2)),
        (("cp", "tp"), (1, 2)),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in ((("tp", "cp"), (2, 2)), (("dp", "cp", "tp"), (2, 2, 1)))
        ),
    ],
    ids=str,
)
def test_meshes(names, sizes):
    """Axes in another order, with more of them between, and an axis of one rank."""
    for full in (False, len(names) == 2):
        for placements in (ALIKE, QUERIES):
            exact(Cut(Problem(length=12, kv_heads=2), placements, full=full), *sizes, names=names)


def test_axes_of_any_name_and_both_at_once():
    problem = Problem(length=12, kv_heads=2)
    exact(Cut(problem, axis="model"), names=("cp", "model"))

    def on(rank: int) -> list[float]:
        """The sequence axis has another name as well, and two axes cut: the batch and the heads."""
        mesh = composed_mesh(2, 2, 2, names=("seq", "dp", "tp"))
        core = parallel(Core(), mesh, mesh_axis="seq")
        own = mesh.get_local_rank("seq")
        leaves, cotangent = problem.shard(head_tail, own, 2)
        place = [Shard(0), Shard(1)]

        def cut(x):
            x = x.detach().chunk(2, 0)[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")]
            return DTensor.from_local(x.contiguous(), mesh["dp", "tp"], place, run_check=False)

        inputs = [cut(x).requires_grad_() for x in leaves]
        out = core(*inputs)
        out.backward(cut(cotangent))
        return problem.errors([x.full_tensor() for x in (out.detach(), *(i.grad for i in inputs))], head_tail, own, 2)

    assert max(map(max, run_ranks(on, 8))) < EXACT


# -- masks --


@sampled(1, placements=[ALIKE, QUERIES], strategy=[Ring(), Ulysses()])
def test_a_mask_of_every_head(placements, strategy):
    """Dense masks have the heads of all tp ranks; every rank takes its own, of the style's and of the call's."""
    mask = torch.rand(1, 4, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    cut = Cut(Problem(length=12, kv_heads=2, causal=False, mask=mask[0]), placements)
    exact(cut, causal=False, strategy=strategy, mask=Dense(mask))

    class Masked(nn.Module):
        def forward(self, q, k, v, attn_mask):
            return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True)

    def on(rank: int) -> list[float]:
        mesh = composed_mesh()
        core = parallel(Masked(), mesh, strategy=strategy)
        return cut.errors(lambda *qkv: core(*qkv, mask), mesh)

    assert max(map(max, run_ranks(on, 4))) < EXACT


@pytest.mark.parametrize("cost", [0.0, 1e9])
@pytest.mark.parametrize("placements", [ALIKE, QUERIES])
def test_keys_that_each_head_selects(placements, cost: float, monkeypatch):
    """A choice has the groups of all tp ranks, and is gathered or hidden."""
    monkeypatch.setattr(selected, "_COSTS", {"cpu": (cost, 0.0)})
    numbers = torch.randint(-4, 12, (1, 4, 12, 3), generator=torch.Generator().manual_seed(0)).clamp(min=-1)
    mask = (numbers[..., None] == torch.arange(12)).any(-2)
    cut = Cut(Problem(length=12, kv_heads=2, causal=False, mask=mask[0]), placements)

    def on(rank: int) -> list[float]:
        mesh, layout = composed_mesh(), head_tail(12, 2)
        own = layout.shard(numbers, 2, mesh.get_local_rank("cp"))
        of_rank = selected_keys(own, mesh["cp"], layout=layout)
        return cut.errors(parallel(Core(causal=False), mesh, mask=of_rank, layout=layout), mesh)

    assert max(map(max, run_ranks(on, 4))) < EXACT


# -- what goes over which axis --


@pytest.mark.parametrize(
    ("placements", "over_tp"), [(ALIKE, {}), (QUERIES, {"all_reduce": 2})], ids=["heads", "queries"]
)
def test_what_goes_over_which_axis(placements, over_tp):
    """Over cp the ranks' agreement and the ring; over tp the gradients of replicated keys and values, nothing else."""
    cut = Cut(Problem(length=12, kv_heads=2), placements)

    def on(rank: int):
        mesh = composed_mesh()
        core = parallel(Core(), mesh)
        leaves, cotangent = cut.leaves(mesh), cut.problem.shard(head_tail, mesh.get_local_rank("cp"), 2)[1]
        laid = cut._lay(cotangent, HEADS, mesh)
        with CommunicationTrace() as trace:
            core(*leaves).backward(laid)
        return [dict(trace.calls_over(mesh[axis])) for axis in ("cp", "tp")], trace.sent_bytes

    for (over_cp, of_tp), sent in run_ranks(on, 4):
        assert over_cp == {"all_gather": 2, "send": 3}
        assert of_tp == over_tp
        assert sent > 0


# -- a module's life --


@sampled(1, placements=[ALIKE, QUERIES, (WHOLE,) * 3, (Shard(0),) * 3], full=[False, True], copied=[False, True])
def test_a_parameter_inside(placements, full: bool, copied: bool):
    """Its gradient is this cp rank's share, and whole over the other axis, as a replicated parameter's is."""
    problem = Problem(length=12, kv_heads=2)
    alone = Scaled()
    alone(*problem.inputs).backward(problem.cotangent)
    assert alone.gain.grad is not None

    def on(rank: int) -> float:
        mesh = composed_mesh()
        core, cut = parallel(Scaled(), mesh), Cut(problem, placements, full=full)
        core = copy.deepcopy(core) if copied else core
        leaves = cut.leaves(mesh)
        laid = cut._lay(problem.shard(head_tail, mesh.get_local_rank("cp"), 2)[1], placements[0], mesh)
        core(*leaves).backward(laid)
        assert type(core.gain.grad) is torch.Tensor
        return float(core.gain.grad)

    shares = run_ranks(on, 4)
    assert shares[0] == shares[1]
    assert shares[2] == shares[3]
    assert abs(shares[0] + shares[2] - float(alone.gain.grad)) < EXACT * abs(float(alone.gain.grad))


def test_a_parameter_inside_on_three_axes():
    """Summed over tp, which cuts the heads, and not over dp, whose ranks hold equal rows."""
    problem = Problem(length=12, kv_heads=2)
    alone = Scaled()
    alone(*problem.inputs).backward(problem.cotangent)
    assert alone.gain.grad is not None

    def on(rank: int) -> float:
        mesh, cut = composed_mesh(2, 2, 2, names=("cp", "dp", "tp")), Cut(problem, QUERIES, full=True)
        core, leaves = parallel(Scaled(), mesh), cut.leaves(mesh)
        laid = cut._lay(problem.shard(head_tail, mesh.get_local_rank("cp"), 2)[1], HEADS, mesh)
        core(*leaves).backward(laid)
        return float(core.gain.grad)

    shares = run_ranks(on, 8)
    assert shares == [shares[0]] * 4 + [shares[4]] * 4
    assert abs(shares[0] + shares[4] - float(alone.gain.grad)) < EXACT * abs(float(alone.gain.grad))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool):
    def on(rank: int) -> list[float]:
        mesh, cut = composed_mesh(), Cut(Problem(length=13, kv_heads=2), QUERIES)
        core = parallel(Core(), mesh)
        return cut.errors(lambda *qkv: checkpoint(core, *qkv, use_reentrant=reentrant), mesh)

    assert max(map(max, run_ranks(on, 4))) < EXACT


def test_one_private_mesh_for_inputs_of_every_form():
    """A batch a scope: DTensor remembers every mesh for ever. Inside are this rank's heads."""
    problem = Problem(length=12, kv_heads=2)
    forms = [Cut(problem), Cut(problem, QUERIES, full=True), Cut(problem, (WHOLE,) * 3), Cut(problem, (Shard(0),) * 3)]
    forms.append(Cut(Problem(length=12, kv_heads=4), QUERIES, full=True))

    def on(rank: int) -> list[tuple[int, int]]:
        mesh = composed_mesh()
        seen, heads = set(), []

        class Watching(Core):
            def forward(self, query, key, value):
                assert is_private(query)
                assert query.placements == (Shard(2),)
                seen.add(id(query.device_mesh))
                heads.append((query.shape[1], key.shape[1]))
                return super().forward(query, key, value)

        core = parallel(Watching(), mesh)
        for cut in forms:
            with SequenceScope(head_tail(12, 2)):
                assert max(cut.errors(core, mesh)) < EXACT
        core(*(problem.shard(head_tail, mesh.get_local_rank("cp"), 2)[0]))
        assert len(seen) == 1
        return heads

    assert run_ranks(on, 4) == [[(2, 1), (2, 1), (4, 2), (4, 2), (2, 2), (4, 2)]] * 4


# -- outputs --


@sampled(1, placements=[ALIKE, QUERIES, (WHOLE,) * 3, (Shard(0),) * 3], full=[False, True])
def test_outputs_of_another_order(placements, full: bool):
    """[B, S, H, D] in place of [B, H, S, D], and several outputs: DTensors placed as the query's dims are."""
    cut = Cut(Problem(length=12, kv_heads=2), placements, full=full)

    def on(rank: int) -> list[float]:
        mesh = composed_mesh()
        own = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False)
        core = parallel(Returns(lambda out: {"turned": (out.transpose(1, 2), 3), "twice": 2 * out, "own": own}), mesh)
        leaves = cut.leaves(mesh)
        outputs = core(*leaves)
        turned, number = outputs["turned"]
        assert number == 3
        assert outputs["own"] is own
        assert torch.equal(part_of(outputs["twice"]), 2 * part_of(turned).transpose(1, 2))
        return cut.finish(turned.transpose(1, 2), leaves, mesh)

    assert max(map(max, run_ranks(on, 4))) < EXACT


def test_outputs_of_any_shape_where_no_axis_cuts():
    """All heads are there: joined inside, replicated over tp as the query is."""
    problem = Problem(length=12, kv_heads=2)
    cut = Cut(problem, (WHOLE,) * 3)

    def on(rank: int) -> list[float]:
        mesh = composed_mesh()
        core = parallel(Returns(lambda out: out.transpose(1, 2).flatten(2)), mesh)
        leaves = cut.leaves(mesh)
        joined = core(*leaves)
        assert joined.placements == (WHOLE,)
        return cut.finish(joined.unflatten(2, (4, -1)).transpose(1, 2), leaves, mesh)

    assert max(map(max, run_ranks(on, 4))) < EXACT


@pytest.mark.parametrize("full", [False, True], ids=["tp", "cp x tp"])
def test_heads_that_are_joined_outside(full: bool):
    """The remedy of the error for joined heads: the output is cut as the joined heads are."""
    cut = Cut(Problem(length=12, kv_heads=2), full=full)

    def on(rank: int) -> list[float]:
        mesh = composed_mesh()
        leaves = cut.leaves(mesh)
        joined = parallel(Core(), mesh)(*leaves).transpose(1, 2).flatten(2)
        assert joined.placements[-1] == Shard(2)
        return cut.finish(joined.unflatten(2, (4, -1)).transpose(1, 2), leaves, mesh)

    assert max(map(max, run_ranks(on, 4))) < EXACT
