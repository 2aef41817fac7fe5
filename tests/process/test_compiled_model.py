"""A compiled model of transformers that is refused on one rank.

Two processes: of ranks that are threads, one would wait for the other, which cannot compile meanwhile.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

from cp_styles import ModuleContextParallel, contiguous, parallelize_module
from cp_styles.integrations.transformers import register_attention
from tests.clients.hugging_face import tiny, tokens_of
from tests.clients.test_transformers import causal_lm, config_of
from tests.process.several import Program, in_a_world
from tests.ranks.attention_case import cp_mesh

pytestmark = [pytest.mark.process, pytest.mark.nightly]

RANKS, LENGTH = 2, 20


@in_a_world
def main(folder: Path) -> None:
    model = tiny(causal_lm, config_of("mistral", num_hidden_layers=2))
    model.set_attn_implementation(register_attention())
    parallelize_module(model, cp_mesh(RANKS), ModuleContextParallel(layout=contiguous))
    tokens = contiguous(LENGTH, RANKS).shard(tokens_of(LENGTH), 1, dist.get_rank())
    try:
        torch.compile(model, backend="aot_eager")(tokens, position_ids=torch.arange(LENGTH // RANKS).expand(2, -1))
    except ValueError as error:
        print(error, flush=True)


PROGRAMS = {"compiled model": Program(RANKS, main, at_night=True)}


def test_positions_of_a_part_are_refused(on_processes):
    finished = on_processes["compiled model"]
    assert finished.statuses == [0] * RANKS
    assert "ranks [1] of mesh axis 'cp' have failed" in finished.said[0]
    assert "position_ids count from 0 to 9 on this rank, whose part of the sequence begins at 10" in finished.said[1]
