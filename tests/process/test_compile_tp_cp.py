"""Tensor x context parallel layers, and those of FSDP2, under torch.compile, on four processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.attention_case import EXACT

ROOT = Path(__file__).parents[2]
RANKS = 4

pytestmark = pytest.mark.process


def test_a_layer_on_cp_and_tp(tmp_path):
    """fullgraph, with local tensors and with tp's DTensors between projections and attention: one process' output and
    gradients. So are a training step's with FSDP2, checkpoints and compiled layers. And inductor goes on with the
    attention while a gather over tp is under way: it waits before its use.
    Compiled attention holds what eager attention does, by the allocator: no more than 12 query shards in a backward.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.process.compile_tp_cp"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(tmp_path / "store")],
            env=os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        said = json.loads(out.splitlines()[-1])
        assert said["local"] < EXACT
        assert said["dtensors"] < EXACT
        assert len(said["refused"]) == 2
        assert all("it is not known which heads" in text for text in said["refused"]), said["refused"]
        assert said["order"] == ["start", "attend", "wait"]
        difference, graphs = said["training"]
        assert difference < 1e-9  # of a loss around 4
        assert graphs == 1
        eager, compiled = said["memory"]
        assert compiled == pytest.approx(eager, abs=0.05)  # the sizes of what ranks agree by, and of gloo's own
        assert compiled[1] <= 12
