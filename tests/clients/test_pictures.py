"""Models with a vision tower: exact by the lines of the page, the gradients of the tower too, or refused with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

import transformers
import transformers.masking_utils as masking_utils
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.gemma3 import modeling_gemma3

import cp_styles
from cp_styles import BackboneContextParallel, ModuleContextParallel, contiguous, parallelize_module, sum_gradients
from cp_styles.integrations.transformers import cut_inputs_of, register_attention
from cp_styles.testing import run_ranks
from cp_styles.verify import VerificationError, verify
from tests.clients.hugging_face import (
    BATCH,
    LENGTH,
    NAME,
    TINY,
    VOCABULARY,
    StayDouble,
    expected,
    gradients,
    labels_of,
    largest_error,
    positions_of,
    step,
    tiny,
    tokens_of,
    under_style,
)
from tests.covering import at_night
from tests.oracle import randn
from tests.pages import example
from tests.ranks.attention_case import every_rank_raises

# float64 sums in another order give 1e-15; one key too many or too few gives 1e-3 and more.
EXACT = 1e-10
IMAGE = VOCABULARY - 1
TEXT = TINY | {"num_hidden_layers": 2}
SIGHT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGHT |= {"image_size": 16, "patch_size": 4}
PATCHES = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
HIDDEN = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def qwen(**sight: Any) -> dict[str, Any]:
    words = {"video_token_id": IMAGE - 1, "vision_start_token_id": IMAGE - 2, "vision_end_token_id": IMAGE - 3}
    return {"text_config": TEXT | {"rope_parameters": SECTIONS}, "vision_config": PATCHES | sight, **words}


def others(text: type, sight: Any, **options: Any) -> dict[str, Any]:
    return {"text_config": text(**TEXT), "vision_config": sight, **options}


def of_clip(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(**SIGHT | changes)


LLAMA, LLAVA = transformers.LlamaConfig, {"vision_feature_layer": -1}
DEEP = HIDDEN | {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llava": lambda: others(LLAMA, of_clip("CLIPVisionConfig", image_size=8), **LLAVA),
    "mistral3": lambda: others(
        transformers.MistralConfig,
        of_clip("PixtralVisionConfig", head_dim=8, image_size=8),
        **LLAVA | {"spatial_merge_size": 1},
    ),
    "internvl": lambda: others(
        transformers.Qwen2Config, of_clip("InternVLVisionConfig", image_size=[16, 16], patch_size=[4, 4])
    ),
    "idefics3": lambda: others(LLAMA, SIGHT, scale_factor=2),
    "smolvlm": lambda: others(LLAMA, SIGHT, scale_factor=2),
    "qwen2_vl": lambda: qwen(depth=2, embed_dim=16, hidden_size=32, mlp_ratio=2),
    "qwen2_5_vl": lambda: qwen(**HIDDEN, depth=2, window_size=16, fullatt_block_indexes=[1]),
    "qwen3_vl": lambda: qwen(**DEEP),  # features of the tower are added to layers of the text too
    "qwen3_vl_moe": lambda: qwen(**DEEP),
    "gemma3": lambda: {  # tokens of an image see each other, in windows too
        "text_config": TEXT | MIXED,
        "vision_config": SIGHT | {"image_size": 8},
        "mm_tokens_per_image": 4,
    },
}


def pictures_of(kind: str, tokens: torch.Tensor) -> dict[str, Any]:
    """What a processor returns beside the tokens."""
    if kind.startswith("qwen"):
        grid = torch.tensor([[1, 4, 4]] * BATCH)
        kinds = (tokens == IMAGE).int()
        return {"pixel_values": randn(1, 16 * BATCH, 96), "image_grid_thw": grid, "mm_token_type_ids": kinds}
    more = {"mistral3": {"image_sizes": torch.tensor([[8, 8]] * BATCH)}}
    more["gemma3"] = {"token_type_ids": (tokens == IMAGE).long()}
    size = {"internvl": (3, 16, 16), "idefics3": (1, 3, 16, 16), "smolvlm": (1, 3, 16, 16)}.get(kind, (3, 8, 8))
    return {"pixel_values": randn(1, BATCH, *size), **more.get(kind, {})}


def gemma3_masks(kinds: torch.Tensor) -> dict[str, torch.Tensor]:
    image = (kinds.diff(dim=1, prepend=kinds[:, :1] * 0) == 1).cumsum(1) * kinds
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    sees = (q >= k) | (image[:, :, None] == image[:, None]) & (image[:, :, None] > 0)
    return {"full_attention": sees[:, None], "sliding_attention": (sees & (q - k < 5))[:, None]}


def case(kind: str) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
    names = dict.fromkeys(("image_token_id", "image_token_index"), IMAGE)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind]() | names | {"tie_word_embeddings": False})
    tokens = tokens_of().clamp(max=IMAGE - 4)
    tokens[:, 2:6] = IMAGE
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    model = tiny(transformers.AutoModelForImageTextToText.from_config, config)
    return model, tokens, labels, pictures_of(kind, tokens)


def wanted(model: Any, tokens: torch.Tensor, labels: torch.Tensor, pictures: Any, **more: Any) -> Any:
    # Made as that of the page is: some of its constants are rounded to float32.
    one = transformers.AutoModelForImageTextToText.from_config(copy.deepcopy(model.config)).double()
    one.load_state_dict(model.state_dict())
    labels = labels_of(labels)
    loss = step(one, {"input_ids": tokens, **pictures, **more}, labels)
    count = (labels != -100).sum()
    return loss / count, {name: grad / count for name, grad in gradients(one).items()}


def by_the_page(kind: str, model: Any, **whole: Any) -> Any:
    code = example("pictures")
    made, rest = code.split("parallelize_module(", 1)
    rest = rest.replace("language_model", "text_model") if kind in ("idefics3", "smolvlm") else rest

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        names: dict[str, Any] = {name: getattr(cp_styles, name) for name in cp_styles.__all__}
        names |= {"config": copy.deepcopy(model.config), "cut_inputs_of": cut_inputs_of, **whole}
        names |= {"torch": torch, "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))}
        names |= {"register_attention": register_attention}
        names |= {"AutoModelForImageTextToText": transformers.AutoModelForImageTextToText}
        exec(made, names)
        names["model"].double().load_state_dict(model.state_dict())
        with StayDouble():
            exec(f"parallelize_module({rest}", names)
        return names["loss"].detach(), gradients(names["model"])

    return run_ranks(on, 2)[0]


AT_NIGHT = "mistral3", "internvl", "idefics3", "smolvlm", "qwen2_vl"
with_blocks = pytest.mark.skipif(not hasattr(masking_utils, "blockwise_overlay"), reason="transformers 5.24")
KINDS = ["llava", "qwen2_5_vl", "qwen3_vl", pytest.param("gemma3", marks=with_blocks), *at_night(*AT_NIGHT)]


@pytest.mark.parametrize("kind", [*KINDS, *at_night("qwen3_vl_moe")])
def test_the_example_of_the_page(kind: str):
    model, tokens, labels, pictures = case(kind)
    found = by_the_page(kind, model, tokens=tokens, labels=labels, pictures=pictures)
    loss, grads = wanted(model, tokens, labels, pictures)
    assert any("vis" in name and grad.norm() > 0 for name, grad in grads.items())
    assert largest_error(found, (loss, grads)) < EXACT


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *at_night("llava")])
def test_padding(kind: str):
    """Positions of time, height and width are made from it, by the model, of the whole sequence."""
    model, tokens, labels, pictures = case(kind)
    padding = torch.ones_like(tokens)
    padding[0, 18:] = 0
    labels, pictures = labels.masked_fill(padding == 0, -100), pictures | {"attention_mask": padding}
    found = by_the_page(kind, model, tokens=tokens, labels=labels, pictures=pictures)
    assert largest_error(found, wanted(model, tokens, labels, pictures)) < EXACT


def test_masks_that_are_ready():
    """By kind of layer, as the error for masks of another form asks for them."""
    model, tokens, labels, pictures = case("gemma3")
    given = pictures | {"attention_mask": gemma3_masks(pictures["token_type_ids"])}
    exact = by_the_page("gemma3", model, tokens=tokens, labels=labels, pictures=given)
    assert largest_error(exact, wanted(model, tokens, labels, pictures)) < EXACT


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", *at_night("qwen2_vl", "qwen3_vl")])
def test_whole_inputs_that_nothing_cuts(kind: str, padded: bool):
    """The model gives its language model positions of time, height and width, of the whole sequence."""
    model, tokens, _, pictures = case(kind)
    if padded:
        pictures |= {"attention_mask": torch.ones_like(tokens)}
        pictures["attention_mask"][0, :2] = 0

    def on(rank: int) -> None:
        mine = copy.deepcopy(model)
        mine.set_attn_implementation({"text_config": register_attention(), "vision_config": "sdpa"})
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        parallelize_module(mine.model.language_model, mesh, ModuleContextParallel(layout=contiguous))
        mine(input_ids=tokens, **pictures)

    with every_rank_raises(r"position_ids count from 0 .* begins at 21: .* cut_inputs_of"):
        run_ranks(on, 2)


def test_what_is_refused():
    """The model as a whole, with the lines that are exact; arguments of which nothing is known."""
    model, tokens, _, pictures = case("llava")
    cut = contiguous(LENGTH, 2)

    def as_a_whole(rank: int, mine: Any) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        parallelize_module(mine, mesh, ModuleContextParallel(layout=contiguous))
        mine(cut.shard(tokens, 1, rank), **pictures, position_ids=cut.shard(positions_of(), 1, rank))

    def with_others(rank: int, mine: Any) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        mine.set_attn_implementation({"text_config": NAME, "vision_config": "sdpa"})
        with pytest.raises(ValueError, match="has no ModuleContextParallel: apply the style first"):
            cut_inputs_of(mine.model.language_model)
        parallelize_module(mine, mesh, {"model.language_model": ModuleContextParallel()})
        handle = cut_inputs_of(mine.model.language_model)
        hidden = torch.ones(BATCH, LENGTH, 32, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match=r"was given \['each'\], .* cut the embeddings yourself"):
            mine.model.language_model(inputs_embeds=hidden, each=hidden)
        handle.remove()
        mine.model.language_model(inputs_embeds=hidden)  # whole on each rank: no positions

    for run, words in (
        (
            as_a_whole,
            r"makes tokens of pixel_values inside.*language model.*cut_inputs_of\(model.model.language_model\)",
        ),
        (with_others, "was given inputs_embeds= without position_ids"),
    ):
        with every_rank_raises(words):
            run_ranks(lambda rank, run=run: run(rank, copy.deepcopy(model)), 2)


WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 24, "hidden_size": 16, "intermediate_size": 24}
WORDS |= {"num_hidden_layers": 2, "num_attention_heads": 2, "projection_size": 16}
BOTH = {"text_config": WORDS | {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2}, "vision_config": SIGHT}
TOWERS = {
    "vit": (transformers.AutoModelForImageClassification, SIGHT | {"num_labels": 3}),
    "dinov2": (transformers.AutoModel, SIGHT),
    "dinov2_with_registers": (transformers.AutoModel, SIGHT | {"num_register_tokens": 3}),
    # As many patches as a half has tokens; without the positions that are random in training.
    "dinov3_vit": (transformers.AutoModel, SIGHT | {"num_register_tokens": 15, "pos_embed_rescale": None}),
    "siglip_vision_model": (transformers.AutoModel, SIGHT),
    "clip": (transformers.AutoModel, BOTH | {"projection_dim": 16}),
    "siglip": (transformers.AutoModel, BOTH),
}


def tower(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    auto, options = TOWERS[kind]
    model = tiny(auto.from_config, transformers.AutoConfig.for_model(kind, **options))
    batch = {"pixel_values": randn(1, BATCH, 3, 16, 16)}
    if kind in ("clip", "siglip"):
        tokens = tokens_of(24)
        tokens[0, 20] = tokens[1, 11] = 1  # CLIP pools the token at the end of the text, SigLIP the last one
        batch |= {"input_ids": tokens}
    return model, batch


def loss_of_tower(outputs: Any) -> torch.Tensor:
    names = ("logits", "logits_per_image", "pooler_output", "last_hidden_state")
    return sum((outputs[name] ** 2).sum() for name in names if name in outputs)


@pytest.mark.parametrize("kind", ["vit", "dinov2_with_registers", "dinov3_vit", "clip", "siglip", *at_night("dinov2")])
@pytest.mark.parametrize("ranks", [2, *at_night(3)])
def test_towers_by_one_line(kind: str, ranks: int):
    """The lines of the page, which the error names: 17 tokens, 20 or 32 with registers."""
    model, batch = tower(kind)
    whole = copy.deepcopy(model)
    with StayDouble():
        loss = loss_of_tower(whole(**batch))
    loss.backward()

    def on(rank: int) -> Any:
        mesh, mine = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        refused = parallelize_module(copy.deepcopy(model), mesh, ModuleContextParallel(layout=contiguous))
        with pytest.raises(NotImplementedError, match="without a language model apply BackboneContextParallel"):
            refused(pixel_values=batch["pixel_values"])
        code = example("encoder of pictures")
        names: dict[str, Any] = {"model": mine, "mesh": mesh, "loss_of": loss_of_tower}
        exec(code, names)
        with StayDouble():
            if kind == "vit":
                verify(mine, mesh, batch, names["step"], tolerance=1e-10)
            loss = names["step"](mine, batch, mesh)
        return loss.detach(), gradients(mine)

    for found in run_ranks(on, ranks):
        assert largest_error(found, (loss.detach(), gradients(whole))) < EXACT


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_models_of_timm(name: str):
    timm = pytest.importorskip("timm", reason="pip install timm, whose torchvision fits this torch")
    model = timm.create_model(name, num_classes=3, img_size=64, depth=2).double().eval()
    pictures, whole = randn(0, 2, 3, 64, 64), copy.deepcopy(model)

    def trained(mine: Any) -> Any:
        loss = (mine(pictures) * randn(1, 2, 3)).sum()
        loss.backward()
        return loss.detach(), gradients(mine)

    def on(rank: int) -> Any:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        parallelize_module(mine, mesh, BackboneContextParallel(ModuleContextParallel(layout=contiguous)))
        loss, _ = trained(mine)
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    wanted = trained(whole)
    for found in run_ranks(on, 2):
        assert largest_error(found, wanted) < EXACT


@pytest.mark.parametrize("kind", ["clip", *at_night("siglip")])
def test_a_text_tower_is_no_language_model(kind: str):
    """It would pool a token of this rank's part. Cut by hand it does, which verify says."""
    model, batch = tower(kind)

    def by_hand(model: Any, batch: Any, mesh: Any) -> torch.Tensor:
        layout, rank = contiguous(24, mesh.size()), mesh.get_local_rank()
        mine = {"input_ids": layout.shard(batch["input_ids"], 1, rank), "pixel_values": batch["pixel_values"]}
        loss = loss_of_tower(model(**mine, position_ids=layout.positions(rank)[None]))
        (loss / mesh.size()).backward()
        sum_gradients(model, mesh)
        return loss

    def on(rank: int) -> None:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        parallelize_module(mine, mesh, {"text_model": ModuleContextParallel(layout=contiguous)})
        with pytest.raises(NotImplementedError, match="apply BackboneContextParallel to the whole model"):
            cut_inputs_of(mine.text_model)
        mine.text_model.set_attn_implementation(NAME)
        with pytest.raises(VerificationError, match=r"it\s+is\s+pooled\s+from\s+this\s+rank's"):
            verify(mine, mesh, batch, by_hand)

    run_ranks(on, 2)


@with_blocks
def test_masks_that_are_ready_under_a_style_on_the_whole_model(monkeypatch: pytest.MonkeyPatch):
    """Embeddings that the program has made and cut itself; one block has a gap, which is no interval of keys."""
    model = case("gemma3")[0].eval()
    embeddings, labels, kinds = randn(0, BATCH, LENGTH, 32), labels_of(tokens_of()), torch.zeros(BATCH, LENGTH).long()
    kinds[0, 3:11] = kinds[1, 2:5] = kinds[1, 9:18] = 1
    one, masks = {"inputs_embeds": embeddings, "position_ids": positions_of()}, gemma3_masks(kinds)
    exact = expected(model, one | {"token_type_ids": kinds}, labels)
    monkeypatch.setattr(modeling_gemma3, "get_block_sequence_ids_for_mask", lambda kinds, device: kinds - 1)

    def on(rank: int, remedy: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh, mine = under_style(model, 2, ModuleContextParallel(layout=contiguous))
        cut = contiguous(LENGTH, 2)
        part = {name: cut.shard(x, 1, rank) for name, x in one.items()} | {"token_type_ids": kinds}
        if remedy:
            part["attention_mask"] = masks
        loss = step(mine, part, cut.shard(labels, 1, rank))
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    words = r"has a gap.*attention_mask as a dict .* \['full_attention', 'sliding_attention'\], .* \(query - key < 5\)"
    with every_rank_raises(words):
        run_ranks(on, 2, False)
    (loss, grads), (other, _) = run_ranks(on, 2, True)
    assert largest_error((loss + other, grads), exact) < EXACT
