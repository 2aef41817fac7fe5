"""What a GPU has recorded, as tables for tests/records/README.md: python tests/benchmarks/figures.py gpu-exact ...

tests/records has a folder for each run, with the lines of tests/replay.py, of its ``--time``, and of tests/gpu.py. The
second run has timed six settings twice, with the constants of the package and with OF_RECORD (before_*.jsonl); the
others have timed all settings once. Left out are the "note" of a line and predictions. Those are in predicted.jsonl, as
the engine that ran made them: ``python tests/benchmarks/on_gpu.py FILE`` writes the predictions of a tree. The
covers of a kernel are one line in the second run, with the largest errors. Errors are relative to the norm of the full
result in float64.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from cp_styles._lib.bounded_cache import another_cache
from cp_styles.explain import H100, H200, Explanation, Hardware
from cp_styles.explain.events import KernelCall
from cp_styles.explain.hardware import seconds_of
from tests.gpu_record import tolerance
from tests.replay import STRATEGIES, Setting, explanation, settings

Line = dict[str, Any]
Row = tuple[str, ...]
RECORDS = Path(__file__).parents[1] / "records"
DTYPES = torch.bfloat16, torch.float16, torch.float32
NAMES = {"ring": "ring", "ulysses": "Ulysses"}
# Constants of the package that have other values in before_*.jsonl of the second run.
OF_RECORD = {"cp_styles.strategies.schedule._LEAST_BLOCKS": 2 * 132, "cp_styles.kernels.packing.FEW_ROWS": 0}
SETTINGS = {setting.name: setting for setting in settings(cuda=True)}


class Times(NamedTuple):
    """Records of ``--time``. ``then``: with the constants OF_RECORD."""

    name: str
    files: tuple[str, ...]
    then: bool


BEFORE = Times("before", ("h200_second/before_1", "h200_second/before_2"), then=True)
NOW = Times("now", ("h200_fourth/time", "h200_third/time", "h200_second/time_1", "h200_second/time_2"), then=False)


def record(name: str) -> tuple[Line, list[Line]]:
    """The machine, and the lines of its record."""
    machine, *lines = map(json.loads, (RECORDS / f"{name}.jsonl").read_text().splitlines())
    return machine, lines


@cache
def timed(times: Times = NOW) -> dict[Setting, dict[str, list[Line]]]:
    """The lines of each setting of ``--time``, by cover: one of each file."""
    found: dict[Setting, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for name in times.files:
        machine, lines = record(name)
        assert machine.get("set", {}) == (OF_RECORD if times.then else {}), name
        for line in lines:
            assert line["ok"], line
            found[SETTINGS[line["case"]]][line["cover"]].append(line)
    return {setting: dict(lines) for setting, lines in found.items()}


def between(lines: list[Line], key: str, form: str) -> str:
    """A figure of one line, or the range of its values in several; "-" without the figure."""
    found = sorted(line[key] for line in lines if key in line)
    return " to ".join(dict.fromkeys(format(value, form) for value in (found[:1] + found[-1:]))) or "-"


def told(setting: Setting) -> str:
    """A setting in the words of the page."""
    return setting.name.removeprefix("time ").replace(f" rank={setting.rank}", "")


def exact() -> Iterator[Row]:
    """The largest error of an output or a gradient by dtype, and how many lines have one."""
    worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[str, int] = defaultdict(int)
    lines: list[tuple[str, Line]] = []
    for folder in "h200", "h200_second", "h200_third", "h200_fourth":
        lines += [(f"{line['cover']}, 4 and 8 ranks", line) for line in record(f"{folder}/replay")[1]]
        lines += [(re.split(" b?float", line["case"])[0], line) for line in record(f"{folder}/gpu")[1]]
    for name in "bits", "replay_end":
        lines += [(f"{line['cover']}, 4 and 8 ranks", line) for line in record(f"h200_fourth/{name}")[1]]
    lines += [("two groups of heads in a backward", line) for line in record("h200_third/groups")[1]]
    for what, line in lines:
        assert line["ok"], line
        if "errors" in line:
            covers = line.get("covers") or [line["cover"]]
            counts[what] += len(covers)
            worst[what][line["dtype"]] = max(worst[what][line["dtype"]], *line["errors"])
            if line.get("torch"):
                counts["torch's kernel"] += sum(not cover.startswith("packed") for cover in covers)
                torchs = worst["torch's kernel"]
                torchs[line["dtype"]] = max(torchs[line["dtype"]], *line["torch"])
    yield "what", "lines", *(str(dtype)[6:] for dtype in DTYPES)
    for what, found in worst.items():
        yield what, str(counts[what]), *(f"{found[key]:.1e}" if (key := str(d)[6:]) in found else "-" for d in DTYPES)
    yield "limit of `replay.py`", "", *(f"{tolerance(dtype):.1e}" for dtype in DTYPES)


def bits() -> Iterator[Row]:
    """Whether Ulysses has the bits of torch's attention on one device, and torch its own in a second call."""
    yield (
        "8 ranks, 256 rows",
        *(f"{whose}{name}" for whose in ("", "torch again: ") for name in ("out", "dq", "dk", "dv")),
    )
    for line in record("h200_fourth/bits")[1]:
        if "bits of torch's" in line:
            found = line["bits of torch's"] + line["torch's bits again"]
            yield line["case"].replace(" P=8 rows=256", ""), *("equal" if same else "other" for same in found)


def shares() -> Iterator[Row]:
    """Milliseconds of a forward and backward, of the device and of the host, and the share of ideal."""
    yield "setting", "torch", "ring", "host", "share f", "share f+b", "Ulysses", "host", "share f", "share f+b"
    for setting, lines in timed().items():
        cells = [between(lines.get("torch", []), "ms f+b", ".2f")]
        for name in STRATEGIES:
            found = lines[f"{name} times"]
            cells += [between(found, f"{whose}ms f+b", ".1f") for whose in ("", "host ")]
            cells += [between(found, f"share of ideal {phase}", ".2f") for phase in ("f", "f+b")]
        yield told(setting), *cells


def summary() -> Iterator[Row]:
    """What tutorials/gpus.md shows: times, shares and peaks, of the settings that were timed three times."""
    yield "8 ranks", *(f"{name}{of}" for name in NAMES.values() for of in (", ms", ", share", ", MiB"))
    for setting in timed(BEFORE):
        lines, cells = timed()[setting], []
        for name in STRATEGIES:
            found = lines[f"{name} times"]
            cells += [between(found, "ms f+b", ".1f"), between(found, "share of ideal f+b", ".2f")]
            cells += [f"{max(peaks_of(NOW, setting, name)[0]) / 2**20:,.0f}"]
        yield told(setting).replace("P=8 rows=", ""), *cells


def changes() -> Iterator[Row]:
    """Milliseconds and launches with the constants OF_RECORD and with the package's own."""
    figures = " before", " now", " launches before", " now"
    yield "setting", *(f"{name}{what}" for name in NAMES.values() for what in figures)
    for setting, before in timed(BEFORE).items():
        cells = []
        for name in STRATEGIES:
            both = before, timed()[setting]
            cells += [between(found[f"{name} times"], "ms f+b", ".1f") for found in both]
            cells += [str(launches_of(found, name)[0]) for found in both]
        yield told(setting), *cells


_ATTENTION = "cudnn", "flash", "fmha"


def launches_of(lines: dict[str, list[Line]], name: str) -> tuple[int, int, list[float], list[float]]:
    """Launches, those of attention, which are equal in all files, and milliseconds of the device of both. The host has
    waited for the device in none."""
    found, spent, busy = set(), [], []
    for line in lines[f"{name} launches"]:
        kinds = line["launches"]
        attention = [kinds[kind] for kind in _ATTENTION if kind in kinds]
        found.add((sum(count for count, _ in kinds.values()), sum(count for count, _ in attention)))
        spent.append(sum(ms for _, ms in attention))
        busy.append(sum(ms for _, ms in kinds.values()))
    for waits in lines[f"{name} waits"]:
        assert waits["returned first"], waits
        assert not waits["warnings"], waits
    ((whole, count),) = found
    return whole, count, spent, busy


def launched() -> Iterator[Row]:
    """Launches of a forward and backward, those of attention, and milliseconds of the device in both; waits."""
    head = "launches", "of attention", "ms", "other ms"
    yield "setting", *(f"{name} {what}" for name in NAMES.values() for what in head)
    for setting, lines in timed().items():
        cells = []
        for name in STRATEGIES:
            whole, count, spent, busy = launches_of(lines, name)
            cells += [str(whole), str(count), f"{spent[0]:.1f}", f"{busy[0] - spent[0]:.1f}"]
        yield told(setting), *cells


@cache
def explained(setting: Setting, name: str, *, then: bool) -> Explanation:
    """The explanation of a setting as it ran: with the kernels that the machine of the records has chosen, and with the
    constants of the package as they were ``then``, or as they are."""
    version = record(NOW.files[0])[0]["cudnn"]
    with contextlib.ExitStack() as stack:
        for constant, value in OF_RECORD.items() if then else ():
            stack.enter_context(patch(constant, value))
        stack.enter_context(patch.object(torch.backends.cudnn, "version", lambda: version))
        stack.enter_context(setting.kernels())
        stack.enter_context(another_cache())  # the cache of schedules does not know the constants
        return explanation(setting, STRATEGIES[name], dtype=torch.bfloat16, device="cuda")


def predict(times: Times, setting: Setting, name: str) -> Line:
    """The prediction of this tree: the peak over the inputs in bytes, and milliseconds of the device."""
    run = explained(setting, name, then=times.then).runs[setting.rank]
    machine = replace(H200, bandwidth=1e30, latency=0.0)  # in replay.py no message travels
    ms = 1e3 * sum(seconds_of(phase, setting.rank, machine).total for phase in (run.forward, run.backward))
    return {"peak": max(run.forward.peak, run.backward.peak), "ms": ms}


@cache
def predictions() -> dict[tuple[str, str, str], Line]:
    """The predictions of the engine that ran, by times, setting and strategy. Later engines need other memory."""
    lines = map(json.loads, (RECORDS / "predicted.jsonl").read_text().splitlines()[1:])
    return {(line["times"], line["case"], line["strategy"]): line for line in lines}


def peaks_of(times: Times, setting: Setting, name: str) -> tuple[list[float], float]:
    """The measured peaks over the inputs, one of each file, and the predicted one, in bytes."""
    queries = 2 * setting.rows * setting.heads[0] * setting.dim
    measured = [line["peak Q"] * queries for line in timed(times)[setting][f"{name} memory"]]
    return measured, predictions()[times.name, setting.name, name]["peak"]


def peaks() -> Iterator[Row]:
    """Peaks over the inputs in MiB."""
    yield "setting", *(f"{name} {what}" for name in NAMES.values() for what in ("measured", "predicted"))
    for setting in timed():
        cells = []
        for name in STRATEGIES:
            measured, predicted = peaks_of(NOW, setting, name)
            cells += [f"{size / 2**20:,.0f}" for size in (max(measured), predicted)]
        yield told(setting), *cells


def host() -> Iterator[Row]:
    """Milliseconds of the host, calls of Python, operations of torch and calls of CUDA in a forward and backward."""
    whose = "idle", "busy", "one thread"
    yield "setting", "strategy", "forward", *whose, "calls of Python", "operations", "calls of CUDA"
    lines = record("h200_second/profile")[1]
    for forward, full in zip(lines[::2], lines[1::2], strict=True):
        name, _, phase = full["cover"].split()
        assert phase == "f+b", full
        cells = [f"{forward['host ms']['idle']:.1f}", *(f"{full['host ms'][key]:.1f}" for key in whose)]
        cells += [f"{full['calls']:,}", f"{full['ops']:,}", f"{full['runtime']:,}"]
        yield told(SETTINGS[full["case"]]), NAMES[name], *cells


# -- predicted times --

FITTED = "flops", "cudnn_rate", "backward_rate", "masked_keys_per_query"


def tiles() -> Iterator[tuple[KernelCall, float]]:
    """The tiles of ``bench`` with 32:8 heads of 128, and their seconds. The device waits for the host at their
    beginning, so tiles are left out that take it less than four times as long as the host."""
    for line in record("h200/gpu")[1]:
        if line["case"].startswith("bench") and "cover" in line:
            length, cover = line["cover"].split()
            kernel = f"_scaled_dot_product_{line['case'].split()[1].lower()}_attention"
            for phase in ("forward", "backward"):
                if line[phase]["ms"] >= 4 * line[phase]["host ms"]:
                    tile = (1, 32, 8, int(length), int(length))
                    call = KernelCall(kernel, phase == "backward", cover, (tile,), (128, 128), 2)
                    yield call, line[phase]["ms"] / 1e3


def fit() -> Hardware:
    """H200's figures of kernels on these tiles alone, by least squares of the logarithm of their times."""
    entries = [*tiles()]

    def badness(machine: Hardware) -> float:
        return sum(math.log(machine.kernel_seconds(call) / seconds) ** 2 for call, seconds in entries)

    best, step = replace(H100, masked_keys_per_query=128.0), 0.5
    while step > 1e-4:
        factors = 1 + step, 1 / (1 + step)
        moved = [replace(best, **{name: getattr(best, name) * by}) for name in FITTED for by in factors]
        better = min(moved, key=badness)
        best, step = (better, step) if badness(better) < badness(best) else (best, step / 2)
    return best


def predicted() -> Iterator[Row]:
    """Milliseconds of the device in a forward and backward, without messages: predicted with H200, and measured."""
    yield "setting", *(f"{name} {what}" for name in NAMES.values() for what in ("predicted", "on the device", "error"))
    for setting, lines in timed().items():
        cells = []
        for name in STRATEGIES:
            ms = predictions()[NOW.name, setting.name, name]["ms"]
            busy = statistics.mean(launches_of(lines, name)[3])
            cells += [f"{ms:.1f}", f"{busy:.1f}", f"{100 * (ms / busy - 1):+.0f}%"]
        yield told(setting), *cells


def programs() -> Iterator[Row]:
    """Random attentions and mixers, programs and models on ranks that share the GPU. See tests/device.py."""
    yield "command", "exact", "refused on every rank", "wrong, and noticed", "others"
    for line in record("h200_third/programs")[1] + record("h200_fourth/programs")[1]:
        yield line["case"], *(str(line.get(key, "-")) for key in ("exact", "refused", "noticed", "bad"))


def main(file: str) -> None:
    """Write the predictions of this tree."""
    with Path(file).open("w") as out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=RECORDS, text=True, capture_output=True, check=True)
        print(json.dumps({"commit": commit.stdout.strip()}), file=out)
        for times, name in itertools.product((BEFORE, NOW), STRATEGIES):
            for setting in timed(times):
                what = {"times": times.name, "case": setting.name, "strategy": name}
                print(json.dumps(what | predict(times, setting, name)), file=out)


if __name__ == "__main__":
    main(sys.argv[1])
