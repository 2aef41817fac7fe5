"""BatchSharder cuts a batch of a language model, and makes its labels, its scope and its loss.

Shapes: B batch, L tokens of this rank, S tokens of the whole sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import get_worker_info

from cp_styles._lib.checksum import checksum
from cp_styles._lib.troubleshooting import see
from cp_styles.batch.gradients import sum_gradients
from cp_styles.batch.labels import (
    IGNORE_INDEX,
    document_positions,
    next_token_labels,
    pad_at_end,
    predicted_tokens,
    shard_batch,
)
from cp_styles.batch.losses import global_loss, global_token_count
from cp_styles.collectives import gather
from cp_styles.collectives.notes import Losses, StepNotes
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts, start_status
from cp_styles.comm.group_state import Forwards, state_of
from cp_styles.comm.groups import MeshOrGroup, Role, axis_and_group, world_group
from cp_styles.engine.scope import SequenceScope
from cp_styles.layouts import Balancer, SequenceLayout, contiguous, head_tail
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.masks import Documents, Mask, Tree

Batch = Mapping[str, Any]

# The sequence dim of each entry that models of transformers take; None for entries that every rank needs whole. The
# sequence is the last dim of position_ids, because they may be [S], [B, S] or [3, B, S].
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


class MeanOfMeansWarning(UserWarning):
    """Gradients were summed over the ranks of a sequence, but no loss of this package was made before."""


class ShardedBatch(dict[str, Any]):
    """This rank's part of a batch: a dict of its entries, with the positions, scope and loss that depend on the whole
    batch. :class:`BatchSharder` makes it.

    Attributes:
        layout: how this batch is cut.
        rows: of a batch with a tree, the index of this rank's token whose logits predict each of its labels, int64
            [N]. A token before several branches is there several times. None for other batches: all tokens, in order.
    """

    def __init__(
        self,
        part: Mapping[str, Any],
        sharder: BatchSharder,
        layout: SequenceLayout,
        document_ids: torch.Tensor | None,
        tree: Tree | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        super().__init__(part)
        self.layout, self.rows, self._tree = layout, rows, tree
        self._sharder, self._rank, self._document_ids = sharder, sharder._group.rank(), document_ids
        # The number of forwards before this batch, if it has several documents with labels.
        self._packed_at: int | None = None

    def __missing__(self, name: str) -> torch.Tensor:
        if name != "document_ids" or self._document_ids is None:
            raise KeyError(name)
        return self.layout.shard(self._document_ids, 1, self._rank)

    @property
    def tokens(self) -> torch.Tensor:
        """This rank's tokens [B, L]: the entry ``input_ids``.

        Raises:
            ValueError: the batch has ``inputs_embeds`` alone.
        """
        if self.get("input_ids") is None:
            raise ValueError(
                f"{type(self).__name__}.tokens: the batch has inputs_embeds in place of input_ids: give the model "
                'batch["inputs_embeds"], or model(**batch.inputs)'
            )
        return self["input_ids"]

    @property
    def positions(self) -> torch.Tensor:
        """The positions [L] of this rank's tokens in the whole sequence. The entry ``position_ids`` has the positions
        in documents."""
        return self.layout.positions(self._rank, device=_get_tokens(self).device)

    @property
    def inputs(self) -> dict[str, Any]:
        """The entries without labels, for ``model(**batch.inputs)``."""
        # A model that receives labels makes a loss of its own, which is a mean over this rank's tokens.
        return {name: x for name, x in self.items() if name != "labels" and not name.startswith("shift_labels")}

    def scope(self) -> SequenceScope:
        """The :class:`~cp_styles.SequenceScope` of this batch: its layout, and its documents or its tree.

        ::

            with batch.scope():
                logits = model(batch.tokens, batch["position_ids"])
        """
        ids, mask = self._document_ids, self._tree
        if ids is not None:  # one mask for all rows has one plan, so use it where the rows are equal
            mask = Documents.from_ids(ids[0] if (ids == ids[:1]).all() else ids)
        return SequenceScope(self.layout, mask=mask, mesh_axis=self._sharder.mesh_axis)

    def token_count(self, *, ahead: int = 1) -> torch.Tensor:
        """The number of tokens of all ranks that have a label, see :func:`~cp_styles.global_token_count`."""
        return global_token_count(self._labels(ahead), self._sharder.loss_mesh)

    def loss(
        self, logits_BLV: torch.Tensor, *, ahead: int = 1, token_count: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The mean cross entropy over all tokens of all ranks that have a label, as on one device.

        Every rank gets the value for all ranks. The gradient is this rank's share, see :func:`~cp_styles.global_loss`.

        Args:
            logits_BLV: this rank's logits, in any floating dtype, with a tree too: a row for each token. 16-bit logits
                are converted to float32 first.
            ahead: how many tokens ahead these logits predict, for models that predict several; at most ``predicted``
                of the sharder.
            token_count: the divisor. None: :meth:`token_count`. To accumulate gradients over several batches, pass the
                sum of their counts.

        Communication: as global_loss, and as global_token_count if ``token_count`` is None.

        Raises:
            ValueError: the batch has no labels, or the logits are not one row for each of this rank's tokens. Or it has
                document_ids or a tree, and no attention that has run since it was cut kept documents apart.
            TypeError: ``logits_BLV`` is not a tensor, such as the whole output of a model of transformers.
        """
        labels_BL = self._labels(ahead)
        if not isinstance(logits_BLV, torch.Tensor):
            raise TypeError(
                f"{type(self).__name__}.loss: logits_BLV are a tensor, got {type(logits_BLV).__name__}: "
                "take them out of what the model returns, model(...).logits or model(...)[0]"
            )
        tokens = labels_BL.shape if self.rows is None else _get_tokens(self).shape[:2]
        if logits_BLV.shape[:-1] != tokens:
            raise ValueError(
                f"{type(self).__name__}.loss: logits of shape {tuple(logits_BLV.shape)} are not one row for each of "
                f"this rank's tokens {tuple(tokens)}: give the model this batch's input_ids, and take its "
                "logits of all tokens, neither shifted nor gathered (the labels are shifted already)"
            )
        self._sharder._refuse_joined_documents(self._packed_at)
        if self.rows is not None:
            logits_BLV = logits_BLV[:, self.rows]
        if logits_BLV.dtype.itemsize < 4:  # the sum over tokens needs more digits than 16 bits have
            logits_BLV = logits_BLV.float()
        losses = F.cross_entropy(
            logits_BLV.flatten(0, -2), labels_BL.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
        )
        count = self.token_count(ahead=ahead) if token_count is None else token_count
        return global_loss(losses, count, self._sharder.loss_mesh, averaged_over=self._sharder.averaged_over)

    def _labels(self, ahead: int) -> torch.Tensor:
        labels = self.get(_get_label_name(ahead), self.get("labels") if ahead == 1 else None)
        if labels is None:
            raise ValueError(
                f"{type(self).__name__}: the batch has no labels of the token {ahead} ahead: give BatchSharder the "
                f'argument predicted={ahead}, and the tokens alone, or a batch with "labels"'
            )
        return labels.long()


def _get_label_name(ahead: int) -> str:
    return "shift_labels" if ahead == 1 else f"shift_labels_{ahead}"


class BatchSharder:
    """Cuts the batches of a language model. Its argument is a whole batch, the same on all ranks; its result is this
    rank's part.

    Example::

        parallelize_module(model, mesh, ModuleContextParallel())
        sharder = BatchSharder(mesh)
        batch = sharder(tokens)  # whole tokens [B, S], or a dict with input_ids
        logits = model(batch.tokens, batch.positions)  # of transformers: model(**batch.inputs).logits
        batch.loss(logits).backward()  # the mean over the tokens of all ranks
        sharder.sum_gradients(model)  # now every gradient equals the gradient on one device

    Nothing else may shift labels, average losses or cut tokens. The functions in :mod:`cp_styles.batch` are the parts
    of this class, for steps of another form.

    The result, a :class:`ShardedBatch`, has these entries in addition to the entries of the batch:

    - ``shift_labels``, from ``labels`` [B, S], before the cut: for each token the label of the next one. Tokens alone
      are their own labels. ``shift_labels_2`` and so on, if more are ``predicted``;
    - ``position_ids``, if the batch has none: 0 to S - 1, or the result of ``positions``. Positions of packed
      documents, which restart at 0, are cut as they are.

    Packed documents may be given as ``document_ids`` [B, S], equal for the tokens of one document. Labels end and
    positions restart at the borders of documents. :meth:`ShardedBatch.scope` separates documents in the attention: put
    it around the model. (Attention of transformers reads documents from the positions, and needs no scope.) The part
    ``batch["document_ids"]`` is no entry of ``**batch``, because models do not take it.

    Rollouts with shared prefixes may be given as ``tree``, a :class:`~cp_styles.Tree` for all rows of the batch. Then
    positions are those in rollouts, :meth:`ShardedBatch.scope` has the tree as its mask, and ``shift_labels`` [B, N]
    belong to the rows ``batch.rows`` of the logits: see :func:`~cp_styles.batch.predicted_tokens`. The entries that
    are ``shifted`` go with them. Padding is a further root. ``tree.weights`` gives each token the sum of the weights
    of its rollouts.

    ``attention_mask`` stays whole, as :func:`~cp_styles.integrations.transformers.register_attention` needs it: [B, S],
    [B, 1, S, S], or a dict of such masks by kind of layer. One [B, S] without a zero is left out, unless the batch has
    positions of its own.

    Args:
        mesh: the ranks that share the sequence: a process group or a 1-D mesh, ``mesh["cp"]``.
        layout: how the sequence is cut. Use the layout of the style, whose default is ``head_tail`` too. A balancer
            with an argument ``documents`` gets the documents of each batch, such as ``whole_documents``. Then open the
            scope of the batch.
        seq_dims: for entries that are not named above, the sequence dim, or None for entries that every rank needs
            whole. (Objects that are not tensors, and tensors without dims, are passed on whole. Entries that are cut
            must be tensors.)
        shift: False for labels that are not the next token, as in masked language models. They are cut unchanged.
        shifted: names of further entries [B, S, ...] that belong to labels, such as their weights, advantages or old
            log-probabilities: they are moved as ``labels`` are, before the cut, with 0 at the end. A float entry of the
            shape of the labels that is not named warns once; ``shifted=()`` says that it belongs to the tokens.
        predicted: how many tokens the model predicts at each token. ``batch.loss(logits, ahead=2)`` is the loss of the
            logits for the token after the next one.
        pad_to_multiple_of: pad the sequence at its end to a multiple. No layout needs this; compiled graphs may.
        pad_token_id: the token to pad with. Padded tokens have no labels. Causal attention does not attend to them, and
            models of transformers get an ``attention_mask``. For other attention give ``document_ids``, one id for all
            tokens if they are one document, and use :meth:`ShardedBatch.scope`.
        positions: makes the positions [B, S] of ``input_ids`` [B, S], for models that do not count from 0 (RoBERTa's
            family, ESM): ``partial(position_ids_of, model)``, with
            :func:`~cp_styles.integrations.transformers.position_ids_of`.
        loss_mesh: the ranks over whose tokens the loss is the mean, and gradients are summed. None: the ranks of
            ``mesh``. With data parallelism both axes: ``mesh["dp", "cp"]._flatten("dp_cp")``.
        averaged_over: the number by which DDP or FSDP2 divides the gradients, if one of them reduces them: the number
            of ranks that it reduces over. None: the default of :func:`~cp_styles.global_loss`. See the top of
            :mod:`cp_styles.batch`.

    Communication of a call: one all-gather of some integers. The ranks compare a checksum of the whole batch: of
    tensors, numbers and texts, also inside of dicts and lists. If the batch is on a GPU, the host waits for it.

    Raises:
        ValueError: on every rank, if the ranks' samples differ, or one rank cannot cut its batch: an entry of unknown
            name, of another length, or a list where a tensor is needed; ``labels`` of whole sequences (classification),
            or below 0 and not -100. A ``layout`` for another number of ranks than ``mesh`` has.
        RuntimeError: in a worker process of a DataLoader, which cannot communicate.
    """

    def __init__(
        self,
        mesh: MeshOrGroup,
        *,
        layout: SequenceLayout | Balancer = head_tail,
        seq_dims: Mapping[str, int | None] | None = None,
        shift: bool = True,
        shifted: Sequence[str] | None = None,
        predicted: int = 1,
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
        positions: Callable[[torch.Tensor], torch.Tensor] | None = None,
        loss_mesh: MeshOrGroup | None = None,
        averaged_over: int | None = None,
    ) -> None:
        self._name = type(self).__name__
        self._mesh, self._loss_mesh = mesh, loss_mesh
        self.mesh_axis = axis_and_group(self._name, mesh)[0]
        self.averaged_over = averaged_over
        if isinstance(layout, SequenceLayout) and layout.ranks != self._group.size():
            raise ValueError(
                f"{self._name}: the layout cuts the sequence for {layout.ranks} ranks, mesh axis {self.mesh_axis!r} "
                f"has {self._group.size()}: make it for the ranks that share the sequence"
            )
        if predicted < 1 or (predicted > 1 and not shift):
            raise ValueError(
                f"{self._name}: predicted={predicted} must be the number of next tokens that the model predicts: at "
                "least 1, and more only with shift=True"
            )
        if shifted and not shift:
            raise ValueError(
                f"{self._name}: shifted={shifted} are moved with labels, and shift=False moves none: cut them"
            )
        self._layout = layout
        self._belong_to_labels = shifted if shifted is None else tuple(shifted)
        self._shifted = [_get_label_name(ahead) for ahead in range(1, predicted + 1)] if shift else []
        self._seq_dims = _SEQ_DIMS | dict.fromkeys((*self._shifted, *(shifted or ())), 1) | dict(seq_dims or {})
        self._multiple, self._pad = pad_to_multiple_of, pad_token_id
        self._positions = positions
        self._warned = False
        self._losses = 0  # the number of losses at the last sum of gradients
        self._batches = self._sums = 0
        self._packed_at: int | None = None  # of the latest batch
        self._first_at: int | None = None  # the number of forwards before the first batch since the latest sum
        self._all_packed = True

    @property
    def _group(self) -> dist.ProcessGroup:
        return axis_and_group(self._name, self._mesh)[1]

    @property
    def loss_mesh(self) -> MeshOrGroup:
        """The ranks over whose tokens the loss is the mean."""
        return self._group if self._loss_mesh is None else self._loss_mesh

    def __call__(self, batch: torch.Tensor | Batch) -> ShardedBatch:
        if get_worker_info() is not None:
            raise RuntimeError(
                f"{self._name} compares the ranks' batches, and was called in a worker process of a DataLoader, which "
                "cannot communicate: let the workers make whole batches, and cut them in the training loop"
                f"{see('A collator in a worker process')}"
            )
        # Known to all threads of this rank, one of which may run the forward, and another the loss.
        of_loss = axis_and_group(self._name, self.loss_mesh, ordered=False)[1]
        state_of(self._group).get_or_create(Forwards).loss_groups.add(of_loss.group_name)
        parts: list[ShardedBatch] = []  # the result of describe(), whose return value is compared

        def describe() -> tuple[dict[str, Any], StatusRow]:
            whole = self._complete_batch(batch)
            if self._belong_to_labels is None and not isinstance(batch, torch.Tensor):
                self._name_weights(batch)  # in this meeting: if a user makes warnings errors, all ranks raise
            facts = {f"the samples ({name})": describe_content(x) for name, x in whole.items()}
            # Models do not take them; the scope reads the whole ones.
            ids, tree = whole.pop("document_ids", None), whole.pop("tree", None)
            cut = {name: x for name, x in whole.items() if isinstance(x, torch.Tensor) and x.ndim}
            unknown = [name for name in cut if name not in self._seq_dims]
            if unknown:
                raise ValueError(
                    f"{self._name}: the sequence dim of {unknown} is not known: name it in seq_dims, or None for an "
                    "entry that every rank needs whole"
                    f"{see('An entry whose sequence dim is not known')}"
                )
            layout, rank, rows = self._make_layout(_get_tokens(whole).shape[1], ids), self._group.rank(), None
            predicted: dict[str, torch.Tensor] = {}
            if tree is not None:
                device = _get_tokens(whole).device
                rows, tokens = (x.to(device) for x in predicted_tokens(tree, layout, rank))
                names = (*self._shifted, *(self._belong_to_labels or ()))
                predicted = {name: cut.pop(name).index_select(1, tokens) for name in names if name in cut}
            part = shard_batch(cut, layout, rank, seq_dims=self._seq_dims) | predicted
            contiguous = {name: x.contiguous() for name, x in part.items()}  # models call .view() on their inputs
            parts.append(ShardedBatch(whole | contiguous, self, layout, ids, tree, rows))
            return facts, StatusRow()

        advice = (
            ". The ranks of one sequence must be given the same whole batch: share the data among the data-parallel "
            'ranks alone (share_batches, or a DistributedSampler with num_replicas=mesh["dp"].size()), with one seed; '
            f"for a Trainer of transformers use ContextParallelTrainer{see('Ranks with other samples')}"
        )
        agree_on_facts(describe, Meeting.BATCH, (self._name, self.mesh_axis, self._group), advice)
        self._batches += 1
        forwards = state_of(self._group).operations.forwards
        if not isinstance(batch, torch.Tensor) and (
            batch.get("tree") is not None or _joins_matter(batch.get("document_ids"), batch.get("labels"))
        ):
            parts[0]._packed_at = forwards
        self._packed_at = parts[0]._packed_at
        self._all_packed &= self._packed_at is not None
        self._first_at = forwards if self._first_at is None else self._first_at
        notes: StepNotes | None = state_of(world_group()).objects.get(StepNotes)
        labels = parts[0].get("shift_labels")
        if notes is not None and labels is not None:
            notes.labels.append(int((labels != IGNORE_INDEX).sum()))
        return parts[0]

    def _name_weights(self, batch: Batch) -> None:
        """Warn about floats that may belong to labels, which are moved, and stay where they are."""
        labels = batch.get("labels")
        if labels is None or not self._shifted or batch.get("shift_labels") is not None or self._group.rank():
            return
        floats = [name for name, x in batch.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        found = [name for name in floats if self._seq_dims.get(name) == 1 and batch[name].shape == labels.shape]
        if found and self._group.size() > 1:
            warnings.warn(
                f"{self._name}: {found} have the shape of the labels, and are cut where they are, whereas labels are "
                f"moved to the token before. If they belong to labels, as weights do, give shifted={found}; else "
                f"shifted=(){see('Entries that belong to labels')}",
                UserWarning,
                stacklevel=2,
            )

    def _refuse_joined_documents(self, before: int | None) -> None:
        """Raise if a batch has several documents, and all attention since it was cut has joined them. ``before``: the
        number of forwards before it was cut; None for other batches."""
        state = state_of(self._group)
        if before is not None and state.operations.forwards > before >= state.get_or_create(Forwards).separated:
            raise ValueError(
                f"{self._name}: the batch has document_ids or a tree, and no attention that has run since kept "
                "documents apart: write `with batch.scope():` around the model. If documents are meant to see each "
                "other, give the batch shift_labels and position_ids in place of document_ids"
                f"{see('Documents without a scope')}"
            )

    def sum_gradients(self, parameters: nn.Module | Iterable[torch.Tensor]) -> None:
        """Sum ``.grad`` over the ranks, once after the last backward of a step: :func:`~cp_styles.sum_gradients`.

        Args:
            parameters: a module, or its parameters.

        Raises:
            ValueError: as sum_gradients; if ``averaged_over`` means that DDP or FSDP2 reduces the gradients; and if all
                attention has joined the documents of a batch, see :meth:`ShardedBatch.loss`.

        Warns:
            MeanOfMeansWarning: once, if the attention of models that were not verified has run since the last call, but
                no global loss was made.
            UserWarning: once, if nothing of this package has run over the ranks.
        """
        if self.averaged_over not in (None, 1):
            raise ValueError(
                f"{self._name}.sum_gradients: averaged_over={self.averaged_over} means that DDP or FSDP2 reduces the "
                "gradients: leave out sum_gradients, or averaged_over"
            )
        self._sums += 1
        # Batches that were cut ahead have not run. Which of several have run matters only if some are not packed.
        before = self._first_at if self._all_packed else self._packed_at if self._batches == self._sums else None
        self._first_at = None
        self._refuse_joined_documents(before)
        sum_gradients(parameters, self.loss_mesh)
        state = state_of(self._group)
        losses = state_of(axis_and_group(self._name, self.loss_mesh, ordered=False)[1]).get_or_create(Losses).number
        before, self._losses = self._losses, losses
        trained = state.get_or_create(Forwards).trained
        unproved = not all(proof.verified and not proof.unseen for proof in trained)
        trained.clear()
        if self._warned or StepNotes in state_of(world_group()).objects or self._group.size() == 1:
            return
        if not state.operations.forwards and not state.operations.collectives:
            self._warn(
                f"{self._name}.sum_gradients: batches were cut over mesh axis {self.mesh_axis!r}, and no attention, "
                "mixer or collective of this package ran over its ranks. If the model has attention, it was local to "
                "each rank: apply parallelize_module(model, mesh, ModuleContextParallel()). verify(model, mesh, batch, "
                "step) shows whether a style covers the model",
                UserWarning,
            )
        elif unproved and losses == before:
            self._warn(
                f"{self._name}.sum_gradients: no batch.loss and no global_loss was made since the last call. If the "
                "loss is a mean over the tokens of each rank, as of a model that is given labels, the gradients are "
                f"{self._group.size()} times too large: take batch.loss(logits). If the loss is divided by the tokens "
                f"of all ranks, verify(model, mesh, batch, step) proves it{see('A mean of means')}",
                MeanOfMeansWarning,
            )

    def _warn(self, text: str, category: type[Warning]) -> None:
        self._warned = True

        # In a meeting of the ranks: a user may turn warnings into errors, and then all ranks must raise.
        def warn() -> StatusRow:
            if self._group.rank() == 0:
                warnings.warn(text, category, stacklevel=2)
            return StatusRow()

        start_status(warn, Meeting.WARNING, self._name, self.mesh_axis, self._group)()

    def _complete_batch(self, tokens_or_batch: torch.Tensor | Batch) -> dict[str, Any]:
        """Return the whole batch after checks, with all entries that models need, padded."""
        is_tensor = isinstance(tokens_or_batch, torch.Tensor)
        batch = {"input_ids": tokens_or_batch, "labels": tokens_or_batch} if is_tensor else dict(tokens_or_batch)
        if batch.get("attention_mask") is None:
            batch.pop("attention_mask", None)
        self._check_entries(batch)
        padding = self._count_padding(_get_tokens(batch).shape[1])
        self._add_entries(batch, padding)
        if padding:
            self._pad_entries(batch, padding)
        return batch

    def _check_entries(self, batch: dict[str, Any]) -> None:
        """Refuse entries of wrong types, shapes or contents. ``document_ids`` of one row become [B, S]."""
        for name, x in batch.items():
            is_mask = name == "attention_mask"
            is_cut = is_mask or self._seq_dims.get(name) is not None
            if is_cut and x is not None and not isinstance(x, (torch.Tensor, Mapping) if is_mask else torch.Tensor):
                raise ValueError(
                    f'{self._name}: batch["{name}"] is a {type(x).__name__}, and must be a tensor'
                    f"{' or a dict of tensors' if is_mask else ''}: torch.tensor(...), where the batch is made"
                )
        tokens, labels, ids = _get_tokens(batch), batch.get("labels"), batch.get("document_ids")
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
            raise ValueError(
                f"{self._name}: the batch needs input_ids [B, S] or inputs_embeds, and has {list(batch)}. For a pair "
                '(x, y) of tokens and next tokens give {"input_ids": x, "shift_labels": y}'
            )
        rows, length = tokens.shape[:2]
        if labels is not None and (labels.ndim < 2 or labels.shape[1] != length):
            raise ValueError(
                f"{self._name}: labels of shape {tuple(labels.shape)} are not one for each of {length} tokens. The two "
                "sequences of an encoder and a decoder are a batch each: give decoder_input_ids as input_ids, with the "
                f"labels, to {self._name}(mesh, shift=False). For one label a sequence, apply "
                "BackboneContextParallel to the model, and give it the whole batch"
            )
        will_shift = self._shifted and batch.get("shift_labels") is None
        if labels is not None and will_shift and tokens.ndim == labels.ndim == 2:
            labelled = labels[:, :-1] >= 0  # some programs have -1 for no label
            # Labels may be next tokens and equal the tokens too, as in a batch of one repeated token. Shift those.
            if (labels[:, :-1] != tokens[:, :-1])[labelled].any() and (labels[:, :-1] == tokens[:, 1:])[labelled].all():
                raise ValueError(
                    f"{self._name}: labels are the next tokens already, and would be shifted once more. Cut them as "
                    f'they are: {{"input_ids": x, "shift_labels": labels.masked_fill(labels < 0, {IGNORE_INDEX})}}'
                )
        for name in ("labels", "shift_labels", *self._shifted[1:]):
            x = batch.get(name)
            if x is not None and not x.dtype.is_floating_point and bool(((x < 0) & (x != IGNORE_INDEX)).any()):
                raise ValueError(
                    f"{self._name}: {name} has values below 0 that are not {IGNORE_INDEX}, and they would count as "
                    f"classes: labels.masked_fill(labels < 0, {IGNORE_INDEX}) if they mean that there is no label"
                )
        self._check_tree(batch)
        if ids is not None:
            if not isinstance(ids, torch.Tensor) or ids.shape not in ((length,), (1, length), (rows, length)):
                shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
                raise ValueError(
                    f"{self._name}: document_ids of {shape} are not one for each token of {tuple(tokens.shape)}: give "
                    "[S] or [B, S]"
                )
            batch["document_ids"] = ids.expand(rows, length)

    def _check_tree(self, batch: dict[str, Any]) -> None:
        """Refuse a tree that is no Tree of this batch, and entries and arguments that do not go with one."""
        tree, length = batch.get("tree"), _get_tokens(batch).shape[1]
        if tree is None:
            batch.pop("tree", None)
            return
        if not isinstance(tree, Tree) or tree.length != length:
            raise ValueError(
                f'{self._name}: batch["tree"] is {tree!r}, and must be a Tree of the {length} tokens of a row, equal '
                "for all rows. Trees that differ by row: put them one after another into one row, as several roots"
            )
        if both := [name for name in ("document_ids", *self._shifted) if batch.get(name) is not None]:
            raise ValueError(
                f"{self._name}: the batch has a tree and {both}: leave them out. Documents are roots of the tree, and "
                "labels are made of labels, because a token before several branches predicts several tokens"
            )
        if not self._shifted and batch.get("labels") is not None:
            raise ValueError(
                f"{self._name}: shift=False and a tree with labels: leave shift= out, because a token before several "
                "branches predicts several tokens"
            )
        if len(self._shifted) > 1:
            raise ValueError(
                f"{self._name}: predicted={len(self._shifted)} and a tree: the token after the next differs by "
                "rollout, so leave predicted= out"
            )

    def _add_entries(self, batch: dict[str, Any], padding: int) -> None:
        """Add shifted labels, positions, and the mask of ``padding`` positions. Leave out a mask without a zero."""
        tokens, labels, ids = _get_tokens(batch), batch.get("labels"), batch.get("document_ids")
        rows, length = tokens.shape[:2]
        mask, tree = batch.get("attention_mask"), batch.get("tree")
        if tree is not None:
            if self._shifted and labels is not None:
                batch["shift_labels"] = labels  # cut where they are predicted
            if batch.get("position_ids") is None:
                batch["position_ids"] = tree.position_ids.to(tokens.device).expand(rows, -1)
        if self._shifted and labels is not None and batch.get("shift_labels") is None:
            for name in self._belong_to_labels or ():
                if isinstance(x := batch.get(name), torch.Tensor):
                    batch[name] = torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)
        for ahead, name in enumerate(self._shifted, 1):
            if labels is not None and batch.get(name) is None:
                batch[name] = next_token_labels(labels, document_ids=ids, shift=ahead, seq_dim=1)
        if batch.get("position_ids") is None:
            if mask is None and padding and ids is None:
                batch["attention_mask"] = torch.ones(rows, length, dtype=torch.int64, device=tokens.device)
            elif isinstance(mask, torch.Tensor) and mask.ndim == 2 and not padding and mask.all():
                del batch["attention_mask"]
            if ids is not None:
                batch["position_ids"] = document_positions(ids, seq_dim=1)
            elif self._positions is None:
                batch["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
            elif batch.get("input_ids") is None:
                raise ValueError(
                    f"{self._name}: positions= needs input_ids, and the batch has none: give it position_ids"
                )
            else:
                batch["position_ids"] = self._positions(tokens)

    def _count_padding(self, length: int) -> int:
        if isinstance(self._layout, SequenceLayout):
            return max(0, self._layout.length - length)
        return -length % self._multiple

    def _pad_entries(self, batch: dict[str, Any], padding: int) -> None:
        """Pad the entries that are cut, the mask and ``document_ids`` at their end."""
        mask, ids = batch.get("attention_mask"), batch.get("document_ids")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            kind = f"of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else "that is a dict"
            raise ValueError(
                f"{self._name}: an attention_mask {kind} cannot be padded: make it for the padded length, and pad the "
                "other entries too; or leave out pad_to_multiple_of"
            )
        dims = self._seq_dims | {"attention_mask": 1}
        fill = dict.fromkeys(("labels", "shift_labels", *self._shifted), IGNORE_INDEX) | {"input_ids": self._pad}
        if ids is not None:
            batch["document_ids"] = _pad_ids(ids, padding)
        if (tree := batch.get("tree")) is not None:
            batch["tree"] = Tree((*tree.lengths, padding), (*tree.parents, -1), tree.left)
        for name, x in batch.items():
            dim = dims.get(name)
            if not isinstance(x, torch.Tensor) or not x.ndim or dim is None:
                continue
            batch[name] = pad_at_end(name, x, dim, padding, fill.get(name, 0))
            if name == "position_ids":  # padding is a document of its own: no document of the batch goes on in it
                tail = batch[name].narrow(dim, -padding, padding)
                tail.copy_(torch.arange(padding, device=x.device).expand_as(tail))

    def _make_layout(self, length: int, ids_BS: torch.Tensor | None = None) -> SequenceLayout:
        if isinstance(self._layout, SequenceLayout):
            if length > self._layout.length:
                raise ValueError(
                    f"{self._name}: the layout cuts {self._layout.length} positions, the batch has {length} tokens: "
                    "give layout=head_tail, or a layout that is long enough for every batch"
                )
            # verify also runs the step on one rank, for which the layout of the user was not made.
            alone = state_of(self._group).get_or_create(Role).alone
            return contiguous(self._layout.length, 1) if alone else self._layout
        balancer: Any = self._layout
        if _needs_documents(balancer):
            sizes = (length,) if ids_BS is None else _document_sizes(self._name, ids_BS)
            balancer = partial(balancer, documents=sizes)
        return layout_made_by(balancer, length, self._group.size())

    def whole_of(self, part: torch.Tensor, batch: Batch, *, reduce_gradients: bool | None = None) -> torch.Tensor:
        """The whole result [B, S, ...] from each rank's ``part`` [B, L, ...]. ``batch`` is the whole batch.

        The result has no gradient, unless ``reduce_gradients`` is given: see :func:`~cp_styles.collectives.gather`.
        Communication: an all-gather of the parts; in a backward with ``reduce_gradients=True`` a reduce-scatter.
        """
        length = _get_tokens(batch).shape[1]
        ids, padding = batch.get("document_ids"), self._count_padding(length)
        if ids is not None and padding:
            ids = _pad_ids(ids, padding)
        layout = self._make_layout(length + padding, ids)
        part = part.detach() if reduce_gradients is None else part
        whole = gather(part, 1, self._group, reduce_gradients=bool(reduce_gradients), layout=layout)
        return whole.narrow(1, 0, length)


def _pad_ids(ids_BS: torch.Tensor, padding: int) -> torch.Tensor:
    """Ids of documents, with ``padding`` as a document of its own."""
    return pad_at_end("document_ids", ids_BS, -1, padding, int(ids_BS.max()) + 1)


def _needs_documents(balancer: Balancer) -> bool:
    """Whether a balancer takes the documents of a batch: the argument ``documents``, which is not bound."""
    try:
        documents = inspect.signature(balancer).parameters.get("documents")
    except (TypeError, ValueError):  # of a callable without a signature
        return False
    return documents is not None and documents.default is documents.empty


def _document_sizes(name: str, ids: torch.Tensor) -> tuple[int, ...]:
    rows = ids.expand(1, -1) if ids.ndim == 1 else ids
    if not bool((rows == rows[:1]).all()):
        raise ValueError(
            f"{name}: the layout takes the documents of the batch, and document_ids differ from row to row: pack all "
            "samples into one row, or give a layout without documents, such as head_tail"
        )
    documents = Documents.from_ids(rows[0])
    assert isinstance(documents, Documents)  # of one row
    return documents.lengths


def describe_content(value: Any) -> Any:
    """Describe an entry for comparison: contents of tensors, numbers and texts, nested too; types of other objects."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), checksum(value)
    if isinstance(value, Mapping):
        return sorted(((str(key), describe_content(item)) for key, item in value.items()), key=itemgetter(0))
    if isinstance(value, Mask):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [describe_content(item) for item in value]
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if hasattr(value, "__array_interface__"):  # NumPy
        with contextlib.suppress(TypeError, ValueError):  # torch refuses arrays of objects
            return describe_content(torch.as_tensor(value, device="cpu"))
    return type(value).__qualname__


def _get_tokens(batch: Batch) -> Any:
    return batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]


def _joins_matter(ids: torch.Tensor | None, labels: torch.Tensor | None) -> bool:
    """Whether a row has several documents with labels. Padding behind a document, with its own number, has none."""
    if ids is None:
        return False
    if labels is not None and labels.shape == ids.shape:
        labelled = labels != IGNORE_INDEX
        first, last = torch.where(labelled, ids, ids.amax()).amin(-1), torch.where(labelled, ids, ids.amin()).amax(-1)
        return bool((first < last).any())
    return bool((ids != ids[..., :1]).any())
