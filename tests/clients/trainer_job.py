"""What test_trainers.py starts: trainings by other libraries' trainers, on one process and on ranks, compared.

    python tests/clients/trainer_job.py NAME...

The libraries, which take longer to import than these models to train, are imported once. Then processes are forked.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

# In float64, after some steps of AdamW. Rounding in another order gives 1e-15; a label shifted after the cut, a mean
# of means or one sample too many give 1e-4 and more.
TOLERANCE = 1e-10


@dataclass
class Training:
    """What is compared: losses in the order of the steps, other numbers, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def furthest(found: Training, wanted: Training) -> float:
    """The largest error, relative to the largest loss, to a number, or to the norm of a parameter."""
    assert len(found.losses) == len(wanted.losses) != 1, (found.losses, wanted.losses)
    assert wanted.parameters
    assert found.numbers.keys() == wanted.numbers.keys(), (found.numbers, wanted.numbers)
    assert found.parameters.keys() == wanted.parameters.keys()
    largest = max(map(abs, wanted.losses), default=1.0)
    errors = [abs(mine - theirs) / largest for mine, theirs in zip(found.losses, wanted.losses, strict=True)]
    errors += [abs(found.numbers[name] - value) / abs(value) for name, value in wanted.numbers.items()]
    errors += [float((found.parameters[name] - x).norm() / x.norm()) for name, x in wanted.parameters.items()]
    return max(errors)


def mean_over_ranks(value: float) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


Case = Callable[[], Training]


def child(rank: int, ranks: int, port: int, case: Case, to: Path) -> None:
    """In a forked process: run the case, leave the result or the error in a file, and end."""
    try:
        signal.alarm(240)
        torch.manual_seed(rank)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
        try:
            result: Any = case()
        except Exception as error:
            result = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        torch.save(result, to)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(case: Case, ranks: int, folder: Path) -> list[tuple[int, Path]]:
    port, started = free_port(), []
    for rank in range(ranks):
        to = folder / f"{port}_{rank}.pt"
        pid = os.fork()
        if not pid:
            child(rank, ranks, port, case, to)
        started.append((pid, to))
    return started


def results_of(started: list[tuple[int, Path]]) -> list[Any]:
    for pid, _ in started:
        os.waitpid(pid, 0)
    return [torch.load(to, weights_only=False) if to.exists() else "ended without a result" for _, to in started]


def compare(name: str, case: Case, ranks: int, wanted: Case, of: int, tolerance: float) -> bool:
    """Whether ``case`` on ``ranks`` trains as ``wanted`` on ``of`` ranks."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        started = [start(wanted, of, Path(folder)), start(case, ranks, Path(folder))]
        expected, found = map(results_of, started)
    seconds = time.perf_counter() - begin
    failed = [each for each in (*expected, *found) if isinstance(each, str)]
    if failed:
        print(f"{name}: {failed[0]}\n", *failed[1:])
        return False
    error = max(furthest(each, expected[0]) for each in found)
    print(f"{name}: {len(found[0].losses)} losses, within {error:.0e}, {seconds:.1f} s", flush=True)
    return error < tolerance


def refused(name: str, case: Case, words: str, ranks: int = 2) -> bool:
    """Every rank says ``words``, or that it stops with the others; one of them does say them."""
    with tempfile.TemporaryDirectory() as folder:
        found = results_of(start(case, ranks, Path(folder)))
    wrong = [each for each in found if not isinstance(each, str)]
    if wrong or not any(words in each for each in found):
        print(f"{name}: not refused as it should be, but: {found}")
        return False
    print(f"{name}: refused on {len(found)} ranks", flush=True)
    return True


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    from tests.clients import trainer_cases

    gc.freeze()  # the forks collect their own objects alone: verify collects at each end
    missed = 0
    for name in names:
        if name in trainer_cases.REFUSED:
            missed += not refused(name, *trainer_cases.REFUSED[name])
        else:
            case, ranks = trainer_cases.CASES[name], trainer_cases.RANKS.get(name, 2)
            wanted, of, tolerance = trainer_cases.REFERENCES.get(name, (case, 1, TOLERANCE))
            missed += not compare(name, case, ranks, wanted, of, tolerance)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
