"""Notes whether verify has compared a model with one device, and in which situations; warns about what it has not."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import ref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import version_of
from cp_styles._lib.compat import calling_frames, graph_task_id, tensors_in
from cp_styles._lib.introspect import input_names
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.group_state import Forwards, state_of
from cp_styles.comm.groups import world_group
from cp_styles.engine.observers import CheckedCall, Place


class UnverifiedModelWarning(UserWarning):
    """A model runs context parallel, for training or evaluation, but no step of it was compared with one device."""


class UnprovedPathWarning(UserWarning):
    """A model runs in a situation in which no step of it was compared with one device: another mode, mask or length."""


Fact: TypeAlias = tuple[str, str]
"""A clause with a place for names, and the name that belongs there."""


@dataclass(eq=False)
class Situations:
    """The situations in which a model has run.

    Attributes:
        facts: what was so, and what a warning was given of.
        lengths: the numbers of tokens of this rank's part in runs of verify, and of the sequences, which one rank ran.
        keys: attentions, and lengths, that need no second look.
    """

    facts: set[Fact] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    keys: set[Any] = field(default_factory=set)

    def judge(self, rows: int) -> Iterator[Fact]:
        """What distinguishes a part of so many tokens from all that were proved."""
        lengths = self.lengths or {rows}
        least, most, multiple = min(lengths), max(lengths), math.gcd(_BLOCK, *lengths)
        if rows > _FACTOR * most:
            yield f"a part more than {_FACTOR} times longer than the {{}} tokens that were proved", str(most)
        if _FACTOR * rows < least:
            yield f"a part more than {_FACTOR} times shorter than the {{}} tokens that were proved", str(least)
        if rows % multiple:
            yield "a part whose length is no multiple of {}, as all that were proved", str(multiple)


_FACTOR = 4  # code that depends on a length, such as a window, is likely to take another path beyond it
_BLOCK = 128  # code for blocks of tokens, such as pooled keys, fills them up or cuts them off at the end of a part


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
            :class:`~cp_styles.batch.averages.MeanByHand`.
        reduces: whether the backward of this forward reduces gradients: false for a forward in ``no_sync``.
        proved_in: the situations of the steps that were compared; None for ``verified=True``.
        forwards: the number of forwards for a backward, since the last one.
    """

    model: ref[nn.Module]
    verified: bool = False
    unseen: frozenset[str] = frozenset()
    missed: bool = False
    losses: int = 0
    reducer: ref[DistributedDataParallel] | None = None
    reduces: bool = False
    by_hand: Any = None
    proved_in: Situations | None = None
    forwards: int = 0
    _begun: int = 0
    _first: Place | None = None  # the attention with which these forwards begin
    _trained: ref[nn.Parameter] | None = None  # a parameter, and its version at the last backward
    _version: int = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> Proof:
        """The proof of the copy of the model; of the outermost copied module, if a part of the model is copied."""
        copied = memo.get(id(self.model())) or next((x for x in memo.values() if isinstance(x, nn.Module)), None)
        if copied is None:  # no module is copied
            return self
        proof = memo[id(self)] = proof_of(copied)
        proof.verified, proof.unseen = proof.verified or self.verified, self.unseen
        proof.proved_in = copy.deepcopy(self.proved_in, memo)
        return proof

    def proved(self, unseen: frozenset[str], situations: Situations | None) -> None:
        """A comparison has found no difference in ``situations``. ``unseen``: what it would not have shown, and earlier
        ones may have."""
        self.unseen = self.unseen & unseen if self.verified else unseen
        self.verified, self.forwards, self._first, self._begun = True, 0, None, 0
        if self.proved_in is None:
            self.proved_in = situations
        elif situations is not None:
            self.proved_in.facts |= situations.facts
            self.proved_in.lengths |= situations.lengths
            self.proved_in.keys.clear()

    def forward_begins(self, forwards: Forwards) -> None:
        """A forward with gradients has begun, one of ``forwards``: note which DDP module reduces them."""
        forwards.training[self] = None
        forwards.trained.add(self)
        self._begun += 1
        if self.proved_in is not None and not self._begun & (self._begun - 1):  # 1, 2, 4, 8, ...
            self.proved_in.keys.clear()
        if graph_task_id() >= 0:  # a checkpoint recomputes, outside of the DDP module
            return
        ddp = running_ddp()
        self.reducer = None if ddp is None else ref(ddp)
        self.reduces = ddp is not None and ddp.require_backward_grad_sync

    def attends(self, call: CheckedCall, place: Place, masks: frozenset[type], module_call: tuple[Any, ...]) -> None:
        """Warn once, on rank 0, of each fact that was not proved. In a run of verify, note the facts."""
        situations, model, query, new = self._situations, self.model(), call.tensors[0], list[Fact]()
        if model is None:
            return
        if not (self.verified or self.missed or call.trains) and next(model.parameters(), None) is not None:
            self.warn_if_unverified()
        if situations is None:
            return
        if call.trains and place[-1] and model.training:
            if self._first is None:
                self._first = place
                new += [_ACCUMULATES] if self._accumulates(model) else []
            self.forwards += place == self._first
        key = model.training, call.trains, query.dtype, masks
        if key not in situations.keys:
            situations.keys.add(key)
            kinds = "+".join(sorted(kind.__name__ for kind in masks)) or "no mask"
            new += [("attention in {}", str(query.dtype)), ("attention with {}", kinds), *_facts_of(model, module_call)]
        rows = query.shape[-2]
        if rows not in situations.keys:
            situations.keys.add(rows)
            if situations is self.proved_in:
                new += situations.judge(rows)
            else:  # verify runs
                situations.lengths.add(rows)
        if new:
            self._note(new)

    def _accumulates(self, model: nn.Module) -> bool:
        """Whether the model has gradients of an earlier backward, after which no optimizer has made a step."""
        parameter = self._trained and self._trained()
        if parameter is None or not parameter.requires_grad:
            parameter = next((x for x in model.parameters() if x.requires_grad), None)
            self._trained, self._version = None if parameter is None else ref(parameter), -1
        return parameter is not None and parameter.grad is not None and version_of(parameter) == self._version

    @property
    def _situations(self) -> Situations | None:
        """The situations to which facts are added now: of a run of verify, or of the steps that were proved."""
        in_step: StepProofs | None = state_of(world_group()).objects.get(StepProofs)
        return self.proved_in if in_step is None else in_step.setdefault(self, Situations())

    def _note(self, facts: Iterable[Fact]) -> None:
        """Add facts to the situations; warn of new ones, on rank 0, outside of a run of verify."""
        situations = self._situations
        if situations is None:
            return
        new = [fact for fact in facts if fact not in situations.facts]
        situations.facts.update(new)
        if new and situations is self.proved_in and dist.get_rank() == 0:
            warnings.warn(
                f"{type(self.model()).__name__} runs as no step of it was compared with one device: "
                f"{'; '.join(_describe(new))}. Code that depends on it may be wrong on a rank's part. Write on every "
                "rank, with a step that does it: verify(model, mesh, batch, step). It adds to what was proved"
                f"{see('A path that was not proved')}",
                UnprovedPathWarning,
                stacklevel=2,
            )

    def backward_begins(self, forwards: Forwards) -> None:
        """A backward of ``forwards`` of the model begins. Warn once if it was not proved, on rank 0."""
        forwards.training.pop(self, None)  # so that the next forward is noted, also without a loss of this package
        self.warn_if_unverified()
        if self._first is not None:
            self._note([_FORWARDS] if self.forwards > 1 else [])
            self.forwards, self._first = 0, None
            parameter = self._trained and self._trained()
            self._version = -1 if parameter is None else version_of(parameter)

    def warn_if_unverified(self) -> None:
        """Warn once, on rank 0, that the model trains without a proof. In a run of verify, register the model there."""
        in_step: StepProofs | None = state_of(world_group()).objects.get(StepProofs)
        if in_step is not None:
            in_step.setdefault(self, Situations())
        elif not (self.verified or self.missed):
            self.missed = True
            if dist.get_rank() == 0:
                warnings.warn(
                    f"{type(self.model()).__name__} runs context parallel, and no step of it was compared with one "
                    "device. Its attention is exact or an error, but code around it may count, pool or shift the "
                    "tokens of one rank alone. Before training write on every rank: verify(model, mesh, batch, step). "
                    "If a test does so, give the style or the block verified=True"
                    f"{see('A model that was never compared')}",
                    UnverifiedModelWarning,
                    stacklevel=2,
                )


class StepProofs(dict[Proof, Situations]):
    """The proofs of the models whose attention runs in the step of verify with all ranks, and in which situations."""


def _facts_of(model: nn.Module, module_call: tuple[Any, ...]) -> Iterator[Fact]:
    """The modes of modules, the parameters that are trained, and which arguments have tensors."""
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            yield f"{{}} in {'training' if module.training else 'eval'} mode", name or _WHOLE
    yield from (("gradients of {}", name) for name, x in model.named_parameters() if x.requires_grad)
    module, args, kwargs = module_call or (None, (), {})
    names = () if module is None else input_names(module)
    for name, x in {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}.items():
        yield f"{type(module).__name__}.forward {'with' if tensors_in(x) else 'without'} {{}}", name


_WHOLE = "the model"
_FORWARDS = "several forwards before a backward", ""
_ACCUMULATES = "a backward that adds to the gradients of an earlier one", ""


def _describe(facts: Iterable[Fact]) -> Iterator[str]:
    """Clauses for facts, each with all of its names."""
    names: dict[str, list[str]] = {}
    for clause, name in facts:
        names.setdefault(clause, []).append(name)
    for clause, named in names.items():
        named = [_WHOLE] if _WHOLE in named else named
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        yield clause.format(", ".join(named[:3]) + more)


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
