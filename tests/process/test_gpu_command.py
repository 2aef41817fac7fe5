"""tests/gpu.py on a machine without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from tests import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu.py itself")
def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    out = tmp_path / "record.md"
    monkeypatch.setattr(sys, "argv", [gpu.__file__, "--out", str(out)])
    assert gpu.main() == 2
    said = capsys.readouterr()
    assert "no GPU here" in said.out
    assert not said.err
    assert not out.exists()
