"""The plans of a model as text, and the code of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from cp_styles.explain.candidates import format_strategy
from cp_styles.explain.fit import RESERVE, Fit, Plan
from cp_styles.explain.text import format_bytes, format_seconds, wrap_entries
from cp_styles.verify.report import format_table

_COLUMNS = {
    "checkpoints, loss": "the fastest form of a step that fits: each layer checkpointed or not, the loss from all "
    "logits or from chunks of 1,024 tokens",
    "memory": "the most bytes of the busiest rank, without the optimizer's step",
    "longest": "the longest sequence that fits in the smallest form, in multiples of 1,024 tokens of a rank",
    "step": "predicted time of forward and backward, without the host; each dp group has sequences of its own",
}


def describe_model(fit: Fit) -> Iterator[str]:
    """The model, the machine, and what each GPU holds."""
    model, machine = fit.model, fit.hardware
    sizes = {"parameters": model.master, "gradients": model.master, f"moments of {fit.optimizer.name}": fit.moments}
    yield f"{type(model.model).__name__}, {len(model.layers)} layers: {model.parameters:,} parameters"
    shares = ", ".join(f"{name} {size}" for name, size in sizes.items() if size)
    held = format_bytes(sum(sizes.values()) * model.shard_numel)
    yield f"{model.gpus} GPUs, FSDP2 over all: each holds 1 / {model.gpus} of them, in bytes {shares}: {held}"
    free = f"{RESERVE:.0%} are left to CUDA, NCCL and gaps of the allocator (assumed)"
    yield f"{machine.name} with {format_bytes(machine.memory)}, of which {free}"


def format_plans(fit: Fit, plans: Sequence[Plan]) -> Iterator[str]:
    """A table of plans, and what its columns mean."""
    rows = [["cp x dp", "strategy", "layout", "checkpoints", "loss", "memory", "fits", "longest", "step", "tokens/s"]]
    for plan in plans:
        names = f"{plan.cp} x {plan.dp}", format_strategy(plan.strategy), plan.layout_name
        form = "layers" if plan.options.checkpoints else "none", "chunks" if plan.options.chunked else "logits"
        longest = f"{plan.longest // 1024:,}K" if plan.longest else "-"
        memory = format_bytes(plan.nbytes), "yes" if plan.fits else "no", longest
        rows.append([*names, *form, *memory, format_seconds(sum(plan.seconds)), f"{plan.speed * fit.model.batch:,.0f}"])
    yield from format_table(rows)
    yield from wrap_entries(_COLUMNS.items())


def format_memory(fit: Fit, plan: Plan) -> Iterator[str]:
    """The bytes of a plan at the peak of its step, each with its derivation."""
    model, tokens = fit.model, plan.rows * fit.model.batch
    rows = [["memory at the peak", "", "derivation"]]
    for name, nbytes in fit.held.items():
        rows.append([name, format_bytes(nbytes), f"{nbytes // model.shard_numel} bytes x {model.shard_numel:,}"])
    for name, nbytes in sorted(fit.parts(plan).items(), key=lambda part: -part[1]):
        fixed = name.startswith("FSDP2")
        how = f"{nbytes:,} bytes" if fixed else f"{nbytes / tokens:,.0f} bytes x {tokens:,} tokens"
        rows.append([name, format_bytes(nbytes), how])
    rows.append(["together", format_bytes(plan.nbytes), f"of {format_bytes(fit.room)}"])
    yield from format_table(rows)


def format_time(fit: Fit, plan: Plan) -> Iterator[str]:
    """The predicted time of a plan's step, each part with its derivation."""
    machine, step, tokens = fit.hardware, fit.step(plan), plan.rows * fit.model.batch
    calls = " and ".join(f"{forwards} forwards, {backwards} backwards" for forwards, backwards in step.calls)
    how = (
        f"{calls}, each as explain predicts it",
        f"{step.flops * tokens:.3g} operations, {fit.product_rate:.3g} a second",
        f"{step.copied * tokens:.3g} bytes, {machine.copy_bandwidth:.3g} a second",
        f"{fit.sent:.3g} bytes, {fit.bandwidth:.3g} a second, while the rest runs",
    )
    names = "attention", "matrix products", "other operations", "messages of FSDP2"
    parts = zip(names, map(format_seconds, plan.seconds), how, strict=True)
    yield from format_table([["time of a step", "", "derivation"], *map(list, parts)])


def code_of(fit: Fit, plan: Plan, path: str) -> str:
    """A program that makes the mesh, the model and the step of a plan. torchrun starts it on all GPUs."""
    model, chunked = fit.model, plan.options.chunked
    mixed = model.dtype.itemsize < model.master
    shards = torch.float32 if mixed else model.dtype
    names = {"BatchSharder", "ModuleContextParallel", plan.layout_name, "parallelize_module"}
    names |= {*re.findall(r"\w+(?=\()", str(plan.strategy)), *["global_loss"] * chunked}
    of_fsdp = ["MixedPrecisionPolicy"] * mixed + ["fully_shard"] + ["register_fsdp_forward_method"] * chunked
    lines = [
        f"# torchrun starts this program on {model.gpus} GPUs.",
        "import json",
        *["import types"] * chunked,
        "from pathlib import Path",
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {', '.join(of_fsdp)}",
        "from transformers import AutoConfig, AutoModelForCausalLM",
        f"from cp_styles import {', '.join(sorted(names))}",
        *["from cp_styles.batch import chunked_token_losses"] * chunked,
        "from cp_styles.integrations.transformers import register_attention",
        *["from cp_styles.verify import verify"] * (plan.cp > 1),
        "",
        f"config = AutoConfig.for_model(**json.loads(Path({path!r}).read_text()))",
        "config.use_cache = False",
        f'options = {{"attn_implementation": register_attention(), "dtype": {shards}}}',
        "model = AutoModelForCausalLM.from_config(config, **options)  # or from_pretrained",
        "model.train()",
        *[f"model.{model.checkpointing}_enable()"] * plan.options.checkpoints,
        "",
        f'mesh = init_device_mesh("{fit.hardware.device}", ({plan.dp}, {plan.cp}), mesh_dim_names=("dp", "cp"))',
        'both = mesh["dp", "cp"]._flatten("dp_cp")',
        f"style = ModuleContextParallel(strategy={plan.strategy}, layout={plan.layout_name})",
        'parallelize_module(model.base_model, mesh["cp"], style)',
        "sharding = {"
        + '"mesh": both'
        + f', "mp_policy": MixedPrecisionPolicy(param_dtype={model.dtype}, reduce_dtype={shards})' * mixed
        + "}",
        f"for layer in model.{model.layers_name}:",
        "    fully_shard(layer, **sharding)",
        "fully_shard(model, **sharding)",
        f"optimizer = torch.optim.{fit.optimizer.name}(model.parameters(), lr=1e-5)",
        "",
        *(_TOKEN_LOSSES.splitlines() if chunked else ()),
        "def step(model, tokens, cp):  # [B, S]: whole sequences, equal on the ranks of cp",
        f"    ranks = {'both' if plan.dp > 1 else 'cp'}.size()",
        f"    batch = BatchSharder(cp, layout={plan.layout_name}, loss_mesh=both, averaged_over=ranks)(tokens)",
        *(_LOSS_FROM_CHUNKS if chunked else _LOSS_FROM_LOGITS).splitlines(),
        "    loss.backward()",
        "    return loss",
        "",
        "# next_tokens() is yours.",
        *['verify(model, mesh["cp"], next_tokens()[:, :509], step)  # once'] * (plan.cp > 1),
        "while True:",
        '    step(model, next_tokens(), mesh["cp"])',
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ]
    return "\n".join(lines)


_TOKEN_LOSSES = """\
def token_losses(self, labels, **inputs):
    hidden, head = self.base_model(**inputs)[0], self.get_output_embeddings()
    return chunked_token_losses(hidden, head.weight, labels, bias_V=head.bias)

model.token_losses = types.MethodType(token_losses, model)
register_fsdp_forward_method(model, "token_losses")

"""
_LOSS_FROM_LOGITS = """\
    loss = batch.loss(model(**batch.inputs).logits)
"""
_LOSS_FROM_CHUNKS = """\
    losses = model.token_losses(batch["shift_labels"], **batch.inputs)
    loss = global_loss(losses, batch.token_count(), both, averaged_over=ranks)
"""
