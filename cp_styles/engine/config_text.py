"""What an attention is bound to as a text, and back: how a configuration becomes an argument of an op.

An op takes tensors, numbers and strings. Strategies, layouts, masks and kernels are small frozen objects, so they are
spelled out, and the text stands in the compiled graph: whatever keys a cache by the graph, torch's caches on disk too,
then sees the configuration. Functions and classes are spelled by name, so that what runs is always this process' code.

[Note: what a text may name] Texts also come from elsewhere, with an exported program for one, and what they name is
called. So they may name what this process has spelled itself, dtypes, and what the package itself spells: its masks,
strategies and the like, and its balancers. Nothing is imported for a text.

:func:`to_text` is traced by torch.compile as it stands, so every number and name it reads is guarded: another mask is
another graph. Hence its plain style.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import types
from functools import lru_cache
from typing import Any

import torch

from cp_styles._compat import constant_under_compile
from cp_styles.mask import Dense

_PACKAGE = "cp_styles."

# What has been spelled in this process, by name. All of it is at the top level of a module, and as few things as a
# program has such definitions.
_spelled: dict[str, Any] = {}


def to_text(value: Any, tensors: list[torch.Tensor]) -> str:
    """``value`` as a literal that :func:`from_text` reads; the tensors of ``Dense`` masks are appended to ``tensors``.

    Raises:
        TypeError: for what has no name by which another process could find it, or no fields to rebuild it from.
    """
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, int):
        return repr(_fixed(value))
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return "(" + "".join([to_text(item, tensors) + "," for item in value]) + ")"
    if isinstance(value, Dense):
        tensors.append(value.tensor)
        return "[" + str(len(tensors) - 1) + "]"
    if isinstance(value, functools.partial):
        function, positional = to_text(value.func, tensors), to_text(tuple(value.args), tensors)
        keywords = ["(" + repr(key) + "," + to_text(item, tensors) + ",)," for key, item in value.keywords.items()]
        return "{'functools:partial':(" + function + "," + positional + ",(" + "".join(keywords) + "),)}"
    if isinstance(value, (types.FunctionType, torch.dtype)):
        name = _name_of(value)
        if not name:
            raise TypeError(f"{_shown(value)} cannot be found by name: define it at the top level of a module")
        return "{" + repr(name) + "}"
    name, fields = _fields_of(type(value))
    if not name:
        raise TypeError(
            f"a {type(value).__name__} cannot be spelled out: make its class a frozen dataclass at the top level of a "
            "module, all of whose fields are numbers, strings, tuples or such objects"
        )
    return "{" + repr(name) + ":(" + "".join([to_text(getattr(value, field), tensors) + "," for field in fields]) + ")}"


def from_text(text: str, tensors: tuple[torch.Tensor, ...] = ()) -> Any:
    """What :func:`to_text` spelled; remembered, where there are no tensors in it.

    Raises:
        ValueError: for what no text may name; see [Note: what a text may name].
    """
    return _build(_literal(text), tensors) if tensors else _parsed(text)


@lru_cache(maxsize=512)
def _parsed(text: str) -> Any:
    return _build(_literal(text), ())


@lru_cache(maxsize=512)
def _literal(text: str) -> Any:
    return ast.literal_eval(text)


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


def _fixed(number: int) -> int:
    """The same number; under torch.compile, which makes symbols of numbers that change, one that it is guarded on."""
    return len(range(number)) if number >= 0 else -len(range(-number))


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
    """Under which name a class is found, and which fields its constructor takes; no name for what cannot be rebuilt."""
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
    """What a text names; see [Note: what a text may name]."""
    found = _spelled.get(name)
    if found is None and name.split(":")[0] == "torch" and isinstance(_found(name), torch.dtype):
        found = _found(name)
    if found is None and name.startswith(_PACKAGE):
        found = _found(name)
        own = isinstance(found, (type, types.FunctionType)) and f"{found.__module__}:{found.__qualname__}" == name
        spells = own and (bool(_fields_of(found)[0]) if isinstance(found, type) else _is_balancer(found))
        found = found if spells else None
    if found is None:
        raise ValueError(
            f"the configuration of an attention names {name!r}, which nothing in this process has named yet: an "
            "exported program may name its own balancers and masks only once they are used here (apply the style, or "
            "compile the call, that has them), and nothing else"
        )
    return found


def _is_balancer(function: types.FunctionType) -> bool:
    return function.__code__.co_varnames[:2] == ("length", "ranks")


def _found(name: str) -> Any:
    """What is there under ``module:qualified.name``, or None; nothing is imported."""
    module, _, path = name.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        return None
