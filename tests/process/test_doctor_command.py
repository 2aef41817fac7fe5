"""The command doctor on real processes, as its page starts it, and with a process that is killed in a check."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cp_styles.doctor import checks, command
from cp_styles.doctor.ranks import Line, World

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process


def start(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, command)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_of_the_page(tmp_path: Path):
    path, page = tmp_path / "doctor.json", (ROOT / "tutorials/gpus.md").read_text()
    (command,) = re.findall(r"<!-- command: doctor -->\n```bash\ntorchrun --nproc-per-node 8 (.*?)\n```", page)
    done = start(*command.split(), "--device", "cpu", "--json", path)
    first, *_, last = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert first == "cp_styles doctor: 2 ranks on cpu, timeout 30 s"
    assert last == "all 27 checks passed, 1 skipped"
    assert "doctor: rank" not in done.stderr
    rows = {row["check"]: row for row in json.loads(path.read_text())["checks"]}
    assert [name for name, row in rows.items() if row["state"] != "ok"] == ["ulysses, ring inside"]
    assert "threads of a rank: 1; " in rows["hosts and devices"]["result"]
    assert done.stdout.count("\n") < 60  # of rank 0 alone


def end(world: World) -> Line:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return Line("well")


@pytest.mark.nightly  # ranks that are threads hear of an error in the same way
def test_a_process_that_is_killed():
    """The remaining rank says in which check, and why, before torchrun ends it too."""
    done = start(__file__)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].split() == ["a", "planted", "end"]
    assert ", 'a planted end': RuntimeError: " in done.stderr
    assert "Signal 9 (SIGKILL) received" in done.stderr


if __name__ == "__main__":
    command.checks_of = lambda size: iter([("process group", checks.check_group), ("a planted end", end)])
    command.main(["doctor", "--device", "cpu"])
