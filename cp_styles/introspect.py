"""Introspection of a mask_mod or score_mod of FlexAttention: the tensors that it reads, and its code as a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
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

    It has the code, and the plain values, functions and shapes of tensors in defaults, closures and partial objects.
    Objects have the name of their type: their attributes, and globals, are not compared.
    """
    return repr(_described(function, frozenset()))


def _described(value: Any, above: frozenset[int]) -> Any:
    """The description of ``value`` for :func:`code_of`. ``above`` are the objects around, by id."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if id(value) in above:  # a recursive function
        return "..."
    above |= {id(value)}
    if isinstance(value, (tuple, list)):
        return [_described(item, above) for item in value]
    if isinstance(value, dict):
        return [(repr(key), _described(item, above)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return sorted(repr(_described(item, above)) for item in value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, _described(value.co_consts, above)
    if isinstance(value, partial):
        return [_described(part, above) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return [_described(value.__func__, above), type(value.__self__).__qualname__]
    if not isinstance(value, FunctionType):
        return type(value).__qualname__
    around = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
    return [_described(part, above) for part in (value.__code__, value.__defaults__, value.__kwdefaults__, *around)]


def names_in(code: Any) -> frozenset[str]:
    """Names that a function, or its code, may read as globals or attributes."""
    code = getattr(code, "__code__", code)
    if not isinstance(code, CodeType):
        return frozenset()
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}  # getattr(self, "slope")
    return frozenset(texts).union(code.co_names, *map(names_in, code.co_consts))


_EMPTY_CELL = CellType()
