"""More tests like test_leaks.py: recomputation, copies and ends of modules, and other code in the same process."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.utils.checkpoint import checkpoint

from cp_styles import Checks, context_attention
from cp_styles.engine.binding import get_bindings
from cp_styles.kernels import ReferenceKernel
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.layouts import head_tail
from cp_styles.masks import Causal, Dense, Full
from cp_styles.strategies import AllGather, Ring
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import run_ranks
from tests.oracle import error
from tests.ranks.attention_case import EXACT, Core, on_every_rank, parallel
from tests.ranks.leak_scene import Oops, Scene, attention_of, raising, scenario

# -- checkpointing and saved tensors --


@scenario
def test_checkpoint_inside_the_module(s: Scene) -> None:
    for reentrant in (True, False):
        probe = s.probe()
        probe.attend = partial(checkpoint, attention_of, use_reentrant=reentrant)
        s.run(probe)


@scenario
def test_checkpoint_nested_twice(s: Scene) -> None:
    for reentrant in (True, False):
        inner = partial(checkpoint, s.probe(), use_reentrant=reentrant)
        s.run(partial(checkpoint, lambda *qkv, inner=inner: inner(*qkv), use_reentrant=reentrant))
    probe = s.probe()
    probe.attend = partial(checkpoint, attention_of, use_reentrant=False)
    s.run(partial(checkpoint, probe, use_reentrant=False))


@scenario
def test_checkpoint_recomputes_among_other_forwards(s: Scene) -> None:
    """A block of two attentions is recomputed in the backward, between others' backwards."""
    first, second = s.probe(), s.probe(strategy=AllGather(), layout=head_tail)
    leaves, cotangent = s.leaves()

    def block(query, key, value):
        return first(query, key, value) + second(query, key, value)

    alone = second(*leaves)
    out = checkpoint(block, *leaves, use_reentrant=False)
    grads = torch.autograd.grad(out + alone, leaves, cotangent)
    s.check([out / 2, *(grad / 3 for grad in grads)])


@scenario
def test_checkpoint_around_both_a_module_and_attention_outside(s: Scene) -> None:
    """A recomputation of both leaves the attention outside to each rank."""
    probe, local = s.probe(ModuleContextParallel), s.local
    leaves, cotangent = s.leaves()
    leaves += [x.clone().requires_grad_() for x in local.inputs]
    outs = checkpoint(lambda *x: (probe(*x[:3]), attention_of(*x[3:])), *leaves, use_reentrant=False)
    grads = torch.autograd.grad(outs, leaves, [cotangent, local.cotangent])
    s.check([outs[0], *grads[:3]])
    assert max(map(error, (outs[1], *grads[3:]), local.expected)) < EXACT


@scenario
def test_saved_tensors_on_the_host(s: Scene) -> None:
    for strategy in (Ring(), AllGather(keep=0)):
        leaves, cotangent = s.leaves()
        with save_on_cpu():
            out = s.probe(strategy=strategy)(*leaves)
        s.check([out, *torch.autograd.grad(out, leaves, cotangent)])


# -- the life of modules --


@scenario
def test_backward_after_the_module_is_gone(s: Scene) -> None:
    core = parallel(Core(), s.mesh)
    leaves, cotangent = s.leaves()
    out = core(*leaves)
    del core
    s.once(gc.collect)
    s.run(s.probe(strategy=AllGather()))
    s.check([out, *torch.autograd.grad(out, leaves, cotangent)])


@scenario
def test_modules_are_freed(s: Scene) -> None:
    core = parallel(Core(), s.mesh)
    s.run(core)
    died = weakref.ref(core)
    del core
    s.once(gc.collect)  # one at a time: a collection that meets another one does nothing
    assert died() is None


@scenario
def test_inputs_are_freed(s: Scene) -> None:
    model = s.probe(ModuleContextParallel)
    (query, *others), _ = s.leaves()
    with torch.no_grad():
        model(query, *others)
    died = weakref.ref(query)
    del query
    assert died() is None


# -- others in the same process --


@scenario
def test_attention_outside_during_forward_and_backward(s: Scene) -> None:
    probe = s.probe()
    probe.before = probe.after = s.outside
    leaves, cotangent = s.leaves()
    for tensor in leaves:
        tensor.register_hook(lambda _: s.outside())
    out = probe(*leaves)
    out.register_hook(lambda _: s.outside())
    s.check([out, *torch.autograd.grad(out, leaves, cotangent)])


@scenario
def test_with_torch_context_parallel(s: Scene) -> None:
    """It puts another table in place of DTensor's, and the one it once saw back."""
    probe = s.probe()
    sets = [s.leaves() for _ in range(3)]

    def forward(index: int) -> torch.Tensor:
        return probe(*sets[index][0])

    def backward(index: int, out: torch.Tensor) -> None:
        leaves, cotangent = sets[index]
        s.check([out, *torch.autograd.grad(out, leaves, cotangent)])

    before, before_too = forward(0), forward(1)
    s.once(torch_cp._enable_context_parallel_dispatcher)
    backward(0, before)
    during = forward(2)
    s.run(probe)
    s.once(torch_cp._enable_context_parallel_dispatcher)  # two enables and one disable leave torch's on
    s.once(torch_cp._disable_context_parallel_dispatcher)
    backward(1, before_too)
    backward(2, during)
    s.run(probe)


@scenario
def test_with_handlers_of_others(s: Scene) -> None:
    """Somebody puts a table of their own in place of DTensor's, with handlers for the same ops: ours go on for our
    modules, theirs for everybody else; and back again.
    """
    probe, dispatcher = s.probe(), DTensor._op_dispatcher
    sets = [s.leaves() for _ in range(3)]
    outs = [probe(*leaves) for leaves, _ in sets]
    theirs: dict = {op: raising(Oops()) for op in dispatcher._custom_op_handlers}
    original = dispatcher._custom_op_handlers

    def backward(index: int) -> None:
        leaves, cotangent = sets[index]
        s.check([outs[index], *torch.autograd.grad(outs[index], leaves, cotangent)])

    s.once(lambda: setattr(dispatcher, "_custom_op_handlers", theirs))
    backward(0)
    s.run(probe)
    s.outside_plain()
    with pytest.raises(Oops):
        attention_of(*(distribute_tensor(x, s.other_mesh, [Shard(1)]) for x in s.local.inputs))
    s.once(lambda: setattr(dispatcher, "_custom_op_handlers", {}))
    backward(1)
    s.run(probe)
    s.outside()
    s.once(lambda: setattr(dispatcher, "_custom_op_handlers", original))
    backward(2)
    s.once(lambda: original.pop(CPU_FLASH.forward_op))
    s.run(probe)


def test_ranks_as_threads_leave_no_hook_behind():
    """torch puts the rank before every uncaught exception's lines: a notebook would have it once for every run."""
    before = sys.excepthook
    run_ranks(lambda rank: None, 2)
    assert sys.excepthook is before


class Own(ReferenceKernel):
    """A kernel of the user."""


@dataclass(frozen=True)
class Tuned(ReferenceKernel):
    """A kernel of the user that consists of values, unless ``table`` is a tensor."""

    rows: int = 8
    table: torch.Tensor | tuple[int, ...] = ()


@on_every_rank(1)
def test_calls_of_a_function_share_a_binding_that_keeps_nothing_of_theirs_alive():
    """What a call derives from its arguments is found again; tensors of masks and modules of checks are let go."""
    group, layout, local = dist.group.WORLD, head_tail(8, 1), nn.Linear(2, 2)
    x = torch.randn(1, 2, 8, 8)

    def made(call) -> int:
        known = set(get_bindings(group))
        call()
        return len(set(get_bindings(group)) - known)

    attend = partial(context_attention, x, x, x, group, layout=layout)
    assert [made(partial(attend, mask=mask)) for mask in (Causal(), Causal(), Full(), None)] == [1, 0, 1, 0]
    mask, kernel = Dense(torch.ones(8, 8, dtype=torch.bool)), Own()
    for held in ({"mask": mask}, {"kernel": kernel}, {"kernel": Tuned(table=x)}, {"checks": Checks(local=(local,))}):
        assert made(partial(attend, **held)) == 0
    assert [made(partial(attend, kernel=kernel)) for kernel in (Tuned(), Tuned(8), Tuned(9))] == [1, 0, 1]
    gone = [weakref.ref(each) for each in (mask.tensor, kernel, local)]
    del mask, kernel, local, held
    gc.collect()
    assert [each() for each in gone] == [None] * 3
    assert len(get_bindings(group)) == 4
