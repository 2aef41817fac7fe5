"""One rank fails before, between or behind two calls that communicate: every rank hears of it, whatever the door.

    python -m tests.turns                    every cell on threads: door, moment, whether the program goes on
    python -m tests.turns --doors core       some doors

A *door* is a way to make two such calls, and a *moment* is where the one rank fails. A :class:`Cell` is one of each,
and whether the program catches the error. :func:`run_cell` runs it on ranks that are threads: it raises if a rank waits
for the timeout, if a rank hears nothing, or if the next step, after all ranks have caught their errors, is not exact.
:func:`perform` is one rank of it, on threads or processes.

Where no style, block or function of the package encloses the code between two calls, nobody can tell the peers, and the
door has no such moment. The peers of a rank that goes on then wait, as "Not promised" in "When a rank fails" of
tutorials/troubleshooting.md says.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import (
    AttentionContextParallel,
    BackboneContextParallel,
    Causal,
    ModuleContextParallel,
    SequenceScope,
    context_attention,
    context_flex_attention,
    context_latent_attention,
    context_varlen_attention,
    flex_attention,
    head_tail,
    parallelize_module,
)
from cp_styles.collectives import all_to_all, gather, heads_to_seq, seq_to_heads
from cp_styles.decoding import KVCache, context_decode
from cp_styles.mixers import context_causal_conv1d, context_recurrence, context_roll
from cp_styles.testing import RankTimeout, run_ranks
from cp_styles.torch_api import context_parallel
from tests.doors import PackedCore, causal_blocks
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.ranks.mixers.kernels import chunk_gla

RANKS, FAULTY = 2, 1
TIMEOUT = 60.0  # of the groups, in seconds: a rank that waits so long was not told
LENGTH, WIDTH, HEADS = 12, 8, 2
X = randn(0, 1, LENGTH, WIDTH)
LAYOUT = head_tail(LENGTH, RANKS)
MOMENTS = ("before", "between", "behind")

At = Callable[[str, torch.Tensor], torch.Tensor]
"""``at(moment, x)`` is ``x``, or fails at this moment."""


class Planted(Exception):
    """An error of the user's program."""


def planted(x: torch.Tensor) -> torch.Tensor:
    raise Planted("on this rank alone")


def heads(x: torch.Tensor) -> torch.Tensor:
    """[B, L, D] -> [B, 2, L, D / 2]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def sdpa(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Attention(nn.Module):
    """A layer whose attention is ``attend``, of query, key and value [B, H, L, D]. ``at`` is the program's."""

    def __init__(self, attend: Callable[[torch.Tensor], torch.Tensor] = sdpa) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return x + joined(self.attend(heads(x)))


class Model(nn.Module):
    """Two layers, in a list of blocks, between which a rank may fail."""

    def __init__(self, attend: Callable[[torch.Tensor], torch.Tensor] = sdpa) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(attend), Attention(attend)])
        self.at: At = lambda _, x: x

    def forward(self, x):
        x = self.layers[0](self.at("before", x))
        return self.at("behind", self.layers[1](self.at("between", x)))


class Core(nn.Module):
    """A module of query, key and value with two attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.at: At = lambda _, x: x

    def forward(self, query, key, value):
        x = F.scaled_dot_product_attention(self.at("before", query), key, value, is_causal=True)
        return self.at("behind", F.scaled_dot_product_attention(self.at("between", x), key, value, is_causal=True))


class One(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


Act = Callable[[At], torch.Tensor]
"""A step of this rank, whose result does not depend on the number of ranks but for the cut."""


def own(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return LAYOUT.shard(x, dim, dist.get_rank())


def in_core(mesh: DeviceMesh) -> Act:
    core = parallelize_module(Core(), mesh, AttentionContextParallel())

    def act(at: At) -> torch.Tensor:
        core.at, x = at, heads(own(X))
        return joined(core(x, x, x))

    return act


def in_cores(mesh: DeviceMesh) -> Act:
    """The program fails between two modules, which no style encloses."""
    cores = [parallelize_module(One(), mesh, AttentionContextParallel()) for _ in range(2)]

    def act(at: At) -> torch.Tensor:
        x = at("before", heads(own(X)))
        x = at("between", cores[0](x, x, x))
        return joined(at("behind", cores[1](x, x, x)))

    return act


def in_module(mesh: DeviceMesh, attend: Callable[[torch.Tensor], torch.Tensor] = sdpa) -> Act:
    model = parallelize_module(Model(attend), mesh, ModuleContextParallel(verified=True))

    def act(at: At) -> torch.Tensor:
        model.at = at
        return model(own(X))

    return act


def in_scope(mesh: DeviceMesh) -> Act:
    act = in_module(mesh)

    def within(at: At) -> torch.Tensor:
        with SequenceScope(LAYOUT):
            return act(at)

    return within


def in_backbone(mesh: DeviceMesh) -> Act:
    model = parallelize_module(Model(), mesh, BackboneContextParallel(blocks="layers"))

    def act(at: At) -> torch.Tensor:
        model.at = at
        return own(model(X))

    return act


def in_a_block_of_a_backbone(mesh: DeviceMesh) -> Act:
    """The rank fails in the blocks."""
    model = Model()
    parallelize_module(model, mesh, BackboneContextParallel(blocks="layers"))

    def act(at: At) -> torch.Tensor:
        model.layers[0].attend = lambda x: sdpa(at("before", x))  # pyright: ignore[reportAttributeAccessIssue]
        model.layers[1].attend = lambda x: at("behind", sdpa(at("between", x)))  # pyright: ignore
        return own(model(X))

    return act


def in_block(mesh: DeviceMesh) -> Act:
    model = Model()

    def act(at: At) -> torch.Tensor:
        model.at, x = at, X.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], verified=True):
            return model(x)

    return act


def flex(x: torch.Tensor) -> torch.Tensor:
    return flex_attention(x, x, x, block_mask=causal_blocks(LENGTH))


def varlen(x: torch.Tensor) -> torch.Tensor:
    return PackedCore([0, LENGTH], window_size=(-1, 0))(x, x, x)


def twice(call: Callable[[torch.Tensor], torch.Tensor], at: At, x: torch.Tensor) -> torch.Tensor:
    x = call(at("before", x))
    return at("behind", call(at("between", x)))


def by_calls(call: Callable[[DeviceMesh, torch.Tensor], torch.Tensor]) -> Door:
    """Two calls of a function."""
    return Door(lambda mesh: lambda at: twice(partial(call, mesh), at, own(X)), *_IN_CALLS)


def latents(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    weight = torch.eye(WIDTH, dtype=x.dtype).repeat(2 * HEADS, 1)
    query = torch.cat([heads(x)] * 2, -1)
    out = context_latent_attention(query, x, x[..., :0], weight[: HEADS * 2 * WIDTH], mesh, mask=Causal())
    return out.mean(1)[..., :WIDTH]


def decoded(mesh: DeviceMesh) -> Act:
    def act(at: At) -> torch.Tensor:
        keys = heads(X)
        cache = KVCache(mesh, LAYOUT, *(own(keys, 2) for _ in range(2)))
        return own(joined(twice(lambda x: context_decode(x, cache), at, keys[:, :, -1:])).expand(1, LENGTH, WIDTH))

    return act


def recurrence(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(-1, (HEADS, -1))
    out, _ = context_recurrence(chunk_gla, mesh)(q, q, q, -q.abs())
    return out.flatten(2)


def convolution(x: torch.Tensor) -> torch.Tensor:
    """Causal, of three taps, over [B, L, D]."""
    rows = F.pad(x, (0, 0, 2, 0))
    return rows[:, 2:] + 0.5 * rows[:, 1:-1] - rows[:, :-2]


@dataclass(frozen=True)
class Door:
    """``make(mesh)`` is a step. ``moments``: when a rank may fail, and is heard. ``fail(x)`` raises, or returns what
    the next call of the package refuses."""

    make: Callable[[DeviceMesh], Act]
    moments: tuple[str, ...] = MOMENTS
    fail: Callable[[torch.Tensor], torch.Tensor] = planted


# Nothing encloses the code between two calls of functions. So a rank fails in a call.
_IN_CALLS: Any = ("before", "between"), lambda x: x[:, :, :0].to(torch.int32)


def _heads_and_back(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    return joined(heads_to_seq(seq_to_heads(heads(x), mesh), mesh))


DOORS: dict[str, Door] = {
    "core": Door(in_core),
    "core, by its output": Door(in_core, ("behind",), lambda x: x.sum(2)),
    "module": Door(in_module),
    "scope": Door(in_scope),
    "backbone": Door(in_backbone),
    "backbone, in a block": Door(in_a_block_of_a_backbone),
    "block": Door(in_block),
    "flex in a module": Door(partial(in_module, attend=flex)),
    "varlen in a module": Door(partial(in_module, attend=varlen)),
    "cores": Door(in_cores, ()),
    "function": by_calls(lambda mesh, x: joined(context_attention(*[heads(x)] * 3, mesh, mask=Causal()))),
    "flex": by_calls(lambda mesh, x: joined(context_flex_attention(*[heads(x)] * 3, mesh, mask=Causal()))),
    "varlen": by_calls(
        lambda mesh, x: (
            context_varlen_attention(*[x.view(-1, HEADS, WIDTH // HEADS)] * 3, mesh, [0, LENGTH])
            .flatten(1)
            .view(x.shape)
        )
    ),
    "latents": by_calls(latents),
    "decode": Door(decoded, *_IN_CALLS),
    "convolution": by_calls(lambda mesh, x: context_causal_conv1d(convolution, x, mesh, width=3, seq_dim=1)),
    "roll": by_calls(lambda mesh, x: context_roll(x, 1, 1, mesh)),
    "recurrence": by_calls(recurrence),
    "gather": by_calls(lambda mesh, x: own(gather(x, 1, mesh, reduce_gradients=True, layout=LAYOUT))),
    "all_to_all": by_calls(lambda mesh, x: all_to_all(all_to_all(x, 2, 1, mesh), 1, 2, mesh)),
    "heads": by_calls(_heads_and_back),
}


@dataclass(frozen=True)
class Cell:
    """``caught``: all ranks catch the error, twice, and run one more step."""

    door: str
    moment: str
    caught: bool

    def __str__(self) -> str:
        return f"{self.door}, {self.moment}{', caught' if self.caught else ''}"


def cells() -> Iterator[Cell]:
    """All that is promised."""
    for name, door in DOORS.items():
        for moment, caught in product(door.moments, (False, True)):
            yield Cell(name, moment, caught)


def nothing(_: str, x: torch.Tensor) -> torch.Tensor:
    return x


def failing(cell: Cell) -> At:
    """What the faulty rank does at each moment."""
    return lambda moment, x: DOORS[cell.door].fail(x) if moment == cell.moment else x


def perform(cell: Cell, rank: int) -> str:
    """One rank of a cell. Returns the error of the first step. Raises what is against the promise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = cp_mesh(RANKS)
        act = DOORS[cell.door].make(mesh)
        wanted = act(nothing)  # a step that nobody disturbs
        words = ""
        for _ in range(2):  # the second time after an error that all ranks have heard
            try:
                act(failing(cell) if rank == FAULTY else nothing)
                if cell.moment == "behind" and rank != FAULTY:
                    act(nothing)  # it hears of the error at its next step
            except Exception as told:
                if not cell.caught:
                    raise
                words = f"{type(told).__name__}: {told}"
            else:
                raise AssertionError(f"{cell}: rank {rank} heard nothing")
        assert error(act(nothing), wanted) < EXACT
        return words


def run_cell(cell: Cell) -> list[str]:
    """The error of each rank. Raises if a rank was not told, or cannot go on."""
    results = run_ranks(partial(_on_rank, cell), RANKS, timeout_seconds=TIMEOUT, return_errors=True)
    words = [f"{type(x).__name__}: {x}" if isinstance(x, BaseException) else x for x in results]
    wrong = [x for x in results if isinstance(x, AssertionError) or (cell.caught and isinstance(x, BaseException))]
    assert not wrong, words
    assert all("Error" in each or "Planted" in each for each in words), words
    return words


def _on_rank(cell: Cell, rank: int) -> str:
    return perform(cell, rank)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.turns")
    parser.add_argument("--doors", nargs="*", choices=DOORS, default=list(DOORS))
    options, bad = parser.parse_args(), 0
    for cell in cells():
        if cell.door in options.doors:
            began = time.monotonic()
            try:
                told = " | ".join(each[:60] for each in run_cell(cell))
            except (AssertionError, RankTimeout) as wrong:
                bad, told = bad + 1, f"WRONG: {type(wrong).__name__} {str(wrong)[:300]}"
            print(f"{cell!s:44} {time.monotonic() - began:6.1f} s  {told}", flush=True)
    print(f"{bad} broken promises")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
