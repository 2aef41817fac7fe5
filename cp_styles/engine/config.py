"""The configuration of an attention as a value: the argument of the op in a compiled graph.

torch.compile guards the value by ``==``, and uses it as a key of its caches on disk. Compiled code rebuilds it by
pickle. So it consists of numbers, strings, and of functions and classes that are found by name at the top level of
modules. Strategies, layouts, masks and kernels are small frozen dataclasses: the value holds each as a tuple of its
class and its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
import types
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cp_styles._lib.compat import OpaqueValue, constant_under_compile, register_opaque_value
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.masks import Dense, Mask
from cp_styles.strategies import Strategy


@dataclass(frozen=True)
class AttentionConfig(OpaqueValue):
    """The configuration of the calls of one style or function in a compiled graph, without tensors.

    Attributes:
        parts: strategy, layout, mask, kernel and layout of keys, as :func:`take_apart` returns them.
        has_layout: the user has given a layout. The open SequenceScope applies to a function's call without a layout.
        has_owner: a style or block holds the binding. If the owner is gone, the op raises.
        problem: the reason why there are no parts. The op raises it on every rank.
    """

    name: str
    axis: str
    group_name: str
    parts: Any
    agreement: bool
    only_warn: bool
    has_layout: bool
    has_owner: bool = False
    problem: str = ""

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"AttentionConfig.loads({pickle.dumps(self)!r})", {"AttentionConfig": AttentionConfig}

    loads = staticmethod(pickle.loads)


register_opaque_value(AttentionConfig)


@dataclass(frozen=True)
class LiveObject(OpaqueValue):
    """A weak reference as an argument of a function whose result is constant under torch.compile.

    torch.compile guards the identity of the object.
    """

    reference: weakref.ref[Any]

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        raise NotImplementedError("a LiveObject is the argument of no operator")


register_opaque_value(LiveObject)


class ConfigInGraph(NamedTuple):
    """The arguments of an attention in a graph. ``dense`` is the tensor of the ``Dense`` mask, if there is one."""

    config: AttentionConfig
    dense: torch.Tensor | None


def config_in_graph(
    name: str,
    axis: str,
    group_name: str,
    strategy: Strategy,
    layout: SequenceLayout | Balancer,
    mask: Mask,
    kernel: Kernel | None,
    kv_layout: SequenceLayout | Balancer | None = None,
    *,
    checks: Checks = CHECKS,
    has_layout: bool = False,
    has_owner: bool = False,
) -> ConfigInGraph:
    """The configuration as a value, without the local parameters of ``checks``.

    torch.compile traces this function, and guards each field that it reads. ``has_layout``, ``has_owner``: see
    :class:`AttentionConfig`.

    Raises:
        TypeError: for objects that another process could not rebuild, and for two ``Dense`` masks.
    """
    tensors: list[torch.Tensor] = []
    parts = take_apart((strategy, layout, mask, kernel, kv_layout), tensors)
    if len(tensors) > 1:
        raise TypeError(f"{len(tensors)} Dense masks under torch.compile: combine them; give layouts, not balancers")
    config = _make_config(name, axis, group_name, parts, checks.agreement, checks.only_warn, has_layout, has_owner)
    return ConfigInGraph(config, tensors[0] if tensors else None)


_make_config = constant_under_compile(AttentionConfig)


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Divide ``value`` into parts for :func:`rebuild`. The tensors of ``Dense`` masks are appended to ``tensors``.

    Raises:
        TypeError: for objects that another process could not find by name, or not rebuild from their fields.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, Mask) and value.only_for is not None:
        raise TypeError(
            "a mask of selected keys holds tensors of this call, and cannot be in a graph: let the attention run "
            "outside of compiled code, torch.compiler.disable(context_attention)"
        )
    if isinstance(value, int):
        # The length of a range is a guarded constant under torch.compile. The number itself could become a symbol.
        return len(range(value)) if value >= 0 else -len(range(-value))
    if isinstance(value, tuple):
        return tuple, *[take_apart(item, tensors) for item in value]
    if isinstance(value, Dense):
        if not (tensors and tensors[-1] is value.tensor):  # a balancer and the mask may share a tensor
            tensors.append(value.tensor)
        return Dense, len(tensors) - 1
    if isinstance(value, functools.partial):
        keywords = [(tuple, key, take_apart(item, tensors)) for key, item in value.keywords.items()]
        positional = take_apart(tuple(value.args), tensors)
        return functools.partial, take_apart(value.func, tensors), positional, (tuple, *keywords)
    if isinstance(value, (types.FunctionType, torch.dtype)):
        if not _is_found_by_name(value):
            raise TypeError(
                f"{_describe(value)} cannot be found by name: define it at the top level of a module"
                f"{see('A function without a name')}"
            )
        return value
    fields = _fields_of(type(value))
    if fields is None:
        raise TypeError(
            f"a {type(value).__name__} cannot be rebuilt by compiled code: make its class a frozen dataclass at the "
            "top level of a module, all of whose fields are numbers, strings, tuples or such objects"
        )
    return type(value), *[take_apart(getattr(value, field), tensors) for field in fields]


def rebuild(parts: Any, dense: torch.Tensor | None = None) -> Any:
    """The object that :func:`take_apart` took apart; ``dense`` is the tensor of its ``Dense`` masks."""
    if not isinstance(parts, tuple):
        return parts
    cls, *fields = parts
    if cls is Dense:
        assert dense is not None
        return Dense(dense)
    fields = [rebuild(field, dense) for field in fields]
    if cls is tuple:
        return tuple(fields)
    if cls is functools.partial:
        function, positional, keywords = fields
        return functools.partial(function, *positional, **dict(keywords))
    return cls(*fields)


@constant_under_compile  # torch.compile guards the identity of the function or class
def _is_found_by_name(value: Any) -> bool:
    """Whether pickle finds ``value`` by its name."""
    if isinstance(value, torch.dtype):
        return True
    try:
        return functools.reduce(getattr, value.__qualname__.split("."), sys.modules[value.__module__]) is value
    except (AttributeError, KeyError):
        return False


@constant_under_compile
def _fields_of(cls: type) -> tuple[str, ...] | None:
    """The fields in the constructor of a class. None if an object cannot be rebuilt from them."""
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        simple = cls.__dataclass_params__.frozen and not any(field.init and field.kw_only for field in fields)  # pyright: ignore[reportAttributeAccessIssue]
        names = tuple(field.name for field in fields if field.init)
    else:
        simple, names = cls.__init__ is object.__init__ and cls.__new__ is object.__new__, ()
    return names if simple and _is_found_by_name(cls) else None


@constant_under_compile
def _describe(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)
