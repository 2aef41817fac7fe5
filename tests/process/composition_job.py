"""The program of test_composition.py: every composition, one after another, on ranks that are processes."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from cp_styles.engine.gradient_watch import UnreducedGradientsWarning
from tests.oracle import error
from tests.process.several import in_a_world
from tests.ranks.composition import COMPOSITIONS, STEPS, Training, alone

# Of losses around 4. Rounding, carried through steps of AdamW, is 1e-14; what a composition is most often
# wrong by, a gradient that is averaged, or summed over too few ranks, is above 1e-5 after the first.
TOLERANCE = 1e-9


def furthest(run: Training, single: Training) -> list[float]:
    """The largest difference of a loss, and the largest relative ones of a parameter and of a first gradient, on any
    rank."""
    parameters = single.parameters()
    mine = torch.tensor(
        [
            max(abs(found - wanted) for found, wanted in zip(run.losses, single.losses, strict=True)),
            max(error(found, parameters[name]) for name, found in run.parameters().items()),
            max(error(found, single.gradients[name]) for name, found in run.gradients.items()),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.tolist()


def is_the_same(*differences: float) -> bool:
    return all(each < TOLERANCE for each in differences)  # nan is not


@in_a_world
def main(folder: Path) -> int:
    single = alone(STEPS)
    missed = 0
    for make in COMPOSITIONS:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnreducedGradientsWarning)
            run = make().run(STEPS)
        differences = furthest(run, single)
        missed += not is_the_same(*differences)
        if dist.get_rank() == 0:
            said = f"{make.__name__}: losses within {differences[0]:.0e}, parameters within {differences[1]:.0e}"
            print(f"{said}, {time.perf_counter() - start:.1f} s", flush=True)
            print("".join(f"    {line}\n" for line in run.counted().splitlines()), end="", flush=True)
    return missed
