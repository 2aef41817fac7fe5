"""Records the inputs and outputs of each module of a model, and the gradients of the outputs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from cp_styles._compat import graph_task_id, tree_leaves, tree_map

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
        outputs: the tensors that it returned, detached, in order.
        gradients: of each output; None for those that have none.
        attended: how many attention functions had been called when it began, and when it ended.
    """

    key: Key
    kind: str
    parent: Call | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    attended: tuple[int, int]
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.key[0]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.name else f"the model ({self.kind})"

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that it was given, by parameter."""
        given = dict(zip(self.names, self.args, strict=False)) if self.names else {}
        extra = {f"argument {at}": value for at, value in enumerate(self.args) if at >= len(self.names)}
        found = {}
        for name, value in {**given, **extra, **self.kwargs}.items():
            leaves = tensors_of(value)
            for at, leaf in enumerate(leaves):
                found[name if len(leaves) == 1 else f"{name}[{at}]"] = leaf
        return found

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


class AttentionsSeen(TorchFunctionMode):
    """While it is entered, notes the attention calls of this thread that no other mode handles first.

    ``masks`` has one entry for each call: the mask of a scaled_dot_product_attention, None for other functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[AttentionMask | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if graph_task_id() < 0:
            if func is F.scaled_dot_product_attention:
                given = sdpa_arguments(args, kwargs)
                self.masks.append(AttentionMask(_kept(given["attn_mask"]), given["is_causal"]))
            elif getattr(func, "__name__", "") in _ATTENTIONS:
                self.masks.append(None)
        return func(*args, **kwargs)


class Recording:
    """Records the calls of all modules under ``model`` while it is entered. What a backward recomputes is left out.

    Attributes:
        calls: those that have ended, in the order in which they did, so children before their parents.
        open: those that have not, the innermost last. After an exception, where it was raised.
        masks: of an :class:`AttentionsSeen` that is entered with it, if there is one.
    """

    def __init__(self, model: nn.Module, seen: AttentionsSeen | None = None) -> None:
        self._model = model
        self._numbers: Counter[str] = Counter()
        self._handles: list[Any] = []
        self.calls: list[Call] = []
        self.open: list[Call] = []
        self.masks = [] if seen is None else seen.masks

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

    @property
    def by_key(self) -> dict[Key, Call]:
        return {call.key: call for call in self.calls}

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if graph_task_id() >= 0:
            return
        key = name, self._numbers[name]
        self._numbers[name] += 1
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = tuple(each.name for each in parameters if each.kind in _POSITIONAL)
        parent = self.open[-1] if self.open else None
        seen = len(self.masks), 0
        kept = tree_map(_kept, args), tree_map(_kept, kwargs)
        self.open.append(Call(key, type(module).__name__, parent, *kept, names, seen))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if graph_task_id() >= 0 or not self.open:
            return
        call = self.open.pop()
        call.attended = call.attended[0], len(self.masks)
        for leaf in tensors_of(output):
            call.outputs.append(_kept(leaf))
            call.gradients.append(None)
            if leaf.requires_grad:
                leaf.register_hook(partial(_add_gradient, call, len(call.outputs) - 1))
        self.calls.append(call)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested structures."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ATTENTIONS = {"flex_attention", "multi_head_attention_forward", "varlen_attn"}


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _add_gradient(call: Call, at: int, gradient: torch.Tensor) -> None:
    known = call.gradients[at]
    call.gradients[at] = gradient.detach().clone() if known is None else known + gradient.detach()


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def sdpa_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of scaled_dot_product_attention by name."""
    return {"attn_mask": None, "is_causal": False} | dict(zip(_SDPA, args, strict=False)) | dict(kwargs)


class OtherMasks(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention has no attn_mask, and is causal if ``is_causal`` says so."""

    def __init__(self, is_causal: Callable[[bool], bool]) -> None:
        super().__init__()
        self._is_causal = is_causal

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = sdpa_arguments(args, kwargs or {})
        return func(**given | {"attn_mask": None, "is_causal": self._is_causal(given["is_causal"])})
