"""Trainers of TRL that generate their samples (GRPO, RLOO), under context parallelism.

Each rank has rows of its own, which are too long for it. So the ranks of a sequence compute the log-probabilities of
them together, one rank's rows after another's, in *turns*. This file imports no other library.

Shapes: B rows, S tokens, L tokens of this rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cp_styles.batch.sharder import BatchSharder
from cp_styles.checks.positions import counts_mask
from cp_styles.collectives import gather
from cp_styles.comm.agreement import TEXT_BYTES, Meeting, StatusRow, agree_on_facts, gather_texts
from cp_styles.comm.groups import group_now
from cp_styles.integrations.transformers import on_this_rank, position_ids_of
from cp_styles.styles.backbone import backbone_of
from cp_styles.styles.module import binding_of

_METHODS = "_generate_and_score_completions", "_get_per_token_logps_and_entropies"


class SharedRollouts:
    """Methods before a trainer that has the methods of TRL's GRPOTrainer or RLOOTrainer: see
    :class:`~cp_styles.integrations.trainers.ContextParallelTrainer`. Without effect before other trainers.

    A rank generates, gets rewards and takes losses as without the style. Log-probabilities are computed in turns.
    """

    # In a turn the ranks of a sequence have equal rows.
    _in_turn = False

    @property
    def _trainer(self) -> Any:
        """This object, with the attributes of the trainer and of all its classes, for type checkers."""
        return self

    @property
    def _of_trl(self) -> Any:
        """The trainer's methods, which the methods of this class call."""
        return super()

    @property
    def _has_rollouts(self) -> bool:
        return all(hasattr(super(SharedRollouts, self), name) for name in _METHODS)

    def _refuse_options(self) -> None:
        """Raise NotImplementedError, on every rank, for what needs the rows of all ranks in one step. Raise ValueError
        if the model has no style."""
        trainer, reason = self._trainer, ""
        _ = trainer._sharder  # which raises without a style
        if getattr(trainer, "loss_is_scaled_for_ga", None) is None:
            reason = "a loss that does not say how accumulation scales it: take GRPOTrainer or RLOOTrainer of trl 1.16"
        elif trainer.is_deepspeed_enabled:
            reason = "DeepSpeed, which steps in its backward: use DDP or FSDP2"
        elif getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
            reason = "top_entropy_quantile, a quantile of the samples of all ranks: set 1.0"
        elif getattr(trainer, "use_adaptive_entropy", False):
            reason = "use_adaptive_entropy, which changes its factor after each loss: set entropy_coef"
        elif trainer.aux_loss_enabled:
            reason = "the balance of experts, which is not linear in the tokens: set router_aux_loss_coef=0.0"
        if reason:
            raise NotImplementedError(
                f"{type(self).__name__}: the ranks of a sequence take one rank's samples after another's, and have no "
                f"step of all of them for {reason}"
            )

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's method. The styles run on this rank alone, because each rank has prompts of its own."""
        with on_this_rank(self._trainer.model):
            return self._of_trl._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's method, also for reward models that have a style."""
        trainer = self._trainer
        given = trainer.reward_funcs
        bindings = [binding_of(each) if isinstance(each, nn.Module) else None for each in given]
        trainer.reward_funcs = [
            each if binding is None else OwnRows(each, binding.group)
            for each, binding in zip(given, bindings, strict=True)
        ]
        try:
            return self._of_trl._calculate_rewards(*args, **kwargs)
        finally:
            trainer.reward_funcs = given

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """TRL's method, for this rank's rows, or in a turn for equal rows on all ranks."""
        compute = self._of_trl._get_per_token_logps_and_entropies
        binding = binding_of(model)
        if binding is None:  # a reference model without the style
            return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)
        called = model if backbone_of(model) is not None else of_whole_rows(model, self._trainer._sharder)
        called = with_tokens_for_all(called, 2 * group_now(binding.group).size())
        if self._in_turn:
            return compute(called, input_ids, attention_mask, logits_to_keep, batch_size, **options)
        found, size = [], batch_size or len(input_ids)
        for start in range(0, len(input_ids), size):
            part = slice(start, start + size)
            own = {"input_ids": input_ids[part], "attention_mask": attention_mask[part]}
            own["kept"] = torch.tensor(logits_to_keep, device=input_ids.device)
            results = [
                compute(called, rows["input_ids"], rows["attention_mask"], int(rows["kept"]), **options)
                for rows in rows_of_ranks(type(self).__name__, own, binding.group)
            ]
            found.append(results[group_now(binding.group).rank()])
        logps, entropies, _ = zip(*found, strict=True)
        return torch.cat(logps), None if entropies[0] is None else torch.cat(entropies), None

    def _loss_in_turns(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of this rank's rows, with the backward of the last turn: earlier turns have had theirs."""
        trainer, group = self._trainer, self._trainer._sharder._group
        turns = rows_of_ranks(type(self).__name__, inputs, group)
        own, loss = None, None
        for turn, rows in enumerate(turns):
            is_earlier = turn < len(turns) - 1 and torch.is_grad_enabled()
            # FSDP2 would hold whole gradients until it reduces them.
            waits = is_earlier and not trainer.accelerator.is_fsdp2
            with trainer.accelerator.no_sync(model) if waits else nullcontext(), self._turn():
                loss = self._of_trl.compute_loss(model, rows)
                own = own if turn != group.rank() else loss.detach()
                # DDP and FSDP2 take the mean over the ranks, each of which has the whole loss of every turn.
                loss = loss / len(turns)
                if is_earlier:
                    scale = 1 if trainer.loss_is_scaled_for_ga else trainer.current_gradient_accumulation_steps
                    with torch.autocast(loss.device.type, enabled=False):  # which may be on around the loss
                        trainer.accelerator.backward(loss / scale)
        assert loss is not None
        assert own is not None
        return loss + (own - loss).detach()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._in_turn = True
        try:
            yield
        finally:
            self._in_turn = False

    def _batch_to_prove(self, tokens: int) -> dict[str, torch.Tensor]:
        """Random prompts and completions of several lengths, in at most ``tokens`` tokens."""
        trainer = self._trainer
        config = trainer.model.config.get_text_config()
        places = getattr(config, "max_position_embeddings", None) or tokens
        length, words = max(min(trainer.max_completion_length, tokens // 4, places // 2), 2), config.vocab_size
        ids = torch.randint(words, (2, 2 * length), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        attended = torch.ones_like(ids)
        attended[0, : length // 2] = attended[1, 2 * length - length // 2 :] = 0
        return {name: x.to(trainer.args.device) for name, x in (("input_ids", ids), ("attention_mask", attended))}

    def _loss_to_prove(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A loss of log-probabilities and entropies, without TRL's metrics, which combine the ranks of the world."""
        kept = batch["input_ids"].shape[1] // 2
        with self._turn():
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                model, batch["input_ids"], batch["attention_mask"], kept, compute_entropy=True
            )
        weights = batch["attention_mask"][:, -kept:]
        return ((entropies - logps) * weights).sum() / weights.sum()


def rows_of_ranks(name: str, rows: Mapping[str, Any], group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """The rows of all ranks of ``group``, in their order. ``rows``: tensors of any shapes by name. ``name``: the user.

    Communication: one agreement, and all-gathers of a text of 4 KiB and of the rows. The host waits for the device.

    Raises:
        TypeError: on every rank, if an entry is no tensor.
        ValueError: on every rank, for other names or dtypes than on another rank, and for too many entries.
    """
    group = group_now(group)
    if group.size() == 1:
        return [dict(rows)]
    text = ""

    def describe() -> tuple[dict[str, Any], StatusRow]:
        nonlocal text
        for key, x in rows.items():
            if not isinstance(x, torch.Tensor):
                raise TypeError(
                    f"{name}: {key} is a {type(x).__name__}, and only tensors go to the ranks that share a sequence: "
                    "samples with pictures run without context parallelism"
                )
        text = json.dumps([[*x.shape] for x in rows.values()])
        if len(text) > TEXT_BYTES:
            raise ValueError(f"{name}: {len(rows)} entries are too many to compare: leave some out")
        return {"the entries": [(key, str(x.dtype)) for key, x in rows.items()]}, StatusRow()

    agree_on_facts(describe, Meeting.BATCH, (name, "cp", group))
    shapes = [json.loads(text) for text in gather_texts(text, group)]
    # Bytes, so that one message has all entries.
    own = torch.cat([x.detach().contiguous().reshape(-1).view(torch.uint8) for x in rows.values()])
    sizes = [
        [torch.Size(shape).numel() * x.element_size() for shape, x in zip(of_rank, rows.values(), strict=True)]
        for of_rank in shapes
    ]
    parts = iter(gather(own, 0, group, reduce_gradients=False).split([size for each in sizes for size in each]))
    return [
        {
            key: next(parts).clone().view(x.dtype).reshape(shape)
            for shape, (key, x) in zip(of_rank, rows.items(), strict=True)
        }
        for of_rank in shapes
    ]


class OwnRows(nn.Module):
    """A model for rows that each rank has alone: all ranks run it on the rows of each, in turn. Without gradients.

    ``model`` has a style that takes equal rows on all ranks of ``group``. Arguments are tensors, by name.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.model, self.group = model, group

    def forward(self, **inputs: torch.Tensor) -> Any:
        found = [self.model(**rows) for rows in rows_of_ranks(type(self.model).__name__, inputs, self.group)]
        return found[group_now(self.group).rank()]


class TokenOutputs(dict[str, Any]):
    """Log-probabilities of whole sequences as TRL's fused head returns them: a dict, and attributes."""

    __getattr__ = dict.get


def with_tokens_for_all(model: Callable[..., Any], least: int) -> Callable[..., Any]:
    """A function that calls ``model`` with at least so many tokens, the last of which are padding, and returns
    log-probabilities and entropies without it."""

    def call(**inputs: Any) -> Any:
        missing = least - inputs["input_ids"].shape[1]
        if missing <= 0:
            return model(**inputs)
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        outputs = model(**inputs | {name: F.pad(inputs[name], (0, missing), value=x) for name, x in fills.items()})
        found = {name: getattr(outputs, name, None) for name in _OF_TOKENS}
        return TokenOutputs({name: x[:, :-missing] for name, x in found.items() if x is not None})

    return call


_OF_TOKENS = "log_probs", "entropy"


def of_whole_rows(model: nn.Module, sharder: BatchSharder) -> Callable[..., TokenOutputs]:
    """A function that calls ``model`` with this rank's parts of whole rows, and returns what TRL's fused head does for
    all tokens. Each rank takes the whole loss of them, and gradients are the mean over the ranks."""

    def call(**inputs: Any) -> TokenOutputs:
        named = {name: inputs.pop(name) for name in ("input_ids", "attention_mask", "labels")}
        others = [name for name, x in inputs.items() if isinstance(x, torch.Tensor)]
        if others:
            raise NotImplementedError(
                f"{type(model).__name__}: {others} cannot be cut along the sequence: train on text alone, or without "
                "context parallelism"
            )
        if counts_mask(model):
            named["position_ids"] = position_ids_of(model, named["input_ids"], named["attention_mask"])
        outputs = model(**sharder(named), **inputs, num_items_in_batch=1)  # of the head's loss, which is not used
        if getattr(outputs, "log_probs", None) is None:
            raise NotImplementedError(
                f"{type(model).__name__} returns no log-probabilities: this version of TRL takes them from logits of "
                "whole sequences. Install trl 1.16 or later"
            )
        return TokenOutputs(
            (name, sharder.whole_of(x, named, reduce_gradients=True)[:, :-1])
            for name in _OF_TOKENS
            if (x := getattr(outputs, name, None)) is not None
        )

    return call
