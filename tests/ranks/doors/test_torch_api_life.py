"""Blocks of context_parallel: backward after the end, other blocks, checkpoints, exceptions, threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cp_styles import AllGather, Causal, Documents, Ring, contiguous, head_tail
from cp_styles._lib.compat import function_modes
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel, context_parallel_shard, context_parallel_unshard, set_rotate_method
from cp_styles.torch_api.context_block import rotation
from tests.covering import sampled
from tests.oracle import dense_attention, error, randn
from tests.ranks.attention_case import cp_mesh, on_every_rank
from tests.ranks.doors.torch_api_scene import LENGTH, Batch, gradients, run

RANKS = 3


def keep_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "none": None,
    "non-reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    # Without torch's comparison of shapes, nothing but the values would tell a recomputation without the block.
    "unchecked": lambda layer, x: checkpoint(layer, x, use_reentrant=False, determinism_check="none"),
    "reentrant": lambda layer, x: checkpoint(layer, x.requires_grad_(), use_reentrant=True),
    "selective": lambda layer, x: checkpoint(
        layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_matmuls)
    ),
    "nested": lambda layer, x: checkpoint(lambda x: checkpoint(layer, x, use_reentrant=False), x, use_reentrant=False),
    "reentrant in the other": lambda layer, x: checkpoint(
        lambda x: checkpoint(layer, x, use_reentrant=True), x.requires_grad_(), use_reentrant=False
    ),
}


@sampled(1, when=["inside", "after", "after, kept cut", "in another block"], checkpointed=list(CHECKPOINTS))
@on_every_rank(RANKS)
def test_the_backward_is_right(mesh, when: str, checkpointed: str):
    batch, around = Batch(layers=2), CHECKPOINTS[checkpointed]
    model = batch.model()
    given = batch.buffers(model)
    x, cotangent, *tables = given["buffers"]
    kept = {x, cotangent, *(tables if when == "after, kept cut" else ())}
    with context_parallel(mesh, **given, no_restore_buffers=kept):
        out = run(model, x, around)
        if when == "inside":
            out.backward(cotangent)
    if when == "in another block":
        # Another cut of the same tables: what is run again must find those of its own block.
        with context_parallel(mesh, buffers=tables, buffer_seq_dims=[0, 0], layout=contiguous):
            out.backward(cotangent)
    elif when != "inside":
        out.backward(cotangent)
    if when != "after, kept cut":
        assert all(torch.equal(table, whole.table) for table, whole in zip(tables, batch.model(), strict=True))
    (whole,) = context_parallel_unshard(mesh, [out], [1], head_tail)
    return batch.errors([whole, *gradients(model, mesh)])


@on_every_rank(RANKS)
def test_a_recomputation_leaves_a_kept_buffer_as_it_is_now(mesh):
    """It sees the part of its block, and what the program has put there since is back afterwards."""
    batch = Batch(layers=1)
    model = batch.model()
    given = batch.buffers(model)
    x, cotangent, *_ = given["buffers"]
    with context_parallel(mesh, **given, no_restore_buffers={x, cotangent}):
        out = run(model, x, CHECKPOINTS["non-reentrant"])
    x.data = torch.full((3,), 7.0)
    out.backward(cotangent)
    assert torch.equal(x, torch.full((3,), 7.0))
    (whole,) = context_parallel_unshard(mesh, [out], [1], head_tail)
    return batch.errors([whole, *gradients(model, mesh)])


@pytest.mark.parametrize("around", [CHECKPOINTS["none"], CHECKPOINTS["non-reentrant"], CHECKPOINTS["reentrant"]])
@on_every_rank(RANKS)
def test_nested_blocks_with_a_backward_after_both(mesh, around):
    """The outer block cuts the table, the inner one has the mask: what is run again needs both."""
    batch = Batch()
    model = batch.model()
    model[0].causal = False
    given = batch.buffers(model)
    x, cotangent, _ = given["buffers"]
    with context_parallel(mesh, **given, no_restore_buffers={cotangent}):
        with context_parallel(mesh, mask=Causal()):
            out = run(model, x, around)
        full = F.scaled_dot_product_attention(*[x[:, None].clone()] * 3)  # the outer block's again
        (full,) = context_parallel_unshard(mesh, [full], [2])
    out.backward(cotangent)
    (whole,) = context_parallel_unshard(mesh, [out], [1])
    expected = F.scaled_dot_product_attention(*[batch.x[:, None]] * 3)
    return max(batch.errors([whole, *gradients(model, mesh)]), error(full, expected))


class Unknown(torch.autograd.Function):
    """Somebody's checkpoint."""

    @staticmethod
    def forward(ctx, layer, x):
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError


@on_every_rank(2)
def test_a_foreign_recomputation_is_refused_and_no_grad_is_not(mesh):
    batch = Batch()
    model = batch.model()
    given = batch.buffers(model)
    x = given["buffers"][0]
    with context_parallel(mesh, **given):
        with torch.no_grad():
            out = run(model, x)
        with pytest.raises(NotImplementedError, match=r"UnknownBackward.*torch\.utils\.checkpoint"):
            Unknown.apply(model[0], x.clone().requires_grad_())
    (whole,) = context_parallel_unshard(mesh, [out], [1])
    return error(whole, batch.expected[0])


class Mine(BaseException):
    """Not an Exception: what a test runner or a job scheduler may throw."""


@pytest.mark.parametrize("error", [KeyError("mine"), StopIteration(7), KeyboardInterrupt(), Mine()], ids=repr)
@on_every_rank(2)
def test_the_users_own_exception_comes_through(mesh, rank: int, error):
    whole = randn(0, 2, LENGTH)
    leaf, plain, positions = whole.clone().requires_grad_(), whole.clone(), torch.arange(LENGTH)
    kept = whole.clone()
    block = context_parallel(
        mesh,
        buffers=[leaf, plain, positions, kept],
        buffer_seq_dims=[1, -1, 0, 1],
        no_restore_buffers={kept},
    )

    def fail():
        plain.requires_grad_()
        positions.add_(1)
        assert leaf.shape == plain.shape == kept.shape == (2, head_tail(LENGTH, 2).lengths[rank])
        raise error

    for _ in range(2):  # and the block is good for another time
        with pytest.raises(type(error)) as caught, block:
            fail()
        assert caught.value is error
        assert torch.equal(leaf, whole)
        assert leaf.requires_grad
        assert torch.equal(plain, whole)
        assert torch.equal(positions, torch.arange(LENGTH))
        assert torch.equal(kept, head_tail(LENGTH, 2).shard(whole, 1, rank))
        plain.requires_grad_(False)
        kept.data = whole.clone()
    q = randn(rank, 1, 1, 4, 4)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


@on_every_rank(2)
def test_blocks_that_do_not_end_in_the_reverse_order(mesh, rank: int):
    """Each removes itself. In a generator or a task that goes on, its own block counts, or none."""
    x = randn(0, 1, 2, LENGTH, 4)
    position = torch.arange(LENGTH)

    def dense(first: int) -> torch.Tensor:
        return dense_attention(x, x, x, (position[:, None] < first) == (position < first))

    errors = []

    def step(layout, first: int) -> None:
        cut = layout(LENGTH, 2)
        part = cut.shard(x, 2, rank).requires_grad_()
        out = checkpoint(lambda part: F.scaled_dot_product_attention(part, part, part), part, use_reentrant=False)
        out.sum().backward()
        errors.append(error(out, cut.shard(dense(first), 2, rank)))

    def block(layout, first: int):
        return context_parallel(mesh, layout=layout, mask=Documents([first, LENGTH - first]))

    def steps(layout, first: int):
        with block(layout, first):
            while True:
                yield step(layout, first)

    outer, inner = block(contiguous, 3), block(head_tail, 7)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    step(head_tail, 7)
    inner.__exit__(None, None, None)
    one, other = steps(contiguous, 3), steps(head_tail, 7)
    for generator in (one, other, one, other, other, one):
        next(generator)
    one.close()
    next(other)
    other.close()

    async def task(layout, first: int, turn: asyncio.Event, others: asyncio.Event) -> None:
        with block(layout, first):
            for _ in range(2):
                await turn.wait()
                turn.clear()
                step(layout, first)
                others.set()

    async def tasks() -> None:
        turns = asyncio.Event(), asyncio.Event()
        turns[0].set()
        both = [
            asyncio.create_task(task(contiguous, 3, *turns)),
            asyncio.create_task(task(head_tail, 7, *turns[::-1])),
        ]
        await asyncio.sleep(0)
        errors.append(error(F.scaled_dot_product_attention(x, x, x), dense(LENGTH)))  # this task is in no block
        await asyncio.gather(*both)

    asyncio.run(tasks())
    there = contextvars.Context()
    there.run(inner.__enter__)
    inner.__exit__(None, None, None)
    for context in (contextvars.copy_context(), there):
        errors.append(error(context.run(F.scaled_dot_product_attention, x, x, x), dense(LENGTH)))
    with block(contiguous, 3):
        step(contiguous, 3)
    assert not function_modes()
    return max(errors)


@on_every_rank(2)
def test_other_threads_attend_by_themselves(mesh):
    q = randn(0, 1, 1, 4, 4)
    alone = F.scaled_dot_product_attention(q, q, q)
    found = []
    with context_parallel(mesh):
        other = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(q, q, q)))
        other.start()
        other.join()
        part = context_parallel_shard(mesh, [q], [2])[0]
        mine = F.scaled_dot_product_attention(part, part, part)
    assert torch.equal(found[0], alone)
    assert mine.shape[2] == 2


def test_the_rotate_method_is_of_the_context():
    def rank_main(rank):
        mesh = cp_mesh(1)

        def now(**options):
            with context_parallel(mesh, **options) as block:
                return block.strategy

        assert now() == AllGather()
        with set_rotate_method("alltoall"):
            assert now() == Ring()
            assert now(strategy=AllGather()) == AllGather()
            with pytest.raises(NotImplementedError, match="carrier pigeon"):
                set_rotate_method("carrier pigeon")
            assert now() == Ring()
        assert now() == AllGather()
        set_rotate_method("alltoall")
        assert now() == Ring()
        found = []  # in threads of a rank's thread there is no mesh: they are asked for the default itself
        here = contextvars.copy_context()
        for target in (lambda: found.append(rotation.get()), lambda: here.run(lambda: found.append(rotation.get()))):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert found == [AllGather(), Ring()]

        async def task(method):
            set_rotate_method(method)
            await asyncio.sleep(0)
            return now()

        async def both():
            return await asyncio.gather(task("allgather"), task("alltoall"))

        assert asyncio.run(both()) == [AllGather(), Ring()]
        assert now() == Ring()

    run_ranks(rank_main, 1)
