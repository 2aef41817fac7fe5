"""Whether a run fits: parameters, memory and code of ``python -m cp_styles explain --model``, against real models."""

from __future__ import annotations

import copy
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy

from cp_styles import AllGather, Causal, Ring, SlidingWindow, Ulysses, contiguous, head_tail
from cp_styles.explain import CPU, H100, command, explain
from cp_styles.explain.fit import RESERVE, Fit, Plan, StepSeconds
from cp_styles.explain.fit_text import code_of
from cp_styles.explain.model_step import StepModel
from cp_styles.explain.step_trace import StepOptions
from cp_styles.strategies import Strategy
from cp_styles.testing import MemoryTrace, run_ranks
from tests.benchmarks import figures
from tests.clients.hugging_face import (
    StayDouble,
    causal_lm,
    config_of,
    labels_of,
    largest_error,
    tiny,
    with_attention,
)
from tests.clients.sweep import EXACT
from tests.covering import rows_at_night

ROOT = Path(__file__).parents[2]
# Sizes of public configurations, and the published numbers of parameters and of those that a token uses.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA, 8.03e9, 8.03e9),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30.5e9, 3.35e9),
    "Mixtral-8x7B": ({"model_type": "mixtral"}, 46.7e9, 12.9e9),
    "DeepSeek-V3": ({"model_type": "deepseek_v3"}, 671e9, 37.55e9),
    "gpt-oss-120b": ({"model_type": "gpt_oss"}, 116.83e9, 5.13e9 + 201088 * 2880),  # published without embeddings
}
TYPES = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "deepseek_v3": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "head_dim": 4, "num_key_value_heads": 4},
    "gemma3_text": {},
    "gpt_oss": {},
    "olmo2": {},
    "phi3": {},
    "glm4_moe": {"num_hidden_layers": 3, "first_k_dense_replace": 1},
    "granite": {},
    "smollm3": {},
    "starcoder2": {},
}
FORMS = {
    "plain": StepOptions(False, False, True),
    "chunks": StepOptions(False, True, True),
    "checkpoints": StepOptions(True, False, True),
    "checkpoints and chunks": StepOptions(True, True, True),
}


def config_for(name: str, **changes: Any) -> Any:
    """A tiny configuration, whose experts run as those of real models."""
    config = config_of(name, **(TYPES[name] | {"vocab_size": 512, "max_position_embeddings": 8192} | changes))
    config._experts_implementation = None
    return config


def model_for(name: str, gpus: int = 2, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> StepModel:
    return StepModel(config_for(name, **changes), dtype=dtype, device="cpu", gpus=gpus)


# -- parameters --


@pytest.mark.parametrize("name", TYPES)
def test_parameters_are_those_of_the_model(name: str):
    made = causal_lm(config_for(name))
    found = StepModel(config_for(name), dtype=torch.float32, device="cpu", gpus=1)
    assert found.parameters == found.shard_numel == sum(x.numel() for x in made.parameters())


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_a_token_uses_the_experts_that_it_chooses(name: str):
    model, config = model_for(name), config_for(name)
    count = next(
        each for each in map(config.to_dict().get, ("num_local_experts", "n_routed_experts", "num_experts")) if each
    )
    routed = sum(x.numel() for name, x in model.model.named_parameters() if ".experts." in name)
    assert routed
    assert model.active == model.parameters - routed * (count - config.num_experts_per_tok) // count


def published(name: str) -> StepModel:
    config = transformers.AutoConfig.for_model(**PUBLISHED[name][0])
    return StepModel(config, dtype=torch.bfloat16, device="cuda", gpus=8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters(name: str):
    assert published(name).parameters == pytest.approx(PUBLISHED[name][1], rel=2e-3)  # three digits are published


@pytest.mark.nightly
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters_that_a_token_uses(name: str):
    assert published(name).active == pytest.approx(PUBLISHED[name][2], rel=2e-3)


def test_shards_are_padded_as_those_of_fsdp():
    """Three ranks share rows of 512, 32 and 48."""
    model = model_for("llama", gpus=3)
    rows = {512: 513, 32: 33, 48: 48, 16: 18}
    padded = sum(x.numel() // x.shape[0] * rows[x.shape[0]] for x in model.model.parameters())
    assert model.shard_numel == padded // 3


# -- memory --


class Resized(MemoryTrace):
    """A MemoryTrace that sees the storages that FSDP2 resizes."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: Any = self
        self._living: dict[int, StorageWeakRef] = {}
        self._most = 0

    def add(self, storages: Iterator[torch.UntypedStorage]) -> None:
        for storage in storages:
            reference = StorageWeakRef(storage)
            self._living[reference.cdata] = reference

    def forget(self, storage: torch.UntypedStorage) -> None:
        self._living.pop(StorageWeakRef(storage).cdata, None)

    @property
    def live(self) -> int:
        return sum(storage.nbytes() for storage in self._found())

    def _found(self) -> Iterator[torch.UntypedStorage]:
        for key in list(self._living):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is None:
                del self._living[key]
            else:
                yield storage

    @property
    def peak(self) -> int:
        return self._most

    def reset(self) -> None:
        self._most = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._most = max(self._most, self.live)
        return result


# The line of the code that makes the model, in the place of which tests have a model with equal weights on all ranks.
MADE = "model = AutoModelForCausalLM.from_config(config, **options)  # or from_pretrained"


def plan_of(fit: Fit, cp: int, strategy: Strategy, form: StepOptions, length: int) -> Plan:
    """A plan with this form of the step, which need not be the fastest."""
    fit.model.find_kinds()
    form = form._replace(reads_inputs=strategy.reads_inputs)
    rows = head_tail(length, cp).lengths[0]
    where = cp, fit.model.gpus // cp, strategy, "head_tail", form, length, rows
    return Plan(*where, nbytes=0, longest=0, seconds=StepSeconds(0, 0, 0, 0), fits=True)


def run_code(code: str, model: Any, then: Callable[[dict[str, Any], int], Any], ranks: int) -> list[Any]:
    """Run the printed code up to its loop on threads, and ``then`` with its names and the rank."""
    assert MADE in code
    code, loop = code.split("# next_tokens() is yours.\n")
    assert loop.splitlines()[-3:] == [
        '    step(model, next_tokens(), mesh["cp"])',
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ]

    def on(rank: int) -> Any:
        mine = copy.deepcopy(model)
        mine.set_attn_implementation("context_parallel")
        names: dict[str, Any] = {"made": mine}
        exec(compile(code.replace(MADE, "model = made"), "<printed>", "exec"), names)
        return then(names, rank)

    return run_ranks(on, ranks)


def measured_peak(code: str, model: Any, tokens: torch.Tensor, ranks: int) -> int:
    """The most bytes of any rank in the second step of the code, without shards of parameters."""

    def then(names: dict[str, Any], rank: int) -> int:
        with Resized() as trace:
            names["step"](names["model"], tokens, names["mesh"]["cp"])
            names["model"].zero_grad()
            trace.reset()
            names["step"](names["model"], tokens, names["mesh"]["cp"])
        return trace.peak

    return max(run_code(code, model, then, ranks))


MEASURED = [
    ("llama", 2, Ring(), "plain", torch.bfloat16, 96),
    ("llama", 4, Ulysses(size=2), "chunks", torch.bfloat16, 300),
    ("gpt_oss", 2, Ring(), "plain", torch.bfloat16, 96),
    *rows_at_night(
        ("llama", 2, Ring(), "checkpoints and chunks", torch.bfloat16, 96),
        ("qwen3_moe", 2, Ring(), "chunks", torch.bfloat16, 96),
        ("llama", 2, Ring(), "chunks", torch.bfloat16, 96),
        ("llama", 2, Ring(), "checkpoints", torch.bfloat16, 96),
        ("llama", 4, Ring(keep=0), "checkpoints and chunks", torch.float32, 300),
        ("llama", 4, AllGather(), "plain", torch.bfloat16, 300),
        ("llama", 2, Ulysses(), "checkpoints and chunks", torch.bfloat16, 1100),
        ("gemma3_text", 2, Ring(), "checkpoints and chunks", torch.bfloat16, 96),
        ("gpt_oss", 2, Ulysses(), "plain", torch.bfloat16, 96),
        ("deepseek_v3", 2, Ring(), "plain", torch.bfloat16, 96),
        ("phi3", 2, Ring(), "checkpoints and chunks", torch.float32, 96),
        ("granite", 2, Ring(), "plain", torch.bfloat16, 96),
    ),
]


def refuse_another_peak(plan: Plan, fit: Fit, config: Any, folder: Path) -> None:
    """The second step of the code of ``plan`` must have the peak of the plan.

    A trace does not see the batch, 32 bytes for a token: BatchSharder cuts it in a meeting of the ranks. What the code
    has more is its loss, a number or two of up to 8 bytes.
    """
    size = fit.model.batch, plan.length
    tokens = torch.randint(0, config.vocab_size, size, generator=torch.Generator().manual_seed(0))
    code = code_of(fit, plan, written(folder, config))
    measured = measured_peak(code, causal_lm(config), tokens, fit.model.gpus)
    predicted = sum(fit.parts(plan).values()) - 32 * fit.model.batch * plan.rows
    assert 0 <= measured - predicted <= 16, (measured, predicted)


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize(("name", "ranks", "strategy", "form", "dtype", "rows"), MEASURED)
def test_the_peak_is_that_of_the_code(name, ranks, strategy, form, dtype, rows, tmp_path: Path):
    """FSDP2 and the attention over all ranks."""
    fit = Fit(model_for(name, ranks, dtype), CPU)
    plan = plan_of(fit, ranks, strategy, FORMS[form], rows * ranks)
    refuse_another_peak(plan, fit, config_for(name), tmp_path)


@pytest.mark.usefixtures("large_blocks")
def test_the_peak_is_in_the_attention(tmp_path: Path):
    """Nothing else of this model takes much, and an all-gather takes the keys of all ranks."""
    sizes = {"vocab_size": 32, "intermediate_size": 8, "num_key_value_heads": 4}
    fit = Fit(model_for("llama", 4, **sizes), CPU)
    plan = plan_of(fit, 4, AllGather(), FORMS["checkpoints and chunks"], 2000)
    assert "attention, while it runs" in fit.parts(plan)
    refuse_another_peak(plan, fit, config_for("llama", **sizes), tmp_path)


@pytest.mark.parametrize(
    ("ranks", "form"),
    [
        (3, "checkpoints and chunks"),
        *rows_at_night(*((ranks, "plain") for ranks in (1, 2, 3)), (1, "checkpoints and chunks")),
    ],
)
def test_the_peak_is_in_the_buffers_of_fsdp(ranks: int, form: str, tmp_path: Path):
    """Few tokens, many parameters: layers that are gathered ahead, reduced and gathered again."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    fit = Fit(model_for("llama", ranks, **sizes), CPU)
    plan = plan_of(fit, ranks, Ring(), FORMS[form], 8 * ranks)
    assert "FSDP2: buffer of the reduce-scatter" in fit.parts(plan)
    refuse_another_peak(plan, fit, config_for("llama", **sizes), tmp_path)


def test_the_peak_of_a_batch(tmp_path: Path):
    """Two sequences, short ones and long ones."""
    model = StepModel(config_for("llama"), dtype=torch.bfloat16, device="cpu", gpus=2, batch=2)
    fit = Fit(model, replace(CPU, memory=2**28))
    for length in (192, 2**14):
        (plan,) = (plan for plan in fit.plans(length, [Ring()]) if plan.cp == 2)
        assert plan.nbytes == sum(fit.parts(plan).values()) + sum(fit.held.values())
        if length < 2**14:
            refuse_another_peak(plan, fit, config_for("llama"), tmp_path)


def written(folder: Path, config: Any) -> str:
    """The file of a configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict() | {"model_type": config.model_type}))
    return str(path)


# -- the code --


CODES = [
    ("llama", 2, 2, Ring(), "checkpoints and chunks"),
    ("mixtral", 1, 2, Ulysses(), "chunks"),
]
CODES_AT_NIGHT = [
    ("llama", 1, 2, Ring(), "plain"),
    ("phi3", 1, 2, AllGather(), "checkpoints"),
    *(("llama", 1, 2, Ring(), form) for form in FORMS if form != "plain"),
    ("llama", 1, 4, Ulysses(size=2), "checkpoints and chunks"),
    *((name, 1, 2, Ring(), "checkpoints and chunks") for name in ("qwen3", "qwen3_moe", "gemma3_text", "gpt_oss")),
    *((name, 1, 2, Ulysses(), "chunks") for name in ("mistral", "deepseek_v3", "olmo2", "glm4_moe")),
    ("granite", 1, 2, AllGather(), "plain"),
]


@pytest.mark.parametrize(("name", "dp", "cp", "strategy", "form"), [*CODES, *rows_at_night(*CODES_AT_NIGHT)])
def test_the_code_trains_as_one_process(name, dp, cp, strategy, form, tmp_path: Path):
    ranks, length = dp * cp, 21
    config = config_for(name)
    fit = Fit(model_for(name, ranks), CPU)
    plan = plan_of(fit, cp, strategy, FORMS[form], length)
    fit.model.dtype, fit.model.master = torch.float64, 8  # without data, experts run in bfloat16 alone
    code = code_of(fit, plan, written(tmp_path, config))
    model = tiny(causal_lm, config)
    tokens = torch.randint(3, 512, (dp, length), generator=torch.Generator().manual_seed(0))

    def then(names: dict[str, Any], rank: int) -> Any:
        for layer in names["model"].get_submodule(fit.model.layers_name):  # a backward leaves the mode
            if hasattr(layer, "_gradient_checkpointing_func"):
                again = partial(layer._gradient_checkpointing_func, context_fn=lambda: (nullcontext(), StayDouble()))
                layer._gradient_checkpointing_func = again
        mine, mesh = tokens[rank // cp][None], names["mesh"]["cp"]
        (proof,) = (line for line in code.splitlines() if line.startswith("verify("))
        with StayDouble():
            exec(proof, names | {"next_tokens": lambda: mine})
            loss = names["step"](names["model"], mine, mesh)
        grads = {key: x.grad.full_tensor() for key, x in names["model"].named_parameters() if x.grad is not None}
        names["optimizer"].step()
        return loss.detach(), grads

    one = with_attention(model)
    with StayDouble():
        logits = one(input_ids=tokens).logits
    loss = cross_entropy(logits.flatten(0, 1), labels_of(tokens).flatten())
    loss.backward()
    wanted = loss.detach(), {key: x.grad for key, x in one.named_parameters() if x.grad is not None}
    for found in run_code(code, model, then, ranks):
        assert largest_error(found, wanted) < EXACT


# -- plans --


@pytest.mark.nightly
def test_the_longest_sequence_fits_and_the_next_does_not():
    model = model_for("llama", 2)
    fit = Fit(model, replace(CPU, memory=2**28))
    for plan in fit.plans(2**14, [Ring(), Ulysses()]):
        form = StepOptions(True, True, plan.strategy.reads_inputs)
        assert plan.longest > 2**16
        for length, fits in ((plan.longest, True), (plan.longest + 1024 * plan.cp, False)):
            found = plan_of(fit, plan.cp, plan.strategy, form, length)
            nbytes = sum(fit.parts(found).values()) + sum(fit.held.values())
            assert (nbytes <= 2**28 * (1 - RESERVE)) == fits


def test_plans_that_fit_come_first_by_tokens_a_second():
    model = model_for("llama", 4)
    room = 2**26
    plans = Fit(model, replace(CPU, memory=room)).plans(2**16)
    assert [plan.fits for plan in plans] == sorted((plan.fits for plan in plans), reverse=True)
    assert len({plan.fits for plan in plans}) == 2
    fitting, others = ([plan for plan in plans if plan.fits is fits] for fits in (True, False))
    assert [plan.speed for plan in fitting] == sorted((plan.speed for plan in fitting), reverse=True)
    assert [plan.longest for plan in others] == sorted((plan.longest for plan in others), reverse=True)
    for plan in plans:
        assert plan.fits == (plan.nbytes <= room * (1 - RESERVE))
        assert plan.fits == (plan.longest >= 2**16)
        assert plan.cp * plan.dp == 4


def test_a_plan_that_leaves_nothing_to_the_allocator_does_not_fit():
    model = model_for("llama", 2)
    (wanted,) = Fit(model, replace(CPU, memory=2**20)).plans(2**14, [Ring()])[:1]
    for left, fits in ((RESERVE / 2, False), (RESERVE * 1.01, True)):
        plans = Fit(model, replace(CPU, memory=int(wanted.nbytes / (1 - left)))).plans(2**14, [Ring()])
        (found,) = (plan for plan in plans if (plan.cp, plan.layout_name) == (wanted.cp, wanted.layout_name))
        assert found.fits == fits


def test_a_form_that_fits_is_the_fastest():
    """With much memory neither checkpoints nor chunks, with little both."""
    model = model_for("llama", 1)
    forms = {}
    for memory in (2**20, 2**40):
        (plan,) = Fit(model, replace(CPU, memory=memory)).plans(2**13)
        forms[memory] = plan.options[:2]
    assert forms == {2**20: (True, True), 2**40: (False, False)}


def test_gathers_count_what_the_attention_takes():
    """An all-gather holds the keys of all ranks: it fits for shorter sequences than a ring."""
    model = model_for("mistral", 8, sliding_window=None)
    fit = Fit(model, replace(CPU, memory=2**26))
    assert fit.longest(8, AllGather()) < fit.longest(8, Ring(keep=0))


@pytest.mark.parametrize(("checkpoints", "products"), [(False, 6), (True, 8)])
def test_operations_are_those_of_the_parameters(checkpoints: bool, products: int):
    """Two for each weight and token in a forward, four in a backward. Embeddings are looked up, and a checkpoint stops
    before the last product of a layer."""
    model = model_for("llama", 1)
    step = model.step(StepOptions(checkpoints, False, True), 4096)
    tables = {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"}
    weights = {name: x.numel() for name, x in model.model.named_parameters() if name.split(".")[-2] not in tables}
    head = weights.pop("lm_head.weight")
    last = sum(numel for name, numel in weights.items() if "down_proj" in name)
    assert step.flops == products * sum(weights.values()) + 6 * head - 2 * last * checkpoints


def test_time_of_attention_is_that_of_explain():
    model = StepModel(config_for("gemma3_text"), dtype=torch.bfloat16, device="cuda", gpus=2)
    fit = Fit(model, replace(H100, memory=2**20))  # too little, so layers are checkpointed
    (plan,) = (plan for plan in fit.plans(2**14, [Ring()]) if plan.cp == 2)
    layers = model.model.config.layer_types
    expected = 0.0
    for mask, kind in ((SlidingWindow(4, 0), "sliding_attention"), (Causal(), "full_attention")):
        options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "device": "cuda", "mask": mask}
        options["layout"] = {"head_tail": head_tail, "contiguous": contiguous}[plan.layout_name]
        report = explain(2**14, ranks=2, strategy=Ring(), hardware=H100, rank=plan_rank(plan), **options)
        forward, backward = report.seconds
        expected += layers.count(kind) * (2 * forward.total + backward.total)
    assert plan.options.checkpoints
    assert plan.seconds.attention == pytest.approx(expected)


def plan_rank(plan: Plan) -> int:
    """The busiest rank of two."""
    return 0 if plan.layout_name == "head_tail" else 1


def test_a_change_of_the_logits_leaves_chunks_out():
    assert model_for("llama").can_chunk
    for name in ("granite", "cohere"):
        assert not StepModel(config_of(name), dtype=torch.bfloat16, device="cpu", gpus=2).can_chunk


# -- refusals --


def test_recurrences_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="mixes tokens in Qwen3NextGatedDeltaNet"):
        model_for("qwen3_next").find_kinds()


def test_code_that_reads_values_is_refused():
    model = model_for("llama")
    model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * output.amax().item())
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM does not run without data, RuntimeError: "):
        model.find_kinds()


def test_sizes_that_are_not_linear_are_refused():
    model = model_for("llama")
    model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + (output @ output.mT).mean())
    fit = Fit(model, CPU)
    with pytest.raises(NotImplementedError, match=r"sizes are not linear in the tokens: 3\d\d\d\d of them"):
        fit.parts(plan_of(fit, 2, Ring(), FORMS["chunks"], 2**16))


@pytest.mark.parametrize("name", ["gemma2", "doge"])
def test_attention_without_a_dry_run_is_refused(name: str):
    with pytest.raises(NotImplementedError, match=r"attends with (softcap|a mask of its own)"):
        StepModel(config_of(name), dtype=torch.bfloat16, device="cpu", gpus=2).find_kinds()


def test_models_without_one_list_of_layers_are_refused():
    with pytest.raises(ValueError, match="0 lists of layers"):
        StepModel(config_of("ctrl"), dtype=torch.bfloat16, device="cpu", gpus=2)


def file_of(folder: Path, **changes: Any) -> list[str]:
    """The arguments of the command for a small model on two ranks of a CPU."""
    declared = inspect.signature(transformers.LlamaConfig).parameters
    fields = {name: value for name, value in config_for("llama").to_dict().items() if name in declared}
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "llama", "rope_theta": 1e4} | changes))
    return ["explain", "--model", str(folder), "--gpus", "2", "--seq-len", "4K", "--hardware", "cpu"]


def ended(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> Any:
    """Run the command, which ends with this exit status. Returns its output."""
    with pytest.raises(SystemExit) as found:
        command.main(arguments)
    assert found.value.code == code
    return capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "never_heard"}, "model_type: transformers .* does not know 'never_heard'"),
        ({"model_type": None}, "model_type: transformers .* does not know None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: only parameters that are not"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "llava"}, "is no decoder alone: give its text_config"),
        ({"model_type": "t5"}, "T5Config is no decoder alone"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], text: str, tmp_path: Path, capsys):
    said = ended(file_of(tmp_path, **changes), capsys)
    assert re.search(f"argument --model: .*config.json: .*{text}", said.err)


@pytest.mark.parametrize(
    "option", ["--heads=8", "--ranks=2", "--head-dim=64", "--window=4", "--latent=512:64", "--json"]
)
def test_options_that_contradict_the_model(option: str, tmp_path: Path, capsys):
    assert f"unrecognized arguments: {option}" in ended([*file_of(tmp_path), option], capsys).err


@pytest.mark.parametrize("memory", ["80", "0G", "much"])
def test_memory_has_a_unit(memory: str, tmp_path: Path, capsys):
    said = ended([*file_of(tmp_path), "--memory", memory], capsys)
    assert f"argument --memory: '{memory}': give GiB, such as 80G" in said.err


def test_transformers_is_needed(tmp_path: Path, capsys, monkeypatch):
    def missing(name: str) -> Any:
        raise ImportError(name)

    arguments = file_of(tmp_path)
    monkeypatch.setattr("cp_styles.explain.model_step.import_module", missing)
    assert "pip install transformers" in ended(arguments, capsys).err


def test_the_output(tmp_path: Path, capsys):
    command.main([*file_of(tmp_path, ep_size=1), "--strategy", "ring", "--optimizer", "sgd"])
    said = capsys.readouterr().out
    table, code = said.split("the code of the first plan\n\n")
    assert "LlamaForCausalLM, 2 layers: 48,288 parameters" in table
    assert "each holds 1 / 2 of them, in bytes parameters 4, gradients 4: 188.6 KiB" in table
    assert "\nep_size: fields that LlamaConfig does not declare, and may ignore\n" in table
    assert max(map(len, table.splitlines())) < 100
    assert said.isascii()
    assert "torch.optim.SGD(" in code
    compile(code, "<printed>", "exec")
    (plan,) = re.findall(r"^  2 x 1 +ring +.*", table, re.M)
    assert " yes " in plan


def test_nothing_fits(tmp_path: Path, capsys):
    arguments = [*file_of(tmp_path), "--strategy", "ring", "--memory", "0.05G"]
    arguments[arguments.index("4K")] = "64K"
    said = ended(arguments, capsys, 1)
    assert "the code of" not in said.out
    (longest,) = re.findall(r"no plan fits: take more GPUs, or sequences of at most ([\d,]+)", said.err)
    arguments[arguments.index("64K")] = longest.replace(",", "")
    command.main(arguments)
    assert "the code of" in capsys.readouterr().out
    said = ended([*arguments, "--memory", "0.0001G"], capsys, 1)
    assert said.err.splitlines()[-1] == "no plan fits: take more GPUs"


def test_parameters_are_printed_of_a_model_that_is_not_predicted(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_for("qwen3_next").to_dict()))
    said = ended(["explain", "--model", str(tmp_path), "--gpus", "2", "--seq-len", "4K"], capsys, 1)
    assert re.match(r"Qwen3NextForCausalLM, 4 layers: [\d,]+ parameters\n", said.out)
    assert "memory and time are not predicted: Qwen3NextForCausalLM mixes tokens in" in said.err


# -- pages --


@pytest.fixture
def cpu_build(monkeypatch):
    """As the page was made, by a torch without cuDNN, whose kernels allocate other memory."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)


def page() -> str:
    return (ROOT / "tutorials/performance.md").read_text()


@pytest.mark.nightly
def test_the_output_on_the_page(tmp_path: Path, capsys, monkeypatch, cpu_build):
    command_line, shown = re.search(
        r"```bash\n(python -m cp_styles explain --model .*?)```\n\n<!-- output: fit -->\n```\n(.*?)\n```\n",
        page(),
        re.S,
    ).groups()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").mkdir()
    (tmp_path / "llama-3.1-8b/config.json").write_text(json.dumps(LLAMA))
    command.main(shlex.split(command_line.replace("\\\n", " "))[3:])
    assert capsys.readouterr().out.split("\n\nthe code of the first plan")[0] == shown


@pytest.mark.nightly
def test_the_longest_sequences_on_the_page(cpu_build):
    rows = re.search(r"<!-- figures: longest -->\n\n.*?\n.*?\n(.*?)\n\n", page(), re.S).group(1).splitlines()
    (_, *table) = figures.longest()
    assert [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows] == table


def test_the_types_on_the_page():
    """The printed program is run for as many types as the page says."""
    assert f"run\nit for {len({name for name, *_ in CODES + CODES_AT_NIGHT})} types of models" in page()
