"""Models of transformers through its attention interface: exact, or refused by name."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers.integrations.neftune import neftune_post_forward_hook

import cp_styles
from cp_styles import (
    BatchSharder,
    Documents,
    Full,
    Mask,
    ModuleContextParallel,
    SequenceScope,
    SlidingWindow,
    contiguous,
    head_tail,
    sum_gradients,
)
from cp_styles.checks.transformers_models import list_windows
from cp_styles.comm.checks import Checks
from cp_styles.integrations.transformers import position_ids_of
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import VerificationError, verify
from tests.clients import sweep
from tests.clients.hugging_face import (
    BATCH,
    CACHE,
    LENGTH,
    NAME,
    ROPES,
    TINY,
    VOCABULARY,
    StayDouble,
    batch_of,
    causal_lm,
    checkpoint_layers,
    config_of,
    dense,
    expected,
    gradients,
    labels_of,
    largest_error,
    on_ranks,
    positions_of,
    prefilled,
    step,
    tiny,
    tokens_of,
    under_style,
    with_attention,
    with_rope,
)
from tests.clients.sweep import OWN, made
from tests.clients.sweep import verdict as judged
from tests.covering import at_night, sampled
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.attention_case import every_rank_raises

# float64 sums in another order give 1e-15; one key too many or too few gives 1e-3 and more.
EXACT = 1e-10


def each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# Causal: grouped heads, norms of queries and keys, partial rotary embeddings, learned positions, windows, experts.
PLAIN = (
    "cohere2 ctrl diffllama ernie4_5_moe gemma3_text gpt2 gpt_neox llama mixtral modernbert-decoder phi qwen3 stablelm"
)
# Others of these kinds.
REPEATED = """
    afmoe apertus arcee bitnet cohere cohere2_moe cwm deepseek_v2 ernie4_5 exaone4 exaone_moe flex_olmo gemma
    glm glm4 glm4_moe gpt_bigcode granite granite_swa granitemoe helium hunyuan_v1_dense hunyuan_v1_moe
    internlm3 jetmoe mellum mimo_v2_flash minimax_m2 ministral mistral nanochat nemotron olmo olmo2 olmo3 olmoe
    opt persimmon phi3 qwen2 qwen2_moe qwen3_moe seed_oss smollm3 starcoder2 vaultgemma youtu
"""
EXACT_MODELS = {
    **each(PLAIN, {}),
    **each("gemma2 vaultgemma", {}),  # softcap, and windows
    **each("llama4_text", {}),  # chunks
    **each("gpt_oss mimo_v2_flash", {}),  # sinks, and windows
    **each("deepseek_v2 deepseek_v3 minicpm3 youtu", {"head_dim": 4}),  # MLA: values of another head dim
}
if "dory" in transformers.CONFIG_MAPPING:  # transformers 5.24
    REPEATED += "apertus1p5_text dory exaone lara_mini sarvam_mla sarvam_moe"
    EXACT_MODELS |= each("codegen gptj", {"rotary_dim": 4})  # before, in plain operations
REFUSED_MODELS = {
    # Attention in plain operations.
    **each("bloom mpt openai-gpt roformer", "no scaled_dot_product_attention was called inside"),
    "doge": "gradient of an attention bias",
}


with_indexers = pytest.mark.skipif("dory" not in transformers.CONFIG_MAPPING, reason="transformers 5.24")


@pytest.mark.parametrize(
    "model_type", [*(name for name in EXACT_MODELS if name not in REPEATED.split()), *at_night(*REPEATED.split())]
)
def test_exact(model_type: str):
    model = tiny(causal_lm, config_of(model_type, **EXACT_MODELS.get(model_type, {})))
    inputs, labels = batch_of()
    assert largest_error(on_ranks(model, inputs, labels), expected(model, inputs, labels)) < EXACT


@pytest.mark.parametrize("model_type", REFUSED_MODELS)
def test_refused(model_type: str):
    model = tiny(causal_lm, config_of(model_type))
    with pytest.raises((RankError, ValueError), match=REFUSED_MODELS[model_type]):
        on_ranks(model, *batch_of())


BY_SWEEP_AT_NIGHT = ["cohere_compass_text", "dbrx", "emu3", "gemma3n_text", "lfm2_moe", "mllama", "phi4_multimodal"]


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        ("masked", "neomme"),  # each layer has a window of its own, or none
        ("masked", "roberta"),  # positions after that of padding
        ("seq2seq", "t5gemma"),
        ("causal", "bigbird_pegasus"),
        *(pytest.param("causal", name, marks=pytest.mark.nightly) for name in BY_SWEEP_AT_NIGHT),
    ],
)
def test_types_of_the_sweep(kind: str, model_type: str):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers 5.24")
    state, details = judged(kind, model_type, training=False)
    assert state == "exact, proved", details


def test_a_type_that_the_sweep_does_not_make(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Fails the command, unless there is a reason."""
    monkeypatch.setattr(sweep, "OWN", sweep.OWN | {"llama": {"head_dim": -1}})
    assert sweep.main(["llama", "reformer"]) == 1
    assert "left out       attention by hashes" in capsys.readouterr().out


@with_indexers
@pytest.mark.parametrize("padding", ["none", "left", "with holes"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", *at_night("axk2", "hy_v4")])
def test_selected_keys(model_type: str, padding: str):
    """The second has layers that take the keys of the layer before."""
    model, (inputs, labels) = tiny(causal_lm, config_of(model_type, **OWN[model_type])), batch_of()
    labels, whole = labels.masked_fill(PADDED[padding] == 0, -100), {"attention_mask": PADDED[padding]}
    found = on_ranks(model, inputs, labels, whole=whole, ranks=3)
    assert largest_error(found, expected(model, inputs | whole, labels)) < EXACT


@with_indexers
@pytest.mark.parametrize("model_type", ["mistral_large4_text", "dots3_note_text"])
def test_selected_keys_of_a_text(model_type: str):
    verdict, details = judged("causal", model_type, training=False)
    assert verdict == "exact, proved", details


@with_indexers
def test_selected_keys_of_documents_under_checkpoints():
    model, tokens = tiny(causal_lm, config_of("deepseek_v32", **OWN["deepseek_v32"])), tokens_of()
    checkpoint_layers(model)
    positions = torch.cat((torch.arange(8), torch.arange(LENGTH - 8))).expand(BATCH, LENGTH)
    inputs, labels = {"input_ids": tokens, "position_ids": positions}, labels_of(tokens)
    assert largest_error(on_ranks(model, inputs, labels), expected(model, inputs, labels)) < EXACT


@with_indexers
def test_keys_that_are_selected_under_a_mask_of_the_part_are_refused():
    model = tiny(causal_lm, config_of("deepseek_v32", **OWN["deepseek_v32"]))
    with every_rank_raises("selects keys under a mask of this rank's part", each=True):
        on_ranks(model, *batch_of(), implementation="sdpa")


@with_indexers
def test_a_prefill_with_an_indexer_is_refused():
    model = tiny(causal_lm, config_of("deepseek_v32", **OWN["deepseek_v32"])).eval()
    with every_rank_raises("an indexer with a cache is not supported", each=True):
        prefilled(model)


@pytest.mark.parametrize("implementation", [NAME, "sdpa"])
def test_one_token_on_each_rank(implementation: str):
    """transformers' sdpa would attend to all keys; the registered attention is exact, as the error says."""
    model, (inputs, labels) = tiny(causal_lm, config_of("llama")), batch_of(3)
    if implementation == NAME:
        found = on_ranks(model, inputs, labels, ranks=3)
        assert largest_error(found, expected(model, inputs, labels)) < EXACT
    else:
        with pytest.raises(RankError, match=r"(?s)rank 0: .*given one token on this rank.*rank 1.*rank 2"):
            on_ranks(model, inputs, labels, ranks=3, implementation=implementation)


COUNTING = ["bart", "marian", *at_night("mbart", "plbart", "pegasus", "blenderbot", "blenderbot-small")]


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
@pytest.mark.parametrize("model_type", COUNTING)
def test_models_that_count_their_tokens(kind: str, model_type: str):
    """Their tables get the positions of tokens that a layout has cut, here of an encoder's and a decoder's."""
    model, tokens = tiny(partial(made, kind, model_type), config_of(model_type)), tokens_of()
    inputs, ranks = {"input_ids": tokens}, 2 if kind == "causal" else 3
    if kind == "seq2seq":  # as many on a rank, of another length
        inputs = {"input_ids": tokens_of(LENGTH - 1, seed=1), "decoder_input_ids": tokens}
    found = on_ranks(model, inputs, labels_of(tokens), ranks=ranks)
    assert largest_error(found, expected(model, inputs, labels_of(tokens))) < EXACT


@pytest.mark.parametrize("in_front", [True, False])
def test_a_model_that_counts_the_mask(in_front: bool):
    """OPT: padding in front moves the positions of all tokens behind it, padding at the end does not. By the remedy."""
    model, tokens = tiny(causal_lm, config_of("opt", num_hidden_layers=2)), tokens_of()
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 4) if in_front else slice(-4, None)] = 0
    inputs, whole = {"input_ids": tokens, "position_ids": positions_of()}, {"attention_mask": mask}
    labels = tokens.masked_fill(mask == 0, -100)
    if in_front:
        with every_rank_raises("padding in front of tokens moves them"):
            on_ranks(model, inputs, labels, whole=whole)
        inputs["position_ids"] = position_ids_of(model, tokens, mask)
    found = on_ranks(model, inputs, labels, whole=whole)
    assert largest_error(found, expected(model, {"input_ids": tokens} | whole, labels)) < EXACT


def test_positions_of_a_model_that_counts_its_tokens():
    """A hook of the user's knows better. Of tokens that no layout has cut, nothing is known."""
    model, tokens = tiny(causal_lm, config_of("bart")), tokens_of()
    labels, packed = labels_of(tokens), torch.cat((torch.arange(8), torch.arange(LENGTH - 8)))

    def by_hand(mine: Any) -> Any:
        table = mine.model.decoder.embed_positions

        def call(input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
            handle = table.register_forward_pre_hook(
                lambda module, args, kwargs: (args, kwargs | {"position_ids": position_ids[0]}),
                with_kwargs=True,
                prepend=True,
            )
            with handle:
                return mine(input_ids=input_ids)

        return call

    inputs = {"input_ids": tokens, "position_ids": packed.expand(BATCH, -1)}
    one = with_attention(model)
    wanted = step(one, inputs, labels, by_hand), gradients(one)
    assert largest_error(on_ranks(model, inputs, labels, how=by_hand), wanted) < EXACT
    unmarked = on_ranks(
        model, {"input_ids": tokens}, labels, how=lambda mine: lambda input_ids: mine(input_ids.clone())
    )
    assert largest_error(unmarked, expected(model, {"input_ids": tokens}, labels)) > 1e-3


def test_falcon_with_a_whole_mask():
    model, (inputs, labels) = tiny(causal_lm, config_of("falcon", without=["head_dim"])), batch_of()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, LENGTH, LENGTH)
    found = on_ranks(model, inputs, labels, whole={"attention_mask": causal}, implementation="sdpa")
    assert largest_error(found, expected(model, inputs, labels)) < EXACT


WHOLE_MASK = {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)}
PLAIN_OPERATIONS = "written in plain operations and knows no attention interface"
FAILS_BEFORE = "assertion in the model's code fails .* before any attention .* in plain operations"


@pytest.mark.parametrize(
    ("model_type", "of", "whole", "words"),
    [
        ("rembert", "CausalLM", {}, PLAIN_OPERATIONS),
        ("trocr", "CausalLM", {}, PLAIN_OPERATIONS),
        ("mvp", "Seq2SeqLM", {}, PLAIN_OPERATIONS),
        ("led", "Seq2SeqLM", {}, PLAIN_OPERATIONS),
        ("xlm", "MaskedLM", WHOLE_MASK, FAILS_BEFORE),
        ("flaubert", "MaskedLM", WHOLE_MASK, FAILS_BEFORE),
    ],
)
def test_attention_in_plain_operations(model_type: str, of: str, whole: Any, words: str):
    """Refused in words on every rank, whatever the model does with its mask."""
    config = config_of(model_type, is_decoder=of == "CausalLM", attn_implementation=NAME)
    model = getattr(transformers, f"AutoModelFor{of}").from_config(config)
    parts = {"input_ids": tokens_of(), "position_ids": positions_of()}
    if of == "Seq2SeqLM" or model_type == "trocr":
        del parts["position_ids"]
    if of == "Seq2SeqLM":
        parts["decoder_input_ids"] = tokens_of()

    with every_rank_raises(words, each=True):
        on_ranks(model, parts, labels_of(tokens_of()), whole=whole)


def test_models_that_share_an_activation():
    """XLM's activation is one object of transformers in a process, and that of every model."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        models = [transformers.XLMWithLMHeadModel(config_of("xlm", gelu_activation=True)) for _ in range(2)]
        assert models[0].transformer.ffns[0].act is models[1].transformer.ffns[0].act
        for model in models:
            parallelize_module(model, mesh, ModuleContextParallel())

    run_ranks(on, 2)


def test_the_example_of_the_page():
    made, step = example("transformers").split("parallelize_module(", 1)
    model, tokens = tiny(causal_lm, config_of("mistral")), tokens_of()

    def on(rank: int) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        names = {name: getattr(cp_styles, name) for name in cp_styles.__all__}
        names |= {"config": copy.deepcopy(model.config), "tokens": tokens, "torch": torch, "mesh": mesh}
        exec(made, names)
        names["model"].double().load_state_dict(model.state_dict())
        with StayDouble():
            exec(f"parallelize_module({step}", names | {"parallelize_module": parallelize_module})
        return gradients(names["model"])

    inputs, labels = batch_of()
    _, wanted = expected(model, inputs, labels)
    mean = {name: grad / (labels != -100).sum() for name, grad in wanted.items()}
    one = torch.ones(())
    assert largest_error((one, run_ranks(on, 2)[0]), (one, mean)) < EXACT


@pytest.mark.parametrize("padding", ["none", "right", "with holes"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_bidirectional(model_type: str, padding: str):
    """The second has windows to both sides."""
    model = tiny(transformers.AutoModelForMaskedLM.from_config, config_of(model_type, local_attention=6))
    tokens, whole = tokens_of(), {"attention_mask": PADDED[padding]}
    inputs, labels = (
        {"input_ids": tokens, "position_ids": positions_of()},
        tokens.masked_fill(PADDED[padding] == 0, -100),
    )
    found = on_ranks(model, inputs, labels, whole=whole, balancer=contiguous)
    assert largest_error(found, expected(model, inputs | whole, labels)) < EXACT


@pytest.mark.parametrize("padding", ["none", "right"])
def test_encoder_and_decoder_of_different_lengths(padding: str):
    """Cross-attention to a padded encoder; softcap and windows on both sides."""
    part = TINY | {"attn_logit_softcapping": 3.0}
    config = transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=VOCABULARY)
    model = tiny(transformers.AutoModelForSeq2SeqLM.from_config, config)
    source, target = tokens_of(LENGTH, 1), tokens_of(17)
    inputs = {"input_ids": source, "position_ids": positions_of(LENGTH)}
    inputs |= {"decoder_input_ids": target, "decoder_position_ids": positions_of(17)}
    whole, labels = {"attention_mask": PADDED[padding]}, labels_of(target)
    found = on_ranks(model, inputs, labels, whole=whole)
    assert largest_error(found, expected(model, inputs | whole, labels)) < EXACT


def test_a_batch_of_an_encoder_and_a_decoder():
    """Two sequences, each with a padding of its own: the error says how each is cut."""
    part = TINY | {"num_hidden_layers": 2}
    config = transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=VOCABULARY)
    model = tiny(transformers.AutoModelForSeq2SeqLM.from_config, config)
    source, target, padding = tokens_of(LENGTH, 1), tokens_of(17), torch.ones(BATCH, 17, dtype=torch.int64)
    padding[1, 11:] = 0
    labels = target.roll(-1, 1).masked_fill(padding == 0, -100)
    whole = {"input_ids": source, "attention_mask": PADDED["right"]}
    decoder = {"decoder_input_ids": target, "decoder_attention_mask": padding}

    def on(rank: int, apart: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh, mine = under_style(model, 2)
        if not apart:
            BatchSharder(mesh)(whole | decoder | {"labels": labels})
        encoded = BatchSharder(mesh)(whole)
        ours = BatchSharder(mesh, shift=False)({"input_ids": target, "labels": labels, "attention_mask": padding})
        inputs = encoded.inputs | {f"decoder_{name}": x for name, x in ours.inputs.items()}
        with StayDouble():
            loss = ours.loss(mine(**inputs).logits)
        loss.backward()
        sum_gradients(mine, mesh)
        return loss.detach() * (labels != -100).sum(), {
            n: x * (labels != -100).sum() for n, x in gradients(mine).items()
        }

    with every_rank_raises(r"an encoder and a decoder are a batch each: .*shift=False\)"):
        run_ranks(lambda rank: on(rank, False), 2)
    wanted = expected(model, whole | decoder, labels)
    assert largest_error(run_ranks(lambda rank: on(rank, True), 2)[0], wanted) < EXACT


@sampled(1, model_type=["t5", "umt5"], padding=["right", "none"])
def test_learned_biases_by_distance(model_type: str, padding: str):
    """One table for all layers, or one for each; with its gradient. Both sides, and to keys of other ranks."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    table = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0}
    config = transformers.AutoConfig.for_model(model_type, **sizes, **table, use_cache=False)
    model = tiny(transformers.AutoModelForSeq2SeqLM.from_config, config)
    source, target = tokens_of(LENGTH, 1), tokens_of(17)
    inputs, whole = {"input_ids": source, "decoder_input_ids": target}, {"attention_mask": PADDED[padding]}
    labels = labels_of(target)
    found = on_ranks(model, inputs, labels, whole=whole, ranks=3)
    wanted = expected(model, inputs | whole, labels)
    assert sum("relative_attention_bias" in name for name in wanted[1]) == (2 if model_type == "t5" else 4)
    assert largest_error(found, wanted) < EXACT


class WithHead(torch.nn.Module):
    """A text model of several kinds of input, which has its head elsewhere."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text

    def set_attn_implementation(self, name: str) -> None:
        self.text.set_attn_implementation(name)

    def forward(self, input_ids, position_ids=None):
        hidden = self.text(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        return SimpleNamespace(logits=hidden @ self.text.embed_tokens.weight.T)


def test_positions_of_time_height_and_width():
    """mRoPE: three positions for each token, which say nothing of documents."""
    config = config_of("qwen2_vl", rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]})
    model = tiny(lambda config: WithHead(transformers.AutoModel.from_config(config)), config)
    tokens = tokens_of()
    positions = torch.stack([positions_of(), positions_of() // 3, positions_of() % 4])
    inputs, labels = {"input_ids": tokens, "position_ids": positions}, labels_of(tokens)
    assert largest_error(on_ranks(model, inputs, labels), expected(model, inputs, labels)) < EXACT


def padded(*ranges: tuple[int, int]) -> torch.Tensor:
    """[B, S], 1 in one range of each row."""
    mask = torch.zeros(len(ranges), LENGTH, dtype=torch.int64)
    for row, (first, stop) in zip(mask, ranges, strict=True):
        row[first:stop] = 1
    return mask


HOLES = padded((0, LENGTH), (3, 20))
HOLES[0, 7] = HOLES[1, 12:14] = 0
PADDED = {
    "none": torch.ones(2, LENGTH, dtype=torch.int64),
    "right": padded((0, LENGTH), (0, 13)),
    "left": padded((4, LENGTH), (0, LENGTH)),
    "both": padded((2, 19), (0, 8)),
    "with holes": HOLES,
}


@sampled(
    1, model_type=["mistral", "gemma2", "llama4_text", "gpt_oss"], padding=PADDED, balancer=[head_tail, contiguous]
)
def test_padding(model_type: str, padding: str, balancer):
    """A window; a softcap beside one; chunks, which transformers counts from the end of the left padding; sinks."""
    model = tiny(causal_lm, config_of(model_type, num_hidden_layers=2))
    tokens, whole = tokens_of(), {"attention_mask": PADDED[padding]}
    inputs = {"input_ids": tokens, "position_ids": (PADDED[padding].cumsum(1) - 1).clamp(min=0)}
    labels = labels_of(tokens).masked_fill(PADDED[padding] == 0, -100)
    found = on_ranks(model, inputs, labels, whole=whole, balancer=balancer, ranks=3)
    assert largest_error(found, expected(model, inputs | whole, labels)) < EXACT


DOCUMENTS = ((9, 3, 9), (5, 16))
PACKED = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
IDS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS])


@sampled(1, model_type=["mistral", "gemma2", "llama4_text", "deepseek_v3"], balancer=[head_tail, contiguous])
def test_packed_documents(model_type: str, balancer):
    """Positions that restart are documents, as transformers has it on one device; different ones in each row."""
    sizes = {"head_dim": 4} if model_type == "deepseek_v3" else {}  # of the rotary part of a latent (MLA)
    model = tiny(causal_lm, config_of(model_type, num_hidden_layers=2, **sizes))
    tokens = tokens_of()
    inputs, labels = {"input_ids": tokens, "position_ids": PACKED}, labels_of(tokens, document_ids=IDS)
    found = on_ranks(model, inputs, labels, balancer=balancer, ranks=3)
    assert largest_error(found, expected(model, inputs, labels)) < EXACT


def test_documents_of_a_sharder_need_no_scope():
    """The model reads them from the positions that the sharder makes."""
    model, tokens = tiny(causal_lm, config_of("mistral", num_hidden_layers=2)), tokens_of()
    wanted = model(input_ids=tokens, position_ids=PACKED).logits
    labels = labels_of(tokens, document_ids=IDS)
    loss = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten())

    def on(rank: int) -> float:
        mesh, mine = under_style(model, 3, ModuleContextParallel(verified=True))
        batch = BatchSharder(mesh)({"input_ids": tokens, "labels": tokens, "document_ids": IDS})
        return error(batch.loss(mine(**batch.inputs).logits).detach(), loss.detach())

    assert max(run_ranks(on, 3)) < EXACT


@pytest.mark.parametrize("balancer", [head_tail, contiguous])
def test_packed_documents_that_begin_at_1(balancer: Any):
    """Rows whose documents all begin at 1, or at 0. Ranks that each count from 1 are refused, as from 0."""
    model, tokens = tiny(causal_lm, config_of("mistral", num_hidden_layers=2)), tokens_of()
    packed = PACKED + torch.tensor([[1], [0]])
    inputs, labels = {"input_ids": tokens, "position_ids": packed}, labels_of(tokens, document_ids=IDS)
    found = on_ranks(model, inputs, labels, balancer=balancer, ranks=3)
    assert largest_error(found, expected(model, inputs, labels)) < EXACT
    apart = packed.where(packed != 1, 2)  # some begin at 2
    refused({"input_ids": tokens, "position_ids": apart}, words="neither count on nor restart", balancer=balancer)
    even = {"input_ids": tokens_of(20)}
    each = {"position_ids": torch.arange(1, 11).expand(2, -1)}
    refused(even, each, words="count from 0 or 1 to the end of its part", balancer=contiguous)


def inside(model: Any) -> Any:
    """For a loss that makes the logits in chunks: the hidden states of the model inside."""

    def logits(**inputs: torch.Tensor) -> Any:
        return SimpleNamespace(logits=model.lm_head(model.model(**inputs).last_hidden_state))

    return logits


@pytest.mark.parametrize("how", [lambda model: model.forward, inside], ids=["forward", "inside"])
def test_a_model_that_is_not_called_itself(how: Any):
    """No hook of the style runs: the positions are read all the same, and asked for."""
    model = tiny(causal_lm, config_of("mistral", num_hidden_layers=2))
    tokens, labels = tokens_of(), labels_of(tokens_of(), document_ids=IDS)
    inputs = {"input_ids": tokens, "position_ids": PACKED}
    found = on_ranks(model, inputs, labels, ranks=3, how=how)
    assert largest_error(found, expected(model, inputs, labels)) < EXACT
    # Documents that end where the ranks do: transformers sees one document on each.
    even, restarts = tokens_of(20), {"position_ids": torch.arange(10).expand(2, -1)}
    refused({"input_ids": even}, restarts, words="count from 0 to 9 on this rank", balancer=contiguous, how=how)
    refused({"input_ids": tokens}, words="takes position_ids and was given none", how=how)


ROPE_DOORS = {("longrope", "style"), ("dynamic", "block"), ("longrope", "verify")}


@pytest.mark.parametrize(
    ("kind", "door"),
    [
        pytest.param(*row, marks=[pytest.mark.nightly] * (row not in ROPE_DOORS))
        for row in product(ROPES, ["style", "block", "compiled", "verify"])
    ],
)
def test_rotary_embeddings_that_depend_on_the_longest_position(kind: str, door: str):
    """Batches that grow and shrink: the frequencies of the whole sequence, and the same state on all ranks."""
    model = with_rope(kind)
    model.set_attn_implementation(NAME)
    lengths = (12, 40, 20) if door == "compiled" else (12, 20, 40, 20, 12)  # each is another graph
    batches = [tokens_of(length, seed=length) for length in lengths]

    def sharded(model: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharder = BatchSharder(mesh)
        batch = sharder(tokens)
        with StayDouble():
            logits = model(**batch.inputs).logits
        loss = batch.loss(logits)
        loss.backward()
        sharder.sum_gradients(model)
        return loss.detach()

    def in_block(model: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
        given, labels = {"input_ids": tokens.clone(), "position_ids": positions_of(tokens.shape[1])}, labels_of(tokens)
        count, buffers = (labels != -100).sum(), [*given.values(), labels]
        buffers[1] = given["position_ids"] = buffers[1].contiguous()
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            loss = step(model, given, labels)
        sum_gradients(model, mesh)
        torch.distributed.all_reduce(loss, group=mesh.get_group())
        for parameter in model.parameters():
            parameter.grad /= count
        return loss / count

    def on(rank: int) -> list[Any]:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        if door != "block":
            parallelize_module(mine, mesh, ModuleContextParallel(verified=True))
        if door == "verify":
            verify(mine, mesh, tokens_of(41, seed=41), sharded, tolerance=EXACT)
        called, results = torch.compile(mine, backend="eager") if door == "compiled" else mine, []
        for tokens in batches:
            mine.zero_grad()
            loss = (in_block if door == "block" else sharded)(called, tokens, mesh)
            results.append((loss, {name: grad.clone() for name, grad in gradients(mine).items()}))
        return results

    one, wanted = copy.deepcopy(model), []
    one.set_attn_implementation("dense")
    for tokens in batches:
        one.zero_grad()
        labels = labels_of(tokens)
        loss, count = step(one, {"input_ids": tokens}, labels), (labels != -100).sum()
        wanted.append((loss / count, {name: grad / count for name, grad in gradients(one).items()}))
    for results in run_ranks(on, 2):
        assert max(map(largest_error, results, wanted)) < EXACT


def test_after_an_error_of_one_rank_a_block_goes_on():
    """A refused call counts on every rank: the ranks compare the numbers of their calls."""
    model, cut = tiny(causal_lm, config_of("llama")).eval(), head_tail(LENGTH, 2)

    def on(rank: int) -> torch.Tensor:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), with_attention(model, NAME)
        tokens, positions = tokens_of(), positions_of().contiguous()
        first = mine.model.layers[0].self_attn
        block = context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1], layout=cut, verified=True)
        with torch.no_grad(), StayDouble(), block:
            if rank == 0:
                first.attention_dropout, first.training = 0.1, True
            with pytest.raises(ValueError if rank else NotImplementedError, match="failed" if rank else "dropout"):
                mine(tokens, position_ids=positions)
            first.attention_dropout, first.training = 0.0, False
            return mine(tokens, position_ids=positions).logits

    one = with_attention(model)
    with torch.no_grad(), StayDouble():
        wanted = one(tokens_of(), position_ids=positions_of()).logits
    assert error(cut.unshard(run_ranks(on, 2), 1), wanted) < EXACT


@pytest.mark.parametrize("kind", ROPES)
def test_a_rotary_embedding_outside_of_the_style_is_refused(kind: str):
    """The remedy is the test above. Frequencies that depend on nothing are those of any part."""
    model = with_rope(kind)

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with pytest.raises(NotImplementedError, match=rf"\({kind}\) depend on the longest.* to the whole model"):
            parallelize_module(copy.deepcopy(model), mesh, {"model.layers.*.self_attn": ModuleContextParallel()})
        plain = tiny(causal_lm, config_of("llama", num_hidden_layers=2))
        parallelize_module(plain, mesh, {"model.layers.*.self_attn": ModuleContextParallel()})

    run_ranks(on, 2)


@pytest.mark.nightly
def test_compiled():
    """torch.compile of the whole model: masks and attentions run between its graphs, and see the positions."""
    model = tiny(causal_lm, config_of("mistral", num_hidden_layers=2))
    inputs, labels = {"input_ids": tokens_of(), "position_ids": PACKED}, labels_of(tokens_of(), document_ids=IDS)

    def how(model: Any) -> Any:
        return torch.compile(model, backend="aot_eager")

    assert largest_error(on_ranks(model, inputs, labels, how=how), expected(model, inputs, labels)) < EXACT
    refused({"input_ids": tokens_of()}, words="takes position_ids and was given none", how=how)


def test_question_answering():
    """The loss over tokens as classes is refused on a part, and exact as the page says."""
    model, tokens = tiny(transformers.LlamaForQuestionAnswering, config_of("llama", num_hidden_layers=2)), tokens_of()
    starts, ends = torch.tensor([3, 17]), torch.tensor([5, 20])
    model.set_attn_implementation(NAME)

    def on(rank: int, code: str) -> Any:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        names: dict[str, Any] = {name: getattr(cp_styles, name) for name in cp_styles.__all__}
        names |= {"tokens": tokens, "model": mine, "mesh": mesh, "starts": starts, "ends": ends}
        with StayDouble():
            exec(code, names)
        return names["loss"].detach(), gradients(mine)

    one = with_attention(model)
    with StayDouble():
        loss = one(tokens, start_positions=starts, end_positions=ends).loss
    loss.backward()
    for found in run_ranks(on, 2, example("question answering")):
        assert largest_error(found, (loss.detach(), gradients(one))) < EXACT
    inside = "parallelize_module(model, mesh, ModuleContextParallel())\nbatch = BatchSharder(mesh)(tokens)\n"
    inside += "model(**batch.inputs, start_positions=starts, end_positions=ends)"
    with pytest.raises(
        RankError, match=r"(?s)rank 0: .*start_positions= and .* BackboneContextParallel.*rank 1: .*BackboneCont"
    ):
        run_ranks(on, 2, inside)


class Prompted(torch.nn.Module):
    """As wrappers for prompt tuning do it: learned embeddings in front of what a rank has."""

    def __init__(self, model: Any, *, counts: bool) -> None:
        super().__init__()
        self.model, self.counts = model, counts
        self.prompt = torch.nn.Parameter(torch.linspace(-1, 1, 4 * 32, dtype=torch.float64).view(4, 32))

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None) -> Any:
        hidden = self.model.get_input_embeddings()(input_ids)
        inputs: dict[str, Any] = {"inputs_embeds": torch.cat((self.prompt.expand(len(hidden), -1, -1), hidden), 1)}
        if self.counts and position_ids is not None:
            inputs["position_ids"] = torch.cat((torch.arange(4).expand(len(hidden), -1), position_ids + 4), 1)
        return self.model(**inputs)


def test_tokens_in_front_of_a_part():
    """Refused where each rank puts them in front of its part, and exact as the page says; so are learned keys."""
    whole, tokens = Prompted(tiny(causal_lm, config_of("llama", num_hidden_layers=2)), counts=True), tokens_of()
    whole.model.set_attn_implementation(NAME)

    def on(rank: int, counts: bool | None) -> Any:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(whole)
        parallelize_module(mine.model, mesh, ModuleContextParallel())
        if counts is None:
            names = {"model": mine.model, "prompt": mine.prompt, "mesh": mesh, "tokens": tokens, "torch": torch}
            with StayDouble():
                exec(example("tokens in front"), names | {"BatchSharder": BatchSharder})
            return torch.ones(()), gradients(mine)
        mine.counts, batch = counts, BatchSharder(mesh)(tokens)
        return mine(batch.tokens, batch["position_ids"])

    one = copy.deepcopy(whole)
    one.model.set_attn_implementation("dense")
    labels = labels_of(torch.cat((torch.full((BATCH, 4), -100), tokens), 1))
    with StayDouble():
        logits = one(tokens, positions_of()).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for found in run_ranks(on, 2, None):
        assert largest_error(found, (torch.ones(()), gradients(one))) < EXACT
    for counts, words in ((False, "inputs_embeds= without position_ids"), (True, "must be there before the cut")):
        with every_rank_raises(words, each=True):
            run_ranks(on, 2, counts)


def test_documents_of_a_scope():
    """The scope's mask holds beside the layers' windows, and its layout is the one that the model is bound to."""
    model = tiny(causal_lm, config_of("mistral", num_hidden_layers=2))
    tokens, ids = tokens_of(), IDS[:1]
    labels = labels_of(tokens, document_ids=ids)
    positions = PACKED[:1].expand(2, -1)
    found = on_ranks(
        model,
        {"input_ids": tokens, "position_ids": positions_of()},
        labels,
        scope=lambda layout: SequenceScope(layout, mask=Documents.from_ids(ids[0])),
    )
    # Rotary positions are relative: what counts is the distance in a document.
    wanted = expected(model, {"input_ids": tokens, "position_ids": positions}, labels)
    assert largest_error(found, wanted) < EXACT


def refused(inputs, whole=None, *, words: str, model_type: str = "mistral", **options) -> None:
    """Every rank raises; one of them says why."""
    model = tiny(causal_lm, config_of(model_type, num_hidden_layers=1))
    with every_rank_raises(words):
        on_ranks(model, inputs, labels_of(inputs["input_ids"]), whole=whole, **options)


def test_positions_and_masks_of_a_part_are_refused():
    tokens, even = tokens_of(), tokens_of(20)
    local = {"position_ids": torch.arange(10).expand(2, -1)}
    refused({"input_ids": even}, local, words="count from 0 to 9 on this rank, .* begins at 10", balancer=contiguous)
    style = {"layout": contiguous, "checks": Checks(inputs=False)}
    refused({"input_ids": even}, local, words="as if no other rank had a part", balancer=contiguous, style=style)
    backwards = {"input_ids": even, "position_ids": positions_of(20).flip(1)}
    refused(backwards, words="neither count on nor restart in")
    ones = torch.ones_like(tokens)
    ones[0, -2:] = 0
    cut = {"input_ids": tokens, "position_ids": positions_of(), "attention_mask": ones}
    refused(cut, words=r"attention_mask of shape \(2, 11\) marks padding, .* 11 of 21 tokens")


def test_a_mask_that_is_dropped_on_its_way_is_refused():
    """As accelerate does to each self_attn, to use torch's context parallelism."""
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=1))

    def drop(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": None, "is_causal": True}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(drop, with_kwargs=True)
    inputs, labels = batch_of()
    assert largest_error(on_ranks(model, inputs, labels), expected(model, inputs, labels)) < EXACT
    for what in ({"position_ids": PACKED}, {"attention_mask": PADDED["right"]}):
        whole = {name: x for name, x in what.items() if name == "attention_mask"}
        parts = {name: x for name, x in (inputs | what).items() if name not in whole}
        with every_rank_raises("something drops it on its way"):
            on_ranks(model, parts, labels, whole=whole)


def test_a_loss_for_the_balance_of_experts_is_refused():
    model = tiny(causal_lm, config_of("mixtral", num_hidden_layers=1, output_router_logits=True))
    inputs, labels = batch_of()
    with every_rank_raises("the balance of experts on this rank's tokens alone"):
        on_ranks(model, inputs, labels)
    model.config.output_router_logits = False
    assert largest_error(on_ranks(model, inputs, labels), expected(model, inputs, labels)) < EXACT


def test_a_mask_of_the_users_own_is_refused():
    from transformers.masking_utils import create_causal_mask

    tokens = tokens_of()
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=1))

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model.set_attn_implementation("context_parallel")

        class Custom(torch.nn.Module):
            def forward(self, x):
                create_causal_mask(model.config, x, None, None, or_mask_function=lambda b, h, q, kv: q == kv)

        parallelize_module(Custom(), mesh, ModuleContextParallel())(torch.zeros(1, 4, 8))

    with pytest.raises(RankError, match=r"or_masks.* is not known"):
        run_ranks(on, 2)
    with pytest.raises(RuntimeError, match="outside of a ModuleContextParallel"):
        model(tokens, position_ids=positions_of())


def test_models_of_one_config_object():
    """They share the choice of attention, in both directions; with a copy of the config each is exact."""
    config, tokens = config_of("llama", num_hidden_layers=1), tokens_of()
    inputs, labels = {"input_ids": tokens, "position_ids": positions_of()}, labels_of(tokens)

    def pair(shared: bool) -> list[Any]:
        own = copy.deepcopy(config)
        return [tiny(causal_lm, own if shared else copy.deepcopy(own)) for _ in range(2)]

    pairs = {(shared, rank): pair(shared) for shared in (True, False) for rank in range(2)}

    def on(rank: int, shared: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh, cut = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), head_tail(LENGTH, 2)
        reference, mine = pairs[shared, rank]
        mine.set_attn_implementation(NAME)
        parallelize_module(mine, mesh, ModuleContextParallel())
        if shared:
            with pytest.raises(RuntimeError, match=r"made of one config object share it, .* copy.deepcopy\(config\)"):
                reference(tokens)
        reference.set_attn_implementation("sdpa")
        reference(tokens)
        loss = step(mine, {name: cut.shard(x, 1, rank) for name, x in inputs.items()}, cut.shard(labels, 1, rank))
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    with every_rank_raises(r"attn_implementation=register_attention\(\)"):
        run_ranks(lambda rank: on(rank, True), 2)
    (loss, grads), (other, _) = run_ranks(lambda rank: on(rank, False), 2)
    assert largest_error((loss + other, grads), expected(tiny(causal_lm, config), inputs, labels)) < EXACT


def test_sinks_beside_a_softcap():
    """No model has both; the attention function takes them."""
    heads, length = 4, LENGTH
    q, k, v, grad = (randn(seed, 1, heads if seed in (0, 3) else 2, length, 8) for seed in range(4))
    sink = randn(4, heads)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sink = torch.nn.Parameter(sink.clone())

        def forward(self, q, k, v):
            attention = transformers.AttentionInterface()[NAME]
            return attention(self, q, k, v, None, softcap=3.0, s_aux=self.sink)[0]

    def on(rank: int) -> list[torch.Tensor]:
        mesh, layout, layer = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), head_tail(length, 2), Layer()
        parallelize_module(layer, mesh, ModuleContextParallel())
        parts = [layout.shard(x, 2, rank).requires_grad_() for x in (q, k, v)]
        out = layer(*parts)
        out.backward(layout.shard(grad.transpose(1, 2), 1, rank))
        return [out.detach().transpose(1, 2), *(x.grad for x in parts), layer.sink.grad]

    found = [*zip(*run_ranks(on, 2), strict=True)]
    found = [*(head_tail(length, 2).unshard(list(parts), 2) for parts in found[:4]), sum(found[4])]
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out = dense(Layer(), *leaves[:3], None, softcap=3.0, s_aux=leaves[3], is_causal=True)[0].transpose(1, 2)
    out.backward(grad)
    for mine, wanted in zip(found, [out, *(x.grad for x in leaves)], strict=True):
        assert error(mine, wanted) < EXACT


def test_one_mask_and_one_binding_for_all_layers_and_steps():
    """What a mask is made into is made once, not at every call."""
    model = tiny(causal_lm, config_of("mistral"))
    tokens = tokens_of()

    def on(rank: int) -> int:
        layout, (_, mine) = head_tail(LENGTH, 2), under_style(model, 2)
        for _ in range(3):
            mine(layout.shard(tokens, 1, rank), position_ids=layout.shard(positions_of(), 1, rank))
        return len(mine._context_parallel_calls.calls.binding._variants)

    assert run_ranks(on, 2) == [1, 1]


@pytest.mark.parametrize("inner", [False, True], ids=["model", "inside"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "context_parallel"])
def test_generate_is_refused(implementation: str, use_cache: bool, inner: bool):
    """Each rank would append its own token to its own part; by the positions alone that looks like documents."""
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=1)).eval()
    tokens, layout = tokens_of(20), contiguous(20, 2)

    def on(rank: int) -> None:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), with_attention(model, implementation)
        parallelize_module(mine.model if inner else mine, mesh, ModuleContextParallel(layout=contiguous))
        positions = layout.positions(rank).expand(2, -1)
        mine.generate(layout.shard(tokens, 1, rank), position_ids=positions, use_cache=use_cache, max_new_tokens=2)

    with every_rank_raises(r"is called by generate\(\) of transformers"):
        run_ranks(on, 2)


@pytest.mark.parametrize("implementation", ["sdpa", "context_parallel"])
def test_a_prefill_with_a_cache(implementation: str):
    """The logits are those of one device, and each rank's cache holds the keys of its tokens; to go on is refused."""
    model = tiny(
        causal_lm, config_of("llama", num_hidden_layers=2, sliding_window=None, attention_chunk_size=None)
    ).eval()
    tokens = tokens_of()

    def forward(mine, part, positions, cache=None):
        with torch.no_grad(), StayDouble():
            return mine(part, position_ids=positions, use_cache=True, **{CACHE: cache})

    model.set_attn_implementation("sdpa")
    wanted = forward(model, tokens, positions_of())

    def on(rank: int) -> float:
        layout, style = head_tail(LENGTH, 2), ModuleContextParallel(layout=head_tail)
        _, mine = under_style(model, 2, style, implementation=implementation)
        part, positions = (layout.shard(x, 1, rank) for x in (tokens, positions_of()))
        found = forward(mine, part, positions)
        pairs = [(found.logits, layout.shard(wanted.logits, 1, rank))]
        for ours, whole in zip(found[CACHE].layers, wanted[CACHE].layers, strict=True):
            pairs += [
                (ours.keys, layout.shard(whole.keys, 2, rank)),
                (ours.values, layout.shard(whole.values, 2, rank)),
            ]
        with pytest.raises(NotImplementedError, match=f"with a cache of {layout.lengths[rank]} tokens.*prefix tuning"):
            forward(mine, part[:, :1], positions[:, :1], found[CACHE])
        return max(error(*pair) for pair in pairs)

    assert max(run_ranks(on, 2)) < EXACT


def train_on_parts(mine: torch.nn.Module, batch: dict[str, torch.Tensor], mesh: Any) -> torch.Tensor:
    layout, rank = head_tail(LENGTH, mesh.size()), mesh.get_local_rank()
    part, positions = (layout.shard(x, 1, rank) for x in (batch["tokens"], positions_of()))
    with StayDouble():
        logits = mine(input_ids=part, position_ids=positions).logits
    labels = layout.shard(labels_of(batch["tokens"]), 1, rank)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = cp_styles.global_loss(losses, cp_styles.global_token_count(labels, mesh), mesh)
    loss.backward()
    cp_styles.sum_gradients(mine, mesh)
    return loss


def old_step(model: Any, batch: Any, mesh: Any) -> torch.Tensor:
    """Before the style: the model is given the whole batch without positions, and makes the loss."""
    with StayDouble():
        loss = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("plain", [None, old_step])
def test_verify_in_place(plain: Any):
    """A model of transformers with windows is exact, in place, also against the step without a cut."""
    model = tiny(causal_lm, config_of("mistral", num_hidden_layers=2)).eval()

    def on(rank: int) -> Any:
        mesh, mine = under_style(model, 2)
        return verify(mine, mesh, {"tokens": tokens_of()}, train_on_parts, plain=plain, tolerance=EXACT)

    report = run_ranks(on, 2)[0]
    assert plain is not None or all(each.forward is not None for each in report.modules)


def windowed(model_type: str, window: int | None, **changes: Any) -> Any:
    config = config_of(model_type, num_hidden_layers=2, sliding_window=window, **changes)
    return tiny(causal_lm, config)


# Layers of all but Gemma and Qwen have no attribute with their window.
BY_DEFAULT, NIGHTLY = ("mistral", "phi3", "gemma3_text"), ("ministral3", "mixtral", "phimoe", "qwen2", "starcoder2")


@pytest.mark.parametrize("model_type", [*BY_DEFAULT, *at_night(*NIGHTLY)])
def test_a_window_between_a_part_and_the_whole(model_type: str):
    """With "sdpa" the model makes no mask for its 10 or 11 tokens. The remedy of the error is exact."""
    types = {"layer_types": ["sliding_attention", "full_attention"]} if model_type in ("qwen2", "gemma3_text") else {}
    tokens, layers = tokens_of(), {"use_sliding_window": True, **types}
    inputs, labels = {"input_ids": tokens, "position_ids": positions_of()}, labels_of(tokens)
    inputs["attention_mask"] = torch.ones_like(tokens)

    def steps(window: int, **options: Any) -> tuple[Any, Any]:
        model = windowed(model_type, window, **layers).eval()  # experts of PhiMoE are drawn in training
        return on_ranks(model, inputs, labels, balancer=contiguous, **options), expected(model, inputs, labels)

    for window, options in ((15, {}), (15, {"style": {"layout": contiguous(LENGTH, 2)}}), (LENGTH, {})):
        words = rf"(?s)rank 0.*sliding_window={window}, .*register_attention.*rank 1: NotImpl"
        with pytest.raises(RankError, match=words):
            steps(window, implementation="sdpa", **options)
    assert largest_error(*steps(15)) < EXACT


@pytest.mark.parametrize("mask", [SlidingWindow(14), Full()])
def test_a_window_of_an_attention_module(mask: Mask):
    """The other remedy of the error: a style with the window, on the attention modules that have it."""
    model, (inputs, labels), cut = windowed("mistral", 15), batch_of(), contiguous(LENGTH, 2)

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), with_attention(model, "sdpa")
        style = ModuleContextParallel(layout=contiguous, mask=mask)
        parallelize_module(mine, mesh, {"model.layers.*.self_attn": style})
        loss = step(mine, {name: cut.shard(x, 1, rank) for name, x in inputs.items()}, cut.shard(labels, 1, rank))
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    if mask == Full():
        with pytest.raises(RankError, match=r"(?s)layers of MistralAttention have sliding_window=15.*rank 1: NotImpl"):
            run_ranks(on, 2)
    else:
        (loss, grads), (other, _) = run_ranks(on, 2)
        assert largest_error((loss + other, grads), expected(model, inputs, labels)) < EXACT


@pytest.mark.parametrize("model_type", ["mistral", *at_night("gemma3_text", "qwen2")])
@pytest.mark.parametrize("layout", [None, contiguous])
def test_a_block_around_a_model(model_type: str, layout: Any):
    """Exact with the remedies of its errors, which all ranks hear of: lost windows, missing positions, labels that a
    part would be shifted by, attention in plain operations."""
    types = {"layer_types": ["sliding_attention", "full_attention"]} if model_type != "mistral" else {}
    model, (batch, labels) = windowed(model_type, 15, use_sliding_window=True, **types), batch_of()

    def steps(implementation: str, without: str = "", whole: Any = None, **extra: torch.Tensor) -> tuple[Any, Any]:
        def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), with_attention(model, implementation)
            given = {name: x.clone() for name, x in (batch | extra).items() if name != without}
            wanted = labels.clone()
            buffers = [*given.values(), wanted]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), layout=layout):
                loss = step(mine, given | (whole or {}), wanted)
            sum_gradients(mine, mesh)
            return loss, gradients(mine)

        (loss, grads), (other, _) = run_ranks(on, 2)
        return loss + other, grads

    padding = {"attention_mask": PADDED["right"]}
    assert largest_error(steps(NAME), expected(model, batch, labels)) < EXACT
    assert largest_error(steps(NAME, whole=padding), expected(model, batch | padding, labels)) < EXACT
    for implementation, without, extra, words in (
        ("sdpa", "", {}, "sliding_window=15, and the model would make their masks"),
        (
            NAME,
            "position_ids",
            {},
            r"takes position_ids and was given none.* context_parallel block .* buffers\.",
        ),
        (NAME, "", padding, "mask of the whole sequence, .*, which is no buffer of a context_parallel block"),
        (NAME, "", {"labels": labels}, "labels would be shifted after the cut"),
    ):
        with pytest.raises(RankError, match=rf"(?s)rank [01].*{words}.*rank 1"):
            steps(implementation, without, **extra)


def test_which_layers_have_a_window():
    """A model has those of its layers; an attention module has that of its own layer, or none."""
    mixed = {"layer_types": ["sliding_attention", "full_attention"]}
    gemma, llama4 = windowed("gemma3_text", 15, **mixed), tiny(causal_lm, config_of("llama4_text"))
    layers = gemma.model.layers
    found = [[window for window, _ in list_windows(x)] for x in (gemma, layers[0].self_attn, layers[1].self_attn)]
    assert found == [["sliding_window=15"], ["sliding_window=15"], []]
    assert {window for window, _ in list_windows(llama4)} == {"attention_chunk_size=6"}
    # Switched off: in the config, for all layers, by a list of layers.
    for config in (
        config_of("mistral", sliding_window=None),
        config_of("qwen2", use_sliding_window=False),
        config_of("llama", sliding_window=5),  # of another model's
        config_of("gemma3_text", num_hidden_layers=1, layer_types=["full_attention"]),
    ):
        assert list_windows(tiny(causal_lm, config)) == [], type(config)


def masked_lm(model_type: str) -> Any:
    config = config_of(model_type, num_hidden_layers=2, mask_token_id=4)
    return tiny(transformers.AutoModelForMaskedLM.from_config, config).eval()


ROBERTAS = "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"


@pytest.mark.parametrize("way", ["by hand", "by a collator"])
@pytest.mark.parametrize("model_type", ["roberta", "esm", *at_night(*ROBERTAS)])
def test_positions_after_that_of_padding(model_type: str, way: str):
    """Tokens count from the position after padding's. The remedies of the errors are exact, with padding too."""
    model, tokens = masked_lm(model_type), tokens_of()
    mask = PADDED["none" if model_type == "esm" else "right"]  # ESM multiplies its part by the mask: a raw error
    tokens = tokens.masked_fill(mask == 0, 0)
    labels = tokens.masked_fill(mask == 0, -100)
    counted = {"input_ids": tokens, "position_ids": position_ids_of(model, tokens)}
    whole = {} if model_type == "esm" else {"attention_mask": mask}
    wanted = expected(model, {"input_ids": tokens} | whole, labels)  # it counts by itself
    if way == "by a collator":

        def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mesh, mine = under_style(model, 2)
            cut = BatchSharder(mesh, shift=False, positions=partial(position_ids_of, mine))
            part = cut({"input_ids": tokens, "labels": labels} | whole)
            loss = step(mine, part, part.pop("labels"))
            sum_gradients(mine, mesh)
            return loss, gradients(mine)

        (loss, grads), (other, _) = run_ranks(on, 2)
        assert largest_error((loss + other, grads), wanted) < EXACT
        return
    assert largest_error(on_ranks(model, counted, labels, whole=whole), wanted) < EXACT
    for positions, words in (
        ({}, r"count this rank's tokens from 1. Pass position_ids=layout.shard\(position_ids_of\(model, tokens\)"),
        ({"position_ids": positions_of()}, "counts tokens from position 1, because 0 is the position of padding"),
    ):
        with every_rank_raises(words):
            on_ranks(model, {"input_ids": tokens} | positions, labels, whole=whole)
    local = {"position_ids": torch.arange(1, 12).expand(2, -1).repeat(1, 2)[:, :LENGTH]}
    with pytest.raises(RankError, match=r"position_ids count from 1 to 10 on this rank, whose part .* begins at 11"):
        on_ranks(model, {"input_ids": tokens_of()} | local, labels, balancer=contiguous)


@pytest.mark.parametrize("model_type", ["roberta", *at_night(*ROBERTAS)])
def test_verify_reports_positions_that_are_refused(model_type: str):
    """The step is wrong on one process too, so the two are equal: the refusal alone can tell."""
    model = tiny(causal_lm, config_of(model_type, is_decoder=True))

    def on(rank: int) -> Any:
        mesh, mine = under_style(model, 2)
        return verify(mine, mesh, {"tokens": tokens_of()}, train_on_parts, tolerance=EXACT)

    with pytest.raises(RankError) as caught:
        run_ranks(on, 2)
    reports = [" ".join(str(each).split()) for each in caught.value.errors.values()]  # each has lines of its own
    assert len(reports) == 2
    assert all("counts tokens from position 1, because 0 is the position of padding" in each for each in reports)


def test_positions_of_models_that_count_from_0():
    for model_type in ("llama", "bert"):
        make = causal_lm if model_type == "llama" else transformers.AutoModelForMaskedLM.from_config
        model = tiny(make, config_of(model_type, num_hidden_layers=1))
        assert torch.equal(position_ids_of(model, tokens_of()), positions_of())


def loss_inside(mine: Any, batch: dict[str, Any], mesh: Any) -> None:
    """The model makes the loss, and divides by the number of all labels, or of those of its part."""
    layout, rank = head_tail(LENGTH, mesh.size()), mesh.get_local_rank()
    tokens, labels = batch["tokens"], labels_of(batch["tokens"])
    given = {"input_ids": tokens, "position_ids": position_ids_of(mine, tokens), "labels": labels}
    given |= {"shift_labels": labels}
    part = {name: layout.shard(x, 1, rank) for name, x in given.items()}
    count = part["labels"] if batch["counted"] == "here" else labels
    with StayDouble():
        loss = mine(**part, num_items_in_batch=(count != -100).sum()).loss
    loss.backward()
    cp_styles.sum_gradients(mine, mesh)


def noisy() -> Any:
    """A hook of NEFTune, in training; its size follows from the number of tokens that it sees."""
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=1))
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)
    return model.train()


def scaled() -> Any:
    """ESM scales its embeddings by the share of mask tokens, which is another one in each part."""
    config = config_of("esm", token_dropout=True, mask_token_id=4)
    return tiny(transformers.AutoModelForMaskedLM.from_config, config).eval()


TRAINED = {
    "right": (lambda: tiny(causal_lm, config_of("llama", num_hidden_layers=1)), "together", False),
    "a count of each rank": (lambda: tiny(causal_lm, config_of("llama", num_hidden_layers=1)), "here", True),
    "a loss that knows no shift_labels": (
        lambda: tiny(transformers.BertForMaskedLM, config_of("bert", num_hidden_layers=1)).eval(),
        "together",
        True,
    ),
    "noise": (noisy, "together", True),
    "a share of mask tokens": (scaled, "together", True),
}


@pytest.mark.parametrize("name", ["right", *at_night("a count of each rank", "noise"), *[*TRAINED][2::2]])
def test_verify_finds(name: str):
    """Losses and embeddings of a part, which no argument shows."""
    make, counted, differs = TRAINED[name]
    model, tokens = make(), tokens_of().index_fill(1, torch.arange(3), 4)

    def on(rank: int) -> Any:
        mesh, mine = under_style(model, 2)
        return verify(mine, mesh, {"tokens": tokens, "counted": counted}, loss_inside, tolerance=EXACT)

    errors = run_ranks(on, 2, return_errors=True)
    assert [isinstance(each, VerificationError) for each in errors] == [differs] * 2, errors
