"""Batches under context parallelism for trainers of other libraries: transformers, TRL, accelerate, Lightning.

Trainers give every rank its own samples, and compute labels and token counts as if each rank had whole sequences.
:class:`ContextParallelTrainer` corrects this for a Trainer of transformers or TRL, :func:`share_batches` for loaders of
accelerate. The layout is the layout of the style, and positions that restart at 0 mark packed documents: forward,
backward and evaluation need no scope.

This file imports no other library. Shapes: B batch, L tokens of this rank, S tokens of the whole sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_styles._lib.troubleshooting import see
from cp_styles.batch.labels import IGNORE_INDEX
from cp_styles.batch.sharder import BatchSharder
from cp_styles.checks.positions import find_padding_position
from cp_styles.checks.proof import Proof
from cp_styles.comm.point_to_point import collective
from cp_styles.integrations.rollouts import SharedRollouts
from cp_styles.integrations.transformers import position_ids_of
from cp_styles.styles.backbone import backbone_of
from cp_styles.styles.module import binding_of
from cp_styles.verify import VerificationError, verify


def share_batches(dataloader: Any, *, num_replicas: int, rank: int) -> Any:
    """Let a loader distribute batches over data-parallel ranks only, instead of over all ranks.

    accelerate distributes the batches of a data set over all processes. The ranks of one sequence need the same batch::

        loader = accelerator.prepare(DataLoader(dataset, ...))
        share_batches(loader, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())

    Args:
        dataloader: a loader that accelerate has prepared. It is changed, and returned.
        num_replicas: number of data-parallel ranks; 1 if all ranks share one sequence.
        rank: this rank's index among them.

    No communication.

    Raises:
        ValueError: accelerate did not prepare ``dataloader``, or it distributes batches in another way: from one
            process (``dispatch_batches``), or with a separate sampler for each rank.
    """
    world = dist.get_world_size()
    sharded = next((x for x in (dataloader.batch_sampler, dataloader.dataset) if hasattr(x, "process_index")), None)
    dispatched = hasattr(dataloader, "split_batches")  # an attribute of accelerate's DataLoaderDispatcher alone
    if dispatched or sharded is None or sharded.num_processes not in (world, num_replicas):
        raise ValueError(
            f"share_batches: a {type(dataloader).__name__} is not a loader that accelerate shares among {world} "
            "processes by their index. Prepare it with accelerate, and with dispatch_batches=False (of a Trainer: "
            'accelerator_config={"dispatch_batches": False}); or do not prepare it, and give it a DistributedSampler'
            f"{see('A loader that accelerate does not share')}"
        )
    sharded.num_processes, sharded.process_index = num_replicas, rank
    if num_replicas == 1:
        sharded.even_batches = False  # a single replica needs no equal numbers of batches
    return dataloader


class ContextParallelTrainer(SharedRollouts):
    """A mixin before a Trainer of transformers or TRL: ``class LongTrainer(ContextParallelTrainer, Trainer): ...``

    The model must have a :class:`~cp_styles.ModuleContextParallel`, whose ranks and layout apply. Everything else is as
    in the Trainer. A step has ``per_device_train_batch_size`` samples for each group of ranks that share a sequence.
    DDP or FSDP2, over all ranks, sum the gradients: do not call sum_gradients.

    - Data loaders give the ranks of one sequence the same batches. (The ranks compare them.)
    - ``compute_loss`` shards the batch with :meth:`context_parallel_collator`, and returns each rank's share.
    - Before the first step, :func:`~cp_styles.verify.verify` proves a step with at most 2,048 tokens of the first
      batch. Set ``verify = False`` in a subclass to skip it. (DeepSpeed is always skipped: its backward also updates
      its optimizer.)
    - Evaluation returns the loss of the whole sequence, and predictions of whole sequences, once for each sample, for
      ``compute_metrics``.

    Refused: ``label_smoothing_factor`` and ``compute_loss_func``, which would shift this rank's shard of the labels;
    ``neftune_noise_alpha``, whose noise depends on the length of a shard; predictions for batches without labels.

    A model with a :class:`~cp_styles.BackboneContextParallel` takes whole batches. Then the Trainer's loss, evaluation
    and predictions are unchanged, and nothing is refused: classifiers, RewardTrainer and DPOTrainer of TRL.

    GRPOTrainer and RLOOTrainer of TRL: each rank has samples of its own, as without the style, and generates alone. The
    ranks of a sequence compute its log-probabilities together, one rank's samples after another's. A step has
    ``per_device_train_batch_size`` samples of each rank. Losses, rewards and advantages are as without the style, and
    logs are means over the turns. ``verify`` proves log-probabilities of random tokens.
    """

    verify = True

    def context_parallel_collator(self) -> BatchSharder:
        """The sharder of the batches. Override this method for other entries, or for padding.

        Raises:
            ValueError: the model has no ModuleContextParallel, or accelerate also shards the batches (``cp_size``).
        """
        model = self._trainer.model
        parallelism = getattr(self._trainer.accelerator, "parallelism_config", None)
        if parallelism is not None and parallelism.cp_enabled:
            raise ValueError(
                f"{type(self).__name__}: parallelism_config has cp_size={parallelism.cp_size}, with which accelerate "
                "cuts the batch too, for torch's attention: leave it out, the style says which ranks share a sequence"
            )
        binding = binding_of(model)
        if binding is None:
            raise ValueError(
                f"{type(self).__name__}: {type(model).__name__} has no ModuleContextParallel: apply the style before "
                "the trainer is made, parallelize_module(model, mesh, ModuleContextParallel()); or override "
                "context_parallel_collator()"
            )
        positions = None if find_padding_position(model) is None else partial(position_ids_of, model)
        return BatchSharder(binding.group, layout=binding.layout, positions=positions)

    @cached_property
    def _sharder(self) -> BatchSharder:
        return self.context_parallel_collator()

    @property
    def _is_whole(self) -> bool:
        """Whether the model takes whole batches and returns whole outputs."""
        return backbone_of(self._trainer.model) is not None

    @property
    def _parent(self) -> Any:
        """The Trainer's methods, which the methods of this class call."""
        return super()

    @cached_property
    def _groups(self) -> list[list[int]]:
        """For each sequence, the ranks that share it. Communication, once: an all-gather."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, dist.get_process_group_ranks(self._sharder._group))
        return sorted(map(list, set(map(tuple, ranks))))

    @property
    def _first_ranks(self) -> list[int]:
        return [ranks[0] for ranks in self._groups]

    def _share(self, dataloader: Any) -> Any:
        if self._has_rollouts:  # each rank has its own
            self._refuse_options()
            return dataloader
        index = self._groups.index(dist.get_process_group_ranks(self._sharder._group))
        return share_batches(dataloader, num_replicas=len(self._groups), rank=index)

    def get_train_dataloader(self) -> Any:
        """The Trainer's loader, with the same batches for the ranks of one sequence."""
        return self._share(self._parent.get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The Trainer's loader of ``eval_dataset``, with the same batches for the ranks of one sequence."""
        return self._share(self._parent.get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The Trainer's loader of ``test_dataset``, with the same batches for the ranks of one sequence."""
        return self._share(self._parent.get_test_dataloader(test_dataset))

    def get_cp_size(self) -> int:
        """The number of ranks of a sequence, each of which counts all its tokens. The Trainer divides by it."""
        return 1 if self._is_whole or self._has_rollouts else self._sharder._group.size()

    def get_tp_size(self) -> int:
        """The number of ranks whose losses are equal. The Trainer divides the number of tokens and its factor by it."""
        has_copies = self._is_whole and not self._has_rollouts
        return self._parent.get_tp_size() * (self._sharder._group.size() if has_copies else 1)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The Trainer's (batches, number of labels), for ``epoch_iterator``, ``num_batches`` and ``device`` as in the
        Trainer. Verifies a step of the first batch, also in eval mode if there is an ``eval_dataset``.

        Raises:
            VerificationError: on every rank, if a step of all ranks differs from the step of one device.
        """
        samples = self._parent.get_batch_samples(epoch_iterator, num_batches, device)
        batches, trainer = samples[0], self._trainer
        if self.verify and batches and not hasattr(trainer.model_wrapped, "backward"):  # DeepSpeed's engine has one
            self.verify = False  # once per trainer
            binding = binding_of(trainer.model)
            if binding is not None and isinstance(binding.model, Proof) and not binding.model.verified:
                batch = self._batch_to_prove(_TOKENS_TO_PROVE) if self._has_rollouts else batches[0]
                evaluates = trainer.eval_dataset is not None and not self._has_rollouts
                for mode in (True, False) if evaluates else (True,):
                    self._prove(batch, mode)
        return samples

    def _prove(self, batch: Any, mode: bool) -> None:
        """Verify a step of ``batch`` in training mode or eval mode, both with gradients, which show what is a share."""
        trainer = self._trainer
        # TRL adds to these at each loss.
        before = {name: copy.deepcopy(vars(self)[name]) for name in _COUNTS if name in vars(self)}
        group = self._sharder._group

        def step(model: Any, batch: Any, mesh: DeviceMesh) -> None:
            model.train(mode)
            with trainer.compute_loss_context_manager():
                if self._has_rollouts:
                    loss = self._loss_to_prove(model, batch)
                else:
                    loss = trainer.compute_loss(model, trainer._prepare_inputs(batch))
            trainer.accelerator.backward(loss)

        cp = DeviceMesh.from_group(group, trainer.args.device.type, mesh_dim_names=("cp",))
        if len(self._groups) > 1:
            ranks = torch.tensor(self._groups, device="cpu")
            column = ranks[:, group.rank()].tolist()
            groups = [dist.new_group(column, use_local_synchronization=True), group]
            cp = DeviceMesh.from_group(groups, trainer.args.device.type, mesh=ranks, mesh_dim_names=("dp", "cp"))
        part = _take_first_tokens(batch)
        try:
            verify(trainer.model_wrapped, cp, part, step)
        except VerificationError as error:
            # The documents of this batch end where the parts of the ranks do.
            if (joined := _join_documents(part)) is None or error.report.power is None or error.report.power.takes:
                raise
            vars(self).update(copy.deepcopy(before))
            verify(trainer.model_wrapped, cp, joined, step)
        finally:
            vars(self).update(before)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss for this rank's shard of ``inputs``, a whole batch: this rank's share of the mean.

        ``model``, ``return_outputs`` and ``num_items_in_batch`` are as in the Trainer. Communication: as the collator
        and the model.

        Raises:
            NotImplementedError: ``label_smoothing_factor``, ``compute_loss_func`` or ``neftune_noise_alpha`` is set, or
                the batch has no labels.
        """
        trainer = self._trainer
        if self._has_rollouts:
            return self._loss_in_turns(model, inputs)
        if self._is_whole:
            if num_items_in_batch is not None and not trainer.args.average_tokens_across_devices:
                num_items_in_batch = num_items_in_batch * self._sharder._group.size()  # counted by this rank alone
            return self._parent.compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if self._sharder._group.size() > 1 and inputs.get("labels") is None and inputs.get("shift_labels") is None:
            raise NotImplementedError(
                f"{type(self).__name__}: the batch has no labels but {list(inputs)}: this trainer makes its loss "
                "itself, of probabilities of whole sequences, as those for preferences or rewards do (DPO, KTO), "
                "and here they would be a part's. Apply BackboneContextParallel in place of ModuleContextParallel; or "
                f"take the loss in a loop of your own: tutorials/hugging_face.md{see('A loss of whole sequences')}"
            )
        smoothed = getattr(trainer, "label_smoother", None) is not None
        if smoothed or getattr(trainer, "compute_loss_func", None) is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: {'label_smoothing_factor' if smoothed else 'compute_loss_func'} gets this "
                "rank's part of the labels, and would shift them after the cut. Leave it out; or override "
                "compute_loss, and take the loss from the logits and shift_labels (chunked_token_losses smooths labels)"
            )
        if getattr(trainer.args, "neftune_noise_alpha", None):
            raise NotImplementedError(
                f"{type(self).__name__}: NEFTune (neftune_noise_alpha) adds noise to the embeddings, with random "
                "numbers of each rank's own, and of a size that follows from this rank's number of tokens: leave it out"
            )
        part = self._sharder(inputs)
        if num_items_in_batch is None and "shift_labels" in part:
            num_items_in_batch = self._count_labels(inputs)
        if num_items_in_batch is not None and trainer.model_accepts_loss_kwargs:
            part["num_items_in_batch"] = num_items_in_batch
        return self._parent.compute_loss(
            model, part, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def _count_labels(self, inputs: Any) -> float:
        """The divisor of a rank's loss if the Trainer has not counted the labels, as in TRL's evaluations: it makes the
        mean over the ranks of a sequence the mean over its labels."""
        labels = inputs["labels"][:, 1:] if inputs.get("shift_labels") is None else inputs["shift_labels"]
        # In evaluation a loss without labels is nan, as on one device. A batch that is verified may have no labels.
        count = int((labels != IGNORE_INDEX).sum()) or int(self._trainer.model.training)
        # The Trainer multiplies by the number of all processes.
        multiplied = dist.get_world_size() if self._trainer.args.average_tokens_across_devices else 1
        return count * multiplied / self._sharder._group.size()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's method, with its ``args`` and ``kwargs``, which counts each sample once."""
        if not self._has_rollouts:
            self._trainer.gather_function = self._gather_once
        return self._parent.evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The Trainer's (loss, logits, labels) of whole sequences, equal on all ranks of a sequence.

        ``model``, ``inputs``, ``prediction_loss_only`` and ``ignore_keys`` are as in the Trainer. Communication: as
        :meth:`compute_loss`, one all-reduce of the loss, and an all-gather of the logits.

        Raises:
            NotImplementedError: ``inputs`` have no labels.
        """
        if self._is_whole or self._has_rollouts:
            return self._parent.prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if not all(inputs.get(name) is not None for name in self._trainer.label_names or ["labels"]):
            raise NotImplementedError(
                f"{type(self).__name__}: a batch without labels is given to the model as it is, whole: predict without "
                "context parallelism, or with labels (they may all be -100)"
            )
        loss, logits, labels = self._parent.prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            with collective(self._sharder._group, type(self).__name__):
                dist.all_reduce(loss, group=self._sharder._group)
            loss = loss / self._sharder._group.size()
        return loss, None if logits is None else self._gather_logits(logits, inputs), labels

    def _gather_logits(self, logits: Any, inputs: Any) -> Any:
        if isinstance(logits, (tuple, list)):
            return type(logits)(self._gather_logits(x, inputs) for x in logits)
        return self._sharder.whole_of(logits, inputs)

    def _gather_once(self, data: Any) -> Any:
        """A replacement of accelerate's ``gather_for_metrics`` that takes the rows of one rank of each sequence."""
        if isinstance(data, (tuple, list)):
            return type(data)(self._gather_once(x) for x in data)
        accelerator = self._trainer.accelerator
        rows = accelerator.gather(data).unflatten(0, (dist.get_world_size(), -1))[self._first_ranks].flatten(0, 1)
        state = accelerator.gradient_state
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows


_TOKENS_TO_PROVE = 2048
_COUNTS = "_metrics", "_total_train_tokens"


def _join_documents(batch: Any) -> Any:
    """The batch with one document in each row. None if its rows have no documents."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or not bool((positions.diff(dim=-1) != 1).any()):
        return None
    one = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    return {name: x for name, x in batch.items() if name not in _OF_DOCUMENTS} | {"position_ids": one}


# Arguments of packed documents, which follow from their positions.
_OF_DOCUMENTS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"


def _take_first_tokens(batch: Any) -> Any:
    """The beginnings of the sequences of a batch, in all _TOKENS_TO_PROVE tokens. The batch itself if its entries are
    not known, or if the beginnings have no labels."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
        return batch
    length = max(_TOKENS_TO_PROVE // tokens.shape[0], 1)
    known = all(not isinstance(x, torch.Tensor) or x.ndim < 2 or x.shape == tokens.shape for x in batch.values())
    if tokens.shape[1] <= length or not known:
        return batch
    part = {name: x[:, :length] if isinstance(x, torch.Tensor) and x.ndim == 2 else x for name, x in batch.items()}
    labels, mask = part.get("labels"), part.get("attention_mask")
    if labels is None or labels.ndim < 2:  # a head pools the tokens
        return batch if mask is None or not bool(mask.any(1).all()) else part
    return part if bool((labels[:, 1:] != IGNORE_INDEX).any()) else batch
