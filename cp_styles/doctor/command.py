"""The command ``python -m cp_styles doctor``: the first thing to run on a new machine or cluster.

    torchrun --nproc-per-node 8 -m cp_styles doctor
    python -m cp_styles doctor --ranks 4

It checks groups, agreement, messages, kernels, attention with each strategy, and a small model, and prints a line for
each. Every rank has the exit status 1 if a check has failed. Without torchrun the ranks are threads, on CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cp_styles._lib.compat import in_process_store
from cp_styles.doctor.checks import checks_of
from cp_styles.doctor.ranks import Line, RanksFailed, World
from cp_styles.explain.text import format_seconds
from cp_styles.testing import run_ranks

_NAME, _TEXT = 22, 57  # columns
_MOST_TEXTS = 4  # texts of failed ranks
_TRANSPORTS = "TransferError", "gloo", "NCCL"


def examine(world: World, title: str, path: Path | None) -> int:
    """Run all checks. Rank 0 prints the table, and writes it to ``path``. Returns the exit status."""
    say: Callable[..., None] = (lambda *_, **__: None) if world.rank else partial(print, flush=True)
    wrap = partial(textwrap.wrap, width=_TEXT, break_long_words=False, break_on_hyphens=False)
    say(f"cp_styles doctor: {title}")
    rows: list[dict[str, Any]] = []
    last = ""  # the check after which the ranks cannot go on
    for name, check in checks_of(world.size):
        start = time.perf_counter()
        say(f"{name:{_NAME}}", end=" ")  # the last word of a rank that is ended
        try:
            line = Line(f"the ranks could not go on after {last!r}", skipped=True) if last else world.run(name, check)
            state = "skipped" if line.skipped else "ok"
        except RanksFailed as failed:
            last, state = name if failed.fatal else "", "FAIL"
            # Reasons come first, then the errors of ranks that have waited for messages.
            errors = sorted(failed.errors.items(), key=lambda item: any(word in item[1] for word in _TRANSPORTS))
            line = Line("\n".join(f"rank {rank}: {text}" for rank, text in errors[:_MOST_TEXTS]), failed.errors)
        first, *rest = [part for text in line.text.splitlines() for part in wrap(text)]
        seconds = time.perf_counter() - start
        say(f"{first:{_TEXT}} {format_seconds(seconds):>9} {state}", *(f"{'':{_NAME}} {x}" for x in rest), sep="\n")
        rows.append({"check": name, "result": line.text, "seconds": seconds, "state": state, "facts": line.facts})
        if path is not None and world.rank == 0:  # after each check, because the next one may not end
            path.write_text(json.dumps({"title": title, "checks": rows}, indent=1))
    count = Counter(row["state"] for row in rows)
    ran = len(rows) - count["skipped"]
    more = f", {count['skipped']} skipped" if count["skipped"] else ""
    say(f"{count['FAIL']} of {ran} checks failed{more}" if count["FAIL"] else f"all {ran} checks passed{more}")
    return int(count["FAIL"] > 0)


def end_if_late(world: World) -> NoReturn:
    """End this process when a check has not ended by the deadline."""
    while time.monotonic() < world.deadline:
        time.sleep(0.05)
    world.complain("this rank has not come to the end of the check: it hangs, or needs a longer --timeout")
    os._exit(1)


def parse_positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0, and finite")
    return number


def main(arguments: Sequence[str]) -> None:
    """Run the command; the first of the arguments is its name."""
    options = argparse.ArgumentParser(
        prog="python -m cp_styles doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda under torchrun, if there is a GPU")
    add("--ranks", type=int, help="ranks as threads on CPU, without torchrun; default: 2")
    add(
        "--timeout",
        type=parse_positive,
        default=30.0,
        metavar="S",
        help="seconds that a rank waits for others; default: 30",
    )
    add("--mib", type=parse_positive, metavar="N", help="MiB of a message; default: 4 on CPU, 64 on CUDA")
    add("--json", type=Path, metavar="FILE", help="write the rows and their figures to a file too, for a bug report")
    args = options.parse_args(arguments[1:])
    launched, rank, size = {"RANK", "WORLD_SIZE"} <= os.environ.keys(), 0, 2 if args.ranks is None else args.ranks
    if launched:
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except ValueError as error:
            options.error(f"RANK and WORLD_SIZE of the environment: {error}")
    if launched and args.ranks is not None:
        options.error("argument --ranks: torchrun has started the ranks: leave it out")
    has_gpu = launched and torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        options.error("argument --device: cuda needs GPUs, and torchrun --nproc-per-node N -m cp_styles doctor")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    device = torch.device("cpu") if args.device == "cpu" else device
    nbytes = int(2**20 * (args.mib or (64 if device.type == "cuda" else 4)))
    if size < 1 or nbytes < 8:
        options.error("arguments --ranks and --mib must be above 0, and 8 bytes at least")
    if rank == 0 and args.json is not None:
        try:
            args.json.write_text("")
        except OSError as error:
            options.error(f"argument --json: {error}")
    title = f"{size} ranks on {device.type}, timeout {args.timeout:g} s"
    if not launched:
        title += ", threads; processes: torchrun -m cp_styles doctor"
        store = in_process_store()

        def examine_on(rank: int) -> int:
            world = World(store, rank, size, device, args.timeout, nbytes)
            return examine(world, title, args.json)

        raise SystemExit(max(run_ranks(examine_on, size, timeout_seconds=args.timeout, may_time_out=True)))
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=args.timeout)))  # pyright: ignore
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"doctor: rank {rank} has not found the store of all ranks: {error}") from None
    world = World(store, rank, size, device, args.timeout, nbytes)
    threading.Thread(target=end_if_late, args=(world,), daemon=True).start()
    status = examine(world, title, args.json)
    world.seconds = 0.0
    with suppress(RanksFailed):  # a launcher ends the remaining ranks when one has failed: let rank 0 print before
        world.gather()
    # Without Python's shutdown, in which a thread of gloo may abort the process.
    sys.stdout.flush()
    os._exit(status)
