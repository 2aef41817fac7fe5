"""torch.compile, mostly fullgraph: through every door, forward and backward equal those of one device."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from cp_styles import Checks
from cp_styles.batch import sum_gradients
from cp_styles.comm import agreement
from cp_styles.engine.checkpoint import save_attention
from cp_styles.engine.config import config_in_graph
from cp_styles.engine.scope import SequenceScope
from cp_styles.functions.attention import context_attention
from cp_styles.kernels import ReferenceKernel
from cp_styles.layouts import by_work, contiguous, head_tail
from cp_styles.masks import Causal, Dense, Documents, SlidingWindow
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import RankError
from cp_styles.torch_api import context_parallel
from tests.covering import at_night, sampled
from tests.oracle import allowed, document_of, error, randn
from tests.ranks.attention_case import EXACT, Problem, Projected, cp_mesh, run_attention
from tests.ranks.compiling import (
    DOORS,
    LENGTHS,
    PROBLEMS,
    RANKS,
    Block,
    Grouped,
    Traces,
    cannot_compile_on_threads,
    compiled,
    door,
    on_every_rank,
    ranks_here,
    run_ranks,
)

pytestmark = cannot_compile_on_threads


# What is compiled.
AROUND = {"the attention": lambda attend: attend, "a model": Block}


@sampled(
    1,
    name=DOORS,
    strategy=[Ring(), AllGather(), Ulysses()],
    dynamic=[False, None, True],  # by default not what takes longest: dynamic shapes of a style's DTensors
    around=list(AROUND),
    seq_dim=[1, 2],
    fullgraph=[True, False],
    where=lambda name, seq_dim, **_: seq_dim == 2 or name == "style",
)
def test_every_door_and_strategy(name: str, strategy, dynamic: bool | None, around: str, seq_dim: int, fullgraph: bool):
    """Without fullgraph=True nothing breaks the graph that would not break it there. And lengths vary."""

    def on(rank: int):
        options = {} if name == "function" else {"core": Grouped(seq_dim=seq_dim)}
        options |= {"seq_dim": 1} if seq_dim == 1 else {}
        attend = door(name, cp_mesh(RANKS), strategy=strategy, **options)
        act = torch.compile(AROUND[around](attend), backend="aot_eager", dynamic=dynamic, fullgraph=fullgraph)
        for length in LENGTHS[:1] if fullgraph and dynamic is False else LENGTHS:
            assert max(run_attention(act, PROBLEMS[length], rank, RANKS, seq_dim=seq_dim)) < EXACT

    counters.clear()
    run_ranks(on, RANKS)
    assert not counters["graph_break"]


class Fused(nn.Module):
    """Attention that a program compiles by itself, in one graph, often with the kernel that it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", dynamic=False, fullgraph=True)

    def forward(self, query, key, value):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self.attend(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["block", "style", "module"])
def test_a_compiled_attention_function(name: str):
    """Its graph is traced inside the door, whose mode is entered; twice, as the second call takes the graph."""

    def on(rank: int):
        core, mesh = Fused(), cp_mesh(RANKS)
        attend = core if name == "block" else door(name, mesh, core)
        with context_parallel(mesh, layout=head_tail) if name == "block" else nullcontext():
            for _ in range(2):
                assert max(run_attention(attend, PROBLEMS[13], rank, RANKS)) < EXACT

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # of the process: threads that set and restored it would leave it
        run_ranks(on, RANKS)


@pytest.mark.parametrize("name", ["function", *at_night("module", "style")])
def test_without_agreement_the_ranks_do_not_meet(name: str, monkeypatch):
    # A CommunicationTrace would keep torch.compile from compiling.
    monkeypatch.setattr(agreement, "start_numbers", lambda *arguments: pytest.fail("a meeting"))

    def on(rank: int):
        layout, mesh = head_tail(LENGTHS[0], RANKS), cp_mesh(RANKS)
        attend = compiled(door(name, mesh, layout=layout, checks=Checks(agreement=False)))
        assert max(run_attention(attend, PROBLEMS[LENGTHS[0]], rank, RANKS)) < EXACT

    run_ranks(on, RANKS)


@pytest.mark.parametrize("fullgraph", [True, *at_night(False)])
@pytest.mark.parametrize("name", ["module", *at_night("style", "function")])
def test_layers_that_are_compiled_one_by_one_share_their_graph(name: str, fullgraph: bool):
    """More of them than torch compiles for one function, where there is something in each that is its own."""
    traces, layers = Traces(), torch._dynamo.config.recompile_limit + 1

    def on(rank: int):
        mesh = cp_mesh(RANKS)
        model = nn.ModuleList(Block(door(name, mesh)) for _ in range(layers))
        for layer in model:
            layer.compile(backend=traces.backend, fullgraph=fullgraph)
            assert max(run_attention(layer, PROBLEMS[16], rank, RANKS)) < EXACT

    run_ranks(on, RANKS)
    assert len(traces.forwards) == len(traces.backwards) == ranks_here()


class Breaking(Grouped):
    """With something inside that torch.compile does not put into a graph."""

    def __init__(self, where: str, **options) -> None:
        super().__init__(**options)
        self.where = where

    def forward(self, query, key, value):
        if self.where == "before":
            torch._dynamo.graph_break()
        out = super().forward(query * 1.0, key, value) * 1.0
        if self.where == "after":
            torch._dynamo.graph_break()
        return out * 1.0


@pytest.mark.nightly  # by day a block breaks a graph: test_block_compiled.py
@sampled(2, name=["style", "module"], broken=["before", "after"], around=["a model", "the attention"])
def test_a_module_that_breaks_the_graph(name: str, broken: str, around: str):
    """Between graphs everything is as right as in them."""

    def on(rank: int):
        attend = door(name, cp_mesh(RANKS), Breaking(broken))
        act = torch.compile(AROUND[around](attend), backend="aot_eager")
        assert max(run_attention(act, PROBLEMS[13], rank, RANKS)) < EXACT
        dist.barrier()

    counters.clear()
    run_ranks(on, RANKS)
    assert counters["graph_break"]


@pytest.mark.parametrize("name", ["function", *at_night("module")])
def test_other_lengths_are_the_same_graph(name: str):
    """However many there are, once the compiler has seen that they vary."""
    traces = Traces()

    def on(rank: int):
        attend = compiled(door(name, cp_mesh(RANKS)), traces.backend, dynamic=True)
        for length in (20, 24, 28, 32):
            assert max(run_attention(attend, Problem(length=length, kv_heads=2), rank, RANKS)) < EXACT

    run_ranks(on, RANKS)
    assert len(traces.forwards) == ranks_here()


@pytest.mark.parametrize("name", ["function", *at_night("style", "module")])
@on_every_rank(RANKS)
def test_other_configurations_are_other_graphs(mesh, rank: int, name: str):
    """One compiled function after another layout, window and kernel, and back: each is attended by its own."""
    window = SlidingWindow(3, 0)
    seen = Problem(length=16, kv_heads=2, mask=allowed(lambda p, j: p - 3 <= j <= p, 16, 16))
    configurations = [
        (PROBLEMS[16], head_tail, {"layout": head_tail}),
        (seen, contiguous, {"layout": contiguous, "mask": window}),
        (PROBLEMS[16], BY_WORK, {"layout": BY_WORK, "kernel": ReferenceKernel(), "strategy": AllGather(keep=0)}),
        (PROBLEMS[16], head_tail, {"layout": head_tail(16, RANKS)}),
    ]
    block = Block(torch.add)
    attend = torch.compile(block, backend="aot_eager", fullgraph=True)
    for problem, layout, options in configurations:
        block.attend = door(name, mesh, **options)
        assert max(run_attention(attend, problem, rank, RANKS, layout=layout)) < EXACT


BY_WORK = partial(by_work, mask=Causal())


def documents(lengths: tuple[int, ...]) -> Problem:
    document, length = document_of(lengths), sum(lengths)
    return Problem(
        length=length,
        kv_heads=2,
        mask=allowed(lambda p, j: document(p) == document(j) and j <= p, length, length),
    )


@pytest.mark.parametrize("name", ["module", *at_night("style")])
def test_batches_of_documents_are_one_graph(name: str):
    """Scopes come and go, and end before the backward: what is compiled asks at every run."""
    batches = [(documents(lengths), Documents(lengths)) for lengths in ((3, 13), (9, 2, 5), (16,), (1, 15))]
    traces = Traces()

    def on(rank: int):
        attend = compiled(door(name, cp_mesh(RANKS)), traces.backend)
        started = []
        for index, (problem, mask) in enumerate(batches):
            layout = contiguous(16, RANKS) if index % 2 else head_tail(16, RANKS)
            leaves, cotangent = problem.shard(layout, rank, RANKS)
            with SequenceScope(layout, mask=mask):
                started.append((problem, layout, leaves, cotangent, attend(*leaves)))
        for problem, layout, leaves, cotangent, out in reversed(started):
            out.backward(cotangent)
            found = [out.detach(), *(leaf.grad for leaf in leaves)]
            assert max(problem.errors(found, layout, rank, RANKS)) < EXACT
        assert max(run_attention(attend, PROBLEMS[16], rank, RANKS)) < EXACT  # and without a scope

    run_ranks(on, RANKS)
    assert len(traces.forwards) == ranks_here()  # each with a module of its own


@pytest.mark.parametrize("name", ["module", *at_night("style", "function")])
def test_masks_that_are_tensors(name: str):
    """Of the style, of a balancer, and of the call; they are inputs of the graph."""
    masks = [randn(seed, 16, 16) < 0.5 for seed in (1, 2)]
    for mask in masks:
        mask.fill_diagonal_(True)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()

    class Masked(nn.Module):
        def forward(self, query, key, value, attn_mask):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)

    def on(rank: int):
        mesh = cp_mesh(RANKS)
        for mask, balanced in zip(masks, (False, True), strict=True):
            problem, dense = Problem(length=16, kv_heads=2, mask=mask & causal), Dense(mask)
            layout = partial(by_work, mask=dense) if balanced else head_tail  # a text has the mask twice
            attend = compiled(door(name, mesh, mask=dense, layout=layout))
            assert max(run_attention(attend, problem, rank, RANKS, layout=layout)) < EXACT
        if name != "function":
            masked = torch.compile(door(name, mesh, Masked()), backend="aot_eager", fullgraph=True)
            for mask in masks:
                problem = Problem(length=16, kv_heads=2, mask=mask)
                attend = partial(lambda mask, *qkv: masked(*qkv, mask), mask)
                assert max(run_attention(attend, problem, rank, RANKS)) < EXACT

    run_ranks(on, RANKS)


@pytest.mark.nightly
@on_every_rank(RANKS)
def test_strategies_that_are_made_where_they_are_used(mesh, rank: int):
    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        outs = [
            context_attention(*qkv, mesh=mesh, strategy=strategy(), layout=head_tail, mask=Causal())
            for strategy in (Ring, AllGather, Ulysses)
        ]
        return (outs[0] + outs[1] + outs[2]) / 3

    assert max(run_attention(compiled(attend), PROBLEMS[16], rank, RANKS)) < EXACT


@pytest.mark.nightly  # by default what memory there is: tests/process/compile_tp_cp.py
@on_every_rank(RANKS)
def test_what_autograd_keeps(mesh, rank: int):
    """In units of a rank's queries, eager and compiled: Ulysses keeps its heads' query, key, value and output, and not
    those of its rows. A ring that keeps no keys of others has its inputs and its output."""
    leaves, cotangent = Problem(length=64, kv_heads=4, dim=16).shard(contiguous, rank, RANKS)
    unit, kept = cotangent.nbytes, []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    for strategy in (Ring(keep=0), Ulysses()):
        attend = partial(context_attention, mesh=mesh, strategy=strategy, layout=contiguous, mask=Causal())
        for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
            storages: dict[int, int] = {}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                out = call(*leaves)
            out.backward(cotangent)
            kept.append(sum(storages.values()) / unit)
    # The logsumexp, and some hundred bytes: of layouts, and of the names of bindings.
    assert kept == pytest.approx([4.0] * 4, abs=0.1), kept


@on_every_rank(RANKS)
def test_sinks(mesh, rank: int):
    attends = [partial(context_attention, mesh=mesh, mask=Causal())]
    attends.append(torch.compile(attends[0], backend="aot_eager", fullgraph=True))
    found = []
    for attend in attends:
        leaves, cotangent = PROBLEMS[13].shard(head_tail, rank, RANKS)
        sink = randn(7, 4).requires_grad_()
        out = attend(*leaves, sink_H=sink)
        out.backward(cotangent)
        found.append([out.detach(), sink.grad, *(leaf.grad for leaf in leaves)])
    assert max(map(error, *found)) < EXACT  # as eager, which is held to the oracle elsewhere


class Scaled(Grouped):
    """A parameter inside the module: its gradient is a sum over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, query, key, value):
        return super().forward(query * self.temperature, key, value)


@on_every_rank(RANKS)
def test_gradients_of_parameters_inside(mesh, rank: int):
    problem = Problem(length=13, kv_heads=2, scale=1.5 * 8**-0.5)
    # <dq, q> with respect to their product, and that one's to the temperature.
    wanted = (problem.expected[1] * problem.inputs[0]).sum() / 1.5
    core = door("module", mesh, Scaled())
    leaves, cotangent = problem.shard(head_tail, rank, RANKS)
    compiled(core)(*leaves).backward(cotangent)
    sum_gradients(core, mesh)
    assert error(core.temperature.grad, wanted) < EXACT
    with pytest.raises(Exception, match="cannot trace plain parameters together with DTensors"):
        compiled(door("style", mesh, Scaled()))(*leaves)


# -- checkpoints --


def without_side_effects():
    """A module that counts its attention calls has what torch.compile calls side effects. Under a checkpoint it wants
    to be told, thread by thread, that the recomputation need not repeat them."""
    return torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)


@pytest.mark.parametrize("name", ["module", *at_night("style", "function")])
def test_a_selective_checkpoint_attends_once(name: str):
    """And a plain one twice, which the test therefore would see. All that communicates is inside the one op."""
    kept = save_attention()

    def graphs(**options) -> Traces:
        torch.compiler.reset()
        traces = Traces()

        def on(rank: int):
            block = Block(door(name, cp_mesh(RANKS)))

            def layer(query, key, value):
                return checkpoint(block, query, key, value, use_reentrant=False, **options)

            attend = torch.compile(layer, backend=traces.backend, fullgraph=True)
            with without_side_effects():
                assert max(run_attention(attend, PROBLEMS[16], rank, RANKS)) < EXACT

        run_ranks(on, RANKS)
        return traces

    for options, forwards in (({"context_fn": kept}, 0), ({}, 1)):
        traces = graphs(**options)
        assert traces.ops(traces.forwards[:1]) == ["cp_styles.attention.default"]
        again = ["cp_styles.attention.default"] * forwards
        assert traces.ops(traces.backwards[:1]) == [*again, "cp_styles.attention_backward.default"]


def test_a_recomputation_without_its_scope_is_refused():
    """And right where the attention is kept: its scope is not asked for again."""
    problem, mask = documents((5, 11)), Documents((5, 11))
    kept = save_attention()

    def on(rank: int):
        for options in ({"context_fn": kept}, {}):
            block = Block(door("module", cp_mesh(RANKS)))

            def layer(query, key, value, block=block, options=options):
                return checkpoint(block, query, key, value, use_reentrant=False, **options)

            leaves, cotangent = problem.shard(head_tail, rank, RANKS)
            attend = torch.compile(layer, backend=Traces().backend, fullgraph=True)
            with SequenceScope(head_tail(16, RANKS), mask=mask), without_side_effects():
                out = attend(*leaves)
            if options:
                out.backward(cotangent)
                found = [out.detach(), *(leaf.grad for leaf in leaves)]
                assert max(problem.errors(found, head_tail, rank, RANKS)) < EXACT
            else:
                with pytest.raises(RuntimeError, match="where the SequenceScope of its batch is not known"):
                    out.backward(cotangent)

    run_ranks(on, RANKS)


@on_every_rank(1)
def test_the_ops(mesh):
    """What torch asks of an op: its schema, its fake kernel, its gradient, static and dynamic."""
    group = mesh.get_group()
    source = config_in_graph("test", "cp", group.group_name, Ring(), head_tail, Causal(), None)
    q, k, v = (x.clone().requires_grad_() for x in PROBLEMS[16].inputs)
    arguments = (q, k, v, None, None, None, source.config, False, None, True, "")
    torch.library.opcheck(torch.ops.cp_styles.attention.default, arguments)


@pytest.mark.nightly  # by day torch's own check of the op: test_the_ops
@pytest.mark.parametrize("strategy", [Ulysses(), Ring()], ids=str)
@pytest.mark.parametrize("value_dim", [5, 8])
def test_results_have_the_strides_that_graphs_were_promised(strategy, value_dim: int):
    """Those that the fake kernel says, whatever the inputs' are: inductor's code reads results by them. And results
    share no memory, which it may use again."""

    one_at_a_time = threading.Lock()  # torch's symbolic shapes are not made for threads

    def laid_out(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        return x.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])

    def on(rank: int):
        group = cp_mesh(RANKS).get_group()
        config = config_in_graph("test", "cp", group.group_name, strategy, head_tail, Causal(), None).config
        (q, k, v), cotangent = PROBLEMS[16].shard(head_tail, rank, RANKS)
        q, k, v, cotangent = q.detach(), k.detach(), v.detach()[..., :value_dim], cotangent[..., :value_dim]
        forward, backward = torch.ops.cp_styles.attention, torch.ops.cp_styles.attention_backward
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (2, 3, 0, 1)):
            given = [laid_out(x, order) for x in (q, k, v)]
            results = forward(*given, None, None, None, config, False, None, True, "")
            after = (*given, *results[:2], None, None, None, results[2], config, False, None)
            grads = backward(laid_out(cotangent, order), *after)
            with one_at_a_time, FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
                fakes = [mode.from_tensor(x) for x in given]
                promised = forward(*fakes, None, None, None, config, False, None, True, "")[:1]
                after = (*fakes, promised[0], *results[1:2], None, None, None, results[2], config, False, None)
                promised += backward(promised[0], *after)[:3]
            found = (results[0], *grads[:3])
            assert [x.stride() for x in found] == [x.stride() for x in promised]
            assert [x.shape for x in found] == [x.shape for x in promised]
            assert all(x.untyped_storage().nbytes() == x.nbytes for x in found)
            assert len({x.untyped_storage().data_ptr() for x in (*found, *given)}) == 7

    run_ranks(on, RANKS)


@on_every_rank(RANKS)
def test_a_module_that_unflattens(mesh, rank: int):
    """As attention modules with projections do; by itself torch.compile cannot trace Tensor.unflatten under a mode."""
    layout, x, cotangent = head_tail(13, RANKS), randn(1, 2, 13, 10), randn(2, 2, 13, 10)
    model = Projected(Grouped())
    parallelize_module(model, mesh, ModuleContextParallel())
    found = []
    for act in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        leaf = layout.shard(x, 1, rank).clone().requires_grad_()
        out = act(leaf)
        out.backward(layout.shard(cotangent, 1, rank))
        found.append((out.detach(), leaf.grad))
        dist.barrier()  # that a thread compiles is, to torch, that the process does
    assert max(map(error, *found)) < EXACT  # as eager, which is held to the oracle elsewhere


class Positioned(Projected):
    """As models of transformers, whose arguments are looked at while an enclosing module is traced."""

    def forward(self, x, position_ids=None, labels=None):
        return super().forward(x if position_ids is None else x + position_ids[..., None])


@on_every_rank(RANKS)
def test_a_compiled_module_around_a_model_with_positions(mesh, rank: int):
    layout, x = head_tail(13, RANKS), randn(1, 2, 13, 10)
    model = parallelize_module(Positioned(Grouped()), mesh, ModuleContextParallel(verified=True))
    part, positions = layout.shard(x, 1, rank), layout.positions(rank)[None]
    wanted = model(part, position_ids=positions)
    dist.barrier()
    averaged = AveragedModel(model)
    averaged.compile(backend="aot_eager")
    found = averaged(part, position_ids=positions)
    with pytest.raises(ValueError, match="takes position_ids and was given none"):
        averaged(part)
    dist.barrier()  # is_compiling() is the process'
    return error(found, wanted)


@pytest.mark.parametrize("layout", ["layout", *at_night("balancer")])
@pytest.mark.parametrize("which", ["module", *at_night("style", "function")])
@on_every_rank(RANKS)
def test_one_rank_is_compiled_and_the_others_are_not(mesh, rank: int, which: str, layout: str):
    """As after torch.compile's limit of recompilations, which ranks may reach at other times."""
    cut = head_tail(16, RANKS) if layout == "layout" else head_tail
    attend = door(which, mesh, layout=cut)
    fast = torch.compile(attend, backend="aot_eager")
    run_attention(fast, PROBLEMS[16], rank, RANKS)
    dist.barrier()  # is_compiling() is the process'
    return max(run_attention(fast if rank == 0 else attend, PROBLEMS[16], rank, RANKS))


@pytest.mark.skipif(ranks_here() != RANKS, reason="one world in a process of its own")
@pytest.mark.parametrize("which", ["module", *at_night("style", "function")])
def test_a_graph_holds_no_group_that_was_destroyed(which: str):
    """Its connections and threads would stay, for each restart of the groups."""

    def on(rank: int) -> weakref.ref[dist.ProcessGroup]:
        mesh = cp_mesh(RANKS)
        run_attention(compiled(door(which, mesh)), PROBLEMS[16], rank, RANKS)
        return weakref.ref(mesh.get_group())

    groups = run_ranks(on, RANKS)
    torch.compiler.reset()
    gc.collect()
    assert [group() for group in groups] == [None] * RANKS


@pytest.mark.skipif(ranks_here() != RANKS, reason="one world in a process of its own")
@pytest.mark.nightly  # by day a graph whose group was destroyed
@pytest.mark.parametrize("which", ["module", "style"])
def test_a_graph_takes_no_group_that_has_the_name_of_its_own(which: str):
    """After the groups were made again, it may be that of another mesh axis."""
    attends = {}

    def on(rank: int) -> None:
        if rank not in attends:
            attends[rank] = compiled(door(which, cp_mesh(RANKS)))
        run_attention(attends[rank], PROBLEMS[16], rank, RANKS)

    run_ranks(on, RANKS)
    with pytest.raises(RankError) as caught:
        run_ranks(on, RANKS)
    for error_of_rank in caught.value.errors.values():
        assert "was destroyed (destroy_process_group): apply the style to a new module" in str(error_of_rank)


class OfTheirOwn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)


@on_every_rank(RANKS)
def test_modules_of_many_classes_are_compiled(mesh):
    """torch.compile makes at most eight graphs of one code object, and then runs it uncompiled without a word."""
    x, frames = torch.ones(1, 2, 6, 4), list[int]()
    for number in range(10):
        forward = FunctionType(OfTheirOwn.forward.__code__.replace(), globals())
        module = type(f"Layer{number}", (nn.Module,), {"forward": forward})()
        counter = CompileCounterWithBackend("aot_eager")
        torch.compile(parallelize_module(module, mesh, ModuleContextParallel()), backend=counter)(x)
        frames.append(counter.frame_count)
    assert all(frames), frames
