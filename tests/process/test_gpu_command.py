"""tests/gpu.py on a machine without a GPU: its plan, its record, that nothing outlives a case; and its README."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cp_styles.comm import point_to_point
from tests import device, gpu, replay
from tests.covering import at_night
from tests.cuda_ops import cuda_ops_on_cpu
from tests.gpu_record import run_checks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu.py itself")
PLAN = gpu.plan(0)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(gpu, "STAND_INS", True)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")


def run(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", [gpu.__file__, *args])
    monkeypatch.setattr(gpu, "BEGUN", gpu.time.monotonic())
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
        *("kernels", "nccl", "ranks", "job", "bench", "compile", "grid")
    ]
    assert len([line for line in lines if line["stage"] == "kernels"]) == 52


def test_a_kernel_has_one_process(monkeypatch, tmp_path, stand_ins):
    """One setting can be chosen; all chosen settings of a kernel share a process."""
    shared = []
    monkeypatch.setattr(gpu.Processes, "lines", lambda self, names: shared.append(names) or iter([]))
    out = ["--out", str(tmp_path / "record.jsonl")]
    run(monkeypatch, *out, "--only", "kernels flash bfloat16 D=128 G=8")
    assert shared.pop() == ["kernels flash bfloat16 D=128 G=8"]
    run(monkeypatch, *out, "--only", "kernels", "bench flash")
    assert [len(names) for names in shared] == [16, 24, 12, 2]
    assert all(len({" ".join(name.split()[:2]) for name in names}) == 1 for names in shared)


BY_DAY = ("kernels flash bfloat16 D=64 G=1", "kernels efficient float32 D=64 G=8")
OTHERS = [name for name, case in PLAN.items() if case.stage == "kernels" and name not in BY_DAY]


@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*OTHERS)])
@pytest.mark.parametrize("which", ["right", "wrong"])
def test_cases_of_kernels_on_stand_ins(name: str, which: str, stand_ins, monkeypatch):
    """And that every cover notices what is wrong: a scale that is a percent too large."""
    if which == "wrong":
        forward = gpu.ByTile.forward
        monkeypatch.setattr(
            gpu.ByTile,
            "forward",
            lambda self, *x, scale, **options: forward(self, *x, scale=1.1 * scale, **options),
        )
    with cuda_ops_on_cpu():
        lines = [*run_checks(name, PLAN[name].run())]
    assert {line["ok"] for line in lines} == {which == "right"}, lines
    assert len(lines) >= 7
    assert all(len(line["torch"]) == 4 for line in lines if "packed" not in line["cover"])


def test_torchs_own_error_costs_nothing(stand_ins, monkeypatch):
    """Then ours is judge by what rounding explains, in packs and merges too."""

    def raises(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(gpu, "torchs_attention", raises)
    with cuda_ops_on_cpu():
        lines = [*run_checks("", PLAN["kernels flash bfloat16 D=64 G=8"].run())]
    assert all(line["ok"] for line in lines), lines
    assert {line.get("torch's error") for line in lines} == {"RuntimeError: no kernel", None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_torchs_errors_explain(dtype: torch.dtype):
    expected = [torch.ones(8, dtype=torch.float64), torch.full((8,), 3.0, dtype=torch.float64)]
    eps = torch.finfo(dtype).eps

    def ok(mine: float, baseline: list[float] | None) -> bool:
        return gpu.compare_tile([(expected[0] * (1 + mine)).to(dtype), expected[1].to(dtype)], expected, baseline)["ok"]

    for baseline in ([math.inf, 0.0], [math.nan, 0.0], None):
        assert ok(eps, baseline)
        assert not ok(40 * eps, baseline)
        assert not ok(math.nan, baseline)
        assert not ok(math.inf, baseline)
    assert ok(8 * eps, [8 * eps, 0.0])
    assert ok(8 * eps, [0.0, 0.0]) == (dtype == torch.float32)


@pytest.mark.nightly  # by default one case, below
@pytest.mark.process
def test_nothing_outlives_a_case(tmp_path, stand_ins, monkeypatch, capsys):
    """A case that leaves a process behind; one that takes too long, whose covers have their lines; one that ends its
    process, after which the next one has a process of its own."""
    out = tmp_path / "record.jsonl"
    assert run(monkeypatch, "--out", str(out), "--only", "self") == 1
    hardware, *lines = map(json.loads, out.read_text().splitlines())
    assert hardware["torch"] == torch.__version__
    assert hardware["own tests"]
    covers = {(line["case"], line.get("cover")): line for line in lines}
    status = Path(f"/proc/{covers['self, leaving', 'left']['left']}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
    assert [(cover, line["ok"]) for (case, cover), line in covers.items() if case == "self, late"] == [
        ("first", True), ("raises", False), ("third", True), (None, False)
    ]  # fmt: skip
    assert covers["self, late", "raises"]["error"] == "KeyError: 'nothing'"
    assert covers["self, late", None]["code"] == "ended after 3 s"
    assert covers["self, crash", None]["code"] == 7
    assert covers["self, next", None]["ok"]
    summary = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert summary[0] == "6 ok, 3 bad, 0 cases not run to their end"
    rest = tmp_path / "rest.jsonl"
    assert run(monkeypatch, "--out", str(rest), "--only", "self", "--resume", str(out)) == 0
    assert [json.loads(line) for line in rest.read_text().splitlines()] == [hardware]
    assert run(monkeypatch, "--out", str(rest), "--only", "self", "--total", "19") == 0
    assert [json.loads(line) for line in rest.read_text().splitlines()] == [hardware]
    assert "0 ok, 0 bad, 4 cases not run to their end" in capsys.readouterr().out


@pytest.mark.process
def test_a_case_ends_when_the_time_of_all_is_over(tmp_path, stand_ins, monkeypatch):
    out = tmp_path / "record.jsonl"
    monkeypatch.setitem(gpu.HIDDEN, "self, late", gpu.HIDDEN["self, late"]._replace(seconds=60))
    monkeypatch.setattr(gpu, "LEAST", 0.0)
    assert run(monkeypatch, "--out", str(out), "--only", "self, late", "--total", "4") == 1
    assert json.loads(out.read_text().splitlines()[-1])["code"].startswith("ended after")


def test_two_ranks_of_the_job_share_a_gpu(monkeypatch):
    """Both on device 0, without NCCL, with messages over the host; the job knows nothing of it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu.plan(1)["job"].ranks == 2
    places = []
    monkeypatch.setattr(
        gpu.subprocess,
        "Popen",
        lambda command, env: (
            places.append((env["RANK"], env["LOCAL_RANK"])) or SimpleNamespace(poll=lambda: 0, wait=lambda _: 0)
        ),
    )
    assert gpu.run_ranks("job", 2) == 0
    assert places == [("0", "0"), ("1", "0")]

    seen = {}

    def train() -> int:
        seen["argv"] = sys.argv[1:5]
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(days=1))
        seen["messages"] = point_to_point.move_batch("batch", "group", 0)  # pyright: ignore[reportArgumentType]
        return 0

    real = point_to_point.move_batch, dist.all_reduce
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: seen.update(backend=backend))
    monkeypatch.setattr(device, "Staged", lambda *batch: batch)
    monkeypatch.setitem(sys.modules, "train_llama", SimpleNamespace(main=train))  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "picture", SimpleNamespace())  # pyright: ignore[reportArgumentType]
    (line,) = run_checks("job", gpu.job())
    assert line["ok"]
    assert seen == {
        "argv": ["--cp", "2", "--tp", "1"],
        "backend": "cpu:gloo,cuda:gloo",
        "messages": ("batch", "group", 0),
    }
    assert real == (point_to_point.move_batch, dist.all_reduce)


@pytest.mark.nightly
@pytest.mark.process
def test_cases_of_several_ranks_on_stand_ins(tmp_path):
    """In the plan's own way: with messages over the host, the main job, compiled FlexAttention, rows of the grid."""
    out = tmp_path / "record.jsonl"
    names = ["ranks ring bfloat16", "job", "compile flex", "grid"]
    command = [sys.executable, gpu.__file__, "--stand-ins", "--out", str(out), "--only", *names]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0, out.read_text()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["case"] for line in lines if "cover" not in line and "case" in line} == {*names}
    flex = [line for line in lines if line.get("cover") == "flex"]
    assert [line["slices"] > 0 for line in flex] == [True, True]


# -- tests/records/README.md --

PAGE = (Path(gpu.__file__).parent / "records" / "README.md").read_text()
CALLS = re.findall(r"\*\*Call \d: at most (\d+) s\.\*\*.*?```bash\n(.*?)```", PAGE, re.DOTALL)


def test_the_calls_of_the_page(monkeypatch, capsys):
    """Each is accepted by its script, chooses cases, and ends before its limit; together they take fifteen minutes."""
    assert [int(limit) for limit, _ in CALLS] == [430, 250, 90]
    for limit, block in CALLS:
        assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0
        seconds = 0
        lines = block.replace("\\\n", " ")
        for most, script, args in re.findall(r"timeout (\d+) python3 tests/(gpu|replay)\.py (.*)", lines):
            seconds += int(most)
            words = shlex.split(args.partition("2>&1")[0])
            module = {"gpu": gpu, "replay": replay}[script]
            options = module.parser().parse_args(words)
            assert options.total < int(most)
            assert str(options.out).startswith("$OUT/")
            monkeypatch.setattr(sys, "argv", [module.__file__, *words, "--dry-run"])
            assert module.main() == 0
            cases = [json.loads(line)["case"] for line in capsys.readouterr().out.splitlines()]
            for start in options.only:
                assert any(case.startswith(start) for case in cases), start
        assert seconds < int(limit)
        assert seconds
    assert sum(int(limit) for limit, _ in CALLS) + 120 <= 15 * 60  # a start takes one or two minutes


def test_the_table_of_the_page_names_lines_that_there_are():
    covers = {cover for setting in replay.settings() for cover, _ in replay.times(setting)} | {*replay.WAYS}
    table = PAGE.partition("| question |")[2].partition("\n\n")[0]
    named = [name for name in re.findall(r"`([^`]*)`", table) if not name.startswith("$")]
    known = {*covers, *PLAN, *(case.stage for case in PLAN.values())}
    assert named
    for name in named:
        assert any(start.startswith(name) for start in known) or name in ("peak Q", "formula Q"), name


def test_no_copy_of_the_environment_is_needed():
    """expecttest is not on every machine with a GPU."""
    root, seen, todo = Path(gpu.__file__).parents[1], set[str](), ["tests/gpu", "tests/replay"]
    while todo:
        if (name := todo.pop()) not in seen and (file := root / f"{name}.py").exists():
            seen.add(name)
            text = file.read_text()
            assert "expecttest" not in text, name
            for module, names in re.findall(r"^\s*from (tests[\w.]*) import ([^\n(]+|\([^)]*)", text, re.MULTILINE):
                folder = module.replace(".", "/")
                todo += [folder, *(f"{folder}/{each}" for each in re.findall(r"\w+", names))]
    assert "tests/oracle" in seen
