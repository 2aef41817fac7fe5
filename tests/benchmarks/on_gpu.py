"""What a GPU has recorded, as tables for tutorials/gpus.md: python tests/benchmarks/figures.py gpu-exact ...

tests/records has a folder for each machine, with the lines of tests/replay.py, of its ``--time``, and of tests/gpu.py.
Left out are the "note" of a line and predictions, which are made anew here. Errors are relative to the norm of the full
result in float64.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cp_styles.bounded_cache import another_cache
from cp_styles.explain import H100, H200, Explanation, Hardware
from cp_styles.explain.hardware import seconds_of
from cp_styles.explain.rehearse import KernelCall
from tests.gpu_record import tolerance
from tests.replay import STRATEGIES, Setting, explanation, settings

Line = dict[str, Any]
Row = tuple[str, ...]
RECORDS = Path(__file__).parents[1] / "records" / "h200"
DTYPES = torch.bfloat16, torch.float16, torch.float32
NAMES = {"ring": "ring", "ulysses": "Ulysses"}
# Constants of the package that had other values when the record was made.
OF_RECORD = {"cp_styles.strategies.schedule._LEAST_BLOCKS": 2 * 132, "cp_styles.kernels.packing.FEW_ROWS": 0}
SETTINGS = {setting.name: setting for setting in settings(cuda=True)}


def record(name: str) -> tuple[Line, list[Line]]:
    """The machine, and the lines of its record."""
    machine, *lines = map(json.loads, (RECORDS / f"{name}.jsonl").read_text().splitlines())
    return machine, lines


@cache
def timed() -> dict[Setting, dict[str, Line]]:
    """The lines of each setting of ``--time``, by cover."""
    found: dict[Setting, dict[str, Line]] = defaultdict(dict)
    for line in record("time")[1]:
        found[SETTINGS[line["case"]]][line["cover"]] = line
    return dict(found)


def told(setting: Setting) -> str:
    """A setting in the words of the page."""
    return setting.name.removeprefix("time ").replace(f" rank={setting.rank}", "")


def exact() -> Iterator[Row]:
    """The largest error of an output or a gradient by dtype, and how many lines have one."""
    worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[str, int] = defaultdict(int)
    lines = [(f"{line['cover']}, 4 and 8 ranks", line) for line in record("replay")[1]]
    lines += [(line["case"].partition(" bfloat16")[0].partition(" float32")[0], line) for line in record("gpu")[1]]
    for what, line in lines:
        assert line["ok"], line
        if "errors" in line:
            counts[what] += 1
            worst[what][line["dtype"]] = max(worst[what][line["dtype"]], *line["errors"])
            if line.get("torch"):
                counts["torch's kernel"] += 1
                torchs = worst["torch's kernel"]
                torchs[line["dtype"]] = max(torchs[line["dtype"]], *line["torch"])
    yield "what", "lines", *(str(dtype)[6:] for dtype in DTYPES)
    for what, found in worst.items():
        yield what, str(counts[what]), *(f"{found[key]:.1e}" if (key := str(d)[6:]) in found else "-" for d in DTYPES)
    yield "limit of `replay.py`", "", *(f"{tolerance(dtype):.1e}" for dtype in DTYPES)


def shares() -> Iterator[Row]:
    """Milliseconds of a forward and backward, of the device and of the host, and the share of ideal."""
    yield "setting", "torch", "ring", "host", "share f", "share f+b", "Ulysses", "host", "share f", "share f+b"
    for setting, lines in timed().items():
        cells = [f"{lines['torch']['ms f+b']:.2f}" if "torch" in lines else "-"]
        for name in STRATEGIES:
            line = lines[f"{name} times"]
            cells += [f"{line[f'{whose}ms f+b']:.1f}" for whose in ("", "host ")]
            found = (line.get(f"share of ideal {phase}") for phase in ("f", "f+b"))
            cells += ["-" if share is None else f"{share:.2f}" for share in found]
        yield told(setting), *cells


_ATTENTION = "cudnn", "flash", "fmha"


def launched() -> Iterator[Row]:
    """Launches of a forward and backward, those of attention, and milliseconds of the device in both; waits."""
    head = "launches", "of attention", "ms", "other ms"
    yield "setting", *(f"{name} {what}" for name in NAMES.values() for what in head)
    for setting, lines in timed().items():
        cells = []
        for name in STRATEGIES:
            found = lines[f"{name} launches"]["launches"]
            attention = [found[kind] for kind in _ATTENTION if kind in found]
            count, spent = (sum(column) for column in zip(*attention, strict=True))
            whole, busy = (sum(column) for column in zip(*found.values(), strict=True))
            cells += [str(whole), str(count), f"{spent:.1f}", f"{busy - spent:.1f}"]
            waits = lines[f"{name} waits"]
            assert waits["returned first"], waits
            assert not waits["warnings"], waits
        yield told(setting), *cells


@cache
def explained(setting: Setting, name: str) -> Explanation:
    """The explanation of a setting as it ran: with the kernels that the machine of the record has chosen, and with the
    constants of the package as they were. What it predicts for other schedules, a later record must show."""
    version = record("time")[0]["cudnn"]
    with contextlib.ExitStack() as stack:
        for constant, value in OF_RECORD.items():
            stack.enter_context(patch(constant, value))
        stack.enter_context(patch.object(torch.backends.cudnn, "version", lambda: version))
        stack.enter_context(setting.kernels())
        stack.enter_context(another_cache())  # the cache of schedules does not know the constants
        return explanation(setting, STRATEGIES[name], dtype=torch.bfloat16, device="cuda")


def peaks_of(setting: Setting, name: str) -> tuple[float, float]:
    """The measured and the predicted peak over the inputs, in bytes."""
    run, queries = explained(setting, name).runs[setting.rank], 2 * setting.rows * setting.heads[0] * setting.dim
    measured = timed()[setting][f"{name} memory"]["peak Q"] * queries
    return measured, max(run.forward.peak, run.backward.peak)


def peaks() -> Iterator[Row]:
    """Peaks over the inputs in MiB."""
    yield "setting", *(f"{name} {what}" for name in NAMES.values() for what in ("measured", "predicted"))
    for setting in timed():
        cells = (f"{size / 2**20:,.0f}" for name in STRATEGIES for size in peaks_of(setting, name))
        yield told(setting), *cells


# -- predicted times --

FITTED = "flops", "cudnn_rate", "backward_rate", "beyond_diagonal"


def tiles() -> Iterator[tuple[KernelCall, float]]:
    """The tiles of ``bench`` with 32:8 heads of 128, and their seconds. The device waits for the host at their
    beginning, so tiles are left out that take it less than four times as long as the host."""
    for line in record("gpu")[1]:
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

    best, step = replace(H100, beyond_diagonal=128.0), 0.5
    while step > 1e-4:
        factors = 1 + step, 1 / (1 + step)
        moved = [replace(best, **{name: getattr(best, name) * by}) for name in FITTED for by in factors]
        better = min(moved, key=badness)
        best, step = (better, step) if badness(better) < badness(best) else (best, step / 2)
    return best


def predicted() -> Iterator[Row]:
    """Milliseconds of the device in a forward and backward, without messages: predicted with H200, and measured."""
    machine = replace(H200, bandwidth=1e30, latency=0.0)  # in replay.py no message travels
    yield "setting", *(f"{name} {what}" for name in NAMES.values() for what in ("predicted", "on the device", "error"))
    for setting, lines in timed().items():
        cells = []
        for name in STRATEGIES:
            run = explained(setting, name).runs[setting.rank]
            ms = 1e3 * sum(seconds_of(phase, setting.rank, machine).total for phase in (run.forward, run.backward))
            busy = sum(spent for _, spent in lines[f"{name} launches"]["launches"].values())
            cells += [f"{ms:.1f}", f"{busy:.1f}", f"{100 * (ms / busy - 1):+.0f}%"]
        yield told(setting), *cells
