"""The configuration of an attention as a value: objects are rebuilt from it, here and in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from cp_styles.engine.config import AttentionConfig, config_in_graph, rebuild, take_apart
from cp_styles.kernels import ReferenceKernel
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, striped
from cp_styles.masks import Causal, Dense, Documents, Full, Mask, SlidingWindow
from cp_styles.strategies import AllGather, Ring, Ulysses

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class FirstKeys(Mask):
    """A mask of a user."""

    number: int

    def bounds(self, q_positions_L):
        return q_positions_L * 0, q_positions_L * 0 + self.number


def backwards(length: int, ranks: int) -> SequenceLayout:
    """A balancer of a user."""
    chunks = contiguous(length, ranks).chunks
    return SequenceLayout.from_chunks(reversed(chunks))


VALUES = [
    (None, True, 3, -2, 0.5, "text", torch.bfloat16),
    (Ring(), AllGather(), Ulysses(inner=AllGather(), size=2)),
    (head_tail, partial(by_work, mask=Causal()), partial(striped, block=4), head_tail(13, 3)),
    (Full(), Causal() & SlidingWindow(3, 0), Documents((3, 4))),
    (CPU_FLASH, ReferenceKernel()),
    (FirstKeys(3), backwards),
]


@pytest.mark.parametrize("value", VALUES, ids=["plain", "strategies", "layouts", "masks", "kernels", "users"])
def test_there_and_back(value):
    tensors: list[torch.Tensor] = []
    parts = take_apart(value, tensors)
    found = rebuild(parts)
    assert list(map(type, found)) == list(map(type, value))
    assert take_apart(found, tensors) == parts  # partials are not equal to their likes
    assert hash(parts) == hash(take_apart(found, tensors))
    assert not tensors


def test_a_tensor_goes_beside_the_parts():
    mask, tensors = Dense(torch.ones(4, 4, dtype=torch.bool)), []
    assert rebuild(take_apart((mask & Causal(),), tensors), mask.tensor) == (mask & Causal(),)
    assert tensors == [mask.tensor]


def test_two_dense_masks_are_refused():
    first, second = (Dense(torch.ones(size, size, dtype=torch.bool)) for size in (4, 5))
    with pytest.raises(TypeError, match="2 Dense masks under"):
        config_in_graph("name", "cp", "group", Ring(), partial(by_work, mask=first), second, None)


def test_what_is_not_found_by_name():
    @dataclass(frozen=True)
    class Local(Mask):
        pass

    def replaced(length, ranks):
        return head_tail(length, ranks)

    replaced.__qualname__ = backwards.__qualname__  # the name is now another function's
    for value, match in (
        (lambda length, ranks: head_tail(length, ranks), "cannot be found by name"),
        (replaced, "cannot be found by name"),
        (Local(), "a Local cannot be rebuilt"),
        ([1], "a list cannot be rebuilt"),
    ):
        with pytest.raises(TypeError, match=match):
            take_apart((value,), [])


def config_of(parts) -> AttentionConfig:
    return AttentionConfig("name", "cp", "group", parts, True, False, True, False)


@pytest.mark.parametrize("value", VALUES, ids=["plain", "strategies", "layouts", "masks", "kernels", "users"])
def test_generated_code_rebuilds_it(value):
    config = config_of(take_apart(value, []))
    code, names = config.__fx_repr__()
    assert eval(code, dict(names)) == config
    assert hash(eval(code, dict(names))) == hash(config)


@pytest.mark.nightly  # test_compile_cache.py runs code of another process
def test_in_another_process():
    config = config_of(take_apart(VALUES[1] + VALUES[2] + VALUES[3] + VALUES[5], []))
    code, _ = config.__fx_repr__()
    program = f"""
from cp_styles.engine.config import AttentionConfig, take_apart, rebuild
config = {code}
assert take_apart(rebuild(config.parts), []) == config.parts
from tests.unit.test_config import VALUES, config_of
assert config == config_of(take_apart(VALUES[1] + VALUES[2] + VALUES[3] + VALUES[5], []))
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
