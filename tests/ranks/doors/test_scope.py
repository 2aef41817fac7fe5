"""SequenceScope: layout and mask of a batch apply to all attention under it and to its backward, in any scope."""

from __future__ import annotations

import contextlib
import gc
from contextlib import nullcontext
from contextvars import Context, copy_context
from functools import partial
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_styles.engine.scope import SequenceScope
from cp_styles.functions.attention import context_attention
from cp_styles.functions.flex import context_flex_attention
from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.masks import Causal, Documents, Full, SlidingWindow
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests.doors import by_varlen
from tests.oracle import allowed, dense_attention, document_of, error
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, on_every_rank
from tests.ranks.leak_scene import RANKS, Even, Scene, refusals

LENGTH = Even.problem.inputs[0].shape[2]
DOORS = {"style": AttentionContextParallel, "module": ModuleContextParallel}


def styled(door: str, mesh, *, causal: bool = True, **options) -> Core:
    return parallelize_module(Core(causal=causal), mesh, DOORS[door](**options))


class Batch:
    """Packed documents with a layout of their own, and what causal attention makes of them."""

    def __init__(self, seed: int, lengths: tuple[int, ...], balancer=None, *, window: int | None = None) -> None:
        document, length = document_of(lengths), sum(lengths)
        sees = allowed(
            lambda p, j: document(p) == document(j) and j <= p and (window is None or j >= p - window), length, length
        )
        self.mask = Documents(lengths)
        self.layout = (balancer or partial(per_document_head_tail, documents=lengths))(length, RANKS)
        self.problem = Problem(length=length, kv_heads=2, mask=sees, seed=seed)

    def scope(self) -> SequenceScope:
        return SequenceScope(self.layout, mask=self.mask)

    def leaves(self, rank: int):
        return self.problem.shard(self.layout, rank, RANKS)

    def check(self, rank: int, out, leaves) -> None:
        errors = self.problem.errors([out.detach(), *(leaf.grad for leaf in leaves)], self.layout, rank, RANKS)
        assert max(errors) < EXACT, errors


# Lengths, documents and layouts all differ, and one is shorter than there are ranks.
FIRST = Batch(1, (1, 9, 5))
SECOND = Batch(2, (7, 1, 1, 12), partial(by_work, mask=Documents((7, 1, 1, 12))))
SHORT = Batch(3, (2,), contiguous)


@pytest.mark.parametrize("door", DOORS)
@on_every_rank(RANKS)
def test_two_micro_batches_alive(mesh, rank: int, door: str):
    core = styled(door, mesh, strategy=Ring(keep=0))
    for order in ((0, 1), (1, 0)):
        batches, sets, outs = (FIRST, SECOND), [], []
        for batch in batches:
            sets.append(batch.leaves(rank))
            with batch.scope():
                outs.append(core(*sets[-1][0]))
        for index in order:
            outs[index].backward(sets[index][1])
            batches[index].check(rank, outs[index], sets[index][0])


class Scaled(Core):
    """Only its parameter wants a gradient: no node of an input holds what the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, query, key, value):
        return super().forward(query * self.factor, key, value)


@pytest.mark.parametrize("door", DOORS)
@on_every_rank(RANKS)
def test_a_graph_that_outlives_its_scope_and_its_module(mesh, rank: int, door: str):
    """While other batches come and go."""
    problem = FIRST.problem
    expected = (problem.expected[1] * problem.inputs[0]).sum()
    core = parallelize_module(Scaled(), mesh, DOORS[door]())
    leaves, cotangent = FIRST.leaves(rank)
    with FIRST.scope():
        out = core(*(leaf.detach() for leaf in leaves))
    for other in (SECOND, SHORT, SECOND):
        gc.collect()
        others, other_cotangent = other.leaves(rank)
        with other.scope():
            core(*others).backward(other_cotangent)
    factor = core.factor
    factor.grad = None
    del core
    gc.collect()
    out.backward(cotangent)
    dist.all_reduce(factor.grad)
    return error(factor.grad, expected)


# -- checkpoints --


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("other", [None, SECOND], ids=["none open", "another open"])
@on_every_rank(RANKS)
def test_checkpoint_with_the_scope(mesh, rank: int, door: str, other: Batch | None):
    """The recomputation is the batch's: by for_checkpoint, or because the scope is opened inside."""
    core = styled(door, mesh)

    def opened_inside(*qkv):
        with FIRST.scope():
            return core(*qkv)

    for how in ("for_checkpoint", "inside", "inside, reentrant"):
        leaves, cotangent = FIRST.leaves(rank)
        if how == "for_checkpoint":
            with (scope := FIRST.scope()):
                out = checkpoint(core, *leaves, use_reentrant=False, context_fn=scope.for_checkpoint)
        else:
            out = checkpoint(opened_inside, *leaves, use_reentrant=how.endswith("reentrant"))
        with nullcontext() if other is None else other.scope():
            out.backward(cotangent)
        FIRST.check(rank, out, leaves)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("other", [None, SECOND, FIRST], ids=["none open", "another open", "an equal one open"])
@pytest.mark.parametrize("reentrant", [False, True])
@on_every_rank(RANKS)
def test_a_recomputation_without_its_scope_is_refused(mesh, rank: int, door: str, other: Batch | None, reentrant: bool):
    """On every rank, and the next batch is right; not even an equal scope is guessed to be the one."""
    core = styled(door, mesh)
    leaves, cotangent = FIRST.leaves(rank)
    with FIRST.scope():
        out = checkpoint(core, *leaves, use_reentrant=reentrant)
    around = nullcontext() if other is None else other.scope()
    with around, pytest.raises(RuntimeError, match="where the SequenceScope of its batch is not known"):
        out.backward(cotangent)
    leaves, cotangent = SECOND.leaves(rank)
    with SECOND.scope():
        out = core(*leaves)
    out.backward(cotangent)
    SECOND.check(rank, out, leaves)


# -- what modules say themselves --


@pytest.mark.parametrize("door", DOORS)
def test_a_fixed_layout(door: str):
    """The same is fine, as a layout or a balancer; another one is refused on every rank."""

    def on(rank: int):
        mesh = cp_mesh(RANKS)
        batch = Batch(4, (6, 7), head_tail)
        for layout in (head_tail, batch.layout):
            leaves, cotangent = batch.leaves(rank)
            with batch.scope():
                out = styled(door, mesh, layout=layout)(*leaves)
            out.backward(cotangent)
            batch.check(rank, out, leaves)

    run_ranks(on, RANKS)
    for layout in (striped, contiguous(LENGTH, RANKS), contiguous(LENGTH - 1, RANKS)):

        def act(s: Scene, layout=layout):
            with SequenceScope(head_tail(LENGTH, RANKS)):
                styled(door, s.mesh, layout=layout)(*s.leaves()[0])

        assert "has another layout than the SequenceScope around the call" in refusals(act)


@pytest.mark.parametrize("door", DOORS)
def test_ranks_in_different_scopes_are_refused_together(door: str):
    """One rank has no scope, other documents, or a scope that its style refuses: no rank waits for ever."""
    layout, documents = head_tail(LENGTH, RANKS), Documents((5, LENGTH - 5))

    for odd in (None, SequenceScope(layout), SequenceScope(contiguous(LENGTH, RANKS), mask=documents)):

        def act(s: Scene, odd=odd):
            core = styled(door, s.mesh, layout=layout)
            scope = SequenceScope(layout, mask=documents)
            if s.rank == 1 and odd is None:
                return core(*s.leaves()[0])
            with odd if s.rank == 1 else scope:
                return core(*s.leaves()[0])

        refusals(act)


@on_every_rank(RANKS)
def test_a_window_layer_next_to_a_full_one_under_one_scope(mesh, rank: int):
    """Different masks, strategies and doors on one mesh, chained; each sees its own mask and the batch's documents."""
    lengths = (4, 1, 10)
    document, length = document_of(lengths), 15
    plain = allowed(lambda p, j: document(p) == document(j), length, length)
    windowed = allowed(lambda p, j: document(p) == document(j) and p - 2 <= j <= p, length, length)
    causal = allowed(lambda p, j: document(p) == document(j) and j <= p, length, length)
    problem = Problem(length=length, kv_heads=2, causal=False)

    def whole(query, key, value):
        return dense_attention(
            dense_attention(dense_attention(query, key, value, windowed), key, value, plain), key, value, causal
        )

    leaves = [x.clone().requires_grad_() for x in problem.inputs]
    out = whole(*leaves)
    problem.expected = [out.detach(), *torch.autograd.grad(out, leaves, problem.cotangent)]
    layout = per_document_head_tail(length, RANKS, documents=lengths)
    window = styled("style", mesh, causal=False, mask=SlidingWindow(2, 0), strategy=AllGather())
    full = styled("module", mesh, causal=False, strategy=Ring(keep=0))
    causal = styled("style", mesh, causal=True, strategy=Ulysses())
    (query, key, value), cotangent = problem.shard(layout, rank, RANKS)
    with SequenceScope(layout, mask=Documents(lengths)):
        out = causal(full(window(query, key, value), key, value), key, value)
    out.backward(cotangent)
    return max(problem.errors([out.detach(), query.grad, key.grad, value.grad], layout, rank, RANKS))


# -- scopes among each other --


@on_every_rank(RANKS)
def test_a_function_with_a_layout_ignores_scopes(mesh, rank: int):
    attend = partial(context_attention, mesh=mesh, layout=FIRST.layout, mask=FIRST.mask & Causal())
    leaves, cotangent = FIRST.leaves(rank)
    with SECOND.scope():
        out = attend(*leaves)
    out.backward(cotangent)
    FIRST.check(rank, out, leaves)


@on_every_rank(RANKS)
def test_a_block_without_a_scope_after_an_equal_one_in_a_scope(mesh, rank: int):
    """The recomputation of the first block needs its scope, and the second one none."""
    problem = Problem(length=15, kv_heads=2, mask=allowed(lambda p, j: j <= p, 15, 15), seed=5)
    core, cut = Core(causal=True), contiguous(15, RANKS)
    for scope in (SequenceScope(cut), nullcontext()):
        leaves, cotangent = problem.shard(cut, rank, RANKS)
        with scope, context_parallel(mesh, layout=cut):
            out = checkpoint(core, *leaves, use_reentrant=False)
        if isinstance(scope, SequenceScope):
            with pytest.raises(RuntimeError, match=r"context_fn=scope\.for_checkpoint"):
                out.backward(cotangent)
    out.backward(cotangent)
    errors = problem.errors([out.detach(), *(leaf.grad for leaf in leaves)], cut, rank, RANKS)
    assert max(errors) < EXACT, errors


FUNCTIONS = {
    "attention": lambda mesh: partial(context_attention, mesh=mesh, mask=Causal()),
    "compiled": lambda mesh: torch.compile(
        partial(context_attention, mesh=(mesh, "cp"), mask=Causal()), backend="aot_eager", fullgraph=True
    ),
    "flex": lambda mesh: partial(context_flex_attention, mesh=(mesh, "cp"), mask=Causal(), enable_gqa=True),
    "varlen": lambda mesh: by_varlen((mesh, "cp"), causal=True, mask=None, length=FIRST.layout.length),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@on_every_rank(RANKS)
def test_a_function_without_a_layout_takes_layout_and_mask_of_the_scope(mesh, rank: int, name: str):
    """The backward runs in another scope. Without any scope the layout is head_tail."""
    attend = FUNCTIONS[name](mesh)
    for batch in (FIRST, FIRST):
        leaves, cotangent = batch.leaves(rank)
        with batch.scope():
            out = attend(*leaves)
        with SECOND.scope():
            out.backward(cotangent)
        batch.check(rank, out, leaves)
    if name == "varlen":
        return
    whole = Even.problem
    leaves, _ = whole.shard(head_tail, rank, RANKS)
    out = attend(*leaves)
    assert error(out.detach(), head_tail(LENGTH, RANKS).shard(whole.expected[0], 2, rank)) < EXACT


@pytest.mark.parametrize("flex", [False, True])
def test_a_function_recomputed_without_its_scope_is_refused(flex: bool):
    def main(rank: int) -> None:
        options = {"mask": Causal()} if not flex else {"mask": Causal(), "enable_gqa": True}
        attend = partial(context_flex_attention if flex else context_attention, mesh=cp_mesh(RANKS), **options)
        leaves, cotangent = FIRST.leaves(rank)
        with FIRST.scope() as scope:
            out = checkpoint(attend, *leaves, use_reentrant=False, context_fn=scope.for_checkpoint)
        out.backward(cotangent)
        FIRST.check(rank, out, leaves)
        with FIRST.scope():
            out = checkpoint(attend, *leaves, use_reentrant=False)
        out.backward(cotangent)

    errors = run_ranks(main, RANKS, return_errors=True)
    assert all("where the SequenceScope of its batch is not known" in str(error) for error in errors), errors


def test_what_makes_no_sense_is_refused():
    layout = head_tail(12, RANKS)
    with pytest.raises(TypeError, match="needs this batch's SequenceLayout"):
        SequenceScope(head_tail)
    with pytest.raises(TypeError, match="mask must be a Mask object"):
        SequenceScope(layout, mask=(4, 8))
    with pytest.raises(ValueError, match="the mask is for 13 positions, the layout cuts 12"):
        SequenceScope(layout, mask=Documents((5, 8)))
    for wrong, message in (
        (SequenceScope(head_tail(LENGTH, 2)), "the layout cuts the sequence for 2 ranks, mesh axis 'cp' has 3"),
        (SequenceScope(head_tail(LENGTH - 1, RANKS)), f"hold {LENGTH} together"),
        (SequenceScope(SequenceLayout.from_chunks([[(0, LENGTH)], [], []]), mask=Full()), "gives them"),
    ):
        for door in DOORS:

            def act(s: Scene, wrong=wrong, door=door):
                with wrong:
                    styled(door, s.mesh)(*s.leaves()[0])

            assert message in refusals(act)


@pytest.mark.parametrize("door", DOORS)
@on_every_rank(RANKS)
def test_a_scope_that_another_thread_has_opened(mesh, rank: int, door: str):
    """It does not hold here, which is refused; where its context is copied to, it holds. A thread that is started has
    an empty context of its own."""
    batch = Batch(0, (5, 9))
    attend = styled(door, mesh)
    leaves, cotangent = batch.leaves(rank)
    with batch.scope():
        with pytest.raises(RuntimeError, match="is open in another thread or asyncio task"):
            Context().run(attend, *leaves)
        with SequenceScope(head_tail(14, RANKS), mesh_axis="another"):
            out = copy_context().run(attend, *leaves)
        own = Context().run(within, batch.scope(), attend, *leaves)
    assert torch.equal(out, own)
    out.backward(cotangent)
    batch.check(rank, out, leaves)
    with SequenceScope(batch.layout, mesh_axis="another"):
        Context().run(attend, *batch.problem.shard(head_tail, rank, RANKS)[0])  # this axis has no scope any more


def within(scope, act, *args):
    with scope:
        return act(*args)


@pytest.mark.parametrize("door", DOORS)
@on_every_rank(RANKS)
def test_scopes_that_do_not_end_in_the_reverse_order(mesh, rank: int, door: str):
    """Each removes itself. In a generator that goes on, its own scope counts."""
    first, second = Batch(0, (5, 9), contiguous), Batch(1, (11, 3), contiguous)
    attend = styled(door, mesh)

    def step(batch: Batch):
        leaves, cotangent = batch.leaves(rank)
        out = attend(*leaves)
        out.backward(cotangent)
        batch.check(rank, out, leaves)

    def steps(batch: Batch):
        with batch.scope():
            while True:
                yield step(batch)

    @contextlib.contextmanager
    def helper(batch: Batch):
        with batch.scope():
            yield

    outer, inner = first.scope(), second.scope()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    step(second)
    inner.__exit__(None, None, None)

    one, other = steps(first), steps(second)
    for generator in (one, other, one, other, other, one):
        next(generator)
    with helper(second):  # a generator that stops in its scope too, which is for what follows
        step(second)
        next(one)
        step(second)
    one.close()
    next(other)
    del other
    with first.scope():
        step(first)
    everything_is_closed(attend, rank)


def everything_is_closed(attend, rank: int) -> None:
    """A module without a scope has its own layout and mask again."""
    problem = Even.problem
    leaves, cotangent = problem.shard(head_tail, rank, RANKS)
    out = attend(*leaves)
    out.backward(cotangent)
    assert max(problem.errors([out.detach(), *(x.grad for x in leaves)], head_tail, rank, RANKS)) < EXACT


@pytest.mark.parametrize("door", DOORS)
@on_every_rank(RANKS)
def test_a_scope_that_ends_in_another_context(mesh, rank: int, door: str):
    """As a generator does that another task or thread collects: it is closed where it was open, and stays open for the
    tasks to which its context was copied before it ended."""
    batch = Batch(0, (5, 9))
    attend = styled(door, mesh)
    scope, task = batch.scope(), Context()
    task.run(scope.__enter__)
    leaves, cotangent = batch.leaves(rank)
    with pytest.raises((RuntimeError, ValueError), match=r"is open in another thread|have failed"):
        attend(*leaves)
    scope.__exit__(None, None, None)
    for context in (copy_context(), task):
        context.run(everything_is_closed, attend, rank)
    scope.__exit__(None, None, None)  # once more has no effect
    with batch.scope():
        later = copy_context()
    out = later.run(attend, *leaves)
    out.backward(cotangent)
    batch.check(rank, out, leaves)
    lost = batch.scope()
    Context().run(lost.__enter__)  # as in a thread that ends without closing its scope
    ended = ref(lost)
    del lost
    while ended() is not None:  # while a thread collects, gc.collect() does nothing in the others
        gc.collect()
    everything_is_closed(attend, rank)


@on_every_rank(RANKS)
def test_one_rank_whose_scope_is_open_in_another_thread(mesh, rank: int):
    """All ranks hear of it."""
    batch = Batch(0, (5, 9))
    attend = styled("module", mesh)
    with batch.scope():
        message = "another thread" if rank == 0 else r"ranks \[0\] of mesh axis 'cp' have failed"
        with pytest.raises((RuntimeError, ValueError), match=message):
            (Context() if rank == 0 else copy_context()).run(attend, *batch.leaves(rank)[0])


@pytest.mark.parametrize("style", [AttentionContextParallel, ModuleContextParallel])
@on_every_rank(2)
def test_a_scope_of_another_axis_that_applies_to_nothing_is_an_error(mesh, style):
    """Its mask would be missing without a word. Beside a scope of the modules' axis it is none of their business."""
    core, layout = parallelize_module(Core(), mesh, style()), head_tail(8, 2)
    x = torch.randn(1, 2, 4, 8)
    with SequenceScope(layout, mesh_axis="ring_ulysses"), SequenceScope(layout):
        core(x, x, x)
    with SequenceScope(layout, mesh_axis="ring_ulysses"):
        pass
    scope = SequenceScope(layout, mask=Documents([5, 3]), mesh_axis="ring_ulysses")

    def attend(then: type[Exception] | None = None) -> None:
        with scope:
            core(x, x, x)
            if then is not None:
                raise then

    with pytest.raises(ValueError, match=r"axis 'ring_ulysses' applied to no attention, and .* over \['cp'\]"):
        attend()
    with pytest.raises(KeyError):  # the first error is more useful
        attend(then=KeyError)
