"""Derivatives that are not supported raise an error on every rank, through every door; they are never wrong or 0."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from cp_styles import AttentionContextParallel, Dense, Ring, Ulysses, context_attention, contiguous, parallelize_module
from cp_styles.strategies import Strategy
from cp_styles.testing import RankError, run_ranks
from tests.doors import EACH, LENGTH, cut_contiguously, door
from tests.oracle import attention_inputs, error, randn
from tests.ranks.attention_case import EXACT, Core, DenseCore, cp_mesh, on_every_rank


def on_ranks(ranks: int, attend: Callable[..., None]) -> str:
    """What every rank raises in ``attend(mesh, q, k, v)``."""
    inputs, _ = attention_inputs(length=LENGTH, batch=1)
    layout = contiguous(LENGTH, ranks)

    def on(rank: int) -> None:
        attend(cp_mesh(ranks), *(layout.shard(x, 2, rank).clone() for x in inputs))

    with pytest.raises(RankError) as caught:
        run_ranks(on, ranks)
    text = str(caught.value)
    assert all(f"rank {rank}: " in text for rank in range(ranks)), text
    return text


def penalty(attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, square: bool):
    """A gradient penalty. With a loss that is linear in the output no incoming gradient requires grad."""
    q.requires_grad_()
    temperature = torch.full((8,), 1.5, dtype=torch.float64, requires_grad=True)
    out = attend(q * temperature, k, v)
    (dq,) = torch.autograd.grad(out.square().sum() if square else out.sum(), q, create_graph=True)
    dq.square().sum().backward()


# Behind AttentionContextParallel it is torch's own op that says so.
SECOND = re.compile(r"second derivatives|derivative for aten::_scaled_dot_product_\w+_backward is not implemented")


@pytest.mark.parametrize("strategy", [Ring(), Ulysses()])  # Ulysses saves neither query nor key
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("name", EACH)
def test_second_derivatives(name: str, square: bool, strategy: Strategy):
    def attend(mesh, *tensors):
        penalty(door(name, mesh, layout=contiguous(LENGTH, 2), strategy=strategy), *tensors, square)

    text = on_ranks(2, attend)
    assert len(SECOND.findall(text)) >= 2, text


@on_every_rank(2)
def test_a_first_derivative_that_keeps_its_graph(mesh, rank: int):
    """create_graph=True alone changes nothing: not the gradients, and not those of what came before the attention."""
    inputs, cotangent = attention_inputs(length=LENGTH, batch=1)
    layout = contiguous(LENGTH, 2)
    for name in EACH:
        leaves = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        found = [
            torch.autograd.grad(
                cut_contiguously(name, mesh, *leaves), leaves, layout.shard(cotangent, 2, rank), create_graph=graph
            )
            for graph in (False, True)
        ]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), name


class Seen(Core):
    def forward(self, query, key, value):
        self.requires_grad = [x.requires_grad for x in (query, key, value)]
        return super().forward(query, key, value)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 2), ()], ids=str)
@on_every_rank(2)
def test_some_inputs_require_grad(mesh, rank: int, which: tuple[int, ...]):
    """A module with the style sees which: an operation in place on an input without a gradient is no error."""
    inputs, cotangent = attention_inputs(length=LENGTH, batch=1)
    layout = contiguous(LENGTH, 2)
    whole = [x.clone().requires_grad_(number in which) for number, x in enumerate(inputs)]
    out = DenseCore()(*whole)
    expected = torch.autograd.grad(out, [whole[number] for number in which], cotangent) if which else ()
    core = Seen()
    calls = {name: partial(cut_contiguously, name, mesh) for name in EACH}
    calls["seen"] = parallelize_module(core, mesh, AttentionContextParallel(layout=contiguous))
    for name, attend in calls.items():
        leaves = [layout.shard(x, 2, rank).clone().requires_grad_(n in which) for n, x in enumerate(inputs)]
        found = attend(*leaves)
        assert found.requires_grad == bool(which), name
        assert error(found.detach(), layout.shard(out.detach(), 2, rank)) < EXACT, name
        of = [leaves[number] for number in which]
        grads = torch.autograd.grad(found, of, layout.shard(cotangent, 2, rank)) if which else ()
        for grad, right in zip(grads, expected, strict=True):
            assert error(grad, layout.shard(right, 2, rank)) < EXACT, name
    assert core.requires_grad == [number in which for number in range(3)]


@pytest.mark.parametrize("how", ["dual", "jvp", "jacfwd", "inside vmap"])
@pytest.mark.parametrize("door", EACH)
def test_forward_mode(door: str, how: str):
    def attend(mesh, q, k, v):
        def run(*tensors):
            return cut_contiguously(door, mesh, *tensors)

        if how == "dual":
            run(q, k, forward_ad.make_dual(v, v))
        elif how == "jvp":
            torch.func.jvp(run, (q, k, v), (q, k, v))
        elif how == "jacfwd":
            torch.func.jacfwd(lambda key: run(q, key, v))(k)
        else:
            torch.func.jvp(torch.func.vmap(run), (q[None], k[None], v[None]), (q[None], k[None], v[None]))

    # Levels are the process': one rank, or a level around all of them.
    ranks = 2 if how == "dual" else 1
    with forward_ad.dual_level() if how == "dual" else contextlib.nullcontext():
        text = on_ranks(ranks, attend)
    assert text.count("forward-mode differentiation") == ranks, text


TRANSFORMS: dict[str, Callable[..., object]] = {
    "grad": lambda run, q, k, v: torch.func.grad(lambda key: run(q, key, v).sum())(k),
    "vjp": lambda run, q, k, v: torch.func.vjp(run, q, k, v),
    "vmap": lambda run, q, k, v: torch.func.vmap(run)(q[None], k[None], v[None]),
    "vmap of the query": lambda run, q, k, v: torch.func.vmap(run, in_dims=(0, None, None))(q[None], k, v),
}


@pytest.mark.parametrize("door", EACH)
def test_transforms_of_torch_func(door: str):
    for transform in TRANSFORMS.values():
        text = on_ranks(
            2, lambda mesh, *tensors, of=transform: of(lambda *x: cut_contiguously(door, mesh, *x), *tensors)
        )
        assert text.count("transforms of torch.func are not supported") == 2, text


@pytest.mark.parametrize("which", ["sink", "mask"])
def test_forward_mode_of_what_stands_beside(which: str):
    def attend(mesh, *tensors):
        sink, mask = randn(1, 4), randn(2, LENGTH, LENGTH)
        sink = forward_ad.make_dual(sink, sink) if which == "sink" else sink
        mask = forward_ad.make_dual(mask, mask) if which == "mask" else mask
        context_attention(*tensors, mesh, mask=Dense(mask), sink_H=sink, layout=contiguous)

    with forward_ad.dual_level():
        assert on_ranks(2, attend).count("forward-mode differentiation") == 2


def test_one_rank_in_forward_mode_is_every_ranks_error():
    def attend(mesh, q, k, v):
        v = forward_ad.make_dual(v, v) if mesh.get_local_rank() == 1 else v
        context_attention(q, k, v, mesh, layout=contiguous)

    with forward_ad.dual_level():
        text = on_ranks(3, attend)
    assert text.count("forward-mode differentiation") == 3  # its own error, and in those of the others
    assert text.count("ranks [1] of mesh axis 'cp' have failed") == 2
