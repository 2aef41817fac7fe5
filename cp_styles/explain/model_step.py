"""Training steps of a model of transformers, as its configuration describes it: parameters, memory and work.

The model's own code runs on the meta device (:mod:`cp_styles.explain.step_trace`), so no formula for a kind of layer is
needed, and every type is counted as it will run. The bytes of the attention itself come from the dry run of a strategy
(:mod:`cp_styles.explain.dry_run`). Steps of two lengths give the bytes of any length, because sizes are linear in the
number of tokens. Code that reads values, such as a loop over the experts that some token has chosen, is an error.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from cp_styles.explain.fsdp_buffers import FsdpBuffers, padded_numel
from cp_styles.explain.step_trace import AttentionKind, LossFromChunks, StepOptions, StepTrace, register_without_data
from cp_styles.integrations.layers import run_known_mixers

_LENGTHS = 4096, 8192  # of the two steps: whole chunks of chunked_token_losses
# Fields that the configuration of any type may have, and that say nothing about sizes.
_OF_FILES = {"architectures", "model_type", "torch_dtype", "transformers_version", "rope_theta", "rope_scaling"}


class AttentionBytes(NamedTuple):
    """The bytes of an attention in addition to its inputs: kept from forward to backward, the most in the forward, and
    the most in the backward in addition to the output and to what is kept."""

    kept: int
    forward: int
    backward: int


class Step(NamedTuple):
    """A step of any number of tokens on one rank.

    Attributes:
        fixed, by_token: for each event [E] the bytes that live: ``fixed + by_token * tokens``, without attention.
        inside: for each event [E] the place inside of an attention: see :class:`StepTrace`.
        waiting: for each event and kind of attention [E, K], how many attentions wait for their backward.
        calls: for each kind of attention, the numbers of forwards and of backwards.
        flops, copied: the work for a token: see :class:`StepTrace`.
    """

    fixed: torch.Tensor
    by_token: torch.Tensor
    inside: torch.Tensor
    waiting: torch.Tensor
    calls: list[tuple[int, int]]
    flops: float
    copied: float

    def peak(self, tokens: int, attention: Sequence[AttentionBytes]) -> tuple[int, int]:
        """The most bytes that live at once, and the number of this event."""
        kept = torch.tensor([each.kept for each in attention], dtype=torch.float64, device="cpu")
        inside = [0, *(x for each in attention for x in each[1:])]
        here = torch.tensor(inside, dtype=torch.float64, device="cpu")
        live = self.fixed + self.by_token * tokens + self.waiting @ kept + here[self.inside]
        event = int(live.argmax())
        return int(live[event]), event


class StepModel:
    """A model without data, which FSDP2 shards over ``gpus``.

    Args:
        config: the configuration, see :func:`read_config`.
        dtype: the dtype in which the model computes. 16-bit parameters are sharded and reduced in float32.
        device: the device type of the run.
        gpus: the number of GPUs.
        batch: sequences that are trained at once.

    Attributes:
        model: the model of transformers, on the meta device.
        layers: its layers, each a unit of FSDP2. ``layers_name`` is the name of their list.
        parameters: the number of parameters. A shared one counts once.
        shard_numel: the numbers of parameters that a GPU holds.
        master: bytes of a number in shards.
        kinds: the kinds of attention, in the order of their first call. Filled by the first step.

    Raises:
        ValueError: the model has no list of layers that can be checkpointed, or several.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, device: str, gpus: int, batch: int = 1) -> None:
        self.dtype, self.gpus, self.batch, self._device = dtype, gpus, batch, torch.device(device)
        self.master = max(4, dtype.itemsize)
        config.use_cache = False
        name = register_without_data()
        make = import_module("transformers").AutoModelForCausalLM.from_config
        try:
            with torch.device("meta"):
                shards = torch.float32 if dtype.itemsize < self.master else dtype
                self.model: Any = make(config, attn_implementation=name, dtype=shards).train()
                for x in self.model.parameters():  # FSDP2 gathers all of them in this dtype; buffers stay
                    x.data = x.data.to(dtype)
        except Exception as error:  # of code that is not ours
            raise ValueError(
                f"transformers makes no language model of {type(config).__name__}: {type(error).__name__}: {error}"
            ) from error
        kind = import_module("transformers.modeling_layers").GradientCheckpointingLayer
        lists = [
            (name, list(each))
            for name, each in self.model.named_modules()
            if isinstance(each, nn.ModuleList) and len(each) and all(isinstance(layer, kind) for layer in each)
        ]
        if len(lists) != 1:
            raise ValueError(
                f"{type(self.model).__name__} has {len(lists)} lists of layers that can be checkpointed, "
                f"{[name for name, _ in lists]}: only models with one are counted"
            )
        ((self.layers_name, self.layers),) = lists
        self.parameters = sum(x.numel() for x in self.model.parameters())
        self.shard_numel = sum(padded_numel(x, gpus) for x in self.model.parameters()) // gpus
        self.kinds: list[AttentionKind] = []
        self._unused, self._can_chunk, self._steps = 0, False, dict[tuple[StepOptions, int], Step]()
        self._mixers = sorted({kind.__name__ for kind in map(_find_mixer, self.model.modules()) if kind})

    @property
    def checkpointing(self) -> str:
        """The name that this version of transformers has for checkpoints of layers."""
        names = "activation_checkpointing", "gradient_checkpointing"
        return next(name for name in names if hasattr(self.model, f"{name}_enable"))

    def find_kinds(self) -> list[AttentionKind]:
        """The kinds of attention. The first call runs a step."""
        self.step(StepOptions(True, False, True), _LENGTHS[0])
        return self.kinds

    @property
    def active(self) -> int:
        """The number of parameters that a token uses: of routed experts, the chosen ones alone."""
        self.find_kinds()
        return self.parameters - self._unused

    @property
    def can_chunk(self) -> bool:
        """Whether the logits are the product of the final hidden states and the head, and nothing else."""
        self.find_kinds()
        return self._can_chunk

    def step(self, options: StepOptions, rows: int) -> Step:
        """A step of ``rows`` tokens of each sequence, and of any other number from 4,096.

        Raises:
            NotImplementedError: the model's code reads values, or has an attention or operations that are not linear.
        """
        if self._mixers:
            raise NotImplementedError(
                f"{type(self.model).__name__} mixes tokens in {', '.join(self._mixers)}, which run other code under "
                "context parallelism. Its memory is not predicted"
            )
        linear = rows >= _LENGTHS[0]
        key = options, 0 if linear else rows  # a short sequence may be less than a chunk
        if key not in self._steps:
            runs = [self._run(options, each) for each in (_LENGTHS if linear else [rows])] * (1 if linear else 2)
            short, long = (torch.tensor(run.events, dtype=torch.float64, device="cpu") for run in runs)
            if short.shape != long.shape or not torch.equal(short[:, 1:], long[:, 1:]):
                raise NotImplementedError(
                    f"{type(self.model).__name__} runs other operations for {_LENGTHS[1]} tokens than for "
                    f"{_LENGTHS[0]}, as a loop over chunks of tokens does. Its memory is not predicted"
                )
            tokens = _LENGTHS[0] * self.batch if linear else 0
            slope = (long[:, 0] - short[:, 0]) / max(tokens, 1)
            works = zip(*((run.flops, run.copied) for run in runs), strict=True)
            work = [(last - first) / tokens if linear else last / (rows * self.batch) for first, last in works]
            events = short[:, 0] - slope * tokens, slope, short[:, 1].long(), short[:, 2:]
            self._steps[key] = Step(*events, runs[0].calls, *work)
        return self._steps[key]

    def parts(self, options: StepOptions, rows: int, attention: Sequence[AttentionBytes]) -> dict[str, int]:
        """The bytes at the peak of a step by what they are, from a step of this length.

        Raises:
            NotImplementedError: the sum is not :meth:`Step.peak`.
        """
        peak, event = self.step(options, rows).peak(rows * self.batch, attention)
        run = self._run(options, rows, event)
        _, inside, *waiting = run.events[event]
        parts = dict(run.parts)
        parts["attention, kept"] = sum(n * each.kept for n, each in zip(waiting, attention, strict=True))
        if inside:
            parts["attention, while it runs"] = attention[(inside - 1) // 2][2 - inside % 2]
        if sum(parts.values()) != peak:
            raise NotImplementedError(
                f"{type(self.model).__name__} makes tensors whose sizes are not linear in the tokens: {rows} of them "
                f"take {sum(parts.values())} bytes, and {peak} were predicted"
            )
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

    def _run(self, options: StepOptions, rows: int, watched: int = -1) -> StepTrace:
        model, trace = self.model, StepTrace(self.kinds, options, self._device, watched)
        getattr(model, f"{self.checkpointing}_{'enable' if options.checkpoints else 'disable'}")()
        buffers = FsdpBuffers(model, self.layers, self.gpus, self.dtype, self.master, trace.label)
        with ExitStack() as stack:
            for hook in (*buffers.hooks(), *trace.hooks(model, self.layers)):
                stack.callback(hook.remove)
            stack.callback(model.zero_grad)
            try:
                with trace, torch.device("meta"):
                    # As BatchSharder cuts them: tokens, labels, labels that are shifted, and positions.
                    batch = [torch.empty(self.batch, rows, dtype=torch.int64, device="meta") for _ in range(3)]
                    positions = torch.arange(rows, device="meta").repeat(self.batch, 1)
                    inputs = {"input_ids": batch[0], "position_ids": positions}
                    buffers.begin()
                    self._loss(inputs, batch[1], trace, buffers).backward()
                    buffers.end()
            except Exception as error:  # of code that is not ours
                raise NotImplementedError(
                    f"{type(model).__name__} does not run without data, {type(error).__name__}: {error}"
                ) from error
        self._unused = trace.unused
        return trace

    def _loss(self, inputs: Any, labels: torch.Tensor, trace: StepTrace, buffers: FsdpBuffers) -> torch.Tensor:
        base, head, apply = self.model.base_model, self.model.get_output_embeddings(), LossFromChunks.apply
        if trace.options.chunked:
            hidden = base(**inputs)[0]
            buffers.forward_ends()
            return apply(hidden, head.weight, head.bias, labels, trace, buffers.backward_begins)
        seen: list[int] = []
        with ExitStack() as stack:
            if isinstance(head, nn.Linear):
                for hook in (
                    base.register_forward_hook(lambda module, args, output: seen.append(_storage_of(output[0]))),
                    head.register_forward_pre_hook(lambda module, args: seen.append(_storage_of(args[0]))),
                    head.register_forward_hook(lambda module, args, output: seen.append(_storage_of(output))),
                ):
                    stack.callback(hook.remove)
            logits = self.model(**inputs).logits
        self._can_chunk = len(seen) == 3 and seen[0] == seen[1] and seen[2] == _storage_of(logits)
        buffers.forward_ends()
        logits.register_hook(lambda grad: buffers.backward_begins())
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()  # as ShardedBatch.loss does
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def _find_mixer(module: nn.Module) -> type[nn.Module] | None:
    """The class of a layer that mixes tokens and runs other code under a style. Changes the layer as a style does."""
    kind = type(module)
    run_known_mixers(module)
    return kind if type(module) is not kind else None


def _storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def read_config(path: Path) -> tuple[Any, list[str]]:
    """The configuration in a file, and the names of its fields that the configuration of its type does not declare.

    Raises:
        ValueError: transformers is missing or does not know the type, it is no language model, or it is quantized.
    """
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ValueError("models are counted by the code of transformers: pip install transformers") from error
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    kind = fields.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{path}: model_type: transformers {transformers.__version__} does not know {kind!r}")
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # of code that is not ours, about a field
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    decodes = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    if config.get_text_config() is not config or not decodes:
        raise ValueError(f"{path}: {type(config).__name__} is no decoder alone: give its text_config in a file")
    if fields.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config: only parameters that are not quantized are counted")
    known = _OF_FILES | inspect.signature(type(config)).parameters.keys() | config.attribute_map.keys()
    return config, sorted(fields.keys() - known)
