"""The examples in docstrings of public names run as they stand, on two ranks or on none."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import cp_styles
from cp_styles.explain import explain
from cp_styles.testing import run_ranks
from tests.oracle import randn
from tutorials.llama import Llama, LlamaConfig

OTHERS = {"explain": explain, "run_ranks": run_ranks, "create_block_mask": create_block_mask}
KNOWN: dict[str, Any] = {name: getattr(cp_styles, name) for name in cp_styles.__all__} | OTHERS
ALONE = ("SequenceLayout", "next_token_labels", "document_positions", "shard_batch", "Documents", "imbalance")
ALONE += ("explain", "run_ranks")
ON_RANKS = ("context_attention", "context_flex_attention", "context_varlen_attention", "context_decode")
ON_RANKS += ("AttentionContextParallel",)


def example_of(name: str) -> str:
    """The block behind ``Example::``."""
    (block,) = re.findall(r"Example::\n\n((?:(?: {4}.*)?\n?)+)", f"{inspect.getdoc(KNOWN[name])}\n")
    return textwrap.dedent(block)


@pytest.mark.parametrize("name", ALONE)
def test_examples_without_ranks(name: str):
    exec(example_of(name), {**KNOWN, "torch": torch})


@pytest.mark.parametrize("name", ON_RANKS)
def test_examples_on_ranks(name: str):
    qkv = [randn(seed, 1, 8, 1000, 64).float() for seed in range(3)]
    q_new, k_new, v_new = (randn(seed, 1, 8, 1, 64).float() for seed in range(3))
    given = {"qkv": qkv, "q_new": q_new, "k_new": k_new, "v_new": v_new, "init_device_mesh": init_device_mesh}

    def on(rank: int) -> Any:
        found: dict[str, Any] = {**KNOWN, **given, "torch": torch}
        found["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        found["model"] = Llama(LlamaConfig(vocabulary=16, width=16, heads=2, kv_heads=2, hidden=16))
        exec(example_of(name), found)
        return None if "out" not in found else tuple(found["out"].shape)

    shapes = {"context_varlen_attention": (8, 64), "context_decode": (1, 8, 1, 64)}
    for shape in run_ranks(on, 2):
        if shape is not None:
            assert shape[-2:] == shapes.get(name, (500, 64))[-2:]
