"""The function mode that intercepts attention calls on plain tensors and runs them on the engine."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from cp_styles._lib.compat import (
    ASKS_FOR_NESTED_TENSORS,
    FLEX_OPERATOR,
    fast_path_attention,
    function_modes,
    graph_task_id,
    graph_tracer,
    leave_function_mode,
    never_compile_alone,
    never_compiled,
    passes_flex_attention,
    running_reruns,
    saved_tensors_hooks_on_top,
    uncompiled,
    without_function_modes,
)
from cp_styles._lib.introspect import input_names
from cp_styles._lib.troubleshooting import see
from cp_styles.engine.binding import Binding, refuse_options
from cp_styles.engine.custom_ops import attend, check_local, check_plain, modes_entered, tell_of_call
from cp_styles.functions.decode import DecodeCall, KVCache, cache_of, decode
from cp_styles.functions.flex import FlexCall, flex_attend
from cp_styles.functions.joint_layout import JointLayout, attend_jointly, refuse_graphs
from cp_styles.functions.latent import LatentCall
from cp_styles.functions.multi_head_attention import multi_head_attention
from cp_styles.functions.varlen import VARLEN_OPERATOR, VARLEN_OPERATORS, varlen_operator
from cp_styles.functions.whole_sequence import MAXIMUM, largest_position
from cp_styles.kernels.flex import ScoreMod
from cp_styles.kernels.merge import apply_sink
from cp_styles.kernels.sdpa import SDPA_CALLS
from cp_styles.layouts.layout import find_cuts
from cp_styles.masks import Dense, Mask
from cp_styles.masks.dense import causal_bias

_NOT_IN_GRAPHS = (
    "under context parallelism flex_attention, varlen_attn and a model's largest position run outside of "
    "torch.compile's graphs: compile without fullgraph=True, which breaks the graph there, or compile what stands "
    "between the attentions"
)
_TORCH_FLEX_REFUSED = (
    "torch's flex_attention was called inside, where it would attend to this rank's part alone: write `from cp_styles "
    "import flex_attention` in place of torch's import (make a model of transformers with "
    "attn_implementation=register_attention())"
)


class _ModeEntry(NamedTuple):
    """One ``__enter__`` of a mode.

    Attributes:
        nested: the mode had been entered before.
        grad: whether gradients were enabled.
        path: the path of the enclosing module, see :class:`~cp_styles.engine.binding.ForwardState`.
        depth: how many modes of the thread enclose this one.
        checkpoints: ids of the enclosing checkpoints. Their recomputations enter the mode without a wrapper.
    """

    nested: bool
    grad: bool
    path: str
    depth: int
    checkpoints: set[int]


class AttentionCalls(TorchFunctionMode):
    """Runs the attention calls of this thread on the engine, while it is entered.

    It intercepts calls however the function was imported. It does not affect other threads.
    """

    def __init__(
        self,
        source: Binding,
        sink: tuple[nn.Module, str] | None = None,
        *,
        joint: JointLayout | None = None,
    ) -> None:
        """``source`` is resolved for each call. With ``joint``, some tokens are whole on every rank.
        ``sink`` is a module and the name of its parameter with the logit of a sink for each query head.
        """
        super().__init__()
        self._name = source.name
        self._joint, self.source, self.role = joint, source, source.role
        self._joint_calls = dict[bool, int]()  # by whether a backward may follow
        self._sink = sink
        unscoped = source.unscoped
        self.forward_state, (self._in_graph, _) = unscoped.forward_state, unscoped.in_graph
        self._entries: list[_ModeEntry] = []
        # The path of the module whose forward enters this mode next. The ranks compare which module calls.
        self.next_path: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionCalls:
        # Not of the class of the mode: a block has modes of its own.
        copied = memo[id(self)] = AttentionCalls(copy.deepcopy(self.source, memo), joint=self._joint)
        copied._sink = copy.deepcopy(self._sink, memo)
        return copied

    def with_sink(self, module: nn.Module, parameter: str) -> AttentionCalls:
        """This mode for calls under ``module``, which use its parameter as their attention sink."""
        return AttentionCalls(self.source, (module, parameter), joint=self._joint)

    @staticmethod
    def current() -> AttentionCalls | None:
        """The mode that would handle an attention call at this moment. None outside of context-parallel modules."""
        for mode in reversed(function_modes()):
            if isinstance(mode, AttentionCalls) and (torch.compiler.is_dynamo_compiling() or mode.encloses_call()):
                return mode
        return None

    def encloses_call(self) -> bool:
        """Whether the running code is inside. False for a block that was opened in a suspended generator."""
        return True

    def __enter__(self) -> AttentionCalls:
        # Nested modules enter the same mode again. It is pushed once, otherwise each call would pass it several times.
        nested, grad = bool(self._entries) and self.current() is self, torch.is_grad_enabled()
        path = self.forward_state.path
        if self.next_path is not None:
            self.forward_state.path, self.next_path = self.next_path, None
        if nested:
            self._entries.append(_ModeEntry(nested, grad, path, *self._entries[-1][3:]))
            return self
        checkpoints = set[int]()
        if saved_tensors_hooks_on_top() is not None or not grad:
            checkpoints.update(id(owner) for owner, _ in running_reruns())
        self._entries.append(_ModeEntry(nested, grad, path, len(function_modes()), checkpoints))
        modes_entered.set((*modes_entered.get(), self))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        entry = self._entries.pop()
        self.forward_state.path = entry.path
        if not entry.nested:
            modes = list(modes_entered.get())
            if self in modes:  # a mode that was entered in another context is not in the list
                del modes[len(modes) - 1 - modes[::-1].index(self)]
            modes_entered.set(tuple(modes))
            leave_function_mode(self)
            # For a BlockMask of the whole sequence, and for inputs that require grad on CPU, torch's function raises
            # before it calls its operator. The advice of torch's error would be wrong here.
            if isinstance(exception[1], Exception) and passes_flex_attention(exception[1], but=flex_attend):
                raise NotImplementedError(f"{self._name}: {_TORCH_FLEX_REFUSED}") from exception[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_dynamo_compiling()
        if func in SDPA_CALLS:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self._attend, self._name, *args, **kwargs)
        if func is _ATTENTION:  # of a function of this package: calls that this mode runs do not pass it
            if compiling:  # torch.compile cannot read the name of a group
                self.forward_state.functions = True
            else:
                self.note_function(args[_ATTENTION_CONFIG].group_name)
        name = getattr(func, "__name__", None)
        if not compiling:  # torch.compile cannot trace these string methods
            name = (name or "").removesuffix(".default")
            if func is FLEX_OPERATOR:
                raise NotImplementedError(f"{self._name}: {_TORCH_FLEX_REFUSED}")
            if func is ASKS_FOR_NESTED_TENSORS:
                return False  # no nested tensors: the mask is of the whole sequence, the tensors are a shard
            if name == VARLEN_OPERATOR:
                return self._attend_varlen(*args, **kwargs)
        elif func is FLEX_OPERATOR or name in VARLEN_OPERATORS or (func in MAXIMUM and _may_be_positions(*args)):
            _break_the_graph()
        if func in _REFUSED_FUNCTIONS or name in _REFUSED_OPERATORS:
            if func in MAXIMUM:
                return largest_position(self, func, *args, **kwargs)
            raise NotImplementedError(
                f"{self._name}: {func.__name__} is not one of the attention calls that run context parallel; use "
                "scaled_dot_product_attention"
            )
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # torch.compile 2.11 to 2.13 cannot trace the super() in Tensor.unflatten
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        self.forward_state.calls += 1
        compiling = torch.compiler.is_dynamo_compiling()
        if attn_mask is not None:
            attn_mask, is_causal = causal_bias(attn_mask, is_causal)
        tensors, source, problem = (query, key, value), self._in_graph if compiling else self.source, ""
        sink = None if self._sink is None else getattr(*self._sink)
        sink = sink.to_local() if isinstance(sink, DTensor) else sink
        number = 0
        if self._joint is not None:
            refuse_graphs(self._name, traced=compiling)
            given = [x for x in tensors if isinstance(x, torch.Tensor)]
            trains = torch.is_grad_enabled() and any(x.requires_grad for x in given)  # equal on all ranks
            # Before the checks, so that all ranks have the same count: it says which calls communicate.
            self._joint_calls[trains] = number = self._joint_calls.get(trains, 0) + 1
        try:
            (check_plain if compiling else check_local)(self._name, tensors, sink_H=sink, attn_mask=attn_mask)
            if cache_of(key) is not None:
                raise NotImplementedError(
                    f"{self._name}: scaled_dot_product_attention was called on the keys of a cache that is cut over "
                    "the ranks: call context_decode; a model of transformers does so with "
                    "attn_implementation=register_attention() and a config of its own, copy.deepcopy(config)"
                )
            refuse_options(self._name, query, key, dropout_p, enable_gqa, others)
            if not compiling:  # compiled code enters the mode in a recomputation too
                self.check_call()
        except Exception as error:
            problem = tell_of_call(source, error)
            if not compiling:
                raise
        options: dict[str, Any] = {"is_causal": is_causal, "attn_mask": attn_mask, "scale": scale, "sink_H": sink}
        if self._joint is not None:
            where, look = (self._name, self.unscoped.group), number & (number - 1) == 0  # a power of 2
            with self.unscoped.telling():
                return attend_jointly(self._joint, *where, tensors, partial(attend, source, **options), look=look)
        return attend(source, tensors, **options, problem=problem)[0]

    @partial(uncompiled, reason=_NOT_IN_GRAPHS)
    def attend_flex(self, tensors: tuple[Any, Any, Any], options: Mapping[str, Any], *, compiled: bool) -> Any:
        """Run a call of flex_attention with query, key and value, and its remaining arguments by name.

        ``compiled``: torch.compile has compiled the caller.
        """
        with without_function_modes():  # so that operations of the engine do not pass this mode
            return self._attend_flex(tensors, FlexCall(**options, compiled=compiled))

    def _attend_flex(self, tensors: tuple[Any, Any, Any], call: FlexCall) -> Any:
        return call.result(*flex_attend(self.begin_call(takes_sinks=False), tensors, call))

    @property
    def unscoped(self) -> Binding:
        """The binding of a call where no scope is open."""
        return self.source.unscoped

    @property
    def binding(self) -> Binding:
        """The binding of a call at this moment."""
        return self.source.now()[0]

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The arguments of the context-parallel module, by the names of its forward's parameters."""
        inputs = self.forward_state.inputs
        if inputs is None:
            module, args, kwargs = self.forward_state.module_call
            inputs = self.forward_state.inputs = dict(zip(input_names(module), args, strict=False)) | kwargs
        return inputs

    @uncompiled
    def attend_with(
        self,
        binding: Binding,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        mask: Mask,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
        sink_H: torch.Tensor | None = None,
        score_mod: ScoreMod | None = None,
        latents: LatentCall | None = None,
    ) -> torch.Tensor:
        """``out_BHLE`` of a call whose mask is a :class:`~cp_styles.masks.Mask`, for integrations of other libraries.

        ``binding`` is the result of :meth:`begin_call`.
        ``mask`` and ``attn_mask`` hold in addition to the module's mask and the scope's. A call with ``score_mod`` runs
        as flex_attention; with a PerRow mask, row by row of the batch. ``latents`` travel in place of the
        key and value in ``tensors``. Communication and errors: see
        :func:`~cp_styles.functions.attention.context_attention`.
        """
        if score_mod is None:
            binding = binding.with_mask(mask)
            learned = None
            with binding.telling():
                if latents is not None:
                    latents.check(binding.name)
                    binding = binding.with_kernel(latents.make_kernel(binding.kernel))
                    tensors, learned = latents.arguments()
                check_local(binding.name, tensors, sink_H=sink_H, attn_mask=attn_mask)
            options = {"attn_mask": attn_mask, "scale": scale, "sink_H": sink_H, "learned": learned}
            return attend(binding, tensors, **options)[0]
        binding = binding.with_mask(mask if attn_mask is None else mask & Dense(attn_mask))
        call = FlexCall(score_mod=score_mod, scale=scale, enable_gqa=True, return_lse=sink_H is not None)
        calls = [(binding, tensors, call)]
        if binding.mask.rows != (binding.mask,):
            with binding.telling():
                if len(binding.mask.rows) != len(tensors[0]):
                    raise ValueError(f"{binding.name}: give PerRow one mask for each of {len(tensors[0])} rows")
            of_rows = enumerate(zip(binding.mask.rows, *(x.split(1) for x in tensors), strict=True))
            calls = [
                (replace(binding, mask=mask), (q, k, v), replace(call, score_mod=_of_row(row, score_mod)))
                for row, (mask, q, k, v) in of_rows
            ]
        results = [flex_attend(*each) for each in calls]
        out = torch.cat([row_out for row_out, _ in results])
        if sink_H is not None:
            out = apply_sink(out, torch.cat([aux.lse for _, aux in results if aux.lse is not None]), sink_H)
        return out

    def note_function(self, group_name: str) -> None:
        """Note that a function of this package runs inside, over the ranks of this group."""
        if group_name == self.unscoped.group_name:
            self.forward_state.functions = True

    def decode_with(self, binding: Binding, q_BHLD: torch.Tensor, cache: KVCache, call: DecodeCall) -> torch.Tensor:
        """``out_BHLE`` of new tokens, for integrations of other libraries: :func:`~cp_styles.functions.decode.decode`.

        ``binding`` is the result of :meth:`begin_call`. The mask of ``call`` holds in addition to the module's and the
        scope's. Kernel and checks are the module's.
        """
        mask = binding.mask & call.mask
        call = replace(call, mask=mask, kernel=binding.kernel, checks=binding.checks)
        return decode(binding.name, q_BHLD, cache, call)

    def run_mixer(self, run: Callable[[], Any]) -> Any:
        """Call ``run()``, a token mixer over the whole sequence: [Note: mixers by name] in integrations/layers.py."""
        self.begin_call()
        return run()

    @never_compiled
    def _attend_varlen(self, *args: Any, **kwargs: Any) -> Any:
        return varlen_operator(self.begin_call(takes_sinks=False), *args, **kwargs)

    def begin_call(self, *, takes_sinks: bool = True) -> Binding:
        """Count a call of another function than torch's attention, and return its binding."""
        self.forward_state.calls += 1
        binding = self.source.now()[0]
        with binding.telling():
            if self._sink is not None and not takes_sinks:
                raise NotImplementedError(
                    f"{self._name}: attention sinks are for scaled_dot_product_attention; with flex_attention use its "
                    "logsumexp, or leave sink= out"
                )
            if not torch.compiler.is_dynamo_compiling():
                self.check_call()
            if self._joint is not None:
                raise NotImplementedError(
                    f"{self._name}: {self._joint!r} is for scaled_dot_product_attention and context_attention: use one "
                    "of them, or cut all tokens"
                )
        return binding

    def enter_again(self) -> contextlib.AbstractContextManager[Any]:
        """The context that a recomputation enters."""
        return self

    def wrap_checkpoints(self) -> None:
        """Make the checkpoints between the mode and the present call enter the mode again: see [Note: reruns].

        Raises:
            NotImplementedError: an autograd.Function between them may run the call again in its backward.
        """
        # Every checkpoint hooks saved tensors, or runs without gradients.
        if saved_tensors_hooks_on_top() is None and torch.is_grad_enabled():
            return
        if not self._entries:  # compiled code has entered the mode without __enter__, and does so in a recomputation
            return
        entry = self._entries[-1]
        for owner, attribute in running_reruns():
            if id(owner) in entry.checkpoints:
                continue
            if attribute is None:
                # If gradients were off on entry, the function encloses the innermost module and would call it again.
                if entry.grad and not torch.is_grad_enabled():
                    raise NotImplementedError(
                        f"{self._name}: attention inside {type(owner).__name__}, an autograd.Function. If its backward "
                        "runs the attention again, this may happen outside of the module or block: use "
                        "torch.utils.checkpoint, or call the module, or open the block, inside the function that is "
                        "run again"
                    )
                continue
            fn = getattr(owner, attribute)
            wrapper = fn if isinstance(fn, _Recomputed) else _Recomputed(fn, ())
            if all(mode is not self for _, mode in wrapper.modes):
                modes = sorted([*wrapper.modes, (entry.depth, self)], key=lambda each: each[0])
                setattr(owner, attribute, _Recomputed(wrapper.fn, tuple(modes)))

    # Called before each call outside of compiled code. Raises for a call that this rank refuses.
    check_call = wrap_checkpoints

    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a forward of the module. Raises on every rank if its inputs were cut with another layout."""
        self.forward_state.calls, self.forward_state.layer_mask = 0, None
        self.forward_state.functions = False
        if not torch.compiler.is_dynamo_compiling():
            self.forward_state.running = True
            self.source.unscoped.group_state.turn.begin()
            if (tracer := graph_tracer()) is not None:
                self.refuse_tracer(tracer)
            self.forward_state.module_call, self.forward_state.inputs = (module, args, kwargs), None
            # Only tensors that a layout has returned show their layout. Computed inputs of attention do not.
            self.forward_state.cuts = find_cuts((*args, *kwargs.values()))
            if self.forward_state.cuts and graph_task_id() < 0 and self._joint is None:
                binding = self.source.now()[0]
                with binding.telling():
                    binding.refuse_other_cut(self.forward_state.cuts)

    def refuse_tracer(self, tracer: str) -> None:
        """Raise while a ``tracer`` other than torch.compile records a graph. No communication."""
        if graph_task_id() < 0 and self.unscoped.group.size() > 1:
            error = NotImplementedError(
                f"{self._name}: {tracer} records the operators of one process, without the messages between ranks: "
                "use torch.compile, or trace the model before the style is applied"
            )
            self.unscoped.group_state.turn.note_known(error)  # a trace cannot tell other ranks
            raise error

    def end_forward(self, module: nn.Module, args: Any, output: Any, *, attends: bool = True) -> None:
        """End a forward, also after an exception. ``attends``: a forward without an attention call is refused."""
        self.forward_state.inputs, self.forward_state.module_call = {}, ()
        self.forward_state.cuts, self.next_path = (), None
        if not torch.compiler.is_dynamo_compiling():
            self.forward_state.running = False
        if not torch.compiler.is_dynamo_compiling() and output is None and (error := sys.exc_info()[1]) is not None:
            if isinstance(error, AssertionError) and not error.args and not self.forward_state.calls:
                error.args = (f"{self._name}{_ASSERTION_FAILED}{see('No attention was called')}",)
            self.unscoped.tell_peers(error)
            return
        if attends and not (self.forward_state.calls or self.forward_state.functions):
            raise NotImplementedError(
                f"{self._name}: no scaled_dot_product_attention was called inside: nothing was context parallel, and "
                "any other attention was local to each rank. Call one of torch's attention functions in the module"
                f"{see('No attention was called')}"
            )


# [Note: reruns] An activation checkpoint inside of a module or block may recompute after the module's forward, or in
# the backward of another module. There the mode is not entered. So the first attention call inside a checkpoint wraps
# the function of the checkpoint: the wrapper enters the mode.
@dataclass(frozen=True)
class _Recomputed:
    """A function that a checkpoint recomputes. It enters ``modes``, which have their depths, outermost first."""

    fn: Callable[..., Any]
    modes: tuple[tuple[int, AttentionCalls], ...]

    def __call__(self, *args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for _, mode in self.modes:
                stack.enter_context(mode.enter_again())
                mode.unscoped.group_state.turn.begin()
                stack.enter_context(mode.unscoped.telling())
            return self.fn(*args)


class ForwardObserver(Protocol):
    """Observes the forwards of one module. An error that it raises ends the forward on every rank.

    torch.compile may trace both functions with the forward. ``calls`` is the mode for the attention calls inside.
    """

    def forward_begins(
        self, calls: AttentionCalls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Called before the forward. The default does nothing."""

    def forward_ends(self, calls: AttentionCalls, module: nn.Module, output: Any) -> None:
        """Called after a forward that has returned ``output``. The default does nothing."""


never_compile_alone(AttentionCalls.__torch_function__)
# torch.compile traces _attend as part of a graph. Between graphs the engine runs without torch.compile.
never_compile_alone(AttentionCalls._attend, nor_what_it_calls=True)
# After a graph break torch.compile would compile these functions at each step, because they read changing state.
never_compile_alone(AttentionCalls.__enter__, nor_what_it_calls=True)
never_compile_alone(AttentionCalls.__exit__, nor_what_it_calls=True)

_ATTENTION = torch.ops.cp_styles.attention.default
_ATTENTION_CONFIG = [argument.name for argument in _ATTENTION._schema.arguments].index("config")

# Functions that would otherwise run on the local shard. MAXIMUM runs over all ranks, the rest is refused.
_REFUSED_FUNCTIONS = {*fast_path_attention(), *MAXIMUM}

_ASSERTION_FAILED = (
    ": an assertion in the model's code fails on this rank's part of the inputs, before any attention that is context "
    "parallel. A model whose attention is written in plain operations (XLM, FlauBERT) cannot be"
)


def _of_row(row: int, score_mod: ScoreMod) -> ScoreMod:
    """``score_mod`` for a call with one row of the batch."""
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b + row, h, q_idx, kv_idx)


def _may_be_positions(x: torch.Tensor, *options: Any) -> bool:
    return not options and x.ndim > 1 and not x.is_floating_point()


def _break_the_graph() -> None:
    raise RuntimeError(f"{__name__}: internal error: a graph break was requested outside of torch.compile")


_break_the_graph = uncompiled(_break_the_graph, _NOT_IN_GRAPHS)
# The operators that other attention functions call.
_REFUSED_OPERATORS = {
    *VARLEN_OPERATORS,
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}
_REFUSED_OPERATORS |= {f"{name}.default" for name in _REFUSED_OPERATORS}
