"""Attention calls, however they were imported, on their way to the engine: what doors without DTensor share."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from cp_styles._compat import (
    FLEX_OPERATOR,
    FlexAsWritten,
    current_graph_task,
    fast_path_attention,
    first_node,
    function_modes,
    local_attention_since,
    never_compile_alone,
    tree_leaves,
    uncompiled,
)
from cp_styles.comm.agreement import ledger_of, offer_refusal
from cp_styles.engine.binding import Tally, refuse_dropout, refuse_grouped
from cp_styles.engine.op import config_text_of
from cp_styles.engine.scope import ScopedBinding
from cp_styles.functions.attention import attend
from cp_styles.functions.flex import flex_attend
from cp_styles.functions.varlen import VARLEN_OPERATOR, VARLEN_OPERATORS, varlen_operator
from cp_styles.intercept.flex_frames import FIRST_QUESTION, QUESTIONS, FlexCalls, traced_part
from cp_styles.layout import cut_with


class AttentionCalls(TorchFunctionMode):
    """Sends the attention calls made in this thread, while it is entered, through the engine.

    However the function was imported, its calls are seen; other threads are not concerned.
    """

    def __init__(
        self,
        scoped: ScopedBinding,
        name: str,
        sink: tuple[nn.Module, str] | None = None,
        tally: Tally | None = None,
        *,
        inlined: bool = False,
    ) -> None:
        """``sink``: the module and the name of its parameter with a sink's logit for each query head; ``tally``: where
        to count the calls; ``inlined``: this is entered inside of a graph, so that what runs again enters it again."""
        super().__init__()
        self._scoped = scoped
        self._sink = sink
        # The binding's own, so that ranks can compare how many calls they have made.
        self._tally = scoped.unscoped.tally if tally is None else tally
        self._config_text = config_text_of(scoped)
        self._name = name
        self._inlined = inlined
        self._grad_at_entry: list[bool] = []
        self._as_written: list[FlexAsWritten | None] = []  # None where it was entered already
        self._flex = FlexCalls()
        self._entries, self._first_node = 0, -1

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionCalls:
        tally = copy.deepcopy(self._tally, memo)
        made = memo[id(self)] = AttentionCalls(self._scoped, self._name, tally=tally, inlined=self._inlined)
        made._sink = copy.deepcopy(self._sink, memo)
        return made

    def with_sink(self, module: nn.Module, parameter: str) -> AttentionCalls:
        """The same for calls under ``module``, which take its parameter as their attention sink."""
        return AttentionCalls(self._scoped, self._name, (module, parameter), self._tally)

    def inlined(self) -> AttentionCalls:
        """The same for a module whose forward is traced by torch.compile, which does not run ``__enter__``."""
        return AttentionCalls(self._scoped, self._name, self._sink, self._tally, inlined=True)

    def __enter__(self) -> AttentionCalls:
        # Modules enter their modules' once more: every call would pass this one as often.
        entered = next((mode for mode in reversed(function_modes()) if isinstance(mode, AttentionCalls)), None)
        self._grad_at_entry.append(torch.is_grad_enabled())
        if len(self._grad_at_entry) == 1:
            self._first_node = first_node() if self._looks() else -1
        self._as_written.append(None if entered is self else FlexAsWritten())
        return self if entered is self else super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._grad_at_entry.pop()
        self._flex.forget()
        as_written = self._as_written.pop()
        if as_written is not None:
            as_written.end()
            super().__exit__(*exception)

    def _looks(self) -> bool:
        """Whether to look for attention that is not seen."""
        self._entries += 1
        return looks_now(self._entries)

    @uncompiled
    def refuse_unseen(self, nodes: Iterable[Any]) -> None:
        """Raise where attention that did not come here is in the autograd graph that ends in ``nodes``."""
        if self._first_node >= 0 and local_attention_since(self._first_node, nodes):
            raise NotImplementedError(
                f"{self._name}: attention ran inside that was not seen, on this rank's part alone: TorchScript calls "
                "operators past Python. Leave torch.jit.script and torch.jit.trace out, or use torch.compile"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling:
            self.note(args)
        if func is F.scaled_dot_product_attention or func in _BELOW:
            return self._attend(*args, **kwargs) if compiling else self._attend_uncompiled(*args, **kwargs)
        name = getattr(func, "__name__", None)
        if not compiling:  # which knows no method of these names
            name = (name or "").removesuffix(".default")
            if self._flex.expecting:
                self._flex.forget(unless_under_way=True)
            if func in QUESTIONS:
                answer = self._flex.answer(_asking(sys._getframe(1)), func, args)
                return func(*args, **kwargs) if answer is None else answer
            if func is FLEX_OPERATOR:
                return self._attend_flex(*args[:3])
            if name == VARLEN_OPERATOR:
                return self._attend_varlen(*args, **kwargs)
        elif func is FIRST_QUESTION and (part := traced_part()):
            if part == "rest":
                raise NotImplementedError("what raises while it is traced runs as it was written")
            _break_the_graph()
        elif func is FLEX_OPERATOR or name in VARLEN_OPERATORS:
            _break_the_graph()
        if func in _OTHERS or name in _OTHER_OPERATORS:
            raise NotImplementedError(
                f"{self._name}: {func.__name__} is not one of the attention calls that run context parallel; use "
                "scaled_dot_product_attention"
            )
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # the same, without a super() that torch.compile cannot trace: seen on 2.11, 2.13
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
    ) -> torch.Tensor:
        self._tally.calls += 1

        def refuse() -> None:
            if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
                raise ValueError(f"{self._name}: query, key and value are DTensors here; pass local tensors")
            refuse_dropout(self._name, dropout_p)
            refuse_grouped(self._name, query.shape[1], key.shape[1], enable_gqa)
            self.check_reruns()

        return attend(
            self._config_text if torch.compiler.is_dynamo_compiling() else self._scoped,
            (query, key, value),
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            sink_H=self._sink_now(),
            refuse=refuse,
        )

    @uncompiled
    def _attend_uncompiled(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What torch.compile leaves to Python between its graphs it compiles piece by piece: the engine as well."""
        return self._attend(*args, **kwargs)

    @uncompiled
    def _attend_flex(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        self._tally.calls += 1
        call = self._flex.take()
        if call is None:
            raise NotImplementedError(
                f"{self._name}: flex_attention came here another way than by torch's function, which is how it is "
                f"understood; {_FLEX_REMEDY}"
            )
        found = flex_attend(self._scoped.now(), (query, key, value), call, self._check_sinkless)
        return self._flex.results(*found)

    @uncompiled
    def _attend_varlen(self, *args: Any, **kwargs: Any) -> Any:
        self._tally.calls += 1
        return varlen_operator(self._scoped.now(), self._check_sinkless, *args, **kwargs)

    def _check_sinkless(self) -> None:
        self.check_reruns()
        if self._sink is not None:
            raise NotImplementedError(
                f"{self._name}: attention sinks are for scaled_dot_product_attention; with flex_attention take its "
                "logsumexp, or leave sink= out"
            )

    def _sink_now(self) -> torch.Tensor | None:
        if self._sink is None:
            return None
        sink = getattr(*self._sink)
        return sink.to_local() if isinstance(sink, DTensor) else sink

    def note(self, args: tuple[Any, ...]) -> None:
        """Take notice of a call of anything at all."""

    def check_reruns(self) -> None:
        """Raise for a call that would be made again in a backward, where this mode is not entered."""
        if self._inlined:
            return
        if self._grad_at_entry[-1] and not torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self._name}: attention under no_grad inside a module that was entered with gradients. If this "
                "is reentrant checkpointing of a function, its recomputation would not be context parallel: "
                "checkpoint a module that makes the call, a layer for example"
            )

    def start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._tally.calls = 0
        if not torch.compiler.is_dynamo_compiling():
            ledger_of(self._scoped.unscoped.group).engaged = False
            self._check_cut([*args, *kwargs.values()])

    @uncompiled
    def _check_cut(self, values: list[Any]) -> None:
        """Of what a model is given it can still be told which layout has cut it; not of what its attention gets."""
        given = [value for value in values if cut_with(value) is not None]
        if given and current_graph_task() is None:
            binding = self._scoped.now()
            try:
                binding.refuse_other_cut(given)
            except Exception as error:  # whatever it is, the others are to hear of it
                binding.refuse(error)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The end of a module's forward, whatever it was."""
        if not torch.compiler.is_dynamo_compiling() and output is None and sys.exc_info()[1] is not None:
            self._offer_refusal()
            return
        if not self._tally.calls:
            if not torch.compiler.is_dynamo_compiling():  # traced, nobody has called anything yet
                self._offer_refusal()
            raise NotImplementedError(
                f"{self._name}: no scaled_dot_product_attention was called inside: nothing here is context parallel, "
                "and attention by other means would be local to each rank"
            )
        if not torch.compiler.is_dynamo_compiling():
            tensors = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor))
            self.refuse_unseen(x.grad_fn for x in tensors if x.grad_fn is not None)

    @uncompiled
    def _offer_refusal(self) -> None:
        """Others may be at a call that this rank does not come to."""
        binding = self._scoped.unscoped
        offer_refusal(binding.name, binding.axis, binding.group)


def looks_now(times: int) -> bool:
    """Whether to look for attention that is not seen at this forward: at the first, the second, the fourth and so on.
    A look goes through the whole graph, and there must be one: not under no_grad. In a recomputation it is not whole.
    """
    return times & (times - 1) == 0 and torch.is_grad_enabled() and current_graph_task() is None


def _asking(frame: FrameType) -> FrameType:
    """What called a mode, past the modes that were called first."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


never_compile_alone(AttentionCalls.__torch_function__)
# Where a graph was broken: what they read changes from step to step, and would be compiled anew.
never_compile_alone(AttentionCalls.__enter__, nor_what_it_calls=True)
never_compile_alone(AttentionCalls.__exit__, nor_what_it_calls=True)
# Hooks: compiled by itself, one would take itself for a part of a forward that is traced, and keep from the other ranks
# that a forward whose tracing has failed does not come to its attention.
never_compile_alone(AttentionCalls.start, nor_what_it_calls=True)
never_compile_alone(AttentionCalls.leave, nor_what_it_calls=True)

# Attention that would otherwise run on the local part, silently.
_OTHERS = {F.multi_head_attention_forward, *fast_path_attention()}
# The function as an operator.
_BELOW = {torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
_FLEX_REMEDY = "call torch.nn.attention.flex_attention.flex_attention, or what torch.compile made of it"


def _break_the_graph() -> None:
    raise RuntimeError(f"{__name__} asked torch.compile to break its graph, and nobody compiles")


_break_the_graph = uncompiled(
    _break_the_graph,
    "under context parallelism flex_attention and varlen_attn run outside of torch.compile's graphs: compile without "
    "fullgraph=True, which breaks the graph there, or compile what stands between the attentions",
)
# The operators that other functions come down to.
_OTHER_OPERATORS = {
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
_OTHER_OPERATORS |= {f"{name}.default" for name in _OTHER_OPERATORS}
