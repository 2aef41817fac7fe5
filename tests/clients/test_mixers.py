"""Models of transformers with linear attention, state spaces and short convolutions: exact for any cut, or refused."""

from __future__ import annotations

import copy
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import cross_entropy
from transformers import DynamicCache
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.qwen3_next import modeling_qwen3_next

from cp_styles import (
    Causal,
    Documents,
    ModuleContextParallel,
    SequenceScope,
    UnreducedGradientsError,
    by_work,
    contiguous,
    head_tail,
    next_token_labels,
    sum_gradients,
)
from cp_styles.integrations import layers
from cp_styles.integrations.transformers import prefill
from cp_styles.testing import RankError, run_ranks
from tests.clients.hugging_face import (
    BATCH,
    CACHE,
    LENGTH,
    NAME,
    StayDouble,
    causal_lm,
    checkpoint_layers,
    config_of,
    expected,
    gradients,
    labels_of,
    largest_error,
    on_ranks,
    positions_of,
    step,
    tiny,
    tokens_of,
    under_style,
    with_attention,
)
from tests.covering import at_night, sampled
from tests.pages import example

# float64 sums in another order give 1e-15; a state or a row that is not passed on gives 1e-3 and more.
EXACT = 1e-10

LINEAR, FULL = "linear_attention", "full_attention"
HYBRID = {"layer_types": [LINEAR, FULL]}
DENSE = {**HYBRID, "mlp_layer_types": ["dense", "dense"]}
MODELS: dict[str, dict[str, Any]] = {
    # Short convolutions alone.
    "lfm2": {"layer_types": ["conv", FULL]},
    "lfm2_moe": {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", FULL]},
    # Gated delta rules; with a decay for each key in the last two.
    "olmo_hybrid": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "qwen4_exp_text": {"layer_types": [LINEAR, LINEAR]},
    "bailing_hybrid": {**DENSE, "num_key_value_heads": 4},
    "kimi_linear": {**DENSE, "linear_head_dim": 8, "linear_num_heads": 4, "head_dim": 4},
    # A decay for each head; no kernel.
    "minimax": {**HYBRID, "block_size": 4},
    # Mamba-2.
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": HYBRID,
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8},
    "nemotron_h": {"layers_block_type": [LINEAR, FULL]},
    "zamba2": {"n_mamba_heads": 4, "head_dim": 16, "layers_block_type": [LINEAR, "hybrid"]},
    # By channels or heads, from a zero state; a number as the state of each channel.
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"without": ["v_head_dim"], "num_blocks": 2, "num_heads": 4, "chunk_size": 16},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    # Mamba: no initial state.
    "falcon_mamba": {"state_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "mamba": {"state_size": 4},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
    },
}
CUTS = {
    "2 head_tail": (2, head_tail),
    "3 contiguous": (3, contiguous),
    "4 by_work": (4, partial(by_work, mask=Causal(), block=2)),
}
BY_DAY = [
    *("lfm3", "minimax", "qwen3_next", "kimi_linear", "granitemoehybrid", "jamba"),
    *("recurrent_gemma", "rwkv", "xlstm"),
]


def model_of(model_type: str, **changes: Any) -> Any:
    return tiny(causal_lm, config_of(model_type, **{"num_hidden_layers": 2} | MODELS[model_type] | changes))


def inputs_of(model: Any, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return {"input_ids": tokens}
    return {"input_ids": tokens, "position_ids": positions_of() if positions is None else positions}


@sampled(1, model_type=BY_DAY, cut=list(CUTS))
def test_exact(model_type: str, cut: str):
    check_exact(model_type, cut)


@pytest.mark.parametrize("model_type", at_night(*sorted(MODELS.keys() - set(BY_DAY))))
@pytest.mark.parametrize("cut", CUTS)
def test_others_are_exact(model_type: str, cut: str):
    check_exact(model_type, cut)


def check_exact(model_type: str, cut: str) -> None:
    model, tokens, (ranks, balancer) = model_of(model_type), tokens_of(), CUTS[cut]
    inputs, labels = inputs_of(model, tokens), labels_of(tokens)
    found = on_ranks(model, inputs, labels, ranks=ranks, balancer=balancer)
    assert largest_error(found, expected(model, inputs, labels)) < EXACT


DOCUMENTS = (8, 1, 12)
POSITIONS = torch.cat([torch.arange(size) for size in DOCUMENTS]).expand(BATCH, -1)


def one_after_the_other(model: Any, tokens: torch.Tensor) -> Any:
    """Loss and gradients of documents that are given to one process one by one."""
    one, loss = copy.deepcopy(model), torch.zeros(())
    one.set_attn_implementation("dense")
    for part in tokens.split(DOCUMENTS, 1):
        inputs = inputs_of(model, part, torch.arange(part.shape[1]).expand(BATCH, -1))
        with StayDouble():
            logits = one(**inputs).logits
        each = cross_entropy(logits.flatten(0, 1), labels_of(part).flatten(), reduction="sum")
        if part.shape[1] > 1:
            each.backward()
            loss = loss + each.detach()
    return loss, gradients(one)


def document_labels(tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([next_token_labels(part) for part in tokens.split(DOCUMENTS, 1)], 1)


# Others do not hand such arguments to their layers, or not to all of them: there one device mixes the documents too.
BY_ARGUMENTS = ["qwen3_next", "kimi_linear", "lfm3"]


@pytest.mark.parametrize(
    ("model_type", "said_by"),
    [
        ("qwen3_next", "the arguments"),
        ("jamba", "the scope"),
        *(
            pytest.param(each, how, marks=pytest.mark.nightly)
            for each, how in [
                *((each, "the arguments") for each in BY_ARGUMENTS[1:]),
                *((each, "the scope") for each in (*BY_ARGUMENTS, "granitemoehybrid", "mamba2")),
            ]
        ),
    ],
)
def test_documents(model_type: str, said_by: str):
    """Of the scope's mask; or as a collator gives them, of the whole sequence."""
    model, tokens = model_of(model_type), tokens_of()
    inputs, labels, options = inputs_of(model, tokens, POSITIONS), document_labels(tokens), {}
    if said_by == "the scope":
        options["scope"] = lambda layout: SequenceScope(layout, mask=Documents(DOCUMENTS))
    else:
        ends = torch.tensor((0, *DOCUMENTS)).cumsum(0).int()
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor(DOCUMENTS)).int()
        options["whole"] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "seq_idx": ids.expand(BATCH, -1)}
    found = on_ranks(model, inputs, labels, **options)
    assert largest_error(found, one_after_the_other(model, tokens)) < EXACT


@pytest.mark.parametrize("model_type", ["qwen3_next", *at_night("lfm2", "jamba", "bamba", "zamba2")])
@pytest.mark.parametrize("side", ["left", *at_night("right")])
def test_padding(model_type: str, side: str):
    model, tokens, mask = model_of(model_type), tokens_of(), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, slice(7) if side == "left" else slice(-7, None)] = 0
    inputs, labels = inputs_of(model, tokens), labels_of(tokens).masked_fill(mask == 0, -100)
    labels[:, 0] = labels[1, 6:8] = labels[1, -8] = -100  # what is predicted from padding, or is padding
    whole = {"attention_mask": mask}
    found = on_ranks(model, inputs, labels, whole=whole, ranks=3)
    assert largest_error(found, expected(model, inputs | whole, labels)) < EXACT


def trained(rank: int, model: Any, how: Any = None, **options: Any) -> Any:
    """A copy of a model under the style, on 2 ranks, and this rank's part of the inputs."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    mine, layout = copy.deepcopy(model), head_tail(LENGTH, 2)
    mine.set_attn_implementation(NAME)
    if how is not None:
        how(mine)
    parallelize_module(mine, mesh, ModuleContextParallel(**{"layout": layout} | options))
    tokens = tokens_of()
    inputs = {name: layout.shard(x, 1, rank) for name, x in inputs_of(model, tokens).items()}
    return mine, inputs, layout.shard(labels_of(tokens), 1, rank), mesh


@pytest.mark.parametrize("model_type", ["qwen3_next", *at_night("granitemoehybrid", "falcon_mamba", "lfm2")])
def test_checkpoints_and_a_cache_of_the_model_itself(model_type: str):
    model, tokens = model_of(model_type, use_cache=True), tokens_of()
    model.train()
    wanted = expected(model, inputs_of(model, tokens), labels_of(tokens))
    found = on_ranks(model, inputs_of(model, tokens), labels_of(tokens))
    assert largest_error(found, wanted) < EXACT
    checkpoint_layers(model)
    found = on_ranks(model, inputs_of(model, tokens), labels_of(tokens))
    assert largest_error(found, wanted) < EXACT


@pytest.mark.parametrize("model_type", ["lfm3", *at_night("qwen3_next", "bamba", "jamba")])
def test_fsdp2_around_a_hybrid(model_type: str):
    """Parameters of each layer are cut over the ranks of the sequence; FSDP2 averages their gradients over these."""
    model, tokens = model_of(model_type), tokens_of()

    def main(rank: int):
        mine, inputs, labels, mesh = trained(rank, model)
        for layer in mine.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(mine, mesh=mesh)
        loss = step(mine, inputs, labels)
        return loss, {name: 2 * grad.full_tensor() for name, grad in gradients(mine).items()}

    found = run_ranks(main, 2)
    wanted = expected(model, inputs_of(model, tokens), labels_of(tokens))
    assert largest_error((sum(loss for loss, _ in found), found[0][1]), wanted) < EXACT


WITH_PLANS = [
    *("bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "minimax", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text"),
]
# With a tied head, transformers' own apply_tensor_parallelism raises KeyError 'lm_head.weight', on one axis too.
TIED = ["lfm2", "lfm2_moe", "lfm3"]


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="full_tensor() cannot gather a _StridedShard there")
@pytest.mark.parametrize("model_type", ["qwen3_next", *at_night(*WITH_PLANS, *TIED)])
def test_tensor_parallel_plan_of_the_library(model_type: str):
    """Plans cut the heads of attentions. Of linear layers they cut projections, if at all, and gather their outputs."""
    model = model_of(model_type, **({"tie_word_embeddings": False} if model_type in TIED else {}))
    tokens, layout = tokens_of(), head_tail(LENGTH, 2)
    inputs, labels = inputs_of(model, tokens), labels_of(tokens)

    def main(rank: int):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        mine, at = copy.deepcopy(model), mesh["cp"].get_local_rank()
        mine.set_attn_implementation(NAME)
        apply_tensor_parallelism(mine, mesh["tp"], mine._expand_parallel_plan(dict(mine.tp_plan)))
        parallelize_module(mine, mesh["cp"], ModuleContextParallel(layout=layout))
        parts = {name: layout.shard(x, 1, at) for name, x in inputs.items()}
        loss = step(mine, parts, layout.shard(labels, 1, at))
        sum_gradients(mine, mesh["cp"])
        grads = gradients(mine).items()
        return loss, {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads}

    found, wanted = run_ranks(main, 4), expected(model, inputs, labels)
    for tp in range(2):
        assert largest_error((found[tp][0] + found[2 + tp][0], found[tp][1]), wanted) < EXACT


@pytest.mark.parametrize("model_type", ["lfm3", *at_night("qwen3_next", "bamba", "mamba")])
def test_logits_without_gradients(model_type: str):
    model, tokens = model_of(model_type).eval(), tokens_of()
    one = with_attention(model)

    def main(rank: int):
        mine, inputs, *_ = trained(rank, model, layout=head_tail)
        with torch.no_grad(), StayDouble():
            return mine(**inputs).logits

    with torch.no_grad(), StayDouble():
        wanted = one(**inputs_of(model, tokens)).logits
    whole = head_tail(LENGTH, 2).unshard(run_ranks(main, 2), 1)
    assert float((whole - wanted).norm() / wanted.norm()) < EXACT


def test_a_cache_that_is_given_is_refused():
    model = model_of("qwen3_next")

    def main(rank: int):
        mine, inputs, *_ = trained(rank, model)
        mine(**inputs, **{CACHE: DynamicCache(config=mine.config)}, use_cache=True)

    errors = run_ranks(main, 2, return_errors=True)
    assert all("give it the cache that prefill(model, input_ids)" in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("model_type", "words"), [("rwkv", "state is not"), ("xlstm", "c_initial, n_initial, m_initial is not")]
)
def test_states_that_a_model_makes_itself_are_refused(model_type: str, words: str):
    model = model_of(model_type, use_cache=True).eval()

    def main(rank: int):
        mine, inputs, *_ = trained(rank, model)
        mine(**inputs)

    errors = run_ranks(main, 2, return_errors=True)
    assert all(f"{words} supported: leave it out, or use_cache=False" in str(error) for error in errors), errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_of_a_model_that_keeps_its_states_in_itself_is_refused(ranks: int):
    model = model_of("recurrent_gemma").eval()

    def main(rank: int):
        _, mine = under_style(model, ranks)
        prefill(mine, tokens_of())

    errors = run_ranks(main, ranks, return_errors=True)
    assert all("keeps its states in itself" in str(error) for error in errors), errors


def test_padding_of_a_part_is_refused():
    model = model_of("qwen3_next")

    def main(rank: int):
        mine, inputs, *_ = trained(rank, model)
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, 0] = rank  # rank 0 alone has a token that is padding
        mine(**inputs, attention_mask=mask)

    errors = run_ranks(main, 2, return_errors=True)
    assert all(isinstance(error, ValueError) for error in errors), errors


def test_a_layer_of_another_version_is_not_known():
    """A layer without a kernel runs as written here only where its code is the one that is known. Else an error."""
    model = model_of("minimax")
    cls = type(model.model.layers[0].self_attn)

    class MiniMaxLightningAttention(cls):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

        forward.__qualname__ = cls.forward.__qualname__

    model.model.layers[0].self_attn.__class__ = MiniMaxLightningAttention

    def main(rank: int):
        mine, inputs, labels, _ = trained(rank, model)
        step(mine, inputs, labels)

    errors = run_ranks(main, 2, return_errors=True)
    assert all("in this version of the library is not known" in str(error) for error in errors), errors


def test_all_kernels_of_the_library_are_known():
    """Functions of its layers in whose place kernels of other packages may run."""
    pattern = re.compile(r"@use_kernel_func_from_hub_with_fallback\([^)]*\)\s*def (\w+)\(")
    models = Path(modeling_qwen3_next.__file__).parents[1]
    names = {name for path in models.glob("*/modeling_*.py") for name in pattern.findall(path.read_text())}
    assert {"causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "mamba_selective_scan"} <= names
    steps = {name for name in names if name.endswith("_update")}  # of one token, after a prompt: whole on every rank
    assert not names - steps - layers._HANDLERS.keys()


def test_nothing_of_the_library_changes():
    model, plain = model_of("qwen3_next"), modeling_qwen3_next.torch_chunk_gated_delta_rule
    cls = modeling_qwen3_next.Qwen3NextGatedDeltaNet
    before = cls.forward

    def main(rank: int):
        mine, inputs, labels, _ = trained(rank, model)
        step(mine, inputs, labels)
        layer = mine.model.layers[0].linear_attn
        return type(layer) is not cls and isinstance(layer, cls)

    assert run_ranks(main, 2) == [True, True]
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is plain
    assert cls.forward is before
    assert type(model.model.layers[0].linear_attn) is cls


def test_ranks_that_leave_out_other_layers():
    model = tiny(causal_lm, config_of("lfm3", num_hidden_layers=3, layer_types=["conv", "conv", FULL]))

    def main(rank: int):
        mine, inputs, labels, _ = trained(rank, model)
        del mine.model.layers[rank]
        step(mine, inputs, labels)

    errors = run_ranks(main, 2, return_errors=True)
    assert all("disagree on call: ranks" in str(error) for error in errors), errors
    assert "causal_conv1d_fn of model.layers.0.conv" in str(errors[0])


def test_gradients_that_are_not_reduced():
    """A model without attention compares its parameters at its scans and convolutions."""
    model = model_of("mamba")

    def main(rank: int):
        mine, inputs, labels, _ = trained(rank, model)
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        for _ in range(2):
            step(mine, inputs, labels)
            optimizer.step()

    errors = run_ranks(main, 2, return_errors=True)
    assert all(isinstance(error, UnreducedGradientsError) for error in errors), errors


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["mamba", "lfm3", "qwen3_next"])
def test_compiled(model_type: str):
    """The layers run between the graphs."""
    model, tokens = model_of(model_type), tokens_of()
    inputs, labels = inputs_of(model, tokens), labels_of(tokens)
    found = on_ranks(model, inputs, labels, how=lambda mine: torch.compile(mine, backend="eager"))
    assert largest_error(found, expected(model, inputs, labels)) < EXACT


# Layers that look at a few tokens, by the lines of the page.

NGRAMS = {
    "layer_types": [LINEAR, LINEAR],
    "ple_layer_ids": [1, 2],
    "ple_embed_dim": 16,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 8,
}
HALOS: dict[str, dict[str, Any]] = {"zaya": {"num_experts_per_tok": 1}, "qwen4_exp_text": NGRAMS}
HALO_LINES = example("halo of transformers")


@pytest.mark.parametrize("model_type", HALOS)
@pytest.mark.parametrize("cut", ["2 head_tail", "3 contiguous"])
def test_layers_with_a_halo(model_type: str, cut: str):
    assert error_with_halos(model_type, cut, HALO_LINES) < EXACT


@pytest.mark.parametrize("model_type", HALOS)
def test_a_halo_with_one_token_less_is_another_model(model_type: str):
    lines = HALO_LINES.replace("taps - 2", "taps - 3").replace("size - 1", "size - 2")
    assert error_with_halos(model_type, "3 contiguous", lines) > 1e-3


@pytest.mark.parametrize("model_type", HALOS)
def test_without_a_halo_they_are_refused(model_type: str):
    with pytest.raises(RankError, match=r"Conv1d. carries values from token to token.* context_halo"):
        error_with_halos(model_type, "3 contiguous", "")


def error_with_halos(model_type: str, cut: str, lines: str) -> float:
    config = config_of(model_type, **{"num_hidden_layers": 2} | HALOS[model_type] | {"use_cache": model_type == "zaya"})
    model, tokens, (ranks, balancer) = tiny(causal_lm, config).train(), tokens_of(), CUTS[cut]
    inputs, labels, layout = inputs_of(model, tokens), labels_of(tokens), balancer(LENGTH, ranks)

    def main(rank: int):
        mesh, mine = under_style(model, ranks, ModuleContextParallel(layout=layout))
        exec(lines, {"model": mine, "mesh": mesh})
        parts = {name: layout.shard(x, 1, rank) for name, x in inputs.items()}
        loss = step(mine, parts, layout.shard(labels, 1, rank))
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    found = run_ranks(main, ranks)
    return largest_error((sum(loss for loss, _ in found), found[0][1]), expected(model, inputs, labels))
