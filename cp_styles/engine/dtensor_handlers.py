"""Handlers in DTensor's dispatcher: they run attention ops on bound DTensors by their strategy.

No other file uses DTensor's dispatcher.

[Note: routing] Handlers for torch's attention ops are installed once and stay installed. The DeviceMesh of the DTensors
decides whether an op is context parallel: a *bound mesh* is a private view of the user's axis that carries a Binding.
(Its first axis is the sequence axis. The axes over which tensor parallelism shards the heads follow; see mesh_axes.py.)
The mesh stays with the tensors: through views, autograd, checkpointing, save_on_cpu, and into the backward, also if the
forward failed. So nothing is switched on or off, and no state can leak. Ops on any other mesh are not changed. The
second output of the forward, the logsumexp, is read only by the backward of the same op. It carries the strategy's
residual (see [Note: residual] in strategies/base.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from cp_styles._compat import (
    DETACH_IN_PLACE_HAS_NO_RULE,
    IS_ANY_TRUE,
    current_autograd_node,
    default_dispatch,
    sdpa_handlers,
    without_communication,
)
from cp_styles.comm.group_state import state_of
from cp_styles.comm.point_to_point import refuse_destroyed
from cp_styles.engine.binding import Binding, refuse_dropout, refuse_grouped
from cp_styles.engine.mesh_axes import (
    HeadShare,
    Placements,
    head_share,
    keeps_apart,
    like_part,
    placed_together,
    refuse_moved,
    refuse_placements,
)
from cp_styles.engine.run import run_backward, run_forward
from cp_styles.kernels import CUDA_CUDNN, CUDA_EFFICIENT, CUDA_FLASH, SDPA_KERNELS, SdpaKernel
from cp_styles.kernels.sdpa import names_of
from cp_styles.strategies import Attention

_LABELS = ("query", "key", "value")
_REQUIRES_GRAD = attrgetter("requires_grad")
_SEQ_DIM = 2  # of every aten attention op: [B, H, S, D]
_PREFIX = "cp_styles:"
_ATTRIBUTE = "_cp_styles_binding"
_serial = itertools.count()


def bound_mesh(binding: Binding, device_type: str) -> DeviceMesh:
    """A new mesh over the group of the binding, and over its other axes. Attention on its DTensors uses the binding.

    No communication.
    """
    refuse_destroyed(binding.group)
    name = f"{_PREFIX}{next(_serial)}"
    if binding.other_axes is None:
        mesh = DeviceMesh.from_group(binding.group, device_type, mesh_dim_names=(name,))
    else:
        mesh = binding.other_axes.around(binding.group, device_type, name)
    # Strategies use the group of the binding. Only DTensor would communicate over this axis: it would gather the
    # sequence for ops other than attention (dropout, a matmul of q and k), and assume equal parts. So forbid it. On the
    # other axes it may communicate.
    return rebind(without_communication(mesh, NO_COMMUNICATION), binding)


NO_COMMUNICATION = "none: nothing may gather the sequence inside a context-parallel module"


def rebind(mesh: DeviceMesh, binding: Binding | None) -> DeviceMesh:
    """Give a bound mesh another binding, or none. No DTensor and no graph may use the mesh any more."""
    setattr(mesh, _ATTRIBUTE, None if binding is None else _Carried(binding))
    return mesh


class _Carried:
    """Holds the binding of a bound mesh, and is pickled as None.

    torch.compile pickles meshes for its cache keys. A binding holds process groups, which cannot be pickled. Graphs do
    not need it, because the configuration is an argument of the op.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = binding

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def binding_of(mesh: DeviceMesh) -> Binding | None:
    """The binding of a bound mesh. None for other meshes."""
    carried = getattr(mesh, _ATTRIBUTE, None)
    if carried is None and (mesh.mesh_dim_names or ("",))[0].startswith(_PREFIX):
        raise RuntimeError(
            "a context-parallel DTensor lost its binding: its mesh was copied (pickle or deepcopy of a DTensor inside "
            "the module?). Copy local tensors instead"
        )
    return None if carried is None else carried.binding


def install() -> None:
    """Install the handlers in DTensor's table, if they are not there.

    It is called before every bound forward and backward, because other code replaces or restores the table (torch's own
    context parallelism does so when it is enabled and disabled). A handler that was there before still handles all
    other meshes.
    """
    table = sdpa_handlers()
    if list(map(type, table.values())).count(_Route) == len(_ROUTES):  # torch hashes ops in Python
        return
    for op, make in _ROUTES.items():
        present = table.get(op)
        if not isinstance(present, _Route):
            table[op] = _Route(op, make, present)


class _Route:
    """The handler of one op in DTensor's table: ours for bound meshes, otherwise the previous one."""

    def __init__(
        self, op: torch._ops.OpOverload, ours: Callable[..., Any], previous: Callable[..., Any] | None
    ) -> None:
        self._names = names_of(op).arguments
        self._defaults = {
            self._names[argument.name]: argument.default_value
            for argument in op._schema.arguments
            if argument.has_default_value()
        }
        self._ours = ours
        self._previous = previous

    def __call__(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, binding, mesh = [], None, None
        for value in (*args, *kwargs.values()):
            if isinstance(value, DTensor):
                tensors.append(value)
                if binding is None and value.device_mesh is not mesh:
                    mesh = value.device_mesh
                    binding = binding_of(mesh)
        if binding is not None:
            values = {**self._defaults, **dict(zip(self._names.values(), args, strict=False))}
            for name, value in kwargs.items():
                values[self._names[name]] = value
            values["mesh"] = mesh
            values["keep"] = torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors))
            with torch.no_grad():
                return self._ours(op, binding, values)
        if self._previous is not None:
            return self._previous(op, args, kwargs)
        return _as_if_absent(op, args, kwargs, tensors)


def carrier(device_type: str, *, masked: bool) -> SdpaKernel:
    """The kernel whose op is called so that the handler gets the call. Tiles then prefer this kernel.

    It is the first kernel of the device that is enabled (``sdpa_kernel``); for a call with a mask, of those that take
    one.
    """
    flags = torch.backends.cuda
    return _carrier(
        device_type, masked, flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.cudnn_sdp_enabled()
    )


@cache
def _carrier(device_type: str, masked: bool, flash: bool, efficient: bool, cudnn: bool) -> SdpaKernel:
    enabled = {CUDA_FLASH: flash, CUDA_EFFICIENT: efficient, CUDA_CUDNN: cudnn}
    kernels = [kernel for kernel in SDPA_KERNELS if kernel.takes_bias or not masked]
    kernels = [kernel for kernel in kernels if kernel.device_type == device_type] or kernels
    return next((kernel for kernel in kernels if enabled.get(kernel, True)), kernels[0])


@dataclass(frozen=True)
class _Values:
    """The storages that a backward will read, with their version counters at the end of the forward; and its number."""

    versions: tuple[tuple[str, StorageWeakRef, int], ...]
    forward: int


def watch_values(binding: Binding, out: Any, inputs: Sequence[Any]) -> None:
    """Make the backward of the attention op that made ``out``, a DTensor, raise if it or an input was changed in place.

    Autograd checks the versions of the DTensors, which do not change when a local tensor is changed. Tensors that the
    backward reads from other storages, after save_on_cpu or in a recomputation, are not checked.
    """
    if out.grad_fn is None:
        return
    found = []
    with torch.no_grad():
        for label, tensor in zip((*_LABELS, "out"), (*inputs, out), strict=True):
            local = tensor.to_local()
            found.append((label, StorageWeakRef(local.untyped_storage()), local._version))
    number = state_of(binding.group).forwards
    out.grad_fn.metadata[_Values] = _Values(tuple(found), number)  # pyright: ignore[reportIndexIssue]


def _forward_of(name: str, values: dict[str, Any]) -> int:
    """The number of the forward of the backward that runs. Raises if the forward's tensors were changed since."""
    node = current_autograd_node()
    then = None if node is None else node.metadata.get(_Values)
    if then is None:
        return 0
    for label, storage, version in then.versions:
        local = values[label].to_local()
        if local._version != version and StorageWeakRef(local.untyped_storage()) == storage:
            raise RuntimeError(
                f"{name}: one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: the attention's {label}, of shape {tuple(local.shape)} here, is at version "
                f"{local._version}; expected version {version} instead. Change a clone of it"
            )
    return then.forward


def _forward(op: torch._ops.OpOverload, binding: Binding, values: dict[str, Any]) -> Any:
    attention, (q, k, v), _ = _attention(op, binding, values)
    query = values["query"]
    out, residual = run_forward(binding, attention, q, k, v, keep=values["keep"])
    mesh = query.device_mesh
    # The residual is not really a DTensor, but must have the type.
    placements = query.placements, (Shard(0), *(Replicate(),) * (mesh.ndim - 1))
    shapes = (*query.shape[:3], out.shape[3]), (residual.numel() * binding.group.size(),)
    out, residual = placed_together((out, residual), mesh, placements, shapes)
    named = {
        "out": out,
        "logsumexp": residual,
        "max_q": query.shape[_SEQ_DIM],
        "max_k": values["key"].shape[_SEQ_DIM],
    }
    # The other outputs are for dropout, nested tensors and debugging, which were refused. The backward ignores them.
    results = []
    for index, name in enumerate(names_of(op).returns):
        if name not in named and op._schema.returns[index].type.kind() == "TensorType":
            named[name] = DTensor.from_local(q.new_empty(0), mesh, [Replicate()] * mesh.ndim, run_check=False)
        results.append(named.get(name))
    return tuple(results)


def _forward_composite(op: torch._ops.OpOverload, binding: Binding, values: dict[str, Any]) -> DTensor:
    # The composite scaled_dot_product_attention reaches DTensor only in inference mode, so there is no backward.
    refuse_grouped(binding.name, values["query"].shape[1], values["key"].shape[1], values["enable_gqa"])
    attention, (q, k, v), _ = _attention(op, binding, values)
    out, _ = run_forward(binding, attention, q, k, v, keep=False)
    return like_part(out, values["query"])


def _backward(op: torch._ops.OpOverload, binding: Binding, values: dict[str, Any]) -> tuple[Any, ...]:
    forward = _forward_of(binding.name, values)
    attention, (q, k, v), share = _attention(op, binding, values)
    grad = _local_grad(values["grad_out"], values["query"].placements, attention)
    out, residual = values["out"].to_local(), values["logsumexp"].to_local()
    *grads, _, _ = run_backward(binding, attention, grad, q, k, v, out, residual, forward=forward)
    parts = values["query"], values["key"], values["value"]
    if share is not None:
        grads[1:] = [share.to_keys(x, part.to_local().shape[1]) for x, part in zip(grads[1:], parts[1:], strict=True)]
    if binding.uneven:
        # Reentrant checkpoints accumulate into a DTensor. A gradient whose strides differ from its tensor's is then
        # cloned, and a DTensor clone assumes even parts. So give it the strides of its tensor.
        grads = [
            grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
            for grad, x in zip(grads, (part.to_local() for part in parts), strict=True)
        ]
    # If the query's heads are sharded and the keys are replicated, each rank has a partial gradient of the keys.
    cut, keys = parts[0].placements, parts[1].placements
    sums = cut
    if keys != cut:
        sums = tuple(theirs if theirs == own else Partial() for own, theirs in zip(cut, keys, strict=True))
    shapes = [(*part.shape[:3], grad.shape[3]) for part, grad in zip(parts, grads, strict=True)]
    shared = placed_together(grads, parts[0].device_mesh, (cut, sums, sums), shapes)
    return *shared, *[None] * (len(names_of(op).returns) - 3)


def _unchanged(op: torch._ops.OpOverload, binding: Binding, values: dict[str, Any]) -> DTensor:
    return values["self"]


def _of_part(op: torch._ops.OpOverload, binding: Binding, values: dict[str, Any]) -> torch.Tensor:
    # Anomaly detection asks whether a gradient has a NaN. Answer for this rank's part.
    return op(values["self"].to_local())


def _attention(
    op: torch._ops.OpOverload, binding: Binding, values: dict[str, Any]
) -> tuple[Attention, tuple[torch.Tensor, ...], HeadShare | None]:
    """The attention of the call, its local query, key and value, and which heads they are. Raises if refused."""
    name = binding.name
    binding.tally.calls += 1
    tensors = [values["query"], values["key"], values["value"]]
    refuse = partial(_refuse, binding, values, tensors)
    if "grad_out" in values:
        refuse()
    else:
        keep = values.get("keep", False)
        dtypes = [tensor.dtype for tensor in tensors]  # autocast has changed them already
        binding.agree_on_call(refuse, values["is_causal"], values["scale"], values.get("attn_mask"), keep, dtypes)
    q, k, v = tensors
    local = q.to_local(), k.to_local(), v.to_local()
    share, whole = (None, None) if q.device_mesh.ndim == 1 else _share(name, tensors)
    if share is not None:
        local = (local[0], *(share.of_keys(x) for x in local[1:]))
    assert binding.lengths is not None  # agreed on before there was a bound mesh
    attention = binding.attention(
        *binding.lengths,
        local,
        is_causal=values["is_causal"],
        attn_mask=values.get("attn_mask"),
        scale=values["scale"],
        preferred=_KERNEL_OF.get(op),
        heads=None if share is None else share.heads,
        whole=whole,
    )
    return attention, local, share


def _refuse(binding: Binding, values: dict[str, Any], tensors: list[DTensor]) -> None:
    """Raise for a call that is not an attention over this module's sequence."""
    name = binding.name
    if values["dropout_p"]:
        refuse_dropout(name, values["dropout_p"])
    if isinstance(values.get("attn_mask"), DTensor):
        raise NotImplementedError(
            f"{name}: attn_mask is a DTensor; pass the mask of the whole sequence as a plain tensor, the same on all "
            "ranks"
        )
    mesh = values["mesh"]
    for label, tensor in zip(_LABELS, tensors, strict=True):
        bound = isinstance(tensor, DTensor) and (
            tensor.device_mesh is mesh or binding_of(tensor.device_mesh) is binding
        )
        if not bound:
            raise ValueError(
                f"{name}: {label} was not made inside this module: it is not a DTensor on the module's sequence axis; "
                "compute it from the module's inputs, or pass it to the module"
            )
        mesh = tensor.device_mesh
    refuse_moved(name, _LABELS, tensors, _SEQ_DIM)


def _share(name: str, tensors: list[DTensor]) -> tuple[HeadShare, tuple[int, int]]:
    """This rank's heads, and the numbers of rows of the batch and of heads that a mask must fit."""
    query, key, _ = tensors
    others = [tensor.placements[1:] for tensor in tensors]
    try:
        names = (query.device_mesh.mesh_dim_names or ())[1:]
        refuse_placements(("query", "key", "value"), others, names, _SEQ_DIM, head_dim=1)
        share = head_share(query, key)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    # A mask's rows of the batch are not cut here: where the batch is, only one for all of it will do.
    batch = 1 if Shard(0) in others[0] else query.shape[0]
    return share, (batch, share.of)


def _local_grad(grad: DTensor, wanted: Placements, attention: Attention) -> torch.Tensor:
    """This rank's rows of the gradient of the output, redistributed to ``wanted`` on the other axes."""
    placement = grad.placements[0]
    if isinstance(placement, Partial):
        placement = Replicate()
    arrives = (placement, *wanted[1:])
    if grad.placements != arrives:
        grad = grad.redistribute(placements=arrives)
    local = grad.to_local()
    if placement == Shard(_SEQ_DIM):
        return local
    if isinstance(placement, Shard):
        raise ValueError(f"the gradient of a context-parallel attention output arrived as {placement}, not Shard(2)")
    # The gradient is whole, in DTensor's order: the parts of the ranks one after the other.
    lengths = attention.q_layout.lengths
    if local.shape[_SEQ_DIM] != sum(lengths):
        raise ValueError(
            f"the gradient of a context-parallel attention output arrived whole, but its {sum(lengths)} positions are "
            f"cut into {list(lengths)}, which DTensor cannot represent; end the module with an output that is sharded "
            "like its inputs"
        )
    return local.narrow(_SEQ_DIM, sum(lengths[: attention.rank]), lengths[attention.rank])


def _as_if_absent(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[DTensor]
) -> Any:
    """What DTensor does without a handler. Faster where torch has no sharding rule and would search for one."""
    if op is torch.ops.aten.scaled_dot_product_attention.default:
        return op.decompose(*args, **kwargs)
    placements = {tensor.placements for tensor in tensors}
    by_rows = all(keeps_apart(placement, 1) for some in placements for placement in some)
    if len(placements) != 1 or not by_rows or "_for_cpu" not in op.name():
        return default_dispatch(op, args, kwargs)
    # Batch and heads are independent of each other, so shards of them attend locally.
    like = tensors[0]
    with torch.no_grad():
        results = op(*(_to_local(x) for x in args), **{name: _to_local(x) for name, x in kwargs.items()})
    shapes = {tuple(tensor.to_local().shape[:2]): tensor.shape[:2] for tensor in reversed(tensors)}
    wrapped = []
    for local in results:
        shape = torch.Size((*shapes[tuple(local.shape[:2])], *local.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        wrapped.append(
            DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
        )
    return tuple(wrapped)


def _to_local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


_KERNEL_OF = {op: kernel for kernel in SDPA_KERNELS for op in (kernel.forward_op, kernel.backward_op)}
_ROUTES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _forward_composite,
    **{kernel.forward_op: _forward for kernel in SDPA_KERNELS},
    **{kernel.backward_op: _backward for kernel in SDPA_KERNELS},
    IS_ANY_TRUE: _of_part,
}
if DETACH_IN_PLACE_HAS_NO_RULE:  # from_local needs it in inference mode
    _ROUTES[torch.ops.aten.detach_.default] = _unchanged
