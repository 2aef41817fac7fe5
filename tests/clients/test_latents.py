"""Models of transformers whose latents travel in place of their heads: exact, in fewer bytes, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from cp_styles import AllGather, BatchSharder, ModuleContextParallel, Ring, Ulysses, head_tail, sum_gradients
from cp_styles.integrations.transformers import prefill, send_latents
from cp_styles.testing import CommunicationTrace
from cp_styles.verify import verify
from tests.clients.hugging_face import (
    BATCH,
    CACHE,
    LENGTH,
    NAME,
    StayDouble,
    batch_of,
    causal_lm,
    checkpoint_layers,
    config_of,
    expected,
    gradients,
    largest_error,
    step,
    tiny,
    tokens_of,
    under_style,
    with_attention,
)
from tests.clients.sweep import OWN
from tests.clients.test_mixers import MODELS as MIXERS
from tests.covering import at_night, sampled
from tests.device import run_ranks
from tests.pages import example
from tests.ranks.attention_case import every_rank_raises

EXACT = 1e-10  # float64 sums in another order give 1e-15 a layer
SIZES: dict[str, Any] = {"head_dim": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
PLAIN = ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu", "axk1", "longcat_flash", "glm4_moe_lite")
HYBRIDS = ("kimi_linear", "bailing_hybrid")  # their remaining layers have states
LATENT_LAYERS = {"layer_types": ["full_attention"] * 2}
TYPES: dict[str, dict[str, Any]] = {name: {} for name in PLAIN}
TYPES |= {name: MIXERS[name] | LATENT_LAYERS for name in HYBRIDS}
# A row of heads: 4 x (8 + 4 + 8) numbers. A row of latents: 8 + 4.
HEADS, LATENTS = 80, 12


def model_of(model_type: str) -> Any:
    return tiny(causal_lm, config_of(model_type, **SIZES | TYPES[model_type]))


def trained(
    model: nn.Module, prepare: Callable[[Any, Any], Any], ranks: int = 2, **style: Any
) -> tuple[Any, list[int]]:
    """Loss and gradients of a step, and the bytes of keys, values and their gradients that each rank has sent."""
    inputs, labels = batch_of()

    def on(rank: int) -> tuple[Any, dict[str, torch.Tensor], int]:
        mesh, mine = under_style(model, ranks, ModuleContextParallel(layout=head_tail, **style))
        called, layout = prepare(mine, mesh), head_tail(LENGTH, ranks)
        parts = {name: layout.shard(x, 1, rank) for name, x in inputs.items()}
        with CommunicationTrace() as trace:
            loss = step(called, parts, layout.shard(labels, 1, rank))
        sent = sum(size for name, size in trace.events if name == "send")
        if not any(isinstance(x, DTensor) for x in mine.parameters()):
            sum_gradients(mine, mesh)
            return loss, gradients(mine), sent
        whole = {name: x.full_tensor() * ranks for name, x in gradients(mine).items()}  # pyright: ignore
        return loss, whole, sent

    found = run_ranks(on, ranks)
    loss = torch.stack([loss for loss, _, _ in found]).sum()
    error = largest_error((loss, found[0][1]), expected(model, inputs, labels))
    return error, [sent for _, _, sent in found]


def with_latents(model: Any, mesh: Any) -> Any:
    send_latents(model)
    return model


@sampled(1, model_type=list(TYPES), ranks=[2, 3], strategy=[Ring(), AllGather(keep=0), Ulysses()])
def test_models_are_exact(model_type: str, ranks: int, strategy: Any):
    error, sent = trained(model_of(model_type), with_latents, ranks, strategy=strategy)
    assert error < EXACT
    if strategy == Ring():
        _, of_heads = trained(model_of(model_type), lambda model, mesh: model, ranks)
        assert [size * HEADS for size in sent] == [size * LATENTS for size in of_heads]


@pytest.mark.skipif("dory" not in transformers.CONFIG_MAPPING, reason="transformers 5.24")
@pytest.mark.parametrize("model_type", ["deepseek_v32", *at_night("axk2", "glm_moe_dsa")])
def test_latents_of_selected_keys(model_type: str):
    """An indexer selects the keys, and only their latents travel."""
    model = tiny(causal_lm, config_of(model_type, **OWN[model_type]))
    error, sent = trained(model, with_latents)
    assert error < EXACT
    _, of_heads = trained(model, lambda model, mesh: model)
    assert max(sent) < max(of_heads)


def test_a_proof_in_bfloat16():
    """The run that measures rounding leaves the expansion as it is, with which the attention compares its keys."""
    model, tokens = model_of("deepseek_v3").bfloat16(), tokens_of()

    def main(rank: int) -> None:
        mesh, mine = under_style(model, 2)
        send_latents(mine)

        def act(mine: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
            sharder = BatchSharder(mesh)
            batch = sharder({"input_ids": tokens, "labels": tokens})
            loss = batch.loss(mine(**batch.inputs).logits)
            loss.backward()
            sharder.sum_gradients(mine)
            return loss

        report = verify(mine, mesh, tokens, act)
        assert report.rounding > 0

    run_ranks(main, 2)


def with_checkpoints(model: Any, mesh: Any) -> Any:
    send_latents(model)
    checkpoint_layers(model)
    return model


def with_fsdp(model: Any, mesh: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    send_latents(model)  # its layers are wrapped, and kv_b_proj is a part of one
    return model


def compiled(model: Any, mesh: Any) -> Any:
    torch._dynamo.reset()
    send_latents(model)
    return torch.compile(model, backend="aot_eager")


def with_hooks_removed(model: Any, mesh: Any) -> Any:
    for handle in send_latents(model):
        handle.remove()
    return model


@pytest.mark.parametrize("prepare", [with_checkpoints, with_fsdp, compiled, with_hooks_removed])
def test_a_model_as_people_train_it(prepare: Any):
    model = model_of("deepseek_v3")
    error, sent = trained(model, prepare)
    assert error < EXACT
    (_, heads), (_, latents) = trained(model, lambda model, mesh: model), trained(model, with_latents)
    # A repeated forward sends again what the first sent.
    assert (sum(sent) > sum(latents)) == (prepare in (with_hooks_removed, with_checkpoints))
    assert (sent == heads) == (prepare is with_hooks_removed)


def test_a_tensor_parallel_plan_of_the_library():
    """The plan of DeepSeek-V3 cuts its MLPs and experts, and leaves its attention whole."""
    model, (inputs, labels), layout = model_of("deepseek_v3"), batch_of(), head_tail(LENGTH, 2)

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        mine, at = copy.deepcopy(model), mesh["cp"].get_local_rank()
        mine.set_attn_implementation(NAME)
        apply_tensor_parallelism(mine, mesh["tp"], mine._expand_parallel_plan(dict(mine.tp_plan)))
        parallelize_module(mine, mesh["cp"], ModuleContextParallel(layout=layout))
        send_latents(mine)
        loss = step(mine, {name: layout.shard(x, 1, at) for name, x in inputs.items()}, layout.shard(labels, 1, at))
        sum_gradients(mine, mesh["cp"])
        grads = gradients(mine).items()
        return loss, {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads}

    found, wanted = run_ranks(on, 4), expected(model, inputs, labels)
    for tp in range(2):
        assert largest_error((found[tp][0] + found[2 + tp][0], found[tp][1]), wanted) < EXACT


def test_decoding_does_not_change():
    """Nothing of the hook stays, and a prompt whose latents travelled is continued as on one process."""
    # Without a window, which DeepSeek has not, but with one the cache of transformers on one device has it.
    no_window = {"sliding_window": None, "attention_chunk_size": None, "max_position_embeddings": 128}
    model: Any = tiny(causal_lm, config_of("deepseek_v3", **SIZES | no_window)).eval()
    tokens = tokens_of()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    alone = with_attention(model)
    with StayDouble():
        wanted = alone.generate(tokens, **options)

    def on(rank: int) -> torch.Tensor:
        _, mine = under_style(model, 2, ModuleContextParallel(layout=head_tail))
        send_latents(mine)
        with StayDouble():
            return mine.generate(tokens, **{CACHE: prefill(mine, tokens)}, **options)

    for found in run_ranks(on, 2):
        assert torch.equal(found, wanted)


class Adapted(nn.Linear):
    """A linear layer with another forward, as adapters and quantization have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def with_scaled_keys(model: Any) -> Any:
    """A model of another version, which changes its keys behind the expansion."""
    attention = model.model.layers[0].self_attn

    class Scaled(type(attention)):
        def expand_kv(self, kv_nope, k_rot):
            key, value = super().expand_kv(kv_nope, k_rot)
            return key * 2, value

    model.model.layers[0].self_attn = Scaled(model.config, 0).double()
    return model


def sharded_alone(model: Any, mesh: Any) -> Any:
    """The weight of kv_b_proj is whole in its own forward only."""
    send_latents(model)
    for layer in model.model.layers:
        fully_shard(layer.self_attn.kv_b_proj, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def with_another_attention(model: Any, mesh: Any) -> Any:
    send_latents(model)
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize(
    ("change", "prepare", "words"),
    [
        (lambda model: model, with_another_attention, "attends by 'sdpa', which sends its heads"),
        (with_scaled_keys, with_latents, "computes its keys and values in another way"),
        (lambda model: model, sharded_alone, "needs plain tensors, got"),
    ],
)
def test_other_keys_are_refused_in_the_forward(change: Any, prepare: Any, words: str):
    with every_rank_raises(words) as found:
        trained(change(model_of("deepseek_v3")), prepare)
    assert all(isinstance(problem, ValueError | NotImplementedError) for problem in found.value.errors.values())


def test_models_without_plain_latents_are_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layer that expands latents"):
        send_latents(tiny(causal_lm, config_of("llama")))
    model: Any = model_of("deepseek_v3")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn attends by 'sdpa', which sends its heads"):
        send_latents(model)
    model.set_attn_implementation(NAME)  # the remedy
    send_latents(model)
    up = model.model.layers[1].self_attn.kv_b_proj
    for other in (Adapted(up.in_features, up.out_features, bias=False), nn.Linear(up.in_features, up.out_features)):
        model.model.layers[1].self_attn.kv_b_proj = other
        with pytest.raises(NotImplementedError, match=r"model\.layers\.1\.self_attn\.kv_b_proj is"):
            send_latents(model)


def test_the_example_of_the_page_and_its_proof():
    """The lines of the page, and a step that verify compares with one rank."""
    code = example("send latents")
    model, tokens = model_of("deepseek_v3").float(), tokens_of(40)

    def on(rank: int) -> tuple[float, int]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        mine: Any = copy.deepcopy(model)
        mine.set_attn_implementation(NAME)
        exec(code, {"model": mine, "mesh": mesh})

        def step(model: Any, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
            sharder = BatchSharder(mesh)
            batch = sharder(tokens)
            loss = batch.loss(model(**batch.inputs).logits)
            loss.backward()
            sharder.sum_gradients(model)
            return loss

        verify(mine, mesh, tokens, step)
        with CommunicationTrace() as trace:
            loss = step(mine, tokens, mesh)
        return loss.item(), sum(size for name, size in trace.events if name == "send")

    (loss, sent), (other, sent_back) = run_ranks(on, 2)
    assert loss == other
    # Of two parts of 20 tokens, one rank needs the first chunk of the other, and one both. Two layers, gradients too.
    assert sent + sent_back == 2 * 2 * BATCH * (10 + 20) * LATENTS * 4
