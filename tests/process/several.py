"""Several programs one after another in the processes that torchrun started, whose start takes longer than most runs.

Each program begins and destroys its process group itself, of all processes or of the first ones. The ranks meet for
each at a place of its own in torchrun's store, where they would find the addresses of the group before.

    torchrun --nproc-per-node 4 -m tests.process.several FOLDER MODULES

runs the PROGRAMS of modules: see conftest.py.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

begin = dist.init_process_group


class Program(NamedTuple):
    """``run`` is given a folder for files, and returns an exit status."""

    ranks: int
    run: Callable[[Path], int]


def perform(name: str, program: Callable[[], Any], ranks: int) -> Any:
    """What ``program`` returns, in a world of so many ranks."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    place, rank = dist.PrefixStore(name, store), int(os.environ["RANK"])
    dist.init_process_group = lambda *args, **options: begin(*args, **options, store=place, rank=rank, world_size=ranks)
    os.environ["WORLD_SIZE"] = str(ranks)
    return program()


def leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo may abort at the interpreter's shutdown, see tutorials/train_llama.py


def run(programs: Mapping[str, Callable[[], Any]]) -> NoReturn:
    """Prints the exit statuses of all, on rank 0."""
    ranks = int(os.environ["WORLD_SIZE"])
    statuses = {name: perform(name, program, ranks) for name, program in programs.items()}
    if int(os.environ["RANK"]) == 0:
        print(statuses)
    leave()


def main(folder: Path, modules: list[str]) -> NoReturn:
    """Of each rank, a file with what its programs printed and the statuses that they returned."""
    rank, found = int(os.environ["RANK"]), {}
    for module in modules:
        for name, program in importlib.import_module(module).PROGRAMS.items():
            if rank < program.ranks:
                said = folder / f"said by rank {rank}"
                with said.open("w") as out, contextlib.redirect_stdout(out):
                    status = perform(name, lambda program=program: program.run(folder), program.ranks)
                found[name] = status, said.read_text()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
