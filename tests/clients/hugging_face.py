"""Tiny models of transformers in float64, trained for one step on one process and on ranks."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask, sdpa_mask

from cp_styles import ModuleContextParallel, next_token_labels, sum_gradients
from cp_styles.functions.decode import cache_argument
from cp_styles.integrations.transformers import prefill, register_attention
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from tests.device import DEVICE, here, run_ranks, there
from tests.oracle import dense_attention

VOCABULARY, LENGTH, BATCH = 64, 21, 2

# The argument of models, and of generate(), for a cache: another one since 5.24.
CACHE = cache_argument(inspect.signature(create_causal_mask).parameters)

# Sizes under all the names that configurations have for them; each takes its own. The window (5), the chunks (6) and
# the part of a rank (10 or 11 of 21 tokens) are such that a mask made from a part would be another one.
TINY = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "experts_implementation": "eager",
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads"),
        4,
    ),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "sliding_window": 5,
    "attention_chunk_size": 6,
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "resid_dropout",
            "embedding_dropout",
            "activation_dropout",
            "residual_dropout",
            "dropout",
        ),
        0.0,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "first_k_dense_replace"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


class StayDouble(TorchFunctionMode):
    """Norms, rotary embeddings and routers of transformers compute in float32, whose rounding depends on the number of
    rows. Here they stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()

        def wider(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


def dense(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    is_causal=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    indices=None,
    **kwargs,
):
    """The oracle as an attention function of transformers, with the masks that transformers makes for sdpa."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        cached = key.shape[2] - query.shape[2]
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(cached)
    if attention_mask is not None and attention_mask.is_floating_point():  # a model's own, which is added
        position_bias = attention_mask if position_bias is None else position_bias + attention_mask
        attention_mask = None
    if indices is not None:  # selected keys
        selected = torch.zeros(*query.shape[::2], key.shape[2], dtype=torch.bool).scatter(-1, indices.long(), True)
        attention_mask = attention_mask & selected[:, None]
    if softcap is None and s_aux is None:
        out = dense_attention(query, key, value, attention_mask, scale=scale, bias=position_bias)
        return out.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    logits = query @ key.mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is not None:
        logits = logits.masked_fill(~attention_mask, float("-inf"))
    if s_aux is not None:
        logits = torch.cat((logits, s_aux.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)), -1)
    dead = (logits == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("dense", dense)
AttentionMaskInterface.register("dense", sdpa_mask)
NAME = register_attention()
_LOCK = threading.Lock()  # the default dtype is that of all ranks, which are threads


def config_of(model_type: str, without: Sequence[str] = (), **changes: Any) -> Any:
    """A tiny configuration of two layers, or of four where these are of more kinds; of a model of several kinds of
    input, the one of its text.

    ``without`` names what a type does not take.
    """

    def of_layers(**layers: int) -> Any:
        given = {name: value for name, value in (TINY | layers | changes).items() if name not in without}
        config = transformers.AutoConfig.for_model(model_type, **given)
        text = config.get_text_config()
        return config if text is config else type(text)(**given)

    two, four = of_layers(), of_layers(num_hidden_layers=4)
    kinds = [{*(getattr(config, "layer_types", None) or ())} for config in (two, four)]
    return two if kinds[0] == kinds[1] else four


def tiny(make: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """The model of ``config`` in float64, with weights that make attention sharp enough to see a wrong mask."""
    with _LOCK:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            config._experts_implementation = "eager"  # torch's grouped matmul knows no float64
            model = make(config).double()
        finally:
            torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15)
    return model


def causal_lm(config: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


# Frequencies that depend on the length of a batch: pretrained with 16 positions. With 20 a rank's part is shorter than
# that, and the whole is longer.
ROPES = {
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]},
}
PRETRAINED = 16


def with_rope(kind: str) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4} | ROPES[kind]
    if kind == "longrope":
        rope["original_max_position_embeddings"] = PRETRAINED
    largest = PRETRAINED if kind == "dynamic" else 4 * PRETRAINED
    sizes = {"num_hidden_layers": 2, "sliding_window": None, "attention_chunk_size": None}
    sizes |= {"max_position_embeddings": largest, "rope_parameters": rope}
    model: Any = tiny(causal_lm, config_of("llama", **sizes))
    return model


def tokens_of(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def positions_of(length: int = LENGTH) -> torch.Tensor:
    return torch.arange(length).expand(BATCH, -1)


def batch_of(length: int = LENGTH) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tokens and their positions, and labels."""
    tokens = tokens_of(length)
    return {"input_ids": tokens, "position_ids": positions_of(length)}, labels_of(tokens)


Batch = Mapping[str, torch.Tensor]


def called(model: Any) -> Callable[..., Any]:
    return model


def step(
    model: nn.Module, inputs: Batch, labels: torch.Tensor, how: Callable[[Any], Callable[..., Any]] = called
) -> torch.Tensor:
    """The sum of the tokens' losses, after its backward. ``how`` says what of the model is called."""
    with StayDouble():
        logits = how(model)(**inputs).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer in the backward, in float64 too."""
    contexts = {"context_fn": lambda: (StayDouble(), StayDouble())}
    model.train().gradient_checkpointing_enable({"use_reentrant": False, **contexts})


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def with_attention(model: Any, implementation: Any = "dense") -> Any:
    """A copy of ``model`` that attends by this implementation."""
    one = copy.deepcopy(model)
    one.set_attn_implementation(implementation)
    return one


def under_style(
    model: Any, ranks: int, style: ParallelStyle | None = None, *, implementation: Any = NAME
) -> tuple[DeviceMesh, Any]:
    """This rank's mesh, and its copy of ``model`` under the style, or under ``ModuleContextParallel()``."""
    mesh = init_device_mesh(DEVICE.type, (ranks,), mesh_dim_names=("cp",))
    mine = with_attention(model, implementation).to(DEVICE)
    parallelize_module(mine, mesh, ModuleContextParallel() if style is None else style)
    return mesh, mine


def on_ranks(
    model: nn.Module,
    inputs: Batch,
    labels: torch.Tensor,
    *,
    whole: Batch | None = None,
    ranks: int = 2,
    balancer: Balancer = head_tail,
    style: Mapping[str, Any] | None = None,
    scope: Callable[[Any], Any] | None = None,
    implementation: str = NAME,
    how: Callable[[Any], Callable[..., Any]] = called,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of ``model``; ``inputs`` are cut along their last dim, ``whole`` are not."""

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        options = {"layout": balancer} if scope is None and style is None else dict(style or {})
        mesh, mine = under_style(model, ranks, ModuleContextParallel(**options), implementation=implementation)

        def cut(x: torch.Tensor) -> torch.Tensor:
            layout = balancer(x.shape[-1], ranks)
            return there(layout.shard(x, -1, rank))

        parts = {name: cut(x) for name, x in inputs.items()} | {name: there(x) for name, x in (whole or {}).items()}
        if scope is None:
            loss = step(mine, parts, cut(labels), how)
        else:
            with scope(balancer(labels.shape[-1], ranks)):
                loss = step(mine, parts, cut(labels), how)
        sum_gradients(mine, mesh)
        return here(loss), {name: here(x) for name, x in gradients(mine).items()}

    found = run_ranks(on, ranks)
    return torch.stack([loss for loss, _ in found]).sum(), found[0][1]


def nearly_all_on_one(length: int, ranks: int) -> SequenceLayout:
    """Rank 0 has nearly all tokens, and each further rank one."""
    edges = [0, *range(length - ranks + 1, length + 1)]
    return SequenceLayout.from_chunks([(edges[rank], edges[rank + 1])] for rank in range(ranks))


def prefilled(model: nn.Module, ranks: int = 2) -> None:
    """A prefill of ``model``, in the layout of :func:`on_ranks`."""

    def on(rank: int) -> None:
        _, mine = under_style(model, ranks, ModuleContextParallel(layout=head_tail))
        with StayDouble():
            prefill(mine, tokens_of())

    run_ranks(on, ranks)


def expected(
    model: nn.Module, inputs: Batch, labels: torch.Tensor, implementation: str = "dense"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    one = with_attention(model, implementation)
    return step(one, inputs, labels), gradients(one)


def largest_error(found: Any, wanted: Any) -> float:
    """Of the loss and of every gradient, relative to its norm, or to a thousandth of the largest where it is less."""
    (loss, grads), (wanted_loss, wanted_grads) = found, wanted
    assert grads.keys() == wanted_grads.keys()
    floor = 1e-3 * max(float(grad.norm()) for grad in wanted_grads.values())
    errors = [
        float((grads[name] - grad).norm()) / max(float(grad.norm()), floor) for name, grad in wanted_grads.items()
    ]
    return max(abs(float(loss - wanted_loss)) / abs(float(wanted_loss)), *errors)


def error_of(model: nn.Module, length: int, implementation: str = "dense", **options: Any) -> float:
    """:func:`largest_error` of a step of random tokens on ranks, with the options of :func:`on_ranks`."""
    inputs, labels = batch_of(length)
    return largest_error(on_ranks(model, inputs, labels, **options), expected(model, inputs, labels, implementation))


def labels_of(tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    return next_token_labels(tokens, **options)
