"""The exact figures of the pages, as tables: python tests/benchmarks/figures.py [memory plans scale ...].

They are counted, not measured, so every machine prints the same. tests/ranks/explain/test_figures.py compares them with
the tables of tutorials and tests/records/README.md that have ``<!-- figures: NAME -->`` before them.

On performance.md, of plans and scale some rows:

    memory     the most that a backward holds, in units of one rank's queries, counted in a run
    plans      kernel calls of a rank in a forward, and the imbalance, by layout
    scale      what a rank sends and holds on 8 to 1,024 ranks; about two minutes
    longest    the longest sequence whose training step fits
    published  predictions and published times of other implementations, in a sentence there; see predicting.py

Of tests/records; gpus.md has the summary, and README.md there has the rest. See on_gpu.py:

    gpu-summary    times, shares of ideal and peaks
    gpu-exact      errors by dtype
    gpu-bits       whether Ulysses has the bits of one device
    gpu-programs   random attentions and mixers, programs and models on the GPU
    gpu-shares     times of the device and of the host, and shares of ideal
    gpu-changes    times and launches before constants changed, and now
    gpu-host       the host's time, calls and operations
    gpu-launches   launches, and the device's own time
    gpu-peaks      peaks of memory, measured and predicted
    gpu-predicted  the device's own time, predicted and measured
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import memory as memory_benchmark
import on_gpu
import planning
import predicting

from cp_styles import Causal, context_attention
from tutorials import scale

Row = tuple[str, ...]
"""The cells of a row of a table, as text."""

MEMORY_RANKS = 2, 4, 8
MEMORY_SHAPES = ("float32", 8), ("float32", 2), ("bfloat16", 8), ("bfloat16", 2)
MEMORY_STRATEGIES = "Ring()", "Ring(keep=0)", "AllGather()", "Ulysses()"


def peak(name: str, dtype: str, kv_heads: int, ranks: int) -> str:
    """The most that a backward of 8 query heads of 64 holds, 1024 tokens, in units of one rank's queries."""
    strategy, layout = memory_benchmark.OURS[name]
    attend = partial(_attend, strategy=strategy, layout=layout)
    options = argparse.Namespace(seq_len=1024, heads=8, kv_heads=kv_heads, head_dim=64, dtype=dtype)
    return f"{memory_benchmark.one_attention(attend, options, ranks)[2]:.1f}"


def _attend(*qkv: torch.Tensor, **options) -> torch.Tensor:
    q, k, v = qkv
    return context_attention(q, k, v, dist.group.WORLD, mask=Causal(), **options)


def memory() -> Iterator[Row]:
    yield "", *(f"{dtype}, 8:{kv_heads}" for dtype, kv_heads in MEMORY_SHAPES)
    for name in MEMORY_STRATEGIES:
        cells = (" / ".join(peak(name, *shape, ranks) for ranks in MEMORY_RANKS) for shape in MEMORY_SHAPES)
        yield f"`{name}`", *cells


def plans() -> Iterator[Row]:
    yield "sequence", "layout", "ranks", "kernel calls", "imbalance"
    for sequence, name, make_layout, mask in planning.cases():
        layout = make_layout()
        made = planning.exact(layout, mask)
        yield sequence, name, f"{layout.ranks:,}", f"{made.tiles:,}", f"{made.imbalance:.3f}"


def longest() -> Iterator[Row]:
    names = list(scale.strategies(8))
    yield "ranks", *(f"`{name}`" for name in names)
    for ranks in (8, 16, 32, 64):
        yield str(ranks), *(f"{scale.longest(name, ranks) / scale.K:,.0f}K" for name in names)


def published() -> Iterator[Row]:
    errors = predicting.Errors(shown=False)
    for _ in predicting.compared(predicting.fit(), errors):
        pass
    yield "table", "rows", "median error", "largest"
    for name, found in errors.found.items():
        yield predicting.TABLES[name], str(len(found)), f"{statistics.median(found):.0%}", f"{max(found):.0%}"
    yield "pairs in the right order", "{} of {}".format(*errors.pairs), "", ""


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "memory": memory,
    "plans": plans,
    "scale": scale.rows,
    "longest": longest,
    "published": published,
    "gpu-summary": on_gpu.summary,
    "gpu-exact": on_gpu.exact,
    "gpu-bits": on_gpu.bits,
    "gpu-shares": on_gpu.shares,
    "gpu-programs": on_gpu.programs,
    "gpu-changes": on_gpu.changes,
    "gpu-host": on_gpu.host,
    "gpu-launches": on_gpu.launched,
    "gpu-peaks": on_gpu.peaks,
    "gpu-predicted": on_gpu.predicted,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)} (all)")
    for name in parser.parse_args().names or TABLES:
        print(f"\n{name}\n")
        for index, row in enumerate(TABLES[name]()):
            print("| " + " | ".join(row) + " |" + ("\n" + "|---" * len(row) + "|") * (index == 0), flush=True)


if __name__ == "__main__":
    main()
