"""Introspection of a mask_mod or score_mod of FlexAttention: the tensors that it reads, and its code as a text."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cp_styles._compat import tensors_in, tree_map_only


def captured_tensors(mod: Callable[..., Any], numbers: tuple[float, ...], device: torch.device) -> list[torch.Tensor]:
    """The tensors that a mask_mod or score_mod reads beside its arguments, in the order of their first use.

    They are found by calling it once, so they may come from closures, globals, attributes of modules or elsewhere.
    """
    # torch.tensor(..., device=device) would make the host wait for a GPU.
    arguments = [torch.full((1,), number, device=device) for number in numbers]
    reading = _Reading()
    reading.note(arguments)  # vmap asks them for their sizes
    with reading:

        def noting(*arguments: torch.Tensor) -> Any:
            reading.note(arguments)
            return mod(*arguments)

        torch.vmap(noting)(*arguments)
    return list(reading.captured.values())


class _Reading(TorchFunctionMode):
    """Collects tensors that are passed to torch calls but are neither arguments nor results of other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}

    def note(self, value: Any) -> None:
        self._known.update((id(tensor), tensor) for tensor in tensors_in(value))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            if id(tensor) not in self._known:
                self.captured[id(tensor)] = tensor
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result


class Replacing(TorchFunctionMode):
    """Replaces tensors in the arguments of all torch calls. ``others`` maps the id of a tensor to its replacement."""

    def __init__(self, others: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lambda x: self._others.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


def code_of(function: Any) -> str:
    """A text that describes a Python function or callable, the same in all processes that have the same one.

    It has the code, the constants, and the plain values that the function reads from closures, globals and attributes
    of objects, also where methods, properties and helpers of the program read them. For tensors it has the shapes, for
    objects without Python code the type. It has only attributes that the code names, because other attributes may
    differ between ranks.
    """
    return repr(_described(function, frozenset(), frozenset()))


def _described(value: Any, names: frozenset[str], above: frozenset[int]) -> Any:
    """The description of ``value`` for :func:`code_of`. ``names`` are the attributes that the code around may read."""
    if isinstance(value, _PLAIN):
        return value
    if id(value) in above:  # a recursive function
        return "..."
    above |= {id(value)}
    if isinstance(value, (tuple, list)):
        return [_described(item, names, above) for item in value]
    if isinstance(value, dict):
        return [(repr(key), _described(item, names, above)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return sorted(repr(_described(item, names, above)) for item in value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, _described(value.co_consts, frozenset(), above)
    if isinstance(value, (ModuleType, type)):
        return value.__name__
    if isinstance(value, partial):
        return [_described(part, names, above) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        of_self = _described_object(value.__self__, names | names_in(value.__func__), above, called=False)
        return [_described(value.__func__, names, above), of_self]
    if not isinstance(value, FunctionType):
        inside = inspect.getattr_static(value, "__wrapped__", None)  # of functools.lru_cache
        return _described_object(value, names, above) if inside is None else _described(inside, names, above)
    read = names_in(value)
    used = names | read
    around = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
    around += [value.__defaults__, value.__kwdefaults__]
    values = [(name, value.__globals__[name]) for name in sorted(read & value.__globals__.keys())]
    values = [(name, _described(item, used, above)) for name, item in values if _of_the_program(item, value)]
    return [*(_described(part, used, above) for part in (value.__code__, *around)), values]


def _described_object(value: Any, names: frozenset[str], above: frozenset[int], called: bool = True) -> Any:
    code: dict[str, Any] = {}  # of the methods and properties that the code around reaches
    values: dict[str, Any] = {}  # of the attributes that all of these name
    places, waiting = [getattr(value, "__dict__", {})], sorted(names)
    if not isinstance(value, nn.Module):
        waiting += ["__call__"] * called
    else:
        places += [value._modules, value._parameters, value._buffers]
        # Of a module whose attributes are read, the forward is not what is meant.
        waiting += ["forward"] * (called and not any(name in attributes for name in names for attributes in places))
    for name in waiting:
        for attributes in places:
            if name in attributes:
                values[name] = attributes[name]
        attribute = inspect.getattr_static(type(value), name, None)
        if isinstance(attribute, MemberDescriptorType):  # of __slots__
            values[name] = getattr(value, name, None)
        if attribute is not None and isinstance(attribute, (*_PLAIN, tuple)):
            values.setdefault(name, attribute)
        # Inside of a static or class method, a property, a cached one, functools.lru_cache.
        inside = (getattr(attribute, key, None) for key in ("__func__", "fget", "func", "__wrapped__"))
        function = next((x for x in inside if x is not None), attribute)
        if isinstance(function, FunctionType) and _root(function) not in _LIBRARIES:
            code[name] = function
            waiting += sorted(names_in(function).difference(waiting))
    used = frozenset(waiting)
    return type(value).__qualname__, [(x, _described(y, used, above)) for x, y in sorted((code | values).items())]


def _of_the_program(value: Any, function: FunctionType) -> bool:
    """Whether a global of ``function`` may differ between ranks: modules, and functions of others, have the same code
    on all ranks."""
    if isinstance(value, FunctionType):
        return _root(value) == _root(function)
    if isinstance(value, (ModuleType, type)):
        return False
    return isinstance(value, _CONTAINERS) or _root(value) not in _LIBRARIES


def _root(value: Any) -> str:
    """The package of a function, or of an object's type."""
    return str(getattr(value if isinstance(value, FunctionType) else type(value), "__module__", "")).partition(".")[0]


def names_in(code: Any) -> frozenset[str]:
    """Names that a function, or its code, may read as globals or attributes."""
    code = getattr(code, "__code__", code)
    if not isinstance(code, CodeType):
        return frozenset()
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}  # getattr(self, "slope")
    return frozenset(texts).union(code.co_names, *map(names_in, code.co_consts))


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (*_PLAIN, tuple, list, dict, set, frozenset)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}
_EMPTY_CELL = CellType()
