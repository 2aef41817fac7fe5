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


# The library begins with a file of 5 KB, and then four that are short: most of them are in the last of these sequences.
PACKED = ["--documents", "--steps", 3, "--seq-len", 1900]


@pytest.mark.parametrize(
    ("cp", "tp", "strategy", "layout"), [(2, 2, "ring", "per_document_head_tail"), (4, 1, "hybrid", "by_work")]
)
def test_the_same_training_as_on_one_process(tmp_path, cp, tp, strategy, layout):
    picture = tmp_path / "new folder" / "run.png"
    options = ["--cp", cp, "--tp", tp, "--strategy", strategy, "--layout", layout, "--out", picture]
    done = start(cp * tp, *options, *PACKED)
    assert done.returncode == 0, done.stderr
    assert "PARITY: the same training as on one process" in done.stdout
    assert "packs 5 documents" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_one_process_to_compare_with(tmp_path):
    done = start(1, "--cp", 1, "--tp", 1, "--steps", 1, "--seq-len", 64, "--no-compare", "--out", tmp_path / "run.png")
    assert done.returncode == 0, done.stderr
    assert "the ranks agree; not compared with one process" in done.stdout
    assert "one process:" not in done.stderr  # no second training


# What a training under context parallelism is most often wrong by; each must be seen after two steps.
SABOTAGE = {
    "gradients left unsummed": """
job.sum_gradients = lambda *args: None
only_warn = cp_styles.GradientCheck(only_warn=True)  # so that there is something to compare
job.AttentionContextParallel = functools.partial(job.AttentionContextParallel, gradient_check=only_warn)
""",
    "labels rolled after the cut": """
def roll_late(batch, layout, rank, *, seq_dims):
    mine = original(batch, layout, rank, seq_dims=seq_dims)
    return mine | {"labels": job.next_token_labels(mine["tokens"])}
original, job.shard_batch = job.shard_batch, roll_late
""",
    "positions that start at 0 on every rank": """
def begin_anew(batch, layout, rank, *, seq_dims):
    mine = original(batch, layout, rank, seq_dims=seq_dims)
    return mine | {"positions": job.torch.arange(layout.lengths[rank])}
original, job.shard_batch = job.shard_batch, begin_anew
""",
    "documents that see each other": """
original, job.SequenceScope = job.SequenceScope, lambda layout, mask: original(layout)
""",
}


def test_what_is_wrong_is_seen_and_fails(tmp_path):
    """One after another in the same processes, whose start would take longer than the trainings."""
    script = tmp_path / "sabotaged.py"
    script.write_text(
        f"""
import functools, importlib, sys
import cp_styles
import train_llama as job
from tests.process import several

given = sys.argv[1:]

def run(change):
    importlib.reload(job)
    sizes = {PACKED!r} if "SequenceScope" in change else ["--steps", 2, "--seq-len", 192]
    sys.argv[1:] = [*given, *map(str, sizes)]
    exec(change, globals())
    return job.main()

several.run({{name: lambda change=change: run(change) for name, change in {SABOTAGE!r}.items()}})
"""
    )
    done = start(2, "--cp", 2, "--tp", 1, "--out", tmp_path / "run.png", script=script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(dict.fromkeys(SABOTAGE, 1)), done.stdout
    assert done.stdout.count("PARITY MISSED") == len(SABOTAGE)


def test_a_bad_value_gets_one_line_from_one_rank():
    done = start(2, "--cp", 2, "--tp", 1, "--seq-len", 1)
    said = [line for line in done.stderr.splitlines() if line.startswith("train_llama.py: ")]
    assert said == ["train_llama.py: --seq-len 1 is too short for 2 processes: at least 4"]
    assert done.returncode != 0
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--cp 3 --tp 2", "--cp 3 x --tp 2 needs 6 processes, there are 4"),
        ("--cp 4 --tp 0", "--tp must be at least 1, got 0"),
        ("--seq-len 1001", "--seq-len 1001 is no multiple of --tp 2: try 1000"),
        ("--strategy hybrid", "2 is no product of two numbers above 1: try --cp 4, or --strategy ring or ulysses"),
        (
            "--strategy hybrid --cp 4 --tp 1 --ulysses-size 4",
            "--ulysses-size 4 leaves no ring on --cp 4: try one of [2]",
        ),
        ("--ulysses-size 2", "--ulysses-size is for --strategy hybrid, not ring: leave it out"),
        ("--layout per_document_head_tail", "cuts documents: add --documents, or use --layout head_tail"),
        ("--layout zigzag", "invalid choice: 'zigzag'"),
        ("--out run.pdf", "--out run.pdf must end in .png"),
    ],
)
def test_values_that_do_not_fit_together(monkeypatch, capsys, options, says):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import train_llama

    with pytest.raises(SystemExit):
        train_llama.parse(options.split())
    assert says in capsys.readouterr().err


def test_without_torchrun_it_says_how():
    done = start(0)
    assert done.returncode == 2
    assert done.stderr == (
        "train_llama.py: start it with torchrun: torchrun --nproc-per-node 4 tutorials/train_llama.py\n"
    )
