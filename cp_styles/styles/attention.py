"""AttentionContextParallel: for a module that receives query, key and value, each sharded along the sequence."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from cp_styles._compat import graph_task_id, hooks_in_order, never_compile_alone, tree_map_only
from cp_styles.comm.agreement import EVERY_CALL, Agreement
from cp_styles.engine.binding import Binding, refuse_dropout
from cp_styles.engine.checkpoint import as_kept
from cp_styles.engine.custom_ops import check_local
from cp_styles.engine.dtensor_handlers import NO_COMMUNICATION, binding_of, install
from cp_styles.engine.gradient_watch import RAISE, GradientCheck
from cp_styles.engine.mesh_axes import OtherAxes, chunk_sizes
from cp_styles.engine.scope import Lease, ScopedBinding
from cp_styles.intercept.fused_operators import FusedCalls
from cp_styles.kernels import Kernel
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.mask import Causal, Dense, Mask, causal_bias
from cp_styles.strategies import Strategy
from cp_styles.styles.base import ContextParallelStyle
from cp_styles.styles.compiled import Traced, traced_of
from cp_styles.styles.dtensor_io import DTensorIO
from cp_styles.troubleshooting import see

# The kinds of parameters of a forward(*args, **kwargs), as wrappers have it.
_OPEN = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
# Names that modules use for the three inputs. Otherwise the first three arguments are used.
_NAMES = (("query", "key", "value"), ("q", "k", "v"), ("xq", "xk", "xv"))


class AttentionContextParallel(ContextParallelStyle):
    """Context parallelism for a module that receives query, key and value and calls scaled_dot_product_attention.

    The module's inputs, which are this rank's part of the sequence, become DTensors that are sharded along it. The
    attention inside runs over the whole sequence by ``strategy``. Outputs are local again. Forward and backward equal
    those of one device. Parameter gradients are each rank's share: sum them over the axis (``sum_gradients``, or FSDP2
    or DDP over it).

    Args:
        mesh_axis: the axis of a composed mesh that cuts the sequence. A 1-D mesh is used whatever its name.
        strategy: how keys and values get to the queries: ``Ring()`` (default), ``AllGather()``, ``Ulysses()``. Their
            docstrings give the communication and the memory.
        layout: the layout with which the inputs were cut, or the balancer that makes it. Default: the layout of the
            :class:`~cp_styles.SequenceScope` around the call; without a scope ``head_tail``.
        mask: which keys each query attends to, in global positions, in addition to ``is_causal`` of the call; default
            ``Full()``.
        kernel: computes the tiles; default the kernel that scaled_dot_product_attention chose. If it takes no masks,
            tiles with an explicit mask go to another kernel: see :func:`~cp_styles.kernels.kernel_for_tiles`.
        gradient_check: what to do if gradients were not reduced over the axis, so that the ranks' parameters differ:
            :class:`~cp_styles.GradientCheck`. Default: an error.
        agreement: how often the ranks agree on their calls: :class:`~cp_styles.EveryCall` (the default) or
            :class:`~cp_styles.NoAgreement`, and what each promises.
        seq_dim: sequence dim of the *module's* inputs: 2 for [B, H, S, D], 1 for [B, S, H, D]. The inputs of
            scaled_dot_product_attention are always [B, H, S, D].
        use_local_output: False leaves outputs as DTensors with Shard on the sequence axis; needs equal parts.

    An ``attn_mask``, of the module's call or of scaled_dot_product_attention in it, must be the mask of the whole
    sequence, the same on all ranks, with rows and columns in the order of positions. If tensor parallelism cuts the
    heads, it has all heads.

    Communication of one forward: at the call inside, one all-gather of 13 integers, so that all ranks learn of an error
    on one; then that of the strategy. If the layout is a balancer, which needs the global length first, there are two
    all-gathers: before the module and at the call.

    The module's forward takes ``query``, ``key`` and ``value``, or ``q``, ``k`` and ``v``, or these as its first three
    arguments. A ``forward(*args, **kwargs)`` must be called with the three first, and without names.

    Query, key and value share one floating-point dtype and one device, CPU or CUDA. They may be plain tensors, or
    DTensors on the 1-D mesh of this axis with ``Shard(seq_dim)``. If the style was given a composed mesh, they may be
    DTensors on its other axes ("tp"), with Shard on the heads or the batch, or Replicate. (Key and value may be
    replicated while the query's heads are sharded. Their gradients are then summed over that axis, in two all-reduces.)
    Or they may be DTensors on the composed mesh itself, with ``Shard(seq_dim)`` on this axis. Outputs are on the same
    mesh as inputs. See [Note: lifting] in dtensor_io.py.

    Raises:
        ValueError, TypeError: when applied, for a mesh without the axis, a module that has the style already, or one
            whose forward does not take the three. At a call, on every rank, with the module's name, for inputs that do
            not fit the layout, masks that are not those of the whole sequence, and calls that differ between ranks.
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
        mask: Mask | None = None,
        kernel: Kernel | None = None,
        gradient_check: GradientCheck = RAISE,
        agreement: Agreement = EVERY_CALL,
        seq_dim: int = 2,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            mesh_axis=mesh_axis,
            strategy=strategy,
            layout=layout,
            mask=mask,
            kernel=kernel,
            gradient_check=gradient_check,
            agreement=agreement,
        )
        if seq_dim not in (1, 2):
            raise ValueError(f"seq_dim must be 2 ([B, H, S, D]) or 1 ([B, S, H, D]), got {seq_dim}")
        self.seq_dim = seq_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis, binding = self.bind(module, device_mesh)
        if any(
            isinstance(getattr(hook, "__self__", None), ContextParallelState)
            for hook in module._forward_pre_hooks.values()
        ):
            raise ValueError(
                f"{type(module).__name__} is context parallel already: apply AttentionContextParallel to a module once"
            )
        dtensor_io = DTensorIO(axis, device_mesh, self.seq_dim, self.use_local_output)
        ContextParallelState(self, module, dtensor_io, axis, binding).register()
        return module

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, seq_dim={self.seq_dim}, use_local_output={self.use_local_output})"


def _three_by_place(query: Any, key: Any, value: Any, /, *args: Any, **kwargs: Any) -> None:
    """The signature that is assumed for a forward(*args, **kwargs): the three come first, and without names."""


class ContextParallelState:
    """The binding of one module's attention, and its hooks."""

    def __init__(
        self,
        style: AttentionContextParallel,
        module: nn.Module,
        dtensor_io: DTensorIO,
        axis: DeviceMesh,
        binding: Binding,
    ) -> None:
        self.style = style
        self.module = module
        self.dtensor_io = dtensor_io
        self.axis = axis
        # Its forward runs, on DTensors. Routing does not depend on it, see [Note: routing] in dtensor_handlers.py.
        self._entered = False
        self.binding = self._unscoped = binding
        self._scoped = ScopedBinding(self.binding, style.layout)
        self._lease: Lease | None = None
        self._other_axes: OtherAxes | None = None  # of the inputs of this forward, set by _refuse
        self._signature = inspect.signature(module.forward)
        if {each.kind for each in self._signature.parameters.values()} == _OPEN:
            self._signature = inspect.signature(_three_by_place)
        parameters = list(self._signature.parameters)
        self._names = next((names for names in _NAMES if set(names) <= set(parameters)), tuple(parameters[:3]))
        kinds = [self._signature.parameters[name].kind for name in self._names]
        if len(kinds) < 3 or inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
            raise ValueError(
                f"AttentionContextParallel is for modules whose forward takes query, key and value; "
                f"{type(module).__name__} takes {self._signature}. Put scaled_dot_product_attention into a small "
                "module that takes these three"
                f"{see('The style is on a whole attention block')}"
            )

        self._places = [(name, parameters.index(name)) for name in self._names]
        # Whether three positional arguments are query, key and value, and all that is needed.
        needed = [each.name for each in self._signature.parameters.values() if each.default is each.empty]
        by_place = inspect.Parameter.KEYWORD_ONLY not in kinds and tuple(parameters[:3]) == self._names
        self._takes_three = by_place and set(needed) <= set(self._names)

    def register(self) -> None:
        options = {"seq_dim": self.style.seq_dim, "use_local_output": self.style.use_local_output}
        Traced(self._scoped, self.dtensor_io, self.axis, self._places, self.run, **options).attach(self.module)
        # Last to change the inputs and first to change the outputs, so that hooks of other styles see the same as ever.
        before = self.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        after = self.module.register_forward_hook(self._post_forward, prepend=True, always_call=True)
        hooks_in_order(self.module, before, after)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._share)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelState:
        # Copying a module copies its hooks and this state. The copy shares the mesh and has its own binding.
        return ContextParallelState(
            self.style, copy.deepcopy(self.module, memo), self.dtensor_io, self.axis, self._unscoped
        )

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Hook before the forward: the inputs become DTensors on a bound mesh."""
        if torch.compiler.is_dynamo_compiling():
            traced_of(module).ran = False
            return args, kwargs
        install()
        scoped = as_kept(self._scoped)
        self.binding, scope = scoped.resolve()
        three = self._takes_three and len(args) == 3 and not kwargs
        bound = None if three else self._bind(args, kwargs)
        arguments = dict(zip(self._names, args, strict=True)) if bound is None else bound.arguments
        inputs: tuple[Any, ...] = tuple(map(arguments.get, self._names))
        dim = self.style.seq_dim
        q, k, v = local = inputs
        if isinstance(q, DTensor) or isinstance(k, DTensor) or isinstance(v, DTensor):
            local = tuple([value.to_local() if isinstance(value, DTensor) else value for value in inputs])
        attn_mask, causal = causal_bias(arguments.get("attn_mask"), False)
        asked = self.binding
        if causal:
            arguments["attn_mask"], asked = None, asked.with_mask(Causal())
        refuse = partial(self._refuse, arguments, inputs, local)
        # A balancer needs the global length first.
        known = asked.known(refuse, local, dim) if isinstance(asked.layout, SequenceLayout) else None
        agreed = known or asked.agree(refuse, local, dim, attn_mask)
        lengths = agreed.lengths
        assert lengths is not None
        other_axes = self._other_axes
        if (not self.style.use_local_output) if other_axes is None else other_axes.seq_axis is not None:
            self._refuse_uneven(lengths[0])  # outputs will be DTensors that are sharded over the sequence axis
        self.binding = agreed if other_axes is None else replace(agreed, other_axes=other_axes)
        if attn_mask is not None:
            self.binding = replace(self.binding, mask=self.binding.mask & Dense(attn_mask))
            arguments["attn_mask"] = None
        self._lease = lease = scoped.lease(self.binding, scope, self.axis.device_type)
        # The mesh may have an equal binding, for example that of another module. Then its tally is used.
        self.binding = lease.binding
        sizes = self.binding.declared_sizes
        shared = self.dtensor_io.to_bound_mesh(inputs, local, lease.mesh, (sizes[0], sizes[1], sizes[1]))
        lease.hold_in_graph(*shared)
        self._entered = True
        tally = self.binding.tally
        tally.calls = 0
        self.binding.ledger.engaged = False
        deferred = partial(asked.agree, tensors=local, seq_dim=dim, attn_mask=attn_mask)
        tally.deferred_agreement = None if known is None else deferred
        if bound is None:
            return tuple(shared), kwargs
        arguments.update(zip(self._names, shared, strict=True))
        return bound.args, bound.kwargs

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            self.binding.refuse(TypeError(f"{self.binding.name}: {error}"))

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._lease is not None and not torch.compiler.is_dynamo_compiling():
            return self._leave(output)
        # The forward was traced, and this hook with it or not: see never_compile_alone below.
        if output is None and not torch.compiler.is_dynamo_compiling() and isinstance(sys.exc_info()[1], Exception):
            self.binding.refuse_call()
        elif not traced_of(module).ran:
            raise RuntimeError(
                f"{self._unscoped.name}: torch.compile traced a forward that is not the module's class': something "
                "set the attribute `forward` of the module itself. Set it before the style is applied"
            )
        return output

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward. It also does the work of the hooks, if they have not run.

        This is so if torch.compile has traced them and then broke its graph inside the module, or if the forward is
        called directly and not through the module.
        """
        if self._entered:
            with FusedCalls():
                return forward(*args, **kwargs)
        args, kwargs = self._enter(self.module, args, kwargs)
        try:
            with FusedCalls():
                output = forward(*args, **kwargs)
        except BaseException:
            self._leave(None)
            raise
        return self._leave(output)

    def _leave(self, output: Any) -> Any:
        """The outputs as the caller gets them. ``output`` is None after an error in the forward, which is under way."""
        entered, self._entered = self._entered, False
        lease, self._lease = self._lease, None
        # It holds the inputs, and a recomputation may have stopped before using it.
        self.binding.tally.deferred_agreement = None
        failure = sys.exc_info()[1]
        if output is None and failure is not None:
            if entered:  # it failed inside the forward, not before
                self._explain(failure)
                if self._others_wait and isinstance(failure, Exception):
                    self.binding.refuse_call()
            return None
        if self._others_wait:
            self.binding.refuse_call()
            raise NotImplementedError(f"{self.binding.name}: {_NOT_REACHED}")
        assert lease is not None
        lower = partial(self._lower, lease)
        return lower(output) if isinstance(output, DTensor) else tree_map_only(DTensor, lower, output)

    @property
    def _others_wait(self) -> bool:
        """Whether other ranks may wait for this one, because its forward has not reached its attention.

        (In a recomputation, a selective checkpoint may have the output of the attention, on all ranks.)
        """
        return not self.binding.tally.calls and graph_task_id() < 0

    def _lower(self, lease: Lease, output: DTensor) -> torch.Tensor:
        if output.device_mesh is not lease.mesh:
            return output
        lease.hold_in_graph(output)
        binding = self.binding
        return self.dtensor_io.from_bound_mesh(binding.name, output, binding.other_axes)

    def _share(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of a parameter inside the module as this rank's share. (DTensor takes scalars only.)"""
        if isinstance(grad, DTensor) and binding_of(grad.device_mesh) is not None:
            # Gradients of plain parameters are not summed over the other axes, so there it must be whole.
            whole = [Replicate()] * (grad.device_mesh.ndim - 1)
            return grad.redistribute(placements=[Partial(), *whole]).to_local()
        return grad

    def _refuse(self, arguments: dict[str, Any], inputs: tuple[Any, ...], local: tuple[Any, ...]) -> None:
        """Raise for errors that only this rank may see."""
        name = self.binding.name
        try:
            self._other_axes = None if local is inputs else self.dtensor_io.other_axes(self._names, inputs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        check_local(name, local)
        for label, value in _flat_arguments(self._signature, arguments, self._names) if len(arguments) > 3 else ():
            if label == "dropout_p":
                refuse_dropout(name, value)
            if label == "attn_mask" and value is not None:
                Dense(value)  # raises for a tensor that is not a mask
            elif isinstance(value, torch.Tensor):
                raise NotImplementedError(
                    f"{name}: got a tensor {label!r} of shape {tuple(value.shape)} beside query, key and value. Only "
                    "an attn_mask of the whole sequence is supported; apply other tensors outside of the module"
                )
        backends = torch.backends.cuda
        if not (backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled()):
            raise NotImplementedError(
                f"{name}: scaled_dot_product_attention is restricted to the MATH backend, which does not run the "
                "attention as one op. Allow a fused backend (sdpa_kernel), or use kernel=ReferenceKernel() with a "
                "fused backend allowed"
            )

    def _refuse_uneven(self, length: int) -> None:
        """Raise unless the parts are those of torch.chunk: full_tensor() and redistribute() would be wrong."""
        lengths = self.binding.layout_for(length).lengths
        even = chunk_sizes(length, len(lengths))
        if lengths != even:
            raise ValueError(
                f"{self.binding.name}: outputs are DTensors on the sequence axis, and a DTensor of {length} positions "
                f"has {list(even)} on its ranks, but the layout gives {list(lengths)}: use local outputs, or a length "
                f"that {len(lengths)} divides"
            )

    def _explain(self, failure: BaseException) -> None:
        """Add a note to an error of DTensor that explains its cause."""
        if getattr(failure, "__notes__", None):
            return
        if "flex_attention" in str(failure):
            failure.add_note(
                f"{self.binding.name}: flex_attention inside is not supported: the tensors here are DTensors, for "
                "which torch has no rule for it: use ModuleContextParallel, or call context_flex_attention"
            )
        elif type(failure).__module__.startswith("torch._dynamo"):
            failure.add_note(
                f"{self.binding.name}: torch.compile inside the module is not supported, because its tensors are "
                "DTensors: compile the module itself, or a model around it, and do not compile functions inside it"
            )
        elif not self.binding.tally.calls and any(word in str(failure) for word in ("DTensor", NO_COMMUNICATION)):
            failure.add_note(f"{self.binding.name}: {_NOT_REACHED}")
        elif NO_COMMUNICATION in str(failure):
            failure.add_note(
                f"{self.binding.name}: the module gathers or reduces the sequence after its attention. Do that outside "
                "of the module"
            )


# If it were compiled, it would not run after a forward that cannot be traced, and other ranks would wait for this one.
never_compile_alone(ContextParallelState._post_forward, nor_what_it_calls=True)

_NOT_REACHED = (
    "no fused attention op was reached inside the module. Context parallelism needs scaled_dot_product_attention on "
    "the tensors that the module received. torch decomposes it if there is dropout (set it to 0), an attn_mask that "
    "requires grad (detach it), or only the MATH backend (allow a fused one). Apply weights and tables to query, key "
    "or value before the module, not inside it"
    f"{see('No attention was reached')}"
)


def _flat_arguments(
    signature: inspect.Signature, arguments: dict[str, Any], without: tuple[str, ...]
) -> list[tuple[str, Any]]:
    """(name, value) of every argument but some, including those in *args and **kwargs."""
    flat: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        if name in without:
            continue
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.extend(value.items())
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            flat.extend((f"{name}[{index}]", item) for index, item in enumerate(value))
        else:
            flat.append((name, value))
    return flat
