"""The command ``python -m cp_styles explain``: rank strategies and layouts for a model by predicted time.

    python -m cp_styles explain --seq-len 1M --ranks 64 --heads 32:8 --head-dim 128 --mask causal --hardware h100

It prints all combinations of strategies and layouts for one attention, the fastest first, and explains the fastest.

    python -m cp_styles explain --model config.json --gpus 8 --memory 80G --seq-len 1M

It prints the plans of a whole training run, the fastest that fits first, with its memory, its time and its code.
Nothing runs on a device.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cp_styles.explain.candidates import (
    Candidate,
    format_strategy,
    parse_strategy,
    rank_candidates,
    suggest_layouts,
    suggest_strategies,
)
from cp_styles.explain.events import Shapes
from cp_styles.explain.fit import ADAMW, SGD, Fit
from cp_styles.explain.fit_text import code_of, describe_model, format_memory, format_plans, format_time
from cp_styles.explain.hardware import GIB, MACHINES, Hardware
from cp_styles.explain.model_step import StepModel, read_config
from cp_styles.explain.report import explained
from cp_styles.explain.text import format_bytes, format_seconds, wrap_entries
from cp_styles.layouts import by_work, striped
from cp_styles.masks import Causal, Documents, Full, Mask, SlidingWindow
from cp_styles.strategies import Strategy
from cp_styles.verify.report import format_table

_WIDTH = 99  # columns of a line
_PATIENCE = 2.0  # seconds from one line of progress to the next
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# Figures of Hardware that the command doctor measures.
_LINKS = {"bandwidth": "bytes a second inside of a node", "latency": "seconds of a message inside of a node"}
_LINKS |= {"far_bandwidth": "bytes a second between nodes", "far_latency": "seconds of a message between nodes"}
_OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD}
_COLUMNS = (
    "predicted for one attention and its busiest rank. exposed: the part of forward and backward in which the rank "
    "waits for messages, with nothing to compute; sent: bytes of both; memory: its peak; imbalance: work of the "
    "busiest rank / mean"
)


class _Progress:
    """Writes the name of the simulated candidate to stderr, every two seconds."""

    def __init__(self, steps: int = 0) -> None:
        self._steps, self._done, self._last = steps, 0, time.monotonic()

    def __call__(self, name: str) -> None:
        self._done += 1
        if time.monotonic() - self._last >= _PATIENCE:
            number = f"{self._done} of {self._steps}" if self._steps else self._done
            print(f"explain: {number}: {name}", file=sys.stderr)
            self._last = time.monotonic()


def parse_count(text: str) -> int:
    """A positive number, with the suffix K for 1,024 or M for 1,048,576."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number such as 4096, 128K or 1M")
    return int(number)


def parse_heads(text: str) -> tuple[int, int]:
    """Numbers of query heads and of key/value heads: 32:8, or 32 for 32:32."""
    numbers = [int(number) for number in text.split(":")] if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text) else []
    if not numbers or numbers[0] % numbers[-1]:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give query heads, or query:key heads, the second divides the first"
        )
    return numbers[0], numbers[-1]


def parse_latent(text: str) -> tuple[int, int]:
    """The dims of a latent and of a rotary key: 512:64."""
    if not re.fullmatch(r"[1-9]\d*:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give the dims of a latent and the rotary dims, such as 512:64")
    latent_dim, rotary_dim = text.split(":")
    return int(latent_dim), int(rotary_dim)


def _strategy_option(text: str) -> Strategy:
    try:
        return parse_strategy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_lengths(path: str) -> tuple[int, ...]:
    """A file of document lengths, separated by white space or commas."""
    try:
        words = re.split(r"[\s,]+", Path(path).read_text().strip())
        sizes = tuple(int(word) for word in words)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}; give a file of document lengths") from None
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{path}: document lengths must be at least 1, got {min(sizes)}")
    return sizes


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = argparse.ArgumentParser(
        prog="python -m cp_styles explain",
        usage="%(prog)s --seq-len S --ranks P --heads H[:G] --head-dim D [options; --help lists them]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--seq-len", type=parse_count, help="positions of the whole sequence: 4096, 128K, 1M")
    add("--documents", type=parse_lengths, metavar="FILE", help="packed documents: a file of their lengths")
    add("--ranks", type=parse_count, required=True, help="ranks that share the sequence")
    add("--heads", type=parse_heads, required=True, metavar="H[:G]", help="query heads : key/value heads")
    add("--head-dim", type=parse_count, required=True)
    add("--value-dim", type=parse_count, help="head dim of values; default: --head-dim")
    latents = "multi-head latent attention: dims of a latent : rotary dims. Latents that travel, and heads that travel"
    add("--latent", type=parse_latent, metavar="R:r", help=f"{latents}, are compared")
    add("--batch", type=parse_count, default=1)
    add("--dtype", type=str.lower, choices=_DTYPES, default="bf16")
    add("--mask", choices=("causal", "full"), default="causal")
    add("--window", type=parse_count, help="a query sees itself and the W - 1 positions before it")
    strategies = "ring ring:0 allgather ulysses ulysses:8; default: all that may suit"
    add("--strategy", type=_strategy_option, nargs="+", metavar="S", help=strategies)
    layouts = ("head_tail", "contiguous", "per_document_head_tail", "whole_documents", "by_work", "striped")
    add("--layout", nargs="+", choices=layouts, help="default: all that may suit the mask")
    add("--hardware", type=str.lower, choices=MACHINES, default="h100", help="default: h100")
    add("--node-ranks", type=parse_count, help="ranks of a node; default: the machine's")
    add_links(options)
    add("--rank", type=int, help="explain this rank; default: a sample with the busiest")
    add("--json", action="store_true", help="print JSON instead of text")
    return options


def add_links(options: argparse.ArgumentParser) -> None:
    """Add the options for figures that the command doctor measures."""
    for figure, unit in _LINKS.items():
        text = f"{unit}, as the command doctor prints it"
        options.add_argument(f"--{figure.replace('_', '-')}", type=float, help=text)


def machine_of(options: argparse.ArgumentParser, args: argparse.Namespace, *more: str) -> Hardware:
    """The machine of ``--hardware`` with the figures that are given. ``more``: names of further figures."""
    names = "node_ranks", *_LINKS, *more
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    try:
        return replace(MACHINES[args.hardware], **given)
    except ValueError as error:
        options.error(str(error))


def make_model_parser() -> argparse.ArgumentParser:
    """The options of the command with ``--model``."""
    options = argparse.ArgumentParser(
        prog="python -m cp_styles explain",
        usage="%(prog)s --model CONFIG --gpus N --seq-len S [options; --model CONFIG --help lists them]",
        description="Whether a training run of a model fits, and which plan is the fastest. Needs transformers.",
        allow_abbrev=False,
    )
    add = options.add_argument
    add("--model", type=Path, required=True, metavar="CONFIG", help="config.json of transformers, or its folder")
    add("--gpus", type=parse_count, required=True, help="all GPUs: FSDP2 shards over them")
    add("--seq-len", type=parse_count, required=True, help="positions of a sequence: 4096, 128K, 1M")
    add("--memory", type=parse_memory, metavar="80G", help="memory of a GPU; default: the machine's")
    add("--batch", type=parse_count, default=1, help="sequences that ranks train on at once")
    add("--dtype", type=str.lower, choices=_DTYPES, default="bf16", help="shards of 16-bit parameters are in float32")
    add("--optimizer", type=str.lower, choices=_OPTIMIZERS, default="adamw")
    add("--strategy", type=_strategy_option, nargs="+", metavar="S", default=(), help="as without --model")
    add("--hardware", type=str.lower, choices=MACHINES, default="h100", help="default: h100")
    add("--node-ranks", type=parse_count, help="ranks of a node; default: the machine's")
    add_links(options)
    return options


def parse_memory(text: str) -> int:
    """Bytes of a GPU: 80G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)[gG](?:i?[bB])?", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB, such as 80G")
    return int(float(match[1]) * GIB)


def fit_model(arguments: Sequence[str]) -> None:
    """Run the command with ``--model``: the plans, the memory and the time of the fastest that fits, and its code."""
    options = make_model_parser()
    args = options.parse_args(arguments)
    path = args.model / "config.json" if args.model.is_dir() else args.model
    hardware = machine_of(options, args, "memory")
    try:
        config, undeclared = read_config(path)
        sizes = {"dtype": _DTYPES[args.dtype], "device": hardware.device, "gpus": args.gpus, "batch": args.batch}
        model = StepModel(config, **sizes)
    except ValueError as error:
        options.error(f"argument --model: {error}")
    fit = Fit(model, hardware, _OPTIMIZERS[args.optimizer], progress=_Progress())
    print("\n".join(textwrap.fill(line, _WIDTH) for line in describe_model(fit)))
    if undeclared:
        fields = f"{', '.join(undeclared)}: fields that {type(config).__name__} does not declare, and may ignore"
        print(textwrap.fill(fields, _WIDTH))
    try:
        if model.active != model.parameters:
            print(f"a token uses {model.active:,} parameters")
        plans = fit.plans(args.seq_len, args.strategy)
        if not plans:
            options.error("argument --strategy: none of them can run on a divisor of the GPUs")
        print(f"\n{args.seq_len:,} positions, the fastest plan that fits first")
        print(
            "\n".join([*format_plans(fit, plans), "", *format_memory(fit, plans[0]), "", *format_time(fit, plans[0])])
        )
    except NotImplementedError as error:
        print(f"memory and time are not predicted: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if not plans[0].fits:
        shorter = f", or sequences of at most {plans[0].longest:,}" if plans[0].longest else ""
        print(f"no plan fits: take more GPUs{shorter}", file=sys.stderr)
        raise SystemExit(1)
    print(f"\nthe code of the first plan\n\n{code_of(fit, plans[0], str(path))}")


def main(arguments: Sequence[str]) -> None:
    """Run the command; the first of the arguments is its name."""
    if any(word.partition("=")[0] == "--model" for word in arguments):
        fit_model(arguments[1:])
        return
    options = make_parser()

    def refuse(option: str, text: str) -> Any:
        options.error(f"argument {option}: {text}")

    args = options.parse_args(arguments[1:])
    if args.seq_len is None and args.documents is None:
        refuse("--seq-len", "give --seq-len, or --documents with a file of lengths")
    if args.documents and args.seq_len not in (None, sum(args.documents)):
        refuse("--documents", f"the lengths add up to {sum(args.documents)}, and --seq-len is {args.seq_len}")
    if args.rank is not None and not 0 <= args.rank < args.ranks:
        refuse("--rank", f"there is no rank {args.rank} among {args.ranks}")
    if args.window and args.mask == "full":
        refuse("--window", "a window is causal here; leave --mask full out")
    if args.latent and (args.latent[1] > args.head_dim or args.heads[0] != args.heads[1]):
        refuse("--latent", "rotary dims are a part of --head-dim, and latents are expanded to all query heads")
    hardware = machine_of(options, args)
    mask: Mask = SlidingWindow(args.window - 1, 0) if args.window else Causal() if args.mask == "causal" else Full()
    if args.documents:
        mask = Documents(args.documents) & mask
    suitable = suggest_layouts(mask)
    balancers = {"striped": partial(striped, block=128), "by_work": partial(by_work, mask=mask)} | suitable
    names = args.layout or list(suitable)
    for name in names:
        if name not in balancers:
            refuse("--layout", f"{name} needs --documents")
    length, device = args.seq_len or sum(args.documents or ()), torch.device(hardware.device)
    heads, kv_heads = args.heads
    dims = args.head_dim, args.value_dim or args.head_dim
    shapes = [Shapes(heads, kv_heads, *dims, _DTYPES[args.dtype], device, args.batch)]
    shapes += [shapes[0]._replace(latent=args.latent)] if args.latent else []
    strategies = args.strategy or suggest_strategies(args.ranks, hardware)
    candidates = rank_candidates(
        strategies,
        {name: balancers[name] for name in names},
        length=length,
        ranks=args.ranks,
        mask=mask,
        shapes=shapes,
        hardware=hardware,
        progress=_Progress(len(names) * len(strategies) * len(shapes)),
    )
    if args.json:
        rows = [
            ({} if each.explanation is None else each.explanation.as_dict())
            | {"strategy": format_strategy(each.strategy), "layout": each.layout_name, "problem": each.problem}
            for each in candidates
        ]
        print(json.dumps(rows, indent=1))
    else:
        model = f"heads {heads}:{kv_heads} of {args.head_dim}, {args.dtype}, {hardware.name}"
        print(f"{length:,} positions on {args.ranks} ranks, {str(mask)[:30]}, {model}")
        print("\n".join(format_ranking(candidates)))
        print(textwrap.fill(_COLUMNS, _WIDTH))
    best = candidates[0].explanation
    if best is None or candidates[0].problem:
        print("no candidate fits: see the reasons above", file=sys.stderr)
        raise SystemExit(1)
    if not args.json:
        call = best.strategy, (best.layout, best.kv_layout), mask, best.kernel, best.shapes
        print(f"\n{explained(*call, hardware=hardware, rank=args.rank)}")
        print(textwrap.fill(f"figures of {hardware.name}: {hardware.source}", _WIDTH))


def format_ranking(candidates: Sequence[Candidate]) -> list[str]:
    """A table of the candidates, and below it the problems of candidates that cannot run."""
    rows = [["strategy", "layout", "forward", "backward", "exposed", "sent", "memory", "imbalance"]]
    latents = any(each.explanation is not None and each.explanation.shapes.latent for each in candidates)
    for candidate in candidates:
        explanation = candidate.explanation
        if explanation is None or candidate.problem:
            continue
        forward, backward = explanation.seconds
        times = forward.total, backward.total, forward.exposed + backward.exposed
        sizes = explanation.sent("forward") + explanation.sent("backward"), explanation.peak_memory
        imbalance = f"{max(explanation.imbalance, explanation.layout_imbalance or 1.0):.3f}"
        names = format_strategy(candidate.strategy), candidate.layout_name
        if latents:
            names = (f"{names[0]}, {'latents' if explanation.shapes.latent else 'heads'}", names[1])
        rows.append([*names, *map(format_seconds, times), *map(format_bytes, sizes), imbalance])
    problems = dict.fromkeys((format_strategy(each.strategy), each.problem) for each in candidates if each.problem)
    return [*format_table(rows), *wrap_entries(problems)]
