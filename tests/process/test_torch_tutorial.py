"""The tutorial's program under torchrun, on real processes; and wrong ones, which must not pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tutorials" / "context_parallel_drop_in.py"

pytestmark = pytest.mark.process


def torchrun(script: Path, ranks: int, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, script, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=240
    )


MISTAKES = {
    "not causal": ("(*cp_qkv, is_causal=True)", "(*cp_qkv)"),
    "in another order": ("for tensor in cp_qkv)], [2] * 4)", "for tensor in cp_qkv)], [2] * 4, contiguous)"),
}


def test_the_tutorials_steps_and_exit_codes_of_mistakes(tmp_path):
    """Each is the program's whole run, one after another in the same processes, whose start takes longer."""
    ranks, length, source = 3, 37, SCRIPT.read_text()
    programs = {"as it is": source}
    for name, (right, wrong) in MISTAKES.items():
        assert source.count(right) == 1
        programs[name] = source.replace(right, wrong).replace(
            "import context_parallel,", "import contiguous, context_parallel,"
        )
    script = tmp_path / "mistakes.py"
    script.write_text(
        f"""
from tests.process import several

def run(source):
    try:
        exec(compile(source, "mistake", "exec"), {{"__name__": "__main__"}})
    except SystemExit as end:
        return end.code

several.run({{name: lambda source=source: run(source) for name, source in {programs!r}.items()}})
"""
    )
    done = torchrun(script, ranks, "--length", length)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str({"as it is": 0} | dict.fromkeys(MISTAKES, 1)), done.stdout
    assert "relative errors" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("process ")]
    assert len(lines) == len(programs) * 2 * ranks
    for method in ("allgather", "alltoall"):
        held = [int(line.split(": ")[1].split(" of ")[0]) for line in lines if method in line]
        assert sum(held[:ranks]) == length
