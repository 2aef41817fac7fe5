"""torchtitan's Llama with its own plan for tensor parallelism, and a style in place of its context parallelism."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[trainers]")
pytest.importorskip("torchtitan.models.llama3", reason="an extra: pip install .[trainers]", exc_type=ImportError)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from cp_styles import global_loss, global_token_count, head_tail, next_token_labels, sum_gradients
from cp_styles.testing import run_ranks
from tests.clients.hugging_face import StayDouble

pytestmark = pytest.mark.nightly  # the libraries that it imports take longer than the test

LENGTH, VOCABULARY = 24, 64
# float64 sums in another order give 1e-15; a wrong mask or position gives 1e-3 and more.
EXACT = 1e-10


def model_of() -> torch.nn.Module:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY, "multiple_of": 8}
    model = Transformer(TransformerModelArgs(**sizes, max_seq_len=64)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15)
    return model


def test_its_own_plan_beside_the_style():
    page = (Path(__file__).parents[2] / "tutorials/trainers.md").read_text()
    (plan,) = re.findall(r"<!-- example: torchtitan -->\n```python\n(.*?)```", page, re.DOTALL)
    model = model_of()
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = next_token_labels(tokens)

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh, mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), copy.deepcopy(model)
        names: dict[str, Any] = {"model": mine, "mesh": mesh}
        exec(plan, names)
        layout, at = head_tail(LENGTH, 2), mesh.get_local_rank("cp")
        part, targets = (layout.shard(x, 1, at) for x in (tokens, labels))
        with StayDouble():
            logits = mine(part, positions=layout.positions(at).expand(2, -1))
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = global_loss(losses, global_token_count(targets, mesh["cp"]), mesh["cp"])
        loss.backward()
        sum_gradients(mine, mesh["cp"])
        grads = {name: x.grad for name, x in mine.named_parameters()}
        return loss.detach(), {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in grads.items()}

    with StayDouble():
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    for found, grads in run_ranks(on, 4):
        assert abs(found - loss) < EXACT
        for name, parameter in model.named_parameters():
            assert (grads[name] - parameter.grad).norm() < EXACT * parameter.grad.norm(), name
