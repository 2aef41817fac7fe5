"""Every type of language model that transformers has: exact, refused or wrong under context parallelism.

    python -m tests.clients.sweep [--kind causal|seq2seq|masked] [--training] [MODEL_TYPE ...]

A tiny model of each type, with random weights in float64, makes one step on one process and one on two ranks, and is
proved in place by verify: "proved", or "noticed" if verify calls it wrong. Prints a line for each type, and a table at
the end. The exit status counts the types that are wrong or that are misjudged. About fifteen minutes for the causal
ones on two cores.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import re
import sys
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.auto import modeling_auto

from cp_styles import ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from cp_styles.testing import RankError
from cp_styles.verify import verify
from tests.clients.hugging_face import (
    NAME,
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
from tests.device import DEVICE, run_ranks, there

MOST = 20_000_000  # parameters, of types whose sizes have names of their own: give them in OWN
EXACT = 1e-10  # float64 sums in another order give 1e-15; one key too many or too few gives 1e-3 and more
KINDS = {
    "causal": (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "seq2seq": (transformers.AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
}
GEMMA4 = {
    "without": ["attention_chunk_size"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
INDEXER = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
# Sizes that a type needs beside or instead of those of TINY.
OWN: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 4} for name in ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu")},
    **{name: {"head_dim": 4, "num_key_value_heads": 4} for name in ("axk1", "longcat_flash")},
    **{
        name: {
            "without": ["attention_chunk_size"],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            **sizes,
        }
        for name, sizes in (
            ("gemma3n_text", {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4}),
            ("gemma4_text", {}),
        )
    },
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
    "xglm": {"attention_heads": 4, "num_layers": 2},
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
    "glm5_next_text": {  # its attention selects groups of keys
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 4,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "linear_num_heads": 4,
        **dict.fromkeys(("linear_head_dim", "head_dim"), 8),
    },
    "fsmt": {"langs": ["a", "b"], "src_vocab_size": 64, "tgt_vocab_size": 64},
}


# Types that AutoModelForCausalLM does not make: their own class, or None for that of their text, which has no head.
CLASSES = {"mistral4": "Mistral4ForCausalLM", "mistral_large4_text": None, "glm5_next_text": None}


def made(kind: str, model_type: str, config: Any) -> Any:
    if model_type not in CLASSES:
        return KINDS[kind][0].from_config(config)
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


def verdict(kind: str, model_type: str, *, training: bool) -> tuple[str, str]:
    """ "exact", "refused", "wrong", "random" (one process does not repeat itself), or "not made"; and details."""
    tokens, labels = tokens_of(), labels_of(tokens_of())
    inputs = {"input_ids": tokens, "position_ids": positions_of()}
    if kind == "seq2seq":
        inputs = {"input_ids": tokens_of(seed=1), "decoder_input_ids": tokens}
    try:
        with torch.device("meta"):
            size = sum(
                x.numel() for x in made(kind, model_type, config_of(model_type, **OWN.get(model_type, {}))).parameters()
            )
        if size > MOST:
            return "not made", f"{size:,} parameters"
        model = tiny(partial(made, kind, model_type), config_of(model_type, **OWN.get(model_type, {}))).train(training)
        wanted = expected(model, inputs, labels)
        again = expected(model, inputs, labels)
    except Exception as error:  # of any kind: of a model that is not made, or that does not run
        if "position_ids" not in str(error):
            return "not made", words(error)
        try:
            del inputs["position_ids"]
            wanted, again = expected(model, inputs, labels), expected(model, inputs, labels)
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
    proof = proved(model, inputs, labels)
    kind = f"{'exact' if off < EXACT else 'wrong'}, {'proved' if proof is None else 'noticed'}"
    return kind, f"{off:.1e} {proof or ''}"


def proved(model: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> str | None:
    """None, or the finding of verify."""

    def act(mine: Any, batch: dict[str, torch.Tensor], mesh: Any) -> torch.Tensor:
        parts = {
            name: head_tail(x.shape[-1], mesh.size()).shard(x, -1, mesh.get_local_rank()) for name, x in batch.items()
        }
        of_part = parts.pop("labels")
        total = step(mine, parts, of_part).detach().clone()
        sum_gradients(mine, mesh)
        dist.all_reduce(total, group=mesh.get_group())
        return total

    def on(rank: int) -> None:
        mesh = init_device_mesh(DEVICE.type, (2,), mesh_dim_names=("cp",))
        mine = copy.deepcopy(model).to(DEVICE)
        mine.set_attn_implementation(NAME)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=head_tail))
        whole = {name: there(x) for name, x in inputs.items()} | {"labels": there(labels)}
        verify(mine, mesh, whole, act, tolerance=1e-9)

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_ranks(on, 2)
    except Exception as error:
        return words(error)
    return None


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
    more = [*CLASSES, "dots3_note_text"] if options.kind == "causal" else []
    for model_type in options.model_type or [*KINDS[options.kind][1], *more]:
        kind, details = verdict(options.kind, model_type, training=options.training)
        table[kind].append(model_type)
        print(f"{model_type:28} {kind:14} {details}", flush=True)
    for kind, names in table.items():
        print(f"\n{kind}: {len(names)}\n{' '.join(names)}")
    return sum(len(names) for kind, names in table.items() if "wrong" in kind or kind == "exact, noticed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
