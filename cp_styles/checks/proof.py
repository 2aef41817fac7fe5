"""Whether a model was compared with one device: what surrounds its attention is known to be right, or it is said."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cp_styles._compat import callers
from cp_styles.comm.group_state import GroupState
from cp_styles.troubleshooting import see


class UnverifiedModelWarning(UserWarning):
    """A model has begun to train under context parallelism, and no step of it was compared with one device."""


@dataclass(eq=False)
class Proof:
    """Whether a step of a model was compared with one device by :func:`cp_styles.verify.verify`.

    Attributes:
        model: the model. (It holds its proof, by the table below.)
        verified: a comparison has found no difference, or a user says that one was made elsewhere.
        missed: the warning was given.
        losses: how many losses were made of it.
        reducer: the module around it that averages gradients (DDP), and the ranks over which it does.
    """

    model: ref[nn.Module]
    verified: bool = False
    missed: bool = False
    losses: int = 0
    reducer: tuple[str, Sequence[int]] = "", ()

    def forward_begins(self, state: GroupState) -> None:
        """A forward for a backward has begun over the group of ``state``: note who reduces its gradients."""
        state.training.add(self)
        for frame in callers():  # DDP registers nothing with the module that it wraps
            if frame.f_code is DistributedDataParallel.forward.__code__:
                module = frame.f_locals["self"]
                self.reducer = type(module).__name__, dist.get_process_group_ranks(module.process_group)

    def backward_begins(self, state: GroupState) -> None:
        """A backward of the model begins over the group of ``state``. Warn once if it was not proved, on rank 0."""
        if state.proofs is not None:
            state.proofs.add(self)
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


def proof_of(model: nn.Module) -> Proof:
    """The proof of a model: one for all styles in it."""
    proof = _proofs.get(model)
    return _proofs.setdefault(model, Proof(ref(model))) if proof is None else proof


_proofs: WeakKeyDictionary[nn.Module, Proof] = WeakKeyDictionary()
