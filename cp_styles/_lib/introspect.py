"""Introspection of a caller's functions: code and tensors of a mask_mod, arguments of a forward, names of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cp_styles._lib.compat import tensors_in, tree_map_only


def captured_tensors(mod: Callable[..., Any], numbers: tuple[float, ...], device: torch.device) -> list[torch.Tensor]:
    """The tensors that a mask_mod or score_mod reads in addition to its arguments, in the order of their first use."""
    # The function is called once, so the tensors may come from closures, globals, attributes of modules or elsewhere.
    # torch.tensor(..., device=device) would make the host wait for a GPU.
    arguments = [torch.full((1,), number, device=device) for number in numbers]
    mode = _CaptureMode()
    mode.note(arguments)  # vmap reads their sizes

    def run(*arguments: torch.Tensor) -> Any:
        mode.note(arguments)
        return mod(*arguments)

    with mode:
        torch.vmap(run)(*arguments)
    return list(mode.captured.values())


class _CaptureMode(TorchFunctionMode):
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


class ReplacementMode(TorchFunctionMode):
    """Replaces tensors in the arguments of all torch calls, by the ids of the replaced tensors."""

    def __init__(self, replacements: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._new = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lambda x: self._new.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


def describe_code(function: Any) -> str:
    """A text that describes a Python function or callable, equal in all processes for equal functions.

    It contains the code, and the plain values, functions and shapes of tensors in defaults, closures and partial
    objects. For other objects it contains the name of the type. It contains neither their attributes nor globals.
    """
    return repr(_describe(function, frozenset()))


def _describe(value: Any, above: frozenset[int]) -> Any:
    """The description of ``value`` for :func:`describe_code`. ``above``: ids of the objects that contain it."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if id(value) in above:  # a recursive function
        return "..."
    above |= {id(value)}
    if isinstance(value, (tuple, list)):
        return [_describe(item, above) for item in value]
    if isinstance(value, dict):
        return [(repr(key), _describe(item, above)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return sorted(repr(_describe(item, above)) for item in value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, _describe(value.co_consts, above)
    if isinstance(value, partial):
        return [_describe(part, above) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return [_describe(value.__func__, above), type(value.__self__).__qualname__]
    if not isinstance(value, FunctionType):
        return type(value).__qualname__
    around = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
    return [_describe(part, above) for part in (value.__code__, value.__defaults__, value.__kwdefaults__, *around)]


_EMPTY_CELL = CellType()


def _parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """The positional parameters of the forward of a module class, without self."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def input_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the positional arguments of a module's forward; for a wrapper, of the module that it wraps."""
    names, inner = _parameter_names(type(module)), module
    while not names and (inner := wrapped_module(inner)) is not None:
        names = _parameter_names(type(inner))
    return names


def forward_parameters(module: nn.Module) -> list[str]:
    """The names of all arguments of a module's forward, and of the modules that it wraps."""
    return [name for inner in list_wrapped(module) for name in inspect.signature(type(inner).forward).parameters]


def list_wrapped(module: nn.Module) -> list[nn.Module]:
    """A module, and the modules to which it passes its arguments, from the outside in."""
    modules = [module]
    while (inner := wrapped_module(modules[-1])) is not None:
        modules.append(inner)
    return modules


def is_model(module: nn.Module) -> bool:
    """Whether a module takes tokens like models of transformers."""
    # Such a module may count its tokens, or make masks and losses of them.
    return "input_ids" in inspect.signature(type(module).forward).parameters


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """The module to which a wrapper passes its arguments: its only child, if its forward takes ``**kwargs``."""
    kinds = {parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()}
    children = list(module.children())
    return children[0] if len(children) == 1 and inspect.Parameter.VAR_KEYWORD in kinds else None


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern of a plan names the module of this path. ``*`` and ``?`` do not match a dot."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch, names, patterns))
