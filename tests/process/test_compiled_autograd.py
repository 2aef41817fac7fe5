"""Backwards under torch's compiled autograd, through every door. Two processes, because it refuses threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd

from cp_styles.layouts import head_tail
from tests.process.several import Program, in_a_world
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.ranks.compiling import DOORS, LENGTHS, PROBLEMS, RANKS, door

pytestmark = [pytest.mark.process, pytest.mark.nightly]


@in_a_world
def main(folder: Path) -> None:
    mesh, rank, errors = cp_mesh(RANKS), dist.get_rank(), {}
    for name in DOORS:
        for length in LENGTHS:  # compiled for the first, and again for the second
            problem, layout = PROBLEMS[length], head_tail(length, RANKS)
            leaves, cotangent = problem.shard(layout, rank, RANKS)
            out = door(name, mesh, layout=layout)(*leaves)
            with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                out.backward(cotangent)
            found = [out.detach(), *(leaf.grad for leaf in leaves)]
            errors[f"{name}, {length}"] = max(problem.errors(found, layout, rank, RANKS))
        torch.compiler.reset()
    print(json.dumps(errors), flush=True)


PROGRAMS = {"compiled autograd": Program(RANKS, main, at_night=True)}


def test_backwards_under_compiled_autograd(on_processes):
    for text in on_processes["compiled autograd"].said:
        errors = json.loads(text)
        assert len(errors) == len(DOORS) * len(LENGTHS)
        assert max(errors.values()) < EXACT, errors
