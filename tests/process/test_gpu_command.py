"""tests/gpu.py on a machine without a GPU: its plan, what it writes down, and that nothing outlives a case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu
from tests.covering import at_night
from tests.cuda_ops import cuda_ops_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu.py itself")
PLAN = gpu.plan(0)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(gpu, "STAND_INS", True)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")


def run(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", [gpu.__file__, *args])
    return gpu.main()


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    out = tmp_path / "record.jsonl"
    assert run(monkeypatch, "--out", str(out)) == 2
    said = capsys.readouterr()
    assert "no GPU here" in said.out
    assert not said.err
    assert not out.exists()


def test_the_plan(monkeypatch, capsys):
    assert run(monkeypatch, "--dry-run") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == [*PLAN]
    assert max(line["seconds"] for line in lines) < 600
    assert [*dict.fromkeys(line["stage"] for line in lines)] == [
        *("kernels", "nccl", "ranks", "bench", "compile", "job", "grid")
    ]


BY_DAY = ("kernels flash bfloat16 D=64 G=1", "kernels efficient float32 D=64 G=8", "kernels cuDNN float16 D=64 G=8")
OTHERS = [name for name, case in PLAN.items() if case.stage == "kernels" and name not in BY_DAY]


@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*OTHERS)])
@pytest.mark.parametrize("which", ["right", "wrong"])
def test_cases_of_kernels_on_stand_ins(name: str, which: str, stand_ins, monkeypatch):
    """And that a case notices what is wrong: a scale that is a percent too large."""
    if which == "wrong":
        forward = gpu.ByTile.forward
        monkeypatch.setattr(
            gpu.ByTile,
            "forward",
            lambda self, *x, scale, **options: forward(self, *x, scale=1.1 * scale, **options),
        )
    with cuda_ops_on_cpu():
        found = PLAN[name].run()
    assert bool(found["bad"]) == (which == "wrong")
    assert found["checked"] >= 7


@pytest.mark.process
def test_nothing_outlives_a_case(tmp_path, stand_ins, monkeypatch, capsys):
    """A case that leaves a process behind, and one that takes too long; each has its line."""
    out = tmp_path / "record.jsonl"
    assert run(monkeypatch, "--out", str(out), "--only", "self") == 1
    assert capsys.readouterr().out == out.read_text()
    hardware, leaving, late = map(json.loads, out.read_text().splitlines())
    assert hardware["torch"] == torch.__version__
    assert leaving["ok"]
    status = Path(f"/proc/{leaving['found'][0]['left']}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
    assert not late["ok"]
    assert late["code"] == "ended after 1 s"
    rest = tmp_path / "rest.jsonl"
    assert run(monkeypatch, "--out", str(rest), "--only", "self", "--resume", str(out)) == 0
    assert [json.loads(line) for line in rest.read_text().splitlines()] == [hardware]
    assert run(monkeypatch, "--out", str(rest), "--only", "self", "--total", "19") == 0
    assert not rest.read_text()


@pytest.mark.nightly
@pytest.mark.process
def test_cases_of_several_ranks_on_stand_ins(tmp_path):
    """In the plan's own way: with messages over the host, the main job, and rows of the grid."""
    out = tmp_path / "record.jsonl"
    names = ["ranks ring bfloat16", "job", "grid"]
    command = [sys.executable, gpu.__file__, "--stand-ins", "--out", str(out), "--only", *names]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0, out.read_text()
    assert len(out.read_text().splitlines()) == 1 + len(names)
