"""ModuleContextParallel: for modules that call scaled_dot_product_attention somewhere inside, a whole model even."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from cp_styles._compat import fast_path_attention
from cp_styles.functional import attend
from cp_styles.mask import Dense
from cp_styles.scope import ScopedBinding
from cp_styles.styles.context import ContextParallelStyle

_STATE = "_context_parallel_calls"


class ModuleContextParallel(ContextParallelStyle):
    """Context parallelism at the call: every scaled_dot_product_attention under the module attends to all ranks' keys.

    For attention modules that do their own projections, and for whole models whose code cannot be changed. Everything
    else in the module sees plain local tensors: this rank's part of the sequence. However the function was imported,
    its calls are seen, while the module or one of its descendants runs. Each of them gets a subclass of its own class
    for that, so state_dict keys and isinstance stay as they were, and a checkpointed layer is recomputed as it ran.

    An attn_mask of a call is the mask of the whole sequence, rows and columns in the order of positions.
    What depends on positions is the caller's: give the model the layout's (``layout.positions(rank)``).

    Args:
        mesh_axis, strategy, layout, mask, kernel: see :class:`~cp_styles.styles.context.ContextParallelStyle`.

    Raises (at the call, on every rank): NotImplementedError for dropout, for attention by other
    functions (nn.MultiheadAttention), for an attention under no_grad inside a forward that was entered with gradients
    (a function under reentrant checkpointing, whose recomputation would be local), and when no attention was reached.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        taken = [name or "itself" for name, child in module.named_modules() if hasattr(child, _STATE)]
        if taken:
            raise ValueError(
                f"{type(module).__name__} has context-parallel modules already ({', '.join(taken[:3])}): apply one "
                "ModuleContextParallel to a module"
            )
        _, binding = self.bind(module, device_mesh)
        calls = _Calls(ScopedBinding(binding, self.layout), binding.name)
        for child in module.modules():
            # torch's own leaves call no attention, and there are many of them.
            if (
                child is module
                or any(True for _ in child.children())
                or not type(child).__module__.startswith("torch.")
            ):
                setattr(child, _STATE, calls)
                child.__class__ = _subclass(type(child))
        module.register_forward_pre_hook(calls.start)
        module.register_forward_hook(calls.require_one)
        return module


class _Calls(TorchFunctionMode):
    """Sends the attention calls of one styled module through the engine."""

    def __init__(self, scoped: ScopedBinding, name: str) -> None:
        super().__init__()
        self._scoped = scoped
        self._name = name
        self._grad_at_entry: list[bool] = []
        self._seen = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        made = memo[id(self)] = _Calls(self._scoped, self._name)
        return made

    def __enter__(self) -> _Calls:
        self._grad_at_entry.append(torch.is_grad_enabled())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._grad_at_entry.pop()
        return super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _OTHERS or getattr(func, "__name__", None) in _OTHER_OPERATORS:
            raise NotImplementedError(
                f"{self._name}: {func.__name__} is not one of the attention calls that run context parallel; use "
                "scaled_dot_product_attention"
            )
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
        self._seen += 1

        def refuse() -> None:
            if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
                raise ValueError(f"{self._name}: query, key and value are DTensors here; pass local tensors")
            if dropout_p:
                raise NotImplementedError(
                    f"{self._name}: dropout_p={dropout_p}: each rank's random numbers would have to be those of one "
                    "device. Set it to 0, or apply dropout after the attention"
                )
            if attn_mask is not None:
                Dense(attn_mask)  # raises for what is no mask
            if query.shape[1] != key.shape[1] and not enable_gqa:
                raise ValueError(
                    f"{self._name}: {query.shape[1]} query heads and {key.shape[1]} key/value heads need "
                    "enable_gqa=True"
                )
            if self._grad_at_entry[-1] and not torch.is_grad_enabled():
                raise NotImplementedError(
                    f"{self._name}: attention under no_grad inside a module that was entered with gradients. If this "
                    "is reentrant checkpointing of a function, its recomputation would not be context parallel: "
                    "checkpoint a module that makes the call, a layer for example"
                )

        return attend(
            self._scoped.now(),
            (query, key, value),
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            refuse=refuse,
        )

    def start(self, module: nn.Module, args: Any) -> None:
        self._seen = 0

    def require_one(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._seen:
            raise NotImplementedError(
                f"{self._name}: no scaled_dot_product_attention was called inside: nothing here is context parallel, "
                "and attention by other means would be local to each rank"
            )


# Attention that would otherwise run on the local part, silently.
_OTHERS = {F.multi_head_attention_forward, *fast_path_attention()}
# What flex_attention and varlen_attn, plain Python functions, come down to.
_OTHER_OPERATORS = {"flex_attention", "_varlen_attn"}


class _Entered:
    """Put before a module's class: its forward runs with the calls sent through the engine."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with getattr(self, _STATE):
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # What copy.deepcopy does without it, by the way that is closed to pickle below.
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is context parallel (ModuleContextParallel), bound to the process groups of this "
            "run, and cannot be pickled: save its state_dict(), load that into a new one and apply the style to it"
        )


_subclasses: dict[type, type] = {}


def _subclass(cls: type) -> type:
    if cls not in _subclasses:
        made = type(cls.__name__, (_Entered, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
        made.__signature__ = inspect.signature(cls)
        _subclasses[cls] = made
    return _subclasses[cls]
