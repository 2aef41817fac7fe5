"""Notes whether verify has compared a model with one device, and warns before the training of other models."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cp_styles._compat import calling_frames, graph_task_id
from cp_styles.bounded_cache import facts_about
from cp_styles.comm.group_state import GroupState, state_of
from cp_styles.comm.groups import world_group
from cp_styles.troubleshooting import see


class UnverifiedModelWarning(UserWarning):
    """A model has begun to train under context parallelism, but no step of it was compared with one device."""


@dataclass(eq=False)
class Proof:
    """Whether a step of a model was compared with one device by :func:`cp_styles.verify.verify`.

    Attributes:
        model: the model.
        verified: whether a comparison has found no difference, or the user gave ``verified=True``.
        unseen: what a mean of the ranks' means may be of, and no comparison would have shown it: its step made no loss
            of this package, and the ranks had equally many tokens, or labels.
        missed: whether the warning was given.
        losses: the number of losses that were made of it.
        reducer: the DDP module that ran the last forward, if there was one.
        by_hand: of the latest loss, if the program must average its gradients further:
            :class:`~cp_styles.batch.MeanByHand`.
        reduces: whether the backward of this forward reduces gradients: false for a forward in ``no_sync``.
    """

    model: ref[nn.Module]
    verified: bool = False
    unseen: frozenset[str] = frozenset()
    missed: bool = False
    losses: int = 0
    reducer: ref[DistributedDataParallel] | None = None
    reduces: bool = False
    by_hand: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Proof:
        """The proof of the copy of the model; of the outermost copied module, if a part of the model is copied."""
        copied = memo.get(id(self.model())) or next((x for x in memo.values() if isinstance(x, nn.Module)), None)
        if copied is None:  # no module is copied
            return self
        proof = memo[id(self)] = proof_of(copied)
        proof.verified, proof.unseen = proof.verified or self.verified, self.unseen
        return proof

    def proved(self, unseen: frozenset[str]) -> None:
        """A comparison has found no difference. ``unseen``: what it would not have shown, and earlier ones may have."""
        self.unseen = self.unseen & unseen if self.verified else unseen
        self.verified = True

    def forward_begins(self, state: GroupState) -> None:
        """A forward with gradients has begun over the group of ``state``: note which DDP module reduces them."""
        state.training[self] = None
        state.trained.add(self)
        if graph_task_id() >= 0:  # a checkpoint recomputes, outside of the DDP module
            return
        ddp = running_ddp()
        self.reducer, self.reduces = (
            None if ddp is None else ref(ddp),
            ddp is not None and ddp.require_backward_grad_sync,
        )

    def backward_begins(self, state: GroupState) -> None:
        """A backward of the model begins over the group of ``state``. Warn once if it was not proved, on rank 0."""
        state.training.pop(self, None)  # so that the next forward is noted, also without a loss of this package
        self.warn_if_unverified()

    def warn_if_unverified(self) -> None:
        """Warn once, on rank 0, that the model trains without a proof. In a run of verify, register the model there."""
        notes: StepNotes | None = state_of(world_group()).notes
        if notes is not None:
            notes.proofs.add(self)
        elif not (self.verified or self.missed):
            self.missed = True
            if dist.get_rank() == 0:
                warnings.warn(
                    f"{type(self.model()).__name__} begins to train, and no step of it was compared with one device. "
                    "Its attention is exact or an error, but code around it may count, pool or shift the tokens of one "
                    "rank alone. Before training write on every rank: verify(model, mesh, batch, step). If a test does "
                    f"so, give the style or the block verified=True{see('A model that was never compared')}",
                    UnverifiedModelWarning,
                    stacklevel=2,
                )


@dataclass(eq=False)
class StepNotes:
    """Notes for :func:`cp_styles.verify.verify` on this rank's part of the step with all ranks.

    Attributes:
        proofs: of the models that run a backward.
        labels: of each batch that is cut, how many of this rank's tokens have a label.
        losses: the ranks and the token count of each global loss, and None for the count of a function from which a
            user may compute a loss: see :func:`~cp_styles.batch.note_loss`.
    """

    proofs: set[Proof] = field(default_factory=set)
    labels: list[int] = field(default_factory=list)
    losses: list[tuple[list[int], float | None]] = field(default_factory=list)


def running_ddp() -> DistributedDataParallel | None:
    """The DDP module whose forward runs."""
    for frame in calling_frames():  # the module that DDP wraps has no reference to it
        if frame.f_code is DistributedDataParallel.forward.__code__:
            return frame.f_locals["self"]
    return None


def proof_of(model: nn.Module) -> Proof:
    """The proof of a model: one for all styles in it."""
    facts = facts_about(model)
    return facts.get(Proof) or facts.setdefault(Proof, Proof(ref(model)))
