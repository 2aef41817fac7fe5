"""The names inside of torch's flex_attention that its calls are seen by."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention

from cp_styles import ModuleContextParallel, contiguous
from cp_styles._compat import (
    FLEX_CHECKS_DEVICE,
    FLEX_FUNCTION,
    FLEX_GLOBALS,
    FLEX_RENAMED,
    FLEX_WRAPPER,
    RESUMED,
    FlexLocals,
    flex_renamed,
)
from cp_styles.intercept import flex_frames, function_mode
from cp_styles.testing import run_ranks
from tests.oracle import randn
from tests.ranks.attention_case import cp_mesh


def test_this_torch_has_them_all():
    assert FLEX_RENAMED == "", FLEX_RENAMED
    # It is also what the function calls, before it sets a variable: those that are read are what the call was given.
    body = inspect.getsource(FLEX_FUNCTION).split('"""')[2]
    before, check, _ = body.partition(f"{FLEX_CHECKS_DEVICE}(")
    assert check
    assert "=" not in re.sub(r"\w+=True", "", before)


@pytest.mark.parametrize("name", FlexLocals._fields)
def test_a_local_variable_of_another_name(name: str):
    text = f"def renamed({', '.join(each for each in FlexLocals._fields if each != name)}): pass"
    made: dict[str, Any] = {}
    exec(text, made)
    assert f"has no {name}, which this package reads" in flex_renamed(made["renamed"], FLEX_GLOBALS, FLEX_WRAPPER)


def test_a_check_of_the_device_of_another_name():
    renamed = {**FLEX_GLOBALS, FLEX_CHECKS_DEVICE: None}
    assert f"has no {FLEX_CHECKS_DEVICE}, which" in flex_renamed(FLEX_FUNCTION, renamed, FLEX_WRAPPER)


def test_a_wrapper_of_torch_compile_with_other_names():
    """And the name of what follows a graph break: torch has it as a constant."""
    assert "has no compile_wrapper with fn, which" in flex_renamed(FLEX_FUNCTION, FLEX_GLOBALS, ())
    assert TORCH_DYNAMO_RESUME_IN_PREFIX == RESUMED


class Flex(nn.Module):
    def forward(self, query, key, value):
        return flex_attention(query, key, value)


def test_then_its_calls_are_refused(monkeypatch):
    """Not guessed: context_flex_attention, which reads no frames, is what remains."""
    sentence = flex_renamed(FLEX_FUNCTION, {**FLEX_GLOBALS, FLEX_CHECKS_DEVICE: None}, FLEX_WRAPPER)
    for module in (flex_frames, function_mode):
        monkeypatch.setattr(module, "FLEX_RENAMED", sentence)

    def on(rank: int):
        model = parallelize_module(Flex(), cp_mesh(1), ModuleContextParallel(layout=contiguous))
        inputs: list[torch.Tensor] = [randn(seed, 1, 2, 8, 4) for seed in range(3)]
        with pytest.raises(NotImplementedError, match=r"call cp_styles\.context_flex_attention instead"):
            model(*inputs)

    run_ranks(on, 1)
