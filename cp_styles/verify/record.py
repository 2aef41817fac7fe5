"""Records the inputs and outputs of each module of a model, and the gradients of the outputs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from cp_styles._compat import FlexAsWritten, graph_task_id, tensors_in, tree_map
from cp_styles.engine.scope import SequenceScope, open_scope
from cp_styles.mask import Full, PerRow

Key = tuple[str, int]
"""A module's name, and the number of the call."""

# Parts of a module's name that wrappers add.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """``name`` without the parts that wrappers (DDP, checkpoints, torch.compile) add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        parent: the call inside which it was made.
        args, kwargs: what it was given, detached.
        output: what it returned, detached.
        gradients: of each tensor in the output, in order; None for those that have none.
        attended: how many attentions there had been when it began, and when it ended.
    """

    key: Key
    kind: str
    parent: Call | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    attended: tuple[int, int]
    output: Any = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.key[0]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.name else f"the model ({self.kind})"

    @property
    def outputs(self) -> list[torch.Tensor]:
        return tensors_in(self.output)

    @property
    def arguments(self) -> dict[str, Any]:
        """What it was given, by parameter."""
        names = [*self.names[: len(self.args)], *(f"argument {at}" for at in range(len(self.names), len(self.args)))]
        return dict(zip(names, self.args, strict=True)) | self.kwargs

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that it was given, by parameter."""
        tensors = {}
        for name, value in self.arguments.items():
            leaves = tensors_in(value)
            tensors |= {name if len(leaves) == 1 else f"{name}[{at}]": leaf for at, leaf in enumerate(leaves)}
        return tensors

    def within(self, other: Call) -> bool:
        node = self.parent
        while node is not None and node is not other:
            node = node.parent
        return node is other


@dataclass(frozen=True)
class AttentionMask:
    """The mask arguments of an attention call."""

    attn_mask: torch.Tensor | None
    is_causal: bool


Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Other arguments for scaled_dot_product_attention, by name."""


class AttentionsSeen(TorchFunctionMode):
    """While it is entered, notes the attention calls of this thread that no other mode handles first.

    ``masks`` has one entry for each call: the mask of a scaled_dot_product_attention, None for other functions.
    ``change`` changes the arguments of the former.

    On one process no style applies the mask of a SequenceScope. With ``axis``, this does so for the open scope over
    that mesh axis. ``unapplied`` are the scopes whose masks it could not apply to a call.
    """

    def __init__(self, axis: str | None = None, change: Change = lambda arguments: arguments) -> None:
        super().__init__()
        self._axis, self._change = axis, change
        self.masks: list[AttentionMask | None] = []
        self.unapplied: set[str] = set()
        self._as_written: FlexAsWritten | None = None

    def __enter__(self) -> AttentionsSeen:
        self._as_written = FlexAsWritten()  # torch.compile would trace this mode
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._as_written is not None:
            self._as_written.end()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention and getattr(func, "__name__", "") not in _ATTENTIONS:
            return func(*args, **kwargs)
        scope, mask = None if self._axis is None else open_scope(self._axis), None
        if func is F.scaled_dot_product_attention:
            arguments = {"attn_mask": None, "is_causal": False} | dict(zip(_SDPA, args, strict=False)) | kwargs
            mask = AttentionMask(_detached(arguments["attn_mask"]), arguments["is_causal"])
            args, kwargs = (), self._change(arguments if scope is None else self._within(scope, arguments))
        elif scope is not None and not isinstance(scope.mask, Full):
            self.unapplied.add(repr(scope.mask))
        if graph_task_id() < 0:
            self.masks.append(mask)
        return func(*args, **kwargs)

    def _within(self, scope: SequenceScope, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of scaled_dot_product_attention with the mask of ``scope`` too."""
        query, key, mask = arguments["query"], arguments["key"], scope.mask
        if isinstance(mask, Full):
            return arguments
        rows = mask.masks if isinstance(mask, PerRow) else (mask,)
        positions = scope.layout.positions(0, query.device)
        whole = query.shape[-2] == key.shape[-2] == positions.numel() == scope.layout.length
        if not whole or any(row.has_bias or row.grids for row in rows):
            self.unapplied.add(repr(mask))
            return arguments
        allowed = torch.stack([row.allowed(positions, positions) for row in rows])[:, None]
        allowed = allowed if len(rows) > 1 else allowed[0, 0]
        if arguments["is_causal"]:
            allowed = allowed & torch.ones_like(allowed).tril()
        before = arguments["attn_mask"]
        if before is not None and before.dtype != torch.bool:
            allowed = torch.zeros_like(allowed, dtype=before.dtype).masked_fill(~allowed, float("-inf")) + before
        elif before is not None:
            allowed = allowed & before
        return arguments | {"attn_mask": allowed, "is_causal": False}


class Recording:
    """Records the calls of all modules under ``model`` while it is entered. What a backward recomputes is left out.

    Attributes:
        calls: those that have ended, in the order in which they did, so children before their parents.
        open: those that have not, the innermost last. After an exception, where it was raised.
        attentions: an entry for each attention so far: ``masks`` of an :class:`AttentionsSeen` that is entered with it,
            or what the strategies were given.
    """

    def __init__(self, model: nn.Module, attentions: Sequence[Any]) -> None:
        self._model, self.attentions = model, attentions
        self._numbers: Counter[str] = Counter()
        self._handles: list[Any] = []
        self.calls: list[Call] = []
        self.open: list[Call] = []

    def __enter__(self) -> Recording:
        for name, module in self._model.named_modules():
            # Before the hooks of styles for inputs, and after those for outputs: as the caller sees the module.
            begin = partial(self._begin, plain_name(name))
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if graph_task_id() >= 0:
            return
        key = name, self._numbers[name]
        self._numbers[name] += 1
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
        parent = self.open[-1] if self.open else None
        arguments = tree_map(_detached, args), tree_map(_detached, kwargs)
        self.open.append(Call(key, type(module).__name__, parent, *arguments, names, (len(self.attentions), 0)))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if graph_task_id() >= 0 or not self.open:
            return
        call = self.open.pop()
        call.attended = call.attended[0], len(self.attentions)
        call.output = tree_map(_detached, output)
        for at, leaf in enumerate(tensors_in(output)):
            call.gradients.append(None)
            if leaf.requires_grad:
                leaf.register_hook(partial(_add_gradient, call, at))
        self.calls.append(call)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ATTENTIONS = {"flex_attention", "multi_head_attention_forward", "varlen_attn"}
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _add_gradient(call: Call, at: int, gradient: torch.Tensor) -> None:
    total = call.gradients[at]
    call.gradients[at] = gradient.detach().clone() if total is None else total + gradient.detach()
