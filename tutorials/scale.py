"""Context parallelism at scale, without a device: python tutorials/scale.py [--plot tutorials/scale.png].

The first table shows one attention of a Llama-3-8B-like model (32:8 heads of 128, bfloat16) on 8 to 1,024 ranks: the
balance of the layout, what the busiest rank sends forward and backward, and what it holds in the backward beside its
inputs. The second shows the longest sequence whose training step fits into 80 GiB a rank, and needs transformers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from functools import cache

import torch

from cp_styles import (
    AllGather,
    Causal,
    Documents,
    Mask,
    Ring,
    SequenceLayout,
    SlidingWindow,
    Ulysses,
    contiguous,
    head_tail,
    per_document_head_tail,
)
from cp_styles.explain import H100, Explanation
from cp_styles.explain.dry_run import kernel_of
from cp_styles.explain.events import Shapes
from cp_styles.explain.fit import Fit
from cp_styles.explain.model_step import StepModel
from cp_styles.explain.report import explained
from cp_styles.strategies import Strategy

SHAPES = Shapes(32, 8, 128, 128, torch.bfloat16, torch.device("cuda"))
K = 1024


def made(strategy: Strategy, layout: SequenceLayout, mask: Mask) -> Explanation:
    kernel = kernel_of(SHAPES, None)
    return explained(strategy, (layout, layout), mask, kernel, SHAPES, most=1)


def documents_of(length: int) -> tuple[int, ...]:
    """Packed lengths as of files: many short ones, few long ones."""
    draw, found = random.Random(0), []
    while sum(found) < length:
        found.append(min(1 + int(draw.lognormvariate(8.5, 1.3)), length - sum(found)))
    return tuple(found)


def cases(length: int, ranks: int) -> dict[str, tuple[Mask, SequenceLayout]]:
    documents = documents_of(length)
    return {
        "causal, head-tail": (Causal(), head_tail(length, ranks)),
        "window of 4K, contiguous": (SlidingWindow(4 * K - 1, 0), contiguous(length, ranks)),
        "documents, per document": (
            Documents(documents) & Causal(),
            per_document_head_tail(length, ranks, documents=documents),
        ),
    }


def strategies(ranks: int) -> dict[str, Strategy]:
    found: dict[str, Strategy] = {"Ring(keep=0)": Ring(keep=0), "AllGather(keep=0)": AllGather(keep=0)}
    return {**found, "Ulysses(size=8)": Ulysses(inner=Ring(keep=0), size=8)}


@cache
def fit(ranks: int) -> Fit:
    """Llama-3.1-8B on H100, as ``python -m cp_styles explain --model`` sees it. Needs transformers."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8, **sizes)
    return Fit(StepModel(config, dtype=torch.bfloat16, device="cuda", gpus=ranks), H100)


def longest(name: str, ranks: int) -> int:
    """Positions that fit: parameters and optimizer cut over all ranks, each layer checkpointed at its input."""
    return fit(ranks).longest(ranks, strategies(ranks)[name])


SIZES = ((128 * K, 8), (1024 * K, 64), (4096 * K, 256), (10240 * K, 1024))


def rows(sizes: Iterable[tuple[int, int]] = SIZES) -> Iterator[tuple[str, ...]]:
    """The first table."""
    yield "sequence", "ranks", "mask, layout", "strategy", "imbalance", "sent, MiB", "peak, MiB"
    for length, ranks in sizes:
        for what, (mask, layout) in cases(length, ranks).items():
            for name, strategy in strategies(ranks).items():
                if ranks > 256 and what.startswith("causal") and name.startswith("All"):
                    continue  # the keys of all ranks take 30 GiB
                found = made(strategy, layout, mask)
                balance = found.layout_imbalance
                sizes_MiB = (x / 2**20 for x in (found.sent("forward") + found.sent("backward"), found.peak_memory))
                known = f"{length // K:,}K", f"{ranks:,}", what, f"`{name}`", f"{balance:.3f}"
                yield *known, *(f"{size:,.0f}" for size in sizes_MiB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="draw both")
    args = parser.parse_args()
    drawn: dict[str, list[tuple[int, float]]] = {}
    for index, row in enumerate(rows()):
        print("| " + " | ".join(row) + " |" + "\n|---|---|---|---|---|---|---|" * (index == 0), flush=True)
        if index:
            _, ranks, what, name, _, sent, _ = (cell.strip("`").replace(",", "") for cell in row)
            drawn.setdefault(f"{what}, {name}", []).append((int(ranks), float(sent)))
    print("\n| ranks | " + " | ".join(f"`{name}`" for name in strategies(8)) + " |\n|---|---|---|---|")
    lengths: dict[str, list[tuple[int, int]]] = {}
    for ranks in (8, 16, 32, 64):
        row = {name: longest(name, ranks) for name in strategies(ranks)}
        for name, positions in row.items():
            lengths.setdefault(name, []).append((ranks, positions))
        print(f"| {ranks} | " + " | ".join(f"{positions / K:,.0f}K" for positions in row.values()) + " |", flush=True)
    if args.plot:
        draw(args.plot, drawn, lengths)


def draw(path: str, drawn: dict[str, list[tuple[int, float]]], lengths: dict[str, list[tuple[int, int]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    # Lines differ by marker and dashes too, not by colour alone.
    rings = {name: points for name, points in drawn.items() if "Ring" in name}
    for (name, points), style in zip(rings.items(), ("o-", "s--", "^:"), strict=True):
        label = name.removesuffix(", Ring(keep=0)")
        left.loglog(*zip(*points, strict=True), style, label=label, markerfacecolor="none")
    left.set(
        xlabel="ranks (16K positions each, of 1,024 ranks 10K)",
        ylabel="MiB",
        title="sent by the busiest rank, one attention, ring",
    )
    left.legend()
    for (name, points), style in zip(lengths.items(), ("o-", "s--", "^:"), strict=True):
        right.loglog(*zip(*points, strict=True), style, label=name, markerfacecolor="none")
    right.set(xlabel="ranks", ylabel="positions", title="longest sequence in 80 GiB a rank, 8B model")
    right.legend()
    left.set_xticks([8, 64, 256, 1024], ["8", "64", "256", "1,024"])
    right.set_xticks([8, 16, 32, 64], ["8", "16", "32", "64"], minor=False)
    right.set_xticks([], minor=True)
    right.set_yticks([2**n * 1024 * K for n in range(5)], [f"{2**n}M" for n in range(5)])
    right.set_yticks([], minor=True)
    left.set_xticks([], minor=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
