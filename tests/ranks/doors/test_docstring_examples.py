"""The examples in docstrings of public names run as they stand, on two ranks or on none."""

from __future__ import annotations

import inspect
import re
import textwrap
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import cp_styles
from cp_styles import batch, torch_api
from cp_styles.explain import explain
from cp_styles.functions import decode, joint_layout
from cp_styles.testing import run_ranks
from tests.oracle import randn
from tests.ranks.attention_case import Core
from tutorials.llama import Llama, LlamaConfig

OTHERS = {"explain": explain, "run_ranks": run_ranks}
MODULES = [cp_styles, batch, decode, joint_layout, torch_api]
KNOWN: dict[str, Any] = {name: getattr(module, name) for module in MODULES for name in module.__all__} | OTHERS
del KNOWN["IGNORE_INDEX"]  # a number
TORCHS = {"torch": torch, "checkpoint": checkpoint, "create_block_mask": create_block_mask}
TORCHS |= {"Shard": Shard, "Replicate": Replicate}
# A mask without arguments. Errors and warnings need none either.
WITHOUT = {"Full", *(name for name, value in KNOWN.items() if isinstance(value, type) and issubclass(value, Exception))}


def example_of(name: str) -> str:
    """The block behind ``Example::``."""
    (block,) = re.findall(r"Example::\n\n((?:(?: {4}.*)?\n?)+)", f"{inspect.getdoc(KNOWN[name])}\n")
    return textwrap.dedent(block)


EXAMPLES = {name: example_of(name) for name, value in KNOWN.items() if "Example::" in (inspect.getdoc(value) or "")}
HERE = [name for name, code in EXAMPLES.items() if '"cuda"' not in code]
ON_RANKS = [name for name in HERE if re.search(r"\b(mesh|model|layer)\b", EXAMPLES[name])]
ALONE = [name for name in HERE if name not in ON_RANKS]


def test_each_name_has_an_example():
    """Its own, or one that it points at."""
    lacking = [name for name, value in KNOWN.items() if "xample" not in (inspect.getdoc(value) or "")]
    assert set(lacking) == WITHOUT
    assert len(ALONE) > 25
    assert len(ON_RANKS) > 12


@pytest.mark.parametrize("name", ALONE)
def test_examples_without_ranks(name: str):
    exec(EXAMPLES[name], {**KNOWN, **TORCHS})


@pytest.mark.parametrize("name", ON_RANKS)
def test_examples_on_ranks(name: str):
    wholes = [randn(seed, 1, 8, 1000, 64).float() for seed in range(3)]
    model = Llama(LlamaConfig(vocabulary=16, width=16, heads=2, kv_heads=2, hidden=16))
    given = {f"{each}_new": randn(seed, 1, 8, 1, 64).float() for seed, each in enumerate("qkv")}
    given |= {"hidden": randn(3, 500, 16), "labels": torch.arange(500) % 16, "x": randn(4, 2, 16).float()}

    def on(rank: int) -> Any:
        found: dict[str, Any] = {**KNOWN, **TORCHS, **given}
        found["mesh"] = mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        found["init_device_mesh"] = init_device_mesh
        found["model"] = deepcopy(model)
        found["core"] = parallelize_module(Core(), mesh, cp_styles.AttentionContextParallel())
        found["head"] = torch.nn.Linear(16, 16).double()
        found["layer"] = torch.nn.Linear(16, 16)
        found["logits"] = found["head"](found["hidden"])
        found["qkv"] = [whole.clone().requires_grad_() for whole in wholes]
        found["tokens"] = torch.arange(1000)[None] % 16
        found["attend"] = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
        found["qkv_of"] = lambda tokens: [tokens[:, None, :, None].float().expand(1, 8, -1, 64)] * 3
        exec(EXAMPLES[name], found)
        return None if "out" not in found else tuple(found["out"].shape)

    shapes = {"context_varlen_attention": (8, 64), "context_decode": (1, 8, 1, 64)}
    shapes["context_latent_attention"] = (500, 16)
    for shape in run_ranks(on, 2):
        if shape is not None:
            assert shape[-2:] == shapes.get(name, (500, 64))[-2:]
