"""Measures the times in performance.md anew: python tests/benchmarks/times.py [--write] [NAME ...].

In some five minutes on a machine with 2 cores on which nothing else runs. It prints each table with its date, machine
and command. --write puts the tables that the page shows, attention and plans, there, behind ``<!-- times: NAME -->``.
Peers are measured where they can be imported, see peers.py.

    attention  the strategies and peers over the ideal; see attention.py
    agreement  what a comparison of the ranks takes; see agreement.py
    plans      the last column of the table of plans; see planning.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "tutorials/performance.md"

# What the heads of columns say, options of attention.py, and rounds.
COLUMNS = (
    ("1024, 2 ranks", "--seq-len 1024 --bare", 40),
    ("2048, 2 ranks", "--bare", 24),
    ("8 heads of queries, 2 of keys", "--kv-heads 2", 24),
    ("8192, 2 ranks", "--seq-len 8192 --only Ring() --only AllGather() --only Ulysses()", 6),
    ("2048, 4 ranks", "--ranks 4 --bare", 24),
    ("128, 2 ranks", "--seq-len 128 --bare", 150),
)
ROWS = {
    "Ring()": "`Ring()`",
    "AllGather()": "`AllGather()`",
    "Ulysses()": "`Ulysses()`",
    "a bare ring": "a ring with nothing around it",
    "torch ring, all-to-all": "torch's ring, all-to-all",
    "ring-flash-attention zigzag": "ring-flash-attention, zigzag",
    "yunchang Ulysses": "yunchang, Ulysses",
    "ideal: heads split, nothing sent": "the ideal",
}


def run(script: str, *options: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *options]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def attention() -> list[str]:
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        for name, options, rounds in COLUMNS:
            file = Path(folder, "found.json")
            run("attention.py", *options.split(), "--peers", "--rounds", str(rounds), "--json", str(file))
            columns.append((name, json.loads(file.read_text())))

    def cell(heading: str, column: dict[str, dict[str, float | None]], name: str) -> str:
        if name not in column:
            return "-"
        wall, overhead, ms = (column[name][what] for what in ("wall", "overhead", "ms"))
        if heading.startswith("128,") or name.startswith("ideal"):
            return f"{ms:.1f} ms" if ms < 10 else f"{ms:,.0f} ms"
        return f"{wall:.2f}" + (f" ({overhead:.0%})".replace("%", " %") if overhead is not None else "")

    lines = ["| | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, shown in ROWS.items():
        cells = [cell(heading, column, name) for heading, column in columns]
        if set(cells) != {"-"}:
            lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return lines


def agreement() -> list[str]:
    lines = ["| ranks | one comparison | `Checks()` | `Checks(agreement=False)` |", "|---|---|---|---|"]
    for part in run("agreement.py", "--ranks", "2", "8", "64", "--rounds", "8").split(" ranks: ")[1:]:
        numbers = re.findall(r"([\d.]+) ms", part)
        lines.append("| | " + " | ".join(f"{float(x):.1f} ms" for x in numbers) + " |" * (4 - len(numbers)))
    for index, ranks in enumerate(("2", "8, which share the cores", "64, which share the cores")):
        lines[2 + index] = f"| {ranks}" + lines[2 + index][1:]
    return lines


def plans() -> list[str]:
    """The table of the page, with new times."""
    times = {}
    for line in run("planning.py").splitlines()[1:]:
        what, spent, planned = line[:64].strip(), float(line[64:73]), float(line[73:82])
        times[what] = spent + planned
    lines = tables_of(PAGE.read_text(), MARKERS["plans"])[1].splitlines()
    for index, line in enumerate(lines[2:], 2):
        cells = line.strip("| ").split(" | ")
        ms = times[f"{cells[0]}, {cells[2].replace(',', '')} ranks, {cells[1]}"]
        lines[index] = "| " + " | ".join([*cells[:-1], f"{ms:.1f}" if ms < 10 else f"{ms:.0f}"]) + " |"
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "attention": attention,
    "agreement": agreement,
    "plans": plans,
}


# Before the tables that the page has.
MARKERS = {"attention": "times: attention", "plans": "figures: plans"}


def tables_of(page: str, marker: str) -> list[str]:
    """The page up to the tables behind a marker, these, and the rest."""
    start = page.index(f"<!-- {marker} -->") + len(f"<!-- {marker} -->")
    match = re.compile(r"\n\n((?:Measured [^\n]*\n\n)?)((?:(?:\|[^\n]*\n)+\n?)+)").match(page, start)
    assert match is not None, marker
    return [page[: match.start(1)], match[2].strip(), "\n" + page[match.end() :]]


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    name = re.sub(r"\((R|TM)\)| CPU| @.*|Processor", "", model[1]).strip() if model else "a processor"
    return f"{len(os.sched_getaffinity(0))} cores ({name}), torch {torch.__version__.split('+')[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)} (all)")
    parser.add_argument("--write", action="store_true", help="put the tables that the page has there")
    options = parser.parse_args()
    for name in options.names or TABLES:
        start = time.perf_counter()
        lines, load = TABLES[name](), os.getloadavg()[0]
        said = f"Measured on {time.strftime('%Y-%m-%d')} on {machine()}:"
        print(
            f"\n{name} ({time.perf_counter() - start:.0f} s, load {load:.1f})\n\n{said}\n\n" + "\n".join(lines),
            flush=True,
        )
        if options.write and name in MARKERS:
            before, _, after = tables_of(PAGE.read_text(), MARKERS[name])
            PAGE.write_text(before + ("" if name == "plans" else said + "\n\n") + "\n".join(lines) + "\n" + after)


if __name__ == "__main__":
    main()
