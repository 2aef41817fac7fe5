"""AttentionContextParallel: for a module that receives query, key and value, each sharded along the sequence.

Hooks convert the module's inputs and outputs (CoreState). Between the hooks a function mode is active (CoreCalls). It
intercepts an attention call before DTensor sees an operator, and passes this rank's shards to the op of custom_ops.py.
The output of the op becomes a DTensor again. All other code in the module runs DTensor's own ops, which cannot gather
the sequence.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils.weak import WeakIdKeyDictionary

from cp_styles._lib.compat import (
    function_modes,
    graph_task_id,
    graph_tracer,
    hooks_in_order,
    never_compile_alone,
    tree_map_only,
)
from cp_styles._lib.subclassing import UnpicklableMixin, insert_mixin
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.point_to_point import refuse_destroyed
from cp_styles.engine.binding import Binding, refuse_options
from cp_styles.engine.custom_ops import attend, check_local, check_plain, resolved_of, tell_of_call
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.layouts.layout import find_cuts
from cp_styles.masks import Mask
from cp_styles.masks.dense import causal_bias
from cp_styles.strategies import Strategy
from cp_styles.styles.base import ContextParallelStyle
from cp_styles.styles.boundary import InputForm, SequenceBoundary
from cp_styles.styles.dtensors import (
    NO_COMMUNICATION,
    install_handlers,
    is_private,
    local_tensors,
    placed_as,
    placed_in_graph,
    spec_of,
)
from cp_styles.styles.mesh_axes import chunk_sizes

# The kinds of parameters of a wrapper's forward(*args, **kwargs).
_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
# Names that modules use for query, key and value. Modules with other names get them as the first three arguments.
_INPUT_NAMES = (("query", "key", "value"), ("q", "k", "v"), ("xq", "xk", "xv"))


class AttentionContextParallel(ContextParallelStyle):
    """Context parallelism for a module that receives query, key and value and calls scaled_dot_product_attention.

    The module's inputs, which are this rank's part of the sequence, become DTensors that are sharded along it. The
    attention inside runs over the whole sequence by ``strategy``. Outputs are local again. Forward and backward equal
    the results of one device. Parameter gradients are each rank's share: sum them over the axis (``sum_gradients``, or
    FSDP2 or DDP over it).

    Args:
        mesh_axis: the axis of a composed mesh that cuts the sequence. A 1-D mesh is used whatever its name.
        strategy: how keys and values get to the queries: ``Ring()`` (default), ``AllGather()``, ``Ulysses()``. Their
            docstrings give the communication and the memory.
        layout: the layout with which the inputs were cut, or the balancer that makes it. Default: the layout of the
            :class:`~cp_styles.SequenceScope` around the call; without a scope ``head_tail``.
        kv_layout: the layout of keys of another sequence than the queries, or the balancer that makes it. ``mask`` is
            then over the numbers of keys: see :class:`~cp_styles.masks.Shifted`. Default: ``layout`` cuts both.
        mask: which keys each query attends to, in global positions, in addition to ``is_causal`` of the call; default
            ``Full()``.
        kernel: computes the tiles; default the kernel that scaled_dot_product_attention chose. If it takes no masks,
            tiles with an explicit mask go to another kernel, see
            :func:`~cp_styles.kernels.choice_by_tile.kernel_for_tiles`.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.
        verified: a step of the model is compared with one device elsewhere, in a test for example. Without it, and
            without :func:`~cp_styles.verify.verify`, the first backward or evaluation warns
            (``UnverifiedModelWarning``).
        seq_dim: sequence dim of the *module's* inputs: 2 for [B, H, S, D], 1 for [B, S, H, D]. The inputs of
            scaled_dot_product_attention are always [B, H, S, D].
        use_local_output: False leaves outputs as DTensors with Shard on the sequence axis; needs equal parts.

    An ``attn_mask``, of the module's call or of scaled_dot_product_attention in it, must be the mask of the whole
    sequence, the same on all ranks, with rows and columns in the order of positions. If tensor parallelism cuts the
    heads, it has all heads.

    Communication of one forward: at the call inside, one agreement of the ranks (:class:`~cp_styles.Checks`), then
    the messages of the strategy. If the layout is a balancer that is not a function of this package, one more
    all-gather compares its results.

    The module's forward takes ``query``, ``key`` and ``value``, or ``q``, ``k`` and ``v``, or these as its first three
    arguments. A ``forward(*args, **kwargs)`` must be called with the three first, and without names.

    Query, key and value share one floating-point dtype and one device, CPU or CUDA. They may be plain tensors, or
    DTensors on the 1-D mesh of this axis with ``Shard(seq_dim)``. If the style was given a composed mesh, they may be
    DTensors on its other axes ("tp"), with Shard on the heads or the batch, or Replicate. (Key and value may be
    replicated while the query's heads are sharded. Their gradients are then summed over that axis, in two all-reduces.)
    Or they may be DTensors on the composed mesh itself, with ``Shard(seq_dim)`` on this axis. Outputs are on the same
    mesh as inputs.

    Inside the module they are DTensors on the sequence axis alone, with this rank's heads and rows of the batch: other
    axes come off before the forward and are put on again after it. So the module must not mix heads (a norm over all
    heads, for example). If other axes cut heads or batch, its outputs are [B, H, S, D] or [B, S, H, D]. Gradients of
    scalar parameters inside are summed over these axes. See [Note: boundary] in boundary.py.

    Raises:
        ValueError, TypeError: when applied, for a mesh without the axis, a module that has the style already, or one
            whose forward does not take the three. At a call, on every rank, with the module's name, for inputs that do
            not fit the layout, masks that are not of the whole sequence, and calls that differ between ranks.
        NotImplementedError: at a call, on every rank, for dropout and other arguments that are not supported, and for a
            module whose attention was not reached.

    Example::

        plan = {"layers.*.attention.core": AttentionContextParallel(strategy=Ring(), layout=head_tail)}
        parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), plan)
    """

    def __init__(
        self,
        *,
        mesh_axis: str = "cp",
        strategy: Strategy | None = None,
        layout: SequenceLayout | Balancer | None = None,
        kv_layout: SequenceLayout | Balancer | None = None,
        mask: Mask | None = None,
        kernel: Kernel | None = None,
        checks: Checks = CHECKS,
        seq_dim: int = 2,
        use_local_output: bool = True,
        verified: bool = False,
    ) -> None:
        options = {"strategy": strategy, "layout": layout, "mask": mask, "kernel": kernel, "checks": checks}
        super().__init__(mesh_axis=mesh_axis, **options, verified=verified)
        if seq_dim not in (1, 2):
            raise ValueError(f"seq_dim must be 2 ([B, H, S, D]) or 1 ([B, S, H, D]), got {seq_dim}")
        self.kv_layout, self.seq_dim = kv_layout, seq_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis, binding = self.bind(module, device_mesh)
        if hasattr(module, _STATE):
            raise ValueError(
                f"{type(module).__name__} is context parallel already: apply AttentionContextParallel to a module once"
            )
        key = axis, device_mesh, self.seq_dim, self.use_local_output
        boundaries = binding.group_state.get_or_create(_Boundaries)
        boundary = boundaries.get(key)
        if boundary is None:
            boundary = boundaries[key] = SequenceBoundary(binding.group, *key)
        CoreState(self, module, boundary, binding).attach()
        return module

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, seq_dim={self.seq_dim}, use_local_output={self.use_local_output})"


def _three_inputs_first(query: Any, key: Any, value: Any, /, *args: Any, **kwargs: Any) -> None:
    """The signature that is assumed for a forward(*args, **kwargs)."""


_STATE = "_context_parallel_core"


class _Boundaries(WeakValueDictionary[tuple[Any, ...], SequenceBoundary]):
    """The boundaries of a group. Modules over the same axes share one, and thereby the compiled graph of a layer."""


class CoreState:
    """The binding of one module's attention, and its hooks."""

    def __init__(
        self, style: AttentionContextParallel, module: nn.Module, boundary: SequenceBoundary, binding: Binding
    ) -> None:
        self.style = style
        self.module = module
        self._boundary, self._binding = boundary, binding
        self.calls = CoreCalls(binding)
        # While a forward runs: the form of its inputs on other axes, the number of queries that was declared to
        # DTensor, and the private mesh.
        self.running: tuple[InputForm | None, int, DeviceMesh] | None = None
        # For a module with parameters: the axes that cut the latest inputs, and the form of these inputs.
        self._latest_form: tuple[tuple[str, ...], InputForm | None] | None = None
        self._hooked_parameters = WeakIdKeyDictionary()
        self._traced = False  # torch.compile has traced the forward
        self._holds_parameters = False
        self._mask_is_uniform = not binding.mask.varies_by_head_or_row
        self._signature = inspect.signature(module.forward)
        if {parameter.kind for parameter in self._signature.parameters.values()} == _VARIADIC:
            self._signature = inspect.signature(_three_inputs_first)
        parameters = self._signature.parameters
        self._names = next((names for names in _INPUT_NAMES if set(names) <= set(parameters)), tuple(parameters)[:3])
        kinds = [parameters[name].kind for name in self._names]
        if len(kinds) < 3 or inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
            raise ValueError(
                f"AttentionContextParallel is for modules whose forward takes query, key and value; "
                f"{type(module).__name__} takes {self._signature}. Put scaled_dot_product_attention into a small "
                "module that takes these three"
                f"{see('The style is on a whole attention block')}"
            )
        self._input_positions = [(name, list(parameters).index(name)) for name in self._names]
        self._inputs_come_first = [place for _, place in self._input_positions] == [0, 1, 2]

    def attach(self) -> None:
        module = self.module
        setattr(module, _STATE, self)
        self._holds_parameters = any(True for _ in module.parameters())
        # A subclass and not an attribute, because torch.compile looks up a forward in the class.
        insert_mixin(module, _Core, _make_core_members)
        # Run last before the forward and first after it, so that hooks of other styles see the caller's tensors.
        before = module.register_forward_pre_hook(self._begin, with_kwargs=True)
        after = module.register_forward_hook(self._end, prepend=True, always_call=True)
        hooks_in_order(module, before, after)
        self._hook_parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> CoreState:
        # Copying a module copies its hooks and this state. The copied state shares the mesh.
        module = copy.deepcopy(self.module, memo)
        copied = memo[id(self)] = CoreState(self.style, module, self._boundary, copy.deepcopy(self._binding, memo))
        copied._holds_parameters = self._holds_parameters  # the parameters of the module are copied later
        return copied

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward where the hooks have not converted its inputs."""
        self._traced = True
        if torch.compiler.is_dynamo_compiling():
            return self._trace_forward(forward, args, kwargs)
        # A program has called forward directly, or torch.compile has traced the hooks and then broken its graph inside
        # the module.
        args, kwargs = self._begin(self.module, args, kwargs)
        try:
            with self.calls:
                output = forward(*args, **kwargs)
        except BaseException as error:
            self._handle_failure(error)
            raise
        return self._convert_output(output)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Forward pre-hook: convert query, key and value to DTensors on the private mesh.

        If this rank refuses the inputs, every rank raises.
        """
        if torch.compiler.is_dynamo_compiling():
            self._traced = False
            return args, kwargs
        if (tracer := graph_tracer()) is not None:
            self.calls.refuse_tracer(tracer)
        install_handlers()
        self.running, self.calls.forward_state.calls = None, 0
        binding = self._binding.now()[0]  # outside of the try block: now() reports its errors to other ranks
        binding.group_state.turn.begin()
        only_inputs = len(args) == 3 and not kwargs and self._inputs_come_first
        try:
            if function_modes():
                self.calls.refuse_inside()
            inputs, form = args if only_inputs else self._find_inputs(args, kwargs), None
            if {*map(type, inputs)} != {torch.Tensor}:
                inputs, form = self._boundary.local(binding.name, self._names, inputs)
            check_local(binding.name, inputs)
            if not only_inputs:
                self._refuse_other_tensors(args, kwargs)
            cut = find_cuts(inputs)
            self.calls.forward_state.sequences = {layout.length for _, layout in cut} if cut else ()
            if cut:
                binding.refuse_other_cut(cut, inputs[0].shape[self.style.seq_dim])
            self.calls.form = form if form is not None and form.cut_axes else None
            if self._holds_parameters and torch.is_grad_enabled():
                self._hook_parameters()
                self._keep_form(self.calls.form)
            tensors = self._boundary.enter(inputs, binding.group, binding.layouts)
        except Exception as error:
            refuse_destroyed(binding.group)  # torch says of such a mesh that it has no value
            self._binding.unscoped.tell_peers(error)
            raise
        self.running = form, tensors[0].shape[self.style.seq_dim], tensors[0].device_mesh
        return (tuple(tensors), kwargs) if only_inputs else self._replace_inputs(args, kwargs, tensors)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook, which also runs after a forward that raised."""
        failure = sys.exc_info()[1]
        if output is None and failure is not None and not torch.compiler.is_dynamo_compiling():
            self._handle_failure(failure)
        elif self.running is not None:
            return self._convert_output(output)
        # The forward was traced, and this hook with it or not: see never_compile_alone below.
        elif not self._traced:
            raise RuntimeError(
                f"{self._binding.name}: torch.compile traced a forward that is not the module's class': something set "
                "the attribute `forward` of the module itself. Set it before the style is applied"
            )
        return output

    def _convert_output(self, output: Any) -> Any:
        """Convert the outputs to the form of the inputs."""
        assert self.running is not None
        (form, declared, private), self.running = self.running, None
        try:
            # A recomputation may call no attention: a selective checkpoint has kept the output, on all ranks.
            if not self.calls.forward_state.calls and graph_task_id() < 0:
                raise NotImplementedError(f"{self._binding.name}: {_NOT_REACHED}")
            on_sequence = not self.style.use_local_output if form is None else form.seq_axis is not None
            scale = declared, self._declarable_length() if on_sequence else 0
            leave = partial(self._boundary.leave, self._binding.name, private, form, scale)
            return leave(output) if isinstance(output, DTensor) else tree_map_only(DTensor, leave, output)
        except Exception as error:  # the outputs of one rank may be another module's
            self._binding.unscoped.tell_peers(error)
            raise

    def _declarable_length(self) -> int:
        """The number of queries on all ranks. Raises ValueError if a DTensor of this length is cut in another way."""
        layout = self.calls.latest_layout
        even = chunk_sizes(layout.length, layout.ranks)
        if layout.lengths != even:  # full_tensor() and redistribute() of the output would be wrong
            raise ValueError(
                f"{self._binding.name}: outputs are DTensors on the sequence axis, and a DTensor of {layout.length} "
                f"positions has {list(even)} on its ranks, but the layout gives {list(layout.lengths)}: use local "
                f"outputs, or a length that {layout.ranks} divides"
            )
        return layout.length

    def _handle_failure(self, failure: BaseException) -> None:
        """Handle an exception raised by the module's forward: add a note, and notify the peers."""
        running, self.running = self.running, None
        if running is not None and not getattr(failure, "__notes__", None) and (note := self._explain(failure)):
            failure.add_note(f"{self._binding.name}: {note}")
        self._binding.unscoped.tell_peers(failure)

    def _explain(self, failure: BaseException) -> str:
        """A note for an error raised by DTensor or torch.compile; empty for other errors."""
        if type(failure).__module__.startswith("torch._dynamo"):
            return (
                "torch.compile inside the module is not supported, because its tensors are DTensors: compile the "
                "module itself, or a model around it, and do not compile functions inside it"
            )
        if not self.calls.forward_state.calls and any(word in str(failure) for word in ("DTensor", NO_COMMUNICATION)):
            return _NOT_REACHED
        if NO_COMMUNICATION in str(failure):
            return "the module gathers or reduces the sequence after its attention. Do that outside of the module"
        return ""

    def _find_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Query, key and value from the arguments of a call. Raises TypeError if arguments are missing."""
        if len(args) < 3:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self._binding.name}: {error}") from None
        return tuple([kwargs[name] if name in kwargs else args[place] for name, place in self._input_positions])

    def _replace_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
        new_args, new_kwargs = list(args), dict(kwargs)
        for (name, place), value in zip(self._input_positions, inputs, strict=True):
            if name in kwargs:
                new_kwargs[name] = value
            else:
                new_args[place] = value
        return tuple(new_args), new_kwargs

    def _refuse_other_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise for tensors in addition to query, key, value and a mask."""
        positions = {place for name, place in self._input_positions if name not in kwargs}
        names = list(self._signature.parameters)
        arguments = [(names[place] if place < len(names) else f"args[{place}]", x) for place, x in enumerate(args)]
        arguments = [argument for place, argument in enumerate(arguments) if place not in positions]
        for label, value in [*arguments, *kwargs.items()]:
            if isinstance(value, torch.Tensor) and label not in (*self._names, "attn_mask"):
                raise NotImplementedError(
                    f"{self._binding.name}: got a tensor {label!r} of shape {tuple(value.shape)} in addition to query, "
                    "key and value. Only an attn_mask of the whole sequence is supported; apply other tensors outside "
                    "of the module"
                )

    def _trace_forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, boundary, calls = self._binding.name, self._boundary, self.calls
        if not self.style.use_local_output:
            raise NotImplementedError(
                f"{name}: use_local_output=False is not supported under torch.compile, where the lengths of the ranks' "
                "parts are not known. Leave it out, or keep this module out of the compiled region"
            )
        if self._holds_parameters:
            raise NotImplementedError(
                f"{name}: torch.compile cannot trace plain parameters together with DTensors: apply the parameters "
                "before the module (for example a temperature to the query), or use ModuleContextParallel"
            )
        inputs = [kwargs[name] if name in kwargs else args[place] for name, place in self._input_positions]
        inputs, form = boundary.local(name, self._names, inputs)
        calls.is_cut = form is not None and bool(form.cut_axes)
        if calls.is_cut and not self._mask_is_uniform:
            raise ValueError(f"{name}: {self._binding.mask}: {SINGLED_OUT}")
        tensors = boundary.enter(inputs, self._binding.group, self._binding.layouts)
        private = tensors[0].device_mesh
        args, kwargs = self._replace_inputs(args, kwargs, tensors)
        calls.forward_state.calls = 0
        with calls:
            output = forward(*args, **kwargs)
        if not calls.forward_state.calls:
            raise NotImplementedError(f"{name}: {_NOT_REACHED}")
        return tree_map_only(DTensor, lambda value: boundary.leave(name, private, form, (0, 0), value), output)

    def _hook_parameters(self) -> None:
        """Hook the gradients of parameters that have no hook yet, such as the parameters of a copied module."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self._hooked_parameters:
                self._hooked_parameters[parameter] = parameter.register_hook(self._reduce_gradient)

    def _keep_form(self, form: InputForm | None) -> None:
        """Keep the form of the inputs, over whose axes the gradients of the module's parameters are summed."""
        # A backward may follow several forwards, so all forwards must have inputs that the same axes cut.
        before, cut = self._latest_form, () if form is None else form.cut_axes
        if before is not None and before[0] != cut:
            raise ValueError(
                f"{self._binding.name}: query was cut over mesh axes {before[0]} before and is over {cut} now, and the "
                "module holds parameters, whose gradients are summed over these axes: give it all inputs in one form, "
                "or apply the parameters before the module"
            )
        self._latest_form = cut, form

    def _reduce_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Convert the gradient of a parameter inside the module to this rank's share of the sequence."""
        if not (isinstance(grad, DTensor) and is_private(grad)):
            return grad
        share = grad.redistribute(placements=[Partial()]).to_local()
        _, form = self._latest_form or ((), None)
        # Users sum gradients of plain parameters over the sequence axis only, so other axes are reduced here.
        return share if form is None else form.reduce_gradient(share)


# A compiled hook would not run after a forward that cannot be traced. Other ranks would then wait for this rank.
never_compile_alone(CoreState._end, nor_what_it_calls=True)
# If a module breaks the graph, torch.compile ends its graph before CoreState.forward and calls it. The whole module
# then runs without torch.compile, because DTensors on a private mesh cannot be outputs of a graph.
never_compile_alone(CoreState.forward, nor_what_it_calls=True)


class _Core(UnpicklableMixin):
    """Mixin before a module's class. Its forward is :meth:`CoreState.forward`."""


def _make_core_members(cls: type[nn.Module]) -> dict[str, Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, _STATE)
        if torch.compiler.is_dynamo_compiling() or state.running is None:
            return state.forward(partial(cls.forward, self), args, kwargs)
        with state.calls:
            return cls.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # pyright: ignore[reportFunctionMemberAccess]
    return {"forward": forward}


# -- the mode --

_LABELS = ("query", "key", "value")
_SEQ_DIM = 2  # of the tensors at the attention, [B, H, S, D]
_SEQUENCE_SHARD = (Shard(_SEQ_DIM),)


class CoreCalls(AttentionCalls):
    """Runs attention calls on DTensors of a private mesh on the engine, and returns DTensors.

    Attention on other tensors, which were not computed from the module's inputs, is not changed.
    """

    # The form of the module's inputs, if other axes cut their heads or batch. It stays until the next forward, because
    # a checkpoint in the module runs its attention again without the hooks.
    form: InputForm | None = None
    # Used instead of ``form`` while torch.compile traces: whether other axes cut the heads or batch.
    is_cut = False

    def refuse_inside(self) -> None:
        """Raise inside a module or block that intercepts all attention."""
        outer = self.current()
        if outer is not None and not isinstance(outer, CoreCalls):
            raise ValueError(
                f"{outer._name}: a module inside has AttentionContextParallel, and this style takes all attention "
                "inside: apply one of the two"
            )

    @property
    def latest_layout(self) -> SequenceLayout:
        """The layout of the queries of the latest call."""
        return resolved_of(self._latest).cuts[0]

    _latest: torch.Tensor

    def _attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Any:
        tensors = query, key, value
        private = next(filter(is_private, tensors), None)
        if private is None:
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(*tensors, attn_mask, **options, **others)
        self.forward_state.calls += 1
        if attn_mask is not None:
            attn_mask, is_causal = causal_bias(attn_mask, is_causal)
        compiling, problem, shards = torch.compiler.is_dynamo_compiling(), "", None
        source = self._in_graph if compiling else self.source if self.form is None else self.source.now()[0]
        try:
            self._refuse_core_call(tensors, private.device_mesh, attn_mask)
            shards = tuple([tensor.to_local() for tensor in tensors]) if compiling else local_tensors(*tensors)
            (check_plain if compiling else check_local)(self._name, shards, attn_mask=attn_mask)
            refuse_options(self._name, query, key, dropout_p, enable_gqa, others)
            if not compiling:
                self.wrap_checkpoints()
            if isinstance(source, Binding) and self.form is not None:
                source = self._select_own_heads(source, self.form, query, attn_mask)
        except Exception as error:
            problem = tell_of_call(source, error)
            if not compiling or shards is None:
                raise
        options: dict[str, Any] = {"is_causal": is_causal, "attn_mask": attn_mask, "scale": scale, "problem": problem}
        out, _, call = attend(source, shards, **options)
        if compiling:
            return placed_in_graph(out, query.device_mesh, query.placements)
        self._latest = call
        spec = spec_of(out, query.device_mesh, query.placements, (*query.shape[:3], out.shape[3]))
        return placed_as((spec,), out)[0]

    def _select_own_heads(
        self, binding: Binding, form: InputForm, query: DTensor, attn_mask: torch.Tensor | None
    ) -> Binding:
        """The binding for this rank's heads, which selects them in a mask of all heads."""
        if query.shape[:2] == form.local_sizes:
            # A mask has no range of rows. If other axes cut the batch, all rows must share one mask.
            sizes = 1 if form.cuts(0) else form.global_sizes[0], form.global_sizes[1]
            return binding.with_heads(form.heads, sizes)
        if binding.mask.varies_by_head_or_row or _may_differ_by_head(attn_mask):
            raise ValueError(
                f"{self._name}: query has {query.shape[0]} rows of the batch and {query.shape[1]} heads at the "
                "attention, not {} and {} as the inputs on this rank: which heads of the mask they are is not known. "
                "Give one mask for all, or reshape query, key and value before the module".format(*form.local_sizes)
            )
        return binding

    def _attend_flex(self, *call: Any) -> Any:
        raise NotImplementedError(f"{self._name}: flex_attention {_NOT_ON_DTENSORS.format('context_flex_attention')}")

    def _attend_varlen(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name}: varlen_attn {_NOT_ON_DTENSORS.format('context_varlen_attention')}")

    def _refuse_core_call(self, tensors: tuple[Any, ...], mesh: DeviceMesh, attn_mask: torch.Tensor | None) -> None:
        """Raise unless the tensors are shards of the module's sequence on the private ``mesh``."""
        for label, tensor in zip(_LABELS, tensors, strict=True):
            if not isinstance(tensor, DTensor) or tensor.device_mesh != mesh:
                raise ValueError(
                    f"{self._name}: {label} was not made inside this module: it is not a DTensor on the module's "
                    "sequence axis; compute it from the module's inputs, or pass it to the module"
                )
            if tensor.ndim != 4:
                raise ValueError(
                    f"{self._name}: scaled_dot_product_attention was called with a {label} of {tensor.ndim} dims, "
                    f"{tuple(tensor.shape)}. The attention over all ranks needs 4 (batch, heads, sequence, head dim): "
                    "give query, key and value the missing ones, such as query.unsqueeze(0)"
                )
        for label, tensor in zip(_LABELS, tensors, strict=True):
            if tensor.placements != _SEQUENCE_SHARD:
                raise ValueError(
                    f"{self._name}: {label} has the placements {tensor.placements} and the shape {tuple(tensor.shape)} "
                    f"at the attention, not Shard({_SEQ_DIM}) on the sequence axis: the module moved or gathered the "
                    f"sequence dim; check seq_dim (1 for [B, S, H, D]){see('The sequence dim has moved')}"
                )
        if isinstance(attn_mask, DTensor):
            raise NotImplementedError(
                f"{self._name}: attn_mask is a DTensor; pass the mask of the whole sequence as a plain tensor, the "
                "same on all ranks"
            )
        if self.is_cut and attn_mask is not None and _may_differ_by_head(attn_mask):
            raise NotImplementedError(f"{self._name}: attn_mask {tuple(attn_mask.shape)}: {SINGLED_OUT}")


never_compile_alone(CoreCalls._attend, nor_what_it_calls=True)


def _may_differ_by_head(attn_mask: torch.Tensor | None) -> bool:
    """Whether a mask may differ by head or by row of the batch."""
    return attn_mask is not None and any(size != 1 for size in attn_mask.shape[:-2])


_NOT_ON_DTENSORS = (
    "is not supported inside a module with AttentionContextParallel, whose tensors are DTensors: use "
    "ModuleContextParallel, or call {} in place of the module"
)
SINGLED_OUT = (
    "under torch.compile, with query, key and value as DTensors on other axes, it is not known which heads or rows of "
    "the batch a rank has: give one mask for all, pass local tensors, or keep this module out of the compiled region"
)
_NOT_REACHED = (
    "no scaled_dot_product_attention was called inside the module, on what it received: nothing was context parallel. "
    "Call it there, and apply weights and tables to query, key or value before the module, not inside it"
    f"{see('No attention was reached')}"
)
