"""tests/replay.py on a machine without a GPU: exact, loud about a wrong message, and what it writes down."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_styles.kernels import packing
from cp_styles.kernels.merge import TorchMerge
from tests import gpu_record, replay
from tests.covering import at_night
from tests.cuda_ops import DEFAULT, ON_GPU, cuda_ops_on_cpu
from tests.gpu_record import Record, judge, launches, run_checks, tolerance, waits
from tests.gpu_tensors import gpus, put, read
from tests.oracle import attention_inputs, error, expected_attention
from tests.replay import MOVING_KEYS, WAYS, Problem, Recorded, Setting, exact, times

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/replay.py itself")
SMALL = Problem("causal", torch.float64, 4, 8, (4, 2), 8)


def lines_of(problem: Problem, **options: Any) -> dict[str, dict[str, Any]]:
    return {line["cover"]: line for line in run_checks(problem.name, exact(problem, **options))}


@pytest.mark.parametrize("mask", ["causal", "documents", *at_night("window", "full")])
def test_all_ranks_are_one_device(mask: str):
    lines = lines_of(SMALL._replace(mask=mask))
    assert [*lines] == [*WAYS]
    assert all(line["ok"] and max(line["errors"]) < 1e-12 for line in lines.values()), lines
    bits = {name: line["bits of torch's"] for name, line in lines.items() if "bits of torch's" in line}
    assert [*map(len, bits.values())] == ([4] if mask in ("causal", "full") else [])


def test_all_ranks_are_one_device_on_stand_ins():
    with cuda_ops_on_cpu() as seen:
        lines = lines_of(SMALL._replace(mask="documents", ranks=8, ways=MOVING_KEYS), kernel=DEFAULT)
    assert all(line["ok"] for line in lines.values()), lines
    assert seen.calls["_flash_attention_backward"]


@pytest.mark.nightly
def test_messages_in_batches():
    """The way of CUDA: a batch of messages for tensors of a GPU, whose host never waits."""
    inputs, grad = attention_inputs(length=SMALL.length, batch=1, heads=4, kv_heads=2, dim=8)
    expected = expected_attention(inputs, grad, SMALL.masks()[1])
    with gpus(verified=False):
        given = [put(x) for x in (*inputs, grad)]
        for way in WAYS.values():
            found = replay.results_of_ranks(SMALL, way, given, ON_GPU, Recorded())
            assert max(error(read(x), y) for x, y in zip(found, expected, strict=True)) < 1e-12


def test_every_pass_is_needed():
    """And that a message of an earlier pass is noticed: with one pass less, the last messages are those."""
    fewer = {name: way._replace(passes=way.passes - 1) for name, way in WAYS.items()}
    lines = lines_of(SMALL._replace(ways=fewer))
    assert not any(line["ok"] for line in lines.values()), lines


class OneIsLost(Recorded):
    """The last message of rank 0 in the last pass never comes."""

    def world(self, rank: int, ranks: int):
        self.rank = rank
        return super().world(rank, ranks)

    def filled(self, channel, tensor) -> None:
        super().filled(channel, tensor)
        if self.rank == 0 and self._received[channel] == len(self._before.get(channel, ())):
            tensor.zero_()


def test_a_message_that_is_lost_is_bad():
    lines = lines_of(SMALL, transport=OneIsLost)
    assert [*lines] == [*WAYS]
    assert not any(line["ok"] for line in lines.values()), lines


def test_the_cases(monkeypatch, capsys):
    """On a GPU too: every strategy, every mask, 4 and 8 ranks; and each size is a multiple of what its layout cuts."""
    for cuda in (False, True):
        monkeypatch.setattr(replay, "CUDA", cuda)
        every = [*replay.problems()]
        assert {problem.mask for problem in every} == {"causal", "window", "documents", "full"}
        assert {problem.ranks for problem in every} == {4, 8}
        assert {name for problem in every for name in problem.ways} == set(WAYS)
        assert len({problem.name for problem in every}) == len(every)
        timed = [*replay.settings(cuda=cuda)]
        assert len({setting.name for setting in timed}) == len(timed) == (14 if cuda else 3)
    assert {problem.dtype for problem in every} == {torch.bfloat16, torch.float16, torch.float32}
    monkeypatch.setattr(replay, "CUDA", False)
    assert run(monkeypatch, "--dry-run", "--only", "full float64 P=8") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def run(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", [replay.__file__, *args])
    monkeypatch.setattr(replay, "BEGUN", replay.time.monotonic())
    return replay.main()


def test_the_record(tmp_path, monkeypatch, capsys):
    """Each line is in the file before the next one is made. An exception costs one line, and the exit status is 1."""
    out, lengths = tmp_path / "record.jsonl", []
    real = replay.results_of_ranks

    def fails_once(problem, way, *rest):
        lengths.append(len(out.read_text().splitlines()))
        if way is WAYS["all-gather"]:
            raise RuntimeError("out of memory")
        return real(problem, way, *rest)

    monkeypatch.setattr(replay, "results_of_ranks", fails_once)
    assert run(monkeypatch, "--out", str(out), "--only", "causal float64 P=4 rows=16 4:2") == 1
    assert lengths == [1, 2, 3, 4, 5]
    first, *lines = map(json.loads, out.read_text().splitlines())
    assert first["own tests"]
    assert {line["cover"]: line["ok"] for line in lines} == {name: name != "all-gather" for name in WAYS}
    said = capsys.readouterr().out.splitlines()
    assert "4 ok, 1 bad, 0 cases not run to their end" in said
    assert "worst error, float64" in said[-2]
    assert said[-1].startswith("BAD causal float64 P=4")
    assert said[-1].endswith("all-gather RuntimeError: out of memory")


def test_a_run_with_another_constant(tmp_path, monkeypatch):
    """The constant is another one while the cases run, and the record says so."""
    out, seen = tmp_path / "record.jsonl", []
    monkeypatch.setattr(replay, "results_of_ranks", lambda *_: seen.append(packing.FEW_ROWS) or 1 / 0)
    constant, only = "cp_styles.kernels.packing.FEW_ROWS=7", "causal float64 P=4 rows=16 4:2"
    assert run(monkeypatch, "--set", constant, "--out", str(out), "--only", only) == 1
    assert {*seen} == {7}
    assert json.loads(out.read_text().splitlines()[0])["set"] == {"cp_styles.kernels.packing.FEW_ROWS": 7}
    assert packing.FEW_ROWS == 64 * 128
    with pytest.raises(AttributeError, match="FEW"):
        run(monkeypatch, "--set", "cp_styles.kernels.packing.FEW=7")


def test_what_there_is_no_time_for(monkeypatch, capsys):
    assert run(monkeypatch, "--total", "0", "--only", "causal float64 P=4") == 0
    assert "0 ok, 0 bad, 2 cases not run to their end" in capsys.readouterr().out


def test_nothing_runs_on_a_device_that_is_lost(monkeypatch, capsys):
    monkeypatch.setattr(replay, "results_of_ranks", lambda *_: 1 / 0)
    monkeypatch.setattr(replay, "device_is_lost", lambda: True)
    assert run(monkeypatch, "--only", "causal float64 P=4") == 1
    assert "0 ok, 1 bad, 2 cases not run to their end" in capsys.readouterr().out


def test_an_exception_between_covers_costs_the_rest_of_a_case():
    def checks() -> Iterator[gpu_record.Check]:
        yield "first", dict
        raise RuntimeError("no kernel")

    first, last = run_checks("case", checks())
    assert first["ok"]
    assert not last["ok"]
    assert last["error"] == "RuntimeError: no kernel"


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_times(mask: str):
    setting = Setting(mask, 4, 1, 64, (8, 2), 8)
    lines = {line["cover"]: line for line in run_checks(setting.name, times(setting))}
    assert all(line["ok"] for line in lines.values()), lines
    looks = ("times", "launches", "memory", "waits")
    ours = [f"{name} {look}" for name in ("ring", "ulysses") for look in looks]
    assert [*lines] == (["torch"] if mask == "causal" else []) + ours
    assert ("share of ideal f+b" in lines["ring times"]) == (mask == "causal")
    # From each of 3 ranks: keys and gradients of keys, some by groups of heads; of Ulysses one at each of 4 exchanges.
    assert lines["ring launches"]["messages"] >= (6 if mask == "causal" else 1)
    assert lines["ulysses launches"]["messages"] == 12
    for name in ("ring", "ulysses"):
        memory = lines[f"{name} memory"]
        assert memory["peak Q"] == pytest.approx(memory["formula Q"], abs=0.01)  # indices are not in the formula
        assert sum(memory["parts Q"].values()) == pytest.approx(memory["formula Q"], abs=0.01)


@dataclass(frozen=True)
class Noted(TorchMerge):
    """Torch's merge, with a count of its tiles."""

    tiles: list[int] = field(default_factory=list, compare=False)

    def __call__(self, out_BHLE, lse_BHL, new_out_BHLE, new_lse_BHL, index=None):
        self.tiles.append(new_out_BHLE.shape[2])
        super().__call__(out_BHLE, lse_BHL, new_out_BHLE, new_lse_BHL, index)


def test_merges_are_timed_side_by_side(monkeypatch):
    """The first setting runs with the merge that is chosen, and with torch's: the ring merges three tiles."""
    noted = Noted()
    assert [setting.merge for setting in replay.settings()][:2] == ["", "torch's merge"]
    monkeypatch.setitem(replay.MERGES, "torch's merge", noted)
    for merge in ("", "torch's merge"):
        assert not noted.tiles
        lines = [*run_checks("", times(Setting("causal", 4, 1, 16, (2, 2), 8, merge=merge)))]
        assert all(line["ok"] for line in lines), lines
    assert noted.tiles
    assert len(noted.tiles) % 3 == 0


def test_the_profile_of_the_host():
    """Calls, operations and times are those of one run."""
    x = torch.ones(2)

    def run() -> None:
        for _ in range(3):
            x.add(abs(-1))

    found = gpu_record.host_profile(run, repeats=2)
    calls = {name: count for _, _, count, name in found["functions"]}
    assert calls["<built-in method builtins.abs>"] == 3
    assert calls[next(name for name in calls if name.endswith(" run"))] == 1
    assert found["ops"]["aten::add"] == 3
    assert found["runtime"] == {}
    assert [*found["host ms"]] == ["idle", "busy", "one thread"]


def test_profiles_of_settings():
    setting = Setting("causal", 2, 1, 32, (2, 2), 8)
    lines = {line["cover"]: line for line in run_checks(setting.name, times(setting, profile=True))}
    assert [*lines] == [f"{name} profile {phase}" for name in ("ring", "ulysses") for phase in ("f", "f+b")]
    assert all(line["ok"] for line in lines.values()), lines
    for name in ("ring", "ulysses"):
        assert lines[f"{name} profile f"]["calls"] < lines[f"{name} profile f+b"]["calls"]


def test_the_share_of_ideal(monkeypatch):
    """P x torch / ours: torch has the rows of one rank, forward 1 ms and both 3; ours takes 5 and 8."""
    clocks = iter([1.0, 3.0, 5.0, 8.0])
    monkeypatch.setattr(replay, "timed", lambda *_: {"ms": next(clocks), "host ms": 0.5})
    lines = run_checks("", times(Setting("causal", 4, 1, 64, (8, 2), 8)))
    next(lines)
    ours = next(lines)
    assert (ours["share of ideal f"], ours["share of ideal f+b"]) == (0.8, 1.5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_no_number_is_bad(wrong: float):
    assert judge([1e-13], torch.float64)["ok"]
    assert not judge([1e-13, wrong], torch.float64)["ok"]
    assert tolerance(torch.float64) < 1e-11


def test_bad_lines_are_repeated_in_the_summary(tmp_path, capsys):
    record = Record(tmp_path / "record.jsonl")
    for cover, errors in {"one": [1e-3, 2e-3], "two": [1.0, 1e-3]}.items():
        record.write({"case": "case", "cover": cover, **judge(errors, torch.bfloat16)})
    assert record.close() == 1
    summary = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert summary == [
        "1 ok, 1 bad, 0 cases not run to their end",
        "worst error, bfloat16: 1.0e+00",
        "BAD case two 1.0e+00",
    ]


# -- lines that need CUDA, on stand-ins of torch.cuda --


class Cuda:
    """Functions of torch.cuda. ``ended``: the kernel that spins has ended when the call returns."""

    def __init__(self, monkeypatch) -> None:
        self.ended, self.modes = False, []
        for name in ("synchronize", "_sleep"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.modes.append)
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=list, query=lambda: self.ended))


def test_waits_of_the_host(monkeypatch):
    cuda = Cuda(monkeypatch)
    assert waits(list)["ok"]
    found = waits(lambda: gpu_record.warnings.warn("called a synchronizing CUDA operation", stacklevel=1))
    assert not found["ok"]
    assert "synchronizing" in found["warnings"][0]
    cuda.ended = True
    assert not waits(list)["ok"]
    with pytest.raises(KeyError):
        waits(lambda: {}[0])
    assert cuda.modes == ["warn", "default"] * 4


def test_times_of_device_and_host(monkeypatch):
    """Of the device between two events, of the host until the call returns; medians, after a run that is not timed."""
    Cuda(monkeypatch)
    elapsed, runs, made = iter([9.0, 4.0, 5.0]), [], []

    def event(enable_timing):
        assert enable_timing
        name = ("first", "second")[len(made) % 2]
        made.append(SimpleNamespace(name=name, record=lambda: runs.append(name), elapsed_time=between))
        return made[-1]

    def between(end) -> float:
        assert end.name == "second"
        return next(elapsed)

    monkeypatch.setattr(torch.cuda, "Event", event)
    found = gpu_record.timed(lambda: runs.append("run"), repeats=3)
    assert found["ms"] == 5.0
    assert found["host ms"] < 5.0
    assert runs == ["run", *["first", "run", "second"] * 3]


def test_launches_are_events_of_the_device(monkeypatch):
    Cuda(monkeypatch)
    names = {
        "cudnn_generated_sm90_flash_fprop": "CUDA",
        "void flash_fwd_kernel": "CUDA",
        "Memcpy DtoD": "CUDA",
        "cudaLaunchKernel": "CPU",
    }
    events = [
        SimpleNamespace(
            name=name,
            device_type=getattr(torch.autograd.DeviceType, device),
            time_range=SimpleNamespace(elapsed_us=lambda: 1500.0),
        )
        for name, device in names.items()
        for _ in range(2)
    ]

    class Profile:
        def __init__(self, activities) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

        def events(self):
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    assert launches(list) == {"cudnn": (2, 3.0), "flash": (2, 3.0), "memcpy": (2, 3.0)}


def test_messages_move_on_a_stream_of_their_own(monkeypatch):
    """What is read context was started before; what reads it afterwards waits, and not the host."""
    did = []

    class Stream:
        def __init__(self, name="side") -> None:
            self.name = name

        def wait_stream(self, other) -> None:
            did.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: gpu_record.contextlib.nullcontext(did.append("on it")))
    side = gpu_record.SideStream()
    with side.context():
        did.append("copy")
    side.join()
    assert did == ["side waits for current", "on it", "copy", "current waits for side"]
