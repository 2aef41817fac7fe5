"""The main job on real processes, on few and short steps."""

import dataclasses
import functools
import importlib
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cp_styles
from cp_styles.verify import VerificationError, verify
from tests.covering import at_night
from tests.process.several import Program

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tutorials" / "train_llama.py"

pytestmark = pytest.mark.process


def start(ranks: int, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, SCRIPT, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )


SHORT = ["--steps", 2, "--seq-len", 192]
PACKED = ["--documents", "--steps", 2, "--seq-len", 384]
# The library begins with a file of 5 KB, and then four that are short: they are in the last two of 15 sequences.
LAST_ROWS = """
job.packed_documents = lambda rows, length: tuple(x[-rows:] for x in packed_documents(15, length))
"""

PARALLEL = {
    "ring": ["--cp", 2, "--tp", 2, "--strategy", "ring", "--layout", "per_document_head_tail", *PACKED],
    "hybrid": ["--cp", 4, "--tp", 1, "--strategy", "hybrid", "--layout", "by_work", *PACKED],
}

# What a training under context parallelism is most often wrong by; each must be seen after two steps.
SABOTAGE = {
    "gradients left unsummed": """
job.sum_gradients = lambda *args: None
only_warn = cp_styles.Checks(only_warn=True)  # so that there is something to compare
job.AttentionContextParallel = functools.partial(job.AttentionContextParallel, checks=only_warn)
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
    "documents that see each other": f"""{LAST_ROWS}
original, job.SequenceScope = job.SequenceScope, lambda layout, mask: original(layout)
""",
}


alone: dict[tuple, Any] = {}


def train(name: str, change: str, options: list, folder: Path) -> int:
    """A training, changed. What is trained on one process is trained once for all that compare with it."""
    import train_llama as job

    importlib.reload(job)
    train_alone = job.train_alone

    def train_once(args, batches):
        key = (args.documents, args.steps, args.seq_len)
        if key not in alone:
            alone[key] = train_alone(args, batches)
        return alone[key]

    def prove(*given):
        try:
            return verify(*given)
        except VerificationError as error:
            print(error)  # and train: the comparison with one process must see the mistake too

    job.train_alone, job.verify = train_once, prove
    job.CONFIG = dataclasses.replace(job.CONFIG, layers=1)  # .ci/run trains the whole model
    sys.argv[1:] = [*map(str, options), "--out", f"{folder}/new folder/{name}.png"]
    known = {"job": job, "cp_styles": cp_styles, "functools": functools, "packed_documents": job.packed_documents}
    exec(change, known)
    return job.main()


TRAININGS = {name: (LAST_ROWS, options) for name, options in PARALLEL.items()} | {
    name: (change, ["--cp", 2, "--tp", 2, *(PACKED if "SequenceScope" in change else SHORT)])
    for name, change in SABOTAGE.items()
}
# At night: tests/wrong_programs.py has these mistakes too, test_composition.py a comparison that notices one, and the
# tests of strategies a hybrid.
LONG = ("hybrid", *SABOTAGE)
PROGRAMS = {
    f"main job, {name}": Program(4, partial(train, name, *given), at_night=name in LONG)
    for name, given in TRAININGS.items()
}


@pytest.mark.parametrize("name", [name for name in TRAININGS if name not in LONG] + at_night(*LONG))
def test_the_training_of_one_process_and_what_is_wrong(on_processes, name: str):
    done = on_processes[f"main job, {name}"]
    said = done.said[0]  # whose report ends a run
    assert done.statuses == [int(name in SABOTAGE)] * 4, said
    assert ("PARITY: the same training as on one process" in said) == (name in PARALLEL)
    assert ("PARITY MISSED" in said) == (name in SABOTAGE)
    # A mask that the step leaves out is left out over one rank too.
    proved = name in PARALLEL or name == "documents that see each other"
    assert f"Llama on 4 ranks, mesh axes ('cp', 'tp'): {'equal to one device' if proved else 'WRONG'}" in said, said
    assert ("packs 4 documents" in said) == ("--documents" in TRAININGS[name][1])
    assert (done.folder / "new folder" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def alone_here(monkeypatch, **environment: str) -> Any:
    """The job's module in this process, which torchrun is said to have started."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    import train_llama

    return train_llama


def test_without_one_process_to_compare_with(tmp_path, monkeypatch, capsys):
    """And on one process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    job = alone_here(monkeypatch, WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=port)
    monkeypatch.setattr(job.torch, "set_num_threads", lambda threads: None)  # of all tests of this process
    monkeypatch.setattr(job, "CONFIG", dataclasses.replace(job.CONFIG, layers=1))
    options = ["--cp", "1", "--tp", "1", "--steps", "1", "--seq-len", "64", "--no-compare"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--out", str(tmp_path / "run.png")])
    assert job.main() == 0
    said = capsys.readouterr()
    assert "the ranks agree; not compared with one process" in said.out
    assert "one process:" not in said.err  # no second training


@pytest.mark.nightly  # whose parts are below
def test_a_bad_value_gets_one_line_from_one_rank():
    done = start(2, "--cp", 2, "--tp", 1, "--seq-len", 1)
    said = [line for line in done.stderr.splitlines() if line.startswith("train_llama.py: ")]
    assert said == ["train_llama.py: --seq-len 1 is too short for 2 processes: at least 4"]
    assert done.returncode != 0
    assert done.stdout == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_what_is_wrong_and_ends_first(monkeypatch, capsys, rank: int):
    job, slept = alone_here(monkeypatch, RANK=str(rank), LOCAL_RANK=str(rank)), []
    monkeypatch.setattr(job.time, "sleep", slept.append)
    with pytest.raises(SystemExit) as end:
        job.parse(["--seq-len", "1"])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    if rank == 0:
        assert said.err == "train_llama.py: --seq-len 1 is too short for 4 processes: at least 8\n"
        assert slept == []
    else:
        assert said.err == ""
        assert slept == [5]


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
    job = alone_here(monkeypatch)
    with pytest.raises(SystemExit):
        job.parse(options.split())
    assert says in capsys.readouterr().err


def test_without_torchrun_it_says_how(monkeypatch, capsys):
    job = alone_here(monkeypatch)
    monkeypatch.delenv("RANK")
    with pytest.raises(SystemExit) as end:
        job.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said == "train_llama.py: start it with torchrun: torchrun --nproc-per-node 4 tutorials/train_llama.py\n"
