"""The context_parallel block: it cuts buffers in place and runs this thread's attention calls on the engine.

A checkpoint that runs a function again, possibly after the block, enters the block again: see [Note: reruns] in
function_mode.py. In a block this also holds for functions without attention that use a cut buffer.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles._lib.compat import (
    never_compile_alone,
    running_modules,
    torch_balances_load,
    uncompiled,
    without_dispatch_modes,
)
from cp_styles._lib.introspect import input_names, is_model
from cp_styles._lib.troubleshooting import see
from cp_styles.checks import Proof, observers_of, proof_of
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts, tell_peers
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import axis_and_group
from cp_styles.engine.binding import Binding, ForwardState, binding_of_call
from cp_styles.engine.scope import Opening, innermost
from cp_styles.intercept.function_mode import AttentionCalls, ForwardObserver
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout, contiguous, head_tail
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.layouts.layout import find_cut
from cp_styles.masks import Full, Mask
from cp_styles.strategies import AllGather, Strategy
from cp_styles.torch_api.buffers import Aliases, CutBuffer, check_buffer, normalize_dim

_uncompiled = partial(
    uncompiled,
    reason="a context_parallel block cuts tensors in place and communicates, which cannot be in a graph of "
    "torch.compile: compile what is called inside the block, for example the model, or leave fullgraph=True out",
)


class context_parallel(contextlib.ContextDecorator):
    """A block in which ``buffers`` are this rank's parts, and attention runs over the whole sequence.

    The first four arguments are the arguments of torch's ``context_parallel``, with the same effect on the buffers. In
    addition to torch's block it supports:

    - any length and number of ranks; parts may then differ by one token;
    - buffers of one dim, buffers that require grad (``.grad`` is the gradient of the part), views, no buffers;
    - causal and full attention, any float dtype;
    - nested blocks (attention runs in the innermost one), and exceptions;
    - a backward inside the block, after it, or while other blocks are open.

    Args:
        mesh: the ranks that share the sequence: 1-D, such as ``mesh["cp"]`` of a composed mesh.
        buffers: tensors with a sequence dim, whole and the same on every rank. All must have the same length (give the
            model a copy of the first rows of a longer table, and pass that), unless ``layout`` is a function, which
            cuts each length by itself (cross-attention).
        buffer_seq_dims: the sequence dim of each buffer.
        no_restore_buffers: buffers that may stay cut after the block.
        strategy: how keys and values get to the queries. Default: see :func:`set_rotate_method`.
        layout: how the sequence is cut. Default: ``head_tail`` for the length of the buffers, or ``contiguous`` where
            torch's ``_cp_options.enable_load_balance`` is False; attention over another length is then refused. A
            function takes any length. Without buffers, the parts that you cut yourself must be the parts of this
            layout, which cannot be checked.
        mask: which keys each query attends to, in addition to ``is_causal`` of the calls; in global positions.
        kernel: computes the tiles.
        checks: what the ranks check of each other and of the arguments of models: :class:`~cp_styles.Checks`.
        verified: whether a step of the models inside is compared with one device elsewhere, in a test for example.
            Without it, and without :func:`~cp_styles.verify.verify`, a model in a block warns
            (``UnverifiedModelWarning``).

    It may be entered again after it has ended.

    Communication: at entry, if there are buffers, one agreement of the ranks (:class:`~cp_styles.Checks`). Cutting and
    restoring send nothing.

    Raises:
        ValueError: at entry, on every rank, for a composed mesh; for numbers of dims and of buffers that differ; for
            buffers of different lengths; for a buffer that is already cut, that is the result of a computation which
            requires grad, or whose ``.grad`` does not have the shape of the part.
        TypeError: at entry, on every rank, for parameters, and for objects that are not plain tensors.

    For the errors of attention calls see :class:`~cp_styles.styles.ModuleContextParallel`.

    Example::

        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            assert tokens.shape[1] == 500  # of 1000
            out = attend(*qkv_of(tokens))
        assert tokens.shape[1] == 1000
    """

    @_uncompiled
    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[torch.Tensor] | None = None,
        strategy: Strategy | None = None,
        layout: SequenceLayout | Balancer | None = None,
        mask: Mask | None = None,
        kernel: Kernel | None = None,
        checks: Checks = CHECKS,
        verified: bool = False,
    ) -> None:
        self._verified = verified
        self._axis, self._group = axis_and_group("context_parallel", mesh)
        self._mesh = mesh
        self._buffers = [] if buffers is None else buffers
        self._seq_dims = [] if buffer_seq_dims is None else buffer_seq_dims
        self._no_restore = [] if no_restore_buffers is None else list(no_restore_buffers)
        self._strategy, self._layout, self._mask, self._kernel = strategy, layout, mask, kernel
        self._checks = checks
        self._balancer = head_tail
        self._entered: list[tuple[_BlockEntry, contextlib.ExitStack]] = []

    @_uncompiled
    def __enter__(self) -> context_parallel:
        state_of(self._group).turn.begin()
        with torch.no_grad():
            if isinstance(self._buffers, Sequence) and not self._buffers:
                # Nothing is cut, and each attention compares the remaining arguments.
                try:
                    with without_dispatch_modes():
                        entry = self._make_entry()
                except Exception as error:
                    tell_peers("context_parallel", self._group, error)
                    raise
            else:
                entry = check_on_ranks(
                    "context_parallel", self._axis, self._group, self._make_entry, self._describe_buffers
                )
        with contextlib.ExitStack() as stack:
            stack.callback(last_layout.set, (list_ranks(self._group), self._balancer if self._layout is None else None))
            stack.enter_context(entry.enter())
            entry.open_in(_open)
            stack.callback(entry.end)
            self._entered.append((entry, stack.pop_all()))
        return self

    @_uncompiled
    def __exit__(self, *exception: Any) -> None:
        entry, stack = self._entered.pop()
        stack.__exit__(*exception)
        if exception[1] is not None:
            tell_peers(entry.name, self._group, exception[1])
            return
        for part in entry.parts.values():
            if part.restored and part.buffer.grad_fn is not None:
                raise RuntimeError(
                    f"a buffer of shape {tuple(part.buffer.shape)}, a view, was changed in place by a computation with "
                    "gradient inside the block. Its values are restored, but its autograd graph cannot be: compute out "
                    "of place, pass a clone of the view, or put it in no_restore_buffers"
                )

    @property
    def layout(self) -> SequenceLayout | Balancer:
        """The layout while the block is entered. Without buffers: the balancer, which cuts any length."""
        return self._current_entry.layout

    @property
    def strategy(self) -> Strategy:
        """The strategy while the block is entered."""
        return self._current_entry.strategy

    @property
    def _current_entry(self) -> _BlockEntry:
        if not self._entered:
            raise RuntimeError("a context_parallel block has a layout and a strategy only while it is entered")
        return self._entered[-1][0]

    def _make_entry(self) -> _BlockEntry:
        """Check everything, before anything is changed."""
        cut_buffers, pairs = pair_buffers(self._buffers, self._seq_dims), []
        for buffer in self._no_restore:
            if all(buffer is not other for other, _ in cut_buffers):
                raise ValueError("no_restore_buffers must be a subset of buffers, the same tensor objects")
        for buffer, dim in cut_buffers:
            check_buffer(buffer)
            pairs.append((buffer, normalize_dim(buffer, dim)))
            self._refuse_part(*pairs[-1])
        layout = self._layout
        if layout is None:
            self._balancer = head_tail if torch_balances_load() else contiguous
            layout = self._default_layout(pairs)
        strategy = rotation.get() if self._strategy is None else self._strategy
        name, how = f"context_parallel (over mesh axis {self._axis!r})", (strategy, layout, self._mask or Full())
        binding = binding_of_call(name, self._mesh, *how, self._kernel, checks=self._checks)
        fixed_layout = None if self._layout is None and not pairs else layout
        parts: dict[int, CutBuffer] = {}
        for buffer, dim in pairs:
            restored = all(buffer is not other for other in self._no_restore)
            part = CutBuffer(buffer, dim, layout_made_by(layout, buffer.shape[dim], self._group.size()), restored)
            if parts.setdefault(id(buffer), part).dim != dim:
                raise ValueError(f"a buffer is given twice, with sequence dims {parts[id(buffer)].dim} and {dim}")
        for part in parts.values():
            part.cut(self._group.rank())
        return _BlockEntry(binding, fixed_layout, parts, innermost(_open.get()), verified=self._verified)

    def _describe_buffers(self, entry: _BlockEntry) -> list[Any]:
        pairs = pair_buffers(self._buffers, self._seq_dims)
        facts: list[Any] = [(normalize_dim(buffer, dim), tuple(buffer.shape), buffer.dtype) for buffer, dim in pairs]
        return facts if self._layout is not None else [*facts, self._balancer.__name__]

    def _refuse_part(self, buffer: torch.Tensor, dim: int) -> None:
        cut, rank = find_cut(buffer), self._group.rank()
        if cut is not None and cut[0].ranks > 1 and buffer.shape[dim] == cut[0].lengths[rank % cut[0].ranks]:
            raise ValueError(
                f"a buffer of shape {tuple(buffer.shape)} is a part of a sequence already: it was cut by a block that "
                "is still open, by a block that did not restore it (no_restore_buffers), or by a layout's shard; leave "
                "it out of buffers"
                f"{see('A buffer that was cut before')}"
            )

    def _default_layout(self, pairs: list[tuple[torch.Tensor, int]]) -> SequenceLayout | Balancer:
        lengths = [buffer.shape[dim] for buffer, dim in pairs]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the buffers have {lengths} positions in their sequence dims, which is not one sequence. If one is a "
                "table that is longer than the sequence, write model.table = model.table[:length].clone() before the "
                "block, and name model.table in the buffers. For several sequences (cross-attention), give a function "
                "that cuts each of them: layout=head_tail"
                f"{see('Buffers of different lengths')}"
            )
        return layout_made_by(self._balancer, lengths[0], self._group.size()) if lengths else self._balancer


class _BlockEntry(Opening):
    """One entry of a block, with all that a recomputation needs to enter it again."""

    def __init__(
        self,
        binding: Binding,
        fixed_layout: SequenceLayout | Balancer | None,
        parts: dict[int, CutBuffer],
        outer: _BlockEntry | None,
        *,
        verified: bool,
    ) -> None:
        self.verified = verified or binding.group.size() == 1
        self.check_inputs = binding.checks.inputs and binding.group.size() > 1
        self.name, self.group = binding.name, binding.group
        self.layout, self.strategy = binding.layout, binding.strategy
        self.source = binding.with_scopes(has_layout=fixed_layout is not None)
        self.parts, self.outer = parts, outer  # by the ids of the buffers
        self._was_scoped = False  # a recomputation then needs a scope too
        self.observers = binding.group_state.get_or_create(_Observers)

    @contextlib.contextmanager
    def enter(self, *, again: bool = False) -> Iterator[None]:
        """Cut the buffers, and intercept attention calls. ``again``: in a recomputation, after which all buffers get
        back the data that they have now."""
        with contextlib.ExitStack() as stack:
            restores, sequences = False, set[int]()
            for part in self.parts.values():
                sequences.add(part.layout.length)
                undo = part.replace_data()
                if again or part.restored:
                    restores = True
                    stack.callback(undo)
                    stack.callback(part.follow_gradient)
            if restores:
                stack.enter_context(Aliases())
            # The binding may belong to an earlier entry, or to a block around this one.
            calls = _BlockCalls(self, again=again)
            forward_state = vars(calls.forward_state)
            stack.callback(forward_state.update, dict(forward_state))
            forward_state.update(vars(ForwardState(sequences=sequences, was_scoped=self._was_scoped)))
            stack.enter_context(calls)
            try:
                yield
            finally:
                self._was_scoped = calls.forward_state.was_scoped


class _Observers(WeakKeyDictionary[nn.Module, list[ForwardObserver]]):
    """The observers of the models that have called attention in blocks over the ranks of a group."""


class _BlockCalls(AttentionCalls):
    """The attention calls of a block."""

    def __init__(self, entry: _BlockEntry, *, again: bool) -> None:
        super().__init__(entry.source)
        self._entry, self._again = entry, again
        self._checked: set[nn.Module] = set()  # models whose arguments were checked in this entry
        self._trained: set[Proof] = set()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._checked.clear()
        self._trained.clear()
        if exception[0] is not None:
            return
        if self._entry.parts and not (self._again or self.forward_state.calls or self.unscoped.forwards.lengths):
            warnings.warn(
                f"{self._name}: no attention was called inside, nor before over these ranks: each rank computed on its "
                "part of the buffers alone. Attention by another library's kernels, or in TorchScript, would have been "
                "local: call one of torch's attention functions in the block"
                f"{see('A block without attention')}",
                stacklevel=4,
            )

    def check_call(self) -> None:
        """Also check the arguments of the models that make this call, once in each entry."""
        super().check_call()
        if self._again:
            return
        running, source = running_modules(), self.source
        forwards = (source if source.role.stand_in is None else source.unscoped).forwards
        proof, first_verified, outermost, proved = None, None, None, False
        for module, _, _ in running:  # innermost first
            proof = proof_of(module)
            proof.verified |= self._entry.verified and module is running[-1][0]
            if proof.verified and first_verified is None:
                first_verified = proof
            if module.training and torch.is_grad_enabled():
                outermost, proved = proof, proved or proof.verified
        if proof is not None:
            self.forward_state.model = first_verified or proof
        if outermost is not None:
            # A loss or a backward ends the training state of a model, and its next forward begins it again.
            if outermost not in self._trained or outermost not in forwards.training:
                self._trained.add(outermost)
                outermost.forward_begins(forwards)
            if not proved:
                outermost.warn_if_unverified()
        for module, args, kwargs in running if self._entry.check_inputs else ():
            if module not in self._checked and (module is running[-1][0] or is_model(module)):
                self._checked.add(module)
                table = self._entry.observers
                for observer in table[module] if module in table else table.setdefault(module, observers_of(module)):
                    observer.forward_begins(self, module, args, kwargs)

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The inputs of the outermost model that runs."""
        # From the frame of its call, because a block has no hook on a model.
        if self.forward_state.inputs:
            return self.forward_state.inputs
        models = [call for call in running_modules() if is_model(call[0])]
        module, args, kwargs = models[-1] if models else (None, (), {})
        return {} if module is None else dict(zip(input_names(module), args, strict=False)) | kwargs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The order matters: a graph gets guards on all attributes that its trace reads.
        if not torch.compiler.is_dynamo_compiling():
            if _open.get() != (self._entry,) and not self.encloses_call():
                return func(*args, **(kwargs or {}))
            if not self._entry.parts.keys().isdisjoint(map(id, args)):
                self.wrap_checkpoints()
        return super().__torch_function__(func, types, args, kwargs)

    def encloses_call(self) -> bool:
        if self._again:
            return True
        entry = innermost(_open.get())
        while entry is not None and entry is not self._entry:
            entry = entry.outer
        return entry is not None

    def enter_again(self) -> contextlib.AbstractContextManager[Any]:
        return self._entry.enter(again=True)


# Compiled alone, it would have a guard on the identity of each function that it gets.
never_compile_alone(_BlockCalls.__torch_function__)


def check_on_ranks(
    name: str, axis: str, group: dist.ProcessGroup, check: Callable[[], Any], facts: Callable[[Any], list[Any]]
) -> Any:
    """Return the result of ``check``. Raises on every rank if it fails on one, or if the ranks' ``facts`` differ."""
    results = []  # describe() returns the values to compare, so it leaves the result here

    def describe() -> tuple[dict[str, Any], StatusRow]:
        results.append(check())
        return {"the buffers, their shapes, dtypes and sequence dims": facts(results[0])}, StatusRow()

    agree_on_facts(describe, Meeting.BLOCK, (name, axis, group))
    return results[0]


def pair_buffers(buffers: Sequence[Any], seq_dims: Sequence[int]) -> list[tuple[Any, int]]:
    if isinstance(buffers, torch.Tensor):
        raise TypeError("buffers must be a list of tensors, got one tensor: put it into a list")
    if len(buffers) != len(seq_dims):
        raise ValueError(f"there are {len(buffers)} buffers and {len(seq_dims)} sequence dims: give one for each")
    return list(zip(buffers, seq_dims, strict=True))


def find_open_block(group: dist.ProcessGroup) -> _BlockEntry | None:
    """The innermost open block over the ranks of ``group`` in this context."""
    return innermost([entry for entry in _open.get() if list_ranks(entry.group) == list_ranks(group)])


def list_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


rotation: ContextVar[Strategy] = ContextVar("rotate_method", default=AllGather())  # noqa: B039 - it is frozen
# The blocks that are open in this context, in the order in which they were opened.
_open: ContextVar[tuple[_BlockEntry, ...]] = ContextVar("context_parallel_blocks", default=())
# The ranks of the last block that ended, and its balancer; None if it had a layout= argument.
last_layout: ContextVar[tuple[tuple[int, ...], Balancer | None]] = ContextVar(
    "context_parallel_last_cut", default=((), head_tail)
)
