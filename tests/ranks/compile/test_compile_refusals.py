"""torch.compile: errors of attention while it is traced and when the graph runs, on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_styles.engine.scope import SequenceScope
from cp_styles.layouts import head_tail
from cp_styles.masks import Dense
from cp_styles.strategies import Ulysses
from cp_styles.styles import ModuleContextParallel
from tests.covering import at_night, in_parts
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Projected, cp_mesh, run_attention
from tests.ranks.compiling import (
    PROBLEMS,
    RANKS,
    Grouped,
    cannot_compile_on_threads,
    compiled,
    door,
    entered_together,
    on_every_rank,
    run_ranks,
)

pytestmark = cannot_compile_on_threads


class Act(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, query, key, value):
        return self.act(query, key, value)


def attention(query, key, value, **options):
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


STYLES = ["module", "style"]


@in_parts(2)
@pytest.mark.parametrize(
    ("names", "act", "message"),
    [
        (STYLES, lambda q, k, v: attention(q, k, v, dropout_p=0.1), "dropout_p=0.1"),
        (STYLES, lambda q, k, v: q * 2, "no scaled_dot_product_attention was called inside"),
        (STYLES, lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "need enable_gqa=True"),
        (["style"], lambda q, k, v: attention(q - q.mean(2, keepdim=True), k, v), "nothing may gather the sequence"),
        (["style"], lambda q, k, v: attention(q[:, :, 1:], k, v), "nothing may gather the sequence"),
        (["style"], lambda q, k, v: attention(q, k, v).mean(2), "not sharded along the sequence"),
        (["style"], lambda q, k, v: attention(*(x.transpose(1, 2) for x in (q, k, v))), "check seq_dim"),
    ],
    ids=["dropout", "not reached", "gqa", "mean", "slice", "reduced", "moved"],
)
def test_what_a_module_may_not_do(names: list[str], act, message: str, part: int):
    """On every rank, in words, and nothing is wrong afterwards. By default of one style, and only after dropout
    something is compiled."""
    for name in names if part else names[:1]:

        def on(rank: int, name: str = name):
            mesh = cp_mesh(RANKS)
            bad = torch.compile(entered_together(door(name, mesh, Act(act))), backend="aot_eager", fullgraph=True)
            with pytest.raises(Exception) as caught:
                bad(*PROBLEMS[16].shard(head_tail, rank, RANKS)[0])
            # In what is said, and not in the lines of this file that torch.compile shows.
            assert message in str(caught.value).partition("from user code")[0]

            good = door(name, mesh)
            assert max(run_attention(good, PROBLEMS[16], rank, RANKS)) < EXACT
            if part or "dropout" in message:
                dist.barrier()  # that a thread compiles is, to torch, that the process does
                assert max(run_attention(compiled(good), PROBLEMS[16], rank, RANKS)) < EXACT

        run_ranks(on, RANKS)


@pytest.mark.parametrize("name", ["module", *at_night("style")])
@on_every_rank(RANKS)
def test_one_rank_whose_forward_cannot_be_traced(mesh, rank: int, name: str):
    """The others, whose graphs run, hear of it instead of waiting."""

    def fine(query, key, value):
        return attention(query, key, value)

    def bad(query, key, value):
        return attention(query, key, value).cos() if query.sum() else query  # what no one graph can decide

    act = bad if rank else fine
    core = entered_together(door(name, mesh, Act(act)))
    attend = torch.compile(core, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception) as caught:
        attend(*PROBLEMS[16].shard(head_tail, rank, RANKS)[0])
    heard = "ranks [1] of mesh axis 'cp' have failed"
    assert (heard if rank == 0 else "data-dependent") in str(caught.value).lower()


SPOILT = {
    "length": (lambda q, k, v: (q[:, :, :1], k, v), "positions, but the layout head_tail gives them"),
    "dtype": (lambda q, k, v: (q, k.float(), v), "must share one floating-point dtype"),
    "head dim": (lambda q, k, v: (q[..., :4], k[..., :4], v[..., :4]), "disagree on shape"),
}


@on_every_rank(RANKS)
def test_a_second_error_where_the_program_handles_the_first(mesh, rank: int):
    """It is told like the first one: a graph begins a call as eager code does."""
    attend = torch.compile(door("function", mesh), backend="aot_eager", fullgraph=True)
    q, k, v = PROBLEMS[16].shard(head_tail, rank, RANKS)[0]
    k = k.int() if rank == 1 else k

    words = list[str]()

    def hear(times: int) -> None:
        try:
            attend(q, k, v)
        except (ValueError, RuntimeError) as error:
            words.append(str(error))
            if times > 1:
                hear(times - 1)

    hear(2)
    told = "must share one floating-point dtype" if rank == 1 else "ranks [1]"
    assert [told in each for each in words] == [True, True], words


@pytest.mark.parametrize("what", ["length", *at_night("dtype", "head dim")])
@pytest.mark.parametrize("name", ["module", *at_night("style", "function")])
@on_every_rank(RANKS)
def test_one_rank_alone(mesh, rank: int, name: str, what: str):
    """What differs between ranks is seen when the graph runs, by all of them."""
    spoil, message = SPOILT[what]
    leaves = PROBLEMS[16].shard(head_tail, rank, RANKS)[0]
    attend = torch.compile(door(name, mesh), backend="aot_eager", fullgraph=True)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        attend(*(spoil(*leaves) if rank == 1 else leaves))
    text = str(caught.value)
    assert message in text or (rank == 0 and "ranks [1] of mesh axis 'cp' have failed" in text)


@on_every_rank(RANKS)
def test_what_no_text_can_stand_for(mesh, rank: int):
    """Eager takes any object; a graph needs one that another process finds."""
    local = lambda length, ranks: head_tail(length, ranks)  # noqa: E731
    for name in ("module", "function"):
        attend = door(name, mesh, layout=local)
        assert max(run_attention(attend, PROBLEMS[16], rank, RANKS)) < EXACT
        dist.barrier()  # that a thread compiles is, to torch, that the process does
        with pytest.raises(Exception, match="define it at the top level of a module") as caught:
            compiled(attend)(*PROBLEMS[16].shard(head_tail, rank, RANKS)[0])
        assert "SyntaxError" not in str(caught.value)
        dist.barrier()
    scoped = compiled(door("module", mesh))
    mask = Dense(torch.ones(16, 16, dtype=torch.bool))
    with (
        SequenceScope(head_tail(16, RANKS), mask=mask),
        pytest.raises(NotImplementedError, match="the mask of a scope cannot hold tensors"),
    ):
        scoped(*PROBLEMS[16].shard(head_tail, rank, RANKS)[0])


@pytest.mark.nightly
@on_every_rank(RANKS)
def test_a_strategy_that_cannot_run_on_these_ranks(mesh, rank: int):
    leaves, _ = PROBLEMS[16].shard(head_tail, rank, RANKS)
    with pytest.raises(ValueError, match=r"^Ulysses\(size=3\) does not divide the 2 ranks"):
        compiled(door("function", mesh, strategy=Ulysses(size=3)))(*leaves)


class Recomputed(nn.Module):
    """Reentrant checkpointing of whatever attends."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query, key, value):
        return checkpoint(self.attend, query, key, value, use_reentrant=True)


@pytest.mark.nightly
@on_every_rank(RANKS)
def test_a_compiled_function_that_runs_again_outside_of_its_module(mesh, rank: int):
    """Its recomputation enters the module's mode again, and so does that of a compiled layer."""
    function = torch.compile(partial(attention, is_causal=True), backend="aot_eager")
    layer = Grouped()
    layer.compile(backend="aot_eager", fullgraph=True)
    for attend in (function, layer):
        right = door("module", mesh, Recomputed(attend))
        assert max(run_attention(right, PROBLEMS[16], rank, RANKS)) < EXACT


class WithConvolution(nn.Module):
    """A convolution along the sequence, ``reached`` or not, before an attention."""

    def __init__(self, reached: bool) -> None:
        super().__init__()
        self.reached, self.conv, self.attention = reached, nn.Conv1d(10, 10, 3, padding=1), Projected(Grouped())
        for index, parameter in enumerate(self.conv.parameters()):
            parameter.data = randn(index, *parameter.shape)  # of all ranks

    def forward(self, x):
        return self.attention(self.conv(x.mT).mT if self.reached else x)


@pytest.mark.parametrize(
    ("reached", "fullgraph", "local"),
    [
        pytest.param(False, True, (), id="not called", marks=pytest.mark.nightly),
        pytest.param(True, False, (), id="called"),
        pytest.param(True, True, (), id="called, one graph"),
        pytest.param(True, True, ("conv",), id="local", marks=pytest.mark.nightly),
    ],
)
@on_every_rank(RANKS)
def test_a_layer_that_mixes_in_a_graph(mesh, rank: int, reached: bool, fullgraph: bool, local: tuple[str, ...]):
    """The error in its trace ends that, and the forward runs uncompiled, where it is raised on every rank."""
    x, layout, model = randn(0, 1, 16, 10), head_tail(16, RANKS), WithConvolution(reached).double()
    wanted = model(x).detach()
    parallelize_module(model, mesh, ModuleContextParallel(local=local))
    run = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    if reached and not local:
        kinds = Exception if fullgraph else NotImplementedError
        with pytest.raises(kinds, match=r"conv \(Conv1d\) carries values from token to token"):
            run(layout.shard(x, 1, rank))
        return
    out = run(layout.shard(x, 1, rank)).detach()
    if not reached:
        assert error(out, layout.shard(wanted, 1, rank)) < EXACT


@pytest.mark.nightly
@on_every_rank(1)
def test_a_layer_that_mixes_in_a_graph_of_one_rank(mesh):
    x, model = randn(0, 1, 16, 10), WithConvolution(True).double()
    wanted = model(x).detach()
    parallelize_module(model, mesh, ModuleContextParallel())
    assert error(torch.compile(model, backend="aot_eager", fullgraph=True)(x).detach(), wanted) < EXACT
