"""One rank fails before, between or behind two calls that communicate: every rank hears of it, whatever the door.

    python -m tests.turns                             the cells on threads: door, how, moment, rank, whether it goes on
    python -m tests.turns --doors core --how eager    some of them
    torchrun --nproc-per-node 2 -m tests.turns        the cells on processes, and compiled ones, which need them

A *door* is a way to make two such calls. A *moment* is where a rank fails, and :class:`How` says in which run of the
calls: in a checkpoint, in its recomputation, in compiled code. A :class:`Cell` is one of each, the rank that fails, and
whether the program catches the error. :func:`run_cell` runs it on ranks that are threads: it raises if a rank waits for
the timeout, if a rank hears nothing, or if the next step, after all ranks have caught their errors, is not exact.
:func:`perform` is one rank of it, on threads or processes. Compiled cells run on processes: threads share the code that
torch.compile makes, in which ``dist.get_rank()`` is a constant, and the flag of ``torch.compiler.is_compiling()``.

Where no style, block or function of the package encloses the code between two calls, nobody can tell the peers, and the
door has no such moment. The peers of a rank that goes on then wait, as "Not promised" in "When a rank fails" of
tutorials/troubleshooting.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    BackboneContextParallel,
    Causal,
    ModuleContextParallel,
    SequenceScope,
    context_attention,
    context_flex_attention,
    context_latent_attention,
    context_max_scores,
    context_varlen_attention,
    flex_attention,
    head_tail,
    parallelize_module,
)
from cp_styles._lib.compat import uncompiled
from cp_styles.collectives import all_to_all, gather, heads_to_seq, seq_to_heads
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.mixers import context_causal_conv1d, context_recurrence, context_roll
from cp_styles.testing import RankTimeout, run_ranks
from cp_styles.torch_api import context_parallel
from tests.doors import PackedCore, causal_blocks
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.ranks.mixers.kernels import chunk_gla

RANKS = 2
TIMEOUT = 60.0
LENGTH, WIDTH, HEADS = 12, 8, 2
X = randn(0, 1, LENGTH, WIDTH)
LAYOUT = head_tail(LENGTH, RANKS)
MOMENTS = ("before", "between", "behind")

Piece = Callable[[torch.Tensor], torch.Tensor]
"""A part of a program, a function of one tensor."""


class Planted(Exception):
    """An error of the user's program."""


def planted(x: torch.Tensor) -> torch.Tensor:
    raise Planted("on this rank alone")


@dataclass(frozen=True)
class How:
    """How the calls run: ``run(piece, x)`` calls a part of a step. With ``again`` a rank fails in its recomputation.

    With ``compiles`` torch.compile compiles the step.
    """

    run: Callable[[Piece, torch.Tensor], torch.Tensor] = lambda piece, x: piece(x)
    again: bool = False
    compiles: bool = False


_kept, _reentrant = (partial(checkpoint, use_reentrant=reentrant) for reentrant in (False, True))
HOW = {
    "eager": How(),
    "checkpoint": How(_kept),
    "reentrant": How(_reentrant),
    "recomputed": How(_kept, again=True),
    "recomputed, reentrant": How(_reentrant, again=True),
    "compiled": How(compiles=True),
}


class At:
    """The program of one rank: ``at(moment, x)`` is ``x``, or ``fail(x)`` at one moment. ``run``: see :class:`How`."""

    def __init__(self, how: How, moment: str = "", fail: Piece = planted) -> None:
        self.how, self.run = how, how.run
        self._moment, self._fail, self._passed = moment, fail, 0

    def __call__(self, moment: str, x: torch.Tensor) -> torch.Tensor:
        if moment != self._moment:
            return x
        return self._pass(x)

    @uncompiled
    def _pass(self, x: torch.Tensor) -> torch.Tensor:
        self._passed += 1
        return self._fail(x) if self._passed == 1 + self.how.again else x

    def twice(self, first: Piece, second: Piece, x: torch.Tensor) -> torch.Tensor:
        """Two calls, with the three moments."""
        # A recomputation needs something to recompute: the results of some doors are not kept for a backward.
        x = self.run(lambda x: first(self("before", x)).tanh(), x)
        return self.run(lambda x: self("behind", second(self("between", x))).tanh(), x)


def heads(x: torch.Tensor) -> torch.Tensor:
    """[B, L, D] -> [B, 2, L, D / 2]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def sdpa(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Attention(nn.Module):
    """A layer whose attention is ``attend``, of query, key and value [B, H, L, D]."""

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
        self.at = At(How())

    def forward(self, x):
        return self.at.twice(*self.layers, x)


class Core(nn.Module):
    """A module of query, key and value with two attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.at = At(How())

    def forward(self, query, key, value):
        def attend(x):
            return F.scaled_dot_product_attention(x, key, value, is_causal=True)

        return self.at.twice(attend, attend, query)


class One(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


Act = Callable[[At], torch.Tensor]
"""A step of this rank, whose result does not depend on the number of ranks but for the cut."""


def own(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return LAYOUT.shard(x, dim, dist.get_rank())


def trained(x: torch.Tensor) -> torch.Tensor:
    """A copy with a gradient, so that a backward follows."""
    return x.clone().requires_grad_()


def in_core(mesh: DeviceMesh) -> Act:
    core = parallelize_module(Core(), mesh, AttentionContextParallel())

    def act(at: At) -> torch.Tensor:
        core.at, x = at, heads(trained(own(X)))
        return joined(core(x, x, x))

    return act


def in_cores(mesh: DeviceMesh) -> Act:
    """The program fails between two modules, which no style encloses."""
    cores = [parallelize_module(One(), mesh, AttentionContextParallel()) for _ in range(2)]

    def act(at: At) -> torch.Tensor:
        return joined(at.twice(*(lambda x, core=core: core(x, x, x) for core in cores), heads(trained(own(X)))))

    return act


def in_module(mesh: DeviceMesh, attend: Callable[[torch.Tensor], torch.Tensor] = sdpa) -> Act:
    model = parallelize_module(Model(attend), mesh, ModuleContextParallel(verified=True))

    def act(at: At) -> torch.Tensor:
        model.at = at
        return model(trained(own(X)))

    return act


def in_scope(mesh: DeviceMesh) -> Act:
    act = in_module(mesh)

    def within(at: At) -> torch.Tensor:
        """The scope is open around the step, and again in what a checkpoint runs."""
        scope = SequenceScope(LAYOUT)

        def scoped(piece: Piece, x: torch.Tensor) -> torch.Tensor:
            with scope:
                return piece(x)

        run, at.run = at.run, lambda piece, x: run(partial(scoped, piece), x)
        with scope:
            return act(at)

    return within


def in_backbone(mesh: DeviceMesh) -> Act:
    model = parallelize_module(Model(), mesh, BackboneContextParallel(blocks="layers"))

    def act(at: At) -> torch.Tensor:
        model.at = at
        return own(model(trained(X)))

    return act


def in_a_block_of_a_backbone(mesh: DeviceMesh) -> Act:
    """The rank fails in the blocks."""
    model = Model()
    parallelize_module(model, mesh, BackboneContextParallel(blocks="layers"))

    def act(at: At) -> torch.Tensor:
        model.at = At(at.how)
        model.layers[0].attend = lambda x: sdpa(at("before", x))  # pyright: ignore[reportAttributeAccessIssue]
        model.layers[1].attend = lambda x: at("behind", sdpa(at("between", x)))  # pyright: ignore
        return own(model(trained(X)))

    return act


def in_block(mesh: DeviceMesh) -> Act:
    model = Model()

    def act(at: At) -> torch.Tensor:
        model.at, x = at, trained(X)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], verified=True):
            return model(x)

    return act


def flex(x: torch.Tensor) -> torch.Tensor:
    return flex_attention(x, x, x, block_mask=causal_blocks(LENGTH))


def varlen(x: torch.Tensor) -> torch.Tensor:
    return PackedCore([0, LENGTH], window_size=(-1, 0))(x, x, x)


def by_calls(call: Callable[[DeviceMesh, torch.Tensor], torch.Tensor], hows: tuple[str, ...] = tuple(HOW)) -> Door:
    """Two calls of a function."""
    return Door(lambda mesh: lambda at: at.twice(*[partial(call, mesh)] * 2, trained(own(X))), *_IN_CALLS, hows)


def latents(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    weight = torch.eye(WIDTH, dtype=x.dtype).repeat(2 * HEADS, 1)
    query = torch.cat([heads(x)] * 2, -1)
    out = context_latent_attention(query, x, x[..., :0], weight[: HEADS * 2 * WIDTH], mesh, mask=Causal())
    return out.mean(1)[..., :WIDTH]


def decoded(mesh: DeviceMesh) -> Act:
    def act(at: At) -> torch.Tensor:
        keys = heads(X)
        cache = KVCache(mesh, LAYOUT, *(own(keys, 2) for _ in range(2)))
        tokens = at.twice(*[lambda x: context_decode(x, cache)] * 2, keys[:, :, -1:])
        return own(joined(tokens).expand(1, LENGTH, WIDTH))

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
    the next call of the package refuses. ``hows``: how its calls can run."""

    make: Callable[[DeviceMesh], Act]
    moments: tuple[str, ...] = MOMENTS
    fail: Piece = planted
    hows: tuple[str, ...] = tuple(HOW)


_EAGER = tuple(name for name, how in HOW.items() if not how.compiles)
# Nothing encloses the code between two calls of functions. So a rank fails in a call.
_IN_CALLS: Any = ("before", "between"), lambda x: x[:, :, :0].to(torch.int32)


def _heads_and_back(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    return joined(heads_to_seq(seq_to_heads(heads(x), mesh), mesh))


DOORS: dict[str, Door] = {
    # torch.compile of torch 2.13 cannot go on behind a graph break between DTensors.
    "core": Door(in_core, hows=_EAGER),
    "core, by its output": Door(in_core, ("behind",), lambda x: x.sum(2), _EAGER),
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
    "largest scores": by_calls(
        lambda mesh, x: x + context_max_scores(*[heads(x)] * 2, mesh, mask=Causal()).mean(1).unsqueeze(-1)
    ),
    "decode": Door(decoded, *_IN_CALLS, ("eager",)),  # it has no backward
    "convolution": by_calls(lambda mesh, x: context_causal_conv1d(convolution, x, mesh, width=3, seq_dim=1)),
    "roll": by_calls(lambda mesh, x: context_roll(x, 1, 1, mesh)),
    "recurrence": by_calls(recurrence),
    # In graphs collectives do not compare their calls.
    "gather": by_calls(lambda mesh, x: own(gather(x, 1, mesh, reduce_gradients=True, layout=LAYOUT)), _EAGER),
    "all_to_all": by_calls(lambda mesh, x: all_to_all(all_to_all(x, 2, 1, mesh), 1, 2, mesh), _EAGER),
    "heads": by_calls(_heads_and_back, _EAGER),
}


@dataclass(frozen=True)
class Cell:
    """``faulty`` is the rank that fails. ``caught``: all ranks catch the error, twice, and run one more step."""

    door: str
    how: str
    moment: str
    faulty: int
    caught: bool

    def __str__(self) -> str:
        return f"{self.door}, {self.how}, {self.moment}, rank {self.faulty}{', caught' if self.caught else ''}"


def cells() -> Iterator[Cell]:
    """All that is promised."""
    for name, door in DOORS.items():
        for how, moment in product(door.hows, door.moments):
            if how == "recomputed" and moment == "behind":
                continue  # such a recomputation ends with the last call whose results the backward needs
            for faulty, caught in product(range(RANKS), (False, True)):
                yield Cell(name, how, moment, faulty, caught)


def perform(cell: Cell, rank: int) -> str:
    """One rank of a cell. Returns the error of the first step. Raises what is against the promise."""
    with warnings.catch_warnings(), ExitStack() as around:
        warnings.simplefilter("ignore")
        mesh = cp_mesh(RANKS)
        how, door = HOW[cell.how], DOORS[cell.door]
        act = door.make(mesh)
        if how.compiles:
            # Behind torch.compile's limit of graphs a cell would run as written.
            around.enter_context(torch._dynamo.config.patch(recompile_limit=1000, fail_on_recompile_limit_hit=True))
            act = torch.compile(act, backend="aot_eager")

        def step(at: At) -> torch.Tensor:
            out = act(at)
            if out.requires_grad and how.again:
                out.sum().backward()
            return out.detach()

        def hear(times: int) -> str:
            try:
                step(At(how, cell.moment, door.fail) if rank == cell.faulty else At(how))
                if cell.moment == "behind" and rank != cell.faulty:
                    step(At(how))  # it hears of the error at its next step
            except Exception as told:
                if not cell.caught:
                    raise
                # As in a program that tries again where it handles an error, which all ranks have heard.
                return hear(times - 1) if times > 1 else f"{type(told).__name__}: {told}"
            raise AssertionError(f"{cell}: rank {rank} heard nothing")

        wanted = step(At(how))
        words = hear(2)
        assert error(step(At(how)), wanted) < EXACT
        return words


def run_cell(cell: Cell) -> list[str]:
    """The error of each rank. Raises if a rank was not told, or cannot go on."""
    assert not HOW[cell.how].compiles, "compiled cells need processes"
    return judged(run_ranks(partial(heard, cell), RANKS, timeout_seconds=TIMEOUT))


class Heard(NamedTuple):
    """The error of a rank. ``wrong``: the promise is broken."""

    words: str
    wrong: bool


def heard(cell: Cell, rank: int) -> Heard:
    try:
        return Heard(perform(cell, rank), wrong=False)
    except Exception as error:
        return Heard(f"{type(error).__name__}: {error}", cell.caught or isinstance(error, AssertionError))


def judged(ranks: Sequence[Heard]) -> list[str]:
    """The error of each rank. Raises AssertionError if the promise is broken."""
    words = [each.words for each in ranks]
    assert not any(each.wrong for each in ranks), words
    assert all("Error" in each or "Planted" in each for each in words), words
    return words


class Processes:
    """Runs cells on the processes of torchrun. The ranks of each cell meet at a place of their own."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store, self._cells = dist.TCPStore(*address, is_master=False), 0
        torch.set_num_threads(1)

    def run_cell(self, cell: Cell) -> list[str]:
        """As the function of this name."""
        self._cells += 1
        place = dist.PrefixStore(f"cell {self._cells}", self._store)
        limit = timedelta(seconds=TIMEOUT)
        dist.init_process_group("gloo", store=place, rank=self.rank, world_size=RANKS, timeout=limit)
        place.set(f"heard by {self.rank}", json.dumps(heard(cell, self.rank)))
        ranks = [Heard(*json.loads(place.get(f"heard by {rank}"))) for rank in range(RANKS)]
        dist.destroy_process_group()
        return judged(ranks)


def main() -> int:
    processes = Processes() if "RANK" in os.environ else None
    run, prints = (processes.run_cell, processes.rank == 0) if processes else (run_cell, True)
    here = [how for how in HOW if processes or not HOW[how].compiles]
    parser = argparse.ArgumentParser(prog="python -m tests.turns")
    parser.add_argument("--doors", nargs="*", choices=DOORS, default=list(DOORS))
    parser.add_argument("--how", nargs="*", choices=HOW, default=here)
    options, bad = parser.parse_args(), 0
    if not {*options.how} <= {*here}:
        parser.error(f"compiled cells need processes: torchrun --nproc-per-node {RANKS} -m tests.turns")
    chosen = [cell for cell in cells() if cell.door in options.doors and cell.how in options.how]
    if not chosen:
        parser.error("no cell has one of these doors and one of these ways")
    for cell in chosen:
        began = time.monotonic()
        try:
            told = " | ".join(each[:60] for each in run(cell))
        except (AssertionError, RankTimeout) as wrong:
            bad, told = bad + 1, f"WRONG: {type(wrong).__name__} {str(wrong)[:300]}"
        if prints:
            print(f"{cell!s:60} {time.monotonic() - began:6.1f} s  {told}", flush=True)
    if prints:
        print(f"{bad} broken promises of {len(chosen)} cells")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
