"""Several programs one after another in the processes that torchrun started, whose start takes longer than most runs.

Each program begins and destroys its process group itself. The ranks meet for each at a place of its own in torchrun's
store, where they would find the addresses of the group before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch.distributed as dist

begin = dist.init_process_group


def run(programs: Mapping[str, Callable[[], int]]) -> NoReturn:
    """Prints the exit statuses of all, on rank 0."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world_size, statuses = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {}
    for name, program in programs.items():
        place = dist.PrefixStore(name, store)
        dist.init_process_group = lambda *args, place=place, **options: begin(
            *args, **options, store=place, rank=rank, world_size=world_size
        )
        statuses[name] = program()
    if rank == 0:
        print(statuses)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo may abort at the interpreter's shutdown, see tutorials/train_llama.py
