"""ModuleContextParallel: for modules that call attention functions somewhere inside, such as a whole model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles._lib.compat import graph_task_id, hooks_in_order, never_compile_alone, scripted_attention
from cp_styles._lib.introspect import is_model, matches
from cp_styles._lib.subclassing import UnpicklableMixin, insert_mixin
from cp_styles.checks import check_layers, observers_of
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.engine.binding import Binding
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.intercept.function_mode import AttentionCalls, ForwardObserver
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.masks import Mask
from cp_styles.strategies import Strategy
from cp_styles.styles.base import ContextParallelStyle
from cp_styles.styles.counted_positions import hand_over_positions

_STATE = "_context_parallel_calls"
# Each changes the class of a module whose layer it knows. Filled at import by integrations/layers.py: styles know the
# layers of no library. ``import cp_styles`` imports that file, and a style cannot be imported without the package.
LAYER_CHANGES: list[Callable[[nn.Module], None]] = []


class ModuleContextParallel(ContextParallelStyle):
    """Context parallelism for all calls of scaled_dot_product_attention under a module, over the whole sequence.

    For attention modules with their own projections, and for whole models whose code stays as it is. All other code in
    the module sees plain local tensors: this rank's part of the sequence. Calls are intercepted while the module or one
    of its descendants runs, however the function was imported. For this, each of these modules gets a subclass of its
    class. state_dict keys and isinstance do not change, and a checkpointed layer is recomputed in the same way.

    The attn_mask of a call must be the mask of the whole sequence, rows and columns in the order of positions. Give the
    model the global positions of its tokens (``layout.positions(rank)``).

    Args:
        mesh_axis: the axis of a composed mesh that cuts the sequence. A 1-D mesh is used whatever its name.
        strategy: how keys and values get to the queries: ``Ring()`` (default), ``AllGather()``, ``Ulysses()``. Their
            docstrings give the communication and the memory.
        layout: the layout with which the inputs were cut, or the balancer that makes it. Default: the layout of the
            :class:`~cp_styles.SequenceScope` around the call; without a scope ``head_tail``. A
            :class:`~cp_styles.functions.joint_layout.JointLayout` if some tokens, such as a text, are whole on every
            rank.
        mask: which keys each query attends to, in global positions, in addition to ``is_causal`` of the call; default
            ``Full()``.
        kernel: computes the tiles; default the kernel that scaled_dot_product_attention chose. If it takes no masks,
            tiles with an explicit mask go to another kernel, see
            :func:`~cp_styles.kernels.choice_by_tile.kernel_for_tiles`.
        checks: what the ranks check of each other and of the arguments of the model: :class:`~cp_styles.Checks`.
        verified: a step of the model is compared with one device elsewhere, in a test for example. Without it, and
            without :func:`~cp_styles.verify.verify`, the first backward or evaluation warns
            (``UnverifiedModelWarning``).
        sink_name: name of a parameter of attention modules, such as "sinks", that holds their attention sinks: one
            learned logit for each query head, which takes part in every softmax and adds nothing to the output. Calls
            under such a module use it (scaled_dot_product_attention has no argument for it). Other calls have no sink.
        local: names of modules (patterns as in a plan, "frontend.*") whose input is whole on each rank, or whose mixing
            stays within a row of their input. Layers of torch that mix tokens are refused outside of them; see Raises.

    Query, key and value of a call are plain tensors [B, H, S, D] of one floating-point dtype on one device, CPU or
    CUDA. H may be a multiple of the number of key heads, with ``enable_gqa``.

    Communication of one call: one agreement of the ranks (:class:`~cp_styles.Checks`), then the strategy's. If
    the layout is a balancer that is not a function of this package, one more all-gather compares its results.
    Applying the style sends nothing.

    Raises:
        ValueError, TypeError: when applied, for a mesh without the axis, a module that has the style already, or a
            pattern in ``local`` that names no module. At a call, on every rank, for inputs that do not fit the layout,
            masks that are not of the whole sequence, and calls that differ between ranks.
        NotImplementedError: at a call, on every rank, for dropout, for attention by other functions, and for the
            weights that nn.MultiheadAttention returns unless need_weights=False. Also if no attention was reached. Also
            for attention in an autograd.Function inside, whose backward might run it again as local attention. And
            for layers of torch that mix tokens, outside of ``local`` and of the functions of ``cp_styles.mixers``:
            recurrences (``nn.RNNBase``), ``nn.Conv1d`` wider than 1, ``nn.BatchNorm1d`` and ``nn.SyncBatchNorm`` with
            statistics of the batch, ``nn.AvgPool1d``, ``nn.MaxPool1d`` and the adaptive ones.

    Example::

        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("cp",))
        parallelize_module(model, mesh, ModuleContextParallel(mask=Causal() & SlidingWindow(4095, 0)))
    """

    def __init__(
        self,
        *,
        mesh_axis: str = "cp",
        strategy: Strategy | None = None,
        layout: SequenceLayout | Balancer | JointLayout | None = None,
        mask: Mask | None = None,
        kernel: Kernel | None = None,
        checks: Checks = CHECKS,
        sink_name: str | None = None,
        local: Sequence[str] = (),
        verified: bool = False,
    ) -> None:
        self.joint = layout if isinstance(layout, JointLayout) else None
        layout = layout.balancer if isinstance(layout, JointLayout) else layout
        options = {"strategy": strategy, "layout": layout, "mask": mask, "kernel": kernel, "checks": checks}
        super().__init__(mesh_axis=mesh_axis, **options, verified=verified)
        self.sink_name = sink_name
        self.local = (local,) if isinstance(local, str) else tuple(local)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied = [name or "itself" for name, child in module.named_modules() if hasattr(child, _STATE)]
        if applied:
            raise ValueError(
                f"{type(module).__name__} has context-parallel modules already ({', '.join(applied[:3])}): apply one "
                "ModuleContextParallel to a module. For other ranks, in an evaluation for example, make a second model "
                "on the same memory, evaluated.load_state_dict(model.state_dict(), assign=True), and apply it to that"
            )
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__}: the attribute `forward` of the module itself was set. It hides the forward "
                "of the class, and would hide the forward of this style: apply the style first, or to the parent module"
            )
        scripted = next((name for child in module.modules() for name in _scripted_attentions(child)), None)
        if scripted is not None:
            raise NotImplementedError(
                f"{type(module).__name__}: {scripted} is TorchScript with attention in it. TorchScript calls operators "
                "without Python, so this attention would stay local to each rank: pass the module before scripting, or "
                "use torch.compile"
            )
        _, binding = self.bind(module, device_mesh)
        calls = AttentionCalls(binding, joint=self.joint)
        if self.sink_name is not None and all(
            getattr(child, self.sink_name, None) is None for child in module.modules()
        ):
            raise ValueError(
                f"{type(module).__name__} has no module with a parameter {self.sink_name!r}: name the parameter "
                "that holds a logit for each query head, or leave sink_name out"
            )
        names = list(module.named_modules(remove_duplicate=False))
        named = {part: [child for path, child in names if matches(path, part)] for part in self.local}
        if unmatched := [pattern for pattern, children in named.items() if not children]:
            raise ValueError(
                f"{type(module).__name__}: local={unmatched} names no module of it: print the names with "
                "module.named_modules(); each part between dots may hold * and ?"
            )
        if binding.group.size() > 1:
            local = list(chain.from_iterable(named.values()))
            check_layers(module, binding.name, local, inputs=self.checks.inputs)
        self._intercept(module, _ObservedForward(calls, ""), at_top=True)
        state = getattr(module, _STATE)
        before = module.register_forward_pre_hook(state.begin, with_kwargs=True)
        hooks_in_order(module, before, module.register_forward_hook(state.end, always_call=True))
        return module

    def _intercept(self, child: nn.Module, state: _ObservedForward, *, at_top: bool = False) -> None:
        """Change the class of ``child`` and its descendants, so that their attention calls run on the engine."""
        if hasattr(child, _STATE):  # the model has the module in two places
            return
        calls, path = state.calls, state.path
        if self.sink_name is not None and getattr(child, self.sink_name, None) is not None:
            calls = calls.with_sink(child, self.sink_name)
            state = replace(state, calls=calls)
        if self.checks.inputs and calls.unscoped.group.size() > 1 and (at_top or is_model(child)):
            state = replace(state, observers=observers_of(child))
        children = dict(child.named_children())
        # Leaf modules of torch call no attention, and a model has many. Models share activations of transformers.
        if at_top or children or not type(child).__module__.startswith(("torch.", "transformers.activations")):
            for change in LAYER_CHANGES:
                change(child)
            hand_over_positions(child, calls)
            setattr(child, _STATE, state)
            insert_mixin(child, _InterceptedForward, _make_intercepted_members)
        for name, grandchild in children.items():
            below = f"{path}.{name}" if path else name
            self._intercept(grandchild, replace(state, path=below, observers=()))


@dataclass(frozen=True, eq=False)
class _ObservedForward:
    """Runs the forward of one module with its attention calls intercepted.

    Attributes:
        calls: the mode that the forward enters.
        path: the path of the module, below the module that has the style.
        observers: observe the arguments and outputs of the module. Only the module that has the style, and models
            inside of it, have observers.
    """

    calls: AttentionCalls
    path: str
    observers: Sequence[ForwardObserver] = ()

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the module that has the style: start the forward and its observers."""
        if self.calls.role.is_off:
            return
        self.calls.begin_forward(module, args, kwargs)
        for observer in self.observers:
            observer.forward_begins(self.calls, module, args, kwargs)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the module that has the style. After an exception ``output`` is None."""
        if self.calls.role.is_off:
            return
        try:
            self.calls.end_forward(module, args, output, attends=not self.path)
            if output is not None:
                for observer in self.observers:
                    observer.forward_ends(self.calls, module, output)
        except Exception as error:
            if not torch.compiler.is_dynamo_compiling():  # no rank waits for a trace
                self.calls.unscoped.tell_peers(error)
            raise

    def run(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward where no hook has run."""
        # A program calls ``model.forward``, or a model inside of the model (``model.model``, for hidden states). Or
        # torch.compile has traced the hooks, and not the forward.
        output = None
        try:
            self.begin(module, args, kwargs)
            with self.calls:
                output = forward(*args, **kwargs)
        finally:
            self.end(module, args, output)
        return output


# Hooks are traced with the module's call or not compiled at all. A hook that is compiled by itself would behave as
# inside a traced forward. After a failed trace, it would not report to waiting ranks that this rank calls no attention.
never_compile_alone(_ObservedForward.begin, nor_what_it_calls=True)
never_compile_alone(_ObservedForward.end, nor_what_it_calls=True)
# The frame of run is not compiled, because it enters a mode. The forward that it calls is compiled.
never_compile_alone(_ObservedForward.run)


def calls_in(model: nn.Module) -> AttentionCalls | None:
    """The mode that intercepts the attention calls of ``model``, or of the first module in it that has the style."""
    return next((getattr(child, _STATE).calls for child in model.modules() if hasattr(child, _STATE)), None)


def _scripted_attentions(module: nn.Module) -> Iterator[str]:
    """Names of TorchScript objects with attention, in a module or among the globals that its forward uses."""
    if scripted_attention(module):
        yield type(module).__name__
    forward = inspect.unwrap(type(module).forward)
    named = getattr(getattr(forward, "__code__", None), "co_names", ())
    for name in named:
        if scripted_attention(getattr(forward, "__globals__", {}).get(name)):
            yield name
    yield from (name for name, value in vars(module).items() if scripted_attention(value))


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of the context-parallel modules in ``model``."""
    calls = [getattr(child, _STATE).calls for child in model.modules() if hasattr(child, _STATE)]
    return [*dict.fromkeys(each.source.group for each in calls)]


def binding_of(model: nn.Module) -> Binding | None:
    """The binding of the first context-parallel module in ``model``. None if there is none."""
    states = (getattr(child, _STATE, None) for child in model.modules())
    return next((state.calls.binding for state in states if state is not None), None)


class _InterceptedForward(UnpicklableMixin):
    """Mixin before a module's class. Its forward runs the attention calls on the engine."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: _ObservedForward = getattr(self, _STATE)
        calls = state.calls
        if calls.role.is_off:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if not torch.compiler.is_dynamo_compiling():
            calls.next_path = state.path
            if not calls.forward_state.running and graph_task_id() < 0:  # the hooks have not run
                return state.run(self, super().forward, args, kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        with calls:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def _make_intercepted_members(cls: type[nn.Module]) -> dict[str, Any]:
    """A copy of the forward of :class:`_InterceptedForward` that shows the signature of ``cls``."""
    # A copy and not a wrapper: torch.compile breaks graphs inside of the module by the code that calls ``super()``.
    base = _InterceptedForward.forward
    forward = FunctionType(base.__code__, base.__globals__, base.__name__, base.__defaults__, base.__closure__)
    return {"forward": functools.wraps(cls.forward)(forward)}
