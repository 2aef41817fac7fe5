"""AttentionContextParallel under torch.compile: the module's ops as DTensors, its attention as one opaque op.

[Note: traced] A compiled module cannot use the eager path, for two reasons. Its ranks would have to agree while it is
traced. And the residual of an attention has a size that is known only at run time, which no output of torch's own
attention op can have. So the call is intercepted before it reaches DTensor (see function_mode.py) and passed to the op
of custom_ops.py. When that op runs, the ranks agree, and it looks up the SequenceScope. All other ops are DTensor ops
on a bound mesh, so an op that would gather the sequence fails as in eager mode. On the bound mesh, each rank declares
that all ranks hold as many tokens as it does, because the true numbers are not known yet. No local result depends on
this.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles._compat import constant_under_compile, never_compile_alone, tree_map_only
from cp_styles.engine.binding import Binding
from cp_styles.engine.dtensor_handlers import bound_mesh
from cp_styles.engine.mesh_axes import keeps_apart, refuse_moved, sequence_placement
from cp_styles.engine.scope import ScopedBinding
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.intercept.subclassing import BoundToThisRun, put_before_class
from cp_styles.styles.dtensor_io import DTensorIO

_STATE = "_context_parallel_traced"

# While it traces, torch.compile can pass a string to a function, but no object. Modules with equal bindings, such as
# the layers of a model, share the object and its string, and so the compiled graph of a layer.
_alive: WeakValueDictionary[str, _BoundMeshes] = WeakValueDictionary()
_known: WeakValueDictionary[tuple[Any, ...], _BoundMeshes] = WeakValueDictionary()
_serial = itertools.count()


class TracedCalls(AttentionCalls):
    """Runs attention calls on DTensors of a bound mesh on the engine, and returns DTensors."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._tally.calls = 0
        with self:
            output = forward(*args, **kwargs)
        if not self._tally.calls:
            raise NotImplementedError(
                f"{self._name}: no scaled_dot_product_attention was called inside the module, on what it received"
            )
        return output

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
    ) -> Any:
        for label, tensor in zip(("query", "key", "value"), (query, key, value), strict=True):
            if not isinstance(tensor, DTensor):
                raise ValueError(f"{self._name}: {label} is not a DTensor, so it was not made from the module's inputs")
            refuse_moved(self._name, (label,), (tensor,), 2)
            for placement in tensor.placements[1:]:
                if not keeps_apart(placement, 1):
                    raise ValueError(
                        f"{self._name}: {label} reaches the attention as {tensor.placements}: beside the sequence, "
                        "only the batch and the heads may be cut"
                    )
        if query.placements != key.placements or query.placements != value.placements:
            raise NotImplementedError(
                f"{self._name}: under torch.compile query, key and value must have the same placements, got "
                f"{query.placements}, {key.placements} and {value.placements}"
            )
        if isinstance(attn_mask, DTensor):
            raise NotImplementedError(
                f"{self._name}: attn_mask is a DTensor; pass the mask of the whole sequence as a plain tensor"
            )
        if attn_mask is not None and len(query.placements) > 1 and any(size != 1 for size in attn_mask.shape[:-2]):
            raise NotImplementedError(f"{self._name}: attn_mask {tuple(attn_mask.shape)}: {_SINGLED_OUT}")
        out = super()._attend(
            query.to_local(),
            key.to_local(),
            value.to_local(),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return DTensor.from_local(out, query.device_mesh, query.placements, run_check=False)


class Traced:
    """Runs one module while torch.compile traces it; see [Note: traced]."""

    def __init__(
        self,
        scoped: ScopedBinding,
        dtensor_io: DTensorIO,
        axis: DeviceMesh,
        inputs: Sequence[tuple[str, int]],
        run: Callable[..., Any],
        *,
        seq_dim: int,
        use_local_output: bool,
    ) -> None:
        """``inputs``: name and position of query, key and value in the module's signature. ``run(forward, args,
        kwargs)`` runs the forward without torch.compile."""
        self.ran = False
        self._holds_parameters = False
        self._scoped, self._dtensor_io, self._axis, self._inputs, self._run = (
            scoped,
            dtensor_io,
            axis,
            tuple(inputs),
            run,
        )
        self._seq, self._heads = Shard(seq_dim), Shard(3 - seq_dim)
        self._use_local_output = use_local_output
        self._name = scoped.name
        self._calls = TracedCalls(scoped, scoped.name, inlined=True)
        key = scoped.unscoped, dtensor_io.axes
        self._meshes = _known.setdefault(key, _BoundMeshes(scoped.unscoped, dtensor_io, axis.device_type))
        self._handle = self._meshes.handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        options = {"seq_dim": self._seq.dim, "use_local_output": self._use_local_output}
        run = copy.deepcopy(self._run, memo)
        made = Traced(self._scoped, self._dtensor_io, self._axis, self._inputs, run, **options)
        made._holds_parameters = self._holds_parameters
        return made

    def attach(self, module: nn.Module) -> None:
        """Change the class of ``module`` to one that uses this object. torch.compile finds a forward by the class."""
        setattr(module, _STATE, self)
        self._holds_parameters = any(True for _ in module.parameters())
        put_before_class(module, _Traced, _traced_members)

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ran = True
        if not torch.compiler.is_dynamo_compiling():
            return self._run(forward, args, kwargs)
        if not self._use_local_output:
            raise NotImplementedError(
                f"{self._name}: use_local_output=False is not supported under torch.compile, where the lengths of the "
                "ranks' parts are not known. Leave it out, or keep this module out of the compiled region"
            )
        if self._holds_parameters:
            raise NotImplementedError(
                f"{self._name}: torch.compile cannot trace plain parameters together with DTensors: apply the "
                "parameters before the module (for example a temperature to the query), or use ModuleContextParallel"
            )
        inputs = [kwargs[name] if name in kwargs else args[place] for name, place in self._inputs]
        came = self._came(inputs)
        bound = _mesh_of(self._handle, came)
        if isinstance(bound, str):
            raise ValueError(f"{self._name}: {bound}")
        others = () if came is None else inputs[0].placements
        new_args, new_kwargs = list(args), dict(kwargs)
        for (name, place), value in zip(self._inputs, inputs, strict=True):
            local = value.to_local() if isinstance(value, DTensor) else value
            lifted = DTensor.from_local(local, bound, [self._seq, *others], run_check=False)
            if name in kwargs:
                new_kwargs[name] = lifted
            else:
                new_args[place] = lifted
        output = self._calls.run(forward, tuple(new_args), new_kwargs)
        return tree_map_only(DTensor, lambda each: self._lowered(each, bound, came), output)

    def _came(self, inputs: Sequence[Any]) -> DeviceMesh | None:
        """The mesh of the inputs if they are DTensors on axes other than the sequence's. Else None."""
        elsewhere = [
            x
            for x in inputs
            if isinstance(x, DTensor) and not (x.device_mesh == self._axis and x.placements == (self._seq,))
        ]
        if not elsewhere:
            return None
        mesh, placements = elsewhere[0].device_mesh, elsewhere[0].placements
        if (
            len(elsewhere) < 3
            or any(x.device_mesh != mesh or x.placements != placements for x in elsewhere)
            or not all(keeps_apart(placement, self._heads.dim) for placement in placements)
            or any(_uneven(x) for x in elsewhere)
        ):
            raise ValueError(
                f"{self._name}: under torch.compile query, key and value must be local tensors, or DTensors on one "
                "mesh with equal placements and even shards (Shard on the heads or the batch, or Replicate)"
            )
        return mesh

    def _lowered(self, output: DTensor, bound: DeviceMesh, came: DeviceMesh | None) -> torch.Tensor:
        if output.device_mesh != bound:
            return output
        _, others = sequence_placement(self._name, output)
        local = output.to_local()
        return local if came is None else DTensor.from_local(local, came, others, run_check=False)


class _BoundMeshes:
    """The bound meshes of modules with equal bindings, by the mesh of their inputs."""

    def __init__(self, binding: Binding, dtensor_io: DTensorIO, device_type: str) -> None:
        self._binding, self._dtensor_io, self._device_type = binding, dtensor_io, device_type
        self._meshes: dict[DeviceMesh | None, DeviceMesh] = {}
        self.handle = f"{next(_serial)}"
        _alive[self.handle] = self

    def of(self, came: DeviceMesh | None) -> DeviceMesh | str:
        """The bound mesh for inputs on the mesh ``came``, cached; or a text that says why there is none."""
        if came not in self._meshes:
            other_axes = None if came is None else self._dtensor_io.of(came)
            if isinstance(other_axes, str):
                return f"query is a DTensor on mesh axes {came and came.mesh_dim_names}: {other_axes}"
            if other_axes is not None and other_axes.seq_axis is not None:
                return "DTensors on the sequence axis and other axes together are not supported under torch.compile"
            if other_axes is not None and self._binding.mask.varies_by_head_or_row:
                return f"{self._binding.mask}: {_SINGLED_OUT}"
            binding = self._binding if other_axes is None else replace(self._binding, other_axes=other_axes)
            self._meshes[came] = bound_mesh(binding, self._device_type)
        return self._meshes[came]


# If a module breaks the graph, torch.compile ends its graph before this function and calls it. The whole module then
# runs without torch.compile, because DTensors on a bound mesh cannot be outputs of a graph.
never_compile_alone(Traced.forward, nor_what_it_calls=True)

_SINGLED_OUT = (
    "under torch.compile, with query, key and value as DTensors on other axes, it is not known which heads or rows of "
    "the batch a rank has: give one mask for all, pass local tensors, or keep this module out of the compiled region"
)


def traced_of(module: nn.Module) -> Traced:
    """The object that :meth:`Traced.attach` has set on a module, or on the module of which it is a copy."""
    return getattr(module, _STATE)


@constant_under_compile  # of a module and of a mesh, which are guarded
def _mesh_of(handle: str, came: DeviceMesh | None) -> DeviceMesh | str:
    return _alive[handle].of(came)


def _uneven(tensor: DTensor) -> bool:
    whole = list(tensor.to_local().shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            whole[placement.dim] *= tensor.device_mesh.size(axis)
    return tuple(whole) != tuple(tensor.shape)


class _Traced(BoundToThisRun):
    """Put before a module's class whose forward is :meth:`Traced.forward`."""


def _traced_members(cls: type[nn.Module]) -> dict[str, Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _STATE).forward(functools.partial(cls.forward, self), args, kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # pyright: ignore[reportFunctionMemberAccess]
    return {"forward": forward}
