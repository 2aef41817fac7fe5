"""Models of transformers through its attention interface: exact, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import Documents, ModuleContextParallel, SequenceScope, contiguous, head_tail, next_token_labels
from cp_styles.testing import RankError, run_ranks
from tests.clients.hugging_face import (
    LENGTH,
    causal_lm,
    config_of,
    expected,
    labels_of,
    largest_error,
    on_ranks,
    positions_of,
    tiny,
    tokens_of,
)

# float64 sums in another order give 1e-15; one key too many or too few gives 1e-3 and more.
EXACT = 1e-10


def each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


PLAIN = """
    apertus arcee bitnet cohere ctrl diffllama ernie4_5 gemma glm glm4 gpt2 gpt_bigcode gpt_neox granite helium
    hunyuan_v1_dense internlm3 llama nanochat nemotron olmo olmo2 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3
    stablelm starcoder2
"""
WINDOWS = "cohere2 cwm exaone4 gemma3_text granite_swa ministral mistral modernbert-decoder olmo3"
EXPERTS = """
    afmoe cohere2_moe ernie4_5_moe exaone_moe flex_olmo glm4_moe granitemoe hunyuan_v1_moe jetmoe mellum minimax_m2
    mixtral olmoe qwen2_moe qwen3_moe
"""
EXACT_MODELS = {
    **each(PLAIN, {}),  # causal: grouped heads, norms of queries and keys, partial rotary embeddings, learned positions
    **each(WINDOWS, {}),  # in all layers or in some
    **each("gemma2 vaultgemma", {}),  # softcap, and windows
    **each("llama4_text", {}),  # chunks
    **each("gpt_oss mimo_v2_flash", {}),  # sinks, and windows
    **each("deepseek_v2 deepseek_v3 minicpm3 youtu", {"head_dim": 4}),  # MLA: values of another head dim
    **each(EXPERTS, {}),
}
REFUSED_MODELS = {
    **each("bloom mpt openai-gpt roformer", "no scaled_dot_product_attention was called inside"),
    "deepseek_v32": "cuts its attention mask itself",  # tokens are selected for each query
    "deepseek_v4": "with 21 queries and 25 keys",  # compressed keys beside the tokens'
    "doge": "gradient of an attention bias",
    "inkling_text": "InklingAttention adds a position_bias to its logits",
}


@pytest.mark.parametrize("model_type", EXACT_MODELS)
def test_exact(model_type: str):
    model = tiny(causal_lm, config_of(model_type, **EXACT_MODELS[model_type]))
    tokens = tokens_of()
    inputs = {"input_ids": tokens, "position_ids": positions_of()}
    labels = labels_of(tokens)
    assert largest_error(on_ranks(model, inputs, labels), expected(model, inputs, labels)) < EXACT


@pytest.mark.parametrize("model_type", REFUSED_MODELS)
def test_refused(model_type: str):
    model = tiny(causal_lm, config_of(model_type))
    tokens = tokens_of()
    with pytest.raises((RankError, ValueError), match=REFUSED_MODELS[model_type]):
        on_ranks(model, {"input_ids": tokens, "position_ids": positions_of()}, labels_of(tokens))


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


@pytest.mark.parametrize("balancer", [head_tail, contiguous])
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "llama4_text", "gpt_oss"])
def test_padding(model_type: str, padding: str, balancer):
    """A window; a softcap beside one; chunks, which transformers counts from the end of the left padding; sinks."""
    if balancer is contiguous and model_type != "mistral":
        pytest.skip("how ranks are cut is not the model's concern")
    model = tiny(causal_lm, config_of(model_type, num_hidden_layers=2))
    tokens, whole = tokens_of(), {"attention_mask": PADDED[padding]}
    inputs = {"input_ids": tokens, "position_ids": (PADDED[padding].cumsum(1) - 1).clamp(min=0)}
    labels = labels_of(tokens).masked_fill(PADDED[padding] == 0, -100)
    found = on_ranks(model, inputs, labels, whole=whole, balancer=balancer, ranks=3)
    assert largest_error(found, expected(model, inputs | whole, labels)) < EXACT


DOCUMENTS = ((9, 3, 9), (5, 16))
PACKED = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
IDS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS])


@pytest.mark.parametrize("balancer", [head_tail, contiguous])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "llama4_text"])
def test_packed_documents(model_type: str, balancer):
    """Positions that restart are documents, as transformers has it on one device; different ones in each row."""
    model = tiny(causal_lm, config_of(model_type, num_hidden_layers=2))
    tokens = tokens_of()
    inputs, labels = {"input_ids": tokens, "position_ids": PACKED}, labels_of(tokens, document_ids=IDS)
    found = on_ranks(model, inputs, labels, balancer=balancer, ranks=3)
    assert largest_error(found, expected(model, inputs, labels)) < EXACT


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
    with pytest.raises(RankError, match=words) as found:
        on_ranks(model, inputs, labels_of(inputs["input_ids"]), whole=whole, **options)
    assert found.value.errors.keys() == {0, 1}


def test_positions_and_masks_of_a_part_are_refused():
    tokens, even = tokens_of(), tokens_of(20)
    local = {"position_ids": torch.arange(10).expand(2, -1)}
    refused({"input_ids": even}, local, words="as if no other rank had a part", balancer=contiguous)
    refused({"input_ids": even}, local, words="count")
    ones = torch.ones_like(tokens)
    ones[0, -2:] = 0
    cut = {"input_ids": tokens, "position_ids": positions_of(), "attention_mask": ones}
    refused(cut, words=r"attention_mask of shape \(2, 11\) marks padding, .* 11 of 21 tokens")


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


def test_one_mask_and_one_binding_for_all_layers_and_steps():
    """What a mask is made into is made once, not at every call."""
    model = tiny(causal_lm, config_of("mistral"))
    tokens = tokens_of()

    def on(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model.set_attn_implementation("context_parallel")
        import copy

        mine, layout = copy.deepcopy(model), head_tail(LENGTH, 2)
        parallelize_module(mine, mesh, ModuleContextParallel())
        for _ in range(3):
            mine(layout.shard(tokens, 1, rank), position_ids=layout.shard(positions_of(), 1, rank))
        return len(mine._context_parallel_calls[0]._masked)

    assert run_ranks(on, 2) == [1, 1]


def test_labels_across_documents():
    assert (next_token_labels(tokens_of(), document_ids=IDS) == -100).sum() == 5
