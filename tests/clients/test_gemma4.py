"""Gemma 4: shared keys, inputs for each layer, windows, and pictures whose tokens see each other, as in Gemma 3."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

import transformers
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import BatchSharder, ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from cp_styles.integrations.transformers import cut_inputs_of
from cp_styles.integrations.transformers.masks import WholeMask
from cp_styles.masks import Causal
from cp_styles.testing import run_ranks
from cp_styles.verify import verify
from tests.clients import hugging_face as hf
from tests.clients.sweep import GEMMA4
from tests.covering import sampled
from tests.oracle import randn
from tests.ranks.attention_case import every_rank_raises

if "gemma4_unified" not in transformers.CONFIG_MAPPING:
    pytest.skip("transformers 5.24", allow_module_level=True)

# float64 sums in another order give 1e-15; one key too many or too few gives 1e-3 and more.
EXACT = 1e-10
VARIANTS = {
    "shared keys": {"num_kv_shared_layers": 2},
    "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}
PADDING = {"left": slice(0, 7), "right": slice(-7, None)}
PACKED = torch.cat((torch.arange(9), torch.arange(hf.LENGTH - 9))).expand(hf.BATCH, -1)


@sampled(1, variant=list(VARIANTS), ranks=[2, 3], batch=["plain", "left", "right", "packed"])
def test_text(variant: str, ranks: int, batch: str):
    model, tokens, whole = (
        hf.tiny(hf.causal_lm, hf.config_of("gemma4_text", **GEMMA4 | VARIANTS[variant])),
        hf.tokens_of(),
        {},
    )
    labels = hf.labels_of(tokens)
    if batch in PADDING:
        whole["attention_mask"] = torch.ones_like(tokens)
        whole["attention_mask"][0, PADDING[batch]] = 0
        labels = labels.masked_fill(whole["attention_mask"] == 0, -100)
    inputs = {"input_ids": tokens, "position_ids": PACKED if batch == "packed" else hf.positions_of()}
    found = hf.on_ranks(model, inputs, labels, whole=whole, ranks=ranks)
    assert hf.largest_error(found, hf.expected(model, inputs | whole, labels)) < EXACT


# As the checkpoints are: 26B and 31B, E2B and E4B, 12B; without the towers.
TEXT = {name: value for name, value in (hf.TINY | GEMMA4).items() if name not in GEMMA4["without"]}
TEXTS: dict[str, dict[str, Any]] = {
    "gemma4": {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    "gemma4 shared": {"num_kv_shared_layers": 2},
    "gemma4_unified": {"use_bidirectional_attention": "vision"},
}
IMAGE = {"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62}


def multimodal(kind: str) -> Any:
    """The class that AutoModelForCausalLM gives for a checkpoint."""
    config = transformers.AutoConfig.for_model(
        kind.split()[0], text_config=TEXT | TEXTS[kind], vision_config=None, audio_config=None, **IMAGE
    )
    return hf.tiny(transformers.AutoModelForImageTextToText.from_config, config)


@sampled(1, kind=list(TEXTS), ranks=[2, 3], path=["", "model.language_model"])
def test_text_alone_in_the_multimodal_class(kind: str, ranks: int, path: str):
    """By the lines of README, and by those for pictures."""
    model, tokens = multimodal(kind), hf.tokens_of().clamp(max=59)
    loss, grads = hf.expected(model, {"input_ids": tokens}, labels := hf.labels_of(tokens))
    count = (labels != -100).sum()

    def act(mine: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharder = BatchSharder(mesh)
        batch = sharder(tokens)
        with hf.StayDouble():
            loss = batch.loss(mine(**({"input_ids": tokens} if path else batch.inputs)).logits)
        loss.backward()
        sharder.sum_gradients(mine)
        return loss.detach()

    def on(rank: int) -> Any:
        mesh, mine = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        mine.set_attn_implementation(hf.NAME)
        parallelize_module(mine.get_submodule(path), mesh, ModuleContextParallel())
        if path:
            cut_inputs_of(mine.model.language_model)
        verify(mine, mesh, tokens, act, tolerance=1e-9)
        return act(mine, tokens, mesh), hf.gradients(mine)

    wanted = loss / count, {name: grad / count for name, grad in grads.items()}
    assert hf.largest_error(run_ranks(on, ranks)[0], wanted) < EXACT


def with_pictures(kind: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model, its embeddings, and which of them are of pictures, one of which is longer than a window."""
    kinds = torch.zeros(hf.BATCH, hf.LENGTH, dtype=torch.int64)
    kinds[0, 3:12] = kinds[1, 1:3] = kinds[1, 9:15] = 1
    embeddings = {"inputs_embeds": randn(0, hf.BATCH, hf.LENGTH, hf.TINY["hidden_size"])}
    if kind != "gemma3":
        return multimodal(kind), embeddings, {"mm_token_type_ids": kinds}
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"image_size": 8, "patch_size": 4}
    text = hf.TINY | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=sight, mm_tokens_per_image=4)
    return hf.tiny(transformers.AutoModelForImageTextToText.from_config, config), embeddings, {"token_type_ids": kinds}


@sampled(1, kind=["gemma4", "gemma4_unified", "gemma3"], path=["", "model.language_model"], ranks=[2, 3], padded=[0, 5])
def test_pictures_whose_tokens_see_each_other(kind: str, path: str, ranks: int, padded: int):
    """No tensor of S x S. With the style on the whole model every rank is given the kinds of all tokens."""
    model, embeddings, kinds = with_pictures(kind)
    present = torch.ones(hf.BATCH, hf.LENGTH, dtype=torch.int64)
    present[0, hf.LENGTH - padded :] = 0
    whole = kinds | ({"attention_mask": present} if padded else {})
    labels = hf.labels_of(hf.tokens_of()).masked_fill(present == 0, -100)
    wanted = hf.expected(model, embeddings | whole, labels)
    without = hf.expected(model, embeddings | whole | {name: x * 0 for name, x in kinds.items()}, labels)
    assert hf.largest_error(without, wanted) > 1e-3

    def on(rank: int) -> Any:
        mesh, mine = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        mine.set_attn_implementation(hf.NAME)
        parallelize_module(mine.get_submodule(path), mesh, ModuleContextParallel())
        layout = head_tail(hf.LENGTH, ranks)
        given = embeddings | {"position_ids": hf.positions_of()}
        if path:
            cut_inputs_of(mine.model.language_model)
        else:
            given = {name: layout.shard(x, 1, rank) for name, x in given.items()}
        loss = hf.step(mine, given | whole, layout.shard(labels, 1, rank))
        sum_gradients(mine, mesh)
        return loss, hf.gradients(mine)

    losses, grads = zip(*run_ranks(on, ranks), strict=True)
    assert hf.largest_error((sum(losses), grads[0]), wanted) < EXACT


def test_pictures_that_are_refused():
    """Which tokens are of pictures, cut with the tokens; a block with a gap; packed documents in a window."""
    model, embeddings, kinds = with_pictures("gemma3")
    (name, of_tokens), layout = *kinds.items(), head_tail(hf.LENGTH, 2)
    given = embeddings | {"position_ids": hf.positions_of()}

    def on(rank: int, cut: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
        _, mine = hf.under_style(model, 2)
        mine(**{name: layout.shard(x, 1, rank) for name, x in cut.items()}, **whole)

    one_rank = of_tokens.clone()
    one_rank[:, layout.positions(0)] = 0  # the other rank has no picture
    for cut in (of_tokens, one_rank):
        with every_rank_raises(r"for \d+ of 21 tokens: give every rank .*token_type_ids"):
            run_ranks(on, 2, given | {name: cut}, {})
    with every_rank_raises(r"in packed documents transformers finds the tokens of a picture"):
        run_ranks(on, 2, given | {"position_ids": PACKED}, kinds)


SOME = slice(None), slice(None)


@pytest.mark.parametrize(
    ("index", "keeps"),
    [
        ((*SOME, slice(0, None), slice(None)), True),  # Gemma 4, which keeps the last 0 queries
        ((*SOME, slice(-hf.LENGTH, None), slice(0, hf.LENGTH)), True),
        ((slice(None), 0), True),
        ((slice(0, hf.BATCH), 0, slice(None), slice(None, 99)), True),
        (slice(None), True),
        ((*SOME, slice(-1, None), slice(None)), False),
        ((*SOME, slice(None), slice(None, hf.LENGTH - 1)), False),
        ((*SOME, slice(None, None, -1)), False),
        ((slice(None), 1), False),
        ((*SOME, 0), False),
        (0, False),
        ((*SOME, *SOME, None), False),
    ],
)
def test_a_model_that_cuts_its_mask(index: Any, keeps: bool):
    mask = WholeMask(Causal(), None, hf.BATCH, hf.LENGTH)
    if keeps:
        assert mask[index] is mask
    else:
        with pytest.raises(NotImplementedError, match="cuts its attention mask itself"):
            mask[index]
