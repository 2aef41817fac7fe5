"""Introspection of a mask_mod or score_mod of FlexAttention: the tensors that it reads, and its code as a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def captured_tensors(mod: Callable[..., Any], numbers: tuple[float, ...], device: torch.device) -> list[torch.Tensor]:
    """The tensors that a mask_mod or score_mod reads beside its arguments, in the order of their first use.

    They are found by calling it once, so they may come from closures, globals, attributes of modules or elsewhere.
    """
    # torch.tensor(..., device=device) would make the host wait for a GPU.
    arguments = [torch.full((1,), number, device=device) for number in numbers]
    reading = _Reading()
    reading.note(arguments)  # vmap asks them for their sizes
    with reading:
        torch.vmap(partial(_noted, reading, mod))(*arguments)
    return list(reading.found.values())


def _noted(reading: _Reading, mod: Callable[..., Any], *arguments: torch.Tensor) -> Any:
    reading.note(arguments)
    return mod(*arguments)


class _Reading(TorchFunctionMode):
    """Collects tensors that are passed to torch calls but are neither arguments nor results of other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}

    def note(self, value: Any) -> None:
        self._known.update((id(tensor), tensor) for tensor in tensors_in(value))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            if id(tensor) not in self._known:
                self.found[id(tensor)] = tensor
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class Replacing(TorchFunctionMode):
    """Replaces tensors in the arguments of all torch calls. ``others`` maps the id of a tensor to its replacement."""

    def __init__(self, others: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._put(args), **self._put(kwargs or {}))

    def _put(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._others.get(id(value), value)
        if isinstance(value, dict):
            return {key: self._put(item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._put(item) for item in value)
        return value


def code_of(function: Any) -> str:
    """A text that describes a Python function, the same in all processes that have the same function.

    It has the code, the constants, and the plain values that the function reads from closures, globals and attributes
    of objects. For tensors it has the shapes, for objects without Python code the type. It has only attributes that the
    code names, because other attributes may differ between ranks.
    """
    return repr(_described(function, (), set()))


def _described(value: Any, names: Iterable[str], above: set[int]) -> Any:
    """The description of ``value`` for :func:`code_of`. ``names`` are the attributes that the code around may read."""
    if id(value) in above:  # a recursive function
        return "..."
    above = above | {id(value)}
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return [_described(item, names, above) for item in value]
    if isinstance(value, dict):
        return [(repr(key), _described(item, names, above)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return sorted(repr(_described(item, names, above)) for item in value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, _described(value.co_consts, (), above)
    if isinstance(value, (ModuleType, type)):
        return value.__name__
    if isinstance(value, partial):
        return [_described(part, names, above) for part in (value.func, value.args, value.keywords)]
    code = getattr(value, "__code__", None)
    if code is None:
        held = getattr(value, "__dict__", {})
        used = {*names, *(_names_in(type(value).__call__.__code__) if _is_python(value) else ())}
        found = sorted(used & held.keys())
        return type(value).__qualname__, [(name, _described(held[name], used, above)) for name in found]
    used = {*names, *_names_in(code)}
    around = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
    around += [value.__defaults__, value.__kwdefaults__, getattr(value, "__self__", None)]
    # Only plain values of globals: functions and modules have the same code on all ranks.
    known = [(name, value.__globals__[name]) for name in sorted(_names_in(code)) if name in value.__globals__]
    plain = [(name, _described(item, used, above)) for name, item in known if isinstance(item, _PLAIN)]
    return [*(_described(part, used, above) for part in (code, *around)), plain]


def _is_python(value: Any) -> bool:
    return callable(value) and hasattr(type(value).__call__, "__code__")


def _names_in(code: Any) -> set[str]:
    if not isinstance(code, CodeType):
        return set()
    return {*code.co_names}.union(*(_names_in(constant) for constant in code.co_consts))


_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_EMPTY_CELL = CellType()
