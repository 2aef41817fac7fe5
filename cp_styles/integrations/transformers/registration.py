"""Registration of the attention and of the mask function of this package in transformers."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from cp_styles.integrations.transformers.attention import attention_function
from cp_styles.integrations.transformers.latents import note_latent
from cp_styles.integrations.transformers.masks import make_mask


def register_attention(name: str = "context_parallel") -> str:
    """Register ``attn_implementation=name`` in transformers; returns ``name``. Further calls change nothing.

    Pass the name to ``from_config``, ``from_pretrained`` or ``model.set_attn_implementation``. The model then runs only
    under a ModuleContextParallel; for one device choose "sdpa" or "eager" instead. No communication.
    """
    import_module("transformers").AttentionInterface.register(name, attention_function)
    import_module("transformers.masking_utils").AttentionMaskInterface.register(name, make_mask)
    return name


def send_latents(model: nn.Module) -> list[RemovableHandle]:
    """Let the latents of ``model`` travel between ranks, in place of the keys and values of all heads.

    ::

        model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())
        parallelize_module(model, mesh, ModuleContextParallel())
        send_latents(model)  # on every rank, after adapters

    For models with multi-head latent attention, such as DeepSeek-V3: layers with ``expand_kv`` and ``kv_b_proj``. The
    results are the same, in the bytes of :func:`~cp_styles.context_latent_attention`. Its docstring names the price:
    each rank expands the latents that it receives. The model expands the latents of its own tokens too, for their
    rotary part alone. Decoding after ``prefill`` does not change.

    No communication.

    Args:
        model: the model, or a part of it.

    Returns:
        The handles of the hooks on ``kv_b_proj``, to remove them. Then heads travel again.

    Raises:
        ValueError: no layer of ``model`` has latents, or its attention is not the function of
            :func:`register_attention`.
        NotImplementedError: a ``kv_b_proj`` is not a plain linear layer without a bias, such as a layer with an
            adapter. In the forward, on every rank: its weight is a DTensor, or the model computes its keys in another
            way.
    """
    layers: list[tuple[str, Any]] = [
        (name, layer) for name, layer in model.named_modules() if hasattr(layer, "expand_kv")
    ]
    if not layers:
        raise ValueError(
            f"send_latents: {type(model).__name__} has no layer that expands latents (expand_kv, kv_b_proj): leave "
            "send_latents out, or call context_latent_attention in the attention of your own model"
        )
    for name, layer in layers:
        _refuse_other_attention(name, layer.config)
        up = layer.kv_b_proj
        if not isinstance(up, nn.Linear) or type(up).forward is not nn.Linear.forward or up.bias is not None:
            raise NotImplementedError(
                f"send_latents: {name}.kv_b_proj is {up}, and latents are expanded by the weight of a plain nn.Linear "
                "without a bias alone: leave send_latents out, or leave kv_b_proj out of the adapters"
            )
    hooks = [partial(note_latent, partial(_refuse_other_attention, name, layer.config)) for name, layer in layers]
    return [layer.kv_b_proj.register_forward_hook(hook) for (_, layer), hook in zip(layers, hooks, strict=True)]


def _refuse_other_attention(name: str, config: Any) -> None:
    """Raise unless the attention of the layer ``name`` is :func:`attention_function`, which takes the latents."""
    implementation = config._attn_implementation
    if import_module("transformers").AttentionInterface().get(implementation) is not attention_function:
        raise ValueError(
            f"send_latents: {name} attends by {implementation!r}, which sends its heads: make the model with "
            "attn_implementation=register_attention(), or call model.set_attn_implementation(register_attention())"
        )
