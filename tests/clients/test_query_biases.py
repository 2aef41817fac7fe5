"""Inkling: biases and sinks that each query computes, queries scaled by position, attention over the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from cp_styles import (
    AllGather,
    BackboneContextParallel,
    Documents,
    Ring,
    SequenceScope,
    Ulysses,
    contiguous,
    head_tail,
    striped,
    sum_gradients,
)
from cp_styles.layouts import Balancer
from cp_styles.testing import run_ranks
from tests.clients.hugging_face import (
    LENGTH,
    batch_of,
    checkpoint_layers,
    error_of,
    expected,
    gradients,
    labels_of,
    largest_error,
    nearly_all_on_one,
    on_ranks,
    positions_of,
    step,
    tokens_of,
    under_style,
    with_attention,
)
from tests.clients.sweep import OWN, tiny_of
from tests.covering import at_night, rows_at_night, sampled
from tests.ranks.attention_case import every_rank_raises

pytestmark = pytest.mark.skipif("dory" not in transformers.CONFIG_MAPPING, reason="transformers 5.24")

EXACT = 1e-10  # as in test_groups.py
MODELS = "inkling_text", "inkling2_text", "inkling2_loop_text"


@sampled(
    1,
    model_type=MODELS,
    length=[37, 20, 3],
    ranks=[2, 3, 1],
    layout=[head_tail, contiguous, striped, nearly_all_on_one],
    strategy=[Ring(), Ring(keep=0), AllGather()],
    checkpointed=[False, True],
)
def test_exact(model_type: str, length: int, ranks: int, layout: Balancer, strategy: Any, checkpointed: bool):
    model = tiny_of(model_type)
    if checkpointed:
        checkpoint_layers(model)
    style = {"layout": layout, "strategy": strategy}
    assert error_of(model, length, "eager", ranks=ranks, balancer=layout, style=style) < EXACT


@sampled(1, model_type=MODELS, side=["left", "right"], form=["one", "by layer"])
def test_padding(model_type: str, side: str, form: str):
    """One row is padded: by one mask, or by a dict of masks, of which convolutions read the last one."""
    tokens = tokens_of()
    mask = torch.ones_like(tokens)
    mask[1, slice(4) if side == "left" else slice(LENGTH - 4, None)] = 0
    at = torch.arange(LENGTH)
    behind = at[:, None] - at
    full = (behind >= 0) & mask.bool()[:, None, None]
    window = full & (behind < OWN[model_type]["sliding_window_size"])
    by_layer = {"full_attention": full, "sliding_attention": window, "linear_attention": mask}
    labels = labels_of(tokens).masked_fill(mask == 0, -100)
    inputs, model = {"input_ids": tokens, "position_ids": positions_of()}, tiny_of(model_type)
    wanted = expected(model, inputs | {"attention_mask": mask}, labels, "eager")
    for ranks in (1, 2):
        whole: Any = {"attention_mask": mask if form == "one" else by_layer}
        assert largest_error(on_ranks(model, inputs, labels, whole=whole, ranks=ranks), wanted) < EXACT


@pytest.mark.parametrize("cut", [1, None], ids=["cut", "whole"])
def test_padding_in_blocks(cut: int | None):
    """The blocks are given the mask of their convolutions: the part of a rank, or the whole."""
    tokens, mask = tokens_of(), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :4] = 0
    inputs = {"input_ids": tokens, "position_ids": positions_of(), "attention_mask": mask}
    labels, model = labels_of(tokens).masked_fill(mask == 0, -100), tiny_of("inkling_text")

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh, mine = under_style(model, 2, BackboneContextParallel(seq_dims={"conv_mask": cut}))
        loss = step(mine, inputs, labels)
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    assert largest_error(run_ranks(on, 2)[0], expected(model, inputs, labels, "eager")) < EXACT


def test_padding_of_another_form_is_refused():
    """A mask of convolutions that is not [B, S]."""
    masks = dict.fromkeys(("full_attention", "sliding_attention", "linear_attention"), torch.ones(2, 1, LENGTH, LENGTH))
    with every_rank_raises("pads by a mask that is no tensor", each=True):
        on_ranks(tiny_of("inkling_text"), *batch_of(), whole={"attention_mask": masks})  # pyright: ignore


@sampled(1, model_type=MODELS, ranks=[1, 2])
def test_biases_of_zero_are_trained(model_type: str, ranks: int):
    model = tiny_of(model_type)
    for name, parameter in model.named_parameters():
        if name.endswith(("rel_logits_proj.proj", "relative_position_bias.proj")):
            nn.init.zeros_(parameter)
    assert error_of(model, LENGTH, "eager", ranks=ranks) < EXACT


@pytest.mark.parametrize("model_type", [MODELS[0], *at_night(*MODELS[1:])])
def test_a_number_that_the_trainer_hands_on(model_type: str):
    (inputs, labels), model = batch_of(), tiny_of(model_type)
    found = on_ranks(model, inputs, labels, whole={"num_items_in_batch": torch.tensor(40)})
    assert largest_error(found, expected(model, inputs, labels, "eager")) < EXACT


@pytest.mark.parametrize("model_type", MODELS)
def test_queries_that_change_ranks_are_refused(model_type: str):
    with every_rank_raises("the score_mod reads query_rows of rank"):
        error_of(tiny_of(model_type), LENGTH, "eager", style={"layout": head_tail, "strategy": Ulysses()})


@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("inkling_text", "scope"),
        ("inkling2_text", "seq_idx"),
        *rows_at_night(("inkling2_text", "scope"), ("inkling2_loop_text", "scope"), ("inkling2_loop_text", "seq_idx")),
    ],
)
def test_packed_documents(model_type: str, way: str):
    """As documents one by one. Positions separate attention, and seq_idx convolutions; Inkling 1 gives them none."""
    sizes = 8, LENGTH - 8
    model = tiny_of(model_type)
    tokens, positions = tokens_of(), torch.cat([torch.arange(size) for size in sizes]).expand(2, -1)
    labels = torch.cat([labels_of(part) for part in tokens.split(sizes, 1)], 1)
    alone = with_attention(model, "eager")
    parts = zip(*(x.split(sizes, 1) for x in (tokens, positions, labels)), strict=True)
    loss = sum(step(alone, {"input_ids": x, "position_ids": at}, y) for x, at, y in parts)
    options: dict[str, Any] = {"scope": lambda layout: SequenceScope(layout, mask=Documents(sizes))}
    if way == "seq_idx":
        ids = torch.arange(2, dtype=torch.int32).repeat_interleave(torch.tensor(sizes)).expand(2, -1)
        options = {"whole": {"seq_idx": ids}}
    found = on_ranks(model, {"input_ids": tokens, "position_ids": positions}, labels, **options)
    assert largest_error(found, (loss, gradients(alone))) < EXACT
