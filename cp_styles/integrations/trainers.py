"""Batches under context parallelism for trainers of other libraries: transformers, TRL, accelerate, Lightning.

Trainers give every rank its own samples. They make labels and count tokens as if each rank had whole sequences. Two
classes correct this. :class:`ContextParallelCollator` takes a whole batch, the same on all ranks of a sequence, and
returns this rank's part, with labels that were shifted before the cut. :class:`ContextParallelTrainer` is a mixin for a
Trainer of transformers or TRL::

    class LongTrainer(ContextParallelTrainer, Trainer): ...

    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())
    parallelize_module(model, mesh["cp"], ModuleContextParallel())
    LongTrainer(model, TrainingArguments(...), train_dataset=dataset).train()

Neither needs a SequenceScope. The layout is that of the style, and positions that restart at 0 show which documents are
packed. So nothing has to be opened around forward, backward, a checkpoint's recomputation or an evaluation.

This file imports no other library. Shapes: B batch, L tokens of this rank, S tokens of the whole sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from cp_styles.batch import IGNORE_INDEX, next_token_labels, pad_at_end, shard_batch
from cp_styles.checksum import checksum, fingerprint
from cp_styles.collectives import gather_outputs
from cp_styles.comm.agreement import Meeting, StatusRow, exchange_status
from cp_styles.comm.groups import GroupOrMesh, axis_and_group
from cp_styles.comm.point_to_point import collective
from cp_styles.integrations.transformers import position_ids_of
from cp_styles.layout import Balancer, SequenceLayout, head_tail, layout_made_by
from cp_styles.styles.module import binding_of
from cp_styles.styles.positions import padding_position
from cp_styles.troubleshooting import see

Batch = Mapping[str, Any]

# The dims of the entries that models of transformers take; None for what every rank needs whole. The sequence is the
# last dim of position_ids, which may be [S], [B, S] or [3, B, S].
_SEQ_DIMS: dict[str, int | None] = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "token_type_ids": 1,
    "labels": 1,
    "shift_labels": 1,
    "position_ids": -1,
    "attention_mask": None,
    "seq_idx": 1,
    "cu_seq_lens_q": None,
    "cu_seq_lens_k": None,
    "num_items_in_batch": None,
}


class ContextParallelCollator:
    """Cuts a batch: from the whole batch, the same on all ranks of a sequence, this rank's part.

    ::

        cut = ContextParallelCollator(mesh["cp"])
        part = cut({"input_ids": tokens, "labels": tokens})
        loss = model(**part, num_items_in_batch=global_token_count(part["shift_labels"], mesh["cp"])).loss

    Or as the ``collate_fn`` of a DataLoader without workers: ``ContextParallelCollator(mesh["cp"], collate)``.

    The part has these entries beside those of the batch:

    - ``shift_labels``, from ``labels`` [B, S], before the cut: for each token the label of the next one;
    - ``position_ids``, if the batch has none: 0 to S - 1, or those of ``positions``. Positions of packed documents,
      which restart at 0, are cut as they are.

    ``attention_mask`` stays whole, as :func:`~cp_styles.integrations.transformers.register_attention` needs it: [B, S],
    [B, 1, S, S], or a dict of such masks by kind of layer. One [B, S] without a zero is left out, unless the batch has
    positions of its own.

    Args:
        mesh: the ranks that share the sequence: a process group or a 1-D mesh, ``mesh["cp"]``.
        collate: makes the batch, a mapping of tensors, from the samples that the collator is called with. None: it is
            called with the batch.
        layout: how the sequence is cut. Use the layout of the style, whose default is ``head_tail`` too.
        seq_dims: for entries that are not named above, the dim that is the sequence, or None for those that every rank
            needs whole. (Entries that are no tensors, or have no dims, are passed on, whole. Those that are cut must be
            tensors.)
        shift: False for labels that are not the next token, as in masked language models. They are cut unchanged.
        pad_to_multiple_of: pad the sequence at its end to a multiple. No layout needs this; compiled graphs may.
        pad_token_id: the token to pad with. Padded tokens have no labels, and no token attends to them.
        positions: makes the positions [B, S] of ``input_ids`` [B, S], for models that do not count from 0 (RoBERTa's
            family, ESM): ``partial(position_ids_of, model)``, with
            :func:`~cp_styles.integrations.transformers.position_ids_of`.

    Communication: one all-gather of some integers. The ranks compare a checksum of the whole batch, for which the host
    waits if the batch is on a device: tensors, numbers and texts, also inside of dicts and lists.

    Raises:
        ValueError: on every rank, if the ranks have other samples, or one cannot cut its batch: an entry of unknown
            name, of another length, or a list where a tensor is needed; ``labels`` of whole sequences (classification),
            or below 0 and not -100. A ``layout`` for another number of ranks than ``mesh`` has.
        RuntimeError: in a worker process of a DataLoader, which cannot communicate.
    """

    def __init__(
        self,
        mesh: GroupOrMesh,
        collate: Callable[[Any], Batch] | None = None,
        *,
        layout: SequenceLayout | Balancer = head_tail,
        seq_dims: Mapping[str, int | None] | None = None,
        shift: bool = True,
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
        positions: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._name = type(self).__name__
        self._axis, self._group = axis_and_group(self._name, mesh)
        if isinstance(layout, SequenceLayout) and layout.ranks != self._group.size():
            raise ValueError(
                f"{self._name}: the layout cuts the sequence for {layout.ranks} ranks, mesh axis {self._axis!r} has "
                f"{self._group.size()}: make it for the ranks that share the sequence"
            )
        self._collate = collate
        self._layout = layout
        self._seq_dims = _SEQ_DIMS | dict(seq_dims or {})
        self._shift = shift
        self._multiple, self._pad = pad_to_multiple_of, pad_token_id
        self._positions = positions

    def __call__(self, samples: Any) -> dict[str, Any]:
        if get_worker_info() is not None:
            raise RuntimeError(
                f"{self._name} compares the ranks' batches, and was called in a worker process of a DataLoader, which "
                "cannot communicate: let the workers make whole batches, and cut them in the training loop, "
                "cut = ContextParallelCollator(mesh); part = cut(batch)"
                f"{see('A collator in a worker process')}"
            )
        whole: dict[str, Any] = {}
        cut: dict[str, torch.Tensor] = {}
        layouts: list[SequenceLayout] = []

        def build() -> StatusRow:
            whole.update(self._whole(samples))
            cut.update({name: x for name, x in whole.items() if isinstance(x, torch.Tensor) and x.ndim})
            unknown = [name for name in cut if name not in self._seq_dims]
            if unknown:
                raise ValueError(
                    f"{self._name}: it is not known which dim of {unknown} is the sequence: name it in seq_dims, or "
                    "None for an entry that every rank needs whole"
                    f"{see('An entry whose sequence dim is not known')}"
                )
            layouts.append(self._layout_for(whole))
            return StatusRow(inputs=fingerprint(_content(whole)))

        rows = exchange_status(build, Meeting.BATCH, self._name, self._axis, self._group)
        odd = [rank for rank, row in enumerate(rows) if row.inputs != rows[0].inputs]
        if odd:
            shapes = {
                name: tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for name, x in whole.items()
            }
            raise ValueError(
                f"{self._name}: ranks {odd} of mesh axis {self._axis!r} have other samples than rank 0 (here {shapes})"
                ", and the ranks of one sequence must be given the same whole batch, of which each gets its part: "
                "share the data set among the data-parallel ranks alone (share_batches, or a DistributedSampler with "
                'num_replicas=mesh["dp"].size()), with the same seed on all ranks; for a Trainer of transformers use '
                "ContextParallelTrainer"
                f"{see('Ranks with other samples')}"
            )
        part = shard_batch(cut, layouts[0], self._group.rank(), seq_dims=self._seq_dims)
        # Models view them: contiguous.
        return whole | {name: x.contiguous() for name, x in part.items()}

    def _whole(self, samples: Any) -> dict[str, Any]:
        """The whole batch with what it has to have, padded."""
        batch: dict[str, Any] = dict(samples if self._collate is None else self._collate(samples))
        for name, x in batch.items():
            wanted = "a tensor or a dict of tensors" if name == "attention_mask" else "a tensor"
            known = self._seq_dims.get(name) is not None or name == "attention_mask"
            kinds = (torch.Tensor, Mapping) if name == "attention_mask" else torch.Tensor
            if known and x is not None and not isinstance(x, kinds):
                raise ValueError(
                    f'{self._name}: batch["{name}"] is a {type(x).__name__}, and must be {wanted}: torch.tensor(...), '
                    "in the function that makes the batch"
                )
        tokens = batch.get("input_ids", batch.get("inputs_embeds"))
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
            raise ValueError(f"{self._name}: the batch has no input_ids [B, S] and no inputs_embeds, but {list(batch)}")
        rows, length = tokens.shape[:2]
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        if labels is not None and (labels.ndim < 2 or labels.shape[1] != length):
            raise ValueError(
                f"{self._name}: labels of shape {tuple(labels.shape)} are not one for each of {length} tokens. A model "
                "that pools a sequence into one prediction would pool this rank's tokens: take its hidden states, and "
                "pool them over all ranks (cp_styles.collectives.gather)"
            )
        padding, positions = self._padding(length), batch.get("position_ids")
        if positions is None and mask is None and padding:
            mask = torch.ones(rows, length, dtype=torch.int64, device=tokens.device)
        elif positions is None and isinstance(mask, torch.Tensor) and mask.ndim == 2 and not padding and mask.all():
            mask = None
        batch.pop("attention_mask", None)
        if mask is not None:
            batch["attention_mask"] = mask
        if labels is not None and self._shift and batch.get("shift_labels") is None:
            batch["shift_labels"] = next_token_labels(labels)
        for name in ("labels", "shift_labels"):
            x = batch.get(name)
            if x is not None and not x.dtype.is_floating_point and bool(((x < 0) & (x != IGNORE_INDEX)).any()):
                raise ValueError(
                    f"{self._name}: {name} has values below 0 that are not {IGNORE_INDEX}, and they would count as "
                    f"classes: labels.masked_fill(labels < 0, {IGNORE_INDEX}) if they mean that there is no label"
                )
        if positions is None and self._positions is None:
            batch["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
        elif positions is None and batch.get("input_ids") is None:
            raise ValueError(f"{self._name}: positions= needs input_ids, and the batch has none: give it position_ids")
        elif positions is None and self._positions is not None:
            batch["position_ids"] = self._positions(tokens)
        return self._padded(batch, padding) if padding else batch

    def _padding(self, length: int) -> int:
        if isinstance(self._layout, SequenceLayout):
            return max(0, self._layout.length - length)
        return -length % self._multiple

    def _padded(self, batch: dict[str, Any], padding: int) -> dict[str, Any]:
        fill = {"input_ids": self._pad, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
        for name, x in batch.items():
            dim = self._seq_dims.get(name)
            if name == "attention_mask":
                if not isinstance(x, torch.Tensor) or x.ndim != 2:
                    kind = f"of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else "that is a dict"
                    raise ValueError(
                        f"{self._name}: an attention_mask {kind} cannot be padded: make it for the padded length, and "
                        "pad the other entries too; or leave out pad_to_multiple_of"
                    )
                dim = 1
            if not isinstance(x, torch.Tensor) or not x.ndim or dim is None:
                continue
            batch[name] = pad_at_end(name, x, dim, padding, fill.get(name, 0))
            if name == "position_ids":  # a document of its own
                tail = batch[name].narrow(dim, -padding, padding)
                tail.copy_(torch.arange(padding, device=x.device).expand_as(tail))
        return batch

    def _layout_for(self, whole: Batch) -> SequenceLayout:
        if isinstance(self._layout, SequenceLayout):
            return self._layout
        return layout_made_by(self._layout, _tokens(whole).shape[1], self._group.size())

    def whole_of(self, part: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The whole result [B, S, ...] from each rank's ``part`` [B, L, ...]. ``batch`` is the whole batch.

        Communication: an all-gather of the parts. No gradient.
        """
        length = _tokens(batch).shape[1]
        layout = self._layout
        if not isinstance(layout, SequenceLayout):
            layout = layout_made_by(layout, length + self._padding(length), self._group.size())
        whole = gather_outputs(part.detach(), 1, self._group, reduce_gradients=False, layout=layout)
        return whole.narrow(1, 0, length)


def _content(value: Any) -> Any:
    """What ranks compare of an entry: tensors, numbers and texts, also inside of others; of anything else the type."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), checksum(value)
    if isinstance(value, Mapping):
        return sorted(((str(key), _content(item)) for key, item in value.items()), key=itemgetter(0))
    if isinstance(value, (list, tuple)):
        return [_content(item) for item in value]
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if hasattr(value, "__array_interface__"):  # numpy
        with contextlib.suppress(TypeError, ValueError):  # an array of objects
            return _content(torch.as_tensor(value, device="cpu"))
    return type(value).__qualname__


def _tokens(batch: Batch) -> torch.Tensor:
    return batch["inputs_embeds"] if batch.get("input_ids") is None else batch["input_ids"]


def share_batches(dataloader: Any, *, num_replicas: int, rank: int) -> Any:
    """Give different batches to data-parallel ranks only, and not to all ranks.

    accelerate distributes the batches of a data set over all processes. The ranks of one sequence need the same batch::

        loader = accelerator.prepare(DataLoader(dataset, ...))
        share_batches(loader, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())

    Args:
        dataloader: a loader that accelerate has prepared. It is changed, and returned.
        num_replicas: number of data-parallel ranks; 1 if all ranks share one sequence.
        rank: this rank's index among them.

    No communication.

    Raises:
        ValueError: ``dataloader`` is none of accelerate's, or is shared in another way: batches that one process
            distributes (``dispatch_batches``), a sampler of its own for each rank.
    """
    world = dist.get_world_size()
    sharded = next(
        (each for each in (dataloader.batch_sampler, dataloader.dataset) if hasattr(each, "process_index")), None
    )
    dispatched = hasattr(dataloader, "split_batches")  # of accelerate's DataLoaderDispatcher alone
    if dispatched or sharded is None or sharded.num_processes not in (world, num_replicas):
        raise ValueError(
            f"share_batches: a {type(dataloader).__name__} is not a loader that accelerate shares among {world} "
            "processes by their index. Prepare it with accelerate, and with dispatch_batches=False (of a Trainer: "
            'accelerator_config={"dispatch_batches": False}); or do not prepare it, and give it a DistributedSampler'
            f"{see('A loader that accelerate does not share')}"
        )
    sharded.num_processes, sharded.process_index = num_replicas, rank
    if num_replicas == 1:
        sharded.even_batches = False  # there is one replica, so no other one could have fewer batches
    return dataloader


class ContextParallelTrainer:
    """A mixin before a Trainer of transformers or TRL. The Trainer then trains with context parallelism.

    ::

        class LongTrainer(ContextParallelTrainer, Trainer): ...

    The model must have a :class:`~cp_styles.ModuleContextParallel`, which says over which ranks, and how, sequences are
    cut. Everything else is that of the Trainer. A step has ``per_device_train_batch_size`` samples for each group of
    ranks that share a sequence. DDP or FSDP2, over all ranks, sum the gradients: do not call sum_gradients.

    - Data loaders give the ranks of one sequence the same batches. (The ranks compare them.)
    - ``compute_loss`` cuts the batch by :meth:`context_parallel_collator`, and the loss is each rank's share.
    - Evaluation returns the loss of the whole sequence, and predictions of whole sequences, for ``compute_metrics``,
      once for each sample.

    Not supported, and refused: ``label_smoothing_factor`` and ``compute_loss_func``, which would shift this rank's
    part of the labels; ``neftune_noise_alpha``, whose noise depends on the length of a part; predictions for batches
    without labels.
    """

    def context_parallel_collator(self) -> ContextParallelCollator:
        """The collator that cuts the batches. Override this method for other entries, or for padding.

        Raises:
            ValueError: the model has no ModuleContextParallel, or accelerate cuts the batches too (``cp_size``).
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
        positions = None if padding_position(model) is None else partial(position_ids_of, model)
        return ContextParallelCollator(binding.group, layout=binding.layout, positions=positions)

    @cached_property
    def _cut(self) -> ContextParallelCollator:
        return self.context_parallel_collator()

    @property
    def _trainer(self) -> Any:
        """This object. (The attributes of the Trainer are not known to type checkers.)"""
        return self

    @property
    def _parent(self) -> Any:
        """The Trainer's methods behind those of this class."""
        return super()

    @cached_property
    def _firsts(self) -> list[int]:
        """The first rank of each group of ranks that share a sequence. Communication, once: an all-gather."""
        first = dist.get_process_group_ranks(self._cut._group)[0]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, first)
        return sorted(set(found))

    def _shared(self, dataloader: Any) -> Any:
        index = self._firsts.index(dist.get_process_group_ranks(self._cut._group)[0])
        return share_batches(dataloader, num_replicas=len(self._firsts), rank=index)

    def get_train_dataloader(self) -> Any:
        """The Trainer's loader, with the same batches for the ranks of one sequence."""
        return self._shared(self._parent.get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The Trainer's loader of ``eval_dataset``, with the same batches for the ranks of one sequence."""
        return self._shared(self._parent.get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The Trainer's loader of ``test_dataset``, with the same batches for the ranks of one sequence."""
        return self._shared(self._parent.get_test_dataloader(test_dataset))

    def get_cp_size(self) -> int:
        """The number by which the Trainer divides its count of tokens, because each rank counts the whole batch."""
        return self._cut._group.size()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss of this rank's part of ``inputs``, which are a whole batch: this rank's share of the mean.

        ``model``, ``return_outputs`` and ``num_items_in_batch`` are as in the Trainer. Communication: that of the
        collator and of the model.

        Raises:
            NotImplementedError: for ``label_smoothing_factor``, ``compute_loss_func`` and ``neftune_noise_alpha``.
        """
        trainer = self._trainer
        if getattr(trainer, "neftune_noise_alpha", None) and self._cut._group.size() > 1:
            raise NotImplementedError(
                f"{type(self).__name__}: neftune_noise_alpha adds noise to the embeddings, with random numbers of each "
                "rank's own, and of a size that follows from this rank's number of tokens: leave it out"
            )
        smoothed = getattr(trainer, "label_smoother", None) is not None
        if smoothed or getattr(trainer, "compute_loss_func", None) is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: {'label_smoothing_factor' if smoothed else 'compute_loss_func'} gets this "
                "rank's part of the labels, and would shift them after the cut. Leave it out; or override "
                "compute_loss, and take the loss from the logits and shift_labels (chunked_token_losses smooths labels)"
            )
        part = self._cut(inputs)
        if num_items_in_batch is None and "shift_labels" in part:
            num_items_in_batch = self._count(inputs)
        if num_items_in_batch is not None and trainer.model_accepts_loss_kwargs:
            part["num_items_in_batch"] = num_items_in_batch
        return self._parent.compute_loss(
            model, part, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def _count(self, inputs: Any) -> float:
        """The divisor of a rank's loss if the Trainer has not counted the labels, as in TRL's evaluations.

        With it, the mean over the ranks of a sequence is the mean over the labels of the sequence.
        """
        labels = inputs["labels"][:, 1:] if inputs.get("shift_labels") is None else inputs["shift_labels"]
        count = max(1, int((labels != IGNORE_INDEX).sum()))
        # The Trainer multiplies by the number of all processes.
        multiplied = dist.get_world_size() if self._trainer.args.average_tokens_across_devices else 1
        return count * multiplied / self._cut._group.size()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, with each sample counted once, for all ``args`` and ``kwargs`` of the Trainer's method."""
        self._trainer.gather_function = self._gathered
        return self._parent.evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The Trainer's (loss, logits, labels) of whole sequences, the same on all ranks of a sequence.

        ``model``, ``inputs``, ``prediction_loss_only`` and ``ignore_keys`` are as in the Trainer. Communication: that
        of :meth:`compute_loss`, one all-reduce of the loss, and an all-gather of the logits.

        Raises:
            NotImplementedError: ``inputs`` have no labels.
        """
        if not all(inputs.get(name) is not None for name in self._trainer.label_names or ["labels"]):
            raise NotImplementedError(
                f"{type(self).__name__}: a batch without labels is given to the model as it is, whole: predict without "
                "context parallelism, or with labels (they may all be -100)"
            )
        loss, logits, labels = self._parent.prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            with collective(self._cut._group, type(self).__name__):
                dist.all_reduce(loss, group=self._cut._group)
            loss = loss / self._cut._group.size()
        if logits is not None:
            logits = self._whole_logits(logits, inputs)
        return loss, logits, labels

    def _whole_logits(self, logits: Any, inputs: Any) -> Any:
        if isinstance(logits, (tuple, list)):
            return type(logits)(self._whole_logits(each, inputs) for each in logits)
        return self._cut.whole_of(logits, inputs)

    def _gathered(self, data: Any) -> Any:
        """A replacement of accelerate's ``gather_for_metrics``: only the rows of the first rank of each sequence."""
        if isinstance(data, (tuple, list)):
            return type(data)(self._gathered(each) for each in data)
        accelerator = self._trainer.accelerator
        rows = accelerator.gather(data).unflatten(0, (dist.get_world_size(), -1))[self._firsts].flatten(0, 1)
        state = accelerator.gradient_state
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows
