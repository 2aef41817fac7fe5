"""The configuration of an attention as a text: it can be read back, and a text from elsewhere runs no other code."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from cp_styles.engine.config_text import from_text, to_text
from cp_styles.kernels import CPU_FLASH, ReferenceKernel
from cp_styles.layout import SequenceLayout, by_work, contiguous, head_tail, striped
from cp_styles.mask import Causal, Dense, Documents, Full, Mask, SlidingWindow
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
    text = to_text(value, tensors)
    found = from_text(text)
    assert list(map(type, found)) == list(map(type, value))
    assert to_text(found, tensors) == text  # partials are not equal to their likes
    assert not tensors


def test_a_tensor_goes_beside_the_text():
    mask, tensors = Dense(torch.ones(4, 4, dtype=torch.bool)), []
    found = from_text(to_text((mask & Causal(),), tensors), tuple(tensors))
    assert found == (mask & Causal(),)


@pytest.mark.parametrize(
    "text",
    [
        "{'os:system':('touch FILE',)}",
        "{'posix:system':('touch FILE',)}",
        "{'functools:partial':({'os:system'},('touch FILE',),())}",
        "{'builtins:eval'}",
        "{'torch:load'}",
        "{'torch:ops.aten.add'}",
        "{'cp_styles.engine.custom_ops:ctypes.CDLL':('FILE',)}",
        "{'cp_styles.engine.config_text:sys.exit':()}",
        "{'cp_styles.testing:run_ranks'}",
        "{'cp_styles.engine.custom_ops:attended_dtypes'}",
        "{'cp_styles.engine.custom_ops:handle'}",
        "{'cp_styles.styles.attention:AttentionContextParallel':()}",
        "{'antigravity:geohash'}",
        "{'head_tail'}",
        "{''}",
    ],
)
def test_a_text_from_elsewhere(text: str, tmp_path: Path):
    """Neither by itself nor as the argument of the op, where a graph from elsewhere has it."""
    file = tmp_path / "touched"
    text = text.replace("FILE", str(file))
    loaded = set(sys.modules)
    with pytest.raises(ValueError, match="which this process has not used yet"):
        from_text(text)
    config = f"('name','cp','group',{text},)"
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="which this process has not used yet"):
        torch.ops.cp_styles.attention(q, q, q, None, None, None, config, False, None, False, "")
    assert not file.exists()
    assert set(sys.modules) == loaded


@pytest.mark.nightly  # test_compile_cache.py reads texts of another process
def test_in_another_process():
    """The package's own is found there; what a user defined, once the user's program has named it itself."""
    own, users = (to_text(value, []) for value in (VALUES[1] + VALUES[2] + VALUES[3], (FirstKeys(3), backwards)))
    program = f"""
import cp_styles
from cp_styles.engine.config_text import from_text, to_text
assert to_text(from_text({own!r}), []) == {own!r}
from tests.unit.test_config_text import FirstKeys, backwards
try:
    from_text({users!r})
except ValueError as error:
    assert "apply the style" in str(error)
else:
    raise AssertionError("not refused")
to_text((FirstKeys(5), backwards), [])
assert from_text({users!r}) == (FirstKeys(3), backwards)
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
