"""Programs as five users wrote them in their first hour: refused with a remedy, and exact once it is followed.

nanoGPT's counts its own positions, which no error says: verify finds it.
"""

from __future__ import annotations

import copy
import re
from types import ModuleType

import pytest
import torch
from torch import nn

from cp_styles.testing import run_ranks
from tests.first_hours import deepspeed_ulysses, hugging_face, nanogpt, torch_context_parallel, video_dit
from tests.oracle import error
from tests.ranks.attention_case import EXACT, cp_mesh

REFUSED = [hugging_face, torch_context_parallel, video_dit, deepspeed_ulysses]


def name_of(program: ModuleType) -> str:
    return program.__name__.rpartition(".")[2]


def model_of(program: ModuleType) -> nn.Module:
    torch.manual_seed(0)  # before there are threads, which would share the generator
    return program.model()


@pytest.mark.parametrize("program", REFUSED, ids=name_of)
def test_before(program: ModuleType):
    model = model_of(program)
    errors = run_ranks(lambda _: program.before(copy.deepcopy(model), cp_mesh(2)), 2, return_errors=True)
    for each in errors:
        assert isinstance(each, Exception), each
        assert re.search(program.REFUSAL, str(each)), each


@pytest.mark.parametrize("program", [nanogpt, *REFUSED], ids=name_of)
def test_after(program: ModuleType):
    model = model_of(program)
    alone = copy.deepcopy(model)
    expected = program.alone(alone).detach()

    def on(_rank: int) -> float:
        mine = copy.deepcopy(model)
        loss = program.after(mine, cp_mesh(2)).detach()
        pairs = zip(mine.parameters(), alone.parameters(), strict=True)
        return max(error(loss, expected), *(error(mine.grad, alone.grad) for mine, alone in pairs))

    assert max(run_ranks(on, 2)) < EXACT
