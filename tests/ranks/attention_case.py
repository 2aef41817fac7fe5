"""Modules and whole-sequence problems that the attention tests cut, run on ranks, and put together again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.styles import AttentionContextParallel
from cp_styles.testing import RankError, run_ranks
from tests.oracle import attention_inputs, dense_attention, error, expected_attention, randn

# Sums in another order: at most some hundred terms here, each a few 1e-16 from exact. A key counted twice or missed
# shows at 1e-2.
EXACT = 1e-12


class Core(nn.Module):
    """The module the style is for: query, key and value in, attention out."""

    def __init__(self, *, causal: bool = True, scale: float | None = None, seq_dim: int = 2) -> None:
        super().__init__()
        self.causal, self.scale, self.seq_dim = causal, scale, seq_dim

    def forward(self, query, key, value):
        if self.seq_dim == 1:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2) if self.seq_dim == 1 else out


class DenseCore(Core):
    """The same by the oracle."""

    def forward(self, query, key, value):
        if self.seq_dim == 1:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if self.causal else None
        out = dense_attention(query, key, value, mask, scale=self.scale)
        return out.transpose(1, 2) if self.seq_dim == 1 else out


class Projected(nn.Module):
    """Attention with its four projections: the parameters whose gradients context parallelism must get right."""

    def __init__(self, core: Core, *, heads: int = 4, kv_heads: int = 2, dim: int = 6, width: int = 10) -> None:
        super().__init__()
        self.core, self.dim = core, dim
        self.q, self.o = nn.Linear(width, heads * dim), nn.Linear(heads * dim, width, bias=False)
        self.k, self.v = nn.Linear(width, kv_heads * dim), nn.Linear(width, kv_heads * dim)
        for index, parameter in enumerate(self.parameters()):
            parameter.data = randn(100 + index, *parameter.shape) * parameter.shape[-1] ** -0.5

    def forward(self, x):
        query, key, value = (project(x).unflatten(-1, (-1, self.dim)) for project in (self.q, self.k, self.v))
        if self.core.seq_dim == 2:
            return self.o(self.core(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2).flatten(2))
        return self.o(self.core(query, key, value).flatten(2))


class Problem:
    """One attention over a whole sequence, and what every rank should get of it."""

    def __init__(
        self,
        *,
        length: int = 16,
        kv_length: int | None = None,
        causal: bool = True,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale: float | None = None,
        **shape: Any,
    ) -> None:
        self.inputs, self.cotangent = attention_inputs(length=length, kv_length=kv_length, **shape)
        if causal and mask is None and bias is None:
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        self.expected = expected_attention(self.inputs, self.cotangent, mask, bias=bias, scale=scale)
        self.causal, self.scale = causal, scale

    def layouts(self, layout: SequenceLayout | Balancer, ranks: int) -> tuple[SequenceLayout, SequenceLayout]:
        """Of queries and of keys."""
        if isinstance(layout, SequenceLayout):
            return layout, layout
        return layout(self.inputs[0].shape[2], ranks), layout(self.inputs[1].shape[2], ranks)

    def shard(
        self, layout: SequenceLayout | Balancer, rank: int, ranks: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """This rank's ``[query, key, value]``, as leaves that want gradients, and its part of the cotangent."""
        own, own_kv = self.layouts(layout, ranks)
        cuts = (own, own_kv, own_kv)
        leaves = [cut.shard(x, 2, rank).clone().requires_grad_() for x, cut in zip(self.inputs, cuts, strict=True)]
        return leaves, own.shard(self.cotangent, 2, rank)

    def errors(
        self, found: list[torch.Tensor], layout: SequenceLayout | Balancer, rank: int, ranks: int
    ) -> list[float]:
        """Of this rank's ``[out, dq, dk, dv]``: norm of the difference over the norm of the *whole*, each."""
        own, own_kv = self.layouts(layout, ranks)
        errors = []
        for mine, whole, cut in zip(found, self.expected, (own, own, own_kv, own_kv), strict=True):
            errors.append(error(mine, cut.shard(whole, 2, rank), whole=whole))
        return errors


def cp_mesh(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


def on_every_rank(
    ranks: int, *, run: Callable[..., list[Any]] = run_ranks, **options: Any
) -> Callable[[Callable[..., float | None]], Callable[..., None]]:
    """Makes a test of what happens on a rank. It takes ``rank`` and ``mesh`` if it names them, beside its parameters;
    an error that it returns must be below EXACT."""

    def decorate(on_rank: Callable[..., float | None]) -> Callable[..., None]:
        parameters = inspect.signature(on_rank).parameters

        @functools.wraps(on_rank)
        def test(**given: Any) -> None:
            def on(rank: int) -> float | None:
                own = {"rank": lambda: rank, "mesh": lambda: cp_mesh(ranks)}
                return on_rank(**given, **{name: make() for name, make in own.items() if name in parameters})

            assert all(apart is None or apart < EXACT for apart in run(on, ranks, **options))

        kept = [parameter for name, parameter in parameters.items() if name not in ("rank", "mesh")]
        test.__signature__ = inspect.Signature(kept)  # pyright: ignore[reportAttributeAccessIssue]
        return test

    return decorate


@contextlib.contextmanager
def every_rank_raises(words: str, ranks: int = 2, *, each: bool = False) -> Iterator[pytest.ExceptionInfo[RankError]]:
    """All of the ranks must raise. One error has these words, or with ``each`` every one of them."""
    with pytest.raises(RankError, match=None if each else words) as found:
        yield found
    errors = found.value.errors
    assert errors.keys() == set(range(ranks))
    assert not each or all(re.search(words, str(error)) for error in errors.values()), errors


def refused(
    act: Callable[[int, DeviceMesh], object],
    words: str,
    kind: type[BaseException] | tuple[type[BaseException], ...] = ValueError,
    *,
    ranks: int = 2,
) -> None:
    """On every rank ``act(rank, mesh)`` raises an error of this kind with these words, a pattern."""
    with every_rank_raises(words, ranks, each=True) as found:
        run_ranks(lambda rank: act(rank, cp_mesh(ranks)), ranks)
    assert all(isinstance(error, kind) for error in found.value.errors.values()), found.value.errors


def parallel(core: nn.Module, mesh: DeviceMesh, **style: Any) -> nn.Module:
    """``core`` itself, under the style."""
    return parallelize_module(core, mesh, AttentionContextParallel(**style))


def run_attention(
    attend: Callable[..., torch.Tensor],
    problem: Problem,
    rank: int,
    ranks: int,
    *,
    layout: SequenceLayout | Balancer = head_tail,
    seq_dim: int = 2,
) -> list[float]:
    """Errors of out, dq, dk and dv of ``attend(q, k, v)`` on this rank's part."""
    leaves, cotangent = problem.shard(layout, rank, ranks)
    out = attend(*(x.transpose(1, 2) if seq_dim == 1 else x for x in leaves))
    out = out.transpose(1, 2) if seq_dim == 1 else out
    out.backward(cotangent)  # and not autograd.grad, which reentrant checkpoints refuse
    return problem.errors([out.detach(), *(leaf.grad for leaf in leaves)], layout, rank, ranks)
