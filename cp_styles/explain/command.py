"""The command ``python -m cp_styles explain``: which strategy and layout for a model, by predicted time.

    python -m cp_styles explain --seq-len 1M --ranks 64 --heads 32:8 --head-dim 128 --mask causal --hardware h100

It prints all combinations of strategies and layouts for one attention, the fastest first, and explains the first one.
Nothing runs on a device.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cp_styles.explain.auto import Choice, explain_hybrid, ranked
from cp_styles.explain.candidates import layouts_for, strategies_for
from cp_styles.explain.hardware import MACHINES
from cp_styles.explain.rehearse import Shapes
from cp_styles.explain.report import explained
from cp_styles.explain.states import StateShapes
from cp_styles.explain.text import listed, nbytes, seconds, table
from cp_styles.layout import by_work, striped
from cp_styles.mask import Causal, Documents, Full, Mask, SlidingWindow
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses

_WIDTH = 99  # of a line
_PATIENCE = 2.0  # seconds from one line of progress to the next
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_STRATEGIES: dict[str, Callable[..., Strategy]] = {"ring": Ring, "allgather": AllGather, "ulysses": Ulysses}


_COLUMNS = (
    "predicted for one attention. forward, backward: times of the slowest rank; exposed: the part of both in which the "
    "rank waits for messages, with nothing to compute; sent, memory: of the rank with the most; imbalance: work of the "
    "busiest rank / mean"
)


class _RankingProgress:
    """Writes to stderr what is rehearsed, every other second, for a command that takes longer."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._last = steps, 0, time.monotonic()

    def __call__(self, name: str) -> None:
        self._done += 1
        if time.monotonic() - self._last >= _PATIENCE:
            print(f"explain: {self._done} of {self._steps}: {name}", file=sys.stderr)
            self._last = time.monotonic()


def count(text: str) -> int:
    """A positive number, with K for 1,024 or M for 1,048,576 behind it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number such as 4096, 128K or 1M")
    return int(number)


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers with colons between them."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give positive numbers with colons between them")
    return tuple(map(int, text.split(":")))


def strategy(text: str) -> Strategy:
    """ring, ring:0 (keep=0), allgather, ulysses, ulysses:8 (size=8)."""
    name, _, number = text.lower().partition(":")
    if name not in _STRATEGIES or (number and not number.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of ring, ring:KEEP, allgather, allgather:KEEP, ulysses, ulysses:SIZE"
        )
    option = "size" if name == "ulysses" else "keep"
    try:
        return _STRATEGIES[name](**({option: int(number)} if number else {}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def lengths(path: str) -> tuple[int, ...]:
    """A file of document lengths, separated by white space or commas."""
    try:
        words = re.split(r"[\s,]+", Path(path).read_text().strip())
        sizes = tuple(int(word) for word in words)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}; give a file of document lengths") from None
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{path}: document lengths must be at least 1, got {min(sizes)}")
    return sizes


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = argparse.ArgumentParser(
        prog="python -m cp_styles explain",
        usage="%(prog)s --seq-len S --ranks P --heads H[:G] --head-dim D [options; --help lists them]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--seq-len", type=count, help="positions of the whole sequence: 4096, 128K, 1M")
    add("--documents", type=lengths, metavar="FILE", help="packed documents: a file of their lengths")
    add("--ranks", type=count, required=True, help="ranks that share the sequence")
    add("--heads", type=numbers, required=True, metavar="H[:G]", help="query heads : key/value heads")
    add("--head-dim", type=count, required=True)
    add("--batch", type=count, default=1)
    add("--dtype", type=str.lower, choices=_DTYPES, default="bf16")
    add("--mask", choices=("causal", "full"), default="causal")
    add("--window", type=count, help="a query sees itself and the W - 1 positions before it")
    strategies = "ring ring:0 allgather ulysses ulysses:8; default: all that may suit"
    add("--strategy", type=strategy, nargs="+", metavar="S", help=strategies)
    layouts = ("head_tail", "contiguous", "per_document_head_tail", "by_work", "striped")
    add("--layout", nargs="+", choices=layouts, help="default: all that may suit the mask")
    add("--hardware", type=str.lower, choices=MACHINES, default="h100", help="default: h100")
    add("--node-ranks", type=count, help="ranks of a node; default: the machine's")
    states = "recurrences beside the attentions: heads, key and value dims"
    add("--states", type=numbers, metavar="H:K:V", help=states)
    add("--diagonal", action="store_true", help="their states decay by numbers, as those of Mamba-2")
    add("--layers", type=numbers, default=(1, 3), metavar="A:R", help="attentions, recurrences; 1:3")
    add("--width", type=count, help="of the hidden states; default: query heads x head dim")
    add("--rank", type=int, help="explain this rank; default: the busiest of some")
    add("--json", action="store_true", help="print JSON instead of text")
    add("--plot", metavar="FILE", help="draw the best choice (needs matplotlib)")
    return options


def main(arguments: Sequence[str]) -> None:
    """Run the command; the first of the arguments is its name."""
    options = parser()
    args = options.parse_args(arguments[1:])

    def wrong(option: str, text: str) -> Any:
        options.error(f"argument {option}: {text}")

    if args.seq_len is None and args.documents is None:
        wrong("--seq-len", "give --seq-len, or --documents with a file of lengths")
    if args.documents and args.seq_len not in (None, sum(args.documents)):
        wrong("--documents", f"the lengths add up to {sum(args.documents)}, and --seq-len is {args.seq_len}")
    if args.rank is not None and not 0 <= args.rank < args.ranks:
        wrong("--rank", f"there is no rank {args.rank} among {args.ranks}")
    if args.states and len(args.states) != 3:
        wrong("--states", "give heads, key dim and value dim: 32:128:128")
    heads, kv_heads = args.heads[0], args.heads[-1]
    if len(args.heads) > 2 or heads % kv_heads:
        wrong("--heads", "give query heads, or query:key heads, the second divides the first")
    if len(args.layers) != 2:
        wrong("--layers", "give the numbers of attentions and of recurrences: 12:36")
    if args.window and args.mask == "full":
        wrong("--window", "a window is causal here; leave --mask full out")
    hardware = MACHINES[args.hardware]
    if args.node_ranks:
        hardware = replace(hardware, node_ranks=args.node_ranks)
    mask: Mask = SlidingWindow(args.window - 1, 0) if args.window else Causal() if args.mask == "causal" else Full()
    if args.documents:
        mask = Documents(args.documents) & mask
    suitable = layouts_for(mask)
    balancers = {"striped": partial(striped, block=128), "by_work": partial(by_work, mask=mask)} | suitable
    names = args.layout or list(suitable)
    for name in names:
        if name not in balancers:
            wrong("--layout", f"{name} needs --documents")
    length, device = args.seq_len or sum(args.documents or ()), torch.device(hardware.device)
    shapes = Shapes(heads, kv_heads, args.head_dim, args.head_dim, _DTYPES[args.dtype], device, args.batch)
    call: dict[str, Any] = {"ranks": args.ranks, "mask": mask, "shapes": shapes, "hardware": hardware}
    strategies = args.strategy or strategies_for(args.ranks, hardware)
    progress = _RankingProgress(len(names) * len(strategies))
    choices = ranked(strategies, {name: balancers[name] for name in names}, length=length, progress=progress, **call)
    best = next((choice.explanation for choice in choices if not choice.problem), None)
    if best is not None:
        known = [entry for entry in choices if entry.explanation and entry.explanation.layout == best.layout]
        best = replace(best, others={entry.strategy: entry.explanation.runs for entry in known if entry.explanation})
    if best is not None and args.rank is not None:
        cuts = best.layout, best.kv_layout
        best = explained(best.strategy, cuts, mask, best.kernel, best.shapes, hardware=hardware, rank=args.rank)
    if args.json:
        rows = [
            ({} if choice.explanation is None else choice.explanation.as_dict())
            | {"strategy": short(choice.strategy), "layout": choice.layout_name, "problem": choice.problem}
            for choice in choices
        ]
        print(json.dumps(rows, indent=1))
    else:
        model = f"heads {heads}:{kv_heads} of {args.head_dim}, {args.dtype}, {hardware.name}"
        print(f"{length:,} positions on {args.ranks} ranks, {str(mask)[:30]}, {model}")
        print("\n".join(ranking(choices)))
        print(textwrap.fill(_COLUMNS, _WIDTH))
    if best is None:
        print("no choice fits: see the reasons above", file=sys.stderr)
        raise SystemExit(1)
    if not args.json:
        print(f"\n{best}")
        if args.states:
            print("\n".join([*_hybrid(args, length, call), ""]))
        print(textwrap.fill(f"figures of {hardware.name}: {hardware.source}", _WIDTH))
    if args.plot:
        try:
            best.plot(args.plot)
        except (OSError, ValueError, ImportError) as error:  # no such folder, no such format, no matplotlib
            wrong("--plot", str(error))


def _hybrid(args: argparse.Namespace, length: int, call: dict[str, Any]) -> Iterator[str]:
    """A table of layouts for attentions and recurrences."""
    yield f"\nlayouts of {args.layers[0]} such attentions and {args.layers[1]} recurrences, forward and backward"
    states = StateShapes(*args.states, diagonal=args.diagonal, batch=args.batch)
    width = args.width or args.heads[0] * args.head_dim
    rows = [["attentions", "recurrences", "strategy", "attentions", "recurrences", "changes", "total", "sent"]]
    for choice in explain_hybrid(length, states=states, layers=args.layers, width=width, **call):
        times = map(seconds, (choice.attention, choice.states, choice.changes, choice.total))
        names = choice.attention_layout, choice.state_layout, short(choice.strategy)
        rows.append([*names, *times, nbytes(choice.sent)])
    yield from table(rows)


def ranking(choices: Sequence[Choice]) -> list[str]:
    """A table of choices, and below it why some are not possible."""
    rows = [["strategy", "layout", "forward", "backward", "exposed", "sent", "memory", "imbalance", "planning"]]
    for choice in choices:
        explanation = choice.explanation
        if explanation is None or choice.problem:
            continue
        forward, backward = explanation.seconds
        times = forward.total, backward.total, forward.exposed + backward.exposed
        sizes = explanation.sent("forward") + explanation.sent("backward"), explanation.peak_memory
        imbalance = f"{max(explanation.imbalance, explanation.layout_imbalance or 1.0):.3f}"
        cells = *map(seconds, times), *map(nbytes, sizes), imbalance, seconds(explanation.planning)
        rows.append([short(choice.strategy), choice.layout_name, *cells])
    lines = list(table(rows))
    while max(map(len, lines)) > _WIDTH:  # JSON has all columns
        rows = [row[:-1] for row in rows]
        lines = list(table(rows))
    problems = dict.fromkeys((short(choice.strategy), choice.problem) for choice in choices if choice.problem)
    return [*lines, *listed(problems)]


def short(strategy: Strategy) -> str:
    """A strategy as the options name it: ring, ring:0, ulysses:8."""
    if isinstance(strategy, Ulysses):
        return "ulysses" + (f":{strategy.size}" if strategy.size else "")
    if isinstance(strategy, (Ring, AllGather)):
        return type(strategy).__name__.lower() + (f":{strategy.keep}" if strategy.keep != 1 else "")
    return str(strategy)
