"""Packs over dp x cp of models of transformers: experts, latents, linear attention, state spaces, windows."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import BatchSharder, ModuleContextParallel, pack_samples, parallelize_module, whole_documents
from cp_styles.testing import run_ranks
from tests.clients.hugging_face import NAME, StayDouble, gradients, labels_of, largest_error, step, with_attention
from tests.clients.sweep import tiny_of
from tests.covering import rows_at_night

EXACT = 1e-10  # as in test_groups.py
MODELS = "qwen3_moe", "deepseek_v3", "mamba2", "inkling2_text"
# The lengths of the samples of four ranks: short ones, of which most stay whole, and a long one, which is cut.
DRAWN = [[5, 3, 9], [26], [4, 6, 7], [8, 2]]
# One sample on each rank, with the positions of a rank alone; ranks without samples; two ranks for one sample.
FEW = [[7], [7], [7], [7]], [[9], [], [9], []], [[1], [1], [1], [2]]


@pytest.mark.parametrize(
    ("model_type", "drawn"),
    [
        *(("mistral", DRAWN), ("qwen3_next", DRAWN), ("qwen3_next", FEW[1])),
        *rows_at_night(*((name, DRAWN) for name in MODELS), *product(("mistral", "qwen3_next"), FEW)),
    ],
)
def test_a_step_of_samples_of_four_ranks(model_type: str, drawn: list[list[int]]):
    model = tiny_of(model_type)
    lists = [
        [torch.randint(3, 60, (size,), generator=torch.Generator().manual_seed(10 * rank + size)) for size in sizes]
        for rank, sizes in enumerate(drawn)
    ]
    alone = with_attention(model, "eager")
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for tokens in [x[None] for samples in lists for x in samples]:
        labels = labels_of(tokens)
        loss += step(alone, {"input_ids": tokens, "position_ids": torch.arange(tokens.shape[1])[None]}, labels)
        count += int((labels != -100).sum())
    wanted = loss / count, {name: x / count for name, x in gradients(alone).items()}

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["dp", "cp"]._flatten("dp_cp")
        mine: Any = copy.deepcopy(model)
        mine.set_attn_implementation(NAME)
        parallelize_module(mine, both, ModuleContextParallel(verified=True))
        sharder = BatchSharder(both, layout=whole_documents)
        (pack,) = pack_samples(lists[rank], both)
        batch = sharder(pack)
        with batch.scope(), StayDouble():
            loss = batch.loss(mine(**batch.inputs).logits)
        loss.backward()
        sharder.sum_gradients(mine)
        return loss.detach(), gradients(mine)

    for found in run_ranks(on, 4):
        assert largest_error(found, wanted) < EXACT
