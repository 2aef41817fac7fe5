"""Inputs of a model: positions of its tokens, and a language model that cuts its inputs.

Shapes: B batch, S whole sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cp_styles._lib.introspect import input_names
from cp_styles._lib.troubleshooting import see
from cp_styles.checks.positions import counts_mask, find_padding_position
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.styles.module import calls_in


def position_ids_of(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The positions that ``model`` gives to the tokens of whole sequences on one device. Shard them with the tokens.

    ::

        position_ids = layout.shard(position_ids_of(model, tokens), 1, rank)

    Most models count from 0. RoBERTa's family, ESM and MPNet count from the position after the position of padding, and
    do not count padding. OPT and BioGPT count the tokens that ``attention_mask`` shows. No communication.

    Args:
        model: a model of transformers.
        input_ids: [B, S], the tokens of whole sequences.
        attention_mask: [B, S], 0 for padding. None: no padding.

    Returns:
        Positions, [B, S].
    """
    if attention_mask is not None and counts_mask(model):
        return attention_mask.cumsum(1) * attention_mask - 1
    padding = find_padding_position(model)
    if padding is not None:
        present = (input_ids != padding).long()
        return present.cumsum(1) * present + padding
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)


# The sequence dim of each argument of a language model. None: every rank needs the whole argument.
_SEQ_DIMS = {
    **dict.fromkeys(("input_ids", "inputs_embeds", "visual_pos_masks", "per_layer_inputs"), 1),
    "position_ids": -1,
    "attention_mask": None,
}


def cut_inputs_of(language_model: nn.Module) -> RemovableHandle:
    """Let the language model in a vision-language model shard its inputs, which are whole after the vision tower.

    ::

        parallelize_module(model, mesh, {"model.language_model": ModuleContextParallel()})
        cut_inputs_of(model.model.language_model)
        logits = model(input_ids=tokens, pixel_values=pixel_values).logits  # whole inputs, logits of this rank's part

    Every rank runs the vision tower on all pictures. As for any parameter, its gradients are shares: sum them.
    No communication. The inputs of the whole model must be equal on all ranks: BatchSharder compares them.

    Args:
        language_model: the module with the ModuleContextParallel, whose layout shards the inputs.

    Returns:
        The handle of a forward pre-hook, to remove it.

    Raises:
        ValueError: ``language_model`` has no style.
        NotImplementedError: ``language_model`` is a text tower, as in CLIP and SigLIP, which pools its tokens. In the
            forward: a tensor may or may not have a sequence dim.
    """
    calls = calls_of_style(language_model, "cut_inputs_of")
    if "inputs_embeds" not in input_names(language_model):
        raise NotImplementedError(
            f"{calls.binding.name}: {type(language_model).__name__} takes no inputs_embeds, so it is no language model "
            "among whose tokens pictures are put. A text tower pools its tokens, and would pool this rank's tokens "
            f"alone: apply BackboneContextParallel to the whole model{see('Pictures among the tokens')}"
        )

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        inputs: dict[str, Any] = dict(zip(input_names(module), args, strict=False)) | kwargs
        tokens: torch.Tensor = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        layout, rank = calls.binding.layout_for(tokens.shape[1]), calls.binding.group.rank()
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = torch.arange(layout.length, device=tokens.device).unsqueeze(0)
        pictures, features = inputs.get("visual_pos_masks"), inputs.pop("deepstack_visual_embeds", None)
        unknown = [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in _SEQ_DIMS]
        if unknown:
            raise NotImplementedError(
                f"{calls.binding.name}: {type(module).__name__} was given {unknown}, and it is not known how to cut "
                "them: cut the embeddings yourself, and call the language model with this rank's part of all arguments"
            )
        cuts = [(name, dim) for name, dim in _SEQ_DIMS.items() if dim is not None and inputs.get(name) is not None]
        part: dict[str, Any] = {name: layout.shard(inputs[name], dim, rank).contiguous() for name, dim in cuts}
        if pictures is not None and features is not None:  # features have one row for each token of a picture, in order
            rows = layout.shard(pictures.flatten().cumsum(0).view_as(pictures) - 1, 1, rank)[part["visual_pos_masks"]]
            part["deepstack_visual_embeds"] = [feature[rows] for feature in features]
        return (), inputs | part

    return language_model.register_forward_pre_hook(cut, with_kwargs=True, prepend=True)


def calls_of_style(model: nn.Module, function: str) -> AttentionCalls:
    calls = calls_in(model)
    if calls is None:
        raise ValueError(
            f"{function}: {type(model).__name__} has no ModuleContextParallel: apply the style first "
            "(parallelize_module(model, mesh, ModuleContextParallel())); on one device call generate() alone"
        )
    return calls
