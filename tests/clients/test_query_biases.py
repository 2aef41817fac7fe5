"""Inkling: biases and sinks that each query computes, queries scaled by position, attention over the layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from cp_styles import AllGather, Documents, Ring, SequenceLayout, SequenceScope, Ulysses, contiguous, head_tail, striped
from cp_styles.layout import Balancer
from cp_styles.testing import RankError
from tests.clients.hugging_face import (
    LENGTH,
    StayDouble,
    config_of,
    error_of,
    expected,
    gradients,
    labels_of,
    largest_error,
    on_ranks,
    positions_of,
    prefilled,
    step,
    tiny,
    tokens_of,
)
from tests.clients.sweep import OWN, made
from tests.covering import sampled

pytestmark = pytest.mark.skipif("dory" not in transformers.CONFIG_MAPPING, reason="transformers 5.24")

EXACT = 1e-10  # as in test_groups.py
MODELS = "inkling_text", "inkling2_text", "inkling2_loop_text"


def model_of(model_type: str, **sizes: Any) -> Any:
    config = config_of(model_type, **OWN[model_type] | sizes)
    return tiny(lambda config: made("causal", model_type, config), config).train()


def uneven(length: int, ranks: int) -> SequenceLayout:
    """Rank 0 has nearly all tokens, and each further rank one."""
    edges = [0, *range(length - ranks + 1, length + 1)]
    return SequenceLayout.from_chunks([(edges[rank], edges[rank + 1])] for rank in range(ranks))


@sampled(
    2,
    model_type=MODELS,
    length=[3, 20, 37],
    ranks=[1, 2, 3],
    layout=[head_tail, contiguous, striped, uneven],
    strategy=[Ring(), Ring(keep=0), AllGather()],
    checkpointed=[False, True],
)
def test_exact(model_type: str, length: int, ranks: int, layout: Balancer, strategy: Any, checkpointed: bool):
    model = model_of(model_type)
    if checkpointed:
        contexts = {"context_fn": lambda: (StayDouble(), StayDouble())}
        model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
    style = {"layout": layout, "strategy": strategy}
    assert error_of(model, length, "eager", ranks=ranks, balancer=layout, style=style) < EXACT


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model_type: str, side: str):
    tokens = tokens_of()
    mask = torch.ones_like(tokens)
    mask[1, slice(4) if side == "left" else slice(LENGTH - 4, None)] = 0
    labels = labels_of(tokens).masked_fill(mask == 0, -100)
    inputs, whole = {"input_ids": tokens, "position_ids": positions_of()}, {"attention_mask": mask}
    model = model_of(model_type)
    wanted = expected(model, inputs | whole, labels, "eager")
    assert largest_error(on_ranks(model, inputs, labels, whole=whole), wanted) < EXACT


@pytest.mark.parametrize("model_type", MODELS)
def test_queries_that_change_ranks_are_refused(model_type: str):
    with pytest.raises(RankError, match="the score_mod reads query_rows of rank") as caught:
        error_of(model_of(model_type), LENGTH, "eager", style={"layout": head_tail, "strategy": Ulysses()})
    assert sorted(caught.value.errors) == [0, 1]


@pytest.mark.parametrize("model_type", MODELS)
def test_a_prefill_is_refused(model_type: str):
    words = "generate without context parallelism"
    with pytest.raises(RankError, match=rf"(?s)rank 0: .*{words}.*rank 1: .*{words}"):
        prefilled(model_of(model_type).eval())


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_documents(model_type: str):
    """As documents one by one. Without the scaling of Inkling 1, which counts the tokens of the pack."""
    sizes, floor = (8, LENGTH - 8), None if model_type == "inkling_text" else 3
    model = model_of(model_type, log_scaling_n_floor=floor)
    tokens, positions = tokens_of(), torch.cat([torch.arange(size) for size in sizes]).expand(2, -1)
    labels = torch.cat([labels_of(part) for part in tokens.split(sizes, 1)], 1)
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    parts = zip(*(x.split(sizes, 1) for x in (tokens, positions, labels)), strict=True)
    loss = sum(step(alone, {"input_ids": x, "position_ids": at}, y) for x, at, y in parts)
    found = on_ranks(
        model,
        {"input_ids": tokens, "position_ids": positions},
        labels,
        scope=lambda layout: SequenceScope(layout, mask=Documents(sizes)),
    )
    assert largest_error(found, (loss, gradients(alone))) < EXACT
