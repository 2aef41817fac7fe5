"""Trainers of other libraries on real processes: losses and parameters of one process, or an error on every rank."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cp_styles.torch_api import context_parallel

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("trainer_job.py")

REFUSED = ["a plain Trainer"]
MORE = [
    "classifier",
    "a plain Trainer that cuts",
    "a token shift",
    "a batch without labels",
    "label smoothing",
    "the page's Trainer",
    "a plain Trainer, packed",
    "workers",
    "dropout",
    "a loss function",
    "neftune",
    "dispatched batches",
    "a token shift that nobody proves",
]

HEADS = ["labels of tokens", "labels of tokens, each rank's mean", "classifier, data parallel"]
ROLLOUTS = [
    *("grpo, one process", "rloo, one process", "grpo", "rloo", "grpo, a reference and rewards"),
    *("grpo, plain rewards", "grpo, whole", "grpo, adapters", "entropy quantile", "adaptive entropy"),
]
SHARDED = ["accelerate's sharding", "accelerate's sharding, a block"]
TORCHTITAN = ["accelerate", "torchtitan", "torchdata", "tensorboard", "tyro", "datasets", "einops"]

# With the libraries that they need beside transformers. A program takes some seconds to start, and a case one or two.
CASES = [
    pytest.param(["accelerate"], ["trainer", "packed", "accelerate", *REFUSED], id="accelerate"),
    pytest.param(["accelerate"], ["data parallel", *HEADS, *SHARDED, *MORE], id="more", marks=pytest.mark.nightly),
    pytest.param(["accelerate", "trl", "peft"], ["sft", "rewards", "preferences"], id="trl", marks=pytest.mark.nightly),
    pytest.param(["accelerate", "trl", "peft"], [*ROLLOUTS], id="rollouts", marks=pytest.mark.nightly),
    pytest.param(["accelerate", "lightning"], ["lightning"], id="lightning", marks=pytest.mark.nightly),
    pytest.param(TORCHTITAN, ["torchtitan"], id="torchtitan", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("libraries", "names"), CASES)
def test_trainings(libraries: list[str], names: list[str], request: pytest.FixtureRequest):
    missing = [each for each in ["transformers", *libraries] if importlib.util.find_spec(each) is None]
    if missing and request.node.get_closest_marker("nightly"):
        pytest.fail(f"needs {', '.join(missing)}: pip install .[trainers]")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: an extra, pip install .[clients]")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run([sys.executable, JOB, *names], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_block_takes_what_accelerates_block_takes():
    """In the order of positions too, as calls may give them."""
    accelerate = pytest.importorskip("accelerate", reason="an extra: pip install .[clients]")
    theirs = list(inspect.signature(accelerate.Accelerator.maybe_context_parallel).parameters)
    assert theirs == ["self", "buffers", "buffer_seq_dims", "no_restore_buffers"]
    assert list(inspect.signature(context_parallel).parameters)[1:4] == theirs[1:]
