"""The configuration of an attention as a text, so that it can be an argument of an op; and the way back.

An op takes tensors, numbers and strings. Strategies, layouts, masks and kernels are small frozen objects, so they can
be written as a text. The text is part of the compiled graph. So every cache that is keyed by the graph, also torch's
cache on disk, depends on the configuration. Functions and classes are written by name: the code that runs is always
that of this process.

[Note: what a text may name] Texts may come from elsewhere, for example with an exported program, and what they name is
called. So they may name only what this process has written to a text itself, dtypes, and what this package defines: its
masks, strategies and so on, and its balancers. Nothing is imported for a text.

torch.compile traces :func:`to_text`, so it guards every number and name that the function reads: another mask gives
another graph. Therefore the function is written in a simple style.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import types
from typing import Any

import torch

from cp_styles._compat import constant_under_compile
from cp_styles.bounded_cache import remembered
from cp_styles.mask import Dense
from cp_styles.troubleshooting import see

_PACKAGE = "cp_styles."

# Functions and classes that this process has written to a text, by name. They are defined at the top level of modules,
# so the table is not larger than the program.
_spelled: dict[str, Any] = {}


def to_text(value: Any, tensors: list[torch.Tensor]) -> str:
    """``value`` as a literal that :func:`from_text` reads; the tensors of ``Dense`` masks are appended to ``tensors``.

    Raises:
        TypeError: for objects that another process could not find by name, or not rebuild from their fields.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return repr(value)
    if isinstance(value, int):
        # Under torch.compile a guarded constant, where the number itself could become a symbol.
        return repr(len(range(value)) if value >= 0 else -len(range(-value)))
    if isinstance(value, tuple):
        return "(" + "".join([to_text(item, tensors) + "," for item in value]) + ")"
    if isinstance(value, Dense):
        if not (tensors and tensors[-1] is value.tensor):  # that of a balancer and of the mask may be one
            tensors.append(value.tensor)
        return "[" + str(len(tensors) - 1) + "]"
    if isinstance(value, functools.partial):
        function, positional = to_text(value.func, tensors), to_text(tuple(value.args), tensors)
        keywords = ["(" + repr(key) + "," + to_text(item, tensors) + ",)," for key, item in value.keywords.items()]
        return "{'functools:partial':(" + function + "," + positional + ",(" + "".join(keywords) + "),)}"
    if isinstance(value, (types.FunctionType, torch.dtype)):
        name = _name_of(value)
        if not name:
            raise TypeError(
                f"{_shown(value)} cannot be found by name: define it at the top level of a module"
                f"{see('A function without a name')}"
            )
        return "{" + repr(name) + "}"
    name, fields = _fields_of(type(value))
    if not name:
        raise TypeError(
            f"a {type(value).__name__} cannot be written as a text: make its class a frozen dataclass at the top level "
            "of a module, all of whose fields are numbers, strings, tuples or such objects"
        )
    return "{" + repr(name) + ":(" + "".join([to_text(getattr(value, field), tensors) + "," for field in fields]) + ")}"


def from_text(text: str, tensors: tuple[torch.Tensor, ...] = ()) -> Any:
    """The object that :func:`to_text` wrote. Cached, if it has no tensors: with these there is a new one at each call.

    Raises:
        ValueError: for names that a text may not have; see [Note: what a text may name].
    """
    return _build(ast.literal_eval(text), tensors) if tensors else _parsed(text)


@remembered(64)
def _parsed(text: str) -> Any:
    return _build(ast.literal_eval(text), ())


def _build(literal: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(literal, tuple):
        return tuple(_build(item, tensors) for item in literal)
    if isinstance(literal, list):
        return Dense(tensors[literal[0]])
    if isinstance(literal, set):
        return _known(*literal)
    if isinstance(literal, dict):
        ((name, arguments),) = literal.items()
        built = _build(arguments, tensors)
        if name == "functools:partial":
            function, positional, keywords = built
            return functools.partial(function, *positional, **dict(keywords))
        return _known(name)(*built)
    return literal


@constant_under_compile  # a function or class stands for itself: the compiler guards its identity
def _name_of(value: Any) -> str:
    """``module:qualified.name`` under which ``value`` is found, or nothing."""
    if isinstance(value, torch.dtype):
        return str(value).replace(".", ":")
    name = f"{value.__module__}:{value.__qualname__}"
    if _found(name) is not value:
        return ""
    _spelled[name] = value
    return name


@constant_under_compile
def _fields_of(cls: type) -> tuple[str, tuple[str, ...]]:
    """The name of a class and the fields that its constructor takes. The name is empty if it cannot be rebuilt."""
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        simple = cls.__dataclass_params__.frozen and not any(field.init and field.kw_only for field in fields)  # pyright: ignore[reportAttributeAccessIssue]
        names = tuple(field.name for field in fields if field.init)
    else:
        simple, names = cls.__init__ is object.__init__ and cls.__new__ is object.__new__, ()
    return (_name_of(cls) if simple else ""), names


@constant_under_compile
def _shown(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


def _known(name: str) -> Any:
    """The object that a text names; see [Note: what a text may name]."""
    value = _spelled.get(name)
    if value is None and name.split(":")[0] == "torch" and isinstance(_found(name), torch.dtype):
        value = _found(name)
    if value is None and name.startswith(_PACKAGE):
        value = _found(name)
        if not isinstance(value, (type, types.FunctionType)) or f"{value.__module__}:{value.__qualname__}" != name:
            value = None  # imported there
        elif isinstance(value, type):
            value = value if _fields_of(value)[0] else None
        elif value.__code__.co_varnames[:2] != ("length", "ranks"):  # no balancer
            value = None
    if value is None:
        raise ValueError(
            f"the configuration of an attention names {name!r}, which this process has not used yet: an exported "
            "program may name its own balancers and masks only after they were used in this process (apply the style "
            "or compile the call that has them), and nothing else"
        )
    return value


def _found(name: str) -> Any:
    """The object ``module:qualified.name``, or None. Nothing is imported."""
    module, _, path = name.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        return None
