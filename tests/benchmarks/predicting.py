"""Predicted times beside published ones: python tests/benchmarks/predicting.py.

The model of cp_styles.explain, with the figures of H100, whose kernel and link are fitted on the first two tables
alone. Each later table is predicted. The error of a row is predicted / published - 1. Where absolute figures cannot be
compared (another kernel, a whole model around the attention), rows are compared after division by the row that is
marked with =, which the tables themselves do with their "ideal".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch

from cp_styles import AllGather, Causal, Ring, Ulysses, contiguous, head_tail, striped
from cp_styles.explain import A100, H100, Hardware
from cp_styles.explain.dry_run import kernel_of
from cp_styles.explain.events import KernelCall, Shapes
from cp_styles.explain.report import explained
from cp_styles.layouts import Balancer
from cp_styles.strategies import Strategy

K = 1024
# FlashAttention varlen on H100, 64:4 heads of 128, causal forward: ms by sequence and by the ranks that share it.
V1 = {1: (0.16, 0.09, 0.07, 0.07), 8: (3.13, 1.63, 0.88, 0.47), 32: (46.5, 23.5, 11.8, 5.93), 128: (842, 417, 208, 103)}
# All-gather over 8 H100: MB together, us.
V2 = {8: 76, 64: 207, 512: 1315, 4096: 10258}
# 64:8 heads of 128, 8K tokens a GPU, causal: TFLOP/s a GPU at 8, 16, 32, 64 GPUs, forward and backward.
V3 = {
    "Ulysses": (Ulysses(), (601, 557, 580, 585), (582, 560, 573, 585)),
    "ring": (Ring(), (421, 454, 451, 446), (432, 474, 470, 457)),
    "all-gather": (AllGather(), (601, 590, 592, 580), (516, 525, 522, 523)),
    "USP": (Ulysses(size=8), (592, 588, 593, 587), (572, 569, 574, 571)),
}
# 8 GPUs, 8K a GPU, 32:8 heads of 128: iterations/s ideal, ring on contiguous, head-tail and striped layouts.
V4 = {
    ("H100", "forward"): (73.9, 38.5, 63.0, 55.0),
    ("H100", "both"): (19.3, 10.4, 17.4, 16.0),
    ("A100", "forward"): (46.7, 24.0, 38.2, 32.5),
    ("A100", "both"): (11.8, 6.2, 10.6, 9.75),
}
# A whole model, tokens/s: ranks, Ulysses, ring.
V5 = {2: (77, 60), 4: (85, 57)}
# 32:32 heads of 128, 32 layers, K tokens: TFLOP/s a GPU with context parallelism of this degree.
V6 = {64: (2, 574), 128: (4, 555), 256: (8, 549), 512: (16, 549), 1024: (32, 536)}
# Llama 3 8B, K tokens: ranks, tokens/s a GPU.
V7 = {32: (1, 3890), 64: (2, 2540), 128: (4, 1071), 256: (8, 548)}
# 64 ranks: s a step at 64K, 128K, 256K.
V8 = {"all-gather": (AllGather(), (1.09, 2.98, 9.71)), "ring": (Ring(), (1.42, 3.71, 10.78)),
      "USP": (Ulysses(size=16), (1.04, 2.88, 9.50))}  # fmt: skip


def v1_call(length: int, ranks: int) -> KernelCall:
    """A rank's part of causal attention: the rows of one rank, and on average this many keys."""
    rows, keys = length // ranks, length // 2 + length // (2 * ranks)
    # Causal: of the square before it the triangle counts half.
    whole = length * length // (2 * ranks)
    return KernelCall("varlen", False, "full", ((1, 64, 4, rows, max(1, min(keys, whole // rows))),), (128, 128), 2)


def fit() -> Hardware:
    """The kernel's rate, half_rows and floor on V1 by least squares of the logarithm; the link on V2."""
    entries = [(v1_call(s * K, p), ms / 1e3) for s, row in V1.items() for p, ms in zip((1, 2, 4, 8), row, strict=True)]

    def badness(machine: Hardware) -> float:
        return sum(math.log(machine.kernel_seconds(call) / seconds) ** 2 for call, seconds in entries)

    options = [
        replace(H100, flops=rate * 1e12, half_rows=half, kernel_floor=floor * 1e-6)
        for rate in range(330, 421, 5)
        for half in range(0, 401, 25)
        for floor in range(30, 71, 5)
    ]
    best = min(options, key=badness)
    (small, small_us), *_, (large, large_us) = V2.items()
    bandwidth = (large - small) * 2**20 * 7 / 8 / (large_us - small_us) * 1e6
    latency = max(0.0, small_us / 1e6 - small * 2**20 * 7 / 8 / bandwidth)
    return replace(best, bandwidth=bandwidth, latency=latency)


TABLES = {
    "V1": "kernels (fitted)",
    "V2": "collectives (fitted)",
    "V3": "four strategies on 8 to 64 GPUs",
    "V4": "rings on three layouts, H100 and A100",
    "V5": "a model of experts, Ulysses and ring",
    "V6": "a 7B model, 128K to 1M tokens, scaled to 64K",
    "V7": "an 8B model in float8, scaled to 32K",
    "V8": "three strategies on 64 TPUs",
}


class Errors:
    """Remembers the errors of rows, and prints the rows if they are ``shown``."""

    def __init__(self, *, shown: bool = True) -> None:
        self.shown = shown
        self.found: dict[str, list[float]] = {}
        self.pairs = [0, 0]

    def row(self, name: str, what: str, predicted: float, published: float, unit: str) -> None:
        error = predicted / published - 1
        self.found.setdefault(name, []).append(abs(error))
        if not self.shown:
            return
        print(f"  {name:<4}{what:<46}{predicted:>10.2f}{published:>10.2f} {unit:<10}{error:>+7.0%}", flush=True)

    def order(self, predicted: list[float], published: list[float]) -> None:
        """Of pairs that differ by more than 10 % as published: how many are predicted in that order."""
        for i, j in combinations(range(len(published)), 2):
            if abs(math.log(published[i] / published[j])) > math.log(1.1):
                self.pairs[0] += (predicted[i] > predicted[j]) == (published[i] > published[j])
                self.pairs[1] += 1


def times(
    machine: Hardware, strategy: Strategy, balancer: Balancer, length: int, ranks: int, heads: int, kv_heads: int
) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    shapes = Shapes(heads, kv_heads, 128, 128, torch.bfloat16, torch.device("cuda"))
    layout = balancer(length, ranks)
    made = explained(strategy, (layout, layout), Causal(), kernel_of(shapes), shapes, hardware=machine, most=2)
    forward, backward = made.seconds
    return forward.total, backward.total


def compared(machine: Hardware, errors: Errors) -> Iterator[str]:
    for length, row in V1.items():
        for ranks, ms in zip((1, 2, 4, 8), row, strict=True):
            errors.row(
                "V1", f"{length}K over {ranks}", 1e3 * machine.kernel_seconds(v1_call(length * K, ranks)), ms, "ms"
            )
    yield "V1 and V2 are what was fitted."
    for size, us in V2.items():
        errors.row("V2", f"{size} MB", 1e6 * (machine.latency + size * 2**20 * 7 / 8 / machine.bandwidth), us, "us")
    for column, ranks in enumerate((8, 16, 32, 64)):
        found = {name: times(machine, s, head_tail, 8 * K * ranks, ranks, 64, 8) for name, (s, *_) in V3.items()}
        for phase in (0, 1):
            published = {name: entry[1 + phase][column] for name, entry in V3.items()}
            base = found["Ulysses"][phase]
            for name, spent in found.items():
                what = f"{name}, {ranks} GPUs, {('forward', 'backward')[phase]}, of Ulysses="
                if name != "Ulysses":
                    errors.row("V3", what, base / spent[phase], published[name] / published["Ulysses"], "ratio")
            errors.order([1 / spent[phase] for spent in found.values()], list(published.values()))
    yield (
        "V3 runs FlashAttention 3 (600 TFLOP/s) and V1 an earlier kernel (370), so ratios are compared. Its ring "
        "merges in separate kernels and sends from neighbour to neighbour."
    )
    for (name, phase), (ideal, *published) in V4.items():
        own = machine if name == "H100" else A100
        flops = 4 * 32 * 128 * (64 * K) ** 2 / 2 / 8
        best = flops / own.flops * (1 if phase == "forward" else 1 + 2.5 / own.backward_rate)
        predicted = []
        for what, balancer, rate in zip(
            ("contiguous", "head-tail", "striped"), (contiguous, head_tail, striped), published, strict=True
        ):
            forward, backward = times(own, Ring(), balancer, 64 * K, 8, 32, 8)
            spent = forward if phase == "forward" else forward + backward
            predicted.append(best / spent)
            errors.row("V4", f"{name}, ring on {what}, {phase}, of ideal=", best / spent, rate / ideal, "ratio")
        errors.order(predicted, published)
    yield "V4: another implementation's rings, which merge in separate kernels; stripes are of one token."
    for ranks, published in V5.items():
        spent = [sum(times(machine, s, head_tail, 64 * K, ranks, 96, 8)) for s in (Ulysses(), Ring())]
        errors.row("V5", f"ring of Ulysses=, {ranks} ranks", spent[0] / spent[1], published[1] / published[0], "ratio")
        errors.order([1 / x for x in spent], list(published))
    yield "V5 is a whole model of experts: how much of the time is attention is not known."
    base: float | None = None
    for length, (ranks, tflops) in V6.items():
        spent = sum(times(machine, Ring(), head_tail, length * K, ranks, 32, 32))
        rate = 3.5 * 2 * 32 * 128 * (length * K) ** 2 / ranks / spent
        if base is None:
            base = rate / tflops
            continue
        errors.row("V6", f"{length}K over {ranks}, of the first=", rate / base, tflops, "TFLOP/s")
    yield "V6: TFLOP/s of a whole model with tensor parallelism; of the attention alone here, so scaled."
    base = None
    for length, (ranks, tokens) in V7.items():
        layers = 32 * sum(times(machine, AllGather(), head_tail, length * K, ranks, 32, 8))
        matrices = 6 * 8.0e9 * length * K / ranks / (0.6 * 990e12)
        rate = length * K / ranks / (layers + matrices)
        if base is None:
            base = rate / tokens
            continue
        errors.row("V7", f"{length}K over {ranks}, of the first=", rate / base, tokens, "tokens/s")
    yield "V7: float8 matrices, recomputation, an all-gather that is not overlapped: scaled to the first row."
    for column, length in enumerate((64, 128, 256)):
        found = {name: sum(times(machine, s, head_tail, length * K, 64, 32, 8)) for name, (s, _) in V8.items()}
        published = {name: row[column] for name, (_, row) in V8.items()}
        for name in ("ring", "USP"):
            what = f"{name}, {length}K over 64, of all-gather="
            errors.row(
                "V8", what, found[name] / found["all-gather"], published[name] / published["all-gather"], "ratio"
            )
        errors.order(list(found.values()), list(published.values()))
    yield "V8: TPUs, whose links and kernels are others, and whole steps: only the order can be compared."


def main() -> None:
    machine, errors = fit(), Errors()
    print(
        f"fitted: {machine.flops / 1e12:.0f} TFLOP/s, half at {machine.half_rows:.0f} queries, floor "
        f"{machine.kernel_floor * 1e6:.0f} us; {machine.bandwidth / 1e9:.0f} GB/s, {machine.latency * 1e6:.0f} us"
    )
    print(f"  {'':<50}{'predicted':>10}{'published':>10}")
    for note in compared(machine, errors):
        print(f"  {note}")
    for name, found in errors.found.items():
        print(f"{name}: median error {statistics.median(found):.0%}, largest {max(found):.0%}, {len(found)} rows")
    later = [error for name, found in errors.found.items() if name not in ("V1", "V2") for error in found]
    right = f"right order in {errors.pairs[0]} of {errors.pairs[1]} pairs"
    print(f"predicted rows: median error {statistics.median(later):.0%}; {right}")


if __name__ == "__main__":
    main()
