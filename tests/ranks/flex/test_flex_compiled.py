"""torch.compile and FlexAttention or varlen_attn: of the attention itself and of what calls it, in modules, blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.varlen import AuxRequest as LogsumexpToo
from torch.nn.attention.varlen import varlen_attn

from cp_styles import flex_attention
from cp_styles.comm import agreement
from cp_styles.functions.varlen import context_varlen_attention
from cp_styles.layouts import SequenceLayout, head_tail
from cp_styles.styles import ModuleContextParallel
from cp_styles.torch_api import context_parallel
from tests.covering import at_night
from tests.oracle import randn
from tests.ranks import flex_case as case
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.ranks.compiling import RANKS, cannot_compile_on_threads, entered_together, on_every_rank, run_ranks
from tests.ranks.flex_case import FlexProblem

pytestmark = cannot_compile_on_threads

LENGTH = 61
LAYOUT = head_tail(LENGTH, RANKS)
LEARNED = (randn(21) ** 2 + 1, randn(22, 4) * 0.1)
PROBLEMS = {
    "plain": FlexProblem(length=LENGTH),
    "masked": FlexProblem(case.sinks_and_window, length=LENGTH),
    "learned": FlexProblem(case.sinks_and_window, case.learned_softcap, LEARNED, length=LENGTH),
}
DOORS = ["module", "block"]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch):
    torch.compiler.reset()
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 2.0)  # as in tests/ranks/compile/conftest.py


class Model(nn.Module):
    """Something to compile before and after ``attend``."""

    def __init__(self, attend: Callable[..., Any] = flex_attention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v, *args, **options):
        out, other = self.attend(q.exp().log(), k * 1.0, v * 1.0, *args, **options)
        return out * 2.0 / 2.0, other


def behind(
    door: str, model: nn.Module, layout: SequenceLayout, compiler: Callable[[Any], Any] = lambda model: model
) -> Callable[..., Any]:
    """``model`` as a user of that door calls it, compiled or not; a block ends before the backward."""
    mesh = cp_mesh(layout.ranks)
    if door == "module":
        return compiler(parallelize_module(model, mesh, ModuleContextParallel(layout=layout)))
    model = compiler(model)

    def inside(*args, **options):
        with context_parallel(mesh, layout=layout):
            return model(*args, **options)

    return inside


def check(whole: FlexProblem, attend: Callable[..., Any], layout: SequenceLayout, rank: int) -> None:
    found = whole.run(attend, layout, rank)
    parts: list[Any] = [None] * layout.ranks
    dist.all_gather_object(parts, found)
    assert max(whole.errors(parts, layout)) < EXACT


def never(graph, example_inputs):
    raise AssertionError("torch.compile made a graph of an attention")


@pytest.mark.parametrize("door", ["module", *at_night("block")])
@pytest.mark.parametrize("asked", ["return_aux", *at_night("return_lse")])
def test_what_torch_compile_made_of_flex_attention(door: str, asked: str):
    """As its users have it at the top of a file: the engine runs, and nothing is compiled (in float64)."""
    compiled = torch.compile(flex_attention, backend=never)

    def attend(model, *args, **options):
        if asked == "return_lse":
            return model(*args, return_lse=True, **options)
        out, aux = model(*args, return_aux=AuxRequest(lse=True), **options)
        assert aux.max_scores is None
        return out, aux.lse

    def on(rank: int):
        model = behind(door, Model(compiled), LAYOUT)
        for whole in PROBLEMS.values():
            check(whole, partial(attend, model), LAYOUT, rank)

    run_ranks(on, RANKS)


# By itself, and not as one graph, it is refused as without a compiler: test_flex.py.
PLACES = [("module", "whole"), ("module", "its caller"), *at_night(("block", "itself"))]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", ["masked", *at_night("plain")])
def test_torchs_own_function_is_refused(name: str, place: tuple[str, str]):
    """Compiled as one graph, with its errors while it is traced; by itself; and with its caller."""
    attend, (door, how) = torch.nn.attention.flex_attention.flex_attention, place
    if how != "its caller":
        attend = torch.compile(attend, backend="eager", fullgraph=how == "whole")
    compiler = torch.compile(backend="eager") if how == "its caller" else lambda model: model

    def on(rank: int):
        model, whole = behind(door, Model(attend), LAYOUT, compiler), PROBLEMS[name]
        with pytest.raises(NotImplementedError, match="from cp_styles import flex_attention"):
            model(*(LAYOUT.shard(x, 2, rank) for x in whole.inputs), block_mask=whole.block_mask, enable_gqa=True)

    run_ranks(on, RANKS)


@pytest.mark.parametrize("compiled_by", ["itself", *at_night("its caller")])
def test_elsewhere_it_is_compiled_as_ever(compiled_by: str):
    """Other compiled functions inside the module, and compiled flex_attention outside of it, before and after."""
    own, other = CompileCounter(), CompileCounter()
    compiled = torch.compile(flex_attention, backend=own, fullgraph=compiled_by == "its caller")
    beside = torch.compile(lambda q: q.exp().log(), backend=other, fullgraph=True)
    q, k, v = (randn(seed, 1, 2, 32, 8, dtype=torch.float32) for seed in range(3))
    block_mask = create_block_mask(case.causal, None, None, 32, 32, device="cpu")
    alone = flex_attention(q, k, v, block_mask=block_mask)

    def attend(q, *args, **options):
        return (flex_attention if compiled_by == "its caller" else compiled)(beside(q), *args, **options)

    def on(rank: int):
        whole, layout = PROBLEMS["learned"], head_tail(LENGTH, 1)
        compiler = torch.compile(backend="eager") if compiled_by == "its caller" else lambda model: model
        model = behind("module", Model(attend), layout, compiler)
        for _ in range(2):
            check(whole, partial(model, return_lse=True), layout, rank)
        if compiled_by == "itself":
            assert (own.frame_count, other.frame_count) == (0, 1)
        for frames in (1, 1):
            torch.testing.assert_close(compiled(q, k, v, block_mask=block_mask), alone)
            assert own.frame_count == frames
            assert own.op_count > 0

    run_ranks(on, 1)


WAYS = [
    ("module", "flex_attention"),
    ("block", "flex_attention"),
    ("module", "what torch.compile made of it"),
    ("block", "inside a compiled function"),
]


def compiled_model(door: str, how: str, counter: CompileCounterWithBackend, layout: SequenceLayout):
    attend = flex_attention
    if how == "what torch.compile made of it":
        attend = torch.compile(flex_attention, backend=never)
    if how == "inside a compiled function":
        attend = torch.compile(lambda q, *args, **options: flex_attention(q * 1.0, *args, **options), backend="eager")
    return partial(behind(door, Model(attend), layout, partial(torch.compile, backend=counter)), return_lse=True)


@pytest.mark.parametrize(
    ("door", "how"), [WAYS[0], *(pytest.param(*way, marks=pytest.mark.nightly) for way in WAYS[1:])]
)
@on_every_rank(RANKS)
def test_a_compiled_model(rank: int, door: str, how: str):
    """In graphs before and after the attention. By default one of the ways; two others run on one rank below."""
    counter = CompileCounterWithBackend("aot_eager")
    model = compiled_model(door, how, counter, LAYOUT)
    for name in ("plain", "learned"):
        check(PROBLEMS[name], model, LAYOUT, rank)
    assert counter.op_count >= 4  # what stands before the attention, at least
    dist.barrier()


@pytest.mark.nightly
@pytest.mark.parametrize(("door", "how"), WAYS)
@on_every_rank(1)
def test_its_graphs_stay_the_same(rank: int, door: str, how: str):
    """From step to step. On one rank: threads share what is compiled of a function, and how many graphs one of them
    needs depends on what the other has compiled by then."""
    layout = head_tail(LENGTH, 1)
    counter = CompileCounterWithBackend("aot_eager")
    model = compiled_model(door, how, counter, layout)
    graphs = []
    for name in ("plain", "learned", "learned", "learned"):
        check(PROBLEMS[name], model, layout, rank)
        graphs.append(counter.frame_count)
    assert graphs[0] < graphs[1] == graphs[2] == graphs[3]


@pytest.mark.nightly
@on_every_rank(RANKS)
def test_inductor(rank: int):
    """It is given what stands before and after the attention."""
    model = behind("module", Model(), LAYOUT, torch.compile)
    check(PROBLEMS["learned"], partial(model, return_lse=True), LAYOUT, rank)


CU = torch.tensor([0, 20, 21, 21, 30, LENGTH], dtype=torch.int32)
PACKED = case.pack_of((20, 1, 9, LENGTH - 30), (-1, 0), kv_heads=4)


def varlen(q, k, v):
    return varlen_attn(q, k, v, CU, CU, 31, 31, window_size=(-1, 0), return_aux=LogsumexpToo(lse=True))


@pytest.mark.nightly  # by default FlexAttention in a compiled model, above
@pytest.mark.parametrize("door", DOORS)
@on_every_rank(RANKS)
def test_varlen_in_a_compiled_model(rank: int, door: str):
    counter = CompileCounterWithBackend("aot_eager")
    model = behind(door, Model(varlen), LAYOUT, partial(torch.compile, backend=counter))
    check(PACKED, case.as_pack(model), LAYOUT, rank)
    assert counter.op_count >= 4
    dist.barrier()


@pytest.mark.nightly
@pytest.mark.parametrize("documents", [CU, *at_night([0, 20, 21, 30, LENGTH])], ids=["a tensor", "a list"])
@on_every_rank(RANKS)
def test_the_functions_in_a_compiled_caller(mesh, rank: int, documents):
    """Twice, because the second call finds what the first has made, and torch.compile would look into that."""

    def attend(q, k, v):
        given = {"window_size": (-1, 0), "return_lse": True, "layout": LAYOUT}
        return context_varlen_attention(q * 1.0, k * 1.0, v * 1.0, mesh, documents, **given)

    compiled = torch.compile(attend, backend="eager")
    for _ in range(2):
        check(PACKED, case.as_pack(compiled), LAYOUT, rank)


@pytest.mark.parametrize(
    ("door", "attention", "alone"),
    [
        ("module", varlen, False),
        ("block", partial(flex_attention, return_lse=True), False),
        ("module", partial(flex_attention, return_lse=True), True),
    ],
)
def test_one_graph_of_all_is_refused(door: str, attention, alone: bool):
    """In words, before anything is sent. ``alone``: of the attention itself."""
    inputs = (PACKED if attention is varlen else PROBLEMS["masked"]).inputs

    def compiler(model: nn.Module) -> Callable[..., Any]:
        return model if alone else torch.compile(entered_together(model), backend="eager", fullgraph=True)

    def on(rank: int):
        attend = torch.compile(attention, backend="eager", fullgraph=True) if alone else attention
        model = behind(door, Model(attend), LAYOUT, compiler)
        run = case.as_pack(model) if attention is varlen else model
        with pytest.raises(Exception, match="compile without fullgraph=True, which breaks the graph there"):
            run(*(LAYOUT.shard(x, 2, rank) for x in inputs))

    run_ranks(on, RANKS)
