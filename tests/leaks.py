"""Memory, threads and file descriptors of a long training whose batches are all different.

    python tests/leaks.py --batches 10000
    python tests/leaks.py --batches 300 --different 10           short: the same ten batches again and again
    python tests/leaks.py --batches 300 --different 10 --keep    an object of every batch is kept: this must be noticed
    python tests/leaks.py --batches 300 --different 10 --doors flex varlen      some doors alone

Two ranks, which are processes, attend through every door: with changing lengths, shapes, documents, masks, layouts and
scopes, forward and backward, compiled and not, in blocks, with FlexAttention, packed, and with caches of generated
tokens. A part of the models is made once, and others live for a batch. Now and then the ranks make a group or a whole
world, and destroy it. Calls that are refused are among them.

The caches of the package hold few entries. Before a row of the table is counted, they are emptied. What is judged, in
the second half of the batches, is in :func:`verdict`. The exit status is 1 if anything grows. In a short run of
batches that are all different, torch's tables of shapes still do.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_styles import (
    AttentionContextParallel,
    ModuleContextParallel,
    SequenceScope,
    context_attention,
    global_loss,
    global_token_count,
    parallelize_module,
    sum_gradients,
)
from cp_styles._lib.bounded_cache import Remembered
from cp_styles.collectives import all_to_all, gather
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.masks import Causal, Chunked, Dense, Documents, Full, Mask, PrefixLM, SlidingWindow
from cp_styles.masks.block_mask import FlexMask
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.torch_api import context_parallel
from tests.doors import door
from tests.ranks.attention_case import Core

RANKS = 2
HEADS, DIM = 4, 8


class World:
    """What one rank has of a world: a mesh, and models that live as long."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank = mesh, mesh.get_local_rank()
        self.style = self.core(AttentionContextParallel())
        self.module = self.core(ModuleContextParallel())
        self.compiled = torch.compile(self.core(AttentionContextParallel()), backend="aot_eager", dynamic=False)
        self.linear = nn.Linear(DIM, DIM, dtype=torch.float64)

    def core(self, style: Any) -> Any:
        return parallelize_module(nn.Sequential(Core()), self.mesh, {"0": style})[0]


class Batch:
    """The choices of one batch, the same on all ranks."""

    def __init__(self, number: int) -> None:
        draw = self.draw = random.Random(number)
        self.length = draw.randrange(8, 160)
        cuts = sorted(draw.sample(range(1, self.length), draw.randrange(1, 6)))
        edges = [0, *cuts, self.length]
        self.documents = Documents(tuple(b - a for a, b in itertools.pairwise(edges)))
        self.strategy = draw.choice([Ring(), Ring(keep=0), AllGather(), Ulysses()])
        self.batch = draw.randrange(1, 3)
        torch.manual_seed(number)  # generated tokens are the same on all ranks

    def mask(self) -> Mask:
        length, draw = self.length, self.draw
        several = [
            Causal(),
            Full(),
            SlidingWindow(draw.randrange(1, length), 0),
            Chunked(draw.randrange(2, length)),
            PrefixLM(draw.randrange(1, length)),
            self.documents & Causal(),
            self.dense(),
            FlexMask(self.blocks(draw.randrange(1, length))),
        ]
        return draw.choice(several)

    def dense(self) -> Mask:
        generator = torch.Generator().manual_seed(self.length)
        seen = torch.rand(self.length, self.length, generator=generator) < 0.7
        return Dense(seen | torch.eye(self.length, dtype=torch.bool))

    def blocks(self, window: int) -> BlockMask:
        sizes = (None, None, self.length, self.length)
        return create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < window), *sizes, device="cpu")

    def layout(self, mask: Mask | None = None) -> SequenceLayout:
        every: list[Callable[[], SequenceLayout]] = [
            lambda: head_tail(self.length, RANKS),
            lambda: contiguous(self.length, RANKS),
            lambda: striped(self.length, RANKS),
            lambda: per_document_head_tail(self.length, RANKS, documents=self.documents.lengths),
            lambda: by_work(self.length, RANKS, mask=mask or self.documents & Causal()),
        ]
        return self.draw.choice(every)()

    def inputs(self, layout: SequenceLayout, rank: int) -> list[torch.Tensor]:
        shape = self.batch, HEADS, layout.lengths[rank], DIM
        return [(rank + torch.randn(shape, dtype=torch.float64)).requires_grad_() for _ in range(3)]


def scoped(world: World, batch: Batch) -> None:
    layout = batch.layout()
    with SequenceScope(layout, mask=batch.documents):
        out = world.style(*batch.inputs(layout, world.rank))
    out.sum().backward()


def in_a_module(world: World, batch: Batch) -> None:
    layout = head_tail(batch.length, RANKS)
    world.module(*batch.inputs(layout, world.rank)).sum().backward()


def attended(name: str) -> Callable[[World, Batch], None]:
    """A call, or a model that lives for a batch, of a door of tests/doors.py."""

    def act(world: World, batch: Batch) -> None:
        mask = batch.mask()
        layout = batch.layout(mask)
        options = {"length": batch.length, "layout": layout, "strategy": batch.strategy}
        if name == "varlen":
            mask, options["cu_seqlens"] = None, torch.tensor([0, *itertools.accumulate(batch.documents.lengths)])
        attend = door(name, world.mesh, causal=False, mask=mask, **options)
        with torch.no_grad() if batch.draw.random() < 0.1 else contextlib.nullcontext():
            out = attend(*batch.inputs(layout, world.rank))
        if out.requires_grad:
            out.sum().backward()

    return act


def a_block(world: World, batch: Batch) -> None:
    whole = [torch.randn(batch.batch, HEADS, batch.length, DIM, dtype=torch.float64) for _ in range(3)]
    with context_parallel(world.mesh, buffers=whole, buffer_seq_dims=[2] * 3):
        leaves = [x.detach().requires_grad_() for x in whole]
        F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()


def decoding(world: World, batch: Batch) -> None:
    layout = batch.layout()
    with torch.no_grad():
        cache = KVCache(world.mesh, layout, *batch.inputs(layout, world.rank)[1:])
        torch.manual_seed(batch.length)  # the parts of the prompt may have other lengths
        for _ in range(3):
            new = [torch.randn(batch.batch, HEADS, 1, DIM, dtype=torch.float64) for _ in range(3)]
            cache.append(*new[1:])
            context_decode(new[0], cache)


def a_step(world: World, batch: Batch) -> None:
    layout = batch.layout()
    x = torch.randn(layout.lengths[world.rank], DIM, dtype=torch.float64)
    labels = layout.shard(torch.arange(batch.length), 0, world.rank)
    world.linear.zero_grad()
    loss = global_loss(world.linear(x).sum(-1), global_token_count(labels, world.mesh), world.mesh)
    loss.backward()
    sum_gradients(world.linear, world.mesh)


def collectives(world: World, batch: Batch) -> None:
    layout = contiguous(batch.length, RANKS)
    x = torch.randn(layout.lengths[world.rank], 2 * RANKS, dtype=torch.float64, requires_grad=True)
    all_to_all(x, 1, 0, world.mesh).sum().backward()
    gather(x, 0, world.mesh, reduce_gradients=True).sum().backward()


def a_refusal(world: World, batch: Batch) -> None:
    layout = batch.layout()
    query, key, value = batch.inputs(layout, world.rank)
    with contextlib.suppress(ValueError):
        context_attention(query, key[:, :3], value, world.mesh, layout=layout)


def compiled(world: World, batch: Batch) -> None:
    layout = head_tail(batch.draw.choice([16, 24]), RANKS)
    batch.batch = 1
    world.compiled(*batch.inputs(layout, world.rank)).sum().backward()


def a_group(world: World, batch: Batch) -> None:
    group = dist.new_group(list(range(RANKS)))
    assert isinstance(group, dist.ProcessGroup)
    layout = batch.layout()
    context_attention(*batch.inputs(layout, world.rank), group, layout=layout).sum().backward()
    dist.barrier(group)
    dist.destroy_process_group(group)


# Acts of a batch, and how often.
DOORS: dict[str, tuple[Callable[[World, Batch], None], int]] = {
    "scoped": (scoped, 8),
    "in_a_module": (in_a_module, 4),
    **{name: (attended(name), 6) for name in ("style", "function", "flex", "varlen")},
    "a_block": (a_block, 6),
    "decoding": (decoding, 4),
    "a_step": (a_step, 3),
    "collectives": (collectives, 3),
    "a_refusal": (a_refusal, 2),
    "compiled": (compiled, 4),
    "a_group": (a_group, 1),
}


class Row(NamedTuple):
    """What one rank holds after so many batches, in which world: without the caches."""

    batches: int
    world: int
    mebibytes: float
    descriptors: int
    threads: int
    groups: int
    objects: int
    seconds: float


def empty_caches() -> None:
    """Those of the package."""
    for name, module in list(sys.modules.items()):
        for each in vars(module).values() if name.startswith("cp_styles") else ():
            if isinstance(each, functools._lru_cache_wrapper | Remembered):
                each.cache_clear()


def measured(batches: int, world: int, seconds: float) -> Row:
    empty_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps for later is not held by anybody
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    groups = len(dist.distributed_c10d._world.pg_map)  # type: ignore[attr-defined]
    return Row(
        batches,
        world,
        round(pages * os.sysconf("SC_PAGESIZE") / 2**20, 1),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        groups,
        len(gc.get_objects()),
        round(seconds, 1),
    )


def rank_main(rank: int, options: argparse.Namespace, folder: Path) -> None:
    doors, weights = zip(*(DOORS[name] for name in options.doors or DOORS), strict=True)
    started, world, worlds, kept = time.monotonic(), None, 0, []
    rows = (folder / f"{rank}.jsonl").open("w")
    for number in range(options.batches + 1):
        if number % max(1, options.batches // options.worlds) == 0 and number < options.batches:
            if world is not None:
                del world
                torch._dynamo.reset()
                gc.collect()
                dist.destroy_process_group()
            store = dist.FileStore(str(folder / f"store {worlds}"), RANKS)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=options.timeout)
            )
            world, worlds = World(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))), worlds + 1
            for act in doors:  # what a world opens at first: connections, compiled code
                act(world, Batch(0))
        if number % max(1, options.batches // options.rows) == 0:
            rows.write(json.dumps(measured(number, worlds, time.monotonic() - started)) + "\n")
            rows.flush()
        assert world is not None
        batch = Batch(1 + number % options.different)
        batch.draw.choices(doors, weights)[0](world, batch)
        if options.keep:
            kept.append([number])
    dist.barrier()


def verdict(rows: list[Row]) -> list[str]:
    """What grows in the second half. Objects are judged inside of worlds, after the first third of each: at first,
    torch's tables of shapes and those of a group fill."""
    half, worlds = rows[len(rows) // 2 :], []
    for world in range(half[0].world, half[-1].world + 1):
        own = [row for row in rows if row.world == world]
        worlds.append(own[max(3, len(own) // 3) :] or own[-1:])
    problems = []
    for name in ("descriptors", "threads", "groups"):
        values = [getattr(row, name) for row in half]
        if values[-1] > values[0]:
            problems.append(f"{name}: {values}")
    slopes = [
        statistics.linear_regression([row.batches for row in own], [row.objects for row in own]).slope
        for own in worlds
        if len(own) > 2
    ]
    if slopes and statistics.mean(slopes) > OBJECTS:
        problems.append(f"objects: {statistics.mean(slopes):.2f} a batch")
    means = [statistics.mean(row.objects for row in own) for own in worlds]
    if (left := max((b - a for a, b in itertools.pairwise(means)), default=0)) > LEFT:
        problems.append(f"objects: {left:.0f} are left of a world")
    batches = half[-1].batches - half[0].batches
    grown = half[-1].mebibytes - half[0].mebibytes
    if grown > max(4.0, batches * KIBIBYTES / 1024):
        problems.append(f"memory: {grown:.1f} MiB in {batches} batches")
    return problems


OBJECTS = 0.5  # a batch: half of one that is kept of each batch
LEFT = 4000  # objects of torch.compile, by which it remembers what it has traced: measured 2,000 to 3,000 in each world
KIBIBYTES = 1.0  # a batch: less than any tensor, list or plan that would be kept of each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=10000)
    parser.add_argument("--rows", type=int, default=100, help="how many rows the table has")
    parser.add_argument("--worlds", type=int, default=5, help="how many worlds of process groups, one after another")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, of the groups")
    parser.add_argument("--different", type=int, default=10**9, help="how many batches until the first comes again")
    parser.add_argument("--keep", action="store_true", help="keep an object of every batch, which must be noticed")
    parser.add_argument("--doors", nargs="+", choices=DOORS, help="some doors alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is neither counted nor looked through again and again
    folder = Path(tempfile.mkdtemp(prefix="leaks_"))
    ranks = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                rank_main(rank, options, folder)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        ranks.append(process)
    print("".join(f"{name:>12}" for name in Row._fields), flush=True)
    shown, file, waits = 0, folder / "0.jsonl", list(ranks)
    failed = False
    while waits or shown < len(lines_of(file)):
        for process in list(waits):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                waits.remove(process)
                failed |= status != 0
        for line in lines_of(file)[shown:]:
            print("".join(f"{value:>12}" for value in json.loads(line)), flush=True)
            shown += 1
        time.sleep(0.05)
    if failed:
        return 1
    problems = [
        f"rank {rank}: {problem}"
        for rank in range(RANKS)
        for problem in verdict([Row(*json.loads(line)) for line in lines_of(folder / f"{rank}.jsonl")])
    ]
    shutil.rmtree(folder)
    print("\n".join(problems) or "flat")
    return int(bool(problems))


def lines_of(file: Path) -> list[str]:
    return file.read_text().split("\n")[:-1] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())
