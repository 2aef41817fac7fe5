"""The main job as a user starts it: real processes under torchrun, on few and short steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tutorials" / "train_llama.py"

pytestmark = pytest.mark.process


def start(ranks: int, *arguments: object, script: Path = SCRIPT) -> subprocess.CompletedProcess:
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("cp", "tp", "strategy", "layout"), [(2, 2, "ring", "head_tail"), (3, 1, "allgather", "contiguous")]
)
def test_the_same_training_as_on_one_process(tmp_path, cp, tp, strategy, layout):
    picture = tmp_path / "new folder" / "run.png"
    options = ["--cp", cp, "--tp", tp, "--strategy", strategy, "--layout", layout, "--out", picture]
    done = start(cp * tp, *options, "--steps", 2, "--seq-len", 192)
    assert done.returncode == 0, done.stderr
    assert "PARITY: the same training as on one process" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


# What a training under context parallelism is most often wrong by; each must be seen after two steps.
SABOTAGE = {
    "gradients left unsummed": "job.sum_gradients = lambda *args: None",
    "labels rolled after the cut": """
def roll_late(batch, layout, rank, *, seq_dims):
    mine = original(batch, layout, rank, seq_dims=seq_dims)
    return mine | {"labels": job.next_token_labels(mine["tokens"])}
original, job.shard_batch = job.shard_batch, roll_late
""",
    "positions that start at 0 on every rank": """
job.SequenceLayout.positions = lambda self, rank, device=None: job.torch.arange(self.lengths[rank], device=device)
""",
}


@pytest.mark.parametrize("change", SABOTAGE.values(), ids=SABOTAGE)
def test_what_is_wrong_is_seen_and_fails(tmp_path, change):
    script = tmp_path / "sabotaged.py"
    script.write_text(f"import sys\nimport train_llama as job\n{change}\nsys.exit(job.main())\n")
    options = ["--cp", 2, "--tp", 1, "--out", tmp_path / "run.png"]
    done = start(2, *options, "--steps", 2, "--seq-len", 192, script=script)
    assert done.returncode != 0
    assert "PARITY MISSED" in done.stdout, done.stderr


def test_a_bad_value_gets_one_line_from_one_rank():
    done = start(2, "--cp", 2, "--tp", 1, "--seq-len", 1)
    said = [line for line in done.stderr.splitlines() if line.startswith("train_llama.py: ")]
    assert said == [
        "train_llama.py: --seq-len 1 does not give every one of 2 cp ranks a multiple of 1 tokens: try 4",
    ]
    assert done.returncode != 0
    assert done.stdout == ""


def test_without_torchrun_it_says_how():
    done = start(0)
    assert done.returncode == 2
    assert done.stderr == (
        "train_llama.py: start it with torchrun: torchrun --nproc-per-node 4 tutorials/train_llama.py\n"
    )
