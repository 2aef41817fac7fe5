"""Heads of transformers that need the whole sequence, and its encoders of pictures: exact, refused or wrong.

    python -m tests.clients.sweep_heads [--kind classes|tokens|answers|choices|sentences|masked|images|...] [TYPE ...]

A tiny model of each type, with random weights in float64, makes a step on one process, and the same step on two ranks
with one line more: ``BackboneContextParallel()`` on the model. The loss is the model's own. Prints a line for each type
and a table. The exit status counts the types that are wrong, and those that were not made and that LEFT_OUT does not
name with a reason.
"""

from __future__ import annotations

import argparse
import collections
import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.auto import modeling_auto

from cp_styles import BackboneContextParallel, ModuleContextParallel, contiguous, parallelize_module, sum_gradients
from cp_styles.testing import RankError
from tests.clients.hugging_face import (
    BATCH,
    NAME,
    StayDouble,
    gradients,
    largest_error,
    tiny,
    tokens_of,
)
from tests.clients.sweep import EXACT, MOST, configured, words
from tests.clients.sweep import LEFT_OUT as LEFT_OUT_TEXTS
from tests.device import DEVICE, here, run_ranks, there
from tests.oracle import randn

CLASSES, PICTURE = 3, 16


def texts(**labels: Any) -> dict[str, Any]:
    """Tokens that end with eos_token_id, with padding at the end of one row."""
    tokens = tokens_of()
    tokens[0, -1] = tokens[1, -5] = 2
    tokens[1, -4:] = 0
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), **labels}


def choices() -> dict[str, Any]:
    tokens = torch.stack([tokens_of(seed=1), tokens_of(seed=2)], 1)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor([1, 0])}


def pictures(**labels: Any) -> dict[str, Any]:
    return {"pixel_values": randn(1, BATCH, 3, PICTURE, PICTURE), **labels}


def labelled() -> dict[str, Any]:
    given = texts()
    return given | {"labels": tokens_of(seed=3).masked_fill(given["attention_mask"] == 0, -100) % CLASSES}


@dataclass(frozen=True)
class Kind:
    """Models that one class of transformers makes, and a batch with labels, if the models make a loss."""

    auto: Any
    names: Any
    batch: Callable[[], dict[str, Any]]


WORDS = torch.tensor([0, CLASSES - 1])
KINDS = {
    "classes": Kind(
        transformers.AutoModelForSequenceClassification,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        partial(texts, labels=WORDS),
    ),
    "tokens": Kind(
        transformers.AutoModelForTokenClassification,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        labelled,
    ),
    "answers": Kind(
        transformers.AutoModelForQuestionAnswering,
        modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        partial(texts, start_positions=torch.tensor([1, 12]), end_positions=torch.tensor([14, 15])),
    ),
    "choices": Kind(
        transformers.AutoModelForMultipleChoice, modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES, choices
    ),
    "sentences": Kind(
        transformers.AutoModelForNextSentencePrediction,
        modeling_auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES,
        partial(texts, labels=torch.tensor([0, 1])),
    ),
    "masked": Kind(
        transformers.AutoModelForMaskedLM,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        lambda: texts(labels=tokens_of(seed=3)),
    ),
    "bodies": Kind(transformers.AutoModel, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, texts),
    "images": Kind(
        transformers.AutoModelForImageClassification,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        partial(pictures, labels=WORDS),
    ),
    "vision": Kind(transformers.AutoModel, modeling_auto.MODEL_FOR_IMAGE_MAPPING_NAMES, pictures),
}
SIGHT = {"image_size": PICTURE, "patch_size": 4, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
SIGHT |= {"intermediate_size": 24, "num_channels": 3}
SIGHT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "layer_dropout"), 0.0)


WITH_TEXT = "clip", "metaclip_2", "siglip", "siglip2"  # the sizes of pictures are in a configuration of their own
LEFT_OUT = LEFT_OUT_TEXTS | {
    "bros": "reads the boxes of words on a page",
    "layoutlmv2": "needs detectron2",
    "layoutlmv3": "reads the picture of a page, and boxes",
    "lilt": "reads the boxes of words on a page",
    "lxmert": "reads the features of a picture",
    "longformer": "asks for three separators in each text of a question or of choices",
    "qwen3_5": "its class of tokens takes the configuration with a tower",
    "funnel": "its body reads hidden states that AutoModel does not ask for",
    **dict.fromkeys(
        ["bit", "convnext", "convnextv2", "dinov3_convnext", "efficientnet", "mobilevitv2", "regnet", "resnet"],
        "convolutions over a grid, without attention or next to it",
    ),
    **dict.fromkeys(
        [
            "cvt",
            "donut-swin",
            "focalnet",
            "glpn",
            "hiera",
            "levit",
            "pvt",
            "pvt_v2",
            "segformer",
            "swin",
            "swin2sr",
            "swinv2",
        ],
        "stages of other resolutions, with windows or pooled keys",
    ),
    "dinat": "needs natten",
    **dict.fromkeys(
        [
            "conditional_detr",
            "dab-detr",
            "deformable_detr",
            "detr",
            "table-transformer",
            "timm_backbone",
            "timm_wrapper",
        ],
        "needs timm",
    ),
    **dict.fromkeys(["cohere2_vision", "llama4", "mllama", "shieldgemma2"], "a language model with a tower"),
    **dict.fromkeys(["timesformer", "videomae", "videoprism_vision_model", "vivit"], "videos"),
    "depth_pro": "scales of one picture, as batches of three encoders",
    "deit": "its class needs torchvision",
    "siglip2": "reads patches in place of pictures",
    "imagegpt": "reads the colors of a picture as tokens",
    "yolos": "detects objects by tokens behind the patches; its sizes are pairs",
}


def of_kind(kind: str, model_type: str) -> Any:
    """The tiny configuration of a type."""
    if "pixel_values" in KINDS[kind].batch():
        sizes = {"vision_config": SIGHT} if model_type in WITH_TEXT else SIGHT
        return transformers.AutoConfig.for_model(model_type, **sizes, num_labels=CLASSES)
    labels = 2 if kind in ("sentences", "answers") else CLASSES
    return configured(model_type, num_labels=labels)


def trained(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients. Without labels the loss is a sum of squares of all outputs."""
    with StayDouble():
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, dict) else None
        if loss is None:
            names = [name for name in output if isinstance(output[name], torch.Tensor)]
            loss = torch.stack([(output[name] * randn(at, *output[name].shape)).sum() for at, name in enumerate(names)])
            loss = loss.sum()
    loss.backward()
    return loss.detach(), gradients(model)


def on_ranks(
    model: Any, batch: dict[str, Any], ranks: int = 2, implementation: str = NAME, style: Any = None, **options: Any
) -> list[Any]:
    """What each rank of a copy with the style returns."""
    style = ModuleContextParallel() if style is None else style

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh = init_device_mesh(DEVICE.type, (ranks,), mesh_dim_names=("cp",))
        mine = copy.deepcopy(model).to(DEVICE)
        if implementation:
            mine.set_attn_implementation(implementation)
        parallelize_module(mine, mesh, BackboneContextParallel(style, **options))
        loss, _ = trained(mine, {name: there(x.clone()) for name, x in batch.items()})  # Splinter changes its labels
        sum_gradients(mine, mesh)
        return here(loss), {name: here(x) for name, x in gradients(mine).items()}

    return run_ranks(on, ranks)


def alone(model: Any, batch: dict[str, Any]) -> Any:
    return trained(copy.deepcopy(model), {name: x.clone() for name, x in batch.items()})


def verdict(kind: str, model_type: str, ranks: int) -> tuple[str, str]:
    """ "exact", "refused", "wrong" or "not made", and details."""
    case, batch = KINDS[kind], KINDS[kind].batch()
    try:
        with torch.device("meta"):
            size = sum(x.numel() for x in case.auto.from_config(of_kind(kind, model_type)).parameters())
        if size > MOST:
            return "not made", f"{size:,} parameters"
        model = tiny(case.auto.from_config, of_kind(kind, model_type)).eval()
        wanted = alone(model, batch)
        off = largest_error(alone(model, batch), wanted)
        if not off <= EXACT:  # or no number, as of Splinter with padding
            return "random", f"one process differs from itself by {off:.1e}"
    except Exception as error:  # of any kind: of a model that is not made, or that does not run
        return "not made", words(error)
    try:
        style = ModuleContextParallel(layout=contiguous) if "pixel_values" in batch else None
        implementation = "sdpa" if "pixel_values" in batch else NAME
        found = on_ranks(model, batch, ranks, implementation, style)
    except (RankError, ValueError, NotImplementedError) as error:
        return "refused", words(error)
    except Exception as error:
        return "error", words(error)
    off = max(largest_error(each, wanted) for each in found)
    return "exact" if off < EXACT else "wrong", f"{off:.1e}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.sweep_heads", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="classes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("model_type", nargs="*", help="default: all of the kind")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    table: dict[str, list[str]] = collections.defaultdict(list)
    for model_type in options.model_type or KINDS[options.kind].names:
        state, details = verdict(options.kind, model_type, options.ranks)
        if state == "not made" and model_type in LEFT_OUT:
            state, details = "left out", LEFT_OUT[model_type]
        table[state].append(model_type)
        print(f"{model_type:28} {state:10} {details}", flush=True)
    for state, names in table.items():
        print(f"\n{state}: {len(names)}\n{' '.join(names)}")
    return sum(len(table[state]) for state in ("wrong", "error", "not made"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
