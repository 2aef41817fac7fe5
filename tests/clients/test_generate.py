"""``generate()`` with a cache that is cut over the ranks: token by token that of one process, or refused by name."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import ModuleContextParallel, contiguous, head_tail
from cp_styles.integrations.transformers import encode, prefill
from cp_styles.layouts import Balancer
from cp_styles.testing import RankError, run_ranks
from tests.clients.hugging_face import (
    CACHE,
    LENGTH,
    NAME,
    PRETRAINED,
    ROPES,
    TINY,
    VOCABULARY,
    StayDouble,
    causal_lm,
    config_of,
    tiny,
    tokens_of,
    under_style,
    with_attention,
    with_rope,
)
from tests.clients.sweep import GEMMA4
from tests.clients.test_mixers import MODELS as MIXERS
from tests.covering import at_night, sampled
from tests.oracle import error
from tests.pages import example
from tests.ranks.attention_case import every_rank_raises

# float64 sums in another order give 1e-15 a layer, and a wrong key 1e-3.
EXACT = 1e-10
PADDED = torch.ones(2, LENGTH, dtype=torch.int64)
PADDED[0, :6] = 0
NEW = {"n_positions": 128, "max_position_embeddings": 128}


# Other models have no use for these sizes, but the cache of transformers would.
WITH_WINDOWS = ("gemma3_text", "mistral", "gemma2", "gpt_oss", "llama4_text", "gemma4_text")


def model_of(model_type: str, **changes: Any) -> Any:
    layers = {} if model_type in WITH_WINDOWS else {"sliding_window": None, "attention_chunk_size": None}
    model: Any = tiny(causal_lm, config_of(model_type, **NEW | {"num_hidden_layers": 2} | layers | changes)).eval()
    model.generation_config.eos_token_id = None  # so that there are as many tokens as were asked for
    return model


def watched(model: Any) -> list[torch.Tensor]:
    """The logits of the last token of each forward from now on, in float64."""
    found: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, output: found.append(output.logits[:, -1].clone()))
    return found


Generate = Callable[[Any, torch.Tensor, Any], torch.Tensor]


def greedy(new: int = 32, **options: Any) -> Generate:
    def generate(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        options.setdefault("do_sample", False)
        return model.generate(tokens, **{CACHE: cache}, max_new_tokens=new, use_cache=True, **options)

    return generate


def on_one(model: Any, tokens: torch.Tensor, generate: Generate) -> tuple[torch.Tensor, list[torch.Tensor]]:
    one = with_attention(model)
    logits = watched(one)
    with StayDouble():
        return generate(one, tokens, None), logits


def on_ranks(
    model: Any,
    tokens: torch.Tensor,
    generate: Generate,
    *,
    ranks: int = 2,
    balancer: Balancer = head_tail,
    implementation: str = NAME,
    between: Callable[[int, Any], Any] | None = None,
    **inputs: Any,
) -> list[tuple[torch.Tensor, list[torch.Tensor], Any]]:
    def on(rank: int) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
        _, mine = under_style(model, ranks, ModuleContextParallel(layout=balancer), implementation=implementation)
        with StayDouble():
            cache = prefill(mine, tokens, **inputs)
            if between is not None:
                between(rank, cache)
            logits = watched(mine)
            return generate(mine, tokens, cache), logits, cache

    return run_ranks(on, ranks)


def compare(found: list[tuple[torch.Tensor, list[torch.Tensor], Any]], wanted: Any) -> None:
    tokens, logits = wanted
    for mine, theirs, _ in found:
        assert torch.equal(mine, tokens)
        assert len(theirs) == len(logits)
        assert max(map(error, theirs, logits)) < EXACT


MODELS = {
    "llama": {},  # grouped heads
    "qwen3": {},
    "gpt2": {},  # learned positions
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {},  # a window in each layer
    "gemma2": {},  # a softcap
    "gpt_oss": {},  # sinks
    "llama4_text": {},  # chunks
    "deepseek_v3": {"head_dim": 4},  # values of another head dim
}
if "gemma4_text" in transformers.CONFIG_MAPPING:  # transformers 5.24
    MODELS["gemma4_text"] = GEMMA4 | {"num_kv_shared_layers": 2}  # keys of earlier layers


@sampled(1, model_type=list(MODELS), ranks=[2, 3], padded=[False, True], balancer=[head_tail, contiguous])
def test_generate(model_type: str, ranks: int, padded: bool, balancer: Balancer):
    """24 tokens after a prompt of 21, which does not divide; 6 where only masks and keys differ."""
    model, tokens = model_of(model_type, **MODELS[model_type]), tokens_of()
    inputs = {"attention_mask": PADDED} if padded else {}
    generate = greedy(24 if model_type in ("llama", "gemma3_text") else 6, **inputs)
    found = on_ranks(model, tokens, generate, ranks=ranks, balancer=balancer, **inputs)
    compare(found, on_one(model, tokens, generate))


@sampled(1, length=[PRETRAINED + 1, 2 * PRETRAINED], kind=list(ROPES))
def test_rotary_embeddings_that_depend_on_the_longest_position(kind: str, length: int):
    """One token more than in pretraining: the prefill leaves out that token, and its frequencies count it."""
    model, tokens = with_rope(kind).eval(), tokens_of(length)
    model.generation_config.eos_token_id = None
    compare(on_ranks(model, tokens, greedy(8)), on_one(model, tokens, greedy(8)))


WITHOUT_KEYS = ("falcon_mamba", "mamba", "mamba2", "qwen4_exp_text", "rwkv", "xlstm")
OWN_STATES = ("minimax", "recurrent_gemma")  # in a cache of its own alone, or in its layers
HYBRIDS = sorted(MIXERS.keys() - {*WITHOUT_KEYS, *OWN_STATES})


@pytest.mark.parametrize(
    ("model_type", "ranks", "padded", "balancer"),
    [
        ("jamba", 3, False, head_tail),
        ("lfm3", 2, False, contiguous),
        ("qwen3_next", 2, True, head_tail),
        ("qwen3_next", 1, False, head_tail),
        *(
            pytest.param(each, ranks, padded, balancer, marks=pytest.mark.nightly)
            for each in HYBRIDS
            for ranks, padded, balancer in ((2, False, head_tail), (3, True, contiguous))
        ),
    ],
)
def test_states_beside_keys(model_type: str, ranks: int, padded: bool, balancer: Balancer):
    """The rows before the next token, and the state after the prompt, are the same on all ranks."""
    model, tokens = model_of(model_type, **MIXERS[model_type]), tokens_of()
    inputs = {"attention_mask": PADDED} if padded else {}
    found = on_ranks(model, tokens, greedy(6, **inputs), ranks=ranks, balancer=balancer, **inputs)
    compare(found, on_one(model, tokens, greedy(6, **inputs)))


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("qwen3_next", "a further prompt"),
        ("jamba", "beams"),
        ("jamba", "2 tokens"),
        *(
            pytest.param(each, what, marks=pytest.mark.nightly)
            for each in HYBRIDS
            for what in ("a further prompt", "beams", "2 tokens", "3 tokens")
        ),
    ],
)
def test_states_of_other_generations(model_type: str, what: str):
    """A prompt of 2 tokens is not cut, and one of 3 is shorter than the convolutions are wide."""
    tokens = tokens_of(int(what[0])) if what.endswith("tokens") else tokens_of()

    def generate(mine: Any, prompt: torch.Tensor, cache: Any) -> torch.Tensor:
        if what == "beams":
            if cache is not None:
                cache.batch_repeat_interleave(3)
            return greedy(5, num_beams=3)(mine, prompt, cache)
        if what == "a further prompt":
            cache = transformers.DynamicCache(config=mine.config) if cache is None else cache
            prompt = torch.cat((greedy(2)(mine, prompt, cache), tokens_of(7, 1)), 1)
        return greedy(4)(mine, prompt, cache)

    model = model_of(model_type, **MIXERS[model_type])
    compare(on_ranks(model, tokens, generate), on_one(model, tokens, generate))


def test_states_that_are_not_handed_over_are_refused():
    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        for model_type in ("mamba", "qwen4_exp_text"):
            mine = model_of(model_type, **MIXERS[model_type])
            mine.set_attn_implementation(NAME)
            parallelize_module(mine, mesh, ModuleContextParallel())
            with pytest.raises(NotImplementedError, match="a model without attention"):
                prefill(mine, tokens_of())

    run_ranks(on, 2)
    model = model_of("lfm3", **MIXERS["lfm3"])
    with pytest.raises(RankError, match="a state does not go back"):
        on_ranks(model, tokens_of(), greedy(2), between=lambda rank, cache: cache.crop(-1))


def test_the_example_of_the_page():
    code = example("generate")
    model, tokens = model_of("mistral"), tokens_of()
    code, new = re.subn(r"max_new_tokens=\d+", "max_new_tokens=8", code)
    assert new == 1
    wanted, _ = on_one(model, tokens, greedy(8))

    def on(rank: int) -> torch.Tensor:
        mine = copy.deepcopy(model)
        mine.set_attn_implementation(NAME)
        names = {"model": mine, "tokens": tokens, "parallelize_module": parallelize_module}
        names |= {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))}
        mine.generation_config.use_cache = True  # as models have it, but for the tests' configuration
        with StayDouble():
            exec(code.replace(", cache=", f", {CACHE}="), names)
        return names["tokens"]

    assert all(torch.equal(each, wanted) for each in run_ranks(on, 2))


def test_no_rank_holds_the_whole_cache():
    """In bytes, each rank its part and room for an eighth more; under a window no more, whatever the prompt is."""
    model, length, new, window = model_of("gemma3_text", **MODELS["gemma3_text"]), 96, 12, 5
    (_, _, one), *rest = on_ranks(model, tokens_of(length), greedy(new), ranks=3)
    caches = [one, *(cache for *_, cache in rest)]
    # Two rows, two heads of 8 keys and values in float64. The last token is not run through the model any more.
    position = 2 * 2 * 2 * 8 * 8
    whole = [cache.layers[1].nbytes for cache in caches]
    assert max(whole) <= (length + new - 1 + 2) // 3 * position * 9 / 8
    assert (length + new - 1) * position <= sum(whole) <= (length + new - 1) * position * 9 / 8
    assert max(cache.layers[0].nbytes for cache in caches) <= 2 * window * position


def test_a_further_prompt():
    """A conversation goes on with the same cache."""
    model, tokens, further = model_of("gemma3_text", **MODELS["gemma3_text"]), tokens_of(), tokens_of(7, 1)

    def talk(mine: Any, prompt: torch.Tensor, cache: Any) -> torch.Tensor:
        cache = transformers.DynamicCache(config=mine.config) if cache is None else cache
        said = greedy(8)(mine, prompt, cache)
        return greedy(8)(mine, torch.cat((said, further), 1), cache)

    compare(on_ranks(model, tokens, talk), on_one(model, tokens, talk))


@pytest.mark.parametrize("model_type", ["gemma3_text", "lfm3", *at_night("llama")])
def test_one_prefill_for_prompts_that_begin_alike(model_type: str):
    """Each prompt goes on with a copy of the cache, which has tensors of its own: windows and states too."""
    model, prefix = model_of(model_type, **MODELS.get(model_type, MIXERS.get(model_type, {}))), tokens_of()
    prompts = [torch.cat((prefix, tokens_of(length, seed)), 1) for seed, length in enumerate((5, 1), 1)]

    def on(rank: int) -> list[torch.Tensor]:
        _, mine = under_style(model, 2)
        with StayDouble():
            cache = prefill(mine, prefix)
            return [greedy(4)(mine, prompt, copy.deepcopy(cache)) for prompt in prompts]

    for found in run_ranks(on, 2):
        for prompt, tokens in zip(prompts, found, strict=True):
            assert torch.equal(tokens, on_one(model, prompt, greedy(4))[0])


@pytest.mark.parametrize("length", [1, 2])
def test_a_prompt_that_is_too_short_to_cut(length: int):
    model, tokens = model_of("llama"), tokens_of(length)
    compare(on_ranks(model, tokens, greedy(6), ranks=3), on_one(model, tokens, greedy(6)))


def test_beam_search():
    """The rows of the cache are repeated for the beams, and then exchanged."""
    model, tokens = model_of("llama"), tokens_of()
    beams = greedy(12, num_beams=3)

    def repeated(mine: Any, prompt: torch.Tensor, cache: Any) -> torch.Tensor:
        if cache is not None:
            cache.batch_repeat_interleave(3)
        return beams(mine, prompt, cache)

    compare(on_ranks(model, tokens, repeated), on_one(model, tokens, repeated))


def test_assisted_decoding_is_refused():
    """It begins with all tokens of the prompt, although the cache has them: they would be there twice."""
    with pytest.raises(RankError, match="or an assistant decodes"):
        on_ranks(model_of("mistral"), tokens_of(6).repeat(1, 4)[:1], greedy(16, prompt_lookup_num_tokens=3))


SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
TABLE = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0}
NEW_TOKENS = 9
PART = TINY | {"attn_logit_softcapping": 3.0, "num_hidden_layers": 2}


def with_encoder(model_type: str) -> Any:
    sizes = {"encoder": PART, "decoder": PART, "vocab_size": VOCABULARY} if model_type == "t5gemma" else SIZES | TABLE
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model: Any = tiny(transformers.AutoModelForSeq2SeqLM.from_config, config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.decoder_start_token_id = 1
    return model


@sampled(1, model_type=["t5", "t5gemma"], ranks=[2, 3], padded=[True, False], beams=[1, 2])
def test_an_encoder_and_a_decoder(model_type: str, ranks: int, padded: bool, beams: int):
    """The encoder's keys are cut too, and stay so: every decoder query attends to them where they are."""
    model, tokens = with_encoder(model_type), tokens_of()
    mask = {"attention_mask": PADDED.flip(1)} if padded else {}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": beams, "use_cache": True, **mask}

    one = with_attention(model)
    logits = watched(one)
    with StayDouble():
        wanted = one.generate(tokens, **options), logits

    def on(rank: int) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
        _, mine = under_style(model, ranks)
        with StayDouble():
            encoded = encode(mine, tokens, **mask)
            logits = watched(mine)
            return mine.generate(tokens, **encoded, **options), logits, encoded[CACHE]

    found = run_ranks(on, ranks)
    compare(found, wanted)
    held = [cache.cross_attention_cache.layers[0].keys.shape[2] for *_, cache in found]
    assert sum(held) == LENGTH
    assert max(held) <= -(-LENGTH // ranks) + 1
    # The start and all new tokens but the last; in T5Gemma's first layer what its window needs.
    own = sum(cache.self_attention_cache.layers[0].keys.shape[2] for *_, cache in found)
    assert own == (NEW_TOKENS if model_type == "t5" else 5)


def refused(
    words: str,
    model_type: str = "llama",
    *,
    generate: Generate | None = None,
    tokens: torch.Tensor | None = None,
    implementation: str = NAME,
    between: Callable[[int, Any], Any] | None = None,
    changes: dict[str, Any] | None = None,
    **inputs: Any,
) -> None:
    """Every rank raises before its first wrong token; one of them says why."""
    model = model_of(model_type, **{"num_hidden_layers": 1} | (changes or {}))
    given = tokens_of() if tokens is None else tokens
    options = {"implementation": implementation, "between": between}
    with every_rank_raises(words):
        on_ranks(model, given, generate or greedy(4), **options, **inputs)


class Favourite(transformers.LogitsProcessor):
    """On the second rank another token is the best one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = scores.clone()
        favoured[:, 5 + torch.distributed.get_rank()] = 1e3
        return favoured


def test_ranks_that_choose_different_tokens():
    """However they come to: here by what they prefer; by their random states where tokens are sampled."""
    refused("decode different tokens", generate=greedy(4, logits_processor=[Favourite()]))
    refused("decode different tokens", generate=greedy(4, do_sample=True, temperature=50.0))


@pytest.mark.nightly
@pytest.mark.process
def test_sampling():
    """In processes, because ranks that are threads share a random generator."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[2]
    job = [*launch, "-m", "tests.clients.sampling"]
    done = subprocess.run(job, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.stdout.count("sampled as one process, and noticed another seed") == 2, done.stderr[-3000:]


def test_what_is_refused():
    padded = tokens_of().clone()
    padded[0, :6] = 0  # the padding token, of which generate() makes a mask
    refused("another attention_mask than it is decoded with", tokens=padded)
    refused("padded on the right", attention_mask=PADDED.flip(1))
    refused("attention_mask of shape .* both are of the whole prompt", attention_mask=PADDED[:, 3:])
    refused("scaled_dot_product_attention was called on the keys of a cache", implementation="sdpa")
    refused("changes the keys or values of its cache", "diffllama")
    refused(
        "use_cache=False, .*model.config: pass use_cache=True",
        generate=lambda model, tokens, cache: model(
            tokens[:, -1:], position_ids=torch.full((2, 1), LENGTH - 1), use_cache=False, **{CACHE: cache}
        ),
    )
    refused("a cache that is cut over the ranks is not offloaded", between=lambda rank, cache: cache.offload(0))
    refused("belongs to its prompt", between=lambda rank, cache: cache.reset())
    rows = r"new tokens of 4 rows, .* call cache.batch_repeat_interleave\(n\)"
    refused(rows, generate=greedy(4, num_beams=2))
    refused(rows, generate=greedy(4, num_return_sequences=2, do_sample=True))


@pytest.mark.parametrize("first", [LENGTH, LENGTH + 1])
def test_a_second_generate_with_a_used_cache_is_refused(first: int):
    """After as many new tokens as the prompt has, transformers gives the last token of the prompt again; after more,
    none at all."""

    def generate(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        greedy(first)(model, tokens, cache)
        return greedy(3)(model, tokens, cache)

    refused("used by an earlier generate", generate=generate)


def test_a_second_generate_with_used_encoder_keys_is_refused():
    """With a copy of the caches for the first one it is not."""
    model, tokens = with_encoder("t5gemma"), tokens_of()

    def on(rank: int, first: Callable[[Any], Any]) -> tuple[torch.Tensor, torch.Tensor]:
        _, mine = under_style(model, 2)
        options = {"max_new_tokens": 3, "do_sample": False, "use_cache": True}
        encoded = encode(mine, tokens)
        said = mine.generate(tokens, **first(encoded), **options)
        return said, mine.generate(tokens, **encoded, **options)

    assert all(torch.equal(*pair) for pair in run_ranks(on, 2, copy.deepcopy))
    with every_rank_raises(r"call encode for each generate\(\)"):
        run_ranks(on, 2, dict)


@pytest.mark.parametrize("prompt", ["the same again", "a shorter one", "another of its length"])
def test_a_cache_of_another_prompt_is_refused(prompt: str):
    def generate(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        if prompt == "the same again":
            greedy(3)(model, tokens, cache)
        given = {"the same again": tokens, "a shorter one": tokens[:, :-3], "another of its length": tokens.flip(1)}
        return greedy(3)(model, given[prompt], cache)

    with every_rank_raises("the cache is of another prompt"):
        on_ranks(model_of("llama"), tokens_of(), generate)


def test_a_cache_that_is_not_cut_is_refused():
    model, tokens = model_of("llama", num_hidden_layers=1), tokens_of()

    def on(rank: int, generate: Callable[[Any], Any], words: str) -> None:
        mine, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        mine.set_attn_implementation(NAME)
        with pytest.raises(ValueError, match="has no ModuleContextParallel"):
            prefill(mine, tokens)
        parallelize_module(mine, mesh, ModuleContextParallel())
        with pytest.raises((RuntimeError, ValueError), match=words):
            generate(mine)

    static = {"cache_implementation": "static", "max_new_tokens": 4, "use_cache": True}
    whole = rf"give it {CACHE}=prefill\(model, input_ids\)"
    run_ranks(on, 2, lambda mine: mine.generate(tokens, **static), whole)
    dynamic = transformers.DynamicCache(config=model.config)
    run_ranks(on, 2, lambda mine: greedy(4)(mine, tokens, copy.deepcopy(dynamic)), whole)
    run_ranks(on, 2, lambda mine: mine.train() and prefill(mine, tokens), r"call model\.eval\(\) first")
    run_ranks(on, 2, lambda mine: encode(mine, tokens), "has a decoder alone: call prefill instead")
    parts = (head_tail(LENGTH, 2).shard(tokens, 1, rank) for rank in range(2))
    cut = [*parts]
    words = "the prompt, which is cut here"
    run_ranks(on, 2, lambda mine: prefill(mine, cut[torch.distributed.get_rank()]), words)


def test_encoders_that_count_their_tokens_are_refused():
    config = config_of("bart", is_encoder_decoder=True)
    model = tiny(transformers.AutoModelForSeq2SeqLM.from_config, config).eval()
    tokens = tokens_of()

    def on(rank: int) -> None:
        _, mine = under_style(model, 2)
        with pytest.raises(ValueError, match="has an encoder and a decoder: call encode instead"):
            prefill(mine, tokens)
        with pytest.raises(NotImplementedError, match="takes no position_ids, and has no biases by distance"):
            encode(mine, tokens)

    run_ranks(on, 2)
