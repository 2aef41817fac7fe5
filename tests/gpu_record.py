"""The record of a run on a GPU: checks one by one, their lines, times, launches and memory.

tests/gpu.py and tests/replay.py share it. It runs on a CPU too, where nothing waits and nothing is launched.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import platform
import pstats
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import tests
from cp_styles.comm.point_to_point import Message
from cp_styles.testing import MemoryTrace

Found = dict[str, Any]
Check = tuple[str, Callable[[], Found]]
"""The name of a cover or setting, and the function that looks at it. "ok" in its result is True by default."""


def tolerance(dtype: torch.dtype) -> float:
    """The largest error that rounding explains, relative to the norm of the full result.

    float64: rounding gives 1e-15, a key too many 1e-2. 16 bits: one rounding to nearest is 0.21 eps in the mean of
    squares, and a gradient has about eight of them (probabilities, their gradients, tiles, sums): 0.6 eps. float32: on
    Hopper a product is three products of TF32, which leave out 2^-22 of it (2 eps), and sums have hundreds of terms.
    """
    if dtype == torch.float64:
        return 1e-12
    return (25 if dtype == torch.float32 else 1.5) * torch.finfo(dtype).eps


def judge(errors: Iterable[float], dtype: torch.dtype, most: float | None = None) -> Found:
    """``errors`` of the output and the gradients, each at most ``most``, by default :func:`tolerance`. nan is bad."""
    errors, most = list(errors), tolerance(dtype) if most is None else most
    found = {"dtype": str(dtype)[6:], "errors": [float(f"{x:.1e}") for x in errors]}
    return {"ok": all(x <= most for x in errors), **found}


def run_checks(case: str, checks: Iterator[Check], **common: Any) -> Iterator[Found]:
    """One line for each check, with ``common`` entries in it. An exception costs one line.

    If it is in the iterator and not in a check, it is the last line.
    """
    while True:
        cover = "before the first cover or between two"
        try:
            entry = next(checks, None)
            if entry is None:
                return
            cover, check = entry
            found = check()
        except Exception as error:
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
        yield {"case": case, "cover": cover, "ok": True, **common, **found}


def device_is_lost() -> bool:
    """Whether an error of CUDA has made the device useless for this process."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


class Record:
    """Lines of JSON in a file, each flushed; a short line for each on the screen; a summary at the end.

    A line has a "case". It may have a "cover", "ok", a "dtype", "errors" and a "note" for the screen.
    """

    def __init__(self, path: Path | None, *, append: bool = False) -> None:
        self._file = path.open("a" if append else "w") if path is not None else None
        self._counts: Counter[bool] = Counter()
        self._bad: list[str] = []
        self._worst: dict[str, float] = {}
        self.unfinished = 0
        """Number of cases that were not run to their end."""

    def write(self, line: Found) -> None:
        if self._file is not None:
            print(json.dumps(line), file=self._file, flush=True)
        text = _short(line)
        print(text, flush=True)
        if "ok" in line:
            self._counts[bool(line["ok"])] += 1
            self._bad += [] if line["ok"] else [text]
        if "dtype" in line and "errors" in line:
            self._worst[line["dtype"]] = max(self._worst.get(line["dtype"], 0.0), *line["errors"])

    def close(self) -> int:
        """Print the summary. Returns the exit status: 1 if a line is bad."""
        print(
            f"\n{self._counts[True]} ok, {self._counts[False]} bad, {self.unfinished} cases not run to their end",
            flush=True,
        )
        for dtype, worst in self._worst.items():
            print(f"worst error, {dtype}: {worst:.1e}", flush=True)
        # The screen of a machine that is lent ends after 12,000 characters.
        for text in self._bad[:20]:
            print(text[:300], flush=True)
        if self._file is not None:
            self._file.close()
        return 1 if self._bad else 0


def _short(line: Found) -> str:
    if "ok" not in line:
        return json.dumps(line)
    worst = f"{max(line['errors']):.1e}" if line.get("errors") else ""
    text = line.get("error") or line.get("note") or f"{line.get('code', '')} {line.get('output', '')[-200:]}".strip()
    rank = f"rank {line['rank']}" if "rank" in line else ""
    words = (line["case"], line.get("cover", ""), rank, worst, " ".join(text.split()))
    return " ".join(("ok " if line["ok"] else "BAD", *filter(None, words)))


def hardware() -> Found:
    """The first line of a record, with nothing that names the machine. ``own tests``: ``tests`` is a namespace package,
    and another package of that name might come before it."""
    found: Found = {"own tests": next(iter(tests.__path__)) == str(Path(__file__).parent), "torch": torch.__version__}
    found["python"] = platform.python_version()
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def messages_of(
    received: torch.Tensor, sent: torch.Tensor, to_receive: list[int], to_send: list[int], rank: int
) -> list[Message]:
    """The messages of an all-to-all of flat buffers, in which this rank's own block is copied here. As in NCCL, empty
    blocks are none."""
    receives, sends = received.split_with_sizes(to_receive), sent.split_with_sizes(to_send)
    receives[rank].copy_(sends[rank])
    pairs = [*((True, each) for each in enumerate(sends)), *((False, each) for each in enumerate(receives))]
    return [(is_sent, *each) for is_sent, each in pairs if each[0] != rank and each[1].numel()]


class SideStream:
    """A stream for messages, as NCCL has one. Without CUDA it does nothing."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Run on this stream, after the work that is queued on the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            yield

    def join(self) -> None:
        """The current stream waits for this one. The host does not."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


# -- times, launches, memory, waits --


def timed(run: Callable[[], Any], repeats: int = 7) -> Found:
    """Medians in ms after one run: of the device, by events, and of the host until the call returns."""
    run()
    device, host = [], []
    for _ in range(repeats):
        if not torch.cuda.is_available():
            begun = time.perf_counter()
            run()
            host.append(time.perf_counter() - begun)
            continue
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        events[0].record()
        begun = time.perf_counter()
        run()
        host.append(time.perf_counter() - begun)
        events[1].record()
        torch.cuda.synchronize()
        device.append(events[0].elapsed_time(events[1]))
    host_ms = statistics.median(host) * 1e3
    return {"ms": round(statistics.median(device) if device else host_ms, 4), "host ms": round(host_ms, 4)}


# The first that is part of a kernel's name. cuDNN's kernels of attention have "flash" in their names too.
_CLASSES = ("cudnn", "flash", "fmha", "merge", "triton", "memcpy", "memset", "reduce", "elementwise", "cat", "index")


def launches(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """How many kernels and copies the device runs, and its time in ms, by class. Empty without CUDA.

    These are events of the device: cuDNN and Triton do not launch by cudaLaunchKernel.
    """
    if not torch.cuda.is_available():
        run()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    times: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((kind for kind in _CLASSES if kind in event.name.lower()), "unknown")
            counts[kind] += 1
            times[kind] += event.time_range.elapsed_us() / 1e3
    return {kind: (count, round(times[kind], 4)) for kind, count in counts.most_common()}


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that are alive at once during ``run``, less those that were before."""
    if not torch.cuda.is_available():
        with MemoryTrace() as trace:
            run()
        return trace.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def host_profile(run: Callable[[], Any], repeats: int = 5) -> Found:
    """Where the host's time goes in ``run``, in ms and calls of one run.

    "host ms": until the call returns, from an idle device ("idle"), in runs one after the other ("busy"), and these in
    one thread ("one thread"), where autograd's own thread of a device is not used. The rest is in one thread too:
    "functions" are the 25 of Python and C with the most time of their own, each (ms, with callees, calls, name), under
    cProfile, which makes calls of Python about twice as slow. "ops" counts torch's operations, and "runtime" has the
    calls of CUDA's runtime with their ms, both from torch's profiler.
    """

    def busy() -> float:
        _synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            run()
        spent = (time.perf_counter() - begun) / repeats
        _synchronize()
        return round(spent * 1e3, 3)

    hosts = {"idle": timed(run, repeats)["host ms"], "busy": busy()}
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.autograd.set_multithreading_enabled(False):
        hosts["one thread"] = busy()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(repeats):
            run()
        profile.disable()
        _synchronize()
        with torch.profiler.profile(activities=activities) as trace:
            run()
            _synchronize()
    counts: Counter[str] = Counter()
    runtime: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CPU:
            counts[event.name] += 1
            runtime[event.name] += event.time_range.elapsed_us() / 1e3
    ops = {name: count for name, count in counts.most_common() if "::" in name}
    # CUDA's runtime and driver: cudaLaunchKernel, cuLaunchKernelEx, cudaEventRecord.
    called = {name: (counts[name], round(ms, 3)) for name, ms in runtime.items() if name.startswith("cu")}
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    functions = [
        (round(own / repeats * 1e3, 3), round(all_of_it / repeats * 1e3, 3), count / repeats, _name(*where))
        for where, (_, count, own, all_of_it, _) in stats.items()
    ]
    calls = round(sum(count for _, _, count, _ in functions))
    found = {"host ms": hosts, "calls": calls, "functions": sorted(functions, reverse=True)[:25]}
    note = f"host {hosts}, {calls} calls, {sum(ops.values())} ops, {sum(count for count, _ in called.values())} of cuda"
    return found | {"ops": dict([*ops.items()][:40]), "runtime": called, "note": note}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _name(file: str, line: int, function: str) -> str:
    """A function, with the last folder and the file of it."""
    return function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"


# Cycles of a kernel that spins: about 0.3 s, many times what the host needs for an attention.
_SPIN = 500_000_000


def waits(run: Callable[[], Any]) -> Found:
    """Whether the host waits for the device in ``run``: CUDA's warnings, and a kernel in front that spins.

    The warnings know neither copies from pageable memory nor torch.distributed. The host must be back before the kernel
    has ended; but it also waits where about a thousand launches are pending, so compare :func:`launches`.
    """
    if not torch.cuda.is_available():
        run()
        return {"warnings": [], "returned first": True}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda._sleep(_SPIN)
            ended = torch.cuda.Event()
            ended.record()
            begun = time.perf_counter()
            run()
            host = time.perf_counter() - begun
            first = not ended.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    texts = [f"{Path(x.filename).name}:{x.lineno} {x.message}"[:160] for x in caught]
    return {"ok": first and not texts, "warnings": texts, "returned first": first, "host ms": round(host * 1e3, 3)}
