"""Backwards in a thread that knows nothing of the forward's, as CUDA's autograd runs them; through every door.

Two processes: on ranks that are threads, the other thread would belong to none of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AllGather,
    Causal,
    Ring,
    SequenceScope,
    Ulysses,
    context_attention,
    save_attention,
)
from cp_styles.collectives import heads_to_seq, seq_to_heads
from cp_styles.layouts import head_tail
from tests.doors import door
from tests.oracle import dense_attention
from tests.process.several import Program, in_a_world
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, parallel

pytestmark = pytest.mark.process

RANKS, LENGTH = 2, 16
PROBLEM = Problem(length=LENGTH, kv_heads=2)
LAYOUT = head_tail(LENGTH, RANKS)
Attend = Callable[..., torch.Tensor]


def attended_by(name: str, mesh: DeviceMesh, **options) -> Attend:
    return door(name, mesh, layout=LAYOUT, **options)


styled, function = partial(attended_by, "style"), partial(attended_by, "function")


def in_scope(mesh: DeviceMesh) -> Attend:
    module = parallel(Core(), mesh)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        with SequenceScope(LAYOUT):
            return module(*qkv)

    return attend


def by_heads(mesh: DeviceMesh) -> Attend:
    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (seq_to_heads(x, mesh, seq_dim=2, heads_dim=1, layout=LAYOUT) for x in qkv)
        out = dense_attention(q, k, v, torch.ones(LENGTH, LENGTH).tril().bool())
        return heads_to_seq(out, mesh, heads=4, seq_dim=2, heads_dim=1, layout=LAYOUT)

    return attend


def with_lse(mesh: DeviceMesh) -> Attend:
    """Its gradient is 0, but takes the kernel's other backward."""

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out, lse = context_attention(*qkv, mesh, mask=Causal(), layout=LAYOUT, return_lse=True)
        return out + 0.0 * lse.unsqueeze(-1)

    return attend


DOORS: dict[str, Callable[[DeviceMesh], Attend]] = {
    "style": styled,
    "style, Ulysses": partial(styled, strategy=Ulysses()),
    "style, checkpoint": lambda mesh: partial(checkpoint, styled(mesh), use_reentrant=False),
    "style, selective": lambda mesh: partial(
        checkpoint, styled(mesh), use_reentrant=False, context_fn=save_attention()
    ),
    "scope": in_scope,
    "module": partial(attended_by, "module"),
    "block": partial(attended_by, "block"),
    "function": function,
    "function, sent again": partial(function, strategy=Ring(keep=0)),
    "function, all-gather": partial(function, strategy=AllGather()),
    "function, logsumexp": with_lse,
    "flex": partial(attended_by, "flex"),
    "collectives": by_heads,
}


def elsewhere(act: Callable[[], object]) -> None:
    """Run it in a thread of its own, in an empty context."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            Context().run(act)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def attended(attend: Attend, rank: int) -> list[float]:
    leaves, cotangent = PROBLEM.shard(LAYOUT, rank, RANKS)
    out = attend(*leaves)
    elsewhere(partial(out.backward, cotangent))
    found: Sequence[torch.Tensor | None] = [out.detach(), *(leaf.grad for leaf in leaves)]
    return PROBLEM.errors([x for x in found if x is not None], LAYOUT, rank, RANKS)


@in_a_world
def main(folder: Path) -> None:
    mesh, rank = cp_mesh(RANKS), dist.get_rank()
    print(json.dumps({name: max(attended(door(mesh), rank)) for name, door in DOORS.items()}), flush=True)


PROGRAMS = {"backward in another thread": Program(RANKS, main)}


def test_backwards_in_another_thread(on_processes):
    finished = on_processes["backward in another thread"]
    assert finished.statuses == [0] * RANKS
    for text in finished.said:
        errors = json.loads(text)
        assert errors.keys() == DOORS.keys()
        assert max(errors.values()) < EXACT, errors
