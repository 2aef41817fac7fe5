"""Small trainings in float64 by trainers of other libraries; the same program for one process and for ranks."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from accelerate.utils import ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from cp_styles import (
    BackboneContextParallel,
    BatchSharder,
    ModuleContextParallel,
    contiguous,
    global_loss,
    next_token_labels,
)
from cp_styles.batch import document_positions
from cp_styles.integrations.trainers import ContextParallelTrainer
from cp_styles.torch_api import context_parallel
from tests.clients.hugging_face import NAME, VOCABULARY, StayDouble, causal_lm, config_of, tiny
from tests.clients.trainer_job import Training, mean_over_ranks
from tests.oracle import dense_attention
from tests.pages import example

IGNORED = -100


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def samples(number: int, *, equal: bool = True) -> list[dict[str, torch.Tensor]]:
    """Token sequences, of one length or not, whose first tokens have no labels, as prompts have none."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(number):
        length = 21 if equal else 7 + 3 * (index % 4)
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = tokens.clone()
        labels[: 2 * index % 9] = IGNORED
        found.append({"input_ids": tokens, "labels": labels})
    return found


class LongTrainer(ContextParallelTrainer, Trainer): ...


def again() -> tuple[Any, Any]:
    """A context_fn of checkpoints: a backward runs outside of the mode."""
    return contextlib.nullcontext(), StayDouble()


CHECKPOINTED = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False, "context_fn": again},
}


def arguments(make: type[TrainingArguments] = TrainingArguments, **options: Any) -> Any:
    defaults = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": [], "save_strategy": "no"}
    defaults |= {"disable_tqdm": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "seed": 3}
    defaults |= {"learning_rate": 1e-2, "num_train_epochs": 1, "logging_strategy": "no", "max_grad_norm": 0.5}
    return make(**defaults | options)


def model_of(model_type: str = "mistral", **changes: Any) -> Any:
    return tiny(causal_lm, config_of(model_type, num_hidden_layers=2, **changes))


def train(trainer: Any) -> Training:
    done, step = Training(), trainer.training_step

    def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(*args, **kwargs)
        done.losses.append(mean_over_ranks(loss.item()))
        return loss

    trainer.training_step = seen
    with StayDouble():
        trainer.train()
        if trainer.eval_dataset is not None:
            done.numbers |= {
                name: float(value)
                for name, value in trainer.evaluate().items()
                if name in ("eval_loss", "eval_accuracy", "eval_samples")
            }
    done.parameters = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    return done


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = (torch.as_tensor(x) for x in (prediction.predictions, prediction.label_ids))
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != IGNORED]
    return {"accuracy": right.double().mean().item(), "samples": len(labels)}


class EvaluatesAsTRL(Trainer):
    """Counts no labels in an evaluation: the mean of a batch without labels is not a number, and is left out."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs.logits, inputs["labels"]


def hugging_face(
    cp: int = 2, batch: int = 2, data: Any = None, style: Any = None, before: type[Trainer] = Trainer, **options: Any
) -> Training:
    """A Trainer of transformers; on ranks the model has the style, and the Trainer ours before it."""
    model = model_of()
    kind: Any = before
    args, made = options.pop("args", {}), options.pop("made", lambda trainer: None)
    replicas = max(1, ranks() // cp)
    args = arguments(per_device_train_batch_size=batch // replicas, **args)
    if ranks() > 1:
        mesh = init_device_mesh("cpu", (replicas, cp), mesh_dim_names=("dp", "cp"))
        model.set_attn_implementation(NAME)
        parallelize_module(model, mesh["cp"], ModuleContextParallel() if style is None else style)
        kind = type("LongTrainer", (ContextParallelTrainer, before), {})
    else:
        model.set_attn_implementation("dense")
    trainer = kind(
        model,
        args,
        train_dataset=samples(12) if data is None else data,
        **{"data_collator": default_data_collator} | options,
    )
    made(trainer)
    return train(trainer)


def with_dropout() -> Training:
    """A seed for each rank, by the lines of the page: the samples of one process, and dropout of its own on each rank.

    What dropout drops is not used, so that all else is compared.
    """
    drawn: list[torch.Tensor] = []

    def made(trainer: Any) -> None:
        draw = torch.nn.Dropout(0.5)
        trainer.model.register_forward_hook(lambda *_: drawn.append(draw(torch.ones(64))))
        if ranks() > 1:
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
            seeds = example("trainer, dropout").split("trainer = ")[1].split("\n", 1)[1]
            exec(seeds, {"mesh": mesh, "torch": torch, "seed": 3})

    given = re.findall(r"data_seed=seed", example("trainer, dropout"))
    done = hugging_face(args={"data_seed": 3} if given else {}, made=made)
    if ranks() > 1:
        torch.distributed.all_gather(each := [torch.empty(64) for _ in range(2)], drawn[-1])
        done.numbers["ranks that draw apart"] = float(not torch.equal(*each))
    else:
        done.numbers["ranks that draw apart"] = 1.0
    return done


def packed(**options: Any) -> Training:
    """Samples of several lengths behind each other in one row, in positions that restart at 0."""
    collate = DataCollatorWithFlattening()
    style = ModuleContextParallel(layout=contiguous)
    return hugging_face(data=samples(12, equal=False), data_collator=collate, batch=4, style=style, **options)


def watched(model: torch.nn.Module) -> Training:
    """Takes down the losses that ``model`` returns; what the ranks return are shares."""
    done = Training()

    def take_down(module: Any, args: Any, output: Any) -> None:
        done.losses.append(mean_over_ranks(output.loss.item()) * ranks())

    model.register_forward_hook(take_down)
    return done


def ended(done: Training, model: torch.nn.Module) -> Training:
    done.parameters = {name: x.detach().clone() for name, x in model.named_parameters()}
    return done


def accelerated() -> Training:
    """The page's loop, and a loop of one process."""
    model = model_of()
    model.set_attn_implementation(NAME if ranks() > 1 else "dense")
    done, optimizer = watched(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(samples(6), batch_size=2, collate_fn=default_data_collator)
    with StayDouble():
        if ranks() > 1:
            Accelerator(cpu=True)  # the processes of the page's are on CPU too
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
            exec(example("accelerate"), {"model": model, "optimizer": optimizer, "loader": loader, "mesh": mesh})
        else:
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return ended(done, model)


def sharded_by_accelerate(block: bool) -> Training:
    """A ParallelismConfig with cp_size, with which accelerate applies FSDP2 over the ranks of a sequence."""
    model, done = model_of("llama", sliding_window=None, attention_chunk_size=None), Training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if ranks() > 1:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # it refuses CPU, where tests run
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2))
        mesh = accelerator.torch_device_mesh["cp"]
        model.set_attn_implementation(NAME)
        if not block:
            parallelize_module(model, mesh, ModuleContextParallel())
        model, optimizer = accelerator.prepare(model, optimizer)
    for batch in DataLoader(samples(6), batch_size=2, collate_fn=default_data_collator):
        tokens, labels = batch["input_ids"], next_token_labels(batch["labels"])
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        with StayDouble():
            if ranks() == 1:
                loss = cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
                loss.backward()
            elif block:
                count = (labels != IGNORED).sum()
                with context_parallel(mesh, buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 1]):
                    logits = model(tokens, position_ids=positions).logits
                    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                    loss = global_loss(losses, count, mesh, averaged_over=mesh.size())
                    accelerator.backward(loss)
            else:
                part = BatchSharder(mesh, averaged_over=mesh.size())(batch)
                loss = part.loss(model(**part.inputs).logits)
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        done.losses.append(loss.item())
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.named_parameters()}
    done.parameters = {name: x.detach() for name, x in whole.items()}
    return done


def trainer_of_the_page() -> Training:
    """Of several samples in a step; without what is taken down of each step."""
    model, args = model_of(), arguments()
    if ranks() == 1:
        model.set_attn_implementation("dense")
        with StayDouble():
            Trainer(model, args, train_dataset=samples(6)).train()
        return Training(parameters={name: x.detach() for name, x in model.named_parameters()})
    made, run = example("trainer").split("parallelize_module(model", 1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    names: dict[str, Any] = {"config": model.config, "mesh": mesh, "arguments": args, "dataset": samples(6)}
    exec(made, names)
    names["model"].double().load_state_dict(model.state_dict())
    with StayDouble():
        exec(f"parallelize_module(model{run}", names)
    return Training(parameters={name: x.detach() for name, x in names["model"].named_parameters()})


def lightning() -> Training:
    """The page's module; on one process one that cuts nothing."""
    from lightning import LightningModule
    from lightning import Trainer as Lightning

    names: dict[str, Any] = {"torch": torch}
    exec(example("lightning"), names)

    class Alone(LightningModule):
        configure_optimizers = names["Long"].configure_optimizers

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(**batch).loss

    model = model_of()
    model.set_attn_implementation(NAME if ranks() > 1 else "dense")
    module = names["Long"](model) if ranks() > 1 else Alone()
    module.model = model
    done = watched(model)
    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = "ddp" if ranks() > 1 else "auto"
    trainer = Lightning(
        accelerator="cpu", devices=ranks(), strategy=strategy, max_epochs=1, use_distributed_sampler=False, **off
    )
    with StayDouble():
        trainer.fit(module, DataLoader(samples(6), batch_size=2, collate_fn=default_data_collator))
    return ended(done, model)


def torchtitan() -> Training:
    """Its Llama, with its own plan for tensor parallelism beside the style, on packed documents."""
    if importlib.util.find_spec("triton") is None:  # its mixture of experts, which is not used, imports it
        torch.compile(len)  # what torch imports for it must find no triton
        sys.modules |= {"triton": MagicMock(), "triton.language": MagicMock()}
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    if isinstance(sys.modules["triton"], MagicMock):
        del sys.modules["triton"], sys.modules["triton.language"]

    config, done = llama3_configs["debugmodel"](attn_backend="flex"), Training()
    config.layers = config.layers[:2]
    set_llama3_sharding_config(config, enable_sp=False)
    model = config.build().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    ids = torch.tensor([0] * 9 + [1] * 15).expand(2, -1)
    names = {"torch": torch, "model": model, "document_ids": ids}
    if ranks() > 1:
        parallel_dims.device_type = "cpu"  # pyright: ignore[reportPrivateImportUsage]
        names["parallel_dims"] = ParallelDims(
            dp_replicate=1, dp_shard=1, cp=2, tp=2, pp=1, ep=1, world_size=4, spmd_backend="partial_dtensor"
        )
        names["parallel_dims"].build_mesh()
        begun, step = example("torchtitan").split("batch = ")
        exec(begun, names)
    else:
        for layer in model.layers.values():
            layer.attention.inner_attention = DocumentsAttention(ids)  # flex has no backward on CPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        names["tokens"] = tokens = torch.randint(2048, (2, 24), generator=generator)
        with StayDouble():
            if ranks() > 1:
                exec(f"batch = {step}", names)
                loss = names["loss"]
            else:
                labels = next_token_labels(tokens, document_ids=ids)
                loss = cross_entropy(model(tokens, document_positions(ids)).flatten(0, 1), labels.flatten())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done.losses.append(loss.item())
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.named_parameters()}
    done.parameters = {name: x.detach() for name, x in whole.items()}
    return done


class DocumentsAttention(torch.nn.Module):
    """Dense attention [B, S, H, D] in each document, for one process."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.sees = ((ids[:, :, None] == ids[:, None]).tril())[:, None]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return dense_attention(q, k, v, self.sees).transpose(1, 2)


def plain_trainer(*, collate: Any = None, cut: bool = False, classify: bool = False, **options: Any) -> Training:
    """What people write: a Trainer with nothing of ours before it, and a model with the style."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = model_of()
    model.set_attn_implementation(NAME)
    parallelize_module(model, mesh, ModuleContextParallel())
    collate = collate or default_data_collator
    if cut:
        whole, sharder = collate, BatchSharder(mesh)

        def collate(samples: Any) -> Any:
            return sharder(whole(samples))

    args = arguments(**options)
    return train(Trainer(model, args, train_dataset=samples(8), data_collator=collate))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {{0: "<pad>", 2: "<eos>"}.get(index, str(index)): index for index in range(VOCABULARY)}
    model = Tokenizer(models.WordLevel(words, "<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def sft(lora: bool = True, **options: Any) -> Training:
    """TRL packs samples into rows without padding, and adds adapters."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    class LongSFT(ContextParallelTrainer, SFTTrainer): ...

    data = Dataset.from_list([{name: x.tolist() for name, x in each.items()} for each in samples(24, equal=False)])
    args = arguments(SFTConfig, packing=True, max_length=40, eval_packing=True, **CHECKPOINTED, **options)
    model = model_of()
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None
    kind: Any = SFTTrainer
    if ranks() > 1:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model.set_attn_implementation(NAME)
        parallelize_module(model, mesh, ModuleContextParallel())
        kind = LongSFT
    else:
        model.set_attn_implementation("dense")
    torch.set_default_dtype(torch.float64)  # adapters
    trainer = kind(
        model,
        args,
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        processing_class=tokenizer(),
        peft_config=config,
    )
    return train(trainer)


def with_head(
    auto: Any = AutoModelForSequenceClassification,
    model_type: str = "llama",
    cp: int = 2,
    batch: int = 2,
    number: int = 10,
    **options: Any,
) -> Training:
    """A Trainer of a model that pools tokens, or labels each: one line, and the mixin."""
    model: Any = tiny(auto.from_config, config_of(model_type, num_hidden_layers=2, num_labels=3))
    kind: Any = Trainer
    replicas = max(1, ranks() // cp)
    if ranks() > 1:
        mesh = init_device_mesh("cpu", (replicas, cp), mesh_dim_names=("dp", "cp"))
        model.set_attn_implementation(NAME)
        parallelize_module(model, mesh["cp"], BackboneContextParallel())
        kind = LongTrainer
    else:
        model.set_attn_implementation("dense")
    data = samples(number)
    for index, each in enumerate(data):
        each["input_ids"][21 - index :] = 0  # padding at the end
        each["attention_mask"] = (each["input_ids"] != 0).long()
        each["labels"] = torch.tensor(index % 3)
        if auto is AutoModelForTokenClassification:
            each["labels"] = (each["input_ids"] % 3).masked_fill(each["input_ids"] == 0, IGNORED)
    args = arguments(per_device_train_batch_size=batch // replicas, **CHECKPOINTED, **options)
    measured = {"eval_dataset": data[:5], "compute_metrics": classified} if number == 10 else {}
    return train(kind(model, args, train_dataset=data, data_collator=default_data_collator, **measured))


def classified(prediction: Any) -> dict[str, float]:
    logits, labels = (torch.as_tensor(x) for x in (prediction.predictions, prediction.label_ids))
    return {"accuracy": (logits.argmax(-1) == labels).double().mean().item() + 1, "samples": len(labels)}


def of_pairs(name: str) -> Training:
    """TRL's trainer of pairs of sequences: rewards, or preferences by log-probabilities."""
    import trl
    from datasets import Dataset

    rewards = name == "Reward"
    auto = AutoModelForSequenceClassification if rewards else AutoModelForCausalLM
    model: Any = tiny(auto.from_config, config_of("llama", num_hidden_layers=2, num_labels=1))
    kind: Any = getattr(trl, f"{name}Trainer")
    data = samples(12, equal=False)
    pairs = [{"chosen_ids": a["input_ids"].tolist(), "rejected_ids": b["input_ids"].tolist()} for a, b in by_two(data)]
    if not rewards:
        texts = [{name.removesuffix("_ids"): " ".join(map(str, x)) for name, x in each.items()} for each in pairs]
        pairs = [{"prompt": " ".join(each["chosen"].split()[:4]) + " ", **each} for each in texts]
    model.set_attn_implementation(NAME if ranks() > 1 else "dense")
    names = {"model": model, "arguments": arguments(getattr(trl, f"{name}Config"), gradient_checkpointing=False)}
    names |= {"dataset": Dataset.from_list(pairs), "tokenizer": tokenizer()}
    if ranks() > 1:
        names["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        kind = type(f"Long{name}", (ContextParallelTrainer, kind), {})
    more: dict[str, Any] = {"train_dataset": names["dataset"], "eval_dataset": names["dataset"].select(range(4))}
    more["processing_class"] = names["tokenizer"]
    if not rewards:
        more["ref_model"] = copy.deepcopy(model)
        if ranks() > 1:
            for each in (model, more["ref_model"]):
                parallelize_module(each, names["mesh"]["cp"], BackboneContextParallel())
    elif ranks() > 1:  # by the lines of the page
        exec(example("RewardTrainer").replace("trainer.train()", ""), names)
        names["trainer"].eval_dataset = more["eval_dataset"]
        return train(names["trainer"])
    return train(kind(model, args=names["arguments"], **more))


def rollouts(
    name: str,
    styles: tuple[Any, Any] = (ModuleContextParallel, None),
    fixed: bool = False,
    cp: int = 2,
    reference: bool = False,
    rewards_of: Any = None,
    lora: bool = False,
    by_page: bool = False,
    **options: Any,
) -> Training:
    """TRL's trainer of completions: with the style, and without it (``reference``) on one rank or on as many ranks.

    ``styles``: of the model, and of the reference model and the reward model. ``fixed``: equal completions for any
    number of ranks. Else each rank samples as without the style.
    """
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    class Fixed(getattr(trl, f"{name}Trainer")):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any) -> Any:
            if not fixed:
                return super()._generate_single_turn(prompt_ids, *args)
            found = completions_of(prompt_ids)
            return (found, None) if name == "GRPO" else found

    kind: Any = Fixed
    model, attention = model_of(), "dense" if reference else NAME
    model.set_attn_implementation(attention)
    names: dict[str, Any] = {}
    if rewards_of is not None:
        auto: Any = AutoModelForSequenceClassification
        names["reward_processing_classes"] = tokenizer()
        scorer = tiny(auto.from_config, config_of(rewards_of, num_hidden_layers=2, num_labels=1, pad_token_id=0)).eval()
        scorer.set_attn_implementation(attention if styles[1] else "dense")
    else:
        scorer = mean_word
    if options.get("beta") and not lora:  # TRL loads the reference model
        before = model_of()
        for parameter in before.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        model.config._name_or_path = tempfile.mkdtemp()
        before.save_pretrained(model.config._name_or_path)
        options["model_init_kwargs"] = {"attn_implementation": attention if styles[1] else "dense"}
    if lora:
        torch.set_default_dtype(torch.float64)
        names["peft_config"] = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    mesh = init_device_mesh("cpu", (max(1, ranks() // cp), cp), mesh_dim_names=("dp", "cp")) if not reference else None
    if mesh is not None and not by_page:
        parallelize_module(model, mesh["cp"], styles[0]())
        if rewards_of is not None and styles[1] is not None:
            parallelize_module(scorer, mesh["cp"], styles[1]())
        kind = type(f"Long{name}", (ContextParallelTrainer, kind), {})
    prompts = [each["input_ids"][: 4 + index % 3].tolist() for index, each in enumerate(samples(12))]
    data = Dataset.from_list([{"prompt": " ".join(map(str, each))} for each in prompts])
    options = {"num_generations": 2, "max_completion_length": 7, "beta": 0.0, "max_steps": 3} | options
    args = arguments(getattr(trl, f"{name}Config"), **CHECKPOINTED, **options)
    torch.manual_seed(0)
    with StayDouble():
        if by_page and mesh is not None:
            names |= {"model": model, "mesh": mesh, "reward": scorer, "arguments": args}
            names |= {"prompts": data, "tokenizer": tokenizer()}
            exec(example("GRPOTrainer").replace("trainer.train()", ""), names)
            trainer = names["trainer"]
        else:
            trainer = kind(model, scorer, args, train_dataset=data, processing_class=tokenizer(), **names)
    if getattr(trainer, "ref_model", None) is not None and mesh is not None and styles[1] is not None:
        parallelize_module(trainer.ref_model, mesh["cp"], {"model": ModuleContextParallel()})
    done = train(trainer)
    done.losses = [1 + each for each in done.losses]  # sums of terms of size 1, which may cancel
    done.numbers["evaluated"] = mean_over_ranks(evaluated(trainer, data.select(range(4))))
    for index, each in enumerate(trainer._logs["advantages"] if fixed else []):
        done.numbers[f"advantage {index}"] = 10 + each
    return done


def evaluated(trainer: Any, data: Any) -> float:
    with StayDouble():
        return trainer.evaluate(data)["eval_loss"] + 10


def completions_of(prompts: list[list[int]]) -> list[list[int]]:
    """Completions of 3 to 6 tokens, which follow from the prompt and from how often it was there before."""
    found = []
    for index, ids in enumerate(prompts):
        copies = prompts[:index].count(ids)
        words = torch.Generator().manual_seed(sum(ids) + 1000 * copies)
        found.append(torch.randint(3, VOCABULARY, (3 + (sum(ids) + copies) % 4,), generator=words).tolist())
    return found


def mean_word(prompts: Any, completions: Any, completion_ids: Any, **others: Any) -> list[float]:
    return [sum(ids) / len(ids) / 10 + len(ids) / 7 for ids in completion_ids]


def by_two(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def of_rollouts(name: str, ranks: int = 1, **options: Any) -> tuple[Callable[[], Training], Any]:
    """A training with the style, and the training without it on ``ranks`` ranks that it equals."""
    batch = options.pop("batch", 2)
    mine = partial(rollouts, name, fixed=ranks == 1, per_device_train_batch_size=batch, **options)
    scale = 2 if ranks == 1 else 1  # as many samples
    wanted = partial(mine, reference=True, per_device_train_batch_size=scale * batch)
    return mine, (wanted, ranks, OF_HEADS)


# TRL's head computes log-probabilities in float32 from logits of as many rows as a rank has.
OF_HEADS = 1e-7
BOTH = (ModuleContextParallel, BackboneContextParallel)
ROLLOUTS = {
    "grpo, one process": of_rollouts("GRPO", loss_type="grpo"),
    "rloo, one process": of_rollouts("RLOO", beta=0.1),
    "grpo": of_rollouts("GRPO", 2, gradient_accumulation_steps=2, by_page=True),
    "grpo, a reference and rewards": of_rollouts("GRPO", 2, styles=BOTH, beta=0.1, rewards_of="llama"),
    "grpo, plain rewards": of_rollouts("GRPO", 2, rewards_of="llama", loss_type="bnpo"),
    "grpo, whole": of_rollouts("GRPO", 4, styles=(BackboneContextParallel, None), batch=1, num_generations=4),
    "grpo, adapters": of_rollouts("GRPO", 2, lora=True, beta=0.05, num_iterations=2, steps_per_generation=4),
    "rloo": of_rollouts("RLOO", 4, gradient_accumulation_steps=2, styles=BOTH, beta=0.1),
}

CASES: dict[str, Callable[[], Training]] = {
    # 11 samples: the last step has one micro-batch of one sample; 5 samples are evaluated, in batches of 2, 2, 1.
    "trainer": partial(
        hugging_face,
        data=samples(11),
        args=CHECKPOINTED | {"gradient_accumulation_steps": 2},
        eval_dataset=samples(5),
        compute_metrics=accuracy,
    ),
    "a batch without labels": partial(
        hugging_face,
        eval_dataset=[*samples(4), samples(5)[4] | {"labels": torch.full((21,), IGNORED)}],
        before=EvaluatesAsTRL,
    ),
    "packed": packed,
    "dropout": with_dropout,
    "accelerate": accelerated,
    "accelerate's sharding": partial(sharded_by_accelerate, False),
    "accelerate's sharding, a block": partial(sharded_by_accelerate, True),
    "the page's Trainer": trainer_of_the_page,
    "sft": sft,
    "classifier": with_head,
    "labels of tokens": partial(
        with_head, AutoModelForTokenClassification, "bert", batch=4, gradient_accumulation_steps=2
    ),
    "labels of tokens, each rank's mean": partial(
        with_head, AutoModelForTokenClassification, "bert", average_tokens_across_devices=False
    ),
    # transformers multiplies the mean of a head by the processes, unless average_tokens_across_devices is off.
    "classifier, data parallel": partial(with_head, number=8, average_tokens_across_devices=False),
    "rewards": partial(of_pairs, "Reward"),
    "preferences": partial(of_pairs, "DPO"),
    **{name: case for name, (case, _) in ROLLOUTS.items()},
    "lightning": lightning,
    "torchtitan": torchtitan,
    "data parallel": partial(hugging_face, data=samples(8)),
}


def shifted_tokens(*, proved: bool) -> Training:
    """A model that adds to each token what is before it, in this rank's part: by a hook, which no argument shows."""

    class Trained(LongTrainer):
        verify = proved

    model = model_of()
    model.set_attn_implementation(NAME)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    parallelize_module(model, mesh, ModuleContextParallel())
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda module, args, x: x + torch.nn.functional.pad(x, (0, 0, 1, -1)))
    done = train(Trained(model, arguments(), train_dataset=samples(8), data_collator=default_data_collator))
    raise AssertionError(f"trained {len(done.losses)} steps")


PLAIN = "in a Trainer of transformers put ContextParallelTrainer before it"
REFUSED: dict[str, tuple[Callable[[], Training], str]] = {
    "a plain Trainer": (plain_trainer, PLAIN),
    "a plain Trainer, packed": (partial(plain_trainer, collate=DataCollatorWithFlattening()), PLAIN),
    "a plain Trainer that cuts": (partial(plain_trainer, cut=True), "disagree on the samples"),
    "workers": (partial(plain_trainer, cut=True, dataloader_num_workers=1), "in a worker process of a DataLoader"),
    "label smoothing": (
        partial(hugging_face, args={"label_smoothing_factor": 0.1}),
        "label_smoothing_factor gets this rank's part",
    ),
    "a loss function": (
        partial(hugging_face, compute_loss_func=lambda *args, **kwargs: None),
        "compute_loss_func gets this rank's part",
    ),
    "a token shift": (
        partial(shifted_tokens, proved=True),
        "(Embedding): it carries values from token to token",
    ),
    "a token shift that nobody proves": (partial(shifted_tokens, proved=False), "trained 4 steps"),
    "entropy quantile": (partial(rollouts, "GRPO", top_entropy_quantile=0.5), "no step of all of them for top_entropy"),
    "adaptive entropy": (partial(rollouts, "GRPO", use_adaptive_entropy=True), "no step of all of them for use_adapt"),
    "neftune": (partial(hugging_face, args={"neftune_noise_alpha": 5.0}), "neftune_noise_alpha) adds noise"),
    "dispatched batches": (
        partial(hugging_face, args={"accelerator_config": {"dispatch_batches": True}}),
        "is not a loader that accelerate shares",
    ),
}
REFERENCES: dict[str, Any] = {name: reference for name, (_, reference) in ROLLOUTS.items()}
RANKS: dict[str, int] = {
    "grpo, whole": 4,
    "rloo": 4,
    "data parallel": 4,
    "classifier, data parallel": 4,
    "torchtitan": 4,
}
