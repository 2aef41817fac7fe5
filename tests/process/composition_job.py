"""The program of test_composition.py: compositions, one after another, on ranks that are processes.

Two are proved first, in place, and at night the rest. A mistake that only a gradient shows is noticed in one of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cp_styles import UnverifiedModelWarning
from cp_styles.checks.gradient_watch import UnreducedGradientsWarning
from cp_styles.verify import VerificationError, verify
from tests.oracle import error
from tests.process.several import in_a_world
from tests.ranks.composition import (
    COMPOSITIONS,
    STEPS,
    Training,
    alone,
    batch_of,
    by_ddp_over_cp,
    by_fsdp_over_cp_with_tp,
    by_pipeline,
)

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


@contextmanager
def hidden_shift(model: nn.Module) -> Iterator[None]:
    """A model whose norms scale what comes from the token before by 0: only a gradient shows that a part ends."""

    def shifted(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + (module.weight - module.weight.detach()) * F.pad(output, (0, 0, 1, -1))

    norms = [module for name, module in model.named_modules() if name.endswith("attention_norm")]
    handles = [norm.register_forward_hook(shifted) for norm in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


PROVED = (by_ddp_over_cp, by_pipeline)
BY_DAY = (by_fsdp_over_cp_with_tp, *PROVED)
AT_NIGHT = tuple(make for make in COMPOSITIONS if make not in PROVED)

Makers = Sequence[Callable[[], Training]]


@in_a_world
def main(folder: Path, *, makers: Makers = BY_DAY, proved: Makers = PROVED) -> int:
    single = alone(STEPS)
    missed = 0
    for make in makers:
        start = time.perf_counter()
        made = make()
        if make in proved:
            verify(made.model, made.mesh, batch_of(0), made.step, tolerance=TOLERANCE)
        if make is by_ddp_over_cp:  # with DTensors: tests/ranks/verify/test_verify.py
            with hidden_shift(made.model), suppress(VerificationError):
                verify(made.model, made.mesh, batch_of(0), made.step, tolerance=TOLERANCE)
                missed += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnreducedGradientsWarning)
            warnings.simplefilter("error" if make in proved else "ignore", UnverifiedModelWarning)
            run = made.run(STEPS)
        differences = furthest(run, single)
        missed += not is_the_same(*differences)
        if dist.get_rank() == 0:
            said = f"{make.__name__}: losses within {differences[0]:.0e}, parameters within {differences[1]:.0e}"
            print(f"{said}, {time.perf_counter() - start:.1f} s", flush=True)
            print("".join(f"    {line}\n" for line in run.counted().splitlines()), end="", flush=True)
    return missed
