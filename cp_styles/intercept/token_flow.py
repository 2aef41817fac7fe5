"""Follows which token each value belongs to, beside the first run of a model: finds what mixes and counts tokens.

Under context parallelism a rank has a part of the tokens. What combines tokens by other means than attention calls
(a recurrence, a convolution, a norm over tokens, attention in plain operations) would combine those of this part only.
And what depends on the place of a token in this part (positions that count from 0) is that of another token.

[Note: token flow] A TorchDispatchMode sees each operator below autograd, hooks and modules. Beside the one run of the
model, it keeps for each tensor which tokens its elements were computed from (``token_rules.py``). It runs nothing of
the model again, and changes nothing that a model could notice. Values in which tokens were mixed are no mistake by
themselves: sums for a loss, statistics of a router. They are one where they reach the query, key or value of an
attention, or an output that still has tokens. What it does not know is never an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from enum import Enum
from functools import cached_property
from math import prod
from os.path import dirname, join
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import get_process_group_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles._compat import (
    MODULE_CALL,
    FakeTensor,
    StorageWeakRef,
    dispatch_modes,
    graph_task_id,
    group_of_op,
    running_modules,
    tensors_in,
    traces_here,
    without_dispatch_modes,
    without_function_modes,
)
from cp_styles.intercept.token_rules import (
    CLEAN,
    MEMORY,
    UNKNOWN,
    Label,
    LaidOut,
    NoRuleError,
    OpCall,
    Track,
    in_order,
    over,
    plain_name,
    varies,
)
from cp_styles.layout import cut_with
from cp_styles.troubleshooting import see


class Origin(NamedTuple):
    """A call of an operator: what it does, the user's line that made it, and the module that was running."""

    words: str
    line: str
    module: str
    outside: bool = False  # its result was computed by something that is no operator of torch's own


class _Caller(NamedTuple):
    """Who calls an operator: the nearest frame that is neither torch's nor this package's way from a user's code to
    torch; whether this package's engine does; and how many modules' calls are running."""

    frame: FrameType | None
    engine: bool
    modules: int


class TokenProblem(NamedTuple):
    """What is wrong with a value: ``kind`` is "mixed", "counted", "moved", "some", "across", "beside" or "pooled"."""

    kind: str
    where: Origin


class TokenFlow(TorchDispatchMode):
    """While it is entered, follows this rank's tokens from the tensors that were given to :meth:`seed`.

    See [Note: token flow].

    Args:
        length: the number of tokens of this rank's part; None for that of the first attention, or of the first tensor
            that a layout has cut, of which this is the part of this rank of ``group``.
        positions: returns, for this number of tokens, the positions that this rank's may have; the likely ones first.
            None: values that depend on places are not looked for, because each place is its own position.
        group: the ranks that share the sequence. What a model's own collectives over them make is not known.
        looks_at_readers: where there is no module whose outputs are given to :meth:`problem_of_outputs`: what code
            outside of all modules reads is such an output, as logits are that a loss reads, and what nothing has read
            at the end.
        axis: the dim of the tokens in inputs that no layout has cut.
        beside: a flow of the same inputs with another ``axis``, which is not entered; and it may have one. The first
            attention shows which of them is right, and only that is followed on.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        length: int | None,
        positions: Callable[[int], Iterable[torch.Tensor]] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        looks_at_readers: bool = False,
        axis: int = 1,
        beside: TokenFlow | None = None,
    ) -> None:
        super().__init__()
        self.axis, self._guessed = axis, beside is not None
        self.others: Sequence[TokenFlow] = () if beside is None else (beside, *beside.others)
        self.length, self._positions, self._group, self._looks_at_readers = length, positions, group, looks_at_readers
        self._storages: dict[StorageWeakRef, _Storage] = {}
        self._files: dict[str, _Kind] = {}
        self._modules: list[str] = [] if beside is None else beside._modules
        self._lengths: set[int] = set()  # of the sequences whose tokens are followed
        self._surely = looks_at_readers  # it is known which dim of the inputs was cut, and not guessed by their shapes
        self._batch: int | None = None  # the size of the first dim of what has this rank's tokens along another one
        self._paused = 0
        self._attended = False
        self._unseen: Origin | None = None  # an attention that was not intercepted
        self._around = len(running_modules()) if looks_at_readers else 0  # whose calls run already
        self._problem_of_reader: TokenProblem | None = None
        self._unread: dict[StorageWeakRef, TokenProblem] = {}  # of results that no operator has been given yet

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile compiles inside as it does without this mode

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if isinstance(exception[1], RuntimeError) and "already associated to a python object" in str(exception[1]):
            exception[1].add_note(_NO_SUBCLASS)

    @staticmethod
    def entered() -> TokenFlow | None:
        return next((mode for mode in reversed(dispatch_modes()) if isinstance(mode, TokenFlow)), None)

    @property
    def _running(self) -> str:
        return self._modules[-1] if self._modules else ""

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """While a module runs, for messages."""
        self._modules.append(module)
        try:
            yield
        finally:
            self._modules.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _choose(self, tensors: Sequence[torch.Tensor], dim: int) -> None:
        """Go on as the flow that has its tokens along ``dim`` in the first attention: if there is one, unmixed."""
        if self.others:

            def doubt(flow: TokenFlow) -> int:
                labels = [flow.label_of(x) for x in tensors]
                tracks = [(label.mixed, label.tokens) for label in labels if varies(label.tokens)]
                along = [mixed for mixed, tokens in tracks if tokens is not None and tokens.shape[dim] > 1]
                return int(None not in along) if along or any(label.spread for label in labels) else 2

            right = min((self, *self.others), key=doubt)
            self.others, self._guessed = (), doubt(right) > 0
            vars(self).update({name: getattr(right, name) for name in _OF_ONE_READING})
        self.length = tensors[0].shape[dim] if self.length is None else self.length

    # What tensors hold.

    def seed(self, tensors: Iterable[tuple[torch.Tensor, int | None]]) -> None:
        """Say that tensors hold this rank's tokens along a dim; None if it is not known what they hold."""
        with _unnoticed(), suppress(Exception):
            for tensor, dim in tensors:
                tokens = None if dim is None else in_order(tensor.shape[dim], tensor.ndim, dim % tensor.ndim)
                self._surely |= cut_with(tensor) is not None
                if dim is not None:
                    self._lengths.add(tensor.shape[dim])
                    rows = self._batch if tensor.ndim < 2 + tensor.is_floating_point() else tensor.shape[1]
                    self._batch = tensor.shape[0] if dim % tensor.ndim else rows
                self._write(tensor, UNKNOWN if tokens is None else Label(tokens))

    def label_of(self, tensor: torch.Tensor) -> Label:
        if not _is_plain(tensor):
            return UNKNOWN
        if not tensor.numel():
            return CLEAN
        storage = self._storages.get(_key(tensor))
        label = None if storage is None else storage.get(tensor)
        if (label is None or label.blank) and (cut := cut_with(tensor)) is not None:
            (layout, dim), length = cut, self.length
            if self._group is not None and self._group.rank() < layout.ranks:
                length = layout.lengths[self._group.rank()]
                self.length = self.length or length
                self._lengths.add(length)  # another sequence than that of the first one perhaps
                self._surely = True
            fits = tensor.shape[dim : dim + 1] == (length,)
            return Label(in_order(tensor.shape[dim], tensor.ndim, dim)) if fits else UNKNOWN
        if label is not None:
            return label
        if tensor.grad_fn is not None:  # a compiled graph has computed it, which was not seen
            return UNKNOWN
        return self._counted_outside(tensor) or CLEAN  # of parameters, buffers and constants

    def _counted_outside(self, tensor: torch.Tensor) -> Label | None:
        """Of the numbers of this rank's tokens from 0, as a list or numpy makes them."""
        length = self.length
        if self._positions is None or length is None or tensor.shape[-1:] != (length,) or tensor.dtype not in _INTEGERS:
            return None
        if not torch.equal(tensor.cpu().flatten(), torch.arange(tensor.numel(), dtype=tensor.dtype, device="cpu")):
            return None
        right = None if self._likely_positions is None else self._likely_positions.to(tensor).view_as(tensor)
        where = Origin(f"is given the numbers 0 to {length - 1}", "", self._running)
        return Label(places=in_order(length, tensor.ndim, tensor.ndim - 1), source=where, right=right)

    def _write(self, tensor: torch.Tensor, label: Label) -> None:
        """Of a tensor whose elements have changed."""
        if _is_plain(tensor) and tensor.numel():
            self._storages.setdefault(_key(tensor), _Storage()).write(tensor, _fitted(label, tensor))

    def _note(self, tensor: torch.Tensor, label: Label) -> None:
        """Of a new tensor, or a new view."""
        if _is_plain(tensor) and tensor.numel():
            self._storages.setdefault(_key(tensor), _Storage()).put(tensor, _fitted(label, tensor))

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(cls not in _PLAIN for cls in types):
            # Subclasses, such as DTensor, run operators on what is inside of them. Fake tensors, of a trace or of a
            # DTensor's rule that asks for a shape, leave that to their own mode, which has called this one.
            fake = traces_here() or any(issubclass(cls, FakeTensor) for cls in types)
            return func(*args, **kwargs) if fake else NotImplemented
        if self._paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        caller = self._caller()
        followed = caller.frame is not None and not caller.engine and graph_task_id() < 0
        if followed and torch.is_inference_mode_enabled():  # torch has not taken apart what consists of other operators
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        reads = self._looks_at_readers and followed and caller.modules <= self._around
        if reads:
            self._look_at_reading(func, (args, kwargs))
        # What calls operators without Python, such as TorchScript, passes no function modes, and shall not do so here.
        with without_function_modes() if func.namespace == "aten" else nullcontext():
            out = func(*args, **kwargs)
        with _unnoticed():
            for flow in (self, *self.others):
                try:
                    if followed:
                        flow._follow(func, args, kwargs, out, caller.frame)
                    else:
                        flow._lose(func, args, kwargs, out)
                except Exception:  # of any kind: the model must not notice
                    flow._lose(func, args, kwargs, out)
        if reads:
            self._look_at_reading(func, out)
        if self._looks_at_readers:
            with _unnoticed(), suppress(Exception):
                for x in tensors_in((args, kwargs)):
                    self._unread.pop(_key(x), None)
                for x in tensors_in(out) if followed else ():
                    problem = self._problem(x, None) if x.is_floating_point() else None
                    if problem is not None and problem.kind != "moved":
                        self._unread[_key(x)] = problem
        return out

    def _look_at_reading(self, func: Any, values: Any) -> None:
        with _unnoticed():
            problem = self.problem_of_outputs(values, surely_tokens=True)
        allowed = ("moved", "pooled") if func.namespace == "c10d" else ("moved",)  # to be summed over ranks
        if problem is not None and problem.kind not in allowed and self._problem_of_reader is None:
            self._problem_of_reader = problem  # an error inside of an operator would be TorchScript's, not ours

    def _caller(self) -> _Caller:
        user, modules, frame = None, 0, sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            kind = self._files.get(code.co_filename)
            if kind is None:
                kind = self._files[code.co_filename] = _kind(code.co_filename)
            if kind is _Kind.ENGINE:  # this package's own computations, and what users' masks and kernels do for it
                return _Caller(user, True, modules)
            if kind is _Kind.USER and user is None and code.co_name not in _MODES:
                user = frame
                if "async_compile" in frame.f_globals:  # a compiled graph, which shares memory as it likes
                    return _Caller(user, True, modules)
            modules += code is MODULE_CALL
            frame = frame.f_back
        return _Caller(user, False, modules)

    def _lose(self, func: Any, args: Any, kwargs: Any, out: Any, label: Label = UNKNOWN) -> None:
        """Say that it is not known what an operator has made: what it gives back, and what it may have written to."""
        tensors = tensors_in((args, kwargs))
        for tensor in _written(func, args, kwargs):
            self._write(tensor, label)
        if func.namespace != "aten":  # schemas of collectives and of other libraries do not always say what they write
            for tensor in tensors:
                self._is_written(tensor, label)
        for tensor in tensors_in(out):
            if _is_plain(tensor) and _key(tensor) not in self._storages:
                self._note(tensor, label)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, frame: FrameType | None) -> None:
        def where(words: str, *, outside: bool = False) -> Origin:
            assert frame is not None
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            return Origin(words, line, self._running or running_kind(), outside)

        name = plain_name(func)
        if name in _METADATA and func._schema.is_mutable:
            return None  # the same elements, and what they are is kept by element
        if name == "cp_styles::attention":  # in a compiled graph, by a JointLayout perhaps
            self._problem_of_reader = self._problem_of_reader or self._problem_before(args[:3], -2, joint=True)
            self._lose(func, args, kwargs, out)
            return self.attended(out[0], args[:3])
        length = None if self._positions is None else self.length
        written = list(_written(func, args, kwargs))
        for tensor in written:
            self._is_written(tensor)
        call = OpCall(func, args, kwargs, out, self.label_of, where, length, self._likely_positions)
        if self._joins_parts(func, args):  # a sum or a statistic of all ranks, such as a count of labels
            for tensor in call.tensors if func.namespace == "c10d" and "reduce" in name else ():
                self._write(tensor, UNKNOWN)
            return self._lose(func, args, kwargs, out)
        if func.namespace == "_c10d_functional" and name in ("all_reduce", "wait_tensor", "broadcast"):
            labels: Any = call.inputs[0]  # ranks of other axes hold the same tokens
        elif func.namespace == "aten" or call.has_rule:
            labels = call.labels()
        else:
            foreign = func.namespace not in _NAMESPACES_OF_TORCH
            takes_tokens = any(label.tokens is not None or label.mixed is not None for label in call.inputs)
            label = Label(mixed=where(func._schema.name, outside=True)) if foreign and takes_tokens else UNKNOWN
            return self._lose(func, args, kwargs, out, label)
        if call.is_attention and self._unseen is None:
            self._unseen = where(name)
        results = [x for x in tensors_in(out) if all(x is not y for y in written)]
        if name in MEMORY and results:
            for tensor in results:
                if _is_plain(tensor) and tensor.numel():
                    self._storages[_key(tensor)] = _Storage(where("", outside=True), zeros="zeros" in name)
            return None
        set_label = self._note if results else self._write
        if results:
            for tensor in written:  # statistics beside the results
                self._write(tensor, UNKNOWN)
        results = results or written
        labels = labels if isinstance(labels, list) else [labels] * len(results)
        for tensor, label in zip(results, labels, strict=False):
            label = _fitted(self._without_positions(tensor, label), tensor, call.lost)
            set_label(tensor, self._with_choice(call, tensor, label) if self._looks_at_readers else label)
        if len(self._storages) > _MOST_STORAGES:
            for ref in [ref for ref in self._storages if ref.expired()]:
                del self._storages[ref]
        return None

    def _joins_parts(self, func: Any, args: Any) -> bool:
        if self._group is None or func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return False
        group = group_of_op(args)
        if group is None:
            return False
        return len({*get_process_group_ranks(group)} & {*get_process_group_ranks(self._group)}) > 1

    def _is_written(self, tensor: torch.Tensor, label: Label | None = None) -> None:
        """Note that an operator writes to memory that was empty, or zeros, until now."""
        storage = self._storages.get(_key(tensor)) if _is_plain(tensor) and tensor.numel() else None
        if storage is not None and storage.maker is not None:
            storage.write(tensor, label or (CLEAN if storage.zeros else UNKNOWN))

    def _without_positions(self, tensor: torch.Tensor, label: Label) -> Label:
        """The label, without places if they have become this rank's positions: of a model that adds where it begins."""
        if label.places is None or tensor.numel() != self.length or tensor.is_floating_point() or tensor.is_complex():
            return label
        numbers = tensor.flatten().cpu().long()
        return CLEAN if any(torch.equal(numbers, positions) for positions in self._possible_positions()) else label

    def _with_choice(self, call: OpCall, x: torch.Tensor, label: Label) -> Label:
        """The label of a result, with the call if a module takes a token of each sequence by it."""
        if label.tokens is None or self._has_tokens(label, x):
            return label if label.chosen is None else replace(label, chosen=None)
        of_all, others = call.pairs[0], call.pairs[1:]
        if call.name not in _CHOOSING or not x.shape[:1] == of_all[0].shape[:1] == (self._batch,):
            return label
        # Rows by a mask are those of this rank whose labels count, say.
        by_mask = any(index.dtype == torch.bool or of_index.unknown for index, of_index in others)
        running = running_modules()
        asked_for = any(kwargs.get("logits_to_keep") for *_, kwargs in running)
        if by_mask or asked_for or len(running) <= self._around or not self._has_tokens(of_all[1], of_all[0]):
            return label
        return replace(label, chosen=call.where(call.name))

    @cached_property
    def _likely_positions(self) -> torch.Tensor | None:
        return next(self._possible_positions(), None)

    def _possible_positions(self) -> Iterator[torch.Tensor]:
        return iter(()) if self._positions is None or self.length is None else iter(self._positions(self.length))

    # Attention and outputs.

    def mixed_before(self, tensors: Iterable[torch.Tensor], dim: int = -2, *, joint: bool = False) -> str | None:
        """What is wrong with the inputs of an attention or a mixer, whose tokens are along ``dim``, in words."""
        problem = self._problem_before(tuple(tensors), dim, joint=joint)
        return None if problem is None else self.words(problem)

    def _problem_before(self, tensors: Sequence[torch.Tensor], dim: int, *, joint: bool) -> TokenProblem | None:
        if self._paused:
            return None
        with _unnoticed():
            self._choose(tensors, dim)
            problems = [self._problem(x, dim % x.ndim) or (None if joint else self._beside(x, dim)) for x in tensors]
        return next((problem for problem in problems if problem is not None), None)

    def _beside(self, x: torch.Tensor, dim: int) -> TokenProblem | None:
        tokens, more = self.label_of(x).tokens, x.shape[dim] - (self.length or x.shape[dim])
        if tokens is None or more <= 0 or tokens.shape[dim] == 1 or not bool((tokens == -1).any()):
            return None
        return TokenProblem("beside", Origin(f"{more}", "", self._running))

    def attended(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = -2) -> None:
        if self._paused:
            return
        with _unnoticed(), suppress(Exception):
            for x in tensors:
                if self.label_of(x).blank and x.shape[dim] == self.length:
                    self._write(x, Label(in_order(x.shape[dim], x.ndim, dim % x.ndim)))
            q = tensors[0]
            tokens, lost = over(self.label_of(q).tokens, [-1])
            if tokens is None and out.shape[dim] == self.length:
                tokens = in_order(out.shape[dim], out.ndim, dim % out.ndim)
            self._attended |= tokens is not None
            self._write(out, UNKNOWN if tokens is None or lost else Label(tokens))

    def problem_of_outputs(self, outputs: Any, *, surely_tokens: bool) -> TokenProblem | None:
        # Without an attention over the tokens that were given to seed, only a caller may be sure that they are tokens.
        if self._problem_of_reader is not None:
            return self._problem_of_reader
        if self._unseen is not None:
            return TokenProblem("mixed", self._unseen)  # wherever its result is used
        if not self._attended and not surely_tokens:
            return None
        tensors = [x for x in tensors_in(outputs) if x.is_floating_point() or x.is_complex()]
        with _unnoticed():
            problems = [self._problem(x, None) for x in tensors]
            if not any(self._has_tokens(self.label_of(x), x) for x in tensors):  # beside tokens it may be of no use
                problems += map(self._pooled, tensors)
            return next((problem for problem in problems if problem is not None), None)

    def _pooled(self, x: torch.Tensor) -> TokenProblem | None:
        """What is wrong with a result that has a row for each sequence, and no tokens; or a loss made of such rows."""
        label = self.label_of(x)
        chosen = label.chosen  # by a slice perhaps for one chunk of a loss, which are added up
        if chosen is not None and (label.mixed is None or chosen.words not in ("select", "slice")):
            return TokenProblem("pooled", chosen._replace(words=""))
        if not x.ndim or x.shape[0] != self._batch:
            return None
        if label.mixed is not None:
            # Outside of modules it is a loss. The sums of all ranks may be what a program adds up.
            is_loss = self._looks_at_readers and not label.mixed.module
            is_loss |= x.ndim == 1 and label.mixed.words == "sum"
            return None if is_loss else TokenProblem("pooled", label.mixed)
        if label.tokens is None or x.ndim == 1 or self._looks_at_readers:
            return None
        return TokenProblem("pooled", Origin("", "", self._running))

    def problem_of_unread(self) -> TokenProblem | None:
        return next((problem for storage, problem in self._unread.items() if not storage.expired()), None)

    def _problem(self, x: torch.Tensor, dim: int | None) -> TokenProblem | None:
        """``dim``: that of the tokens in an attention. None: for an output, the dim that the label has."""
        with suppress(Exception):  # of any kind: what is not known is no error
            return self._problem_of(self.label_of(x), x, dim)
        return None

    def _problem_of(self, label: Label, x: torch.Tensor, dim: int | None) -> TokenProblem | None:
        tokens = label.tokens
        if dim is None:
            along = label.spread or self._has_tokens(label, x)
        else:
            # A multiple: of frames that were cut, each may have several patches.
            whole = bool(self.length) and x.shape[dim] % self.length == 0
            along = label.spread or whole or (tokens is not None and tokens.shape[dim] > 1)
            asked = self._surely and label.mixed is None and tokens is not None
            if asked and varies(tokens) and not over(tokens, [dim])[1]:
                if dim == x.ndim - 2 and over(tokens, [-1])[1]:
                    return TokenProblem("mixed", Origin("the product of query and key", "", self._running))
                return TokenProblem("across", Origin("", "", self._running))
        if not along:
            return None
        if label.mixed is not None:
            return TokenProblem("mixed", label.mixed)
        if label.counted is not None:
            return TokenProblem("counted", label.counted)
        if dim is not None and label.places is not None and self._is_in_order(label.places, dim):
            right = label.right is not None and torch.equal(x, label.right)
            return None if right else TokenProblem("counted", label.source)
        varies_along = dim is not None and tokens is not None and tokens.shape[dim] > 1
        if dim is not None and varies_along and x.shape[dim] < (self.length or 0) and x.shape[dim] not in self._lengths:
            return TokenProblem("some", Origin(f"{x.shape[dim]}", "", self._running))
        dims = [] if tokens is None else [axis for axis, size in enumerate(tokens.shape) if size > 1]
        if tokens is not None and len(dims) == 1 and dim in (None, dims[0]) and x.shape[dims[0]] == self.length:
            problem = TokenProblem("moved", Origin("", "", self._running))
            return None if self._is_in_order(tokens, dims[0]) else problem
        return None

    def _has_tokens(self, label: Label, x: torch.Tensor) -> bool:
        if label.mixed is not None and x.ndim > 2 and x.shape[1] == self.length:
            return True
        return any(self._is_along(label.tokens, x, dim) for dim in range(x.ndim))

    def _is_along(self, tokens: Track, x: torch.Tensor, dim: int) -> bool:
        """Whether a dim of a result may be that of the tokens, flattened with others perhaps."""
        if tokens is None or tokens.shape[dim] < 2 or not self.length or x.shape[dim] % self.length:
            return False
        return bool((tokens != tokens.narrow(dim, 0, 1)).any())

    def _is_in_order(self, track: torch.Tensor, dim: int) -> bool:
        length = track.shape[dim]
        return length == self.length and bool(((track == in_order(length, track.ndim, dim)) | (track < 0)).all())

    def words(self, problem: TokenProblem) -> str:
        words, line, module, outside = problem.where
        module, at = module or "the model", f" at {line}" if line else ""
        if problem.kind == "counted":
            return (
                f"{module} {words}{at}, and takes no positions there: it counts this rank's tokens as if they were the "
                "first ones. Give it positions (batch.positions, or layout.positions(rank)) and use them in "
                "this line, table[:, positions] for example; or, for a model that takes positions, pass them; or hand "
                "them to its module of positions by a forward pre-hook (Bart, Marian, Pegasus); or, in a "
                "context_parallel block, name the table in its buffers; or, in a loop that samples, call a copy "
                "without the style; or apply the style with check_inputs=False if these are not "
                f"positions{see('Positions that count from 0')}"
            )
        if words in ("gather", "index") or words.startswith("nll_loss"):
            return (
                f"{module} takes by {words}{at} what ids or labels of other tokens choose for this rank's tokens: they "
                "were shifted after the cut, and the last token of each piece gets a wrong one. Take labels that were "
                'shifted before it, batch = BatchSharder(mesh)(tokens) with batch.loss(logits), batch["shift_labels"]; '
                "or next_token_labels of whole tokens, which are then cut; or shift by context_roll of "
                f"cp_styles.mixers{see('Labels inside a model')}"
            )
        if problem.kind == "pooled":
            how = f"made by {words}{at} of several of them" if words else f"which it has chosen{at}"
            return (
                f"{module} returns results that are not one for each of this rank's {self.length} tokens, but {how}: "
                "it has pooled them, and the result is another one on each rank. Gather the hidden states of all ranks "
                "(cp_styles.collectives.gather with reduce_gradients=True), pool or choose of those, and divide the "
                f"loss by the number of ranks{see('A classifier that pools tokens')}"
            )
        if problem.kind == "across":
            return (
                f"{module} calls attention, or another mixer, along a dim that is not that of this rank's {self.length}"
                " tokens, and would join it over the ranks. Apply ModuleContextParallel to the modules alone whose "
                "attention is along the sequence, also in place of a context_parallel block; others stay as they are"
                f"{see('Attention that is not along the sequence')}"
            )
        if problem.kind == "beside":
            return (
                f"{module} gives {words} more rows to an attention than this rank's {self.length} tokens, not made of "
                "them, such as learned ones or padding: they would count once for each rank. Those that query, key and "
                "value have at their beginning or end, the same on all ranks, need layout=JointLayout(prefix=...), or "
                f"suffix=, of cp_styles.joint_layout{see('Tokens that every rank has')}"
            )
        if problem.kind == "some":
            how = f"it gives {words} of this rank's {self.length} tokens to an attention, which would be the first ones"
        elif problem.kind == "moved":
            how = "what it gives to an attention, or returns, is not in the order of the tokens"
        elif outside:
            which = "which is no operator of torch's own (Triton, or another library's)"
            which = "of which there is no rule" if words.startswith("aten::") else which
            how = (
                f"values{at} were computed by {words or 'a kernel'}, {which}: what it makes of tokens is not known. "
                "Name the module in trusted= if it works on each token alone, as norms and activations do (rotary ones "
                "too, if they are given this rank's positions; with an offset in their place, layout=contiguous and "
                "layout.positions(rank)[0]); or"
            )
        elif "attention" in words:
            how = (
                f"the attention {words}{at} was not intercepted, and saw this rank's part alone: TorchScript calls "
                "operators without Python. Do not use torch.jit.script and torch.jit.trace, or use torch.compile. Or"
            )
        else:
            how = f"{words}{at} computes values from several of this rank's {self.length} tokens"
        other_dim = _OF_ANOTHER_DIM.format(self.axis) if self._guessed else ""
        return (
            f"{module} carries values from token to token without an attention call: {how}. A recurrence, a "
            "convolution along the sequence, linear attention, attention in plain operations, or a norm over tokens "
            "would end at this rank's part. It is not context parallel: call scaled_dot_product_attention for "
            'attention (models of transformers do with attn_implementation="sdpa" or register_attention()), '
            "the functions of cp_styles.mixers for recurrences and causal convolutions whose kernel is a function, "
            "keep other such layers out of the model, or name the module in trusted= of the style if what "
            f"it mixes is whole on each rank{other_dim}{see('A layer that mixes tokens')}"
        )


@contextmanager
def _unnoticed() -> Iterator[None]:
    with without_dispatch_modes(), without_function_modes():
        yield


class _Storage:
    """What is known of the elements of a tensor's memory, by the views of it."""

    def __init__(self, maker: Origin | None = None, *, zeros: bool = False) -> None:
        self.maker, self.zeros = maker, zeros  # the call, until an operator writes to the memory
        self._labels: dict[Any, Label] = {}
        self._flat: Label | None = None  # of all elements, after some of them were changed
        self._tracks: dict[str, LaidOut] = {}
        self._flat_itemsize = 0

    def get(self, tensor: torch.Tensor) -> Label | None:
        if self.maker is not None:  # then values come from something else than torch's operators
            return CLEAN if self.zeros and not bool(tensor.any()) else Label(mixed=self.maker)
        place = _place(tensor)
        label = self._labels.get(place)
        if label is None and (self._labels or self._flat is not None):
            try:
                flat, tracks = self._laid_out(tensor)
                label = replace(flat, **{name: track.read(*place[:3]) for name, track in tracks.items()})
            except NoRuleError:
                label = _LOST_WRITE
            self._labels[place] = label
        return label

    def put(self, tensor: torch.Tensor, label: Label) -> None:
        if self.maker is None:
            self._labels[_place(tensor)] = label

    def write(self, tensor: torch.Tensor, label: Label) -> None:
        place = _place(tensor)
        if self.maker is not None:
            self._labels, self.maker = {} if self.zeros else {place: UNKNOWN}, None
        if tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
            old = list(self._labels.values())
            if label is CLEAN and self._flat is None and all(one is CLEAN for one in old):
                return
            try:
                self._flat, self._tracks = self._laid_out(tensor, label)
                for name in ("tokens", "places") if not self._flat.unknown else ():
                    if (new := getattr(label, name)) is not None or name in self._tracks:
                        self._tracks.setdefault(name, LaidOut(_elements(tensor))).write(*place[:3], new)
            except NoRuleError:
                self._flat, self._tracks = _LOST_WRITE, {}
            self._labels = {}
        else:
            self._flat, self._tracks, self._labels = None, {}, {place: label}

    def _laid_out(self, tensor: torch.Tensor, also: Label = CLEAN) -> tuple[Label, dict[str, LaidOut]]:
        """The label of all elements, without tracks; and these, which belong to this object."""
        labels = [*self._labels.values(), also] + ([] if self._flat is None else [self._flat])
        flags: dict[str, Any] = {
            name: next((x for part in labels if (x := getattr(part, name)) is not None), None)
            for name in ("source", "mixed", "counted", "chosen")
        }
        flags["spread"] = any(part.spread for part in labels)
        if self._flat is not None and self._flat_itemsize == tensor.element_size():
            return replace(self._flat, **flags, unknown=self._flat.unknown or also.unknown), self._tracks
        sizes = {place: label for place, label in self._labels.items() if place[3] == tensor.element_size()}
        if (self._labels and not sizes) or self._flat is not None:
            if "tokens" in self._tracks or any(label.tokens is not None for label in labels):
                raise NoRuleError
            return Label(**flags, unknown=True), {}
        self._flat_itemsize = tensor.element_size()
        if not sizes:
            return Label(**flags, unknown=also.unknown), {}
        place, label = max(sizes.items(), key=lambda entry: prod(entry[0][0]))
        tracks = {}
        for name in ("tokens", "places"):
            if (track := getattr(label, name)) is not None:
                tracks[name] = LaidOut(_elements(tensor))
                tracks[name].write(*place[:3], track)
        return Label(**flags, unknown=label.unknown or also.unknown), tracks


def _place(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int, int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size()


def _elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _fitted(label: Label, tensor: torch.Tensor, otherwise: Callable[[], Label] = lambda: UNKNOWN) -> Label:
    """With tracks of as many dims as the tensor has; not known if they do not fit."""

    def fit(track: torch.Tensor) -> torch.Tensor:
        track = track.reshape([1] * (tensor.ndim - track.ndim) + list(track.shape))
        if any(size not in (1, whole) for size, whole in zip(track.shape, tensor.shape, strict=True)):
            raise ValueError
        return track

    if label.tokens is None and label.places is None:
        return label
    try:
        return replace(label.moved(fit), right=label.right)
    except (ValueError, RuntimeError):
        mixed = label.mixed or otherwise().mixed
        return Label(mixed=mixed, spread=label.spread, counted=label.counted, unknown=True)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


_OF_ONE_READING = ("length", "axis", "_positions", "_likely_positions", "_storages", "_lengths", "_batch", "_unseen")
_OF_ANOTHER_DIM = (
    ". If the tokens of the model's inputs are not along dim {} of each, cut all inputs by layout.shard(x, dim, rank) "
    "and pass what it returns, which remembers the dim"
)
# Of memory of which so small parts were written that it is not known any more what it holds.
_LOST_WRITE = Label(mixed=Origin("aten::copy_", "", "", outside=True))
_NO_SUBCLASS = (
    "cp_styles: the first forward, or the first context_parallel block, runs under a TorchDispatchMode, which follows "
    "its tokens. Under any such mode torch cannot make an object of a subclass of Tensor by its constructor, as "
    "causal_upper_left does: make it before the forward; or pass is_causal=True to the attention"
)
# Change where a tensor's elements are, and not what they are.
_METADATA = frozenset(
    ("transpose", "t", "squeeze", "unsqueeze", "swapaxes", "swapdims", "as_strided", "detach", "requires_grad")
)
# Of operators that other libraries define, it is not known what they make of tokens. Of torch's own, some are lost too.
_NAMESPACES_OF_TORCH = frozenset(
    (
        *("aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"),
        *("symm_mem", "inductor", "profiler", "quantized", "_quantized", "onednn", "mkldnn", "mkl", "sparse"),
        "cp_styles",
    )
)
_CHOOSING = frozenset(("select", "slice", "index", "gather", "index_select"))
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_MODES = ("__torch_function__", "__torch_dispatch__")
_MOST_STORAGES = 1 << 14
_TORCH = dirname(torch.__file__)
_PACKAGE = dirname(dirname(__file__))
# This package's own computations. Other code of it passes on what a user's code does.
_ENGINE = tuple(
    join(_PACKAGE, name)
    for name in (
        "engine",
        "functions",
        "mixers",
        "strategies",
        "kernels",
        "collectives",
        "comm",
        "plan",
        "mask",
        "layout.py",
        "batch.py",
    )
)


class _Kind(Enum):
    TORCH, ENGINE, PACKAGE, USER = range(4)


def _kind(file: str) -> _Kind:
    if file.startswith(_TORCH):
        return _Kind.TORCH
    if file.startswith(_PACKAGE):
        return _Kind.ENGINE if file.startswith(_ENGINE) else _Kind.PACKAGE
    return _Kind.USER


def running_kind() -> str:
    """The class of the innermost module that runs, for messages where no module was named."""
    running = running_modules()
    return type(running[0][0]).__name__ if running else ""
