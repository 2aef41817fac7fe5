"""Every type of language model that transformers has: exact, refused or wrong under context parallelism.

    python -m tests.clients.sweep [--kind causal|seq2seq|masked] [--training] [MODEL_TYPE ...]

A tiny model of each type, with random weights in float64, makes one step on one process and one on two ranks, and is
proved in place by verify: "proved", or "noticed" if verify calls it wrong. Prints a line for each type, and a table at
the end. The exit status counts the types that are wrong or misjudged, and those that were not made and that LEFT_OUT
does not name with a reason. About fifteen minutes for the causal ones on two cores.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.auto import modeling_auto

from cp_styles import ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from cp_styles.integrations.transformers import position_ids_of
from cp_styles.testing import RankError
from cp_styles.verify import verify
from tests.clients.hugging_face import (
    NAME,
    TINY,
    config_of,
    expected,
    labels_of,
    largest_error,
    on_ranks,
    positions_of,
    step,
    tiny,
    tokens_of,
)
from tests.clients.test_mixers import MODELS as MIXERS
from tests.device import DEVICE, run_ranks, there

MOST = 20_000_000  # parameters, of types whose sizes have names of their own: give them in OWN
EXACT = 1e-10  # float64 sums in another order give 1e-15; one key too many or too few gives 1e-3 and more
KINDS = {
    "causal": (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "seq2seq": (transformers.AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
}
MLA = "deepseek_v2", "deepseek_v3", "minicpm3", "youtu", "axk1", "longcat_flash"
GEMMA4 = {
    "without": ["attention_chunk_size"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT |= {"image_size": 8, "patch_size": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
INKLING = {
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    **dict.fromkeys(("swa_num_attention_heads", "num_attention_heads"), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("swa_head_dim", "head_dim", "d_rel"), 8),
    "sliding_window_size": 5,
    "rel_extent": 7,
    "log_scaling_n_floor": 3,
    "unpadded_vocab_size": TINY["vocab_size"],
    "loop_layer_index_start": 2,
    "loop_layer_index_end": 4,
}
WINDOWS = "heavily_compressed_attention", "compressed_sparse_attention"
INDEXER = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
# Sizes that a type needs beside or instead of those of TINY.
OWN: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 4, "num_key_value_heads": 4} for name in MLA},
    "t5": {"decoder_start_token_id": 0},
    **{
        name: {"num_hidden_layers": 2} | MIXERS[name]
        for name in ("falcon_h1", "kimi_linear", "mamba2", "zamba", "zamba2")
    },
    "lfm2_moe": {"num_hidden_layers": 2, **MIXERS["lfm2_moe"], "rope_parameters": ROPE},
    "gemma4_text": GEMMA4 | {"num_kv_shared_layers": 2},
    "gemma4_unified_text": GEMMA4,
    **{
        name: GEMMA4
        | {"num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4}
        for name in ("gemma3n", "gemma3n_text")
    },
    "cohere_compass_text": {
        "without": ["head_dim"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "mllama": {"without": ["head_dim"], "cross_attention_layers": [], "rope_parameters": ROPE},
    "git": {"vision_config": SIGHT},
    "xlnet": {"without": ["max_position_embeddings"]},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "doge": {"keep_window_size": 64},
    "luke": {"entity_vocab_size": 8},
    "esmc": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16, "without": ["attention_chunk_size"]},
    "squeezebert": {"embedding_size": 32},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "funnel": {"without": ["num_hidden_layers", "n_layer"], "block_sizes": [1, 1]},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 2),
        **dict.fromkeys(("indexer_head_dim", "indexer_budget"), 8),
        "indexer_kv_heads": 1,
    },
    "xlstm": {"without": ["v_head_dim"], "num_blocks": 4, "num_heads": 4, "chunk_size": 16},
    **{name: {"rotary_dim": 4} for name in ("codegen", "gptj")},
    "falcon": {"without": ["head_dim"]},
    "gpt_neo": {
        "without": ["n_layer", "num_hidden_layers"],
        "num_layers": 2,
        "attention_types": [[["global"], 2]],
    },
    "zaya": {"num_experts_per_tok": 1},
    "mistral4": {
        "head_dim": 4,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        | {"type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
    },
    **{
        name: {"head_dim": 4, "num_key_value_heads": 4, **INDEXER, **sizes}
        for name, sizes in (
            ("deepseek_v32", {}),
            ("axk2", {}),
            ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 2}),
            ("hy_v4", {"indexer_types": ["full", "shared"] * 2}),
            ("mistral_large4_text", {}),
            ("dots3_note_text", {"num_hidden_layers": 1, "without": ["attention_chunk_size"]}),
        )
    },
    "deepseek_v4": {
        "without": ["attention_chunk_size"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", *WINDOWS, WINDOWS[1]],
        "compress_rates": dict(zip(WINDOWS, (6, 3), strict=True)),
        **INDEXER | {"index_topk": 3},
        "o_groups": 2,
        "o_lora_rank": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    **{name: {**INKLING, "n_layers_per_attn_res_block": 2} for name in ("inkling2_text", "inkling2_loop_text")},
    "inkling_text": INKLING,
    "minimax_m3_vl_text": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        **INDEXER | {"index_n_heads": 2, "index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 1},
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 32,
        "rotary_dim": 4,
        "head_dim": 8,
    },
    "glm5_next_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        **INDEXER | {"index_topk": 6, "index_kpool": 3},
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "linear_num_heads": 4,
        **dict.fromkeys(("linear_head_dim", "head_dim"), 8),
    },
    "fsmt": {"langs": ["a", "b"], "src_vocab_size": 64, "tgt_vocab_size": 64},
}


# Types that AutoModelForCausalLM does not make: their own class, or None for that of their text, which has no head.
CLASSES = {"mistral4": "Mistral4ForCausalLM", "mistral_large4_text": None, "glm5_next_text": None}
CLASSES |= {"emu3": "Emu3ForCausalLM", "mllama": "MllamaForCausalLM", "dots3_note": None}
MORE = "mistral4", "mistral_large4_text", "glm5_next_text"  # and that no list of transformers names


def of_text(model_type: str, **sizes: Any) -> Any:
    """The configuration of a type of several kinds of input, without the towers of the others."""
    text = {name: value for name, value in (TINY | sizes).items() if name not in sizes.get("without", ())}
    towers: dict[str, Any] = {"vision_config": None, "audio_config": None}
    return transformers.AutoConfig.for_model(model_type, text_config=text, **towers)


BLT = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
WIDE = BLT | {"hidden_size": 64}
# Configurations that have other configurations in them, or sizes by names of their own alone.
BY_HAND: dict[str, Callable[[], Any]] = {
    "gemma4": lambda: of_text("gemma4", **GEMMA4, num_kv_shared_layers=2),
    "gemma4_unified": lambda: of_text("gemma4_unified", **GEMMA4, use_bidirectional_attention="vision"),
    "qwen4_exp": lambda: of_text("qwen4_exp", **OWN["qwen4_exp_text"]),
    "dots3_note": lambda: config_of("dots3_note_text", **OWN["dots3_note_text"]),
    "dbrx": lambda: transformers.DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        rope_parameters=ROPE,
    ),
    "phi4_multimodal": lambda: transformers.AutoConfig.for_model(
        "phi4_multimodal",
        **{name: value for name, value in TINY.items() if name != "head_dim"},
        vision_config=SIGHT | {"image_size": 28, "patch_size": 14, "crop_size": 28, "num_hidden_layers": 2},
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "input_size": 16,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    ),
    "blt": lambda: transformers.BltConfig(
        vocab_size=64,
        encoder_hash_byte_group_vocab=50,
        local_attention_window_len=8,
        **{f"{name}_config": BLT | {"hidden_size_global": 64} for name in ("patcher", "encoder", "decoder")},
        global_config=WIDE,
        use_cache=False,
    ),
    "t5gemma": lambda: transformers.AutoConfig.for_model(
        "t5gemma", **dict.fromkeys(("encoder", "decoder"), TINY | {"query_pre_attn_scalar": 8})
    ),
    "t5gemma2": lambda: transformers.AutoConfig.for_model(
        "t5gemma2",
        decoder=TINY | {"query_pre_attn_scalar": 8},
        encoder={"text_config": TINY | {"query_pre_attn_scalar": 8}, "vision_config": SIGHT, "image_token_index": 60}
        | {"mm_tokens_per_image": 4, "eoi_token_index": 61},
        image_token_index=60,
    ),
}
SOUNDS = """
    audioflamingo3 glmasr granite_speech granite_speech_plus moss_transcribe_diarize musicflamingo nemo_speechlm omniasr
    qwen2_audio qwen3_asr vibevoice_asr voxtral voxtral_realtime
"""
LEFT_OUT = {
    **dict.fromkeys(SOUNDS.split(), "a model of sounds, whose text is a type of the causal ones"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "decodes sounds, given tokens [B x codebooks, S]"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "drafts tokens from the states of another model's layers"
    ),
    "encoder-decoder": "any two models",
    "xglm": "its attention, in plain operations, does not run in float64",
    "prophetnet": "transformers cannot make a text configuration of its configuration, and asks for one",
    "perceiver": "latents in place of tokens: its text is read once",
    "reformer": "attention by hashes, which are random, in layers that are reversible",
}


def configured(model_type: str, **changes: Any) -> Any:
    """The tiny configuration of a type."""
    if model_type not in BY_HAND:
        return config_of(model_type, **changes | OWN.get(model_type, {}))
    config = BY_HAND[model_type]()
    for name, value in changes.items():
        setattr(config, name, value)
    return config


# Types whose oracle is their own code, because the layers do not say what transformers' masks do: a dropped mask is
# causal in it, and the layer of a decoder says is_causal=False. DeepSeek-V4 and MiniMax M3 have masks of biases, and
# Inkling 2 has sinks of each query, and attends to the states of its layers.
EAGER = "bigbird_pegasus", "deepseek_v4", "minimax_m3_vl", "minimax_m3_vl_text", "inkling2_text", "inkling2_loop_text"


def made(kind: str, model_type: str, config: Any) -> Any:
    if model_type not in CLASSES:
        model = KINDS[kind][0].from_config(config)
        if hasattr(model, "set_default_language"):  # xmod
            model.set_default_language(config.languages[0])
        return model
    name = CLASSES[model_type]
    if name is not None:
        return getattr(transformers, name)(config)
    model = transformers.AutoModel.from_config(config)

    class WithHead(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs).last_hidden_state
            return SimpleNamespace(logits=out @ self.get_input_embeddings().weight.T)

    model.__class__ = WithHead
    return model


def tiny_of(model_type: str, **sizes: Any) -> Any:
    """The tiny causal model of a type, in training."""
    config = config_of(model_type, **OWN.get(model_type, {}) | sizes)
    return tiny(partial(made, "causal", model_type), config).train()


def verdict(kind: str, model_type: str, *, training: bool) -> tuple[str, str]:
    """ "exact", "refused", "wrong", "random" (one process does not repeat itself), or "not made"; and details."""
    tokens, labels = tokens_of(), labels_of(tokens_of())
    inputs = {"input_ids": tokens_of(seed=1), "decoder_input_ids": tokens}
    alone = partial(expected, labels=labels, implementation="eager" if model_type in EAGER else "dense")
    try:
        with torch.device("meta"):
            size = sum(x.numel() for x in made(kind, model_type, configured(model_type)).parameters())
        if size > MOST:
            return "not made", f"{size:,} parameters"
        model = tiny(partial(made, kind, model_type), configured(model_type)).train(training)
        if kind == "seq2seq":
            names = {"position_ids", "decoder_position_ids"} & inspect.signature(type(model).forward).parameters.keys()
            inputs |= dict.fromkeys(names, positions_of())
        else:
            inputs = {"input_ids": tokens, "position_ids": position_ids_of(model, tokens)}
        wanted, again = alone(model, inputs), alone(model, inputs)
    except Exception as error:  # of any kind: of a model that is not made, or that does not run
        if "position_ids" not in str(error):
            return "not made", words(error)
        try:
            del inputs["position_ids"]
            wanted, again = alone(model, inputs), alone(model, inputs)
        except Exception as error:
            return "not made", words(error)
    off = largest_error(again, wanted)
    if off > EXACT:
        return "random", f"one process differs from itself by {off:.1e}"
    try:
        off = largest_error(on_ranks(model, inputs, labels, implementation=NAME), wanted)
    except (RankError, ValueError, NotImplementedError) as error:
        return "refused", words(error)
    except Exception as error:
        return "error", words(error)
    equal, found = proved(model, inputs, labels)
    return f"{'exact' if off < EXACT else 'wrong'}, {'proved' if equal else 'noticed'}", f"{off:.1e} {found}"


def proved(
    model: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor, prepare: Callable[[Any], Any] | None = None
) -> tuple[bool, str]:
    """Whether verify finds the ranks equal to one, and how many gradients its planted mistake moves, or its finding.

    ``prepare`` is called with the model of a rank before it gets its style.
    """

    def act(mine: Any, batch: dict[str, torch.Tensor], mesh: Any) -> torch.Tensor:
        parts = {
            name: head_tail(x.shape[-1], mesh.size()).shard(x, -1, mesh.get_local_rank()) for name, x in batch.items()
        }
        of_part = parts.pop("labels")
        total = step(mine, parts, of_part).detach().clone()
        sum_gradients(mine, mesh)
        dist.all_reduce(total, group=mesh.get_group())
        return total

    def on(rank: int) -> Any:
        mesh = init_device_mesh(DEVICE.type, (2,), mesh_dim_names=("cp",))
        mine = copy.deepcopy(model).to(DEVICE)
        mine.set_attn_implementation(NAME)
        if prepare is not None:
            prepare(mine)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=head_tail))
        whole = {name: there(x) for name, x in inputs.items()} | {"labels": there(labels)}
        return verify(mine, mesh, whole, act, tolerance=1e-9).power

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            power = run_ranks(on, 2, timeout_seconds=1200.0)[0]
    except Exception as error:
        return False, words(error)
    return True, "" if power is None else f"a planted mistake moved {power.moved} of {power.of} gradients"


def words(error: Exception) -> str:
    text = " ".join(str(next(iter(getattr(error, "errors", {}).values()), error)).split())
    return f"{type(error).__name__}: {re.sub(r'ModuleContextParallel[^:]*: ', '', text)[:170]}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.sweep", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="causal")
    parser.add_argument("--training", action="store_true", help="dropout and noise of routers as in training")
    parser.add_argument("model_type", nargs="*", help="default: all of the kind")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    table: dict[str, list[str]] = collections.defaultdict(list)
    more = MORE if options.kind == "causal" else ()
    for model_type in options.model_type or [*KINDS[options.kind][1], *more]:
        kind, details = verdict(options.kind, model_type, training=options.training)
        if kind == "not made" and model_type in LEFT_OUT:
            kind, details = "left out", LEFT_OUT[model_type]
        table[kind].append(model_type)
        print(f"{model_type:28} {kind:14} {details}", flush=True)
    for kind, names in table.items():
        print(f"\n{kind}: {len(names)}\n{' '.join(names)}")
    bad = ("exact, noticed", "error", "not made")
    return sum(len(names) for kind, names in table.items() if "wrong" in kind or kind in bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
