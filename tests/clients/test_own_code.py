"""With one rank a model runs its own code, so that verify proves what runs in its place on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import BatchSharder, Documents, ModuleContextParallel, SequenceScope, head_tail
from cp_styles._lib.compat import tree_map
from cp_styles.integrations import layers
from cp_styles.integrations.transformers import attention, position_ids_of, send_latents
from cp_styles.testing import run_ranks
from cp_styles.verify import verify
from tests.clients.hugging_face import (
    NAME,
    checkpoint_layers,
    expected,
    labels_of,
    largest_error,
    on_ranks,
    tiny,
    tokens_of,
    under_style,
)
from tests.clients.sweep import KINDS, OWN, configured, made, proved
from tests.clients.test_mixers import (
    DOCUMENTS,
    EXACT,
    MODELS,
    POSITIONS,
    document_labels,
    inputs_of,
    model_of,
    one_after_the_other,
)
from tests.covering import at_night

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def scaled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, with another factor for each channel of its outputs: a norm behind it does not take them out."""

    def change(x: Any) -> Any:
        floats = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x * torch.linspace(1.1, 1.2, x.shape[-1], dtype=x.dtype) if floats else x

    return lambda *args, **kwargs: tree_map(change, plain(*args, **kwargs))


def slower(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, slope_H, **options: plain(q, k, v, slope_H=0.9 * slope_H, **options)


def reversed_keys(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda keys, k_BLD, layer: plain(keys, k_BLD, layer).flip(1)


def louder(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda biases: plain(1.1 * biases)


def larger_weight(plain: Callable[..., Any]) -> Callable[..., Any]:
    def take(*args: Any) -> Any:
        latents, problem = plain(*args)
        return latents._replace(weight_NR=1.1 * latents.weight_NR), problem

    return take


# What runs in place of a model's code, by where it is found; and a mistake in it that is one with any number of ranks.
REPLACEMENTS: dict[str, tuple[str, Any, str, Change]] = {
    "a layer without a kernel": ("minimax", layers, "lightning_attention", slower),
    "a layer and its convolution": ("recurrent_gemma", layers, "run_convolution", scaled),
    "a scan": ("recurrent_gemma", layers, "run_recurrence", scaled),
    "a backend": ("xlstm", layers, "run_recurrence", scaled),
    "a token shift": ("rwkv", layers, "run_convolution", scaled),
    "a kernel by channels": ("jamba", layers, "run_recurrence", scaled),
    "a kernel": ("qwen3_next", layers, "run_recurrence", scaled),
    "a convolution": ("lfm3", layers, "run_convolution", scaled),
    "an indexer": ("deepseek_v32", layers._IndexerKeys, "update_indexer", reversed_keys),
    "biases by distance": ("t5", attention, "_add_biases", louder),
    "latents": ("deepseek_v3", attention, "take_latents", larger_weight),
}
BY_DAY = "a layer without a kernel", "a kernel", "a token shift", "an indexer", "latents"


@pytest.mark.parametrize("where", [*BY_DAY, *at_night(*sorted(REPLACEMENTS.keys() - set(BY_DAY)))])
def test_a_replacement_that_computes_something_else_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch):
    model_type, owner, name, change = REPLACEMENTS[where]
    kind = "causal" if model_type in KINDS["causal"][1] else "seq2seq"
    sizes = {"num_hidden_layers": 2} | MODELS[model_type] if model_type in MODELS and model_type not in OWN else {}
    model, tokens = tiny(partial(made, kind, model_type), configured(model_type, **sizes)).eval(), tokens_of()
    inputs = inputs_of(model, tokens, position_ids_of(model, tokens))
    if kind == "seq2seq":
        inputs |= {"input_ids": tokens_of(seed=1), "decoder_input_ids": tokens}
    prepare = send_latents if where == "latents" else None
    equal, found = proved(model, inputs, labels_of(tokens), prepare)
    assert equal, found
    assert "a planted mistake moved" in found  # it was put into what replaces the model's code
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    equal, found = proved(model, inputs, labels_of(tokens), prepare)
    assert not equal
    assert "WRONG" in found, found


@pytest.mark.parametrize("model_type", ["recurrent_gemma", *at_night("minimax", "qwen3_next", "rwkv", "jamba")])
def test_one_rank(model_type: str):
    """Also with a cache that the model makes itself, and in checkpoints."""
    model, tokens = model_of(model_type, use_cache=model_type != "rwkv"), tokens_of()
    inputs, labels = inputs_of(model, tokens), labels_of(tokens)
    wanted = expected(model, inputs, labels)
    assert largest_error(on_ranks(model, inputs, labels, ranks=1), wanted) < EXACT
    checkpoint_layers(model)
    assert largest_error(on_ranks(model, inputs, labels, ranks=1), wanted) < EXACT


@pytest.mark.parametrize("model_type", ["minimax", *at_night("jamba", "lfm3", "qwen3_next", "xlstm")])
def test_documents_on_one_rank(model_type: str):
    """Of a scope, of which the model knows nothing."""
    model, tokens = model_of(model_type), tokens_of()
    inputs, labels = inputs_of(model, tokens, POSITIONS), document_labels(tokens)
    scope: dict[str, Any] = {"scope": lambda layout: SequenceScope(layout, mask=Documents(DOCUMENTS))}
    found = on_ranks(model, inputs, labels, ranks=1, **scope)
    assert largest_error(found, one_after_the_other(model, tokens)) < EXACT


def test_documents_in_arguments_on_one_rank():
    model, tokens = model_of("qwen3_next"), tokens_of()
    ends = torch.tensor((0, *DOCUMENTS)).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(DOCUMENTS)).int().expand(len(tokens), -1)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "seq_idx": ids}
    inputs = inputs_of(model, tokens, POSITIONS)
    found = on_ranks(model, inputs, document_labels(tokens), ranks=1, whole=packed)
    assert largest_error(found, one_after_the_other(model, tokens)) < EXACT


def test_biases_that_a_hook_has_changed():
    """No table has given them, and they do not train."""
    model = tiny(partial(made, "seq2seq", "t5"), configured("t5", num_layers=2)).encoder.requires_grad_(False).eval()
    mine, tokens = copy.deepcopy(model), tokens_of()
    for encoder in (model, mine):
        attention = encoder.block[0].layer[0].SelfAttention
        attention.register_forward_hook(lambda _, args, out: (out[0], 2 * out[1], *out[2:]))

    def main(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        mine.set_attn_implementation(NAME)
        parallelize_module(mine, mesh, ModuleContextParallel())
        return mine(input_ids=tokens).last_hidden_state

    torch.testing.assert_close(run_ranks(main, 1)[0], model(input_ids=tokens).last_hidden_state)


def test_biases_in_low_precision():
    """verify measures rounding by outputs of modules with other last bits: biases that no table has given."""
    model = tiny(partial(made, "seq2seq", "t5"), configured("t5", num_layers=1, num_decoder_layers=1))
    model, tokens = model.to(torch.bfloat16).eval(), tokens_of()

    def act(mine: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharder = BatchSharder(mesh, layout=head_tail)
        batch = sharder(tokens)
        loss = batch.loss(mine(input_ids=batch.tokens, decoder_input_ids=batch.tokens).logits)
        loss.backward()
        sharder.sum_gradients(mine)
        return loss

    def main(rank: int) -> str:
        mesh, mine = under_style(model, 2, ModuleContextParallel(layout=head_tail))
        return verify(mine, mesh, tokens, act).line

    assert "equal to one device" in run_ranks(main, 2)[0]
