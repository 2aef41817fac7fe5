"""Several programs one after another in the same processes, whose start takes longer than most runs.

Each program begins and destroys a process group of its own, of all processes or of the first ones. The ranks meet for
each at a place of its own: in one for all they would find the addresses of the group before.

    python -m tests.process.several FOLDER NAMES MODULES

runs the PROGRAMS of modules that have one of the names, a list in JSON, on ranks that are forks of one process: it
imports for all of them. See conftest.py. Under torchrun, whose environment the forks have too, ``run`` runs programs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import multiprocessing

PROCESSES = 4
begin = dist.init_process_group


class Program(NamedTuple):
    """``run`` is given a folder for files, and returns an exit status. Its rank 0 is the process ``first``."""

    ranks: int
    run: Callable[[Path], int]
    at_night: bool = False
    first: int = 0

    @property
    def processes(self) -> range:
        return range(self.first, self.first + self.ranks)


def in_a_world(main: Callable[[Path], int | None]) -> Callable[[Path], int]:
    """A program that runs between the start and the end of a group of all its ranks. None is the exit status 0."""

    @functools.wraps(main)
    def program(folder: Path, **options: Any) -> int:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        status = main(folder, **options)
        dist.barrier()
        dist.destroy_process_group()
        return status or 0

    return program


def perform(program: Callable[[], Any], ranks: int, place: dist.Store) -> Any:
    """What ``program`` returns, in a world of so many ranks, which meet at ``place``."""
    rank = int(os.environ["RANK"])
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
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    statuses = {name: perform(program, ranks, dist.PrefixStore(name, store)) for name, program in programs.items()}
    if int(os.environ["RANK"]) == 0:
        print(statuses)
    leave()


def on_process(number: int, folder: Path, programs: Mapping[str, Program]) -> NoReturn:
    """A file with what the programs printed and the statuses that they returned."""
    found = {}
    for name, program in programs.items():
        if number in program.processes:
            rank = str(number - program.first)
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(PROCESSES)}
            # A file, because a store with threads before the fork may leave a fork a lock that nobody opens.
            place = dist.FileStore(str(folder / f"store of {name}"), program.ranks)
            said = folder / f"said by {number}"
            with said.open("w") as out, contextlib.redirect_stdout(out):
                status = perform(lambda program=program: program.run(folder), program.ranks, place)
            found[name] = status, said.read_text()
    (folder / f"{number}.json").write_text(json.dumps(found))
    leave()


def compile_once() -> None:
    """The first compilation of a process prepares for a second what all others use: its forks need not."""
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # torch's progress bars start no thread, whose locks a fork may inherit
    two = torch.ones(2, 2)
    torch.compile(torch.mm)(two, two)
    torch.compiler.reset()


def main(folder: Path, names: list[str], modules: list[str]) -> None:
    programs: dict[str, Program] = {}
    for module in modules:
        own = importlib.import_module(module).PROGRAMS
        programs |= {name: program for name, program in own.items() if name in names}
    compile_once()
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a fork may inherit a lock of another thread"
    gc.freeze()  # the forks collect their own objects alone, and copy no memory for that: verify collects at each end
    multiprocessing.start_processes(on_process, (folder, programs), nprocs=PROCESSES, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
