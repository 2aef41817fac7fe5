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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cp_styles.explain.auto import Choice, explain_hybrid, ranked
from cp_styles.explain.candidates import layouts_for, strategies_for
from cp_styles.explain.hardware import MACHINES
from cp_styles.explain.rehearse import Shapes
from cp_styles.explain.states import StateShapes
from cp_styles.explain.text import nbytes, seconds, table
from cp_styles.layout import SequenceLayout, striped
from cp_styles.mask import Causal, Documents, Full, Mask, SlidingWindow
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses

_WIDTH = 99  # of a line
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_STRATEGIES: dict[str, Callable[..., Strategy]] = {"ring": Ring, "allgather": AllGather, "ulysses": Ulysses}


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
    name, _, number = text.partition(":")
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
    root = argparse.ArgumentParser(prog="python -m cp_styles", description=__doc__.splitlines()[0])  # pyright: ignore
    commands = root.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="rank strategies and layouts, and explain the best",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("--seq-len", type=count, help="positions of the whole sequence: 4096, 128K, 1M")
    explain.add_argument("--documents", type=lengths, metavar="FILE", help="packed documents: a file of their lengths")
    explain.add_argument("--ranks", type=count, required=True, help="ranks that share the sequence")
    explain.add_argument("--heads", type=numbers, required=True, metavar="H[:G]", help="query heads : key/value heads")
    explain.add_argument("--head-dim", type=count, required=True)
    explain.add_argument("--batch", type=count, default=1)
    explain.add_argument("--dtype", choices=_DTYPES, default="bf16")
    explain.add_argument("--mask", choices=("causal", "full"), default="causal")
    explain.add_argument("--window", type=count, help="a query sees itself and the W - 1 positions before it")
    explain.add_argument(
        "--strategy",
        type=strategy,
        nargs="+",
        metavar="S",
        help="ring ring:0 allgather ulysses ulysses:8; default: all that may suit",
    )
    explain.add_argument(
        "--layout",
        nargs="+",
        choices=("head_tail", "contiguous", "per_document_head_tail", "by_work", "striped"),
        help="default: all that may suit the mask",
    )
    explain.add_argument("--hardware", choices=MACHINES, default="h100")
    explain.add_argument("--node-ranks", type=count, help="ranks of a node; default: the machine's")
    explain.add_argument(
        "--states", type=numbers, metavar="H:K:V", help="recurrences beside the attentions: heads, key and value dims"
    )
    explain.add_argument("--diagonal", action="store_true", help="their states decay by numbers, as those of Mamba-2")
    explain.add_argument("--layers", type=numbers, default=(1, 3), metavar="A:R", help="attentions, recurrences; 1:3")
    explain.add_argument("--width", type=count, help="of the hidden states; default: query heads x head dim")
    explain.add_argument("--rank", type=int, help="explain this rank; default: the busiest of some")
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    explain.add_argument("--plot", metavar="FILE", help="draw the best choice (needs matplotlib)")
    return root


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    root = parser()
    args = root.parse_args(arguments)

    def wrong(option: str, text: str) -> Any:
        root.error(f"argument {option}: {text}")

    if args.seq_len is None and args.documents is None:
        wrong("--seq-len", "give --seq-len, or --documents with a file of lengths")
    if args.documents and args.seq_len not in (None, sum(args.documents)):
        wrong("--documents", f"the lengths add up to {sum(args.documents)}, and --seq-len is {args.seq_len}")
    length = args.seq_len or sum(args.documents or ())
    if args.rank is not None and not 0 <= args.rank < args.ranks:
        wrong("--rank", f"there is no rank {args.rank} among {args.ranks}")
    if args.states and len(args.states) != 3:
        wrong("--states", "give heads, key dim and value dim: 32:128:128")
    query_heads, kv_heads = args.heads[0], args.heads[-1]
    if len(args.heads) > 2 or query_heads % kv_heads:
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
    balancers: dict[str, Callable[[int, int], SequenceLayout]] = {
        **layouts_for(mask),
        "striped": partial(striped, block=128),
    }
    names = args.layout or list(layouts_for(mask))
    for name in names:
        if name not in balancers:
            wrong("--layout", f"{name} needs --documents")
    dtype, device = _DTYPES[args.dtype], torch.device(hardware.device)
    shapes = Shapes(query_heads, kv_heads, args.head_dim, args.head_dim, dtype, device, args.batch)
    chosen = args.strategy or strategies_for(args.ranks, hardware)
    choices = ranked(
        chosen,
        {name: balancers[name] for name in names},
        length=length,
        ranks=args.ranks,
        mask=mask,
        shapes=shapes,
        hardware=hardware,
    )
    if args.json:
        print(json.dumps([_as_dict(choice) for choice in choices], indent=1))
    else:
        model = f"heads {query_heads}:{kv_heads} of {args.head_dim}, {args.dtype}, {hardware.name}"
        print(f"{length:,} positions on {args.ranks} ranks, {str(mask)[:30]}, {model}")
        print(f"predicted for one attention; figures from: {hardware.source}"[:_WIDTH])
        print("\n".join(ranking(choices)))
    best = next((choice.explanation for choice in choices if not choice.problem), None)
    if best is None:
        print("no choice fits: see the reasons above", file=sys.stderr)
        raise SystemExit(1)
    if not args.json:
        print(f"\n{best}")
    if args.states and not args.json:
        print(f"\nlayouts of {args.layers[0]} such attentions and {args.layers[1]} recurrences, forward and backward")
        states_of = dict(zip(("heads", "keys", "values"), args.states, strict=True))
        states = StateShapes(**states_of, diagonal=args.diagonal, batch=args.batch)
        width = args.width or query_heads * args.head_dim
        options = {"ranks": args.ranks, "mask": mask, "shapes": shapes, "hardware": hardware}
        rows = [["attentions", "recurrences", "strategy", "attentions", "recurrences", "changes", "total", "sent"]]
        for each in explain_hybrid(length, states=states, layers=args.layers, width=width, **options):
            times = map(seconds, (each.attention, each.states, each.changes, each.total))
            rows.append([each.attention_layout, each.state_layout, short(each.strategy), *times, nbytes(each.sent)])
        print("\n".join(table(rows)))
    if args.plot:
        try:
            best.plot(args.plot)
        except (OSError, ValueError, ImportError) as error:  # no such folder, no such format, no matplotlib
            wrong("--plot", str(error))


def ranking(choices: Sequence[Choice]) -> list[str]:
    """A table of choices, and below it why some are not possible."""
    rows = [["strategy", "layout", "forward", "backward", "exposed", "sent", "memory", "imbalance", "planning"]]
    for choice in choices:
        explanation = choice.explanation
        if explanation is None or choice.problem:
            continue
        forward, backward = explanation.seconds
        sent = explanation.sent("forward") + explanation.sent("backward")
        cells = seconds(forward.total), seconds(backward.total), seconds(forward.exposed + backward.exposed)
        sizes = (
            nbytes(sent),
            nbytes(explanation.peak_memory),
            f"{max(explanation.imbalance, explanation.layout_imbalance or 1.0):.3f}",
        )
        rows.append([short(choice.strategy), choice.layout_name, *cells, *sizes, seconds(explanation.planning)])
    lines = list(table(rows))
    while max(map(len, lines)) > _WIDTH:  # JSON has all columns
        rows = [row[:-1] for row in rows]
        lines = list(table(rows))
    problems = dict.fromkeys(f"  {short(choice.strategy)}: {choice.problem}" for choice in choices if choice.problem)
    return [*lines, *(line[:_WIDTH] for line in problems)]


def short(strategy: Strategy) -> str:
    """A strategy as the options name it: ring, ring:0, ulysses:8."""
    if isinstance(strategy, Ulysses):
        return "ulysses" + (f":{strategy.size}" if strategy.size else "")
    if isinstance(strategy, (Ring, AllGather)):
        return type(strategy).__name__.lower() + (f":{strategy.keep}" if strategy.keep != 1 else "")
    return str(strategy)


def _as_dict(choice: Choice) -> dict[str, Any]:
    facts = {"strategy": short(choice.strategy), "layout": choice.layout_name, "problem": choice.problem}
    return facts if choice.explanation is None else {**choice.explanation.as_dict(), **facts}
