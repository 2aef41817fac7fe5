"""Hybrids of transformers compiled by torch.compile's default backend. Two processes, which compile side by side."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

from cp_styles import ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from tests.clients.hugging_face import LENGTH, NAME, expected, gradients, labels_of, largest_error, step, tokens_of
from tests.clients.test_mixers import EXACT, inputs_of, model_of
from tests.process.several import Program, in_a_world
from tests.ranks.attention_case import cp_mesh

pytestmark = [pytest.mark.process, pytest.mark.nightly]

RANKS, MODELS = 2, ("lfm2", "qwen3_next")


@in_a_world
def main(folder: Path) -> None:
    mesh, rank, layout = cp_mesh(RANKS), dist.get_rank(), head_tail(LENGTH, RANKS)
    for model_type in MODELS:
        model, tokens = model_of(model_type), tokens_of()
        inputs, labels = inputs_of(model, tokens), labels_of(tokens)
        mine = copy.deepcopy(model)
        mine.set_attn_implementation(NAME)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=layout))
        parts = {name: layout.shard(x, 1, rank).contiguous() for name, x in inputs.items()}
        for _ in range(2):  # the second step runs what the first has compiled
            mine.zero_grad()
            loss = step(mine, parts, layout.shard(labels, 1, rank), torch.compile)
        dist.all_reduce(loss)
        sum_gradients(mine, mesh)
        found = largest_error((loss, gradients(mine)), expected(model, inputs, labels))
        print(f"{model_type}: {'exact' if found < EXACT else found}", flush=True)
        torch.compiler.reset()


PROGRAMS = {"compiled hybrids": Program(RANKS, main, at_night=True)}


def test_two_steps_are_exact(on_processes):
    finished = on_processes["compiled hybrids"]
    assert finished.statuses == [0] * RANKS, finished.said
    assert all(f"{model_type}: exact" in finished.said[0] for model_type in MODELS), finished.said
