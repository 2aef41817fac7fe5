"""tests/gpu.py on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

COMMAND = Path(__file__).parents[1] / "gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu.py itself")
def test_without_a_gpu_it_says_so(tmp_path):
    out = tmp_path / "record.md"
    done = subprocess.run([sys.executable, COMMAND, "--out", out], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no GPU here" in done.stdout
    assert not done.stderr
    assert not out.exists()
