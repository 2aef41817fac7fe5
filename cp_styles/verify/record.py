"""Records the inputs and outputs of each module of a model, and the gradients of the outputs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from cp_styles._lib.compat import graph_task_id, is_in_torch_func, tensors_in, tree_map
from cp_styles.collectives.autograd import walk_graph
from cp_styles.engine.observers import attention_listener

Key = tuple[str, int]
"""A module's name, and the number of the call of this module."""

# Components of a module's name that wrappers add.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """``name`` without the components that wrappers (DDP, checkpoints, torch.compile) add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class Hooks:
    """A context in which ``begin`` and ``end`` are called around each call of a module under ``model``.

    Recomputations in a backward are ignored. A module with several names has its first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: Counter[str] = Counter()
        self._running: list[Key] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for name, module in self._model.named_modules():
            # Run before the styles' hooks for inputs, and after their hooks for outputs: record what the caller sees.
            before = partial(self._before, plain_name(name))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if graph_task_id() < 0:
            key = name, self._numbers[name]
            self._numbers[name] += 1
            self._running.append(key)
            self.begin(key, module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if graph_task_id() < 0 and self._running:
            return self.end(self._running.pop(), module, output)
        return None

    def begin(self, key: Key, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each call of ``module``."""

    def end(self, key: Key, module: nn.Module, output: Any) -> Any:
        """Called after each call of ``module``. Returns a replacement of ``output``, or None."""
        raise NotImplementedError

    @property
    def open(self) -> list[Key]:
        """The calls that have not ended, the innermost last. An exception was raised in the last call."""
        return self._running


ATTENTION = "attention"  # the kind of a call that is an attention


@dataclass(eq=False)
class Call:
    """One call of a module, or an attention in it.

    Attributes:
        parent: the call that made this call.
        args, kwargs: its arguments, detached.
        output: its result, detached.
        gradients: of each tensor in the output, in order; None for tensors without one.
        attended: the number of attentions before the call began, and before it ended.
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
        """The arguments, by parameter."""
        names = [*self.names[: len(self.args)], *(f"argument {at}" for at in range(len(self.names), len(self.args)))]
        return dict(zip(names, self.args, strict=True)) | self.kwargs

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors among the arguments, by parameter."""
        tensors = {}
        for name, value in self.arguments.items():
            leaves = tensors_in(value)
            tensors |= {name if len(leaves) == 1 else f"{name}[{at}]": leaf for at, leaf in enumerate(leaves)}
        return tensors

    def within(self, other: Call) -> bool:
        """Whether ``other`` made this call, directly or not."""
        node = self.parent
        while node is not None and node is not other:
            node = node.parent
        return node is other


class UnhandledAttention(TorchFunctionMode):
    """Appends None to ``attentions`` for each attention of this thread that no style or block handles, and calls
    ``note`` with its query, key and value.

    Dropout functions return their input, because each rank draws other random numbers.
    """

    def __init__(self, attentions: list[Any], note: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._attentions, self._note = attentions, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        attends = func is F.scaled_dot_product_attention or getattr(func, "__name__", "") in _ATTENTIONS
        if attends and (torch.compiler.is_dynamo_compiling() or graph_task_id() < 0):
            self._attentions.append(None)
            if self._note is not None:
                self._note(*(*args, *kwargs.values())[:3])
        return func(*args, **kwargs)


class OutsideParameters(TorchFunctionMode):
    """Collects the gradients of parameters that the model does not have: of another model of the step, a head, a scale.

    They are those to which a ``backward()`` of this thread leads. Inside of the context gradients that they had before
    are put aside.

    Attributes:
        gradients: the gradients at the end of the context.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._inside = set(map(id, model.parameters()))
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward and args[0].grad_fn is not None:
            leaves = (getattr(node, "variable", None) for node in walk_graph(args[0].grad_fn))
            for leaf in leaves:
                if isinstance(leaf, nn.Parameter) and id(leaf) not in self._inside and leaf not in self._before:
                    self._before[leaf], leaf.grad = leaf.grad, None
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for parameter, before in self._before.items():
            # FSDP2 takes the gradients of the parameters of a layer that it has gathered.
            if parameter.grad is not None:
                self.gradients[parameter] = parameter.grad.detach()
            parameter.grad = before


class Recording(Hooks):
    """Records the calls of all modules under ``model``, and the attentions in them: calls of which inputs are compared.

    Attributes:
        calls: the calls in the order in which they end: children precede their parents.
        attentions: an entry for each attention so far: see ``StepRun``.
    """

    def __init__(self, model: nn.Module, attentions: Sequence[Any]) -> None:
        super().__init__(model)
        self.attentions = attentions
        self.calls: list[Call] = []
        self._open: list[Call] = []

    def __enter__(self) -> Any:
        listener = attention_listener.get()
        assert listener is not None  # the step's

        def note(strategy: Any, attention: Any, *tensors: Any) -> None:
            at, names = len(self.attentions), ("query", "key", "value")
            listener(strategy, attention, *tensors)
            if graph_task_id() < 0 and self._open:
                parent = self._open[-1]
                name = f"the attention in {parent.name or 'the model'}"
                self._numbers[name] += 1
                self.calls.append(
                    Call(
                        (name, self._numbers[name]),
                        ATTENTION,
                        parent,
                        tree_map(_detach, tensors[:3]),
                        {},
                        names,
                        (at, at),
                    )
                )

        self._handles.append(SimpleNamespace(remove=partial(attention_listener.reset, attention_listener.set(note))))
        return super().__enter__()

    def begin(self, key: Key, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
        parent = self._open[-1] if self._open else None
        arguments = tree_map(_detach, args), tree_map(_detach, kwargs)
        self._open.append(Call(key, type(module).__name__, parent, *arguments, names, (len(self.attentions), 0)))

    def end(self, key: Key, module: nn.Module, output: Any) -> None:
        call = self._open.pop()
        call.attended = call.attended[0], len(self.attentions)
        call.output = tree_map(_detach, output)
        for at, leaf in enumerate(tensors_in(output)):
            call.gradients.append(None)
            if leaf.requires_grad:
                leaf.register_hook(partial(_add_gradient, call, at))
        self.calls.append(call)


class Outputs(Hooks):
    """Keeps parts of the outputs of all modules under ``model``.

    Attributes:
        kept: by call, the results of ``take(key, number of the tensor in the output, detached tensor)``.
        kinds: the class of each call's module, in the order in which the calls end.
        trained: the calls whose outputs have had a gradient.
    """

    def __init__(self, model: nn.Module, take: Callable[[Key, int, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(model)
        self._take = take
        self.kept: dict[Key, list[torch.Tensor | None]] = {}
        self.kinds: dict[Key, str] = {}
        self.trained: set[Key] = set()

    def results(self, keys: Iterable[Key]) -> list[Key]:
        """The calls, among ``keys``, whose outputs must be right."""
        # In a step with a backward, these are the calls of the model. An output of another module that differs, with
        # equal gradients, has no effect (a number for a log), or is not read (a pipeline's run to learn shapes).
        return [key for key in keys if not self.trained or (not key[0] and key in self.trained)]

    def end(self, key: Key, module: nn.Module, output: Any) -> Any:
        self.kinds[key] = type(module).__name__
        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(lambda gradient: self.trained.add(key))
        tensors = [x.detach() for x in tensors_in(output) if not is_in_torch_func(x)]
        self.kept[key] = [self._take(key, at, x) for at, x in enumerate(tensors)]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DROPOUT = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_ATTENTIONS = {"flex_attention", "multi_head_attention_forward", "varlen_attn"}


def _detach(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _add_gradient(call: Call, at: int, gradient: torch.Tensor | None) -> None:
    total = call.gradients[at]
    if gradient is not None:  # None means 0
        call.gradients[at] = gradient.detach().clone() if total is None else total + gradient.detach()
