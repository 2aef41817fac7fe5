"""Whole runs of the tests in random orders: python -m tests.repeat 10 --load 20 [-- further arguments of pytest]

``--at-once 5`` runs five at a time, which load the machine for each other.

Prints a line for each run and each failure, and ends with a status of 1 if a test failed in any of them. Each run keeps
its output in runs/repeat. A worker that dies in native code leaves the stacks of all its threads there too, if gdb is
installed and the system writes a core file into the working directory (``/proc/sys/kernel/core_pattern``).

``python -m pytest -p tests.repeat --order 7`` runs the tests once, in the order of seed 7: files in a random order, and
the tests of a file in a random order.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "runs/repeat"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", type=int, help="run the tests in a random order, drawn from this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Workers of xdist must have one order, so each of them draws it from the seed.
    if (seed := config.getoption("order")) is not None:
        draw = random.Random(seed)
        places = {path: draw.random() for path in sorted({item.path for item in items})}
        items[:] = [item for *_, item in sorted((places[item.path], draw.random(), item) for item in items)]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that do nothing but compute."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def native_stacks(core: Path) -> str:
    """The stacks of all threads of a process that has left a core file, which is removed."""
    if shutil.which("gdb") is None:
        return f"{core.name}: install gdb to see the stacks of its threads\n"
    found = subprocess.run(
        ["gdb", "-batch", "-ex", "thread apply all bt", sys.executable, str(core)], capture_output=True, text=True
    )
    core.unlink()
    return found.stdout


def run_once(further: Sequence[str], seed: int) -> tuple[list[str], str]:
    """The failures of one run, and a line for it."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "tests.repeat", f"--order={seed}", "-rfE", *further]
    unlimited = resource.getrlimit(resource.RLIMIT_CORE)[1]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (unlimited, unlimited)),
    )
    text = done.stdout + "".join(map(native_stacks, sorted(ROOT.glob("core*"))))
    (OUTPUT / f"{seed}.txt").write_text(text)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    minutes, load = (time.monotonic() - begin) / 60, os.getloadavg()[1]
    line = f"order {seed}: {last.strip('= ')} ({minutes:.1f} minutes, load {load:.0f})"
    return failed or ([f"pytest ended with {done.returncode}"] if done.returncode else []), line


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=int, help="number of runs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run; the next ones follow")
    parser.add_argument("--load", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--at-once", type=int, default=1, help="number of runs at a time")
    parser.epilog = "Arguments after -- are of pytest."
    own = [*itertools.takewhile(lambda each: each != "--", arguments)]
    further = arguments[len(own) + 1 :]
    options = parser.parse_args(own)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    failures, good = Counter[str](), 0
    seeds = range(options.first, options.first + options.runs)
    with busy(options.load), ThreadPoolExecutor(options.at_once) as pool:
        for failed, line in pool.map(partial(run_once, further), seeds):
            good += not failed
            print(line, flush=True)
            for each in failed:
                print(f"    {each[:300]}", flush=True)
                failures[each.partition(" - ")[0]] += 1
    import torch  # only for its version: this process starts sooner without it

    load = f"{options.at_once} at once, {options.load} processes that compute meanwhile"
    print(f"{good} of {options.runs} runs passed, torch {torch.__version__}, {load}")
    for test, count in failures.most_common():
        print(f"  {count} of {options.runs} runs: {test}")
    return int(good < options.runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
