"""The tutorial's program on real processes; and wrong ones, which must not pass."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from tests.process.several import Program

SCRIPT = Path(__file__).parents[2] / "tutorials" / "context_parallel_drop_in.py"
RANKS, LENGTH = 3, 37

MISTAKES = {
    "not causal": ("(*cp_qkv, is_causal=True)", "(*cp_qkv)"),
    "in another order": ("for tensor in cp_qkv)], [2] * 4)", "for tensor in cp_qkv)], [2] * 4, contiguous)"),
}

pytestmark = pytest.mark.process


def start(right: str, wrong: str, folder: Path) -> int:
    """The program's whole run, with its exit code."""
    source = SCRIPT.read_text()
    if right:
        assert source.count(right) == 1
        start_of_import = "from cp_styles.torch_api import"
        assert source.count(start_of_import) == 1
        source = source.replace(right, wrong)
        source = source.replace(start_of_import, f"from cp_styles import contiguous\n{start_of_import}")
    sys.argv[1:] = ["--length", str(LENGTH)]
    try:
        exec(compile(source, "tutorial", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("it does not exit")


PROGRAMS = {
    f"tutorial, {name}": Program(RANKS, partial(start, *change))
    for name, change in {"as it is": ("", ""), **MISTAKES}.items()
}


def test_the_tutorials_steps_and_exit_codes_of_mistakes(on_processes):
    for name in ("as it is", *MISTAKES):
        done = on_processes[f"tutorial, {name}"]
        assert done.statuses == [int(name in MISTAKES)] * RANKS, done.said
        lines = [line for text in done.said for line in text.splitlines() if line.startswith("process ")]
        assert len(lines) == 2 * RANKS
        assert all("relative errors" in line for line in lines)
        for method in ("allgather", "alltoall"):
            held = [int(line.split(": ")[1].split(" of ")[0]) for line in lines if method in line]
            assert sum(held) == LENGTH
